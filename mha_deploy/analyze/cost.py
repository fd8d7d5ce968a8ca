"""FLOPs and bytes of a layer in closed form, and the sizes that follow from a limit on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mha_deploy.errors import SpecError, nearest
from mha_deploy.model.spec import AttentionSpec, Axis, ModelSpec, Sizes

# -- Tokens, keys, and pairs of them at one set of sizes -------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """The cost of one stage.

    Args:
        name: What the stage does.
        growth: The order of its FLOPs per batch element, in the symbols of the spec.
        parameters: Learned numbers, biases included.
        flops: Floating point operations, 2 per multiply-add.
        bytes: Weights, inputs and outputs, each moved once.
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
class Work:
    """A layer at one set of sizes: what every stage is counted from.

    Args:
        spec: The layer.
        B: Batch elements.
        S: New tokens of each.
        T: Keys of each.
        past: Keys before the new tokens, of every batch element.
        bytes_per_element: Of weights and activations.
    """

    spec: AttentionSpec
    B: int
    S: int
    T: int
    past: Sequence[int]
    bytes_per_element: int

    @property
    def queries(self) -> int:
        """Query tokens."""
        return self.B * self.S

    @property
    def head_elements(self) -> int:
        """Elements of the query heads, and of the head outputs."""
        return self.queries * self.spec.Hq * self.spec.D

    @property
    def projected_keys(self) -> int:
        """Keys that are projected: those that are not in the KV cache already."""
        return self.B * (self.S if self.spec.cache != "none" else self.T)

    @property
    def attended_keys(self) -> int:
        """Keys that some query attends to: a window leaves out the oldest of a KV cache."""
        reach = self.T if self.spec.window is None else self.spec.window - 1
        return self.projected_keys + sum(min(past, reach) for past in self.past)

    def kv_elements(self, keys: int) -> int:
        """Elements of that many keys, and of their values."""
        return 2 * keys * self.spec.Hkv * self.spec.D

    def pairs(self, past: int) -> int:
        """(query, key) pairs of one head in one batch element.

        A causal query attends to the past, and to the new keys up to its own: past + 1, past + 2, …, or as
        many as its window has.
        """
        if not self.spec.causal:
            return self.S * self.T
        window = past + self.S if self.spec.window is None else self.spec.window
        within = min(max(window - past, 0), self.S)  # queries whose window is not full
        return within * past + within * (within + 1) // 2 + (self.S - within) * window

    @property
    def all_pairs(self) -> int:
        """(query, key) pairs of one head in all batch elements."""
        return sum(self.pairs(past) for past in self.past)

    def stage(
        self, name: str, growth: str, *, parameters: int = 0, flops: int, elements: int, other: int = 0
    ) -> StageCost:
        """A stage from its counts; `other` is bytes that do not depend on the precision."""
        total = (parameters + elements) * self.bytes_per_element + other
        return StageCost(name=name, growth=growth, parameters=parameters, flops=flops, bytes=total)


def key_length(spec: AttentionSpec, sizes: Sizes) -> int:
    """Keys of a batch element, the entries of a preallocated KV cache that are not valid included."""
    return sum(sizes[axis] for axis in spec.key_axis.split("+"))


def past_keys(spec: AttentionSpec, sizes: Sizes, lengths: Sequence[int] | None = None) -> list[int]:
    """The keys before the new tokens, of every batch element: none without a KV cache.

    Args:
        spec: The layer.
        sizes: A size for each of its axes.
        lengths: Valid entries of a preallocated KV cache before the call; default: full after it.

    Raises:
        SpecError: The lengths do not suit the layer or its sizes.
    """
    if lengths is None:
        past = key_length(spec, sizes) - sizes["S"] if spec.cache != "none" else 0
        return [past] * sizes["B"]
    found = [int(length) for length in lengths]
    if spec.cache != "preallocated" or len(found) != sizes["B"]:
        raise SpecError(
            "Only a preallocated KV cache has lengths, one for every batch element.",
            got=f"{len(found)} lengths, cache = {spec.cache}, B = {sizes['B']}",
        )
    room = sizes["T"] - sizes["S"]
    if not all(0 <= length <= room for length in found):
        raise SpecError(
            "The new tokens do not fit into the KV cache.", got=f"lengths {found}", hint=f"0 to {room}"
        )
    return found


