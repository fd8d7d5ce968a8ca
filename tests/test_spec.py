"""The spec is the single source of names, shapes and ranges, and refuses what makes no sense."""

import json
import math
from dataclasses import FrozenInstanceError

import pytest

from mha_deploy.errors import EXIT_BAD_INPUT, SpecError
from mha_deploy.model.layer import AttentionSpec, Rope
from mha_deploy.model.spec import FLOAT, INT32, Axis, TensorSpec
from mha_deploy.options import in_python

B = {"min": 1, "opt": 2, "max": 4}
S = {"min": 1, "opt": 16, "max": 64}
T = {"min": 1, "opt": 24, "max": 32}
SELF = {"B": B, "S": S}
CROSS = {"B": B, "S": S, "T": T}
PLAIN = {"name": "plain", "Hq": 4, "E": 64, "axes": SELF}
SPARSE = {"variant": "sparse-heads", "sparse_heads": {"top_k": 2}}
P = {"min": 0, "opt": 8, "max": 128}
DYNAMIC = {"cache": "dynamic", "causal": True, "axes": {**SELF, "P": P}}
PREALLOCATED = {"cache": "preallocated", "causal": True, "axes": {**SELF, "T": 128}}
GROUPED = {"variant": "grouped-mlp", "grouped_mlp": {"groups": 2, "hidden": 32}}


def make(**changes):
    return AttentionSpec.from_dict({**PLAIN, **changes})


def dims(tensors):
    return {tensor.name: tensor.dims for tensor in tensors}


def refusal(**changes):
    with pytest.raises(SpecError) as caught:
        make(**changes)
    return caught.value


# -- axes --------------------------------------------------------------------------------------


def test_an_axis_reads_three_sizes_or_one_and_prints_what_it_parses():
    assert Axis.parse("1:128:512") == Axis(min=1, opt=128, max=512)
    assert Axis.parse("1500") == Axis(min=1500, opt=1500, max=1500)
    assert str(Axis.parse("1:8:32")) == "1:8:32"
    assert Axis(min=1, opt=1, max=2).is_dynamic
    assert not Axis.parse("1500").is_dynamic


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not made of numbers"),
        ("a:b:c", "not made of numbers"),
        ("1:2.5:4", "not made of numbers"),
        ("1:2", "wrong number of parts"),
        ("1:2:3:4", "wrong number of parts"),
        ("0:1:2", "at least 1"),
        ("-1:1:2", "at least 1"),
        ("4:2:1", "sort them: 1:2:4"),
        ("1:9:8", "sort them: 1:8:9"),
    ],
)
def test_a_bad_axis_text_is_refused(text, says):
    with pytest.raises(SpecError) as caught:
        Axis.parse(text)
    assert says in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("size", [True, 1.0, "1", None])
def test_an_axis_size_must_be_a_whole_number(size):
    with pytest.raises(SpecError, match="three whole numbers"):
        Axis(min=size, opt=8, max=8)


# -- derived facts -----------------------------------------------------------------------------


@pytest.mark.parametrize(("Hkv", "kind"), [(4, "MHA"), (2, "GQA"), (1, "MQA")])
def test_the_kind_follows_from_the_heads(Hkv, kind):
    assert make(Hkv=Hkv).kind == kind


def test_heads_and_head_size_have_defaults():
    spec = make()
    assert (spec.Hkv, spec.D) == (4, 16)
    assert make(D=32).D == 32


def test_the_scale_is_one_over_the_root_of_the_head_size_unless_given():
    assert make(D=32).softmax_scale == 1 / math.sqrt(32)
    assert make(D=32, scale=0.125).softmax_scale == 0.125


def test_only_head_mix_has_two_attentions():
    assert make(variant="head-mix").attention_count == 2
    assert {make().attention_count, make(**SPARSE).attention_count, make(**GROUPED).attention_count} == {1}


def test_a_spec_cannot_be_changed_in_place():
    with pytest.raises(FrozenInstanceError):
        make().Hq = 8


