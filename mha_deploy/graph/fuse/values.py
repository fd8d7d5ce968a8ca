"""What is known of the values of a graph: constants, where a node came from, and symbolic sizes.

ONNX's shape inference gives up at `Reshape(x, Concat(Gather(Shape(x), 0), ...))` with a varying batch. Here a
size is a number or a product of names, and the contents of small integer tensors are followed as sizes.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple, TypeVar, cast

import numpy as np
import onnx
import onnx.version_converter
import onnx_ir as ir

from mha_deploy.bundle.manifest import GENERATED
from mha_deploy.errors import DeployError
from mha_deploy.graph.ir import (
    INTEGERS,
    LIKE_FIRST,
    LIKE_IT,
    OTHER_WIDTH,
    constant,
    constant_ints,
    dims,
    graph_of_node,
    graphs_in,
    infer_shapes,
    inner_graphs,
    input_at,
    is_op,
    is_random,
    is_tensor,
    light_proto,
    made_by,
    node_name,
    nodes_behind,
    nodes_in,
    perm,
    rank,
    reference_evaluator,
    same_size,
    with_weights_of,
)
from mha_deploy.graph.roles import IN_ORDER, ORT_DOMAIN, RANDOM
from mha_deploy.graph.valid import OLDEST_OPSET


class NotFused(DeployError):
    """Why a softmax and its two matmuls stay as they are."""

    usual_hint = "`mha-deploy fuse` lists what is not fused, and why"


class NotExpressible(NotFused):
    """The attention is recognized, and ONNX's `Attention` cannot express it, with heads of a fixed size."""


class NoScores(NotFused):
    """No matmul of two computed tensors stands before the softmax."""


def in_words(error: Exception) -> str:
    """An exception of another library in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


_T = TypeVar("_T")
_MAX_DEPTH = 32  # more than any constant or mask needs; bounds the walk in a hostile file


def walk(function: Callable[[ir.Value, int], _T]) -> Callable[..., _T | None]:
    """Remember what a recursive walk back from a value found, as long as it lasts.

    A value may be reached on exponentially many paths: `x + x` twenty times has a million.
    """
    known = dict[tuple[ir.Value, int], tuple[_T]]()

    @functools.wraps(function)
    def remembered(value: ir.Value | None, depth: int = 0) -> _T | None:
        if value is None or depth > _MAX_DEPTH:
            return None
        try:
            found = known.get((value, depth)) or (function(value, depth),)
            known[value, depth] = found
            return found[0]
        finally:
            if depth == 0:
                known.clear()

    return remembered


# -- The numbers of constants ----------------------------------------------------------------------

# Over arrays of one number, in their own type; the result of Pow has the type of the base.
_SCALAR_OPS: dict[str, Callable[..., np.ndarray]] = {
    "Sqrt": np.sqrt,
    "Reciprocal": lambda x: np.ones_like(x) / x,
    "Neg": np.negative,
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    # ONNX rounds a quotient of integers towards zero.
    "Div": lambda x, y: (
        np.asarray(math.trunc(Fraction(int(x), int(y))), x.dtype) if x.dtype.kind in "iu" else np.divide(x, y)
    ),
    "Pow": lambda x, y: np.power(x.astype(np.float64), y.astype(np.float64)).astype(x.dtype),
}
_SAME_SCALAR = frozenset({*IN_ORDER, "Expand"})
_COMPUTED = frozenset({*_SAME_SCALAR, *_SCALAR_OPS, "Cast", "CastLike"})
_FOLLOWED = _COMPUTED | {"Constant", "ConstantOfShape", "Gather", "Slice"}
_MOST_EQUAL = 2**20  # numbers of a constant that are compared with each other


def array_of(value: ir.Value | None) -> np.ndarray | None:
    """The numbers of a constant; None for anything that is computed or given."""
    tensor = constant(value)
    return None if tensor is None else tensor.numpy()


_MOST_FOLDED, _FOLDED_OPSET = 64, 18


def folded(
    value: ir.Value | None,
    known: Mapping[ir.Value, np.ndarray] = MappingProxyType({}),
    opset: int = _FOLDED_OPSET,
) -> np.ndarray | None:
    """The numbers of a value that follow from constants, and from known ones, alone; None for any other."""
    behind = nodes_behind([value], lambda node: [each for each in node.inputs if each not in known])
    nodes = list(itertools.islice(behind, _MOST_FOLDED + 1))
    if value is None or len(nodes) > _MOST_FOLDED:
        return None
    if any(each.domain or inner_graphs(each) or is_random(each) for each in nodes):
        return None
    made = {each for node in nodes for each in node.outputs}
    given = {each for node in nodes for each in node.inputs if each is not None and each not in made}
    tensors = {str(each.name): known[each] if each in known else array_of(each) for each in given}
    if any(each is None for each in tensors.values()):
        return None
    graph = onnx.GraphProto(name="constants", output=[onnx.ValueInfoProto(name=str(value.name))])
    graph.initializer.extend(
        onnx.numpy_helper.from_array(each, name) for name, each in tensors.items() if each is not None
    )
    there, pending = set(tensors), nodes
    while pending:  # the nodes behind a value come in any order
        ready = [node for node in pending if there.issuperset(str(each.name) for each in node.inputs if each)]
        if not ready:
            return None
        graph.node.extend(ir.to_proto(node) for node in ready)
        there.update(str(each.name) for node in ready for each in node.outputs)
        pending = [node for node in pending if node not in ready]
    opsets = [onnx.helper.make_opsetid("", opset)]
    try:
        found = reference_evaluator(onnx.helper.make_model(graph, opset_imports=opsets)).run(None, {})
    except (KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):  # as the evaluator has it
        return None
    return np.asarray(cast("list[np.ndarray]", found)[0])


def scalar_of(value: ir.Value | None) -> float | None:
    """The one number that a tensor holds everywhere, where that follows from constants alone.

    It is computed in the types of the graph: 7 / 2 is 3 in integers, -1e9 is -inf in float16. NaN is None.
    """
    with np.errstate(all="ignore"):
        try:
            found = _scalar(value)
        except (ArithmeticError, TypeError, ValueError):
            return None
        number = math.nan if found is None else float(found)
    return None if math.isnan(number) else number


@walk
def _scalar(value: ir.Value, depth: int) -> np.ndarray | None:
    """The number as an array without axes, in the type of the value."""
    tensor = constant(value)
    if tensor is not None:
        if tensor.size == 1:
            return None if tensor.dtype == ir.DataType.STRING else tensor.numpy().reshape(())
        if not 0 < tensor.size <= _MOST_EQUAL or not tensor.dtype.is_floating_point():
            return None
        array = tensor.numpy().ravel()
        # The last one tells most others apart.
        return array[0].reshape(()) if array[0] == array[-1] and (array == array[0]).all() else None
    node = value.producer()
    if node is None or node.domain != "":
        return None
    if node.op_type == "ConstantOfShape":
        fill = node.attributes.get("value")
        return np.zeros((), np.float32) if fill is None else fill.as_tensor().numpy().reshape(())
    if node.op_type in ("Gather", "Slice"):  # of `Shape(x)`: a fixed size
        shape, at = made_by(node.inputs[0], "Shape"), constant_ints(node, 1)
        whole = shape is not None and not set(shape.attributes) & {"start", "end"}
        dims = (sizes_of(input_at(shape, 0)) if whole else None) or []
        part: list[int | str | None] = []
        if node.op_type == "Slice" and at and len(at) == 1 and (end := constant_ints(node, 2)) is not None:
            steps = [1] if input_at(node, 4) is None else constant_ints(node, 4)
            part = list(dims[at[0] : end[0]]) if steps == [1] else []
        elif node.op_type == "Gather" and at and len(at) == 1 and -len(dims) <= at[0] < len(dims):
            part = [dims[at[0]]]
        return np.asarray(part[0], np.int64) if len(part) == 1 and isinstance(part[0], int) else None
    given = node.inputs if node.op_type in _SCALAR_OPS else node.inputs[:1]
    makers = [made for each in given if each and each.const_value is None and (made := each.producer())]
    # Before any walk: residuals are long chains.
    if node.op_type not in _COMPUTED or any(made.op_type not in _FOLLOWED for made in makers):
        return None
    numbers = [number for each in given if (number := _scalar(each, depth + 1)) is not None]
    if len(numbers) < len(given):
        return None
    if node.op_type in ("Cast", "CastLike"):
        to = value.dtype or ir.DataType(node.attributes.get_int("to", 0))
        if to in (ir.DataType.STRING, ir.DataType.UNDEFINED):
            return None
        # What becomes of numbers beyond the type differs between runtimes.
        beyond = to.is_integer() and not int(to.min) <= float(numbers[0]) <= int(to.max)
        return None if beyond else numbers[0].astype(to.numpy())
    return _SCALAR_OPS[node.op_type](*numbers) if node.op_type in _SCALAR_OPS else numbers[0]


def inverse_of(value: ir.Value | None) -> ir.Node | None:
    """The node that takes one over its first input."""
    power = made_by(value, "Pow")
    return power if power is not None and scalar_of(power.inputs[1]) == -1.0 else made_by(value, "Reciprocal")


def holds(wide: ir.DataType | None, narrow: ir.DataType | None) -> bool:
    """Whether a cast from one floating-point type to another keeps every value."""
    floats = [each for each in (wide, narrow) if each is not None and each.is_floating_point()]
    return len(floats) == 2 and np.can_cast(floats[1].numpy(), floats[0].numpy())


# -- Where a node came from, as PyTorch's exporter wrote it down -----------------------------------

_SOFTMAX_TYPE = re.compile(r"aten\.softmax\.int\]\(.*\btorch\.(float16|bfloat16|float32|float64)\b")
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')


_SCOPES, _TRACE = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.stack_trace"


def note_place(node: ir.Node, others: Iterable[ir.Node]) -> None:
    """Let other nodes, which are written for a node, say where it came from."""
    found = {key: node.metadata_props[key] for key in (_SCOPES, _TRACE) if key in node.metadata_props}
    for other in others:
        other.metadata_props.update(found)


def module_of(node: ir.Node) -> str:
    """The module that holds a node, such as `layers.0.attn`; the node's own name where that is not known."""
    try:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
    except (ValueError, SyntaxError):
        scopes = []
    # The last scope is the operator.
    module = str(scopes[-2]) if isinstance(scopes, list) and len(scopes) > 1 else ""
    return module or node.name or node.outputs[0].name or node.op_type


