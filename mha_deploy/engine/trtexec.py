"""The `trtexec` command that builds the same engine from the lowered graph, for whoever leaves with it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mha_deploy.engine.engine import EngineManifest
from mha_deploy.errors import DeployError
from mha_deploy.graph.rules import TENSORRT_RTX
from mha_deploy.runtime.tensorrt.versions import EXTERNAL_LIBRARIES

_HARDWARE = {"ampere-plus": "ampere+", "same-compute-capability": "sameComputeCapability"}


class TrtexecCommand(str):
    """The command, and what of the build it cannot express."""

    arguments: tuple[str, ...]
    notes: tuple[str, ...]

    def __new__(cls, arguments: Sequence[str], notes: Sequence[str] = ()) -> TrtexecCommand:
        """A command of these arguments."""
        made = super().__new__(cls, shlex.join(arguments))
        made.arguments, made.notes = tuple(arguments), tuple(notes)
        return made


def refuse_rtx(backend: str) -> None:
    """Refuse a backend whose engines trtexec does not build."""
    if backend == TENSORRT_RTX:
        problem = "trtexec builds for TensorRT, not for TensorRT-RTX."
        hint = "--backend tensorrt; or --save-onnx alone, and TensorRT-RTX's own tool, tensorrt_rtx"
        raise DeployError(problem, got=backend, hint=hint)


def trtexec_command(manifest: EngineManifest, onnx: Path, engine: Path) -> TrtexecCommand:
    """The command for an engine, from its manifest; `onnx` is the graph that `--save-onnx` wrote."""
    refuse_rtx(manifest.backend)
    options, major = manifest.options, int(manifest.version.partition(".")[0])
    found = ["trtexec", f"--onnx={onnx}", f"--saveEngine={engine}"]
    notes = list[str]()
    if not manifest.strongly_typed:
        found += ["--fp16"] if manifest.precision == "fp16" else []
        found += ["--int8"] if options.get("has_int8") else []
    else:
        found.append("--stronglyTyped")
    found.append("--noTF32")
    if major < 11:
        found.append(f"--tacticSources={','.join(f'-{name}' for name in EXTERNAL_LIBRARIES)}")
    if options.get("precision_constraints"):
        found.append("--precisionConstraints=obey")
        notes.append("the layers that the graph keeps in FP32 have to be named with --layerPrecisions")
    found += _profiles(options.get("profiles") or [])
    if (level := options.get("optimization_level")) is not None:
        found.append(f"--builderOptimizationLevel={level}")
    if (mib := options.get("workspace_mib")) is not None:
        found.append(f"--memPoolSize=workspace:{mib}M")
    if options.get("version_compatible"):
        found.append("--versionCompatible")
    if compatible := options.get("hardware_compatible"):
        found.append(f"--hardwareCompatibilityLevel={_HARDWARE[compatible]}")
    if options.get("weight_streaming"):
        found.append("--allowWeightStreaming")
    if options.get("refit") == "all":
        found.append("--refit")
    elif options.get("refit"):
        notes.append("trtexec has no flag for weights that can be put back if they are the same")
    if options.get("allow_decomposed"):
        notes.append("trtexec cannot allow attention without a fused kernel to be built from several")
    found += [f"--dynamicPlugins={library['library']}" for library in manifest.plugins]
    return TrtexecCommand([*found, "--profilingVerbosity=detailed", "--skipInference"], notes)


def _profiles(profiles: Sequence[Mapping[str, Any]]) -> list[str]:
    """The shapes of every optimization profile; several are numbered."""
    found = list[str]()
    for index, profile in enumerate(profiles):
        found += [f"--profile={index}"] if len(profiles) > 1 else []
        for place, kind in enumerate(("min", "opt", "max")):
            shapes = (f"{name}:{'x'.join(map(str, shape[place]))}" for name, shape in profile.items())
            found.append(f"--{kind}Shapes={','.join(shapes)}")
    return found
