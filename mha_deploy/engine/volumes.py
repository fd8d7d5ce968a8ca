"""Sizes at which TensorRT said, while it built, that it cannot hold a tensor.

It builds the engine all the same. TensorRT 8.6 then ended the process when 32 heads were to attend over 8192
tokens: their scores have 2^31 elements. So such a call is not made, and counts as failed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

MOST_ELEMENTS = 2**31 - 1

_TOLD = re.compile(r"(?P<tensor>[^\s:]+): tensor volume exceeds .*?dimensions are \[(?P<dims>[^]]*)\]")
_TOKEN = re.compile(r"[()]|[^\s(),]+")
_OPERATORS: Mapping[str, Callable[[Iterable[int]], int]] = {"*": math.prod, "+": sum}


def beyond_limit(notes: Sequence[str], sizes: Mapping[str, int]) -> str | None:
    """Which tensor is too large at these sizes; None where TensorRT told of none.

    Args:
        notes: What TensorRT said while it built the engine.
        sizes: The size of every axis.
    """
    for tensor, dims in _told(notes):
        elements = _elements(dims, sizes)
        if elements is not None and elements > MOST_ELEMENTS:
            return f"{tensor} has {elements:,} elements there, and TensorRT can hold {MOST_ELEMENTS:,}"
    return None


def explained_limits(notes: Sequence[str]) -> list[str]:
    """What to do about the tensors that are too large at the largest sizes."""
    return [
        f"{tensor} [{dims}] is too large for TensorRT at the largest sizes: build with smaller ones "
        "(--profile), or with --attention plugin, which keeps no scores"
        for tensor, dims in dict.fromkeys(_told(notes))
    ]


def _told(notes: Sequence[str]) -> Iterator[tuple[str, str]]:
    for note in notes:
        if found := _TOLD.search(note):
            yield found["tensor"], found["dims"]


def _elements(dims: str, sizes: Mapping[str, int]) -> int | None:
    """The product of dimensions such as `1,8,(* 4 S),S`; None where one of them cannot be read."""
    tokens = _TOKEN.findall(dims)[::-1]
    try:
        found = []
        while tokens:
            found.append(_value(tokens, sizes))
    except (KeyError, IndexError):
        return None
    return math.prod(found)


def _value(tokens: list[str], sizes: Mapping[str, int]) -> int:
    token = tokens.pop()
    if token != "(":
        return int(token) if token.isdecimal() else sizes[token]
    combine = _OPERATORS[tokens.pop()]
    terms = []
    while tokens[-1] != ")":
        terms.append(_value(tokens, sizes))
    tokens.pop()
    return combine(terms)
