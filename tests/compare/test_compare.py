"""A planted regression of every kind is reported, and nothing is reported of a repeated run."""

import copy
import json
import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import mha_deploy as md
from mha_deploy.regression.matrix import read_plan

sys.path.append(str(Path(__file__).resolve().parents[1] / "report"))
from example_report import HOSTILE, cpu_only, failing, passing

ENGINE, GRAPH = 1, 0  # places of the runs in `parity`


def timed(data, name="tensorrt", point=0):
    return next(row for row in data["latency"]["points"][point]["rows"] if row["name"] == name)


def engine(data):
    return data["engines"][0]


def verdict(data, **changes):
    data["parity"][ENGINE]["verdicts"][0].update(changes)
    return data["parity"][ENGINE]["verdicts"][0]


def slower(data):
    for key in ("p50_us", "p90_us", "p99_us"):
        timed(data)["timing"][key] *= 1.3


WIDE = {"p50_us": 2, "p90_us": 9, "p99_us": 12}


def wide(data):
    timing = timed(data)["timing"]
    timing |= {
        "p50_us": 2 * timing["p50_us"],
        "p90_us": 9 * timing["p50_us"],
        "p99_us": 12 * timing["p50_us"],
    }


GAP = {"kind": "sizes not covered", "axis": "B", "least": 9, "most": 32}


def deviation_grown(data):
    found = verdict(data)
    found["deviation"]["relative_l2"] = 0.9 * found["budget"]["relative_l2"]


def mask_status(data, status):
    row = next(row for row in data["conformance"]["rows"] if not row["diagnostic"])
    next(cell for cell in row["cells"].values() if cell["status"] == "conforms")["status"] = status


def mask_wrong(data):
    mask_status(data, "wrong")


def budget_wider(data):
    """The error doubles and takes half the share, as when kernels come to accumulate in FP16."""
    found = verdict(data)
    found["budget"] = {name: 4 * limit for name, limit in found["budget"].items()}
    found["deviation"] |= {name: 2 * found["deviation"][name] for name in found["budget"]}
    found["share"] /= 2


def loss_of(worst, limit=None, what="int8"):
    output = {"name": "output", "relative_l2": worst, "sqnr_db": 30.0, "top1": None, "kl": None}
    about = {"data": "val.npz", "samples": 6, "layers": [], "limit": limit}
    return {"what": what, "outputs": [output], **about}


