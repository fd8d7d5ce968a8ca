"""What a golden case keeps of a cache: the rows that the call wrote.

The other rows come out as they went in, so a file that held them twice more, once as float64, would hold
little else. They are left out when a case is written, and put back when it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from mha_deploy.model_spec import ModelSpec
from mha_deploy.spec_parts import CACHE_TENSORS, LENGTHS, TensorSpec

CACHE_INPUTS = {
    out: given
    for inputs, outputs in CACHE_TENSORS.values()
    for out, given in zip(outputs, inputs, strict=True)
}
"""For each cache that goes out, the one that came in."""


def stored_outputs(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """The outputs of a layer as a file holds them: of a cache, [B, Hkv, S, D]."""
    S = next(tensor for tensor in spec.inputs if tensor.name == "x").dims[1] if spec.cache != "none" else 0
    return tuple(
        replace(tensor, dims=(*tensor.dims[:2], S, tensor.dims[3])) if tensor.name in CACHE_INPUTS else tensor
        for tensor in spec.outputs
    )


def written_from(inputs: Mapping[str, np.ndarray], given: str) -> np.ndarray:
    """The first new row of every row of the batch, in the cache that came in under this name. [B]."""
    cache = inputs[given]
    return inputs[LENGTHS] if LENGTHS in inputs else np.full(len(cache), cache.shape[2])


def rows_from(cache: np.ndarray, starts: np.ndarray, S: int) -> np.ndarray:
    """S rows of every row of the batch. [B, Hkv, T, D] -> [B, Hkv, S, D]."""
    return np.stack([rows[:, start : start + S] for rows, start in zip(cache, starts, strict=True)])


def only_new_rows(
    results: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The results of a call, with the new rows in place of whole caches."""
    return {
        name: rows_from(array, written_from(inputs, CACHE_INPUTS[name]), inputs["x"].shape[1])
        if CACHE_INPUTS.get(name) in inputs
        else array
        for name, array in results.items()
    }


def with_old_rows(
    results: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The results of a call, with whole caches in place of the new rows."""
    return {
        name: with_rows(inputs[CACHE_INPUTS[name]], array, written_from(inputs, CACHE_INPUTS[name]))
        if CACHE_INPUTS.get(name) in inputs
        else array
        for name, array in results.items()
    }


def with_rows(before: np.ndarray, new: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """A copy of a cache with new rows in their places: in their type, and as long as they need it."""
    B, Hkv, T, D = before.shape
    S = new.shape[2]
    whole = np.empty((B, Hkv, max(T, int(starts.max()) + S), D), new.dtype)
    whole[:, :, :T] = before
    for b, start in enumerate(starts):
        whole[b, :, start : start + S] = new[b]
    return whole
