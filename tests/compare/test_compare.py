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


def fusion_lost(data):
    data["engines"][0]["nodes"][0] |= {"status": "decomposed", "kernels": ["softmax", "gemm"]}


def fusion_unknown(data):
    data["engines"][0]["nodes"][0]["status"] = "unknown"


def precision_mixed(data):
    data["engines"][0]["precision_status"] = "mixed"


def precision_requested(data):
    data["engines"][0]["precision"] = "fp32"


def precision_of_the_model(data):
    data["model"]["precision"] = "bf16"


def error_over_budget(data):
    verdict = data["parity"][ENGINE]["verdicts"][0]
    verdict |= {"passed": False, "problem": "out of budget: gain", "share": 1.4}


def error_grown(data):
    data["parity"][ENGINE]["verdicts"][0]["share"] += 0.2


def deviation_grown(data):
    verdict = data["parity"][ENGINE]["verdicts"][0]
    verdict["deviation"]["relative_l2"] = 0.9 * verdict["budget"]["relative_l2"]


def fewer_fused(data):
    data["engines"][0]["fused"] = [0, 1]


def error_not_finite(data):
    verdict = data["parity"][ENGINE]["verdicts"][0]
    verdict |= {"passed": False, "problem": "12 values are NaN", "share": None, "deviation": None}


def not_verified(data):
    verdict = data["parity"][ENGINE]["verdicts"][0]
    verdict |= {"passed": False, "problem": "not verified: the reference is zero"}


def decode_wrong(data):
    data["decode"][1] |= {"passed": False, "first_failed": 3, "share": 4.0}


def decode_shorter(data):
    data["decode"][1]["steps"] //= 2


def invariance_broken(data):
    data["invariance"][1]["passed"] = False


def mask_wrong(data):
    row = next(row for row in data["conformance"]["rows"] if not row["diagnostic"])
    next(cell for cell in row["cells"].values() if cell["status"] == "conforms")["status"] = "wrong"


def range_overflows(data):
    data["range"]["nodes"][0]["status"] = "overflows"


def slower(data):
    for key in ("p50_us", "p90_us", "p99_us"):
        timed(data)["timing"][key] *= 1.3


def not_timed(data):
    timed(data).update(timing=None, refused="No available kernel.")


def point_missing(data):
    del data["latency"]["points"][0]


def memory_grown(data):
    timed(data)["timing"]["memory_bytes"] *= 2


def case_missing(data):
    del data["parity"][ENGINE]["verdicts"][0]


def runtime_missing(data):
    del data["parity"][GRAPH]


def engine_not_run(data):
    data["engines"][0] |= {"ran": False, "why_not": "there is no NVIDIA GPU here"}


def engine_missing(data):
    data["engines"] = []


def profile_narrower(data):
    data["engines"][0]["profiles"][0]["S"] = "1:128:256"


def engine_larger(data):
    data["engines"][0]["engine_bytes"] *= 2


def build_slower(data):
    data["engines"][0]["seconds"] *= 5


def validation_failed(data):
    data["verdict"]["passed"] = False


