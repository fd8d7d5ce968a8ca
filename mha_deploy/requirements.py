"""Requirements of a project in a file: default options of the verbs, and demands on every verdict.

The file is `mha-deploy.toml`, or `[tool.mha-deploy]` in `pyproject.toml`, in the working folder. Whoever
wrote it cannot loosen a verdict, run code or choose a file to write: options that could are refused.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from mha_deploy.errors import DeployError, nearest
from mha_deploy.files import MANIFEST, check_plain, problem_in, read_regular
from mha_deploy.keywords import alternatives
from mha_deploy.options import OF_DEPLOY, BenchOptions, EngineOptions, ExportOptions, ValidateOptions
from mha_deploy.status import Outcome, Place, means

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE, PROJECT, TABLE = "mha-deploy.toml", "pyproject.toml", "tool.mha-deploy"
_LARGEST = 1 << 20

Positive = Annotated[float, Meta(gt=0, lt=1e12)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Demands(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a verdict must hold besides; each adds to it, and none can loosen it."""

    max_budget_share: Annotated[float, Meta(gt=0, le=1)] | None = None
    """The largest share of the error budget that any output may use."""
    max_latency_p99: Positive | None = None
    """The 99th percentile of the latency of every engine, in microseconds."""
    top1_agreement: Share | None = None
    """The least share of positions of logits whose largest is the reference's, on the user's data."""
    require_fused: bool = False
    require_precision: bool = False
    require_run: bool = False
    require_coverage: bool = False

    def with_others(self, other: Demands) -> Demands:
        """Both: of each demand the stricter one."""

        def pick(name: str, choose: Any) -> Any:
            known = [x for x in (getattr(self, name), getattr(other, name)) if x is not None]
            return choose(known) if known else None

        found = {name: pick(name, min) for name in ("max_budget_share", "max_latency_p99")}
        found["top1_agreement"] = pick("top1_agreement", max)
        return Demands(**found, **{name: getattr(self, name) or getattr(other, name) for name in REQUIRED})


REQUIRED = ("require_fused", "require_precision", "require_run", "require_coverage")
"""The demands that are options of a validation, too."""


