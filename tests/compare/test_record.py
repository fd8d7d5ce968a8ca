"""Lines of the benchmark record: tables are made of them, and a line can be judged against a new one."""

import sys
from pathlib import Path

import msgspec
import pytest

import mha_deploy as md
from mha_deploy.errors import BackendUnavailable
from mha_deploy.regression import record
from mha_deploy.regression.record import (
    Line,
    append_lines,
    bench_lines,
    judge_replay,
    pick_line,
    read_lines,
    replay_line,
)
from mha_deploy.report.table import markdown
from mha_deploy.runtime.cuda import Conditions
from mha_deploy.runtime.timing import Timing
from mha_deploy.status import Kind, Reason
from mha_deploy.validation.bench import ModelBench
from mha_deploy.validation.evaluate import LatencyPoint, LatencyRow
from mha_deploy.validation.records import ThroughputRecord, model_record
from mha_deploy.validation.runtimes import Family

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from tables import PAGES, builds_table, evidence_table, kernels_table, latency_table, rewritten, streams_table

CALLS = {"calls_per_sample": 3, "slots": 4, "graph": False, "stable": True}
RATE = {"p50_us": 80.0, "p99_us": 90.0}
WRONG = {"outcome": "failed", "reason": {"kind": "wrong result", "got": "gain"}}
COOL = {"sm_mhz": 1980, "sm_mhz_max": 1980, "throttled_by": []}


def line(p50, run="1", runtime="tensorrt", **changes):
    known = {
        "kind": "time", "run": run, "created": "2026-11-16T05:00:00Z", "commit": "abc", "command": ["bench"],
        "versions": {}, "platform": "Linux", "gpu": "NVIDIA H200", "driver": "580", "model": "bert-base",
        "precision": "fp16", "bundle": "out/bert", "bundle_sha256": "0" * 64, "runtime": runtime,
        "backend": f"{runtime} 1.0", "sizes": {"B": 8, "S": 128}, "case": "opt", "outcome": "passed",
        "samples_us": [p50, p50, p50], "conditions": COOL,
    }  # fmt: skip
    return msgspec.convert({**known, **changes}, Line)


def three(runtime, *times, **changes):
    return [line(time, str(run), runtime, **changes) for run, time in enumerate(times)]


def row_of(lines):
    return markdown(latency_table(lines)).splitlines()[-1]


def test_the_fastest_of_a_row_is_outside_the_spread_of_all_others():
    apart = three("a", 10.0, 10.1, 10.2) + three("b", 11.0, 11.1, 11.2)
    assert "**10.1 (10.0–10.2)**" in row_of(apart)
    inside = three("a", 10.0, 10.1, 11.1) + three("b", 11.0, 11.1, 11.2)
    assert "**" not in row_of(inside)


@pytest.mark.parametrize(
    ("lines", "mark"),
    [
        (three("a", 10.0, 10.1), "†"),
        (three("a", 10.0, 10.1, 10.2, conditions={**COOL, "throttled_by": ["power cap"]}), "‡"),
        (three("a", 10.0, 10.1, 10.2, conditions={**COOL, "sm_mhz": 1500}), "‡"),
        (three("a", 10.0, 10.1, 10.2, timing={**CALLS, "host_us": 9.5}), "§"),
    ],
)
def test_few_processes_and_throttled_ones_are_marked_and_win_nothing(lines, mark):
    row = row_of(lines + three("b", 20.0, 20.0, 20.0))
    assert mark in row
    assert "**" not in row


def test_runtimes_that_were_all_throttled_are_compared():
    capped = {"conditions": {**COOL, "sm_mhz": 1500, "throttled_by": ["power cap"]}}
    row = row_of(three("a", 10.0, 10.1, 10.2, **capped) + three("b", 11.0, 11.0, 11.0, **capped))
    assert "**10.1 (10.0–10.2)**" in row
    assert row.count("‡") == 2


def test_the_engine_is_compared_with_the_best_of_the_others():
    engine = {"name": "e", "backend": "tensorrt", "version": "8.6.1", "sha256": "1"}
    others = three("compile", 12.0, 12.0, 12.1) + three("eager", 30.0, 30.0, 30.0)
    row = row_of(three("plugin", 10.0, 10.0, 10.1, engine=engine) + others)
    assert row.endswith("| 1.200 | 3 |")
    assert row_of(others).endswith("| – | 3 |")


def test_samples_of_one_process_are_one_process():
    lines = [line(10.0), line(12.0), line(14.0)]
    assert "†" in row_of(lines)
    assert row_of(lines).split(" | ")[-1].startswith("1")


