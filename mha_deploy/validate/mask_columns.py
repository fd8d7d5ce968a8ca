"""The runtimes of this machine as columns of the table of masks."""

from __future__ import annotations

from functools import partial

from mha_deploy.backends import open_runner
from mha_deploy.backends.cuda import find_gpu
from mha_deploy.backends.tensorrt import load
from mha_deploy.engine.adhoc import engine_opener
from mha_deploy.engine.lowered import dialect_of
from mha_deploy.engine.machine import first_gpu
from mha_deploy.errors import BackendUnavailable
from mha_deploy.graph.eligibility import target_from
from mha_deploy.precision import Precision
from mha_deploy.validate.conformance import Column, absent_column, engine_column, runner_column
from mha_deploy.validate.with_torch import torch_device
from mha_deploy.versions import can_import


def mask_columns(precision: Precision) -> list[Column]:
    """Everyone who could be asked, here or not."""
    return [
        *_torch_columns(),
        runner_column("onnx-reference", partial(open_runner, "onnx-reference"), "onnx"),
        runner_column("ort-cpu", partial(open_runner, "ort-cpu"), "onnx"),
        runner_column("ort-cuda", partial(open_runner, "ort-cuda"), "onnx"),
        _tensorrt_column(precision),
    ]


def _torch_columns() -> list[Column]:
    if not can_import("torch"):
        return [absent_column(name, "PyTorch is not installed") for name in ("eager", "sdpa")]
    from mha_deploy.baselines.masks import torch_column

    return [torch_column(path, torch_device()) for path in ("plain", "sdpa")]


def _tensorrt_column(precision: Precision) -> Column:
    """TensorRT on this machine's GPU; TensorRT-RTX does not run on every GPU that it could be built on."""
    if find_gpu() is None:
        return absent_column("tensorrt", "there is no GPU here to run an engine on")
    try:
        rt = load("tensorrt")
    except BackendUnavailable as error:
        return absent_column("tensorrt", error.in_one_line)
    gpu = first_gpu()
    release = ".".join(rt.version.split(".")[:3])
    target = target_from(rt.backend, release, gpu["compute_cap"] if gpu else None)
    opener = engine_opener(rt, precision.name)
    return engine_column("tensorrt", opener, target=target, dialect=dialect_of(rt))
