"""How fusion is told in one phrase: what no source could tell is neither fused nor unfused."""

import pytest

from mha_deploy.engine.manifest import fusion_summary


def nodes(*pairs):
    return [{"node": node, "status": status} for node, status in pairs]


@pytest.mark.parametrize(
    ("fused", "given", "told"),
    [
        (2, nodes(("a", "fused"), ("b", "fused")), "2/2 fused"),
        (1, nodes(("a", "fused"), ("b", "decomposed")), "1/2 fused"),
        (1, nodes(("a", "fused"), ("b", "unknown")), "1/2 fused, 1 unknown"),
        (1, nodes(("a", "fused"), ("b", "unknown"), ("b", "decomposed")), "1/2 fused"),
        (1, nodes(("a", "fused"), ("b", "unknown"), ("b", "fused")), "1/2 fused, 1 unknown"),
    ],
)
def test_unknown_is_counted_by_itself(fused, given, told):
    assert fusion_summary(fused, 2, given) == told
