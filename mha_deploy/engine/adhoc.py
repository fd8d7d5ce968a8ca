"""Engines that are built to be run once and forgotten: twins for comparison, and mask cases."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from mha_deploy.backends.child import open_isolated
from mha_deploy.backends.runner import Runner
from mha_deploy.backends.tensorrt import BuildRequest, TensorRT, build_with, load
from mha_deploy.backends.tensorrt.request import Profile
from mha_deploy.backends.tensorrt.run import TensorRTRunner
from mha_deploy.graph.file import save_graph
from mha_deploy.plugins.load import load_needed

# Nobody times these engines, and a shorter search builds them sooner.
_LITTLE_EFFORT = 1


def engine_opener(
    rt: TensorRT,
    precision: str,
    profiles: Sequence[Profile] = (),
    plugins: Sequence[Mapping[str, Any]] = (),
) -> Callable[[ir.Model], Runner]:
    """A function that builds a lowered graph on this machine's GPU and loads it, in a child process.

    Args:
        rt: The TensorRT.
        precision: The precision the graphs are written in.
        profiles: Ranges of the inputs; none for graphs of fixed shapes.
        plugins: The plugin libraries that it needs, as an engine's manifest records them.
    """

    def open_model(model: ir.Model) -> Runner:
        with tempfile.TemporaryDirectory(prefix="mha-deploy-") as folder:
            path = Path(folder) / "model.onnx"
            save_graph(model, path)
            request = BuildRequest(
                onnx=path,
                backend=rt.backend,
                precision=_precision_of(model, precision),
                profiles=profiles,
                allow_decomposed=True,
                optimization_level=_LITTLE_EFFORT,
            )
            if not rt.in_every_process:
                return _built_and_loaded(rt, request, plugins)
            return open_isolated(rt.backend, rt.title, _in_child, request, plugins)

    return open_model


def _in_child(request: BuildRequest, plugins: Sequence[Mapping[str, Any]]) -> TensorRTRunner:
    return _built_and_loaded(load(request.backend), request, plugins)


def _built_and_loaded(
    rt: TensorRT, request: BuildRequest, plugins: Sequence[Mapping[str, Any]]
) -> TensorRTRunner:
    load_needed(rt, plugins)
    built = build_with(rt, request)
    return TensorRTRunner(rt, built.plan, large_tensors=built.large_tensors)


def _precision_of(model: ir.Model, precision: str) -> str:
    """A graph that gives out float32 computes in it, and a builder that is allowed less would take less."""
    return "fp32" if any(value.dtype == ir.DataType.FLOAT for value in model.graph.outputs) else precision
