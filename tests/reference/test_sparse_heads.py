"""The gate of the sparse-head layers, and how clear its choice is."""

import pytest
import torch

from mha_deploy.model.catalog import find_spec
from mha_deploy.model.layer import AttentionSpec, SparseHeads
from mha_deploy.reference import build_module
from mha_deploy.reference.inputs import clear_decisions, random_inputs

SPEC = find_spec("tiny-sparse-heads")
RENORMALISED = find_spec("tiny-sparse-heads-renormalised")


def x(B=4, S=32):
    return random_inputs(SPEC, {"B": B, "S": S}, seed=0)["x"].double()


def layer(spec=SPEC, dtype=torch.float64):
    return build_module(spec, dtype=dtype)


@pytest.mark.parametrize("spec", [SPEC, RENORMALISED], ids=lambda spec: spec.name)
def test_every_token_keeps_exactly_its_best_heads(spec):
    module, query = layer(spec), x()
    gates, logits = module.gates(query), module.gate(query)
    assert torch.equal((gates > 0).sum(-1), torch.full((4, 32), 2))
    worst_chosen = logits.masked_fill(gates == 0, float("inf")).amin(-1)
    best_other = logits.masked_fill(gates > 0, float("-inf")).amax(-1)
    assert (worst_chosen > best_other).all()


def test_gates_add_up_to_one_only_when_renormalised():
    assert torch.allclose(layer(RENORMALISED).gates(x()).sum(-1), torch.ones(4, 32, dtype=torch.float64))
    assert (layer().gates(x()).sum(-1) < 1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gates_are_normalised_in_float32_and_rounded_once(dtype):
    module = layer(RENORMALISED, dtype)
    query = x().to(dtype)
    gates = module.gates(query)
    assert gates.dtype == dtype
    best = module.gate(query).double().topk(2, dim=-1).values.softmax(-1)
    chosen = gates.double().sort(dim=-1, descending=True).values[..., :2]
    assert (chosen - best).abs().max() <= torch.finfo(dtype).eps / 2


def test_the_margin_is_the_gap_between_the_last_chosen_head_and_the_next():
    module, query = layer(), x()
    ordered = module.gate(query).sort(dim=-1, descending=True).values
    assert torch.equal(module.decision_margin(query), ordered[..., 1] - ordered[..., 2])


def test_the_margin_is_infinite_when_every_head_is_chosen():
    data = {**SPEC.to_dict(), "sparse_heads": {"top_k": 4}}
    module = layer(AttentionSpec.from_dict(data))
    assert module.spec.sparse_heads == SparseHeads(top_k=4)
    assert module.decision_margin(x()).isposinf().all()


def test_unclear_tokens_are_redrawn_and_clear_ones_kept():
    module, feeds, margin = layer(), {"x": x()}, 0.3
    unclear = module.decision_margin(feeds["x"]) < margin
    assert 0 < unclear.sum() < unclear.numel()
    cleared = clear_decisions(module, feeds, seed=0, margin=margin)["x"]
    assert (module.decision_margin(cleared) >= margin).all()
    assert torch.equal(cleared[~unclear], feeds["x"][~unclear])
    assert (cleared[unclear] != feeds["x"][unclear]).any(-1).all()


def test_redrawing_leaves_the_given_inputs_alone_and_repeats():
    module, feeds = layer(), {"x": x()}
    before = feeds["x"].clone()
    once, twice = (clear_decisions(module, feeds, seed=0, margin=0.3)["x"] for _ in range(2))
    assert torch.equal(feeds["x"], before)
    assert torch.equal(once, twice)
    assert not torch.equal(once, clear_decisions(module, feeds, seed=1, margin=0.3)["x"])


def test_redrawn_tokens_stay_in_the_precision_of_the_inputs():
    half = {"x": x().half()}
    cleared = clear_decisions(layer(), half, seed=0, margin=0.3)["x"]
    assert cleared.dtype == torch.float16


def test_layers_that_decide_nothing_keep_their_inputs():
    feeds = {"x": x()}
    assert clear_decisions(layer(find_spec("tiny-mha")), feeds, seed=0, margin=1e9) is feeds
