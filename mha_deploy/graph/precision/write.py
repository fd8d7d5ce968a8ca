"""Write a float32 graph as a plan says: FP16, with wide nodes and Casts at their borders."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from mha_deploy.errors import DeployError
from mha_deploy.graph.precision.ranges import (
    FLOAT,
    PrecisionPlan,
    Slots,
    clamp,
    float_inputs,
    float_outputs,
    is_op,
    name_of,
    prepared,
)

HALF = ir.DataType.FLOAT16
_TYPES = {"fp32": FLOAT, "bf16": ir.DataType.BFLOAT16}
_SHORT = {FLOAT: "fp32", HALF: "fp16", ir.DataType.BFLOAT16: "bf16"}
# Attributes that name the type of a result.
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype")


def apply_plan(model: ir.Model, plan: PrecisionPlan) -> ir.Model:
    """Write the graph in FP16, and what the plan keeps in its wider type.

    Inputs and outputs are FP16, but for those that the plan names. Integers and booleans are not touched.
    A constant that nodes of two types read is held once in each.

    Args:
        model: The graph that the plan was made for, in float32; it is not changed.
        plan: What stays wider.

    Raises:
        DeployError: The plan names nodes that the graph has not.
    """
    work = prepared(model)
    _Writer(work, plan).write()
    return work


class _Writer:
    """Rewrites one graph in place."""

    def __init__(self, work: ir.Model, plan: PrecisionPlan) -> None:
        self._graph, self._slots = work.graph, Slots(work.opset_imports)
        self._kept = {each.name: _TYPES[each.precision] for each in plan.kept}
        self._wide_inputs = {each.name for each in plan.inputs}
        self._wide_outputs = {each.name for each in plan.outputs}
        self._clamped = {each.name for each in plan.clamped}
        self._made: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self._taken = {name_of(value) for node in work.graph for value in node.outputs}
        self._taken |= {name_of(value) for value in work.graph.inputs} | set(work.graph.initializers)
        unknown = set(self._kept) - {str(node.name) for node in work.graph}
        if unknown:
            raise DeployError("The plan was made for another graph.", got=", ".join(sorted(unknown)))

    def write(self) -> None:
        """Note what every node reads, give every value its type, then put Casts where the two differ."""
        nodes = list(self._graph)
        reads = [(node, *read) for node in nodes for read in float_inputs(node)]
        constants = [value for value in self._graph.initializers.values() if value.dtype == FLOAT]
        outputs = [value for value in dict.fromkeys(self._graph.outputs) if value.dtype == FLOAT]
        for value in self._graph.inputs:
            if value.dtype == FLOAT:
                _set_type(value, FLOAT if value.name in self._wide_inputs else HALF)
        for node in nodes:
            self._type_results(node)
        for node, position, value in reads:
            wanted = self._slots.input_type(node, position, self._type_of(node))
            node.replace_input_with(position, self._as(value, wanted))
        for value in outputs:
            self._give_out(value)
        for value in constants:
            if not value.uses() and not value.is_graph_output():
                self._drop(value)

    def _type_of(self, node: ir.Node) -> ir.DataType:
        return self._kept.get(str(node.name), HALF)

    def _type_results(self, node: ir.Node) -> None:
        for position, value in list(float_outputs(node)):
            dtype = self._slots.output_type(node, position, self._type_of(node))
            _set_type(value, dtype)
            _fix_attributes(node, dtype)

    # -- values in another type ----------------------------------------------------------------

    def _as(self, value: ir.Value, wanted: ir.DataType) -> ir.Value:
        """The value in a type: itself, or one Cast for all who ask."""
        if value.dtype == wanted:
            return value
        key = (value, wanted)
        if key not in self._made:
            self._made[key] = (
                self._constant_as(value, wanted) if value.is_initializer() else self._cast(value, wanted)
            )
        return self._made[key]

    def _constant_as(self, value: ir.Value, wanted: ir.DataType) -> ir.Value:
        if value.const_value is None:
            raise DeployError("A constant has no numbers.", got=value.name)
        array = clamp(value.const_value.numpy(), wanted.numpy(), _limit(wanted))
        return self._new_constant(f"{value.name}/{_SHORT[wanted]}", array, wanted)

    def _new_constant(self, name: str, array: np.ndarray, dtype: ir.DataType) -> ir.Value:
        tensor = ir.Tensor(array, dtype=dtype, name=self._free(name))
        constant = ir.Value(
            name=tensor.name, type=ir.TensorType(dtype), shape=tensor.shape, const_value=tensor
        )
        self._graph.register_initializer(constant)
        return constant

    def _cast(self, value: ir.Value, wanted: ir.DataType) -> ir.Value:
        source = value
        if value.name in self._clamped and wanted != FLOAT:
            bound = np.array(-_limit(wanted), np.float32)
            lowest = self._new_constant(f"{value.name}/lowest_{_SHORT[wanted]}", bound, FLOAT)
            source = self._behind(value, "Max", [value, lowest], FLOAT, f"held_{_SHORT[wanted]}")
        return self._behind(source, "Cast", [source], wanted, _SHORT[wanted])

    def _behind(
        self, place: ir.Value, op_type: str, inputs: list[ir.Value], dtype: ir.DataType, name: str
    ) -> ir.Value:
        """A new node right behind where a value is made."""
        node = ir.node(op_type, inputs, {"to": int(dtype)} if op_type == "Cast" else {})
        result = node.outputs[0]
        node.name = result.name = self._free(f"{place.name}/{name}")
        result.shape, result.type = place.shape, ir.TensorType(dtype)
        producer = place.producer()
        if producer is None:
            self._graph.insert_before(self._graph[0], node)
        else:
            self._graph.insert_after(producer, node)
        return result

    def _give_out(self, value: ir.Value) -> None:
        """Let a graph output have the type that it should have, under its own name."""
        wanted = FLOAT if value.name in self._wide_outputs else HALF
        if value.producer() is None or value.dtype == wanted:
            return
        name, result = name_of(value), self._as(value, wanted)
        value.name = self._free(f"{name}/{_SHORT[value.dtype or FLOAT]}")
        result.name = name
        for position, output in enumerate(self._graph.outputs):
            if output is value:
                self._graph.outputs[position] = result

    def _drop(self, value: ir.Value) -> None:
        """Forget a constant that nobody reads in float32; one that took its place takes its name as well."""
        self._graph.initializers.pop(name_of(value))
        heirs = [new for (old, _), new in self._made.items() if old is value]
        if len(heirs) == 1:
            self._graph.initializers.pop(name_of(heirs[0]))
            heirs[0].name = value.name
            self._graph.register_initializer(heirs[0])

    def _free(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


def _set_type(value: ir.Value, dtype: ir.DataType) -> None:
    value.type = ir.TensorType(dtype)  # a new one: copies of a model share their types


def _fix_attributes(node: ir.Node, dtype: ir.DataType) -> None:
    """Let attributes that name the type of the result name the new one."""
    for name in _TYPE_ATTRIBUTES:
        attribute = node.attributes.get(name)
        if attribute is not None and attribute.type == ir.AttributeType.INT and attribute.as_int() == FLOAT:
            node.attributes.add(ir.AttrInt64(name, int(dtype)))
    if is_op(node, "ConstantOfShape", "Constant"):
        given = node.attributes.get("value")
        array = np.zeros(1, np.float32) if given is None else given.as_tensor().numpy()
        tensor = ir.Tensor(clamp(array, dtype.numpy(), _limit(dtype)), dtype=dtype)
        node.attributes.add(ir.AttrTensor("value", tensor))


def _limit(dtype: ir.DataType) -> float:
    """The largest finite number of a type."""
    return float(np.finfo(np.float16).max) if dtype == HALF else float(ir.DataType(dtype).max)
