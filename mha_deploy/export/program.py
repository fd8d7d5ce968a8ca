"""From anybody's module to an ONNX graph, together with the program it was made from.

The values of the graph have the names of the program's FX nodes, so that what a value must be can be found
out by running the program: see `widened.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from mha_deploy.errors import ExportError
from mha_deploy.export.drawn import NamedDims, draw_inputs
from mha_deploy.export.exported import ExportedModule
from mha_deploy.export.program_axes import AxisNames, dynamic_shapes, inside, trace_sizes
from mha_deploy.export.program_check import DrawInputs, check_repeats, check_small_sizes
from mha_deploy.export.program_errors import explain_failure, may_be_small_sizes, silenced
from mha_deploy.export.program_outputs import named_outputs
from mha_deploy.export.torch_exporter import comparing_multiples, first_cause, quiet, was_interrupted
from mha_deploy.spec_parts import Axis

_FLOATS = {
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.float32: ir.DataType.FLOAT,
    torch.float64: ir.DataType.DOUBLE,
}


def export_program(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    dims: NamedDims,
    axes: Mapping[str, Axis],
    *,
    opset: int = 23,
    output_names: Sequence[str] = (),
    draw: DrawInputs | None = None,
) -> ExportedModule:
    """Export a module.

    Args:
        module: The module; it is traced in evaluation mode, and left as it was.
        inputs: An example of every input, by the parameter of `forward` that takes it.
        dims: Names of their dimensions.
        axes: The range of every axis that they name. An axis of one size is a number in the graph.
        opset: ONNX operator set.
        output_names: Names of the outputs; from the keys of what `forward` returns unless given.
        draw: Makes inputs of some sizes on which the module can run; they look like `inputs` unless given.

    Raises:
        ExportError: PyTorch cannot export it, an axis cannot vary as wanted, an input is not used, the
            module changes its own buffers or inputs, or gives other results each time.
    """
    sizes = trace_sizes(inputs, dims, axes)
    example = draw_inputs(inputs, dims, sizes, seed=0)
    with _evaluating(module):
        traced, small = _traced(module, example, dims, axes, sizes)
        names = list(named_outputs(traced, output_names, list(inputs)))
        model, program = _translated(traced, example, opset)
        _refuse_changes(program)
        _refuse_control_flow(program)
        fed = _fed_nodes(program)
        returned = dict(zip(names, _returned_nodes(program), strict=True))
        _settle_inputs(model, fed, list(inputs))
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        _cast_outputs(model, [values[node] for node in returned.values()])
        moved = _settle_outputs(model, names)
        axis_names = AxisNames(dims, axes, {name: values[node] for name, node in fed.items()})
        axis_names.rename(model)
        exported = ExportedModule(
            model=model,
            program=program,
            inputs=tuple(inputs),
            outputs={name: axis_names.dims_of(values[node].shape) for name, node in returned.items()},
            nodes={**moved, **fed, **returned},
            traced_sizes=sizes,
            unproven=() if small else tuple(name for name, axis in axes.items() if axis.min < sizes[name]),
        )
        draw = draw or (lambda at: draw_inputs(inputs, dims, at, seed=1))
        check_repeats(module, draw(inside(axes, sizes)))
        check_small_sizes(exported, module, axes, draw)
    return exported


# -- PyTorch's two steps ---------------------------------------------------------------------------


def _traced(
    module: nn.Module,
    example: dict[str, Tensor],
    dims: NamedDims,
    axes: Mapping[str, Axis],
    sizes: Mapping[str, int],
) -> tuple[ExportedProgram, bool]:
    """The program, and whether PyTorch vouches for it at sizes smaller than those it was traced at."""

    def trace(small: bool = True) -> ExportedProgram:
        shapes = dynamic_shapes(dims, list(example), axes, sizes, small=small)
        with comparing_multiples():
            return torch.export.export(module, (), example, dynamic_shapes=shapes, strict=False)

    def name_of(name: str, index: int) -> str:
        named = dims.get(name, ())
        return str(named[index]) if index < len(named) else f"{name}.shape[{index}]"

    first = _tried(trace)
    if isinstance(first, ExportedProgram):
        return first, True
    if may_be_small_sizes(first):
        # A size that follows from others, such as S-1, may be 1 at a small one, which PyTorch takes apart.
        second = _tried(lambda: trace(small=False))
        if isinstance(second, ExportedProgram):
            return second, False
    raise explain_failure(first, name_of, trace) from first


def _tried(trace: Callable[[], ExportedProgram]) -> ExportedProgram | Exception:
    try:
        with quiet(), silenced():
            return trace()
    except Exception as error:  # whatever the user's module raises, or PyTorch
        if was_interrupted(error):
            raise KeyboardInterrupt from error
        return error


def _translated(
    traced: ExportedProgram, example: dict[str, Tensor], opset: int
) -> tuple[ir.Model, ExportedProgram]:
    try:
        with quiet():
            result = torch.onnx.export(
                traced, (), kwargs=example, dynamo=True, opset_version=opset, verbose=False
            )
    except torch.onnx.OnnxExporterError as error:
        if was_interrupted(error):
            raise KeyboardInterrupt from error
        raise ExportError("PyTorch could not write the module as ONNX.", got=first_cause(error)) from error
    if result is None or result.exported_program is None:
        raise ExportError("PyTorch gave no ONNX program.")
    return result.model, result.exported_program


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every part trains again that did."""
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, was in training.items():
            part.training = was


