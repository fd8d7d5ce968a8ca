"""What an attention layer costs, in closed form: parameters, FLOPs and bytes per stage.

A multiply-add is 2 FLOPs. Only matrix products are counted: bias additions, the softmax, gates and
activations are of lower order. Bytes are what a stage must move if each operand crosses the memory bus once:
weights, inputs and outputs. Attention is counted as fused: its S x T matrix never goes to memory, unless the
weights are an output of the layer. Padding saves nothing here, since its lengths are only known at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

from mha_deploy.errors import SpecError
from mha_deploy.spec import AttentionSpec, Sizes

_INT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """The cost of one stage.

    Args:
        name: What the stage does.
        growth: The order of its FLOPs per batch row, in the project's alphabet.
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


@dataclass(frozen=True, kw_only=True)
class _Work:
    """A layer at one set of sizes: what every stage is counted from."""

    spec: AttentionSpec
    B: int
    S: int
    T: int
    bytes_per_element: int

    @property
    def rows(self) -> int:
        """Query tokens."""
        return self.B * self.S

    @property
    def head_elements(self) -> int:
        """Elements of the query heads, and of the head outputs."""
        return self.rows * self.spec.Hq * self.spec.D

    @property
    def kv_elements(self) -> int:
        """Elements of the keys and values together."""
        return 2 * self.B * self.T * self.spec.Hkv * self.spec.D

    @property
    def pairs(self) -> int:
        """(query, key) pairs of one head in one batch row; causal attention sees the lower triangle."""
        return self.S * (self.S + 1) // 2 if self.spec.causal else self.S * self.T

    def stage(
        self, name: str, growth: str, *, parameters: int = 0, flops: int, elements: int, other: int = 0
    ) -> StageCost:
        """Turn counted elements into bytes; `other` is bytes that do not follow the precision."""
        total = (parameters + elements) * self.bytes_per_element + other
        return StageCost(name=name, growth=growth, parameters=parameters, flops=flops, bytes=total)


def layer_cost(spec: AttentionSpec, sizes: Sizes, bytes_per_element: int) -> LayerCost:
    """Count the layer at the given sizes.

    Args:
        spec: The layer.
        sizes: A size for each of its axes, inside their ranges.
        bytes_per_element: 2 for FP16 and BF16, 4 for FP32; weights and activations alike.
    """
    if spec.cache != "none" or spec.window is not None:
        raise SpecError(
            "The cost model does not count caches and windows yet.",
            got=f"cache = {spec.cache}, window = {spec.window}",
            hint="leave them out to see the cost of a whole sequence",
        )
    spec.check_sizes(sizes)
    work = _Work(
        spec=spec, B=sizes["B"], S=sizes["S"], T=sizes[spec.key_axis], bytes_per_element=bytes_per_element
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


def _projections(work: _Work) -> StageCost:
    """Queries, keys and values as one stage: self attention reads x once, however it is packed."""
    spec = work.spec
    q_width, kv_width = spec.Hq * spec.D, 2 * spec.Hkv * spec.D
    keys = work.B * work.T
    read = (work.rows + 2 * keys if spec.is_cross else work.rows) * spec.E
    return work.stage(
        "projections",
        "(S+T)·E²" if spec.is_cross else "S·E²",
        parameters=_linear_parameters(spec.E, q_width + kv_width, spec.bias),
        flops=2 * spec.E * (work.rows * q_width + keys * kv_width),
        elements=read + work.head_elements + work.kv_elements,
    )


def _attention(work: _Work) -> StageCost:
    """Scores and weighted values: two products of D multiply-adds per pair and query head."""
    spec = work.spec
    elements = 2 * work.head_elements + work.kv_elements
    if spec.mask == "additive":
        elements += spec.Hq * work.pairs
    if spec.weights:
        elements += work.B * spec.Hq * work.S * work.T
    return work.stage(
        "attention",
        "S·T·E" if spec.is_cross else "S²·E",
        flops=4 * spec.D * work.B * spec.Hq * work.pairs,
        elements=elements,
        other=_INT32_BYTES * work.B if spec.mask == "padding" else 0,
    )


def _output_projection(work: _Work, extra_elements: int = 0) -> StageCost:
    spec = work.spec
    width = spec.Hq * spec.D
    return work.stage(
        "output",
        "S·E²",
        parameters=_linear_parameters(width, spec.E, spec.bias),
        flops=2 * work.rows * width * spec.E,
        elements=work.head_elements + extra_elements + work.rows * spec.E,
    )


def _plain_output(work: _Work) -> tuple[StageCost, ...]:
    return (_output_projection(work),)


def _sparse_heads_output(work: _Work) -> tuple[StageCost, ...]:
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


def _grouped_mlp_output(work: _Work) -> tuple[StageCost, ...]:
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


def _head_mix_output(work: _Work) -> tuple[StageCost, ...]:
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