# -- tensors -----------------------------------------------------------------------------------


def test_self_attention_takes_x_and_gives_output():
    spec = make()
    assert spec.inputs == (TensorSpec(name="x", kind=FLOAT, dims=("B", "S", 64)),)
    assert spec.outputs == (TensorSpec(name="output", kind=FLOAT, dims=("B", "S", 64)),)


def test_cross_attention_takes_query_key_and_value():
    spec = make(attends="cross", axes=CROSS)
    assert [(tensor.name, tensor.dims) for tensor in spec.inputs] == [
        ("query", ("B", "S", 64)),
        ("key", ("B", "T", 64)),
        ("value", ("B", "T", 64)),
    ]
    assert dims(spec.outputs) == {"output": ("B", "S", 64)}


@pytest.mark.parametrize("where", [{}, {"attends": "cross", "axes": CROSS}])
def test_padding_adds_one_length_per_batch_element_as_the_last_input(where):
    spec = make(mask="padding", **where)
    assert spec.inputs[-1] == TensorSpec(name="key_lengths", kind=INT32, dims=("B",))
    assert spec.inputs[:-1] == make(**where).inputs


@pytest.mark.parametrize(("where", "keys"), [({}, "S"), ({"attends": "cross", "axes": CROSS}, "T")])
def test_an_additive_mask_is_a_bias_per_head_over_the_keys(where, keys):
    spec = make(mask="additive", **where)
    assert spec.inputs[-1] == TensorSpec(name="attention_bias", kind=FLOAT, dims=(1, 4, "S", keys))


@pytest.mark.parametrize(("where", "keys"), [({}, "S"), ({"attends": "cross", "axes": CROSS}, "T")])
def test_weights_are_a_second_output_per_query_head(where, keys):
    spec = make(Hkv=2, weights=True, **where)
    assert dims(spec.outputs) == {"output": ("B", "S", 64), "weights": ("B", 4, "S", keys)}
    assert [tensor.name for tensor in spec.outputs] == ["output", "weights"]


def test_the_width_of_inputs_and_outputs_is_the_model_width_not_that_of_the_heads():
    spec = make(D=32)
    assert dims(spec.inputs) == {"x": ("B", "S", 64)}
    assert dims(spec.outputs) == {"output": ("B", "S", 64)}


def test_a_fixed_axis_becomes_a_number():
    spec = make(attends="cross", mask="additive", weights=True, axes={"B": 1, "S": S, "T": 1500})
    assert dims(spec.inputs) == {
        "query": (1, "S", 64),
        "key": (1, 1500, 64),
        "value": (1, 1500, 64),
        "attention_bias": (1, 4, "S", 1500),
    }
    assert dims(spec.outputs) == {"output": (1, "S", 64), "weights": (1, 4, "S", 1500)}


def test_a_shape_replaces_names_by_sizes():
    tensor = TensorSpec(name="x", kind=FLOAT, dims=("B", 4, "S"))
    assert tensor.shape({"B": 3, "S": 7}) == (3, 4, 7)


def test_a_sum_of_axes_has_the_size_of_its_parts():
    tensor = TensorSpec(name="k", kind=FLOAT, dims=("B", "P+S", "P+1"))
    assert tensor.shape({"B": 3, "S": 7, "P": 0}) == (3, 7, 1)


def test_a_dynamic_cache_brings_the_past_and_gives_past_and_present():
    spec = make(Hkv=2, **DYNAMIC)
    assert dims(spec.inputs) == {
        "x": ("B", "S", 64),
        "past_key": ("B", 2, "P", 16),
        "past_value": ("B", 2, "P", 16),
    }
    assert dims(spec.outputs) == {
        "output": ("B", "S", 64),
        "present_key": ("B", 2, "P+S", 16),
        "present_value": ("B", 2, "P+S", 16),
    }
    assert spec.outputs[1].shape({"B": 3, "S": 4, "P": 5}) == (3, 2, 9, 16)


