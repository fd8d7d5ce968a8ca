"""Build ONNX nodes one after the other, each with a name that tells which attention it came from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

Size = int | ir.Value
"""A size in a shape: a number, or a 1-D tensor of one element computed from another tensor's shape."""


class NodeBuilder:
    """Collects new nodes in order; the caller inserts them into a graph.

    Constants become `Constant` nodes, so that the nodes can be put into a subgraph as well.

    Args:
        prefix: First part of every new name. No value of the graph may start with it.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.nodes: list[ir.Node] = []
        self._used: dict[str, int] = {}
        self._constants: dict[tuple[ir.DataType, tuple[int, ...], bytes], ir.Value] = {}

    # -- nodes ---------------------------------------------------------------------------------

    def op(
        self, op_type: str, *inputs: ir.Value | None, name: str | None = None, **attributes: Any
    ) -> ir.Value:
        """Add a node with one output and return that output."""
        return self.node(op_type, inputs, name=name, attributes=attributes)[0]

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        *,
        outputs: int = 1,
        domain: str = "",
        name: str | None = None,
        attributes: dict[str, Any] | None = None,
    ) -> Sequence[ir.Value]:
        """Add a node and return its outputs.

        Args:
            op_type: The operator.
            inputs: Its inputs; None for one that is left out.
            outputs: How many outputs it has.
            domain: The operator set it belongs to.
            name: Last part of its name; a name from the operator unless given. The prefix itself
                names the node that stands for the whole.
            attributes: Attributes as Python values; None for one that is left out.
        """
        node = ir.node(op_type, inputs, attributes or {}, domain=domain, num_outputs=outputs)
        is_whole = name == self.prefix
        value_name = self._unique(op_type.lower() if is_whole or name is None else name)
        node.name = self.prefix if is_whole else value_name
        for index, value in enumerate(node.outputs):
            value.name = value_name if index == 0 else f"{value_name}:{index}"
        self.nodes.append(node)
        return node.outputs

    def _unique(self, name: str) -> str:
        count = self._used.get(name, 0)
        self._used[name] = count + 1
        return f"{self.prefix}/{name}" if count == 0 else f"{self.prefix}/{name}_{count + 1}"

    def live_nodes(self, outputs: Iterable[ir.Value]) -> list[ir.Node]:
        """The nodes that lead to the given outputs, in order; the others lose their inputs."""
        wanted = {id(value) for value in outputs}
        live: list[ir.Node] = []
        for node in reversed(self.nodes):
            if any(id(value) in wanted for value in node.outputs):
                wanted.update(id(value) for value in node.inputs if value is not None)
                live.insert(0, node)
            else:
                node.resize_inputs(0)
        return live

    def owns(self, value: ir.Value) -> bool:
        """Whether a value is produced by a node of this builder."""
        producer = value.producer()
        return producer is not None and any(producer is node for node in self.nodes)

    # -- constants -----------------------------------------------------------------------------

    def constant(self, value: float | Sequence[int], dtype: ir.DataType) -> ir.Value:
        """A constant of the given type; equal constants are one node."""
        array = np.array(value, dtype=dtype.numpy())
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            tensor = ir.Tensor(array, dtype=dtype)
            constant = self.op("Constant", value=tensor)
            constant.dtype, constant.shape = dtype, ir.Shape(array.shape)
            self._constants[key] = constant
        return self._constants[key]

    def ints(self, *values: int) -> ir.Value:
        """A 1-D int64 constant."""
        return self.constant(list(values), ir.DataType.INT64)

    # -- shapes --------------------------------------------------------------------------------

    def size(self, value: ir.Value, axis: int) -> Size:
        """The size of an axis: a number where the graph states it, else read at run time."""
        size = None if value.shape is None else value.shape[axis]
        if isinstance(size, int):
            return size
        return self.op("Gather", self.op("Shape", value), self.ints(axis), name="size")

    def as_tensor(self, size: Size) -> ir.Value:
        """A size as a 1-D tensor of one element."""
        return self.ints(size) if isinstance(size, int) else size

    def shape_of(self, *sizes: Size) -> ir.Value:
        """A shape tensor from numbers and run-time sizes."""
        if all(isinstance(size, int) for size in sizes):
            return self.ints(*(size for size in sizes if isinstance(size, int)))
        return self.op("Concat", *(self.as_tensor(size) for size in sizes), axis=0, name="shape")

    def reshape(self, value: ir.Value, *sizes: Size, name: str | None = None) -> ir.Value:
        """Reshape; 0 keeps the size of the same axis, -1 takes what remains."""
        return self.op("Reshape", value, self.shape_of(*sizes), name=name)

    def transpose(self, value: ir.Value, *perm: int, name: str | None = None) -> ir.Value:
        """Permute the axes."""
        return self.op("Transpose", value, perm=list(perm), name=name)

    def expand(self, value: ir.Value, *sizes: Size, name: str | None = None) -> ir.Value:
        """Broadcast to the given sizes; 1 keeps what the value has."""
        return self.op("Expand", value, self.shape_of(*sizes), name=name)

    def unsqueeze(self, value: ir.Value, *axes: int) -> ir.Value:
        """Insert axes of size 1."""
        return self.op("Unsqueeze", value, self.ints(*axes))

    def cast(self, value: ir.Value, dtype: ir.DataType, name: str | None = None) -> ir.Value:
        """Convert to a type; the value itself where it has that type already."""
        return value if value.dtype == dtype else self.op("Cast", value, to=int(dtype), name=name)
