"""Symbolic sizes: what Reshape and Expand make of shapes that a graph computes from its own shapes.

ONNX's shape inference gives up at `Reshape(x, Concat(Gather(Shape(x), 0), ...))` with a varying batch. Here a
size is a number or a product of names, and the contents of small integer tensors are followed as sizes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import onnx
import onnx_ir as ir

from mha_deploy.bundle.manifest import GENERATED
from mha_deploy.graph.fuse.values import FACTORS, Size, array_of, perm_of, sizes_of, tensor_of
from mha_deploy.graph.ir import input_at, is_op

_MAX_CONTENT = 32
_SAME_SHAPE = frozenset(
    {"Identity", "Cast", "Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "Dropout"}
    | {"Trilu", "Neg", "Sqrt", "Tanh", "Erf", "Sigmoid", "Relu", "Gelu", "Exp", "Log", "Abs", "Reciprocal"}
    | {"Floor", "Not", "IsNaN", "Clip", "Sin", "Cos", "CumSum"}
)
_BROADCAST = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Where", "And", "Or", "Xor", "Max", "Min", "Mod", "Equal", "Greater"}
    | {"GreaterOrEqual", "Less", "LessOrEqual"}
)
_SAME_CONTENT = frozenset({"Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape"})


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes; None where one is not known."""
    number, names = 1, list[str]()
    for size in sizes:
        if size is None:
            return None
        more, others = _factors(size)
        number, names = number * more, names + others
    return _text(number, names)


