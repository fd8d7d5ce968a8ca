"""Can a target take an attention node, and can it fuse it? Asked before the build, answered with a remedy.

The check reads the canonical graph. Much of what TensorRT's parser refuses is cured by a lowering; a
finding says so in `cured_by`, and `judge` draws the conclusion for the graph as it is and as lowered.
`check_operators` does the same for the operators around attention: rotary embedding, cache update and others.
Findings are of one node each; `group_findings` puts those of equal layers together for a reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mha_deploy.graph.attention_node import AttentionNode
from mha_deploy.graph.eligibility.fusion_rules import FUSION_RULES
from mha_deploy.graph.eligibility.operator_rules import check_operators, operator_options
from mha_deploy.graph.eligibility.parser_rules import PARSER_RULES
from mha_deploy.graph.eligibility.records import (
    NOT_FUSED,
    REFUSED,
    SEVERITIES,
    WRONG_ANSWER,
    Finding,
    FindingGroup,
    Rule,
    Target,
    group_findings,
    target_from,
)

__all__ = [
    "RULES",
    "Eligibility",
    "Finding",
    "FindingGroup",
    "Rule",
    "Target",
    "check",
    "check_operators",
    "group_findings",
    "judge",
    "operator_options",
    "target_from",
]

RULES: tuple[Rule, ...] = PARSER_RULES + FUSION_RULES
"""Everything that is known, in the order it is reported within one severity."""


@dataclass(frozen=True, kw_only=True)
class Eligibility:
    """The answer for one node: what happens to it as it is, and what after the lowering."""

    node: AttentionNode
    target: Target
    findings: tuple[Finding, ...]

    @property
    def taken(self) -> bool:
        """Whether the node as it is builds and computes what it says."""
        return not self._any(REFUSED, WRONG_ANSWER)

    @property
    def fused(self) -> bool:
        """Whether the node as it is can become one fused kernel."""
        return self.taken and not self._any(NOT_FUSED)

    @property
    def taken_when_lowered(self) -> bool:
        """Whether the node builds and is right once lowered."""
        return not self._any(REFUSED, WRONG_ANSWER, cured=False)

    @property
    def fused_when_lowered(self) -> bool:
        """Whether the node can become one fused kernel once lowered."""
        return self.taken_when_lowered and not self._any(NOT_FUSED, cured=False)

    @property
    def options(self) -> dict[str, bool]:
        """The options of the lowering that have to be turned on to cure what it can cure."""
        return {name: True for finding in self.findings for name in finding.needs}

    def _any(self, *severities: str, cured: bool = True) -> bool:
        """Whether a finding has one of the severities; with `cured` false, only what no lowering cures."""
        return any(
            finding.severity in severities and (cured or finding.cured_by is None)
            for finding in self.findings
        )


def check(nodes: Sequence[AttentionNode], target: Target) -> list[Finding]:
    """Everything the rules say about these nodes on this target, the worst first for each node."""
    return [finding for node in nodes for finding in _findings(node, target)]


def judge(nodes: Sequence[AttentionNode], target: Target) -> list[Eligibility]:
    """The answer for each node."""
    return [Eligibility(node=node, target=target, findings=tuple(_findings(node, target))) for node in nodes]


def _findings(node: AttentionNode, target: Target) -> list[Finding]:
    found = [
        _finding(rule, node)
        for rule in RULES
        if any(versions.covers(target) for versions in rule.holds) and rule.applies(node, target)
    ]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _finding(rule: Rule, node: AttentionNode) -> Finding:
    return Finding(
        node=node.name,
        rule=rule.id,
        severity=rule.severity,
        message=rule.message.format(**node.describe()),
        remedy=rule.remedy,
        source=rule.source,
        cured_by=rule.cured_by,
        needs=rule.needs,
    )
