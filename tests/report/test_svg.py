"""Scales, ticks, labels and colors."""

import itertools
import math

import numpy as np
import pytest
from example_report import fresh
from markupsafe import Markup

from mha_deploy.report.charts import (
    DARK,
    DARK_PAGE,
    HEAT_DARK,
    HEAT_LIGHT,
    LIGHT,
    LIGHT_PAGE,
    Scale,
    escaped,
    heat_scale,
    heatmap,
    latency_bars,
    linear_scale,
    log_scale,
    needs_log,
    roofline_plots,
    series_of,
    spread,
    sweep_chart,
    sweep_panels,
    tag,
    truncated,
)
from mha_deploy.report.table import number
from mha_deploy.text import budget_share, error, point_name, short, size, tick, times

LATENCY = fresh("passing")["latency"]
LOOK = series_of([LATENCY])


# -- scales ----------------------------------------------------------------------------------------


def test_a_log_scale_puts_equal_ratios_at_equal_distances():
    scale = Scale(low=1, high=1000, start=0, end=300, log=True)
    assert [scale.place(value) for value in (1, 10, 100, 1000)] == pytest.approx([0, 100, 200, 300])


def test_what_is_off_the_axis_lies_at_its_end():
    for scale in (Scale(low=1, high=2, start=0, end=10), Scale(low=1, high=2, start=0, end=10, log=True)):
        assert scale.place(0) == 0
        assert scale.place(5) == 10


@pytest.mark.parametrize("log", [False, True])
def test_ticks_are_few_and_on_the_axis(log):
    for exponent, span in itertools.product(range(-6, 7), (1.3, 2, 7, 60, 9e3, 1e9)):
        low = 10.0**exponent * 1.7
        scale = Scale(low=low, high=low * span, start=0, end=100, log=log)
        ticks = scale.ticks()
        assert len(ticks) <= 8
        assert all(low <= value * (1 + 1e-9) and value <= low * span * (1 + 1e-9) for value in ticks)
        assert ticks == sorted(set(ticks))


def test_scales_of_nothing_can_be_drawn():
    assert linear_scale([], 0, 1).place(0.5) > 0
    assert linear_scale([0.0], 0, 1).ticks()
    assert 0 < log_scale([0.0], 0, 1).place(1) < 1


def test_labels_are_moved_apart_in_their_order():
    places = spread([5.0, 5.0, 4.0, 90.0], 0, 100, gap=10)
    assert sorted(places) == [places[i] for i in (2, 0, 1, 3)]
    assert all(b - a >= 10 - 1e-9 for a, b in itertools.pairwise(sorted(places)))
    crowd = spread([50.0] * 30, 0, 100, gap=10)
    assert min(crowd) >= -1e-9
    assert max(crowd) <= 100 + 1e-9


def test_long_labels_are_cut():
    assert truncated("short", 100) == "short"
    assert truncated("a" * 50, 66) == "a" * 9 + "…"


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (short(None), "–"),
        (short(0), "0"),
        (short(6.7), "6.70"),
        (short(1234.5), "1,234"),
        (short(99.97), "100"),
        (short(0.0004), "4.0e−4"),
        (short(2e9), "2.0e9"),
        (short(-3.5), "−3.50"),
        (error(4.13e-4), "4.1e−4"),
        (error(0.127), "0.13"),
        (error(10.26), "10.3"),
        (error(0), "0"),
        (error(None), "–"),
        (tick(2000), "2,000"),
        (tick(0.5), "0.5"),
        (budget_share(0.43), "43%"),
        (budget_share(8.05), "805%"),
        (budget_share(1603.7), "1,604×"),
        (times(1.234), "1.23×"),
        (size(5_812_344), "5.81 MB"),
        (size(12), "12 B"),
        (number(None, size).text, "–"),
        (point_name("8x128", {"B": 8, "S": 128}), ""),
        (point_name("B=8,S=128", {"B": 8, "S": 128}), ""),
        (point_name("opt", {"B": 8, "S": 128}), "opt"),
    ],
)
def test_numbers_are_short(words, wanted):
    assert words == wanted


# -- markup ----------------------------------------------------------------------------------------


def test_text_is_escaped_in_elements_and_attributes():
    made = tag("b", "<i>&", title="\"'<", data_x="1", hidden=None)
    assert made == '<b title="&#34;&#39;&lt;" data-x="1">&lt;i&gt;&amp;</b>'
    assert tag("b", Markup("<i>")) == "<b><i></b>"
    assert tag("b", title=Markup('"')) == '<b title="&#34;"></b>'


def test_control_characters_and_reversed_text_are_replaced():
    assert escaped("a\x00\u202eb\x9bc\n") == "a\ufffd\ufffdb\ufffdc\n"


# -- charts ----------------------------------------------------------------------------------------


def test_there_is_a_bar_for_every_timed_row_and_none_for_a_refused_one():
    point = LATENCY["points"][2]
    assert sum(row["refused"] is not None for row in point["rows"]) == 1
    chart = latency_bars(point, LOOK, log=False)
    assert chart.count('class="bar') == len(point["rows"]) - 1
    assert "sdpa-cudnn" not in chart


