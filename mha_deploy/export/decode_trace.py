"""Capture a decode trace: prompts, decode steps, and the FP64 oracle of the whole sequence in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mha_deploy.bundle.cases import GoldenCase
from mha_deploy.bundle.traces import DecodeTrace, check_steps, prefill_calls, prefill_positions
from mha_deploy.errors import DeployError
from mha_deploy.export.eager import Float32Accumulation, run_module
from mha_deploy.export.golden import refuse_overflow
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import ModelSpec
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import Attention, Decoder, split_heads
from mha_deploy.reference.inputs import fed_to, random_inputs, to_numpy

# -- Which tokens a bundle is decoded with: a prompt and as many steps as fit ----------------------

STEPS = 64
_RESULTS = ("output", "key", "value")
_PROMPT = 24
_BATCH = 3


@dataclass(frozen=True, kw_only=True)
class PlannedTrace:
    """One trace to capture.

    Args:
        name: Its name.
        prompt: Length of the prompt of every batch element.
        steps: How many single tokens follow.
    """

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


# -- Capture the trace of a catalog layer ----------------------------------------------------------


class TraceCapture:
    """Draws tokens, and finds out what is true of them.

    Args:
        module: The layer with its cache, its weights rounded to the target precision.
        precision: That precision.
        seed: Seed of the tokens.
        oracle: The layer in FP64 without a cache, where there is one already; see `whole_twin`.
        run_oracle: Runs it; another than `run_module` where memory is short.
        most_tokens: How many tokens of the prompt the module takes in one call, where memory is short.
    """

    def __init__(
        self,
        module: Attention,
        precision: Precision,
        seed: int,
        oracle: Attention | None = None,
        *,
        run_oracle: Callable[[Attention, dict[str, Tensor]], tuple[Tensor, ...]] = run_module,
        most_tokens: int | None = None,
    ) -> None:
        self.module = module
        self.precision = precision
        self.seed = seed
        self.oracle = oracle or whole_twin(module)
        self._run_oracle, self._most_tokens = run_oracle, most_tokens

    def capture(self, name: str, B: int, prompt: Sequence[int] | int, steps: int) -> DecodeTrace:
        """Capture one trace.

        Args:
            name: Its name; other names draw other tokens.
            B: The batch size.
            prompt: Length of the prompt, of each batch element or of all.
            steps: How many single tokens follow.

        Raises:
            DeployError: The layer's axes or its cache do not allow it.
            ExportError: The module itself overflows on these tokens.
        """
        spec = self.module.spec
        lengths = np.array([prompt] * B if isinstance(prompt, int) else prompt, np.int32)
        if lengths.shape != (B,):
            raise DeployError("Every batch element needs a prompt.", got=f"{lengths.size} of {B}")
        cache = check_steps(spec, lengths, steps)
        sizes = {"B": B, "S": int(lengths.max()) + steps}
        drawn = random_inputs(spec.without_cache(), sizes, self.seed, label=name)
        x = fed_to(self.module, drawn)["x"]
        eager = self._stepped(x, lengths, steps)
        oracle = self._whole(x.double())
        case = GoldenCase(name=name, sizes={}, inputs={}, oracle=oracle, eager=eager)
        refuse_overflow(case, self.precision, self.module)
        inputs = {"x": to_numpy(x)}
        return DecodeTrace(
            name=name, cache=cache, inputs=inputs, prompt=lengths, steps=steps, oracle=oracle, eager=eager
        )

    def _whole(self, x: Tensor) -> dict[str, np.ndarray]:
        """The whole sequence in one call, which no mistake in a cache can touch."""
        twin = self.oracle
        (output,) = self._run_oracle(twin, {"query": x})
        with torch.inference_mode():
            q, k, v = twin.project(x, None, None)
            _, k = twin.turn(q, k, torch.arange(x.shape[1], device=x.device))
        return _by_name(output, split_heads(k, twin.spec.Hkv), split_heads(v, twin.spec.Hkv))

    def _stepped(self, x: Tensor, prompt: np.ndarray, steps: int) -> dict[str, np.ndarray]:
        """The module in its own precision: the prefill in one call, then one token a call."""
        B, L, _ = x.shape
        rows = torch.arange(B, device=x.device)
        first = torch.from_numpy(prompt).to(x.device)
        padded = torch.from_numpy(prefill_positions(prompt, steps)).to(x.device)
        decoder, output = Decoder(self.module, B), torch.zeros_like(x)
        with torch.inference_mode(), Float32Accumulation():
            for part, counts in prefill_calls(prompt, self._most_tokens):
                real = None if counts is None else torch.from_numpy(counts).to(x.device)
                output[:, part] = decoder.feed(x[rows[:, None], padded[:, part]], real)
            for step in range(steps):
                output[rows, first + step] = decoder.feed(x[rows, first + step][:, None])[:, 0]
        return _by_name(output, decoder.keys[:, :, :L], decoder.values[:, :, :L])


def whole_twin(module: Attention) -> Attention:
    """The layer in FP64 over whole sequences: the oracle of its decoding. It has the rounded weights."""
    device = str(next(module.parameters()).device)
    spec = module.spec.without_cache()
    return build_module(spec, weights=module.state_dict(), dtype=torch.float64, device=device)


def _by_name(*results: Tensor) -> dict[str, np.ndarray]:
    return {name: to_numpy(tensor.contiguous()) for name, tensor in zip(_RESULTS, results, strict=True)}
