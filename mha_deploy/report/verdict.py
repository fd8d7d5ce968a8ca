"""The top of the page: the verdict, what was found, and the run in a few facts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mha_deploy.report.engines import fusion_of
from mha_deploy.report.figures import NOTHING, budget_share, plural, short, times
from mha_deploy.report.markup import Html, join, tag
from mha_deploy.report.results import LAYERS
from mha_deploy.report.tables import facts

Data = Mapping[str, Any]

# The section of the page in which a finding is shown.
PLACES = {"precision": "fusion", "engine": "fusion"}

_LEVELS = ("failure", "warning", "note")


def verdict_block(data: Data, present: Collection[str]) -> Html:
    """The verdict with its findings and facts.

    Args:
        data: The report.
        present: The sections that the page has, for links.
    """
    verdict, model = data["verdict"], data["model"]
    word = "PASSED" if verdict["passed"] else "FAILED"
    title = tag(
        "h1",
        tag("span", f"{model['name']} ", class_="model"),
        tag("span", model["precision"], class_="muted"),
    )
    head = tag(
        "p",
        tag("strong", word),
        " ",
        tag("span", verdict["headline"], class_="headline"),
        id="verdict",
        class_="good" if verdict["passed"] else "bad",
    )
    summary = tag("p", model["summary"], class_="muted") if model["summary"] else None
    return tag(
        "header", title, summary, head, _findings(verdict["findings"], present), facts(_key_facts(data))
    )


def _findings(findings: list[Data], present: Collection[str]) -> Html | None:
    if not findings:
        return None
    ordered = sorted(findings, key=lambda finding: _LEVELS.index(finding["level"]))
    return tag("ul", *(_finding(finding, present) for finding in ordered), class_="findings")


def _finding(finding: Data, present: Collection[str]) -> Html:
    name, place = finding["section"], PLACES.get(finding["section"], finding["section"])
    about = tag("a", name, href=f"#{place}") if place in present else tag("span", name)
    return tag(
        "li",
        tag("span", finding["level"], class_=f"level {finding['level']}"),
        tag("span", about, class_="about"),
        tag("span", finding["text"]),
    )


def _key_facts(data: Data) -> list[tuple[str, object]]:
    gpu = data["environment"]["gpu"]
    return [
        ("attention", _attention(data["model"], data["parity"])),
        ("checked", _checked([run for run in data["parity"] if run["cases"] != LAYERS])),
        ("largest error", _largest(data["parity"])),
        ("fused", join(_fused(data["engines"]))),
        ("fastest engine", _fastest(data["latency"])),
        ("GPU", gpu["name"] if gpu else "none here"),
    ]


def _attention(model: Data, parity: list[Data]) -> str:
    """The heads of a layer; of a user's module, how many of its attentions are right."""
    spec = model["spec"]
    heads, shared, size = spec.get("Hq"), spec.get("Hkv"), spec.get("D")
    if heads and shared and size:
        return f"{model['kind']}, {heads}/{shared} heads of {size}"
    counts = [
        (sum(verdict["passed"] for verdict in run["verdicts"]), len(run["verdicts"]))
        for run in parity
        if run["cases"] == LAYERS
    ]
    if counts:
        right, of = min(counts)  # the runtime in which the fewest are
        return f"{model['kind']}, {right}/{of} attentions right"
    count = spec.get("attentions")
    return f"{model['kind']}, {plural(count, 'attention')}" if count else str(model["kind"])


def _checked(parity: list[Data]) -> str:
    verdicts = [verdict for run in parity for verdict in run["verdicts"]]
    good = sum(verdict["passed"] for verdict in verdicts)
    return f"{good} of {plural(len(verdicts), 'output')} right" if verdicts else "nothing was run"


def _largest(parity: list[Data]) -> str:
    verdicts = [verdict for run in parity for verdict in run["verdicts"]]
    if any(verdict["share"] is None and not verdict["passed"] for verdict in verdicts):
        return "not finite"
    shares = [verdict["share"] for verdict in verdicts if verdict["share"] is not None]
    return f"{budget_share(max(shares))} of its budget" if shares else NOTHING


def _fused(engines: list[Data]) -> list[object]:
    if not engines:
        return ["no engine"]
    return [tag("div", f"{each['name']}: {fusion_of(each)}, {each['precision_status']}") for each in engines]


def _fastest(latency: Data | None) -> str:
    """The best engine at the usual sizes, or else at the first that it was timed at."""
    points = latency["points"] if latency else []
    for point in sorted(points, key=lambda point: point["case"] != "opt"):
        rows = [row for row in point["rows"] if row["family"] == "tensorrt" and row["timing"]]
        if rows:
            best = min(rows, key=lambda row: row["timing"]["p50_us"])
            gain = best["speedup_over_best_pytorch"]
            against = f", {times(gain)} the speed of the best PyTorch" if gain else ""
            return f"{short(best['timing']['p50_us'])} µs at {point['case']}{against}"
    return "not timed"
