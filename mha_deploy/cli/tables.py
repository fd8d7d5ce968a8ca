"""Results in the terminal: the tables of `report/table.py`, and the sentences around them."""

from __future__ import annotations

import math
import shutil
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from mha_deploy.files import as_plain
from mha_deploy.model.layer import AttentionSpec, kv_cache_bytes_per_token, parameter_count
from mha_deploy.model.spec import ModelSpec
from mha_deploy.report import table as tables
from mha_deploy.report.charts import runtime_of
from mha_deploy.report.table import Cell, Data, Table, prompts_text, table
from mha_deploy.status import CaseKind, Outcome
from mha_deploy.text import (
    budget_share,
    engine_reason_text,
    group_by,
    plural,
    reason_and_hint,
    reason_text,
    short,
    size,
    sizes_text,
    summarize_names,
    without_hash,
    without_numbers,
)

if TYPE_CHECKING:  # a verb that has no such result to show does not load what makes it
    from mha_deploy.analysis.graph import GraphAnalysis
    from mha_deploy.analysis.profiles import ProfileProposal
    from mha_deploy.analysis.roofline import Analysis
    from mha_deploy.analysis.similarity import HeadSimilarity
    from mha_deploy.bundle.folder import Bundle
    from mha_deploy.bundle.manifest import LossLayer
    from mha_deploy.engine.engine import Engine, EngineManifest
    from mha_deploy.engine.inspection import Inspection
    from mha_deploy.engine.plugins import Found
    from mha_deploy.graph.fuse import FuseReport
    from mha_deploy.graph.rules import Eligibility
    from mha_deploy.model.layer import AttentionSpec
    from mha_deploy.regression.matrix import MatrixCell
    from mha_deploy.runtime.tensorrt.engine_verdict import (
        Disagreement,
        EngineReason,
        NodeVerdict,
        PrecisionVerdict,
    )
    from mha_deploy.validation.fault import Bisection
    from mha_deploy.validation.self_test import SelfTest

# -- One table, lines and verdicts -----------------------------------------------------------------

_STYLES = {
    "good": "green", "bad": "red", "doubt": "yellow", "none": "dim", "over": "red", "best": "bold",
    "problem": "red", "aside": "yellow",
}  # fmt: skip


def render(built: Table, *, title: bool = False, fill: str = "") -> RenderableType:
    """A table: the columns that a terminal has room for, then the sentences about its rows.

    `fill` is the column that takes the rest of the width.
    """
    parts: list[RenderableType] = [Text(built.title, style="italic")] if title else []
    for group in built.groups:
        grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), expand=bool(fill))
        below = list[Text]()
        if group.title:
            about = f" · {group.about}" if group.about else ""
            parts.append(Text.assemble((group.title, "bold"), about))
        for column in (each for each in built.columns if not each.wide):
            fills = column.name == fill
            grid.add_column(
                column.short or column.name,
                justify="right" if column.numeric else "left",
                no_wrap=column.whole,
                overflow="ellipsis" if fills and column.whole else "fold",
                ratio=1 if fills else None,
            )
        for row in group.rows:
            texts = [Text(cell.text + cell.suffix, style=_STYLES.get(cell.status, "")) for cell in row]
            if row[-1].span == 1:
                grid.add_row(*(t for t, column in zip(texts, built.columns, strict=True) if not column.wide))
            else:
                name = f"{row[0].text}: " if len(row) > 1 else ""
                below.append(Text(f"{name}{row[-1].text}", style=texts[-1].style))
        parts += [*([grid] if grid.row_count else []), *below]
    return Group(*parts)


def _pairs(lines: Iterable[tuple[str, str]]) -> Grid:
    """Names and values side by side."""
    grid = Grid.grid(padding=(0, 2))
    for name, value in lines:
        grid.add_row(name, Text(value))
    return grid


def head(outcome: str, words: str) -> Text:
    """A verdict."""
    found = Outcome(outcome)
    return Text(f"{found.upper()}  {words}", style=f"bold {_STYLES[tables.MARKS[found]]}")


# -- Bundles and graphs ----------------------------------------------------------------------------


def _quantized(layers: Sequence[LossLayer], attentions: set[str]) -> str:
    """How many of the GEMMs and attentions are written in eight bits."""
    counts = []
    for what, parts in (
        ("GEMM", [each for each in layers if each.name not in attentions]),
        ("attention", [each for each in layers if each.name in attentions]),
    ):
        done = sum(each.is_compressed for each in parts)
        with_ = " with weights" if what == "GEMM" else ""  # others, of two activations, are not quantized
        counts += [f"{done}/{plural(len(parts), what)}{with_}"] if parts else []
    return " and ".join(counts)


