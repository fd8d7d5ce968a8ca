"""Plant mistakes in a runtime of small models of one's own, and count which of them the verdict names.

    python benchmarks/own_sensitivity.py --results FOLDER [--out FILE.md] [--seeds 30] [MODEL ...]
    python benchmarks/own_sensitivity.py --alarms 1000:1010 [MODEL ...]

Each model (`small_models.py`) is exported with `--precision auto`. The runtime is PyTorch in FP16: GEMMs,
attention, norms and activations compute in float32 and round once, or with `fp16` their GEMMs round partial
sums to FP16 every 16 terms. It is judged by `validate(runners=[...])`, as an engine is that shows no values
inside. A mistake is *caught* where the verdict is a failure, *named* where the attention that it is in, or
whose operands it changes, is NOT VERIFIED, else *missed*. One elsewhere that makes no output of the usual
cases worse by half is within rounding, and not counted. The table has the right runtime's largest share of
the budget, on the bundle's cases and on `--seeds` cases of other sizes and inputs, and how many of these
failed.

With `--alarms`, right runtimes are judged on cases with known mistakes instead: inputs of these seeds at the
usual sizes, with the mistakes that the export would compute for them.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import random
import subprocess
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import small_models
import torch
import torch.nn.functional as F
from msgspec import Struct, field
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import mha_deploy as md
from mha_deploy.baselines.fresh import FreshCases
from mha_deploy.baselines.imported import FileCases
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.samples import Sample
from mha_deploy.environment import versions
from mha_deploy.exporter.coarse import coarse_mistakes
from mha_deploy.exporter.file_program import FileProgram, FileRounding
from mha_deploy.graph.file import load_graph
from mha_deploy.judge import judge_case
from mha_deploy.options import ValidateOptions
from mha_deploy.reference.inputs import tensor_from_numpy, to_numpy
from mha_deploy.runtime.runner import Runner, TensorInfo
from mha_deploy.status import Kind, Outcome
from mha_deploy.validation.run import validate_bundle
from mha_deploy.validation.verdict import Validation

MODELS = ("vit", "two_classes", "residual", "experts", "twelve_layers", "decoder", "encoder.onnx")
_TERMS = 16  # that a tensor core adds before it rounds
_WORSE = 1.5
_WIDE = {F.layer_norm, F.gelu, torch.Tensor.softmax, F.softmax}
_MATMULS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}


# -- The mistakes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """What a wrong runtime does; every hook takes what the right one computed."""

    operands: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] | None = None
    scale: float = 1.0
    scores: Callable[[Tensor], Tensor] | None = None
    mask: Callable[[Tensor], Tensor | None] | None = None
    after_softmax: bool = False  # whether the mask is applied behind the softmax
    weights: Callable[[Tensor], Tensor] | None = None
    heads: Callable[[Tensor], Tensor] | None = None
    module: Callable[[nn.Module], None] | None = None
    norm: Callable[[Tensor, dict[str, Any]], Tensor] | None = None
    activation: Callable[[Tensor], Tensor] | None = None
    outputs: Callable[[dict[str, np.ndarray]], None] | None = None
    layers: tuple[int, ...] | None = None  # which attentions, from 0 or from -1; None: all
    of_operands: bool = False  # whether a projection of an attention's operands is changed

    @property
    def is_in_attention(self) -> bool:
        """Whether the result of an attention is wrong by it."""
        return self.of_operands or not (self.module or self.norm or self.activation or self.outputs)

    def is_named(self, report: Validation, attentions: list[str]) -> bool:
        """Whether every attention that it is in, or in a mistake of all of them any, is NOT VERIFIED."""
        unseen = {gap.attention for gap in report.not_verified if gap.kind is Kind.ATTENTION_NOT_OBSERVED}
        where = attentions if self.layers is None else [attentions[each] for each in self.layers]
        return self.is_in_attention and (any if self.layers is None else all)(one in unseen for one in where)


def _fp8(x: Tensor) -> Tensor:
    scale = x.abs().amax() / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def _int8(x: Tensor) -> Tensor:
    scale = x.abs().amax() / 127
    return (x / scale).round() * scale


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def _changed(x: Tensor, at: Any, change: Callable[[Tensor], Tensor]) -> Tensor:
    x = x.clone()
    x[at] = change(x[at])
    return x


def _linears(change: Callable[[nn.Linear], None], which: str) -> Callable[[nn.Module], None]:
    """Change the projections whose names end so; of several the last."""

    def apply(module: nn.Module) -> None:
        found = [
            each
            for name, each in module.named_modules()
            if isinstance(each, nn.Linear) and name.endswith(which)
        ]
        for each in found[-1:] if which else found:
            change(each)

    return apply


def _operands(change: Callable[[nn.Linear], None], which: str) -> Mistake:
    return Mistake(module=_linears(change, which), layers=(-1,), of_operands=True)


def _in_weight(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Linear], None]:
    return lambda linear: linear.weight.data.copy_(change(linear.weight.data))


def _int8_channels(x: Tensor) -> Tensor:
    scale = x.abs().amax(1, keepdim=True) / 127
    return (x / scale).round() * scale


def _sparse(x: Tensor) -> Tensor:
    """Two of every four weights in a row."""
    groups = x.view(x.shape[0], -1, 4)
    least = groups.abs().argsort(-1)[..., :2]
    return groups.scatter(-1, least, 0.0).view_as(x)


def _on_last(which: str, change: Callable[[Tensor], Tensor]) -> Mistake:
    def operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        every = {"q": q, "k": k, "v": v}
        every[which] = change(every[which])
        return every["q"], every["k"], every["v"]

    return Mistake(operands=operands)


def _shifted_mask(mask: Tensor) -> Tensor:
    return torch.cat([mask[..., :1], mask[..., :-1]], -1)


def _scaled_output(outputs: dict[str, np.ndarray]) -> None:
    for array in outputs.values():
        array[-1:] *= np.asarray(1.005, array.dtype)


def _unbiased(x: Tensor, options: dict[str, Any]) -> Tensor:
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + options["eps"]).sqrt()
    return x * options["weight"] + options["bias"]


MISTAKES: dict[str, Mistake] = {
    "scale +5 %": Mistake(scale=1.05),
    "scale +5 % in the last attention": Mistake(scale=1.05, layers=(-1,)),
    "scale +2 % in the last attention": Mistake(scale=1.02, layers=(-1,)),
    "scale −2 %": Mistake(scale=0.98),
    "scale of twice the head size": Mistake(scale=0.5**0.5),
    "mask dropped": Mistake(mask=lambda mask: None),
    "mask off by one": Mistake(mask=_shifted_mask),
    "mask behind the softmax": Mistake(after_softmax=True),
    "mask of the first batch element for all": Mistake(mask=lambda mask: mask[:1]),
    "one head zero": Mistake(heads=lambda y: _changed(y, (slice(None), 0), torch.zeros_like)),
    "one head zero in the last attention": Mistake(
        heads=lambda y: _changed(y, (slice(None), 0), torch.zeros_like), layers=(-1,)
    ),
    "attention zero": Mistake(heads=torch.zeros_like),
    "attention zero in the first layer": Mistake(heads=torch.zeros_like, layers=(0,)),
    "heads in another order": Mistake(heads=lambda y: y.roll(1, 1)),
    "two heads swapped in the last attention": Mistake(
        heads=lambda y: y[:, [1, 0, *range(2, y.shape[1])]], layers=(-1,)
    ),
    "attention 3 % too large": Mistake(heads=lambda y: y * 1.03),
    "attention 1 % too large": Mistake(heads=lambda y: y * 1.01),
    "last batch element 2 % too large": Mistake(heads=lambda y: _changed(y, -1, lambda x: x * 1.02)),
    "last query zero": Mistake(heads=lambda y: _changed(y, (..., -1, slice(None)), torch.zeros_like)),
    "one channel of a head zero": Mistake(
        heads=lambda y: _changed(y, (slice(None), 0, slice(None), 3), torch.zeros_like)
    ),
    "keys shifted by one": _on_last("k", lambda k: k.roll(1, 2)),
    "values shifted by one": _on_last("v", lambda v: v.roll(1, 2)),
    "last key ignored": Mistake(
        scores=lambda s: _changed(s, (..., -1), lambda x: torch.full_like(x, -1e4)) if s.shape[-1] > 1 else s
    ),
    "first key ignored": Mistake(
        scores=lambda s: _changed(s, (..., 0), lambda x: x - 1e4) if s.shape[-1] > 1 else s
    ),
    "keys of the first batch element for all": _on_last("k", lambda k: k[:1].expand_as(k)),
    "values beyond 32 keys 5 % too large": _on_last(
        "v", lambda v: _changed(v, (slice(None), slice(None), slice(32, None)), lambda x: x * 1.05)
    ),
    "queries beyond 64 zero": Mistake(
        heads=lambda y: _changed(y, (slice(None), slice(None), slice(64, None)), torch.zeros_like)
    ),
    "softmax over half of the heads twice": Mistake(
        heads=lambda y: torch.cat([y[:, : y.shape[1] // 2]] * 2, 1)
    ),
    "softmax weights in BF16": Mistake(weights=_bf16),
    "softmax weights in FP8": Mistake(weights=_fp8),
    "queries in FP8": _on_last("q", _fp8),
    "keys in FP8": _on_last("k", _fp8),
    "values in FP8": _on_last("v", _fp8),
    "queries in INT8": _on_last("q", _int8),
    "keys in INT8": _on_last("k", _int8),
    "values in INT8": _on_last("v", _int8),
    "keys in BF16": _on_last("k", _bf16),
    "values in BF16": _on_last("v", _bf16),
    "attention in BF16": Mistake(heads=_bf16),
    "output projection 3 % too large": Mistake(module=_linears(_in_weight(lambda w: w * 1.03), ".o")),
    "value projection 3 % too large": _operands(_in_weight(lambda w: w * 1.03), ".v"),
    "key projection 3 % too large": _operands(_in_weight(lambda w: w * 1.03), ".k"),
    "bias of the values dropped": _operands(lambda each: each.bias.data.zero_(), ".v"),
    "bias of the queries dropped": _operands(lambda each: each.bias.data.zero_(), ".q"),
    "one channel of the output projection zero": Mistake(
        module=_linears(_in_weight(lambda w: _changed(w, 5, torch.zeros_like)), ".o")
    ),
    "output projection in BF16": Mistake(module=_linears(_in_weight(_bf16), ".o")),
    "output projection in INT8, by channel": Mistake(module=_linears(_in_weight(_int8_channels), ".o")),
    "value projection in INT8, one scale": _operands(_in_weight(_int8), ".v"),
    "all projections in BF16": Mistake(module=_linears(_in_weight(_bf16), "")),
    "all projections in INT8, by channel": Mistake(module=_linears(_in_weight(_int8_channels), "")),
    "output projection sparse, two of four": Mistake(module=_linears(_in_weight(_sparse), ".o")),
    "norms with an epsilon of 1e-2": Mistake(
        norm=lambda x, options: F.layer_norm(x, x.shape[-1:], options["weight"], options["bias"], 1e-2)
    ),
    "norms with the unbiased variance": Mistake(norm=_unbiased),
    "GELU by its tanh formula": Mistake(activation=lambda x: F.gelu(x, approximate="tanh")),
    "ReLU for GELU": Mistake(activation=F.relu),
    "last batch element of the outputs off by 0.5 %": Mistake(outputs=_scaled_output),
}


# -- The runtime -----------------------------------------------------------------------------------


class Kernels(TorchFunctionMode):
    """Computes as kernels do: float32 inside, one rounding; with a mistake."""

    def __init__(self, mistake: Mistake, attentions: int, half_sums: bool, masked_mean: bool) -> None:
        super().__init__()
        self.mistake, self.attentions, self.half_sums, self.number = mistake, attentions, half_sums, 0
        self.masked_mean = masked_mean  # whether a fully masked query gives the mean of the values, or zero

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, bad = kwargs or {}, self.mistake
        if func is F.scaled_dot_product_attention:
            return self.attention(*args, **kwargs)
        if func is F.linear:
            x, weight, bias = args
            return (self.matmul(x.float(), weight.float().T) + bias.float()).to(x.dtype)
        if func in _MATMULS:
            return self.matmul(args[0].float(), args[1].float()).to(args[0].dtype)
        if func in _WIDE:
            x, options = args[0].float(), {"weight": None, "bias": None, "eps": 1e-5}
            if func is F.layer_norm:
                options |= dict(zip(("weight", "bias", "eps"), args[2:], strict=False)) | kwargs
                options = {n: v.float() if isinstance(v, Tensor) else v for n, v in options.items()}
                right = F.layer_norm(x, args[1], options["weight"], options["bias"], options["eps"])
                return (right if bad.norm is None else bad.norm(x, options)).to(args[0].dtype)
            if func is F.gelu and bad.activation is not None:
                return bad.activation(x).to(args[0].dtype)
            return func(x, *args[1:], **kwargs).to(args[0].dtype)
        return func(*args, **kwargs)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """With sums in float32, or in FP16."""
        if not self.half_sums:
            return a @ b
        sums = torch.zeros(1)
        for i in range(0, a.shape[-1], _TERMS):
            sums = (sums + a[..., i : i + _TERMS] @ b[..., i : i + _TERMS, :]).half().float()
        return sums

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """One attention, with the mistake where it is meant."""
        number, self.number = self.number % self.attentions, self.number + 1
        wanted = self.mistake.layers
        here = wanted is None or number in [each % self.attentions for each in wanted]
        bad = self.mistake if here else Mistake()
        dtype, (q, k, v) = q.dtype, (q.float(), k.float(), v.float())
        if bad.operands:
            q, k, v = bad.operands(q, k, v)
        scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 * bad.scale)
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if is_causal else attn_mask
        if bad.mask and mask is not None:
            mask = bad.mask(mask)
        if bad.scores:
            scores = bad.scores(scores)
        if mask is not None and not bad.after_softmax:
            scores = scores.masked_fill(~mask, -torch.inf)
        empty = 1 / scores.shape[-1] if self.masked_mean else 0.0
        weights = scores.softmax(-1).nan_to_num(empty).to(dtype).float()
        if mask is not None and bad.after_softmax:
            weights = weights * mask
        if bad.weights:
            weights = bad.weights(weights)
        heads = (weights @ v).to(dtype)
        return bad.heads(heads.float()).to(dtype) if bad.heads else heads


class Tiles(Kernels):
    """Attention as a flash kernel computes it: tile by tile, with the scale in the queries."""

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """One attention, right."""
        dtype, (k, v) = q.dtype, (k.float(), v.float())
        q = (q.float() * q.shape[-1] ** -0.5).to(dtype).float()
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril() if is_causal else attn_mask
        top, total, sums = (
            torch.full_like(q[..., :1], -1e30),
            torch.zeros_like(q[..., :1]),
            torch.zeros_like(q),
        )
        for i in range(0, k.shape[-2], _TERMS):
            scores = q @ k[..., i : i + _TERMS, :].transpose(-1, -2)
            if mask is not None:
                scores = scores.masked_fill(~mask[..., i : i + _TERMS], -torch.inf)
            before, top = top, torch.maximum(top, scores.amax(-1, keepdim=True))
            weights, less = (scores - top).exp(), (before - top).exp()
            total = total * less + weights.sum(-1, keepdim=True)
            sums = sums * less + weights.to(dtype).float() @ v[..., i : i + _TERMS, :]
        empty = v.mean(-2, keepdim=True) if self.masked_mean else torch.zeros(())
        return torch.where(total > 0, sums / total, empty).to(dtype)


class WrongRuntime(Runner):
    """A module in FP16 with a mistake."""

    def __init__(self, bundle: Any, module: nn.Module, mistake: Mistake, accumulate: str) -> None:
        spec, precision = bundle.manifest.spec, bundle.manifest.precision
        self.name, self.accumulate = "planted", accumulate
        self.inputs = {
            t.name: TensorInfo(dtype=np.dtype(precision.numpy_of(t.kind)), dims=(None,) * len(t.dims))
            for t in spec.inputs
        }
        self.outputs = {
            t.name: TensorInfo(dtype=np.dtype(precision.numpy_of(t.kind)), dims=(None,) * len(t.dims))
            for t in spec.outputs
        }
        self._module = copy.deepcopy(module).eval()
        if mistake.module:
            mistake.module(self._module)
        self._module.half()
        # PyTorch writes SDPA's mask to a file with the smallest number, not with minus infinity.
        self._kernels = Kernels(mistake, spec.attention_count, accumulate == "fp16", not spec.factory)
        self._mistake = mistake

    def _run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        given = {name: tensor_from_numpy(np.ascontiguousarray(array)) for name, array in feeds.items()}
        given = {name: each.half() if each.is_floating_point() else each for name, each in given.items()}
        self._kernels.number = 0
        with torch.inference_mode(), self._kernels:
            found = self._module(**given)
        names = list(found) if isinstance(found, dict) else list(self.outputs)
        results = {n: to_numpy(x).copy() for n, x in zip(names, tree_leaves(found), strict=True)}
        if self._mistake.outputs:
            self._mistake.outputs(results)
        return {name: array.astype(self.outputs[name].dtype) for name, array in results.items()}


# -- The measurement -------------------------------------------------------------------------------


class Row(Struct):
    """What was found of one model, by the type of accumulation."""

    right: dict[str, float] = field(default_factory=dict)  # the largest share
    seeds: dict[str, tuple[int, int]] = field(default_factory=dict)  # how many failed, of how many
    found: dict[str, dict[str, tuple[str, float]]] = field(default_factory=dict)  # of every mistake
    seconds: float = 0.0
    commit: str = ""  # what was measured
    note: str = ""  # how, where it was not all at once


def _commit() -> str:
    """The commit of this checkout, with a + where it was changed; empty outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip()


