"""The backend against the API of every TensorRT it supports: no name is used where it does not exist."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from extract_trt_surfaces import EXTRACT, extract, read_surfaces
from rtx_engines import build_rtx
from tensorrt_fake import make_module
from tensorrt_models import layer, needs_rtx, profile
from tensorrt_names import FILES, OBJECTS, USED

from mha_deploy.runtime import tensorrt as package
from mha_deploy.runtime.tensorrt.versions import (
    PROBES,
    EngineError,
    has,
    load,
    probe,
    wrap,
)

SOURCE = Path(package.__file__).parent
SHARED = Path(__file__).parents[3] / "shared" / "trt-api"
KEPT = json.loads(EXTRACT.read_text())
VERSIONS = sorted(KEPT)

needs_surfaces = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"the full API surfaces are not beside the checkout ({SHARED.name})"
)


def surfaces() -> list[pytest.param]:
    """The kept extracts, and the full surfaces where they are at hand."""
    found = [pytest.param(KEPT[version], id=f"extract-{version}") for version in VERSIONS]
    full = read_surfaces(SHARED) if SHARED.is_dir() else {}
    return found + [pytest.param(surface, id=f"full-{version}") for version, surface in full.items()]


def fake(surface: dict):
    backend = "tensorrt-rtx" if surface["version"].startswith("rtx") else "tensorrt"
    return wrap(make_module(surface), backend)


# -- the table says what the code uses ------------------------------------------------------------------


def used_names(source: str) -> Iterator[str]:
    """The TensorRT names in a file: what hangs on `trt`, on `rt.module`, or on an object of the table."""
    tree = ast.parse(source)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        root, parts = _chain(node)
        if isinstance(root, ast.Name) and root.id == "rt" and parts[:1] == ["module"]:
            root, parts = ast.Name("trt"), parts[1:]
        if isinstance(root, ast.Name) and root.id == "self":  # what an object keeps goes by the same names
            root, parts = ast.Name(parts[0].removeprefix("_")), parts[1:]
        parts = [part for part in parts if not part.startswith("__")]
        if not isinstance(root, ast.Name) or not parts:
            continue
        if root.id == "trt":
            yield ".".join(parts[:2])
        elif root.id in OBJECTS:
            yield f"{OBJECTS[root.id]}.{parts[0]}"


def _chain(node: ast.AST) -> tuple[ast.AST, list[str]]:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return node, parts


def test_the_code_uses_exactly_the_names_of_the_table():
    found = {name for file in FILES for name in used_names((SOURCE / file).read_text())}
    assert found == set(USED)


def test_the_walker_sees_a_name_that_is_not_in_the_table():
    source = "def f(rt, config):\n    trt = rt.module\n    config.brand_new = trt.BuilderFlag.NOVEL\n"
    assert set(used_names(source)) == {"IBuilderConfig.brand_new", "BuilderFlag.NOVEL"}
    assert set(used_names("self._context.brand_new()")) == {"IExecutionContext.brand_new"}


def test_only_the_files_of_the_table_hold_tensorrt_objects():
    others = [path for path in SOURCE.glob("*.py") if path.name not in FILES]
    for path in others:
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        held = {"trt", "builder", "network", "parser", "config", "context", "runtime_config"}
        assert not names & held, path.name


def test_tensorrt_objects_go_by_the_names_of_the_table():
    known = {*OBJECTS, "trt", "severity", "monitor", "module"}
    for file in FILES:
        for node in ast.walk(ast.parse((SOURCE / file).read_text())):
            if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name):
                assert node.annotation.id != "Any" or node.arg in known, f"{file}: {node.arg}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
                called = node.value.func
                root = _chain(called)[0]
                held = isinstance(root, ast.Name) and root.id in OBJECTS
                assert not held, f"{file}:{node.lineno}: name the result before using it"


def test_every_guard_is_a_capability():
    can = probe(make_module(KEPT[VERSIONS[0]]))
    for name, guard in USED.items():
        assert guard is None or hasattr(can, guard), name


# -- the table holds in every version -------------------------------------------------------------------


@pytest.mark.parametrize("surface", surfaces())
def test_each_name_exists_where_its_capability_says_so(surface):
    rt = fake(surface)
    missing = [
        name
        for name, guard in USED.items()
        if (guard is None or getattr(rt.can, guard)) and not has(rt.module, name)
    ]
    assert missing == []


@pytest.mark.parametrize("surface", surfaces())
def test_a_capability_is_its_names(surface):
    rt = fake(surface)
    for field, names in PROBES.items():
        there = all(has(rt.module, name) for name in names)
        hollow = bool(rt.can.compute_capabilities) and field in ("timing_cache", "version_compatible")
        assert getattr(rt.can, field) == (there and not hollow), field


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_tells_its_scratch_memory_in_one_way_or_the_other(version):
    can = probe(make_module(KEPT[version]))
    assert can.device_memory_v1 or can.device_memory_v2


@needs_surfaces
def test_the_kept_extract_is_fresh():
    full = read_surfaces(SHARED)
    assert json.loads(EXTRACT.read_text()) == {version: extract(full[version]) for version in full}


@needs_rtx
def test_the_real_rtx_has_what_its_surface_says():
    assert load("tensorrt-rtx").can == probe(make_module(KEPT["rtx-1.7.1"]))


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("8.6.1", {"strongly_typed_flag": False, "fp16_flag": True, "bf16_type": False, "attention": False}),
        ("8.6.1", {"progress_monitor": False, "refit": True, "weight_streaming": False}),
        ("8.6.1", {"external_tactic_sources": ("CUBLAS", "CUBLAS_LT", "CUDNN"), "timing_cache": True}),
        ("10.0.1", {"strongly_typed_flag": True, "attention": False}),
        ("10.14.1", {"attention": True, "fp16_flag": True}),
        ("11.4.0", {"strongly_typed_flag": True, "external_tactic_sources": (), "fp16_flag": False}),
        ("rtx-1.7.1", {"strongly_typed_flag": True, "timing_cache": False, "version_compatible": False}),
        ("rtx-1.7.1", {"hardware_compatibility": (), "builds_without_gpu": True}),
        ("8.6.1", {"shared_profiles": False, "device_memory_v2": False, "kernel_specialization": False}),
        ("10.0.1", {"shared_profiles": True, "device_memory_v2": False, "kernel_specialization": False}),
        ("11.4.0", {"shared_profiles": True, "device_memory_v2": True, "kernel_specialization": False}),
        ("rtx-1.7.1", {"shared_profiles": True, "device_memory_v2": True, "kernel_specialization": True}),
    ],
)
def test_what_the_versions_are_known_to_have(version, expected):
    can = probe(make_module(KEPT[version]))
    assert {name: getattr(can, name) for name in expected} == expected


# -- and the build runs in every version ----------------------------------------------------------------

MODEL = layer().SerializeToString()
OPTIONS = [
    {},
    {"precision": "fp32"},
    {"precision": "bf16"},
    {"targets": "8.9"},
    {"optimization_level": 2, "workspace_mib": 1},
    {"timing_cache": b"earlier"},
    {"version_compatible": True},
    {"hardware_compatible": "ampere-plus"},
    {"hardware_compatible": "same-compute-capability"},
    {"weight_streaming": True},
    {"refit": "all"},
    {"refit": "identical"},
    {"allow_decomposed": True},
    {"precision_constraints": True},
]


def refused(version: str) -> set[str]:
    """The options each version is known not to have, by what its release notes and bindings say."""
    eight = version.startswith("8")
    rtx = version.startswith("rtx")
    early = eight or version == "10.0.1"
    rules = {
        "bf16": eight,
        "targets": not rtx,
        "timing_cache": rtx,
        "version_compatible": rtx,
        "ampere-plus": rtx,
        "same-compute-capability": early or rtx,
        "weight_streaming": eight,
        "identical": eight,
        "precision_constraints": not eight,
    }
    return {rule for rule, holds in rules.items() if holds}


def rule_of(options: dict) -> str:
    for key in ("hardware_compatible", "refit", "precision"):
        if key in options:
            return options[key]
    return next(iter(options), "")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_option_is_set_or_refused_by_name(version):
    rt = fake(KEPT[version])
    for options in OPTIONS:
        if rule_of(options) in refused(version):
            with pytest.raises(EngineError, match=version.replace("rtx-", "")) as caught:
                build_rtx(MODEL, rt=rt, profiles=[profile()], **options)
            assert caught.value.got, options
        else:
            plan = build_rtx(MODEL, rt=rt, profiles=[profile()], **options).plan
            assert plan == b"ftrt plan", options


def test_8_6_is_weakly_typed_with_fp16_allowed_and_no_outside_libraries():
    rt = fake(KEPT["8.6.1"])
    built = build_rtx(MODEL, rt=rt, profiles=[profile()])
    trt, last = rt.module, rt.module.last
    assert not built.strongly_typed
    assert last.network._flags == 1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)
    assert last.config._raised == ["FP16"]
    assert last.config._cleared == ["TF32"]
    left = [source.name for source in trt.TacticSource if last.config._sources >> int(source) & 1]
    assert left == ["EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS"]
    assert built.timing_cache == b"+timings"


@pytest.mark.parametrize("version", ["10.0.1", "10.14.1", "10.16.1", "11.0.0", "11.4.0", "rtx-1.7.1"])
def test_later_versions_are_strongly_typed_without_precision_flags(version):
    rt = fake(KEPT[version])
    built = build_rtx(MODEL, rt=rt, profiles=[profile()])
    strong = 1 << int(rt.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    assert built.strongly_typed
    assert rt.module.last.network._flags & strong
    assert rt.module.last.config._raised == []


def test_precision_constraints_hold_every_layer_to_its_type_in_the_graph():
    rt, model = fake(KEPT["8.6.1"]), layer()
    island = onnx.helper.make_node("Cast", ["y"], ["wide"], to=onnx.TensorProto.FLOAT)
    model.graph.node.extend([island, onnx.helper.make_node("Shape", ["wide"], ["size"])])
    build_rtx(model, rt=rt, profiles=[profile()], precision_constraints=True)
    *layers, shape = rt.module.last.network._layers
    assert rt.module.last.config._raised == ["FP16", "OBEY_PRECISION_CONSTRAINTS"]
    assert [each.precision.name for each in layers] == ["HALF"] * 5 + ["FLOAT"]
    assert [each._typed.name for each in layers] == ["HALF"] * 5 + ["FLOAT"]
    assert "precision" not in vars(shape)


@pytest.mark.parametrize("version", ["10.14.1", "11.4.0", "rtx-1.7.1"])
def test_allow_decomposed_reaches_the_attention_layer(version):
    rt = fake(KEPT[version])
    build_rtx(MODEL, rt=rt, profiles=[profile()], allow_decomposed=True)
    kinds = rt.module.LayerType
    found = [each for each in rt.module.last.network._layers if each.type == kinds.ATTENTION_INPUT]
    assert [each.attention.decomposable for each in found] == [True]


def test_8_6_names_the_refused_node_by_its_place_in_the_file():
    model = layer()
    model.graph.node[3].op_type = "Refused"
    rt = fake(KEPT["8.6.1"])
    with pytest.raises(EngineError, match="node att0: Refused: no importer"):
        build_rtx(model, rt=rt, profiles=[profile()])


def test_a_stale_timing_cache_is_dropped_and_reported():
    rt = fake(KEPT["8.6.1"])
    built = build_rtx(MODEL, rt=rt, profiles=[profile()], timing_cache=b"stale")
    assert "timing cache" in built.notes[0]
    assert built.timing_cache == b"+timings"


@pytest.mark.parametrize("version", VERSIONS)
def test_progress_is_reported_where_the_version_has_it(version):
    rt, reported = fake(KEPT[version]), []
    build_rtx(MODEL, lambda *event: reported.append(event), rt=rt, profiles=[profile()])
    expected = [("Building", 0, 2), ("Building", 1, 2), ("Building", 2, 2)]
    assert reported == ([] if version == "8.6.1" else expected)


def test_a_callback_that_fails_cancels_the_build_itself():
    rt = fake(KEPT["11.4.0"])

    def fail(*event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_rtx(MODEL, fail, rt=rt, profiles=[profile()])
    assert rt.module.last.cancelled


def test_the_hint_fits_the_version():
    rt = fake(KEPT["8.6.1"])
    with pytest.raises(EngineError, match=r"8\.6\.1") as caught:
        build_rtx(MODEL, rt=rt, weight_streaming=True)
    assert caught.value.hint == "use TensorRT 10 or later"


@pytest.mark.parametrize("version", ["8.6.1", "10.16.1", "11.4.0"])
def test_the_inspector_is_used_where_the_builder_has_a_gpu(version):
    rt = fake(KEPT[version])
    built = build_rtx(MODEL, rt=rt, profiles=[profile()])
    assert [kernel.name for kernel in built.kernels["inspector"]] == ["fake"]
