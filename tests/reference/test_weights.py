"""Weights: how many, from which seed, in which form, and which are refused."""

import math
from dataclasses import replace

import pytest
import torch

from mha_deploy.errors import DeployError
from mha_deploy.model.catalog import catalog_names, find_spec
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.reference import build_module, random_weights
from mha_deploy.reference.inputs import call_arguments, fed_to, random_inputs
from mha_deploy.reference.weights import SCORE_STD, pack_projections, unpack_projections

AXES = {"B": {"min": 1, "opt": 2, "max": 4}, "S": {"min": 1, "opt": 16, "max": 64}}
GQA = find_spec("tiny-gqa")


def make(**changes):
    return AttentionSpec.from_dict({"name": "layer", "axes": AXES, **changes})


def count(spec):
    return sum(parameter.numel() for parameter in build_module(spec, device="meta").parameters())


def run(spec, **how):
    feeds = random_inputs(spec, {axis: 5 for axis in spec.axes}, seed=2)
    module = build_module(spec, dtype=torch.float64, **how)
    return module(**call_arguments(spec, fed_to(module, feeds)))


# -- how many ----------------------------------------------------------------------------------


@pytest.mark.parametrize("Hq", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("projections", ["separate", "packed"])
def test_multi_head_has_four_square_matrices_whatever_the_number_of_heads(Hq, projections):
    E = 64
    assert count(make(Hq=Hq, E=E, projections=projections)) == 4 * E**2 + 4 * E
    assert count(make(Hq=Hq, E=E, projections=projections, bias=False)) == 4 * E**2


@pytest.mark.parametrize("Hkv", [1, 2, 4, 8])
def test_grouped_query_saves_on_keys_and_values_alone(Hkv):
    Hq, D = 8, 16
    E = Hq * D
    assert count(make(Hq=Hq, Hkv=Hkv, E=E, bias=False)) == E**2 + 2 * E * Hkv * D + E**2


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("bert-base", 4 * 768**2 + 4 * 768),
        ("gpt3-175b", 4 * 12288**2 + 4 * 12288),
        ("llama-2-70b", 2 * 8192**2 + 2 * 8192 * 8 * 128),
        ("falcon-7b", 2 * 4544**2 + 2 * 4544 * 64),
        ("whisper-large-cross", None),
    ],
)
def test_the_shipped_models_have_the_parameters_of_their_closed_form(name, wanted):
    spec = find_spec(name)
    wanted = wanted or 4 * spec.E**2 + 4 * spec.E * spec.bias
    assert count(spec) == wanted


def test_the_variants_add_their_own_matrices():
    E, Hq, D, hidden = 64, 4, 16, 96
    base = 4 * E**2 + 4 * E
    gated = make(Hq=Hq, E=E, variant="sparse-heads", sparse_heads={"top_k": 2})
    grouped = make(Hq=Hq, E=E, variant="grouped-mlp", grouped_mlp={"groups": 2, "hidden": hidden})
    assert count(gated) == base + E * Hq
    assert count(make(Hq=Hq, E=E, variant="head-mix")) == base + 3 * (D**2 + D)
    group = E // 2
    within = 2 * (group**2 + group)
    assert count(grouped) == 3 * (E**2 + E) + within + (E * hidden + hidden) + (hidden * E + E)


# -- from which seed ---------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_weights():
    a, b = random_weights(GQA, 7), random_weights(GQA, 7)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_another_seed_gives_other_weights_everywhere():
    a, b = random_weights(GQA, 7), random_weights(GQA, 8)
    assert not any(torch.equal(a[name], b[name]) for name in a)


def test_no_two_parameters_are_drawn_alike():
    weights = random_weights(find_spec("tiny-mha"), 0)
    leading = [tuple((w.flatten()[:4] / w.flatten()[0]).tolist()) for w in weights.values()]
    assert len(set(leading)) == len(leading)


def test_a_precision_only_rounds_the_weights_of_the_seed():
    exact = random_weights(GQA, 3)
    for dtype in (torch.float16, torch.bfloat16):
        state = build_module(GQA, seed=3, dtype=dtype).state_dict()
        assert all(torch.equal(state[name], exact[name].to(dtype)) for name in exact)


@pytest.mark.parametrize("scale", [None, 0.01, 1.5])
def test_scores_under_random_weights_have_the_promised_spread(scale):
    changes = {} if scale is None else {"scale": scale}
    spec = make(Hq=8, E=256, bias=False, **changes)
    module = build_module(spec, seed=1)
    x = torch.randn(2, 256, spec.E, generator=torch.Generator().manual_seed(0))
    q, k, _ = (a.unflatten(-1, (spec.Hq, spec.D)).transpose(1, 2) for a in module.project(x, None, None))
    scores = spec.softmax_scale * (q @ k.transpose(-1, -2))
    off_diagonal = ~torch.eye(256, dtype=torch.bool)  # a token's score with itself is not a random one
    assert scores[..., off_diagonal].std().item() == pytest.approx(SCORE_STD, rel=0.1)


# -- in which form -----------------------------------------------------------------------------


def test_packing_and_unpacking_is_bit_exact_both_ways():
    separate = random_weights(GQA, 0)
    packed = pack_projections(separate)
    assert packed["qkv.weight"].shape == ((4 + 2 * 2) * 16, 64)
    assert not any(name.startswith(("q.", "k.", "v.")) for name in packed)
    back = unpack_projections(packed, GQA)
    assert back.keys() == separate.keys()
    assert all(torch.equal(back[name], separate[name]) for name in separate)
    again = pack_projections(back)
    assert all(torch.equal(again[name], packed[name]) for name in packed)


