"""The decode loop of TensorRT: what the cache holds, what is moved, recorded and refused."""

from dataclasses import replace
from functools import partial

import cuda_fake
import numpy as np
import pytest
from decode_layers import FORMS, HKV, PREALLOCATED, B, D, E, T, heads, running_sum, tokens
from fake_engines import VERSIONS, fake
from ort_on_cpu import near, whole_sequence
from tensorrt_fake import ENGINES, FakeEngine
from tensorrt_models import engine_on_gpu

from mha_deploy.engine.engine import open_engine_runner
from mha_deploy.errors import DeployError
from mha_deploy.graph.file import load_graph
from mha_deploy.graph.lower import lower
from mha_deploy.runtime.cuda import Copy2D
from mha_deploy.runtime.ort import OrtCpuRunner
from mha_deploy.runtime.runner import TensorInfo
from mha_deploy.runtime.tensorrt.engine_runner import TensorRTRunner, first_admitting
from mha_deploy.runtime.tensorrt.versions import EngineError
from mha_deploy.runtime.timing import TimingPlan

ALIASING = ("10.16.1", "11.0.0", "11.4.0", "rtx-1.7.1")
PREALLOCATED_FORMS = [b"rows", b"copied", b"in place"]
QUICK = TimingPlan(samples=100, sample_us=1.0, rounds=3)
ITEM = np.dtype(np.float16).itemsize


@pytest.fixture
def device(monkeypatch):
    return cuda_fake.install(monkeypatch)


def opened(plan, version="11.4.0", **more):
    return TensorRTRunner(fake(version), plan, **more)


def loop_of(runner, plan, batch=B):
    return runner.decode_loop(B=batch, T=T if plan == b"dynamic" else None)


def fed(loop, x, sizes):
    return np.concatenate([loop.feed(part) for part in np.split(x, np.cumsum(sizes)[:-1], axis=1)], axis=1)


# -- the numbers -----------------------------------------------------------------------------------------


@pytest.mark.sweep(20)
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize(
    ("version", "plan"),
    [(v, p) for v in VERSIONS for p in FORMS if p != b"in place" or v in ALIASING],
)
def test_steps_add_up_to_the_whole_sequence(device, version, plan, graph):
    x = tokens(7)
    with opened(plan, version, cuda_graph=graph) as runner, loop_of(runner, plan) as loop:
        assert loop.name == runner.name
        assert loop.lengths.tolist() == [0] * B
        np.testing.assert_array_equal(fed(loop, x, [3, 1, 1, 2]), running_sum(x))
        assert loop.lengths.tolist() == [7] * B
        assert loop.lengths.dtype == np.int32
        keys, values = loop.cache()
        assert keys.shape == (B, HKV, 7 if plan == b"dynamic" else T, D)
        np.testing.assert_array_equal(keys[:, :, :7], heads(x))
        np.testing.assert_array_equal(values[:, :, :7], 2 * heads(x))
        assert not keys[:, :, 7:].any(), "what nobody wrote is zero"
    assert device.is_empty()


IN_PLACE = {"key_cache_out": "key_cache", "value_cache_out": "value_cache"}


@pytest.mark.parametrize("graph", [True, False])
def test_a_plugin_writes_a_cache_in_place_where_tensorrt_does_not_know_of_it(device, graph):
    x = tokens(7)
    with opened(b"in place", "8.6.1") as runner, pytest.raises(EngineError, match="must be where"):
        loop_of(runner, b"in place").feed(x)
    with opened(b"in place", "8.6.1", cuda_graph=graph, in_place=IN_PLACE) as runner:
        assert runner.aliases == IN_PLACE
        with loop_of(runner, b"in place") as loop:
            assert loop._spare is loop._held, "one pair of buffers"
            np.testing.assert_array_equal(fed(loop, x, [3, 1, 1, 2]), running_sum(x))


