"""Where a node came from, as PyTorch's exporter wrote it down."""

from __future__ import annotations

import ast
import re

import onnx_ir as ir

_SCOPES = "pkg.torch.onnx.name_scopes"
_TRACE = "pkg.torch.onnx.stack_trace"
_FX_NODE = "pkg.torch.onnx.fx_node"
_SOFTMAX_TYPE = re.compile(r"aten\.softmax\.int\]\(.*\btorch\.(float16|bfloat16|float32|float64)\b")
_TYPES = {
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "float32": ir.DataType.FLOAT,
    "float64": ir.DataType.DOUBLE,
}
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')


def module_of(node: ir.Node) -> str:
    """The module that holds a node, such as `layers.0.attn`; the node's own name where nobody says."""
    scopes = _scopes(node)
    module = scopes[-2] if len(scopes) > 1 else ""  # the last scope is the operator
    return module or node.name or node.outputs[0].name or node.op_type


def place_of(node: ir.Node) -> str | None:
    """The source line of a node as `file:line`: the innermost frame outside PyTorch that is written down."""
    frames = _FRAME.findall(node.metadata_props.get(_TRACE, ""))
    own = [frame for frame in frames if "/site-packages/torch/" not in frame[0].replace("\\", "/")]
    return ":".join((own or frames)[-1]) if frames else None


def softmax_type_of(node: ir.Node) -> ir.DataType | None:
    """The type that a softmax was asked for, as in `softmax(x, -1, dtype=torch.float32)`.

    The exporter writes such a softmax in the type of its input and casts the result, then drops the casts.
    """
    found = _SOFTMAX_TYPE.search(node.metadata_props.get(_FX_NODE, ""))
    return None if found is None else _TYPES[found.group(1)]


def _scopes(node: ir.Node) -> list[str]:
    try:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
    except (ValueError, SyntaxError):
        return []
    return [str(scope) for scope in scopes] if isinstance(scopes, list) else []
