"""Verify a rewritten attention: the old and the new nodes compute the same on drawn inputs.

Both are taken from the graph between Q, K, V and the masks on one side and the result on the other, and run
in ONNX's reference evaluator at small sizes. Equal structures are run once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from mha_deploy.graph.fuse.mask_pattern import is_score
from mha_deploy.graph.fuse.spelling import Spelling
from mha_deploy.graph.fuse.values import (
    ATTENTION_OPSET,
    OF_RUN,
    NotFused,
    Size,
    in_words,
    is_of_run,
    likely_size,
)
from mha_deploy.graph.ir import (
    constant,
    dims,
    graphs_in,
    inner_graphs,
    is_op,
    nodes_behind,
    reference_evaluator,
)
from mha_deploy.graph.roles import MATMULS, RANDOM

Dims = tuple[int | str, ...]
"""The sizes of a tensor; a dynamic one as the expression that the file gives for it."""

_MAX_NODES = 512
_MAX_MASK_NODES = 64
_MAX_SCORES = 2**28  # elements; a static graph larger than that takes minutes in the evaluator
_MANY_SCORES = 2**22  # beyond that, one draw has to do
_FOLDED = 2**16  # from here on, what is computed from constants alone is computed once, not for every draw
_SMALL_SIZE, _BEYOND, _MAX_AXES = 256, 2**30, 8  # sizes of larger ones are made smaller, up to these
_MAX_CONSTANT = 2**28  # elements of all that is computed from constants alone, such as a triangle of ones
# Where the computation of a mask is not followed further: the numbers of these are as good as drawn ones.
_MATMULS = (*MATMULS, "Attention", "LSTM", "GRU")
# Sizes of the dynamic axes, in the order of their names: distinct odd ones first. A graph may need sizes that
# divide each other, that are equal, or of which some are 1.
_SIZES: list[tuple[int, ...]] = [(3, 5, 7, 2, 9, 11), (2, 7, 5, 3, 11, 9), (1, 4, 4, 4, 4, 4)]
_SIZES += [(4, 1, 4, 4, 4, 4), (4,), (12,)]
_SIZES += [(size,) for size in (3, *range(5, 12), *range(13, 17), 2, 1)]  # as the mask of an example may need
_PAIRS = list(itertools.product(range(12, 0, -1), repeat=2))  # where none of those runs, as of a traced file
_ENOUGH = 2  # choices of sizes that must run, where so many do
_ENLARGED = 6  # attempts at making sizes positive that follow from others, each with four times the others
# Rounding of both sides, relative to the largest result; scores far from 0 are rounded more coarsely.
_ROUNDING = {np.dtype(np.float64): 1e-11, np.dtype(np.float32): 3e-5, np.dtype(np.float16): 2e-2}
_SHARP, _SHARP_HALF = 20.0, 1.5
# The rounding of the file itself, as of scores beside a mask of -10000: so much of it may be between the two.
_NOISE_FACTOR, _MOST_NOISE = 4.0, 1e-3
_NEARBY = 4  # further draws that tell how coarse it is
_MOST_POSITIONS = 8  # numbers that are tried for an integer that sizes follow from
EXTREME = 5e4  # scores of the last draw: far from each other, and above any fill
_EXTREME_ROUNDING = 0.1
FACTOR = 0.0  # the spread of what the scores are multiplied by or divided by: numbers around 1
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_CALL = re.compile(r"(\w+)\(")
_FUNCTIONS = frozenset({"Min", "Max", "floor", "ceiling", "Mod"})


class _Failed(Exception):
    """The evaluator could not run a region."""


class NotVerified(NotFused):
    """The comparison could not be done."""

    def __init__(self, why: str, *, got: object = None) -> None:
        super().__init__(f"Not verified: {why}", got=got, hint="--no-verify fuses it unverified")


class NewFails(NotFused):
    """The new nodes cannot be run where those of the file can."""


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Where the region of an attention begins."""

    # what is drawn, with the standard deviation of its numbers; `FACTOR` for positive ones, None for a mask
    drawn: Mapping[ir.Value, float | None]
    dims: Mapping[ir.Value, Dims]  # sizes of Q, K, V and masks
    extreme: float = EXTREME  # scores of the last draw are multiples of about this
    # Whether sizes that a run computes are chosen where they are read, as those of inputs are.
    chosen: bool = False
    # What such a size is where nothing is broadcast: one number, wherever it is drawn or read.
    likely: Mapping[Size, Size] = field(default_factory=dict)

    def dims_of(self, value: ir.Value, *, drawn: bool = False) -> Dims | None:
        """The sizes of a value; None where the file does not know one of them.

        One of a value that is drawn gets a name of its own. A name that shape inference made up is no size.
        """
        if value in self.dims:
            return self.dims[value]
        found = list[int | str]()
        for axis, given in enumerate(dims(value)):
            size = likely_size(given, self.likely)
            known = size is not None and _FUNCTIONS.issuperset(_CALL.findall(str(size)))
            if not drawn and (not known or (is_of_run(size) and not (self.chosen and OF_RUN in str(size)))):
                return None
            found.append(size if size is not None and known else f"unknown.{id(value)}.{axis}")
        return None if value.shape is None else tuple(found)


