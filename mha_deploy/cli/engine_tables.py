"""What the engine verbs print for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mha_deploy.cli.tables import table
from mha_deploy.engine.machine import where_built
from mha_deploy.engine.record import Engine, EngineManifest
from mha_deploy.graph.eligibility import Eligibility

_STYLES = {"fused": "green", "decomposed": "red", "unknown": "yellow"}


def eligibility_renderable(answers: Sequence[Eligibility]) -> RenderableType:
    """One block per attention node: the answer, then what was found, the worst first."""
    blocks: list[RenderableType] = []
    for answer in answers:
        verdict = f"{answer.target}: {answer.node.name} {_answer(answer)}"
        blocks.append(Text(verdict, style=_answer_style(answer)))
        for finding in answer.findings:
            # What a lowering cures is no obstacle, only something that is done on the way.
            label = f"done by the {finding.cured_by}" if finding.cured_by else finding.severity
            blocks.append(Text(f"  {label}: {finding.message}"))
            if not finding.cured_by:
                blocks.append(Text(f"    try: {finding.remedy}", style="dim"))
    return Group(*blocks)


def _answer(answer: Eligibility) -> str:
    if answer.fused:
        return "is taken and can be fused as it is"
    if answer.fused_when_lowered:
        return "can be fused once lowered"
    return "is taken, but not fused" if answer.taken_when_lowered else "is not taken"


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
    rows = table()
    rows.add_column("attention", no_wrap=True)
    rows.add_column("profile", justify="right")
    rows.add_column("verdict", no_wrap=True)
    rows.add_column("evidence", overflow="fold")
    for node in manifest.verdict["nodes"]:
        evidence = ", ".join(node["kernels"]) or node["reason"]
        status = Text(node["status"], style=_STYLES[node["status"]])
        rows.add_row(
            escape(node["node"]),
            escape(manifest.profile_name(node["profile"])),
            status,
            escape(f"{evidence} [{node['source']}]"),
        )
    return rows


def _precision(manifest: EngineManifest) -> list[RenderableType]:
    precision = manifest.verdict["precision"]
    lines: list[RenderableType] = [
        Text(f"{offender['what']} of {offender['kernel']} is {offender['dtype']}", style="red")
        for offender in precision["offenders"]
    ]
    lines += [Text(note, style="dim") for note in precision["notes"]]
    lines += [Text(f"sources disagree: {text}", style="yellow") for text in manifest.verdict["disagreements"]]
    if manifest.all_fused:
        return lines
    causes = [finding for finding in manifest.findings if finding["severity"] == "not-fused"]
    return lines + [Text(f"likely because: {cause['message']} Try: {cause['remedy']}") for cause in causes]


def _verdict(manifest: EngineManifest) -> Text:
    fused, count = manifest.fused_count
    precision = manifest.verdict["precision"]
    told = precision["status"].replace("really-", "really ") + (
        f" ({precision['reason']})" if precision["reason"] else ""
    )
    good = manifest.all_fused and manifest.is_in_precision
    text = f"{fused}/{count} fused, {told}; asked for {manifest.precision}"
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