PLANTED = {
    fusion_lost: "fusion",
    fusion_unknown: "fusion",
    precision_mixed: "precision",
    precision_requested: "precision",
    precision_of_the_model: "precision",
    error_over_budget: "error",
    error_grown: "error",
    deviation_grown: "error",
    fewer_fused: "fusion",
    error_not_finite: "error",
    not_verified: "error",
    decode_wrong: "decode",
    decode_shorter: "coverage",
    invariance_broken: "invariance",
    mask_wrong: "conformance",
    range_overflows: "range",
    slower: "latency",
    not_timed: "latency",
    point_missing: "coverage",
    memory_grown: "size",
    case_missing: "coverage",
    runtime_missing: "coverage",
    engine_not_run: "coverage",
    engine_missing: "coverage",
    profile_narrower: "coverage",
    engine_larger: "size",
    build_slower: "build time",
    validation_failed: "verdict",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_regression_is_reported(plant):
    new = passing()
    plant(new)
    found = md.compare(passing(), new)
    assert not found.passed
    assert {change.section for change in found.regressions} == {PLANTED[plant]}
    back = md.compare(new, passing())
    assert back.passed or plant in (precision_requested, precision_of_the_model)  # a change either way
    assert any(change.level in ("improvement", "regression") for change in back.changes)


@pytest.mark.parametrize("report", [passing, failing, cpu_only])
def test_a_repeated_run_has_no_regression(report):
    found = md.compare(report(), report())
    assert found.passed
    assert {change.level for change in found.changes} == {"same"}


def test_an_upgrade_alone_is_a_change_and_no_regression():
    new = passing()
    new["engines"][0]["version"] = "10.3.0"
    new["environment"] |= {"driver": "999.1"}
    new["parity"][ENGINE]["backend"] = "tensorrt 10.3.0"
    new["decode"][1]["backend"] = "tensorrt 10.3.0"
    for check in new["invariance"]:
        check["backend"] = check["backend"].replace("8.6.1", "10.3.0")
    found = md.compare(passing(), new)
    assert found.passed
    assert {change.section for change in found.changes if change.level == "changed"} == {"environment"}


# -- noise -----------------------------------------------------------------------------------------


def test_a_latency_within_its_own_spread_is_no_regression():
    old, new = passing(), passing()
    timed(old)["timing"]["p90_us"] = 1.5 * timed(old)["timing"]["p50_us"]
    timed(new)["timing"]["p50_us"] *= 1.3
    found = md.compare(old, new)
    assert found.passed
    assert any("spread" in change.why for change in found.changes if change.section == "latency")


@pytest.mark.parametrize("side", [0, 1])
def test_a_throttled_latency_is_inconclusive(side):
    sides = [passing(), passing()]
    slower(sides[1])
    timed(sides[side])["timing"]["conditions"]["throttled_by"] = ["power cap"]
    found = md.compare(*sides)
    assert found.passed
    assert [change.subject for change in found.changes if change.level == "inconclusive"]
    assert not md.compare(*sides, strict=True).passed


def rebuilt(data, **spread):
    data["engines"][0]["rebuilds"] = {"builds": 3, **spread}
    return data


def test_the_spread_of_rebuilds_is_no_regression():
    case = passing()["parity"][ENGINE]["verdicts"][0]
    errors = {f"{case['case']}/{case['output']}": [case["share"], case["share"] + 0.3]}
    new = passing()
    error_grown(new)
    assert not md.compare(passing(), new).passed
    assert md.compare(rebuilt(passing(), errors=errors), new).passed
    slow = passing()
    slower(slow)
    times = {passing()["latency"]["points"][0]["case"]: [10.0, 100.0]}
    assert not md.compare(passing(), slow).passed
    assert md.compare(rebuilt(passing(), times_us=times), slow).passed
    large = passing()
    engine_larger(large)
    assert md.compare(rebuilt(passing(), engine_bytes=[1, 10**9]), large).passed


def test_thresholds_are_options():
    new = passing()
    for plant in (slower, error_grown, engine_larger, build_slower, runtime_missing):
        plant(new)
    limits = {"latency": 0.5, "error": 0.5, "size": 2.0, "build_time": 10.0, "coverage": False}
    assert md.compare(passing(), new, **limits).passed
    for name in limits:
        assert not md.compare(passing(), new, **{key: limits[key] for key in limits if key != name}).passed
    with pytest.raises(md.DeployError, match="No such threshold"):
        md.compare(passing(), new, speed=1)
    with pytest.raises(md.DeployError, match="negative"):
        md.compare(passing(), new, error=-0.1)


# -- sources ---------------------------------------------------------------------------------------


def bench_of(*reports):
    entries = [{key: report[key] for key in ("model", "engines", "latency")} for report in reports]
    frame = {key: passing()[key] for key in ("format", "tool", "created", "environment")}
    return {**frame, "models": entries, "notes": []}


def test_benchmarks_of_several_models_are_paired_by_name_and_precision():
    other = passing()
    other["model"] |= {"name": "other"}
    slow = copy.deepcopy(other)
    slower(slow)
    found = md.compare(bench_of(passing(), other), bench_of(slow, passing()))
    assert [(change.section, "other" in change.model) for change in found.regressions] == [("latency", True)]
    gone = md.compare(bench_of(passing(), other), bench_of(other))
    assert [change.section for change in gone.regressions] == ["coverage"]


def test_an_engine_of_another_name_is_the_same_engine():
    new = passing()
    new["engines"][0]["name"] = "rebuilt"
    for point in new["latency"]["points"]:
        next(row for row in point["rows"] if row["name"] == "tensorrt")["name"] = "rebuilt"
    assert md.compare(passing(), new).passed


def test_two_bundles_and_their_reports_are_compared(bundles, tmp_path):
    old = shutil.copytree(bundles("tiny-gqa").path, tmp_path / "old")
    md.validate(old, latency=False, backends=["ort-cpu"]).save(old)
    new = shutil.copytree(old, tmp_path / "new")
    assert md.compare(old, md.open_bundle(new)).passed
    report = json.loads((new / "report.json").read_text())
    report["parity"][0]["verdicts"][0]["share"] += 0.5
    (new / "report.json").write_text(json.dumps(report))
    assert [change.section for change in md.compare(old, new).regressions] == ["error"]
    # A report of another bundle says nothing on this one.
    report["model"]["bundle_sha256"] = "0" * 64
    (new / "report.json").write_text(json.dumps(report))
    assert {change.section for change in md.compare(old, new).regressions} == {"coverage"}


def test_what_cannot_be_compared_is_refused(bundles, tmp_path, refused):
    report = tmp_path / "report.json"
    report.write_text(json.dumps(cpu_only()))
    refused("compare", report, bundles("tiny-gqa").path, what="of one kind", got="is a bundle")
    refused("compare", report, tmp_path / "none.json", what="no such file", got="none.json")
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
    new = passing()
    for plant in (fusion_lost, slower):
        plant(new)
    paths = []
    for name, data in (("old", passing()), ("new", new)):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(data))
    return paths


