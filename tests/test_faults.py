"""Unlucky surroundings: streams that fail, signals, little memory, code that misbehaves."""

import ast
import itertools
import json
import os
import random
import signal
import sys
import time

import numpy as np
import pytest
from fault_harness import assert_orderly, assert_refused, in_this_process, run
from hostile_files import all_forked
from source_trees import nodes_of, source_trees

import mha_deploy as md
from mha_deploy.runtime.child import isolation
from mha_deploy.runtime.ort import OrtCpuRunner
from mha_deploy.runtime.user_code import user_code

# -- Streams ---------------------------------------------------------------------------------------

KINDS = ("file", "closed", "full", "broken", "absent")


def each_alone_and_together(kinds):
    """Each kind of one stream beside a file and beside itself; what else could be combined is slow."""
    for stdout, stderr in itertools.product(kinds, kinds):
        is_slow = "file" not in (stdout, stderr) and stdout != stderr
        yield pytest.param(stdout, stderr, marks=[pytest.mark.slow] * is_slow)


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("stdout", "stderr"), each_alone_and_together(KINDS))
@pytest.mark.parametrize("verb", [("models", "--json"), ("inspect", "absent")], ids=["result", "error"])
def test_streams_may_fail(verb, stdout, stderr):
    outcome = run(*verb, stdout=stdout, stderr=stderr)
    # A result that cannot be written is bad input; an absent stream or a reader that left is none.
    wanted = 2 if verb[0] == "inspect" or stdout == "full" else 0
    assert_orderly(outcome, codes=[wanted])
    if stdout == "file" and wanted == 0:
        assert json.loads(outcome.out)
    if stderr == "file" and wanted:
        assert "error: " in outcome.err


RESULTS = ("inspect", "check", "compare", "validate", "package", "analyze", "fuse")


@pytest.mark.sweep(7)
@pytest.mark.parametrize(
    ("verb", "kind"),
    [
        *((verb, "full") for verb in RESULTS),  # the only kind that is an error
        *(("validate", kind) for kind in ("closed", "broken")),
        *(
            pytest.param(verb, kind, marks=pytest.mark.slow)
            for verb in RESULTS
            for kind in ("closed", "broken")
            if verb != "validate"
        ),
    ],
)
def test_so_it_is_with_every_kind_of_result(bundles, tmp_path, verb, kind):
    bundle, graph = bundles("tiny-mha").path, bundles("tiny-mha").model_path
    arguments = {
        "compare": (bundle, bundle),
        "validate": (bundle, *VALIDATE),
        "package": (bundle, "--triton", tmp_path / "models", "--runtime", "ort-cpu"),
        "analyze": ("tiny-mha",),
        "fuse": (graph, "-o", tmp_path / "out.onnx"),
    }.get(verb, (bundle,))
    outcome = run(verb, *arguments, stdout=kind, stderr=kind, memory=None, prepare=in_this_process)
    assert_orderly(outcome, codes=[2 if kind == "full" else 0])


# -- Signals ---------------------------------------------------------------------------------------

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
TIMES = [round(random.Random(seed).uniform(0.0, 1.0), 3) for seed in range(8)]
VALIDATE = ("--runtime", "onnx-reference", "--no-report", "--no-probe", "--json")


@pytest.mark.sweep(5)
@pytest.mark.parametrize("to", ["main", "group"])
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("after", TIMES)
def test_a_signal_at_any_time_ends_a_command_with_its_code(bundles, number, after, to):
    verb = ("validate", bundles("tiny-mha").path, *VALIDATE)
    outcome = run(*verb, signals=[(after, number, to)], memory=None, prepare=in_this_process)
    # Before the first line of ours it is the signal itself that ends it, for a shell with the same code.
    assert_orderly(outcome, codes=[0, 128 + number, *([-number] if after < 0.2 else ())])


@pytest.mark.parametrize("to", ["main", "group", "child"])
def test_so_it_is_beside_a_child(bundles, to):
    """A child that is ended alone is a runtime that crashed."""
    outcome = run("validate", bundles("tiny-mha").path, *VALIDATE, signals=[(0.8, 15, to)], memory=None)
    assert_orderly(outcome, codes=[0, 1, 128 + 15] if to == "child" else [0, 128 + 15])


def test_a_broken_pipe_signal_is_no_end(bundles):
    verb, pipe = ("validate", bundles("tiny-mha").path, *VALIDATE), (0.3, signal.SIGPIPE, "main")
    assert_orderly(run(*verb, signals=[pipe], memory=None, prepare=in_this_process), codes=[0])


# -- Numbers ---------------------------------------------------------------------------------------

