"""`mha-deploy analyze`: cost and roofline bound of a layer, and the similarity of its heads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import mha_deploy as md
from mha_deploy.cli.options import (
    Axes,
    Checkpoint,
    Json,
    Layer,
    ModelOrFactory,
    Prefix,
    Seed,
    Weights,
    model_from_options,
    print_json,
)
from mha_deploy.errors import DeployError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mha_deploy.analyze.roofline import Analysis
    from mha_deploy.analyze.similarity import HeadSimilarity


def analyze(
    model: ModelOrFactory = "",
    hf: Checkpoint = None,
    layer: Layer = 0,
    gpu: Annotated[
        str,
        typer.Option(help="GPU whose peak figures are used: h200, h100, a100, rtx-4090, rtx-5090 or orin."),
    ] = "h200",
    precision: Annotated[
        str, typer.Option(help="Precision of weights and activations: fp16, bf16 or fp32.")
    ] = "fp16",
    at: Annotated[
        str | None,
        typer.Option(
            help="Sizes, as B=1,S=2048, or of a layer with a KV cache prefill or decode. "
            "default: the optimum of every axis; with a KV cache, the decode step"
        ),
    ] = None,
    axis: Axes = None,
    heads: Annotated[
        Path | None,
        typer.Option(
            help="Compare the heads as well, and write a heatmap to this PNG file. Needs PyTorch. Your own "
            "model is analyzed by this alone."
        ),
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help="The attention of your own model for --heads. default: the first")
    ] = None,
    weights: Weights = None,
    prefix: Prefix = "",
    inputs: Annotated[
        Path | None, typer.Option(help="An .npz file of inputs for --heads. default: random inputs")
    ] = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Count parameters, FLOPs and bytes per stage, and the roofline bound. Nothing is run without --heads."""
    if inputs is not None and heads is None:
        raise DeployError("--inputs is only used with --heads.", got=inputs, hint="add --heads FILE.png")
    source = model_from_options(model, hf, layer, prefix, axis)
    is_layer = hasattr(source.source, "Hq")
    analysis = None
    if is_layer or heads is None:
        analysis = md.analyze(source, gpu=gpu, precision=precision, at=at)
    similarity = None
    if heads is not None:
        similarity = md.compare_heads(
            source, at=at, inputs=inputs, seed=seed, weights=weights, prefix=prefix, attention=attention
        )
        name = f" {similarity.attention}" if similarity.attention else ""
        similarity.save_png(heads, title=f"{source.name}{name}: similarity of heads")
    if json:
        found = {} if analysis is None else analysis.to_dict()
        print_json(found | ({} if similarity is None else {"heads": similarity.to_dict()}))
        return
    from rich.console import Console

    console = Console()
    if analysis is not None:
        console.print(analysis_renderable(analysis))
    if similarity is not None:
        console.print(similarity_renderable(similarity))
        console.print(f"Heatmap: {heads}", markup=False, highlight=False, soft_wrap=True)


def analysis_renderable(analysis: Analysis) -> RenderableType:
    """A heading, a table of the stages, and the KV cache."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    spec, cost, bound = analysis.spec, analysis.cost, analysis.bound
    heads = f"{spec.Hq} heads" if spec.Hkv == spec.Hq else f"{spec.Hq} query and {spec.Hkv} key/value heads"
    sizes = " ".join(f"{name}={size}" for name, size in analysis.sizes.items())
    heading = Text(spec.name, style="bold")
    heading.append(f"  {spec.kind}, {heads} of {spec.D}, width {spec.E}\n", style="not bold")
    heading.append(f"{sizes}, {analysis.precision}, {analysis.gpu.name}", style="not bold dim")
    # Narrow enough for a terminal of 80 columns; exact parameters are in the JSON.
    stages = Table(box=box.SIMPLE, show_footer=True, collapse_padding=True, pad_edge=False)
    stages.add_column("stage", "total")
    stages.add_column("grows as")
    for header, value in (
        ("params", _count(cost.parameters)),
        ("GFLOP", _short(cost.flops / 1e9)),
        ("MB", _short(cost.bytes / 1e6)),
        ("FLOP/byte", _short(cost.intensity)),
        ("bound µs", _short(bound.seconds * 1e6)),
    ):
        stages.add_column(header, value, justify="right", no_wrap=True)
    stages.add_column("bound by")
    for stage in bound.stages:
        stages.add_row(
            stage.cost.name,
            stage.cost.growth,
            _count(stage.cost.parameters),
            _short(stage.cost.flops / 1e9),
            _short(stage.cost.bytes / 1e6),
            _short(stage.cost.intensity),
            _short(stage.seconds * 1e6),
            stage.bound_by,
        )
    rate, cache = _short(bound.tokens_per_second / 1e6), _short(analysis.kv_bytes / 1e6)
    closing = Table.grid(padding=(0, 2))
    closing.add_row("Tokens/s at the roofline bound", f"{rate} million through this layer")
    closing.add_row(
        "KV cache of this layer",
        f"{analysis.kv_bytes_per_token:,} bytes per token, {cache} MB at these sizes",
    )
    closing.add_row("Peak figures", analysis.gpu.source)
    note = "The bound follows from the datasheet's peak rates; it is not a prediction."
    return Group(heading, stages, closing, Text(note, style="dim"))


def similarity_renderable(similarity: HeadSimilarity) -> RenderableType:
    """The similarity of the heads in a few lines; the matrix is in the heatmap and in the JSON."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_row("Head redundancy", f"{similarity.redundancy:.3f}  (mean |ρ| over pairs of heads)")
    if similarity.pair is None:
        table.add_row("Most similar heads", "there is only one head")
    else:
        first, second = similarity.pair
        table.add_row("Most similar heads", f"{first} and {second}: ρ = {similarity.pair_similarity:.3f}")
    table.add_row("Tokens compared", f"{similarity.tokens:,}")
    if similarity.attention:
        table.add_row("Attention", similarity.attention)
    for name, redundancy in similarity.others.items():
        table.add_row(f"Redundancy of {name}", f"{redundancy:.3f}")
    return table


def _count(number: int) -> str:
    """A count in the unit that keeps it short."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{_short(number / size)} {unit}"
    return str(number)


def _short(value: float) -> str:
    """Three significant digits; an exponent only for what is very small."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if value >= 0.001 else f"{value:.1e}"
