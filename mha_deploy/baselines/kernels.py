"""Which kernels take the time, whichever library of the process launched them.

PyTorch's profiler listens to the driver, so it sees the kernels of TensorRT and ONNX Runtime as well, and
those inside CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from mha_deploy.backends.timing import KernelTime
from mha_deploy.errors import BackendUnavailable, DeployError


def kernel_times(
    launch: Callable[[], object],
    synchronize: Callable[[], object] = torch.cuda.synchronize,
    calls: int = 3,
) -> list[KernelTime]:
    """Time the kernels of a call.

    Args:
        launch: Queues one call.
        synchronize: Waits for everything that was queued; unless given, for the whole GPU.
        calls: How many calls to take the mean of.

    Returns:
        The kernels, copies and fills included, the longest first.
    """
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
        raise DeployError(
            "The profiler saw no kernel.", hint="another profiler may hold the GPU, or CUPTI is missing"
        )
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