def test_the_rows_of_the_packed_matrix_are_q_then_k_then_v():
    separate = random_weights(GQA, 0)
    rows = pack_projections(separate)["qkv.weight"]
    parts = {"q": rows[:64], "k": rows[64:96], "v": rows[96:]}
    assert all(torch.equal(part, separate[f"{name}.weight"]) for name, part in parts.items())


def test_converting_what_has_the_form_already_changes_nothing():
    separate = random_weights(GQA, 0)
    packed = pack_projections(separate)
    assert unpack_projections(separate, GQA).keys() == separate.keys()
    assert pack_projections(packed).keys() == packed.keys()


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "name", [n for n in catalog_names() if n.startswith("tiny-") and not find_spec(n).is_cross]
)
def test_packed_and_separate_projections_are_one_function(name):
    forms = [replace(find_spec(name), projections=form) for form in ("separate", "packed")]
    a, b = (run(spec, seed=4) for spec in forms)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_module_takes_weights_of_either_form():
    packed = replace(GQA, projections="packed")
    separate_state = random_weights(GQA, 4)
    wanted = run(GQA, seed=4)
    for spec in (GQA, packed):
        for state in (separate_state, pack_projections(separate_state)):
            torch.testing.assert_close(run(spec, weights=state), wanted, rtol=0, atol=1e-12)


def test_a_cross_attention_takes_packed_weights_too():
    spec = find_spec("tiny-cross")
    state = pack_projections(random_weights(spec, 4))
    torch.testing.assert_close(run(spec, weights=state), run(spec, seed=4), rtol=0, atol=0)


@pytest.mark.parametrize("Hkv", [1, 2])
def test_grouped_query_is_multi_head_with_repeated_key_and_value_weights(Hkv):
    spec = make(Hq=4, Hkv=Hkv, E=64, causal=True)
    state = dict(random_weights(spec, 4))
    for name in ("k.weight", "k.bias", "v.weight", "v.bias"):
        by_head = state[name].unflatten(0, (Hkv, spec.D))
        state[name] = by_head.repeat_interleave(4 // Hkv, dim=0).flatten(0, 1)
    repeated = run(make(Hq=4, E=64, causal=True), weights=state)
    torch.testing.assert_close(run(spec, seed=4), repeated, rtol=0, atol=1e-12)


# -- which are refused -------------------------------------------------------------------------


def refusal(weights, spec=GQA):
    with pytest.raises(DeployError) as caught:
        build_module(spec, weights=weights)
    return str(caught.value)


@pytest.mark.parametrize("projections", ["separate", "packed"])
def test_missing_weights_are_named(projections):
    state = {name: w for name, w in random_weights(GQA, 0).items() if name not in ("v.weight", "o.bias")}
    message = refusal(state, replace(GQA, projections=projections))
    assert "missing: o.bias, v.weight; not used: none" in message


@pytest.mark.parametrize("projections", ["separate", "packed"])
def test_weights_that_nobody_uses_are_named(projections):
    state = {**random_weights(GQA, 0), "q.norm": torch.ones(64), "rotary": torch.ones(8)}
    message = refusal(state, replace(GQA, projections=projections))
    assert "missing: none; not used: q.norm, rotary" in message


def test_two_forms_at_once_are_refused():
    separate = random_weights(GQA, 0)
    for spec in (GQA, replace(GQA, projections="packed")):
        message = refusal({**pack_projections(separate), "q.weight": separate["q.weight"]}, spec)
        assert "not used: q.weight" in message


@pytest.mark.parametrize("projections", ["separate", "packed"])
@pytest.mark.parametrize("name", ["k.weight", "o.bias", "qkv.weight"])
def test_a_weight_of_the_wrong_shape_is_named_with_both_shapes(name, projections):
    state = dict(random_weights(GQA, 0))
    state = pack_projections(state) if name.startswith("qkv") else state
    wanted = tuple(state[name].shape)
    message = refusal({**state, name: torch.zeros(3, 3)}, replace(GQA, projections=projections))
    assert f"The weight {name} has the wrong shape for tiny-gqa." in message
    assert "got: (3, 3)" in message
    assert f"try: {wanted}" in message


# -- the module itself -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt3-175b", "tiny-packed", "tiny-head-mix"])
def test_a_module_on_meta_has_shapes_and_no_memory(name):
    module = build_module(find_spec(name), device="meta", dtype=torch.float16)
    assert all(p.is_meta and p.dtype == torch.float16 for p in module.parameters())


def test_a_module_is_ready_for_inference():
    module = build_module(GQA)
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_building_a_module_leaves_the_given_weights_alone():
    state = random_weights(GQA, 0)
    before = {name: tensor.clone() for name, tensor in state.items()}
    build_module(replace(GQA, projections="packed"), weights=state, dtype=torch.float16)
    assert state.keys() == before.keys()
    assert all(torch.equal(state[n], before[n]) and state[n].dtype == torch.float32 for n in state)


def test_the_default_scale_of_random_weights_is_independent_of_the_head_size():
    stds = []
    for Hq in (2, 4, 16):
        spec = make(Hq=Hq, E=256)
        stds.append(random_weights(spec, 0)["q.weight"].std().item() * math.sqrt(spec.E))
    assert max(stds) / min(stds) == pytest.approx(1.0, abs=0.02)
