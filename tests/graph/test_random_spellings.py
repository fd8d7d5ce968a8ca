"""Attention spelled at random: what is fused computes the same, at sizes of 1 as well."""

import numpy as np
import onnx_ir as ir
import pytest
from hand_graphs import session_of
from random_spellings import SIZES, Spelled

from mha_deploy.graph.fuse import fuse_attention


def fuse_and_compare(seed):
    """Whether an attention was fused; None where Attention cannot express it."""
    spelled = Spelled(seed)
    new, report = fuse_attention(ir.from_proto(spelled.model))
    assert len(report.fused) + len(report.unfused) == 1, spelled.chosen
    if report.fused:
        before, after = session_of(spelled.model), session_of(new)
        for at, sizes in enumerate(SIZES if spelled.dynamic else SIZES[:1]):
            feeds = spelled.feeds(sizes, at)
            want, got = (session.run(None, feeds)[0] for session in (before, after))
            shown = np.isfinite(want)  # fully masked queries may be NaN
            assert got.shape == want.shape
            np.testing.assert_allclose(got[shown], want[shown], atol=2e-4, err_msg=str(spelled.chosen))
    return bool(report.fused) if spelled.expressible else None


# After the first ones: two masks of different numbers, one that is added to -inf, and one behind a factor;
# weights that are halved between matrices; a minimum of scores that another mask made smaller; the lowest
# number, divided by a tensor, before NaN weights become 0, and before a minimum.
@pytest.mark.parametrize("seed", [*range(20), 1579, 1779, 2376, 3414, 3538, 7265, 18482, 51591, 50010016])
def test_spelled_at_random(seed):
    fuse_and_compare(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 21000, 200))
def test_many_more(first):
    found = [fuse_and_compare(seed) for seed in range(first, first + 200)]
    expressible = [each for each in found if each is not None]
    assert sum(expressible) >= 0.9 * len(expressible)
