"""Step a layer through tokens: what a stepper is, and the one that serves any runner."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from mha_deploy.backends.runner import Runner
from mha_deploy.errors import DeployError
from mha_deploy.spec import AttentionSpec
from mha_deploy.spec_parts import CACHE_TENSORS, LENGTHS
from mha_deploy.trace import DecodeTrace

# What stands behind the valid rows of a static cache is never to be read. Zeros would hide some of it.
_UNREAD = 8.0


class Stepper(Protocol):
    """A layer with its cache, on the host or a device (`backends.stepper`): takes tokens, and remembers."""

    @property
    def name(self) -> str:
        """The runtime, with its version."""

    @property
    def lengths(self) -> np.ndarray:
        """How many tokens each row has seen, int32 [B]; zeros at first."""

    @property
    def most_tokens(self) -> int | None:
        """How many tokens of a row one call may bring; None where nothing but the cache bounds them."""

    def feed(self, x: np.ndarray, counts: np.ndarray | None) -> np.ndarray:
        """Run S new tokens of every row.

        Args:
            x: [B, S, E].
            counts: How many of them are real, int32 [B], padding behind; None if all are.

        Returns:
            The output [B, S, E]; at padding it means nothing.
        """

    def cache(self) -> tuple[np.ndarray, np.ndarray]:
        """The keys and the values that it holds, [B, Hkv, rows, D]; only the valid rows mean anything."""


class HostStepper:
    """Steps any runner, its cache kept on the host: it goes into every call and comes out of it.

    Args:
        runner: The layer; it stays the caller's to close.
        spec: What the layer is; it must have a cache.
        B: Rows of the batch.
    """

    most_tokens: int | None = None

    def __init__(self, runner: Runner, spec: AttentionSpec, B: int) -> None:
        wanted = sorted(tensor.name for tensor in spec.inputs)
        if spec.cache == "none" or sorted(runner.inputs) != wanted:
            raise DeployError(
                f"{runner.name} does not run {spec.name} with a cache.",
                got=f"cache = {spec.cache}, inputs {sorted(runner.inputs)}",
                hint=f"inputs {wanted}",
            )
        self._runner, self._spec = runner, spec
        self._takes, self._gives = CACHE_TENSORS[spec.cache]
        rows = spec.axes["T"].max if spec.cache == "static" else 0
        shape, dtype = (B, spec.Hkv, rows, spec.D), runner.inputs[self._takes[0]].dtype
        self._held = (np.full(shape, _UNREAD, dtype), np.full(shape, -_UNREAD, dtype))
        self.name = runner.name
        self.lengths = np.zeros(B, np.int32)

    def feed(self, x: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
        """Run S new tokens of every row; see `Stepper`."""
        feeds = {"x": np.ascontiguousarray(x), **dict(zip(self._takes, self._held, strict=True))}
        if self._spec.cache == "static":
            feeds[LENGTHS] = self.lengths
        elif counts is not None:
            raise DeployError("The rows of a growing cache have one length.", got=f"counts {counts.tolist()}")
        results = self._runner.run(feeds)
        missing = [name for name in ("output", *self._gives) if name not in results]
        if missing:
            raise DeployError(f"{self.name} gave no {', '.join(missing)}.", got=sorted(results))
        self._keep(results, x.shape[1])
        self.lengths = (self.lengths + (x.shape[1] if counts is None else counts)).astype(np.int32)
        return results["output"]

    def _keep(self, results: dict[str, np.ndarray], S: int) -> None:
        B, Hkv, rows, D = self._held[0].shape
        shape = (B, Hkv, rows if self._spec.cache == "static" else rows + S, D)
        for name in self._gives:
            if results[name].shape != shape or results[name].dtype != self._held[0].dtype:
                raise DeployError(
                    f"{self.name} gave a {name} that cannot be the next call's.",
                    got=f"{results[name].dtype} {results[name].shape}",
                    hint=f"{self._held[0].dtype} {shape}",
                )
        self._held = (results[self._gives[0]], results[self._gives[1]])

    def cache(self) -> tuple[np.ndarray, np.ndarray]:
        """The keys and the values, [B, Hkv, rows, D]."""
        return self._held


def open_stepper(runner: Runner, spec: AttentionSpec, trace: DecodeTrace) -> AbstractContextManager[Stepper]:
    """A stepper with room for a trace: its cache is on the device where the runner can keep it, else here.

    Args:
        runner: The layer; it stays the caller's to close, behind the stepper.
        spec: What the layer is.
        trace: The tokens that it is to be stepped through.
    """
    if runner.can_step:
        keeper: Any = runner
        return keeper.stepper(B=trace.B, T=None if spec.cache == "static" else trace.length)  # type: ignore[no-any-return]
    return nullcontext(HostStepper(runner, spec, trace.B))
