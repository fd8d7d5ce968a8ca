"""What the library is compiled against, and where it was found: TensorRT, cuDNN, its frontend, and CUDA.

Each is looked for where the command line says, then where the environment says, then in Python packages, then
where systems keep it. Folders are taken in that order until all files that are needed are there: of CUDA,
Python packages and toolkits each have but a part.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mha_deploy.plugins.library import PluginError

_CUDA_NUMBER = ("CUDA_VERSION",)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Something that is needed.

    Args:
        key: Its name in the options and in the result.
        title: What people call it.
        variable: What CMake calls it.
        files: What its folders must have together.
        install: How to get it.
        places: Where it may lie besides, the likeliest first: pairs of a folder and who names it.
        version: The file and the names of the numbers that tell its version.
    """

    key: str
    title: str
    variable: str
    files: tuple[str, ...]
    install: str
    places: Callable[[], Iterator[tuple[Path, str]]]
    version: tuple[str, tuple[str, ...]]

    @property
    def option(self) -> str:
        """How the command line names it."""
        return f"--{self.key.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """Where a part was found.

    Args:
        part: The part.
        paths: The folders, or the program.
        by: Who named them.
        version: Its version, where its files tell.
    """

    part: Part
    paths: tuple[Path, ...]
    by: str
    version: str = ""


def find_parts(given: Mapping[str, Path | None]) -> list[Found]:
    """Find everything that the library is compiled against.

    Args:
        given: Folders that the user named, by the keys of `PARTS`; None where one was not named.

    Raises:
        PluginError: Something is missing; the error tells all that is, and where it was looked for.
    """
    found = [_found(part, given.get(part.key)) for part in PARTS]
    missing = [part for part, each in zip(PARTS, found, strict=True) if each is None]
    if missing:
        raise _missing(missing)
    return [each for each in found if each is not None]


def find_nvcc(given: Path | None) -> Found:
    """Find the compiler of device code.

    Raises:
        PluginError: There is none.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [
        (str(given) if given else None, "--nvcc"),
        (f"{home}/bin/nvcc" if home else None, "CUDA_HOME"),
        ("nvcc", "PATH"),
        ("/usr/local/cuda/bin/nvcc", "the system"),
        *((str(path / "nvcc"), "a Python package") for path in _packages("nvidia/cu*/bin")),
    ]
    for name, by in places:
        program = shutil.which(name) if name else None
        if program is not None:
            return Found(part=NVCC, paths=(Path(program),), by=by)
        if name and by == "--nvcc":
            raise PluginError("This is not a compiler.", got=name, hint="--nvcc PATH, the path of nvcc")
    looked = ", ".join(name for name, _ in places if name)
    raise PluginError(
        "nvcc, which compiles for the GPU, is missing.", got=f"looked for {looked}", hint=NVCC.install
    )


def _found(part: Part, named: Path | None) -> Found | None:
    """The folders of a part, as few as there need be; None where some file is in none of them."""
    if named is not None and not any((named / name).is_file() for name in part.files):
        raise PluginError(
            f"The folder has no headers of {part.title}.",
            got=f"{named} without {', '.join(part.files)}",
            hint=f"{part.option} FOLDER, the one with {part.files[0]}",
        )
    places = [*([] if named is None else [(named, part.option)]), *part.places()]
    taken: dict[Path, str] = {}
    lacking = list(part.files)
    for folder, by in places:
        if any((folder / name).is_file() for name in lacking):
            taken[folder] = by
            lacking = [name for name in lacking if not (folder / name).is_file()]
    if lacking:
        return None
    by = ", ".join(dict.fromkeys(taken.values()))
    return Found(part=part, paths=tuple(taken), by=by, version=_version(part, tuple(taken)))


def _missing(parts: list[Part]) -> PluginError:
    told = []
    for part in parts:
        looked = ", ".join(dict.fromkeys(str(path) for path, _ in part.places()))
        told.append(f"{part.title} ({', '.join(part.files)}), looked in {looked}")
    hints = "; ".join(f"{part.title}: {part.install}, or {part.option} FOLDER" for part in parts)
    return PluginError("Headers that the plugin library needs are missing.", got="; ".join(told), hint=hints)


