"""An ONNX file as it was given, evaluated in FP64: exactly, and with random rounding. Without PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from mha_deploy.bundle.cases import Arrays
from mha_deploy.errors import DeployError
from mha_deploy.exporter.samples import DECISION_ELEMENTS, RoundingMode
from mha_deploy.graph.attention_node import MASK, QK_OUTPUT
from mha_deploy.graph.file import with_outputs
from mha_deploy.graph.ir import is_op
from mha_deploy.graph.quantize import ScaledConstant, scaled_constant
from mha_deploy.graph.roles import LAYOUT, MATMULS, MOVES, NORMS, QUANTIZERS, SOFTMAXES
from mha_deploy.graph.upcast import FLOATS, in_float64
from mha_deploy.model.masking import ABSORBS_FLOAT32, absorbs_all_scores
from mha_deploy.model.precision import PRECISIONS, Precision
from mha_deploy.rounding import ACCUMULATED, MARGIN, hashed, nearest, normal, rounded
from mha_deploy.runtime.onnx_reference import evaluator_of
from mha_deploy.runtime.user_code import graph_code
from mha_deploy.threads import on_one_thread, side_by_side

# Where kernels round: what a GEMM reads and writes, what norms, softmax and activations write. Elementwise
# operators are fused into these, but for sums of two tensors: a residual stream is written after each.
_MATMULS = frozenset(MATMULS) | {"Attention", "RotaryEmbedding"}
_WITH_FACTORS = frozenset({*NORMS, "BatchNormalization"})
_ROUNDED = frozenset({*SOFTMAXES, *_WITH_FACTORS, "MeanVarianceNormalization", "Gelu", "Tanh", "Sigmoid"})
_ROUNDED |= {"Swish", "Mish", "Elu", "HardSwish", "Softplus", "LeakyRelu", "Gather", "DequantizeLinear"}
_SUMS = frozenset({"Add", "Sub", "Sum"})
_SAME_NUMBERS = frozenset({*MOVES, "Flatten", "Expand", "Slice", "Cast"})
_SCALED = frozenset({"Mul", "Div"})
_REDUCED = frozenset({"ReduceL1", "ReduceL2", "ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceProd"})
_REDUCED |= {"ReduceMax", "ReduceMin", "ReduceLogSum", "ReduceLogSumExp", "GlobalAveragePool"}
_ROUNDING = _MATMULS | _ROUNDED
_ORDERED = {"TopK": -1, "ArgMax": 0, "ArgMin": 0}  # with the axis by default
_QUANTIZED = frozenset(QUANTIZERS)  # their scales are in the precision, too
_COMPARED = frozenset({"Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Round", "Floor", "Ceil", "Sign"})
_COMPARED |= {"QuantizeLinear", "DynamicQuantizeLinear"}
_INTEGER_GEMMS = frozenset({"MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv"})
_FLOAT32_BITS = PRECISIONS["fp32"].significand_bits
_FP8_LEAST, _FP8_FRACTION = -6, 3  # the least exponent of E4M3, and the bits behind the point
_MOST_WIDE = 1 << 30  # bytes of all weights in FP64; beyond, those of GEMMs stay as they are stored
_LARGE = 1 << 20  # numbers of a weight
_MOST_KEPT = 1 << 28  # bytes of results inside that are kept
# Multiplications of a GEMM: from so many on BLAS has threads, from so many on batch elements have.
_LARGE_GEMM, _SMALL_GEMM = 1 << 27, 1 << 22


class StoredWeight(ir.LazyTensor):
    """A large weight of GEMMs in FP64, as it is stored: it becomes wide whenever it is used."""

    def __init__(self, content: ScaledConstant, name: str | None, *, dequantized: bool) -> None:
        shape = ir.Shape(content.numbers.shape)
        super().__init__(lambda: ir.tensor(self.wide()), ir.DataType.DOUBLE, shape, name=name)
        self._content, self.dequantized = content, dequantized

    def wide(self, bits: int | None = None) -> np.ndarray:
        """Its numbers in FP64, or the nearest ones with so many bits of significand."""
        return self._content.wide(None if bits is None else partial(nearest, bits=bits))

    def has_bits(self, bits: int) -> bool:
        """Whether all its numbers have at most so many bits of significand."""
        return self._content.is_kept_by(partial(nearest, bits=bits))


def upcast_operand(operand: Any) -> Any:
    """An operand in FP64 that may be a weight as it is stored."""
    return operand.wide() if isinstance(operand, StoredWeight) else operand


Inputs = tuple[Any, ...]
Compute = Callable[..., Any]
"""The outputs of a node, for its inputs one by one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FileNode:
    """A node of a file, and what is the same in all its runs."""

    name: str
    operator: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    evaluated: Any  # the node of ONNX's evaluator, with its attributes
    constants: Mapping[int, Any]  # inputs that are constants, by position
    dequantized: frozenset[int]  # those that were dequantized
    quantizes_softmax: bool
    is_inner: bool  # of a subgraph
    has_graphs: bool
    memory: dict[Any, Any] = field(default_factory=dict)


