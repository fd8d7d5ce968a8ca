"""Find model specs: by name in the shipped catalog, or by path."""

from __future__ import annotations

import ast
import re
import sys
from difflib import get_close_matches
from pathlib import Path

from mha_deploy.errors import ExportError, SpecError, nearest
from mha_deploy.files import MANIFEST, check_plain, read_json, read_regular
from mha_deploy.model.layer import AttentionSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LARGEST_SPEC = 1 << 20
_MAKES_MODEL = re.compile("Deployable|from_transformers")
_LARGEST_SOURCE = 1 << 20  # of a Python file that is searched for factories
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SMALL = "tiny"  # layers for tests
_PACKAGE = Path(__file__).resolve().parents[1]


def catalog_folder() -> Path:
    """The folder of shipped specs: inside an installed wheel, or `models/` of a checkout."""
    installed = _PACKAGE / "models"
    return installed if installed.is_dir() else _PACKAGE.parent / "models"


def catalog_names() -> list[str]:
    """The names of all shipped specs."""
    return sorted(path.stem for path in catalog_folder().glob("*.toml"))


def find_spec(model: str) -> AttentionSpec:
    """Read the spec that a user named: a catalog name, or a path that ends in `.toml`."""
    if model.endswith(".toml"):
        return read_spec(Path(model))
    names = catalog_names()
    if model not in names:
        refuse_what_is_no_model(model)
        shown = [name for name in names if model.startswith(_SMALL) or not name.startswith(_SMALL)]
        hint = nearest(model, shown, "Or file.py:factory, or a .toml or .onnx file.")
        raise SpecError("No model of that name.", got=model, hint=hint)
    return read_spec(catalog_folder() / f"{model}.toml")


def refuse_what_is_no_model(model: str) -> None:
    """Refuse what is a file, a folder or a name of something else, with what was probably meant."""
    path = Path(model)
    if path.suffix == ".py" and path.is_file():
        known = [f"{model}:{name}" for name, _ in factories_in(path)]
        hint = f"a function without arguments that returns a Deployable, as {model}:encoder"
        problem = "A Python file needs the name of a factory in it."
        raise SpecError(problem, got=model, hint=" or ".join(known) or hint)
    if (path / "config.json").is_file():
        hint = (
            f"--hf {model} --layer 0 for one layer; for the whole model a factory that returns "
            "md.from_transformers(model), or for images or audio a Deployable of the model in a wrapper"
        )
        raise SpecError("This is the folder of a checkpoint.", got=model, hint=hint)
    if (path / MANIFEST).is_file():
        hint = f"{_source_of_bundle(path)}; a bundle is for mha-deploy validate {model}, or build-engine"
        raise SpecError("This is a bundle: it is exported already.", got=model, hint=hint)
    if path.is_file():
        hint = "a name from `mha-deploy models`, a .toml or an .onnx file, or file.py:factory"
        if (path.parent / "config.json").is_file():  # a file of a checkpoint
            hint = f"--hf {path.parent} --layer 0 for one layer; for the whole model file.py:factory"
        elif path.suffix in (".safetensors", ".pt", ".pth", ".bin"):
            hint = "file.py:factory for the module, and this file as --weights"
        raise SpecError("This file is not a model by itself.", got=model, hint=hint)
    if _HUB_NAME.fullmatch(model) and not path.parent.is_dir():
        raise SpecError("This is not a model on this machine.", got=model, hint=how_to_download(model))
    if re.fullmatch(r"\.[a-zA-Z]+", path.suffix):
        close = get_close_matches(path.name, [each.name for each in path.parent.glob("*.*")], n=1)
        other = "another path, or a name from `mha-deploy models`"
        hint = f"did you mean {path.parent / close[0]}?" if close else other
        raise SpecError("There is no such file.", got=model, hint=hint)


def _source_of_bundle(folder: Path) -> str:
    """The model that a bundle was exported from, as a user would name it; of a bundle that may be damaged."""
    try:
        manifest = read_json(folder / MANIFEST)
        spec, computed = manifest["spec"], manifest["golden"][0]["source"]
        name, factory = str(spec["name"]), str(spec.get("factory") or "")
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return "the model that it was exported from"
    file = f"{name}.onnx" if computed == "file" else ""
    return f"the model that it was exported from, {factory or file or name}"


