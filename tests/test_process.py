"""Interpreters and programs that the tool starts: nothing of the working folder runs."""

import ast
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bundle_edit import copy_of
from fault_harness import assert_orderly, run
from fresh_python import python
from source_trees import nodes_of, source_trees

import mha_deploy
from mha_deploy import process

ROOT = Path(mha_deploy.__file__).parents[1]

# Modules of the standard library, of `runpy` and `site`; dependencies, and what Python looks for by itself.
STANDARD = [
    "json",
    "re",
    "enum",
    "typing",
    "types",
    "dataclasses",
    "functools",
    "contextlib",
    "collections",
    "io",
    "os",
    "abc",
    "copy",
    "tempfile",
    "subprocess",
    "socket",
    "pickle",
    "mmap",
    "signal",
    "threading",
    "struct",
    "random",
    "multiprocessing",
    "traceback",
    "faulthandler",
    "importlib",
    "runpy",
    "pkgutil",
    "keyword",
    "operator",
    "heapq",
    "string",
    "inspect",
    "logging",
    "platform",
    "sysconfig",
    "ctypes",
    "resource",
    "code",
    "token",
    "weakref",
]
OTHERS = [
    "numpy",
    "onnx",
    "onnx_ir",
    "msgspec",
    "torch",
    "ml_dtypes",
    "rich",
    "click",
    "jinja2",
    "safetensors",
    "onnxruntime",
    "tensorrt",
    "tensorrt_rtx",
    "cuda",
    "pynvml",
    "ray",
    "tritonclient",
    "sitecustomize",
    "usercustomize",
    "pip",
    "google",
    "packaging",
    "sympy",
]
TOOLS = ("git", "nvidia-smi", "cmake", "ninja", "cc", "c++", "nvcc", "python", "python3")


def make_hostile(folder, mark, *, names=(*STANDARD, *OTHERS)):
    """Modules, packages and programs that leave a line where they run."""
    folder.mkdir(parents=True, exist_ok=True)
    code = f"open({str(mark)!r}, 'a').write(__name__ + '\\n')\n"
    for number, name in enumerate(names):
        if number % 2 and name not in ("json", "re", "sitecustomize", "usercustomize"):
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(code)
        else:
            (folder / f"{name}.py").write_text(code)
    for name in TOOLS:
        if not (folder / name).exists():
            (folder / name).write_text(f"#!/bin/sh\necho {name} >> '{mark}'\n")
            (folder / name).chmod(0o755)


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "mark"


@pytest.fixture
def hostile(tmp_path, mark):
    make_hostile(tmp_path / "hostile", mark)
    return tmp_path / "hostile"


def ran(mark):
    return sorted(set(mark.read_text().split())) if mark.exists() else []


PATHS = {"PYTHONPATH": f":.:hostile{os.pathsep}", "PATH": f":.:{os.environ['PATH']}", "LD_LIBRARY_PATH": ":."}


# -- The starter, in every Python --------------------------------------------------------------------

PROGRAM = """
import json, os, re, sys
sys.path.append({root!r})
import mha_deploy.process as process
code = "import json, re, enum, typing; print(json.dumps([sys.path, sys.argv[1:], sys.flags.isolated]))"
for more in ({{}}, {{"path": ["/first"]}}, {{"executable": sys.executable}}):
    done = process.run(process.python_command("a b", 3, code=code, **more), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path, arguments, isolated = json.loads(done.stdout)
    assert arguments == ["a b", "3"] and isolated == 1
    assert path[:1] == more.get("path", path[:1]), path
    assert {root!r} in path and all(os.path.isabs(each) and each != os.getcwd() for each in path), path
done = process.run(process.python_command(module="this"), capture_output=True, text=True)
assert "Zen of Python" in done.stdout, done.stderr
done = process.run(["git", "--version"], capture_output=True) if process.find_program("git") else None
done = process.run(process.python_command("--version", module="mha_deploy"), capture_output=True, text=True)
assert "Traceback" not in done.stderr or "ModuleNotFoundError" in done.stderr, done.stderr
"""


