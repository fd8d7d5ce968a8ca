"""Measure which share of the error budget a mistake uses: mistake × model × size × runtime.

    python benchmarks/sensitivity.py [--tensorrt] [--out docs/sensitivity.md] [MODEL:B=8,S=128 ...]
    python benchmarks/sensitivity.py --mutations [MODEL ...]

Each model runs in ONNX Runtime on the CPU, and in PyTorch with GEMMs whose partial sums are rounded to FP16
every 16 terms, as tensor cores with FP16 accumulators do it. With --tensorrt it runs in engines that are
built for it, with TensorRT's own kernels and with the plugin library; models in parallel processes.

The effect of a mistake is computed in FP64, for the queries that it concerns, and added to what the runtime
returned. It is judged on random and on probe inputs, as `validate` does; the largest share counts. Over 1 is
caught.

With --mutations, the self-test of every model in every precision: the share that the right graph uses, and
the smallest that a mutation uses.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import mha_deploy as md
from mha_deploy.baselines.fresh import FreshCases, module_from_bundle
from mha_deploy.bundle.cases import Baseline, GoldenCase
from mha_deploy.environment import versions
from mha_deploy.judge import judge_case
from mha_deploy.metrics import Budget
from mha_deploy.model.precision import PRECISIONS, Precision
from mha_deploy.reference.attention import Attention, merge_heads, split_heads
from mha_deploy.reference.inputs import call_arguments, tensor_from_numpy, to_numpy
from mha_deploy.rounding import rounded
from mha_deploy.validation.decode import case_budgets
from mha_deploy.validation.runtimes import RuntimeFinder, torch_device

DEFAULT = ("bert-base:B=8,S=128", "llama-3-8b:B=1,S=512")
ON_TENSORRT = ("bert-base:B=8,S=128", "llama-3-8b:B=1,S=2048")
_CHANNEL = 7  # that gets a large bias
_TERMS = 16  # that a tensor core adds before it rounds


class HalfAccumulation(TorchFunctionMode):
    """Multiply FP16 matrices with accumulators in FP16."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and args[0].dtype == torch.float16:
            result = self._matmul(args[0], args[1].T)
            return result if len(args) < 3 or args[2] is None else result + args[2]
        if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            return self._matmul(*args) if args[0].dtype == torch.float16 else func(*args)
        return func(*args, **(kwargs or {}))

    def _matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = a.float(), b.float()
        sums = torch.zeros(1, dtype=torch.float16, device=a.device)
        for i in range(0, a.shape[-1], _TERMS):
            sums = (sums.float() + a[..., i : i + _TERMS] @ b[..., i : i + _TERMS, :]).half()
        return sums


class Layer:
    """A layer in FP64 on one case: its outputs at some queries, rightly and wrongly."""

    def __init__(self, twin: Attention, case: GoldenCase) -> None:
        self.twin, self.spec = twin, twin.spec
        device = next(twin.parameters()).device
        self.x = tensor_from_numpy(case.inputs["x"]).double().to(device)
        self.S = self.x.shape[1]
        self.lengths = case.inputs.get("key_lengths")
        with torch.inference_mode():
            self.q, self.k, self.v = twin.project(self.x, None, None)

    def at(
        self,
        rows: list[int],
        *,
        shift_last: int = 0,
        hide_last: bool = False,
        leak: bool = False,
        scale: float = 1.0,
        bf16: bool = False,
        head_zero: bool = False,
    ) -> torch.Tensor:
        """The outputs [B, n, E] of these queries, with the mistakes asked for."""
        spec, twin, device = self.spec, self.twin, self.x.device
        positions = torch.arange(self.S, device=device)
        keys_at = positions.clone()
        keys_at[-1] -= shift_last
        with torch.inference_mode():
            q, _ = twin.rotate(self.q, self.k, positions)
            _, k = twin.rotate(self.q, self.k, keys_at)
            group = spec.Hq // spec.Hkv
            q = split_heads(q, spec.Hq)[:, :, rows]
            k, v = (split_heads(t, spec.Hkv).repeat_interleave(group, 1) for t in (k, self.v))
            scores = q @ k.transpose(-1, -2) * (spec.softmax_scale * scale)
            visible = torch.ones(len(rows), self.S, dtype=torch.bool, device=device)
            if spec.causal:
                visible = positions <= torch.tensor(rows, device=device)[:, None] + int(leak)
            if hide_last:
                visible = visible & (positions < self.S - 1)
            visible = visible[None, None]
            if self.lengths is not None:
                ends = torch.tensor(self.lengths, device=device)[:, None, None, None]
                visible = visible & (positions < ends)
            weights = scores.masked_fill(~visible, -math.inf).softmax(-1).nan_to_num(0.0)
            weights = weights.to(torch.bfloat16).double() if bf16 else weights
            heads = weights @ v
            if head_zero:
                heads[:, 0] = 0
            return twin.combine(merge_heads(heads), self.x[:, rows])


