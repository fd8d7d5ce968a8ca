"""Reproduce the constants of the judge: what each was measured by, and what another number would cost.

    python benchmarks/judge_constants.py [--seeds 12] [MODEL ...]

Constants with a closed form or a measurement of their own are printed beside it. The others are judged by
what they are for: results that random rounding gives, with seeds that no budget was made of, must pass, and
results with a planted mistake must not. Each constant is scaled, and both are counted again. The models are
those of `small_models.py`, in FP16.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import small_models

import mha_deploy as md
from mha_deploy import metrics, rounding
from mha_deploy.baselines.fresh import FreshCases
from mha_deploy.bundle.cases import GoldenCase, golden_cases
from mha_deploy.exporter.golden import arrays_of
from mha_deploy.exporter.oracle import RandomRounding
from mha_deploy.exporter.samples import decision_spread
from mha_deploy.judge import judge_case
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.reference.inputs import tensor_from_numpy

MODELS = ("vit", "encoder", "massive", "experts")
FIRST_SEED = 1000  # those of a budget are below 40
SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
KNOWN = 12  # known mistakes of a model that are planted
FP16 = PRECISIONS["fp16"]
SMALL = Path(small_models.__file__)
Results = dict[str, np.ndarray]

# Which constants are scaled, with what each decides.
SCALED = {
    "FACTOR": "the budget over the largest error of a sample",
    "_SMALLEST_VECTOR": "vectors below this share of the tensor's size are judged by that size",
    "_RESULT_ROUNDING": "roundoffs that an element's own value may lose",
    "_MASSIVE": "mean squares above which an element is massive",
    "_PRIOR": "samples of the usual kind beside those of one channel or vector",
    "_BRANCH": "usual errors above which a vector took another branch",
    "_BETWEEN": "share of the way to the nearest sample that such a vector may be off",
    "_OF_OPEN": "errors of a decision that costs less than a branch",
    "_OF_BRANCH": "errors of a branch as a whole",
    "_ONE_SIDED": "roundoffs of gain that rounding of a scale leaves",
    "_SUSPECT_CHANCE": "share of a known mistake that chance may leave where it is looked for",
    "_TO_NEAREST": "share of BF16's error that rounding to nearest in FP16 leaves",
}


# -- Measured by themselves --------------------------------------------------------------------------


def result_rounding() -> str:
    """Random rounding of one number, in roundoffs of its value: at the end and at the start of a binade."""
    found = []
    for number in (2 - 2**-9, 1.0):
        near = number + np.linspace(0, 2**-10, 4097)[1:-1]
        errors = [rounding.rounded(near, FP16.significand_bits, seed) / near - 1 for seed in range(64)]
        found.append(math.sqrt(np.square(errors).mean()) / FP16.roundoff)
    return f"{found[0]:.2f} to {found[1]:.2f} roundoffs"


def accumulation() -> str:
    """GEMMs whose partial sums are rounded to FP16, over the size that the samples give their error."""
    random, found = np.random.default_rng(0), dict[int, float]()
    for at_once in (1, 2, 16):
        errors = list[np.ndarray]()
        for terms in (64, 256, 1024, 4096):
            a, b = (random.standard_normal((256, terms)).astype(np.float16).astype(np.float64) for _ in "ab")
            added, total = (a * b).reshape(256, -1, at_once).sum(2), np.zeros(256)
            for each in added.T:
                total = (total + each).astype(np.float16).astype(np.float64)
            true = added.sum(1)
            walk = terms * np.square(a).mean(1) * np.square(b).mean(1)
            size = math.sqrt(terms) * rounding.ROUNDOFFS["fp16"] * np.sqrt(np.square(true) / 3 + walk / 2)
            errors.append((total - true) / size)
        found[at_once] = math.sqrt(np.square(errors).mean())
    return ", ".join(f"{error:.2f} with {count} terms at once" for count, error in found.items())


def few_samples() -> str:
    """The quantile of Student's t with as many degrees of freedom as samples, over that of eight."""
    rest = 1e-4

    def quantile(freedom: int) -> float:
        x = np.concatenate([[0], np.logspace(-4, 5, 200001)])
        density = (1 + x * x / freedom) ** (-(freedom + 1) / 2)
        constant = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
        below = (
            0.5 + np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(x))]) * constant
        )
        return float(np.interp(1 - rest, below, x))

    return " ".join(f"{quantile(count) / quantile(8):.2f}" for count in range(1, 8)) + " for 1 to 7 samples"


def to_nearest() -> str:
    """How much of its error in BF16 the error of a number in FP16 holds: rounding to nearest is no chance."""
    x = np.random.default_rng(0).standard_normal(1 << 20)
    narrow = x.astype(np.float16).astype(np.float64) - x
    coarse = x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64) - x
    return f"{(narrow @ coarse) / (coarse @ coarse):.4f}"


def float32() -> str:
    """The share of its budget that a model in float32 would use without the factor of float32."""
    found = list[float]()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("encoder", "twelve_layers"):
            bundle = md.export(f"{SMALL}:{name}", Path(folder) / name, precision="fp32", golden=["opt"])
            case = next(iter(golden_cases(bundle)))
            verdicts = judge_case(case, dict(case.eager), PRECISIONS["fp32"])
            found.append(metrics._FLOAT32 * max(verdict.share or 0.0 for verdict in verdicts))
    return " and ".join(f"{each:.2f}" for each in found) + " of the budget without it, by PyTorch on a CPU"


