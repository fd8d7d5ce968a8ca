"""Layers with their GEMMs in FP8 by the plugin, beside FP16 and beside PyTorch in both. On a GPU.

    python benchmarks/fp8_on_gpu.py FOLDER [--jobs 4] [--limit 300] [ROW ...]

Each row is exported in FP16, in FP8 with a scale for each output channel, with one for a weight, and with
attention in FP8, too; built with the plugin, sums in FP32; judged on its golden cases; and timed, one runtime
at a time and each engine in three processes, with inputs that are read from memory. PyTorch is compiled, with
cuDNN's attention: in FP16, and with `torch._scaled_mm` in place of each linear layer, with scales of the
export. What is in FOLDER is not made again. FOLDER/fp8.jsonl gets a line as soon as something was timed,
FOLDER/fp8.md the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from on_gpu import Results, bundle_folder, parser_of, processes, side_by_side

import mha_deploy as md
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.folder import Bundle

ENGINE = "plugin32"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A layer, its golden case, and the lengths that it is timed at beside that of the case."""

    model: str
    axes: Mapping[str, str] = field(default_factory=dict)
    cache: str | None = None
    golden: str = "opt"
    lengths: tuple[int, ...] = ()
    batch: int = 1  # at these lengths
    build: Mapping[str, Any] = field(default_factory=dict)


ROWS = {
    "bert-base": Row(model="bert-base"),
    "bert-large": Row(model="bert-large"),
    # Judged on 64 tokens: the reference of 2048 in FP64, with 32 samples of rounding, takes minutes.
    "llama": Row(
        model="llama-3-8b",
        axes={"B": "1", "S": "1:64:8192"},
        lengths=(2048, 8192),
        build={"profiles": ["S=1:2048:8192"]},
    ),
    "decode": Row(
        model="llama-3-8b",
        axes={"B": "1:1:32", "S": "1:16:3840", "T": "4096"},
        cache="preallocated",
        golden="min",
        build={"profiles": ["B=1:8:32,S=1:16:256"]},
    ),
    # Judged on 32 tokens: its reference in FP64 takes long.
    "gpt3": Row(
        model="gpt3-175b",
        axes={"B": "1", "S": "1:32:2048"},
        lengths=(512,),
        build={"profiles": ["S=1:512:2048"], "refit": "all"},
    ),
    "whole-llama": Row(
        model="benchmarks/own_models.py:llama_4_layers",
        axes={"B": "1", "S": "1:32:2048"},
        lengths=(1024,),
        build={"profiles": ["S=1:1024:2048"]},
    ),
    "whole-bert": Row(
        model="benchmarks/own_models.py:bert_base",
        axes={"B": "1:2:16", "S": "1:32:512"},
        lengths=(128,),
        batch=8,
        build={"profiles": ["B=1:8:16,S=1:128:512"]},
    ),
}
KINDS: dict[str, dict[str, Any]] = {
    "fp16": {"precision": "fp16"},
    "fp8": {"precision": "fp8"},
    "fp8, one scale": {"precision": "fp8", "weight_scales": "tensor"},
    "fp8, one scale, attention": {
        "precision": "fp8",
        "weight_scales": "tensor",
        "quantize_attention": True,
    },
}


def export(folder: Path, name: str, kind: str) -> None:
    """One layer in one precision."""
    row, out = ROWS[name], bundle_folder(folder, name, kind)
    if not (out / "manifest.json").is_file():
        options = {"golden": (row.golden,), "overwrite": True}
        model = md.load_model(row.model, axes=row.axes, cache=row.cache)
        md.export(model, out, **options, **KINDS[kind])


def build(folder: Path, name: str, kind: str) -> None:
    """The engine of it."""
    out = bundle_folder(folder, name, kind)
    if not (out / "engines" / f"{ENGINE}.engine").is_file():
        chosen = {"backend": "tensorrt", "name": ENGINE, "attention": "plugin", "accumulate": "fp32"}
        md.build_engine(out, overwrite=True, **chosen, **ROWS[name].build)


