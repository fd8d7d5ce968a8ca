"""The plugin library: how it is compiled, found and loaded."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
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
from mha_deploy.errors import BackendUnavailable
from mha_deploy.runtime.tensorrt.versions import EngineError, TensorRT

# -- A built library and its description, which a process of its own reads: a broken one can crash -

PREFIX = "libmha_deploy_plugins_trt"

_REBUILD = "mha-deploy plugins build"
_READ_INFO = """
import ctypes, sys
info = ctypes.CDLL(sys.argv[1]).mha_deploy_plugins_info
info.restype = ctypes.c_char_p
sys.stdout.buffer.write(info())
"""


class PluginError(BackendUnavailable):
    """A plugin library is missing, broken, or not the one that is needed."""


class _Plugin(msgspec.Struct, frozen=True):
    name: str
    version: str
    namespace: str


class _Info(msgspec.Struct, frozen=True, kw_only=True):
    """What a library says of itself: TensorRT's interface, the versions of the headers, its GPUs."""

    version: str
    interface: str
    tensorrt: str
    cudnn_frontend: str
    plugins: tuple[_Plugin, ...]
    architectures: tuple[int | str, ...]


class PluginLibrary(_Info, frozen=True, kw_only=True):
    """A library that can be loaded on this machine; an engine needs the version that it was built with."""

    path: Path
    sha256: str

    @property
    def tensorrt_major(self) -> str:
        """The TensorRT that can load it: `8`, `10`, `11`."""
        return major(self.tensorrt)

    def brings(self, name: str, version: str) -> bool:
        """Whether it has a plugin."""
        return any((each.name, each.version) == (name, version) for each in self.plugins)

    def record(self) -> dict[str, Any]:
        """The library as an engine's manifest records it. The path is this machine's own."""
        kept = {name: self.to_dict()[name] for name in ("version", "sha256", "tensorrt", "plugins")}
        return {"library": self.path.name, **kept}

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        data: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self, enc_hook=str))
        return {"library": self.path.name, **data}


def major(version: str) -> str:
    """The first number of a version."""
    return version.split(".")[0]


def read_library(path: Path) -> PluginLibrary:
    """Read the description of a library.

    Raises:
        PluginError: It cannot be loaded here, or is not one of ours.
    """
    if not path.is_file():
        raise PluginError("There is no plugin library here.", got=path, hint=_REBUILD)
    path = path.resolve()
    return _read(path, path.stat().st_mtime_ns)


