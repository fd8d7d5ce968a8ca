"""Decoders of a user's own with preallocated KV caches: decoded and judged as catalog layers are."""

from dataclasses import replace

import cached_models
import numpy as np
import own_models
import pytest
import torch
from safetensors.numpy import load_file

import mha_deploy as md
from mha_deploy.bundle.cases import plan_trace, position_inputs
from mha_deploy.bundle.sizes import GoldenBudget, golden_budget, planned_cases
from mha_deploy.errors import DeployError, ExportError, SpecError
from mha_deploy.model.spec import Axis, ModuleSpec, TensorSpec
from mha_deploy.options import ExportOptions
from mha_deploy.runtime.runner import Runner
from mha_deploy.status import Outcome

AXES = {"B": Axis(min=1, opt=1, max=4), "S": Axis(min=1, opt=4, max=8)}
CACHE = ("B", 2, 16, 8)


def spec(*positions, longest=0, entries=True, **more):
    """A decoder with a preallocated cache of 16 entries, and inputs that place its tokens."""
    inputs = [TensorSpec(name="ids", kind="int64", dims=("B", "S")), *positions]
    inputs.append(TensorSpec(name="keys", kind="float", dims=CACHE))
    return ModuleSpec(
        name="own",
        axes=AXES,
        inputs=tuple(inputs),
        outputs=(
            TensorSpec(name="logits", kind="float", dims=("B", "S", 40)),
            TensorSpec(name="keys_out", kind="float", dims=CACHE),
        ),
        attention_count=1,
        cached={"keys": "keys_out"},
        positions=tuple(each.name for each in positions),
        entries={"keys": 2} if entries else {},
        longest=longest,
        **more,
    )


def placing(*dims, kind="int64"):
    return TensorSpec(name="at", kind=kind, dims=dims)


@pytest.mark.parametrize(
    ("dims", "wanted"),
    [
        (("S",), [5, 6, 7]),
        ((1, "S"), [[5, 6, 7]]),
        (("B", "S"), [[5, 6, 7], [5, 6, 7]]),
        (("B",), [5, 5]),
        ((1,), [5]),
        ((), 5),
    ],
)
def test_tokens_are_placed_in_every_usual_form(dims, wanted):
    cache = spec(placing(*dims, kind="int32")).kv_cache
    assert cache.is_preallocated
    assert (cache.new, cache.room) == ("S", 16)
    made = position_inputs(cache, np.array([5, 5]), 3)["at"]
    assert made.dtype == np.int32
    assert made.tolist() == wanted
    assert cache.is_ragged == ("B" in dims)


def test_a_fixed_batch_is_a_number_in_the_graph():
    fixed = replace(spec(placing(3)), axes={**AXES, "B": Axis(min=3, opt=3, max=3)})
    assert fixed.kv_cache.is_ragged
    assert position_inputs(fixed.kv_cache, np.array([5, 2, 0]), 4)["at"].tolist() == [5, 2, 0]
    shared = replace(spec(placing(1, "S")), axes=fixed.axes)
    assert not shared.kv_cache.is_ragged
    assert position_inputs(shared.kv_cache, np.array([5, 5, 5]), 2)["at"].tolist() == [[5, 6]]


def test_lengths_that_differ_need_positions_by_batch_element():
    lengths = np.array([5, 2])
    assert position_inputs(spec(placing("B")).kv_cache, lengths, 2)["at"].tolist() == [5, 2]
    with pytest.raises(DeployError, match="positions"):
        position_inputs(spec(placing("S")).kv_cache, lengths, 2)


