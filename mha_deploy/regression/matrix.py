"""Models × precisions × runtimes × GPUs × options: every combination is built and judged as its own task.

Results are files that are named by what they depend on, so that a second run does only what is missing. A
worker that is killed and a build that crashes fail their own cell. Tasks run in local processes or on Ray.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Struct, field

from mha_deploy import __version__
from mha_deploy.bundle.commit import write_atomically
from mha_deploy.bundle.folder import MANIFEST, open_bundle, sha256
from mha_deploy.errors import BackendUnavailable, DeployError, nearest
from mha_deploy.files import read_regular
from mha_deploy.model.catalog import find_spec, is_factory
from mha_deploy.options import EngineOptions
from mha_deploy.regression.record import append_lines, build_line
from mha_deploy.report.page import sections_page
from mha_deploy.report.schema import as_plain
from mha_deploy.report.sections import Section
from mha_deploy.report.table import Cell as TableCell
from mha_deploy.report.table import Group, Row, Table, columns, markdown, number, text
from mha_deploy.text import plural, short, size
from mha_deploy.validate.verdict import frame

# -- The plan --------------------------------------------------------------------------------------

NO_GPU, ANY_GPU = "none", "any"
_NAME = r"^[\w.+-]+$"


class ModelEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of the plan: what `load_model` takes, or a bundle's folder."""

    model: str
    name: str = ""
    cache: str | None = None
    axes: dict[str, str] = {}


class RuntimeEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A runtime of the plan, and where it is: at most one of `path`, `python` and `pip`.

    Args:
        name: The name of its column.
        backend: `tensorrt` or `tensorrt-rtx`.
        path: A folder that `pip install --target` wrote.
        python: The interpreter of a virtual environment in which mha-deploy is installed too.
        pip: Packages: installed below the output folder, or on Ray through `runtime_env`.
    """

    name: str
    backend: Literal["tensorrt", "tensorrt-rtx"] = "tensorrt-rtx"
    path: str | None = None
    python: str | None = None
    pip: list[str] = []


class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is combined with what; see docs/matrix.md.

    Args:
        models: The models.
        runtimes: The runtimes.
        precisions: Precisions of the export.
        gpus: `none` (compile only), `any`, or a type as Ray names it, for example `H200`.
        options: Options of `build-engine` by a name for them.
        seed: Seed of random weights and inputs.
        time_limit: Seconds after which a build or a run counts as hung.
    """

    models: list[str | ModelEntry]
    runtimes: list[RuntimeEntry]
    precisions: list[Literal["fp16", "bf16", "fp32", "auto"]] = field(default_factory=lambda: ["fp16"])
    gpus: list[str] = field(default_factory=lambda: [NO_GPU])
    options: dict[str, dict[str, Any]] = field(default_factory=lambda: {"default": {}})
    seed: int = 0
    time_limit: float = 1800.0


_OPTIONS = {each.name for each in fields(EngineOptions)} - {"backend", "name", "overwrite"}


def read_plan(source: Any) -> Plan:
    """Read a plan: the path of a TOML file, a mapping, or a `Plan`.

    Raises:
        DeployError: It cannot be read, names something unknown, or is empty.
    """
    if isinstance(source, Plan):
        return source
    hint = "docs/matrix.md shows a plan"
    try:
        if isinstance(source, Mapping):
            plan = msgspec.convert(source, Plan)
        else:
            plan = msgspec.toml.decode(read_regular(Path(source)), type=Plan)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError, ValueError) as error:
        raise DeployError("The plan cannot be read.", got=f"{source}: {error}", hint=hint) from error
    for what in ("models", "runtimes", "precisions", "gpus", "options"):
        if not getattr(plan, what):
            raise DeployError("The plan is empty.", got=f"no {what}", hint=hint)
    names = [runtime.name for runtime in plan.runtimes]
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if repeated:
        raise DeployError("Two runtimes have the same name.", got=", ".join(repeated), hint="another name")
    for runtime in plan.runtimes:
        if sum(map(bool, (runtime.path, runtime.python, runtime.pip))) > 1:
            raise DeployError(
                "A runtime is in one place.", got=runtime.name, hint="one of path, python and pip"
            )
        for place in (runtime.path, runtime.python):
            if place and not Path(place).exists():
                raise DeployError("The runtime is not there.", got=f"{runtime.name}: {place}", hint=hint)
    for name, options in plan.options.items():
        for key in options:
            if key not in _OPTIONS:
                raise DeployError("No such option.", got=f"{name}: {key}", hint=nearest(key, _OPTIONS))
    return plan


