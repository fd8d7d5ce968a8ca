"""The published cases that each dialect refuses, by the feature it names. A case missing here must pass."""

from __future__ import annotations

SOFTCAP = frozenset(
    {
        "3d_diff_heads_sizes_softcap",
        "3d_gqa_softcap",
        "3d_softcap",
        "3d_with_past_and_present_qk_matmul_softcap",
        "4d_diff_heads_sizes_softcap",
        "4d_gqa_softcap",
        "4d_softcap",
        "4d_softcap_neginf_mask",
        "4d_softcap_neginf_mask_poison",
        "4d_with_qk_matmul_softcap",
        "local_window_gqa_rank4_mask",
    }
)

REFUSED: dict[str, dict[str, frozenset[str]]] = {
    "onnx": {},
    "primitives": {},
    "trt": {
        "V head size other than K's": frozenset(
            {
                "3d_diff_heads_sizes",
                "3d_diff_heads_sizes_attn_mask",
                "3d_diff_heads_sizes_causal",
                "3d_diff_heads_sizes_scaled",
                "3d_diff_heads_with_past_and_present",
                "3d_local_window",
                "4d_diff_heads_mask4d_padded_kv",
                "4d_diff_heads_sizes",
                "4d_diff_heads_sizes_attn_mask",
                "4d_diff_heads_sizes_causal",
                "4d_diff_heads_sizes_scaled",
                "4d_diff_heads_with_past_and_present",
                "4d_diff_heads_with_past_and_present_mask3d",
                "4d_diff_heads_with_past_and_present_mask4d",
            }
        ),
        "softcap": SOFTCAP,
    },
    "contrib": {
        "softcap with other key than query length": frozenset(
            {
                "3d_diff_heads_sizes_softcap",
                "3d_gqa_softcap",
                "3d_softcap",
                "4d_diff_heads_sizes_softcap",
                "4d_gqa_softcap",
                "4d_softcap",
                "4d_softcap_neginf_mask",
                "4d_softcap_neginf_mask_poison",
            }
        ),
        "attention weights as output": frozenset(
            {
                "23_fullymasked_qk_matmul_output_mode3_zero",
                "24_fullymasked_qk_matmul_output_mode3_zero",
                "24_qk_matmul_output_mode3_softmax_precision",
                "3d_with_past_and_present_qk_matmul",
                "3d_with_past_and_present_qk_matmul_bias",
                "3d_with_past_and_present_qk_matmul_softcap",
                "3d_with_past_and_present_qk_matmul_softmax",
                "4d_with_past_and_present_qk_matmul",
                "4d_with_past_and_present_qk_matmul_bias",
                "4d_with_past_and_present_qk_matmul_bias_3d_mask",
                "4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
                "4d_with_past_and_present_qk_matmul_bias_4d_mask",
                "4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
                "4d_with_qk_matmul",
                "4d_with_qk_matmul_bias",
                "4d_with_qk_matmul_softcap",
                "4d_with_qk_matmul_softmax",
            }
        ),
        "fp64": frozenset(
            {
                "local_window_gqa_rank4_mask",
            }
        ),
    },
    "plugin": {
        "softcap": SOFTCAP,
        "attention weights as output": frozenset(
            {
                "23_fullymasked_qk_matmul_output_mode3_zero",
                "24_fullymasked_qk_matmul_output_mode3_zero",
                "24_qk_matmul_output_mode3_softmax_precision",
                "3d_with_past_and_present_qk_matmul",
                "3d_with_past_and_present_qk_matmul_bias",
                "3d_with_past_and_present_qk_matmul_softmax",
                "4d_with_past_and_present_qk_matmul",
                "4d_with_past_and_present_qk_matmul_bias",
                "4d_with_past_and_present_qk_matmul_bias_3d_mask",
                "4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
                "4d_with_past_and_present_qk_matmul_bias_4d_mask",
                "4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
                "4d_with_qk_matmul",
                "4d_with_qk_matmul_bias",
                "4d_with_qk_matmul_softmax",
            }
        ),
    },
}
