"""Reports and benchmarks on disk: the data, and beside it the page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mha_deploy.engine.record import write_atomically
from mha_deploy.report.page import bench_page, report_page
from mha_deploy.report.schema import plain_bench, plain_report


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