class FileRounding(RoundingMode):
    """How the nodes of a file are computed."""

    def __init__(
        self,
        precision: Precision | None = None,
        seed: int = 0,
        changes: Sequence[np.ndarray | None] = (),
        sign: int = 1,
    ) -> None:
        super().__init__(precision, seed, changes, sign)
        # No kernel computes in more than float32: there, what is fused is rounded as well.
        self._everywhere = precision is not None and precision.name == "fp32"
        self._written = set[str]()  # the floating-point values that come from rounded ones
        self._reduced = set[str]()  # those of them that come from a reduction
        self.flops = 0  # of the GEMMs
        self._on_grid = False

    @property
    def grid_flops(self) -> int:
        """The work of a file that rounds to a grid, once it was run; 0 of others."""
        return max(self.flops, 1) if self._on_grid else 0

    def call(self, node: FileNode, run: Compute, inputs: Inputs) -> Any:
        """The outputs of one node."""
        follows = not self._written.isdisjoint(node.inputs)
        if self._factor_bits is not None:
            inputs = self._with_factors(node, inputs, follows=follows)
        outputs = self._compute(node, run, inputs)
        if self._factor_bits is not None and (follows or node.operator in _ROUNDING):
            pairs = zip(node.outputs, outputs, strict=False)
            names = [name for name, each in pairs if getattr(each, "dtype", None) == np.float64]
            self._written.update(names)
            is_reduced = node.operator in _REDUCED or not self._reduced.isdisjoint(node.inputs)
            # The sum of a mean and an epsilon is one; that with what was not reduced is none.
            whole = node.operator in _SUMS and not (self._written & {*node.inputs}) <= self._reduced
            if follows and is_reduced and not whole and node.operator not in _ROUNDING:
                self._reduced.update(names)
        return outputs

    def _compute(self, node: FileNode, run: Compute, inputs: Inputs) -> Any:
        """The outputs of one node, rounded where kernels round."""
        operator, given = node.operator, inputs
        if operator in _MATMULS or operator in _QUANTIZED:
            inputs = tuple(self._operand(node, at, each) for at, each in enumerate(inputs))
        if operator in _ORDERED or operator in _COMPARED:
            return self._decide(node, run, inputs)
        if operator == "DequantizeLinear" and inputs[0].dtype == np.float64:  # softmax weights, or NaN in it
            return (_dequantized(inputs, getattr(node.evaluated, "axis", 1)),)
        if operator in _INTEGER_GEMMS and any(map(_has_nan, inputs)):
            # Which of its results depend on NaN is not worth a distinction.
            whole = run(*(np.zeros_like(x, np.int8) if _has_nan(x) else x for x in inputs))
            return tuple(np.full(np.shape(each), np.nan) for each in whole)
        if operator == "Attention":
            inputs = _fully_masked_alike(node, inputs)
        outputs = run(*inputs)
        if operator in _SUMS:
            outputs = tuple(map(_absorbed, outputs))
        if operator in _MATMULS:
            self.flops += _flops(node, inputs, outputs[0])
            return tuple(self.rounded_array(self._accumulate(node, given, inputs, each)) for each in outputs)
        written = operator in _ROUNDED or (self._everywhere and operator not in LAYOUT)
        if operator in _SUMS and not written:
            written = all(np.shape(each) == np.shape(outputs[0]) for each in inputs)
        return tuple(map(self.rounded_array, outputs)) if written else outputs

    def _operand(self, node: FileNode, at: int, array: Any) -> Any:
        """What a GEMM reads, rounded: constants once for all samples where every runtime has the same.

        Those are numbers of the precision, and weights that are dequantized, which go to the nearest ones.
        """
        if isinstance(array, StoredWeight):
            if self._bits is None:
                return array.wide()
            is_settled = self._is_settled(node, at, array)
            return array.wide(self._bits) if is_settled else self.rounded_array(array.wide())
        return node.memory[at, self._bits] if self._is_settled(node, at, array) else self.rounded_array(array)

    def _with_factors(self, node: FileNode, inputs: Inputs, *, follows: bool) -> Inputs:
        """The inputs of a node with its factors as this sample has them.

        They are constants, and results of reductions that scale several numbers each.
        """
        if node.operator in _WITH_FACTORS:
            return tuple(self._constant(node, at, each) if at else each for at, each in enumerate(inputs))
        if node.operator == "Expand" and node.inputs[0] in self._reduced:
            return (self.rounded_array(inputs[0]), *inputs[1:])
        if not follows or node.operator not in _SCALED:
            return inputs
        most = math.prod(np.broadcast_shapes(*map(np.shape, inputs)))

        def factor(at: int, array: Any) -> Any:
            if node.inputs[at] in self._written:  # a kernel of its own writes what was reduced
                is_whole = array.size == most or node.inputs[at] not in self._reduced
                return array if is_whole else self.rounded_array(array)
            return self._constant(node, at, array)

        return tuple(factor(at, each) for at, each in enumerate(inputs))

    def _constant(self, node: FileNode, at: int, array: Any) -> Any:
        """A factor that is constant, as this sample has it; others as they are."""
        if at not in node.constants or array is not node.constants[at] or array.dtype != np.float64:
            return array
        key = ("factor", at, self._factor_bits)
        if key not in node.memory:
            node.memory[key] = self.factor(array)
        return node.memory[key]

    def _is_settled(self, node: FileNode, at: int, array: Any) -> bool:
        """Whether an operand is a constant that is the same in all samples."""
        if self._bits is None or at not in node.constants or array is not node.constants[at]:
            return False  # the last: another one in place of the constant
        key = (at, self._bits)
        if key not in node.memory:
            if isinstance(array, StoredWeight):
                node.memory[key] = True if array.dequantized or array.has_bits(self._bits) else None
            else:
                near = nearest(array, self._bits)
                is_exact = array.dtype == np.float64 and np.array_equal(near, array)
                node.memory[key] = array if is_exact else near if at in node.dequantized else None
        return node.memory[key] is not None

    def _accumulate(self, node: FileNode, given: Inputs, inputs: Inputs, result: Any) -> Any:
        """The result of a GEMM with what its accumulation loses; `given` are its inputs before rounding."""
        if not self._accumulated or node.operator not in ("MatMul", "Gemm") or result.dtype != np.float64:
            return result
        a, b = _as_multiplied(node, inputs)
        if a.shape[-1] != b.shape[-2 if b.ndim > 1 else -1]:
            return result
        terms, key = a.shape[-1], ("squares", self._bits, a.shape[-1])
        sizes = node.memory.get(key) if self._is_settled(node, 1, given[1]) else None
        if sizes is None:
            sizes = np.square(b).mean(-2, keepdims=True) if b.ndim > 1 else np.square(b).mean()
            if self._is_settled(node, 1, given[1]):
                node.memory[key] = sizes
        walk = terms * np.square(a).mean(-1, keepdims=True) * sizes
        walk = walk if np.shape(walk) == result.shape else np.square(result)
        noise = ACCUMULATED * math.sqrt(terms) * self._accumulated * np.sqrt(np.square(result) / 3 + walk / 2)
        return result + noise * normal(result, self._seed)

    def _decide(self, node: FileNode, run: Compute, inputs: Inputs) -> Any:
        """A decision, whose operand is noted, and changed where that was requested."""
        operator, axis = node.operator, getattr(node.evaluated, "axis", None)
        operand, index = inputs[0], len(self.decisions)
        if not isinstance(operand, np.ndarray) or operand.dtype != np.float64:
            return run(*inputs)
        noted, unit = operand, np.ones(())
        if operator == "QuantizeLinear":
            self._on_grid = True
            unit = _along(inputs[1], operand, 1 if axis is None else axis)
            noted = operand / unit
            if self._bits is not None:  # kernels divide in float32, or multiply with a rounded reciprocal
                noted = rounded(noted, _FLOAT32_BITS, self._seed)
                operand = noted * unit
                if node.quantizes_softmax:
                    run = self._before_the_sum(run)
        outputs = run(operand, *inputs[1:])
        if operator in _COMPARED - {"QuantizeLinear"} and len(inputs) > 1:
            noted = operand - inputs[1]
        self.decisions.append(noted.copy() if noted.size <= DECISION_ELEMENTS else None)
        change = self._changes[index] if index < len(self._changes) else None
        if change is None or change.shape != noted.shape:
            return _with_nan(outputs, operand) if operator == "QuantizeLinear" else outputs
        moved = self._sign * MARGIN * change
        if operator == "QuantizeLinear":
            # What goes to another level in many samples is in them already.
            steps = 1.0 if outputs[0].dtype.kind in "iu" else _fp8_steps(noted)
            moved = np.where(np.abs(moved) > steps / 2, 0.0, moved)
        if operator in _ORDERED:  # neighbors in order go towards each other in this sample or its counterpart
            along = _ORDERED[operator] if axis is None else axis
            ranks = noted.argsort(along).argsort(along)
            moved = moved * (1 - 2 * (ranks % 2))
        others = run(operand + moved * unit, *inputs[1:])
        if operator == "TopK":  # other places, the same numbers
            others = (np.take_along_axis(operand, others[1], along), *others[1:])
        if not all(
            a.dtype == np.float64 or np.array_equal(a, b) for a, b in zip(outputs, others, strict=True)
        ):
            self.changed, outputs = True, others
        return _with_nan(outputs, operand) if operator == "QuantizeLinear" else outputs

    def _before_the_sum(self, run: Compute) -> Compute:
        """Quantizes the weights of a softmax to FP8 as a fused kernel may.

        The graph has weights that were divided by their sum; a kernel rounds them before that, relative to
        the largest so far. FP8 has as many digits everywhere, so either is as good, but other numbers come of
        it. Each row is rounded relative to a number from the one to the other, which is drawn.
        """

        def quantize(weights: np.ndarray, *others: Any) -> Any:
            largest = weights.max(-1, keepdims=True, initial=0.0)
            drawn = (hashed(np.ascontiguousarray(largest).view(np.int64), self._seed) & 0xFFFF) / 0xFFFF
            factor = np.where(largest > 0, largest, 1.0) ** -drawn
            (narrow,) = run(weights * factor, *others)
            is_integer = narrow.dtype.kind in "iu"  # fewer digits for small numbers
            return run(weights, *others) if is_integer else (narrow.astype(np.float64) / factor,)

        return quantize