def bundle_renderable(bundle: Bundle, *, details: bool = False) -> RenderableType:
    """A bundle in a few lines; with `details`, everything in its manifest."""
    manifest, spec = bundle.manifest, bundle.manifest.spec
    axes = "  ".join(f"{name} {axis}" for name, axis in spec.axes.items())
    total = sum(entry.bytes for entry in manifest.files.values())
    cases = "  ".join(f"{entry.name} {sizes_text(entry.sizes)}" for entry in manifest.golden)
    count = f"{len(manifest.attention)}/{spec.attention_count}"
    each = "" if spec.attention_count == 1 else "each "
    fused = f"{count} {'attention' if each == '' else 'attentions'}, {each}one ONNX Attention node"
    if len(manifest.attention) < (spec.attention_count or 0):
        fused = f"{count} attentions are one ONNX Attention node"
    lines = [("bundle", str(bundle.path)), ("model", f"{spec.name}: {_about(spec)}")]
    types = manifest.precision.name
    if manifest.loss is not None and manifest.quantized is not None:
        parts = _quantized(manifest.loss.layers, {each["name"] for each in manifest.attention})
        types = f"{manifest.quantized} in {parts}, else {types}"
    lines.append(("graph", f"{types}, opset {manifest.opset}, axes {axes}"))
    lines += [("fused", fused), ("golden", cases.replace(", ", ","))]
    for entry in manifest.traces:
        from mha_deploy.bundle.cases import read_trace

        trace = read_trace(bundle.file(entry.file), spec, manifest.precision, entry.source)
        words = f"{prompts_text(trace.prompt.tolist())}, then {trace.steps} single tokens"
        lines.append(("trace", f"{entry.name}: {words}"))
    if manifest.layers is not None:
        count = plural(len(manifest.layers.values), "attention")
        lines.append(("layers", f"the results of {count} in {manifest.layers.case}"))
    if others := manifest.judged_by_outputs:
        lines.append(("layers", f"no results of {summarize_names(others)}: judged by the outputs only"))
    lines.append(("weights", manifest.weights))
    lines.append(("size", f"{size(total)} in {len(manifest.files)} files"))
    lines += [("note", note) for note in manifest.notes]
    loss: list[RenderableType] = []
    if manifest.loss is not None:
        loss = loss_renderables(as_plain(to_builtins(manifest.loss)))
    if not details:
        return Group(_pairs(lines), *loss)
    rows = [(name, f"{file.bytes:,}", f"{file.sha256[:16]}…") for name, file in manifest.files.items()]
    files = render(table("files, hashes checked", ("file", "#bytes", "sha256"), rows), title=True)
    checks = "\n".join(f"checked: {check}" for check in manifest.checks.get("graph", []))
    made = "made with " + ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    about = (Text(line, style="dim") for line in (checks, made))
    return Group(_pairs(lines), *loss, attention_renderable(manifest.attention), files, *about)


@singledispatch
def _about(spec: ModelSpec) -> str:
    """What a model is, in a few words."""
    origin = spec.factory or spec.summary or "an object in memory"
    return f"{origin}, {size(spec.weight_bytes)} of weights in the graph"


@_about.register(AttentionSpec)
def _(spec: AttentionSpec) -> str:
    return f"{spec.kind} {spec.Hq}/{spec.Hkv} heads of {spec.D}, width {spec.E}"


def tensors_renderable(found: Inspection) -> RenderableType:
    """The inputs and outputs of an ONNX file; names among the sizes are the axes that `--axis` takes."""
    tensors = [("input", each) for each in found.inputs] + [("output", each) for each in found.outputs]
    rows = [(kind, each.name, each.type or "?", _shape(each.shape)) for kind, each in tensors]
    title = f"opset {found.opset}"
    return render(table(title, ("!", "tensor", "!type", "shape"), rows), title=True)


def _shape(shape: Sequence[int | str | None] | None) -> str:
    return "?" if shape is None else f"[{', '.join('?' if each is None else str(each) for each in shape)}]"