MEASURED: dict[str, tuple[Any, Callable[[], str]]] = {
    "metrics._RESULT_ROUNDING": (metrics._RESULT_ROUNDING, result_rounding),
    "metrics._FEW_SAMPLES": (" ".join(map(str, metrics._FEW_SAMPLES.values())), few_samples),
    "metrics._TO_NEAREST": (metrics._TO_NEAREST, to_nearest),
    "metrics._FLOAT32": (metrics._FLOAT32, float32),
    "rounding.ACCUMULATED": (rounding.ACCUMULATED, accumulation),
}


# -- Judged by what they are for ---------------------------------------------------------------------


class Judged(NamedTuple):
    """A case with results of right runtimes, and the same with a mistake."""

    case: GoldenCase
    right: list[Results]
    wrong: dict[str, list[Results]]


def _edited(results: Results, edit: Callable[[np.ndarray], np.ndarray]) -> Results:
    floats = {name: x for name, x in results.items() if x.dtype.kind == "f"}
    return {**results, **{name: edit(x.astype(np.float64)).astype(x.dtype) for name, x in floats.items()}}


def _scaled(at: Any, factor: float) -> Callable[[np.ndarray], np.ndarray]:
    def edit(x: np.ndarray) -> np.ndarray:
        x[at] *= factor
        return x

    return edit


def _one_token(x: np.ndarray) -> np.ndarray:
    """The last vector of the last batch element is that before it."""
    rows = x.reshape(-1, x.shape[-1])
    rows[-1] = rows[-2]
    return rows.reshape(x.shape)


def _one_element(x: np.ndarray) -> np.ndarray:
    x.reshape(-1)[-1] += 0.1 * np.sqrt(np.square(x).mean())
    return x


MISTAKES = {
    "everything 0.5 % too large": _scaled(..., 1.005),
    "last batch element 0.5 % too large": _scaled(-1, 1.005),
    "one channel 2 % too large": _scaled((..., 0), 1.02),
    "one vector is another": _one_token,
    "one element off by a tenth": _one_element,
    "outputs in BF16": lambda x: x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64),
}


def judged_case(name: str, seeds: int, folder: Path) -> Judged:
    """The usual case of a model, and what right and wrong runtimes give."""
    bundle = md.export(f"{SMALL}:{name}", folder / name, precision="fp16", golden=["opt"])
    md.configure(trust_code=True)
    capture = FreshCases(bundle, "cpu")._capture
    case = next(iter(golden_cases(bundle)))
    feeds = capture.given({key: tensor_from_numpy(array) for key, array in case.inputs.items()})

    def run(mode: RandomRounding) -> Results:
        got = arrays_of(capture.evaluate_in_fp64(feeds, mode), exact=True)
        return {key: mode.rounded_array(x).astype(case.eager[key].dtype) for key, x in got.items()}

    exact, modes = RandomRounding(), [RandomRounding(FP16, FIRST_SEED + n) for n in range(seeds)]
    run(exact)
    right = [run(mode) for mode in modes]
    # Decisions within three standard deviations of rounding, taken otherwise: as right as the others.
    spread = decision_spread(exact.decisions, [mode.decisions for mode in modes])
    changes = [None if each is None else each * 3 / rounding.MARGIN for each in spread]
    for n in range(seeds if changes else 0):
        right.append(run(RandomRounding(FP16, FIRST_SEED + seeds + n, changes, 1 - 2 * (n % 2))))
    wrong = {what: [_edited(each, edit) for each in right[:2]] for what, edit in MISTAKES.items()}
    for what, mistake in list(case.suspects.items())[:: max(1, len(case.suspects) // KNOWN)]:
        added = {key: x.astype(np.float64) + mistake.changes.get(key, 0.0) for key, x in right[0].items()}
        wrong[what] = [{key: x.astype(right[0][key].dtype) for key, x in added.items()}]
    return Judged(case, right, wrong)


def _fails(case: GoldenCase, results: Mapping[str, np.ndarray]) -> bool:
    return any(verdict.is_wrong for verdict in judge_case(case, results, FP16))


def counted(all_judged: list[Judged]) -> tuple[int, int]:
    """How many right results fail, and how many wrong ones pass."""
    metrics._RECENT.clear()
    alarms = sum(_fails(each.case, got) for each in all_judged for got in each.right)
    wrong = [(each.case, got) for each in all_judged for found in each.wrong.values() for got in found]
    return alarms, sum(not _fails(case, got) for case, got in wrong)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", default=MODELS, help=", ".join(MODELS))
    parser.add_argument("--seeds", type=int, default=12, help="right results of each model")
    arguments = parser.parse_args()
    print("| constant | value | measured |\n|---|---|---|")
    for name, (value, measure) in MEASURED.items():
        print(f"| `{name}` | {value} | {measure()} |")
    with tempfile.TemporaryDirectory() as folder:
        cases = [judged_case(name, arguments.seeds, Path(folder)) for name in arguments.models]
    rights = sum(len(each.right) for each in cases)
    wrongs = sum(len(found) for each in cases for found in each.wrong.values())
    print(f"\nOf {rights} right results, so many fail; of {wrongs} wrong ones, so many pass:\n")
    titles = " | ".join(f"× {scale:g}" for scale in SCALES)
    print(f"| constant | value | {titles} |\n|---|---|{'---|' * len(SCALES)}")
    for name in SCALED:
        own, found = getattr(metrics, name), list[str]()
        for scale in SCALES:
            setattr(metrics, name, own * scale)
            try:
                found.append(" / ".join(map(str, counted(cases))))
            finally:
                setattr(metrics, name, own)
        print(f"| `{name}`: {SCALED[name]} | {own:.3g} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()
