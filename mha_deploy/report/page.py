"""The page: its sections with their tables, charts and words, which the templates lay out."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from markupsafe import Markup

from mha_deploy.output import GENERATOR
from mha_deploy.report import charts
from mha_deploy.report import table as tables
from mha_deploy.report.charts import Data, Look
from mha_deploy.status import CaseKind, Outcome
from mha_deploy.text import (
    NOTHING,
    budget_share,
    group_by,
    plural,
    point_name,
    short,
    size,
    sizes_text,
    summarize_names,
    times,
    yes_no,
)
from mha_deploy.validation.records import plain_bench, plain_report
from mha_deploy.validation.runtimes import Family

Part = tuple[str, Any]
"""The kind of a part, as `parts.html.j2` lists them, and its value; a part without a value is left out."""


class PageSection(NamedTuple):
    """A section of the page."""

    name: str
    title: str
    parts: Sequence[Part]


class JUnitTest(NamedTuple):
    """One test case of JUnit XML."""

    place: Sequence[str]  # from the outermost one
    name: str
    outcome: Outcome
    words: str


def junit(command: str, results: Sequence[JUnitTest]) -> str:
    """JUnit XML of what a command judged: what failed is a failure, what is not verified is skipped."""
    count = Counter(each.outcome for each in results)
    counts = {"tests": len(results), "failures": count[Outcome.FAILED], "errors": 0}
    counts["skipped"] = count[Outcome.NOT_VERIFIED]
    shown = {name: str(number) for name, number in counts.items()}
    suite = ElementTree.Element("testsuite", {"name": f"mha-deploy {command}", **shown})
    for each in results:
        place, words = ".".join(filter(None, ("mha-deploy", *each.place))), charts.readable(each.words)
        names = {"classname": charts.readable(place), "name": charts.readable(each.name)}
        case = ElementTree.SubElement(suite, "testcase", names)
        if each.outcome is Outcome.FAILED:
            failure = ElementTree.SubElement(case, "failure", message=words, type=each.place[-1])
            failure.text = words
        elif each.outcome is Outcome.NOT_VERIFIED:
            ElementTree.SubElement(case, "skipped", message=words)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


# -- Whether results are right ---------------------------------------------------------------------


def _checks(built: tables.Table) -> list[Part]:
    """What is not as it should be, in full; then every group of what is, folded to one line."""
    notable, quiet = tables.split_passed(built)
    folds = []
    for each in quiet:
        (group,) = each.groups
        shown = replace(each, groups=[replace(group, title="", about="")])
        words = group.about or tables.passed_words(each)
        folds.append(("fold", {"name": group.title or built.title, "caption": words, "table": shown}))
    return [("table", notable), *folds]


def _fault(found: Data) -> list[Part]:
    return [("fault", found), ("table", found["trials"] and tables.trials_table(found["trials"]))]


def _parity(data: Data) -> list[Part]:
    if not data["parity"]:
        reasons = [engine["why_not"] for engine in data["engines"] if engine["why_not"]]
        return [("text", f"No result was compared{f': {reasons[0]}' if reasons else ' in this run'}.")]
    note = (
        "Errors are relative to the FP64 oracle. A budget is three times the largest error that random "
        "rounding causes in the source model."
    )
    runs = [run for run in data["parity"] if run["cases"] != CaseKind.LAYERS]
    inside = [run for run in data["parity"] if run["cases"] == CaseKind.LAYERS and run["verdicts"]]
    whole = _checks(tables.parity_table(runs)) if runs else []
    return [("lead", note), *whole, *(_checks(tables.layers_table(inside)) if inside else [])]


def _user_data(found: Data) -> list[Part]:
    note = (
        "Errors of every sample are relative to the FP64 reference. The original is the source model itself."
    )
    return [("lead", note), ("table", tables.data_table(found)), ("table", tables.worst_table(found))]


_LOSS = (
    "Loss is the intended difference between the compressed model and the original, both in FP64. It has the "
    "limit that its user set. Parity above is the error of the runtimes against the compressed model."
)


def _loss(found: Data) -> list[Part]:
    return [
        ("lead", _LOSS),
        ("table", tables.loss_table(found)),
        ("table", tables.sensitivity_table(found)),
        *([("table", tables.search_table(found))] if found["search"] else []),
    ]


def _heatmaps(maps: Sequence[Data]) -> list[Part]:
    scale = charts.heat_scale(maps)
    figures = []
    for each in maps:
        if (chart := charts.heatmap(each, scale)) is not None:
            note = f". {each['note'][:1].upper()}{each['note'][1:]}" if each["note"] else ""
            caption = f"{each['case']}, {each['output']}{note}"
            figures.append({"name": each["runtime"], "caption": caption, "chart": chart})
    if not figures:
        return [("text", "The maps have no cells.")]
    lead = "All maps share one scale. Numbers appear under the pointer."
    return [("lead", lead), ("markup", charts.heat_legend(maps, scale)), ("charts", figures)]


_DECODE = (
    "A prompt, then decode steps. Every step is compared with the FP64 oracle, which has no cache, and so "
    "are the keys and values in the cache at the end. Growth is the median error of the last tenth of the "
    "steps over that of the first; it should be about that of eager PyTorch."
)


def _decode(reports: Sequence[Data], latency: Data | None, look: Look) -> list[Part]:
    parts: list[Part] = [("lead", _DECODE), *_checks(tables.decode_table(reports))]
    for same in group_by(reports, lambda report: report["trace"]):
        curves = charts.decode_curves(same)
        wrong = [report["first_failed"] for report in same if report["first_failed"]]
        chart = charts.decode_chart(curves, wrong, charts.decode_look(list(curves), latency, look))
        words = "Relative L2 by step"
        if max(map(len, curves.values())) >= charts.POOLED_FROM:
            words += "; thin lines are single steps, thick ones medians"
        words += "; a dashed line is the first wrong step" if wrong else ""
        figure = {"caption": words, "chart": chart, "otherwise": "No step gave anything to measure."}
        parts += [("heading", f"Trace {same[0]['trace']}"), ("figure", figure)]
        if (steps := tables.steps_table(same)) is not None:
            parts.append(("fold", {"name": "", "caption": steps.title, "table": steps}))
    return parts


def _conformance(found: Data) -> list[Part]:
    shown = _checks(tables.conformance_table(found))
    return [*shown, ("reasons", tables.conformance_reasons(found))]


def _fp16_range(found: Data) -> list[Part]:
    """Whether the numbers fit into FP16, with advice once for all attentions that it is the same for."""
    if not found["nodes"]:
        return [("text", "The graph has no attention node to measure.")]
    reasons = []
    for alike in group_by(found["nodes"], _range_kinds):
        if len(set(map(_range_words, alike))) > 1:  # the numbers that are shown are those of the worst
            alike.sort(key=lambda node: float("inf") if node["headroom"] is None else node["headroom"])
        if words := _range_words(alike[0]):
            reasons.append((summarize_names([node["node"] for node in alike]), f": {words}"))
    why: list[Part] = []
    if (own := found["precision"]) != "fp16":
        why = [("text", f"Whether the numbers would fit into FP16, and whether {own} resolves the scores.")]
    return [*why, *_checks(tables.range_table(found["nodes"])), ("reasons", reasons)]


def _range_kinds(node: Data) -> tuple[object, ...]:
    """What is found of a node, without the numbers."""
    return tuple((each["status"], each["kind"], each["name"], *each["numbers"]) for each in node["findings"])


def _range_words(node: Data) -> str:
    parts = ["; ".join(finding["what"] for finding in node["findings"]), "; ".join(node["advice"])]
    return ". Advice: ".join(part for part in parts if part)


def _fusion(data: Data) -> list[Part]:
    engines, findings = data["engines"], data["verdict"]["findings"]
    if data["subjects"]:
        return [("table", tables.subjects_table(data["subjects"]))]
    if not engines and data["serving"]:
        runs = ", ".join(data["serving"][0]["runs"])
        what = f"{runs}, as the server's configuration says" if runs else "what it runs is not known"
        return [("text", f"The model was judged through a server: {what}.")]
    if not engines:
        reasons = [finding["text"] for finding in findings if finding["section"] == "engine"]
        return [("text", f"There is no engine: {reasons[0]}." if reasons else "The bundle has no engine.")]
    parts: list[Part] = _checks(tables.fusion_table(engines))
    for engine in (each for each in engines if not each["ran"]):
        why = engine["why_not"] or "no reason was given"
        parts.append(("text", f"{engine['name']} was not run: {why}."))
    return parts


# -- How fast everything is ------------------------------------------------------------------------


def _latency(data: Data, look: Look) -> list[Part]:
    found = data["latency"]
    if found is not None and found["points"]:
        return latency_parts(found, look)
    if (served := _served_latency(data)) is not None:
        return [("text", f"Measured by the clients of the server: {served}.")]
    reasons = [each["text"] for each in data["verdict"]["findings"] if each["section"] == "latency"]
    if data["environment"]["gpu"] is None:
        reasons.append("there is no NVIDIA GPU on this machine")
    reasons += [engine["why_not"] for engine in data["engines"] if engine["why_not"]]
    return [("text", f"Nothing was timed {f'here: {reasons[0]}' if reasons else 'in this run'}.")]


def _served_latency(data: Data) -> str | None:
    """The latency of a server with its fewest clients; None without one."""
    timed = [point for point in data["serving"] if point["p50_ms"] is not None]
    if not timed:
        return None
    point = min(timed, key=lambda each: each["clients"])
    figures = f"p50 {short(point['p50_ms'])} ms, p99 {short(point['p99_ms'])} ms"
    return f"{figures} with {plural(point['clients'], 'client')}"


def latency_parts(found: Data, look: Look) -> list[Part]:
    """The charts and tables of one model."""
    points = found["points"]
    where = f" on {found['gpu']}" if found["gpu"] else ""
    lead = f"Device time of one call{where}. Bars end at p50, whiskers reach to p90 and p99."
    counts = [row["timing"]["samples"] for point in points for row in point["rows"] if row["timing"]]
    if counts:
        low, high = min(counts), max(counts)
        lead += f" {low if low == high else f'{low} to {high}'} samples each."
    lead += " The roofline bound follows from the datasheet's peak rates; it is not a prediction."
    log = charts.needs_log(points)
    bars = []
    for point in points:
        refused = [(row["name"], row["refused"]) for row in point["rows"] if row["refused"] is not None]
        drawn = {"chart": charts.latency_bars(point, look, log=log), "refused": refused}
        bars.append({**_named(point), **drawn, "otherwise": "Nothing was timed at this size."})
    parts: list[Part] = [("lead", lead), ("heading", "By size"), ("charts", bars)]
    curves = []
    for panel in charts.sweep_panels(points) if len(points) > 1 else ():
        if (chart := charts.sweep_chart(panel, look)) is not None:
            caption = f"{f' at {sizes_text(panel.fixed)}' if panel.fixed else ''}, µs"
            curves.append({"name": f"p50 over {panel.axis}", "caption": caption, "chart": chart})
    parts += [("heading", curves and "Over lengths and batches"), ("charts", curves)]
    if plots := charts.roofline_plots(points, look):
        words = (
            "Each column is one size. The line is the roof of the GPU; the short bar in a column is the "
            f"bound of this layer, whose stages run one after the other. {charts.roofline_summary(points)}"
        )
        timed = {row["name"] for point in points for row in point["rows"] if row["timing"]}
        parts += [("heading", "Roofline"), ("lead", words), ("legend", [n for n in look if n in timed])]
        parts += [("figure", {"css": "wide", "chart": plot}) for plot in plots]
    parts += [("heading", "All figures"), ("table", tables.latency_table(points))]
    profiled = [point for point in points if any(row["kernels"] for row in point["rows"])]
    parts.append(("heading", profiled and "Longest kernels"))
    for index, point in enumerate(profiled):
        parts.append(("fold", {**_named(point), "table": tables.kernels_table(point), "open": index == 0}))
    return parts


def _named(point: Data) -> dict[str, str]:
    """The name of a point and its sizes, the first of them in bold."""
    name, sizes = point_name(point["case"], point["sizes"]), tables.point_sizes(point)
    return {"name": name, "caption": sizes} if name else {"name": sizes, "caption": ""}


def _overview(data: Data) -> list[Part]:
    table, points = tables.overview_table(data), [point for _, point in tables.bench_points(data)]
    if table is None:
        return [("text", "Nothing was timed.")]
    note, best = tables.without_graph(points), Counter(filter(None, map(tables.fastest, points)))
    wins = ", ".join(f"{name} {count}" for name, count in best.most_common())
    won = wins and f"Fastest, of {best.total()} sizes: {wins}."
    copies = [("Markdown", bench_markdown(data)), ("tab-separated values", tables.tsv(table))]
    return [("table", table), ("text", note and f"* {note}"), ("text", won), ("copies", copies)]


def bench_markdown(data: Data) -> str:
    """A Markdown table: p50 in µs, the fastest in bold, the roofline bound; an asterisk for no CUDA graph."""
    plain = plain_bench(data)
    table = tables.overview_table(plain)
    note = tables.without_graph([point for _, point in tables.bench_points(plain)])
    below = f"\n\\* {tables.markdown_text(note)}\n" if note else ""
    return (tables.markdown(table) if table else "Nothing was timed.\n") + below


# -- The machine, the model and the run at a glance ------------------------------------------------


def _command(tool: Data) -> list[Part]:
    """What was typed; nothing where the result was made in Python."""
    return [("copies", [("command", shlex.join(tool["command"]))])] if tool.get("command") else []


_SPEC = {
    # A catalog layer
    "Hq": "query heads",
    "Hkv": "key/value heads",
    "D": "head size",
    "E": "model width",
    "variant": "variant of the layer",
    "attends": "attends to",
    "bias": "bias in projections",
    "scale": "scale of scores",
    "weights": "returns attention weights",
    "sparse_heads": "sparse heads",
    "grouped_mlp": "grouped MLP",
    "rope": "rotary embedding",
    "cache": "KV cache",
    "top_k": "heads per token",
    "renormalise": "renormalized",
    "hidden": "hidden width",
    "dims": "rotated numbers",
    "low_freq_factor": "low-frequency factor",
    "high_freq_factor": "high-frequency factor",
    "original_length": "original length",
    # A module or an ONNX file
    "tensors_in": "inputs",
    "tensors_out": "outputs",
    "cached": "KV cache, input to output",
    "entries": "axis of cache entries",
    "positions": "inputs with positions",
    "longest": "longest sequence",
    "flops": "FLOP per call",
    "weight_bytes": "bytes of weights",
    "state_sha256": "weights SHA-256",
    "weights_file": "file of weights",
    "weights_prefix": "prefix of weights",
    "mixed": "mixed precision",
}
"""Fields of a spec whose name is no word, in words."""

_UNKNOWN_AT_0 = frozenset({"longest", "flops", "weight_bytes"})


def environment(tool: Data, found: Data, model: Data | None) -> list[Part]:
    """What a reader needs to reproduce it: command, machine, versions, and the model with its bundle."""
    gpu = found["gpu"]
    machine = [("GPU", gpu["name"] if gpu else "none")]
    if gpu:
        machine.append(("compute capability", gpu["compute_capability"]))
        machine += [("second-level cache", size(gpu["l2_bytes"])), ("memory", size(gpu["memory_bytes"]))]
    machine += [("driver", found["driver"] or NOTHING), ("platform", found["platform"])]
    versions = {"Python": found["python"], **{k: v for k, v in found["versions"].items() if k != "python"}}
    parts: list[Part] = [*_command(tool), ("heading", "Machine"), ("pairs", machine)]
    parts += [("heading", "Versions"), ("pairs", list(versions.items()))]
    if model is not None:
        known = [("bundle", model["bundle"]), ("manifest SHA-256", model["bundle_sha256"])]
        known.append(("origin of weights", model["weights"]))
        spec = {key: value for key, value in model["spec"].items() if key not in ("name", "summary")}
        spec = {key: value for key, value in spec.items() if value != 0 or key not in _UNKNOWN_AT_0}
        shown = {_SPEC.get(key, key): _value(value) for key, value in spec.items()}
        known += [(name, text) for name, text in shown.items() if text not in ("", NOTHING)]
        parts += [("heading", "Model"), ("pairs", known)]
    return parts


def _value(value: object) -> str:
    """A value of a spec on one line; the range of an axis as min:opt:max, a tensor with its dimensions."""
    if isinstance(value, Mapping):
        if set(value) == {"min", "opt", "max"}:
            return f"{value['min']}:{value['opt']}:{value['max']}"
        if set(value) == {"name", "kind", "dims"}:
            return f"{value['name']} {value['kind']} [{', '.join(map(str, value['dims']))}]"
        return ", ".join(f"{_SPEC.get(key, key)} {_value(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return "; ".join(map(_value, value)) or NOTHING
    if isinstance(value, bool):
        return yes_no(value)
    return NOTHING if value is None or value == "" else str(value)


def key_figures(data: Data) -> list[tuple[str, str | list[str]]]:
    """The run in a few figures."""
    gpu, runs = data["environment"]["gpu"], data["parity"]
    judged = [verdict for run in runs if run["cases"] != CaseKind.LAYERS for verdict in run["verdicts"]]
    right = sum(verdict["outcome"] == Outcome.PASSED for verdict in judged)
    every = [verdict for run in runs for verdict in run["verdicts"]]
    shares = [verdict["share"] for verdict in every if verdict["share"] is not None]
    largest = f"{budget_share(max(shares))} of its budget" if shares else NOTHING
    if any(verdict["share"] is None and verdict["outcome"] == Outcome.FAILED for verdict in every):
        largest = "not finite"
    fused = [f"{each['name']}: {tables.engine_summary(each)}" for each in data["engines"]]
    return [
        ("attention", _attention(data["model"], runs)),
        ("checked", f"{right} of {plural(len(judged), 'output')} right" if judged else "nothing was run"),
        ("largest error", largest),
        ("fused", fused or ("not known of a server" if data["serving"] else "no engine")),
        ("fastest engine", _served_latency(data) or _fastest_engine(data["latency"])),
        ("GPU", gpu["name"] if gpu else "none"),
    ]


def _attention(model: Data, parity: Sequence[Data]) -> str:
    """The heads of a layer; of a user's module, how many of its attentions are right."""
    spec = model["spec"]
    heads, shared, width = spec.get("Hq"), spec.get("Hkv"), spec.get("D")
    if heads and shared and width:
        return f"{model['kind']}, {heads}/{shared} heads of {width}"
    inside = [run["verdicts"] for run in parity if run["cases"] == CaseKind.LAYERS]
    if inside:  # the runtime in which the fewest are right
        right, of = min(
            (sum(each["outcome"] == Outcome.PASSED for each in verdicts), len(verdicts))
            for verdicts in inside
        )
        return f"{model['kind']}, {right}/{of} attentions right"
    count = spec.get("attentions")
    return f"{model['kind']}, {plural(count, 'attention')}" if count else str(model["kind"])


