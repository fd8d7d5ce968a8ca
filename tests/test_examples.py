"""The scripts in `examples/` run as they are."""

import ast
import runpy
import sys
import tempfile
from pathlib import Path

import pytest
import torch  # noqa: F401 (exports share the exporter's tables: tests/conftest.py)

import mha_deploy as md

SCRIPTS = {path.stem: path for path in (Path(__file__).parents[1] / "examples").glob("*.py")}
_ONE_SCREEN = 62  # lines


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """A function that runs a script in a folder of its own and gives what it printed."""

    def run_script(name, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        runpy.run_path(str(SCRIPTS[name]), run_name="__main__")
        return capsys.readouterr().out

    return run_script


def test_there_are_six_of_one_screen_each():
    assert [name[:2] for name in sorted(SCRIPTS)] == ["01", "02", "03", "04", "05", "06"]
    for name, path in SCRIPTS.items():
        assert len(path.read_text(encoding="utf-8").splitlines()) <= _ONE_SCREEN, name


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_script_calls_is_public(name):
    tree = ast.parse(SCRIPTS[name].read_text(encoding="utf-8"))
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    called = {node.attr for node in attributes if ast.unparse(node.value) == "md"}
    assert called
    assert called <= set(md.__all__)


def test_a_catalog_layer(run, tmp_path):
    printed = run("01_catalog_layer")
    assert "passed: " in printed
    assert "TensorRT 10.14: attention is fused" in printed
    assert (tmp_path / printed.partition("report: ")[2].partition("\n")[0]).is_file()


@pytest.mark.slow
def test_an_own_module(run):
    printed = run("02_own_module")
    assert printed.count("attention: ") == 1
    assert "passed: " in printed
    assert "1/1 attention right" in printed


@pytest.mark.slow
def test_a_hugging_face_model(run):
    pytest.importorskip("transformers")
    printed = run("03_hugging_face")
    assert "2 attentions fused" in printed
    assert "passed: " in printed


@pytest.mark.slow  # each of its three calls has tests of its own
def test_an_onnx_file_from_elsewhere(run):
    printed = run("04_foreign_onnx")
    assert printed.count("fused: ") == 1
    assert "causal: True" in printed
    assert "2/2 outputs within budget" in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-dynamic", "tiny-preallocated"])
def test_decode(run, name):
    printed = run("05_decode", name)
    assert printed.count(": passed\n") == 3  # the golden cases, and two traces
    assert "passed: " in printed


def test_the_lines_of_decode(run, bundles, monkeypatch):
    bundle, validate = bundles("tiny-dynamic"), md.validate
    quick = {"runtimes": ["ort-cpu"], "probe": False, "latency": False}
    monkeypatch.setattr(md, "export", lambda *_, **__: bundle)
    monkeypatch.setattr(md, "validate", lambda bundle, **_: validate(bundle, **quick))
    printed = run("05_decode")
    assert "passed: " in printed
    assert printed.count(": passed\n") == 1


@pytest.mark.slow
def test_an_own_cache(run):
    printed = run("06_own_cache")
    assert "passed: " in printed
    assert " 0 of " in printed
