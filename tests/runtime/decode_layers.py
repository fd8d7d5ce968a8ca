"""Fake engines with a cache, in every form; whole numbers, so that FP16 is exact.

The keys of a token are the token, its values twice that. The output is the sum of the keys it attends to,
over a whole sequence the running sum of the tokens, in whatever steps they come.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tensorrt_fake import ENGINES, FakeEngine

B, HKV, T, D = 3, 2, 8, 4
E = HKV * D
Tensor = Callable[[str], np.ndarray]

PREALLOCATED = {
    "x": (-1, -1, E),
    "key_cache": (-1, HKV, T, D),
    "value_cache": (-1, HKV, T, D),
    "lengths": (-1,),
}
PAST = {"x": (-1, -1, E), "past_key": (-1, HKV, -1, D), "past_value": (-1, HKV, -1, D)}


def heads(x: np.ndarray) -> np.ndarray:
    """[B, S, E] to [B, Hkv, S, D]."""
    return x.reshape(*x.shape[:2], HKV, D).transpose(0, 2, 1, 3)


def running_sum(x: np.ndarray) -> np.ndarray:
    """What the layer gives over a whole sequence."""
    return np.cumsum(x, axis=1, dtype=x.dtype)


def tokens(S: int, start: int = 1, batch: int = B) -> np.ndarray:
    """Small whole numbers, other ones everywhere."""
    return (np.arange(batch * S * E).reshape(batch, S, E) * 7 % 11 + start).astype(np.float16)


def _attend(x: np.ndarray, keys: np.ndarray, lengths: np.ndarray, output: np.ndarray) -> None:
    for b, length in enumerate(lengths):
        before = keys[b, :, :length].sum(axis=1).reshape(-1)
        output[b] = before + running_sum(x[b : b + 1])[0]


def _rows(tensor: Tensor) -> None:
    x = tensor("x")
    tensor("key_entries")[:] = heads(x)
    tensor("value_entries")[:] = 2 * heads(x)
    _attend(x, tensor("key_cache"), tensor("lengths"), tensor("output"))


def _static(tensor: Tensor) -> None:
    x, lengths = tensor("x"), tensor("lengths")
    _attend(x, tensor("key_cache"), lengths, tensor("output"))
    for name, new in (("key_cache", heads(x)), ("value_cache", 2 * heads(x))):
        written = tensor(f"{name}_out")
        written[:] = tensor(name)
        for b, length in enumerate(lengths):
            written[b, :, length : length + x.shape[1]] = new[b]


def _growing(tensor: Tensor) -> None:
    x, past = tensor("x"), tensor("past_key")
    _attend(x, past, np.full(len(x), past.shape[2]), tensor("output"))
    tensor("present_key")[:] = np.concatenate((past, heads(x)), axis=2)
    tensor("present_value")[:] = np.concatenate((tensor("past_value"), 2 * heads(x)), axis=2)


def _shape(name: str, shapes: dict) -> tuple[int, ...]:
    batch, S = shapes["x"][:2]
    past = shapes["past_key"][2] if "past_key" in shapes else 0
    length = {"key_entries": S, "value_entries": S, "present_key": past + S, "present_value": past + S}.get(
        name, T
    )
    return shapes["x"] if name == "output" else (batch, HKV, length, D)


def _profile(dims: dict[str, tuple[int, ...]], S: int) -> dict[str, tuple]:
    """One profile: up to 4 batch elements, up to S tokens, any past."""
    low = {"x": (1, 1, E), "past_key": (1, HKV, 0, D), "past_value": (1, HKV, 0, D)}
    high = {"x": (4, S, E), "past_key": (4, HKV, T, D), "past_value": (4, HKV, T, D)}

    def ends(name: str, dim: tuple[int, ...]) -> tuple:
        least = low.get(name, (1, *dim[1:]))
        most = high.get(name, (4, *dim[1:]))
        return least, most, most

    return {name: ends(name, dim) for name, dim in dims.items()}


def _engine(inputs: dict, outputs: dict, compute: Callable[[Tensor], None], **more) -> FakeEngine:
    return FakeEngine(
        inputs=inputs,
        outputs={"output": (-1, -1, E), **outputs},
        # The one for prompts comes first, and takes single tokens as well.
        profiles=[_profile(inputs, S=T), _profile(inputs, S=1)],
        shape=_shape,
        compute=compute,
        integers=("lengths",),
        **more,
    )


_OUT = {"key_cache_out": (-1, HKV, T, D), "value_cache_out": (-1, HKV, T, D)}
FORMS = {
    b"rows": _engine(PREALLOCATED, dict.fromkeys(("key_entries", "value_entries"), (-1, HKV, -1, D)), _rows),
    b"copied": _engine(PREALLOCATED, _OUT, _static),
    b"in place": _engine(
        PREALLOCATED,
        _OUT,
        _static,
        aliases={"key_cache_out": "key_cache", "value_cache_out": "value_cache"},
    ),
    b"dynamic": _engine(PAST, dict.fromkeys(("present_key", "present_value"), (-1, HKV, -1, D)), _growing),
}
ENGINES.update(FORMS)
