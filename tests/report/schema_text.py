"""The records of the schema, one by one, and the tables of docs/report.md that describe them."""

import re
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from mha_deploy.report.schema import BENCH, REPORT

DOC = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
_UNION = (Union, types.UnionType)


def fields_of(kind):
    """The fields of a record by key."""
    return dict(kind.__annotations__)


def records(kind, place=""):
    """Every record in a kind with its place: itself first, then those of its fields."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in _UNION:
        yield from records(args[0], place)
    elif origin is list:
        yield from records(args[0], f"{place}[]")
    elif origin is dict:
        yield from records(args[1], f"{place}.*")
    elif hasattr(kind, "__struct_fields__"):
        yield place, kind
        for key, inner in fields_of(kind).items():
            yield from records(inner, f"{place}.{key}" if place else key)


def schema_tables():
    """The types of all keys by file and place: one table for all places of a record."""
    known, found = set(), {}
    for name, schema in (("report.json", REPORT), ("bench.json", BENCH)):
        for place, record in records(schema):
            if record not in known:
                known.add(record)
                found[name, place] = {key: _label(kind) for key, kind in fields_of(record).items()}
    return found


def documented_tables():
    """The same as the document has it, and what it says of every key."""
    types, words = {}, {}
    for part in re.split(r"^## ", DOC.partition("<!-- schema -->")[2], flags=re.MULTILINE)[1:]:
        file, _, tables = part.partition("\n")
        for table in re.split(r"^### ", f"### ``\n{tables}", flags=re.MULTILINE)[1:]:
            place, *lines = table.splitlines()
            rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", "\n".join(lines), re.MULTILINE)
            types[file, place.strip("`")] = {key: kind for key, kind, _ in rows}
            words |= {(file, place.strip("`"), key): text for key, _, text in rows}
    return types, words


def _label(kind):
    """A kind in a few words; the keys of a record have a table of their own."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in _UNION:
        return f"{_label(args[0])}, or null"
    if origin is Literal:
        return ", ".join(f"`{option}`" for option in args)
    if origin in (list, dict):
        return f"{'list of' if origin is list else 'name →'} {_label(args[-1])}"
    plain = {str: "text", bool: "true or false", int: "whole number", float: "number", Any: "anything"}
    return plain.get(kind, "record")
