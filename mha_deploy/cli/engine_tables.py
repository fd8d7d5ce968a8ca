"""What the engine verbs print for people."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mha_deploy.cli.table_parts import table
from mha_deploy.engine.machine import where_built
from mha_deploy.engine.record import Engine, EngineManifest
from mha_deploy.engine.told import attention_told, libraries_told
from mha_deploy.graph.eligibility import Eligibility, Finding, group_findings
from mha_deploy.report.alike import named, together, without_hash, without_numbers

_NAME_WIDTH = 40
_STYLES = {"fused": "green", "decomposed": "red", "unknown": "yellow"}


def eligibility_renderable(answers: Sequence[Eligibility]) -> RenderableType:
    """A block for all attentions of one answer: the answer, then what was found, the worst first."""
    blocks: list[RenderableType] = []
    for alike in together(answers, lambda answer: (answer.target, _answer(answer))):
        nodes = [answer.node.name for answer in alike]
        verdict = f"{alike[0].target}: {named(nodes)} {_answer(alike[0], several=len(nodes) > 1)}"
        blocks.append(Text(verdict, style=_answer_style(alike[0])))
        for group in group_findings(finding for answer in alike for finding in answer.findings):
            about = "" if len(group.nodes) == len(nodes) else f"{group.label}: "
            blocks += _finding(group.finding, about)
    return Group(*blocks)


def _finding(finding: Finding, about: str) -> list[RenderableType]:
    """A finding, and whom of a block it is about where that is not everyone."""
    # What a lowering cures is no obstacle, only something that is done on the way.
    label = f"done by the {finding.cured_by}" if finding.cured_by else finding.severity
    lines: list[RenderableType] = [Text(f"  {label}: {about}{finding.message}")]
    if not finding.cured_by:
        lines.append(Text(f"    try: {finding.remedy}", style="dim"))
    return lines


def _answer(answer: Eligibility, *, several: bool = False) -> str:
    verb = "are" if several else "is"
    if answer.fused:
        return f"{verb} taken and can be fused as {'they are' if several else 'it is'}"
    if answer.fused_when_lowered:
        return "can be fused once lowered"
    return f"{verb} taken, but not fused" if answer.taken_when_lowered else f"{verb} not taken"


def _answer_style(answer: Eligibility) -> str:
    return "green" if answer.fused_when_lowered else "yellow" if answer.taken_when_lowered else "red"


def engine_renderable(engine: Engine, *, details: bool = False) -> RenderableType:
    """An engine in a few lines with its verdict; with `details`, its kernels too."""
    manifest = engine.manifest
    facts = Table.grid(padding=(0, 2))
    facts.add_row("engine", escape(str(engine.path)))
    facts.add_row(
        "built by",
        escape(f"{manifest.backend} {manifest.version} in {manifest.seconds:.1f} s, {where_built(manifest)}"),
    )
    facts.add_row("size", f"{manifest.engine_bytes / 1e6:,.1f} MB")
    for index, profile in enumerate(manifest.profiles):
        ranges = "  ".join(f"{name} {sizes}" for name, sizes in profile.items())
        facts.add_row(f"profile {manifest.profile_name(index)}", escape(ranges))
    if manifest.attention["asked"] != "native":
        facts.add_row("computed by", escape(attention_told(manifest)))
    for library in libraries_told(manifest):
        facts.add_row("needs", escape(library))
    for note in manifest.notes:
        facts.add_row("note", escape(note))
    blocks: list[RenderableType] = [facts, _nodes(manifest)]
    if details:
        blocks.append(_kernels(manifest))
    return Group(*blocks, *_precision(manifest), _verdict(manifest))


def fit_renderable(misfits: Sequence[str]) -> Text:
    """Whether an engine can run on this machine, and if not, why."""
    if not misfits:
        return Text("It can run on this machine.")
    return Text(f"It cannot run on this machine: {'; '.join(misfits)}.")


def _nodes(manifest: EngineManifest) -> Table:
    """A row for all attentions of one kernel: those of a model differ in their numbers only."""
    rows = table()
    groups = together(manifest.verdict["nodes"], _kind_of_row)
    rows.add_column("attention", no_wrap=all(len(group[0]["node"]) <= _NAME_WIDTH for group in groups))
    rows.add_column("profile", justify="right")
    rows.add_column("verdict", no_wrap=True)
    rows.add_column("evidence", overflow="fold")
    for group in groups:
        node = group[0]
        rows.add_row(
            escape(named([each["node"] for each in group], joint="\n")),
            escape(manifest.profile_name(node["profile"])),
            Text(node["status"], style=_STYLES[node["status"]]),
            escape(f"{_evidence(group)} [{node['source']}]"),
        )
    return rows


def _kind_of_row(node: Mapping[str, Any]) -> Hashable:
    """All that is shown of an attention, without the number of its node and the hash of its kernel."""
    kernels = tuple(without_hash(kernel) for kernel in node["kernels"])
    told = without_numbers(node["reason"] or "")
    return (without_numbers(node["node"]), node["profile"], node["status"], kernels, told, node["source"])


def _evidence(group: Sequence[Mapping[str, Any]]) -> str:
    """The kernels of a row, with their hashes where these are the same for all its attentions."""
    kernels = [", ".join(node["kernels"]) for node in group]
    if len(set(kernels)) > 1:
        return without_hash(kernels[0])
    return kernels[0] or str(group[0]["reason"])


def _precision(manifest: EngineManifest) -> list[RenderableType]:
    precision = manifest.verdict["precision"]
    offenders = together(
        precision["offenders"], lambda each: (each["what"], without_hash(each["kernel"]), each["dtype"])
    )
    lines: list[RenderableType] = [
        Text(
            f"{same[0]['what']} of {named([each['kernel'] for each in same])} is {same[0]['dtype']}",
            style="red",
        )
        for same in offenders
    ]
    lines += [Text(note, style="dim") for note in precision["notes"]]
    lines += [Text(f"sources disagree: {text}", style="yellow") for text in manifest.verdict["disagreements"]]
    if manifest.all_fused:
        return lines
    causes = [finding for finding in manifest.findings if finding["severity"] == "not-fused"]
    said = dict.fromkeys(f"likely because: {cause['message']} Try: {cause['remedy']}" for cause in causes)
    return lines + [Text(line) for line in said]


def _verdict(manifest: EngineManifest) -> Text:
    precision = manifest.verdict["precision"]
    told = precision["status"].replace("really-", "really ") + (
        f" ({precision['reason']})" if precision["reason"] else ""
    )
    good = manifest.all_fused and manifest.is_in_precision
    text = f"{manifest.fusion_told}, {told}; asked for {manifest.precision}"
    return Text(text, style="bold green" if good else "bold yellow")


def _kernels(manifest: EngineManifest) -> Table:
    rows = table(f"{len(manifest.kernels)} kernels")
    rows.add_column("profile", justify="right")
    rows.add_column("kernel", overflow="fold")
    rows.add_column("type", no_wrap=True)
    rows.add_column("types", no_wrap=True)
    rows.add_column("nodes", overflow="fold")
    for kernel in manifest.kernels:
        name = Text(kernel["name"], style="green" if kernel["fused_attention"] else "")
        types = ",".join(kernel["dtypes"])
        rows.add_row(
            escape(manifest.profile_name(kernel["profile"])),
            name,
            escape(kernel["type"]),
            escape(types),
            escape(", ".join(kernel["nodes"][:6])),
        )
    return rows