def quotient(size: Size, divisor: Size) -> Size:
    """A size divided by another; None where it is not certainly whole."""
    if size is None or divisor is None:
        return None
    number, names = _factors(size)
    by, others = _factors(divisor)
    left = Counter(names)
    left.subtract(others)
    if not by or number % by or min(left.values(), default=0) < 0:
        return None
    return _text(number // by, list(left.elements()))


def _factors(size: int | str) -> tuple[int, list[str]]:
    if isinstance(size, int):
        return size, []
    if not FACTORS.fullmatch(size):
        return 1, [size]
    parts = size.split("*")
    number = math.prod(int(part) for part in parts if part.isdigit())
    return number, [part for part in parts if not part.isdigit()]


def _text(number: int, names: list[str]) -> int | str:
    if not names or not number:
        return number
    return "*".join([*([str(number)] if number != 1 else []), *sorted(names)])


def infer_sizes(model: ir.Model, *, only_missing: bool = False) -> None:
    """Give every value of a model its type and the sizes that follow from those of the inputs."""
    nodes = [node for graph in model.graphs() for node in graph]
    missing = [node for node in nodes if any(_is_missing(value) for value in node.outputs)]
    if missing and only_missing:
        for graph in model.graphs():
            _infer([node for node in missing if node.graph is graph], model)
    elif missing or any(None in (sizes_of(value) or ()) for node in nodes for value in node.outputs):
        _infer(list(model.graph), model)
    own = {str(each) for value in model.graph.inputs for each in sizes_of(value) or ()}
    walk = _Walk(own)
    for node in missing if only_missing else model.graph.all_nodes():
        walk.visit(node)


def name_inputs(model: ir.Model) -> dict[ir.Value, ir.Shape]:
    """Name the sizes of inputs that have no name, so that they are known to be equal wherever they come to.

    Returns:
        The shapes before.
    """
    before = dict[ir.Value, ir.Shape]()
    for index, value in enumerate(model.graph.inputs):
        dims = sizes_of(value)
        if dims is not None and None in dims:
            named = [f"input{index}.{at}" if size is None else size for at, size in enumerate(dims)]
            before[value], value.shape = ir.Shape(dims), ir.Shape(named)
    return before


def _is_missing(value: ir.Value) -> bool:
    return bool(value.name) and (value.dtype is None or value.shape is None)


_LARGE = 64  # elements of a constant that no shape is computed from


def _infer(nodes: list[ir.Node], model: ir.Model) -> None:
    """Run ONNX's shape inference over nodes of one graph, without the numbers of large constants."""
    outputs = {value for node in nodes for value in node.outputs}
    infos, constants = dict[str, onnx.ValueInfoProto](), dict[str, onnx.TensorProto]()
    inside = [each for node in nodes for inner in graphs_in(node) for each in inner.all_nodes()]
    own = outputs | {value for node in inside for value in node.outputs}
    for node in (*nodes, *inside):
        for value in node.inputs:
            if value is None or value in own or not value.name or value.name in constants:
                continue
            tensor = tensor_of(value)
            if tensor is not None and tensor.size <= _LARGE and tensor.dtype != ir.DataType.STRING:
                constants[value.name] = ir.serde.serialize_tensor(
                    ir.Tensor(tensor.numpy(), tensor.dtype, name=value.name)
                )
            elif value.dtype is not None:
                infos[value.name] = ir.serde.serialize_value(value)
    known = [value for value in outputs if value.name and value.dtype is not None]
    graph = onnx.GraphProto(
        name="sizes",
        node=[ir.serde.serialize_node(node) for node in nodes],
        input=infos.values(),
        initializer=constants.values(),
        value_info=[ir.serde.serialize_value(value) for value in known],
    )
    opsets = [onnx.helper.make_opsetid(*each) for each in model.opset_imports.items()]
    whole = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)
    try:
        inferred = onnx.shape_inference.infer_shapes(whole, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        return  # a node that ONNX rejects: what is known stays
    _take_over(nodes, inferred.graph)


def _take_over(nodes: Iterable[ir.Node], found: onnx.GraphProto) -> None:
    """Merge what was inferred into the values of nodes, and of the graphs in them."""
    infos = {info.name: info.type for info in (*found.value_info, *found.output)}
    for node, proto in zip(nodes, found.node, strict=True):
        for value in node.outputs:
            if value.name in infos:
                _merge(value, infos[value.name])
        inner = [each for attribute in proto.attribute for each in (attribute.g, *attribute.graphs)]
        for graph, body in zip(graphs_in(node), (each for each in inner if each.node), strict=False):
            _take_over(graph, body)


def graphs_in(node: ir.Node) -> list[ir.Graph]:
    """The bodies and branches of a node."""
    found = list[ir.Graph]()
    for each in node.attributes.values():
        if each.type == ir.AttributeType.GRAPH:
            found.append(each.as_graph())
        elif each.type == ir.AttributeType.GRAPHS:
            found.extend(each.as_graphs())
    return found


def _merge(value: ir.Value, found: onnx.TypeProto) -> None:
    """Take over what was not known of a value."""
    if not found.HasField("tensor_type"):
        return
    tensor = found.tensor_type
    if value.dtype is None and tensor.elem_type:
        value.dtype = ir.DataType(tensor.elem_type)
    if not tensor.HasField("shape"):
        return
    dims = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim]
    # Names that were made up for unknown sizes are those of one run only.
    dims = [None if isinstance(each, str) and GENERATED in each else each for each in dims]
    known = sizes_of(value) if value.shape is not None else None
    if known is None:
        value.shape = ir.Shape(dims)
    elif len(known) == len(dims):
        best = [
            new if isinstance(new, int) or old is None else old for old, new in zip(known, dims, strict=True)
        ]
        if best != known:
            value.shape = ir.Shape(best)


