"""What keeps TensorRT and TensorRT-RTX from fusing an attention that they take."""

from __future__ import annotations

from mha_deploy.graph.attention_node import AttentionNode
from mha_deploy.graph.eligibility.records import (
    BEFORE_10,
    BEFORE_ATTENTION,
    EVERY_TENSORRT,
    EVERYWHERE,
    NOT_FUSED,
    NOTE,
    SEEN_RTX,
    WITH_ATTENTION,
    Rule,
    Target,
    v_head_size_differs,
)

_ISSUE_4167 = "NVIDIA/TensorRT issue 4167: FP16 and BF16, SM >= 75, 16 <= D <= 256, D % 8 == 0"


def _one_query(node: AttentionNode) -> bool:
    """A single query has a kernel of its own, with wider limits."""
    return node.S == 1 and isinstance(node.D, int) and 8 <= node.D <= 256 and node.D % 8 == 0


def _head_size_out_of_range(node: AttentionNode, target: Target) -> bool:
    return isinstance(node.D, int) and not 16 <= node.D <= 256 and not _one_query(node)


def _head_size_unaligned(node: AttentionNode, target: Target) -> bool:
    return isinstance(node.D, int) and 16 <= node.D <= 256 and node.D % 8 != 0


def _mask_is_computed(node: AttentionNode, target: Target) -> bool:
    # A single new token sees every key behind it: the lowering writes no mask.
    one_token = node.S == node.T == 1 and not node.has_nonpad_kv_seqlen
    causal = node.is_causal and not one_token
    return causal or node.mask == "bool" or node.has_nonpad_kv_seqlen or node.has_window


_SEEN_86 = "measured on TensorRT 8.6.0 and an H200, see benchmarks/RECORD.md"

FUSION_RULES: tuple[Rule, ...] = (
    Rule(
        id="qk-output-unfused",
        severity=NOT_FUSED,
        holds=(BEFORE_ATTENTION,),
        applies=lambda node, target: node.has_qk_output,
        message="A fused kernel never writes the weights to memory.",
        remedy="do without the weights",
        source=SEEN_RTX,
    ),
    Rule(
        id="softcap-unfused",
        severity=NOT_FUSED,
        holds=EVERYWHERE,
        applies=lambda node, target: node.softcap != 0,
        message="Matrix products with tanh between them are not fused.",
        remedy="use a plugin, or train without softcap",
        source=SEEN_RTX,
    ),
    Rule(
        id="v-head-size-unfused",
        severity=NOT_FUSED,
        holds=(BEFORE_ATTENTION,),
        applies=v_head_size_differs,
        message="Matrix products are fused for one head size, and this has {D} and {Dv}.",
        remedy="give V the head size of K",
        source=f"{SEEN_RTX}, which fuses the same products",
    ),
    Rule(
        id="head-size-range",
        severity=NOT_FUSED,
        holds=EVERYWHERE,
        applies=_head_size_out_of_range,
        message="Head size {D} is outside the fused range of 16 to 256.",
        remedy="use a head size from 16 to 256; otherwise the build fails unless decomposition is allowed",
        source=f"{SEEN_RTX}; {_ISSUE_4167}",
    ),
    Rule(
        id="head-size-multiple",
        severity=NOT_FUSED,
        holds=(BEFORE_ATTENTION,),
        applies=_head_size_unaligned,
        message="Head size {D} is no multiple of 8.",
        remedy="pad the heads to a multiple of 8, or use TensorRT 10.14 or later",
        source=_ISSUE_4167,
    ),
    Rule(
        id="head-size-padded",
        severity=NOTE,
        holds=WITH_ATTENTION,
        applies=_head_size_unaligned,
        message="Head size {D} is no multiple of 8: fused, with kernels that pad before and cut after.",
        remedy="use a multiple of 8",
        source=f"{SEEN_RTX}; TensorRT 10.14.1 release notes",
    ),
    Rule(
        id="fp32",
        severity=NOT_FUSED,
        holds=EVERYWHERE,
        applies=lambda node, target: node.dtype == "fp32" and not _one_query(node),
        message="fp32 attention is not fused.",
        remedy="export in fp16 or bf16; otherwise the build may fail unless decomposition is allowed",
        source=SEEN_RTX,
    ),
    Rule(
        id="facts-unknown",
        severity=NOTE,
        holds=EVERYWHERE,
        applies=lambda node, target: node.dtype is None or not isinstance(node.D, int),
        message="The graph does not state the type ({dtype}) or head size ({D}): fusion cannot be foretold.",
        remedy="run shape inference before the check",
        source="",
    ),
    Rule(
        id="computed-mask",
        severity=NOT_FUSED,
        holds=(BEFORE_10,),
        applies=_mask_is_computed,
        message="A mask that the graph computes becomes part of the softmax kernel, and nothing is fused.",
        remedy="use TensorRT 10 or later, a plugin, or give an additive mask as an input (up to 512 keys)",
        source=_SEEN_86,
    ),
    Rule(
        id="grouped-heads",
        severity=NOTE,
        holds=(BEFORE_10,),
        applies=lambda node, target: node.kind in ("GQA", "MQA"),
        message="Grouped heads ({Hq} on {Hkv}) were fused only under an additive mask that is an input.",
        remedy="use TensorRT 10 or later, or a plugin: where they fuse, they are slower than unfused",
        source=_SEEN_86,
    ),
    Rule(
        id="compute-capability",
        severity=NOT_FUSED,
        holds=(EVERY_TENSORRT,),
        applies=lambda node, target: target.is_below(7, 5),
        message="Attention is fused from compute capability 7.5 on.",
        remedy="use a newer GPU",
        source=_ISSUE_4167,
    ),
)
