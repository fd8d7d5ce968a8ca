"""The benchmark record: every measurement is one line of JSON that can be measured again."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import subprocess
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Struct

from mha_deploy.bundle.folder import Bundle
from mha_deploy.engine.engine import Engine
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.files import as_plain, check_plain, read_regular, refuse_duplicates
from mha_deploy.output import append_file, check_file
from mha_deploy.process import run
from mha_deploy.status import Kind, Outcome, Reason, Word
from mha_deploy.text import reason_text, short, sizes_text
from mha_deploy.validation.bench import ModelBench
from mha_deploy.validation.evaluate import WRONG
from mha_deploy.validation.records import EnvironmentRecord, model_record, report_header

_LOW_CLOCK = 0.95


class LineKind(Word):
    """What a line records."""

    TIME = "time"
    THROUGHPUT = "throughput"  # on several streams
    BUILD = "build"  # an engine that was built and not run


class EngineLine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine of a line."""

    name: str
    backend: str
    version: str
    sha256: str
    plugins: list[str] = []
    attention: str = ""  # `native` or `plugin`; empty where the engine was only built
    accumulate: str = ""  # what its GEMMs accumulate in, as requested; empty as above
    fused: list[int] = []


class TimingLine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the samples were taken, as `mha_deploy.runtime.timing.Timing` has it."""

    calls_per_sample: int
    slots: int
    graph: bool
    stable: bool
    host_us: float
    memory_bytes: int | None = None
    why_no_graph: str | None = None


class RateLine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls per second on several streams."""

    streams: int
    per_second: float
    p50_us: float
    p99_us: float


class ConditionsLine(TypedDict, total=False):
    """The state of the GPU, as `mha_deploy.runtime.cuda.Conditions` has it."""

    sm_mhz: float | None
    sm_mhz_max: float | None
    memory_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    throttled_by: list[str]


