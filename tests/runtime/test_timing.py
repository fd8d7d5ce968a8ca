"""The clock's arithmetic, and when warming up ends; the GPU's own clock is tested where there is one."""

from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from mha_deploy.errors import BackendUnavailable
from mha_deploy.runtime import cuda, timing
from mha_deploy.runtime import cuda as nvml
from mha_deploy.runtime.cuda import Conditions
from mha_deploy.runtime.timing import Timing, TimingPlan, settles, slots_past_cache

MIB = 2**20


def a_timing(samples, **changes):
    facts = {
        "calls_per_sample": 5,
        "slots": 40,
        "graph": True,
        "stable": True,
        "host_us": 3.0,
        "gpu": "Some GPU",
        "conditions": Conditions(sm_mhz=1980),
    }
    return Timing(samples_us=tuple(samples), **{**facts, **changes})


def test_inputs_rotate_past_the_cache_twice():
    assert slots_past_cache(3 * MIB, 60 * MIB) == 40
    assert slots_past_cache(7 * MIB, 50 * MIB) == 15
    assert slots_past_cache(1, 60 * MIB) == 64, "small inputs: as many copies as are sensible"
    assert slots_past_cache(10**10, 60 * MIB) == 2, "at least two, or nothing rotates"
    assert slots_past_cache(0, 60 * MIB) == 64


def test_warming_up_ends_when_three_rounds_agree():
    falling = iter([50.0, 30.0, 20.0, 20.1, 20.2, 1.0])
    seen = []

    def measure():
        seen.append(next(falling))
        return seen[-1]

    assert settles(measure, 0.02, 20)
    assert seen == [50.0, 30.0, 20.0, 20.1, 20.2]


def test_what_never_agrees_is_called_unstable():
    values = iter(float(2**i) for i in range(100))
    assert not settles(lambda: next(values), 0.02, 7)
    assert next(values) == 2.0**7, "it stops after the rounds it was given"


def test_two_rounds_that_agree_by_chance_are_not_enough():
    values = iter([10.0, 10.0, 20.0, 20.0, 30.0, 30.0])
    assert not settles(lambda: next(values), 0.02, 6)


def test_percentiles_and_the_record_for_json():
    record = a_timing(range(1, 102), results=({"output": np.zeros(3)},), memory_bytes=7)
    assert (record.p50, record.percentile(0.9), record.percentile(0.99)) == (51.0, 91.0, 100.0)
    data = msgspec.to_builtins(record.record)
    assert (data["p50_us"], data["p90_us"], data["p99_us"], data["samples"]) == (51.0, 91.0, 100.0, 101)
    assert data["conditions"]["sm_mhz"] == 1980
    assert "results" not in data
    assert data["memory_bytes"] == 7


def no_gpu():
    return cuda.find_gpu() is None