class _Walk:
    """The contents of small integer tensors so far."""

    def __init__(self, own: set[str]) -> None:
        self._own, self._contents = own, dict[ir.Value, list[Size]]()

    def visit(self, node: ir.Node) -> None:
        """Take in one node."""
        if node.domain != "" or not node.outputs:
            return
        output = node.outputs[0]
        if output.dtype in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL):
            content = self._content_after(node)
            if content is not None and len(content) <= _MAX_CONTENT:
                self._contents[output] = content
        known = sizes_of(output)
        if known is not None and all(self._is_known(each) for each in known):
            if known != [each if isinstance(each, int) else each.value for each in output.shape or ()]:
                output.shape = ir.Shape(known)
            return
        found = self._sizes_after(node)
        if found is None or (known is not None and len(known) != len(found)):
            return
        best = [
            new
            if new is not None and (known is None or not self._is_known(known[at]))
            else (known or found)[at]
            for at, new in enumerate(found)
        ]
        output.shape = ir.Shape(best)

    def _is_known(self, size: Size) -> bool:
        return isinstance(size, int) or (size is not None and (size in self._own or GENERATED not in size))

    def content(self, value: ir.Value | None) -> list[Size] | None:
        """The numbers of a small integer tensor."""
        if value is None:
            return None
        if value in self._contents:
            return self._contents[value]
        if value.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
            return None
        if value.shape is None or any(
            not isinstance(each, int) or each > _MAX_CONTENT for each in value.shape
        ):
            return None
        array = array_of(value)
        return None if array is None or array.size > _MAX_CONTENT else [int(each) for each in array.ravel()]

    def _content_after(self, node: ir.Node) -> list[Size] | None:
        first = node.inputs[0] if node.inputs else None
        if is_op(node, "Shape"):
            dims = sizes_of(first)
            start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
            return None if dims is None else dims[start:end]
        if node.op_type in _SAME_CONTENT:
            return self.content(first)
        parts = [self.content(each) for each in node.inputs]
        if not parts or any(part is None for part in parts):
            return None
        given = [part for part in parts if part is not None]
        if is_op(node, "Concat"):
            return [each for part in given for each in part]
        if is_op(node, "Gather"):
            data, at = given
            return [data[each] for each in at if isinstance(each, int) and -len(data) <= each < len(data)]
        if is_op(node, "Slice") and len(given) >= 3:
            bounds = [part[0] for part in given[1:] if part and isinstance(part[0], int)]
            step = bounds[3] if len(bounds) > 3 else 1
            return given[0][bounds[0] : bounds[1] : step] if len(bounds) == len(given) - 1 and step else None
        if is_op(node, "ConstantOfShape") and isinstance(given[0][0] if given[0] else None, int):
            fill = node.attributes.get("value")
            number = int(fill.as_tensor().numpy().ravel()[0]) if fill is not None else 0
            return [number] * int(given[0][0] or 0) if int(given[0][0] or 0) <= _MAX_CONTENT else None
        if is_op(node, "Mul", "Div", "Add", "Sub", "Equal", "Where", "ReduceProd"):
            return _computed(node.op_type, given)
        return None

    def _sizes_after(self, node: ir.Node) -> list[Size] | None:
        first = sizes_of(node.inputs[0]) if node.inputs else None
        if node.op_type in _BROADCAST:
            return _broadcast([sizes_of(each) for each in node.inputs])
        if is_op(node, "Range"):
            start, limit, step = (self.content(each) for each in node.inputs)
            return list(limit) if start == [0] and step == [1] and limit is not None else None
        if is_op(node, "ConstantOfShape"):
            return self.content(node.inputs[0])
        if first is None:
            return None
        if node.op_type in _SAME_SHAPE:
            return first
        if is_op(node, "Reshape"):
            return _reshaped(
                first, self.content(node.inputs[1]), bool(node.attributes.get_int("allowzero", 0))
            )
        if is_op(node, "Expand"):
            return _broadcast([first, self.content(node.inputs[1])])
        if is_op(node, "Tile"):
            repeats = self.content(node.inputs[1])
            return None if repeats is None else [product(pair) for pair in zip(first, repeats, strict=False)]
        if is_op(node, "Transpose"):
            return [first[axis] for axis in perm_of(node)]
        if is_op(node, "MatMul"):
            right = sizes_of(node.inputs[1])
            if right is None or len(first) < 2 or len(right) < 2:
                return None
            lead = _broadcast([first[:-2], right[:-2]]) if len(first) + len(right) > 4 else []
            return None if lead is None else [*lead, first[-2], right[-1]]
        if is_op(node, "Einsum"):
            return _einsum(node)
        if is_op(node, "Unsqueeze", "Squeeze"):
            axes = self.content(input_at(node, 1))
            if axes is None:
                return None
            count = len(first) + len(axes) * is_op(node, "Unsqueeze")
            at = {axis % count for axis in axes if isinstance(axis, int)}
            if is_op(node, "Squeeze"):
                return [size for axis, size in enumerate(first) if axis not in at]
            rest = iter(first)
            return [1 if axis in at else next(rest) for axis in range(count)]
        if node.op_type.startswith("Reduce") and node.attributes.get_int("keepdims", 1) == 1:
            axes = self.content(input_at(node, 1))
            at = {axis % len(first) for axis in axes or () if isinstance(axis, int)}
            return [1 if axis in at else size for axis, size in enumerate(first)] if at else None
        if is_op(node, "GatherElements"):
            return sizes_of(node.inputs[1])
        if is_op(node, "Slice"):
            starts, ends, chosen, steps = (self.content(input_at(node, each)) for each in range(1, 5))
            left = list(first)
            for each, (begin, end) in enumerate(zip(starts or (), ends or (), strict=False)):
                place = each if chosen is None else chosen[each]
                if not isinstance(place, int):
                    return None
                # `table[:, :S]` of a table that is long enough, as positions are looked up
                whole = begin == 0 and isinstance(end, str) and (steps is None or steps[each] == 1)
                left[place] = end if whole else None
            return left if starts and ends else None
        if is_op(node, "Gather"):
            picked, axis = sizes_of(node.inputs[1]), node.attributes.get_int("axis", 0) % max(len(first), 1)
            return None if picked is None else [*first[:axis], *picked, *first[axis + 1 :]]
        return None


