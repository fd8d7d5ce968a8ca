"""Bring other spellings of attention into the one that the recognizer reads, and back where it is not fused.

Every rewrite is local and gives one value a new producer. What it replaced is kept beside the graph: an
attention is compared with the nodes of the file, not with rewritten ones, and a rewritten value that is
still used in the end is computed by the nodes of the file again.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.fuse.mask_pattern import WEAKEST_FILL, Axes, is_not_negative, same_condition, same_value
from mha_deploy.graph.fuse.pattern import Alphabet, read_matmul, softmax_at
from mha_deploy.graph.fuse.values import (
    NO_END,
    NotFused,
    array_of,
    equation_of,
    folded,
    holds,
    inverse_of,
    is_pointwise,
    note_place,
    product,
    same_dims,
    scalar_of,
    sizes_of,
)
from mha_deploy.graph.ir import (
    NodeBuilder,
    TensorPart,
    constant,
    constant_ints,
    graph_of_node,
    input_at,
    is_op,
    made_by,
    nodes_behind,
    nodes_in,
    part_of,
    perm,
    rank,
)
from mha_deploy.graph.roles import IN_ORDER, MOVES
from mha_deploy.model.masking import ABSORBS_ANY

_MAX_DEPTH = 12  # of the nodes that a mask of zeros and ones is read through
_MOST_IN_CHUNKS = 256  # nodes that add up the chunks of a softmax
_MOST_BETWEEN = 64  # nodes that are searched for other masks
_MASKS = 1e3  # a number of at least this size is that of a mask
_LAYOUT = (*MOVES, "Expand", "Slice", "Gather", "Tile")


Rule = Callable[[ir.Node, NodeBuilder], ir.Value | None]
"""Gives the value that the result of a node may as well be."""


class Choice(NamedTuple):
    """A tensor of two numbers."""

    condition: ir.Value  # a boolean tensor that broadcasts to it
    true: float  # the number where it holds
    false: float  # the number elsewhere


class Spelling:
    """The rewritten values of a model."""

    def __init__(self, model: ir.Model, prefix: str) -> None:
        self._model = model
        self._old: dict[ir.Value, ir.Value] = {}  # by the new value
        self._inputs: dict[ir.Node, tuple[ir.Value | None, ...]] = {}  # of nodes that were taken out
        self._graphs: dict[ir.Node, ir.Graph | ir.Function] = {}  # where those were
        self._fused = set[ir.Node]()  # those that were taken out with an attention
        # what the graph has in the end, by graph and name, and by name alone
        self._named: dict[tuple[int | None, str | None], ir.Value] = {}
        self._new: dict[ir.Node, list[ir.Node]] = {}  # nodes that rewrites wrote, and what they replaced
        self._digests: dict[int, tuple[str, ir.TensorProtocol]] = {}
        for rules in (_RULES, _RULES_OF_RANKS):
            self._apply(rules, prefix)

    def _apply(self, rules: Mapping[str, Sequence[Rule]], prefix: str) -> None:
        ruled = [node for node in nodes_in(self._model.graph) if node.op_type in rules and node.domain == ""]
        for node in ruled:
            if node in self._inputs:
                continue
            builder = NodeBuilder(f"{prefix}/{len(self._old) + 1}")
            new = None
            for rule in rules[node.op_type]:
                if (new := rule(node, builder)) is not None:
                    break
            if new is not None:
                self._put(node, new, builder)
            elif builder.nodes:
                builder.live_nodes(())

    def __bool__(self) -> bool:
        """Whether anything was rewritten."""
        return bool(self._old)

    # -- What the nodes of the file are

    def original(self, value: ir.Value) -> ir.Value:
        """The value of the file that a rewritten one stands for; any other value itself."""
        while value in self._old:
            value = self._old[value]
        return value

    def inputs_of(self, node: ir.Node) -> Sequence[ir.Value | None]:
        """The inputs of a node, whether it is in the graph or was taken out."""
        return node.inputs if node.graph is not None else self._inputs.get(node, node.inputs)

    def in_file(self, node: ir.Node) -> ir.Node:
        """The node of the file that a node stands for."""
        return self._new[node][0] if node in self._new else node

    def drawn_in_file(self, drawn: Mapping[ir.Value, float | None]) -> dict[ir.Value, float | None]:
        """The same of values that the file has: a new one is drawn by what it is computed from."""
        found, pending = dict[ir.Value, float | None](), list(drawn.items())
        while pending:
            value, spread = pending.pop()
            node = value.producer()
            if value not in self._old and node is not None and node in self._new:
                given = () if is_op(node, "Shape") else node.inputs
                pending += [(each, spread) for each in given if each and constant(each) is None]
            else:
                found[self.original(value)] = spread
        return found

    def ends_of(self, value: ir.Value) -> tuple[list[ir.Value], set[ir.Value]]:
        """The values of the file that a rewrite makes of one that only it has; of any other value itself.

        Then what else it takes for them, without integers: those are sizes.
        """
        ends, others, pending, seen = list[ir.Value](), set[ir.Value](), [value], {value}
        while pending:
            each = pending.pop()
            made = self.original(each).producer()
            if made is None or made not in self._new:
                ends.append(each)
                continue
            for user, _ in each.uses():
                others.update(other for other in user.inputs if other is not None)
                pending += [result for result in user.outputs if result not in seen]
                seen.update(user.outputs)
        taken = (each for each in others - seen if constant(each) is None)
        return ends, {each for each in taken if each.dtype is not None and not each.dtype.is_integer()}

    def digest(self, tensor: ir.TensorProtocol) -> str:
        """A hash of the numbers of a constant, which many attentions may read."""
        key = id(tensor)
        if key not in self._digests:  # with the tensor, so that nothing else gets its identity
            self._digests[key] = (hashlib.sha256(tensor.tobytes()).hexdigest(), tensor)
        return self._digests[key][0]

    # -- Rewrite and restore

    def remember(self, node: ir.Node) -> None:
        """Keep what a node is that goes with an attention: another may be compared with it, or restored."""
        if self:
            self._inputs[node], self._graphs[node] = tuple(node.inputs), graph_of_node(node)
            self._fused.add(node)

    def _put(self, node: ir.Node, new: ir.Value, builder: NodeBuilder) -> None:
        """Let a new value stand for the result of a node."""
        old, graph = node.outputs[0], graph_of_node(node)
        own = builder.live_nodes([new])
        note_place(node, own)
        graph.insert_before(node, own)
        taken = list[ir.Node]()
        self._new |= dict.fromkeys(own, taken)
        new.type, new.shape = old.type, old.shape
        old.name, new.name = new.name, old.name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        self._old[new] = old
        pending = [node]
        while pending:
            dead = pending.pop()
            outputs = dead.outputs
            if dead.graph is None or any(each.uses() or each.is_graph_output() for each in outputs):
                continue
            self._inputs[dead], self._graphs[dead] = tuple(dead.inputs), graph_of_node(dead)
            taken.append(dead)
            pending += [made for each in dead.inputs if each and (made := each.producer())]
            dead.resize_inputs(0)
            graph_of_node(dead).remove(dead)

    def restore(self) -> None:
        """Compute every rewritten value that is still used as the file does."""
        whole = {each: True for each in map(id, self._new.values())}
        taker = {node: id(taken) for taken in self._new.values() for node in taken}
        for node, taken in reversed(self._new.items()):  # a rewritten rewrite is there where the later one is
            whole[id(taken)] &= node.graph is not None or whole.get(taker.get(node, 0), False)
        for new, old in reversed(self._old.items()):
            made = new.producer()
            if made is None or not whole[id(self._new[made])] or not (new.uses() or new.is_graph_output()):
                continue  # it is part of an attention now
            old.name, new.name = new.name, old.name
            self._bring_back(old)
            new.replace_all_uses_with(old, replace_graph_outputs=True)
            _remove(made)

    def _bring_back(self, value: ir.Value) -> None:
        pending = [value.producer()]
        while pending:
            node = pending.pop()
            if node is None or node not in self._inputs or node.graph is not None:
                continue
            graph, inputs = self._graphs[node], self._inputs[node]
            node.resize_inputs(len(inputs))
            for at, each in enumerate(inputs):
                node.replace_input_with(at, self._current(each, graph))
            graph.append(node)
            pending += [each.producer() for each in node.inputs if each is not None]

    def _current(self, value: ir.Value | None, graph: ir.Graph | ir.Function) -> ir.Value | None:
        """A value as it is in the graph now: what is fused took over its name."""
        node = None if value is None else value.producer()
        taken = node in self._inputs and node not in self._fused
        if value is None or node is None or node.graph is not None or taken:
            if value is not None and node is None and value.const_value is not None:
                _register(value, graph)
            return value
        if not self._named:
            made = (each for node in nodes_in(self._model.graph) for each in node.outputs)
            self._named = {(id(each.producer().graph), each.name): each for each in made}  # type: ignore[union-attr]
            self._named |= {(None, name): each for (_, name), each in self._named.items()}
        return self._named.get((id(graph), value.name)) or self._named.get((None, value.name), value)


def _register(value: ir.Value, graph: ir.Graph | ir.Function) -> None:
    """Put a constant back that nothing used for a while."""
    if value.graph is None and isinstance(graph, ir.Graph) and value.name not in graph.initializers:
        graph.register_initializer(value)


def _remove(node: ir.Node | None) -> None:
    """Remove a node that nothing uses, and what only it used."""
    pending = [node]
    while pending:
        dead = pending.pop()
        if dead is None or dead.graph is None or any(e.uses() or e.is_graph_output() for e in dead.outputs):
            continue
        pending += [each.producer() for each in dead.inputs if each is not None]
        graph_of_node(dead).remove(dead, safe=True)


# -- Build nodes whose results have a type and a shape -----------------------------------------------


def _like(
    builder: NodeBuilder, like: ir.Value, op_type: str, *inputs: ir.Value, **attributes: Any
) -> ir.Value:
    """A node with the type and the shape of another value."""
    return _typed(builder.op(op_type, *inputs, **attributes), like.dtype, sizes_of(like))


def _typed(value: ir.Value, dtype: ir.DataType | None, sizes: Iterable[object] | None) -> ir.Value:
    value.type = None if dtype is None else ir.TensorType(dtype)
    value.shape = None if sizes is None else ir.Shape(list(sizes))  # type: ignore[arg-type]
    return value


# -- Masks of two numbers ----------------------------------------------------------------------------


def _choice(value: ir.Value | None, builder: NodeBuilder, depth: int = 0) -> Choice | None:
    """A tensor that certainly has two numbers, as a condition and both of them."""
    if value is None or value.dtype is None or depth > _MAX_DEPTH:
        return None
    if value.dtype == ir.DataType.BOOL:
        return Choice(value, 1.0, 0.0)
    array, node = array_of(value), value.producer()
    if array is not None:
        numbers = np.unique(array) if array.dtype.kind in "fiu" else np.array([])
        if numbers.size != 2:
            return None
        true, false = float(numbers[1]), float(numbers[0])
        tensor = ir.Tensor(array == numbers[1], dtype=ir.DataType.BOOL)
        made = builder.op("Constant", value=ir.AttrTensor("value", tensor))
        return Choice(_typed(made, ir.DataType.BOOL, array.shape), true, false)
    if node is None or node.domain != "":
        return None
    if node.op_type in ("Cast", *_LAYOUT):
        inner = _choice(node.inputs[0], builder, depth + 1)
        if inner is None or node.op_type == "Cast":
            exact = inner is not None and _survives(inner, value.dtype)
            return inner if exact else None
        if any(each is not None and each is node.inputs[0] for each in node.inputs[1:]):
            return None
        made = builder.node(
            node.op_type,
            [inner.condition, *node.inputs[1:]],
            attributes={name: each for name, each in node.attributes.items()},
        )[0]
        return inner._replace(condition=_typed(made, ir.DataType.BOOL, sizes_of(value)))
    if node.op_type == "Where":
        condition, first, second = node.inputs[0], scalar_of(node.inputs[1]), scalar_of(node.inputs[2])
        if condition is None or first is None or second is None or sizes_of(condition) != sizes_of(value):
            return None
        return Choice(condition, first, second)
    if node.op_type == "Trilu" and (number := scalar_of(node.inputs[0])):
        triangle = _typed(builder.cast(value, ir.DataType.BOOL), ir.DataType.BOOL, sizes_of(value))
        return Choice(triangle, number, 0.0)
    if node.op_type == "Mul" and all(scalar_of(each) is None for each in node.inputs):
        return _both(node, builder, depth)
    if node.op_type in _ARITHMETIC:
        return _computed(node, value.dtype, builder, depth)
    return None


_ARITHMETIC: dict[str, Callable[..., object]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Neg": np.negative,
    "Log": np.log,
}


def _both(node: ir.Node, builder: NodeBuilder, depth: int) -> Choice | None:
    """The product of two tensors of zeros and ones."""
    parts = [_choice(each, builder, depth + 1) for each in node.inputs]
    first, second = (None if each is None or _kept(each, (1.0, 0.0)) is not True else each for each in parts)
    if first is None or second is None:
        return None
    both = _like(builder, node.outputs[0], "And", first.condition, second.condition)
    return Choice(_typed(both, ir.DataType.BOOL, sizes_of(node.outputs[0])), 1.0, 0.0)


def _computed(node: ir.Node, dtype: ir.DataType, builder: NodeBuilder, depth: int) -> Choice | None:
    """Arithmetic of a tensor of two numbers with one number."""
    if not dtype.is_floating_point() and node.op_type in ("Div", "Log"):
        return None
    numbers = [scalar_of(each) for each in node.inputs]
    if numbers.count(None) != 1:
        return None
    at = numbers.index(None)
    inner = _choice(node.inputs[at], builder, depth + 1)
    whole = inner is not None and sizes_of(node.inputs[at]) == sizes_of(node.outputs[0])
    if inner is None or not whole:
        return None
    kind, results = dtype.numpy().type, []
    for number in (inner.true, inner.false):
        given = [kind(number if each is None else each) for each in numbers]
        with np.errstate(all="ignore"):
            results.append(float(_ARITHMETIC[node.op_type](*given)))  # type: ignore[arg-type]
    return None if any(map(math.isnan, results)) else Choice(inner.condition, *results)


def _survives(choice: Choice, dtype: ir.DataType) -> bool:
    """Whether a cast keeps both numbers."""
    if not dtype.is_floating_point():
        return {choice.true, choice.false} <= {0.0, 1.0}
    with np.errstate(all="ignore"):
        return all(float(dtype.numpy().type(each)) == each for each in choice[1:])


def _kept(choice: Choice, of: Sequence[float]) -> bool | None:
    """Where a choice has the first of two numbers: where its condition holds, or where not; else None."""
    pair = (choice.true, choice.false)
    return True if pair == tuple(of) else False if pair == tuple(of)[::-1] else None


def _masked(
    builder: NodeBuilder, scores: ir.Value, condition: ir.Value, shown: bool, fill: float
) -> ir.Value | None:
    """The scores with a number where a condition does not hold."""
    if scores.dtype is None:
        return None
    number = builder.constant(fill, scores.dtype)
    pair = (scores, number) if shown else (number, scores)
    return _like(builder, scores, "Where", condition, *pair)


# -- Rules: each gives the value that a node may as well be ---------------------------------------------


def _condition(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """Where a tensor of two numbers has one of them: `mask.astype(bool)`, `mask > 0.5`."""
    output, numbers = node.outputs[0], [scalar_of(each) for each in node.inputs]
    if output.dtype != ir.DataType.BOOL or numbers.count(None) != 1:
        return None
    mask = node.inputs[numbers.index(None)]
    inner = None if mask is None or mask.dtype == output.dtype else _choice(mask, builder)
    if mask is None or inner is None or sizes_of(mask) != sizes_of(output):
        return None
    if any(is_op(each, "Cast") for each in builder.nodes):
        return None  # a triangle is read as it is
    # The file would have a copy of a constant as well: only where the mask is a factor of weights, too.
    copied = any(is_op(each, "Constant") for each in builder.nodes)
    if copied and not any(is_op(use.node, "Mul") for use in mask.uses()):
        return None
    given = ([number if each is None else each for each in numbers] for number in inner[1:])
    first, second = (bool(_COMPARED[node.op_type](*each)) for each in given)
    same = "Identity" if first else "Not"
    return None if first == second else _like(builder, output, same, inner.condition)


_COMPARED: dict[str, Callable[..., object]] = {
    "Cast": bool,
    "Equal": operator.eq,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
}


def _tanh(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """`2 * sigmoid(x) - 1`."""
    numbers = [scalar_of(each) for each in node.inputs]
    less = -1.0 if is_op(node, "Add") else 1.0
    at = 0 if numbers[1] == less else 1 if is_op(node, "Add") and numbers[0] == less else None
    mul = None if at is None else made_by(node.inputs[at], "Mul")
    for side in (0, 1) if mul is not None else ():
        sigmoid = made_by(mul.inputs[side], "Sigmoid") if mul is not None else None
        if sigmoid is None or mul is None or scalar_of(mul.inputs[1 - side]) != 2.0:
            continue
        source = sigmoid.inputs[0]
        if source is not None and source.dtype is not None and _feeds_softmax(node.outputs[0]):
            half = _like(builder, source, "Mul", source, builder.constant(0.5, source.dtype))
            return _like(builder, node.outputs[0], "Tanh", half)
    return None


def _blend(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """`s * m + (1 - m) * fill`, where m is of zeros and ones."""
    for at in (0, 1) if is_op(node, "Add") else (0,):
        mul, rest = made_by(node.inputs[at], "Mul"), node.inputs[1 - at]
        if mul is None or rest is None or scalar_of(rest) is not None:
            continue
        for side in (0, 1):
            scores, mask = mul.inputs[side], mul.inputs[1 - side]
            if scores is None or sizes_of(scores) != sizes_of(node.outputs[0]):
                continue
            if (ones := _choice(mask, builder)) is None or (shown := _kept(ones, (1.0, 0.0))) is None:
                continue
            other = _choice(rest, builder)
            if other is None or not same_value(ones.condition, other.condition):
                continue
            kept, fill = other[1:] if shown else other[:0:-1]
            if kept == 0.0 and fill:
                return _masked(builder, scores, ones.condition, shown, -fill if is_op(node, "Sub") else fill)
    return None


def _minimum(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """`min(s, limit)`, where the limit is a large number or a small one."""
    if len(node.inputs) != 2:
        return None
    for at in (0, 1):
        scores, limit = node.inputs[at], _choice(node.inputs[1 - at], builder)
        if limit is None or scores is None or scores.dtype is None or not scores.dtype.is_floating_point():
            continue
        # No score is so large that the limit would change it.
        least = min(float(scores.dtype.max), -ABSORBS_ANY)
        if _may_be_below(scores, min(limit[1:])):
            continue  # a score that another mask made smaller stays as it is
        if sizes_of(scores) == sizes_of(node.outputs[0]) and max(limit[1:]) >= least:
            shown = limit.true > limit.false
            return _masked(builder, scores, limit.condition, shown, min(limit[1:]))
    return None


def _may_be_below(scores: ir.Value, number: float) -> bool:
    """Whether something between scores and their matmul may be further from 0 than this number."""

    def between(value: ir.Value | None) -> list[ir.Node]:
        stop = ("MatMul", "Einsum", "Shape")
        behind = nodes_behind([value], lambda node: () if is_op(node, *stop) else node.inputs)
        return list(itertools.islice(behind, _MOST_BETWEEN))

    def numbers(nodes: Iterable[ir.Node]) -> list[float]:
        given = {each for node in nodes for each in node.inputs if constant(each) is not None}
        return [found for each in given if (found := scalar_of(each)) is not None]

    nodes = between(scores)
    if any(each < number or -number < each < math.inf for each in numbers(nodes)):
        return True
    for node in nodes:  # the number of a mask grows by a factor behind it, and by that of another mask
        masked = [any(abs(each) >= _MASKS for each in numbers(between(value))) for value in node.inputs]
        if sum(masked) >= {"Mul": 1, "Div": 1, "Add": 2, "Sub": 2}.get(node.op_type, math.inf):
            return True
    return False


def _zeroed(value: ir.Value | None, builder: NodeBuilder) -> tuple[ir.Value, ir.Value | None, bool]:
    """A tensor before some of it became 0, with the condition and its value where nothing did."""
    node = made_by(value, "Mul", "Where", "Trilu")
    powers = made_by(input_at(node, 0), "Exp", "Softmax")
    if is_op(node, "Trilu") and node is not None and powers is not None and powers.inputs[0] is not None:
        return powers.outputs[0], _triangle_like(node, powers.inputs[0], builder), True
    if is_op(node, "Mul") and node is not None:
        for at in (0, 1):
            inner, other = node.inputs[at], node.inputs[1 - at]
            if inner is None or made_by(inner, "Exp", "Softmax") is None:
                continue
            ones = _choice(other, builder)
            shown = None if ones is None else _kept(ones, (1.0, 0.0))
            if ones is not None and shown is not None:
                return inner, ones.condition, shown
    if is_op(node, "Where") and node is not None and node.inputs[0] is not None:
        for at in (1, 2):
            inner = node.inputs[at]
            if inner is not None and scalar_of(node.inputs[3 - at]) == 0.0:
                return inner, node.inputs[0], at == 1
    return value, None, True  # type: ignore[return-value]


def _triangle_like(node: ir.Node, scores: ir.Value, builder: NodeBuilder) -> ir.Value:
    """True where a Trilu keeps numbers that are as many as the scores."""
    sizes, one = (sizes_of(scores) or [None, None])[-2:], builder.constant(1.0, ir.DataType.FLOAT)
    ones = builder.op("Expand", one, builder.op("Shape", scores, start=-2))
    given = [_typed(ones, ir.DataType.FLOAT, sizes), *node.inputs[1:]]
    kept = builder.node("Trilu", given, attributes=dict(node.attributes))[0]
    shown = builder.op("Cast", _typed(kept, ir.DataType.FLOAT, sizes), to=int(ir.DataType.BOOL))
    return _typed(shown, ir.DataType.BOOL, sizes)


def _before_copies(value: ir.Value | None) -> ir.Value | None:
    """A tensor before it was copied along axes of size 1, as broadcasting would do."""
    source = input_at(made_by(value, "Expand", "Tile"), 0)
    before, after = sizes_of(source), sizes_of(value)
    if before is None or after is None or len(before) != len(after):
        return value
    return source if all(one in (1, size) for one, size in zip(before, after, strict=True)) else value


def _total_of(value: ir.Value | None) -> tuple[ir.Value, int] | None:
    """What a value is the sum of, along which axis; the axis is kept with size 1.

    PyTorch's exporter adds up float16 in float32.
    """
    value = _before_copies(value)
    result = sizes_of(value)
    if (rounded := made_by(value, "Cast")) is not None:
        wide = made_by(input_at(made_by(rounded.inputs[0], "ReduceSum"), 0), "Cast")
        if wide is None or wide.inputs[0] is None or wide.inputs[0].dtype != rounded.outputs[0].dtype:
            return None
        if not holds(wide.outputs[0].dtype, wide.inputs[0].dtype):
            return None
        value = rounded.inputs[0]
    restored = made_by(value, "Unsqueeze", "Reshape")
    inner = value if restored is None else restored.inputs[0]
    node = made_by(inner, "ReduceSum", "Einsum", "ReduceL1")
    source = input_at(node, 0)
    sizes = sizes_of(source)
    if node is None or source is None or sizes is None or result is None or len(sizes) != len(result):
        return None
    axis = _summed_axis(node, len(sizes))
    if axis is None or [*sizes[:axis], 1, *sizes[axis + 1 :]] != result:
        return None
    narrow = None if rounded is None else input_at(source.producer(), 0)
    return narrow or source, axis - len(sizes)


def _total_without_axis(value: ir.Value | None) -> tuple[ir.Value, int, None] | None:
    """What a value is the sum of, along which axis, which it does not have any more."""
    node = made_by(value, "ReduceSum")
    source = input_at(node, 0)
    sizes, result = sizes_of(source), sizes_of(value)
    axis = None if node is None or sizes is None else _summed_axis(node, len(sizes))
    if source is None or sizes is None or axis is None or [*sizes[:axis], *sizes[axis + 1 :]] != result:
        return None
    return source, axis - len(sizes), None


def _summed_axis(node: ir.Node, count: int) -> int | None:
    if is_op(node, "Einsum"):
        (given, *_), out = equation_of(node)
        gone = [at for at, letter in enumerate(given) if letter not in out]
        plain = len(node.inputs) == 1 and "." not in given and len(set(given)) == len(given)
        kept = "".join(letter for letter in given if letter in out) == out
        return gone[0] if plain and kept and len(gone) == 1 else None
    axes = constant_ints(node, 1) if len(node.inputs) > 1 else node.attributes.get_ints("axes")
    return axes[0] % count if count and axes is not None and len(axes) == 1 else None


def _weights(
    powers: ir.Value, axis: int, builder: NodeBuilder, sink: ir.Value | None = None
) -> ir.Value | None:
    """The softmax that numbers over their sum along an axis are; `sink` is the score of one more of them."""
    inner, condition, shown = _zeroed(powers, builder)
    node, factor = made_by(inner, "Exp", "Softmax"), None
    if node is None:
        node, factor = _times(powers)
    scores = input_at(node, 0)
    if node is None or scores is None or sizes_of(scores) != sizes_of(powers):
        return None
    if is_op(node, "Softmax"):
        changed = condition is not None or factor is not None
        if not changed or sink is not None or _axis_of(node) != axis:
            return None
    if sink is not None:
        plain = condition is None and factor is None and axis == -1
        return _beside(scores, sink, powers, builder) if plain else None
    if condition is not None:
        masked = _masked(builder, scores, condition, shown, -math.inf)
        return None if masked is None else _like(builder, powers, "Softmax", masked, axis=axis)
    if isinstance(factor, float):  # the power of weights
        scores = _like(builder, scores, "Mul", scores, builder.constant(factor, scores.dtype))  # type: ignore[arg-type]
    elif factor is not None:
        exponent = made_by(factor, "Exp")
        added = _like(builder, factor, "Log", factor) if exponent is None else exponent.inputs[0]
        scores = _like(builder, scores, "Add", scores, added)  # type: ignore[arg-type]
    return _like(builder, powers, "Softmax", scores, axis=axis)


def _axis_of(softmax: ir.Node | None) -> int:
    """The axis of a softmax, counted from the end."""
    axis = -1 if softmax is None else softmax.attributes.get_int("axis", -1)
    return axis - (rank(input_at(softmax, 0)) or 0) if axis >= 0 else axis


def _times(powers: ir.Value) -> tuple[ir.Node | None, ir.Value | float | None]:
    """The exponential or softmax that numbers are a power of, or a product with what is not negative."""
    node = made_by(powers, "Pow", "Mul")
    if node is None or None in node.inputs:
        return None, None
    if is_op(node, "Pow"):
        exponent = scalar_of(node.inputs[1])
        whole = exponent is not None and 0.0 < exponent < math.inf
        return made_by(node.inputs[0], "Softmax") if whole else None, exponent
    if node.inputs[0] is node.inputs[1]:
        return made_by(node.inputs[0], "Softmax"), 2.0
    for at in (0, 1):
        found = made_by(node.inputs[at], "Exp", "Softmax")
        if found is not None and is_not_negative(node.inputs[1 - at]):
            return found, node.inputs[1 - at]
    return None, None


def _beside(scores: ir.Value, sink: ir.Value, like: ir.Value, builder: NodeBuilder) -> ir.Value | None:
    """The softmax of scores with one more beside them, which all queries have, without its weight."""
    shift = _shift_of(scores)
    scores = scores if shift is None else shift[0]
    sizes = sizes_of(scores)
    if sizes is None or scores.dtype is None:
        return None
    keys = sizes[-1] + 1 if isinstance(sizes[-1], int) else f"{sizes[-1]} + 1"
    lead = builder.op("Shape", _of_same_rows(scores), start=0, end=-1)
    shape = builder.op("Concat", lead, builder.ints(1), axis=0)
    more = _typed(builder.op("Expand", sink, shape), scores.dtype, [*sizes[:-1], 1])
    both = _typed(builder.op("Concat", scores, more, axis=-1), scores.dtype, [*sizes[:-1], keys])
    weights = _like(builder, both, "Softmax", both, axis=-1)
    bounds = [builder.ints(each) for each in (0, -1, -1)]
    return _like(builder, like, "Slice", weights, *bounds)


def _of_same_rows(value: ir.Value) -> ir.Value:
    """What a value is computed from and has its sizes, but for the last: nothing is computed for a size."""
    for _ in range(_MAX_DEPTH):
        node, sizes = value.producer(), sizes_of(value) or [None]
        given = [] if node is None or node.domain else [each for each in node.inputs if each is not None]
        alike = (each for each in given if same_dims((sizes_of(each) or [None])[:-1], sizes[:-1]))
        source = next(alike, None)
        if source is None or len(sizes) < 2:
            break
        value = source
    return value


def _hidden_behind(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """Weights that are 0 where their scores were set to a number which others could be below.

    Those keys only add to the sum, as one more key does whose score is that number and the logarithm of how
    many there are.
    """
    zeros = [scalar_of(each) == 0.0 for each in node.inputs[1:]]
    condition, at = node.inputs[0], 1 if zeros[1] else 2
    softmax = made_by(node.inputs[at], "Softmax") if zeros.count(True) == 1 else None
    filled = made_by(input_at(softmax, 0), "Where")
    if softmax is None or filled is None or condition is None or filled.inputs[0] is None:
        return None
    if not same_condition((filled.inputs[0], True), (condition, True)):
        return None
    scores, fill, sizes = filled.inputs[at], scalar_of(filled.inputs[3 - at]), sizes_of(filled.outputs[0])
    dims, dtype = sizes_of(condition), filled.outputs[0].dtype
    if (
        fill is None
        or not WEAKEST_FILL < fill < math.inf
        or scores is None
        or dtype is None
        or not dims
        or not sizes
    ):
        return None
    if _axis_of(softmax) != -1 or dims[-1] != sizes[-1] or sizes_of(scores) != sizes:
        return None
    hidden = builder.op("Not", condition) if at == 1 else condition
    count = builder.op("ReduceSum", builder.cast(hidden, dtype), builder.ints(-1), keepdims=1)
    sink = builder.op("Add", builder.op("Log", count), builder.constant(fill, dtype))
    masked = _masked(builder, scores, condition, at == 1, -math.inf)
    sink = _typed(sink, dtype, [*dims[:-1], 1])
    return None if masked is None else _beside(masked, sink, node.outputs[0], builder)


def _zero_rows(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """Weights that are 0 where all keys of a query are masked: as if those of masked keys were, or NaN."""
    zeros = [scalar_of(each) == 0.0 for each in node.inputs[1:]]
    weights, output = node.inputs[1 if zeros[1] else 2], node.outputs[0]
    softmax = made_by(weights, "Softmax")
    found = _of_rows(node.inputs[0], hidden=zeros[0]) if zeros.count(True) == 1 else None
    if softmax is None or found is None or weights is None or _axis_of(softmax) != -1:
        return None
    each, hidden = found
    if rank(each) != rank(weights) or sizes_of(weights) != sizes_of(output) or output.dtype is None:
        return None
    lowest = made_by(each, "Equal", "IsInf")
    if lowest is not None and softmax.inputs[0] in lowest.inputs and hidden:
        if is_op(lowest, "Equal") and scalar_of(lowest.inputs[1]) != -math.inf:
            return None
        nothing = builder.constant(0.0, output.dtype)
        return _like(builder, output, "Where", builder.op("IsNaN", weights), nothing, weights)
    return _masked(builder, weights, each, not hidden, 0.0)


def _of_rows(value: ir.Value | None, *, hidden: bool) -> tuple[ir.Value, bool] | None:
    """What tells of each key whether it is hidden (True) or shown, from what tells of a query that all are.

    Or, where not `hidden`, that some are shown.
    """
    reduction: ir.Node | None = None
    for _ in range(_MAX_DEPTH):
        node = made_by(value, "Not", "Cast", "Identity", "ReduceMax", "ReduceMin")
        if value is None or node is None:
            break
        if is_op(node, "Not"):
            hidden = not hidden
        elif is_op(node, "ReduceMax", "ReduceMin"):
            count = rank(node.inputs[0]) or 0
            last = _summed_axis(node, count) == count - 1 and node.attributes.get_int("keepdims", 1) == 1
            # All are hidden, or any is shown.
            if reduction is not None or not last or is_op(node, "ReduceMin") != hidden:
                return None
            reduction = node
        elif is_op(node, "Cast") and reduction is not None and value.dtype == ir.DataType.BOOL:
            break
        value = node.inputs[0]
    known = reduction is not None and value is not None and value.dtype == ir.DataType.BOOL
    return (value, hidden) if known and value is not None else None


def _shift_of(exponent: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """Scores, and what is subtracted from them, the same for all keys."""
    node = made_by(exponent, "Sub")
    scores, shift = node.inputs if node is not None else (None, None)
    same = (sizes_of(shift) or [None])[-1] == 1 and sizes_of(scores) == sizes_of(exponent)
    return (scores, shift) if scores is not None and shift is not None and same else None


def _reaches_one(powers: ir.Value, axis: int) -> bool:
    """Whether the largest of some powers is 1: the maximum was subtracted."""
    shift = _shift_of(input_at(made_by(powers, "Exp"), 0))
    if shift is None:
        return False
    restored = made_by(shift[1], "Unsqueeze", "Reshape", "Identity")
    reduction = made_by(shift[1] if restored is None else restored.inputs[0], "ReduceMax")
    count = rank(shift[0]) or 0
    whole = reduction is not None and reduction.inputs[0] is shift[0]
    return whole and reduction is not None and _summed_axis(reduction, count) == axis + count


def _denominator(
    value: ir.Value | None, builder: NodeBuilder
) -> tuple[ir.Value, int, ir.Value | None] | None:
    """What a value is the sum of, along which axis, and the score of one more number in it.

    A bound below the sum is none where one of the numbers is 1; nor is what is lost in rounding.
    """
    if (total := _total_of(value)) is not None:
        return *total, None
    node = made_by(value, "Max", "Clip", "Add")
    if node is None or len(node.inputs) != 2:
        return None
    for at in (0, 1) if not is_op(node, "Clip") else (0,):
        total, other = _total_of(node.inputs[at]), node.inputs[1 - at]
        if total is None or other is None or other.dtype is None:
            continue
        number, one = scalar_of(other), _reaches_one(*total)
        if number is not None and one:
            least = 1.0 if not is_op(node, "Add") else float(np.finfo(other.dtype.numpy()).eps) / 2
            return (*total, None) if -math.inf < number < least else None
        sink = _sink_score(total[0], other, number, builder) if is_op(node, "Add") else None
        return None if sink is None else (*total, sink)
    return None


def _sink_score(
    powers: ir.Value, added: ir.Value, number: float | None, builder: NodeBuilder
) -> ir.Value | None:
    """The score of what is added to a sum of powers."""
    shift = _shift_of(input_at(made_by(powers, "Exp"), 0))
    if shift is None and number is not None and powers.dtype is not None:
        return builder.constant(math.log(number), powers.dtype) if 0.0 < number < math.inf else None
    exponent = input_at(made_by(added, "Exp"), 0)
    if exponent is None or powers.dtype is None or (sizes_of(exponent) or [1])[-1] != 1:
        return None
    if shift is None:
        return exponent
    negated, difference = made_by(exponent, "Neg"), made_by(exponent, "Sub")
    if negated is not None and negated.inputs[0] is shift[1]:
        return builder.constant(0.0, powers.dtype)
    return difference.inputs[0] if difference is not None and difference.inputs[1] is shift[1] else None


def _normalised(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """`p / sum(p)` and `(p @ v) / sum(p)`, where p is an exponential or a softmax, masked or not."""
    first, second = node.inputs
    if is_op(node, "Mul"):  # by one over the sum
        inverse = [inverse_of(each) for each in node.inputs]
        if (inverse[0] is None) == (inverse[1] is None):
            return None
        first, second = (second, input_at(inverse[0], 0)) if inverse[0] else (first, input_at(inverse[1], 0))
    total, moves = _denominator(second, builder), list[ir.Node]()
    while total is None and (move := made_by(second, *MOVES)) is not None and len(moves) < _MAX_DEPTH:
        moves.append(move)
        second = move.inputs[0]
        total = _denominator(second, builder) or _total_without_axis(second)
    if total is None or first is None:
        return _over_several_axes(node, builder) if is_op(node, "Div") else None
    powers, axis, sink = total
    if same_value(first, powers):
        return _weights(powers, axis, builder, sink) if not moves and softmax_at(node) is None else None
    found = _linear_steps(first, powers)
    kept = rank(second) == rank(powers)
    if found is None or not _divides_rows(powers, axis, *found, moves, kept=kept):
        return None
    (matmul, at), steps = found
    value = _weights(powers, axis, builder, sink)
    for each, place in ((matmul, at), *((step, 0) for step in reversed(steps))):
        if value is None:
            return None
        given = [value if side == place else other for side, other in enumerate(each.inputs)]
        result = builder.node(each.op_type, given, attributes=dict(each.attributes))[0]
        value = _typed(result, each.outputs[0].dtype, sizes_of(each.outputs[0]))
    return value


def _linear_steps(value: ir.Value, powers: ir.Value) -> tuple[tuple[ir.Node, int], list[ir.Node]] | None:
    """The matmul of powers, with their place in it, that a value is computed from, and the steps from it on.

    Each is linear in every row of what it takes first; the last one comes first.
    """
    steps = list[ir.Node]()
    for _ in range(_MAX_DEPTH):
        node = made_by(value, *MOVES, "MatMul", "Einsum")
        source = input_at(node, 0)
        if node is None or source is None:
            return None
        if is_op(node, "MatMul", "Einsum"):
            for at, each in enumerate(node.inputs):
                if len(node.inputs) == 2 and each is not None and same_value(each, powers):
                    return (node, at), steps
            weight = node.inputs[-1]
            if is_op(node, "Einsum") or _is_computed(weight) or rank(weight) != 2:
                return None
        steps.append(node)
        value = source
    return None


def _divides_rows(
    powers: ir.Value,
    axis: int,
    found: tuple[ir.Node, int],
    steps: Sequence[ir.Node],
    moves: Sequence[ir.Node],
    *,
    kept: bool,
) -> bool:
    """Whether sums of powers, moved, lie beside the rows that the powers give behind a matmul and steps.

    `kept` is whether the sums have the axis that they run along, with size 1.
    """
    matmul, at = found
    alphabet, dims = Alphabet(), sizes_of(powers) or []
    axes = tuple(map(alphabet.new, dims))
    rows: Axes | None = (*axes[:1], alphabet.new((sizes_of(matmul.outputs[0]) or [None])[-1]))
    if len(axes) != 2 or at or is_op(matmul, "Einsum"):  # else they are matrices
        try:
            rows = read_matmul(matmul, alphabet, at, axes).out
        except NotFused:
            return False
    if (
        rows is None
        or axes[axis] in rows
        or [alphabet.sizes[each] for each in rows] != sizes_of(matmul.outputs[0])
    ):
        return False
    sums: Axes | None = tuple(alphabet.new(1) if each == axes[axis] else each for each in axes)
    if not kept and sums is not None:
        sums = (*sums[:axis], *sums[len(sums) + axis + 1 :])
    rows, sums = _behind_moves(rows, steps, alphabet), _behind_moves(sums, moves, alphabet)
    if rows is None or sums is None or len(sums) > len(rows):
        return False

    def large(several: Axes) -> list[str]:
        whole = alphabet.resolved(several)
        return ["".join(letter for letter in each if alphabet.sizes[letter] != 1) for each in whole]

    beside = zip(large(sums), large(rows[len(rows) - len(sums) :]), strict=True)
    own = "".join(large(tuple(each for each in axes if each != axes[axis])))
    return set(own) == set("".join(large(sums))) and all(one in ("", other) for one, other in beside)


def _behind_moves(axes: Axes | None, steps: Sequence[ir.Node], alphabet: Alphabet) -> Axes | None:
    """The axes behind some steps, the last of which comes first; a matmul gives another last one."""
    for step in reversed(steps):
        if axes is None:
            return None
        sizes = sizes_of(step.outputs[0])
        if is_op(step, "Transpose"):
            axes = tuple(axes[axis] for axis in perm(step))
        elif is_op(step, "MatMul"):
            axes = (*axes[:-1], alphabet.new((sizes or [None])[-1]))
        else:
            axes = alphabet.regrouped(axes, sizes)
    return axes


class Summand(NamedTuple):
    """A matmul of powers, or their sum, that is multiplied by other powers and added to its like."""

    node: ir.Node  # the MatMul or ReduceSum
    powers: ir.Value  # what it takes
    scores: ir.Value  # their scores
    # what else the exponents add up to, the same for all keys: values, and how often each is added
    shift: frozenset[tuple[ir.Value | None, int]]


def _summands(value: ir.Value | None) -> list[Summand]:
    """What a softmax chunk by chunk adds up: each time, the sum so far is corrected by the new maximum."""
    found, pending = list[Summand](), [(value, tuple[ir.Value, ...]())]
    for _ in range(_MOST_IN_CHUNKS):
        if not pending:
            return found
        value, times = pending.pop()
        node = made_by(value, "Add", "Mul", "MatMul", "ReduceSum", *IN_ORDER)
        if scalar_of(value) == 0.0:
            continue
        if is_op(node, "Add", *IN_ORDER) and node is not None:
            given = node.inputs if is_op(node, "Add") else node.inputs[:1]
            pending += [(each, times) for each in reversed(given)]
            continue
        if is_op(node, "Mul") and node is not None:
            exponents = [input_at(made_by(_bare(each), "Exp"), 0) for each in node.inputs]
            at = 0 if exponents[0] is not None else 1
            if (exponent := exponents[at]) is None:
                return []
            pending.append((node.inputs[1 - at], (*times, exponent)))
            continue
        powers = input_at(node, 0)
        shift = _shift_of(input_at(made_by(powers, "Exp"), 0))
        if node is None or powers is None or shift is None:
            return []
        total = Counter[ir.Value | None]()
        for exponent, sign in ((shift[1], -1), *((each, 1) for each in times)):
            _add_up(exponent, sign, total)
        rest: frozenset[tuple[ir.Value | None, int]] = frozenset(
            (each, count) for each, count in total.items() if count
        )
        found.append(Summand(node, powers, shift[0], rest))
    return []


def _add_up(exponent: ir.Value | None, sign: int, total: Counter[ir.Value | None]) -> None:
    """Count what is added and subtracted in an exponent."""
    difference = made_by(_bare(exponent), "Sub")
    if difference is None:
        total[_bare(exponent)] += sign
        return
    for each, side in zip(difference.inputs, (1, -1), strict=True):
        _add_up(each, sign * side, total)


def _bare(value: ir.Value | None) -> ir.Value | None:
    """A value before axes of size 1 were added or dropped."""
    while (node := made_by(value, *IN_ORDER)) is not None:
        value = node.inputs[0]
    return value


def _in_chunks(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """A softmax chunk by chunk of keys, as flash attention computes it."""
    first, second = node.inputs
    if is_op(node, "Mul"):
        inverse = [inverse_of(each) for each in node.inputs]
        first, second = (second, input_at(inverse[0], 0)) if inverse[0] else (first, input_at(inverse[1], 0))
    if made_by(first, "Add") is None or made_by(_bare(second), "Add") is None:
        return None
    matmuls, sums = _summands(first), _summands(second)
    of_keys = [
        _summed_axis(each.node, rank(each.powers) or 0) for each in sums if is_op(each.node, "ReduceSum")
    ]
    whole = of_keys == [(rank(each.powers) or 0) - 1 for each in sums]
    same = len(matmuls) == len(sums) > 1 and {each[1:] for each in matmuls} == {each[1:] for each in sums}
    if not (whole and same) or len({each.shift for each in matmuls}) != 1:
        return None
    if not all(is_op(each.node, "MatMul") for each in matmuls):
        return None
    values = _joined([each.node.inputs[1] for each in matmuls], -2, builder)
    sizes, lengths = sizes_of(matmuls[0].scores), sizes_of(values)
    if values is None or sizes is None or lengths is None:
        return None
    like = _typed(ir.Value(), matmuls[0].scores.dtype, [*sizes[:-1], lengths[-2]])
    scores = _all_keys([each.scores for each in matmuls], like, builder)
    weights = None if scores is None else _like(builder, scores, "Softmax", scores, axis=-1)
    return None if weights is None else _like(builder, node.outputs[0], "MatMul", weights, values)


def _over_mean(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """Exponentials over their mean: weights times the number of keys."""
    powers, mean = node.inputs[0], made_by(node.inputs[1], "ReduceMean")
    sizes, dtype = sizes_of(powers), None if powers is None else powers.dtype
    if powers is None or sizes is None or dtype is None or mean is None or mean.inputs[0] is not powers:
        return None
    scores: ir.Value | None = powers
    while (step := made_by(scores, "Exp", "Sub", "Mul", "Div", "Add")) is not None:
        scores = step.inputs[0]
    keys = input_at(made_by(scores, "MatMul"), 1)
    if keys is None or (sizes_of(keys) or [None])[-1] != sizes[-1] or _joined_axes(mean) != 1:
        return None
    if (weights := _weights(powers, -1, builder)) is None:
        return None
    count = builder.cast(builder.op("Shape", keys, start=-1), dtype)
    return _like(builder, powers, "Mul", weights, _typed(count, dtype, [1]))


def _by_norm(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """Exponentials over the sum of their absolute values."""
    powers, axis = node.inputs[0], node.attributes.get_int("axis", -1)
    if powers is None or node.attributes.get_int("p", 2) != 1 or len(powers.uses()) != 1:
        return None
    return _weights(powers, axis - (rank(powers) or 0) if axis >= 0 else axis, builder)


def _sum(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """A sum of several tensors, as sums of two; what is added to the scores comes last."""
    output = node.outputs[0]
    given = sorted(filter(None, node.inputs), key=lambda each: sizes_of(each) != sizes_of(output))
    if len(given) < 2 or sizes_of(given[0]) != sizes_of(output) or not _feeds_softmax(output):
        return None
    found = given[0]
    for each in given[1:]:
        found = _like(builder, output, "Add", found, each)
    return found


def _unchanged(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """What a node changes nothing of, as exporters leave it: `x + 0`, a Concat of one tensor."""
    output, given = node.outputs[0], list(node.inputs)
    if node.op_type in _NEUTRAL and len(given) == 2:
        number = _NEUTRAL[node.op_type]
        sides = (given, given[::-1]) if is_op(node, "Add", "Mul", "Max", "Min") else (given,)
        given = [one for one, other in sides if constant(other) is not None and scalar_of(other) == number]
    elif is_op(node, "Clip"):
        bounds = zip(given[1:], (-math.inf, math.inf), strict=False)
        given = given[:1] if all(each is None or scalar_of(each) == number for each, number in bounds) else []
    elif is_op(node, "Where"):
        chosen = scalar_of(given[0])
        given = [] if chosen is None else given[1:2] if chosen else given[2:]
    elif is_op(node, "Pad"):
        given = given[:1] if not any(constant_ints(node, 1) or (1,)) else []
    elif is_op(node, "Slice"):
        starts, ends, steps = (constant_ints(node, at) for at in (1, 2, 4))
        whole = set(starts or (1,)) == {0} and min(ends or (0,)) >= NO_END and set(steps or (1,)) == {1}
        given = given[:1] if whole else []
    elif is_op(node, "Expand"):
        given = given[:1]
    value, sizes = given[0] if given else None, sizes_of(output)
    if value is None or (len(given) > 1 and not is_op(node, *_NEUTRAL)):
        return None
    same = (
        sizes is not None and None not in sizes and sizes_of(value) == sizes and value.dtype == output.dtype
    )
    return _like(builder, output, "Identity", value) if same else None


def _restored(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """Scores or weights as they were before axes of size 1 alone were added, moved and dropped."""
    output, value = node.outputs[0], node.inputs[0]
    sizes = sizes_of(output)
    if sizes is None or None in sizes:
        return None
    for _ in range(_MAX_DEPTH):
        step = made_by(value, *MOVES)
        before = sizes_of(input_at(step, 0))
        if step is None or before is None:
            return None
        if is_op(step, "Transpose"):
            large = [axis for axis in perm(step) if before[axis] != 1]
            if large != sorted(large):
                return None
        value = step.inputs[0]
        if before == sizes and value is not None:
            near = _feeds_softmax(output) or _is_weights(value)
            return _like(builder, output, "Identity", value) if near else None
    return None


_NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0, "Pow": 1.0, "Max": -math.inf, "Min": math.inf}


def _zeros_like(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """`x * 0` or `x - x`, as converters write zeros of the shape of a tensor that is used elsewhere."""
    output, itself = node.outputs[0], node.inputs[0] is node.inputs[1]
    for one, other in (node.inputs, node.inputs[::-1]):
        zeros = itself if is_op(node, "Sub") else constant(other) is not None and scalar_of(other) == 0.0
        if not zeros or one is None or output.dtype is None:
            continue
        if len(one.uses()) > 1 + itself and sizes_of(one) == sizes_of(output):
            zero = builder.constant(0.0, output.dtype)
            return _like(builder, output, "Expand", zero, builder.op("Shape", one))
    return None


def _first_part(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """The first of two parts of the weights, where the other is not used, as a Slice."""
    weights, axis = node.inputs[0], node.attributes.get_int("axis", 0)
    if weights is None or len(node.outputs) != 2 or made_by(weights, "Softmax") is None:
        return None
    rest, sizes = node.outputs[1], sizes_of(node.outputs[1])
    if rest.uses() or rest.is_graph_output() or sizes is None or not isinstance(sizes[axis], int):
        return None
    bounds = [builder.ints(each) for each in (0, -int(sizes[axis] or 0), axis)]
    return _like(builder, node.outputs[0], "Slice", weights, *bounds)


def _by_logarithm(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """`exp(s - logsumexp(s))`."""
    difference = made_by(node.inputs[0], "Sub")
    if difference is None:
        return None
    scores, total = difference.inputs
    sizes = sizes_of(scores)
    restored = made_by(total, "Unsqueeze", "Reshape")
    inner = total if restored is None else restored.inputs[0]
    reduction = made_by(inner, "ReduceLogSumExp")
    source, axis = input_at(reduction, 0), None
    if reduction is not None and sizes is not None:
        axis = _summed_axis(reduction, len(sizes))
    elif found := _logarithm_of_sum(total, scores):
        source, axis = found[0], found[1] + len(sizes or ())
    if axis is None or scores is None or source is not scores or sizes is None:
        return _over_several_axes(node, builder)
    if sizes_of(total) != [*sizes[:axis], 1, *sizes[axis + 1 :]]:
        return None
    return _like(builder, node.outputs[0], "Softmax", scores, axis=axis - len(sizes))


def _over_several_axes(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """`exp(s - logsumexp(s))` or `exp(s) / sum(exp(s))` over the last axes, as of a map of keys."""
    if is_op(node, "Div"):
        powers = made_by(node.inputs[0], "Exp")
        reduction, summed = made_by(node.inputs[1], "ReduceSum"), node.inputs[0]
        scores = input_at(powers, 0)
    else:
        scores, total = made_by(node.inputs[0], "Sub").inputs  # type: ignore[union-attr]
        added = made_by(total, "Add")
        parts = [total] if added is None else list(added.inputs)
        reduction, summed = made_by(total, "ReduceLogSumExp"), scores
        for each in parts if reduction is None else ():
            reduction = reduction or made_by(input_at(made_by(each, "Log"), 0), "ReduceSum")
        if is_op(reduction, "ReduceSum"):
            summed = input_at(reduction, 0)
            exponent = input_at(made_by(summed, "Exp"), 0)
            shift = made_by(exponent, "Sub")
            same = exponent is scores if added is None else shift is not None and shift.inputs[1] in parts
            if not same or (shift is not None and added is not None and shift.inputs[0] is not scores):
                return None
    count = _joined_axes(reduction)
    if reduction is None or scores is None or input_at(reduction, 0) is not summed or count < 2:
        return None
    shift, sizes = made_by(scores, "Sub"), sizes_of(scores) or []
    source, less = (None, None) if shift is None else shift.inputs
    if source is not None and sizes_of(source) == sizes and (sizes_of(less) or [])[-count:] == [1] * count:
        scores = source  # what is subtracted is the same for all keys
    rows = builder.op("Shape", scores, start=0, end=-count)
    flat = builder.op("Reshape", scores, builder.op("Concat", rows, builder.ints(-1), axis=0))
    _typed(flat, scores.dtype, [*sizes[:-count], product(sizes[-count:])])
    weights = _like(builder, flat, "Softmax", flat, axis=-1)
    return _like(builder, node.outputs[0], "Reshape", weights, builder.op("Shape", scores))


def _joined_axes(reduction: ir.Node | None) -> int:
    """How many of the last axes a reduction runs over, where it keeps their places; else 0."""
    count = rank(input_at(reduction, 0))
    if reduction is None or count is None or reduction.attributes.get_int("keepdims", 1) != 1:
        return 0
    axes = constant_ints(reduction, 1) if len(reduction.inputs) > 1 else reduction.attributes.get_ints("axes")
    found = sorted(axis % count for axis in axes or ())
    return len(found) if found == list(range(count - len(found), count)) else 0


def _logarithm_of_sum(value: ir.Value | None, scores: ir.Value | None) -> tuple[ir.Value, int] | None:
    """Scores, where a value is the logarithm of the sum of their powers; the axis of the sum.

    The same where something was subtracted from the scores before, and added behind the logarithm.
    """
    added = made_by(value, "Add")
    pairs = [(value, None)] if added is None else [tuple(added.inputs), tuple(added.inputs)[::-1]]
    for inner, shift in pairs:
        logarithm = made_by(inner, "Log")
        total = None if logarithm is None else _total_of(logarithm.inputs[0])
        exponent = input_at(made_by(total[0], "Exp"), 0) if total is not None else None
        if total is None or exponent is None:
            continue
        if shift is None:
            return exponent, total[1]
        before = _shift_of(exponent)
        if before is not None and before[0] is scores and before[1] is shift:
            return before[0], total[1]
    return None


def _other_sum(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """The logarithm of a sum of powers, and the sum of their squares, by the names of plain operators."""
    powers, output = node.inputs[0], node.outputs[0]
    exponent = input_at(made_by(powers, "Exp"), 0)
    if powers is None or exponent is None:
        return None
    if is_op(node, "ReduceSumSquare"):
        powers = _squared(exponent, builder)
    attributes = {name: each for name, each in node.attributes.items() if name != "axes"}
    axes = node.inputs[1] if len(node.inputs) > 1 else builder.ints(*node.attributes.get_ints("axes", ()))
    total = builder.node("ReduceSum", [powers, axes], attributes=attributes)[0]
    _typed(total, output.dtype, sizes_of(output))
    return total if is_op(node, "ReduceSumSquare") else _like(builder, output, "Log", total)


def _by_ones(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """A matmul with a column of ones, as a sum."""
    powers, ones = node.inputs
    shape = None if ones is None else ones.shape
    if shape is None or len(shape) != 2 or shape[1] != 1 or powers is None:
        return None
    if scalar_of(ones) != 1.0 or not _is_weights(powers):
        return None
    return _like(builder, node.outputs[0], "ReduceSum", powers, builder.ints(-1), keepdims=1)


def _squared(exponent: ir.Value, builder: NodeBuilder) -> ir.Value:
    two = builder.constant(2.0, exponent.dtype or ir.DataType.FLOAT)
    return _like(builder, exponent, "Exp", _like(builder, exponent, "Mul", exponent, two))


def _power(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """`2 ** s`, as an exponential."""
    base, scores = scalar_of(node.inputs[0]), node.inputs[1]
    if base is None or not 1.0 < base < math.inf or scores is None or scores.dtype != node.outputs[0].dtype:
        return None
    dtype = scores.dtype
    if dtype is None or not any(is_op(user, "ReduceSum") for user, _ in node.outputs[0].uses()):
        return None
    scaled = _like(builder, scores, "Mul", scores, builder.constant(math.log(base), dtype))
    return _like(builder, node.outputs[0], "Exp", scaled)


def _multiplied_and_summed(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """`sum(x * y)`, where each is copied along an axis of the other: a matmul."""
    inner, total = made_by(node.inputs[0], "Mul"), node.outputs[0]
    if inner is None or len(inner.outputs[0].uses()) != 1 or None in inner.inputs:
        return None
    given = [_before_tiling(each, builder) for each in inner.inputs]
    shapes = [sizes_of(each) or [] for each in given]
    summed = _summed_axis(node, len(shapes[0]))
    if len(shapes[0]) != len(shapes[1]) or not 0 < len(shapes[0]) <= len(string.ascii_lowercase):
        return None
    if (single := _summed_with_vector(node, given, summed, builder)) is not None:
        return single
    letters, operands, texts = string.ascii_lowercase[: len(shapes[0])], list[ir.Value](), list[str]()
    for value, own, other in zip(given, shapes, reversed(shapes), strict=True):
        broadcast = [at for at, pair in enumerate(zip(own, other, strict=True)) if pair[0] == 1 != pair[1]]
        if value is None or not broadcast or summed is None or summed in broadcast:
            return None
        sizes = [size for at, size in enumerate(own) if at not in broadcast]
        before = input_at(made_by(value, "Unsqueeze"), 0)
        if before is None or sizes_of(before) != sizes:
            before = _typed(builder.op("Squeeze", value, builder.ints(*broadcast)), value.dtype, sizes)
        operands.append(before)
        texts.append("".join(letter for at, letter in enumerate(letters) if at not in broadcast))
    kept = letters.replace(letters[summed or 0], "")
    result = builder.op("Einsum", *operands, equation=f"{','.join(texts)}->{kept}")
    if not node.attributes.get_int("keepdims", 1):
        return _typed(result, total.dtype, sizes_of(total))
    sizes = [size for at, size in enumerate(sizes_of(total) or ()) if at != summed]
    return _like(builder, total, "Unsqueeze", _typed(result, total.dtype, sizes), builder.ints(summed or 0))


def _before_tiling(value: ir.Value | None, builder: NodeBuilder) -> ir.Value | None:
    """A tensor before it was copied along an axis, as broadcasting would do: by an Expand, or by a Tile.

    A Tile of its last axis, which a Reshape takes apart, copies along a new one.
    """
    if (source := _before_copies(value)) is not value:
        return source
    tile = made_by(input_at(made_by(value, "Reshape"), 0), "Tile")
    source = input_at(tile, 0)
    before, wide, after = sizes_of(source), sizes_of(input_at(made_by(value, "Reshape"), 0)), sizes_of(value)
    if (
        source is None
        or not before
        or not wide
        or not after
        or None in after
        or len(after) != len(before) + 1
    ):
        return value
    if wide[:-1] != before[:-1] or [*before[:-1], after[-2], before[-1]] != after:
        return value
    broadcast = builder.unsqueeze(source, len(before) - 1)
    return _typed(broadcast, source.dtype, [*before[:-1], 1, before[-1]])


def _summed_with_vector(
    node: ir.Node, given: Sequence[ir.Value | None], summed: int | None, builder: NodeBuilder
) -> ir.Value | None:
    """The same where only one is copied: the scores of a single query, or its result.

    Axes of the batch may lie anywhere, as behind keys that a convolution's unfolding gives.
    """
    total, whole = node.outputs[0], sizes_of(node.inputs[0])
    for at in (0, 1):
        vector, matrix = given[at], given[1 - at]
        own, other = sizes_of(vector) or [], sizes_of(matrix) or []
        broadcast = [
            axis for axis, pair in enumerate(zip(own, other, strict=True)) if pair[0] == 1 != pair[1]
        ]
        if vector is None or matrix is None or summed is None or other != whole:
            continue
        if len(broadcast) != 1 or broadcast[0] == summed:
            continue
        copied, weights = broadcast[0], _is_weights(vector)
        batch = [axis for axis in range(len(own)) if axis not in (summed, copied)]
        rows, columns = [*batch, copied, summed], [*batch, summed, copied]
        if _feeds_softmax(total) and (copied < summed or not weights):
            pair, order = (_ordered(matrix, rows, builder), _ordered(vector, columns, builder)), rows
        elif weights:
            pair, order = (_ordered(vector, rows, builder), _ordered(matrix, columns, builder)), columns
        else:
            continue
        sizes = [1 if axis == summed else other[axis] for axis in order]
        gemm = _typed(builder.op("MatMul", *pair), total.dtype, sizes)
        gemm = _ordered(gemm, [order.index(axis) for axis in range(len(order))], builder)
        if node.attributes.get_int("keepdims", 1):
            return gemm
        return _like(builder, total, "Squeeze", gemm, builder.ints(summed))
    return None


def _ordered(value: ir.Value, order: Sequence[int], builder: NodeBuilder) -> ir.Value:
    """A value with its axes in another order."""
    if list(order) == sorted(order):
        return value
    sizes = sizes_of(value) or []
    return _typed(builder.transpose(value, *order), value.dtype, [sizes[axis] for axis in order])


def _only_one(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """`x[..., 0]` of an axis of size 1."""
    value, sizes = node.inputs[0], sizes_of(node.inputs[0])
    axis, index = node.attributes.get_int("axis", 0), constant(node.inputs[1])
    if value is None or sizes is None or index is None or index.shape.rank() or sizes[axis] != 1:
        return None
    if int(index.numpy()) not in (0, -1) or not _feeds_softmax(node.outputs[0]):
        return None
    return _like(builder, node.outputs[0], "Squeeze", value, builder.ints(axis))


def _is_computed(value: ir.Value | None) -> bool:
    return value is not None and constant(value) is None


def _matmul(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """A matmul of different ranks, or of matrices, as one of batches."""
    first, second = node.inputs
    ranks = rank(first) or 0, rank(second) or 0
    if 1 in ranks:
        return _with_vector(node, builder)
    if min(ranks) == 2 < max(ranks) and _is_learned_query(
        node.inputs[ranks.index(2)], node.outputs[0], ranks.index(2)
    ):
        return _batched(first, second, node.outputs[0], builder)
    given = [value for value, axes in zip((first, second), ranks, strict=True) if axes == 2]
    if ranks[0] == ranks[1] != 2 or min(ranks) < 2 or not all(map(_is_computed, given)):
        return None
    return _batched(first, second, node.outputs[0], builder)


def _of_joined_rows(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """The scores of learned queries that one Gemm computes for all batch elements, as simplifiers write."""
    gemm, output = made_by(node.inputs[0], "Gemm"), node.outputs[0]
    joined = made_by(input_at(gemm, 0), "Reshape")
    keys, weight, added = input_at(joined, 0), input_at(gemm, 1), input_at(gemm, 2)
    own, found = sizes_of(keys) or [], sizes_of(output) or []
    if gemm is None or joined is None or keys is None or weight is None or output.dtype is None:
        return None
    plain = all(gemm.attributes.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta"))
    plain &= not any(gemm.attributes.get_int(name, 0) for name in ("transA", "transB"))
    plain &= added is None or sizes_of(added) in ([], [1], found[-1:])
    if not plain or len(own) < 3 or not same_dims(own[:-1], found[:-1]):
        return None
    if (sizes_of(weight) or []) != [own[-1], found[-1]] or not _is_learned_query(weight, output, 1):
        return None
    value = _typed(builder.op("MatMul", keys, weight), output.dtype, found)
    return value if added is None else _like(builder, output, "Add", value, added)


def _is_learned_query(weight: ir.Value | None, scores: ir.Value, at: int) -> bool:
    """Whether operand `at` is a weight of queries that keys are multiplied with, and normalized over."""
    queries = (sizes_of(weight) or [None])[-at]
    if weight is None or constant(weight) is None or not isinstance(queries, int):
        return False
    if queries == 1:
        return _feeds_softmax(scores)
    return _is_normalised_over(scores, (rank(scores) or 0) - 1 - at)


def _is_normalised_over(scores: ir.Value, axis: int) -> bool:
    """Whether a softmax of scores runs over this axis; others of them may run over another."""
    count, pending = rank(scores) or 0, [(scores, axis)]
    for _ in range(_MAX_DEPTH):
        if not pending:
            break
        value, at = pending.pop(0)
        for user, _ in value.uses():
            if rank(user.outputs[0]) != count:
                continue
            if is_op(user, "Softmax") and user.attributes.get_int("axis", -1) % count == at:
                return True
            if is_op(user, "Transpose"):
                pending.append((user.outputs[0], perm(user).index(at)))
            elif is_op(user, "Add", "Sub", "Mul", "Div", "Where", "Cast", "Identity"):
                pending.append((user.outputs[0], at))
    return False


def _einsum_with_weight(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """An einsum of keys and a weight of learned queries, as a matmul."""
    (texts, out), output = equation_of(node), node.outputs[0]
    at = next((at for at, each in enumerate(node.inputs) if not _is_computed(each)), 0)
    value, weight = node.inputs[1 - at] if len(node.inputs) == 2 else None, node.inputs[at]
    if value is None or weight is None or constant(weight) is None or rank(weight) != 2 or len(out) < 3:
        return None
    text, pair = texts[1 - at], texts[at]
    if len(pair) != 2:
        return None
    summed, query = sorted(pair, key=lambda letter: letter in out)
    rest = text.replace(summed, "")
    if sorted(rest + query) != sorted(out) or len({*text, query}) != len(text) + 1 or summed not in text:
        return None
    if not any(_is_normalised_over(output, out.index(letter)) for letter in rest):
        return None
    keys = _ordered(value, [text.index(letter) for letter in rest + summed], builder)
    queries = _ordered(weight, [pair.index(letter) for letter in summed + query], builder)
    sizes = [(sizes_of(output) or [None] * len(out))[out.index(letter)] for letter in rest + query]
    whole = _typed(
        builder.unsqueeze(queries, *range(len(out) - 2)),
        weight.dtype,
        [*[1] * (len(out) - 2), *(sizes_of(queries) or ())],
    )
    gemm = _typed(builder.op("MatMul", keys, whole), output.dtype, sizes)
    return _ordered(gemm, [(rest + query).index(letter) for letter in out], builder)


def _with_vector(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """A matmul with a computed vector, a single query or its weights, as one of matrices."""
    first, second = node.inputs
    output, sizes = node.outputs[0], [sizes_of(each) for each in node.inputs]
    at = 0 if len(sizes[0] or ()) == 1 else 1
    vector, matrix, own = (first, second)[at], (second, first)[at], sizes[1 - at]
    if vector is None or matrix is None or own is None or len(own) < 2 or not _is_computed(vector):
        return None
    if not _is_computed(matrix) or not (_feeds_softmax(output) or _is_weights(vector)):
        return None
    count = max(3, len(own))
    axes = [axis for axis in range(count) if axis != (count - 1 if at == 0 else count - 2)]
    size = (sizes[at] or [None])[0]
    row = [size if axis not in axes else 1 for axis in range(count)]
    wide = _typed(builder.unsqueeze(vector, *axes), vector.dtype, row)
    if len(own) < count:
        matrix = _typed(builder.unsqueeze(matrix, 0), matrix.dtype, [1, *own])
    whole = [*[1] * (count - len(own)), *own]
    found = [*whole[:-2], 1, whole[-1]] if at == 0 else [*whole[:-1], 1]
    gemm = _typed(builder.op("MatMul", *((wide, matrix) if at == 0 else (matrix, wide))), output.dtype, found)
    gone = [*range(count - len(own)), count - 2 if at == 0 else count - 1]
    return _like(builder, output, "Squeeze", gemm, builder.ints(*gone))


def _einsum_of_several(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """An einsum of three tensors or more, as einsums of two of them, one after the other.

    First come two with an axis in common that is summed. Computed ones come before weights: those may be
    multiplied with the result of attention as well. Where nothing is summed, one is multiplied with one that
    has its axes.
    """
    (texts, out), given = equation_of(node), [each for each in node.inputs if each is not None]
    if len(given) < len(texts) or not out or any("." in each for each in texts):
        return None
    if not (_feeds_softmax(node.outputs[0]) or any(map(_is_weights, given))):
        return None
    sizes = {
        letter: size
        for text, each in zip(texts, given, strict=True)
        for letter, size in zip(text, sizes_of(each) or (), strict=False)
    }
    while len(given) > 2:
        pairs = sorted(
            itertools.combinations(range(len(given)), 2),
            key=lambda pair: sum(not _is_computed(given[at]) for at in pair),
        )
        kept = [
            {*out, *(letter for at, text in enumerate(texts) if at not in pair for letter in text)}
            for pair in pairs
        ]
        shared = [set(texts[one]) & set(texts[other]) for one, other in pairs]
        candidates = [at for at in range(len(pairs)) if shared[at] - kept[at]]
        candidates += [
            at for at, pair in enumerate(pairs) if any(shared[at] == set(texts[each]) for each in pair)
        ]
        if not candidates:
            return None
        pair, wanted = pairs[candidates[0]], kept[candidates[0]]
        letters = "".join(dict.fromkeys(letter for at in pair for letter in texts[at] if letter in wanted))
        equation = f"{','.join(texts[at] for at in pair)}->{letters}"
        made = builder.op("Einsum", *(given[at] for at in pair), equation=equation)
        _typed(made, node.outputs[0].dtype, [sizes.get(letter) for letter in letters])
        rest = [at for at in range(len(given)) if at not in pair]
        given, texts = [*(given[at] for at in rest), made], [*(texts[at] for at in rest), letters]
    return _like(builder, node.outputs[0], "Einsum", *given, equation=f"{','.join(texts)}->{out}")


def _einsum_of_matrices(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """An einsum of two matrices, as one of batches."""
    (texts, out), output = equation_of(node), node.outputs[0]
    first, second, *_ = (*node.inputs, None)
    sizes, letter = (
        sizes_of(output),
        next(each for each in string.ascii_letters if each not in "".join(texts)),
    )
    if (
        [len(each) for each in texts] != [2, 2]
        or "." in out
        or sizes is None
        or first is None
        or second is None
    ):
        return None
    if not (_feeds_softmax(output) or _is_weights(first) or _is_weights(second)):
        return None
    wide = [
        _typed(builder.unsqueeze(each, 0), each.dtype, [1, *(sizes_of(each) or (None, None))])
        for each in (first, second)
    ]
    equation = f"{letter}{texts[0]},{letter}{texts[1]}->{letter}{out}"
    gemm = _typed(builder.op("Einsum", *wide, equation=equation), output.dtype, [1, *sizes])
    return _like(builder, output, "Squeeze", gemm, builder.ints(0))


def _einsum(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """An einsum of a single query, which has no axis of queries, as one with such an axis."""
    (texts, out), output = equation_of(node), node.outputs[0]
    inputs = ",".join(texts)
    if len(texts) > 2:
        return _einsum_of_several(node, builder)
    if len(texts) != 2 or not out or "." in inputs or not all(map(_is_computed, node.inputs)):
        return None
    for at in (0, 1):
        value, few, many = node.inputs[at], texts[at], texts[1 - at]
        within = set(few) <= set(many) and set(out) <= set(many) and len(set(few)) == len(few)
        if value is None or not within or not set(few) - set(out) or not set(many) - set(few):
            continue
        if not (_feeds_softmax(output) or _is_weights(value)):
            continue
        sizes, found = sizes_of(value), sizes_of(output)
        letter = next(each for each in string.ascii_letters if each not in inputs)
        if sizes is None or found is None:
            return None
        place = len(few) - 1
        wide = _typed(builder.unsqueeze(value, place), value.dtype, [*sizes[:place], 1, *sizes[place:]])
        texts[at] = few[:place] + letter + few[place:]
        row = len(out) - 1
        given = [wide if side == at else each for side, each in enumerate(node.inputs)]
        equation = f"{','.join(texts)}->{out[:row]}{letter}{out[row:]}"
        result = _typed(
            builder.op("Einsum", *given, equation=equation), output.dtype, [*found[:row], 1, *found[row:]]
        )
        return _like(builder, output, "Squeeze", result, builder.ints(row))
    return None


def _folded_ints(value: ir.Value | None) -> list[int] | None:
    """The integers that follow from constants alone, as TorchScript's exporter computes the sizes of pads."""
    found = folded(value)
    return None if found is None else [int(each) for each in np.ravel(found)]


