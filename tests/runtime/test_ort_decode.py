"""The decode loop of ONNX Runtime: its CPU kernels on the memory of the fake device, and a GPU."""

from functools import partial

import numpy as np
import ort_on_cpu
import pytest
from gpu_marks import on_gpu
from ort_on_cpu import B, T, drawn, near, opened, single, static_feeds, whole_sequence

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.errors import DeployError
from mha_deploy.judge import judge_case
from mha_deploy.runtime import ort as ort_runtime
from mha_deploy.runtime.ort import OrtCpuRunner, OrtCudaRunner
from mha_deploy.runtime.timing import TimingPlan

QUICK = TimingPlan(samples=100, sample_us=1.0, rounds=3)
LAYERS = [("tiny-preallocated", "onnx"), ("tiny-preallocated", "contrib"), ("tiny-dynamic", "onnx")]
PREALLOCATED = [layer for layer in LAYERS if layer[0] == "tiny-preallocated"]


@pytest.fixture
def device(monkeypatch):
    return ort_on_cpu.install(monkeypatch)


@pytest.fixture
def whole(bundles):
    """The layer over a whole sequence, from an empty cache: output, keys and values."""

    def run(x):
        empty = np.zeros((len(x), 2, 0, 16), np.float32)
        with OrtCpuRunner(single(bundles, "tiny-dynamic")) as runner:
            return list(runner.run({"x": x, "past_key": empty, "past_value": empty}).values())

    return run


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)


def fed(loop, x, sizes):
    return np.concatenate([loop.feed(part) for part in np.split(x, np.cumsum(sizes)[:-1], axis=1)], axis=1)


@pytest.mark.parametrize("layer", LAYERS, ids="-".join)
def test_steps_add_up_to_the_whole_sequence(device, bundles, whole, layer):
    x = drawn(9)
    output, keys, values = whole(x)
    with opened(bundles, layer) as runner:
        with runner.decode_loop(B=B, T=T) as loop:
            assert loop.name == runner.name
            close(fed(loop, x, [5, 1, 1, 1, 1]), output)
            assert loop.lengths.tolist() == [9] * B
            held = loop.cache()
            for got, wanted in zip(held, (keys, values), strict=True):
                close(got[:, :, :9], wanted)
                assert not got[:, :, 9:].any()
        assert held[0].shape[2] == (T if layer[0] == "tiny-preallocated" else 9)
    assert device.is_empty()


@pytest.mark.parametrize("layer", PREALLOCATED, ids="-".join)
def test_batch_elements_advance_by_their_counts(device, bundles, whole, layer):
    x = drawn(6)
    with opened(bundles, layer) as runner, runner.decode_loop(B=B) as loop:
        loop.feed(x[:, :4], np.array([4, 2], np.int32))
        got = [loop.feed(x[:, at : at + 1]) for at in (4, 5)]
        assert loop.lengths.tolist() == [6, 4]
    close(np.concatenate([each[:1] for each in got], axis=1), whole(x[:1])[0][:, 4:])
    short = np.concatenate((x[1:, :2], x[1:, 4:]), axis=1)
    close(np.concatenate([each[1:] for each in got], axis=1), whole(short)[0][:, 2:])


@pytest.mark.parametrize("layer", PREALLOCATED, ids="-".join)
def test_the_caches_that_go_out_are_those_that_came_in(device, bundles, layer, monkeypatch):
    calls = []
    real = ort_runtime.BoundRun.__init__

    def init(self, ort, session, call, outputs, **more):
        calls.append({name: each.buffer.address for name, each in call.tensors.items()})
        real(self, ort, session, call, outputs, **more)

    monkeypatch.setattr(ort_runtime.BoundRun, "__init__", init)
    with opened(bundles, layer) as runner, runner.decode_loop(B=B) as loop:
        loop.feed(drawn(1))
        keys, values = (tensor.buffer.address for tensor in loop._held)
        assert (calls[-1]["key_cache_out"], calls[-1]["value_cache_out"]) == (keys, values)
        device.done.clear()
        device.uploaded = 0
        loop.feed(drawn(1))
        assert device.uploaded == drawn(1).nbytes + B * 4
        assert device.done == ["upload", "upload", "fill", "download"]


@pytest.mark.parametrize(("cuda_graph", "sessions"), [(True, ["0", "1"]), (False, ["0", "0"])])
def test_timed_calls_are_captured_if_they_may(device, bundles, monkeypatch, cuda_graph, sessions):
    opens, ids = [], []
    real = ort_runtime.OrtCudaRunner.open_session
    bound = ort_runtime.BoundRun.__init__

    def open_session(self, *, capture):
        opens.append(str(int(capture)))
        return real(self, capture=capture)

    def init(self, *given, graph_id=ort_runtime.NO_CAPTURE):
        ids.append(graph_id)
        bound(self, *given, graph_id=graph_id)

    monkeypatch.setattr(ort_runtime.OrtCudaRunner, "open_session", open_session)
    monkeypatch.setattr(ort_runtime.BoundRun, "__init__", init)
    with opened(bundles, PREALLOCATED[0], cuda_graph=cuda_graph) as runner:
        timing = runner.time(static_feeds(drawn(1), [3, 5]), QUICK)
    assert timing.graph is cuda_graph
    assert opens == sessions
    captured = list(range(1, timing.slots + 1)) if cuda_graph else [-1] * timing.slots
    assert ids[-timing.slots :] == captured
    assert set(ids[: -timing.slots]) == {-1}


