"""One exporter: a catalog layer or a user's module becomes a bundle."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import torch

from mha_deploy.bundle.cases import GoldenCase, write_arrays
from mha_deploy.bundle.folder import Bundle, sha256
from mha_deploy.bundle.manifest import LayersEntry
from mha_deploy.bundle.traces import DecodeTrace, PlannedTrace
from mha_deploy.errors import ExportError, exit_as_error, nearest
from mha_deploy.export.axes import ExportedModule
from mha_deploy.export.canonical import canonical_from_module, choose_opset, drop_exporter_metadata
from mha_deploy.export.flow import OnStep, Source, Steps, export_bundle
from mha_deploy.export.golden import LayerCapture, ModuleCapture, mixed_graph
from mha_deploy.export.own_model import UserModule, drawn_inputs, open_user_module, state_digest
from mha_deploy.export.plan import (
    DEVICES,
    MODULE_CASES,
    OPSETS,
    PlannedCase,
    golden_budget,
    golden_names,
    plan_golden,
)
from mha_deploy.export.program import attention_values, export_program
from mha_deploy.graph.canonical import check_canonical
from mha_deploy.graph.fuse.repair import share_tied_weights
from mha_deploy.graph.precision import write_bfloat16_as_float32
from mha_deploy.model.deployable import Deployable
from mha_deploy.model.precision import find_precision
from mha_deploy.model.spec import AttentionSpec, Axis, ModelSpec, TensorSpec
from mha_deploy.options import AUTO, ExportOptions
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import Attention
from mha_deploy.reference.inputs import fed_to, random_inputs, to_numpy
from mha_deploy.reference.weights import read_weights
from mha_deploy.runtime import available_cpu_backend, open_runner


def bundle_from_spec(
    spec: AttentionSpec,
    target: Path,
    options: ExportOptions | None = None,
    on_step: OnStep = lambda name, number, count: None,
) -> Bundle:
    """Export a catalog layer and everything needed to check it elsewhere.

    Nothing is left at `target` if anything fails.

    Args:
        spec: The layer.
        target: The folder to write.
        options: How to export.
        on_step: Called as each step begins, with its name, its number from 0, and how many there are.
    """
    return export_bundle(_LayerSource(spec, options or ExportOptions()), target, on_step)


@exit_as_error()
def bundle_from_factory(
    reference: str | Deployable,
    target: Path,
    options: ExportOptions | None = None,
    *,
    axes: Mapping[str, Axis] | None = None,
    on_step: OnStep = lambda name, number, count: None,
) -> Bundle:
    """Export a user's own module and everything needed to check it elsewhere.

    Nothing is left at `target` if anything fails.

    Args:
        reference: `path/to/file.py:factory`, `package.module:factory`, or a `Deployable`. The manifest of a
            `Deployable` names no factory: its module cannot be made again from the bundle.
        target: The folder to write.
        options: How to export.
        axes: Axis ranges in place of the factory's.
        on_step: Called as each step begins, with its name, its number from 0, and how many there are.
    """
    options = options or ExportOptions()
    try:
        return export_bundle(_ModuleSource(reference, options, axes), target, on_step)
    except ExportError as error:
        # Types and ranges are what `auto` is for: it exports the module in float32, as it is written.
        text = f"{error.what} {error.got}"
        if (
            options.precision in ("fp16", "bf16")
            and "auto" not in str(error.hint)
            and _ABOUT_TYPES.search(text)
        ):
            hint = f"--precision auto{'' if error.hint is None else f', or {error.hint}'}"
            raise ExportError(error.what, got=error.got, hint=hint) from error
        raise


_ABOUT_TYPES = re.compile(
    r"not finite|infinit|NaN|overflow|dtype|scalar type|[Ff]loat(16|32)?\b|Half\b|in fp16"
)


# -- A catalog layer -------------------------------------------------------------------------------


class _LayerSource(Source):
    """A catalog layer: its graph is canonical as the reference layer emits it."""

    module: Attention
    capture: LayerCapture

    def __init__(self, layer: AttentionSpec, options: ExportOptions) -> None:
        self.layer, self.spec, self.options, self.cache = layer, layer.model, options, layer.cache
        self.precision = find_precision("fp16" if options.precision == AUTO else options.precision)
        self.opset = choose_opset(layer, options.opset)
        self.notes, self.checks = [], {}
        self.golden = golden_names(self.spec)
        plan = plan_golden(self.spec, options.golden, golden_budget(options))  # refuses what cannot be
        self.steps = 5 + len(plan.cases) + (layer.cache != "none")

    def graph(self, folder: Path, step: Steps) -> ir.Model:
        step("weights")
        options = self.options
        if options.device not in DEVICES:
            raise ExportError("No such device.", got=options.device, hint=nearest(options.device, DEVICES))
        if options.device == "cuda" and not torch.cuda.is_available():
            raise ExportError("There is no CUDA device.", got=options.device, hint="--device cpu")
        state = None
        if options.weights is not None:
            found = read_weights(options.weights, self.layer, prefix=options.prefix, layer=options.layer)
            state, self.notes = found.state, [*found.notes]
        self.module = build_module(
            self.layer,
            seed=options.seed,
            weights=state,
            dtype=getattr(torch, self.precision.torch_name),
            device=options.device,
            path="plain",  # the eager result is the textbook's: an engine that does not fuse rounds like it
        )
        step("ONNX graph")
        return canonical_from_module(self.module, opset=self.opset)

    def check(self, path: Path, step: Steps) -> None:
        """Check the graph, and that its dynamic axes are dynamic: run it at two sizes."""
        self.checks["graph"] = check_canonical(path, self.layer, self.precision)
        step("run at two shapes")
        cases = plan_golden(self.spec, ("min", "odd")).cases
        with open_runner(available_cpu_backend(self.precision), path) as runner:
            for case in cases:
                feeds = fed_to(self.module, random_inputs(self.layer, case.sizes, seed=0))
                got = runner.run({name: to_numpy(tensor) for name, tensor in feeds.items()})
                for tensor in self.spec.outputs:
                    if got[tensor.name].shape != tensor.shape(case.sizes):
                        raise ExportError(
                            f"Output {tensor.name} does not follow the axes.",
                            got=f"{got[tensor.name].shape} at {case.sizes}",
                        )
            sizes = [case.sizes for case in cases]
            self.checks["dynamic axes"] = {"runtime": runner.name, "sizes": sizes}
        step("FP64 oracle")
        self.capture = LayerCapture(self.module, self.precision, self.options.seed)

    def captured(self, planned: PlannedCase) -> GoldenCase:
        return self.capture.capture(planned)

    def trace(self, planned: PlannedTrace) -> DecodeTrace:
        return self.capture.trace(self.spec, planned)

    def origin(self) -> str:
        weights = self.options.weights
        if weights is None:
            return f"random, seed {self.options.seed}"
        if weights.suffix == ".safetensors" and not weights.is_dir():
            return f"{weights.name}, sha256 {sha256(weights)}"
        where = self.options.prefix or f"layer {self.options.layer}"
        return f"{weights.resolve().name}, {where}, state SHA-256 {state_digest(self.module)}"


# -- A user's module -------------------------------------------------------------------------------

_LAYERS_BYTES = 1 << 30


class _ModuleSource(Source):
    """A user's module: its program is exported, and its attentions are recognised in the graph."""

    golden = MODULE_CASES
    user: UserModule
    exported: ExportedModule
    capture: ModuleCapture

    def __init__(
        self, reference: str | Deployable, options: ExportOptions, axes: Mapping[str, Axis] | None
    ) -> None:
        if options.device != "cpu":
            raise ExportError("Your own model is exported on the CPU.", got=f"--device {options.device}")
        self.reference, self.options, self.axes = reference, options, axes
        self.auto, self.opset = options.precision == AUTO, choose_opset(None, options.opset)
        self.precision = find_precision("fp16" if self.auto else options.precision)
        self.notes, self.checks = [], {}
        self.steps = 5 + self.auto + len(options.golden or self.golden)

    def graph(self, folder: Path, step: Steps) -> ir.Model:
        options = self.options
        step("factory")
        user = open_user_module(
            self.reference,
            find_precision("fp32") if self.auto else self.precision,
            seed=options.seed,
            weights=options.weights,
            prefix=options.prefix,
            axes=self.axes,
        )
        self.notes += user.notes
        step.count += bool(user.loaded.kv_cache)
        step("ONNX graph")
        exported = self.exported = exported_program(user, opset=self.opset)
        self.user = user = replace(user, loaded=user.loaded.with_axes(exported.fixed))
        self.notes += exported.notes
        step("attention")
        if self.precision.name != "bf16" and write_bfloat16_as_float32(exported.model):
            self.notes.append("what the module computes in BF16 is FP32 in the graph")
        model = self.fused(exported.model)
        share_tied_weights(model)
        self.capture = ModuleCapture(user, exported, options.seed)
        if self.auto:
            step("ranges")
            model, plan = mixed_graph(model, self.capture, folder)
            self.capture = ModuleCapture(user, exported, options.seed, model)
            self.note_precision(plan)
        self.values = attention_values(model, exported)
        self.note_places(model)
        for value in model.graph.outputs:  # shape inference may have written a sum in another order
            if (dims := exported.outputs.get(str(value.name))) is not None:
                value.shape = ir.Shape(dims)
        loaded = user.loaded
        self.spec = ModelSpec(
            name=loaded.name,
            summary=loaded.summary,
            axes=loaded.axes,
            inputs=tuple(self._tensor(value) for value in model.graph.inputs),
            outputs=tuple(self._tensor(value) for value in model.graph.outputs),
            attention_count=self.attentions,
            factory=loaded.factory,
            cached=loaded.kv_cache,
            weight_bytes=user.weight_bytes,
            state_sha256=user.state_sha256,
            seed=user.seed,
            weights_file=user.weights_file,
            weights_prefix=user.weights_prefix,
            mixed=self.auto,
        )
        drop_exporter_metadata(model)
        return model

    def _tensor(self, value: ir.Value) -> TensorSpec:
        name = str(value.name)
        dims = self.exported.outputs.get(name)
        if dims is None and value.shape is not None:
            dims = tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
        if dims is None or any(dim is None for dim in dims):
            raise ExportError(
                f"A size of output {name} is no expression of axes and numbers.",
                got=dims,
                hint="return it in a shape that follows the axes",
            )
        return self.tensor(value, tuple(dims))  # type: ignore[arg-type]

    def captured(self, planned: PlannedCase) -> GoldenCase:
        """One golden case; the spec is complete once the work of the case opt is known."""
        case = self.capture.capture(planned)
        if planned.name == "opt":
            self.spec = replace(self.spec, flops=case.flops)
        return case

    def trace(self, planned: PlannedTrace) -> DecodeTrace:
        return self.capture.trace(self.spec, planned)

    def close(self) -> None:
        if hasattr(self, "capture"):
            self.capture.close()

    def layers(self, cases: list[GoldenCase], folder: Path, step: Steps) -> LayersEntry | None:
        """The values inside the first case whose attentions do not take too much memory."""
        step("look inside")
        if not self.values:
            return None
        for case in cases:
            inside = self.capture.look_inside(case, set(self.values.values()))
            arrays = {
                f"{kind}/{name}": array for kind, values in inside.items() for name, array in values.items()
            }
            if sum(array.nbytes for array in arrays.values()) <= _LAYERS_BYTES:
                file = f"layers/{case.name}.safetensors"
                (folder / "layers").mkdir()
                write_arrays(folder / file, arrays)
                return LayersEntry(case=case.name, file=file, values=dict(self.values))
        return None

    def origin(self) -> str:
        user = self.user
        if user.weights_file is not None:
            return f"{Path(user.weights_file).name}, state SHA-256 {user.state_sha256}"
        if not user.loaded.factory:
            return f"of the exported object, state SHA-256 {user.state_sha256}"
        return f"from the factory, seed {user.seed}"


@exit_as_error()
def exported_program(user: UserModule, *, opset: int = OPSETS[0]) -> ExportedModule:
    """A module as PyTorch exports it: its graph, and the program that its FP64 oracle runs."""
    loaded = user.loaded
    examples = {name: example.tensor for name, example in loaded.inputs.items()}
    return export_program(
        user.module,
        user.rounded(examples),
        loaded.dims,
        loaded.axes,
        opset=opset,
        output_names=loaded.outputs,
        draw=lambda sizes: drawn_inputs(user, "check", sizes, seed=1),
    )
