"""`mha-deploy deploy`: export, build and validate in one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import mha_deploy as md
from mha_deploy.cli.build_engine import (
    Accumulate,
    AllowDecomposed,
    Attention,
    Backend,
    Targets,
    engine_to_dict,
    print_engine,
)
from mha_deploy.cli.export import print_bundle
from mha_deploy.cli.options import (
    Axes,
    Cache,
    Checkpoint,
    InProcess,
    Inputs,
    Json,
    Layer,
    ModelOrFactory,
    Overwrite,
    Precision,
    Prefix,
    Projections,
    Seed,
    TimeLimit,
    Weights,
    inputs_from_options,
    model_from_options,
    steps,
)
from mha_deploy.cli.validate import Latency, finish
from mha_deploy.errors import DeployError
from mha_deploy.options import AUTO, EngineOptions, ExportOptions


def deploy(
    ctx: typer.Context,
    model: ModelOrFactory = "",
    hf: Checkpoint = None,
    layer: Layer = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="The folder to write. default: bundles/MODEL-PRECISION, or bundles/MODEL-CACHE-PRECISION "
            "with a --cache that is not the spec's own",
        ),
    ] = None,
    precision: Precision = ExportOptions.precision,
    axis: Axes = None,
    projections: Projections = None,
    seed: Seed = 0,
    weights: Weights = None,
    prefix: Prefix = "",
    cache: Cache = None,
    inputs: Inputs = None,
    backend: Backend = None,
    sm: Targets = "",
    allow_decomposed: AllowDecomposed = False,
    attention: Attention = EngineOptions.attention,
    accumulate: Accumulate = EngineOptions.accumulate,
    engine: Annotated[bool, typer.Option(help="Whether to build an engine.")] = True,
    latency: Latency = None,
    candidates: Annotated[
        bool | None,
        typer.Option(
            "--candidates/--no-candidates",
            help="With --precision auto: build FP16, BF16, FP16 with FP32 where it overflows, and the "
            "plugin's accumulations, compare error, latency and fusion, and keep the best. default: if "
            "--precision auto is given, and there is a GPU",
        ),
    ] = None,
    overwrite: Overwrite = False,
    in_process: InProcess = False,
    time_limit: TimeLimit = None,
    json: Json = False,
) -> None:
    """Export a model, build an engine, and validate it against the FP64 oracle and beside PyTorch."""
    source = model_from_options(model, hf, layer, prefix, axis, cache, projections)
    name, reached = source.name, list[Any]()
    changed = "" if cache is None else getattr(source.source, "cache", "")
    own = "none" if hf is not None else getattr(md.load_model(model).source, "cache", "")
    if changed and changed != own:
        name += f"-{changed.replace('none', 'uncached')}"
    # A catalog layer has no weights of its own that could overflow: `auto` is FP16 there.
    written = "fp16" if precision == AUTO and hasattr(source.source, "Hq") else precision
    try:
        with steps(f"deploy {source.name}") as on_step:
            done = md.deploy(
                source,
                out or Path("bundles") / f"{name}-{written}",
                precision=precision,
                seed=seed,
                weights=weights,
                prefix=prefix,
                inputs=inputs_from_options(inputs),
                overwrite=overwrite,
                engine=engine,
                backend=backend,
                targets=sm,
                allow_decomposed=allow_decomposed,
                attention=attention,
                accumulate=accumulate,
                latency=latency,
                candidates=candidates,
                on_step=on_step,
                on_result=reached.append,
            )
    except DeployError:
        if reached and not json:  # the bundle is written and its graph may be verified: print that first
            from rich.console import Console

            from mha_deploy.cli.tables import parity_renderable

            print_bundle(reached[0])
            for graph in reached[1:2]:
                Console().print(*map(parity_renderable, graph.parity))
        raise
    data: dict[str, Any] | None = None
    if json:
        engine_data = None if done.engine is None else engine_to_dict(done.engine)
        validation = done.report.to_dict()
        data = {"bundle": str(done.bundle.path), "validation": validation, "engine": engine_data}
        if done.chosen is not None:
            data["candidates"] = [vars(trial) for trial in done.candidates]
            data["chosen"] = {"name": done.chosen.name, "why": done.why}
    else:
        tried = done.candidates_table()
        if tried is not None and done.chosen is not None:
            from rich.console import Console

            from mha_deploy.cli.tables import rendered

            Console().print(rendered(tried))
            Console().print(f"chosen: {done.chosen.name}: {done.why}", highlight=False)
        print_bundle(done.bundle)
        if done.engine is not None:
            print_engine(done.engine)
    finish(done.report, done.bundle.path, data)
