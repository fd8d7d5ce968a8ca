"""A user's own data: every sample through the reference, the original model and the runtimes, one by one.

Only numbers are kept of a sample, and the few samples that are worst. What was computed is written to a file
as it goes, so that a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Struct

from mha_deploy import __version__, judge
from mha_deploy.bundle.cases import GoldenCase
from mha_deploy.bundle.folder import MANIFEST, Bundle, sha256
from mha_deploy.bundle.manifest import Source
from mha_deploy.bundle.samples import Sample, as_taken, overflowing
from mha_deploy.errors import DeployError, ExportError
from mha_deploy.files import file_name, read_regular
from mha_deploy.metrics import Agreement, AgreementCounts, count_agreement, joined_agreement
from mha_deploy.model.spec import ModuleSpec, sizes_beyond
from mha_deploy.options import OnStep, Step, ValidateOptions, silent
from mha_deploy.output import append_file, is_result, write_file
from mha_deploy.runtime.child import RuntimeCrash
from mha_deploy.runtime.runner import Runner
from mha_deploy.runtime.user_code import refuse_without_factory
from mha_deploy.runtime.user_data import Metric, open_samples
from mha_deploy.status import EMPTY_ORACLE, Kind, Outcome, Reason, means
from mha_deploy.validation.decode import admits
from mha_deploy.validation.runtimes import Runtime, refuse_without_torch, torch_device

# -- What the report says of it --------------------------------------------------------------------


class Quantiles(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The distribution of a figure over the samples."""

    p50: Annotated[float, means("median over the samples")]
    p90: Annotated[float, means("90th percentile")]
    p99: Annotated[float, means("99th percentile")]
    max: Annotated[float, means("the largest")]


