"""Write GEMMs of a graph in eight bits: Q/DQ nodes in ONNX's own operators, and the numbers they stand for.

Weights have one scale for each output channel or for the tensor, activations one for the tensor; all are
symmetric. Scales are numbers of FP16, so that a graph in FP16 has the very same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from mha_deploy.errors import DeployError, nearest
from mha_deploy.graph import attention_node as an
from mha_deploy.graph import plugin_node as plugin
from mha_deploy.graph.attention_node import is_attention, read_attention, read_quantized
from mha_deploy.graph.fuse.values import folded
from mha_deploy.graph.ir import (
    NodeBuilder,
    constant,
    constant_number,
    infer_shapes,
    input_at,
    is_op,
    made_by,
    name_nodes,
    new_initializer,
    nodes_behind,
    perm,
    rank,
    weight_behind,
)
from mha_deploy.graph.roles import CARRIES, MOVES, QUANTIZERS
from mha_deploy.threads import for_each_part, parts_of

_LEAST_OPSET = 19  # the first with scales in FP16, and with FP8
_SMALLEST_SCALE = float(np.finfo(np.float16).smallest_subnormal)


@dataclass(frozen=True, kw_only=True)
class EightBits:
    """A format of eight bits."""

    name: str
    type: ir.DataType
    largest: float  # the largest magnitude that weights and calibrated activations have
    per_tensor: bool = False  # whether a weight has one scale, not one for each output channel

    def on_grid(self, values: np.ndarray) -> np.ndarray:
        """The nearest numbers of the format, beyond its range the last ones, as `QuantizeLinear` has them."""
        if self.type == ir.DataType.INT8:
            return np.clip(np.rint(values), -128, 127)
        clipped = np.clip(values, -self.largest, self.largest)
        return clipped.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)

    def rounded(self, values: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
        """What numbers become that are quantized and dequantized."""
        return self.on_grid(values / scale) * scale

    def stored(self, values: np.ndarray) -> np.ndarray:
        """The nearest numbers of the grid that weights have, in its type."""
        whole = np.rint(values) if self.type == ir.DataType.INT8 else values
        return np.clip(whole, -self.largest, self.largest).astype(self.type.numpy())


FORMATS = {
    "int8": EightBits(name="int8", type=ir.DataType.INT8, largest=127.0),
    "fp8": EightBits(name="fp8", type=ir.DataType.FLOAT8E4M3FN, largest=448.0),
}


def find_format(name: str) -> EightBits:
    """Look a format up by name."""
    if name not in FORMATS:
        raise DeployError("No such format of eight bits.", got=name, hint=nearest(name, FORMATS))
    return FORMATS[name]


def fp16_scale(scale: np.ndarray | float) -> np.ndarray:
    """Scales as numbers of FP16, none of them smaller than given: nothing is clipped that was not before."""
    wide = np.maximum(np.asarray(scale, np.float64), _SMALLEST_SCALE)
    wide = np.where(np.asarray(scale) > 0, wide, 1.0)  # of zeros
    narrow = np.minimum(wide, np.finfo(np.float16).max).astype(np.float16)
    up = np.where(narrow.astype(np.float64) < wide, np.nextafter(narrow, np.float16(np.inf)), narrow)
    return np.minimum(up, np.finfo(np.float16).max).astype(np.float64)


# -- Large constants, as they are stored and in FP64 -------------------------------------------------


@dataclass(frozen=True)
class ScaledConstant:
    """A constant as it is stored, and what its numbers become: what is beyond zero, times the scale."""

    numbers: np.ndarray
    scale: np.ndarray | None = None
    zero: np.ndarray | float = 0.0

    def wide(self, change: Callable[[np.ndarray], np.ndarray] | None = None) -> np.ndarray:
        """Its numbers in FP64, with a change that is made to each of them."""
        result = np.empty(self.numbers.shape)

        def upcast(rows: slice) -> None:
            part = self._wide(rows)
            result[rows] = part if change is None else change(part)

        if not result.ndim:
            part = self._wide(...)
            return part if change is None else change(part)
        for_each_part(upcast, result.shape)
        return result

    def is_kept_by(self, change: Callable[[np.ndarray], np.ndarray]) -> bool:
        """Whether a change leaves all numbers as they are."""
        parts = map(self._wide, parts_of(self.numbers.shape))
        return all(np.array_equal(change(part), part) for part in parts)

    def _wide(self, rows: Any) -> np.ndarray:
        """Some of the rows, or all of them."""
        numbers = self.numbers[rows]
        if numbers.dtype.itemsize == 1:  # a table is faster than ml_dtypes
            every = np.arange(256, dtype=np.uint8).view(numbers.dtype).astype(np.float64)
            wide = np.take(every, numbers.view(np.uint8), mode="clip")
        else:
            wide = numbers.astype(np.float64)
        if self.scale is None:
            return wide
        zero, scale = (self._along(each, rows) for each in (self.zero, self.scale))
        return np.asarray((wide - zero if np.any(zero) else wide) * scale)

    def _along(self, factor: Any, rows: Any) -> Any:
        varies = np.ndim(factor) == self.numbers.ndim > 0 and len(factor) > 1
        return factor[rows] if varies else factor


# -- The GEMMs of a graph ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GemmLayer:
    """A GEMM of a computed tensor and a weight."""

    name: str  # of its node
    activation: str  # the name of what it multiplies
    output: str
    weight: np.ndarray
    axis: int  # of the output channels in the weight
    largest: float  # of the weights of all GEMMs with this activation, which may be packed into one

    @property
    def size(self) -> int:
        """How many weights it has."""
        return self.weight.size

    @property
    def activations(self) -> tuple[str, ...]:
        """The values that are quantized for it."""
        return (self.activation,)

    def weight_scale(self, format: EightBits) -> np.ndarray:
        """The scale of every output channel, or one number."""
        if format.per_tensor:
            return fp16_scale(self.largest / format.largest)
        ends = self.weight.max(axis=1 - self.axis), -self.weight.min(axis=1 - self.axis)
        return fp16_scale(np.maximum(*ends).astype(np.float64) / format.largest)

    def quantized_weight(self, format: EightBits) -> ScaledConstant:
        """The weight on the grid, as it is stored, and its scales."""
        scale = self._across(self.weight_scale(format))
        numbers = np.empty(self.weight.shape, format.type.numpy())

        def quantize(rows: slice) -> None:
            numbers[rows] = format.stored(self.weight[rows] / (scale[rows] if len(scale) > 1 else scale))

        for_each_part(quantize, numbers.shape)
        return ScaledConstant(numbers, scale)

    def _across(self, scale: np.ndarray) -> np.ndarray:
        return np.expand_dims(scale, 1 - self.axis) if scale.ndim else scale.reshape(1, 1)


_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """An attention whose Q, K, V and weights can be quantized."""

    name: str  # of its node
    activations: tuple[str, str, str]  # the names of Q, K and V
    output: str  # of the heads
    size: int = 0  # it has no weights of its own

    @property
    def matmul(self) -> str:
        """The node that multiplies its weights with the values, once these are an output of it."""
        return f"{self.name}/weighted_values"


class OtherGemm(NamedTuple):
    """A GEMM with a weight that cannot be quantized."""

    name: str  # of its node
    output: str
    size: int  # how many weights it has


def attention_layers(model: ir.Model) -> list[AttentionLayer]:
    """The attentions of the main graph that can be quantized, in the order of the graph.

    Not those with a KV cache, whose entries are the user's, or with scores that are an output.
    """
    found = []
    for node in filter(is_attention, model.graph):
        each, (q, k, v) = read_attention(node), (input_at(node, at) for at in (an.Q, an.K, an.V))
        known = all(isinstance(size, int) for size in (each.Hq, each.Hkv, each.D, each.Dv))
        plain = not (each.has_past or each.has_present or each.has_nonpad_kv_seqlen or each.has_qk_output)
        if q is None or k is None or v is None or q.dtype not in _FLOATS:
            continue
        if known and plain and each.quantized is None:
            names, output = (str(q.name), str(k.name), str(v.name)), str(node.outputs[0].name)
            found.append(AttentionLayer(name=str(node.name), activations=names, output=output))
    return found


def with_weights_apart(model: ir.Model, names: Iterable[str]) -> ir.Model:
    """A copy whose attentions of these names give their weights, which a matmul multiplies with the values.

    It computes the same: so the weights can be quantized.
    """
    copy, chosen = model.clone(), set(names)
    for node in [node for node in copy.graph if is_attention(node) and str(node.name) in chosen]:
        each, values, old = read_attention(node), input_at(node, an.V), node.outputs[an.Y]
        Hq, Hkv, Dv = each.Hq, each.Hkv, each.Dv
        if values is None or not (isinstance(Hq, int) and isinstance(Hkv, int) and isinstance(Dv, int)):
            continue
        b = NodeBuilder(str(node.name))
        if each.rank == 3:
            values = b.transpose(b.reshape(values, 0, 0, Hkv, Dv), 0, 2, 1, 3)
        if Hq != Hkv:
            copies = b.expand(b.unsqueeze(values, 2), 1, 1, Hq // Hkv, 1, 1)
            values = b.reshape(copies, 0, Hq, -1, Dv)
        node.resize_outputs(an.QK_OUTPUT + 1)
        weights = node.outputs[an.QK_OUTPUT]
        for at, value in enumerate(node.outputs[1:], 1):
            value.name = f"{node.name}/weights" if at == an.QK_OUTPUT else ""
        weights.type = old.type
        node.attributes["qk_matmul_output_mode"] = ir.AttrInt64("qk_matmul_output_mode", an.OF_WEIGHTS)
        heads = b.op("MatMul", weights, values, name="weighted_values")
        if each.rank == 3:
            heads = b.reshape(b.transpose(heads, 0, 2, 1, 3), 0, 0, Hq * Dv)
        name = old.name
        heads.type, heads.shape = old.type, old.shape
        old.replace_all_uses_with(heads, replace_graph_outputs=True)
        old.name, heads.name = f"{node.name}/unquantized", name
        copy.graph.insert_after(node, b.nodes)
    return infer_shapes(copy)


def named_nodes(model: ir.Model) -> ir.Model:
    """The same graph with a name of its own for each node of the main graph; changed in place."""
    name_nodes(model.graph)
    return model


def with_plain_weights(model: ir.Model) -> ir.Model:
    """The same graph, whose GEMMs read weights and not copies of them; changed in place.

    PyTorch's older exporter shares equal weights by `Identity`, and may leave a `Transpose` behind them; the
    newer one splits the packed weight of a cross attention in the graph.
    """
    for node in [node for node in model.graph if is_op(node, "Identity", "Transpose")]:
        source, old = node.inputs[0], node.outputs[0]
        tensor = constant(source)
        if source is None or tensor is None or len(tensor.shape) != 2 or old.is_graph_output():
            continue
        if is_op(node, "Transpose") and perm(node) == (1, 0):
            transposed = np.ascontiguousarray(tensor.numpy().T)
            source = new_initializer(model.graph, f"{old.name}/transposed", transposed, tensor.dtype)
        old.replace_all_uses_with(source)
        model.graph.remove(node, safe=True)
    plain = dict[ir.Value, ir.Value | None]()
    for node in [node for node in model.graph if is_op(node, "MatMul", "Gemm", "Add")]:
        for at, value in enumerate(node.inputs):
            if value is None or constant(value) is not None:
                continue
            if value not in plain:
                moved = all(is_op(each, *CARRIES) for each in nodes_behind([value]))
                numbers = folded(value) if moved else None
                name = f"{value.name}/folded"
                plain[value] = (
                    None if numbers is None else new_initializer(model.graph, name, numbers, value.dtype)
                )
            node.replace_input_with(at, plain[value] or value)
    if any(each is not None for each in plain.values()):
        RemoveUnusedNodesPass()(model)
    return model


def with_plain_biases(model: ir.Model) -> ir.Model:
    """The same graph, whose biases are stored in the type that they are added in; changed in place.

    ONNX Runtime stores those of quantized GEMMs in INT32, and no TensorRT dequantizes that type.
    """
    changed = False
    for node in [each for each in model.graph if is_op(each, "DequantizeLinear")]:
        source, old = node.inputs[0], node.outputs[0]
        if source is None or source.dtype != ir.DataType.INT32 or old.is_graph_output():
            continue
        if (numbers := dequantized_constant(node)) is not None:
            old.replace_all_uses_with(new_initializer(model.graph, f"{old.name}/plain", numbers))
            model.graph.remove(node, safe=True)
            changed = True
    if changed:  # what the biases were dequantized from
        RemoveUnusedNodesPass()(model)
    return model


def other_gemms(model: ir.Model) -> list[OtherGemm]:
    """The GEMMs of the main graph with a weight that cannot be quantized, in the order of the graph."""
    names, found = {each.name for each in gemm_layers(model)}, []
    for node in model.graph:
        if not is_op(node, "MatMul", "Gemm") or str(node.name) in names:
            continue
        weights = [each for value in node.inputs[:2] if (each := weight_behind(value)) is not None]
        sizes = [each.const_value.shape.numpy() for each in weights if each.const_value is not None]
        # One row or column is a vector, as the frequencies of a rotary embedding are.
        if len(sizes) == 1 and sum(size > 1 for size in sizes[0]) > 1:
            output = str(node.outputs[0].name)
            found.append(OtherGemm(name=str(node.name), output=output, size=int(np.prod(sizes[0]))))
    return found


def gemm_layers(model: ir.Model) -> list[GemmLayer]:
    """The GEMMs of the main graph that can be quantized, in the order of the graph."""
    found = [layer for node in model.graph if (layer := _gemm(node)) is not None]
    largest: dict[str, float] = {}
    for each in found:
        largest[each.activation] = max(largest.get(each.activation, 0.0), each.largest)
    return [replace(each, largest=largest[each.activation]) for each in found]


def _gemm(node: ir.Node) -> GemmLayer | None:
    if not is_op(node, "MatMul", "Gemm") or node.attributes.get_int("transA", 0) == 1:
        return None
    activation, weight = node.inputs[0], node.inputs[1]
    tensor = constant(weight)
    if activation is None or tensor is None or len(tensor.shape) != 2 or tensor.dtype not in _FLOATS:
        return None
    if constant(activation) is not None or made_by(activation, "DequantizeLinear") is not None:
        return None
    if rank(activation) in (0, 1):
        return None
    axis = 0 if node.attributes.get_int("transB", 0) else 1
    names, numbers = (str(node.name), str(activation.name), str(node.outputs[0].name)), tensor.numpy()
    largest = float(np.maximum(numbers.max(initial=0.0), -numbers.min(initial=0.0)))
    return GemmLayer(
        name=names[0], activation=names[1], output=names[2], weight=numbers, axis=axis, largest=largest
    )


# -- Q/DQ nodes in a graph --------------------------------------------------------------------------


def with_quantized(
    model: ir.Model,
    format: EightBits,
    scales: Mapping[str, float],
    kept: Iterable[str] = (),
    attentions: Iterable[AttentionLayer] = (),
) -> ir.Model:
    """A copy whose GEMMs, and these attentions, read dequantized tensors, but those that are `kept`.

    `scales` are those of the activations, by their names. Weights are shared where nothing is quantized.
    """
    opset = model.graph.opset_imports.get("", 0)
    if opset < _LEAST_OPSET:
        hint = f"convert the file to opset {_LEAST_OPSET} or newer (onnx.version_converter)"
        raise DeployError(f"{format.name} needs a newer operator set.", got=f"opset {opset}", hint=hint)
    left = set(kept)
    chosen = [each for each in attentions if each.name not in left]
    copy = with_weights_apart(model, [each.name for each in chosen]) if chosen else model.clone()
    layers = {each.name: each for each in gemm_layers(copy)}
    activations: dict[tuple[str, float], ir.Value] = {}
    weights: dict[tuple[str, int], ir.Value] = {}
    for node in [node for node in copy.graph if str(node.name) in layers and str(node.name) not in left]:
        layer, (x, weight) = layers[str(node.name)], node.inputs[:2]
        if x is None or weight is None or x.dtype is None:
            continue
        key = (layer.activation, scales[layer.activation])
        if key not in activations:
            activations[key] = _quantized_activation(copy.graph, node, x, f"{layer.name}/x", format, key[1])
        node.replace_input_with(0, activations[key])
        place = (str(weight.name), layer.axis)
        if place not in weights:
            weights[place] = _quantized_weight(copy.graph, node, weight, layer, format)
        node.replace_input_with(1, weights[place])
    nodes = {str(node.name): node for node in copy.graph}
    for each in chosen:
        node = nodes[each.name]
        for at, role in ((an.Q, "q"), (an.K, "k"), (an.V, "v")):
            x = input_at(node, at)
            if x is not None:
                where = f"{each.name}/{role}"
                up = _quantized_activation(copy.graph, node, x, where, format, scales[each.activations[at]])
                node.replace_input_with(at, up)
                if role == "v":
                    user, its = _reader_behind(nodes[each.matmul], x)
                    user.replace_input_with(its, up)
        matmul, unit = nodes[each.matmul], float(fp16_scale(1.0 / format.largest))
        inner, where = node.outputs[an.QK_OUTPUT], f"{each.name}/weights"
        matmul.replace_input_with(0, _quantized_activation(copy.graph, matmul, inner, where, format, unit))
    for value in list(copy.graph.initializers.values()):
        if not value.uses() and not value.is_graph_output():
            del copy.graph.initializers[str(value.name)]
    return infer_shapes(copy)


def _reader_behind(matmul: ir.Node, values: ir.Value) -> tuple[ir.Node, int]:
    """What reads V on its way to the matmul with the weights, and as which input."""
    node, at = matmul, 1
    while (value := node.inputs[at]) is not values:
        maker = None if value is None else value.producer()
        if maker is None:
            raise ValueError(f"{matmul.name} does not multiply {values.name}")
        node, at = maker, 0
    return node, at


def _quantized_activation(
    graph: ir.Graph, node: ir.Node, x: ir.Value, name: str, format: EightBits, scale: float
) -> ir.Value:
    dtype = x.dtype or ir.DataType.FLOAT
    factor = new_initializer(graph, f"{name}_scale", np.array(scale, dtype.numpy()))
    zero = new_initializer(graph, f"{name}_zero", format.stored(np.zeros(())), format.type)
    down = ir.node("QuantizeLinear", [x, factor, zero], name=f"{name}_quantize")
    up = ir.node("DequantizeLinear", [down.outputs[0], factor, zero], name=f"{name}_dequantize")
    down.outputs[0].name, up.outputs[0].name = f"{name}_quantized", f"{name}_dequantized"
    graph.insert_before(node, [down, up])
    up.outputs[0].type = ir.TensorType(dtype)
    up.outputs[0].shape = x.shape
    return up.outputs[0]


def _quantized_weight(
    graph: ir.Graph, node: ir.Node, weight: ir.Value, layer: GemmLayer, format: EightBits
) -> ir.Value:
    numbers, scale = layer.quantized_weight(format).numbers, layer.weight_scale(format)
    dtype = weight.dtype or ir.DataType.FLOAT
    stored = new_initializer(graph, f"{layer.name}/w_quantized", numbers, format.type)
    factor = new_initializer(graph, f"{layer.name}/w_scale", scale.astype(dtype.numpy()))
    zeros = format.stored(np.zeros(scale.shape))
    zero = new_initializer(graph, f"{layer.name}/w_zero", zeros, format.type)
    up = ir.node(
        "DequantizeLinear", [stored, factor, zero], attributes={"axis": layer.axis} if scale.ndim else {},
        name=f"{layer.name}/w_dequantize",
    )  # fmt: skip
    up.outputs[0].name = f"{layer.name}/w_dequantized"
    up.outputs[0].type = ir.TensorType(dtype)
    up.outputs[0].shape = ir.Shape(layer.weight.shape)
    graph.insert_before(node, up)
    return up.outputs[0]


class Fp8Gemm(NamedTuple):
    """A GEMM whose factors are both quantized to FP8."""

    x: ir.Value  # before it is quantized
    x_scale: float
    weight: np.ndarray  # [inputs, outputs], in FP8
    scales: np.ndarray  # [1] or [outputs]


def read_fp8_gemm(node: ir.Node) -> Fp8Gemm | None:
    """Read a MatMul of two dequantized factors in FP8; None for another one."""
    if not is_op(node, "MatMul"):
        return None
    up, up_weight = (made_by(value, "DequantizeLinear") for value in node.inputs)
    down = made_by(input_at(up, 0), "QuantizeLinear")
    x, weight, scales = input_at(down, 0), constant(input_at(up_weight, 0)), constant(input_at(up_weight, 1))
    if x is None or down is None or up_weight is None or weight is None or scales is None:
        return None
    if {down.outputs[0].dtype, weight.dtype} != {FORMATS["fp8"].type} or len(weight.shape) != 2:
        return None
    x_scales = {constant_number(input_at(each, 1)) for each in (down, up)}
    zeros = [constant(each) for s in (down, up, up_weight) if (each := input_at(s, 2)) is not None]
    plain = all(zero is not None and not zero.numpy().astype(np.float32).any() for zero in zeros)
    by_output = up_weight.attributes.get_int("axis", 1) in (1, -1) and scales.shape == weight.shape[1:]
    if len(x_scales) != 1 or (x_scale := x_scales.pop()) is None or not plain:
        return None
    if scales.size != 1 and not by_output:
        return None
    return Fp8Gemm(x, x_scale, weight.numpy(), scales.numpy().astype(np.float64).reshape(-1))


# -- The graph that was quantized -------------------------------------------------------------------


def is_quantized(model: ir.Model) -> bool:
    """Whether a graph quantizes anything."""
    return any(is_op(node, *QUANTIZERS) for node in model.graph)


OPERATOR = "TRT_QuantizedAttention"
"""TensorRT's operator for attention that quantizes its weights."""


