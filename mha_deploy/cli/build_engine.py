"""`mha-deploy build-engine`: from a bundle to a TensorRT engine, with a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mha_deploy.cli.options import BundleFolder, InProcess, Json, TimeLimit, print_json, steps
from mha_deploy.engine.options import EngineOptions, parse_ranges
from mha_deploy.errors import EXIT_VERDICT_FAILED

if TYPE_CHECKING:
    from mha_deploy.bundle.folder import Bundle
    from mha_deploy.engine.manifest import Engine

Backend = Annotated[
    str | None,
    typer.Option(help="tensorrt or tensorrt-rtx. default: TensorRT where there is a GPU for it, else RTX"),
]
Name = Annotated[str | None, typer.Option(help="Name of the engine. default: the backend's")]
Profiles = Annotated[
    list[str] | None,
    typer.Option(help="An optimisation profile, as B=1:8:32,S=1:128:512. Repeat for several in one engine."),
]
Targets = Annotated[
    str, typer.Option("--sm", help="Compute capabilities to compile for, as 89,120 (TensorRT-RTX only).")
]
RequireFused = Annotated[
    bool, typer.Option("--require-fused", help="Exit with 1 unless every attention is fused.")
]
RequirePrecision = Annotated[
    bool,
    typer.Option("--require-precision", help="Exit with 1 unless the engine is in the graph's precision."),
]
AllowDecomposed = Annotated[
    bool, typer.Option("--allow-decomposed", help="Build attention without a fused kernel from several.")
]
OptimizationLevel = Annotated[int | None, typer.Option(help="How hard the builder tries, 0 to 5.")]
WorkspaceMib = Annotated[int | None, typer.Option(help="Most scratch memory for a kernel, in MiB.")]
VersionCompatible = Annotated[
    bool, typer.Option("--version-compatible", help="Let later TensorRT versions load it.")
]
HardwareCompatible = Annotated[
    str | None, typer.Option(help="ampere-plus or same-compute-capability: other GPUs it shall run on.")
]
WeightStreaming = Annotated[bool, typer.Option("--weight-streaming", help="Let weights stay on the host.")]
Refit = Annotated[str | None, typer.Option(help="all or identical: weights that can be replaced later.")]
Attention = Annotated[
    str,
    typer.Option(
        help="native: TensorRT's own kernels. plugin: the plugin library (`mha-deploy plugins`). auto: both "
        "are built and timed, and the faster right one is kept."
    ),
]
Accumulate = Annotated[
    str,
    typer.Option(
        help="How the projections accumulate. fp16: as TensorRT chooses. fp32: in the plugin library. auto: "
        "with the plugin the better of both, else as TensorRT chooses."
    ),
]
Gqa = Annotated[
    str | None,
    typer.Option(help="auto, fold, broadcast or repeat: grouped heads as GEMMs (8.6 to 10.13)."),
]
Replace = Annotated[bool, typer.Option("--overwrite", help="Replace an engine of that name.")]


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
    in_process: InProcess = False,
    time_limit: TimeLimit = None,
    json: Json = False,
) -> None:
    """Build a TensorRT engine from a bundle, and prove that it is fused and in the right precision."""
    from mha_deploy.bundle.folder import open_bundle

    opened = open_bundle(bundle)
    options = EngineOptions(
        backend=backend,
        name=name,
        profiles=[parse_ranges(text, opened.manifest.spec) for text in profile or ()],
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
    )
    engine = build_with_progress(opened, options)
    if json:
        print_json(engine_to_dict(engine))
    else:
        print_engine(engine)
    manifest = engine.manifest
    if (require_fused and not manifest.all_fused) or (require_precision and not manifest.is_in_precision):
        raise typer.Exit(EXIT_VERDICT_FAILED)


def build_with_progress(bundle: Bundle, options: EngineOptions) -> Engine:
    """Build with progress on stderr, where the version tells its progress."""
    from mha_deploy.api import build_engine

    with steps(f"build {bundle.manifest.spec.name}") as on_step:
        on_step("lower, parse and build", 0, 0)
        return build_engine(bundle, **vars(options), on_step=on_step)


def print_engine(engine: Engine, *, details: bool = False) -> None:
    """Print an engine and its verdict for people."""
    from rich.console import Console

    from mha_deploy.cli.tables import engine_renderable, fit_renderable
    from mha_deploy.engine.manifest import misfits_here

    Console().print(engine_renderable(engine, details=details))
    if details:
        Console().print(fit_renderable(misfits_here(engine)))


def engine_to_dict(engine: Engine) -> dict[str, Any]:
    """An engine's manifest for machines."""
    return {"engine": str(engine.path), **vars(engine.manifest)}
