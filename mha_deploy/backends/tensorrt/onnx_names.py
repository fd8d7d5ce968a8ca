"""The names TensorRT uses for the nodes of an ONNX file, to link what it says to where it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from mha_deploy.backends.tensorrt.errors import EngineError
from mha_deploy.backends.tensorrt.kernels import dtype_of
from mha_deploy.backends.tensorrt.log import Message

_SEPARATORS = re.compile(r"[\s\[\]{}()\"',;=]+")


@dataclass(frozen=True, kw_only=True)
class NodeNames:
    """The nodes of a graph by the names TensorRT gives them.

    Args:
        names: Name of each node, in file order.
        operators: Operator of each node, in file order.
        readers: For each tensor, the nodes that read it.
        axes: For each dimension that has a name, an input of the graph and its place there.
        has_external_data: Whether weights lie in another file.
    """

    names: tuple[str, ...]
    operators: tuple[str, ...]
    readers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    axes: dict[str, tuple[str, int]] = field(default_factory=dict)
    has_external_data: bool = False

    def at(self, index: int) -> str | None:
        """The node at a place in the file, as TensorRT 8.6 reports errors."""
        return self.names[index] if 0 <= index < len(self.names) else None

    @property
    def attention(self) -> tuple[str, ...]:
        """The nodes that are attention in one operator, of whichever domain."""
        pairs = zip(self.names, self.operators, strict=True)
        return tuple(name for name, operator in pairs if operator.endswith("Attention"))

    def mentioned(self, text: str) -> tuple[str, ...]:
        """The nodes a message speaks of, by name or by a tensor they read."""
        words = [word.strip(".:") for word in _SEPARATORS.split(text)]
        known = set(self.names)
        found = [word for word in words if word in known]
        if not found:
            found = [node for word in words for node in self.readers.get(word, ())]
        return tuple(dict.fromkeys(found))

    def link(self, messages: Iterable[Message]) -> list[Message]:
        """The messages with the nodes they speak of."""
        return [replace(message, nodes=self.mentioned(message.text)) for message in messages]


def read_names(source: bytes | str | Path) -> NodeNames:
    """Read the node names of an ONNX model, without its weights.

    Args:
        source: The model as bytes, or its path.

    Raises:
        EngineError: It is not an ONNX model, or an empty one.
    """
    model = _load(source)
    nodes = model.graph.node
    if not nodes:
        # TensorRT's parser accepts zero bytes as a valid, empty model.
        raise EngineError("The ONNX model has no nodes.", got=_describe(source), hint="export it again")
    names = [trt_name(node) for node in nodes]
    readers: dict[str, list[str]] = {}
    for name, node in zip(names, nodes, strict=True):
        for tensor in filter(None, node.input):
            readers.setdefault(tensor, []).append(name)
    return NodeNames(
        names=tuple(names),
        operators=tuple(node.op_type for node in nodes),
        readers={tensor: tuple(dict.fromkeys(users)) for tensor, users in readers.items()},
        axes=_axes(model.graph),
        has_external_data=_has_external_data(model),
    )


def _axes(graph: onnx.GraphProto) -> dict[str, tuple[str, int]]:
    return {
        dim.dim_param: (value.name, place)
        for value in graph.input
        for place, dim in enumerate(value.type.tensor_type.shape.dim)
        if dim.dim_param
    }


def tensor_types(source: bytes | str | Path) -> dict[str, str]:
    """The type of every tensor of an ONNX graph whose type is known, by its short name."""
    model = onnx.shape_inference.infer_shapes(_load(source))
    graph = model.graph
    values = (*graph.input, *graph.value_info, *graph.output)
    return {
        value.name: dtype_of(onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type))
        for value in values
    }


def trt_name(node: onnx.NodeProto) -> str:
    """The name TensorRT's parser knows a node by: its own, or one made from its first output."""
    return node.name or f"node_of_{node.output[0]}"


def members(names: Sequence[str], attention: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Find the nodes that an attention node was lowered to, by their common prefix.

    Args:
        names: Names of all nodes of the lowered graph.
        attention: Names of the attention nodes of the canonical graph.

    Returns:
        For each attention node, itself if it is still there, and every node named `<attention>/...`; a node
        that two names fit belongs to the longer one.
    """
    found: dict[str, list[str]] = {node: [] for node in attention}
    for name in names:
        owner = next((prefix for prefix in _prefixes(name) if prefix in found), None)
        if owner is not None:
            found[owner].append(name)
    return {node: tuple(parts) for node, parts in found.items()}


def _prefixes(name: str) -> Iterator[str]:
    """A name, and what stands before each of its slashes, the longest first."""
    while name:
        yield name
        name = name.rpartition("/")[0]


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


def _has_external_data(model: onnx.ModelProto) -> bool:
    external = onnx.TensorProto.EXTERNAL
    return any(weight.data_location == external for weight in model.graph.initializer)