def name_gemms(model: ir.Model) -> None:
    """Name GEMMs with weights after their modules, as `layers.0.mlp.up.matmul`, not by running numbers."""
    taken = {str(node.name) for node in model.graph}
    for node in model.graph:
        weighted = is_op(node, "MatMul", "Gemm") and any(constant(each) is not None for each in node.inputs)
        if weighted and (module := module_of(node)) != node.name:
            names = (f"{module}.matmul{f'_{number}' if number else ''}" for number in itertools.count())
            node.name = next(name for name in names if name not in taken)
            taken.add(node.name)


def place_of(node: ir.Node) -> str | None:
    """The source line of a node as `file:line`: the innermost frame outside PyTorch that is written down."""
    frames = _FRAME.findall(node.metadata_props.get(_TRACE, ""))
    own = [frame for frame in frames if "/site-packages/torch/" not in frame[0].replace("\\", "/")]
    return ":".join((own or frames)[-1]) if frames else None


def softmax_type_of(node: ir.Node) -> ir.DataType | None:
    """The type that a softmax was asked for, as in `softmax(x, -1, dtype=torch.float32)`.

    The exporter writes such a softmax in the type of its input and casts the result, then drops the casts.
    """
    found = _SOFTMAX_TYPE.search(node.metadata_props.get("pkg.torch.onnx.fx_node", ""))
    return None if found is None else ir.DataType.from_numpy(np.dtype(found[1]))


# -- Take a model up to the opset that has `Attention` ---------------------------------------------

ATTENTION_OPSET = 23
_CONVERTED_TO = 18
_SAMPLED_ANYWHERE = 11  # since this version Resize says which points it takes
_BY_AXIS = 13  # since this version Hardmax and Softmax run over one axis
# The same node means something else since this version.
_CHANGED_SINCE = {"DFT": 20, "GroupNormalization": 21}
# ONNX Runtime 1.31 has these on a CPU before opset 22 only: the newer version just takes BF16, too.
_LOST, _LOST_SINCE = (*RANDOM, "GlobalLpPool", "MaxRoiPool", "RoiAlign"), 22
_STAYING = {*_CHANGED_SINCE, *_LOST}
# Other names of the same modes since opset 20.
_GRID_MODES = {"bilinear": "linear", "bicubic": "cubic"}


def from_old_opset(model: ir.Model) -> ir.Model:
    """A model of opset 7 to 17 in opset 18, through ONNX's version converter; newer ones as they are."""
    current = model.opset_imports.get("", 1)
    if current >= _CONVERTED_TO:
        return model
    if current < OLDEST_OPSET:
        what = f"The graph is older than opset {OLDEST_OPSET}."
        raise DeployError(what, got=f"opset {current}", hint="export it again")
    nodes = list(nodes_in(model.graph))
    sampled = _sampling_of(nodes, current)
    try:
        proto = onnx.version_converter.convert_version(light_proto(model), _CONVERTED_TO)
    except Exception as error:  # the converter raises RuntimeError and protobuf's own types
        what = f"The graph cannot be converted to opset {_CONVERTED_TO}."
        got, hint = f"opset {current}: {error}", "export it with a newer opset"
        raise DeployError(what, got=got, hint=hint) from error
    new = with_weights_of(proto, model)
    if current < _BY_AXIS:
        infer_shapes(new)
    for node in list(nodes_in(new.graph)) if current < _BY_AXIS else ():
        if is_op(node, "Resize") and (mode := sampled.get(node.outputs[0].name)):
            node.attributes.add(ir.AttrString("coordinate_transformation_mode", "asymmetric"))
            node.attributes.add(ir.AttrString("nearest_mode", mode))
        elif is_op(node, "Softmax", "LogSoftmax"):
            _by_last_axis(node)
    known = {value.name: value.shape for node in nodes for value in node.outputs}

    def is_made_up(size: int | ir.SymbolicDim) -> bool:
        """Whether a size is unknown, or has a name that shape inference gave it."""
        return not isinstance(size, int) and (size.value is None or size.value.startswith(GENERATED))

    for value in (each for node in new.graph.all_nodes() for each in node.outputs):
        shape = known.get(value.name)
        if value.is_graph_output():
            continue
        if shape is not None and not any(map(is_made_up, shape)):
            value.shape = shape
        elif value.shape is not None:  # the converter gives every size that it does not know a new name
            value.shape = ir.Shape([None if is_made_up(size) else size for size in value.shape])
    return new


def _sampling_of(nodes: Iterable[ir.Node], opset: int) -> dict[str | None, str]:
    """How the results of Upsample and Resize are rounded that have no attribute for it, by their names.

    Refused is what ONNX's converter gets wrong and cannot be mended.
    """
    found, hint = dict[str | None, str](), "export it with a newer opset"
    for node in nodes:
        if is_op(node, "Hardmax") and opset < _BY_AXIS:
            what = f"Hardmax means something else since opset {_BY_AXIS}."
            raise DeployError(what, got=f"opset {opset}, {node_name(node)}", hint=hint)
        if not is_op(node, "Upsample", "Resize") or opset >= _SAMPLED_ANYWHERE:
            continue
        scales = array_of(input_at(node, 1))
        larger = is_op(node, "Upsample") or (scales is not None and bool((scales >= 1).all()))
        smaller = scales is not None and bool((scales <= 1).all())
        if not larger and not smaller and node.attributes.get_string("mode", "nearest") == "nearest":
            what = f"Resize takes other points since opset {_SAMPLED_ANYWHERE}, and its scales are not known."
            raise DeployError(what, got=f"opset {opset}, {node_name(node)}", hint=hint)
        found[node.outputs[0].name] = "floor" if larger else "ceil"
    return found


def _by_last_axis(softmax: ir.Node) -> None:
    """Take away the Flatten and the Reshape that the converter writes around a softmax over the last axis."""
    flat, back = made_by(softmax.inputs[0], "Flatten"), [each for each, _ in softmax.outputs[0].uses()]
    source, result = input_at(flat, 0), back[0].outputs[0] if back else None
    shape = made_by(input_at(back[0], 1), "Shape") if len(back) == 1 and is_op(back[0], "Reshape") else None
    count = rank(source)
    if flat is None or source is None or result is None or not count or input_at(shape, 0) is not source:
        return
    if flat.attributes.get_int("axis", 1) % count != count - 1 or softmax.outputs[0].is_graph_output():
        return
    graph, name = graph_of_node(softmax), result.name
    softmax.replace_input_with(0, source)
    softmax.attributes.add(ir.AttrInt64("axis", -1))
    own = softmax.outputs[0]
    result.replace_all_uses_with(own, replace_graph_outputs=True)
    graph.remove([back[0]], safe=True)
    graph.remove(
        [each for each in (flat, shape) if each is not None and not each.outputs[0].uses()], safe=True
    )
    own.name, own.type, own.shape = name, result.type, result.shape


