"""A decode step has tokens a second, and the work of the lengths it was timed at; where a bench times it."""

import io
import json

import numpy as np
import pytest
from rich.console import Console
from test_latency import row

from mha_deploy.analyze.cost import layer_cost
from mha_deploy.bundle.cases import GoldenCase
from mha_deploy.cli.tables import point_renderable
from mha_deploy.errors import BackendUnavailable
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.precision import find_precision
from mha_deploy.report.schema import check_bench
from mha_deploy.validate import bench
from mha_deploy.validate.bench import BenchOptions, ModelBench, bench_to_dict
from mha_deploy.validate.latency import LatencyRow, latency_point

FP16 = find_precision("fp16")
DYNAMIC, PREALLOCATED, WHOLE = (find_spec(f"tiny-{name}") for name in ("dynamic", "preallocated", "gqa"))


def point(spec, sizes, *rows, lengths=None):
    inputs = {} if lengths is None else {"lengths": np.array(lengths, np.int32)}
    case = GoldenCase(name="decode", sizes=sizes, inputs=inputs, oracle={}, eager={})
    return latency_point(case, rows, spec, FP16)


def printed(at):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(point_renderable(at))
    return console.export_text()


# -- figures -----------------------------------------------------------------------------------


def test_a_decode_step_has_tokens_a_second():
    engine, eager = row("tensorrt", 20.0, family="tensorrt"), row("eager", 40.0)
    refused = LatencyRow(name="sdpa-flash", backend="torch", family="pytorch", refused="no kernel")
    at = point(DYNAMIC, {"B": 4, "S": 1, "P": 63}, eager, refused, engine)
    assert [at.figures(each)["tokens_per_s"] for each in at.rows] == pytest.approx([1e5, None, 2e5])
    assert at.roofline.bound == "memory"
    share = at.figures(engine)["gb_per_s"] / at.roofline.gb_per_s_peak
    assert at.figures(engine)["roofline_share"] == pytest.approx(share), "all stages are bound by memory"
    data = json.loads(json.dumps(at.to_dict()))
    assert [each["tokens_per_s"] for each in data["rows"]] == pytest.approx([1e5, None, 2e5])
    assert data["past"] is None


@pytest.mark.parametrize(
    ("spec", "sizes", "lengths"),
    [
        (DYNAMIC, {"B": 4, "S": 2, "P": 10}, None),
        (PREALLOCATED, {"B": 1, "S": 16, "T": 64}, [0]),
        (WHOLE, {"B": 4, "S": 1}, None),
    ],
    ids=["two tokens", "prefill", "no cache"],
)
def test_other_calls_have_none(spec, sizes, lengths):
    engine = row("tensorrt", 20.0, family="tensorrt")
    at = point(spec, sizes, engine, lengths=lengths)
    assert at.figures(engine)["tokens_per_s"] is None
    assert at.figures(engine)["gb_per_s"] > 0
    assert "TFLOP/s" in printed(at)
    assert "tok/s" not in printed(at)


def test_the_work_is_that_of_the_lengths_of_the_case():
    sizes = {"B": 3, "S": 1, "T": 64}
    full, half = (point(PREALLOCATED, sizes, lengths=lengths) for lengths in ([63] * 3, [63, 30, 0]))
    assert (full.flops, full.bytes) == (
        layer_cost(PREALLOCATED, sizes, 2).flops,
        layer_cost(PREALLOCATED, sizes, 2).bytes,
    )
    assert half.flops < full.flops
    assert half.bytes < full.bytes
    assert (full.past, half.past) == (63, 63)


def test_the_table_of_a_decode_step_fits_a_terminal():
    rows = [row("sdpa-efficient", 1234.5), row("tensorrt-rtx-fp16", 2.0, family="tensorrt"), row("eager")]
    text = printed(point(PREALLOCATED, {"B": 4, "S": 1, "T": 64}, *rows, lengths=[63] * 4))
    assert "B=4,S=1,T=64" in text.replace(" ", "")
    for words in ("63 KV-cache entries", "tokens/s", "2,000,000", "GB/s", "roofline"):
        assert words in text
    assert "…" not in text


def test_the_figures_keep_the_format_of_a_benchmark(bundles):
    bundle = bundles("tiny-preallocated")
    at = point(PREALLOCATED, {"B": 2, "S": 1, "T": 64}, row("eager", 9.0), lengths=[63, 63])
    found = ModelBench(bundle=bundle, engines=(), evaluations=(), absent=(), points=(at,))
    assert check_bench(json.loads(json.dumps(bench_to_dict([found])))) == []


# -- which cases are timed ---------------------------------------------------------------------


@pytest.fixture
def cases(monkeypatch):
    """The cases of a bench, their oracle on the CPU."""
    from mha_deploy.baselines import fresh

    real = fresh.FreshCases
    monkeypatch.setattr(fresh, "FreshCases", lambda bundle, device: real(bundle, "cpu"))
    return lambda bundle, *at: bench._cases(bundle, BenchOptions(at=at))


def test_a_cached_layer_is_timed_at_prefill_and_decode(bundles, cases):
    prefill, decode = cases(bundles("tiny-dynamic"), "opt")
    assert (prefill.name, prefill.sizes) == ("prefill", {"B": 2, "S": 16, "P": 0})
    assert (decode.name, decode.sizes) == ("decode", {"B": 2, "S": 1, "P": 24})
    prefill, decode = cases(bundles("tiny-preallocated"), "opt")
    assert prefill.inputs["lengths"].tolist() == [0, 0]
    assert decode.inputs["lengths"].tolist() == [63, 63], "whatever lengths the golden case of that name has"


def test_a_golden_case_is_taken_only_where_its_lengths_are_wanted(bundles, cases, monkeypatch):
    def refuse(what, hint):
        raise BackendUnavailable("Only PyTorch can tell.")

    bundle = bundles("tiny-preallocated")
    monkeypatch.setattr(bench, "refuse_without_torch", refuse)
    assert [case.name for case in cases(bundle, "prefill")] == ["prefill"]
    with pytest.raises(BackendUnavailable):
        cases(bundle, "B=3,S=2,T=64")


def test_a_sweep_has_every_point_once_under_a_name_of_its_own(bundles, cases):
    for name in ("tiny-dynamic", "tiny-preallocated", "tiny-gqa"):
        found = cases(bundles(name))
        assert len({case.name for case in found}) == len(found)
        full = [case for case in found if "lengths" in case.inputs and case.name != "prefill"]
        assert all((case.inputs["lengths"] == 63).all() for case in full)


def test_a_point_that_is_asked_for_twice_is_timed_once(bundles, cases):
    found = cases(bundles("tiny-dynamic"), "decode", "opt", "B=2,S=1,P=24")
    assert [case.name for case in found] == ["decode", "prefill"]
