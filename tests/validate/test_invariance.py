"""A row gets the same answer wherever it is; runners that are wrong in one place only are caught."""

import json

import msgspec
import numpy as np
import pytest
from golden_made import made_case

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.sizes import SizeLimit
from mha_deploy.errors import DeployError
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.model.spec import Axis
from mha_deploy.runtime import open_runner
from mha_deploy.runtime.runner import Runner
from mha_deploy.validation.invariance import CHECKS, invariance_from_runner

pytestmark = pytest.mark.usefixtures("in_process")  # quicker than a child process
# Between them: every kind of input, every variant, shared heads, two outputs.
NAMES = [
    "tiny-gqa", "tiny-cross-padding", "tiny-additive-causal", "tiny-weights", "tiny-head-mix",
    "tiny-sparse-heads", "tiny-grouped-mlp", "tiny-dynamic", "tiny-preallocated", "tiny-window",
]  # fmt: skip
FP16 = PRECISIONS["fp16"]


class Altered(Runner):
    """A right runner whose inputs or outputs are tampered with."""

    def __init__(self, inner, before=lambda feeds: feeds, after=lambda feeds, got: got):
        self.inner, self.before, self.after = inner, before, after
        self.name, self.inputs, self.outputs = f"altered {inner.name}", inner.inputs, inner.outputs
        self.calls = []

    def _run(self, feeds):
        self.calls.append({name: array.shape for name, array in feeds.items()})
        return self.after(feeds, self.inner.run(self.before(feeds)))


class Profiled(Altered):
    """Profile 0 takes batches from 1 to `most`, profile 1 from 2; the one called `wrong` is."""

    def __init__(self, inner, wrong=None, most=4):
        super().__init__(inner)
        self.wrong, self.most, self.used = wrong, most, []

    def profiles_for(self, feeds):
        B = len(feeds["x"])
        return [
            index
            for index, (least, most) in enumerate(((1, self.most), (2, self.most)))
            if least <= B <= most
        ]

    def run_in_profile(self, feeds, profile):
        self.used.append(profile)
        got = self.run(feeds)
        return scaled(got, 1.01) if profile == self.wrong else got


def scaled(got, factor, rows=slice(None)):
    wrong = {name: array.copy() for name, array in got.items()}
    for array in wrong.values():
        array[rows] *= array.dtype.type(factor)
    return wrong


@pytest.fixture
def opened(bundles):
    """A bundle's spec, precision, cases of at least two rows, and a right runner."""
    runners = []

    def open_(name):
        bundle = bundles(name)
        runners.append(open_runner("ort-cpu", bundle.model_path))
        return bundle.manifest.spec, list(golden_cases(bundle)), runners[-1]

    yield open_
    for runner in runners:
        runner.close()


def checked(spec, cases, runner, **options):
    return invariance_from_runner(runner, cases, spec, FP16, **options)


def failed(checks):
    return {check.check for check in checks if check.outcome == "failed"}


def neighbours(checks):
    return [check for check in checks if check.variation == "neighbors"]


# -- right runners -----------------------------------------------------------------------------


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_right_runner_passes(opened, name):
    spec, cases, runner = opened(name)
    checks = checked(spec, cases, runner)
    assert [check.problem for check in checks if check.outcome == "failed"] == []
    assert {(check.case, check.check) for check in checks} >= {
        *((case.name, "batch slot") for case in cases if case.sizes["B"] > 1),
        *((case.name, "batch size") for case in cases),
    }
    assert len(neighbours(checks)) == sum(case.sizes["B"] > 1 for case in cases)
    assert max(check.share for check in checks if check.share is not None) < 0.75


def test_checks_are_plain_json_with_the_fields_of_the_report(opened):
    data = json.loads(json.dumps([msgspec.to_builtins(check) for check in checked(*opened("tiny-mha"))]))
    for check in data:
        assert list(check)[:4] == ["runtime", "engine", "case", "check"]
        assert check["check"] in CHECKS
        assert check["runtime"].startswith("ort-cpu ")


def test_every_batch_that_was_run_is_one_that_the_axis_allows(opened):
    spec, cases, runner = opened("tiny-mha")
    watched = Altered(runner)
    checked(spec.with_axes({"B": Axis(min=2, opt=2, max=3)}), cases[1:3], watched)
    assert {case.sizes["B"] for case in cases[1:3]} == {2, 3}
    assert {call["x"][0] for call in watched.calls} == {2, 3}


