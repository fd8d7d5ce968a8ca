"""What was not run is not verified: in the headline, the exit code and the data."""

import math
from types import SimpleNamespace

import pytest
import torch
from bundle_edit import copy_of, edit_manifest
from click.testing import CliRunner
from torch import nn

import mha_deploy as md
from mha_deploy.bundle.folder import open_bundle
from mha_deploy.bundle.manifest import ObservedRecord, Perturbation
from mha_deploy.bundle.sizes import sweep_points
from mha_deploy.cli import app
from mha_deploy.judge import Accumulation
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.spec import Axis
from mha_deploy.options import ValidateOptions
from mha_deploy.status import CaseKind, Kind, Severity
from mha_deploy.validation.verdict import coverage_findings, find_uncovered


def judged(*sizes, engine=None, passed=True, not_decoded=None, accumulate="fp32", ran=True):
    about = {"passed": passed, "is_wrong": not passed, "ran": ran}
    verdicts = [SimpleNamespace(sizes=each, **about) for each in sizes]
    report = SimpleNamespace(verdicts=verdicts, cases="golden", accumulation=Accumulation(accumulate))
    runtime = SimpleNamespace(engine=engine, name="e")
    return SimpleNamespace(
        parity=(report,), verdicts=verdicts, runtime=runtime, not_decoded_because=not_decoded
    )


def engine_of(*ranges):
    return SimpleNamespace(path=SimpleNamespace(stem="e"), manifest=SimpleNamespace(ranges=list(ranges)))


CORNERS = [{"B": B, "S": S} for B in (1, 4) for S in (1, 64)]
AXES = {"B": Axis(min=1, opt=2, max=4), "S": Axis(min=1, opt=16, max=64)}


def words(*evaluations, engines=(), hidden=(), kind=Perturbation.SCALE):
    observed = [ObservedRecord(name=name, case="opt", shown=[], hidden=[kind]) for name in hidden]
    return [gap.text for gap in find_uncovered(evaluations, engines, AXES, observed=observed)]


def test_sizes_above_the_largest_case_are_not_verified():
    assert words(judged(*CORNERS)) == []
    assert words(judged({"B": 1, "S": 1}, {"B": 1, "S": 16}, {"B": 4, "S": 1}, {"B": 4, "S": 16})) == [
        "S = 17–64"
    ]
    assert words(judged({"B": 4, "S": 64}, passed=False), judged({"B": 2, "S": 64})) != []


def test_what_ran_and_is_wrong_is_covered():
    assert words(judged(*CORNERS, passed=False)) == []
    assert words(judged(*CORNERS[:2], passed=False)) == ["B = 2–4"]
    assert words(judged(*CORNERS, passed=False, ran=False)) == ["every size of e"]
    small = judged(*CORNERS[:2])
    for others in ({}, {"ran": False}, {"is_wrong": False}):
        about = {"passed": False, "is_wrong": True, "ran": True, **others}
        large = [SimpleNamespace(sizes=sizes, **about) for sizes in CORNERS[2:]]
        both = SimpleNamespace(**{**vars(small), "verdicts": [*small.verdicts, *large]})
        assert words(both) == (["B = 2–4"] if others else words(judged(*CORNERS))), "repaired, it is the same"


def test_sizes_below_the_smallest_case_are_not_verified():
    assert words(judged({"B": 1, "S": 8}, {"B": 1, "S": 64}, {"B": 4, "S": 8}, {"B": 4, "S": 64})) == [
        "S = 1–7"
    ]


@pytest.mark.parametrize("missing", range(4))
def test_two_ends_are_covered_by_one_case_that_has_both(missing):
    corner, others = CORNERS[missing], [each for each in CORNERS if each is not CORNERS[missing]]
    (gap,) = find_uncovered([judged(*others, {"B": 2, "S": 16})], [], AXES)
    assert {gap.axis, gap.other_axis} == {"B", "S"}
    spans = {gap.axis: (gap.least, gap.most), gap.other_axis: (gap.other_least, gap.other_most)}
    assert all(least <= corner[axis] <= most for axis, (least, most) in spans.items())
    for ran in (*others, {"B": 2, "S": 16}):
        assert not all(least <= ran[axis] <= most for axis, (least, most) in spans.items())