def inputs_of(bundle: Bundle, row: Row) -> dict[str, dict[str, np.ndarray]]:
    """The inputs that are timed, by their sizes: those of the case, and longer ones made of it."""
    case = next(each for each in golden_cases(bundle) if each.name == row.golden)
    inputs = dict(case.inputs)
    if row.cache is not None:  # one token behind a full cache
        rows = max(array.shape[2] for array in inputs.values() if array.ndim == 4)
        inputs["lengths"] = np.full_like(inputs["lengths"], rows - 1)
    found = {",".join(f"{axis}={size}" for axis, size in case.sizes.items()): inputs}
    for length in row.lengths:  # tokens are repeated; those of a mask are all there
        found[f"B={row.batch},S={length}"] = {
            name: np.resize(array[:1] if array.ndim == 2 else array, (row.batch, length, *array.shape[2:]))
            for name, array in inputs.items()
        }
    return found


def torch_in_fp8(bundle: Bundle, quantized: Bundle, baseline: str) -> Any:
    """A runner of PyTorch whose linear layers multiply in FP8."""
    import onnx_ir as ir
    import torch
    from torch import nn

    from mha_deploy.baselines.torch import TorchRunner, models_of
    from mha_deploy.graph.quantize import read_fp8_gemm

    read = [read_fp8_gemm(node) for node in ir.load(quantized.model_path).graph]
    gemms = [each for each in read if each is not None]

    class Fp8Linear(nn.Module):
        def __init__(self, linear: nn.Linear, scale: float) -> None:
            super().__init__()
            weight_scale = linear.weight.abs().max().float() / 448
            stored = (linear.weight / weight_scale).to(torch.float8_e4m3fn)
            self.weight, self.bias = nn.Buffer(stored), linear.bias
            self.x_scale = nn.Buffer(torch.tensor(scale, device=linear.weight.device))
            self.weight_scale = nn.Buffer(weight_scale)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            narrow = (x / self.x_scale).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(0, -2)
            one, other = self.x_scale, self.weight_scale
            made = torch._scaled_mm(narrow, self.weight.t(), one, other, self.bias, out_dtype=x.dtype)
            return made.unflatten(0, x.shape[:-1])

    class Fp8Models:
        """The models of a bundle; both graph and module have their linear layers in the order of calls."""

        def __init__(self) -> None:
            self._models = models_of(bundle)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._models, name)

        def in_service(self, baseline: Any) -> nn.Module:
            module = self._models.in_service(baseline)
            linears = {name: each for name, each in module.named_modules() if isinstance(each, nn.Linear)}
            scales = [each.x_scale for each in gemms]
            if len(linears) < len(scales):  # Q, K and V are packed
                scales = list({each.x.name: each.x_scale for each in gemms}.values())
            for (name, linear), scale in zip(linears.items(), scales, strict=True):
                owner, _, own = name.rpartition(".")
                setattr(module.get_submodule(owner), own, Fp8Linear(linear, scale))
            return module

    return TorchRunner(Fp8Models(), baseline)


def timed(folder: Path, name: str, kind: str) -> dict[str, float]:
    """Microseconds of an engine by sizes, in a process of its own."""
    md.configure(trust_code=True)
    bundle = md.open_bundle(bundle_folder(folder, name, kind))
    with md.open_runner(bundle, runtime=ENGINE) as runner:
        return {sizes: runner.time(feeds).p50 for sizes, feeds in inputs_of(bundle, ROWS[name]).items()}


def by_sizes(time: Callable[..., dict[str, float]], *arguments: Any, count: int) -> list[dict[str, Any]]:
    """The times in so many processes, one after the other: a line for each of the sizes."""
    with processes(1, max_tasks_per_child=1) as pool:
        times = [pool.submit(time, *arguments).result() for _ in range(count)]
    found = {sizes: [each[sizes] for each in times] for sizes in times[0]}
    return [
        {"sizes": sizes, "p50_us": float(np.median(each)), "processes_us": each}
        for sizes, each in found.items()
    ]


def measured(folder: Path, name: str, kind: str, count: int) -> list[dict[str, Any]]:
    """Verdict, error and loss of an engine, and its times in so many processes."""
    times = by_sizes(timed, folder, name, kind, count=count)
    bundle = md.open_bundle(bundle_folder(folder, name, kind))
    engine = md.open_engine(bundle.path / "engines" / f"{ENGINE}.engine")
    report = md.validate(bundle, runtimes=[ENGINE], latency=False, sweep=False)
    found = engine.manifest.verdict.precision
    line = {
        "row": name, "runtime": f"engine {kind}", "version": engine.manifest.version,
        "outcome": str(report.outcome), "headline": report.headline, "gemms": found.quantized,
        "precision": str(found.status.value), "fused": engine.manifest.all_fused,
        "attentions": found.quantized_attentions,
        "loss": None if bundle.manifest.loss is None else bundle.manifest.loss.worst,
    }  # fmt: skip
    return [{**line, **each} for each in times]


