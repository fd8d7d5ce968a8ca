"""Where new KV-cache entries go, and the one call to CUDA that copies them there."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from mha_deploy.bundle.cases import with_entries
from mha_deploy.errors import DeployError
from mha_deploy.runtime import cuda
from mha_deploy.runtime.decode_loop import (
    CacheShape,
    EngineCache,
    check_room,
    engine_cache,
    entry_copies,
    presented_outputs,
    presented_results,
    total_length,
    written_in_place,
)
from mha_deploy.runtime.runner import TensorInfo

HALF = np.dtype(np.float16)


class HostRuntime:
    """The calls of CUDA's runtime that buffers need, on memory of the host, as strict as the real ones."""

    cudaMemcpyKind = SimpleNamespace(
        cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3
    )

    def __init__(self):
        self.calls, self.memory = [], {}

    def cudaMalloc(self, size):
        block = ctypes.create_string_buffer(size)
        self.memory[ctypes.addressof(block)] = block
        return 0, ctypes.addressof(block)

    def cudaFree(self, address):
        del self.memory[address]
        return (0,)

    def cudaMemsetAsync(self, address, byte, size, stream):
        assert size
        ctypes.memset(address, byte, size)
        return (0,)

    def cudaMemcpyAsync(self, target, source, size, kind, stream):
        ctypes.memmove(target, source, size)
        return (0,)

    def cudaMemcpy2DAsync(self, target, target_pitch, source, source_pitch, width, height, kind, stream):
        if width > min(target_pitch, source_pitch):
            return (12,)  # cudaErrorInvalidPitchValue
        assert kind == self.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self.calls.append((height, width))
        for row in range(height):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
        return (0,)


STREAM = SimpleNamespace(raw=None, synchronize=lambda: None)


@pytest.fixture
def runtime(monkeypatch):
    host = HostRuntime()
    monkeypatch.setattr(cuda, "_runtime", lambda: host)
    return host


def buffer_of(array):
    buffer = cuda.Buffer(array.nbytes)
    buffer.upload(array, STREAM)
    return buffer


def numbers(*shape):
    return np.random.default_rng(len(shape)).integers(0, 99, shape).astype(HALF)


