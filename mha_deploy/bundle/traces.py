"""A decode trace on disk: a prompt and the tokens behind it, with what is true at every position.

A trace is what a golden case is to one call: it says what prefill and N single-token steps must give, and
what the cache must hold then. It is written as golden cases are, one `.npz` file that bears its name.

Prompts of different lengths are padded on the right. What pads row b is the end of its own x, behind its
last token: tokens of its own that never come again, so that a cache row which padding wrote and no step
overwrote cannot pass for the right one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from mha_deploy.bundle.cases import Arrays, GoldenCase, read_npz, refuse_infinite, take_arrays, write_case
from mha_deploy.errors import BundleError, DeployError
from mha_deploy.model.precision import PRECISIONS, Precision
from mha_deploy.model.spec import FLOAT, INT32, AttentionSpec, TensorSpec

RESULTS = ("output", "key", "value")

_INPUTS = (
    TensorSpec(name="x", kind=FLOAT, dims=("B", "L", "E")),
    TensorSpec(name="prompt", kind=INT32, dims=("B",)),
    TensorSpec(name="steps", kind=INT32, dims=()),
)
_OUTPUTS = (
    TensorSpec(name="output", kind=FLOAT, dims=("B", "L", "E")),
    TensorSpec(name="key", kind=FLOAT, dims=("B", "Hkv", "L", "D")),
    TensorSpec(name="value", kind=FLOAT, dims=("B", "Hkv", "L", "D")),
)


@dataclass(frozen=True, kw_only=True)
class DecodeTrace:
    """Tokens to step through, and what must come of them.

    Args:
        name: Its name, and that of its file.
        x: [B, L, E] in the target precision, L = max(prompt) + steps. Row b has prompt[b] + steps tokens;
            what stands behind them pads its prompt.
        prompt: How many tokens of each row the prefill brings, int32 [B].
        steps: How many single tokens follow.
        oracle: float64, by position: `output` [B, L, E], `key` (after the rotary embedding) and `value`
            [B, Hkv, L, D]. It knows of no cache.
        eager: The same from stepping the module in its own precision. Behind the last token of a row, neither
            means anything.
    """

    name: str
    x: np.ndarray
    prompt: np.ndarray
    steps: int
    oracle: Arrays
    eager: Arrays

    @property
    def B(self) -> int:
        """Rows of the batch."""
        return self.x.shape[0]

    @property
    def length(self) -> int:
        """L, the tokens of the longest row."""
        return self.x.shape[1]

    @property
    def longest_prompt(self) -> int:
        """How many tokens the call of the prefill has, padding included."""
        return int(self.prompt.max())

    @cached_property
    def prefill(self) -> np.ndarray:
        """The tokens of the first call, [B, max(prompt), E]."""
        return self.x[np.arange(self.B)[:, None], prefill_positions(self.prompt, self.steps)]

    def tokens(self, step: int) -> np.ndarray:
        """The tokens of one step, from 1 to `steps`. [B, 1, E]."""
        return self.at_step(self.x, step)

    def at_step(self, by_position: np.ndarray, step: int) -> np.ndarray:
        """What an array [B, L, …] holds where each row stands at one step. [B, 1, …]."""
        return by_position[np.arange(self.B), self.prompt + step - 1][:, None]


def prefill_positions(prompt: np.ndarray, steps: int) -> np.ndarray:
    """Where in x the tokens of the prefill stand: the prompt, then what is behind the row's last token.

    [B] -> [B, max(prompt)].
    """
    positions = np.arange(prompt.max())
    return positions + steps * (positions >= prompt[:, None])


def prefill_calls(prompt: np.ndarray, most: int | None) -> Iterator[tuple[slice, np.ndarray | None]]:
    """The calls that bring the prompts, each with at most so many tokens.

    Args:
        prompt: Length of the prompt of every row, [B].
        most: How many tokens a call may have; None for all in one.

    Returns:
        For each call which of the max(prompt) tokens it brings, and how many of them are real in every row,
        int32 [B], or None if all are.
    """
    longest = int(prompt.max())
    for start in range(0, longest, most or longest):
        stop = min(start + (most or longest), longest)
        counts = np.clip(prompt - start, 0, stop - start).astype(np.int32)
        yield slice(start, stop), None if (counts == stop - start).all() else counts


def call_sizes(spec: AttentionSpec, B: int, S: int, past: int) -> dict[str, int]:
    """The size of every axis in a call with S new tokens behind `past` ones."""
    return {"B": B, "S": S, **({"P": past} if spec.cache == "growing" else {"T": spec.axes["T"].max})}


# -- does it fit? ----------------------------------------------------------------------------------


def check_steps(spec: AttentionSpec, prompt: np.ndarray, steps: int) -> None:
    """Refuse prompts and a number of steps that a layer has no cache, no calls or no room for."""
    if spec.cache == "none":
        raise DeployError(f"{spec.name} has no cache to step through.", got="cache = none")
    if not prompt.size or prompt.min() < 1 or steps < 1:
        raise DeployError(
            "A trace needs a prompt in every row, and a step.",
            got=f"prompts {prompt.tolist()}, {steps} steps",
            hint="at least 1 of each",
        )
    if spec.cache == "growing":
        _refuse_ragged(prompt)
    longest = int(prompt.max())
    _check_axis(spec, "B", len(prompt))
    _check_axis(spec, "S", longest)
    _check_axis(spec, "S", 1)
    if spec.cache == "growing":
        _check_axis(spec, "P", 0)
    if longest + steps > spec.room:
        most = spec.room - longest
        raise DeployError(
            f"The tokens do not fit into the cache of {spec.name}.",
            got=f"a prompt of {longest} tokens and {steps} steps",
            hint=f"{most} steps at most" if most > 0 else f"{spec.room} tokens in all at most",
        )


def _check_axis(spec: AttentionSpec, name: str, size: int) -> None:
    axis = spec.axes[name]
    if not axis.min <= size <= axis.max:
        raise DeployError(
            f"Axis {name} of {spec.name} does not allow these steps.",
            got=f"{name}={size}",
            hint=f"a size from {axis.min} to {axis.max}, or export it for others",
        )


def _refuse_ragged(prompt: np.ndarray) -> None:
    if (prompt != prompt[0]).any():
        raise DeployError(
            "The rows of a growing cache have one length.",
            got=f"prompts {prompt.tolist()}",
            hint='prompts of one length, or cache = "static"',
        )


def check_trace(spec: AttentionSpec, trace: DecodeTrace, precision: Precision) -> None:
    """Refuse a trace that is of another layer or precision, or longer than the layer's cache."""
    _check_lengths(trace)
    check_steps(spec, trace.prompt, trace.steps)
    B, L, numbers = trace.B, trace.length, precision.numpy
    tokens, rows = (B, L, spec.E), (B, spec.Hkv, L, spec.D)
    _check_array(trace, spec, "x", trace.x, tokens, numbers)
    for name, shape in {"output": tokens, "key": rows, "value": rows}.items():
        _check_array(trace, spec, f"oracle/{name}", trace.oracle.get(name), shape, np.dtype(np.float64))
        _check_array(trace, spec, f"eager/{name}", trace.eager.get(name), shape, numbers)


