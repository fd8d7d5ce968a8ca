"""Native code in child processes: what crosses, and what becomes of crashes, hangs and exhausted memory."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import failing_runtimes as failing
import ml_dtypes
import numpy as np
import pytest

from mha_deploy import runtime as runtimes
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.runtime import child, open_runner
from mha_deploy.runtime.child import RuntimeCrash, call_isolated, isolation, open_isolated

FAMILY = "test"


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch):
    monkeypatch.setattr(child, "isolation", isolation)
    before = (isolation.enabled, isolation.limit_s)
    isolation.enabled = True
    yield
    isolation.enabled, isolation.limit_s = before


def call(function, *arguments, **more):
    return call_isolated(FAMILY, function, *arguments, title="Runtime", step="testing", **more)


# -- what crosses ----------------------------------------------------------------------------------


ARRAYS = (
    np.arange(6, dtype=np.float16).reshape(2, 3),
    np.arange(1 << 20, dtype=np.float32).reshape(16, -1),
    np.arange(1 << 18).astype(ml_dtypes.bfloat16),
    np.zeros((0, 5), np.int64),
    np.arange(1 << 17).reshape(256, -1).T,
    np.broadcast_to(np.float32(1), (300, 300)),
    np.array(True),
)


def test_arrays_come_back_as_they_went():
    with open_isolated(FAMILY, "echo", failing.open_echo, None, ("x", "small")) as runner:
        for array in ARRAYS:
            got = runner.run({"x": array, "small": np.ones(3)})["x"]
            assert (got.dtype, got.shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(got, array)
            assert got.flags.writeable


@pytest.mark.slow
def test_a_model_in_a_child_gives_the_same_bits(bundles):
    bundle = bundles("tiny-mha")
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 16, 64)).astype(np.float16)}
    with open_runner("ort-cpu", bundle.model_path) as runner:
        there = runner.run(feeds)
        inputs, outputs, name = runner.inputs, runner.outputs, runner.name
    isolation.enabled = False
    with open_runner("ort-cpu", bundle.model_path) as runner:
        here = runner.run(feeds)
        assert (inputs, outputs, name) == (runner.inputs, runner.outputs, runner.name)
    np.testing.assert_array_equal(there["output"], here["output"])


def test_a_runner_has_a_process_and_without_isolation_it_has_none():
    with open_isolated(FAMILY, "echo", failing.open_echo) as runner:
        assert str(os.getpid()) not in runner.name.split()
    isolation.enabled = False
    with open_isolated(FAMILY, "echo", failing.open_echo) as runner:
        assert str(os.getpid()) in runner.name.split()


def test_a_closed_runner_leaves_its_process_to_the_next_and_two_open_ones_have_two():
    with open_isolated(FAMILY, "echo", failing.open_echo) as one:
        with open_isolated(FAMILY, "echo", failing.open_echo) as other:
            assert one.name != other.name
        with open_isolated(FAMILY, "echo", failing.open_echo) as third:
            assert third.name == other.name


def test_errors_keep_their_kind_and_parts():
    with pytest.raises(BackendUnavailable) as caught:
        call(failing.unavailable)
    assert (caught.value.what, caught.value.got, caught.value.hint) == ("Not here.", "nothing", "install it")
    with pytest.raises(ZeroDivisionError) as bug:
        call(failing.bug)
    assert "failing_runtimes.py" in str(bug.value.__cause__)


# -- crashes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "named"),
    [
        (failing.segmentation_fault, "SIGSEGV"),
        (failing.killed, "SIGKILL"),
        (failing.end_within_a_message, "exit code 0"),
    ],
)
def test_a_crash_is_an_error_that_names_signal_step_and_output(failure, named):
    with open_isolated(FAMILY, "Runtime 1.0", failing.open_echo, failure) as runner:
        with pytest.raises(RuntimeCrash) as caught:
            runner.run({"x": np.ones(37, np.float16)})
        assert named in caught.value.what
        assert "x [37]" in caught.value.what
        if failure is failing.segmentation_fault:
            assert "the last words of a runtime" in caught.value.got
        with pytest.raises(RuntimeCrash):  # it stays so, and says so
            runner.run({"x": np.ones(3, np.float16)})


def test_a_crash_names_no_node_that_was_parsed_and_shows_no_details():
    with pytest.raises(RuntimeCrash) as caught:
        call(failing.crash_behind_the_parser)
    assert "last" not in caught.value.what
    assert caught.value.got.splitlines()[0] == "INFO: Compiler backend"
    assert "VERBOSE" not in caught.value.got


def test_a_crash_in_a_decode_loop_is_the_error_that_leaves_it():
    with open_isolated(FAMILY, "Runtime 1.0", failing.open_generating, failing.segmentation_fault) as runner:
        with pytest.raises(RuntimeCrash) as caught, runner.decode_loop(B=1) as loop:
            loop.feed(np.ones((1, 1, 8), np.float16))
        assert "SIGSEGV" in caught.value.what
        assert "decoding 1 new tokens" in caught.value.what
        assert "the last words of a runtime" in caught.value.got


def test_a_hang_ends_at_the_limit():
    isolation.limit_s = 0.25
    with pytest.raises(RuntimeCrash) as caught:
        call(failing.hang)
    assert "within 0.25 s" in caught.value.what


def test_exhausted_memory_is_an_error():
    with pytest.raises(DeployError) as caught:
        call(failing.exhaust_memory)
    assert "memory" in caught.value.what


def test_code_that_exits_is_an_error():
    with pytest.raises(DeployError) as caught:
        call(failing.leave)
    assert "sys.exit" in caught.value.got


def test_an_interrupted_call_leaves_no_process():
    taken = child._take_child(FAMILY)
    with pytest.raises(KeyboardInterrupt):
        taken.call(report_and_hang, title="Runtime", step="testing", on_message=interrupt)
    assert not taken.is_alive


def report_and_hang():
    child.send_to_parent("under way")
    failing.hang()


def interrupt(message):
    raise KeyboardInterrupt


def test_a_child_ends_with_its_parent():
    program = (
        "import os, sys, failing_runtimes\nfrom mha_deploy.runtime import child\n"
        "taken = child._take_child('test')\nprint(taken._process.pid, flush=True)\n"
        "taken.call(failing_runtimes.hang, title='', step='')\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for _ in range(600):
        with contextlib.suppress(FileNotFoundError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.1)
                continue
        return
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the child lives on")


# -- verdicts --------------------------------------------------------------------------------------


@pytest.fixture
def validated(run_cli, bundles, tmp_path):
    """Validate a bundle through the command line, and return the exit code and the report."""

    folder = Path(shutil.copytree(bundles("tiny-gqa").path, tmp_path / "bundle"))

    def run(*options):
        done = run_cli("validate", folder, "--no-sweep", "--no-probe", *options)
        report = json.loads((folder / "report.json").read_text())
        assert (folder / "report.html").is_file()
        return done, report

    return run


def test_a_runtime_that_crashes_fails_and_the_others_are_judged(validated, monkeypatch):
    monkeypatch.setattr(runtimes, "_open_graph", failing.open_ort_that_fails)
    monkeypatch.setattr(child, "_PRELOADED", {})  # each of its processes ends before it needs ONNX Runtime
    done, report = validated()
    assert done.code == 1
    failures = [each["text"] for each in report["verdict"]["findings"] if each["level"] == "failure"]
    assert any("ort-cpu" in text and "SIGSEGV" in text for text in failures)
    assert {parity["runtime"].split()[0] for parity in report["parity"]} == {"onnx-reference"}
    assert all(parity["outcome"] == "passed" for parity in report["parity"])


@pytest.mark.slow
def test_a_crash_at_one_size_fails_that_case(validated, monkeypatch):
    monkeypatch.setattr(runtimes, "_open_graph", failing.open_ort_that_fails_at_37)
    done, report = validated("--runtime", "ort-cpu", "--runtime", "onnx-reference")
    assert done.code == 1
    ours = [parity for parity in report["parity"] if parity["runtime"].startswith("ort-cpu")]
    verdicts = {verdict["case"]: verdict for parity in ours for verdict in parity["verdicts"]}
    assert verdicts["opt"]["outcome"] == "passed"
    assert "SIGSEGV" in verdicts["odd"]["reason"]["got"]
    assert all(parity["outcome"] == "passed" for parity in report["parity"] if parity not in ours)


def test_a_build_that_crashes_names_the_node(run_cli, bundles, tmp_path, monkeypatch):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    monkeypatch.setattr("mha_deploy.engine.build._build", failing.build_that_fails)
    folder = Path(shutil.copytree(bundles("tiny-gqa").path, tmp_path / "bundle"))
    done = run_cli("build-engine", folder)
    assert done.code == 1
    assert "SIGSEGV" in done.err
    assert "node attention" in done.err
    assert not list(folder.glob("engines/*.engine"))
    assert not list(folder.glob(".lowered-*"))


@pytest.mark.slow
def test_deploy_reports_a_build_that_crashes(run_cli, tmp_path, monkeypatch):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    monkeypatch.setattr("mha_deploy.engine.build._build", failing.build_that_fails)
    done = run_cli("deploy", "tiny-mha", "-o", tmp_path / "bundle")
    assert done.code == 1
    report = json.loads((tmp_path / "bundle/report.json").read_text())
    assert any("SIGSEGV" in each["text"] for each in report["verdict"]["findings"])
    assert report["parity"][0]["outcome"] == "passed"


def test_the_option_in_process_starts_no_process(run_cli, bundles, tmp_path, monkeypatch):
    def refuse(family):
        raise AssertionError("a child was started")

    folder = Path(
        shutil.copytree(bundles("tiny-gqa").path, tmp_path / "bundle")
    )  # exporting one needs a child
    monkeypatch.setattr(child, "Child", refuse)
    monkeypatch.setattr(child, "_idle", {})
    fewer = ("--no-sweep", "--no-probe", "--no-report")
    assert run_cli("validate", folder, "--in-process", "--runtime", "ort-cpu", *fewer).code == 0
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    assert run_cli("build-engine", folder, "--in-process").code == 0
