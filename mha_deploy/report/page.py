"""One HTML file that needs nothing else: no request, and no script to be read."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mha_deploy.report.bench import bench_overview, best_rows
from mha_deploy.report.decode import decode
from mha_deploy.report.engines import engine_line, fusion
from mha_deploy.report.latency import latency, latency_parts
from mha_deploy.report.markup import Html, join, tag
from mha_deploy.report.palette import palette_css, series_of
from mha_deploy.report.results import blame, conformance, fp16_range, heatmaps, invariance, parity
from mha_deploy.report.schema import plain_bench, plain_report
from mha_deploy.report.surroundings import closing, environment, notes
from mha_deploy.report.tables import section, sentence
from mha_deploy.report.verdict import verdict_block

_FOLDER = Path(__file__).resolve().parent


def report_page(data: Mapping[str, Any]) -> str:
    """The page of a validation run.

    Args:
        data: A report as docs/report.md describes it.
    """
    plain = plain_report(data)
    look = series_of([plain["latency"]])
    wanted = {
        "blame": ("What is at fault", blame(plain)),
        "parity": ("Parity", parity(plain)),
        "maps": ("Error maps", heatmaps(plain)),
        "decode": ("Decode", decode(plain, look)),
        "invariance": ("Invariance", invariance(plain)),
        "conformance": ("Mask conformance", conformance(plain)),
        "range": ("FP16 range", fp16_range(plain)),
        "fusion": ("Fusion", fusion(plain["engines"], plain["verdict"]["findings"])),
        "latency": ("Latency", latency(plain, look)),
        "notes": ("Notes", notes(plain["notes"])),
        "environment": ("Environment", environment(plain, model=plain["model"])),
    }
    present = {name: title for name, (title, part) in wanted.items() if part is not None}
    unmissed = {"blame", "notes"} | (set() if "cache" in plain["model"]["spec"] else {"decode"})
    absent = [title for name, (title, part) in wanted.items() if part is None and name not in unmissed]
    head = join([verdict_block(plain, present), contents(list(present.items()))])
    body = tag(
        "main",
        head,
        *(part for _, part in wanted.values()),
        closing(plain, absent),
        data_verdict="passed" if plain["verdict"]["passed"] else "failed",
    )
    word = "PASSED" if plain["verdict"]["passed"] else "FAILED"
    return document(f"{word}: {plain['model']['name']} {plain['model']['precision']}", body)


def bench_page(data: Mapping[str, Any]) -> str:
    """The page of a benchmark.

    Args:
        data: A benchmark as docs/report.md describes it.
    """
    plain = plain_bench(data)
    look = series_of([entry["latency"] for entry in plain["models"]])
    names = [f"{entry['model']['name']} {entry['model']['precision']}" for entry in plain["models"]]
    gpu = plain["environment"]["gpu"]
    places = [("overview", "Overview"), *((f"model-{i}", name) for i, name in enumerate(names))]
    head = tag(
        "header", tag("h1", "Attention benchmark"), tag("p", gpu["name"] if gpu else "no GPU", class_="muted")
    )
    parts = [_model_section(f"model-{i}", names[i], entry, look) for i, entry in enumerate(plain["models"])]
    body = tag(
        "main",
        head,
        contents([*places, ("environment", "Environment")]),
        section("overview", "Overview", bench_overview(plain, look), best_rows(plain)),
        *parts,
        notes(plain["notes"]),
        environment(plain, model=None),
        closing(plain, []),
    )
    return document("Attention benchmark", body)


def _model_section(name: str, title: str, entry: Mapping[str, Any], look: Any) -> Html:
    found = entry["latency"]
    timed = latency_parts(found, look) if found and found["points"] else [sentence("Nothing was timed.")]
    return section(
        name, title, sentence(entry["model"]["summary"]), sentence(engine_line(entry["engines"])), *timed
    )


def contents(places: Sequence[tuple[str, str]]) -> Html:
    """Links to the sections."""
    links = [tag("li", tag("a", title, href=f"#{name}")) for name, title in places]
    return tag("nav", tag("ul", *links), aria_label="Sections")


def document(title: str, body: Html) -> str:
    """The whole file around its body."""
    script = (_FOLDER / "sort.js").read_text(encoding="utf-8").strip()
    style = palette_css() + "\n" + (_FOLDER / "style.css").read_text(encoding="utf-8").strip()
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Html(style)),
    )
    whole = tag("html", head, tag("body", body, tag("script", Html(script))), lang="en")
    return f"<!doctype html>\n{whole}\n"


def _policy(script: str) -> str:
    """Nothing may be loaded, and no script may run but ours, even if an escape were forgotten."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{digest}'"
    )
