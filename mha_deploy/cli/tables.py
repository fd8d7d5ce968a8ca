"""What the verbs print for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mha_deploy.analyze.cost import kv_cache_bytes_per_token, parameter_count
from mha_deploy.bundle import Bundle
from mha_deploy.cli.module_tables import layers_renderable, module_attention_renderable
from mha_deploy.cli.table_parts import (
    extras,
    failed_status,
    problem_text,
    share_text,
    sizes_text,
    table,
    verdict_text,
)
from mha_deploy.module_spec import ModuleSpec
from mha_deploy.precision import PRECISIONS
from mha_deploy.report.decode import prompts_text
from mha_deploy.spec import AttentionSpec
from mha_deploy.trace import read_trace
from mha_deploy.validate.layers import LAYERS
from mha_deploy.validate.parity import OutputVerdict, ParityReport
from mha_deploy.validate.self_test import SelfTest, budget_share


def models_renderable(specs: Iterable[AttentionSpec]) -> RenderableType:
    """The table of known models."""
    rows = table(expand=True)
    rows.add_column("model", no_wrap=True)
    rows.add_column("kind", no_wrap=True)
    for column in ("Hq/Hkv×D", "E", "parameters", "KV B/token"):
        rows.add_column(column, justify="right", no_wrap=True)
    rows.add_column("what", no_wrap=True, overflow="ellipsis", ratio=1)
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
    size = sum(entry["bytes"] for entry in manifest.files.values())
    facts.add_row("bundle", escape(str(bundle.path)))
    facts.add_row("model", escape(f"{spec.name}: {_what(spec)}"))
    facts.add_row("graph", escape(f"{manifest.precision.name}, opset {manifest.opset}, axes {axes}"))
    facts.add_row(
        "fused", f"{len(manifest.attention)}/{spec.attention_count} attention as one ONNX Attention node"
    )
    cases = "  ".join(f"{entry.name} {sizes_text(entry.sizes)}" for entry in manifest.golden)
    facts.add_row("golden", escape(cases))
    for entry in manifest.traces:
        facts.add_row("trace", escape(f"{entry.name}: {_tokens_text(bundle.file(entry.file))}"))
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
        return f"{spec.factory}, {spec.weight_bytes / 1e6:,.1f} MB of weights"
    return f"{spec.kind} {spec.Hq}/{spec.Hkv} heads of {spec.D}, width {spec.E}"


def _tokens_text(path: Path) -> str:
    """What a decode trace steps through: its prompts, and the tokens behind them."""
    trace = read_trace(path)
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
        files.add_row(escape(name), f"{entry['bytes']:,}", f"{entry['sha256'][:16]}…")
    made = "made with " + ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    checks = "\n".join(f"checked: {check}" for check in manifest.checks.get("graph", []))
    return Group(files, Text(checks, style="dim"), Text(made, style="dim"))


def parity_renderable(report: ParityReport) -> RenderableType:
    """A row for every output of every case, or for every attention of a module, and the verdict."""
    return layers_renderable(report) if report.cases == LAYERS else _outputs_renderable(report)


def _outputs_renderable(report: ParityReport) -> RenderableType:
    several = len({verdict.output for verdict in report.verdicts}) > 1
    rows = table()
    # The verdict first, and only what is needed: a terminal of 80 columns must not cut a number.
    for column in ("case", "verdict", "sizes", *(["output"] if several else [])):
        rows.add_column(column, no_wrap=column == "verdict", overflow="fold")
    for column in ("rel. L2", "row", "max", "gain", "used"):
        rows.add_column(column, justify="right", no_wrap=True)
    for verdict in report.verdicts:
        place = [sizes_text(verdict.sizes), *([escape(verdict.output)] if several else [])]
        rows.add_row(escape(verdict.case), verdict_text(verdict), *place, *_figures(verdict))
    failed = sum(not verdict.passed for verdict in report.verdicts)
    count = len(report.verdicts)
    head = (
        Text(f"PASSED  {count}/{count} outputs within budget", style="bold green")
        if report.passed
        else Text(f"FAILED  {failed} of {count} outputs are {failed_status(report)}", style="bold red")
    )
    where = Text(f"{report.model} {report.precision} on {report.backend}, errors against the FP64 oracle")
    problems = [problem_text(verdict) for verdict in report.verdicts if not verdict.passed]
    return Group(rows, *problems, head, where)


def self_test_renderable(result: SelfTest) -> RenderableType:
    """Every deliberate mistake, and by how much it was caught."""
    rows = table()
    rows.add_column("model", no_wrap=True)
    rows.add_column("× budget", justify="right", no_wrap=True)
    rows.add_column("verdict")
    right = Text("passed", style="green") if result.right.passed else Text("FAILED", style="red")
    rows.add_row("as exported", _share(budget_share(result.right)), right)
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


def _figures(verdict: OutputVerdict) -> tuple[str, ...]:
    deviation, budget = verdict.deviation, verdict.budget
    if deviation is None or budget is None:
        return ("-",) * 5
    return (
        f"{deviation.relative_l2:.1e}",
        f"{deviation.worst_row:.1e}",
        f"{deviation.max_abs:.1e}",
        f"{deviation.gain:.1e}",
        share_text(budget.share_used(deviation)),
    )


def _text(value: object) -> str:
    return "?" if value is None else escape(str(value))
