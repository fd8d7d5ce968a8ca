"""From a user's factory to a bundle: export, recognise attention, capture golden cases, write."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_deploy.analyze.sizes import layer_flops, odd_sizes, shrunk, sizes_name
from mha_deploy.bundle import MODEL, Bundle, BundleWriter, GoldenEntry, LayersEntry, Manifest
from mha_deploy.errors import ExportError, SpecError, exit_as_error
from mha_deploy.export.attention_values import attention_values
from mha_deploy.export.canonical import choose_opset_of, drop_exporter_metadata
from mha_deploy.export.exporter import OnStep, Steps
from mha_deploy.export.module_golden import ModuleCapture
from mha_deploy.export.module_mixed import MixedCapture, mixed_graph
from mha_deploy.export.options import AUTO, OPSETS, ExportOptions
from mha_deploy.export.program import ExportedModule, export_program
from mha_deploy.export.user_module import UserModule, drawn_inputs, open_user_module
from mha_deploy.golden import GoldenCase, as_stored, polygraphy_refusal, write_case, write_polygraphy
from mha_deploy.graph.attention_node import attention_nodes, is_attention, short_dtype
from mha_deploy.graph.canonical import check_module
from mha_deploy.graph.file import load_graph, save_graph
from mha_deploy.graph.fuse import FuseReport, fuse_attention, share_tied_weights
from mha_deploy.graph.fuse.origin import place_of
from mha_deploy.graph.mixed import PrecisionPlan
from mha_deploy.module_spec import ModuleSpec
from mha_deploy.precision import Precision, find_precision
from mha_deploy.spec_parts import FLOAT, Axis, TensorSpec
from mha_deploy.versions import versions

_CASES = ("opt", "min", "odd", "large")  # opt first: it tells what the others may cost
_LAYERS_BYTES = 1 << 30
_FP16, _FP32 = "fp16", "fp32"
_SHOWN = 12  # lines of a precision plan


@exit_as_error()
def bundle_from_factory(
    reference: str,
    target: Path,
    options: ExportOptions | None = None,
    *,
    axes: Mapping[str, Axis] | None = None,
    on_step: OnStep = lambda name, number, count: None,
) -> Bundle:
    """Export a user's own module and everything needed to check it elsewhere.

    Nothing is left at `target` if anything fails.

    Args:
        reference: `path/to/file.py:factory` or `package.module:factory`.
        target: The folder to write.
        options: How to export.
        axes: Axis ranges in place of the factory's.
        on_step: Called as each step begins, with its name, its number from 0, and how many there are.
    """
    options = _checked(options or ExportOptions())
    auto, opset = options.precision == AUTO, choose_opset_of(options.opset)
    precision = find_precision(_FP16 if auto else options.precision)
    step = Steps(on_step, 5 + auto + len(options.golden or _CASES))
    with BundleWriter(target, overwrite=options.overwrite) as writer:
        step("factory")
        user = open_user_module(
            reference,
            find_precision(_FP32) if auto else precision,
            seed=options.seed,
            weights=options.weights,
            axes=axes,
        )
        step("ONNX graph")
        exported = exported_program(user, opset=opset)
        step("attention")
        model, fused = fuse_attention(exported.model)
        share_tied_weights(model)
        capture, plan = ModuleCapture(user, exported, options.seed), None
        if auto:
            step("ranges")
            model, plan = mixed_graph(model, capture, writer.path)
            capture = MixedCapture(user, exported, options.seed, model)
        work = _Work(capture, model, precision, options, writer.path, step)
        values = attention_values(model, exported)
        places = {str(node.name): place_of(node) for node in model.graph.all_nodes() if is_attention(node)}
        _write_model(model, writer.path / MODEL)
        cases, spec, notes = work.golden(_attention_count(fused))
        layers = work.layers(cases, values)
        step("hashes")
        return writer.finish(
            Manifest(
                spec=spec,
                precision=precision,
                opset=opset,
                weights=_origin(user),
                attention=_described(writer.path / MODEL, places),
                golden=[
                    GoldenEntry(name=c.name, file=f"golden/{c.name}.npz", sizes=dict(c.sizes), flops=c.flops)
                    for c in cases
                ],
                checks={
                    "graph": check_module(writer.path / MODEL, spec, precision),
                    **({} if plan is None else {"mixed precision": plan.describe()}),
                },
                versions=versions(),
                notes=[*_unfused_notes(fused), *_plan_notes(plan), *notes],
                layers=layers,
            )
        )


def _checked(options: ExportOptions) -> ExportOptions:
    if options.device != "cpu":
        raise ExportError("Your own model is exported on the CPU.", got=f"--device {options.device}")
    return options


@exit_as_error()
def exported_program(user: UserModule, *, opset: int = OPSETS[0]) -> ExportedModule:
    """A module as PyTorch exports it: its graph, and the program that tells what is true of it."""
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


def _attention_count(fused: FuseReport) -> int:
    return len(fused.fused) + len(fused.already) + len(fused.unfused)


def _unfused_notes(fused: FuseReport) -> list[str]:
    return [
        f"{each.name} is not fused: {each.reason}" + (f" ({each.place})" if each.place else "")
        for each in fused.unfused
    ]


def _plan_notes(plan: PrecisionPlan | None) -> list[str]:
    if plan is None:
        return []
    lines = plan.lines()
    head = f"mixed precision: {len(plan.kept)} of {plan.nodes} nodes are wider than fp16"
    more = [f"and {len(lines) - _SHOWN} more: see the manifest"] if len(lines) > _SHOWN else []
    return [head, *lines[:_SHOWN], *more]


def _write_model(model: ir.Model, path: Path) -> None:
    drop_exporter_metadata(model)
    save_graph(model, path)
    gc.collect()  # the exporter's program holds weights in reference cycles


def _described(path: Path, places: Mapping[str, str | None]) -> list[dict[str, Any]]:
    nodes = attention_nodes(load_graph(path))
    return [{**node.describe(), "place": places.get(node.name)} for node in nodes]


def _origin(user: UserModule) -> str:
    if user.weights_file is None:
        return f"from the factory, seed {user.seed}"
    return f"{Path(user.weights_file).name}, state SHA-256 {user.state_sha256}"


class _Work:
    """The golden part of one export."""

    def __init__(
        self,
        capture: ModuleCapture,
        graph: ir.Model,
        precision: Precision,
        options: ExportOptions,
        folder: Path,
        step: Steps,
    ) -> None:
        self.capture, self.graph, self.precision = capture, graph, precision
        self.user, self.exported = capture.user, capture.exported
        self.options, self.folder, self.step = options, folder, step

    def golden(self, attentions: int) -> tuple[list[GoldenCase], ModuleSpec, list[str]]:
        """Capture and write the golden cases; the spec is complete once the first has told its work."""
        spec, notes, cases = self._spec(attentions, flops=0), list[str](), list[GoldenCase]()
        (self.folder / "golden").mkdir()
        for name in self.options.golden or _CASES:
            self.step(f"golden {name}")
            sizes = self._sizes(name, spec)
            if isinstance(sizes, str):
                notes.append(sizes)
                continue
            if any(case.sizes == sizes for case in cases):
                notes.append(f"no {name} case: its sizes are those of another")
                continue
            label = name if "=" not in name else sizes_name(sizes)
            case = self.capture.capture(label, sizes)
            cases.append(case)
            write_case(self.folder / "golden" / f"{label}.npz", case)
            if name == "opt":
                spec = self._spec(attentions, flops=case.flops)
        if not cases:
            raise ExportError("No golden case is left.", got="; ".join(notes), hint="--golden opt")
        self._polygraphy(cases, spec, notes)
        return cases, spec, notes

    def _spec(self, attentions: int, flops: int) -> ModuleSpec:
        loaded, user = self.user.loaded, self.user
        return ModuleSpec(
            name=loaded.name,
            factory=loaded.factory,
            axes=loaded.axes,
            tensors_in=tuple(self._tensor(value) for value in self.graph.graph.inputs),
            tensors_out=tuple(self._tensor(value) for value in self.graph.graph.outputs),
            attentions=attentions,
            flops=flops,
            weight_bytes=user.weight_bytes,
            state_sha256=user.state_sha256,
            seed=user.seed,
            weights_file=user.weights_file,
            mixed=self.options.precision == AUTO,
            summary=loaded.summary,
        )

    def _tensor(self, value: ir.Value) -> TensorSpec:
        name, kind = str(value.name), short_dtype(value.dtype)
        dims = self.exported.outputs.get(name)
        if dims is None and value.shape is not None:
            dims = tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
        if dims is None or any(dim is None for dim in dims):
            raise ExportError(
                f"A size of output {name} is not a sum of axes and numbers.",
                got=dims,
                hint="give it out in a shape that follows the axes",
            )
        own = kind == self.precision.name
        return TensorSpec(name=name, kind=FLOAT if own else _KINDS.get(kind, kind), dims=tuple(dims))  # type: ignore[arg-type]

    def _sizes(self, name: str, spec: ModuleSpec) -> dict[str, int] | str:
        if name in ("min", "opt"):
            return spec.sizes(name)
        if name == "odd":
            return odd_sizes(spec.axes)
        if "=" in name:
            return spec.parse_sizes(name)
        if name != "large":
            raise SpecError("No such golden case.", got=name, hint=f"{', '.join(_CASES)}, or sizes")
        sizes = shrunk(spec, spec.sizes("max"), spec.sizes("min"), self.options.budget)
        if not spec.flops:
            return "no large case: without opt before it nobody knows what it costs"
        if layer_flops(spec, sizes) <= spec.flops:
            return f"no large case: nothing larger than opt fits {self.options.budget}"
        return sizes

    def _polygraphy(self, cases: list[GoldenCase], spec: ModuleSpec, notes: list[str]) -> None:
        refusal = polygraphy_refusal(spec, self.precision)
        if refusal is None:
            write_polygraphy(self.folder / "golden" / "polygraphy", cases)
        else:
            notes.append(refusal)

    def layers(self, cases: list[GoldenCase], values: Mapping[str, str]) -> LayersEntry | None:
        """Look inside the first case whose attentions do not take too much room."""
        self.step("look inside")
        if not values:
            return None
        for case in cases:
            insight = self.capture.look_inside(case, set(values.values()))
            arrays = {
                **{f"oracle/{name}": array for name, array in insight.oracle.items()},
                **{f"eager/{name}": as_stored(array) for name, array in insight.eager.items()},
            }
            if sum(array.nbytes for array in arrays.values()) <= _LAYERS_BYTES:
                (self.folder / "layers").mkdir()
                np.savez(self.folder / "layers" / f"{case.name}.npz", **arrays)  # type: ignore[arg-type]
                return LayersEntry(case=case.name, file=f"layers/{case.name}.npz", values=dict(values))
        return None


_KINDS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
