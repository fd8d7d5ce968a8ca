"""`mha-deploy build-engine`: a TensorRT engine from a bundle, with its fusion and precision verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

import mha_deploy as md
from mha_deploy.cli.options import BundleFolder, InProcess, Json, TimeLimit, print_json, steps
from mha_deploy.errors import EXIT_VERDICT_FAILED
from mha_deploy.options import EngineOptions

if TYPE_CHECKING:
    from mha_deploy.engine.manifest import Engine

Backend = Annotated[
    str | None,
    typer.Option(
        help="tensorrt or tensorrt-rtx. default: tensorrt where it is installed with a GPU, else tensorrt-rtx"
    ),
]
Name = Annotated[str | None, typer.Option(help="Name of the engine. default: the name of the backend")]
Profiles = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RANGES",
        help="An optimization profile, as B=1:8:32,S=1:128:512. Can be repeated, for several in one engine. "
        "default: the axis ranges of the model",
    ),
]
Targets = Annotated[
    str,
    typer.Option(
        "--sm",
        help="Compute capabilities to compile for, as 89,120 (TensorRT-RTX). default: 8.0 and later",
    ),
]
RequireFused = Annotated[
    bool, typer.Option("--require-fused", help="Exit with 1 unless every attention is fused.")
]
RequirePrecision = Annotated[
    bool,
    typer.Option("--require-precision", help="Exit with 1 unless the engine is in the graph's precision."),
]
AllowDecomposed = Annotated[
    bool,
    typer.Option("--allow-decomposed", help="Build attention that has no fused kernel from several kernels."),
]
OptimizationLevel = Annotated[
    int | None, typer.Option(help="Builder optimization level, 0 to 5. default: TensorRT's own")
]
WorkspaceMib = Annotated[
    int | None, typer.Option(help="Limit of the workspace memory, in MiB. default: TensorRT's own")
]
VersionCompatible = Annotated[
    bool, typer.Option("--version-compatible", help="Build an engine that later TensorRT versions can load.")
]
HardwareCompatible = Annotated[
    str | None,
    typer.Option(
        help="Hardware compatibility level: ampere-plus or same-compute-capability. default: this GPU only"
    ),
]
WeightStreaming = Annotated[
    bool, typer.Option("--weight-streaming", help="Allow weights to stay in host memory.")
]
Refit = Annotated[
    str | None, typer.Option(help="Refittable weights: all or identical. default: none can be refitted")
]
Attention = Annotated[
    str,
    typer.Option(
        help="native: TensorRT's own kernels. plugin: the plugin library (see `mha-deploy plugins`). auto: "
        "both are built and timed, and the fastest with right results is kept."
    ),
]
Accumulate = Annotated[
    str,
    typer.Option(
        help="Accumulation of the projections. fp16: as TensorRT chooses. fp32: in the plugin library. auto: "
        "with the plugin the better of both, else as TensorRT chooses."
    ),
]
Gqa = Annotated[
    str | None,
    typer.Option(
        help="Grouped heads as GEMMs, for TensorRT 8.6 to 10.13: auto, fold, broadcast or repeat. "
        "default: auto"
    ),
]
TimingCache = Annotated[
    bool,
    typer.Option("--timing-cache/--no-timing-cache", help="Use the kernel timings of earlier builds."),
]
Repeat = Annotated[
    int,
    typer.Option(
        min=1,
        help="Number of builds. From 2 on, each starts without kernel timings, and what differs between them "
        "is reported: kernels, sizes, and on a GPU errors and latencies. The last one is kept.",
    ),
]
Replace = Annotated[bool, typer.Option("--overwrite", help="Replace an existing engine of that name.")]


def build_engine(
    bundle: BundleFolder,
    backend: Backend = None,
    name: Name = None,
    profile: Profiles = None,
    sm: Targets = "",
    require_fused: RequireFused = False,
    require_precision: RequirePrecision = False,
    allow_decomposed: AllowDecomposed = False,
    optimization_level: OptimizationLevel = None,
    workspace_mib: WorkspaceMib = None,
    version_compatible: VersionCompatible = False,
    hardware_compatible: HardwareCompatible = None,
    weight_streaming: WeightStreaming = False,
    refit: Refit = None,
    attention: Attention = EngineOptions.attention,
    accumulate: Accumulate = EngineOptions.accumulate,
    gqa: Gqa = None,
    overwrite: Replace = False,
    timing_cache: TimingCache = True,
    repeat: Repeat = 1,
    in_process: InProcess = False,
    time_limit: TimeLimit = None,
    json: Json = False,
) -> None:
    """Build a TensorRT engine from a bundle, and verify that it is fused and in the requested precision."""
    opened = md.open_bundle(bundle)
    with steps(f"build {opened.manifest.spec.name}") as on_step:
        on_step("lower, parse and build", 0, 0)
        engine = md.build_engine(
            opened,
            backend=backend,
            name=name,
            profiles=profile or (),
            targets=sm,
            allow_decomposed=allow_decomposed,
            optimization_level=optimization_level,
            workspace_mib=workspace_mib,
            version_compatible=version_compatible,
            hardware_compatible=hardware_compatible,
            weight_streaming=weight_streaming,
            refit=refit,
            attention=attention,
            accumulate=accumulate,
            gqa=gqa,
            overwrite=overwrite,
            timing_cache=timing_cache,
            repeat=repeat,
            on_step=on_step,
        )
    if json:
        print_json(engine_to_dict(engine))
    else:
        print_engine(engine)
    manifest = engine.manifest
    if (require_fused and not manifest.all_fused) or (require_precision and not manifest.is_in_precision):
        raise typer.Exit(EXIT_VERDICT_FAILED)


def print_engine(engine: Engine) -> None:
    """Print an engine and its verdict for people."""
    from rich.console import Console

    from mha_deploy.cli.tables import engine_renderable

    Console().print(engine_renderable(engine))


def engine_to_dict(engine: Engine) -> dict[str, Any]:
    """An engine's manifest for machines."""
    from msgspec import to_builtins

    return {"engine": str(engine.path), **to_builtins(engine.manifest)}