def attention_renderable(nodes: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The attention nodes of a graph, equal ones as one row, with the source lines that are known."""

    def row(node: Mapping[str, Any]) -> tuple[str, ...]:
        known = {name: "?" if value is None else str(value) for name, value in node.items()}
        extras = {
            "past": node["has_past"],
            "present": node["has_present"],
            "weights": node["qk_output_mode"] is not None,
            "softcap": bool(node["softcap"]),
            "key lengths": node["has_nonpad_kv_seqlen"],
            "window": node["left_window"] >= 0 or node["right_window"] >= 0,
            f"rank {node['rank']}": node["rank"] not in (None, 3),
        }
        heads, mask = f"{known['Hq']}/{known['Hkv']}×{known['D']}", _mask(node["is_causal"], node["mask"])
        scale = "?" if node["softmax_scale"] is None else f"{node['softmax_scale']:.4g}"
        also = ", ".join(name for name, present in extras.items() if present) or "-"
        source = "/".join(Path(node.get("place") or "-").parts[-2:])  # paths of libraries are long
        return known["kind"], heads, known["dtype"], scale, mask, also, source

    alike = group_by(nodes, lambda node: (without_numbers(node["name"]), row(node)))
    rows = [
        (summarize_names([node["name"] for node in group], joint="\n"), *row(group[0])) for group in alike
    ]
    headings = ("attention", "kind", "Hq/Hkv×D", "type", "scale", "mask", "also", "source")
    return render(table(plural(len(nodes), "attention node"), headings, rows), title=True)


def _mask(causal: bool, mask: str) -> str:
    """The masks of an attention: `causal + bool`."""
    return " + ".join(["causal"] * bool(causal) + [mask] * (mask != "none")) or "none"


def fuse_renderable(report: FuseReport) -> RenderableType:
    """What was fused, what was not and why, and what was changed besides."""
    rows = []
    for each in report.fused:
        result = "; ".join(("fused", *["weights are an output too"] * each.weights, *each.notes))
        heads, mask = f"{each.Hq}/{each.Hkv}×{each.D}", _mask(each.causal, each.mask)
        rows.append((each.name, heads, f"{each.scale:.4g}", mask, result))
    for left in report.unfused:
        where = f" ({left.place})" if left.place else ""
        what = "not expressible" if left.recognized else "not recognized"
        rows.append((left.name, " ", " ", " ", f"not fused, {what}: {left.reason}{where}"))
    rows += [(name, " ", " ", " ", "was an Attention node already") for name in report.already]
    built = table("", ("attention", "Hq/Hkv×D", "scale", "mask", "result"), rows)
    repairs = [
        Text(f"changed: {summarize_names([repair.name for repair in alike])}: {'; '.join(alike[0].changes)}")
        for alike in group_by(report.repairs, lambda repair: (without_numbers(repair.name), repair.changes))
    ]
    return Group(render(built, fill="result"), *repairs, fuse_verdict(report))


def fuse_verdict(report: FuseReport) -> Text:
    """How many attentions were fused, and how many not."""
    count, known = len(report.fused), sum(each.recognized for each in report.unfused)
    unknown = len(report.unfused) - known
    total = f"{count} fused, {known} recognized but not expressible, {unknown} not recognized"
    total += f", {len(report.already)} were Attention already" if report.already else ""
    if count:
        checked = sum(each.verified for each in report.fused)
        total += f"; {checked} of {count} verified against the original on drawn inputs"
    return Text(total)


def eligibility_renderable(answers: Sequence[Eligibility], *, brief: bool = False) -> RenderableType:
    """A block for all attentions of one answer: the answer, then what was found, the worst first.

    In `brief`, the answers alone.
    """
    from mha_deploy.graph.rules import group_findings

    def answered(answer: Eligibility, *, several: bool = False) -> str:
        verb = "are" if several else "is"
        if answer.fused:
            return f"{verb} supported, and can be fused"
        if answer.fused_after_lowering:
            return "can be fused after lowering"
        return (
            f"{verb} supported, but not fused" if answer.supported_after_lowering else f"{verb} not supported"
        )

    blocks: list[RenderableType] = []
    for alike in group_by(answers, lambda answer: (answer.target, answered(answer))):
        nodes = [answer.node.name for answer in alike]
        verdict = f"{alike[0].target}: {summarize_names(nodes)} {answered(alike[0], several=len(nodes) > 1)}"
        supported = "yellow" if alike[0].supported_after_lowering else "red"
        blocks.append(Text(verdict, style="green" if alike[0].fused_after_lowering else supported))
        found = (finding for answer in alike for finding in answer.findings)
        groups = group_findings(() if brief else found)
        for finding, concerned in groups.items():
            about = "" if len(concerned) == len(nodes) else f"{summarize_names(concerned)}: "
            # What a lowering cures is no obstacle.
            label = f"handled by the {finding.cured_by}" if finding.cured_by else finding.severity
            blocks.append(Text(f"  {label}: {about}{finding.message}"))
            if not finding.cured_by:
                blocks.append(Text(f"    try: {finding.remedy}", style="dim"))
    return Group(*blocks)


# -- Engines ---------------------------------------------------------------------------------------

_NAME_WIDTH = 40


def engine_renderable(engine: Engine, *, details: bool = False) -> RenderableType:
    """An engine in a few lines with its verdict; with `details`, its kernels too."""
    from mha_deploy.engine.engine import attention_summary, libraries_summary, rebuild_summary, where_built

    manifest = engine.shown
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
        lines += [("rebuilds", line) for line in rebuild_summary(manifest.rebuilds)]
    blocks: list[RenderableType] = [_pairs(lines), render(_nodes_table(manifest))]
    if details:
        rows = []
        for kernel in manifest.kernels:
            name = Cell(text=kernel["name"], status="good" if kernel["fused_attention"] else "")
            types, nodes = ",".join(kernel["dtypes"]), ", ".join(kernel["nodes"][:6])
            rows.append((manifest.profile_name(kernel["profile"]), name, kernel["type"], types, nodes))
        title = plural(len(manifest.kernels), "kernel")
        kernels = table(title, ("#profile", "kernel", "!type", "!types", "nodes"), rows)
        blocks.append(render(kernels, title=True))
    return Group(*blocks, *_doubts(manifest), engine_verdict_renderable(manifest))


def engine_verdict_renderable(manifest: EngineManifest) -> Text:
    """Whether an engine is fused, and in its precision."""
    text = f"{manifest.fusion_summary}, {manifest.precision_summary}"
    good = manifest.all_fused and manifest.has_requested_types
    return Text(text, style="bold green" if good else "bold yellow")


def _why(reasons: Sequence[EngineReason]) -> str:
    """The reasons of a verdict, in words."""
    from msgspec import to_builtins

    return "; ".join(engine_reason_text(to_builtins(reason)) for reason in reasons)


def _nodes_table(manifest: EngineManifest) -> Table:
    """A row for all attentions of one kernel: those of a model differ in their numbers only."""
    from msgspec import structs

    def kernel(node: NodeVerdict) -> Hashable:
        why = (without_numbers(str(part)) for each in node.reasons for part in structs.astuple(each))
        names = without_numbers(node.node), *map(without_hash, node.kernels)
        return names, tuple(why), node.profile, node.status, node.sources

    rows, groups = [], group_by(manifest.verdict.nodes, kernel)
    for group in groups:
        node, kernels = group[0], [", ".join(each.kernels) for each in group]
        # A hash is shown where it is the same for all attentions of the row.
        evidence = kernels[0] or _why(node.reasons) if len(set(kernels)) == 1 else without_hash(kernels[0])
        names = summarize_names([each.node for each in group], joint="\n")
        status = Cell(text=str(node.status), status=tables.FUSION[str(node.status)])
        evidence = f"{evidence} [{tables.sources_text(node.sources)}]"
        rows.append((names, manifest.profile_name(node.profile), status, evidence))
    brief = "!" if all(len(group[0].node) <= _NAME_WIDTH for group in groups) else ""
    return table("", (f"{brief}attention", "#profile", "verdict", "evidence"), rows)


def _doubts(manifest: EngineManifest) -> list[RenderableType]:
    """What is not in the requested precision, what sources disagree on, and why attention is not fused."""
    verdict, precision = manifest.verdict, manifest.verdict.precision
    offenders = group_by(
        precision.offenders, lambda each: (each.what, without_hash(each.kernel), each.dtype, each.wanted)
    )
    lines: list[RenderableType] = [
        Text(
            f"{same[0].what} of {summarize_names([each.kernel for each in same])} is {same[0].dtype}"
            + (f", {same[0].wanted} in the graph" if same[0].wanted else ""),
            style="red",
        )
        for same in offenders
    ]
    lines += [Text(note, style="dim") for note in _precision_notes(precision)]
    lines += [Text(f"sources disagree: {_both(each)}", style="yellow") for each in verdict.disagreements]
    if manifest.all_fused:
        return lines
    findings = (finding for finding in manifest.findings if finding["severity"] == "not-fused")
    causes = [finding for finding in findings if not finding["cured_by"]]
    likely = dict.fromkeys(
        f"likely because: {cause['message']}" + (f" Try: {cause['remedy']}" if cause["remedy"] else "")
        for cause in causes
    )
    return lines + [Text(line) for line in likely]


def _precision_notes(precision: PrecisionVerdict) -> list[str]:
    """What else is known of the types in an engine."""
    notes = list[str]()
    if precision.gemms is not None:
        notes.append(f"GEMMs outside attention are computed by {plural(precision.gemms.kernels, 'kernel')}")
    *eight, _ = precision.requested.split("/")
    written = [each for each in precision.written if each.dtype not in eight]  # those are counted above
    for what, kernels in (
        ("accumulate in FP16", precision.accumulate_in_fp16),
        ("selected at load time", precision.selected_at_load),
    ):
        if kernels:
            notes.append(f"{plural(len(kernels), 'matmul kernel')} {what} (e.g. {kernels[0]})")
    for phrase, found in (
        ("{} in {}, as in the graph", written),
        ("{} run in {}", precision.islands),
    ):
        if found:
            names = list(dict.fromkeys(each.kernel for each in found))
            types = ", ".join(sorted({each.dtype for each in found}))
            noun = "auxiliary kernel" if found is precision.islands else "matmul kernel"
            notes.append(f"{phrase.format(plural(len(names), noun), types)} (e.g. {names[0]})")
    return notes


def _both(disagreement: Disagreement) -> str:
    """What two sources report, in words."""
    node, one = disagreement.node, disagreement.profile
    place = "precision" if node is None else f"{node}, profile {one}"
    claims = [
        f"the {tables.sources_text([each.source])} reports {each.status}"
        + (f" ({', '.join(each.kernels)})" if each.kernels else "")
        for each in disagreement.claims
    ]
    return f"{place}: {', but '.join(claims)}"


def parts_renderable(parts: Sequence[Found]) -> RenderableType:
    """What the plugin library is built with."""
    rows = [(each.part.title, each.version, each.by, "\n".join(map(str, each.paths))) for each in parts]
    return render(table("", ("needs", "version", "found by", "in"), rows))


# -- A validation: the tables of its report --------------------------------------------------------

# The most attentions that pass and are still listed one by one; failed decode steps; kernels of a runtime.
_MOST_LAYERS, _SHOWN_FAILURES, _SHOWN_KERNELS = 8, 4, 6
_LEVELS = {"failure": "red", "warning": "yellow", "note": "dim"}


def verdict_renderable(report: Data) -> Text:
    """The overall verdict of a report."""
    return head(report["verdict"]["outcome"], report["verdict"]["headline"])


def report_renderable(
    report: Data, *, verbose: bool = False, headed: bool = True, folder: Path | None = None
) -> RenderableType:
    """A report from its data: the verdict, what failed, then the evidence; what passed in a line each.

    With `verbose`, every table. Not `headed`: without the verdict, which stands elsewhere. `folder` is that
    of the report, if it is saved.
    """
    model = f"{report['model']['name']} {tables.types_of(report)}"
    verdict = report["verdict"]
    listed = [each for each in tables.shown_findings(verdict) if not each.get("in_headline")]
    by_level = group_by(listed, lambda finding: finding["level"])
    findings = {group[0]["level"]: _finding_lines(group) for group in by_level}
    blocks: list[RenderableType] = [verdict_renderable(report)] if headed else []
    blocks += findings.pop("failure", [])
    blocks.append(Text(f"{model}, errors against the FP64 oracle", style="bold"))
    blocks += [render(tables.subjects_table(report["subjects"]))] if report["subjects"] else []
    runs = sorted(report["parity"], key=lambda run: not _not_passed(run))  # failures first
    alike = [[run] for run in runs] if verbose else group_by(runs, _mistakes)
    blocks += [block for group in alike for block in _alike_renderables(group, verbose=verbose)]
    blocks += [decode_renderable(report["decode"], verbose=verbose)] if report["decode"] else []
    blocks += map(_invariance, group_by(report["invariance"], lambda check: check["runtime"]))
    blocks += [_conformance(report["conformance"], verbose=verbose)] if report["conformance"] else []
    if report["latency"]:
        blocks.append(latency_renderable(report["latency"]["points"], kernels=verbose))
    blocks += [render(tables.serving_table(report["serving"]))] if report["serving"] else []
    if report["loss"] and (verbose or (headed and not report["subjects"])):  # else of another file
        blocks += (
            loss_renderables(report["loss"])
            if verbose
            else [render(tables.loss_table(report["loss"]), title=True)]
        )
    if report["data"]:
        blocks += [
            render(tables.data_table(report["data"])),
            render(tables.worst_table(report["data"], folder)),
        ]
    engines = {each["place"].get("engine") for each in verdict["findings"]}  # their findings say why
    notes = [Text(f"note: {each}", style="dim") for each in tables.shown_notes(report, without=engines)]
    return Group(*blocks, *(line for lines in findings.values() for line in lines), *notes)


def loss_renderables(found: Data) -> list[RenderableType]:
    """The loss of a compressed model, what each part of it costs, and what was tried."""
    shown = [tables.loss_table(found), tables.sensitivity_table(found)]
    shown += [tables.search_table(found)] if found["search"] else []
    return [render(each, title=True) for each in shown]


def _finding_lines(findings: Sequence[Data]) -> list[RenderableType]:
    style = _LEVELS[findings[0]["level"]]
    return [Text(f"{each['level']}: {each['text']}", style=style) for each in findings]


def _passed_renderable(run: Data) -> Text:
    """What passed, in a line: `ort-cpu 1.23: 5 outputs of golden cases ≤ 38% of the budget`."""
    shares = [verdict["share"] for verdict in run["verdicts"] if verdict["share"] is not None]
    count, within = len(run["verdicts"]), f" ≤ {max(shares):.0%} of the budget" if shares else ""
    if run["cases"] == CaseKind.LAYERS:
        what = plural(count, "attention")
    else:
        what = f"{plural(count, 'output')} of {run['cases']} cases"
    return Text(f"passed  {runtime_of(run)}: {what}{within}", style=_STYLES["good"])


def parity_renderable(run: Data, *, verbose: bool = True) -> RenderableType:
    """A row for every output of every case, or for every attention of a module, and the verdict.

    Without `verbose`, what passed is one line, and of what failed only those outputs are listed.
    """
    run = as_plain(run)
    if not verbose and run["outcome"] == Outcome.PASSED:
        return _passed_renderable(run)
    if not verbose and (failures := _not_passed(run)):
        good = [verdict for verdict in run["verdicts"] if verdict not in failures]
        lines = [_passed_renderable({**run, "verdicts": good})] if good else []
        return Group(_failed_renderable({**run, "verdicts": failures}), *lines)
    built, noun, right = _parity_table(run), "outputs", "within budget"
    if run["cases"] == CaseKind.LAYERS:
        noun, right = "attentions", "right"
    count, failed = len(run["verdicts"]), _not_passed(run)
    is_wrong = run["outcome"] == Outcome.FAILED
    words = f"{count}/{count} {noun} {right}"
    if run["outcome"] != Outcome.PASSED:
        words = f"{len(failed)} of {count} {noun} are {'wrong' if is_wrong else 'not verified'}"
    return Group(render(built), head(run["outcome"], words))


def _failed_renderable(run: Data) -> RenderableType:
    """What did not pass: a table with sentences about the worst; a line where nothing ran for one reason."""
    reasons = {tables.reason_words(verdict["reason"]) for verdict in run["verdicts"]}
    if len(reasons) == 1 and all(verdict["deviation"] is None for verdict in run["verdicts"]):
        what = f"{plural(len(run['verdicts']), 'output')} of {run['cases']} cases"
        words = f"{Outcome(run['outcome']).upper()}  {runtime_of(run)}: {what}: {reasons.pop()}"
        return Text(words, style=_STYLES[tables.MARKS[Outcome(run["outcome"])]])
    worst = sorted(run["verdicts"], key=lambda verdict: -(verdict["share"] or math.inf))
    worst, others = worst[:_SHOWN_FAILURES], worst[_SHOWN_FAILURES:]
    more = [Text(f"and {plural(len(others), 'more output')}: -v", style="red")] if others else []
    return Group(render(_parity_table(run, worst)), *more)


def _mistakes(run: Data) -> Hashable:
    """What is the same for all runs that one table shows; runs that passed are never alike."""
    failed = [
        (each["case"], each["output"], each["outcome"], reason and reason["kind"], (reason or {}).get("got"))
        for each in _not_passed(run)
        for reason in (each["reason"],)
    ]
    return tuple(failed) or id(run)


def _alike_renderables(runs: Sequence[Data], *, verbose: bool) -> list[RenderableType]:
    """The first of runs with the same mistakes, and a line for each of the others."""
    first, *others = runs
    lines: list[RenderableType] = [parity_renderable(first, verbose=verbose)]
    for run in others:
        status, count = run["outcome"], len(_not_passed(run))
        what = "output" if count == 1 else f"{count} outputs"
        words = f"{runtime_of(run)}: the same {what} of {run['cases']} cases"
        lines.append(
            Text(f"{Outcome(status).upper()}  {words}", style=_STYLES[tables.MARKS[Outcome(status)]])
        )
    return lines


def _parity_table(run: Data, explained: Sequence[Data] | None = None) -> Table:
    is_inside = run["cases"] == CaseKind.LAYERS
    return _layers_table(run, explained) if is_inside else tables.parity_table([run], explained)


def _not_passed(run: Data) -> list[Data]:
    return [verdict for verdict in run["verdicts"] if verdict["outcome"] != Outcome.PASSED]


def _layers_table(run: Data, explained: Sequence[Data] | None = None) -> Table:
    """All attentions; of many that pass, the first, the worst and the last, and how good the others are."""
    good = [verdict for verdict in run["verdicts"] if verdict["outcome"] == Outcome.PASSED]
    if len(good) <= _MOST_LAYERS:
        return tables.layers_table([run], explained)
    kept = (good[0], max(good, key=lambda verdict: verdict["share"] or 0.0), good[-1])
    others = [verdict for verdict in good if verdict not in kept]
    listed = [verdict for verdict in run["verdicts"] if verdict not in others]
    errors = [verdict["deviation"]["relative_l2"] for verdict in others if verdict["deviation"]]
    share = max((verdict["share"] or 0.0 for verdict in others), default=None)
    figures = {"share": share, "deviation": {"relative_l2": max(errors, default=None)}}
    worst = {**others[0], "output": f"{len(others)} more", **figures}
    built = tables.layers_table([{**run, "verdicts": [*listed, worst]}])
    (group,) = built.groups
    *rows, last = group.rows
    last = [replace(cell, text=f"≤ {cell.text}") if cell.order is not None else cell for cell in last]
    return replace(built, groups=[replace(group, rows=[*rows, last])])


def decode_renderable(reports: Sequence[Data], *, verbose: bool = True) -> RenderableType:
    """Errors at steps 1, 2, 4, … beside those of the module itself, then the verdicts and what is wrong.

    Without `verbose`, what passed is one line, and of what failed only the verdicts are listed.
    """
    if not verbose:
        wrong = [report for report in reports if report["outcome"] != Outcome.PASSED]
        lines = [_decoded_renderable(report) for report in reports if report not in wrong]
        return Group(*([render(tables.decode_table(wrong, _SHOWN_FAILURES))] if wrong else []), *lines)
    by_trace = map(tables.steps_table, group_by(reports, lambda report: report["trace"]))
    errors = [render(built, title=True) for built in by_trace if built is not None]
    return Group(*errors, render(tables.decode_table(reports, _SHOWN_FAILURES)))


def _decoded_renderable(report: Data) -> Text:
    """A trace that was decoded without a mistake, in a line."""
    within = "" if report["share"] is None else f" ≤ {budget_share(report['share'])} of the budget"
    steps = f"{plural(report['steps'], 'decode step')} in trace {report['trace']!r}"
    return Text(f"passed  {runtime_of(report)}: {steps}{within}", style=_STYLES["good"])


def _invariance(checks: Sequence[Data]) -> Text:
    """In one line: what was varied, how often, and whether every result was bitwise the same."""
    from mha_deploy.validation.invariance import CHECKS

    parts, judged = [], [check for check in checks if check["case"]]
    for name in CHECKS:
        found = [check["outcome"] == Outcome.PASSED for check in judged if check["check"] == name]
        parts.append(f"{name} {sum(found)}/{len(found)}" if found else f"{name}: not applicable")
    same = ", bitwise the same" if judged and all(check["bitwise"] for check in judged) else ""
    status, style = "skipped", _STYLES["none"]
    if judged:
        outcome = Outcome.of(check["outcome"] for check in judged)
        status = outcome.upper() if outcome is Outcome.FAILED else outcome.value
        style = _STYLES[tables.MARKS[outcome]]
    return Text(f"{status}  {checks[0]['runtime']}: invariance: {', '.join(parts)}{same}", style=style)


def _conformance(found: Data, *, verbose: bool) -> RenderableType:
    """How each runtime treats masks; without `verbose`, those that all conform to are one line."""
    reasons = [name + words for name, words in tables.conformance_reasons(found, ("wrong",))]
    below = [Text(line, style="red") for line in reasons]
    built = tables.conformance_table(found)
    if verbose:
        return Group(render(built, title=True), *below)
    notable, quiet = tables.split_passed(built)
    count = plural(sum(len(group.rows) for each in quiet for group in each.groups), "mask")
    line = Text(f"passed  masks as ONNX defines them: {count}", style=_STYLES["good"])
    return Group(*([render(notable, title=True)] if notable else []), *below, *([line] if quiet else []))


def latency_renderable(points: Sequence[Data], *, kernels: bool = True) -> RenderableType:
    """The latency of every runtime at every size, and the longest kernels."""
    parts = [render(tables.latency_table(points))]
    if note := tables.without_graph(points):
        parts.append(Text(note, style="dim"))
    for point in points if kernels else ():
        rows = [{**row, "kernels": row["kernels"][:_SHOWN_KERNELS]} for row in point["rows"]]
        if any(row["kernels"] for row in rows):
            parts.append(render(tables.kernels_table({**point, "rows": rows}), title=True))
    return Group(*parts)


def bench_renderable(found: Data) -> RenderableType:
    """The latencies of one model at every size, and its calls per second by number of streams."""
    parts = [latency_renderable(found["latency"]["points"])] if found["latency"] else []
    parts += [render(tables.throughput_table(found["throughput"]))] if found["throughput"] else []
    return Group(*parts)


def self_test_renderable(result: SelfTest) -> RenderableType:
    """Every mutation, and by how much it exceeds the budget."""

    def row(name: str, share: float | None, good: bool, words: tuple[str, str]) -> tuple[str | Cell, ...]:
        used = "not a number" if share is None else f"{share:,.2f}"
        return name, used, Cell(text=words[not good], status="good" if good else "bad")

    right = result.right.passed
    rows = [row("as exported", result.right.share, right, ("passed", "FAILED"))]
    rows += [row(each.mistake, each.share, each.caught, ("detected", "MISSED")) for each in result.mutations]
    return Group(render(table("", ("!model", "#× budget", "verdict"), rows)), self_test_verdict(result))


def self_test_verdict(result: SelfTest) -> Text:
    """How many mutations were detected."""
    found = f"{sum(each.caught for each in result.mutations)}/{len(result.mutations)} mutations detected"
    found += "" if result.right.passed else ", but the graph as exported is wrong itself"
    found += "" if result.reason is None else f": {reason_and_hint(result.reason)}"
    return head(result.outcome, found)


_MANY_NODES = 20


def bisection_renderable(found: Bisection, *, verbose: bool = False) -> RenderableType:
    """Where the first wrong result is; with `verbose`, all nodes that could not be compared."""
    runs = plural(found.runs, "run")
    if found.wrong is None:
        words = "the outputs of every golden case that it takes are right: nothing to bisect"
        if found.unverified:
            words = "no output is wrong, so there is nothing to bisect; not verified: "
            words += "; ".join(
                f"{each.case}/{each.output}: {reason_text(each.reason)}" for each in found.unverified
            )
        return Group(head(found.outcome, words), Text(f"{found.model} on {found.runtime}, {runs}"))
    where = f"{found.model} on {found.runtime}, case {found.case}, {runs}, against {found.reference}"
    lines = [f"wrong: {found.wrong.output}: {reason_text(found.wrong.reason)}"]
    if found.first_wrong or found.last_right:
        last = f"the last right one is {found.last_right}" if found.last_right else "there is none before it"
        first = found.first_wrong or "none: the fault is after the last attention"
        lines.append(f"first wrong attention of {found.attentions}: {first} ({last})")
    node = found.first_node
    if node is not None:
        unnamed = node.node == f"{node.operator} {node.value}"
        title = node.node if unnamed else f"{node.operator} {node.node}, value {node.value}"
        lead = f"from {title} on" if node.is_start else f"first wrong node: {title}"
        lines.append(f"{lead}: {node.problem or 'no value of the bundle has these numbers'}")
        if node.shown_at is not None:
            lines.append(f"compared behind it, at {node.shown_at}: what lies between only moves numbers")
        if node.constants:
            lines.append(f"constants that differ from the bundle's graph: {', '.join(node.constants)}")
        if node.others:
            lines.append(f"and from {', '.join(node.others)} on")
        if node.is_start:
            lines.append("the fault is there or behind it: a graph may also compute the same by other steps")

    def unseen(count: int) -> str:
        more = ", …" if len(found.unseen) > count else ""
        return ", ".join(found.unseen[:count]) + more

    if found.unseen:
        names = unseen(len(found.unseen) if verbose else _MANY_NODES)
        lines.append(f"nodes before it whose results could not be compared: {len(found.unseen)} ({names})")
    for what, weights in (("does not have", found.missing_weights), ("has changed", found.changed_weights)):
        if weights:
            lines.append(f"weights that the graph {what}: {', '.join(weights)}")
    reasons = [each for each in (found.doubt, found.module_unused) if each is not None]
    lines += [f"warning: {reason_text(reason)}" for reason in reasons]
    if node is not None:
        place = " or ".join((node.node, *node.others))
        name = f"from {place} on" if node.is_start else f"first at {place}"
        name += f", or before it in {unseen(4)}" if found.unseen else ""
    elif found.first_wrong or found.last_right:
        start, end = found.last_right or "the inputs", found.first_wrong or "the outputs"
        name = f"between {start} and {end}, at an unknown node"
    else:
        name = "at an unknown node"
    return Group(*map(Text, lines), head(found.outcome, name), Text(where))


# -- The catalog, costs, this machine, a matrix ----------------------------------------------------


def models_renderable(models: Iterable[Mapping[str, Any]], *, verbose: bool) -> RenderableType:
    """The table of known models; with `verbose` or in a wide terminal, what they cost as well."""
    columns = shutil.get_terminal_size().columns
    costs = verbose or columns >= _WIDE
    counts = {"E": "#E", "parameters": "#parameters", "kv_bytes_per_token": "#KV B/token"}
    counts = counts if costs else {"E": "#E"}
    rows = []
    for row in models:
        heads = f"{row['Hq']}/{row['Hkv']}×{row['D']}"
        rows.append((row["name"], row["kind"], heads, *(f"{row[key]:,}" for key in counts), row["summary"]))
    headings = ("!model", "!kind", "#Hq/Hkv×D", *counts.values(), "description")
    words = "KV-cache bytes per token for FP16 or BF16" if costs else "-v: parameters and KV-cache bytes"
    more = "" if any(row[0].startswith("tiny-") for row in rows) else " --all: small ones, such as tiny-gqa."
    note = Text(f"One layer each; {words}. Other sizes: a .toml file, see the README.{more}", style="dim")
    shown = headings if columns >= _WIDE else headings[:-1] if costs else headings
    rows = [row[: len(shown)] for row in rows]
    return Group(render(table("", shown, rows), fill=shown[-1]), note)


def model_row(spec: AttentionSpec) -> dict[str, Any]:
    """The attributes of one model, for the table and for JSON."""
    from mha_deploy.model.precision import PRECISIONS

    known = ("name", "kind", "variant", "attends", "mask", "causal", "Hq", "Hkv", "D", "E")
    return {
        **{name: getattr(spec, name) for name in known},
        "parameters": parameter_count(spec),
        "kv_bytes_per_token": kv_cache_bytes_per_token(spec, PRECISIONS["fp16"].bytes),
        "axes": {name: str(axis) for name, axis in spec.axes.items()},
        "summary": spec.summary,
    }


def graph_analysis_renderable(analysis: GraphAnalysis) -> RenderableType:
    """A heading, and a table of the attentions and GEMMs that take longest."""
    sizes = " ".join(f"{name}={size}" for name, size in analysis.sizes.items())
    where = f"  {sizes}, {analysis.precision}, {analysis.gpu.name}"

    def row(name: str, kind: str, cost: Any, seconds: float, bound_by: str) -> tuple[str, ...]:
        figures = (cost.flops / 1e9, cost.bytes / 1e6, cost.intensity, seconds * 1e6)
        return (name, kind, size(cost.parameters, unit=""), *map(short, figures), bound_by)

    longest = sorted(analysis.bound, key=lambda each: -each.seconds)[:_SHOWN_NODES]
    shown = [each for each in analysis.bound if each in longest]
    rows = [row(s.cost.name, s.cost.growth, s.cost, s.seconds, s.bound_by) for s in shown]
    if left := len(analysis.bound) - len(shown):
        rows.append((f"and {left} more", *[" "] * 7))
    rows.append(row("total", " ", analysis.cost, analysis.seconds, " "))
    headings = ("node", "kind", "#params", "#GFLOP", "#MB", "#FLOP/byte", "#bound µs", "bound by")
    closing = [("Other nodes", f"{analysis.others}, assumed to be fused into these")]
    if analysis.unknown:
        closing.append(("Not counted, of unknown sizes", ", ".join(analysis.unknown[:4])))
    closing.append(("Peak figures", analysis.gpu.source))
    note = Text("The bound follows from the datasheet's peak rates; it is not a prediction.", style="dim")
    heading = Text.assemble((analysis.name, "bold"), (where, "dim"))
    return Group(heading, render(table("", headings, rows)), _pairs(closing), note)


def profiles_renderable(proposed: ProfileProposal) -> RenderableType:
    """The ranges of sizes that occur, and the profiles for them."""
    ranges = ", ".join(f"{name} {axis}" for name, axis in proposed.ranges.items())
    lines = [(f"Sizes of {plural(proposed.samples, 'sample')}", f"{ranges} (least:median:most)")]
    if proposed.split is None:
        lines.append(("One profile", "a second one would gain little"))
    else:
        axis, most = proposed.split
        lines.append(("Two profiles", f"{axis} up to {most}, and above: {proposed.gain:.0%} less time"))
    lines.append(("Profiles", " ".join(proposed.options)))
    note = "Times are roofline bounds, with every sample padded to the largest sizes of its profile."
    return Group(_pairs(lines), Text(note, style="dim"))


def analysis_renderable(analysis: Analysis | GraphAnalysis) -> RenderableType:
    """A heading, a table of the stages, and the KV cache."""
    from mha_deploy.analysis.roofline import Analysis

    if not isinstance(analysis, Analysis):
        return graph_analysis_renderable(analysis)
    spec, cost = analysis.spec, analysis.cost
    heads = f"{spec.Hq} heads" if spec.Hkv == spec.Hq else f"{spec.Hq} query and {spec.Hkv} key/value heads"
    what = f"  {spec.kind}, {heads} of {spec.D}, width {spec.E}\n"
    sizes = " ".join(f"{name}={size}" for name, size in analysis.sizes.items())
    where = f"{sizes}, {analysis.precision}, {analysis.gpu.name}"
    heading = Text.assemble((spec.name, "bold"), what, (where, "dim"))

    def row(name: str, growth: str, cost: Any, seconds: float, bound_by: str) -> tuple[str, ...]:
        figures = (cost.flops / 1e9, cost.bytes / 1e6, cost.intensity, seconds * 1e6)
        return (name, growth, size(cost.parameters, unit=""), *map(short, figures), bound_by)

    rows = [row(s.cost.name, s.cost.growth, s.cost, s.seconds, s.bound_by) for s in analysis.bound]
    rows.append(row("total", " ", cost, analysis.seconds, " "))
    # Narrow enough for a terminal of 80 columns; exact parameters are in the JSON.
    headings = ("stage", "grows as", "#params", "#GFLOP", "#MB", "#FLOP/byte", "#bound µs", "bound by")
    rate, cache = short(analysis.tokens_per_second / 1e6), short(analysis.kv_bytes / 1e6)
    per_token = f"{analysis.kv_bytes_per_token:,} bytes per token"
    closing = [
        ("Tokens/s at the roofline bound", f"{rate} million through this layer"),
        ("KV cache of this layer", f"{per_token}, {cache} MB at these sizes"),
        ("Peak figures", analysis.gpu.source),
    ]
    note = Text("The bound follows from the datasheet's peak rates; it is not a prediction.", style="dim")
    return Group(heading, render(table("", headings, rows)), _pairs(closing), note)


_SHOWN_NODES = 24
_WIDE = 120  # columns of a terminal that has room for every column


def similarity_renderable(similarity: HeadSimilarity) -> RenderableType:
    """The similarity of the heads in a few lines; the matrix is in the heatmap and in the JSON."""
    most = "there is only one head"
    if similarity.pair is not None:
        most = "{} and {}: ρ = {:.3f}".format(*similarity.pair, similarity.pair_similarity)
    lines = [
        ("Head redundancy", f"{similarity.redundancy:.3f}  (mean |ρ| over pairs of heads)"),
        ("Most similar heads", most),
        ("Tokens compared", f"{similarity.tokens:,}"),
    ]
    lines += [("Attention", similarity.attention)] if similarity.attention else []
    lines += [(f"Redundancy of {name}", f"{value:.3f}") for name, value in similarity.others.items()]
    return _pairs(lines)


def runtimes_renderable(runtimes: Iterable[Mapping[str, Any]]) -> RenderableType:
    """The runtimes of this machine, what each is for, and how to install the others."""
    rows = []
    for each in runtimes:
        state = f"{each['problem'] or 'not installed'}: {each['install']}"
        if each["works"]:
            state = "works" if each["loaded"] else "installed"
            state += f" ({each['note']})" if each["note"] else ""
        rows.append((each["name"], each["version"] or "-", each["gives"], state))
    return render(table("", ("runtime", "version", "for", "state"), rows))


def cells_renderable(cells: Iterable[MatrixCell], title: str) -> RenderableType:
    """The last cells of a matrix."""
    rows = [(each.title, each.summary, f"{each.seconds:.1f}") for each in cells]
    return render(table(title, ("cell", "result", "#s"), rows), title=True)
