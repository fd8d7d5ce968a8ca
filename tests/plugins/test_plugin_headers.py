"""Headers are found where they lie, the likeliest place first; what is missing is named with its remedy."""

import pytest

import mha_deploy.api  # noqa: F401 (errors name its keywords)
from mha_deploy.engine import plugins as headers
from mha_deploy.engine.plugins import PARTS, PluginError, find_parts

VERSIONS = {
    "NvInferVersion.h": "#define MAJOR_HERE 11\n#define NV_TENSORRT_MAJOR MAJOR_HERE //!< major\n"
    "#define NV_TENSORRT_MINOR 1 //!< minor\n#define NV_TENSORRT_PATCH 0\n",
    "cudnn_version.h": "#define CUDNN_MAJOR 9\n#define CUDNN_MINOR 19\n#define CUDNN_PATCHLEVEL 2\n",
    "cuda.h": "#define CUDA_VERSION 12080\n",
}


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(VERSIONS.get(name, ""))
    return folder


def files_of(key):
    return next(part.files for part in PARTS if part.key == key)


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine with nothing on it but what a test puts there: packages, and two folders of the system."""
    packages = tmp_path / "packages"
    monkeypatch.setattr(headers.sys, "path", [str(packages)])
    monkeypatch.setattr(headers.sys, "prefix", str(tmp_path / "prefix"))
    paths = {"purelib": str(packages), "include": str(tmp_path / "python" / "include")}
    monkeypatch.setattr(headers.sysconfig, "get_paths", lambda: paths)
    monkeypatch.setattr(headers, "_SYSTEM", (tmp_path / "system",))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("TENSORRT_ROOT", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    # A toolkit of this machine must not help out.
    write(tmp_path / "system", *(name for part in PARTS for name in part.files))
    return tmp_path


def found(given=None):
    return {each.part.key: each for each in find_parts(given or {})}


def test_the_system_is_the_last_place(bare):
    everything = found()
    assert {each.by for key, each in everything.items() if key != "cuda_include"} == {"the system"}
    assert everything["tensorrt_include"].version == "11.1.0"
    assert everything["cudnn_include"].version == "9.19.2"


def test_what_the_command_line_names_comes_first(bare, monkeypatch):
    named = write(bare / "named", *files_of("tensorrt_include"))
    monkeypatch.setenv("TENSORRT_ROOT", str(write(bare / "root", *files_of("tensorrt_include"))))
    each = found({"tensorrt_include": named})["tensorrt_include"]
    assert (each.paths, each.by) == ((named,), "--tensorrt-include")
    assert found()["tensorrt_include"].paths == (bare / "root",)


def test_the_environment_comes_before_packages(bare, monkeypatch):
    write(bare / "packages" / "nvidia" / "cu13" / "include", *files_of("cuda_include"))
    assert found()["cuda_include"].by == "a Python package"
    home = write(bare / "cuda" / "include", *files_of("cuda_include"))
    monkeypatch.setenv("CUDA_HOME", str(home.parent))
    assert found()["cuda_include"].paths == (home,)
    assert found()["cuda_include"].version == "12.8"


def test_packages_are_found_where_pip_puts_them(bare):
    cudnn = write(bare / "packages" / "nvidia" / "cudnn" / "include", *files_of("cudnn_include"))
    frontend = write(bare / "packages" / "include", *files_of("cudnn_frontend_include"))
    assert found()["cudnn_include"].paths == (cudnn,)
    assert found()["cudnn_frontend_include"].paths == (frontend,)
    # cuDNN is no CUDA, though its folder begins with the same letters.
    assert cudnn not in found()["cuda_include"].paths


def test_cuda_may_lie_in_several_folders(bare):
    first, *others = files_of("cuda_include")
    runtime = write(bare / "packages" / "nvidia" / "cuda_runtime" / "include", first)
    blas = write(bare / "packages" / "nvidia" / "cublas" / "include", *others)
    assert found()["cuda_include"].paths == (runtime, blas)


def test_everything_that_is_missing_is_reported_at_once(bare):
    for name in (*files_of("tensorrt_include"), *files_of("cudnn_frontend_include")):
        (bare / "system" / name).unlink()
    with pytest.raises(PluginError, match="missing") as caught:
        find_parts({})
    assert "TensorRT (NvInferRuntime.h, NvInferVersion.h), looked in" in caught.value.got
    assert str(bare / "system") in caught.value.got
    assert "cuDNN (" not in caught.value.got
    assert "pip install nvidia-cudnn-frontend, or cudnn_frontend_include=PATH" in caught.value.hint


def test_a_folder_without_the_headers_is_refused(bare):
    with pytest.raises(PluginError, match=r"no headers of cuDNN\.") as caught:
        find_parts({"cudnn_include": bare})
    assert str(bare) in caught.value.got
    assert caught.value.hint == "cudnn_include=FOLDER, the one with cudnn.h"


def program(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_compiler_is_the_named_one_else_that_of_the_toolkit_else_that_on_the_path(bare, monkeypatch):
    on_path = program(bare / "bin" / "nvcc")
    assert found()["nvcc"].paths == (on_path,)
    program(bare / "cuda" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(bare / "cuda"))
    assert found()["nvcc"].by == "CUDA_HOME"
    named = program(bare / "named" / "nvcc-13")
    assert found({"nvcc": named})["nvcc"].paths == (named,)
    with pytest.raises(PluginError, match="not a compiler"):
        found({"nvcc": bare / "nowhere" / "nvcc"})