def test_a_ring_has_room_for_more_tokens_than_entries_and_prompts_of_one_length():
    linear, ring = (spec(placing("B"), longest=longest).kv_cache for longest in (0, 40))
    assert (linear.room, ring.room) == (16, 40)
    assert [linear.is_in_order, ring.is_in_order] == [True, False]
    planned = plan_trace(spec(placing("B"), longest=40))
    assert planned.steps + planned.prompt[0] > 16
    assert len(set(planned.prompt)) == 1
    assert len(set(plan_trace(spec(placing("B"))).prompt)) > 1


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (lambda: spec(placing("S"), entries=False).kv_cache, "how many tokens"),
        (lambda: spec(placing("S"), longest=4).kv_cache, "more tokens than fit"),
        (lambda: spec(placing("S", kind="float")), "named by positions"),
        (lambda: spec(placing("S"), longest=-1), "whole number"),
        (lambda: replace(spec(placing("S")), entries={"keys": 7}), "no such dimension"),
        (lambda: replace(spec(placing("S")), entries={"ids": 0}), "named by positions"),
    ],
)
def test_a_cache_that_cannot_be_decoded_with_is_refused(made, problem):
    with pytest.raises(SpecError, match=problem):
        made()


@pytest.mark.parametrize(
    ("cached", "wrong", "near"),
    [({"keys": "keys_ou"}, "keys_ou", "'keys_out'"), ({"key": "keys_out"}, "key", "'keys'")],
)
def test_a_name_of_the_cache_that_the_model_does_not_have_is_named_with_the_nearest(cached, wrong, near):
    with pytest.raises(SpecError) as caught:
        replace(spec(placing("S")), cached=cached)
    assert caught.value.got == wrong
    assert near in caught.value.hint


@pytest.mark.parametrize(
    "change",
    [{"positions": "nothing"}, {"positions": "keys"}, {"positions": 3}, {"longest": -1}, {"kv_cache": {}}],
)
def test_positions_that_are_none_are_refused_before_the_export(change, tmp_path):
    with pytest.raises(ExportError):
        md.export(replace(cached_models.in_place(), **change), tmp_path / "bundle")


@pytest.mark.parametrize("by", ["ids", ("ids",)])
def test_positions_that_name_the_token_ids_are_refused_with_the_input_that_counts(by, tmp_path):
    with pytest.raises(ExportError, match="ids") as caught:
        md.export(replace(cached_models.in_place(), positions=by), tmp_path / "bundle")
    assert 'positions="cache_position"' in caught.value.hint


def test_prompts_have_one_length_where_not_every_input_by_token_has_the_batch():
    placed = spec(placing("B", "S"))
    assert placed.kv_cache.is_ragged
    assert plan_trace(placed).prompt == (8, 4, 2)
    shared = TensorSpec(name="shared", kind="int64", dims=("S",))
    mixed = replace(placed, inputs=(*placed.inputs, shared))
    assert plan_trace(mixed).prompt == (8, 8, 8)


NAMED = {"keys": "keys_out", "values": "values_out"}


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("change", "got", "near"),
    [
        ({"kv_cache": {"keys": "keys_out"}}, "values", "values_out"),
        ({"kv_cache": {**NAMED, "values": "value_out"}}, "value_out", "values_out"),
        ({"positions": ()}, "cache_position", "positions="),
    ],
)
def test_a_preallocated_cache_that_is_declared_in_part_is_refused_with_what_is_missing(
    change, got, near, tmp_path
):
    steps, made = [], replace(cached_models.ring(), **change)
    with pytest.raises(ExportError) as caught:
        md.export(made, tmp_path / "bundle", on_step=lambda name, *_: steps.append(name))
    assert got in caught.value.got
    assert near in caught.value.hint
    assert "golden case opt" not in steps


def test_the_note_on_a_cache_without_positions_does_not_deny_the_cache():
    notes = []
    assert not list(planned_cases(spec, ("long-past",), golden_budget(ExportOptions()), notes))
    (note,) = notes
    assert "positions=" in note
    assert "no KV cache" not in note


def of_any_length(name="C", sizes="5:6:9"):
    """A decoder whose preallocated cache may have several sizes, along an axis of any name."""
    given = cached_models.FORMS["in_place"]()
    cache = md.Example(given.inputs["keys"].tensor[:, :, :6], "B", None, name)
    inputs = {**given.inputs, "keys": cache, "values": cache}
    return replace(given, inputs=inputs, axes={"B": "1:2:4", "S": "1:2:4", name: sizes})


