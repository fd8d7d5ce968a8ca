"""The tables of a report: built once from its data, rendered by rich, by templates and as Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from mha_deploy.report.charts import decode_curves, runtime_of
from mha_deploy.status import EvidenceSource, Kind, Outcome, Reason, Severity
from mha_deploy.text import (
    NOTHING,
    absent_text,
    budget_share,
    distinct_figures,
    engine_reason_text,
    error,
    group_by,
    part_title,
    plural,
    point_name,
    reason_and_hint,
    short,
    size,
    sizes_joined,
    sizes_text,
    times,
    types_text,
    variation_text,
    yes_no,
)

Data = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The content of a cell."""

    text: str  # what it says
    # How it is marked: `good`, `bad`, `doubt` or `none` for a verdict; `problem` or `aside` for a sentence;
    # `code` for names, one a line; `best` for the fastest; empty for plain text.
    status: str = ""
    order: float | None = None  # what the column is sorted by, where that is not the text
    share: float | None = None  # A share of the budget, drawn as a bar
    note: str = ""  # further text, less prominent, which a terminal has no room for
    hint: str = ""  # text under the pointer
    series: str = ""  # the name of a runtime whose mark stands before the text
    heat: str = ""  # a class of the style sheet that colors the cell of a heat map
    suffix: str = ""  # A sign behind the text
    span: int = 1  # how many columns it takes


