"""What is known of the values of a graph: constants, shapes, sources; and the records of a fusion."""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.version_converter
import onnx_ir as ir

from mha_deploy.bundle.manifest import GENERATED
from mha_deploy.errors import DeployError
from mha_deploy.graph.ir import input_at, is_op, made_by

# -- What is known of a value: its numbers, its sizes ----------------------------------------------

# Over arrays of one number, in their own type; the result of Pow has the type of the base.
_SCALAR_OPS: dict[str, Callable[..., np.ndarray | None]] = {
    "Sqrt": np.sqrt,
    "Reciprocal": lambda x: np.ones_like(x) / x,
    "Neg": np.negative,
    "Mul": np.multiply,
    "Div": lambda x, y: _divided(x, y),
    "Pow": lambda x, y: np.power(x.astype(np.float64), y.astype(np.float64)).astype(x.dtype),
}
_SAME_SCALAR = frozenset({"Identity", "Expand", "Reshape", "Squeeze", "Unsqueeze"})
Size = int | str | None
"""A number, a product of names such as `4*B*S`, or None where it is not known."""
FACTORS = re.compile(r"[\w.]+(\*[\w.]+)*")
_MAX_DEPTH = 64  # more than any constant needs; bounds the walk in a hostile file


def array_of(value: ir.Value | None) -> np.ndarray | None:
    """The numbers of a constant; None for anything that is computed or given."""
    tensor = tensor_of(value)
    return None if tensor is None else tensor.numpy()


