"""The source keeps the project's manners."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "mha_deploy").rglob("*.py"))


def tool(module, *arguments):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing():
    tool("ruff", "check", ".")


def test_the_source_is_formatted():
    tool("ruff", "format", "--check", ".")


def test_the_types_hold():
    tool("mypy", "mha_deploy")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            docstring = ast.get_docstring(node) or ""
            assert node.end_lineno - node.lineno + 1 - docstring.count("\n") <= 60, (
                f"{path.name}: {node.name}"
            )
