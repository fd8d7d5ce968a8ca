"""Shapes of plain data, and how a value departs from one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


class Shape:
    """What a value may be."""

    @property
    def label(self) -> str:
        """The shape in a few words, for the documentation."""
        raise NotImplementedError

    def problems(self, value: Any, place: str) -> Iterator[str]:
        """One sentence for everything that is wrong; nothing for a value that fits.

        Args:
            value: The value.
            place: Where it lies, as `verdict.findings[0].level`.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Plain(Shape):
    """A value of one type. A true or false is not a number here, and a number is finite."""

    name: str
    types: tuple[type, ...]

    @property
    def label(self) -> str:
        """The name."""
        return self.name

    def problems(self, value: Any, place: str) -> Iterator[str]:
        """Compare the type; JSON has no NaN and no infinity."""
        fits = isinstance(value, self.types) and (bool in self.types or not isinstance(value, bool))
        if not fits or (isinstance(value, float) and not math.isfinite(value)):
            yield f"{place}: {_shown(value)} is not a {self.name}"


@dataclass(frozen=True, kw_only=True)
class OneOf(Shape):
    """One of several words."""

    options: tuple[str, ...]

    @property
    def label(self) -> str:
        """The words."""
        return ", ".join(f"`{option}`" for option in self.options)

    def problems(self, value: Any, place: str) -> Iterator[str]:
        """Look the word up."""
        if not isinstance(value, str) or value not in self.options:
            yield f"{place}: {_shown(value)} is not one of {', '.join(self.options)}"


@dataclass(frozen=True, kw_only=True)
class Maybe(Shape):
    """A value, or null."""

    shape: Shape

    @property
    def label(self) -> str:
        """The shape, or null."""
        return f"{self.shape.label}, or null"

    def problems(self, value: Any, place: str) -> Iterator[str]:
        """Null is right; anything else must fit."""
        if value is not None:
            yield from self.shape.problems(value, place)


@dataclass(frozen=True, kw_only=True)
class ListOf(Shape):
    """A list of any length, every item of one shape."""

    item: Shape

    @property
    def label(self) -> str:
        """What it is a list of."""
        return f"list of {self.item.label}"

    def problems(self, value: Any, place: str) -> Iterator[str]:
        """Check every item."""
        if not isinstance(value, list):
            yield f"{place}: {_shown(value)} is not a list"
            return
        for index, item in enumerate(value):
            yield from self.item.problems(item, f"{place}[{index}]")


@dataclass(frozen=True, kw_only=True)
class MapOf(Shape):
    """A dictionary with any keys, every value of one shape."""

    item: Shape

    @property
    def label(self) -> str:
        """What it maps to."""
        return f"name → {self.item.label}"

    def problems(self, value: Any, place: str) -> Iterator[str]:
        """Check every value."""
        if not isinstance(value, dict):
            yield f"{place}: {_shown(value)} is not a dictionary"
            return
        for key, item in value.items():
            yield from self.item.problems(item, f"{place}.{key}")


@dataclass(frozen=True, kw_only=True)
class Anything(Shape):
    """Plain data that is described elsewhere."""

    @property
    def label(self) -> str:
        """Nothing is promised."""
        return "anything"

    def problems(self, value: Any, place: str) -> Iterator[str]:
        """Nothing is wrong with it."""
        return iter(())


@dataclass(frozen=True, kw_only=True)
class Field:
    """One key of a record.

    Args:
        shape: What its value may be.
        what: What it says, in one line, with its unit.
    """

    shape: Shape
    what: str


@dataclass(frozen=True, kw_only=True)
class Record(Shape):
    """A dictionary with known keys, all of them there.

    Args:
        fields: The keys.
        others: What further keys may hold; None where there may be none.
    """

    fields: Mapping[str, Field]
    others: Shape | None = None

    @property
    def label(self) -> str:
        """Its keys have a table of their own."""
        return "record"

    def problems(self, value: Any, place: str) -> Iterator[str]:
        """Check that all keys are there, no others, and every value."""
        if not isinstance(value, dict):
            yield f"{place or 'the data'}: {_shown(value)} is not a record"
            return
        for key, field in self.fields.items():
            inner = f"{place}.{key}" if place else key
            if key in value:
                yield from field.shape.problems(value[key], inner)
            else:
                yield f"{inner}: missing"
        for key in value:
            if key not in self.fields:
                inner = f"{place}.{key}" if place else str(key)
                yield from self.others.problems(value[key], inner) if self.others else [f"{inner}: unknown"]


def records(shape: Shape, place: str = "") -> Iterator[tuple[str, Record]]:
    """Every record in a shape with its place: itself first, then those of its fields."""
    if isinstance(shape, Record):
        yield place, shape
        for key, field in shape.fields.items():
            yield from records(field.shape, f"{place}.{key}" if place else key)
    elif isinstance(shape, Maybe):
        yield from records(shape.shape, place)
    elif isinstance(shape, ListOf):
        yield from records(shape.item, f"{place}[]")
    elif isinstance(shape, MapOf):
        yield from records(shape.item, f"{place}.*")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
