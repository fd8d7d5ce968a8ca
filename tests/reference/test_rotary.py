"""Rotary embedding against an independent one: a pair is a complex number, and turning it a matmul."""

import numpy as np
import pytest
import torch
from rotary_formula import published_frequencies, turned

from mha_deploy.model.layer import AttentionSpec, Rope
from mha_deploy.reference import build_module
from mha_deploy.reference.rotary import frequencies, rotary_tables, rotate

LLAMA_31 = Rope(base=500000.0, scaling="llama3", factor=8.0)  # the published config; the rest are defaults
SCALINGS = {
    "none": Rope(),
    "linear": Rope(scaling="linear", factor=4.0),
    "ntk": Rope(scaling="ntk", factor=4.0),
    "llama3": LLAMA_31,
}
PAIRS = {"half": False, "interleaved": True}


@pytest.mark.parametrize("dims", [4, 64, 128])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_frequencies_are_the_published_ones(scaling, dims):
    rope = SCALINGS[scaling]
    np.testing.assert_allclose(frequencies(rope, dims).numpy(), published_frequencies(rope, dims), rtol=1e-14)


def test_llama_3_1_keeps_short_waves_and_stretches_long_ones():
    plain, scaled = frequencies(Rope(base=500000.0), 128), frequencies(LLAMA_31, 128)
    ratio = (plain / scaled).numpy()
    kept, stretched = np.isclose(ratio, 1.0, rtol=1e-12), np.isclose(ratio, 8.0, rtol=1e-12)
    # 2π · 500000^(j/64) is below 8192/4 up to j = 28, and above 8192/1 from j = 35 on, of 64.
    assert kept.tolist() == [j <= 28 for j in range(64)]
    assert stretched.tolist() == [j >= 35 for j in range(64)]
    assert (np.diff(ratio) >= -1e-12).all()


@pytest.mark.parametrize("dims", [16, 6, 2], ids=["full", "partial", "one pair"])
@pytest.mark.parametrize("interleaved", PAIRS.values(), ids=PAIRS)
def test_rotating_is_a_complex_multiplication(interleaved, dims):
    x = torch.randn(2, 5, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])
    cos, sin = rotary_tables(Rope(), dims, positions, torch.float64)
    got = rotate(x, cos, sin, interleaved=interleaved)
    for b in range(2):
        wanted = turned(x[b].numpy(), positions[b].numpy(), published_frequencies(Rope(), dims), interleaved)
        np.testing.assert_allclose(got[b].numpy(), wanted, rtol=0, atol=1e-14)
    assert torch.equal(got[..., dims:], x[..., dims:])
    assert torch.equal(got[0, 0], x[0, 0])  # position 0 is not turned


@pytest.mark.parametrize("interleaved", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("dims", [16, 6])
def test_rotating_agrees_with_the_onnx_operator(interleaved, dims):
    x = torch.randn(2, 5, 3, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])
    cos, sin = rotary_tables(Rope(), dims, positions, x.dtype)
    table = rotary_tables(Rope(), dims, torch.arange(12), x.dtype)
    wanted = torch.onnx.ops.rotary_embedding(
        x.flatten(-2), *table, positions, interleaved=interleaved, num_heads=3, rotary_embedding_dim=dims
    )
    torch.testing.assert_close(rotate(x, cos, sin, interleaved=interleaved).flatten(-2), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_tables_are_rounded_once_from_float64(dtype):
    positions = torch.tensor([0, 1, 8191, 131071])
    cos, sin = rotary_tables(LLAMA_31, 128, positions, dtype)
    angles = positions.numpy()[:, None] * published_frequencies(LLAMA_31, 128)
    for got, wanted in ((cos, np.cos(angles)), (sin, np.sin(angles))):
        assert got.dtype == dtype
        error = (got.double() - torch.from_numpy(wanted)).abs()
        assert (error <= torch.from_numpy(np.abs(wanted)) * torch.finfo(dtype).eps / 2 + 1e-7).all()


@pytest.mark.parametrize("interleaved", PAIRS.values(), ids=PAIRS)
def test_a_score_depends_on_the_distance_only(interleaved):
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(p, r):
        tables = (rotary_tables(Rope(), 16, torch.tensor([at]), torch.float64) for at in (p, r))
        a, b = (rotate(x, *table, interleaved=interleaved) for x, table in zip((q, k), tables, strict=True))
        return (a * b).sum().item()

    assert score(5, 2) == pytest.approx(score(103, 100), abs=1e-12)
    assert abs(score(5, 2) - score(5, 3)) > 1e-3


def test_rope_adds_nothing_to_the_state_of_a_layer():
    axes = {"B": 1, "S": 4}
    plain = AttentionSpec.from_dict({"name": "layer", "Hq": 4, "E": 64, "axes": axes, "causal": True})
    data = {**plain.to_dict(), "rope": {}, "window": 2, "softcap": 5.0}
    a, b = (build_module(spec).state_dict() for spec in (plain, AttentionSpec.from_dict(data)))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
