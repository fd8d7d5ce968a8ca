"""Read and build ONNX graphs: the helpers that every pass on a graph shares."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from mha_deploy.bundle.manifest import Dim
from mha_deploy.errors import DeployError
from mha_deploy.graph.roles import IN_ORDER, MOVES, ORT_DOMAIN, RANDOM

if TYPE_CHECKING:
    from onnx.reference import ReferenceEvaluator

Size = int | ir.Value
"""A size in a shape: a number, or a 1-D tensor of one element computed from another tensor's shape."""

_LOG = logging.getLogger(__name__)
_MOST_ITERATIONS = 10**6  # of loops, in one call of the reference evaluator

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
FP8 = (ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2)
INTEGERS = {ir.DataType.INT32, ir.DataType.INT64}
"""What sizes and positions are in."""


# -- Read nodes and values -------------------------------------------------------------------------


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Whether a node is one of these operators of ONNX's own operator set."""
    return node is not None and node.op_type in op_types and node.domain == ""


def made_by(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The producer of a value if it is one of these operators of ONNX's own operator set."""
    node = None if value is None else value.producer()
    return node if is_op(node, *op_types) else None


def input_at(node: ir.Node | None, position: int) -> ir.Value | None:
    """The input at a position; None where it is omitted, or where there is no node."""
    return None if node is None or position >= len(node.inputs) else node.inputs[position]


def output_at(node: ir.Node, position: int) -> ir.Value | None:
    """The output at a position; None where it is omitted or has no name."""
    # An empty name is how ONNX omits an output in the middle of the list.
    omitted = position >= len(node.outputs) or node.outputs[position].name == ""
    return None if omitted else node.outputs[position]


def node_name(node: ir.Node) -> str:
    """The name of a node; its first named output's where it has none."""
    return node.name or next((value.name for value in node.outputs if value.name), node.op_type)


def graph_of_node(node: ir.Node) -> ir.Graph | ir.Function:
    """The graph that a node is in."""
    if node.graph is None:
        raise ValueError(f"Node {node.name!r} belongs to no graph.")
    return node.graph


def graphs_in(node: ir.Node) -> list[ir.Graph]:
    """The branches of an `If`, or the body of a loop."""
    attributes = node.attributes.values()
    lists = (each.as_graphs() for each in attributes if each.type == ir.AttributeType.GRAPHS)
    single = (each.as_graph() for each in attributes if each.type == ir.AttributeType.GRAPH)
    return [*single, *itertools.chain(*lists)]


_CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})
HOLD_TENSORS = frozenset({"Constant", "ConstantOfShape"})
"""The operators of ONNX's own that have tensors as attributes."""


def inner_graphs(node: ir.Node) -> Sequence[ir.Graph]:
    """The same, where only operators that may have some are looked at: every attribute takes time."""
    return graphs_in(node) if node.op_type in _CONTROL_FLOW or node.domain != "" else ()


def nodes_in(graph: ir.Graph | ir.Function) -> Iterator[ir.Node]:
    """The nodes of a graph, and behind each those of its branches or its body.

    onnx_ir looks at every attribute of every node for that, which takes longer than most passes.
    """
    for node in graph:
        yield node
        if node.op_type in _CONTROL_FLOW or node.domain != "":
            for inner in graphs_in(node):
                yield from nodes_in(inner)


def graphs_of(model: ir.Model) -> Iterator[ir.Graph]:
    """The graph of a model, and those inside it."""
    found = [model.graph]
    for graph in found:  # it grows
        yield graph
        found += (inner for node in graph for inner in inner_graphs(node))


def nodes_behind(
    values: Iterable[ir.Value | None],
    follow: Callable[[ir.Node], Iterable[ir.Value | None]] = lambda node: node.inputs,
) -> Iterator[ir.Node]:
    """The nodes that values are computed from, each once, the nearest first.

    `follow` gives the inputs of a node that are followed further.
    """
    pending, seen = list(values), set[ir.Node]()
    for value in pending:  # it grows
        node = None if value is None else value.producer()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending += follow(node)


def rank(value: ir.Value | None) -> int | None:
    """The number of axes; None where the graph does not state it."""
    return None if value is None or value.shape is None else len(value.shape)


def is_tensor(value: ir.Value) -> bool:
    """Whether a value is a tensor, as one of unknown type is; else it is a sequence or an optional."""
    return value.type is None or isinstance(value.type, ir.TensorType)