def test_combinations_that_were_not_run_are_named_by_their_ranges():
    axes = {"S": Axis(min=1, opt=16, max=64), "P": Axis(min=0, opt=24, max=127)}
    ran = judged({"S": 1, "P": 0}, {"S": 64, "P": 0}, {"S": 1, "P": 24}, {"S": 64, "P": 127})
    (gap,) = find_uncovered([ran], [], axes)
    assert gap.text == "S = 1–63 with P = 25–127"
    wider = find_uncovered([judged({"S": 1, "P": 0}, {"S": 64, "P": 0}, {"S": 64, "P": 127})], [], axes)
    assert [each.identity for each in wider] == [gap.identity], "whatever its extent"
    assert wider[0].extent > gap.extent


def test_a_kv_cache_that_no_token_was_decoded_with_is_not_verified():
    assert words(judged(*CORNERS, not_decoded="the bundle has no decode trace")) == ["decode steps in e"]


def test_an_attention_that_no_output_shows_is_not_verified_unless_it_was_judged_itself():
    ran = judged(*CORNERS)
    observed = [
        ObservedRecord(name="a", case="opt", shown=[Perturbation.ZERO], hidden=[Perturbation.SCALE]),
        ObservedRecord(name="b", case="", shown=[], hidden=[Perturbation.ZERO]),  # it was not tried
    ]
    gaps = find_uncovered([ran], [], AXES, observed=observed)
    assert [(gap.attention, gap.hidden) for gap in gaps] == [("a", (Perturbation.SCALE.value,)), ("b", ())]
    assert Perturbation.SCALE.value in gaps[0].text
    # What to try is in the note, once.
    (note,) = coverage_findings(gaps, ValidateOptions())
    assert note.reason.kind is Kind.ATTENTION_NOT_OBSERVED
    assert note.text.count("--weights") == 1
    about = {"cases": CaseKind.LAYERS, "accumulation": Accumulation()}
    inside = SimpleNamespace(verdicts=[SimpleNamespace(output="a")], **about)
    both = SimpleNamespace(**{**vars(ran), "parity": (*ran.parity, inside)})
    assert [gap.attention for gap in find_uncovered([both], [], AXES, observed=observed)] == ["b"]


def test_what_accumulation_in_fp16_hides_is_named_where_a_runtime_accumulates_so():
    kind = Perturbation.BF16_IN_HALF
    assert words(judged(*CORNERS), hidden=["a"], kind=kind) == []
    (said,) = words(judged(*CORNERS, accumulate="fp16"), hidden=["a"], kind=kind)
    assert kind.value in said


def test_an_engine_that_did_not_run_is_not_verified():
    assert words(judged(*CORNERS), engines=[engine_of(AXES)]) == ["engine e"]


def test_a_profile_that_no_case_reached_is_not_verified():
    decode = {**AXES, "S": Axis(min=1, opt=1, max=1)}
    prefill = {**AXES, "S": Axis(min=2, opt=16, max=64)}
    engine = engine_of(prefill, decode)
    long = [{"B": B, "S": S} for B in (1, 4) for S in (2, 64)]
    assert words(judged(*long, engine=engine), engines=[engine]) == ["profile 1 of e"]
    assert words(judged(*long, *CORNERS, engine=engine), engines=[engine]) == []


@pytest.mark.parametrize("name", ["llama-3-8b", "bert-base", "whisper-large-cross"])
def test_the_largest_corner_is_never_below_the_usual_sizes(name):
    spec = find_spec(name)
    corners = {point.name: point.sizes for point in sweep_points(spec)}
    usual = spec.sizes("opt")
    longest = corners.get("max", usual)
    assert all(longest[axis] >= size for axis, size in usual.items())