def validated(bundle: Any, runner: Runner, **options: Any) -> Validation:
    """The record of what `validate(bundle, runners=[runner])` reports."""
    return validate_bundle(bundle, ValidateOptions(latency=False, **options), runners=[runner])


def _share(report: Validation) -> float:
    shares = [
        v.share for e in report.evaluations for p in e.parity for v in p.verdicts if v.share is not None
    ]
    return max(shares, default=0.0)


def _exported(name: str, folder: Path, golden: Sequence[str] = ()) -> tuple[Any, nn.Module, Any]:
    """The bundle of a model and its module; of a file another bundle as well, which has other cases."""
    torch.manual_seed(0)
    if not name.endswith(".onnx"):
        bundle = md.export(f"{Path(__file__).parent / 'small_models.py'}:{name}", folder / "b")
        torch.manual_seed(0)
        return bundle, getattr(small_models, name)().module, bundle
    module, axes = small_models.encoder_file(folder / name), {"B": "1:4:8", "S": "2:33:96"}
    bundle = more = md.export(folder / name, folder / "b", axes=axes)
    if golden:
        more = md.export(folder / name, folder / "more", axes=axes, golden=golden)
    return bundle, module, more


def measure(name: str, seeds: int) -> tuple[str, Row]:
    """Every mistake in one model, for both kinds of accumulation."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    started, row = time.monotonic(), Row(commit=_commit())
    md.configure(trust_code=True)
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        others = [f"B={random.randint(1, 8)},S={random.randint(2, 96)}" for _ in range(seeds)]
        bundle, module, more = _exported(name, Path(folder), list(dict.fromkeys(others)))
        for accumulate in ("fp32", "fp16"):
            right = WrongRuntime(bundle, module, Mistake(), accumulate)
            report = validated(bundle, right)
            row.right[accumulate] = _share(report)
            if report.outcome is Outcome.FAILED:
                print(f"{name} {accumulate}: right, and {report.headline}", flush=True)
            fresh = 0 if more is not bundle else seeds
            drawn = validated(more, right, fresh=fresh, probe=False)
            verdicts = [v for e in drawn.evaluations for p in e.parity for v in p.verdicts]
            cases = {v.case for v in verdicts if more is not bundle or v.case.startswith("fresh")}
            failed = {v.case for v in verdicts if v.case in cases and v.is_wrong}
            row.seeds[accumulate] = len(failed), len(cases)
            for mistake, bad in MISTAKES.items():
                wrong = WrongRuntime(bundle, module, bad, accumulate)
                if (worse := _how_much_worse(bundle, right, wrong)) == 0:
                    continue
                report = validated(bundle, wrong)
                attentions = [each.name for each in bundle.manifest.observed]
                word = "named" if bad.is_named(report, attentions) else "missed"
                if not bad.is_in_attention and worse < _WORSE:
                    word = "rounding"
                word = "caught" if report.outcome is Outcome.FAILED else word
                row.found.setdefault(accumulate, {})[mistake] = word, _share(report)
                print(f"{name} {accumulate} {mistake}: {word} {_share(report):.2f}", flush=True)
    row.seconds = time.monotonic() - started
    return name, row


def _how_much_worse(bundle: Any, right: Runner, wrong: Runner) -> float:
    """The largest ratio of the errors of an output in a case; 0 where the mistake changes nothing at all."""
    ratios = []
    for case in golden_cases(bundle):
        if case.name not in ("opt", "large", "long-past", "masks", "probe"):
            continue
        a, b = right.run(case.inputs), wrong.run(case.inputs)
        for name, true in case.oracle.items():
            if not np.array_equal(a[name], b[name]):
                errors = [np.linalg.norm(x[name].astype(np.float64) - true) for x in (a, b)]
                ratios.append(float(errors[1] / max(errors[0], 1e-300)))
    return max(ratios, default=0.0)


class Alarms(Struct):
    """What right runtimes used of their budgets in cases with known mistakes: a share for each."""

    mistakes: int  # known ones of a case
    shares: dict[str, list[float]]


def alarms(name: str, seeds: range) -> tuple[str, Alarms]:
    """Judge right runtimes of one model."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    md.configure(trust_code=True)
    with tempfile.TemporaryDirectory() as folder:
        bundle, module, _ = _exported(name, Path(folder))
        graph, precision = load_graph(bundle.model_path), bundle.manifest.precision
        (usual,) = [case for case in golden_cases(bundle) if case.name == "opt"]
        runners = {kind: WrongRuntime(bundle, module, Mistake(), kind) for kind in ("fp32", "fp16")}
        tiles = WrongRuntime(bundle, module, Mistake(), "fp32")
        tiles._kernels = Tiles(Mistake(), tiles._kernels.attentions, False, tiles._kernels.masked_mean)
        program, found = FileProgram(graph), Alarms(0, {})
        fresh = None if name.endswith(".onnx") else FreshCases(bundle, "cpu")
        for seed in seeds:
            if fresh is None:
                dice = np.random.default_rng(seed)
                given = {
                    key: x if x.dtype.kind == "b" else dice.standard_normal(x.shape).astype(x.dtype)
                    for key, x in usual.inputs.items()
                }
                sample = Sample(name="opt", sizes=dict(usual.sizes), inputs=given)
                case = FileCases(bundle, Path(folder) / name).case(sample)
            else:
                case = replace(fresh.case(usual.sizes, seed=seed), name="opt")
            known = coarse_mistakes(graph, [case], precision, bundle.manifest.unfused)
            case, found.mistakes = replace(case, suspects=known.suspects), len(known.suspects)
            results = [(f"kernels, {kind}", kind, runners[kind].run(case.inputs)) for kind in runners]
            results.append(("flash attention, fp32", "fp32", tiles.run(case.inputs)))
            for kind in runners:
                rounding = FileRounding(replace(precision, accumulate=kind), seed)
                results.append((f"random rounding, {kind}", kind, program.run(case.inputs, rounding)))
            for runtime, kind, got in results:
                typed = {key: x.astype(case.eager[key].dtype) for key, x in got.items()}
                verdicts = judge_case(case, typed, replace(precision, accumulate=kind))
                found.shares.setdefault(runtime, []).append(max(v.share or 0.0 for v in verdicts))
    return name, found


