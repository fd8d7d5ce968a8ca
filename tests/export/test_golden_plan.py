"""Which golden cases are planned: the corners of the axes, within a budget."""

from dataclasses import replace

import numpy as np
import pytest

from mha_deploy.bundle.cases import Baseline, pack_baselines, plan_trace, stored_bytes, stored_outputs
from mha_deploy.bundle.sizes import CACHE_CASES, CASES, GoldenBudget, plan_golden
from mha_deploy.errors import SpecError
from mha_deploy.model.catalog import catalog_names, find_spec
from mha_deploy.model.layer import layer_cost
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.model.spec import Axis, ModuleSpec, TensorSpec
from mha_deploy.rounding import accumulations, sample_count

MHA = find_spec("tiny-mha")
PADDING = find_spec("tiny-padding")
DYNAMIC = find_spec("tiny-dynamic")
PREALLOCATED = find_spec("tiny-preallocated")


def names(plan):
    return [case.name for case in plan.cases]


def only(spec, case, budget=None):
    (planned,) = plan_golden(spec, (case,), budget).cases
    return planned


def axes(spec, **ranges):
    return spec.with_axes({name: Axis.parse(text, name=name) for name, text in ranges.items()})


def cases_of(spec):
    return CASES if spec.cache == "none" else CACHE_CASES


def refusal(spec, *wanted):
    with pytest.raises(SpecError) as caught:
        plan_golden(spec, wanted)
    return str(caught.value)


# -- the named cases ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", catalog_names())
def test_every_shipped_spec_gets_cases_inside_its_axes_and_budget_or_a_reason(name):
    spec, budget = find_spec(name), GoldenBudget()
    plan = plan_golden(spec)
    usual = {"opt"} if spec.cache == "none" else {"prefill", "decode"}
    assert {"min"} | usual <= set(names(plan)) <= set(cases_of(spec))
    assert len(set(names(plan))) == len(plan.cases)
    for case in plan.cases:
        spec.check_sizes(case.sizes)
    for wanted in cases_of(spec):
        if not any(note.startswith(f"no {wanted} case: ") for note in plan.notes):
            assert only(spec, wanted).sizes in [case.sizes for case in plan.cases]
    odd = only(spec, "odd").sizes
    assert all(odd[axis] % 2 == 1 or axis == "B" or not spec.axes[axis].is_dynamic for axis in odd)
    for case in (case for case in plan.cases if case.name == "large"):
        assert flops(spec, case.sizes) <= budget.gflop * 1e9
        assert spec.oracle_bytes(case.sizes) <= budget.gib * 2**30
        assert stored_bytes(spec, case.sizes) <= max(budget.mb * 1e6, stored_bytes(spec, spec.sizes("opt")))
        assert any(case.sizes[axis] > usual for axis, usual in spec.sizes("opt").items())
        (note,) = [note for note in plan.notes if note.startswith("the large case has ")] or [""]
        for axis, size in spec.sizes("max").items():
            assert (f" {axis} = {size}" in note) == (case.sizes[axis] < size), "a maximum that is not reached"


def test_min_and_opt_are_the_sizes_of_the_spec():
    assert only(MHA, "min").sizes == {"B": 1, "S": 1}
    assert only(MHA, "opt").sizes == {"B": 2, "S": 16}


def test_an_odd_case_has_a_batch_of_three_where_that_is_allowed():
    assert only(MHA, "odd").sizes == {"B": 3, "S": 37}
    assert only(axes(MHA, B="1:2:2", S="1:8:16"), "odd").sizes == {"B": 2, "S": 13}


def test_an_axis_that_allows_no_odd_length_stays_at_its_usual_one():
    assert only(axes(MHA, S="64"), "odd").sizes["S"] == 64


def test_only_layers_with_lengths_get_a_ragged_case():
    assert only(PADDING, "ragged").ragged
    assert only(PADDING, "ragged").sizes == {"B": 4, "S": 24}
    assert only(PREALLOCATED, "ragged").ragged
    assert only(PREALLOCATED, "ragged").sizes == {"B": 4, "S": 24, "T": 64}
    for spec in (MHA, DYNAMIC):
        assert "no ragged case: the layer takes no lengths" in plan_golden(spec).notes
    for spec in (PADDING, PREALLOCATED):
        assert not any("ragged" in note for note in plan_golden(spec).notes)


@pytest.mark.parametrize("spec", [PADDING, PREALLOCATED], ids=lambda spec: spec.name)
@pytest.mark.parametrize("batch", ["1", "2", "8", "1:2:3", "6:8:16"])
def test_a_ragged_batch_is_one_that_the_axis_allows(spec, batch):
    spec = axes(spec, B=batch)
    spec.check_sizes(only(spec, "ragged").sizes)


