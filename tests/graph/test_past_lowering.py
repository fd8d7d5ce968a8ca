"""Attention with a past, drawn at random: every lowering against ONNX's reference evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from attention_models import attention, random_feeds
from conformance import run_in_ort
from onnx.reference import ReferenceEvaluator

from mha_deploy.graph.lower import LoweringError, lower

LOWERINGS: list[tuple[str, dict[str, Any]]] = [
    ("contrib", {}),
    ("primitives", {"gqa": "fold"}),
]


def random_node(seed: int) -> tuple[ir.Model, dict[str, int]]:
    """An attention with a past, and sizes for its dynamic axes."""
    rng = np.random.default_rng(seed)

    def one_of(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    Hkv, group, D = one_of(1, 2), one_of(1, 2, 3), one_of(4, 8)
    Dv, rank = one_of(D, 8, 12), one_of(3, 4)
    same = one_of(True, True, False)  # as many new keys as queries
    sizes = {"B": one_of(1, 2), "S": one_of(1, 2, 5), "T": 7, "P": one_of(1, 3, 6)}
    axes: dict[str, Any] = {name: one_of(name, size) for name, size in sizes.items()}
    if same:
        axes["T"] = axes["S"]
    features: dict[str, Any] = {
        "past": axes["P"],
        "is_causal": one_of(0, 1, 1),
        "present": one_of(True, False),
    }
    total = sizes["P"] + (sizes["S"] if same else sizes["T"])
    if one_of(True, False):
        # One row for each query: with fewer, the reference evaluator misplaces the causal mask.
        features["mask"] = (one_of("bool", "fp32"), one_of((sizes["S"], total), (1, 1, sizes["S"], total)))
    if one_of(True, False, False):
        features |= {"opset": 25, "left_window_size": one_of(0, 2, 4)}
    heads = {"q": (Hkv * group, D, "S"), "k": (Hkv, D, "T"), "v": (Hkv, Dv, "T")}
    if rank == 3:
        features |= {"q_num_heads": Hkv * group, "kv_num_heads": Hkv}
        dims: list[Any] = [(axes["B"], axes[length], H * size) for H, size, length in heads.values()]
    else:
        dims = [(axes["B"], H, axes[length], size) for H, size, length in heads.values()]
    return attention(*dims, **features), sizes


def has_kernel(lowered: ir.Model, sizes: dict[str, int]) -> bool:
    """GroupQueryAttention on a CPU takes several new tokens behind a past for one batch element only."""
    grouped = any(node.op_type == "GroupQueryAttention" for node in lowered.graph)
    return not grouped or sizes["S"] == 1 or sizes["B"] == 1


@pytest.mark.sweep(14)
@pytest.mark.parametrize(("dialect", "options"), LOWERINGS, ids=[dialect for dialect, _ in LOWERINGS])
@pytest.mark.parametrize("seed", range(60))
def test_a_past_is_lowered_to_the_same_function(seed: int, dialect: str, options: dict[str, Any]) -> None:
    model, sizes = random_node(seed)
    try:
        lowered = lower(model, dialect, **options)
    except LoweringError as error:
        if not error.feature.startswith("grouped heads with "):
            raise
        pytest.skip(f"{dialect} refuses {error.feature}")
    if not has_kernel(lowered, sizes):
        pytest.skip("no CPU kernel")
    feeds = random_feeds(model, sizes, seed)
    wanted = ReferenceEvaluator(ir.to_proto(model)).run(None, feeds)
    for one, other in zip(run_in_ort(ir.to_proto(lowered), feeds), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
