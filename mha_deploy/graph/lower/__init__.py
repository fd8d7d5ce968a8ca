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
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import CheckerPass

from mha_deploy.errors import DeployError, nearest
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.ir import infer_shapes
from mha_deploy.graph.lower import to_contrib, to_plugin, to_primitives, to_trt
from mha_deploy.graph.lower.cache import CacheForm, cache_form
from mha_deploy.graph.lower.call import LoweringError, OperatorRules, copy_of, rewrite
from mha_deploy.graph.lower.opset import to_opset

__all__ = ["DIALECTS", "CacheForm", "LoweringError", "cache_form", "lower"]


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The options of a dialect that has none."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One form of attention.

    Args:
        rule: Writes one attention in it; None leaves every attention as it is.
        options: The record of its options.
        operators: From its options to the rules for the operators around attention.
        caches: Writes attention and its cache as one, before the other rules; changes the model.
        broadcasts: Whether masks may broadcast over the queries.
        finish: Runs when every attention is written; changes the model.
    """

    rule: Callable[..., dict[int, ir.Value] | None] | None
    options: type = NoOptions
    operators: Callable[[Any], OperatorRules] = lambda options: {}
    caches: Callable[..., None] | None = None
    broadcasts: bool = False
    finish: Callable[..., None] | None = None


DIALECTS = {
    "onnx": Dialect(rule=None),
    "trt": Dialect(
        rule=to_trt.lower_to_trt,
        options=to_trt.TrtOptions,
        operators=to_trt.operator_rules,
        broadcasts=True,
    ),
    "primitives": Dialect(
        rule=to_primitives.lower_to_primitives,
        options=to_primitives.PrimitivesOptions,
        operators=lambda options: to_primitives.OPERATOR_RULES,
        caches=to_primitives.give_rows_out,
        broadcasts=True,
    ),
    "contrib": Dialect(
        rule=to_contrib.lower_to_contrib,
        operators=lambda options: to_contrib.OPERATOR_RULES,
        caches=to_contrib.append_to_caches,
    ),
    "plugin": Dialect(
        rule=to_plugin.lower_to_plugin,
        options=to_plugin.PluginOptions,
        operators=to_plugin.operator_rules,
        caches=to_plugin.prepare,
        broadcasts=True,
        finish=to_plugin.finish,
    ),
}
"""The dialects by name."""


def lower(model: ir.Model, dialect: str, **options: Any) -> ir.Model:
    """Write every attention of a model in a dialect.

    Args:
        model: A model with ONNX `Attention` nodes, and the operators around them. It is not changed.
        dialect: One of `DIALECTS`.
        **options: Options of the dialect: the fields of `TrtOptions`, `PrimitivesOptions` or `PluginOptions`.

    Returns:
        A new model that computes the same and shares the weights.

    Raises:
        LoweringError: A node uses a feature that the dialect cannot express.
        DeployError: The dialect or an option is not known.
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
    settings = chosen.options(**options)
    if chosen.rule is None:
        return _checked_copy(model, dialect)
    rule = partial(chosen.rule, options=settings)
    operators = chosen.operators(settings)
    lowered = copy_of(model)
    if chosen.caches is not None:
        chosen.caches(lowered, settings, dialect=dialect)
    rewrite(lowered, rule, dialect=dialect, broadcasts=chosen.broadcasts, operators=operators)
    if chosen.finish is not None:
        chosen.finish(lowered, settings)
    opset = getattr(settings, "opset", None)
    return lowered if opset is None else infer_shapes(to_opset(lowered, opset, dialect=dialect))


def _checked_copy(model: ir.Model, dialect: str) -> ir.Model:
    """A copy with its shapes inferred; refused where ONNX does not allow it.

    Unlike the other dialects this one needs no shapes: what the graph does not state is left to the runtime.
    """
    copy = copy_of(model)
    for node in attention_nodes(copy):
        # The specification forbids both, and the checker does not detect them.
        problem = None
        if isinstance(node.Hq, int) and isinstance(node.Hkv, int) and node.Hq % node.Hkv:
            problem = "uneven head groups"
        elif node.has_past and node.has_nonpad_kv_seqlen:
            problem = "nonpad_kv_seqlen together with past_key"
        if problem is not None:
            raise LoweringError(problem, node=node.name, dialect=dialect, hint="export it again")
    try:
        CheckerPass()(copy)
    except (onnx.checker.ValidationError, ir.passes.PassError) as error:
        raise LoweringError(
            "place for an invalid graph",
            node=model.graph.name or "main",
            dialect=dialect,
            got=str(error.__cause__ or error).strip().splitlines()[0],
            hint="export it again, or repair the node",
        ) from error
    return copy
