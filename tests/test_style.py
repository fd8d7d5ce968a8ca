"""What the linters say, and what they cannot: names of classes, and where helpers of tests live."""

import ast
import importlib
import importlib.util
import re
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


@pytest.mark.slow
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


def lines_of(folder, pattern):
    """What a pattern finds in the lines of a folder, by file; to parse them all takes seconds."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for found in re.findall(pattern, path.read_text(encoding="utf-8"), re.MULTILINE):
            yield str(path.relative_to(ROOT)), found


def test_no_two_classes_share_a_name():
    """A private one has no name that another has, either."""
    found = defaultdict(list)
    for path, name in lines_of("mha_deploy", r"^ *class _*(\w+)[(:]"):
        found[name].append(path)
    assert len(found) > 300
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_tests_import_no_tests():
    assert list(lines_of("tests", r"^ *(?:from|import) +((?:\w+\.)*test_\w+)")) == []


def test_the_scripts_of_benchmarks_and_examples_import_what_is_there():
    wanted = [
        (path, module, name)
        for folder in ("benchmarks", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (module := node.module or "").startswith("mha_deploy")
        for name in (each.name for each in node.names)
    ]
    assert len(wanted) > 50
    missing = []
    for path, module, name in wanted:
        found = importlib.import_module(module)
        inside = hasattr(found, "__path__") and importlib.util.find_spec(f"{module}.{name}")
        if not (hasattr(found, name) or inside):
            missing.append((path.name, module, name))
    assert missing == []