@pytest.mark.parametrize(
    ("axes", "length"), [({"S": 1}, "P+1"), ({"S": 1, "P": 7}, 8), ({"P": 0}, "S"), ({"P": 3}, "S+3")]
)
def test_fixed_axes_of_a_sum_become_numbers(axes, length):
    spec = make(**{**DYNAMIC, "axes": {**DYNAMIC["axes"], **axes}})
    assert spec.outputs[1].dims == ("B", 4, length, 16)
    assert spec.outputs[1].shape(spec.sizes("max"))[2] == spec.axes["P"].max + spec.axes["S"].max


def test_a_preallocated_cache_brings_buffers_and_lengths_and_gives_buffers():
    spec = make(Hkv=2, **PREALLOCATED)
    assert dims(spec.inputs) == {
        "x": ("B", "S", 64),
        "key_cache": ("B", 2, 128, 16),
        "value_cache": ("B", 2, 128, 16),
        "lengths": ("B",),
    }
    assert spec.inputs[-1].kind == INT32
    assert [tensor.name for tensor in spec.outputs] == ["output", "key_cache_out", "value_cache_out"]
    assert spec.outputs[1].dims == ("B", 2, 128, 16)


@pytest.mark.parametrize(
    ("cached", "longest"), [(DYNAMIC, 192), (PREALLOCATED, 128)], ids=["dynamic", "preallocated"]
)
def test_the_layer_without_its_cache_takes_whole_sequences(cached, longest):
    spec = make(**cached, window=4, rope={})
    whole = spec.without_cache()
    assert dims(whole.inputs) == {"x": ("B", "S", 64)}
    assert dims(whole.outputs) == {"output": ("B", "S", 64)}
    assert whole.axes["S"].max == longest
    assert (whole.window, whole.rope) == (spec.window, spec.rope)
    assert whole.without_cache() is whole


def ranges(spec):
    return {name: str(axis) for name, axis in spec.axes.items() if name != "B"}


def test_another_cache_is_for_sequences_as_long_as_its_own():
    dynamic, static = make(**DYNAMIC), make(**PREALLOCATED)
    assert ranges(dynamic.with_cache("preallocated")) == {"S": "1:16:64", "T": "129:129:129"}
    assert ranges(static.with_cache("dynamic")) == {"S": "1:16:64", "P": "0:16:127"}
    assert ranges(dynamic.with_cache("none")) == {"S": "1:16:129"}
    assert ranges(static.with_cache("none")) == {"S": "1:16:128"}
    assert ranges(make(causal=True).with_cache("dynamic")) == {"S": "1:16:64", "P": "0:16:63"}
    short = {"B": B, "S": S, "P": {"min": 0, "opt": 0, "max": 7}}
    assert ranges(make(**{**DYNAMIC, "axes": short}).with_cache("preallocated"))["T"] == "64:64:64"


@pytest.mark.parametrize("cached", [DYNAMIC, PREALLOCATED], ids=["dynamic", "preallocated"])
@pytest.mark.parametrize("between", ["none", "dynamic", "preallocated"])
def test_there_and_back_a_sequence_is_as_long_as_before(cached, between):
    spec = make(**cached)
    back = spec.with_cache(between).with_cache(spec.cache)
    assert back.room == spec.room
    assert back.with_cache(between).with_cache(spec.cache) == back
    if between != "none":
        assert back.axes["S"] == spec.axes["S"]


def test_rotary_tables_reach_every_position_of_a_call_behind_the_longest_past():
    spec = make(**DYNAMIC)
    assert spec.longest == spec.without_cache().longest == 128 + 64


def test_what_counts_the_keys_follows_from_the_cache():
    assert [make(**cached).key_axis for cached in ({}, DYNAMIC, PREALLOCATED)] == ["S", "P+S", "T"]


def test_only_the_past_may_be_empty():
    assert make(**DYNAMIC).axes["P"].min == 0
    assert Axis.parse("0:8:32", name="P") == Axis(min=0, opt=8, max=32)
    with pytest.raises(SpecError, match="at least 1"):
        Axis.parse("0:8:32", name="S")
    with pytest.raises(SpecError, match="at least 1"):
        make(**DYNAMIC).with_axes({"S": Axis(min=0, opt=1, max=1)})