@functools.cache
def interpreters():
    found = {sys.version_info[:2]: sys.executable}
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in (10, 11, 12, 13):
        installed = sorted(versions.glob(f"3.{minor}.*/bin/python"))
        other = shutil.which(f"python3.{minor}") if not installed else str(installed[-1])
        if other:
            found.setdefault((3, minor), other)
    return found


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("minor", "variables"),
    [
        *((minor, PATHS) for minor in (10, 11, 12, 13)),
        *(
            pytest.param(minor, {}, marks=[pytest.mark.slow] * (minor != sys.version_info.minor))
            for minor in (10, 11, 12, 13)
        ),
    ],
    ids=lambda value: value if isinstance(value, int) else "relative paths" if value else "usual",
)
def test_an_interpreter_runs_nothing_of_the_working_folder(minor, variables, hostile, mark):
    python = interpreters().get((3, minor))
    if python is None:
        pytest.skip(f"there is no Python 3.{minor} here")
    started = [python, "-I", "-c", "import os, sys\n" + PROGRAM.format(root=str(ROOT))]
    # With `-I` the parent is unharmed whatever its variables are, and hands them on.
    env = {**os.environ, **variables, "PYTHONSTARTUP": str(hostile / "json.py"), "PYTHONSAFEPATH": ""}
    done = subprocess.run(started, cwd=hostile, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ran(mark) == []


def test_the_command_itself_imports_nothing_of_the_working_folder(hostile, mark):
    """`python -m` has the working folder on its path until our first line: `runpy` has imported by then."""
    known = set(subprocess.run(
        [sys.executable, "-I", "-c", "import runpy, sys; print(*sys.modules)"], capture_output=True, text=True
    ).stdout.split())  # fmt: skip
    for name in {each.partition(".")[0] for each in known}:
        for path in (hostile / f"{name}.py", hostile / name):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    names = [path.stem for path in hostile.iterdir()]
    assert {"json", "msgspec", "click"} <= set(names)
    done = subprocess.run(
        [sys.executable, "-m", "mha_deploy", "models", "--json"], cwd=hostile, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert ran(mark) == []


def test_a_script_forgets_relative_entries_of_pythonpath(hostile, mark):
    """Python itself imports `sitecustomize` from there before any of our lines."""
    for name in ("sitecustomize.py", "usercustomize.py"):
        (hostile / name).unlink()
    script = hostile.parent / "mha-deploy"
    script.write_text("import sys\nfrom mha_deploy.__main__ import main\nmain()\n")
    known = subprocess.run(
        [sys.executable, "-c", "import mha_deploy.process, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
    ).stdout.split()
    for name in {each.partition(".")[0] for each in known}:
        for path in (hostile / f"{name}.py", hostile / name):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    own = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(each)]
    path = os.pathsep.join(["", ".", str(ROOT), *own])
    done = subprocess.run(
        [sys.executable, script, "models", "--json"], cwd=hostile, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ran(mark) == []


@pytest.mark.parametrize(("given", "expected"), [({}, "4"), ({"OPENBLAS_THREAD_TIMEOUT": "26"}, "26")])
def test_the_command_lets_idle_threads_sleep_unless_told_otherwise(given, expected):
    kept = {name: value for name, value in os.environ.items() if name != "OPENBLAS_THREAD_TIMEOUT"}
    code = "import os, sys\nfrom mha_deploy.__main__ import main\nsys.argv = ['', '--version']\nmain()\n"
    done = python(code + "sys.stderr.write(os.environ['OPENBLAS_THREAD_TIMEOUT'])", env={**kept, **given})
    assert done.stderr == expected


# -- The verbs that start something --------------------------------------------------------------------


@pytest.fixture
def unpacked(bundles, hostile, mark):
    """A bundle in whose folder hostile files are."""
    folder = copy_of(bundles("tiny-mha"), hostile.parent / "bundle")
    shutil.copytree(hostile, folder, dirs_exist_ok=True)
    return folder


VERBS = {
    "ort-cpu": ("validate", ".", "--runtime", "ort-cpu", "--no-report", "--no-probe"),
    "onnx-reference": ("validate", ".", "--runtime", "onnx-reference", "--no-report", "--no-probe"),
    "eager": ("validate", ".", "--runtime", "eager", "--no-report", "--no-probe"),
    "bisect": ("bisect", ".", "--runtime", "ort-cpu"),
    "bench": ("bench", ".", "--processes", "2", "--record", "record.jsonl"),
    "doctor": ("doctor", "--json"),
    "plugins": ("plugins", "list"),
    "engine": ("build-engine", ".", "--backend", "tensorrt-rtx", "--sm", "120"),
    "matrix": ("matrix", "plan.toml", "-o", "matrix", "--jobs", "1"),
}
SLOW = {"engine", "bench", "eager", "bisect", "onnx-reference"}  # each in a child that others start, too


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "verb", [pytest.param(verb, marks=[pytest.mark.slow] * (verb in SLOW)) for verb in VERBS]
)
def test_no_verb_runs_what_lies_in_the_folder_of_a_bundle(unpacked, mark, verb):
    plan = 'models = ["."]\nprecisions = ["fp16"]\nruntimes = [{name = "rtx", backend = "tensorrt-rtx"}]\n'
    (unpacked / "plan.toml").write_text(plan)
    outcome = run(*VERBS[verb], folder=unpacked, variables=PATHS, memory=None, seconds=100)
    assert_orderly(outcome)
    assert ran(mark) == []
    if verb in ("ort-cpu", "onnx-reference", "doctor"):
        assert outcome.code == 0, outcome.err


# -- Nothing is started another way -------------------------------------------------------------------

STARTERS = {
    "subprocess": {"run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput"},
    "os": {"system", "popen", "startfile", "posix_spawn", "posix_spawnp", "fork", "forkpty"},
    "multiprocessing": {"Process", "Pool", "get_context", "set_start_method", "Manager"},
    "shutil": {"which"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
    "pty": {"spawn", "fork"},
}


def starts(nodes):
    """The lines that start a process, look for a program, or name the interpreter."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            root = node.module.partition(".")[0]
            if {alias.name for alias in node.names} & STARTERS.get(root, set()):
                yield node.lineno
            if root == "concurrent" and any(alias.name == "ProcessPoolExecutor" for alias in node.names):
                yield node.lineno
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name, attribute = node.value.id, node.attr
            typed = name == "subprocess" and attribute == "Popen"  # also the name of a type
            if attribute in STARTERS.get(name, set()) and not typed:
                yield node.lineno
            if name == "os" and attribute.startswith(("exec", "spawn")):
                yield node.lineno
            if (name, attribute) == ("sys", "executable"):
                yield node.lineno
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "subprocess.Popen":
            yield node.lineno


def test_one_file_starts_every_process():
    # One reads its header; the other watches a fork of the command line, which executes nothing.
    allowed = {("engine/plugins.py", "sys.executable"), ("supervisor.py", "os.fork()")}
    found = []
    for name in source_trees():
        lines = (ROOT / "mha_deploy" / name).read_text(encoding="utf-8").splitlines()
        for number in starts(nodes_of(name)):
            if name != "process.py" and not any(
                name == file and word in lines[number - 1] for file, word in allowed
            ):
                found.append(f"{name}:{number}: {lines[number - 1].strip()}")
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.run([])", "subprocess.Popen([])", "os.system('x')", "os.execv('x', [])", "sys.executable",
        "from subprocess import run", "from multiprocessing import Process", "shutil.which('git')",
        "from concurrent.futures import ProcessPoolExecutor", "os.posix_spawn()", "multiprocessing.Pool()",
    ],
)  # fmt: skip
def test_another_way_is_found(line):
    assert list(starts(ast.walk(ast.parse(line))))


def test_the_type_of_a_process_may_be_named():
    assert list(starts(ast.walk(ast.parse("x: subprocess.Popen[str]")))) == []


# -- Programs -----------------------------------------------------------------------------------------


def test_a_program_is_not_taken_from_the_working_folder(hostile, mark, monkeypatch):
    monkeypatch.chdir(hostile)
    monkeypatch.setenv("PATH", f":.:hostile{os.pathsep}")
    assert process.find_program("git") is None
    with pytest.raises(FileNotFoundError):
        process.run(["git", "--version"])
    assert process.find_program("./git") == "./git"  # somebody chose it
    monkeypatch.setenv("PATH", f".:{hostile}")
    assert process.find_program("git") == str(hostile / "git")
    assert ran(mark) == []
    assert process.variables()["PATH"] == str(hostile)