def test_a_larger_batch_stays_within_the_limit(opened):
    spec, cases, runner = opened("tiny-mha")
    (opt,) = (case for case in cases if case.name == "opt")
    for limit, batches in ((SizeLimit(), {1, 2, 3, 4}), (SizeLimit(gflop=1e-9), {1, 2})):
        watched = Altered(runner)
        checked(spec, [opt], watched, limit=limit)
        assert {call["x"][0] for call in watched.calls} == batches


def test_a_bias_without_a_batch_stays_as_it_is(opened):
    spec, cases, runner = opened("tiny-additive")
    (opt,) = (case for case in cases if case.name == "opt")
    watched = Altered(runner)
    checked(spec, [opt], watched)
    assert {call["attention_bias"] for call in watched.calls} == {opt.inputs["attention_bias"].shape}


# -- what cannot be checked --------------------------------------------------------------------


def test_a_fixed_batch_has_slots_and_no_other_size(opened):
    spec, cases, runner = opened("tiny-mha")
    (opt,) = (case for case in cases if case.name == "opt")
    checks = checked(spec.with_axes({"B": Axis(min=2, opt=2, max=2)}), [opt], runner)
    assert {(check.check, check.variation, check.obstacle) for check in checks} == {
        ("batch slot", "slots", None),
        ("batch slot", "neighbors", None),
        ("batch size", None, "fixed batch"),
        ("profile", None, "no profiles"),
    }
    assert {check.batch for check in checks} == {2}
    assert len({check.compared for check in checks}) == len(checks)
    assert all(check.outcome != "failed" for check in checks)
    assert [check.check for check in checks if check.share is not None] == ["batch slot", "batch slot"]


def test_one_row_has_no_other_slot(opened):
    spec, cases, runner = opened("tiny-mha")
    (smallest,) = (case for case in cases if case.name == "min")
    (slot,) = (check for check in checked(spec, [smallest], runner) if check.check == "batch slot")
    assert (slot.case, slot.obstacle, slot.passed) == ("", "one element", False)


# -- wrong runners -----------------------------------------------------------------------------


def of_size(x):
    return np.abs(x).mean(axis=0)


def of_sign(x):
    return x.mean(axis=0)


@pytest.mark.parametrize(("leak", "alike"), [(of_size, False), (of_sign, True)])
def test_a_leak_that_is_in_the_golden_result_too_is_only_seen_among_other_neighbours(leak, alike):
    """The model itself leaks, so every arrangement of the same rows agrees with it.

    Neighbors of another sign do not show a leak of sizes, other rows show none where all rows are alike.
    """
    spec = find_spec("tiny-mha").with_axes({"B": Axis(min=4, opt=4, max=5)})
    x = np.random.default_rng(0).standard_normal((4, 8, 64)).astype(np.float16)
    x = np.repeat(x[:1], 4, axis=0) if alike else x

    def answer(x):
        return (x + 0.1 * leak(x.astype(np.float64))).astype(np.float16)

    class Leaky(Altered):
        def __init__(self):
            self.name = "leaky"

        def run(self, feeds):
            return {"output": answer(feeds["x"])}

    oracle = {"output": answer(x).astype(np.float64)}
    case = made_case(oracle, name="leak", sizes={"B": 4, "S": 8}, inputs={"x": x})
    checks = checked(spec, [case], Leaky(), limit=SizeLimit(gflop=1e-9))
    slots = [check for check in checks if check.check == "batch slot"]
    assert {check.variation: check.passed for check in slots} == {"slots": True, "neighbors": False}
    assert {check.arrangements or check.elements for check in slots} == {3, (0, 1, 2, 3)}


def test_every_row_is_put_into_every_slot_and_wrong_only_there_is_caught(opened):
    spec, cases, runner = opened("tiny-mha")
    (large,) = (case for case in cases if case.name == "large")
    rows = [row.tobytes() for row in large.inputs["x"]]
    seen = set()

    def last_row_in_first_slot(feeds, got):
        known = [rows.index(row.tobytes()) if row.tobytes() in rows else None for row in feeds["x"]]
        seen.update(enumerate(known) if None not in known and len(known) == 4 else ())
        return scaled(got, 1.05, 0) if known == [3, 0, 1, 2] else got

    checks = checked(spec, [large], Altered(runner, after=last_row_in_first_slot))
    assert seen == {(slot, row) for slot in range(4) for row in range(4)}
    (wrong,) = (check for check in checks if check.outcome == "failed")
    assert (wrong.variation, wrong.batch, wrong.arrangements) == ("slots", 4, 3)
    assert wrong.problem.endswith("worst: batch element 3 in slot 0 of 4")


