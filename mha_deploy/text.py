"""Figures, lists, reasons and findings as text: the one place where data becomes sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

from mha_deploy.status import CaseKind, Finding, Gap, Kind, Obstacle, Place, Reason, ReasonKind, Variation

# -- Numbers ---------------------------------------------------------------------------------------

NOTHING = "–"


def short(value: float | None) -> str:
    """Three significant digits; an exponent only for what is very small or very large."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size == 0:
        return "0"
    if not size < 1e7 or size < 0.001:
        return error(value)
    text = f"{value:,.0f}" if size >= 99.95 else f"{value:#.3g}".rstrip(".")
    return text.replace("-", "−")


def distinct_figures(value: float, other: float) -> tuple[str, str]:
    """Two figures with as many digits as show that they differ, if they do."""
    usual = short(value), short(other)
    if value == other or usual[0] != usual[1]:
        return usual
    pairs = ((f"{value:.{digits}g}", f"{other:.{digits}g}") for digits in range(4, 18))
    return next(((a, b) for a, b in pairs if a != b), usual)


def error(value: float | None) -> str:
    """An error: two digits and an exponent, so that a column of them can be compared at a glance."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if 0.1 <= abs(value) < 1e7:
        return short(value) if abs(value) >= 1 else f"{value:.2g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return "0" if value == 0 else f"{mantissa}e{int(exponent)}".replace("-", "−")


def tick(value: float) -> str:
    """The label of an axis tick."""
    return f"{value:,.0f}" if value >= 1e3 else f"{value:.6g}" if value >= 1e-3 else short(value)


def budget_share(share: float) -> str:
    """A share of the budget in per cent, or as a multiple where per cent would be long."""
    return f"{share:.0%}" if share < 10 else f"{short(share)}×"


def times(factor: float) -> str:
    """A speed-up."""
    return f"{factor:,.2f}×" if factor < 100 else f"{factor:,.0f}×"


def size(count: int, unit: str = "B") -> str:
    """Bytes, or a count of something else, with the prefix that keeps it short."""
    for prefix, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= factor:
            return f"{short(count / factor)} {prefix}{unit}"
    return f"{count} {unit}".rstrip()


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Axis sizes with their names."""
    return ", ".join(f"{axis}={value}" for axis, value in sizes.items())


def beyond_text(sizes: Mapping[str, int], axes: Mapping[str, Any]) -> str:
    """Sizes that are beyond their axes, with the ranges of these."""
    return ", ".join(
        f"{axis} = {value}, not {axes[axis].min} to {axes[axis].max}" for axis, value in sizes.items()
    )


def types_text(precision: str, quantized: str | None) -> str:
    """The precision of a model, with the type that its GEMMs are quantized to: `fp8/fp16`."""
    return precision if quantized is None else f"{quantized}/{precision}"


def sizes_joined(sizes: Mapping[str, int]) -> str:
    """Axis sizes without their names, as 8×128."""
    return "×".join(str(value) for value in sizes.values())


def point_name(case: str, sizes: Mapping[str, int]) -> str:
    """The name of a case; empty where it only repeats the sizes."""
    return "" if re.findall(r"\d+", case) == [str(value) for value in sizes.values()] else case


def part_title(name: str, heads: Sequence[int] | None) -> str:
    """A part of a model, with its first and last head where it is only these of an attention."""
    if heads is None:
        return name
    first, last = heads
    return f"{name}, head {first}" if first == last else f"{name}, heads {first} to {last}"


def yes_no(value: bool) -> str:
    """`yes` or `no`."""
    return "yes" if value else "no"


