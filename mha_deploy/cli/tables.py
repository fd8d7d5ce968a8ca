"""Results as tables in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mha_deploy.analyze.cost import kv_cache_bytes_per_token, parameter_count
from mha_deploy.model.deployable import ModuleSpec
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.model.spec import AttentionSpec
from mha_deploy.text import budget_share, named, sizes_text, together, without_hash, without_numbers

if TYPE_CHECKING:  # a verb that has no such result to show does not load what makes it
    from mha_deploy.bundle.folder import Bundle
    from mha_deploy.engine.manifest import Engine, EngineManifest
    from mha_deploy.graph.rules import Eligibility, Finding
    from mha_deploy.metrics import ParityReport
    from mha_deploy.report.table import Table as ReportTable
    from mha_deploy.validate.conformance import ConformanceTable
    from mha_deploy.validate.decode import DecodeReport
    from mha_deploy.validate.evaluate import Evaluation
    from mha_deploy.validate.latency import LatencyPoint
    from mha_deploy.validate.self_test import SelfTest
    from mha_deploy.validate.verdict import Report

# -- What the tables of several verbs share --------------------------------------------------------


def table(title: str | None = None, *, expand: bool = False) -> Table:
    """An empty table in the style of this tool."""
    layout = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0), "title_justify": "left"}
    return Table(title=title, expand=expand, **layout)  # type: ignore[arg-type]


def extras(node: Mapping[str, Any]) -> str:
    """What few attention nodes have."""
    found = {
        "past": node["has_past"],
        "present": node["has_present"],
        "weights": node["qk_output_mode"] is not None,
        "softcap": bool(node["softcap"]),
        "key lengths": node["has_nonpad_kv_seqlen"],
        "window": node["left_window"] >= 0 or node["right_window"] >= 0,
    }
    return ", ".join(name for name, present in found.items() if present) or "-"


def module_attention_renderable(nodes: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The attentions of a user's module and the lines that they come from; equal ones as one row."""
    rows = table(f"{len(nodes)} attention node{'' if len(nodes) == 1 else 's'}")
    rows.add_column("attention", overflow="fold")
    for column in ("Hq/Hkv×D", "type", "scale", "mask", "also"):
        rows.add_column(column)
    rows.add_column("source", overflow="fold")
    for group in together(nodes, _kind_of_node):
        first = group[0]
        scale = first["softmax_scale"]
        rows.add_row(
            escape(named([node["name"] for node in group], joint="\n")),
            "/".join(_known(first[key]) for key in ("Hq", "Hkv")) + f"×{_known(first['D'])}",
            _known(first["dtype"]),
            "?" if scale is None else f"{scale:.4g}",
            _mask(first),
            extras(first),
            escape(_place(first.get("place"))),
        )
    return rows


def _kind_of_node(node: Mapping[str, Any]) -> Hashable:
    """All that is shown of a node; of its name, what has no number."""
    shown = ("Hq", "Hkv", "D", "dtype", "softmax_scale", "place")
    return (without_numbers(node["name"]), _mask(node), extras(node), *(node.get(key) for key in shown))


def _mask(node: Mapping[str, Any]) -> str:
    parts = ["causal"] * bool(node["is_causal"]) + [str(node["mask"])] * (node["mask"] != "none")
    return escape(" + ".join(parts)) or "none"


def _place(place: str | None) -> str:
    """The file with its folder, and the line: paths of libraries are long."""
    return "/".join(Path(place).parts[-2:]) if place else "-"


def _known(value: object) -> str:
    return "?" if value is None else escape(str(value))


# -- The tables of a report ------------------------------------------------------------------------

_STYLES = {
    "good": "green",
    "bad": "red",
    "doubt": "yellow",
    "none": "dim",
    "over": "red",
    "best": "bold",
    "problem": "red",
    "aside": "yellow",
}


