"""Evaluate a module or its exported program: in its own precision, as a GPU rounds it, and in FP64."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec
from torch.fx import GraphModule, Interpreter, Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mha_deploy.errors import ExportError
from mha_deploy.export.axes import ExportedModule

# -- In its own precision, also where the CPU has no fast arithmetic for it ------------------------

_HALVES = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten
# What accumulates: as a module calls it, and as an exported program does.
_PROGRAM_GEMMS = (
    *(_aten.linear, _aten.matmul, _aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten.einsum),
    *(_aten.conv1d, _aten.conv2d, _aten.conv3d, _aten.convolution, _aten.scaled_dot_product_attention),
)
_GEMMS = {F.linear, F.scaled_dot_product_attention, torch.matmul, Tensor.matmul, Tensor.__matmul__}
_GEMMS |= {getattr(packet, name) for packet in _PROGRAM_GEMMS for name in packet.overloads()}
# Their type does not decide: a mask may be wider than the queries.
_NO_OPERANDS = ("attn_mask", "bias", "out")


class Intercept(TorchFunctionMode):
    """Passes every call of PyTorch to `call`."""

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute one call; others that it makes are not passed to it."""
        raise NotImplementedError

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.call(func, args, kwargs or {})


class Float32Accumulation(Intercept):
    """Multiply half-precision matrices on a CPU as a GPU does.

    The operands are in half precision, sums are kept in float32, and each matmul is rounded once. Most
    CPUs have no such instruction, and PyTorch then takes minutes for what float32 does in a second.
    """

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """One call: a GEMM of half-precision matrices in float32, others as they are."""
        if func not in _GEMMS:
            return func(*args, **kwargs)
        # All matrices may be given by keyword; the type of the first is that of the result.
        operands = tree_leaves([*args, *(each for name, each in kwargs.items() if name not in _NO_OPERANDS)])
        first = next((each for each in operands if isinstance(each, Tensor)), None)
        if first is None or first.dtype not in _HALVES or first.device.type != "cpu":
            return func(*args, **kwargs)
        out = kwargs.get("out")
        if out is not None:
            return out.copy_(self.call(func, args, {**kwargs, "out": None}))
        args, kwargs = tree_map_only(Tensor, lambda x: x.float() if x.dtype in _HALVES else x, (args, kwargs))
        return func(*args, **kwargs).to(first.dtype)


@contextlib.contextmanager
def swapped(owner: Any, name: str, value: object) -> Iterator[None]:
    """Another attribute for a while."""
    before = vars(owner)[name]  # not getattr: it binds methods
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def dense_flex_attention() -> Iterator[None]:
    """Let `flex_attention` compute its scores in plain operators, which can be exported.

    Nor is it compiled: the compiler does not take a mode such as `Float32Accumulation`. Score and mask
    modifications are called once, on indices that broadcast to [B, H, S, T].
    """
    from torch.nn.attention import flex_attention as flex  # here: it imports PyTorch's compiler

    def block_mask(mask_mod: Any = None) -> Any:
        one = torch.ones(1, 1, 1, dtype=torch.int32)  # one block that is larger than any length
        large = flex._LARGE_SPARSE_BLOCK_SIZE
        return flex.BlockMask.from_kv_blocks(
            one, one[..., None] - 1, BLOCK_SIZE=large, mask_mod=mask_mod, compute_q_blocks=False
        )

    replaced = {
        "flex_attention_hop": _dense_attention,
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
        "create_mask": lambda *_, **__: None,
        "_convert_mask_to_block_mask": lambda *_, **__: (None, None),
        "_create_sparse_block_from_block_mask": lambda blocks, mask_mod, *_, **__: block_mask(mask_mod),
        "_create_empty_block_mask": lambda *_: block_mask(),
    }
    with contextlib.ExitStack() as stack:
        for name in filter(vars(flex).__contains__, replaced):
            stack.enter_context(swapped(flex, name, replaced[name]))
        yield


