"""The page says what the data says, and nothing in the data can make it do anything."""

import functools
import re
from html.parser import HTMLParser

import example_report
import pytest
from example_report import EXAMPLES, HOSTILE, bench, fresh

from mha_deploy.errors import DeployError
from mha_deploy.report.page import bench_page, report_page

VOID = {"meta", "link", "br", "hr", "col"}


class Reader(HTMLParser):
    """Checks that elements are closed in order, and gathers them with their text."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.texts, self.ids = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.ids += [value for key, value in attributes if key == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else None, data))

    @property
    def text(self):
        shown = (data for tag, data in self.texts if tag not in ("script", "style"))
        return re.sub(r"\s+", " ", " ".join(shown))

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@functools.cache
def page_of(name):
    return bench_page(bench()) if name == "bench" else report_page(fresh(name))


@functools.cache
def read(name):
    return Reader(page_of(name))


@pytest.fixture(scope="module", params=[*EXAMPLES, "bench"])
def any_page(request):
    return read(request.param)


# -- every page ------------------------------------------------------------------------------------


def test_the_markup_is_well_formed_and_names_are_unique(any_page):
    assert len(any_page.ids) == len(set(any_page.ids))
    targets = {link["href"] for link in any_page.all("a")}
    assert targets <= {f"#{name}" for name in any_page.ids}


def test_nothing_is_loaded_from_anywhere(any_page):
    loads = [
        value
        for _, attributes in any_page.elements
        for key, value in attributes.items()
        if key in ("src", "href", "xlink:href", "action", "data", "poster", "srcset", "background")
    ]
    assert all(value.startswith("#") or value == "data:," for value in loads)
    style = next(data for tag, data in any_page.texts if tag == "style")
    assert "url(" not in style
    assert "@import" not in style


def test_one_script_and_it_is_ours(any_page):
    scripts = [data for tag, data in any_page.texts if tag == "script"]
    assert len(scripts) == len(any_page.all("script")) == 1
    assert scripts[0].startswith("// A click on a heading sorts")
    assert not [key for _, attributes in any_page.elements for key in attributes if key.startswith("on")]


def test_tables_have_captions_and_headings(any_page):
    assert len(any_page.all("table")) == len(any_page.all("caption"))
    assert all("scope" in heading for heading in any_page.all("th"))
    assert len(any_page.all("h1")) == 1


def test_every_column_is_explained_at_its_heading_and_in_the_legend(any_page):
    columns = [each for each in any_page.all("th") if each["scope"] == "col"]
    assert all(each.get("title") for each in columns)
    legend = any_page.text.partition("What the columns of this page hold")[2]
    assert all(each["title"] in legend for each in columns)


def test_every_page_has_what_reproduces_it(any_page):
    versions = any_page.text.partition(" Versions ")[2]
    assert "torch" in versions
    assert "onnxruntime" in versions


def test_charts_can_be_heard(any_page):
    charts = [each for each in any_page.all("svg") if "chart" in each.get("class", "")]
    assert all(each["role"] == "img" and each["aria-label"] for each in charts)


def test_no_number_is_left_raw(any_page):
    assert not re.search(r"\bnan\b|\binf\b|None", any_page.text)
    assert not re.search(r"\d\.\d{8,}", any_page.text)


# -- the verdict -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "word"), [("passing", "passed"), ("failing", "failed"), ("empty", "not verified")]
)
def test_the_verdict_can_be_read_by_a_machine(name, word):
    reader = read(name)
    assert [each["data-verdict"] for each in reader.all("main")] == [word.replace(" ", "-")]
    after = page_of(name).split('id="verdict"')[1].split(">", 1)[1]
    assert re.sub("<[^>]*>", "", after).startswith(word.upper())


def test_failures_come_first():
    levels = re.findall(r'class="level (\w+)"', page_of("failing"))
    assert levels == ["failure"] * 3 + ["warning"] * 2 + ["note"] * 2


def test_what_passed_is_folded_and_what_failed_is_open():
    folded = re.findall(r"<details>.*?</details>", page_of("failing"), flags=re.DOTALL)
    shown = re.sub(r"<details>.*?</details>", "", page_of("failing"), flags=re.DOTALL)
    parity = re.search(r'<section id="parity".*?</section>', shown, flags=re.DOTALL)[0]
    assert parity.count('class="status bad"') == 3
    assert 'class="status good"' not in parity
    assert not [each for each in folded if 'class="status bad"' in each]
    lines = re.findall("<summary>(.*?)</summary>", "".join(folded))
    summaries = [words for words in lines if "5 passed" in words]
    assert len(summaries) == 1  # ONNX Runtime: everything passed
    assert "12% of the budget" in summaries[0]


def test_the_command_can_be_copied():
    box = re.search("<pre[^>]*>(.*?)</pre>", page_of("passing"))[1]
    assert box == "mha-deploy validate &#39;my bundle&#39;"


# -- sections --------------------------------------------------------------------------------------


def test_a_whole_report_has_every_section():
    wanted = ["parity", "maps", "decode", "invariance", "conformance", "range", "fusion", "latency", "notes"]
    assert [name for name in read("passing").ids if name in wanted] == wanted


def test_a_failure_is_reported_with_its_place():
    text = read("failing").text
    assert "8.1× over budget: rel. L2, gain; worst element [0, 64, 511]: got -3.75, oracle 1.2361" in text
    assert "12 values are NaN or infinite, the first at (0, 3, 17)" in text
    assert "no number" in text
    assert "At fault: fusion . The unfused twin" in text
    assert "1,604×" in text


def test_a_refused_row_is_listed_and_has_no_bar():
    page = page_of("failing")
    assert (
        page.count("not timed: wrong answer: out of budget: relative_l2, gain") == 12
    )  # by chart, in the table
    bars = re.findall(r"<g><title>([^ ]+) ", page)
    assert "tensorrt" not in bars
    assert "eager" in bars


def test_what_was_not_run_is_said_in_one_sentence():
    text = read("cpu-only").text
    assert "tensorrt-rtx was not run: there is no NVIDIA GPU on this machine." in text
    assert "Nothing was timed here: there is no NVIDIA GPU on this machine." in text
    assert "Not part of this run: Error maps, Invariance, Mask conformance, FP16 range." in text


def test_the_section_of_a_finding_is_not_said_twice():
    data = fresh("cpu-only")
    finding = {**data["verdict"]["findings"][0], "section": "engine", "text": "engine e was not run"}
    data["verdict"]["findings"] = [finding]
    text = Reader(report_page(data)).text
    assert "engine e was not run" in text
    assert "engine engine" not in text


def test_a_run_of_nothing_still_makes_a_page():
    text = read("empty").text
    assert "No result was compared in this run." in text
    assert "The bundle has no engine." in text


def test_masks_are_reported_with_their_reasons():
    text = read("passing").text
    assert "ort-cpu, wrong (dead-row): NaN where ONNX defines zeros" in text
    assert "tensorrt-rtx, absent (every mask): tensorrt_rtx is not installed" in text
    assert "not part of the verdict" in text


def test_a_check_that_could_not_be_made_does_not_pass():
    assert "not checked" in read("passing").text


def test_every_row_of_the_latency_table_is_there():
    page = (
        page_of("passing").split("Latency of every runtime at every size</caption>")[1].split("</table>")[0]
    )
    assert page.count("<tr>") == 1 + 48
    assert page.count("not timed") == 2
    assert "throttled: power cap" in page


def test_one_point_has_no_curves():
    data = fresh("passing")
    data["latency"]["points"] = data["latency"]["points"][:1]
    page = report_page(data)
    assert "Over lengths and batches" not in page
    assert 'class="chart bars"' in page


def test_a_gpu_without_figures_has_no_roofline():
    data = fresh("passing")
    for point in data["latency"]["points"]:
        point["roofline"] = None
        for row in point["rows"]:
            row["roofline_share"] = None
    page = report_page(data)
    assert 'class="chart roofline"' not in page
    assert 'class="bound"' not in page


def test_a_latency_of_refusals_has_no_chart():
    data = fresh("passing")
    for point in data["latency"]["points"]:
        for row in point["rows"]:
            example_report.refuse(row, "no kernel")
    data["latency"]["gpu"] = None
    page = report_page(data)
    assert "Nothing was timed at this size." in page
    assert 'class="chart bars"' not in page
    assert 'class="chart sweep"' not in page


# -- hostile data ----------------------------------------------------------------------------------


def test_hostile_text_stays_text():
    reader = read("hostile")
    assert not reader.all("img")
    assert "\x00" not in page_of("hostile")
    assert "\u202e" not in page_of("hostile")
    page_of("hostile").encode("utf-8")
    tame = HOSTILE.replace("\x00", "\ufffd").replace("\u202e", "\ufffd").replace("\ud800", "\\ud800")
    assert tame in reader.text
    (title,) = [data for tag, data in reader.texts if tag == "title" and data.startswith("FAILED")]
    assert title == f"FAILED: bert-base{tame} fp16{tame}"


def test_hostile_text_cannot_reach_a_style():
    styles = [attributes["style"] for _, attributes in read("hostile").elements if "style" in attributes]
    assert styles
    assert all(re.fullmatch(r"--w:[\d.]+%", style) for style in styles)


def test_hostile_elements_are_those_of_a_tame_page():
    tame, hostile = (sorted(name for name, _ in read(name).elements) for name in ("failing", "hostile"))
    assert [name for name in set(hostile) if name not in tame] == []


# -- benchmarks ------------------------------------------------------------------------------------


def test_a_benchmark_has_an_overview_and_a_section_for_every_model():
    reader = read("bench")
    assert {"overview", "model-0", "model-1", "environment"} <= set(reader.ids)
    assert "Fastest, of 12 sizes: tensorrt 12." in reader.text


def test_a_benchmark_can_be_copied_without_a_script():
    markdown, tabbed = re.findall("<pre[^>]*>(.*?)</pre>", page_of("bench"), flags=re.DOTALL)
    assert markdown.startswith("| model | B×S | eager |")
    lines = [line.split("\t") for line in tabbed.splitlines()]
    assert len(lines) == 13
    assert {len(line) for line in lines} == {11}


def test_a_row_has_one_color_on_the_whole_page():
    found = set(
        re.findall(r'class="mark (s\d)[^"]*"[^>]*></\w+></svg> <span>([^<]+)</span>', page_of("bench"))
    )
    assert len(found) == len({name for _, name in found}) == 8


def test_a_benchmark_names_what_could_not_be_timed_with_its_model():
    data = bench()
    assert 'id="notes"' not in bench_page(data)
    data["models"][1]["absent"] = [{"name": "ort-cuda", "reason": "ONNX Runtime has no CUDA here"}]
    _, _, notes = bench_page(data).partition('id="notes"')
    assert "gpt2: ort-cuda" in notes
    assert "ONNX Runtime has no CUDA here" in notes


def test_a_benchmark_of_nothing_makes_a_page():
    data = bench()
    data["models"][0]["latency"] = None
    data["models"].pop()
    assert "Nothing was timed." in bench_page(data)


def test_data_that_does_not_keep_the_format_makes_no_page():
    with pytest.raises(DeployError, match="does not follow its format"):
        report_page({"format": 3})
