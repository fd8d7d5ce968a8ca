"""On a GPU: rebuilds are run and timed, a recorded line is measured again, candidates have latencies."""

import json
import shutil

import pytest

import mha_deploy as md
from mha_deploy.engine.engine import first_gpu

pytestmark = pytest.mark.gpu


@pytest.fixture
def bundle(bundles, tmp_path):
    pytest.importorskip("tensorrt")
    return shutil.copytree(bundles("tiny-gqa").path, tmp_path / "bundle")


def test_rebuilds_have_errors_and_times_and_the_timing_cache_reproduces_them(bundle):
    engine = md.build_engine(bundle, backend="tensorrt", repeat=2)
    record = engine.manifest.rebuilds
    shares = [each for outputs in record.errors.values() for each in outputs.values()]
    assert shares
    assert all(len(each) == 2 and None not in each for each in shares)
    assert [len(times) for times in record.times_us.values()] == [2]
    assert record.timing_cache is True
    report = md.validate(bundle, engine=engine.path.stem, sweep=False)
    assert report.to_dict()["engines"][0]["rebuilds"]["builds"] == 2
    assert md.compare(report, report).passed


def test_a_recorded_line_is_measured_again(bundle, tmp_path, run_cli):
    md.build_engine(bundle, backend="tensorrt")
    lines = tmp_path / "lines.jsonl"
    done = run_cli(
        "bench", bundle, "--at", "opt", "--runtime", "tensorrt", "--record", lines, "--processes", "3"
    )
    assert done.code == 0, done.err
    recorded = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len({line["run"] for line in recorded}) == len(recorded) == 3
    assert all(len(line["samples_us"]) >= 100 and line["outcome"] == "passed" for line in recorded)
    assert all(line["engine"]["sha256"] and line["gpu"] and line["conditions"] for line in recorded)
    again = md.replay(f"{lines}:1", bundle, tolerance=0.5)
    assert again.status in ("agrees", "not comparable"), again.why


def test_candidates_are_ranked_by_latency(tmp_path):
    pytest.importorskip("tensorrt")
    done = md.deploy("tiny-gqa", tmp_path / "x", precision="auto", backend="tensorrt", candidates=True)
    right = [trial for trial in done.candidates if not trial.refused]
    assert done.chosen in right
    assert all(trial.ran and trial.p50 for trial in right)
    assert done.chosen.p50 <= 1.06 * min(trial.p50 for trial in right)


def test_eight_bits_are_compared_with_sixteen(tmp_path):
    """Among both kinds of scales, and attention in eight bits."""
    pytest.importorskip("tensorrt")
    if first_gpu()["compute_cap"] < "9.0":
        pytest.skip("this GPU has no attention in FP8")
    chosen = {"attention": "plugin", "accumulate": "fp32", "backend": "tensorrt", "golden": ("opt",)}
    done = md.deploy("tiny-gqa", tmp_path / "x", precision="fp8", candidates=True, **chosen)
    assert [trial.loss is None for trial in done.candidates] == [True, False, False, False]
    right = [trial for trial in done.candidates if not trial.refused]
    assert right[:3] == list(done.candidates[:3])  # attention of so few keys is not multiplied in FP8
    assert all(trial.ran and trial.p50 for trial in right)
    assert done.chosen.p50 <= 1.06 * min(trial.p50 for trial in right)
    assert done.report.passed
