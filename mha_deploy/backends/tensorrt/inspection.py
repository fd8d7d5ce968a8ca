"""What an engine says of itself when it is loaded: needs the GPU it was built for."""

from __future__ import annotations

from mha_deploy.backends.tensorrt.kernels import Kernel
from mha_deploy.backends.tensorrt.layers import kernels_from_inspector
from mha_deploy.backends.tensorrt.loaded import load_engine
from mha_deploy.backends.tensorrt.versions import TensorRT


def inspect_kernels(rt: TensorRT, plan: bytes, *, host_code: bool = False) -> list[Kernel]:
    """Load an engine and read its kernels from TensorRT's inspector.

    Args:
        rt: The TensorRT that built it.
        plan: The serialised engine.
        host_code: Allow the runtime code that a version-compatible engine carries. Only for plans of
            one's own: it is executed.

    Raises:
        EngineError: The engine cannot be loaded here.
    """
    return kernels_from_inspector(inspector_json(rt, plan, host_code=host_code))


def inspector_json(rt: TensorRT, plan: bytes, *, host_code: bool = False) -> str:
    """Load an engine and return the inspector's JSON as it is."""
    trt = rt.module
    loaded = load_engine(rt, plan, host_code=host_code)
    engine = loaded.engine
    inspector = engine.create_engine_inspector()
    return str(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
