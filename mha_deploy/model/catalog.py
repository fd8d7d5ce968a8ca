"""Find model specs: by name in the shipped catalogue, or by path."""

from __future__ import annotations

import sys
from pathlib import Path

from mha_deploy.errors import SpecError, nearest
from mha_deploy.files import check_plain, read_regular
from mha_deploy.model.spec import AttentionSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LARGEST_SPEC = 1 << 20
_PACKAGE = Path(__file__).resolve().parents[1]


def catalog_folder() -> Path:
    """The folder of shipped specs: inside an installed wheel, or `models/` of a checkout."""
    installed = _PACKAGE / "models"
    return installed if installed.is_dir() else _PACKAGE.parent / "models"


def catalog_names() -> list[str]:
    """The names of all shipped specs."""
    return sorted(path.stem for path in catalog_folder().glob("*.toml"))


def find_spec(model: str) -> AttentionSpec:
    """Read the spec that a user named: a catalogue name, or a path that ends in `.toml`."""
    if model.endswith(".toml"):
        return read_spec(Path(model))
    names = catalog_names()
    if model not in names:
        hint = f"{nearest(model, names)} Or a path to a .toml file."
        raise SpecError("No model of that name.", got=model, hint=hint)
    return read_spec(catalog_folder() / f"{model}.toml")


def is_factory(model: str) -> bool:
    """Whether this names a factory of a user's own model, and not a spec."""
    place, separator, name = model.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    return bool(separator) and name.isidentifier() and (place.endswith(".py") or is_module)


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
        raise SpecError("A spec file is named by its file name.", got=got, hint="drop `name`")
    try:
        return AttentionSpec.from_dict({"name": path.stem, **data})
    except SpecError as error:
        raise SpecError(f"{path.name}: {error.what}", got=error.got, hint=error.hint) from error