def rendered(built: ReportTable, *, titled: bool = False) -> RenderableType:
    """A table of a report: the columns that a terminal has room for, then the sentences about its rows."""
    parts: list[RenderableType] = []
    for group in built.groups:
        rows, below = table(group.title if titled else None), list[Text]()
        for column in built.columns:
            if not column.wide:
                align: Literal["left", "right"] = "right" if column.numeric else "left"
                fold = not column.numeric and column.name != "verdict"
                rows.add_column(
                    column.short or column.name,
                    justify=align,
                    no_wrap=not fold,
                    overflow="fold",
                )
        for row in group.rows:
            if row[-1].span > 1:
                name = f"{row[0].text}: " if len(row) > 1 else ""
                below.append(Text(f"{name}{row[-1].text}", style=_STYLES[row[-1].status]))
                continue
            shown = (cell for cell, column in zip(row, built.columns, strict=True) if not column.wide)
            rows.add_row(
                *(Text(cell.text + cell.suffix, style=_STYLES.get(cell.status, "")) for cell in shown)
            )
        parts += [rows] if rows.row_count else []
        parts += below
    return Group(*parts)


# The most attentions that pass and are still listed one by one; failed decode steps; kernels of a backend.
_MOST_LAYERS, _SHOWN_FAILURES, _SHOWN_KERNELS = 8, 4, 6


def parity_renderable(report: ParityReport) -> RenderableType:
    """A row for every output of every case, or for every attention of a module, and the verdict."""
    from mha_deploy.report.schema import as_plain
    from mha_deploy.report.table import LAYERS, layers_table, parity_table

    run = as_plain(report.to_dict())
    if run["cases"] == LAYERS:
        built, noun, right = _layers_table(run, layers_table), "attentions", "right"
        sizes = f" at {sizes_text(run['verdicts'][0]['sizes'])}" if run["verdicts"] else ""
        where = f"{report.backend}{sizes}, each attention against its FP64 oracle"
    else:
        built, noun, right = parity_table([run]), "outputs", "within budget"
        where = f"{report.backend}, errors against the FP64 oracle"
    count, failed = len(report.verdicts), sum(not verdict.passed for verdict in report.verdicts)
    status = "wrong" if any(verdict.is_wrong for verdict in report.verdicts) else "not verified"
    head = f"FAILED  {failed} of {count} {noun} are {status}"
    if report.passed:
        head = f"PASSED  {count}/{count} {noun} {right}"
    style = "bold green" if report.passed else "bold red"
    return Group(
        rendered(built), Text(head, style=style), Text(f"{report.model} {report.precision} on {where}")
    )


def _layers_table(run: dict[str, Any], layers_table: Callable[[list[Any]], ReportTable]) -> ReportTable:
    """All attentions; of many that pass, the first, the worst and the last, and how good the others are."""
    good = [verdict for verdict in run["verdicts"] if verdict["passed"]]
    if len(good) <= _MOST_LAYERS:
        return layers_table([run])
    kept = (good[0], max(good, key=lambda verdict: verdict["share"] or 0.0), good[-1])
    others = [verdict for verdict in good if verdict not in kept]
    listed = [verdict for verdict in run["verdicts"] if verdict not in others]
    errors = [verdict["deviation"]["relative_l2"] for verdict in others if verdict["deviation"]]
    worst = {
        **others[0],
        "output": f"{len(others)} more",
        "share": max((verdict["share"] or 0.0 for verdict in others), default=None),
        "deviation": {"relative_l2": max(errors, default=None)},
    }
    built = layers_table([{**run, "verdicts": [*listed, worst]}])
    (group,) = built.groups
    *rows, last = group.rows
    last = [replace(cell, text=f"≤ {cell.text}") if cell.order is not None else cell for cell in last]
    return replace(built, groups=[replace(group, rows=[*rows, last])])


