"""What the parsers and builders of TensorRT and TensorRT-RTX refuse, or take and get wrong."""

from __future__ import annotations

from mha_deploy.graph.attention_node import AttentionNode
from mha_deploy.graph.eligibility.records import (
    BEFORE_10,
    BEFORE_ATTENTION,
    EVERYWHERE,
    FLAG_CAUSAL,
    NOTE,
    REFUSED,
    RTX,
    SEEN_RTX,
    WITH_ATTENTION,
    WRONG_ANSWER,
    Rule,
    Target,
    is_rtx_gpu,
    v_head_size_differs,
)
from mha_deploy.graph.lower.call import same_size

_SEEN_PARSER = f"{SEEN_RTX}; onnx-tensorrt docs/operators.md for 10.15 says the same"

_TRT = "trt lowering"


def _float_mask_of_other_type(node: AttentionNode, target: Target) -> bool:
    return node.mask in ("float", "int") and node.dtype is not None and node.mask_dtype != node.dtype


def _mask_is_short(node: AttentionNode, target: Target) -> bool:
    if not node.mask_dims or node.has_past:
        return False
    columns = node.mask_dims[-1]
    if isinstance(columns, int) and isinstance(node.T, int):
        return columns < node.T
    return node.has_nonpad_kv_seqlen and not same_size(columns, node.T)


def _causal_is_not_square(node: AttentionNode, target: Target) -> bool:
    alone = not node.has_past and not node.has_nonpad_kv_seqlen
    return node.is_causal and alone and not same_size(node.S, node.T)


def _not_an_rtx_gpu(node: AttentionNode, target: Target) -> bool:
    gpu = target.compute_capability
    return gpu is not None and not is_rtx_gpu(gpu)