@cache
def _read(path: Path, changed: int) -> PluginLibrary:
    """The description, read once as long as the file does not change, in a process that may crash."""
    command = [sys.executable, "-I", "-c", _READ_INFO, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(
            "The plugin library cannot be read.", got=f"{path}: {error}", hint=_REBUILD
        ) from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        last = (lines or [f"it ended with {done.returncode}"])[-1]
        raise PluginError("The plugin library cannot be loaded here.", got=last, hint=_REBUILD)
    try:
        info = msgspec.json.decode(done.stdout, type=_Info)
    except msgspec.MsgspecError as error:
        raise PluginError(
            "The plugin library has no valid description.", got=f"{path}: {error}", hint=_REBUILD
        ) from error
    known = msgspec.structs.asdict(info) | {"architectures": tuple(map(str, info.architectures))}
    return PluginLibrary(**known, path=path, sha256=sha256(path))


# -- The folders of the plugin's source and of built libraries -------------------------------------

ENVIRONMENT = "MHA_DEPLOY_PLUGINS"
"""The variable with the path of a library, or of a folder of them, into which they are built as well."""

_PACKAGE = Path(__file__).resolve().parents[1]


def source_folder() -> Path:
    """The C++ source: inside an installed wheel, or `plugins/` of a checkout."""
    installed = _PACKAGE / "native"
    return installed if installed.is_dir() else _PACKAGE.parent / "plugins"


def cache_folder() -> Path:
    """The folder of libraries that belongs to this version of the tool."""
    root = os.environ.get("XDG_CACHE_HOME")
    base = Path(root) if root else Path.home() / ".cache"
    return base / "mha-deploy" / "plugins" / __version__


def places() -> list[Path]:
    """Where libraries are searched for, in this order."""
    named = os.environ.get(ENVIRONMENT)
    return [*([Path(named).expanduser()] if named else []), cache_folder()]


def build_folder() -> Path:
    """Where `plugins build` writes by default."""
    first = places()[0]
    return first.parent if first.suffix == ".so" else first


# -- The plugin libraries of this machine, and the one that fits a TensorRT ------------------------


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A file that should be a library; `problem` where it cannot be used."""

    path: Path
    library: PluginLibrary | None = None
    problem: str = ""


def candidates() -> list[Candidate]:
    """Every library of this machine, in the order of the search."""
    found = []
    for path in _files():
        try:
            found.append(Candidate(path=path, library=read_library(path)))
        except PluginError as error:
            found.append(Candidate(path=path, problem=error.in_one_line))
    return found


def library_for(version: str) -> PluginLibrary:
    """The library that a TensorRT of this version can load: the first of its major version.

    Raises:
        PluginError: There is none; the error lists those of other versions.
    """
    others = []
    for path in _files():
        # A library of another TensorRT has its version in the name, and need not be loaded.
        if path.name.startswith(PREFIX) and path.stem != f"{PREFIX}{major(version)}":
            others.append(str(path))
            continue
        library = read_library(path)
        if library.tensorrt_major == major(version):
            return library
        others.append(f"{path} (TensorRT {library.tensorrt})")
    looked = ", ".join(str(place) for place in places())
    raise PluginError(
        f"There is no plugin library for TensorRT {major(version)} here.",
        got=f"looked in {looked}" + (f"; found {', '.join(others)}" if others else ""),
        hint=f"build it with `mha-deploy plugins build`, or name one in {ENVIRONMENT}",
    )


def library_needed(record: Mapping[str, Any], version: str) -> PluginLibrary:
    """The library of an entry of an engine manifest's `plugins`, for a TensorRT of this version.

    Raises:
        PluginError: There is none, or one of another version.
    """
    library = library_for(version)
    if library.version != record["version"]:
        raise PluginError(
            "The engine needs another version of the plugin library.",
            got=f"{library.path} is {library.version}, the engine was built with {record['version']}",
            hint="build the engine again, or install the mha-deploy that built it",
        )
    missing = [each for each in record["plugins"] if not library.brings(each["name"], each["version"])]
    if missing:
        raise PluginError(
            "The plugin library lacks what the engine needs.",
            got=", ".join(f"{each['name']} version {each['version']}" for each in missing),
            hint="build the engine again",
        )
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
    reasons = []
    for record in records:
        try:
            library_needed(record, version)
        except PluginError as error:
            reasons.append(error.in_one_line)
    return reasons


def other_builds(records: Sequence[Mapping[str, Any]], version: str) -> list[str]:
    """Notes on libraries here that an engine can use, but was not built with."""
    notes = []
    for record in records:
        with contextlib.suppress(PluginError):  # `why_missing` reports those
            library = library_needed(record, version)
            if library.sha256 != record["sha256"]:
                notes.append(
                    f"the plugin library here is another build of version {library.version} "
                    f"({library.sha256[:12]}, the engine was built with {record['sha256'][:12]})"
                )
    return notes


# -- What the library is compiled against: TensorRT, cuDNN, cudnn-frontend, CUDA, nvcc -------------

Places = Iterator[tuple[Path, str]]  # folders, and the origin of each path


@dataclass(frozen=True, kw_only=True)
class Part:
    """Headers or a compiler that the build needs.

    `files` are those that its folders must contain together, `places` where it may be, the likeliest first,
    and `version` names the file and the defines with its version.
    """

    key: str
    title: str
    install: str
    files: tuple[str, ...] = ()
    places: Callable[[], Places] = lambda: iter(())
    version: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        """Its variable in CMake."""
        return self.key.upper()

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
    """Find everything that the library is compiled against; folders may be given by the keys of `PARTS`.

    Raises:
        PluginError: Something is missing; the error lists all of it, and where it was searched for.
    """
    found = [_found(part, given.get(part.key)) for part in PARTS]
    missing = [part for part, each in zip(PARTS, found, strict=True) if each is None]
    if missing:
        lines = []
        for part in missing:
            looked = ", ".join(dict.fromkeys(str(path) for path, _ in part.places()))
            lines.append(f"{part.title} ({', '.join(part.files)}), looked in {looked}")
        raise PluginError(
            "Headers that the plugin library needs are missing.",
            got="; ".join(lines),
            hint="; ".join(f"{part.title}: {part.install}, or {part.option} FOLDER" for part in missing),
        )
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
        *((str(path / "nvcc"), by) for path, by in _packages("nvidia/cu[0-9]*/bin", "nvidia/cuda_nvcc/bin")),
        ("/usr/local/cuda/bin/nvcc", "the system"),
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
    """The folders of a part, as few as possible; None where a file is in none of them."""
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


def _version(part: Part, folders: Sequence[Path]) -> str:
    """The version in the defines of a header; empty where it has none."""
    file, *names = part.version
    path = next((folder / file for folder in folders if (folder / file).is_file()), None)
    text = "" if path is None else path.read_text(encoding="utf-8", errors="replace")
    defined: dict[str, str] = dict(re.findall(r"^\s*#define\s+(\w+)\s+(\w+)", text, re.MULTILINE))
    # A number may be the name of another define.
    numbers = [defined.get(defined.get(name, ""), defined.get(name, "")) for name in names]
    if not all(number.isdigit() for number in numbers):
        return ""
    if names == ["CUDA_VERSION"]:  # 13040 is 13.4
        numbers = [str(int(numbers[0]) // 1000), str(int(numbers[0]) % 1000 // 10)]
    return ".".join(numbers)


def _packages(*patterns: str) -> Places:
    """Folders of Python packages that match a pattern, newest name first."""
    roots = dict.fromkeys(Path(path) for path in (sysconfig.get_paths()["purelib"], *sys.path) if path)
    for pattern in patterns:
        for root in roots:
            yield from ((path, "a Python package") for path in sorted(root.glob(pattern), reverse=True))


def _system() -> Places:
    yield Path(f"/usr/include/{platform.machine()}-linux-gnu"), "the system"
    yield Path("/usr/include"), "the system"


def _tensorrt() -> Places:
    if root := os.environ.get("TENSORRT_ROOT"):
        yield Path(root) / "include", "TENSORRT_ROOT"
        yield Path(root), "TENSORRT_ROOT"
    yield Path("/usr/local/tensorrt/include"), "the system"
    yield Path("/opt/tensorrt/include"), "the system"
    yield from _system()


def _cuda() -> Places:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name]) / "include", name
    # nvidia/cu13, and not nvidia/cudnn; the others are the packages for CUDA 12.
    twelve = (f"nvidia/{name}/include" for name in ("cuda_runtime", "cublas", "cuda_nvrtc", "cuda_nvcc"))
    yield from _packages("nvidia/cu[0-9]*/include", *twelve, "nvidia/cuda_cccl/include")
    yield Path("/usr/local/cuda/include"), "the system"
    yield from _system()


def _cudnn() -> Places:
    yield from _packages("nvidia/cudnn/include")
    yield from _system()
    yield from _cuda()


def _frontend() -> Places:
    # Its wheel installs them beside Python's own headers, or into the packages, depending on pip's options.
    yield from _packages("include", "nvidia/cudnn_frontend/include")
    yield Path(sys.prefix) / "include", "a Python package"
    yield Path(sysconfig.get_paths()["include"]).parent, "a Python package"
    yield from _system()


def _tensorrt_headers() -> str:
    """How to get the headers: NVIDIA publishes them, by version, in a public repository."""
    try:
        tag = f"v{'.'.join(metadata.version('tensorrt').split('.')[:2])}"
    except metadata.PackageNotFoundError:
        tag = "the tag of your version"
    return (
        "unpack NVIDIA's archive and set TENSORRT_ROOT, or apt install libnvinfer-dev, or take include/ of "
        f"github.com/NVIDIA/TensorRT at {tag}"
    )


PARTS = (
    Part(
        key="tensorrt_include",
        title="TensorRT",
        files=("NvInfer.h", "NvInferVersion.h"),
        install=_tensorrt_headers(),
        places=_tensorrt,
        version=("NvInferVersion.h", "NV_TENSORRT_MAJOR", "NV_TENSORRT_MINOR", "NV_TENSORRT_PATCH"),
    ),
    Part(
        key="cudnn_include",
        title="cuDNN",
        files=("cudnn.h", "cudnn_version.h"),
        install="pip install nvidia-cudnn-cu13",
        places=_cudnn,
        version=("cudnn_version.h", "CUDNN_MAJOR", "CUDNN_MINOR", "CUDNN_PATCHLEVEL"),
    ),
    Part(
        key="cudnn_frontend_include",
        title="cudnn-frontend",
        files=("cudnn_frontend.h",),
        install="pip install nvidia-cudnn-frontend",
        places=_frontend,
        version=(
            "cudnn_frontend_version.h",
            *(f"CUDNN_FRONTEND_{part}_VERSION" for part in ("MAJOR", "MINOR", "PATCH")),
        ),
    ),
    Part(
        key="cuda_include",
        title="CUDA",
        files=("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h", "cublasLt.h", "nvrtc.h", "nv/target"),
        install="install the CUDA toolkit, or pip install 'mha-deploy[plugin]'",
        places=_cuda,
        version=("cuda.h", "CUDA_VERSION"),
    ),
)

NVCC = Part(
    key="nvcc",
    title="nvcc",
    install="install the CUDA toolkit, or pip install 'mha-deploy[plugin]', or --nvcc PATH",
)


# -- From source to a library in its folder: CMake in a temporary folder, then one rename ----------

OnStep = Callable[[str, int, int], None]

_LAST_LINES = 30
_MACHINE = slice(18, 20)  # of an ELF header: what processor the file is for
# Ninja counts steps, Make reports a percentage.
_PROGRESS = re.compile(r"^\[\s*(?:(\d+)/(\d+)|(\d+)%)\]")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A library that was built; `library` is None where it is for another kind of machine than this."""

    path: Path
    library: PluginLibrary | None


def compile_library(
    parts: Sequence[Found], out: Path, architectures: str = "", on_step: OnStep = lambda *step: None
) -> Compiled:
    """Compile the library, and put it into a folder once it is complete.

    Kernels are compiled for `architectures`, as `80;90`; default: CMake's own list. `on_step` is called with
    a step, its number and their count as each begins.

    Raises:
        PluginError: Something that is needed is missing, or the compiler fails.
    """
    cmake = shutil.which("cmake")
    if cmake is None:
        raise PluginError("CMake is missing.", got="no cmake on PATH", hint="pip install cmake")
    source = source_folder()
    if not (source / "CMakeLists.txt").is_file():
        raise PluginError("The source of the plugin library is not here.", got=source, hint="reinstall it")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=out) as folder:
        command = [cmake, "-S", str(source), "-B", folder, "-DCMAKE_BUILD_TYPE=Release"]
        if shutil.which("ninja"):
            command += ["-G", "Ninja"]
        for found in parts:
            folders = ";".join(str(path.resolve()) for path in found.paths)
            command.append(f"-D{found.part.variable}={folders}")
        if architectures:
            command.append(f"-DCUDA_ARCHITECTURES={architectures}")
        _run(command, "configure", on_step)
        jobs = str(os.cpu_count() or 1)
        _run([cmake, "--build", folder, "--target", "plugins", "--parallel", jobs], "compile", on_step)
        return _moved(Path(folder), out)