@pytest.mark.slow  # the plan of such sizes is tested below
def test_the_entries_of_a_preallocated_cache_may_have_an_axis_of_any_name(tmp_path):
    bundle = md.export(of_any_length(), tmp_path / "bundle", precision="fp16", golden=("long-past",))
    (case,) = bundle.manifest.golden
    assert case.sizes == {"B": 2, "S": 1, "C": 9}
    report = md.validate(bundle, runtimes=["ort-cpu"], probe=False)
    assert report.passed, report.headline
    (trace,) = report.record.decode
    assert max(trace.prompt) + trace.steps == 9


@pytest.mark.parametrize("entries", ["T", "C"])
@pytest.mark.parametrize(("longest", "past"), [(0, 39), (100, 99)])  # as many as there are entries; a ring
def test_a_smaller_cache_has_room_for_fewer_tokens_unless_it_is_a_ring(entries, longest, past):
    own = spec(placing("S"), longest=longest)
    axes, cache = {**AXES, entries: Axis(min=8, opt=32, max=80)}, ("B", 2, entries, 8)
    inputs = tuple(replace(each, dims=cache) if each.name == "keys" else each for each in own.inputs)
    outputs = tuple(replace(each, dims=cache) if each.name == "keys_out" else each for each in own.outputs)
    own = replace(own, axes=axes, inputs=inputs, outputs=outputs, flops=1000)
    few, notes = GoldenBudget(gflop=1100 / 1e9), list[str]()
    (case,) = planned_cases(lambda: own, ("long-past",), few, notes)
    assert (case.sizes[entries], case.past) == (40, past)
    assert f"{entries} = 80" in notes[0]


class Late(Runner):
    """A runner that places every token one too late."""

    def __init__(self, runner, name):
        self._runner, self._name = runner, name
        self.name, self.inputs, self.outputs = "late", runner.inputs, runner.outputs

    def _run(self, feeds):
        return self._runner.run({**feeds, self._name: feeds[self._name] + 1})

    def close(self):
        pass


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("ragged", "ring", "window")]


@pytest.mark.parametrize("form", ["in_place", *SLOW])
def test_a_preallocated_cache_is_decoded_token_by_token(form, tmp_path):
    given = cached_models.FORMS[form]()
    before = given.inputs["keys"].tensor.clone()
    bundle = md.export(given, tmp_path / form, precision="fp16", golden=("min",))
    assert torch.equal(given.inputs["keys"].tensor, before)
    report = md.validate(bundle, runtimes=["ort-cpu"], probe=False)
    assert report.passed, report.headline
    (trace,) = report.record.decode
    assert len(trace.errors) == trace.steps
    assert max(trace.prompt) + trace.steps > 8
    assert (len(set(trace.prompt)) > 1) == (form == "ragged")
    with md.open_runner(bundle, "ort-cpu") as runner:
        wrong = md.validate(bundle, runners=[Late(runner, *bundle.manifest.spec.positions)], probe=False)
    (trace,) = wrong.record.decode
    assert trace.outcome is Outcome.FAILED


class OneBlock(torch.nn.Module):
    """The decoder of own_models.py with one block, without embedded positions."""

    def __init__(self):
        super().__init__()
        self.tokens, self.block = torch.nn.Embedding(50, 32), own_models.DecoderBlock()

    def forward(self, ids, past_key, past_value):
        P, S = past_key.shape[2], ids.shape[1]
        mask = torch.arange(P + S)[None, :] <= torch.arange(S)[:, None] + P
        y, key, value = self.block(self.tokens(ids), past_key, past_value, mask)
        return {"y": y, "present_key": key, "present_value": value}