def decode_renderable(report: DecodeReport) -> RenderableType:
    """Errors at steps 1, 2, 4, … beside those of the module itself, then what is wrong, then the verdict."""
    from mha_deploy.report.schema import as_plain
    from mha_deploy.report.table import decode_problems, prompts_text, steps_table

    data = as_plain(report.to_dict())
    parts: list[RenderableType] = []
    if (built := steps_table([data])) is not None:
        parts += [Text(f"trace {report.trace}, relative L2 by step"), rendered(built)]
    parts += [Text(line, style="red") for line in decode_problems(data, _SHOWN_FAILURES)]
    where, steps = f"{report.backend}, {prompts_text(report.prompt)}", f"{report.steps:,}"
    head = f"FAILED  at step {report.first_failed} of {steps} on {where}"
    if report.passed:
        head = f"PASSED  {steps} decode steps on {where}"
    elif not report.first_failed:
        side = "in the cache after" if report.first_failed is None else "at the prefill before"
        head = f"FAILED  {side} {steps} steps on {where}"
    share = "no error was measured"
    if report.share is not None:
        used = budget_share(report.share) if isfinite(report.share) else "an infinite share"
        share = f"{used} of the budget at most"
    own, eager = (
        "unknown" if each is None else f"{each:,.2f}" for each in (report.growth, report.eager_growth)
    )
    growth = Text(f"{share}; growth of the error {own}, of eager's own {eager}")
    return Group(*parts, Text(head, style="bold green" if report.passed else "bold red"), growth)


def point_renderable(point: LatencyPoint) -> RenderableType:
    """The latency of every backend at one set of sizes, and the longest kernels."""
    from mha_deploy.report.schema import as_plain
    from mha_deploy.report.table import kernels_table, latency_table, without_graph

    data = as_plain(point.to_dict())
    built = latency_table([data])
    (group,) = built.groups
    parts = [Text(f"latency at {group.title} · {group.about}"), rendered(built)]
    if note := without_graph([data]):
        parts.append(Text(note, style="dim"))
    for row in data["rows"]:
        row["kernels"] = row["kernels"][:_SHOWN_KERNELS]
    if any(row["kernels"] for row in data["rows"]):
        parts.append(rendered(kernels_table(data)))
    return Group(*parts)


def conformance_renderable(result: ConformanceTable) -> RenderableType:
    """How each runtime treats masks."""
    from mha_deploy.report.schema import as_plain
    from mha_deploy.report.table import conformance_reasons, conformance_table

    data = as_plain(result.to_dict())
    wrong = [f"{name}{words}" for name, words in conformance_reasons(data) if name.endswith(", wrong")]
    return Group(
        Text(f"masks, {result.precision}"),
        rendered(conformance_table(data)),
        *(Text(line, style="red") for line in wrong),
    )


# -- What the verbs print for people ---------------------------------------------------------------


def models_renderable(specs: Iterable[AttentionSpec]) -> RenderableType:
    """The table of known models."""
    rows = table(expand=True)
    rows.add_column("model", no_wrap=True)
    rows.add_column("kind", no_wrap=True)
    for column in ("Hq/Hkv×D", "E", "parameters", "KV B/token"):
        rows.add_column(column, justify="right", no_wrap=True)
    rows.add_column("description", no_wrap=True, overflow="ellipsis", ratio=1)
    for spec in specs:
        row = model_row(spec)
        heads = f"{spec.Hq}/{spec.Hkv}×{spec.D}"
        numbers = (f"{row[key]:,}" for key in ("E", "parameters", "kv_bytes_per_token"))
        rows.add_row(spec.name, row["kind"], heads, *numbers, spec.summary)
    return Group(rows, Text("One layer each; KV-cache bytes per token for FP16 or BF16.", style="dim"))


def model_row(spec: AttentionSpec) -> dict[str, Any]:
    """The facts of one model, for the table and for JSON."""
    return {
        "name": spec.name,
        "kind": spec.kind,
        "variant": spec.variant,
        "attends": spec.attends,
        "mask": spec.mask,
        "causal": spec.causal,
        "Hq": spec.Hq,
        "Hkv": spec.Hkv,
        "D": spec.D,
        "E": spec.E,
        "parameters": parameter_count(spec),
        "kv_bytes_per_token": kv_cache_bytes_per_token(spec, PRECISIONS["fp16"].bytes),
        "axes": {name: str(axis) for name, axis in spec.axes.items()},
        "summary": spec.summary,
    }


