"""A twin of an engine that gives out values from inside: built like it, run once and forgotten."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from mha_deploy.backends.runner import Runner
from mha_deploy.backends.tensorrt import load
from mha_deploy.bundle import Bundle
from mha_deploy.engine.adhoc import engine_opener
from mha_deploy.engine.lowered import lowered_for
from mha_deploy.engine.options import EngineOptions, profile_shapes
from mha_deploy.engine.record import Engine


def lowered_opener(engine: Engine, bundle: Bundle) -> Callable[[ir.Model], Runner]:
    """A function that builds a lowered graph with the profiles of an engine, and loads it."""
    rt, manifest = load(engine.manifest.backend), bundle.manifest
    profiles = [profile_shapes(manifest.spec, ranges) for ranges in engine.manifest.ranges]
    return engine_opener(rt, manifest.precision.name, profiles, engine.manifest.plugins)


def twin_opener(engine: Engine, bundle: Bundle) -> Callable[[ir.Model], Runner]:
    """A function that builds a variation of a bundle's graph as an engine of it was built, and loads it.

    Args:
        engine: The engine, of a TensorRT that is here.
        bundle: Its bundle.
    """
    rt, open_lowered = load(engine.manifest.backend), lowered_opener(engine, bundle)
    way = engine.manifest.attention
    options = EngineOptions(
        backend=engine.manifest.backend,
        allow_decomposed=True,
        attention=way["chosen"],
        accumulate=way["accumulate"],
    )
    return lambda model: open_lowered(lowered_for(rt, model, options)[0])
