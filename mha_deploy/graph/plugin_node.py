"""The nodes of the plugin library: their names, and the values of their attributes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import onnx_ir as ir

OP_TYPE: Final = "MhaDeployAttention"
LINEAR: Final = "MhaDeployLinear"
NORM_ACTIVATION: Final = "MhaDeployNormActivation"
DOMAIN: Final = "mha_deploy"
VERSION: Final = "1"
"""The version of every node: their attributes, inputs and meaning. Another meaning is another version."""

LAYER_NORM, RMS_NORM, GELU, GELU_TANH, SILU, COPY = range(6)
"""Values of the attribute `operation` of a node of norm or activation; a copy is written in FP8."""

NOT_FP8, FP8_BESIDES, FP8_ONLY = range(3)
"""Values of its attribute `fp8`: whether the result is written in FP8, too or instead."""

UNQUANTIZED, PER_TENSOR, PER_OUTPUT = range(3)
"""Values of the attribute `quantized` of a linear node: not, or FP8 with one scale or one for each output."""

FP8_STEP: Final = 16
"""Inputs and outputs of a GEMM in FP8 are multiples of it."""

FP8_OF_WORD: Final = 4
"""TensorRT 8.6 has no FP8: nodes hand it on as INT32, four numbers in each."""

IN_FP16: Final = {
    **dict.fromkeys(("fp8", "fp8_copy"), 0),
    **dict.fromkeys(("query_scale", "key_scale", "value_scale", "weights_scale", "output_scale"), 1.0),
}
"""The attributes for FP8 of an attention that has none."""

NONE, TOP_LEFT, BOTTOM_RIGHT = range(3)
"""Values of the attribute `causal`: no diagonal, or the corner that the causal diagonal is aligned to."""

FROM_ZERO, FROM_STARTS, PER_TOKEN, GIVEN = range(4)
"""Values of `rotary_positions`, the table row of query s: s, starts[b] + s, b · S + s, or an input."""

NO_WINDOW: Final = -1
"""The value of `left_window` and `right_window` without a limit."""


def is_plugin_attention(node: ir.Node) -> bool:
    """Whether a node is one whole attention of the plugin."""
    return (node.domain, node.op_type) == (DOMAIN, OP_TYPE)


def fp8_values(node: ir.Node) -> set[ir.Value]:
    """The inputs and outputs of a node of the plugin that hold FP8, as words."""
    names = ("quantized", "fp8", "fp8_copy")
    quantized, fp8, copied = (node.attributes.get_int(name, 0) for name in names)
    if node.op_type == LINEAR and quantized != UNQUANTIZED:
        return {value for value in node.inputs[:2] if value is not None}
    if node.op_type == NORM_ACTIVATION and fp8 != NOT_FP8:
        return {node.outputs[0 if fp8 == FP8_ONLY else -1]}
    if node.op_type == OP_TYPE and (fp8 or copied):
        return {node.outputs[-1 if copied else 0]}
    return set()


def multiplies_fp8(node: ir.Node) -> bool:
    """Whether a node of the plugin is a GEMM or an attention in FP8."""
    return bool(operands_in_fp8(node) or (node.op_type == LINEAR and fp8_values(node)))


def operands_in_fp8(node: ir.Node) -> set[ir.Value]:
    """The inputs of an attention that it rounds to FP8 itself: those with Q, K and V."""
    if node.op_type != OP_TYPE or not node.attributes.get_int("fp8", 0):
        return set()
    count = 1 + max(node.attributes.get_ints("sources", (0,)) or (0,))
    return {value for value in node.inputs[:count] if value is not None}


def lookup_attributes() -> dict[str, Any]:
    """The attributes by which TensorRT finds the plugin of a node."""
    return {"plugin_version": VERSION, "plugin_namespace": DOMAIN}


# -- What the plugin refuses: the rules of its C++, over the same attributes and sizes -------------

ALIGNED: Final = 8
"""Kernels load 16 bytes at a time: eight elements of two bytes."""

LARGEST_HEAD: Final = 256

GATED_SIZES: Final = (32, 64, 96, 128)
"""The head sizes for which there is a kernel with gates."""

_MOST_HEADS = 65535
_WIDENED = 16  # with a key mask, heads have so many more elements, or up to that multiple
_LEAST_MASKED_SCALE = 1e-6


def takes_key_mask(head_size: int, scale: float) -> bool:
    """Whether heads can be wide enough for a key mask, and their scale keeps masked keys below all others."""
    widened = (head_size // _WIDENED + 1) * _WIDENED
    return widened <= LARGEST_HEAD and scale >= _LEAST_MASKED_SCALE


class NodeSizes(NamedTuple):
    """The sizes of one call of an attention: operands of rank 3 or 4, the bias, caches and rotary tables."""

    operands: tuple[tuple[int, ...], ...]
    bias: tuple[int, ...] = ()
    cache_rows: int = 0
    table_rows: int = 0

    def of(self, own: Mapping[str, Any], part: int) -> tuple[int, ...]:
        """The dimensions of the operand with Q, K or V."""
        return self.operands[own["sources"][part]]

    def rows(self, own: Mapping[str, Any], part: int) -> int:
        """How many queries, keys or values an operand has."""
        return self.of(own, part)[-2 if len(self.of(own, part)) == 4 else 1]

    def keys(self, own: Mapping[str, Any]) -> int:
        """The number of keys: that of the cache where there is one."""
        return self.cache_rows if own["has_cache"] else self.rows(own, 1)


def why_refused(
    own: Mapping[str, Any], sizes: NodeSizes | None = None, *, aligned: int = ALIGNED
) -> str | None:
    """Why the plugin refuses an attention node with these attributes, or a call of these sizes; None: not.

    `plugins/src/attention.cpp` has the same rules; a test compares the two. Of the head sizes and widths
    `aligned` is a divisor.
    """
    return next((reason for applies, reason in _rules(own, sizes, aligned) if applies), None)


def _rules(own: Mapping[str, Any], sizes: NodeSizes | None, aligned: int) -> Iterator[tuple[bool, str]]:
    """Every rule in turn; one may rely on those before it."""
    queries, keys, size, value = (
        own[name] for name in ("query_heads", "key_heads", "head_size", "value_size")
    )
    windows = (own["left_window"], own["right_window"])
    yield min(queries, keys, size, value) < 1 or queries > _MOST_HEADS, "head counts and sizes from 1 on"
    yield bool(queries % keys), "query heads that are not a multiple of the key heads"
    yield own["causal"] not in (NONE, TOP_LEFT, BOTTOM_RIGHT), "another diagonal"
    yield min(windows) < NO_WINDOW or not math.isfinite(own["scale"]), "a negative window or infinite scale"
    sources = own["sources"]
    gaps = set(sources) != set(range(1 + max(sources)))
    yield gaps or min(sources) < 0 or max(sources) > 2 or min(own["offsets"]) < 0, "operands without a place"
    if own["has_cache"]:
        yield bool(own["has_key_lengths"]), "a preallocated cache together with key lengths"
        yield own["causal"] == TOP_LEFT, "a preallocated cache with a diagonal from the first key on"
    if own["has_key_mask"]:
        excluded = ("has_bias", "has_key_lengths", "has_gates", "has_cache", "fp8")
        yield any(own[name] for name in excluded), "a key mask with another mask, gates, a cache or FP8"
        plain = own["causal"] != BOTTOM_RIGHT and windows == (NO_WINDOW, NO_WINDOW)
        yield not plain, "a key mask with a window, or a diagonal that ends at the last key"
        yield not takes_key_mask(size, own["scale"]), "a key mask with this head size or scale"
    yield not (0 <= own["rotary"] <= 2 and FROM_ZERO <= own["rotary_positions"] <= GIVEN), "another rotation"
    if own["rotary"]:
        rotated, step = own["rotary_size"], aligned * (2 if own["rotary"] == 1 else 1)
        yield rotated < step or bool(rotated % step) or rotated > size, "a rotation of this size"
        yield bool(own["has_gates"]), "a rotation together with gates"
        yield own["rotary_positions"] == FROM_STARTS and not own["has_cache"], "positions without a cache"
    if own["has_gates"]:
        others = own["has_bias"] or own["has_cache"] or windows != (NO_WINDOW, NO_WINDOW)
        yield bool(others), "gates together with a bias, a window or a cache"
        yield size != value or size not in GATED_SIZES or own["scale"] <= 0.0, "gates for this head size"
    else:
        yield bool(size % aligned or value % aligned), "head sizes that are not multiples of 8"
        yield max(size, value) > LARGEST_HEAD, f"head sizes above {LARGEST_HEAD}"
    if own["fp8_copy"]:
        yield bool(own["fp8"] or own["has_gates"]), "a copy in FP8 of an attention in FP8 or with gates"
        yield not (math.isfinite(own["output_scale"]) and own["output_scale"] > 0), "FP8 without a scale"
    if own["fp8"]:
        others = own["has_bias"] or own["has_gates"] or own["has_cache"]
        yield bool(others), "FP8 together with a mask of numbers, gates or a cache"
        step = 2 * aligned
        yield bool(size % step or value % step), "FP8 with head sizes that are not multiples of 16"
        scales = [own[name] for name in IN_FP16 if name.endswith("_scale")]
        yield not all(math.isfinite(scale) and scale > 0 for scale in scales), "FP8 without scales"
    yield any(offset % aligned for offset in own["offsets"]), "offsets that are not multiples of 8"
    if sizes is not None:
        yield from _rules_of_sizes(own, sizes, aligned)


def _rules_of_sizes(own: Mapping[str, Any], sizes: NodeSizes, aligned: int) -> Iterator[tuple[bool, str]]:
    ranks = {len(each) for each in sizes.operands}
    yield len(sizes.operands) != 1 + max(own["sources"]) or not ranks <= {3, 4}, "operands of this rank"
    yield len({each[0] for each in sizes.operands}) > 1, "batches that differ"
    yield not all(0 <= axis < 1 << 31 for each in sizes.operands for axis in each), "sizes above 31 bits"
    for part, offset in enumerate(own["offsets"]):
        dims = sizes.of(own, part)
        heads, size = (
            own["key_heads" if part else "query_heads"],
            own["value_size" if part == 2 else "head_size"],
        )
        if len(dims) == 4:
            yield bool(offset) or (dims[1], dims[3]) != (heads, size), "heads of another layout"
        else:
            yield offset + heads * size > dims[2] or bool(dims[2] % aligned), "rows of this width"
    S, T = sizes.rows(own, 0), sizes.keys(own)
    yield sizes.rows(own, 1) != sizes.rows(own, 2), "other keys than values"
    if own["has_cache"]:
        yield sizes.rows(own, 1) != S, "other new keys than queries"
        yield not S <= T < 1 << 31, "a cache without room for the new entries"
    yield bool(sizes.bias) and not own["has_bias"], "a bias that is not stated"
    if own["has_bias"]:
        bias, batch = sizes.bias, sizes.operands[0][0]
        fits = len(bias) == 4 and bias[2:] == (S, T)
        fits = fits and bias[0] in (1, batch) and bias[1] in (1, own["query_heads"])
        yield not fits, "a bias that is not one of every query and key"
        counted = own["has_key_lengths"] or own["has_cache"]
        diagonal = own["causal"] == BOTTOM_RIGHT and S != 1 and (counted or S > T)
        yield diagonal, "a bias together with a diagonal that ends at the last key"
    if own["rotary"]:
        yield sizes.rows(own, 1) != S, "other rotated keys than queries"
        yield sizes.table_rows < 1 and S > 0 and sizes.operands[0][0] > 0, "rotary tables without rows"
    if own["has_gates"]:
        yield any(each[-1] % aligned for each in sizes.operands), "rows of this width"
        yield sizes.operands[0][0] > _MOST_HEADS, "this batch"