def quantized_gemms(model: ir.Model) -> Iterator[tuple[str, str]]:
    """The matmuls and attentions whose factors are both dequantized, and from which type: `int8` or `fp8`."""
    names = {each.type: each.name for each in FORMATS.values()}

    def dequantized(value: ir.Value | None) -> ir.Node | None:
        while (layout := made_by(value, *MOVES, "Expand", "Cast")) is not None:
            value = layout.inputs[0]
        return made_by(value, "DequantizeLinear")

    for node in model.graph:
        if is_attention(node) and (found := read_quantized(node)) is not None:
            yield str(node.name), found.type
        if plugin.multiplies_fp8(node):
            yield str(node.name), "fp8"
        if not is_op(node, "MatMul", "Gemm") and node.op_type != OPERATOR:
            continue
        sources = [dequantized(value) for value in node.inputs[:2]]
        kinds = {source.inputs[0].dtype for source in sources if source is not None and source.inputs[0]}
        if None not in sources and len(kinds) == 1 and (kind := kinds.pop()) in names:
            yield str(node.name), names[kind]


def without_quantizers(model: ir.Model) -> ir.Model:
    """A copy that computes the same without rounding to a grid: what its numbers are before that.

    Only pairs are taken out: a tensor that is quantized and used as such stays as it is.
    """
    copy = model.clone()
    for node in [node for node in copy.graph if is_op(node, "DequantizeLinear")]:
        numbers, scale = node.inputs[0], node.inputs[1]
        if numbers is None or scale is None:
            continue
        if (source := made_by(numbers, "QuantizeLinear")) is not None and source.inputs[0] is not None:
            old, new = node.outputs[0], source.inputs[0]
            if new.dtype not in (None, scale.dtype):  # a file need not state types
                continue
            if not all(map(_are_equal, zip_longest(source.inputs[1:], node.inputs[1:]))):
                continue  # another scale is a factor
            if old.is_graph_output():  # of its name and type
                same = ir.node("Identity", [new], name=f"{node.name}/same")
                same.outputs[0].type, same.outputs[0].shape = old.type, old.shape
                copy.graph.insert_before(node, same)
                new, name, old.name = same.outputs[0], old.name, f"{old.name}/quantized"
                new.name = name
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            copy.graph.remove(node, safe=True)
        elif (array := dequantized_constant(node)) is not None and not node.outputs[0].is_graph_output():
            folded = new_initializer(copy.graph, f"{node.outputs[0].name}/folded", array)
            node.outputs[0].replace_all_uses_with(folded)
            copy.graph.remove(node, safe=True)
    for node in reversed([node for node in copy.graph if is_op(node, "QuantizeLinear")]):
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            copy.graph.remove(node, safe=True)
    return copy


