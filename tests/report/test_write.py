"""Files are written whole or not at all."""

import json
from types import SimpleNamespace

import pytest
from example_report import HOSTILE, bench, fresh, refuse
from example_speed import WHY_NO_GRAPH

import mha_deploy as md
from mha_deploy.errors import DeployError
from mha_deploy.report import page as write
from mha_deploy.report.page import bench_markdown
from mha_deploy.validation.records import check_bench, check_report


def write_report(folder, data):
    """The paths of the data and of the page of a validation with this data."""
    verdict = {"outcome": "passed", "passed": True, "headline": "", "findings": ()}
    page = md.Report(SimpleNamespace(**verdict, record=data, kept={})).save(folder)
    return page.with_suffix(".json"), page


def test_a_report_is_two_files(tmp_path):
    data_path, page_path = write_report(tmp_path / "new" / "folder", fresh("failing"))
    assert [data_path.name, page_path.name] == ["report.json", "report.html"]
    assert sorted(path.name for path in data_path.parent.iterdir()) == ["report.html", "report.json"]
    data = json.loads(data_path.read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(name))
    assert check_report(data) == []
    assert data["heatmaps"][1]["values"][7][3:6] == [None, None, None]
    assert 'data-verdict="failed"' in page_path.read_text(encoding="utf-8")


def test_a_page_made_from_the_file_is_the_page(tmp_path):
    data_path, page_path = write_report(tmp_path, fresh("passing"))
    again, page_again = write_report(tmp_path / "again", json.loads(data_path.read_text(encoding="utf-8")))
    assert again.read_bytes() == data_path.read_bytes()
    assert page_again.read_bytes() == page_path.read_bytes()


def test_a_benchmark_is_two_files(tmp_path, monkeypatch):
    monkeypatch.setattr("mha_deploy.validation.bench.bench_record", lambda records: bench())
    assert md.BenchReport([]).save(tmp_path) == tmp_path / "bench.html"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.html", "bench.json"]
    assert check_bench(json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))) == []


def test_hostile_names_can_be_written(tmp_path):
    data_path, _ = write_report(tmp_path, fresh("hostile"))
    name = json.loads(data_path.read_text(encoding="utf-8"))["model"]["name"]
    assert name == "bert-base" + HOSTILE.replace("\ud800", "\\ud800")


def test_wrong_data_leaves_the_old_files_alone(tmp_path):
    write_report(tmp_path, fresh("passing"))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    data = fresh("failing")
    del data["verdict"]["headline"]
    with pytest.raises(DeployError, match="format"):
        write_report(tmp_path, data)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_page_that_fails_leaves_the_old_files_alone(tmp_path, monkeypatch):
    write_report(tmp_path, fresh("passing"))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(write, "report_page", lambda data: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(tmp_path, fresh("failing"))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


# -- Markdown --------------------------------------------------------------------------------------


def test_a_benchmark_as_markdown():
    head, rule, first, *_, last, _, note = bench_markdown(bench()).splitlines()
    assert head == (
        "| model | B×S | eager | sdpa-math | sdpa-efficient | sdpa-flash | sdpa-cudnn | compile "
        "| onnxruntime-cuda | tensorrt | roofline bound |"
    )
    assert rule == "|---|---|" + "---:|" * 9
    assert first.startswith("| bert-base fp16 | 1×128 | 67.0\\* |")
    assert first.endswith("| **13.9** | 1.31 |")
    assert last.startswith("| gpt2 fp16 | 8×2048 |")
    assert "| refused |" in last
    assert note == rf"\* timed without a CUDA graph: eager, onnxruntime-cuda ({WHY_NO_GRAPH})"


def test_names_cannot_break_the_table():
    data = bench()
    data["models"] = data["models"][:1]
    data["models"][0]["model"]["name"] = "a|b\n<script>\\|*x*"
    lines = bench_markdown(data).splitlines()
    assert len(lines) == 2 + 6 + 2
    assert lines[2].startswith(r"| a\|b &lt;script>\\\|\*x\* fp16 |")


def test_a_row_that_one_model_lacks_is_a_dash():
    data = bench()
    for point in data["models"][1]["latency"]["points"]:
        del point["rows"][7]
    assert bench_markdown(data).splitlines()[-3].endswith("| – | 182 |")


def test_where_all_were_refused_nothing_is_bold():
    data = bench()
    for row in data["models"][0]["latency"]["points"][0]["rows"]:
        refuse(row, "no kernel")
    assert "**" not in bench_markdown(data).splitlines()[2]
