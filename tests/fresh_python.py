"""Run code in a new interpreter, without packages that another machine may not have."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

RUNTIMES = ("tensorrt", "tensorrt_rtx", "onnxruntime", "matplotlib", "polygraphy", "onnxscript")

_BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)

sys.meta_path.insert(0, Blocked())
"""

_RUN_ALL = """
import contextlib, importlib, io, json, sys, traceback

def imported(*names):
    for name in names:
        importlib.import_module(name)

def command(*arguments):
    from mha_deploy.cli import main
    sys.argv = ["mha-deploy", *arguments]
    main()

reported = []
for kind, arguments in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            {"import": imported, "mha-deploy": command}[kind](*arguments)
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
    packages = sorted({name.partition(".")[0] for name in sys.modules})
    reported.append({"code": code, "out": out.getvalue(), "err": err.getvalue(), "packages": packages})
print(json.dumps(reported))
"""


def python(code, *arguments, blocked=(), options=(), **settings):
    """Run code with these arguments and give what it did; imports of `blocked` packages fail in it."""
    code = _BLOCK.format(names=set(blocked)) + code
    settings = {"timeout": 120, "env": {**os.environ, "COLUMNS": "200"}, **settings}
    command = [sys.executable, *options, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **settings)


def run_all(*steps, before="", **settings):
    """Run several things in one new interpreter, as starting one for each takes longer than they do.

    Args:
        *steps: `("import", *names)` or `("mha-deploy", *arguments)`, in their order.
        before: Code that runs first.
        **settings: Those of `python`.

    Returns:
        For each step its `code`, `out` and `err`, and the `packages` that are loaded when it ends.
    """
    given = json.dumps([[kind, list(map(str, arguments))] for kind, *arguments in steps])
    done = python(before + _RUN_ALL, given, **settings)
    assert done.returncode == 0, done.stderr
    return [SimpleNamespace(**each) for each in json.loads(done.stdout.splitlines()[-1])]
