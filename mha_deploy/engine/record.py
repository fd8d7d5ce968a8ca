"""An engine on disk: the plan, and beside it a manifest that says what it is and what it fits."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mha_deploy.backends.tensorrt.volumes import LargeTensor
from mha_deploy.bundle import MANIFEST, sha256
from mha_deploy.engine.options import BACKENDS
from mha_deploy.errors import BundleError
from mha_deploy.spec_parts import Axis

FORMAT = 1
FOLDER = "engines"
NATIVE_ATTENTION = {"asked": "native", "chosen": "native", "accumulate": "fp16"}


@dataclass(frozen=True, kw_only=True)
class EngineManifest:
    """What an engine is.

    Args:
        backend: `tensorrt` or `tensorrt-rtx`.
        version: Version of the TensorRT that built it; another one cannot load it.
        gpu: The GPU it was built on, or None where it was compiled for named targets.
        targets: Compute capabilities it was compiled for, as SM89; none for all from 8.0 on (RTX).
        model: Name of the model.
        precision: The precision asked for.
        dialect: How attention was written for the parser.
        profiles: Axis ranges of each optimisation profile, as min:opt:max.
        profile_names: What each profile is called: its number, or `prefill` and `decode`.
        bundle_sha256: Hash of the manifest of the bundle it was built from.
        engine_sha256: Hash of the plan.
        engine_bytes: Size of the plan.
        seconds: How long the build took.
        strongly_typed: Whether its types are those of the graph.
        verdict: Fusion and precision, with their evidence.
        kernels: The kernels, as the best source tells them.
        options: What the builder was asked for.
        findings: What the check before the build found.
        notes: What a reader should know.
        attention: Who computes attention: `chosen` (`native` or `plugin`), how the projections sum up
            (`accumulate`), and where it was `asked` to be measured, what each way cost.
        plugins: The plugin libraries it needs: file name, version, hash, TensorRT and plugins of each.
        in_place: From each output that may lie in the memory of an input to that input: there the plugin
            writes only the new rows of a cache, elsewhere it copies the whole of it.
        large_tensors: Tensors that TensorRT said it cannot hold at the largest sizes; a call that needs one
            is refused.
    """

    backend: str
    version: str
    gpu: Mapping[str, str] | None
    targets: list[str]
    model: str
    precision: str
    dialect: str
    profiles: list[Mapping[str, str]]
    bundle_sha256: str
    engine_sha256: str
    engine_bytes: int
    seconds: float
    strongly_typed: bool
    verdict: Mapping[str, Any]
    kernels: list[Mapping[str, Any]]
    options: Mapping[str, Any]
    findings: Sequence[Mapping[str, Any]]
    notes: list[str]
    profile_names: list[str] = field(default_factory=list)
    attention: Mapping[str, Any] = field(default_factory=lambda: dict(NATIVE_ATTENTION))
    plugins: list[Mapping[str, Any]] = field(default_factory=list)
    in_place: Mapping[str, str] = field(default_factory=dict)
    large_tensors: list[Mapping[str, Any]] = field(default_factory=list)
    format: int = field(default=FORMAT)

    def profile_name(self, index: int) -> str:
        """What a profile is called."""
        return self.profile_names[index] if index < len(self.profile_names) else str(index)

    @property
    def ranges(self) -> list[dict[str, Axis]]:
        """The axis ranges of every optimisation profile."""
        return [
            {name: Axis.parse(text, name=name) for name, text in profile.items()} for profile in self.profiles
        ]

    @property
    def fused_count(self) -> tuple[int, int]:
        """How many attentions are one fused kernel in every profile, of how many."""
        names = {node["node"] for node in self.verdict["nodes"]}
        broken = {node["node"] for node in self.verdict["nodes"] if node["status"] != "fused"}
        return len(names - broken), len(names)

    @property
    def fusion_told(self) -> str:
        """How many attentions are fused, in words; what no source could tell is not called unfused."""
        fused, count = self.fused_count
        return fusion_told(fused, count, self.verdict["nodes"])

    @property
    def all_fused(self) -> bool:
        """Whether every attention is one fused kernel in every profile."""
        fused, count = self.fused_count
        return fused == count > 0

    @property
    def is_in_precision(self) -> bool:
        """Whether the engine was shown to be in the precision asked for."""
        return self.verdict["precision"]["status"] == f"really-{self.precision}"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine whose manifest has been read."""

    path: Path
    manifest: EngineManifest

    def check_bundle(self, bundle: Path) -> None:
        """Refuse an engine that was built from another bundle."""
        if sha256(bundle / MANIFEST) != self.manifest.bundle_sha256:
            raise BundleError(
                "The engine was built from another bundle.",
                got=self.path,
                hint=f"mha-deploy build-engine {bundle} --backend {self.manifest.backend} --overwrite",
            )


