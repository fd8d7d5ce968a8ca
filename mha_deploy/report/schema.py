"""The fields of report.json, checked before it is written."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union

import msgspec
from msgspec import Meta

from mha_deploy.errors import DeployError
from mha_deploy.report.table import as_plain
from mha_deploy.validate.verdict import REPORT_FORMAT

# -- The kinds of fields that the records of a report are made of ----------------------------------

TEXT = str
FLAG = bool
WHOLE = int
NUMBER = float
TEXTS = list[str]
SIZES = dict[str, int]
_UNION = (Union, types.UnionType)


def field(kind: Any, what: str) -> Any:
    """A key that always has a value, with what it says in one line."""
    return Annotated[kind, Meta(description=what)]


def maybe(kind: Any, what: str) -> Any:
    """A key that may be null."""
    return field(kind | None, what)


def record(fields: Mapping[str, Any], *, is_open: bool = False) -> Any:
    """A dictionary with these keys, all of them there; only an open one may hold others."""
    return msgspec.defstruct("Record", list(fields.items()), kw_only=True, forbid_unknown_fields=not is_open)


def list_of(fields: Any, what: str) -> Any:
    """A key with a list of records."""
    kind: Any = record(fields) if isinstance(fields, dict) else fields
    return field(list[kind], what)


# -- The records of a report that say whether results are right ------------------------------------

SECTIONS = (
    "parity", "decode", "fusion", "precision", "latency", "range", "invariance", "conformance", "engine",
    "coverage", "serving",
)  # fmt: skip

VERDICT = record(
    {
        "passed": field(FLAG, "whether everything that was requested is right"),
        "outcome": field(
            Literal["passed", "failed", "not verified"],
            "`not verified`: nothing failed, but no engine of the bundle was run",
        ),
        "not_verified": field(TEXTS, "what was not run: engines, profiles, sizes"),
        "headline": field(TEXT, "the result in one line"),
        "findings": list_of(
            {
                "level": field(Literal["failure", "warning", "note"], "its severity"),
                "section": field(Literal[SECTIONS], "what it is about"),
                "text": field(TEXT, "what was found"),
            },
            "what a reader should know",
        ),
    }
)

MODEL = record(
    {
        "name": field(TEXT, "name of the model"),
        "summary": field(TEXT, "the layer in one line"),
        "kind": field(
            Literal["MHA", "GQA", "MQA", "module"],
            "how query heads share keys and values; `module` for a user's own",
        ),
        "precision": field(TEXT, "`fp16`, `bf16` or `fp32`"),
        "spec": field(dict[str, Any], "the layer, as in `models/*.toml`, or the module, as in the manifest"),
        "bundle": field(TEXT, "name of the bundle's folder"),
        "bundle_sha256": field(TEXT, "hash of the bundle's manifest"),
        "weights": field(TEXT, "where the weights came from"),
    }
)

GPU = record(
    {
        "name": field(TEXT, "as the driver names it"),
        "compute_capability": field(TEXT, "as CUDA counts it, for example `9.0`"),
        "l2_bytes": field(WHOLE, "size of the second-level cache, bytes"),
        "memory_bytes": field(WHOLE, "device memory, bytes"),
    }
)

ENVIRONMENT = record(
    {
        "gpu": maybe(GPU, "the GPU; null where there is none"),
        "driver": maybe(TEXT, "version of the NVIDIA driver; null where there is none"),
        "platform": field(TEXT, "operating system and processor"),
        "python": field(TEXT, "version of Python"),
        "versions": field(dict[str, TEXT], "versions of the packages that took part"),
    }
)

_MEASURE = "see parity.md; null where it is not finite"

DEVIATION = record(
    {
        "relative_l2": maybe(NUMBER, f"error of the whole tensor, {_MEASURE}"),
        "worst_row": maybe(NUMBER, f"error of the worst vector along the last axis, {_MEASURE}"),
        "max_abs": maybe(NUMBER, f"largest absolute error over the oracle's root mean square, {_MEASURE}"),
        "gain": maybe(NUMBER, f"how much larger or smaller the result is as a whole, {_MEASURE}"),
        "local": maybe(NUMBER, f"largest error of a slice over the error expected there, {_MEASURE}"),
        "local_gain": maybe(NUMBER, f"largest gain of a slice over what rounding leaves there, {_MEASURE}"),
        "local_at": field(TEXT, "the slice with the larger of both: a batch element, query, channel, …"),
        "cosine": maybe(NUMBER, "cosine between result and oracle; null where it is not finite"),
        "worst_index": field(list[WHOLE], "where the largest absolute error is"),
        "worst_got": maybe(NUMBER, "the value there; null where it is not finite"),
        "worst_want": maybe(NUMBER, "the oracle there"),
    }
)

BUDGET = record(
    {
        name: maybe(NUMBER, f"the largest `{name}` that passes; null where it is not finite")
        for name in ("relative_l2", "worst_row", "max_abs", "gain", "local", "local_gain")
    }
)

PARITY_VERDICT = record(
    {
        "case": field(TEXT, "name of the case"),
        "sizes": field(SIZES, "axis sizes"),
        "output": field(TEXT, "name of the output"),
        "passed": field(FLAG, "whether the output is within its budget"),
        "problem": maybe(TEXT, "why it failed or is not verified; null if it passed"),
        "deviation": maybe(
            DEVIATION,
            "the error; null where none was measured (name, type, shape, values that are not finite)",
        ),
        "budget": maybe(BUDGET, "what the error may be; null as `deviation`"),
        "share": maybe(NUMBER, "largest share of the budget used, over 1 is too much; null where not finite"),
    }
)

PARITY = record(
    {
        "model": field(TEXT, "name of the model"),
        "precision": field(TEXT, "precision of the graph"),
        "backend": field(TEXT, "the runtime with its version"),
        "cases": field(
            Literal["golden", "fresh", "sweep", "probe", "layers", "served"],
            "which inputs; `probe`: large tokens at the edges of masks, windows and caches; `layers`: every "
            "attention by itself; `served`: golden cases or prompts under load",
        ),
        "accumulation": field(
            record(
                {
                    "type": field(TEXT, "`fp16` or `fp32`: what GEMMs are assumed to accumulate in"),
                    "why": field(TEXT, "how that is known; may be empty"),
                }
            ),
            "what the budget assumes",
        ),
        "passed": field(FLAG, "whether every output is within its budget"),
        "verdicts": list_of(PARITY_VERDICT, "one for every output of every case"),
    }
)

HEATMAP = record(
    {
        "backend": field(TEXT, "the runtime with its version"),
        "case": field(TEXT, "name of the case"),
        "output": field(TEXT, "name of the output"),
        "rows": field(TEXT, "what a row is: `head` or `channel group`"),
        "columns": field(TEXT, "what a column is: `position`"),
        "values": field(list[list[NUMBER | None]], "relative RMS error, by table row; null where not finite"),
        "bin": field(WHOLE, "how many positions one column stands for"),
        "note": field(TEXT, "what else there is to say; may be empty"),
    }
)

_STEP_ERRORS = list[NUMBER | None]

DECODE = record(
    {
        "model": field(TEXT, "name of the model"),
        "precision": field(TEXT, "precision of the graph"),
        "backend": field(TEXT, "the runtime with its version"),
        "trace": field(TEXT, "name of the trace: one in the bundle, or the one that was drawn on request"),
        "passed": field(FLAG, "whether every step was run, and outputs, lengths and the cache are right"),
        "prompt": field(list[WHOLE], "tokens of the prompt of every batch element"),
        "steps": field(WHOLE, "decode steps that were to follow"),
        "first_failed": maybe(
            WHOLE, "first wrong step, 0 for the prefill; null where no step is wrong, the cache may still be"
        ),
        "share": maybe(NUMBER, "largest share of a budget used, over 1 is too much; null where not finite"),
        "errors": field(
            _STEP_ERRORS, "relative L2 of every step that was run, from step 1; null where not measured"
        ),
        "eager_errors": field(_STEP_ERRORS, "the same of the PyTorch module, decoded in its own precision"),
        "growth": maybe(
            NUMBER,
            "median error of the last tenth of the steps, at least one, over that of the first; null where "
            "unknown, or there is one step only",
        ),
        "eager_growth": maybe(NUMBER, "the same of the PyTorch module; null as above"),
        "table": field(
            list[_STEP_ERRORS], "pairs of step and error, for steps 1, 2, 4, 8, … and the last one"
        ),
        "judged": field(WHOLE, "how many things were judged: prefill, steps, and keys and values at the end"),
        "failed": field(WHOLE, "how many of them are wrong"),
        "failures": list_of(PARITY_VERDICT, "the first of them; fields as in `parity[].verdicts[]`"),
    }
)

INVARIANCE = record(
    {
        "backend": field(TEXT, "the runtime with its version"),
        "case": field(TEXT, "name of the case"),
        "check": field(Literal["batch slot", "batch size", "profile"], "what must not matter"),
        "detail": field(TEXT, "what was compared"),
        "passed": field(FLAG, "whether the results agree within the budget"),
        "bitwise": field(FLAG, "whether they are the same to the last bit"),
        "share": maybe(NUMBER, "share of the budget that the difference uses; null where none was measured"),
        "problem": maybe(TEXT, "why it failed; null if it passed"),
    }
)

CELL = record(
    {
        "status": field(Literal["conforms", "wrong", "refused", "absent"], "the result"),
        "detail": field(
            TEXT, "what is wrong, why it was refused, or what else there is to say; may be empty"
        ),
        "error": maybe(NUMBER, "relative L2 against the oracle; null where there were no finite numbers"),
        "share": maybe(NUMBER, "share of the budget that it used; null as `error`"),
    }
)

CONFORMANCE = record(
    {
        "precision": field(TEXT, "precision of the graphs"),
        "seed": field(WHOLE, "seed of the inputs"),
        "passed": field(FLAG, "whether no cell is wrong, diagnostic rows aside"),
        "columns": field(TEXTS, "the runtimes by name"),
        "rows": list_of(
            {
                "case": field(TEXT, "short name of the mask"),
                "about": field(TEXT, "the mask in a few words"),
                "diagnostic": field(FLAG, "whether the row only shows what a runtime does by itself"),
                "cells": field(types.GenericAlias(dict, (str, CELL)), "one for every column, by its name"),
            },
            "the masks",
        ),
    }
)

_RANGE_STATUS = Literal["ok", "near", "overflows"]

RANGE_NODE = record(
    {
        "node": field(TEXT, "name of the attention node"),
        "status": field(_RANGE_STATUS, "whether its numbers fit into FP16"),
        "largest_score_raw": maybe(NUMBER, "largest |q·k| before the scale; null where nothing was measured"),
        "largest_score": maybe(NUMBER, "largest |score| after the scale; null as above"),
        "largest_softmax_sum": maybe(NUMBER, "largest sum of exponentials; null as above"),
        "max_keys": field(
            WHOLE, "most keys that the spec allows: the largest value that its sum of exponentials can have"
        ),
        "headroom": maybe(
            NUMBER,
            "65504 over the largest number; 0 where one is not finite already; null where all are zero",
        ),
        "findings": list_of(
            {
                "status": field(_RANGE_STATUS, "how bad it is"),
                "what": field(TEXT, "what was found"),
                "advice": field(TEXTS, "what can be done about it"),
            },
            "what is worth saying",
        ),
        "advice": field(TEXTS, "what can be done about all of it, each thing once"),
        "figures": field(dict[str, Any], "everything that was measured"),
    },
    is_open=True,
)

RANGE = record(
    {
        "worst": field(_RANGE_STATUS, "the worst of the nodes"),
        "nodes": list_of(RANGE_NODE, "one for every attention node; may hold further keys"),
    }
)

FAULT = record(
    {
        "at_fault": field(Literal["graph", "fusion", "precision", "lowering", "unknown"], "what it was"),
        "explanation": field(TEXT, "how that is known"),
        "trials": list_of(
            {
                "name": field(TEXT, "what was run instead"),
                "passed": field(FLAG, "whether that was right"),
                "share": maybe(NUMBER, "share of the budget it used; null where not finite"),
            },
            "the trials that show it",
        ),
    }
)


# -- The records of a report that say what engines became and how fast everything is ---------------

REBUILDS = record(
    {
        "builds": field(WHOLE, "how many times it was built, each time without kernel timings"),
        "identical": field(FLAG, "whether all plans are the same to the last byte"),
        "differing": field(
            list[dict[str, Any]], "ONNX nodes with other kernels, and the kernels of each build"
        ),
        "fused": field(list[list[WHOLE]], "fused attentions of each build, of how many"),
        "seconds": field(list[NUMBER], "build times, seconds"),
        "engine_bytes": field(list[WHOLE], "sizes of the plans, bytes"),
        "errors": field(
            dict[str, list[NUMBER | None]], "share of the error budget in each build, by `case/output`"
        ),
        "times_us": field(dict[str, list[NUMBER]], "median time of each build, µs, by case"),
        "timing_cache": maybe(
            FLAG, "whether a build from its own timings has the same kernels; null where they have no effect"
        ),
    }
)

ENGINE = record(
    {
        "name": field(TEXT, "name of the engine in the bundle"),
        "backend": field(TEXT, "`tensorrt` or `tensorrt-rtx`"),
        "version": field(TEXT, "version of the TensorRT that built it"),
        "precision": field(TEXT, "the requested precision"),
        "built": field(TEXT, "where or for what it was built"),
        "ran": field(FLAG, "whether it was run here"),
        "why_not": maybe(TEXT, "why it was not run; null if it was"),
        "fused": field(list[WHOLE], "two numbers: attentions that are fused in every profile, of how many"),
        "precision_status": field(TEXT, "`verified`, `mixed` or `unknown`"),
        "nodes": list_of(
            {
                "node": field(TEXT, "name of the attention node"),
                "profile": maybe(WHOLE, "the optimisation profile; null where there are none"),
                "status": field(Literal["fused", "decomposed", "unknown"], "what became of it"),
                "kernels": field(TEXTS, "the kernels that prove it"),
                "reason": field(TEXT, "why it is unknown, or how it is known; may be empty"),
                "source": field(
                    TEXT, "where it was detected: `log`, `plan`, `inspector`, `profile`, joined by `+`"
                ),
            },
            "one for every attention node and profile",
        ),
        "seconds": maybe(NUMBER, "how long the build took, seconds; null where that is not known"),
        "engine_bytes": maybe(WHOLE, "size of the plan, bytes; null where there is none"),
        "profiles": field(list[dict[str, TEXT]], "axis ranges of each profile, as `min:opt:max`"),
        "attention": field(
            TEXT, "what computes attention and projections, and the measurements behind the choice"
        ),
        "plugins": field(TEXTS, "the plugin libraries that it needs: file, version, hash and plugins"),
        "profile_names": field(TEXTS, "what each profile is called: its number, or `prefill` and `decode`"),
        "rebuilds": maybe(REBUILDS, "how much it differs from build to build; null where it was built once"),
    }
)

CONDITIONS = record(
    {
        "sm_mhz": maybe(NUMBER, "clock of the multiprocessors, MHz; null where NVML did not report it"),
        "sm_mhz_max": maybe(NUMBER, "the highest that the card goes to, MHz; null as above"),
        "memory_mhz": maybe(NUMBER, "clock of the memory, MHz; null as above"),
        "temperature_c": maybe(NUMBER, "temperature of the GPU, °C; null as above"),
        "power_w": maybe(NUMBER, "power drawn, W; null as above"),
        "throttled_by": field(TEXTS, "why the clocks were lower than they could be"),
    }
)

TIMING = record(
    {
        "p50_us": field(NUMBER, "median time of one call, µs"),
        "p90_us": field(NUMBER, "time that 90 % of the samples did not exceed, µs"),
        "p99_us": field(NUMBER, "time that 99 % of the samples did not exceed, µs"),
        "samples": field(WHOLE, "how many samples"),
        "calls_per_sample": field(WHOLE, "calls in one sample; a sample is their mean"),
        "slots": field(WHOLE, "copies of the inputs that the calls rotated through"),
        "graph": field(FLAG, "whether the calls were launches of a CUDA graph"),
        "why_no_graph": maybe(TEXT, "why they were not although they should have been; null otherwise"),
        "stable": field(FLAG, "whether warming up ended with rounds that agreed"),
        "host_us": maybe(NUMBER, "host time of one launch, µs; null where it was not measured"),
        "gpu": field(TEXT, "the GPU"),
        "conditions": field(CONDITIONS, "clocks, temperature and power while it ran"),
        "memory_bytes": maybe(WHOLE, "device memory allocated for it, bytes; null where that is not known"),
    }
)

ROW = record(
    {
        "name": field(TEXT, "short name, the same at every point"),
        "backend": field(TEXT, "what ran, with its version"),
        "family": field(Literal["pytorch", "onnxruntime", "tensorrt", "onnx"], "the kind of runtime"),
        "refused": maybe(TEXT, "why it was not timed; null if it was"),
        "timing": maybe(TIMING, "the measurement; null if it was refused"),
        "speedup_over_eager": maybe(NUMBER, "eager's p50 over this one; null where one is missing"),
        "speedup_over_best_pytorch": maybe(
            NUMBER, "p50 of the best PyTorch baseline over this one; null as above"
        ),
        "tflops": maybe(NUMBER, "10¹² FLOP/s at p50; null if it was refused"),
        "gb_per_s": maybe(NUMBER, "10⁹ bytes/s at p50, counting the bytes of the point; null as above"),
        "tokens_per_s": maybe(
            NUMBER, "tokens/s through this layer at p50, all batch elements; null where it is no decode step"
        ),
        "roofline_share": maybe(NUMBER, "roofline bound over p50; null where there is none"),
        "kernels": list_of(
            {
                "name": field(TEXT, "name of the kernel"),
                "calls": field(NUMBER, "how often one call launches it"),
                "microseconds": field(NUMBER, "its time in one call, µs"),
            },
            "the longest kernels of one call; empty where nothing was profiled",
        ),
    }
)

ROOFLINE = record(
    {
        "gpu": field(TEXT, "whose peak figures"),
        "bound_us": field(NUMBER, "least time of the layer, stage after stage, µs"),
        "bound": field(Literal["compute", "memory"], "what sets most of the bound"),
        "tflops_peak": field(NUMBER, "peak rate in this precision, 10¹² FLOP/s"),
        "gb_per_s_peak": field(NUMBER, "memory bandwidth, 10⁹ bytes/s"),
    }
)

LATENCY = record(
    {
        "gpu": maybe(TEXT, "the GPU; null where everything was refused"),
        "points": list_of(
            {
                "case": field(TEXT, "name of the case"),
                "sizes": field(SIZES, "axis sizes"),
                "past": maybe(
                    WHOLE, "most valid entries of a preallocated KV cache before the call; null without one"
                ),
                "flops": field(NUMBER, "operations of one call"),
                "bytes": field(NUMBER, "bytes that one call must move"),
                "roofline": maybe(ROOFLINE, "the roofline bound; null for a GPU without known figures"),
                "rows": list_of(ROW, "everything that was timed or refused"),
            },
            "one for every size that was timed",
        ),
    }
)


SERVING = record(
    {
        "clients": field(WHOLE, "clients that sent requests at the same time"),
        "requests": field(WHOLE, "requests that were to be answered"),
        "answered": field(WHOLE, "requests that were answered"),
        "errors": field(
            dict[str, int], "the others: `error`, `timeout`, `unreachable`, `not sent`; each only if there"
        ),
        "first_error": maybe(TEXT, "the first failed request; null where none failed"),
        "per_second": maybe(NUMBER, "answers per second; null where no time passed"),
        "p50_ms": maybe(NUMBER, "median time of an answer, as the client measures it, ms; null without any"),
        "p90_ms": maybe(NUMBER, "90th percentile"),
        "p99_ms": maybe(NUMBER, "99th percentile"),
        "judged": field(WHOLE, "outputs that were judged"),
        "wrong": field(WHOLE, "outputs that were wrong"),
    }
)


# -- What `report.json` and `bench.json` hold ------------------------------------------------------


_HEAD = {
    "format": field(WHOLE, f"{REPORT_FORMAT}; any other number is refused"),
    "tool": field(
        record({"name": field(TEXT, "`mha-deploy`"), "version": field(TEXT, "its version")}), "what wrote it"
    ),
    "created": field(TEXT, "when, in UTC, as `2026-01-31T12:00:00Z`"),
}

_MODEL = field(MODEL, "the layer and its bundle")
_ENVIRONMENT = field(ENVIRONMENT, "where it ran")
_ENGINES = list_of(ENGINE, "the engines that were built or found")
_LATENCY = maybe(LATENCY, "what was timed; null where nothing was")
_THROUGHPUT = list_of(
    {
        "case": field(TEXT, "name of the case"),
        "sizes": field(SIZES, "axis sizes"),
        "name": field(TEXT, "the runtime or baseline"),
        "family": field(TEXT, "`pytorch`, `onnxruntime` or `tensorrt`"),
        "refused": maybe(TEXT, "why there is no figure; null where there is one"),
        "streams": maybe(WHOLE, "CUDA streams that were busy at the same time; null where refused"),
        "per_second": maybe(NUMBER, "calls per second on all streams together"),
        "p50_us": maybe(NUMBER, "median time between two calls of a stream, µs"),
        "p99_us": maybe(NUMBER, "99th percentile of it, µs"),
    },
    "calls per second on several CUDA streams; empty where not requested",
)
_NOTES = field(TEXTS, "what else a reader should know")

REPORT = record(
    {
        **_HEAD,
        "verdict": field(VERDICT, "the result"),
        "model": _MODEL,
        "environment": _ENVIRONMENT,
        "parity": list_of(PARITY, "errors against the FP64 oracle, one for every runtime and set of inputs"),
        "heatmaps": list_of(HEATMAP, "where the errors are"),
        "decode": list_of(
            DECODE, "prefill and decode steps, one for every runtime and trace; empty without a KV cache"
        ),
        "invariance": list_of(INVARIANCE, "whether results depend on what must not matter"),
        "conformance": maybe(CONFORMANCE, "masks as ONNX defines them; null where it was not requested"),
        "range": maybe(RANGE, "whether the numbers fit into FP16; null where it was not requested"),
        "fault": maybe(FAULT, "what a failure comes from; null where nothing failed"),
        "engines": _ENGINES,
        "latency": _LATENCY,
        "serving": list_of(SERVING, "how a server did, one for every number of clients; empty without one"),
        "notes": _NOTES,
    }
)

BENCH = record(
    {
        **_HEAD,
        "environment": _ENVIRONMENT,
        "models": list_of(
            {"model": _MODEL, "engines": _ENGINES, "latency": _LATENCY, "throughput": _THROUGHPUT},
            "one for every model and precision",
        ),
        "notes": _NOTES,
    }
)


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
    return _checked("report", as_plain(data), check_report)


def plain_bench(data: Any) -> dict[str, Any]:
    """The data of a benchmark in plain types; an error if it does not keep the format."""
    return _checked("benchmark", as_plain(data), check_bench)


def _problems(data: Any, schema: Any) -> list[str]:
    if isinstance(data, dict) and data.get("format", REPORT_FORMAT) != REPORT_FORMAT:
        return [f"format: {data['format']!r} is not {REPORT_FORMAT}"]
    try:
        msgspec.convert(data, schema)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        return [f"{place.strip('.`')}: {what}" if place else what]
    return []


def _checked(what: str, plain: Any, check: Callable[[Any], list[str]]) -> dict[str, Any]:
    if problems := check(plain):
        raise DeployError(
            f"The {what} does not keep its format.",
            got="; ".join(problems),
            hint="docs/report.md lists every field",
        )
    return dict(plain)