def equation_of(einsum: ir.Node) -> tuple[list[str], str]:
    """The letters of the operands of an einsum, and of its result, whether it names those or not."""
    equation = (einsum.attributes.get_string("equation") or "").replace(" ", "")
    inputs, arrow, out = equation.partition("->")
    letters = inputs.replace(",", "").replace(".", "")
    once = "".join(sorted(letter for letter in letters if letters.count(letter) == 1))
    return inputs.split(","), out if arrow else ("..." if "." in inputs else "") + once


def why_opset_stays(model: ir.Model) -> NotFused | None:
    """Why a model cannot declare opset 23, which has `Attention`; None where it can.

    A node of it has another meaning there, or no kernel in ONNX Runtime on a CPU, which had one before.
    """
    current, hint = model.opset_imports.get("", 1), f"export the module at opset {ATTENTION_OPSET}"
    for node in (each for each in nodes_in(model.graph) if each.op_type in _STAYING):
        if node.domain == "" and current < _CHANGED_SINCE.get(node.op_type, 0):
            what = f"{node.op_type} means something else in opset {ATTENTION_OPSET}, which has Attention."
            return NotFused(what, got=node_name(node), hint=hint)
        if current < _LOST_SINCE and is_op(node, *_LOST):
            what = f"ONNX Runtime has {node.op_type} on a CPU before opset {_LOST_SINCE} only."
            hint = "leave the node out, or compute it elsewhere"
            return NotFused(what, got=node_name(node), hint=hint)
    return None


def raise_opset(model: ir.Model) -> None:
    """Declare opset 23 for a model of opset 18 to 22; see `why_opset_stays`."""
    current = model.opset_imports.get("", 1)
    if current >= ATTENTION_OPSET:
        return
    for node in nodes_in(model.graph):
        if is_op(node, "GridSample") and current < 20:
            mode = node.attributes.get_string("mode", "bilinear") or "bilinear"
            node.attributes.add(ir.AttrString("mode", _GRID_MODES.get(mode, mode)))
        node.version = None
    model.graph.opset_imports[""] = ATTENTION_OPSET
    needed = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", ATTENTION_OPSET)], True)
    model.ir_version = max(model.ir_version, needed)


# -- Sizes: numbers, products of names, or not known -----------------------------------------------

Size = int | str | None
"""A number, a product of names and sums such as `4*B*(P + S)`, or None where it is not known."""
_NAME = re.compile(r"[\w.]+")
_OWN_NAME = re.compile(rf"{_NAME.pattern}\b(?!\()")
_WHOLE = r"floor\([^()*]+\)"
_FACTOR = rf"(?:{_NAME.pattern}|{_WHOLE}|\({_NAME.pattern}(?: \+ {_NAME.pattern})+\))"
_ATOM = re.compile(rf"{_NAME.pattern}|{_WHOLE}")
_FACTORS = re.compile(rf"{_FACTOR}(?:\*{_FACTOR})*")


def sizes_of(value: ir.Value | None) -> list[Size] | None:
    """The sizes of a value; None where its number of axes is not known."""
    return _sizes(None if value is None else value.shape)


def _sizes(shape: ir.Shape | None) -> list[Size] | None:
    if shape is None:
        return None
    return [each if isinstance(each, int) else _plain(each.value) for each in shape.dims]


_MOST_PLAIN = 4096
_PLAIN = dict[str, Size]()  # what was found of sizes: SymPy takes long


def _plain(size: str | None) -> Size:
    """A size as a product of names, where it is one: exporters write `(S**2)//S`."""
    if size is None or _FACTORS.fullmatch(size):
        return size
    if size not in _PLAIN:
        if len(_PLAIN) > _MOST_PLAIN:
            _PLAIN.clear()
        number, names = factors_of(size)
        found = product((number, *map(_plain, names))) if len(names) > 1 else _simplified(size)
        _PLAIN[size] = _PLAIN[str(found)] = found
    return _PLAIN[size]


_SHIFTED = re.compile(r"floor\(((?:[^()]|\([^()]*\))+?) ([+-]) (\d+)/(\d+)\)")
_MOST_SHIFTED = 8


def _simplified(size: str) -> Size:
    """A size as SymPy writes it, where `(T - 1)//2 + 1` and `(T + 1)//2` are one: `floor(T/2 + 1/2)`."""
    try:
        simple = ir.SymbolicDim(size).simplify().value
        for _ in range(_MOST_SHIFTED):
            shifted = None if simple is None else _SHIFTED.sub(_with_fraction, simple)
            if shifted is None or shifted == simple:
                break
            simple = ir.SymbolicDim(shifted).simplify().value
    except (ArithmeticError, AttributeError, SyntaxError, TypeError, ValueError):
        return size
    return size if simple is None else int(simple) if simple.isdecimal() else simple


def _with_fraction(floor: re.Match[str]) -> str:
    """A rounded-down term whose constant is between 0 and 1, and the whole number that this leaves."""
    term, sign, above, below = floor.groups()
    whole, rest = divmod(int(f"{sign}{above}"), int(below))
    return f"(floor({term} + {rest}/{below}) + {whole})" if whole else floor[0]


def _split(size: str, sign: str) -> list[str]:
    """The parts of a text between signs that are in no parentheses."""
    parts, depth = [""], 0
    for letter in size:
        depth += (letter == "(") - (letter == ")")
        if letter == sign and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def same_dims(first: Sequence[Size], second: Sequence[Size]) -> bool:
    """Whether two shapes are certainly equal."""
    return len(first) == len(second) and all(map(same_size, first, second))


def same_or_sliced(dim: Size, size: Size) -> bool:
    """Whether a dimension is certainly a size, wherever the file does not fail.

    A buffer of N rows, sliced to S, has min(N, S) of them, and the exporter says so. Beyond N the file fails.
    """
    name = re.escape(str(size))
    found = re.fullmatch(rf"Min\((?:(\d+), {name}|{name}, (\d+))\)", str(dim))
    # A single row would be broadcast.
    return same_size(dim, size) or (found is not None and int(found[1] or found[2]) > 1)