Row = Sequence[Cell]
RawRow = str | Sequence[Cell | str | None]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column."""

    name: str  # its heading
    about: str = ""  # what it holds: the tooltip of the heading, and its line in the legend of the page
    numeric: bool = False  # whether it holds numbers, aligned to the right
    short: str = ""  # the heading in a terminal; default: the name
    wide: bool = False  # whether only the page has room for it
    whole: bool = False  # whether a terminal never breaks its lines


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that belong together."""

    rows: Sequence[Any]  # the rows; a cell that spans all columns explains the row above it
    title: str = ""  # their heading; empty for none
    about: str = ""  # details behind the heading


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table."""

    title: str  # what it shows
    columns: Sequence[Column]  # the columns
    groups: Sequence[Group] = field(default_factory=list)  # the rows in groups
    css: str = ""  # A class of the style sheet: `compact` or `matrix`


COLUMNS = {
    "1 − cos": "one minus the cosine between result and oracle",
    "°C": "temperature of the GPU",
    "answered": "answered requests, of all that should be sent",
    "attention": "the Attention node or module, by name",
    "bitwise": "whether the compared results are equal to the last bit",
    "budget used": "the largest of all errors as a share of its budget; more than 100% fails",
    "calls": "launches of the kernel in one call",
    "calls/s": "calls per second on all streams together",
    "case": "the inputs by name; docs/parity.md lists what each is for",
    "clients": "clients that send requests at the same time",
    "compared": "the two results that must agree",
    "compressed": "parts that are compressed, of all that could be",
    "evidence": "what names the kernels: TensorRT's build log or engine inspector, or the engine",
    "failed": "requests without an answer, by kind of error",
    "first wrong": "the first wrong decode step; prefill is the prompt, cache its keys and values at the end",
    "fusion": "fused attentions, of all attentions",
    "gain": "by how much the whole result is too large or small: a wrong scale shows, rounding cancels out",
    "GB/s": "bytes of the inputs, outputs and weights per second at p50",
    "GPU": "the GPU that the cell was built for",
    "graph": "whether calls were timed as a CUDA graph",
    "growth": "median error of the last tenth of the steps, divided by that of the first tenth",
    "growth of eager": "the same growth in eager PyTorch; the two should be close",
    "headroom": "the largest FP16 number, divided by the largest number here",
    "host µs": "time that the host needs to launch one call",
    "its own result": "relative L2 of the part's own result in the compressed model",
    "judged": "the graph, engine or server in place of the bundle's own",
    "kernel": "the CUDA kernel, as the profiler names it",
    "kernels": "the kernels that compute the attention, as the evidence names them",
    "keys at most": "the largest number of keys that one query can attend to",
    "kind": "what is compared or judged",
    "KL": "mean Kullback-Leibler divergence from the reference, in nats",
    "largest q·k": "largest attention score before scaling",
    "loss": "relative L2 between the compressed model and the original, both in FP64",
    "loss of it alone": "the loss of a model in which only this part is compressed",
    "loss, relative L2": "relative L2 between the compressed model and the original, both in FP64",
    "mask": "the form of the mask, as ONNX defines it",
    "max": "largest error of all samples",
    "memory": "device memory that was allocated for the runtime",
    "model": "the model by name",
    "names": "tensors whose names differ in what was judged",
    "new": "the value in the new result",
    "node": "the Attention node in the graph",
    "now": "what became of the part",
    "of p50": "share of the median latency that the kernel takes",
    "of roofline": "the roofline bound as a share of p50",
    "of the weights": "share of the weights that are compressed",
    "old": "the value in the old result",
    "options": "the build options of the plan",
    "output": "the output of the model by name",
    "p50 error": "relative L2 against the FP64 reference, median over the samples",
    "p50 ms": "median time from request to answer, measured by the client",
    "p50 µs": "median latency of one call",
    "p90": "90th percentile of the error over the samples",
    "p90 ms": "90th percentile of the time from request to answer",
    "p90 µs": "90th percentile of the latency",
    "p99": "99th percentile of the error over the samples",
    "p99 ms": "99th percentile of the time from request to answer",
    "p99 of the original": "99th percentile of the error of the source model itself",
    "p99 µs": "99th percentile of the latency",
    "part": "the part of the model by name",
    "precision": "the requested precision, and whether the evidence confirms it",
    "profile": "the optimization profile of the engine",
    "prompts": "tokens of the prompts before the decode steps",
    "reason": "why the status is what it is",
    "rel. L2": "‖result − oracle‖ / ‖oracle‖ over the whole output",
    "replay with --data": "the file that holds the sample",
    "requests/s": "answers per second of all clients together",
    "roofline bound": "shortest time in µs at the datasheet's peak rates; not a prediction",
    "run by": "the runtime that ran it",
    "runtime": "the runtime by name, in some tables with its version",
    "sample": "the sample by name",
    "scaled": "largest attention score after scaling",
    "section": "what kind of property changed",
    "SHA-256": "start of the hash of the file",
    "sizes": "axis sizes of the case",
    "slice": "largest error of one head, query, channel or batch element, over the rounding error there",
    "SM MHz": "clock of the streaming multiprocessors, and its maximum where it was lower",
    "softmax sum": "largest sum of exponentials over the keys of one query",
    "SQNR, dB": "signal-to-quantization-noise ratio in decibels",
    "stable": "whether the last warm-up rounds agreed",
    "status": "what was found; green if it is as it should be",
    "step": "the decode step, from 1",
    "steps": "decode steps that were run",
    "streams": "CUDA streams that were busy at the same time",
    "TFLOP/s": "10¹² floating-point operations per second at p50",
    "tokens/s": "tokens per second through this layer, all batch elements together",
    "top-1": "positions with the same largest logit as the reference",
    "top-5": "share of the reference's five largest logits that are among the five largest",
    "trace": "the recorded prompt and tokens by name",
    "types": "tensors whose types differ in what was judged",
    "verdict": "passed, failed or not verified; in a comparison, how it changed",
    "what": "the property that was compared",
    "what must not matter": "batch slot, batch size or profile: results must agree within the budget",
    "what was run instead": "the variant that was run to locate the fault",
    "why": "the reason for the verdict",
    "worst vector": "rel. L2 of the worst vector along the last axis: one token, or one query's weights",
    "written in": "the type that the part is stored in",
    "wrong outputs": "outputs out of budget, of all that were judged",
    "× best PyTorch": "latency of the best PyTorch baseline, divided by this one: above 1 is faster",
    "× eager": "latency of eager PyTorch, divided by this one: above 1 is faster",
    "µs": "time of the kernel in one call",
}
"""What the columns of all pages hold, by heading."""


def column(heading: str, about: str = "") -> Column:
    """A column from its heading; `about` explains one that is named by the data.

    `#` is before numbers, `+` before what only the page has room for, `!` before what a terminal does not
    wrap. `budget used|used` has a shorter heading in a terminal.
    """
    name = heading.lstrip("#+!")
    signs, (long, _, brief) = heading.removesuffix(name), name.partition("|")
    numeric, whole = "#" in signs, "!" in signs or long == "verdict"
    words = COLUMNS.get(long, about) if long else ""
    is_whole, is_wide = numeric or whole, "+" in signs
    return Column(name=long, about=words, numeric=numeric, short=brief, wide=is_wide, whole=is_whole)


def table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[RawRow] = (),
    css: str = "",
    groups: Sequence[Group] | None = None,
    others: str = "",
) -> Table:
    """A table of rows, or of groups of them; `others` explains the columns that are named by the data.

    In a row, a string is plain text, and nothing is a dash. A string in place of a row is a sentence about
    the row above it, in all columns.
    """
    shown = [column(heading, others) for heading in headings]

    def cells(row: RawRow) -> Row:
        if isinstance(row, str):
            return [Cell(text=row, status="problem", span=len(shown))]
        return [each if isinstance(each, Cell) else Cell(text=each or NOTHING) for each in row]

    found = [Group(rows=list(rows))] if groups is None else groups
    made = [replace(group, rows=[cells(row) for row in group.rows]) for group in found]
    return Table(title=title, columns=shown, groups=made, css=css)


def number(value: float | None, show: Callable[[Any], str] = short) -> Cell:
    """A number as it is shown, sorted by what it is; a dash for nothing."""
    return Cell(text=NOTHING if value is None else show(value), order=value)


MARKS = {Outcome.PASSED: "good", Outcome.FAILED: "bad", Outcome.NOT_VERIFIED: "doubt"}
"""How outcomes are marked, everywhere."""


def outcome_cell(outcome: str) -> Cell:
    """The verdict of one row; a failure is written so that it is seen."""
    found = Outcome(outcome)
    return Cell(text=found.upper() if found is Outcome.FAILED else found.value, status=MARKS[found])


def shown_findings(verdict: Data) -> list[Data]:
    """The findings of a verdict, without notes that repeat its headline or another finding."""
    kinds = {each["kind"] for each in verdict["findings"]}
    listed = not kinds.isdisjoint((Kind.ENGINE_NOT_RUN, Kind.ENGINE_GONE))  # each engine that was not run

    def is_repeated(each: Data) -> bool:
        return bool(each.get("in_headline")) or (each["kind"] == Kind.NOT_RUN and listed)

    findings: list[Data] = verdict["findings"]
    return [each for each in findings if each["level"] != Severity.NOTE or not is_repeated(each)]


def shown_notes(report: Data, *, without: Collection[str] = ()) -> list[str]:
    """What was not run here, but what is named in `without`, and what else a reader should know."""
    absent = (each for each in report.get("absent", ()) if each["name"] not in without)
    return [*(absent_text(each["name"], each["reason"]) for each in absent), *report["notes"]]


def bench_notes(models: Sequence[Data]) -> list[str]:
    """What of a benchmark could not be timed here, by model."""
    absent = [(each["model"]["name"], one) for each in models for one in each["absent"]]
    return list(dict.fromkeys(f"{name}: {absent_text(one['name'], one['reason'])}" for name, one in absent))


_NOTABLE = ("bad", "doubt", "over", "problem")


def split_passed(built: Table) -> tuple[Table | None, list[Table]]:
    """The rows that a reader should see, and those that are as they should be: a table of each group."""
    notable, quiet = [], []
    for group in built.groups:
        rows: dict[bool, list[Any]] = {True: [], False: []}
        units: list[list[Row]] = []
        for row in group.rows:  # a sentence belongs to the row above it
            if units and row[0].span == len(built.columns):
                units[-1].append(row)
            else:
                units.append([row])
        for unit in units:
            rows[any(cell.status in _NOTABLE for row in unit for cell in row)] += unit
        notable += [replace(group, rows=rows[True])] if rows[True] else []
        quiet += [replace(built, groups=[replace(group, rows=rows[False])])] if rows[False] else []
    return (replace(built, groups=notable) if notable else None), quiet


def passed_words(built: Table) -> str:
    """A table of rows that are as they should be, in a few words: `5 passed, at most 38% of the budget`."""
    rows = [row for group in built.groups for row in group.rows]
    marked = (next((cell.text for cell in row if cell.status in ("good", "none")), "") for row in rows)
    words = Counter("conform" if word == "conforms" else word for word in marked)
    counts = ", ".join(f"{count} {word}".rstrip() for word, count in words.items())
    shares = [cell.share for row in rows for cell in row if cell.share is not None]
    return f"{counts}, at most {budget_share(max(shares))} of the budget" if shares else counts


def share_cell(share: float | None, *, failed: bool = False) -> Cell:
    """A share of the budget; one that failed without a number is sorted behind all others."""
    if share is None:
        return Cell(text="no number" if failed else NOTHING, order=1e300 if failed else None)
    return Cell(text=budget_share(share), order=share, share=share)


# -- Parity ----------------------------------------------------------------------------------------

_ERRORS = ("#rel. L2", "#worst vector|vector", "#slice", "#gain", "+#1 − cos", "#budget used|used")


def parity_table(runs: Sequence[Data], explained: Sequence[Data] | None = None) -> Table:
    """A row for every output of every case, in a group for every run.

    `explained` are the verdicts whose reasons are shown; default: all that did not pass.
    """
    several = len({verdict["output"] for run in runs for verdict in run["verdicts"]}) > 1
    groups = []
    for run in runs:
        rows: list[RawRow] = []
        for verdict in run["verdicts"]:
            made = _verdict_rows(verdict, verdict["case"], sizes_text(verdict["sizes"]), verdict["output"])
            rows += made if explained is None or verdict in explained else made[:1]
        kind = run["accumulation"]["type"].upper()
        title = f"{runtime_of(run)}, {run['cases']} cases, budget for {kind} accumulation"
        groups.append(Group(title=title, rows=rows))
    headings = ("case", "verdict", "sizes", "!output" if several else "+output", *_ERRORS)
    return table("Error of every output, and its share of the budget", headings, groups=groups)


def layers_table(runs: Sequence[Data], explained: Sequence[Data] | None = None) -> Table:
    """A row for every attention of a user's module; `explained` as of `parity_table`."""
    groups = []
    for run in runs:
        rows: list[RawRow] = []
        for verdict in run["verdicts"]:
            made = _verdict_rows(verdict, Cell(text=verdict["output"], status="code"))
            rows += made if explained is None or verdict in explained else made[:1]
        sizes = f" at {sizes_text(run['verdicts'][0]['sizes'])}" if run["verdicts"] else ""
        groups.append(Group(title=f"{run['runtime']}{sizes}", rows=rows))
    headings = ("attention", "verdict", _ERRORS[0], *(f"+{name}" for name in _ERRORS[1:-1]), _ERRORS[-1])
    return table("Every attention by itself, against its own oracle", headings, groups=groups)


