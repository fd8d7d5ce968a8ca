"""An analysis for people (rich renderables) and for machines (plain data)."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mha_deploy.analyze.roofline import Analysis, StageFloor
from mha_deploy.analyze.similarity import HeadSimilarity

FLOOR_NOTE = "The floor is what the datasheet's peak rates allow; it is not a prediction."


def analysis_renderable(analysis: Analysis) -> RenderableType:
    """The analysis as a heading, a table per stage and a few lines below it."""
    return Group(_heading(analysis), _stage_table(analysis), _closing(analysis))


def similarity_renderable(similarity: HeadSimilarity) -> RenderableType:
    """The similarity of the heads in a few lines; the whole matrix is in the heatmap and in the JSON."""
    table = Table.grid(padding=(0, 2))
    table.add_row("Head redundancy", f"{similarity.redundancy:.3f}  (mean |ρ| over pairs of heads)")
    if similarity.pair is None:
        table.add_row("Most similar heads", "there is only one head")
    else:
        first, second = similarity.pair
        table.add_row("Most similar heads", f"{first} and {second}: ρ = {similarity.pair_similarity:.3f}")
    table.add_row("Tokens compared", f"{similarity.tokens:,}")
    return table


def analysis_to_dict(analysis: Analysis) -> dict[str, Any]:
    """Plain data for JSON; times in seconds, sizes in bytes."""
    cost, floor, gpu = analysis.cost, analysis.floor, analysis.gpu
    return {
        "model": analysis.spec.name,
        "kind": analysis.spec.kind,
        "variant": analysis.spec.variant,
        "sizes": dict(analysis.sizes),
        "precision": analysis.precision,
        "gpu": {
            "name": gpu.name,
            "peak_flops": gpu.peak_flops(analysis.precision),
            "bandwidth": gpu.bandwidth,
            "compute_capability": gpu.compute_capability,
            "source": gpu.source,
        },
        "stages": [_stage_to_dict(stage) for stage in floor.stages],
        "total": {
            "parameters": cost.parameters,
            "flops": cost.flops,
            "bytes": cost.bytes,
            "intensity": cost.intensity,
            "floor_seconds": floor.seconds,
            "tokens_per_second": floor.tokens_per_second,
        },
        "kv_cache": {"bytes_per_token": analysis.kv_bytes_per_token, "bytes": analysis.kv_bytes},
    }


def _stage_to_dict(stage: StageFloor) -> dict[str, Any]:
    return {
        "name": stage.cost.name,
        "growth": stage.cost.growth,
        "parameters": stage.cost.parameters,
        "flops": stage.cost.flops,
        "bytes": stage.cost.bytes,
        "intensity": stage.cost.intensity,
        "floor_seconds": stage.seconds,
        "bound_by": stage.bound_by,
    }


def _heading(analysis: Analysis) -> Text:
    spec = analysis.spec
    heads = f"{spec.Hq} heads" if spec.Hkv == spec.Hq else f"{spec.Hq} query and {spec.Hkv} key/value heads"
    sizes = " ".join(f"{name}={size}" for name, size in analysis.sizes.items())
    text = Text(spec.name, style="bold")
    text.append(f"  {spec.kind}, {heads} of {spec.D}, width {spec.E}\n", style="not bold")
    text.append(f"{sizes}, {analysis.precision}, {analysis.gpu.name}", style="not bold dim")
    return text


def _stage_table(analysis: Analysis) -> Table:
    # Narrow enough for a terminal of 80 columns; exact parameters are in the JSON.
    table = Table(box=box.SIMPLE, show_footer=True, collapse_padding=True, pad_edge=False)
    total, floor = analysis.cost, analysis.floor
    table.add_column("stage", "total")
    table.add_column("grows as")
    for header, value in (
        ("params", _count(total.parameters)),
        ("GFLOP", _short(total.flops / 1e9)),
        ("MB", _short(total.bytes / 1e6)),
        ("FLOP/byte", _short(total.intensity)),
        ("floor µs", _short(floor.seconds * 1e6)),
    ):
        table.add_column(header, value, justify="right", no_wrap=True)
    table.add_column("bound by")
    for stage in floor.stages:
        table.add_row(*_stage_row(stage))
    return table


def _stage_row(stage: StageFloor) -> tuple[str, ...]:
    cost = stage.cost
    return (
        cost.name,
        cost.growth,
        _count(cost.parameters),
        _short(cost.flops / 1e9),
        _short(cost.bytes / 1e6),
        _short(cost.intensity),
        _short(stage.seconds * 1e6),
        stage.bound_by,
    )


def _closing(analysis: Analysis) -> RenderableType:
    rate = _short(analysis.floor.tokens_per_second / 1e6)
    per_token, cache = analysis.kv_bytes_per_token, _short(analysis.kv_bytes / 1e6)
    table = Table.grid(padding=(0, 2))
    table.add_row("Tokens/s at the floor", f"{rate} million through this layer")
    table.add_row("KV cache of this layer", f"{per_token:,} bytes per token, {cache} MB at these sizes")
    table.add_row("Peak figures", analysis.gpu.source)
    return Group(table, Text(FLOOR_NOTE, style="dim"))


def _count(number: int) -> str:
    """A count in the unit that keeps it short."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{_short(number / size)} {unit}"
    return str(number)


def _short(value: float) -> str:
    """Three significant digits, as a table wants them; an exponent only for what is very small."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if value >= 0.001 else f"{value:.1e}"
