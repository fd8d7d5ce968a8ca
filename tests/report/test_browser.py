"""The page in a real browser: it is read, measured, and asks for nothing."""

import json
import re
import shutil
import subprocess

import pytest
from example_report import fresh

from mha_deploy.report.page import report_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, chromium-browser or google-chrome")

OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--window-size=420,900",
)  # fmt: skip

# Runs in the test's copy of a page: what is drawn, where its words are, what was fetched, what went wrong.
MEASURE = """
<script>
const wrong = [];
addEventListener("error", (event) => wrong.push(String(event.message)));
addEventListener("load", () => {
  const folds = [...document.querySelectorAll("details:not([open])")];
  const hidden = (fold) => !fold.querySelector("td,dd,pre").checkVisibility({contentVisibilityAuto: true});
  const closed = folds.filter(hidden).length;
  dispatchEvent(new Event("beforeprint"));
  const printed = folds.filter((fold) => fold.open).length;
  const box = (node) => {
    const r = node.getBoundingClientRect();
    return [r.left, r.top, r.right, r.bottom];
  };
  const drawn = (mark) => mark.getBBox().width > 0;
  const charts = [...document.querySelectorAll("svg.chart")].map((chart) => ({
    kind: chart.getAttribute("class"),
    box: box(chart),
    marks: [...chart.querySelectorAll("rect,circle,path,polyline")].filter(drawn).length,
    words: [...chart.querySelectorAll("text")].map((text) => ({text: text.textContent, box: box(text)})),
  }));
  const captions = [...document.querySelectorAll("caption")];
  const latency = captions.find((each) => each.textContent.startsWith("Latency")).parentNode;
  latency.querySelectorAll("thead th")[1].click();
  const order = [...latency.tBodies[0].rows].slice(1).map((row) => Number(row.cells[1].dataset.v));
  const measured = {
    charts, wrong, order, closed, printed, folds: folds.length,
    buttons: document.querySelectorAll("details.copy > button").length,
    fetched: performance.getEntriesByType("resource").length,
    width: document.documentElement.scrollWidth, view: document.documentElement.clientWidth,
  };
  document.documentElement.dataset.measured = JSON.stringify(measured);
});
</script>
"""


def dumped(page, folder):
    """The document as the browser has it after loading, and what it printed."""
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Measurements of a copy of the page, whose policy lets the test's script run."""
    page = re.sub(r"<meta http-equiv[^>]*>", "", report_page(fresh("passing")))
    document, _ = dumped(page.replace("<title>", MEASURE + "<title>", 1), tmp_path_factory.mktemp("measured"))
    found = re.search(r'data-measured="([^"]*)"', document)
    assert found, document[:500]
    return json.loads(found.group(1).replace("&quot;", '"').replace("&lt;", "<").replace("&amp;", "&"))


@pytest.mark.slow
def test_a_hostile_page_is_read_without_a_complaint(tmp_path):
    document, log = dumped(report_page(fresh("hostile")), tmp_path)
    assert '<main data-verdict="failed">' in document
    verdict = re.sub("<[^>]*>", "", document.split('id="verdict"')[1].split(">", 1)[1])
    assert verdict.startswith("FAILED")
    assert "<img" not in document
    assert 'class="n sortable"' in document  # our own script did run under the page's policy
    assert [line for line in log.splitlines() if "CONSOLE" in line] == []


def test_nothing_is_fetched_and_nothing_goes_wrong(measured):
    assert measured["fetched"] == 0
    assert measured["wrong"] == []


def test_every_chart_is_drawn(measured):
    kinds = [chart["kind"] for chart in measured["charts"]]
    counts = {
        kind: kinds.count(f"chart {kind}") for kind in ("bars", "sweep", "roofline", "heatmap", "decode")
    }
    assert counts == {"bars": 6, "sweep": 5, "roofline": 1, "heatmap": 2, "decode": 1}
    for chart in measured["charts"]:
        left, top, right, bottom = chart["box"]
        assert right - left > 300
        assert bottom - top > 100
        assert chart["marks"] > 7


def test_no_word_of_a_chart_is_cut_off(measured):
    for chart in measured["charts"]:
        left, top, right, bottom = chart["box"]
        for word in chart["words"]:
            x1, y1, x2, y2 = word["box"]
            inside = x1 >= left - 1 and x2 <= right + 1 and y1 >= top - 1 and y2 <= bottom + 1
            assert inside, (chart["kind"], word)


def test_no_word_of_a_chart_covers_another(measured):
    for chart in measured["charts"]:
        words = chart["words"]
        for index, one in enumerate(words):
            for other in words[index + 1 :]:
                assert not overlap(one["box"], other["box"]), (chart["kind"], one, other)


def overlap(a, b):
    # The box of a text is as high as its line; the letters leave some of it free.
    return min(a[2], b[2]) - max(a[0], b[0]) > 1 and min(a[3], b[3]) - max(a[1], b[1]) > 4


def test_what_is_folded_is_closed_on_the_screen_and_open_in_print(measured):
    assert measured["closed"] == measured["printed"] == measured["folds"] > 5
    assert measured["buttons"] == 1  # the command


def test_a_narrow_page_scrolls_inside_its_containers(measured):
    assert measured["width"] <= measured["view"]


def test_a_heading_sorts_its_table(measured):
    assert len(measured["order"]) == 8
    assert measured["order"] == sorted(measured["order"])
