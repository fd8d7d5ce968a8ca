"""Figures and lists as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

# -- Numbers ---------------------------------------------------------------------------------------

NOTHING = "–"


def short(value: float | None) -> str:
    """Three significant digits; an exponent only for what is very small or very large."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e7 or size < 0.001:
        return error(value)
    text = f"{value:,.0f}" if size >= 99.95 else f"{value:#.3g}".rstrip(".")
    return text.replace("-", "−")


def error(value: float | None) -> str:
    """An error: two digits and an exponent, so that a column of them can be compared at a glance."""
    if value is None:
        return NOTHING
    if 0.1 <= abs(value) < 1e7:
        return short(value) if abs(value) >= 1 else f"{value:.2g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return "0" if value == 0 else f"{mantissa}e{int(exponent)}".replace("-", "−")


def tick(value: float) -> str:
    """The label of an axis tick."""
    return f"{value:,.0f}" if value >= 1e3 else f"{value:.6g}" if value >= 1e-3 else short(value)


def budget_share(share: float) -> str:
    """A share of the budget in per cent, or as a multiple where per cent would be long."""
    return f"{share:.0%}" if share < 10 else f"{short(share)}×"


def times(factor: float) -> str:
    """A speed-up."""
    return f"{factor:,.2f}×" if factor < 100 else f"{factor:,.0f}×"


def size(count: int, unit: str = "B") -> str:
    """Bytes, or a count of something else, with the prefix that keeps it short."""
    for prefix, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= factor:
            return f"{short(count / factor)} {prefix}{unit}"
    return f"{count} {unit}".rstrip()


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Axis sizes with their names."""
    return ", ".join(f"{axis}={value}" for axis, value in sizes.items())


def sizes_joined(sizes: Mapping[str, int]) -> str:
    """Axis sizes without their names, as 8×128."""
    return "×".join(str(value) for value in sizes.values())


def point_name(case: str, sizes: Mapping[str, int]) -> str:
    """The name of a case; empty where it only repeats the sizes."""
    return "" if re.findall(r"\d+", case) == [str(value) for value in sizes.values()] else case


def yes_no(value: bool) -> str:
    """`yes` or `no`."""
    return "yes" if value else "no"


def plural(count: int, noun: str) -> str:
    """A count with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# -- Text from files and other programs ------------------------------------------------------------

# Everything that a terminal may act on: C0 and C1 controls but tab and newline, line and paragraph
# separators, marks that reorder text, and what has no encoding.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text for a terminal: a control character is written as its escape, the four characters of x1b."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


# -- Groups of equal lines: the layers of a model differ in little but their numbers ---------------

Item = TypeVar("Item")

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
# TensorRT ends the names of kernels with a hash, or with their places in a program.
_KERNEL_ENDING = re.compile(r"0x[0-9a-fA-F]{8,}|_myl\d+_\d+")


def without_numbers(text: str) -> str:
    """A name or a sentence with every number replaced, to compare layers."""
    return _NUMBER.sub("#", text)


def without_hash(kernel: str) -> str:
    """The name of a kernel without its hash or its place in a program."""
    return _KERNEL_ENDING.sub("…", kernel)


def group_by(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Group items by key, in the order of the first item of each key."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def summarize_names(names: Sequence[str], *, joint: str = " ") -> str:
    """The only name, or the first and the number of others."""
    return names[0] if len(names) == 1 else f"{names[0]}{joint}and {len(names) - 1} more"
