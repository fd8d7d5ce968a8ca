"""What the terminal shows of many attentions: equal ones once, and nothing that is wrong left out."""

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from bundle_edit import engine_manifest
from rich.console import Console

import mha_deploy as md
from mha_deploy.cli.tables import eligibility_renderable, engine_renderable, parity_renderable
from mha_deploy.engine.engine import Engine
from mha_deploy.files import as_plain
from mha_deploy.judge import OutputVerdict, ParityReport
from mha_deploy.metrics import Budget, Deviation
from mha_deploy.options import ValidateOptions
from mha_deploy.runtime.tensorrt.engine_verdict import FusionStatus, NodeVerdict
from mha_deploy.status import CaseKind, Kind, Outcome, Reason
from mha_deploy.validation.fp16_range import (
    Figures,
    NodeRange,
    RangeFinding,
    RangeKind,
    RangeReport,
    RangeStatus,
    worst_of,
)
from mha_deploy.validation.verdict import Validation, findings

LONG = "model.encoder.block.{}.layer.0.SelfAttention"


def printed(renderable, width=80):
    out = io.StringIO()
    Console(file=out, width=width).print(renderable)
    return out.getvalue()


# -- attention by attention ------------------------------------------------------------------------


def layers(count, *, wrong=(), worst=None, name="blocks.{}.attention"):
    """A report on that many attentions, of which some are wrong and one is the worst that passes."""
    limit = Budget(relative_l2=1e-2, worst_vector=1.0, max_abs=1.0, gain=1.0)

    def verdict(i):
        error = 5e-2 if i in wrong else 8e-3 if i == worst else 1e-3
        deviation = Deviation(
            relative_l2=error,
            worst_vector=0.0,
            max_abs=0.0,
            gain=0.0,
            cosine=1.0,
            worst_index=(0, i),
            worst_got=1.0,
            worst_want=2.0,
        )
        return OutputVerdict(
            case="layers",
            sizes={"B": 2, "S": 8},
            output=name.format(i),
            outcome=Outcome.FAILED if i in wrong else Outcome.PASSED,
            reason=Reason(kind=Kind.OUT_OF_BUDGET, names=("relative_l2",)) if i in wrong else None,
            deviation=deviation,
            budget=limit.limits,
            share=limit.share_used(deviation),
        )

    verdicts = tuple(verdict(i) for i in range(count))
    about = {"model": "m", "precision": "fp16", "runtime": "ort-cpu 1", "cases": CaseKind.LAYERS}
    report = ParityReport(**about, verdicts=verdicts)
    return as_plain(report)


def rows_of(text):
    """The rows of the table: name, verdict, error, share."""
    return [line.split() for line in text.splitlines() if " passed " in line or " FAILED " in line]


def test_few_attentions_are_all_listed():
    text = printed(parity_renderable(layers(8)))
    assert [row[0] for row in rows_of(text)] == [f"blocks.{i}.attention" for i in range(8)]
    assert "PASSED  8/8 attentions right" in text
    assert "ort-cpu 1 at B=2, S=8" in text


def test_of_many_that_pass_the_first_the_worst_and_the_last_are_listed():
    text = printed(parity_renderable(layers(12, worst=5)))
    assert rows_of(text) == [
        ["blocks.0.attention", "passed", "1.0e−3", "10%"],
        ["blocks.5.attention", "passed", "8.0e−3", "80%"],
        ["blocks.11.attention", "passed", "1.0e−3", "10%"],
        ["9", "more", "passed", "≤", "1.0e−3", "≤", "10%"],
    ]


def test_every_wrong_attention_is_listed_with_its_place():
    wrong = (2, 3, 7, 8)
    text = printed(parity_renderable(layers(24, wrong=wrong, worst=5)))
    listed = [row[0] for row in rows_of(text) if "FAILED" in row]
    assert listed == [f"blocks.{i}.attention" for i in wrong]
    assert "17 more" in text
    assert text.count("budget: rel. L2; worst element") == 4
    assert "FAILED  4 of 24 attentions are wrong" in text


@pytest.mark.parametrize("count", [8, 12])
def test_long_names_fit_a_terminal(count):
    text = printed(parity_renderable(layers(count, name=LONG)))
    assert max(map(len, text.splitlines())) <= 80
    assert LONG.format(0) in text


# -- engines -----------------------------------------------------------------------------------------

NODES = [
    NodeVerdict(
        node=f"blocks.{i}.attention",
        profile=0,
        status=FusionStatus.FUSED,
        kernels=("_gemm_mha_v2_0x" + "cd" * 16,),
        sources=("log", "plan"),
    )
    for i in range(3)
]


def engine_text(nodes):
    engine = Engine(path=Path("engines/rtx.engine"), manifest=engine_manifest(nodes))
    return printed(engine_renderable(engine), width=120)


def node_rows(nodes):
    lines = engine_text(nodes).splitlines()
    return [" ".join(line.split()) for line in lines if " fused " in line or "more" in line]


def test_attentions_of_one_kernel_are_one_row():
    first, more = node_rows(NODES)
    assert first == f"blocks.0.attention 0 fused {NODES[0].kernels[0]} [build log, engine]"
    assert more == "and 2 more"


