"""What a call behind a cache costs: by hand, by brute force, and by what the layer multiplies."""

from dataclasses import replace

import pytest

from mha_deploy.analysis.roofline import analyze_layer
from mha_deploy.bundle.sizes import SizeLimit, points_from_text, shrunk, usual_points
from mha_deploy.errors import SpecError
from mha_deploy.model.layer import (
    AttentionSpec,
    key_length,
    kv_cache_bytes_per_token,
    layer_cost,
    parameter_count,
)
from mha_deploy.model.spec import Axis

B, S, P, T = (Axis(min=low, opt=8, max=100_000) for low in (1, 1, 0, 1))
CAPACITY = 16
AXES = {
    "none": {"B": B, "S": S},
    "dynamic": {"B": B, "S": S, "P": P},
    "preallocated": {
        "B": B,
        "S": Axis(min=1, opt=8, max=CAPACITY),
        "T": Axis(min=CAPACITY, opt=16, max=CAPACITY),
    },
}


def make(cache="none", **changes):
    base = {"name": "test", "Hq": 2, "Hkv": 1, "D": 2, "E": 4, "causal": True, "cache": cache}
    return AttentionSpec(**{**base, "axes": AXES[cache], **changes})


def attention(spec, sizes, lengths=None):
    return next(s for s in layer_cost(spec, sizes, 2, lengths=lengths).stages if s.name == "attention")


# -- by hand -----------------------------------------------------------------------------------


def test_a_token_behind_a_dynamic_cache_by_hand():
    """E=4, two query heads of 2 over one, five past tokens, B=1, two bytes an element."""
    projections, attending, output = layer_cost(make("dynamic"), {"B": 1, "S": 1, "P": 5}, 2).stages
    # x (4) through 4x(4+2+2) with biases (40); q (4), and the new entry of keys and values (4), go out
    assert (projections.parameters, projections.flops) == (40, 2 * 4 * 8)
    assert projections.bytes == 2 * (40 + 4 + 4 + 4)
    # six keys, two heads, two matmuls of length 2; reads q (4) and six entries of k and v (24), writes 4
    assert attending.flops == 6 * 2 * 2 * 2 * 2
    assert attending.bytes == 2 * (4 + 24 + 4)
    assert (output.flops, output.bytes) == (2 * 16, 2 * (20 + 4 + 4))


def test_a_full_preallocated_cache_costs_a_dynamic_one_and_its_lengths():
    dynamic, static = make("dynamic"), make("preallocated")
    for new in (1, 3, CAPACITY):
        one = attention(dynamic, {"B": 3, "S": new, "P": CAPACITY - new})
        other = attention(static, {"B": 3, "S": new, "T": CAPACITY})
        assert other.flops == one.flops
        assert other.bytes == one.bytes + 4 * 3


def test_an_empty_dynamic_cache_costs_what_the_whole_sequence_does():
    for window in (None, 1, 3, 100):
        sizes = {"B": 2, "S": 9}
        whole, step = make(window=window), make("dynamic", window=window)
        assert layer_cost(step, {**sizes, "P": 0}, 2).flops == layer_cost(whole, sizes, 2).flops
        assert layer_cost(step, {**sizes, "P": 0}, 2).bytes == layer_cost(whole, sizes, 2).bytes


def test_only_new_tokens_are_projected_whatever_the_past():
    near, far = (layer_cost(make("dynamic"), {"B": 2, "S": 3, "P": past}, 2) for past in (0, 5000))
    assert [near.stages[i] for i in (0, 2)] == [far.stages[i] for i in (0, 2)]
    assert far.stages[1].flops > 1000 * near.stages[1].flops


# -- by brute force ----------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 40])
@pytest.mark.parametrize("past", [0, 1, 4, 7, 30])
@pytest.mark.parametrize("new", [1, 2, 6])
def test_pairs_and_keys_are_those_that_the_queries_attend_to(new, past, window):
    attended = {
        i: [k for k in range(past + i + 1) if window is None or k > past + i - window] for i in range(new)
    }
    pairs, keys_read = sum(map(len, attended.values())), len({k for keys in attended.values() for k in keys})
    stage = attention(make("dynamic", window=window), {"B": 3, "S": new, "P": past})
    assert stage.flops == 4 * 2 * 2 * 3 * pairs
    assert stage.bytes == 2 * 3 * (2 * new * 4 + 2 * keys_read * 2)