def adds_leading_ones(node: ir.Node) -> bool:
    """Whether a node only puts axes of size 1 in front, which broadcasting would do as well."""
    before = sizes_of(node.inputs[0]) if is_op(node, "Unsqueeze", "Reshape") else None
    after = sizes_of(node.outputs[0])
    if before is None or after is None or len(after) < len(before):
        return False
    more = len(after) - len(before)
    return all(size == 1 for size in after[:more]) and same_dims(after[more:], before)


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes; None where one is not known."""
    number, names = 1, list[str]()
    for size in sizes:
        if size is None:
            return None
        more, others = factors_of(size)
        number, names = number * more, names + others
    return _text(number, names)


def quotient(size: Size, divisor: Size) -> Size:
    """A size divided by another; None where it is not certainly whole."""
    if size is None or divisor is None:
        return None
    number, names = factors_of(size)
    by, others = factors_of(divisor)
    left = Counter(names)
    left.subtract(others)
    if not by or number % by or min(left.values(), default=0) < 0:
        return None
    return _text(number // by, list(left.elements()))


def factors_of(size: int | str) -> tuple[int, list[str]]:
    """The number and the names that a size is the product of."""
    if isinstance(size, int):
        return size, []
    parts = [size]
    if _FACTORS.fullmatch(size):
        parts = size.split("*")
    elif all(len(_split(size, sign)) == 1 for sign in "+-/%"):
        parts = _split(size, "*")
        parts = parts if "" not in parts else [size]  # a power
    parts = [part[1:-1] if part.startswith("(") and part.endswith(")") else part for part in parts]
    number = math.prod(int(part) for part in parts if part.isdecimal())
    return number, [part for part in parts if not part.isdecimal()]


def _text(number: int, names: list[str]) -> int | str:
    if not names or not number:
        return number
    if number == 1 and len(names) == 1:
        return names[0]
    parts = [name if _is_atom(name) else f"({name})" for name in sorted(names)]
    return "*".join([*([str(number)] if number != 1 else []), *parts])


def _is_atom(name: str) -> bool:
    """Whether a part of a product needs no parentheses."""
    if _ATOM.fullmatch(name):
        return True
    return re.match(r"\w+\(", name) is not None and all(len(_split(name, sign)) == 1 for sign in "+-/%*")


# -- Symbolic shape inference ----------------------------------------------------------------------

_MAX_CONTENT = 32
_MAX_ROUNDS = 4  # through a loop
_MAX_KEY = 6  # nodes of one number that are compared
OF_RUN = "of_run."  # how names of sizes begin that only a run knows
_COUNTER = itertools.count()
# What sizes are read from, where that is no constant.
_DECIDED_BY: dict[str, tuple[int, ...]] = {"NonZero": (0,), "ConstantOfShape": (0,), "Range": (0, 1, 2)}
_DECIDED_BY |= dict.fromkeys(("Compress", "Expand", "Reshape", "Split", "Tile", "TopK"), (1,)) | {
    "Pad": (1, 3)
}
_Key = Hashable  # what a number is computed from
NO_END = 2**31 - 1  # where a slice ends that has no end
_SAME_CONTENT = frozenset({*IN_ORDER, "Cast"})


def name_inputs(model: ir.Model) -> dict[ir.Value, ir.Shape]:
    """Name the sizes of inputs that have none: they are equal wherever they come to. The shapes before.

    A name that no expression can have, such as `onnx::Shape_33_dim_0`, gets other characters; where a node
    gives such a size, it is not known.
    """
    before = dict[ir.Value, ir.Shape]()
    for index, value in enumerate(model.graph.inputs):
        dims = sizes_of(value)
        if dims is not None and any(map(_is_unnamed, dims)):
            named = [
                f"input{index}.{at}"
                if size is None
                else _ODD.sub("_", size)
                if isinstance(size, str)
                else size
                for at, size in enumerate(dims)
            ]
            before[value], value.shape = ir.Shape(dims), ir.Shape(named)
    for value in (each for node in nodes_in(model.graph) for each in node.outputs):
        dims = sizes_of(value)
        if dims is not None and any(size is not None and _is_unnamed(size) for size in dims):
            value.shape = ir.Shape([None if _is_unnamed(size) else size for size in dims])
    return before


def own_names(model: ir.Model) -> set[str]:
    """Names of sizes that only results of a model have: most follow from those of its inputs."""
    given, made = (
        {name for value in several for size in sizes_of(value) or () for name in _names_in(size)}
        for several in (model.graph.inputs, model.graph.outputs)
    )
    return made - given


def _names_in(size: Size) -> list[str]:
    """The names of which a size is made; those of functions, such as `floor(…)`, are none."""
    return [each for each in _OWN_NAME.findall(size) if not each.isdecimal()] if isinstance(size, str) else []


def fix_sizes(model: ir.Model) -> dict[ir.Value, ir.Shape]:
    """Let sizes be numbers that a Reshape to constant ones allows no others for. The shapes of inputs before.

    A traced file may have the batch of its example there, and state any.
    """
    given = {size for value in model.graph.inputs for size in sizes_of(value) or ()}
    found = list[tuple[ir.Node, str, int]]()
    for node in model.graph:
        target = constant_ints(node, 1) if is_op(node, "Reshape") else None
        whole = None if not target or min(target) < 1 else product(sizes_of(node.inputs[0]) or [None])
        if isinstance(whole, str):
            number, names = factors_of(whole)
            size, rest = divmod(math.prod(target or ()), number)
            if len(names) == 1 and names[0] in given and not rest:
                found.append((node, names[0], size))
    run = set(nodes_behind(model.graph.outputs)) if found else set()  # what nothing needs is not run
    numbers = {text: size for node, text, size in found if node in run}
    if not numbers:
        return {}
    before = {value: value.shape for value in model.graph.inputs if value.shape is not None}
    put_sizes(model, numbers)
    return before


def put_sizes(model: ir.Model, numbers: Mapping[str, int]) -> None:
    """Write numbers for names of sizes, wherever a model states them."""
    name = re.compile("|".join(rf"(?<![\w.]){re.escape(each)}(?![\w.])" for each in numbers))
    for value in (*model.graph.inputs, *(each for node in nodes_in(model.graph) for each in node.outputs)):
        dims = sizes_of(value) or []
        fixed = [
            _plain(name.sub(lambda each: str(numbers[each[0]]), size)) if isinstance(size, str) else size
            for size in dims
        ]
        if fixed != dims:
            value.shape = ir.Shape([int(each) if str(each).isdecimal() else each for each in fixed])  # type: ignore[arg-type]


_ODD = re.compile(r"[^\w\s.+*/(),-]")


def _is_unnamed(size: Size) -> bool:
    return size is None or (isinstance(size, str) and _ODD.search(size) is not None)


def _is_generated(size: Size) -> bool:
    return isinstance(size, str) and GENERATED in size


def is_of_run(size: Size) -> bool:
    """Whether only a run knows a size: it is unknown, or has a name that inference gave it."""
    return size is None or (isinstance(size, str) and (GENERATED in size or OF_RUN in size))


class Inferred(NamedTuple):
    """What inference gave the values of a model, beyond what follows from its inputs."""

    entered: Sequence[ir.Value] = ()  # the inputs of loops that had no shape before
    of_run: bool = False  # whether sizes that only a run knows got names
    likely: Mapping[Size, Size] = MappingProxyType({})  # what such a size is where nothing is broadcast


def infer_sizes(model: ir.Model, *, only_missing: bool = False) -> Inferred:
    """Give every value of a model its type and the sizes that follow from those of the inputs."""
    made = [value for node in nodes_in(model.graph) for value in node.outputs]
    missing = {value for value in made if value.name and (value.dtype is None or value.shape is None)}
    if only_missing and not missing:
        return Inferred()
    before = {value: sizes_of(value) for value in made}
    if missing or (not only_missing and any(None in (sizes or ()) for sizes in before.values())):
        infer_shapes(model, _of_any_run)
        for value, known in before.items():
            if value.shape is None or (known is None and is_tensor(value)):
                continue
            found = list(_of_any_run(dims(value)))
            if known is not None and len(known) == len(found):
                pairs = zip(known, found, strict=True)
                found = [new if isinstance(new, int) or old is None else old for old, new in pairs]
            if tuple(found) != dims(value):
                value.shape = ir.Shape(found)
    following = _Walk(model, missing if only_missing else None)
    following.follow(model.graph)
    for value in made if following.solved else ():
        known = sizes_of(value) or []
        if any(OF_RUN in str(size) for size in known):
            value.shape = ir.Shape([likely_size(size, following.solved) for size in known])
    plain = {
        name: [each for each in several if not is_of_run(each)] for name, several in following.largest.items()
    }
    likely = {name: found[0] for name, found in plain.items() if len(found) == 1}
    return Inferred(following.entered, bool(following.named), likely)


def known_numbers(model: ir.Model) -> dict[ir.Value, np.ndarray]:
    """Small integer tensors whose numbers follow from fixed sizes, such as `Shape(x)[1]` of [B, 16]."""
    walk = _Walk(model, None)
    walk.follow(model.graph)
    found = dict[ir.Value, np.ndarray]()
    for value, numbers in walk.contents.items():
        shape = sizes_of(value) or []
        plain = all(isinstance(each, int) for each in (*shape, *numbers)) and value.producer() is not None
        if plain and value.dtype is not None and math.prod(map(int, shape)) == len(numbers):  # type: ignore[arg-type]
            array = np.array(numbers, value.dtype.numpy())
            found[value] = array.reshape([int(each) for each in shape])  # type: ignore[arg-type]
    return found


def likely_size(size: Size, likely: Mapping[Size, Size]) -> Size:
    """A size with what its parts are where nothing is broadcast; see `Inferred`."""
    if not isinstance(size, str) or OF_RUN not in size:
        return size
    return _plain(_NAME.sub(lambda found: f"({likely[found[0]]})" if found[0] in likely else found[0], size))


def forget_sizes_of_run(model: ir.Model) -> None:
    """Let sizes be unknown that only a run knows, and that `infer_sizes` gave a name."""
    for value in (each for node in nodes_in(model.graph) for each in node.outputs):
        if value.shape is not None and any(OF_RUN in str(size) for size in value.shape):
            value.shape = ir.Shape([None if OF_RUN in str(size) else size for size in value.shape])


def _of_any_run(sizes: tuple[Size, ...]) -> tuple[Size, ...]:
    """Sizes without the names that ONNX makes up for unknown ones: those are of one run only."""
    found = (each if isinstance(each, int) else _plain(each) for each in sizes)
    return tuple(None if _is_generated(each) else each for each in found)


def largest_tensor(model: ir.Model) -> Callable[[Mapping[str, int]], int]:
    """How many numbers the largest tensor of a model has, as a function of its axes.

    The scores of its attentions are among them. The model gets the sizes that follow from its inputs.
    """
    infer_sizes(model)
    found = set[tuple[Size, ...]]()
    for node in nodes_in(model.graph):
        found.update(tuple(dims) for each in node.outputs if (dims := sizes_of(each)) and None not in dims)
        if is_op(node, "Attention"):
            q, k = (sizes_of(input_at(node, at)) or [] for at in (0, 1))
            heads = q[1:2] if len(q) == 4 else [node.attributes.get_int("q_num_heads", 1)]
            found.add((*q[:1], *heads, *q[-2:-1], *k[-2:-1]))

    texts = {each for dims in found for each in dims if isinstance(each, str)}

    def count(sizes: Mapping[str, int]) -> int:
        known = {each: ir.SymbolicDim(each).evaluate(sizes) for each in texts}
        whole = {each: size for each, size in known.items() if isinstance(size, int)}
        # One that is not known makes a tensor that does not count.
        return max(
            (
                math.prod(each if isinstance(each, int) else whole.get(str(each), 0) for each in dims)
                for dims in found
            ),
            default=0,
        )

    return count


_INVALID = (IndexError, onnx.defs.SchemaError, onnx.shape_inference.InferenceError)


class _Interval(NamedTuple):
    """What is left of an axis between two positions."""

    size: Size  # of the axis
    begin: _Key  # a number, or what it is computed from
    end: _Key  # the same

    @property
    def plain(self) -> _Interval:
        """The same size counted from the first position."""
        begin, end = self.begin, self.end
        end = NO_END if isinstance(end, int) and end >= NO_END else end
        if isinstance(begin, int) and begin < 0 and end == NO_END:
            return _Interval(self.size, 0, -begin)
        if isinstance(end, int) and end < 0 and begin == 0:
            return _Interval(self.size, -end, NO_END)
        return _Interval(self.size, begin, end)

    def meets(self, other: _Interval) -> bool:
        """Whether another begins where this one ends."""
        return self.size == other.size and self.end == other.begin


class _Ratio(NamedTuple):
    """A size over a number."""

    size: Size  # the size
    by: int  # the number

    @property
    def reduced(self) -> _Ratio:
        """The same as a whole size, where it certainly is one."""
        whole = quotient(self.size, self.by)
        return self if whole is None else _Ratio(whole, 1)


_RATIO_OPS = ("Cast", "Mul", "Div", "Floor", "Ceil", "Squeeze", "Unsqueeze", "Identity")
_MOST_RATIO = 2**16  # of a number that a size is multiplied with or divided by


class _Walk:
    """The contents of small integer tensors so far."""

    def __init__(self, model: ir.Model, wanted: set[ir.Value] | None) -> None:
        self._opsets, self.contents = model.opset_imports, dict[ir.Value, list[Size]]()
        self._ratios = dict[ir.Value | None, list[_Ratio]]()
        self._wanted = wanted  # the results whose nodes are visited; None for all
        self.entered = list[ir.Value]()  # inputs of loops that were given a shape
        self._own = {str(each) for value in model.graph.inputs for each in sizes_of(value) or ()}
        self._of_results = own_names(model)  # names that others are better than
        self._complete = dict[tuple[Size, ...], bool]()  # whether all of some sizes are known
        # What sizes are that only a run knows, by their names, and back.
        self.intervals, self.named = dict[Size, _Interval](), dict[_Key, str]()
        self.largest = dict[Size, frozenset[Size]]()  # which sizes such a one is the largest of
        self.solved = dict[Size, Size]()  # what such a one turned out to be

    def follow(self, graph: ir.Graph) -> None:
        """Visit the nodes of a graph, those of branches and loops first."""
        for node in graph:
            inner = inner_graphs(node)
            if inner and is_op(node, "Loop") and self._wanted is None:
                self._follow_loop(node, inner[0])
            else:
                for each in inner:
                    self.follow(each)
            if self._wanted is None or not self._wanted.isdisjoint(node.outputs):
                self.visit(node)
                if is_op(node, "Reshape"):
                    self._solve(sizes_of(node.inputs[0]) or [], sizes_of(node.outputs[0]) or [None])

    def _follow_loop(self, node: ir.Node, body: ir.Graph) -> None:
        """Follow a loop: a value that it carries has the sizes at its begin where these are those at its end.

        Any others get a name, which is a size of one iteration.
        """
        pairs = zip(body.inputs[2:], node.inputs[2:], strict=False)
        carried = {
            value: (given, body.outputs[at])
            for at, (value, given) in enumerate(pairs, 1)
            if given is not None and value.shape is None and given.shape is not None and is_tensor(value)
        }
        nodes = list(nodes_in(body))
        made = [each for inner in nodes for each in inner.outputs]
        made += [each for inner in nodes for graph in inner_graphs(inner) for each in graph.inputs]
        stated = [(each, each.shape) for each in made]
        sizes = {value: sizes_of(given) or [] for value, (given, _) in carried.items()}
        for _ in range(_MAX_ROUNDS):
            for value, found in sizes.items():
                value.shape = ir.Shape(found)
            self.follow(body)
            ends = {value: sizes_of(carried[value][1]) or [] for value in sizes}
            own = f"loop{len(self.entered)}"
            wanted = {
                value: [
                    size if same_size(size, end) or str(size).startswith(own) else f"{own}.{at}.{axis}"
                    for axis, (size, end) in enumerate(zip(found, ends[value], strict=True))
                ]
                for at, (value, found) in enumerate(sizes.items())
                if len(found) == len(ends[value])
            }
            if wanted == sizes:
                break
            sizes = wanted
            for each, shape in (*dict.fromkeys(carried).items(), *stated):
                each.shape = shape
                self.contents.pop(each, None)
        else:
            return
        self.entered += carried
        results = [sizes.get(value) for value in body.inputs[2:]]
        for value, known in zip(node.outputs, results, strict=False):
            if value.shape is None and known is not None:
                value.shape = ir.Shape([None if str(each).startswith(own) else each for each in known])

    def visit(self, node: ir.Node) -> None:
        """Take in one node: the numbers of its result, and the sizes that are not known yet."""
        if node.domain == ORT_DOMAIN and (known := sizes_of(input_at(node, 0))):
            alike = node.op_type in LIKE_FIRST
            for each in [node.outputs[place] for place in LIKE_IT if place < len(node.outputs)]:
                if alike or (
                    node.op_type in OTHER_WIDTH and rank(each) == len(known) and each is node.outputs[0]
                ):
                    each.shape = ir.Shape([*known[:-1], known[-1] if alike else dims(each)[-1]])
        if node.domain != "" or not node.outputs:
            return
        output = node.outputs[0]
        if output.dtype in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL):
            content = self._content_after(node)
            if content is not None and len(content) <= _MAX_CONTENT:
                self.contents[output] = content
        elif node.op_type in _RATIO_OPS and (ratios := self._ratios_after(node)) is not None:
            self._ratios[output] = ratios
        if all(map(self._is_complete, node.outputs)):
            return
        before = [sizes_of(each) for each in node.outputs]
        missing = any(known is None or not all(map(self._is_known, known)) for known in before)
        try:
            after = self._sizes_after(node) if missing else before
            if missing and node.op_type in _DECIDED_BY:
                after = self._with_names(node, after)
        except _INVALID:  # no runtime would take the file
            return
        for value, known, found in zip(node.outputs, before, after, strict=False):
            if found is None or (known is not None and len(known) != len(found)):
                continue
            pairs = zip(known or found, found, strict=True)
            sizes = [old if new is None or self._is_known(old) else new for old, new in pairs]
            if value.shape is None or sizes != list(dims(value)):
                value.shape = ir.Shape(sizes)

    def _solve(self, before: list[Size], after: list[Size]) -> None:
        """Learn the one size before a Reshape that only a run knows: it keeps the number of elements."""
        names = [size for size in before if is_of_run(size)]
        if len(names) == 1 and _NAME.fullmatch(str(names[0])) and not any(map(is_of_run, after)):
            size = quotient(product(after), product(each for each in before if each not in names))
            if size is not None:
                self.solved[names[0]] = size

    def _is_complete(self, value: ir.Value) -> bool:
        if value.shape is None:
            return False
        given = dims(value)
        if given not in self._complete:
            plain = [_plain(each) if isinstance(each, str) else each for each in given]
            self._complete[given] = plain == list(given) and all(map(self._is_known, plain))
        return self._complete[given]

    def _is_known(self, size: Size) -> bool:
        if not isinstance(size, str):
            return size is not None
        own = not self._of_results or self._of_results.isdisjoint(_names_in(size))
        return own and (size in self._own or GENERATED not in size)

    def content(self, value: ir.Value | None) -> list[Size] | None:
        """The numbers of a small integer tensor."""
        if value is None or value in self.contents:
            return None if value is None else self.contents[value]
        if value.dtype not in (ir.DataType.INT64, ir.DataType.INT32) or value.shape is None:
            return None
        if any(not isinstance(each, int) or each > _MAX_CONTENT for each in value.shape):
            return None
        array = array_of(value)
        return None if array is None or array.size > _MAX_CONTENT else [int(each) for each in array.ravel()]

    def _content_after(self, node: ir.Node) -> list[Size] | None:
        first = node.inputs[0] if node.inputs else None
        if is_op(node, "Shape"):
            dims = sizes_of(first)
            start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
            return None if dims is None else dims[start:end]
        if first in self._ratios and is_op(node, "Cast"):
            return [_divided(*each) for each in self._ratios[first]]
        if node.op_type in _SAME_CONTENT:
            return self.content(first)
        given = [part for each in node.inputs if (part := self.content(each)) is not None]
        if is_op(node, "Concat") and given:
            parts = [self.content(each) or self._unknown(each) for each in node.inputs]
            return None if None in parts else [each for part in parts for each in part or ()]
        if not given or len(given) < len(node.inputs):
            return None
        if is_op(node, "Gather"):
            data, at = given
            return [data[each] for each in at if isinstance(each, int) and -len(data) <= each < len(data)]
        if is_op(node, "Slice", "Transpose"):
            return self._rearranged(node, given)
        if is_op(node, "ConstantOfShape"):
            count, fill = next(iter(given[0]), None), node.attributes.get("value")
            number = int(fill.as_tensor().numpy().ravel()[0]) if fill is not None else 0
            return [number] * count if isinstance(count, int) and count <= _MAX_CONTENT else None
        if is_op(node, "ReduceProd"):
            return [product(given[0])]
        if not is_op(node, *_CONTENT_OPS) or node.attributes.get_int("fmod", 0) == 1:
            return None
        length = max(map(len, given))
        if any(len(part) not in (1, length) for part in given):
            return None
        return [_CONTENT_OPS[node.op_type](*(part[at % len(part)] for part in given)) for at in range(length)]

    def _ratios_after(self, node: ir.Node) -> list[_Ratio] | None:
        """The quotients of sizes that a small tensor of floats holds, as exporters divide and round them."""
        first, *others = node.inputs
        if is_op(node, "Cast"):
            sizes = self.contents.get(first) if first is not None else None
            return None if sizes is None or None in sizes else [_Ratio(each, 1) for each in sizes]
        if is_op(node, "Mul") and others[0] in self._ratios:
            first, others = others[0], [first]
        if (given := self._ratios.get(first)) is None:
            return None
        if is_op(node, "Floor"):
            return [_Ratio(_divided(*each), 1) for each in given]
        if is_op(node, "Ceil"):
            return [_Ratio(_divided(_sum(each.size, each.by - 1), each.by), 1) for each in given]
        if not is_op(node, "Mul", "Div"):
            return given
        number = Fraction(scalar_of(others[0]) or 0)
        if number <= 0 or max(number.numerator, number.denominator) > _MOST_RATIO:
            return None
        number = 1 / number if is_op(node, "Div") else number
        ratios = ((product((each.size, number.numerator)), each.by * number.denominator) for each in given)
        return [_Ratio(*each).reduced for each in ratios]

    def _unknown(self, value: ir.Value | None) -> list[Size] | None:
        """As many unknown numbers as a small tensor has; None where it may have any number."""
        found = sizes_of(value)
        return [None] * found[0] if found and len(found) == 1 and isinstance(found[0], int) else None

    def _rearranged(self, node: ir.Node, given: list[list[Size]]) -> list[Size] | None:
        """The numbers behind a Slice or a Transpose, by which TorchScript's exporter computes pads."""
        sizes = [size for size in sizes_of(node.inputs[0]) or () if isinstance(size, int)]
        numbers = np.array(given[0], object)
        if len(sizes) != rank(node.inputs[0]) or math.prod(sizes) != numbers.size:
            return None
        numbers = numbers.reshape(sizes)
        if is_op(node, "Transpose"):
            return list(numbers.transpose(perm(node)).ravel())
        bounds = [[each for each in part if isinstance(each, int)] for part in given[1:]]
        if bounds != given[1:] or len(bounds) < 2:
            return None
        starts, ends, *more = bounds
        axes, steps = (
            more[0] if more else list(range(len(starts))),
            more[1] if len(more) > 1 else [1] * len(starts),
        )
        slices = [slice(None)] * len(sizes)
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
            # Backwards, Python has no number for an end before the first one.
            slices[axis] = slice(start, None if step < 0 and end < -sizes[axis] else end, step)
        return list(numbers[tuple(slices)].ravel())

    def _sizes_after(self, node: ir.Node) -> Sequence[list[Size] | None]:
        """The sizes of the results of a node."""
        first, given = sizes_of(input_at(node, 0)), [self.content(each) for each in node.inputs]
        second = given[1] if len(given) > 1 else None
        if is_op(node, "If"):
            one, other = (graph.outputs for graph in graphs_in(node))
            return [_merged(sizes_of(first), sizes_of(each)) for first, each in zip(one, other, strict=True)]
        if is_op(node, "ConstantOfShape"):
            return given[:1]
        if is_op(node, "Range"):
            return [[self._counted(node)]]
        if first is None:
            return []
        if is_op(node, "Reshape"):
            return [_reshaped(first, second, bool(node.attributes.get_int("allowzero", 0)))]
        if is_op(node, "Expand"):
            return [_broadcast([first, second])]
        if is_op(node, "Flatten"):
            axis = node.attributes.get_int("axis", 1)
            return [[product(first[:axis]), product(first[axis:])]]
        if is_op(node, "Tile"):
            times = second or [None] * len(first)
            return [[product(pair) for pair in zip(first, times, strict=False)]]
        if is_op(node, "Split"):
            axis, count = node.attributes.get_int("axis", 0), len(node.outputs)
            each = quotient(first[axis], count) if input_at(node, 1) is None else None
            return [[*first[:axis], part, *first[axis:][1:]] for part in second or [each] * count]
        if is_op(node, "Slice"):
            return [self._slice(node, first, *(*given[1:], None, None)[:4])]
        if is_op(node, "Pad") and second is not None:
            places = list(range(len(first))) if input_at(node, 3) is None else given[3] or []
            if len(second) != 2 * len(places):
                return []
            for place, *pads in zip(places, second, second[len(places) :], strict=False):
                if not isinstance(place, int) or not -len(first) <= place < len(first):
                    return []
                first[place] = first[place] if pads == [0, 0] else functools.reduce(_sum, pads, first[place])
            return [first]
        found = self._by_onnx(node)
        if is_op(node, "Concat") and found[0] is not None:
            axis, shapes = node.attributes.get_int("axis", 0), [sizes_of(each) for each in node.inputs]
            sizes = self._rejoined([shape[axis] if shape else None for shape in shapes])
            found[0][axis] = functools.reduce(_sum, sizes)
        if is_op(node, *_SAMPLING) and found and found[0] is not None:
            after = _sampled(node, first, given[3] if len(given) > 3 else None)
            found[0] = [new if known is None else known for known, new in zip(found[0], after, strict=True)]
        if is_op(node, *_BROADCASTING):
            self._name_largest(node, found)
        if is_op(node, "Attention") and len(node.outputs) > 1:
            found[1:3] = [self._present(node, at) for at in (1, 2)]
        return found

    def _name_largest(self, node: ir.Node, found: Sequence[list[Size] | None]) -> None:
        """Name sizes of which one may be broadcast to the other: the largest, of which the others are 1."""
        shapes, sizes = [sizes_of(each) or [] for each in node.inputs], (found[0] if found else None) or []
        for at, size in enumerate(sizes, -len(sizes)):
            own = {shape[at] for shape in shapes if -at <= len(shape)} - {1}
            if size is None and None not in own:
                several = frozenset[Size]().union(*(self.largest.get(each, {each}) for each in own))
                sizes[at] = name = self._name(("Max", several))
                self.largest[name] = several

    def _counted(self, node: ir.Node) -> Size:
        """How many numbers a Range gives; where it counts by one, its ends may be sums of any numbers."""
        start, limit, step = (self._signed(each) for each in node.inputs)
        if step not in ({"": 1}, {"": -1}):
            return None
        count = _apart(start, limit) if step == {"": 1} else _apart(limit, start)
        return max(count, 0) if isinstance(count, int) else count

    def _signed(self, value: ir.Value | None, at: int = 0, depth: int = 0) -> Counter[_Key] | None:
        """One number of a small tensor as a sum, each part of which may be subtracted: see `_parts_of`.

        An integer that only a run knows is a part by what it is computed from.
        """
        content, node = self.content(value), None if value is None else value.producer()
        at = 0 if sizes_of(value) in ([], [1]) else at
        known = content[at] if content and at < len(content) else None
        if value is None or known is not None:
            return None if known is None else Counter(_parts_of(known))
        own = Counter[_Key]({(self._key(value), at): 1}) if value.dtype in INTEGERS else None
        if node is None or depth == _MAX_KEY:
            return own
        if is_op(node, "Concat"):
            for each in node.inputs:
                if (count := self._unknown(each)) is None or at < len(count):
                    return own if count is None else self._signed(each, at, depth + 1)
                at -= len(count)
        if not is_op(node, "Add", "Sub", "Neg", *_SAME_CONTENT):
            return own
        found, signs = Counter[_Key](), {"Neg": (-1,), "Sub": (1, -1), "Add": (1, 1)}
        for sign, each in zip(signs.get(node.op_type, (1,)), node.inputs, strict=False):
            parts = self._signed(each, at, depth + 1)
            if parts is None:
                return own
            found.update({name: sign * count for name, count in parts.items()})
        return found

    def _slice(
        self,
        node: ir.Node,
        sizes: list[Size],
        starts: list[Size] | None,
        ends: list[Size] | None,
        axes: list[Size] | None,
        steps: list[Size] | None,
    ) -> list[Size] | None:
        """The sizes behind a Slice. Those that only a run knows get a name, equal ones the same."""
        count = len(starts or ends or ())
        for at, axis in enumerate(range(count) if axes is None else axes):
            if not isinstance(axis, int) or not -len(sizes) <= axis < len(sizes):
                return None
            begin, end = (each[at] if each else None for each in (starts, ends))
            step = steps[at] if steps else 1 if input_at(node, 4) is None else None
            before = sizes[axis]
            backwards = step == -1 and begin in (-1, NO_END) and isinstance(end, int) and end <= -NO_END
            sizes[axis] = _sliced(before, begin, end) if step == 1 else before if backwards else None
            convolved = axis % len(sizes) > 1 and made_by(node.inputs[0], *_SAMPLING) is not None
            if convolved and isinstance(before, str) and (begin, end, step) == (0, -1, 1):
                sizes[axis] = _plain(f"{before} - 1")  # a convolution gives at least one
            if sizes[axis] is None and before is not None and step == 1:
                where = (self._key(input_at(node, 1)), at), (self._key(input_at(node, 2)), at)
                bounds = [self._signed(input_at(node, place), at) for place in (1, 2)]
                if begin is None and _apart(*bounds) == 1:
                    sizes[axis] = 1  # `table[i : i + 1]`, of a position that the table has
                    continue
                first, last = (
                    key if each is None else each for key, each in zip(where, (begin, end), strict=True)
                )
                interval = _Interval(before, first, last).plain
                sizes[axis] = self._name(interval)
                self.intervals[sizes[axis]] = interval
        return sizes if axes is not None or count else None

    def _name(self, key: _Key) -> str:
        """A name for a size that only a run knows: the same one wherever it is computed alike."""
        if key not in self.named:
            self.named[key] = f"{OF_RUN}{next(_COUNTER)}"
        return self.named[key]

    def _with_names(self, node: ir.Node, found: Sequence[list[Size] | None]) -> Sequence[list[Size] | None]:
        """Sizes that some operators read from a tensor of the run, with names for those that are not known.

        An axis that is repeated, padded or chosen from must have a known size before; a Reshape may read
        any of its sizes.
        """
        decisive, before = _DECIDED_BY[node.op_type], sizes_of(input_at(node, 0)) or []
        by = tuple(self._key(input_at(node, at)) for at in decisive)
        attributes = tuple(sorted((name, str(each.value)) for name, each in node.attributes.items()))
        for which, sizes in enumerate(found):
            for at, size in enumerate(sizes or ()):
                whole = is_op(node, "Reshape") or 0 in decisive
                own = () if 0 in decisive else before if whole else before[at - len(sizes or ()) :][:1]
                if size is None and sizes is not None and None not in own and (own or 0 in decisive):
                    sizes[at] = self._name((node.op_type, attributes, by, tuple(own), which, at, len(sizes)))
        return found

    def _rejoined(self, sizes: list[Size]) -> list[Size]:
        """Sizes of which two that are all of an axis, as of `x[n:]` and `x[:n]`, are one."""
        for one, other in itertools.permutations(range(len(sizes)), 2):
            first, second = self.intervals.get(sizes[one]), self.intervals.get(sizes[other])
            if first and second and (first.begin, second.end) == (0, NO_END) and first.meets(second):
                rest = [size for at, size in enumerate(sizes) if at not in (one, other)]
                return self._rejoined([first.size, *rest])
        return sizes

    def _key(self, value: ir.Value | None, depth: int = 0) -> _Key:
        """What a small integer tensor is computed from: equal for those that are computed alike."""
        content = self.content(value)
        if content is not None and None not in content:
            return tuple(content)
        node = None if value is None else value.producer()
        if node is None or node.domain != "" or depth == _MAX_KEY or len(node.outputs) != 1:
            return value
        if is_op(node, "Squeeze", "Unsqueeze") and sizes_of(value) in ([], [1]):
            return self._key(node.inputs[0], depth + 1)
        if (
            is_op(node, *RANDOM)
            or graphs_in(node)
            or any(_is_array(each) for each in node.attributes.values())
        ):
            return value
        attributes = sorted((name, str(each.value)) for name, each in node.attributes.items())
        return (node.op_type, *attributes, *(self._key(each, depth + 1) for each in node.inputs))

    def _present(self, attention: ir.Node, at: int) -> list[Size] | None:
        """The sizes of all keys, or all values, that an attention gives."""
        new, past = sizes_of(attention.inputs[at]), sizes_of(input_at(attention, at + 3))
        if new is not None and len(new) == 3:
            heads = attention.attributes.get_int("kv_num_heads", None)
            new = None if heads is None else [new[0], heads, new[1], quotient(new[2], heads)]
        if new is None or past is None:
            return new
        return [*new[:2], _sum(past[2], new[2]), new[3]]

    def _by_onnx(self, node: ir.Node) -> list[list[Size] | None]:
        """The sizes of the results by ONNX's own rules, for which a product of names is one name."""
        if any(value is not None and value.dtype is None for value in node.inputs) or graphs_in(node):
            return []
        inputs = {str(value.name): value for value in node.inputs if value is not None}
        types = {name: ir.serde.serialize_value(value).type for name, value in inputs.items()}
        numbers = dict[str, onnx.TensorProto]()
        for name, value in inputs.items():
            content, axes = self.content(value), rank(value)
            whole = [each for each in content or () if isinstance(each, int)]
            if content == whole and axes in (0, 1):
                kind = types[name].tensor_type.elem_type
                numbers[name] = onnx.helper.make_tensor(name, kind, [len(whole)][:axes], whole)
        version = self._opsets.get("", 1)
        found = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(node.op_type, version), ir.to_proto(node), types, numbers
        )
        kinds = [found.get(str(value.name), onnx.TypeProto()) for value in node.outputs]
        return [_sizes(ir.serde.deserialize_type_proto_for_shape(each)) for each in kinds]


