"""Was attention fused? One answer per attention node and profile, with its evidence.

`fused` and `decomposed` are said only where a kernel proves it; everything else is `unknown`, with the
reason. Several sources are asked one by one, and where two of them contradict each other the answer
is unknown as well, and the contradiction is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mha_deploy.backends.tensorrt.kernels import Kernel
from mha_deploy.backends.tensorrt.precision import PrecisionVerdict, precision_verdict
from mha_deploy.backends.tensorrt.told import Told
from mha_deploy.backends.tensorrt.written import Written

FUSED, DECOMPOSED, UNDECIDED = "fused", "decomposed", "unknown"

Attention = Mapping[str, Sequence[str]] | Iterable[str]
"""The attention nodes; or, for each, the names of the nodes it was lowered to."""


@dataclass(frozen=True, kw_only=True)
class NodeVerdict:
    """What became of one attention node in one profile.

    Args:
        node: Name of the attention node.
        profile: The optimisation profile.
        status: `fused`, `decomposed` or `unknown`.
        kernels: The kernels that prove it.
        reason: Why it is unknown, or how it is known where no kernel names the node.
        source: Who told: `log`, `plan`, `inspector`, `profile`; several joined by `+`.
    """

    node: str
    profile: int
    status: str
    kernels: tuple[str, ...] = ()
    reason: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class EngineVerdict:
    """What an engine turned out to be.

    Args:
        nodes: One verdict per attention node and profile.
        precision: Whether it is in the precision asked for.
        disagreements: What two sources say differently.
    """

    nodes: tuple[NodeVerdict, ...]
    precision: PrecisionVerdict
    disagreements: tuple[str, ...] = ()

    @property
    def all_fused(self) -> bool:
        """Whether every attention node is fused in every profile."""
        return bool(self.nodes) and all(verdict.status == FUSED for verdict in self.nodes)

    @property
    def fused_count(self) -> tuple[int, int]:
        """How many attention nodes are fused in every profile, of how many."""
        names = {verdict.node for verdict in self.nodes}
        broken = {verdict.node for verdict in self.nodes if verdict.status != FUSED}
        return len(names - broken), len(names)

    def as_dict(self) -> dict[str, Any]:
        """The verdict as plain data, for JSON."""
        return asdict(self)


def engine_verdict(
    sources: Mapping[str, Sequence[Kernel]],
    attention: Attention,
    precision: str,
    *,
    profiles: int = 1,
    written: Written | None = None,
) -> EngineVerdict:
    """Judge an engine by everything that is known of its kernels.

    Args:
        sources: The kernels as each source tells them; a source with none is not asked.
        attention: The attention nodes, or what each was lowered to.
        precision: The precision asked for.
        profiles: How many optimisation profiles the engine has.
        written: The types in the graph the engine was built from, where that is at hand.
    """
    groups = _groups(attention)
    told = {name: list(kernels) for name, kernels in sources.items() if kernels}
    by_source = {name: fusion_verdict(kernels, groups, profiles=profiles) for name, kernels in told.items()}
    nodes, conflicts = _merge(by_source, groups, profiles)
    found, doubts = _merge_precision(
        {name: precision_verdict(ks, precision, written) for name, ks in told.items()}, precision
    )
    return EngineVerdict(nodes=tuple(nodes), precision=found, disagreements=(*conflicts, *doubts))


def fusion_verdict(
    kernels: Sequence[Kernel], attention: Attention, *, profiles: int = 1
) -> list[NodeVerdict]:
    """Judge every attention node by the kernels that one source tells of.

    Args:
        kernels: The kernels.
        attention: The attention nodes, or what each was lowered to.
        profiles: How many optimisation profiles the engine has; more are judged if kernels show them.

    Returns:
        One verdict per profile and node.
    """
    groups = _groups(attention)
    count = max([profiles, *(kernel.profile + 1 for kernel in kernels)])
    verdicts = []
    for profile in range(count):
        told = Told([kernel for kernel in kernels if kernel.profile == profile], groups)
        if told.kernels and not any(kernel.onnx_nodes or kernel.is_opaque for kernel in told.kernels):
            verdicts += _by_count(told.kernels, groups, profile)
        else:
            verdicts += [_by_name(told, node, profile) for node in groups]
    return verdicts


def _groups(attention: Attention) -> dict[str, tuple[str, ...]]:
    if isinstance(attention, Mapping):
        return {node: tuple(names) for node, names in attention.items()}
    return {node: (node,) for node in attention}


def _by_name(told: Told, node: str, profile: int) -> NodeVerdict:
    """Judge a node by the kernels that say they compute it."""
    mine, fused = told.kernels_of(node), told.fused_kernels_of(node)
    parts = [kernel for kernel in mine if kernel.is_gemm or kernel.is_softmax]
    if fused:
        return _verdict(node, profile, FUSED, fused, told.source)
    if parts and not any(kernel.is_opaque for kernel in mine) and told.nameless is None:
        return _verdict(node, profile, DECOMPOSED, mine, told.source)
    reason = _why_unknown(told, mine, profile)
    return NodeVerdict(node=node, profile=profile, status=UNDECIDED, reason=reason, source=told.source)


def _verdict(
    node: str, profile: int, status: str, kernels: Sequence[Kernel], source: str, reason: str = ""
) -> NodeVerdict:
    labels = tuple(dict.fromkeys(kernel.label for kernel in kernels))
    return NodeVerdict(
        node=node, profile=profile, status=status, kernels=labels, reason=reason, source=source
    )


def _why_unknown(told: Told, mine: Sequence[Kernel], profile: int) -> str:
    if not told.kernels:
        return f"nothing is told of the kernels of profile {profile}"
    if told.opaque is not None:
        return f"the kernels inside {told.opaque} are not told by this version; give those of a profiler run"
    if told.nameless is not None:
        return f"{told.nameless} is fused attention, but does not say of which node"
    plugins = [kernel.label for kernel in mine if kernel.is_plugin]
    if plugins:
        return f"the plugin {plugins[0]} computes it, and does not say how"
    foreign = [kernel.label for kernel in mine if kernel.is_fused_attention]
    if foreign:
        return f"{foreign[0]} names a part of it, but computes another attention"
    if mine:
        return f"{mine[0].label} names it, but no kernel that computes scores, softmax or sum does"
    return "no kernel names it"


def _by_count(
    kernels: Sequence[Kernel], groups: Mapping[str, Sequence[str]], profile: int
) -> list[NodeVerdict]:
    """Judge all nodes together by kernels that name no node, such as those of a profiler run."""
    source = kernels[0].source
    fused = [kernel for kernel in kernels if kernel.is_fused_attention]
    softmax = [kernel for kernel in kernels if kernel.is_softmax]
    wanted = len(groups)
    if len(fused) == wanted:
        reason = f"{len(fused)} fused attention kernels ran for {wanted} attention nodes"
        return [_verdict(node, profile, FUSED, fused, source, reason) for node in groups]
    if not fused and softmax:
        parts = [kernel for kernel in kernels if kernel.is_gemm or kernel.is_softmax]
        reason = "no fused attention kernel ran, and a softmax of its own did"
        return [_verdict(node, profile, DECOMPOSED, parts, source, reason) for node in groups]
    reason = f"{len(fused)} fused attention kernels for {wanted} attention nodes, and no names to tell which"
    return [
        NodeVerdict(node=node, profile=profile, status=UNDECIDED, reason=reason, source=source)
        for node in groups
    ]


def _merge(
    by_source: Mapping[str, Sequence[NodeVerdict]], groups: Mapping[str, Sequence[str]], profiles: int
) -> tuple[list[NodeVerdict], list[str]]:
    said: dict[tuple[str, int], list[NodeVerdict]] = {}
    for verdict in (verdict for verdicts in by_source.values() for verdict in verdicts):
        said.setdefault((verdict.node, verdict.profile), []).append(verdict)
    count = max([profiles, *(profile + 1 for _, profile in said)])
    nodes, conflicts = [], []
    for profile in range(count):
        for node in groups:
            merged, conflict = _merge_one(said.get((node, profile), ()), node, profile)
            nodes.append(merged)
            conflicts += conflict
    return nodes, conflicts


def _merge_one(mine: Sequence[NodeVerdict], node: str, profile: int) -> tuple[NodeVerdict, list[str]]:
    known = [verdict for verdict in mine if verdict.status != UNDECIDED]
    source = "+".join(verdict.source for verdict in (known or mine))
    if not known:
        reason = "; ".join(dict.fromkeys(v.reason for v in mine)) or "no source tells of its kernels"
        return NodeVerdict(node=node, profile=profile, status=UNDECIDED, reason=reason, source=source), []
    first = known[0]
    other = next((v for v in known[1:] if _differ(first, v)), None)
    kept = NodeVerdict(
        node=node,
        profile=profile,
        status=first.status,
        kernels=first.kernels,
        reason=first.reason,
        source=source,
    )
    if other is None:
        return kept, []
    conflict = f"{node}, profile {profile}: {_say(first)}, but {_say(other)}"
    if first.status == other.status:
        return kept, [conflict]
    return NodeVerdict(node=node, profile=profile, status=UNDECIDED, reason=conflict, source=source), [
        conflict
    ]


def _differ(one: NodeVerdict, other: NodeVerdict) -> bool:
    """Whether two sources contradict each other; names of decomposed kernels differ by source."""
    if one.status != other.status:
        return True
    # A profiler and the layer records spell a kernel differently, so only these two are compared.
    comparable = {one.source, other.source} == {"log", "plan"}
    return comparable and one.status == FUSED and set(one.kernels) != set(other.kernels)


def _say(verdict: NodeVerdict) -> str:
    return f"the {verdict.source} says {verdict.status} ({', '.join(verdict.kernels)})"


def _merge_precision(
    verdicts: Mapping[str, PrecisionVerdict], precision: str
) -> tuple[PrecisionVerdict, list[str]]:
    """The worst that is known; `unknown` where no source knows, or one saw what no other could judge.

    A plan tells only of Myelin's regions, the inspector of everything but what is inside them: an inspector
    that does not know the type of a layer of its own is not overruled by a plan that never saw it.
    """
    ranked = sorted(verdicts.items(), key=lambda item: (item[1].status == "unknown", item[1].ok))
    if not ranked:
        nothing = "no source tells of its kernels"
        return PrecisionVerdict(asked=precision, status="unknown", counts={}, reason=nothing), []
    untold = [verdict for verdict in verdicts.values() if verdict.status == "unknown" and verdict.has_untold]
    if untold and ranked[0][1].ok:
        return replace(ranked[0][1], status="unknown", reason=untold[0].reason), []
    known = [(name, verdict.status) for name, verdict in ranked if verdict.status != "unknown"]
    doubts = [
        f"precision: the {known[0][0]} says {known[0][1]}, but the {name} says {status}"
        for name, status in known[1:]
        # A profiler sees no tensors: that it finds nothing wrong contradicts nobody.
        if status != known[0][1] and name != "profile"
    ]
    return ranked[0][1], doubts
