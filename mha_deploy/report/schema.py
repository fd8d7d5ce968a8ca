"""The fields of report.json, checked before it is written; docs/report.md says what each means."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from mha_deploy.errors import DeployError
from mha_deploy.judge import OutputVerdict
from mha_deploy.report.table import as_plain
from mha_deploy.requirements import Requirement
from mha_deploy.status import Finding, Gap, Outcome
from mha_deploy.validate.data import DataRecord
from mha_deploy.validate.fault import FaultReport
from mha_deploy.validate.invariance import InvarianceCheck
from mha_deploy.validate.subjects import SubjectRecord
from mha_deploy.validate.verdict import REPORT_FORMAT

Keys = dict[Any, str]
"""The names of keys, by their type."""


def record(needed: Keys, optional: Keys | None = None, *, is_open: bool = False) -> Any:
    """A dictionary with these keys; optional ones are None where missing, and only an open one has others."""
    fields: list[Any] = [(name, kind) for kind, names in needed.items() for name in names.split()]
    for kind, names in (optional or {}).items():
        fields += [(name, kind | None, None) for name in names.split()]
    return msgspec.defstruct("Record", fields, kw_only=True, forbid_unknown_fields=not is_open)


def many(kind: Any, *key: type) -> Any:
    """A list of records, or a dictionary of them by key."""
    return types.GenericAlias(dict if key else list, (*key, kind))


# What may be unknown: null where it was not measured, or is not finite.
_TEXT = str | None
_WHOLE = int | None
_NUMBER = float | None
_SIZES = dict[str, int]

# -- Whether results are right ---------------------------------------------------------------------

_VERDICT = record({Outcome: "outcome", str: "headline", list[Gap]: "not_verified", list[Finding]: "findings"})
_KIND = Literal["MHA", "GQA", "MQA", "module"]
_MODEL = record(
    {str: "name summary precision bundle bundle_sha256 weights", dict[str, Any]: "spec", _KIND: "kind"}
)
_GPU = record({str: "name compute_capability", int: "l2_bytes memory_bytes"})
_ENVIRONMENT = record(
    {_TEXT: "driver", str: "platform python", dict[str, str]: "versions", _GPU | None: "gpu"}
)

_OUTPUT = OutputVerdict
_CASES = Literal["golden", "fresh", "sweep", "probe", "layers", "served"]
_ACCUMULATION = record({str: "type why"})
_PARITY = record(
    {
        str: "model precision backend", Outcome: "outcome", _CASES: "cases", _ACCUMULATION: "accumulation",
        many(_OUTPUT): "verdicts",
    }
)  # fmt: skip
_HEATMAP = record({str: "backend case output rows columns note", int: "bin", list[list[_NUMBER]]: "values"})
_DECODE = record(
    {
        str: "model precision backend trace", Outcome: "outcome", int: "steps judged failed",
        _WHOLE: "first_failed", _NUMBER: "share growth eager_growth", list[int]: "prompt",
        list[_NUMBER]: "errors eager_errors", list[list[_NUMBER]]: "table", many(_OUTPUT): "failures",
    }
)  # fmt: skip
_INVARIANCE = InvarianceCheck
_TREATED = Literal["conforms", "wrong", "refused", "absent"]
_CELL = record({str: "detail", _NUMBER: "error share", _TREATED: "status"})
_MASK = record({str: "case about", bool: "diagnostic", many(_CELL, str): "cells"})
_CONFORMANCE = record(
    {str: "precision", int: "seed", Outcome: "outcome", list[str]: "columns", many(_MASK): "rows"}
)
_FITS = Literal["ok", "near", "overflows"]
_RANGE_FINDING = record({_FITS: "status", str: "what", list[str]: "advice"})
_RANGE_NODE = record(
    {
        str: "node", int: "max_keys", list[str]: "advice", dict[str, Any]: "figures", _FITS: "status",
        _NUMBER: "largest_score_raw largest_score largest_softmax_sum headroom",
        many(_RANGE_FINDING): "findings",
    },
    is_open=True,
)  # fmt: skip
_RANGE = record({_FITS: "worst", many(_RANGE_NODE): "nodes"})
_FAULT = FaultReport

# -- What engines became, and how fast everything is -----------------------------------------------

_REBUILDS = record(
    {
        int: "builds", bool: "identical", bool | None: "timing_cache", list[dict[str, Any]]: "differing",
        list[list[int]]: "fused", list[float]: "seconds", list[int]: "engine_bytes",
        dict[str, list[_NUMBER]]: "errors", dict[str, list[float]]: "times_us",
    }
)  # fmt: skip
_FUSED = Literal["fused", "decomposed", "unknown"]
_IN_PRECISION = Literal["verified", "selected at load", "mixed", "unknown"]
_REASON = record({str: "kind place got wanted"})
_ENGINE_NODE = record(
    {str: "node source", _WHOLE: "profile", list[str]: "kernels", _FUSED: "status", many(_REASON): "reasons"}
)
_ENGINE = record(
    {
        str: "name backend version precision built attention", bool: "ran", _TEXT: "why_not",
        _IN_PRECISION: "precision_status", many(_REASON): "precision_reasons",
        list[int]: "fused", _NUMBER: "seconds", _WHOLE: "engine_bytes", list[dict[str, str]]: "profiles",
        list[str]: "plugins profile_names", many(_ENGINE_NODE): "nodes", _REBUILDS | None: "rebuilds",
    }
)  # fmt: skip
_CONDITIONS = record(
    {_NUMBER: "sm_mhz sm_mhz_max memory_mhz temperature_c power_w", list[str]: "throttled_by"}
)
_TIMING = record(
    {
        float: "p50_us p90_us p99_us", int: "samples calls_per_sample slots", bool: "graph stable",
        str: "gpu", _TEXT: "why_no_graph", _NUMBER: "host_us", _WHOLE: "memory_bytes",
        _CONDITIONS: "conditions",
    }
)  # fmt: skip
_RATES = "tflops gb_per_s tokens_per_s roofline_share"
_FAMILY = Literal["pytorch", "onnxruntime", "tensorrt", "onnx"]
_KERNEL = record({str: "name", float: "calls microseconds"})
_ROW = record(
    {
        str: "name backend", _TEXT: "refused", _FAMILY: "family", _TIMING | None: "timing",
        _NUMBER: f"speedup_over_eager speedup_over_best_pytorch {_RATES}", many(_KERNEL): "kernels",
    }
)  # fmt: skip
_LIMIT = Literal["compute", "memory"]
_ROOFLINE = record({str: "gpu", float: "bound_us tflops_peak gb_per_s_peak", _LIMIT: "bound"})
_POINT = record(
    {
        str: "case", _SIZES: "sizes", _WHOLE: "past", float: "flops bytes", _ROOFLINE | None: "roofline",
        many(_ROW): "rows",
    }
)  # fmt: skip
_LATENCY = record({_TEXT: "gpu", many(_POINT): "points"})
_SERVING = record(
    {
        int: "clients requests answered judged wrong", _SIZES: "errors", _TEXT: "first_error",
        _NUMBER: "per_second p50_ms p90_ms p99_ms",
    }
)  # fmt: skip
_THROUGHPUT = record(
    {
        str: "case name family", _SIZES: "sizes", _TEXT: "refused", _WHOLE: "streams",
        _NUMBER: "per_second p50_us p99_us",
    }
)  # fmt: skip

# -- What `report.json` and `bench.json` hold ------------------------------------------------------

_TOOL = record({str: "name version"})
_HEAD: Keys = {int: "format", str: "created", list[str]: "notes", _TOOL: "tool", _ENVIRONMENT: "environment"}
_OF_MODEL: Keys = {_MODEL: "model", many(_ENGINE): "engines", _LATENCY | None: "latency"}
_JUDGED: Keys = {
    _VERDICT: "verdict", many(_PARITY): "parity", many(_HEATMAP): "heatmaps", many(_DECODE): "decode",
    many(_INVARIANCE): "invariance", _CONFORMANCE | None: "conformance", _RANGE | None: "range",
    _FAULT | None: "fault", many(_SERVING): "serving", many(SubjectRecord): "subjects",
    DataRecord | None: "data", many(Requirement): "requirements",
}  # fmt: skip
REPORT = record({**_HEAD, **_OF_MODEL, **_JUDGED})
BENCH = record({**_HEAD, many(record({many(_THROUGHPUT): "throughput", **_OF_MODEL})): "models"})


def check_report(data: Any) -> list[str]:
    """What is wrong with the data of a report; nothing if it keeps the format."""
    problems = _problems(data, REPORT)
    if problems or data["conformance"] is None:
        return problems
    columns = set(data["conformance"]["columns"])
    return [
        f"conformance.rows[{index}].cells: not one for every column"
        for index, row in enumerate(data["conformance"]["rows"])
        if set(row["cells"]) != columns
    ]


def check_bench(data: Any) -> list[str]:
    """What is wrong with the data of a benchmark; nothing if it keeps the format."""
    return _problems(data, BENCH)


def plain_report(data: Any) -> dict[str, Any]:
    """The data of a report in plain types; an error if it does not keep the format."""
    return _plain("report", data, check_report)


def plain_bench(data: Any) -> dict[str, Any]:
    """The data of a benchmark in plain types; an error if it does not keep the format."""
    return _plain("benchmark", data, check_bench)


def _problems(data: Any, schema: Any) -> list[str]:
    if isinstance(data, dict) and data.get("format", REPORT_FORMAT) != REPORT_FORMAT:
        return [f"format: {data['format']!r} is not {REPORT_FORMAT}"]
    try:
        msgspec.convert(data, schema)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        return [f"{place.strip('.`')}: {what}" if place else what]
    return []


def _plain(what: str, data: Any, check: Callable[[Any], list[str]]) -> dict[str, Any]:
    plain: dict[str, Any] = as_plain(data)
    if problems := check(plain):
        what, hint = f"The {what} does not keep its format.", "docs/report.md lists every field"
        raise DeployError(what, got="; ".join(problems), hint=hint)
    return plain