def _are_equal(pair: tuple[ir.Value | None, ir.Value | None]) -> bool:
    """Whether two scales, or zero points, are certainly equal; a zero point may be omitted."""
    if pair[0] is pair[1]:
        return True
    numbers = [np.zeros(1)] * pair.count(None)
    tensors = [tensor for each in pair if (tensor := constant(each)) is not None]
    numbers += [tensor.numpy().astype(np.float64).reshape(-1) for tensor in tensors]
    if len(numbers) < 2 or (1 not in map(len, numbers) and len(numbers[0]) != len(numbers[1])):
        return False
    return bool(np.all(numbers[0] == numbers[1]))


def scaled_constant(node: ir.Node) -> ScaledConstant | None:
    """A constant that is dequantized; None where it is not one, or has scales of blocks."""
    tensors = [None if value is None else constant(value) for value in node.inputs]
    if tensors[0] is None or tensors[1] is None or (len(node.inputs) > 2 and tensors[2] is None):
        return None
    numbers, scale = tensors[0].numpy(), tensors[1].numpy().astype(np.float64)
    zero = tensors[2].numpy().astype(np.float64) if len(tensors) > 2 and tensors[2] is not None else 0.0
    if scale.ndim > 1:
        return None
    if scale.ndim == 1 and scale.size != 1:
        shape = [1] * numbers.ndim
        shape[node.attributes.get_int("axis", 1)] = -1
        zero = zero.reshape(shape) if isinstance(zero, np.ndarray) and zero.ndim else zero
        return ScaledConstant(numbers, scale.reshape(shape), zero)
    return ScaledConstant(numbers, scale.reshape(()), zero)


def dequantized_constant(node: ir.Node, dtype: type[np.floating] | None = None) -> np.ndarray | None:
    """The numbers of a constant that is dequantized; None where it is not one, or has scales of blocks.

    In the type of the scale, or another one.
    """
    found, scale = scaled_constant(node), constant(input_at(node, 1))
    if found is None or scale is None:
        return None
    wanted = scale.dtype.numpy() if dtype is None else dtype
    return found.wide().astype(wanted, copy=False)
