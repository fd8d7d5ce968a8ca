"""Rewrite a model for an older opset."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from mha_deploy.graph.ir import (
    FP8,
    NodeBuilder,
    constant,
    constant_ints,
    input_at,
    is_op,
    made_by,
    node_name,
    replace_node,
)
from mha_deploy.graph.lower.call import LoweringError
from mha_deploy.graph.quantize import dequantized_constant
from mha_deploy.graph.roles import MOVES
from mha_deploy.graph.valid import inline_functions

# -- How an operator is written before an opset: its new output, or None where it stays ------------


def _gelu(node: ir.Node, b: NodeBuilder) -> ir.Value | None:
    """Gelu (20): x/2 · (1 + erf(x/√2)), or its tanh form."""
    x = node.inputs[0]
    if x is None or x.dtype is None:
        return None
    half, one = (b.constant(number, x.dtype) for number in (0.5, 1.0))
    if node.attributes.get_string("approximate", "none") == "tanh":
        # tanh(√(2/π) · (x + 0.044715 x³))
        cube = b.op("Mul", b.op("Mul", b.op("Mul", x, x), x), b.constant(0.044715, x.dtype))
        bend = b.op("Tanh", b.op("Mul", b.op("Add", x, cube), b.constant(math.sqrt(2 / math.pi), x.dtype)))
    else:
        bend = b.op("Erf", b.op("Mul", x, b.constant(math.sqrt(0.5), x.dtype)))
    return b.op("Mul", b.op("Mul", x, half), b.op("Add", bend, one), name="gelu")


def _swish(node: ir.Node, b: NodeBuilder) -> ir.Value | None:
    """Swish (24): x · sigmoid(αx)."""
    x, alpha = node.inputs[0], node.attributes.get_float("alpha", 1.0)
    if x is None or x.dtype is None:
        return None
    inner = x if alpha == 1.0 else b.op("Mul", x, b.constant(alpha, x.dtype))
    return b.op("Mul", x, b.op("Sigmoid", inner), name="swish")


def _mish(node: ir.Node, b: NodeBuilder) -> ir.Value | None:
    """Mish (18): x · tanh(softplus(x))."""
    return b.op("Mul", node.inputs[0], b.op("Tanh", b.op("Softplus", node.inputs[0])), name="mish")


def _axes_to_attribute(node: ir.Node, b: NodeBuilder) -> None:
    """Axes became an input in opset 18; without any, all are reduced unless `noop_with_empty_axes`."""
    axes, keeps = constant_ints(node, 1), node.attributes.get_int("noop_with_empty_axes", 0)
    if (axes is None and input_at(node, 1) is not None) or (not axes and keeps):
        return
    if axes:
        node.attributes.add(ir.AttrInt64s("axes", axes))
    node.attributes.pop("noop_with_empty_axes", None)  # it applies to nodes without axes only
    node.resize_inputs(1)


def _in_float32(node: ir.Node, b: NodeBuilder) -> ir.Value | None:
    """From opset 20 on IsInf takes half precision, and ReduceMax and ReduceMin booleans."""
    x, is_reduction = node.inputs[0], node.op_type != "IsInf"
    newer = (ir.DataType.BOOL,) if is_reduction else (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    if x is None or x.dtype not in newer:
        return None
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    numbers = b.op("Cast", x, to=int(ir.DataType.FLOAT))
    result = b.op(node.op_type, numbers, *node.inputs[1:], **attributes)
    return b.op("Cast", result, to=int(ir.DataType.BOOL), name="as_bool") if is_reduction else result


def _pad_every_axis(node: ir.Node, b: NodeBuilder) -> ir.Value | None:
    """Pad has the input `axes` from opset 18 on; before, it pads all axes."""
    x = node.inputs[0]
    pads, axes = constant_ints(node, 1), constant_ints(node, 3)
    if axes is None or pads is None or x is None or x.shape is None:
        return None
    rank = len(x.shape)
    spelled = [0] * (2 * rank)
    for at, axis in enumerate(axes):
        spelled[axis % rank], spelled[rank + axis % rank] = pads[at], pads[at + len(axes)]
    mode = node.attributes.get_string("mode", "constant")
    return b.op("Pad", x, b.ints(*spelled), node.inputs[2], mode=mode, name="padded")


def _drop_split_count(node: ir.Node, b: NodeBuilder) -> None:
    """`num_outputs` came with opset 18, where the last part may be smaller."""
    data, axis = node.inputs[0], node.attributes.get_int("axis", 0)
    size = data.shape[axis] if data is not None and data.shape is not None else None
    evenly = isinstance(size, int) and size % len(node.outputs) == 0
    if input_at(node, 1) is not None or evenly:
        node.attributes.pop("num_outputs", None)


def _shape_in_full(node: ir.Node, b: NodeBuilder) -> ir.Value | None:
    """Shape without `start` and `end`: TensorRT 8.6 crashed on graphs with them."""
    x = node.inputs[0]
    if x is None or x.shape is None or not {"start", "end"} & set(node.attributes):
        return None
    rank = len(x.shape)
    wanted = range(rank)[node.attributes.get_int("start", 0) : node.attributes.get_int("end", rank)]
    return b.op("Gather", b.op("Shape", x), b.ints(*wanted), axis=0, name="range")


def _squeeze_by_name(node: ir.Node, b: NodeBuilder) -> ir.Value | None:
    """Squeeze with explicit axes: TensorRT 8.6 crashed on graphs without them."""
    x = node.inputs[0]
    if len(node.inputs) > 1 or x is None or x.shape is None or len(x.shape) != 1:
        return None
    return b.op("Squeeze", x, b.ints(0))


def _scale_in_float32(node: ir.Node, b: NodeBuilder) -> ir.Value | None:
    """Before opset 19 QuantizeLinear and DequantizeLinear have float32 on their wide side alone."""
    x, scale = node.inputs[0], input_at(node, 1)
    if x is None or scale is None or scale.dtype not in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        return None
    single, held = ir.DataType.FLOAT, constant(scale)
    if held is None:
        wide = b.op("Cast", scale, to=int(single))
    else:
        wide = b.constant(held.numpy().astype(np.float32).tolist(), single)
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    if node.op_type == "QuantizeLinear":
        numbers = b.op("Cast", x, to=int(single))
        return b.op("QuantizeLinear", numbers, wide, *node.inputs[2:], name="quantized", **attributes)
    zero, offset = list(node.inputs[2:]), constant(input_at(node, 2))
    plain = x.dtype == ir.DataType.INT8 and (offset is None or not offset.numpy().any())
    weights = dequantized_constant(node, np.float32) if plain else None
    if weights is not None and held is not None:
        # TensorRT 8.6 takes no weights in INT8: it quantizes those that it is given, to the same numbers.
        # Products of 8 and 11 bits are exact in float32.
        zero = [b.constant(np.zeros(held.shape.numpy()), ir.DataType.INT8)]
        x = b.op("QuantizeLinear", b.constant(weights, single), wide, *zero, **attributes)
    numbers = b.op("DequantizeLinear", x, wide, *zero, name="dequantized", **attributes)
    narrow = b.op("Cast", numbers, to=int(scale.dtype), name="dequantized_narrow")
    narrow.meta[_IS_NARROWED] = True
    return narrow


_IS_NARROWED = "mha_deploy.is_narrowed"  # in the metadata of a value, which is in no file


def _multiply_dequantized(model: ir.Model) -> bool:
    """Narrow what was dequantized behind the matmul, not before it: TensorRT 8.6 looks for Q/DQ beside it."""

    def wide(value: ir.Value | None, b: NodeBuilder) -> ir.Value | None:
        cast, move = made_by(value, "Cast"), made_by(value, *MOVES, "Expand")
        if cast is not None and cast.outputs[0].meta.get(_IS_NARROWED):
            return cast.inputs[0]
        if move is None or (source := wide(move.inputs[0], b)) is None:
            return None
        attributes = {name: attribute.value for name, attribute in move.attributes.items()}
        return b.op(move.op_type, source, *move.inputs[1:], **attributes)

    changed = False
    for node in [node for node in model.graph.all_nodes() if is_op(node, "MatMul")]:
        b = NodeBuilder(node_name(node))
        factors = [wide(value, b) for value in node.inputs]
        if None in factors or (narrow := node.outputs[0].dtype) is None:
            continue
        y = b.op("MatMul", *factors, name=b.prefix)
        replace_node(node, b, {0: b.op("Cast", y, to=int(narrow), name="narrow")})
        changed = True
    if changed:
        RemoveUnusedNodesPass()(model)
    return changed


_REDUCED = "L1 L2 LogSum LogSumExp Max Mean Min Prod SumSquare"
_REDUCTIONS = tuple(f"Reduce{kind}" for kind in _REDUCED.split())

# The opset with the newer form, the operators, and how to write them before it.
_REWRITES: tuple[tuple[int, tuple[str, ...], Callable[[ir.Node, NodeBuilder], ir.Value | None]], ...] = (
    (18, _REDUCTIONS, _axes_to_attribute),
    (18, ("Split",), _drop_split_count),
    (18, ("Shape",), _shape_in_full),
    (18, ("Squeeze",), _squeeze_by_name),
    (18, ("Pad",), _pad_every_axis),
    (18, ("Mish",), _mish),
    (19, ("QuantizeLinear", "DequantizeLinear"), _scale_in_float32),
    (20, ("ReduceMax", "ReduceMin", "IsInf"), _in_float32),
    (20, ("Gelu",), _gelu),
    (24, ("Swish",), _swish),
)


# -- The whole model -------------------------------------------------------------------------------

# The same node computes something else in the older version, though both schemas accept it.
_CHANGED_MEANING = frozenset({"GridSample", "GroupNormalization", "DFT"})

# Values of attributes that came after opset 17; the schemas do not list values.
_NEWER_VALUES = {
    ("ScatterND", "reduction"): frozenset({"max", "min"}),
    ("ScatterElements", "reduction"): frozenset({"max", "min"}),
    ("Pad", "mode"): frozenset({"wrap"}),
    ("Resize", "coordinate_transformation_mode"): frozenset({"half_pixel_symmetric"}),
}


def to_opset(model: ir.Model, version: int) -> bool:
    """Let a model, which is changed, need no opset newer than `version`; whether it has new nodes."""
    current = model.opset_imports.get("", version)
    if current <= version:
        return False
    inline_functions(model)
    nodes, seen, changed = list(model.graph.all_nodes()), set[str | None](), False
    for node in nodes:  # the new nodes are named after the old ones
        if node.name in seen and node.outputs:
            node.name = node.outputs[0].name
        seen.add(node.name)
    for node in nodes:
        for since, names, rewrite in _REWRITES:
            if version < since and is_op(node, *names):
                b = NodeBuilder(node_name(node))
                if (y := rewrite(node, b)) is not None:
                    replace_node(node, b, {0: y})
                    changed = True
    changed |= version < 19 and _multiply_dequantized(model)
    for node in model.graph.all_nodes():
        problem = _problem(node, current, version) if node.domain == "" else None
        if problem is not None:
            hint = f"opset=None keeps the model's own opset, for a target newer than opset {version}"
            if any(value is not None and value.dtype in FP8 for value in (*node.inputs, *node.outputs)):
                hint = f"dialect plugin, whose GEMMs read FP8 (--attention plugin); or {hint}"
            raise LoweringError(f"{node.op_type} in opset {version}", node, got=problem, hint=hint)
        node.version = None
    model.graph.opset_imports[""] = version
    imports = [onnx.helper.make_opsetid(*item) for item in model.opset_imports.items()]
    model.ir_version = min(model.ir_version, onnx.helper.find_min_ir_version_for(imports, True))
    return changed


def _problem(node: ir.Node, current: int, version: int) -> str | None:
    """Why the node is not valid in the older version; None where it is valid."""
    try:
        old = onnx.defs.get_schema(node.op_type, version, "")
    except onnx.defs.SchemaError:
        return "it is newer"
    new = onnx.defs.get_schema(node.op_type, current, "")
    if old.since_version == new.since_version:
        return None
    if node.op_type in _CHANGED_MEANING:
        return "it computes something else there"
    for name, attribute in list(node.attributes.items()):
        if name in old.attributes:
            if attribute.value in _NEWER_VALUES.get((node.op_type, name), ()):
                return f"it uses {name}={attribute.value}"
            continue
        default = new.attributes[name].default_value if name in new.attributes else None
        value = attribute.value.encode() if attribute.type == ir.AttributeType.STRING else attribute.value
        if default is None or value != onnx.helper.get_attribute_value(default):
            return f"it uses the attribute {name}"
        node.attributes.pop(name)  # the default
    last = old.inputs[-1] if old.inputs else None
    variadic = last is not None and last.option == onnx.defs.OpSchema.FormalParameterOption.Variadic
    if len(node.inputs) > len(old.inputs) and not variadic:
        return f"it has {len(node.inputs)} inputs"
    for side, values, formals in (("input", node.inputs, old.inputs), ("output", node.outputs, old.outputs)):
        for index, value in enumerate(values):
            formal, kind = formals[min(index, len(formals) - 1)], None if value is None else value.type
            if kind is not None and (text := _type_text(kind)) not in formal.types:
                is_tensor = isinstance(kind, ir.TensorType)
                return f"{side} {formal.name} is {kind.dtype.name if is_tensor else text}"
    return None


def _type_text(kind: ir.TypeProtocol) -> str:
    """A type as the specification writes it, such as `seq(tensor(float))`."""
    if isinstance(kind, ir.SequenceType):
        return f"seq({_type_text(kind.elem_type)})"
    if isinstance(kind, ir.OptionalType):
        return f"optional({_type_text(kind.elem_type)})"
    return f"tensor({kind.dtype.name.lower()})"