# -- The cells -------------------------------------------------------------------------------------

FINAL = ("passed", "failed", "built", "refused")
"""Statuses that are kept: what crashed or was not available is tried again."""
_MARKS = {"passed": "good", "built": "doubt", "failed": "bad", "refused": "bad", "crashed": "bad"}


@dataclass(frozen=True, kw_only=True)
class MatrixCell:
    """One combination and its result.

    Args:
        model: Name of the model.
        precision: Its precision.
        runtime: Name of the runtime.
        gpu: The GPU, or `none`.
        options: Name of the options.
        status: `passed`; `built`, not run; `failed` or `refused` by the runtime; `crashed`; `unavailable`.
        why: What the status follows from.
        version: Version of the runtime.
        key: What the result depends on, as a hash; empty where that is not known.
        seconds: How long it took.
        engine_sha256: Hash of the plan; empty where there is none.
        report: The data of its report; None where there is none.
        is_new: Whether it was done in this run.
    """

    model: str
    precision: str
    runtime: str
    gpu: str
    options: str
    status: str = "unavailable"
    why: str = ""
    version: str = ""
    key: str = ""
    seconds: float = 0.0
    engine_sha256: str = ""
    report: Mapping[str, Any] | None = None
    is_new: bool = True

    @property
    def summary(self) -> str:
        """The result in a few words: fusion where it is known, else the status."""
        engines = (self.report or {}).get("engines") or ()
        if not engines:
            return self.status
        fused, count = engines[0]["fused"]
        words = f"{fused}/{count} fused"
        return f"{words}, not run" if self.status == "built" else f"{words}, {self.status}"


