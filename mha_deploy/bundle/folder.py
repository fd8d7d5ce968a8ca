"""The bundle: a folder with everything a later step needs, readable without PyTorch.

    manifest.json             what this is, the hash of every file, and the versions that made it
    model.onnx (+ .data)      the canonical graph
    source.onnx (+ .data)     of a compressed model: the file that its reference is computed from
    golden/<case>.safetensors one case: inputs, FP64 oracle, eager result, samples of what rounding costs,
                              and what known mistakes would change
    golden/polygraphy/*.json  the same for `polygraphy run`, with --polygraphy
    traces/<name>.safetensors of a model with a KV cache: tokens to decode, and the expected results
    layers/<case>.safetensors of a module or a file: the results of every attention in one case
    engines.json              the engines that were ever built from it, at first none

A bundle is built in a temporary folder beside its place and renamed when it is whole; the manifest is
the last file written. See docs/bundle.md.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import msgspec

from mha_deploy.bundle.manifest import FileEntry, Manifest
from mha_deploy.errors import BundleError, DeployError, write_remedy
from mha_deploy.files import MANIFEST as MANIFEST
from mha_deploy.files import check_name, check_plain, hint_for_missing, open_regular, read_json
from mha_deploy.model.catalog import catalog_names
from mha_deploy.output import commit_folder, put_file, refuse_occupied, temporary_folder

MODEL = "model.onnx"
SOURCE = "source.onnx"
LEDGER = "engines.json"
"""The engines that were ever built from a bundle; one that was deleted is known to be missing."""
NO_ENGINES = b'{\n  "tool": {\n    "name": "mha-deploy"\n  },\n  "built": {}\n}\n'


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle on disk whose manifest has been read; `removed` went with a bundle that it just replaced."""

    path: Path
    manifest: Manifest
    removed: tuple[str, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        return f"<Bundle {self.path}: {self.manifest.spec.name} {self.manifest.precision.name}>"

    @property
    def model_path(self) -> Path:
        """The canonical graph."""
        return self.path / MODEL

    def file(self, name: str) -> Path:
        """The path of a file of the bundle; names that leave the folder are refused."""
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts or name not in self.manifest.files:
            raise BundleError(
                "The manifest names a file that is not part of the bundle.", got=name, hint="export it again"
            )
        return self.path / relative

    def state(self) -> list[tuple[int, ...] | None]:
        """What changes if a file is replaced: inode, size and time of each; None where it is gone."""

        def stamp(path: Path) -> tuple[int, ...] | None:
            with suppress(OSError):
                found = path.stat()
                return found.st_ino, found.st_size, found.st_mtime_ns
            return None

        return [stamp(path) for path in (self.path / MANIFEST, *map(self.file, self.manifest.files))]

    def verify(self) -> None:
        """Compare every file with the size and hash in the manifest; a link is no file of the bundle."""
        root = self.path.resolve()
        for path in self.path.glob(f"{MODEL}*"):  # weights beside the graph are read with it
            if path.name not in self.manifest.files:
                problem = "A file of the graph is not in the manifest."
                raise BundleError(problem, got=path, hint="export again")
        for name, wanted in self.manifest.files.items():
            path = self.file(name)
            if not path.is_file() or path.resolve() != root / PurePosixPath(name):
                raise BundleError("A file of the bundle is missing.", got=path, hint="export again")
            if path.stat().st_size != wanted.bytes or sha256(path) != wanted.sha256:
                problem = "A file of the bundle was changed after export."
                raise BundleError(problem, got=path, hint="export again")
        self.verify_ledger()

    def verify_ledger(self) -> None:
        """Refuse a bundle whose list of engines is gone: what was built from it is not known any more."""
        if self.manifest.lists_engines and not os.path.lexists(self.path / LEDGER):
            problem = "The list of engines that were built from the bundle is missing."
            hint = "copy the whole bundle again, or export it again"
            raise BundleError(problem, got=self.path / LEDGER, hint=hint)


def open_bundle(path: Path, *, verify: bool = True) -> Bundle:
    """Read a bundle, and by default check the hash of every file."""
    manifest_path = path / MANIFEST
    try:
        data = read_json(manifest_path)
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = f"mha-deploy export MODEL -o {path}"
        if (path.parent / MANIFEST).is_file():
            hint = f"the folder of the bundle: {path.parent}"
        elif str(path) in catalog_names() or path.suffix == ".onnx" or ":" in path.name:
            hint = f"the folder of a bundle; {path} is a model: mha-deploy deploy {path} makes one of it"
        elif path.exists():
            hint = "a folder made by mha-deploy export MODEL -o FOLDER"
        else:
            hint = hint_for_missing(path, hint, lambda each: (each / MANIFEST).is_file())
        raise BundleError("There is no bundle here.", got=path, hint=hint) from error
    except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
        raise BundleError(
            "The manifest cannot be read.",
            got=f"{manifest_path}: {error}",
            hint="export it again, or copy the whole bundle again",
        ) from error
    try:
        check_plain(data)
        manifest = Manifest.from_dict(data)
        if MODEL not in manifest.files:  # a graph without a hash would go unchecked
            raise msgspec.ValidationError(f"Object missing required field `{MODEL}` - at `$.files`")
    except (msgspec.ValidationError, AttributeError, KeyError, TypeError, ValueError) as error:
        got = f"{manifest_path}: {error}"
        raise BundleError("The manifest is not valid.", got=got, hint="export again") from error
    bundle = Bundle(path=path, manifest=manifest)
    if verify:
        bundle.verify()
    return bundle


class BundleWriter:
    """Build a bundle in a temporary folder; `finish` puts it in place, anything else removes it."""

    def __init__(self, target: Path, *, overwrite: bool = False) -> None:
        self.target, self.overwrite = target, overwrite
        check_name(str(target))
        self.place = Path(os.path.realpath(target))  # a link stays, and what it leads to is replaced
        self._owned = ExitStack()
        refuse_occupied(self.place, overwrite=overwrite)

    def __enter__(self) -> BundleWriter:
        parent = self.place.parent
        try:
            self.path = self._owned.enter_context(temporary_folder(self.place))
        except OSError as error:
            problem, got = "The output folder cannot be written.", f"{parent}: {error}"
            raise BundleError(problem, got=got, hint=f"{write_remedy(error)}: another -o") from error
        return self

    def finish(self, manifest: Manifest, check: Callable[[Bundle], None] | None = None) -> Bundle:
        """Hash every file, write the manifest, and rename the folder to its place.

        Before that it is opened as every reader does, and given to `check`: what cannot be read is no bundle.
        """
        files = {
            path.relative_to(self.path).as_posix(): FileEntry(bytes=path.stat().st_size, sha256=sha256(path))
            for path in sorted(self.path.rglob("*"))
            if path.is_file()
        }
        data = msgspec.structs.replace(manifest, files=files).to_dict()
        put_file(self.path / LEDGER, NO_ENGINES)
        put_file(self.path / MANIFEST, (json.dumps(data, indent=2) + "\n").encode())
        try:
            opened = open_bundle(self.path)
            if check is not None:
                check(opened)
        except DeployError as error:
            problem = "The bundle could not be opened again, so it was not written."
            hint = "change the model, its texts or its inputs at this place"
            raise BundleError(problem, got=error.in_one_line, hint=hint) from error
        removed = commit_folder(self.path, self.place, overwrite=self.overwrite)
        return Bundle(path=self.target, manifest=opened.manifest, removed=removed)

    def __exit__(self, *error: object) -> None:
        self._owned.close()


def sha256(path: Path) -> str:
    """The hash of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
