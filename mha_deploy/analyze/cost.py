"""What an attention layer costs, in closed form: parameters, FLOPs and bytes per stage.

A multiply-add is 2 FLOPs. Only matrix products are counted: bias additions, the softmax, gates and
activations are of lower order. Bytes are what a stage must move if each operand crosses the memory bus once:
weights, inputs and outputs. Attention is counted as fused: its S x T matrix never goes to memory, unless the
weights are an output of the layer. Padding saves nothing here, since its lengths are only known at run time.

With a cache, only the S new tokens are projected, and their keys and values are written to where the cache is
kept: nothing else of it moves but the rows that some query sees, which are read once. A growing cache that is
copied to make room for a row moves far more than this; that is the cost of copying, and not of the layer. The
valid rows of a static cache are data, no size: it is counted as full after the call, T - S rows before it,
unless its lengths are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mha_deploy.analyze.work import StageCost, Work, key_length, past_rows
from mha_deploy.spec import AttentionSpec, Sizes

_INT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """The cost of a layer at given sizes, stage by stage in the order of execution."""

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
        """Bytes of all stages; what one stage hands to the next is written and read again."""
        return sum(stage.bytes for stage in self.stages)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity of the whole layer: FLOPs per byte moved."""
        return self.flops / self.bytes


def layer_cost(
    spec: AttentionSpec, sizes: Sizes, bytes_per_element: int, *, lengths: Sequence[int] | None = None
) -> LayerCost:
    """Count the layer at the given sizes.

    Args:
        spec: The layer.
        sizes: A size for each of its axes, inside their ranges.
        bytes_per_element: 2 for FP16 and BF16, 4 for FP32; weights and activations alike.
        lengths: How many rows of a static cache are valid before the call, one for every row of the batch;
            the cache is full after it unless given.
    """
    spec.check_sizes(sizes)
    work = Work(
        spec=spec,
        B=sizes["B"],
        S=sizes["S"],
        T=key_length(spec, sizes),
        past=past_rows(spec, sizes, lengths),
        bytes_per_element=bytes_per_element,
    )
    return LayerCost(stages=(_projections(work), _attention(work), *_OUTPUT_STAGES[spec.variant](work)))


def parameter_count(spec: AttentionSpec) -> int:
    """The learned numbers of the layer; they do not depend on the sizes."""
    return layer_cost(spec, spec.sizes("min"), 1).parameters


def kv_cache_bytes_per_token(spec: AttentionSpec, bytes_per_element: int) -> int:
    """What one cached token costs in one layer: a key and a value for each key/value head."""
    return 2 * spec.Hkv * spec.D * bytes_per_element


def kv_cache_bytes(spec: AttentionSpec, B: int, length: int, bytes_per_element: int) -> int:
    """The key/value cache of one layer for B sequences of the given length."""
    return B * length * kv_cache_bytes_per_token(spec, bytes_per_element)


# -- the stages --------------------------------------------------------------------------------


def _linear_parameters(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _projections(work: Work) -> StageCost:
    """Queries, keys and values as one stage: self attention reads x once, however it is packed."""
    spec = work.spec
    q_width, kv_width = spec.Hq * spec.D, 2 * spec.Hkv * spec.D
    read = (work.rows + 2 * work.kv_rows if spec.is_cross else work.rows) * spec.E
    return work.stage(
        "projections",
        "(S+T)·E²" if spec.is_cross else "S·E²",
        parameters=_linear_parameters(spec.E, q_width + kv_width, spec.bias),
        flops=2 * spec.E * (work.rows * q_width + work.kv_rows * kv_width),
        elements=read + work.head_elements + work.kv_elements(work.kv_rows),
    )


def _attention(work: Work) -> StageCost:
    """Scores and weighted values: two products of D multiply-adds per pair and query head."""
    spec = work.spec
    elements = 2 * work.head_elements + work.kv_elements(work.kv_rows_seen)
    if spec.mask == "additive":
        elements += spec.Hq * work.pairs(0)
    if spec.weights:
        elements += work.B * spec.Hq * work.S * work.T
    has_lengths = spec.mask == "padding" or spec.cache == "static"
    return work.stage(
        "attention",
        _attention_growth(spec),
        flops=4 * spec.D * spec.Hq * work.all_pairs,
        elements=elements,
        other=_INT32_BYTES * work.B if has_lengths else 0,
    )


def _attention_growth(spec: AttentionSpec) -> str:
    """A window is a constant; a cache has T keys, which a growing one counts as P + S."""
    if spec.window is not None:
        return "S·E"
    return "S²·E" if spec.key_axis == "S" else "S·T·E"


def _output_projection(work: Work, extra_elements: int = 0) -> StageCost:
    spec = work.spec
    width = spec.Hq * spec.D
    return work.stage(
        "output",
        "S·E²",
        parameters=_linear_parameters(width, spec.E, spec.bias),
        flops=2 * work.rows * width * spec.E,
        elements=work.head_elements + extra_elements + work.rows * spec.E,
    )


def _plain_output(work: Work) -> tuple[StageCost, ...]:
    return (_output_projection(work),)


def _sparse_heads_output(work: Work) -> tuple[StageCost, ...]:
    """A gate per head from the layer's input; unused heads are computed and then masked, so none is free."""
    spec = work.spec
    gates = work.rows * spec.Hq
    gate = work.stage(
        "head gate",
        "S·E·Hq",
        parameters=_linear_parameters(spec.E, spec.Hq, bias=False),
        flops=2 * gates * spec.E,
        elements=work.rows * spec.E + gates,
    )
    return gate, _output_projection(work, extra_elements=gates)


def _grouped_mlp_output(work: Work) -> tuple[StageCost, ...]:
    """Two linear layers in place of the output projection, with the hidden activations between them."""
    spec = work.spec
    hidden = spec.grouped_mlp.hidden if spec.grouped_mlp else 0
    width = spec.Hq * spec.D
    first = work.stage(
        "MLP in",
        "S·E·hidden",
        parameters=_linear_parameters(width, hidden, spec.bias),
        flops=2 * work.rows * width * hidden,
        elements=work.head_elements + work.rows * hidden,
    )
    second = work.stage(
        "MLP out",
        "S·E·hidden",
        parameters=_linear_parameters(hidden, spec.E, spec.bias),
        flops=2 * work.rows * hidden * spec.E,
        elements=work.rows * (hidden + spec.E),
    )
    return first, second


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
