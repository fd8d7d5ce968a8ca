"""Taking evidence away never improves an outcome: in a record, and in the folder of a bundle."""

import dataclasses
import shutil
from itertools import product
from types import SimpleNamespace

import msgspec
import pytest
from bundle_edit import copy_of, edit_manifest

import mha_deploy as md
from mha_deploy.bundle.folder import LEDGER
from mha_deploy.engine.engine import Ledger
from mha_deploy.judge import OutputVerdict, ParityReport
from mha_deploy.model.spec import Axis
from mha_deploy.options import ValidateOptions
from mha_deploy.status import Kind, Outcome, Place, Reason, Section, Severity, Variation
from mha_deploy.validation.evaluate import Evaluation, LatencyPoint, LatencyRow
from mha_deploy.validation.invariance import InvarianceCheck
from mha_deploy.validation.runtimes import TENSORRT, Runtime, Unavailable
from mha_deploy.validation.verdict import Validation, conclude

RANKS = (Outcome.FAILED, Outcome.NOT_VERIFIED, Outcome.PASSED)
KINDS = {Outcome.PASSED: None, Outcome.FAILED: Kind.OUT_OF_BUDGET, Outcome.NOT_VERIFIED: Kind.ORACLE_ZERO}


def verdict(name, outcome):
    kind = KINDS[outcome]
    reason = None if kind is None else Reason(kind=kind)
    return OutputVerdict(case=name, sizes={"B": 1}, output="y", outcome=outcome, reason=reason)


def evaluation(name, outcomes, engine=None):
    verdicts = tuple(verdict(f"case {i}", each) for i, each in enumerate(outcomes))
    parity = ParityReport(model="m", precision="fp16", runtime=name, verdicts=verdicts)
    family = "onnxruntime" if engine is None else TENSORRT
    runtime = Runtime(name=name, family=family, open=lambda: None, engine=engine)
    return Evaluation(runtime=runtime, runner=name, parity=(parity,))


def engine_named(name):
    verdict = SimpleNamespace(precision=SimpleNamespace(ok=True))
    summaries = {"fusion_summary": "1/1 fused", "precision_summary": "precision: fp16 (verified)"}
    manifest = SimpleNamespace(all_fused=True, verdict=verdict, ranges=[], **summaries)
    return SimpleNamespace(path=SimpleNamespace(stem=name), manifest=manifest, is_confirmed=True)


def record_of(graph, engine, *, has_engine):
    """A graph with these outcomes, and an engine with those, if it ran."""
    found = engine_named("trt") if has_engine else None
    evaluations = [evaluation("ort", graph)] + ([evaluation("trt", engine, found)] if engine else [])
    spec = SimpleNamespace(name="made", axes={}, attention_count=1)
    manifest = SimpleNamespace(spec=spec, attention=[1], notes=(), observed=[], shrunk=[], loss=None)
    bundle = SimpleNamespace(manifest=manifest)
    about = {"bundle": bundle, "engines": (found,) if has_engine else ()}
    return conclude(Validation(evaluations=tuple(evaluations), **about), evaluations, ValidateOptions())


def with_less(record):
    """The record without one evaluation, engine, report or verdict."""
    yield dataclasses.replace(record, engines=())
    for i, each in enumerate(record.evaluations):
        others = record.evaluations[:i] + record.evaluations[i + 1 :]
        yield dataclasses.replace(record, evaluations=others)
        yield dataclasses.replace(record, evaluations=(*others, dataclasses.replace(each, parity=())))
        (parity,) = each.parity
        for j in range(len(parity.verdicts)):
            fewer = msgspec.structs.replace(parity, verdicts=parity.verdicts[:j] + parity.verdicts[j + 1 :])
            yield dataclasses.replace(
                record, evaluations=(*others, dataclasses.replace(each, parity=(fewer,)))
            )


PAIRS = list(product(RANKS, repeat=2))


@pytest.mark.parametrize("has_engine", [True, False])
def test_a_record_with_less_evidence_never_has_a_better_outcome(has_engine):
    for graph, engine in product(PAIRS, [(), *PAIRS] if has_engine else [()]):
        record = record_of(graph, engine, has_engine=has_engine)
        expected = Outcome.of([*graph, *engine, *[Outcome.NOT_VERIFIED] * (has_engine and not engine)])
        assert record.outcome is expected
        assert record.passed is (expected is Outcome.PASSED)
        for less in with_less(record):
            assert RANKS.index(less.outcome) <= RANKS.index(record.outcome)


