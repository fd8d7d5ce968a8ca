"""Run the command line as a shell would, inside this process."""

import sys
from dataclasses import dataclass

import pytest

from mha_deploy.cli import main


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def run_cli(monkeypatch, capsys):
    """Run `mha-deploy` with these arguments through its `main`, errors and exit codes included."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["mha-deploy", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return Done(caught.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def refused(run_cli):
    """Run a command that must be refused: the error has its three parts and stdout stays empty."""

    def run(*arguments, what, got="", hint="", code=2):
        done = run_cli(*arguments)
        assert done.code == code, done.err
        assert done.out == ""
        lines = done.err[done.err.index("error: ") :].splitlines()
        text = {line.partition(": ")[0].strip(): line.partition(": ")[2] for line in lines}
        assert what in text["error"]
        assert got in text.get("got", "")
        assert hint in text.get("try", "")
        assert "Traceback" not in done.err
        return done

    return run
