"""A benchmark says who was timed without a CUDA graph: in the cells, and in one line below."""

import re

from example_report import bench
from example_speed import WHY_NO_GRAPH

from mha_deploy.report.page import bench_markdown, bench_page


def changed(**timing):
    """A benchmark in which every timing has these values."""
    data = bench()
    for entry in data["models"]:
        for point in entry["latency"]["points"]:
            for row in point["rows"]:
                if row["timing"]:
                    row["timing"].update(timing)
    return data


def overview(data):
    return re.search(r'<section id="overview".*?</section>', bench_page(data), re.S)[0]


def columns(markdown):
    """The columns in which cells have asterisks."""
    head, _, *lines = [line for line in markdown.splitlines() if line.startswith("|")]
    names = [cell.strip() for cell in head.split("|")]
    return {names[at] for line in lines for at, cell in enumerate(line.split("|")) if r"\*" in cell}


def test_an_asterisk_stands_outside_of_what_is_bold():
    cells = bench_markdown(changed(graph=False)).splitlines()[2]
    assert re.search(r"\| \*\*13\.9\*\*\\\* \|", cells)


def test_where_all_are_graphs_there_is_no_asterisk():
    data = changed(graph=True, why_no_graph=None)
    assert r"\*" not in bench_markdown(data)
    assert "without a CUDA graph" not in overview(data)
    assert "*<" not in overview(data)


def test_a_row_that_is_a_graph_at_one_size_is_marked_at_the_other():
    data = changed(graph=True, why_no_graph=None)
    data["models"][1]["latency"]["points"][2]["rows"][7]["timing"]["graph"] = False
    shown = bench_markdown(data)
    assert shown.count(r"\*") == 1 + 1
    assert shown.splitlines()[-1] == r"\* timed without a CUDA graph: tensorrt"


def test_a_reason_is_reported_once_and_every_reason_is():
    data = bench()
    first = data["models"][0]["latency"]["points"][0]["rows"][6]["timing"]
    first["why_no_graph"] = "copies | <b>"
    note = bench_markdown(data).splitlines()[-1]
    assert note.count(WHY_NO_GRAPH) == 1
    assert rf"(copies \| &lt;b>; {WHY_NO_GRAPH})" in note


def test_a_refused_row_has_no_asterisk():
    data = bench()
    for entry in data["models"]:
        for point in entry["latency"]["points"]:
            point["rows"][0] |= {"timing": None, "refused": "no kernel"}
    assert columns(bench_markdown(data)) == {"onnxruntime-cuda"}
    assert "eager" not in bench_markdown(data).splitlines()[-1]


def test_the_page_marks_them_and_names_them_once():
    shown = overview(bench()).partition("<details")[0]  # behind it are copies of the table
    assert len(re.findall(r"[\d.,]+\*</td>", shown)) == 2 * 12
    assert shown.count("* timed without a CUDA graph: eager, onnxruntime-cuda (") == 1
    assert re.search(r"<strong>[\d.,]+</strong>\*</td>", overview(changed(graph=False)))