def _is_array(attribute: ir.Attr) -> bool:
    return attribute.type in (ir.AttributeType.TENSOR, ir.AttributeType.SPARSE_TENSOR)


_BROADCASTING = ("Add", "Sub", "Mul", "Div", "Where", "Max", "Min", "Pow", "And", "Or")
_SAMPLING = ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool", "Resize")


def _sampled(node: ir.Node, sizes: list[Size], wanted: list[Size] | None) -> list[Size]:
    """The sizes behind a convolution, a pooling, or a Resize to `wanted` ones."""
    count, read = len(sizes) - 2, node.attributes.get_ints
    if is_op(node, "Resize"):
        scales = array_of(input_at(node, 2))
        factors = [] if scales is None else [float(each) for each in scales]
        times = [int(each) if each.is_integer() else None for each in factors]
        found = wanted or [product(pair) for pair in zip(sizes, times, strict=False)]
        plain = not {"axes", "keep_aspect_ratio_policy"} & node.attributes.keys()
        return found if len(found) == len(sizes) and plain else [None] * len(sizes)
    kernel = list(read("kernel_shape") or (sizes_of(input_at(node, 1)) or ())[2:])
    steps, spread = (list(read(name) or [1] * count) for name in ("strides", "dilations"))
    pads, more = list(read("pads") or [0] * 2 * count), list(read("output_padding") or [0] * count)
    auto = node.attributes.get_string("auto_pad", "NOTSET") or "NOTSET"
    result: list[Size] = [None] * len(sizes)
    stated, ceiled = read("output_shape"), node.attributes.get_int("ceil_mode", 0)
    if len(kernel) != count or stated or ceiled or not all(isinstance(each, int) for each in kernel):
        return result
    for at, (size, step) in enumerate(zip(sizes[2:], steps, strict=True)):
        reach = spread[at] * (int(kernel[at] or 0) - 1) + 1
        reach -= pads[at] + pads[at + count] if auto == "NOTSET" else 0
        text = f"({size} + {-reach})//{step} + 1"
        if is_op(node, "ConvTranspose"):
            text = f"({size})*{step}" if "SAME" in auto else f"({size} + -1)*{step} + {reach + more[at]}"
        elif "SAME" in auto:
            text = f"({size} + {step - 1})//{step}"
        result[at + 2] = None if size is None else _plain(text)
    return result