def dims(value: ir.Value | None) -> tuple[Dim, ...]:
    """The dimensions of a value; empty where the rank is not known."""
    if value is None or value.shape is None:
        return ()
    return tuple([size if isinstance(size, int) else size.value for size in value.shape.dims])


def dim(value: ir.Value | None, axis: int) -> Dim:
    """The dimension of one axis; None where it is not known."""
    found = dims(value)
    return found[axis] if -len(found) <= axis < len(found) else None


def same_size(one: Dim, other: Dim) -> bool:
    """Whether two dimensions are certainly equal; two unknown ones are not."""
    return one is not None and one == other


def input_with(graph: ir.Graph | ir.Function, size: Dim) -> tuple[ir.Value, int] | None:
    """The first input of a graph that has a size by name, and on which axis."""
    named = ((value, dims(value)) for value in graph.inputs if isinstance(size, str))
    return next(((value, sizes.index(size)) for value, sizes in named if size in sizes), None)


def constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of a `Constant` node, or of an initializer that is no graph input; else None."""
    if value is None:
        return None
    node = value.producer()
    if node is not None and node.op_type != "Constant":
        return value.const_value
    if value.is_graph_input():
        return None
    held = node.attributes.get("value") if is_op(node, "Constant") and node is not None else None
    if held is not None and not held.is_ref():
        return held.as_tensor()  # onnx_ir's reader would name the tensor, which copies of a model share
    try:
        return ir.convenience.get_const_tensor(value)
    except ValueError:  # a Constant in a form that onnx_ir does not read, such as a sparse one
        return None


def weight_behind(value: ir.Value | None) -> ir.Value | None:
    """The initializer that a value is, or is a copy of in another layout or type."""
    while value is not None and value.const_value is None:
        node = made_by(value, *MOVES, "Cast")
        value = None if node is None else node.inputs[0]
    return value


def constant_ints(node: ir.Node, position: int) -> tuple[int, ...] | None:
    """The integers of a constant input, such as axes; None where it is not constant."""
    tensor = constant(input_at(node, position))
    return None if tensor is None else tuple(int(number) for number in tensor.numpy().reshape(-1))


def constant_number(value: ir.Value | None) -> float | None:
    """The number of a constant of one element; None for every other value."""
    tensor = constant(value)
    return None if tensor is None or tensor.size != 1 else float(tensor.numpy().reshape(-1)[0])


def is_random(node: ir.Node) -> bool:
    """Whether a node draws numbers anew in every call, as a Dropout does in training mode."""
    if not is_op(node, "Dropout"):
        return is_op(node, *RANDOM)
    training = constant(input_at(node, 2))
    return training is not None and bool(training.numpy().any()) and constant_number(node.inputs[1]) != 0.0


def long_axes(value: ir.Value) -> int:
    """How many axes of an initializer are longer than 1; two and more are a table or a matrix."""
    return sum(dim != 1 for dim in value.shape or ())


def perm(node: ir.Node) -> tuple[int, ...]:
    """The permutation of a Transpose; without one, the axes are reversed."""
    return tuple(node.attributes.get_ints("perm") or reversed(range(rank(node.inputs[0]) or 0)))


def origin(value: ir.Value | None) -> ir.Value | None:
    """The value that has the same integers before reshapes and casts between integer types."""
    while (node := made_by(value, "Cast", *IN_ORDER)) is not None:
        source = node.inputs[0]
        # A cast to any other type may change the numbers: FP16 has not all integers, booleans have two.
        casts = node.op_type == "Cast"
        if source is None or (casts and not {source.dtype, node.outputs[0].dtype} <= INTEGERS):
            break
        value = source
    return value


def counts_up(value: ir.Value | None, *, axis: int = -1) -> bool:
    """Whether a value is 0, 1, 2 … along an axis, the last one by default, and the same along all others."""
    expand = made_by(value, "Expand")
    source = value if expand is None else expand.inputs[0]
    shape = list(dims(source))
    if len(shape) < -axis or (expand is not None and not same_size(shape[axis], dim(value, axis))):
        return False
    del shape[axis]
    if any(size != 1 for size in shape):
        return False
    source = origin(source)
    node, tensor = made_by(source, "Range"), constant(source)
    if tensor is not None:
        return bool(np.array_equal(tensor.numpy().reshape(-1), np.arange(tensor.size)))
    return node is not None and [constant_number(node.inputs[at]) for at in (0, 2)] == [0.0, 1.0]


# -- Change a graph --------------------------------------------------------------------------------


class TensorPart(NamedTuple):
    """A part of a tensor, one behind the other along an axis."""

    source: ir.Value  # the tensor
    axis: int  # along which axis, counted from the last
    begin: int  # where it begins there
    end: int | None  # where it ends; None where the sizes are not known


def part_of(value: ir.Value | None) -> TensorPart | None:
    """The part of another tensor that a value is, by a Slice along one axis or a Split; else None."""
    node = made_by(value, "Slice", "Split")
    source, count = input_at(node, 0), len(dims(input_at(node, 0)))
    if value is None or node is None or source is None or not count:
        return None
    if is_op(node, "Split"):
        axis = node.attributes.get_int("axis", 0) % count
        sizes = [dim(each, axis) for each in node.outputs[: node.outputs.index(value)]]
        before, own = [each for each in sizes if isinstance(each, int)], dim(value, axis)
        if len(before) < len(sizes):
            return None
        return TensorPart(
            source, axis - count, sum(before), sum(before) + own if isinstance(own, int) else None
        )
    begins, ends, axes, steps = (constant_ints(node, at) for at in (1, 2, 3, 4))
    if not begins or not axes or len(axes) != 1 or (input_at(node, 4) is not None and steps != (1,)):
        return None
    size = dim(source, axes[0] % count)
    if isinstance(size, int) and ends:
        return TensorPart(source, axes[0] % count - count, *slice(begins[0], ends[0]).indices(size)[:2])
    return TensorPart(source, axes[0] % count - count, begins[0], None) if begins[0] >= 0 else None


def infer_shapes(
    model: ir.Model, plain: Callable[[tuple[Dim, ...]], tuple[Dim, ...]] = lambda sizes: sizes
) -> ir.Model:
    """Import the operator sets of new nodes, and fill in the shapes that follow from the others.

    `plain` says how the sizes are written that ONNX finds for the result of a node.
    """
    for domain in {node.domain for node in nodes_in(model.graph)}:
        model.opset_imports.setdefault(domain, 1)
    try:
        proto = light_proto(model, bare=True)
        _stand_in(proto.graph)
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        # ONNX cannot follow the graph, which keeps what it states.
        _LOG.info("Shapes are not inferred: %s", error)
        return model
    _take_types(model.graph, inferred.graph, plain)
    return model


LIKE_FIRST = frozenset(
    {"RotaryEmbedding", "SimplifiedLayerNormalization", "SkipLayerNormalization", "Gelu", "FastGelu"}
    | {"SkipSimplifiedLayerNormalization", "QuickGelu", "BiasGelu", "BiasAdd", "BiasDropout", "GroupNorm"}
)
"""ONNX Runtime's own operators whose results have the type and the sizes of their first input."""
_MATMULS_OF_BITS = ("MatMulNBits", "MatMulBnb4")  # with quantized weights of K rows and N columns
OTHER_WIDTH = frozenset({*_MATMULS_OF_BITS, "MultiHeadAttention", "Attention"})
"""Those whose first result has the sizes of their first input but for the last one."""
_EMBEDDING = "EmbedLayerNormalization"  # of words, their places and segments
_STANDS_IN = "mha_deploy.weight"
LIKE_IT = (0, 3)  # which results those are; the others of a normalization are its statistics


