"""The FP64 oracle of an exported program: every type in it upcast, decisions kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves, tree_map_only

from mha_deploy.errors import ExportError
from mha_deploy.export.axes import ExportedModule

# -- Find the integers that a program decides on by floating-point arithmetic over integers --------

_LEARNT = (InputKind.PARAMETER, InputKind.USER_INPUT)


def deciding_nodes(program: ExportedProgram) -> frozenset[str]:
    """The FX nodes of floats that come from integers and constants alone, and that integers come from.

    What depends on floating-point inputs or weights is not among them: there, FP64 is the reference.
    """
    computed = [node for node in program.graph.nodes if node.op == "call_function"]
    given = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind in _LEARNT}
    plain = {
        node
        for node in program.graph.nodes
        if node.op == "get_attr" or (node.op == "placeholder" and node.name not in given)
    }
    for node in computed:
        if _kind(node) == "float" and all(n in plain for n in node.all_input_nodes if _kind(n) == "float"):
            plain.add(node)
    deciding: set[Node] = set()
    for node in reversed(computed):
        if node in plain and any(user in deciding or _kind(user) == "discrete" for user in node.users):
            deciding.add(node)
    return frozenset(node.name for node in deciding)


def _kind(node: Node) -> str | None:
    """What a node computes: a tensor of floats, of complex numbers, or of integers; None for another."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    return "float" if value.is_floating_point() else "complex" if value.is_complex() else "discrete"


# -- Run an exported program: in FP64 throughout, which is what is true of it, or in its own types -

Values = dict[str, Tensor]

_WIDE = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}
_WIDE |= dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
_HALVES = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten
# What accumulates. In half precision a GPU does so in float32 and rounds once.
_GEMMS = frozenset(
    {
        *(_aten.linear, _aten.matmul, _aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten.einsum),
        *(_aten.conv1d, _aten.conv2d, _aten.conv3d, _aten.convolution, _aten.scaled_dot_product_attention),
    }
)
# In float32 a mask of -1e9 absorbs the score that it is added to: a fully masked query gives the mean of the
# values, and that is what the module means.
_ABSORBING = -(2.0**26)
_SUMS_OF_TWO = frozenset({_aten.add, _aten.add_, _aten.sub, _aten.sub_})
_HALF_TO_FLOAT = frozenset({_aten._softmax, _aten._log_softmax})  # their third argument says: give float32


def run_program(
    exported: ExportedModule,
    inputs: Mapping[str, Tensor],
    *,
    dtype: Literal["float64", "own"] = "float64",
    keep: Collection[str] = (),
) -> tuple[Values, Values]:
    """Run the program of a module: its outputs by name, and the values of the graph that are to be kept.

    Args:
        exported: The module.
        inputs: A tensor for every input; floats are upcast where needed.
        dtype: `float64` for the oracle, `own` for the precision that the module was exported in. Matmuls
            of half-precision matrices are then accumulated in float32 on a CPU, as GPUs do.
        keep: Names of values of the graph to give out besides.

    Raises:
        ExportError: An input is missing, a kept value is no value of the program, or an operator computes
            in less than FP64 whatever it is given.
    """
    program = exported.program
    nodes = {name: exported.node_of(name) for name in keep}
    if unknown := [name for name, node in nodes.items() if node is None]:
        raise ExportError("The program computes no such value.", got=unknown[0])
    if missing := [name for name in exported.inputs if name not in inputs]:
        raise ExportError("The program needs more inputs.", got=", ".join(missing))
    given = {exported.nodes[name]: inputs[name] for name in exported.inputs}

    def argument(spec: InputSpec) -> Any:
        """What the program takes: weights, buffers and constants first, then the inputs."""
        if spec.kind is InputKind.USER_INPUT:
            return spec.arg.value if isinstance(spec.arg, ConstantArgument) else given[spec.arg.name]
        target = spec.target or ""
        return program.constants[target] if target in program.constants else program.state_dict[target]

    run = (_InFloat64 if dtype == "float64" else _InOwn)(program, [str(node) for node in nodes.values()])
    with torch.no_grad(), run.surroundings():
        results = run.run(*map(argument, program.graph_signature.input_specs))
    returned = [each for each in results[-len(program.graph_signature.user_outputs) :] if each is not None]
    outputs = dict(zip(exported.outputs, returned, strict=True))
    return outputs, {name: run.kept[str(node)] for name, node in nodes.items()}


