"""A decode trace on disk: a prompt and the tokens behind it, with the expected result at every position.

A trace is for decoding what a golden case is for one call: the expected outputs of the prefill and of N
decode steps, and the expected entries of the KV cache at the end. It is written as golden cases are.

Prompts of different lengths are padded on the right. The padding of batch element b is taken from the end of
its own tokens, behind its last one. These tokens occur nowhere else, so an entry that padding wrote and no
step overwrote cannot pass for the right one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mha_deploy.bundle.cases import (
    Arrays,
    GoldenCase,
    check_arrays,
    read_arrays,
    refuse_implausible,
    refuse_infinite,
    write_case,
)
from mha_deploy.errors import BundleError, DeployError
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import INT32, LENGTHS, KVCache, ModelSpec, TensorSpec


@dataclass(frozen=True, kw_only=True)
class DecodeTrace:
    """Tokens to decode, and what must come of them."""

    name: str  # its name, and that of its file
    cache: KVCache  # how the model decodes
    # All inputs but those of the cache, as one call with all L = max(prompt) + steps tokens takes them.
    # Batch element b has prompt[b] + steps tokens; those behind them pad its prompt
    inputs: Arrays
    prompt: np.ndarray  # how many tokens of each batch element the prefill brings, int32 [B]
    steps: int  # how many single tokens follow
    # Float64: every output by token, and every cached tensor with its L entries, by name. It is
    # computed in one call, without a cache
    oracle: Arrays
    # The same, decoded by the model in its own precision. Behind the last token of a batch element,
    # neither is defined
    eager: Arrays
    allowance: float = 1.0  # A factor on its budgets

    @property
    def B(self) -> int:
        """The batch size."""
        return len(self.prompt)

    @property
    def longest_prompt(self) -> int:
        """How many tokens the prefill brings, padding included."""
        return int(self.prompt.max())

    @property
    def length(self) -> int:
        """L, the tokens of the longest batch element."""
        return self.longest_prompt + self.steps

    def prefill(self, part: slice = slice(None)) -> dict[str, np.ndarray]:
        """The inputs of a call that brings a part of the prompts, padded from behind the last token."""
        positions = np.arange(self.longest_prompt)
        padded = positions + self.steps * (positions >= self.prompt[:, None])  # [B, max(prompt)]
        return self.call(padded[:, part])

    def tokens(self, step: int) -> dict[str, np.ndarray]:
        """The inputs of one decode step, from 1 to `steps`."""
        return self.call(self._positions(step))

    def call(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """The inputs of a call with the tokens at these positions, [B, S]."""
        given, cache = dict(self.inputs), self.cache
        for name, axis in cache.by_context.items():
            given[name] = np.take(given[name], np.arange(int(positions.max()) + 1), axis)
        for name, axis in cache.by_token.items():
            given[name] = take_tokens(given[name], axis, positions)
        return given

    def at_step(self, name: str, by_position: np.ndarray, step: int) -> np.ndarray:
        """An output by token, where each batch element is at one step."""
        return take_tokens(by_position, self.cache.outputs[name], self._positions(step))

    def defined(self, results: Arrays) -> dict[str, np.ndarray]:
        """Outputs or cached tensors by token, with zeros behind the last token of each batch element."""
        axes = {**self.cache.outputs, **{each.name: each.axis for each in self.cache.tensors}}
        ends = self.prompt + self.steps
        return {name: without_padding(array, ends, axes[name]) for name, array in results.items()}

    def _positions(self, step: int) -> np.ndarray:
        return (self.prompt + step - 1)[:, None]


def without_padding(array: np.ndarray, ends: np.ndarray, axis: int) -> np.ndarray:
    """Zeros from position `ends[b]` of batch element b on. An array of another shape stays as it is."""
    if array.ndim <= axis or len(array) != len(ends) or array.shape[axis] <= ends.min():
        return array
    others = [other for other in range(1, array.ndim) if other != axis]
    is_real = np.expand_dims(np.arange(array.shape[axis]) < ends[:, None], others)
    return np.where(is_real, array, array.dtype.type(0))


def take_tokens(array: np.ndarray, axis: int, positions: np.ndarray) -> np.ndarray:
    """The entries of an array at the positions [B, S] of its batch elements, along the axis of the tokens."""
    if (positions == positions[0]).all():
        return np.take(array, positions[0], axis)
    by_token = np.moveaxis(array, axis, 1)
    return np.moveaxis(by_token[np.arange(len(positions))[:, None], positions], 1, axis)


def prefill_calls(prompt: np.ndarray, most: int | None) -> Iterator[tuple[slice, np.ndarray | None]]:
    """The calls that bring the prompts [B], each with at most so many tokens; None for all in one call.

    For each call: which of the max(prompt) tokens it brings, and how many of them are real in every batch
    element, int32 [B], or None if all are.
    """
    longest = int(prompt.max())
    for start in range(0, longest, most or longest):
        stop = min(start + (most or longest), longest)
        counts = np.clip(prompt - start, 0, stop - start).astype(np.int32)
        yield slice(start, stop), None if (counts == stop - start).all() else counts


# -- Which tokens a bundle is decoded with: a prompt and as many steps as fit ----------------------

STEPS = 64
_PROMPT = 24
_BATCH = 3


@dataclass(frozen=True, kw_only=True)
class PlannedTrace:
    """One trace to capture: the length of the prompt of every batch element, and how many tokens follow."""

    name: str
    prompt: tuple[int, ...]
    steps: int


def plan_trace(spec: ModelSpec, steps: int = STEPS) -> PlannedTrace | str:
    """The trace of a model with a KV cache, or why it has none.

    With a preallocated cache the prompts have different lengths. The steps stop where the cache is full.
    """
    cache = spec.kv_cache
    if cache is None:
        return "no trace: the model has no KV cache"
    if not cache.outputs:
        return f"no trace: no output has the axis {cache.new} of the tokens"
    if spec.axes[cache.new].min > 1:
        return "no trace: the model does not take single tokens"
    if cache.past is not None and spec.axes[cache.past].min > 0:
        return f"no trace: the cache cannot be empty, {cache.past} begins at {spec.axes[cache.past].min}"
    if cache.room < 2:
        return "no trace: the cache has no room for a second token"
    batch = spec.axes.get("B")
    B = 1 if batch is None else min(max(_BATCH, batch.min), batch.max)
    longest = min(_PROMPT, spec.axes[cache.new].max, cache.room // 2)
    prompts = [longest] * B
    if cache.is_preallocated:
        prompts = [max(1, longest // 2**b) for b in range(B)]
    return PlannedTrace(name="steps", prompt=tuple(prompts), steps=min(steps, cache.room - longest))


# -- Does it fit? ----------------------------------------------------------------------------------


def check_steps(spec: ModelSpec, prompt: np.ndarray, steps: int) -> KVCache:
    """How a model decodes; refuses prompts and a number of steps that its cache or its axes do not allow."""
    cache, got = spec.kv_cache, f"prompts {prompt.tolist()}, {steps} steps"
    if cache is None:
        raise DeployError(f"{spec.name} has no KV cache.", got="no cached inputs")
    if not prompt.size or prompt.min() < 1 or steps < 1:
        problem = "A trace needs a prompt in every batch element, and a step."
        raise DeployError(problem, got=got, hint="at least 1 of each")
    if not cache.is_preallocated and (prompt != prompt[0]).any():
        problem = "The batch elements of a dynamic KV cache have one length."
        raise DeployError(problem, got=got, hint="prompts of one length, or a preallocated cache")
    longest = int(prompt.max())
    sizes = [("B", len(prompt)), (cache.new, longest), (cache.new, 1)]
    for name, size in sizes if cache.past is None else [*sizes, (cache.past, 0)]:
        axis = spec.axes.get(name)
        if axis is not None and not axis.min <= size <= axis.max:
            problem = f"Axis {name} of {spec.name} does not allow these steps."
            hint = f"a size from {axis.min} to {axis.max}, or export it for others"
            raise DeployError(problem, got=f"{name}={size}", hint=hint)
    if longest + steps > cache.room:
        most = cache.room - longest
        hint = f"{most} steps at most" if most > 0 else f"{cache.room} tokens in all at most"
        problem = f"The tokens do not fit into the cache of {spec.name}."
        raise DeployError(problem, got=f"a prompt of {longest} tokens and {steps} steps", hint=hint)
    return cache


def check_trace(spec: ModelSpec, trace: DecodeTrace, precision: Precision) -> None:
    """Refuse a trace of another model or precision, or one that is longer than the cache."""
    cache = check_steps(spec, trace.prompt, trace.steps)
    sizes = {**cache.call_sizes(spec, trace.B, trace.length, 0), "L": trace.length}
    groups = {"inputs/tokens": trace.inputs, "oracle": trace.oracle, "eager": trace.eager}
    arrays = {f"{group}/{name}": x for group, found in groups.items() for name, x in found.items()}
    known = trace_tensors(spec, cache)
    check_arrays(arrays, known, sizes, precision, f"The trace {trace.name} of {spec.name}")


def trace_tensors(spec: ModelSpec, cache: KVCache) -> dict[str, TensorSpec]:
    """The inputs and the results of a trace as its file names them; L is the number of its tokens."""

    def along(tensor: TensorSpec, axes: Mapping[str, int], name: str = "") -> TensorSpec:
        dims = list(tensor.dims)
        if tensor.name in axes:
            dims[axes[tensor.name]] = "L"
        return TensorSpec(name=name or tensor.name, kind=tensor.kind, dims=tuple(dims))

    cached, found = {each.input: each for each in cache.tensors}, dict[str, TensorSpec]()
    results = [along(tensor, cache.outputs) for tensor in spec.outputs if tensor.name in cache.outputs]
    for tensor in spec.inputs:
        if (each := cached.get(tensor.name)) is not None:
            results.append(along(tensor, {tensor.name: each.axis}, each.name))
        elif not (cache.is_preallocated and tensor.name == LENGTHS):
            found[f"inputs/tokens/{tensor.name}"] = along(along(tensor, cache.by_token), cache.by_context)
    return found | {f"{group}/{each.name}": each for group in ("oracle", "eager") for each in results}


# -- Files -----------------------------------------------------------------------------------------

_COUNTS = {
    "inputs/prompt": TensorSpec(name="prompt", kind=INT32, dims=("B",)),
    "inputs/steps": TensorSpec(name="steps", kind=INT32, dims=()),
}


def write_trace(path: Path, trace: DecodeTrace) -> None:
    """Write a trace; the file's name is to be the trace's."""
    inputs = {f"tokens/{name}": array for name, array in trace.inputs.items()}
    inputs |= {"prompt": trace.prompt, "steps": np.array(trace.steps, np.int32)}
    results: dict[str, Any] = {"oracle": trace.oracle, "eager": trace.eager}
    write_case(path, GoldenCase(name=trace.name, sizes={}, inputs=inputs, **results))


def read_trace(path: Path, spec: ModelSpec, precision: Precision) -> DecodeTrace:
    """Read a trace of a model, checking that it is one."""
    cache = spec.kv_cache
    if cache is None:
        raise DeployError(f"{spec.name} has no KV cache.", got=path.name)
    arrays = read_arrays(path, trace_tensors(spec, cache).keys() | _COUNTS)
    prompt, steps = (arrays.pop(name) for name in _COUNTS)
    check_arrays(dict(zip(_COUNTS, (prompt, steps), strict=True)), _COUNTS, {"B": prompt.size}, precision)
    inputs, oracle, eager = (
        {name.removeprefix(group): x for name, x in arrays.items() if name.startswith(group)}
        for group in ("inputs/tokens/", "oracle/", "eager/")
    )
    about: dict[str, Any] = {"cache": cache, "prompt": prompt, "steps": int(steps)}
    trace = DecodeTrace(name=path.stem, inputs=inputs, oracle=oracle, eager=eager, **about)
    try:
        check_trace(spec, trace, precision)
    except DeployError as error:
        raise BundleError(error.what, got=f"{path.name}: {error.got}", hint="export again") from error
    refuse_infinite(path.name, [*trace.inputs.items(), *trace.oracle.items(), *trace.eager.items()])
    refuse_implausible(path.name, trace.defined(trace.oracle), trace.defined(trace.eager), precision)
    return trace
