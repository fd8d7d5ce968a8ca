"""Fresh cases with their FP64 oracle, computed where PyTorch is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mha_deploy.analyze.cost import oracle_bytes, past_keys, sizes_name
from mha_deploy.bundle.cases import GoldenCase, read_case
from mha_deploy.bundle.folder import Bundle
from mha_deploy.bundle.traces import DecodeTrace, PlannedTrace, check_steps
from mha_deploy.errors import BackendUnavailable, BundleError, DeployError
from mha_deploy.export.axes import ExportedModule
from mha_deploy.export.eager import run_module
from mha_deploy.export.exporter import exported_program
from mha_deploy.export.golden import (
    GoldenCapture,
    MixedCapture,
    ModuleCapture,
    TraceCapture,
    fp64_twin,
    refuse_overflow,
)
from mha_deploy.export.options import PlannedCase
from mha_deploy.export.oracle import run_program
from mha_deploy.export.own_model import reopen_user_module
from mha_deploy.graph.file import load_graph
from mha_deploy.model.deployable import ModuleSpec
from mha_deploy.model.precision import Precision, find_precision
from mha_deploy.model.spec import FLOAT, AttentionSpec
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import Attention, causal_mask, split_heads
from mha_deploy.reference.inputs import tensor_from_numpy, to_numpy

# -- The PyTorch layer of a bundle, with the weights that are in its graph -------------------------


def module_from_bundle(
    bundle: Bundle, *, path: str = "plain", device: str = "cpu", dtype: torch.dtype | None = None
) -> Attention:
    """Build the layer of a bundle.

    Args:
        bundle: The bundle.
        path: How attention is computed; see `reference.core`.
        device: Where the weights go.
        dtype: What they are converted to; the bundle's precision if not given.
    """
    check_device(device)
    manifest, spec = bundle.manifest, attention_spec(bundle)
    dtype = dtype or getattr(torch, manifest.precision.torch_name)
    initializers = load_graph(bundle.model_path).graph.initializers
    names = list(build_module(spec, device="meta").state_dict())
    # One at a time: the largest layers are gigabytes.
    state = {name: _read(initializers, name, device, dtype) for name in names}
    return build_module(spec, weights=state, dtype=dtype, device=device, path=path)


def attention_spec(bundle: Bundle) -> AttentionSpec:
    """The spec of a bundle of one of our own layers; not for a user's module."""
    layer = bundle.manifest.spec.layer
    if layer is None:
        raise BundleError("The bundle is not one of a reference layer.", got=bundle.manifest.spec.name)
    return layer