@pytest.mark.parametrize("plan", PREALLOCATED_FORMS)
def test_batch_elements_advance_by_their_counts_and_padding_is_overwritten(device, plan):
    x, counts = tokens(4), np.array([4, 1, 2], np.int32)
    with opened(plan) as runner, loop_of(runner, plan) as loop:
        first = loop.feed(x[:, :3], np.minimum(counts, 3))
        assert loop.lengths.tolist() == [3, 1, 2]
        second = loop.feed(x[:, 3:])
        assert loop.lengths.tolist() == [4, 2, 3]
        keys, _ = loop.cache()
    for b, real in enumerate([3, 1, 2]):
        own = np.concatenate((x[b : b + 1, :real], x[b : b + 1, 3:]), axis=1)
        np.testing.assert_array_equal(first[b, :real], running_sum(own)[0, :real])
        np.testing.assert_array_equal(second[b, 0], running_sum(own)[0, -1])
        np.testing.assert_array_equal(keys[b, :, : real + 1], heads(own)[0])


def test_the_batch_elements_of_a_dynamic_cache_advance_together(device):
    with opened(b"dynamic") as runner, loop_of(runner, b"dynamic") as loop:
        loop.feed(tokens(2), np.array([2, 2, 2], np.int32))
        with pytest.raises(DeployError, match="one length"):
            loop.feed(tokens(2), np.array([2, 1, 2], np.int32))
        assert loop.lengths.tolist() == [2, 2, 2]


# -- what is moved ---------------------------------------------------------------------------------------

ROW = D * ITEM


def test_entries_behind_equal_lengths_are_one_copy_for_each_tensor(device):
    with opened(b"rows") as runner, loop_of(runner, b"rows") as loop:
        loop.feed(tokens(2))
        device.copies_2d.clear()
        loop.feed(tokens(3))
        copy = Copy2D(
            target=2 * ROW,
            target_pitch=T * ROW,
            source=0,
            source_pitch=3 * ROW,
            width=3 * ROW,
            height=B * HKV,
        )
        assert [each for _, _, each in device.copies_2d] == [copy, copy]
        (keys, key_entries, _), (values, value_entries, _) = device.copies_2d
        assert len({keys, key_entries, values, value_entries}) == 4
        assert [keys, values] == [tensor.buffer.address for tensor in loop._held]


def test_entries_behind_ragged_lengths_are_one_copy_for_each_batch_element(device):
    with opened(b"rows") as runner, loop_of(runner, b"rows") as loop:
        loop.feed(tokens(4), np.array([4, 1, 2], np.int32))
        device.copies_2d.clear()
        loop.feed(tokens(2))
        expected = [
            Copy2D(
                target=(b * HKV * T + length) * ROW,
                target_pitch=T * ROW,
                source=b * HKV * 2 * ROW,
                source_pitch=2 * ROW,
                width=2 * ROW,
                height=HKV,
            )
            for b, length in enumerate([4, 1, 2])
        ]
        assert [each for _, _, each in device.copies_2d] == 2 * expected


@pytest.mark.parametrize("plan", [*PREALLOCATED_FORMS, b"dynamic"])
def test_a_step_uploads_its_token_and_the_lengths_and_no_more(device, plan):
    with opened(plan) as runner, loop_of(runner, plan) as loop:
        loop.feed(tokens(1))
        device.uploaded = 0
        device.done.clear()
        loop.feed(tokens(1))
        lengths = 0 if plan == b"dynamic" else B * 4
        assert device.uploaded == B * E * ITEM + lengths
        assert device.done.count("download") == 1
        assert "copy" not in device.done
        assert device.done.count("rows") == (2 if plan == b"rows" else 0)


