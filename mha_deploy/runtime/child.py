"""Native code in a child process: a runtime that crashes or hangs ends its child, and not this tool.

A `Child` is a Python process that runs functions of this package; `open_isolated` opens a runner in one and
returns a `Runner` that forwards to it. Calls are pickled, and their arrays cross in anonymous shared memory
(one copy). A child that dies or exceeds the time limit becomes a `RuntimeCrash`. Timing happens inside the
child, so no latency contains the forwarding. A child whose runner was closed serves the next runner of its
family: importing a runtime takes longer than most calls.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import io
import json
import mmap
import os
import pickle
import re
import resource
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mha_deploy.errors import (
    EXIT_VERDICT_FAILED,
    BundleError,
    DeployError,
    out_of_memory,
    place_of_error,
    text_of_error,
)
from mha_deploy.process import defer_imports, python_command, start
from mha_deploy.runtime.runner import Arrays, Closing, ProfiledRunner, Runner, check_names
from mha_deploy.supervisor import user_line

if TYPE_CHECKING:
    from mha_deploy.runtime.timing import Timing, TimingPlan

T = TypeVar("T")

ONNX_RUNTIME, ONNX_REFERENCE, PYTORCH = "onnxruntime", "onnx", "torch"
EXPORTER = "exporter"  # of PyTorch

# What a child of a family imports before its first call.
_PRELOADED = {
    ONNX_RUNTIME: ("mha_deploy.runtime.ort", "onnxruntime"),
    EXPORTER: ("mha_deploy.exporter.exporter", "torch.export._trace"),
}
_SHARED_FROM = 1 << 16  # smaller messages are cheaper on the socket
_GRACE_S = 30.0  # how much later than its parent a child enforces the time limit by itself
_LOG_LINES, _LOG_BYTES = 8, 1 << 15
_DETAIL = "VERBOSE: "  # of TensorRT, which reports every step


@dataclass
class Isolation:
    """How native code is run; one setting for the process."""

    enabled: bool = True  # children for runtimes; off, a debugger sees them, and a crash ends everything
    limit_s: float = 3600.0  # after how many seconds a call counts as hung
    trust_code: bool = False  # whether code that a bundle names or contains may run
    # What may run in any case: factories that this process exported, hashes of engines that it built.
    own: set[str] = field(default_factory=set)

    def refuse_untrusted(self, code: str, title: str | None = None) -> None:
        """Refuse to run code of a bundle, a factory or the hash of an engine, without permission."""
        if not self.trust_code and code not in self.own:
            problem = "The bundle names or contains code, which runs only with permission."
            hint = "--trust-code, if you know who wrote it"
            raise BundleError(problem, got=title or code, hint=hint)


isolation = Isolation()


class RuntimeCrash(DeployError):
    """A runtime ended its process, or did not answer within the time limit; `got` are its last lines."""

    exit_code = EXIT_VERDICT_FAILED


# -- the parent's side -----------------------------------------------------------------------------


class Child:
    """A process that runs functions of this package, one at a time; its family decides what it preloads."""

    def __init__(self, family: str) -> None:
        self.family = family
        self._crash: RuntimeCrash | None = None
        self._pipe, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the child)
        preload = json.dumps(_PRELOADED.get(family, ()))
        with theirs:
            self._process = start(
                python_command(theirs.fileno(), preload, os.getpid(), code=_START),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        _children.append(self)

    @property
    def is_alive(self) -> bool:
        """Whether it can be called."""
        return self._process.poll() is None

    def call(
        self,
        function: Callable[..., T],
        *arguments: Any,
        title: str,
        step: str,
        on_message: Callable[[Any], None] | None = None,
    ) -> T:
        """Run a function of a module, which is pickled by its name, in the child, and return its result.

        Errors name the runtime (`title`) and its `step`; `on_message` receives what `send_to_parent` sends.
        """
        if self._crash is not None:
            raise RuntimeCrash(
                "The process of the runtime has already ended.",
                got=self._crash.what,
                hint="open the runner again",
            )
        begin, limit = self._log.seek(0, io.SEEK_END), isolation.limit_s
        deadline = time.monotonic() + limit
        try:
            settings = (isolation.trust_code, isolation.own, DeployError.is_typed)
            _send(self._pipe, (function, arguments, os.getcwd(), limit + _GRACE_S, settings))
            while True:
                while not self._pipe.poll(min(1.0, max(0.0, deadline - time.monotonic()))):
                    # A process that the child started may keep the connection open after the child's end.
                    if not self.is_alive:
                        raise EOFError
                    if time.monotonic() > deadline:
                        raise TimeoutError
                kind, content = _receive(self._pipe)
                if kind != "message":
                    break
                if on_message is not None:
                    on_message(content)
        except TimeoutError as error:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._process.send_signal(signal.SIGUSR1)  # it writes where it is
                self._process.wait(0.3)
            self.kill()
            hint = "--time-limit SECONDS, if it needs longer"
            raise self._ended(f"{title} did not answer within {limit:g} s", step, begin, hint) from error
        except (EOFError, ConnectionError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            self.kill()
            hint = "--in-process with a debugger shows where; another version of the runtime may not"
            how = _ending(self._process.returncode)
            raise self._ended(f"{title} {how}", step, begin, hint) from error
        except BaseException:  # interrupted: the result of the call in the child would have no reader
            self.close()
            raise
        if kind == "result":
            return content  # type: ignore[no-any-return]
        raised, trace = content
        raise raised from _ChildTraceback(trace)

    def _ended(self, problem: str, step: str, since: int, hint: str) -> RuntimeCrash:
        """The error of a call that ended the child, with its last lines and the node it was at."""
        end = self._log.seek(0, io.SEEK_END)
        self._log.seek(max(since, end - _LOG_BYTES))
        output = self._log.read().decode(errors="replace").strip()
        self._log.close()
        # The Python stack of a crash only where there is no other output.
        words, begin, stack = output.partition("Fatal Python error: ")
        crashed = bool(begin)
        for head in ("Current thread 0x", "Stack (most recent call first)"):  # of a call that was too long
            if not begin:
                words, begin, stack = output.partition(head)
        line = user_line(stack)
        lines = [line for line in words.strip().splitlines() if not line.startswith(_DETAIL)][-_LOG_LINES:]
        if not lines and crashed:
            lines = stack.splitlines()[:_LOG_LINES]
        # By TensorRT's parser, unless it is done with it: then the builder crashed.
        nodes = re.findall(r"Parsing node: (\S+) \[", output)[-1:]
        nodes = [node for node in nodes if not re.search(rf"{re.escape(node)} \[\w+\] outputs: ", output)]
        places = [f"node {node}" for node in nodes] + [line] * bool(line)
        what = f"{problem} while {step}{''.join(f', at {place}' for place in places)}."
        self._crash = RuntimeCrash(what, got="\n".join(line[:200] for line in lines) or None, hint=hint)
        return self._crash

    def kill(self) -> None:
        """End it now; the log can still be read."""
        if self in _children:
            _children.remove(self)
        self._pipe.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it, and let go of its log."""
        self.kill()
        self._log.close()


