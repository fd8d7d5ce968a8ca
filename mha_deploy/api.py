"""The public Python API: what `import mha_deploy as md` offers.

Each function calls the package that does the work, and the command line calls the same functions. Heavy
packages are imported by the function that needs them. What cannot be done is a `mha_deploy.DeployError`, with
what happened, what was got and what to try; a function lists the subclasses that it raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mha_deploy.bundle.folder import Bundle
from mha_deploy.bundle.folder import open_bundle as open_folder
from mha_deploy.engine.inspection import Inspection
from mha_deploy.environment import can_import, examine
from mha_deploy.errors import DeployError, needed
from mha_deploy.keywords import typed
from mha_deploy.model.catalog import catalog_names, find_spec
from mha_deploy.model.deployable import Deployable
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.model.precision import find_precision
from mha_deploy.model.source import AxisRanges as Axes
from mha_deploy.model.source import Model, describe, find_checkpoint_layer, find_model, range_text
from mha_deploy.options import (
    MOST_SECONDS,
    OF_DEPLOY,
    BenchOptions,
    EngineOptions,
    ExportOptions,
    Limits,
    OnStep,
    PackageOptions,
    Step,
    ValidateOptions,
    given_of,
    in_python,
    read_options,
    refuse_contradictions,
    silent,
    uncounted,
)
from mha_deploy.output import check_file, is_junit, is_nobodys, scratch_folder
from mha_deploy.report import check_results
from mha_deploy.results import BenchReport, Report

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

    from mha_deploy.analysis.graph import GraphAnalysis
    from mha_deploy.analysis.profiles import ProfileProposal
    from mha_deploy.analysis.roofline import Analysis
    from mha_deploy.analysis.similarity import HeadSimilarity
    from mha_deploy.deployment import Deployment
    from mha_deploy.engine.engine import Engine
    from mha_deploy.engine.plugins import Compiled, Found, PluginLibrary
    from mha_deploy.engine.trtexec import TrtexecCommand
    from mha_deploy.graph.fuse import FuseReport
    from mha_deploy.graph.rules import Eligibility
    from mha_deploy.judge import ParityReport
    from mha_deploy.model.source import AnySource, Examples
    from mha_deploy.regression.compare import Comparison
    from mha_deploy.regression.matrix import Matrix, MatrixCell
    from mha_deploy.regression.record import Replay
    from mha_deploy.runtime.runner import Runner
    from mha_deploy.serving.triton import Package
    from mha_deploy.validation.bench import ModelBench
    from mha_deploy.validation.fault import Bisection
    from mha_deploy.validation.self_test import SelfTest

    AnyModel = TypeVar("AnyModel", onnx.ModelProto, ir.Model)

DeployError.in_python = staticmethod(in_python)  # errors name keywords, not options

StrPath = str | os.PathLike[str]

__all__ = [
    "BenchReport", "Inspection", "Model", "Report", "analyze", "bench", "bisect",
    "build_engine", "build_plugins", "check", "check_parity", "compare", "compare_heads", "configure",
    "deploy", "doctor", "export", "find_plugin", "find_plugin_parts", "from_transformers", "fuse",
    "fuse_file", "import_onnx", "init", "inspect", "load_checkpoint", "load_model", "matrix", "models",
    "open_bundle", "open_engine", "open_runner", "package", "plugins", "propose_profiles", "prune",
    "refit", "replay", "self_test", "trtexec", "validate",
]  # fmt: skip


# -- Models and their export -----------------------------------------------------------------------


@typed
def load_model(
    model: AnySource,
    *,
    example_inputs: Examples | None = None,
    axes: Axes | None = None,
    name: str = "",
    cache: str | None = None,
    projections: str | None = None,
) -> Model:
    """Find a model to export.

    Args:
        model: A catalog name (`mha-deploy models` lists them), the path of a `.toml` spec, a factory as
            `path/to/file.py:factory` or `package.module:factory`, the path of an `.onnx` file, a
            `Deployable`, or an `nn.Module`. A factory is called by the export, under the export's seed.
        example_inputs: For an `nn.Module`: an `Example` for every parameter of `forward`, by name, or a
            tensor, whose dimensions are then fixed.
        axes: Axis ranges, such as `{"S": "1:128:512"}`: for an `nn.Module`, the axes that its examples name;
            for any other model, ranges that replace its own.
        name: Name of an `nn.Module`; default: the name of its class.
        cache: KV cache of a catalog layer: none, dynamic (past in, present out) or preallocated; default: as
            in the spec.
        projections: Q, K and V projections of a catalog layer: separate, or packed in one GEMM; default: as
            in the spec.

    Examples:
        >>> model = md.load_model("tiny-mha", axes={"S": "1:32:128"})
        >>> model.name, str(model.source.axes["S"])
        ('tiny-mha', '1:32:128')
    """
    return find_model(
        model, example_inputs=example_inputs, axes=axes, name=name, cache=cache, projections=projections
    )


@typed
def load_checkpoint(
    folder: StrPath,
    layer: int = 0,
    *,
    prefix: str = "",
    axes: Axes | None = None,
    cache: str | None = None,
    projections: str | None = None,
) -> Model:
    """Find the self attention of one layer of a Hugging Face checkpoint; nothing is downloaded.

    Heads, rotary embedding, window and the like are those of its `config.json`, and the export takes the
    weights of that layer. The result is a catalog layer.

    Args:
        folder: The folder: `config.json` and safetensors files, with an index if there are several.
        layer: The layer, from 0.
        prefix: The attention in the checkpoint, such as `decoder.layers.0.self_attn`, if a layer has several.
        axes: See `load_model`; default: sequences up to the context length, 2048 at most.
        cache: See `load_model`.
        projections: See `load_model`.

    Examples:
        >>> md.load_checkpoint("out")
        Traceback (most recent call last):
        mha_deploy.errors.SpecError: There is no config.json here...
    """
    found = find_checkpoint_layer(_path(folder), layer, prefix)
    return find_model(found, axes=axes, cache=cache, projections=projections)


@typed
def from_transformers(
    model: Any,
    *,
    cache: str = "static",
    batch: str = "1:1:8",
    tokens: str | None = None,
    length: int | None = None,
    name: str = "",
) -> Deployable:
    """A language model of Hugging Face transformers: a decoder with its KV cache, or an encoder.

    A model that generates, such as that of `AutoModelForCausalLM`, gets its cache as inputs and outputs: that
    of `StaticCache` or `DynamicCache`. Layers with a sliding window keep all tokens, and their masks hide
    those outside of it. Any other, such as BERT, takes `input_ids` and `attention_mask`, and returns every
    tensor of its result. Return the `Deployable` from a factory, or export it as it is.

    Args:
        model: The model, such as `AutoModelForCausalLM.from_pretrained(...)`.
        cache: `static`, a preallocated cache of `length` entries, or `dynamic`, a cache that grows. An
            encoder has none.
        batch: The range of the batch, `min:opt:max`.
        tokens: The range of new tokens in one call, `min:opt:max`; default: 1:128:512, or less if `length` is
            smaller.
        length: Largest number of tokens in a sequence; default: 1024, or as many as the model has positions
            for.
        name: Name of the model; default: its type, such as llama.

    Examples:
        >>> md.from_transformers(None)
        Traceback (most recent call last):
        mha_deploy.errors.ExportError: This is not a transformers model...
    """
    with needed("Exporting needs PyTorch and its ONNX exporter.", "export"):
        from mha_deploy.exporter.hugging_face import model_from_transformers
    return model_from_transformers(model, cache=cache, batch=batch, tokens=tokens, length=length, name=name)


@typed
def export(
    model: AnySource,
    out: StrPath,
    *,
    example_inputs: Examples | None = None,
    axes: Axes | None = None,
    inputs: Mapping[str, Any] | None = None,
    weights: StrPath | None = None,
    on_step: OnStep | None = None,
    **options: Any,
) -> Bundle:
    """Export a model to a bundle: canonical ONNX graph, golden cases with their FP64 oracle, manifest.

    Nothing is left at `out` if anything fails. What is exported from an object in memory (a `Deployable` or
    an `nn.Module`) cannot be made again from the bundle: fresh cases and PyTorch baselines need a factory.

    Args:
        model: What `load_model` gives or takes.
        out: The folder to write.
        example_inputs: See `load_model`.
        axes: See `load_model`; for an ONNX file, the ranges of its symbolic dimensions.
        inputs: For an ONNX file: arrays, or paths of `.npy` files, for inputs that should not be random.
        weights: Weights in place of random ones, or of the model's own: a safetensors file, the index of
            several, or the folder of a checkpoint; for your own model also a state dict. The manifest notes
            tensors that are not needed.
        on_step: Called as each step begins.
        options: The fields of `mha_deploy.options.ExportOptions`.

    Raises:
        BackendUnavailable: PyTorch or its ONNX exporter is not installed.

    Examples:
        >>> bundle = md.export("tiny-mha", "out/tiny", precision="fp32")
        >>> bundle.manifest.spec.name, [case.name for case in bundle.manifest.golden]
        ('tiny-mha', ['min', 'opt', 'odd', 'large'])
    """
    from mha_deploy.exporter.entry import export_model

    found = find_model(model, example_inputs=example_inputs, axes=axes)
    settings = read_options(ExportOptions, options)
    settings = replace(settings, **found.weight_options(weights, settings.prefix))
    return export_model(found, _path(out), settings, inputs or {}, on_step or silent)


@typed
def prune(
    model: AnySource,
    out: StrPath,
    *,
    heads: int | str | None = None,
    kv_heads: int | None = None,
    max_loss: float | None = None,
    data: Any = None,
    data_limit: int = 0,
    metric: Any = None,
    example_inputs: Examples | None = None,
    axes: Axes | None = None,
    weights: StrPath | None = None,
    prefix: str = "",
    seed: int = 0,
    golden: Sequence[str] = (),
    overwrite: bool = False,
    on_step: OnStep | None = None,
) -> Bundle:
    """Export a model with fewer heads: the heads that matter least for your data are removed.

    The result is a bundle like any other, with its loss against the original in the manifest. Each attention
    needs Q, K and V from GEMMs with constant weights, and one output projection; others are refused by name.

    Args:
        model: See `load_model`.
        out: The folder to write.
        heads: Query heads to keep in each attention, or auto: as few as the largest loss allows.
        kv_heads: In place of query heads: key/value heads of each attention. The most similar heads are
            merged: their mean replaces them.
        max_loss: Largest relative L2 between the outputs of the two models, both in FP64.
        data: Your own samples, in the forms that `validate` takes; default: the samples of the Deployable,
            else random inputs.
        data_limit: Largest number of samples; default: all.
        metric: Your own metric, a function of the outputs and the sample, for both models.
        example_inputs: See `load_model`.
        axes: See `load_model`.
        weights: See `export`.
        prefix: See `export`.
        seed: Seed of random weights and inputs.
        golden: See `export`.
        overwrite: Replace an existing bundle.
        on_step: Called as each step begins.

    Raises:
        LossExceeded: The heads cost more than max_loss; nothing is written.

    Examples:
        >>> bundle = md.prune("tiny-mha", "out/pruned", heads=3, golden=("opt",))
        >>> bundle.manifest.attention[0]["Hq"], bundle.manifest.loss.what
        (3, 'heads')
    """
    from mha_deploy.exporter.entry import prune_model

    found = find_model(model, example_inputs=example_inputs, axes=axes)
    given = {"seed": seed, "golden": golden, "overwrite": overwrite, "max_loss": max_loss}
    given |= {"data": data, "data_limit": data_limit, "metric": metric}
    options = read_options(ExportOptions, {**given, **found.weight_options(weights, prefix)})
    return prune_model(found, _path(out), options, heads=heads, kv_heads=kv_heads, on_step=on_step or silent)


@typed
def import_onnx(
    path: StrPath,
    out: StrPath,
    *,
    axes: Axes | None = None,
    inputs: Mapping[str, Any] | None = None,
    on_step: OnStep | None = None,
    **options: Any,
) -> Bundle:
    """Create a bundle from an ONNX file, without PyTorch: attention fused, golden cases, FP64 reference.

    The reference is the file itself with every type upcast to FP64, run by ONNX's evaluator. ONNX Runtime on
    the CPU stands for the eager model.

    Args:
        path: The file, of opset 7 or newer.
        out: The folder to write.
        axes: Ranges of its symbolic dimensions; default: 1:2:8 for a leading dimension, else 1:16:64.
        inputs: Arrays, or paths of `.npy` files, for inputs that should not be random.
        on_step: Called as each step begins.
        options: See `export`: `precision`, `golden`, `seed`, `overwrite`.

    Examples:
        >>> bundle = md.import_onnx("out/tiny/model.onnx", "out/imported", precision="fp32")
        >>> len(bundle.manifest.attention), bundle.manifest.spec.summary
        (1, 'imported from model.onnx')
    """
    return export(os.fspath(_path(path)), out, axes=axes, inputs=inputs, on_step=on_step, **options)


@typed
def open_bundle(path: StrPath, *, verify: bool = True) -> Bundle:
    """Open a bundle.

    Args:
        path: The folder that `export` wrote.
        verify: Whether to compare every file with its hash in the manifest, and the manifest with the graph.

    Raises:
        BundleError: It is missing, incomplete, changed, or of another format.

    Examples:
        >>> bundle = md.open_bundle("out/tiny")
        >>> bundle.manifest.precision.name
        'fp32'
    """
    if not verify:
        return open_folder(_path(path), verify=False)
    from mha_deploy.graph.canonical import open_checked

    return open_checked(_path(path))


# -- Graphs ----------------------------------------------------------------------------------------


@typed
def fuse(model: AnyModel, *, verify: bool = True) -> tuple[AnyModel, FuseReport]:
    """Write every attention of an ONNX model as one `Attention` node.

    Args:
        model: The model, of opset 7 or newer: an `onnx.ModelProto` or an `onnx_ir.Model`. It is not changed.
        verify: Whether to compare every new node with the nodes that it replaces, on random inputs; if the
            results differ, the original nodes stay.

    Returns:
        The new model, of the same type, and a report: `fused`, `unfused` with reasons, `already`, `complete`.

    Examples:
        >>> import onnx
        >>> model, fusion = md.fuse(onnx.load("out/tiny/model.onnx"))
        >>> type(model).__name__, len(fusion.already), fusion.complete
        ('ModelProto', 1, True)
    """
    from mha_deploy.exporter.fusion import fuse_model

    return fuse_model(model, verify=verify)


@typed
def fuse_file(
    source: StrPath, output: StrPath, *, overwrite: bool = False, verify: bool = True
) -> FuseReport:
    """Write every attention of an ONNX file as one `Attention` node, into another file.

    Large weights go to `OUTPUT.data` next to it. Either both files are written or neither.

    Args:
        source: The file, of opset 7 or newer.
        output: The file to write.
        overwrite: Replace existing files.
        verify: Compare every new node with the nodes that it replaces, on random inputs; keep it only if the
            results agree.

    Returns:
        The report; see `fuse`.

    Examples:
        >>> md.fuse_file("out/tiny/model.onnx", "out/fused.onnx").complete
        True
    """
    from mha_deploy.exporter.fusion import fuse_file

    return fuse_file(_path(source), _path(output), overwrite=overwrite, verify=verify)


@typed
def check(
    bundle: Bundle | StrPath, target: str = "tensorrt-rtx", version: str | None = None, *, sm: str = ""
) -> list[Eligibility]:
    """Check whether a target can take and fuse every attention of a graph, without building anything.

    Args:
        bundle: A bundle, its folder, or an ONNX file whose attention is fused.
        target: tensorrt or tensorrt-rtx.
        version: Version of the target, such as 8.6 or 10.14; default: the newest known.
        sm: Compute capabilities of the GPUs, such as 9.0 or 89,120; default: any.

    Returns:
        One record for each attention and target: `supported`, `fused`, `supported_after_lowering`,
        `fused_after_lowering` and `findings`.

    Examples:
        >>> for found in md.check("out/tiny", target="tensorrt", version="10.3"):
        ...     print(found.supported, found.supported_after_lowering)
        False True
    """
    from mha_deploy.engine.inspection import check_target

    file = None if isinstance(bundle, Bundle) else _path(bundle)
    subject = file if file is not None and file.suffix == ".onnx" else _open(bundle)
    return check_target(subject, target, version, sm)


# -- Engines ---------------------------------------------------------------------------------------


@typed
def build_engine(
    bundle: Bundle | StrPath,
    *,
    profiles: Sequence[str | Axes] | Axes = (),
    repeat: int = 1,
    save_onnx: StrPath | None = None,
    trtexec: bool = False,
    on_step: OnStep | None = None,
    **options: Any,
) -> Engine:
    """Build a TensorRT engine from a bundle; its manifest states whether attention is fused.

    Args:
        bundle: The bundle, or its folder; the engine is written into it.
        profiles: Optimization profiles, such as `"B=1:8:32,S=1:128:512"` or `{"B": "1:8:32"}`; default: the
            axis ranges of the model.
        repeat: Number of builds. If there are several, each starts without kernel timings, and the
            differences are reported: kernels, sizes, and on a GPU errors and latencies. The last engine is
            kept.
        save_onnx: Also write the lowered graph that TensorRT parses to this file; large weights go into a
            second file next to it.
        trtexec: Whether trtexec will build the same engine; TensorRT-RTX is then refused before the build.
        on_step: Called as the builder reports progress.
        options: The fields of `mha_deploy.options.EngineOptions`.

    Raises:
        BackendUnavailable: The requested TensorRT is not installed or cannot build here.

    Examples:
        >>> engine = md.build_engine("out/tiny", backend="tensorrt-rtx")     # doctest: +SKIP
        >>> engine.manifest.all_fused                                        # doctest: +SKIP
        True
    """
    from mha_deploy.engine.build import BUILDING, engine_from_bundle
    from mha_deploy.engine.engine import default_backend, parse_ranges
    from mha_deploy.engine.trtexec import refuse_rtx

    opened = _open(bundle)
    given = [profiles] if isinstance(profiles, Mapping) else profiles
    texts = [each if isinstance(each, str) else _profile_text(each) for each in given]
    ranges = [parse_ranges(text, opened.manifest.spec) for text in texts]
    settings = read_options(EngineOptions, {"profiles": ranges, **options})
    if trtexec:
        refuse_rtx(settings.backend or default_backend())
    target = (
        None if save_onnx is None else check_file(_path(save_onnx), is_nobodys, overwrite=settings.overwrite)
    )
    (on_step or silent)(BUILDING, 0, 0)
    if repeat != 1:
        from mha_deploy.engine.build import rebuild_engine

        engine = rebuild_engine(opened, settings, repeat, on_step)
    else:
        engine = engine_from_bundle(opened, settings, on_step)
    if target is not None:
        from mha_deploy.engine.build import lowered_graph
        from mha_deploy.graph.file import commit_graph

        commit_graph(lowered_graph(opened, engine), target)
    return engine


@typed
def trtexec(
    engine: Engine | StrPath, onnx: StrPath = "lowered.onnx", plan: StrPath = "model.engine"
) -> TrtexecCommand:
    """The `trtexec` command that builds the same engine from the graph that `save_onnx` wrote.

    The result is text; its `notes` list parts of the build that the command cannot express.

    Args:
        engine: The engine, or its file.
        onnx: Name of the graph in the command.
        plan: Name of the file that the command writes.

    Raises:
        DeployError: The engine is for TensorRT-RTX.

    Examples:
        >>> md.trtexec("out/tiny/engines/none.engine")
        Traceback (most recent call last):
        mha_deploy.errors.BundleError: There is no engine with a manifest here...
    """
    from mha_deploy.engine.engine import Engine
    from mha_deploy.engine.trtexec import trtexec_command

    opened = engine if isinstance(engine, Engine) else open_engine(engine)
    return trtexec_command(opened.manifest, _path(onnx), _path(plan))


@typed
def refit(
    engine: Engine | StrPath,
    weights: StrPath,
    out: StrPath,
    *,
    prefix: str = "",
    latency: bool | None = None,
    overwrite: bool = False,
    on_step: OnStep | None = None,
) -> Deployment:
    """Put new weights into an engine without a rebuild, and validate it against a new reference.

    The model of the engine's bundle is exported again with the weights, for their own FP64 reference, and
    the engine takes them over. It must have been built with `refit="all"`, and runs on its GPU.

    Args:
        engine: The engine, in its bundle.
        weights: The new weights, in the forms that `export` takes; for the bundle of an ONNX file, another
            ONNX file.
        out: The folder of the new bundle.
        prefix: See `export`.
        latency: Measure latency; default: on if there is a GPU.
        overwrite: Replace an existing bundle.
        on_step: Called as each step begins.

    Raises:
        EngineError: The weights of the engine cannot be replaced, or belong to another graph.

    Examples:
        >>> md.refit("out/absent.engine", "weights.safetensors", "out/new")
        Traceback (most recent call last):
        mha_deploy.errors.BundleError: There is no engine with a manifest here...
    """
    from mha_deploy.deployment import refit_bundle
    from mha_deploy.engine.engine import Engine

    found = engine if isinstance(engine, Engine) else open_engine(engine)
    options = read_options(ExportOptions, {"prefix": prefix, "overwrite": overwrite})
    return refit_bundle(
        found, _path(weights), _path(out), options, latency=latency, on_step=on_step or silent
    )


@typed
def open_engine(path: StrPath) -> Engine:
    """Open an engine that `build_engine` wrote.

    Args:
        path: The `.engine` file; its manifest is next to it.

    Raises:
        BundleError: It is missing, changed, or of another format.

    Examples:
        >>> md.open_engine("out/tiny/engines/none.engine")
        Traceback (most recent call last):
        mha_deploy.errors.BundleError: There is no engine with a manifest here...
    """
    from mha_deploy.engine.engine import open_engine

    return open_engine(_path(path))


@typed
def package(bundle: Bundle | StrPath, repository: StrPath, **options: Any) -> Package:
    """Write a bundle into a Triton model repository.

    Args:
        bundle: The bundle, or its folder.
        repository: The folder of the repository; a model is added to an existing one.
        options: The fields of `mha_deploy.options.PackageOptions`.

    Raises:
        BackendUnavailable: Triton's schema is not installed, or a plugin library is missing.
        ValidationFailed: The bundle failed its last validation, and allow_failed is not given.

    Examples:
        >>> md.package("out/tiny", "out/models", runtimes=["ort-cpu"]).max_batch
        4
    """
    from mha_deploy.serving.triton import Packaging

    return Packaging(_open(bundle), _path(repository), read_options(PackageOptions, options)).write()


# -- Running ---------------------------------------------------------------------------------------


@typed
def open_runner(model: Any, runtime: str | None = None) -> Runner:
    """Load a model into a runtime; use the runner as a context manager.

    `runner.run(inputs)` takes and gives NumPy arrays by name; `runner.time(inputs)` measures the device time
    of a call, on a GPU. ONNX Runtime, TensorRT and PyTorch run in a child process: a crash there is a
    `DeployError` here.

    Args:
        model: An `Engine` or its `.engine` file, a `Bundle` or its folder, an ONNX file, an
            `onnx.ModelProto` or `onnx_ir.Model`, or a Polygraphy runner, which is activated if it is not. Or
            the URL of a served model, as `grpc://HOST:PORT/MODEL` or `http://HOST:PORT/MODEL`.
        runtime: For a bundle or an ONNX model: `ort-cpu`, `ort-cuda`, `ort-cuda-contrib` or `onnx-reference`;
            for a bundle also the name of an engine, or of a PyTorch baseline such as `eager`. default: ONNX
            Runtime on the CPU, or ONNX's reference evaluator if ONNX Runtime does not support the precision
            of the graph.

    Raises:
        BackendUnavailable: The runtime is not installed or cannot run here.

    Examples:
        >>> import numpy as np
        >>> with md.open_runner("out/tiny") as runner:
        ...     outputs = runner.run({"x": np.zeros((1, 3, 64), np.float32)})
        >>> {name: array.shape for name, array in outputs.items()}
        {'output': (1, 3, 64)}
    """
    from mha_deploy.validation.runtimes import open_any_runner

    return open_any_runner(model, runtime)


# -- Validation ------------------------------------------------------------------------------------


@typed
def validate(
    bundle: Bundle | StrPath,
    *,
    runners: Sequence[Any] = (),
    on_step: OnStep | None = None,
    **options: Any,
) -> Report:
    """Run the graph and the engines of a bundle against the FP64 oracle, and benchmark them against PyTorch.

    Args:
        bundle: The bundle, or its folder, with or without engines.
        runners: What is judged in place of the bundle's own graph and engines, in addition to `graphs` and
            `engine_files`: a `Runner` or a Polygraphy runner, or anything that `open_runner` takes. A runner
            that is passed in open stays open.
        on_step: Called as each step begins.
        options: The fields of `mha_deploy.options.ValidateOptions`.

    Raises:
        BackendUnavailable: A runtime that was requested by name cannot run here, or there is no such server.

    Examples:
        >>> report = md.validate("out/tiny", latency=False)
        >>> report.outcome.value, report.passed
        ('passed', True)
        >>> report.save_html("out/report.html").name
        'report.html'
    """
    settings, report = read_options(ValidateOptions, options), on_step or silent
    refuse_contradictions(settings, has_runners=bool(runners))
    if settings.steps:
        refuse_steps(bundle, settings.steps, settings.prompt, settings.batch)
    if settings.url is not None:
        from mha_deploy.validation.server import validate_server

        return Report(validate_server(_open(bundle), settings, report))
    from mha_deploy.runtime.child import ONNX_RUNTIME, prepare_child

    if not (runners or settings.runtimes):
        prepare_child(ONNX_RUNTIME)  # it imports its runtime while this process imports PyTorch
    from mha_deploy.runtime.runner import Runner
    from mha_deploy.validation.run import validate_bundle

    with ExitStack() as owned:
        given = [
            each if isinstance(each, Runner) else owned.enter_context(open_runner(each)) for each in runners
        ]
        steps: dict[str, Any] = {"on_step": uncounted(report), "on_sample": report}
        return Report(validate_bundle(_open(bundle), settings, runners=given, **steps))


@typed
def check_parity(bundle: Bundle | StrPath, runner: Any) -> ParityReport:
    """Judge the outputs of any runner on the golden cases of a bundle.

    Args:
        bundle: The bundle, or its folder.
        runner: What `open_runner` returns or takes, including a Polygraphy runner. A runner that is passed in
            open stays open.

    Returns:
        The verdict on every output of every case: `passed` and `verdicts`.

    Examples:
        >>> report = md.check_parity("out/tiny", "out/tiny/model.onnx")
        >>> report.passed, len(report.verdicts)
        (True, 4)
    """
    from mha_deploy.runtime.runner import Runner
    from mha_deploy.validation.self_test import parity_from_runner

    opened, is_open = _open(bundle), isinstance(runner, Runner)
    with nullcontext(runner) if is_open else open_runner(runner) as running:
        return parity_from_runner(running, opened)


# -- Timing and fault search -----------------------------------------------------------------------


@typed
def bench(bundle: Bundle | StrPath, *, on_step: OnStep | None = None, **options: Any) -> ModelBench:
    """Time the engines of a bundle, ONNX Runtime and the PyTorch baselines, over batch sizes and lengths.

    Every size is judged against the oracle first: a wrong result has no time.

    Args:
        bundle: The bundle, or its folder, with its engines built.
        on_step: Called as each step begins.
        options: The fields of `mha_deploy.options.BenchOptions`.

    Returns:
        The times: `points`, one for each set of sizes, `throughput` and `wrong`. `BenchReport` makes a report
        of several.

    Raises:
        BackendUnavailable: There is no GPU, or a runtime that was requested by name cannot run here.

    Examples:
        >>> timing = md.bench("out/tiny", at=["opt"])                        # doctest: +SKIP
        >>> md.BenchReport([timing]).save("out/tiny")                        # doctest: +SKIP
    """
    from mha_deploy.runtime.cuda import open_gpu

    open_gpu()  # before anything else is loaded or hashed: there may be nothing to time on
    from mha_deploy.validation.bench import bench_bundle

    return bench_bundle(_open(bundle), read_options(BenchOptions, options), on_step=uncounted(on_step))


@typed
def replay(line: StrPath, bundle: Bundle | StrPath | None = None, *, tolerance: float = 0.05) -> Replay:
    """Measure a line of the benchmark record again, and judge whether both agree.

    Args:
        line: The line, such as `benchmarks/results/FILE.jsonl:12`.
        bundle: Its bundle; default: the folder that was recorded.
        tolerance: How far the time may be outside the recorded range, as a fraction.

    Returns:
        `status` (`agrees`, `differs` or `not comparable`), `why`, `recorded` and `measured`. Results that
        are wrong now differ.

    Raises:
        BackendUnavailable: There is no GPU, or the runtime cannot run here.

    Examples:
        >>> md.replay("benchmarks/results/h200.jsonl:1", "out/bert").passed  # doctest: +SKIP
    """
    from mha_deploy.regression.record import pick_line, replay_line

    recorded, alike = pick_line(os.fspath(_path(line)))
    opened = _open(recorded.bundle if bundle is None else bundle)
    return replay_line(recorded, alike, opened, bench, tolerance)


@typed
def bisect(
    bundle: Bundle | StrPath,
    runtime: str | None = None,
    *,
    graph: StrPath | None = None,
    names: Mapping[str, str] | None = None,
    on_step: OnStep | None = None,
) -> Bisection:
    """Find the first attention, and then the first node, whose result is wrong.

    Args:
        bundle: The bundle, or its folder.
        runtime: A runtime, or the name of an engine; default: the first engine that runs here, else a CPU
            runtime.
        graph: Another ONNX export of the same model, to look into in place of the bundle's own. Its values
            are matched with the bundle's by their numbers, whatever their names are.
        names: With `graph`: its names of inputs and outputs, and those in the bundle.
        on_step: Called before each part that is tried.

    Returns:
        `wrong`, `first_wrong`, `first_node`, and the `reference` that values inside were compared with.

    Examples:
        >>> found = md.bisect("out/tiny")
        >>> found.wrong is None, found.runs
        (True, 1)
    """
    from mha_deploy.validation.fault import bisect

    path = None if graph is None else _path(graph)
    return bisect(_open(bundle), runtime, on_step or silent, path, names or {})


@typed
def self_test(
    bundle: Bundle | StrPath, runtime: str | None = None, *, on_step: OnStep | None = None
) -> SelfTest:
    """Apply every mutation that fits to the graph of a bundle, and check that each mutation is detected.

    Args:
        bundle: The bundle, or its folder.
        runtime: The CPU runtime to run the mutated graphs in; default: as `open_runner`.
        on_step: Called as each mutation begins.

    Returns:
        `passed`, and what became of each mutation.

    Examples:
        >>> md.self_test("out/tiny").passed
        True
    """
    from mha_deploy.validation.self_test import self_test

    report = uncounted(on_step)
    return self_test(_open(bundle), runtime, on_mutation=lambda name: report(Step("mutations", name)))


# -- From a model to a verdict in one call ---------------------------------------------------------


@typed
def deploy(
    model: AnySource,
    out: StrPath,
    *,
    weights: StrPath | None = None,
    inputs: Mapping[str, Any] | None = None,
    engine: bool = True,
    latency: bool | None = None,
    requirements: Any = None,
    candidates: bool | None = False,
    on_step: OnStep | None = None,
    on_result: Callable[[Any], None] | None = None,
    **options: Any,
) -> Deployment:
    """Export a model, build an engine unless its graph is wrong, and validate both.

    Args:
        model: What `load_model` returns or takes.
        out: The folder to write.
        weights: See `export`.
        inputs: See `export`.
        engine: Build an engine, which must be fused and in the precision of the graph.
        latency: Measure latency; default: on if there is a GPU.
        requirements: A TOML file of requirements on the verdict, or a mapping of them; see `init`.
        candidates: Whether to build several candidates and keep the best. With the precision `auto`: FP16,
            BF16, FP16 with FP32 where it overflows, and the plugin's accumulation types. With `int8` or
            `fp8`, on a GPU: 16 bits, both kinds of scales, and attention in eight bits. None: on with `auto`
            if there is a GPU.
        on_step: Called as each step begins.
        on_result: Called with the bundle, with the evaluation of its graph, and with the engine, as soon as
            each exists: what was reached before a later step fails.
        options: The fields of `mha_deploy.options.ExportOptions`, and some of `EngineOptions`.

    Returns:
        The bundle, its engine and the report. An attention of your own model without a fused kernel, a graph
        that TensorRT refuses, or a build that crashes, is a failure in the report, and the engine is None.

    Raises:
        BackendUnavailable: No engine can be built here as requested; raised before the export.
        NotFusedError: No fused kernel supports the attention of a catalog layer (softcap, FP32); raised
            before the export.

    Examples:
        >>> done = md.deploy("tiny-mha", "out/deployed", precision="fp32", engine=False)
        >>> done.report.passed, done.engine
        (True, None)
    """
    from mha_deploy.exporter.entry import is_traced_beside, refuse_export

    found, exported = find_model(model), dict(options)
    chosen = {name: exported.pop(name) for name in OF_DEPLOY if name in exported}
    builder = read_options(EngineOptions, chosen)
    settings = read_options(ExportOptions, exported, *OF_DEPLOY)
    settings = replace(settings, **found.weight_options(weights, settings.prefix))
    if not engine and (unused := given_of(builder, OF_DEPLOY)):
        what, hint = "Without an engine, its options are not used.", "leave them out, or --no-engine"
        raise DeployError(what, got=", ".join(unused.values()), hint=hint, options=unused)
    refuse_export(found, _path(out), settings, inputs or {})  # before anything heavy is imported
    if not candidates and is_traced_beside(found.source, settings):
        from mha_deploy.runtime.child import EXPORTER, prepare_child

        prepare_child(EXPORTER)  # it imports what it needs while this process does
    from mha_deploy.deployment import deploy_model

    return deploy_model(
        found,
        _path(out),
        settings,
        builder if engine else None,
        inputs=inputs or {},
        latency=latency,
        requirements=requirements,
        candidates=candidates,
        on_step=on_step or silent,
        on_result=on_result or (lambda result: None),
    )


# -- Upgrades --------------------------------------------------------------------------------------


@typed
def compare(old: Any, new: Any, **options: Any) -> Comparison:
    """Compare two reports, benchmarks, bundles, engines or matrices of one model: did anything get worse?

    Args:
        old: The old result: the path of a `report.json`, `bench.json` or `matrix.json` (`matrix.json#NAME`
            for one runtime of it), of a bundle or an `.engine` file; or a `Report`, a `Bundle`, an `Engine`.
        new: The new result, of the same kind.
        options: The fields of `mha_deploy.options.Limits`.

    Returns:
        The changes: `passed`, `regressions`, `headline`, `changes`; `to_markdown()`, `to_junit()`,
        `to_html()` and `to_json()`.

    Examples:
        >>> md.compare("out/tiny", "out/tiny").passed
        True
    """
    from mha_deploy.regression.compare import compare

    return compare(old, new, read_options(Limits, options))


@typed
def matrix(
    plan: Any,
    out: StrPath = "matrix",
    *,
    jobs: int | None = None,
    address: str | None = None,
    on_cell: Callable[[MatrixCell, int, int], None] | None = None,
    on_step: OnStep | None = None,
) -> Matrix:
    """Build and judge every combination of a plan: models, precisions, runtimes, GPUs and options.

    Args:
        plan: The plan: a TOML file, or the same as a mapping; see docs/matrix.md.
        out: Folder of bundles and results. A second run computes only what is missing there.
        jobs: Run this many local processes at a time, instead of Ray; default: Ray, or 1 if it is not
            installed.
        address: Address of a Ray cluster; default: Ray on this machine.
        on_cell: Called with every cell as it is done, how many are done, and how many there are.
        on_step: Called as each step begins.

    Returns:
        The `cells`, each with its `status` and `report`; `passed`, `headline`, `save(folder)`.

    Raises:
        BackendUnavailable: Ray was requested and is not installed.

    Examples:
        >>> plan = {"models": ["tiny-mha"], "runtimes": [{"name": "rtx", "backend": "tensorrt-rtx"}]}
        >>> found = md.matrix(plan, "out/matrix", jobs=1)                    # doctest: +SKIP
        >>> [cell.summary for cell in found.cells]                           # doctest: +SKIP
        ['1/1 fused, not verified']
    """
    from mha_deploy.regression.matrix import LocalWorkers, ModelEntry, RayWorkers, read_plan, run_matrix

    read = read_plan(plan)

    def exported(entry: ModelEntry, precision: str, target: Path) -> None:
        model = load_model(entry.model, axes=entry.axes, cache=entry.cache)
        export(model, target, precision=precision, seed=read.seed)

    on_ray = address is not None or (jobs is None and can_import("ray"))
    local = nullcontext(LocalWorkers(jobs or 1, _path(out)))
    opened: Any = closing(RayWorkers(address, jobs)) if on_ray else local
    with opened as workers:
        return run_matrix(read, _path(out), workers, exported, on_cell, uncounted(on_step))


# -- What is known without running anything --------------------------------------------------------


@typed
def models(*, tiny: bool = False) -> list[AttentionSpec]:
    """The catalog: the spec of every known layer.

    Args:
        tiny: Whether to include the small layers that the tests use.

    Examples:
        >>> [spec.name for spec in md.models() if spec.name.startswith("llama-3-8b")]
        ['llama-3-8b']
    """
    return [find_spec(name) for name in catalog_names() if tiny or not name.startswith("tiny-")]


@typed
def analyze(
    model: AnySource | Bundle,
    *,
    gpu: str = "h200",
    peak: str | None = None,
    precision: str = "fp16",
    at: str | None = None,
    axes: Axes | None = None,
) -> Analysis | GraphAnalysis:
    """Count the parameters, FLOPs and bytes of a model, and its roofline bound on a GPU.

    Of a catalog layer by stages; of your own model, an ONNX file or a bundle, every attention and GEMM of the
    graph. Its other nodes are assumed to be fused into these.

    Args:
        model: What `load_model` takes, or a bundle. Your own module is exported for it.
        gpu: GPU whose peak figures are used: h200, h100, a100, b200, b300, gb200, l4, l40s, a10, rtx-4090,
            rtx-5090, rtx-pro-6000, orin or thor.
        peak: Peak figures of another GPU instead, as TFLOPS:GB/s: dense TFLOPS in this precision and
            memory bandwidth, such as 362:864.
        precision: Precision of weights and activations: fp16, bf16 or fp32.
        at: Sizes, such as B=1,S=2048; for a layer with a KV cache also prefill or decode; default: the
            optimum of every axis; with a KV cache, the decode step.
        axes: See `load_model`.

    Examples:
        >>> analysis = md.analyze("bert-base", at="B=1,S=128")
        >>> analysis.cost.parameters
        2362368
    """
    from mha_deploy.analysis.graph import analyze_at
    from mha_deploy.analysis.roofline import parse_peaks
    from mha_deploy.exporter.entry import open_counted

    spec, graph = open_counted(model, axes)
    return analyze_at(spec, graph, at, precision, gpu if peak is None else parse_peaks(peak))


@typed
def propose_profiles(
    model: AnySource | Bundle,
    data: Any,
    *,
    gpu: str = "h200",
    peak: str | None = None,
    precision: str = "fp16",
    axes: Axes | None = None,
) -> ProfileProposal:
    """Propose optimization profiles from the sizes that occur in data, and what a second one would gain.

    The gain is in roofline bounds, with every sample padded to the largest sizes of its profile.

    Args:
        model: See `analyze`.
        data: Your samples, in the forms that `validate` takes.
        gpu: See `analyze`.
        peak: See `analyze`.
        precision: See `analyze`.
        axes: See `load_model`.

    Examples:
        >>> import numpy as np
        >>> lengths = [7, 8, 9, 60, 64]
        >>> found = md.propose_profiles("tiny-mha", [{"x": np.zeros((1, n, 64))} for n in lengths])
        >>> found.split, found.options
        (('S', 9), ['--profile B=1:1:1,S=7:8:9', '--profile B=1:1:1,S=10:64:64'])
    """
    from mha_deploy.analysis.graph import analyze_at
    from mha_deploy.analysis.profiles import propose_profiles as propose
    from mha_deploy.analysis.roofline import parse_peaks
    from mha_deploy.bundle.samples import as_taken
    from mha_deploy.exporter.entry import open_counted
    from mha_deploy.runtime.user_data import open_samples

    spec, graph = open_counted(model, axes)
    peaks, width = gpu if peak is None else parse_peaks(peak), find_precision(precision)
    _, samples, _ = open_samples(data, spec)
    usual = spec.sizes("opt")  # of axes that are fixed, and so no dimension of an input
    found = [{**usual, **as_taken(sample, spec, width).sizes} for sample in samples]
    if not found:
        raise DeployError("There are no samples.", got=str(data), hint="a file or folder with samples")

    def seconds(sizes: Mapping[str, int]) -> float:
        text = ",".join(f"{name}={size}" for name, size in sizes.items())
        return analyze_at(spec, graph, text, precision, peaks).seconds

    return propose(found, seconds)


@typed
def compare_heads(
    model: AnySource | Bundle,
    *,
    at: str | None = None,
    inputs: StrPath | None = None,
    example_inputs: Examples | None = None,
    axes: Axes | None = None,
    seed: int = 0,
    weights: StrPath | None = None,
    prefix: str = "",
    attention: str | None = None,
) -> HeadSimilarity:
    """Compare the head outputs of an attention; a catalog layer and your own model need PyTorch.

    Args:
        model: What `load_model` takes, or a `Bundle`.
        at: Sizes of the random inputs; see `analyze`.
        inputs: An .npz file of inputs on which to compare the heads of a catalog layer; default: random
            inputs.
        example_inputs: See `load_model`.
        axes: See `load_model`.
        seed: Seed of weights and random inputs.
        weights: See `export`.
        prefix: See `export`.
        attention: The attention of your own model whose heads are compared; default: the first.

    Returns:
        The mean cosine of every pair of heads: `matrix`, `redundancy`; `save_png(path)` draws it.

    Raises:
        BackendUnavailable: PyTorch is not installed.

    Examples:
        >>> md.compare_heads("tiny-mha").matrix.shape
        (4, 4)
    """
    from mha_deploy.validation.heads import compare_bundle_heads, compare_layer_heads

    if isinstance(model, Bundle):
        own: dict[str, Any] = {"--inputs": inputs, "example_inputs": example_inputs, "--axis": axes}
        own |= {"--seed": seed, "--weights": weights, "--prefix": prefix}
        if unused := [name for name, given in own.items() if given]:
            what, hint = "A bundle has its own weights and inputs.", "leave them out, or name the model"
            raise DeployError(what, got=", ".join(unused), hint=hint)
        return compare_bundle_heads(model, attention)
    found = load_model(model, example_inputs=example_inputs, axes=axes)
    if not isinstance(found.source, AttentionSpec):
        if inputs is not None:
            what = "Only a catalog layer takes an .npz file."
            raise DeployError(what, got=inputs, hint="Example(..., draw=)")
        with scratch_folder() as folder:
            options: dict[str, Any] = {"precision": "fp32", "golden": (at or "opt",), "seed": seed}
            options["prefix"] = prefix
            return compare_bundle_heads(
                export(found, folder / "bundle", weights=weights, **options), attention
            )
    if attention is not None:
        raise DeployError("A catalog layer has one attention.", got=attention, hint="leave it out")
    file = None if inputs is None else _path(inputs)
    return compare_layer_heads(found.source, at, file, seed=seed, **found.weight_options(weights, prefix))


@typed
def inspect(path: Bundle | Engine | StrPath, *, verify: bool = False) -> Inspection:
    """Open a bundle, an engine or an ONNX file, and check its hashes.

    Args:
        path: A `Bundle` or its folder, an `Engine` or its .engine file, an .onnx file, or a plan of any
            origin.
        verify: Also compare the manifest of a bundle with its graph, as all other functions and commands do.
            This takes a second, since it loads ONNX.

    Raises:
        BundleError: It is missing, changed, of another format, or an engine of another bundle.

    Examples:
        >>> [node["kind"] for node in md.inspect("out/tiny/model.onnx").attention]
        ['MHA']
    """
    from mha_deploy.engine.inspection import inspect_path

    return inspect_path(_path(getattr(path, "path", path)), verify=verify)


# -- This machine ----------------------------------------------------------------------------------


@typed
def init(path: StrPath = "mha-deploy.toml", *, overwrite: bool = False) -> Path:
    """Write a configuration file to start from: every option and requirement, commented out.

    Args:
        path: The file.
        overwrite: Replace an existing file.

    Examples:
        >>> md.init("out/mha-deploy.toml").name
        'mha-deploy.toml'
    """
    from mha_deploy.output import write_file
    from mha_deploy.requirements import template

    return write_file(_path(path), template().encode(), is_nobodys, overwrite=overwrite)


@typed
def doctor(*, load: bool = False) -> dict[str, Any]:
    """Report which runtimes and GPUs this machine has, what each is for, and how to install the rest.

    Args:
        load: Also import PyTorch, ONNX, onnxscript and matplotlib, to check that they work; default: they are
            only looked up.

    Returns:
        Plain data: `versions`, `runtimes`, `gpus` and `can`.

    Examples:
        >>> sorted(md.doctor()["can"])
        ['build-engine', 'export', 'run-engines', 'validate']
    """
    return examine(load=load)


@typed
def configure(
    *, in_process: bool | None = None, time_limit: float | None = None, trust_code: bool | None = None
) -> None:
    """Set how native code and the code of bundles run, for the whole process; None leaves it as it is.

    Args:
        in_process: Run ONNX Runtime, TensorRT and PyTorch in this process instead of a child process, for a
            debugger. A crash then ends this process.
        time_limit: Seconds after which a call of a runtime or of a model's code, or an evaluation of a graph,
            counts as a hang; default: 3600.
        trust_code: Run the factory that a bundle names, for fresh cases and PyTorch baselines. This runs code
            by the author of the bundle; default: only factories that this process exported.

    Examples:
        >>> md.configure(time_limit=3600)
    """
    from mha_deploy.runtime.child import isolation

    if in_process is not None:
        isolation.enabled = not in_process
    if time_limit is not None:
        if not 0 < time_limit <= MOST_SECONDS:  # neither is NaN
            what, hint = f"A time limit is a number of seconds up to {MOST_SECONDS:g}.", "time_limit=3600"
            raise DeployError(what, got=time_limit, hint=hint)
        isolation.limit_s = float(time_limit)
    if trust_code is not None:
        isolation.trust_code = trust_code


@typed
def plugins() -> dict[str, Any]:
    """List the plugin libraries of this machine.

    Returns:
        Plain data: the `places` that are searched, and the `libraries`, each with its `problem` and whether
        it `fits` the TensorRT here.

    Examples:
        >>> sorted(md.plugins())
        ['libraries', 'places']
    """
    from mha_deploy.engine.plugins import describe_libraries

    return describe_libraries()


@typed
def find_plugin(backend: str = "tensorrt") -> PluginLibrary:
    """The plugin library that a backend would load.

    Args:
        backend: tensorrt or tensorrt-rtx.

    Raises:
        PluginError: There is none, or the backend takes no plugin.
        BackendUnavailable: The backend is not installed.

    Examples:
        >>> md.find_plugin().path                                            # doctest: +SKIP
    """
    from mha_deploy.engine.plugins import find_plugins
    from mha_deploy.runtime.tensorrt.versions import load

    return find_plugins(load(backend))


@typed
def find_plugin_parts(
    *,
    tensorrt_include: StrPath | None = None,
    cudnn_include: StrPath | None = None,
    cudnn_frontend_include: StrPath | None = None,
    cuda_include: StrPath | None = None,
    nvcc: StrPath | None = None,
) -> list[Found]:
    """Find the headers and the compiler that the plugin library is built with.

    Args:
        tensorrt_include: Folder of TensorRT's headers; default: searched for.
        cudnn_include: Folder of cuDNN's headers; default: searched for.
        cudnn_frontend_include: Folder of cudnn-frontend's headers; default: searched for.
        cuda_include: Folder of CUDA's headers; default: searched for.
        nvcc: The CUDA compiler; default: searched for.

    Raises:
        BackendUnavailable: Something is missing; the message says how to install it.

    Examples:
        >>> md.find_plugin_parts(cuda_include="out")
        Traceback (most recent call last):
        mha_deploy...Error: The folder has no headers...
    """
    # Every parameter is one of the parts.
    given = {name: None if each is None else _path(each) for name, each in locals().items()}
    from mha_deploy.engine.plugins import find_parts

    return find_parts(given)


@typed
def build_plugins(
    parts: Sequence[Found] = (),
    *,
    out: StrPath | None = None,
    architectures: str = "",
    on_step: OnStep | None = None,
) -> Compiled:
    """Compile the plugin library against the headers of this machine.

    Args:
        parts: What `find_plugin_parts` returned; default: all searched for.
        out: Folder to write; default: $MHA_DEPLOY_PLUGINS, or the cache folder.
        architectures: GPU architectures to compile for, such as 80,90; default: those that nvcc supports.
        on_step: Called as each step begins.

    Returns:
        Its `path`, and its `library`: None if it is for another kind of machine and was not loaded.

    Raises:
        BackendUnavailable: A part is missing, or the compiler failed.

    Examples:
        >>> md.build_plugins(architectures="90").path                        # doctest: +SKIP
    """
    from mha_deploy.engine.plugins import build_folder, compile_library

    folder = build_folder() if out is None else _path(out)
    found = list(parts) or find_plugin_parts()
    return compile_library(found, folder, architectures.replace(",", ";"), on_step or silent)


# -- Arguments -------------------------------------------------------------------------------------


def refuse_outputs(folder: Path, name: str, *, record: Path | None = None, overwrite: bool = False) -> None:
    """Refuse, before long work, files of a result that could not be written after it."""
    check_results(folder, name, overwrite=overwrite)
    if record is not None:
        from mha_deploy.regression.record import check_record

        check_record(record)


def refuse_junit(path: Path, *, overwrite: bool = False) -> None:
    """Refuse, before long work, JUnit XML that could not be written after it."""
    check_file(path, is_junit, overwrite=overwrite)


def refuse_steps(bundle: Bundle | StrPath, steps: int, prompt: int | None, batch: int | None) -> None:
    """Refuse, before long work, decode steps that the model of a bundle does not allow."""
    from mha_deploy.bundle.cases import refuse_steps

    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle, verify=False)
    spec = opened.manifest.spec
    refuse_steps(spec, steps, prompt, batch)
    if spec.factory:
        from mha_deploy.runtime.user_code import refuse_without_factory

        refuse_without_factory(spec)  # which draws the steps


def refuse_image(path: Path, *, overwrite: bool, inputs: Sequence[StrPath]) -> None:
    """Refuse, before long work, an image that could not be written after it."""
    from mha_deploy.analysis.similarity import refuse_image

    refuse_image(path, overwrite=overwrite, inputs=inputs)


def _path(given: object) -> Path:
    """A path that was passed in; anything else is refused."""
    if isinstance(given, str | os.PathLike):
        return Path(given)
    what, hint = "This is not the path of a file or a folder.", "a string, or a pathlib.Path"
    raise DeployError(what, got=describe(given), hint=hint)


def _open(bundle: Bundle | StrPath) -> Bundle:
    return bundle if isinstance(bundle, Bundle) else open_bundle(bundle)


def _profile_text(ranges: Axes) -> str:
    return ",".join(f"{axis}={range_text(sizes)}" for axis, sizes in ranges.items())