class Requirement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One requirement, and what was found."""

    name: Annotated[str, means("`max_budget_share`, `max_latency_p99` or `top1_agreement`")]
    wanted: Annotated[float, means("the limit")]
    got: Annotated[
        float | None, means("the worst figure; null if nothing was measured, or an output has no number")
    ]
    outcome: Annotated[Outcome, means("whether it holds")]
    place: Annotated[
        Place, means("the runtime or engine, case and output that is worst, or was not measured")
    ] = Place()


# -- Which options a file may set ------------------------------------------------------------------

_RECORDS: Mapping[str, tuple[type, ...]] = {
    "export": (ExportOptions,),
    "deploy": (ExportOptions, EngineOptions),
    "build-engine": (EngineOptions,),
    "validate": (ValidateOptions,),
    "bench": (BenchOptions,),
}
# These name files, replace them, run code, or leave out what would be judged.
_REFUSED = frozenset({
    "weights", "overwrite", "runtimes", "engine", "url", "graphs", "engine_files", "names", "data", "metric",
    "data_limit", "source", "resume", "requirements", "profiles", "name",
})  # fmt: skip
_WORDS: Mapping[Any, str] = {
    str: '"a text"', int: "a whole number", float: "a number", bool: "true or false",
    Sequence[str]: '["a text", …]', Sequence[int]: "[1, 2, …]",
}  # fmt: skip


def settable(verb: str) -> dict[str, Field[Any]]:
    """The options of a verb that a file may set, by name."""
    found: dict[str, Field[Any]] = {}
    for record in _RECORDS[verb]:
        for each in fields(record):
            if not each.metadata or each.name in _REFUSED or alternatives(each.type)[0] not in _WORDS:
                continue
            if verb == "validate" and each.name == "max_loss":  # it takes the place of the bundle's own limit
                continue
            # `deploy` takes some options of an engine, and fails for attention that is not fused.
            is_taken = each.name in OF_DEPLOY and each.name != "allow_decomposed"
            if record is not EngineOptions or verb != "deploy" or is_taken:
                found.setdefault(each.name, each)
    return found


def _checked(path: str, verb: str, options: Any) -> dict[str, Any]:
    """The options of one table, each known, of its type, and none that takes evidence away."""
    if not isinstance(options, Mapping):
        raise DeployError(f"[{verb}] is not a table.", got=f"{path}: {options!r}", hint=f"[{verb}]")
    known = settable(verb)
    for name, value in options.items():
        key = name.replace("-", "_")
        if key not in known:
            hint = nearest(key, known)
            raise DeployError(f"A file cannot set this option of {verb}.", got=f"{path}: {name}", hint=hint)
        kind, details = alternatives(known[key].type)[0], known[key].metadata["details"]
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise DeployError(
                f"{name} has the wrong type.", got=f"{path}: {value!r}", hint=f"{name} = {_WORDS[kind]}"
            ) from error
        least, most = details.get("min"), details.get("max")
        numbers = value if isinstance(value, list) else [value]
        if any((least is not None and x < least) or (most is not None and x > most) for x in numbers):
            raise DeployError(f"{name} is out of bounds.", got=f"{path}: {value}", hint=f"{least} to {most}")
        if verb == "validate" and value is False:
            is_off = known[key].default is False  # and has no option that says so
            way = "leave it out" if is_off else f"--no-{key.replace('_', '-')} on the command line"
            problem = f"A file cannot switch off {name}: less would be judged."
            raise DeployError(problem, got=f"{path}: {name} = false", hint=way)
    return {name.replace("-", "_"): value for name, value in options.items()}


_DEMANDED = {
    "max_budget_share": "a number above 0, up to 1.0: max_budget_share = 0.5",
    "max_latency_p99": "microseconds, above 0: max_latency_p99 = 150.0",
    "top1_agreement": "a number from 0 to 1.0: top1_agreement = 0.999",
    **{name: f"true or false: {name} = true" for name in REQUIRED},
}


def _invalid(path: str, table: Any, error: msgspec.ValidationError) -> DeployError:
    """A demand that is unknown, or one whose value is not possible."""
    if not isinstance(table, Mapping):
        return DeployError("[require] is not a table.", got=f"{path}: {table!r}", hint="[require]")
    known = Demands.__struct_fields__
    if unknown := [name for name in table if name not in known]:
        got = f"{path}: {unknown[0]}"
        return DeployError("There is no such requirement.", got=got, hint=nearest(unknown[0], known))
    problem = problem_in(error)
    name = problem.place
    what, given = f"The value of {name or 'a requirement'} is not valid.", f"{name} = {table.get(name)!r}"
    return DeployError(what, got=f"{path}: {given}", hint=_DEMANDED.get(name, "[require]"))


class Requirements:
    """What a file of requirements says."""

    def __init__(self, path: str, data: Mapping[str, Any]) -> None:
        self.path = path
        models = data.get("models", {})
        if not isinstance(models, Mapping) or not all(isinstance(each, Mapping) for each in models.values()):
            raise DeployError("[models] is not a table of tables.", got=path, hint='[models."NAME".validate]')
        self._own = self._tables({key: value for key, value in data.items() if key != "models"})
        self._models = {name: self._tables(table) for name, table in models.items()}

    def _tables(self, data: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], Demands]:
        demands, verbs = Demands(), dict[str, dict[str, Any]]()
        for name, table in data.items():
            if name == "require":
                try:
                    demands = msgspec.convert(table, Demands)
                except msgspec.ValidationError as error:
                    raise _invalid(self.path, table, error) from error
            elif name in _RECORDS:
                verbs[name] = _checked(self.path, name, table)
            else:
                hint = nearest(name, (*_RECORDS, "require", "models"))
                raise DeployError("There is no such table.", got=f"{self.path}: [{name}]", hint=hint)
        return verbs, demands

    def unmatched(self, model: str) -> str:
        """The models that have tables, where this one has none: a name may be mistyped. Else empty."""
        if not self._models or model in self._models:
            return ""
        return nearest(model, self._models)

    def options(self, verb: str, model: str = "") -> dict[str, Any]:
        """The default options of a verb, those of the model before those of all."""
        own = self._models.get(model, ({}, Demands()))[0]
        return {**self._own[0].get(verb, {}), **own.get(verb, {})}

    def place(self, verb: str, model: str, name: str) -> str:
        """Where an option of `options` is, as a reader finds it: `mha-deploy.toml: [validate] fresh`."""
        is_own = name in self._models.get(model, ({}, Demands()))[0].get(verb, {})
        table = f"models.{json.dumps(model)}.{verb}" if is_own else verb
        table = f"{TABLE}.{table}" if Path(self.path).name == PROJECT else table
        return f"{self.path}: [{table}] {name}"

    def demands(self, model: str) -> Demands:
        """What a verdict on a model must hold: what is demanded of all, and of it."""
        return self._own[1].with_others(self._models.get(model, ({}, Demands()))[1])


def read_requirements(path: Path) -> Requirements | None:
    """The requirements in a TOML file; None for a `pyproject.toml` without such a table."""
    hint = "mha-deploy init writes one"
    try:
        content = read_regular(path, _LARGEST)
        if path.name == PROJECT and b"mha-deploy" not in content:
            return None  # whether it is valid is for others to say
        data = tomllib.loads(content.decode("utf-8"))
        if path.name == PROJECT:
            tool = data.get("tool", {})
            data = tool.get("mha-deploy") if isinstance(tool, Mapping) else None
            if data is None:
                return None
        check_plain(data)
    except (OSError, UnicodeDecodeError) as error:
        problem = "The file of requirements cannot be read."
        raise DeployError(problem, got=f"{path}: {error}", hint=hint) from error
    except (ValueError, RecursionError) as error:
        problem, hint = "The file of requirements is not valid TOML.", "correct that line"
        raise DeployError(problem, got=f"{path}: {error}", hint=hint) from error
    if not isinstance(data, Mapping):
        raise DeployError("The requirements are not a table.", got=path, hint=f"[{TABLE}]")
    return Requirements(str(path), data)


def find_requirements(folder: Path) -> Requirements | None:
    """Those of a project, in this folder alone; a folder that is a bundle is somebody's output."""
    if (folder / MANIFEST).exists():
        return None
    for name in (FILE, PROJECT):
        if (folder / name).is_file() and (found := read_requirements(folder / name)) is not None:
            return found
    return None