def test_a_point_without_times_has_no_bars():
    point = {**LATENCY["points"][0], "rows": []}
    assert latency_bars(point, LOOK, log=False) is None


def test_a_wide_spread_asks_for_a_log_scale():
    assert needs_log(LATENCY["points"])
    assert not needs_log(LATENCY["points"][:1])
    assert "log scale" in latency_bars(LATENCY["points"][0], LOOK, log=True)


def test_sweeps_go_along_one_axis_lengths_first():
    panels = list(sweep_panels(LATENCY["points"]))
    assert [(panel.axis, dict(panel.fixed)) for panel in panels] == [
        ("S", {"B": 1}), ("S", {"B": 8}), ("B", {"S": 128}), ("B", {"S": 512}), ("B", {"S": 2048}),
    ]  # fmt: skip
    chart = sweep_chart(panels[0], LOOK)
    assert chart.count("<polyline") == 8
    assert sweep_chart(panels[-1], LOOK).count("<polyline") == 7


def test_points_that_differ_in_two_axes_are_no_sweep():
    assert list(sweep_panels([LATENCY["points"][0], LATENCY["points"][4]])) == []


def test_a_roofline_has_one_dot_a_row_and_needs_figures():
    (plot,) = roofline_plots(LATENCY["points"], LOOK)
    assert plot.count('class="mark') == 46
    unknown = [{**point, "roofline": None} for point in LATENCY["points"]]
    assert roofline_plots(unknown, LOOK) == []


def test_gpus_with_other_peaks_have_other_roofs():
    first, *others = LATENCY["points"]
    slow = {**first, "roofline": {**first["roofline"], "tflops_peak": 312.0}}
    assert len(roofline_plots([slow, *others], LOOK)) == 2


# -- heatmaps --------------------------------------------------------------------------------------


def map_of(values, **changes):
    return {**fresh("passing")["heatmaps"][0], "values": values, **changes}


def test_a_heatmap_has_a_named_cell_for_every_value():
    data = map_of([[1e-3, None], [2e-3, 3e-3]], bin=4)
    chart = heatmap(data, heat_scale([data]))
    assert chart.count("<rect") == 4
    assert "<title>head 1, position 4–7: 3.0e−3</title>" in chart
    assert "<title>head 0, position 4–7: no finite number</title>" in chart


def test_one_bad_head_gets_a_scale_of_ratios():
    assert heat_scale([map_of([[1e-4, 1e-1]])]).log
    assert not heat_scale([map_of([[1e-4, 2e-4]])]).log


@pytest.mark.parametrize("values", [[[0.0]], [[None]], [[1e-300, 1.0]], [[5.0]]])
def test_odd_maps_can_be_drawn(values):
    data = map_of(values)
    assert heatmap(data, heat_scale([data])).count("<rect") == len(values[0])


@pytest.mark.parametrize("values", [[], [[]]])
def test_a_map_without_cells_is_not_drawn(values):
    data = map_of(values)
    assert heatmap(data, heat_scale([data])) is None


# -- colors ---------------------------------------------------------------------------------------

# Linear RGB as people with protanopia and deuteranopia see it (Machado, Oliveira and Fernandes, 2009).
SIGHTS = {
    "usual": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
# From linear RGB to cones, and from their cube roots to Oklab.
CONES = np.array([[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]])
OKLAB = np.array([[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]])


def linear(color):
    value = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(a, b):
    low, high = sorted(float(linear(color) @ [0.2126, 0.7152, 0.0722]) for color in (a, b))
    return (high + 0.05) / (low + 0.05)


def oklab(color, sight):
    return OKLAB @ np.cbrt(CONES @ np.clip(sight @ linear(color), 0, 1))


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
def test_colors_stay_apart_for_every_sight(colors, sight):
    places = [oklab(color, SIGHTS[sight]) for color in colors]
    assert min(math.dist(a, b) for a, b in itertools.combinations(places, 2)) > 0.09


@pytest.mark.parametrize(("colors", "page"), [(LIGHT, LIGHT_PAGE), (DARK, DARK_PAGE)], ids=["light", "dark"])
def test_colors_stand_out_from_the_page(colors, page):
    assert all(contrast(color, page) >= 3 for color in colors)


@pytest.mark.parametrize(("steps", "sign"), [(HEAT_LIGHT, -1), (HEAT_DARK, 1)], ids=["light", "dark"])
def test_the_steps_of_a_heatmap_are_even(steps, sign):
    lightness = [sign * oklab(color, SIGHTS["usual"])[0] for color in steps]
    gaps = np.diff(lightness)
    assert gaps.min() > 0
    assert gaps.max() < 1.25 * gaps.min()


def test_a_row_keeps_its_look_in_every_latency():
    again = series_of([None, {"gpu": "x", "points": [LATENCY["points"][0]]}, LATENCY])
    assert again == LOOK
    assert len({(series.color, series.hollow) for series in LOOK.values()}) == 8


def test_a_second_round_of_colors_is_hollow():
    row = {"family": "pytorch"}
    rows = [{**row, "name": str(i)} for i in range(10)]
    look = series_of([{"points": [{"rows": rows}]}])
    assert [look["0"].color, look["8"].color] == [0, 0]
    assert not look["0"].hollow
    assert look["8"].hollow
