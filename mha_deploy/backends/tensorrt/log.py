"""What TensorRT says while it works: one logger per process, its messages kept and linked to nodes.

TensorRT registers the first logger it is given and ignores every later one, so a logger per build would
hear nothing from the second build on. One collector per imported module lives as long as the process, and
`collect` hands out what was said in between.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mha_deploy.backends.child import is_child
from mha_deploy.backends.tensorrt.versions import TensorRT

ERRORS = ("INTERNAL_ERROR", "ERROR")

# What a machine without a driver adds to every error: true, and no part of the reason.
_NOISE = ("catchCudaError", "cudaError 35")

_loggers: dict[str, Any] = {}
_sinks: list[list[Message]] = []
_one_build_at_a_time = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message.

    Args:
        severity: `INTERNAL_ERROR`, `ERROR`, `WARNING`, `INFO` or `VERBOSE`.
        text: What was said.
        nodes: Names of the ONNX nodes it speaks of.
    """

    severity: str
    text: str
    nodes: tuple[str, ...] = ()


@contextmanager
def collect(rt: TensorRT) -> Iterator[list[Message]]:
    """Keep the messages of one build.

    A second thread waits: all builds of a process speak through one logger, and their messages
    could not be told apart.

    Args:
        rt: The TensorRT that will speak.

    Yields:
        The list the messages are added to, as they come.
    """
    with _one_build_at_a_time:
        logger_for(rt)
        sink: list[Message] = []
        _sinks.append(sink)
        try:
            yield sink
        finally:
            # By identity: two empty lists are equal.
            _sinks[:] = [kept for kept in _sinks if kept is not sink]


def logger_for(rt: TensorRT) -> Any:
    """The process's logger of this TensorRT, as its `Builder` and `Runtime` want it."""
    key = rt.module.__name__
    if key not in _loggers:
        _loggers[key] = _make_logger(rt.module)
    return _loggers[key]


def errors(messages: Iterable[Message]) -> list[Message]:
    """The errors, without what only says that there is no GPU; all of them if nothing else is left."""
    found = [message for message in messages if message.severity in ERRORS]
    told = [message for message in found if not any(noise in message.text for noise in _NOISE)]
    return told or found


def warnings(messages: Iterable[Message]) -> list[Message]:
    """The warnings."""
    return [message for message in messages if message.severity == "WARNING"]


def _make_logger(trt: Any) -> Any:
    class Collector(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            # Called from C++ that cannot take an exception: nothing here may raise.
            message = Message(severity=getattr(severity, "name", str(severity)), text=str(text))
            for sink in tuple(_sinks):
                sink.append(message)
            if is_child():  # should it crash, its parent finds here where it was
                os.write(2, f"{message.severity}: {message.text}\n".encode(errors="replace"))

    return Collector()
