"""`mha-deploy analyze`: what does a layer cost, and how alike are its heads?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mha_deploy.cli.options import Axes, Json, Model, Seed, print_json, spec_from_options
from mha_deploy.errors import DeployError
from mha_deploy.model.spec import AttentionSpec, Sizes

if TYPE_CHECKING:
    from mha_deploy.analyze.cost import TimedPoint
    from mha_deploy.analyze.similarity import HeadSimilarity


def analyze(
    model: Model,
    gpu: Annotated[str, typer.Option(help="h200, h100, a100, rtx-4090, rtx-5090 or orin.")] = "h200",
    precision: Annotated[str, typer.Option(help="fp16, bf16 or fp32.")] = "fp16",
    at: Annotated[
        str | None,
        typer.Option(
            help="Sizes, as B=1,S=2048, or of a KV cache prefill or decode. default: the usual ones"
        ),
    ] = None,
    axis: Axes = None,
    heads: Annotated[
        Path | None, typer.Option(help="Also compare the heads, and draw them as a heatmap in this PNG file.")
    ] = None,
    inputs: Annotated[Path | None, typer.Option(help="An .npz file of inputs for --heads.")] = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Count parameters, FLOPs and bytes per stage, and the least time on a GPU. Runs nothing but --heads."""
    from mha_deploy.analyze.render import analysis_renderable, analysis_to_dict, similarity_renderable
    from mha_deploy.analyze.roofline import analyze as analyze_spec
    from mha_deploy.analyze.similarity import similarity_to_dict

    if inputs is not None and heads is None:
        raise DeployError("Inputs are read only to compare heads.", got=inputs, hint="add --heads FILE.png")
    spec = spec_from_options(model, axis)
    point = _point(spec, at)
    lengths = None if point.past is None else [point.past] * point.sizes["B"]
    analysis = analyze_spec(spec, point.sizes, precision, gpu, lengths=lengths)
    similarity = None if heads is None else _compare_heads(spec, point.sizes, heads, inputs, seed)
    if json:
        extra = {} if similarity is None else {"heads": similarity_to_dict(similarity)}
        print_json(analysis_to_dict(analysis) | extra)
        return
    from rich.console import Console

    console = Console()
    console.print(analysis_renderable(analysis))
    if similarity is not None:
        console.print(similarity_renderable(similarity))
        console.print(f"Heatmap: {heads}", markup=False, highlight=False, soft_wrap=True)


def _point(spec: AttentionSpec, at: str | None) -> TimedPoint:
    """Where the layer is counted: the step that is repeated, for a layer with a cache."""
    from mha_deploy.analyze.cost import USUAL, points_from_text

    return points_from_text(spec, at or USUAL)[-1]


def _compare_heads(
    spec: AttentionSpec, sizes: Sizes, png: Path, inputs: Path | None, seed: int
) -> HeadSimilarity:
    from mha_deploy.analyze.cost import key_length
    from mha_deploy.analyze.similarity import head_similarity, random_feeds, read_inputs, write_heatmap

    # The heads of a cached layer are those of the whole sequence that its cache has come from.
    sizes = sizes if spec.cache == "none" else {"B": sizes["B"], "S": key_length(spec, sizes)}
    spec = spec.without_cache()
    feeds = random_feeds(spec, sizes, seed) if inputs is None else read_inputs(inputs, spec)
    similarity = head_similarity(spec, feeds, seed=seed)
    write_heatmap(similarity, png, title=f"{spec.name}: similarity of heads")
    return similarity
