"""Inputs at other sizes look like the example, and hold nothing that it does not show."""

import pytest
import torch

from mha_deploy.errors import ExportError
from mha_deploy.exporter.axes import draw_inputs

EXAMPLE = {
    "x": torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(0)) * 3 + 5,
    "y": torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(0)) * 3 + 5,
    "tokens": torch.tensor([[7, 11, 13], [17, 19, 23]]),
    "mask": torch.tensor([[True, True, False], [True, False, False]]),
    "bias": torch.tensor([[0.0, -torch.inf, 0.0], [0.0, -3.4e38, -1e9]]).half().float(),
    "big": torch.tensor([[0.0, -65504.0]]).half(),
}
DIMS = {
    "x": ("B", "S", 8),
    "y": ("B", "S"),
    "tokens": ("B", "S"),
    "mask": ("B", "P+S"),
    "bias": ("B", "S"),
    "big": (None, "S"),
}


def test_floats_are_drawn_with_mean_and_deviation_of_the_example():
    x = draw_inputs(EXAMPLE, DIMS, {"B": 40, "S": 100, "P": 0}, seed=3)["x"]
    assert x.shape == (40, 100, 8)
    assert x.dtype == torch.float32
    assert x.mean().item() == pytest.approx(EXAMPLE["x"].mean().item(), abs=0.1)
    assert x.std().item() == pytest.approx(EXAMPLE["x"].std().item(), abs=0.1)


def test_what_is_no_activation_is_cut_or_repeated():
    drawn = draw_inputs(EXAMPLE, DIMS, {"B": 3, "S": 2, "P": 3}, seed=0)
    assert drawn["tokens"].tolist() == [[7, 11], [17, 19], [7, 11]]
    assert drawn["mask"].tolist() == [[1, 1, 0, 1, 1], [1, 0, 0, 1, 0], [1, 1, 0, 1, 1]]
    assert torch.equal(drawn["bias"], EXAMPLE["bias"][[0, 1, 0]][:, :2])
    assert drawn["big"].tolist() == [[0.0, -65504.0]]
    assert (drawn["mask"].dtype, drawn["big"].dtype) == (torch.bool, torch.float16)


def test_draws_hang_on_seed_and_name_alone():
    sizes = {"B": 2, "S": 4, "P": 1}
    first, again = (draw_inputs(EXAMPLE, DIMS, sizes, seed=5) for _ in range(2))
    alone = draw_inputs({"x": EXAMPLE["x"]}, DIMS, sizes, seed=5)
    other = draw_inputs(EXAMPLE, DIMS, sizes, seed=6)
    assert torch.equal(first["x"], again["x"])
    assert torch.equal(first["x"], alone["x"])
    assert not torch.equal(first["x"], other["x"])
    assert not torch.equal(first["x"], first["y"])
    assert torch.equal(first["tokens"], other["tokens"])


def test_the_example_is_not_handed_out():
    example = {"tokens": torch.tensor([1, 2])}
    draw_inputs(example, {}, {}, seed=0)["tokens"].add_(1)
    assert example["tokens"].tolist() == [1, 2]


def test_an_empty_example_is_not_repeated():
    with pytest.raises(ExportError, match="nothing to repeat"):
        draw_inputs({"x": torch.zeros(0, dtype=torch.long)}, {"x": ("S",)}, {"S": 3}, seed=0)