LIMITS = ("inf", "nan", "-inf", "-1", "0", "1e400", "9" * 400, "x", "", "1e308")
NUMBERS = [
    *(("validate", "BUNDLE", "--time-limit", text) for text in LIMITS),
    *(("validate", "BUNDLE", "--url", "http://localhost:1", "--timeout", text) for text in LIMITS),
    *(("compare", "BUNDLE", "BUNDLE", "--max-error", text) for text in ("inf", "nan", "-1", "x")),
    *(
        ("package", "BUNDLE", "--triton", "out", "--instances", text)
        for text in ("0", "-1", "3000000000", "1e9")
    ),
    *(("package", "BUNDLE", "--triton", "out", "--max-batch", text) for text in ("0", "3000000000")),
    *(("package", "BUNDLE", "--triton", "out", "--sequences", text) for text in ("0", "3000000000")),
    *(("package", "BUNDLE", "--triton", "out", "--queue-delay-us", text) for text in ("-1", "3000000000")),
    *(("validate", "BUNDLE", "--samples", text) for text in ("0", "3000000000", "1e3")),
    *(("validate", "BUNDLE", "--fresh", text) for text in ("-1", "3000000000", "9" * 5000)),
    *(("validate", "BUNDLE", "--steps", text) for text in ("-1", "3000000000")),
    *(("validate", "BUNDLE", "--seed", text) for text in ("-1", "4294967296")),
    *(("validate", "BUNDLE", "--clients", text) for text in ("0", "-1", "1,x", "9" * 50, "٣", "1,,2")),
    *(("bench", "BUNDLE", "--at", text) for text in ("B=1,B=2", "B=-1", "B=99999999999999999999", "B", "=")),
    *(("bench", "BUNDLE", "--record", "r", "--processes", text) for text in ("0", "3000000000")),
    *(("build-engine", "BUNDLE", "--profile", text) for text in ("B=1,B=2", "B=0", "B=1:2", "B=2:1:0", "B=")),
    *(("build-engine", "BUNDLE", "--workspace-mib", text) for text in ("0", "-1", "3000000000")),
    *(
        ("export", "tiny-mha", "-o", "out", "--axis", text)
        for text in ("S=0", "S=1:2:99999999999", "S=a", "Q=1")
    ),
    *(("export", "tiny-mha", "-o", "out", "--golden", text) for text in ("B=1,B=2", "B=0,S=1", "no", "")),
    *(("export", "tiny-mha", "-o", "out", "--golden-gib", text) for text in ("inf", "nan", "-1")),
    *(("export", "tiny-mha", "-o", "out", "--opset", text) for text in ("0", "-1", "999", "3000000000")),
    ("export", "tiny-mha", "-o", "out", "--axis", "S=1:2:4", "--axis", "S=1:2:8"),
    *(("analyze", "tiny-mha", "--at", text) for text in ("B=1,B=2", "B=1e9", "x")),
    ("matrix", "absent.toml", "-o", "out", "--jobs", "3000000000"),
]


def test_numbers_have_bounds(bundles, tmp_path):
    bundle = bundles("tiny-mha").path
    commands = [[bundle if each == "BUNDLE" else each for each in verb] for verb in NUMBERS]
    for verb, outcome in zip(
        NUMBERS, all_forked(commands, prepare=lambda _: os.chdir(tmp_path)), strict=True
    ):
        # `bench` needs a GPU, and Click prints what is wrong with a command line.
        said = "  try: " in outcome.err or "Usage: " in outcome.err
        assert (outcome.code, said) in [(2, True), *[(3, True)] * (verb[0] == "bench")], (verb, outcome)
        assert "Traceback" not in outcome.err, (verb, outcome)
        words = outcome.err.lower().replace("_", "-")
        named = verb[-2].strip("-") in words or (verb[-1] or "empty")[:9] in words
        assert named or "=" in verb[-1] or outcome.code == 3, (verb, outcome)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), 1e12])
def test_a_time_limit_is_finite(seconds):
    with pytest.raises(md.DeployError):
        md.configure(time_limit=seconds)