def _run(command: Sequence[str], step: str, on_step: OnStep) -> None:
    """Run a command and report its progress; a failure has the last lines of its output."""
    on_step(step, 0, 0)
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for line in process.stdout or ():
            last.append(line.rstrip())
            match = _PROGRESS.match(line)
            if match is not None:
                on_step(step, int(match[1] or match[3]), int(match[2] or 100))
    if process.returncode != 0:
        lines = "\n    ".join(line for line in last if line)
        raise PluginError(
            f"The plugin library could not be built: {step} ended with {process.returncode}.",
            got=f"its last lines are\n    {lines}",
            hint="mha-deploy plugins build --help names the headers and compilers that can be chosen",
        )


def _moved(folder: Path, out: Path) -> Compiled:
    built = sorted(folder.glob(f"{PREFIX}*.so"))
    if len(built) != 1:
        raise PluginError(
            "The build produced no library.",
            got=", ".join(path.name for path in built) or "none",
            hint="mha-deploy plugins build again, with an empty --out",
        )
    native = _is_for_this_machine(built[0])
    if native:
        read_library(built[0])  # one that cannot be loaded must not replace one that can
    path = out / built[0].name
    os.replace(built[0], path)
    return Compiled(path=path, library=read_library(path) if native else None)


def _is_for_this_machine(path: Path) -> bool:
    """Whether a library is for the kind of processor that Python runs on: compilers can be for another."""
    with path.open("rb") as ours, open(sys.executable, "rb") as python:
        return ours.read(20)[_MACHINE] == python.read(20)[_MACHINE]


