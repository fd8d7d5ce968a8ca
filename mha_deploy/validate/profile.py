"""Which kernels take the time. PyTorch's profiler sees every library's, TensorRT's too."""

from __future__ import annotations

from mha_deploy.backends.gpu import GpuRunner
from mha_deploy.backends.runner import Arrays, Runner
from mha_deploy.backends.timing import KernelTime
from mha_deploy.golden import GoldenCase
from mha_deploy.versions import can_import

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
    from mha_deploy.baselines.kernels import kernel_times as profiled

    return tuple(runner.watch(feeds, profiled)[:_SHOWN])
