"""What a fusion found: the attentions it wrote as one node, and those it left alone with the reason."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mha_deploy.errors import DeployError
from mha_deploy.graph.attention_node import Dim


class NotFused(DeployError):
    """Why a softmax and its two products stay as they are."""


class NoScores(NotFused):
    """No product of two computed tensors stands before the softmax."""


@dataclass(frozen=True, kw_only=True)
class FusedAttention:
    """One attention that is now one `Attention` node.

    Args:
        name: Name of the new node: the module it came from where the file says, else its softmax.
        place: Source file and line, where the file says.
        Hq: Query heads; 1 where the heads are part of the batch.
        Hkv: Key/value heads.
        D: Head size of queries and keys.
        scale: Factor on the scores, gathered from wherever it stood.
        mask: `none`, `bool` or `float`.
        causal: Whether the triangle became the attribute `is_causal`.
        softcap: Bound of the scores; 0 for none.
        notes: What differs from the file, and where.
    """

    name: str
    place: str | None
    Hq: int
    Hkv: int
    D: Dim
    scale: float
    mask: str
    causal: bool
    softcap: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UnfusedSoftmax:
    """A softmax before a product that was left as it is.

    Args:
        name: The module it came from, else the softmax node.
        place: Source file and line, where the file says.
        reason: Why it is not fused.
    """

    name: str
    place: str | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Repair:
    """A node of the exporter's that was brought into the canonical form.

    Args:
        name: Name of the node in the new model.
        changes: What was changed, in words.
    """

    name: str
    changes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FuseReport:
    """What became of every candidate of a graph.

    Args:
        fused: Attentions that are one node now.
        unfused: Candidates that are as they were.
        already: Names, in the new model, of the `Attention` nodes that were there before.
        repairs: What was changed about those, and about nodes around them.
        layers: Names of all `Attention` nodes of the new model in the order of execution.
    """

    fused: tuple[FusedAttention, ...]
    unfused: tuple[UnfusedSoftmax, ...]
    already: tuple[str, ...] = ()
    repairs: tuple[Repair, ...] = ()
    layers: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every candidate was fused."""
        return not self.unfused

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data for JSON."""
        return {"complete": self.complete, **asdict(self)}