def _absorbed(total: np.ndarray) -> np.ndarray:
    """A sum in FP64 with the numbers that float32 leaves of it where a mask absorbs a score."""
    if total.dtype != np.float64 or not (hidden := total <= ABSORBS_FLOAT32).any():
        return total
    return np.where(hidden, total.astype(np.float32), total)


def _fully_masked_alike(node: FileNode, inputs: Inputs) -> Inputs:
    """Attention with zeros for queries whose scores the mask absorbs: they attend to all such keys alike."""
    mask = inputs[3] if len(inputs) > 3 else None
    if mask is None or mask.dtype != np.float64 or not mask.size:
        return inputs
    best = mask.max(-1, keepdims=True)
    masked = absorbs_all_scores(best)
    if not masked.any():
        return inputs
    query = inputs[0]
    if query.ndim == 4:
        query = np.where(masked, 0.0, query)
    else:  # [batch, queries, heads · size]
        heads = query.reshape(*query.shape[:2], node.evaluated.q_num_heads, -1).swapaxes(1, 2)
        query = np.where(masked, 0.0, heads).swapaxes(1, 2).reshape(query.shape)
    return (query, *inputs[1:3], np.where(masked, mask - best, mask), *inputs[4:])


def _has_nan(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == np.float64 and bool(np.isnan(array).any())


def _with_nan(levels: Inputs, operand: np.ndarray) -> Inputs:
    """What was quantized, with NaN where that was: no integer is, and what has no result would get one."""
    lost = np.isnan(operand)
    return (np.where(lost, np.nan, levels[0].astype(np.float64)),) if lost.any() else levels


def _dequantized(inputs: Inputs, axis: int) -> np.ndarray:
    """Levels in FP64, dequantized."""
    levels, scale, *zero = inputs
    if zero and zero[0] is not None:
        levels = levels - _along(zero[0].astype(np.float64), levels, axis)
    return levels * _along(scale, levels, axis)


def _fp8_steps(numbers: np.ndarray) -> np.ndarray:
    """How far the neighbors of numbers are apart in FP8."""
    exponents = np.frexp(numbers)[1] - 1
    return np.ldexp(1.0, np.maximum(exponents, _FP8_LEAST) - _FP8_FRACTION)


def _along(scale: np.ndarray, operand: np.ndarray, axis: int) -> np.ndarray:
    """The scales of a quantization, of one number, one for each channel or one for each block."""
    if scale.size == 1:
        return scale.reshape(())
    if scale.ndim == 1:
        shape = [1] * operand.ndim
        shape[axis] = -1
        return scale.reshape(shape)
    block = -(-operand.shape[axis] // max(scale.shape[axis], 1))
    return np.repeat(scale, block, axis).take(np.arange(operand.shape[axis]), axis)


def _as_multiplied(node: FileNode, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """The operands of a MatMul or Gemm as it multiplies them."""
    a, b = (
        each.T if node.operator == "Gemm" and getattr(node.evaluated, name, False) else each
        for name, each in zip(("transA", "transB"), inputs[:2], strict=True)
    )
    return a, b


def _flops(node: FileNode, inputs: Inputs, result: np.ndarray) -> int:
    """The work of a GEMM, a convolution or an attention, from the sizes of its operands."""
    if node.operator in ("MatMul", "Gemm"):
        return 2 * result.size * _as_multiplied(node, inputs)[0].shape[-1]
    if node.operator == "Conv":
        return 2 * result.size * math.prod(inputs[1].shape[1:])
    if node.operator == "Attention":  # each query of each head meets each key twice
        past = inputs[4].shape[2] if len(inputs) > 4 and inputs[4] is not None else 0
        return 4 * result.size * (inputs[1].shape[-2] + past)
    return 2 * result.size


def _side_by_side(operator: str, run: Compute) -> Compute:
    """Computes a node; matmuls of stacks of matrices on all cores, batch elements side by side.

    Each GEMM is the same as without: BLAS has threads of its own only where a single one is large.
    """
    alone = on_one_thread(run)
    if operator not in ("MatMul", "Gemm", "Attention"):
        return alone

    def compute(*inputs: Any, **options: Any) -> Any:
        first, count = inputs[0], len(inputs[0]) if np.ndim(inputs[0]) > 2 else 1
        work = _work(operator, inputs)
        if operator != "Attention" and work >= count * _LARGE_GEMM:
            return run(*inputs, **options)
        if count == 1 or work < _SMALL_GEMM or (operator == "MatMul" and np.ndim(inputs[1]) > first.ndim):
            return alone(*inputs, **options)

        def of_batch(at: int, each: Any) -> bool:
            if operator == "Attention" and at == MASK:
                return np.ndim(each) == 4 and len(each) == count
            return operator == "Attention" or (np.ndim(each) == first.ndim and len(each) == count)

        split = [at for at, each in enumerate(inputs) if each is not None and of_batch(at, each)]

        def part(rows: slice) -> Any:
            with np.errstate(all="ignore"):  # which is that of a thread
                return run(*(x[rows] if at in split else x for at, x in enumerate(inputs)), **options)

        parts = on_one_thread(side_by_side)(part, count)
        return tuple(None if x[0] is None else np.concatenate(x) for x in zip(*parts, strict=True))

    return compute


def _work(operator: str, inputs: Inputs) -> int:
    """How many numbers are multiplied in a matmul, or in the first of an attention."""
    a, b = inputs[:2]
    columns = {"MatMul": -1, "Gemm": -1, "Attention": -2}[operator]
    return int(a.size * (b.shape[columns] if b.ndim > 1 else 1))


Results = Mapping[FileNode, Any]
"""What nodes gave in an exact run."""


class ExactMode(FileRounding):
    """Computes a graph in FP64, and keeps the results of its nodes as far as memory allows."""

    def __init__(self, most: int = _MOST_KEPT) -> None:
        super().__init__(None)
        self.results: dict[FileNode, Any] = {}
        self._left = most

    def call(self, node: FileNode, run: Compute, inputs: Inputs) -> Any:
        """The outputs of one node."""
        outputs = super().call(node, run, inputs)
        self._left -= sum(each.nbytes for each in outputs if isinstance(each, np.ndarray))
        if self._left >= 0 and not node.has_graphs and not node.is_inner:
            self.results[node] = outputs
        return outputs


class ChangedMode(FileRounding):
    """Computes a graph with changes of some of its nodes; what does not depend on these stays as it was.

    `changed` gives for a node how it is computed instead, from what computes it and its inputs; None for one
    that is not changed.
    """

    def __init__(
        self,
        changed: Callable[[FileNode], Callable[[Compute, Inputs], Any] | None],
        precision: Precision | None = None,
        seed: int = 0,
        results: Results = MappingProxyType({}),
    ) -> None:
        super().__init__(precision, seed)
        self._changed, self._results, self._other = changed, results, set[str]()

    def call(self, node: FileNode, run: Compute, inputs: Inputs) -> Any:
        """The outputs of one node."""
        change = self._changed(node)
        if change is None and node in self._results and self._other.isdisjoint(node.inputs):
            return self._results[node]
        self._other.update(filter(None, node.outputs))
        compute = super().call
        if change is None:
            return compute(node, run, inputs)
        return change(lambda *given: compute(node, run, given), inputs)


def _fold_weights(model: ir.Model, stays: bool) -> set[str]:
    """Dequantize the weights of a graph in FP64, which is changed; their names.

    Large ones of GEMMs stay as they are stored where that is requested.
    """
    found = set[str]()
    for node in [node for node in model.graph if node.op_type == "DequantizeLinear"]:
        content, old = scaled_constant(node), node.outputs[0]
        if content is not None and not old.is_graph_output():
            name = f"{old.name}/folded"
            if stays and _is_large(old, content.numbers.shape):
                tensor: ir.TensorProtocol = StoredWeight(content, name, dequantized=True)
            else:
                tensor = ir.tensor(content.wide(), name=name)
            folded = ir.val(name, const_value=tensor)
            model.graph.register_initializer(folded)
            old.replace_all_uses_with(folded)
            model.graph.remove(node, safe=True)
            found.add(name)
    RemoveUnusedNodesPass()(model)  # what they were dequantized from
    return found


def _is_large(value: ir.Value, shape: Sequence[Any]) -> bool:
    """Whether a value is a large weight, of GEMMs alone."""
    users = [use.node for use in value.uses()]
    is_weight = len(shape) == 2 and math.prod(shape) >= _LARGE and not value.is_graph_output()
    return is_weight and all(is_op(each, "MatMul", "Gemm") and each.graph is value.graph for each in users)


def _as_stored(model: ir.Model) -> ir.Model:
    """A copy whose large weights of GEMMs are FP64 and stay as they are stored."""
    copy = model.clone()
    for value in copy.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype in FLOATS and _is_large(value, tensor.shape.numpy()):
            content = ScaledConstant(tensor.numpy())
            value.const_value = StoredWeight(content, value.name, dequantized=False)
            value.type = ir.TensorType(ir.DataType.DOUBLE)
    return copy


class FileProgram:
    """Evaluates an ONNX file in FP64, node by node; `keep` are further values of it that are wanted.

    Where its weights take gigabytes in FP64, the large ones become wide when they are used.
    """

    def __init__(self, model: ir.Model, keep: Sequence[str] = ()) -> None:
        weights = [each.const_value for each in model.graph.initializers.values()]
        stays = 8 * sum(each.size for each in weights if each is not None) > _MOST_WIDE
        wide = in_float64(_as_stored(model) if stays else model)
        self._title = f"graph {model.graph.name or 'without a name'}"
        self._dequantized = _fold_weights(wide, stays)
        held = {name: each.const_value for name, each in wide.graph.initializers.items()}
        stored = {name: each for name, each in held.items() if isinstance(each, StoredWeight)}
        self._evaluator = evaluator_of(with_outputs(wide, keep) if keep else wide, stored)
        self._names = [str(value.name) for value in model.graph.outputs]
        self._names += [name for name in keep if name not in self._names]
        self._mode = FileRounding()
        self._weights: set[str] = set()  # of softmaxes, by name
        self._inputs = {str(value.name) for value in model.graph.inputs}
        self._same_numbers: dict[str, str] = {}  # the value that another one has the numbers of
        self._sample = ""
        for node in self._evaluator.rt_nodes_:
            self._follow(node)

    def _follow(self, node: Any, *, is_inner: bool = False) -> None:
        """Let a node of the evaluator, and those of its subgraphs, be computed by the mode."""
        operator, inputs, outputs = node.op_type, tuple(node.onnx_node.input), tuple(node.onnx_node.output)
        fixed = self._evaluator.rt_inits_
        if operator in _SAME_NUMBERS:
            self._same_numbers[outputs[0]] = inputs[0]
        self._weights.update(outputs[:1] if operator == "Softmax" else ())
        self._weights.update(outputs[QK_OUTPUT:] if operator == "Attention" else ())
        inside = [each.name for each in node.onnx_node.attribute if each.type == onnx.AttributeProto.GRAPH]
        known = FileNode(
            name=node.onnx_node.name,
            operator=operator,
            inputs=inputs,
            outputs=outputs,
            evaluated=node,
            constants={at: fixed[name] for at, name in enumerate(inputs) if name in fixed},
            dequantized=frozenset(at for at, name in enumerate(inputs) if name in self._dequantized),
            quantizes_softmax=operator == "QuantizeLinear" and inputs[0] in self._weights,
            is_inner=is_inner,
            has_graphs=bool(inside),
        )
        for name in inside:
            for inner in getattr(node, name).rt_nodes_:
                self._follow(inner, is_inner=True)

        compute = _side_by_side(operator, node.run)

        def run(*inputs: Any, **options: Any) -> Any:
            try:
                return self._mode.call(known, lambda *given: compute(*given, **options), inputs)
            except IndexError as error:
                if operator != "Gather":
                    raise
                raise self._beyond_table(known, inputs) from error

        node.run = run

    def _beyond_table(self, node: FileNode, inputs: Inputs) -> DeployError:
        """An index beyond the table that a Gather reads, with the input that it comes from."""
        rows = int(inputs[0].shape[getattr(node.evaluated, "axis", 0)])
        most, least = int(inputs[1].max()), int(inputs[1].min())
        name = node.inputs[1]
        while name not in self._inputs and name in self._same_numbers:
            name = self._same_numbers[name]
        what, place = f"An index of node {node.name} is beyond its table.", f"node {node.name}"
        hint = f"if an axis is counted there, a range that ends with the table: --axis NAME=1:1:{rows}"
        if name in self._inputs:
            what, place = f"Input {name} has numbers beyond the table that it indexes.", f"input {name}"
            hint = f"numbers from 0 to {rows - 1}"
        place = f"{self._sample}: {place}" if self._sample else place
        got = f"{place} has {most if most >= rows else least}; the table has {rows} rows"
        return DeployError(what, got=got, hint=hint)

    def run(
        self, feeds: Arrays, mode: FileRounding | None = None, *, sample: str = ""
    ) -> dict[str, np.ndarray]:
        """The outputs, and the values that are kept, by name; floats in FP64, exact without a mode.

        `sample` is what errors call the inputs.
        """
        self._mode, self._sample = mode or FileRounding(), sample
        wide = {name: x if x.dtype.kind in "iub" else x.astype(np.float64) for name, x in feeds.items()}
        # A fully masked query is NaN before it becomes zero, which is no warning for anybody.
        with graph_code(self._title), np.errstate(all="ignore"):
            results = self._evaluator.run(self._names, wide)
        return dict(zip(self._names, map(np.asarray, results), strict=True))