def _fastest_engine(latency: Data | None) -> str:
    """The best engine at the usual sizes, or else at the first that it was timed at."""
    for point in sorted(latency["points"] if latency else [], key=lambda point: point["case"] != "opt"):
        rows = [row for row in point["rows"] if row["family"] == Family.TENSORRT and row["timing"]]
        if rows:
            best = min(rows, key=lambda row: row["timing"]["p50_us"])
            gain = best["speedup_over_best_pytorch"]
            against = f", {times(gain)} the speed of the best PyTorch baseline" if gain else ""
            return f"{short(best['timing']['p50_us'])} µs at {point['case']}{against}"
    return "not timed"


# -- One HTML file that needs nothing else: no request, and no script but its own ------------------

_FOLDER = Path(__file__).resolve().parent


def report_page(data: Data) -> str:
    """The page of a validation run."""
    data = plain_report(data)
    look = charts.series_of([data["latency"]])

    def section(name: str, title: str, make: Callable[[Any], list[Part]], key: str = "") -> PageSection:
        found = data[key or name]
        return PageSection(name, title, make(found) if found else [])

    every = [
        section("fault", "What is at fault", _fault),
        PageSection("parity", "Parity", _parity(data)),
        section("loss", "Loss of compression", _loss),
        section("data", "Your data", _user_data),
        section("maps", "Error maps", _heatmaps, "heatmaps"),
        section("decode", "Decode", lambda reports: _decode(reports, data["latency"], look)),
        section("invariance", "Invariance", lambda checks: _checks(tables.invariance_table(checks))),
        section("conformance", "Mask conformance", _conformance),
        section("range", "FP16 range", _fp16_range),
        PageSection("fusion", "Engines and fusion", _fusion(data)),
        PageSection("latency", "Latency", _latency(data, look)),
        section("serving", "Serving", lambda points: [("table", tables.serving_table(points))]),
        PageSection("notes", "Notes", [("list", notes)] if (notes := tables.shown_notes(data)) else []),
        section("environment", "Reproduce", lambda found: environment(data["tool"], found, data["model"])),
    ]
    optional = {"fault", "notes", "serving", "data", "loss"} | (
        set() if "cache" in data["model"]["spec"] else {"decode"}
    )
    absent = [each.title for each in every if not each.parts and each.name not in optional]
    sections = [each for each in every if each.parts]
    levels, places = ("failure", "warning", "note"), {"precision": "fusion", "engine": "fusion"}
    places |= {each.name: each.name for each in sections}
    shown = sorted(tables.shown_findings(data["verdict"]), key=lambda each: levels.index(each["level"]))
    findings = [
        {
            **each,
            "text": each["text"].removeprefix(f"{each['section']} "),  # it stands before the text
            "place": places.get(each["section"], ""),
        }
        for each in shown
    ]
    model, figures = data["model"], key_figures(data)
    title = f"{data['verdict']['outcome'].upper()}: {model['name']} {tables.types_of(data)}"
    context = {"title": title, "report": data, "findings": findings, "figures": figures, "absent": absent}
    return _rendered(data, sections=sections, look=look, **context)


