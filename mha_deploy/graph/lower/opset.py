"""Take a model down to an older opset, where its nodes allow it.

TensorRT 8.6 knows opset 17, attention is written in opset 23. Most operators changed between the two only
in the types they accept: such a node is valid under the older schema as it stands. The few whose inputs
moved are rewritten, and for the rest the node is named.
"""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from mha_deploy.graph.lower.errors import LoweringError
from mha_deploy.graph.lower.opset_rewrites import rewrite_for

# The same node means something else in the older version, though both schemas accept it.
_CHANGED_MEANING = frozenset({"GridSample", "GroupNormalization", "DFT"})

# Values of attributes that came after opset 17; the schemas do not list values.
_NEWER_VALUES = {
    ("ScatterND", "reduction"): frozenset({"max", "min"}),
    ("ScatterElements", "reduction"): frozenset({"max", "min"}),
    ("Pad", "mode"): frozenset({"wrap"}),
    ("Resize", "coordinate_transformation_mode"): frozenset({"half_pixel_symmetric"}),
}


def to_opset(model: ir.Model, version: int, *, dialect: str = "primitives") -> ir.Model:
    """Rewrite a model for an opset that is not newer than `version`.

    Args:
        model: The model; it is not changed.
        version: The newest opset the result may need.
        dialect: Name used in messages.

    Raises:
        LoweringError: A node cannot be written in that opset.
    """
    result = model.clone()
    current = result.opset_imports.get("", version)
    if current <= version:
        return result
    if result.functions:
        InlinePass()(result)
    _name_apart(result)
    for node in list(result.graph.all_nodes()):
        if node.domain == "":
            rewrite_for(node, version)
    for node in result.graph.all_nodes():
        problem = _problem(node, current, version) if node.domain == "" else None
        if problem is not None:
            raise _refusal(node, version, problem, dialect)
        node.version = None
    result.graph.opset_imports[""] = version
    imports = [onnx.helper.make_opsetid(*item) for item in result.opset_imports.items()]
    result.ir_version = min(result.ir_version, onnx.helper.find_min_ir_version_for(imports, True))
    return result


def _name_apart(model: ir.Model) -> None:
    """Let no two nodes have one name: what they are rewritten to is named for them."""
    seen: set[str | None] = set()
    for node in model.graph.all_nodes():
        if node.name in seen and node.outputs:
            node.name = node.outputs[0].name
        seen.add(node.name)


def _problem(node: ir.Node, current: int, version: int) -> str | None:
    """Why the node is not valid in the older version; None where it is."""
    try:
        old = onnx.defs.get_schema(node.op_type, version, "")
    except onnx.defs.SchemaError:
        return "it came later"
    new = onnx.defs.get_schema(node.op_type, current, "")
    if old.since_version == new.since_version:
        return None
    if node.op_type in _CHANGED_MEANING:
        return "it has changed its meaning"
    return _attribute_problem(node, old, new) or _input_problem(node, old) or _output_problem(node, old)


def _attribute_problem(node: ir.Node, old: Any, new: Any) -> str | None:
    for name in list(node.attributes):
        if name in old.attributes:
            if node.attributes[name].value in _NEWER_VALUES.get((node.op_type, name), ()):
                return f"it uses {name}={node.attributes[name].value}"
            continue
        default = new.attributes[name].default_value if name in new.attributes else None
        if default is None or _value(node.attributes[name]) != onnx.helper.get_attribute_value(default):
            return f"it uses the attribute {name}"
        node.attributes.pop(name)  # the default says nothing
    return None


def _input_problem(node: ir.Node, old: Any) -> str | None:
    last = old.inputs[-1] if old.inputs else None
    variadic = last is not None and last.option == onnx.defs.OpSchema.FormalParameterOption.Variadic
    if len(node.inputs) > len(old.inputs) and not variadic:
        return f"it has {len(node.inputs)} inputs"
    for index, value in enumerate(node.inputs):
        formal = old.inputs[min(index, len(old.inputs) - 1)]
        if value is None or value.dtype is None:
            continue
        if _type_string(value.dtype) not in formal.types:
            return f"input {formal.name} is {value.dtype.name}"
    return None


def _output_problem(node: ir.Node, old: Any) -> str | None:
    for index, value in enumerate(node.outputs):
        formal = old.outputs[min(index, len(old.outputs) - 1)]
        if value.dtype is not None and _type_string(value.dtype) not in formal.types:
            return f"output {formal.name} is {value.dtype.name}"
    return None


def _type_string(dtype: ir.DataType) -> str:
    names = {"FLOAT": "float", "DOUBLE": "double"}
    return f"tensor({names.get(dtype.name, dtype.name.lower())})"


def _value(attribute: ir.Attr) -> Any:
    return attribute.value.encode() if attribute.type == ir.AttributeType.STRING else attribute.value


def _refusal(node: ir.Node, version: int, problem: str, dialect: str) -> LoweringError:
    return LoweringError(
        f"{node.op_type} in opset {version}",
        node=node.name or (node.outputs[0].name if node.outputs else None) or node.op_type,
        dialect=dialect,
        got=problem,
        hint=f"opset=None keeps the model's own opset, for a target newer than opset {version}",
    )
