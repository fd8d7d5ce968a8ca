"""What the tables of several verbs share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from mha_deploy.validate.parity import NOT_VERIFIED, OutputVerdict, ParityReport


def table(title: str | None = None, *, expand: bool = False) -> Table:
    """An empty table in the style of this tool."""
    layout = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0), "title_justify": "left"}
    return Table(title=title, expand=expand, **layout)  # type: ignore[arg-type]


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Sizes as people write them."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def share_text(share: float) -> str:
    """In per cent while that is easy to read, then as a multiple."""
    return f"{share:.0%}" if share < 10 else f"{share:,.0f}×"


def verdict_text(verdict: OutputVerdict) -> Text:
    """Whether an output is right."""
    if not verdict.passed and not verdict.is_wrong:
        return Text(NOT_VERIFIED, style="yellow")
    return Text("passed", style="green") if verdict.passed else Text("FAILED", style="red")


def failed_status(report: ParityReport) -> str:
    """What is true of the outputs that did not pass."""
    return "wrong" if any(verdict.is_wrong for verdict in report.verdicts) else NOT_VERIFIED


def problem_text(verdict: OutputVerdict) -> Text:
    """Why an output failed, and where it is worst."""
    text = f"{verdict.case}/{verdict.output}: {verdict.problem}"
    worst = verdict.deviation
    if worst is not None and verdict.is_wrong:
        place = list(worst.worst_index)
        text += f"; worst at {place}: got {worst.worst_got:.6g}, oracle {worst.worst_want:.6g}"
    return Text(text, style="red")


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
