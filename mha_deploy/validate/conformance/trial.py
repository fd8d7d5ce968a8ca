"""A case with numbers: inputs from a seed, rounded to the precision under test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_deploy.errors import DeployError, nearest
from mha_deploy.graph.conformance import SENTINEL, Case, MaskInput, case_model
from mha_deploy.precision import Precision

# FP16 numbers near -1e4 are 8 apart. Smaller queries keep every score below 4, so that the sentinel
# swallows all of them in half precision, or none.
_QUERY_SIZE = 0.75
_SEEN_SHARE = 0.6
_CLOSED_EVERY = 8


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One case in one precision.

    Args:
        case: The case.
        precision: Its precision.
        arrays: `q`, `k`, `v`, and `mask` where the case has one.
    """

    case: Case
    precision: Precision
    arrays: Mapping[str, np.ndarray]

    @property
    def model(self) -> ir.Model:
        """The canonical graph."""
        return case_model(self.case, self.precision)

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        """The inputs under the names they have in the graph."""
        return {self.case.tensor(role): array for role, array in self.arrays.items()}


def draw_trial(case: Case, precision: Precision, seed: int) -> Trial:
    """Draw the inputs of a case; a case has the same numbers whatever other cases there are."""
    rng = np.random.default_rng([seed, *case.name.encode()])
    widths = {"q": (case.S, case.Hq), "k": (case.T, case.Hkv), "v": (case.T, case.Hkv)}
    arrays = {
        role: rng.standard_normal((case.B, length, heads * case.D))
        for role, (length, heads) in widths.items()
    }
    arrays["q"] *= _QUERY_SIZE
    if case.mask is not None:
        arrays["mask"] = _mask(case, case.mask, rng)
    rounded = {role: x if x.dtype == bool else x.astype(precision.numpy) for role, x in arrays.items()}
    return Trial(case=case, precision=precision, arrays=rounded)


def _mask(case: Case, mask: MaskInput, rng: np.random.Generator) -> np.ndarray:
    if mask.pattern not in _PATTERNS:
        raise DeployError("No such mask pattern.", got=mask.pattern, hint=nearest(mask.pattern, _PATTERNS))
    shape = case.mask_shape
    seen = np.broadcast_to(_PATTERNS[mask.pattern](case, shape, rng), shape)
    if mask.is_bool:
        return seen.copy()
    # Halves: among them are zeros, which a runtime could take for False.
    number = np.round(2 * rng.standard_normal(shape)) / 2 if mask.kind == "bias" else 0.0
    return np.where(seen, number, SENTINEL if mask.kind == "sentinel" else -np.inf)


def _scattered(case: Case, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Keys here and there, among them one that is_causal leaves to the query as well."""
    own = np.arange(case.T) == np.minimum(np.arange(case.S), case.T - 1)[:, None]
    return own | (rng.random(shape) < _SEEN_SHARE)


def _closed_rows(case: Case, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """The same, but some queries see no key at all."""
    closed = np.arange(case.S)[:, None] % _CLOSED_EVERY == _CLOSED_EVERY - 1
    return _scattered(case, shape, rng) & ~closed


def _lower_right(case: Case, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return np.arange(case.T) <= np.arange(case.S)[:, None] + case.T - case.S


def _padding(case: Case, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """The first row of the batch is full, each other one shorter."""
    lengths = case.T - np.arange(case.B) * (case.T // (case.B + 1))
    return np.arange(case.T) < lengths[:, None, None, None]


def _left_padding(case: Case, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return _padding(case, shape, rng)[..., ::-1]


_PATTERNS = {
    "scattered": _scattered,
    "closed-rows": _closed_rows,
    "lower-right": _lower_right,
    "padding": _padding,
    "left-padding": _left_padding,
}
