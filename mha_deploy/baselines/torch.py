"""PyTorch on a GPU as a runner: eager, SDPA by kernel, torch.compile; and its profiler."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, supported_activities

from mha_deploy.baselines.fresh import attention_spec, check_device, module_from_bundle
from mha_deploy.bundle.folder import Bundle
from mha_deploy.errors import BackendUnavailable, DeployError, is_user_error, nearest, text_of_error
from mha_deploy.exporter.oracle import Intercept, tensors_in
from mha_deploy.exporter.own_model import reopen_user_module
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import CACHES, LENGTHS, PAST, TensorSpec, refuse_overflow
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import (
    Attention,
    Heads,
    attend,
    brought,
    merge_causal,
    merge_heads,
    padding_mask,
    rotate_heads,
    split_heads,
    visible_from,
)
from mha_deploy.reference.inputs import call_arguments, tensor_from_numpy, to_numpy
from mha_deploy.runtime.cuda import Stream
from mha_deploy.runtime.gpu import GpuRunner, Prepared
from mha_deploy.runtime.runner import Arrays, TensorInfo
from mha_deploy.runtime.timing import KernelTime
from mha_deploy.runtime.user_code import user_code, where_is

# -- Why PyTorch did not run a layer, in words that can be acted on --------------------------------

_NO_KERNEL = ("No available kernel", "No viable backend")
_COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
_PLACE_IN_SOURCE = " (Triggered internally"
# Of kernels that were not requested, and headings without a reason.
_NO_REASON = ("runtime disabled", "not used because")


def is_refusal(error: Exception, *, compiled: bool) -> bool:
    """Whether PyTorch has no kernel or no compiler for a layer, whoever called it."""
    if any(words in text_of_error(error) for words in _NO_KERNEL):
        return True
    return compiled and type(error).__module__.startswith(_COMPILERS)


def explain_refusal(name: str, error: Exception, warnings: Iterable[str], *, compiled: bool) -> DeployError:
    """The error for one that PyTorch raised; for a kernel that it refuses, warnings hold the reasons."""
    if isinstance(error, DeployError):
        return error
    first_line = (str(error).strip() or type(error).__name__).partition("\n")[0]
    if any(words in str(error) for words in _NO_KERNEL):
        texts = dict.fromkeys(text.partition(_PLACE_IN_SOURCE)[0].strip() for text in warnings)
        reasons = [text for text in texts if not any(words in text for words in _NO_REASON)]
        what, hint = f"{name} has no kernel for these inputs.", "another baseline; `sdpa` lets PyTorch choose"
        return DeployError(what, got="; ".join(reasons or texts) or first_line, hint=hint)
    if compiled and type(error).__module__.startswith(_COMPILERS):
        hint = "torch.compile needs Triton and a C compiler"
        return BackendUnavailable(f"{name} cannot compile the layer here.", got=first_line, hint=hint)
    return DeployError(
        f"{name} failed on these inputs.", got=first_line, hint="smaller inputs, or another --runtime"
    )


# -- A layer as it is served: caches in place, masks and tables computed once per model ------------


class ServedLayer(nn.Module):
    """A layer as a tuned PyTorch model runs it; its calls take and return what those of the layer do.

    A preallocated cache is written in place. Whether the new tokens fit is not checked: the lengths are on
    the device. The kernel is the one that PyTorch's fused attention may use, compiled in; None: its choice.
    """

    def __init__(self, layer: Attention, kernel: SDPBackend | None = None) -> None:
        super().__init__()
        self.layer, self.kernel = layer, kernel

    def prepare(self, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a model computes once for all its layers: `mask`, `positions`, `cos`, `sin`, `attending`."""
        prepared = self._prepared(arguments)
        mask = prepared.get("mask")
        if mask is not None and mask.dtype == torch.bool:
            B, S = arguments["query"].shape[:2]
            prepared["mask"] = mask = mask.expand(B, 1, S, mask.shape[-1]).contiguous()
        if mask is not None and self.layer.spec.cache == "none":
            attending = (mask if mask.dtype == torch.bool else ~mask.isneginf()).any(-1, keepdim=True)
            if not attending.all():
                prepared["attending"] = attending
        return {**arguments, **prepared}

    def _prepared(self, arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        spec, query, past = self.layer.spec, arguments["query"], 0
        S, mask = query.shape[1], arguments.get("attention_bias")
        if spec.cache == "preallocated":
            held = {name: arguments.get(name) for name in (CACHES[0], LENGTHS)}
            key_cache, lengths = brought(spec.name, **held)
            positions = lengths.long()[:, None] + torch.arange(S, device=query.device)
            mask = visible_from(positions, key_cache.shape[2], spec.window)[:, None]
        else:
            if spec.cache == "dynamic":
                past = brought(spec.name, past_key=arguments.get("past_key"))[0].shape[2]
            T = past + arguments.get("key", query).shape[1]
            positions = torch.arange(past, past + S, device=query.device)
            if "key_lengths" in arguments:
                mask = padding_mask(arguments["key_lengths"], T)
            heads = self._heads(mask, past)
            if (mask is not None or not heads.is_triangle) and not heads.hides_nothing(S, T):
                mask = merge_causal(mask, S, T, query.device, past, spec.window)
        prepared = {"positions": positions} if mask is None else {"positions": positions, "mask": mask}
        if spec.rope is not None:
            prepared["cos"], prepared["sin"] = (table[positions] for table in self.layer.rotary)
        return prepared

    def _heads(self, mask: Tensor | None, past: int = 0, *, is_whole: bool = False) -> Heads:
        """The layout; a whole mask holds causality and window already."""
        spec, in_mask = self.layer.spec, is_whole and mask is not None
        causal = not in_mask and (spec.causal or spec.cache != "none")
        layout = self.layer._layout(causal=causal, past=past)
        window = None if in_mask else spec.window
        return replace(layout, window=window, attends_to_itself=spec.cache != "none")

    def forward(self, query: Tensor, **others: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Compute the layer, as `Attention.forward` describes it, also with what `prepare` adds."""
        spec, layer, past, arguments = self.layer.spec, self.layer, 0, {"query": query, **others}
        is_prepared = "positions" in arguments
        found = arguments if is_prepared else self._prepared(arguments)
        positions, mask, cos, sin = (found.get(name) for name in ("positions", "mask", "cos", "sin"))
        q, k, v = layer.project(query, arguments.get("key"), arguments.get("value"))
        if cos is not None and sin is not None:
            q, k = rotate_heads(spec, q, cos, sin), rotate_heads(spec, k, cos, sin)
        if spec.cache == "preallocated":
            caches = brought(spec.name, **{name: arguments.get(name) for name in CACHES})
            batch = torch.arange(query.shape[0], device=query.device)[:, None]
            for cache, entries in zip(caches, (k, v), strict=True):
                # An index_put: torch.compile does this in place; for a scatter it copies the buffer.
                cache[batch, :, positions] = entries.unflatten(-1, (spec.Hkv, spec.D))
            k, v = (merge_heads(cache) for cache in caches)
        elif spec.cache == "dynamic":
            pasts = brought(spec.name, **{name: arguments.get(name) for name in PAST})
            past = pasts[0].shape[2]
            k, v = (torch.cat((merge_heads(old), n), dim=1) for old, n in zip(pasts, (k, v), strict=True))
            caches = [split_heads(k, spec.Hkv), split_heads(v, spec.Hkv)]
        layout = self._heads(mask, past, is_whole=True)
        if is_prepared:  # queries without a key are in `attending`
            layout = replace(layout, attends_to_itself=True)
        with nullcontext() if self.kernel is None else sdpa_kernel(self.kernel):
            heads, weights = attend(q, k, v, mask, layout, layer.path)
        if "attending" in arguments:
            heads = merge_heads(split_heads(heads, spec.Hq).masked_fill(~arguments["attending"], 0.0))
        output = layer.combine(heads, query)
        if spec.cache != "none":
            return (output, *caches)
        return output if weights is None else (output, weights)


def side_by_side(cache: Tensor) -> Tensor:
    """The same cache [B, Hkv, length, D], in memory as [B, length, Hkv, D].

    The heads of a token lie side by side then, as projections write them, and merging them copies nothing;
    every kernel of PyTorch's fused attention reads them so.
    """
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


# -- The baselines: how PyTorch runs one layer or module, by name, on one set of weights ---------------


@dataclass(frozen=True, kw_only=True)
class TorchBaseline:
    """How PyTorch runs a model.

    A tuned layer has its projections packed where they can be, and its mask and rotary tables computed before
    the call; a user's module stays as it is written.
    """

    path: str  # how attention is computed; see `reference.attention`
    graph: bool  # a timed call is the launch of a CUDA graph
    kernel: SDPBackend | None = None  # the one that PyTorch's fused attention may use; None: its choice
    compiled: bool = False
    packed: bool = False  # one matmul makes queries, keys and values, whatever the layer has
    tuned: bool = False
    autotune: bool = False  # torch.compile tries its own GEMM kernels (`max-autotune-no-cudagraphs`)


_TUNED = TorchBaseline(path="sdpa", graph=True, compiled=True, tuned=True)
_BY_NAME = {
    "eager": TorchBaseline(path="plain", graph=False),
    "eager+graph": TorchBaseline(path="plain", graph=True),
    "sdpa": TorchBaseline(path="sdpa", graph=False),
    "sdpa-cudnn": TorchBaseline(path="sdpa", graph=True, kernel=SDPBackend.CUDNN_ATTENTION),
    "sdpa-cudnn-packed": TorchBaseline(
        path="sdpa", graph=True, kernel=SDPBackend.CUDNN_ATTENTION, packed=True
    ),
    "sdpa-flash": TorchBaseline(path="sdpa", graph=True, kernel=SDPBackend.FLASH_ATTENTION),
    "sdpa-efficient": TorchBaseline(path="sdpa", graph=True, kernel=SDPBackend.EFFICIENT_ATTENTION),
    "sdpa-math": TorchBaseline(path="sdpa", graph=True, kernel=SDPBackend.MATH),
    "compile": TorchBaseline(path="sdpa", graph=True, compiled=True),
    "compile-tuned": _TUNED,
    "compile-cudnn": replace(_TUNED, kernel=SDPBackend.CUDNN_ATTENTION),
    "compile-flash": replace(_TUNED, kernel=SDPBackend.FLASH_ATTENTION),
    "compile-autotune": replace(_TUNED, autotune=True),
}
BASELINES = tuple(_BY_NAME)


def find_baseline(name: str) -> TorchBaseline:
    """Look a baseline up by name."""
    if name not in _BY_NAME:
        raise DeployError("No such PyTorch baseline.", got=name, hint=nearest(name, BASELINES))
    return _BY_NAME[name]


class TorchModels:
    """The layer of a bundle on one device, its weights there once for all the baselines to run it."""

    def __init__(self, bundle: Bundle, device: str = "cuda") -> None:
        self.spec, self.precision = attention_spec(bundle), bundle.manifest.precision
        self.device = device
        self._layer = module_from_bundle(bundle, device=device)
        self._can_pack = not self.spec.is_cross and self.spec.projections != "packed"

    def module(self, path: str, *, packed: bool = False) -> Attention:
        """The layer with its attention computed along a path; packed: with one projection, not three."""
        if packed and not self._can_pack:
            got = "cross attention" if self.spec.is_cross else "packed projections"
            hint = "the baseline sdpa-cudnn"
            raise DeployError(
                "The layer does not have three projections of one input to pack.", got=got, hint=hint
            )
        return (self._packed if packed else self._layer).variation(path=path)

    @cached_property
    def _packed(self) -> Attention:
        spec, dtype = replace(self.spec, projections="packed"), getattr(torch, self.precision.torch_name)
        return build_module(spec, weights=self._layer.state_dict(), dtype=dtype, device=self.device)

    def in_service(self, baseline: TorchBaseline) -> nn.Module:
        """The layer as it is run and timed: one with a cache decodes without needless copies of it."""
        layer = self.module(baseline.path, packed=baseline.packed or (baseline.tuned and self._can_pack))
        if self.spec.cache == "none" and not baseline.tuned:
            return layer
        return ServedLayer(layer, baseline.kernel if baseline.compiled else None)

    def arguments(self, feeds: Arrays) -> dict[str, Tensor]:
        """Inputs on the device, by the names that `in_service` calls them; each call has its own copies."""
        if self.spec.cache == "preallocated":  # the device does not check the lengths
            refuse_overflow(feeds["lengths"], feeds["x"].shape[1], feeds["key_cache"].shape[2])
        tensors = {name: tensor_from_numpy(array).to(self.device) for name, array in feeds.items()}
        laid_out = {name: side_by_side(tensors[name]) for name in (*PAST, *CACHES) if name in tensors}
        return call_arguments(self.spec, {**tensors, **laid_out})

    @property
    def parameter_bytes(self) -> int:
        """Memory of the weights."""
        return sum(parameter.nbytes for parameter in self._layer.parameters())


class UserModels:
    """A user's module on one device, made by its factory once for all the baselines to run it."""

    def __init__(self, bundle: Bundle, device: str = "cuda") -> None:
        check_device(device)
        self.spec, self.precision, self.device = bundle.manifest.spec, bundle.manifest.precision, device
        self._user = reopen_user_module(self.spec, self.precision, device=device)

    def in_service(self, baseline: TorchBaseline) -> nn.Module:
        """The module as it is run and timed."""
        if baseline.packed:
            raise DeployError(
                "Only the projections of a catalog layer can be packed.",
                got="packed",
                hint="leave packed out",
            )
        if baseline == _TUNED:
            raise DeployError("Only a catalog layer has a tuned form.", hint="the baseline `compile`")
        calls_sdpa = self._calls_sdpa  # the module is run in any case, so that a failure is explained
        needs_sdpa = baseline.kernel is not None or not baseline.compiled
        if baseline.path == "sdpa" and needs_sdpa and not calls_sdpa:
            what = "The module writes its attention out: there is no fused kernel to choose."
            raise DeployError(
                what,
                got="no call of scaled_dot_product_attention",
                hint="--runtime eager, or call scaled_dot_product_attention in the module",
            )
        return _Flat(self._user.module, baseline.kernel if baseline.compiled else None)

    def arguments(self, feeds: Arrays) -> dict[str, Tensor]:
        """Inputs on the device; each call has copies of its own."""
        return {name: tensor_from_numpy(array).to(self.device) for name, array in feeds.items()}

    @property
    def parameter_bytes(self) -> int:
        """Memory of the weights."""
        return self._user.weight_bytes

    @cached_property
    def _calls_sdpa(self) -> bool:
        hint = "create tensors on the device of the inputs, as in torch.arange(n, device=x.device)"
        what = f"The module does not run on {self.device}."
        guard = user_code(where_is(self._user.module.forward), what, hint=hint)
        with guard, torch.inference_mode(), _Detector() as detector:
            self._user.module(**self._user.examples)
        return detector.detected


class _Flat(nn.Module):
    """A module whose outputs are a flat tuple of tensors, whatever it nests them in."""

    def __init__(self, module: nn.Module, kernel: SDPBackend | None = None) -> None:
        super().__init__()
        self.module, self.kernel = module, kernel

    def forward(self, **inputs: Tensor) -> tuple[Tensor, ...]:
        with nullcontext() if self.kernel is None else sdpa_kernel(self.kernel):
            return tuple(tensors_in(self.module(**inputs)))


class _Detector(Intercept):
    """Detects whether PyTorch's fused attention is called."""

    detected = False

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        self.detected = self.detected or func is F.scaled_dot_product_attention
        return func(*args, **kwargs)


# -- PyTorch on a GPU behind the interface of every other runtime ---------------------------------------

Outputs = tuple[Tensor, ...]
Models = TorchModels | UserModels

_WARM_UP = 3
_SHAPES_COMPILED = 256  # past its own limit of 8, torch.compile gives up on a function


def models_of(bundle: Bundle) -> Models:
    """PyTorch's side of a bundle on the GPU: one of our own layers, or a user's module."""
    return (TorchModels if isinstance(bundle.manifest.spec, AttentionSpec) else UserModels)(bundle)


def open_torch_runner(baseline: str, source: Bundle | Models) -> TorchRunner:
    """Run a bundle in one baseline of PyTorch, or the models of one, whose weights several runners share."""
    check_device("cuda")
    find_baseline(baseline)
    return TorchRunner(models_of(source) if isinstance(source, Bundle) else source, baseline)


class TorchRunner(GpuRunner):
    """A layer or a user's module in PyTorch, in one of `BASELINES`."""

    def __init__(self, models: Models, baseline: str) -> None:
        check_device("cuda")
        super().__init__()
        self._models, self._baseline = models, find_baseline(baseline)
        self.title = f"torch {baseline}"
        self.name = f"torch {'.'.join(torch.__version__.split('.')[:2])} {baseline}"
        self.graph = self._baseline.graph
        self.inputs = _tensor_infos(models.spec.inputs, models.precision)
        self.outputs = _tensor_infos(models.spec.outputs, models.precision)
        self._module: Callable[..., Any] = models.in_service(self._baseline)
        is_served = self._baseline.tuned and isinstance(self._module, ServedLayer)
        self._served: Any = self._module if is_served else None
        if self._baseline.compiled:
            # fullgraph: what cannot be compiled is an error, not a return to eager.
            mode = "max-autotune-no-cudagraphs" if self._baseline.autotune else None
            self._module = torch.compile(self._module, dynamic=False, fullgraph=True, mode=mode)
        torch.cuda.synchronize()  # the weights came over another stream
        self._torch_stream = torch.cuda.Stream()
        self.stream = Stream(self._torch_stream.cuda_stream)

    def _run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        with torch.inference_mode(), torch.cuda.stream(self._torch_stream), self._explained():
            return self._named(self._call(self._arguments(feeds)))

    @contextmanager
    def _prepare(self, feeds: Arrays, slots: int) -> Iterator[Prepared]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.inference_mode(), torch.cuda.stream(self._torch_stream):
            with self._explained():
                arguments = [self._arguments(feeds) for _ in range(slots)]
                for _ in range(_WARM_UP):  # what is set up at the first call must not be captured
                    self._call(arguments[0])
                torch.cuda.synchronize()
                # One for all: the graphs never run at the same time.
                pool = torch.cuda.graph_pool_handle() if self.graph else None
                calls = [_Call(partial(self._call, own), pool, self._torch_stream) for own in arguments]
                for call in calls:  # every slot holds a result from here on
                    call.launch()
                torch.cuda.synchronize()
            needed = torch.cuda.max_memory_allocated() - before + self._models.parameter_bytes
            try:
                yield Prepared(
                    launch=lambda slot: calls[slot].launch(),
                    results=lambda slot: self._named(calls[slot].launched_again()),
                    memory_bytes=needed,
                )
            finally:
                torch.cuda.synchronize()

    def _call(self, arguments: dict[str, Tensor]) -> Outputs:
        kernel = self._baseline.kernel
        if self._baseline.compiled:  # a kernel is compiled in
            settings = torch._dynamo.config.patch(recompile_limit=_SHAPES_COMPILED)
        else:
            settings = nullcontext() if kernel is None else sdpa_kernel(kernel)
        with settings:
            outputs = self._module(**arguments)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Make one error of what PyTorch raises and of the warnings with its reasons."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with user_code(timed=False, mixed=True):
                try:
                    yield
                except Exception as error:
                    compiled = self._baseline.compiled
                    if is_user_error(error) and not is_refusal(error, compiled=compiled):
                        raise
                    texts = [str(warning.message) for warning in caught]
                    raise explain_refusal(self.name, error, texts, compiled=compiled) from error

    def _arguments(self, feeds: Arrays) -> dict[str, Tensor]:
        arguments = self._models.arguments(feeds)
        return arguments if self._served is None else self._served.prepare(arguments)

    def _call_bytes(self, feeds: Arrays, results: Arrays) -> int:
        """A preallocated cache is written in place: what comes out of it takes no memory of its own."""
        shared = results if self._models.spec.cache == "preallocated" else {}
        once = sum(array.nbytes for name, array in shared.items() if name != "output")
        return super()._call_bytes(feeds, results) - once

    def _named(self, outputs: Outputs) -> dict[str, np.ndarray]:
        return {name: to_numpy(tensor) for name, tensor in zip(self.outputs, outputs, strict=True)}

    def close(self) -> None:
        """Let go of the module; its weights stay with the models."""
        self.__dict__.pop("_module", None)
        self._served = None
        torch.cuda.empty_cache()


class _Call:
    """A call launched from Python, kernel by kernel; with a pool, captured in a CUDA graph and replayed."""

    def __init__(self, run: Callable[[], Outputs], pool: Any = None, stream: Any = None) -> None:
        self._run, self._graph = run, None
        self._latest: Outputs = ()
        if pool is not None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._latest = run()  # which every replay writes to

    def launch(self) -> None:
        if self._graph is None:
            self._latest = self._run()
        else:
            self._graph.replay()

    def launched_again(self) -> Outputs:
        """The outputs, computed anew: graphs of one pool may have written over each other's since."""
        self.launch()
        torch.cuda.synchronize()
        return self._latest


def _tensor_infos(tensors: tuple[TensorSpec, ...], precision: Precision) -> dict[str, TensorInfo]:
    return {each.name: TensorInfo(dtype=precision.numpy_of(each.kind), dims=each.dims) for each in tensors}


# -- Which kernels take the time, whichever library of the process launched them -------------------


def kernel_times(
    launch: Callable[[], object], synchronize: Callable[[], object] = torch.cuda.synchronize, calls: int = 3
) -> list[KernelTime]:
    """The mean times of the kernels of a call, copies and fills included, the longest first."""
    if ProfilerActivity.CUDA not in supported_activities():
        raise BackendUnavailable("PyTorch cannot profile a GPU here.", hint="mha-deploy doctor")
    launch()
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            launch()
        synchronize()
    events = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
    if not events:
        hint = "another profiler may hold the GPU, or CUPTI is missing"
        raise DeployError("The profiler detected no kernel.", hint=hint)
    return mean_by_name(((event.name, event.time_range.elapsed_us()) for event in events), calls)


def mean_by_name(runs: Iterable[tuple[str, float]], calls: int) -> list[KernelTime]:
    """Add up the runs of each kernel, and divide by the number of calls; the longest first."""
    by_name: dict[str, list[float]] = {}
    for name, microseconds in runs:
        by_name.setdefault(name, []).append(microseconds)
    means = [
        KernelTime(name=name, calls=len(spent) / calls, microseconds=sum(spent) / calls)
        for name, spent in by_name.items()
    ]
    return sorted(means, key=lambda kernel: -kernel.microseconds)


# -- Attention alone, for the table of masks ---------------------------------------------------------


def attention_alone(
    arrays: Arrays, *, Hq: int, Hkv: int, scale: float, causal: bool, path: str, device: str
) -> np.ndarray:
    """The attention of PyTorch on `q`, `k`, `v` and `mask`, without a layer around it."""
    tensors = {role: tensor_from_numpy(array).to(device) for role, array in arrays.items()}
    heads = Heads(Hq=Hq, Hkv=Hkv, scale=scale, causal=causal)
    try:
        with torch.inference_mode():
            y, _ = attend(tensors["q"], tensors["k"], tensors["v"], tensors.get("mask"), heads, path)
    except (RuntimeError, NotImplementedError) as error:
        raise DeployError(
            "PyTorch refuses the case.",
            got=str(error).splitlines()[0],
            hint="other sizes, or another --runtime",
        ) from error
    return to_numpy(y)
