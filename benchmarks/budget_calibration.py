"""Measure how well the error budget separates right graphs from mutated ones.

    python benchmarks/budget_calibration.py [--precision fp16 ...] [MODEL ...]

For each model and precision: the share of the budget that the right graph uses, and the smallest share that a
mutation uses. The first must be under 1 and the second over it; the factors in `mha_deploy/metrics.py` were
chosen from the distance between both. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import mha_deploy as md
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.validate.self_test import largest_share


def main() -> None:
    """Calibrate on the models that were named; default: the small ones of the tests."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tiny = [spec.name for spec in md.models(tiny=True) if spec.name.startswith("tiny-")]
    parser.add_argument("models", nargs="*", default=tiny)
    parser.add_argument("--precision", action="append", choices=list(PRECISIONS))
    arguments = parser.parse_args()
    print("| model | precision | right | least detectable mutation | which |\n|---|---|---|---|---|")
    for model in arguments.models:
        for precision in arguments.precision or PRECISIONS:
            with tempfile.TemporaryDirectory() as folder:
                golden = ("min", "opt", "odd", "ragged")
                bundle = md.export(model, Path(folder) / "bundle", precision=precision, golden=golden)
                result = md.self_test(bundle)
            nearest = min(result.catches, key=lambda catch: catch.share)
            right = largest_share(result.right)
            print(
                f"| {model} | {precision} | {right:.2f} | {nearest.share:,.1f} | {nearest.mistake} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
