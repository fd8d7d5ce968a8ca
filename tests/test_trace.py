"""Decode traces survive the way to disk bit by bit, and what is no trace, or not a layer's, is refused."""

from dataclasses import replace

import numpy as np
import pytest
from golden_made import in_precision, made_baselines

from mha_deploy.bundle.cases import (
    DecodeTrace,
    Reference,
    check_steps,
    check_trace,
    prefill_calls,
    read_arrays,
    read_trace,
    write_arrays,
    write_trace,
)
from mha_deploy.bundle.manifest import Source
from mha_deploy.errors import BundleError, DeployError
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.model.spec import Axis

B, STEPS, PROMPT = 3, 4, (5, 2, 7)
L = max(PROMPT) + STEPS
FP16 = PRECISIONS["fp16"]


def layer(cache="preallocated", **axes):
    spec = find_spec("tiny-rope")
    added = {
        "preallocated": {"T": Axis(min=64, opt=64, max=64)},
        "dynamic": {"P": Axis(min=0, opt=8, max=63)},
    }
    return replace(spec, cache=cache, axes={**spec.axes, **added[cache], **axes})


def trace(precision="fp16", prompt=PROMPT, steps=STEPS, **changes):
    spec, rng, length = layer(), np.random.default_rng(0), max(prompt) + steps
    shapes = {"output": (B, length, spec.E), "key": (B, spec.Hkv, length, spec.D)}
    shapes["value"] = shapes["key"]
    oracle = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    numbers = PRECISIONS[precision].numpy
    made = DecodeTrace(
        name="decode",
        cache=spec.kv_cache,
        inputs={"x": rng.standard_normal(shapes["output"]).astype(numbers)},
        prompt=np.array(prompt, np.int32),
        steps=steps,
        oracle=Reference(oracle, Source.LAYER),
        eager=in_precision(oracle, precision),
        baselines=made_baselines(oracle, precision),
    )
    return replace(made, **changes)


def bits(array):
    return array.tobytes(), array.dtype, array.shape


# -- what is fed ---------------------------------------------------------------------------------


def test_the_prefill_is_the_prompts_and_padding_that_never_comes_again():
    made = trace()
    assert made.prefill()["x"].shape == (B, 7, 64)
    for row, first in enumerate(PROMPT):
        assert np.array_equal(made.prefill()["x"][row, :first], made.inputs["x"][row, :first])
        assert np.array_equal(made.prefill()["x"][row, first:], made.inputs["x"][row, first + STEPS :])
    steps = [made.tokens(step)["x"] for step in range(1, STEPS + 1)]
    fed = np.concatenate([made.prefill()["x"], *steps], axis=1)
    assert np.array_equal(np.sort(fed, axis=1), np.sort(made.inputs["x"], axis=1))  # every token once


def test_a_step_has_the_token_behind_those_of_each_batch_element():
    made = trace()
    for step in range(1, STEPS + 1):
        wanted = [made.inputs["x"][row, first + step - 1] for row, first in enumerate(PROMPT)]
        assert np.array_equal(made.tokens(step)["x"], np.stack(wanted)[:, None])


def test_prompts_of_one_length_need_no_padding():
    made = trace(prompt=(3, 3, 3))
    assert np.array_equal(made.prefill()["x"], made.inputs["x"][:, :3])


# -- round trip ----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_trace_is_read_back_bit_by_bit(tmp_path, precision):
    written = trace(precision)
    write_trace(tmp_path / "decode.safetensors", written)
    read = read_trace(tmp_path / "decode.safetensors", layer(), PRECISIONS[precision], Source.LAYER)
    assert (read.name, read.steps, read.B, read.length) == ("decode", STEPS, B, L)
    assert bits(read.inputs["x"]) == bits(written.inputs["x"])
    assert bits(read.prompt) == bits(written.prompt)
    for group in ("oracle", "eager"):
        assert {name: bits(array) for name, array in getattr(read, group).items()} == {
            name: bits(array) for name, array in getattr(written, group).items()
        }
    check_trace(layer(), read, PRECISIONS[precision])


# -- files that are no trace ---------------------------------------------------------------------