@pytest.mark.parametrize("visible", ["", "-1"])
def test_gpus_that_are_hidden_from_cuda_are_not_opened(monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(cuda, "_call", lambda *arguments: pytest.fail("CUDA was called"))
    with pytest.raises(BackendUnavailable, match="no CUDA GPU") as caught:
        cuda.open_gpu.__wrapped__()
    assert "CUDA_VISIBLE_DEVICES" in str(caught.value.got)


@pytest.mark.skipif(not no_gpu(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_reported():
    with pytest.raises(BackendUnavailable, match="no CUDA GPU") as caught:
        cuda.open_gpu()
    assert caught.value.exit_code == 3
    assert caught.value.hint


def test_without_nvml_the_conditions_are_unknown():
    gpu = cuda.Gpu(
        name="none", compute_capability="0.0", l2_bytes=0, memory_bytes=0, pci_bus="ffffffff:ff:ff.0"
    )
    assert nvml.read_conditions(gpu) == Conditions()


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.fixture
def gpu():
    found = cuda.find_gpu()
    if found is None:
        pytest.skip("there is no CUDA GPU, or cuda-bindings are not installed")
    return found


@contextmanager
def new_stream():
    """A stream of our own for as long as it is needed."""
    cuda.open_gpu()
    stream = cuda.Stream()
    try:
        yield stream
    finally:
        stream.close()


@pytest.mark.gpu
def test_a_buffer_gives_back_what_it_took(gpu):
    array = np.arange(1000, dtype=np.float32)
    with new_stream() as stream:
        first, second = cuda.Buffer(array.nbytes), cuda.Buffer(array.nbytes)
        first.upload(array, stream)
        second.copy_from(first, stream)
        np.testing.assert_array_equal(second.download((1000,), array.dtype, stream), array)
        second.fill(0, stream)
        assert not second.download((1000,), array.dtype, stream).any()
        first.free(), second.free()


@pytest.mark.gpu
def test_an_array_of_another_size_is_refused(gpu):
    with new_stream() as stream:
        buffer = cuda.Buffer(16)
        with pytest.raises(cuda.CudaError, match="does not fit"):
            buffer.upload(np.zeros(5, np.float32), stream)
        buffer.free()


@pytest.mark.gpu
def test_a_graph_does_its_work_when_it_is_launched_and_not_before(gpu):
    with new_stream() as stream:
        source, target = cuda.Buffer(4096), cuda.Buffer(4096)
        source.fill(1, stream), target.fill(0, stream)
        piece = cuda.Copy2D(target=64, target_pitch=32, source=0, source_pitch=32, width=16, height=2)

        def work():
            target.copy_from(source, stream)
            source.fill(2, stream)
            target.copy_2d(source, piece, stream)

        graph = cuda.capture(work, stream)
        assert not target.download((4096,), np.dtype(np.uint8), stream).any()
        graph.launch(stream)
        expected = np.ones(4096, np.uint8)
        expected[64:80] = expected[96:112] = 2  # after the other copy, by the order of the calls
        np.testing.assert_array_equal(target.download((4096,), expected.dtype, stream), expected)
        graph.close(), source.free(), target.free()


@pytest.mark.gpu
def test_a_failure_while_capturing_leaves_the_stream_usable(gpu):
    def fail():
        raise ValueError("no")

    with new_stream() as stream:
        with pytest.raises(ValueError, match="no"):
            cuda.capture(fail, stream)
        buffer = cuda.Buffer(16)
        buffer.fill(3, stream)
        assert (buffer.download((16,), np.dtype(np.uint8), stream) == 3).all()
        buffer.free()


@pytest.mark.gpu
def test_twice_the_work_takes_about_twice_the_time(gpu):
    """A copy of 256 MiB against one of 512: the clock must see the difference. No bound on how fast.

    Others may use the GPU during one of the two; a clock that is wrong is wrong every time.
    """
    with new_stream() as stream:
        a, b = cuda.Buffer(512 * MIB), cuda.Buffer(512 * MIB)
        half_a, half_b = cuda.Buffer(256 * MIB), cuda.Buffer(256 * MIB)
        plan = TimingPlan(samples=100)

        def measured(target, source):
            launch = lambda slot: target.copy_from(source, stream)  # noqa: E731
            return timing.measure_latency(launch, 2, stream, gpu, plan, graph=False)

        for _ in range(5):
            whole, half = measured(b, a), measured(half_b, half_a)
            if 1.5 < whole.p50 / half.p50 < 2.5:
                break
        assert 1.5 < whole.p50 / half.p50 < 2.5
        assert len(whole.samples_us) == 100
        assert whole.conditions.sm_mhz is None or whole.conditions.sm_mhz > 0
        for buffer in (a, b, half_a, half_b):
            buffer.free()


@pytest.mark.gpu
def test_a_load_goes_before_the_samples(gpu):
    """So that a power limit has lowered the clock before the first sample."""
    with new_stream() as stream:
        a, b, calls = cuda.Buffer(256 * MIB), cuda.Buffer(256 * MIB), [0, 0]
        for index, load_ms in enumerate((0.0, 200.0)):

            def launch(slot, index=index):
                calls[index] += 1
                b.copy_from(a, stream)

            plan = TimingPlan(samples=100, rounds=3, load_ms=load_ms)
            measured = timing.measure_latency(launch, 2, stream, gpu, plan, graph=False)
        assert (calls[1] - calls[0]) * measured.p50 > 100_000
        a.free()
        b.free()
