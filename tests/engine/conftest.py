"""Engines of TensorRT-RTX that tests only read: each is built once for all workers."""

import functools

import pytest
from bundle_edit import copy_of

from mha_deploy.bundle.folder import open_bundle
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.engine.engine import open_engine
from mha_deploy.options import EngineOptions


@pytest.fixture(scope="session")
def rtx_engine(bundles, workshop):
    """A function that gives an engine in a bundle of its own; FP32 is decomposed."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")

    @functools.cache
    def engine(name="tiny-gqa", precision="fp16"):
        def build(folder):
            options = EngineOptions(
                backend="tensorrt-rtx", targets="8.9", allow_decomposed=precision == "fp32"
            )
            engine_from_bundle(open_bundle(copy_of(bundles(name, precision), folder / "bundle")), options)

        folder, _ = workshop.thing(f"engine-{name}-{precision}", build)
        return open_engine(folder / "bundle" / "engines" / "tensorrt-rtx.engine")

    return engine
