"""Evaluate a module or its exported program: in its own precision, as a GPU rounds it, and in FP64."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from threading import Lock
from types import MappingProxyType
from typing import Any, TypeGuard, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec
from torch.fx import GraphModule, Interpreter, Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from mha_deploy.errors import ExportError
from mha_deploy.exporter.axes import ExportedModule
from mha_deploy.exporter.samples import DECISION_ELEMENTS, RoundingMode
from mha_deploy.model.masking import ABSORBS_FLOAT32, absorbs_all_scores
from mha_deploy.model.precision import Precision
from mha_deploy.rounding import ACCUMULATED, MARGIN, MIX

T = TypeVar("T")

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
_SUMS_OF_TWO = frozenset({_aten.add, _aten.add_, _aten.sub, _aten.sub_})
_HALF_TO_FLOAT = frozenset({_aten._softmax, _aten._log_softmax})  # their third argument says: give float32


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """The arguments of a call with every tensor and type changed; many times faster than PyTorch's trees."""
    kind = type(value)
    if kind is Tensor:
        return change(value)
    if kind is int or kind is float or kind is bool or value is None:
        return value
    if kind is tuple:
        return tuple([_changed(each, change) for each in value])
    if isinstance(value, list):  # a program has lists of its own type
        return [_changed(each, change) for each in value]
    if isinstance(value, dict):
        return {name: _changed(each, change) for name, each in value.items()}
    return change(value)


@contextlib.contextmanager
def by_default(dtype: torch.dtype) -> Iterator[None]:
    """Another type of new tensors, and of quotients of integers, in all threads."""
    own = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(own)