# -- what goes in and out ----------------------------------------------------------------------------


def _refuse_changes(program: ExportedProgram) -> None:
    """A graph cannot write to a module's buffers, nor to what it is given."""
    kinds = {
        OutputKind.BUFFER_MUTATION: "its buffer",
        OutputKind.USER_INPUT_MUTATION: "its input",
    }
    changed = [
        f"{kinds[spec.kind]} {spec.target}"
        for spec in program.graph_signature.output_specs
        if spec.kind in kinds
    ]
    if changed:
        raise ExportError(
            "The module writes to what it should only read.",
            got=", ".join(changed),
            hint="copy it before changing it in place",
        )


def _refuse_control_flow(program: ExportedProgram) -> None:
    """Nobody here can say what is true of a branch that was not taken."""
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise ExportError(
                "The module has control flow that hangs on its data.",
                got=node.target.name(),
                hint="torch.where",
            )


def _cast_outputs(model: ir.Model, returned: Sequence[Tensor]) -> None:
    """Give every output its type in the program: PyTorch forgets the cast behind a half-precision sum."""
    for index, (value, tensor) in enumerate(zip(list(model.graph.outputs), returned, strict=True)):
        if tensor.is_complex():
            raise ExportError(
                "The module returns complex numbers.", got=tensor.dtype, hint="torch.view_as_real"
            )
        wanted = _FLOATS.get(tensor.dtype)
        if wanted is None or value.dtype in (None, wanted):
            continue
        cast = ir.node("Cast", [value], {"to": wanted})
        cast.outputs[0].dtype, cast.outputs[0].shape = wanted, value.shape
        cast.outputs[0].name = f"{value.name}_cast"
        model.graph.append(cast)
        model.graph.outputs[index] = cast.outputs[0]


def _fed_nodes(program: ExportedProgram) -> dict[str, str]:
    """The FX node of every input by its name: PyTorch renames some, such as `input`."""
    spec = program.call_spec.in_spec
    names = [] if spec is None else list(spec.unflatten([None] * spec.num_leaves)[1])
    nodes = [
        each.arg.name for each in program.graph_signature.input_specs if each.kind is InputKind.USER_INPUT
    ]
    return dict(zip(names, nodes, strict=True))


def _returned_nodes(program: ExportedProgram) -> list[str]:
    """The FX nodes of the tensors that a program returns.

    Its signature does not know the casts that the exporter puts behind some of them, its graph does.
    """
    returned = program.graph.output_node().args[0]
    specs = program.graph_signature.output_specs
    return [
        node.name
        for node, spec in zip(returned, specs, strict=True)  # type: ignore[arg-type]
        if isinstance(node, Node) and spec.kind is OutputKind.USER_OUTPUT
    ]


def _settle_inputs(model: ir.Model, fed: Mapping[str, str], order: list[str]) -> None:
    """Name and order the inputs as the user does, and refuse those that nothing hangs on."""
    values = dict(zip(fed, model.graph.inputs, strict=True))
    unused = [name for name, value in values.items() if not value.uses() and not value.is_graph_output()]
    if unused:
        raise ExportError(
            "The result does not hang on every input.", got=", ".join(unused), hint="leave these inputs out"
        )
    for name, value in values.items():
        value.name = name
    model.graph.inputs[:] = [values[name] for name in order]


def _settle_outputs(model: ir.Model, names: list[str]) -> dict[str, str]:
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
