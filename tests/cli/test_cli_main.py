"""Help, the version, and exit codes."""

import ast
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from fault_harness import run

from mha_deploy import __version__, cli
from mha_deploy.cli.arguments import show_steps
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.options import Step

VERBS = (
    "deploy", "export", "prune", "fuse", "check", "build-engine", "refit", "validate", "bisect", "bench",
    "compare", "matrix", "package", "inspect", "models", "analyze", "doctor", "init", "completion",
)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "got", "hint"),
    [
        (("export", "tiny-mha", "-o", "b", "--weigths", "w"), "--weigths", "--weights"),
        (("export", "tiny-mha", "-o", "b", "--nonsense"), "--nonsense", "mha-deploy export --help-all"),
        (("export", "tiny-mha", "-o", "b", "--heads", "4"), "--heads", ".toml"),
        (("export", "tiny-mha"), "--out", "mha-deploy export --help-all"),
        (("exprt",), "exprt", "mha-deploy --help"),
    ],
)
def test_a_command_line_that_is_not_valid_has_what_was_meant(refused, arguments, got, hint):
    refused(*arguments, what="command line", got=got, hint=hint)


def test_quiet_is_the_verdict_alone(run_cli, bundles, tmp_path):
    folder = bundles("tiny-mha").path
    pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
    for arguments in (
        ("export", "tiny-mha", "-o", tmp_path / "bundle", "--golden", "min"),
        ("fuse", folder / "model.onnx", "-o", tmp_path / "fused.onnx"),
        ("check", folder, "--target", "tensorrt", "--version", "8.6"),
        ("package", folder, "--triton", tmp_path / "models"),
        ("compare", folder, folder),
    ):
        done = run_cli(*arguments, "-q")
        assert (len(done.out.splitlines()), done.err) == (1, ""), arguments