ARRAYS = {
    "text": np.array(["a", "b"]),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "no numbers": np.zeros((0, 4, 8), np.float32),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_input_without_numbers_is_refused(bundles, tmp_path, name):
    np.save(tmp_path / "x.npy", ARRAYS[name])
    graph = bundles("tiny-mha").model_path
    arguments = ("export", graph, "-o", tmp_path / "out", "--input", f"x={tmp_path / 'x.npy'}")
    assert_refused(run(*arguments, memory=None))


# -- Messages --------------------------------------------------------------------------------------


def test_every_error_says_what_to_try():
    """It is given one where it is raised, or its class has one."""
    with pytest.raises(TypeError):
        md.DeployError("It broke.")
    classes = {}
    for file in source_trees():
        for node in nodes_of(file):
            if isinstance(node, ast.ClassDef) and node.bases:
                named = {ast.unparse(each.targets[0]) for each in node.body if isinstance(each, ast.Assign)}
                classes[node.name] = [ast.unparse(base) for base in node.bases], "usual_hint" in named

    def needs(name):
        if name == "DeployError":
            return True
        bases, has_one = classes.get(name, ((), True))
        return not has_one and any(map(needs, bases))

    found = []
    for file in source_trees():
        for node in nodes_of(file):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and needs(node.func.id):
                given = [word for word in node.keywords if word.arg in ("hint", None)]
                if not given or (isinstance(given[0].value, ast.Constant) and not given[0].value.value):
                    found.append(f"{file}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert found == []


# -- Memory, and the clock --------------------------------------------------------------------------


@pytest.mark.sweep(1)
@pytest.mark.parametrize("memory", [1 << 24, pytest.param(1 << 27, marks=pytest.mark.slow), 1 << 29])
def test_little_memory_is_an_error_or_enough(bundles, memory):
    verb = (
        "validate",
        bundles("tiny-mha").path,
        "--runtime",
        "onnx-reference",
        "--no-report",
        "--in-process",
    )
    assert_orderly(run(*verb, memory=memory))


def test_onnx_runtime_starts_no_threads_that_memory_is_too_little_for(bundles):
    """It waits for ever for the others where it can start some of many."""
    OrtCpuRunner(bundles("tiny-mha").model_path).close()  # what is loaded by the first is not at issue

    def open_and_count():
        before = len(os.listdir("/proc/self/task"))
        with OrtCpuRunner(bundles("tiny-mha").model_path):
            if len(os.listdir("/proc/self/task")) > before:
                raise RuntimeError("a thread was started")

    assert_orderly(run(open_and_count, memory=1 << 27), codes=[0])


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "seconds", [-1e9, 3600, *(pytest.param(each, marks=pytest.mark.slow) for each in (-3600, 4e9))]
)
def test_a_clock_that_jumps_changes_nothing(bundles, seconds):
    now = time.time

    def jump():
        calls = iter(range(10**9))
        time.time = lambda: now() + (seconds if next(calls) % 2 else 0)
        if seconds != 3600:  # once beside a child
            in_this_process()

    outcome = run("validate", bundles("tiny-mha").path, *VALIDATE, prepare=jump, memory=None)
    assert_orderly(outcome, codes=[0])


def test_a_file_that_nobody_closes_is_noticed():
    """In every case of these tests: what the command opens, it closes."""
    assert "Exception ignored" in run(lambda: open(os.devnull).fileno()).err  # noqa: SIM115


# -- Code of a user ----------------------------------------------------------------------------------

MODEL = """
import ctypes, os, signal, sys, time, threading
import torch
from torch import nn
from mha_deploy import Deployable, Example

class Odd(BaseException):
    def __str__(self): raise ValueError
def forever():
    while True: pass
def stubborn():
    while True:
        try: time.sleep(100)
        except BaseException: pass
def deep(): return deep()
def raised(error): raise error
class Attention(nn.Module):
    def forward(self, x): return nn.functional.scaled_dot_product_attention(x, x, x)
def good(**more):
    x = Example(torch.randn(1, 2, 8, 4), "B")
    return Deployable(**{"module": Attention(), "inputs": {"x": x}, "axes": {"B": "1:2:4"}, **more})
def build():
    return CASE
"""
FAILURES = {
    "exception": "raised(ValueError('no'))",
    "interrupt": "raised(KeyboardInterrupt)",
    "generator exit": "raised(GeneratorExit)",
    "odd exception": "raised(Odd())",
    "recursion": "deep()",
    "memory": "torch.zeros(1 << 60)",
    "memory error": "raised(MemoryError())",
    "exit": "sys.exit(0)",
    "exit text": "sys.exit('bye')",
    "exit at once": "os._exit(0)",
    "exit in C": "ctypes.CDLL(None)._exit(0)",
    "another program": "os.execv('/bin/true', ['true'])",
    "crash": "ctypes.string_at(0)",
    "abort": "os.abort()",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "hang": "forever()",
    "hang that catches all": "stubborn()",
    "hang in C": "ctypes.PyDLL(None).sleep(1000)",
}
ODD = {
    "None": "None",
    "a generator": "(each for each in ())",
    "a module": "Attention()",
    "a class": "Deployable",
    "keys that are numbers": "good(inputs={3: Example(torch.ones(1, 2, 8, 4), 'B')})",
    "keys that are no identifiers": "good(inputs={'a b': Example(torch.ones(1, 2, 8, 4), 'B')})",
    "inputs that are a list": "good(inputs=[Example(torch.ones(1, 2, 8, 4), 'B')])",
    "outputs that are a number": "good(outputs=5)",
    "outputs that are text": "good(outputs='abc')",
    "a name that is a number": "good(name=5)",
    "a summary that is a list": "good(summary=[])",
    "an axis without end": "good(axes={'B': (1, 2, 10**30)})",
    "an axis of text": "good(axes={'B': (1, 'a', None)})",
    "a cache of a list": "good(kv_cache={'x': ['y']})",
    "no input": "good(inputs={})",
}


@pytest.fixture(scope="module")
def loaded():
    """PyTorch and the exporter, for all forks."""
    import mha_deploy.exporter.exporter  # noqa: F401


def export(tmp_path, case, limit=30):
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("CASE", case))
    arguments = ("export", f"{path}:build", "-o", tmp_path / "out", "--json", "--time-limit", limit)
    return path, run(*arguments, memory=None)


