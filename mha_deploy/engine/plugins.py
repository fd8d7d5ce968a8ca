"""The plugin library: how it is compiled, found and loaded."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from mha_deploy import __version__
from mha_deploy.bundle.folder import sha256
from mha_deploy.environment import RUNTIMES, installed_version
from mha_deploy.errors import BackendUnavailable
from mha_deploy.files import read_regular
from mha_deploy.options import OnStep, silent
from mha_deploy.output import temporary_folder, write_file
from mha_deploy.process import find_program, python_command, run, start
from mha_deploy.runtime.tensorrt.versions import EngineError, TensorRT

# -- A built library and its description, which a process of its own reads: a broken one can crash -

PREFIX = "libmha_deploy_plugins_trt"

_REBUILD = "mha-deploy plugins build"
_READ_INFO = """import ctypes, sys
info = ctypes.CDLL(sys.argv[1]).mha_deploy_plugins_info
info.restype = ctypes.c_char_p
sys.stdout.buffer.write(info())"""


class PluginError(BackendUnavailable):
    """A plugin library is missing, broken, or not the one that is needed."""


class _Plugin(msgspec.Struct, frozen=True):
    name: str
    version: str
    namespace: str


class PluginLibrary(msgspec.Struct, frozen=True, kw_only=True):
    """A library that can be loaded on this machine; an engine needs the version that it was built with.

    It describes itself: TensorRT's plugin interface, the versions of the headers, its plugins and GPUs.
    """

    version: str
    interface: str
    tensorrt: str
    cudnn_frontend: str
    plugins: tuple[_Plugin, ...]
    architectures: tuple[int | str, ...]
    path: Path = Path()
    sha256: str = ""

    def record(self) -> dict[str, Any]:
        """The library as an engine's manifest records it. The path is this machine's own."""
        kept = ("library", "version", "sha256", "tensorrt", "plugins")
        return {name: self.to_dict()[name] for name in kept}

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {"library": self.path.name, **msgspec.json.decode(msgspec.json.encode(self, enc_hook=str))}


def major(version: str) -> str:
    """The first number of a version."""
    return version.split(".")[0]


def read_library(path: Path) -> PluginLibrary:
    """Read the description of a library, or raise that it cannot be loaded here, or is not one of ours."""
    if not path.is_file():
        raise PluginError("There is no plugin library here.", got=path, hint=_REBUILD)
    path = path.resolve()
    return _read(path, path.stat().st_mtime_ns)


@cache
def _read(path: Path, changed: int) -> PluginLibrary:
    """The description, read once as long as the file does not change, in a process that may crash."""
    try:
        done = run(python_command(path, code=_READ_INFO), capture_output=True, timeout=60, check=True)
        library = msgspec.json.decode(done.stdout, type=PluginLibrary)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        last = (lines or [f"it ended with {error.returncode}"])[-1]
        raise PluginError("The plugin library cannot be loaded here.", got=last, hint=_REBUILD) from error
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError) as error:
        what = "has no valid description" if isinstance(error, msgspec.MsgspecError) else "cannot be read"
        raise PluginError(f"The plugin library {what}.", got=f"{path}: {error}", hint=_REBUILD) from error
    architectures = tuple(map(str, library.architectures))
    return msgspec.structs.replace(library, path=path, sha256=sha256(path), architectures=architectures)


ENVIRONMENT = "MHA_DEPLOY_PLUGINS"
"""The variable with the path of a library, or of a folder of them, into which they are built as well."""

_PACKAGE = Path(__file__).resolve().parents[1]


def source_folder() -> Path:
    """The C++ source: inside an installed wheel, or `plugins/` of a checkout."""
    installed = _PACKAGE / "native"
    return installed if installed.is_dir() else _PACKAGE.parent / "plugins"


def places() -> list[Path]:
    """Where libraries are searched for: as named, then in the cache of this version of the tool."""
    named = os.environ.get(ENVIRONMENT)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = caches / "mha-deploy" / "plugins" / __version__
    return [Path(named).expanduser(), cache] if named else [cache]


def build_folder() -> Path:
    """Where `plugins build` writes by default."""
    first = places()[0]
    return first.parent if first.suffix == ".so" else first


# -- The plugin libraries of this machine, and the one that fits a TensorRT ------------------------


def describe_libraries() -> dict[str, Any]:
    """The places that are searched, and the libraries there, as plain data; see `md.plugins`."""
    names = next(runtime.packages for runtime in RUNTIMES if runtime.module == "tensorrt")
    here = next((version for version in map(installed_version, names) if version), None)
    libraries: list[dict[str, Any]] = []
    for path, library in candidates():
        if isinstance(library, PluginError):
            libraries.append({"path": str(path), "problem": library.in_one_line, "fits": False})
            continue
        fits = here is not None and major(here) == major(library.tensorrt)
        libraries.append({**library.to_dict(), "problem": None, "tensorrt_here": here, "fits": fits})
    return {"places": [str(place) for place in places()], "libraries": libraries}


def candidates() -> list[tuple[Path, PluginLibrary | PluginError]]:
    """Every library of this machine, in the order of the search, or why it cannot be used."""
    return [(path, _or_error(read_library, path)) for path in _files()]


def _or_error(find: Callable[..., PluginLibrary], *arguments: Any) -> PluginLibrary | PluginError:
    try:
        return find(*arguments)
    except PluginError as error:
        return error


def library_for(version: str) -> PluginLibrary:
    """The library that a TensorRT of this version can load: the first of its major version."""
    others = []
    for path in _files():
        # A library of another TensorRT has its version in the name, and need not be loaded.
        if path.name.startswith(PREFIX) and path.stem != f"{PREFIX}{major(version)}":
            others.append(str(path))
            continue
        library = read_library(path)
        if major(library.tensorrt) == major(version):
            return library
        others.append(f"{path} (TensorRT {library.tensorrt})")
    problem = f"There is no plugin library for TensorRT {major(version)} here."
    got = f"looked in {', '.join(map(str, places()))}" + (f"; found {', '.join(others)}" if others else "")
    hint = f"build it with `mha-deploy plugins build`, or name one in {ENVIRONMENT}"
    raise PluginError(problem, got=got, hint=hint)


def library_needed(record: Mapping[str, Any], version: str) -> PluginLibrary:
    """The library of an entry of an engine manifest's `plugins`, for a TensorRT of this version."""
    library = library_for(version)
    if library.version != record["version"]:
        got = f"{library.path} is {library.version}, the engine was built with {record['version']}"
        hint = "build the engine again, or install the mha-deploy that built it"
        raise PluginError("The engine needs another version of the plugin library.", got=got, hint=hint)
    wanted = {f"{each['name']} version {each['version']}" for each in record["plugins"]}
    if missing := sorted(wanted - {f"{each.name} version {each.version}" for each in library.plugins}):
        problem = "The plugin library lacks what the engine needs."
        raise PluginError(problem, got=", ".join(missing), hint="build the engine again")
    return library