def test_a_dynamic_cache_goes_to_and_fro_between_two_buffers(device):
    seen = []
    with opened(b"dynamic") as runner, loop_of(runner, b"dynamic") as loop:
        execution = runner.rt.module.IExecutionContext.execute_async_v3

        def spy(self, stream):
            seen.append((dict(self._addresses), dict(self._shapes)))
            return execution(self, stream)

        runner.rt.module.IExecutionContext.execute_async_v3 = spy
        for S in (2, 1, 1):
            loop.feed(tokens(S))
        held = len(device.memory)
        assert device.graphs == 0, "every step has other shapes"
    assert held == 4 + 1 + 2, "two pairs, the lengths, and a frame"
    for name, out in (("past_key", "present_key"), ("past_value", "present_value")):
        came, went = [a[name] for a, _ in seen], [a[out] for a, _ in seen]
        assert came[0] == went[1] == came[2]
        assert went[0] == came[1] == went[2]
        assert came[0] != went[0]
        assert [shapes[name][2] for _, shapes in seen] == [0, 2, 3]


# -- graphs and contexts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [b"rows", b"in place"])
def test_single_tokens_launch_one_recorded_graph(device, plan):
    with opened(plan) as runner, loop_of(runner, plan) as loop:
        loop.feed(tokens(2))
        assert device.graphs == 0, "a prompt is not repeated"
        loop.feed(tokens(1))
        assert device.graphs == 1
        device.done.clear()
        loop.feed(tokens(1))
        loop.feed(tokens(1))
        assert device.graphs == 1
        assert device.done.count("launch") == 2
        assert "execute" not in device.done


def test_a_graph_goes_with_its_context_where_profiles_are_not_shared(device):
    """One profile: prompts and tokens need contexts in turn, and the graph of a dead one must not run."""
    x = tokens(8)
    with opened(b"rows", "8.6.1") as runner:
        runner.profiles = runner.profiles[:1]
        with loop_of(runner, b"rows") as loop:
            got = fed(loop, x, [1, 1, 2, 1, 1, 2])
    np.testing.assert_array_equal(got, running_sum(x))
    assert device.is_empty()


def test_a_single_token_goes_to_the_profile_for_it(device):
    rt = fake()
    with TensorRTRunner(rt, b"rows") as runner, loop_of(runner, b"rows") as loop:
        loop.feed(tokens(2))
        assert rt.module.last_context()._profile == 0
        loop.feed(tokens(1))
        assert rt.module.last_context()._profile == 1
        shapes = {
            "x": (1, 1, E),
            **{name: (1, *dims[1:]) for name, dims in PREALLOCATED.items() if name != "x"},
        }
        assert first_admitting(runner.profiles, shapes, tightest=True) == 1
        with pytest.raises(DeployError, match="No optimization profile"):
            loop_of(runner, b"rows", batch=5).feed(tokens(1, batch=5))


def test_a_runner_runs_before_and_after_a_decode_loop(device):
    feeds = static_feeds([0, 0, 0], 2)
    for version in ("8.6.1", "11.4.0"):
        with opened(b"rows", version) as runner:
            before = runner.run(feeds)
            with loop_of(runner, b"rows") as loop:
                np.testing.assert_array_equal(loop.feed(feeds["x"]), before["output"])
            np.testing.assert_array_equal(runner.run(feeds)["output"], before["output"])
    assert device.is_empty()


def test_outputs_of_another_shape_than_their_memory_are_refused(device, monkeypatch):
    rt = fake()
    with TensorRTRunner(rt, b"rows") as runner, loop_of(runner, b"rows") as loop:
        right = rt.module.IExecutionContext.get_tensor_shape
        larger = lambda self, name: (9, *right(self, name)[1:])  # noqa: E731
        monkeypatch.setattr(rt.module.IExecutionContext, "get_tensor_shape", larger)
        with pytest.raises(EngineError, match="other shapes"):
            loop.feed(tokens(1))


def _ranges(dims, **sizes):
    """A profile from the ranges of its axes."""
    return {
        name: tuple(tuple(sizes[axis][end] if axis in sizes else axis for axis in axes) for end in (0, 1, 1))
        for name, axes in dims.items()
    }


