"""`mha-deploy plugins`: what is printed, and the exit codes."""

import json

import pytest
from plugin_libraries import fake_tensorrt, file_name, write_library

from mha_deploy.runtime.tensorrt.versions import load


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MHA_DEPLOY_PLUGINS", str(tmp_path / "libraries"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "libraries"


@pytest.fixture
def tensorrt_8(monkeypatch):
    """TensorRT 8.6 instead of whatever is installed."""
    monkeypatch.setattr("mha_deploy.runtime.tensorrt.versions.load", lambda backend: fake_tensorrt("8.6.1"))


def test_a_library_is_listed_with_its_plugins(run_cli, folder):
    path = write_library(folder)
    done = run_cli("plugins", "list")
    assert done.code == 0
    assert done.out.startswith(f"{path}\n")
    assert "plugins MhaDeployAttention 1, MhaDeployLinear 1" in done.out
    assert "for TensorRT 8.6.0 (IPluginV2DynamicExt)" in done.out


def test_the_list_reports_whether_a_library_fits_tensorrt(run_cli, folder, monkeypatch):
    write_library(folder)
    monkeypatch.setattr("mha_deploy.engine.plugins.installed_version", lambda package: "10.16.1")
    assert "does not fit TensorRT 10.16.1 here" in run_cli("plugins", "list").out
    monkeypatch.setattr("mha_deploy.engine.plugins.installed_version", lambda package: "8.6.1")
    (library,) = json.loads(run_cli("plugins", "list", "--json").out)["libraries"]
    assert library["fits"] is True
    assert library["tensorrt_here"] == "8.6.1"


def test_a_broken_library_is_listed_with_its_problem(run_cli, folder):
    folder.mkdir()
    (folder / file_name()).write_text("nothing")
    done = run_cli("plugins", "list")
    assert done.code == 0
    assert "cannot be used: The plugin library cannot be loaded here." in done.out


def test_an_empty_list_says_how_to_build_a_library(run_cli, folder):
    done = run_cli("plugins", "list")
    assert done.code == 0
    assert done.out.startswith(f"no plugin library in {folder}, ")
    assert json.loads(run_cli("plugins", "list", "--json").out)["libraries"] == []


def test_where_prints_the_path_that_would_be_loaded(run_cli, folder, tensorrt_8):
    path = write_library(folder)
    done = run_cli("plugins", "where")
    assert (done.code, done.out) == (0, f"{path}\n")


def test_where_exits_with_1_without_a_library(run_cli, folder, tensorrt_8):
    done = run_cli("plugins", "where")
    assert (done.code, done.out) == (1, "")
    assert "error: There is no plugin library for TensorRT 8 here." in done.err
    assert "try: build it with `mha-deploy plugins build`" in done.err


def test_tensorrt_rtx_takes_no_plugin(run_cli, folder):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    done = run_cli("plugins", "where", "--backend", "tensorrt-rtx")
    assert done.code == 1
    assert "does not take the attention plugin" in done.err
    assert load("tensorrt-rtx").can.plugins is False


def test_missing_headers_are_reported(run_cli, folder, tmp_path):
    done = run_cli("plugins", "build", "--tensorrt-include", tmp_path)
    assert done.code == 3
    assert "error: The folder has no headers of TensorRT." in done.err
    assert not folder.exists()


def test_the_attention_of_an_engine_is_refused_before_an_export(run_cli, folder, tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    options = ("--backend", "tensorrt-rtx", "--attention", "plugin")
    done = run_cli("deploy", "tiny-mha", "-o", tmp_path / "bundle", *options)
    assert done.code == 3
    assert "does not take the attention plugin" in done.err
    assert not (tmp_path / "bundle").exists()