def _stand_in(graph: onnx.GraphProto) -> None:
    """Let operators of ONNX, which have results of the same sizes, stand for those that it does not know."""
    known = LIKE_FIRST | OTHER_WIDTH | {_EMBEDDING}
    own = [
        at
        for at, node in enumerate(graph.node)
        if node.op_type in known
        and (node.domain == ORT_DOMAIN or (node.domain == "" and not onnx.defs.has(node.op_type)))
    ]
    held = {each.name: list(each.dims) for each in graph.initializer} if own else {}
    if own:  # a weight may be an input as well: what that states comes first
        stated = {each.name: each.type.tensor_type.shape.dim for each in graph.input}
        held |= {name: [each.dim_value for each in dims] for name, dims in stated.items() if dims}
    for at in reversed(own):
        node = graph.node[at]
        if node.op_type in (*_MATMULS_OF_BITS, "Attention"):
            numbers = {each.name: each.i for each in node.attribute}
            sizes, name = [numbers.get("K"), numbers.get("N")], f"{_STANDS_IN}/{at}"
            if node.op_type == "Attention":  # with the weights of Q, K and V beside each other
                parts = next((each.ints for each in node.attribute if each.name == "qkv_hidden_sizes"), ())
                dims = held.get(node.input[1], [])
                sizes = [dims[0], parts[-1] if parts else dims[1] // 3] if len(dims) == 2 else [None, None]
            graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, sizes))
            others = [onnx.helper.make_node("MatMul", [node.input[0], name], node.output[:1])]
        elif node.op_type == _EMBEDDING:
            ids, table, index = node.input[0], node.input[2], f"{_STANDS_IN}/{at}"
            summed, counts = [*node.output[:1], *node.output[2:3]], node.output[1:2]
            others = [onnx.helper.make_node("Gather", [table, ids], [each]) for each in summed if each]
            if any(counts):  # how many tokens each batch element has
                others.append(onnx.helper.make_node("Cast", [index], counts, to=onnx.TensorProto.INT32))
                others.append(onnx.helper.make_node("ArgMax", [ids], [index], axis=1, keepdims=0))
        elif node.op_type == "MultiHeadAttention":
            operands = [node.input[0], *node.input[2:3]]
            others = [onnx.helper.make_node("Einsum", operands, node.output[:1], equation="bse,btd->bsd")]
        else:
            results = [node.output[place] for place in LIKE_IT if place < len(node.output)]
            others = [onnx.helper.make_node("Identity", node.input[:1], [each]) for each in results if each]
        del graph.node[at]
        for each in others:
            graph.node.insert(at, each)


