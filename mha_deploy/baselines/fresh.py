"""Fresh cases with their FP64 oracle, computed where PyTorch is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial, singledispatch
from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from mha_deploy.bundle.cases import (
    DecodeTrace,
    GoldenCase,
    KnownMistake,
    PlannedTrace,
    check_steps,
    read_case,
)
from mha_deploy.bundle.folder import Bundle
from mha_deploy.bundle.sizes import LOUDNESS, PlannedCase, sizes_name
from mha_deploy.errors import BackendUnavailable, BundleError, DeployError, out_of_memory
from mha_deploy.exporter.coarse import in_fewer_bits
from mha_deploy.exporter.exporter import export_user_module
from mha_deploy.exporter.golden import Capture, LayerCapture, ModuleCapture
from mha_deploy.exporter.oracle import (
    Float64,
    Intercept,
    Repeated,
    by_default,
    run_in_float64,
    run_program,
    two_at_once,
)
from mha_deploy.exporter.own_model import reopen_user_module
from mha_deploy.graph.file import load_graph
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.model.precision import find_precision
from mha_deploy.model.spec import ModelSpec
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import Attention, causal_mask, split_heads
from mha_deploy.reference.inputs import tensor_from_numpy, to_numpy

# -- The PyTorch layer of a bundle, with the weights that are in its graph -------------------------


def module_from_bundle(
    bundle: Bundle, *, path: str = "plain", device: str = "cpu", dtype: torch.dtype | None = None
) -> Attention:
    """Build the layer of a bundle; its weights become those of a dtype; default: the bundle's precision."""
    check_device(device)
    manifest, spec = bundle.manifest, attention_spec(bundle)
    kind = dtype or getattr(torch, manifest.precision.torch_name)
    initializers = load_graph(bundle.model_path).graph.initializers

    def read(name: str) -> Tensor:
        value = initializers.get(f"{name}.T", initializers.get(name))
        stored = None if value is None else value.const_value
        if stored is None:
            raise BundleError("The graph does not hold a weight of its layer.", got=name, hint="export again")
        tensor = tensor_from_numpy(stored.numpy()).to(device, kind)
        if isinstance(stored, ir.ExternalTensor):
            stored.release()  # else the file stays mapped
        return tensor.T.contiguous() if f"{name}.T" in initializers else tensor

    # One at a time: the largest layers are gigabytes.
    state = {name: read(name) for name in build_module(spec, device="meta").state_dict()}
    return build_module(spec, weights=state, dtype=kind, device=device, path=path)


def attention_spec(bundle: Bundle) -> AttentionSpec:
    """The spec of a bundle of one of our own layers; not for a user's module."""
    spec = bundle.manifest.spec
    if not isinstance(spec, AttentionSpec):
        raise BundleError(
            "This is not the bundle of a catalog layer.",
            got=spec.name,
            hint="a bundle of a layer from `mha-deploy models`",
        )
    return spec


