"""Results for people: tables, charts, the page, and the files of a result."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from mha_deploy.errors import DeployError
from mha_deploy.files import as_plain
from mha_deploy.output import check_file, is_page, is_result, write_file, write_files


class SavableResult(ABC):
    """A result that is plain data and a page; a notebook shows the page."""

    @abstractmethod
    def _stored(self) -> Any:
        """What is stored of it: records, or their data."""

    @cached_property
    def _data(self) -> dict[str, Any]:
        return dict(as_plain(self._stored()))  # with the time and the machine: the same every time

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, which is what its file holds; the documentation lists every field."""
        return self._data

    @abstractmethod
    def to_html(self) -> str:
        """The result as a self-contained HTML page."""

    def to_json(self) -> str:
        """The data as JSON text."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)

    def save_html(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the page to a file, and give its path; a page of this tool is replaced.

        Args:
            path: The file.
            overwrite: Replace any other file, too, unless the result was read from it.
        """
        inputs = self.inputs()
        return write_file(Path(path), self.to_html().encode(), is_page, overwrite=overwrite, inputs=inputs)

    def inputs(self) -> tuple[str, ...]:
        """The files and folders that the result was read from: none of them is ever replaced."""
        return ()

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that its style does not leak into a notebook."""
        style = "width: 100%; height: 40em; border: 0"
        return f'<iframe srcdoc="{escape(self.to_html())}" style="{style}"></iframe>'

    def _save(self, folder: Path, name: str, *, overwrite: bool = False) -> Path:
        """Write the data and the page under this name; gives the path of the page."""
        data, page = self.to_json() + "\n", self.to_html()  # both are made before a file is replaced
        path = folder / f"{name}.html"
        files = {path.with_suffix(".json"): (data.encode(), is_result), path: (page.encode(), is_page)}
        write_files(files, overwrite=overwrite, within=folder)
        return path


def check_results(folder: Path, name: str, *, overwrite: bool = False) -> None:
    """Refuse, before long work, a folder that its result cannot be written to."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise DeployError("The report cannot be written there.", got=folder, hint="-o elsewhere")
    for ending, is_ours in ((".json", is_result), (".html", is_page)):
        check_file(folder / f"{name}{ending}", is_ours, overwrite=overwrite, within=folder)