def _take_types(
    graph: ir.Graph, inferred: onnx.GraphProto, plain: Callable[[tuple[Dim, ...]], tuple[Dim, ...]]
) -> None:
    """Give the values of a graph, and of those in it, the types and shapes of its inferred copy."""
    known = {each.name: each.type for each in (*inferred.value_info, *inferred.input, *inferred.output)}
    made, copies = list[ir.Value](), dict[tuple[str, ...], onnx.NodeProto]()
    for node in graph:
        made += node.outputs
        if not inner_graphs(node):
            continue
        copies = copies or {tuple(filter(None, copy.output)): copy for copy in inferred.node}
        for attribute in copies[tuple(each.name for each in node.outputs if each.name)].attribute:
            inner = [attribute.g] if attribute.HasField("g") else attribute.graphs
            if inner:
                held = node.attributes[attribute.name]
                graphs = [held.as_graph()] if attribute.HasField("g") else held.as_graphs()
                for one, other in zip(graphs, inner, strict=True):
                    _take_types(one, other, plain)
    for values, write in (([*graph.inputs, *graph.initializers.values()], None), (made, plain)):
        read = dict[
            bytes, tuple[ir.DataType, tuple[Dim, ...] | None] | None
        ]()  # there are few different ones
        for value in values:
            if (proto := known.get(str(value.name))) is None:
                continue
            key = proto.SerializeToString()
            if key not in read:
                dtype, sizes = _read_tensor_type(proto) or (None, None)
                sizes = sizes if sizes is None or write is None else write(sizes)
                read[key] = None if dtype is None else (dtype, sizes)
            if (found := read[key]) is None:
                _take_type(value, proto)
            else:
                _take_tensor_type(value, *found)


def _take_type(value: ir.Value, proto: onnx.TypeProto) -> None:
    """Give a value a type and a shape; sequences and optionals, whose `dtype` is that of a part, included."""
    try:
        found = ir.serde.deserialize_type_proto_for_type(proto)
        shape = ir.serde.deserialize_type_proto_for_shape(proto)
    except NotImplementedError:  # a map, which onnx_ir does not have
        return
    if found is not None and found.dtype != ir.DataType.UNDEFINED and found != value.type:
        value.type = found  # a new one: copies of a model share their types
    if shape is not None and shape != value.shape:
        value.shape = shape


def _read_tensor_type(proto: onnx.TypeProto) -> tuple[ir.DataType, tuple[Dim, ...] | None] | None:
    """The type and the sizes of a tensor; None for what is more than that."""
    if not proto.HasField("tensor_type") or proto.denotation:
        return None
    tensor = proto.tensor_type
    found = [each.dim_value if each.HasField("dim_value") else each.dim_param for each in tensor.shape.dim]
    sizes = tuple(None if each == "" else each for each in found)
    return ir.DataType(tensor.elem_type), sizes if tensor.HasField("shape") else None