def two_at_once(works: Sequence[Callable[[], T]]) -> list[T]:
    """The results of several computations, two at a time, each on half of the threads.

    All threads of PyTorch share every GEMM, and wait for each other after it: on two cores that both do
    something else as well, many times as long as the GEMM takes.
    """
    threads = torch.get_num_threads()
    if threads < 2 or len(works) < 2:
        return [work() for work in works]
    pool = ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(threads // 2,))
    try:
        return list(pool.map(lambda work: work(), works))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interruption does not wait for the others


_KEPT_BYTES = 1 << 28  # of GEMMs that may be repeated


class Repeated:
    """GEMMs of several runs of one model on the same inputs: those of inputs and weights are alike in all.

    They are known by their place in a run. Only equal operands give the result of before.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[Any], Tensor] | None] = {}
        self._left, self._lock = _KEPT_BYTES, Lock()

    def compute(self, place: int, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of a call, as it was or computed now."""
        given = [func, *tree_leaves((args, kwargs))]
        if (known := self._known.get(place)) is not None:
            if _are_equal(given, known[0]):
                return known[1].clone()  # a module may change it
            self._known[place] = None  # rounding reaches it: so it does in the next run
        result = func(*args, **kwargs)
        with self._lock:
            if place not in self._known:
                size = sum(each.nbytes for each in (*given, result) if isinstance(each, Tensor))
                self._left -= size if (fits := isinstance(result, Tensor) and size <= self._left) else 0
                self._known[place] = (given, result.clone()) if fits else None
        return result


def _are_equal(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether the arguments of two calls are: tensors of one type, number by number."""
    if len(ours) != len(theirs):
        return False
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            alike = one.dtype is other.dtype and one.shape == other.shape and torch.equal(one, other)
        else:
            alike = type(one) is type(other) and bool(one == other)
        if not alike:
            return False
    return True


class Float64(Intercept):
    """Compute every call in FP64, also where it names another type: the oracle of what runs inside.

    Weights are upcast where they are used, one by one. `wide` is the type of each type inside.
    """

    wide: Mapping[torch.dtype, torch.dtype] = _WIDE
    repeated: Repeated | None = None
    _place = 0  # how many GEMMs were computed

    def upcast(self, tensor: Tensor) -> Tensor:
        """A floating-point tensor in the type of this mode; others as they are."""
        wide = self.wide.get(tensor.dtype)
        return tensor if wide is None or wide is tensor.dtype else tensor.to(wide)

    def _upcast_leaf(self, leaf: Any) -> Any:
        """A tensor or a type, as this mode has it."""
        if isinstance(leaf, Tensor):
            return self.upcast(leaf)
        return self.wide.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf

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
            return self.upcast(func(*args, **kwargs))
        args, kwargs = _changed((args, kwargs), self._upcast_leaf)
        if packet in _HALF_TO_FLOAT:
            args = (*args[:2], False)
        if packet is _aten.scaled_dot_product_attention:
            args, kwargs = _fully_masked_alike(args, kwargs)
        if torch.get_default_dtype() is (wide := self.wide[torch.float16]):
            result = self._compute(func, args, kwargs)
        else:
            with by_default(wide):
                result = self._compute(func, args, kwargs)
        if getattr(packet, "__name__", "").startswith("fake_quantize"):
            result = tree_map_only(Tensor, lambda each: _with_nan(each, args[0]), result)
        if packet in _SUMS_OF_TWO and isinstance(result, Tensor) and result.is_floating_point():
            result = torch.where(result <= ABSORBS_FLOAT32, result.float().to(result.dtype), result)
        if self.wide is not _WIDE:  # a module may ask for another type itself
            is_one = isinstance(result, Tensor)
            return self.upcast(result) if is_one else tree_map_only(Tensor, self.upcast, result)
        found = [result] if isinstance(result, Tensor) else tensors_in(result)
        if narrow := [each.dtype for each in found if each.dtype in _WIDE]:
            got = f"{func}: {narrow[0]}"
            hint = "plain PyTorch operators in its place"
            raise ExportError("An operator of the module does not compute in FP64.", got=got, hint=hint)
        return result

    def _compute(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
        if self.repeated is None or name not in _MATMULS:
            return func(*args, **kwargs)
        self._place += 1
        return self.repeated.compute(self._place, func, args, kwargs)


def _with_nan(levels: Tensor, operand: Tensor) -> Tensor:
    """What was quantized, with NaN where that was: PyTorch makes the lowest level of it."""
    return torch.where(operand.isnan(), operand, levels) if levels.is_floating_point() else levels


# -- With random rounding: what a precision costs ---------------------------------------------------

# Where kernels round: what a GEMM reads and writes, what norms, softmax and activations write. Elementwise
# operators are fused into these, but for sums of two tensors: a residual stream is written after each.
_ADDING = frozenset(["addmm", "baddbmm"])  # to what they multiply: for scores, a mask
_MATMULS = frozenset(
    [
        "linear",
        "matmul",
        "__matmul__",
        "__rmatmul__",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "einsum",
        "mv",
        "dot",
        "inner",
        "tensordot",
        "bilinear",
        "conv1d",
        "conv2d",
        "conv3d",
        "convolution",
        "_convolution",
        "conv_transpose1d",
        "conv_transpose2d",
        "_grouped_mm",
    ]
)
_ROUNDED = frozenset(
    [
        "softmax",
        "_softmax",
        "log_softmax",
        "_log_softmax",
        "layer_norm",
        "native_layer_norm",
        "rms_norm",
        "group_norm",
        "batch_norm",
        "native_group_norm",
        "instance_norm",
        "_native_batch_norm_legit_no_training",
        "gelu",
        "silu",
        "silu_",
        "mish",
        "elu",
        "tanh",
        "sigmoid",
        "hardswish",
        "softplus",
        "leaky_relu",
        "embedding",
    ]
)
_SUMS = frozenset(
    ["add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__"]
)
_SCALED = frozenset(["mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply", "divide", "true_divide"])
_SCALED |= {"div", "div_", "__truediv__", "__itruediv__"}
_SPREAD = frozenset(["expand", "expand_as", "broadcast_to"])
_REDUCED = frozenset(["norm", "vector_norm", "linalg_norm", "linalg_vector_norm", "sum", "mean", "prod"])
_REDUCED |= {"var", "std", "var_mean", "std_mean", "amax", "amin", "logsumexp"}
_ALONG_LAST = frozenset(["topk", "sort", "argsort", "kthvalue"])  # the axis by default; others: all numbers
_ORDERED = frozenset(["topk", "argmax", "argmin", "max", "min", "sort", "argsort", "kthvalue", "median"])
_COMPARED = frozenset(
    [
        "gt",
        "lt",
        "ge",
        "le",
        "gt_",
        "lt_",
        "__gt__",
        "__lt__",
        "__ge__",
        "__le__",
        "greater",
        "less",
        "round",
        "floor",
        "ceil",
        "trunc",
        "sign",
        "bucketize",
        "searchsorted",
    ]
)
_ROUNDING = _MATMULS | _ROUNDED | _SUMS | {"scaled_dot_product_attention"}
_SCORES_BYTES = 1 << 28  # of attention scores at a time

_NARROWER = {torch.complex32: torch.complex64, torch.complex128: torch.complex64}
_NARROWER |= dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), torch.float32)
_SIGNIFICANDS = {torch.float64: (torch.int64, 53), torch.float32: (torch.int32, 24)}


# Numbers at a time: what is between them stays in the cache of a core. Where PyTorch has several threads, it
# starts them for more, and for work this short they wait for each other: where other programs run, twenty
# times as long.
_CHUNK, _CHUNK_ON_ONE_THREAD = 1 << 15, 1 << 17

_Change = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Changes the numbers of the first tensor, each by itself, into the second; the third is for in between."""


def _hashed(bits: Tensor, seed: int, result: Tensor, between: Tensor) -> Tensor:
    """Random bits that depend on a number alone: equal numbers are rounded alike, as a GPU does."""
    first, last, factors = (
        (15, 13, (0x4F6CDD1D, 0x31A53F85)) if bits.dtype is torch.int32 else (29, 32, MIX[1:])
    )
    most = torch.iinfo(bits.dtype).max
    torch.bitwise_xor(bits, _number(seed * MIX[0] & most, bits), out=result).mul_(_number(factors[0], bits))
    torch.bitwise_right_shift(result, _number(first, bits), out=between)
    result.bitwise_xor_(between).mul_(_number(factors[1], bits))
    torch.bitwise_right_shift(result, _number(last, bits), out=between)
    return result.bitwise_xor_(between)


def _number(value: int, like: Tensor) -> Tensor:
    """A number in the type of a tensor: PyTorch would convert one of Python's in every call."""
    return _numbers(value, like.dtype, like.device)


@lru_cache(256)
def _numbers(value: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def _has_no_bits(bits: Tensor, mask: int) -> bool:
    """Whether no number of a tensor has any of these bits; mostly its first row shows it."""
    few = bits[(0,) * (bits.dim() - 1)] if bits.numel() else bits
    return not any((part & _number(mask, bits)).count_nonzero() for part in (few, bits))


def _by_chunks(change: _Change, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of a tensor, each changed by itself: a large one chunk by chunk, which is much faster."""
    result = torch.empty_like(tensor, dtype=dtype)
    if tensor.numel() <= _CHUNK or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return change(tensor, result, torch.empty_like(tensor))
    threads = min(torch.get_num_threads(), -(-tensor.numel() // _CHUNK))
    size = _CHUNK if threads > 1 else _CHUNK_ON_ONE_THREAD
    given, taken = tensor.view(-1).split(size), result.view(-1).split(size)

    def work(start: int) -> None:
        between = torch.empty(size, dtype=tensor.dtype)
        with torch.inference_mode():
            for chunk, to in zip(given[start::threads], taken[start::threads], strict=True):
                change(chunk, to, between[: len(chunk)])

    if threads == 1:
        work(0)
        return result
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    return result


class RandomRounding(Float64, RoundingMode):
    """Round at random where kernels round: one sample of what a precision costs.

    A number goes to one of its two neighbors with so many bits of significand, with a probability that
    makes the mean exact. Its range is that of float32, in which a precision of 16 bits is computed here:
    what that loses is far less. Others are computed in FP64.
    """

    def __init__(
        self,
        precision: Precision | None = None,
        seed: int = 0,
        changes: Sequence[np.ndarray | None] = (),
        sign: int = 1,
    ) -> None:
        Float64.__init__(self)
        RoundingMode.__init__(self, precision, seed, changes, sign)
        # No kernel computes in more than float32: there, what is fused is rounded as well.
        self._everywhere = precision is not None and precision.name == "fp32"
        # The tensors that come from rounded numbers, and whether from a reduction of them.
        self._written = WeakTensorKeyDictionary()
        self._learnt = WeakTensorKeyDictionary()  # those that come from weights alone
        if precision and precision.bytes == 2:
            self.wide = _NARROWER

    @staticmethod
    def remember() -> Repeated:
        """The GEMMs of inputs and weights."""
        return Repeated()

    def run_all(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """The results of several runs: in float32 two at once, which take as much memory as one in FP64."""
        if self.wide is not _NARROWER or torch.cuda.is_initialized():
            return super().run_all(works)
        return two_at_once(works)

    def rounded(self, tensor: Tensor) -> Tensor:
        """A tensor of wide numbers, rounded."""
        if self._bits is None or tensor.dtype not in _SIGNIFICANDS:
            return tensor
        integer, significand = _SIGNIFICANDS[tensor.dtype]
        mask = (1 << (significand - self._bits)) - 1
        if _has_no_bits(tensor.view(integer), mask):
            return tensor

        def change(bits: Tensor, result: Tensor, between: Tensor) -> Tensor:
            _hashed(bits, self._seed, result, between).bitwise_and_(_number(mask, bits))
            return result.add_(bits).bitwise_and_(_number(~mask, bits))

        return _by_chunks(change, tensor.view(integer), integer).view(tensor.dtype)

    def _operand(self, tensor: Any) -> Any:
        """An operand of a GEMM; one in a half precision has few bits already."""
        if not isinstance(tensor, Tensor):
            return tensor
        wide = self.upcast(tensor)
        return wide if tensor.dtype in _HALVES else self.rounded(wide)

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """One call, rounded where kernels round; its factors, too, where they scale what was rounded."""
        name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
        if name == "__get__":  # an attribute, such as the shape
            return func(*args, **kwargs)
        if self._factor_bits is None:
            return self._rounded_call(name, func, args, kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if _is_float(each)]
        follows = any(each in self._written for each in given)
        if "norm" in name and name in _ROUNDED:
            args, kwargs = _changed((args, kwargs), self._constant)
        elif follows and name in _SCALED:
            shapes = [each.shape for each in args if isinstance(each, Tensor)]
            most = math.prod(torch.broadcast_shapes(*shapes))
            args = tuple(self._factor(each, most) for each in args)
        elif args and name in _SPREAD and self._written.get(args[0], False):
            args = (self.rounded(self.upcast(args[0])), *args[1:])
        result = self._rounded_call(name, func, args, kwargs)
        is_reduced = name in _REDUCED or any(self._written.get(each, False) for each in given)
        if name in _SUMS:  # that of a mean and an epsilon is one; that with what was not reduced is none
            is_reduced = is_reduced and all(self._written.get(each, True) for each in given)
        is_written = follows or name in _ROUNDING
        if is_written or (given and all(map(self._is_learnt, given))):
            for each in filter(_is_float, tensors_in(result)):
                if is_written:
                    self._written[each] = follows and is_reduced and (name in _SUMS or name not in _ROUNDING)
                else:
                    self._learnt[each] = True
        return result

    def _is_learnt(self, tensor: Tensor) -> bool:
        """Whether a tensor is computed from weights alone: it is a constant of the graph."""
        return isinstance(tensor, torch.nn.Parameter) or tensor in self._learnt

    def _factor(self, factor: Any, most: int) -> Any:
        """A factor of so many numbers, as this sample has it."""
        if isinstance(factor, float):
            return float(self.factor(np.array([factor]))[0])
        if _is_float(factor) and factor in self._written:  # a kernel of its own writes what was reduced
            is_whole = factor.numel() == most or not self._written[factor]
            return factor if is_whole else self.rounded(self.upcast(factor))
        return self._constant(factor, of_one=True)

    def _constant(self, factor: Any, *, of_one: bool = False) -> Any:
        """A factor that is a weight, as this sample has it, or `of_one` number; others as they are."""
        if not _is_float(factor) or not (self._is_learnt(factor) or (of_one and factor.numel() == 1)):
            return factor
        numbers = self.factor(factor.detach().to("cpu", torch.float64).numpy())
        return torch.from_numpy(numbers).to(factor.device)

    def _rounded_call(self, name: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """One call, rounded where kernels round."""
        if name == "scaled_dot_product_attention" and self._bits is not None:
            args, kwargs = _changed((args, kwargs), self._operand)
            args, kwargs = _fully_masked_alike(args, kwargs)
            return self._attention(*args, **kwargs)
        if name in _MATMULS and self._bits is not None:
            args, kwargs = _changed((args, kwargs), self._operand)
            result = super().call(func, args, kwargs)
            total = self.rounded(self._accumulate(name, args, result))
            return _but_absorbed(result, total) if name in _ADDING else total
        if name in _ORDERED or name in _COMPARED:
            return self._decide(name, func, args, kwargs)
        result = super().call(func, args, kwargs)
        is_sum = name in _SUMS and _sums_tensors(args, result)
        if is_sum or self._everywhere or name in _ROUNDED:
            rounded = self._rounded_sum if is_sum else self.rounded
            return rounded(result) if isinstance(result, Tensor) else tree_map_only(Tensor, rounded, result)
        return result

    def _rounded_sum(self, total: Tensor) -> Tensor:
        """A sum, rounded, but for what a mask absorbed."""
        rounded = self.rounded(total)
        return rounded if rounded is total else _but_absorbed(total, rounded)

    def _accumulate(self, name: str, args: Any, result: Tensor) -> Tensor:
        """The result of a GEMM with what its accumulation loses."""
        operands = [each for each in args if isinstance(each, Tensor) and each.is_floating_point()]
        if not self._accumulated or name == "einsum" or len(operands) < 2 or "conv" in name:
            return result
        a, b = operands[-2:] if name in _ADDING else operands[:2]
        terms = a.shape[-1]
        if name == "linear":
            sizes = b.square().mean(-1)
        else:
            sizes = b.square().mean(-2 if b.dim() > 1 else -1)
            sizes = sizes.unsqueeze(-2) if b.dim() > 1 else sizes
        half_walk = terms * a.square().mean(-1, keepdim=True) / 2 * sizes
        partial_sums = result.square().div_(3).add_(half_walk).sqrt_()
        noise = partial_sums.mul_(ACCUMULATED * math.sqrt(terms) * self._accumulated)
        return noise.mul_(self._normal(result)).add_(result)

    def _normal(self, like: Tensor) -> Tensor:
        """Numbers that are nearly normal, and depend on a tensor's own."""
        integer = _SIGNIFICANDS[like.dtype][0]

        def draw(numbers: Tensor, result: Tensor, parts: Tensor) -> Tensor:
            bits = _hashed(numbers, self._seed ^ 0x5DEECE66D, result.view(integer), parts)
            byte, eight = _number(0xFF, bits), _number(8, bits)
            torch.bitwise_and(bits, byte, out=parts)
            parts.add_(bits.bitwise_right_shift_(eight) & byte)
            parts.add_(bits.bitwise_right_shift_(eight).bitwise_and_(byte))
            return result.copy_(parts).mul_(2.0 / 0xFF).sub_(3.0)

        return _by_chunks(draw, like.view(integer), like.dtype)

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention as a textbook writes it: scores and weights are rounded."""
        if enable_gqa and q.dim() > 2 and k.shape[-3] != q.shape[-3]:
            k, v = (each.repeat_interleave(q.shape[-3] // each.shape[-3], -3) for each in (k, v))
        S, T = q.shape[-2], k.shape[-2]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        rows = max(1, _SCORES_BYTES // max(1, 8 * math.prod(q.shape[:-2]) * T))
        mask = torch.ones(S, T, dtype=torch.bool, device=q.device).tril() if is_causal else attn_mask
        blocks, matmul = [], torch.matmul
        for start in range(0, S, rows):
            part = q[..., start : start + rows, :]
            scores = matmul(part, k.transpose(-1, -2))
            scores = self._accumulate("matmul", (part, k.transpose(-1, -2)), scores)
            scores = self.rounded(scores.mul_(scale))
            if mask is not None:
                part_mask = (
                    mask if mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., start : start + rows, :]
                )
                is_bool = part_mask.dtype == torch.bool
                scores = scores.masked_fill(~part_mask, -math.inf) if is_bool else scores + part_mask
                scores = self.rounded(scores) if self._everywhere and not is_bool else scores
            weights = self.rounded(torch.softmax(scores, -1).nan_to_num_(0.0))
            blocks.append(self._accumulate("matmul", (weights, v), matmul(weights, v)))
        result = self.rounded(torch.cat(blocks, -2) if len(blocks) > 1 else blocks[0])
        # A view that follows may need the strides of PyTorch's own result: queries before heads.
        return result.transpose(1, 2).contiguous().transpose(1, 2) if result.dim() == 4 else result

    def _decide(self, name: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A decision, whose operand is noted, and changed where that was requested."""
        result = super().call(func, args, kwargs)
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return result
        operand, index = self.upcast(args[0]), len(self.decisions)
        other = args[1] if name in _COMPARED and len(args) > 1 else None
        other = other if isinstance(other, Tensor) and other.is_floating_point() else None
        noted = operand if other is None else operand - self.upcast(other)
        small = noted.numel() <= DECISION_ELEMENTS
        self.decisions.append(noted.double().cpu().numpy().copy() if small else None)
        change = self._changes[index] if index < len(self._changes) else None
        if change is None or change.shape != tuple(noted.shape):
            return result
        moved, axis = self._sign * MARGIN * torch.from_numpy(np.asarray(change)).to(noted), -1
        if name in _ORDERED:  # neighbors in order go towards each other in this sample or its counterpart
            at = 2 if name in ("topk", "kthvalue") else 1
            dim = kwargs.get("dim", args[at] if len(args) > at else -1 if name in _ALONG_LAST else None)
            flat = noted if noted.dim() and isinstance(dim, int) else noted.flatten()
            axis = dim if isinstance(dim, int) else -1
            ranks = flat.argsort(axis).argsort(axis).view(noted.shape)
            moved = moved * (1 - 2 * (ranks % 2))
        otherwise = super().call(func, (operand + moved, *args[1:]), kwargs)
        if name in _ORDERED and len(found := tensors_in(otherwise)) == 2:  # other places, the same numbers
            places = found[1]
            if places.dim() == operand.dim():
                otherwise = (operand.gather(axis, places), places)
            elif places.dim() == operand.dim() - 1:
                otherwise = (operand.gather(axis, places.unsqueeze(axis)).squeeze(axis), places)
        pairs = zip(tensors_in(result), tensors_in(otherwise), strict=True)
        if all(one.is_floating_point() or torch.equal(one, other) for one, other in pairs):
            return result
        self.changed = True
        return otherwise


def _but_absorbed(total: Tensor, rounded: Tensor) -> Tensor:
    """A rounded sum, but for what a mask absorbed: rounded, float32's lowest number would be infinite."""
    return torch.where(total <= ABSORBS_FLOAT32, total, rounded)


def _is_float(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.is_floating_point()


def _sums_tensors(args: Any, result: Any) -> bool:
    """Whether a sum is that of two tensors of the size of their sum."""
    given = [each for each in args[:2] if isinstance(each, Tensor)]
    return len(given) == 2 and isinstance(result, Tensor) and all(x.shape == result.shape for x in given)


_CASTS = frozenset(["_to_copy", "to", "convert_element_type"])


def upcast_nodes(program: ExportedProgram) -> frozenset[str]:
    """The FX nodes that convert to a wider type what elementwise operators made of half-precision inputs.

    Nothing else rounds these numbers, and they may be large: a time step times 1000 is rounded to FP16 before
    its sine is computed in float32.
    """
    specs = program.graph_signature.input_specs
    inputs = {spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT}
    exact, given, made, found = set[Node](), set[Node](), set[Node](), set[str]()
    for node in program.graph.nodes:
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        sources = {*node.all_input_nodes}
        if name in _ROUNDING or not sources <= exact:
            continue
        exact.add(node)
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        if value.dtype in _HALVES and node.name in inputs:
            given.add(node)
        elif value.dtype in _HALVES and sources & (given | made):
            made.add(node)
        elif value.is_floating_point() and name in _CASTS and sources & made:
            found.add(node.name)
    return frozenset(found)


def run_in_float64(
    module: torch.nn.Module, arguments: Mapping[str, Tensor], mode: Float64 | None = None
) -> tuple[Tensor, ...]:
    """Run a module in FP64, on its own weights: the tensors that it returns; rounded if `mode` rounds."""
    with torch.inference_mode(), mode or Float64():
        return tuple(tensors_in(module(**{name: upcast(each) for name, each in arguments.items()})))


def run_program(
    exported: ExportedModule,
    inputs: Mapping[str, Tensor],
    *,
    mode: Intercept | None = None,
    keep: Collection[str] = (),
) -> tuple[Values, Values]:
    """Run the program of a module: its outputs by name, and the values of the graph that are to be kept.

    The mode is that of the oracle, FP64, if none is given.
    """
    program, mode = exported.program, mode or Float64()
    is_exact = isinstance(mode, Float64)
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

    if program not in _KNOWN:
        has_branches = any(map(_is_higher_order, program.graph.nodes))
        _KNOWN[program] = deciding_nodes(program), upcast_nodes(program), has_branches
    deciding, upcasts, has_branches = _KNOWN[program]
    deciding = deciding if is_exact else frozenset()
    rounded = dict.fromkeys(upcasts, mode.rounded) if isinstance(mode, RandomRounding) else {}
    given_all = [argument(spec) for spec in program.graph_signature.input_specs]
    run = _Interpreter(program.graph_module, map(str, nodes.values()), deciding, rounded)
    with torch.no_grad(), mode:
        if nodes or deciding or rounded or has_branches:
            results = run.run(*given_all)
        else:  # as PyTorch writes it in Python, which is faster
            results = program.graph_module(*given_all)
    returned = [each for each in results[-len(program.graph_signature.user_outputs) :] if each is not None]
    returned = [upcast(each) for each in returned] if is_exact else returned
    outputs = dict(zip(exported.outputs, returned, strict=True))
    return outputs, {name: run.kept[str(node)] for name, node in nodes.items()}


# Of a program that was run: its deciding nodes, those that upcast, and whether it has control flow.
_KNOWN: WeakKeyDictionary[ExportedProgram, tuple[frozenset[str], frozenset[str], bool]]
_KNOWN = WeakKeyDictionary()


def _is_higher_order(node: Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator)


class _Interpreter(Interpreter):
    """Runs a program and keeps some of its values; the others are freed as soon as they are not needed.

    The deciding nodes are computed in the types of the program. Results of others are `rounded`, by name.
    """

    def __init__(
        self,
        graph: GraphModule,
        keep: Iterable[str] = (),
        deciding: Collection[str] = frozenset(),
        rounded: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({}),
    ) -> None:
        super().__init__(graph, garbage_collect_values=True)
        self.kept: Values = {}
        self._keep, self._deciding, self._rounded = frozenset(keep), deciding, rounded

    def run_node(self, n: Node) -> Any:
        with torch._C.DisableTorchFunction() if n.name in self._deciding else nullcontext():
            result = super().run_node(n)
        if n.name in self._rounded:
            with torch._C.DisableTorchFunction():
                result = self._rounded[n.name](result)
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
    masked = absorbs_all_scores(best)
    if not bool(masked.any()):
        return args, kwargs
    query = given["query"].clone().masked_fill_(masked, 0.0)  # a clone keeps strides, which a view may need
    mask = torch.where(masked, mask - best, mask)
    kwargs = {name: each for name, each in kwargs.items() if name not in names}
    return (query, given["key"], given["value"], mask, *rest), kwargs


def upcast(tensor: Tensor) -> Tensor:
    """A floating-point tensor in FP64; others as they are."""
    return tensor.to(_WIDE.get(tensor.dtype, tensor.dtype))
