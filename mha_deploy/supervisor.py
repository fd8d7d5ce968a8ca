"""The command line in a process of its own, beside one that only watches it.

Code of a user's model runs in the process of the command line, and may end it (`os._exit`, a crash in native
code, a call that never returns). An exit code is a verdict, so it must not be such code that gives it. The
command line says what it is doing on a page that both processes share, and leaves its exit code there. Where
it ends without one, or a deadline has passed, the other process says what happened, and where.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import mmap
import os
import re
import signal
import struct
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mha_deploy.errors import EXIT_BAD_INPUT, EXIT_INTERNAL_ERROR, EXIT_INTERRUPTED

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS)
_GRACE_S = 2.0  # how long after a deadline code may still end by itself
_TEARDOWN_S = 20.0  # how long a process may take to end after it has given its exit code
_FIELDS = struct.Struct("=dii?")  # deadline, exit code or _NONE, length of the place, whether stdout has text
_NONE = -1


class UserPart(Enum):
    """What of a user's runs, as the subject of a sentence."""

    CODE = "The code of the model"
    GRAPH = "The evaluation of the graph"


class Page:
    """What the two processes share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)
        self.stack: Any = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (lives as long as the process)
        self._set(0.0, _NONE, 0, False)

    def _set(self, deadline: float, code: int, length: int, printed: bool) -> None:
        self._memory[: _FIELDS.size] = _FIELDS.pack(deadline, code, length, printed)

    def _get(self) -> tuple[float, int, int, bool]:
        return _FIELDS.unpack(self._memory[: _FIELDS.size])  # type: ignore[return-value]

    @property
    def place(self) -> str:
        """Which code or graph of a user runs; empty for none."""
        return self._text[1]

    @property
    def part(self) -> UserPart:
        """What that is."""
        return UserPart.__members__.get(self._text[0], UserPart.CODE)

    @property
    def _text(self) -> list[str]:
        length = self._get()[2]
        text = self._memory[_FIELDS.size : _FIELDS.size + length].decode(errors="replace")
        return text.split("\0", 1) if "\0" in text else ["", ""]

    @property
    def deadline(self) -> float:
        """When it must have ended, as `time.monotonic` counts; 0 for no deadline."""
        return self._get()[0]

    @property
    def code(self) -> int | None:
        """The exit code, once there is one."""
        code = self._get()[1]
        return None if code == _NONE else code

    @property
    def printed(self) -> bool:
        """Whether something is on stdout."""
        return self._get()[3]

    def enter(self, place: str, deadline: float, part: UserPart = UserPart.CODE) -> None:
        """Note that code of a user runs."""
        text = f"{part.name}\0{place}".encode(errors="replace")[:2000]
        self._memory[_FIELDS.size : _FIELDS.size + len(text)] = text
        self._set(deadline, self._get()[1], len(text), self.printed)

    def finish(self, code: int) -> None:
        """Leave the exit code: what happens from now on does not change it."""
        self._set(0.0, code & 0xFF, 0, self.printed)

    def note_output(self) -> None:
        """Note that something is on stdout."""
        deadline, code, length, _ = self._get()
        self._set(deadline, code, length, True)


@dataclass
class Interruptions:
    """The signals that were received; where they are known, any other KeyboardInterrupt is a user's own."""

    received: list[int] = field(default_factory=list)
    are_known: bool = False


interruptions = Interruptions()

page: Page | None = None
"""That of this process, where another watches it."""


def supervise(main: Callable[[], None]) -> None:
    """Run the command line under supervision; the other process raises `SystemExit` with its exit code."""
    global page
    open_closed_streams()
    if "--in-process" in sys.argv or not _is_program():  # a debugger wants one process
        main()
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # may be ignored by whoever started this
    page, watcher = Page(), os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_SIGNALS, signal.SIGCHLD))
    _flush_streams()
    worker = os.fork()
    if worker == 0:
        _end_with(watcher)
        faulthandler.enable(page.stack)
        atexit.register(_leave, page)  # before any other, so that it is called after them
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            main()
        except SystemExit as stop:
            page.finish(stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1)
        except KeyboardInterrupt:  # before the command line handles signals
            page.finish(EXIT_INTERRUPTED)
        return
    code = _watch(worker, page)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    raise SystemExit(code)


