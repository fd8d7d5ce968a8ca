"""Models × precisions × runtimes × GPUs × options: every combination is built and judged as its own task.

Results are files that are named by what they depend on, so that a second run does only what is missing. A
worker that is killed and a build that crashes fail their own cell. Tasks run in local processes or on Ray.
As a program (`python -m`), this file is such a process: it reads a request as JSON and prints the result.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta, Struct, field

from mha_deploy import __version__
from mha_deploy.bundle.folder import LEDGER, MANIFEST, NO_ENGINES, Bundle, open_bundle, sha256
from mha_deploy.engine.build import Trial, engine_from_bundle, run_trials
from mha_deploy.engine.engine import Engine, first_gpu, parse_ranges, reasons_not_to_run
from mha_deploy.errors import BackendUnavailable, DeployError, nearest
from mha_deploy.files import (
    PathPart,
    as_plain,
    check_plain,
    hint_for_missing,
    problem_in,
    read_json,
    read_regular,
)
from mha_deploy.judge import largest_number
from mha_deploy.keywords import typed_value
from mha_deploy.model.catalog import find_spec, is_factory
from mha_deploy.model.source import is_onnx_file
from mha_deploy.options import EngineOptions, OnName, ValidateOptions, in_python, read_options, silent
from mha_deploy.output import (
    check_file,
    copy_file,
    is_result,
    make_folder,
    put_file,
    rename_to_free,
    scratch_folder,
    temporary_folder,
    write_file,
)
from mha_deploy.process import python_command, run, start, variables
from mha_deploy.regression.record import append_lines, build_line
from mha_deploy.report import SavableResult
from mha_deploy.report.charts import heat_key, ratio_heat, share_heat
from mha_deploy.report.page import sections_page
from mha_deploy.report.table import MARKS, Cell, RawRow, Table, markdown, number, table
from mha_deploy.runtime.child import RuntimeCrash, isolation
from mha_deploy.runtime.runner import error_line
from mha_deploy.runtime.tensorrt.versions import load
from mha_deploy.status import CellStatus, Outcome, Severity
from mha_deploy.text import group_by, plural, short, size
from mha_deploy.validation.records import (
    check_report,
    engine_records,
    model_record,
    report_header,
)
from mha_deploy.validation.run import validate_bundle

# -- The plan --------------------------------------------------------------------------------------

NO_GPU, ANY_GPU = "none", "any"
_DEFAULT = "default"  # the options of a plan that has none
_Backend = Literal["tensorrt", "tensorrt-rtx"]
_Precision = Literal["fp16", "bf16", "fp32", "auto"]


class ModelEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of the plan: what `load_model` takes, or a bundle's folder."""

    model: str
    name: str = ""
    cache: str | None = None
    axes: dict[str, str] = {}


class RuntimeEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A runtime of the plan, and where it is, if not here: see docs/matrix.md."""

    name: str
    backend: _Backend = "tensorrt-rtx"
    path: str | None = None  # a folder that `pip install --target` wrote
    python: str | None = None  # of an environment in which mha-deploy is installed too
    pip: list[str] = []  # packages: installed below the output folder, or on Ray through `runtime_env`


class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is combined with what; see docs/matrix.md."""

    models: list[str | ModelEntry]
    runtimes: list[RuntimeEntry]
    precisions: list[_Precision] = field(default_factory=lambda: ["fp16"])
    gpus: list[str] = field(default_factory=lambda: [NO_GPU])  # or `any`, or a type as Ray names it: `H200`
    options: dict[str, dict[str, Any]] = field(default_factory=lambda: {_DEFAULT: {}})  # of `build-engine`
    seed: int = 0
    time_limit: float = 1800.0  # seconds after which a build or a run counts as hung


_OPTIONS = {each.name for each in fields(EngineOptions)} - {"backend", "name", "overwrite"}


