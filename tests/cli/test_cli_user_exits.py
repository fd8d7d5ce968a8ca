"""A model whose code calls sys.exit() is bad input, never a success; what it prints is plain text."""

import pytest

MODEL = """
import argparse, os, sys
import torch
from torch import nn
from mha_deploy import Deployable, Example

WHERE = os.environ.get("EXIT_WHERE", "{where}")


def leave(where):
    if where == WHERE:
        sys.exit(0)


class Attention(nn.Module):
    def forward(self, x):
        leave("forward")
        if not torch.compiler.is_exporting():
            leave("eager forward")
            if x.shape[1] == 37:
                leave("golden case")
        return nn.functional.scaled_dot_product_attention(x, x, x)

    def _apply(self, *arguments, **options):
        leave("cast")
        return super()._apply(*arguments, **options)


def draw(shape, generator):
    leave("draw")
    if WHERE == "library":
        argparse.ArgumentParser().parse_args(["--help"])  # prints, and ends the program with 0
    return torch.randn(shape, generator=generator)


def build():
    leave("factory")
    x = Example(torch.randn(2, 8, 2, 16), "B", "S", draw=draw)
    return Deployable(module=Attention(), inputs={{"x": x}}, axes={{"B": "1:2:4", "S": "1:8:64"}})


leave("import")
"""
PLACES = ("import", "factory", "cast", "draw", "library", "forward", "eager forward", "golden case")


def written(tmp_path, where="nowhere"):
    path = tmp_path / "model.py"
    path.write_text(MODEL.format(where=where))
    return path


@pytest.mark.sweep(2)
@pytest.mark.parametrize("where", PLACES)
def test_a_model_that_exits_is_refused_with_the_line(run_cli, tmp_path, where):
    path, out = written(tmp_path, where), tmp_path / "out" / "bundle"
    done = run_cli("export", f"{path}:build", "-o", out)
    assert done.code == 2, done.err
    assert f"{path}:" in done.err
    assert "Traceback" not in done.err
    assert not out.exists()
    assert not out.parent.exists() or list(out.parent.iterdir()) == []


@pytest.mark.slow
def test_a_model_that_exits_later_is_an_error_as_well(run_cli, tmp_path, monkeypatch):
    path, out = written(tmp_path), tmp_path / "bundle"
    assert run_cli("export", f"{path}:build", "-o", out, "--golden", "opt").code == 0
    monkeypatch.setenv("EXIT_WHERE", "forward")
    done = run_cli("validate", out, "--fresh", "1", "--no-report")
    assert done.code not in (0, 1), done.err
    assert f"{path}:" in done.err


def test_an_exit_inside_a_verb_is_an_error(run_cli, monkeypatch):
    def leave():
        raise SystemExit

    monkeypatch.setattr("mha_deploy.model.catalog.catalog_names", leave)
    assert run_cli("models").code == 2


def test_an_unknown_exception_is_a_bug_and_no_verdict(run_cli, monkeypatch):
    class Odd(BaseException):
        pass

    def raise_it():
        raise Odd

    monkeypatch.setattr("mha_deploy.model.catalog.catalog_names", raise_it)
    assert run_cli("models").code == 70


BAR = """
import sys


def build():
    for done in (0, 50, 100):
        sys.stderr.write(f"\\rLoading: {done}%")
    sys.stderr.write("\\n\\x1b[1mLOADED\\x1b[0m\\r\\n")
"""


def test_a_progress_bar_of_the_model_is_lines_in_a_pipe(run_cli, tmp_path):
    (tmp_path / "model.py").write_text(BAR)
    done = run_cli("export", f"{tmp_path / 'model.py'}:build", "-o", str(tmp_path / "bundle"))
    lines = done.err.splitlines()
    assert [line for line in lines if line.startswith("L")] == [
        "Loading: 0%", "Loading: 50%", "Loading: 100%", "LOADED",
    ]  # fmt: skip
    assert "" not in lines
