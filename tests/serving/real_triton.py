"""A real Triton server on free loopback ports, from the PyPI package nvidia-pytriton.

It has an environment of its own, since the server's Python backend needs NumPy 1: about 400 MB, made once in
a cache folder. Run this file to make it.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "nvidia-pytriton==0.7.0",
    "numpy<2",
    "onnx",
    "onnx-ir",
    "onnxruntime",
    "msgspec",
    "safetensors",
    "ml_dtypes",
)


def cache_folder():
    """Where the environment is, one for each Python."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "mha-deploy" / f"test-triton-{sys.version_info.major}.{sys.version_info.minor}"


def is_installed():
    return (cache_folder() / "complete").is_file()


def install():
    """Make the environment; raises where it cannot be installed."""
    place = cache_folder()
    if is_installed():
        return place
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", place], check=True, timeout=120)
    python = place / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True, timeout=900)
    server = _server(place)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    shutil.copy2(stub, server / "backends" / "python" / stub.name)
    (place / "complete").touch()
    return place


def _server(place):
    (found,) = place.glob("lib/python*/site-packages/pytriton/tritonserver")
    return found


class Triton:
    """One server with a model repository; a context manager. `process` can be killed."""

    def __init__(self, repository):
        self.repository, self.place = repository, cache_folder()
        self.http, self.grpc, self.metrics = _free_ports(3)

    def __enter__(self):
        server, site = _server(self.place), self.place
        self.log = tempfile.TemporaryFile()
        libraries = [str(Path(sys.base_prefix) / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
        # The stub embeds Python, and finds its home through `python3` on the path.
        environment = {
            **os.environ,
            "PATH": f"{site / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
            "OMP_NUM_THREADS": "1",
        }
        for path in site.glob("lib/python*/site-packages"):
            (path / "mha_deploy_under_test.pth").write_text(f"{ROOT}\n")
        self.process = subprocess.Popen(
            [
                server / "bin" / "tritonserver",
                f"--model-repository={self.repository}",
                f"--backend-directory={server / 'backends'}",
                f"--http-port={self.http}",
                f"--grpc-port={self.grpc}",
                f"--metrics-port={self.metrics}",
                "--http-address=127.0.0.1",
                "--grpc-address=127.0.0.1",
                "--exit-timeout-secs=2",
            ],
            env=environment,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            ready = f"http://127.0.0.1:{self.http}/v2/health/ready"
            with contextlib.suppress(OSError), urllib.request.urlopen(ready, timeout=2):
                return self
            time.sleep(0.1)
        text = self.text()
        self.__exit__()
        raise RuntimeError(f"The server did not become ready:\n{text}")

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self):
        """End the server and its stubs at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait(timeout=10)

    def text(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")


def _free_ports(count):
    with contextlib.ExitStack() as owned:
        sockets = [owned.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


if __name__ == "__main__":
    print(install())