def test_a_ragged_case_of_the_usual_sizes_is_kept_beside_them():
    plan = plan_golden(axes(PADDING, B="4", S="1:24:64"), ("opt", "ragged"))
    assert names(plan) == ["opt", "ragged"]
    assert plan.cases[0].sizes == plan.cases[1].sizes


@pytest.mark.parametrize(
    ("S", "T", "wanted"),
    [("1:16:24", "24", 12), ("1:8:16", "64", 8), ("1:1:2", "2", 1), ("20:22:24", "24", 20), ("23", "24", 23)],
)
def test_new_tokens_leave_room_for_ragged_lengths(S, T, wanted):
    spec = axes(PREALLOCATED, S=S, T=T)
    assert only(spec, "ragged").sizes == {"B": 4, "S": wanted, "T": int(T)}


@pytest.mark.parametrize(("S", "T"), [("64", "64"), ("1", "1")])
def test_a_cache_that_every_call_fills_has_no_ragged_case(S, T):
    plan = plan_golden(axes(PREALLOCATED, S=S, T=T))
    assert "ragged" not in names(plan)
    assert "no ragged case: new tokens leave no room for lengths in the cache" in plan.notes


# -- prompts and tokens ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("S", "why"),
    [("1", "the layer takes single tokens only"), ("1:1:64", "its usual call is the shortest")],
)
@pytest.mark.parametrize("spec", [DYNAMIC, PREALLOCATED], ids=lambda spec: spec.name)
def test_a_decode_step_is_not_called_prefill(spec, S, why):
    plan = plan_golden(axes(spec, S=S))
    assert "prefill" not in names(plan)
    assert f"no prefill case: {why}" in plan.notes
    assert only(axes(spec, S=S), "decode").sizes["S"] == 1


def test_prefill_is_the_usual_prompt_into_an_empty_cache():
    dynamic, static = only(DYNAMIC, "prefill"), only(PREALLOCATED, "prefill")
    assert (dynamic.sizes, dynamic.past) == ({"B": 2, "S": 16, "P": 0}, None)  # P says it already
    assert (static.sizes, static.past) == ({"B": 2, "S": 16, "T": 64}, 0)


def test_decode_is_one_token_behind_the_usual_past_or_in_the_last_entry():
    dynamic, static = only(DYNAMIC, "decode"), only(PREALLOCATED, "decode")
    assert (dynamic.sizes, dynamic.past) == ({"B": 2, "S": 1, "P": 24}, None)
    assert (static.sizes, static.past) == ({"B": 2, "S": 1, "T": 64}, 63)


def test_a_cache_that_is_never_empty_or_decoded_by_one_gets_the_least_that_is_allowed():
    spec = axes(DYNAMIC, P="8:16:32", S="4:8:16")
    assert only(spec, "prefill").sizes == {"B": 2, "S": 8, "P": 8}
    assert only(spec, "decode").sizes == {"B": 2, "S": 4, "P": 16}


def test_the_least_case_is_the_first_token_into_an_empty_cache():
    dynamic, static = only(DYNAMIC, "min"), only(PREALLOCATED, "min")
    assert (dynamic.sizes, dynamic.past) == ({"B": 1, "S": 1, "P": 0}, None)
    assert (static.sizes, static.past) == ({"B": 1, "S": 1, "T": 64}, 0)
    one_row = axes(PREALLOCATED, B="1:1:4")
    assert names(plan_golden(one_row))[:3] == ["min", "prefill", "decode"], "no token is both"


def test_the_same_sizes_with_an_empty_and_a_filled_cache_are_two_cases():
    plan = plan_golden(PREALLOCATED, ("opt", "prefill"))
    assert names(plan) == ["opt", "prefill"]
    assert plan.cases[0].sizes == plan.cases[1].sizes
    assert names(plan_golden(DYNAMIC, ("decode", "B=2,S=1,P=24"))) == ["decode"]


@pytest.mark.parametrize("cache", ["dynamic", "preallocated"])
@pytest.mark.parametrize("name", ["llama-3-8b", "llama-2-70b", "falcon-7b", "gpt3-175b"])
def test_a_published_model_that_generates_gets_every_case(name, cache):
    spec = find_spec(name).with_cache(cache)
    plan, budget = plan_golden(spec), GoldenBudget()
    assert set(names(plan)) >= {"min", "prefill", "decode", "odd"}
    assert [case.ragged for case in plan.cases if case.name == "ragged"] == [True] * (cache == "preallocated")
    for case in plan.cases:
        spec.check_sizes(case.sizes)
        if case.name == "large":
            assert spec.oracle_bytes(case.sizes) <= budget.gib * 2**30


