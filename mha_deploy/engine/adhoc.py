"""Engines that are built to be run once and forgotten: twins for comparison, and mask cases."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir

from mha_deploy.backends.tensorrt import BuildRequest, TensorRT, build_with
from mha_deploy.backends.tensorrt.request import Profile
from mha_deploy.backends.tensorrt.run import TensorRTRunner
from mha_deploy.graph.file import save_graph

# Nobody times these engines, and a shorter search builds them sooner.
_LITTLE_EFFORT = 1


def engine_opener(
    rt: TensorRT, precision: str, profiles: Sequence[Profile] = ()
) -> Callable[[ir.Model], TensorRTRunner]:
    """A function that builds a lowered graph on this machine's GPU and loads it.

    Args:
        rt: The TensorRT.
        precision: The precision the graphs are written in.
        profiles: Ranges of the inputs; none for graphs of fixed shapes.
    """

    def open_model(model: ir.Model) -> TensorRTRunner:
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
            built = build_with(rt, request)
        return TensorRTRunner(rt, built.plan, large_tensors=built.large_tensors)

    return open_model


def _precision_of(model: ir.Model, precision: str) -> str:
    """A graph that gives out float32 computes in it, and a builder that is allowed less would take less."""
    return "fp32" if any(value.dtype == ir.DataType.FLOAT for value in model.graph.outputs) else precision
