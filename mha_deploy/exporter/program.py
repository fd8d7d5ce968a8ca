"""A user's module as an exported program: its axes, its outputs, and errors with the user's line."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from inspect import Parameter, Signature, signature
from itertools import count
from typing import Any

import onnx_ir as ir
import sympy
import torch
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map_only, tree_unflatten

from mha_deploy.errors import ExportError
from mha_deploy.exporter import explain
from mha_deploy.exporter.axes import (
    LEAST_TRACED,
    AxisNames,
    ExportedModule,
    Kind,
    NamedDims,
    NamedSizes,
    clamp_to,
    draw_inputs,
    dynamic_shapes,
    named_sizes,
    trace_sizes,
)
from mha_deploy.exporter.oracle import Float32Accumulation, dense_flex_attention, run_program, swapped
from mha_deploy.model.spec import Axes, Axis, Sizes, size_of

# -- Names for what a module returns: a tensor, a tuple, a dictionary, or these in each other ------

_NAME = "output"


def named_outputs(program: ExportedProgram, given: Sequence[str], taken: Collection[str]) -> dict[str, str]:
    """The FX node of every tensor that a program returns, by name, in order; what is None has no name.

    The names are the given ones, or made of the keys of what is returned; none of them may be `taken`.
    """
    specs = [spec for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    keys = _keys(program.call_spec.out_spec, len(specs))
    found = []
    for key, spec in zip(keys, specs, strict=True):
        if isinstance(spec.arg, TensorArgument):
            found.append((key, spec.arg.name))
        elif not (isinstance(spec.arg, ConstantArgument) and spec.arg.value is None):
            what = "The module returns something that is not a tensor."
            hint = "a wrapper that returns tensors only"
            raise ExportError(what, got=f"{key}: {getattr(spec.arg, 'value', spec.arg.name)}", hint=hint)
    if not found:
        raise ExportError(
            "The module returns no tensor.", hint="return a tensor, or a tuple or dictionary of tensors"
        )
    if given and len(given) != len(found):
        got = f"{len(given)} names for {len(found)} tensors: {', '.join(key for key, _ in found)}"
        raise ExportError(
            "The names of the outputs do not fit what the module returns.",
            got=got,
            hint="a name for every tensor that forward() returns",
        )
    if clash := [name for name in given if name in taken or list(given).count(name) > 1]:
        raise ExportError(
            "The names of the outputs are not unique.", got=", ".join(clash), hint="another name for each"
        )
    named: dict[str, str] = {}
    for name, (_, node) in zip(given or [key for key, _ in found], found, strict=True):
        free = f"{name}_out" if name in taken else name
        numbers = count(2)
        while free in taken or free in named:
            free = f"{name}_{next(numbers)}"
        named[free] = node
    return named


def _keys(spec: TreeSpec | None, count: int) -> list[str]:
    """A name for every leaf of a structure, of the keys that lead to it: `output_1`, `hidden_states_2`."""
    keys = [f"{_NAME}_{index}" if index else _NAME for index in range(count)]
    if spec is None or spec.num_leaves != count:
        return keys
    for leaf, path in _leaves(tree_unflatten(range(count), spec), ()):
        parts = [str(part) for part in path]
        if not path or isinstance(path[0], int):
            parts = [_NAME, *parts[1:]] if not path or path[0] == 0 else [_NAME, *parts]
        keys[leaf] = re.sub(r"\W", "_", "_".join(parts))
    return keys


def _leaves(part: Any, path: tuple[str | int, ...]) -> Iterator[tuple[int, tuple[str | int, ...]]]:
    members: Iterable[tuple[Any, Any]] = ()
    if isinstance(part, int):
        yield part, path
    elif isinstance(part, Mapping):
        members = [(str(key), value) for key, value in part.items()]
    elif isinstance(part, tuple) and hasattr(part, "_fields"):
        members = zip(part._fields, part, strict=True)
    elif isinstance(part, list | tuple):
        members = enumerate(part)
    elif dataclasses.is_dataclass(part):
        members = [(field.name, getattr(part, field.name)) for field in dataclasses.fields(part)]
    for key, each in members:
        yield from _leaves(each, (*path, key))


# -- Whether a program still is its module at sizes that PyTorch could not trace it at -------------

DrawInputs = Callable[[Sizes], dict[str, Tensor]]

_MOST_TRIED = 8
_NOISE = 0.25  # two results of one formula differ by the sum of their own errors
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the largest number; another branch is far off


def _check_repeats(module: nn.Module, example: Mapping[str, Tensor]) -> None:
    """Run a module twice: one that is random, or remembers earlier calls, has no reference."""
    where, hint = "the sizes of its example", "an example that it takes"
    first, second = (explain.run_explained(module, example, where, hint=hint) for _ in range(2))
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-6, atol=0, equal_nan=True):
            what = "The module returns something else when it is called again with the same inputs."
            hint = "a module without randomness and without memory of earlier calls"
            raise ExportError(what, got=f"tensor {index} of what it returns", hint=hint)


def _check_sizes(
    exported: ExportedModule, module: nn.Module, draw: DrawInputs, every: Iterable[Sizes]
) -> None:
    """Run module and program at sizes that were not traced, and compare them."""
    larger, drawn = "axes that begin at a larger size", "a draw= for its inputs"
    for sizes in every:
        example = draw(sizes)
        at = ", ".join(f"{name}={size}" for name, size in sizes.items())
        where, hint = "the smallest sizes of its axes", f"{larger}, or {drawn}"
        wanted = explain.run_explained(module, example, where, at=f"{at}: ", hint=hint)
        try:
            outputs, _ = run_program(exported, example, mode=Float32Accumulation())
        except (RuntimeError, IndexError) as error:
            what = "The exported program does not run at the smallest sizes of its axes."
            raise ExportError(what, got=f"{at}: {str(error).splitlines()[0]}", hint=larger) from error
        for (name, got), want in zip(outputs.items(), wanted, strict=True):
            same_shape = want.shape == got.shape
            if same_shape and (_close(want, got) or _is_noise(exported, example, name, want, got)):
                continue
            if want.isfinite().all() and not got.isfinite().all():
                explain.refuse_infinite_constants(exported.program, f"output {name} at {at}")
            what = "The module does something else at its smaller sizes, which its trace does not show."
            raise ExportError(what, got=f"output {name} at {at}", hint=larger)


def _is_noise(
    exported: ExportedModule, example: dict[str, Tensor], name: str, want: Tensor, got: Tensor
) -> bool:
    """Whether the program's own rounding explains a difference: it is as far from its FP64 result.

    Where the module does something else, the program is close to that result, and the module is not.
    """
    exact = run_program(exported, example)[0][name].double()
    rounding, difference = ((got.double() - each).abs().max() for each in (exact, want.double()))
    return bool(rounding.isfinite() and difference.isfinite() and rounding > _NOISE * difference)


def _close(want: Tensor, got: Tensor) -> bool:
    if not want.is_floating_point():
        return torch.equal(want, got)
    tolerance = _TOLERANCE.get(want.dtype, 1e-3)
    step = torch.finfo(want.dtype).smallest_normal * torch.finfo(want.dtype).eps  # the smallest number
    largest = float(want.double().nan_to_num(0, 0, 0).abs().max()) if want.numel() else 0.0
    near, got, want = max(tolerance * largest, 4 * step), got.double(), want.double()
    return torch.allclose(got, want, rtol=tolerance, atol=near, equal_nan=True)


def _sizes_to_try(axes: Axes, traced: Sizes, unproven: Iterable[str]) -> Iterator[dict[str, int]]:
    """All axes at their smallest, then each one through the sizes that PyTorch did not prove."""
    small = {name: axis.min for name, axis in axes.items() if axis.is_dynamic and axis.min < LEAST_TRACED}
    if small:
        yield {**traced, **small}
    for name in unproven:
        last = min(traced[name] - 1, axes[name].max, axes[name].min + _MOST_TRIED)
        for size in range(axes[name].min, last + 1):
            yield {**traced, name: size}


def _fed_sizes(program: ExportedProgram, dims: NamedDims) -> NamedSizes:
    """Every dimension of an input that has a name, and its size in the program."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    fed = {name: values[node] for name, node in _fed_nodes(program).items()}
    return named_sizes(fed, dims)