PREALLOCATED_AXES = {
    "x": ("B", "S", E),
    "key_cache": ("B", HKV, T, D),
    "value_cache": ("B", HKV, T, D),
    "lengths": ("B",),
}
DYNAMIC_AXES = {"x": ("B", "S", E), "past_key": ("B", HKV, "P", D), "past_value": ("B", HKV, "P", D)}


@pytest.mark.parametrize(("batch", "most"), [(1, 512), (32, 1), (16, None)])
def test_the_longest_call_is_that_of_the_profiles_for_so_many_batch_elements(device, batch, most):
    with opened(b"rows") as runner:
        runner.profiles = (
            _ranges(PREALLOCATED_AXES, B=(1, 1), S=(1, 512)),
            _ranges(PREALLOCATED_AXES, B=(32, 32), S=(1, 1)),
        )
        with runner.decode_loop(B=batch) as loop:
            assert loop.most_tokens == most


def test_the_longest_call_of_a_dynamic_cache_begins_without_a_past(device):
    with opened(b"dynamic") as runner:
        runner.profiles = (
            _ranges(DYNAMIC_AXES, B=(1, 4), S=(1, 64), P=(0, 0)),
            _ranges(DYNAMIC_AXES, B=(1, 4), S=(1, 512), P=(1, T)),
            _ranges(DYNAMIC_AXES, B=(1, 8), S=(1, 1), P=(0, T)),
        )
        for batch, most in ((4, 64), (8, 1)):
            with runner.decode_loop(B=batch, T=T) as loop:
                assert loop.most_tokens == most


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [*PREALLOCATED_FORMS, b"dynamic"])
def test_a_full_cache_takes_no_more(device, plan):
    with opened(plan) as runner, loop_of(runner, plan) as loop:
        loop.feed(tokens(6))
        with pytest.raises(DeployError, match="do not fit") as caught:
            loop.feed(tokens(3))
        assert caught.value.got == "lengths [6, 6, 6], 3 new tokens, 8 entries"
        loop.feed(tokens(2))
        before = loop.cache()
        with pytest.raises(DeployError, match="do not fit"):
            loop.feed(tokens(1))
        assert loop.lengths.tolist() == [T] * B
        np.testing.assert_array_equal(loop.cache(), before)


def test_padding_needs_room_too(device):
    with opened(b"rows") as runner, loop_of(runner, b"rows") as loop:
        loop.feed(tokens(7))
        with pytest.raises(DeployError, match="do not fit"):
            loop.feed(tokens(2), np.ones(B, np.int32))


@pytest.mark.parametrize(
    "x",
    [tokens(1, batch=2), tokens(1).astype(np.float32), tokens(1)[..., :-1], tokens(0)],
    ids=["batch", "type", "width", "none"],
)
def test_tokens_of_another_shape_or_type_are_refused(device, x):
    with opened(b"rows") as runner, loop_of(runner, b"rows") as loop:
        with pytest.raises(DeployError):
            loop.feed(x)
        assert loop.lengths.tolist() == [0] * B


@pytest.mark.parametrize("counts", [[1, 1], [-1, 1, 1], [1, 3, 1]])
def test_counts_that_are_not_those_of_the_tokens_are_refused(device, counts):
    with (
        opened(b"rows") as runner,
        loop_of(runner, b"rows") as loop,
        pytest.raises(DeployError, match="counts"),
    ):
        loop.feed(tokens(2), np.array(counts, np.int32))