def tensor_of(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of a constant, its numbers not read yet; None for anything that is computed or given."""
    return None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)


def scalar_of(value: ir.Value | None) -> float | None:
    """The one number that a tensor holds everywhere, where that follows from constants alone.

    It is computed in the types of the graph: 7 / 2 is 3 in integers, -1e9 is -inf in float16. NaN is None.
    """
    with np.errstate(all="ignore"):
        found = _scalar(value, 0)
        number = math.nan if found is None else float(found)
    return None if math.isnan(number) else number


def _scalar(value: ir.Value | None, depth: int) -> np.ndarray | None:
    """The number as an array without axes, in the type of the value."""
    tensor = tensor_of(value)
    if tensor is not None:
        known = tensor.size == 1 and tensor.dtype != ir.DataType.STRING
        return tensor.numpy().reshape(()) if known else None
    node = value.producer() if value is not None else None
    if node is None or node.domain != "" or depth > _MAX_DEPTH:
        return None
    if node.op_type in _SAME_SCALAR:
        return _scalar(node.inputs[0], depth + 1)
    if node.op_type == "Gather":
        return _size_read(node)
    if node.op_type == "Cast":
        return _cast(_scalar(node.inputs[0], depth + 1), ir.DataType(node.attributes.get_int("to", 0)))
    if node.op_type not in _SCALAR_OPS:
        return None
    numbers = [_scalar(each, depth + 1) for each in node.inputs]
    try:
        return None if any(each is None for each in numbers) else _SCALAR_OPS[node.op_type](*numbers)
    except (ArithmeticError, TypeError, ValueError):
        return None


def _size_read(node: ir.Node) -> np.ndarray | None:
    """The fixed size that `Gather(Shape(x), axis)` reads."""
    shape, at = made_by(node.inputs[0], "Shape"), ints_of(node.inputs[1])
    dims = sizes_of(input_at(shape, 0))
    if (
        shape is None
        or dims is None
        or at is None
        or len(at) != 1
        or set(shape.attributes) & {"start", "end"}
    ):
        return None
    size = dims[at[0]] if -len(dims) <= at[0] < len(dims) else None
    return np.asarray(size, np.int64) if isinstance(size, int) else None


def _cast(number: np.ndarray | None, to: ir.DataType) -> np.ndarray | None:
    if number is None or to in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        return None
    if to.is_integer():
        # What becomes of numbers beyond the type differs between runtimes.
        info = ml_dtypes.iinfo(to.numpy())
        if not int(info.min) <= float(number) <= int(info.max):
            return None
    return number.astype(to.numpy())


def _divided(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    if x.dtype.kind not in "iu":
        return np.divide(x, y)
    if not y:
        return None
    quotient = abs(int(x)) // abs(int(y))  # ONNX rounds towards zero, Python downwards
    return np.asarray(quotient if (int(x) < 0) == (int(y) < 0) else -quotient, x.dtype)


def ints_of(value: ir.Value | None) -> list[int] | None:
    """The integers of a constant, such as axes."""
    array = array_of(value)
    return None if array is None else [int(each) for each in array.ravel()]


def sizes_of(value: ir.Value | None) -> list[Size] | None:
    """The sizes of a value; None where its number of axes is not known."""
    if value is None or value.shape is None:
        return None
    return [each if isinstance(each, int) else _plain(each.value) for each in value.shape]


@functools.lru_cache(maxsize=4096)
def _plain(size: str | None) -> int | str | None:
    """A size as a product of names, where it is one: exporters write `(S**2)//S`."""
    if size is None or FACTORS.fullmatch(size):
        return size
    try:
        simple = ir.SymbolicDim(size).simplify().value
    except (ArithmeticError, AttributeError, SyntaxError, TypeError, ValueError):
        return size
    return size if simple is None else int(simple) if simple.isdigit() else simple


def dtype_of(value: ir.Value) -> ir.DataType:
    """The type of a value; float32 where the file does not say."""
    return value.dtype or ir.DataType.FLOAT


def holds(wide: ir.DataType | None, narrow: ir.DataType | None) -> bool:
    """Whether a cast from one floating-point type to another keeps every value."""
    if wide is None or narrow is None or not (wide.is_floating_point() and narrow.is_floating_point()):
        return False
    outer, inner = (ml_dtypes.finfo(each.numpy()) for each in (wide, narrow))
    return bool(
        outer.nmant >= inner.nmant
        and float(outer.max) >= float(inner.max)
        and float(outer.smallest_subnormal) <= float(inner.smallest_subnormal)
    )


def same_dim(first: Size, second: Size) -> bool:
    """Whether two dimensions are certainly equal: the same number or the same name."""
    return first is not None and first == second


def same_dims(first: Sequence[Size], second: Sequence[Size]) -> bool:
    """Whether two shapes are certainly equal."""
    return len(first) == len(second) and all(map(same_dim, first, second))


def same_or_cut(dim: Size, size: Size) -> bool:
    """Whether a dimension is certainly a size, wherever the file does not fail.

    A buffer of N rows, cut to S, has min(N, S) of them, and the exporter says so. Beyond N the file fails.
    """
    if same_dim(dim, size):
        return True
    name = re.escape(str(size))
    found = re.fullmatch(rf"Min\((?:(\d+), {name}|{name}, (\d+))\)", str(dim))
    return found is not None and int(found[1] or found[2]) > 1  # a single row would be broadcast


def perm_of(node: ir.Node) -> list[int]:
    """The permutation of a Transpose; without one, the axes are reversed."""
    perm = node.attributes.get_ints("perm")
    dims = sizes_of(node.inputs[0]) if node.inputs[0] is not None else None
    return list(perm) if perm is not None else list(reversed(range(len(dims or ()))))


def adds_leading_ones(node: ir.Node) -> bool:
    """Whether a node only puts axes of size 1 in front, which broadcasting would do as well."""
    source = node.inputs[0] if is_op(node, "Unsqueeze", "Reshape") else None
    before, after = sizes_of(source), sizes_of(node.outputs[0])
    if before is None or after is None or len(after) < len(before):
        return False
    more = len(after) - len(before)
    return all(size == 1 for size in after[:more]) and same_dims(after[more:], before)


# -- What a fusion found ---------------------------------------------------------------------------


class NotFused(DeployError):
    """Why a softmax and its two matmuls stay as they are."""


class NotExpressible(NotFused):
    """The attention is recognised, and ONNX's `Attention` cannot express it."""


class NoScores(NotFused):
    """No matmul of two computed tensors stands before the softmax."""


@dataclass(frozen=True, kw_only=True)
class FusedAttention:
    """One attention that is now one `Attention` node.

    Args:
        name: Name of the new node: the module it came from where the file says, else its softmax.
        place: Source file and line, where the file says.
        Hq: Query heads; 1 where the heads are part of the batch.
        Hkv: Key/value heads.
        D: Head size of queries and keys.
        scale: Factor on the scores, gathered from wherever it stood.
        mask: `none`, `bool` or `float`.
        causal: Whether the triangle became the attribute `is_causal`.
        softcap: Bound of the scores; 0 for none.
        weights: Whether the weights are an output as well, since the file uses them elsewhere.
        notes: What differs from the file, and where.
        verified: Whether it was compared with the original nodes on drawn inputs.
    """

    name: str
    place: str | None
    Hq: int
    Hkv: int
    D: Size
    scale: float
    mask: str
    causal: bool
    softcap: float = 0.0
    weights: bool = False
    notes: tuple[str, ...] = ()
    verified: bool = False


@dataclass(frozen=True, kw_only=True)
class UnfusedSoftmax:
    """A normalisation between two matmuls that was left as it is.

    Args:
        name: The module it came from, else the softmax node.
        place: Source file and line, where the file says.
        reason: Why it is not fused.
        recognised: Whether it was recognised, and ONNX's `Attention` cannot express it.
    """

    name: str
    place: str | None
    reason: str
    recognised: bool = False


@dataclass(frozen=True, kw_only=True)
class Repair:
    """A node of the exporter's that was brought into the canonical form.

    Args:
        name: Name of the node in the new model.
        changes: What was changed, in words.
    """

    name: str
    changes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FuseReport:
    """What became of every candidate of a graph.

    Args:
        fused: Attentions that are one node now.
        unfused: Candidates that are as they were.
        already: Names, in the new model, of the `Attention` nodes that were there before.
        repairs: What was changed about those, and about nodes around them.
        layers: Names of all `Attention` nodes of the new model in the order of execution.
    """

    fused: tuple[FusedAttention, ...]
    unfused: tuple[UnfusedSoftmax, ...]
    already: tuple[str, ...] = ()
    repairs: tuple[Repair, ...] = ()
    layers: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every candidate was fused."""
        return not self.unfused

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data for JSON."""
        return {"complete": self.complete, **asdict(self)}


# -- Where a node came from, as PyTorch's exporter wrote it down -----------------------------------

_SCOPES = "pkg.torch.onnx.name_scopes"
_TRACE = "pkg.torch.onnx.stack_trace"
_FX_NODE = "pkg.torch.onnx.fx_node"
_SOFTMAX_TYPE = re.compile(r"aten\.softmax\.int\]\(.*\btorch\.(float16|bfloat16|float32|float64)\b")
_TYPES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
_TYPES |= {"float32": ir.DataType.FLOAT, "float64": ir.DataType.DOUBLE}
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')


def module_of(node: ir.Node) -> str:
    """The module that holds a node, such as `layers.0.attn`; the node's own name where nobody says."""
    try:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
    except (ValueError, SyntaxError):
        scopes = []
    # The last scope is the operator.
    module = str(scopes[-2]) if isinstance(scopes, list) and len(scopes) > 1 else ""
    return module or node.name or node.outputs[0].name or node.op_type


def place_of(node: ir.Node) -> str | None:
    """The source line of a node as `file:line`: the innermost frame outside PyTorch that is written down."""
    frames = _FRAME.findall(node.metadata_props.get(_TRACE, ""))
    own = [frame for frame in frames if "/site-packages/torch/" not in frame[0].replace("\\", "/")]
    return ":".join((own or frames)[-1]) if frames else None


def softmax_type_of(node: ir.Node) -> ir.DataType | None:
    """The type that a softmax was asked for, as in `softmax(x, -1, dtype=torch.float32)`.

    The exporter writes such a softmax in the type of its input and casts the result, then drops the casts.
    """
    found = _SOFTMAX_TYPE.search(node.metadata_props.get(_FX_NODE, ""))
    return None if found is None else _TYPES[found.group(1)]


# -- Take a model up to the opset that has `Attention` ---------------------------------------------

ATTENTION_OPSET = 23
_OLDEST, _CONVERTED_TO = 13, 18
# The same node means something else since this version.
_CHANGED_SINCE = {"DFT": 20, "GroupNormalization": 21}
# Other names of the same modes since opset 20.
_GRID_MODES = {"bilinear": "linear", "bicubic": "cubic"}


def from_old_opset(model: ir.Model) -> ir.Model:
    """A model of opset 13 to 17 in opset 18, through ONNX's version converter; newer ones as they are.

    Raises:
        DeployError: The opset is older, or the converter fails.
    """
    current = model.opset_imports.get("", 1)
    if current >= _CONVERTED_TO:
        return model
    if current < _OLDEST:
        raise DeployError(
            f"The graph is older than opset {_OLDEST}.", got=f"opset {current}", hint="export it again"
        )
    for value in model.graph.initializers.values():
        if isinstance(tensor := value.const_value, ir.ExternalTensor) and tensor.nbytes <= _SMALL:
            value.const_value = ir.Tensor(tensor.numpy().copy(), tensor.dtype, name=tensor.name)
    # The converter takes no more than 2 GiB and knows no folder of external data: large weights stay outside.
    kept = {
        name: value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and value.const_value.nbytes > _SMALL
    }
    inputs = list(model.graph.inputs)
    try:
        for name, value in kept.items():
            del model.graph.initializers[name]
            if value not in inputs:
                model.graph.inputs.append(value)
        proto = onnx.version_converter.convert_version(ir.to_proto(model), _CONVERTED_TO)
    except Exception as error:  # the converter raises RuntimeError and protobuf's own types
        raise DeployError(
            f"The graph cannot be converted to opset {_CONVERTED_TO}.",
            got=f"opset {current}: {error}",
            hint="export it again with a newer opset",
        ) from error
    finally:
        for value in kept.values():
            if value not in inputs:
                model.graph.inputs.remove(value)
            model.graph.register_initializer(value)
    new = ir.from_proto(proto)
    for value in list(new.graph.inputs):
        old = kept.get(str(value.name))
        if old is not None:
            value.const_value = old.const_value
            if old not in inputs:
                new.graph.inputs.remove(value)
            new.graph.register_initializer(value)
    new.metadata_props.update(model.metadata_props)
    known = {value.name: value.shape for node in model.graph.all_nodes() for value in node.outputs}
    for node in new.graph.all_nodes():
        for value in node.outputs:
            if value.is_graph_output():
                continue
            shape = known.get(value.name)
            if shape is not None and not any(_is_made_up(size) for size in shape):
                value.shape = shape
            elif value.shape is not None:  # the converter gives every size that it does not know a new name
                value.shape = ir.Shape([None if _is_made_up(size) else size for size in value.shape])
    return new


def _is_made_up(size: int | ir.SymbolicDim) -> bool:
    """Whether a size is unknown, or has a name that shape inference gave it."""
    return not isinstance(size, int) and (size.value is None or size.value.startswith(GENERATED))


_SMALL = 1024  # bytes


def raise_opset(model: ir.Model) -> ir.Model:
    """Declare opset 23 for a model of opset 18 to 22, where its nodes mean the same there.

    Raises:
        DeployError: A node has another meaning in the newer one.
    """
    current = model.opset_imports.get("", 1)
    if current >= ATTENTION_OPSET:
        return model
    for node in model.graph.all_nodes():
        if node.domain == "" and current < _CHANGED_SINCE.get(node.op_type, 0):
            raise DeployError(
                f"{node.op_type} means something else in opset {ATTENTION_OPSET}.",
                got=node.name,
                hint=f"export the module at opset {ATTENTION_OPSET}",
            )
        if is_op(node, "GridSample") and current < 20:
            mode = node.attributes.get_string("mode", "bilinear") or "bilinear"
            node.attributes.add(ir.AttrString("mode", _GRID_MODES.get(mode, mode)))
        node.version = None
    model.graph.opset_imports[""] = ATTENTION_OPSET
    needed = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", ATTENTION_OPSET)], True)
    model.ir_version = max(model.ir_version, needed)
    return model