class Region:
    """The nodes that compute some values from a boundary. Equal structures have equal names and keys."""

    def __init__(
        self,
        results: Sequence[ir.Value],
        boundary: Boundary,
        spelling: Spelling,
        *,
        in_file: bool,
        instead: Mapping[ir.Value, ir.Value] | None = None,
    ) -> None:
        """Take it from the graph as it is, with some values `instead` of others, or as the file has it."""
        instead = instead or {}
        # Its parts in order, which say what it computes: inputs, constants and nodes, by the names here.
        parts = list[object]()
        self._constants = list[tuple[str, ir.TensorProtocol]]()
        self._nodes = list[tuple[ir.Node, list[str], list[str]]]()
        self.inputs = dict[ir.Value, str]()  # what the nodes are computed from, with its name here
        self.sizes = dict[str, Dims]()  # results of Shape nodes whose input is outside: inputs as well
        self.computed = list[ir.Value]()  # what its nodes compute
        self.fixed = set[str]()  # its constants, and what is computed from them alone
        self.made = 0  # how many numbers the latter are
        self.from_constants = set[ir.Value]()  # the same as values
        results = [spelling.original(each) if in_file else instead.get(each, each) for each in results]
        names, symbols, pending = dict[ir.Value, str](), dict[str, str](), [(each, False) for each in results]
        fresh = (f"v{count}" for count in itertools.count())

        def add_input(name: str, wanted: Dims, *more: object) -> None:
            # The same expressions in other names are the same structure.
            text = _NAME.sub(lambda found: symbols.setdefault(found[0], f"d{len(symbols)}"), str(wanted))
            parts.append((name, text, *more))

        while pending:
            value, visited = pending.pop()
            own = spelling.original(value)
            if value in names:
                continue
            if (other := instead.get(value)) is not None:
                if other in names:
                    names[value] = names[other]
                else:
                    pending += [(value, False), (other, False)]
                continue
            if own is not value and (in_file or own in boundary.drawn):
                if own not in names:
                    pending += [(value, False), (own, False)]
                else:
                    names[value] = names[own]
                continue
            node, tensor = value.producer(), constant(value)
            if (value in boundary.drawn and value not in results) or (node is None and tensor is None):
                self.inputs[value] = names[value] = next(fresh)
                default = _default_of(value)
                given = None if default is None else hashlib.sha256(default.tobytes()).hexdigest()
                add_input(names[value], boundary.dims_of(value) or (), value.dtype, given)
            elif node is None and tensor is not None:
                names[value] = next(fresh)
                self.fixed.add(names[value])
                self._constants.append((names[value], tensor))
                parts.append((names[value], tensor.dtype, *tensor.shape.numpy(), spelling.digest(tensor)))
            elif node is not None and (known := _outer_size(node, boundary, spelling)) is not None:
                names[value] = next(fresh)
                self.sizes[names[value]] = known
                add_input(names[value], known)
            elif node is not None and visited:
                inputs = spelling.inputs_of(node)
                new = {each: next(fresh) for each in node.outputs}
                read = ["" if each is None else names[each] for each in inputs]
                written = ["" if each.name == "" else new[each] for each in node.outputs]
                self._nodes.append((node, read, written))
                parts += (node.domain, node.op_type, read, written)
                parts += sorted((name, _text(each)) for name, each in node.attributes.items())
                names |= {each: name for each, name in new.items() if each not in names}  # one may be drawn
                self.computed += node.outputs
                if self.fixed.issuperset(filter(None, read)) and not is_op(node, *RANDOM):
                    self.fixed.update(written)
                    self.from_constants.update(node.outputs)
                    self.made += sum(math.prod(_shape(dims(each), {})) for each in node.outputs)
            elif node is not None:
                if inner_graphs(node):
                    raise NotVerified("a control-flow operator lies between Q and the result.")
                if len(self._nodes) + len(pending) > _MAX_NODES:
                    raise NotVerified("more nodes than can be checked lie between Q and the result.")
                pending.append((value, True))
                inputs = spelling.inputs_of(node)
                pending.extend((each, False) for each in reversed(inputs) if each is not None)
        self._results = [names[each] for each in results]
        self.key = hashlib.sha256(repr((parts, self._results)).encode()).hexdigest()

    def shrink(self) -> bool:
        """Let large sizes that are constants be smaller ones; whether there are any.

        A triangle of 12,000 rows is sliced to the length of the scores, and so is one of 256.
        """
        before, self._constants = self._constants, [(name, _smaller(each)) for name, each in self._constants]
        self.computed = [each for each in self.computed if each not in self.from_constants]
        return any(one is not other for (_, one), (_, other) in zip(before, self._constants, strict=True))

    @functools.cached_property
    def graph(self) -> onnx.GraphProto:
        """The nodes as a graph."""
        given = (*self.inputs.values(), *self.sizes)
        graph = onnx.GraphProto(
            name="region",
            input=(onnx.ValueInfoProto(name=name) for name in given),
            output=(onnx.ValueInfoProto(name=name) for name in self._results),
        )
        for name, tensor in self._constants:
            held = ir.Tensor(tensor.numpy(), tensor.dtype, name=name)
            graph.initializer.append(ir.serde.serialize_tensor(held))
        for node, read, written in self._nodes:
            attributes = map(ir.serde.serialize_attribute, node.attributes.values())
            graph.node.add(
                op_type=node.op_type, domain=node.domain, input=read, output=written, attribute=attributes
            )
        return graph