def test_what_cannot_be_decoded_is_refused_and_frees_everything(device):
    with opened(b"plan") as runner, pytest.raises(DeployError, match="no cache"):
        runner.decode_loop(B=2)
    with opened(b"dynamic") as runner, pytest.raises(DeployError, match="maximum length"):
        runner.decode_loop(B=2)
    with opened(b"rows") as runner, pytest.raises(DeployError, match="another size"):
        runner.decode_loop(B=2, T=9)
    with opened(b"rows") as runner:
        positions = TensorInfo(dtype=np.dtype(np.int64), dims=(None,))
        runner.engine_inputs = {**runner.inputs, "positions": positions}
        with pytest.raises(DeployError, match="not those of a decode loop") as caught:
            runner.decode_loop(B=2)
        assert caught.value.got == "['positions']"
    with opened(b"rows") as runner:
        wide = TensorInfo(dtype=np.dtype(np.float32), dims=(None, HKV, None, D))
        runner.engine_outputs = {**runner.engine_outputs, "key_entries": wide}
        with pytest.raises(DeployError, match="different types"):
            runner.decode_loop(B=2)
    assert device.is_empty()


@pytest.mark.parametrize("allocations", range(9))
def test_no_memory_is_lost_when_there_is_too_little(device, allocations):
    with opened(b"rows") as runner:
        device.allocations_left = allocations
        with pytest.raises(DeployError, match="cudaMalloc"), loop_of(runner, b"rows") as loop:
            fed(loop, tokens(3), [1, 2])
        assert not device.memory
    assert device.is_empty()


# -- a run of the layer, without a decode loop -----------------------------------------------------


def static_feeds(lengths, S):
    cache = np.arange(len(lengths) * HKV * T * D).reshape(-1, HKV, T, D) % 5
    return {
        "x": tokens(S, batch=len(lengths)),
        "key_cache": cache.astype(np.float16),
        "value_cache": (cache + 1).astype(np.float16),
        "lengths": np.array(lengths, np.int32),
    }


def scattered(cache, rows, lengths):
    wanted = cache.copy()
    for b, length in enumerate(lengths):
        wanted[b, :, length : length + rows.shape[2]] = rows[b]
    return wanted


@pytest.mark.parametrize("lengths", [[0, 0, 0], [5, 0, 3], [6]])
@pytest.mark.parametrize("plan", PREALLOCATED_FORMS)
def test_a_run_gives_the_caches_with_the_new_entries_in_them(device, plan, lengths):
    given = static_feeds(lengths, 2)
    kept = {name: array.copy() for name, array in given.items()}
    with opened(plan) as runner:
        assert list(runner.outputs) == ["output", "key_cache_out", "value_cache_out"]
        assert runner.outputs["key_cache_out"].dims == (None, HKV, T, D)
        runner.run(static_feeds([1] * len(lengths), 2))
        timing = runner.time(given, QUICK)
        inside = runner.run_in_profile(given, 0)
        for got in (runner.run(given), runner.run(given), inside, *timing.results):
            rows = heads(given["x"])
            wanted = {
                "key_cache_out": scattered(given["key_cache"], rows, lengths),
                "value_cache_out": scattered(given["value_cache"], 2 * rows, lengths),
            }
            assert set(got) == {"output", *wanted}
            for name, array in wanted.items():
                np.testing.assert_array_equal(got[name], array)
            assert np.isfinite(got["output"]).all()
        own = (given["x"].nbytes, given["key_cache"].nbytes, 2 * heads(given["x"]).nbytes)
        moved = 2 * own[0] + given["lengths"].nbytes + 2 * own[1]
        moved += {b"rows": own[2], b"copied": 2 * own[1], b"in place": 0}[plan]
        assert timing.memory_bytes == 200 + len(plan) + moved
    for name, array in kept.items():
        np.testing.assert_array_equal(given[name], array)
    assert device.is_empty()


