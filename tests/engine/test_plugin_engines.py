"""Engines that carry the plugin: built with a fake TensorRT, which takes the library and the graph."""

import json
import sys
from pathlib import Path

import onnx
import pytest
from bundle_edit import copy_of
from plugin_libraries import PLUGINS, file_name, write_library

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
import cuda_fake
from fake_engines import fake

from mha_deploy.bundle.folder import open_bundle, sha256
from mha_deploy.engine import build
from mha_deploy.engine import engine as engines
from mha_deploy.engine import plugins as load
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.engine.engine import open_engine
from mha_deploy.engine.plugins import PluginError, load_library
from mha_deploy.errors import DeployError
from mha_deploy.options import EngineOptions
from mha_deploy.runtime.tensorrt.builder import parse_into
from mha_deploy.validation.records import engine_records

HALF = [{"Name": "t", "Dimensions": [1, 2], "Format/Datatype": "Row major linear FP16 format (kLINEAR)"}]
NEW_FIELDS = ("plugins", "in_place", "attention")
REGISTERED = []  # the libraries that registered themselves
GPU = {"name": "NVIDIA H200", "compute_cap": "9.0"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder that libraries are looked for in, and nothing loaded yet."""
    folder = tmp_path / "libraries"
    monkeypatch.setenv("MHA_DEPLOY_PLUGINS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "_loaded", {})
    REGISTERED.clear()
    monkeypatch.setattr(load, "load_library", lambda rt, path: REGISTERED.append(str(path)))
    return folder


@pytest.fixture
def machine(monkeypatch):
    """A machine with a GPU and the fake of a TensorRT."""
    cuda_fake.install(monkeypatch)

    def make(version="8.6.1"):
        rt = fake(version)
        for module in (build, engines):
            monkeypatch.setattr(module, "load", lambda backend: rt)
            monkeypatch.setattr(module, "first_gpu", lambda: GPU)
        return rt

    return make


@pytest.fixture
def built(machine, bundles, tmp_path):
    def make(name="tiny-gqa", precision="fp16", version="8.6.1", **options):
        rt = machine(version)
        bundle = open_bundle(copy_of(bundles(name, precision), tmp_path / f"{name}-{version}"))
        chosen = {"attention": "plugin", "accumulate": "fp16", **options}
        return rt, engine_from_bundle(bundle, EngineOptions(backend="tensorrt", **chosen))

    return make


@pytest.fixture
def parsed(monkeypatch):
    """The operators of the graphs that the parser is given, and the libraries loaded before."""
    seen = []

    def spy(rt, parser, source, names):
        seen.append(([node.op_type for node in onnx.load(source).graph.node], list(REGISTERED)))
        return parse_into(rt, parser, source, names)

    monkeypatch.setattr("mha_deploy.runtime.tensorrt.builder.parse_into", spy)
    return seen


def test_the_library_is_loaded_before_the_plugins_node_is_parsed(place, built, parsed):
    path = write_library(place)
    _, engine = built()
    ((operators, libraries),) = parsed
    assert operators.count("MhaDeployAttention") == 1
    assert "Softmax" not in operators
    assert "MhaDeployLinear" not in operators
    assert libraries == [str(path)]
    manifest = open_engine(engine.path).manifest
    assert manifest.dialect == "plugin"
    assert manifest.attention == {"requested": "plugin", "chosen": "plugin", "accumulate": "fp16"}
    record = {"library": file_name(), "version": "0.1.0", "tensorrt": "8.6.0", "plugins": PLUGINS}
    assert manifest.plugins == [{**record, "sha256": sha256(path)}]
    assert manifest.in_place == {}


def test_fp32_accumulation_is_by_matmuls_of_the_library(place, built, parsed):
    write_library(place)
    _, engine = built(accumulate="fp32")
    ((operators, _),) = parsed
    assert "MhaDeployLinear" in operators
    assert engine.manifest.attention["accumulate"] == "fp32"


@pytest.mark.parametrize(("version", "asked"), [("8.6.1", False), ("10.14.1", True)])
def test_plugins_are_asked_for_aliases_where_tensorrt_has_them(place, built, version, asked):
    write_library(place, tensorrt=version)
    rt, _ = built("tiny-preallocated", version=version)
    assert ("ALIASED_PLUGIN_IO_10_03" in rt.module.last.config._raised) == asked
    rt, _ = built("tiny-gqa", version=version, attention="native")
    assert "ALIASED_PLUGIN_IO_10_03" not in rt.module.last.config._raised


def test_a_native_engine_needs_no_library(place, built):
    _, engine = built(attention="native")
    assert REGISTERED == []
    assert open_engine(engine.path).manifest.plugins == []


def test_a_library_is_loaded_once_a_process(place, built, tmp_path):
    write_library(place)
    rt, engine = built()
    load.load_needed(rt, engine.manifest.plugins)
    assert len(REGISTERED) == 1


def test_an_engine_is_loaded_after_its_library(place, built, monkeypatch):
    path = write_library(place)
    _, engine = built()
    monkeypatch.setattr(load, "_loaded", {})
    REGISTERED.clear()
    rt = fake("8.6.1")
    monkeypatch.setattr(engines, "load", lambda backend: rt)
    with engines.open_engine_runner(engine):
        assert [str(path)] == REGISTERED


def test_an_engine_without_its_library_says_how_to_get_it(place, built, monkeypatch):
    path = write_library(place)
    _, engine = built()
    path.unlink()
    monkeypatch.setattr(load, "_loaded", {})
    (reason,) = engines.reasons_not_to_run(engine)
    assert "There is no plugin library for TensorRT 8 here." in reason
    with pytest.raises(PluginError, match="no plugin library for TensorRT 8") as caught:
        engines.open_engine_runner(engine)
    assert "mha-deploy plugins build" in caught.value.hint
    assert caught.value.exit_code == 3


def test_an_engine_refuses_a_library_of_another_version(place, built, monkeypatch):
    write_library(place)
    _, engine = built()
    write_library(place, version="0.2.0")
    with pytest.raises(PluginError, match="another version of the plugin library") as caught:
        engines.open_engine_runner(engine)
    assert "is 0.2.0, the engine was built with 0.1.0" in caught.value.got


def test_an_engine_refuses_a_library_that_lacks_its_plugin(place, built):
    write_library(place)
    _, engine = built()
    write_library(place, plugins=[PLUGINS[0], PLUGINS[2]])
    with pytest.raises(PluginError, match="lacks what the engine needs") as caught:
        engines.open_engine_runner(engine)
    assert caught.value.got == "MhaDeployLinear version 1"


def test_a_missing_library_is_reported_before_anything_is_built(place, built, parsed):
    with pytest.raises(PluginError, match="no plugin library for TensorRT 8"):
        built()
    assert parsed == []


@pytest.mark.parametrize(
    ("precision", "version", "options", "what"),
    [
        ("fp16", "8.6.1", {"attention": "plug"}, "No such choice for attention"),
        ("fp16", "8.6.1", {"accumulate": "fp64"}, "No such choice for accumulate"),
        ("fp16", "8.6.1", {"attention": "native", "accumulate": "fp32"}, "chooses by itself"),
        ("fp32", "8.6.1", {}, "computes in FP16 and BF16"),
        ("bf16", "8.6.1", {}, r"TensorRT 8\.6\.1 has no BF16"),
        ("fp16", "8.6.1", {"allow_decomposed": True}, "one fused layer"),
        ("fp16", "8.6.1", {"gqa": "fold"}, "attention plugin takes grouped heads as they are"),
        ("fp16", "rtx-1.7.1", {}, "does not take the attention plugin"),
        ("fp16", "rtx-1.7.1", {"attention": "auto"}, "does not take the attention plugin"),
    ],
)
def test_what_cannot_be_is_refused(place, built, precision, version, options, what):
    write_library(place)
    with pytest.raises(DeployError, match=what) as caught:
        built("tiny-padding" if precision == "bf16" else "tiny-gqa", precision, version, **options)
    assert caught.value.got
    assert caught.value.hint


def test_bf16_is_taken_from_10_on(place, built):
    write_library(place, tensorrt="10.0.1", interface="IPluginV3")
    _, engine = built("tiny-padding", "bf16", "10.0.1")
    assert engine.manifest.plugins[0]["library"] == file_name("10")


def test_the_plugins_layers_are_known_by_the_nodes_they_were(place, built, monkeypatch):
    write_library(place)
    layers = [
        {"Name": name, "LayerType": "PluginV2", "Inputs": HALF, "Outputs": HALF}
        for name in ("attention", "attention_qkv/matmul")
    ]
    text = json.dumps({"Layers": layers, "Bindings": []})
    monkeypatch.setattr("tensorrt_fake.INSPECTED", text)
    _, engine = built(accumulate="fp32")
    manifest = open_engine(engine.path).manifest
    assert manifest.all_fused
    assert manifest.verdict.precision.ok
    assert manifest.verdict.nodes[0].kernels == ("attention (plugin)",)
    fused = {kernel["name"]: kernel["fused_attention"] for kernel in manifest.kernels}
    assert fused == {"attention": True, "attention_qkv/matmul": False}


@pytest.mark.parametrize(("linear", "status"), [("PluginV2", "verified"), ("Mystery", "unknown")])
def test_types_that_tensorrt_does_not_tell_are_those_of_the_graph(place, built, monkeypatch, linear, status):
    """8.6 tells none of dynamic sizes: those of the library's layers are known, those of others are not."""
    write_library(place)
    untold = [{**HALF[0], "Format/Datatype": "N/A due to dynamic shapes"}]
    layers = [
        {"Name": name, "LayerType": kind, "Inputs": untold, "Outputs": untold}
        for name, kind in (("attention", "PluginV2"), ("attention_qkv/matmul", linear))
    ]
    monkeypatch.setattr("tensorrt_fake.INSPECTED", json.dumps({"Layers": layers, "Bindings": []}))
    _, engine = built(accumulate="fp32")
    verdict = open_engine(engine.path).manifest.verdict.precision
    assert verdict.status == status, verdict


def test_what_the_engine_needs_is_shown(place, built, run_cli):
    write_library(place)
    _, engine = built()
    shown = " ".join(run_cli("inspect", engine.path).out.split())
    assert f"needs {file_name()} 0.1.0" in shown
    assert "computed by plugin, TensorRT's own projections" in shown
    assert "another build" not in shown
    write_library(place, comment="compiled once more")
    assert "another build of version 0.1.0" in " ".join(run_cli("inspect", engine.path).out.split())
    assert "another build" in engine_records([engine])[0].plugins[1]


def test_a_manifest_with_broken_plugins_is_refused(place, built):
    write_library(place)
    _, engine = built()
    beside = engine.path.with_suffix(".json")
    data = json.loads(beside.read_text())
    for change in ({"plugins": [{"library": 3}]}, {"in_place": 3}, {"attention": {}}):
        beside.write_text(json.dumps(data | change))
        with pytest.raises(DeployError, match="manifest cannot be read"):
            open_engine(engine.path)
    beside.write_text(json.dumps({k: v for k, v in data.items() if k not in NEW_FIELDS}))
    assert open_engine(engine.path).manifest.plugins == []


def test_a_preallocated_cache_is_written_in_place(place, built):
    write_library(place)
    _, engine = built("tiny-preallocated")
    manifest = open_engine(engine.path).manifest
    assert manifest.in_place == {"key_cache_out": "key_cache", "value_cache_out": "value_cache"}
    assert "caches in place: bind key_cache_out to the memory of key_cache" in manifest.notes


def load_refused(path):
    with pytest.raises(DeployError, match="cannot load the plugin library") as caught:
        load_library(fake("8.6.1"), path)
    assert str(path) in caught.value.got
    return caught.value.got


def test_a_library_registers_itself_or_says_why_not(tmp_path):
    code = "char const* mha_deploy_register_plugins(void) { return %s; }"
    load_library(fake("8.6.1"), write_library(tmp_path / "works", code=code % "0"))
    refused = write_library(tmp_path / "refused", code=code % '"no registry"')
    assert load_refused(refused).endswith("no registry")


def test_what_is_no_plugin_library_is_refused(tmp_path):
    assert "mha_deploy_register_plugins" in load_refused(write_library(tmp_path))
    nothing = tmp_path / "nothing.so"
    nothing.write_text("nothing")
    load_refused(nothing)
