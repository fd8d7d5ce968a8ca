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


# -- The user's own metric -------------------------------------------------------------------------


class Metric:
    """A function of the user: a number from the outputs of the model and the sample that they belong to."""

    def __init__(self, given: str | Callable[..., Any]) -> None:
        if isinstance(given, str):
            self.name = given
            self._function = load_function(given, "a metric", "def metric(outputs, sample): return 1.0")
            place = Path(given.rpartition(":")[0])
            self.digest = sha256(place) if place.is_file() else given
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
    """The name of a user's data, its samples one by one, and how many there are, or 0 if nobody knows."""
    if isinstance(given, str) and is_factory(given):
        function = load_function(given, "the data", 'def samples(): yield {"x": array}')
        place = where_is(function) or given
        hint = "return or yield the samples there"
        with user_code(place, "The function of the samples failed.", hint=hint):
            items = function()
            iterator = iter(items)  # type: ignore[call-overload]
        return given, samples_from(_guarded(iterator, place), spec, given.rpartition(":")[2]), 0
    if isinstance(given, str | Path):
        if not str(given).strip():
            hint = "a file, a folder, or file.py:samples"
            raise DeployError("The data has no name.", got=repr(given), hint=hint)
        return str(given), read_samples(Path(given), spec), 0
    if callable(given):
        given = given()
    count = len(given) if hasattr(given, "__len__") else 0
    return type(given).__name__, samples_from(_guarded(iter(given), ""), spec, "sample"), count


def _guarded(items: Iterator[Any], place: str) -> Iterator[Any]:
    """The items of an iterator of the user's, each of which is code of theirs."""
    nothing = object()
    while True:
        with user_code(place, "The samples cannot be read.", hint="correct the iterator there"):
            item = next(items, nothing)
        if item is nothing:
            return
        yield item