def timed_in_torch(folder: Path, name: str, precision: str) -> dict[str, float]:
    """Microseconds of compiled PyTorch by sizes, in a process of its own."""
    from mha_deploy.baselines.torch import open_torch_runner
    from mha_deploy.model.layer import AttentionSpec

    md.configure(trust_code=True)
    quantized = next(kind for kind in KINDS if kind != "fp16" and bundle_folder(folder, name, kind).is_dir())
    bundle, other = (md.open_bundle(bundle_folder(folder, name, kind)) for kind in ("fp16", quantized))
    # The fastest ones in FP16: a layer is written anew with Q, K and V packed, a whole model is as it is.
    baseline = "compile-cudnn" if isinstance(bundle.manifest.spec, AttentionSpec) else "compile"
    made = (
        open_torch_runner(baseline, bundle) if precision == "fp16" else torch_in_fp8(bundle, other, baseline)
    )
    with made as runner:
        return {sizes: runner.time(feeds).p50 for sizes, feeds in inputs_of(bundle, ROWS[name]).items()}


def in_torch(folder: Path, name: str, precision: str, count: int) -> list[dict[str, Any]]:
    """Times of compiled PyTorch, in FP16 or in FP8, in so many processes."""
    line = {"row": name, "runtime": f"PyTorch {precision}"}
    return [{**line, **each} for each in by_sizes(timed_in_torch, folder, name, precision, count=count)]


def table(lines: list[dict[str, Any]]) -> str:
    """As Markdown."""
    text = ["| row | sizes | runtime | reads | loss | outcome | p50 µs |", "|---|---|---|---|---:|---|---:|"]
    for each in lines:
        if "error" in each:
            text.append(f"| {each['row']} | | {each['runtime']} | | {each['error']} | |")
            continue
        counts = {
            **each.get("gemms", {}),
            **{f"{t} attention": n for t, n in each.get("attentions", {}).items()},
        }
        gemms = ", ".join(f"{dtype}: {n}" for dtype, n in counts.items()) or "–"
        loss = "–" if each.get("loss") is None else f"{each['loss']:.3f}"
        outcome = each.get("headline", "not judged")
        cells = (each["row"], each["sizes"], each["runtime"], gemms, loss, outcome, f"{each['p50_us']:.1f}")
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


def main() -> None:
    """Export side by side, build and time one by one."""
    parser = parser_of(__doc__, jobs=4, limit=300.0)
    parser.add_argument("rows", nargs="*", default=list(ROWS))
    parser.add_argument("--kind", choices=tuple(KINDS), action="append", help="default: all of them")
    parser.add_argument("--processes", type=int, default=3, help="in which each engine is timed")
    parser.add_argument("--only", choices=("export", "engines", "torch", "all"), default="all")
    chosen = parser.parse_intermixed_args()
    md.configure(trust_code=True)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    results = Results(chosen.folder, "fp8", table, chosen.limit)

    def tried(work: Any, name: str, runtime: str, *arguments: Any) -> None:
        found = results.measure({"row": name, "runtime": runtime}, work, chosen.folder, name, *arguments)
        print(f"{results.seconds:.0f} s", *found, flush=True)

    kinds = chosen.kind or list(KINDS)
    todo = [(name, kind) for name in chosen.rows for kind in kinds]
    with processes(chosen.jobs) as pool:
        for each, error in side_by_side(pool, export, [(chosen.folder, *each) for each in todo]):
            print(f"{results.seconds:.0f} s", each[1:], error or "exported", flush=True)
    engines, torch = chosen.only in ("engines", "all"), chosen.only in ("torch", "all")
    for name, kind in todo if engines else ():
        tried(build, name, f"engine {kind}", kind)
    for name in chosen.rows:
        for kind in kinds if engines else ():
            tried(measured, name, f"engine {kind}", kind, chosen.processes)
        for precision in ("fp16", "fp8") if torch else ():
            tried(in_torch, name, f"PyTorch {precision}", precision, chosen.processes)


if __name__ == "__main__":
    main()