def test_the_lengths_of_the_first_slot_used_for_all_are_caught(opened):
    spec, cases, runner = opened("tiny-padding")
    (ragged,) = (case for case in cases if case.name == "ragged")

    def first_for_all(feeds):
        return {**feeds, "key_lengths": np.full_like(feeds["key_lengths"], feeds["key_lengths"][0])}

    checks = checked(spec, [ragged], Altered(runner, before=first_for_all))
    assert failed(checks) == {"batch slot", "batch size"}
    alone = next(check for check in checks if check.other_batch == 1)
    assert alone.passed, "with one row, its own length is the first"
    assert not alone.bitwise


def test_an_error_at_batch_one_only_is_caught_there_and_nowhere_else(opened):
    spec, cases, runner = opened("tiny-mha")
    (large,) = (case for case in cases if case.name == "large")
    wrong = Altered(runner, after=lambda feeds, got: scaled(got, 1.01) if len(got["output"]) == 1 else got)
    checks = checked(spec, [large], wrong)
    assert [check.other_batch for check in checks if check.outcome == "failed"] == [1]


def test_another_rounding_is_reported_and_passes(opened):
    spec, cases, runner = opened("tiny-mha")

    def last_bit(feeds, got):
        alone = len(got["output"]) == 1
        return {"output": np.nextafter(got["output"], np.float16(9)) if alone else got["output"]}

    checks = checked(spec, [case for case in cases if case.sizes["B"] > 1], Altered(runner, after=last_bit))
    alone = [check for check in checks if check.other_batch == 1]
    assert alone
    assert all(check.passed and not check.bitwise for check in alone)
    assert all(check.bitwise for check in checks if check.check == "batch size" and check not in alone)


def test_a_batch_that_is_refused_fails_with_the_reason(opened):
    spec, cases, runner = opened("tiny-mha")
    (opt,) = (case for case in cases if case.name == "opt")

    def refuse(feeds):
        if len(feeds["x"]) == 1:
            raise DeployError("No room.", got="B=1", hint="another")
        return feeds

    checks = checked(spec, [opt], Altered(runner, before=refuse))
    (alone,) = (check for check in checks if check.other_batch == 1)
    assert (alone.passed, alone.bitwise, alone.share, alone.problem) == (
        False,
        False,
        None,
        "No room. B=1",
    )


def test_an_output_of_the_wrong_shape_fails(opened):
    spec, cases, runner = opened("tiny-mha")
    (opt,) = (case for case in cases if case.name == "opt")
    cut = Altered(
        runner, after=lambda feeds, got: {"output": got["output"][:, :-1]} if len(got["output"]) == 3 else got
    )
    (wrong,) = (check for check in checked(spec, [opt], cut) if check.outcome == "failed")
    assert (wrong.batch, wrong.other_batch) == (2, 3)
    assert "output has the wrong shape" in wrong.problem


# -- profiles ----------------------------------------------------------------------------------


def test_a_case_runs_in_every_profile_that_takes_it(opened):
    spec, cases, runner = opened("tiny-mha")
    profiled = Profiled(runner)
    checks = [check for check in checked(spec, cases, profiled) if check.check == "profile"]
    assert {check.case for check in checks} == {case.name for case in cases if case.sizes["B"] > 1}
    assert all(check.passed and check.bitwise and check.profiles == (0, 1) for check in checks)
    assert set(profiled.used) == {0, 1}


def test_an_error_in_one_profile_is_caught(opened):
    spec, cases, runner = opened("tiny-mha")
    checks = checked(spec, cases, Profiled(runner, wrong=1))
    assert failed(checks) == {"profile"}


def test_a_batch_that_no_profile_takes_is_not_asked_for(opened):
    spec, cases, runner = opened("tiny-mha")
    (opt,) = (case for case in cases if case.name == "opt")
    profiled = Profiled(runner, most=2)
    assert failed(checked(spec, [opt], profiled)) == set()
    assert {call["x"][0] for call in profiled.calls} == {1, 2}


# -- caches ------------------------------------------------------------------------------------


def last_takes_the_first(*names):
    """The last slot of a batch reads the cache or the length of the first one."""

    def before(feeds):
        wrong = dict(feeds)
        for name in names:
            wrong[name] = feeds[name].copy()
            wrong[name][-1] = feeds[name][0]
        return wrong

    return before


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("tiny-dynamic", ["past_key"]),
        ("tiny-preallocated", ["value_cache"]),
        ("tiny-preallocated", ["lengths"]),
    ],
)
def test_a_cache_of_another_slot_is_caught(opened, name, tensors):
    spec, cases, runner = opened(name)
    case = [next(case for case in cases if case.name == "odd")]  # three rows, each with a past of its own
    assert failed(checked(spec, case, runner)) == set()
    assert "batch slot" in failed(checked(spec, case, Altered(runner, last_takes_the_first(*tensors))))
