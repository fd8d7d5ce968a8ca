"""What the linters say."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_the_types_hold():
    tool("mypy", "mha_deploy")