def alarm_lines(found: Mapping[str, Alarms], seeds: range) -> list[str]:
    """The table of right runtimes."""
    every = [share for each in found.values() for shares in each.shares.values() for share in shares]
    about = (
        "Right runtimes on cases with known mistakes: inputs of the seeds "
        f"{seeds.start} to {seeds.stop - 1}, by which nothing was chosen, at the usual sizes. Numbers are "
        "the largest share of the budget, and how many failed; in all, "
        f"{sum(share > 1 for share in every)} of {len(every)}. Written by `python "
        f"benchmarks/own_sensitivity.py --alarms {seeds.start}:{seeds.stop}` at commit {_commit()}."
    )
    runtimes = list(dict.fromkeys(runtime for each in found.values() for runtime in each.shares))
    lines = [*textwrap.wrap(about, 100, break_on_hyphens=False), ""]
    lines += [f"| model | known mistakes | {' | '.join(runtimes)} |", f"|---|{'---|' * (1 + len(runtimes))}"]
    for name, each in found.items():
        cells = [f"{max(each.shares[key]):.2f}, {sum(x > 1 for x in each.shares[key])}" for key in runtimes]
        lines.append(f"| {name} | {each.mistakes} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure the models side by side, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", default=None)
    parser.add_argument("--seeds", type=int, default=30, help="cases of other sizes for the right runtime")
    parser.add_argument("--results", type=Path, help="a folder that keeps what was found")
    parser.add_argument("--out", type=Path, help="the Markdown file to write")
    parser.add_argument(
        "--alarms", metavar="FIRST:END", help="judge right runtimes with inputs of these seeds"
    )
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.alarms:
        drawn = range(*map(int, arguments.alarms.split(":")))
        found = dict(alarms(name, drawn) for name in arguments.models or MODELS)
        print("\n".join(alarm_lines(found, drawn)))
        return
    if arguments.results is None:
        parser.error("--results FOLDER, or --alarms FIRST:END")
    names, rows, folder = arguments.models or list(MODELS), dict[str, Row](), arguments.results
    folder.mkdir(parents=True, exist_ok=True)
    workers = min(len(names), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for name, row in pool.map(measure, names, [arguments.seeds] * len(names)):
            rows[name] = row
            (folder / f"{name}.json").write_bytes(msgspec.json.encode(row))
            print(f"{name}: {row.seconds:.0f} s", flush=True)
    known = {name: folder / f"{name}.json" for name in MODELS}
    kept = {n: msgspec.json.decode(p.read_bytes(), type=Row) for n, p in known.items() if p.is_file()}
    text = "\n".join(lines_of(kept)) + "\n"
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    print(text)


def lines_of(rows: Mapping[str, Row]) -> list[str]:
    """The tables."""
    with_ = ", ".join(f"{n} {v}" for n, v in versions(("onnxruntime", "torch")).items())
    about = (
        "Mistakes planted in a runtime of small models, judged as an engine that shows no values inside is: "
        "*caught* (FAILED), *named* (the attention that it is in, or whose operands it changes, is NOT "
        "VERIFIED) or **missed**. One elsewhere that makes no output worse by half is within *rounding*, and "
        "not counted. The right runtime's share of its budget is the largest over all cases; seeds are cases "
        "of random sizes and inputs, and how many of them failed. Written by `python "
        "benchmarks/own_sensitivity.py "
        f"--results FOLDER --out docs/sensitivity-own.md`; versions: {with_}."
    )
    lines = ["# Mistakes in models of your own", "", *textwrap.wrap(about, 100, break_on_hyphens=False), ""]
    titles = "model | commit | accumulation | right | failed, of seeds | mistakes | caught | named | missed"
    lines += [f"| {titles} |", f"|{'---|' * len(titles.split(' | '))}"]
    for name, row in rows.items():
        for kind in ("fp32", "fp16"):
            words = [word for word, _ in row.found[kind].values() if word != "rounding"]
            counts = " | ".join(str(words.count(word)) for word in ("caught", "named", "missed"))
            failed, of = row.seeds[kind]
            share = f"{row.right[kind]:.2f}"
            about_it = f"{name} | {row.commit or 'unknown'}"
            lines.append(f"| {about_it} | {kind} | {share} | {failed} of {of} | {len(words)} | {counts} |")
    for note in dict.fromkeys(row.note for row in rows.values() if row.note):
        lines += ["", *textwrap.wrap(note, 100, break_on_hyphens=False)]
    for kind in ("fp32", "fp16"):
        found = [word for row in rows.values() for word, _ in row.found[kind].values()]
        words = [word for word in found if word != "rounding"]
        good = sum(word != "missed" for word in words)
        percent = f"{100 * good / max(len(words), 1):.1f} %"
        lines += ["", f"Accumulation in {kind}: {good} of {len(words)} caught or named ({percent})."]
    lines += ["", f"| mistake | {' | '.join(f'{n}, {k}' for n in rows for k in ('fp32', 'fp16'))} |"]
    lines += [f"|---|{'---|' * 2 * len(rows)}"]
    for mistake in MISTAKES:
        cells = []
        for row in rows.values():
            for kind in ("fp32", "fp16"):
                word, share = row.found[kind].get(mistake, ("–", 0.0))
                number = f"{share:,.2f}" if share < 10 else f"{share:,.0f}"
                shown = {"caught": number, "missed": f"**{number}**", "–": word}
                cells.append(shown.get(word, f"{word} {number}"))
        lines.append(f"| {mistake} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