# -- Load the library into a TensorRT, once a process ----------------------------------------------

# The registry belongs to the module of a TensorRT, and lives as long as the process.
_loaded: dict[str, PluginLibrary] = {}


def find_plugins(rt: TensorRT) -> PluginLibrary:
    """The library for a TensorRT, to be loaded in the process that builds or runs an engine.

    Raises:
        PluginError: There is none, or this TensorRT takes no plugins.
    """
    refuse_plugins(rt)
    return library_for(rt.version)


def load_plugins(rt: TensorRT) -> PluginLibrary:
    """Find the library for a TensorRT, and load it."""
    return _load(rt, find_plugins(rt))


def load_needed(rt: TensorRT, records: Sequence[Mapping[str, Any]]) -> list[PluginLibrary]:
    """Load the libraries in an engine's manifest."""
    return [_load(rt, library_needed(record, rt.version)) for record in records]


def refuse_plugins(rt: TensorRT) -> None:
    """Refuse a TensorRT that does not take plugins."""
    if not rt.can.plugins:
        raise PluginError(
            f"{rt.title} does not take the attention plugin.",
            got="its Python API has no plugin layers, and its parser can end the process at one",
            hint="--attention native, or --backend tensorrt",
        )


def _load(rt: TensorRT, library: PluginLibrary) -> PluginLibrary:
    earlier = _loaded.get(rt.module.__name__)
    if earlier is not None and earlier.path.resolve() == library.path.resolve():
        return earlier
    if earlier is not None:
        raise PluginError(
            "This process has loaded another plugin library already.",
            got=f"{earlier.path}, then {library.path}",
            hint="use one library in a process",
        )
    load_library(rt, library.path)
    _loaded[rt.module.__name__] = library
    return library


def load_library(rt: TensorRT, path: Path) -> None:
    """Let a library register its plugins with the TensorRT of this process.

    Its code runs in this process: only for libraries of one's own. `IPluginRegistry.load_library` is not the
    same function in 8.6.0 and 8.6.1: where the Python package and the library differ, it does something else.

    Raises:
        EngineError: It cannot be loaded, or TensorRT refuses it.
    """
    try:
        register = ctypes.CDLL(os.fspath(path)).mha_deploy_register_plugins
        register.restype = ctypes.c_char_p
        refusal: bytes | None = register()
        reason = None if refusal is None else refusal.decode(errors="replace")
    except (OSError, AttributeError) as cause:
        reason = str(cause)
    if reason is not None:
        raise EngineError(
            f"{rt.title} cannot load the plugin library.",
            got=f"{path}: {reason}",
            hint="build it for this TensorRT: mha-deploy plugins build",
        )
