"""The messages of TensorRT, linked to the nodes of the ONNX file."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from mha_deploy.runtime.child import is_child
from mha_deploy.runtime.tensorrt.kernels import dtype_of
from mha_deploy.runtime.tensorrt.versions import EngineError, TensorRT

# -- One logger per process, whose messages are collected ------------------------------------------

# On a machine without a driver every error has these besides; they are not the reason.
_NOISE = ("catchCudaError", "cudaError 35")

_loggers: dict[str, Any] = {}
_sinks: list[list[Message]] = []
_one_build_at_a_time = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message, and the names of the ONNX nodes in it."""

    severity: str  # INTERNAL_ERROR, ERROR, WARNING, INFO or VERBOSE
    text: str
    nodes: tuple[str, ...] = ()


@contextmanager
def collect(rt: TensorRT) -> Iterator[list[Message]]:
    """Collect the messages of one build in the list that it yields.

    A second thread waits: builds share one logger, and their messages could not be distinguished.
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
    """The process's logger of this TensorRT, for its `Builder` and `Runtime`."""
    trt = rt.module
    if trt.__name__ in _loggers:
        return _loggers[trt.__name__]

    class Collector(trt.ILogger):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            # Called from C++ that cannot take an exception: nothing here may raise.
            message = Message(severity=getattr(severity, "name", str(severity)), text=str(text))
            for sink in tuple(_sinks):
                sink.append(message)
            if is_child():  # after a crash, its parent reads here where it was
                os.write(2, f"{message.severity}: {message.text}\n".encode(errors="replace"))

    return _loggers.setdefault(trt.__name__, Collector())


def errors(messages: Iterable[Message]) -> list[Message]:
    """The errors, without those that only report a missing GPU; all of them if no other is left."""
    found = [message for message in messages if message.severity in ("INTERNAL_ERROR", "ERROR")]
    return [message for message in found if not any(noise in message.text for noise in _NOISE)] or found


# -- TensorRT's names for the nodes of an ONNX file ------------------------------------------------

_SEPARATORS = re.compile(r"[\s\[\]{}()\"',;=]+")


@dataclass(frozen=True, kw_only=True)
class NodeNames:
    """The nodes of a graph by TensorRT's names for them, in file order."""

    names: tuple[str, ...]
    operators: tuple[str, ...]
    readers: dict[str, tuple[str, ...]]
    """For each tensor, the nodes that read it."""
    axes: dict[str, tuple[str, int]]
    """For each named dimension, an input of the graph and its place there."""
    has_external_data: bool = False

    def at(self, index: int) -> str | None:
        """The node at a place in the file, as TensorRT 8.6 reports errors."""
        return self.names[index] if 0 <= index < len(self.names) else None

    @property
    def attention(self) -> tuple[str, ...]:
        """The nodes that are attention in one operator, of whichever domain."""
        pairs = zip(self.names, self.operators, strict=True)
        return tuple(name for name, operator in pairs if operator.endswith("Attention"))

    def link(self, messages: Iterable[Message]) -> list[Message]:
        """The messages with the nodes in them, by name or by a tensor they read."""
        known, linked = set(self.names), []
        for message in messages:
            words = [word.strip(".:") for word in _SEPARATORS.split(message.text)]
            found = [word for word in words if word in known] or [
                node for word in words for node in self.readers.get(word, ())
            ]
            linked.append(replace(message, nodes=tuple(dict.fromkeys(found))))
        return linked


def read_names(source: bytes | str | Path) -> NodeNames:
    """Read the node names of an ONNX model, without its weights; refuse what is none, or an empty one."""
    model = _load(source)
    nodes = model.graph.node
    if not nodes:
        # TensorRT's parser accepts zero bytes as a valid, empty model.
        raise EngineError("The ONNX model has no nodes.", got=_describe(source), hint="export it again")
    # The parser names a node without a name for its first output.
    names = [node.name or f"node_of_{node.output[0]}" for node in nodes]
    readers: dict[str, list[str]] = {}
    for name, node in zip(names, nodes, strict=True):
        for tensor in filter(None, node.input):
            readers.setdefault(tensor, []).append(name)
    return NodeNames(
        names=tuple(names),
        operators=tuple(node.op_type for node in nodes),
        readers={tensor: tuple(dict.fromkeys(users)) for tensor, users in readers.items()},
        axes={
            dim.dim_param: (value.name, place)
            for value in model.graph.input
            for place, dim in enumerate(value.type.tensor_type.shape.dim)
            if dim.dim_param
        },
        has_external_data=any(
            weight.data_location == onnx.TensorProto.EXTERNAL for weight in model.graph.initializer
        ),
    )


def tensor_types(source: bytes | str | Path) -> dict[str, str]:
    """The type of every tensor of an ONNX graph whose type is known, by its short name."""
    graph = onnx.shape_inference.infer_shapes(_load(source)).graph
    return {
        value.name: dtype_of(onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type))
        for value in (*graph.input, *graph.value_info, *graph.output)
    }


def members(names: Sequence[str], attention: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The nodes of a lowered graph that each attention node of the canonical graph became.

    That is itself if it still exists, and every node named `<attention>/...`; a node that matches two names
    belongs to the longer one.
    """
    found: dict[str, list[str]] = {node: [] for node in attention}
    for name in names:
        prefix = name
        while prefix and prefix not in found:
            prefix = prefix.rpartition("/")[0]
        if prefix:
            found[prefix].append(name)
    return {node: tuple(parts) for node, parts in found.items()}


def _load(source: bytes | str | Path) -> onnx.ModelProto:
    try:
        if isinstance(source, bytes):
            return onnx.load_model_from_string(source)
        return onnx.load(str(source), load_external_data=False)
    except (DecodeError, UnicodeDecodeError) as cause:
        raise EngineError(
            "This is not an ONNX model.", got=_describe(source), hint="give the model.onnx of a bundle"
        ) from cause
    except OSError as cause:
        raise EngineError("The ONNX model cannot be read.", got=cause, hint="check the path") from cause


def _describe(source: bytes | str | Path) -> str:
    return f"{len(source)} bytes" if isinstance(source, bytes) else str(source)
