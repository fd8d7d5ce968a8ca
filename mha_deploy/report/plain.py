"""Data as JSON can hold it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def as_plain(value: Any) -> Any:
    """The same data in plain types; a number that is not finite becomes null.

    A name from a file system may hold bytes that are no text; they are spelled out, since no UTF-8 file can
    hold them.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, np.generic | np.ndarray):
        return as_plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {as_plain(str(key)): as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    return value
