"""Verify a rewritten attention: the old and the new nodes compute the same on drawn inputs.

Both are cut out of the graph between Q, K, V and the masks on one side and the result on the other, and run
in ONNX's reference evaluator at small sizes. Equal structures are run once.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from mha_deploy.bundle.manifest import GENERATED
from mha_deploy.graph.fuse.values import ATTENTION_OPSET, NotFused, in_words
from mha_deploy.graph.ir import constant, dims, is_op, reference_evaluator

Dims = tuple[int | str, ...]
"""The sizes of a tensor; a dynamic one as the expression that the file gives for it."""

_MAX_NODES = 512
_MAX_MASK_NODES = 64
_MAX_SCORES = 2**28  # elements; a static graph larger than that takes minutes in the evaluator
_MANY_SCORES = 2**22  # beyond that, one draw has to do
# What a mask is not cut open for: its numbers are as good as drawn ones.
_MATMULS = ("MatMul", "Gemm", "Einsum", "Conv", "Attention", "LSTM", "GRU")
# Sizes of the dynamic axes, in the order of their names: distinct odd ones first. A graph may need sizes that
# divide each other, that are equal, or of which some are 1.
_SIZES: list[tuple[int, ...]] = [(3, 5, 7, 2, 9, 11), (2, 7, 5, 3, 11, 9), (1, 4, 4, 4, 4, 4)]
_SIZES += [(4, 1, 4, 4, 4, 4), (4,), (12,), (2,), (1,)]
_ENOUGH = 2  # choices of sizes that must run, where so many do
_ENLARGED = 6  # attempts at making sizes positive that follow from others, each with four times the others
# Rounding of both sides, relative to the largest result; scores far from 0 are rounded more coarsely.
_ROUNDING = {np.dtype(np.float64): 1e-11, np.dtype(np.float32): 3e-5, np.dtype(np.float16): 2e-2}
_SHARP, _SHARP_HALF = 20.0, 1.5
_EXTREME = 5e4  # scores of the last draw: far from each other, and above any fill
_EXTREME_ROUNDING = 0.1
FACTOR = 0.0  # the spread of what the scores are multiplied by or divided by: numbers around 1
_Feeds = Mapping[str, np.ndarray]
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_FUNCTIONS = frozenset({"Min", "Max", "floor", "ceiling", "Mod"})


class _Failed(Exception):
    """The evaluator could not run a region."""


class NotVerified(NotFused):
    """The comparison could not be done."""

    def __init__(self, why: str, *, got: object = None) -> None:
        super().__init__(f"Not verified: {why}", got=got, hint="--no-verify fuses it unverified")


@dataclass(frozen=True, kw_only=True)
class Region:
    """The nodes between some values of a graph and some results."""

    nodes: tuple[onnx.NodeProto, ...]  # the nodes, in the order of execution
    constants: tuple[onnx.TensorProto, ...]  # the initializers that they use
    inputs: Mapping[str, ir.Value]  # what they are computed from, by name
    sizes: Mapping[str, Dims]  # results of Shape nodes whose input is outside, by name
    results: tuple[str, ...]  # names of the results
    key: str  # digest of the structure: operators, attributes, constants, shapes; no names


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Where the region of an attention begins."""

    stops: frozenset[ir.Value]  # the values that are drawn
    dims: Mapping[str, Dims]  # sizes of Q, K, V and masks by name
    # standard deviation of the numbers that are drawn for Q, K and V, by name; `FACTOR` for positive ones
    spread: Mapping[str, float]

    def dims_of(self, value: ir.Value, *, drawn: bool = False) -> Dims | None:
        """The sizes of a value; None where the file does not know one of them.

        One of a value that is drawn gets a name of its own. A name that shape inference made up is no size.
        """
        if value.name in self.dims:
            return self.dims[str(value.name)]
        found = list[int | str]()
        for axis, size in enumerate(dims(value)):
            if not drawn and (size is None or GENERATED in str(size)):
                return None
            found.append(f"unknown.{id(value)}.{axis}" if size is None else size)
        return None if value.shape is None else tuple(found)


