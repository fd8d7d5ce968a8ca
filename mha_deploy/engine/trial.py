"""A new engine is tried on the GPU that built it: has every profile an execution context?

A builder can finish an engine that its own runtime cannot prepare: TensorRT 8.6 does, for the second profile
of a layer with a cache. That is better told at once than when the engine is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from mha_deploy.backends.child import RuntimeCrash, call_isolated, isolation
from mha_deploy.backends.tensorrt import TensorRT, load
from mha_deploy.backends.tensorrt.bound import BoundContext
from mha_deploy.backends.tensorrt.run import TensorRTRunner
from mha_deploy.backends.tensorrt.volumes import LargeTensor
from mha_deploy.errors import BackendUnavailable, DeployError


def unprepared_profiles(
    rt: TensorRT,
    plan: bytes,
    names: Sequence[str],
    *,
    host_code: bool = False,
    large_tensors: Sequence[LargeTensor] = (),
) -> list[str]:
    """What a new engine cannot do on this machine's GPU, a line for each profile without a context.

    Empty where all is well, and where nothing can be tried: engines for other GPUs, or no cuda-bindings.

    Args:
        rt: The TensorRT that built it.
        plan: The serialised engine.
        names: What its profiles are called.
        host_code: Whether it carries runtime code of its own.
        large_tensors: What TensorRT cannot hold at the largest sizes.
    """
    if rt.can.builds_without_gpu:
        return []
    given = (plan, names, host_code, tuple(large_tensors))
    if not (isolation.enabled and rt.in_every_process):
        return _unprepared(rt, *given)
    try:
        return call_isolated(
            rt.backend, _in_child, rt.backend, *given, title=rt.title, step="preparing the new engine"
        )
    except RuntimeCrash as crash:
        return [f"engine built, but it cannot be run: {crash.in_one_line}"]


def _in_child(backend: str, *given: Any) -> list[str]:
    return _unprepared(load(backend), *given)


def _unprepared(
    rt: TensorRT, plan: bytes, names: Sequence[str], host_code: bool, large_tensors: Sequence[LargeTensor]
) -> list[str]:
    try:
        runner = TensorRTRunner(rt, plan, host_code=host_code, cuda_graph=False, large_tensors=large_tensors)
    except BackendUnavailable:
        return []
    except DeployError as error:
        return [f"engine built, but it cannot be loaded: {error.in_one_line}"]
    with runner:
        return _tried(runner, names)


def _tried(runner: TensorRTRunner, names: Sequence[str]) -> list[str]:
    problems = []
    # A runner keeps the contexts of two calls, so one that cannot be made beside another is no use to it.
    with ExitStack() as owned:
        for index, profile in enumerate(runner.profiles):
            usual = {name: shapes[1] for name, shapes in profile.items()}
            try:
                bound: BoundContext = runner.bind(usual, index)
            except DeployError as error:
                problems.append(
                    f"engine built, but profile {names[index]} cannot be prepared: {error.got or error.what}"
                )
                continue
            owned.close()
            owned.callback(bound.close)
    return problems