def _verdict_rows(verdict: Data, name: Cell | str, *place: str) -> list[RawRow]:
    """The row of a verdict and, where it did not pass, the reason below it."""
    result, is_right = outcome_cell(verdict["outcome"]), verdict["outcome"] == Outcome.PASSED
    deviation, budget = verdict["deviation"] or {}, verdict["budget"] or {}
    figures = []
    for key in ("relative_l2", "worst_vector", "local", "gain"):
        value, limit = deviation.get(key), budget.get(key)
        over = value is not None and limit is not None and value > limit
        hint = "" if limit is None else f"budget {error(limit)}"
        figures.append(Cell(text=error(value), order=value, status="over" if over else "", hint=hint))
    cosine = deviation.get("cosine")
    rest = number(None if cosine is None else 1.0 - cosine, error)
    share = share_cell(verdict["share"], failed=not is_right)
    row = (name, result, *place, *figures, rest, share)
    return [row] if is_right else [row, _problem_text(verdict)]


def types_of(report: Data) -> str:
    """The precision of a model in a heading: that of its GEMMs, too, where they have another."""
    return types_text(report["model"]["precision"], report["model"].get("quantized"))


def _problem_text(verdict: Data) -> str:
    """Why an output failed, and where it is worst."""
    words, worst = reason_words(verdict["reason"], verdict["share"]), verdict["deviation"]
    if worst is not None and verdict["outcome"] == Outcome.FAILED:
        place = ", ".join(map(str, worst["worst_index"]))
        ends = (worst["worst_got"], worst["worst_want"])
        got, want = ("no finite number" if each is None else f"{each:.6g}" for each in ends)
        words += f"; worst element [{place}]: got {got}, oracle {want}"
    return f"{verdict['case']}/{verdict['output']}: {words}"


