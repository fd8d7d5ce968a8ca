"""Tensors that TensorRT said it cannot hold: read from its words, refused only where they are too large."""

import pytest

from mha_deploy.engine.volumes import beyond_limit, explained_limits

# As TensorRT 8.6.0 said it of 32 heads over 8, one batch row, up to 8192 tokens.
TOLD = (
    "Profile kMAX values are not self-consistent. attention/scores: tensor volume exceeds (2^31)-1, "
    "dimensions are [1,8,(* 4 S),S] Volume exceeds 2^31-1. Instruction: CHECK_VOLUME 67108863{8192 8192}."
)


@pytest.mark.parametrize(("S", "refused"), [(8192, True), (8191, False), (1, False), (16384, True)])
def test_the_limit_is_where_tensorrt_has_it(S, refused):
    reason = beyond_limit(["something else: 1 of 2", TOLD], {"B": 1, "S": S})
    assert (reason is not None) == refused
    if refused:
        assert reason.startswith(f"attention/scores has {32 * S * S:,} elements")


@pytest.mark.parametrize(
    ("dims", "elements"),
    [("B,S", 12), ("(+ P S 1),B", 30), ("2,(* B (+ S 1))", 30), ("(* 2 3 4)", 24)],
)
def test_dimensions_are_computed(dims, elements):
    scale = 2**31 // elements + 1
    note = f"x: tensor volume exceeds (2^31)-1, dimensions are [{scale},{dims}] Volume exceeds"
    assert f"{scale * elements:,} elements" in beyond_limit([note], {"B": 3, "S": 4, "P": 5})
    smaller = note.replace(f"[{scale},", f"[{scale - 1},")
    assert beyond_limit([smaller], {"B": 3, "S": 4, "P": 5}) is None


@pytest.mark.parametrize("dims", ["(/ S 2),4294967296", "Z,4294967296", "(* 4294967296 2", ""])
def test_what_cannot_be_read_refuses_nothing(dims):
    note = f"x: tensor volume exceeds (2^31)-1, dimensions are [{dims}] Volume exceeds"
    assert beyond_limit([note], {"S": 4}) is None


def test_nothing_is_refused_without_a_word_of_tensorrt():
    assert beyond_limit([], {"B": 2**20, "S": 2**20}) is None


def test_the_way_out_is_told_once():
    (told,) = explained_limits([TOLD, "another", TOLD])
    assert all(part in told for part in ("attention/scores", "--profile", "--attention plugin"))
    assert explained_limits(["another"]) == []