def cut_out(results: Sequence[ir.Value], boundary: Boundary, compared: Collection[str] = ()) -> Region:
    """The region that ends in some values; a NotVerified where it is too large, or holds a graph."""
    nodes, inputs = list[ir.Node](), dict[str, ir.Value]()
    sizes, constants = dict[str, Dims](), dict[str, ir.TensorProtocol]()
    done, pending = set[ir.Node](), [(each, False) for each in results]
    while pending:
        value, visited = pending.pop()
        node, name = value.producer(), str(value.name)
        if value in boundary.stops and value not in results:
            inputs[name] = value
        elif node is None:
            if (tensor := constant(value)) is None:
                inputs[name] = value
            else:
                constants[name] = tensor
        elif (known := _outer_size(node, boundary)) is not None:
            sizes[name] = known
        elif visited:
            if node not in done:
                done.add(node)
                nodes.append(node)
        elif node not in done:
            if len(nodes) + len(pending) > _MAX_NODES:
                raise NotVerified("more nodes than can be checked lie between Q and the result.")
            pending.append((value, True))
            pending.extend((each, False) for each in reversed(node.inputs) if each is not None)
    if any(each.type == ir.AttributeType.GRAPH for node in nodes for each in node.attributes.values()):
        raise NotVerified("a control-flow operator lies between Q and the result.")
    key = _key(nodes, results, sizes, boundary)
    tensors = [(name, each) for name, each in constants.items() if key not in compared]
    return Region(
        nodes=tuple(ir.serde.serialize_node(node) for node in nodes if key not in compared),
        constants=tuple(
            ir.serde.serialize_tensor(ir.Tensor(each.numpy(), each.dtype, name=name))
            for name, each in tensors
        ),
        inputs=inputs,
        sizes=sizes,
        results=tuple(str(each.name) for each in results),
        key=key,
    )


def mask_stops(masks: Iterable[ir.Value]) -> dict[ir.Value, float | None]:
    """What is drawn in the place of masks, with the spread of its numbers; None: numbers as masks have them.

    A mask is computed from the inputs of the graph where that is cheap. What a matmul adds to it is drawn as
    plain numbers: it is a bias, and hides no key.
    """
    stops = dict[ir.Value, float | None]()
    for mask in masks:
        pending, seen, drawn = [mask], set[ir.Value](), dict[ir.Value, float | None]()
        while pending:
            value = pending.pop()
            node = value.producer()
            if node is None or value in seen:
                continue
            seen.add(value)
            if is_op(node, *_MATMULS):
                drawn[value] = 1.0
            elif len(seen) > _MAX_MASK_NODES or node.domain != "" or is_op(node, "If", "Loop", "Scan"):
                drawn = {mask: None}
                break
            elif not is_op(node, "Shape"):
                pending.extend(each for each in node.inputs if each is not None)
        stops |= drawn
    return stops


def _outer_size(node: ir.Node, boundary: Boundary) -> Dims | None:
    """What a Shape node gives, where that is known without its input."""
    source = node.inputs[0] if is_op(node, "Shape") else None
    known = None if source is None or source in boundary.stops else boundary.dims_of(source)
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
    return None if known is None else known[start:end]


def _key(
    nodes: Sequence[ir.Node], results: Sequence[ir.Value], sizes: Mapping[str, Dims], boundary: Boundary
) -> str:
    digest = hashlib.sha256()
    numbers, symbols = dict[ir.Value, int](), dict[str, str]()

    def put(*parts: object) -> None:
        digest.update("\0".join(map(str, parts)).encode() + b"\n")

    def size(dim: object) -> str:
        # The same expression in other names is the same structure.
        return _NAME.sub(lambda found: symbols.setdefault(found[0], f"d{len(symbols)}"), str(dim))

    def number(value: ir.Value | None) -> str:
        if value is None:
            return "-"
        if value not in numbers:
            numbers[value] = len(numbers)
            tensor = constant(value) if value.producer() is None else None
            if tensor is not None:
                put("constant", tensor.dtype, tensor.shape, hashlib.sha256(tensor.tobytes()).hexdigest())
            else:
                known = sizes.get(str(value.name)) or boundary.dims_of(value) or ()
                put("input", value.dtype, *map(size, known), value.name in sizes)
        return str(numbers[value])

    for node in nodes:
        attributes = [str(ir.serde.serialize_attribute(each)) for _, each in sorted(node.attributes.items())]
        put(node.domain, node.op_type, *(number(each) for each in node.inputs), *attributes)
        for value in node.outputs:
            numbers[value] = len(numbers)
            put(value.dtype)
    put("results", *map(number, results))
    return digest.hexdigest()