def bundle_renderable(bundle: Bundle, *, details: bool = False) -> RenderableType:
    """A bundle in a few lines; with `details`, everything that the manifest tells."""
    manifest, spec = bundle.manifest, bundle.manifest.spec
    facts = Table.grid(padding=(0, 2))
    axes = "  ".join(f"{name} {axis}" for name, axis in spec.axes.items())
    size = sum(entry.bytes for entry in manifest.files.values())
    facts.add_row("bundle", escape(str(bundle.path)))
    facts.add_row("model", escape(f"{spec.name}: {_what(spec)}"))
    facts.add_row("graph", escape(f"{manifest.precision.name}, opset {manifest.opset}, axes {axes}"))
    facts.add_row(
        "fused", f"{len(manifest.attention)}/{spec.attention_count} attention as one ONNX Attention node"
    )
    cases = "  ".join(f"{entry.name} {sizes_text(entry.sizes)}" for entry in manifest.golden)
    facts.add_row("golden", escape(cases))
    for entry in manifest.traces:
        facts.add_row("trace", escape(f"{entry.name}: {_tokens_text(bundle, entry.file)}"))
    if manifest.layers is not None:
        inside = f"what each of {len(manifest.layers.values)} attentions gives in {manifest.layers.case}"
        facts.add_row("layers", escape(inside))
    facts.add_row("weights", escape(manifest.weights))
    facts.add_row("size", f"{size / 1e6:,.1f} MB in {len(manifest.files)} files")
    for note in manifest.notes:
        facts.add_row("note", escape(note))
    if not details:
        return facts
    is_module = isinstance(spec, ModuleSpec)
    attention = (module_attention_renderable if is_module else attention_renderable)(manifest.attention)
    return Group(facts, attention, _details(bundle))


def _what(spec: AttentionSpec | ModuleSpec) -> str:
    if isinstance(spec, ModuleSpec):
        return f"{spec.factory or 'an object in memory'}, {spec.weight_bytes / 1e6:,.1f} MB of weights"
    return f"{spec.kind} {spec.Hq}/{spec.Hkv} heads of {spec.D}, width {spec.E}"


def _tokens_text(bundle: Bundle, file: str) -> str:
    """The tokens of a decode trace: its prompts, and the steps behind them."""
    from mha_deploy.bundle.traces import read_trace
    from mha_deploy.report.table import prompts_text

    trace = read_trace(bundle.file(file), bundle.manifest.spec, bundle.manifest.precision)
    return f"{prompts_text(trace.prompt.tolist())}, then {trace.steps} single tokens"


