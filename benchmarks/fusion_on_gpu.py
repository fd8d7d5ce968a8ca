"""Compare the fusion verdict of engines with the kernels that the profiler records.

    python benchmarks/fusion_on_gpu.py [--out results.json] [--gqa fold] MODEL ...

For each model: export with golden cases on the GPU, `build-engine` with TensorRT, run the golden cases
through the engine, judge them against the FP64 oracle, and compare the verdict from plan and inspector with
the kernel names that PyTorch's profiler records in one run. Prints a Markdown table for benchmarks/RECORD.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import mha_deploy as md
from mha_deploy.baselines.torch import kernel_times
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.engine.lowered import lower_for
from mha_deploy.graph.file import load_graph
from mha_deploy.judge import largest_share
from mha_deploy.options import EngineOptions
from mha_deploy.runtime.tensorrt.engine_verdict import engine_verdict, group_by_attention, written_types
from mha_deploy.runtime.tensorrt.kernels import kernels_from_profile
from mha_deploy.runtime.tensorrt.versions import load


def evaluate(model: str, folder: Path, gqa: str | None) -> dict[str, Any]:
    """Export, build, run and judge one model."""
    bundle = md.export(model, folder / model, golden=("min", "opt", "odd", "ragged"), device="cuda")
    engine = md.build_engine(bundle, backend="tensorrt", gqa=gqa)
    manifest = engine.manifest
    usual = next(case for case in golden_cases(bundle) if case.name == "opt")
    with md.open_runner(engine) as runner:
        parity = md.check_parity(bundle, runner)
        kernels = runner.watch(usual.inputs, kernel_times)
        microseconds = runner.time(usual.inputs).p50
    attention = [node.node for node in manifest.verdict.nodes]
    names = [kernel.name for kernel in kernels]
    options = EngineOptions(backend="tensorrt", gqa=gqa)
    lowered, _ = lower_for(load("tensorrt"), load_graph(bundle.model_path), options)
    groups = group_by_attention([node.name or "" for node in lowered.graph.all_nodes()], attention)
    sources = {"profile": kernels_from_profile(names)}
    profiled = engine_verdict(sources, groups, "fp16", written=written_types(lowered))
    return {
        "model": model,
        "version": manifest.version,
        "gpu": manifest.gpu,
        "sizes": dict(usual.sizes),
        "verdict": [node.status for node in manifest.verdict.nodes],
        "profiler": [(node.status, node.kernels) for node in profiled.nodes],
        "precision": (manifest.verdict.precision.status, profiled.precision.status),
        "worst": max(v.deviation.relative_l2 for v in parity.verdicts if v.deviation),
        "share": largest_share(parity.verdicts),
        "microseconds": microseconds,
        "kernels": [vars(kernel) for kernel in kernels],
    }


def table_row(result: dict[str, Any]) -> str:
    """One table row."""
    if "error" in result:
        return f"| {result['model']} | - | - | - | - | - | {result['error']} |"
    profiled = ", ".join(
        f"{status} ({'; '.join(dict.fromkeys(names))[:60]})" for status, names in result["profiler"]
    )
    sizes = "×".join(str(size) for size in result["sizes"].values())
    return (
        f"| {result['model']} | {sizes} | {', '.join(result['verdict'])} | {profiled} | "
        f"{' / '.join(result['precision'])} | {result['worst']:.1e} ({result['share']:.2f} budgets) | "
        f"{result['microseconds']:.1f} |"
    )


def main() -> None:
    """Evaluate the models that were named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gqa", choices=("fold", "broadcast", "repeat"))
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    print("| model | B×S | verdict | profiler | precision: verdict / profiler | worst rel. L2 | µs |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            try:
                results.append(evaluate(model, Path(folder), arguments.gqa))
            except md.DeployError as error:
                results.append({"model": model, "error": error.in_one_line})
            print(table_row(results[-1]), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