@pytest.mark.parametrize(
    ("lengths", "calls"), [([0, 0, 0], 1), ([5, 5, 5], 1), ([6, 0, 3], 3), ([6, 6, 0], 3), ([4], 1)]
)
@pytest.mark.parametrize("S", [1, 4])
def test_entries_get_to_their_places_on_the_device_as_on_the_host(runtime, lengths, calls, S):
    B, lengths = len(lengths), np.array(lengths, np.int32)
    shape = CacheShape(B=B, Hkv=2, T=10, D=8, dtype=HALF)
    cache, rows = numbers(*shape.first(10)), numbers(B, 2, S, 8)
    target, source = buffer_of(cache), buffer_of(rows)
    for copy in entry_copies(shape, lengths, S):
        target.copy_2d(source, copy, STREAM)
    wanted = with_entries(cache, rows, lengths)
    assert (wanted != cache).any()
    np.testing.assert_array_equal(target.download(cache.shape, HALF, STREAM), wanted)
    assert runtime.calls == [(2 * B // calls, S * 8 * 2)] * calls


def test_a_pitch_that_cuda_refuses_is_an_error(runtime):
    buffer = cuda.Buffer(64)
    copy = cuda.Copy2D(target=0, target_pitch=4, source=0, source_pitch=8, width=8, height=2)
    with pytest.raises(cuda.CudaError, match="cudaMemcpy2DAsync"):
        buffer.copy_2d(buffer, copy, STREAM)


def test_an_empty_buffer_has_an_address_and_takes_empty_arrays(runtime):
    empty = np.empty((2, 3, 0, 4), HALF)
    first, second = buffer_of(empty), cuda.Buffer(0)
    assert first.address
    second.copy_from(first, STREAM)
    second.fill(cuda.UNWRITTEN, STREAM)
    assert second.download(empty.shape, HALF, STREAM).shape == empty.shape
    first.free(), second.free()
    assert not runtime.memory


def test_the_real_bindings_take_the_arguments_in_this_order():
    runtime = pytest.importorskip("cuda.bindings.runtime")
    reported = runtime.cudaMemcpy2DAsync.__doc__.partition("\n")[0].partition("(")[2]
    names = [argument.partition(":")[0].split()[-1] for argument in reported.rstrip(")").split(",")]
    assert names == ["dst", "dpitch", "src", "spitch", "width", "height", "kind", "stream"]


def test_the_host_scatters_into_a_copy():
    cache, rows = np.zeros((2, 1, 4, 2), HALF), numbers(2, 1, 2, 2)
    got = with_entries(cache, rows, np.array([0, 2], np.int32))
    np.testing.assert_array_equal(got[0, :, :2], rows[0])
    np.testing.assert_array_equal(got[1, :, 2:], rows[1])
    assert not cache.any()
    assert not got[0, :, 2:].any()


def infos(*names):
    return {name: TensorInfo(dtype=HALF, dims=(None, len(name))) for name in names}


PREALLOCATED = infos("x", "key_cache", "value_cache", "lengths")
DYNAMIC = infos("x", "past_key", "past_value")


@pytest.mark.parametrize(
    ("inputs", "outputs", "form"),
    [
        (PREALLOCATED, ("output", "key_entries", "value_entries"), EngineCache.ENTRIES),
        (PREALLOCATED, ("output", "key_cache_out", "value_cache_out"), EngineCache.PREALLOCATED),
        (DYNAMIC, ("output", "present_key", "present_value"), EngineCache.DYNAMIC),
        (infos("x"), ("output",), None),
        (infos("x"), ("output", "present_key", "present_value"), None),
    ],
)
def test_the_form_is_defined_by_what_comes_in_and_goes_out(inputs, outputs, form):
    assert engine_cache(inputs, infos(*outputs)) is form


def test_entries_are_presented_as_caches():
    outputs = infos("output", "key_entries", "value_entries")
    presented = presented_outputs(PREALLOCATED, outputs)
    assert list(presented) == ["output", "key_cache_out", "value_cache_out"]
    assert presented["key_cache_out"] == PREALLOCATED["key_cache"]
    assert presented["output"] == outputs["output"]
    assert presented_outputs(DYNAMIC, infos("output")) == infos("output")
    plain = {"output": np.ones(2)}
    assert presented_results({}, plain) == plain


def test_what_is_written_in_place():
    wanted = {"key_cache_out": "key_cache", "value_cache_out": "value_cache"}
    assert written_in_place(PREALLOCATED, infos("output", *wanted)) == wanted
    assert written_in_place(PREALLOCATED, infos("output", "weights", *wanted)) == {}
    assert written_in_place(DYNAMIC, infos("output", "present_key", "present_value")) == {}


@pytest.mark.parametrize(
    ("lengths", "S", "total"), [([0, 0], 5, 5), ([0, 0], 1, 8), ([3, 0], 5, 8), ([3, 3], 1, 8)]
)
def test_only_a_prompt_into_an_empty_cache_has_a_total_length_of_its_own(lengths, S, total):
    got = total_length(np.array(lengths, np.int32), S, 8)
    assert (got.shape, got.dtype, int(got)) == ((), np.int32, total)


def test_room_is_checked_where_there_is_a_preallocated_cache():
    feeds = {
        "x": np.zeros((1, 3, 4)),
        "key_cache": np.zeros((1, 1, 8, 4)),
        "lengths": np.array([5], np.int32),
    }
    check_room(feeds)
    check_room({"x": feeds["x"], "past_key": np.zeros((1, 1, 0, 4))})
    for length in (6, -1):
        with pytest.raises(DeployError, match="do not fit"):
            check_room({**feeds, "lengths": np.array([length], np.int32)})