def _outside_guards(fed: NamedSizes, axes: Axes, traced: Sizes) -> Iterator[dict[str, int]]:
    """Sizes of the axes, of those near their bounds and their optimum, that break a guard of the program."""
    varying = [(size.node, dim) for dim, size in fed if not str(size).isdecimal()]
    symbols = {node.expr: dim for node, dim in varying}
    guards = [guard.expr for node, _ in varying[:1] for guard in node.shape_env.guards]
    for name, axis in axes.items():
        near = {*range(axis.min, axis.min + _MOST_TRIED), *range(axis.max - _MOST_TRIED, axis.max + 1)}
        for size in sorted(each for each in near | {axis.opt} if axis.min <= each <= axis.max):
            sizes = {**traced, name: size}
            given = {symbol: size_of(dim, sizes) for symbol, dim in symbols.items()}
            try:
                is_broken = any(guard.xreplace(given) is sympy.false for guard in guards)
            except (ZeroDivisionError, RuntimeError, TypeError):  # half of one size, divided by
                is_broken = True
            if is_broken:
                yield sizes
                break


# -- From anybody's module to an ONNX graph, together with the program it was made from ------------


def export_program(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    dims: NamedDims,
    axes: Axes,
    *,
    opset: int = 23,
    output_names: Sequence[str] = (),
    draw: DrawInputs | None = None,
) -> ExportedModule:
    """Export a module; it is traced in evaluation mode, and left as it was.

    `inputs` are examples by the parameter of `forward`, `dims` names their dimensions, and an axis of one
    size is a number in the graph. Outputs without names get them from the keys of what `forward` returns.
    `draw` makes inputs of some sizes on which the module can run; default: they look like `inputs`.
    """
    with _evaluating(module):
        with _made_traceable(module, list(inputs)):
            traced = _Tracer(module, inputs, dims).trace(axes)
        axes, sizes = traced.axes, traced.sizes
        names = list(named_outputs(traced.program, output_names, list(inputs)))
        model, program = _translate(traced.program, draw_inputs(inputs, dims, sizes, seed=0), opset)
        _refuse_changes(program)
        _write_views_as_reshapes(program)
        fed = _fed_nodes(program)
        # The signature of a program does not know the casts that the exporter puts behind some outputs.
        results: Any = program.graph.output_node().args[0]
        kinds = [spec.kind for spec in program.graph_signature.output_specs]
        pairs = zip(results, kinds, strict=True)
        kept = [n.name for n, kind in pairs if isinstance(n, Node) and kind is OutputKind.USER_OUTPUT]
        returned = dict(zip(names, kept, strict=True))
        _name_inputs(model, fed, list(inputs))
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        _cast_outputs(model, [values[node] for node in returned.values()])
        moved = _name_outputs(model, names)
        axis_names = AxisNames(dims, axes, _fed_sizes(program, dims))
        axis_names.rename(model)
        exported = ExportedModule(
            model=model,
            program=program,
            inputs=tuple(inputs),
            outputs={name: axis_names.dims_of(values[node].shape) for name, node in returned.items()},
            nodes={**moved, **fed, **returned},
            unproven=traced.unproven,
            fixed=traced.fixed,
            notes=traced.notes,
        )
        draw = draw or (lambda at: draw_inputs(inputs, dims, at, seed=1))
        _check_repeats(module, draw(clamp_to(axes, sizes)))
        try:
            tried = (*_sizes_to_try(axes, sizes, traced.unproven), *traced.outside)
            _check_sizes(exported, module, draw, tried)
        except ExportError as error:
            if traced.explain_first is None:
                raise
            with _made_traceable(module, list(inputs)):
                refusal = traced.explain_first()
            raise refusal from error
    return exported


