"""What a report and a benchmark show of a layer with a cache."""

import copy

import pytest
from example_report import bench, fresh

from mha_deploy.report.charts import sweep_panels
from mha_deploy.report.page import bench_markdown, bench_page, report_page
from mha_deploy.validation.records import check_report


def decode_data(*sizes, past=None):
    """The points of the example, as if they were decode steps at these sizes."""
    data = fresh("passing")
    shown = data["latency"]["points"]
    points = [copy.deepcopy(shown[index % len(shown)]) for index in range(len(sizes))]
    for point, size in zip(points, sizes, strict=True):
        point |= {"sizes": size, "case": "-".join(f"{axis}{n}" for axis, n in size.items()), "past": past}
        for row in point["rows"]:
            row["tokens_per_s"] = size["B"] / row["timing"]["p50_us"] * 1e6 if row["timing"] else None
    data["latency"]["points"] = points
    return data


def step(P, B=8):
    return {"B": B, "S": 1, "P": P}


def test_tokens_a_second_have_a_column_where_there_are_some():
    data = decode_data(step(512), step(1024))
    assert check_report(data) == []
    page = report_page(data)
    assert page.count(">tokens/s</th>") == 1
    assert ">tokens/s</th>" not in report_page(fresh("passing"))
    rate = data["latency"]["points"][0]["rows"][0]["tokens_per_s"]
    assert f">{rate:,.0f}</td>" in page


@pytest.mark.parametrize("decodes", [True, False])
def test_every_row_has_a_cell_for_every_column(decodes):
    data = decode_data(step(512), step(1024), step(2048)) if decodes else fresh("passing")
    data["latency"]["points"][1]["rows"][0]["tokens_per_s"] = None
    table = (
        report_page(data).split("Latency of every runtime at every size</caption>")[1].split("</table>")[0]
    )
    columns = table.count('scope="col"')
    assert "colspan" in table, "a row that was refused"
    for line in table.split("<tr>")[2:]:
        cells = line.count("<td")
        assert cells == columns or f'colspan="{columns - 1}"' in line


def test_how_much_of_a_preallocated_cache_was_filled_is_reported():
    data = decode_data({"B": 8, "S": 1, "T": 4096}, past=4095)
    assert "B=8, S=1, T=4096, 4,095 KV-cache entries" in report_page(data)
    assert "KV-cache entries" not in report_page(decode_data(step(512)))


def test_an_empty_past_is_on_no_logarithmic_axis():
    data = decode_data(step(0), step(512), step(1024))
    (panel,) = sweep_panels(data["latency"]["points"])
    assert (panel.axis, [point["sizes"]["P"] for point in panel.points]) == ("P", [512, 1024])
    report_page(data)
    assert not list(sweep_panels(decode_data(step(0), step(512))["latency"]["points"]))


def test_a_prefill_and_a_step_of_a_preallocated_cache_are_on_no_common_line():
    data = decode_data({"B": 8, "S": 1, "T": 64}, {"B": 8, "S": 16, "T": 64}, past=63)
    points = data["latency"]["points"]
    assert [panel.axis for panel in sweep_panels(points)] == ["S"]
    points[1]["past"] = 0
    assert not list(sweep_panels(points))


def test_batches_of_a_full_cache_are_on_one_line_that_says_so():
    data = decode_data({"B": 1, "S": 1, "T": 64}, {"B": 8, "S": 1, "T": 64}, past=63)
    (panel,) = sweep_panels(data["latency"]["points"])
    assert panel.fixed == {"S": 1, "T": 64, "KV-cache entries": 63}
    assert "KV-cache entries=63" in report_page(data)


@pytest.mark.parametrize("show", [bench_markdown, bench_page])
def test_a_benchmark_names_the_axes_of_its_sizes(show):
    data = bench()
    data["models"] = data["models"][:1]
    assert "B×S" in show(data)
    data["models"][0]["latency"] = decode_data(step(512), step(1024))["latency"]
    assert "B×S×P" in show(data)
    assert "8×1×512" in show(data)


@pytest.mark.parametrize("show", [bench_markdown, bench_page])
def test_sizes_of_different_axes_are_written_with_their_names(show):
    data = bench()
    data["models"][0]["latency"] = decode_data(step(512), step(1024))["latency"]
    shown = show(data)
    assert "B=8, S=1, P=512" in shown
    assert "B=8, S=128" in shown
    assert "| B×S |" not in shown
