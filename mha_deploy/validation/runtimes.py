"""Which runtimes take part in a validation, and which are not available here."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx
import onnx_ir as ir
from msgspec import Struct

from mha_deploy.bundle.cases import GoldenCase
from mha_deploy.bundle.folder import Bundle, open_bundle
from mha_deploy.engine.engine import (
    Engine,
    engines_of,
    open_engine,
    open_engine_runner,
    reasons_not_to_run,
)
from mha_deploy.environment import can_import
from mha_deploy.errors import BackendUnavailable, DeployError, nearest
from mha_deploy.graph.canonical import open_checked
from mha_deploy.graph.file import graph_from_proto, load_graph
from mha_deploy.judge import Accumulation
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.model.precision import Precision
from mha_deploy.model.source import describe
from mha_deploy.runtime import RUNNERS, available_cpu_runtime, child, open_runner
from mha_deploy.runtime.cuda import find_gpu
from mha_deploy.runtime.gpu import GpuRunner
from mha_deploy.runtime.kserve import ServerRunner, is_server_url
from mha_deploy.runtime.polygraphy import PolygraphyRunner, is_polygraphy_runner
from mha_deploy.runtime.runner import Arrays, Runner
from mha_deploy.runtime.tensorrt.versions import LEAN, MODULES
from mha_deploy.runtime.timing import KernelTime
from mha_deploy.status import Word, means

# -- What only PyTorch can do in a validation: compute what is right for fresh inputs --------------

INSTALL = 'pip install "mha-deploy[export]"'


def refuse_without_torch(what: str, hint: str = INSTALL) -> None:
    """Refuse what only PyTorch can compute (the results expected `what`), where it is not installed."""
    if not can_import("torch"):
        problem = f"Only PyTorch can compute the results expected {what}."
        raise BackendUnavailable(problem, got="PyTorch is not installed", hint=hint)


def torch_device() -> str:
    """Where PyTorch computes here: `cuda` if there is a GPU."""
    return "cpu" if find_gpu() is None else "cuda"


# -- Which kernels take the time. PyTorch's profiler records every library's, TensorRT's too -------

_SHOWN = 12


def kernel_times(runner: Runner, case: GoldenCase) -> tuple[KernelTime, ...]:
    """The kernels of one call, longest first; none where there is no profiler to see them."""
    if not can_import("torch"):
        return ()
    return runner.apply(_profiled, dict(case.inputs), step="profiling its kernels")


def _profiled(runner: Runner, feeds: Arrays) -> tuple[KernelTime, ...]:
    """Runs where the runtime is: a profiler sees the kernels of its own process only."""
    if not isinstance(runner, GpuRunner):
        return ()
    from mha_deploy.baselines.torch import kernel_times as profiled

    return tuple(runner.watch(feeds, profiled)[:_SHOWN])


# -- Which runtimes take part: the graph in ONNX Runtime, the engines, and PyTorch's baselines -----


class Family(Word):
    """Whose a runtime is."""

    PYTORCH = "pytorch"
    ONNX_RUNTIME = "onnxruntime"
    TENSORRT = "tensorrt"
    ONNX = "onnx"
    SERVER = "server"


PYTORCH, ONNX_RUNTIME, TENSORRT, ONNX, SERVER = Family

# Named here as well, so that a machine without PyTorch can distinguish a wrong name from a missing package.
TORCH_BASELINES = (
    "eager", "eager+graph", "sdpa", "sdpa-cudnn", "sdpa-cudnn-packed", "sdpa-flash", "sdpa-efficient",
    "sdpa-math", "compile", "compile-tuned", "compile-cudnn", "compile-flash", "compile-autotune",
)  # fmt: skip
# Timed by default: the strongest ones, and eager. A validation takes minutes with all of them.
_ON_REQUEST = ("sdpa", "sdpa-cudnn-packed", "sdpa-math", "compile-flash", "compile-autotune")
DEFAULT_BASELINES = tuple(name for name in TORCH_BASELINES if name not in _ON_REQUEST)


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """One of the runtimes that can run the model."""

    name: str  # as it is written on a command line and in a report
    family: Family  # whose it is
    open: Callable[[], Runner]  # loads it; raises `DeployError` where it cannot run
    engine: Engine | None = None  # the engine, where it is one
    graph_runtime: str = ""  # what runs a graph of somebody else's; default: its name
    accumulate: str | None = None  # what its GEMMs accumulate in, where its owner states it
    digest: str = ""  # the hash of what was given to be judged, where it is a file
    is_subject: bool = False  # whether it was given to be judged: not to run a case is then a verdict on it

    @property
    def engine_name(self) -> str | None:
        """The name of its engine in the bundle; None where it is no engine of one."""
        return None if self.engine is None else self.engine.path.stem

    def accumulation(self, precision: Precision) -> Accumulation:
        """The type that its GEMMs may accumulate in, which sets the budget, and how that is known."""
        if precision.name != "fp16":
            return Accumulation.of_wide(precision)
        if self.accumulate is not None:
            return Accumulation(self.accumulate, f"as {self.name} states")
        if self.engine is not None:
            return self.engine.accumulation(precision)
        if self.family == PYTORCH:
            return Accumulation("fp32", "PyTorch accumulates in FP32")
        try:
            if (runtime := self.graph_runtime or self.name) in RUNNERS:
                return _measured_accumulation(runtime)
        except DeployError:  # opening it reports why
            pass
        return Accumulation("fp16", f"what computes {self.name} is not known")


@lru_cache
def _measured_accumulation(runtime: str) -> Accumulation:
    """The type that FP16 matmuls of a runner accumulate in: to 2048, FP16 can add no 1."""
    ones, K = 4095, 4096
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["": 23]>
        accumulation (float16[1,{K}] a, float16[{K},8] b) => (float16[1,8] y) {{y = MatMul(a, b)}}"""
    )
    a, b = np.ones((1, K), np.float16), np.ones((K, 8), np.float16)
    a[0, 0] = 2048
    with open_runner(runtime, model) as runner:
        found = float(runner.run({"a": a, "b": b})["y"][0, 0])
    kind = "fp32" if found > 2048 + ones / 2 else "fp16"
    why = f"{runner.name} accumulates in {kind.upper()}: 2048 and {ones:,} ones are {found:,.0f}"
    return Accumulation(kind, why)


