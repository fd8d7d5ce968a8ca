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
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.model.spec import AttentionSpec
from mha_deploy.text import (
    budget_share,
    named,
    plural,
    sizes_text,
    together,
    without_hash,
    without_numbers,
    yes_no,
)

if TYPE_CHECKING:  # a verb that has no such result to show does not load what makes it
    from mha_deploy.bundle.folder import Bundle
    from mha_deploy.engine.manifest import Engine, EngineManifest
    from mha_deploy.graph.rules import Eligibility
    from mha_deploy.metrics import ParityReport
    from mha_deploy.report.table import Table as ReportTable
    from mha_deploy.runtime.tensorrt.verdict import NodeVerdict
    from mha_deploy.validate.bench import ThroughputRow
    from mha_deploy.validate.conformance import ConformanceTable
    from mha_deploy.validate.decode import DecodeReport
    from mha_deploy.validate.evaluate import Evaluation
    from mha_deploy.validate.latency import LatencyPoint
    from mha_deploy.validate.self_test import SelfTest
    from mha_deploy.validate.verdict import Report

# -- What the tables of several verbs share --------------------------------------------------------


def table(title: str | None = None, *columns: str, expand: bool = False) -> Table:
    """A table in the style of this tool; `#` is before columns of numbers, `!` before those not to wrap."""
    layout = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0), "title_justify": "left"}
    made = Table(title=title, expand=expand, **layout)  # type: ignore[arg-type]
    for name in columns:
        align: Literal["left", "right"] = "right" if name.startswith("#") else "left"
        made.add_column(
            name.lstrip("#!"), justify=align, no_wrap=name.startswith(("#", "!")), overflow="fold"
        )
    return made


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
    rows = table(
        plural(len(nodes), "attention node"),
        "attention",
        "Hq/Hkv×D",
        "type",
        "scale",
        "mask",
        "also",
        "source",
    )

    def cells(node: Mapping[str, Any]) -> tuple[str, ...]:
        parts = ["causal"] * bool(node["is_causal"]) + [str(node["mask"])] * (node["mask"] != "none")
        place = Path(node.get("place") or "-").parts[-2:]  # paths of libraries are long
        heads = f"{_known(node['Hq'])}/{_known(node['Hkv'])}×{_known(node['D'])}"
        mask = escape(" + ".join(parts)) or "none"
        return (heads, _known(node["dtype"]), _scale(node), mask, extras(node), escape("/".join(place)))

    for group in together(nodes, lambda node: (without_numbers(node["name"]), cells(node))):
        rows.add_row(escape(named([node["name"] for node in group], joint="\n")), *cells(group[0]))
    return rows