def fusion_told(fused: int, count: int, nodes: Iterable[Mapping[str, Any]]) -> str:
    """`10/12 fused`, or `10/12 fused, 2 unknown`.

    Args:
        fused: Attentions that are one fused kernel in every profile.
        count: All attentions.
        nodes: The verdict on each attention in each profile.
    """
    statuses: dict[str, set[str]] = {}
    for node in nodes:
        statuses.setdefault(node["node"], set()).add(node["status"])
    unknown = sum("unknown" in found and "decomposed" not in found for found in statuses.values())
    return f"{fused}/{count} fused" + (f", {unknown} unknown" if unknown else "")


def engine_path(bundle: Path, name: str) -> Path:
    """Where the engine of that name lies in a bundle."""
    if not name or Path(name).name != name or name.startswith("."):
        raise BundleError(
            "This cannot be the name of an engine.", got=name, hint="letters, digits and dashes"
        )
    return bundle / FOLDER / f"{name}.engine"


def manifest_path(engine: Path) -> Path:
    """Where the manifest of an engine lies: beside it."""
    return engine.with_suffix(".json")


def open_engine(path: Path) -> Engine:
    """Read an engine's manifest, and check that the plan is the one it speaks of."""
    beside = manifest_path(path)
    try:
        data = json.loads(beside.read_text(encoding="utf-8"))
        if data.get("format") != FORMAT:
            raise BundleError(
                "The engine has another format.", got=f"format {data.get('format')!r}", hint="rebuild it"
            )
        manifest = EngineManifest(**data)
        _check_shape(manifest)
    except FileNotFoundError as error:
        raise BundleError(
            "There is no engine with a manifest here.", got=path, hint="mha-deploy build-engine BUNDLE"
        ) from error
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise BundleError(
            "The engine's manifest cannot be read.", got=f"{beside}: {error}", hint="rebuild it"
        ) from error
    if not path.is_file():
        raise BundleError("The engine is missing beside its manifest.", got=path, hint="rebuild it")
    if path.stat().st_size != manifest.engine_bytes or sha256(path) != manifest.engine_sha256:
        raise BundleError(
            "The engine was changed or cut short after it was built.", got=path, hint="rebuild it"
        )
    return Engine(path=path, manifest=manifest)


def engines_of(bundle: Path) -> list[Engine]:
    """The engines of a bundle, by name."""
    return [open_engine(path) for path in sorted((bundle / FOLDER).glob("*.engine"))]


def _check_shape(manifest: EngineManifest) -> None:
    """Touch what readers will use, so that a foreign manifest fails here and not in their hands."""
    if manifest.backend not in BACKENDS or not isinstance(manifest.options, Mapping):
        raise ValueError(f"backend {manifest.backend!r}")
    float(manifest.seconds), int(manifest.engine_bytes)
    for node in manifest.verdict["nodes"]:
        if node["status"] not in ("fused", "decomposed", "unknown"):
            raise ValueError(f"status {node['status']!r}")
        ", ".join([node["node"], node["reason"], node["source"], *node["kernels"]])
    for key in ("status", "reason", "offenders", "notes"):
        len(manifest.verdict["precision"][key])
    len(manifest.verdict["disagreements"])
    for library in manifest.plugins:
        ", ".join([library["library"], library["version"], library["sha256"], library["tensorrt"]])
        ", ".join(f"{each['name']} {each['version']}" for each in library["plugins"])
    ", ".join([*manifest.in_place, *manifest.in_place.values()])
    for tensor in manifest.large_tensors:
        LargeTensor.from_dict(tensor)
    ", ".join(manifest.attention[key] for key in NATIVE_ATTENTION)
    for kernel in manifest.kernels:
        ", ".join([kernel["name"], kernel["type"], *kernel["dtypes"], *kernel["nodes"]])


def write_engine(path: Path, plan: bytes, manifest: EngineManifest) -> Engine:
    """Write plan and manifest; the manifest comes last, so that half an engine is never taken for one."""
    path.parent.mkdir(exist_ok=True)
    beside = manifest_path(path)
    text = json.dumps(vars(manifest), indent=2) + "\n"
    with _written(path, plan) as new_plan, _written(beside, text.encode()) as new_manifest:
        # Both are on the disk. Between the two renames the old manifest must not vouch for the new plan.
        beside.unlink(missing_ok=True)
        os.replace(new_plan, path)
        os.replace(new_manifest, beside)
    return Engine(path=path, manifest=manifest)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file under a temporary name and rename it; nothing is left if that fails."""
    with _written(path, data) as temporary:
        os.replace(temporary, path)


@contextmanager
def _written(path: Path, data: bytes) -> Iterator[Path]:
    """The data in a temporary file beside its place; removed unless somebody renames it."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.partial-", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        temporary.chmod(0o644)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