def _dense_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: float, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.transpose(-2, -1)).to(wide) * scale
    sizes = (*query.shape[:3], key.shape[2])
    b, h, i, j = (
        torch.arange(size, device=query.device).view([-1 if at == axis else 1 for axis in range(4)])
        for at, size in enumerate(sizes)
    )
    scores = score_mod(scores, b, h, i, j).expand(sizes)
    mask = block_mask[-1](b, h, i, j)
    if mask.dim():  # without a mask it is one True
        scores = torch.where(mask, scores, -math.inf)
    weights = scores.softmax(-1)
    weights = torch.where(weights.isnan(), 0.0, weights)  # a fully masked query
    largest, log_sum = scores.amax(-1), scores.logsumexp(-1)
    return weights.to(value.dtype) @ value, log_sum / math.log(2), largest / math.log(2)


def tensors_in(result: Any) -> list[Tensor]:
    """The tensors of what a module returned, in their order, however it nests them."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def run_module(module: torch.nn.Module, arguments: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Run a module without gradients: the tensors that it returns."""
    with torch.inference_mode(), dense_flex_attention(), Float32Accumulation():
        return tuple(tensors_in(module(**arguments)))


# -- The integers that a program decides on by floating-point arithmetic over integers -------------

_LEARNT = (InputKind.PARAMETER, InputKind.USER_INPUT)


def deciding_nodes(program: ExportedProgram) -> frozenset[str]:
    """The FX nodes of floats that come from integers and constants alone, and that integers come from.

    What depends on floating-point inputs or weights is not among them: there, FP64 is the reference.
    """

    def kind(node: Node) -> str | None:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return None
        return "float" if value.is_floating_point() else "complex" if value.is_complex() else "discrete"

    computed = [node for node in program.graph.nodes if node.op == "call_function"]
    given = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind in _LEARNT}
    constants = [node for node in program.graph.nodes if node.op in ("get_attr", "placeholder")]
    plain = {node for node in constants if node.name not in given}
    for node in computed:
        if kind(node) == "float" and all(n in plain for n in node.all_input_nodes if kind(n) == "float"):
            plain.add(node)
    deciding: set[Node] = set()
    for node in reversed(computed):
        if node in plain and any(user in deciding or kind(user) == "discrete" for user in node.users):
            deciding.add(node)
    return frozenset(node.name for node in deciding)


# -- In FP64: the oracle ---------------------------------------------------------------------------

Values = dict[str, Tensor]

_WIDE = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}
_WIDE |= dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
# In float32 a mask of -1e9 absorbs the score that it is added to: a fully masked query gives the mean of the
# values, and that is what the module means.
_ABSORBING = -(2.0**26)
_SUMS_OF_TWO = frozenset({_aten.add, _aten.add_, _aten.sub, _aten.sub_})
_HALF_TO_FLOAT = frozenset({_aten._softmax, _aten._log_softmax})  # their third argument says: give float32


class Float64(Intercept):
    """Compute every call in FP64, also where it names another type: the oracle of what runs inside.

    Weights are upcast where they are used, one by one.
    """

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """One call in FP64."""
        packet = getattr(func, "overloadpacket", func)
        if getattr(func, "__name__", "") == "__get__":  # an attribute, such as the shape
            return func(*args, **kwargs)
        if func is _aten.view.dtype:
            raise ExportError(
                "The module reads the bits of its numbers.",
                got="Tensor.view(dtype)",
                hint="convert with .to(dtype) in place of .view(dtype)",
            )
        if packet is _aten.embedding:  # a table of gigabytes, of which some rows are read
            return upcast(func(*args, **kwargs))
        args, kwargs = tree_map_only(Tensor, upcast, (args, kwargs))
        args, kwargs = tree_map_only(torch.dtype, lambda dtype: _WIDE.get(dtype, dtype), (args, kwargs))
        if packet in _HALF_TO_FLOAT:
            args = (*args[:2], False)
        if packet is _aten.scaled_dot_product_attention:
            args, kwargs = _fully_masked_alike(args, kwargs)
        own = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # of new tensors, and quotients of integers
        try:
            result = func(*args, **kwargs)
        finally:
            torch.set_default_dtype(own)
        if packet in _SUMS_OF_TWO and isinstance(result, Tensor) and result.is_floating_point():
            result = torch.where(result <= _ABSORBING, result.float().to(result.dtype), result)
        if narrow := [each.dtype for each in tensors_in(result) if each.dtype in _WIDE]:
            got = f"{func}: {narrow[0]}"
            raise ExportError(
                "An operator of the module does not compute in FP64.",
                got=got,
                hint="write that part of forward() with other operators",
            )
        return result


