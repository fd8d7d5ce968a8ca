"""From a bundle to an engine: check, lower, build, judge, write."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import msgspec
import onnx_ir as ir

from mha_deploy.bundle.commit import temporary_folder, write_atomically
from mha_deploy.bundle.folder import MANIFEST, Bundle, sha256
from mha_deploy.engine.choose import fastest_engine
from mha_deploy.engine.lowered import (
    PLUGIN,
    dialect_for,
    lowered_for,
    open_candidates,
    with_carried,
    with_library,
)
from mha_deploy.engine.manifest import (
    FOLDER,
    Engine,
    EngineManifest,
    default_backend,
    engine_path,
    first_gpu,
    with_unrecognised,
    write_engine,
)
from mha_deploy.engine.options import Ranges, default_profiles, profile_names, profile_shapes
from mha_deploy.engine.plugins import PluginLibrary, find_plugins, load_plugins
from mha_deploy.engine.run import engine_opener, unprepared_profiles
from mha_deploy.errors import BundleError
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.file import load_graph, save_graph
from mha_deploy.graph.rules import Eligibility
from mha_deploy.options import EngineOptions
from mha_deploy.runtime.child import call_isolated, isolation, send_to_parent
from mha_deploy.runtime.runner import Runner
from mha_deploy.runtime.tensorrt.build import OnProgress, build_with
from mha_deploy.runtime.tensorrt.log import members
from mha_deploy.runtime.tensorrt.request import BuildRequest, BuiltEngine
from mha_deploy.runtime.tensorrt.verdict import EngineVerdict, engine_verdict, written_types
from mha_deploy.runtime.tensorrt.versions import EngineError, TensorRT, load

_LARGEST_WORKSPACE_MIB = 1 << 20  # 1 TiB

# -- From a bundle to an engine: check, lower, build, judge, write ---------------------------------


def engine_from_bundle(
    bundle: Bundle,
    options: EngineOptions | None = None,
    on_progress: OnProgress | None = None,
    *,
    path: Path | None = None,
) -> Engine:
    """Build an engine and judge it; it is written only when it is complete.

    Args:
        bundle: The bundle.
        options: How to build.
        on_progress: Called as the builder reports progress.
        path: Where the engine goes; default: into the bundle, under its name.

    Raises:
        BackendUnavailable: The requested TensorRT is not installed.
        EngineError: The graph cannot be built as requested.
    """
    options = options or EngineOptions()
    rt = load(options.backend or default_backend())
    _workspace(options.workspace_mib)  # refused before a long build
    path = path or engine_path(bundle.path, options.name or rt.backend)
    if path.exists() and not options.overwrite:
        raise BundleError("There is an engine of that name.", got=path, hint="another --name, or --overwrite")
    candidates = open_candidates(rt, options, bundle.manifest.precision.name)
    if any(candidate.attention == PLUGIN for candidate in candidates):
        find_plugins(rt)  # report a missing library before a long build
    build = partial(_engine_at, bundle=bundle, rt=rt, requested=options.attention, on_progress=on_progress)
    if len(candidates) > 1:
        return fastest_engine(bundle, options, path, candidates, build)
    return build(path, candidates[0].applied_to(options))


def _engine_at(
    path: Path,
    options: EngineOptions,
    *,
    bundle: Bundle,
    rt: TensorRT,
    requested: str,
    on_progress: OnProgress | None,
) -> Engine:
    """Build the one engine that the options request."""
    model = load_graph(bundle.model_path)
    library = find_plugins(rt) if options.attention == PLUGIN else None
    lowered, answers = lowered_for(rt, model, options)
    ranges = list(options.profiles) or default_profiles(bundle.manifest.spec, one=not rt.can.shared_profiles)
    cache = bundle.path / FOLDER / f"timing-{rt.backend}-{rt.version}.cache"
    # As a file: weights that do not fit in memory twice are read from disk.
    with temporary_folder(bundle.path.resolve() / "lowered") as folder:
        onnx_path = folder / "model.onnx"
        save_graph(lowered, onnx_path)
        request = _request(bundle, rt, options, onnx_path, ranges, cache)
        built = with_carried(_built(rt, request, library, on_progress), lowered)
    verdict = judge_engine(built, lowered, model, bundle.manifest.precision.name, len(ranges))
    verdict = with_unrecognised(verdict, bundle.manifest, profiles=len(ranges))
    manifest = _manifest(bundle, rt, built, verdict, answers, dialect_for(rt, options), ranges, request)
    if library is not None:
        manifest = with_library(
            manifest, library, lowered, requested=requested, accumulate=options.accumulate
        )
    unprepared = unprepared_profiles(
        rt,
        built.plan,
        manifest.profile_names,
        host_code=options.version_compatible,
        large_tensors=built.large_tensors,
    )
    manifest = msgspec.structs.replace(manifest, notes=[*unprepared, *manifest.notes])
    engine = write_engine(path, built.plan, manifest, overwrite=options.overwrite)
    if built.timing_cache:
        with contextlib.suppress(OSError):  # the engine is there: the next build is only slower
            write_atomically(cache, built.timing_cache)
    return engine


def _built(
    rt: TensorRT, request: BuildRequest, library: PluginLibrary | None, on_progress: OnProgress | None
) -> BuiltEngine:
    """Build in a child process, since parsers and builders can crash."""
    if not (isolation.enabled and rt.in_every_process):
        if library is not None:
            load_plugins(rt)
        return build_with(rt, request, on_progress)
    return call_isolated(
        rt.backend,
        _built_in_child,
        request,
        library is not None,
        title=rt.title,
        step="building the engine",
        on_message=None if on_progress is None else lambda progress: on_progress(*progress),
    )


def _built_in_child(request: BuildRequest, with_plugins: bool) -> BuiltEngine:
    rt = load(request.backend)
    if with_plugins:
        load_plugins(rt)
    return build_with(rt, request, lambda *progress: send_to_parent(progress))


def judge_engine(
    built: BuiltEngine, lowered: ir.Model, canonical: ir.Model, precision: str, profiles: int
) -> EngineVerdict:
    """Was every attention fused, and is the engine in the requested precision?"""
    built = with_carried(built, lowered)
    names = [node.name or "" for node in lowered.graph.all_nodes()]
    attention = members(names, [node.name for node in attention_nodes(canonical)])
    written = written_types(lowered)
    return engine_verdict(built.kernels, attention, precision, profiles=profiles, written=written)


def _request(
    bundle: Bundle,
    rt: TensorRT,
    options: EngineOptions,
    onnx_path: Path,
    ranges: list[Ranges],
    cache: Path,
) -> BuildRequest:
    spec = bundle.manifest.spec
    # With `--precision auto` most graphs are FP16 throughout, and need no constraints.
    wide = spec.mixed and bool(bundle.manifest.checks.get("mixed precision", {}).get("kept"))
    return BuildRequest(
        onnx=onnx_path,
        backend=rt.backend,
        precision=bundle.manifest.precision.name,
        profiles=[profile_shapes(spec, each) for each in ranges],
        targets=options.targets,
        optimization_level=options.optimization_level,
        workspace=_workspace(options.workspace_mib),
        timing_cache=cache.read_bytes()
        if rt.can.timing_cache and options.timing_cache and cache.is_file()
        else None,
        version_compatible=options.version_compatible,
        hardware_compatible=options.hardware_compatible,
        weight_streaming=options.weight_streaming,
        refit=options.refit,  # type: ignore[arg-type]
        allow_decomposed=options.allow_decomposed and rt.can.attention,
        # A TensorRT that chooses types by itself would narrow what the export kept in a wider type.
        precision_constraints=wide and not rt.can.strongly_typed_flag,
    )


def _workspace(mib: int | None) -> int | None:
    """The limit of the workspace in bytes."""
    if mib is not None and not 0 < mib <= _LARGEST_WORKSPACE_MIB:
        raise EngineError(
            "No GPU has a workspace of that size.",
            got=f"{mib} MiB",
            hint=f"--workspace-mib from 1 to {_LARGEST_WORKSPACE_MIB}, or leave it out",
        )
    return None if mib is None else mib << 20


def _manifest(
    bundle: Bundle,
    rt: TensorRT,
    built: BuiltEngine,
    verdict: EngineVerdict,
    answers: list[Eligibility],
    dialect: str,
    ranges: list[Ranges],
    request: BuildRequest,
) -> EngineManifest:
    warned = [message.text for message in built.warnings]
    # The source with the best information comes first.
    kernels = next(filter(None, map(built.kernels.get, ("inspector", "plan", "log"))), ())
    findings = dict.fromkeys(finding for answer in answers for finding in answer.findings)
    return EngineManifest(
        backend=rt.backend,
        version=rt.version,
        gpu=None if rt.can.builds_without_gpu and "CURRENT" not in request.target_names else first_gpu(),
        targets=list(request.target_names),
        model=bundle.manifest.spec.name,
        precision=bundle.manifest.precision.name,
        dialect=dialect,
        profiles=[{name: str(axis) for name, axis in each.items()} for each in ranges],
        profile_names=profile_names(bundle.manifest.spec, ranges),
        bundle_sha256=sha256(bundle.path / MANIFEST),
        engine_sha256=hashlib.sha256(built.plan).hexdigest(),
        engine_bytes=len(built.plan),
        seconds=round(built.seconds, 3),
        strongly_typed=built.strongly_typed,
        verdict=verdict,
        kernels=[
            {
                "name": kernel.name,
                "type": kernel.layer_type,
                "tactic": kernel.tactic,
                "nodes": list(kernel.onnx_nodes),
                "dtypes": sorted({tensor.dtype for tensor in kernel.tensors}),
                "profile": kernel.profile,
                "fused_attention": kernel.is_fused_attention,
            }
            for kernel in kernels
        ],
        options=request.options(),
        findings=[asdict(finding) for finding in findings],
        notes=[*built.notes, *(each.advice for each in built.large_tensors), *warned],
        large_tensors=list(built.large_tensors),
    )


# -- Variations of an engine that return inner values, built like it ------------------------------


def lowered_opener(engine: Engine, bundle: Bundle) -> Callable[[ir.Model], Runner]:
    """A function that builds a lowered graph with the profiles of an engine, and loads it."""
    rt, manifest = load(engine.manifest.backend), bundle.manifest
    profiles = [profile_shapes(manifest.spec, ranges) for ranges in engine.manifest.ranges]
    return engine_opener(rt, manifest.precision.name, profiles, engine.manifest.plugins)


def twin_opener(engine: Engine, bundle: Bundle) -> Callable[[ir.Model], Runner]:
    """A function that builds a variation of a bundle's graph as an engine of it was built, and loads it.

    Args:
        engine: The engine, of a TensorRT that is here.
        bundle: Its bundle.
    """
    rt, open_lowered = load(engine.manifest.backend), lowered_opener(engine, bundle)
    candidate = engine.manifest.attention
    options = EngineOptions(
        backend=engine.manifest.backend,
        allow_decomposed=True,
        attention=candidate["chosen"],
        accumulate=candidate["accumulate"],
    )
    return lambda model: open_lowered(lowered_for(rt, model, options)[0])