def _padded(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """Scores with a constant beside them, as a softmax with one more in its denominator has it."""
    scores, output = node.inputs[0], node.outputs[0]
    axes = constant_ints(node, 3)
    pads = constant_ints(node, 1) or (_folded_ints(node.inputs[1]) if _feeds_softmax(output) else None)
    sizes, fill = sizes_of(scores), 0.0 if input_at(node, 2) is None else scalar_of(node.inputs[2])
    if scores is None or scores.dtype is None or not sizes or pads is None or fill is None:
        return None
    where = range(len(sizes)) if axes is None else [axis % len(sizes) for axis in axes]
    if (axes is None and input_at(node, 3) is not None) or len(pads) != 2 * len(where):
        return None
    ends = [(axis, pads[at], pads[at + len(where)]) for at, axis in enumerate(where)]
    more = [each for each in ends if each[1:] != (0, 0)]
    if node.attributes.get_string("mode", "constant") != "constant" or len(more) != 1:
        return None
    axis, before, after = more[0]
    if min(before, after) != 0 or max(before, after) < 1 or axis != len(sizes) - 1:
        return None
    if not _feeds_softmax(output):
        return None
    shape = builder.op("Shape", _of_same_rows(scores), start=0, end=-1)
    whole = builder.op("Concat", shape, builder.ints(before + after), axis=0)
    beside = builder.op("Expand", builder.constant(fill, scores.dtype), whole)
    beside = _typed(beside, scores.dtype, [*sizes[:-1], before + after])
    pair = (beside, scores) if before else (scores, beside)
    return _like(builder, output, "Concat", *pair, axis=-1)


def _scores_together(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """The scores of a past and of the present, or of other parts of the keys, as scores of all keys."""
    count = rank(node.outputs[0]) or 0
    if not count or node.attributes.get_int("axis", 0) % count != count - 1 or len(node.inputs) < 2:
        return None
    return _all_keys(list(node.inputs), node.outputs[0], builder) if _feeds_softmax(node.outputs[0]) else None


_WITH_KEYS = ("MatMul", "Mul", "Div", "Add", "Where")


def _all_keys(parts: Sequence[ir.Value | None], like: ir.Value, builder: NodeBuilder) -> ir.Value | None:
    """The scores that parts of them are, where each is computed in the same way; some may have no mask."""
    nodes = [node for each in parts if (node := made_by(each, *_WITH_KEYS)) is not None]
    masked = next((node for node in nodes if is_op(node, "Add", "Where")), None)
    if len(nodes) < len(parts) or any(None in node.inputs for node in nodes):
        return None
    if masked is not None:
        return _all_masked(masked, nodes, like, builder)
    first, second = zip(*(node.inputs for node in nodes), strict=True)
    if any(node.op_type != nodes[0].op_type for node in nodes):
        return None
    if is_op(nodes[0], "MatMul"):
        keys = _joined(second, -1, builder)
        same = keys is not None and all(same_value(each, first[0]) for each in first)
        return _like(builder, like, "MatMul", first[0], keys) if same else None  # type: ignore[arg-type]
    inner = _all_keys(first, like, builder) if all(same_value(each, second[0]) for each in second) else None
    if inner is None or scalar_of(second[0]) is None:
        return None
    return _like(builder, like, nodes[0].op_type, inner, second[0])  # type: ignore[arg-type]


def _all_masked(
    masked: ir.Node, nodes: Sequence[ir.Node], like: ir.Value, builder: NodeBuilder
) -> ir.Value | None:
    """The same where the scores of some keys, or of all, have a mask; the others get one that hides none."""
    adds = is_op(masked, "Add")
    at = 0 if adds else 1 if scalar_of(masked.inputs[1]) is None else 2
    mask, numbers, masks = masked.inputs[int(adds)], set[float | None](), list[ir.Value | None]()
    rows, dtype = sizes_of(mask), None if mask is None else mask.dtype
    if mask is None or not rows or dtype is None:
        return None
    nothing = builder.constant(0.0 if adds else at == 1, dtype)
    for node in nodes:
        if node.op_type == masked.op_type:
            masks.append(node.inputs[int(adds)])
            numbers.add(None if adds else scalar_of(node.inputs[3 - at]))
            continue
        scores, lead = node.outputs[0], builder.op("Shape", mask, end=-1)
        shape = builder.op("Concat", lead, builder.op("Shape", scores, start=-1), axis=0)
        keys = (sizes_of(scores) or [None])[-1]
        masks.append(_typed(builder.op("Expand", nothing, shape), dtype, [*rows[:-1], keys]))
    inner = [node.inputs[at] if node.op_type == masked.op_type else node.outputs[0] for node in nodes]
    scores_of_all = _all_keys(inner, like, builder)
    mask_of_all = _joined(masks, -1, builder, [node.outputs[0] for node in nodes])
    if scores_of_all is None or mask_of_all is None or len(numbers) != 1 or (None in numbers) != adds:
        return None
    if adds:
        return _like(builder, like, "Add", scores_of_all, mask_of_all)
    pair = [scores_of_all, masked.inputs[3 - at]]
    return _like(builder, like, "Where", mask_of_all, *(pair if at == 1 else pair[::-1]))  # type: ignore[arg-type]


def _joined(
    parts: Sequence[ir.Value | None], axis: int, builder: NodeBuilder, wanted: Sequence[ir.Value | None] = ()
) -> ir.Value | None:
    """Tensors one after the other along an axis; each has all of it, as the wanted ones have."""
    shapes = [list(sizes_of(each) or ()) for each in parts]
    if not all(shapes) or any(len(each) != len(shapes[0]) for each in shapes):
        return None
    if any(
        shape[axis] != (sizes_of(each) or [None])[axis] for shape, each in zip(shapes, wanted, strict=False)
    ):
        return None
    numbers = [shape[axis] for shape in shapes]
    whole = sum(each for each in numbers if isinstance(each, int))
    named = [str(each) for each in numbers if not isinstance(each, int)]
    size = " + ".join([*named, *([str(whole)] if whole else [])]) if named else whole
    others = [[each for at, each in enumerate(shape) if at != axis % len(shape)] for shape in shapes]
    if None in numbers or any(each != others[0] for each in others):
        return None
    shapes[0][axis] = size
    joined = builder.op("Concat", *(each for each in parts if each is not None), axis=axis)
    return _typed(joined, parts[0].dtype if parts[0] else None, shapes[0])


def _values_together(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """The sum of weights of some keys times their values, and of the others times theirs."""
    matmuls = [each for value in node.inputs if (each := made_by(value, "MatMul")) is not None]
    if len(matmuls) != 2:
        return None
    slices = [made_by(each.inputs[0], "Slice", "Split") for each in matmuls]
    sources = [input_at(each, 0) for each in slices]
    if None in slices or sources[0] is not sources[1] or sources[0] is None or not _is_weights(sources[0]):
        return None
    order = _halves([each.inputs[0] for each in matmuls], rank(sources[0]) or 0)
    values = None if order is None else _joined([matmuls[at].inputs[1] for at in order], -2, builder)
    return None if values is None else _like(builder, node.outputs[0], "MatMul", sources[0], values)


def _halves(parts: Sequence[ir.Value | None], count: int) -> Sequence[int] | None:
    """Which of two parts of a tensor is the first along its last axis, where they are all of it."""
    first, second = (each.producer() for each in parts if each is not None)
    if first is None or second is None or first.op_type != second.op_type:
        return None
    if is_op(first, "Split"):
        whole = first is second and len(first.outputs) == 2 and parts[0] is not parts[1]
        axis = first.attributes.get_int("axis", 0) % count
        return (
            (0, 1)
            if whole and axis == count - 1 and parts[0] is first.outputs[0]
            else (1, 0)
            if whole
            else None
        )
    for order in ((0, 1), (1, 0)):
        one, other = (((first, second)[at]) for at in order)
        axes = [constant_ints(each, 3) for each in (one, other)]
        plain = all(each is not None and [at % count for at in each] == [count - 1] for each in axes)
        steps = [constant_ints(each, 4) if input_at(each, 4) is not None else (1,) for each in (one, other)]
        begins = constant_ints(one, 1) == (0,) and same_value(input_at(one, 2), input_at(other, 1))
        ends = constant_ints(other, 2) or (0,)
        if plain and begins and ends[0] >= NO_END and all(tuple(each or ()) == (1,) for each in steps):
            return order
    return None


def _part(value: ir.Value, part: TensorPart, builder: NodeBuilder, depth: int = 0) -> ir.Value | None:
    """A part of what is computed from tensors one after the other, by the one that it is."""
    sizes, node = sizes_of(value), made_by(value, "Concat", *_EACH)
    if sizes is None or node is None or part.end is None or depth > _MAX_DEPTH:
        return None
    if is_op(node, "Concat"):
        begin = 0
        for each in (
            node.inputs if node.attributes.get_int("axis", 0) % len(sizes) - len(sizes) == part.axis else ()
        ):
            size = (sizes_of(each) or [None] * len(sizes))[part.axis]
            if not isinstance(size, int) or begin > part.begin:
                return None
            if (begin, begin + size) == (part.begin, part.end):
                return each
            begin += size
        return None
    given = list[ir.Value | None]()
    for each in node.inputs:
        own = sizes_of(each) or []
        whole = len(own) < -part.axis or own[part.axis] == 1
        given.append(each if whole or each is None else _part(each, part, builder, depth + 1))
    if None in given or all(map(operator.is_, given, node.inputs)):
        return None
    result = builder.node(node.op_type, given, attributes=dict(node.attributes))[0]
    sizes[part.axis] = part.end - part.begin
    return _typed(result, value.dtype, sizes)


def _part_of_weights(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """The matmul of V with a part of the weights of several attentions: with a softmax of its own."""
    for at, each in enumerate(node.inputs):
        part = part_of(each)
        softmax = None if part is None else made_by(part.source, "Softmax")
        scores = input_at(softmax, 0)
        if each is None or part is None or softmax is None or scores is None:
            continue
        axis = _axis_of(softmax)
        own = _part(scores, part, builder) if axis != part.axis else None
        if own is None:
            continue
        given = list(node.inputs)
        given[at] = _like(builder, each, "Softmax", own, axis=axis)
        result = builder.node(node.op_type, given, attributes=dict(node.attributes))[0]
        return _typed(result, node.outputs[0].dtype, sizes_of(node.outputs[0]))
    return None


def _columns(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """Some columns of a matmul of weights, where V has them beside others, as ones that give their sum."""
    part = part_of(node.outputs[0])
    matmul = None if part is None else made_by(part.source, "MatMul")
    weights, values = (input_at(matmul, at) for at in (0, 1))
    if part is None or part.end is None or weights is None or values is None:
        return None
    if part.axis != -1 or not _is_weights(weights):
        return None
    own = _part(values, part, builder)
    if own is None:
        return None
    if scalar_of(own) == 1.0 and part.end - part.begin == 1:
        return _like(builder, node.outputs[0], "ReduceSum", weights, builder.ints(-1), keepdims=1)
    return _like(builder, node.outputs[0], "MatMul", weights, own)


_EACH = ("Add", "Sub", "Mul", "Div", "Neg", "Cast", "Where", "Tanh", "Identity")


def _behind(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """What all keys share, behind the matmul with V."""
    steps = [made_by(each, *_MOVED) for each in node.inputs]
    for step in filter(None, steps):
        if (moved := _MOVED[step.op_type](node, step, builder)) is not None:
            return moved
    return None


def _distributed(matmul: ir.Node, step: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """Sums and differences of weights, or of weights and something else, times V: those of the matmuls."""
    if len(step.outputs[0].uses()) != 1 or not all(map(_is_computed, matmul.inputs)):
        return None
    if not _reaches_weights(step.outputs[0]):
        return None
    return _linear(step.outputs[0], matmul, step, {}, builder)


def _linear(
    value: ir.Value | None,
    matmul: ir.Node,
    step: ir.Node,
    known: dict[ir.Value, ir.Value],
    builder: NodeBuilder,
) -> ir.Value | None:
    """What is linear in weights, times V."""
    node, output = made_by(value, "Add", "Sub", "Mul", "Div"), matmul.outputs[0]
    if value is None or not _reaches_weights(value):
        return None if value is None else _other_times_values(value, matmul, step, builder)
    if _has_weights(value):
        whole = sizes_of(value) == sizes_of(step.outputs[0])
        return _times_values(matmul, step, value, known, builder) if whole else None
    if node is None or None in node.inputs:
        return None
    if is_op(node, "Add", "Sub"):
        parts = [_linear(each, matmul, step, known, builder) for each in node.inputs]
        found = [each for each in parts if each is not None]
        return _like(builder, output, node.op_type, *found) if len(found) == 2 else None
    at = 0 if _reaches_weights(node.inputs[0]) else 1
    factor, sizes = node.inputs[1 - at], sizes_of(node.inputs[1 - at])
    if factor is None or sizes is None or (at and is_op(node, "Div")) or _reaches_weights(factor):
        return None
    if any(size != 1 for size in (sizes[-1:] if is_op(matmul, "MatMul") else sizes)):
        return None
    inner = _linear(node.inputs[at], matmul, step, known, builder)
    if inner is None:
        return None
    return _like(builder, output, node.op_type, *((inner, factor) if at == 0 else (factor, inner)))


def _other_times_values(
    value: ir.Value, matmul: ir.Node, step: ir.Node, builder: NodeBuilder
) -> ir.Value | None:
    """What is added to weights, times V; where it is the same for all keys, times their sum."""
    sizes, own, values = sizes_of(value), sizes_of(step.outputs[0]) or [], matmul.inputs[1]
    if not is_op(matmul, "MatMul") or matmul.inputs[0] is not step.outputs[0] or sizes is None or not own:
        return None
    if values is None or len(sizes_of(values) or ()) != len(own):
        return None
    if sizes[-1:] in ([], [1]):
        total = builder.op("ReduceSum", values, builder.ints(-2), keepdims=1)
        return builder.op("Mul", value, total)
    return builder.op("MatMul", value, values) if sizes[-2:] == own[-2:] else None


def _reaches_weights(value: ir.Value | None) -> bool:
    """Whether a value is computed from weights by sums and products."""
    near = nodes_behind([value], lambda node: node.inputs if is_op(node, "Add", "Sub", "Mul", "Div") else ())
    return any(_has_weights(each) for node in itertools.islice(near, 16) for each in node.outputs)


def _has_weights(value: ir.Value | None) -> bool:
    """Whether a value is a softmax, or some of its heads."""
    chosen = made_by(value, "Gather")
    if chosen is not None:
        value = chosen.inputs[0]
        value = input_at(made_by(value, "Reshape"), 0) or value
    return _is_softmax(value)


def _is_softmax(value: ir.Value | None) -> bool:
    """Whether a value is a softmax, in whichever type."""
    while (step := made_by(value, "Cast", "Identity")) is not None:
        value = step.inputs[0]
    return made_by(value, "Softmax") is not None


def _times_values(
    matmul: ir.Node,
    step: ir.Node,
    weights: ir.Value,
    known: dict[ir.Value, ir.Value],
    builder: NodeBuilder,
) -> ir.Value | None:
    """Weights times V. Where they are some heads of others, those of the result, which is computed once."""
    output, chosen = matmul.outputs[0], made_by(weights, "Gather")
    if chosen is None:
        given = [weights if each is step.outputs[0] else each for each in matmul.inputs]
        result = builder.node(matmul.op_type, given, attributes=dict(matmul.attributes))[0]
        return _typed(result, output.dtype, sizes_of(output))
    whole, index = chosen.inputs
    values, sizes, own = matmul.inputs[1], sizes_of(whole), sizes_of(matmul.inputs[1])
    if whole is None or values is None or sizes is None or own is None or not is_op(matmul, "MatMul"):
        return None
    axis = chosen.attributes.get_int("axis", 0) % len(sizes)
    if axis >= len(sizes) - 2 or len(own) != len(sizes) - 1 or rank(index) != 0 or values is step.outputs[0]:
        return None
    if whole not in known:
        wide = _typed(builder.unsqueeze(values, axis), values.dtype, [*own[:axis], 1, *own[axis:]])
        known[whole] = _typed(builder.op("MatMul", whole, wide), output.dtype, [*sizes[:-1], own[-1]])
    return _like(builder, output, "Gather", known[whole], index, axis=axis)  # type: ignore[arg-type]


def _moved_behind(matmul: ir.Node, step: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """Weights that are multiplied or chosen by something that is the same for all keys: the result is."""
    output = matmul.outputs[0]
    at = next((at for at, each in enumerate(step.inputs) if _is_softmax(each)), None)
    weights = None if at is None else step.inputs[at]
    if weights is None or sizes_of(weights) != sizes_of(step.outputs[0]) or (at and is_op(step, "Div")):
        return None
    inputs = [each if each is weights else _before_copies(each) for each in step.inputs]
    others = [each for each in inputs if each is not None and each is not weights]
    shapes = [sizes_of(each) for each in others]
    if len(others) < len(step.inputs) - 1:
        return None
    if len(step.outputs[0].uses()) != 1 or any(
        each is None or len(each) > (rank(output) or 0) for each in shapes
    ):
        return None
    if is_op(step, "Mul") and (scaled := _times_of_keys(matmul, step, weights, others[0], builder)):
        return scaled
    alike = is_op(matmul, "MatMul") and all((each or [1])[-1] == 1 for each in shapes)
    single = all(size == 1 for each in shapes for size in each or ())
    if not (alike or single) or (is_op(step, "Where") and scalar_of(others[-1]) != 0.0):
        return None
    given = [weights if each is step.outputs[0] else each for each in matmul.inputs if each is not None]
    result = builder.node(matmul.op_type, given, attributes=dict(matmul.attributes))[0]
    _typed(result, output.dtype, sizes_of(output))
    given = [result if each is weights else each for each in inputs if each is not None]
    return _like(builder, output, step.op_type, *given)


def _times_of_keys(
    matmul: ir.Node, step: ir.Node, weights: ir.Value, factor: ir.Value, builder: NodeBuilder
) -> ir.Value | None:
    """Weights that are multiplied by something that is the same for all queries: V is."""
    values = matmul.inputs[1]
    if not is_op(matmul, "MatMul") or matmul.inputs[0] is not step.outputs[0] or values is None:
        return None
    if (column := _as_column(factor, values, rank(weights) or 0, builder)) is None:
        return None
    scaled = _like(builder, values, "Mul", values, column)
    return _like(builder, matmul.outputs[0], "MatMul", weights, scaled)


def _over_weighted_sum(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """`(p * m / sum(p * m)) @ v` and `(p * m) @ v / sum(p * m)`, where m is the same for all queries.

    V is multiplied by m, and m is one more column of it, which gives the sum.
    """
    behind = is_op(node, "Div")
    matmul, quotient = made_by(node.inputs[0], "MatMul") if behind else node, node
    if not behind:
        quotient = made_by(node.inputs[0], "Div") or node
    values, numbers = input_at(matmul, 1), input_at(matmul if behind else quotient, 0)
    total = None if matmul is quotient else _total_of(quotient.inputs[1])
    times = None if total is None else made_by(total[0], "Mul")
    if matmul is None or values is None or total is None or times is None:
        return None
    if total[1] != -1 or numbers is not total[0]:
        return None
    for at in (0, 1):
        powers, factor = made_by(times.inputs[at], "Exp", "Softmax"), times.inputs[1 - at]
        scores, wide = input_at(powers, 0), sizes_of(values)
        if scores is None or factor is None or wide is None or sizes_of(scores) != sizes_of(total[0]):
            continue
        if is_op(powers, "Softmax") and _axis_of(powers) != -1:
            continue
        if (column := _as_column(factor, values, rank(scores) or 0, builder)) is None:
            continue
        weights = _like(builder, scores, "Softmax", scores, axis=-1)
        scaled = _like(builder, values, "Mul", values, column)
        lengths = builder.op("Concat", builder.op("Shape", values, end=-1), builder.ints(1), axis=0)
        own = _typed(builder.op("Expand", column, lengths), values.dtype, [*wide[:-1], 1])
        both = _joined([scaled, own], -1, builder)
        dims, size = sizes_of(matmul.outputs[0]) or [], (sizes_of(both) or [None])[-1]
        if both is None:
            return None
        sums = _typed(builder.op("MatMul", weights, both), values.dtype, [*dims[:-1], size])
        first = builder.op("Slice", sums, *map(builder.ints, (0, -1, -1)))
        last = builder.op("Slice", sums, *map(builder.ints, (-1, NO_END, -1)))
        return _like(builder, node.outputs[0], "Div", first, last)
    return None


def _as_column(factor: ir.Value, values: ir.Value, count: int, builder: NodeBuilder) -> ir.Value | None:
    """What multiplies weights, the same for all queries, as what multiplies the rows of V."""
    own, wide = sizes_of(factor) or [], sizes_of(values)
    if wide is None or not own or own[-1] == 1 or (len(own) > 1 and own[-2] != 1):
        return None
    before = [*[1] * (count - len(own)), *own][:-2]
    if len(wide) != count or any(one not in (1, other) for one, other in zip(before, wide, strict=False)):
        return None
    if len(own) == 1:
        return builder.unsqueeze(factor, -1)
    return builder.transpose(factor, *range(len(own) - 2), len(own) - 1, len(own) - 2)


def _reduced_behind(matmul: ir.Node, step: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """Weights that are summed over heads which share V: the results are."""
    weights, values = step.inputs[0], matmul.inputs[1]
    whole, own = sizes_of(weights), sizes_of(values)
    if not is_op(matmul, "MatMul") or matmul.inputs[0] is not step.outputs[0] or whole is None or own is None:
        return None
    axis, kept = _summed_axis(step, len(whole)), step.attributes.get_int("keepdims", 1)
    if weights is None or values is None or axis is None or not _is_softmax(weights):
        return None
    if axis >= len(whole) - 2 or len(own) != len(whole) - (0 if kept else 1) or (kept and own[axis] != 1):
        return None
    if len(step.outputs[0].uses()) != 1:
        return None
    if not kept:
        values = _typed(builder.unsqueeze(values, axis), values.dtype, [*own[:axis], 1, *own[axis:]])
    found = [*whole[:-1], own[-1]]
    result = _typed(builder.op("MatMul", weights, values), matmul.outputs[0].dtype, found)
    return _like(builder, matmul.outputs[0], step.op_type, result, builder.ints(axis), keepdims=kept)


_MOVED = {"Where": _moved_behind, "Mul": _moved_behind, "Div": _moved_behind, "Add": _distributed}
_MOVED |= {"Sub": _distributed, "ReduceMean": _reduced_behind, "ReduceSum": _reduced_behind}


def _batched(
    first: ir.Value | None, second: ir.Value | None, like: ir.Value, builder: NodeBuilder
) -> ir.Value | None:
    sizes = sizes_of(like)
    if first is None or second is None or sizes is None or None in (rank(first), rank(second)):
        return None
    if not (_feeds_softmax(like) or _is_weights(first) or _is_weights(second)):
        return None
    count = max(3, len(sizes))
    one, other = (
        _typed(builder.unsqueeze(each, *range(more)), each.dtype, [*[1] * more, *(sizes_of(each) or ())])
        if (more := count - (rank(each) or 0))
        else each
        for each in (first, second)
    )
    if count == len(sizes):
        return _like(builder, like, "MatMul", one, other)
    gemm = _typed(builder.op("MatMul", one, other), like.dtype, [1, *sizes])
    return _like(builder, like, "Squeeze", gemm, builder.ints(0))


_STEPS = frozenset(
    {"Add", "Sub", "Mul", "Div", "Where", "Cast", "Neg", "Max", "Min", "Exp", "Softmax", "Identity", "Tanh"}
    | {"LogSoftmax", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Dropout", "ReduceSum"}
)


def _feeds_softmax(value: ir.Value) -> bool:
    """Whether a value comes to a softmax by small steps."""
    pending, seen = [value], set[ir.Node]()
    while pending and len(seen) < 64:
        for node, _ in pending.pop().uses():
            if is_op(node, "Softmax", "LogSoftmax", "Exp"):
                return True
            if is_op(node, *_STEPS) and node not in seen:
                seen.add(node)
                pending += node.outputs
    return False


def _is_weights(value: ir.Value) -> bool:
    """Whether a value comes from a softmax by small steps."""
    near = nodes_behind([value], lambda node: node.inputs if is_op(node, *_STEPS) else ())
    return any(is_op(node, "Softmax", "Exp") for node in itertools.islice(near, 16))


def _without_gemm(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """`alpha * a @ b + beta * c` of two computed matrices."""
    first, second, added = (input_at(node, at) for at in (0, 1, 2))
    output, dtype = node.outputs[0], node.outputs[0].dtype
    if first is None or second is None or dtype is None or not (_is_computed(first) and _is_computed(second)):
        return None
    transposed = list[ir.Value]()
    for each, name in ((first, "transA"), (second, "transB")):
        if node.attributes.get_int(name, 0):
            sizes = (sizes_of(each) or [None, None])[::-1]
            each = _typed(builder.transpose(each, 1, 0), each.dtype, sizes)
        transposed.append(each)
    if (value := _batched(transposed[0], transposed[1], output, builder)) is None:
        return None
    alpha, beta = (node.attributes.get_float(name, 1.0) for name in ("alpha", "beta"))
    if alpha != 1.0:
        value = _like(builder, output, "Mul", value, builder.constant(alpha, dtype))
    if added is not None and beta:
        if beta != 1.0:
            scaled = builder.op("Mul", added, builder.constant(beta, dtype))
            added = _typed(scaled, added.dtype, sizes_of(added))
        value = _like(builder, output, "Add", value, added)
    return value


def _masked_or_squared(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """Weights times a mask of zeros and ones, or a power times itself."""
    exponent = input_at(made_by(node.inputs[0], "Exp"), 0) if node.inputs[0] is node.inputs[1] else None
    if exponent is not None:
        return _squared(exponent, builder)
    for at in (0, 1):
        weights = node.inputs[at]
        softmax = made_by(weights, "Softmax")
        if weights is None or softmax is None or sizes_of(weights) != sizes_of(node.outputs[0]):
            continue
        mask = _choice(node.inputs[1 - at], builder)
        shown = None if mask is None else _kept(mask, (1.0, 0.0))
        if mask is not None and shown is not None and len(node.outputs[0].uses()) == 1:
            return _masked(builder, weights, mask.condition, shown, 0.0)
    return None


def _normed_scores(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """Scores behind a BatchNormalization: a factor and a shift for each head."""
    scores, output, count = node.inputs[0], node.outputs[0], rank(node.inputs[0]) or 0
    numbers = [array_of(each) for each in node.inputs[1:]]
    arrays = [each.astype(np.float64) for each in numbers if each is not None]
    if scores is None or len(arrays) != 4 or count < 3 or not _feeds_softmax(output) or output.dtype is None:
        return None
    if node.attributes.get_int("training_mode", 0):
        return None
    scale, shift, mean, variance = arrays
    factor = scale / np.sqrt(variance + (node.attributes.get_float("epsilon", 1e-5) or 0.0))
    shape = (-1, *[1] * (count - 2))
    times, more = (
        builder.constant(each.reshape(shape), output.dtype) for each in (factor, shift - mean * factor)
    )
    return _like(builder, output, "Add", _like(builder, output, "Mul", scores, times), more)


def _convolved(node: ir.Node, builder: NodeBuilder) -> ir.Value | None:
    """A convolution of single points with computed weights, as a matmul; its groups are heads."""
    value, weights, output = node.inputs[0], node.inputs[1], node.outputs[0]
    sizes, own = sizes_of(value) or [], sizes_of(weights) or []
    groups = node.attributes.get_int("group", 1)
    if not _is_computed(value) or not _is_computed(weights) or input_at(node, 2) is not None:
        return None
    fixed = [each for each in (*sizes[1:2], *own[:2]) if isinstance(each, int)]
    if value is None or weights is None or not is_pointwise(node) or len(fixed) != 3:
        return None
    shape = [each if isinstance(each, int) else -1 for each in sizes[2:]]
    if shape.count(-1) > 1:
        return None
    channels, rows, points = fixed[0] // groups, fixed[1] // groups, product(sizes[2:])
    flat = builder.reshape(value, 0, groups, channels, -1)
    flat = _typed(flat, value.dtype, [sizes[0], groups, channels, points])
    kernel = _typed(
        builder.reshape(weights, 1, groups, rows, channels), value.dtype, [1, groups, rows, channels]
    )
    gemm = _typed(builder.op("MatMul", kernel, flat), value.dtype, [sizes[0], groups, rows, points])
    return _like(builder, output, "Reshape", gemm, builder.ints(0, fixed[1], *shape))


# The first one that gives a value is applied.
_RULES: dict[str, Sequence[Rule]] = {
    "Add": (_unchanged, _tanh, _values_together, _blend),
    "Sub": (_unchanged, _zeros_like, _tanh, _blend),
    "Min": (_unchanged, _minimum),
    "Where": (_unchanged, _hidden_behind, _zero_rows),
    "Div": (_unchanged, _normalised, _over_mean, _in_chunks, _over_weighted_sum),
    "Mul": (_unchanged, _zeros_like, _masked_or_squared, _normalised, _in_chunks),
    "Exp": (_by_logarithm,),
    "Pow": (_unchanged, _power),
    "Gather": (_only_one,),
    "ReduceSum": (_multiplied_and_summed,),
    "MatMul": (_by_ones, _part_of_weights, _over_weighted_sum, _behind),
    "Einsum": (_part_of_weights, _behind, _einsum),
    "Slice": (_unchanged, _columns),
    "Conv": (_convolved,),
    "BatchNormalization": (_normed_scores,),
    "Pad": (_unchanged, _padded),
    "Concat": (_unchanged, _scores_together),
    "Sum": (_unchanged, _sum),
    "Split": (_first_part,),
    "Reshape": (_restored, _of_joined_rows),
    "Squeeze": (_restored,),
    "LpNormalization": (_by_norm,),
    "ReduceLogSum": (_other_sum,),
    "ReduceSumSquare": (_other_sum,),
}
_RULES |= dict.fromkeys(("Max", "Clip", "Expand", "Mean"), (_unchanged,))
_RULES |= dict.fromkeys(_COMPARED, (_condition,)) | {"Cast": (_unchanged, _condition)}
# What is written as matrices keeps its form until the others are done.
_RULES_OF_RANKS: dict[str, Sequence[Rule]] = {
    "MatMul": (_matmul,),
    "Gemm": (_without_gemm,),
    "Einsum": (_einsum_of_matrices, _einsum_with_weight),
}