# -- Parameters, FLOPs and bytes per stage ---------------------------------------------------------

_INT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """The cost of a layer at one set of sizes, stage by stage in the order of execution."""

    stages: tuple[StageCost, ...]

    @property
    def parameters(self) -> int:
        """Learned numbers of the whole layer."""
        return sum(stage.parameters for stage in self.stages)

    @property
    def flops(self) -> int:
        """FLOPs of the whole layer."""
        return sum(stage.flops for stage in self.stages)

    @property
    def bytes(self) -> int:
        """Bytes of all stages; what one stage passes to the next is written and read again."""
        return sum(stage.bytes for stage in self.stages)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity of the whole layer: FLOPs per byte moved."""
        return self.flops / self.bytes


def layer_cost(
    spec: AttentionSpec, sizes: Sizes, bytes_per_element: int, *, lengths: Sequence[int] | None = None
) -> LayerCost:
    """The cost of a layer at one set of sizes.

    Args:
        spec: The layer.
        sizes: A size for each of its axes, inside their ranges.
        bytes_per_element: 2 for FP16 and BF16, 4 for FP32; weights and activations alike.
        lengths: Valid entries of a preallocated KV cache before the call, one for every batch element;
            default: full after it.
    """
    spec.check_sizes(sizes)
    work = Work(
        spec=spec,
        B=sizes["B"],
        S=sizes["S"],
        T=key_length(spec, sizes),
        past=past_keys(spec, sizes, lengths),
        bytes_per_element=bytes_per_element,
    )
    return LayerCost(stages=(_projections(work), _attention(work), *_OUTPUT_STAGES[spec.variant](work)))


def parameter_count(spec: AttentionSpec) -> int:
    """The learned numbers of the layer; they do not depend on the sizes."""
    return layer_cost(spec, spec.sizes("min"), 1).parameters


def kv_cache_bytes_per_token(spec: AttentionSpec, bytes_per_element: int) -> int:
    """KV-cache bytes of one token in one layer: a key and a value for each key/value head."""
    return 2 * spec.Hkv * spec.D * bytes_per_element


def kv_cache_bytes(spec: AttentionSpec, B: int, length: int, bytes_per_element: int) -> int:
    """KV-cache bytes of one layer for B sequences of one length."""
    return B * length * kv_cache_bytes_per_token(spec, bytes_per_element)


# -- the stages --------------------------------------------------------------------------------


def _linear_parameters(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _projections(work: Work) -> StageCost:
    """Queries, keys and values as one stage: self attention reads x once, however it is packed."""
    spec = work.spec
    q_width, kv_width = spec.Hq * spec.D, 2 * spec.Hkv * spec.D
    read = (work.queries + 2 * work.projected_keys if spec.is_cross else work.queries) * spec.E
    return work.stage(
        "projections",
        "(S+T)·E²" if spec.is_cross else "S·E²",
        parameters=_linear_parameters(spec.E, q_width + kv_width, spec.bias),
        flops=2 * spec.E * (work.queries * q_width + work.projected_keys * kv_width),
        elements=read + work.head_elements + work.kv_elements(work.projected_keys),
    )


def _attention(work: Work) -> StageCost:
    """Scores and weighted values: two matmuls of D multiply-adds per pair and query head."""
    spec = work.spec
    elements = 2 * work.head_elements + work.kv_elements(work.attended_keys)
    if spec.mask == "additive":
        elements += spec.Hq * work.pairs(0)
    if spec.weights:
        elements += work.B * spec.Hq * work.S * work.T
    has_lengths = spec.mask == "padding" or spec.cache == "preallocated"
    growth = "S²·E" if spec.key_axis == "S" else "S·T·E"
    return work.stage(
        "attention",
        growth if spec.window is None else "S·E",  # a window is a constant
        flops=4 * spec.D * spec.Hq * work.all_pairs,
        elements=elements,
        other=_INT32_BYTES * work.B if has_lengths else 0,
    )


def _output_projection(work: Work, extra_elements: int = 0) -> StageCost:
    spec = work.spec
    width = spec.Hq * spec.D
    return work.stage(
        "output",
        "S·E²",
        parameters=_linear_parameters(width, spec.E, spec.bias),
        flops=2 * work.queries * width * spec.E,
        elements=work.head_elements + extra_elements + work.queries * spec.E,
    )


def _plain_output(work: Work) -> tuple[StageCost, ...]:
    return (_output_projection(work),)


def _sparse_heads_output(work: Work) -> tuple[StageCost, ...]:
    """A gate per head from the layer's input; unused heads are computed and then masked."""
    spec = work.spec
    gates = work.queries * spec.Hq
    gate = work.stage(
        "head gate",
        "S·E·Hq",
        parameters=_linear_parameters(spec.E, spec.Hq, bias=False),
        flops=2 * gates * spec.E,
        elements=work.queries * spec.E + gates,
    )
    return gate, _output_projection(work, extra_elements=gates)