def _take_tensor_type(value: ir.Value, dtype: ir.DataType, sizes: tuple[Dim, ...] | None) -> None:
    """The same for a tensor, of which there are most."""
    if dtype != ir.DataType.UNDEFINED and (not isinstance(value.type, ir.TensorType) or value.dtype != dtype):
        value.type = ir.TensorType(dtype)
    if sizes is not None and (value.shape is None or sizes != dims(value)):
        value.shape = ir.Shape(sizes)


# -- A model for ONNX's own functions, which take no more than 2 GiB -------------------------------

_SMALL = 1 << 10


def light_proto(model: ir.Model, *, bare: bool = False) -> onnx.ModelProto:
    """The model without its large weights: inputs of the same names, after its own, stand for them.

    With `bare` nodes and values have no descriptions either, which is quicker: what they are is left.
    """
    graph = model.graph
    weights, count = dict(graph.initializers), len(graph.inputs)
    tensors = {name: value.const_value for name, value in weights.items()}
    try:
        for name, value in weights.items():
            tensor = value.const_value
            if tensor is not None and tensor.nbytes <= _SMALL:
                if isinstance(tensor, ir.ExternalTensor):
                    value.const_value = ir.Tensor(tensor.numpy().copy(), tensor.dtype, name=tensor.name)
                continue
            if tensor is not None:
                value.shape = ir.Shape(tensor.shape.numpy()) if value.shape is None else value.shape
                value.type = ir.TensorType(tensor.dtype) if value.type is None else value.type
            del graph.initializers[name]
            if not value.is_graph_input():
                graph.inputs.append(value)
        proto = _bare_proto(model) if bare and not model.functions else ir.to_proto(model)
    finally:
        _keep_inputs(graph, count)
        for name in list(graph.initializers):
            del graph.initializers[name]
        for name, value in weights.items():
            value.const_value = tensors[name]
            graph.initializers[name] = value
    outside = (each for each in _tensors_inside(model) if isinstance(each, ir.ExternalTensor))
    if (first := next(outside, None)) is not None:
        onnx.load_external_data_for_model(proto, str(first.base_dir))
    return proto


_SCALARS = frozenset({ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.STRING})


def _bare_proto(model: ir.Model) -> onnx.ModelProto:
    """The model without what describes its nodes; attributes and types that many have are written once."""
    graph = model.graph
    opsets = (onnx.helper.make_opsetid(name, version) for name, version in model.opset_imports.items())
    proto = onnx.ModelProto(ir_version=model.ir_version, opset_import=opsets)
    around = ir.GraphView(
        graph.inputs,
        graph.outputs,
        nodes=(),
        initializers=tuple(graph.initializers.values()),
        name=graph.name,
    )
    ir.serde.serialize_graph_into(proto.graph, around)  # type: ignore[arg-type]
    add_node, add_info = proto.graph.node.add, proto.graph.value_info.add
    attributes, types = dict[Any, onnx.AttributeProto](), dict[Any, onnx.TypeProto]()

    def written(each: ir.Attr) -> onnx.AttributeProto:
        if each.is_ref() or (each.type not in _SCALARS and each.type != ir.AttributeType.INTS):
            return ir.serde.serialize_attribute(each)
        key = (each.name, each.type, each.value if each.type in _SCALARS else tuple(each.value))
        if key not in attributes:
            attributes[key] = ir.serde.serialize_attribute(each)
        return attributes[key]

    for node in graph:
        add_node(
            op_type=node.op_type,
            domain=node.domain,
            overload=node.overload,
            name=node.name,
            input=["" if each is None else each.name for each in node.inputs],
            output=[each.name or "" for each in node.outputs],
            attribute=map(written, node.attributes.values()),
        )
        for value in node.outputs:
            if (value.type is None and value.shape is None) or not value.name or value.is_graph_output():
                continue
            plain = isinstance(value.type, ir.TensorType)
            key = (value.dtype, None if value.shape is None else dims(value)) if plain else value
            if key not in types:
                types[key] = ir.serde.serialize_value(value).type
            add_info(name=value.name, type=types[key])
    return proto


