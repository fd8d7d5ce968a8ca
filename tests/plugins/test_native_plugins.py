"""The C++ of the plugin library, where TensorRT's headers are: fields, sizes, bytes, and a real parser.

Set TENSORRT_ROOT (and what else `mha-deploy plugins build` asks for) to run these; they need no GPU.
Compiling takes minutes. TENSORRT_ROOTS may name the roots of more versions, separated as in PATH.
MHA_DEPLOY_PLUGIN_TESTS may name a folder with the programs for a GPU, compiled on another machine.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mha_deploy.engine.plugins import PluginError, find_parts, source_folder


@pytest.fixture(scope="module")
def parts():
    """Headers and compiler, or a skip that says what is missing."""
    try:
        return find_parts({})
    except PluginError as error:
        pytest.skip(f"TensorRT headers are not here, or others: {error.got}")


@pytest.fixture(scope="module")
def compiled(parts, tmp_path_factory):
    """A build of the library and of its tests that need no GPU, warnings being errors."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("CMake is not here")
    folder = tmp_path_factory.mktemp("plugins")
    options = [f"-D{each.part.key.upper()}={';'.join(map(str, each.paths))}" for each in parts]
    configure = [cmake, "-S", str(source_folder()), "-B", str(folder), *options]
    configure += ["-DMHA_DEPLOY_WERROR=ON", "-DCUDA_ARCHITECTURES=80"]
    done = subprocess.run([*configure, "-DBUILD_TESTING=ON"], capture_output=True, text=True)
    testing = "BUILD_TESTING needs GoogleTest" not in done.stderr
    if testing:
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    else:
        run(*configure, "-DBUILD_TESTING=OFF")  # the library itself is tested without it
    targets = ("plugins", "plugin_test", "host_test") if testing else ("plugins",)
    run(cmake, "--build", str(folder), "--parallel", "2", "--target", *targets)
    return folder


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def cases_of(program, tmp_path):
    """What a program's tests report, none of which failed: those that passed, and those that were skipped."""
    report = tmp_path / "report.json"
    run(str(program), f"--gtest_output=json:{report}")
    ran = [test for suite in json.loads(report.read_text())["testsuites"] for test in suite["testsuite"]]
    return tuple([test for test in ran if test["result"] == result] for result in ("COMPLETED", "SKIPPED"))


@pytest.mark.parametrize("program", ["plugin_test", "host_test"])
def test_without_a_gpu(compiled, tmp_path, program):
    """Fields, sizes, types and bytes; what a call takes of the host; threads, beside a GPU that is played."""
    if not (compiled / program).is_file():
        pytest.skip("GoogleTest is not here: apt install googletest, or give GOOGLETEST_SOURCE")
    passed, skipped = cases_of(compiled / program, tmp_path)
    assert passed
    assert len(skipped) < len(passed), skipped


@pytest.mark.gpu
@pytest.mark.parametrize("program", ["driver_test", "attention_test", "linear_test", "sparse_heads_test"])
def test_on_a_gpu(request, tmp_path, program):
    """TensorRT's part is played by the programs; new sizes must cost no plan, allocation or wait."""
    folder = Path(os.environ.get("MHA_DEPLOY_PLUGIN_TESTS") or request.getfixturevalue("compiled"))
    if not (folder / program).is_file():
        run(shutil.which("cmake"), "--build", str(folder), "--parallel", "2", "--target", program)
    passed, skipped = cases_of(folder / program, tmp_path)
    assert passed
    # cuDNN and cuBLASLt have no kernel for some of the cases, and say so before any work.
    assert all("refused" in test for test in skipped), skipped


@pytest.mark.parametrize("root", os.environ.get("TENSORRT_ROOTS", "").split(os.pathsep))
def test_tensorrts_side_compiles_without_a_warning(root):
    """Against the headers of any version: interfaces come and go between minor ones."""
    if not root:
        pytest.skip("TENSORRT_ROOTS names no headers")
    found = find_parts({"tensorrt_include": Path(root, "include")})
    folders = [path for each in found if each.part.key != "nvcc" for path in each.paths]
    command = ["c++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    command += ['-DMHA_DEPLOY_VERSION="0"', '-DMHA_DEPLOY_ARCHITECTURES="90"']
    command += [f"-isystem{folder}" for folder in folders]
    for name in ("src/library.cpp", "src/trt/body.cpp", "src/trt/linear_layer.cpp"):
        run(*command, str(source_folder() / name))
    played = source_folder() / "tests"  # TensorRT's part, as the tests play it
    run(*command, "-x", "c++", "-include", str(played / "plugin_node.h"), os.devnull)
    for headers in map(Path, ("/usr/include", "/usr/src/googletest/googletest/include")):
        if (headers / "gtest/gtest.h").is_file():
            return run(*command, f"-isystem{headers}", str(played / "driver_test.cpp"))


def test_nothing_is_linked_that_a_machine_without_a_gpu_lacks(compiled):
    (library,) = compiled.glob("libmha_deploy_plugins_trt*.so")
    needed = run("readelf", "-d", str(library))
    for name in ("libnvinfer", "libcuda", "libcudnn", "libcublas"):
        assert name not in needed


@pytest.mark.parametrize(("heads", "code"), [(8, 0), (7, 7)])
def test_a_real_parser_takes_the_library_and_refuses_bad_heads(compiled, tmp_path, heads, code):
    """TensorRT-RTX has the plugin interface of TensorRT 11, and builds without a GPU."""
    libraries = pytest.importorskip("tensorrt_rtx_libs", reason="TensorRT-RTX is not installed")
    (library,) = compiled.glob("libmha_deploy_plugins_trt*.so")
    if not library.name.endswith("trt11.so"):
        pytest.skip(f"needs the headers of TensorRT 11, not those of {library.name}")
    # Its parser looks for itself under a name that the package does not have.
    (tmp_path / "libtensorrt_rtx.so").symlink_to(f"{libraries.__path__[0]}/libtensorrt_rtx.so.1")
    command = [sys.executable, str(Path(__file__).with_name("rtx_parse.py")), str(library), str(heads)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"LD_LIBRARY_PATH": str(tmp_path), "PATH": "/usr/bin"}
    )
    assert done.returncode == code, done.stderr[-2000:]