def _version(part: Part, folders: Sequence[Path]) -> str:
    """The version as the defines of a header tell it; empty where they do not."""
    file, names = part.version
    path = next((folder / file for folder in folders if (folder / file).is_file()), None)
    text = "" if path is None else path.read_text(encoding="utf-8", errors="replace")
    defined: dict[str, str] = dict(re.findall(r"^\s*#define\s+(\w+)\s+(\w+)", text, re.MULTILINE))
    # A number may be the name of another define.
    numbers = [defined.get(defined.get(name, ""), defined.get(name, "")) for name in names]
    if not numbers or not all(number.isdigit() for number in numbers):
        return ""
    if names == _CUDA_NUMBER:  # 13040 is 13.4
        numbers = [str(int(numbers[0]) // 1000), str(int(numbers[0]) % 1000 // 10)]
    return ".".join(numbers)


# -- where things lie --------------------------------------------------------------------------------


def _packages(pattern: str) -> list[Path]:
    """Folders of Python packages that fit a pattern, newest name first."""
    roots = dict.fromkeys(Path(path) for path in (sysconfig.get_paths()["purelib"], *sys.path) if path)
    return [path for root in roots for path in sorted(root.glob(pattern), reverse=True)]


def _system() -> Iterator[tuple[Path, str]]:
    yield Path(f"/usr/include/{platform.machine()}-linux-gnu"), "the system"
    yield Path("/usr/include"), "the system"


def _tensorrt() -> Iterator[tuple[Path, str]]:
    root = os.environ.get("TENSORRT_ROOT")
    if root:
        yield Path(root) / "include", "TENSORRT_ROOT"
        yield Path(root), "TENSORRT_ROOT"
    yield Path("/usr/local/tensorrt/include"), "the system"
    yield Path("/opt/tensorrt/include"), "the system"
    yield from _system()


def _cuda() -> Iterator[tuple[Path, str]]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name]) / "include", name
    for path in _packages("nvidia/cu*/include"):
        if path.parent.name[2:].isdigit():  # nvidia/cu13, and not nvidia/cudnn
            yield path, "a Python package"
    for package in ("cuda_runtime", "cublas", "cuda_nvrtc", "cuda_nvcc"):  # as those for CUDA 12 are cut
        for path in _packages(f"nvidia/{package}/include"):
            yield path, "a Python package"
    yield Path("/usr/local/cuda/include"), "the system"
    yield from _system()


def _cudnn() -> Iterator[tuple[Path, str]]:
    for path in _packages("nvidia/cudnn/include"):
        yield path, "a Python package"
    yield from _system()
    yield from _cuda()


def _frontend() -> Iterator[tuple[Path, str]]:
    # Its wheel puts them beside Python's own headers, or into the packages, as pip is told to install.
    for path in (*_packages("include"), *_packages("nvidia/cudnn_frontend/include")):
        yield path, "a Python package"
    yield Path(sys.prefix) / "include", "a Python package"
    yield Path(sysconfig.get_paths()["include"]).parent, "a Python package"
    yield from _system()


PARTS = (
    Part(
        key="tensorrt_include",
        title="TensorRT",
        variable="TENSORRT_INCLUDE",
        files=("NvInfer.h", "NvInferVersion.h"),
        install="unpack NVIDIA's archive and set TENSORRT_ROOT, or apt install libnvinfer-dev",
        places=_tensorrt,
        version=("NvInferVersion.h", ("NV_TENSORRT_MAJOR", "NV_TENSORRT_MINOR", "NV_TENSORRT_PATCH")),
    ),
    Part(
        key="cudnn_include",
        title="cuDNN",
        variable="CUDNN_INCLUDE",
        files=("cudnn.h", "cudnn_version.h"),
        install="pip install nvidia-cudnn-cu13",
        places=_cudnn,
        version=("cudnn_version.h", ("CUDNN_MAJOR", "CUDNN_MINOR", "CUDNN_PATCHLEVEL")),
    ),
    Part(
        key="cudnn_frontend_include",
        title="cudnn-frontend",
        variable="CUDNN_FRONTEND_INCLUDE",
        files=("cudnn_frontend.h",),
        install="pip install nvidia-cudnn-frontend",
        places=_frontend,
        version=(
            "cudnn_frontend_version.h",
            (
                "CUDNN_FRONTEND_MAJOR_VERSION",
                "CUDNN_FRONTEND_MINOR_VERSION",
                "CUDNN_FRONTEND_PATCH_VERSION",
            ),
        ),
    ),
    Part(
        key="cuda_include",
        title="CUDA",
        variable="CUDA_INCLUDE",
        files=("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h", "cublasLt.h", "nvrtc.h"),
        install="install the CUDA toolkit, or pip install nvidia-cuda-runtime nvidia-cuda-nvrtc "
        "nvidia-cublas nvidia-cuda-crt",
        places=_cuda,
        version=("cuda.h", _CUDA_NUMBER),
    ),
)
"""What is needed, in the order in which it is told."""

NVCC = Part(
    key="nvcc",
    title="nvcc",
    variable="NVCC",
    files=(),
    install="install the CUDA toolkit, or --nvcc PATH",
    places=lambda: iter(()),
    version=("", ()),
)
