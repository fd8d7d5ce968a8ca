"""HTML and SVG as text in which everything is escaped unless it was made here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape as _escape

# Control characters are nothing to read, and those that turn the direction of text could make one name look
# like another.
_UNREADABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufffe\uffff]")

_VOID = frozenset({"meta", "link", "br", "hr", "col"})


class Html(str):
    """Text that is markup already."""


def escaped(value: object) -> Html:
    """The value as markup: itself if it is markup, else its text, harmless in elements and attributes."""
    if isinstance(value, Html):
        return value
    if isinstance(value, float):
        value = f"{value:.2f}".rstrip("0").rstrip(".")
    return Html(_escape(_UNREADABLE.sub("\ufffd", str(value)), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """One element.

    Args:
        name: Its name.
        children: What is in it; None is nothing.
        attributes: `class_` is written `class`, `data_x` `data-x`. None and False are left out, True stands
            without a value.
    """
    opening = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Html(f"<{name}{opening}>")
    return Html(f"<{name}{opening}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Html:
    """Everything one after the other; None is nothing."""
    return Html("".join(escaped(child) for child in children if child is not None))


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    # Markup has been escaped for elements; in an attribute it is text like any other.
    return (
        f" {name}"
        if value is True
        else f' {name}="{escaped(str(value) if isinstance(value, str) else value)}"'
    )