def run_in_float64(module: torch.nn.Module, arguments: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Run a module in FP64, on its own weights: the tensors that it returns."""
    with torch.inference_mode(), Float64():
        return tuple(tensors_in(module(**{name: upcast(each) for name, each in arguments.items()})))


def run_program(
    exported: ExportedModule,
    inputs: Mapping[str, Tensor],
    *,
    dtype: Literal["float64", "own"] = "float64",
    keep: Collection[str] = (),
) -> tuple[Values, Values]:
    """Run the program of a module: its outputs by name, and the values of the graph that are to be kept.

    With `float64` it is the oracle; `own` is the precision that the module was exported in.
    """
    program, is_exact = exported.program, dtype == "float64"
    nodes = {name: exported.node_of(name) for name in keep}
    if unknown := [name for name, node in nodes.items() if node is None]:
        raise ExportError(
            "The program computes no such value.",
            got=unknown[0],
            hint="the name of a value of the exported program",
        )
    if missing := [name for name in exported.inputs if name not in inputs]:
        raise ExportError(
            "The program needs more inputs.", got=", ".join(missing), hint="an example of every input"
        )
    given = {exported.nodes[name]: inputs[name] for name in exported.inputs}

    def argument(spec: InputSpec) -> Any:
        """What the program takes: weights, buffers and constants first, then the inputs."""
        if spec.kind is InputKind.USER_INPUT:
            return spec.arg.value if isinstance(spec.arg, ConstantArgument) else given[spec.arg.name]
        target = spec.target or ""
        return program.constants[target] if target in program.constants else program.state_dict[target]

    deciding = deciding_nodes(program) if is_exact else frozenset()
    run = _Interpreter(program.graph_module, map(str, nodes.values()), deciding)
    with torch.no_grad(), Float64() if is_exact else Float32Accumulation():
        results = run.run(*map(argument, program.graph_signature.input_specs))
    returned = [each for each in results[-len(program.graph_signature.user_outputs) :] if each is not None]
    returned = [upcast(each) for each in returned] if is_exact else returned
    outputs = dict(zip(exported.outputs, returned, strict=True))
    return outputs, {name: run.kept[str(node)] for name, node in nodes.items()}


class _Interpreter(Interpreter):
    """Runs a program and keeps some of its values; the others are freed as soon as they are not needed.

    The deciding nodes are computed in the types of the program.
    """

    def __init__(
        self, graph: GraphModule, keep: Iterable[str] = (), deciding: Collection[str] = frozenset()
    ) -> None:
        super().__init__(graph, garbage_collect_values=True)
        self.kept: Values = {}
        self._keep, self._deciding = frozenset(keep), deciding

    def run_node(self, n: Node) -> Any:
        with torch._C.DisableTorchFunction() if n.name in self._deciding else nullcontext():
            result = super().run_node(n)
        if n.name in self._keep:
            self.kept[n.name] = result.detach().clone()  # another operator may write into it
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.higher_order.cond:
            condition, *branches, operands = args
            return _Interpreter(branches[0 if condition else 1]).run(*operands)
        if isinstance(target, torch._ops.HigherOrderOperator):
            what = "The module has control flow that its FP64 reference cannot follow."
            hint = "torch.where, torch.cond, or a loop over a fixed number of steps"
            raise ExportError(what, got=target.name(), hint=hint)
        return super().call_function(target, args, kwargs)


def _fully_masked_alike(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Attention with zeros for queries whose scores the mask absorbs: they attend to all such keys alike."""
    names = ("query", "key", "value", "attn_mask")
    given = dict(zip(names, args, strict=False)) | kwargs
    mask, rest = given.get("attn_mask"), args[4:]
    if mask is None or not mask.is_floating_point() or not mask.numel():
        return args, kwargs
    best = mask.amax(-1, keepdim=True)
    masked = (best <= _ABSORBING) & best.isfinite()
    if not bool(masked.any()):
        return args, kwargs
    query = given["query"].clone().masked_fill_(masked, 0.0)  # a clone keeps strides, which a view may need
    mask = torch.where(masked, mask - best, mask)
    kwargs = {name: each for name, each in kwargs.items() if name not in names}
    return (query, given["key"], given["value"], mask, *rest), kwargs


def upcast(tensor: Tensor) -> Tensor:
    """A floating-point tensor in FP64; others as they are."""
    return tensor.to(_WIDE.get(tensor.dtype, tensor.dtype))
