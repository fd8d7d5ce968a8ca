"""What calls of PyTorch's exporter need: silence, the cause of a failure, and what old versions lack."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils._sympy.functions import Min, MinMaxBase


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter's progress prints, and its warnings about packages that are not used here."""
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        exporter.setLevel(level)


@contextlib.contextmanager
def comparing_multiples() -> Iterator[None]:
    """Let PyTorch see that min(64*S, 512*S) is 64*S: 2.13 does, 2.11 does not.

    It asks so where a group's keys are repeated for its heads, and takes what it cannot see for a limit of S.
    """
    if hasattr(MinMaxBase, "_collapse_known_multiplicative_terms"):
        yield
        return
    old = MinMaxBase.__dict__["_find_localzeros"]

    def found(cls: type, values: Iterable[Any], **options: Any) -> set[Any]:
        return _without_multiple(cls, set(old.__func__(cls, values, **options)))

    MinMaxBase._find_localzeros = classmethod(found)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        MinMaxBase._find_localzeros = old  # type: ignore[method-assign]


def _without_multiple(cls: type, values: set[Any]) -> set[Any]:
    """The smaller of two multiples of one size, or the larger; anything else as it is."""
    if len(values) != 2:
        return values
    (first, size), (second, other) = (value.as_coeff_Mul() for value in values)
    if size != other or not size.is_nonnegative or not (first.is_comparable and second.is_comparable):
        return values
    return {(min if cls is Min else max)(first, second) * size}


def was_interrupted(error: BaseException | None) -> bool:
    """Whether somebody pressed Ctrl-C, which the exporter takes for a failure of its own."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def first_cause(error: BaseException) -> str:
    """What began it: the exporter's own text only says at which of its steps that was."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
