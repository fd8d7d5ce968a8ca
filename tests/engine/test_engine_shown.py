"""An engine's manifest is not believed: what it says of fusion and precision must stand in the plan."""

import functools
import hashlib
import json
import shutil
from pathlib import Path

import pytest
from bundle_edit import copy_of
from quantized_models import samples, transformer

import mha_deploy as md
from mha_deploy.bundle.folder import MANIFEST, open_bundle, sha256
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.engine.engine import manifest_path, open_engine
from mha_deploy.errors import DeployError
from mha_deploy.options import EngineOptions

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
REQUIRED = ("--require-fused", "--require-precision", "--runtime", "ort-cpu", "--no-report", "--no-probe")


def build(bundle, **changes):
    options = {"backend": "tensorrt-rtx", "targets": "8.9", "allow_decomposed": True, **changes}
    return engine_from_bundle(bundle, EngineOptions(**options)).path


@pytest.fixture(scope="module")
def others(bundles, rtx_engine, tmp_path_factory):
    """A function that gives the plan of another model; the last one has the same layers and other weights."""
    folder = tmp_path_factory.mktemp("others")

    @functools.cache
    def make(other):
        if other == "of other weights":
            return build(md.export("tiny-gqa", folder / "reseeded", seed=7, golden=("min",)))
        if other == "of another precision":
            return rtx_engine(precision="fp32").path
        return build(open_bundle(copy_of(bundles("tiny-wide-heads"), folder / "wide")))

    return make


@pytest.fixture
def engine(rtx_engine, tmp_path):
    """An engine in a bundle of its own, to be altered."""
    built = rtx_engine().path
    copy = shutil.copytree(built.parents[1], tmp_path / "bundle")
    return Path(copy) / built.relative_to(built.parents[1])


def edit(engine, change):
    path = manifest_path(engine)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def forge(engine, plan):
    """Put another plan in the place of an engine's, and make its manifest agree, as a forger would."""
    engine.write_bytes(plan)
    digest = hashlib.sha256(plan).hexdigest()
    edit(engine, lambda data: data.update(engine_bytes=len(plan), engine_sha256=digest))


def test_an_engine_as_it_was_built_passes(engine, run_cli):
    opened = open_engine(engine)
    assert opened.is_confirmed
    assert opened.manifest.all_fused
    assert opened.manifest.has_requested_types
    done = run_cli("validate", engine.parents[1], *REQUIRED)
    assert done.code == 0, done.err


def test_what_is_no_plan_is_no_engine(engine, refused):
    for plan in (b"", b"<!doctype html>\n<html></html>\n", b"\x7fELF" + bytes(4000)):
        forge(engine, plan)
        with pytest.raises(DeployError, match="plan"):
            open_engine(engine)
    bundle = engine.parents[1]
    refused("validate", bundle, *REQUIRED, what="plan", got=str(engine), hint="rebuild")
    refused("inspect", engine, what="plan", got=str(engine), hint="rebuild")


def test_the_beginning_of_a_plan_shows_nothing(engine, run_cli):
    for cut in (4096, 64, 4):
        forge(engine, engine.read_bytes()[:cut])
        assert not open_engine(engine).manifest.all_fused
    assert run_cli("validate", engine.parents[1], *REQUIRED).code == 1


OTHERS = [
    "of another precision",
    *(pytest.param(other, marks=pytest.mark.slow) for other in ("of another model", "of other weights")),
]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("whose", ["own manifest", "foreign manifest"])
def test_the_plan_of_another_model_is_not_verified(engine, others, run_cli, other, whose):
    bundle = engine.parents[1]
    if whose == "foreign manifest":
        shutil.copy(manifest_path(others(other)), manifest_path(engine))
        names = {"model": "tiny-gqa", "precision": "fp16", "bundle_sha256": sha256(bundle / MANIFEST)}
        edit(engine, lambda data: data.update(names))
    forge(engine, others(other).read_bytes())
    manifest = open_engine(engine).manifest
    assert not manifest.all_fused
    assert not manifest.has_requested_types
    done = run_cli("validate", bundle, *REQUIRED)
    assert done.code != 0, done.out
    assert "fp16 (verified)" not in done.out


def claim_fused(data):
    for node in data["verdict"]["nodes"]:
        node.update(status="fused", kernels=["_gemm_mha_v2_0x716a723e0ae0a4a3ec81ab57ad16c327"], reasons=[])


