"""Lower the canonical `Attention` node to the form a target accepts.

    onnx        as it is, checked against the specification
    trt         what the parser of TensorRT 10.14+ and TensorRT-RTX accepts
    primitives  matmuls around a softmax, for TensorRT 8.6 to 10.13
    contrib     com.microsoft operators, for ONNX Runtime
    plugin      one node of our own TensorRT plugin

`RotaryEmbedding`, `TensorScatter` and `RMSNormalization` around attention are lowered with it.

A lowering is a function from model to model: its argument is not changed, weights are shared. What a
dialect cannot express is refused with a `LoweringError` that names the feature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from mha_deploy.errors import DeployError, nearest
from mha_deploy.graph.attention_node import QK_OUTPUT, attention_nodes, is_attention, read_quantized
from mha_deploy.graph.ir import (
    Dim,
    NodeBuilder,
    constant_number,
    dim,
    dims,
    infer_shapes,
    is_op,
    node_name,
    output_at,
    prefix_within,
    prefixes_in,
    replace_node,
    replace_value,
)
from mha_deploy.graph.lower import to_contrib, to_plugin, to_primitives, to_trt
from mha_deploy.graph.lower.cache import number_of
from mha_deploy.graph.lower.call import (
    AttentionCall,
    LoweringError,
    OperatorRules,
    Outputs,
    copy_of,
    read_call,
    take_mask_before_expand,
)
from mha_deploy.graph.lower.opset import to_opset
from mha_deploy.graph.valid import refuse_invalid, why_invalid

__all__ = ["DIALECTS", "LoweringError", "lower"]


NoOptions = make_dataclass("NoOptions", [])
Rule = Callable[[AttentionCall, NodeBuilder, Any], Outputs | None]
"""Writes one attention, or gives None to keep the node."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One form of attention."""

    rule: Rule | None  # writes one attention in it; None only checks the model
    options: type = NoOptions  # the record of its options
    # From its options to the rules for the operators around attention
    operators: Callable[[Any], OperatorRules] = lambda options: {}
    # Writes attention and its cache as one, before the other rules; changes the model
    caches: Callable[..., None] | None = None
    # Writes an attention in eight bits with all of its Q/DQ; None where its weights are an output like others
    quantized: Callable[..., ir.Value] | None = None
    broadcasts: bool = True  # whether masks may broadcast over the queries
    # Runs when every attention is written; gives whether it changed the model
    finish: Callable[..., bool] | None = None


DIALECTS = {
    "onnx": Dialect(rule=None),
    "trt": Dialect(
        rule=to_trt.lower_to_trt,
        options=to_trt.TrtOptions,
        operators=to_trt.operator_rules,
        quantized=to_trt.quantized_to_trt,
        finish=to_trt.keep_fp32,
    ),
    "primitives": Dialect(
        rule=to_primitives.lower_to_primitives,
        options=to_primitives.PrimitivesOptions,
        operators=lambda options: to_primitives.OPERATOR_RULES,
        caches=to_primitives.read_caches_in_place,
        quantized=to_primitives.quantized_to_primitives,
    ),
    "contrib": Dialect(
        rule=to_contrib.lower_to_contrib,
        operators=lambda options: to_contrib.OPERATOR_RULES,
        caches=to_contrib.append_to_caches,
        broadcasts=False,
    ),
    "plugin": Dialect(
        rule=to_plugin.lower_to_plugin,
        options=to_plugin.PluginOptions,
        operators=to_plugin.operator_rules,
        caches=to_plugin.prepare,
        quantized=to_plugin.quantized_to_plugin,
        finish=to_plugin.finish,
    ),
}
"""The dialects by name."""


def lower(model: ir.Model, dialect: str, **options: Any) -> ir.Model:
    """A new model with every attention in one of `DIALECTS`; it computes the same and shares the weights.

    The options are the fields of `TrtOptions`, `PrimitivesOptions` or `PluginOptions`.
    """
    if dialect not in DIALECTS:
        raise DeployError("No such dialect.", got=dialect, hint=nearest(dialect, DIALECTS))
    chosen = DIALECTS[dialect]
    known = [field.name for field in fields(chosen.options)]
    for key, value in options.items():
        if key not in known:
            raise DeployError(f"Unknown option of the {dialect} dialect.", got=key, hint=nearest(key, known))
        choices = getattr(chosen.options, "CHOICES", {}).get(key)
        if choices is not None and value not in choices:
            raise DeployError(f"Not a choice for {key}.", got=value, hint=nearest(str(value), choices))
    settings, lowered = chosen.options(**options), copy_of(model)
    try:
        if chosen.rule is None:
            _check(lowered)
            return lowered
        _name_counts(lowered)
        if chosen.caches is not None:
            chosen.caches(lowered, settings)
        if chosen.quantized is not None:
            _write_quantized(lowered, chosen, settings)
        _rewrite(lowered, chosen.rule, chosen, settings)
        changed = chosen.finish is not None and chosen.finish(lowered, settings)
        opset = getattr(settings, "opset", None)
        changed = (opset is not None and to_opset(lowered, opset)) or changed
    except LoweringError as error:
        error.name_dialect(dialect)
        raise
    if changed:
        infer_shapes(lowered)
    return refuse_invalid(lowered, lambda: model, f"The graph in the {dialect} dialect")


