"""Cases made by hand: an oracle, and samples of rounding it."""

import numpy as np

from mha_deploy.bundle.cases import Baseline, GoldenCase, Reference
from mha_deploy.bundle.manifest import Source
from mha_deploy.model.precision import find_precision
from mha_deploy.rounding import accumulations, rounded

SAMPLES = 12


def samples_of(oracle, precision="fp16", level=1.0, seed=0):
    """Errors of rounding an oracle at random, [N, ...], `level` times as large; integers as they are."""
    if oracle.dtype.kind in "iub":
        return np.stack([oracle] * SAMPLES)
    exact, bits = oracle.astype(np.float64), find_precision(precision).significand_bits
    errors = [rounded(exact, bits, seed + number) - exact for number in range(1, SAMPLES + 1)]
    return (level * np.stack(errors)).astype(np.float32)


def made_baselines(oracle, precision="fp16", level=1.0, seed=0):
    """The baselines of a case, for every type of accumulation."""
    samples = {name: samples_of(each, precision, level, seed) for name, each in oracle.items()}
    return dict.fromkeys(accumulations(find_precision(precision)), Baseline(samples))


def in_precision(arrays, precision="fp16"):
    """Floats in a precision; integers as they are."""
    own = find_precision(precision).numpy
    return {name: x if x.dtype.kind in "iub" else x.astype(own) for name, x in arrays.items()}


def made_case(oracle, eager=None, *, precision="fp16", level=1.0, **about):
    """A golden case of an oracle, by output."""
    about = {"name": "made", "sizes": {}, "inputs": {}, **about}
    about["eager"] = in_precision(oracle, precision) if eager is None else eager
    about.setdefault("baselines", made_baselines(oracle, precision, level))
    return GoldenCase(oracle=Reference(oracle, Source.LAYER), **about)