def test_rope_rotates_the_whole_head_by_default():
    assert make().rope_dims == 0
    assert make(rope={}).rope_dims == 16
    assert make(rope={"dims": 4}).rope_dims == 4


# -- reading and writing -----------------------------------------------------------------------

OLD_KEYS = {
    *("name", "Hq", "Hkv", "D", "E", "axes", "summary", "variant", "attends", "bias", "mask", "causal"),
    *("weights", "projections"),
}


def test_a_spec_without_the_newer_options_is_written_as_before_them():
    assert make().to_dict().keys() == OLD_KEYS
    assert make(**SPARSE).to_dict().keys() == OLD_KEYS | {"sparse_heads"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        SPARSE,
        DYNAMIC,
        PREALLOCATED,
        {"rope": {}},
        {"rope": {"base": 500000, "dims": 8, "interleaved": True, "scaling": "llama3", "factor": 8.0}},
        {**DYNAMIC, "rope": {}, "window": 4, "softcap": 30.0},
    ],
    ids=str,
)
def test_a_spec_reads_what_it_writes(changes):
    spec = make(**changes)
    data = json.loads(json.dumps(spec.to_dict()))
    assert AttentionSpec.from_dict(data) == spec
    assert None not in data.get("rope", {}).values()


def test_rope_has_the_defaults_of_the_paper():
    assert make(rope={}).rope == Rope(base=10000.0, dims=None, interleaved=False, scaling="none", factor=1.0)


# -- changes -----------------------------------------------------------------------------------


def test_with_axes_changes_only_the_named_axis():
    spec = make()
    changed = spec.with_axes({"S": Axis.parse("128")})
    assert changed.sizes("opt") == {"B": 2, "S": 128}
    assert dims(changed.inputs) == {"x": ("B", 128, 64)}
    assert spec.sizes("opt") == {"B": 2, "S": 16}


@pytest.mark.parametrize("axis", ["T", "batch"])
def test_with_axes_refuses_an_axis_that_the_spec_has_not(axis):
    with pytest.raises(SpecError, match=f"plain has no axis '{axis}'") as caught:
        make().with_axes({axis: Axis.parse("8")})
    assert caught.value.hint == "one of: B, S"


@pytest.mark.parametrize("sizes", [{"B": 1, "S": 1}, {"B": 4, "S": 64}])
def test_sizes_at_the_ends_of_the_axes_are_allowed(sizes):
    make().check_sizes(sizes)


@pytest.mark.parametrize(("sizes", "got"), [({"B": 1, "S": 65}, "S=65"), ({"B": 0, "S": 8}, "B=0")])
def test_sizes_outside_the_axes_are_refused(sizes, got):
    with pytest.raises(SpecError, match="does not allow this size") as caught:
        make().check_sizes(sizes)
    assert caught.value.got == got
    assert f'axes={{"{got[0]}": "min:opt:max"}}' in in_python(caught.value.hint)