def is_pointwise(conv: ir.Node) -> bool:
    """Whether a convolution computes each point from that point alone."""
    names = ("strides", "dilations", "pads")
    strides, dilations, pads = (node_ints or () for node_ints in map(conv.attributes.get_ints, names))
    padded = any(pads) or conv.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    return {1} == {1, *strides, *dilations, *(sizes_of(conv.inputs[1]) or (None,) * 3)[2:]} and not padded


def _merged(one: list[Size] | None, other: list[Size] | None) -> list[Size] | None:
    """The sizes that two branches have in common."""
    if one is None or other is None or len(one) != len(other):
        return None
    return [first if same_size(first, second) else None for first, second in zip(one, other, strict=True)]


def _sliced(size: Size, begin: Size, end: Size) -> Size:
    """The size of an axis between two positions."""
    if isinstance(size, int) and isinstance(begin, int) and isinstance(end, int):
        return len(range(size)[begin:end])
    if isinstance(begin, str) and isinstance(end, str) and isinstance(size, int) and size > 1:
        return _difference(end, begin)  # `table[P : P + S]`, as below
    if begin in (0, -1) and isinstance(end, int) and end >= NO_END:
        return size if begin == 0 else 1  # all, or the last one
    if begin == 0 and isinstance(end, str) and size in (end, 1):
        return size
    if (between := _between(size, begin, end)) is not None:
        return between
    # `table[:, :S]` of a table that is long enough, as positions are looked up. Where its length has a name,
    # it may be a single one, which is broadcast.
    return end if begin == 0 and isinstance(end, str) and isinstance(size, int) else None


