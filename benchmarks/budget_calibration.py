"""Record how well the error budget separates right models from wrong ones.

    python benchmarks/budget_calibration.py [--precision fp16 ...] [MODEL ...]

For each model and precision: the share of the budget that the right graph uses, and the smallest share that a
deliberately wrong one uses. The first must be under 1 and the second over it; the distance between both is
what the factors in `mha_deploy/validate/budget.py` were chosen from. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from mha_deploy.export.exporter import bundle_from_spec
from mha_deploy.export.options import ExportOptions
from mha_deploy.model.catalog import catalog_names, find_spec
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.validate.self_test import largest_share as budget_share
from mha_deploy.validate.self_test import self_test


def main() -> None:
    """Calibrate on the asked models, or on all test sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=[n for n in catalog_names() if n.startswith("tiny-")])
    parser.add_argument("--precision", action="append", choices=list(PRECISIONS))
    arguments = parser.parse_args()
    print("| model | precision | right | nearest wrong | which |\n|---|---|---|---|---|")
    for model in arguments.models:
        for precision in arguments.precision or PRECISIONS:
            with tempfile.TemporaryDirectory() as folder:
                options = ExportOptions(precision=precision, golden=("min", "opt", "odd", "ragged"))
                result = self_test(bundle_from_spec(find_spec(model), Path(folder) / "bundle", options))
            nearest = min(result.catches, key=lambda catch: catch.share)
            right = budget_share(result.right)
            print(
                f"| {model} | {precision} | {right:.2f} | {nearest.share:,.1f} | {nearest.mistake} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
