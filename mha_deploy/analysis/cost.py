"""FLOPs and bytes of a layer in closed form, and the sizes that follow from a limit on them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mha_deploy.errors import SpecError, nearest
from mha_deploy.model.spec import AttentionSpec, Axis, ModelSpec, Sizes


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """The cost of one stage.

    `growth` is the order of its FLOPs per batch element, in the symbols of the spec. `parameters` are learned
    numbers, biases included; `flops` count 2 per multiply-add; `bytes` are weights, inputs and outputs, each
    moved once.
    """

    name: str
    growth: str
    parameters: int
    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte moved."""
        return self.flops / self.bytes


@dataclass(frozen=True, kw_only=True)
class LayerCost(StageCost):
    """The cost of a layer at one set of sizes, stage by stage in the order of execution.

    What one stage passes to the next is written and read again.
    """

    stages: tuple[StageCost, ...]


def cost_of(*stages: StageCost) -> LayerCost:
    """The cost of stages that run one after the other."""
    summed = ("parameters", "flops", "bytes")
    counts = {name: sum(getattr(stage, name) for stage in stages) for name in summed}
    return LayerCost(name="layer", growth="", stages=stages, **counts)


def key_length(spec: AttentionSpec, sizes: Sizes) -> int:
    """Keys of a batch element, the entries of a preallocated KV cache that are not valid included."""
    return sum(sizes[axis] for axis in spec.key_axis.split("+"))


Lengths = Sequence[int] | None
"""The valid entries of a preallocated KV cache before the call, by batch element; default: full after it."""


def past_keys(spec: AttentionSpec, sizes: Sizes, lengths: Lengths = None) -> list[int]:
    """The keys before the new tokens, of every batch element: none without a KV cache.

    Lengths are refused where they do not suit the layer or its sizes.
    """
    if lengths is None:
        past = key_length(spec, sizes) - sizes["S"] if spec.cache != "none" else 0
        return [past] * sizes["B"]
    found = [int(length) for length in lengths]
    if spec.cache != "preallocated" or len(found) != sizes["B"]:
        got = f"{len(found)} lengths, cache = {spec.cache}, B = {sizes['B']}"
        raise SpecError(
            "Only a preallocated KV cache has lengths, one for every batch element.",
            got=got,
            hint="leave the lengths out",
        )
    room = sizes["T"] - sizes["S"]
    if not all(0 <= length <= room for length in found):
        what = "The new tokens do not fit into the KV cache."
        raise SpecError(what, got=f"lengths {found}", hint=f"0 to {room}")
    return found


def layer_cost(
    spec: AttentionSpec, sizes: Sizes, bytes_per_element: int, *, lengths: Lengths = None
) -> LayerCost:
    """The cost of a layer at one set of sizes, inside its axes.

    `bytes_per_element` is 2 for FP16 and BF16, 4 for FP32; weights and activations alike.
    """
    spec.check_sizes(sizes)
    B, S, T = sizes["B"], sizes["S"], key_length(spec, sizes)
    counter = _StageCounter(spec, B, S, T, past_keys(spec, sizes, lengths), bytes_per_element)
    return cost_of(counter.projections(), counter.attention(), *counter.after_attention())