def reason_words(reason: Data | None, share: float | None = None) -> str:
    """A reason in words, with what to try."""
    return reason_and_hint(None if reason is None else msgspec.convert(reason, Reason), share=share)


# -- Decode ----------------------------------------------------------------------------------------

_LISTED_PROMPTS = 4


def decode_table(reports: Sequence[Data], most: int | None = None) -> Table:
    """The verdict on every runtime and trace, with so many of the checks that failed."""
    rows: list[RawRow] = []
    for report in reports:
        planned, run = f"{report['steps']:,}", len(report["errors"])
        prompts = prompts_text(report["prompt"], noun=False)
        steps = f"{run:,} of {planned}" if run < report["steps"] else planned
        wrong = place_text(report["first_failed"], report["failed"])
        share = share_cell(report["share"], failed=report["outcome"] != Outcome.PASSED)
        growth = (number(report[key], times) for key in ("growth", "eager_growth"))
        about = (runtime_of(report), outcome_cell(report["outcome"]), report["trace"], prompts)
        rows.append((*about, Cell(text=steps, order=report["steps"]), wrong, share, *growth))
        rows += decode_problems(report, most)
    figures = ("#steps", "first wrong|wrong at", "#budget used|used", "#growth", "#growth of eager|eager's")
    headings = ("runtime", "verdict", "!trace", "prompts", *figures)
    return table("Decoding, by runtime and trace", headings, rows)


def decode_problems(report: Data, most: int | None = None) -> list[str]:
    """The first checks that failed, and how many more there are."""
    lines = []
    for failure in report["failures"][:most]:
        words = f"{failure['case']}/{failure['output']}: {reason_words(failure['reason'], failure['share'])}"
        worst = failure["deviation"]
        if worst is not None and worst["worst_got"] is not None and worst["worst_want"] is not None:
            words += f": got {worst['worst_got']:.6g}, oracle {worst['worst_want']:.6g}"
        lines.append(words)
    more = report["failed"] - sum(failure["outcome"] == "failed" for failure in report["failures"][:most])
    return [*lines, f"and {more:,} more of {plural(report['judged'], 'check')}"] if more > 0 else lines


def steps_table(reports: Sequence[Data]) -> Table | None:
    """The errors of all runtimes at steps 1, 2, 4, … of one trace; None where no step was run."""
    curves = decode_curves(reports)
    last = max(len(errors) for errors in curves.values())
    if not last:
        return None
    rows = []
    for step in sorted({*(2**k for k in range(last.bit_length())), last}):
        at = [errors[step - 1] if step <= len(errors) else None for errors in curves.values()]
        rows.append([number(step, "{:,}".format), *(number(value, error) for value in at)])
    title = f"Relative L2 at some steps of trace {reports[0]['trace']}"
    words = "relative L2 of the step in this runtime"
    return table(title, ("#step", *(f"#{curve}" for curve in curves)), rows, css="compact", others=words)


def prompts_text(prompt: Sequence[int], *, noun: bool = True) -> str:
    """The lengths of the prompts in a few words; a list of them without the `noun` under its heading."""
    if len(prompt) == 1:
        return f"a prompt of {prompt[0]}"
    if len(set(prompt)) == 1:
        return f"{len(prompt)} prompts of {prompt[0]}"
    if 0 < len(prompt) <= _LISTED_PROMPTS:
        return f"{'prompts of ' * noun}{', '.join(map(str, prompt[:-1]))} and {prompt[-1]}"
    return f"{len(prompt)} prompts of {min(prompt)} to {max(prompt)}" if prompt else "no prompt"


def place_text(first_failed: int | None, failed: int) -> str:
    """Where decoding went wrong first."""
    if first_failed is None:
        return "cache" if failed else NOTHING
    return f"step {first_failed}" if first_failed else "prefill"


# -- Invariance, masks, FP16 range, fault ----------------------------------------------------------


def invariance_table(checks: Sequence[Data]) -> Table:
    """What must not matter, and whether it does."""
    rows: list[RawRow] = []
    for check in checks:
        verdict, bitwise = outcome_cell(check["outcome"]), yes_no(check["bitwise"])
        share = share_cell(check["share"], failed=check["outcome"] == Outcome.FAILED)
        if not check["case"]:  # there was nothing to compare, and the text says why
            verdict, bitwise, share = Cell(text="not checked", status="none"), "", Cell(text=NOTHING)
        what = (check["check"], verdict, variation_text(check), check["runtime"], check["case"])
        rows.append((*what, bitwise, share))
        rows += [check["problem"]] if check["problem"] else []
    title = "Results that must not depend on other batch elements, batch sizes or profiles"
    headings = ("what must not matter", "verdict", "compared", "runtime", "case", "bitwise", "#budget used")
    return table(title, headings, rows)


