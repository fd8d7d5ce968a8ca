"""The documentation site: every page has its place, and it builds without a warning."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def test_every_page_has_one_place_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    named = re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE)
    assert sorted(named) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason="the extra [docs] is not installed",
)
def test_the_site_builds_strictly(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "site/api/index.html").read_text(encoding="utf-8")
    for name in ("deploy", "validate", "open_bundle", "Deployable"):
        assert f".{name}" in reference
    compare = (tmp_path / "site/compare/index.html").read_text(encoding="utf-8")
    assert "/blob/main/examples/ci/upgrade.yml" in compare, "files outside docs/ are in the repository"


# -- The notebook ----------------------------------------------------------------------------------

TOUR = ROOT / "examples" / "tour.ipynb"


def test_the_tour_runs_from_top_to_bottom(tmp_path, monkeypatch):
    """Its cells run as a notebook runs them, one after the other in one namespace."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(TOUR.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    names = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "outputs are not committed"
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert names["report"].outcome != "failed"
    assert names["caught"].outcome == "failed"
