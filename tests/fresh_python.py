"""Run code in a new interpreter, without packages that another machine may not have."""

import os
import subprocess
import sys

RUNTIMES = (
    "tensorrt",
    "tensorrt_rtx",
    "onnxruntime",
    "matplotlib",
    "polygraphy",
    "safetensors",
    "onnxscript",
)

_BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)

sys.meta_path.insert(0, Blocked())
"""

CLI = """
import sys
from mha_deploy.cli import main
main()
"""


def python(code, *arguments, blocked=(), options=(), **settings):
    """Run code with these arguments and give what it did; imports of `blocked` packages fail in it."""
    code = _BLOCK.format(names=set(blocked)) + code
    settings = {"timeout": 120, "env": {**os.environ, "COLUMNS": "200"}, **settings}
    command = [sys.executable, *options, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **settings)