@pytest.mark.parametrize(
    ("limit", "is_timed", "outcome"),
    [(60.0, True, "passed"), (60.0, False, "not verified"), (40.0, True, "failed"), (40.0, False, "failed")],
)
def test_a_limit_of_latency_holds_only_where_every_engine_has_a_time(limit, is_timed, outcome):
    found = engine_named("trt")
    judged = [evaluation("trt", [Outcome.PASSED], found)]
    timing = SimpleNamespace(percentile=lambda share: 50.0, p50=50.0, gpu="a GPU", stable=True)
    refused = Reason(kind=Kind.NOT_TIMED, got="no room")
    about = {"runtime": "TensorRT", "family": TENSORRT}
    rows = (
        LatencyRow(name="trt", timing=timing, **about),
        LatencyRow(name="other", timing=timing if is_timed else None, refused=refused, **about),
    )
    point = LatencyPoint(case="opt", sizes={"B": 1}, flops=1, bytes=1, roofline=None, rows=rows)
    spec = SimpleNamespace(name="made", axes={}, attention_count=1)
    manifest = SimpleNamespace(spec=spec, attention=[1], notes=(), observed=[], shrunk=[], loss=None)
    about = {"bundle": SimpleNamespace(manifest=manifest), "engines": (found,), "points": (point,)}
    options = ValidateOptions(requirements={"max_latency_p99": limit})
    record = conclude(Validation(evaluations=tuple(judged), **about), judged, options)
    assert record.outcome == outcome
    (requirement,) = record.requirements
    assert requirement.outcome == outcome
    assert (requirement.got is None) is (outcome == "not verified")
    assert requirement.place == Place(engine="trt" if outcome != "not verified" else "other", case="opt")


NO_NUMBER = {
    Outcome.FAILED: Reason(kind=Kind.NOT_FINITE, index=(0,), numbers={"count": 1}),
    Outcome.NOT_VERIFIED: Reason(kind=Kind.ORACLE_ZERO),
}


@pytest.mark.parametrize(
    ("shares", "outcome", "got", "case"),
    [
        ([0.2, 0.4], "passed", 0.4, "case 1"),
        ([0.2, 0.6, 0.3], "failed", 0.6, "case 1"),
        ([0.2, Outcome.FAILED], "failed", None, "case 1"),
        ([Outcome.FAILED, 0.6], "failed", None, "case 0"),
        ([Outcome.NOT_VERIFIED, 0.2], "not verified", None, "case 0"),
        ([Outcome.NOT_VERIFIED, 0.6], "failed", 0.6, "case 1"),
        ([Outcome.NOT_VERIFIED, Outcome.FAILED], "failed", None, "case 1"),
        ([], "not verified", None, None),
    ],
)
def test_a_limit_of_the_budget_holds_only_where_every_output_has_a_number(shares, outcome, got, case):
    about = {"sizes": {"B": 1}, "output": "y"}
    verdicts = tuple(
        OutputVerdict(case=f"case {i}", outcome=each, reason=NO_NUMBER[each], **about)
        if isinstance(each, Outcome)
        else OutputVerdict(case=f"case {i}", outcome=Outcome.PASSED, share=each, **about)
        for i, each in enumerate(shares)
    )
    one = evaluation("ort", [])
    (parity,) = one.parity
    judged = [dataclasses.replace(one, parity=(msgspec.structs.replace(parity, verdicts=verdicts),))]
    record = concluded(judged=judged, options=ValidateOptions(requirements={"max_budget_share": 0.5}))
    (requirement,) = record.requirements
    assert (requirement.outcome, requirement.got) == (outcome, got)
    assert requirement.place == (Place(runner="ort", case=case, output="y") if case else Place())
    found = [each for each in record.findings if each.section is Section.REQUIREMENTS]
    assert [(each.kind, each.place, each.level) for each in found] == {
        "passed": [],
        "failed": [(Kind.DEMAND_NOT_MET, requirement.place, Severity.FAILURE)],
        "not verified": [(Kind.DEMAND_NOT_CHECKED, requirement.place, Severity.WARNING)],
    }[outcome]
    assert all(case in each.text for each in found if outcome == "failed")


