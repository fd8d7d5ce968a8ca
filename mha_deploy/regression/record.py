"""The benchmark record: every measurement is one line of JSON that can be measured again.

A row of a table is made of several processes: its figure is the median of their medians, and its spread goes
from the smallest to the largest of them. No runtime is the fastest while another one is inside its spread.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct

from mha_deploy.bundle.folder import Bundle
from mha_deploy.engine.manifest import Engine
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.files import read_regular
from mha_deploy.report.schema import as_plain
from mha_deploy.report.table import Cell, Group, Row, Table, columns, text
from mha_deploy.text import NOTHING, short, sizes_text
from mha_deploy.validate.bench import ModelBench
from mha_deploy.validate.latency import LatencyPoint, LatencyRow
from mha_deploy.validate.verdict import frame, model_to_dict

FORMAT = 1
LEAST_PROCESSES = 3
_LOW_CLOCK = 0.95


class EngineLine(Struct, frozen=True, kw_only=True):
    """The engine of a line."""

    name: str
    backend: str
    version: str
    sha256: str
    plugins: list[str] = []
    attention: str = ""
    fused: list[int] = []


class Line(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measurement, or one build.

    Args:
        kind: `time`, or `build` for an engine that was built and not run.
        run: The process: lines of one process share it.
        created: When, in UTC.
        commit: The commit of this tool, with `+` behind it where files were changed; empty where unknown.
        command: The command line.
        versions: Versions of the packages.
        platform: Operating system and processor.
        gpu: The GPU; empty where there is none.
        driver: Version of the driver.
        model: Name of the model.
        precision: Its precision.
        bundle: The folder of the bundle, as it was given.
        bundle_sha256: Hash of its manifest.
        runtime: Name of the runtime.
        backend: The runtime with its version.
        engine: The engine; None where it is another runtime.
        case: Name of the case.
        sizes: Its axis sizes.
        past: Valid entries of a preallocated KV cache; None without one.
        parity: `passed`: the results of the timed calls were judged and are right. Else why there is no time.
        samples_us: The samples, µs.
        timing: Calls per sample, slots, CUDA graph, stability, host time, memory.
        conditions: Clocks, temperature, power and throttling, as the driver reported them.
    """

    kind: str
    run: str
    created: str
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
    past: int | None = None
    parity: str = ""
    samples_us: list[float] = []
    timing: dict[str, Any] = {}
    conditions: dict[str, Any] = {}
    format: int = FORMAT

    @property
    def p50(self) -> float | None:
        """The median of the samples; None where there are none."""
        return median(self.samples_us) if self.samples_us else None

    @property
    def is_throttled(self) -> bool:
        """Whether the driver reported a reason, or the clock was below 95 % of the highest."""
        clock, highest = self.conditions.get("sm_mhz"), self.conditions.get("sm_mhz_max")
        low = clock is not None and highest is not None and clock < _LOW_CLOCK * highest
        return low or bool(self.conditions.get("throttled_by"))

    @property
    def row(self) -> tuple[Any, ...]:
        """What lines of one row of a table share."""
        return self.model, self.precision, self.gpu, tuple(sorted(self.sizes.items())), self.past


# -- From a benchmark to lines ---------------------------------------------------------------------


def bench_lines(benches: Sequence[ModelBench], command: Sequence[str] | None = None) -> list[Line]:
    """A line for every runtime and size of a benchmark in this process."""
    shared = _shared(command)
    return [
        _timed(bench, point, row, shared) for bench in benches for point in bench.points for row in point.rows
    ]


def _shared(command: Sequence[str] | None) -> dict[str, Any]:
    known = frame()
    here = known["environment"]
    return {
        "run": uuid.uuid4().hex,
        "created": known["created"],
        "commit": commit(),
        "command": ["mha-deploy", *sys.argv[1:]] if command is None else list(command),
        "versions": here["versions"],
        "platform": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "gpu": here["gpu"]["name"] if here["gpu"] else "",
        "driver": here["driver"] or "",
    }