def check_device(device: str) -> None:
    """Refuse a GPU that PyTorch does not see.

    Raises:
        BackendUnavailable: PyTorch was built without CUDA, or finds no GPU.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise BackendUnavailable(
            "PyTorch sees no CUDA GPU.", got=f"torch {torch.__version__}, {built}", hint="mha-deploy doctor"
        )


def _read(initializers: Mapping[str, ir.Value], name: str, device: str, dtype: torch.dtype) -> Tensor:
    if f"{name}.T" in initializers:
        return _tensor(initializers[f"{name}.T"]).to(device, dtype).T.contiguous()
    if name in initializers:
        return _tensor(initializers[name]).to(device, dtype)
    raise BundleError("The graph does not hold a weight of its layer.", got=name, hint="export again")


def _tensor(value: ir.Value) -> Tensor:
    stored = value.const_value
    if stored is None:
        raise BundleError("A weight of the graph has no value.", got=value.name, hint="export again")
    tensor = tensor_from_numpy(stored.numpy())
    if isinstance(stored, ir.ExternalTensor):
        stored.release()  # else the file stays mapped
    return tensor


# -- The FP64 oracle at sizes whose scores do not fit memory at once -------------------------------

_COPIES_OF_SCORES = 3  # before the softmax, after it, and one in between


def run_in_blocks(module: Attention, arguments: dict[str, Tensor], limit_bytes: int) -> tuple[Tensor, ...]:
    """Run a layer as `export.eager.run_module` does, within a bound on memory.

    Args:
        module: The layer.
        arguments: Its inputs, by the names of `Attention.forward`.
        limit_bytes: Memory for scores and activations of one block; one query of one batch row always runs.

    Returns:
        The outputs, on the CPU.
    """
    batch = arguments["query"].shape[0]
    rows = max(1, limit_bytes // _bytes_per_row(module, arguments))
    blocks = []
    for start in range(0, batch, rows):
        taken = _batch_slice(arguments, slice(start, start + rows))
        with QueriesInBlocks(limit_bytes):
            blocks.append([output.cpu() for output in run_module(module, taken)])
    return tuple(torch.cat(parts) for parts in zip(*blocks, strict=True))


def _bytes_per_row(module: Attention, arguments: dict[str, Tensor]) -> int:
    spec = module.spec
    sizes = {"B": 1, "S": arguments["query"].shape[1]}
    if spec.cache == "dynamic":
        sizes["P"] = arguments["past_key"].shape[2]
    elif spec.cache == "preallocated":
        sizes["T"] = arguments["key_cache"].shape[2]
    elif spec.is_cross:
        sizes["T"] = arguments["key"].shape[1]
    return oracle_bytes(spec, sizes)


def _batch_slice(arguments: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {
        name: tensor if name == "attention_bias" else tensor[rows]  # which all rows share
        for name, tensor in arguments.items()
    }


class QueriesInBlocks(TorchFunctionMode):
    """Compute PyTorch's attention some queries at a time, where its scores would exceed a bound."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attention(*args, **kwargs)

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
        rows = max(1, self._limit_bytes // bytes_per_query)
        if rows >= S:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=attn_mask, is_causal=is_causal, **options
            )
        mask = causal_mask(S, T, q.device) if is_causal else attn_mask
        blocks = []
        for start in range(0, S, rows):
            queries = slice(start, start + rows)
            visible = mask if mask is None or mask.shape[-2] == 1 else mask[..., queries, :]
            blocks.append(
                F.scaled_dot_product_attention(q[..., queries, :], k, v, attn_mask=visible, **options)
            )
        return torch.cat(blocks, dim=-2)


# -- What is true of a user's module beyond its golden cases: its factory makes it again -----------


class FreshModuleCases:
    """Makes cases for the module of a bundle, on the CPU.

    Args:
        spec: The module.
        precision: Its precision.
        model: Its graph.
        known: Reads a golden case of the bundle, in which the module must still be what it was.

    Raises:
        DeployError: The factory is not here, or gives another module than that in the bundle.
    """

    def __init__(
        self, spec: ModuleSpec, precision: Precision, *, model: Path, known: Callable[[], GoldenCase]
    ) -> None:
        self._spec = spec
        # A mixed graph was made from the module in float32, and stands for it where budgets come from.
        self._user = reopen_user_module(spec, find_precision("fp32") if spec.mixed else precision)
        self._exported = exported_program(self._user)
        self._graph = load_graph(model) if spec.mixed else None
        _true_inside(self._exported, known(), ())

    def case(
        self,
        sizes: Mapping[str, int],
        *,
        seed: int,
        ragged: bool = False,
        past: int | None = None,
        probe: bool = False,
    ) -> GoldenCase:
        """Draw inputs and compute what is true of them; see `FreshCases.case`.

        Lengths and the fill of a cache are inputs of the module itself.
        """
        del ragged, past
        self._spec.check_sizes(sizes)
        name = f"fresh-{sizes_name(sizes)}-seed{seed}"
        with self._capture(seed) as capture:
            if probe:
                capture.change = partial(module_probe, self._spec)
            return capture.capture(name, sizes)

    def trace(self, planned: PlannedTrace, *, seed: int) -> DecodeTrace:
        """Draw tokens and compute what decoding must give."""
        with self._capture(seed) as capture:
            return capture.trace(self._spec, planned)

    def _capture(self, seed: int) -> ModuleCapture:
        if self._graph is None:
            return ModuleCapture(self._user, self._exported, seed)
        return MixedCapture(self._user, self._exported, seed, self._graph)


