"""TensorRT 8.6 to 11 and TensorRT-RTX behind one door: build an engine, and say what it became.

`build_engine` turns a model into a `BuiltEngine`; `engine_verdict` judges its kernels. What the versions
differ in is in `versions.py`, and which of their names are used is in `surface.py`.
"""

from __future__ import annotations

from mha_deploy.runtime.tensorrt.build import build_engine, build_with, inspect_kernels, inspector_json
from mha_deploy.runtime.tensorrt.kernels import (
    EngineTensor,
    Kernel,
    kernels_from_inspector,
    kernels_from_log,
    kernels_from_plan,
    kernels_from_profile,
    plan_targets,
)
from mha_deploy.runtime.tensorrt.log import Message, collect, logger_for, members, read_names, trt_name
from mha_deploy.runtime.tensorrt.request import (
    BuildRequest,
    BuiltEngine,
    Profile,
    capabilities_of,
    parse_targets,
)
from mha_deploy.runtime.tensorrt.verdict import (
    EngineVerdict,
    NodeVerdict,
    Offender,
    PrecisionVerdict,
    WrittenTypes,
    engine_verdict,
    fusion_verdict,
    precision_verdict,
    written_types,
)
from mha_deploy.runtime.tensorrt.versions import Capabilities, EngineError, TensorRT, load, probe

__all__ = [
    "BuildRequest",
    "BuiltEngine",
    "Capabilities",
    "EngineError",
    "EngineTensor",
    "EngineVerdict",
    "Kernel",
    "Message",
    "NodeVerdict",
    "Offender",
    "PrecisionVerdict",
    "Profile",
    "TensorRT",
    "WrittenTypes",
    "build_engine",
    "build_with",
    "capabilities_of",
    "collect",
    "engine_verdict",
    "fusion_verdict",
    "inspect_kernels",
    "inspector_json",
    "kernels_from_inspector",
    "kernels_from_log",
    "kernels_from_plan",
    "kernels_from_profile",
    "load",
    "logger_for",
    "members",
    "parse_targets",
    "plan_targets",
    "precision_verdict",
    "probe",
    "read_names",
    "trt_name",
    "written_types",
]
