"""One self-contained page, and the files that are written."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mha_deploy.bundle.commit import refuse_foreign, write_atomically
from mha_deploy.report.schema import plain_bench, plain_report
from mha_deploy.report.sections import (
    Section,
    bench_sections,
    key_facts,
    ordered_findings,
    report_sections,
)
from mha_deploy.report.svg import Html, mark, palette_css, readable, series_of

# -- One HTML file that needs nothing else: no request, and no script but its own ------------------

_FOLDER = Path(__file__).resolve().parent


def report_page(data: Mapping[str, Any]) -> str:
    """The page of a validation run.

    Args:
        data: A report as docs/report.md describes it.
    """
    plain = plain_report(data)
    look = series_of([plain["latency"]])
    sections, absent = report_sections(plain, look)
    word, model = plain["verdict"]["outcome"].upper(), plain["model"]
    return _rendered(
        plain,
        title=f"{word}: {model['name']} {model['precision']}",
        report=plain,
        findings=ordered_findings(plain, [section.name for section in sections]),
        facts=key_facts(plain),
        sections=sections,
        absent=absent,
        look=look,
    )


def bench_page(data: Mapping[str, Any]) -> str:
    """The page of a benchmark.

    Args:
        data: A benchmark as docs/report.md describes it.
    """
    plain = plain_bench(data)
    look = series_of([entry["latency"] for entry in plain["models"]])
    gpu = plain["environment"]["gpu"]
    return _rendered(
        plain,
        title="Attention benchmark",
        subtitle=gpu["name"] if gpu else "no GPU",
        sections=bench_sections(plain, look),
        look=look,
    )


def sections_page(
    data: Mapping[str, Any],
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    *,
    passed: bool | None = None,
) -> str:
    """A page of sections.

    Args:
        data: What wrote it and when: `tool` and `created`.
        title: Its title.
        subtitle: The result in one line.
        sections: The sections.
        passed: The verdict; None where there is none.
    """
    return _rendered(data, title=title, subtitle=subtitle, sections=sections, passed=passed, look={})


def _rendered(plain: Mapping[str, Any], **context: Any) -> str:
    from jinja2 import Environment, FileSystemLoader  # here: only a page needs it

    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: readable(value) if type(value) is str else value,
    )
    script = (_FOLDER / "sort.js").read_text(encoding="utf-8").strip()
    style = palette_css() + "\n" + (_FOLDER / "style.css").read_text(encoding="utf-8").strip()
    # Nothing may be loaded, and no script may run but ours, even if an escape were forgotten.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{digest}'"
    )
    page = environment.get_template("page.html.j2").render(
        script=Html(script),
        style=Html(style),
        policy=policy,
        mark=mark,
        tool=plain["tool"],
        created=plain["created"],
        **context,
    )
    return page.strip() + "\n"


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
    refuse_foreign(folder, name)
    data_path, page_path = folder / f"{name}.json", folder / f"{name}.html"
    write_atomically(data_path, text.encode("utf-8"))
    write_atomically(page_path, page.encode("utf-8"))
    return data_path, page_path
