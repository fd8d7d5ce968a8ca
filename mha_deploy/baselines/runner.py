"""PyTorch on a GPU behind the interface of every other runtime, so that it is judged and timed alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from mha_deploy.backends.cuda import Stream
from mha_deploy.backends.gpu import GpuRunner, Prepared
from mha_deploy.backends.runner import Arrays, TensorInfo
from mha_deploy.baselines.module import check_device
from mha_deploy.baselines.refusal import explain_refusal
from mha_deploy.baselines.user_models import UserModels
from mha_deploy.baselines.ways import TorchModels, find_way
from mha_deploy.bundle import Bundle
from mha_deploy.errors import exit_as_error
from mha_deploy.export.inputs import to_numpy
from mha_deploy.module_spec import ModuleSpec
from mha_deploy.precision import Precision
from mha_deploy.spec import FLOAT, TensorSpec

Outputs = tuple[Tensor, ...]

_WARM_UP = 3
_SHAPES_COMPILED = 256  # past its own limit of 8, torch.compile gives up on a function


Models = TorchModels | UserModels


def models_of(bundle: Bundle) -> Models:
    """PyTorch's side of a bundle on the GPU: one of our own layers, or a user's module."""
    spec = bundle.manifest.spec
    if isinstance(spec, ModuleSpec):
        return UserModels(spec, bundle.manifest.precision)
    return TorchModels(bundle)


def open_torch_runner(way: str, source: Bundle | Models) -> TorchRunner:
    """Run a model in PyTorch, one way.

    Args:
        way: One of `ways.WAYS`.
        source: A bundle, or the models of one, whose weights several runners share.
    """
    check_device("cuda")
    find_way(way)
    return TorchRunner(models_of(source) if isinstance(source, Bundle) else source, way)


class TorchRunner(GpuRunner):
    """A layer or a user's module in PyTorch.

    Args:
        models: The model on the GPU.
        way: How to run it, one of `ways.WAYS`.
    """

    def __init__(self, models: Models, way: str) -> None:
        check_device("cuda")
        super().__init__()
        self._models, self._way = models, find_way(way)
        self.name = f"torch {'.'.join(torch.__version__.split('.')[:2])} {way}"
        self.graph = self._way.graph
        self.inputs = _tensor_infos(models.spec.inputs, models.precision)
        self.outputs = _tensor_infos(models.spec.outputs, models.precision)
        self._module: Callable[..., Any] = models.in_service(self._way)
        if self._way.compiled:
            # fullgraph: what cannot be compiled is an error, not a way back to eager.
            self._module = torch.compile(self._module, dynamic=False, fullgraph=True)
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
                calls = self._calls(feeds, slots)
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

    def _calls(self, feeds: Arrays, slots: int) -> list[_Call]:
        arguments = [self._arguments(feeds) for _ in range(slots)]
        for _ in range(_WARM_UP):  # what is set up at the first call must not be captured
            self._call(arguments[0])
        torch.cuda.synchronize()
        if not self.graph:
            return [_Call(self._module, own) for own in arguments]
        pool = torch.cuda.graph_pool_handle()  # one for all: the graphs never run at the same time
        return [_CapturedCall(self._call, own, pool, self._torch_stream) for own in arguments]

    def _call(self, arguments: dict[str, Tensor]) -> Outputs:
        with self._settings():
            return _as_tuple(self._module(**arguments))

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """What must hold while PyTorch chooses kernels; a captured call has chosen."""
        with ExitStack() as stack:
            if self._way.kernel is not None:
                stack.enter_context(sdpa_kernel(self._way.kernel))
            if self._way.compiled:
                stack.enter_context(torch._dynamo.config.patch(recompile_limit=_SHAPES_COMPILED))
            yield

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what PyTorch raises, with the warnings in which it says why, into one error."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                with exit_as_error():
                    yield
            except Exception as error:
                texts = [str(warning.message) for warning in told]
                raise explain_refusal(self.name, error, texts, compiled=self._way.compiled) from error

    def _arguments(self, feeds: Arrays) -> dict[str, Tensor]:
        return self._models.arguments(feeds)

    def _call_bytes(self, feeds: Arrays, results: Arrays) -> int:
        """A static cache is written in place: what comes out of it takes no memory of its own."""
        shared = results if self._models.spec.cache == "static" else {}
        once = sum(array.nbytes for name, array in shared.items() if name != "output")
        return super()._call_bytes(feeds, results) - once

    def _named(self, outputs: Outputs) -> dict[str, np.ndarray]:
        return {name: to_numpy(tensor) for name, tensor in zip(self.outputs, outputs, strict=True)}

    def close(self) -> None:
        """Let go of the module; its weights stay with the models."""
        self.__dict__.pop("_module", None)
        torch.cuda.empty_cache()


class _Call:
    """A call launched from Python, kernel by kernel."""

    def __init__(self, module: Callable[..., Any], arguments: dict[str, Tensor]) -> None:
        self._module, self._arguments = module, arguments
        self._latest: Any = ()

    def launch(self) -> None:
        self._latest = self._module(**self._arguments)

    def launched_again(self) -> Outputs:
        """The outputs, computed anew: graphs of one pool may have written over each other's since."""
        self.launch()
        torch.cuda.synchronize()
        return _as_tuple(self._latest)


class _CapturedCall(_Call):
    """A call captured in a CUDA graph, which writes to the same outputs each time."""

    def __init__(
        self,
        call: Callable[[dict[str, Tensor]], Outputs],
        arguments: dict[str, Tensor],
        pool: Any,
        stream: torch.cuda.Stream,
    ) -> None:
        super().__init__(call, arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._latest = call(arguments)
        self._replay = graph.replay

    def launch(self) -> None:
        self._replay()


def _as_tuple(outputs: Any) -> Outputs:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _tensor_infos(tensors: tuple[TensorSpec, ...], precision: Precision) -> dict[str, TensorInfo]:
    return {
        tensor.name: TensorInfo(
            dtype=precision.numpy if tensor.kind == FLOAT else np.dtype(tensor.kind), dims=tensor.dims
        )
        for tensor in tensors
    }