def plural(count: int, noun: str) -> str:
    """A count with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# -- Text from files and other programs ------------------------------------------------------------

# Everything that a terminal may act on: C0 and C1 controls but tab and newline, line and paragraph
# separators, marks that reorder text, and what has no encoding.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text for a terminal: a control character is written as its escape, the four characters of x1b."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


# -- Groups of equal lines: the layers of a model differ in little but their numbers ---------------

Item = TypeVar("Item")

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
# TensorRT ends the names of kernels with a hash, or with their places in a program.
_KERNEL_ENDING = re.compile(r"0x[0-9a-fA-F]{8,}|_myl\d+_\d+")


def without_numbers(text: str) -> str:
    """A name with every number replaced, to compare layers."""
    return _NUMBER.sub("#", text)


def without_hash(kernel: str) -> str:
    """The name of a kernel without its hash or its place in a program."""
    return _KERNEL_ENDING.sub("…", kernel)


def group_by(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Group items by key, in the order of the first item of each key."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def summarize_names(names: Sequence[str], *, joint: str = " ") -> str:
    """The only name, or the first and the number of others."""
    return names[0] if len(names) == 1 else f"{names[0]}{joint}and {len(names) - 1} more"


# -- Reasons: what is wrong, in words --------------------------------------------------------------

MEASURES = {
    "relative_l2": "rel. L2",
    "worst_vector": "vector",
    "max_abs": "largest element",
    "gain": "gain",
    "local": "slice",
    "local_gain": "gain of a slice",
}
"""What is measured of an error, by the name of its field, in the words of the tables."""


def _out_of_budget(reason: Reason, share: float | None) -> str:
    measures = f": {', '.join(MEASURES.get(name, name) for name in reason.names)}"
    if set(reason.names) >= set(MEASURES):
        measures = " in every measure"
    much = "out of" if share is None or not 1 < share < math.inf else f"{share:,.1f}× over"
    where = f", worst slice: {reason.where}" if reason.where else ""
    return f"{much} budget{measures}{where}"


def _bound(name: str) -> str:
    return "at most" if name.startswith("max_") else "at least"


def _not_finite(reason: Reason, _: float | None) -> str:
    text = f"{reason.numbers['count']:.0f} values are NaN or infinite, the first at {reason.index}"
    masks = " and ".join(reason.names)
    return f"{text}: in the batch elements in which all of {masks} is {reason.got}" if masks else text


def _subnormal(reason: Reason, _: float | None) -> str:
    least = f"the smallest normal number of {reason.got} is {reason.numbers['smallest_normal']:.2g}"
    return f"the oracle is at most {reason.numbers['largest']:.2g}, and {least}"


def _differing(reason: Reason, _: float | None) -> str:
    wrong, of, samples = (f"{reason.numbers[name]:.0f}" for name in ("wrong", "of", "samples"))
    return f"{wrong} of {of} differ from the oracle and from all {samples} random roundings"


def _hidden(reason: Reason, _: float | None) -> str:
    missed, share = plural(int(reason.numbers["missed"]), "mutation"), budget_share(reason.numbers["share"])
    return (
        f"{missed} changed the outputs by at most {share} of the budget: with these weights and sizes, "
        "rounding may change them as much and hides such a mistake"
    )


_REASONS: Mapping[Kind, str | Callable[[Reason, float | None], str]] = {
    Kind.MISSING: "missing from the result",
    Kind.UNEXPECTED: "not an output of the model",
    Kind.TYPE: "type {0.got}, not {0.wanted}",
    Kind.SHAPE: "shape {0.got}, not {0.wanted}",
    Kind.NOT_FINITE: _not_finite,
    Kind.OLD_ENTRIES: "old entries were changed, the first in {0.where}",
    Kind.DIFFERENT_VALUES: _differing,
    Kind.OUT_OF_BUDGET: _out_of_budget,
    Kind.LENGTHS: "{0.got} tokens, not {0.wanted}",
    Kind.DID_NOT_RUN: "could not be run: {0.got}",
    Kind.DID_NOT_BUILD: "could not be built: {0.got}",
    Kind.NO_REFERENCE: "the model itself has no result: {0.got}",
    Kind.BEYOND_TYPE: "input {0.got} has {0.numbers[largest]:.3g}, and the largest number of {0.wanted} is "
    "{0.numbers[limit]:.5g}",
    Kind.HIDDEN_BY_ROUNDING: _hidden,
    Kind.NOTHING_TO_MUTATE: "no mutation applies: no attention is one node in the graph",
    Kind.DID_NOT_CLOSE: "could not be closed: {0.got}",
    Kind.ORACLE_ZERO: "the oracle is zero everywhere",
    Kind.ORACLE_SUBNORMAL: _subnormal,
    Kind.MODULE_ZERO: "the module itself gives zeros where the oracle reaches {0.numbers[largest]:.2g}",
    Kind.ORACLE_CONSTANT: "the oracle is constant, {0.numbers[largest]:.2g} everywhere",
    Kind.ORACLE_REPEATS: "the oracle is the same vector at every position",
    Kind.ORACLE_OF_ONE_KEY: "the oracle is the same vector at every position, as of one key: {0.got}",
    Kind.TYPE_NOT_RECORDED: "FP32 may be multiplied in fewer bits",
    Kind.NOT_RUN: "not run",
    Kind.NOT_TIMED: "{0.got}",
    Kind.WRONG_RESULT: "wrong answer: {0.got}",
    Kind.WRONG_WHEN_TIMED: "wrong answer while it was timed: {0.got}",
    Kind.WRONG_ON_STREAMS: "wrong answer on {0.numbers[streams]:.0f} streams: {0.got}",
    Kind.REFERENCE_IS_SUBJECT: "no node is compared: {0.got}, the only reference here, is wrong itself",
    Kind.MODULE_NOT_USED: "the module is not the reference: {0.got}; try: {0.wanted}",
}


def reason_text(reason: Reason, share: float | None = None) -> str:
    """A reason in words; `share` is that of the budget, where it is known."""
    words = _REASONS[reason.kind]
    text = words.format(reason) if isinstance(words, str) else words(reason, share)
    return f"{text}; worst at {reason.worst}" if reason.worst else text


class Language(Enum):
    """Whose words a hint is in: options of the command line, or arguments of the Python API."""

    COMMAND_LINE = "command line"
    PYTHON = "python"


_WEIGHTS = {
    Language.COMMAND_LINE: "use real weights (--weights), or scale those that the factory creates",
    Language.PYTHON: "use real weights (weights=), or scale those that the factory creates",
}
_HINTS: Mapping[Kind, Mapping[Language, str]] = dict.fromkeys(
    (Kind.ORACLE_ZERO, Kind.ORACLE_SUBNORMAL, Kind.MODULE_ZERO, Kind.ORACLE_CONSTANT, Kind.ORACLE_REPEATS),
    _WEIGHTS,
) | {
    Kind.ORACLE_OF_ONE_KEY: {
        Language.COMMAND_LINE: "a larger size for an axis that counts keys (--axis), else real weights "
        "(--weights)",
        Language.PYTHON: "a larger size for an axis that counts keys (axes=), else real weights (weights=)",
    },
    Kind.BEYOND_TYPE: {
        Language.COMMAND_LINE: "scale the inputs, or export with --precision fp32 or bf16",
        Language.PYTHON: 'scale the inputs, or export with precision="fp32" or "bf16"',
    },
    Kind.HIDDEN_BY_ROUNDING: {
        Language.COMMAND_LINE: "export with trained weights (--weights) or longer sequences (--axis), and a "
        "quantized model also with --precision fp16",
        Language.PYTHON: "export with trained weights (weights=) or longer sequences (axes=), and a "
        'quantized model also with precision="fp16"',
    },
    Kind.NOTHING_TO_MUTATE: dict.fromkeys(Language, "validate says why none is"),
    Kind.TYPE_NOT_RECORDED: {
        Language.COMMAND_LINE: "without --require-precision, the outputs of FP32 are judged by its budget; "
        "--precision fp16 and bf16 are recorded",
        Language.PYTHON: "without require_precision, the outputs of FP32 are judged by its budget; "
        'precision="fp16" and "bf16" are recorded',
    },
    Kind.ATTENTION_NOT_OBSERVED: {
        Language.COMMAND_LINE: "if its weights are random, export with trained ones (--weights); else an "
        "ONNX file with your own inputs (--input NAME=FILE.npy), or let the model return its result as a "
        "further output",
        Language.PYTHON: "if its weights are random, export with trained ones (weights=); else an ONNX file "
        "with your own inputs (inputs=), or let the model return its result as a further output",
    },
}


def hint_for(kind: Kind, language: Language) -> str | None:
    """What to try, in the words of the reader; None where there is nothing to say."""
    return _HINTS.get(kind, {}).get(language)


# -- Findings and gaps: the sentences of a verdict -------------------------------------------------


_OBSTACLES = {
    Obstacle.NO_BATCH_AXIS: "no axis of a batch comes first in every output",
    Obstacle.ONE_ELEMENT: "no case has two batch elements",
    Obstacle.NO_OTHER_BATCH: "no other batch is allowed",
    Obstacle.FIXED_BATCH: "the batch is fixed at {batch}",
    Obstacle.ONE_PROFILE: "no case fits two profiles",
    Obstacle.NO_PROFILES: "the runtime has no profiles",
}


def variation_text(check: Mapping[str, Any]) -> str:
    """What a check of invariance compared, or why nothing could be varied; `check` has its fields."""
    if check["obstacle"] is not None:
        return f"not applicable: {_OBSTACLES[check['obstacle']].format(**check)}"
    if check["variation"] == Variation.SLOTS:
        return f"slot 0..{check['batch'] - 1}, {check['arrangements']} arrangements"
    if check["variation"] == Variation.NEIGHBORS:
        return f"batch element {', '.join(map(str, check['elements']))} among other neighbors"
    if check["variation"] == Variation.BATCH:
        return f"batch {check['other_batch']} instead of {check['batch']}"
    return f"profile {', '.join(map(str, check['profiles']))}"


def gap_text(gap: Gap) -> str:
    """What nothing was judged on, in a few words: `S = 17–64`, or `S = 1 with P = 25–63`."""
    if gap.kind is Kind.NOT_RUN:
        return f"engine {gap.name}"
    if gap.kind is Kind.STEPS_NOT_COVERED:
        return f"decode steps in {gap.name}"
    if gap.kind is Kind.ATTENTION_NOT_OBSERVED:
        why = (
            f"the outputs do not show: {', '.join(gap.hidden)}"
            if gap.hidden
            else "unknown whether outputs show it"
        )
        return f"{gap.attention} in {gap.name} ({why})"
    if gap.kind is Kind.OUTPUTS_NOT_JUDGED:
        return f"further outputs of {gap.name}"
    if gap.kind is Kind.PROBES_NOT_RUN:
        return "probe inputs"
    profile = f"profile {gap.profile} of {gap.name}"
    if gap.kind is Kind.PROFILE_NOT_COVERED:
        return f"every size of {gap.name}" if gap.profile is None else profile
    sizes = _span(gap.axis, gap.least, gap.most)
    if gap.other_axis is not None:
        sizes += f" with {_span(gap.other_axis, gap.other_least, gap.other_most)}"
    return f"{sizes}{'' if gap.profile is None else f' in {profile}'}"


def _span(axis: str | None, least: int | None, most: int | None) -> str:
    return f"{axis} = {least}" if least == most else f"{axis} = {least}–{most}"


def runtime_text(runtime: str, clients: int | None) -> str:
    """A runtime; of a server under load, with its clients."""
    return runtime if clients is None or clients == 1 else f"{runtime}, {clients} clients"


def absent_text(name: str, reason: str) -> str:
    """A runtime that could not be run, and why."""
    return f"{name} skipped: {reason}"


def reason_and_hint(
    reason: Reason | None, language: Language = Language.COMMAND_LINE, share: float | None = None
) -> str:
    """A reason in words, with what to try."""
    if reason is None:
        return "no reason is recorded"
    hint = hint_for(reason.kind, language)
    return f"{reason_text(reason, share)}{f'; {hint}' if hint else ''}"


def _about_outputs(finding: Finding) -> str:
    place, count = finding.place, finding.numbers
    status = "wrong" if finding.kind is Kind.WRONG_OUTPUTS else "not verified"
    what = "attentions" if CaseKind.LAYERS in place.cases else "outputs"
    first = f"{place.case}/{place.output}: {reason_and_hint(finding.reason, share=count.get('share'))}"
    not_run = count.get("not_run", 0)  # those have no result that could be wrong
    judged, parts = f" of {count['judged']:.0f} {what}", list[str]()
    if wrong := count["failed"] - not_run:
        parts.append(f"is {status} on {wrong:.0f}{judged}")
    if not_run:
        parts.append(f"has no result for {not_run:.0f}{'' if wrong else judged}")
    return f"{place.runner} {' and '.join(parts)} ({' and '.join(place.cases)}; {first})"


def _about_decoding(finding: Finding) -> str:
    place = finding.place
    status = "decodes wrongly" if finding.kind is Kind.WRONG_DECODING else "is not verified when decoding"
    return f"{place.runner} {status} ({place.case}/{place.output}: {reason_and_hint(finding.reason)})"


def _about_profiles(finding: Finding) -> str:
    if finding.numbers["judged"]:
        return (
            f"{finding.place.runner} was not run on {', '.join(finding.names)}: it does not support their "
            f"sizes"
        )
    return f"{finding.place.runner} was not compared: it supports the sizes of no case"


def _about_gaps(finding: Finding) -> str:
    hint = None if finding.reason is None else hint_for(finding.reason.kind, Language.COMMAND_LINE)
    return f"not covered: {'; '.join(finding.names)}{f'; to see an attention, {hint}' if hint else ''}"


def _about_precision(finding: Finding) -> str:
    why = finding.reason if finding.required_by else None
    hint = None if why is None else hint_for(why.kind, Language.COMMAND_LINE)
    return f"engine {finding.place.engine}: {finding.detail}{f'; try: {hint}' if hint else ''}"


def _about_graph(finding: Finding) -> str:
    count, why = finding.numbers, f" ({summarize_names(finding.names, joint=', ')})" if finding.names else ""
    return f"{count['fused']:.0f} of {count['of']:.0f} attentions are one node in the graph{why}"


def _about_requests(finding: Finding) -> str:
    count, several = finding.numbers, finding.place.clients
    clients = f"{', '.join(map(str, several))} client{'' if several == (1,) else 's'}"
    if finding.kind is Kind.REQUESTS_NOT_SENT:
        answered = f"{count['answered']:.0f} of {count['requests']:.0f} requests"
        return f"{clients}: the limit of {count['limit_s']:g} s was reached after {answered}"
    left = f"; {count['unsent']:.0f} were not sent" if count["unsent"] else ""
    failed = f"{count['failed']:.0f} of {count['requests']:.0f} requests failed"
    causes = ", ".join(f"{count[name]:.0f} {name}" for name in finding.names)
    return f"{clients}: {failed} ({causes}){left}: {finding.detail}"


def _figure(finding: Finding) -> str:
    return short(finding.numbers["got"]) if "got" in finding.numbers else "no number"


def _measured_in(place: Place) -> str:
    """Where a figure comes from: a runtime with its case and output, an engine, or an output of a runtime."""
    if place.engine is not None:
        return f"{place.engine} at {place.case}"
    if place.case is None:
        return f"{place.output} in {place.runner}"
    return f"{place.runner}, {'/'.join(filter(None, (place.case, place.output)))}"


def _about_data(finding: Finding) -> str:
    count, place = finding.numbers, finding.place
    status = "wrong" if finding.kind is Kind.WRONG_ON_DATA else "not verified"
    first = f"{place.case}{f'/{place.output}' if place.output else ''}: {reason_and_hint(finding.reason)}"
    why = f" ({first})" if finding.reason is not None else ""
    if finding.names and not count["failed"]:
        return f"{place.runner} is {status}: no sample shows {', '.join(finding.names)}, the oracle is empty"
    return f"{place.runner} is {status} on {count['failed']:.0f} of {count['samples']:.0f} samples{why}"


_FINDINGS: Mapping[Kind, str | Callable[[Finding], str]] = {
    Kind.WRONG_OUTPUTS: _about_outputs,
    Kind.UNVERIFIED_OUTPUTS: _about_outputs,
    Kind.NOT_DECODED: "{0.place.runner} decoded no tokens: {0.detail}",
    Kind.WRONG_DECODING: _about_decoding,
    Kind.UNVERIFIED_DECODING: _about_decoding,
    Kind.NOT_INVARIANT: "{0.place.runner}: {0.place.check} changes the result ({0.place.case}, {0.detail})",
    Kind.RUNTIME_FAILED: "{0.place.runner} should run here, but failed to run the model: {0.detail}",
    Kind.NO_ENGINE: "there is no engine to judge ({0.detail}): run build-engine, once the graph is right",
    Kind.ENGINE_NOT_BUILT: "the engine could not be built: {0.detail}",
    Kind.RANGE_SHRUNK: "{0.names[0]} was requested from {0.numbers[requested_min]:.0f} to "
    "{0.numbers[requested_max]:.0f}, and is exported from {0.numbers[min]:.0f} to {0.numbers[max]:.0f}: "
    "{0.detail}; let forward() take the size from its inputs, or accept it with --axis "
    "{0.names[0]}={0.numbers[min]:.0f}",
    Kind.ENGINE_GONE: "engine {0.place.engine} was built from this bundle, but is missing",
    Kind.ENGINE_NOT_RUN: "engine {0.place.engine} was built and inspected, but not run: {0.detail}",
    Kind.ENGINE_NOT_CONFIRMED: "fusion and precision of engine {0.place.engine} are not verified: it did not "
    "run here, and only TensorRT can read its plan",
    Kind.FOREIGN_ENGINE: "{0.place.engine} in engines/ has no manifest of this tool, and was skipped; judge "
    "it with --engine-file",
    Kind.OUTPUTS_NOT_JUDGED: lambda finding: (
        f"{finding.place.runner} has outputs that are not in the bundle: {', '.join(finding.names)}"
    ),
    Kind.ATTENTION_CHANGED: lambda finding: (
        f"{finding.place.runner} has an attention that differs from the bundle: {finding.detail} "
        f"({summarize_names(finding.names)})"
    ),
    Kind.OTHER_WEIGHTS: lambda finding: (
        f"{finding.place.runner} has different weights than the bundle: {len(finding.names)} of "
        f"{finding.numbers['weights']:.0f} are not in it ({summarize_names(finding.names)}); export the "
        "bundle with its weights, or the graph with the bundle's"
    ),
    Kind.WEIGHTS_CHANGED: lambda finding: (
        f"{finding.place.runner} has numbers that the bundle does not have in "
        f"{plural(len(finding.names), 'weight')} ({summarize_names(finding.names)})"
    ),
    Kind.DEMAND_NOT_MET: lambda finding: (
        f"{finding.names[0]}: {_figure(finding)} in {_measured_in(finding.place)}, "
        f"{_bound(finding.names[0])} {short(finding.numbers['wanted'])} is required"
    ),
    Kind.OTHER_BUNDLE: "the server serves another bundle (manifest {0.names[0]:.16}…, not "
    "{0.names[1]:.16}…): package this one, or validate the bundle that is served",
    Kind.DEMAND_NOT_CHECKED: lambda finding: (
        f"{finding.names[0]} was not measured: {_bound(finding.names[0])} {finding.numbers['wanted']:g} "
        "is required"
    ),
    Kind.LOSS: "{0.detail} has a loss of {0.numbers[loss]:.2g} (relative L2 of output {0.names[0]}), "
    "limit {0.numbers[limit]:g}",
    Kind.WRONG_ON_DATA: _about_data,
    Kind.DATA_NOT_VERIFIED: _about_data,
    Kind.DATA_OUTSIDE: "{0.numbers[outside]:.0f} of {0.numbers[samples]:.0f} samples were not run: their "
    "sizes are outside {0.detail}",
    Kind.GRAPH_NOT_FUSED: _about_graph,
    Kind.ENGINE_NOT_FUSED: "engine {0.place.engine}: {0.detail}",
    Kind.ENGINE_PRECISION: _about_precision,
    Kind.OUTSIDE_PROFILES: _about_profiles,
    Kind.FAULT: "at fault: {0.names[0]}. {0.detail}",
    Kind.FP16_RANGE: lambda finding: f"{summarize_names(finding.names)}: {finding.detail}",
    Kind.WRONG_MASK: "{0.place.runner} is wrong on masks: {0.place.check}, {0.detail}",
    Kind.SLOWER: lambda finding: (
        f"{finding.place.runner} has {finding.numbers['ratio']:.2f}× the latency of {finding.names[0]} at "
        f"{sizes_text(finding.place.sizes or {})}"
    ),
    Kind.NOT_SETTLED: lambda finding: (
        f"the time of {finding.place.runner} at {sizes_text(finding.place.sizes or {})} did not settle"
    ),
    Kind.REQUESTS_FAILED: _about_requests,
    Kind.REQUESTS_NOT_SENT: _about_requests,
    Kind.NOT_RUN: lambda finding: f"not run: {'; '.join(finding.names)}",
    Kind.NOT_COVERED: _about_gaps,
}


def finding_text(finding: Finding) -> str:
    """A finding in words."""
    words = _FINDINGS[finding.kind]
    return words.format(finding) if isinstance(words, str) else words(finding)


# -- Engines ---------------------------------------------------------------------------------------

# By the kind of a reason: {place} is a kernel, node or region, {got} what is there, {wanted} what was wanted,
# {nodes} and {sources} are its names.
_ENGINE_REASONS: Mapping[str, str] = {
    ReasonKind.NO_SOURCE: "no source reports its kernels",
    ReasonKind.NO_KERNELS: "no kernels of profile {place} are reported",
    ReasonKind.HIDDEN_REGION: "the kernels inside {place} are not reported by this version: "
    "profile it on its GPU",
    ReasonKind.NOT_NAMED: "no kernel names {place}",
    ReasonKind.NO_GRAPH: "{got} fused attention kernels ran for {wanted} attentions, but the graph "
    "is not known",
    ReasonKind.NO_COMPUTING_KERNEL: "{place} names it, but no kernel that computes a matmul or softmax does",
    ReasonKind.NAMELESS_FUSED: "{place} is fused attention, but does not name its node",
    ReasonKind.PARTIAL_FUSED: "{place} names {nodes}, not both scores and weighted values",
    ReasonKind.OTHER_ATTENTION: "{place} names a part of it, but computes {got}",
    ReasonKind.FOREIGN_PLUGIN: "what the plugin {place} computes is not known",
    ReasonKind.COMPUTED_APART: "{got} is fused attention, but {place} computes a part of it as well",
    ReasonKind.STRAY_SOFTMAX: "{place} is a softmax of no known node",
    ReasonKind.STRAY_MATMUL: "{place} is a matmul of no known node",
    ReasonKind.COUNT_DIFFERS: "{got} fused attention kernels ran for {wanted} attentions",
    ReasonKind.SOURCES_DISAGREE: "the {sources[0]}: {got}, but the {sources[1]}: {wanted}",
    ReasonKind.SCORES_AGAIN: "{place} computes its scores again for another output",
    ReasonKind.COUNTED: "{got} fused attention kernels ran for {wanted} attentions",
    ReasonKind.NOT_ONE_NODE: "not one Attention node in the graph",
    ReasonKind.UNTYPED: "the types of {place} are not reported",
    ReasonKind.NOTHING_FLOATING: "no floating-point tensor or kernel is reported",
    ReasonKind.MAY_BE_MATMUL: "{place} may be a matmul: its name does not show what it computes",
    ReasonKind.MATMUL_NOT_REPORTED: "no kernel is reported for the matmul {place}",
    ReasonKind.COMPUTE_TYPE: "{place} reads {wanted}, and the engine does not record whether it "
    "multiplies in fewer bits, as TF32 or FP16",
    ReasonKind.OTHER_TYPE: "{place} is in {got}, not {wanted}",
    ReasonKind.PLAN_DIFFERS: "the manifest claims {wanted}, the plan shows {got}",
    ReasonKind.OTHER_WEIGHTS: "the weights in the plan are not those of the bundle",
    ReasonKind.PLAN_UNREADABLE: "the manifest claims {got}, and only {place} on its GPU can read the plan",
}


def engine_reason_text(reason: Mapping[str, Any]) -> str:
    """Why a verdict on an engine is what it is, in words."""
    names = reason["names"]
    text = _ENGINE_REASONS[reason["kind"]].format(**reason, nodes=", ".join(names), sources=(*names, "", ""))
    if reason["kind"] == ReasonKind.NOT_ONE_NODE and reason["got"]:
        text = f"{text}: {reason['got']} ({reason['place']})"
    if reason["kind"] == ReasonKind.MAY_BE_MATMUL and reason["got"] and reason["wanted"]:
        text = f"{text} in {reason['got']}" if not reason["got"].isdecimal() else text
    return text