def compare(old: Region, new: Region, boundary: Boundary, opset: int) -> bool:
    """Run both regions on drawn inputs; a NotFused where they differ, or the original cannot be run.

    Returns:
        Whether fully masked queries were NaN and are not any more.
    """
    first, second = _evaluator(old, opset), _evaluator(new, max(opset, ATTENTION_OPSET))
    inputs, outer = {**old.inputs, **new.inputs}, {**old.sizes, **new.sizes}
    ran, filled, failure = 0, False, ""
    wanted = {name: boundary.dims_of(value, drawn=True) for name, value in inputs.items()} | outer
    if None in wanted.values():
        raise NotVerified("the number of axes of an input is not known.")
    for choice in _SIZES:
        try:
            numbers = _numbers([each or () for each in wanted.values()], choice)
        except ValueError as error:
            failure = str(error)
            continue
        shapes = {
            name: tuple(each if isinstance(each, int) else numbers[each] for each in several or ())
            for name, several in wanted.items()
        }
        drawn = {name: shapes[name] for name in inputs}
        count = max((math.prod(each[:-1]) * each[-2] for each in drawn.values() if len(each) > 1), default=0)
        if count > _MAX_SCORES:
            raise NotVerified("the fixed sizes are too large.", got=count)
        for draw in (0, 1, 2, 3) if count < _MANY_SCORES else (1,):
            random = np.random.default_rng(draw)
            feeds = {
                name: _drawn(random, draw, inputs[name], shape, boundary.spread.get(name))
                for name, shape in drawn.items()
            }
            feeds |= {name: np.array(shapes[name], np.int64) for name in outer}
            try:
                want = first(feeds)
            except _Failed as error:
                failure = str(error)
                break
            try:
                got = second(feeds)
            except _Failed as error:
                what = "Left as it was: the Attention node fails where the file runs."
                raise NotFused(what, got=error) from error
            for pair in zip(want, got, strict=True):
                rounding = _ROUNDING.get(pair[0].dtype, 0.1) * (_SHARP if draw == 2 else 1.0)
                filled |= _check(*pair, rounding if draw < 3 else max(rounding, _EXTREME_ROUNDING))
        else:
            ran += 1
        if ran == _ENOUGH or (ran and not numbers):
            break
    if not ran:
        raise NotVerified("the original nodes could not be run on drawn inputs.", got=failure[:200])
    return filled


def _numbers(wanted: Iterable[Dims], choice: Sequence[int]) -> dict[str, int]:
    """Numbers for the sizes of a graph; the names in them get those of the choice, in their order."""
    bound, names = dict[str, int](), dict[str, list[str]]()
    for dim in (each for several in wanted for each in several if isinstance(each, str)):
        names[dim] = [each for each in _NAME.findall(dim) if each not in _FUNCTIONS]
        for name in names[dim]:
            bound.setdefault(name, choice[len(bound) % len(choice)])
    for _ in range(_ENLARGED):
        found = {dim: bound[dim] if dim in bound else ir.SymbolicDim(dim).evaluate(bound) for dim in names}
        small = [dim for dim, size in found.items() if not isinstance(size, int) or size < 1]
        if not small:
            return found  # type: ignore[return-value]
        # What a convolution leaves of a length may be nothing: `(L - 5) // 8` needs a larger L.
        for name in {each for dim in small for each in names[dim]}:
            bound[name] *= 4
    raise ValueError(f"The size {small[0]} is {found[small[0]]}.")