def test_what_onnx_runtime_refuses_is_reported_and_the_decode_loop_goes_on(device, bundles):
    """GroupQueryAttention takes several tokens behind a past only for a single batch element."""
    with opened(bundles, ("tiny-preallocated", "contrib")) as runner, runner.decode_loop(B=B) as loop:
        loop.feed(drawn(3))
        with pytest.raises(DeployError, match="ONNX Runtime failed on these tokens") as caught:
            loop.feed(drawn(2))
        assert "batch" in caught.value.got
        assert loop.lengths.tolist() == [3] * B
        loop.feed(drawn(1))


# -- a run of the layer, without a decode loop -----------------------------------------------------


def is_refused(layer, inputs):
    """Whether GroupQueryAttention refuses these: several tokens behind a past, several batch elements."""
    batch, S = inputs["x"].shape[:2]
    behind = inputs["lengths"].any() if "lengths" in inputs else inputs["past_key"].shape[2] > 0
    return layer[1] == "contrib" and behind and S > 1 and batch > 1


@pytest.mark.sweep(1)
@pytest.mark.parametrize("layer", LAYERS, ids="-".join)
def test_the_golden_cases_pass(device, bundles, layer):
    bundle, judged = bundles(layer[0]), 0
    with opened(bundles, layer) as runner:
        for case in golden_cases(bundle):
            halves = {name for name, array in case.inputs.items() if array.dtype == np.float16}
            feeds = {name: a.astype(np.float32) if name in halves else a for name, a in case.inputs.items()}
            if is_refused(layer, feeds):
                with pytest.raises(DeployError, match="batch"):
                    runner.run(feeds)
                continue
            got = {name: array.astype(np.float16) for name, array in runner.run(feeds).items()}
            verdicts = judge_case(case, got, bundle.manifest.precision)
            assert [(v.case, v.problem) for v in verdicts] == [(case.name, None)] * len(verdicts)
            judged += 1
    assert judged
    assert device.is_empty()


@pytest.mark.parametrize("layer", PREALLOCATED, ids="-".join)
@pytest.mark.parametrize(("lengths", "S"), [([0, 0], 4), ([7, 3], 1)])
def test_a_run_gives_the_caches_with_the_new_entries_in_them(device, bundles, layer, lengths, S):
    given = static_feeds(drawn(S), lengths)
    kept = {name: array.copy() for name, array in given.items()}
    with opened(bundles, layer) as runner:
        assert set(runner.inputs) == set(given)
        with OrtCpuRunner(single(bundles, "tiny-preallocated")) as reference:
            wanted = reference.run(given)
        timing = runner.time(given, QUICK)
        for got in (runner.run(given), runner.run(given), *timing.results):
            assert set(got) == set(wanted)
            for name, array in wanted.items():
                close(got[name], array)
        with pytest.raises(DeployError, match="do not fit"):
            runner.run({**given, "lengths": np.full(B, T, np.int32)})
    for name, array in kept.items():
        np.testing.assert_array_equal(given[name], array)
    assert device.is_empty()


@pytest.mark.parametrize("P", [0, 5])
def test_a_run_with_a_past_and_with_none(device, bundles, whole, P):
    x = drawn(P + 2)
    output, keys, values = whole(x)
    given = {"x": x[:, P:], "past_key": keys[:, :, :P].copy(), "past_value": values[:, :, :P].copy()}
    with opened(bundles, ("tiny-dynamic", "onnx")) as runner:
        timing = runner.time(given, QUICK)
        for got in (runner.run(given), *timing.results):
            close(got["output"], output[:, P:])
            close(got["present_key"], keys)
            close(got["present_value"], values)
    assert device.is_empty()


# -- on a GPU --------------------------------------------------------------------------------------------

GPU = [*LAYERS, ("tiny-dynamic", "contrib")]


@pytest.fixture
def half(bundles):
    """The layer in FP16 over a whole sequence, on the CPU."""
    return partial(whole_sequence, bundles)


@on_gpu
@pytest.mark.parametrize("layer", GPU, ids="-".join)
def test_steps_add_up_to_the_whole_sequence_on_a_gpu(bundles, half, layer):
    x = drawn(20).astype(np.float16)
    output, keys, values = half(x)
    path = bundles(layer[0]).model_path
    with OrtCudaRunner(path, dialect=layer[1]) as runner, runner.decode_loop(B=B, T=T) as loop:
        near(fed(loop, x, [8, *[1] * 12]), output)
        for got, wanted in zip(loop.cache(), (keys, values), strict=True):
            near(got[:, :, :20], wanted)
