"""Plant mistakes of quantization in models in eight bits, and count which of them the outputs show.

    python benchmarks/quantized_sensitivity.py [--out docs/sensitivity-quantized.md] [MODEL ...]

Each model, a catalog layer or one of `small_models.py`, is exported with `--precision int8` and `fp8`. Every
mutation of the self-test is planted in every pair of Q/DQ by itself. The graph runs in ONNX Runtime on the
CPU, and is judged by its outputs alone, on the golden cases and on probe inputs, as an engine is.
"""

from __future__ import annotations

import argparse
import tempfile
import textwrap
from pathlib import Path

import mha_deploy as md
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.environment import versions
from mha_deploy.graph.file import load_graph
from mha_deploy.graph.mutate import OF_QUANTIZATION, mutated_pairs
from mha_deploy.judge import largest_share
from mha_deploy.metrics import Budget
from mha_deploy.options import ValidateOptions
from mha_deploy.runtime import cpu_runtime, open_runner
from mha_deploy.validation.run import draw_cases
from mha_deploy.validation.self_test import parity_from_runner

FORMATS = ("int8", "fp8")
OWN = Path(__file__).with_name("small_models.py")
DEFAULT = ("tiny-mha", "tiny-gqa", f"{OWN}:vit", f"{OWN}:decoder")
RIGHT = "none"


def shares(model: str, precision: str) -> dict[str, list[float]]:
    """By mistake, the share of the budget that each place of it uses; infinite without a number."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        bundle = md.export(model, Path(folder) / "bundle", precision=precision)
        graph = load_graph(bundle.model_path)
        drawn, _ = draw_cases(bundle, ValidateOptions(sweep=False), lambda step: None)
        cases = [*golden_cases(bundle), *drawn.get("probe", ())]
        budgets: dict[str, dict[str, Budget]] = {}
        places = [(RIGHT, "", graph)]
        for mistake in OF_QUANTIZATION:
            places += [(mistake, place, wrong) for place, wrong in mutated_pairs(graph, mistake)]
        for mistake, place, wrong in places:
            with open_runner(cpu_runtime(bundle.manifest.precision), wrong) as runner:
                report = parity_from_runner(runner, bundle, cases, budgets)
            share = largest_share(report.verdicts)
            found.setdefault(mistake, []).append(float("inf") if share is None else share)
            print(f"{model} {precision} {mistake} {place}: {found[mistake][-1]:.2f}", flush=True)
    return found


def cell(found: list[float] | None) -> str:
    """The least share, and how many places are caught: `3.20 (7 of 7)`."""
    if not found:
        return "–"
    caught = sum(share > 1 for share in found)
    return f"{min(found):,.2f} ({caught} of {len(found)})"


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--out", type=Path, help="the Markdown file to write")
    arguments = parser.parse_args()
    columns = {
        f"{model.rpartition(':')[2]}, {precision}": shares(model, precision)
        for model in arguments.models or DEFAULT
        for precision in FORMATS
    }
    found = versions(("onnxruntime", "torch"))
    about = (
        "Mistakes of quantization, each planted in one pair of Q/DQ, and judged by the outputs alone: the "
        "smallest share of the budget that a place of the mistake uses, and how many places are caught (over "
        "1). The first row is the right graph. Behind further Q/DQ a value that rounding moves across a "
        "boundary moves others: an engine that is right may differ from the reference by as much as "
        "quantization itself does, and so does the budget. There a mistake in one tensor does not show in "
        "the outputs; the types that kernels read still do. Written by `python "
        "benchmarks/quantized_sensitivity.py --out docs/sensitivity-quantized.md`; versions: "
        + ", ".join(f"{name} {version}" for name, version in found.items())
        + "."
    )
    lines = ["# Mistakes of quantization", "", *textwrap.wrap(about, 100, break_on_hyphens=False), ""]
    lines += [f"| mistake | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    right = [f"{column[RIGHT][0]:.2f}" for column in columns.values()]
    lines.append(f"| {RIGHT} | {' | '.join(right)} |")
    for mistake in OF_QUANTIZATION:
        lines.append(f"| {mistake} | {' | '.join(cell(c.get(mistake)) for c in columns.values())} |")
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
