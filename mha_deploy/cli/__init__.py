"""The command line: each verb parses, calls one function, prints, and gives an exit code.

    0  passed          2  bad input             70   a bug in this tool
    1  verdict failed  3  backend unavailable   130  interrupted

Everything heavier than the standard library is imported by the verb that needs it.
"""

from __future__ import annotations

import sys
import traceback

import typer

from mha_deploy.cli.analyze import analyze
from mha_deploy.cli.bench import bench
from mha_deploy.cli.bisect import bisect
from mha_deploy.cli.build_engine import build_engine
from mha_deploy.cli.check import check
from mha_deploy.cli.deploy import deploy
from mha_deploy.cli.doctor import doctor
from mha_deploy.cli.export import export
from mha_deploy.cli.fuse import fuse
from mha_deploy.cli.inspect import inspect
from mha_deploy.cli.models import models
from mha_deploy.cli.plugins import plugins
from mha_deploy.cli.validate import validate
from mha_deploy.errors import EXIT_BAD_INPUT, DeployError

EXIT_INTERNAL_ERROR = 70
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="mha-deploy",
    help="Take attention from PyTorch to TensorRT and prove the result.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (
    deploy,
    export,
    fuse,
    check,
    build_engine,
    validate,
    bisect,
    bench,
    inspect,
    models,
    analyze,
    doctor,
):
    app.command()(verb)
app.add_typer(plugins, name="plugins")


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True)) -> None:
    if version:
        from mha_deploy import __version__

        typer.echo(f"mha-deploy {__version__}")
        raise typer.Exit()


def main() -> None:
    """Run the command line; an error a user can act on is printed, not traced."""
    try:
        app(standalone_mode=True)
    except DeployError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        typer.echo(f"error: The system refused.\n  got: {error}", err=True)
        sys.exit(EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except Exception:  # noqa: BLE001 (a bug of this tool: its exit code must not read as a verdict)
        traceback.print_exc()
        typer.echo("error: This is a bug in mha-deploy.\n  try: report it with the trace above", err=True)
        sys.exit(EXIT_INTERNAL_ERROR)
    except SystemExit as stop:
        if stop.code == EXIT_INTERRUPTED:  # what Typer makes of Ctrl-C
            typer.echo("interrupted", err=True)
        raise
