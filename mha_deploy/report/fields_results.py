"""The records of a report that say whether results are right."""

from __future__ import annotations

from mha_deploy.report.fields import FLAG, NUMBER, SIZES, TEXT, TEXTS, WHOLE, field, list_of, maybe
from mha_deploy.report.shape import Anything, ListOf, MapOf, Maybe, OneOf, Record

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