def _between(size: Size, begin: Size, end: Size) -> Size:
    """The size between two positions that are certainly on an axis such as `P + S + 1`, in this order."""
    if not isinstance(size, str):
        return None
    first, last = (_difference(size, -at) if isinstance(at, int) and at < 0 else at for at in (begin, end))
    last = size if isinstance(last, int) and last >= NO_END else last
    inside = _difference(size, last) is not None
    return _difference(last, first) if inside and first is not None else None


def _equal(one: Size, other: Size) -> Size:
    if one is None or other is None:
        return None
    apart = (isinstance(one, int) and isinstance(other, int)) or -1 in (one, other)  # a size is not negative
    return 1 if one == other else 0 if apart else None


def _sum(one: Size, other: Size) -> Size:
    if isinstance(one, int) and isinstance(other, int):
        return one + other
    if one is None or other is None or any(isinstance(each, int) and each < 0 for each in (one, other)):
        return None  # a difference could be negative, which no size is
    return _plain(f"{one} + {other}")


def _difference(one: Size, other: Size) -> Size:
    """A sum without some of its parts; any other difference could be negative, which no size is."""
    if isinstance(one, int) and isinstance(other, int):
        return one - other
    if one is None or other is None or one == other or other == 0:
        return None if one is None or other is None else 0 if one == other else one
    parts, less = _parts_of(one), _parts_of(other)
    if not less <= parts:
        return None
    return _added(parts - less)