def _name_counts(lowered: ir.Model) -> None:
    """Let what has the length of a Range from 0 to a size have that size; changes the model.

    ONNX infers a new name for it, and a padding mask that is made of it would not be known to be one.
    """
    of_interface = {size for value in (*lowered.graph.inputs, *lowered.graph.outputs) for size in dims(value)}
    names = dict[Dim, Dim]()
    for node in lowered.graph.all_nodes():
        if is_op(node, "Range") and [constant_number(node.inputs[at]) for at in (0, 2)] == [0.0, 1.0]:
            own, size = dim(node.outputs[0], 0), number_of(node.inputs[1])
            if isinstance(own, str) and isinstance(size, str) and own not in of_interface:
                names[own] = size
    for node in lowered.graph.all_nodes() if names else ():
        for value in node.outputs:
            if names.keys() & set(dims(value)):
                value.shape = ir.Shape([names.get(size, size) for size in dims(value)])


def _write_quantized(lowered: ir.Model, chosen: Dialect, settings: Any) -> None:
    """Write the attentions in eight bits whose weights are quantized as well; changes the model."""
    opset, taken = lowered.opset_imports.get(""), prefixes_in(lowered)
    for node in [node for node in lowered.graph if is_attention(node)]:
        found = read_quantized(node)
        if found is None or found.matmul is None or chosen.quantized is None:
            continue
        take_mask_before_expand(node)
        builder = NodeBuilder(prefix_within(node_name(node), taken))
        heads = chosen.quantized(read_call(node, opset=opset), builder, found, settings)
        replace_value(found.matmul.outputs[0], heads)
        lowered.graph.insert_before(found.matmul, builder.live_nodes([heads]))
    RemoveUnusedNodesPass()(lowered)
    infer_shapes(lowered)


def _rewrite(lowered: ir.Model, rule: Rule, chosen: Dialect, settings: Any) -> None:
    """Apply the rules of a dialect to every attention of the model, which is changed, and around them."""
    opset, taken, operators = lowered.opset_imports.get(""), prefixes_in(lowered), chosen.operators(settings)
    for node in list(lowered.graph.all_nodes()):
        outputs: dict[int, ir.Value] | None = None
        if is_attention(node):
            if chosen.broadcasts:
                take_mask_before_expand(node)
            call = read_call(node, opset=opset)
            scores = output_at(node, QK_OUTPUT)
            if scores is not None and dims(scores) and (call.past_key is not None or dim(scores, 3) == 0):
                # ONNX infers the length of the past alone, or 0, where that of the new keys has a name.
                scores.shape = ir.Shape([*dims(scores)[:3], None])
            builder = NodeBuilder(prefix_within(call.attention.name, taken))
            outputs = rule(call, builder, settings)
        elif is_op(node, *operators):
            builder = NodeBuilder(prefix_within(node_name(node), taken))
            output = operators[node.op_type](node, builder)
            outputs = None if output is None else {0: output}
        if outputs is not None:
            replace_node(node, builder, outputs)
    if chosen.broadcasts:
        RemoveUnusedNodesPass()(lowered)  # the Expand of a mask, and the shape it was expanded to
    infer_shapes(lowered)


def _check(model: ir.Model) -> None:
    """Refuse a model in ONNX's own form that ONNX does not allow.

    Unlike the other dialects this one needs no shapes: what the graph does not state is left to the runtime.
    """
    for node in attention_nodes(model):
        # The specification forbids both, and the checker does not detect them.
        uneven = isinstance(node.Hq, int) and isinstance(node.Hkv, int) and node.Hq % node.Hkv
        if uneven or (node.has_past and node.has_nonpad_kv_seqlen):
            problem = "uneven head groups" if uneven else "nonpad_kv_seqlen together with past_key"
            raise LoweringError(problem, node.name, hint="export it again")
    if (found := why_invalid(model)) is not None:
        graph, hint = model.graph.name or "main", "export it again, or repair the node"
        raise LoweringError("an invalid graph", graph, got=found, hint=hint)