def _last(layer: Layer) -> list[int]:
    return [layer.S - 1] if layer.spec.causal else list(range(layer.S))


def _some(layer: Layer) -> list[int]:
    return list(range(0, layer.S, max(1, layer.S // 128) | 1))


# The queries that a mistake concerns, and the mistake; None for one of the whole output.
MISTAKES: dict[str, tuple[Callable[[Layer], list[int]], dict[str, Any]] | None] = {
    "last key masked, newest cache entry zero": (_last, {"hide_last": True}),
    "causal leak of one position in one query": (lambda layer: [layer.S - 2], {"leak": True}),
    "rotary off by one on the last key": (_last, {"shift_last": 1}),
    "softmax weights in BF16": (lambda layer: list(range(layer.S)), {"bf16": True}),
    "last batch element off by 0.5 %": None,
    "one channel with bias 1,000: scale off by 20 %": (_some, {"scale": 1.2}),
    "one channel with bias 10,000: one head zero": (_some, {"head_zero": True}),
}


def applies(name: str, layer: Layer) -> bool:
    """Whether a layer can have the mistake."""
    if "leak" in name:
        return layer.spec.causal
    return layer.spec.rope is not None if "rotary" in name else True


def wrong_output(name: str, layer: Layer, right: np.ndarray) -> np.ndarray:
    """What a runtime would return with the mistake, in FP64."""
    got, mistake = right.astype(np.float64), MISTAKES[name]
    if mistake is None:
        got[-1] *= 1.005
    else:
        rows = mistake[0](layer)
        got[:, rows] += to_numpy((layer.at(rows, **mistake[1]) - layer.at(rows)).cpu())
    return got


def with_bias(case: GoldenCase, bias: float, precision: Precision) -> GoldenCase:
    """The same case of a layer with a large bias of one channel."""
    oracle, eager = case.oracle["output"].copy(), case.eager["output"].astype(np.float64)
    for array in (oracle, eager):
        array[..., _CHANNEL] += bias

    def biased(baseline: Baseline) -> Baseline:
        """Samples of the channel, rounded at random where its numbers are now."""
        samples, true, bits = (
            baseline.samples["output"].copy(),
            oracle[..., _CHANNEL],
            precision.significand_bits,
        )
        for seed, errors in enumerate(samples, 1):
            errors[..., _CHANNEL] = rounded(true + errors[..., _CHANNEL], bits, seed) - true
        return replace(baseline, samples={"output": samples})

    return replace(
        case,
        oracle=case.oracle.map(lambda _: {"output": oracle}),
        eager={"output": eager.astype(case.eager["output"].dtype)},
        baselines={kind: biased(each) for kind, each in case.baselines.items()},
        suspects={},
    )


def runtimes(bundle: Any, tensorrt: bool) -> dict[str, tuple[Any, str, str]]:
    """By name: what runs a case, the type that its GEMMs are taken to accumulate in, and why."""
    finder, opened = RuntimeFinder(bundle), {}
    if tensorrt:
        for attention in ("native", "plugin"):
            started = time.monotonic()
            accumulate = "fp32" if attention == "plugin" else "auto"
            try:
                md.build_engine(bundle, attention=attention, accumulate=accumulate, name=attention)
            except md.DeployError as error:
                print(f"no {attention} engine: {error}", flush=True)
            print(f"{attention} engine: {time.monotonic() - started:.0f} s", flush=True)
        finder.look_for_engines()
        found = finder.running_engines()
    else:
        found = [finder.named("ort-cpu")]
        module = module_from_bundle(bundle, device=torch_device())

        def simulated(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            feeds = {name: tensor_from_numpy(array).to(torch_device()) for name, array in inputs.items()}
            with torch.inference_mode(), HalfAccumulation():
                return {"output": to_numpy(module(**call_arguments(module.spec, feeds)).cpu())}

        opened["FP16 accumulation"] = simulated, "fp16", f"rounded every {_TERMS} terms"
    for runtime in found:
        name = f"TensorRT, {runtime.name}" if tensorrt else "ONNX Runtime"

        def run(inputs: Mapping[str, np.ndarray], runtime: Any = runtime) -> Mapping[str, np.ndarray]:
            with runtime.open() as runner:
                return runner.run(inputs)

        accumulation = runtime.accumulation(bundle.manifest.precision)
        opened[name] = run, accumulation.type, accumulation.why
    return opened


def shares(point: str, tensorrt: bool) -> dict[str, dict[str, float]]:
    """For each runtime a share for each mistake, the correct result first."""
    model, _, text = point.partition(":")
    sizes = {axis: int(size) for axis, size in (part.split("=") for part in text.split(","))}
    title, columns, device = f"{model} {'×'.join(map(str, sizes.values()))}", {}, torch_device()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        bundle = md.export(model, Path(folder) / "bundle", precision="fp16", golden=("min",))
        maker = FreshCases(bundle, device)
        twin = module_from_bundle(bundle, path="sdpa", device=device, dtype=torch.float64)
        cases = {probe: maker.case(sizes, seed=1, probe=probe) for probe in ("coarse", "edges")}
        layers = {probe: Layer(twin, case) for probe, case in cases.items()}
        names = ["correct", *(name for name in MISTAKES if applies(name, layers["edges"]))]
        for runtime, (run, kind, why) in runtimes(bundle, tensorrt).items():
            print(f"{title} in {runtime}, accumulation in {kind}: {why}", flush=True)
            precision = replace(bundle.manifest.precision, accumulate=kind)
            got = {probe: run(case.inputs)["output"] for probe, case in cases.items()}
            budgets = {p: case_budgets(case, precision)["output"] for p, case in cases.items()}
            trials = [
                (n, pool.submit(judge, n, cases[p], layers[p], got[p], precision, p, budgets[p]))
                for n in names
                for p in cases
            ]
            worst: dict[str, tuple[float, str]] = {}
            for name, trial in trials:
                worst[name] = max(worst.get(name, trial.result()), trial.result())
            for name, (share, where) in worst.items():
                print(f"  {name}: {share:.2f} ({where})", flush=True)
            columns[f"{title}, {runtime}"] = {name: share for name, (share, _) in worst.items()}
    return columns


def judge(
    name: str,
    case: GoldenCase,
    layer: Layer,
    got: np.ndarray,
    precision: Precision,
    probe: str,
    budget: Budget,
) -> tuple[float, str]:
    """The share of the budget that a runtime's result uses with a mistake, and where it is largest."""
    wrong = got.astype(np.float64) if name == "correct" else wrong_output(name, layer, got)
    if "bias" in name:
        bias = 1e4 if "10,000" in name else 1e3
        case, wrong[..., _CHANNEL] = with_bias(case, bias, precision), wrong[..., _CHANNEL] + bias
    budgets = {} if "bias" in name else {"output": budget}
    (verdict,) = judge_case(case, {"output": wrong.astype(got.dtype)}, precision, budgets)
    if verdict.budget is None or verdict.deviation is None:
        return math.inf, str(verdict.problem)
    used = {key: getattr(verdict.deviation, key) / limit for key, limit in verdict.budget.items() if limit}
    return max(used.values()), f"{max(used, key=used.__getitem__)}, {probe}, {verdict.deviation.local_at}"


def print_mutations(models: Sequence[str]) -> None:
    """The right graph and its least detectable mutation, for every model and precision."""
    print("| model | precision | right | least detectable mutation | which |\n|---|---|---|---|---|")
    for model in models or [spec.name for spec in md.models(tiny=True) if spec.name.startswith("tiny-")]:
        for precision in PRECISIONS:
            with tempfile.TemporaryDirectory() as folder:
                golden = ("min", "opt", "odd", "ragged")
                result = md.self_test(
                    md.export(model, Path(folder) / "b", precision=precision, golden=golden)
                )
            measured = [each for each in result.mutations if each.share is not None]  # NaN has no share
            nearest = min(measured, key=lambda mutation: mutation.share)
            right = f"{result.right.share or 0.0:.2f}"
            print(
                f"| {model} | {precision} | {right} | {nearest.share:,.1f} | {nearest.mistake} |", flush=True
            )


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL[:SIZES]")
    parser.add_argument("--mutations", action="store_true", help="mutate the graphs of these models")
    parser.add_argument("--tensorrt", action="store_true", help="build an engine, and judge it")
    parser.add_argument("--out", type=Path, help="the Markdown file to write")
    arguments = parser.parse_args()
    if arguments.mutations:
        return print_mutations(arguments.models)
    columns: dict[str, dict[str, float]] = {}
    points = arguments.models or (ON_TENSORRT if arguments.tensorrt else DEFAULT)
    # Engines are built side by side; on a CPU one model keeps all cores busy.
    with ProcessPoolExecutor(
        len(points) if arguments.tensorrt else 1, multiprocessing.get_context("spawn")
    ) as pool:
        for found in pool.map(shares, points, [arguments.tensorrt] * len(points)):
            columns |= found
    found = versions(("tensorrt", "onnxruntime", "torch"))
    text = (
        "Share of the FP16 budget that a mistake uses; over 1 it is caught. The largest of the shares on "
        "random and on probe inputs (see [parity](parity.md)). FP16 accumulation: PyTorch with partial sums "
        "that are rounded to FP16 every 16 terms. Written by `python benchmarks/sensitivity.py --out "
        "docs/sensitivity.md`; versions: "
        + ", ".join(f"{name} {version}" for name, version in found.items())
        + "."
    )
    lines = [
        "# Which mistakes the budget catches",
        "",
        *textwrap.wrap(text, 100, break_on_hyphens=False),
        "",
        f"| mistake | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    for name in ("correct", *MISTAKES):
        cells = [f"{column[name]:.2f}" if name in column else "–" for column in columns.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
