"""Layers that decode, rightly and wrongly: the mistakes that are made with caches, one at a time.

Each is made around the reference layer in PyTorch, so that everything else in it is right.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch

from mha_deploy.exporter.oracle import run_module
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.model.spec import FLOAT, Axis
from mha_deploy.reference import attention, build_module
from mha_deploy.reference.inputs import call_arguments, tensor_from_numpy, to_numpy
from mha_deploy.runtime.runner import Arrays, Runner, TensorInfo
from mha_deploy.validation.decode import HostDecodeLoop

AT = 3  # the call at which a mistake that is made once is made: step 3
GIVEN_OUT = {
    "dynamic": {"past_key": "present_key", "past_value": "present_value"},
    "preallocated": {"key_cache": "key_cache_out", "value_cache": "value_cache_out"},
}


def cached(cache, rows=64, **changes):
    """tiny-rope with a cache for this many tokens."""
    spec = find_spec("tiny-rope")
    dynamic, static = Axis(min=0, opt=16, max=rows), Axis(min=rows, opt=rows, max=rows)
    length = {"dynamic": {"P": dynamic}, "preallocated": {"T": static}}
    return replace(spec, cache=cache, axes={**spec.axes, **length[cache]}, **changes)


def module_of(spec, precision):
    return build_module(spec, seed=1, dtype=getattr(torch, PRECISIONS[precision].torch_name))


class ModuleRunner(Runner):
    """The reference layer behind the interface of a runtime."""

    def __init__(self, module):
        self.module, self.name = module, f"torch {module.path}"
        dtype = to_numpy(next(module.parameters())[:0]).dtype
        self.inputs, self.outputs = (
            {
                t.name: TensorInfo(dtype=dtype if t.kind == FLOAT else np.dtype(t.kind), dims=t.dims)
                for t in tensors
            }
            for tensors in (module.spec.inputs, module.spec.outputs)
        )

    def _run(self, feeds: Arrays):
        tensors = {name: tensor_from_numpy(np.ascontiguousarray(array)) for name, array in feeds.items()}
        results = run_module(self.module, call_arguments(self.module.spec, tensors))
        return {name: to_numpy(tensor) for name, tensor in zip(self.outputs, results, strict=True)}


class Meddled(Runner):
    """Another runner, with something done to what goes in or comes out; call 0 is the prefill."""

    def __init__(
        self,
        runner: Runner,
        before: Callable[[int, dict], dict] = lambda call, feeds: feeds,
        after: Callable[[int, dict, dict], dict] = lambda call, feeds, results: results,
    ):
        self._runner, self._before, self._after, self._calls = runner, before, after, 0
        self.name, self.inputs, self.outputs = runner.name, runner.inputs, runner.outputs

    def _run(self, feeds):
        call, self._calls = self._calls, self._calls + 1
        return self._after(call, feeds, self._runner.run(self._before(call, dict(feeds))))


class Patched(ModuleRunner):
    """The layer with some of its parts replaced while it runs: (owner, name of the part, replacement)."""

    def __init__(self, module, *parts):
        super().__init__(module)
        self._parts = parts

    def _run(self, feeds):
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(patch.object(*part))
            return super()._run(feeds)


# -- the layer ---------------------------------------------------------------------------------------


def upper_left(module):
    """Causal from the upper left corner, as TensorRT reads is_causal: a single query sees key 0."""
    layout, seen = module._layout, attention.visible_from

    def from_zero(positions, T, window=None):
        return seen(positions - positions[..., :1], T, window)

    return Patched(
        module,
        (module, "_layout", lambda causal, past=0: layout(causal=causal)),
        (attention, "visible_from", from_zero),
    )


def shifted(module, shift):
    """Rotary positions as `shift` gives them: it takes them, and gives those of queries and those of keys."""
    turn = module.rotate

    def wrong(q, k, positions):
        of_queries, of_keys = shift(positions)
        return turn(q, k, of_queries)[0], turn(q, k, of_keys)[1]

    return Patched(module, (module, "rotate", wrong))


def shifted_alike(module):
    return shifted(module, lambda p: (p + 1, p + 1))


def shifted_in_steps(module):
    """The position is the length after the call instead of before it, which only a prefill gets right."""
    return shifted(module, lambda p: (p + 1, p + 1) if p.shape[-1] == 1 else (p, p))


def shifted_keys(module):
    return shifted(module, lambda p: (p, p + 1))


def positions_from_zero(module):
    """Every call counts from 0, as a layer without a cache does."""
    return shifted(module, lambda p: (p - p[..., :1], p - p[..., :1]))


# -- the cache ---------------------------------------------------------------------------------------


def new_rows_spoiled(runner, cache, spoil, at=AT, only=None):
    """The layer computes rightly; then `spoil(old, new, row)` spoils what one call wrote, in every row."""

    def after(call, feeds, results):
        if call != at:
            return results
        for before, out in GIVEN_OUT[cache].items():
            if only is not None and only not in out:
                continue
            results[out] = np.array(results[out])
            for b in range(len(results[out])):
                row = feeds["lengths"][b] if "lengths" in feeds else feeds[before].shape[2]
                spoil(feeds[before][b], results[out][b], int(row))
        return results

    return Meddled(runner, after=after)


def not_written(module, at=AT, only=None):
    return not_written_by(ModuleRunner(module), module.spec.cache, at, only)


def not_written_by(runner, cache, at=AT, only=None):
    """The row keeps what was there; behind a past that only grows, what stands before it."""

    def spoil(old, new, row):
        new[:, row] = old[:, row] if row < old.shape[1] else new[:, row - 1]

    return new_rows_spoiled(runner, cache, spoil, at, only)


def one_early(module, at=AT):
    def spoil(old, new, row):
        new[:, row - 1] = new[:, row]
        new[:, row] = old[:, row] if row < old.shape[1] else 0

    return new_rows_spoiled(ModuleRunner(module), module.spec.cache, spoil, at)


class SwappedRows(HostDecodeLoop):
    """Two rows of the batch have each other's cache after the prefill."""

    def feed(self, tokens, counts=None):
        is_first = not self.lengths.any()
        output = super().feed(tokens, counts)
        if is_first:
            self._held = {
                name: np.ascontiguousarray(entries[[1, 0, *range(2, len(entries))]])
                for name, entries in self._held.items()
            }
        return output


class LosesCount(HostDecodeLoop):
    """One row of the batch is not advanced at step 3."""

    calls = 0

    def feed(self, tokens, counts=None):
        output = super().feed(tokens, counts)
        if self.calls == AT:
            self.lengths = self.lengths - np.array([0, 1, 0], np.int32)
        self.calls += 1
        return output