@pytest.mark.parametrize("sizes", [{}, {"B": 1}, {"B": 1, "S": 8, "T": 8}])
def test_sizes_must_name_exactly_the_axes(sizes):
    with pytest.raises(SpecError, match="needs a size for each of its axes B, S"):
        make().check_sizes(sizes)


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"Hkv": 3}, "Hkv from 1, 2, 4"),
        ({"Hkv": 8}, "Hkv from 1, 2, 4"),
        ({"Hq": 3, "Hkv": 1}, "add D = <head size>"),
        ({"scale": 0.0}, "leave it out for 1/sqrt(D)"),
        ({"scale": -1.0}, "leave it out for 1/sqrt(D)"),
        ({"scale": math.inf}, "leave it out for 1/sqrt(D)"),
        ({"scale": math.nan}, "leave it out for 1/sqrt(D)"),
        ({"scale": "0.5"}, "leave it out for 1/sqrt(D)"),
        ({"variant": "sparse-head"}, "did you mean 'sparse-heads'?"),
        ({"attends": "crosss"}, "did you mean 'cross'?"),
        ({"mask": "pading"}, "did you mean 'padding'?"),
        ({"mask": "boolean"}, "one of: additive, none, padding"),
        ({"projections": "pack"}, "did you mean 'packed'?"),
        ({"summary": 3}, 'summary = "..."'),
        ({"axes": CROSS}, 'leave T out, or set attends = "cross"'),
        ({"axes": {"B": B}}, "[axes] lacks S"),
        ({"axes": {}}, "[axes] lacks B, S"),
        ({"axes": {**SELF, "H": 8}}, "one of: B, S"),
        ({"attends": "cross"}, "[axes] lacks T"),
        ({"axes": 8}, "axes must be a table"),
        ({"axes": {"B": B, "S": "1:2:3"}}, "S = { min = 1, opt = 8, max = 32 }"),
        ({"axes": {"B": B, "S": {"min": 1, "opt": 8}}}, "keys: min, opt, max"),
        ({"axes": {"B": B, "S": {**S, "maximum": 8}}}, "did you mean 'max'?"),
        ({"axes": {"B": B, "S": {**S, "min": 17}}}, "sort them: 16:17:64"),
        ({"axes": {"B": B, "S": 0}}, "at least 1"),
        ({"attends": "cross", "axes": CROSS, "causal": True}, 'causal = false with mask = "additive"'),
        ({"attends": "cross", "axes": CROSS, "projections": "packed"}, 'projections = "separate"'),
        ({"variant": "sparse-heads"}, "add a [sparse_heads] table"),
        ({"variant": "grouped-mlp"}, "add a [grouped_mlp] table"),
        ({**SPARSE, "variant": "attention"}, 'variant = "sparse-heads", or drop it'),
        ({**GROUPED, "variant": "head-mix"}, 'variant = "grouped-mlp", or drop it'),
        ({**SPARSE, **GROUPED}, 'variant = "sparse-heads", or drop it'),
        ({**SPARSE, "sparse_heads": {"top_k": 5}}, "1 to 4"),
        ({**SPARSE, "sparse_heads": {"top_k": 0}}, "top_k must be a whole number of at least 1"),
        ({**SPARSE, "sparse_heads": {"top_k": 2, "renormalise": 1}}, "renormalise = true"),
        ({**SPARSE, "sparse_heads": {}}, "keys: top_k, renormalise"),
        ({**SPARSE, "sparse_heads": {"topk": 2}}, "did you mean 'top_k'?"),
        ({**SPARSE, "sparse_heads": 2}, "sparse_heads must be a table"),
        ({**GROUPED, "grouped_mlp": {"groups": 3, "hidden": 32}}, "groups from 1, 2, 4"),
        ({**GROUPED, "grouped_mlp": {"groups": 0, "hidden": 32}}, "groups must be a whole number"),
        ({**GROUPED, "grouped_mlp": {"groups": 2, "hidden": 0}}, "hidden must be a whole number"),
        ({"window": 4}, "causal = true"),
        ({"window": 0, "causal": True}, "window must be a whole number of at least 1"),
        ({"window": 2.5, "causal": True}, "window must be a whole number of at least 1"),
        ({"softcap": 0.0}, "softcap must be a positive number"),
        ({"softcap": math.inf}, "softcap must be a positive number"),
        ({"rope": 1}, "rope must be a table"),
        ({"rope": {"bass": 1e4}}, "did you mean 'base'?"),
        ({"rope": {"dims": 3}}, "an even number up to 16"),
        ({"rope": {"dims": 18}}, "an even number up to 16"),
        ({"rope": {"dims": 0}}, "dims must be a whole number of at least 1"),
        ({"rope": {}, "D": 15}, "an even number up to 15"),
        ({"rope": {"base": 1.0}}, "base must be a number above 1"),
        ({"rope": {"factor": 2.0}}, "A factor without a scaling does nothing"),
        ({"rope": {"scaling": "linear", "factor": 0.5}}, "factor must be a number of at least 1"),
        ({"rope": {"scaling": "linear", "factor": "2"}}, "factor must be a number of at least 1"),
        ({"rope": {"scaling": "lama3"}}, "did you mean 'llama3'?"),
        ({"rope": {"scaling": "ntk", "dims": 2, "factor": 2.0}}, "dims of at least 4"),
        ({"rope": {"low_freq_factor": 4.0}}, "0 < low_freq_factor < high_freq_factor"),
        ({"rope": {"original_length": 0}}, "original_length must be a whole number"),
        ({"rope": {"interleaved": 1}}, "interleaved = true"),
        ({"rope": {}, "attends": "cross", "axes": CROSS}, 'attends = "self", or drop [rope]'),
        ({"cache": "dynamik"}, "did you mean 'dynamic'?"),
        ({"cache": "dynamic", "causal": True}, "[axes] lacks P"),
        ({"cache": "preallocated", "causal": True}, "[axes] lacks T"),
        ({"axes": {**SELF, "P": P}}, 'leave P out, or set cache = "dynamic"'),
        ({**DYNAMIC, "causal": False}, "causal = true"),
        ({**DYNAMIC, "variant": "head-mix"}, 'variant = "attention"'),
        (
            {**DYNAMIC, "mask": "padding"},
            'mask = "none" in a layer file (the lengths of a preallocated cache are the padding)',
        ),
        ({**PREALLOCATED, "mask": "additive"}, 'got: cache = "preallocated", mask = "additive"'),
        ({**PREALLOCATED, "weights": True}, "weights = false"),
        (
            {**PREALLOCATED, "attends": "cross", "causal": False, "axes": {**CROSS, "T": 64}},
            'attends = "self"',
        ),
        ({**PREALLOCATED, "axes": {**SELF, "T": T}}, "T = 32"),
        ({**PREALLOCATED, "axes": {**SELF, "T": 63}}, "S up to 63, or a larger T"),
        ({**DYNAMIC, "axes": {"B": {**B, "min": 0}, "S": S, "P": P}}, "B = 0:2:4"),
        ({**DYNAMIC, "axes": {**SELF, "P": {**P, "min": -1}}}, "at least 1; only P, the past, may be 0"),
        ({**DYNAMIC, "attends": "cross", "causal": False, "axes": {**CROSS, "P": P}}, 'attends = "self"'),
        ({"cache": "dynamic", "causal": False}, "causal = true"),
        ({"heads": 4}, "Unknown key in the spec"),
        ({"casual": True}, "did you mean 'causal'?"),
    ],
)
def test_a_spec_that_breaks_a_rule_is_refused_with_what_to_change(changes, says):
    error = refusal(**changes)
    assert says in str(error)
    assert error.exit_code == EXIT_BAD_INPUT


@pytest.mark.parametrize("key", ["Hq", "Hkv", "D", "E"])
@pytest.mark.parametrize("value", [0, -4, 4.0, "4", True])
def test_a_count_must_be_a_whole_number(key, value):
    assert str(refusal(**{key: value})).startswith(f"{key} must be a whole number of at least 1.")


@pytest.mark.parametrize("key", ["bias", "causal", "weights"])
@pytest.mark.parametrize("value", [0, 1, "true", None])
def test_a_switch_must_be_true_or_false(key, value):
    assert f"{key} = true" in str(refusal(**{key: value}))


@pytest.mark.parametrize("changes", [{"scale": True}, {"axes": {"B": True, "S": S}}])
def test_true_is_not_a_number(changes):
    refusal(**changes)


@pytest.mark.parametrize("key", ["name", "Hq", "E", "axes"])
def test_a_spec_names_the_key_that_it_lacks(key):
    data = {name: value for name, value in PLAIN.items() if name != key}
    with pytest.raises(SpecError, match=f"the spec lacks {key}"):
        AttentionSpec.from_dict(data)
