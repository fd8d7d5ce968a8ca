"""What is installed on this machine: packages, runtimes, GPUs."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.machinery import PathFinder
from typing import Any, NamedTuple

from mha_deploy import __version__
from mha_deploy.process import run

# -- Which versions of everything are here ---------------------------------------------------------

EXPORT_PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxruntime-gpu", "numpy")
RUN_PACKAGES = (*EXPORT_PACKAGES, "tensorrt", "tensorrt-rtx-cu13", "cuda-bindings", "triton")


command_line: list[str] = []
"""The command that this process runs; empty where it is used from Python."""


def installed_version(package: str) -> str | None:
    """The version of an installed package, without importing it."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def can_import(module: str) -> bool:
    """Whether a module is there to be imported; nothing is imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # the import is blocked, or the module has no spec
        return False


def is_own_module(name: str) -> bool:
    """Whether a module is of this tool or of a package that it depends on, with all extras."""
    known = {"mha_deploy", *(runtime.module.partition(".")[0] for runtime in RUNTIMES)}
    if name in known or _canonical(name) in _own_packages():
        return True
    if PathFinder.find_spec(name) is None:
        return False
    return any(_canonical(each) in _own_packages() for each in _packages_of_modules().get(name, ()))


@cache
def _packages_of_modules() -> Mapping[str, Sequence[str]]:
    from importlib import metadata

    return metadata.packages_distributions()


@cache
def _own_packages() -> frozenset[str]:
    """The packages that this one needs, and those that they need, with all extras."""
    from importlib import metadata

    needed, waiting = {"mha-deploy"}, ["mha-deploy"]
    while waiting:
        try:
            lines = metadata.requires(waiting.pop()) or []
        except metadata.PackageNotFoundError:
            continue
        names = {_canonical(re.split(r"[\s;\[<>=!~(@]", line, maxsplit=1)[0]) for line in lines}
        waiting += names - needed
        needed |= names
    return frozenset(needed)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def versions(packages: tuple[str, ...] = EXPORT_PACKAGES) -> dict[str, str]:
    """This tool, Python, and those of the packages that are installed.

    Of a TensorRT that was imported, the version is the library's own, as runners report it: that of the
    package may be another one.
    """
    found: dict[str, Any] = {"mha-deploy": __version__, "python": platform.python_version()}
    for package in packages:
        module = sys.modules.get({"tensorrt-rtx-cu13": "tensorrt_rtx"}.get(package, package))
        own = getattr(module, "__version__", None) if package.startswith("tensorrt") else None
        found[package] = own or installed_version(package)
    return {package: str(version) for package, version in found.items() if version is not None}


# -- Which runtimes, versions and GPUs are here, and what can be done with them --------------------


class RuntimePackage(NamedTuple):
    """One package and what it is for."""

    name: str  # what people call it
    module: str  # what Python imports
    packages: tuple[str, ...]  # names it may be installed under
    gives: str  # what it makes possible here, for people
    install: str  # the command that installs it
    one_of: bool = True  # whether only one of the packages may be installed, because they hold the same files
    slow: bool = False  # whether importing it takes long: then it is tried only on request
    verb: str = ""  # what it is for: `export`, which needs all of these, or `validate`, which needs one


def _install(extra: str) -> str:
    return f'pip install "mha-deploy[{extra}]"'


_ORT = f"{_install('ort')}  (or [ort-gpu], not both)"
_TENSORRT, _RTX = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"), ("tensorrt-rtx-cu13", "tensorrt-rtx-cu12")
_ONNX, _GPU = "check, validate --runtime onnx-reference", "run and time on a GPU: validate, bench"
_LEAN = ("tensorrt-lean-cu13-bindings", "tensorrt-lean-cu12-bindings", "tensorrt-lean")
_COMPATIBLE = "run version-compatible engines: 43 MB in place of gigabytes"
_HERE, _ANYWHERE = "build-engine on this machine's GPU", "build-engine without a GPU"
EXPORT, VALIDATE = "export", "validate"
_ORTS = ("onnxruntime", "onnxruntime-gpu")
RUNTIMES = (
    RuntimePackage("PyTorch", "torch", ("torch",), "export", _install("export"), slow=True, verb=EXPORT),
    RuntimePackage(
        "onnxscript", "onnxscript", ("onnxscript",), "export", _install("export"), slow=True, verb=EXPORT
    ),
    RuntimePackage("ONNX", "onnx", ("onnx",), _ONNX, "pip install mha-deploy", slow=True, verb=VALIDATE),
    RuntimePackage("ONNX Runtime", "onnxruntime", _ORTS, "validate --runtime ort-cpu", _ORT, verb=VALIDATE),
    RuntimePackage("TensorRT", "tensorrt", _TENSORRT, _HERE, _install("trt"), one_of=False),
    RuntimePackage("TensorRT lean", "tensorrt_lean_bindings", _LEAN, _COMPATIBLE, _install("lean"), False),
    RuntimePackage("TensorRT-RTX", "tensorrt_rtx", _RTX, _ANYWHERE, _install("rtx"), one_of=False),
    RuntimePackage("cuda-bindings", "cuda.bindings", ("cuda-bindings",), _GPU, _install("cuda")),
    RuntimePackage(
        "matplotlib", "matplotlib", ("matplotlib",), "analyze --heads", _install("plot"), slow=True
    ),
)


def examine(runtimes: Sequence[RuntimePackage] = RUNTIMES, *, load: bool = False) -> dict[str, Any]:
    """Look for every runtime and for GPUs; `load` imports those runtimes too that take long to import."""
    rows = [_examine_one(runtime, load or not runtime.slow) for runtime in runtimes]
    pairs = list(zip(runtimes, rows, strict=True))
    working = {runtime.module for runtime, row in pairs if row["works"]}
    here, tensorrt, rtx = gpus(), "tensorrt" in working, "tensorrt_rtx" in working
    can = {
        "export": all(row["works"] for runtime, row in pairs if runtime.verb == EXPORT),
        "validate": any(row["works"] for runtime, row in pairs if runtime.verb == VALIDATE),
        "build-engine": rtx or (tensorrt and bool(here)),
        "run-engines": "cuda.bindings" in working and (tensorrt or rtx) and bool(here),
    }
    return {"versions": versions(()), "runtimes": rows, "gpus": here, "can": can}


def _examine_one(runtime: RuntimePackage, load: bool) -> dict[str, Any]:
    """The state of one runtime: `loaded` if it was imported, and its `problem` if it does not work."""
    found = [package for package in runtime.packages if installed_version(package) is not None]
    version = problem = None
    loaded, note = False, ""
    if can_import(runtime.module):
        version = installed_version(found[0]) if found else "unknown"
        if len(found) > 1 and runtime.one_of:
            problem = f"{' and '.join(found)} overwrite each other"
        elif load:
            try:
                module, loaded = importlib.import_module(runtime.module), True
                note = _note(runtime.module, module)
            except Exception as error:  # noqa: BLE001 (a broken install can raise anything)
                problem, loaded = f"does not import: {error}", False
    works = version is not None and problem is None
    return {
        "name": runtime.name, "version": version, "works": works, "loaded": loaded, "problem": problem,
        "note": note, "gives": runtime.gives, "install": None if works else runtime.install,
    }  # fmt: skip


def _note(name: str, module: Any) -> str:
    if name == "torch":
        cuda = module.cuda
        return f"CUDA: {cuda.get_device_name()}" if cuda.is_available() else "CPU only"
    if name == "onnxruntime":
        return ", ".join(each.removesuffix("ExecutionProvider") for each in module.get_available_providers())
    return ""


def gpus_are_hidden() -> bool:
    """Whether `CUDA_VISIBLE_DEVICES` hides every GPU, as CUDA reads it: empty, or -1 first."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.partition(",")[0].strip() in ("", "-1")


def gpus() -> list[dict[str, str]]:
    """The NVIDIA GPUs of this machine, as its driver lists them; none where all are hidden from CUDA."""
    fields = ("name", "compute_cap", "memory.total", "driver_version")
    if gpus_are_hidden():
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):  # there is no driver, or it does not answer
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.strip()]
    return [dict(zip(fields, row, strict=False)) for row in rows]