class _StageCounter:
    """Counts the parameters, FLOPs and bytes of every stage of a layer at one set of sizes."""

    def __init__(
        self, spec: AttentionSpec, B: int, S: int, T: int, past: Sequence[int], bytes_per_element: int
    ) -> None:
        self.spec, self.B, self.S, self.T, self.past = spec, B, S, T, past
        self.bytes_per_element = bytes_per_element
        self.width, self.kv_width = spec.Hq * spec.D, 2 * spec.Hkv * spec.D  # of queries; of keys and values
        self.tokens = B * S
        self.heads = self.tokens * self.width  # elements of the query heads, and of their outputs
        self.projected = B * (S if spec.cache != "none" else T)  # keys that are not in the KV cache already

    def projections(self) -> StageCost:
        """Queries, keys and values as one stage: self attention reads x once, however it is packed."""
        spec, outputs = self.spec, self.width + self.kv_width
        read = self.tokens + (2 * self.projected if spec.is_cross else 0)
        return self._stage(
            "projections",
            "(S+T)·E²" if spec.is_cross else "S·E²",
            parameters=spec.E * outputs + (outputs if spec.bias else 0),
            flops=2 * spec.E * (self.tokens * self.width + self.projected * self.kv_width),
            elements=read * spec.E + self.heads + self.projected * self.kv_width,
        )

    def attention(self) -> StageCost:
        """Scores and weighted values: two matmuls of D multiply-adds per pair and query head."""
        spec, S, T = self.spec, self.S, self.T
        # A window leaves out the oldest keys of a KV cache.
        most = T if spec.window is None else spec.window - 1
        attended = self.projected + sum(min(each, most) for each in self.past)
        elements = 2 * self.heads + attended * self.kv_width
        if spec.mask == "additive":
            elements += spec.Hq * _pairs(spec, S, T, 0)
        if spec.weights:
            elements += self.B * spec.Hq * S * T
        growth = "S²·E" if spec.key_axis == "S" else "S·T·E"
        has_lengths = spec.mask == "padding" or spec.cache == "preallocated"
        return self._stage(
            "attention",
            growth if spec.window is None else "S·E",  # a window is a constant
            flops=4 * spec.D * spec.Hq * sum(_pairs(spec, S, T, each) for each in self.past),
            elements=elements,
            other=4 * self.B if has_lengths else 0,  # int32
        )

    def after_attention(self) -> list[StageCost]:
        """The output projection, and what a variant has besides or in its place."""
        spec, width, heads = self.spec, self.width, self.heads
        E, Hq, D = spec.E, spec.Hq, spec.D
        output = self._linear("output", "S·E²", width, E)
        if spec.variant == "sparse-heads":
            # A gate per head from the layer's input; unused heads are computed and then masked.
            gate = self._linear("head gate", "S·E·Hq", E, Hq, bias=False)
            return [gate, replace(output, bytes=output.bytes + self.tokens * Hq * self.bytes_per_element)]
        if spec.grouped_mlp is not None:
            # A linear layer within each group, and two of an MLP in place of the output projection.
            hidden, groups = spec.grouped_mlp.hidden, spec.grouped_mlp.groups
            return [
                self._linear(
                    "linear within groups", "S·E²/groups", width // groups, width // groups, n=groups
                ),
                self._linear("MLP in", "S·E·hidden", width, hidden),
                self._linear("MLP out", "S·E·hidden", hidden, E),
            ]
        if spec.variant == "head-mix":
            # A second attention inside each token: its Hq heads are the sequence, and share D x D matrices.
            parameters = 3 * (D * D + (D if spec.bias else 0))
            mix = self._stage("mix projections", "S·E·D", 3 * 2 * heads * D, 4 * heads, parameters)
            return [mix, self._stage("mix attention", "S·E·Hq", 4 * heads * Hq, 4 * heads), output]
        return [output]

    def _stage(
        self, name: str, growth: str, flops: int, elements: int, parameters: int = 0, other: int = 0
    ) -> StageCost:
        """A stage from its counts; `other` is bytes that do not depend on the precision."""
        total = (parameters + elements) * self.bytes_per_element + other
        return StageCost(name=name, growth=growth, parameters=parameters, flops=flops, bytes=total)

    def _linear(
        self, name: str, growth: str, inputs: int, outputs: int, *, bias: bool | None = None, n: int = 1
    ) -> StageCost:
        """Linear layers on n parts of every token, which read and write all of them."""
        has_bias = self.spec.bias if bias is None else bias
        weights = n * (inputs * outputs + (outputs if has_bias else 0))
        flops, elements = 2 * self.tokens * n * inputs * outputs, self.tokens * n * (inputs + outputs)
        return self._stage(name, growth, flops, elements, weights)


def _pairs(spec: AttentionSpec, S: int, T: int, past: int) -> int:
    """(query, key) pairs of one head in one batch element.

    A causal query attends to the past, and to the new keys up to its own: past + 1, past + 2, …, or as
    many as its window has.
    """
    if not spec.causal:
        return S * T
    window = past + S if spec.window is None else spec.window
    within = min(max(window - past, 0), S)  # queries whose window is not full
    return within * past + within * (within + 1) // 2 + (S - within) * window


def parameter_count(spec: AttentionSpec) -> int:
    """The learned numbers of the layer; they do not depend on the sizes."""
    return layer_cost(spec, spec.sizes("min"), 1).parameters


def kv_cache_bytes_per_token(spec: AttentionSpec, bytes_per_element: int) -> int:
    """KV-cache bytes of one token in one layer: a key and a value for each key/value head."""
    return 2 * spec.Hkv * spec.D * bytes_per_element


# -- Sizes to test: lengths that no kernel tiles evenly, and the largest that a limit allows -------