def _grouped_mlp_output(work: Work) -> tuple[StageCost, ...]:
    """A linear layer within each group, and two of an MLP in place of the output projection."""
    spec = work.spec
    hidden = spec.grouped_mlp.hidden if spec.grouped_mlp else 0
    groups = spec.grouped_mlp.groups if spec.grouped_mlp else 1
    width = spec.Hq * spec.D
    within = work.stage(
        "linear within groups",
        "S·E²/groups",
        parameters=groups * _linear_parameters(width // groups, width // groups, spec.bias),
        flops=2 * work.queries * width * (width // groups),
        elements=2 * work.head_elements,
    )
    first = work.stage(
        "MLP in",
        "S·E·hidden",
        parameters=_linear_parameters(width, hidden, spec.bias),
        flops=2 * work.queries * width * hidden,
        elements=work.head_elements + work.queries * hidden,
    )
    second = work.stage(
        "MLP out",
        "S·E·hidden",
        parameters=_linear_parameters(hidden, spec.E, spec.bias),
        flops=2 * work.queries * hidden * spec.E,
        elements=work.queries * (hidden + spec.E),
    )
    return within, first, second


def _head_mix_output(work: Work) -> tuple[StageCost, ...]:
    """A second attention inside each token: its Hq heads are the sequence, and they share D x D matrices."""
    spec = work.spec
    projections = work.stage(
        "mix projections",
        "S·E·D",
        parameters=3 * _linear_parameters(spec.D, spec.D, spec.bias),
        flops=3 * 2 * work.head_elements * spec.D,
        elements=4 * work.head_elements,
    )
    attention = work.stage(
        "mix attention",
        "S·E·Hq",
        flops=4 * work.head_elements * spec.Hq,
        elements=4 * work.head_elements,
    )
    return projections, attention, _output_projection(work)


_OUTPUT_STAGES = {
    "attention": _plain_output,
    "sparse-heads": _sparse_heads_output,
    "grouped-mlp": _grouped_mlp_output,
    "head-mix": _head_mix_output,
}


# -- Sizes to test: lengths that no kernel tiles evenly, and the largest that a limit allows -------

_ODD_LENGTHS = (37, 13, 7, 5, 3)


@dataclass(frozen=True, kw_only=True)
class SizeLimit:
    """Cost limit of one run of a layer.

    Args:
        gflop: Work in 10⁹ floating-point operations.
        gib: Memory for the oracle's scores, activations and KV cache.
    """

    gflop: float = 100.0
    gib: float = 4.0

    def __str__(self) -> str:
        return f"{self.gflop:g} GFLOP and {self.gib:g} GiB"

    def allows(self, spec: ModelSpec, sizes: Sizes) -> bool:
        """Whether a layer of these sizes stays below the limit."""
        work, memory = layer_flops(spec, sizes), oracle_bytes(spec, sizes)
        return work <= self.gflop * 1e9 and memory <= self.gib * 2**30


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


def sizes_name(sizes: Sizes) -> str:
    """Sizes as the name of a case or a file: `B2-S33`."""
    return "-".join(f"{axis}{size}" for axis, size in sizes.items())


def odd_sizes(axes: Mapping[str, Axis]) -> dict[str, int]:
    """Lengths that no kernel tiles evenly, and a batch of three where that is allowed."""
    sizes = {
        name: first_allowed(axis, (*_ODD_LENGTHS, (axis.min + 1) | 1, axis.min | 1))
        for name, axis in axes.items()
    }
    return {**sizes, "B": first_allowed(axes["B"], (3,))} if "B" in axes else sizes


def first_allowed(axis: Axis, candidates: Sequence[int]) -> int:
    """The first size that an axis allows, or its optimum."""
    return next((size for size in candidates if axis.min <= size <= axis.max), axis.opt)


def layer_flops(spec: ModelSpec, sizes: Sizes) -> int:
    """FLOPs of a layer at one set of sizes; of a module, an upper bound."""
    if spec.layer is not None:
        return layer_cost(spec.layer, sizes, bytes_per_element=1).flops
    return spec.flops_at(sizes)


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
    return 2 * kv_cache_bytes(spec.layer, sizes["B"], key_length(spec.layer, sizes), bytes_per_element=8)


# -- Where a layer is timed: its optimum, or prefill and decode step of one with a KV cache --------

PREFILL, DECODE, USUAL = "prefill", "decode", "opt"


@dataclass(frozen=True, kw_only=True)
class TimedPoint:
    """One set of sizes to time a layer at.

    Args:
        name: `opt`, `prefill`, `decode`, or its sizes.
        sizes: The size of every axis.
        past: Valid entries of a preallocated KV cache before the call, of every batch element: they are data,
            not an axis. None for other layers.
    """

    name: str
    sizes: Mapping[str, int]
    past: int | None = None


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
    prefill = TimedPoint(
        name=PREFILL, sizes={**usual, **empty}, past=0 if spec.cache == "preallocated" else None
    )
    decode = with_full_cache(spec, DECODE, {**usual, "S": least["S"]})
    return (prefill, decode) if usual["S"] > least["S"] else (decode,)


def with_full_cache(spec: ModelSpec, name: str, sizes: Mapping[str, int]) -> TimedPoint:
    """A point whose preallocated KV cache, if it has one, is full once the new tokens are in it."""
    past = sizes["T"] - sizes["S"] if spec.cache == "preallocated" else None
    return TimedPoint(name=name, sizes=dict(sizes), past=past)


def points_from_text(spec: ModelSpec, text: str) -> tuple[TimedPoint, ...]:
    """Read `opt`, for all of `usual_points`; `prefill` or `decode`; or sizes such as `B=8,S=1,P=2048`.

    Raises:
        SpecError: The text is none of them, or the sizes are outside the axes.
    """
    usual = usual_points(spec)
    if text == USUAL:
        return usual
    named = tuple(point for point in usual if point.name == text)
    if named:
        return named
    if "=" not in text and spec.cache != "none":
        names = (USUAL, *(point.name for point in usual))
        raise SpecError(
            f"{spec.name} has no such point to time.",
            got=text,
            hint=f"{nearest(text, names)} Or sizes, as B=1,S=1.",
        )
    sizes = spec.parse_sizes(text)
    return (with_full_cache(spec, sizes_name(sizes), sizes),)