# -- PyTorch's two steps ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Traced:
    """A module as PyTorch traced it, with the fields of `ExportedModule`."""

    program: ExportedProgram  # the program
    axes: Axes  # its axes; those that could not vary have one size
    sizes: dict[str, int]  # what it was traced at
    unproven: tuple[str, ...] = ()  # axes whose smaller sizes PyTorch did not prove
    outside: Sequence[Sizes] = ()  # sizes that break a guard, so that they must be tried
    # What to raise where that comparison fails: why the first attempt did. It takes another trace.
    explain_first: Callable[[], ExportError] | None = None
    fixed: Axes = dataclasses.field(default_factory=dict)  # axes that could not vary
    notes: tuple[str, ...] = ()  # what a reader should know


@dataclasses.dataclass(frozen=True)
class _Tracer:
    """Traces a module with inputs like its example."""

    module: nn.Module
    inputs: Mapping[str, Tensor]
    dims: NamedDims

    def trace(self, axes: Axes) -> _Traced:
        """With the ranges of its axes, else with PyTorch's own, else with fewer dynamic axes."""
        sizes = trace_sizes(self.inputs, self.dims, axes)
        trace = partial(self.export, axes, "ranges")

        def name_of(name: str, index: int) -> str:
            named = self.dims.get(name, ())
            return str(named[index]) if index < len(named) else f"{name}.shape[{index}]"

        first = _try_trace(trace)
        if isinstance(first, ExportedProgram):
            return _Traced(program=first, axes=axes, sizes=sizes)
        if explain.may_be_small_sizes(first):
            # A size that follows from others, such as S-1, may be 1 at a small one: a constant for PyTorch.
            second = _try_trace(partial(self.export, axes, "from traced"))
            if isinstance(second, ExportedProgram):
                small = tuple(name for name, axis in axes.items() if axis.min < sizes[name])
                return _Traced(program=second, axes=axes, sizes=sizes, unproven=small)
        explain_first = partial(explain.explain_failure, first, name_of, trace)
        found = self.trace_automatically(axes)
        if isinstance(found, _Traced):
            return dataclasses.replace(found, explain_first=explain_first)
        refusal = explain_first()
        dynamic = [name for name, axis in axes.items() if axis.is_dynamic]
        shown = clamp_to(axes, {**sizes, **dict(named_sizes(self.inputs, self.dims))})
        for fixed in dict.fromkeys((tuple(sorted(found)), tuple(dynamic[1:]), tuple(dynamic))):
            for at in ({name: axes[name].opt for name in fixed}, {name: shown[name] for name in fixed}):
                narrow = {name: Axis(min=size, opt=size, max=size) for name, size in at.items()}
                found = self.trace_automatically({**axes, **narrow}) if fixed else set()
                if isinstance(found, _Traced):
                    sizes_of = ", ".join(f"{name}={size}" for name, size in at.items())
                    note = f"{sizes_of} only: {refusal.what} {refusal.got or ''}".strip()
                    return dataclasses.replace(found, fixed=narrow, notes=(note,))
        with _kept_as_it_is(self.module):
            raise explain.explain_example(refusal, self.module, self.inputs) from first

    def trace_automatically(self, axes: Axes) -> _Traced | set[str]:
        """With the ranges that PyTorch finds; or the axes that it cannot let vary, where it reports them."""
        constant: set[str] = set()
        for strict in (False, True):
            program = _try_trace(partial(self.export, axes, "automatic", strict=strict))
            if isinstance(program, ExportedProgram):
                fed, varying = _fed_sizes(program, self.dims), {n for n in axes if axes[n].is_dynamic}
                # A symbol may stand for a number.
                static = {dim for dim, size in fed if dim in varying and str(size).isdecimal()}
                if not static:
                    sizes = trace_sizes(self.inputs, self.dims, axes)
                    outside = list(_outside_guards(fed, axes, sizes))
                    return _Traced(program=program, axes=axes, sizes=sizes, outside=outside)
                constant = constant or static
        return constant

    def export(self, axes: Axes, kind: Kind, *, strict: bool = False) -> ExportedProgram:
        """Call PyTorch."""
        sizes = trace_sizes(self.inputs, self.dims, axes)
        example = draw_inputs(self.inputs, self.dims, sizes, seed=0)
        shapes = dynamic_shapes(self.dims, list(example), axes, sizes, kind=kind)
        watched = contextlib.nullcontext() if strict else explain.WatchedLoops()
        with explain.comparing_multiples(), _skip_needless_casts(), _kept_as_it_is(self.module), watched:
            return torch.export.export(self.module, (), example, dynamic_shapes=shapes, strict=strict)