def loss_table(found: Data) -> Table:
    """What a compressed model lost: every output, against the original in FP64."""
    rows: list[RawRow] = []
    for each in found["outputs"]:
        sqnr = NOTHING if each["sqnr_db"] is None else f"{each['sqnr_db']:.1f}"
        top1 = NOTHING if each["top1"] is None else f"{each['top1']:.1%}"
        rows.append((each["name"], number(each["relative_l2"], error), sqnr, top1, number(each["kl"], error)))
    how = f", calibrated by {found['calibration']}" if found["calibration"] else ""
    kind = "held-out sample" if found["held_out"] else "sample"
    title = f"Loss of {found['what']}{how}: {plural(found['samples'], kind)} of {found['data']}"
    title += "" if found["limit"] is None else f", limit {found['limit']:g}"
    if metric := found["metric"]:
        own, theirs = distinct_figures(metric["compressed"], metric["original"])
        title += f"; {metric['name']}: {own}, original {theirs}"
    return table(title, ("output", "#loss, relative L2|loss", "#SQNR, dB|dB", "#top-1", "#KL"), rows)


def sensitivity_table(found: Data) -> Table:
    """What each part of a model costs: alone, and its own result in the compressed model."""
    rows: list[RawRow] = []
    parts = sorted(found["layers"], key=lambda each: -(each["alone"] or 0.0))
    done, left = {"heads": ("removed", "kept"), "kv-heads": ("pooled", "kept")}.get(
        found["what"], (found["what"], "as it was")
    )
    for each in parts:
        status = done if each["is_compressed"] else left
        own = number(each["relative_l2"], error)
        part = part_title(each["name"], each["heads"])
        rows.append((part, status, number(each["alone"], error), own))
    if done in ("removed", "pooled"):
        title = "Sensitivity: the loss without one head alone; a head that took over another one stays"
        title = title if done == "removed" else "Sensitivity: the loss of pooling the heads of one attention"
        headings = ("part", "now", "#loss of it alone|alone")
        return table(title, headings, [row[:3] for row in rows])
    title = (
        "Sensitivity: loss of the outputs with this part alone compressed; loss of its own result with all"
    )
    return table(title, ("part", "written in", "#loss of it alone|alone", "#its own result|own"), rows)


def search_table(found: Data) -> Table:
    """The choices that were tried, from all parts to few."""
    rows: list[RawRow] = [
        (
            f"{each['compressed']} of {len(found['layers'])}",
            f"{each['share']:.0%}",
            number(each["loss"], error),
            "chosen" if each["is_chosen"] else "",
        )
        for each in found["search"]
    ]
    headings = ("#compressed", "#of the weights|weights", "#loss", "")
    return table("Search: the most sensitive parts stay as they were", headings, rows)


def data_table(found: Data) -> Table:
    """A user's own samples: every runtime and output, with the spread of its error over the samples."""
    groups = []
    for each in found["runtimes"]:
        rows: list[Row] = []
        for output in each["outputs"]:
            own = output["error"] or {}
            theirs, agreed = output["original_error"] or {}, output["agreement"] or {}
            shares = [Cell(text=f"{agreed[n]:.1%}" if agreed else NOTHING) for n in ("top1", "top5")]
            rows.append([
                Cell(text=output["name"]),
                *(number(own.get(name), error) for name in ("p50", "p90", "p99", "max")),
                number(theirs.get("p99"), error),
                *shares,
                number(agreed.get("kl"), error),
            ])  # fmt: skip
        counts = f"{plural(each['samples'], 'sample')}, {each['failed']} wrong"
        counts += f", {each['not_verified']} not verified" if each["not_verified"] else ""
        counts += f", {len(each['outside'])} outside its profiles" if each["outside"] else ""
        if used := each["share"]:
            counts += f"; budget used: median {budget_share(used['p50'])}, most {budget_share(used['max'])}"
        if metric := each["metric"]:
            name, value, original = metric["name"], metric["value"], metric["original"]
            own, theirs = distinct_figures(value, original)
            counts += f"; {name}: {own}, original {theirs}"
        groups.append(Group(title=each["runtime"], about=counts, rows=rows))
    errors = ("#p50 error", "+#p90", "#p99", "#max", "#p99 of the original|original")
    headings = ("output", *errors, "#top-1", "#top-5", "#KL")
    return table(f"Your data: {found['source']}", headings, groups=groups)


def worst_table(found: Data, folder: Path | None = None) -> Table:
    """The samples that came nearest to their budgets, with the files that replay them, by their folder."""
    beside = folder or Path()
    rows: list[RawRow] = []
    for each in found["runtimes"]:
        for one in each["worst"]:
            share = share_cell(one["share"], failed=one["outcome"] == Outcome.FAILED)
            file, outcome = str(beside / one["file"]), outcome_cell(one["outcome"])
            rows.append((each["name"], one["sample"], outcome, share, file))
    headings = ("runtime", "sample", "verdict", "#budget used", "replay with --data")
    return table("Worst samples", headings, rows)


def subjects_table(subjects: Sequence[Data]) -> Table:
    """What was judged in place of the bundle's own graph and engines."""
    rows: list[RawRow] = []
    for each in subjects:
        renamed = ", ".join(f"{theirs} is {ours}" for theirs, ours in each["names"].items())
        types = [
            f"{', '.join(one['tensor'] for one in alike)}: {alike[0]['subject']}, not {alike[0]['bundle']}"
            for alike in group_by(each["converted"], lambda one: (one["subject"], one["bundle"]))
        ]
        unknown = NOTHING if each["kind"] == "graph" else "not known"  # kernels are not a graph's
        plan = each["plan"] or {"fusion": unknown, "precision": unknown}
        hashed = (each["sha256"] or NOTHING)[:12]
        about = (renamed or NOTHING, "; ".join(types) or NOTHING, plan["fusion"], plan["precision"])
        why = "; ".join(map(engine_reason_text, plan.get("reasons", ()))) or NOTHING
        rows.append((each["name"], each["kind"], each["runtime"], hashed, *about, why))
    headings = ("judged", "kind", "run by", "+SHA-256", "names", "types", "fusion", "precision", "reason")
    return table("What was judged in place of the bundle's own", headings, rows)


