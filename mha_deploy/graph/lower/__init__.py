"""Lower the canonical `Attention` node to the form a target takes.

    onnx        as it is, checked
    trt         what the parser of TensorRT 10.14+ and TensorRT-RTX takes
    primitives  matmuls around a softmax, for TensorRT 8.6 to 10.13
    contrib     com.microsoft operators, for ONNX Runtime
    plugin      one node of our own TensorRT plugin

`RotaryEmbedding`, `TensorScatter` and `RMSNormalization`, which stand around attention, go with it.

A lowering is a function from model to model: the given model is not changed, weights are shared. What a
dialect cannot express is refused with a `LoweringError` that names the feature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import onnx_ir as ir

from mha_deploy.errors import DeployError, nearest
from mha_deploy.graph.ir import infer_shapes
from mha_deploy.graph.lower import to_contrib, to_onnx, to_plugin, to_primitives, to_trt
from mha_deploy.graph.lower.cache import CacheForm, cache_form, give_rows_out
from mha_deploy.graph.lower.call import LoweringError, OperatorRules, rewrite
from mha_deploy.graph.lower.opset import to_opset
from mha_deploy.graph.lower.pack import pack_projections
from mha_deploy.graph.lower.to_contrib import append_to_caches
from mha_deploy.graph.lower.to_plugin import finish, prepare

__all__ = ["DIALECTS", "CacheForm", "LoweringError", "cache_form", "lower", "pack_projections"]


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One form of attention.

    Args:
        options: The record of its options.
        rule: Writes one attention in it.
        operators: From its options to what it makes of the operators around attention.
        caches: Writes attention and its cache as one, before the others; a model to a new one.
        broadcasts: Whether masks need not be spelled out over the queries.
        finish: What is left to do when every attention is written; changes the model.
    """

    options: type
    rule: Callable[..., dict[int, ir.Value] | None] | None
    operators: Callable[[Any], OperatorRules] = lambda options: {}
    caches: Callable[..., ir.Model] | None = None
    broadcasts: bool = False
    finish: Callable[..., None] | None = None


DIALECTS = {
    to_onnx.DIALECT: Dialect(options=to_onnx.OnnxOptions, rule=None),
    to_trt.DIALECT: Dialect(
        options=to_trt.TrtOptions,
        rule=to_trt.lower_to_trt,
        operators=to_trt.operator_rules,
        broadcasts=True,
    ),
    to_primitives.DIALECT: Dialect(
        options=to_primitives.PrimitivesOptions,
        rule=to_primitives.lower_to_primitives,
        operators=lambda options: to_primitives.OPERATOR_RULES,
        caches=give_rows_out,
        broadcasts=True,
    ),
    to_contrib.DIALECT: Dialect(
        options=to_contrib.ContribOptions,
        rule=to_contrib.lower_to_contrib,
        operators=lambda options: to_contrib.OPERATOR_RULES,
        caches=append_to_caches,
    ),
    to_plugin.DIALECT: Dialect(
        options=to_plugin.PluginOptions,
        rule=to_plugin.lower_to_plugin,
        operators=lambda options: to_primitives.OPERATOR_RULES,
        caches=prepare,
        broadcasts=True,
        finish=finish,
    ),
}
"""The dialects by name."""


def lower(model: ir.Model, dialect: str, **options: Any) -> ir.Model:
    """Write every attention of a model in a dialect.

    Args:
        model: A model with ONNX `Attention` nodes, and what stands around them. It is not changed.
        dialect: One of `DIALECTS`.
        **options: Options of the dialect: the fields of `TrtOptions`, `PrimitivesOptions`, `ContribOptions`
            or `PluginOptions`.

    Returns:
        A new model that computes the same and shares the weights.

    Raises:
        LoweringError: A node uses a feature that the dialect cannot express.
        DeployError: The dialect or an option is not known.
    """
    if dialect not in DIALECTS:
        raise DeployError("No such dialect.", got=dialect, hint=nearest(dialect, DIALECTS))
    chosen = DIALECTS[dialect]
    settings = _read_options(dialect, chosen, options)
    if chosen.rule is None:
        return to_onnx.checked_copy(model)
    rule = partial(chosen.rule, options=settings)
    operators = chosen.operators(settings)
    prepared = model if chosen.caches is None else chosen.caches(model, settings, dialect=dialect)
    lowered = rewrite(prepared, rule, dialect=dialect, broadcasts=chosen.broadcasts, operators=operators)
    if chosen.finish is not None:
        chosen.finish(lowered, settings)
    opset = getattr(settings, "opset", None)
    return lowered if opset is None else infer_shapes(to_opset(lowered, opset, dialect=dialect))


def _read_options(name: str, dialect: Dialect, options: dict[str, Any]) -> Any:
    known = [field.name for field in fields(dialect.options)]
    for key, value in options.items():
        if key not in known:
            raise DeployError(f"Unknown option of the {name} dialect.", got=key, hint=nearest(key, known))
        choices = dialect.options.CHOICES.get(key)  # type: ignore[attr-defined]
        if choices is not None and value not in choices:
            raise DeployError(f"Not a choice for {key}.", got=value, hint=nearest(str(value), choices))
    return dialect.options(**options)