# Each kind of regression: how it is planted in a report, and the section that must report it.
PLANTED = {
    "fusion lost": ("fusion", lambda d: engine(d)["nodes"][0].update(status="decomposed", kernels=["gemm"])),
    "fusion unknown": ("fusion", lambda d: engine(d)["nodes"][0].update(status="unknown")),
    "one more, not fused": ("fusion", lambda d: engine(d).update(fused=[1, 2])),
    "fewer fused": ("fusion", lambda d: engine(d).update(fused=[0, 1])),
    "precision mixed": ("precision", lambda d: engine(d).update(precision_status="mixed")),
    "precision requested": ("precision", lambda d: engine(d).update(precision="fp32")),
    "error over budget": (
        "error",
        lambda d: verdict(d, outcome="failed", reason={"kind": "out of budget"}, share=1.4),
    ),
    "error grown": ("error", lambda d: verdict(d, share=verdict(d)["share"] + 0.2)),
    "deviation grown": ("error", deviation_grown),
    "error grown under a wider budget": ("error", budget_wider),
    "error not finite": (
        "error",
        lambda d: verdict(d, outcome="failed", reason={"kind": "not finite"}, share=None, deviation=None),
    ),
    "not verified": (
        "error",
        lambda d: verdict(d, outcome="not verified", reason={"kind": "oracle zero"}),
    ),
    "no error measured": ("error", lambda d: verdict(d, deviation=None, share=None)),
    "share without its error": ("error", lambda d: verdict(d, deviation=None, share=0.01)),
    "decode wrong": ("decode", lambda d: d["decode"][1].update(outcome="failed", first_failed=3, share=4.0)),
    "decode shorter": ("coverage", lambda d: d["decode"][1].update(steps=d["decode"][1]["steps"] // 2)),
    "longest prompt shorter": ("coverage", lambda d: d["decode"][1].update(prompt=[14, 14, 14])),
    "prompt shorter": ("coverage", lambda d: d["decode"][1].update(prompt=[1])),
    "invariance nearly broken": ("invariance", lambda d: d["invariance"][1].update(share=0.9)),
    "invariance broken": ("invariance", lambda d: d["invariance"][1].update(outcome="failed")),
    "mask wrong": ("conformance", mask_wrong),
    "range overflows": ("range", lambda d: d["range"]["nodes"][0].update(status="overflows")),
    "slower": ("latency", slower),
    "not timed": ("latency", lambda d: timed(d).update(timing=None, refused="No available kernel.")),
    "point missing": ("coverage", lambda d: d["latency"]["points"].pop(0)),
    "memory grown": ("size", lambda d: timed(d)["timing"].update(memory_bytes=10**9)),
    "case missing": ("coverage", lambda d: d["parity"][ENGINE]["verdicts"].pop(0)),
    "less verified": ("coverage", lambda d: d["verdict"]["not_verified"].append(GAP)),
    "something else not verified": ("coverage", lambda d: d["verdict"]["not_verified"].__setitem__(0, GAP)),
    "more sizes not verified": ("coverage", lambda d: d["verdict"]["not_verified"][0].update(least=17)),
    "tail": ("latency", lambda d: timed(d)["timing"].update(p90_us=1.48 * timed(d)["timing"]["p90_us"])),
    "longest tail": ("latency", lambda d: timed(d)["timing"].update(p99_us=5 * timed(d)["timing"]["p99_us"])),
    "twice the time, with a wide spread": ("latency", wide),
    "axis narrower": ("coverage", lambda d: d["model"]["spec"]["axes"]["S"].update(max=256)),
    "runtime missing": ("coverage", lambda d: d["parity"].pop(GRAPH)),
    "engine not run": ("coverage", lambda d: engine(d).update(ran=False, why_not="no NVIDIA GPU here")),
    "engine missing": ("coverage", lambda d: d["engines"].clear()),
    "profile without a range": ("coverage", lambda d: engine(d)["profiles"][0].update(S="1:1:1:1")),
    "profile narrower": ("coverage", lambda d: engine(d)["profiles"][0].update(S="1:128:256")),
    "engine larger": ("size", lambda d: engine(d).update(engine_bytes=2 * engine(d)["engine_bytes"])),
    "build slower": ("build time", lambda d: engine(d).update(seconds=5 * engine(d)["seconds"])),
    "validation failed": ("verdict", lambda d: d["verdict"].update(outcome="failed")),
}


def planted(*names):
    data = passing()
    for name in names:
        PLANTED[name][1](data)
    return data


@pytest.mark.sweep(14)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_regression_is_reported(name):
    new = planted(name)
    found = md.compare(passing(), new)
    assert not found.passed
    assert {change.section for change in found.regressions} == {PLANTED[name][0]}
    back = md.compare(new, passing())
    either_way = ("precision requested", "something else not verified")
    assert not back.regressions or name in either_way
    noisy = name == "twice the time, with a wide spread"  # what is better than noise may be noise
    assert noisy or any(change.level in ("improvement", "regression") for change in back.changes)


@pytest.mark.parametrize("name", [name for name in PLANTED if PLANTED[name][0] == "coverage"])
def test_less_coverage_can_be_allowed_and_is_still_shown(name):
    found = md.compare(passing(), planted(name, "slower"), coverage=False)
    assert {change.section for change in found.regressions} == {"latency"}
    assert any(change.section == "coverage" and change.level == "changed" for change in found.changes)


@pytest.mark.parametrize("report", [passing, failing, cpu_only])
def test_a_repeated_run_has_no_regression(report):
    found = md.compare(report(), report())
    assert found.passed
    assert {change.level for change in found.changes} == {"same"}


def test_an_engine_that_is_new_and_was_not_run_is_no_regression():
    old, new = passing(), passing()
    known = old["engines"][0]["name"]
    new["verdict"]["not_verified"].append({"kind": "not run", "name": "another"})
    assert not md.compare(old, new).regressions
    new["verdict"]["not_verified"][-1]["name"] = known
    assert [change.section for change in md.compare(old, new).regressions] == ["coverage"]


def test_an_upgrade_alone_is_a_change_and_no_regression():
    new = passing()
    new["engines"][0]["version"] = "10.3.0"
    new["environment"] |= {"driver": "999.1"}
    new["parity"][ENGINE]["runtime"] = "tensorrt 10.3.0"
    new["decode"][1]["runtime"] = "tensorrt 10.3.0"
    for check in new["invariance"]:
        check["runtime"] = check["runtime"].replace("8.6.1", "10.3.0")
    new["runtimes"]["tensorrt 10.3.0"] = new["runtimes"].pop("tensorrt 8.6.1")
    found = md.compare(passing(), new)
    assert found.passed
    assert {change.section for change in found.changes if change.level == "changed"} == {"environment"}


def file_judged(name, kind="graph", runtime="ort-cpu 1.31.1", wrong=False):
    """The report of a file that was judged, with an attention in it that no output shows."""
    data = cpu_only()
    about = {"sha256": None, "names": {}, "converted": [], "not_judged": [], "plan": None}
    data["subjects"] = [{"name": name, "kind": kind, "runtime": runtime, **about}]
    gap = {"kind": "attention not observed", "name": name, "attention": "attention"}
    data["verdict"]["not_verified"].append(gap)
    if wrong:
        found = data["parity"][0]["verdicts"][0]
        found |= {"outcome": "failed", "reason": {"kind": "out of budget"}, "share": 1.4}
        data["verdict"]["outcome"] = "failed"
    return data


def test_what_is_judged_takes_the_place_of_its_kind_whatever_the_name_of_its_file():
    one, two = file_judged("a.onnx"), file_judged("b.onnx")
    assert {change.level for change in md.compare(one, two).changes} == {"same"}
    newer = file_judged("b.onnx", runtime="ort-cpu 2.0")
    newer["runtimes"]["ort-cpu 2.0"] = "ort-cpu"
    assert not [change for change in md.compare(one, newer).regressions if change.subject.startswith("not ")]
    assert md.compare(one, file_judged("b.engine", kind="engine")).regressions
    both = file_judged("b.onnx")
    both["subjects"] += file_judged("c.onnx")["subjects"]
    assert md.compare(one, both).regressions, "it is not known which of them it was"


def test_a_repaired_file_is_no_regression():
    wrong, right = file_judged("old.onnx", wrong=True), file_judged("new.onnx")
    found = md.compare(wrong, right)
    assert not found.regressions
    assert "error" in {change.section for change in found.changes if change.level == "improvement"}
    assert {change.section for change in md.compare(right, wrong).regressions} >= {"error", "verdict"}


@pytest.mark.parametrize(("narrower", "level"), [((0, 16, 32), "regression"), ((0, 16, 64), "changed")])
def test_the_past_may_be_empty_and_its_range_is_compared(narrower, level):
    """In the axes of the model, in whatever order these are written, and in the profiles of an engine."""
    whole, sides = (0, 25, 64), []
    for least, usual, most in (whole, narrower):
        data = passing()
        axes = data["model"]["spec"]["axes"]
        axes["P"] = {"max": most, "min": least, "opt": usual}
        data["model"]["spec"] = {**data["model"]["spec"], "axes": axes}
        engine(data)["profiles"][0]["P"] = f"{least}:{usual}:{most}"
        sides.append(data)
    found = md.compare(*sides)
    levels = [change.level for change in found.changes if change.subject.endswith("axis P")]
    assert levels == [level, level]
    assert {change.level for change in md.compare(sides[0], sides[0]).changes} == {"same"}


# -- noise -----------------------------------------------------------------------------------------


def test_a_latency_within_its_own_spread_is_no_regression():
    old, new = passing(), passing()
    timed(old)["timing"]["p90_us"] = 1.5 * timed(old)["timing"]["p50_us"]
    timed(new)["timing"]["p50_us"] *= 1.3
    found = md.compare(old, new)
    assert found.passed
    assert any("spread" in change.why for change in found.changes if change.section == "latency")


@pytest.mark.parametrize(("growth", "level"), [(1.02, "same"), (1.15, "inconclusive"), (1.5, "regression")])
def test_a_tail_is_judged_by_itself_where_the_median_stayed(growth, level):
    sides = [passing(), passing()]
    for side, factor in zip(sides, (1.0, growth), strict=True):
        timing = timed(side)["timing"]
        timing |= {"p90_us": factor * timing["p90_us"], "p99_us": factor * timing["p90_us"]}
    found = md.compare(*sides)
    levels = {change.level for change in found.changes if change.subject.endswith((", p90", ", p99"))}
    assert levels >= {"same", level}
    outcomes = {"same": "passed", "inconclusive": "not verified", "regression": "failed"}
    assert found.outcome == outcomes[level]


def test_a_median_that_only_its_new_spread_explains_is_inconclusive():
    new = passing()
    timing = timed(new)["timing"]
    timing |= {"p50_us": 1.3 * timing["p50_us"], "p90_us": 5 * timing["p50_us"]}
    found = md.compare(passing(), new)
    assert [change.section for change in found.changes if change.level == "inconclusive"] == ["latency"]
    assert found.outcome == "not verified"
    assert not md.compare(passing(), new, strict=True).passed


def test_a_slower_call_is_not_excused_by_a_wider_spread_alone():
    new = passing()
    time = timed(new)["timing"]
    time |= {"p90_us": 1.85 * time["p50_us"], "p50_us": 1.4 * time["p50_us"]}
    found = md.compare(passing(), new)
    (change,) = [each for each in found.changes if each.level == "inconclusive"]
    assert change.section == "latency"
    assert not md.compare(passing(), new, strict=True).passed


@pytest.mark.parametrize(
    "plant",
    [
        lambda d: timed(d)["timing"].update(p50_us=0.0),
        lambda d: timed(d)["timing"].update(p90_us=-1.0),
        lambda d: verdict(d, share=-0.5),
        lambda d: d["decode"][0].update(share=-0.5),
    ],
)
def test_figures_that_cannot_be_are_refused(plant):
    """They would be improvements."""
    new = passing()
    plant(new)
    with pytest.raises(md.DeployError, match="does not follow its format"):
        md.compare(passing(), new)


@pytest.mark.parametrize(
    ("old", "new", "level"),
    [
        ((0.01, None), (0.03, None), "changed"),
        ((0.01, None), (0.0105, None), "same"),
        ((0.03, None), (0.01, None), "improvement"),
        ((0.01, 0.02), (0.015, 0.02), "changed"),
        ((0.01, 0.02), (0.021, 0.05), "regression"),  # a higher limit excuses nothing
        ((0.0199, 0.02), (0.0201, None), "regression"),
        ((0.03, 0.02), (0.04, None), "regression"),
        ((0.03, 0.02), (0.0301, 0.02), "same"),
        ((0.03, 0.02), (0.01, 0.02), "improvement"),
    ],
)
def test_a_loss_that_grows_is_a_regression_beyond_the_limit_of_the_old_side(old, new, level):
    sides = [{**passing(), "loss": loss_of(*each)} for each in (old, new)]
    for side in sides:
        side["model"]["quantized"] = "int8"
    found = md.compare(*sides)
    assert [change.level for change in found.changes if change.section == "loss"] == [level]
    assert bool(found.regressions) is (level == "regression")
    of_fp8 = {"loss": loss_of(*new, what="fp8"), "model": {**sides[1]["model"], "quantized": "fp8"}}
    other = md.compare(sides[0], {**sides[1], **of_fp8})
    expected = "same" if level == "same" else "not comparable"
    assert [change.level for change in other.changes if change.section == "loss"] == [expected]
    assert not other.regressions
    for one in ((sides[0], passing()), (passing(), sides[1])):
        assert not md.compare(*one).regressions


def test_a_wider_budget_for_the_same_error_is_a_change():
    new = passing()
    for run in new["parity"]:
        run["accumulation"] = {"type": "fp16", "why": "a name"}
    found = md.compare(passing(), new)
    changed = [each.subject for each in found.changes if each.level == "changed"]
    assert changed
    assert all(subject.endswith("accumulates in") for subject in changed)


@pytest.mark.parametrize("outcome", ["passed", "failed", "not verified"])
def test_both_figures_of_an_error_are_shares_of_one_budget(outcome):
    """The new budget is four times as wide, and the error has doubled: half the share of its own."""
    old, new = passing(), planted("error grown under a wider budget")
    reasons = {"failed": {"kind": "out of budget"}, "not verified": {"kind": "oracle zero"}}
    for data in (old, new):
        verdict(data, outcome=outcome, reason=reasons.get(outcome))
    found = md.compare(old, new)
    (change,) = [each for each in found.changes if each.section == "error" and each.level != "same"]
    shown = [[float(n) for n in re.findall(r"[\d.]+", text)] for text in (change.old, change.new)]
    if outcome == "not verified":
        assert change.old == change.new
    else:
        assert shown[1] == pytest.approx([2 * shown[0][0]], rel=0.05)
    equal = passing()
    verdict(equal, outcome=outcome, reason=reasons.get(outcome))
    rows = [each for each in md.compare(old, equal).changes if each.section == "error"]
    assert all(each.old == each.new for each in rows), "of one budget there is nothing to say"


def test_an_attention_that_is_new_and_unknown_is_no_improvement():
    new = passing()
    node = {**engine(new)["nodes"][0], "node": "new", "status": "unknown", "kernels": []}
    engine(new)["nodes"].append(node)
    (change,) = [each for each in md.compare(passing(), new).changes if each.level != "same"]
    assert (change.section, change.level) == ("fusion", "changed")


NOT_THE_SAME = {
    "model": lambda d: d["model"].update(name="other"),
    "model of that name": lambda d: d["model"]["spec"].update(Hkv=4),
    "precision": lambda d: d["model"].update(precision="bf16"),
    "precision of GEMMs": lambda d: (
        d.update(loss=loss_of(0.01, what="fp8")),
        d["model"].update(quantized="fp8"),
        d["model"]["spec"].update(Hkv=4),
    ),
    "GPU": lambda d: d["latency"].update(gpu="another GPU"),
}


@pytest.mark.parametrize("name", NOT_THE_SAME)
def test_what_is_not_the_same_is_not_comparable_and_said_first(name):
    new = planted("slower")
    NOT_THE_SAME[name](new)
    found = md.compare(passing(), new)
    assert not found.regressions
    assert (found.outcome, found.passed) == ("not verified", False)
    assert found.headline.startswith(f"not comparable: another {name.split()[0]} (")
    assert any(change.section == "latency" for change in found.not_comparable)
    first = found.table().groups[0].rows[0]
    assert {name.split()[0], "not comparable"} <= {str(getattr(cell, "text", cell)) for cell in first}
    attributes = [change for change in found.changes if change.subject.startswith("model: ")]
    assert bool(attributes) == (name != "model")


@pytest.mark.parametrize("other", ["axes", "precision"])
def test_sizes_that_are_not_covered_of_another_range_or_precision_are_not_comparable(other):
    old, new = passing(), passing()
    gap = {"kind": "sizes not covered", "axis": "B", "end": "max"}
    for data, least, most in ((old, 20, 32), (new, 50, 99)):
        data["verdict"]["not_verified"] = [{**gap, "least": least, "most": most}]
    assert md.compare(old, new).regressions
    if other == "axes":
        axes = new["model"]["spec"]["axes"]
        new["model"]["spec"] = {**new["model"]["spec"], "axes": {**axes, "B": {**axes["B"], "max": 99}}}
    else:
        new["model"]["precision"] = "bf16"
    found = md.compare(old, new)
    assert not found.regressions
    assert found.outcome == "not verified"


@pytest.mark.parametrize(("cases", "other"), [("fresh", "axes"), ("probe", "precision")])
def test_cases_that_were_drawn_for_another_range_or_precision_are_not_comparable(cases, other):
    """Unless there are none of the kind any more."""
    old, new, gone = passing(), passing(), passing()
    for data, names in ((old, ("a", "b")), (new, ("b",)), (gone, ())):
        run = data["parity"][ENGINE]
        drawn = [{**run["verdicts"][0], "case": name} for name in names]
        data["parity"].append({**run, "cases": cases, "verdicts": drawn})
    assert len(md.compare(old, new).regressions) == 2, "an error, and the sizes of its case"
    for data in (new, gone):
        if other == "axes":
            axes = data["model"]["spec"]["axes"]
            data["model"]["spec"] = {**data["model"]["spec"], "axes": {**axes, "B": {**axes["B"], "max": 99}}}
        else:
            data["model"]["precision"] = "bf16"
    assert not md.compare(old, new).regressions
    assert md.compare(old, gone).regressions


def in_profiles(*profiles, share=0.24):
    """A report of an engine whose profiles these are; one alone cannot be varied."""
    data = passing()
    check = next(each for each in data["invariance"] if each["check"] == "profile")
    check |= {"profiles": [*profiles], "share": share}
    if len(profiles) < 2:
        none = {"variation": None, "case": "", "batch": None, "profiles": [], "share": None}
        check |= {**none, "obstacle": "one profile", "outcome": "not verified"}
    return data


@pytest.mark.parametrize(("old", "new"), [((0,), (0, 1)), ((0, 1), (0,)), ((0, 1), (0, 1, 2))])
def test_another_number_of_profiles_is_no_regression(old, new):
    found = md.compare(in_profiles(*old), in_profiles(*new))
    assert found.passed
    levels = {change.level for change in found.changes if change.section == "invariance"}
    assert levels <= {"same", "improvement", "changed"}
    gone = {**in_profiles(*new), "invariance": []}
    assert md.compare(in_profiles(0, 1), gone).regressions


def test_a_check_that_could_not_be_made_before_and_fails_now_is_a_regression():
    new = in_profiles(0, 1, share=2.0)
    next(each for each in new["invariance"] if each["check"] == "profile")["outcome"] = "failed"
    assert {change.section for change in md.compare(in_profiles(0), new).regressions} == {"invariance"}


def test_a_batch_size_that_is_not_run_any_more_is_a_regression_unless_the_axes_are_others():
    old, new = passing(), passing()
    check = next(each for each in old["invariance"] if each["check"] == "batch size")
    old["invariance"].append({**check, "other_batch": 32})
    assert {change.section for change in md.compare(old, new).regressions} == {"coverage"}
    axes = new["model"]["spec"]["axes"]
    new["model"]["spec"] = {**new["model"]["spec"], "axes": {**axes, "B": {**axes["B"], "max": 99}}}
    found = md.compare(old, new)
    assert not found.regressions
    assert "invariance" in {change.section for change in found.not_comparable}


def test_of_two_models_what_differs_between_them_is_listed_and_the_rest_on_request():
    """Regressions are always listed."""
    new = planted("slower", "case missing")
    new["model"]["spec"] = {**new["model"]["spec"], "Hkv": 4}
    found = md.compare(passing(), new)
    whole, few = found.table(everything=True), found.table()
    assert len(few.groups[0].rows) < len(whole.groups[0].rows)
    listed = sum(len(group.rows) for group in few.groups)
    assert listed == 1 + len(found.regressions)


@pytest.mark.parametrize(
    ("file", "digest"),
    [("v2.pt", "a"), ("v2.pt", "b"), ("v1.pt", "b")],
    ids=["renamed", "other", "retrained"],
)
def test_other_weights_are_a_change_and_no_other_model(file, digest):
    def weights_in(data, name, digest):
        data["model"]["spec"] |= {"weights_file": name, "state_sha256": digest * 64}
        data["model"]["weights"] = f"{name}, state SHA-256 {digest * 64}"
        return data

    old = weights_in(passing(), "v1.pt", "a")
    assert md.compare(old, weights_in(passing(), file, digest)).passed
    assert md.compare(old, weights_in(planted("error over budget"), file, digest)).regressions
    grown = weights_in(planted("error grown"), file, digest)
    found = md.compare(old, grown)
    assert bool(found.regressions) is (digest == "a"), "by chance, of other weights"
    assert md.compare(old, grown, error=0.1).regressions, "what the user limits"
    assert not found.not_comparable
    assert "changed" in {change.level for change in found.changes if change.subject == "weights"}
    small = {name: 0.1 * limit for name, limit in verdict(old)["budget"].items()}
    verdict(old, share=0.1, deviation=verdict(old)["deviation"] | small)
    verdict(grown, share=0.7)
    assert md.compare(old, grown).regressions, "what the weights change is rated"


def test_an_attribute_that_is_not_the_same_is_named_without_what_is():
    old, new = passing(), passing()
    same, more = ({"name": name, "kind": "float", "dims": ["B", 8]} for name in ("tokens", "pixels"))
    old["model"]["spec"] = {**old["model"]["spec"], "inputs": [same]}
    new["model"]["spec"] = {**new["model"]["spec"], "inputs": [same, more]}
    (change,) = (each for each in md.compare(old, new).not_comparable if each.subject == "model")
    assert "pixels" in change.new
    assert "tokens" not in change.new + change.old
    assert not set("{}'()") & set(change.new)


def test_on_another_gpu_errors_are_compared_all_the_same():
    new = planted("slower", "error grown")
    new["latency"]["gpu"] = "another GPU"
    assert [change.section for change in md.compare(passing(), new).regressions] == ["error"]


@pytest.mark.parametrize("sizes", [{"S": 64}, {"B": 99, "S": 64}, {"S": 4000}])
def test_a_case_of_other_sizes_is_not_comparable(sizes):
    new = passing()
    new["parity"][ENGINE]["verdicts"][1]["sizes"].update(sizes)
    found = md.compare(passing(), new)
    assert not found.regressions
    assert found.outcome == "not verified"
    assert "not comparable" in found.headline


def renamed(data):
    """Another exporter calls the attentions otherwise."""
    for node in (*engine(data)["nodes"], *data["range"]["nodes"]):
        node["node"] = f"blk.{node['node']}.attn"


def test_renamed_attentions_are_matched_by_their_order():
    new = passing()
    renamed(new)
    found = md.compare(passing(), new)
    assert {change.level for change in found.changes} == {"same"}
    engine(new)["nodes"][0]["status"] = "decomposed"
    assert [change.section for change in md.compare(passing(), new).regressions] == ["fusion"]


def test_an_attention_that_is_not_verified_is_found_again_under_another_name():
    old, new = passing(), passing()
    for data, name in ((old, "attention"), (new, "blk.attention.attn")):
        gap = {"kind": "attention not observed", "name": "tensorrt", "attention": name}
        data["verdict"]["not_verified"].append(gap)
    renamed(new)
    assert {change.level for change in md.compare(old, new).changes} == {"same"}


def test_deleting_an_engine_is_no_improvement():
    old, new = cpu_only(), cpu_only()
    new["engines"], new["verdict"]["not_verified"] = [], []
    new["verdict"]["outcome"] = "passed"
    found = md.compare(old, new)
    assert not [change for change in found.changes if change.level == "improvement"]
    assert not found.passed


@pytest.mark.parametrize("side", [0, 1])
def test_a_throttled_latency_is_inconclusive(side):
    sides = [passing(), passing()]
    slower(sides[1])
    timed(sides[side])["timing"]["conditions"]["throttled_by"] = ["power cap"]
    found = md.compare(*sides)
    assert not found.regressions
    assert found.outcome == "not verified"
    assert [change.subject for change in found.changes if change.level == "inconclusive"]
    assert not md.compare(*sides, strict=True).passed


def rebuilt(data, **spread):
    lists = {key: [] for key in ("differing", "fused", "seconds", "engine_bytes")}
    same = {"builds": 3, "identical": False, "timing_cache": None, "errors": {}, "times_us": {}}
    data["engines"][0]["rebuilds"] = {**lists, **same, **spread}
    return data


def test_the_spread_of_rebuilds_is_no_regression():
    case = passing()["parity"][ENGINE]["verdicts"][0]
    errors = {case["case"]: {case["output"]: [case["share"], case["share"] + 0.3]}}
    new, slow = planted("error grown"), planted("slower")
    assert not md.compare(passing(), new).passed
    assert md.compare(rebuilt(passing(), errors=errors), new).passed
    times = {passing()["latency"]["points"][0]["case"]: [10.0, 100.0]}
    assert not md.compare(passing(), slow).passed
    assert md.compare(rebuilt(passing(), times_us=times), slow).passed
    assert md.compare(rebuilt(passing(), engine_bytes=[1, 10**9]), planted("engine larger")).passed


def test_thresholds_are_options():
    new = planted("slower", "error grown", "engine larger", "build slower", "runtime missing")
    limits = {"latency": 0.5, "error": 0.5, "size": 2.0, "build_time": 10.0, "coverage": False}
    assert md.compare(passing(), new, **limits).passed
    for name in limits:
        assert not md.compare(passing(), new, **{key: limits[key] for key in limits if key != name}).passed
    with pytest.raises(TypeError, match="speed"):
        md.compare(passing(), new, speed=1)
    with pytest.raises(md.DeployError, match="bounds"):
        md.compare(passing(), new, error=-0.1)


# -- sources ---------------------------------------------------------------------------------------


def bench_of(*reports):
    entries = [{key: report[key] for key in ("model", "engines", "latency")} for report in reports]
    frame = {key: passing()[key] for key in ("format", "tool", "created", "environment")}
    return {**frame, "models": entries}


@pytest.mark.parametrize(
    ("worse", "section"),
    [
        ({"answered": 200}, "error"),
        ({"requests": 8, "answered": 8}, "coverage"),
        ({"wrong": 3}, "error"),
        ({"p50_ms": 9.0, "p90_ms": 9.5}, "latency"),
    ],
)
def test_a_server_that_got_worse_is_reported(worse, section):
    old, new = passing(), passing()
    load = {
        "clients": 8, "requests": 256, "answered": 256, "errors": {}, "first_error": None, "judged": 256,
        "wrong": 0, "per_second": 900.0, "p50_ms": 4.0, "p90_ms": 4.5, "p99_ms": 4.5,
    }  # fmt: skip
    old["serving"], new["serving"] = [load], [load | worse]
    assert [change.section for change in md.compare(old, new).regressions] == [section]
    assert md.compare(old, old).passed


def test_results_under_load_are_compared_at_the_same_number_of_clients():
    old, new = passing(), passing()
    for data in (old, new):
        run = data["parity"][ENGINE] | {"cases": "served"}
        data["parity"] = [copy.deepcopy(run) | {"clients": count} for count in (1, 8)]
    assert not md.compare(old, new).regressions
    new["parity"][0]["verdicts"][0]["share"] += 0.2
    (change,) = md.compare(old, new).regressions
    assert "clients" not in change.subject
    new["parity"].reverse()
    for run, count in zip(new["parity"], (1, 8), strict=True):
        run["clients"] = count
    (change,) = md.compare(old, new).regressions
    assert "8 clients" in change.subject


def test_fewer_calls_on_several_streams_are_reported():
    sides = [bench_of(passing()), bench_of(passing())]
    for side, rate in zip(sides, (4000.0, 3000.0), strict=True):
        calls = {"name": "tensorrt", "family": "tensorrt", "case": "opt", "sizes": {"B": 1}, "streams": 4}
        calls["per_second"] = rate
        side["models"][0]["throughput"] = [calls]
    (change,) = md.compare(*sides).regressions
    assert (change.subject, change.old) == ("tensorrt at B=1, 4 streams", "4,000 calls/s")


def test_benchmarks_of_several_models_are_paired_by_name_and_precision():
    other = passing()
    other["model"] |= {"name": "other"}
    slow = copy.deepcopy(other)
    slower(slow)
    found = md.compare(bench_of(passing(), other), bench_of(slow, passing()))
    assert [(change.section, "other" in change.model) for change in found.regressions] == [("latency", True)]
    gone = md.compare(bench_of(passing(), other), bench_of(other))
    assert [change.section for change in gone.regressions] == ["coverage"]


def test_a_benchmark_of_a_quantized_model_is_of_another_precision_and_of_no_other_model():
    new = bench_of(passing())
    new["models"][0]["model"] |= {"quantized": "fp8"}
    new["models"][0]["model"]["spec"]["Hkv"] = 4
    found = md.compare(bench_of(passing()), new)
    assert not found.regressions
    assert {change.subject for change in found.not_comparable if change.section == "environment"} == {
        "precision"
    }


def test_an_engine_of_another_name_is_the_same_engine():
    new = passing()
    new["engines"][0]["name"] = "rebuilt"
    for point in new["latency"]["points"]:
        next(row for row in point["rows"] if row["name"] == "tensorrt")["name"] = "rebuilt"
    for each in (*new["parity"], *new["decode"], *new["invariance"]):
        each["engine"] = each["engine"] and "rebuilt"
    assert md.compare(passing(), new).passed


OF_ENGINES = ("parity", "decode", "invariance")


def of_two_engines(*order):
    """A report of two engines of one TensorRT, listed in this order; the second uses more of the budget."""
    data = passing()
    known = {"tensorrt": engine(data), "plugin": {**copy.deepcopy(engine(data)), "name": "plugin"}}
    data["engines"] = [known[name] for name in order]
    for section in OF_ENGINES:
        plain = [each for each in data[section] if each["engine"] is None]
        first = [each for each in data[section] if each["engine"] is not None]
        second = copy.deepcopy(first)
        for each in second:
            each["engine"] = "plugin"
            for part in each.get("verdicts", [each]):
                part["share"] = 0.9
        listed = {"tensorrt": first, "plugin": second}
        data[section] = [*plain, *(each for name in order for each in listed[name])]
    return data


def test_two_engines_of_one_tensorrt_are_told_apart_by_name_and_not_by_their_order():
    one, two = of_two_engines("tensorrt", "plugin"), of_two_engines("plugin", "tensorrt")
    assert {change.level for change in md.compare(one, two).changes} == {"same"}
    for section in OF_ENGINES:
        gone = copy.deepcopy(two)
        gone[section] = [each for each in two[section] if each["engine"] != "tensorrt"]
        lost = md.compare(one, gone)
        assert {change.section for change in lost.regressions} == {"coverage"}
        assert all("plugin" not in change.subject for change in lost.regressions)


def test_the_spread_of_rebuilds_is_that_of_the_engine():
    """Also where another engine has the same runtime."""
    old, new = of_two_engines("tensorrt", "plugin"), of_two_engines("plugin", "tensorrt")
    run = next(each for each in new["parity"] if each["engine"] == "tensorrt")
    worse = run["verdicts"][0]
    errors = {worse["case"]: {worse["output"]: [worse["share"], worse["share"] + 0.3]}}
    worse["share"] += 0.2
    assert not md.compare(old, new).passed
    assert md.compare(rebuilt(old, errors=errors), new).passed
    old["engines"].reverse()
    old["engines"][1]["rebuilds"] = None
    assert not md.compare(rebuilt(old, errors=errors), new).passed, "the spread of the other engine"


def test_two_bundles_and_their_reports_are_compared(bundles, tmp_path):
    old = shutil.copytree(bundles("tiny-gqa").path, tmp_path / "old")
    md.validate(old, latency=False, probe=False, runtimes=["ort-cpu"]).save(old)
    new = shutil.copytree(old, tmp_path / "new")
    found = md.compare(old, md.open_bundle(new))
    assert found.passed
    assert not [change.subject for change in found.changes if change.subject.endswith("(2)")]  # all once
    report = json.loads((new / "report.json").read_text())
    report["parity"][0]["verdicts"][0]["share"] += 0.5
    (new / "report.json").write_text(json.dumps(report))
    assert [change.section for change in md.compare(old, new).regressions] == ["error"]
    # A report of another bundle says nothing on this one.
    report["model"]["bundle_sha256"] = "0" * 64
    (new / "report.json").write_text(json.dumps(report))
    assert {change.section for change in md.compare(old, new).regressions} == {"coverage"}
    # What was not verified is not verified now because nothing is, and the other way round.
    both = [*md.compare(old, new).changes, *md.compare(new, old).changes]
    assert not [change for change in both if change.subject.startswith("not verified")]


def test_what_cannot_be_compared_is_refused(bundles, tmp_path, refused):
    report = tmp_path / "report.json"
    report.write_text(json.dumps(cpu_only()))
    refused("compare", report, bundles("tiny-gqa").path, what="kind", got="is a bundle")
    refused("compare", report, tmp_path / "none.json", what="no such file", got="none.json")
    (tmp_path / "empty").mkdir()
    refused("compare", report, tmp_path / "empty", what="folder has no result", got="empty")
    for number, content in enumerate(
        ["[1]", "{", '{"parity": 3}', '{"parity": [{"cases": 1}], "model": {}}']
    ):
        broken = tmp_path / f"{number}.json"
        broken.write_text(content)
        assert refused("compare", report, broken, what="", got=f"{number}.json").code == 2


# -- what is printed and written -------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """Two reports on disk, the new one with regressions."""
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, data in zip(paths, (passing(), planted("fusion lost", "slower")), strict=True):
        path.write_text(json.dumps(data))
    return paths


def test_the_exit_code_is_the_verdict(run_cli, files, tmp_path):
    old, new = files
    done = run_cli("compare", old, new, "--junit", tmp_path / "j.xml", "--html", tmp_path / "page.html")
    assert done.code == 1
    assert done.out.startswith("FAILED")
    assert "fusion lost" in done.out
    suite = ElementTree.parse(tmp_path / "j.xml").getroot()
    failed = [case for case in suite if case.find("failure") is not None]
    assert len(failed) == int(suite.get("failures")) == 2
    assert int(suite.get("tests")) == len(suite)
    page = (tmp_path / "page.html").read_text()
    assert 'data-verdict="failed"' in page
    assert str(old) in page
    assert str(new) in page
    columns = re.findall('<th scope="col"([^>]*)>[^<]', page)
    assert columns
    assert all("title=" in each for each in columns)
    headings = re.findall("<h2[^>]*>([^<]*)</h2>", page)
    assert headings[0] == "Regressions"
    assert f"compare {old} {new}" in page  # the command
    assert run_cli("compare", old, old).code == 0


def test_markdown_and_json_hold_the_same_regressions(run_cli, files):
    table = run_cli("compare", *files, "--markdown")
    data = run_cli("compare", *files, "--json")
    assert table.code == data.code == 1
    changes = json.loads(data.out)["changes"]
    worse = [change for change in changes if change["level"] == "regression"]
    assert table.out.count("| regression |") == len(worse) == 2
    first = [line for line in table.out.splitlines() if line.startswith("|")][2:4]
    assert all("| regression |" in line for line in first)
    assert run_cli("compare", *files, "--max-latency", "0.5", "--json").code == 1
    assert run_cli("compare", files[0], files[0], "--json").code == 0


@pytest.mark.parametrize(
    ("paths", "shown"),
    [
        (("a/old.json", "a/new.json"), ("old.json", "new.json")),
        (("a/v1/report.json", "b/v2/report.json"), ("v1/report.json", "v2/report.json")),
        (("a/v1/report.json", "b/v1/report.json"), ("a/v1/report.json", "b/v1/report.json")),
        (("report.json", "v1/report.json"), ("report.json", "v1/report.json")),
        (("report.json", "report.json"), ("report.json", "report.json")),
    ],
)
def test_the_title_of_the_page_tells_both_sides_apart(tmp_path, monkeypatch, paths, shown):
    monkeypatch.chdir(tmp_path)
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(passing()))
    (title,) = re.findall("<title>(.*?)</title>", md.compare(*paths).to_html())
    assert re.findall(r"\S+\.json", title) == list(shown)


def test_names_from_a_report_cannot_become_markup():
    new = passing()
    new["engines"][0]["name"] = HOSTILE
    new["parity"][ENGINE]["verdicts"][0] |= {
        "case": HOSTILE,
        "outcome": "failed",
        "reason": {"kind": "did not run", "got": HOSTILE},
    }
    found = md.compare(passing(), new)
    assert "<script>alert" not in found.to_html()
    assert found._repr_html_().startswith("<iframe srcdoc=")
    assert "<script>" not in found.to_markdown()
    ElementTree.fromstring(found.to_junit().encode())
    found.to_json().encode()


def test_the_workflow_and_the_plan_of_the_examples_are_valid(run_cli):
    folder = Path(__file__).resolve().parents[2] / "examples" / "ci"
    workflow = (folder / "upgrade.yml").read_text()
    commands = re.findall(r"mha-deploy ([\w-]+)((?:[^\n|\\]|\\\n)*)", workflow)
    assert {"deploy", "build-engine", "validate", "compare"} <= {verb for verb, _ in commands}
    for verb, arguments in commands:
        if arguments.strip():
            known = run_cli(verb, "--help").out
            assert [option for option in re.findall(r"--[a-z-]+", arguments) if option not in known] == []
    assert [runtime.name for runtime in read_plan(folder / "rtx.toml").runtimes][-1] == "rtx-1.7"


@pytest.mark.parametrize(
    ("old", "new", "passed"), [("passed", "not verified", False), ("failed", "not verified", True)]
)
def test_a_validation_that_ran_nothing_ranks_between_passed_and_failed(old, new, passed):
    sides = [passing(), passing()]
    for side, outcome in zip(sides, (old, new), strict=True):
        side["verdict"] |= {"outcome": outcome}
    found = md.compare(*sides)
    assert found.passed is passed
    assert not [change for change in found.changes if change.level == "improvement"], "less is known"


WRONG_OR_UNKNOWN = {
    "error": [
        lambda data: verdict(data, outcome="failed", reason={"kind": "out of budget"}),
        lambda data: verdict(data, outcome="not verified", reason={"kind": "oracle zero"}),
    ],
    "conformance": [
        lambda data: mask_status(data, "wrong"),
        lambda data: mask_status(data, "absent"),
    ],
}


@pytest.mark.parametrize("section", WRONG_OR_UNKNOWN)
def test_less_evidence_of_something_wrong_is_no_improvement(section):
    sides = [passing(), passing()]
    for data, plant in zip(sides, WRONG_OR_UNKNOWN[section], strict=True):
        plant(data)
    levels = {change.level for change in md.compare(*sides).changes if change.section == section}
    assert levels == {"changed", "same"}


CORNER = {**GAP, "least": 1, "most": 2, "end": "min", "other_axis": "S", "other_least": 17, "other_most": 64}


@pytest.mark.parametrize(
    ("old", "new", "is_better"),
    [
        (CORNER, {"kind": "sizes not covered", "axis": "S", "least": 2, "most": 64}, False),
        (CORNER, {"kind": "profile not covered", "name": "tensorrt", "profile": 0}, False),
        (GAP, {**GAP, "least": 1, "most": 8}, False),
        (CORNER, {**CORNER, "most": 20, "other_least": 63}, False),
        ({"kind": "profile not covered", "name": "tensorrt", "profile": 1}, GAP, False),
        (GAP, {**GAP, "least": 20}, True),
        (CORNER, {**CORNER, "other_least": 20}, True),
        (CORNER, {"kind": "sizes not covered", "axis": "S", "least": 100, "most": 101}, True),
        (CORNER, None, True),
    ],
)
def test_sizes_are_covered_again_only_where_no_other_gap_holds_them(old, new, is_better):
    sides = []
    for gap in (old, new):
        data = passing()
        data["verdict"]["not_verified"] = [gap] if gap else []
        sides.append(data)
    levels = {change.level for change in md.compare(*sides).changes}
    assert ("improvement" in levels) is is_better


def test_a_part_of_what_was_not_verified_is_no_regression():
    old, new = passing(), passing()
    old["verdict"]["not_verified"] = [{"kind": "sizes not covered", "axis": "S", "least": 2, "most": 64}]
    new["verdict"]["not_verified"] = [CORNER]
    found = md.compare(old, new)
    assert {change.level for change in found.changes} == {"improvement", "changed", "same"}


def test_what_neither_side_has_is_no_change():
    old, new = passing(), passing()
    old["engines"][0]["plugins"] = []
    new["engines"].append({**copy.deepcopy(engine(new)), "name": "another", "plugins": []})
    for found in (md.compare(old, new), md.compare(new, old)):
        assert len(found.changes) > 1
        assert not [change for change in found.changes if change.old == change.new and change.level != "same"]


def test_two_models_have_no_regressions_of_their_axes_cases_and_gaps():
    new = planted("slower", "case missing", "less verified", "engine missing")
    axes = new["model"]["spec"]["axes"]
    new["model"]["spec"]["axes"] = {f"other {name}": axis for name, axis in axes.items()}
    assert md.compare(passing(), new).regressions
    new["model"]["name"] = "other"
    found = md.compare(passing(), new)
    assert not found.regressions
    assert not [change for change in found.changes if change.level == "improvement"]
    assert found.outcome == "not verified"
    assert md.compare(passing(), {**new, "verdict": {**new["verdict"], "outcome": "failed"}}).regressions
