"""Candidates for the precision: the fastest right one is kept, and without latencies the most exact one."""

import json

import pytest

import mha_deploy as md
from mha_deploy.deployment import TrialRecord, candidates_table, choose
from mha_deploy.environment import gpus


def trial(name, error=1e-3, p50=None, fused=(1, 1), **more):
    return TrialRecord(
        name=name, precision=name, error=error, share=0.5, p50=p50, fused=fused, ran=True, **more
    )


@pytest.mark.parametrize(
    ("trials", "best"),
    [
        ([trial("fp16", p50=10.0), trial("bf16", p50=8.0, error=8e-3)], "bf16"),
        ([trial("fp16", p50=10.0), trial("bf16", p50=9.7, error=8e-3)], "fp16"),  # as fast, and more exact
        ([trial("fp16", p50=10.0), trial("bf16", p50=1.0, refused="wrong results")], "fp16"),
        ([trial("fp16"), trial("bf16", error=8e-3)], "fp16"),
        ([trial("fp16", fused=(0, 1)), trial("bf16", error=8e-3)], "bf16"),
        ([trial("fp16", refused="overflows"), trial("mixed")], "mixed"),
        ([trial("fp16", unverified="zeros", p50=1.0), trial("bf16", p50=9.0)], "bf16"),
        ([trial("fp16", refused="overflows"), trial("mixed", unverified="zeros")], "mixed"),
        ([trial("fp16", p50=10.0), trial("fp8", p50=9.7, loss=0.02, error=1e-4)], "fp16"),  # nothing gained
        ([trial("fp16", p50=10.0), trial("fp8", p50=5.0, loss=0.02)], "fp8"),
        ([trial("scales", p50=5.0, loss=0.02), trial("attention", p50=4.9, loss=0.04)], "scales"),
    ],
)
def test_the_best_candidate_is_chosen_with_a_reason(trials, best):
    chosen, why = choose(trials)
    assert chosen.name == best
    assert why


def test_no_right_candidate_is_an_error_with_every_reason():
    with pytest.raises(md.DeployError, match="No candidate is right") as caught:
        choose([trial("fp16", refused="overflows"), trial("bf16", refused="wrong results")])
    assert "fp16: overflows; bf16: wrong results" in caught.value.got


def test_the_table_marks_the_pareto_front():
    trials = [
        trial("slow", p50=12.0, error=2e-3), trial("exact", p50=11.0), trial("fast", p50=5.0, error=9e-3),
        trial("wrong", p50=1.0, refused="wrong results"),
    ]  # fmt: skip
    (group,) = candidates_table(trials, trials[2]).groups
    shown = {row[0].text: [cell.text for cell in row] for row in group.rows}
    assert [shown[name][-2] for name in ("slow", "exact", "fast", "wrong")] == ["–", "yes", "yes", "–"]
    assert [name for name in shown if shown[name][-1] == "yes"] == ["fast"]
    assert shown["wrong"][-1] == "wrong results"


def test_candidates_need_the_precision_auto(tmp_path, refused):
    refused(
        "deploy",
        "tiny-gqa",
        "-o",
        tmp_path / "x",
        "--precision",
        "fp16",
        "--candidates",
        what="several precisions",
    )


def test_losses_are_in_the_table_where_there_are_any():
    trials = [trial("fp16", p50=10.0), trial("fp8", p50=5.0, loss=0.02)]
    with_loss, without = (candidates_table(trials[:count], trials[0]).columns for count in (2, 1))
    assert len(with_loss) == len(without) + 1


@pytest.mark.skipif(bool(gpus()), reason="there is a GPU")
def test_candidates_in_eight_bits_need_a_gpu(tmp_path, refused):
    command = ("deploy", "tiny-gqa", "-o", tmp_path / "x", "--precision", "fp8", "--candidates")
    refused(*command, what="compared by latency", code=3)


@pytest.mark.slow
def test_without_a_gpu_candidates_are_compared_by_error_and_fusion(tmp_path, run_cli):
    pytest.importorskip("tensorrt_rtx")
    command = ("deploy", "tiny-gqa", "-o", tmp_path / "x", "--precision", "auto", "--candidates")
    done = run_cli(*command, "--backend", "tensorrt-rtx", "--json")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    tried = {each["name"]: each for each in data["candidates"]}
    assert set(tried) == {"fp16", "bf16"}
    assert all(each["fused"] == [1, 1] and each["error"] > 0 for each in tried.values())
    assert tried["fp16"]["error"] < tried["bf16"]["error"]
    assert data["chosen"]["name"] == data["validation"]["model"]["precision"] == "fp16"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