def _text(attribute: ir.Attr) -> str:
    """What an attribute holds, as text."""
    if attribute.type in (ir.AttributeType.INT, ir.AttributeType.INTS, ir.AttributeType.STRING):
        return repr((attribute.type, attribute.value))
    return ir.serde.serialize_attribute(attribute).SerializeToString(deterministic=True).hex()


def _smaller(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """The numbers of a constant with large sizes made small; ends of slices beyond every size stay."""
    if tensor.dtype not in (ir.DataType.INT64, ir.DataType.INT32) or tensor.size > _MAX_AXES:
        return tensor
    numbers = tensor.numpy()
    is_size = (numbers > _SMALL_SIZE) & (numbers < _BEYOND)
    if not is_size.any():
        return tensor
    return ir.Tensor(np.where(is_size, _SMALL_SIZE, numbers).astype(numbers.dtype))


def _default_of(value: ir.Value) -> ir.TensorProtocol | None:
    """The numbers of an initializer that is an input as well, for which a caller may give others."""
    return value.const_value if value.is_graph_input() else None


def mask_stops(masks: Iterable[ir.Value]) -> dict[ir.Value, float | None]:
    """What is drawn in the place of masks, with the spread of its numbers; None: numbers as masks have them.

    A mask is computed from the inputs of the graph where that is cheap. What a matmul adds to it is drawn as
    plain numbers: it is a bias, and hides no key.
    """
    stops = dict[ir.Value, float | None]()
    for mask in masks:
        behind = nodes_behind([mask], lambda node: () if is_op(node, *_MATMULS, "Shape") else node.inputs)
        nodes = list(itertools.islice(behind, _MAX_MASK_NODES + 1))
        if len(nodes) > _MAX_MASK_NODES or any(node.domain != "" or graphs_in(node) for node in nodes):
            stops[mask] = 1.0 if is_score(mask) else None
        else:
            stops |= {value: 1.0 for node in nodes if is_op(node, *_MATMULS) for value in node.outputs}
    return stops


def _outer_size(node: ir.Node, boundary: Boundary, spelling: Spelling) -> Dims | None:
    """What a Shape node gives, where that is known without its input."""
    source = spelling.inputs_of(node)[0] if is_op(node, "Shape") else None
    known = None if source is None or source in boundary.drawn else boundary.dims_of(source)
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
    return None if known is None else known[start:end]


def compare(old: Region, new: Region, boundary: Boundary, opset: int) -> bool:
    """Run both regions on drawn inputs: whether fully masked queries were NaN and are not any more.

    A NotFused where they differ, or the original cannot be run.
    """
    made = max(old.made, new.made)
    if made > _MAX_CONSTANT and not (old.shrink() | new.shrink()):
        raise NotVerified("what is computed from constants is too large.", got=f"{made:,} numbers")
    first, second = _evaluator(old, opset), _evaluator(new, max(opset, ATTENTION_OPSET))
    inputs = {value: boundary.dims_of(value, drawn=True) for value in (*old.inputs, *new.inputs)}
    if None in inputs.values():
        raise NotVerified("the number of axes of an input is not known.")
    wanted = [each or () for each in (*inputs.values(), *old.sizes.values(), *new.sizes.values())]
    ran, compared, filled, failure = 0, False, False, ""
    choices = [(choice, False) for choice in _SIZES]
    if any(_is_sum(size) for each in wanted for size in each):
        choices = [(choice, True) for choice in _SIZES[:_ENOUGH]] + choices
    enough, few = _ENOUGH + len(choices) - len(_SIZES), len(choices)
    for tried, (choice, joined) in enumerate((*choices, *((pair, False) for pair in _PAIRS)), 1):
        try:
            numbers = _numbers(wanted, choice, joined)
        except ValueError as error:
            failure = str(error)
            continue
        shapes = {value: _shape(each or (), numbers) for value, each in inputs.items()}
        count = max((math.prod(each[:-1]) * each[-2] for each in shapes.values() if len(each) > 1), default=0)
        between = (math.prod(_shape(dims(each), numbers)) for each in (*old.computed, *new.computed))
        count = max(count, *between)
        if count > _MAX_SCORES:
            raise NotVerified("the fixed sizes are too large.", got=count)
        for draw in (0, 1, 2, 3) if count < _MANY_SCORES else (1,):
            random = np.random.default_rng(draw)
            drawn = {
                value: _draw(random, draw, value, shape, boundary.drawn.get(value), boundary.extreme)
                for value, shape in shapes.items()
            }
            try:
                drawn, want = _first_that_runs(first, drawn, numbers)
            except _Failed as error:
                failure = str(error)
                break
            if not all(each.size for each in want):
                failure = "the result is empty"  # an axis of one is broadcast to one of none
                break
            try:
                got = second(drawn, numbers)
            except _Failed as error:
                raise NewFails("The new node fails where the file runs.", got=error) from error
            for at, pair in enumerate(zip(want, got, strict=True)):
                rounding = _ROUNDING.get(pair[0].dtype, 0.1) * (_SHARP if draw == 2 else 1.0)
                rounding = rounding if draw < 3 else max(rounding, _EXTREME_ROUNDING)
                try:
                    filled |= _check(*pair, rounding)
                except NotFused as refusal:
                    try:
                        exact = _in_double(old, drawn, numbers, opset)[at]
                    except _Failed:
                        raise refusal from None
                    try:
                        filled |= _check(*pair, rounding, _noise(pair[0], exact))
                    except NotFused:
                        noise = _noise_nearby(old, new, boundary, drawn, numbers, opset, at, rounding)
                        filled |= _check(*pair, rounding, noise)
                compared |= not np.isnan(pair[0].astype(np.float64)).all()
        else:
            ran += 1
        if ran == enough or not numbers or (ran and tried >= few):
            break
    if not ran or not compared:
        what = "the original nodes could not be run on drawn inputs."
        raise NotVerified(what, got=failure[:200] or "every result is NaN")
    return filled


def _first_that_runs(
    evaluator: Callable[[Mapping[ir.Value, np.ndarray], Mapping[str, int]], list[np.ndarray]],
    drawn: dict[ir.Value, np.ndarray],
    numbers: Mapping[str, int],
) -> tuple[dict[ir.Value, np.ndarray], list[np.ndarray]]:
    """What was drawn, and the results. A single integer may be a position that sizes follow from.

    So it gets other numbers where the first one does not run.
    """
    try:
        return drawn, evaluator(drawn, numbers)
    except _Failed as error:
        positions = {
            value: each for value, each in drawn.items() if each.size == 1 and each.dtype.kind == "i"
        }
        for position in range(_MOST_POSITIONS if positions else 0):
            moved = {value: np.full_like(each, position) for value, each in positions.items()}
            with contextlib.suppress(_Failed):
                return drawn | moved, evaluator(drawn | moved, numbers)  # type: ignore[operator]
        raise error


def _shape(wanted: Sequence[int | str | None], numbers: Mapping[str, int]) -> tuple[int, ...]:
    """Sizes as numbers; 1 for one that is not known."""
    return tuple(each if isinstance(each, int) else numbers.get(str(each), 1) for each in wanted)


def _is_sum(size: int | str) -> bool:
    """Whether a size is a sum, as the keys behind a past are."""
    return " + " in str(size) and "*" not in str(size)


def _numbers(wanted: Iterable[Dims], choice: Sequence[int], joined: bool) -> dict[str, int]:
    """Numbers for the sizes of a graph; the names in them get those of the choice, in their order.

    `joined`: a name that is in no sum gets what the sum of others is, as the length of a mask beside a past.
    """
    bound, names = dict[str, int](), dict[str, list[str]]()
    for dim in (each for several in wanted for each in several if isinstance(each, str)):
        names[dim] = [each for each in _NAME.findall(dim) if each not in _FUNCTIONS]
        for name in names[dim]:
            bound.setdefault(name, choice[len(bound) % len(choice)])
    if joined:
        sums = [dim for dim in names if _is_sum(dim)]
        parts = {name for dim in sums for name in names[dim]}
        total = ir.SymbolicDim(sums[0]).evaluate(bound)
        bound |= dict.fromkeys(bound.keys() - parts, total if isinstance(total, int) else 1)
    for _ in range(_ENLARGED):
        found = {dim: bound[dim] if dim in bound else ir.SymbolicDim(dim).evaluate(bound) for dim in names}
        small = [dim for dim, size in found.items() if not isinstance(size, int) or size < 1]
        if not small:
            return found  # type: ignore[return-value]
        # What a convolution leaves of a length may be nothing: `(L - 5) // 8` needs a larger L.
        for name in {each for dim in small for each in names[dim]}:
            bound[name] *= 4
    raise ValueError(f"The size {small[0]} is {found[small[0]]}.")


def _evaluator(
    region: Region, opset: int
) -> Callable[[Mapping[ir.Value, np.ndarray], Mapping[str, int]], list[np.ndarray]]:
    """A region in ONNX's reference evaluator: a function that raises `_Failed` where an operator fails."""
    opsets = [onnx.helper.make_opsetid("", opset)]
    graph, folded = onnx.GraphProto(), dict[str, np.ndarray]()
    graph.CopyFrom(region.graph)
    del graph.node[:]
    later = [each for each in region.graph.node if not region.fixed.issuperset(each.output)]
    try:
        if is_large := region.made > _FOLDED:
            folded = _folded(region, {name for each in later for name in each.input}, opsets)
        graph.node.extend(later if is_large else region.graph.node)
        graph.input.extend(onnx.ValueInfoProto(name=name) for name in folded)
        evaluator = reference_evaluator(onnx.helper.make_model(graph, opset_imports=opsets))
    except Exception as error:  # an operator that it does not have
        raise NotVerified("ONNX's evaluator lacks an operator.", got=in_words(error)[:200]) from error

    def run(drawn: Mapping[ir.Value, np.ndarray], numbers: Mapping[str, int]) -> list[np.ndarray]:
        feeds = {name: drawn[value] for value, name in region.inputs.items()}
        feeds |= {name: np.array(_shape(each, numbers), np.int64) for name, each in region.sizes.items()}
        feeds |= folded
        try:
            with np.errstate(all="ignore"):
                return [np.asarray(each) for each in evaluator.run(None, feeds)]
        except Exception as error:
            # The evaluator wraps what NumPy says of sizes that do not match.
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            raise _Failed(in_words(cause)[:300]) from error

    return run


def _folded(
    region: Region, wanted: Collection[str], opsets: Sequence[onnx.OperatorSetIdProto]
) -> dict[str, np.ndarray]:
    """What a region computes from constants alone, once for all inputs; what is not `wanted` is let go."""
    left = Counter(name for each in region.graph.node for name in each.input)
    values = {each.name: onnx.numpy_helper.to_array(each) for each in region.graph.initializer}
    made = set[str]()
    wanted = {*wanted, *(each.name for each in region.graph.output)}
    for node in region.graph.node:
        if not region.fixed.issuperset(node.output):
            continue
        inputs, outputs = list(filter(None, node.input)), list(filter(None, node.output))
        one = onnx.helper.make_graph(
            [node],
            "node",
            [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(inputs)],
            [onnx.ValueInfoProto(name=name) for name in outputs],
        )
        evaluator = reference_evaluator(onnx.helper.make_model(one, opset_imports=list(opsets)))
        with np.errstate(all="ignore"):
            results = evaluator.run(None, {name: values[name] for name in inputs})
        values |= dict(zip(outputs, cast("list[np.ndarray]", results), strict=True))
        made.update(outputs)
        left.subtract(inputs)
        for name in {*inputs, *outputs}:
            if name in made and left[name] == 0 and name not in wanted:
                del values[name]
    return {name: values[name] for name in made & values.keys() & set(wanted)}


def _draw(
    random: np.random.Generator,
    draw: int,
    value: ir.Value,
    shape: tuple[int, ...],
    spread: float | None,
    extreme: float,
) -> np.ndarray:
    """Numbers for one input: plain ones, masks with fully masked queries, sharp scores, extreme ones."""
    dtype = (value.dtype or ir.DataType.FLOAT).numpy()
    if (default := _default_of(value)) is not None:
        return default.numpy()  # it may hold axes or sizes, for which other numbers mean nothing
    few = 1 / max((2, *shape[-1:]))  # of two masks that each show few keys, together mostly none is shown
    if value.dtype == ir.DataType.BOOL:
        shown = random.random(shape) < (0.9, 0.5, 0.7, few)[draw]
        for all_shown in (draw == 2, False) if draw else ():
            _set_row(random, shown, all_shown)
        return shown
    if value.dtype is not None and not value.dtype.is_floating_point():
        # Integers are mostly masks of 0 and 1: padded anywhere, on the left, one batch element as a whole.
        shown = random.random(shape) < (0.7, 0.7, 0.5, few)[draw]
        if draw == 1 and shape:
            shown = np.broadcast_to(np.arange(shape[-1]) >= shape[-1] // 2, shape)
        elif draw == 3 and shape and shape[0] > 1:
            shown[0] = False
        return shown.astype(dtype)
    if spread == FACTOR:
        return random.uniform(0.5, 2.0, shape).astype(dtype)
    if spread is not None:
        # Beyond 16, a score changes the lowest number of float16.
        sharp = _SHARP_HALF if dtype == np.float16 else _SHARP
        if draw == 3 and dtype.itemsize > 2 and spread != 1.0:
            # Whole multiples of one number: rounding cannot part equal scores, nor bring others together.
            return (random.integers(-1, 2, shape) * spread * extreme**0.5).astype(dtype)
        return (random.standard_normal(shape) * spread * (1.0, 1.0, sharp**0.5, 1.0)[draw]).astype(dtype)
    if draw == 2:
        return (random.random(shape) < max(few, 0.35)).astype(dtype)
    numbers = random.standard_normal(shape)
    if draw:  # the lowest number or -inf, as masks have them, and one query with the lowest number only
        lowest = float(ml_dtypes.finfo(dtype).min)
        masked, far = ((0.6, lowest), (0.4, -math.inf))[draw == 3]
        others = random.random(shape) if draw == 1 else np.zeros(shape)
        numbers = np.where(random.random(shape) < masked, far, others)
        _set_row(random, numbers, lowest)
    return numbers.astype(dtype)


def _set_row(random: np.random.Generator, mask: np.ndarray, number: float) -> None:
    """Set all keys of one query, wherever its axis is; not of a mask that all of them share."""
    rows = [axis for axis, size in enumerate(mask.shape[:-1]) if size > 1]
    if rows:
        np.moveaxis(mask, rows[-1], 0)[random.integers(mask.shape[rows[-1]])] = number


def _in_double(
    region: Region, drawn: Mapping[ir.Value, np.ndarray], numbers: Mapping[str, int], opset: int
) -> list[np.ndarray]:
    """What a region of float32 gives in float64, on the same numbers; `_Failed` where it cannot be run so."""
    single, double = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE
    graph = onnx.GraphProto()
    graph.CopyFrom(region.graph)

    def widen(tensor: onnx.TensorProto) -> None:
        if tensor.data_type == single:
            wide = onnx.numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(onnx.numpy_helper.from_array(wide, tensor.name))

    for tensor in graph.initializer:
        widen(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                widen(attribute.t)
            elif (node.op_type, attribute.name, attribute.i) == ("Cast", "to", single):
                attribute.i = double
    feeds = {name: drawn[value] for value, name in region.inputs.items()}
    feeds = {
        name: each.astype(np.float64) if each.dtype == np.float32 else each for name, each in feeds.items()
    }
    feeds |= {name: np.array(_shape(each, numbers), np.int64) for name, each in region.sizes.items()}
    opsets = [onnx.helper.make_opsetid("", opset)]
    try:
        with np.errstate(all="ignore"):
            found = reference_evaluator(onnx.helper.make_model(graph, opset_imports=opsets)).run(None, feeds)
    except Exception as error:  # as in `_evaluator`
        raise _Failed(in_words(error)[:300]) from error
    return [np.asarray(each) for each in cast("list[np.ndarray]", found)]


def _noise(rounded: np.ndarray, exact: np.ndarray) -> float:
    """The largest rounding of a result, relative to its largest number."""
    with np.errstate(invalid="ignore"):
        noise = np.abs(rounded.astype(np.float64) - exact) / _largest(rounded)
    return float(np.max(noise, where=np.isfinite(noise), initial=0.0))


def _noise_nearby(
    old: Region,
    new: Region,
    boundary: Boundary,
    drawn: Mapping[ir.Value, np.ndarray],
    numbers: Mapping[str, int],
    opset: int,
    at: int,
    rounding: float,
) -> float:
    """The largest rounding of one result of the file where its scores are slightly other ones.

    On a single draw the scores of a fully masked query, beside -10000, may all be rounded alike by luck, or
    hardly. 0 where both sides are not the same in float64: then it is not rounding that parts them.
    """
    first, noise = _evaluator(old, opset), 0.0
    random = np.random.default_rng(0)
    try:
        exact = _in_double(old, drawn, numbers, opset)[at]
        _check(exact, _in_double(new, drawn, numbers, max(opset, ATTENTION_OPSET))[at], rounding)
        for _ in range(_NEARBY):
            near = {
                value: (each * random.uniform(0.9, 1.1)).astype(each.dtype)
                if boundary.drawn.get(value) is not None and each.dtype.kind == "f"
                else each
                for value, each in drawn.items()
            }
            exact = _in_double(old, near, numbers, opset)[at]
            noise = max(noise, _noise(first(near, numbers)[at], exact))
    except (_Failed, NotFused):
        return 0.0
    return noise


def _largest(result: np.ndarray) -> float:
    """The largest finite number of a result, at least 1."""
    return max(1.0, float(np.max(np.abs(result), where=np.isfinite(result), initial=0.0)))


def _check(want: np.ndarray, got: np.ndarray, tolerance: float, noise: float = 0.0) -> bool:
    """Compare two results, and say whether NaN of the first are 0 in the second.

    `noise` is the rounding of the first, which the second may have in another order.
    """
    if want.shape != got.shape or want.dtype != got.dtype:
        got_what = f"{want.dtype}{list(want.shape)} and {got.dtype}{list(got.shape)}"
        raise NotFused("The new node gives another shape or type.", got=got_what)
    before, after = want.astype(np.float64), got.astype(np.float64)
    empty = np.isnan(before)
    # No attention of finite values is infinite: where the file is, its own exponentials overflow.
    alike = (before == after) | empty | (np.isinf(before) & np.isfinite(after))
    with np.errstate(invalid="ignore"):
        error = np.where(alike, 0.0, np.abs(before - after) / _largest(before))
    tolerance += _NOISE_FACTOR * noise if noise <= _MOST_NOISE else 0.0
    worst = float(np.max(error, initial=0.0))
    if not worst <= tolerance:
        what = f"relative error {worst:.2g} on drawn inputs"
        raise NotFused("The new node does not compute the same.", got=what)
    return bool((empty & (after == 0)).any())