def bench_page(data: Data) -> str:
    """The page of a benchmark."""
    data = plain_bench(data)
    look = charts.series_of([entry["latency"] for entry in data["models"]])
    sections = [PageSection("overview", "Overview", _overview(data))]
    for index, entry in enumerate(data["models"]):
        name, found = f"{entry['model']['name']} {entry['model']['precision']}", entry["latency"]
        timed = latency_parts(found, look) if found and found["points"] else [("text", "Nothing was timed.")]
        engines = [
            f"{engine['name']} {engine['version']}: {tables.engine_summary(engine)}"
            for engine in entry["engines"]
        ]
        parts = [("text", entry["model"]["summary"]), ("text", "; ".join(engines) or "0 engines"), *timed]
        parts.append(("table", entry["throughput"] and tables.throughput_table(entry["throughput"])))
        sections.append(PageSection(f"model-{index}", name, parts))
    notes = tables.bench_notes(data["models"])
    sections += [PageSection("notes", "Notes", [("list", notes)])] if notes else []
    reproduce = environment(data["tool"], data["environment"], None)
    sections.append(PageSection("environment", "Reproduce", reproduce))
    gpu = data["environment"]["gpu"]
    subtitle = gpu["name"] if gpu else "no GPU"
    return _rendered(data, title="Attention benchmark", subtitle=subtitle, sections=sections, look=look)


