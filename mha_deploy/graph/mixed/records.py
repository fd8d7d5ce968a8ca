"""The records of mixed precision: what was measured, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FP16_MAX = 65504.0
FLUSHED_BELOW = 2.0**-25
"""Half of FP16's smallest number: what is smaller becomes 0."""

SENTINEL_FROM = 1e30
"""No activation of a float32 model is this large: such a number means `never` or `no bound`."""


@dataclass(frozen=True, kw_only=True)
class ValueRange:
    """The numbers that one tensor held, over all cases.

    NaN, infinities and sentinels (1e30 and beyond, as in masks) are not in `largest`, `highest`, `smallest`.

    Args:
        largest: Largest magnitude.
        highest: Largest number; -inf where there was none.
        smallest: Smallest magnitude that is not 0; None where there was none.
        sentinel: The sentinel of largest magnitude, with its sign; None where there was none.
    """

    largest: float = 0.0
    highest: float = float("-inf")
    smallest: float | None = None
    sentinel: float | None = None


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """What was measured when a float32 graph ran.

    Args:
        cases: The names of the cases.
        values: The range of every float32 tensor that is an input or computed, by its name.
        inner: The largest number inside the operators that sum, square or multiply before their result is
            there: reductions, norms, softmax, and the scores Q·Kᵀ·scale of attention; by the node's name.
    """

    cases: tuple[str, ...]
    values: Mapping[str, ValueRange]
    inner: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class KeptNode:
    """A node that is not written in FP16.

    Args:
        name: Its name.
        op_type: Its operator.
        precision: `fp32` or `bf16`.
        kind: `overflow`, `flushed`, `exact`, `mask`, `operator` or `between`.
        figure: The number that decided, where one did.
        reason: Why, in a sentence.
    """

    name: str
    op_type: str
    precision: str
    kind: str
    figure: float | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class KeptTensor:
    """A graph input or output that stays in float32, and why."""

    name: str
    figure: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Clamped:
    """A number that FP16 has not, and that means the same when FP16's own largest stands for it."""

    name: str
    found: float
    written: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """Which parts of a graph stay wider than FP16.

    Args:
        kept: The nodes, in the order of the graph.
        inputs: Graph inputs that stay in float32.
        outputs: Graph outputs that stay in float32.
        clamped: Sentinels that are written as FP16's lowest or highest number.
        nodes: How many nodes of the graph compute with float32 numbers.
        attentions: How many of them are `Attention`.
        margin: How far below FP16's largest number everything else was.
    """

    kept: tuple[KeptNode, ...]
    inputs: tuple[KeptTensor, ...]
    outputs: tuple[KeptTensor, ...]
    clamped: tuple[Clamped, ...]
    nodes: int
    attentions: int
    margin: float

    @property
    def is_plain_fp16(self) -> bool:
        """Whether everything is written in FP16."""
        return not (self.kept or self.inputs or self.outputs)

    def lines(self) -> list[str]:
        """The plan for people, one sentence a line."""
        nodes = [f"{each.name} ({each.op_type}) stays {each.precision}: {each.reason}" for each in self.kept]
        inputs = [f"input {each.name} stays fp32: {each.reason}" for each in self.inputs]
        outputs = [f"output {each.name} stays fp32: {each.reason}" for each in self.outputs]
        clamped = [
            f"{each.name}: {each.found:.6g} is written as {each.written:.6g}: {each.reason}"
            for each in self.clamped
        ]
        return nodes + inputs + outputs + clamped

    def describe(self) -> dict[str, Any]:
        """The record as plain data for JSON."""
        return asdict(self)
