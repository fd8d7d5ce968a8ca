"""Validate through a server: golden cases and decode traces replayed by several clients at once.

Requests are single batch elements wherever the server puts batches together. So one dynamic batch mixes
elements of different cases, and every result is put together again and judged as in any other runtime.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mha_deploy.bundle.cases import DecodeTrace, GoldenCase, golden_cases
from mha_deploy.bundle.folder import Bundle
from mha_deploy.errors import DeployError
from mha_deploy.judge import OutputVerdict, ParityReport, failed_to_run, judge_case, parity_from_verdicts
from mha_deploy.options import OnStep, Step, ValidateOptions, silent, uncounted
from mha_deploy.runtime.kserve import TIMEOUT, UNREACHABLE, ServerError, ServerRunner, joined, served_name
from mha_deploy.runtime.runner import Arrays
from mha_deploy.status import CaseKind, Outcome
from mha_deploy.text import group_by, plural
from mha_deploy.validation.decode import DecodeReport, evaluate_trace, run_decode_loop, traces_of
from mha_deploy.validation.evaluate import Evaluation
from mha_deploy.validation.records import NOT_SENT, ServingRecord
from mha_deploy.validation.run import draw_cases
from mha_deploy.validation.runtimes import SERVER, Runtime, Unavailable
from mha_deploy.validation.verdict import Validation, conclude

T = TypeVar("T")
_KEPT_BYTES = 256 << 20  # results that are kept to be judged, of one number of clients


def validate_server(bundle: Bundle, options: ValidateOptions, on_step: OnStep = silent) -> Validation:
    """Judge a served model by the golden cases and the decode traces of its bundle, under load."""
    validation = _ServerValidation(bundle, options, on_step)
    with validation.runner:
        return validation.report()


class _ServerValidation:
    def __init__(self, bundle: Bundle, options: ValidateOptions, on_step: OnStep) -> None:
        if options.requests < 1 or not options.clients or min(options.clients) < 1:
            got = f"clients {list(options.clients)}, requests {options.requests}"
            what, hint = "At least one client and one request are needed.", "--clients 1 --requests 1"
            raise DeployError(what, got=got, hint=hint, options=("clients", "requests"))
        self.bundle, self.options, self.on_step = bundle, options, on_step
        self.spec, self.precision = bundle.manifest.spec, bundle.manifest.precision
        name = served_name(self.spec.name)
        self.runner = ServerRunner(options.url or "", model=name, timeout_s=options.timeout_s)
        self._check_inputs()
        self._answered = False
        self._silent: DeployError | None = None  # why nothing more is sent: it has never answered

    def _check_inputs(self) -> None:
        """Another model is known by its inputs before anything is sent; one with its own cache has fewer."""
        own, theirs = {each.name for each in self.spec.inputs}, set(self.runner.inputs)
        if theirs <= own if self.runner.keeps_cache else theirs == own:
            return
        self.runner.close()
        taken, wanted = (", ".join(sorted(names)) for names in (theirs, own))
        got = f"{taken} in {self.runner.name}; {wanted} in the bundle of {self.spec.name}"
        hint = "validate the bundle that is served, or name its model: SCHEME://HOST:PORT/MODEL"
        raise ServerError("The served model has other inputs than the bundle.", got=got, hint=hint)

    def report(self) -> Validation:
        on_step, runner, options = self.on_step, self.runner, self.options
        traces, golden = traces_of(self.bundle, options), list(golden_cases(self.bundle))
        parity, decode, points = list[ParityReport](), list[DecodeReport](), list[ServingRecord]()
        absent, notes = tuple[Unavailable, ...](), tuple[str, ...]()
        if runner.keeps_cache:
            units = self._sequences(traces)
            runner.most_bytes = self._largest_answer((), traces)
            kept = "golden cases were not run: their KV cache is an input, and this server keeps its own"
            notes = (f"{kept}; the decode traces were replayed",)
        else:
            drawn, absent = draw_cases(self.bundle, options, uncounted(on_step))
            kinds = {CaseKind.GOLDEN: golden, **drawn}
            runner.most_bytes = self._largest_answer(kinds.values(), traces)
            for kind, cases in kinds.items():
                on_step(Step(runner.model, f"{kind} cases"), 0, 0)
                if cases:
                    judged = [verdict for case in cases for verdict in self._run_and_judge(case)]
                    parity.append(self._parity(judged, kind))
            for trace in traces if self._silent is None else ():
                on_step(Step(runner.model, trace.name), 0, 0)
                if (alone := evaluate_trace(runner, trace, self.spec, self.precision)) is not None:
                    decode.append(replace(alone, clients=1))
            units = self._elements([case for cases in kinds.values() for case in cases])
        for clients in options.clients:
            load = _Load(self, clients, units)
            load.run()
            verdicts, reports = self._judge(load)
            steps = [verdict for report in reports for verdict in report.verdicts]
            points.append(load.point(steps if runner.keeps_cache else verdicts))
            # Every repetition is judged; of each output the worst one is shown.
            if verdicts:
                parity.append(
                    self._parity(_worst(verdicts, lambda v: (v.case, v.output)), CaseKind.SERVED, clients)
                )
            decode += [replace(r, clients=clients) for r in _worst(reports, lambda r: r.trace)]
            if load.gone.is_set():
                break
        evaluation = Evaluation(
            runtime=Runtime(name=runner.model, family=SERVER, open=lambda: runner),
            runner=runner.name,
            titles={runner.name: runner.title},
            cases={CaseKind.GOLDEN: golden},
            parity=tuple(parity),
            decode_reports=tuple(decode),
        )
        about: dict[str, Any] = {"absent": absent, "notes": notes, "serving": tuple(points)}
        about["served_sha256"] = runner.bundle_sha256
        report = Validation(bundle=self.bundle, evaluations=(evaluation,), **about)
        return conclude(report, [evaluation], options)

    def _largest_answer(self, kinds: Iterable[Sequence[GoldenCase]], traces: Sequence[DecodeTrace]) -> int:
        """The bytes that the outputs of a request can have, also as text, with room for their description."""
        counts = [sum(array.size for array in case.oracle.values()) for cases in kinds for case in cases]
        longest = max((axis.max for axis in self.spec.axes.values()), default=1)
        for trace in traces:  # a preallocated cache is as long as its axis
            whole = sum(array.size for array in trace.oracle.values())
            counts.append(whole * max(1, -(-longest // trace.length)))
        return (1 << 20) + 32 * max(counts, default=0)

    def _parity(self, verdicts: Sequence[OutputVerdict], cases: CaseKind, clients: int = 1) -> ParityReport:
        return parity_from_verdicts(
            verdicts,
            runtime=self.runner.name,
            clients=clients,
            model=self.spec.name,
            precision=self.precision,
            cases=cases,
        )

    def _run_and_judge(self, case: GoldenCase) -> list[OutputVerdict]:
        if self._silent is not None:
            return failed_to_run(case, f"not sent: {self._silent.in_one_line}")
        try:
            outputs = self.runner.run(case.inputs)
            self._answered = True
            return judge_case(case, outputs, self.precision)
        except DeployError as error:
            is_silent = isinstance(error, ServerError) and error.kind in (TIMEOUT, UNREACHABLE)
            if is_silent and not self._answered:
                self._silent = error
            return failed_to_run(case, error.in_one_line)

    def _elements(self, cases: Sequence[GoldenCase]) -> list[_Unit]:
        """The batch elements of every case, where the server batches them; else whole cases."""
        units = []
        for case in cases:
            arrays = (*case.inputs.values(), *case.oracle.values())
            batches = {array.shape[:1] for array in arrays}  # a server that batches has one everywhere
            whole = not self.runner.max_batch or len(batches) != 1 or () in batches
            parts = [slice(None)] if whole else [slice(b, b + 1) for (B,) in batches for b in range(B)]
            for part in parts:
                feeds: Arrays = {name: array[part] for name, array in case.inputs.items()}
                units.append(_Unit(case, len(parts), 1, partial(iter, [(feeds, {})])))
        return units

    def _sequences(self, traces: Sequence[DecodeTrace]) -> list[_Unit]:
        """The batch elements of every trace, each a sequence of its own."""
        if not traces:
            problem = "The server keeps the KV cache, and the bundle has no decode trace to replay."
            raise DeployError(problem, got=self.spec.name, hint="validate --steps 64, which needs PyTorch")
        elements = [(trace, b) for trace in traces for b in range(trace.B)]
        return [_Unit(of, of.B, 1 + of.steps, partial(_sequence, of, b)) for of, b in elements]

    def _judge(self, load: _Load) -> tuple[list[OutputVerdict], list[DecodeReport]]:
        verdicts, reports = list[OutputVerdict](), list[DecodeReport]()
        for count, (subject, parts) in enumerate(load.results()):
            self.on_step(f"judging what {plural(load.clients, 'client')} got", count, 0)
            if isinstance(subject, DecodeTrace):
                recorded = _Recorded(self.runner.name, subject, parts)
                reports.append(run_decode_loop(recorded, subject, self.spec, self.precision))
                verdicts += reports[-1].verdicts[: reports[-1].of_prefill]
            elif error := next((part.error for part in parts if part.error is not None), None):
                verdicts += failed_to_run(subject, error.in_one_line)
            else:
                try:
                    verdicts += judge_case(
                        subject, joined([part.outputs[0] for part in parts]), self.precision
                    )
                except ServerError as error:
                    verdicts += failed_to_run(subject, error.in_one_line)
        return verdicts, reports


# -- what clients send at the same time, and what came back ----------------------------------------


@dataclass(frozen=True)
class _Unit:
    """What one client sends: a batch element of a case, or a whole sequence."""

    of: GoldenCase | DecodeTrace
    parts: int  # how many units the case or the trace has
    count: int  # of its requests
    requests: Callable[[], Iterator[tuple[Arrays, dict[str, Any]]]]  # inputs, and place in a sequence


@dataclass
class _Replies:
    """What came back of a unit: outputs and times of every request, up to the first that failed."""

    outputs: list[Arrays] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    error: DeployError | None = None
    is_kept: bool = True


def _sequence(trace: DecodeTrace, b: int) -> Iterator[tuple[Arrays, dict[str, Any]]]:
    """A prompt and its decode steps, under a correlation ID that no other sequence has."""
    id, inputs = int(np.random.default_rng().integers(1, 2**62)), trace.inputs.items()
    own = replace(trace, inputs={name: x[b : b + 1] for name, x in inputs}, prompt=trace.prompt[b : b + 1])
    for step in range(1 + own.steps):
        flags = {"sequence_start": step == 0, "sequence_end": step == own.steps}
        yield own.tokens(step) if step else own.prefill(), {"sequence_id": id, **flags}


class _Load:
    """Some clients that send the same units over and over, up to a number of requests."""

    def __init__(self, validation: _ServerValidation, clients: int, units: Sequence[_Unit]) -> None:
        self.clients, self._units = clients, units
        self._runner, self._options = validation.runner, validation.options
        self._on_step = partial(validation.on_step, plural(clients, "client"))
        each = sum(unit.count for unit in units)
        rounds = max(1, -(-self._options.requests // each))
        if max(unit.count for unit in units) > 1:  # sequences: enough of them to keep every client busy
            rounds = max(rounds, -(-clients // len(units)))
        # In a fixed, shuffled order: neighbors in a dynamic batch come from different cases.
        self._work = [(round, index) for round in range(rounds) for index in range(len(units))]
        random.Random(clients).shuffle(self._work)
        self._requests, self._lock = rounds * each, threading.Lock()
        self.gone = threading.Event()  # the server could no longer be reached, or has not answered anything
        self._parts: dict[tuple[int, int], _Replies] = {}
        self._seconds, self._kept = 0.0, 0

    def run(self) -> None:
        """Send everything, or until the server is gone or the time is over."""
        started = time.perf_counter()
        with ThreadPoolExecutor(self.clients) as pool:
            for _ in pool.map(partial(self._send, started + self._options.limit_s), range(len(self._work))):
                pass
        self._seconds = time.perf_counter() - started

    def _send(self, until: float, at: int) -> None:
        if self.gone.is_set() or time.perf_counter() >= until:
            return
        round, index = place = self._work[at]
        with self._lock:
            self._on_step(at, len(self._work))
            part = self._parts[place] = _Replies()
        try:
            for feeds, where in self._units[index].requests():
                started = time.perf_counter()
                outputs = self._runner.infer(feeds, **where)
                part.seconds.append(time.perf_counter() - started)
                part.outputs.append(outputs)
        except DeployError as error:
            part.error = error
            kind = getattr(error, "kind", "")
            if kind == UNREACHABLE or (kind == TIMEOUT and not any(each.seconds for each in self._done())):
                self.gone.set()
        with self._lock:
            if round and self._kept > _KEPT_BYTES:
                part.outputs, part.is_kept = [], False
            self._kept += sum(array.nbytes for each in part.outputs for array in each.values())

    def _done(self) -> list[_Replies]:
        with self._lock:
            return list(self._parts.values())

    def results(self) -> Iterator[tuple[GoldenCase | DecodeTrace, list[_Replies]]]:
        """Every case and trace of which all parts were sent and kept."""
        sent = [(round, self._units[index], part) for (round, index), part in sorted(self._parts.items())]
        for group in group_by(sent, lambda each: (each[0], id(each[1].of))):
            (_, unit, _), parts = group[0], [part for _, _, part in group]
            if len(parts) == unit.parts and all(part.is_kept for part in parts):
                yield unit.of, parts

    def point(self, verdicts: Sequence[OutputVerdict]) -> ServingRecord:
        """The figures of this number of clients."""
        parts, shares = self._parts.values(), (50, 90, 99)
        errors = [part.error for part in parts if part.error is not None]
        kinds = Counter(getattr(error, "kind", "error") for error in errors)
        latencies = [1e3 * seconds for part in parts for seconds in part.seconds]
        if unsent := self._requests - len(latencies) - len(errors):
            kinds[NOT_SENT] = unsent
        times = np.percentile(latencies, shares).tolist() if latencies else [None] * len(shares)
        return ServingRecord(
            clients=self.clients,
            requests=self._requests,
            answered=len(latencies),
            errors=dict(kinds),
            first_error=errors[0].in_one_line if errors else None,
            per_second=len(latencies) / self._seconds if self._seconds > 0 else None,
            **{f"p{share}_ms": time for share, time in zip(shares, times, strict=True)},
            judged=len(verdicts),
            wrong=sum(verdict.is_wrong for verdict in verdicts),
            runs=self._runner.runs,
        )


class _Recorded:
    """A decode loop that plays back what the sequences of a trace got."""

    most_tokens: int | None = None
    hides_cache = True

    def __init__(self, name: str, trace: DecodeTrace, parts: Sequence[_Replies]) -> None:
        self.name, self._trace, self._parts, self._call = name, trace, parts, 0
        self.lengths = np.zeros(trace.B, np.int32)

    def feed(self, tokens: Arrays, counts: np.ndarray | None) -> Arrays:
        call, self._call = self._call, self._call + 1
        for part in (part for part in self._parts if call >= len(part.outputs)):
            raise part.error or DeployError(
                "The sequence was not sent to its end.", hint="fewer clients, or a longer --timeout"
            )
        prompt, longest = (self._trace.prompt, self._trace.longest_prompt) if call == 0 else (1, 1)
        self.lengths = (self.lengths + prompt).astype(np.int32)
        outputs = self._trace.cache.outputs.items()
        return joined([
            {name: _padded(part.outputs[call][name], axis, longest) for name, axis in outputs}
            for part in self._parts
        ])  # fmt: skip

    def cache(self) -> Arrays:
        raise ServerError("The server keeps the KV cache.", hint="a model whose KV cache is an input")


def _worst(found: Iterable[T], key: Callable[[T], Hashable]) -> list[T]:
    """Of each kind the one that failed, or came nearest to it."""

    def badness(each: Any) -> tuple[bool, bool, float]:
        share = math.inf if each.share is None and not each.passed else each.share or 0.0
        return each.outcome is Outcome.FAILED, not each.passed, share

    return [max(alike, key=badness) for alike in group_by(found, key)]


def _padded(array: np.ndarray, axis: int, length: int) -> np.ndarray:
    """Zeros behind the tokens of a shorter prompt."""
    missing = length - array.shape[axis] if array.ndim > axis else 0
    return np.pad(array, [(0, max(0, missing) * (axis == each)) for each in range(array.ndim)])
