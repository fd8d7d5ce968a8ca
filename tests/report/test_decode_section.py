"""Decoding in the report: its record, and its section of the page."""

import re
from pathlib import Path

import pytest
from bundle_edit import engine_manifest
from example_decode import break_decode, decode
from example_report import fresh
from replayed import MEDDLERS, STEPS, decoded, right, stops_at, wrong_from

from mha_deploy.engine.engine import Engine
from mha_deploy.files import as_plain
from mha_deploy.report.charts import EAGER
from mha_deploy.report.page import report_page
from mha_deploy.report.table import place_text, prompts_text
from mha_deploy.validation.records import check_report, engine_records

WRONG = {"level": "failure", "section": "decode", "kind": "wrong decoding", "text": "decodes wrongly"}


def report_of(*reports):
    return fresh("cpu-only") | {"decode": [as_plain(each) for each in reports]}


def section(data):
    """The decode section of a page, as markup."""
    (found,) = re.findall(r'<section[^>]*id="decode".*?</section>', report_page(data), re.DOTALL)
    return found


def words(markup):
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", markup)).replace("&#x27;", "'")


# -- the record ------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("meddle", MEDDLERS)
def test_what_the_decode_loop_gives_keeps_the_format(meddle):
    data = report_of(as_plain(decoded(meddle).record))
    assert check_report(data) == []
    assert (data["decode"][0]["outcome"] == "passed") is (meddle is right)
    assert section(data)


def test_the_example_has_the_keys_of_what_the_decode_loop_gives():
    real, made = as_plain(decoded().record), decode("tensorrt 8.6.1")
    assert list(real) == list(made)
    wrong = as_plain(decoded(wrong_from(3)).record)
    assert set(wrong["failures"][0]) == set(break_decode(made)["failures"][0])


def test_a_finding_about_decoding_leads_to_its_section():
    data = report_of(as_plain(decoded(wrong_from(3)).record))
    data["verdict"]["findings"] = [WRONG]
    assert '<a href="#decode">decode</a>' in report_page(data)


# -- the page --------------------------------------------------------------------------------------


def test_a_layer_without_a_cache_has_no_section_and_does_not_miss_it():
    page = report_page(report_of())
    assert 'id="decode"' not in page
    assert "Decode" not in page


def test_a_layer_with_a_cache_misses_it():
    data = report_of()
    data["model"]["spec"]["cache"] = "preallocated"
    assert re.search(r"Not part of this run: [^.]*\bDecode\b", words(report_page(data)))


def test_a_right_trace_is_reported_in_one_row():
    report = decoded()
    plain = as_plain(report.record)
    text = words(section(report_of(plain)))
    reported = f"replay 1.0 passed steps 5, 2 and 7 {STEPS} – {report.share:.0%}"
    assert f"{reported} {plain['growth']:.2f}× {plain['eager_growth']:.2f}×" in text
    assert "first wrong step" not in text


def test_errors_stand_beside_those_of_the_module_at_doublings():
    data = as_plain(decoded().record)
    data["errors"][3], data["eager_errors"][3] = 0.25, 0.125
    table = section(report_of(data)).split("at some steps of trace steps</caption>")[1]
    rows = [re.findall(r">([^<>]+)</td>", row) for row in table.split("<tr>")[2:]]
    assert re.findall(r">([^<>]+)</th>", table) == ["step", EAGER, "replay 1.0"]
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "16", "20"]
    assert rows[2] == ["4", "0.12", "0.25"]


def test_a_failure_is_reported_with_its_place():
    data = as_plain(decoded(wrong_from(3)).record)
    text = words(section(report_of(data)))
    assert f"FAILED steps 5, 2 and 7 {STEPS} step 3" in text
    assert re.search(
        r"steps step 3/output: [^;]* over budget[^;]*; worst at [^:]*token 0: got \S+, ora",
        text,
    )
    assert f"and {STEPS - 1 - len(data['failures'])} more of {STEPS + 4} checks" in text
    assert "a dashed line is the first wrong step" in text
    assert "<title>first wrong step: 3</title>" in section(report_of(data))


def test_a_trace_that_stopped_is_reported():
    text = words(section(report_of(as_plain(decoded(stops_at(4)).record))))
    assert f" 4 of {STEPS} step 4 " in text
    assert "out of memory" in text


def test_a_trace_without_a_step_has_no_chart():
    found = section(report_of(as_plain(decoded(stops_at(0)).record)))
    assert "No step gave anything to measure." in found
    assert "<svg" not in found
    assert "prefill" in found


@pytest.mark.parametrize(
    ("prompt", "reported"),
    [
        ([7], "a prompt of 7"),
        ([7, 7], "2 prompts of 7"),
        ([7, 3, 5], "prompts of 7, 3 and 5"),
        ([9, 3, 5, 4, 3], "5 prompts of 3 to 9"),
        ([], "no prompt"),
    ],
)
def test_prompts_in_words(prompt, reported):
    assert prompts_text(prompt) == reported


def test_a_wrong_cache_behind_right_steps_is_the_first_wrong_place():
    places = [place_text(*given) for given in ((None, 0), (None, 2), (0, 9), (3, 9))]
    assert places == ["–", "cache", "prefill", "step 3"]


def test_every_trace_has_a_chart():
    found = section(report_of(decode("a"), decode("b"), decode("a", trace="long", steps=600)))
    assert found.count('class="chart decode"') == 2
    assert re.findall("<h3>([^<]*)</h3>", found) == ["Trace steps", "Trace long"]


# -- profiles --------------------------------------------------------------------------------------


def test_profiles_are_called_by_their_names():
    data = fresh("passing")
    engine = data["engines"][0]
    node = engine["nodes"][0]
    engine |= {
        "profiles": [{"B": "1:8:32", "S": "1:128:512"}, {"B": "1:8:32", "S": "1:1:1"}],
        "attention": "native, TensorRT's own projections",
        "plugins": [],
        "profile_names": ["prefill", "decode"],
        "nodes": [node, node | {"profile": 1}, node | {"profile": 7}],
    }
    assert check_report(as_plain(data)) == []
    page = report_page(data)
    assert "profile prefill: B 1:8:32 S 1:128:512 · profile decode: B 1:8:32 S 1:1:1" in page
    assert [f'data-v="{i}">{name}</td>' in page for i, name in ((0, "prefill"), (1, "decode"), (7, "7"))] == [
        True
    ] * 3


@pytest.mark.parametrize("names", [["prefill", "decode"], []], ids=["named", "of old"])
def test_a_report_names_every_profile(names):
    engine = Engine(path=Path("engines/rtx.engine"), manifest=engine_manifest(profile_names=names))
    (data,) = as_plain(engine_records([engine]))
    assert data["profile_names"] == (names or ["0", "1"])
