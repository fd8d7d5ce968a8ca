"""Recognise attention, and count what looks like attention and is not recognised."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from mha_deploy.graph.attention_node import is_attention
from mha_deploy.graph.fuse.masks import Masking, decide_masking
from mha_deploy.graph.fuse.scores import (
    Alphabet,
    Axes,
    Matmul,
    Multiplier,
    Normalisation,
    Operand,
    Sink,
    UsedWeights,
    Wider,
    read_matmul,
    read_scores,
    read_weights,
    softmax_at,
    unwrap,
)
from mha_deploy.graph.fuse.sizes import graphs_in
from mha_deploy.graph.fuse.values import (
    NotExpressible,
    NotFused,
    Size,
    module_of,
    same_dim,
    sizes_of,
    softmax_type_of,
)
from mha_deploy.graph.ir import is_op, made_by, node_name, rank

# -- Recognise one attention around a softmax ------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Letters:
    """The letters of the axes of one attention."""

    batch: str  # one or more letters: Attention takes them as one axis
    head: str | None  # none where the heads are part of the batch
    query: str  # the queries
    key: str  # the keys
    size: str  # the size of a head of Q and K
    value_size: str  # the size of a head of V

    def order(self, rows: str, columns: str) -> Axes:
        """The axes of a tensor as Attention wants them."""
        return (self.batch, *(self.head or ""), rows, columns)


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """One attention, read."""

    softmax: ir.Node  # its softmax
    last: ir.Node  # the matmul with V, whose result is the result of attention
    out: Axes  # the axes of that result
    letters: Letters  # the names of the axes
    sizes: Mapping[str, Size]  # the sizes of all letters
    q: Operand  # queries, as they were before scaling and transposing
    k: Operand  # keys, before repeating as well
    v: Operand  # values, before repeating as well
    scale: float  # the factor on the scores
    multipliers: tuple[Multiplier, ...]  # tensors that Q is multiplied with
    softcap: float  # bound of the scores; 0 for none
    softmax_dtype: ir.DataType | None  # type of the softmax where it is not that of Q
    masking: Masking  # what the masks become
    Hq: int  # query heads
    Hkv: int  # key/value heads
    weights: UsedWeights | None  # the weights, where they are used elsewhere too
    batches: bool  # whether Q, K and V may have different batches, of which some are 1
    lengths: bool  # whether K may have a single key where V and a mask have more
    wider: tuple[Wider, ...]  # axes of masks that may be larger than those of Q and K
    sink: Sink | None  # scores that are appended to those of the keys


def read_pattern(softmax: Normalisation) -> Pattern:
    """Recognise the attention around a softmax.

    Raises:
        NotFused: It is not attention, or not one that can be written as one node.
    """
    alphabet = Alphabet()
    scores = read_scores(softmax, alphabet)
    axes = tuple(string.ascii_letters[: (rank(softmax.source) or 0)])  # the first letters, in order
    weights = read_weights(softmax, axes, alphabet, scores.sink)
    if scores.sink is not None:
        axes = tuple(scores.sink.inner if each == scores.sink.outer else each for each in axes)
    if scores.matmul is None:
        raise NotFused("Its scores have no matmul.")
    second = read_matmul(weights.matmul)
    own = second.axes[weights.position]
    if len(own) != len(weights.axes):
        raise NotFused("The weights have another number of axes than the scores.")
    second = second.named(alphabet, dict(zip(own, weights.axes, strict=True))).resolved(alphabet)
    first = scores.matmul.resolved(alphabet)
    letters = _letters(alphabet.resolved(axes), softmax.axis, first, second, weights.position)
    q, k, v = _operands(first, second, letters, weights.position, alphabet.sizes)
    if letters.head is not None and not all(isinstance(each.dim(letters.head), int) for each in (q, k, v)):
        # Heads of an unknown number are part of the batch.
        letters = replace(letters, batch=letters.batch + letters.head, head=None)
        q, k, v = _operands(first, second, letters, weights.position, alphabet.sizes)
    wider = tuple(each._replace(axis=alphabet.resolved((each.axis,))[0]) for each in scores.wider)
    batches, lengths = _check_sizes(q, k, v, letters, wider, is_op(second.node, "MatMul"))
    dtype = q.value.dtype
    types = [dtype, k.value.dtype, v.value.dtype, weights.value.dtype]
    if len(set(types)) != 1 or dtype is None:
        raise NotFused("Q, K, V and the weights have different types.", got=", ".join(map(str, types)))
    used = weights.used and weights.used._replace(axes=alphabet.resolved(weights.used.axes))
    if used is not None and used.value.dtype != dtype:  # as an output of Attention they have the type of Q
        what = "The attention weights are used elsewhere too, in another type than Q."
        raise NotExpressible(what, got=f"{used.value.dtype}, Q is {dtype}")
    softmax_types = [scores.softmax_dtype, softmax_type_of(softmax.node), first.node.outputs[0].dtype]
    wide_types = [each for each in softmax_types if each is not None and each.itemsize > dtype.itemsize]
    masking = decide_masking(
        [replace(term, axes=alphabet.resolved(term.axes)) for term in scores.terms],
        dtype=dtype,
        sizes=(q.dim(letters.query), k.dim(letters.key)),
        guarded=weights.guarded,
        order=(letters.query, letters.key),
        softcap=scores.softcap,
        sink=scores.sink is not None,
    )
    Hq, Hkv = _heads(q, k, v, letters.head)
    scale = scores.factor * q.factor * k.factor
    if not scale > 0:
        raise NotExpressible("The scores are scaled by a number that is not positive.", got=scale)
    return Pattern(
        softmax=softmax.node,
        last=second.node,
        out=second.out,
        letters=letters,
        sizes=alphabet.sizes,
        q=q,
        k=k,
        v=v,
        scale=scale,
        multipliers=tuple(replace(each, axes=alphabet.resolved(each.axes)) for each in scores.multipliers),
        softcap=scores.softcap,
        softmax_dtype=next(iter(wide_types), None),
        masking=masking,
        Hq=Hq,
        Hkv=Hkv,
        weights=used,
        batches=batches,
        lengths=lengths,
        sink=scores.sink and replace(scores.sink, axes=alphabet.resolved(scores.sink.axes)),
        wider=tuple(each for each in wider if each.axis in (*letters.batch, letters.query)),
    )


def _letters(axes: Axes, axis: int, first: Matmul, second: Matmul, position: int) -> Letters:
    """What each letter is."""
    left, right, out = ("".join(each) for each in (*first.axes, first.out))
    values, result = "".join(second.axes[1 - position]), "".join(second.out)
    key = axes[axis]
    summed = {letter for letter in values if letter in "".join(axes) and letter not in result}
    if len(key) != 1 or (key in left) == (key in right) or summed != {key}:
        raise NotExpressible(f"The softmax runs over axis {axis}, the matmul with V sums over another.")
    shared = set(left) & set(right)
    batches = [letter for letter in out if letter in shared]
    queries = [letter for letter in out if letter not in shared and letter != key]
    sizes = [letter for letter in left + right if letter not in out]
    sizes_v = [letter for letter in values if letter not in out]
    if set(sizes) - shared or len(set(sizes)) != 1 or not batches or len(queries) != 1 or len(sizes_v) != 1:
        raise NotFused("The two matmuls are not those of attention.", got=f"{first} and {second}")
    wanted = {*batches, queries[0], sizes_v[0]}
    if set(values) != {*batches, key, sizes_v[0]} or set(result) != wanted:
        raise NotFused("The matmul with V is not that of attention.", got=str(second))
    return Letters(
        batch="".join(batches[:-1]) or batches[0],
        head=batches[-1] if len(batches) > 1 else None,
        query=queries[0],
        key=key,
        size=sizes[0],
        value_size=sizes_v[0],
    )


def _operands(
    first: Matmul, second: Matmul, letters: Letters, position: int, sizes: Mapping[str, Size]
) -> tuple[Operand, Operand, Operand]:
    at = 0 if any(letters.query in axis for axis in first.axes[0]) else 1
    raw_q = Operand(value=first.values[at], axes=first.axes[at], sizes=sizes)
    raw_k = Operand(value=first.values[1 - at], axes=first.axes[1 - at], sizes=sizes)
    raw_v = Operand(value=second.values[1 - position], axes=second.axes[1 - position], sizes=sizes)
    if any(sizes_of(each.value) is None for each in (raw_q, raw_k, raw_v)):
        raise NotFused("The file does not tell the shapes of Q, K and V.")
    key_order = letters.order(letters.key, letters.size)
    value_order = letters.order(letters.key, letters.value_size)
    # Q and K may have been upcast for the scores alone.
    dtype = raw_v.value.dtype
    q = unwrap(raw_q, wanted=letters.order(letters.query, letters.size), head=None, dtype=dtype)
    k = unwrap(raw_k, wanted=key_order, head=letters.head, dtype=dtype)
    v = unwrap(raw_v, wanted=value_order, head=letters.head, scaled=False)
    if letters.head is not None and not same_dim(k.dim(letters.head), v.dim(letters.head)):
        # Only one of the two was repeated, or in another way: take both as they come.
        k = unwrap(raw_k, wanted=key_order, head=None, dtype=dtype)
        v = unwrap(raw_v, wanted=value_order, head=None, scaled=False)
    return q, k, v


def _check_sizes(
    q: Operand, k: Operand, v: Operand, letters: Letters, wider: tuple[Wider, ...], contracted: bool
) -> tuple[bool, bool]:
    """Whether Q, K and V may differ in their batches, and K and V in their lengths."""
    lengths = [each.dim(letters.key) for each in (k, v)]
    if not same_dim(*lengths) and (all(isinstance(each, int) for each in lengths) or not contracted):
        got = f"{lengths[0]} and {lengths[1]}"
        raise NotFused("K and V have different lengths, or lengths that are not known to be equal.", got=got)
    single = not same_dim(*lengths) and any(each.axis == letters.key for each in wider)
    sizes = {letter: [each.dim(letter) for each in (q, k, v)] for letter in letters.batch}
    apart = not all(same_dim(each[0], other) for each in sizes.values() for other in each[1:])
    # One axis of the batch can be broadcast: that is what the matmuls do.
    if (apart or any(each.axis in letters.batch for each in wider)) and len(letters.batch) > 1:
        got = "; ".join(", ".join(map(str, each)) for each in sizes.values())
        raise NotFused("Q, K, V and the mask have different batches.", got=got)
    if any(each.axis not in (*letters.batch, letters.query, letters.key) for each in wider):
        raise NotFused("A mask may have more heads than Q.", got=[str(each.value.name) for each in wider])
    return apart, single


def _heads(q: Operand, k: Operand, v: Operand, head: str | None) -> tuple[int, int]:
    if head is None:
        return 1, 1
    Hq, Hk, Hv = (each.dim(head) for each in (q, k, v))
    if not isinstance(Hq, int) or not isinstance(Hk, int) or Hk != Hv:
        raise NotFused("The number of heads is not known, or K and V differ in it.", got=f"{Hq}, {Hk}, {Hv}")
    if Hq % Hk or (Hk > 1 and k.group * Hk != Hq):
        raise NotFused("The heads of K do not divide those of Q.", got=f"{Hq} and {Hk}")
    return Hq, Hk


# -- Find attention that no node stands for, whatever lies between its two matmuls -----------------

_LOOPS = frozenset({"Loop", "Scan"})
_CHOICES = ("Gather", "GatherND", "GatherElements", "Slice")
_NORMS = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
# Activations that some models have in the place of the softmax.
_ACTIVATIONS = frozenset(
    {"Sigmoid", "Relu", "Softplus", "HardSigmoid", "Exp", "Elu", "Gelu", "Tanh", "Pow", "Softmax"}
    | {"LogSoftmax", "Hardmax", "LpNormalization", "ThresholdedRelu", "LeakyRelu", "Celu", "Selu", "Softsign"}
    | {"HardSwish", "Erf", "Mish"}
)
# What may stand between the two matmuls of an attention without softmax; a norm or a projection may not.
_BETWEEN = _ACTIVATIONS | frozenset(
    {"Add", "Sub", "Mul", "Div", "Neg", "Abs", "Max", "Min", "Clip", "Where", "Sqrt", "Reciprocal", "Trilu"}
    | {"Cast", "Identity", "Dropout", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Expand", "CumSum"}
    | {"Slice", "Split", "Concat", "Pad", "Log", "ScatterElements", "Sign"}
)
_NO_SOFTMAX = "Attention always has one."


@dataclass(frozen=True, kw_only=True)
class _Carried:
    """What a value depends on."""

    computed: bool = False  # whether it depends on an input of the graph; else it is a weight
    scores: bool = False  # whether a GEMM of two computed tensors stands behind it, and no softmax between
    sizes: frozenset[int] = frozenset()  # the fixed sizes of those GEMMs' axes
    # the softmaxes of such scores that stand behind it, and no matmul with V between
    softmaxes: frozenset[ir.Node] = frozenset()
    # the GEMMs of two computed tensors behind it, with only small steps between
    matmuls: frozenset[ir.Node] = frozenset()
    activations: frozenset[ir.Node] = frozenset()  # the activations among those steps
    # softmaxes of something else than scores behind it, and behind those GEMMs
    features: frozenset[ir.Node] = frozenset()
    normed: bool = False  # whether a normalisation layer stands behind it


_NOTHING = _Carried()
_COMPUTED = _Carried(computed=True)


def leftover_attentions(graph: ir.Graph) -> tuple[dict[ir.Node, NotFused | None], set[ir.Node]]:
    """The nodes of a graph, and of the graphs in it, that are part of an attention.

    Returns:
        Softmaxes, and what stands in their place, in the order of the graph, with why they are not
        expressible; None where that is not known. Then softmaxes that only make features of Q and K.
    """
    walk = _Walk()
    for value in graph.inputs:
        if not value.is_initializer():
            walk.carried[value] = _COMPUTED
    walk.follow(graph)
    return walk.result(), walk.features


class _Walk:
    """The values so far, and what was found."""

    def __init__(self) -> None:
        self.carried: dict[ir.Value, _Carried] = {}
        self._softmaxes: dict[ir.Node, NotFused | None] = {}
        # The second matmul of an attention without softmax, and what stands between the two.
        self._linear: dict[ir.Node, ir.Node | None] = {}
        self.features: set[ir.Node] = set()

    def result(self) -> dict[ir.Node, NotFused | None]:
        """What was found; an attention without softmax once for each module."""
        found, modules = dict(self._softmaxes), set[str]()
        for matmul, activation in self._linear.items():
            node = activation or matmul
            if module_of(node) in modules:
                continue
            modules.add(module_of(node))
            what = f"{node.op_type} stands in the place of the softmax; {_NO_SOFTMAX}"
            if activation is None:
                what = f"No softmax stands between its matmuls (linear attention); {_NO_SOFTMAX}"
            found[node] = NotExpressible(what)
        return found

    def follow(self, graph: ir.Graph) -> None:
        """Take in the nodes of a graph, in their order."""
        for node in graph:
            inner = graphs_in(node)
            if inner:
                self._branches(node, inner)
                continue
            carried = self._after(node)
            for value in node.outputs:
                self.carried[value] = carried

    def _of(self, values: Iterable[ir.Value | None]) -> list[_Carried]:
        return [_NOTHING if value is None else self.carried.get(value, _NOTHING) for value in values]

    def _after(self, node: ir.Node) -> _Carried:
        given = self._of(node.inputs)
        joined = _joined(given)
        if not joined.computed:
            return _NOTHING
        if "Attention" in node.op_type:
            if not is_attention(node):
                what = f"{node.domain or 'ONNX'}'s {node.op_type} is not ONNX's Attention."
                self._softmaxes[node] = NotExpressible(what)
            return _COMPUTED
        if is_op(node, "Shape", "Size"):
            return _COMPUTED
        if is_op(node, *_CHOICES) and not given[0].computed and (rank(node.inputs[0]) or 0) > 2:
            return _NOTHING  # the weights of chosen experts
        softmax = softmax_at(node)
        if softmax is not None:
            begins = joined.scores and _runs_over_keys(softmax, joined)
            for matmul in joined.matmuls if begins else ():
                self._linear.pop(matmul, None)  # it computes the scores of this softmax
            here = frozenset({node})
            return replace(_COMPUTED, softmaxes=here) if begins else replace(_COMPUTED, features=here)
        expanded = _expanded_matmul(node)
        if expanded is not None:
            given = self._of(expanded.inputs)
        elif not is_op(node, "MatMul", "Gemm", "Einsum"):
            if node.domain != "" or node.op_type not in _BETWEEN:
                normed = joined.normed or node.op_type in _NORMS
                return replace(_behind_projection(joined), normed=normed)
            acts = joined.matmuls and node.op_type in _ACTIVATIONS
            return replace(joined, activations=joined.activations | {node}) if acts else joined
        for each in joined.softmaxes:
            self._softmaxes.setdefault(each)
        operands = [each for each in (given if is_op(node, "Einsum") else given[:2]) if each.computed]
        if len(operands) < 2:
            # Scores are not normalised and then projected: behind both is the next layer.
            return replace(_behind_projection(joined), scores=joined.scores and not joined.normed)
        weights = [bool(each.softmaxes) for each in operands]
        if any(weights) and not all(weights):
            return _COMPUTED  # the matmul with V
        if joined.matmuls - self._linear.keys() and not any(weights):
            self._linear[node] = next(iter(sorted(joined.activations, key=node_name)), None)
            self.features |= joined.features
        sizes = frozenset(size for size in sizes_of(node.outputs[0]) or () if isinstance(size, int))
        here = frozenset({node})
        return replace(_COMPUTED, scores=True, sizes=sizes, matmuls=here, features=joined.features)

    def _branches(self, node: ir.Node, graphs: list[ir.Graph]) -> None:
        """Follow If, Loop and Scan; the values of a loop are followed a second time around it."""
        given, loops = self._of(node.inputs), node.op_type in _LOOPS
        # The first result of a Loop's body is its condition, which is no output.
        skipped = int(node.op_type == "Loop")
        for graph in graphs:
            for around in range(1 + loops):
                results = self._of(graph.outputs)
                for at, value in enumerate(graph.inputs):
                    again = results[at - skipped : at - skipped + 1] if around and at >= skipped else []
                    self.carried[value] = _joined([*given[at : at + 1], *again, _COMPUTED])
                self.follow(graph)
        for at, value in enumerate(node.outputs, skipped):
            ends = self._of(graph.outputs[at] for graph in graphs if at < len(graph.outputs))
            self.carried[value] = _joined([*ends, _COMPUTED])


def _expanded_matmul(node: ir.Node) -> ir.Node | None:
    """The Mul of `ReduceSum(Mul(x, y))`, where each is copied along an axis of the other: a GEMM."""
    inner = made_by(node.inputs[0], "Mul") if is_op(node, "ReduceSum") else None
    if inner is None or None in inner.inputs:
        return None
    one, other = (sizes_of(value) for value in inner.inputs)
    if one is None or other is None or len(one) != len(other):
        return None
    pairs = list(zip(one, other, strict=True))
    copied = [any(x == 1 != y for x, y in each) for each in (pairs, [pair[::-1] for pair in pairs])]
    return inner if all(copied) else None


def _behind_projection(carried: _Carried) -> _Carried:
    return replace(carried, matmuls=frozenset(), activations=frozenset(), features=frozenset())


def _joined(given: list[_Carried]) -> _Carried:
    kept = [each for each in given if each is not _NOTHING]
    if len(kept) < 2:
        return kept[0] if kept else _NOTHING
    if all(each is _COMPUTED for each in kept):
        return _COMPUTED
    names = ("sizes", "softmaxes", "matmuls", "activations", "features")
    sets = {name: frozenset().union(*(getattr(each, name) for each in kept)) for name in names}
    flags = {name: any(getattr(each, name) for each in kept) for name in ("computed", "scores", "normed")}
    return _Carried(**flags, **sets)  # type: ignore[arg-type]


def _runs_over_keys(softmax: Normalisation, carried: _Carried) -> bool:
    """Whether the softmax may run over an axis of the scores.

    The router of a mixture of experts depends on scores as well, over many layers, but runs over the experts:
    a fixed size that the scores do not have.
    """
    dims, axis = sizes_of(softmax.source), softmax.axis
    if dims is None or not -len(dims) <= axis < len(dims):
        return True
    size = dims[axis]
    return not isinstance(size, int) or size in carried.sizes
