"""Does the fusion verdict match what runs? Builds engines on a GPU, runs them, and listens to the profiler.

    python benchmarks/fusion_on_gpu.py [--out results.json] [--gqa fold] MODEL ...

For each model: export with golden cases on the GPU, `build-engine` with TensorRT, run the golden cases
through the engine, judge them against the FP64 oracle, and compare the verdict from plan and inspector with
the kernel names that PyTorch's profiler sees in one run. Prints a Markdown table for benchmarks/RECORD.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from mha_deploy.baselines.torch import kernel_times
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.engine.options import EngineOptions
from mha_deploy.engine.run import open_engine_runner
from mha_deploy.errors import DeployError
from mha_deploy.export.exporter import bundle_from_spec
from mha_deploy.export.options import ExportOptions
from mha_deploy.metrics import parity_from_runner
from mha_deploy.model.catalog import find_spec
from mha_deploy.runtime.tensorrt.kernels import kernels_from_profile
from mha_deploy.runtime.tensorrt.verdict import engine_verdict
from mha_deploy.validate.self_test import largest_share as budget_share


def evaluate(model: str, folder: Path, gqa: str | None) -> dict[str, Any]:
    """Export, build, run and judge one model."""
    golden = ("min", "opt", "odd", "ragged")
    bundle = bundle_from_spec(find_spec(model), folder / model, ExportOptions(golden=golden, device="cuda"))
    engine = engine_from_bundle(bundle, EngineOptions(backend="tensorrt", gqa=gqa))
    manifest, cases = engine.manifest, list(golden_cases(bundle))
    usual = next(case for case in cases if case.name == "opt")
    with open_engine_runner(engine) as runner:
        parity = parity_from_runner(runner, cases, model=model, precision=bundle.manifest.precision)
        kernels = runner.watch(usual.inputs, kernel_times)
        microseconds = runner.time(usual.inputs).p50
    attention = [node["node"] for node in manifest.verdict["nodes"]]
    names = [kernel.name for kernel in kernels]
    seen = engine_verdict({"profile": kernels_from_profile(names)}, attention, "fp16")
    return {
        "model": model,
        "version": manifest.version,
        "gpu": manifest.gpu,
        "sizes": dict(usual.sizes),
        "told": [node["status"] for node in manifest.verdict["nodes"]],
        "seen": [(node.status, node.kernels) for node in seen.nodes],
        "precision": (manifest.verdict["precision"]["status"], seen.precision.status),
        "worst": max(v.deviation.relative_l2 for v in parity.verdicts if v.deviation),
        "share": budget_share(parity),
        "microseconds": microseconds,
        "kernels": [vars(kernel) for kernel in kernels],
    }


def row(result: dict[str, Any]) -> str:
    """One line of the table."""
    if "error" in result:
        return f"| {result['model']} | - | - | - | - | - | {result['error']} |"
    seen = ", ".join(f"{status} ({'; '.join(dict.fromkeys(names))[:60]})" for status, names in result["seen"])
    sizes = "×".join(str(size) for size in result["sizes"].values())
    return (
        f"| {result['model']} | {sizes} | {', '.join(result['told'])} | {seen} | "
        f"{' / '.join(result['precision'])} | {result['worst']:.1e} ({result['share']:.2f} budgets) | "
        f"{result['microseconds']:.1f} |"
    )


def main() -> None:
    """Examine the asked models."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gqa", choices=("fold", "broadcast", "repeat"))
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    print("| model | B×S | verdict | profiler | precision told / seen | worst rel. L2 | µs |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            try:
                results.append(evaluate(model, Path(folder), arguments.gqa))
            except DeployError as error:
                results.append({"model": model, "error": error.in_one_line})
            print(row(results[-1]), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