def _computed(op_type: str, parts: Sequence[list[Size]]) -> list[Size] | None:
    if op_type == "ReduceProd":
        return [product(parts[0])]
    length = max(map(len, parts))
    if any(len(part) not in (1, length) for part in parts):
        return None
    result = list[Size]()
    for at in range(length):
        given = [part[at % len(part)] for part in parts]
        if op_type == "Mul":
            result.append(product(given))
        elif op_type == "Div":
            result.append(quotient(*given))
        elif op_type == "Where":
            result.append(given[1] if given[0] == 1 else given[2] if given[0] == 0 else None)
        elif op_type == "Equal":
            one, other = given
            apart = (isinstance(one, int) and isinstance(other, int)) or -1 in given  # a size is not negative
            result.append(
                1 if one == other and one is not None else 0 if apart and None not in given else None
            )
        elif all(isinstance(each, int) for each in given):
            one, other = (int(each or 0) for each in given)
            result.append(one + other if op_type == "Add" else one - other)
        else:
            result.append(given[0] if given[1] == 0 else None)
    return result


def _broadcast(shapes: Sequence[list[Size] | None]) -> list[Size] | None:
    if any(shape is None for shape in shapes):
        return None
    given = [shape for shape in shapes if shape is not None]
    rank = max(map(len, given))
    result = list[Size]()
    for at in range(-rank, 0):
        sizes = {shape[at] for shape in given if -at <= len(shape) and shape[at] != 1}
        fixed = [size for size in sizes if isinstance(size, int)]
        result.append(fixed[0] if fixed else sizes.pop() if len(sizes) == 1 else 1 if not sizes else None)
    return result


def _reshaped(source: list[Size], wanted: list[Size] | None, allow_zero: bool) -> list[Size] | None:
    if wanted is None:
        return None
    result = [
        source[at] if size == 0 and not allow_zero and at < len(source) else size
        for at, size in enumerate(wanted)
    ]
    for open_size in (-1, None):
        if result.count(open_size) == 1:
            at = result.index(open_size)
            result[at] = quotient(product(source), product(each for each in result if each != open_size))
            break
    return result


def _einsum(node: ir.Node) -> list[Size] | None:
    inputs, arrow, out = (node.attributes.get_string("equation") or "").replace(" ", "").partition("->")
    found = dict[str, Size]()
    for text, value in zip(inputs.split(","), node.inputs, strict=False):
        dims = sizes_of(value)
        if dims is None or len(dims) != len(text):
            return None
        for letter, size in zip(text, dims, strict=True):
            if found.get(letter, 1) in (1, None):
                found[letter] = size
    return [found.get(letter) for letter in out] if arrow and "." not in inputs else None
