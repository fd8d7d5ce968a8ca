"""Times by kernel."""

import pytest
import torch
from torch.profiler import ProfilerActivity, supported_activities

from mha_deploy.baselines.torch import kernel_times, mean_by_name
from mha_deploy.errors import BackendUnavailable
from mha_deploy.runtime.timing import KernelTime


def test_the_runs_of_a_kernel_are_added_up_and_the_longest_comes_first():
    runs = [("short", 1.0), ("long", 4.0), ("short", 2.0), ("long", 6.0), ("once", 0.5)]
    assert mean_by_name(runs, calls=2) == [
        KernelTime(name="long", calls=1.0, microseconds=5.0),
        KernelTime(name="short", calls=1.0, microseconds=1.5),
        KernelTime(name="once", calls=0.5, microseconds=0.25),
    ]


@pytest.mark.skipif(ProfilerActivity.CUDA in supported_activities(), reason="PyTorch can profile a GPU")
def test_without_a_gpu_to_profile_nothing_is_launched():
    launched = []
    with pytest.raises(BackendUnavailable, match="cannot profile a GPU"):
        kernel_times(lambda: launched.append(1), lambda: None)
    assert launched == []


@pytest.mark.gpu
def test_the_kernels_of_a_matmul_are_listed():
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
    seen = kernel_times(lambda: (a @ a).relu_(), calls=4)
    assert [round(kernel.calls) for kernel in seen] == [1] * len(seen)
    assert len(seen) >= 2
    assert all(kernel.microseconds > 0 for kernel in seen)
    assert "gemm" in seen[0].name.lower() or "nvjet" in seen[0].name.lower() or "cutlass" in seen[0].name


@pytest.mark.gpu
def test_the_kernels_inside_a_graph_are_detected():
    a = torch.randn(1024, 1024, device="cuda", dtype=torch.float16)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (a @ a).relu_()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        (a @ a).relu_()
    assert len(kernel_times(graph.replay, torch.cuda.synchronize)) >= 2