@pytest.fixture(scope="module")
def narrow(bundles, tmp_path_factory):
    """A bundle whose golden cases stop at the usual sizes."""
    folder = copy_of(bundles("tiny-gqa"), tmp_path_factory.mktemp("coverage") / "bundle")
    edit_manifest(
        folder, lambda data: data.update(golden=[e for e in data["golden"] if e["name"] in ("min", "opt")])
    )
    return folder


@pytest.mark.parametrize(("option", "code"), [((), 0), (("--require-coverage",), 1)])
def test_required_coverage_is_part_of_the_exit_code(narrow, option, code):
    result = CliRunner().invoke(app, ["validate", str(narrow), "--no-report", "--no-probe", *option])
    assert result.exit_code == code
    assert "not covered: " in result.output


def test_the_report_lists_what_was_not_run(narrow):
    report = md.validate(narrow, latency=False, probe=False)
    data = report.to_dict()["verdict"]
    assert data["outcome"] == "passed"
    assert {gap["axis"] for gap in data["not_verified"]} >= {"S"}
    assert "not covered: " in report.headline


def test_two_demands_that_are_not_met_are_both_in_the_headline(narrow):
    demands = {"require_run": True, "require_coverage": True}
    report = md.validate(narrow, latency=False, probe=False, **demands)
    failures = [each for each in report.to_dict()["verdict"]["findings"] if each["level"] == "failure"]
    assert {name for each in failures for name in each["required_by"]} == set(demands)
    assert all(each["text"] in report.headline for each in failures)


@pytest.mark.parametrize("required", [False, True])
def test_sizes_that_were_requested_and_not_exported_are_not_covered(narrow, tmp_path, required):
    folder = copy_of(open_bundle(narrow), tmp_path / "bundle")
    axis = open_bundle(folder).manifest.spec.axes["S"]
    asked = {"requested_min": axis.min, "requested_max": axis.max + 9, "min": axis.min, "max": axis.max}
    edit_manifest(folder, lambda data: data.update(shrunk=[{"axis": "S", "reason": "made by hand", **asked}]))
    report = md.validate(folder, latency=False, probe=False, require_coverage=required)
    lost = (axis.max + 1, axis.max + 9)
    gap = next(gap for gap in report.to_dict()["verdict"]["not_verified"] if gap.get("least") == lost[0])
    assert (gap["axis"], gap["most"]) == ("S", lost[1])
    assert gap["text"] in report.headline, "however many others there are"
    assert report.passed is not required


class ScaledByLength(nn.Module):
    """Whose scale is a number of Python that follows the length: it cannot vary in a graph."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x):
        x, scale = self.project(x), math.log(x.shape[1]) / x.shape[2]
        return torch.softmax(x @ x.transpose(1, 2) * scale, -1) @ x


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_range_that_shrank_at_export_is_a_finding(tmp_path, precision):
    example = md.Example(torch.randn(2, 16, 8), "B", "S")
    given = md.Deployable(module=ScaledByLength(), inputs={"x": example}, axes={"B": "1:2:4", "S": "2:16:40"})
    bundle = md.export(given, tmp_path / "bundle", precision=precision, golden=("opt",))
    (shrunk,) = open_bundle(bundle.path).manifest.shrunk
    assert (shrunk.axis, shrunk.requested_max, shrunk.max) == ("S", 40, 16)
    report = md.validate(bundle, latency=False, probe=False)
    (found,) = [each for each in report.findings if each.kind is Kind.RANGE_SHRUNK]
    assert found.level is Severity.WARNING
    assert found.names == ("S",)
    assert found.numbers == {"requested_min": 2, "requested_max": 40, "min": 16, "max": 16}
    spans = [gap.spans.get("S") for gap in report.validation.not_verified]
    assert spans[:2] == [(2, 15), (17, 40)]
    assert "--axis S=16" in found.text