def claim_fused_by_any_kernel(data):
    for node in data["verdict"]["nodes"]:
        node.update(status="fused", kernels=[data["kernels"][-1]["name"]], sources=["log"])


@pytest.mark.parametrize("claim", [claim_fused, claim_fused_by_any_kernel])
def test_a_decomposed_engine_cannot_claim_to_be_fused(others, tmp_path, claim):
    decomposed = others("of another precision")
    copy = shutil.copytree(decomposed.parents[1], tmp_path / "b")
    path = Path(copy) / decomposed.relative_to(decomposed.parents[1])
    edit(path, claim)
    manifest = open_engine(path).manifest
    assert manifest.fused_count == (0, 1)
    assert manifest.verdict.nodes[0].reasons


def claim_eight_bits(data):
    gemms = {"kernels": 9, "quantized": {"fp8": 9}, "other_types": {}, "unknown": [], "unquantized": []}
    data["verdict"]["precision"].update(gemms=gemms)


def test_an_engine_cannot_claim_gemms_in_eight_bits_that_its_plan_does_not_show(engine):
    edit(engine, claim_eight_bits)
    assert open_engine(engine).manifest.verdict.precision.gemms is None
    edit(engine, lambda data: data.update(backend="tensorrt", version="10.13.0"))
    forge(engine, b"ftrt" + bytes(1000))
    assert "GEMM" not in open_engine(engine).shown.precision_summary


@pytest.mark.slow
def test_an_attention_in_eight_bits_does_not_hide_the_precision_of_its_engine(tmp_path):
    options = {"precision": "int8", "data": samples(), "quantize_attention": True, "golden": ("opt",)}
    axes = {"B": "1:2:2", "S": "1:8:16"}
    bundle = md.export(transformer(tmp_path / "small.onnx"), tmp_path / "bundle", axes=axes, **options)
    built = engine_from_bundle(
        bundle, EngineOptions(backend="tensorrt-rtx", targets="8.9", allow_decomposed=True)
    )
    opened = open_engine(built.path)
    assert built.manifest.has_requested_types
    assert opened.manifest.verdict.precision == built.manifest.verdict.precision


MISFITS = {
    "model": lambda data: data.update(model="bert-base"),
    "precision": lambda data: data.update(precision="bf16"),
    "attentions": lambda data: data["verdict"].update(nodes=[*data["verdict"]["nodes"], other_node(data)]),
    "no attention": lambda data: data["verdict"].update(nodes=[]),
    "profiles": lambda data: data.update(profiles=[{"B": "1:2:4", "S": "1:16:32"}]),
    "axes": lambda data: data.update(profiles=[{"T": "1:2:4"}]),
    "inputs": lambda data: data["options"].update(profiles=[{"y": [[1], [1], [1]]}]),
}


def other_node(data):
    return {**data["verdict"]["nodes"][0], "node": "another"}


@pytest.mark.parametrize("profile", [None, "0", [0]])
def test_a_profile_that_is_no_number_is_refused(engine, profile):
    edit(engine, lambda data: data["verdict"]["nodes"][0].update(profile=profile))
    with pytest.raises(DeployError):
        open_engine(engine)


@pytest.mark.parametrize("change", MISFITS.values(), ids=MISFITS)
def test_a_manifest_that_does_not_fit_its_bundle_is_refused(engine, change):
    edit(engine, change)
    with pytest.raises(DeployError) as caught:
        open_engine(engine).check_bundle(engine.parents[1])
    assert str(engine) in caught.value.got


def test_a_plan_that_only_tensorrt_can_read_counts_only_where_it_runs(engine, run_cli):
    """An engine of TensorRT for a GPU: here nobody can say what is in it."""
    edit(engine, lambda data: data.update(backend="tensorrt", version="10.13.0"))
    edit(engine, lambda data: [node.update(sources=["inspector"]) for node in data["verdict"]["nodes"]])
    forge(engine, b"ftrt" + bytes(1000))
    assert not open_engine(engine).is_confirmed
    bundle = engine.parents[1]
    done = run_cli("validate", bundle, *REQUIRED)
    assert done.code == 1, done.err
    assert "not verified" in done.out
    done = run_cli("validate", bundle, *REQUIRED[2:])
    assert done.code == 0, done.err
    assert "fp16 (verified)" not in done.out
    assert "not verified" in run_cli("inspect", bundle).out
