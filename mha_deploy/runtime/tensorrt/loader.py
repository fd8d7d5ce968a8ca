"""Load an engine or a plugin library into a TensorRT."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mha_deploy.errors import BackendUnavailable
from mha_deploy.runtime.runner import Arrays, TensorInfo
from mha_deploy.runtime.tensorrt.log import Message, collect, errors, logger_for
from mha_deploy.runtime.tensorrt.request import Profile
from mha_deploy.runtime.tensorrt.versions import EngineError, TensorRT

# -- Where TensorRT finds plugins: one registry a process, which libraries add theirs to -----------


def load_library(rt: TensorRT, path: Path) -> None:
    """Add the plugins of a library. Its code runs in this process: only for libraries of one's own.

    The library registers itself. TensorRT's own way (`IPluginRegistry.load_library`) is not the same function
    in 8.6.0 and 8.6.1: where the Python package and the library differ, it does something else.

    Raises:
        EngineError: It cannot be loaded, or TensorRT refuses it.
    """
    why = register_itself(path)
    if why is not None:
        raise EngineError(
            f"{rt.title} cannot load the plugin library.",
            got=f"{path}: {why}",
            hint="build it for this TensorRT: mha-deploy plugins build",
        )


def register_itself(path: Path) -> str | None:
    """Let a library register its plugins with the TensorRT of this process; why it cannot, or None."""
    try:
        register = ctypes.CDLL(os.fspath(path)).mha_deploy_register_plugins
    except (OSError, AttributeError) as cause:
        return str(cause)
    register.restype = ctypes.c_char_p
    reason: bytes | None = register()
    return None if reason is None else reason.decode(errors="replace")


# -- A plan becomes an engine again, and the engine says what it takes, what it gives and what  ----

_TYPES = {
    "HALF": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FLOAT": np.dtype(np.float32),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True, kw_only=True)
class LoadedEngine:
    """An engine on the GPU, and the runtime that it must not outlive."""

    engine: Any
    runtime: Any


def load_engine(rt: TensorRT, plan: bytes, *, host_code: bool = False) -> LoadedEngine:
    """Put a plan on the GPU.

    Args:
        rt: The TensorRT that built it.
        plan: The serialised engine.
        host_code: Allow the runtime code that a version-compatible engine carries. Only for plans of
            one's own: it is executed.

    Raises:
        BackendUnavailable: TensorRT cannot start here.
        EngineError: The engine cannot be loaded here.
    """
    trt = rt.module
    with collect(rt) as messages:
        try:
            runtime = trt.Runtime(logger_for(rt))
        except (TypeError, RuntimeError) as cause:
            # The binding turns a null pointer into TypeError.
            raise BackendUnavailable(
                f"{rt.title} cannot start its runtime here.", got=cause, hint="mha-deploy doctor"
            ) from cause
        if host_code and rt.can.version_compatible:
            runtime.engine_host_code_allowed = True
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise EngineError(
                f"{rt.title} cannot load this engine here.",
                got=reasons(messages),
                hint="load it with the version and on the GPU it was built for, or build it again",
            )
        return LoadedEngine(engine=engine, runtime=runtime)


def reasons(messages: Iterable[Message]) -> str:
    """The errors in one line, as the cause of a failure."""
    return "; ".join(message.text for message in errors(messages)) or "no reason given"


def io_tensors(rt: TensorRT, engine: Any) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """The inputs and the outputs of an engine.

    Raises:
        EngineError: One of them cannot be given as an array on the device.
    """
    trt = rt.module
    inputs: dict[str, TensorInfo] = {}
    outputs: dict[str, TensorInfo] = {}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        if engine.get_tensor_location(name) == trt.TensorLocation.HOST:
            raise EngineError(
                f"The tensor {name} holds shapes, and lives on the host.",
                hint="export the model so that all of its inputs and outputs are data",
            )
        (inputs if is_input else outputs)[name] = _info(engine, name)
    return inputs, outputs


def _info(engine: Any, name: str) -> TensorInfo:
    kind = engine.get_tensor_dtype(name)
    if kind.name not in _TYPES:
        raise EngineError(f"The tensor {name} has a type that is not supported here.", got=kind.name)
    dims = tuple(None if size < 0 else int(size) for size in engine.get_tensor_shape(name))
    return TensorInfo(dtype=_TYPES[kind.name], dims=dims)


def narrow_integers(feeds: Arrays, inputs: Mapping[str, TensorInfo]) -> dict[str, np.ndarray]:
    """INT64 inputs as INT32 where that is what the engine takes.

    Raises:
        EngineError: A number is too large for that.
    """
    return {
        name: _narrowed(name, array)
        if name in inputs and inputs[name].dtype == np.int32 and array.dtype == np.int64
        else array
        for name, array in feeds.items()
    }


def _narrowed(name: str, array: np.ndarray) -> np.ndarray:
    limits = np.iinfo(np.int32)
    if array.size and not (limits.min <= array.min() and array.max() <= limits.max):
        raise EngineError(
            f"Input {name} has numbers beyond INT32, and this engine takes no others.",
            got=f"{array.min()} to {array.max()}",
        )
    return array.astype(np.int32)


def aliased_outputs(rt: TensorRT, engine: Any, outputs: Iterable[str]) -> dict[str, str]:
    """For each output that TensorRT writes in place, the input whose memory it must share."""
    if not rt.can.aliased_outputs:
        return {}
    shared = {name: engine.get_aliased_input_tensor(name) for name in outputs}
    return {name: source for name, source in shared.items() if source}


def profile_ranges(engine: Any, inputs: Mapping[str, TensorInfo]) -> tuple[Profile, ...]:
    """For each optimisation profile, the smallest, usual and largest shape of every input."""
    return tuple(
        {name: _range(engine, name, info, index) for name, info in inputs.items()}
        for index in range(engine.num_optimization_profiles)
    )


def _range(
    engine: Any, name: str, info: TensorInfo, index: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    fixed = tuple(size for size in info.dims if isinstance(size, int))
    if len(fixed) == len(info.dims):  # the profiles need not speak of it
        return fixed, fixed, fixed
    low, usual, high = (
        tuple(int(size) for size in shape) for shape in engine.get_tensor_profile_shape(name, index)
    )
    return low, usual, high


def scratch_bytes(rt: TensorRT, engine: Any) -> int:
    """Device memory that one execution context takes for what lies between the layers."""
    if rt.can.device_memory_v2:
        return int(engine.device_memory_size_v2)
    return int(engine.device_memory_size)