@pytest.mark.parametrize("graph", [True, False])
def test_the_caches_of_a_timed_call_are_those_of_the_device(device, monkeypatch, graph):
    """Rows that never get there, or to a wrong place, must show in the results."""
    given = static_feeds([2, 2, 2], 2)

    def timed():
        with opened(b"rows", cuda_graph=graph) as runner:
            return runner.time(given, QUICK).results

    rows = heads(given["x"])
    wanted = {
        "key_cache_out": scattered(given["key_cache"], rows, [2, 2, 2]),
        "value_cache_out": scattered(given["value_cache"], 2 * rows, [2, 2, 2]),
    }
    for results in timed():
        for name, array in wanted.items():
            np.testing.assert_array_equal(results[name], array)
    real = cuda_fake.Buffer.copy_2d

    def elsewhere(self, other, copy, stream):
        real(self, other, replace(copy, target=copy.target + ROW), stream)

    for broken in (lambda *given: None, elsewhere):
        monkeypatch.setattr(cuda_fake.Buffer, "copy_2d", broken)
        for results in timed():
            for name, array in wanted.items():
                assert (results[name] != array).any()
                assert np.isfinite(results[name]).all(), "that the engine gave its rows is no excuse"


@pytest.mark.parametrize(("lengths", "copies"), [([2, 2, 2], 2), ([5, 0, 3], 6)])
@pytest.mark.parametrize("graph", [True, False])
def test_every_timed_call_copies_its_entries_once(device, graph, lengths, copies):
    with opened(b"rows", cuda_graph=graph) as runner:
        given = static_feeds(lengths, 2)
        runner.run(given)
        device.copies_2d.clear()
        device.done.clear()
        slots = runner.time(given, QUICK).slots
        calls = device.done.count("execute") - slots - (0 if graph else 1)  # one to settle each, and one run
        if graph:
            assert len(device.copies_2d) == slots * copies, "recorded with the call"
            assert device.done.count("rows") == calls == 0
        else:
            assert calls >= 100
            assert len(device.copies_2d) == device.done.count("rows") == calls * copies
        assert {copy.height for _, _, copy in device.copies_2d} == {B * HKV if copies == 2 else HKV}
        assert len({(to, at) for to, at, _ in device.copies_2d}) == 2 * slots, "keys and values of every slot"


@pytest.mark.parametrize("plan", [b"copied", b"in place", b"dynamic"])
def test_calls_whose_engine_writes_the_cache_copy_no_entries(device, plan):
    given = static_feeds([2, 2, 2], 2)
    if plan == b"dynamic":
        past = heads(tokens(3)).copy()
        given = {"x": given["x"], "past_key": past, "past_value": past}
    with opened(plan) as runner:
        runner.time(given, QUICK)
    assert not device.copies_2d


def test_a_run_of_a_single_token_takes_the_profile_for_it(device):
    rt = fake()
    with TensorRTRunner(rt, b"rows") as runner:
        runner.run(static_feeds([3], 2))
        assert rt.module.last_context()._profile == 0
        runner.run(static_feeds([3], 1))
        assert rt.module.last_context()._profile == 1


@pytest.mark.parametrize("plan", PREALLOCATED_FORMS)
def test_a_run_behind_the_end_of_the_cache_is_refused(device, plan):
    with opened(plan) as runner:
        runner.run(static_feeds([6], 2))
        for lengths in ([7], [-1]):
            with pytest.raises(DeployError, match="do not fit"):
                runner.run(static_feeds(lengths, 2))


@pytest.mark.parametrize("P", [0, 3])
def test_a_run_with_a_past_and_with_none(device, P):
    x, past = tokens(2), tokens(P, start=3)
    given = {"x": x, "past_key": heads(past).copy(), "past_value": 2 * heads(past)}
    with opened(b"dynamic") as runner:
        got = runner.run(given)
        timing = runner.time(given, QUICK)
    everything = np.concatenate((past, x), axis=1)
    for results in (got, *timing.results):
        np.testing.assert_array_equal(results["output"], running_sum(everything)[:, P:])
        np.testing.assert_array_equal(results["present_key"], heads(everything))
    assert device.is_empty()


# -- a real layer: what TensorRT 8.6 is given, computed by ONNX Runtime -----------------------------------