_ODD_LENGTHS = (37, 13, 7, 5, 3)


@dataclass(frozen=True, kw_only=True)
class SizeLimit:
    """Cost limit of one run of a layer: its work, and the memory of the oracle, KV cache included."""

    gflop: float = 100.0
    gib: float = 4.0

    def __str__(self) -> str:
        return f"{self.gflop:g} GFLOP and {self.gib:g} GiB"

    def allows(self, spec: ModelSpec, sizes: Sizes) -> bool:
        """Whether a layer of these sizes stays below the limit."""
        layer = spec.layer  # the FLOPs of a module are an upper bound
        flops = spec.flops_at(sizes) if layer is None else layer_cost(layer, sizes, bytes_per_element=1).flops
        return flops <= self.gflop * 1e9 and oracle_bytes(spec, sizes) <= self.gib * 2**30


_QUICK = SizeLimit(gflop=2.0, gib=0.5)


def shrunk(spec: ModelSpec, sizes: Sizes, smallest: Sizes, limit: SizeLimit) -> dict[str, int]:
    """Halve the batch, then the longest axis, until the limit allows the sizes or nothing can shrink."""
    found = dict(sizes)
    while not limit.allows(spec, found):
        shrinkable = [name for name in found if found[name] > smallest[name]]
        if not shrinkable:
            break
        name = "B" if "B" in shrinkable else max(shrinkable, key=lambda axis: found[axis])
        found[name] = max(smallest[name], found[name] // 2)
    return found


def random_sizes(spec: ModelSpec, axes: Mapping[str, Axis], dice: random.Random) -> dict[str, int]:
    """Sizes from inside of axes, at random; one that runs in a moment."""
    inside = {
        name: sorted((min(axis.min + 1, axis.max), max(axis.max - 1, axis.min)))
        for name, axis in axes.items()
    }
    drawn = {name: dice.randint(*ends) for name, ends in inside.items()}
    return shrunk(spec, drawn, {name: axis.min for name, axis in axes.items()}, _QUICK)


def has_inside(axes: Mapping[str, Axis]) -> bool:
    """Whether an axis has sizes between its ends."""
    return any(axis.max - axis.min > 1 for axis in axes.values())


def sizes_name(sizes: Sizes) -> str:
    """Sizes as the name of a case or a file: `B2-S33`."""
    return "-".join(f"{axis}{size}" for axis, size in sizes.items())


def odd_sizes(axes: Mapping[str, Axis]) -> dict[str, int]:
    """Lengths that no kernel tiles evenly, and a batch of three where that is allowed."""
    return {
        name: first_allowed(axis, (3,) if name == "B" else (*_ODD_LENGTHS, (axis.min + 1) | 1, axis.min | 1))
        for name, axis in axes.items()
    }


def first_allowed(axis: Axis, candidates: Sequence[int]) -> int:
    """The first size that an axis allows, or its optimum."""
    return next((size for size in candidates if axis.min <= size <= axis.max), axis.opt)


def spread(choices: Sequence[int], most: int) -> list[int]:
    """All of them, or some from the first to the last."""
    count, last = min(len(choices), most), len(choices) - 1
    return [choices[round(i * last / max(1, count - 1))] for i in range(count)]


def oracle_bytes(spec: ModelSpec, sizes: Sizes) -> int:
    """Memory of an FP64 run that keeps scores and weights: an upper bound, fused kernels need less.

    0 for a module, where it is not known.
    """
    layer = spec.layer
    if layer is None:
        return 0
    T = key_length(layer, sizes)
    scores = 2 * sizes["B"] * layer.Hq * sizes["S"] * T
    activations = 4 * sizes["B"] * max(sizes["S"], T) * max(layer.E, layer.Hq * layer.D)
    return 8 * (scores + activations) + oracle_cache_bytes(spec, sizes)


def oracle_cache_bytes(spec: ModelSpec, sizes: Sizes) -> int:
    """Memory of the KV cache of an FP64 run, input and output; 0 without one."""
    if spec.layer is None or spec.cache == "none":
        return 0
    return 2 * sizes["B"] * key_length(spec.layer, sizes) * kv_cache_bytes_per_token(spec.layer, 8)


# -- Where a layer is timed: its optimum, or prefill and decode step of one with a KV cache --------

PREFILL, DECODE, USUAL = TIMED_CASES = "prefill", "decode", "opt"
LONG_PAST = "long-past"
PROBE, MASKS = "probe", "masks"
_FEW = 8  # entries of a cache: nothing splits them


@dataclass(frozen=True, kw_only=True)
class TimedPoint:
    """One set of sizes to run or time a layer at: `opt`, `prefill`, `decode`, or named by its sizes.

    `past` are the valid entries of a preallocated KV cache before the call, of every batch element: they are
    data, not an axis. None for other layers.
    """

    name: str
    sizes: Mapping[str, int]
    past: int | None = None
    note: str = ""  # what had to be made smaller


def usual_points(spec: ModelSpec) -> tuple[TimedPoint, ...]:
    """The optimum of every axis; with a KV cache, a prefill and a decode step.

    `prefill` adds the optimal number of tokens to a KV cache that is as empty as the axes allow. `decode`
    adds the fewest tokens, usually one, behind the optimal past; a preallocated cache is full then, the worst
    case. Where the optimal number of tokens is the minimum, there is only `decode`.
    """
    usual, least = spec.sizes("opt"), spec.sizes("min")
    if spec.cache == "none":
        return (TimedPoint(name=USUAL, sizes=usual),)
    empty = {"P": least["P"]} if spec.cache == "dynamic" else {}
    past = 0 if spec.cache == "preallocated" else None
    prefill = TimedPoint(name=PREFILL, sizes={**usual, **empty}, past=past)
    decode = with_full_cache(spec, DECODE, {**usual, "S": least["S"]})
    return (prefill, decode) if usual["S"] > least["S"] else (decode,)


def with_full_cache(spec: ModelSpec, name: str, sizes: Mapping[str, int]) -> TimedPoint:
    """A point whose preallocated KV cache, if it has one, is full once the new tokens are in it."""
    past = sizes["T"] - sizes["S"] if spec.cache == "preallocated" else None
    return TimedPoint(name=name, sizes=dict(sizes), past=past)


def long_past(spec: ModelSpec, axes: Mapping[str, Axis], limit: SizeLimit) -> tuple[TimedPoint, ...]:
    """The fewest queries behind the longest past that a limit allows; none without a KV cache.

    Then behind pasts around the largest power of two below it, where kernels change how they split the keys.
    The past is not shrunk below its optimum; batch elements are left out first.
    """
    cache = spec.kv_cache
    if cache is None or (cache.is_preallocated and not cache.positions):
        return ()
    axis, S = cache.past or "T", axes[cache.new].min
    wanted = {name: each.opt for name, each in axes.items()} | {cache.new: S}
    wanted |= {axis: axes[axis].max} if axis in axes else {}
    least = {name: min(size, axes[name].opt) for name, size in wanted.items()}
    least |= {name: axes[name].min for name in ("B",) if name in axes}
    sizes = shrunk(spec, wanted, least, limit)
    text = ",".join(f"{name}={size}" for name, size in wanted.items())
    note = f"{text} was shrunk to stay within {limit}" if sizes != wanted else ""
    note = note if limit.allows(spec, sizes) else f"{text} costs more than {limit}"
    # Once the new tokens are in, it is full.
    longest = cache.room - S if cache.is_preallocated else sizes[axis]
    power = 1 << max(0, (longest - 1).bit_length() - 1)  # the largest with a past behind it
    least_past = 0 if cache.is_preallocated else axes[axis].min
    around = (power - 1, power, power + 1) if longest > _FEW else ()
    points = []
    for past in dict.fromkeys((longest, *(each for each in around if least_past <= each <= longest))):
        name = LONG_PAST if past == longest else f"past-{past}"
        if cache.is_preallocated:
            points.append(TimedPoint(name=name, sizes=sizes, past=past, note=note))
        else:
            points.append(TimedPoint(name=name, sizes={**sizes, axis: past}, note=note))
        note = ""
    return tuple(points)


def points_from_text(spec: ModelSpec, text: str) -> tuple[TimedPoint, ...]:
    """Read `opt`, for all of `usual_points`; `prefill` or `decode`; or sizes such as `B=8,S=1,P=2048`."""
    usual = usual_points(spec)
    if named := tuple(point for point in usual if text in (USUAL, point.name)):
        return named
    if "=" not in text and spec.cache != "none":
        names = (USUAL, *(point.name for point in usual))
        hint = f"{nearest(text, names)} Or sizes, as B=1,S=1."
        raise SpecError(f"{spec.name} has no such point to time.", got=text, hint=hint)
    sizes = spec.parse_sizes(text)
    return (with_full_cache(spec, sizes_name(sizes), sizes),)
