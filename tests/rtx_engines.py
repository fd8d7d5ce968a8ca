"""Engines by TensorRT-RTX, which compiles without a GPU, from graphs in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx
import onnx_ir as ir

from mha_deploy.options import EngineOptions
from mha_deploy.runtime.tensorrt.builder import BuildRequest, build_engine
from mha_deploy.runtime.tensorrt.versions import load

_REQUEST = ("precision", "profiles", "timing_cache", "precision_constraints")


def build_rtx(model, on_progress=None, *, rt=None, **options):
    """An engine of a graph of any kind, by another TensorRT where one is given."""
    model = ir.to_proto(model) if isinstance(model, ir.Model) else model
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(model.SerializeToString() if isinstance(model, onnx.ModelProto) else model)
        own = {name: options.pop(name) for name in _REQUEST if name in options}
        request = BuildRequest(onnx=path, options=EngineOptions(**options), **own)
        return build_engine(rt or load("tensorrt-rtx"), request, on_progress)
