"""Say once what holds for many: the layers of a model differ in their numbers, and little else."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
# TensorRT ends the names of kernels with a hash, or with their places in a program.
_KERNEL_ENDING = re.compile(r"0x[0-9a-fA-F]{8,}|_myl\d+_\d+")


def without_numbers(text: str) -> str:
    """A name or a sentence as it would be said of another layer."""
    return _NUMBER.sub("#", text)


def without_hash(kernel: str) -> str:
    """The name of a kernel without what tells two of the same kind apart."""
    return _KERNEL_ENDING.sub("…", kernel)


def together(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Put items of one key together, in the order in which the keys are first met."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def named(names: Sequence[str], *, joint: str = " ") -> str:
    """Names in a few words: the only one, or the first and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]}{joint}and {len(names) - 1} more"
