"""What a caller passes to the API, by the type of the parameter: the right one, or an error that names it."""

from __future__ import annotations

import builtins
import inspect
import math
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from mha_deploy.errors import DeployError

Given = ParamSpec("Given")
Got = TypeVar("Got")
_MISFIT = object()
_EXAMPLES: Mapping[Any, str] = {
    int: "1", float: "0.5", str: '"..."', Path: '"path/to/it"', os.PathLike: '"path/to/it"',
    Mapping: '{"name": ...}', Callable: "a function",
}  # fmt: skip
_IS_LISTED = {str, Path, os.PathLike, Any}  # one of them stands for a list of one


class Unchecked:
    """The type of what only a type checker imports: what takes the value knows more of it."""


class _Annotations(dict[str, Any]):
    """The names of a module as its annotations mean them."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Unchecked)


@cache
def types_of(owner: Any) -> Mapping[str, Any]:
    """The types of a function's parameters, or of a record's fields, by name."""
    names = _Annotations(vars(sys.modules[owner.__module__]))
    return get_type_hints(owner, localns=names, include_extras=True)


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The types that a union allows, without None, or the one type that it is."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return tuple(each for each in parts if each is not NoneType)


def item_of(kind: Any) -> Any | None:
    """The type of the items, if the value is a sequence."""
    first = alternatives(kind)[0]
    return get_args(first)[0] if get_origin(first) is Sequence else None


def typed_value(name: str, kind: Any, value: Any, default: Any = None, **bounds: Any) -> Any:
    """A value as a parameter of this type holds it.

    A scalar of NumPy is a number, a string is a path where one is wanted, and one item is a list of one. A
    class of this package is not checked: what takes the value knows more of it. `Annotated` adds an example.

    Args:
        name: The parameter.
        kind: Its type.
        value: What was passed.
        default: Its default, as an example of what is right.
        bounds: The least and the largest number, as `min` and `max`.
    """
    found = _fitted(kind, value)
    if found is _MISFIT:
        what, hint = f"{name} has the wrong type.", f"{name}={_example(kind, value, default)}"
        raise DeployError(what, got=_shown(value), hint=hint)
    least, most = bounds.get("min"), bounds.get("max")
    is_number = isinstance(found, int | float)
    if isinstance(found, float) and not math.isfinite(found):
        hint = f"{name}={_example(kind, None, default)}"
        raise DeployError(f"{name} is not finite.", got=found, hint=hint)
    if is_number and ((least is not None and found < least) or (most is not None and found > most)):
        hint = f"a number from {least} to {most}"
        raise DeployError(f"{name} is out of bounds.", got=_shown(found), hint=hint)
    return found


def typed(function: Callable[Given, Got]) -> Callable[Given, Got]:
    """Check what a function is called with, parameter by parameter, before it does anything."""
    shape = inspect.signature(function)
    checked = {name: each for name, each in shape.parameters.items() if each.kind is not each.VAR_KEYWORD}

    @wraps(function)
    def call(*args: Given.args, **more: Given.kwargs) -> Got:
        try:
            bound = shape.bind(*args, **more)
        except TypeError:
            return function(*args, **more)  # which says it in Python's own words
        kinds = types_of(function)
        for name, value in bound.arguments.items():
            if name in checked and name in kinds:
                default = checked[name].default
                shown = None if default is inspect.Parameter.empty else default
                bound.arguments[name] = typed_value(name, kinds[name], value, shown)
        return function(*bound.args, **bound.kwargs)

    return call


def _fitted(kind: Any, value: Any) -> Any:
    """A value as the first alternative of a type that it fits, or `_MISFIT`."""
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None and (kind in (None, NoneType) or NoneType in get_args(kind)):
        return None
    found = (_fitted_one(each, value) for each in alternatives(kind))
    return next((each for each in found if each is not _MISFIT), _MISFIT)


def _fitted_one(kind: Any, value: Any) -> Any:
    """The same, for a type without alternatives."""
    origin = get_origin(kind) or kind
    if origin is Annotated:
        return _fitted(kind.__origin__, value)
    if origin is Sequence:
        inner = get_args(kind)[0]
        takes_text = not _IS_LISTED.isdisjoint(get_origin(each) or each for each in alternatives(inner))
        if isinstance(value, str | os.PathLike) and takes_text:
            value = (value,)
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            return _MISFIT
        items = tuple(_fitted(inner, each) for each in value)
        return _MISFIT if any(each is _MISFIT for each in items) else items
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e300 else _MISFIT
    if origin is Path:
        return Path(value) if isinstance(value, str | os.PathLike) else _MISFIT
    if origin is Callable:
        return value if callable(value) else _MISFIT
    if origin is Mapping:
        return value if isinstance(value, Mapping) and all(isinstance(key, str) for key in value) else _MISFIT
    if origin is int and isinstance(value, bool):
        return _MISFIT
    is_checked = origin in (bool, int, float, str, os.PathLike)
    return value if not is_checked or isinstance(value, origin) else _MISFIT


def _example(kind: Any, value: Any, default: Any) -> str:
    """What to pass in its place: the value in the right form, or else the default."""
    first = alternatives(kind)[0]
    origin = get_origin(first) or first
    if origin is bool:
        return str(str(value).lower() not in ("no", "off", "false", "0"))
    if origin in (int, float) and isinstance(value, str) and value.strip().isdecimal():
        return value.strip()
    if default not in (None, "", ()) and isinstance(default, str | int | float):
        return f'"{default}"' if isinstance(default, str) else str(default)
    if origin is str and type(value) in (int, float):
        return f'"{value}"'
    if origin is Sequence:
        return f"[{_example(get_args(first)[0], None, None)}]"
    return str(first.__metadata__[0]) if origin is Annotated else _EXAMPLES.get(origin, "...")


def _shown(value: Any) -> str:
    """What was passed, short, and its type."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    text = " ".join(reprlib.repr(value).split())
    return text if value is None else f"{text} ({type(value).__name__})"
