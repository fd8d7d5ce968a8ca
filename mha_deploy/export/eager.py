"""Run a module in its own precision, also where the CPU has no fast arithmetic for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

_HALVES = (torch.float16, torch.bfloat16)
_PRODUCTS = frozenset(
    {
        F.linear,
        F.scaled_dot_product_attention,
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
    }
)
# Their type does not decide: a mask may be wider than the queries.
_NO_OPERANDS = ("attn_mask", "bias", "out")


class Float32Accumulation(TorchFunctionMode):
    """Multiply half-precision matrices on a CPU as a GPU does.

    The operands are in half precision, sums are kept in float32, and each matmul is rounded once. Most
    CPUs have no such instruction, and PyTorch then takes minutes for what float32 does in a second.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = _first_operand(args, kwargs) if func in _PRODUCTS else None
        if first is None or first.dtype not in _HALVES or first.device.type != "cpu":
            return func(*args, **kwargs)
        out = kwargs.get("out")
        if out is not None:
            return out.copy_(self.__torch_function__(func, types, args, {**kwargs, "out": None}))
        args, kwargs = tree_map_only(Tensor, _widen, (args, kwargs))
        return func(*args, **kwargs).to(first.dtype)


def _first_operand(args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The first matrix of a call, whose type is that of the result. All of them may be given by keyword."""
    operands = [each for name, each in kwargs.items() if name not in _NO_OPERANDS]
    return next((each for each in (*args, *operands) if isinstance(each, Tensor)), None)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALVES else tensor


def tensors_in(result: Any) -> list[Tensor]:
    """The tensors of what a module returned, in their order, however it nests them."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def run_module(module: torch.nn.Module, arguments: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Run a module without gradients and return its outputs as a tuple."""
    with torch.inference_mode(), Float32Accumulation():
        outputs = module(**arguments)
    return outputs if isinstance(outputs, tuple) else (outputs,)
