"""The records of the schema, one by one, and the tables of docs/report.md that describe them."""

import re
import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mha_deploy.report.schema import BENCH, REPORT

DOC = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
_UNION = (Union, types.UnionType)


MOST_OPTIONS = 12


def fields_of(kind):
    """The fields of a record by key."""
    return get_type_hints(kind)


def is_record(kind):
    return hasattr(kind, "__struct_fields__") or is_dataclass(kind)


def records(kind, place=""):
    """Every record in a kind with its place: itself first, then those of its fields."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in _UNION:
        yield from records(args[0], place)
    elif origin in (list, tuple):
        yield from records(args[0], f"{place}[]")
    elif origin in (dict, Mapping):
        yield from records(args[1], f"{place}.*")
    elif is_record(kind):
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
    if origin is tuple:
        return f"list of {_label(args[0])}"
    if origin in (list, dict, Mapping):
        return f"{'list of' if origin is list else 'name →'} {_label(args[-1])}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        few = [f"`{option.value}`" for option in kind]
        return ", ".join(few) if len(few) <= MOST_OPTIONS else "text, one of a list"
    plain = {str: "text", bool: "true or false", int: "whole number", float: "number", Any: "anything"}
    return plain.get(kind, "record")