def test_a_hash_is_shown_only_where_it_is_the_same():
    other = msgspec.structs.replace(NODES[2], kernels=("_gemm_mha_v2_0x" + "ab" * 16,))
    first, more = node_rows([*NODES[:2], other])
    assert first == "blocks.0.attention 0 fused _gemm_mha_v2_… [build log, engine]"
    assert more == "and 2 more"


@pytest.mark.parametrize(
    "change", [{"kernels": ("_gemv_mha_v1_0x" + "ab" * 16,)}, {"status": "decomposed"}, {"profile": 1}]
)
def test_an_attention_with_another_kernel_or_status_has_its_own_row(change):
    text = engine_text([NODES[0], msgspec.structs.replace(NODES[1], **change), NODES[2]])
    assert "blocks.1.attention" in text
    assert "and 1 more" in text


@pytest.mark.parametrize("cured_by", [None, "trt lowering"])
def test_what_a_lowering_cures_is_not_why_attention_is_not_fused(cured_by):
    found = {"severity": "not-fused", "message": "Too few heads.", "remedy": "", "cured_by": cured_by}
    nodes = [msgspec.structs.replace(NODES[0], status=FusionStatus.DECOMPOSED)]
    engine = Engine(path=Path("engines/rtx.engine"), manifest=engine_manifest(nodes, findings=[found]))
    assert ("Too few heads." in printed(engine_renderable(engine))) == (cured_by is None)


# -- a real bundle ---------------------------------------------------------------------------------


def test_inspect_names_the_lines_of_the_source(own_bundles, run_cli):
    bundle = own_bundles()
    done = run_cli("inspect", bundle.path)
    place = bundle.manifest.attention[0]["place"]
    assert f"tests/own_models.py:{place.rpartition(':')[2]}" in done.out
    assert "3 attention nodes" in done.out
    assert "blocks.0.attention" in done.out
    assert "and 2 more" in done.out
    assert "4/4×16" in done.out
    assert "the results of 3 attentions in opt" in done.out


def test_check_groups_findings_of_equal_layers(own_bundles):
    answers = md.check(own_bundles(), "tensorrt", "8.6")
    text = " ".join(printed(eligibility_renderable(answers)).split())
    assert text.startswith("tensorrt 8.6: blocks.0.attention and 2 more are supported, but not fused")
    assert text.count("no Attention operator before") == 1


def test_check_names_the_nodes_of_a_finding(own_bundles):
    first, second, third = md.check(own_bundles(), "tensorrt", "8.6")
    odd = replace(second.findings[0], message="It is odd.", rule="odd")
    answers = [first, replace(second, findings=(*second.findings, odd)), third]
    text = printed(eligibility_renderable(answers))
    assert "blocks.0.attention and 2 more are supported" in text
    assert "blocks.1.attention: It is odd." in text
    handled = tuple(each for each in third.findings if each.cured_by)
    cured = replace(third, findings=handled, fused_after_lowering=True)
    text = printed(eligibility_renderable([first, second, cured]))
    assert "blocks.0.attention and 1 more are supported, but not fused" in text
    assert "blocks.2.attention can be fused after lowering" in text


# -- FP16 range ------------------------------------------------------------------------------------


def ranges(*nodes, precision="fp16"):
    """A report in which each node has a headroom and findings."""
    figures = Figures(
        tensors={"Q": 1.0}, scale=1.0, matmul=None, all_scores=None, score=None, logit=None,
        exponent=None, sums=(), sentinel=None, fully_masked=0, not_finite=(),
    )  # fmt: skip
    made = tuple(
        NodeRange(
            node=f"blocks.{i}.attention",
            status=worst_of(each.status for each in reported),
            figures=figures,
            max_keys=8,
            headroom=room,
            findings=reported,
        )
        for i, (room, reported) in enumerate(nodes)
    )
    return RangeReport(precision=precision, worst=worst_of(each.status for each in made), nodes=made)


def sentences(report):
    bundle = SimpleNamespace(manifest=SimpleNamespace(loss=None))
    return [each.text for each in findings(Validation(bundle=bundle, ranges=report), ValidateOptions())]


def near(what, kind=RangeKind.SCORE, status=RangeStatus.NEAR, **numbers):
    return RangeFinding(status=status, kind=kind, what=what, numbers=numbers, advice=("take bf16",))


def test_equal_findings_of_many_attentions_are_one_line():
    same = near("the mask's -65,504 leaves no room", RangeKind.SENTINEL_NEAR)
    reported = sentences(ranges(*((room, (same,)) for room in (9.0, 3.0, 5.0))))
    assert reported == ["blocks.0.attention and 2 more: the mask's -65,504 leaves no room; take bf16"]


def test_of_findings_that_differ_in_numbers_the_worst_is_reported():
    sizes = {4.0: 16_376, 1.5: 43_669, 2.0: 32_752}
    found = [(room, (near(f"the largest score is {n:,}", largest=n),)) for room, n in sizes.items()]
    reported = sentences(ranges(*found))
    assert reported == ["blocks.1.attention and 2 more: the largest score is 43,669; take bf16"]


def test_different_findings_are_separate_lines():
    one, other = near("the largest score is 9"), near("the largest |K| is 9", RangeKind.TENSOR)
    worse = near("the largest score is 9", status=RangeStatus.OVERFLOWS)
    reported = sentences(ranges((1.0, (one,)), (1.0, (other,)), (1.0, (worse,)), (1.0, ())))
    assert [text.partition(":")[0] for text in reported] == [f"blocks.{i}.attention" for i in range(3)]