@pytest.mark.slow  # tests/validate/test_own_decoders.py decodes with one
def test_a_dynamic_cache_grows_beyond_what_one_call_brings(tmp_path):
    cached = {"past_key": "present_key", "past_value": "present_value"}
    inputs = {"ids": md.Example(torch.randint(0, 50, (2, 3)), "B", "S")}
    inputs |= {name: md.Example(torch.randn(2, 2, 6, 16), "B", None, "P") for name in cached}
    axes = {"B": "2", "S": "1:2:4", "P": "0:8:31"}
    given = md.Deployable(module=OneBlock(), inputs=inputs, axes=axes, kv_cache=cached)
    bundle = md.export(given, tmp_path / "bundle", precision="fp16", golden=("min",))
    report = md.validate(bundle, runtimes=["ort-cpu"], probe=False)
    assert report.passed, report.headline
    (trace,) = report.record.decode
    assert (max(trace.prompt), trace.steps) == (4, 28)


@pytest.mark.slow
def test_a_module_that_reads_what_no_token_wrote_is_refused(tmp_path):
    with pytest.raises(ExportError, match="no token wrote"):
        md.export(cached_models.without_mask(), tmp_path / "bundle", precision="fp16", golden=("min",))


def near_positions():
    """A mistake: positions begin again in every call, which changes little."""
    made = own_models.decoder(offset=False)
    with torch.no_grad():
        made.module.positions.weight /= 64
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [cached_models.forgotten_values, pytest.param(near_positions, marks=pytest.mark.slow)]
)
def test_a_small_difference_between_decoding_and_one_call_is_refused(make, tmp_path):
    with pytest.raises(ExportError, match="one call with all tokens"):
        md.export(make(), tmp_path / "bundle", precision="fp32", golden=("min",))


@pytest.mark.parametrize(
    "make",
    [
        own_models.decoder_without_cached_keys,
        pytest.param(cached_models.without_cached, marks=pytest.mark.slow),
    ],
    ids=["dynamic", "preallocated"],
)
def test_a_mask_that_begins_again_in_every_call_is_refused(make, tmp_path):
    """Also where the rest of the model makes little of it, and where the prompt fills the longest call."""
    with pytest.raises(ExportError, match="one call with all tokens"):
        md.export(make(), tmp_path / "bundle", precision="fp16", golden=("min",))


class PaddedDecoder(own_models.Decoder):
    """Hides keys by the lowest number: a query whose keys are all hidden attends to all of its call alike."""

    def forward(self, ids, padding, past_key, past_value, past_key_1, past_value_1):
        P, S = past_key.shape[2], ids.shape[1]
        at = torch.arange(S, device=ids.device) + P
        seen = torch.arange(P + S, device=ids.device) <= (at if self.attended else at - P)[:, None]
        hidden = ~(seen & (padding[:, None, None] > 0))
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
        x = self.tokens(ids) + self.positions(at)
        x, key, value = self.blocks[0](x, past_key, past_value, mask)
        x, key_1, value_1 = self.blocks[1](x, past_key_1, past_value_1, mask)
        return self.head(x), key, value, key_1, value_1


def padded(**options):
    """Sequences of which one is padded on the left."""
    made = own_models.decoder()
    given = torch.ones(2, 11, dtype=torch.int64)
    given[1, :3] = 0
    torch.manual_seed(0)
    inputs = {"ids": made.inputs["ids"], "padding": md.Example(given, "B", "P+S"), **made.inputs}
    outputs = ("logits", *own_models.CACHED.values())
    return replace(made, module=PaddedDecoder(**options), inputs=inputs, outputs=outputs)


def test_padding_whose_queries_see_no_key_is_not_decoded(tmp_path):
    bundle = md.export(padded(), tmp_path / "bundle", precision="fp32", golden=("min",))
    assert any("without padding" in note for note in bundle.manifest.notes)
    (trace,) = bundle.manifest.traces
    held = load_file(bundle.path / trace.file)
    assert (held["inputs/tokens/padding"] == 1).all()