def test_the_exit_code_is_the_verdict(run_cli, files, tmp_path):
    old, new = files
    done = run_cli("compare", old, new, "--junit", tmp_path / "j.xml", "--html", tmp_path / "page.html")
    assert done.code == 1
    assert "FAILED" in done.out
    assert "fusion lost" in done.out
    suite = ElementTree.parse(tmp_path / "j.xml").getroot()
    failed = [case for case in suite if case.find("failure") is not None]
    assert len(failed) == int(suite.get("failures")) == 2
    assert int(suite.get("tests")) == len(suite)
    page = (tmp_path / "page.html").read_text()
    assert 'data-verdict="failed"' in page
    assert str(old) in page
    assert str(new) in page
    assert run_cli("compare", old, old).code == 0


def test_markdown_and_json_hold_the_same_regressions(run_cli, files):
    table = run_cli("compare", *files, "--markdown")
    data = run_cli("compare", *files, "--json")
    assert table.code == data.code == 1
    changes = json.loads(data.out)["changes"]
    worse = [change for change in changes if change["level"] == "regression"]
    assert table.out.count("| regression |") == len(worse) == 2
    assert run_cli("compare", *files, "--max-latency", "0.5", "--json").code == 1
    assert run_cli("compare", files[0], files[0], "--json").code == 0


def test_names_from_a_report_cannot_become_markup():
    new = passing()
    new["engines"][0]["name"] = HOSTILE
    new["parity"][ENGINE]["verdicts"][0] |= {"case": HOSTILE, "passed": False, "problem": HOSTILE}
    found = md.compare(passing(), new)
    assert "<script>alert" not in found.to_html()
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
        side["verdict"] |= {"outcome": outcome, "passed": outcome == "passed"}
    assert md.compare(*sides).passed is passed