def altered(tmp_path, change, precision="fp16"):
    """Write a trace, change its arrays, and read it."""
    path = tmp_path / "decode.safetensors"
    write_trace(path, trace(precision))
    arrays = read_arrays(path)
    change(arrays)
    write_arrays(path, arrays)
    return read_trace(path, layer(), PRECISIONS[precision], Source.LAYER)


RESULTS = [f"{group}/{name}" for group in ("oracle", "eager") for name in ("output", "key", "value")]
NAMES = ["inputs/tokens/x", "inputs/prompt", "inputs/steps", *RESULTS]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_array_is_named(tmp_path, name):
    with pytest.raises(BundleError, match="does not hold") as caught:
        altered(tmp_path, lambda arrays: arrays.pop(name))
    assert caught.value.got.endswith(f": no {name}")


@pytest.mark.parametrize("name", ["inputs/y", "oracle/weights", "anything"])
def test_an_array_too_many_is_named(tmp_path, name):
    with pytest.raises(BundleError, match="does not hold") as caught:
        altered(tmp_path, lambda arrays: arrays.update({name: np.zeros(3)}))
    assert caught.value.got.endswith(f": {name}")


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reshape", [lambda a: a[..., None], lambda a: a[None], lambda a: np.stack([a, a])])
def test_a_wrong_shape_is_refused(tmp_path, name, reshape):
    with pytest.raises(BundleError):
        altered(tmp_path, lambda arrays: arrays.update({name: reshape(arrays[name])}))


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", ["inputs/tokens/x", "inputs/prompt", *RESULTS])
@pytest.mark.parametrize("cut", [lambda a: a[1:], lambda a: a[:0], lambda a: a[..., 1:]])
def test_an_array_that_is_too_short_is_refused(tmp_path, name, cut):
    with pytest.raises(BundleError):
        altered(tmp_path, lambda arrays: arrays.update({name: cut(arrays[name])}))


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.complex64, np.bool_])
def test_a_wrong_type_is_refused(tmp_path, name, dtype):
    with pytest.raises(BundleError):
        altered(tmp_path, lambda arrays: arrays.update({name: arrays[name].astype(dtype)}))


@pytest.mark.parametrize("name", ["inputs/tokens/x", *RESULTS])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_refused(tmp_path, name, bad):
    def change(arrays):
        arrays[name].reshape(-1)[-1] = bad

    with pytest.raises(BundleError, match="not finite") as caught:
        altered(tmp_path, change)
    assert name.rpartition("/")[2] in caught.value.got


@pytest.mark.parametrize(
    ("prompt", "steps"),
    [((5, 2, 8), 4), ((5, 2, 6), 4), ((5, 0, 7), 4), ((5, -1, 7), 4), (PROMPT, 5), ((11, 11, 11), 0)],
)
def test_lengths_that_do_not_add_up_are_refused(tmp_path, prompt, steps):
    change = {"inputs/prompt": np.array(prompt, np.int32), "inputs/steps": np.array(steps, np.int32)}
    with pytest.raises(BundleError):
        altered(tmp_path, lambda arrays: arrays.update(change))


def test_an_empty_trace_is_refused(tmp_path):
    with pytest.raises(BundleError):
        altered(tmp_path, lambda arrays: arrays.update({"inputs/tokens/x": np.zeros((0, L, 64), np.float16)}))


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04"])
def test_a_file_that_is_no_archive_is_refused(tmp_path, content):
    (tmp_path / "decode.safetensors").write_bytes(content)
    with pytest.raises(DeployError, match="cannot be read"):
        read_trace(tmp_path / "decode.safetensors", layer(), FP16, Source.LAYER)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DeployError, match="no such"):
        read_trace(tmp_path / "decode.safetensors", layer(), FP16, Source.LAYER)


# -- does it fit? --------------------------------------------------------------------------------


def steps_refused(spec, prompt, steps, match):
    with pytest.raises(DeployError, match=match) as caught:
        check_steps(spec, np.array(prompt, np.int32), steps)
    return str(caught.value)


def test_a_preallocated_cache_is_filled_to_its_last_entry_and_no_further():
    check_steps(layer(), np.array([60, 3], np.int32), 4)
    assert "4 steps at most" in steps_refused(layer(), [60, 3], 5, "do not fit into the cache")


