"""Which shapes are tried: every corner of every profile once, none beyond the limit."""

import pytest

from mha_deploy.bundle.sizes import (
    RANDOM_SIZES,
    SizeLimit,
    bench_points,
    interior_sizes,
    odd_sizes,
    plan_golden,
    shrunk,
    sweep_points,
    usual_points,
)
from mha_deploy.model.catalog import catalog_names, find_spec
from mha_deploy.model.spec import Axis, ModuleSpec, TensorSpec

MHA, CROSS, LLAMA = find_spec("tiny-mha"), find_spec("tiny-cross"), find_spec("llama-3-8b")
DYNAMIC, PREALLOCATED = find_spec("tiny-dynamic"), find_spec("tiny-preallocated")


def ranges(**texts):
    return {name: Axis.parse(text) for name, text in texts.items()}


def by_name(plan):
    return {point.name: dict(point.sizes) for point in plan}


# -- the corners -------------------------------------------------------------------------------


def test_a_layer_without_profiles_is_tried_at_the_corners_of_its_own_axes():
    plan = sweep_points(MHA)
    assert by_name(plan) == {
        "min": {"B": 1, "S": 1},
        "opt": {"B": 2, "S": 16},
        "max": {"B": 4, "S": 64},
        "odd": {"B": 3, "S": 37},
        "small-batch-long": {"B": 1, "S": 64},
        "large-batch-short": {"B": 4, "S": 1},
        "largest-odd": {"B": 1, "S": 63},
    }
    assert {point.note for point in plan} == {""}


def test_cross_attention_also_gets_lengths_that_differ():
    sizes = by_name(sweep_points(CROSS))
    assert sizes["few-queries-many-keys"] == {"B": 2, "S": 1, "T": 64}
    assert sizes["many-queries-few-keys"] == {"B": 2, "S": 64, "T": 1}


def test_every_shipped_spec_is_tried_inside_its_axes_and_each_size_once():
    for spec in map(find_spec, catalog_names()):
        plan = sweep_points(spec)
        for point in plan:
            spec.check_sizes(point.sizes)
        assert len({(*point.sizes.items(), point.past) for point in plan}) == len(plan), spec.name
        assert len({point.name for point in plan}) == len(plan), spec.name


@pytest.mark.parametrize("cache", ["dynamic", "preallocated"])
@pytest.mark.parametrize("name", ["tiny-dynamic", "llama-3-8b"])
def test_a_cache_is_tried_one_token_at_a_time_behind_the_longest_past_and_around_a_power_of_two(name, cache):
    spec = find_spec(name).with_cache(cache)
    points = sweep_points(spec)
    pasts = {p.past if cache == "preallocated" else p.sizes["P"] for p in points if p.sizes["S"] == 1}
    longest = spec.axes["T"].max - 1 if cache == "preallocated" else spec.axes["P"].max
    power = 1 << (longest.bit_length() - 1)
    assert pasts >= {longest, power - 1, power, power + 1}


def test_every_profile_is_tried_and_shared_corners_once():
    profiles = [ranges(B="1:1:2", S="1:8:16"), ranges(B="1:2:4", S="16:32:64")]
    plan = sweep_points(MHA, profiles)
    sizes = by_name(plan)
    assert sizes["profile-0-max"] == {"B": 2, "S": 16}
    assert sizes["profile-1-max"] == {"B": 4, "S": 64}
    assert sizes["profile-0-small-batch-long"] == {"B": 1, "S": 16}
    assert "profile-1-min" not in sizes, "the same sizes as profile-0-small-batch-long"
    assert len({tuple(point.sizes.items()) for point in plan}) == len(plan)
    for point in plan:
        profile = profiles[int(point.name.split("-")[1])]
        assert all(profile[axis].min <= size <= profile[axis].max for axis, size in point.sizes.items())


@pytest.mark.parametrize("spec", [MHA, CROSS, DYNAMIC, PREALLOCATED, LLAMA], ids=lambda spec: spec.name)
def test_random_sizes_are_inside_the_axes_and_follow_the_seed(spec):
    drawn = [interior_sizes(spec, seed=seed) for seed in range(8)]
    assert drawn[3] == interior_sizes(spec, seed=3)
    assert len({tuple(each.items()) for sizes in drawn for each in sizes}) > 8
    for sizes in (each for found in drawn for each in found):
        spec.check_sizes(sizes)
    profile = ranges(B="1:1:2", S="8:8:16") | {
        name: spec.axes[name] for name in spec.axes if name not in "BS"
    }
    assert all(8 < each["S"] < 16 for each in interior_sizes(spec, [profile]))


