"""Validate through a server: golden cases and decode traces replayed by several clients at once.

Requests are single batch elements wherever the server puts batches together. So one dynamic batch mixes
elements of different cases, and every result is put together again and judged as in any other runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mha_deploy.bundle.cases import GoldenCase, golden_cases
from mha_deploy.bundle.folder import Bundle
from mha_deploy.bundle.traces import DecodeTrace, take_tokens
from mha_deploy.errors import DeployError
from mha_deploy.metrics import OutputVerdict, ParityReport, failed_to_run, judge_case, parity_from_verdicts
from mha_deploy.options import ValidateOptions
from mha_deploy.runtime.kserve import ServerError, ServerRunner, served_name
from mha_deploy.runtime.runner import Arrays
from mha_deploy.text import plural
from mha_deploy.validate.decode import DecodeReport, evaluate_trace, run_decode_loop, traces_of
from mha_deploy.validate.evaluate import Evaluation
from mha_deploy.validate.load import Load, LoadPoint, Part, Unit
from mha_deploy.validate.run import drawn_cases
from mha_deploy.validate.runtimes import Runtime, Unavailable
from mha_deploy.validate.verdict import FAILURE, WARNING, Finding, Report, findings, headline

T = TypeVar("T")
OnStep = Callable[[str, int, int], None]
SERVER = "server"


def validate_server(bundle: Bundle, options: ValidateOptions, on_step: OnStep = lambda *step: None) -> Report:
    """Judge a served model by the golden cases and the decode traces of its bundle, under load.

    Raises:
        BackendUnavailable: The server cannot be reached, or the model is not ready.
    """
    return _ServerValidation(bundle, options, on_step).report()


class _ServerValidation:
    def __init__(self, bundle: Bundle, options: ValidateOptions, on_step: OnStep) -> None:
        if options.requests < 1 or not options.clients or min(options.clients) < 1:
            got = f"clients {list(options.clients)}, requests {options.requests}"
            raise DeployError("There must be a client and a request.", got=got)
        self.bundle, self.options, self.on_step = bundle, options, on_step
        self.spec, self.precision = bundle.manifest.spec, bundle.manifest.precision
        name = served_name(self.spec.name)
        self.runner = ServerRunner(options.url or "", model=name, timeout_s=options.timeout_s)
        self.notes: list[str] = []

    def report(self) -> Report:
        on_step, runner, name = self.on_step, self.runner, self.runner.model
        options = self.options
        traces = traces_of(self.bundle, options)
        golden, absent = list(golden_cases(self.bundle)), list[Unavailable]()
        parity, decode, points = [], list[DecodeReport](), list[LoadPoint]()
        if runner.keeps_cache:
            units = self._sequences(traces)
            kept = "golden cases were not run: their KV cache is an input, and this server keeps its own"
            self.notes.append(f"{kept}; the decode traces were replayed")
        else:
            drawn, missing = drawn_cases(self.bundle, options, lambda step: on_step(step, 0, 0))
            absent += missing
            for kind, cases in {"golden": golden, **drawn}.items():
                on_step(f"{name}: {kind} cases", 0, 0)
                verdicts = [verdict for case in cases for verdict in self._judged(case)]
                parity.append(self._parity(verdicts, kind))
            for trace in traces:
                on_step(f"{name}: {trace.name}", 0, 0)
                walked = evaluate_trace(runner, trace, self.spec, self.precision)
                decode += [walked] if walked is not None else []
            units = self._elements([*golden, *(case for cases in drawn.values() for case in cases)])
        for clients in options.clients:
            load = Load(options, clients, units, partial(on_step, plural(clients, "client")))
            load.run()
            verdicts, reports = self._judge(load)
            steps = [verdict for report in reports for verdict in report.verdicts]
            points.append(load.point(steps if runner.keeps_cache else verdicts))
            # Every repetition is judged; of each output the worst one is shown.
            if verdicts:
                parity.append(self._parity(_worst(verdicts, lambda v: (v.case, v.output)), "served", clients))
            label = f"{runner.name}, {clients} clients" if clients > 1 else runner.name
            decode += [replace(each, backend=label) for each in _worst(reports, lambda r: r.trace)]
            if load.is_gone:
                break
        runner.close()
        evaluation = Evaluation(
            runtime=Runtime(name=name, family=SERVER, open=lambda: runner),
            backend=runner.name,
            cases={"golden": golden},
            parity=tuple(parity),
            decode_reports=tuple(decode),
        )
        plain = findings([evaluation], (), (), (), (), None, None, None, options)
        served = [each for point in points for each in _findings(point, options)]
        found = tuple(sorted((*plain, *served), key=lambda each: each.level != FAILURE))
        return Report(
            bundle=self.bundle,
            evaluations=(evaluation,),
            absent=tuple(absent),
            engines=(),
            points=(),
            ranges=None,
            conformance=None,
            fault=None,
            findings=found,
            headline=headline([evaluation], (), (), found),
            notes=tuple(self.notes),
            serving=tuple(points),
        )

    def _parity(self, verdicts: Sequence[OutputVerdict], cases: str, clients: int = 1) -> ParityReport:
        return parity_from_verdicts(
            verdicts,
            model=self.spec.name,
            precision=self.precision,
            backend=self.runner.name + (f", {clients} clients" if clients > 1 else ""),
            cases=cases,
        )

    def _judged(self, case: GoldenCase) -> list[OutputVerdict]:
        try:
            return judge_case(case, self.runner.run(case.inputs), self.precision)
        except DeployError as error:
            return failed_to_run(case, error.in_one_line)

    # -- what the clients send -------------------------------------------------------------------

    def _elements(self, cases: Sequence[GoldenCase]) -> list[Unit]:
        """The batch elements of every case, where the server batches them; else whole cases."""
        units = []
        for case in cases:
            arrays = {**case.inputs, **case.oracle}
            B = case.sizes.get("B", 0)
            whole = not self.runner.max_batch or any(array.shape[:1] != (B,) for array in arrays.values())
            parts = [slice(None)] if whole else [slice(b, b + 1) for b in range(B)]
            for place, part in enumerate(parts):
                feeds = {name: array[part] for name, array in case.inputs.items()}
                send = partial(_send_element, self.runner, feeds)
                units.append(Unit(of=case, place=place, parts=len(parts), requests=1, send=send))
        return units

    def _sequences(self, traces: Sequence[DecodeTrace]) -> list[Unit]:
        """The batch elements of every trace, each a sequence of its own."""
        if not traces:
            problem = "The server keeps the KV cache, and the bundle has no decode trace to replay."
            hint = "validate --steps 64, which needs PyTorch"
            raise DeployError(problem, got=self.spec.name, hint=hint)
        units = []
        for trace in traces:
            for b in range(trace.B):
                send = partial(_send_sequence, self.runner, trace, b)
                units.append(Unit(of=trace, place=b, parts=trace.B, requests=1 + trace.steps, send=send))
        return units

    # -- what came back --------------------------------------------------------------------------

    def _judge(self, load: Load) -> tuple[list[OutputVerdict], list[DecodeReport]]:
        verdicts, reports = list[OutputVerdict](), list[DecodeReport]()
        for count, (subject, parts) in enumerate(load.results()):
            self.on_step(f"judging what {plural(load.clients, 'client')} got", count, 0)
            if isinstance(subject, DecodeTrace):
                recorded = _Recorded(self.runner.name, subject, parts)
                report = run_decode_loop(recorded, subject, self.spec, self.precision)
                reports.append(report)
                verdicts += [each for each in report.verdicts if each.case.endswith(" prefill")]
                continue
            error = next((part.error for part in parts if part.error is not None), None)
            if error is not None:
                verdicts += failed_to_run(subject, error.in_one_line)
                continue
            outputs = [part.outputs[0] for part in parts]
            whole = {name: np.concatenate([each[name] for each in outputs]) for name in outputs[0]}
            verdicts += judge_case(subject, whole, self.precision)
        return verdicts, reports


def _send_element(runner: ServerRunner, feeds: Arrays, part: Part) -> None:
    part.request(lambda: runner.infer(feeds))


def _send_sequence(runner: ServerRunner, trace: DecodeTrace, b: int, part: Part) -> None:
    """A prompt and its decode steps, under a correlation ID that no other sequence has."""
    id = int(np.random.default_rng().integers(1, 2**62))

    def send(positions: np.ndarray, *, start: bool, end: bool) -> None:
        feeds = {name: array[b : b + 1] for name, array in trace.inputs.items()}
        for name, axis in trace.cache.by_context.items():
            feeds[name] = np.take(feeds[name], np.arange(int(positions.max()) + 1), axis)
        for name, axis in trace.cache.by_token.items():
            feeds[name] = take_tokens(feeds[name], axis, positions[None])
        place = {"sequence_id": id, "sequence_start": start, "sequence_end": end}
        part.request(lambda: runner.infer(feeds, **place))

    prompt, steps = int(trace.prompt[b]), trace.steps
    send(np.arange(prompt), start=True, end=not steps)
    for step in range(steps):
        send(np.array([prompt + step]), start=False, end=step == steps - 1)


class _Recorded:
    """A decode loop that plays back what the sequences of a trace got."""

    most_tokens: int | None = None
    hides_cache = True

    def __init__(self, name: str, trace: DecodeTrace, parts: Sequence[Part]) -> None:
        self.name, self._trace, self._parts, self._call = name, trace, parts, 0
        self.lengths = np.zeros(trace.B, np.int32)

    def feed(self, tokens: Arrays, counts: np.ndarray | None) -> Arrays:
        call, self._call = self._call, self._call + 1
        for part in self._parts:
            if call >= len(part.outputs):
                raise part.error or DeployError("The sequence was not sent to its end.")
        prompt, longest = (self._trace.prompt, self._trace.longest_prompt) if call == 0 else (1, 1)
        self.lengths = (self.lengths + prompt).astype(np.int32)
        return {
            name: np.concatenate([_padded(part.outputs[call][name], axis, longest) for part in self._parts])
            for name, axis in self._trace.cache.outputs.items()
        }

    def cache(self) -> Arrays:
        raise ServerError("The server keeps the KV cache.")


def _worst(found: Iterable[T], key: Callable[[T], Hashable]) -> list[T]:
    """Of each kind the one that failed, or came nearest to it."""

    def badness(each: Any) -> tuple[bool, float]:
        return not each.passed, each.share or 0.0

    kinds: dict[Hashable, list[T]] = {}
    for each in found:
        kinds.setdefault(key(each), []).append(each)
    return [max(alike, key=badness) for alike in kinds.values()]


def _padded(array: np.ndarray, axis: int, length: int) -> np.ndarray:
    """Zeros behind the tokens of a shorter prompt."""
    missing = length - array.shape[axis] if array.ndim > axis else 0
    return np.pad(array, [(0, max(0, missing) * (axis == each)) for each in range(array.ndim)])


def _findings(point: LoadPoint, options: ValidateOptions) -> Iterator[Finding]:
    """What a load shows besides wrong results."""
    failed = {kind: count for kind, count in point.errors.items() if kind != "not sent"}
    clients = plural(point.clients, "client")
    if failed:
        counts = ", ".join(f"{count} {kind}" for kind, count in failed.items())
        unsent = point.errors.get("not sent", 0)
        left = f"; {unsent} were not sent any more" if unsent else ""
        text = f"{clients}: {sum(failed.values())} of {point.requests} requests failed ({counts}){left}"
        yield Finding(level=FAILURE, section="serving", text=f"{text}: {point.first_error}")
    elif "not sent" in point.errors:
        answered = f"{len(point.latencies_ms)} of {point.requests} requests"
        text = f"{clients}: the limit of {options.limit_s:g} s was reached after {answered}"
        yield Finding(level=WARNING, section="serving", text=text)