class Line(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measurement, or one build."""

    kind: LineKind
    run: str  # the process
    created: str
    # Of this tool, with `+` behind it where files were changed; outside a checkout `sha256:` of its source
    commit: str
    command: list[str]
    versions: dict[str, str]
    platform: str
    gpu: str
    driver: str
    model: str
    precision: str
    bundle: str
    bundle_sha256: str
    runtime: str
    backend: str
    engine: EngineLine | None = None
    case: str = ""
    sizes: dict[str, int] = {}
    past: int | None = None  # valid entries of a preallocated KV cache
    outcome: Outcome  # `passed`: the results of the timed calls are right
    reason: Reason | None = None  # why there is no time of right results
    samples_us: list[Annotated[float, msgspec.Meta(gt=0)]] = []
    timing: TimingLine | None = None
    rate: RateLine | None = None
    kernels: list[tuple[str, float, float]] = []  # name, launches and µs in one call, where requested
    conditions: ConditionsLine = {}  # clocks, temperature, power and throttling, as the driver reported them
    format: Literal[1] = 1

    def __post_init__(self) -> None:
        if (self.reason is None) is not (self.outcome is Outcome.PASSED):
            raise ValueError("a line has a reason unless its results are right")
        if self.reason is not None and not _is_of_line(self.reason):
            raise ValueError(f"not the reason of a line: {self.reason.kind}")

    @property
    def p50(self) -> float | None:
        """The median of the samples; None where there are none."""
        return median(self.samples_us) if self.samples_us else None

    @property
    def is_timed(self) -> bool:
        """Whether there are samples, of results that are right."""
        return bool(self.samples_us) and self.outcome is Outcome.PASSED

    @property
    def is_throttled(self) -> bool:
        """Whether the driver reported a reason, or the clock was below 95 % of the highest."""
        clock, highest = self.conditions.get("sm_mhz"), self.conditions.get("sm_mhz_max")
        low = clock is not None and highest is not None and clock < _LOW_CLOCK * highest
        return low or bool(self.conditions.get("throttled_by"))

    @property
    def row(self) -> tuple[Any, ...]:
        """What lines of one row of a table share."""
        return self.title, self.gpu, tuple(sorted(self.sizes.items())), self.past

    @property
    def title(self) -> str:
        """Its model and precision; with the folder of the bundle where that has another name."""
        folder = Path(self.bundle).name
        return f"{self.model} {self.precision}" + ("" if folder in (self.model, "bundle") else f" ({folder})")

    @property
    def place(self) -> str:
        """Its sizes as text."""
        return sizes_text(self.sizes) + ("" if self.past is None else f", past {self.past}")


_NO_TIME = WRONG | {Kind.NOT_TIMED, Kind.NOT_RUN}


def _is_of_line(reason: Reason) -> bool:
    """Whether a reason says why there is no time, and can be put into words."""
    on_streams = reason.kind is Kind.WRONG_ON_STREAMS
    return reason.kind in _NO_TIME and (not on_streams or "streams" in reason.numbers)


# -- From a benchmark to lines ---------------------------------------------------------------------


def bench_lines(benches: Sequence[ModelBench], command: Sequence[str] | None = None) -> list[Line]:
    """A line for every runtime and size of a benchmark in this process, on one stream and on several."""
    shared, found = _shared(command), list[Line]()
    for bench in benches:
        runtimes = {row.name: row.runtime for point in bench.points for row in point.rows}
        for point in bench.points:
            for row in point.rows:
                data: dict[str, Any] = {"case": point.case, "sizes": dict(point.sizes), "past": point.past}
                if row.timing is not None:
                    data |= {
                        "samples_us": [round(sample, 4) for sample in row.timing.samples_us],
                        "timing": _picked(row.timing, TimingLine),
                        "conditions": msgspec.structs.asdict(row.timing.conditions),
                        "kernels": [(k.name, k.calls, round(k.microseconds, 3)) for k in row.kernels],
                    }
                data |= {"kind": LineKind.TIME, "backend": row.runtime, **_judged(row.refused)}
                found.append(_line(bench, row.name, {**shared, **data}))
        for load in bench.throughput:
            data = {"case": load.case, "sizes": dict(load.sizes), "kind": LineKind.THROUGHPUT}
            data |= {"backend": runtimes[load.name], **_judged(load.reason)}
            if load.reason is None:
                data["rate"] = _picked(load, RateLine)
            found.append(_line(bench, load.name, {**shared, **data}))
    return found


def _picked(record: object, kind: type[Struct]) -> dict[str, Any]:
    """The values of a record that a part of a line has, too."""
    return {name: getattr(record, name) for name in kind.__struct_fields__}


def _judged(reason: Reason | None) -> dict[str, Any]:
    """The outcome of a line, with its reason: failed where the results are wrong."""
    if reason is None:
        return {"outcome": Outcome.PASSED}
    outcome = Outcome.FAILED if reason.kind in WRONG else Outcome.NOT_VERIFIED
    return {"outcome": outcome, "reason": reason}


def _line(bench: ModelBench, runtime: str, data: Mapping[str, Any]) -> Line:
    model = model_record(bench.bundle)
    ran = {each.runtime.name: each.runtime.engine for each in bench.evaluations}
    # One that was not run has its own name.
    engine = ran.get(runtime) or next((each for each in bench.engines if each.path.stem == runtime), None)
    about = None if engine is None else _about_engine(engine)
    of_model = {"model": model.name, "precision": model.precision, "bundle_sha256": model.bundle_sha256}
    place = {"bundle": str(bench.bundle.path), "runtime": runtime, "engine": about}
    return msgspec.convert(as_plain({**data, **of_model, **place}), Line)


def _about_engine(engine: Engine) -> dict[str, Any]:
    manifest = engine.manifest
    return {
        "name": engine.path.stem,
        "backend": manifest.backend,
        "version": manifest.version,
        "sha256": manifest.engine_sha256,
        "plugins": [library["sha256"] for library in manifest.plugins],
        "attention": manifest.attention["chosen"],
        "accumulate": manifest.attention["accumulate"],
        "fused": list(manifest.fused_count),
    }


def _shared(command: Sequence[str] | None = None) -> dict[str, Any]:
    """What all lines of a process share."""
    known = report_header()
    here: EnvironmentRecord = known["environment"]
    return {
        "run": uuid.uuid4().hex,
        "created": known["created"],
        "commit": _commit(),
        "command": list(known["tool"].command if command is None else command),
        "versions": here.versions,
        "platform": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "gpu": here.gpu.name if here.gpu else "",
        "driver": here.driver or "",
    }


def _commit() -> str:
    """The commit of the checkout that this package is in; outside one, a hash of its source files."""
    package = Path(__file__).resolve().parents[1]
    root = package.parent
    if (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            read = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
            return str(run(read, capture_output=True, text=True, timeout=20, check=True).stdout).strip()
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return f"sha256:{digest.hexdigest()[:40]}"


def build_line(cell: Mapping[str, Any]) -> Line:
    """The line of a cell of a matrix whose engine was built and not run."""
    report, engine = cell["report"], cell["report"]["engines"][0]
    kept = {key: engine[key] for key in ("name", "backend", "version", "fused")}
    data = {
        **_shared(),
        **{key: cell[key] for key in ("model", "precision", "runtime")},
        **{key: report["model"][key] for key in ("bundle", "bundle_sha256")},
        "kind": LineKind.BUILD,
        "backend": f"{engine['backend']} {engine['version']}",
        "versions": report["environment"]["versions"],
        "engine": {"sha256": cell["engine_sha256"], **kept},
        **_judged(Reason(kind=Kind.NOT_RUN)),
    }
    return msgspec.convert(as_plain(data), Line)


def append_lines(path: Path, lines: Iterable[Line]) -> None:
    """Add lines to a record, whole; a file that holds anything else is refused."""
    texts = [msgspec.json.encode(line) for line in lines]
    for text in texts:
        _read_line(text)  # what is written can be read
    append_file(path, b"".join(text + b"\n" for text in texts), read_lines)


def check_record(path: Path) -> None:
    """Refuse, before long work, a file that lines cannot be added to."""
    check_file(path, lambda _: True)
    if path.exists():
        read_lines(path)


def _read_line(content: bytes) -> Line:
    data = msgspec.json.decode(content)
    refuse_duplicates(content)
    check_plain(data)
    return msgspec.convert(data, Line)


def read_lines(path: Path) -> list[Line]:
    """The lines of a file."""
    try:
        texts = read_regular(path).splitlines()
    except OSError as error:
        hint = "`mha-deploy bench --record FILE` writes one"
        raise DeployError("The record cannot be read.", got=error, hint=hint) from error
    found = []
    for number, content in enumerate(texts, 1):
        try:
            found.append(_read_line(content))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            problem, hint = f"{path}:{number}: {error}", "another file: a record holds only its own lines"
            raise DeployError("The record has a line of another format.", got=problem, hint=hint) from error
    return found


# -- Measure again ---------------------------------------------------------------------------------


def medians(lines: Iterable[Line]) -> list[float]:
    """The median of each process that timed something."""
    runs: dict[str, list[float]] = {}
    for line in lines:
        runs.setdefault(line.run, []).extend(line.samples_us)
    return [median(samples) for samples in runs.values() if samples]


class ReplayStatus(Word):
    """What a new measurement says of a line."""

    AGREES = "agrees"
    DIFFERS = "differs"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A line that was measured again, and why it agrees or not."""

    recorded: Line
    measured: Line
    status: ReplayStatus
    why: str

    @property
    def passed(self) -> bool:
        """Whether the new measurement agrees with the record."""
        return self.status is ReplayStatus.AGREES

    @property
    def outcome(self) -> Outcome:
        """Failed unless both agree."""
        return Outcome.passing(self.passed)


def pick_line(source: str) -> tuple[Line, list[Line]]:
    """The line that `FILE:NUMBER` names, and all lines of its runtime, bundle and row with right results."""
    name, _, number = source.rpartition(":")
    if not name or not (number.isdecimal() and len(number) < 10):
        hint = "benchmarks/results/FILE.jsonl:12"
        raise DeployError("A line of a record is needed.", got=source, hint=hint)
    lines = read_lines(Path(name))
    if not 1 <= int(number) <= len(lines):
        hint = (
            f"1 to {len(lines)}"
            if lines
            else "`mha-deploy bench --record FILE` writes lines; this file is empty"
        )
        raise DeployError("The record has no such line.", got=source, hint=hint)
    line = lines[int(number) - 1]
    if not line.is_timed:
        problem = (
            "Nothing was timed in this line." if line.p50 is None else "The timed results were not right."
        )
        raise DeployError(problem, got=f"{line.runtime}: {_why(line)}", hint="measure it again")
    same = ("row", "runtime", "backend", "bundle_sha256")
    alike = [each for each in lines if all(getattr(each, name) == getattr(line, name) for name in same)]
    return line, [each for each in alike if each.is_timed]


def _why(line: Line) -> str:
    return line.outcome.value if line.reason is None else reason_text(line.reason)


def replay_line(
    line: Line, alike: Sequence[Line], bundle: Bundle, bench: Callable[..., ModelBench], tolerance: float
) -> Replay:
    """Measure a line again with `bench`, which takes options, and judge whether it agrees with all alike."""
    if model_record(bundle).bundle_sha256 != line.bundle_sha256:
        got, hint = f"{bundle.path}, not {line.bundle_sha256[:12]}", "the bundle that it was measured with"
        raise DeployError("The line was measured with another bundle.", got=got, hint=hint)
    sizes = ",".join(f"{axis}={size}" for axis, size in line.sizes.items())
    at = line.case if line.case in ("opt", "prefill", "decode") else sizes
    timed = bench(bundle, at=[at], runtimes=[line.runtime], samples=len(line.samples_us))
    new = [each for each in bench_lines([timed]) if each.runtime == line.runtime]
    found = [each for each in new if (each.sizes, each.past) == (line.sizes, line.past)]
    if not found or (found[0].p50 is None and found[0].outcome is not Outcome.FAILED):
        why = _why(found[0]) if found else line.runtime
        raise BackendUnavailable("Nothing was timed.", got=why, hint="`mha-deploy bench` without --replay")
    status, why = judge_replay(alike, found[0], tolerance)
    return Replay(recorded=line, measured=found[0], status=status, why=why)


def judge_replay(recorded: Sequence[Line], measured: Line, tolerance: float) -> tuple[ReplayStatus, str]:
    """Whether a new time is inside the range of the recorded processes, and why; wrong results differ."""
    if measured.outcome is Outcome.FAILED:
        return ReplayStatus.DIFFERS, _why(measured)
    known = medians(recorded)
    low, high = min(known) * (1 - tolerance), max(known) * (1 + tolerance)
    p50 = measured.p50 or 0.0
    why = f"{short(p50)} µs; the record allows {short(low)} to {short(high)} µs"
    if measured.gpu != recorded[0].gpu:
        return (
            ReplayStatus.NOT_COMPARABLE,
            f"measured on {measured.gpu or 'no GPU'}, recorded on {recorded[0].gpu}",
        )
    if low <= p50 <= high:
        return ReplayStatus.AGREES, why
    sides = {"here": [measured], "in the record": recorded}
    throttled = [name for name, lines in sides.items() if any(line.is_throttled for line in lines)]
    if throttled:
        return ReplayStatus.NOT_COMPARABLE, f"{why}; the GPU was throttled {' and '.join(throttled)}"
    return ReplayStatus.DIFFERS, why