def _try_trace(trace: Callable[[], ExportedProgram]) -> ExportedProgram | Exception:
    try:
        with explain.silenced(), explain.without_shape_cache(), dense_flex_attention():
            return trace()
    except explain.UnrolledLoop:
        raise
    except Exception as error:  # whatever the user's module raises, or PyTorch
        if explain.was_interrupted(error):
            raise KeyboardInterrupt from error
        return error


def _write_views_as_reshapes(program: ExportedProgram) -> None:
    """Let a program run at sizes at which a reshape copies: PyTorch traces it as a view where it did not."""
    for node in program.graph.nodes:
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default
    program.graph_module.recompile()


def _translate(
    traced: ExportedProgram, example: dict[str, Tensor], opset: int
) -> tuple[ir.Model, ExportedProgram]:
    _sort_selections(traced, example)
    _write_for_onnx(traced)
    _write_complex_as_real(traced)
    explained = partial(explain.translation_error, program=traced)
    result = explain.onnx_program(traced, explained, kwargs=example, opset_version=opset)
    if result.exported_program is None:
        raise ExportError(
            "PyTorch returned no program with the ONNX graph.",
            hint="another version of PyTorch; `mha-deploy doctor` lists those here",
        )
    # RMSNormalization computes in the type of its scale, and ONNX infers the type of its other input.
    for node in list(result.model.graph.all_nodes()):
        if node.op_type != "RMSNormalization" or node.domain or node.graph is None:
            continue
        value, scale = node.inputs[:2]
        if value is None or scale is None or scale.dtype is None or value.dtype in (None, scale.dtype):
            continue
        cast = _cast(value, scale.dtype, f"{node.outputs[0].name}_in")
        node.graph.insert_before(node, cast)
        node.replace_input_with(0, cast.outputs[0])
    return result.model, result.exported_program


def _cast(value: ir.Value, dtype: ir.DataType, name: str) -> ir.Node:
    cast = ir.node("Cast", [value], {"to": dtype})
    cast.outputs[0].dtype, cast.outputs[0].shape, cast.outputs[0].name = dtype, value.shape, name
    return cast


