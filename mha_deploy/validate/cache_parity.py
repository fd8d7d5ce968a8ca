"""A cache is judged by its new rows; the rows that were valid before must come out as they went in.

Judged as a whole, a cache of thousands of old rows would drown the error of the new one. What a static cache
holds behind its new rows means nothing and is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from mha_deploy.golden import GoldenCase
from mha_deploy.golden_cache import CACHE_INPUTS, rows_from, written_from


@dataclass(frozen=True, kw_only=True)
class NewRows:
    """What is left to judge of a case.

    Args:
        case: The case, with the new rows [B, Hkv, S, D] in place of whole caches.
        got: The results likewise.
        spoiled: For each cache whose old rows came out changed, which.
    """

    case: GoldenCase
    got: Mapping[str, np.ndarray]
    spoiled: Mapping[str, str]


def new_rows(case: GoldenCase, got: Mapping[str, np.ndarray]) -> NewRows:
    """Take the new rows out of the caches of a case and of its results.

    Results of another type or shape than the case's stay whole: the judge will say what is wrong with them.
    """
    oracle, eager, results, spoiled = dict(case.oracle), dict(case.eager), dict(got), {}
    for name, given in CACHE_INPUTS.items():
        if name not in oracle or given not in case.inputs or not _comparable(case, got.get(name), name):
            continue
        before = case.inputs[given]
        starts = written_from(case.inputs, given)
        changed = _changed_row(before, got[name], starts)
        if changed:
            spoiled[name] = f"old rows were changed, the first in {changed}"
        S = case.inputs["x"].shape[1]
        oracle[name], eager[name], results[name] = (
            rows_from(cache, starts, S) for cache in (oracle[name], eager[name], got[name])
        )
    return NewRows(case=replace(case, oracle=oracle, eager=eager), got=results, spoiled=spoiled)


def _comparable(case: GoldenCase, got: np.ndarray | None, name: str) -> bool:
    eager = case.eager[name]
    return got is not None and got.shape == eager.shape and got.dtype == eager.dtype


def _changed_row(before: np.ndarray, after: np.ndarray, starts: np.ndarray) -> str | None:
    """The first of the valid rows that is not what it was."""
    for b, start in enumerate(starts):
        same = before[b, :, :start] == after[b, :, :start]
        if not same.all():
            head, row, _ = (int(i) for i in np.unravel_index(int(np.argmin(same)), same.shape))
            return f"batch row {b}, head {head}, position {row}"
    return None
