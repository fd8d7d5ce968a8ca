"""The records of the schema, one by one, and as the tables of docs/report.md."""

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from mha_deploy.report.schema import BENCH, REPORT

_UNION = (Union, types.UnionType)


def fields_of(kind):
    """The fields of a record by key."""
    return dict(kind.__annotations__)


def records(kind, place=""):
    """Every record in a kind with its place: itself first, then those of its fields."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Annotated, *_UNION):
        yield from records(args[0], place)
    elif origin is list:
        yield from records(args[0], f"{place}[]")
    elif origin is dict:
        yield from records(args[1], f"{place}.*")
    elif hasattr(kind, "__struct_fields__"):
        yield place, kind
        for key, inner in fields_of(kind).items():
            yield from records(inner, f"{place}.{key}" if place else key)


def schema_markdown():
    """The tables of docs/report.md: one for all records of the same fields, where they are first met."""
    report = {}
    for place, found in records(REPORT):
        report.setdefault(found, place)
    bench = {found: place for place, found in records(BENCH) if found not in report}
    parts = []
    for name, tables in (("report.json", report), ("bench.json", bench)):
        lines = [f"## {name}", ""]
        for found, place in tables.items():
            lines += [f"### `{place}`", ""] if place else []
            lines += ["| key | type | what |", "|---|---|---|"]
            for key, kind in fields_of(found).items():
                what = get_args(kind)[1].description.replace("|", "\\|")  # a bar would end the cell
                lines.append(f"| `{key}` | {_label(kind)} | {what} |")
            lines.append("")
        parts.append("\n".join(lines))
    return "\n".join(parts)


def _label(kind):
    """A kind in a few words; the keys of a record have a table of their own."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _label(args[0])
    if origin in _UNION:
        return f"{_label(args[0])}, or null"
    if origin is Literal:
        return ", ".join(f"`{option}`" for option in args)
    if origin in (list, dict):
        return f"{'list of' if origin is list else 'name →'} {_label(args[-1])}"
    plain = {str: "text", bool: "true or false", int: "whole number", float: "number", Any: "anything"}
    return plain.get(kind, "record")
