"""Masks say which keys a query may see."""

import pytest
import torch

from mha_deploy.reference.attention import alibi_bias, causal_mask, merge_causal, padding_mask

CPU = torch.device("cpu")


def test_padding_shows_each_batch_element_its_first_keys():
    mask = padding_mask(torch.tensor([0, 1, 3], dtype=torch.int32), 3)
    assert mask.shape == (3, 1, 1, 3)
    assert mask[:, 0, 0].tolist() == [[False] * 3, [True, False, False], [True] * 3]


@pytest.mark.parametrize(("S", "T"), [(3, 3), (2, 4), (4, 2)])
def test_causal_starts_in_the_upper_left_corner(S, T):
    wanted = [[t <= s for t in range(T)] for s in range(S)]
    assert causal_mask(S, T, CPU).tolist() == wanted


def test_a_boolean_mask_and_causal_must_both_hold():
    mask = padding_mask(torch.tensor([2]), 3)
    assert merge_causal(mask, 3, 3, CPU)[0, 0].tolist() == [
        [True, False, False],
        [True, True, False],
        [True, True, False],
    ]


def test_an_additive_mask_keeps_its_values_under_causal():
    bias = torch.arange(9.0).reshape(1, 1, 3, 3)
    inf = float("inf")
    assert merge_causal(bias, 3, 3, CPU)[0, 0].tolist() == [[0, -inf, -inf], [3, 4, -inf], [6, 7, 8]]


def test_causal_alone_is_the_causal_mask():
    assert torch.equal(merge_causal(None, 3, 4, CPU), causal_mask(3, 4, CPU))


@pytest.mark.parametrize("Hq", [4, 8, 6])
def test_alibi_is_a_slope_of_its_own_per_head_times_the_distance(Hq):
    bias = alibi_bias(Hq, 3, 5)
    assert bias.shape == (1, Hq, 3, 5)
    for h in range(Hq):
        slope = 2 ** (-8 * (h + 1) / Hq)
        wanted = [[-slope * abs(s - t) for t in range(5)] for s in range(3)]
        torch.testing.assert_close(bias[0, h], torch.tensor(wanted, dtype=torch.float64), rtol=1e-15, atol=0)


def test_alibi_with_eight_heads_has_the_slopes_of_the_paper():
    slopes = -alibi_bias(8, 2, 2)[0, :, 1, 0]
    assert slopes.tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