class DataOutput(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One output over all samples."""

    name: Annotated[str, means("name of the output")]
    error: Annotated[
        Quantiles | None,
        means("relative L2 error against the FP64 reference, over the samples; null if none was measured"),
    ]
    original_error: Annotated[
        Quantiles | None, means("the same for the source model itself, in its own precision")
    ]
    agreement: Annotated[
        Agreement | None, means("agreement of logits with the reference; null for other outputs")
    ]
    original_agreement: Annotated[Agreement | None, means("the same for the source model itself")]


class DataMetric(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The user's own metric: its mean over the samples."""

    name: Annotated[str, means("the function")]
    samples: Annotated[int, means("samples that it was computed for")]
    value: Annotated[float, means("its mean for the runtime")]
    original: Annotated[float, means("its mean for the source model itself, in its precision")]
    reference: Annotated[float, means("its mean for the FP64 reference")]


class WorstSample(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the samples that use the largest share of their budget."""

    sample: Annotated[str, means("name of the sample")]
    outcome: Annotated[Outcome, means("its verdict")]
    share: Annotated[float | None, means("share of the budget; null without a number")]
    output: Annotated[str | None, means("the output that is wrong; null if none is")]
    reason: Annotated[Reason | None, means("why; see `parity[].verdicts[].reason`")]
    file: Annotated[str, means("file next to the report that `--data` replays")]


class DataRuntime(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One runtime on all samples."""

    name: Annotated[str, means("name of the runtime")]
    runtime: Annotated[str, means("the same with its version")]
    outcome: Annotated[Outcome, means("the outcome of all samples together")]
    samples: Annotated[int, means("samples that it ran")]
    failed: Annotated[int, means("how many of them are wrong")]
    not_verified: Annotated[int, means("how many of them have no result that shows anything")]
    outside: Annotated[tuple[str, ...], means("the samples outside its profiles, which were not run")]
    unseen: Annotated[tuple[str, ...], means("the outputs that no sample shows: their oracle is empty")] = ()
    share: Annotated[
        Quantiles | None, means("the share of the budget that samples use; null if there is no number")
    ]
    outputs: Annotated[tuple[DataOutput, ...], means("one for every output")]
    metric: Annotated[DataMetric | None, means("the user's own metric; null if there is none")]
    worst: Annotated[tuple[WorstSample, ...], means("the samples that use the largest share of their budget")]


class DataRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A validation on a user's own data."""

    source: Annotated[str, means("where the samples came from")]
    samples: Annotated[int, means("samples that were read")]
    resumed: Annotated[int, means("how many of them an earlier, interrupted run computed")]
    outside: Annotated[
        dict[str, dict[str, int]],
        means("the samples outside the axes of the bundle, not run: of each, the sizes that are, by axis"),
    ]
    sizes: Annotated[
        dict[str, tuple[int, int]], means("the smallest and the largest size of every axis in the samples")
    ]
    runtimes: Annotated[tuple[DataRuntime, ...], means("one for every runtime")]

    @property
    def outcome(self) -> Outcome:
        """That of all runtimes; samples that were not run are not verified."""
        parts = [each.outcome for each in self.runtimes]
        missed = self.outside or any(each.outside for each in self.runtimes)
        return Outcome.of([*parts, *([Outcome.NOT_VERIFIED] if missed else [])])


# -- One sample in one runtime ---------------------------------------------------------------------


class _SampleRecord(Struct, frozen=True, kw_only=True):
    """What came of one sample in one runtime: a line of the file that a run goes on from."""

    sample: str
    digest: str
    runtime: str
    outcome: Outcome = Outcome.NOT_VERIFIED
    is_outside: bool = False  # of the profiles
    output: str | None = None
    reason: Reason | None = None
    share: float | None = None
    errors: dict[str, float] = {}
    original_errors: dict[str, float] = {}
    counts: dict[str, AgreementCounts] = {}
    original_counts: dict[str, AgreementCounts] = {}
    metric: float | None = None
    original_metric: float | None = None
    reference_metric: float | None = None
    verified: tuple[str, ...] = ()  # outputs that passed
    empty: tuple[str, ...] = ()  # outputs whose oracle shows nothing in this sample


_WORST_KEPT = 5
_FLUSH_S = 10.0


def _quantiles(values: Sequence[float]) -> Quantiles | None:
    if not values:
        return None
    low, middle, high = (float(x) for x in np.percentile(values, (50, 90, 99), method="higher"))
    return Quantiles(p50=low, p90=middle, p99=high, max=float(max(values)))


# -- What is right for a sample ---------------------------------------------------------------------


def is_imported(bundle: Bundle) -> bool:
    """Whether the source of a bundle is an ONNX file."""
    return any(entry.source is Source.FILE for entry in bundle.manifest.golden)


def reference_of(bundle: Bundle, source: Path | None) -> Callable[[Sample], GoldenCase]:
    """What computes a case from a sample: with the source of the bundle, never with what is judged."""
    if is_imported(bundle):
        from mha_deploy.baselines.imported import FileCases

        return FileCases(bundle, source).case
    refuse_without_torch("of your data")
    from mha_deploy.baselines.fresh import FreshCases

    fresh = FreshCases(bundle, device=torch_device())
    return lambda sample: fresh.given(sample.name, sample.inputs, sample.sizes)


# -- All samples in all runtimes -------------------------------------------------------------------


class _Header(Struct, frozen=True, kw_only=True):
    """The first line of the file that a run goes on from: what its results belong to."""

    tool: dict[str, str] = msgspec.field(default_factory=lambda: {"name": "mha-deploy"})
    bundle_sha256: str
    version: str = __version__
    metric: str = ""
    logits: tuple[str, ...] = ()
    is_complete: bool = False


class _Kept:
    """Results of an earlier run, and the file that those of this one are added to."""

    def __init__(self, path: Path | None, header: _Header) -> None:
        self._path, self._header = path, header
        self._pending: list[_SampleRecord] = []
        self._written = time.monotonic()
        self.known: dict[tuple[str, str], _SampleRecord] = {}
        if path is None:
            return
        lines = self._lines(path)
        if lines and lines[0] == msgspec.json.encode(header):
            for line in lines[1:]:
                try:
                    found = msgspec.json.decode(line, type=_SampleRecord)
                except (msgspec.DecodeError, ValueError):
                    break  # truncated
                self.known[found.digest, found.runtime] = found
        if not self.known:
            write_file(path, msgspec.json.encode(header) + b"\n", is_result)

    @staticmethod
    def _lines(path: Path) -> list[bytes]:
        try:
            return read_regular(path, 1 << 40).splitlines() if path.exists() and is_result(path) else []
        except OSError as error:  # what cannot be read now is not to be begun anew
            what, hint = "The results of the earlier run cannot be read.", "another --resume"
            raise DeployError(what, got=f"{path}: {error}", hint=hint, options=("resume",)) from error

    def add(self, result: _SampleRecord) -> None:
        """Keep a result; it is written with others, every few seconds."""
        self._pending.append(result)
        if time.monotonic() - self._written > _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what is not written yet."""
        if self._path is not None and self._pending:
            data = b"".join(msgspec.json.encode(each) + b"\n" for each in self._pending)
            append_file(self._path, data, lambda path: None)
        self._pending, self._written = [], time.monotonic()

    def finish(self) -> None:
        """All samples were run: the next run begins anew."""
        if self._path is not None:
            self.flush()
            done = msgspec.structs.replace(self._header, is_complete=True)
            write_file(self._path, msgspec.json.encode(done) + b"\n", is_result)


@dataclass
class _Tally:
    """One runtime, as its results come in: numbers, and the worst samples."""

    runtime: Runtime
    runner: Runner
    key: str
    results: list[_SampleRecord] = field(default_factory=list)
    worst: list[tuple[float, int, _SampleRecord, Sample]] = field(default_factory=list)

    def add(self, result: _SampleRecord, sample: Sample) -> None:
        self.results.append(msgspec.structs.replace(result, digest=""))
        if result.is_outside:
            return
        least = {Outcome.FAILED: math.inf, Outcome.NOT_VERIFIED: 1.0}.get(result.outcome, 0.0)
        badness = least if result.share is None else result.share
        entry = (badness, -len(self.results), result, sample)
        if len(self.worst) < _WORST_KEPT:
            heapq.heappush(self.worst, entry)
        else:
            heapq.heappushpop(self.worst, entry)


@dataclass(frozen=True)
class DataPass:
    """What came of the samples: the record, and the samples that are kept to replay them, by file name."""

    record: DataRecord
    kept: Mapping[str, Sample]


@dataclass(frozen=True, kw_only=True)
class UserData:
    """Samples that are ready to be run: the first one was read, and fits the model."""

    title: str
    samples: Iterator[Sample]
    count: int  # 0 if nobody knows
    measure: Metric | None


def open_data(bundle: Bundle, options: ValidateOptions) -> UserData:
    """Open the data and the metric, and refuse what cannot be judged, before anything is run."""
    spec, measure = bundle.manifest.spec, None if options.metric is None else Metric(options.metric)
    _logits_of(bundle, options)
    title, samples, count = open_samples(options.data, spec)
    first = next(samples, None)
    if first is None:
        raise DeployError("The data has no samples.", got=title, hint="at least one")
    as_taken(first, spec, bundle.manifest.precision)
    if is_imported(bundle):
        reference_of(bundle, options.source)
    elif isinstance(spec, ModuleSpec):
        refuse_without_factory(spec)
    count = count or first.of
    count = min(count, options.data_limit or count)
    return UserData(title=title, samples=chain((first,), samples), count=count, measure=measure)


def validate_data(
    bundle: Bundle,
    data: UserData,
    runtimes: Sequence[Runtime],
    options: ValidateOptions,
    on_sample: OnStep = silent,
) -> DataPass:
    """Run every sample, and judge it against the reference that its source gives."""
    spec, manifest, measure = bundle.manifest.spec, bundle.manifest, data.measure
    header = _Header(
        bundle_sha256=sha256(bundle.path / MANIFEST),
        metric="" if measure is None else measure.digest,
        logits=tuple(_logits_of(bundle, options)),
    )
    kept = _Kept(options.resume, header)
    make: Callable[[Sample], GoldenCase] | None = None
    read = resumed = 0
    outside = dict[str, dict[str, int]]()
    spans: dict[str, tuple[int, int]] = {}
    with ExitStack() as owned:
        tallies = []
        for runtime in runtimes:
            runner = owned.enter_context(runtime.open())
            tallies.append(_Tally(runtime, runner, _key_of(runtime, runner)))
        try:
            for sample in islice(data.samples, options.data_limit or None):
                read += 1
                on_sample(Step("data", sample.name), read - 1, data.count)
                taken = as_taken(sample, spec, manifest.precision)
                for axis, size in taken.sizes.items():
                    low, high = spans.get(axis, (size, size))
                    spans[axis] = (min(low, size), max(high, size))
                if beyond := sizes_beyond(taken.sizes, spec.axes):
                    outside[taken.name] = beyond
                    continue
                digest = taken.digest
                known = [kept.known.get((digest, each.key)) for each in tallies]
                resumed += all(known)
                case: GoldenCase | Reason | None = None
                for tally, found in zip(tallies, known, strict=True):
                    if found is None:
                        make = make or reference_of(bundle, options.source)
                        case = case or _case_of(make, taken, sample)
                        if isinstance(case, Reason):
                            found = _SampleRecord(
                                sample=taken.name, digest=digest, runtime=tally.key, reason=case
                            )
                        else:
                            found = _judged(tally, case, taken, digest, bundle, options, measure)
                        kept.add(found)
                    tally.add(found, taken)
        finally:
            kept.flush()
    files: dict[str, Sample] = {}
    about: dict[str, Any] = {"source": data.title, "samples": read, "resumed": resumed, "outside": outside}
    judged = tuple(_conclude(each, measure, files) for each in tallies)
    kept.finish()
    return DataPass(DataRecord(sizes=spans, runtimes=judged, **about), files)


def _case_of(make: Callable[[Sample], GoldenCase], sample: Sample, given: Sample) -> GoldenCase | Reason:
    """A case, or why a sample has no reference: one on which the model overflows does not end a run.

    Nor does one that is infinite only in the type of the input, which some models take: a mask, for one.
    """
    try:
        return make(sample)
    except ExportError as error:
        return overflowing(given, sample) or Reason(kind=Kind.NO_REFERENCE, got=error.in_one_line)


def _key_of(runtime: Runtime, runner: Runner) -> str:
    """What a result belongs to besides the sample: another engine of the same name has other results."""
    engine = runtime.engine.manifest.engine_sha256 if runtime.engine is not None else ""
    return f"{runtime.name} {runner.name} {engine or runtime.digest}"


def _judged(
    tally: _Tally,
    case: GoldenCase,
    sample: Sample,
    digest: str,
    bundle: Bundle,
    options: ValidateOptions,
    measure: Metric | None,
) -> _SampleRecord:
    """One sample in one runtime."""
    result = _SampleRecord(sample=sample.name, digest=digest, runtime=tally.key)
    change = partial(msgspec.structs.replace, result)
    if not admits(tally.runner, case.inputs):
        return change(is_outside=True)
    precision = bundle.manifest.precision
    precision = replace(precision, accumulate=tally.runtime.accumulation(precision).type)
    try:
        got = tally.runner.run(case.inputs)
    except DeployError as error:
        if isinstance(error, RuntimeCrash):  # nothing more can be run there
            raise
        reason = Reason(kind=Kind.DID_NOT_RUN, got=error.in_one_line)
        return change(outcome=Outcome.FAILED, reason=reason)
    verdicts = judge.judge_case(case, got, precision)
    empty = [v for v in verdicts if v.reason is not None and v.reason.kind in EMPTY_ORACLE]
    wrong = sorted(
        (v for v in verdicts if not v.passed and v not in empty),
        key=lambda verdict: (not verdict.is_wrong, -(verdict.share or math.inf)),
    )
    first = next(iter(wrong), None)
    passed = Outcome.PASSED if any(v.passed for v in verdicts) or not empty else Outcome.NOT_VERIFIED
    logits = [name for name in case.oracle if name in _logits_of(bundle, options)]
    return change(
        outcome=first.outcome if first is not None else passed,
        output=None if first is None else first.output,
        reason=None if first is None else first.reason,
        share=judge.largest_share(verdicts),
        errors={v.output: v.deviation.relative_l2 for v in verdicts if v.deviation is not None},
        original_errors={name: _relative(case.eager[name], x) for name, x in case.oracle.items()},
        counts={name: count_agreement(case.oracle[name], got[name]) for name in logits if name in got},
        original_counts={name: count_agreement(case.oracle[name], case.eager[name]) for name in logits},
        verified=tuple(v.output for v in verdicts if v.passed),
        empty=tuple(v.output for v in empty),
        metric=None if measure is None else measure(got, sample),
        original_metric=None if measure is None else measure(case.eager, sample),
        reference_metric=None if measure is None else measure(case.oracle, sample),
    )


def _relative(got: np.ndarray, true: np.ndarray) -> float:
    """As `Deviation.relative_l2`, for results that may not be finite: of zeros, the error itself."""
    size = float(np.linalg.norm(true.astype(np.float64)))
    error = float(np.linalg.norm(got.astype(np.float64) - true.astype(np.float64)))
    return error / (size or math.sqrt(max(1, true.size)))


def _logits_of(bundle: Bundle, options: ValidateOptions) -> list[str]:
    """The outputs that are logits: those that were named, or have it in their name."""
    names = [tensor.name for tensor in bundle.manifest.spec.outputs]
    if unknown := [name for name in options.logits if name not in names]:
        hint = f"one of {', '.join(names)}"
        raise DeployError("The model has no such output.", got=unknown[0], hint=hint)
    return list(options.logits) or [name for name in names if "logit" in name.lower()]


def _conclude(tally: _Tally, measure: Metric | None, files: dict[str, Sample]) -> DataRuntime:
    """The figures of one runtime."""
    ran = [each for each in tally.results if not each.is_outside]
    verified = {name for each in ran for name in each.verified}
    outcomes = [each.outcome for each in ran]
    # An oracle of zeros is right where every query is masked: another sample verifies the output.
    outcomes += [Outcome.NOT_VERIFIED for each in ran for name in each.empty if name not in verified]
    outcomes = [
        Outcome.PASSED
        if o is Outcome.NOT_VERIFIED and each.reason is None and {*each.empty} <= verified
        else o
        for o, each in zip(outcomes, ran, strict=False)
    ] + outcomes[len(ran) :]
    names = dict.fromkeys(name for each in ran for name in (*each.errors, *each.original_errors))
    outputs = tuple(
        DataOutput(
            name=name,
            error=_quantiles([each.errors[name] for each in ran if name in each.errors]),
            original_error=_quantiles(
                [each.original_errors[name] for each in ran if name in each.original_errors]
            ),
            agreement=joined_agreement(each.counts[name] for each in ran if name in each.counts),
            original_agreement=joined_agreement(
                each.original_counts[name] for each in ran if name in each.original_counts
            ),
        )
        for name in names
    )
    figures = [
        (each.metric, each.original_metric, each.reference_metric)
        for each in ran
        if each.metric is not None and each.original_metric is not None and each.reference_metric is not None
    ]
    metric = None
    if measure is not None and figures:
        value, original, reference = (float(x) for x in np.mean(figures, axis=0))
        metric = DataMetric(
            name=measure.name, samples=len(figures), value=value, original=original, reference=reference
        )
    worst = []
    for rank, (_, _, result, sample) in enumerate(sorted(tally.worst, key=lambda e: e[:2], reverse=True), 1):
        file = f"worst/{file_name(tally.runtime.name)}-{rank}.safetensors"
        files[file] = sample
        worst.append(
            WorstSample(
                sample=result.sample,
                outcome=result.outcome,
                share=result.share,
                output=result.output,
                reason=result.reason,
                file=file,
            )
        )
    return DataRuntime(
        name=tally.runtime.name,
        runtime=tally.runner.name,
        outcome=Outcome.of(outcomes),
        samples=len(ran),
        failed=sum(each.outcome is Outcome.FAILED for each in ran),
        not_verified=sum(each is Outcome.NOT_VERIFIED for each in outcomes[: len(ran)]),
        outside=tuple(each.sample for each in tally.results if each.is_outside),
        unseen=tuple(dict.fromkeys(name for each in ran for name in each.empty if name not in verified)),
        share=_quantiles([each.share for each in ran if each.share is not None]),
        outputs=outputs,
        metric=metric,
        worst=tuple(worst),
    )