def attention_renderable(nodes: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The attention nodes of a graph with what sets them apart."""
    heads = ("kind", "Hq", "Hkv", "D")
    names = ("node", *heads, "type", "scale", "mask", "causal", "rank", "also")
    rows = table(plural(len(nodes), "attention node"), *names)
    for node in nodes:
        rows.add_row(
            escape(node["name"]),
            *(_known(node[key]) for key in (*heads, "dtype")),
            _scale(node),
            _known(node["mask"]),
            yes_no(node["is_causal"]),
            _known(node["rank"]),
            extras(node),
        )
    return rows


def _scale(node: Mapping[str, Any]) -> str:
    return "?" if node["softmax_scale"] is None else f"{node['softmax_scale']:.4g}"


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


def rendered(built: ReportTable) -> RenderableType:
    """A table of a report: the columns that a terminal has room for, then the sentences about its rows."""
    parts: list[RenderableType] = []
    for group in built.groups:
        shown = [column for column in built.columns if not column.wide]
        signs = ["#" if column.numeric else "!" if column.name == "verdict" else "" for column in shown]
        names = [f"{sign}{column.short or column.name}" for sign, column in zip(signs, shown, strict=True)]
        rows, below = table(None, *names), list[Text]()
        for row in group.rows:
            if row[-1].span > 1:
                name = f"{row[0].text}: " if len(row) > 1 else ""
                below.append(Text(f"{name}{row[-1].text}", style=_STYLES[row[-1].status]))
                continue
            cells = [cell for cell, column in zip(row, built.columns, strict=True) if not column.wide]
            rows.add_row(
                *(Text(cell.text + cell.suffix, style=_STYLES.get(cell.status, "")) for cell in cells)
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
    words = f"{count}/{count} {noun} {right}" if report.passed else f"{failed} of {count} {noun} are {status}"
    head = _head(report.passed, words)
    return Group(rendered(built), head, Text(f"{report.model} {report.precision} on {where}"))


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
    head = f"at step {report.first_failed} of {steps} on {where}"
    if report.passed:
        head = f"{steps} decode steps on {where}"
    elif not report.first_failed:
        side = "in the cache after" if report.first_failed is None else "at the prefill before"
        head = f"{side} {steps} steps on {where}"
    share = "no error was measured"
    if report.share is not None:
        used = budget_share(report.share) if isfinite(report.share) else "an infinite share"
        share = f"{used} of the budget at most"
    own, eager = (
        "unknown" if each is None else f"{each:,.2f}" for each in (report.growth, report.eager_growth)
    )
    growth = Text(f"{share}; growth of the error {own}, of eager's own {eager}")
    return Group(*parts, _head(report.passed, head), growth)


def throughput_renderable(rows: Sequence[ThroughputRow]) -> RenderableType:
    """Calls per second by number of streams."""
    from mha_deploy.report.table import throughput_table

    return rendered(throughput_table([row.to_dict() for row in rows]))


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
    rows = table(None, "!model", "!kind", "#Hq/Hkv×D", "#E", "#parameters", "#KV B/token", expand=True)
    rows.add_column("description", no_wrap=True, overflow="ellipsis", ratio=1)
    for spec in specs:
        row = model_row(spec)
        heads = f"{spec.Hq}/{spec.Hkv}×{spec.D}"
        numbers = (f"{row[key]:,}" for key in ("E", "parameters", "kv_bytes_per_token"))
        rows.add_row(spec.name, row["kind"], heads, *numbers, spec.summary)
    return Group(rows, Text("One layer each; KV-cache bytes per token for FP16 or BF16.", style="dim"))


def model_row(spec: AttentionSpec) -> dict[str, Any]:
    """The attributes of one model, for the table and for JSON."""
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
    """A bundle in a few lines; with `details`, everything in its manifest."""
    manifest, spec = bundle.manifest, bundle.manifest.spec
    layer = spec.layer
    what = f"{spec.name}: "
    if layer is None:
        what += f"{spec.factory or 'an object in memory'}, {spec.weight_bytes / 1e6:,.1f} MB of weights"
    else:
        what += f"{layer.kind} {layer.Hq}/{layer.Hkv} heads of {layer.D}, width {layer.E}"
    axes = "  ".join(f"{name} {axis}" for name, axis in spec.axes.items())
    size = sum(entry.bytes for entry in manifest.files.values())
    cases = "  ".join(f"{entry.name} {sizes_text(entry.sizes)}" for entry in manifest.golden).replace(
        ", ", ","
    )
    lines = [
        ("bundle", str(bundle.path)),
        ("model", what),
        ("graph", f"{manifest.precision.name}, opset {manifest.opset}, axes {axes}"),
        ("fused", f"{len(manifest.attention)}/{spec.attention_count} attention as one ONNX Attention node"),
        ("golden", cases),
    ]
    if manifest.traces:
        from mha_deploy.bundle.traces import read_trace
        from mha_deploy.report.table import prompts_text
    for entry in manifest.traces:
        trace = read_trace(bundle.file(entry.file), spec, manifest.precision)
        words = f"{prompts_text(trace.prompt.tolist())}, then {trace.steps} single tokens"
        lines.append(("trace", f"{entry.name}: {words}"))
    if manifest.layers is not None:
        inside = (
            f"the results of {plural(len(manifest.layers.values), 'attention')} in {manifest.layers.case}"
        )
        lines.append(("layers", inside))
    lines.append(("weights", manifest.weights))
    lines.append(("size", f"{size / 1e6:,.1f} MB in {len(manifest.files)} files"))
    lines += [("note", note) for note in manifest.notes]
    if not details:
        return _pairs(lines)
    attention = module_attention_renderable if layer is None else attention_renderable
    files = table("files, hashes checked", "file", "#bytes", "sha256")
    for name, file in manifest.files.items():
        files.add_row(escape(name), f"{file.bytes:,}", f"{file.sha256[:16]}…")
    checks = "\n".join(f"checked: {check}" for check in manifest.checks.get("graph", []))
    made = "made with " + ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    below = (Text(checks, style="dim"), Text(made, style="dim"))
    return Group(_pairs(lines), attention(manifest.attention), files, *below)


def _pairs(lines: Iterable[tuple[str, str]]) -> Table:
    """Names and values side by side."""
    grid = Table.grid(padding=(0, 2))
    for name, value in lines:
        grid.add_row(name, escape(value))
    return grid


def self_test_renderable(result: SelfTest) -> RenderableType:
    """Every mutation, and by how much it exceeds the budget."""
    from mha_deploy.validate.self_test import largest_share

    def share_text(share: float) -> str:
        return "not a number" if share == float("inf") else f"{share:,.2f}"

    rows = table(None, "!model", "#× budget", "verdict")
    right = Text("passed", style="green") if result.right.passed else Text("FAILED", style="red")
    rows.add_row("as exported", share_text(largest_share(result.right)), right)
    for catch in result.catches:
        verdict = Text("detected", style="green") if catch.caught else Text("MISSED", style="red")
        rows.add_row(catch.mistake, share_text(catch.share), verdict)
    found = f"{sum(catch.caught for catch in result.catches)}/{len(result.catches)} mutations detected"
    found += "" if result.right.passed else ", but the graph as exported is wrong itself"
    return Group(rows, _head(result.passed, found))


def _head(passed: bool, words: str) -> Text:
    """A verdict."""
    return Text(f"{'PASSED' if passed else 'FAILED'}  {words}", style=f"bold {'green' if passed else 'red'}")


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
        taken = "yellow" if alike[0].taken_when_lowered else "red"
        blocks.append(Text(verdict, style="green" if alike[0].fused_when_lowered else taken))
        for group in group_findings(finding for answer in alike for finding in answer.findings):
            about = "" if len(group.nodes) == len(nodes) else f"{group.label}: "
            finding = group.finding
            # What a lowering cures is no obstacle.
            label = f"done by the {finding.cured_by}" if finding.cured_by else finding.severity
            blocks.append(Text(f"  {label}: {about}{finding.message}"))
            if not finding.cured_by:
                blocks.append(Text(f"    try: {finding.remedy}", style="dim"))
    return Group(*blocks)


def _answer(answer: Eligibility, *, several: bool = False) -> str:
    verb = "are" if several else "is"
    if answer.fused:
        return f"{verb} taken and can be fused as {'they are' if several else 'it is'}"
    if answer.fused_when_lowered:
        return "can be fused once lowered"
    return f"{verb} taken, but not fused" if answer.taken_when_lowered else f"{verb} not taken"


def engine_renderable(engine: Engine, *, details: bool = False) -> RenderableType:
    """An engine in a few lines with its verdict; with `details`, its kernels too."""
    from mha_deploy.engine.manifest import attention_summary, libraries_summary, where_built

    manifest = engine.manifest
    built = f"{manifest.backend} {manifest.version} in {manifest.seconds:.1f} s, {where_built(manifest)}"
    lines = [("engine", str(engine.path)), ("built by", built)]
    lines.append(("size", f"{manifest.engine_bytes / 1e6:,.1f} MB"))
    for index, profile in enumerate(manifest.profiles):
        ranges = "  ".join(f"{name} {sizes}" for name, sizes in profile.items())
        lines.append((f"profile {manifest.profile_name(index)}", ranges))
    if manifest.attention["requested"] != "native":
        lines.append(("computed by", attention_summary(manifest)))
    lines += [("needs", library) for library in libraries_summary(manifest)]
    lines += [("note", note) for note in manifest.notes]
    if manifest.rebuilds is not None:
        from mha_deploy.engine.manifest import rebuild_summary

        lines += [("rebuilds", line) for line in rebuild_summary(manifest.rebuilds)]
    blocks: list[RenderableType] = [_pairs(lines), _nodes(manifest)]
    if details:
        kernels = table(
            plural(len(manifest.kernels), "kernel"), "#profile", "kernel", "!type", "!types", "nodes"
        )
        for kernel in manifest.kernels:
            kernels.add_row(
                escape(manifest.profile_name(kernel["profile"])),
                Text(kernel["name"], style="green" if kernel["fused_attention"] else ""),
                escape(kernel["type"]),
                escape(",".join(kernel["dtypes"])),
                escape(", ".join(kernel["nodes"][:6])),
            )
        blocks.append(kernels)
    reason = manifest.verdict.precision.reason
    text = f"{manifest.fusion_summary}, {manifest.precision_summary}" + (f": {reason}" if reason else "")
    good = manifest.all_fused and manifest.is_in_precision
    return Group(*blocks, *_precision(manifest), Text(text, style="bold green" if good else "bold yellow"))


def fit_renderable(misfits: Sequence[str]) -> Text:
    """Whether an engine can run on this machine, and if not, why."""
    if not misfits:
        return Text("It can run on this machine.")
    return Text(f"It cannot run on this machine: {'; '.join(misfits)}.")


def _nodes(manifest: EngineManifest) -> Table:
    """A row for all attentions of one kernel: those of a model differ in their numbers only."""

    def kind(node: NodeVerdict) -> Hashable:
        kernels = tuple(without_hash(kernel) for kernel in node.kernels)
        words = (without_numbers(node.node), without_numbers(node.reason))
        return (*words, node.profile, node.status, kernels, node.source)

    groups = together(manifest.verdict.nodes, kind)
    short = all(len(group[0].node) <= _NAME_WIDTH for group in groups)
    rows = table(None, f"{'!' if short else ''}attention", "#profile", "!verdict", "evidence")
    for group in groups:
        node, kernels = group[0], [", ".join(each.kernels) for each in group]
        # A hash is shown where it is the same for all attentions of the row.
        evidence = kernels[0] or node.reason if len(set(kernels)) == 1 else without_hash(kernels[0])
        rows.add_row(
            escape(named([each.node for each in group], joint="\n")),
            escape(manifest.profile_name(node.profile)),
            Text(node.status, style=_FUSION[node.status]),
            escape(f"{evidence} [{node.source}]"),
        )
    return rows


def _precision(manifest: EngineManifest) -> list[RenderableType]:
    precision = manifest.verdict.precision
    offenders = together(precision.offenders, lambda each: (each.what, without_hash(each.kernel), each.dtype))
    lines: list[RenderableType] = [
        Text(f"{same[0].what} of {named([each.kernel for each in same])} is {same[0].dtype}", style="red")
        for same in offenders
    ]
    lines += [Text(note, style="dim") for note in precision.notes]
    lines += [Text(f"sources disagree: {text}", style="yellow") for text in manifest.verdict.disagreements]
    if manifest.all_fused:
        return lines
    causes = [finding for finding in manifest.findings if finding["severity"] == "not-fused"]
    likely = dict.fromkeys(f"likely because: {cause['message']} Try: {cause['remedy']}" for cause in causes)
    return lines + [Text(line) for line in likely]


# -- What `validate`, `bench` and `deploy` print of a validation for people ------------------------

_LEVELS = {"failure": "red", "warning": "yellow", "note": "dim"}


def report_renderable(report: Report) -> RenderableType:
    """The evidence first, then the findings: the last line on the screen is the verdict."""
    return Group(*_blocks(report))


def _blocks(report: Report) -> Iterator[RenderableType]:
    for evaluation in report.evaluations:
        for parity in evaluation.parity:
            yield parity_renderable(parity)
        yield from map(decode_renderable, evaluation.decode_reports)
        if evaluation.invariance:
            yield _invariance(evaluation)
    if report.conformance is not None:
        yield conformance_renderable(report.conformance)
    yield from (point_renderable(point) for point in report.points)
    if report.serving:
        from mha_deploy.report.table import serving_table

        yield rendered(serving_table([point.to_dict() for point in report.serving]))
    for finding in report.findings:
        yield Text(f"{finding.level}: {finding.text}", style=_LEVELS[finding.level])
    style = {"passed": "green", "failed": "red"}.get(report.outcome, "yellow")
    yield Text(f"{report.outcome.upper()}  {report.headline}", style=f"bold {style}")


def _invariance(evaluation: Evaluation) -> Text:
    """In one line: what was varied, how often, and whether every result was bitwise the same."""
    from mha_deploy.validate.invariance import CHECKS

    parts = []
    for name in CHECKS:
        checks = [check for check in evaluation.invariance if check.check == name and check.case]
        passed = sum(check.passed for check in checks)
        parts.append(f"{name} {passed}/{len(checks)}" if checks else f"{name}: not applicable")
    judged = [check for check in evaluation.invariance if check.case]
    same = ", bitwise the same" if judged and all(check.bitwise for check in judged) else ""
    return Text(f"{evaluation.backend}, batch elements in other places: {', '.join(parts)}{same}")