def _sort_selections(program: ExportedProgram, example: Mapping[str, Tensor]) -> None:
    """Let selections whose order is left open be in order where no output shows it: runtimes differ in it."""
    given = {
        node: dict(zip(("self", "k", "dim", "largest", "sorted"), node.args, strict=False)) | node.kwargs
        for node in program.graph.nodes
        if node.target is _aten.topk.default
    }
    unsorted = [node for node, options in given.items() if not options.get("sorted", True)]

    def outputs() -> list[Tensor]:
        program.graph_module.recompile()
        with torch.no_grad():
            found = tree_leaves(program.module(check_guards=False)(**example))
        return [each for each in found if isinstance(each, Tensor)]

    before = outputs() if unsorted else []
    for node in unsorted:
        node.args, node.kwargs = (), {**given[node], "sorted": True}
    if unsorted and not all(map(_close, before, outputs())):
        for node in unsorted:
            node.kwargs = given[node]
        program.graph_module.recompile()


def _write_for_onnx(program: ExportedProgram) -> None:
    """Write differently what PyTorch's exporter to ONNX refuses."""
    parts = [part for part in program.graph_module.modules() if isinstance(part, GraphModule)]  # and branches
    for node in [node for part in parts for node in part.graph.nodes]:
        graph = node.graph
        if node.target is _aten.scaled_dot_product_attention.default:
            query, key = (each.meta["val"].shape for each in node.args[:2])
            if len(query) == len(key) == 4 and key[1] == 1 and query[1] != 1:
                node.kwargs = {**node.kwargs, "enable_gqa": True}  # one head that broadcasts is a group
            elif len(query) == len(key) != 4:
                _attend_over_four_axes(graph, node)
        elif node.target in (*_SPLITS, *_CHUNKS):
            _split_by_slices(graph, node)
        elif node.target in (_aten.index_put.default, _aten.index_put_.default):
            _write_masked_by_where(graph, node)
        elif node.target is _aten._is_all_true.default:
            node.target = _aten.all.default
        elif node.target in (_aten.amax.default, _aten.amin.default) and len(node.args) == 1:
            node.args = (*node.args, list(range(node.args[0].meta["val"].dim())))
        elif node.target in (_aten.rsub.Scalar, _aten.sub.Tensor) and len(node.args) == 2:
            value, number = node.args if node.target is _aten.rsub.Scalar else node.args[::-1]
            if not isinstance(number, float) or not isinstance(value, Node):
                continue
            if value.meta["val"].dtype != node.meta["val"].dtype and not node.kwargs:
                with graph.inserting_before(node):  # it cannot promote what is subtracted from a number
                    minus = _emit(graph, node, _aten.neg.default, value)
                    node.replace_all_uses_with(_emit(graph, node, _aten.add.Tensor, minus, number))
                graph.erase_node(node)


def _split_by_slices(graph: Graph, node: Node) -> None:
    """Write parts of a computed size as slices: as a sequence of ONNX's, PyTorch's exporter fails on them."""
    emit = partial(_emit, graph, node)
    args: tuple[Any, ...] = node.args
    tensor, number, *given = args
    axis = given[0] if given else 0
    is_chunk = node.target in _CHUNKS
    if isinstance(tensor.meta["val"].shape[axis] if is_chunk else number, int):
        return
    with graph.inserting_before(node):
        size = number
        if is_chunk:
            length = emit(_aten.sym_size.int, tensor, axis)
            size = emit(operator.floordiv, emit(operator.add, length, number - 1), number)
        for part in list(node.users):
            start = emit(operator.mul, size, part.args[1])
            end = emit(operator.add, start, size)
            sliced = graph.call_function(_aten.slice.Tensor, (tensor, axis, start, end))
            sliced.meta = part.meta
            part.replace_all_uses_with(sliced)
            graph.erase_node(part)
    graph.erase_node(node)