def _files() -> Iterator[Path]:
    for place in places():
        if place.is_dir():
            yield from sorted(place.glob(f"{PREFIX}*.so"))
        elif place.is_file() or place.suffix == ".so":
            # A file that the user named is read even where it is missing: the error names it.
            yield place


def why_missing(records: Sequence[Mapping[str, Any]], version: str) -> list[str]:
    """Why the libraries that an engine needs cannot be loaded here; empty where they can."""
    found = (_or_error(library_needed, record, version) for record in records)
    return [each.in_one_line for each in found if isinstance(each, PluginError)]


def other_builds(records: Sequence[Mapping[str, Any]], version: str) -> list[str]:
    """Notes on libraries here that an engine can use, but was not built with."""
    notes = []
    for record in records:
        library, needed = _or_error(library_needed, record, version), record["sha256"]
        if isinstance(library, PluginLibrary) and library.sha256 != needed:
            builds = f"({library.sha256[:12]}, the engine was built with {needed[:12]})"
            notes.append(f"the plugin library here is another build of version {library.version} {builds}")
    return notes


# -- What the library is compiled with: TensorRT, cuDNN, cudnn-frontend, CUDA, nvcc ----------------


@dataclass(frozen=True, kw_only=True)
class Part:
    """Headers or a compiler that the build needs.

    Its folders must contain all `files` together; `version` names the file and the defines with its version.
    `places` are searched in this order, then the system's folders: `$NAME/...` where the environment has that
    variable, absolute paths, and patterns for folders of Python packages.
    """

    key: str
    title: str
    install: str
    files: tuple[str, ...]
    places: tuple[str, ...]
    version: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        """Its option of the command line."""
        return f"--{self.key.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """Where a part was found: folders or the program, the origin of the paths, and the version if known."""

    part: Part
    paths: tuple[Path, ...]
    by: str
    version: str = ""


def find_parts(given: Mapping[str, Path | None]) -> list[Found]:
    """Find all that the library is compiled with; folders, and nvcc, may be given by the keys of `PARTS`."""
    found, lines, hints = list[Found](), list[str](), list[str]()
    for part in PARTS:
        if (each := _find(part, given.get(part.key))) is not None:
            found.append(each)
            continue
        looked = ", ".join(dict.fromkeys(str(folder) for folder, _ in _places(part)))
        lines.append(f"{part.title} ({', '.join(part.files)}), looked in {looked}")
        hints.append(f"{part.title}: {part.install}, or {part.option} PATH")
    if lines:
        problem = "Something that the build of the plugin library needs is missing."
        raise PluginError(problem, got="; ".join(lines), hint="; ".join(hints))
    return found


def _find(part: Part, named: Path | None) -> Found | None:
    """The folders of a part, as few as possible; None where a file is in none of them."""
    if part is NVCC and named is not None:
        program = find_program(named)
        if program is None:
            raise PluginError("This is not a compiler.", got=named, hint="--nvcc PATH, the path of nvcc")
        return Found(part=part, paths=(Path(program),), by=part.option)
    if named is not None and not any((named / name).is_file() for name in part.files):
        got, hint = f"{named} without {', '.join(part.files)}", f"the one with {part.files[0]}"
        problem = f"The folder has no headers of {part.title}."
        raise PluginError(problem, got=got, hint=f"{part.option} FOLDER, {hint}")
    taken, lacking = dict[Path, str](), set(part.files)
    for folder, by in [*([] if named is None else [(named, part.option)]), *_places(part)]:
        if held := {name for name in lacking if (folder / name).is_file()}:
            taken[folder], lacking = by, lacking - held
    if lacking:
        return None
    paths = tuple(folder / "nvcc" for folder in taken) if part is NVCC else tuple(taken)
    by = ", ".join(dict.fromkeys(taken.values()))
    return Found(part=part, paths=paths, by=by, version=_version(part, paths))


def _version(part: Part, folders: Sequence[Path]) -> str:
    """The version in the defines of a header; empty where it has none."""
    file, *names = part.version or ("",)
    path = next((folder / file for folder in folders if (folder / file).is_file()), None)
    text = "" if path is None or not names else path.read_text(encoding="utf-8", errors="replace")
    defined: dict[str, str] = dict(re.findall(r"^\s*#define\s+(\w+)\s+(\w+)", text, re.MULTILINE))
    # A number may be the name of another define.
    numbers = [defined.get(defined.get(name, ""), defined.get(name, "")) for name in names]
    if not all(number.isdecimal() for number in numbers):
        return ""
    if names == ["CUDA_VERSION"]:  # 13040 is 13.4
        numbers = [str(int(numbers[0]) // 1000), str(int(numbers[0]) % 1000 // 10)]
    return ".".join(numbers)


def _places(part: Part) -> Iterator[tuple[Path, str]]:
    """The folders that may hold a part, and the origin of each path."""
    paths = sysconfig.get_paths()
    # Wheels with headers may install them beside Python's own.
    roots = (paths["purelib"], *sys.path, sys.prefix, str(Path(paths["include"]).parents[1]))
    for place in part.places:
        if place.startswith("$"):
            name, _, folder = place[1:].partition("/")
            if os.environ.get(name):
                yield from ((Path(each, folder), name) for each in os.environ[name].split(os.pathsep))
        elif place.startswith("/"):
            yield Path(place), "the system"
        else:
            for root in dict.fromkeys(Path(root) for root in roots if root):
                yield from ((path, "a Python package") for path in sorted(root.glob(place), reverse=True))
    yield from ((path, "the system") for path in _SYSTEM)


_SYSTEM = (Path(f"/usr/include/{platform.machine()}-linux-gnu"), Path("/usr/include"))
_CUDA_12 = ("cuda_runtime", "cublas", "cuda_nvrtc", "cuda_nvcc", "cuda_cccl")
_CUDA = (
    *("$CUDA_HOME/include", "$CUDA_PATH/include", "nvidia/cu[0-9]*/include"),  # and not nvidia/cudnn
    *(f"nvidia/{package}/include" for package in _CUDA_12),
    "/usr/local/cuda/include",
)


def _tensorrt_headers() -> str:
    """How to get the headers: NVIDIA publishes them, by version, in a public repository."""
    try:
        tag = f"v{'.'.join(metadata.version('tensorrt').split('.')[:2])}"
    except metadata.PackageNotFoundError:
        tag = "the tag of your version"
    archive = "unpack NVIDIA's archive and set TENSORRT_ROOT, or apt install libnvinfer-dev"
    return f"{archive}, or take include/ of github.com/NVIDIA/TensorRT at {tag}"


_TOOLKIT = "install the CUDA toolkit, or pip install 'mha-deploy[plugin]'"
_NUMBERS = ("MAJOR", "MINOR", "PATCH")
NVCC = Part(
    key="nvcc", title="nvcc", install=_TOOLKIT, files=("nvcc",),
    places=(
        "$CUDA_HOME/bin", "$CUDA_PATH/bin", "$PATH", "nvidia/cu[0-9]*/bin", "nvidia/cuda_nvcc/bin",
        "/usr/local/cuda/bin",
    ),
)  # fmt: skip
PARTS = (
    Part(
        key="tensorrt_include", title="TensorRT", install=_tensorrt_headers(),
        files=("NvInferRuntime.h", "NvInferVersion.h"),
        places=(
            "$TENSORRT_ROOT/include", "$TENSORRT_ROOT", "/usr/local/tensorrt/include",
            "/opt/tensorrt/include",
        ),
        version=("NvInferVersion.h", *(f"NV_TENSORRT_{number}" for number in _NUMBERS)),
    ),
    Part(
        key="cudnn_include", title="cuDNN", install="pip install nvidia-cudnn-cu13",
        files=("cudnn.h", "cudnn_version.h"),
        places=("nvidia/cudnn/include", *_CUDA),
        version=("cudnn_version.h", "CUDNN_MAJOR", "CUDNN_MINOR", "CUDNN_PATCHLEVEL"),
    ),
    Part(
        key="cudnn_frontend_include", title="cudnn-frontend", install="pip install nvidia-cudnn-frontend",
        files=("cudnn_frontend.h",),
        places=("include", "nvidia/cudnn_frontend/include"),
        version=("cudnn_frontend_version.h", *(f"CUDNN_FRONTEND_{number}_VERSION" for number in _NUMBERS)),
    ),
    Part(
        key="cuda_include", title="CUDA", install=_TOOLKIT,
        files=("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h", "cublasLt.h", "nvrtc.h", "nv/target"),
        places=_CUDA,
        version=("cuda.h", "CUDA_VERSION"),
    ),
    NVCC,
)  # fmt: skip


# -- From source to a library in its folder: CMake in a temporary folder, then one rename ----------

# Ninja counts steps, Make reports a percentage.
_PROGRESS = re.compile(r"^\[\s*(?:(\d+)/(\d+)|(\d+)%)\]")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A library that was built; `library` is None where it is for another kind of machine than this."""

    path: Path
    library: PluginLibrary | None


