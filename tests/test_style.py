"""What the linters say."""

import importlib.util
import subprocess
import sys
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