@pytest.mark.parametrize("cache", ["dynamic", "preallocated"])
@pytest.mark.parametrize("name", ["tiny-dynamic", "llama-3-8b"])
def test_a_bundle_has_a_single_token_behind_the_longest_past(name, cache):
    spec = find_spec(name).with_cache(cache)
    axis, past = ("P", None) if cache == "dynamic" else ("T", spec.axes["T"].max - 1)
    found = [case for case in plan_golden(spec).cases if case.sizes["S"] == 1 and case.past == past]
    assert spec.axes[axis].max in [case.sizes[axis] for case in found]
    budget = GoldenBudget(mb=stored_bytes(spec, {"B": 1, "S": 1, axis: spec.axes[axis].max // 2}) / 1e6)
    plan = plan_golden(spec, ("min", "long-past"), budget)
    for case in (case for case in plan.cases if case.name == "long-past"):
        assert budget.allows(spec, case.sizes)
        assert case.sizes[axis] >= spec.axes[axis].opt


def test_a_batch_of_any_name_has_three_elements_in_the_odd_case():
    x, y = (TensorSpec(name=name, kind="float", dims=("batch", "S", 8)) for name in ("x", "y"))
    axes = {"batch": Axis(min=1, opt=4, max=64), "S": Axis(min=1, opt=32, max=64)}
    spec = ModuleSpec(name="own", axes=axes, inputs=(x,), outputs=(y,), attention_count=1)
    (case,) = plan_golden(spec, ("odd",)).cases
    assert case.sizes == {"batch": 3, "S": 37}


# -- the large case ----------------------------------------------------------------------------


def flops(spec, sizes):
    return layer_cost(spec, sizes, bytes_per_element=2).flops


def test_a_large_case_that_fits_is_the_largest_there_is():
    assert only(MHA, "large").sizes == MHA.sizes("max")


@pytest.mark.parametrize(
    "budget",
    [GoldenBudget(gflop=0.01), GoldenBudget(gib=0.001), GoldenBudget(mb=0.1)],
    ids=["work", "memory", "disk"],
)
def test_a_smaller_budget_gives_a_smaller_case(budget):
    spec = axes(MHA, B="1:1:64", S="1:2:256")
    sizes = only(spec, "large", budget).sizes
    assert flops(spec, sizes) < flops(spec, spec.sizes("max"))
    assert flops(spec, sizes) <= budget.gflop * 1e9
    assert spec.oracle_bytes(sizes) <= budget.gib * 2**30
    assert stored_bytes(spec, sizes) <= budget.mb * 1e6
    assert sizes["B"] == 1, "the batch shrinks before the length does"


def test_a_bundle_of_bert_base_is_small_and_reaches_the_longest_sequence():
    spec = find_spec("bert-base")
    plan = plan_golden(spec)
    assert {case.name: case.sizes for case in plan.cases}["large"] == {"B": 2, "S": 512}
    assert "the large case has B=2,S=512: B = 32 would exceed 100 GFLOP, 4 GiB or 25 MB on disk" in plan.notes
    assert sum(stored_bytes(spec, case.sizes) for case in plan.cases) < 45e6
    roomy = plan_golden(spec, ("large",), GoldenBudget(gflop=1e6, gib=1e3, mb=1e6))
    assert (roomy.cases[0].sizes, roomy.notes) == (spec.sizes("max"), ())


@pytest.mark.parametrize("name", [name for name in catalog_names() if name.startswith("tiny-")])
def test_the_room_of_a_case_is_that_of_its_arrays_in_the_widest_precision(name):
    spec = find_spec(name)
    sizes = spec.sizes("opt")
    assert stored_bytes(spec, sizes) == max(
        sum(array.nbytes for array in arrays_in(precision, spec, sizes)) for precision in PRECISIONS.values()
    )


def arrays_in(precision, spec, sizes):
    """The arrays of a case as a file holds them."""
    oracle = {tensor.name: zeros(tensor, sizes, np.float64) for tensor in stored_outputs(spec)}
    numbers = sum(array.size for array in oracle.values())

    def samples(kind):
        return {
            name: np.zeros((sample_count(numbers, kind), *x.shape), np.float32) for name, x in oracle.items()
        }

    baselines = {kind: Baseline(samples(kind)) for kind in accumulations(precision)}
    own = [zeros(tensor, sizes, precision.numpy) for tensor in (*spec.inputs, *stored_outputs(spec))]
    return [*own, *oracle.values(), *pack_baselines(baselines).values()]


def zeros(tensor, sizes, kind):
    return np.zeros(tensor.shape(sizes), kind if tensor.kind == "float" else tensor.kind)


def test_a_budget_that_allows_nothing_larger_is_noted():
    plan = plan_golden(MHA, CASES, GoldenBudget(gflop=1e-6))
    assert "large" not in names(plan)
    assert any(
        note.startswith("no large case: nothing larger than opt fits 1e-06 GFLOP") for note in plan.notes
    )


def test_the_limit_is_no_reason_where_the_axes_go_no_further():
    fixed = replace(MHA, axes={name: Axis(min=2, opt=2, max=2) for name in MHA.axes})
    for budget in (GoldenBudget(), GoldenBudget(gflop=1e-6)):
        plan = plan_golden(fixed, CASES, budget)
        (note,) = [note for note in plan.notes if "large" in note.split(":")[0]]
        assert str(budget) not in note


# -- what is asked for -------------------------------------------------------------------------


def test_cases_come_in_the_order_they_were_asked_for():
    assert names(plan_golden(MHA, ("odd", "min", "opt"))) == ["odd", "min", "opt"]


def test_the_same_sizes_are_captured_once():
    assert names(plan_golden(MHA, ("opt", "opt", "B=2,S=16", "S=16, B=2", "min"))) == ["opt", "min"]
    assert names(plan_golden(axes(MHA, B="1", S="16"))) == ["min"]


def test_sizes_can_be_asked_for():
    (case,) = plan_golden(MHA, ("B=3,S=33",)).cases
    assert (case.name, case.sizes, case.ragged) == ("B3-S33", {"B": 3, "S": 33}, False)


def test_a_name_that_is_no_case_gets_the_nearest_one():
    message = refusal(MHA, "larg")
    assert "No such golden case." in message
    assert "did you mean 'large'?" in message
    assert "did you mean 'prefill'?" in refusal(DYNAMIC, "prefil")
    assert "did you mean" not in refusal(MHA, "prefil"), "a layer without a cache has no such case"


def test_sizes_that_do_not_fit_the_axes_are_refused():
    assert "needs a size for each of its axes B, S" in refusal(MHA, "B=2")
    assert "Axis S of tiny-mha does not allow this size" in refusal(MHA, "B=2,S=65")
    assert "Sizes cannot be read" in refusal(MHA, "B=2,S=x")


def test_a_plan_without_any_case_is_refused():
    assert "No golden case is left for tiny-mha." in refusal(MHA, "ragged")
    assert "min, prefill, decode, odd, ragged, large" in refusal(DYNAMIC, "ragged")


@pytest.mark.parametrize("spec", [MHA, PADDING, DYNAMIC, PREALLOCATED], ids=lambda spec: spec.name)
def test_nothing_asked_for_means_every_case_that_suits_the_layer(spec):
    assert plan_golden(spec) == plan_golden(spec, ()) == plan_golden(spec, cases_of(spec))


# -- traces ------------------------------------------------------------------------------------


@pytest.mark.parametrize("P", ["0:1:1", "0:4:20", "0:24:63", "0:24:200"])
@pytest.mark.parametrize("S", ["1", "1:8:16", "1:16:64"])
def test_a_trace_never_outgrows_its_cache(S, P):
    spec = axes(DYNAMIC, S=S, P=P)
    trace = plan_trace(spec)
    prompt = max(trace.prompt)
    assert min(*trace.prompt, trace.steps) >= 1
    for past, new in ((0, prompt), (prompt, 1), (prompt + trace.steps - 1, 1)):
        spec.check_sizes({"B": len(trace.prompt), "S": new, "P": past})


@pytest.mark.parametrize("T", ["2", "20", "64", "300"])
def test_a_trace_fits_a_preallocated_cache_with_prompts_of_their_own(T):
    trace = plan_trace(axes(PREALLOCATED, S="1:1:2", T=T))
    assert min(*trace.prompt, trace.steps) >= 1
    assert max(trace.prompt) + trace.steps <= int(T)


@pytest.mark.parametrize(
    "spec",
    [
        MHA,
        axes(DYNAMIC, P="1:24:63"),
        axes(DYNAMIC, P="0"),
        axes(DYNAMIC, S="2:4:8"),
        axes(PREALLOCATED, S="2:4:8"),
    ],
    ids=lambda spec: f"{spec.name} {' '.join(map(str, spec.axes.values()))}",
)
def test_a_layer_that_cannot_decode_from_nothing_has_no_trace(spec):
    assert plan_trace(spec).startswith("no trace: ")


@pytest.mark.parametrize(
    "spec", [axes(DYNAMIC, P="0"), axes(PREALLOCATED, S="1", T="1")], ids=["dynamic", "preallocated"]
)
def test_where_there_is_no_trace_the_reason_is_the_true_one(spec):
    assert plan_trace(spec) == "no trace: the cache has no room for a second token"
