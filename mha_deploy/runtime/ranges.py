"""Measure the ranges of a float32 graph in ONNX Runtime, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.file import graph_of
from mha_deploy.graph.precision import SLICE_BYTES, Cases, Ranges, ranges_by
from mha_deploy.runtime import open_runner


def measure_ranges(model: Path | ir.Model, cases: Cases, *, slice_bytes: int = SLICE_BYTES) -> Ranges:
    """Run a float32 graph on some cases, and measure every tensor and what operators hold inside.

    Args:
        model: The graph, in float32.
        cases: Inputs by name, for each named case.
        slice_bytes: About how many bytes of tensors may be looked at in one run.

    Raises:
        DeployError: The graph has branches, or ONNX Runtime cannot run it on these inputs.
    """
    return ranges_by(_run, graph_of(model), cases, slice_bytes=slice_bytes)


def _run(model: ir.Model, cases: Cases) -> Iterator[Mapping[str, np.ndarray]]:
    with open_runner("ort-cpu", model) as runner:
        for feeds in cases.values():
            yield runner.run(feeds)
