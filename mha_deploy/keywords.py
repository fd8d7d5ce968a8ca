"""What a caller passes to the API, by its annotation: the right type, or an error that names it."""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from mha_deploy.errors import DeployError

Given = ParamSpec("Given")
Got = TypeVar("Got")
_MISFIT = object()
_ALTERNATIVES = re.compile(r" \| (?![^\[]*\])")
_EXAMPLES = {
    "int": "1", "float": "0.5", "str": '"..."', "Path": '"path/to/it"',
    "Axes": '{"S": "1:128:512"}', "Mapping": '{"name": ...}',
    "Callable": "a function", "OnStep": "a function",
}  # fmt: skip
_FUNCTIONS, _MAPPINGS = ("Callable", "OnStep"), ("Axes", "Mapping")
_IS_LISTED = ("str", "Path", "StrPath", "Any")  # one of them stands for a list of one


def typed_value(name: str, kind: str, value: Any, default: Any = None, **bounds: Any) -> Any:
    """A value as a parameter of this annotation holds it.

    A scalar of NumPy is a number, a string is a path where one is wanted, and one item is a list of one. An
    annotation that names a class of this package is not checked: what takes the value knows more of it.

    Args:
        name: The parameter.
        kind: Its annotation, as text.
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
    kinds = {name: str(kind) for name, kind in function.__annotations__.items() if name != "return"}
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    first = zip(reversed(names), reversed(function.__defaults__ or ()), strict=False)
    defaults = {**dict(first), **(function.__kwdefaults__ or {})}
    rest = code.co_varnames[code.co_argcount + code.co_kwonlyargcount] if code.co_flags & 8 else ""
    checked_function: Callable[..., Got] = function  # whether the values fit is known only now

    @wraps(function)
    def call(*args: Given.args, **more: Given.kwargs) -> Got:
        def checked(name: str, value: Any) -> Any:
            if name not in kinds or name == rest:
                return value
            return typed_value(name, kinds[name], value, defaults.get(name))

        own = [checked(name, value) for name, value in zip(names, args, strict=False)]
        named = {name: checked(name, value) for name, value in more.items()}
        return checked_function(*own, *args[len(own) :], **named)

    return call


def _fitted(kind: str, value: Any) -> Any:
    """A value as the first alternative of an annotation that it fits, or `_MISFIT`."""
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()
    found = (_fitted_one(each, value) for each in _ALTERNATIVES.split(kind))
    return next((each for each in found if each is not _MISFIT), _MISFIT)


def _fitted_one(kind: str, value: Any) -> Any:
    """The same, for an annotation without alternatives."""
    name, _, inner = kind.removesuffix("]").partition("[")
    if name == "Sequence":
        if isinstance(value, str | os.PathLike) and inner.startswith(_IS_LISTED):
            value = (value,)
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            return _MISFIT
        items = tuple(_fitted(inner, each) for each in value)
        return _MISFIT if any(each is _MISFIT for each in items) else items
    if name == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e300 else _MISFIT
    if name in ("Path", "StrPath") and isinstance(value, str | os.PathLike):
        return Path(value) if name == "Path" else value
    fits = {
        "None": value is None,
        "bool": isinstance(value, bool),
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, float),
        "str": isinstance(value, str),
        **dict.fromkeys(_FUNCTIONS, callable(value)),
        **dict.fromkeys(_MAPPINGS, isinstance(value, Mapping) and all(isinstance(key, str) for key in value)),
        **dict.fromkeys(("Path", "StrPath"), False),
    }
    return value if fits.get(name, True) else _MISFIT


def _example(kind: str, value: Any, default: Any) -> str:
    """What to pass in its place: the value in the right form, or else the default."""
    first = _ALTERNATIVES.split(kind)[0]
    if first == "bool":
        return str(str(value).lower() not in ("no", "off", "false", "0"))
    if first in ("int", "float") and isinstance(value, str) and value.strip().isdecimal():
        return value.strip()
    if default not in (None, "", ()) and isinstance(default, str | int | float):
        return f'"{default}"' if isinstance(default, str) else str(default)
    if first == "str" and type(value) in (int, float):
        return f'"{value}"'
    name, _, inner = first.partition("[")
    if name == "Sequence":
        return f"[{_example(inner.removesuffix(']'), None, None)}]"
    return _EXAMPLES.get({"StrPath": "Path"}.get(name, name), "...")


def _shown(value: Any) -> str:
    """What was passed, short, and its type."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    text = " ".join(reprlib.repr(value).split())
    return text if value is None else f"{text} ({type(value).__name__})"
