"""Data of a user's own: where its samples come from, and a figure that a function of theirs computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mha_deploy.bundle.folder import sha256
from mha_deploy.bundle.samples import Sample, read_samples, samples_from
from mha_deploy.errors import DeployError
from mha_deploy.model.catalog import is_factory
from mha_deploy.model.spec import ModelSpec
from mha_deploy.runtime.user_code import load_function, user_code, where_is

Arrays = Mapping[str, np.ndarray]
_ITERABLE = "a function that returns or yields dictionaries of arrays by the names of the inputs"


# -- The user's own metric -------------------------------------------------------------------------


class Metric:
    """A function of the user: a number from the outputs of the model and the sample that they belong to."""

    def __init__(self, given: str | Callable[..., Any]) -> None:
        if isinstance(given, str):
            self.name = given
            self._function = load_function(given, "a metric", "def metric(outputs, sample): return 1.0")
            place = Path(given.rpartition(":")[0])
            self.digest = sha256(place) if place.is_file() else given
        elif not callable(given):
            hint = "a function of the outputs and the sample, or file.py:function"
            raise DeployError("This is not a metric.", got=type(given).__name__, hint=hint)
        else:
            self.name = getattr(given, "__name__", type(given).__name__)
            self._function, self.digest = given, self.name

    def __call__(self, outputs: Arrays, sample: Sample) -> float:
        """Its value."""
        given = {**sample.labels, **sample.inputs}
        hint = "a function of the outputs and the sample, both dictionaries of arrays, that returns a number"
        with user_code(where_is(self._function) or self.name, "The metric failed.", hint=hint):
            found = self._function(dict(outputs), given)
            try:
                value = float(found)  # type: ignore[arg-type]
            except (TypeError, ValueError) as error:
                raise DeployError(
                    "The metric returned no number.", got=repr(found)[:80], hint=hint
                ) from error
        if not math.isfinite(value):
            raise DeployError("The metric is not finite.", got=f"{value} for {sample.name}", hint=hint)
        return value


# -- Where samples come from ------------------------------------------------------------------------


def open_samples(given: Any, spec: ModelSpec) -> tuple[str, Iterator[Sample], int]:
    """The name of a user's data, its samples one by one, and how many there are; 0 if that is not known."""
    if isinstance(given, str) and is_factory(given):
        function = load_function(given, "the data", 'def samples(): yield {"x": array}')
        place = where_is(function) or given
        with user_code(place, "The function of the samples failed.", hint=_ITERABLE):
            items = function()
            iterator = iter(items)  # type: ignore[call-overload]
        return given, _as_samples(iterator, spec, given.rpartition(":")[2], place), 0
    if isinstance(given, str | Path):
        if not str(given).strip():
            hint = "a file, a folder, or file.py:samples"
            raise DeployError("The data has no name.", got=repr(given), hint=hint)
        return str(given), read_samples(Path(given), spec), 0
    if not (callable(given) or hasattr(given, "__iter__") or hasattr(given, "__getitem__")):
        hint = "a file, a folder, file.py:samples, or dictionaries of arrays by the names of the inputs"
        raise DeployError("These are no samples.", got=type(given).__name__, hint=hint)
    with user_code(where_is(given), "The function of the samples failed.", hint=_ITERABLE):
        if callable(given):
            given = given()
        count = len(given) if hasattr(given, "__len__") else 0
        iterator = iter(given)
    return f"a {type(given).__name__} in memory", _as_samples(iterator, spec, "sample", ""), count


def _as_samples(items: Iterator[Any], spec: ModelSpec, title: str, place: str) -> Iterator[Sample]:
    """The samples of an iterator of the user's; to make an array of an item runs code of theirs, too."""
    return _guarded(samples_from(_guarded(items, place), spec, title), place, mixed=True)


def _guarded(items: Iterator[Any], place: str, *, mixed: bool = False) -> Iterator[Any]:
    """The items of an iterator, each of which is code of the user's, or calls such code (`mixed`)."""
    nothing = object()
    while True:
        with user_code(place, "The samples cannot be read.", hint=_ITERABLE, mixed=mixed):
            item = next(items, nothing)
        if item is nothing:
            return
        yield item