def test_what_was_only_built_and_what_never_ran_is_listed():
    engine = {"name": "e", "backend": "tensorrt-rtx", "version": "1.6.1", "sha256": "1"}
    built = line(1.0, kind="build", samples_us=[], engine=engine)
    timed = line(1.0, engine={**engine, "backend": "tensorrt", "version": "8.6.1"})
    text = markdown(evidence_table([built, timed], ["tensorrt 8.6.1", "tensorrt 11.4.0"]))
    assert "| tensorrt 11.4.0 | contract only |" in text
    assert "| tensorrt-rtx 1.6.1 | built, not run |" in text
    assert "| tensorrt 8.6.1 | measured |" in text


def test_calls_per_second_and_fusion_have_tables_of_their_own():
    engine = {"name": "e", "backend": "tensorrt-rtx", "version": "1.6.1", "sha256": "1", "fused": [1, 2]}
    built = line(1.0, kind="build", samples_us=[], engine=engine, backend="tensorrt-rtx 1.6.1")
    loads = [
        line(1.0, kind="throughput", samples_us=[], rate={**RATE, "streams": n, "per_second": 1000.0 * n})
        for n in (1, 4)
    ]
    assert markdown(streams_table([built, *loads])).splitlines()[-1].endswith("| 1,000 | 4,000 |")
    assert markdown(builds_table([built, *loads])).splitlines()[-1] == "| bert-base | 1/2 |"
    assert "**" not in markdown(latency_table([built, *loads]))  # neither is a latency
    seen = [("nvjet_hsh_128", 2.0, 20.0), ("cudnn_sdpa_sm90", 1.0, 7.5), ("rotary", 1.0, 2.5)]
    row = markdown(kernels_table([built, line(30.0, kernels=seen)])).splitlines()[-1]
    assert row.endswith("| 20.0 | 7.5 | 2.5 | 4 |")


def test_a_benchmark_becomes_lines_with_samples_and_hashes(bundles, tmp_path):
    timing = Timing(
        samples_us=(10.0, 11.0, 12.0), calls_per_sample=3, slots=4, graph=True, stable=True, host_us=1.0,
        gpu="NVIDIA H200", conditions=Conditions(sm_mhz=1980, throttled_by=("power cap",)),
    )  # fmt: skip
    wrong = Reason(kind=Kind.WRONG_RESULT, got="gain")
    rows = (
        LatencyRow(name="eager", runtime="torch 2", family="pytorch", timing=timing),
        LatencyRow(name="x", runtime="x 1", family="tensorrt", refused=wrong),
    )
    point = LatencyPoint(case="opt", sizes={"B": 2}, flops=1, bytes=1, roofline=None, rows=rows)
    load = {"streams": 4, "per_second": 5e4, "p50_us": 80.0, "p99_us": 90.0}
    loads = (ThroughputRecord(case="opt", sizes={"B": 2}, name="eager", family=Family.PYTORCH, **load),)
    bench = ModelBench(
        bundle=bundles("tiny-gqa"), engines=(), evaluations=(), absent=(), points=(point,), throughput=loads
    )
    path = tmp_path / "a" / "b.jsonl"
    md.BenchReport([bench]).record(path, ["mha-deploy", "bench"])
    append_lines(path, bench_lines([bench], ["again"]))
    lines = read_lines(path)
    assert [(each.runtime, each.kind) for each in lines[:3]] == [
        ("eager", "time"), ("x", "time"), ("eager", "throughput"),
    ]  # fmt: skip
    assert lines[0].run == lines[1].run == lines[2].run != lines[3].run
    assert (lines[2].rate.streams, lines[2].rate.per_second) == (4, 5e4)
    assert (lines[0].timing.calls_per_sample, lines[0].rate, lines[1].timing) == (3, None, None)
    assert (lines[0].samples_us, lines[0].p50, lines[0].is_throttled) == ([10.0, 11.0, 12.0], 11.0, True)
    assert [(each.outcome, each.reason) for each in lines[:2]] == [("passed", None), ("failed", wrong)]
    assert len(lines[0].bundle_sha256) == 64
    assert lines[0].command == ["mha-deploy", "bench"]
    path.write_bytes(path.read_bytes() + b'{"kind": 1}\n')
    with pytest.raises(md.DeployError, match="another format") as caught:
        read_lines(path)
    assert "b.jsonl:7" in caught.value.got


@pytest.mark.parametrize(
    ("p50", "changes", "status"),
    [
        (10.3, {}, "agrees"),
        (9.0, {}, "differs"),
        (12.0, {}, "differs"),
        (12.0, {"conditions": {**COOL, "throttled_by": ["power cap"]}}, "not comparable"),
        (10.3, {"gpu": "NVIDIA L40S"}, "not comparable"),
    ],
)
def test_a_new_measurement_is_judged_against_the_range_of_the_record(p50, changes, status):
    assert judge_replay(three("a", 10.0, 10.1, 10.2), line(p50, **changes), 0.05)[0] == status