def read_plan(source: Any) -> Plan:
    """Read a plan: the path of a TOML file, a mapping, or a `Plan`."""
    if isinstance(source, Plan):
        return source
    hint, is_data = "docs/matrix.md shows a plan", isinstance(source, Mapping)
    try:
        data = source if is_data else msgspec.toml.decode(read_regular(Path(source)))
        check_plain(data)
        plan = msgspec.convert(data, Plan)
    except (OSError, msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        problem = problem_in(error)
        if isinstance(error, FileNotFoundError):
            hint = hint_for_missing(Path(source), hint)
        if problem.unknown is not None:
            entry = {"models": ModelEntry, "runtimes": RuntimeEntry}.get(problem.table, Plan)
            hint = f"{nearest(problem.unknown, entry.__struct_fields__)}; {hint}"
        if problem.strange is not None:
            allowed = get_args(_Backend if problem.table == "runtimes" else _Precision)
            hint = f"{nearest(problem.strange, allowed)}; {hint}"
        raise DeployError("The plan cannot be read.", got=f"{source}: {error}", hint=hint) from error
    for what in ("models", "runtimes", "precisions", "gpus", "options"):
        if not getattr(plan, what):
            raise DeployError("The plan is empty.", got=f"no {what}", hint=hint)
    for model in plan.models:
        if isinstance(model, ModelEntry) and model.name:
            PathPart(model.name, "a model")
    names = set[str]()
    for runtime in plan.runtimes:
        name = runtime.name
        if name in names:
            raise DeployError("Two runtimes have the same name.", got=name, hint="a different name for each")
        if sum(map(bool, (runtime.path, runtime.python, runtime.pip))) > 1:
            raise DeployError(
                "A runtime is installed in one place only.", got=name, hint="one of path, python and pip"
            )
        names.add(name)
    for name, key in ((name, key) for name, options in plan.options.items() for key in options):
        if key not in _OPTIONS:
            raise DeployError("No such option.", got=f"{name}: {key}", hint=nearest(key, _OPTIONS))
    for options in plan.options.values():
        typed_value("profiles", Sequence[str], options.get("profiles", ()))
        read_options(EngineOptions, {key: value for key, value in options.items() if key != "profiles"})
    return plan


# -- The cells -------------------------------------------------------------------------------------


# What crashed or was not available is tried again.
_FINAL = frozenset(CellStatus) - {CellStatus.CRASHED, CellStatus.UNAVAILABLE}


@dataclass(frozen=True, kw_only=True)
class MatrixCell:
    """One combination of model, precision, runtime, GPU (or `none`) and options, and its result."""

    model: str
    precision: str
    runtime: str
    gpu: str
    options: str
    status: CellStatus = CellStatus.UNAVAILABLE
    why: str = ""
    version: str = ""
    key: str = ""  # what the result depends on, as a hash
    seconds: float = 0.0
    engine_sha256: str = ""
    report: Mapping[str, Any] | None = None
    is_new: bool = True  # done in this run

    @property
    def place(self) -> tuple[str, ...]:
        """Its combination."""
        return self.model, self.precision, self.runtime, self.gpu, self.options

    @property
    def title(self) -> str:
        """Its combination in words, without the GPU and the options that a plan has by default."""
        more = [name for name in (self.gpu, self.options) if name not in (NO_GPU, _DEFAULT)]
        return ", ".join([f"{self.model} {self.precision}", self.runtime, *more])

    @property
    def outcome(self) -> Outcome:
        """Passed where its engine was run and is right, not verified where it was built and not run."""
        return self.status.outcome

    @property
    def passed(self) -> bool:
        """Whether its engine was run and is right."""
        return self.outcome is Outcome.PASSED

    @property
    def engine(self) -> Mapping[str, Any]:
        """The data of its engine; empty where there is none."""
        return next(iter((self.report or {}).get("engines") or ()), {})

    @property
    def summary(self) -> str:
        """The result in a few words: fusion where it is known, else the status."""
        if not self.engine:
            return self.status
        fused, count = self.engine["fused"]
        return f"{fused}/{count} fused, {self.status}"


OnCell = Callable[[MatrixCell, int, int], None]


class _Task(NamedTuple):
    """A cell that is not done yet, with what its worker needs."""

    cell: MatrixCell
    runtime: RuntimeEntry
    request: Mapping[str, Any]


# -- One cell, in the environment of its runtime ---------------------------------------------------


def probe(request: Mapping[str, Any]) -> dict[str, str]:
    """The version of the runtime here, and the GPU."""
    try:
        gpu = first_gpu()
        return {"version": load(request["backend"]).version, "gpu": gpu["name"] if gpu else ""}
    except DeployError as error:
        return {"problem": _why(error)}


def run_cell(request: Mapping[str, Any], files: Mapping[str, bytes] | None = None) -> dict[str, Any]:
    """Build an engine from a bundle, and validate it where it can run; gives fields of a `MatrixCell`.

    The request has the `backend`, the `options` of the build, the `time_limit`, and the path of the `bundle`;
    `files` is that bundle, where workers do not share a file system. Without a GPU the report has only the
    model, its engine and its environment.
    """
    started, report = time.monotonic(), None
    trial = Trial(name=request["backend"], options=EngineOptions())
    isolation.limit_s = request["time_limit"]
    try:
        with scratch_folder() as folder:
            target = folder / "bundle"
            if files is None:
                source = open_bundle(Path(request["bundle"]))
                for name in (MANIFEST, *source.manifest.files):
                    copy_file(source.path / name, target / name)
            else:
                for name, content in files.items():
                    put_file(target / name, content)
            put_file(target / LEDGER, NO_ENGINES)
            bundle, chosen = open_bundle(target), dict(request["options"])
            ranges = [parse_ranges(text, bundle.manifest.spec) for text in chosen.pop("profiles", ())]
            trial.options = EngineOptions(backend=request["backend"], profiles=ranges, **chosen)
            judge = partial(_judge_cell, bundle)
            run_trials([trial], partial(_build_cell, bundle), judge, raises=DeployError)
            status, why, report = trial.judged
    except DeployError as error:
        status, why = _status_of(error, CellStatus.REFUSED), _why(error)
    seconds = round(time.monotonic() - started, 3)
    plan = "" if trial.engine is None else trial.engine.manifest.engine_sha256
    return {"status": status, "why": why, "seconds": seconds, "engine_sha256": plan, "report": report}


def _status_of(error: DeployError, usual: CellStatus) -> CellStatus:
    """What becomes of a cell by an error."""
    kinds = {RuntimeCrash: CellStatus.CRASHED, BackendUnavailable: CellStatus.UNAVAILABLE}
    return next((status for kind, status in kinds.items() if isinstance(error, kind)), usual)


def _why(error: DeployError) -> str:
    """An error in the line of a cell."""
    got = "" if error.got is None else f"got: {' '.join(error.got.split())}; "
    return f"{_in_plan(error.what)} {got}try: {_in_plan(error.hint)}"


_AXIS_KEY = re.compile(r'"(\w+)": ')


def _in_plan(text: str) -> str:
    """A text with the keys of a plan: `precisions = ["auto"]` for `--precision auto`."""
    text = re.sub(r'\bprecision="(\w+)"', r'precisions = ["\1"]', in_python(text))
    text = re.sub(r"\b(\w+)=(True|False)\b", lambda found: f"{found[1]} = {found[2].lower()}", text)
    return re.sub(r"\baxes=(\{[^{}]*\})", lambda found: "axes = " + _AXIS_KEY.sub(r"\1 = ", found[1]), text)


def _build_cell(bundle: Bundle, trial: Trial) -> Engine:
    return engine_from_bundle(bundle, trial.options)


def _judge_cell(bundle: Bundle, trials: Sequence[Trial]) -> None:
    """The status of an engine, why, and the report on it."""
    for trial in trials:
        engine = trial.built
        if why := "; ".join(reasons_not_to_run(engine)):
            engines = engine_records([engine], (), {engine.path.stem: why})
            report = as_plain({**report_header(), "model": model_record(bundle), "engines": engines})
            trial.judged = CellStatus.NOT_VERIFIED, why, report
        else:  # the graph is the same in every cell: only the engine is judged, and timed
            found = validate_bundle(bundle, ValidateOptions(runtimes=(engine.path.stem,), sweep=False))
            trial.judged = CellStatus(found.outcome.value), found.headline, as_plain(found.record)


def _bundle_files(path: Path) -> dict[str, bytes]:
    """The content of every file of a bundle, without engines and reports."""
    bundle = open_bundle(path)
    files = {name: read_regular(bundle.file(name), 1 << 40) for name in bundle.manifest.files}
    return {MANIFEST: read_regular(path / MANIFEST), **files}


def _variables(place: str | None, gpu: str) -> dict[str, str]:
    """The environment variables of a task on Ray: the runtime first on the path, and no GPU for `none`."""
    paths, safe = filter(None, [place, variables().get("PYTHONPATH")]), {"PYTHONSAFEPATH": "1"}
    found = {"PYTHONPATH": os.pathsep.join(paths), **safe}
    return {**found, "CUDA_VISIBLE_DEVICES": ""} if gpu == NO_GPU else found


# -- Local processes -------------------------------------------------------------------------------


class LocalWorkers:
    """A process for every task, `jobs` at a time; those that use the GPU one after the other."""

    def __init__(self, jobs: int, folder: Path) -> None:
        self.jobs, self.folder = jobs, folder
        self._gpu, self._install = threading.Lock(), threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()

    def probe(self, runtime: RuntimeEntry, gpu: str) -> Mapping[str, Any]:
        """The version of a runtime and the GPU, or the `problem`."""
        found = self._call(runtime, gpu, {"probe": True, "backend": runtime.backend}, 600.0)
        if "version" not in found:
            return {"problem": found.get("problem") or found["why"]}
        if gpu != NO_GPU and not found["gpu"]:
            return {"problem": "there is no NVIDIA GPU here"}
        if gpu not in (NO_GPU, ANY_GPU) and gpu.lower() not in found["gpu"].lower():
            return {"problem": f"the GPU here is {found['gpu']}"}
        return found

    def run(self, tasks: Sequence[_Task]) -> Iterator[tuple[_Task, Mapping[str, Any]]]:
        """Run all tasks, and give each with its result as it ends."""
        pool = ThreadPoolExecutor(self.jobs)
        try:
            waiting = {pool.submit(self._run, task): task for task in tasks}
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:  # interrupted: what runs is ended, what waits is dropped
            for process in list(self._running):
                process.kill()
            pool.shutdown(cancel_futures=True)

    def _run(self, task: _Task) -> Mapping[str, Any]:
        with nullcontext() if task.cell.gpu == NO_GPU else self._gpu:
            return self._call(task.runtime, task.cell.gpu, task.request, 2 * task.request["time_limit"])

    def _call(
        self, runtime: RuntimeEntry, gpu: str, request: Mapping[str, Any], limit: float
    ) -> Mapping[str, Any]:
        """The result of a process; where there is none, the status and why, as fields of a `MatrixCell`."""
        try:
            place = self._install_packages(runtime) if runtime.pip else runtime.path
        except DeployError as error:
            return {"status": CellStatus.UNAVAILABLE, "why": _why(error)}
        path, pipe = [os.path.abspath(place)] if place else [], subprocess.PIPE
        command = python_command(module=__name__, executable=runtime.python, path=path)
        more = {"CUDA_VISIBLE_DEVICES": ""} if gpu == NO_GPU else {}
        streams: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True}
        try:
            process = start(command, more=more, errors="replace", **streams)
        except OSError as error:
            return {"status": CellStatus.UNAVAILABLE, "why": f"its Python cannot be started: {error}"}
        self._running.add(process)
        try:
            out, err = process.communicate(json.dumps(request), timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return {"status": CellStatus.CRASHED, "why": f"no result after {limit:.0f} s"}
        finally:
            self._running.discard(process)
        try:
            return msgspec.json.decode(out.splitlines()[-1], type=dict[str, Any])
        except (IndexError, ValueError, msgspec.DecodeError):
            last = next((line for line in reversed(err.splitlines()) if line.strip()), "no output")
            if process.returncode < 0:
                last = f"ended by {signal.Signals(-process.returncode).name}"
            return {"status": CellStatus.CRASHED, "why": f"the worker returned no result: {last}"}

    def _install_packages(self, runtime: RuntimeEntry) -> str:
        """Install packages once, in a folder that is named by them."""
        target = self.folder / "environments" / _digest(runtime.pip)[:16]
        make_folder(target.parent, within=self.folder)
        with self._install:
            if target.is_dir() and not target.is_symlink():
                return str(target)
            with temporary_folder(target) as new:
                arguments = ("install", "-q", "--target", new, *runtime.pip)
                done = run(python_command(*arguments, module="pip"), capture_output=True, text=True)
                if done.returncode:
                    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
                    problem, hint = "The packages cannot be installed.", "other packages, or `path`"
                    raise BackendUnavailable(problem, got="; ".join(lines[-2:]), hint=hint)
                rename_to_free(new, target)  # another run may have been first
        return str(target)


# -- Ray -------------------------------------------------------------------------------------------


class RayWorkers:
    """Tasks on Ray, each runtime in an environment of its own; a task whose worker dies is run once more."""

    ray: Any  # the module

    def __init__(self, address: str | None = None, jobs: int | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            hint = 'pip install "mha-deploy[matrix]", or --jobs N for local processes'
            raise BackendUnavailable("Ray is not installed.", got=error, hint=hint) from error
        self.ray, self._own = ray, not ray.is_initialized()  # a Ray that was running before goes on
        if self._own:
            settings: dict[str, Any] = {"num_cpus": jobs} if address is None else {"address": address}
            try:
                # Ray puts the folder in which it is started first on the path of its workers.
                with scratch_folder() as empty, _inside(empty):
                    self.ray.init(log_to_driver=False, logging_level="error", **settings)
            except (ConnectionError, RuntimeError, ValueError) as error:
                problem, got = "The Ray cluster cannot be reached.", f"{address}: {error}"
                raise BackendUnavailable(problem, got=got, hint="ray status") from error

    def close(self) -> None:
        """Stop what was started."""
        if self._own:
            self.ray.shutdown()

    def probe(self, runtime: RuntimeEntry, gpu: str) -> Mapping[str, Any]:
        """The version of a runtime and the GPU, or the `problem`."""
        if gpu != NO_GPU:
            wanted = "GPU" if gpu == ANY_GPU else f"accelerator_type:{gpu}"
            if not self.ray.cluster_resources().get(wanted):
                return {"problem": f"the cluster has no {wanted}"}
        task = self.ray.remote(probe).options(**self._settings(runtime, gpu))
        try:
            return dict(self.ray.get(task.remote({"backend": runtime.backend})))
        except (self.ray.exceptions.RayError, RuntimeError) as error:
            return {"problem": _first_line(error)}

    def run(self, tasks: Sequence[_Task]) -> Iterator[tuple[_Task, Mapping[str, Any]]]:
        """Run all tasks, and give each with its result as it ends."""
        waiting, archives = {}, dict[str, Any]()
        for task in tasks:
            bundle = task.request["bundle"]
            if bundle not in archives:  # workers of a cluster have no file of ours
                archives[bundle] = self.ray.put(_bundle_files(Path(bundle)))
            remote = self.ray.remote(run_cell).options(**self._settings(task.runtime, task.cell.gpu))
            waiting[remote.remote(dict(task.request), archives[bundle])] = task
        try:
            while waiting:
                done, _ = self.ray.wait(list(waiting), num_returns=1)
                for reference in done:
                    task = waiting.pop(reference)
                    try:
                        yield task, as_plain(self.ray.get(reference))
                    except (self.ray.exceptions.RayError, RuntimeError) as error:
                        yield task, {"status": CellStatus.CRASHED, "why": _first_line(error)}
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
        count = 0 if gpu == NO_GPU else 1
        return {"num_cpus": 1, "num_gpus": count, "max_retries": 1, "runtime_env": environment, **named}


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _first_line(error: BaseException) -> str:
    cause = getattr(error, "cause", None)  # what a Ray task raised is inside Ray's own error
    return error_line(cause if isinstance(cause, BaseException) else error)


# -- A run -----------------------------------------------------------------------------------------

Export = Callable[[ModelEntry, str, Path], None]  # writes the bundle of a model in a precision to a folder
Workers = LocalWorkers | RayWorkers


@dataclass(frozen=True, kw_only=True)
class Matrix(SavableResult):
    """The result of a plan: a cell for every combination, in its order."""

    plan: Plan
    cells: tuple[MatrixCell, ...]

    @property
    def outcome(self) -> Outcome:
        """That of all cells; not verified where an engine was built and not run."""
        return Outcome.of(cell.outcome for cell in self.cells)

    @property
    def passed(self) -> bool:
        """Whether there are cells, and the engine of every one was run and is right."""
        return self.outcome is Outcome.PASSED

    @property
    def headline(self) -> str:
        """The result in one line."""
        counts = {name: sum(cell.status is name for cell in self.cells) for name in CellStatus}
        found = [f"{count} {name}" for name, count in counts.items() if count]
        done = sum(cell.is_new for cell in self.cells)
        return f"{plural(len(self.cells), 'cell')}: {', '.join(found)}; {done} done in this run"

    def __repr__(self) -> str:
        return f"<Matrix {self.outcome}: {self.headline}>"

    def _stored(self) -> dict[str, Any]:
        """See docs/matrix.md."""
        verdict = {"outcome": self.outcome, "headline": self.headline}
        cells = [vars(cell) for cell in self.cells]
        return {**report_header(), **verdict, "plan": self.plan, "cells": cells}

    def tables(self) -> list[Table]:
        """A heat map of the results; then errors, latencies, sizes and build times, where there are any."""
        verdicts = []
        for cell in self.cells:
            is_unavailable = cell.status is CellStatus.UNAVAILABLE
            status = "none" if is_unavailable else MARKS[cell.outcome]
            share, p50 = _share(cell), _p50(cell)
            known = [f"{share:.0%} of the budget"] if share is not None else []
            known += [f"{short(p50)} µs"] if p50 is not None else []
            words, heat = ", ".join(known), f"hot-{status}"
            shown = Cell(text=cell.summary, status=status, heat=heat, note=words, hint=cell.why)
            verdicts.append(shown)
        found = [self._table("Fusion and verdict of every cell", verdicts)]
        for title, read, as_text in _FIGURES:
            figures = [number(read(cell), as_text) for cell in self.cells]
            if any(figure.order is not None for figure in figures):
                found.append(self._table(title, self._heated(figures, as_share=read is _share)))
        return found

    def _heated(self, figures: Sequence[Cell], *, as_share: bool) -> list[Cell]:
        """Figures with colors: a share of the budget by itself, others by the least of their row."""
        rows = [(cell.model, cell.precision, cell.gpu, cell.options) for cell in self.cells]
        least: dict[tuple[str, ...], float] = {}
        for row, figure in zip(rows, figures, strict=True):
            if figure.order is not None:
                least[row] = min(figure.order, least.get(row, figure.order))
        found = []
        for row, each in zip(rows, figures, strict=True):
            if each.order is None:
                found.append(each)
            else:
                heat = share_heat(each.order) if as_share else ratio_heat(each.order, least[row])
                found.append(replace(each, heat=heat))
        return found

    def reasons(self) -> list[tuple[str, str]]:
        """The cells that were not built or are not right, and why.

        Those that differ in GPU or options only are one, which names these unless it is all of them.
        """
        bad, found = [cell for cell in self.cells if cell.outcome is Outcome.FAILED], list[tuple[str, str]]()
        for alike in group_by(bad, lambda each: (*each.place[:3], each.status, each.why)):
            first, beside = alike[0], [each for each in self.cells if each.place[:3] == alike[0].place[:3]]
            places = [f"{first.model} {first.precision}", first.runtime]
            for at in (3, 4):
                names = list(dict.fromkeys(each.place[at] for each in alike))
                places += names if len(names) < len({each.place[at] for each in beside}) else []
            found.append((", ".join(places), f"{first.status}: {first.why}"))
        return found

    def _table(self, title: str, shown: Sequence[Cell]) -> Table:
        versions = {cell.runtime: cell.version for cell in self.cells if cell.version}
        rows: dict[tuple[str, ...], dict[str, Cell]] = {}
        for cell, each in zip(self.cells, shown, strict=True):
            rows.setdefault((cell.model, cell.precision, cell.gpu, cell.options), {})[cell.runtime] = each
        heads = {0: "model", 1: "precision", 2: "GPU", 3: "options"}
        for place in (2, 3):  # shown only where there are several
            if len({key[place] for key in rows}) == 1:
                del heads[place]
        runtimes = list(dict.fromkeys(cell.runtime for cell in self.cells))
        titles = [f"{name} ({versions[name]})" if name in versions else name for name in runtimes]
        lines: list[RawRow] = [
            [*(key[place] for place in heads), *(by_runtime[name] for name in runtimes)]
            for key, by_runtime in rows.items()
        ]
        words = "the result of this runtime"
        return table(title, (*heads.values(), *titles), lines, css="matrix", others=words)

    def to_markdown(self) -> str:
        """The heat map of the results as Markdown."""
        return markdown(self.tables()[0])

    def to_html(self) -> str:
        """A page with a heat map."""
        verdicts, *figures = self.tables()
        sections: dict[str, list[Any]] = {verdicts.title: [("table", verdicts)]}
        if reasons := self.reasons():
            sections["Reasons"] = [("reasons", [(name, f" {why}") for name, why in reasons])]
        for each in figures:
            key = heat_key(as_share=each.title == _FIGURES[0][0])
            sections[each.title] = [("markup", key), ("table", each)]
        return sections_page(self.to_dict(), "Matrix", sections)

    def save(self, folder: Path, *, overwrite: bool = False) -> Path:
        """Write `matrix.json` and `matrix.html`; gives the path of the page."""
        return self._save(folder, "matrix", overwrite=overwrite)

    def record(self, path: Path) -> None:
        """Add every engine that was built in this run, and not run, to a benchmark record."""
        built = [cell for cell in self.cells if cell.is_new and cell.engine and not cell.engine["ran"]]
        append_lines(path, [build_line(vars(cell)) for cell in built])


def _share(cell: MatrixCell) -> float | None:
    """The largest share of a budget; None where an output has none, since it is not finite or did not run."""
    runs = (cell.report or {}).get("parity") or ()
    return largest_number(each["share"] for run in runs for each in run["verdicts"])


def _p50(cell: MatrixCell) -> float | None:
    points = ((cell.report or {}).get("latency") or {}).get("points") or ()
    rows = [row for point in points for row in point["rows"] if row["name"] == cell.engine.get("name")]
    return next((row["timing"]["p50_us"] for row in rows if row["timing"]), None)


_FIGURES: Sequence[tuple[str, Callable[[MatrixCell], float | None], Callable[[Any], str]]] = (
    ("Largest share of the error budget", _share, "{:.0%}".format),
    ("p50 of the first point that was timed, µs", _p50, short),
    ("Engine size", lambda cell: cell.engine.get("engine_bytes"), size),
    ("Build time, s", lambda cell: cell.engine.get("seconds"), short),
)


def run_matrix(
    plan: Plan,
    folder: Path,
    workers: Workers,
    export: Export,
    on_cell: OnCell | None = None,
    on_step: OnName = silent,
) -> Matrix:
    """Do what is missing of a plan; bundles and results are kept in `folder`, `on_cell` gets every cell."""
    on_cell = on_cell or (lambda *_: None)
    on_step("runtimes of the plan")
    probes = {(each.name, gpu): _probed(each, gpu, workers) for each in plan.runtimes for gpu in plan.gpus}
    cells: dict[tuple[str, ...], MatrixCell] = {}
    tasks: list[_Task] = []
    for entry, precision in product(plan.models, plan.precisions):
        model = entry if isinstance(entry, ModelEntry) else ModelEntry(model=entry)
        name, bundle, problem = model.name or Path(model.model).name, None, ""
        status = CellStatus.UNAVAILABLE
        on_step(f"bundle of {name}, {precision}")
        try:
            made = _bundle(model, precision, plan, folder)
            if made is None:
                continue
            name, place = made
            status = CellStatus.FAILED
            if not (place / MANIFEST).is_file():
                export(model, precision, place)
            bundle = open_bundle(place)  # of an earlier run: it may have been changed since
            status = CellStatus.UNAVAILABLE
        except DeployError as error:
            status, problem = _status_of(error, status), _why(error)
        for runtime, gpu, options in product(plan.runtimes, plan.gpus, plan.options):
            found = probes[runtime.name, gpu]
            cell = MatrixCell(
                model=name, precision=precision, runtime=runtime.name, gpu=gpu, options=options,
                version=found.get("version", ""), status=status, why=problem or found.get("problem", ""),
            )  # fmt: skip
            for turn in range(1, len(cells) + 2):  # other models of the same name
                if cell.place not in cells:
                    break
                again = f"{model.model}, {turn}" if turn > 1 else model.model
                cell = replace(cell, model=f"{name} ({again})")
            if bundle is None or "problem" in found:
                cells[cell.place] = cell
                continue
            chosen, device = plan.options[options], NO_GPU if gpu == NO_GPU else found["gpu"]
            manifest = sha256(bundle.path / MANIFEST)
            depends_on = [manifest, runtime.backend, found["version"], device, chosen, __version__]
            cell = replace(cell, key=_digest(depends_on)[:32])
            check_file(folder / "cells" / f"{cell.key}.json", is_result, within=folder)
            known = _read_earlier(folder, cell, (manifest, bundle.manifest.precision.name))
            cells[cell.place] = known or cell
            if known is None:
                request = {"backend": runtime.backend, "options": chosen, "time_limit": plan.time_limit}
                tasks.append(_Task(cell, runtime, {**request, "bundle": str(bundle.path.resolve())}))
    waiting = {task.cell.place for task in tasks}
    done = [cell for place, cell in cells.items() if place not in waiting]
    for count, cell in enumerate(done, 1):
        on_cell(cell, count, len(cells))
    if tasks:
        on_step(f"{plural(len(tasks), 'engine')} to build and judge")
    for count, (task, result) in enumerate(workers.run(tasks), len(done) + 1):
        cells[task.cell.place] = cell = _with_result(task.cell, result)
        if cell.status in _FINAL:
            data = {**_CELL_HEAD, **as_plain(vars(cell))}
            text = json.dumps({**data, "sha256": _digest(data)}).encode()
            write_file(folder / "cells" / f"{cell.key}.json", text, is_result, within=folder)
        on_cell(cell, count, len(cells))
    return Matrix(plan=plan, cells=tuple(cells.values()))


def _probed(runtime: RuntimeEntry, gpu: str, workers: Workers) -> Mapping[str, Any]:
    """The version of a runtime and the GPU, or the `problem`."""
    place = runtime.path or runtime.python
    if place and not Path(place).exists():  # a worker would take the runtime of its own environment
        hint = hint_for_missing(Path(place), "the place of an environment that has this runtime")
        error = DeployError("The runtime does not exist.", got=f"{runtime.name}: {place}", hint=hint)
        return {"problem": _why(error)}
    return workers.probe(runtime, gpu)


_OF_WORKER = ("status", "why", "seconds", "engine_sha256", "report")  # fields of a cell


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


_CELL_HEAD = {"tool": {"name": "mha-deploy", "version": __version__}}  # first: it marks a truncated file


class KeptCell(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cell on disk; `sha256` is of everything else in it."""

    tool: dict[str, str]
    sha256: str
    key: str
    model: str
    precision: str
    runtime: str
    gpu: str
    options: str
    version: str
    status: CellStatus
    why: str
    seconds: Annotated[float, Meta(ge=0)]
    engine_sha256: str
    report: dict[str, Any] | None
    is_new: bool


def _read_earlier(folder: Path, cell: MatrixCell, bundle: tuple[str, str]) -> MatrixCell | None:
    """The result of an earlier run; None where there is none that can be read, and that its report shows.

    `bundle` is the hash of its manifest, and its precision: `auto` is one of the others by then.
    """
    try:
        data = read_json(folder / "cells" / f"{cell.key}.json")
        kept = msgspec.convert(data, KeptCell)
        digest = _digest({name: value for name, value in data.items() if name != "sha256"})
        if (kept.sha256, kept.key) != (digest, cell.key) or kept.status is not _status(kept, bundle):
            return None
    except (OSError, ValueError, msgspec.DecodeError, KeyError, IndexError, TypeError, RecursionError):
        return None
    return replace(cell, **{name: getattr(kept, name) for name in _OF_WORKER}, is_new=False)


def _status(kept: KeptCell, bundle: tuple[str, str]) -> CellStatus | None:
    """The status that the report of a cell shows; None where it is not a report on this cell."""
    report = kept.report
    if report is None:
        return CellStatus.REFUSED
    engine = msgspec.convert(report["engines"], list[dict[str, Any]])[0]
    model = msgspec.convert(report["model"], dict[str, Any])
    stated = (model["bundle_sha256"], model["precision"], engine["version"])
    if stated != (*bundle, kept.version):
        return None
    if "verdict" not in report:
        return CellStatus.NOT_VERIFIED
    if check_report(report):
        return None
    verdict, judged = report["verdict"], [*report["parity"], *report["decode"]]
    levels = [Outcome.FAILED for each in verdict["findings"] if each["level"] == Severity.FAILURE]
    shown = Outcome.of([*(Outcome(each["outcome"]) for each in judged), *levels])
    outcome = Outcome(verdict["outcome"])
    # What is stated may be worse than what is shown, as where no engine was run, and never better.
    return CellStatus(outcome.value) if Outcome.of([outcome, shown]) is outcome else None


def _with_result(cell: MatrixCell, result: Mapping[str, Any]) -> MatrixCell:
    """A cell with the fields that its worker gave, which may be another version of this tool."""
    found = {name: result[name] for name in _OF_WORKER if name in result}
    try:
        return replace(cell, **{**found, "status": CellStatus(result["status"])})
    except (KeyError, ValueError):
        why = f"the worker returned a result of another version: {', '.join(map(str, result))[:200]}"
        return replace(cell, status=CellStatus.CRASHED, why=why)


def _bundle(entry: ModelEntry, precision: str, plan: Plan, folder: Path) -> tuple[str, Path] | None:
    """The name of a model, and the folder of its bundle or for it; None for one of another precision."""
    source = Path(entry.model)
    if (source / MANIFEST).is_file():
        found = open_bundle(source).manifest
        return (entry.name or found.spec.name, source) if found.precision.name == precision else None
    factory = is_factory(entry.model)
    content = Path(entry.model.rpartition(":")[0]) if factory else source
    name = entry.model.rpartition(":")[2] if factory else source.stem if source.is_file() else entry.model
    name = entry.name or name
    written = re.sub(r"[^\w.+-]+", "-", name).strip("-._") or "model"
    made_of = [msgspec.to_builtins(entry), precision, plan.seed, __version__]
    if content.is_file():
        made_of.append(sha256(content))
    elif not (factory or is_onnx_file(entry.model)):  # of an absent file, the export says so
        made_of.append(find_spec(entry.model).to_dict())
    bundle = folder / "bundles" / PathPart(f"{written[:150]}-{precision}-{_digest(made_of)[:12]}", "a model")
    make_folder(bundle.parent, within=folder)
    return name, bundle


def main() -> None:
    """Serve one request."""
    request = json.load(sys.stdin)
    print(json.dumps(as_plain(probe(request) if request.get("probe") else run_cell(request))))


if __name__ == "__main__":
    main()
