"""Capture a decode trace: prompts, single tokens, and the FP64 oracle of the whole sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mha_deploy.bundle.cases import GoldenCase
from mha_deploy.bundle.traces import RESULTS, DecodeTrace, check_steps, prefill_calls, prefill_positions
from mha_deploy.errors import DeployError
from mha_deploy.export.eager import Float32Accumulation, run_module
from mha_deploy.export.golden import refuse_overflow
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import AttentionSpec
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import Attention, Decoder, split_heads
from mha_deploy.reference.inputs import fed_to, random_inputs, to_numpy

# -- Which tokens a bundle is stepped through: a prompt and as many single tokens as fit, up to ----

STEPS = 64
_PROMPT = 24
_ROWS = 3


@dataclass(frozen=True, kw_only=True)
class PlannedTrace:
    """One trace to capture.

    Args:
        name: Its name.
        prompt: Length of the prompt of every row.
        steps: How many single tokens follow.
    """

    name: str
    prompt: tuple[int, ...]
    steps: int


def plan_trace(spec: AttentionSpec, steps: int = STEPS) -> PlannedTrace | str:
    """The trace of a layer with a cache, or why it has none.

    The rows of a static cache get prompts of different lengths. The steps stop where the cache is full.
    """
    if spec.cache == "none":
        return "no trace: the layer has no cache"
    B, S = spec.axes["B"], spec.axes["S"]
    if S.min > 1:
        return "no trace: the layer does not take single tokens"
    if spec.cache == "growing" and spec.axes["P"].min > 0:
        return "no trace: the layer does not begin with an empty cache"
    if spec.room < 2:
        return "no trace: the cache has no room for a second token"
    rows = min(max(_ROWS, B.min), B.max)
    longest = min(_PROMPT, S.max, spec.room // 2)
    prompts = [longest] * rows
    if spec.cache == "static":
        prompts = [max(1, longest // 2**row) for row in range(rows)]
    return PlannedTrace(name="steps", prompt=tuple(prompts), steps=min(steps, spec.room - longest))


# -- Capture decode traces: a layer stepped through its cache, and the same layer over the whol ----


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
            B: Rows of the batch.
            prompt: Length of the prompt, of each row or of all.
            steps: How many single tokens follow.

        Raises:
            DeployError: The layer's axes or its cache do not allow it.
            ExportError: The module itself overflows on these tokens.
        """
        spec = self.module.spec
        lengths = np.array([prompt] * B if isinstance(prompt, int) else prompt, np.int32)
        if lengths.shape != (B,):
            raise DeployError("Every row needs a prompt.", got=f"{lengths.size} prompts", hint=f"{B} of them")
        check_steps(spec, lengths, steps)
        sizes = {"B": B, "S": int(lengths.max()) + steps}
        drawn = random_inputs(spec.without_cache(), sizes, self.seed, label=name)
        x = fed_to(self.module, drawn)["x"]
        eager = self._stepped(x, lengths, steps)
        oracle = self._whole(x.double())
        case = GoldenCase(name=name, sizes={}, inputs={}, oracle=oracle, eager=eager)
        refuse_overflow(case, self.precision, self.module)
        return DecodeTrace(name=name, x=to_numpy(x), prompt=lengths, steps=steps, oracle=oracle, eager=eager)

    def _whole(self, x: Tensor) -> dict[str, np.ndarray]:
        """The whole sequence in one pass, which no mistake in a cache can touch."""
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
    """The layer in FP64 over whole sequences: the oracle of its stepping. It has the rounded weights."""
    device = str(next(module.parameters()).device)
    spec = module.spec.without_cache()
    return build_module(spec, weights=module.state_dict(), dtype=torch.float64, device=device)


def _by_name(*results: Tensor) -> dict[str, np.ndarray]:
    return {name: to_numpy(tensor.contiguous()) for name, tensor in zip(RESULTS, results, strict=True)}