def _ending(code: int) -> str:
    """How a process ended, in words, from its exit code."""
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL; the machine may be out of memory)"
    if code >= 0:
        return f"ended its process with exit code {code}"
    known = -code in set(signal.Signals)
    return f"crashed with {signal.Signals(-code).name}" if known else f"was ended by signal {-code}"


class _ChildTraceback(Exception):
    """Where an exception was raised in the child; shown as its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


_children: list[Child] = []
_idle: dict[str, list[Child]] = {}
# One of a family: an idle child of PyTorch on a GPU occupies gigabytes. ONNX Runtime runs an original beside
# what is made of it.
_MOST_IDLE = {ONNX_RUNTIME: 2}
_inherited: list[Child] = []


def _leave_children() -> None:
    """Children belong to the process that started them, and not to its forks, which only keep the objects.

    To delete one that runs is a warning of Python's.
    """
    _inherited.extend(_children)
    _children.clear()
    _idle.clear()


os.register_at_fork(after_in_child=_leave_children)


@atexit.register
def end_children() -> None:
    """End every child of this process."""
    _idle.clear()
    for child in tuple(_children):
        child.close()


def prepare_child(family: str) -> None:
    """Start a child in advance, so that it imports its runtime while this process works."""
    if isolation.enabled and not _idle.get(family):
        _idle.setdefault(family, []).append(Child(family))


def _take_child(family: str) -> Child:
    with contextlib.suppress(IndexError):  # none is left; other threads take from the list, too
        while True:
            child = _idle.setdefault(family, []).pop()
            if child.is_alive:
                return child
            child.close()
    return Child(family)


def _give_back(child: Child) -> None:
    idle = _idle.setdefault(child.family, [])
    if child.is_alive and len(idle) < _MOST_IDLE.get(child.family, 1):
        idle.append(child)
    else:
        child.close()


def call_isolated(family: str, function: Callable[..., T], *arguments: Any, **call: Any) -> T:
    """Run one function in a child of a family, or here where isolation is off; keywords as `Child.call`."""
    if not isolation.enabled:
        return function(*arguments)
    child = _take_child(family)
    try:
        return child.call(function, *arguments, **call)
    finally:
        _give_back(child)


def open_isolated(family: str, title: str, open_runner: Callable[..., Runner], *arguments: Any) -> Runner:
    """Open a runner by a function of a module, in a child of a family, or here where isolation is off."""
    if not isolation.enabled:
        return open_runner(*arguments)
    child = _take_child(family)
    try:
        opened = child.call(_open_in_child, open_runner, arguments, title=title, step="loading the model")
    except BaseException:
        _give_back(child)
        raise
    profiled, number, attributes = opened
    return (ProfiledChildRunner if profiled else ChildRunner)([child], number, attributes)


class _Remote(Closing):
    """Something in a child process, by its number there; its attributes do not change.

    `held` has the child, until the runner is closed; a decode loop shares it with its runner.
    """

    name: str

    def __init__(self, held: list[Child], number: int, attributes: Mapping[str, Any]) -> None:
        self._held, self._number = held, number
        vars(self).update(attributes)

    def apply(
        self, function: Callable[..., T], *arguments: Any, step: str = "running", last: bool = False
    ) -> T:
        """Run a function on it in the child, which forgets it after the `last` call."""
        if not self._held:
            raise DeployError(f"{self.name} is closed.", hint="open it again")
        call = (_apply_in_child, self._number, last, function, arguments)
        return self._held[0].call(*call, title=self.name, step=step)


class ChildRunner(_Remote, Runner):
    """A runner that lives in a child process."""

    def run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Check the inputs against the model, then run it."""
        check_names(self.inputs, feeds)
        self.refuse_sizes(feeds)
        return self.apply(methodcaller("run", dict(feeds)), step=f"running {_sizes(feeds)}")

    _run = run

    def time(self, feeds: Arrays, plan: TimingPlan | None = None) -> Timing:
        """How long one call takes with inputs that are on the device already; measured in the child."""
        check_names(self.inputs, feeds)
        return self.apply(methodcaller("time", dict(feeds), plan), step=f"timing {_sizes(feeds)}")

    def decode_loop(self, *, B: int, T: int | None = None) -> ChildDecodeLoop:
        """A decode loop with a cache on the device; close it before the runner."""
        opened = self.apply(_open_decode_loop, B, T, step="preparing the decode loop")
        return ChildDecodeLoop(self._held, *opened)

    def close(self) -> None:
        """Close the runner in the child, and keep the child for the next one."""
        if not self._held:
            return
        try:
            if self._held[0].is_alive:
                self.apply(methodcaller("close"), step="closing it", last=True)
        finally:
            _give_back(self._held.pop())