def demands_of(given: Any, model: str) -> Demands:
    """The demands that were given: a file, a mapping as in its [require] table, or what was read."""
    if given is None:
        return Demands()
    if isinstance(given, Requirements):
        return given.demands(model)
    if isinstance(given, Mapping):
        return Requirements("requirements", {"require": dict(given)}).demands(model)
    if not isinstance(given, str | os.PathLike):
        what, hint = "These are no requirements.", 'the path of a TOML file, or {"require_run": True}'
        raise DeployError(what, got=type(given).__name__, hint=hint)
    found = read_requirements(Path(given))
    return Demands() if found is None else found.demands(model)


# -- A file to begin with --------------------------------------------------------------------------


def template() -> str:
    """A file with every table and option, commented out, and what each means."""
    lines = [
        "# Requirements of mha-deploy. The same can be in pyproject.toml, under [tool.mha-deploy].",
        "# Options on the command line come before those of this file. No option here can loosen a verdict.",
        "",
        "# Demands on every verdict of `validate` and `deploy`: exit code 1 where one does not hold.",
        "[require]",
        "# max_budget_share = 0.5     # of the error budget, for every output",
        "# max_latency_p99 = 150.0    # microseconds, for every engine that is timed",
        "# top1_agreement = 0.999     # of logits with the FP64 reference, on your --data",
        *(f"# {name} = true" for name in REQUIRED),
        "",
        "# The same for one model only:",
        '# [models."bert-base".require]',
        "# max_latency_p99 = 80.0",
        '# [models."bert-base".validate]',
        "# fresh = 4",
    ]
    for verb in _RECORDS:
        lines += ["", f"# [{verb}]"]
        for name, each in settable(verb).items():
            about = str(each.metadata["about"]).partition(". ")[0].rstrip(".")
            default = each.default
            value = msgspec.json.encode(list(default) if isinstance(default, tuple) else default).decode()
            if default is False and verb == "validate":
                value = "true"
            lines += [f"# {about}", f"# {name} = {'...' if value == 'null' else value}"]
    return "\n".join(lines) + "\n"