@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_catalog_is_cut_in_no_terminal(run_cli, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    printed = run_cli("models").out
    assert "…" not in printed
    assert ("2,362,368" in printed) == (columns == "120"), "what a layer costs, where there is room"
    assert "2,362,368" in run_cli("models", "-v").out
    words = {word for row in json.loads(run_cli("models", "--json").out) for word in row["summary"].split()}
    assert words <= set(printed.split())


def test_a_log_has_one_line_for_each_stage(capsys):
    with show_steps("validate it") as on_step:
        ort, eager = partial(Step, "ort-cpu"), partial(Step, "eager")
        for name in ("oracle", ort("min"), ort("opt"), eager("min"), ort("odd"), "oracle", "not: a stage"):
            on_step(name, 0, 0)
    lines = [line.removeprefix("validate it: ") for line in capsys.readouterr().err.splitlines()]
    assert [line.rpartition(" (")[0] for line in lines] == ["oracle", "ort-cpu", "eager", "not: a stage"]
    assert ort("min") == "ort-cpu: min"


def test_verbs_call_nothing_but_the_public_api():
    """A verb imports `mha_deploy`, errors, options and how processes run; tables render, completion lists."""
    names = "errors|files|keywords|status|text|options|process|requirements|supervisor"
    allowed = re.compile(rf"mha_deploy|mha_deploy\.({names}|cli(\.\w+)?)")
    for path in Path(cli.__file__).parent.glob("*.py"):
        if path.name in ("tables.py", "completion.py"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for_types = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and id(node) not in for_types and "mha_deploy" in node.module:
                errors = all(alias.name.endswith("Error") for alias in node.names)
                assert errors or allowed.fullmatch(node.module), f"{path.name}: {node.module}"


def test_help_lists_every_verb_in_the_order_of_use(run_cli):
    text = run_cli("-h").out
    places = [text.index(f"\n  {verb} ") for verb in VERBS]
    assert places == sorted(places)


def test_every_option_of_every_verb_is_explained():
    """Also those whose text is the docstring of a function of the API."""
    group = cli.app
    commands = [*group.commands.values(), *group.commands["plugins"].commands.values()]
    assert len(commands) == len(VERBS) + 1 + 3
    without = [(each.name, option.name) for each in commands for option in each.params if not option.help]
    assert without == []


def test_version(run_cli):
    done = run_cli("--version")
    assert (done.code, done.out) == (0, f"mha-deploy {__version__}\n")


def test_a_call_without_a_verb_prints_the_help(run_cli):
    done = run_cli()
    assert (done.out + done.err).startswith("Usage: ")
    assert done.code in (0, 2)


@pytest.mark.parametrize(
    "arguments", [["depoly"], ["export", "tiny-mha"], ["models", "--nonsense"], ["validate"]]
)
def test_a_wrong_command_line_is_bad_input(run_cli, arguments):
    done = run_cli(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert " --help" in done.err


def test_an_option_without_its_value_does_not_take_the_next_option_for_one(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_cli("export", "tiny-mha", "-o", "--precision", "fp16")
    assert done.code == 2
    assert "'-o' needs a value" in done.err
    assert not any(tmp_path.iterdir())


def test_a_module_run_is_the_same_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mha_deploy", "--version"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("mha_deploy", run_name="__main__")
    assert stop.value.code in (None, 0)
    assert capsys.readouterr().out == f"mha-deploy {__version__}\n"


# -- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            DeployError("It broke.", got="this", hint="that"),
            2,
            "error: It broke.\n  got: this\n  try: that\n",
        ),
        (BackendUnavailable("Not here."), 3, "error: Not here.\n"),
        (
            PermissionError(13, "Permission denied", "x"),
            2,
            "error: The operating system reported an error.\n  got: [Errno 13]",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_every_kind_of_error_has_its_exit_code(run_cli, monkeypatch, error, code, text):
    def fail():
        raise error

    monkeypatch.setattr("mha_deploy.model.catalog.catalog_names", fail)
    done = run_cli("models")
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith(text)


@pytest.mark.parametrize("error", [EOFError(), BrokenPipeError(32, "Broken pipe")])
def test_an_error_that_click_takes_for_an_abort_is_no_verdict(error, monkeypatch):
    def fail():
        raise error

    prepare = partial(monkeypatch.setattr, "mha_deploy.model.catalog.catalog_names", fail)
    assert run("models", prepare=prepare, memory=None).code == 70


def test_a_bug_is_not_hidden(run_cli, monkeypatch):
    monkeypatch.setattr("mha_deploy.model.catalog.catalog_names", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.app(["models"])


def test_a_reader_that_stops_early_is_no_error():
    done = subprocess.run(
        f"'{sys.executable}' -m mha_deploy models --all --json | head -c 1",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("[", "")


def test_a_full_disk_for_results_is_an_error():
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    done = subprocess.run(
        f"'{sys.executable}' -m mha_deploy models --json > /dev/full",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "No space left" in done.stderr


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_an_interrupted_export_leaves_nothing(run_cli, tmp_path, monkeypatch, number, code, word):
    """The signal comes in the middle of the export."""
    out = tmp_path / "out"

    def export(*args, **options):
        assert len(list(out.iterdir())) == 1  # what is written until then
        signal.raise_signal(number)  # to this thread: others may run
        pytest.fail("the signal was not received")

    monkeypatch.setattr("mha_deploy.exporter.exporter.canonical_from_module", export)
    done = run_cli("export", "tiny-mha", "-o", out / "bundle")
    assert done.code == code, done.err
    assert done.out == ""
    assert "export tiny-mha: 1/" in done.err
    assert done.err.endswith(f"{word}\n")
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


def test_signal_handlers_are_restored(run_cli):
    before = signal.getsignal(signal.SIGTERM)
    assert run_cli("models").code == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_bug_has_its_own_exit_code(run_cli, monkeypatch):
    def broken(*args):
        raise RuntimeError("surprise")

    monkeypatch.setattr("mha_deploy.model.catalog.catalog_names", broken)
    done = run_cli("models")
    assert done.code == 70
    assert "surprise" in done.err
    assert "bug in mha-deploy" in done.err