def _write_masked_by_where(graph: Graph, node: Node) -> None:
    """Write `x[mask] = value` as a selection: in ONNX it is a list of places, which TensorRT may refuse."""
    args: tuple[Any, ...] = node.args
    tensor, indices, value, *accumulate = args
    masks = [index for index in indices if index is not None]
    if len(masks) != 1 or masks[0].meta["val"].dtype != torch.bool or any(accumulate):
        return
    emit, (mask,) = partial(_emit, graph, node), masks
    own = tensor.meta["val"].dim() - indices.index(mask) - mask.meta["val"].dim()  # axes of an entry
    given = value.meta["val"]
    if given.dim() > own and given.numel() != 1:
        return  # a value for each entry
    with graph.inserting_before(node):
        if given.dim() > own:
            value = emit(_aten.reshape.default, value, [])
        for _ in range(own):
            mask = emit(_aten.unsqueeze.default, mask, -1)
        result = emit(_aten.where.self, mask, value, tensor)
        if node.target is _aten.index_put_.default:
            result = emit(_aten.copy_.default, tensor, result)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _attend_over_four_axes(graph: Graph, node: Node) -> None:
    """Write attention of one head without an axis for it, or over windows, with batch and heads."""
    emit = partial(_emit, graph, node)
    args: tuple[Any, ...] = node.args
    query, key, value, *rest = args
    mask = rest[0] if rest and isinstance(rest[0], Node) else None
    rank, mask_rank = (0 if each is None else each.meta["val"].dim() for each in (query, mask))
    inner = 3 if rank > 4 else 2  # heads, length and size; or the last two
    if query.meta["val"].shape[:-inner] != node.meta["val"].shape[:-inner]:
        return  # which PyTorch refuses: Q is to be expanded

    def sizes(tensor: Node, start: int, end: int) -> list[Any]:
        """Numbers, or nodes where a size is dynamic."""
        shape = tensor.meta["val"].shape
        axes = range(start, end)
        return [shape[i] if isinstance(shape[i], int) else emit(_aten.sym_size.int, tensor, i) for i in axes]

    def with_axes(tensor: Node) -> Node:
        for _ in range(4 - rank):
            tensor = emit(_aten.unsqueeze.default, tensor, -3)
        return tensor if rank < 4 else emit(_aten.flatten.using_ints, tensor, 0, rank - 4)

    def expanded(tensor: Node) -> Node:
        if tensor.meta["val"].shape[:-inner] == query.meta["val"].shape[:-inner]:
            return tensor
        own = [1 if at >= tensor.meta["val"].dim() else -1 for at in reversed(range(inner))]
        return emit(_aten.expand.default, tensor, [*outer, *own])

    with graph.inserting_before(node):
        outer = sizes(query, 0, rank - inner)
        if mask is not None and (rank > 4 or mask_rank > 2):
            rest[0] = with_axes(expanded(mask))
        operands = [with_axes(expanded(each)) for each in (query, key, value)]
        attention = _aten.scaled_dot_product_attention.default
        result = graph.call_function(attention, (*operands, *rest), node.kwargs)
        q, v = operands[0].meta["val"], operands[2].meta["val"]
        # With a mask of dynamic sizes PyTorch infers no shape here.
        result.meta = {**node.meta, "val": q.new_empty((*q.shape[:-1], v.shape[-1]))}
        if rank > 4:
            result = emit(_aten.reshape.default, result, [*outer, *sizes(result, 1, 4)])
        for _ in range(4 - rank):
            result = emit(_aten.squeeze.dim, result, -3)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


_aten = torch.ops.aten
_SPLITS = (_aten.split.Tensor, _aten.unsafe_split.Tensor)  # by the size of the parts
_CHUNKS = (_aten.chunk.default, _aten.unsafe_chunk.default)  # by their number
# Operators on complex numbers that are written here; first those that do the same to both parts.
_ON_COMPLEX = (
    "view reshape _unsafe_view unsqueeze squeeze flatten slice select index index_select expand cat stack "
    "neg permute transpose clone contiguous alias detach detach_ repeat unflatten embedding "
    "view_as_complex view_as_real polar complex mul real add sub imag abs conj _conj resolve_conj to _to_copy"
)


def _write_complex_as_real(program: ExportedProgram) -> None:
    """Write complex numbers as pairs of real ones, as rotary embeddings use them.

    A program with another operator on complex numbers is left to PyTorch, which writes some of them itself.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.target is _aten._assert_tensor_metadata.default and _is_complex(node.all_input_nodes[0]):
            graph.erase_node(node)
    nodes = [node for node in graph.nodes if any(map(_is_complex, (node, *node.all_input_nodes)))]
    called = [node for node in nodes if node.op == "call_function"]
    for node in called:
        name = _operator(node)
        if name not in _ON_COMPLEX.split() or (name in ("to", "_to_copy") and not _is_complex(node)):
            return
    if not called:
        return
    pairs: dict[Node, tuple[Any, Any]] = {}
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    for node in nodes:
        with graph.inserting_before(node if node.op == "call_function" else first):
            if node.op == "call_function":
                _write_pair(graph, node, pairs)
            elif _is_complex(node):
                emit = partial(_emit, graph, node)
                real = emit(_aten.view_as_real.default, node)
                pairs[node] = emit(_aten.select.int, real, -1, 0), emit(_aten.select.int, real, -1, 1)
    for node in reversed(called):
        if not node.users:
            graph.erase_node(node)
    graph.lint()
    program.graph_module.recompile()


def _operator(node: Node) -> str:
    """The name of an operator of PyTorch, without its overload."""
    packet = getattr(node.target, "overloadpacket", None)
    return "" if packet is None else packet.__name__


def _is_complex(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()


def _emit(graph: Graph, origin: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A node in the place of another one, with the value that PyTorch infers for it."""
    node = graph.call_function(target, args, kwargs)
    values = tree_map_only(Node, lambda each: each.meta["val"], (args, kwargs))
    node.meta = {**origin.meta, "val": target(*values[0], **values[1])}
    return node


