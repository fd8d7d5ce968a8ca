"""Say why numbers of a module are not finite: its weights, a constant beyond its type, or an overflow.

An overflow is looked for by running the module once more and watching every call, so only after a failure.
"""

from __future__ import annotations

import contextlib
import math
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mha_deploy.errors import ExportError
from mha_deploy.export.eager import Float32Accumulation
from mha_deploy.export.program_errors import last_own_line

_NO_SUCH_NUMBER = re.compile(r"value cannot be converted to type \S+ without overflow")
_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_MOST_NAMED = 3
_SMALLER_NUMBER = "torch.finfo(x.dtype).min in place of the number"


def constant_error(error: BaseException, module: nn.Module, run: Callable[[], object]) -> ExportError | None:
    """What to tell of a number in a module's code that its precision cannot hold; None for another error.

    Args:
        error: What the module raised.
        module: The module.
        run: Runs it again.
    """
    if not _NO_SUCH_NUMBER.search(str(error)):
        return None
    types = [_SHORT.get(each.dtype) for each in module.parameters()]
    short = next(filter(None, types), "its precision")
    return ExportError(
        f"The module does not run in {short}: it uses a number that {short} cannot hold.",
        got=_first_overflow(run) or str(error).splitlines()[0],
        hint=f"--precision auto, or {_SMALLER_NUMBER}",
    )


def refuse_infinite_constants(program: ExportedProgram, where: str) -> None:
    """Refuse a program that is not finite where its module is, if numbers of it became infinite.

    In the module such a number is a Python float. In the program it has the type of what it meets.

    Args:
        program: The program.
        where: The result that is not finite.
    """
    constants = ", ".join(dict.fromkeys(_infinite_constants(program)))
    if constants:
        raise ExportError(
            "The exported program overflows where the module does not.",
            got=f"{where}: {constants} is infinite",
            hint=f"--precision auto, bf16 or fp32, or {_SMALLER_NUMBER}",
        )


def overflow_error(
    where: str, precision: str, *, module: nn.Module, run: Callable[[], object] | None = None, hint: str
) -> ExportError:
    """What to tell of a result that is not finite.

    Args:
        where: The result.
        precision: Name of the precision.
        module: The module that gave it.
        run: Runs it again, to find the call that overflows.
        hint: What helps against an overflow.
    """
    nan = _weights_with(torch.isnan, (*module.named_parameters(), *module.named_buffers()))
    if nan:
        return ExportError(
            "The module's weights contain NaN.", got=nan, hint="weights without NaN; no precision helps"
        )
    first = None if run is None else _first_overflow(run)
    # Not buffers: a causal mask of -inf is one.
    infinite = None if first else _weights_with(torch.isinf, module.named_parameters())
    if infinite:
        finite = "" if precision == "fp32" else f"; {hint} if rounding to {precision} made them infinite"
        return ExportError(
            f"The module's weights contain infinite numbers in {precision}.",
            got=infinite,
            hint=f"finite weights{finite}",
        )
    return ExportError(
        f"The module itself overflows in {precision}: its own result is not finite.",
        got=where if first is None else f"{where}; first at {first}",
        hint=hint,
    )


def _weights_with(test: Callable[[Tensor], Tensor], weights: Iterable[tuple[str, Tensor]]) -> str | None:
    """The weights of which some numbers meet a test, and how many do; None where there are none."""
    found = []
    for name, tensor in weights:
        met = test(tensor.detach())
        if met.any():
            first = tuple(int(i) for i in met.nonzero()[0])
            found.append(f"{name}: {int(met.sum())} of {tensor.numel()}, the first at {first}")
    more = [f"and {len(found) - _MOST_NAMED} more"] if len(found) > _MOST_NAMED else []
    return "; ".join(found[:_MOST_NAMED] + more) or None


# -- the first call that overflows -------------------------------------------------------------------


def _first_overflow(run: Callable[[], object]) -> str | None:
    """Run a module again; the call whose result is the first that is not finite, with its line."""
    watch = _Watch()
    with contextlib.suppress(Exception), torch.inference_mode(), Float32Accumulation(), watch:
        run()
    return watch.found


class _Watch(TorchFunctionMode):
    """Notes the first call that makes numbers that are not finite from numbers that are."""

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if self.found is not None or "empty" in name:
            return func(*args, **kwargs)
        given = tree_leaves((args, kwargs))
        from_finite = all(map(_is_finite, given))
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if _NO_SUCH_NUMBER.search(str(error)):
                self.found = f"{_place()}{name}{_too_large(given)}"
            raise
        if from_finite and not all(map(_is_finite, tree_leaves(result))):
            self.found = f"{_place()}{name}{_reached(func, args, kwargs)}"
        return result


def _is_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    return not isinstance(value, float) or math.isfinite(value)


def _place() -> str:
    """The user's line on the stack: behind the frame that runs the module again."""
    frames = traceback.extract_stack()
    start = max((i for i, frame in enumerate(frames) if frame.name == _first_overflow.__name__), default=-1)
    place = last_own_line(frames[start + 1 :])
    return "" if place is None else f"{place}: "


def _too_large(given: list[Any]) -> str:
    """The numbers of a call that the type of its tensors cannot hold."""
    dtypes = [each for each in given if isinstance(each, torch.dtype)]
    tensors = [each for each in given if isinstance(each, Tensor) and each.is_floating_point()]
    dtype = next(iter([*dtypes, *(tensor.dtype for tensor in tensors)]), torch.get_default_dtype())
    largest = torch.finfo(dtype).max
    numbers = [each for each in given if isinstance(each, (int, float)) and abs(each) > largest]
    if not numbers:
        return ""
    said = ", ".join(f"{number:g}" for number in numbers)
    return f" with {said}; the largest number of {_SHORT.get(dtype, dtype)} is {largest:g}"


def _reached(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> str:
    """How large the numbers are that a call overflows with."""
    with contextlib.suppress(RuntimeError, TypeError, ValueError):  # not every call takes wider numbers
        args, kwargs = tree_map_only(
            Tensor, lambda x: x.double() if x.is_floating_point() else x, (args, kwargs)
        )
        tensors = [each for each in tree_leaves(func(*args, **kwargs)) if isinstance(each, Tensor)]
        largest = max((float(each.abs().max()) for each in tensors if each.is_floating_point()), default=0.0)
        if math.isfinite(largest) and largest:
            return f" reaches {largest:.3g}"
    return ""


# -- constants of a program --------------------------------------------------------------------------


_FILE_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def _infinite_constants(program: ExportedProgram) -> Iterator[str]:
    """The numbers of a program that became infinite when they were given a type."""
    for node in program.graph.nodes:
        dtype = node.kwargs.get("dtype")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            continue
        for number in node.args:
            if isinstance(number, (int, float)) and torch.finfo(dtype).max < abs(number) < math.inf:
                frames = [
                    traceback.FrameSummary(file, int(line), name)
                    for file, line, name in _FILE_LINE.findall(node.meta.get("stack_trace") or "")
                ]
                place = last_own_line(frames)
                yield f"{f'{place}: ' if place else ''}{number:g} in {_SHORT.get(dtype, dtype)}"
