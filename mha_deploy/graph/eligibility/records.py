"""The records of the eligibility check: targets, rules with the versions they hold for, findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from mha_deploy.errors import DeployError, nearest
from mha_deploy.graph.attention_node import AttentionNode

TENSORRT = "tensorrt"
TENSORRT_RTX = "tensorrt-rtx"

REFUSED = "refused"
NOT_FUSED = "not-fused"
WRONG_ANSWER = "wrong-answer"
NOTE = "note"
SEVERITIES = (REFUSED, WRONG_ANSWER, NOT_FUSED, NOTE)

Version = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the engine is built for.

    Args:
        product: `tensorrt` or `tensorrt-rtx`.
        version: Its version; None for the newest.
        compute_capability: That of the GPU, such as (8, 9); None where it is not known.
    """

    product: str
    version: Version | None = None
    compute_capability: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        known = (TENSORRT, TENSORRT_RTX)
        if self.product not in known:
            raise DeployError("No such target.", got=self.product, hint=nearest(self.product, known))

    def is_below(self, major: int, minor: int) -> bool:
        """Whether the GPU is known to have a lower compute capability."""
        return self.compute_capability is not None and self.compute_capability < (major, minor)

    def __str__(self) -> str:
        version = "" if self.version is None else " " + ".".join(map(str, self.version))
        gpu = self.compute_capability
        return f"{self.product}{version}" + (
            "" if gpu is None else f" on compute capability {gpu[0]}.{gpu[1]}"
        )


def target_from(product: str, version: str | None = None, compute_capability: str | None = None) -> Target:
    """Read a target as it is written on a command line: `tensorrt`, `10.14.1`, `8.9`."""
    capability = None if compute_capability is None else _numbers("compute capability", compute_capability)
    if capability is not None and len(capability) != 2:
        raise DeployError("A compute capability has two numbers.", got=compute_capability, hint="such as 8.9")
    return Target(
        product=product,
        version=None if version is None else _numbers("version", version),
        compute_capability=None if capability is None else (capability[0], capability[1]),
    )


def _numbers(what: str, text: str) -> Version:
    try:
        return tuple(int(part) for part in text.split("."))
    except ValueError as error:
        raise DeployError(f"The {what} is not made of numbers.", got=text, hint="such as 10.14") from error


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The versions of one product that a rule holds for: from `since`, to just before `before`."""

    product: str
    since: Version = (0,)
    before: Version | None = None

    def covers(self, target: Target) -> bool:
        """Whether the target is among them; a target without a version is the newest."""
        if target.product != self.product:
            return False
        if target.version is None:
            return self.before is None
        return target.version >= self.since and (self.before is None or target.version < self.before)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One thing a target does not take, does not fuse, or gets wrong.

    Args:
        id: Short name.
        severity: `refused`, `wrong-answer` (taken, but computes something else), `not-fused`, `note`.
        holds: The versions it was seen in.
        applies: Whether it speaks of this node.
        message: What happens; may name fields of the node in braces.
        remedy: What to change.
        cured_by: The lowering after which it no longer applies.
        needs: Options of that lowering that have to be turned on for it.
        source: Where it was seen.
    """

    id: str
    severity: str
    holds: tuple[Versions, ...]
    applies: Callable[[AttentionNode, Target], bool]
    message: str
    remedy: str
    source: str
    cured_by: str | None = None
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that speaks of a node."""

    node: str
    rule: str
    severity: str
    message: str
    remedy: str
    source: str
    cured_by: str | None
    needs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FindingGroup:
    """One finding that holds for several nodes alike, as the layers of a model do.

    Args:
        finding: What was found, in the words of the first node.
        nodes: All nodes it was found for, each once, in order.
    """

    finding: Finding
    nodes: tuple[str, ...]

    @property
    def label(self) -> str:
        """The nodes in a few words: a name, or the first one and how many more there are."""
        others = len(self.nodes) - 1
        return self.nodes[0] if not others else f"{self.nodes[0]} and {others} more"


def group_findings(findings: Iterable[Finding]) -> list[FindingGroup]:
    """Put together what differs only in the node, the worst first; findings of several targets count once."""
    groups: dict[Finding, dict[str, Finding]] = {}
    for finding in findings:
        groups.setdefault(replace(finding, node=""), {}).setdefault(finding.node, finding)
    made = [FindingGroup(finding=next(iter(same.values())), nodes=tuple(same)) for same in groups.values()]
    return sorted(made, key=lambda group: SEVERITIES.index(group.finding.severity))


def v_head_size_differs(node: AttentionNode, target: Target) -> bool:
    """Whether V is known to have another head size than K."""
    return isinstance(node.D, int) and isinstance(node.Dv, int) and node.Dv != node.D


def is_rtx_gpu(compute_capability: tuple[int, int]) -> bool:
    """Whether TensorRT-RTX has kernels for this GPU: not for 9.0 and 10.0, the data centre parts."""
    return compute_capability in {(7, 5), (8, 0), (8, 6), (8, 9)} or compute_capability[0] == 12


RTX = Versions(product=TENSORRT_RTX)
EVERY_TENSORRT = Versions(product=TENSORRT)
BEFORE_10 = Versions(product=TENSORRT, before=(10,))
BEFORE_ATTENTION = Versions(product=TENSORRT, before=(10, 14))
SINCE_ATTENTION = Versions(product=TENSORRT, since=(10, 14))
FLAG_CAUSAL = Versions(product=TENSORRT, since=(10, 14), before=(11,))

WITH_ATTENTION = (SINCE_ATTENTION, RTX)
"""Where the parser has the Attention operator."""

EVERYWHERE = (EVERY_TENSORRT, RTX)

SEEN_RTX = "measured on TensorRT-RTX 1.7.1"
