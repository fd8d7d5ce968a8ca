"""What `report.json` and `bench.json` hold.

This description is the only one: the checker walks it, the writer refuses what the checker refuses, and the
tables of docs/report.md are made from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mha_deploy.errors import DeployError
from mha_deploy.report.fields import TEXT, TEXTS, WHOLE, field, list_of, maybe
from mha_deploy.report.fields_results import (
    BLAME,
    CONFORMANCE,
    DECODE,
    ENVIRONMENT,
    HEATMAP,
    INVARIANCE,
    MODEL,
    PARITY,
    RANGE,
    VERDICT,
)
from mha_deploy.report.fields_speed import ENGINE, LATENCY
from mha_deploy.report.plain import as_plain
from mha_deploy.report.shape import Record, records

FORMAT = 1

_HEAD = {
    "format": field(WHOLE, f"{FORMAT}; any other number is refused"),
    "tool": field(
        Record(fields={"name": field(TEXT, "`mha-deploy`"), "version": field(TEXT, "its version")}),
        "what wrote it",
    ),
    "created": field(TEXT, "when, in UTC, as `2026-01-31T12:00:00Z`"),
}

_MODEL = field(Record(fields=MODEL), "the layer and its bundle")
_ENVIRONMENT = field(Record(fields=ENVIRONMENT), "where it ran")
_ENGINES = list_of(ENGINE, "the engines that were built or found")
_LATENCY = maybe(Record(fields=LATENCY), "what was timed; null where nothing was")
_NOTES = field(TEXTS, "what else a reader should know")

REPORT = Record(
    fields={
        **_HEAD,
        "verdict": field(Record(fields=VERDICT), "the result"),
        "model": _MODEL,
        "environment": _ENVIRONMENT,
        "parity": list_of(PARITY, "errors against the FP64 oracle, one for every runtime and set of inputs"),
        "heatmaps": list_of(HEATMAP, "where the errors lie"),
        "decode": list_of(
            DECODE, "prefill and single tokens, one for every runtime and trace; empty without a cache"
        ),
        "invariance": list_of(INVARIANCE, "whether results hang on what must not matter"),
        "conformance": maybe(
            Record(fields=CONFORMANCE), "masks as ONNX defines them; null where it was not asked for"
        ),
        "range": maybe(
            Record(fields=RANGE), "whether FP16 can hold the numbers; null where it was not asked for"
        ),
        "blame": maybe(Record(fields=BLAME), "what a failure comes from; null where nothing failed"),
        "engines": _ENGINES,
        "latency": _LATENCY,
        "notes": _NOTES,
    }
)

BENCH = Record(
    fields={
        **_HEAD,
        "environment": _ENVIRONMENT,
        "models": list_of(
            {"model": _MODEL, "engines": _ENGINES, "latency": _LATENCY}, "one for every model and precision"
        ),
        "notes": _NOTES,
    }
)


def check_report(data: Any) -> list[str]:
    """What is wrong with the data of a report, one line each; nothing if it keeps the format."""
    return list(_problems(data, REPORT)) or list(_conformance_problems(data))


def check_bench(data: Any) -> list[str]:
    """What is wrong with the data of a benchmark, one line each; nothing if it keeps the format."""
    return list(_problems(data, BENCH))


def plain_report(data: Any) -> dict[str, Any]:
    """The data of a report in plain types; an error if it does not keep the format."""
    plain = as_plain(data)
    return _refuse("report", plain, check_report(plain))


def plain_bench(data: Any) -> dict[str, Any]:
    """The data of a benchmark in plain types; an error if it does not keep the format."""
    plain = as_plain(data)
    return _refuse("benchmark", plain, check_bench(plain))


def schema_markdown() -> str:
    """The tables of docs/report.md: one for all records of the same fields, where they are first met."""
    report: dict[int, tuple[str, Record]] = {}
    for place, record in records(REPORT):
        report.setdefault(id(record.fields), (place, record))
    bench = [(place, record) for place, record in records(BENCH) if id(record.fields) not in report]
    files = (("report.json", [*report.values()]), ("bench.json", bench))
    return "\n".join(f"## {name}\n\n{_tables(found)}" for name, found in files)


def _problems(data: Any, schema: Record) -> Iterator[str]:
    if isinstance(data, dict) and data.get("format", FORMAT) != FORMAT:
        yield f"format: {data['format']!r} is not {FORMAT}"
        return
    yield from schema.problems(data, "")


def _conformance_problems(data: Any) -> Iterator[str]:
    """A row whose cells are not those of the columns."""
    for index, row in enumerate((data["conformance"] or {}).get("rows", [])):
        if set(row["cells"]) != set(data["conformance"]["columns"]):
            yield f"conformance.rows[{index}].cells: not one for every column"


def _refuse(what: str, plain: Any, problems: list[str]) -> dict[str, Any]:
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise DeployError(
            f"The {what} does not keep its format.",
            got="; ".join(problems[:3]) + more,
            hint="docs/report.md lists every field",
        )
    return dict(plain)


def _tables(found: list[tuple[str, Record]]) -> str:
    return "\n".join(_table(place, record) for place, record in found)


def _table(place: str, record: Record) -> str:
    lines = [f"### `{place}`", ""] if place else []
    lines += ["| key | type | what |", "|---|---|---|"]
    lines += [f"| `{key}` | {item.shape.label} | {_cell(item.what)} |" for key, item in record.fields.items()]
    return "\n".join([*lines, ""])


def _cell(words: str) -> str:
    """A bar would end the cell of a Markdown table."""
    return words.replace("|", "\\|")