PARSER_RULES: tuple[Rule, ...] = (
    Rule(
        id="no-attention-operator",
        severity=REFUSED,
        holds=(BEFORE_ATTENTION,),
        applies=lambda node, target: True,
        message="The parser has no Attention operator before TensorRT 10.14, and 8.6 knows opsets up to 17.",
        remedy="lower to matrix products, which these versions recognise and fuse",
        cured_by="primitives lowering",
        source="TensorRT OSS CHANGELOG, 10.14",
    ),
    Rule(
        id="past",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.has_past,
        message="The parser refuses past_key and past_value; is_causal after a Concat would be misaligned.",
        remedy="join the past outside the operator, with an explicit mask for the causal offset",
        cured_by=_TRT,
        source=_SEEN_PARSER,
    ),
    Rule(
        id="present",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.has_present,
        message="The parser takes Attention with one output only.",
        remedy="produce present_key and present_value outside the operator",
        cured_by=_TRT,
        source=f"{_SEEN_PARSER}; NVIDIA/TensorRT issue 4738 for 10.16",
    ),
    Rule(
        id="qk-output",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.has_qk_output,
        message="The parser takes Attention with one output only: the weights are not available.",
        remedy="compute the weights beside the fused operator, or do without them",
        cured_by=_TRT,
        source=_SEEN_PARSER,
    ),
    Rule(
        id="softcap",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.softcap != 0,
        message="The parser refuses softcap ({softcap}).",
        remedy="lower to matrix products, or use a plugin",
        cured_by=_TRT,
        needs=("decompose",),
        source=_SEEN_PARSER,
    ),
    Rule(
        id="softmax-precision",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.softmax_precision is not None,
        message="The parser refuses softmax_precision ({softmax_precision}).",
        remedy="leave it out: the fused kernel has one softmax for all, whatever it is asked for",
        cured_by=_TRT,
        source=_SEEN_PARSER,
    ),
    Rule(
        id="v-head-size",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=v_head_size_differs,
        message="Keys and values must have the same head size, and have {D} and {Dv}.",
        remedy="pad the smaller with zeros (exact), or lower to matrix products",
        cured_by=_TRT,
        needs=("pad_heads",),
        source=SEEN_RTX,
    ),
    Rule(
        id="heads-unknown",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.rank == 3 and (node.Hq is None or node.Hkv is None),
        message="3-D inputs without q_num_heads and kv_num_heads.",
        remedy="set both attributes",
        source=SEEN_RTX,
    ),
    Rule(
        id="mask-and-causal",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.mask != "none" and node.is_causal,
        message="The parser takes a mask or is_causal, not both.",
        remedy="merge the two into one mask",
        cured_by=_TRT,
        source=SEEN_RTX,
    ),
    Rule(
        id="mask-dtype",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=_float_mask_of_other_type,
        message="The mask is {mask_dtype} and the queries are {dtype}; it must be bool or the same.",
        remedy="cast the mask",
        cured_by=_TRT,
        source=SEEN_RTX,
    ),
    Rule(
        id="short-mask",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=_mask_is_short,
        message="The mask may end before the keys do: {mask_dims} for {T} keys.",
        remedy="pad the mask to the number of keys",
        cured_by=_TRT,
        source=SEEN_RTX,
    ),
    Rule(
        id="nonpad-kv-seqlen",
        severity=WRONG_ANSWER,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.has_nonpad_kv_seqlen,
        message="The parser ignores nonpad_kv_seqlen: padded keys are attended to.",
        remedy="write the lengths as a mask",
        cured_by=_TRT,
        source=f"{SEEN_RTX}: same kernel with and without; the 10.15 importer never reads the input",
    ),
    Rule(
        id="window",
        severity=WRONG_ANSWER,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.has_window,
        message="The parser ignores the window ({left_window}, {right_window}) without a message.",
        remedy="write the window as a mask",
        cured_by=_TRT,
        source=f"{SEEN_RTX}: same kernel with and without",
    ),
    Rule(
        id="bool-mask",
        severity=NOTE,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.mask == "bool",
        message="A boolean mask costs about eight small kernels before the fused one.",
        remedy="make it additive, in the type of the queries",
        cured_by=_TRT,
        source=SEEN_RTX,
    ),
    Rule(
        id="empty-rows",
        severity=NOTE,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.mask != "none",
        message="A query that sees no key has output zero in ONNX; TensorRT promises nothing.",
        remedy="zero such rows after the operator",
        cured_by=_TRT,
        source="ONNX Attention specification; TensorRT documents no value",
    ),
    Rule(
        id="causal-upper-left",
        severity=NOTE,
        holds=WITH_ATTENTION,
        applies=_causal_is_not_square,
        message="is_causal with S = {S} and T = {T}: query 0 sees key 0 only, in ONNX and in TensorRT alike.",
        remedy="for decoding with a cache give past_key or nonpad_kv_seqlen, or an explicit mask",
        source=f"{SEEN_RTX}: CausalMaskKind.UPPER_LEFT",
    ),
    Rule(
        id="causal-alignment-unknown",
        severity=NOTE,
        holds=(FLAG_CAUSAL,),
        applies=_causal_is_not_square,
        message="Before TensorRT 11 the corner that causal starts from is not stated (S = {S}, T = {T}).",
        remedy="write it as a mask",
        cured_by=_TRT,
        needs=("explicit_causal",),
        source="API of 10.14 and 10.16: IAttention.causal is a flag, CausalMaskKind came with 11.0",
    ),
    Rule(
        id="fp64",
        severity=REFUSED,
        holds=EVERYWHERE,
        applies=lambda node, target: "fp64" in (node.dtype, node.softmax_precision),
        message="There is no fp64.",
        remedy="export in fp16 or bf16",
        source="TensorRT data types",
    ),
    Rule(
        id="bf16-version",
        severity=REFUSED,
        holds=(BEFORE_10,),
        applies=lambda node, target: node.dtype == "bf16",
        message="There is no bf16 before TensorRT 10.",
        remedy="export in fp16",
        source="API of 8.6.1: no DataType.BF16",
    ),
    Rule(
        id="rtx-gpu",
        severity=REFUSED,
        holds=(RTX,),
        applies=_not_an_rtx_gpu,
        message="TensorRT-RTX builds for compute capability 7.5, 8.0, 8.6, 8.9 and 12.x only.",
        remedy="use TensorRT for data-centre GPUs such as H100, H200 and B200",
        source="TensorRT-RTX 1.7.1: members of ComputeCapability, and its documentation",
    ),
    Rule(
        id="bf16-gpu",
        severity=REFUSED,
        holds=EVERYWHERE,
        applies=lambda node, target: node.dtype == "bf16" and target.is_below(8, 0),
        message="bf16 needs compute capability 8.0.",
        remedy="export in fp16",
        source=f"{SEEN_RTX}: cannot compile for sm75",
    ),
)
