"""One self-contained page, and the files that are written."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mha_deploy.bundle.commit import write_atomically
from mha_deploy.report.schema import plain_bench, plain_report
from mha_deploy.report.sections import (
    attribute_fault,
    bench_overview,
    best_rows,
    closing,
    conformance,
    decode,
    engine_line,
    environment,
    fp16_range,
    fusion,
    heatmaps,
    invariance,
    latency,
    latency_parts,
    notes,
    parity,
    section,
    sentence,
    verdict_block,
)
from mha_deploy.report.svg import Html, join, palette_css, series_of, tag

# -- One HTML file that needs nothing else: no request, and no script to be read -------------------

_FOLDER = Path(__file__).resolve().parent


def report_page(data: Mapping[str, Any]) -> str:
    """The page of a validation run.

    Args:
        data: A report as docs/report.md describes it.
    """
    plain = plain_report(data)
    look = series_of([plain["latency"]])
    wanted = {
        "fault": ("What is at fault", attribute_fault(plain)),
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
    unmissed = {"fault", "notes"} | (set() if "cache" in plain["model"]["spec"] else {"decode"})
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


# -- Reports and benchmarks on disk: the data, and beside it the page ------------------------------


def write_report(folder: Path, data: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write `report.json` and `report.html`, and give their paths.

    Args:
        folder: Where to; it is made if it is not there.
        data: A report as docs/report.md describes it.
    """
    plain = plain_report(data)
    return _write(folder, "report", plain, report_page(plain))


def write_bench(folder: Path, data: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write `bench.json` and `bench.html`, and give their paths.

    Args:
        folder: Where to; it is made if it is not there.
        data: A benchmark as docs/report.md describes it.
    """
    plain = plain_bench(data)
    return _write(folder, "bench", plain, bench_page(plain))


def _write(folder: Path, name: str, plain: dict[str, Any], page: str) -> tuple[Path, Path]:
    # The page is made before anything is written: a failure leaves the old pair as it was.
    text = json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    data_path, page_path = folder / f"{name}.json", folder / f"{name}.html"
    write_atomically(data_path, text.encode("utf-8"))
    write_atomically(page_path, page.encode("utf-8"))
    return data_path, page_path
