"""Libraries that say of themselves what a test wants, and have no plugins behind it."""

import functools
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PLUGINS = [
    {"name": name, "version": "1", "namespace": "mha_deploy"}
    for name in ("MhaDeployAttention", "MhaDeployLinear", "MhaDeployNormActivation")
]
INFO = {
    "library": "mha_deploy_plugins",
    "version": "0.1.0",
    "interface": "IPluginV2DynamicExt",
    "tensorrt": "8.6.0",
    "cudnn_frontend": "1.32.0",
    "plugins": PLUGINS,
    "architectures": [80, 90],
}


def file_name(major: str = "8") -> str:
    return f"libmha_deploy_plugins_trt{major}.so"


@functools.cache
def _compiled(source: str) -> bytes:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("a C compiler is not here")
    with tempfile.NamedTemporaryFile(suffix=".so") as made:
        command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", made.name]
        subprocess.run(command, input=source, text=True, check=True, capture_output=True)
        return Path(made.name).read_bytes()


def write_library(folder: Path, *, comment: str = "", code: str | None = None, **changes) -> Path:
    """Compile a library that tells this of itself."""
    info = {**INFO, **changes}
    text = json.dumps(json.dumps(info))  # a JSON text is a C text, too
    source = code or (
        f"char const* mha_deploy_plugins_info(void) {{ return {text}; }}\n"
        "int mha_deploy_fp8_attentions(int with_fp8_kernel) { return 0 * with_fp8_kernel; }\n"
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(str(info["tensorrt"]).split(".")[0])
    path.unlink(missing_ok=True)  # a loaded one must not change
    path.write_bytes(_compiled(f'{source}char const* comment = "{comment}";\n'))
    return path


def fake_tensorrt(version: str):
    """The fake of a TensorRT, which the tests of the backend own."""
    sys.path.append(str(Path(__file__).parent / "runtime"))
    from fake_engines import fake

    return fake(version)
