"""What the verbs print of a user's own model: many attentions that are much alike."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from mha_deploy.cli.table_parts import (
    extras,
    failed_status,
    problem_text,
    share_text,
    sizes_text,
    table,
    verdict_text,
)
from mha_deploy.report.alike import named, together, without_numbers
from mha_deploy.validate.parity import OutputVerdict, ParityReport

MOST_ROWS = 8
"""The most attentions that pass and are still listed one by one."""


def layers_renderable(report: ParityReport) -> RenderableType:
    """The verdict on every attention; of many that pass, the first, the worst and the last."""
    rows = table()
    rows.add_column("attention", overflow="fold")
    rows.add_column("verdict", no_wrap=True)
    for column in ("rel. L2", "used"):
        rows.add_column(column, justify="right", no_wrap=True)
    listed = _listed(report.verdicts)
    for verdict in listed:
        rows.add_row(escape(verdict.output), verdict_text(verdict), *_figures([verdict]))
    others = [verdict for verdict in report.verdicts if verdict not in listed]
    if others:
        rows.add_row(f"{len(others)} more", verdict_text(others[0]), *_figures(others, "≤ "))
    problems = [problem_text(verdict) for verdict in report.verdicts if not verdict.passed]
    return Group(rows, *problems, _head(report), _where(report))


def _listed(verdicts: Sequence[OutputVerdict]) -> list[OutputVerdict]:
    passed = [verdict for verdict in verdicts if verdict.passed]
    if len(passed) <= MOST_ROWS:
        return list(verdicts)
    kept = (passed[0], max(passed, key=lambda verdict: verdict.share or 0.0), passed[-1])
    return [verdict for verdict in verdicts if not verdict.passed or verdict in kept]


def _figures(verdicts: Sequence[OutputVerdict], sign: str = "") -> tuple[str, str]:
    """The largest error, and the largest share of a budget."""
    errors = [verdict.deviation.relative_l2 for verdict in verdicts if verdict.deviation]
    shares = [verdict.share for verdict in verdicts if verdict.share is not None]
    return (
        f"{sign}{max(errors):.1e}" if errors else "-",
        f"{sign}{share_text(max(shares))}" if shares else "-",
    )


def _head(report: ParityReport) -> Text:
    wrong, count = sum(not verdict.passed for verdict in report.verdicts), len(report.verdicts)
    if report.passed:
        return Text(f"PASSED  {count}/{count} attentions right", style="bold green")
    return Text(f"FAILED  {wrong} of {count} attentions are {failed_status(report)}", style="bold red")


def _where(report: ParityReport) -> Text:
    sizes = sizes_text(report.verdicts[0].sizes) if report.verdicts else ""
    at = f" at {sizes}" if sizes else ""
    return Text(
        f"{report.model} {report.precision} on {report.backend}{at}, each attention against its FP64 oracle"
    )


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