def _write_pair(graph: Graph, node: Node, pairs: dict[Node, tuple[Any, Any]]) -> None:
    """Write one operator on complex numbers: `pairs` gets its result, or its users another node."""
    emit, name = partial(_emit, graph, node), _operator(node)
    args: tuple[Any, ...] = node.args

    def parts(value: Any) -> tuple[Any, Any]:
        if isinstance(value, Node):
            return pairs.get(value, (value, None))
        return (value.real, value.imag or None) if isinstance(value, complex) else (value, None)

    def times(one: Any, other: Any) -> Any:
        return None if one is None or other is None else emit(_aten.mul.Tensor, one, other)

    def plus(one: Any, other: Any, target: Any = _aten.add.Tensor) -> Any:
        if one is None or other is None:
            alone = one if other is None else other
            return emit(_aten.neg.default, alone) if one is None and target is _aten.sub.Tensor else alone
        return emit(target, one, other)

    real, imaginary = parts(args[0])
    if name in ("real", "imag"):
        node.replace_all_uses_with(real if name == "real" else imaginary)
    elif name == "view_as_real":
        node.replace_all_uses_with(emit(_aten.stack.default, [real, imaginary], -1))
    elif name == "abs":
        squares = plus(times(real, real), times(imaginary, imaginary))
        node.replace_all_uses_with(emit(_aten.sqrt.default, squares))
    elif name == "view_as_complex":
        pairs[node] = emit(_aten.select.int, args[0], -1, 0), emit(_aten.select.int, args[0], -1, 1)
    elif name == "complex":
        pairs[node] = args[0], args[1]
    elif name == "polar":
        cosine, sine = emit(_aten.cos.default, args[1]), emit(_aten.sin.default, args[1])
        pairs[node] = times(args[0], cosine), times(args[0], sine)
    elif name in ("to", "_to_copy"):
        wide = torch.float64 if node.meta["val"].dtype == torch.complex128 else torch.float32
        imaginary = emit(_aten.zeros_like.default, real) if imaginary is None else imaginary
        pairs[node] = emit(_aten.to.dtype, real, wide), emit(_aten.to.dtype, imaginary, wide)
    elif name == "mul":
        other_real, other_imaginary = parts(args[1])
        pairs[node] = (
            plus(times(real, other_real), times(imaginary, other_imaginary), _aten.sub.Tensor),
            plus(times(real, other_imaginary), times(imaginary, other_real)),
        )
    elif name in ("add", "sub"):
        target, other = getattr(_aten, name).Tensor, parts(args[1])
        pairs[node] = plus(real, other[0], target), plus(imaginary, other[1], target)
    elif name in ("conj", "_conj", "resolve_conj"):
        pairs[node] = real, imaginary if name == "resolve_conj" else emit(_aten.neg.default, imaginary)
    else:
        made = []
        for part in (0, 1):
            chosen = {each: pair[part] for each, pair in pairs.items()}
            given = tree_map_only(Node, lambda each, c=chosen: c.get(each, each), (args, node.kwargs))  # type: ignore[misc]
            made.append(emit(node.target, *given[0], **given[1]))
        pairs[node] = made[0], made[1]


