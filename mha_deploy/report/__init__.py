"""Results for people: the schema of `report.json`, tables, charts, the page, and the files of a result."""

from __future__ import annotations

import json
import os
from html import escape
from pathlib import Path
from typing import Any

from mha_deploy.bundle.commit import write_atomically


class SavableResult:
    """A result that is plain data and a page; a notebook shows the page."""

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        raise NotImplementedError

    def to_html(self) -> str:
        """The result as a self-contained HTML page."""
        raise NotImplementedError

    def to_json(self) -> str:
        """The data as JSON text."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file, and give its path."""
        write_atomically(Path(path), self.to_html().encode())
        return Path(path)

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that its style does not leak into a notebook."""
        style = "width: 100%; height: 40em; border: 0"
        return f'<iframe srcdoc="{escape(self.to_html())}" style="{style}"></iframe>'

    def _save(self, folder: Path, name: str) -> Path:
        """Write the data and the page under this name; gives the path of the page."""
        data, page = self.to_json() + "\n", self.to_html()  # both are made before a file is replaced
        for path, content in ((folder / f"{name}.json", data), (folder / f"{name}.html", page)):
            write_atomically(path, content.encode())
        return path
