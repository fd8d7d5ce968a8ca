"""Decoding that is replayed from a made-up trace, rightly and wrongly: real reports without a runtime."""

import functools
from dataclasses import replace

import numpy as np
from golden_made import in_precision, made_baselines

from mha_deploy.bundle.cases import DecodeTrace, Reference
from mha_deploy.bundle.manifest import Source
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.model.spec import Axis
from mha_deploy.validation.decode import run_decode_loop

STEPS = 20
FP16 = PRECISIONS["fp16"]


@functools.cache
def spec():
    tiny = find_spec("tiny-rope")
    return replace(tiny, cache="preallocated", axes={**tiny.axes, "T": Axis(min=64, opt=64, max=64)})


@functools.cache
def trace(steps=STEPS, prompt=(5, 2, 7)):
    """Numbers for an oracle, and the same rounded for the module."""
    dice, B, L = np.random.default_rng(0), len(prompt), max(prompt) + steps
    rows = (B, spec().Hkv, L, spec().D)
    shapes = {"output": (B, L, spec().E), "key": rows, "value": rows}
    oracle = {name: dice.standard_normal(shape) for name, shape in shapes.items()}
    return DecodeTrace(
        name="steps",
        cache=spec().kv_cache,
        inputs={"x": dice.standard_normal((B, L, spec().E)).astype(np.float16)},
        prompt=np.array(prompt, np.int32),
        steps=steps,
        oracle=Reference(oracle, Source.LAYER),
        eager=in_precision(oracle),
        baselines=made_baselines(oracle),
    )


class Replay:
    """Answers with what the module gave; `meddle` may alter the answer of a step, or raise."""

    name, most_tokens = "replay 1.0", None

    def __init__(self, steps, meddle):
        self.trace, self.meddle, self.step = steps, meddle, 0
        self.lengths = np.zeros(steps.B, np.int32)

    def feed(self, tokens, counts):
        output = self.trace.eager["output"]
        first = output[:, : self.trace.longest_prompt]
        given = self.trace.at_step("output", output, self.step) if self.step else first
        self.lengths = self.trace.prompt + self.step
        self.step += 1
        return {"output": self.meddle(self.step - 1, given.copy())}

    def cache(self):
        return {name: self.trace.eager[name] for name in ("key", "value")}


def right(step, output):
    return output


def wrong_from(first):
    def meddle(step, output):
        output[1, 0] *= 3 if step >= first else 1
        return output

    return meddle


def stops_at(last):
    def meddle(step, output):
        if step == last:
            raise RuntimeError("out of memory")
        return output

    return meddle


def has_nan(step, output):
    output[0, 0, 0] = np.nan if step == 3 else output[0, 0, 0]
    return output


def decoded(meddle=right, steps=STEPS, **options):
    given = trace(steps, **options)
    return run_decode_loop(Replay(given, meddle), given, spec(), FP16)


MEDDLERS = (right, wrong_from(3), wrong_from(0), stops_at(4), stops_at(0), has_nan)