@pytest.fixture
def whole(bundles):
    """The layer over a whole sequence, from an empty cache: output, keys and values."""
    return partial(whole_sequence, bundles)


def drawn(batch, S):
    return np.random.default_rng(S).standard_normal((batch, S, 64)).astype(np.float16)


def compute_with(layer):
    """An engine's work, done by a layer in ONNX Runtime."""

    def compute(tensor):
        for name, array in layer.run({name: tensor(name).copy() for name in layer.inputs}).items():
            tensor(name)[:] = array

    return compute


def test_the_lowering_to_primitives_can_be_decoded(device, bundles, whole, monkeypatch):
    layer = OrtCpuRunner(lower(load_graph(bundles("tiny-preallocated").model_path), "primitives"))
    dims = {
        name: tuple(dim if isinstance(dim, int) else -1 for dim in info.dims)
        for name, info in {**layer.inputs, **layer.outputs}.items()
    }

    def shape(name, shapes):
        batch, S = shapes["x"][:2]
        return (batch, S, 64) if name == "output" else (batch, 2, S, 16)

    def ends(dim):
        return tuple(tuple(most if size < 0 else size for size in dim) for most in (1, 16, 64))

    engine = FakeEngine(
        inputs={name: dims[name] for name in layer.inputs},
        outputs={name: dims[name] for name in layer.outputs},
        profiles=[{name: ends(dims[name]) for name in layer.inputs}],
        shape=shape,
        compute=compute_with(layer),
        integers=("lengths",),
    )
    monkeypatch.setitem(ENGINES, b"primitives", engine)
    x = drawn(2, 12)
    with opened(b"primitives", "8.6.1") as runner, runner.decode_loop(B=2) as loop:
        first = loop.feed(x[:, :6], np.array([6, 3], np.int32))
        steps = [loop.feed(x[:, at : at + 1]) for at in range(6, 11)]
        got = np.concatenate((first, *steps, loop.feed(x[:, 11:])), axis=1)
        keys, values = loop.cache()
    ragged = np.concatenate((x[1:, :3], x[1:, 6:]), axis=1)
    for b, own in ((0, x[:1]), (1, ragged)):
        output, wanted_keys, wanted_values = whole(own)
        length = own.shape[1]
        near(got[b, -6:], output[0, -6:])
        near(keys[b, :, :length], wanted_keys[0])
        near(values[b, :, :length], wanted_values[0])


# -- on a GPU --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tiny-preallocated", "tiny-dynamic"])
def gpu_engine(request, bundles, workshop):
    """An engine of the layer, built with the TensorRT that is here."""
    return engine_on_gpu(workshop, bundles(request.param))


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False])
def test_steps_add_up_to_the_whole_sequence_on_a_gpu(gpu_engine, whole, graph):
    x = drawn(3, 40)
    output, keys, values = whole(x)
    with open_engine_runner(gpu_engine[1], cuda_graph=graph) as runner, runner.decode_loop(B=3, T=64) as loop:
        near(fed(loop, x, [17, *[1] * 10, 3, *[1] * 10]), output)
        for got, wanted in zip(loop.cache(), (keys, values), strict=True):
            near(got[:, :, :40], wanted)
            assert not got[:, :, 40:].any()


@pytest.mark.gpu
def test_ragged_batches_are_decoded_on_a_gpu(gpu_engine, whole):
    if gpu_engine[0].manifest.spec.cache == "dynamic":
        return  # whose rows have one length
    x = drawn(2, 12)
    with open_engine_runner(gpu_engine[1]) as runner, runner.decode_loop(B=2) as loop:
        loop.feed(x[:, :6], np.array([6, 3], np.int32))
        got = np.concatenate([loop.feed(x[:, at : at + 1]) for at in range(6, 12)], axis=1)
    near(got[:1], whole(x[:1])[0][:, 6:])
    near(got[1:], whole(np.concatenate((x[1:, :3], x[1:, 6:]), axis=1))[0][:, 3:])
