"""The chart of a decode trace."""

import re

import pytest
from example_decode import decode
from example_report import fresh

from mha_deploy.report.charts import EAGER, decode_chart, decode_curves, decode_look, series_of


def chart_of(errors, eager=(), first_failed=()):
    curves = {EAGER: list(eager), "ort-cpu 1": list(errors)}
    drawn = decode_chart(curves, first_failed, decode_look(list(curves), None, {}))
    lines = [line.split() for line in re.findall(r'<polyline points="([^"]*)"', drawn or "")]
    return drawn, [[tuple(map(float, point.split(","))) for point in line] for line in lines]


def test_a_gap_breaks_the_line_and_what_is_alone_has_a_mark():
    gaps = [1.0, 1.1, None, 1.2, None, 1.3, 1.4, 1.5]
    drawn, lines = chart_of(gaps)
    assert [len(line) for line in lines] == [2, 3]
    assert "ort-cpu 1, step 4: 1.20" in drawn


def test_larger_errors_are_higher_and_later_steps_further_right():
    for errors in ([1.0, 2.0, 3.0], [1.0, 20.0, 300.0]):
        drawn, ((first, second, third),) = chart_of(errors)
        assert first[0] < second[0] < third[0]
        assert first[1] > second[1] > third[1]
        assert ("log scale" in drawn) is (errors[2] == 300)


def test_many_steps_are_pooled_over_a_line_through_all():
    """One wild step does not move the median, and is still on the page."""
    errors = [1e-3] * 301
    errors[150] = 5e-3
    drawn, (each, pooled) = chart_of(errors)
    assert (len(each), len(pooled)) == (301, 24)
    assert len({y for _, y in pooled}) == 1
    assert len({y for _, y in each}) == 2
    assert "median of steps 289 to 301" in drawn
    assert chart_of([1e-3] * 63)[1][0] != chart_of([1e-3] * 64)[1][-1]


def test_a_curve_that_stopped_early_is_not_stretched():
    _, (eager, stopped) = chart_of([1e-3] * 10, eager=[1e-3] * 40)
    assert stopped[-1][0] == pytest.approx(eager[9][0])


def test_two_engines_of_one_name_have_a_curve_each():
    names = list(decode_curves([decode("tensorrt 8.6.1"), decode("tensorrt 8.6.1")]))
    assert names == [EAGER, "tensorrt 8.6.1", "tensorrt 8.6.1 (2)"]


def test_a_runtime_looks_as_its_row_does_and_no_two_curves_alike():
    latency = fresh("passing")["latency"]
    rows = series_of([latency])
    names = [EAGER, "tensorrt 8.6.1", "ort-cpu 1.31.1", "onnx-reference 1.23"]
    look = decode_look(names, latency, rows)
    assert look["tensorrt 8.6.1"] == rows["tensorrt"]
    assert look[EAGER] == rows["eager"]
    assert len({series.color for series in look.values()}) == len(names)
    assert [look[name].mark for name in names] == ["circle", "diamond", "square", "square"]
