"""Engines behind the Python backend, on a GPU: packaged, served over HTTP, and judged as any server is."""

import os
import sys
from pathlib import Path

import pytest

import mha_deploy as md
from mha_deploy.engine.plugins import ENVIRONMENT, PluginError, library_for
from mha_deploy.runtime.tensorrt.versions import load

sys.path.append(str(Path(__file__).parents[1] / "serving"))

from served_bundles import sequences_of_64_steps
from small_server import Kserve, OwnProcess

pytestmark = pytest.mark.gpu


@pytest.fixture
def served(tmp_path):
    """A function that builds an engine, packages it, and gives the URL of a server that has loaded it."""
    pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
    opened = []

    def serve(bundle, runtime):
        if runtime == "plugin":
            options = {"attention": "plugin", "accumulate": "fp32", "optimization_level": 1}
            md.build_engine(bundle, backend="tensorrt", name=runtime, **options)
        package = md.package(bundle, tmp_path / "models", runtimes=[runtime], sequences=4)
        assert any(name.startswith("1/plugins/") for name in package.files) == (runtime == "plugin")
        size = package.max_batch
        model = OwnProcess(package.path / "1", package.runtimes, batched=size > 0, sequences=size)
        opened.append((Kserve(package.path, model), model))
        return opened[-1][0].url

    yield serve
    for server, model in opened:
        server.shutdown()
        server.server_close()
        model.close()


@pytest.fixture(params=["ort-cuda", "plugin"])
def runtime(request):
    """A runtime; the plugin's case is skipped only where no library was named and none was built."""
    if request.param == "plugin" and ENVIRONMENT not in os.environ:
        pytest.importorskip("tensorrt", reason="TensorRT is not installed")
        try:
            library_for(load("tensorrt").version)
        except PluginError as error:
            pytest.skip(f"no plugin library: {error.in_one_line}")
    return request.param


def test_requests_of_several_clients_are_right(served, runtime, tmp_path):
    bundle = md.export("tiny-padding", tmp_path / "bundle", precision="fp16")
    report = md.validate(bundle, url=served(bundle, runtime), clients=(1, 8), requests=40)
    assert report.passed, report.headline
    assert [(point["wrong"], point["errors"]) for point in report.to_dict()["serving"]] == [(0, {})] * 2


@pytest.mark.parametrize("cache", ["preallocated", "dynamic"])
def test_64_decode_steps_of_interleaved_sequences_are_right(served, runtime, cache, tmp_path):
    bundle = sequences_of_64_steps(cache, tmp_path)
    report = md.validate(bundle, url=served(bundle, runtime), clients=(4,), requests=1)
    assert report.passed, report.headline
    (decode,) = report.to_dict()["decode"]
    assert (decode["steps"], decode["outcome"]) == (64, "passed")