class ProgramValues:
    """What is true of values inside the module of a bundle.

    Args:
        spec: The module.
        precision: Its precision.

    Raises:
        DeployError: The factory is not here, or gives other weights than those in the bundle.
    """

    def __init__(self, spec: ModuleSpec, precision: Precision) -> None:
        # A mixed graph was made from the module in float32, and its values have the names of that program.
        own = find_precision("fp32") if spec.mixed else precision
        self._exported = exported_program(reopen_user_module(spec, own))

    def at(self, case: GoldenCase, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Values of the graph in FP64, by their names; what the program does not compute is left out."""
        known = [name for name in names if self._exported.node_of(name) is not None]
        return _true_inside(self._exported, case, known)


def _true_inside(exported: ExportedModule, case: GoldenCase, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Values of the program in FP64, which must give what it gave when the case was captured."""
    inputs = {name: tensor_from_numpy(array) for name, array in case.inputs.items()}
    outputs, kept = run_program(exported, inputs, keep=names)
    _refuse_another_module(case, {name: to_numpy(tensor) for name, tensor in outputs.items()})
    return {name: to_numpy(tensor) for name, tensor in kept.items()}


def _refuse_another_module(case: GoldenCase, outputs: Mapping[str, np.ndarray]) -> None:
    """The weights may be the same, and what the factory's file does with them not."""
    for name, oracle in case.oracle.items():
        found = outputs.get(name)
        if (
            found is None
            or found.shape != oracle.shape
            or not np.allclose(found, oracle, rtol=1e-6, atol=1e-9)
        ):
            raise BundleError(
                "The factory's module computes something else now than when it was exported.",
                got=f"output {name} of golden case {case.name}",
                hint="export again",
            )


# -- Probe inputs: large tokens where a mask, a window or a cache ends -----------------------------

# A key this many times as large dominates the heads in which it is attended: whether a query attends to it,
# and at which position, shows in the output at any length. Among random keys it is one of thousands.
_LOUDNESS = 4.0
_CANDIDATES = 64


def _edges(end: int, length: int, window: int | None) -> list[int]:
    """Positions at which it shows what is attended, where `end` of `length` keys are valid."""
    wanted = [end - 1, end, (end - 1) // 2, 0]
    wanted += [end - window, end - window - 1] if window is not None else []
    return sorted({position for position in wanted if 0 <= position < length})


def _by_self_score(layer: Attention, x: Tensor) -> Tensor:
    """Which of the first tokens attend to themselves in the most heads, the best first. [B, n]."""
    spec, few = layer.spec, x[:, :_CANDIDATES]
    parameter = next(layer.parameters())
    with torch.inference_mode():
        q, k, _ = layer.project(few.to(parameter), None, None)
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
            tensor[b, edges] *= _LOUDNESS
        for cache in caches:
            T = cache.shape[2]
            valid = int(feeds["lengths"][b]) if "lengths" in feeds else T
            cache[b, :, [at for at in _edges(valid, T, spec.window) if at < valid]] *= _LOUDNESS
            if "lengths" in feeds:
                cache[b, :, valid + S :] *= _LOUDNESS  # what is behind the valid entries must not be read
    return loud


def module_probe(spec: ModuleSpec, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs of a module, with large tokens in what may be hidden states: float [B, S, E]."""
    loud = dict(inputs)
    for tensor in spec.inputs:
        if tensor.kind == FLOAT and len(tensor.dims) == 3 and isinstance(tensor.dims[1], str):
            changed = loud[tensor.name].clone()
            changed[:, _edges(changed.shape[1], changed.shape[1], None)] *= _LOUDNESS
            loud[tensor.name] = changed
    return loud


# -- Fresh cases: new inputs at any sizes, with their FP64 oracle ----------------------------------

_GIB = 1 << 30
# For the scores and activations of the oracle; what the device has besides is for weights and results.
ORACLE_BYTES = {"cpu": 2 * _GIB, "cuda": 16 * _GIB}


class CaseMaker(Protocol):
    """Draws new cases for the model of a bundle."""

    def case(
        self,
        sizes: Mapping[str, int],
        *,
        seed: int,
        ragged: bool = False,
        past: int | None = None,
        probe: bool = False,
    ) -> GoldenCase:
        """Draw inputs and compute the expected results."""

    def trace(self, planned: PlannedTrace, *, seed: int) -> DecodeTrace:
        """Draw tokens and compute what decoding must give."""


def fresh_cases(bundle: Bundle, device: str) -> CaseMaker:
    """Whoever draws new cases for a bundle: a layer is computed on the device, a user's module on the CPU."""
    spec = bundle.manifest.spec
    if isinstance(spec, ModuleSpec):
        smallest = min(bundle.manifest.golden, key=lambda entry: math.prod(entry.sizes.values()))
        known = partial(read_case, bundle, smallest)
        return FreshModuleCases(spec, bundle.manifest.precision, model=bundle.model_path, known=known)
    return FreshCases(bundle, device)


class FreshCases:
    """Makes cases for the layer of a bundle, with its own weights.

    Args:
        bundle: The bundle.
        device: Where the module and its FP64 twin run.
        oracle_bytes: Memory that the oracle may take besides its weights; see `ORACLE_BYTES`.
    """

    def __init__(self, bundle: Bundle, device: str, *, oracle_bytes: int | None = None) -> None:
        self.spec, self.precision = attention_spec(bundle), bundle.manifest.precision
        self._module = module_from_bundle(bundle, path="plain", device=device)
        limit = oracle_bytes or ORACLE_BYTES[torch.device(device).type]
        self._run_oracle = partial(run_in_blocks, limit_bytes=limit)

    def case(
        self,
        sizes: Mapping[str, int],
        *,
        seed: int,
        ragged: bool = False,
        past: int | None = None,
        probe: bool = False,
    ) -> GoldenCase:
        """Draw inputs and compute what is true of them.

        Args:
            sizes: A size for every axis of the spec.
            seed: Seed of the inputs; the same seed at the same sizes draws the same.
            ragged: Whether lengths go down to 1 and 0, where the layer has lengths.
            past: Valid entries of a preallocated cache in every batch element; default: drawn.
            probe: Whether tokens are large where masks, windows and caches end.

        Raises:
            SpecError: The sizes, or that many rows, are not for this layer.
            ExportError: The module itself overflows on these inputs.
            DeployError: They do not fit the device's memory.
        """
        self.spec.check_sizes(sizes)
        if past is not None:
            past_keys(self.spec, sizes, [past] * sizes["B"])  # raises where they do not fit
        at = sizes_name(sizes)
        name = f"fresh-{at}-seed{seed}{'-ragged' if ragged else ''}"
        capture = GoldenCapture(
            self._module,
            self.precision,
            seed,
            oracle=self._twin,
            run_oracle=self._run_oracle,
            change=partial(layer_probe, self.spec, layer=self._twin) if probe else dict,
        )
        try:
            case = capture.capture(PlannedCase(name=name, sizes=dict(sizes), ragged=ragged, past=past))
        except torch.OutOfMemoryError as error:
            raise DeployError(
                "There is no room to compute what is true at these sizes.", got=at, hint="smaller sizes"
            ) from error
        refuse_overflow(case, self.precision, self._module)
        return case

    @cached_property
    def _twin(self) -> Attention:
        return fp64_twin(self._module)

    def trace(self, planned: PlannedTrace, *, seed: int) -> DecodeTrace:
        """Draw tokens, decode with the module, and compute the whole sequence in FP64.

        Raises:
            DeployError: The layer's axes or its cache do not allow it, or memory does not.
        """
        capture = TraceCapture(
            self._module, self.precision, seed, run_oracle=self._run_oracle, most_tokens=_CHUNK
        )
        try:
            return capture.capture(planned.name, len(planned.prompt), planned.prompt, planned.steps)
        except torch.OutOfMemoryError as error:
            raise DeployError(
                "The tokens do not fit the device's memory.",
                got=planned.name,
                hint="a smaller batch, or a shorter prompt",
            ) from error


# -- Fresh decode traces, longer than those of a bundle --------------------------------------------

_CHUNK = 256  # tokens of a prompt that the module takes at once: it keeps all their scores


def fresh_trace(
    bundle: Bundle, *, batch: int, prompt: int, steps: int, seed: int, device: str = "cuda"
) -> DecodeTrace:
    """Draw tokens and compute what decoding must give.

    Args:
        bundle: The bundle of a model with a KV cache.
        batch: The batch size; all prompts have one length.
        prompt: Tokens of the prompt.
        steps: Single tokens behind it.
        seed: Seed of the tokens.
        device: Where a catalog layer is computed: `cpu` or `cuda`.

    Raises:
        DeployError: The model's axes or its cache do not allow it, or memory does not.
    """
    name = f"steps-B{batch}-prompt{prompt}-steps{steps}"
    planned = PlannedTrace(name=name, prompt=(prompt,) * batch, steps=steps)
    check_steps(bundle.manifest.spec, np.array(planned.prompt, np.int32), steps)
    return fresh_cases(bundle, device).trace(planned, seed=seed)