def _added(parts: Mapping[str, int]) -> Size:
    """The sum of some parts; see `_parts_of`."""
    texts = [str(_text(count, [name])) for name, count in sorted(parts.items()) if name and count]
    number = parts.get("", 0)
    return _plain(" + ".join([*texts, *([str(number)] if number else [])])) if texts else number


def _apart(first: Counter[_Key] | None, last: Counter[_Key] | None) -> Size:
    """How far one number is behind another; None where that is not a size. See `_Walk._signed`."""
    if first is None or last is None:
        return None
    total = Counter(last)
    total.subtract(first)
    parts = {name: count for name, count in total.items() if count and isinstance(name, str)}
    whole = len(parts) == sum(map(bool, total.values()))
    return _added(parts) if whole and (min(parts.values(), default=0) >= 0 or not any(parts)) else None


def _parts_of(size: int | str) -> Counter[str]:
    """What a size is the sum of: how often each part is in it, and the number, under an empty name.

    With a difference in it, a part could be larger than the whole.
    """
    if isinstance(size, int) or len(_split(size, "-")) > 1:
        return Counter({"": size} if isinstance(size, int) else {size: 1})
    found = Counter[str]()
    for part in _split(size, "+"):
        times, star, name = part.partition("*")
        if part.isdecimal() or (star and times.isdecimal()):
            found[name] += int(times)
        else:
            found[part] += 1
    return found


def _divided(one: Size, other: Size) -> Size:
    if isinstance(one, int) and isinstance(other, int) and one >= 0 < other:
        return one // other
    whole = quotient(one, other)
    if whole is not None or one is None or other is None or (isinstance(other, int) and other < 1):
        return whole
    return _plain(f"({one})//({other})")


def _remainder(one: Size, other: Size) -> Size:
    return one % other if isinstance(one, int) and isinstance(other, int) and other > 0 else None


# Of numbers and sizes, one by one.
_CONTENT_OPS: dict[str, Callable[..., Size]] = {
    "Mul": lambda *given: product(given),
    "Div": _divided,
    "Mod": _remainder,
    "Where": lambda chosen, one, other: one if chosen == 1 else other if chosen == 0 else None,
    "Equal": _equal,
    "Add": _sum,
    "Sub": _difference,
}


def _broadcast(shapes: Sequence[list[Size] | None]) -> list[Size] | None:
    given = [shape for shape in shapes if shape is not None]
    if len(given) < len(shapes):
        return None
    result = list[Size]()
    for at in range(-max(map(len, given)), 0):
        sizes = {shape[at] for shape in given if -at <= len(shape) and shape[at] != 1}
        fixed = [size for size in sizes if isinstance(size, int)]
        result.append(fixed[0] if fixed else sizes.pop() if len(sizes) == 1 else 1 if not sizes else None)
    return result


def _reshaped(source: list[Size], wanted: list[Size] | None, allow_zero: bool) -> list[Size] | None:
    if wanted is None:
        return None
    kept = 0 if allow_zero else len(source)
    result = [source[at] if size == 0 and at < kept else size for at, size in enumerate(wanted)]
    for open_size in (-1, None):
        if result.count(open_size) == 1:
            at = result.index(open_size)
            result[at] = _divided(product(source), product(each for each in result if each != open_size))
            break
    return result