def serving_table(points: Sequence[Data]) -> Table:
    """How a server did, by the number of clients."""
    rows: list[RawRow] = []
    for point in points:
        clients, answered = number(point["clients"], str), f"{point['answered']}/{point['requests']}"
        kinds = ", ".join(f"{count} {kind}" for kind, count in point["errors"].items())
        failed = Cell(text=kinds or "0", status="problem" if any(point["errors"].values()) else "")
        waited = (number(point[name], "{:,.2f}".format) for name in ("p50_ms", "p90_ms", "p99_ms"))
        rate = number(point["per_second"], "{:,.1f}".format)
        wrong = Cell(text=f"{point['wrong']}/{point['judged']}", status="problem" if point["wrong"] else "")
        rows.append((clients, answered, failed, *waited, rate, wrong))
    names = ("p50 ms", "p90 ms", "p99 ms", "requests/s", "wrong outputs")
    headings = ("#clients", "#answered", "failed", *(f"#{name}" for name in names))
    return table("Through the server", headings, rows)


def throughput_table(rows: Sequence[Data]) -> Table:
    """Calls per second on several streams, by size and runtime."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        figures = {"streams": "{}", "per_second": "{:,.0f}", "p50_us": "{:,.1f}", "p99_us": "{:,.1f}"}
        made = [number(row[key], form.format) for key, form in figures.items()]
        if row["refused"] is not None:
            made = [Cell(text=row["refused"], status="problem", span=4)]
        runtime = Cell(text=row["name"], series=row["name"])
        groups.setdefault(sizes_text(row["sizes"]), []).append([runtime, *made])
    found = [Group(title=title, rows=rows) for title, rows in groups.items()]
    headings = ("runtime", "#streams", "#calls/s", "#p50 µs", "#p99 µs")
    return table("Throughput on several CUDA streams", headings, groups=found)


CONFORMANCE = {"conforms": "good", "wrong": "bad", "refused": "doubt", "absent": "none"}


def conformance_table(found: Data) -> Table:
    """Masks by runtimes."""
    rows: dict[bool, list[Row]] = {False: [], True: []}
    for row in found["rows"]:
        made = [Cell(text=row["case"], status="code", note=row["about"])]
        for cell in (row["cells"][name] for name in found["columns"]):
            note = "" if cell["error"] is None else error(cell["error"])
            made.append(Cell(text=cell["status"], status=CONFORMANCE[cell["status"]], note=note))
        rows[row["diagnostic"]].append(made)
    diagnostic = Group(rows=rows[True], title="What runtimes do by default; not part of the verdict")
    about = f"{found['precision']}, seed {found['seed']}; the numbers are relative L2"
    groups = [Group(rows=rows[False]), *([diagnostic] if rows[True] else [])]
    headings, words = ("mask", *found["columns"]), "what this runtime does with the mask, and its relative L2"
    title = f"Masks as ONNX defines them, {about}"
    return table(title, headings, css="matrix", groups=groups, others=words)


_MASK_STATUSES = ("wrong", "refused", "conforms", "absent")  # what a runtime does with a mask


def conformance_reasons(found: Data, statuses: Sequence[str] = _MASK_STATUSES) -> list[tuple[str, str]]:
    """Every reason of these statuses with the runtime and the masks that it is about."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in found["rows"]:
        for name in found["columns"]:
            cell = row["cells"][name]
            if cell["detail"]:
                reasons.setdefault((name, cell["status"], cell["detail"]), []).append(row["case"])
    lines = []
    for status in statuses:
        for (name, _, detail), masks in (item for item in reasons.items() if item[0][1] == status):
            about = "every mask" if len(masks) == len(found["rows"]) else ", ".join(masks)
            lines.append((f"{name}, {status}", f" ({about}): {detail}"))
    return lines


_RANGES = {"ok": "good", "near": "doubt", "overflows": "bad"}


def range_table(nodes: Sequence[Data]) -> Table:
    """The largest numbers of every attention."""
    keys = ("largest_score_raw", "largest_score", "largest_softmax_sum")
    rows = []
    for node in nodes:
        status = Cell(text=node["status"], status=_RANGES[node["status"]])
        most, room = number(node["max_keys"], "{:,}".format), number(node["headroom"], times)
        figures = (*(number(node[key]) for key in keys), most, room)
        rows.append([Cell(text=node["node"], status="code"), status, *figures])
    title = "Largest numbers of every attention on golden data; FP16 ends at 65,504"
    names = ("largest q·k", "scaled", "softmax sum", "keys at most", "headroom")
    return table(title, ("node", "status", *(f"#{name}" for name in names)), rows)


def trials_table(trials: Sequence[Data]) -> Table:
    """What was run to attribute a fault."""
    rows = [
        (
            each["name"] if each["reason"] is None else f"{each['name']}, {reason_words(each['reason'])}",
            outcome_cell(each["outcome"]),
            share_cell(each["share"], failed=each["outcome"] == "failed"),
        )
        for each in trials
    ]
    return table("Trials", ("what was run instead", "verdict", "#budget used"), rows, css="compact")