def check_device(device: str) -> None:
    """Refuse a GPU that PyTorch does not find."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        got = f"torch {torch.__version__}, {built}"
        raise BackendUnavailable("PyTorch finds no CUDA GPU.", got=got, hint="mha-deploy doctor")


# -- The FP64 oracle at sizes whose scores do not fit memory at once -------------------------------

_COPIES_OF_SCORES = 3  # before the softmax, after it, and one in between


def run_in_blocks(
    module: Attention, arguments: dict[str, Tensor], limit_bytes: int, mode: Float64 | None = None
) -> tuple[Tensor, ...]:
    """Run a layer as `run_in_float64` does, within a bound on memory; the outputs are on the CPU.

    The bound is on scores and activations of one block; one query of one batch element always runs.
    """
    spec, (batch, S) = module.spec, arguments["query"].shape[:2]
    sizes = {"B": 1, "S": S}
    for name, axis, dim in (("past_key", "P", 2), ("key_cache", "T", 2), ("key", "T", 1)):
        if name in arguments:
            sizes[axis] = arguments[name].shape[dim]
    each = spec.oracle_bytes(sizes)
    count = max(1, limit_bytes // each)
    # Where all of it fits, no call is intercepted: at small sizes that takes as long as the calls.
    fits = _COPIES_OF_SCORES * each * min(count, batch) <= limit_bytes
    blocks = []
    for start in range(0, batch, count):
        taken = {
            name: tensor if name == "attention_bias" else tensor[start : start + count]  # which all share
            for name, tensor in arguments.items()
        }
        with nullcontext() if fits else QueriesInBlocks(limit_bytes):
            blocks.append([output.cpu() for output in run_in_float64(module, taken, mode)])
    return tuple(torch.cat(parts) for parts in zip(*blocks, strict=True))


class QueriesInBlocks(Intercept):
    """Compute PyTorch's attention some queries at a time, where its scores would exceed a bound."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """One call: attention in blocks, others as they are."""
        return (self._attention if func is F.scaled_dot_product_attention else func)(*args, **kwargs)

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        S, T = q.shape[-2], k.shape[-2]
        bytes_per_query = _COPIES_OF_SCORES * q.element_size() * q.shape[0] * q.shape[1] * T
        count, attend = max(1, self._limit_bytes // bytes_per_query), F.scaled_dot_product_attention
        if count >= S:
            return attend(q, k, v, attn_mask=attn_mask, is_causal=is_causal, **options)
        mask = causal_mask(S, T, q.device) if is_causal else attn_mask
        blocks = []
        for start in range(0, S, count):
            part = slice(start, start + count)
            visible = mask if mask is None or mask.shape[-2] == 1 else mask[..., part, :]
            blocks.append(attend(q[..., part, :], k, v, attn_mask=visible, **options))
        return torch.cat(blocks, dim=-2)


# -- Values inside a user's module, which its factory makes again ----------------------------------


class ProgramValues:
    """The module of a bundle, which its factory must make again, and what is true of values inside it."""

    def __init__(self, bundle: Bundle) -> None:
        spec, own = bundle.manifest.spec, bundle.manifest.precision
        # A mixed graph was made from the module in float32, and its values have the names of that program.
        self.user = reopen_user_module(spec, find_precision("fp32") if spec.mixed else own)
        self.exported = export_user_module(self.user)
        # Changed code may show at some sizes only, such as a window in those cases that are longer.
        for entry in sorted(bundle.manifest.golden, key=lambda entry: math.prod(entry.sizes.values())):
            self.at(read_case(bundle, entry), ())

    def at(self, case: GoldenCase, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Values of the graph in FP64, by their names; what the program does not compute is left out."""
        known = [name for name in names if self.exported.node_of(name) is not None]
        inputs = {name: tensor_from_numpy(array) for name, array in case.inputs.items()}
        try:
            outputs, kept = run_program(self.exported, inputs, keep=known)
        except (RuntimeError, MemoryError) as error:
            if out_of_memory(error) is None:
                raise
            what = "Out of memory: a stored case cannot be computed again, to compare it with the module."
            raise DeployError(
                what, got=case.name, hint="a machine with as much memory as the export"
            ) from error
        for name, oracle in case.oracle.items():
            found = to_numpy(outputs[name]) if name in outputs else np.empty(())
            problem = _difference(found, oracle)
            if problem is not None:
                what = f"{self.user.factory} no longer computes what was exported."
                got = f"output {name} of {case.name}: {problem}"
                hint = "export again, or restore the code that was exported"
                raise BundleError(what, got=got, hint=hint)
        return {name: to_numpy(tensor) for name, tensor in kept.items()}


def _difference(found: np.ndarray, oracle: np.ndarray) -> str | None:
    """How two results in FP64 differ by more than the order of additions explains; None if they do not."""
    if found.shape != oracle.shape:
        return f"shape {found.shape}, not {oracle.shape}"
    scale = float(np.abs(oracle).max(initial=1, where=np.isfinite(oracle)))
    same = np.isclose(found, oracle, rtol=1e-6, atol=1e-9 * scale)
    return None if same.all() else f"{same.size - int(same.sum())} of {same.size} numbers differ"


# -- Probe inputs: large tokens where a mask, a window or a cache ends -----------------------------

_CANDIDATES = 64
COARSE = ("scores", "softmax weights", "queries and keys", "values", "heads")
_SMALL = 1 << 18  # numbers of an output: every weight by itself takes long for more
_TWICE = 1 << 20  # numbers of an output: for more, two runs at once would take much memory


def _edges(end: int, length: int, window: int | None) -> list[int]:
    """Positions at which it shows what is attended, where `end` of `length` keys are valid."""
    wanted = [end - 1, end, (end - 1) // 2, 0]
    wanted += [end - window, end - window - 1] if window is not None else []
    return sorted({position for position in wanted if 0 <= position < length})


def _by_self_score(layer: Attention, x: Tensor) -> Tensor:
    """Which of the first tokens attend to themselves in the most heads, the best first. [B, n]."""
    spec, few = layer.spec, x[:, :_CANDIDATES]
    with torch.inference_mode(), Float64():
        q, k, _ = layer.project(few.to(next(layer.parameters()).device), None, None)
    q, k = split_heads(q, spec.Hq), split_heads(k, spec.Hkv).repeat_interleave(spec.Hq // spec.Hkv, 1)
    return (q * k).sum(-1).clamp(max=1.0).mean(1).argsort(-1, descending=True).to(x.device)


def layer_probe(
    spec: AttentionSpec, feeds: Mapping[str, Tensor], layer: Attention | None = None
) -> dict[str, Tensor]:
    """The inputs of a layer, with large tokens and cache entries at the edges of what is attended.

    The last query alone attends to the last key. So with the layer at hand, the tokens at the edges are such
    that attend to themselves in many heads.
    """
    loud = {name: tensor.clone() for name, tensor in feeds.items()}
    best = None if layer is None or spec.is_cross else _by_self_score(layer, loud["x"])
    tokens = [loud[name] for name in (("key", "value") if spec.is_cross else ("x",))]
    caches = [
        tensor for name, tensor in loud.items() if name.startswith(("past_", "key_cache", "value_cache"))
    ]
    for b, S in enumerate([tokens[0].shape[1]] * tokens[0].shape[0]):
        end = int(feeds["key_lengths"][b]) if "key_lengths" in feeds else S
        edges = _edges(end, S, spec.window)
        for tensor in tokens:
            if best is not None:
                tensor[b, edges] = feeds["x"][b, best[b].repeat(len(edges))[: len(edges)]]
            tensor[b, edges] *= LOUDNESS
        for cache in caches:
            T = cache.shape[2]
            valid = int(feeds["lengths"][b]) if "lengths" in feeds else T
            cache[b, :, [at for at in _edges(valid, T, spec.window) if at < valid]] *= LOUDNESS
            if "lengths" in feeds:
                cache[b, :, valid + S :] *= LOUDNESS  # what is behind the valid entries must not be read
    return loud


class CoarseAttention(Intercept):
    """Compute attention with one of `COARSE` rounded to BF16."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def _rounded(self, part: str, *tensors: Tensor) -> Iterator[Tensor]:
        return (each.bfloat16().to(each.dtype) if part == self._part else each for each in tensors)

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """One call, with the part of it rounded that is one of attention."""
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is torch.Tensor.softmax and args[0].dim() == 4:  # of a layer with a softcap
            return self._softmax(*args)
        return func(*args, **kwargs)

    def _softmax(self, scores: Tensor, dim: int = -1) -> Tensor:
        (scores,) = self._rounded("scores", scores)
        (weights,) = self._rounded("softmax weights", scores.softmax(dim))
        return weights

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
        q, k = self._rounded("queries and keys", q, k)
        (v,) = self._rounded("values", v)
        scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
        mask = causal_mask(q.shape[-2], k.shape[-2], q.device) if is_causal else attn_mask
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        (heads,) = self._rounded("heads", self._softmax(scores).nan_to_num(0.0) @ v)
        return heads


def _loud_steps(planned: PlannedTrace, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    x, steps = feeds["x"].clone(), planned.steps
    for b, end in enumerate(planned.prompt):
        x[b, sorted({0, end - 1, end, end + steps // 2, end + steps - 1})] *= LOUDNESS
    return {**feeds, "x": x}


# -- Fresh cases: new inputs at any sizes, with their FP64 oracle ----------------------------------

_GIB = 1 << 30
# For the scores and activations of the oracle; what the device has besides is for weights and results.
ORACLE_BYTES = {"cpu": 2 * _GIB, "cuda": 16 * _GIB}


Probes = Mapping[str, Callable[..., dict[str, Tensor]]]
"""What changes inputs that were drawn, by the name of the probe."""


@singledispatch
def open_capture(
    spec: ModelSpec, bundle: Bundle, device: str, oracle_bytes: int | None
) -> tuple[Capture, str, Probes]:
    """What captures cases of a bundle's model, the device that it runs on, and its probes."""
    program = ProgramValues(bundle)
    own, tensors = bundle.manifest.precision, (*spec.inputs, *spec.outputs)
    types = {each.name: own.numpy_of(each.kind) for each in tensors} if spec.mixed else {}
    return ModuleCapture(program.user, program.exported, own, 0, types), "cpu", {"edges": dict}


@open_capture.register(AttentionSpec)
def _(
    spec: AttentionSpec, bundle: Bundle, device: str, oracle_bytes: int | None
) -> tuple[Capture, str, Probes]:
    module = module_from_bundle(bundle, path="plain", device=device)
    limit = oracle_bytes or ORACLE_BYTES[torch.device(device).type]
    run_oracle = partial(run_in_blocks, limit_bytes=limit)
    capture = LayerCapture(module, bundle.manifest.precision, 0, run_oracle=run_oracle)
    capture.most_tokens = _CHUNK
    edges = partial(layer_probe, spec, layer=module)
    return capture, device, {"edges": edges, "coarse": dict, "steps": _loud_steps}


class FreshCases:
    """Makes cases for the model of a bundle, with its own weights.

    A catalog layer and its FP64 twin run on a device, and the oracle may take `oracle_bytes` besides its
    weights, by default `ORACLE_BYTES`; a user's module runs on the CPU.
    """

    def __init__(self, bundle: Bundle, device: str, *, oracle_bytes: int | None = None) -> None:
        self.spec = bundle.manifest.spec
        self._capture, self.device, self.probes = open_capture(self.spec, bundle, device, oracle_bytes)
        self._capture.batch = self.spec.batch_name

    def case(
        self,
        sizes: Mapping[str, int],
        *,
        seed: int,
        ragged: bool = False,
        past: int | None = None,
        probe: str | None = None,
    ) -> GoldenCase:
        """Draw inputs and compute what is true of them; the same seed at the same sizes draws the same.

        Ragged lengths go down to 1 and 0. `past` entries of a preallocated cache are valid
        in every batch element; default: drawn. The probe `edges` has large tokens where masks, windows and
        caches end; `coarse` finds out what parts of attention in BF16, and weights in INT8, would change, of
        catalog layers alone.
        """
        self.spec.check_sizes(sizes)
        self.spec.check_past(sizes, past)
        name = f"fresh-{sizes_name(sizes)}-seed{seed}{'-ragged' if ragged else ''}"
        self._capture.change = self.probes[probe] if probe else dict
        what = "Out of memory: the oracle cannot be computed at these sizes."
        no_room = DeployError(what, got=sizes_name(sizes), hint="smaller sizes")
        planned = PlannedCase(name=name, sizes=dict(sizes), ragged=ragged, past=past, probe=probe == "edges")
        with self._drawing(seed, no_room):
            case = self._capture.capture(planned)
            if self.device != "cpu":
                dict(case.baselines)  # now: later the memory may be an engine's
            if probe != "coarse":
                return case
            oracle, feeds = case.oracle["output"], self._capture.draw(planned)
            tokens = {name: each.bfloat16().to(each.dtype) for name, each in feeds.items() if each.dim() == 3}
            changed = {"outputs": to_numpy(torch.from_numpy(oracle).bfloat16().double())}
            repeated = Repeated()  # the projections before attention

            def output_with(part: str) -> np.ndarray:
                mode = Float64()
                if part == "inputs":
                    return to_numpy(self._capture.evaluate_in_fp64({**feeds, **tokens}, mode)["output"])
                mode.repeated = repeated
                with CoarseAttention(part):
                    return to_numpy(self._capture.evaluate_in_fp64(feeds, mode)["output"])

            parts = ("inputs", *COARSE)
            if self.device == "cpu" and oracle.size <= _TWICE:
                with by_default(torch.float64):  # else each of them would change it for the other
                    found = two_at_once([partial(output_with, part) for part in parts])
            else:
                found = list(map(output_with, parts))
            changed |= zip(parts, found, strict=True)
            changed = {f"{part} in BF16": each for part, each in changed.items()}
            parameters = dict(self._capture.module.named_parameters()) if oracle.size <= _SMALL else {}
            matrices = {part: weight for part, weight in parameters.items() if weight.dim() == 2}
            for (part, weight), (kind, change) in product(matrices.items(), in_fewer_bits((1,)).items()):
                own = weight.data
                weight.data = torch.from_numpy(change(to_numpy(own.double()))).to(own)
                try:
                    changed[f"{part} {kind}"] = to_numpy(self._capture.evaluate_in_fp64(feeds)["output"])
                finally:
                    weight.data = own
        added = {name: KnownMistake({"output": each - oracle}) for name, each in changed.items()}
        return replace(case, suspects=added)

    def given(self, name: str, inputs: Mapping[str, np.ndarray], sizes: Mapping[str, int]) -> GoldenCase:
        """Compute what is true of inputs of a user's own."""
        self.spec.check_sizes(sizes)
        what = "Out of memory: the oracle of a sample cannot be computed."
        no_room = DeployError(what, got=f"{name}: {sizes_name(sizes)}", hint="smaller samples")
        with self._drawing(0, no_room):
            feeds = {key: tensor_from_numpy(array) for key, array in inputs.items()}
            return self._capture.capture(PlannedCase(name=name, sizes=dict(sizes)), feeds)

    def trace(self, planned: PlannedTrace, *, seed: int, probe: str | None = None) -> DecodeTrace:
        """Draw tokens, decode with the module, and compute the whole sequence in FP64.

        With the probe `steps`, some tokens of a catalog layer are large: at the ends of the prompt, among the
        steps.
        """
        self._capture.change = partial(self.probes[probe], planned) if probe else dict
        what, hint = "The tokens do not fit the device's memory.", "a smaller batch, or a shorter prompt"
        no_room = DeployError(what, got=planned.name, hint=hint)
        with self._drawing(seed, no_room):
            return self._capture.trace(self.spec, planned)

    @contextmanager
    def _drawing(self, seed: int, no_room: DeployError) -> Iterator[None]:
        self._capture.seed = seed
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if out_of_memory(error) is None:
                raise
            raise no_room from error


# -- Fresh decode traces, longer than those of a bundle --------------------------------------------

_CHUNK = 256  # tokens of a prompt that the module takes at once: it keeps all their scores


def fresh_trace(
    bundle: Bundle, *, batch: int, prompt: int, steps: int, seed: int, device: str = "cuda"
) -> DecodeTrace:
    """Draw prompts of one length and single tokens behind them, and compute what decoding must give."""
    planned = PlannedTrace(name="drawn", prompt=(prompt,) * batch, steps=steps)
    check_steps(bundle.manifest.spec, np.array(planned.prompt, np.int32), steps)
    return FreshCases(bundle, device).trace(planned, seed=seed)
