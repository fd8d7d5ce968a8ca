"""The fields of report.json, checked before it is written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mha_deploy.errors import DeployError
from mha_deploy.validate.options import REPORT_FORMAT

# -- Data as JSON can hold it ----------------------------------------------------------------------


def as_plain(value: Any) -> Any:
    """The same data in plain types; a number that is not finite becomes null.

    A name from a file system may hold bytes that are no text; they are spelled out, since no UTF-8 file can
    hold them.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, np.generic | np.ndarray):
        return as_plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {as_plain(str(key)): as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    return value


# -- Shapes of plain data, and how a value departs from one ----------------------------------------


class Shape:
    """What a value may be."""

    @property
    def label(self) -> str:
        """The shape in a few words, for the documentation."""
        raise NotImplementedError

    def problems(self, value: Any, place: str) -> Iterator[str]:
        """One sentence for everything that is wrong; nothing for a value that fits.

        Args:
            value: The value.
            place: Where it lies, as `verdict.findings[0].level`.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Plain(Shape):
    """A value of one type. A true or false is not a number here, and a number is finite."""

    name: str
    types: tuple[type, ...]

    @property
    def label(self) -> str:
        """The name."""
        return self.name

    def problems(self, value: Any, place: str) -> Iterator[str]:
        """Compare the type; JSON has no NaN and no infinity."""
        fits = isinstance(value, self.types) and (bool in self.types or not isinstance(value, bool))
        if not fits or (isinstance(value, float) and not math.isfinite(value)):
            yield f"{place}: {_shown(value)} is not a {self.name}"


@dataclass(frozen=True, kw_only=True)
class OneOf(Shape):
    """One of several words."""

    options: tuple[str, ...]

    @property
    def label(self) -> str:
        """The words."""
        return ", ".join(f"`{option}`" for option in self.options)

    def problems(self, value: Any, place: str) -> Iterator[str]:
        """Look the word up."""
        if not isinstance(value, str) or value not in self.options:
            yield f"{place}: {_shown(value)} is not one of {', '.join(self.options)}"


@dataclass(frozen=True, kw_only=True)
class Maybe(Shape):
    """A value, or null."""

    shape: Shape

    @property
    def label(self) -> str:
        """The shape, or null."""
        return f"{self.shape.label}, or null"

    def problems(self, value: Any, place: str) -> Iterator[str]:
        """Null is right; anything else must fit."""
        if value is not None:
            yield from self.shape.problems(value, place)


@dataclass(frozen=True, kw_only=True)
class ListOf(Shape):
    """A list of any length, every item of one shape."""

    item: Shape

    @property
    def label(self) -> str:
        """What it is a list of."""
        return f"list of {self.item.label}"

    def problems(self, value: Any, place: str) -> Iterator[str]:
        """Check every item."""
        if not isinstance(value, list):
            yield f"{place}: {_shown(value)} is not a list"
            return
        for index, item in enumerate(value):
            yield from self.item.problems(item, f"{place}[{index}]")


@dataclass(frozen=True, kw_only=True)
class MapOf(Shape):
    """A dictionary with any keys, every value of one shape."""

    item: Shape

    @property
    def label(self) -> str:
        """What it maps to."""
        return f"name → {self.item.label}"

    def problems(self, value: Any, place: str) -> Iterator[str]:
        """Check every value."""
        if not isinstance(value, dict):
            yield f"{place}: {_shown(value)} is not a dictionary"
            return
        for key, item in value.items():
            yield from self.item.problems(item, f"{place}.{key}")


@dataclass(frozen=True, kw_only=True)
class Anything(Shape):
    """Plain data that is described elsewhere."""

    @property
    def label(self) -> str:
        """Nothing is promised."""
        return "anything"

    def problems(self, value: Any, place: str) -> Iterator[str]:
        """Nothing is wrong with it."""
        return iter(())


@dataclass(frozen=True, kw_only=True)
class Field:
    """One key of a record.

    Args:
        shape: What its value may be.
        what: What it says, in one line, with its unit.
    """

    shape: Shape
    what: str


@dataclass(frozen=True, kw_only=True)
class Record(Shape):
    """A dictionary with known keys, all of them there.

    Args:
        fields: The keys.
        others: What further keys may hold; None where there may be none.
    """

    fields: Mapping[str, Field]
    others: Shape | None = None

    @property
    def label(self) -> str:
        """Its keys have a table of their own."""
        return "record"

    def problems(self, value: Any, place: str) -> Iterator[str]:
        """Check that all keys are there, no others, and every value."""
        if not isinstance(value, dict):
            yield f"{place or 'the data'}: {_shown(value)} is not a record"
            return
        for key, field in self.fields.items():
            inner = f"{place}.{key}" if place else key
            if key in value:
                yield from field.shape.problems(value[key], inner)
            else:
                yield f"{inner}: missing"
        for key in value:
            if key not in self.fields:
                inner = f"{place}.{key}" if place else str(key)
                yield from self.others.problems(value[key], inner) if self.others else [f"{inner}: unknown"]


def records(shape: Shape, place: str = "") -> Iterator[tuple[str, Record]]:
    """Every record in a shape with its place: itself first, then those of its fields."""
    if isinstance(shape, Record):
        yield place, shape
        for key, field in shape.fields.items():
            yield from records(field.shape, f"{place}.{key}" if place else key)
    elif isinstance(shape, Maybe):
        yield from records(shape.shape, place)
    elif isinstance(shape, ListOf):
        yield from records(shape.item, f"{place}[]")
    elif isinstance(shape, MapOf):
        yield from records(shape.item, f"{place}.*")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


# -- The kinds of fields that the records of a report are made of ----------------------------------

TEXT = Plain(name="text", types=(str,))
FLAG = Plain(name="true or false", types=(bool,))
WHOLE = Plain(name="whole number", types=(int,))
NUMBER = Plain(name="number", types=(int, float))
TEXTS = ListOf(item=TEXT)
SIZES = MapOf(item=WHOLE)


def field(shape: Shape, what: str) -> Field:
    """A key that always has a value."""
    return Field(shape=shape, what=what)


def maybe(shape: Shape, what: str) -> Field:
    """A key that may be null."""
    return Field(shape=Maybe(shape=shape), what=what)


def list_of(fields: dict[str, Field], what: str, others: Shape | None = None) -> Field:
    """A key with a list of records."""
    return Field(shape=ListOf(item=Record(fields=fields, others=others)), what=what)


# -- The records of a report that say whether results are right ------------------------------------

SECTIONS = (
    "parity", "decode", "fusion", "precision", "latency", "range", "invariance", "conformance", "engine",
)  # fmt: skip

VERDICT = {
    "passed": field(FLAG, "whether everything that was asked for is right"),
    "headline": field(TEXT, "the result in one line"),
    "findings": list_of(
        {
            "level": field(OneOf(options=("failure", "warning", "note")), "how grave it is"),
            "section": field(OneOf(options=SECTIONS), "what it is about"),
            "text": field(TEXT, "what was found"),
        },
        "what a reader should know",
    ),
}

MODEL = {
    "name": field(TEXT, "name of the model"),
    "summary": field(TEXT, "the layer in one line"),
    "kind": field(
        OneOf(options=("MHA", "GQA", "MQA", "module")),
        "how query heads share keys and values; `module` for a user's own",
    ),
    "precision": field(TEXT, "`fp16`, `bf16` or `fp32`"),
    "spec": field(
        MapOf(item=Anything()), "the layer, as in `models/*.toml`, or the module, as in the manifest"
    ),
    "bundle": field(TEXT, "name of the bundle's folder"),
    "bundle_sha256": field(TEXT, "hash of the bundle's manifest"),
    "weights": field(TEXT, "where the weights came from"),
}

GPU = {
    "name": field(TEXT, "as the driver names it"),
    "compute_capability": field(TEXT, "as CUDA counts it, for example `9.0`"),
    "l2_bytes": field(WHOLE, "size of the second-level cache, bytes"),
    "memory_bytes": field(WHOLE, "device memory, bytes"),
}

ENVIRONMENT = {
    "gpu": maybe(Record(fields=GPU), "the GPU; null where there is none"),
    "driver": maybe(TEXT, "version of the NVIDIA driver; null where there is none"),
    "platform": field(TEXT, "operating system and processor"),
    "python": field(TEXT, "version of Python"),
    "versions": field(MapOf(item=TEXT), "versions of the packages that took part"),
}

_MEASURE = "see parity.md; null where it is not finite"

DEVIATION = {
    "relative_l2": maybe(NUMBER, f"error of the whole tensor, {_MEASURE}"),
    "worst_row": maybe(NUMBER, f"error of the worst vector along the last axis, {_MEASURE}"),
    "max_abs": maybe(NUMBER, f"largest absolute error over the oracle's root mean square, {_MEASURE}"),
    "gain": maybe(NUMBER, f"how much larger or smaller the result is as a whole, {_MEASURE}"),
    "cosine": maybe(NUMBER, "cosine between result and oracle; null where it is not finite"),
    "worst_index": field(ListOf(item=WHOLE), "where the largest absolute error is"),
    "worst_got": maybe(NUMBER, "the value there; null where it is not finite"),
    "worst_want": maybe(NUMBER, "the oracle there"),
}

BUDGET = {
    name: maybe(NUMBER, f"the largest `{name}` that passes; null where it is not finite")
    for name in ("relative_l2", "worst_row", "max_abs", "gain")
}

PARITY_VERDICT = {
    "case": field(TEXT, "name of the case"),
    "sizes": field(SIZES, "axis sizes"),
    "output": field(TEXT, "name of the output"),
    "passed": field(FLAG, "whether the output is within its budget"),
    "problem": maybe(TEXT, "why it failed or is not verified; null if it passed"),
    "deviation": maybe(
        Record(fields=DEVIATION),
        "the error; null where there was nothing to measure (name, type, shape, values that are not finite)",
    ),
    "budget": maybe(Record(fields=BUDGET), "what the error may be; null as `deviation`"),
    "share": maybe(NUMBER, "largest share of the budget used, over 1 is too much; null where not finite"),
}

PARITY = {
    "model": field(TEXT, "name of the model"),
    "precision": field(TEXT, "precision of the graph"),
    "backend": field(TEXT, "the runtime with its version"),
    "cases": field(
        OneOf(options=("golden", "fresh", "sweep", "layers")),
        "which inputs; `layers`: attention by attention",
    ),
    "passed": field(FLAG, "whether every output is within its budget"),
    "verdicts": list_of(PARITY_VERDICT, "one for every output of every case"),
}

HEATMAP = {
    "backend": field(TEXT, "the runtime with its version"),
    "case": field(TEXT, "name of the case"),
    "output": field(TEXT, "name of the output"),
    "rows": field(TEXT, "what a row is: `head` or `channel group`"),
    "columns": field(TEXT, "what a column is: `position`"),
    "values": field(
        ListOf(item=ListOf(item=Maybe(shape=NUMBER))), "relative RMS error, row by row; null where not finite"
    ),
    "bin": field(WHOLE, "how many positions one column stands for"),
    "note": field(TEXT, "what else there is to say; may be empty"),
}

_STEP_ERRORS = ListOf(item=Maybe(shape=NUMBER))

DECODE = {
    "model": field(TEXT, "name of the model"),
    "precision": field(TEXT, "precision of the graph"),
    "backend": field(TEXT, "the runtime with its version"),
    "trace": field(TEXT, "name of the trace: of one in the bundle, or of the one that was drawn on request"),
    "passed": field(FLAG, "whether every step was run, and outputs, lengths and the cache are right"),
    "prompt": field(ListOf(item=WHOLE), "tokens of the prompt of every row"),
    "steps": field(WHOLE, "single tokens that were to follow"),
    "first_failed": maybe(
        WHOLE, "first wrong step, 0 for the prefill; null where no step is wrong, the cache may still be"
    ),
    "share": maybe(NUMBER, "largest share of a budget used, over 1 is too much; null where not finite"),
    "errors": field(
        _STEP_ERRORS, "relative L2 of every step that was run, from step 1; null where not measured"
    ),
    "eager_errors": field(_STEP_ERRORS, "the same of the PyTorch module, stepped in its own precision"),
    "growth": maybe(
        NUMBER,
        "median error of the last tenth of the steps, at least one, over that of the first; null where "
        "unknown, or there is one step only",
    ),
    "eager_growth": maybe(NUMBER, "the same of the PyTorch module; null as above"),
    "table": field(
        ListOf(item=_STEP_ERRORS), "pairs of step and error, for steps 1, 2, 4, 8, … and the last one"
    ),
    "judged": field(WHOLE, "how many things were judged: prefill, steps, and keys and values at the end"),
    "failed": field(WHOLE, "how many of them are wrong"),
    "failures": list_of(PARITY_VERDICT, "the first of them; fields as in `parity[].verdicts[]`"),
}

INVARIANCE = {
    "backend": field(TEXT, "the runtime with its version"),
    "case": field(TEXT, "name of the case"),
    "check": field(OneOf(options=("batch slot", "batch size", "profile")), "what must not matter"),
    "detail": field(TEXT, "what was compared"),
    "passed": field(FLAG, "whether the results agree within the budget"),
    "bitwise": field(FLAG, "whether they are the same to the last bit"),
    "share": maybe(NUMBER, "share of the budget that the difference uses; null where none was measured"),
    "problem": maybe(TEXT, "why it failed; null if it passed"),
}

CELL = {
    "status": field(OneOf(options=("conforms", "wrong", "refused", "absent")), "the result"),
    "detail": field(TEXT, "what is wrong, why it was refused, or what else there is to say; may be empty"),
    "error": maybe(NUMBER, "relative L2 against the oracle; null where there were no finite numbers"),
    "share": maybe(NUMBER, "share of the budget that it used; null as `error`"),
}

CONFORMANCE = {
    "precision": field(TEXT, "precision of the graphs"),
    "seed": field(WHOLE, "seed of the inputs"),
    "passed": field(FLAG, "whether no cell is wrong, but for diagnostic rows"),
    "columns": field(TEXTS, "the runtimes by name"),
    "rows": list_of(
        {
            "case": field(TEXT, "short name of the mask"),
            "about": field(TEXT, "the mask in a few words"),
            "diagnostic": field(FLAG, "whether the row only shows what a runtime does by itself"),
            "cells": field(MapOf(item=Record(fields=CELL)), "one for every column, by its name"),
        },
        "the masks",
    ),
}

_RANGE_STATUS = OneOf(options=("ok", "near", "overflows"))

RANGE_NODE = {
    "node": field(TEXT, "name of the attention node"),
    "status": field(_RANGE_STATUS, "whether FP16 can hold its numbers"),
    "largest_score_raw": maybe(NUMBER, "largest |q·k| before the scale; null where nothing was measured"),
    "largest_score": maybe(NUMBER, "largest |score| after the scale; null as above"),
    "largest_softmax_sum": maybe(NUMBER, "largest sum of exponentials; null as above"),
    "max_keys": field(WHOLE, "most keys that the spec allows: the largest sum that its softmax can have"),
    "headroom": maybe(
        NUMBER, "65504 over the largest number; 0 where one is not finite already; null where all are zero"
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
    "figures": field(MapOf(item=Anything()), "everything that was measured"),
}

RANGE = {
    "worst": field(_RANGE_STATUS, "the worst of the nodes"),
    "nodes": list_of(RANGE_NODE, "one for every attention node; may hold further keys", Anything()),
}

BLAME = {
    "at_fault": field(OneOf(options=("graph", "fusion", "precision", "lowering", "unknown")), "what it was"),
    "explanation": field(TEXT, "how that is known"),
    "trials": list_of(
        {
            "name": field(TEXT, "what was run instead"),
            "passed": field(FLAG, "whether that was right"),
            "share": maybe(NUMBER, "share of the budget it used; null where not finite"),
        },
        "the trials that tell",
    ),
}


# -- The records of a report that say what engines became and how fast everything is ---------------

ENGINE = {
    "name": field(TEXT, "name of the engine in the bundle"),
    "backend": field(TEXT, "`tensorrt` or `tensorrt-rtx`"),
    "version": field(TEXT, "version of the TensorRT that built it"),
    "precision": field(TEXT, "the precision asked for"),
    "built": field(TEXT, "where or for what it was built"),
    "ran": field(FLAG, "whether it was run here"),
    "why_not": maybe(TEXT, "why it was not run; null if it was"),
    "fused": field(
        ListOf(item=WHOLE), "two numbers: attentions that are fused in every profile, of how many"
    ),
    "precision_status": field(TEXT, "`really-fp16` (or the requested precision), `mixed` or `unknown`"),
    "nodes": list_of(
        {
            "node": field(TEXT, "name of the attention node"),
            "profile": maybe(WHOLE, "the optimisation profile; null where there are none"),
            "status": field(OneOf(options=("fused", "decomposed", "unknown")), "what became of it"),
            "kernels": field(TEXTS, "the kernels that prove it"),
            "reason": field(TEXT, "why it is unknown, or how it is known; may be empty"),
            "source": field(TEXT, "who told: `log`, `plan`, `inspector`, `profile`, joined by `+`"),
        },
        "one for every attention node and profile",
    ),
    "seconds": maybe(NUMBER, "how long the build took, seconds; null where that is not known"),
    "engine_bytes": maybe(WHOLE, "size of the plan, bytes; null where there is none"),
    "profiles": field(ListOf(item=MapOf(item=TEXT)), "axis ranges of each profile, as `min:opt:max`"),
    "attention": field(TEXT, "who computes attention and projections, and what was measured to choose"),
    "plugins": field(TEXTS, "the plugin libraries that it needs: file, version, hash and plugins"),
    "profile_names": field(TEXTS, "what each profile is called: its number, or `prefill` and `decode`"),
}

CONDITIONS = {
    "sm_mhz": maybe(NUMBER, "clock of the multiprocessors, MHz; null where NVML did not say"),
    "sm_mhz_max": maybe(NUMBER, "the highest that the card goes to, MHz; null as above"),
    "memory_mhz": maybe(NUMBER, "clock of the memory, MHz; null as above"),
    "temperature_c": maybe(NUMBER, "temperature of the GPU, °C; null as above"),
    "power_w": maybe(NUMBER, "power drawn, W; null as above"),
    "held_back": field(TEXTS, "why the clocks were lower than they could be"),
}

TIMING = {
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
    "conditions": field(Record(fields=CONDITIONS), "clocks, temperature and power while it ran"),
    "memory_bytes": maybe(WHOLE, "device memory held for it, bytes; null where that is not known"),
}

ROW = {
    "name": field(TEXT, "short name, the same at every point"),
    "backend": field(TEXT, "what ran, with its version"),
    "family": field(OneOf(options=("pytorch", "onnxruntime", "tensorrt", "onnx")), "whose it is"),
    "refused": maybe(TEXT, "why it was not timed; null if it was"),
    "timing": maybe(Record(fields=TIMING), "the measurement; null if it was refused"),
    "speedup_over_eager": maybe(NUMBER, "eager's p50 over this one; null where one is missing"),
    "speedup_over_best_pytorch": maybe(NUMBER, "best PyTorch row's p50 over this one; null as above"),
    "tflops": maybe(NUMBER, "10¹² FLOP/s at p50; null if it was refused"),
    "gb_per_s": maybe(NUMBER, "10⁹ bytes/s at p50, counting the bytes of the point; null as above"),
    "tokens_per_s": maybe(
        NUMBER, "tokens/s through this layer at p50, all rows of the batch; null where it is no decode step"
    ),
    "roofline_share": maybe(NUMBER, "floor over p50; null where there is no roofline"),
    "kernels": list_of(
        {
            "name": field(TEXT, "name of the kernel"),
            "calls": field(NUMBER, "how often one call launches it"),
            "microseconds": field(NUMBER, "its time in one call, µs"),
        },
        "the longest kernels of one call; empty where no profiler looked",
    ),
}

ROOFLINE = {
    "gpu": field(TEXT, "whose peak figures"),
    "bound_us": field(NUMBER, "least time of the layer, stage after stage, µs"),
    "bound": field(OneOf(options=("compute", "memory")), "what sets most of the floor"),
    "tflops_peak": field(NUMBER, "peak rate in this precision, 10¹² FLOP/s"),
    "gb_per_s_peak": field(NUMBER, "memory bandwidth, 10⁹ bytes/s"),
}

LATENCY = {
    "gpu": maybe(TEXT, "the GPU; null where every row was refused"),
    "points": list_of(
        {
            "case": field(TEXT, "name of the case"),
            "sizes": field(SIZES, "axis sizes"),
            "past": maybe(
                WHOLE, "most rows of a static cache that were valid before the call; null where there is none"
            ),
            "flops": field(NUMBER, "operations of one call"),
            "bytes": field(NUMBER, "bytes that one call must move"),
            "roofline": maybe(Record(fields=ROOFLINE), "the floor; null for a GPU without known figures"),
            "rows": list_of(ROW, "everything that was timed or refused"),
        },
        "one for every size that was timed",
    ),
}


# -- What `report.json` and `bench.json` hold ------------------------------------------------------


_HEAD = {
    "format": field(WHOLE, f"{REPORT_FORMAT}; any other number is refused"),
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
        "fault": maybe(Record(fields=BLAME), "what a failure comes from; null where nothing failed"),
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
    if isinstance(data, dict) and data.get("format", REPORT_FORMAT) != REPORT_FORMAT:
        yield f"format: {data['format']!r} is not {REPORT_FORMAT}"
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