def _tensors_inside(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """The constants of nodes, and the weights of inner graphs."""
    for node in nodes_in(model.graph):
        if node.op_type not in HOLD_TENSORS and node.op_type not in _CONTROL_FLOW and node.domain == "":
            continue
        for graph in graphs_in(node):
            yield from (value.const_value for value in graph.initializers.values() if value.const_value)
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                yield attribute.value


def _keep_inputs(graph: ir.Graph, count: int) -> None:
    """Let only the first inputs be inputs; onnx_ir 1.1 does not notice the deletion of a slice."""
    kept = graph.inputs[:count]
    graph.inputs.clear()
    graph.inputs.extend(kept)


def with_weights_of(proto: onnx.ModelProto, model: ir.Model) -> ir.Model:
    """A model that ONNX made of the light copy of another one, with the weights of that one again."""
    new = ir.from_proto(proto)
    for value in new.graph.inputs:
        held = model.graph.initializers.get(str(value.name))
        if held is not None and held.const_value is not None:
            value.const_value = held.const_value
            new.graph.register_initializer(value)
    _keep_inputs(new.graph, len(model.graph.inputs))
    new.metadata_props.update(model.metadata_props)
    return new


def new_initializer(
    graph: ir.Graph, name: str, array: np.ndarray, dtype: ir.DataType | None = None
) -> ir.Value:
    """Add an initializer to a graph; default: of the array's own type."""
    value = ir.val(name, const_value=ir.tensor(array, dtype, name=name))
    graph.register_initializer(value)
    return value


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Let all consumers read a new value, which takes over name, type and shape."""
    new.name, new.type, new.shape = old.name, old.type, old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def names_in(model: ir.Model) -> set[str]:
    """The names of all values that nodes produce."""
    return {value.name for node in nodes_in(model.graph) for value in node.outputs if value.name}


def beginnings(name: str) -> Iterator[str]:
    """What stands before each slash of a name."""
    return (name[:at] for at, letter in enumerate(name) if letter == "/")


def prefixes_in(model: ir.Model) -> set[str]:
    """The beginnings of the names of all values that nodes produce."""
    return {each for name in names_in(model) if "/" in name for each in beginnings(name)}


def name_nodes(graph: ir.Graph) -> None:
    """Give each node of a graph a name of its own: where it has none, or a taken one, that of its output."""
    taken = set[str]()
    for node in graph:
        if not node.name or node.name in taken:
            name = next((str(value.name) for value in node.outputs if value.name), node.op_type)
            names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
            node.name = next(each for each in names if each not in taken)
        taken.add(node.name)


def prefix_within(name: str, taken: set[str]) -> str:
    """A prefix for what a node is lowered to: the node's own name, or `<name>/lowered`, with a free number.

    Fusion verdicts find the parts of an attention by `<name>/`. So where values of that name exist already
    (the recognizer writes some), the new ones go one level deeper instead of under another name. `taken` are
    the beginnings of names in the model (`prefixes_in`), to which the new one is added.
    """
    deeper = f"{name}/lowered"
    names = itertools.chain((name, deeper), (f"{deeper}_{count}" for count in itertools.count(2)))
    prefix = next(each for each in names if each not in taken)
    taken.update(beginnings(f"{prefix}/"))
    return prefix


SCORES_SUFFIX = "_scores"
"""What a lowering adds to the name of an attention for scores that are an output, beside the fused node."""


def replace_node(
    node: ir.Node, builder: NodeBuilder, outputs: dict[int, ir.Value], *, keep: Iterable[ir.Value] = ()
) -> None:
    """Put new nodes, which compute `outputs` (by position) and `keep`, in the place of a node."""
    replaced: set[ir.Value] = set()
    for position, value in outputs.items():
        if (old := output_at(node, position)) is not None:
            # A graph output needs a node of its own: it can be neither an input nor another output.
            is_new = value.producer() in builder.nodes and value not in replaced
            new = value if is_new else builder.op("Identity", value)
            replaced.add(new)
            replace_value(old, new)
    graph = graph_of_node(node)
    graph.insert_before(node, builder.live_nodes([*replaced, *keep]))
    graph.remove(node, safe=True)


# -- Build nodes -----------------------------------------------------------------------------------


class NodeBuilder:
    """Collects new nodes in order; the caller inserts them into a graph.

    Every new name starts with the prefix, which names the node that they replace. Constants become `Constant`
    nodes, so that the nodes can be put into a subgraph as well.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.nodes: list[ir.Node] = []
        self._used: dict[str, int] = {}
        self._constants: dict[tuple[ir.DataType, tuple[int, ...], bytes], ir.Value] = {}

    def op(
        self, op_type: str, *inputs: ir.Value | None, name: str | None = None, **attributes: Any
    ) -> ir.Value:
        """Add a node with one output and return that output."""
        return self.node(op_type, inputs, name=name, attributes=attributes)[0]

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        *,
        outputs: int = 1,
        domain: str = "",
        name: str | None = None,
        attributes: dict[str, Any] | None = None,
    ) -> Sequence[ir.Value]:
        """Add a node and return its outputs; None stands for an omitted input or attribute.

        `name` is the last part of its name. The prefix itself names the node that replaces the whole.
        """
        node = ir.node(op_type, inputs, attributes or {}, domain=domain, num_outputs=outputs)
        is_whole = name == self.prefix
        last = op_type.lower() if is_whole or name is None else name
        count = self._used[last] = self._used.get(last, 0) + 1
        value_name = f"{self.prefix}/{last}" if count == 1 else f"{self.prefix}/{last}_{count}"
        node.name = self.prefix if is_whole else value_name
        for index, value in enumerate(node.outputs):
            value.name = value_name if index == 0 else f"{value_name}:{index}"
        self.nodes.append(node)
        return node.outputs

    def live_nodes(self, outputs: Iterable[ir.Value]) -> list[ir.Node]:
        """The nodes that these outputs depend on, in order; the others lose their inputs."""
        own = set(self.nodes)
        live = own.intersection(nodes_behind(outputs, lambda node: node.inputs if node in own else ()))
        for node in own - live:
            node.resize_inputs(0)
        return [node for node in self.nodes if node in live]

    def constant(self, value: float | Sequence[int] | np.ndarray, dtype: ir.DataType) -> ir.Value:
        """A constant of a type; equal constants are one node."""
        array = np.array(value, dtype=dtype.numpy())
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            constant = self.op("Constant", value=ir.AttrTensor("value", ir.Tensor(array, dtype=dtype)))
            constant.dtype, constant.shape = dtype, ir.Shape(array.shape)
            self._constants[key] = constant
        return self._constants[key]

    def ints(self, *values: int) -> ir.Value:
        """A 1-D int64 constant."""
        return self.constant(list(values), ir.DataType.INT64)

    def count_up(self, size: Size) -> ir.Value:
        """0, 1, 2 … as a 1-D tensor."""
        if isinstance(size, int):
            return self.ints(*range(size))
        start, step = (self.constant(number, ir.DataType.INT64) for number in (0, 1))
        return self.op("Range", start, self.op("Squeeze", size), step)

    def size(self, value: ir.Value, axis: int) -> Size:
        """The size of an axis: a number where the graph states it, else read at run time."""
        size = None if value.shape is None else value.shape[axis]
        if isinstance(size, int):
            return size
        return self.op("Gather", self.op("Shape", value), self.ints(axis), name="size")

    def as_tensor(self, size: Size) -> ir.Value:
        """A size as a 1-D tensor of one element."""
        return self.ints(size) if isinstance(size, int) else size

    def shape_of(self, *sizes: Size) -> ir.Value:
        """A shape tensor from numbers and run-time sizes."""
        if all(isinstance(size, int) for size in sizes):
            return self.ints(*(size for size in sizes if isinstance(size, int)))
        return self.op("Concat", *(self.as_tensor(size) for size in sizes), axis=0, name="shape")

    def reshape(self, value: ir.Value, *sizes: Size, name: str | None = None) -> ir.Value:
        """Reshape; 0 keeps the size of the same axis, -1 is inferred."""
        return self.op("Reshape", value, self.shape_of(*sizes), name=name)

    def transpose(self, value: ir.Value, *perm: int, name: str | None = None) -> ir.Value:
        """Permute the axes."""
        return self.op("Transpose", value, perm=list(perm), name=name)

    def expand(self, value: ir.Value, *sizes: Size, name: str | None = None) -> ir.Value:
        """Broadcast to these sizes; 1 keeps that of the value."""
        return self.op("Expand", value, self.shape_of(*sizes), name=name)

    def unsqueeze(self, value: ir.Value, *axes: int) -> ir.Value:
        """Insert axes of size 1."""
        return self.op("Unsqueeze", value, self.ints(*axes))

    def cast(self, value: ir.Value, dtype: ir.DataType, name: str | None = None) -> ir.Value:
        """Cast; the value itself where it has that type already."""
        return value if value.dtype == dtype else self.op("Cast", value, to=int(dtype), name=name)


