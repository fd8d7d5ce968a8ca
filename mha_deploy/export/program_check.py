"""Whether a program still is its module at sizes that PyTorch could not trace it at, such as 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from mha_deploy.errors import ExportError
from mha_deploy.export.eager import Float32Accumulation, tensors_in
from mha_deploy.export.exported import ExportedModule
from mha_deploy.export.overflow import constant_error, refuse_infinite_constants
from mha_deploy.export.widened import run_program
from mha_deploy.spec_parts import Axis

DrawInputs = Callable[[Mapping[str, int]], dict[str, Tensor]]
"""Makes inputs of some sizes on which a module can run."""

_TRACED_FROM = 2
_MOST_TRIED = 8
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the largest number; another branch is far off


def check_repeats(module: nn.Module, example: Mapping[str, Tensor]) -> None:
    """Run a module twice on the same inputs, which must give the same.

    What is random, or remembers earlier calls, has no truth: its budget would be as wide as its whims.

    Raises:
        ExportError: The module does not run, or gives something else the second time.
    """
    where, hint = "the sizes of its example", "an example that it takes"
    first, second = (_tensors(module, example, where, "as it was traced", hint) for _ in range(2))
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-6, atol=0, equal_nan=True):
            raise ExportError(
                "The module gives something else when it is called again with the same inputs.",
                got=f"tensor {index} of what it returns",
                hint="a module without randomness and without memory of earlier calls",
            )


def check_small_sizes(
    exported: ExportedModule,
    module: nn.Module,
    axes: Mapping[str, Axis],
    draw: DrawInputs,
) -> None:
    """Run module and program at sizes that were not traced, and compare them.

    Args:
        exported: The program.
        module: The module.
        axes: Its axes.
        draw: Makes the inputs.

    Raises:
        ExportError: The module does not run at such a size, or the program computes something else there.
    """
    for sizes in _sizes_to_try(axes, exported):
        example = draw(sizes)
        said = ", ".join(f"{name}={size}" for name, size in sizes.items())
        for name, want, got in _results(exported, module, example, said):
            if want.shape == got.shape and _close(want, got):
                continue
            if want.isfinite().all() and not got.isfinite().all():
                refuse_infinite_constants(exported.program, f"output {name} at {said}")
            raise ExportError(
                "The module does something else at its smaller sizes, which its trace does not show.",
                got=f"output {name} at {said}",
                hint="axes that begin at a larger size",
            )


def _results(
    exported: ExportedModule, module: nn.Module, example: dict[str, Tensor], said: str
) -> Iterator[tuple[str, Tensor, Tensor]]:
    hint = "axes that begin at a larger size, or a draw= for its inputs"
    wanted = _tensors(module, example, "the smallest sizes of its axes", said, hint)
    try:
        outputs, _ = run_program(exported, example, dtype="own")
    except (RuntimeError, IndexError) as error:
        raise ExportError(
            "The exported program does not run at the smallest sizes of its axes.",
            got=f"{said}: {str(error).splitlines()[0]}",
            hint="axes that begin at a larger size",
        ) from error
    for (name, got), want in zip(outputs.items(), wanted, strict=True):
        yield name, want, got


def _tensors(
    module: nn.Module, example: Mapping[str, Tensor], where: str, said: str, hint: str
) -> list[Tensor]:
    try:
        with torch.no_grad(), Float32Accumulation():
            returned = module(**example)
    except Exception as error:  # whatever the user's module raises
        constant = constant_error(error, module, lambda: module(**example))
        if constant is not None:
            raise constant from error
        is_half = any(each.dtype in _TOLERANCE for each in (*module.parameters(), *example.values()))
        raise ExportError(
            f"The module does not run at {where}.",
            got=f"{said}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            hint=f"{hint}, or --precision auto if it runs in float32" if is_half else hint,
        ) from error
    return tensors_in(returned)


def _close(want: Tensor, got: Tensor) -> bool:
    if not want.is_floating_point():
        return torch.equal(want, got)
    tolerance = _TOLERANCE.get(want.dtype, 1e-3)
    step = torch.finfo(want.dtype).smallest_normal * torch.finfo(want.dtype).eps  # the smallest number
    largest = float(want.double().nan_to_num(0, 0, 0).abs().max()) if want.numel() else 0.0
    return torch.allclose(
        got.double(), want.double(), rtol=tolerance, atol=max(tolerance * largest, 4 * step), equal_nan=True
    )


def _sizes_to_try(axes: Mapping[str, Axis], exported: ExportedModule) -> Iterator[dict[str, int]]:
    """All axes at their smallest, then each one through the sizes that PyTorch did not vouch for."""
    traced = exported.traced_sizes
    small = {name: axis.min for name, axis in axes.items() if axis.is_dynamic and axis.min < _TRACED_FROM}
    if small:
        yield {**traced, **small}
    for name in exported.unproven:
        last = min(traced[name] - 1, axes[name].max, axes[name].min + _MOST_TRIED)
        for size in range(axes[name].min, last + 1):
            yield {**traced, name: size}
