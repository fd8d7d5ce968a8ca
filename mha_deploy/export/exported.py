"""A module that was exported: its graph, and the program that the graph was made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir
from torch.export import ExportedProgram

from mha_deploy.spec_parts import Dim


@dataclass(frozen=True, kw_only=True)
class ExportedModule:
    """A module as a graph and as a program.

    Args:
        model: The graph. Its inputs and outputs have the user's names, its dimensions those of the axes.
        program: The program, decomposed to what the graph was made from.
        inputs: Names of the inputs, in the order of the graph.
        outputs: The dimensions of every output, in the order of the graph. None stands for a size that is
            no sum of axes and numbers.
        nodes: FX node of every input and output by name, and of other values that could not keep the name of
            their node; the rest has it.
        traced_sizes: The size of every axis while it was traced.
        unproven: Axes whose smaller sizes PyTorch did not vouch for, so that they were tried instead.
    """

    model: ir.Model
    program: ExportedProgram
    inputs: tuple[str, ...]
    outputs: Mapping[str, tuple[Dim | None, ...]]
    nodes: Mapping[str, str]
    traced_sizes: Mapping[str, int]
    unproven: tuple[str, ...] = ()

    def node_of(self, value: str) -> str | None:
        """The FX node that computes a value of the graph; None where there is none."""
        name = self.nodes.get(value, value)
        return name if name in self._computed else None

    @cached_property
    def _computed(self) -> frozenset[str]:
        return frozenset(node.name for node in self.program.graph.nodes if node.op == "call_function")