class ProfiledChildRunner(ChildRunner):
    """A runner in a child process whose engine has optimization profiles."""

    def profiles_for(self, feeds: Arrays) -> list[int]:
        """The profiles that admit these inputs; only their shapes and types cross."""
        kinds = {name: (array.shape, array.dtype) for name, array in feeds.items()}
        return self.apply(_profiles_for, kinds, step="choosing a profile")

    def run_in_profile(self, feeds: Arrays, profile: int) -> dict[str, np.ndarray]:
        """Run under one of them."""
        call = methodcaller("run_in_profile", dict(feeds), profile)
        return self.apply(call, step=f"running {_sizes(feeds)}")


class ChildDecodeLoop(_Remote):
    """A decode loop in a child process; see `runtime.decode_loop.DeviceLoop`."""

    lengths: np.ndarray
    most_tokens: int | None

    def feed(self, x: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
        """Run S new tokens of every batch element."""
        step = f"decoding {x.shape[1]} new tokens after {self.lengths.tolist()}"
        output, self.lengths = self.apply(_feed, x, counts, step=step)
        return output

    def cache(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of keys and values."""
        return self.apply(methodcaller("cache"), step="reading the cache")

    def close(self) -> None:
        """Free the device's memory; a crash has freed it, and is the error to report."""
        if not self._held or self._held[0].is_alive:
            self.apply(methodcaller("close"), step="closing the decode loop", last=True)


def _sizes(feeds: Arrays) -> str:
    return ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())


# -- messages --------------------------------------------------------------------------------------


def _send(pipe: Connection, message: object) -> None:
    """Send one message: its arrays in shared memory where they are large, else with the rest."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    sizes = [view.nbytes for view in views]
    if sum(sizes) < _SHARED_FROM:
        sizes, body = [], pickle.dumps(message, protocol=5)
    pipe.send(sizes)
    if sizes:
        # Memory with a file descriptor and no name: nothing is left behind, however a process ends.
        shared = os.memfd_create("mha-deploy") if hasattr(os, "memfd_create") else None
        with tempfile.TemporaryFile() if shared is None else os.fdopen(shared, "rb+", buffering=0) as memory:
            memory.truncate(sum(map(_padded, sizes)))
            with mmap.mmap(memory.fileno(), 0) as room:
                for view, at in zip(views, accumulate(map(_padded, sizes), initial=0), strict=False):
                    room[at : at + view.nbytes] = view
            send_handle(pipe, memory.fileno(), None)
    pipe.send_bytes(body)


def _receive(pipe: Connection) -> Any:
    try:
        sizes, buffers = pipe.recv(), []
        if sizes:
            with open(recv_handle(pipe), "rb+", buffering=0) as memory:
                room = memoryview(mmap.mmap(memory.fileno(), 0))  # lives as long as the arrays in it
            places = zip(sizes, accumulate(map(_padded, sizes), initial=0), strict=False)
            buffers = [room[at : at + size] for size, at in places]
        body = pipe.recv_bytes()
    except OSError as error:  # the other process ended within a message
        raise EOFError from error
    return pickle.loads(body, buffers=buffers)


def _padded(size: int) -> int:
    """Sizes at which the next array starts on a cache line."""
    return -(-size // 64) * 64


# -- the child's side ------------------------------------------------------------------------------

_START = f"""
import json
from {__name__} import serve
serve(int(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]))
"""

_objects: dict[int, Any] = {}
_parent: Connection | None = None


def send_to_parent(message: object) -> None:
    """Send progress from a function that runs in a child; does nothing in any other process."""
    if _parent is not None:
        _send(_parent, ("message", message))


def is_child() -> bool:
    """Whether this process is a child of another."""
    return _parent is not None


def serve(handle: int, preload: tuple[str, ...], parent: int) -> None:
    """Answer calls until the parent closes the connection; the whole life of a child."""
    global _parent
    os.set_inheritable(handle, False)
    _parent = Connection(handle)
    isolation.enabled = False
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, all_threads=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory()
    gc.set_threshold(50_000, 20, 100)  # modules stay: it is of no use to look for garbage among them
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    defer_imports()
    for name in preload:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    while True:
        try:
            function, arguments, folder, limit, settings = _receive(_parent)
            isolation.trust_code, isolation.own, DeployError.is_typed = settings
            os.chdir(folder)  # relative paths are the parent's
        except (EOFError, ConnectionError):
            break
        except Exception as error:  # noqa: BLE001 (a call that cannot be unpickled)
            _send(_parent, _failure(error))
            continue
        faulthandler.dump_traceback_later(limit, exit=True)  # also where the parent is gone
        try:
            answer: tuple[str, Any] = ("result", function(*arguments))
        except BaseException as error:  # noqa: BLE001 (SIGINT is ignored here: what is raised is of the code)
            answer = _failure(error)
        faulthandler.cancel_dump_traceback_later()
        del function, arguments
        try:
            _send(_parent, answer)
        except ConnectionError:
            break
        except Exception as error:  # noqa: BLE001 (a result that cannot be pickled is a bug: report it)
            _send(_parent, _failure(error))
        del answer
    os._exit(0)  # native libraries can crash while they unload


def _limit_memory() -> None:
    """Let an allocation fail that the machine cannot serve, instead of ending other programs."""
    most = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError):  # of the container, where there is one
        most.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)  # private memory: reserved addresses do not count
    most += [each for each in (soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(most), hard))


def _failure(error: BaseException) -> tuple[str, Any]:
    """What the parent raises, and where it was raised here."""
    trace = traceback.format_exc()
    if isinstance(error, MemoryError):
        hint = "smaller axes, a smaller batch, or a machine with more memory"
        error = DeployError("The runtime ran out of memory.", got=out_of_memory(error), hint=hint)
    elif isinstance(error, SystemExit):
        got, hint = (
            f"{place_of_error(error)}: sys.exit({error.code!r})",
            "raise an exception there, or return",
        )
        error = DeployError("The code that was run ended its process.", got=got, hint=hint)
    elif not isinstance(error, Exception):
        got, hint = f"{place_of_error(error)}: {text_of_error(error)}", "raise an Exception there, or return"
        error = DeployError(
            "The code that was run raised something that is not an Exception.", got=got, hint=hint
        )
    try:
        pickle.loads(pickle.dumps(error))
        # A class of a user's file cannot be found by the parent.
        known = type(error).__module__.partition(".")[0]
        is_theirs = known.startswith("_mha_deploy_factory_") or known == "__main__"
    except Exception:  # noqa: BLE001 (exceptions of native modules may not pickle)
        is_theirs = True
    return "error", (RuntimeError(text_of_error(error)) if is_theirs else error, trace)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


def _open_in_child(
    open_runner: Callable[..., Runner], arguments: tuple[Any, ...]
) -> tuple[bool, int, dict[str, Any]]:
    runner = open_runner(*arguments)
    return isinstance(runner, ProfiledRunner), *_kept(runner, "name title device can_decode inputs outputs")


def _open_decode_loop(runner: Any, B: int, T: int | None) -> tuple[int, dict[str, Any]]:
    return _kept(runner.decode_loop(B=B, T=T), "name most_tokens lengths")


def _kept(thing: object, attributes: str) -> tuple[int, dict[str, Any]]:
    """The number under which the child keeps something for its parent, and some of its attributes."""
    number = max(_objects, default=0) + 1
    _objects[number] = thing
    return number, {name: getattr(thing, name) for name in attributes.split()}


def _apply_in_child(number: int, last: bool, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    return function(_objects.pop(number) if last else _objects[number], *arguments)


def _profiles_for(runner: ProfiledRunner, kinds: Mapping[str, tuple[tuple[int, ...], Any]]) -> list[int]:
    feeds = {name: np.broadcast_to(np.zeros((), dtype), shape) for name, (shape, dtype) in kinds.items()}
    return runner.profiles_for(feeds)


def _feed(loop: Any, x: np.ndarray, counts: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    return loop.feed(x, counts), loop.lengths