@pytest.mark.parametrize("outcome", RANKS)
def test_a_runtime_in_which_batch_elements_change_each_other_is_not_right(outcome):
    judged = evaluation("trt", [Outcome.PASSED], engine_named("trt"))
    assert judged.is_right
    about = {"runtime": "trt", "case": "opt", "check": "batch slot", "variation": Variation.SLOTS}
    check = InvarianceCheck(**about, outcome=outcome)
    assert dataclasses.replace(judged, invariance=(check,)).is_right is (outcome is Outcome.PASSED)
    assert not dataclasses.replace(judged, parity=()).is_right


def concluded(axes=None, observed=(), judged=None, options=None, **about):
    spec = SimpleNamespace(name="made", axes=axes or {}, attention_count=1)
    manifest = SimpleNamespace(spec=spec, attention=[1], notes=(), observed=observed, shrunk=[], loss=None)
    judged = judged or [evaluation("ort", [Outcome.PASSED])]
    report = Validation(bundle=SimpleNamespace(manifest=manifest), evaluations=tuple(judged), **about)
    return conclude(report, judged, options or ValidateOptions())


def test_the_headline_has_the_reason_of_what_is_not_verified():
    """However many sizes are not covered besides."""
    about = {"is_hidden": lambda kind: True, "case": "", "hidden": ()}
    hidden = [SimpleNamespace(name=f"blind {i}", **about) for i in range(5)]
    many = concluded({"B": Axis(min=1, opt=4, max=8)}, hidden)
    assert many.outcome is Outcome.NOT_VERIFIED
    assert len(many.not_verified) > 3
    assert "blind 0" in many.headline
    foreign = concluded(foreign=("theirs",))
    assert foreign.outcome is Outcome.NOT_VERIFIED
    assert "theirs" in foreign.headline
    missing = SimpleNamespace(manifest=foreign.bundle.manifest)
    absent = (Unavailable(name="trt", reason="no driver"),)
    nothing = conclude(Validation(bundle=missing, absent=absent), [], ValidateOptions())
    assert "no driver" in nothing.headline


def test_a_record_of_nothing_is_not_verified():
    assert Validation(bundle=None).outcome is Outcome.NOT_VERIFIED


@pytest.fixture
def with_engine(bundles, tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    folder = copy_of(bundles("tiny-gqa"), tmp_path / "bundle")
    md.build_engine(folder, backend="tensorrt-rtx")
    return folder


def test_deleting_an_engine_leaves_the_bundle_not_verified(with_engine):
    quick = {"latency": False, "probe": False, "runtimes": ["ort-cpu"]}
    built = md.validate(with_engine, **quick)
    shutil.rmtree(with_engine / "engines")
    gone = md.validate(with_engine, **quick)
    assert (built.outcome, gone.outcome) == (Outcome.NOT_VERIFIED, Outcome.NOT_VERIFIED)
    assert Kind.ENGINE_GONE in {each.kind for each in gone.findings}
    found = md.compare(built, gone)
    assert not found.passed
    assert not [each for each in found.changes if each.level == "improvement" and each.section == "verdict"]
    ledger = msgspec.json.decode((with_engine / LEDGER).read_bytes(), type=Ledger)
    assert list(ledger.built) == ["tensorrt-rtx"]
    (with_engine / LEDGER).write_bytes(b"{")
    with pytest.raises(md.DeployError):
        md.validate(with_engine, **quick)


def test_a_bundle_without_its_list_of_engines_is_damaged(with_engine, refused):
    quick = {"latency": False, "probe": False, "runtimes": ["ort-cpu"]}
    opened = md.open_bundle(with_engine)
    shutil.rmtree(with_engine / "engines")
    (with_engine / LEDGER).unlink()
    with pytest.raises(md.DeployError, match=LEDGER):
        md.validate(opened, **quick)
    refused("validate", with_engine, what="list of engines", hint="export it again")
    edit_manifest(with_engine, lambda data: data.pop("lists_engines"))  # it was exported before there was one
    assert md.validate(with_engine, **quick).passed


def test_a_bundle_that_never_had_an_engine_passes_with_its_graph(bundles):
    report = md.validate(bundles("tiny-gqa").path, latency=False, probe=False, runtimes=["ort-cpu"])
    assert report.passed
    assert "no engine" in report.headline
    assert "graph" in report.headline  # what passed