def own_model(**axes):
    return ModuleSpec(
        name="own",
        axes=ranges(**axes),
        inputs=tuple(TensorSpec(name=name.lower(), kind="float", dims=(name, 4)) for name in axes),
        outputs=(TensorSpec(name="y", kind="float", dims=(next(iter(axes)), 4)),),
        attention_count=1,
    )


@pytest.mark.parametrize("batch", ["1:1:2", "1:2:2", "1", "2:2:3"])
def test_an_axis_of_two_sizes_has_random_sizes_beside_another(batch):
    own = own_model(B=batch, S="1:8:64")
    planned = [case.sizes for case in plan_golden(own, RANDOM_SIZES).cases]
    assert planned
    for sizes in (*planned, *interior_sizes(own)):
        own.check_sizes(sizes)
        assert 1 < sizes["S"] < 64


@pytest.mark.parametrize("names", ["S", "ST", "T", "LP"])
def test_the_axes_of_a_user_need_no_names_of_ours(names):
    own = own_model(**dict.fromkeys(names, "1:8:16"))
    points = sweep_points(own, [own.axes], limit=SizeLimit())
    assert {tuple(own.axes[axis].max for axis in names)} <= {tuple(p.sizes.values()) for p in points}


# -- odd lengths -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis", "odd"), [("1:16:64", 37), ("1:8:16", 13), ("64:128:512", 65), ("65:65:66", 65), ("64", 64)]
)
def test_a_length_is_odd_wherever_the_axis_allows_one(axis, odd):
    assert odd_sizes(ranges(B="1", S=axis))["S"] == odd


@pytest.mark.parametrize(
    ("axis", "lengths"), [("2:16:64", {2, 16, 64, 37, 63}), ("2:16:63", {2, 16, 63, 37}), ("64", {64})]
)
def test_the_largest_odd_length_is_tried_and_stays_inside_the_axis(axis, lengths):
    plan = sweep_points(MHA.with_axes(ranges(S=axis)))
    assert {point.sizes["S"] for point in plan} == lengths


# -- the limit ---------------------------------------------------------------------------------


def test_a_huge_corner_is_shrunk_and_a_note_says_so():
    limit = SizeLimit(gflop=100)
    plan = {point.name: point for point in sweep_points(LLAMA, limit=limit)}
    # Never below the usual sizes, which are run whatever they cost.
    assert "max" not in plan
    assert plan["opt"].sizes == LLAMA.sizes("opt")
    assert plan["opt"].note.startswith(
        "costs more than 100 GFLOP and 4 GiB; max: B=8,S=8192 was shrunk to B=1,S=2048, which costs more"
    )
    assert sweep_points(LLAMA, limit=SizeLimit(gflop=1000, gib=100))[2].sizes["S"] > LLAMA.axes["S"].opt
    assert plan["min"].note == ""


def test_a_shrunk_odd_length_is_still_odd():
    sizes = by_name(sweep_points(LLAMA.with_axes(ranges(S="1:64:7010"))))
    assert sizes["max"]["S"] == 7010 // 8 == 876
    assert sizes["largest-odd"]["S"] == 875


@pytest.mark.parametrize("limit", [SizeLimit(gflop=1e-4), SizeLimit(gib=1e-5)], ids=["work", "memory"])
def test_work_and_memory_both_limit(limit):
    sizes = shrunk(MHA, MHA.sizes("max"), MHA.sizes("min"), limit)
    assert sizes["B"] == 1, "the batch shrinks before the length does"
    assert 1 <= sizes["S"] < 64
    assert limit.allows(MHA, sizes) or sizes == MHA.sizes("min")


def test_a_profile_is_not_shrunk_below_its_own_smallest_sizes():
    plan = sweep_points(LLAMA, [ranges(B="4:4:8", S="4096:4096:8192")])
    assert all(point.sizes["B"] >= 4 and point.sizes["S"] >= 4096 for point in plan)
    assert all("costs more than 100 GFLOP" in point.note for point in plan)