@contextlib.contextmanager
def paused_collections() -> Iterator[None]:
    """No garbage collection but where it is asked for, and then of what is new: not all is searched again.

    In the end these are old objects, which are searched when as many others are.
    """
    enabled = gc.isenabled()
    gc.disable()
    alone = enabled and not _are_objects_frozen()  # else a caller keeps them out of all collections
    if alone:
        gc.freeze()
    try:
        yield
    finally:
        if alone:
            gc.freeze()
            gc.unfreeze()
        if enabled:
            gc.enable()


_frozen = False  # whether objects ever were


def _are_objects_frozen() -> bool:
    """Whether a caller froze objects; to count many of them each time takes longer than most graphs."""
    global _frozen
    _frozen = _frozen or gc.get_freeze_count() > 0
    return _frozen


# -- Run a graph -----------------------------------------------------------------------------------


def reference_evaluator(model: onnx.ModelProto) -> ReferenceEvaluator:
    """ONNX's reference evaluator of a model."""
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun
    from onnx.reference.ops import op_dequantize_linear, op_loop

    class GatherElements(OpRun):  # onnx's own fails for a negative axis, and for indices of another shape
        def _run(self, data: np.ndarray, indices: np.ndarray, axis: int | None = None) -> tuple[np.ndarray]:
            axis = (axis or 0) % data.ndim
            sliced = data[tuple(slice(n) if i != axis else slice(None) for i, n in enumerate(indices.shape))]
            return (np.take_along_axis(sliced, indices, axis),)

    class Loop(op_loop.Loop):  # onnx's own runs as often as a file states
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            body = self.__dict__["_run_body"]

            def run_body(*arguments: Any, **options: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    got, hint = (
                        f"{_MOST_ITERATIONS:,} iterations of its loops",
                        "a bound on them in the graph",
                    )
                    raise DeployError("The graph does not terminate.", got=got, hint=hint)
                return body(*arguments, **options)

            self.__dict__["_run_body"] = run_body

        def _run(self, M: Any, *arguments: Any, **options: Any) -> Any:
            if M is not None and np.max(M, initial=0) > _MOST_ITERATIONS:
                left[0] = 0
            return super()._run(M, *arguments, **options)

    class Pad(OpRun):  # onnx's own fails for a negative number, which crops
        def _run(
            self, x: np.ndarray, pads: Any, value: Any = None, axes: Any = None, mode: str = "constant"
        ) -> tuple[np.ndarray]:
            where = range(x.ndim) if axes is None else [int(axis) % x.ndim for axis in axes]
            widths = [(0, 0)] * x.ndim
            for at, axis in enumerate(where):
                widths[axis] = (int(pads[at]), int(pads[at + len(where)]))
            ends = zip(x.shape, widths, strict=True)
            kept = (slice(max(-one, 0), size - max(-other, 0)) for size, (one, other) in ends)
            added = [(max(one, 0), max(other, 0)) for one, other in widths]
            fill = {"constant_values": 0 if value is None else value} if mode == "constant" else {}
            return (np.pad(x[tuple(kept)], added, mode=mode, **fill).astype(x.dtype),)  # type: ignore[call-overload]

    class MeanVarianceNormalization(OpRun):  # onnx's own has constants in float32
        def _run(self, x: np.ndarray, axes: Any = None) -> tuple[np.ndarray]:
            over = tuple(axes) if axes is not None else (0, 2, 3)
            spread = np.std(x, axis=over, keepdims=True) + x.dtype.type(1e-9)
            return ((x - np.mean(x, axis=over, keepdims=True)) / spread,)

    own: list[type[OpRun]] = [GatherElements, Loop, Pad, MeanVarianceNormalization]
    if any(each.domain in ("", "ai.onnx") and each.version < 19 for each in model.opset_import):
        # onnx has it from opset 19 on; before, it had the same meaning for fewer types.
        own.append(type("DequantizeLinear", (op_dequantize_linear.DequantizeLinear_25,), {}))
    left, evaluator = [0], ReferenceEvaluator(model, new_ops=own)
    run = evaluator.run

    def run_anew(*arguments: Any, **options: Any) -> Any:
        left[0] = _MOST_ITERATIONS
        return run(*arguments, **options)

    evaluator.run = run_anew  # type: ignore[method-assign]
    return evaluator