@contextlib.contextmanager
def _made_traceable(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """The module as PyTorch can trace it."""
    with _explicit_forward(module, names), _batched_experts(module):
        yield


@contextlib.contextmanager
def _kept_as_it_is(module: nn.Module) -> Iterator[None]:
    """Undo what a trace leaves in a module that replaces or keeps tensors: those of the trace are no numbers.

    Transformers' rotary embeddings choose their frequencies by the length, LeViT fills a cache of its bias.
    """
    held: dict[int, tuple[Any, Any]] = {}

    def hold(value: Any) -> None:
        # Others may refuse to be changed, as the configurations of diffusers do.
        if type(value) in (dict, list, set, OrderedDict, defaultdict) and id(value) not in held:
            held[id(value)] = value, copy.copy(value)
            for each in value.values() if isinstance(value, dict) else value:
                hold(each)

    for part in module.modules():
        hold(part.__dict__)
    try:
        yield
    finally:
        for value, before in held.values():
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(before)


@contextlib.contextmanager
def _batched_experts(module: nn.Module) -> Iterator[None]:
    """Let Transformers' mixtures of experts multiply in batches: ONNX has no grouped GEMM."""
    name = "_experts_implementation"
    with contextlib.ExitStack() as stack:
        for config in [part.config for part in module.modules() if hasattr(part, "config")]:
            if getattr(config, name, None) in ("grouped_mm", "eager"):  # parts may share it
                stack.callback(setattr, config, name, getattr(config, name))
                setattr(config, name, "batched_mm")
        yield


@contextlib.contextmanager
def _skip_needless_casts() -> Iterator[None]:
    """Let `part.to(dtype)` in a `forward` do nothing where the weights have that type.

    PyTorch swaps the weights there whatever their type, which it cannot while it traces them.
    """
    convert = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        settled = all(
            device in (None, each.device) and dtype in (None, each.dtype)
            for each in (*self.parameters(), *self.buffers())
        )
        return self if settled else convert(self, *args, **kwargs)

    with swapped(nn.Module, "to", to):
        yield


@contextlib.contextmanager
def _explicit_forward(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """A `forward` with a parameter for every input, as `**kwargs` have no place in `dynamic_shapes`."""
    if all(each.kind is not each.VAR_KEYWORD for each in signature(module.forward).parameters.values()):
        yield
        return
    kind, own = type(module), module.__dict__.pop("forward", None)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        return kind.forward(self, **inputs) if own is None else own(**inputs)

    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names)]
    forward.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    # In a class: strict tracing would name the weights by a method of the object.
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    try:
        yield
    finally:
        module.__class__ = kind
        if own is not None:
            module.forward = own


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every part trains again that did."""
    with contextlib.ExitStack() as stack, torch.no_grad():
        for part in module.modules():
            stack.callback(setattr, part, "training", part.training)
        module.eval()
        yield


# -- what goes in and out ----------------------------------------------------------------------------


def _refuse_changes(program: ExportedProgram) -> None:
    """A graph cannot write to a module's buffers, nor to what it is given.

    A buffer that is overwritten before it is read keeps nothing for the next call, and is none of its state.
    """
    kinds = {OutputKind.BUFFER_MUTATION: "its buffer", OutputKind.USER_INPUT_MUTATION: "its input"}
    signature = program.graph_signature
    read = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    overwritten = {signature.inputs_to_buffers[name] for name in signature.inputs_to_buffers.keys() - read}
    written = [
        spec for spec in signature.output_specs if spec.kind in kinds and spec.target not in overwritten
    ]
    if changed := ", ".join(f"{kinds[spec.kind]} {spec.target}" for spec in written):
        hint = "make a KV cache an input (kv_cache=, positions=); copy anything else that is changed in place"
        raise ExportError("The module changes its own inputs or buffers.", got=changed, hint=hint)


def _cast_outputs(model: ir.Model, returned: Sequence[Tensor]) -> None:
    """Give every output its type in the program: PyTorch forgets the cast behind a half-precision sum."""
    for index, (value, tensor) in enumerate(zip(list(model.graph.outputs), returned, strict=True)):
        if tensor.is_complex():
            hint = "torch.view_as_real"
            raise ExportError("The module returns complex numbers.", got=tensor.dtype, hint=hint)
        wanted = from_torch_dtype(tensor.dtype) if tensor.is_floating_point() else value.dtype
        if wanted is None or value.dtype in (None, wanted):
            continue
        cast = _cast(value, wanted, f"{value.name}_cast")
        model.graph.append(cast)
        model.graph.outputs[index] = cast.outputs[0]


def _fed_nodes(program: ExportedProgram) -> dict[str, str]:
    """The FX node of every input by its name: PyTorch renames some, such as `input`."""
    spec = program.call_spec.in_spec
    names = [] if spec is None else list(spec.unflatten([None] * spec.num_leaves)[1])
    specs = program.graph_signature.input_specs
    nodes = [each.arg.name for each in specs if each.kind is InputKind.USER_INPUT]
    return dict(zip(names, nodes, strict=True))


def _name_inputs(model: ir.Model, fed: Mapping[str, str], order: list[str]) -> None:
    """Name and order the inputs as the user does, and refuse those that nothing depends on."""
    values = dict(zip(fed, model.graph.inputs, strict=True))
    unused = [name for name, value in values.items() if not value.uses() and not value.is_graph_output()]
    if unused:
        hint = "leave these inputs out"
        raise ExportError("The result does not depend on every input.", got=", ".join(unused), hint=hint)
    for name, value in values.items():
        value.name = name
    model.graph.inputs[:] = [values[name] for name in order]


def _name_outputs(model: ir.Model, names: list[str]) -> dict[str, str]:
    """Name the outputs. Other values of these names get new ones: the old ones by the new are given back."""
    outputs = dict(zip(names, model.graph.outputs, strict=True))
    inner = {value.name: value for node in model.graph.all_nodes() for value in node.outputs if value.name}
    taken, moved = {*inner, *names, *(value.name for value in model.graph.inputs)}, {}
    for name in names:
        value = inner.get(name)
        if value is not None and value is not outputs[name] and not value.is_graph_output():
            value.name = next(free for i in count(1) if (free := f"{name}_{i}") not in taken)
            taken.add(value.name)
            moved[value.name] = name
    for name, value in outputs.items():
        value.name = name
    return moved