def _leave(page: Page) -> None:
    """End this process without taking apart what it has loaded, which takes PyTorch half a second."""
    _flush_streams()
    if page.code is not None:
        os._exit(page.code)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError, ValueError):
            stream.flush()


def _is_program() -> bool:
    """Whether this is a program of its own, and not a call within another one that captures its output."""
    try:
        own = sys.stdout is None or sys.stdout.fileno() == 1
    except (OSError, ValueError, AttributeError):
        own = False
    return own and hasattr(signal, "sigtimedwait")


def open_closed_streams() -> None:
    """Put /dev/null where a standard stream is closed: else the next file that is opened takes its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)


def _end_with(watcher: int) -> None:
    """End this process when the one that watches it is killed."""
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != watcher:
        os._exit(1)


def _watch(worker: int, page: Page) -> int:
    """Pass on signals until the process has ended; gives its exit code, and prints why where it gave none."""
    ended_by, finished = 0, 0.0
    while True:
        info = signal.sigtimedwait((*_SIGNALS, signal.SIGCHLD), 0.25)
        if info is not None and info.si_signo in _SIGNALS:
            ended_by = info.si_signo
            with suppress(ProcessLookupError):
                os.kill(worker, info.si_signo)
        pid, status = os.waitpid(worker, os.WNOHANG)
        if pid:
            break
        now = time.monotonic()
        if page.code is not None:
            finished = finished or now
        late = page.deadline and now > page.deadline + _GRACE_S
        if late or (finished and now > finished + _TEARDOWN_S):
            if late:
                _report(
                    page, "did not return within the time limit", "--time-limit SECONDS, if it needs longer"
                )
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
            return EXIT_BAD_INPUT if late else page.code or 0
    if page.code is not None:
        return page.code
    ended = os.waitstatus_to_exitcode(status)
    if ended_by and ended == -ended_by:  # before the command line handles signals, or for the second time
        return 128 + ended_by
    how = f"ended the program with exit code {ended}"
    if ended < 0:
        known = -ended in set(signal.Signals)
        name = signal.Signals(-ended).name if known else f"signal {-ended}"
        how = f"crashed with {name}" if -ended in _CRASHES else f"was ended by {name}"
    if page.place:
        hint = "run that code by itself to see why; raise an exception there to refuse an input"
        graph_hint = "smaller axes, or `mha-deploy inspect FILE.onnx` for an operator of which it may be"
        _report(page, how, hint if page.part is UserPart.CODE else graph_hint)
        return EXIT_BAD_INPUT
    if ended < 0 and -ended not in _CRASHES:
        _report(page, how, "more memory, if it was the system that ended it", 128 - ended)
        return 128 - ended
    _report(page, how, "report it with these lines", EXIT_INTERNAL_ERROR)
    return EXIT_INTERNAL_ERROR


def _report(page: Page, how: str, hint: str, code: int = EXIT_BAD_INPUT) -> None:
    """Print an error as the command line does."""
    got = _line(page) or page.place or "no line of a model is known"
    what = f"{page.part.value if page.place else 'mha-deploy'} {how}."
    with suppress(OSError):
        os.write(2, f"error: {what}\n  got: {got}\n  try: {hint}\n".encode())
    if "--json" in sys.argv[1:] and not page.printed:
        error = {"what": what, "got": got, "hint": hint, "exit_code": code}
        with suppress(OSError):
            os.write(1, f"{json.dumps({'error': error}, indent=2)}\n".encode())


def _line(page: Page) -> str:
    page.stack.seek(0)
    return user_line(page.stack.read().decode(errors="replace"))


def user_line(stack: str) -> str:
    """The line of a user's file in a stack that `faulthandler` wrote, as `file.py:12`; empty for none."""
    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    ours = os.path.dirname(os.path.abspath(__file__))
    for file, number in re.findall(r'^  File "([^"<]+)", line (\d+)', stack, re.MULTILINE):
        if not file.startswith((ours, *libraries)) and "-packages/" not in file:
            return f"{file}:{number}"
    return ""
