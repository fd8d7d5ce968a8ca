"""Say in a few words why PyTorch could not export a module, and which line of it is to blame."""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from mha_deploy.errors import ExportError
from mha_deploy.export.program_axes import TORCH_NAME
from mha_deploy.export.torch_exporter import first_cause

_SHAPES_LOG = "torch.fx.experimental.symbolic_shapes"
_PACKAGE, _TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
_PYTHON = Path(traceback.__file__).parent

_LONGEST = 300

_VIOLATED = re.compile(r"Constraints violated \(([^)]*)\)")
_CONSTANT = re.compile(r"You marked (\w+) as dynamic but your code specialized it to be a constant \((\d+)\)")
_NOT_ALL = re.compile(r"Not all values of (\w+) = .* satisfy the generated guard (.*?)\.?$", re.MULTILINE)
_FIX = re.compile(r"Suggested fixes:\n((?:  .*\n?)+)")
_SIZE = re.compile(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]")
_CREATED = re.compile(r"create_symbol (\w+) = \d+ for L\['(\w+)'\]\.size\(\)\[(\d+)\]")
_UNKNOWN = re.compile(r"Found <class '([\w.]+)'> in output, which is not a known type")
_SYMBOL = re.compile(r"\bs\d+\b")
_RANGE_GUARD = re.compile(r"float16|isfinite|isinf|isnan")
_GUARD = re.compile(r"eval (?:\[guard suppressed\] )?(.*) \[guard added\]")

SizeNames = Callable[[str, int], str]
"""Names a dimension of an input: `("tokens", 1)` is `S`."""


def may_be_small_sizes(error: Exception) -> bool:
    """Whether PyTorch may only miss proof for small sizes: there it takes derived sizes of 0 and 1 apart."""
    text = str(error)
    return bool(_VIOLATED.search(text)) and not _CONSTANT.search(text)


def explain_failure(error: Exception, name_of: SizeNames, trace_again: Callable[[], object]) -> ExportError:
    """Make an error for the user of one from `torch.export`.

    Args:
        error: What was raised.
        name_of: Names the dimensions of the inputs.
        trace_again: Does again what failed. It is called where PyTorch knows more, but only logs it.
    """
    text = str(error).replace(TORCH_NAME, "")
    about_sizes = _VIOLATED.search(text) is not None
    listener = _Listener(name_of)
    if about_sizes or _SYMBOL.search(text):
        _listen(listener, trace_again)
    unknown = _UNKNOWN.search(text)
    if unknown:
        return ExportError(
            "The module returns an object that is not made of tensors.",
            got=unknown[1],
            hint="a wrapper that returns tensors, or an option of the module such as use_cache=False",
        )
    if not about_sizes:
        place = last_own_line(traceback.extract_tb(error.__traceback__))
        cause = _SYMBOL.sub(lambda match: listener.axes.get(match[0], match[0]), first_cause(error))
        return ExportError(
            "PyTorch could not trace the module.",
            got=_joined(place, cause[:_LONGEST]),
            hint=_without_guard(place),
        )
    constants = dict(_CONSTANT.findall(text))
    if constants:
        return _for_one_size_only(constants, listener.places)
    return _not_for_all_sizes(text, name_of, listener.places)


def _without_guard(place: str | None) -> str | None:
    """A hint where the line looks after the range of FP16, which modules do in FP16 only."""
    file, _, line = (place or "").rpartition(":")
    if not line or not _RANGE_GUARD.search(linecache.getline(file, int(line))):
        return None
    return "--precision auto: it traces the module in float32, without its branches for FP16"


def _for_one_size_only(constants: dict[str, str], places: dict[str, str]) -> ExportError:
    axes = " and ".join(constants)
    return ExportError(
        f"The module works for one size of {axes} only.",
        got="; ".join(
            _joined(places.get(axis), f"{axis} is always {size}") for axis, size in constants.items()
        ),
        hint=f"fix {axes} to one size, or let the module take it from its inputs",
    )


def _not_for_all_sizes(text: str, name_of: SizeNames, places: dict[str, str]) -> ExportError:
    def named(match: re.Match[str]) -> str:
        return name_of(match[1], int(match[2]))

    guards = [(axis, _SIZE.sub(named, guard)) for axis, guard in _NOT_ALL.findall(text)]
    guards.sort(key=lambda each: "!=" in each[1])  # those are single sizes that were not traced
    fixes = _FIX.search(text)
    lines = [line.strip() for line in fixes[1].splitlines()] if fixes else []
    violated = _VIOLATED.search(text)
    axes = violated[1] if violated else ""
    said = _joined(places.get(guards[0][0]), f"it needs {guards[0][1]}") if guards else text.splitlines()[0]
    return ExportError(
        f"The module does not work for every size of {axes}.",
        got=said,
        hint=f"PyTorch suggests {'; '.join(lines)}"
        if lines
        else "a narrower range, or a module that takes any size",
    )


def _joined(place: str | None, text: str) -> str:
    return text if place is None else f"{place}: {text}"


def last_own_line(frames: Iterable[traceback.FrameSummary]) -> str | None:
    """The innermost line that is neither Python's nor PyTorch's nor ours, as `file:line`."""
    own = [frame for frame in frames if _is_own(Path(frame.filename))]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None


def _is_own(path: Path) -> bool:
    if not path.is_file() or path.parent in (_PYTHON, _PYTHON / "logging"):
        return False
    return not any(place in path.parents for place in (_PACKAGE, _TORCH))


# -- what PyTorch logs -------------------------------------------------------------------------------


class _Listener(logging.Handler):
    """Notes from which line PyTorch fixes a size: it logs that while the module's frames are on the stack.

    Attributes:
        axes: The name of the size that a symbol of PyTorch stands for.
        places: The line of the module that first asked for a certain size of an axis.
    """

    def __init__(self, name_of: SizeNames) -> None:
        super().__init__(logging.INFO)
        self.axes: dict[str, str] = {}
        self.places: dict[str, str] = {}
        self._name_of = name_of

    def emit(self, record: logging.LogRecord) -> None:
        """Read one message."""
        text = record.getMessage()
        created = _CREATED.match(text)
        if created:
            self.axes[created[1]] = self._name_of(created[2], int(created[3]))
        guard = _GUARD.match(text)
        if not guard:
            return
        place = last_own_line(traceback.extract_stack())
        for symbol in _SYMBOL.findall(guard[1]):
            if symbol in self.axes and place is not None:
                self.places.setdefault(self.axes[symbol], place)


def _listen(listener: logging.Handler, trace_again: Callable[[], object]) -> None:
    """Trace again, with PyTorch's log of sizes going to the listener."""
    log = logging.getLogger(_SHAPES_LOG)
    handlers, propagate, level = log.handlers, log.propagate, log.level
    with silenced(but=_SHAPES_LOG):
        log.handlers, log.propagate = [listener], False
        log.setLevel(logging.INFO)
        try:
            trace_again()
        except Exception:  # noqa: BLE001 (the failure that is being explained)
            return
        finally:
            log.handlers, log.propagate = handlers, propagate
            log.setLevel(level)


@contextlib.contextmanager
def silenced(*, but: str = "") -> Iterator[None]:
    """Let PyTorch log nothing: what it logs of a failure is said by the error."""
    known = logging.getLogger().manager.loggerDict
    names = [name for name in known if name.split(".")[0] == "torch" and name != but]
    loggers = [logger for logger in map(logging.getLogger, names) if not logger.disabled]
    for logger in loggers:
        logger.disabled = True
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # it prints programs there, too
            yield
    finally:
        for logger in loggers:
            logger.disabled = False
