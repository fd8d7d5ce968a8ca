"""The kinds of fields that the records of a report are made of."""

from __future__ import annotations

from mha_deploy.report.shape import Field, ListOf, MapOf, Maybe, Plain, Record, Shape

TEXT = Plain(name="text", types=(str,))
FLAG = Plain(name="true or false", types=(bool,))
WHOLE = Plain(name="whole number", types=(int,))
NUMBER = Plain(name="number", types=(int, float))
TEXTS = ListOf(item=TEXT)
SIZES = MapOf(item=WHOLE)


def field(shape: Shape, what: str) -> Field:
    """A key that always has a value."""
    return Field(shape=shape, what=what)


def maybe(shape: Shape, what: str) -> Field:
    """A key that may be null."""
    return Field(shape=Maybe(shape=shape), what=what)


def list_of(fields: dict[str, Field], what: str, others: Shape | None = None) -> Field:
    """A key with a list of records."""
    return Field(shape=ListOf(item=Record(fields=fields, others=others)), what=what)
