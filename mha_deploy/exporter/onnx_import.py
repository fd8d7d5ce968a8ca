"""An ONNX file of any origin to a bundle: fused, with drawn inputs and an FP64 reference, without PyTorch."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import cached_property, partial
from itertools import chain, combinations, pairwise, product
from pathlib import Path
from zlib import crc32

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveInitializersFromInputsPass

from mha_deploy.bundle.cases import (
    Arrays,
    Baseline,
    DecodeTrace,
    GoldenCase,
    PlannedTrace,
    Reference,
    check_steps,
    pack_baselines,
    refuse_implausible_case,
    run_calls,
    write_arrays,
)
from mha_deploy.bundle.folder import sha256
from mha_deploy.bundle.manifest import LayersEntry, Manifest, Source
from mha_deploy.bundle.sizes import MODULE_CASES, PlannedCase, is_mask, sizes_name
from mha_deploy.errors import (
    BackendUnavailable,
    BundleError,
    DeployError,
    ExportError,
    SpecError,
    nearest,
)
from mha_deploy.exporter.file_program import FileProgram, FileRounding
from mha_deploy.exporter.flow import LAYERS_BYTES, ExportSource, are_finite, refuse_large_error
from mha_deploy.exporter.observe import attention_values
from mha_deploy.exporter.samples import sample_case, sample_parts
from mha_deploy.graph.attention_node import short_dtype
from mha_deploy.graph.file import load_graph, with_outputs
from mha_deploy.graph.fuse import from_old_opset, in_onnx_operators
from mha_deploy.graph.fuse.values import infer_sizes, put_sizes
from mha_deploy.graph.ir import (
    constant_ints,
    constant_number,
    infer_shapes,
    input_at,
    is_op,
    is_random,
    made_by,
    node_name,
    nodes_behind,
)
from mha_deploy.graph.quantize import with_plain_biases
from mha_deploy.graph.roles import MOVES
from mha_deploy.graph.valid import inline_functions
from mha_deploy.model.precision import PRECISIONS, find_precision
from mha_deploy.model.spec import (
    FLOAT,
    Axes,
    Axis,
    Dim,
    ModelSpec,
    ModuleSpec,
    TensorSpec,
    is_past,
    size_of,
    sum_of,
    terms_of,
)
from mha_deploy.options import AUTO, ExportOptions
from mha_deploy.runtime import open_runner
from mha_deploy.runtime.child import RuntimeCrash
from mha_deploy.runtime.runner import Runner
from mha_deploy.runtime.user_code import graph_code

_NEWEST_IR = 10  # newer files only declare it: no runtime here needs what came with it
_BATCH, _LENGTH = Axis(min=1, opt=2, max=8), Axis(min=1, opt=16, max=64)
# The file itself in its own precision is not far from its FP64 reference.
_LARGEST_ERROR = 0.25
# Nor is the file with ONNX's operators far from that with ONNX Runtime's: both round in its precision.
_WRITTEN_OUT_ERROR = {"fp32": 1e-3, "fp16": 0.05, "bf16": 0.25}
_MOST_HALVED = 4  # times that drawn numbers are halved
_TOKEN_AXES = ("S", "tokens", "new_tokens")  # names for the axis of a token that comes alone
_HIDES = 1000.0  # a mask number is at least so large
_MULTIPLES = (2, 4, 8, 16, 32)  # that lengths are tried at: patches, and layers that halve an image
_LARGEST_TIE, _MOST_TIES = 256, 8  # sizes of weights, or in a Reshape, that an axis is tried at

# What it writes, "?" where that is computed, and the sizes of axes at which the file runs
_FixedReshape = tuple[ir.Node, tuple[int | str, ...], dict[str, int]]


class _Extreme(ExportError):
    """The file itself has no finite result on drawn numbers, and does in FP64."""


def _part(names: Sequence[str]) -> Callable[[Arrays], Arrays]:
    """Takes the results of these names."""
    return lambda results: {name: results[name] for name in names}


class OnnxSource(ExportSource):
    """An ONNX file: its result in ONNX Runtime stands for the eager model, its FP64 copy is the oracle.

    With `auto` a float32 file becomes FP16, with FP32 where FP16 overflows; other files keep their precision.
    Examples of inputs are sliced or repeated at other sizes; the other inputs are drawn.
    """

    spec: ModuleSpec
    draws_numbers = True  # whether inputs without an example are drawn
    batch = "B"  # the axis of the batch
    _hiding = frozenset[str]()  # masks that are drawn with true entries for keys that are hidden
    # Of the first case: its name, the values behind attentions in FP64, and samples of them.
    _inside: tuple[str, Arrays, dict[str, Baseline]] | None = None

    def __init__(
        self, path: Path, options: ExportOptions, axes: Axes, inputs: Mapping[str, np.ndarray]
    ) -> None:
        self.path, self.options, self.examples = path, options, inputs
        self.notes, self.checks = [], {}
        self.title, self.summary = path.stem, f"imported from {path.name}"
        model = load_graph(path)
        RemoveInitializersFromInputsPass()(model)  # older files list the weights as inputs too
        self._given = from_old_opset(inline_functions(model))
        self._given.ir_version = min(self._given.ir_version, _NEWEST_IR)
        _sort_selections(self._given)
        self.original = in_onnx_operators(self._given)
        _refuse_random(self.original)
        own = _precision_of(self.original)
        # A float32 file in FP16 is converted node by node: what FP16 cannot hold stays wider.
        self.auto = own == "fp32" and options.precision in (AUTO, "fp16")
        if not self.auto and options.precision not in (AUTO, own):
            hint = f"--precision {own}" + (", or auto for FP16 where it holds the values" * (own == "fp32"))
            got = f"{own}, not {options.precision}"
            raise ExportError("The file has another precision.", got=got, hint=hint)
        self.precision = find_precision("fp16" if self.auto else own)
        if unknown := [name for name in inputs if name not in self._inputs]:
            hint = nearest(unknown[0], self._inputs)
            raise ExportError("The file has no such input.", got=unknown[0], hint=hint)
        for name, array in inputs.items():
            if array.dtype.kind in "fcV" and (wanted := self._inputs[name].dtype) and wanted.is_integer():
                what = f"Input {name} of the file takes whole numbers."
                raise ExportError(
                    what, got=array.dtype, hint=f"{short_dtype(wanted)}, as numpy.save wrote it"
                )
        self.dims, self.axes = _named_axes(self._inputs, axes)
        for name, array in inputs.items():
            _refuse_shape(name, array, self.dims[name])
        self.chosen = frozenset(axes)  # the axes that the user chose
        self.steps = 5 + self.auto + len(options.golden or MODULE_CASES)

    @classmethod
    def reopened(cls, path: Path, manifest: Manifest) -> OnnxSource:
        """The file that a bundle was imported from, over the axes and in the precision of the bundle."""
        spec = manifest.spec
        source = cls(path, ExportOptions(precision=AUTO if spec.mixed else manifest.precision.name), {}, {})
        source.dims, source.axes = {each.name: each.dims for each in spec.inputs}, dict(spec.axes)
        source.precision, source.batch = manifest.precision, spec.batch_name
        return source

    @cached_property
    def _inputs(self) -> dict[str, ir.Value]:
        return {str(value.name): value for value in self.original.graph.inputs}

    def as_taken(self) -> ModelSpec:
        """The inputs and axes of the file, before anything of it was run."""
        kinds = {name: short_dtype(value.dtype) or "unknown" for name, value in self._inputs.items()}
        inputs = tuple(
            TensorSpec(name=name, kind=self.kind_of(kind), dims=self.dims[name])
            for name, kind in kinds.items()
        )
        return ModuleSpec(name=self.title, axes=self.axes, inputs=inputs, outputs=(), attention_count=0)

    def graph(self, folder: Path) -> ir.Model:
        """The graph of the file, with its attention fused."""
        self.step("output shapes")
        outputs = self._output_dims()
        self._refuse_other_result()
        self.step("attention")
        model = self.fused()
        cached = self._find_cache(outputs)
        if self.auto:
            model = self.mixed(model, self.axes, folder)
        for value in model.graph.inputs:
            value.shape = ir.Shape(self.dims[str(value.name)])
        self.model, self.opset = model, int(model.graph.opset_imports[""])
        self.describe(
            model,
            outputs,
            name=self.title,
            axes=self.axes,
            cached=cached,
            state_sha256=sha256(self.path),
            seed=self.options.seed,
            summary=self.summary,
        )
        return model

    def fused(self) -> ir.Model:
        """The graph of the file, with its attention fused.

        An axis of one size is that number in it: attention is compared with its original at no other.
        """
        model, numbers = with_plain_biases(self.original.clone()), dict[str, int]()
        fixed = {name: axis.opt for name, axis in self.axes.items() if not axis.is_dynamic}
        for value in model.graph.inputs:
            sizes = [fixed.get(str(dim), dim) for dim in self.dims[str(value.name)]]
            pairs = list(zip(value.shape or (), sizes, strict=True))
            value.shape = ir.Shape(size if isinstance(size, int) else own for own, size in pairs)
            named = ((own.value, size) for own, size in pairs if isinstance(own, ir.SymbolicDim))
            numbers |= {name: size for name, size in named if name and isinstance(size, int)}
        if numbers:
            stated = [value.shape for value in model.graph.outputs]  # a name there may be of another size
            put_sizes(model, numbers)
            for value, shape in zip(model.graph.outputs, stated, strict=True):
                value.shape = shape
        return self.fuse(model)

    def capture_case(self, planned: PlannedCase) -> GoldenCase:
        """One golden case, on inputs that are drawn."""
        case = self.moderate_case(planned, self._graph_types())
        for tensor in self.spec.outputs:
            if (shape := case.eager[tensor.name].shape) != tensor.shape(case.sizes):
                what = f"Output {tensor.name} has other sizes than those that its axes give."
                got = f"{list(shape)}, not [{', '.join(map(str, tensor.dims))}], at {sizes_name(case.sizes)}"
                raise ExportError(what, got=got, hint="--axis NAME=N fixes an axis")
        if case.name == "opt":
            self.spec = replace(self.spec, flops=case.flops)
        return case

    def moderate_case(self, planned: PlannedCase, types: Mapping[str, np.dtype]) -> GoldenCase:
        """A case; where float32 has no result on the drawn numbers, or loses too much, on smaller ones.

        A sigmoid that is 0 in a runtime, and its logarithm, say nothing of the model: real inputs are within
        the range that it was trained on.
        """
        first: DeployError | None = None
        for halved in range(_MOST_HALVED + 1):
            try:
                drawn = self.draw(planned, 2.0**-halved)
                case = self.case_of(planned.name, planned.sizes, drawn, types)
                refuse_implausible_case(case, self.precision)
            except (_Extreme, BundleError) as error:
                first = first or error
                if planned.masks or not self.draws_numbers or self.examples.keys() >= self._inputs.keys():
                    break
                continue
            if first is not None:
                what = f"{first.what} {first.got}"
                self.notes.append(f"{planned.name}: drawn numbers are divided by {2**halved}: {what}")
            return case
        raise first or ExportError(
            "No inputs can be drawn for this case.", got=planned.name, hint="--input NAME=FILE.npy"
        )

    def case_of(
        self, name: str, sizes: Mapping[str, int], drawn: Arrays, types: Mapping[str, np.dtype]
    ) -> GoldenCase:
        """A case from inputs in the types of the file; `types` are those of the graph."""
        given = {key: array.astype(types[key]) for key, array in drawn.items()}
        # The file gets the numbers that the graph gets.
        drawn = {key: given[key].astype(array.dtype) for key, array in drawn.items()}
        try:
            compute = partial(self._program.run, given)
            first = self._inside is None or self._inside[0] == name  # it may be tried again
            parts = [_part(self._results), *([_part(self._behind)] if first and self._behind else [])]
            with graph_code(str(self.path)):
                whole, lazy, exact = sample_parts(FileRounding, self.precision, compute, parts)
                oracle, *others = (part(whole) for part in parts)
                baselines, *more = map(dict, lazy)
            eager = {key: array.astype(types[key]) for key, array in self._session.run(drawn).items()}
        except DeployError:
            raise
        except Exception as error:  # ONNX's evaluator raises types that share no base
            what = f"The file cannot be evaluated at the sizes of golden case {name}."
            hint = "other --axis ranges, or --input NAME=FILE.npy for inputs that cannot be drawn"
            raise ExportError(what, got=f"{type(error).__name__}: {error}", hint=hint) from error
        what = "ONNX Runtime does not compute what the file says in FP64."
        hint = "--input NAME=FILE.npy with real inputs, or --precision of the file"
        for key, array in eager.items():
            if not np.isfinite(array).all() and np.isfinite(oracle[key]).all():
                got = f"output {key} of golden case {name}: NaN or infinite values"
                raise _Extreme(what, got=got, hint=hint, about_types=True)
        if not are_finite(oracle):  # in FP64: another precision has no result either
            masks = [key for key, array in given.items() if is_mask(key, array.dtype.name)]
            hint = "--input NAME=FILE.npy with real inputs"
            if masks:
                hint = f"--input {masks[0]}=FILE.npy, a mask in which every query has a key to attend to"
        refuse_large_error(f"golden case {name}", eager, oracle, _LARGEST_ERROR, what, hint)
        reference = Reference(oracle, Source.FILE)
        if others:
            self._inside = name, others[0], more[0]
        return GoldenCase(
            name=name,
            sizes=sizes,
            inputs=given,
            oracle=reference,
            eager=eager,
            baselines=baselines,
            batch=self.batch,
            flops=exact.flops,
        )

    def _graph_types(self) -> dict[str, np.dtype]:
        """The types of the inputs and outputs in the graph."""
        graph = self.model.graph if self.auto else self.original.graph
        values = (*graph.inputs, *graph.outputs)
        return {str(value.name): value.dtype.numpy() for value in values if value.dtype is not None}

    def file_types(self) -> dict[str, np.dtype]:
        """The types of the inputs in the file."""
        return {name: value.dtype.numpy() for name, value in self._inputs.items() if value.dtype is not None}

    def layers(self, cases: list[GoldenCase], folder: Path) -> LayersEntry | None:
        """Values of the file behind every attention, in the first case where they are finite and small."""
        self.step("results of each attention")
        values, kept = self._values, self._behind
        types = {
            str(v.name): v.dtype.numpy() for n in self.model.graph for v in n.outputs if v.dtype is not None
        }
        for case in cases if kept else ():
            if self._inside is not None and self._inside[0] == case.name:
                _, oracle, baselines = self._inside
            else:
                with graph_code(str(self.path)):
                    compute = partial(self._program.run, case.inputs)
                    oracle, (lazy,), _ = sample_parts(FileRounding, self.precision, compute, [_part(kept)])
                    baselines = dict(lazy)
            if not are_finite(oracle):
                continue
            self.close()  # one with these outputs is opened
            with open_runner("ort-cpu", with_outputs(self._typed, kept)) as runner:
                given = {str(v.name): case.inputs[str(v.name)] for v in self.original.graph.inputs}
                got = runner.run({k: x.astype(self._inputs[k].dtype.numpy()) for k, x in given.items()})  # type: ignore[union-attr]
            arrays = {f"oracle/{name}": oracle[name] for name in kept}
            # A graph with the types of the file need not state them.
            arrays |= {f"eager/{name}": got[name].astype(types.get(name, got[name].dtype)) for name in kept}
            arrays |= pack_baselines(baselines)
            if sum(array.nbytes for array in arrays.values()) <= LAYERS_BYTES:
                file = f"layers/{case.name}.safetensors"
                write_arrays(folder / file, arrays)
                return LayersEntry(case=case.name, file=file, values=values, source=Source.FILE)
        return None

    def origin(self) -> str:
        """The file, with its hash."""
        return f"{self.path.name}, SHA-256 {self.spec.state_sha256}"

    def close(self) -> None:
        """End the runtime of the file."""
        if (session := vars(self).pop("_session", None)) is not None:
            session.close()

    def draw(self, planned: PlannedCase, scale: float = 1.0) -> dict[str, np.ndarray]:
        """The inputs of a case, in the types of the file; floats that are drawn times the scale."""
        seed = crc32(f"{self.options.seed} {planned.name}".encode())
        drawn = {}
        for key, value in self._inputs.items():
            shape = TensorSpec(name=key, kind=FLOAT, dims=self.dims[key]).shape(planned.sizes)
            random = np.random.default_rng([seed, crc32(key.encode())])
            example = self.examples.get(key)
            array = _draw(value, shape, random) if example is None else _fit(example, shape)
            if key in self._hiding:
                array = np.logical_not(array)
            if example is None and array.dtype.kind == "f":
                array = array * scale
            array = array.astype(value.dtype.numpy())  # type: ignore[union-attr]
            drawn[key] = planned.change(key, array, self.dims[key])
        return drawn

    @cached_property
    def _session(self) -> Runner:
        """The file itself in ONNX Runtime, with its own operators."""
        return open_runner("ort-cpu", self._given)

    @cached_property
    def _typed(self) -> ir.Model:
        """The file with the types of all values, which it need not state."""
        return infer_shapes(self.original.clone())

    @cached_property
    def _program(self) -> FileProgram:
        """The file as it was given, in FP64."""
        return FileProgram(self._typed, self._behind) if self._behind else FileProgram(self.original)

    @cached_property
    def _values(self) -> dict[str, str]:
        """For every attention of the graph the value of the file behind it; none before there is a graph."""
        own = {str(value.name) for node in self.original.graph for value in node.outputs}
        model = vars(self).get("model")
        return {} if model is None else attention_values(model, own.__contains__, self.unfused)

    @property
    def _behind(self) -> list[str]:
        return sorted(set(self._values.values()))

    @property
    def _results(self) -> list[str]:
        return [str(value.name) for value in self.original.graph.outputs]

    def _run_at(self, start: int, *, reverse: bool = False) -> tuple[dict[str, int], Arrays]:
        """Sizes of the axes, and what the file gives there."""
        # Every axis and every sum of two axes has a size of its own, if possible.
        names = list(reversed(self.axes)) if reverse else list(self.axes)
        wanted = {name: self.axes[name].min + 1 + start + 3 * at for at, name in enumerate(names)}
        sizes = {name: min(wanted[name], axis.max) for name, axis in self.axes.items()}
        try:
            return sizes, self._session.run(self.draw(PlannedCase(name=f"shape {start}", sizes=sizes)))
        except BackendUnavailable:
            raise  # ONNX Runtime cannot run the file at any size
        except DeployError as error:
            hint = "--axis NAME=N for an axis that is fixed in the file, or a range of multiples of what it "
            hint += "needs, such as 16:64:128; --input NAME=FILE.npy"
            raise ExportError(
                "The file does not run at these sizes.",
                got=f"{sizes_name(sizes)}: {error.in_one_line}",
                hint=error.hint if isinstance(error, RuntimeCrash) else hint,
            ) from error

    def _refuse_other_result(self) -> None:
        """Refuse a file whose operators of ONNX Runtime's own compute something else, written out."""
        if self.original is self._given:
            return
        sizes, wanted = self._run_at(0)
        with open_runner("ort-cpu", self.original) as runner:
            got = runner.run(self.draw(PlannedCase(name="shape 0", sizes=sizes)))
        finite = dict[str, np.ndarray]()
        for name, array in wanted.items():
            if array.dtype.kind == "f" and got[name].shape == array.shape:
                # Where the file itself has no finite result, there is nothing to compare.
                got[name] = np.where(np.isfinite(array), got[name], 0)
            if array.dtype.kind == "f":
                finite[name] = np.where(np.isfinite(array), array, 0)
        what = "Written in ONNX's operators, ONNX Runtime's own compute something else."
        hint = "the file that ONNX Runtime's optimizer was given"
        most = _WRITTEN_OUT_ERROR[_precision_of(self.original)]
        refuse_large_error(f"sizes {sizes_name(sizes)}", got, finite, most, what, hint)
        self.notes.append("operators of ONNX Runtime's own are written out in ONNX's")

    def _fails(self) -> ExportError | None:
        """Why the file does not run where axes differ, in either order of their sizes; None where it does."""
        try:
            for start, reverse in ((0, False), (1, False), (0, True)):
                self._run_at(start, reverse=reverse)
        except ExportError as error:
            return None if isinstance(error.__cause__, RuntimeCrash) else error
        return None

    def _tie_axes(self) -> None:
        """Find axes that must be as large as others, or as a weight, where the file says nothing of it."""
        own = [name for name in self.axes if name not in self.chosen]
        if self._fails() is None or (not own and self._runs_at_multiples()):
            return
        before, batches = (self.dims, self.axes), {name for name, axis in self.axes.items() if axis == _BATCH}
        weights = (each.shape for each in self.original.graph.initializers.values() if each.shape)
        numbers = sorted({size for shape in weights for size in shape if isinstance(size, int)})
        numbers = [each for each in numbers if 1 < each <= _LARGEST_TIE][:_MOST_TIES]
        tried: list[dict[str, str | int]] = []
        pairs = [(name, other) for name in reversed(own) for other in self.axes if other != name]
        # A length is that of another, or of a weight, rather than the batch.
        alike = [pair for pair in pairs if (pair[0] in batches) == (pair[1] in batches)]
        tried += ({name: other} for name, other in alike)
        lengths = [name for name in own if self.axes[name] != _BATCH]
        # All tokens are those in the cache and the new ones. A number may only happen to be long enough.
        tried += (
            {name: f"{first}+{second}"}
            for name in lengths
            for first, second in combinations([each for each in self.axes if each not in (name, *batches)], 2)
        )
        tried.append({})  # none: larger sizes may do
        tried += ({name: number} for name in own for number in numbers)
        tried += ({name: other} for name, other in pairs if (name, other) not in alike)
        if len(lengths) > 2:
            tried.append(dict.fromkeys(lengths[1:], lengths[0]))
        for ties in tried:
            self.dims, self.axes = _tied(*before, ties)
            if not ties and (self._runs_with_more(lengths) or self._runs_at_multiples()):
                return
            if self._fails() is None:
                for name in [each for each in ties if len(ties) > 1]:  # as few as suffice
                    fewer = {each: other for each, other in ties.items() if each != name}
                    self.dims, self.axes = _tied(*before, fewer)
                    ties = fewer if self._fails() is None else ties
                self.dims, self.axes = _tied(*before, ties)
                shown = ", ".join(f"{name} = {other}" for name, other in ties.items())
                hint = f"--axis {next(iter(ties))}=N chooses another"
                self.notes.append(f"the file runs only where sizes agree: {shown}; {hint}")
                return
        self.dims, self.axes = before

    def _runs_with_more(self, lengths: Sequence[str]) -> bool:
        """Raise the least sizes of axes where the file runs with larger ones only; whether it does."""
        before, most = self.axes, _LENGTH.opt
        self.axes = {**before, **{name: replace(before[name], min=most) for name in lengths}}
        if not lengths or self._fails() is not None:
            self.axes = before
            return False
        for least in range(most, 0, -1):
            sizes = {name: least if name in lengths else axis.opt for name, axis in self.axes.items()}
            try:
                self._session.run(self.draw(PlannedCase(name=f"length {least}", sizes=sizes)))
            except DeployError:
                break
            self.axes = {**before, **{name: replace(before[name], min=least) for name in lengths}}
        shown = ", ".join(f"{name} = {self.axes[name].min}" for name in lengths)
        hint = f"--axis {lengths[0]}=min:opt:max chooses another range"
        self.notes.append(f"the file does not run at fewer than {shown}; {hint}")
        return True

    def _runs_at_multiples(self) -> bool:
        """Let lengths be multiples, as patches of images need them, where the file runs at no other size.

        A range that the user chose is one of sizes: all of them must be multiples, and are divided.
        """
        before, first = (self.dims, self.axes), {dims[0] for dims in self.dims.values() if dims}
        every = [name for name, axis in self.axes.items() if axis.is_dynamic and name not in first]

        def divided(name: str, times: int) -> Axis | None:
            sizes = astuple(before[1][name])
            if name in self.chosen:
                parts = [size // times for size in sizes if size % times == 0]
                return Axis(min=parts[0], opt=parts[1], max=parts[2]) if len(parts) == len(sizes) else None
            return Axis(min=1, opt=max(sizes[1] // times, 2), max=max(sizes[2] // times, 8))

        def fails(times: int, names: Sequence[str], more: str = "") -> bool:
            multiples: dict[str, str | int] = {name: f"{times}*{name}{more}" for name in names}
            self.dims, self.axes = _tied(before[0], {}, multiples)[0], dict(before[1])
            self.axes |= {name: axis for name in names if (axis := divided(name, times)) is not None}
            return self._fails() is not None

        for times in _MULTIPLES:
            lengths = [name for name in every if divided(name, times) is not None]
            if not lengths or fails(times, lengths):
                continue
            names = list(lengths)
            for name in lengths:  # as few as suffice
                fewer = [each for each in names if each != name]
                names = names if fails(times, fewer) else fewer
            if not names or not all(fails(times, names, f"+{more}") for more in range(1, times)):
                break  # it needs larger sizes, and no multiples
            self.dims, self.axes = before
            fixed = _fixed_reshape(self._typed, self.axes) or self._partly_fixed_reshape()
            if fixed is not None and times not in fixed[2].values():
                break  # it was made for one size, to which these happen to be reshaped
            fails(times, names)
            shown = ", ".join(f"{times}*{name}" for name in names)
            hint = f"--axis {names[0]}=min:opt:max, in multiples of {times}, chooses other sizes"
            self.notes.append(f"the file runs only at multiples, so its sizes are {shown}; {hint}")
            return True
        self.dims, self.axes = before
        return False

    def run_at_sizes(self) -> list[tuple[dict[str, int], Arrays]]:
        """What the file gives at several sizes of its axes; refuses a file that does not run there."""
        self._tie_axes()
        try:
            measured = [self._run_at(start) for start in (0, 1)]
        except ExportError as error:
            if isinstance(error.__cause__, RuntimeCrash):
                raise
            fixed = _fixed_reshape(self._typed, self.axes) or self._partly_fixed_reshape()
            if fixed is None:
                raise
            node, written, found = fixed
            chosen = " ".join(f"--axis {name}={size}" for name, size in found.items()) or "--axis NAME=N"
            raise ExportError(
                "The file does not run at these sizes: it has a Reshape to fixed sizes.",
                got=f"Reshape {node_name(node)} to [{', '.join(map(str, written))}]; at {error.got}",
                hint=f"{chosen}, or write the file again with dynamic sizes in its Reshape; "
                "torch.onnx.export does so with dynamo=True and dynamic_shapes",
            ) from error.__cause__
        with suppress(ExportError):  # sizes that the user chose may have to agree
            measured.append(self._run_at(0, reverse=True))
        if self.draws_numbers and not all(are_finite(results) for _, results in measured):
            self.choose_masks()
        return measured

    def choose_masks(self) -> bool:
        """Draw masks the other way around, where the file has a finite result only then; whether it has.

        A true entry keeps a key in most files; in PyTorch's `key_padding_mask` it hides one.
        """
        masks, sizes = self._masks_drawn(), {name: axis.opt for name, axis in self.axes.items()}
        if self._hiding or not masks:
            return False
        program, planned = FileProgram(self.original), PlannedCase(name="opt", sizes=sizes)
        tried: list[tuple[str, ...]] = [(), *((name,) for name in masks), masks]

        def has_result(names: Iterable[str]) -> bool:
            self._hiding = frozenset(names)
            return are_finite(program.run(self.draw(planned)))

        with suppress(Exception):  # ONNX's evaluator raises types that share no base: the case says so
            found = next(filter(has_result, tried), ())
            if found:
                shown = ", ".join(found)
                self.notes.append(f"true entries of drawn masks hide keys, else a result is NaN: {shown}")
                return True
        self._hiding = frozenset()
        return False

    def _masks_drawn(self) -> tuple[str, ...]:
        """The inputs that are masks and have no example."""
        return tuple(
            name
            for name, value in self._inputs.items()
            if name not in self.examples and _is_drawn_mask(value, len(self.dims[name]))
        )

    def _partly_fixed_reshape(self) -> _FixedReshape | None:
        """The first Reshape to fixed and computed sizes that an axis explains: the file runs at that size."""
        numbers = dict[int, tuple[ir.Node, tuple[int | str, ...]]]()
        for node in self._typed.graph:
            sizes = made_by(input_at(node, 1), "Concat") if is_op(node, "Reshape") else None
            if sizes is not None:
                parts = (constant_ints(sizes, at) or ("?",) for at in range(len(sizes.inputs)))
                written = tuple[int | str, ...](chain.from_iterable(parts))
                fixed = (each for each in written if isinstance(each, int) and 1 < each <= _LARGEST_TIE)
                for number in fixed:
                    numbers.setdefault(number, (node, written))
        before, axes = (self.dims, self.axes), [name for name in self.axes if self.axes[name].is_dynamic]
        try:
            for (number, (node, written)), name in product(list(numbers.items())[:_MOST_TIES], axes):
                self.dims, self.axes = _tied(*before, {name: number})
                if self._fails() is None:
                    return node, written, {name: number}
        finally:
            self.dims, self.axes = before
        return None

    def _output_dims(self) -> dict[str, tuple[Dim, ...]]:
        """The dimensions of the outputs, found by running the file, and from what it says of them."""
        measured, dims = self.run_at_sizes(), {}
        for value in self.original.graph.outputs:
            name = str(value.name)
            shapes = [(sizes, got[name].shape) for sizes, got in measured]
            dims[name] = tuple(
                _dim(name, [(sizes, shape[at]) for sizes, shape in shapes], self.axes, said)
                for at, said in enumerate(self._said_of(value, at) for at in range(len(shapes[0][1])))
            )
        return dims

    def _said_of(self, value: ir.Value, at: int) -> Iterator[str]:
        """What a size of an output is by the file, and by the sizes that follow from those of the inputs."""
        for stated in (value.shape, self._inferred[str(value.name)]):
            if stated is not None and at < len(stated):
                yield str(stated[at])

    @cached_property
    def _inferred(self) -> dict[str, ir.Shape | None]:
        """The sizes of the outputs as they follow from those of the inputs."""
        model = self.original.clone()
        for value in model.graph.inputs:
            value.shape = ir.Shape(self.dims[str(value.name)])
        for node in model.graph.all_nodes():
            for value in node.outputs:
                value.shape = None
        infer_sizes(model)
        return {str(value.name): value.shape for value in model.graph.outputs}

    # -- a decoder's KV cache -------------------------------------------------------------------

    def _find_cache(self, outputs: dict[str, tuple[Dim, ...]]) -> dict[str, str]:
        """The inputs of a KV cache and the outputs that replace them: those that begin with what came in.

        A file that takes one token at a time has no axis of new tokens: it is named, in `outputs` as well.
        """
        tried = [
            (name, output, grown)
            for output, made in outputs.items()
            for name, taken in self.dims.items()
            if (grown := _growth(taken, made)) is not None and (grown[2] in self.axes or grown[2] == "1")
        ]
        if not tried:
            return {}
        sizes, results = self._run_at(0)
        drawn, cached, axes = self.draw(PlannedCase(name="shape 0", sizes=sizes)), dict[str, str](), set()
        for name, output, (at, past, new) in tried:
            begins = np.array_equal(results[output].take(range(sizes[past]), at), drawn[name])
            if begins and drawn[name].dtype.kind == "f" and not {name, output} & {*cached, *cached.values()}:
                cached[name] = output
                axes.add((past, new))
        if len(axes) != 1:
            return {}
        ((past, new),) = axes
        if new == "1":
            new = next(each for each in _TOKEN_AXES if each not in self.axes)
            self.axes = {**self.axes, new: Axis(min=1, opt=1, max=1)}
            for tensors in (self.dims, outputs):
                for name, dims in tensors.items():
                    dims = tuple(new if at == 1 and dim == 1 else dim for at, dim in enumerate(dims))
                    tensors[name] = tuple(f"{past}+{new}" if dim == f"{past}+1" else dim for dim in dims)
        if past not in self.chosen:
            self._begin_empty(past)
        self.steps, self.declares_cache = self.steps + 1, False
        (first, then), count = next(iter(cached.items())), f"{len(cached)} tensors"
        self.notes.append(f"KV cache of {count}: {then} is {first} of the next call, and so on")
        return cached

    def _begin_empty(self, past: str) -> None:
        """Let a cache be empty, where the file runs with one that is."""
        before, most = self.axes, self.axes[past].max
        if not is_past(past):
            self.notes.append(f"no empty KV cache: only an axis called P or past… may be 0, not {past}")
            return
        self.axes = {**before, past: replace(before[past], min=0, max=most - 1)}
        sizes = {name: axis.min for name, axis in self.axes.items()}
        try:
            self._session.run(self.draw(PlannedCase(name="empty", sizes=sizes)))
        except DeployError as error:
            self.axes = before
            self.notes.append(f"the file does not run with an empty cache: {error.in_one_line}")

    def trace(self, planned: PlannedTrace) -> DecodeTrace:
        """What decoding must give."""
        return self.trace_of(self.spec, planned, self._graph_types())

    def trace_of(self, spec: ModelSpec, planned: PlannedTrace, types: Mapping[str, np.dtype]) -> DecodeTrace:
        """Tokens that are drawn, decoded by the file in ONNX Runtime, and by the same file in FP64."""
        prompt, steps = np.array(planned.prompt, np.int32), planned.steps
        cache, own = check_steps(spec, prompt, steps), self.file_types()
        longest, most = int(prompt.max()), spec.axes[cache.new].max
        L = longest + steps
        drawn = self.draw(PlannedCase(name=planned.name, sizes=cache.call_sizes(spec, len(prompt), L, 0)))
        empty = {each.input: drawn.pop(each.input) for each in cache.tensors}
        trace = DecodeTrace(
            name=planned.name,
            cache=cache,
            inputs={name: array.astype(types[name]) for name, array in drawn.items()},
            prompt=prompt,
            steps=steps,
            oracle=Reference({}, Source.FILE),
            eager={},
            baselines={},
        )

        def decode(run: Callable[[Arrays], Arrays], bounds: Sequence[int]) -> dict[str, np.ndarray]:
            """The results of calls with the tokens from each of the bounds to the next."""
            given = (trace.call(np.tile(np.arange(*ends), (trace.B, 1))) for ends in pairwise(bounds))
            calls = ({name: x.astype(own[name]) for name, x in each.items()} for each in given)
            parts, held = run_calls(cache, empty, calls, run)
            joined = {name: np.concatenate(arrays, cache.outputs[name]) for name, arrays in parts.items()}
            return joined | {each.name: held[each.input] for each in cache.tensors}

        together, outputs = [*range(0, L, most), L], _part(self._results)
        with graph_code(str(self.path)):
            oracle, lazy, _ = sample_case(
                FileRounding,
                self.precision,
                lambda mode: decode(lambda feeds: outputs(self._program.run(feeds, mode)), together),
            )
            baselines = dict(lazy)
        found = decode(self._session.run, [*range(0, longest, most), *range(longest, L + 1)])
        eager = {name: array.astype(types[name]) for name, array in found.items()}
        what = "Decoding token by token gives something else than the file in FP64 with many tokens at once."
        hint = "a file that lets new tokens attend to cached ones and to none after them"
        refuse_large_error(f"{trace.name}, after {steps} steps", eager, oracle, _LARGEST_ERROR, what, hint)
        return replace(trace, oracle=Reference(oracle, Source.FILE), eager=eager, baselines=baselines)


# -- The file --------------------------------------------------------------------------------------


def _refuse_random(model: ir.Model) -> None:
    """Refuse a file whose outputs are drawn anew in every call: it has no reference."""
    for node in nodes_behind(model.graph.outputs):
        if is_random(node):
            what, hint = "The file draws random numbers.", "make them an input, or leave the node out"
            if is_op(node, "Dropout"):
                what, hint = "The file was exported in training mode.", "model.eval() before the export"
            raise ExportError(what, got=f"{node.op_type} {node_name(node)}", hint=hint)


def _precision_of(model: ir.Model) -> str:
    """The precision of most weights, or of the inputs where there are none."""
    counts: dict[str, int] = {}
    for value in (*model.graph.initializers.values(), *model.graph.inputs):
        kind = short_dtype(value.dtype)
        if kind in PRECISIONS:
            counts[kind] = counts.get(kind, 0) + (value.const_value.size if value.const_value else 1)
    if not counts:
        what = "The file has no floating-point tensors in fp16, bf16 or fp32."
        raise ExportError(
            what, got=model.graph.name, hint="`mha-deploy fuse` lists what is not fused, and why"
        )
    return max(counts, key=lambda kind: counts[kind])


def open_graph(path: Path, axes: Axes) -> tuple[ModelSpec, ir.Model]:
    """A file with its attention fused, and its inputs over its axes; nothing of it is run."""
    source = OnnxSource(path, ExportOptions(), axes, {})
    model = source.fused()
    for value in model.graph.inputs:
        if value.name in source.dims:  # a dimension without a name has one there
            value.shape = ir.Shape(source.dims[str(value.name)])
    return source.as_taken(), model


def _named_axes(
    inputs: Mapping[str, ir.Value], given: Axes
) -> tuple[dict[str, tuple[Dim, ...]], dict[str, Axis]]:
    """The dimensions of the inputs, and the axes they name."""
    dims: dict[str, tuple[Dim, ...]] = {}
    axes: dict[str, Axis] = {}
    for name, value in inputs.items():
        if value.shape is None or value.dtype is None:
            raise ExportError(f"Input {name} has no shape or type.", got=name, hint="onnx.shape_inference")
        parts: list[Dim] = []
        for position, size in enumerate(value.shape):
            if isinstance(size, int):
                parts.append(size)
                continue
            symbol = str(size.value or "").replace(" ", "")
            names = [part for part in terms_of(symbol) if not part.isdecimal()]
            if not names or not all(part.isidentifier() for part in names):
                symbol = f"{name}_{position}".replace(".", "_").replace("/", "_")
                names = [symbol]
            for axis in names:
                axes.setdefault(axis, given.get(axis, _BATCH if position == 0 else _LENGTH))
            parts.append(symbol)
        dims[name] = tuple(parts)
    if unknown := [axis for axis in given if axis not in axes]:
        fixed = "all its sizes are fixed: write the file again with dynamic axes"
        hint = nearest(unknown[0], axes) if axes else fixed
        raise SpecError("The file has no such axis.", got=unknown[0], hint=hint)
    return dims, axes


def _fixed_reshape(model: ir.Model, axes: Axes) -> _FixedReshape | None:
    """The first Reshape that holds at some sizes of the axes only: what it writes, and which these are."""
    fixed = {name: axis.opt for name, axis in axes.items() if not axis.is_dynamic}
    for node in model.graph:
        if not is_op(node, "Reshape"):
            continue
        taken, written = node.inputs[0], constant_ints(node, 1)
        if taken is None or taken.shape is None or written is None:
            continue
        dims = [size if isinstance(size, int) else str(size.value) for size in taken.shape]
        free = [dim for dim in dims if isinstance(dim, str) and dim not in fixed]
        # Sizes may match by chance, with the batch in another place: [B, 16, 64] to [2, -1, 64].
        is_batch_fixed = dims[:1] == free[:1] and written[0] > (1 if len(free) < 2 else 0)
        if is_batch_fixed or not _holds(dims, written, fixed):
            pairs = [(dim, size) for dim, size in zip(dims, written, strict=False) if dim in axes]
            found = {str(dim): size for dim, size in pairs if size > 0}
            return node, written, found if _holds(dims, written, {**fixed, **found}) else {}
    return None


def _holds(dims: Sequence[Dim], written: Sequence[int], sizes: Mapping[str, int]) -> bool:
    """Whether a tensor can be reshaped to what is written, whatever the axes without a size here are."""
    copied = {at for at, size in enumerate(written) if size == 0}
    rest = [sizes.get(str(dim), dim) for at, dim in enumerate(dims) if at not in copied]
    known = math.prod(size for size in rest if isinstance(size, int))
    wanted = math.prod(size for size in written if size > 0)
    if -1 in written:
        return known % wanted == 0
    return known == wanted and all(isinstance(size, int) for size in rest)


def _sort_selections(model: ir.Model) -> None:
    """Let selections whose order a file leaves open be in order, since runtimes differ; changes the model."""
    for node in model.graph.all_nodes():
        if is_op(node, "TopK"):
            node.attributes.pop("sorted", None)  # by default it is in order


def _tied(
    dims: Mapping[str, tuple[Dim, ...]], axes: Mapping[str, Axis], ties: Mapping[str, str | int]
) -> tuple[dict[str, tuple[Dim, ...]], dict[str, Axis]]:
    """Dimensions in which some axes are others, or numbers."""

    def tied(dim: Dim) -> Dim:
        if isinstance(dim, int):
            return dim
        parts = [each for part in terms_of(dim) for each in terms_of(str(ties.get(part, part)))]
        number = sum(int(part) for part in parts if part.isdecimal())
        names = sum_of(part for part in parts if not part.isdecimal())
        return "+".join([names, *([str(number)] if number else [])]) if names else number

    return {name: tuple(map(tied, each)) for name, each in dims.items()}, {
        name: axis for name, axis in axes.items() if name not in ties
    }


def _dim(name: str, measured: list[tuple[dict[str, int], int]], axes: Axes, said: Iterable[str]) -> Dim:
    """The first axis, number, sum of two of them or multiple of one that has every measured size.

    Else what is said of the size, such as `(T - 1)//4 + 1`. Where that has every measured size, the others
    must have its sizes as well: a stride gives few different ones at small sizes.
    """
    stated = next((text for text in said if _gives(text, measured)), None)
    if stated is not None:
        ends = ({axis: getattr(axes[axis], end) for axis in axes} for end in ("min", "opt", "max"))
        measured = [*measured, *((sizes, size_of(stated, sizes)) for sizes in ends)]
    at, size = measured[0]
    tried = [*(axis for axis in axes if axes[axis].is_dynamic), str(size)]
    for first in axes:
        tried += [f"{first}+{second}" for second in axes if second != first]
        tried += [f"{first}+{size - at[first]}"] if size > at[first] else []
    tried += [f"{size // at[axis]}*{axis}" for axis in axes if at[axis] and size % at[axis] == 0]
    tried += [] if stated is None else [_spelled(stated)]
    for dim in tried:
        if _gives(dim, measured):
            return int(dim) if dim.isdecimal() else dim
    got = "; ".join(f"{size} at {sizes_name(sizes)}" for sizes, size in measured)
    hint = "--axis NAME=N fixes an axis"
    raise ExportError(
        f"A size of output {name} is not an expression of axes and numbers.", got=got, hint=hint
    )


def _spelled(dim: str) -> str:
    """An expression without parentheses that it does not need, as PyTorch writes it."""
    return re.sub(r" ([*/]+) ", r"\1", ast.unparse(ast.parse(dim, mode="eval")))


def _gives(dim: str, measured: Iterable[tuple[dict[str, int], int]]) -> bool:
    """Whether a dimension has every measured size."""
    with suppress(KeyError, SpecError):  # of an output alone, or of something that only a run knows
        return all(size_of(dim, sizes) == size for sizes, size in measured)
    return False


def _growth(taken: tuple[Dim, ...], made: tuple[Dim, ...]) -> tuple[int, str, str] | None:
    """Along which dimension a tensor grows, its axis, and by what; None where it does not, or otherwise."""
    changed = [at for at, (x, y) in enumerate(zip(taken, made, strict=False)) if x != y]
    if len(taken) != len(made) or len(changed) != 1:
        return None
    parts, past = str(made[changed[0]]).split("+"), str(taken[changed[0]])
    if past not in parts or len(parts) != 2:
        return None
    parts.remove(past)
    return changed[0], past, parts[0]


# -- Inputs ----------------------------------------------------------------------------------------


def _refuse_shape(name: str, example: np.ndarray, dims: tuple[Dim, ...]) -> None:
    """Refuse an example that has another rank than the input, or another size where that is fixed."""
    wanted = f"[{', '.join(map(str, dims))}]"
    if example.ndim != len(dims):
        what = f"The example of input {name} has the wrong rank."
        raise ExportError(what, got=example.shape, hint=f"an array of shape {wanted}")
    sizes = enumerate(zip(example.shape, dims, strict=True))
    if wrong := [(at, size, dim) for at, (size, dim) in sizes if isinstance(dim, int) and size != dim]:
        at, size, dim = wrong[0]
        what = f"Input {name} of the file is {wanted}: the example has another size where it is fixed."
        got = f"shape {example.shape}: {size}, not {dim}, in dimension {at}"
        any_size = " (any size where there is a name)" if any(isinstance(each, str) for each in dims) else ""
        raise ExportError(what, got=got, hint=f"an array of shape {wanted}{any_size}")


def _fit(example: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """An example at another shape: sliced, or repeated."""
    for axis, size in enumerate(shape):
        example = np.take(example, np.arange(size) % max(example.shape[axis], 1), axis)
    return example


def _draw(value: ir.Value, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """An input from its type and name: normal floats, tokens of the vocabulary, masks with a padded tail."""
    name, kind = str(value.name).lower(), np.dtype(value.dtype.numpy())  # type: ignore[union-attr]
    is_float = kind.kind not in "iub"
    if is_float and not _is_zero_or_one(value):
        return random.standard_normal(shape)
    if is_float or _is_drawn_mask(value, len(shape)):
        # Every batch element keeps its first entry; the tails of all but the first are masked.
        ends = random.integers(1, shape[-1] + 1, size=(*shape[:-1], 1)) if shape else np.array(1)
        if len(shape) > 1:
            ends[0] = shape[-1]
        return np.arange(shape[-1]) < ends if shape else np.array(True)
    if "position" in name and shape:
        return np.broadcast_to(np.arange(shape[-1]), shape)
    return random.integers(0, _largest_index(value) + 1, size=shape)


def _is_drawn_mask(value: ir.Value, rank: int) -> bool:
    """Whether an input is drawn as a mask."""
    kind = np.dtype(value.dtype.numpy())  # type: ignore[union-attr]
    return is_mask(str(value.name), kind.name) and (kind.kind == "b" or rank == 2)


def _is_zero_or_one(value: ir.Value) -> bool:
    """Whether a floating-point input is a mask of zeros and ones: (1 - x) times a number that hides keys."""
    pending, is_rest = [(value, False)], False
    for each, is_rest in pending:  # it grows
        for node in each.consumers():
            if is_op(node, *MOVES, "Cast", "Expand", "Flatten") and node.inputs[0] is each:
                pending.append((node.outputs[0], is_rest))
            elif is_op(node, "Sub") and node.inputs[1] is each and constant_number(node.inputs[0]) == 1.0:
                pending.append((node.outputs[0], True))
            elif is_op(node, "Mul") and is_rest and any(map(_hides, node.inputs)):
                return True
    return False


def _hides(value: ir.Value | None) -> bool:
    """Whether a value is one number that hides a key where it is added."""
    return abs(constant_number(value) or 0.0) >= _HIDES


def _largest_index(value: ir.Value) -> int:
    """The largest index that every table behind this input has; 1 where it indexes none."""
    pending, sizes = [value], []
    while pending:
        for node in pending.pop().consumers():
            table = node.inputs[0] if node.op_type == "Gather" else None
            if node.op_type in ("Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape"):
                pending.append(node.outputs[0])
            elif table is not None and table.const_value is not None and node.inputs[1] is not table:
                sizes.append(table.const_value.numpy().shape[int(node.attributes.get_int("axis", 0))])
    return max(0, min(sizes) - 1) if sizes else 1