class Unavailable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A runtime that was skipped, and why."""

    name: Annotated[str, means("the runtime or the engine")]
    reason: Annotated[str, means("why it was skipped")]


class RuntimeFinder:
    """Finds the runtimes that can validate a bundle on this machine."""

    def __init__(self, bundle: Bundle, *, engine: str | None = None) -> None:
        self.bundle, self._engine_name = bundle, engine
        self.absent: list[Unavailable] = []

    @cached_property
    def engines(self) -> list[Engine]:
        """The engines of the bundle, or the one requested; their plans are hashed, so only on request."""
        engines, name = engines_of(self.bundle.path), self._engine_name
        for engine in engines:
            engine.check_bundle(self.bundle.path)
        names = [engine.path.stem for engine in engines]
        if name is not None and name not in names:
            hint = nearest(name, names) if engines else f"mha-deploy build-engine {self.bundle.path}"
            raise DeployError("The bundle has no engine of that name.", got=name, hint=hint)
        return [engine for engine in engines if name in (None, engine.path.stem)]

    def look_for_engines(self) -> None:
        """Forget what was found: there may be a new engine."""
        vars(self).pop("engines", None)

    def named(self, name: str) -> Runtime:
        """The runtime of that name; refused where there is none."""
        if name in RUNNERS:
            return self._graph(name)
        if name in TORCH_BASELINES:
            return self._torch(name)
        engines = {engine.path.stem: engine for engine in self.engines}
        if name in engines:
            return self._engine(engines[name])
        if name in LEAN:
            return self._lean(name)
        if name in MODULES:
            hint = f"mha-deploy build-engine {self.bundle.path} --backend {name}"
            raise BackendUnavailable("The bundle has no engine of that name.", got=name, hint=hint)
        hint = nearest(name, [*RUNNERS, *TORCH_BASELINES, *engines, *LEAN])
        raise DeployError("No such runtime.", got=name, hint=hint)

    def graphs(self) -> list[Runtime]:
        """The graph in the runtime that checks it: on the GPU where that can be, else on the CPU."""
        cpu = self._graph(available_cpu_runtime(self.bundle.manifest.precision))
        return [cpu] if find_gpu() is None else [self._graph("ort-cuda"), cpu]

    def running_engines(self) -> list[Runtime]:
        """The engines that can run on this machine; the others are noted as absent."""
        found = []
        for engine in self.engines:
            reasons = reasons_not_to_run(engine)
            if reasons and self._engine_name is not None:
                self._engine(engine).open().close()  # requested by name: its own error says why not
            if reasons:
                self.absent.append(Unavailable(name=engine.path.stem, reason="; ".join(reasons)))
            else:
                found.append(self._engine(engine))
        return found

    def baselines(self) -> list[Runtime]:
        """PyTorch's baselines, where PyTorch and a GPU are here."""
        if find_gpu() is None:
            return []
        if not can_import("torch"):
            self.absent.append(Unavailable(name="PyTorch", reason="it is not installed here"))
            return []
        return [self._torch(baseline) for baseline in DEFAULT_BASELINES]

    def _graph(self, runtime: str) -> Runtime:
        family, open_ = ONNX if runtime == "onnx-reference" else ONNX_RUNTIME, partial(open_runner, runtime)
        return Runtime(name=runtime, family=family, open=partial(open_, self.bundle.model_path))

    def _engine(self, engine: Engine) -> Runtime:
        open_ = partial(open_engine_runner, engine)
        return Runtime(name=engine.path.stem, family=TENSORRT, open=open_, engine=engine)

    def _lean(self, runtime: str) -> Runtime:
        """The version-compatible engine of the bundle in a lean runtime."""
        found = [each for each in self.engines if each.manifest.options.get("version_compatible")]
        if len(found) != 1:
            problem = "A lean runtime runs one version-compatible engine."
            got = ", ".join(each.path.stem for each in found) or "the bundle has none"
            hint = "--engine NAME" if found else "mha-deploy build-engine DIR --version-compatible"
            raise DeployError(problem, got=f"{runtime}: {got}", hint=hint)
        (engine,) = found
        open_ = partial(open_engine_runner, engine, runtime=runtime)
        name = f"{engine.path.stem} in {runtime}"
        return Runtime(name=name, family=TENSORRT, open=open_, engine=engine)

    def _torch(self, baseline: str) -> Runtime:
        return Runtime(name=baseline, family=PYTORCH, open=partial(self._open_torch, baseline))

    def _open_torch(self, baseline: str) -> Runner:
        if not can_import("torch"):
            raise BackendUnavailable("PyTorch is not installed.", got=baseline, hint=INSTALL)
        title = f"PyTorch ({baseline})"
        return child.open_isolated(child.PYTORCH, title, _open_torch, baseline, self.bundle.path)