OnCell = Callable[[MatrixCell, int, int], None]


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A cell that is not done yet, with what its worker needs."""

    cell: MatrixCell
    runtime: RuntimeEntry
    request: Mapping[str, Any]


class Workers(Protocol):
    """Something that runs tasks in the environments of their runtimes."""

    def probe(self, runtime: RuntimeEntry, gpu: str) -> Mapping[str, Any]:
        """The version of a runtime and the GPU, or the `problem`."""

    def run(self, tasks: Sequence[_Task]) -> Iterator[tuple[_Task, Mapping[str, Any]]]:
        """Run all tasks, and give each with its result as it ends."""


# -- Local processes -------------------------------------------------------------------------------


class LocalWorkers:
    """A process for every task, several at a time; those that use the GPU one after the other.

    Args:
        jobs: How many at a time.
        folder: Where packages are installed.
    """

    def __init__(self, jobs: int, folder: Path) -> None:
        self.jobs, self.folder = jobs, folder
        self._gpu, self._install = threading.Lock(), threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()

    def probe(self, runtime: RuntimeEntry, gpu: str) -> Mapping[str, Any]:
        """See `Workers`."""
        found = self._call(runtime, gpu, {"probe": True, "backend": runtime.backend}, 600.0)
        if "version" in found and gpu not in (NO_GPU, ANY_GPU) and gpu.lower() not in found["gpu"].lower():
            return {"problem": f"the GPU here is {found['gpu'] or 'none'}"}
        if "version" in found and gpu != NO_GPU and not found["gpu"]:
            return {"problem": "there is no NVIDIA GPU here"}
        return found if "version" in found else {"problem": found.get("problem") or found["why"]}

    def run(self, tasks: Sequence[_Task]) -> Iterator[tuple[_Task, Mapping[str, Any]]]:
        """See `Workers`."""
        pool = ThreadPoolExecutor(self.jobs)
        try:
            waiting = {pool.submit(self._one, task): task for task in tasks}
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:  # interrupted: what runs is ended, what waits is dropped
            for process in list(self._running):
                process.kill()
            pool.shutdown(cancel_futures=True)

    def _one(self, task: _Task) -> Mapping[str, Any]:
        limit = 2 * task.request["time_limit"]
        if task.cell.gpu == NO_GPU:
            return self._call(task.runtime, NO_GPU, task.request, limit)
        with self._gpu:
            return self._call(task.runtime, task.cell.gpu, task.request, limit)

    def _call(
        self, runtime: RuntimeEntry, gpu: str, request: Mapping[str, Any], limit: float
    ) -> Mapping[str, Any]:
        try:
            place = self._installed(runtime) if runtime.pip else runtime.path
        except DeployError as error:
            return _without_result("unavailable", error.in_one_line)
        environment = os.environ | _variables(place, gpu)
        process = subprocess.Popen(
            [runtime.python or sys.executable, "-m", "mha_deploy.regression.cell"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._running.add(process)
        try:
            out, err = process.communicate(json.dumps(request), timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return _without_result("crashed", f"no result after {limit:.0f} s")
        finally:
            self._running.discard(process)
        try:
            return dict(json.loads(out.splitlines()[-1]))
        except (IndexError, ValueError):
            last = next((line for line in reversed(err.splitlines()) if line.strip()), "no output")
            if process.returncode < 0:
                last = f"ended by {signal.Signals(-process.returncode).name}"
            status = "unavailable" if "No module named" in last else "crashed"
            return _without_result(status, f"the worker gave no result: {last}")

    def _installed(self, runtime: RuntimeEntry) -> str:
        """Install packages once, in a folder that is named by them."""
        digest = hashlib.sha256("\n".join(runtime.pip).encode()).hexdigest()[:16]
        target = self.folder / "environments" / digest
        with self._install:
            if (target / ".complete").is_file():
                return str(target)
            command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(target), *runtime.pip]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
                raise BackendUnavailable("The packages cannot be installed.", got="; ".join(lines[-2:]))
            (target / ".complete").touch()
        return str(target)


def _variables(place: str | None, gpu: str) -> dict[str, str]:
    """The environment variables of a worker: the runtime first on the path, and no GPU for `none`."""
    before = [place] if place else []
    found = {"PYTHONPATH": os.pathsep.join([*before, *filter(None, [os.environ.get("PYTHONPATH", "")])])}
    return {**found, "CUDA_VISIBLE_DEVICES": ""} if gpu == NO_GPU else found


def _without_result(status: str, why: str) -> dict[str, Any]:
    return {"status": status, "why": why, "seconds": 0.0, "report": None}


# -- Ray -------------------------------------------------------------------------------------------


class RayWorkers:
    """Tasks on Ray, each runtime in an environment of its own; a task whose worker dies is tried once more.

    Args:
        address: The cluster; None for one on this machine.
        jobs: How many tasks at a time on this machine; None for one a core.
    """

    def __init__(self, address: str | None = None, jobs: int | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise BackendUnavailable(
                "Ray is not installed.",
                got=error,
                hint='pip install "mha-deploy[matrix]", or --jobs N for local processes',
            ) from error
        self.ray, self._own, self._archives = ray, not ray.is_initialized(), dict[str, Any]()
        if self._own:
            settings: dict[str, Any] = {"num_cpus": jobs} if address is None else {"address": address}
            try:
                ray.init(log_to_driver=False, logging_level="error", **settings)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise BackendUnavailable(
                    "The Ray cluster cannot be reached.", got=f"{address}: {error}", hint="ray status"
                ) from error

    def __enter__(self) -> RayWorkers:
        return self

    def __exit__(self, *error: object) -> None:
        if self._own:
            self.ray.shutdown()

    def probe(self, runtime: RuntimeEntry, gpu: str) -> Mapping[str, Any]:
        """See `Workers`."""
        if gpu != NO_GPU:
            wanted = "GPU" if gpu == ANY_GPU else f"accelerator_type:{gpu}"
            if not self.ray.cluster_resources().get(wanted):
                return {"problem": f"the cluster has no {wanted}"}
        from mha_deploy.regression.cell import probe

        task = self.ray.remote(probe).options(**self._settings(runtime, gpu))
        try:
            return dict(self.ray.get(task.remote({"backend": runtime.backend})))
        except (self.ray.exceptions.RayError, RuntimeError) as error:
            return {"problem": _last_line(error)}

    def run(self, tasks: Sequence[_Task]) -> Iterator[tuple[_Task, Mapping[str, Any]]]:
        """See `Workers`."""
        from mha_deploy.regression.cell import packed, run_cell

        waiting = {}
        for task in tasks:
            bundle = task.request["bundle"]
            if bundle not in self._archives:  # workers of a cluster have no file of ours
                self._archives[bundle] = self.ray.put(packed(Path(bundle)))
            remote = self.ray.remote(run_cell).options(**self._settings(task.runtime, task.cell.gpu))
            waiting[remote.remote(dict(task.request), self._archives[bundle])] = task
        try:
            while waiting:
                done, _ = self.ray.wait(list(waiting), num_returns=1)
                for reference in done:
                    task = waiting.pop(reference)
                    try:
                        yield task, as_plain(self.ray.get(reference))
                    except (self.ray.exceptions.RayError, RuntimeError) as error:
                        yield task, _without_result("crashed", _last_line(error))
        finally:
            for reference in waiting:
                self.ray.cancel(reference, force=True)

    def _settings(self, runtime: RuntimeEntry, gpu: str) -> dict[str, Any]:
        environment: dict[str, Any] = {"env_vars": _variables(runtime.path, gpu)}
        if runtime.python:
            environment["py_executable"] = runtime.python
        if runtime.pip:
            environment["pip"] = list(runtime.pip)
        named = {} if gpu in (NO_GPU, ANY_GPU) else {"accelerator_type": gpu}
        return {
            "num_cpus": 1,
            "num_gpus": 0 if gpu == NO_GPU else 1,
            "max_retries": 1,
            "runtime_env": environment,
            **named,
        }


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


# -- A run -----------------------------------------------------------------------------------------

Export = Callable[[ModelEntry, str, Path], None]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The result of a plan.

    Args:
        plan: The plan.
        cells: One for every combination, in the order of the plan.
    """

    plan: Plan
    cells: tuple[MatrixCell, ...]

    @property
    def passed(self) -> bool:
        """Whether there are cells, and every one was built, and is right where it was run."""
        return bool(self.cells) and all(cell.status in ("passed", "built") for cell in self.cells)

    @property
    def headline(self) -> str:
        """The result in one line."""
        counts = {name: sum(cell.status == name for cell in self.cells) for name in (*_MARKS, "unavailable")}
        words = {"built": "built but not run"}
        found = [f"{count} {words.get(name, name)}" for name, count in counts.items() if count]
        done = sum(cell.is_new for cell in self.cells)
        return f"{plural(len(self.cells), 'cell')}: {', '.join(found)}; {done} done in this run"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; see docs/matrix.md."""
        data = {
            **frame(),
            "passed": self.passed,
            "headline": self.headline,
            "plan": msgspec.to_builtins(self.plan),
            "cells": [dict(vars(cell)) for cell in self.cells],
        }
        return dict(as_plain(data))

    def tables(self) -> list[Table]:
        """A heat map of the results; then errors, latencies, sizes and build times, where there are any."""
        found = [self._table("Fusion and verdict of every cell", _verdict_cell)]
        for title, read, shown in (
            ("Largest share of the error budget", _share, lambda value: f"{value:.0%}"),
            ("p50 of the first point that was timed, µs", _p50, short),
            ("Engine size", _engine_bytes, lambda value: size(int(value))),
            ("Build time, s", _build_seconds, short),
        ):
            if any(read(cell) is not None for cell in self.cells):
                found.append(self._table(title, _figure(read, shown)))
        return found

    def _table(self, title: str, shown: Callable[[MatrixCell], TableCell]) -> Table:
        runtimes = list(dict.fromkeys(cell.runtime for cell in self.cells))
        versions = {cell.runtime: cell.version for cell in self.cells if cell.version}
        rows: dict[tuple[str, ...], dict[str, MatrixCell]] = {}
        for cell in self.cells:
            rows.setdefault((cell.model, cell.precision, cell.gpu, cell.options), {})[cell.runtime] = cell
        several = [len({key[place] for key in rows}) > 1 for place in (2, 3)]
        heads = ["model", "precision", *(["GPU"] if several[0] else []), *(["options"] if several[1] else [])]
        table_rows: list[Row] = []
        for key, by_runtime in rows.items():
            places = [*key[:2], *(part for part, many in zip(key[2:], several, strict=True) if many)]
            found = [shown(by_runtime[name]) for name in runtimes]
            table_rows.append([*map(text, places), *found])
        titles = [f"{name} ({versions[name]})" if name in versions else name for name in runtimes]
        return Table(
            title=title, columns=columns(*heads, *titles), groups=[Group(rows=table_rows)], css="matrix"
        )

    def to_markdown(self) -> str:
        """The heat map of the results as Markdown."""
        return markdown(self.tables()[0])

    def to_html(self) -> str:
        """A page with a heat map."""
        sections = [
            Section(name=f"table-{index}", title=table.title, link=table.title, parts=[("table", table)])
            for index, table in enumerate(self.tables())
        ]
        reasons = [
            (f"{cell.model} {cell.precision}, {cell.runtime}", f" {cell.status}: {cell.why}")
            for cell in self.cells
            if cell.status not in ("passed", "built")
        ]
        if reasons:
            sections.append(
                Section(name="reasons", title="Reasons", link="reasons", parts=[("reasons", reasons)])
            )
        return sections_page(self.to_dict(), "Matrix", self.headline, sections, passed=self.passed)

    def save(self, folder: Path) -> Path:
        """Write `matrix.json` and `matrix.html`; gives the path of the page."""
        page, data = self.to_html(), json.dumps(self.to_dict(), indent=1, ensure_ascii=False)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "matrix.json", data.encode() + b"\n")
        write_atomically(folder / "matrix.html", page.encode())
        return folder / "matrix.html"

    def record(self, path: Path) -> None:
        """Add every engine that was built in this run, and not run, to a benchmark record."""
        built = [cell for cell in self.cells if cell.status == "built" and cell.is_new]
        append_lines(path, [build_line(vars(cell)) for cell in built])


def _verdict_cell(cell: MatrixCell) -> TableCell:
    note = cell.why if cell.status not in ("passed", "built") else ""
    return TableCell(text=cell.summary, status=_MARKS.get(cell.status, "none"), note=note)


def _figure(
    read: Callable[[MatrixCell], float | None], shown: Callable[[Any], str]
) -> Callable[[MatrixCell], TableCell]:
    def cell_of(cell: MatrixCell) -> TableCell:
        value = read(cell)
        return text(None) if value is None else number(value, shown(value))

    return cell_of


def _engine(cell: MatrixCell) -> Mapping[str, Any]:
    return next(iter((cell.report or {}).get("engines") or ()), {})


def _engine_bytes(cell: MatrixCell) -> float | None:
    return _engine(cell).get("engine_bytes")


def _build_seconds(cell: MatrixCell) -> float | None:
    return _engine(cell).get("seconds")


def _share(cell: MatrixCell) -> float | None:
    runs = (cell.report or {}).get("parity") or ()
    return max((each["share"] or 0.0 for run in runs for each in run["verdicts"]), default=None)


def _p50(cell: MatrixCell) -> float | None:
    points = ((cell.report or {}).get("latency") or {}).get("points") or ()
    name = _engine(cell).get("name")
    timed = [
        row["timing"] for point in points for row in point["rows"] if row["name"] == name and row["timing"]
    ]
    return timed[0]["p50_us"] if timed else None


def run_matrix(
    plan: Plan, folder: Path, workers: Workers, export: Export, on_cell: OnCell | None = None
) -> Matrix:
    """Do what is missing of a plan.

    Args:
        plan: The plan.
        folder: Where bundles and results are kept.
        workers: What runs the tasks.
        export: Writes the bundle of a model in a precision to a folder.
        on_cell: Called with every cell as it is done, how many are done, and how many there are.
    """
    probes = {
        (runtime.name, gpu): workers.probe(runtime, gpu) for runtime in plan.runtimes for gpu in plan.gpus
    }
    cells: dict[tuple[str, ...], MatrixCell] = {}
    tasks: list[_Task] = []
    for entry, precision in product(plan.models, plan.precisions):
        model = entry if isinstance(entry, ModelEntry) else ModelEntry(model=entry)
        bundle, problem = None, ""
        try:
            name, bundle = _bundle(model, precision, plan, folder, export)
        except _OtherPrecision:
            continue  # a bundle has one precision
        except DeployError as error:
            name, problem = model.name or Path(model.model).name, error.in_one_line
        for runtime, gpu, options in product(plan.runtimes, plan.gpus, plan.options):
            found = probes[runtime.name, gpu]
            cell = MatrixCell(
                model=name,
                precision=precision,
                runtime=runtime.name,
                gpu=gpu,
                options=options,
                version=found.get("version", ""),
                why=problem or found.get("problem", ""),
            )
            if _place(cell) in cells:  # another model of the same name
                cell = replace(cell, model=f"{name} ({model.model})")
            if bundle is None or "problem" in found:
                cells[_place(cell)] = cell
                continue
            chosen = plan.options[options]
            cell = replace(cell, key=_key(bundle, runtime, found, gpu, chosen))
            known = _kept(folder, cell)
            cells[_place(cell)] = known or cell
            if known is None:
                request = {
                    "bundle": str(bundle.resolve()),
                    "backend": runtime.backend,
                    "options": chosen,
                    "time_limit": plan.time_limit,
                }
                tasks.append(_Task(cell=cell, runtime=runtime, request=request))
    waiting, finished = {_place(task.cell) for task in tasks}, 0

    def finish(cell: MatrixCell) -> None:
        nonlocal finished
        cells[_place(cell)], finished = cell, finished + 1
        if on_cell is not None:
            on_cell(cell, finished, len(cells))

    for cell in [cell for place, cell in cells.items() if place not in waiting]:
        finish(cell)
    for task, result in workers.run(tasks):
        cell = replace(task.cell, **result)
        if cell.status in FINAL:
            path = _result_path(folder, cell.key)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(as_plain(dict(vars(cell)))).encode())
        finish(cell)
    return Matrix(plan=plan, cells=tuple(cells.values()))


class _OtherPrecision(DeployError):
    """A bundle has another precision than the cell."""


def _place(cell: MatrixCell) -> tuple[str, ...]:
    return cell.model, cell.precision, cell.runtime, cell.gpu, cell.options


def _key(
    bundle: Path, runtime: RuntimeEntry, found: Mapping[str, Any], gpu: str, options: Mapping[str, Any]
) -> str:
    """The hash of everything that a result depends on."""
    device = NO_GPU if gpu == NO_GPU else found["gpu"]
    parts = [sha256(bundle / MANIFEST), runtime.backend, found["version"], device, options, __version__]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _result_path(folder: Path, key: str) -> Path:
    return folder / "cells" / f"{key}.json"


def _kept(folder: Path, cell: MatrixCell) -> MatrixCell | None:
    """The result of an earlier run; None where there is none that can be read."""
    try:
        data = json.loads(_result_path(folder, cell.key).read_bytes())
        kept = {name: data[name] for name in ("status", "why", "seconds", "engine_sha256", "report")}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return replace(cell, **kept, is_new=False) if kept["status"] in FINAL else None


def _bundle(entry: ModelEntry, precision: str, plan: Plan, folder: Path, export: Export) -> tuple[str, Path]:
    """The bundle of a model, exported where it is not there yet; a folder is a bundle already."""
    source = Path(entry.model)
    if (source / MANIFEST).is_file():
        found = open_bundle(source).manifest
        if found.precision.name != precision:
            raise _OtherPrecision("The bundle is in another precision.", got=found.precision.name)
        return entry.name or found.spec.name, source
    factory = is_factory(entry.model)
    content = Path(entry.model.rpartition(":")[0]) if factory else source
    name = entry.model.rpartition(":")[2] if factory else source.stem if source.is_file() else entry.model
    name = entry.name or name
    made_of = [msgspec.to_builtins(entry), precision, plan.seed, __version__]
    if content.is_file():
        made_of.append(sha256(content))
    elif not factory:
        made_of.append(find_spec(entry.model).to_dict())
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]
    bundle = folder / "bundles" / f"{name}-{precision}-{digest}"
    if not (bundle / MANIFEST).is_file():
        bundle.parent.mkdir(parents=True, exist_ok=True)
        export(entry, precision, bundle)
    return name, bundle
