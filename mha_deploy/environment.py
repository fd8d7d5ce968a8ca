"""What is installed on this machine: packages, runtimes, GPUs."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from mha_deploy import __version__

# -- Which versions of everything are here ---------------------------------------------------------

EXPORT_PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numpy")
RUN_PACKAGES = (
    *EXPORT_PACKAGES,
    "onnxruntime-gpu",
    "tensorrt",
    "tensorrt-rtx-cu13",
    "cuda-bindings",
    "triton",
)


def installed_version(package: str) -> str | None:
    """The version of an installed package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def can_import(module: str) -> bool:
    """Whether a module is there to be imported; nothing is imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # somebody forbids it, or made it by hand
        return False


def versions(packages: tuple[str, ...] = EXPORT_PACKAGES) -> dict[str, str]:
    """This tool, Python, and those of the packages that are installed."""
    found = {package: installed_version(package) for package in packages}
    own = {"mha-deploy": __version__, "python": platform.python_version()}
    return own | {package: version for package, version in found.items() if version is not None}


# -- Which runtimes, versions and GPUs are here, and what can be done with them --------------------


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """One package and what it is for."""

    name: str  # what people call it
    module: str  # what Python imports
    packages: tuple[str, ...]  # names it may be installed under
    gives: str  # what it makes possible here
    install: str  # the command that installs it
    one_of: bool = True  # whether only one of the packages may be installed, because they hold the same files
    slow: bool = False  # whether importing it takes long: then it is tried only on request


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The state of one runtime on this machine; `loaded` if it was imported to see that it works."""

    runtime: Runtime
    version: str | None
    problem: str | None = None
    note: str = ""
    loaded: bool = False

    @property
    def works(self) -> bool:
        """Whether it is here, and nothing is known to be wrong with it."""
        return self.version is not None and self.problem is None


_EXPORT, _CUDA = 'pip install "mha-deploy[export]"', 'pip install "mha-deploy[cuda]"'
RUNTIMES = tuple(
    Runtime(name=name, module=module, packages=packages, gives=gives, install=install, **more)
    for name, module, packages, gives, install, more in (
        ("PyTorch", "torch", ("torch",), "export", _EXPORT, {"slow": True}),
        ("onnxscript", "onnxscript", ("onnxscript",), "export", _EXPORT, {"slow": True}),
        (
            "ONNX", "onnx", ("onnx",), "check, validate --backend onnx-reference", "pip install mha-deploy",
            {"slow": True},
        ),
        (
            "ONNX Runtime", "onnxruntime", ("onnxruntime", "onnxruntime-gpu"), "validate --backend ort-cpu",
            'pip install "mha-deploy[ort]"  (or [ort-gpu], not both)', {},
        ),
        (
            "TensorRT", "tensorrt", ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
            "build-engine on this machine's GPU", 'pip install "mha-deploy[trt]"', {"one_of": False},
        ),
        (
            "TensorRT-RTX", "tensorrt_rtx", ("tensorrt-rtx-cu13", "tensorrt-rtx-cu12"),
            "build-engine without a GPU", 'pip install "mha-deploy[rtx]"', {"one_of": False},
        ),
        (
            "cuda-bindings", "cuda.bindings", ("cuda-bindings",), "run and time on a GPU: validate, bench",
            _CUDA, {},
        ),
        (
            "matplotlib", "matplotlib", ("matplotlib",), "analyze --heads", 'pip install "mha-deploy[plot]"',
            {"slow": True},
        ),
    )
)  # fmt: skip


def examine(runtimes: Sequence[Runtime] = RUNTIMES, *, load: bool = False) -> list[Finding]:
    """Look for every runtime, importing it to see that it works.

    Args:
        runtimes: What to look for.
        load: Whether to import those too that take long.
    """
    return [_examine_one(runtime, load or not runtime.slow) for runtime in runtimes]


def _examine_one(runtime: Runtime, load: bool) -> Finding:
    found = [package for package in runtime.packages if installed_version(package) is not None]
    if not can_import(runtime.module):
        return Finding(runtime=runtime, version=None)
    version = installed_version(found[0]) if found else "unknown"
    if len(found) > 1 and runtime.one_of:
        return Finding(
            runtime=runtime, version=version, problem=f"{' and '.join(found)} overwrite each other"
        )
    if not load:
        return Finding(runtime=runtime, version=version)
    try:
        module = importlib.import_module(runtime.module)
    except Exception as error:  # noqa: BLE001 (a broken install can raise anything)
        return Finding(runtime=runtime, version=version, problem=f"does not import: {error}")
    return Finding(runtime=runtime, version=version, note=_note(runtime, module), loaded=True)


def _note(runtime: Runtime, module: object) -> str:
    if runtime.module == "torch":
        cuda = module.cuda  # type: ignore[attr-defined]
        return f"CUDA: {cuda.get_device_name()}" if cuda.is_available() else "CPU only"
    if runtime.module == "onnxruntime":
        providers = module.get_available_providers()  # type: ignore[attr-defined]
        return ", ".join(name.removesuffix("ExecutionProvider") for name in providers)
    return ""


def gpus_are_hidden() -> bool:
    """Whether `CUDA_VISIBLE_DEVICES` hides every GPU, as CUDA reads it: empty, or -1 first."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.partition(",")[0].strip() in ("", "-1")


def gpus() -> list[dict[str, str]]:
    """The NVIDIA GPUs of this machine, as its driver lists them; none where all are hidden from CUDA."""
    fields = ("name", "compute_cap", "memory.total", "driver_version")
    if gpus_are_hidden() or shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (subprocess.SubprocessError, OSError):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.strip()]
    return [dict(zip(fields, row, strict=False)) for row in rows]


def report(findings: Sequence[Finding]) -> dict[str, object]:
    """Everything the doctor found, as plain data."""
    working = {finding.runtime.module for finding in findings if finding.works}
    here = gpus()
    tensorrt, rtx = "tensorrt" in working, "tensorrt_rtx" in working
    return {
        "versions": versions(()),
        "runtimes": [
            {
                "name": finding.runtime.name,
                "version": finding.version,
                "works": finding.works,
                "loaded": finding.loaded,
                "problem": finding.problem,
                "note": finding.note,
                "gives": finding.runtime.gives,
                "install": None if finding.works else finding.runtime.install,
            }
            for finding in findings
        ],
        "gpus": here,
        "can": {
            "export": all(f.works for f in findings if f.runtime.gives == "export"),
            "validate": any(f.works for f in findings if "validate --backend" in f.runtime.gives),
            "build-engine": rtx or (tensorrt and bool(here)),
            "run-engines": "cuda.bindings" in working and (tensorrt or rtx) and bool(here),
        },
    }
