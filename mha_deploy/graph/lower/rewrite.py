"""Replace nodes of a graph by others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, RemoveUnusedNodesPass, ShapeInferencePass

from mha_deploy.graph.attention_node import MASK, input_at, is_attention, output_at
from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.lower.call import AttentionCall, LoweringError, read_call

# -- Operators beside attention that a dialect has to write in another way: rotary embedding, c ----


@dataclass(frozen=True, kw_only=True)
class OperatorCall:
    """One node of ONNX's own operator set that is to be lowered.

    Args:
        node: The node.
        dialect: The dialect it is lowered to, for messages.
    """

    node: ir.Node
    dialect: str

    @property
    def name(self) -> str:
        """Name of the node; its output's where it has none."""
        return self.node.name or self.node.outputs[0].name or self.node.op_type

    def refuse(self, feature: str, *, got: object = None, hint: str | None = None) -> LoweringError:
        """The error that says which feature of this node the dialect cannot express."""
        return LoweringError(feature, node=self.name, dialect=self.dialect, got=got, hint=hint)


OperatorRule = Callable[[OperatorCall, NodeBuilder], ir.Value | None]
"""Builds the replacement of one node: its output, or None to leave the node."""

OperatorRules = Mapping[str, OperatorRule]
"""The rules by operator."""


def sizes_of(value: ir.Value | None) -> tuple[int | None, ...] | None:
    """The sizes of a value, None for one that is not fixed; None where even the rank is not known."""
    if value is None or value.shape is None:
        return None
    return tuple(size if isinstance(size, int) else None for size in value.shape)


# -- Replace every attention of a model by what a dialect makes of it, without touching the inp ----

Rule = Callable[[AttentionCall, NodeBuilder], dict[int, ir.Value] | None]
"""Builds the replacement of one attention; outputs by position, or None to leave the node."""

_LOWERED = frozenset({"Attention", "RotaryEmbedding", "TensorScatter", "RMSNormalization"})


def copy_of(model: ir.Model) -> ir.Model:
    """A copy to work on: weights shared, functions that hold attention inlined, shapes inferred."""
    copy = model.clone()
    inner = (node for function in copy.functions.values() for node in function.all_nodes())
    if any(node.domain == "" and node.op_type in _LOWERED for node in inner):
        InlinePass()(copy)
    return infer_shapes(copy)


def infer_shapes(model: ir.Model) -> ir.Model:
    """Fill in the shapes that follow from the others; what does not follow stays unknown."""
    ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    return model


def rewrite(
    model: ir.Model,
    rule: Rule,
    *,
    dialect: str,
    broadcasts: bool = False,
    operators: OperatorRules | None = None,
) -> ir.Model:
    """Apply a rule to every attention of a copy of the model.

    Args:
        model: The model; it is not changed.
        rule: What to make of an attention.
        dialect: Name used in messages.
        broadcasts: Whether masks need not be spelled out over the queries.
        operators: What to make of the operators around attention; those not named stay.
    """
    lowered = copy_of(model)
    opset = lowered.opset_imports.get("")
    taken = names_in(lowered)
    for node in list(lowered.graph.all_nodes()):
        if is_attention(node):
            if broadcasts:
                take_mask_before_expand(node)
            call = read_call(node, opset=opset, dialect=dialect)
            builder = NodeBuilder(prefix_within(call.facts.name, taken))
            outputs = rule(call, builder)
        elif operators is not None and node.domain == "" and node.op_type in operators:
            other = OperatorCall(node=node, dialect=dialect)
            builder = NodeBuilder(prefix_within(other.name, taken))
            output = operators[node.op_type](other, builder)
            outputs = None if output is None else {0: output}
        else:
            continue
        if outputs is not None:
            replace_node(node, builder, outputs)
            import_domains(lowered, builder)
    if broadcasts:
        RemoveUnusedNodesPass()(lowered)  # the Expand of a mask, and the shape it was expanded to
    return infer_shapes(lowered)


def names_in(model: ir.Model) -> set[str]:
    """The names of all values that nodes produce."""
    return {value.name for node in model.graph.all_nodes() for value in node.outputs if value.name}


def import_domains(model: ir.Model, builder: NodeBuilder) -> None:
    """Let the model know the operator sets of new nodes."""
    for node in builder.nodes:
        model.opset_imports.setdefault(node.domain, 1)


def take_mask_before_expand(node: ir.Node) -> None:
    """Read a mask as it was before it was copied for every query: there is less of it to move."""
    mask = input_at(node, MASK)
    expand = mask.producer() if mask is not None else None
    source = expand.inputs[0] if expand is not None and expand.op_type == "Expand" else None
    if source is not None and source.shape is not None and len(source.shape) == 4 and source.shape[3] != 1:
        node.replace_input_with(MASK, source)


def free_prefix(name: str, taken: set[str]) -> str:
    """The node's own name, with a number where another value already starts with it."""
    prefix, count = name, 1
    while any(used.startswith(f"{prefix}/") for used in taken):
        count += 1
        prefix = f"{name}_{count}"
    taken.add(f"{prefix}/")
    return prefix


def prefix_within(name: str, taken: set[str]) -> str:
    """A prefix for what a node is lowered to; it is the node's own name, or begins with `<name>/`.

    Whoever looks for the parts of an attention afterwards looks for these. So where values of that name exist
    already (the recogniser writes some), the new ones go one step deeper, and not under another name.
    """
    if any(used.startswith(f"{name}/") for used in taken):
        return free_prefix(f"{name}/lowered", taken)
    return free_prefix(name, taken)


def replace_node(
    node: ir.Node, builder: NodeBuilder, outputs: dict[int, ir.Value], *, keep: Iterable[ir.Value] = ()
) -> None:
    """Put new nodes in the place of a node.

    Args:
        node: The node; it is removed.
        builder: Holds the new nodes.
        outputs: What stands for its outputs, by position.
        keep: Values that are needed besides.
    """
    replaced: set[ir.Value] = set()
    for position, value in outputs.items():
        old = output_at(node, position)
        if old is None:
            continue
        # A graph output needs a node of its own: it can be neither an input nor another output.
        new = value if builder.owns(value) and value not in replaced else builder.op("Identity", value)
        replaced.add(new)
        new.name, new.type, new.shape = old.name, old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph = node.graph
    if graph is None:
        raise ValueError(f"Node {node.name!r} belongs to no graph.")
    graph.insert_before(node, builder.live_nodes([*replaced, *keep]))
    graph.remove(node, safe=True)
