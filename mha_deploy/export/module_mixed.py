"""`--precision auto`: a user's module in FP16, but for what FP16 cannot hold.

The module is exported in float32 with the weights that it has. Its graph is run to see how large everything
becomes, and written in FP16 except for the nodes that would overflow. What is true of it is the float32
module in FP64; how far a correct runtime may be from that, the mixed graph in ONNX Runtime shows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from mha_deploy.analyze.sizes import odd_sizes
from mha_deploy.backends import open_runner
from mha_deploy.backends.ranges import measure_ranges
from mha_deploy.backends.runner import Runner
from mha_deploy.errors import ExportError
from mha_deploy.export.exported import ExportedModule
from mha_deploy.export.inputs import to_numpy
from mha_deploy.export.module_golden import Insight, ModuleCapture, relative_error
from mha_deploy.export.user_module import UserModule
from mha_deploy.golden import GoldenCase
from mha_deploy.graph.file import load_graph, save_graph
from mha_deploy.graph.mixed import PrecisionPlan, apply_plan, plan_precision
from mha_deploy.graph.outputs import with_outputs
from mha_deploy.spec_parts import Sizes

# Rounding to FP16 costs less than this many layers deep; more is a mistake, not rounding.
_LARGEST_ERROR = 0.05


def mixed_graph(model: ir.Model, capture: ModuleCapture, folder: Path) -> tuple[ir.Model, PrecisionPlan]:
    """Write a float32 graph in FP16 where that holds its numbers.

    Args:
        model: The graph, its attentions fused.
        capture: Draws the inputs on which it is looked at.
        folder: Where the float32 graph may lie while it is run.

    Raises:
        DeployError: ONNX Runtime cannot run the graph, or it has branches.
    """
    path = folder / "float32.onnx"
    save_graph(model, path)
    try:
        wide = load_graph(path)  # large weights are read from disk, slice by slice
        cases = {
            name: {key: to_numpy(tensor) for key, tensor in capture.inputs(name, sizes).items()}
            for name, sizes in _looked_at(capture.user).items()
        }
        plan = plan_precision(wide, measure_ranges(wide, cases))
        mixed = apply_plan(model, plan)
    finally:
        for part in folder.glob("float32.onnx*"):
            part.unlink()
    return mixed, plan


def _looked_at(user: UserModule) -> dict[str, Sizes]:
    axes = user.loaded.axes
    return {
        "opt": {name: axis.opt for name, axis in axes.items()},
        "min": {name: axis.min for name, axis in axes.items()},
        "odd": odd_sizes(axes),
    }


class MixedCapture(ModuleCapture):
    """Golden cases of a mixed graph.

    Args:
        user: The module in float32.
        exported: Its program.
        seed: Seed of the inputs.
        graph: The mixed graph.
    """

    def __init__(self, user: UserModule, exported: ExportedModule, seed: int, graph: ir.Model) -> None:
        super().__init__(user, exported, seed)
        self._graph = graph
        self._types = {str(value.name): value.dtype for value in graph.graph.inputs}

    def inputs(self, name: str, sizes: Sizes) -> dict[str, Tensor]:
        """The inputs as the graph takes them, in float32 again."""
        drawn = super().inputs(name, sizes)
        return {
            key: torch.from_numpy(self._given(key, to_numpy(tensor))).to(tensor.dtype)
            for key, tensor in drawn.items()
        }

    def capture(self, name: str, sizes: Sizes) -> GoldenCase:
        """Run one case: the truth in FP64, and the mixed graph in ONNX Runtime."""
        case = super().capture(name, sizes)
        given = {key: self._given(key, array) for key, array in case.inputs.items()}
        got = self._runner.run(given)
        case = replace(case, inputs=given, eager={key: got[key] for key in case.oracle})
        _refuse_far(case)
        return case

    def look_inside(self, case: GoldenCase, values: Collection[str]) -> Insight:
        """Values of the graph in a case that was captured, by their names."""
        insight = super().look_inside(case, values)
        with open_runner("ort-cpu", with_outputs(self._graph, values)) as runner:
            got = runner.run(case.inputs)
        return replace(insight, eager={name: got[name] for name in values})

    def _given(self, name: str, array: np.ndarray) -> np.ndarray:
        dtype = self._types[name]
        return array if dtype is None else array.astype(dtype.numpy())

    @cached_property
    def _runner(self) -> Runner:
        """The mixed graph, loaded once for all cases."""
        return open_runner("ort-cpu", self._graph)


def _refuse_far(case: GoldenCase) -> None:
    for name, oracle in case.oracle.items():
        off = relative_error(case.eager[name], oracle)
        if not off <= _LARGEST_ERROR:
            raise ExportError(
                "The mixed graph is too far from the module.",
                got=f"output {name} of golden case {case.name}: off by {off:.2g} of its size",
                hint="--precision bf16 or fp32",
            )