def commit() -> str:
    """The commit of the checkout that this package is in; empty where it is installed otherwise."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        read = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
        return subprocess.run(read, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _timed(bench: ModelBench, point: LatencyPoint, row: LatencyRow, shared: Mapping[str, Any]) -> Line:
    engine = next((each for each in bench.engines if each.path.stem == row.name), None)
    data: dict[str, Any] = {
        **shared,
        "kind": "time",
        **_model(bench.bundle),
        "runtime": row.name,
        "backend": row.backend,
        "engine": None if engine is None else _engine(engine),
        "case": point.case,
        "sizes": dict(point.sizes),
        "past": point.past,
        "parity": row.refused or "passed",
    }
    if row.timing is not None:
        kept = ("calls_per_sample", "slots", "graph", "stable", "host_us", "memory_bytes", "why_no_graph")
        data |= {
            "samples_us": [round(sample, 4) for sample in row.timing.samples_us],
            "timing": {name: getattr(row.timing, name) for name in kept},
            "conditions": asdict(row.timing.conditions),
        }
    return msgspec.convert(as_plain(data), Line)


def _model(bundle: Bundle) -> dict[str, Any]:
    known = model_to_dict(bundle)
    names = ("name", "precision", "bundle_sha256")
    return {
        **dict(zip(("model", *names[1:]), map(known.get, names), strict=True)),
        "bundle": str(bundle.path),
    }


def _engine(engine: Engine) -> dict[str, Any]:
    manifest = engine.manifest
    return {
        "name": engine.path.stem,
        "backend": manifest.backend,
        "version": manifest.version,
        "sha256": manifest.engine_sha256,
        "plugins": [library["sha256"] for library in manifest.plugins],
        "attention": f"{manifest.attention['chosen']}, {manifest.attention['accumulate']}",
        "fused": list(manifest.fused_count),
    }


def build_line(cell: Mapping[str, Any], command: Sequence[str] | None = None) -> Line:
    """The line of a cell of a matrix whose engine was built and not run."""
    report, engine = cell["report"], cell["report"]["engines"][0]
    data = {
        **_shared(command),
        "kind": "build",
        "model": cell["model"],
        "precision": cell["precision"],
        "bundle": report["model"]["bundle"],
        "bundle_sha256": report["model"]["bundle_sha256"],
        "runtime": cell["runtime"],
        "backend": f"{engine['backend']} {engine['version']}",
        "versions": report["environment"]["versions"],
        "engine": {
            "sha256": cell["engine_sha256"],
            **{key: engine[key] for key in ("name", "backend", "version", "fused")},
        },
        "parity": "not run",
    }
    return msgspec.convert(as_plain(data), Line)


def append_lines(path: Path, lines: Iterable[Line]) -> None:
    """Add lines to a file, in one write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def read_lines(path: Path) -> list[Line]:
    """The lines of a file.

    Raises:
        DeployError: It cannot be read; the message names the line.
    """
    try:
        texts = read_regular(path).splitlines()
    except OSError as error:
        raise DeployError(
            "The record cannot be read.", got=error, hint="bench --record FILE writes one"
        ) from error
    found = []
    for number, content in enumerate(texts, 1):
        try:
            line = msgspec.json.decode(content, type=Line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DeployError(
                "The record has a line of another format.", got=f"{path}:{number}: {error}"
            ) from error
        if line.format != FORMAT:
            raise DeployError(
                "The record has a line of another format.", got=f"{path}:{number}: {line.format}"
            )
        found.append(line)
    return found


# -- From lines to tables --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The lines of one runtime in one row.

    Args:
        lines: The lines, of one or several processes.
    """

    lines: tuple[Line, ...]

    @property
    def medians(self) -> list[float]:
        """The median of each process."""
        runs: dict[str, list[float]] = {}
        for line in self.lines:
            runs.setdefault(line.run, []).extend(line.samples_us)
        return [median(samples) for samples in runs.values() if samples]

    @property
    def value(self) -> float | None:
        """The median of the processes; None where nothing was timed."""
        return median(self.medians) if self.medians else None

    @property
    def counts(self) -> bool:
        """Whether it may be called the fastest: enough processes, and the GPU was not throttled."""
        return len(self.medians) >= LEAST_PROCESSES and not any(line.is_throttled for line in self.lines)

    def cell(self, *, best: bool) -> Cell:
        """The figure with its spread; `†` for few processes, `‡` where the GPU was throttled."""
        if self.value is None:
            return Cell(text="wrong" if self.lines[0].parity.startswith("wrong") else "not timed")
        span = f"{short(min(self.medians))}–{short(max(self.medians))}"
        few = "†" if len(self.medians) < LEAST_PROCESSES else ""
        throttled = "‡" if any(line.is_throttled for line in self.lines) else ""
        shown = f"{short(self.value)} ({span})" if len(self.medians) > 1 else short(self.value)
        return Cell(text=shown, status="best" if best else "", order=self.value, suffix=few + throttled)


def fastest(figures: Mapping[str, Figure]) -> str | None:
    """The runtime whose slowest process is faster than all processes of others; None inside the spread."""
    timed = {name: figure for name, figure in figures.items() if figure.medians}
    if len(timed) < 2:
        return None
    name = min(timed, key=lambda each: max(timed[each].medians))
    others = [figure for other, figure in timed.items() if other != name]
    if not all(figure.counts for figure in timed.values()):
        return None
    return name if all(max(timed[name].medians) < min(figure.medians) for figure in others) else None


def latency_table(lines: Sequence[Line]) -> Table:
    """A row for every model and size, a column for every runtime."""
    timed = [line for line in lines if line.kind == "time"]
    names = list(dict.fromkeys(line.runtime for line in timed))
    rows: list[Row] = []
    for key in dict.fromkeys(line.row for line in timed):
        alike = [line for line in timed if line.row == key]
        figures = {
            name: Figure(lines=tuple(line for line in alike if line.runtime == name))
            for name in names
            if any(line.runtime == name for line in alike)
        }
        best, first = fastest(figures), alike[0]
        place = sizes_text(first.sizes) + ("" if first.past is None else f", past {first.past}")
        cells = [figures[name].cell(best=name == best) if name in figures else text(None) for name in names]
        processes = len({line.run for line in alike})
        rows.append([text(f"{first.model} {first.precision}"), text(place), *cells, text(str(processes))])
    heads = columns("model", "sizes", *(f"#{name}" for name in names), "#processes")
    title = "p50 in µs: median of the processes, and their range"
    return Table(title=title, columns=heads, groups=[Group(rows=rows)])


def evidence_table(lines: Sequence[Line], contract: Sequence[str]) -> Table:
    """What is known of each TensorRT: measured, built and not run, or only its API.

    Args:
        lines: The lines of all files.
        contract: Versions whose API surface the contract test knows, as `tensorrt 10.14.1`.
    """
    versions: dict[str, dict[str, int]] = {}
    for line in lines:
        if line.engine is not None:
            counts = versions.setdefault(f"{line.engine.backend} {line.engine.version}", {})
            counts[line.kind] = counts.get(line.kind, 0) + 1
    for name in contract:  # 1.7.1 of the contract is 1.7.1.116 of an engine
        if not any(known == name or known.startswith(f"{name}.") for known in versions):
            versions[name] = {}
    rows: list[Row] = []
    for name, counts in sorted(versions.items()):
        status = (
            "measured" if counts.get("time") else "built, not run" if counts.get("build") else "contract only"
        )
        shown = [str(counts[kind]) if counts.get(kind) else NOTHING for kind in ("time", "build")]
        rows.append([text(name), text(status), *map(text, shown)])
    heads = columns("runtime", "evidence", "#measurements", "#builds")
    return Table(title="What is known of each runtime", columns=heads, groups=[Group(rows=rows)])


# -- Measure again ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A line that was measured again.

    Args:
        recorded: The line.
        measured: The new one.
        status: `agrees`, `differs` or `not comparable`.
        why: What the status follows from.
    """

    recorded: Line
    measured: Line
    status: str
    why: str

    @property
    def passed(self) -> bool:
        """Whether the new measurement agrees with the record."""
        return self.status == "agrees"


def pick_line(source: str) -> tuple[Line, list[Line]]:
    """The line that `FILE:NUMBER` names, and all lines of its runtime and row.

    Raises:
        DeployError: There is no such line, or it has no time.
    """
    name, _, number = source.rpartition(":")
    if not name or not number.isdigit():
        raise DeployError(
            "A line of a record is needed.", got=source, hint="benchmarks/results/FILE.jsonl:12"
        )
    lines = read_lines(Path(name))
    if not 1 <= int(number) <= len(lines):
        raise DeployError("The record has no such line.", got=source, hint=f"1 to {len(lines)}")
    line = lines[int(number) - 1]
    if line.p50 is None:
        raise DeployError("Nothing was timed in this line.", got=f"{line.runtime}: {line.parity}")
    alike = [
        each for each in lines if each.row == line.row and each.runtime == line.runtime and each.samples_us
    ]
    return line, alike


def replayed(
    source: str, bundle: Bundle, bench: Callable[[Line], ModelBench], tolerance: float = 0.05
) -> Replay:
    """Measure a line again, and judge whether both agree.

    Args:
        source: The line, as `FILE:NUMBER`.
        bundle: The bundle.
        bench: Measures the runtime of a line at its sizes.
        tolerance: By how much a time may leave the range of the record, as a share.

    Raises:
        DeployError: The bundle is another one, or nothing was timed.
    """
    line, alike = pick_line(source)
    if _model(bundle)["bundle_sha256"] != line.bundle_sha256:
        raise DeployError(
            "The line was measured with another bundle.",
            got=f"{bundle.path}, not {line.bundle_sha256[:12]}",
            hint=f"export it again: {' '.join(line.command)}",
        )
    found = [
        each
        for each in bench_lines([bench(line)])
        if each.runtime == line.runtime and each.sizes == line.sizes and each.past == line.past
    ]
    if not found or found[0].p50 is None:
        raise BackendUnavailable(
            "Nothing was timed.",
            got=found[0].parity if found else line.runtime,
            hint="bench without --replay",
        )
    status, why = judge_replay(alike, found[0], tolerance)
    return Replay(recorded=line, measured=found[0], status=status, why=why)


def judge_replay(recorded: Sequence[Line], measured: Line, tolerance: float) -> tuple[str, str]:
    """Whether a new time is inside the range of the recorded processes, and why."""
    medians = Figure(lines=tuple(recorded)).medians
    low, high = min(medians) * (1 - tolerance), max(medians) * (1 + tolerance)
    p50 = measured.p50 or 0.0
    why = f"{short(p50)} µs; the record allows {short(low)} to {short(high)} µs"
    if measured.gpu != recorded[0].gpu:
        return "not comparable", f"measured on {measured.gpu or 'no GPU'}, recorded on {recorded[0].gpu}"
    if low <= p50 <= high:
        return "agrees", why
    throttled = [
        name for name, lines in (("here", [measured]), ("in the record", recorded)) if _any_throttled(lines)
    ]
    if throttled:
        return "not comparable", f"{why}; the GPU was throttled {' and '.join(throttled)}"
    return "differs", why


def _any_throttled(lines: Sequence[Line]) -> bool:
    return any(line.is_throttled for line in lines)
