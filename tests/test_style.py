"""What the linters say, and what they cannot: names of classes, and where helpers of tests live."""

import ast
import importlib.util
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]


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


def test_the_types_hold(tmp_path):
    """Without reading PyTorch and matplotlib, which takes as long as everything else."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    lines = ["[mypy]", *(f"{name} = {value}" for name, value in options.items() if name != "packages")]
    config = tmp_path / "mypy.ini"
    skipped = [
        "[mypy-torch.*,pydantic.*,matplotlib.*]",
        "follow_imports = skip",
        "follow_imports_for_stubs = true",
    ]
    config.write_text("\n".join([*lines, *skipped]))
    tool("mypy", "--config-file", config, "mha_deploy")


@pytest.mark.slow
def test_the_types_hold_beside_those_of_pytorch():
    tool("mypy", "mha_deploy")


def trees(folder):
    return {
        path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / folder).rglob("*.py"))
    }


def test_no_two_classes_share_a_name():
    found = defaultdict(list)
    for path, tree in trees("mha_deploy").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(ROOT)))
    assert len(found) > 300
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_tests_import_no_tests():
    found = []
    for path, tree in trees("tests").items():
        for node in ast.walk(tree):
            modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = [name for name in modules if name.rpartition(".")[2].startswith("test_")]
            found += [f"{path.relative_to(ROOT)}: {name}" for name in names]
    assert found == []
