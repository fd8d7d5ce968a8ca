"""The trtexec command of an engine asks for what the builder was asked for, in every version of TensorRT."""

import json
from pathlib import Path

import msgspec
import pytest
from bundle_edit import copy_of
from extract_trt_surfaces import EXTRACT
from rtx_engines import build_rtx
from tensorrt_fake import make_module
from tensorrt_models import layer, profile

import mha_deploy as md
from mha_deploy.engine.engine import EngineManifest
from mha_deploy.engine.trtexec import trtexec_command
from mha_deploy.errors import DeployError
from mha_deploy.options import EngineOptions
from mha_deploy.runtime.tensorrt.builder import BuildRequest
from mha_deploy.runtime.tensorrt.engine_verdict import EngineVerdict, PrecisionStatus, PrecisionVerdict
from mha_deploy.runtime.tensorrt.versions import wrap

KEPT = json.loads(EXTRACT.read_text())
VERSIONS = [version for version in sorted(KEPT) if not version.startswith("rtx")]
MODEL = layer().SerializeToString()

# The flags of TensorRT's builder, and those of trtexec that raise or clear them.
RAISED = {
    "FP16": "--fp16",
    "VERSION_COMPATIBLE": "--versionCompatible",
    "WEIGHT_STREAMING": "--allowWeightStreaming",
    "REFIT": "--refit",
    "OBEY_PRECISION_CONSTRAINTS": "--precisionConstraints=obey",
}
OPTIONS = [
    {},
    {"precision": "fp32"},
    {"optimization_level": 2, "workspace_mib": 64},
    {"version_compatible": True},
    {"hardware_compatible": "ampere-plus"},
    {"weight_streaming": True},
    {"refit": "all"},
    {"precision_constraints": True},
]


def manifest_of(version, options):
    """The manifest of an engine that was built with these options."""
    own = {name: options[name] for name in ("precision", "precision_constraints") if name in options}
    chosen = EngineOptions(**{name: value for name, value in options.items() if name not in own})
    request = BuildRequest(onnx=Path("x"), profiles=[profile()], options=chosen, **own)
    precision = PrecisionVerdict(requested="fp16", status=PrecisionStatus.UNKNOWN, counts={})
    about = {"model": "m", "dialect": "trt", "bundle_sha256": "0", "engine_sha256": "0", "engine_bytes": 1}
    about |= {
        "seconds": 1.0,
        "strongly_typed": not version.startswith("8."),
        "kernels": [],
        "findings": [],
        "notes": [],
    }
    return EngineManifest(
        backend="tensorrt", version=version, gpu=None, targets=[], profiles=[], options=request.record(),
        precision=request.precision, verdict=EngineVerdict(nodes=(), precision=precision), **about,
    )  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_the_command_raises_the_flags_that_the_builder_raises(version):
    rt = wrap(make_module(KEPT[version]), "tensorrt")
    for options in OPTIONS:
        try:
            build_rtx(MODEL, rt=rt, profiles=[profile()], **options)
        except DeployError:
            continue  # the version does not have it
        config, trt = rt.module.last.config, rt.module
        found = trtexec_command(manifest_of(version, options), Path("a.onnx"), Path("a.engine"))
        raised = {RAISED[flag] for flag in config._raised}
        assert raised == {flag for flag in found.arguments if flag in RAISED.values()}, options
        assert ("--noTF32" in found.arguments) == (config._cleared == ["TF32"])
        sources = f"--tacticSources={','.join(f'-{name}' for name in rt.can.external_tactic_sources)}"
        assert (sources in found.arguments) == bool(rt.can.external_tactic_sources)
        strong = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        is_strong = strong is not None and bool(trt.last.network._flags >> int(strong) & 1)
        assert ("--stronglyTyped" in found.arguments) == is_strong
        (shapes,) = config._profiles
        for place, kind in enumerate(("min", "opt", "max")):
            texts = [f"{name}:{'x'.join(map(str, each[place]))}" for name, each in shapes.items()]
            assert f"--{kind}Shapes={','.join(texts)}" in found.arguments
        assert ("--builderOptimizationLevel=2" in found.arguments) == ("optimization_level" in options)
        assert ("--memPoolSize=workspace:64M" in found.arguments) == ("workspace_mib" in options)
        assert bool(found.notes) == ("precision_constraints" in options)


def test_several_profiles_are_numbered_and_rtx_is_refused():
    manifest = manifest_of("10.16.1", {})
    both = {**manifest.options, "profiles": manifest.options["profiles"] * 2}
    found = trtexec_command(msgspec.structs.replace(manifest, options=both), Path("a"), Path("b")).arguments
    assert found.index("--profile=0") < found.index("--profile=1")
    with pytest.raises(DeployError, match="TensorRT-RTX"):
        trtexec_command(msgspec.structs.replace(manifest, backend="tensorrt-rtx"), Path("a"), Path("b"))


def test_rtx_is_refused_before_the_build(bundles, tmp_path, refused):
    folder = copy_of(bundles("tiny-gqa"), tmp_path / "bundle")
    refused("build-engine", folder, "--backend", "tensorrt-rtx", "--trtexec", what="TensorRT-RTX")
    assert not (folder / "engines").exists()


@pytest.mark.slow
def test_the_lowered_graph_is_saved_and_computes_the_model(bundles, tmp_path, run_cli, refused):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    bundle = md.open_bundle(copy_of(bundles("tiny-gqa"), tmp_path / "bundle"))
    graph = tmp_path / "lowered.onnx"
    options = ("--backend", "tensorrt-rtx", "--sm", "89", "--name", "saved", "--overwrite")
    assert run_cli("build-engine", bundle.path, *options, "--save-onnx", graph).code == 0
    assert md.validate(bundle, graphs=[graph], probe=False, runtimes=["onnx-reference"]).passed
    taken = options[:-1]
    refused("build-engine", bundle.path, *taken, "--save-onnx", graph, what="exists")