def test_ragged_lengths_cost_the_sum_of_their_batch_elements():
    spec, sizes = make("preallocated"), {"B": 3, "S": 2, "T": CAPACITY}
    lengths = (0, 5, 14)
    alone = [attention(spec, {**sizes, "B": 1}, [length]) for length in lengths]
    together = attention(spec, sizes, lengths)
    assert together.flops == sum(each.flops for each in alone)
    assert together.bytes == sum(each.bytes for each in alone)
    assert attention(spec, sizes, [14] * 3) == attention(spec, sizes), "full, unless the lengths are given"


@pytest.mark.parametrize(
    ("cache", "lengths"),
    [
        ("dynamic", [1, 1]),
        ("none", [1, 1]),
        ("preallocated", [1]),
        ("preallocated", [0, 15]),
        ("preallocated", [-1, 0]),
    ],
)
def test_lengths_that_do_not_suit_the_cache_are_refused(cache, lengths):
    sizes = {"B": 2, "S": 2, **{"dynamic": {"P": 4}, "preallocated": {"T": CAPACITY}, "none": {}}[cache]}
    with pytest.raises(SpecError):
        layer_cost(make(cache), sizes, 2, lengths=lengths)


@pytest.mark.parametrize("cache", ["dynamic", "preallocated"])
def test_flops_are_what_the_layer_multiplies_for_one_token(cache):
    """One query attends to every key, so nothing is masked."""
    torch, counter = pytest.importorskip("torch"), pytest.importorskip("torch.utils.flop_counter")
    from mha_deploy.reference import build_module

    spec = make(cache)
    sizes = {"B": 2, "S": 1, **({"P": 5} if cache == "dynamic" else {"T": CAPACITY})}
    kinds = {"int32": torch.int32, "float": torch.float32}
    inputs = {
        "query" if tensor.name == "x" else tensor.name: torch.empty(
            tensor.shape(sizes), device="meta", dtype=kinds[tensor.kind]
        )
        for tensor in spec.inputs
    }
    with counter.FlopCounterMode(display=False) as counted:
        build_module(spec, device="meta", path="plain")(**inputs)
    assert layer_cost(spec, sizes, 2).flops == counted.get_total_flops()


def test_rope_and_softcap_cost_no_matmul():
    data = {**make("dynamic").to_dict(), "rope": {}, "softcap": 5.0}
    spec, sizes = AttentionSpec.from_dict(data), {"B": 1, "S": 1, "P": 3}
    assert layer_cost(spec, sizes, 2) == layer_cost(make("dynamic"), sizes, 2)
    assert parameter_count(spec) == parameter_count(make())


# -- sizes -------------------------------------------------------------------------------------


def test_the_oracle_holds_the_cache_twice_in_fp64():
    sizes = {"B": 3, "S": 2, "P": 7}
    spec = make("dynamic")
    assert spec.oracle_cache_bytes(sizes) == 2 * (2 * 3 * 1 * 9 * 2) * 8
    assert (
        make("preallocated").oracle_cache_bytes({"B": 3, "S": 2, "T": CAPACITY}) == 2 * (2 * 3 * 16 * 2) * 8
    )
    assert make().oracle_cache_bytes({"B": 3, "S": 2}) == 0
    scores, activations = 2 * 3 * 2 * 2 * 9, 4 * 3 * 9 * 4
    assert spec.oracle_bytes(sizes) == 8 * (scores + activations) + spec.oracle_cache_bytes(sizes)


def test_a_cache_alone_can_be_too_much_for_a_limit():
    spec = make("dynamic", Hkv=2, D=64)
    sizes = {"B": 1, "S": 1, "P": 4000}
    room = spec.oracle_bytes(sizes) / 2**30
    assert SizeLimit(gib=room).allows(spec, sizes)
    assert not SizeLimit(gib=room - spec.oracle_cache_bytes(sizes) / 2**30 / 2).allows(spec, sizes)


