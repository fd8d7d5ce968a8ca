"""The description of the data, its checker and its documentation are one."""

import re

import example_report
import pytest
from schema_text import MARK, PATH, Document, written

from mha_deploy.errors import DeployError
from mha_deploy.files import as_plain
from mha_deploy.validation.records import check_bench, check_report, plain_bench, plain_report


def problems_after(change):
    data = as_plain(example_report.fresh("failing"))
    change(data)
    return check_report(data)


@pytest.mark.parametrize("name", example_report.EXAMPLES)
def test_the_examples_keep_the_format(name):
    assert check_report(as_plain(example_report.fresh(name))) == []


def test_the_example_of_a_benchmark_keeps_the_format():
    assert check_bench(as_plain(example_report.bench())) == []


# -- the document ----------------------------------------------------------------------------------


def test_the_document_is_what_the_records_say():
    assert PATH.read_text(encoding="utf-8") == written()


def test_every_table_of_the_document_has_three_columns():
    rows = [line for line in written().partition(MARK)[2].splitlines() if line.startswith("|")]
    assert len(rows) > 200
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 4 for row in rows)


# -- the checker -----------------------------------------------------------------------------------


def test_every_key_is_required_and_no_other_is_allowed():
    """Take every key of every record away, and add a stranger to it."""
    whole = as_plain(example_report.fresh("failing"))
    tried = 0
    for holder, place, required, is_open in walk(whole):
        for key in [name for name in holder if name in required]:
            kept = holder.pop(key)
            assert any("missing" in line and key in line for line in check_report(whole)), f"{place}.{key}"
            holder[key] = kept
            tried += 1
        if not is_open:
            holder["stranger"] = 1
            assert any("unknown field `stranger`" in line for line in check_report(whole)), place
            del holder["stranger"]
    assert check_report(whole) == []
    assert tried > 100


def walk(value):
    """The first dictionary at every place of a report, the keys that it needs, and whether it is open."""
    document = Document("report.json")
    for name, schema in document.known.items():
        if name not in document.places:
            continue
        found, place = value, document.places[name]
        for step in filter(None, re.split(r"\.|(?=\[\])", place)):
            if found is None:
                break
            found = first(found, step)
        if isinstance(found, dict):
            required = set(schema.get("required", ()))
            assert required <= set(found), place
            yield found, place, required, schema.get("additionalProperties") is not False


def first(found, step):
    if step == "[]":
        return next((item for item in found if item is not None), None)
    if step == "*":
        return next(iter(found.values()))
    return found.get(step)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda data: data.update(format=2), "format: 2"),
        (lambda data: data["verdict"].update(outcome=1), "verdict.outcome"),
        (lambda data: data["verdict"].update(headline=None), "verdict.headline"),
        (lambda data: data["verdict"]["findings"][0].update(level="fatal"), "verdict.findings[0].level"),
        (
            lambda data: data["parity"][0]["verdicts"][0]["sizes"].update(B=True),
            "parity[0].verdicts[0].sizes",
        ),
        (
            lambda data: data["latency"]["points"][0]["rows"][0]["timing"].update(p50_us=None),
            "latency.points[0].rows[0].timing.p50_us",
        ),
        (lambda data: data.update(notes="none"), "notes"),
        (lambda data: data.update(fault=[]), "fault"),
        (lambda data: data["conformance"]["rows"][0]["cells"].popitem(), "conformance: rows[0].cells"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(change, place):
    (line,) = problems_after(change)
    assert line.startswith(place)


@pytest.mark.parametrize("data", [None, [], "text", {}, {"format": 5}])
def test_anything_can_be_checked(data):
    assert check_report(data)
    assert check_bench(data)


def test_a_range_may_hold_further_figures():
    assert problems_after(lambda data: data["range"]["nodes"][0].update(largest_value=3.0)) == []


# -- plain data ------------------------------------------------------------------------------------


def test_numbers_that_are_not_finite_become_null():
    assert as_plain({"a": [float("nan"), float("inf"), -float("inf"), 1.5]}) == {"a": [None, None, None, 1.5]}


def test_arrays_and_tuples_become_lists():
    np = pytest.importorskip("numpy")
    plain = as_plain({"a": np.arange(2), "b": (np.float32(0.5), np.bool_(True)), "c": np.float64("nan")})
    assert plain == {"a": [0, 1], "b": [0.5, True], "c": None}


def test_a_name_that_is_no_text_is_spelled_out():
    assert as_plain("a\ud800") == "a\\ud800"


@pytest.mark.parametrize("make", [plain_report, plain_bench])
def test_data_that_does_not_keep_the_format_is_refused(make):
    with pytest.raises(DeployError, match="does not follow its format") as caught:
        make({"format": 5})
    assert "missing" in caught.value.got
