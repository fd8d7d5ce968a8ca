"""Run `mha-deploy` in a fork of this loaded interpreter, under conditions that nobody wishes for.

A case is a command line or a function, with streams that are closed, full or broken, signals at a given time,
little memory, another working folder or other environment variables. A fork takes milliseconds, and a fresh
interpreter seconds. Whatever happens to the fork happens to it alone: the outcome says how it ended, what it
printed, and which of its processes outlived it.
"""

import gc
import importlib
import io
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mha_deploy as md

MEMORY = 3 << 30
SECONDS = 60.0
HUNG = "hung"
_MARK = "MHA_DEPLOY_TEST_RUN"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One command and what is wrong around it."""

    run: Sequence[object] | Callable[[], object]  # arguments of the command line, or a call of the Python API
    stdout: str = "file"  # or closed, full, broken, absent
    stderr: str = "file"
    signals: Sequence[tuple[float, int, str]] = ()  # after seconds, to main, group or child
    folder: Path | None = None  # the working folder
    variables: Mapping[str, str] = field(default_factory=dict)
    memory: int | None = MEMORY  # beyond what this process has; None: no limit
    seconds: float = SECONDS  # after which it counts as hung
    prepare: Callable[[], object] = int  # runs in the fork, before the command


@dataclass(frozen=True)
class Outcome:
    """How a case ended: its exit code, negative for a signal, or HUNG; what it printed; and what it left."""

    code: int | str
    out: str = ""
    err: str = ""
    left: tuple[str, ...] = ()  # processes that it started and that did not end with it


@cache
def load() -> None:
    """Import here what every fork would import again, also what the first command imports."""
    from mha_deploy.cli import main

    for name in (
        "graph.fuse",
        "exporter.flow",
        "validation.run",
        "regression.compare",
        "runtime.onnx_reference",
    ):
        importlib.import_module(f"mha_deploy.{name}")
    for name in ("onnx.reference.op_run", "rich.console", "rich.progress", "rich.table", "onnxruntime"):
        with suppress(ImportError):
            importlib.import_module(name)
    before = sys.argv
    for arguments in (("models", "--json"), ("inspect", os.devnull)):
        sys.argv = ["mha-deploy", *arguments]
        with suppress(SystemExit), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            main()
    sys.argv = before
    gc.collect()
    gc.freeze()  # what a fork collects, it copies


def in_this_process() -> None:
    """A `prepare` that lets runtimes run in the fork itself: children take seconds to import them."""
    from mha_deploy.runtime.child import isolation

    isolation.enabled = False


def run(*arguments: object, **conditions: Any) -> Outcome:
    """Run `mha-deploy` with these arguments in a fork, or a function; the conditions are fields of `Case`."""
    only = arguments[0] if len(arguments) == 1 and callable(arguments[0]) else arguments
    return run_case(Case(run=only, **conditions))


def run_case(case: Case) -> Outcome:
    """Run a case, and wait for it and for the processes that it started."""
    load()
    mark, others = uuid.uuid4().hex, frozenset(_processes())
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        gc.freeze()  # what came since then, too
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(_run_in_fork(case, out.fileno(), err.fileno(), mark))
            finally:
                os._exit(99)
        code = _wait(pid, case)
        left = _left_behind(pid, mark, others)
        return Outcome(code, _text(out), _text(err), left)


def assert_orderly(outcome: Outcome, codes: Sequence[int] = (0, 1, 2, 3)) -> Outcome:
    """Whatever the outcome is, it is no bug, hang, signal or traceback, and no process is left behind."""
    assert outcome.code in codes, (outcome.code, outcome.err[-3000:])
    assert "Traceback" not in outcome.err, outcome.err[-3000:]
    assert "Exception ignored" not in outcome.err, outcome.err[-3000:]
    assert "\x1b" not in outcome.out + outcome.err
    assert not outcome.left, outcome
    return outcome


def assert_refused(outcome: Outcome, *words: str, codes: Sequence[int] = (2,)) -> Outcome:
    """A refusal says what it got and what to try."""
    assert_orderly(outcome, codes)
    assert "  try: " in outcome.err, outcome.err
    for word in words:
        assert word in outcome.err, (word, outcome.err)
    return outcome


# -- the fork --------------------------------------------------------------------------------------


def _run_in_fork(case: Case, out: int, err: int, mark: str) -> int:
    os.setsid()  # signals to the group are its own
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update({_MARK: mark, **case.variables})
    if case.folder is not None:
        os.chdir(case.folder)
    if torch := sys.modules.get("torch"):  # the threads of this process are not in its fork
        torch.set_num_threads(1)
        torch.backends.mkldnn.set_flags(False)  # Arm's library below it has its own number of threads
    for number, kind, file in ((1, case.stdout, out), (2, case.stderr, err)):
        _open_stream(number, kind, file)
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if case.memory is not None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + case.memory,) * 2)
    warnings.simplefilter("error", ResourceWarning)  # raised where nobody catches it: it is printed
    sys.unraisablehook = sys.__unraisablehook__
    case.prepare()
    code = _called(case.run) if callable(case.run) else _command(case.run)
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError, ValueError):
            stream.flush()
    from mha_deploy.runtime.child import end_children

    end_children()  # as at the end of an interpreter
    return code


def _open_stream(number: int, kind: str, file: int) -> None:
    """Give a stream its descriptor, and the object that Python makes of it when it starts."""
    name = "stdout" if number == 1 else "stderr"
    if kind in ("closed", "absent"):
        os.close(number)
        if kind == "absent":  # as a service without streams
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        setattr(sys, name, None)
        return
    if kind == "full":
        file = os.open("/dev/full", os.O_WRONLY)
    elif kind == "broken":
        reader, file = os.pipe()
        os.close(reader)
    os.dup2(file, number)
    opened = open(number, "w", closefd=False, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    setattr(sys, name, opened)


def _command(arguments: Sequence[object]) -> int:
    from mha_deploy.__main__ import main

    sys.argv = ["mha-deploy", *map(str, arguments)]
    try:
        main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:  # noqa: BLE001 (it should not have come here)
        traceback.print_exc()
        return 97
    return 98


def _called(function: Callable[[], object]) -> int:
    """The exit code that the command line would give a call of the Python API."""
    try:
        function()
    except md.DeployError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BaseException:  # noqa: BLE001 (a bug)
        traceback.print_exc()
        return 70
    return 0


# -- around it -------------------------------------------------------------------------------------


def _wait(pid: int, case: Case) -> int | str:
    """Send the signals of a case, and give its exit code."""
    begin, waiting = time.monotonic(), sorted(case.signals)
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        passed = time.monotonic() - begin
        while waiting and passed >= waiting[0][0]:
            _send(pid, *waiting.pop(0)[1:])
        if passed > case.seconds:
            for each in _of_session(pid):
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            os.waitpid(pid, 0)
            return HUNG
        time.sleep(0.005)


def _send(pid: int, number: int, to: str) -> None:
    targets = {"main": [pid], "group": _of_session(pid), "child": descendants(pid)[-1:]}[to]
    for target in targets:
        with suppress(ProcessLookupError):
            os.kill(target, number)


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and theirs, oldest first."""
    found = [pid]
    for each in found:
        with suppress(OSError):
            found += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
    return found[1:]


def _stat(pid: int) -> list[str]:
    """State, parent, group, session … of a process; nothing where it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _processes() -> list[int]:
    return [int(each) for each in os.listdir("/proc") if each.isdecimal()]


def _of_session(session: int) -> list[int]:
    return [each for each in _processes() if _stat(each)[3:4] == [str(session)]]


def _left_behind(session: int, mark: str, others: frozenset[int], seconds: float = 10.0) -> tuple[str, ...]:
    """The commands of processes that a case started and that are still there after some seconds."""
    end = time.monotonic() + seconds
    while True:
        left = {}
        for pid in set(_processes()) - others:
            with suppress(OSError):
                marked = mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
                state = _stat(pid)
                if state and state[0] != "Z" and (marked or state[3] == str(session)):
                    left[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
        if not left or time.monotonic() > end:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return tuple(left.values())
        time.sleep(0.05)


def _text(file: Any) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