# -- Engines ---------------------------------------------------------------------------------------

FUSION = {"fused": "good", "decomposed": "bad", "unknown": "doubt"}


def engine_summary(engine: Data) -> str:
    """Fusion and precision of an engine: `1/1 fused, precision: fp16 (verified)`."""
    # Here, since a terminal that shows no engine need not load it.
    from mha_deploy.engine.engine import fusion_summary, precision_summary

    fused, count = [*engine["fused"], 0, 0][:2]
    precision = precision_summary(
        engine["precision_status"],
        engine["precision"],
        gemms=engine.get("gemms"),
        attentions=engine.get("quantized_attentions"),
        unquantized=engine.get("unquantized_attentions"),
        reasons=engine["precision_reasons"],
    )
    return f"{fusion_summary(fused, count, engine['nodes'])}, {precision}"


_SOURCES = {
    EvidenceSource.LOG: "build log",
    EvidenceSource.PLAN: "engine",
    EvidenceSource.INSPECTOR: "inspector",
    EvidenceSource.GRAPH: "graph",
}


def sources_text(sources: Iterable[EvidenceSource]) -> str:
    """What detected whether an attention is fused, in words: `build log, engine` for `log` and `plan`."""
    return ", ".join(_SOURCES[each] for each in sources)


def fusion_table(engines: Sequence[Data]) -> Table:
    """A row for every attention node and profile of every engine."""
    groups = []
    for engine in engines:
        names: dict[int | None, str] = {None: NOTHING, **dict(enumerate(engine["profile_names"]))}
        seconds = "" if engine["seconds"] is None else f"in {short(engine['seconds'])} s "
        about = [
            engine_summary(engine),
            f"attention: {engine['attention']}",
            *(f"needs {library}" for library in engine["plugins"]),
            f"built {seconds}{engine['built']}",
            size(engine["engine_bytes"]) if engine["engine_bytes"] is not None else "",
            *(
                f"profile {names[index]}: " + " ".join(f"{axis} {span}" for axis, span in each.items())
                for index, each in enumerate(engine["profiles"])
            ),
        ]
        rows: list[RawRow] = []
        for node in engine["nodes"]:
            profile = Cell(text=names.get(node["profile"], str(node["profile"])), order=node["profile"])
            status = Cell(text=node["status"], status=FUSION[node["status"]])
            kernels = Cell(text="\n".join(node["kernels"]), status="code") if node["kernels"] else None
            name = Cell(text=node["node"], status="code")
            why = "; ".join(map(engine_reason_text, node["reasons"]))
            rows.append((name, profile, status, kernels, sources_text(node["sources"]), why))
        named = f"{engine['name']} " if engine["name"] != engine["backend"] else ""
        title = f"{named}{engine['backend']} {engine['version']}"
        groups.append(Group(title=title, about=" · ".join(filter(None, about)), rows=rows))
    headings = ("node", "profile", "status", "kernels", "evidence", "reason")
    return table("Every attention in the engines, with the evidence", headings, groups=groups)


# -- Latency ---------------------------------------------------------------------------------------


def point_sizes(point: Data) -> str:
    """The sizes, and how many entries of a preallocated KV cache were valid, which no size shows."""
    filled = "" if point["past"] is None else f", {point['past']:,} KV-cache entries"
    return f"{sizes_text(point['sizes'])}{filled}"


def latency_table(points: Sequence[Data]) -> Table:
    """Everything that was timed or refused, in a group for every size."""
    decodes = any(row["tokens_per_s"] is not None for point in points for row in point["rows"])
    # GEMMs bound a prefill; memory and tokens are what counts in a decode step.
    prefill, decode = ("+", "") if decodes else ("", "+")
    headings = (
        "runtime", "#p50 µs", f"{prefill}#p90 µs|p90", "#p99 µs|p99", "#× eager", "#× best PyTorch|× best",
        f"{prefill}#TFLOP/s", f"{decode}#GB/s", *(["#tokens/s"] if decodes else []), "#of roofline|roofline",
        "+#memory", "+#host µs", "+graph", "+stable", "+#SM MHz", "+#°C",
    )  # fmt: skip
    groups = []
    for point in points:
        name, roof = point_name(point["case"], point["sizes"]), point["roofline"]
        bound = f" · roofline bound {short(roof['bound_us'])} µs, {roof['bound']}-bound" if roof else ""
        work = f"{short(point['flops'] / 1e9)} GFLOP · {size(int(point['bytes']))}{bound}"
        rows = [_timing_row(row, len(headings), decodes=decodes) for row in point["rows"]]
        groups.append(Group(title=f"{name} {point_sizes(point)}".strip(), about=work, rows=rows))
    return table("Latency of every runtime at every size", headings, groups=groups)


