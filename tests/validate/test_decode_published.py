"""Published models that generate: 64 tokens in ONNX Runtime on the CPU are those of the whole sequence."""

import pytest
import torch

from mha_deploy.bundle.traces import plan_trace
from mha_deploy.export.exporter import canonical_from_module
from mha_deploy.export.golden import LayerCapture
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.precision import find_precision
from mha_deploy.model.spec import Axis
from mha_deploy.reference import build_module
from mha_deploy.runtime import open_runner
from mha_deploy.validate.decode import HostDecodeLoop, run_decode_loop

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

AXES = {"B": Axis(min=1, opt=1, max=2), "S": Axis(min=1, opt=24, max=64)}


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        pytest.param("llama-3-8b", "preallocated", marks=pytest.mark.slow),
        pytest.param("llama-3-8b", "dynamic", marks=pytest.mark.slow),
        pytest.param("falcon-7b", "dynamic", marks=pytest.mark.slow),
        pytest.param("falcon-7b", "preallocated", marks=pytest.mark.slow),
        pytest.param("llama-2-70b", "preallocated", marks=pytest.mark.slow),
    ],
)
def test_64_tokens_are_those_of_the_whole_sequence(name, cache):
    spec = find_spec(name).with_axes(AXES).with_cache(cache)
    spec = spec.with_axes(
        {"P": Axis(min=0, opt=64, max=127)} if cache == "dynamic" else {"T": Axis(min=96, opt=96, max=96)}
    )
    precision = find_precision("fp16")
    module = build_module(spec, dtype=torch.float16, path="plain")
    planned = plan_trace(spec)
    trace = LayerCapture(module, precision, seed=0).trace(spec.model, planned)
    assert trace.steps == 64
    with open_runner("ort-cpu", canonical_from_module(module)) as runner:
        report = run_decode_loop(HostDecodeLoop(runner, spec, trace.B), trace, spec, precision)
    assert report.passed, report.failures[:3]
    assert len(report.errors) == 64
