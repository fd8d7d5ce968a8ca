"""Where every export begins: a catalog layer, a user's own model or an ONNX file, whole or compressed.

PyTorch is imported by the functions that need it: an ONNX file is exported without.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mha_deploy.bundle.folder import MANIFEST, Bundle, open_bundle
from mha_deploy.errors import DeployError, ExportError, needed
from mha_deploy.files import open_regular, refuse_missing_data
from mha_deploy.model.catalog import is_factory
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.model.precision import EIGHT_BITS, find_precision
from mha_deploy.model.source import Model, find_model
from mha_deploy.model.spec import ModelSpec
from mha_deploy.options import AUTO, ExportOptions, OnStep, given_of, uncounted
from mha_deploy.output import refuse_inside, refuse_occupied, scratch_folder

if TYPE_CHECKING:
    import onnx_ir as ir

    from mha_deploy.exporter.compress import Original

OF_EIGHT_BITS = (
    "calibration", "weight_scales", "quantize_attention", "max_loss", "data", "data_limit", "metric",
)  # fmt: skip
"""The fields of `ExportOptions` that only a quantized model has."""
_NOT_OF_FILE = {
    "weights": (
        "An ONNX file has its own weights.",
        "leave it out, or export the module itself, file.py:factory, with --weights; an engine gets the "
        "weights of another .onnx file by `mha-deploy refit`",
    ),
    "prefix": (
        "An ONNX file has its own weights: no checkpoint is read.",
        "leave it out, or export the module itself, file.py:factory, with --weights and --prefix",
    ),
    "opset": (
        "The operator set of an ONNX file is not chosen: it is the file's, or the first that has Attention.",
        "leave it out",
    ),
    "device": ("The golden cases of an ONNX file are computed on the CPU.", "leave it out"),
}
_NOT_OF_MODULE = {"device": ("Your own model is exported on the CPU.", "leave it out")}
"""The fields of `ExportOptions` that a kind of model does not have: why not, and what to try."""


def export_model(
    model: Model, out: Path, options: ExportOptions, inputs: Mapping[str, Any], on_step: OnStep
) -> Bundle:
    """Export a model to a bundle; `inputs` are arrays or files of them, for an ONNX file."""
    refuse_export(model, out, options, inputs)
    named = model.source if isinstance(model.source, str) else ""
    sources = [named, named.rpartition(":")[0], options.weights, *inputs.values()]
    refuse_inside(
        Path(os.path.realpath(out)), filter(None, (x for x in sources if isinstance(x, str | Path)))
    )
    from mha_deploy.runtime.child import ONNX_RUNTIME, prepare_child

    prepare_child(ONNX_RUNTIME)  # it imports its runtime while PyTorch exports
    if options.precision in EIGHT_BITS:
        from mha_deploy.exporter.compress import compressed_bundle, quantize

        with scratch_folder() as folder:
            original = _open_original(model, options, folder, _read_arrays(inputs), on_step)
            made = quantize(original, options, uncounted(on_step))
            return compressed_bundle(original, made, out, options, on_step)
    from mha_deploy.exporter.flow import export_bundle

    if (file := model.onnx_file) is not None:
        from mha_deploy.exporter.onnx_import import OnnxSource

        return export_bundle(OnnxSource(file, options, model.axes, _read_arrays(inputs)), out, on_step)
    traced = _trace_beside(model.source, options) if isinstance(model.source, AttentionSpec) else None
    with needed("Exporting needs PyTorch and its ONNX exporter.", "export"):
        from mha_deploy.exporter.exporter import LayerSource, ModuleSource, module_errors
    if isinstance(model.source, AttentionSpec):
        return export_bundle(LayerSource(model.source, options, traced), out, on_step)
    with module_errors(options.precision):
        return export_bundle(ModuleSource(model.source, options, model.axes), out, on_step)


_LONG_FLOPS, _SMALL_BYTES = 1 << 32, 1 << 26


def is_traced_beside(spec: object, options: ExportOptions) -> bool:
    """Whether a child traces a layer while this process imports PyTorch and computes golden cases.

    Not where this process has PyTorch already, or where there is less to compute than a child costs.
    """
    from mha_deploy.bundle.sizes import golden_budget, plan_golden
    from mha_deploy.environment import can_import
    from mha_deploy.runtime.child import isolation
    from mha_deploy.threads import cores

    if "torch" in sys.modules or not can_import("torch") or not isolation.enabled or cores() < 2:
        return False
    if not isinstance(spec, AttentionSpec) or options.weights is not None or options.device != "cpu":
        return False
    if options.precision in EIGHT_BITS:
        return False
    plan = plan_golden(spec, options.golden, golden_budget(options))
    cost = [spec.call_cost(case.sizes, 2) for case in plan.cases]
    return sum(each.flops for each in cost) >= _LONG_FLOPS and 2 * cost[0].parameters <= _SMALL_BYTES


def _trace_beside(spec: AttentionSpec, options: ExportOptions) -> Future[bytes] | None:
    """The graph of a layer, where a child traces it."""
    from mha_deploy.runtime.child import EXPORTER, call_isolated
    from mha_deploy.threads import on_a_thread

    if not is_traced_beside(spec, options):
        return None
    about = {"title": "PyTorch's exporter", "step": "tracing"}
    return on_a_thread(partial(call_isolated, EXPORTER, traced_layer, spec, options, **about))


def traced_layer(spec: AttentionSpec, options: ExportOptions) -> bytes:
    """The graph of a layer with random weights, as a file holds it."""
    from mha_deploy.exporter.exporter import layer_graph

    return layer_graph(spec, options)


def prune_model(
    model: Model,
    out: Path,
    options: ExportOptions,
    *,
    heads: int | str | None,
    kv_heads: int | None,
    on_step: OnStep,
) -> Bundle:
    """Export a model with fewer heads; the limit of its loss and its data are those of the options."""
    from mha_deploy.exporter.compress import compressed_bundle
    from mha_deploy.exporter.prune import AUTO_HEADS, pool, prune, refuse_heads

    if (heads is None) == (kv_heads is None):
        got = "neither" if heads is None else "both"
        raise DeployError("Either heads or kv_heads is needed.", got=got, hint="--heads 8, or --kv-heads 2")
    if heads is not None and heads != AUTO_HEADS and not str(heads).isdecimal():
        raise DeployError("heads is a number, or auto.", got=heads, hint="--heads 8")
    if heads == AUTO_HEADS and options.max_loss is None:
        raise DeployError("--heads auto needs a limit.", got="no --max-loss", hint="--max-loss 0.01")
    if isinstance(model.source, AttentionSpec):  # before it is traced
        layer = {"attention": (model.source.Hq, model.source.Hkv)}
        refuse_heads(layer, heads=heads, kv_heads=kv_heads)
    limits: dict[str, Any] = {name: getattr(options, name) for name in ("max_loss", "data", "data_limit")}
    limits["metric"] = options.metric
    limits["on_step"] = uncounted(on_step)
    options = replace(options, **{name: vars(ExportOptions())[name] for name in OF_EIGHT_BITS})
    refuse_export(model, out, options, {})
    with scratch_folder() as folder:
        original = _open_original(model, options, folder, {}, on_step)
        if heads is not None:
            made = prune(original, heads, **limits)
        else:
            made = pool(original, int(kv_heads or 0), **limits)
        return compressed_bundle(original, made, out, options, on_step)


def open_counted(model: Any, axes: Mapping[str, Any] | None) -> tuple[ModelSpec, ir.Model | None]:
    """What is known of a model whose work is counted, and its graph; None for a catalog layer."""
    if isinstance(model, str | os.PathLike) and (Path(model) / MANIFEST).is_file():
        model = open_bundle(Path(model))
    if isinstance(model, Bundle):
        from mha_deploy.graph.file import load_graph

        spec = model.manifest.spec
        return spec, None if isinstance(spec, AttentionSpec) else load_graph(model.model_path)
    found = find_model(model, axes=axes)
    if isinstance(found.source, AttentionSpec):
        return found.source, None
    if (file := found.onnx_file) is not None:
        from mha_deploy.exporter.onnx_import import open_graph

        return open_graph(file, found.axes)
    with needed("Your own model is exported to count its work, which needs PyTorch.", "export"):
        from mha_deploy.exporter.exporter import open_graph as open_module
    return open_module(found.source, found.axes)


def refuse_export(model: Model, out: Path, options: ExportOptions, inputs: Mapping[str, Any]) -> None:
    """Refuse what can be refused before PyTorch is imported."""
    refuse_occupied(Path(os.path.realpath(out)), overwrite=options.overwrite)
    _refuse_unused(model, options, inputs)
    if options.precision in EIGHT_BITS:
        data = options.data
        if isinstance(data, str | Path) and str(data).strip() and not is_factory(str(data)):
            refuse_missing_data(Path(data), "a file or folder of samples, or file.py:samples")
        return
    if options.precision != AUTO:
        find_precision(options.precision)
    if given := given_of(options, OF_EIGHT_BITS):
        what = "These options need an eight-bit precision."
        hint = "--precision int8 or fp8, or leave them out"
        got = f"{', '.join(given.values())} with --precision {options.precision}"
        raise DeployError(what, got=got, hint=hint, options=("precision", *given))


def _open_original(
    model: Model, options: ExportOptions, folder: Path, inputs: dict[str, Any], on_step: OnStep
) -> Original:
    """A model as an ONNX graph in its own precision, to be compressed."""
    if (file := model.onnx_file) is not None:
        from mha_deploy.exporter.compress import original_from_onnx

        return original_from_onnx(file, options, model.axes, inputs)
    with needed("Exporting needs PyTorch and its ONNX exporter.", "export"):
        from mha_deploy.exporter.exporter import original_from_factory, original_from_spec
    if isinstance(model.source, AttentionSpec):
        return original_from_spec(model.source, options, folder, on_step)
    return original_from_factory(model.source, options, folder, model.axes, on_step)


def _refuse_unused(model: Model, options: ExportOptions, inputs: Mapping[str, Any]) -> None:
    """Refuse options that this kind of model would leave unused."""
    is_file = model.onnx_file is not None
    refused = _NOT_OF_FILE if is_file else {} if model.is_layer else _NOT_OF_MODULE
    for name, (what, hint) in refused.items():
        if given := given_of(options, (name,)):
            raise ExportError(what, got=given[name], hint=hint, options=given)
    if options.prefix and options.weights is None:
        what, hint = "--prefix needs a checkpoint.", "--weights FILE as well, or leave it out"
        raise ExportError(what, got=f"--prefix {options.prefix}", hint=hint, options=("prefix",))
    if inputs and not is_file:
        raise ExportError(
            "Only an export of an ONNX file takes --input.",
            got=", ".join(inputs),
            hint="leave --input out, or export an .onnx file",
        )


def _read_arrays(inputs: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np

    from mha_deploy.bundle.cases import numbers_in

    found = {}
    for name, given in inputs.items():
        try:
            if isinstance(given, str | os.PathLike):
                with open_regular(Path(given)) as file:
                    found[name] = np.load(file, allow_pickle=False)
            else:
                found[name] = np.asarray(given)
            if not isinstance(found[name], np.ndarray):
                raise ValueError("an archive of several arrays")
            if (numbers := numbers_in(found[name])) is None:
                raise ValueError(f"the type {found[name].dtype} is not one of numbers")
            if numbers.size == 0:
                raise ValueError(f"the shape {numbers.shape} has no numbers")
            found[name] = numbers
        except MemoryError:
            raise
        except Exception as error:  # NumPy and zipfile raise types that share no base
            raise DeployError(
                f"The file of input {name} cannot be read.",
                got=f"{given}: {error}",
                hint="a .npy file that numpy.save wrote, without objects",
            ) from error
    return found