@pytest.mark.parametrize("cache", ["dynamic", "preallocated"])
def test_shrinking_keeps_a_preallocated_cache_and_empties_a_dynamic_one(cache):
    spec = make(cache)
    sizes = {"B": 4, "S": 8, **({"P": 5} if cache == "dynamic" else {"T": CAPACITY})}
    found = shrunk(spec, sizes, spec.sizes("min"), SizeLimit(gflop=0.0))
    assert found == {"B": 1, "S": 1, **({"P": 0} if cache == "dynamic" else {"T": CAPACITY})}
    spec.check_sizes(found)


# -- where it is timed -------------------------------------------------------------------------


def test_a_cached_layer_is_timed_at_its_prefill_and_at_its_decode_step():
    prefill, decode = usual_points(make("dynamic"))
    assert (prefill.name, prefill.sizes, prefill.past) == ("prefill", {"B": 8, "S": 8, "P": 0}, None)
    assert (decode.name, decode.sizes, decode.past) == ("decode", {"B": 8, "S": 1, "P": 8}, None)
    prefill, decode = usual_points(make("preallocated"))
    assert (prefill.sizes, prefill.past) == ({"B": 8, "S": 8, "T": 16}, 0)
    assert (decode.sizes, decode.past) == ({"B": 8, "S": 1, "T": 16}, 15), "full: the worst case"
    assert [point.name for point in usual_points(make())] == ["opt"]


def test_a_layer_of_single_tokens_has_no_prefill():
    spec = make("dynamic", axes={**AXES["dynamic"], "S": Axis(min=1, opt=1, max=1)})
    assert [point.name for point in usual_points(spec)] == ["decode"]


def test_points_are_read_by_name_and_by_sizes():
    spec = make("preallocated")
    assert points_from_text(spec, "opt") == usual_points(spec)
    assert [point.name for point in points_from_text(spec, "decode")] == ["decode"]
    (point,) = points_from_text(spec, "B=2,S=4,T=16")
    assert (point.name, point.past) == ("B2-S4-T16", 12)
    with pytest.raises(SpecError, match="decode"):
        points_from_text(spec, "decod")
    with pytest.raises(SpecError, match="cannot be read"):
        points_from_text(make(), "decode")


# -- the analysis ------------------------------------------------------------------------------


def test_the_analysis_of_a_step_knows_the_cache():
    spec = make("dynamic", Hq=32, Hkv=8, D=128, E=4096)
    sizes = {"B": 4, "S": 1, "P": 8191}
    found = analyze_layer(spec, sizes, "fp16", "h200")
    assert found.kv_bytes == 4 * 8192 * kv_cache_bytes_per_token(spec, 2)
    attending = found.bound[1]
    assert attending.bound_by == "memory"
    assert attending.seconds == pytest.approx((found.kv_bytes + 2 * 2 * 4 * 4096) / 4.8e12)
    assert found.tokens_per_second == pytest.approx(4 / found.seconds)
    assert key_length(spec, sizes) == 8192


def test_lengths_reach_the_analysis():
    spec, sizes = make("preallocated"), {"B": 2, "S": 1, "T": CAPACITY}
    empty, full = (analyze_layer(spec, sizes, "fp16", "h200", lengths=given) for given in ([0, 0], None))
    assert empty.cost.flops < full.cost.flops
    assert replace(empty, cost=full.cost, bound=full.bound) == full


@pytest.mark.sweep(1)
@pytest.mark.parametrize("cache", ["dynamic", "preallocated"])
def test_the_command_counts_a_cache(run_cli, tmp_path, cache):
    model = f"tiny-{cache}"
    done = run_cli("analyze", model)
    assert done.code == 0
    assert "S=1 " in done.out, "the step that is repeated, unless somebody says otherwise"
    assert "S=16" in run_cli("analyze", model, "--at", "prefill").out
    done = run_cli("analyze", model, "--heads", tmp_path / "heads.png")
    assert (done.code, (tmp_path / "heads.png").exists()) == (0, True)


def test_the_command_counts_an_empty_cache(run_cli):
    assert run_cli("analyze", "tiny-dynamic", "--at", "B=1,S=1,P=0").code == 0