def how_to_download(name: str) -> str:
    """How a checkpoint of the Hugging Face hub comes onto this machine: nothing is downloaded here."""
    folder = name.rpartition("/")[2]
    return f"hf download {name} --local-dir {folder}, then --hf {folder} --layer 0"


def functions_in(path: Path) -> list[str]:
    """The functions of a Python file by their names; nothing of it is run."""
    return [each.name for each in _parsed(path) if isinstance(each, ast.FunctionDef)]


def _parsed(path: Path) -> list[ast.stmt]:
    """The statements of a Python file; none where it cannot be read as one."""
    try:
        return ast.parse(read_regular(path, _LARGEST_SOURCE)).body if path.suffix == ".py" else []
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def factories_in(path: Path) -> list[tuple[str, str]]:
    """The functions of a Python file that may be factories, with their first sentence; nothing is run.

    A factory takes no arguments and returns something. Where some mention a `Deployable`, in their annotation
    or in a call, or what makes one, only these are.
    """
    possible = [each for each in _parsed(path) if isinstance(each, ast.FunctionDef) and _needs_nothing(each)]
    certain = [each for each in possible if _MAKES_MODEL.search(ast.dump(each))]
    named = certain or [each for each in possible if not each.name.startswith("_")]
    return [(each.name, ast.get_docstring(each) or "") for each in named]


def _needs_nothing(function: ast.FunctionDef) -> bool:
    """Whether a function needs no argument, and returns something."""
    taken = function.args
    without = len(taken.posonlyargs) + len(taken.args) == len(taken.defaults)
    returns = any(isinstance(each, ast.Return) and each.value is not None for each in ast.walk(function))
    return returns and without and None not in taken.kw_defaults


def is_factory(model: str) -> bool:
    """Whether this names a factory of a user's own model, and not a spec."""
    place, separator, name = model.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    return bool(separator) and name.isidentifier() and (place.endswith(".py") or is_module)


_DEFINE_UNSEEN = ("import *", "globals", "locals", "vars", "exec", "setattr", "__getattr__", "sys.modules")
"""With one of these, a file may define names that its text does not have."""


def refuse_absent_factory(model: str) -> None:
    """Refuse a factory whose file is not there or does not name it, before anything heavy is imported."""
    place, _, name = model.rpartition(":")
    path = Path(place)
    if not place.endswith(".py"):
        return
    if not path.is_file():
        raise ExportError("There is no such file.", got=place, hint="path/to/file.py:factory")
    try:
        text = read_regular(path, _LARGEST_SOURCE).decode("utf-8", "replace")
    except OSError:
        return  # the import says why
    if name not in text and not any(word in text for word in _DEFINE_UNSEEN):
        known = functions_in(path)
        hint = nearest(name, known) if known else "a function that returns a Deployable"
        raise ExportError("The file has no such factory.", got=model, hint=hint)


def read_spec(path: Path) -> AttentionSpec:
    """Read one TOML file; the name of the model is the name of the file."""
    try:
        data = tomllib.loads(read_regular(path, _LARGEST_SPEC).decode("utf-8"))
        check_plain(data)
    except FileNotFoundError as error:
        raise SpecError(
            "There is no such spec file.",
            got=path,
            hint="the path of a .toml file, or a name from `mha-deploy models`",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            "The spec file cannot be read.", got=f"{path}: {error}", hint="a text file in UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise SpecError(
            "The spec file is not valid TOML.",
            got=f"{path}: {error}",
            hint="correct that line",
        ) from error
    if "name" in data:
        got = f"{path}: name = ..."
        raise SpecError("A spec is named after its file.", got=got, hint="remove `name`")
    try:
        return AttentionSpec.from_dict({"name": path.stem, **data})
    except SpecError as error:
        raise SpecError(f"{path.name}: {error.what}", got=error.got, hint=error.hint) from error
