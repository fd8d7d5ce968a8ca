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
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mha_deploy.backends.tensorrt import engine_verdict, kernels_from_profile, load, logger_for
from mha_deploy.catalog import find_spec
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.engine.options import EngineOptions
from mha_deploy.engine.record import Engine
from mha_deploy.errors import DeployError
from mha_deploy.export.exporter import bundle_from_spec
from mha_deploy.export.options import ExportOptions
from mha_deploy.golden import GoldenCase, golden_cases
from mha_deploy.validate.parity import judge_case

TORCH_TYPES = {"HALF": torch.float16, "FLOAT": torch.float32, "INT32": torch.int32, "BOOL": torch.bool}


class TorchEngine:
    """An engine whose buffers are PyTorch tensors."""

    def __init__(self, engine: Engine) -> None:
        rt = load(engine.manifest.backend)
        self.trt = rt.module
        self.runtime = self.trt.Runtime(logger_for(rt))
        self.engine = self.runtime.deserialize_cuda_engine(engine.path.read_bytes())
        self.context = self.engine.create_execution_context()
        self.stream = torch.cuda.Stream()
        self.names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]

    def bind(self, case: GoldenCase) -> dict[str, torch.Tensor]:
        """Put a case's inputs on the device, and make room for the outputs."""
        buffers = {name: torch.from_numpy(np.ascontiguousarray(a)).cuda() for name, a in case.inputs.items()}
        for name, tensor in buffers.items():
            self.context.set_input_shape(name, tuple(tensor.shape))
        outputs = {}
        for name in self.names:
            if name not in buffers:
                dtype = TORCH_TYPES[self.engine.get_tensor_dtype(name).name]
                shape = tuple(self.context.get_tensor_shape(name))
                outputs[name] = torch.full(shape, 7, dtype=dtype, device="cuda")
        for name, tensor in (buffers | outputs).items():
            self.context.set_tensor_address(name, tensor.data_ptr())
        self.kept = buffers | outputs  # the engine holds their addresses only
        return outputs

    def run(self) -> None:
        """Enqueue one inference."""
        self.context.execute_async_v3(self.stream.cuda_stream)

    def results(self, case: GoldenCase) -> dict[str, np.ndarray]:
        """Run a case once."""
        outputs = self.bind(case)
        torch.cuda.synchronize()
        self.run()
        self.stream.synchronize()
        return {name: tensor.cpu().numpy() for name, tensor in outputs.items()}

    def kernel_names(self, case: GoldenCase) -> list[tuple[str, float]]:
        """Names and microseconds of the kernels of one run."""
        self.bind(case)
        self.run()
        self.stream.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.run()
            self.stream.synchronize()
        cuda = torch.autograd.DeviceType.CUDA
        return [(event.name, event.device_time) for event in profile.events() if event.device_type == cuda]

    def microseconds(self, case: GoldenCase, runs: int = 100) -> float:
        """Time of one run inside a CUDA graph, the median of seven rounds."""
        self.bind(case)
        for _ in range(3):
            self.run()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.run()
        rounds = []
        for _ in range(7):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(runs):
                graph.replay()
            end.record()
            end.synchronize()
            rounds.append(start.elapsed_time(end) * 1000 / runs)
        return sorted(rounds)[3]


def examine(model: str, folder: Path, gqa: str | None) -> dict[str, Any]:
    """Export, build, run and judge one model."""
    golden = ("min", "opt", "odd", "ragged")
    bundle = bundle_from_spec(find_spec(model), folder / model, ExportOptions(golden=golden, device="cuda"))
    started = time.perf_counter()
    engine = engine_from_bundle(bundle, EngineOptions(backend="tensorrt", gqa=gqa))
    manifest, runner = engine.manifest, TorchEngine(engine)
    cases = {case.name: case for case in golden_cases(bundle)}
    verdicts = [
        verdict
        for case in cases.values()
        for verdict in judge_case(case, runner.results(case), bundle.manifest.precision)
    ]
    kernels = runner.kernel_names(cases["opt"])
    attention = [node["node"] for node in manifest.verdict["nodes"]]
    seen = engine_verdict({"profile": kernels_from_profile([n for n, _ in kernels])}, attention, "fp16")
    return {
        "model": model,
        "version": manifest.version,
        "gpu": manifest.gpu,
        "seconds": time.perf_counter() - started,
        "told": [
            (node["status"], node["kernels"], node["source"], node["reason"])
            for node in manifest.verdict["nodes"]
        ],
        "precision": manifest.verdict["precision"],
        "seen": [(node.status, node.kernels) for node in seen.nodes],
        "seen_precision": seen.precision.status,
        "parity": [asdict(verdict) for verdict in verdicts],
        "shares": {
            f"{v.case}/{v.output}": v.budget.share_used(v.deviation) if v.budget and v.deviation else None
            for v in verdicts
        },
        "errors": {
            f"{v.case}/{v.output}": v.deviation.relative_l2 if v.deviation else None for v in verdicts
        },
        "microseconds": runner.microseconds(cases["opt"]),
        "sizes": dict(cases["opt"].sizes),
        "kernels": kernels,
    }


def row(result: dict[str, Any]) -> str:
    """One line of the table."""
    if "error" in result:
        return f"| {result['model']} | - | - | - | - | - | {result['error']} |"
    told = ", ".join(status for status, *_ in result["told"])
    seen = ", ".join(f"{status} ({'; '.join(dict.fromkeys(names))[:60]})" for status, names in result["seen"])
    sizes = "×".join(str(size) for size in result["sizes"].values())
    worst = max((error for error in result["errors"].values() if error is not None), default=float("nan"))
    share = max((share for share in result["shares"].values() if share is not None), default=float("nan"))
    return (
        f"| {result['model']} | {sizes} | {told} | {seen} | {result['precision']['status']} / "
        f"{result['seen_precision']} | {worst:.1e} ({share:.1f} budgets) | {result['microseconds']:.1f} |"
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
    results = []
    print("| model | B×S | verdict | profiler | precision told / seen | worst rel. L2 | µs |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            try:
                results.append(examine(model, Path(folder), arguments.gqa))
            except DeployError as error:
                results.append({"model": model, "error": str(error).splitlines()[0]})
            print(row(results[-1]), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
