"""How heads that share keys and values are written as matmuls, unless the caller says."""

from __future__ import annotations

import pytest
from attention_models import attention

from mha_deploy.graph.lower import lower


@pytest.mark.parametrize(
    ("Hkv", "gqa", "written"),
    [
        (4, None, None),
        (2, None, "att/q_folded"),
        (2, "auto", "att/q_folded"),
        # TensorRT 8.6 builds this one folded, and it answers wrongly.
        (1, None, "att/repeated"),
        (1, "fold", "att/q_folded"),
        (1, "broadcast", "att/q_grouped"),
    ],
)
def test_a_single_shared_head_is_repeated_by_default(Hkv: int, gqa: str | None, written: str | None) -> None:
    model = attention(("B", 4, "S", 8), ("B", Hkv, "T", 8))
    lowered = lower(model, "primitives", **({} if gqa is None else {"gqa": gqa}))
    forms = ("q_folded", "repeated", "q_grouped")
    found = {node.name for node in lowered.graph if node.name and node.name.rpartition("/")[2] in forms}
    assert found == (set() if written is None else {written})