class _Keeping(Interpreter):
    """Runs a program and keeps some of its values; the others are freed as soon as they are not needed."""

    def __init__(
        self, program: ExportedProgram, keep: Collection[str], branch: GraphModule | None = None
    ) -> None:
        super().__init__(branch or program.graph_module, garbage_collect_values=True)
        self.kept: Values = {}
        self._program, self._keep, self._node = program, frozenset(keep), ""

    def run_node(self, n: Node) -> Any:
        self._node = n.name
        result = super().run_node(n)
        if n.name in self._keep:
            self.kept[n.name] = result.detach().clone()  # another operator may write into it
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.higher_order.cond:
            condition, *branches, operands = args
            return type(self)(self._program, (), branches[0 if condition else 1]).run(*operands)
        if isinstance(target, torch._ops.HigherOrderOperator):
            raise ExportError(
                "The module has control flow that its FP64 reference cannot follow.",
                got=target.name(),
                hint="torch.where, torch.cond, or a loop over a fixed number of steps",
            )
        return self.compute(target, args, kwargs)

    def compute(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator."""
        return super().call_function(target, args, kwargs)

    def surroundings(self) -> contextlib.AbstractContextManager[None]:
        """What must be so around the run."""
        return contextlib.nullcontext()


class _InFloat64(_Keeping):
    """Every floating-point number in FP64; weights are upcast where they are used, one by one."""

    def __init__(
        self, program: ExportedProgram, keep: Collection[str], branch: GraphModule | None = None
    ) -> None:
        super().__init__(program, keep, branch)
        self._deciding = deciding_nodes(program)

    def compute(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._node in self._deciding:
            with _default_dtype(torch.float32):
                return super().compute(target, args, kwargs)
        if target is _aten.view.dtype:
            raise ExportError("The module reads the bits of its numbers.", got="Tensor.view(dtype)")
        if _packet(target) is _aten.embedding:  # a table of gigabytes, of which some rows are read
            return upcast(super().compute(target, args, kwargs))
        args, kwargs = tree_map_only(Tensor, upcast, (args, kwargs))
        args, kwargs = tree_map_only(torch.dtype, lambda dtype: _WIDE.get(dtype, dtype), (args, kwargs))
        if _packet(target) in _HALF_TO_FLOAT:
            args = (*args[:2], False)
        if _packet(target) is _aten.scaled_dot_product_attention:
            args, kwargs = _fully_masked_alike(args, kwargs)
        result = super().compute(target, args, kwargs)
        if _packet(target) in _SUMS_OF_TWO and isinstance(result, Tensor) and result.is_floating_point():
            result = torch.where(result <= _ABSORBING, result.float().to(result.dtype), result)
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.dtype in _WIDE:
                raise ExportError(
                    "An operator of the module does not compute in FP64.", got=f"{target}: {each.dtype}"
                )
        return result

    def output(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tree_map_only(Tensor, upcast, super().output(target, args, kwargs))

    def surroundings(self) -> contextlib.AbstractContextManager[None]:
        """New tensors of no given dtype, and quotients of integers, are FP64."""
        return _default_dtype(torch.float64)


class _InOwn(_Keeping):
    """Every number in the precision of the program; see `eager.Float32Accumulation` for the matmuls."""

    def compute(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = next((each for each in tree_leaves(args) if isinstance(each, Tensor)), None)
        if first is None or first.dtype not in _HALVES or first.device.type != "cpu":
            return super().compute(target, args, kwargs)
        if _packet(target) not in _GEMMS:
            return super().compute(target, args, kwargs)
        half = first.dtype
        args, kwargs = tree_map_only(Tensor, lambda x: x.float() if x.dtype == half else x, (args, kwargs))
        return super().compute(target, args, kwargs).to(half)


def _fully_masked_alike(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Attention with zeros for queries whose scores the mask absorbs: they attend to all such keys alike."""
    given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
    mask, rest = given.get("attn_mask"), args[4:]
    if mask is None or not mask.is_floating_point() or not mask.numel():
        return args, kwargs
    best = mask.amax(-1, keepdim=True)
    masked = (best <= _ABSORBING) & best.isfinite()
    if not bool(masked.any()):
        return args, kwargs
    query = (
        given["query"].clone().masked_fill_(masked, 0.0)
    )  # a clone keeps the strides, which a view may need
    mask = torch.where(masked, mask - best, mask)
    kwargs = {
        name: each for name, each in kwargs.items() if name not in ("query", "key", "value", "attn_mask")
    }
    return (query, given["key"], given["value"], mask, *rest), kwargs


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def upcast(tensor: Tensor) -> Tensor:
    """A floating-point tensor in FP64; others as they are."""
    wide = _WIDE.get(tensor.dtype)
    return tensor if wide is None else tensor.to(wide)


def _packet(target: Callable[..., Any]) -> Any:
    return getattr(target, "overloadpacket", target)