def test_a_dynamic_cache_takes_what_its_past_allows():
    check_steps(layer("dynamic"), np.array([60, 60], np.int32), 4)
    assert "4 steps at most" in steps_refused(layer("dynamic"), [60, 60], 5, "do not fit into the cache")


@pytest.mark.parametrize("cache", ["preallocated", "dynamic"])
def test_a_prompt_that_leaves_no_room_is_refused_with_how_much_there_is(cache):
    assert "64 tokens in all at most" in steps_refused(layer(cache), [64, 64], 1, "do not fit into the cache")


def test_a_dynamic_cache_needs_prompts_of_one_length():
    assert "[3, 4]" in steps_refused(layer("dynamic"), [3, 4], 1, "one length")


def test_a_layer_that_cannot_begin_with_an_empty_cache_is_refused():
    refusal = steps_refused(layer("dynamic", P=Axis(min=1, opt=8, max=63)), [3, 3], 1, "Axis P")
    assert "P=0:8:63" in refusal, "no other steps help, but another export"


def test_a_layer_that_takes_no_single_token_is_refused():
    assert "S=1:16:64" in steps_refused(layer(S=Axis(min=2, opt=16, max=64)), [3, 3], 1, "Axis S")


def test_other_sizes_than_the_axes_are_refused():
    steps_refused(layer(), [3] * 5, 1, "Axis B")
    steps_refused(layer(S=Axis(min=1, opt=8, max=8)), [9], 1, "Axis S")
    assert "a size from 1 to 4, or export it" in steps_refused(layer(), [3] * 5, 1, "B=5")


@pytest.mark.parametrize(("prompt", "steps"), [([3] * 5, 1), ([65], 1), ([60], 9), ([64], 1)])
@pytest.mark.parametrize("cache", ["preallocated", "dynamic"])
def test_hints_name_no_option_that_only_an_export_has(cache, prompt, steps):
    assert "--" not in steps_refused(layer(cache), prompt, steps, "does not allow|do not fit")


def test_a_layer_without_a_cache_is_refused():
    steps_refused(find_spec("tiny-rope"), [3], 1, "no KV cache")


@pytest.mark.parametrize(("prompt", "steps"), [([0, 3], 1), ([3, 3], 0), ([], 1)])
def test_nothing_to_feed_is_refused(prompt, steps):
    steps_refused(layer(), prompt, steps, "needs a prompt")


def other(name, array):
    made = trace()
    return replace(made, eager={**made.eager, name: array})


@pytest.mark.parametrize(
    "made",
    [
        trace(inputs={"x": trace().inputs["x"][..., :32]}),
        trace(inputs={"x": trace().inputs["x"].astype(np.float32)}),
        other("key", trace().eager["key"][:, :1]),
        other("value", trace().eager["value"][..., :8]),
        other("output", trace().eager["output"].astype(np.float32)),
        trace(oracle={"output": trace().oracle["output"]}),
        trace("bf16"),
    ],
)
def test_a_trace_of_another_layer_or_precision_is_refused(made):
    check_trace(layer(), trace(), FP16)
    with pytest.raises(DeployError, match="does not hold"):
        check_trace(layer(), made, FP16)


def test_a_trace_whose_lengths_do_not_add_up_is_refused():
    with pytest.raises(DeployError, match="does not hold"):
        check_trace(layer(), replace(trace(), steps=STEPS + 1), FP16)


@pytest.mark.parametrize("most", [None, 1, 3, 4, 7, 100])
def test_a_prompt_is_brought_whole_in_calls_of_any_size(most):
    prompt = np.array([7, 3, 1], np.int32)
    calls = list(prefill_calls(prompt, most))
    assert [part.start for part, _ in calls] == [0, *(part.stop for part, _ in calls[:-1])]
    assert calls[-1][0].stop == 7
    assert max(part.stop - part.start for part, _ in calls) <= (most or 7)
    sizes = [part.stop - part.start for part, _ in calls]
    brought = [
        np.full(3, size) if counts is None else counts for size, (_, counts) in zip(sizes, calls, strict=True)
    ]
    np.testing.assert_array_equal(sum(brought), prompt)


def test_calls_without_padding_count_nothing():
    assert [counts for _, counts in prefill_calls(np.array([4, 4], np.int32), 2)] == [None, None]