def _evaluator(region: Region, opset: int) -> Callable[[_Feeds], list[np.ndarray]]:
    """A region in ONNX's reference evaluator: a function that raises `_Failed` where an operator fails."""
    names = [*region.inputs, *region.sizes]
    inputs, outputs = (
        [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in some]
        for some in (names, region.results)
    )
    graph = onnx.helper.make_graph(region.nodes, "region", inputs, outputs, region.constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    try:
        evaluator = reference_evaluator(model)
    except Exception as error:  # an operator that it does not have
        raise NotVerified("ONNX's evaluator lacks an operator.", got=in_words(error)[:200]) from error

    def run(feeds: _Feeds) -> list[np.ndarray]:
        try:
            with np.errstate(all="ignore"):
                return [
                    np.asarray(each) for each in evaluator.run(None, {name: feeds[name] for name in names})
                ]
        except Exception as error:
            raise _Failed(in_words(error)[:300]) from error

    return run


def _drawn(
    random: np.random.Generator, draw: int, value: ir.Value, shape: tuple[int, ...], spread: float | None
) -> np.ndarray:
    """Numbers for one input: plain ones, masks with fully masked queries, sharp scores, extreme ones."""
    dtype = (value.dtype or ir.DataType.FLOAT).numpy()
    if value.dtype == ir.DataType.BOOL:
        shown = random.random(shape) < (0.9, 0.5, 0.7, 0.5)[draw]
        if draw and len(shape) > 1:
            shown[..., random.integers(shape[-2]), :] = draw == 2
            shown[..., random.integers(shape[-2]), :] = False
        return shown
    if value.dtype is not None and not value.dtype.is_floating_point():
        # Integers are mostly masks of 0 and 1: padded anywhere, on the left, one batch element as a whole.
        shown = random.random(shape) < 0.7
        if draw == 1 and shape:
            shown = np.broadcast_to(np.arange(shape[-1]) >= shape[-1] // 2, shape)
        elif draw == 3 and shape:
            shown[0] = False
        return shown.astype(dtype)
    if spread == FACTOR:
        return random.uniform(0.5, 2.0, shape).astype(dtype)
    if spread is not None:
        # Beyond 16, a score changes the lowest number of float16.
        sharp = _SHARP_HALF if dtype == np.float16 else _SHARP
        if draw == 3 and dtype.itemsize > 2 and spread != 1.0:
            # Whole multiples of one number: rounding cannot part equal scores, nor bring others together.
            return (random.integers(-1, 2, shape) * spread * _EXTREME**0.5).astype(dtype)
        return (random.standard_normal(shape) * spread * (1.0, 1.0, sharp**0.5, 1.0)[draw]).astype(dtype)
    if draw == 2:
        return random.integers(0, 2, shape).astype(dtype)
    numbers = random.standard_normal(shape)
    if draw:  # 0 and the lowest number or -inf, as masks have them, and one query with the lowest number only
        lowest = float(ml_dtypes.finfo(dtype).min)
        numbers = np.where(random.random(shape) < 0.4, lowest if draw == 1 else -math.inf, 0.0)
        if len(shape) > 1:
            numbers[..., random.integers(shape[-2]), :] = lowest
    return numbers.astype(dtype)


def _check(want: np.ndarray, got: np.ndarray, tolerance: float) -> bool:
    """Compare two results, and say whether NaN of the first are 0 in the second."""
    if want.shape != got.shape or want.dtype != got.dtype:
        got_what = f"{want.dtype}{list(want.shape)} and {got.dtype}{list(got.shape)}"
        raise NotFused("Left as it was: the Attention node gives another shape or type.", got=got_what)
    before, after = want.astype(np.float64), got.astype(np.float64)
    empty = np.isnan(before)
    alike = (before == after) | empty
    with np.errstate(invalid="ignore"):
        scale = max(1.0, float(np.max(np.abs(before), where=np.isfinite(before), initial=0.0)))
        error = np.where(alike, 0.0, np.abs(before - after) / scale)
    worst = float(np.max(error, initial=0.0))
    if not worst <= tolerance:
        what = f"relative error {worst:.2g} on drawn inputs"
        raise NotFused("Left as it was: the Attention node does not compute the same.", got=what)
    return bool((empty & (after == 0)).any())