def sections_page(data: Data, title: str, parts: Mapping[str, Sequence[Part]]) -> str:
    """A page with a section for every heading; `data` has the verdict, what wrote it, and when."""
    sections = [PageSection(f"section-{i}", heading, each) for i, (heading, each) in enumerate(parts.items())]
    about = environment(data["tool"], data["environment"], None)
    sections.append(PageSection("environment", "Reproduce", about))
    shown = {"title": title, "subtitle": data["headline"], "outcome": data["outcome"]}
    return _rendered(data, sections=sections, look={}, **shown)


@cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader  # here: only a page needs it

    return Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: charts.readable(value) if type(value) is str else value,
    ).get_template("page.html.j2")


def _legend(sections: Sequence[PageSection]) -> dict[str, str]:
    """What the columns of a page hold, by heading; those that the data names are one line."""
    shown = [value for each in sections for kind, value in each.parts if value and kind in ("table", "fold")]
    columns = [each for one in shown for each in (one["table"] if isinstance(one, dict) else one).columns]
    names: dict[str, list[str]] = {}
    for each in columns:
        known = names.setdefault(each.about, [])
        known.extend([each.name] if each.about and each.name not in known else [])
    lines = ((summarize_names(found), about) for about, found in names.items() if found)
    return dict(sorted(lines, key=lambda line: line[0].casefold()))


def _rendered(plain: Data, sections: Sequence[PageSection], **context: Any) -> str:
    script = (_FOLDER / "sort.js").read_text(encoding="utf-8").strip()
    style = charts.palette_css() + "\n" + (_FOLDER / "style.css").read_text(encoding="utf-8").strip()
    # Nothing may be loaded, and no script may run but ours, even if an escape were forgotten.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{digest}'"
    )
    context |= {"script": Markup(script), "style": Markup(style), "policy": policy, "mark": charts.mark}
    context["generator"] = Markup(f'{GENERATOR} {charts.readable(plain["tool"]["version"])}">')
    context |= {"sections": sections, "legend": _legend(sections)}
    page: str = _template().render(tool=plain["tool"], created=plain["created"], **context)
    return page.strip() + "\n"