# -- latencies ---------------------------------------------------------------------------------


def test_a_grid_is_small_inside_the_axes_and_has_the_usual_sizes():
    for spec in map(find_spec, catalog_names()):
        points, usual = bench_points(spec), usual_points(spec)
        assert 1 <= len(points) <= 38, spec.name
        found = [point for point in points if point in usual]
        assert found == sorted(usual, key=lambda point: point.sizes["S"]), spec.name
        assert len({point.name for point in points}) == len(points), spec.name
        for point in points:
            spec.check_sizes(point.sizes)


def test_a_grid_has_powers_of_two_from_the_smallest_to_the_largest():
    grid = {(point.sizes["B"], point.sizes["S"]) for point in bench_points(LLAMA)}
    assert {B for B, _ in grid} == {1, 2, 4, 8}
    assert {1, 8192} <= {S for _, S in grid}
    assert all(size & (size - 1) == 0 for pair in grid for size in pair)


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [
        ({"batch_size": "1:2:4", "S": "1:1:2"}, {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)}),
        ({"batch_size": "1:2:4"}, {(1,), (2,), (4,)}),
        ({"tokens": "1:2:2"}, {(1,), (2,)}),
    ],
)
def test_the_grid_of_a_module_has_every_size_of_its_axes_whatever_their_names(axes, sizes):
    tensors = tuple(TensorSpec(name=name, kind="float", dims=tuple(axes)) for name in "xy")
    about = {"inputs": tensors[:1], "outputs": tensors[1:], "attention_count": 1}
    spec = ModuleSpec(name="mine", axes=ranges(**axes), **about)
    assert {tuple(point.sizes.values()) for point in bench_points(spec)} == sizes


def test_cross_attention_takes_both_lengths_alike_and_leaves_a_fixed_one():
    sizes = {tuple(point.sizes.values()) for point in bench_points(CROSS)}
    assert (1, 4, 4) in sizes
    assert (2, 16, 24) in sizes
    assert {point.sizes["T"] for point in bench_points(find_spec("whisper-large-cross"))} == {1500}


def test_a_range_without_a_power_of_two_is_timed_at_its_usual_size():
    spec = MHA.with_axes(ranges(B="3", S="33:40:60"))
    assert [dict(point.sizes) for point in bench_points(spec)] == [{"B": 3, "S": 40}]


def test_a_dynamic_cache_is_timed_over_batches_and_pasts_one_token_at_a_time():
    points = bench_points(DYNAMIC)
    steps = [point for point in points if point.name != "prefill"]
    assert {point.sizes["S"] for point in steps} == {1}
    assert {point.sizes["B"] for point in steps} == {1, 2, 4}
    assert {point.sizes["P"] for point in steps} == {1, 2, 4, 8, 16, 32, 24}, "powers, and the usual past"
    assert by_name(points)["prefill"] == {"B": 2, "S": 16, "P": 0}
    assert by_name(points)["decode"] == {"B": 2, "S": 1, "P": 24}
    assert {point.past for point in points} == {None}
    DYNAMIC.check_sizes(points[0].sizes)


def test_a_preallocated_cache_is_timed_over_batches_and_full():
    points = bench_points(PREALLOCATED)
    assert [(p.name, p.sizes["B"], p.sizes["S"], p.past) for p in points] == [
        ("B1-S1-T64", 1, 1, 63),
        ("decode", 2, 1, 63),
        ("B4-S1-T64", 4, 1, 63),
        ("prefill", 2, 16, 0),
    ]


def test_a_cache_that_an_oracle_has_no_room_for_is_left_out():
    huge = {"B": "1:1:4096", "P": "0:1024:131072"}
    spec = DYNAMIC.with_axes({name: Axis.parse(text, name=name) for name, text in huge.items()})
    found = [(p.sizes["B"], p.sizes["P"]) for p in bench_points(spec)]
    assert max(found) == (4096, max(P for B, P in found if B == 4096))
    assert max(B * P for B, P in found) * 2 * 2 * 2 * 16 * 8 <= 16 << 30
    assert (1, 131072) in found