def _open_torch(baseline: str, bundle: Path) -> Runner:
    from mha_deploy.baselines.torch import open_torch_runner

    return open_torch_runner(baseline, _torch_models(bundle))


@lru_cache(maxsize=1)
def _torch_models(bundle: Path) -> Any:
    """PyTorch's modules with the bundle's weights, loaded once in a process for all baselines."""
    from mha_deploy.baselines.torch import models_of

    return models_of(open_bundle(bundle))


def open_any_runner(model: Any, runtime: str | None) -> Runner:
    """Load whatever can be run: an engine, a bundle, an ONNX model, a server; see `md.open_runner`."""
    if isinstance(model, str) and is_server_url(model):
        model = ServerRunner(model)
    if isinstance(model, str | os.PathLike):
        model = Path(model)
        model = open_engine(model) if model.suffix == ".engine" else model
    if isinstance(model, Runner | Engine) or is_polygraphy_runner(model):
        if runtime is not None:
            what = "The runtime of a runner or an engine cannot be chosen."
            raise DeployError(what, got=runtime, hint="leave it out")
        if isinstance(model, Runner):
            return model
        return open_engine_runner(model) if isinstance(model, Engine) else PolygraphyRunner(model)
    if isinstance(model, Bundle) or (isinstance(model, Path) and model.suffix != ".onnx"):
        opened = model if isinstance(model, Bundle) else open_checked(model)
        name = runtime or available_cpu_runtime(opened.manifest.precision)
        runner = RuntimeFinder(opened).named(name).open()
        spec = opened.manifest.spec
        runner.axes, runner.lengths = spec.axes, spec.lengths if isinstance(spec, AttentionSpec) else {}
        return runner
    graph = graph_from_proto(model) if isinstance(model, onnx.ModelProto) else model
    graph = load_graph(graph) if isinstance(graph, Path) else graph
    if not isinstance(graph, ir.Model):
        hint = "an engine, a bundle, an ONNX model, or a Polygraphy runner"
        raise DeployError("This cannot be run.", got=describe(model), hint=hint)
    if runtime is None:
        has_bf16 = any(value.dtype == ir.DataType.BFLOAT16 for value in graph.graph.inputs)
        runtime = "ort-cpu" if can_import("onnxruntime") and not has_bf16 else "onnx-reference"
    return open_runner(runtime, model if isinstance(model, Path) else graph)