def _timing_row(row: Data, width: int, *, decodes: bool) -> RawRow:
    timing, name = row["timing"], Cell(text=row["name"], series=row["name"], hint=row["runtime"])
    if timing is None:
        reason = f"not timed: {row['refused'] or 'no reason was given'}"
        return [name, Cell(text=reason, status="aside", span=width - 1)]
    conditions = timing["conditions"]
    clock, most = conditions["sm_mhz"], conditions["sm_mhz_max"]
    lower = clock is not None and most is not None and clock < most
    megahertz = number(clock, lambda mhz: f"{mhz:,.0f} of {most:,.0f}" if lower else f"{mhz:,.0f}")
    throttled = ", ".join(conditions["throttled_by"])
    return [
        name,
        *(number(timing[key]) for key in ("p50_us", "p90_us", "p99_us")),
        *(number(row[key], times) for key in ("speedup_over_eager", "speedup_over_best_pytorch")),
        *(number(row[key]) for key in ("tflops", "gb_per_s")),
        *([number(row["tokens_per_s"])] if decodes else []),
        number(row["roofline_share"], "{:.0%}".format),
        number(timing["memory_bytes"], size),
        number(timing["host_us"]),
        yes_no(timing["graph"]),
        "yes" if timing["stable"] else Cell(text="no", status="doubt"),
        replace(megahertz, note=f"throttled: {throttled}" if throttled else ""),
        number(conditions["temperature_c"], "{:,.0f}".format),
    ]


def kernels_table(point: Data) -> Table:
    """The longest kernels of every runtime at one size."""
    rows: list[Row] = []
    for row, kernel in ((each, kernel) for each in point["rows"] for kernel in each["kernels"]):
        runtime, name = Cell(text=row["name"], series=row["name"]), Cell(text=kernel["name"], status="code")
        share = kernel["microseconds"] / row["timing"]["p50_us"] if row["timing"] else None
        calls, spent = number(kernel["calls"], "{:g}".format), number(kernel["microseconds"])
        rows.append([runtime, name, calls, spent, number(share, "{:.0%}".format)])
    return table(f"Kernels at {point_sizes(point)}", ("runtime", "kernel", "#calls", "#µs", "#of p50"), rows)


# -- A benchmark at a glance -----------------------------------------------------------------------


def overview_table(bench: Data) -> Table | None:
    """A row for every model and size, a column for every runtime; None where nothing was timed."""
    points = bench_points(bench)
    if not points:
        return None
    names = list(dict.fromkeys(row["name"] for _, point in points for row in point["rows"]))
    axes = {"×".join(point["sizes"]) for _, point in points}
    heading = axes.pop() if len(axes) == 1 else "sizes"
    rows = []
    for model, point in points:
        by_name = {row["name"]: row for row in point["rows"]}
        timed: list[Cell | str | None] = []
        for name in names:
            row = by_name.get(name)
            timing = row["timing"] if row else None
            if timing is None:
                timed.append("refused" if row else None)
                continue
            best, sign = name == fastest(point), "" if timing["graph"] else "*"
            p50 = number(timing["p50_us"])
            timed.append(replace(p50, status="best" if best else "", suffix=sign))
        bound = point["roofline"]["bound_us"] if point["roofline"] else None
        sizes = (sizes_text if heading == "sizes" else sizes_joined)(point["sizes"])
        rows.append((f"{model['name']} {model['precision']}", sizes, *timed, number(bound)))
    headings = ("model", heading, *(f"#{name}" for name in names), "#roofline bound")
    title, words = "p50 in µs; the fastest of each line is bold", "p50 of this runtime, µs"
    made = table(title, headings, rows, others=words)
    sizes_column = replace(made.columns[1], about="axis sizes of the case")
    return replace(made, columns=[made.columns[0], sizes_column, *made.columns[2:]])


def bench_points(bench: Data) -> list[tuple[Data, Data]]:
    """Every point that was timed, with its model."""
    timed = [entry for entry in bench["models"] if entry["latency"]]
    return [(entry["model"], point) for entry in timed for point in entry["latency"]["points"]]


def fastest(point: Data) -> str | None:
    """The fastest runtime at one size."""
    timed = [row for row in point["rows"] if row["timing"]]
    return min(timed, key=lambda row: row["timing"]["p50_us"])["name"] if timed else None


def without_graph(points: Sequence[Data]) -> str | None:
    """What was timed without a CUDA graph, and why where there should have been one; None for nothing."""
    reasons: dict[str, list[str]] = {}
    for row in (row for point in points for row in point["rows"]):
        if row["timing"] and not row["timing"]["graph"]:
            known, why = reasons.setdefault(row["name"], []), row["timing"]["why_no_graph"]
            known.extend([why] if why and why not in known else [])
    names = [f"{name} ({'; '.join(known)})" if known else name for name, known in reasons.items()]
    return f"timed without a CUDA graph: {', '.join(names)}" if names else None


def tsv(table: Table) -> str:
    """A table as tab-separated values, for a spreadsheet."""
    rows = [[cell.text + cell.suffix for cell in row] for group in table.groups for row in group.rows]
    lines = [[column.name for column in table.columns], *rows]
    return "".join("\t".join(" ".join(cell.split()) for cell in line) + "\n" for line in lines)


def markdown(table: Table) -> str:
    """A table as Markdown; what is best is bold, and nothing in a cell can become markup."""
    lines = [
        f"| {' | '.join(markdown_text(column.name) for column in table.columns)} |",
        f"|{'|'.join('---:' if column.numeric else '---' for column in table.columns)}|",
    ]
    for row in (row for group in table.groups for row in group.rows):
        bold = ["**" if cell.status == "best" else "" for cell in row]
        cells = [
            f"{mark}{markdown_text(cell.text)}{mark}{markdown_text(cell.suffix)}"
            for mark, cell in zip(bold, row, strict=True)
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def markdown_text(words: str) -> str:
    """Text that cannot break a table or become markup."""
    single = re.sub(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]+", " ", words)
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", single).replace("&", "&amp;").replace("<", "&lt;")