def replayed(bundle, **row):
    """A line of this bundle, measured again by a benchmark that gives one row."""
    held = line(10.0, bundle_sha256=model_record(bundle).bundle_sha256)

    def bench(*_, **__):
        found = LatencyRow(name=held.runtime, runtime=held.backend, family=Family.TENSORRT, **row)
        point = LatencyPoint(case="opt", sizes=held.sizes, flops=1, bytes=1, roofline=None, rows=(found,))
        return ModelBench(
            bundle=bundle, engines=(), evaluations=(), absent=(), points=(point,), throughput=()
        )

    return replay_line(held, [held], bundle, bench, 0.05)


@pytest.mark.parametrize("kind", [Kind.WRONG_RESULT, Kind.WRONG_WHEN_TIMED])
def test_an_engine_whose_results_are_wrong_now_differs_from_its_record(bundles, kind):
    found = replayed(bundles("tiny-gqa"), refused=Reason(kind=kind, got="gain"))
    assert (found.status, found.outcome, found.outcome.exit_code) == ("differs", "failed", 1)
    assert found.measured.reason.kind is kind


def test_what_cannot_be_run_here_is_not_compared_with_its_record(bundles):
    with pytest.raises(BackendUnavailable):
        replayed(bundles("tiny-gqa"), refused=Reason(kind=Kind.NOT_TIMED, got="no memory"))


@pytest.mark.parametrize(
    "changes",
    [
        {"outcome": "failed"},
        {"reason": WRONG["reason"]},
        {"outcome": "failed", "reason": {"kind": "slower"}},
        {"outcome": "failed", "reason": {"kind": "wrong on streams"}},
        {"kind": "guess"},
    ],
    ids=str,
)
def test_a_line_whose_outcome_has_no_reason_of_its_own_is_refused(tmp_path, changes):
    path = tmp_path / "r.jsonl"
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(line(10.0)), **changes}))
    with pytest.raises(md.DeployError, match="another format"):
        read_lines(path)


def test_a_line_that_cannot_be_measured_again_is_refused(bundles, tmp_path, refused):
    path = tmp_path / "lines.jsonl"
    append_lines(path, [line(1.0), line(1.0, samples_us=[], **WRONG)])
    refused("bench", "--replay", path, what="line of a record")
    refused("bench", "--replay", f"{path}:3", what="no such line", hint="1 to 2")
    refused("bench", "--replay", f"{path}:2", what="Nothing was timed", got="gain")
    refused("bench", "--replay", f"{path}:1", bundles("tiny-gqa").path, what="another bundle")
    refused("bench", what="A bundle is needed")
    refused("bench", bundles("tiny-gqa").path, "--processes", "3", what="need a file")


def test_the_tables_of_the_pages_match_the_lines():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert "<!-- table: " in text
        assert rewritten(text) == text, f"run benchmarks/tables.py: {page}"


@pytest.mark.parametrize("other", [{"bundle_sha256": "1" * 64}, {"backend": "tensorrt 9.0"}, WRONG])
def test_a_time_is_compared_with_right_results_of_its_bundle_and_version_alone(tmp_path, other):
    """Else a slow line of another one makes room for any time."""
    append_lines(tmp_path / "r.jsonl", [line(10.0), line(99.0, run="2", **other), line(10.1, run="3")])
    _, alike = pick_line(f"{tmp_path / 'r.jsonl'}:1")
    assert [each.p50 for each in alike] == [10.0, 10.1]


def test_lines_that_prove_nothing_are_refused(tmp_path, refused):
    append_lines(tmp_path / "r.jsonl", [line(10.0, **WRONG)])
    refused("bench", "--replay", f"{tmp_path / 'r.jsonl'}:1", what="were not right", got="gain")
    text = (tmp_path / "r.jsonl").read_text(encoding="utf-8").replace("10.0", "-10.0")
    (tmp_path / "negative.jsonl").write_text(text, encoding="utf-8")
    refused("bench", "--replay", f"{tmp_path / 'negative.jsonl'}:1", what="another format", got="> 0")


def test_outside_a_checkout_the_source_itself_is_named(tmp_path, monkeypatch):
    """By a hash of its files: a line of a record always says which code it was measured with."""
    package = tmp_path / "mha_deploy"
    (package / "regression").mkdir(parents=True)
    place = package / "regression" / "record.py"
    place.write_text("one")
    monkeypatch.setattr(record, "__file__", str(place))
    first = record._commit()
    place.write_text("two")
    assert first.startswith("sha256:")
    assert record._commit() != first
