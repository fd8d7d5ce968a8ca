"""From an ONNX file to a TensorRT network, with every complaint of the parser linked to its node."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mha_deploy.backends.tensorrt.errors import EngineError
from mha_deploy.backends.tensorrt.kernels import EngineTensor, dtype_of
from mha_deploy.backends.tensorrt.log import Message
from mha_deploy.backends.tensorrt.onnx_names import NodeNames
from mha_deploy.backends.tensorrt.request import BuildRequest
from mha_deploy.backends.tensorrt.versions import TensorRT

_UNUSED = "Unused Input"


def is_strongly_typed(rt: TensorRT, request: BuildRequest) -> bool:
    """Whether the network takes its types from the graph."""
    return rt.can.strongly_typed_flag and not request.weak_typing


def create_network(rt: TensorRT, builder: Any, request: BuildRequest) -> Any:
    """An empty network, strongly typed wherever the version can."""
    trt = rt.module
    flags = 0
    if is_strongly_typed(rt, request):
        flags |= 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    if rt.can.explicit_batch_flag:
        flags |= 1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)
    return builder.create_network(flags)


def parse_into(rt: TensorRT, parser: Any, source: bytes | str | Path, names: NodeNames) -> None:
    """Parse the model, or say which node cannot be taken and why.

    Args:
        rt: The TensorRT.
        parser: Its `OnnxParser`, made for the network to fill.
        source: The model.
        names: The model's nodes.

    Raises:
        EngineError: The parser refuses the model.
    """
    # Only from its path does the parser find weights that lie in another file.
    in_memory = isinstance(source, bytes)
    if not (parser.parse(source) if in_memory else parser.parse_from_file(os.fspath(source))):
        raise _refused(rt, parser, names)


def refuse_unused(rt: TensorRT, messages: Sequence[Message], names: NodeNames) -> None:
    """Turn an input that TensorRT ignores into an error: the engine would compute something else.

    It is the builder that says so, not the parser: ask when the plan is there.

    Raises:
        EngineError: TensorRT said that an input is unused.
    """
    # Linking reads every word of a message, and a verbose log has thousands of them.
    unused = names.link(message for message in messages if message.text.startswith(_UNUSED))
    if not unused:
        return
    nodes = tuple(dict.fromkeys(node for message in unused for node in message.nodes))
    raise EngineError(
        f"{rt.title} would ignore a part of the graph, and compute something else.",
        got="; ".join(dict.fromkeys(_with_nodes(message.text, message.nodes) for message in unused)),
        hint="lower the node to a form that this version reads, without that input",
        nodes=nodes,
    )


def allow_decomposition(rt: TensorRT, network: Any) -> int:
    """Let every attention layer be built from several kernels where there is no fused one.

    Returns:
        How many attention layers there are; none where attention is written in primitive operators.
    """
    if not rt.can.attention:
        return 0
    trt = rt.module
    found = 0
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            # `get_layer` gives the base class; this is how TensorRT's Python API casts down.
            layer.__class__ = trt.IAttentionInputLayer
            input_layer = layer
            attention = input_layer.attention
            attention.decomposable = True
            found += 1
    return found


def hold_types(rt: TensorRT, network: Any, types: Mapping[str, str], precision: str) -> None:
    """Hold each layer of a weakly typed network to the types of the graph.

    The network itself cannot be asked: under weak typing it reports FP32 for every real number. What the
    parser put in between (it reshapes weights, for one) keeps the widest type that goes into it: weights that
    the export kept in FP32 would be rounded to FP16 on their way otherwise.

    Args:
        rt: The TensorRT.
        network: The network.
        types: Type of each tensor of the ONNX graph, by its short name.
        precision: The type of everything that is not known to be wider.
    """
    trt = rt.module
    dtypes = {"fp16": trt.DataType.HALF, "fp32": trt.DataType.FLOAT}
    if rt.can.bf16_type:
        dtypes["bf16"] = trt.DataType.BF16
    wide: set[str] = set()  # tensors that are FP32
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        outputs = [_tensor(layer.get_output(place)) for place in range(layer.num_outputs)]
        if not outputs or not all(output.dtype in dtypes for output in outputs):
            # Indices, shapes and truth values have one type only.
            continue
        if layer.type == trt.LayerType.CONSTANT:
            usual = _weights_type(trt, layer)
        else:
            usual = "fp32" if any(name in wide for name in _input_names(layer)) else precision
        told = [types.get(output.name, usual) for output in outputs]
        wide.update(output.name for output, dtype in zip(outputs, told, strict=True) if dtype == "fp32")
        if layer.type == trt.LayerType.CONSTANT and told != ["fp32"]:
            continue  # its users say what becomes of it
        held = [dtypes.get(dtype) for dtype in told]
        if None not in held:
            layer.precision = held[0]
            for place, dtype in enumerate(held):
                layer.set_output_type(place, dtype)


def _weights_type(trt: Any, layer: Any) -> str:
    """The type that the weights of a constant have in the graph."""
    layer.__class__ = trt.IConstantLayer  # how TensorRT's Python API casts down
    constant_layer = layer
    weights = constant_layer.weights
    return dtype_of(str(getattr(weights, "dtype", "unknown")))


def _input_names(layer: Any) -> list[str]:
    inputs = (layer.get_input(place) for place in range(layer.num_inputs))
    return [tensor.name for tensor in inputs if tensor is not None]


def network_inputs(network: Any) -> tuple[EngineTensor, ...]:
    """The inputs of a network."""
    return tuple(_tensor(network.get_input(index)) for index in range(network.num_inputs))


def network_outputs(network: Any) -> tuple[EngineTensor, ...]:
    """The outputs of a network."""
    return tuple(_tensor(network.get_output(index)) for index in range(network.num_outputs))


def _tensor(trt_tensor: Any) -> EngineTensor:
    try:
        shape = tuple(int(size) for size in trt_tensor.shape)
    except ValueError:
        # A rank that is not known is a shape of negative length, which Python cannot take.
        shape = ()
    return EngineTensor(name=trt_tensor.name, dtype=dtype_of(trt_tensor.dtype.name), shape=shape)


def _refused(rt: TensorRT, parser: Any, names: NodeNames) -> EngineError:
    found = [_complaint(rt, parser.get_error(index), names) for index in range(parser.num_errors)]
    told = [_with_nodes(text, (node,) if node else ()) for node, text in found]
    return EngineError(
        f"The ONNX parser of {rt.title} refuses the graph.",
        got="; ".join(dict.fromkeys(told)) or "no reason given",
        hint="lower the graph for this target, or check which of its nodes the target takes",
        nodes=tuple(dict.fromkeys(node for node, _ in found if node)),
    )


def _complaint(rt: TensorRT, parser_error: Any, names: NodeNames) -> tuple[str | None, str]:
    """The node and the text of one parser error; 8.6 tells only the node's place in the file."""
    text = str(parser_error.desc())
    node = names.at(parser_error.node())
    if rt.can.parser_node_names:
        node = parser_error.node_name() or node
        operator = parser_error.node_operator()
    else:
        operator = names.operators[parser_error.node()] if node else ""
    return node, f"{operator}: {text}" if operator else text


def _with_nodes(text: str, nodes: Sequence[str]) -> str:
    return f"node {', '.join(nodes)}: {text}" if nodes else text
