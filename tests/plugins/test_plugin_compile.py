"""The library is compiled whole or not at all; a compiler that fails tells its last lines."""

import os
import shutil
from pathlib import Path

import pytest
from plugin_libraries import INFO, file_name

from mha_deploy.engine import plugins as compiling
from mha_deploy.engine.plugins import PARTS, Found, PluginError, compile_library, source_folder

needs_cmake = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("cc") is None, reason="CMake and a compiler are not here"
)

# The smallest project that gives a library of the right name: it uses what it is given, and looks for no
# compilers.
PROJECT = """
cmake_minimum_required(VERSION 3.20)
project(small LANGUAGES NONE)
if(NOT TENSORRT_INCLUDE OR NOT CUDA_ARCHITECTURES STREQUAL "80;90")
    message(FATAL_ERROR "not reported: ${TENSORRT_INCLUDE} ${CUDA_ARCHITECTURES}")
endif()
set(library ${CMAKE_BINARY_DIR}/libmha_deploy_plugins_trt8.so)
add_custom_command(OUTPUT ${library} COMMAND cc -shared -fPIC -o ${library} ${CMAKE_SOURCE_DIR}/small.c)
add_custom_target(plugins DEPENDS ${library})
"""
GOOD = "char const* mha_deploy_plugins_info(void) {{ return {info}; }}\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A small project in the place of the real one."""
    import json

    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(PROJECT)
    (folder / "small.c").write_text(GOOD.format(info=json.dumps(json.dumps(INFO))))
    monkeypatch.setattr(compiling, "source_folder", lambda: folder)
    return folder


def parts(tmp_path):
    return [Found(part=part, paths=(tmp_path, tmp_path / "more"), by="a test") for part in PARTS]


@needs_cmake
def test_a_library_is_built_and_read(project, tmp_path):
    reported = []
    out = tmp_path / "new" / "out"
    made = compile_library(parts(tmp_path), out, "80;90", lambda *step: reported.append(step))
    assert made.path == out / file_name()
    assert made.library.version == INFO["version"]
    assert [path.name for path in out.iterdir()] == [file_name()]
    assert reported[0] == ("configure", 0, 0)
    assert {step[0] for step in reported} == {"configure", "compile"}
    assert any(count for _, _, count in reported)


@needs_cmake
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("code", "what", "reported"),
    [
        ("int broken(void) { return nothing; }\n", "compile ended with", "nothing"),
        ("#error no such GPU\n", "compile ended with", "no such GPU"),
        ("int no_info = 1;\n", "cannot be loaded here", "mha_deploy_plugins_info"),
    ],
)
def test_a_failed_build_leaves_the_old_library(project, tmp_path, code, what, reported):
    old = tmp_path / "out" / file_name()
    old.parent.mkdir()
    old.write_text("the old one")
    (project / "small.c").write_text(code)
    with pytest.raises(PluginError, match=what) as caught:
        compile_library(parts(tmp_path), old.parent, "80;90")
    assert reported in caught.value.got
    assert [path.name for path in old.parent.iterdir()] == [file_name()]
    assert old.read_text() == "the old one"


@needs_cmake
def test_a_configuration_that_fails_is_reported(project, tmp_path):
    with pytest.raises(PluginError, match="configure ended with 1") as caught:
        compile_library(parts(tmp_path), tmp_path / "out", "75")
    assert "not reported" in caught.value.got
    assert "75" in caught.value.got


@needs_cmake
def test_a_library_for_another_processor_is_kept_and_not_tried(project, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "_is_for_this_machine", lambda path: False)
    (project / "small.c").write_text("int no_info = 1;\n")
    made = compile_library(parts(tmp_path), tmp_path / "out", "80;90")
    assert made.library is None
    assert made.path.is_file()


def test_libraries_of_other_processors_are_reported_apart(tmp_path):
    header = bytearray(Path(os.path.realpath("/proc/self/exe")).read_bytes()[:20])
    (tmp_path / "ours").write_bytes(header)
    header[18] ^= 0xFF
    (tmp_path / "other").write_bytes(header)
    assert compiling._is_for_this_machine(tmp_path / "ours")
    assert not compiling._is_for_this_machine(tmp_path / "other")


def test_without_cmake_it_says_how_to_get_it(project, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PluginError, match="CMake is missing") as caught:
        compile_library(parts(tmp_path), tmp_path / "out")
    assert caught.value.hint == "pip install cmake"


def test_the_source_is_there():
    assert (source_folder() / "CMakeLists.txt").is_file()


@needs_cmake
@pytest.mark.slow
def test_the_real_library_is_built_from_the_command_line(run_cli, tmp_path, monkeypatch):
    """Against TENSORRT_ROOT and whatever else is found; minutes of compiling."""
    import json

    from mha_deploy.engine.plugins import find_parts

    try:
        find_parts({})
    except PluginError as error:
        pytest.skip(f"TensorRT headers are not here, or others: {error.got}")
    done = run_cli("plugins", "build", "--out", tmp_path, "--json")
    assert done.code == 0, done.err
    library = json.loads(done.out)["library"]
    names = {each["name"] for each in library["plugins"]}
    assert names == {"MhaDeployAttention", "MhaDeployLinear", "MhaDeployNormActivation"}
    monkeypatch.setenv("MHA_DEPLOY_PLUGINS", str(tmp_path))
    listed = json.loads(run_cli("plugins", "list", "--json").out)["libraries"]
    assert library["sha256"] in [each["sha256"] for each in listed]
