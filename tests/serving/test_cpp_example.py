"""The C++ example: its reader and judge run here; the program itself is compiled where the headers are."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.metrics import measure

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "cpp"
COMPILER = shutil.which("g++") or shutil.which("c++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="a C++ compiler is not here")

# Prints, for every output of a case, the error and the verdict of what the module itself gave.
PROGRAM = r"""
#include "golden.h"
#include <cstdio>
int main(int argc, char** argv) {
    try {
        mha::Tensors const all = mha::readSafetensors(argv[1]);
        std::string const got = argc > 2 ? argv[2] : "eager/";
        for (auto const& [name, oracle] : all) {
            if (name.rfind("oracle/", 0) != 0) continue;
            std::string const output = name.substr(7);
            mha::Verdict const v = mha::judge(all.at(got + output), oracle, all.at("eager/" + output), 4.0);
            std::printf("%s %.17g %.17g %d\n", output.c_str(), v.error.relativeL2, v.error.maxAbs, v.passed);
        }
        return 0;
    } catch (std::exception const& error) {
        std::printf("error: %s\n", error.what());
        return 2;
    }
}
"""


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A function that judges a file with the C++ code."""
    folder = tmp_path_factory.mktemp("cpp")
    (folder / "judge.cpp").write_text(PROGRAM)
    command = [COMPILER, "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined"]
    subprocess.run([*command, "-I", FOLDER, "judge.cpp", "-o", "judge"], cwd=folder, check=True)

    def run(path, *arguments):
        done = subprocess.run(
            [folder / "judge", path, *arguments], capture_output=True, text=True, timeout=60
        )
        assert done.stderr == ""  # what the sanitizer reports
        return done.returncode, done.stdout

    return run


@pytest.mark.sweep(1)
@needs_compiler
@pytest.mark.parametrize("name", ["tiny-padding", "tiny-preallocated"])
def test_the_errors_are_those_of_python(judge, bundles, name):
    bundle = bundles(name)
    for case, entry in zip(golden_cases(bundle), bundle.manifest.golden, strict=True):
        code, text = judge(bundle.file(entry.file))
        assert code == 0, text
        found = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
        assert set(found) == set(case.oracle)
        own = measure(case.eager["output"], case.oracle["output"])
        assert np.allclose(list(map(float, found["output"][:2])), [own.relative_l2, own.max_abs], rtol=1e-12)
        assert all(verdict[2] == "1" for verdict in found.values())


@needs_compiler
@pytest.mark.parametrize(
    "spoil",
    [
        lambda a: np.roll(a, 1, axis=-1),
        lambda a: a * np.float16(1.02),
        lambda a: np.where(np.arange(a.size).reshape(a.shape) == 7, np.float16(np.nan), a),
        lambda a: np.where(np.arange(a.size).reshape(a.shape) == 7, np.float16(np.inf), a),
        lambda a: np.zeros_like(a),
    ],
)
def test_wrong_results_are_wrong(judge, bundles, tmp_path, spoil):
    bundle = bundles("tiny-padding")
    entry = next(each for each in bundle.manifest.golden if each.name == "opt")
    arrays = load_file(bundle.file(entry.file))
    save_file({**arrays, "got/output": spoil(arrays["eager/output"])}, tmp_path / "case.safetensors")
    code, text = judge(tmp_path / "case.safetensors", "got/")
    assert code == 0
    assert text.split()[-1] == "0"


@needs_compiler
def test_files_that_are_no_cases_are_refused(judge, bundles, tmp_path):
    bundle = bundles("tiny-padding")
    good = bundle.file(bundle.manifest.golden[0].file).read_bytes()
    size = int.from_bytes(good[:8], "little")
    bad = {
        "empty": b"",
        "short": good[:5],
        "cut": good[: len(good) // 2],
        "length": (2**63).to_bytes(8, "little") + good[8:],
        "no json": (4).to_bytes(8, "little") + b"abcd",
        "deep": (1000).to_bytes(8, "little") + b"[" * 1000,
        "shape": good[:8] + good[8 : 8 + size].replace(b'"shape":[1', b'"shape":[9') + good[8 + size :],
        "negative": good[:8] + good[8 : 8 + size].replace(b'"shape":[1,', b'"shape":[-,') + good[8 + size :],
        "type": good[:8] + good[8 : 8 + size].replace(b'"F16"', b'"F61"') + good[8 + size :],
    }
    for what, data in bad.items():
        (tmp_path / "bad").write_bytes(data)
        code, text = judge(tmp_path / "bad")
        assert (code, text[:7]) == (2, "error: "), what


def test_the_program_compiles_against_tensorrt(tmp_path):
    root = os.environ.get("TENSORRT_ROOT")
    folders = [Path(root) / "include"] if root else []
    folders += [Path("/usr/include"), *Path("/usr/include").glob("*-linux-gnu")]
    tensorrt = next((each for each in folders if (each / "NvInfer.h").is_file()), None)
    toolkits = [Path(os.environ["CUDA_HOME"])] if "CUDA_HOME" in os.environ else []
    toolkits += sorted(Path("/usr/local").glob("cuda*"))
    places = (each / "include" for each in toolkits)
    cuda = next((each for each in places if (each / "cuda_runtime_api.h").is_file()), None)
    if COMPILER is None or tensorrt is None or cuda is None:
        pytest.skip("the headers of TensorRT (TENSORRT_ROOT) or CUDA (CUDA_HOME) are not here")
    command = [COMPILER, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    command += ["-isystem", tensorrt, "-isystem", cuda, FOLDER / "mha_run.cpp"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
