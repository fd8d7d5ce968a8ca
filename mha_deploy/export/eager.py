"""Run a module in its own precision, also where the CPU has no fast arithmetic for it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

_HALVES = (torch.float16, torch.bfloat16)
_GEMMS = frozenset(
    {F.linear, F.scaled_dot_product_attention, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}
)
# Their type does not decide: a mask may be wider than the queries.
_NO_OPERANDS = ("attn_mask", "bias", "out")


class Float32Accumulation(TorchFunctionMode):
    """Multiply half-precision matrices on a CPU as a GPU does.

    The operands are in half precision, sums are kept in float32, and each matmul is rounded once. Most
    CPUs have no such instruction, and PyTorch then takes minutes for what float32 does in a second.
    `flex_attention` is not compiled inside: the compiler does not take a mode such as this one.
    """

    def __enter__(self) -> Float32Accumulation:
        self._flex = dense_flex_attention()
        self._flex.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._flex.__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # All matrices may be given by keyword; the type of the first is that of the result.
        operands = [*args, *(each for name, each in kwargs.items() if name not in _NO_OPERANDS)]
        first = next((each for each in operands if isinstance(each, Tensor)), None)
        if func not in _GEMMS or first is None or first.dtype not in _HALVES or first.device.type != "cpu":
            return func(*args, **kwargs)
        out = kwargs.get("out")
        if out is not None:
            return out.copy_(self.__torch_function__(func, types, args, {**kwargs, "out": None}))
        args, kwargs = tree_map_only(Tensor, lambda x: x.float() if x.dtype in _HALVES else x, (args, kwargs))
        return func(*args, **kwargs).to(first.dtype)


@contextlib.contextmanager
def dense_flex_attention() -> Iterator[None]:
    """Let `flex_attention` compute its scores in plain operators, which can be exported.

    Score and mask modifications are called once, on indices that broadcast to [B, H, S, T].
    """
    try:
        from torch.nn.attention import flex_attention as flex
    except ImportError:
        yield
        return

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
    before = {name: getattr(flex, name) for name in replaced if hasattr(flex, name)}
    for name in before:
        setattr(flex, name, replaced[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(flex, name, value)


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


def run_module(module: torch.nn.Module, arguments: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Run a module without gradients and return its outputs as a tuple."""
    with torch.inference_mode(), Float32Accumulation():
        outputs = module(**arguments)
    return outputs if isinstance(outputs, tuple) else (outputs,)