# Others of their kind.
ALIKE = {"generator exit", "memory error", "exit text", "abort", "another program"}


@pytest.mark.sweep(7)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in FAILURES]
)
def test_code_that_misbehaves_is_an_error_with_its_line(loaded, tmp_path, name):
    path, outcome = export(tmp_path, FAILURES[name], limit=1 if "hang" in name else 30)
    assert_refused(outcome, f"{path}:")
    assert json.loads(outcome.out)["error"]["exit_code"] == 2
    assert "alloc_cpu" not in outcome.err  # PyTorch's own text on memory
    assert not (tmp_path / "out").exists()


def test_a_factory_that_returns_something_odd_is_refused(loaded, tmp_path):
    """All of them in one fork."""
    commands = []
    for number, case in enumerate(ODD.values()):
        path = tmp_path / f"model{number}.py"
        path.write_text(MODEL.replace("CASE", case))
        commands.append(("export", f"{path}:build", "-o", tmp_path / "out", "--json"))
    for name, outcome in zip(ODD, all_forked(commands), strict=True):
        assert outcome.code == 2, (name, outcome)
        assert "Traceback" not in outcome.err, (name, outcome)
        assert json.loads(outcome.out)["error"]["hint"], (name, outcome)
    assert not (tmp_path / "out").exists()


def test_a_model_that_forks_and_returns_is_one_command(loaded, tmp_path):
    _, outcome = export(tmp_path, "(os.fork(), None)[1]")
    assert_refused(outcome)
    assert json.loads(outcome.out)["error"]["exit_code"] == 2  # once
    assert outcome.err.count("error: ") == 1


def test_the_time_limit_is_for_the_code_alone():
    """What is said about an exception may take longer: its stack has a thousand lines."""

    def fail():
        from mha_deploy.runtime import user_code

        isolation.limit_s = 0.2
        user_code.place_of_error = lambda *given: (time.sleep(0.5), "there")[1]
        with user_code.user_code():
            raise ValueError("its own")

    assert_refused(run(fail), "its own")


def test_code_that_lowers_the_recursion_limit_lowers_its_own():
    before = sys.getrecursionlimit()

    def lower():
        with user_code():
            sys.setrecursionlimit(before - 1)
        if sys.getrecursionlimit() != before:
            raise RuntimeError("it is ours, too")

    assert_orderly(run(lower), codes=[0])


NOISE = (
    "(print('noise'), os.write(1, b'noise'), os.system('echo noise'), sys.__stdout__.write('noise'), None)[4]"
)


def test_json_is_json_whatever_a_model_prints(loaded, tmp_path):
    _, outcome = export(tmp_path, NOISE)
    assert json.loads(outcome.out)["error"]
    assert outcome.err.count("noise") == 4


def test_a_script_that_runs_on_import_is_an_error(loaded, tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import argparse\nargparse.ArgumentParser().parse_args(['--help'])\n")
    assert_refused(run("export", f"{path}:build", "-o", tmp_path / "out"), str(path))


def test_a_factory_sees_its_neighbors_and_nobody_else_does(loaded, tmp_path):
    """Not the standard library, and none of the dependencies, in this process or in a child."""
    mark = tmp_path / "mark"
    for name in ("json", "tomllib", "onnxruntime", "msgspec", "tensorrt", "matplotlib", "turtle"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write(__name__)\n")
    (tmp_path / "neighbor.py").write_text("answer = 'the neighbor was here'\n")
    case = "(sys.stderr.write(__import__('neighbor').answer), good())[1]"  # its graph runs in a child
    _, outcome = export(tmp_path, case, limit=100)
    assert_orderly(outcome, codes=[0])
    assert "the neighbor was here" in outcome.err
    assert not mark.exists(), mark.read_text()
