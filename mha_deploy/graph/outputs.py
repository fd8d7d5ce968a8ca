"""Give out values from inside a graph."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from mha_deploy.errors import DeployError


def with_outputs(model: ir.Model, names: Collection[str]) -> ir.Model:
    """A copy of the model that gives out these values of its main graph as well; weights are shared.

    Raises:
        DeployError: The main graph computes no such value, or its type is not known.
    """
    copy = model.clone()
    found = {value.name: value for node in copy.graph for value in node.outputs if value.name in names}
    for name in names:
        value = found.get(name)
        if value is None or value.dtype is None:
            what = "no such value" if value is None else "a value of unknown type"
            raise DeployError(f"The graph has {what}.", got=name, hint="export again")
        if not value.is_graph_output():
            copy.graph.outputs.append(value)
    return copy