def compile_library(
    parts: Sequence[Found], out: Path, architectures: str = "", on_step: OnStep = silent
) -> Compiled:
    """Compile the library, and put it into a folder once it is complete.

    Kernels are compiled for `architectures`, as `80;90`; default: CMake's own list. `on_step` is called with
    a step, its number and their count as each begins.
    """
    cmake, source = find_program("cmake"), source_folder()
    if cmake is None:
        raise PluginError("CMake is missing.", got="no cmake on PATH", hint="pip install cmake")
    if not (source / "CMakeLists.txt").is_file():
        raise PluginError("The source of the plugin library is not here.", got=source, hint="reinstall it")
    with temporary_folder(out / PREFIX) as folder:
        command = [cmake, "-S", str(source), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release"]
        command += ["-G", "Ninja"] if find_program("ninja") else []
        for found in parts:
            paths = ";".join(str(path.resolve()) for path in found.paths)
            command.append(f"-D{found.part.key.upper()}={paths}")
        command += [f"-DCUDA_ARCHITECTURES={architectures}"] if architectures else []
        _run(command, "configure", on_step)
        jobs = str(os.cpu_count() or 1)
        _run([cmake, "--build", str(folder), "--target", "plugins", "--parallel", jobs], "compile", on_step)
        built = next(folder.glob(f"{PREFIX}*.so"), None)
        if built is None:
            raise PluginError("The build produced no library.", got="none", hint=f"{_REBUILD} again")
        path, native = out / built.name, _is_for_this_machine(built)
        if native:
            read_library(built)  # one that cannot be loaded must not replace one that can
        write_file(path, built.read_bytes(), _is_library, within=out)
        return Compiled(path=path, library=read_library(path) if native else None)


def _is_library(path: Path) -> bool:
    """Whether a file is a plugin library of this tool, for whatever machine."""
    content = read_regular(path, 1 << 32)
    return content.startswith(b"\x7fELF") and b"mha_deploy_register_plugins" in content


def _run(command: Sequence[str], step: str, on_step: OnStep) -> None:
    """Run a command and report its progress; a failure has the last lines of its output."""
    on_step(step, 0, 0)
    last: deque[str] = deque(maxlen=30)
    with start(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for line in process.stdout or ():
            last.append(line.rstrip())
            if match := _PROGRESS.match(line):
                on_step(step, int(match[1] or match[3]), int(match[2] or 100))
    if process.returncode != 0:
        problem = f"The plugin library could not be built: {step} ended with {process.returncode}."
        hint = "mha-deploy plugins build --help names the headers and compilers that can be chosen"
        raise PluginError(problem, got="\n    ".join(["its last lines are", *filter(None, last)]), hint=hint)


def _is_for_this_machine(path: Path) -> bool:
    """Whether a library is for the kind of processor that Python runs on: compilers can be for another."""
    with path.open("rb") as ours, open(sys.executable, "rb") as python:
        return ours.read(20)[18:] == python.read(20)[18:]  # the field of an ELF header for it


# -- Load the library into a TensorRT, once a process ----------------------------------------------

# By TensorRT's module: its registry lives as long as the process.
_loaded: dict[str, Path] = {}


def find_plugins(rt: TensorRT) -> PluginLibrary:
    """The library for a TensorRT, to be loaded in the process that builds or runs an engine."""
    refuse_plugins(rt)
    return library_for(rt.version)


def refuse_plugins(rt: TensorRT) -> None:
    """Refuse a TensorRT that does not take plugins."""
    if not rt.can.plugins:
        got = "its Python API has no plugin layers, and its parser can end the process at one"
        hint = "--attention native, or --backend tensorrt"
        raise PluginError(f"{rt.title} does not take the attention plugin.", got=got, hint=hint)


def load_needed(rt: TensorRT, records: Sequence[Mapping[str, Any]]) -> None:
    """Load the libraries in an engine's manifest."""
    for record in records:
        path = library_needed(record, rt.version).path
        if rt.module.__name__ not in _loaded:
            load_library(rt, path)
        if (earlier := _loaded.setdefault(rt.module.__name__, path)) != path:
            problem = "This process has loaded another plugin library already."
            raise PluginError(problem, got=f"{earlier}, then {path}", hint="use one library in a process")


def fp8_attentions(rt: TensorRT) -> tuple[int, int]:
    """How many attentions in FP8 this process has prepared with a kernel in FP8, and with another one."""
    path = _loaded.get(rt.module.__name__)
    if path is None:
        return 0, 0
    count = getattr(ctypes.CDLL(os.fspath(path)), "mha_deploy_fp8_attentions", None)
    return (0, 0) if count is None else (int(count(1)), int(count(0)))  # an older library has none in FP8


def load_library(rt: TensorRT, path: Path) -> None:
    """Let a library register its plugins with the TensorRT of this process.

    Its code runs in this process: only for libraries of one's own. `IPluginRegistry.load_library` is not the
    same function in 8.6.0 and 8.6.1: where the Python package and the library differ, it does something else.
    """
    try:
        register = ctypes.CDLL(os.fspath(path)).mha_deploy_register_plugins
        register.restype = ctypes.c_char_p
        refusal: bytes | None = register()
        reason = None if refusal is None else refusal.decode(errors="replace")
    except (OSError, AttributeError) as cause:
        reason = str(cause)
    if reason is not None:
        problem = f"{rt.title} cannot load the plugin library."
        hint = "build it for this TensorRT: mha-deploy plugins build"
        raise EngineError(problem, got=f"{path}: {reason}", hint=hint)