def attention_renderable(nodes: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The attention nodes of a graph with what sets them apart."""
    rows = table(f"{len(nodes)} attention node{'' if len(nodes) == 1 else 's'}")
    for column in ("node", "kind", "Hq", "Hkv", "D", "type", "scale", "mask", "causal", "rank", "also"):
        rows.add_column(column)
    for node in nodes:
        scale = node["softmax_scale"]
        rows.add_row(
            escape(node["name"]),
            *(_text(node[key]) for key in ("kind", "Hq", "Hkv", "D", "dtype")),
            "?" if scale is None else f"{scale:.4g}",
            _text(node["mask"]),
            "yes" if node["is_causal"] else "no",
            _text(node["rank"]),
            extras(node),
        )
    return rows


def _details(bundle: Bundle) -> RenderableType:
    manifest = bundle.manifest
    files = table("files, hashes checked")
    files.add_column("file")
    files.add_column("bytes", justify="right")
    files.add_column("sha256")
    for name, entry in manifest.files.items():
        files.add_row(escape(name), f"{entry.bytes:,}", f"{entry.sha256[:16]}…")
    made = "made with " + ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    checks = "\n".join(f"checked: {check}" for check in manifest.checks.get("graph", []))
    return Group(files, Text(checks, style="dim"), Text(made, style="dim"))


def self_test_renderable(result: SelfTest) -> RenderableType:
    """Every deliberate mistake, and by how much it was caught."""
    from mha_deploy.validate.self_test import largest_share

    rows = table()
    rows.add_column("model", no_wrap=True)
    rows.add_column("× budget", justify="right", no_wrap=True)
    rows.add_column("verdict")
    right = Text("passed", style="green") if result.right.passed else Text("FAILED", style="red")
    rows.add_row("as exported", _share(largest_share(result.right)), right)
    for catch in result.catches:
        verdict = Text("caught", style="green") if catch.caught else Text("MISSED", style="red")
        rows.add_row(catch.mistake, _share(catch.share), verdict)
    caught = sum(catch.caught for catch in result.catches)
    style = "bold green" if result.passed else "bold red"
    head = f"{'PASSED' if result.passed else 'FAILED'}  {caught}/{len(result.catches)} mistakes caught"
    head += "" if result.right.passed else ", but the graph as exported is wrong itself"
    return Group(rows, Text(head, style=style))


def _share(share: float) -> str:
    return "not a number" if share == float("inf") else f"{share:,.2f}"


def _text(value: object) -> str:
    return "?" if value is None else escape(str(value))


# -- What the engine verbs print for people --------------------------------------------------------

_NAME_WIDTH = 40
_FUSION = {"fused": "green", "decomposed": "red", "unknown": "yellow"}


def eligibility_renderable(answers: Sequence[Eligibility]) -> RenderableType:
    """A block for all attentions of one answer: the answer, then what was found, the worst first."""
    from mha_deploy.graph.rules import group_findings

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
    from mha_deploy.engine.manifest import attention_summary, libraries_summary, where_built

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
        facts.add_row("computed by", escape(attention_summary(manifest)))
    for library in libraries_summary(manifest):
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
            Text(node["status"], style=_FUSION[node["status"]]),
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
    reason = manifest.verdict["precision"]["reason"]
    text = f"{manifest.fusion_summary}, {manifest.precision_summary}" + (f": {reason}" if reason else "")
    good = manifest.all_fused and manifest.is_in_precision
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


# -- What `validate`, `bench` and `deploy` print of a validation for people ------------------------

_LEVELS = {"failure": "red", "warning": "yellow", "note": "dim"}


def report_renderable(report: Report) -> RenderableType:
    """The evidence first, then what it means: the last line on the screen is the verdict."""
    return Group(*_blocks(report))


def _blocks(report: Report) -> Iterator[RenderableType]:
    for evaluation in report.evaluations:
        for parity in evaluation.parity:
            yield parity_renderable(parity)
        yield from map(decode_renderable, evaluation.stepping)
        if evaluation.invariance:
            yield _invariance(evaluation)
    if report.conformance is not None:
        yield conformance_renderable(report.conformance)
    yield from (point_renderable(point) for point in report.points)
    for finding in report.findings:
        yield Text(f"{finding.level}: {finding.text}", style=_LEVELS[finding.level])
    style = "bold green" if report.passed else "bold red"
    yield Text(f"{'PASSED' if report.passed else 'FAILED'}  {report.headline}", style=style)


def _invariance(evaluation: Evaluation) -> Text:
    """In one line: what was varied, how often, and whether every answer was even the same to the bit."""
    from mha_deploy.validate.invariance import CHECKS

    parts = []
    for name in CHECKS:
        checks = [check for check in evaluation.invariance if check.check == name and check.case]
        passed = sum(check.passed for check in checks)
        parts.append(f"{name} {passed}/{len(checks)}" if checks else f"{name}: not applicable")
    judged = [check for check in evaluation.invariance if check.case]
    same = ", bitwise the same" if judged and all(check.bitwise for check in judged) else ""
    return Text(f"{evaluation.backend}, batch elements in other places: {', '.join(parts)}{same}")
