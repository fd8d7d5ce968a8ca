"""A captured trace is true: its oracle is the layer without a cache, its eager results are decoded."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from layer_decoder import Decoder

from mha_deploy.bundle.cases import PlannedTrace, check_trace, read_trace, write_trace
from mha_deploy.bundle.manifest import Source
from mha_deploy.errors import DeployError, ExportError
from mha_deploy.exporter.golden import LayerCapture
from mha_deploy.exporter.oracle import run_in_float64
from mha_deploy.metrics import measure
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.model.spec import Axis
from mha_deploy.reference import build_module
from mha_deploy.reference.inputs import to_numpy

STEPS = 6
PROMPTS = {"dynamic": (5, 5, 5), "preallocated": (5, 2, 7)}
CACHES = tuple(PROMPTS)


def layer(cache, **changes):
    spec = find_spec("tiny-rope")
    added = {
        "preallocated": {"T": Axis(min=32, opt=32, max=32)},
        "dynamic": {"P": Axis(min=0, opt=8, max=32)},
    }
    axes = {**spec.axes, "S": Axis(min=1, opt=8, max=16), **added[cache]}
    return replace(spec, cache=cache, axes=axes, **changes)


def module_of(spec, precision="fp16", **options):
    return build_module(spec, dtype=getattr(torch, PRECISIONS[precision].torch_name), **options)


def captured(cache, precision="fp16", seed=0, name="decode", **changes):
    return decoded(module_of(layer(cache, **changes), precision), precision, seed=seed, name=name)


def decoded(module, precision="fp16", *, seed=0, name="decode", prompt=None, steps=STEPS, **options):
    capture = LayerCapture(module, PRECISIONS[precision], seed, **options)
    planned = PlannedTrace(name=name, prompt=prompt or PROMPTS[module.spec.cache], steps=steps)
    return capture.trace(module.spec, planned)


def valid(trace, name, row):
    """What means something of one row: [tokens, E], or [Hkv, tokens, D]."""
    end = trace.prompt[row] + trace.steps
    return np.s_[row, :end] if name == "output" else np.s_[row, :, :end]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("cache", CACHES)
def test_decode_loop_rounds_and_nothing_else(cache, precision):
    trace = captured(cache, precision)
    check_trace(layer(cache), trace, PRECISIONS[precision])
    for name in trace.oracle:
        for row in range(3):
            at = valid(trace, name, row)
            error = measure(trace.eager[name][at], trace.oracle[name][at])
            assert 0 < error.relative_l2 < 10 * PRECISIONS[precision].roundoff


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "changes", [{}, {"rope": None}, {"window": 3}, {"softcap": 1.5}, {"projections": "packed"}]
)
@pytest.mark.parametrize("cache", CACHES)
def test_the_oracle_is_what_decoding_in_fp64_gives(cache, changes):
    trace, spec = captured(cache, "fp16", **changes), layer(cache, **changes)
    exact = build_module(spec, weights=module_of(spec).state_dict(), dtype=torch.float64)
    for row in range(3):
        x = torch.from_numpy(trace.inputs["x"][row : row + 1, : trace.prompt[row] + STEPS].astype(np.float64))
        decoder = Decoder(exact, 1)
        output = torch.cat([decoder.feed(token) for token in x.split(1, dim=1)], dim=1)
        rows = {"output": output, "key": decoder.keys, "value": decoder.values}
        for name, got in rows.items():
            at = valid(trace, name, row)
            np.testing.assert_allclose(got[0].numpy()[at[1:]], trace.oracle[name][at], rtol=0, atol=1e-12)


@pytest.mark.parametrize("cache", CACHES)
def test_eager_is_the_module_fed_token_by_token(cache):
    trace, module = captured(cache, "fp32"), module_of(layer(cache), "fp32")
    decoder = Decoder(module, 3)
    counts = torch.from_numpy(trace.prompt) if cache == "preallocated" else None
    first = decoder.feed(torch.from_numpy(trace.prefill()["x"]), counts).numpy()
    for row, end in enumerate(trace.prompt):
        assert np.array_equal(first[row, :end], trace.eager["output"][row, :end])
    for step in range(1, STEPS + 1):
        output = decoder.feed(torch.from_numpy(trace.tokens(step)["x"])).numpy()
        assert np.array_equal(output, trace.at_step("output", trace.eager["output"], step))
    assert np.array_equal(decoder.keys[:, :, : trace.length].numpy(), trace.eager["key"])


def test_the_oracle_knows_of_no_cache_and_what_runs_it_can_be_given():
    module, calls = module_of(layer("preallocated")), []

    def run(oracle, arguments, mode):
        calls.append(oracle)
        return run_in_float64(oracle, arguments, mode)

    trace = decoded(module, run_oracle=run)
    assert {oracle.spec.cache for oracle in calls} == {"none"}
    assert all(oracle.q.weight is module.q.weight for oracle in calls)  # rounded as the module's are
    assert np.array_equal(trace.oracle["output"], captured("preallocated").oracle["output"])


def test_the_same_seed_draws_the_same_and_another_name_does_not():
    again = captured("preallocated")
    assert np.array_equal(captured("preallocated").inputs["x"], again.inputs["x"])
    assert not np.array_equal(captured("preallocated", seed=1).inputs["x"], again.inputs["x"])
    assert not np.array_equal(captured("preallocated", name="other").inputs["x"], again.inputs["x"])


@pytest.mark.parametrize("cache", CACHES)
def test_a_captured_trace_can_be_written_and_read(tmp_path, cache):
    trace = captured(cache, "bf16")
    write_trace(tmp_path / "decode.safetensors", trace)
    read = read_trace(tmp_path / "decode.safetensors", layer(cache), PRECISIONS["bf16"], Source.LAYER)
    assert np.array_equal(read.eager["key"], trace.eager["key"])
    assert np.array_equal(read.oracle["key"], trace.oracle["key"])


@pytest.mark.parametrize(
    ("cache", "prompt", "steps", "match"),
    [
        ("dynamic", (5, 2, 7), 2, "one length"),
        ("preallocated", (16,) * 3, 17, "do not fit into the cache"),
        ("dynamic", (16,) * 3, 18, "do not fit into the cache"),
        ("preallocated", (17,) * 3, 1, "Axis S"),
        ("preallocated", (4,) * 9, 1, "Axis B"),
        ("preallocated", (0,) * 3, 1, "needs a prompt"),
    ],
)
def test_what_the_layer_cannot_decode_is_refused(cache, prompt, steps, match):
    with pytest.raises(DeployError, match=match):
        decoded(module_of(layer(cache)), prompt=prompt, steps=steps)


def test_a_module_that_overflows_is_refused():
    module = module_of(layer("dynamic"))
    module.v.weight.mul_(60000)
    with pytest.raises(ExportError, match="overflows"):
        decoded(module, prompt=(4, 4), steps=2)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", CACHES)
def test_a_trace_can_be_captured_on_a_gpu(cache):
    here = captured(cache)
    module = module_of(layer(cache), device="cuda")
    there = decoded(module)
    assert np.array_equal(here.inputs["x"], there.inputs["x"])
    for name in here.oracle:
        np.testing.assert_allclose(there.oracle[name], here.oracle[name], rtol=0, atol=1e-12)
        for row in range(3):
            at = valid(there, name, row)
            assert measure(there.eager[name][at], there.oracle[name][at]).relative_l2 < 2.0**-7
    assert to_numpy(next(module.parameters())).dtype == np.float16