def _check_array(
    trace: DecodeTrace,
    spec: AttentionSpec,
    name: str,
    array: np.ndarray | None,
    shape: tuple[int, ...],
    dtype: np.dtype,
) -> None:
    if array is None or array.shape != shape or array.dtype != dtype:
        raise DeployError(
            f"The trace {trace.name} is not one of {spec.name} in this precision: {name} does not fit.",
            got="nothing" if array is None else f"{array.dtype} {array.shape}",
            hint=f"{dtype} {shape}",
        )


def _check_lengths(trace: DecodeTrace) -> None:
    prompt, steps = trace.prompt, trace.steps
    if prompt.min() < 1 or steps < 1 or int(prompt.max()) + steps != trace.length:
        raise BundleError(
            "The lengths of a decode trace do not add up.",
            got=f"{trace.name}: prompts {prompt.tolist()}, {steps} steps, {trace.length} tokens",
            hint="export again",
        )


# -- files -----------------------------------------------------------------------------------------


def write_trace(path: Path, trace: DecodeTrace) -> None:
    """Write a trace; the file's name is to be the trace's."""
    inputs = {"x": trace.x, "prompt": trace.prompt, "steps": np.array(trace.steps, np.int32)}
    write_case(
        path, GoldenCase(name=trace.name, sizes={}, inputs=inputs, oracle=trace.oracle, eager=trace.eager)
    )


def read_trace(path: Path) -> DecodeTrace:
    """Read a trace, checking that it is one; `check_trace` says whether it is one of a layer."""
    arrays = read_npz(path, _refuse_strangers)
    sizes = _sizes_of(path, arrays)
    precision = _precision_of(path, arrays["inputs/x"])
    inputs = take_arrays(arrays, "inputs", _INPUTS, sizes, precision)
    trace = DecodeTrace(
        name=path.stem,
        x=inputs["x"],
        prompt=inputs["prompt"],
        steps=int(inputs["steps"]),
        oracle=take_arrays(arrays, "oracle", _OUTPUTS, sizes, None),
        eager=take_arrays(arrays, "eager", _OUTPUTS, sizes, precision),
    )
    refuse_infinite(path.name, [("x", trace.x), *trace.oracle.items(), *trace.eager.items()])
    _check_lengths(trace)
    return trace


def _refuse_strangers(names: list[str]) -> None:
    known = {f"inputs/{tensor.name}" for tensor in _INPUTS}
    known |= {f"{group}/{tensor.name}" for group in ("oracle", "eager") for tensor in _OUTPUTS}
    if set(names) != known:
        raise BundleError(
            "The file does not hold the arrays of a decode trace.",
            got=", ".join(sorted(set(names) ^ known)),
            hint="export again",
        )


def _sizes_of(path: Path, arrays: Arrays) -> dict[str, int]:
    """The sizes that x and the keys say; whether the other arrays agree is seen when they are taken."""
    x, key = arrays["inputs/x"], arrays["oracle/key"]
    if x.ndim != 3 or key.ndim != 4 or 0 in (*x.shape, *key.shape):
        raise BundleError(
            "A decode trace needs tokens [B, L, E] and keys [B, Hkv, L, D].",
            got=f"{path.name}: {x.shape} and {key.shape}",
            hint="export again",
        )
    return {**dict(zip("BLE", x.shape, strict=True)), "Hkv": key.shape[1], "D": key.shape[3]}


def _precision_of(path: Path, x: np.ndarray) -> Precision:
    stored = {precision.numpy: precision for precision in PRECISIONS.values()}
    stored[np.dtype(np.uint16)] = PRECISIONS["bf16"]
    if x.dtype not in stored:
        raise BundleError(
            "The tokens of a decode trace have no known precision.", got=f"{path.name}: {x.dtype}"
        )
    return stored[x.dtype]