@pytest.mark.slow
def test_padding_does_not_hide_a_mask_that_begins_again(tmp_path):
    with pytest.raises(ExportError, match="one call with all tokens"):
        md.export(padded(attended=False), tmp_path / "wrong", precision="fp32", golden=("min",))


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_a_cache_of_transformers_goes_in_and_out_as_tensors(cache):
    """The wrapped model decodes as the model itself does with the library's own cache."""
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        sliding_window=4,
    )
    model = transformers.MistralForCausalLM(config).eval()
    made = md.from_transformers(model, cache=cache, tokens="1:4:8", length=16)
    kinds = {"static": lambda: transformers.StaticCache(config, max_cache_len=16)}
    own = kinds.get(cache, transformers.DynamicCache)()
    ids = torch.randint(0, 40, (2, 9))
    held = {
        name: made.inputs[name].tensor[:, :, : None if cache == "static" else 0] for name in made.kv_cache
    }
    with torch.inference_mode():
        for start, stop in ((0, 5), (5, 6), (6, 9)):
            part, at = ids[:, start:stop], torch.arange(start, stop)
            placed = {"cache_position": at} if made.positions else {}
            got = made.module(input_ids=part, **placed, **held)
            want = model(input_ids=part, past_key_values=own, use_cache=True).logits
            assert torch.allclose(got["logits"], want, atol=1e-5)
            held = {name: got[output] for name, output in made.kv_cache.items()}


@pytest.mark.parametrize(("length", "tokens", "entries"), [(None, 24, 24), (8, 8, 8)])
def test_no_call_of_a_transformers_model_has_more_tokens_than_its_cache(length, tokens, entries):
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 20}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=24, **sizes))
    made = md.from_transformers(model, length=length)
    assert Axis.parse(made.axes["S"]).max == tokens
    assert Axis.parse(made.axes["T"]).max == entries


def test_an_encoder_of_transformers_takes_tokens_and_a_mask_and_gives_every_tensor():
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=40, max_position_embeddings=24, **sizes)
    for kind in (transformers.BertModel, transformers.BertForSequenceClassification):
        model = kind(config).eval()
        made = md.from_transformers(model, batch="1:2:4")
        assert (made.axes, dict(made.kv_cache)) == ({"B": "1:2:4", "S": "1:24:24"}, {})
        given = {name: example.tensor for name, example in made.inputs.items()}
        with torch.inference_mode():
            got, want = made.module(**given), model(**given)
        assert list(got) == list(want.keys())
        assert all(torch.equal(got[name], want[name]) for name in got)


@pytest.mark.parametrize("kind", ["T5ForConditionalGeneration", "ViTModel"])
def test_a_model_of_transformers_that_does_not_just_take_tokens_is_refused(kind):
    transformers = pytest.importorskip("transformers", minversion="5")
    small = {
        "T5ForConditionalGeneration": transformers.T5Config(
            vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2
        ),
        "ViTModel": transformers.ViTConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=32
        ),
    }
    with pytest.raises(ExportError, match="take tokens") as raised:
        md.from_transformers(getattr(transformers, kind)(small[kind]))
    assert raised.value.got == kind
    assert "Deployable(" in raised.value.hint
    assert ("pixel_values" in raised.value.hint) == (kind == "ViTModel")


def test_a_call_that_brings_more_tokens_than_entries_is_refused_before_the_export(tmp_path):
    made = cached_models.in_place()
    with pytest.raises(ExportError, match="more tokens than cache"):
        md.export(replace(made, axes={**made.axes, "S": "1:8:64"}), tmp_path / "bundle")


def test_what_is_no_model_of_transformers_is_refused():
    pytest.importorskip("transformers", minversion="5")
    with pytest.raises(ExportError, match="not a transformers model"):
        md.from_transformers(torch.nn.Linear(2, 2))
    with pytest.raises(ExportError, match="no such cache"):
        md.from_transformers(torch.nn.Linear(2, 2), cache="quantized")


def test_none_is_the_default_of_what_may_be_left_out():
    given = {"module": torch.nn.Identity(), "inputs": {"x": md.Example(torch.ones(1))}}
    names = ("axes", "outputs", "kv_cache", "positions", "longest", "samples", "name", "summary")
    assert md.Deployable(**given, **dict.fromkeys(names)) == md.Deployable(**given)
