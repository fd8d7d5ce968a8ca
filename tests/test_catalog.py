"""The shipped specs are complete and true to their models, and a wrong file says what is wrong."""

import json
import re

import pytest

import mha_deploy as md
from mha_deploy.errors import BundleError, DeployError, SpecError, nearest
from mha_deploy.model.catalog import catalog_folder, catalog_names, find_spec, read_spec
from mha_deploy.model.layer import ATTENDS, MASKS, PROJECTIONS, VARIANTS, AttentionSpec

NAMES = catalog_names()
TINY = [name for name in NAMES if name.startswith("tiny-")]

# Written down a second time, so that a slip in a file does not pass: Hq, Hkv, D, E, causal, bias, longest S.
PUBLISHED = {
    "transformer-base": (8, 8, 64, 512, False, False, 512),
    "bert-base": (12, 12, 64, 768, False, True, 512),
    "bert-large": (16, 16, 64, 1024, False, True, 512),
    "gpt2": (12, 12, 64, 768, True, True, 1024),
    "gpt3-175b": (96, 96, 128, 12288, True, True, 2048),
    "llama-2-70b": (64, 8, 128, 8192, True, False, 4096),
    "llama-3-8b": (32, 8, 128, 4096, True, False, 8192),
    "falcon-7b": (71, 1, 64, 4544, True, False, 2048),
    "bloom-560m": (16, 16, 64, 1024, True, True, 2048),
    "whisper-large-cross": (20, 20, 64, 1280, False, True, 448),
}
USUAL = {  # B x S that a benchmark runs at
    "transformer-base": (8, 128),
    "bert-base": (8, 128),
    "bert-large": (8, 384),
    "gpt3-175b": (1, 512),
    "llama-2-70b": (1, 2048),
    "llama-3-8b": (1, 2048),
    "falcon-7b": (1, 1024),
}
# What each test size is there for: the fields in which it differs from tiny-mha.
TINY_DIFFERENCES = {
    "tiny-mha": set(),
    "tiny-gqa": {"Hkv", "causal"},
    "tiny-mqa": {"Hkv", "causal", "bias"},
    "tiny-cross": {"attends", "axes"},
    "tiny-cross-padding": {"attends", "axes", "mask"},
    "tiny-padding": {"mask"},
    "tiny-causal-padding": {"mask", "causal"},
    "tiny-additive": {"mask"},
    "tiny-additive-causal": {"mask", "causal"},
    "tiny-packed": {"Hkv", "projections"},
    "tiny-weights": {"mask", "weights"},
    "tiny-sparse-heads": {"variant", "sparse_heads"},
    "tiny-sparse-heads-renormalised": {"variant", "sparse_heads"},
    "tiny-grouped-mlp": {"variant", "grouped_mlp"},
    "tiny-head-mix": {"variant"},
    "tiny-rope": {"Hkv", "causal", "rope"},
    "tiny-scale": {"scale"},
    "tiny-wide-heads": {"D", "E"},
    "tiny-dynamic": {"Hkv", "causal", "rope", "cache", "axes"},
    "tiny-preallocated": {"Hkv", "causal", "rope", "cache", "axes"},
    "tiny-window": {"Hkv", "causal", "window", "cache", "axes"},
    "tiny-softcap": {"causal", "softcap"},
}


def write(folder, text, name="mine.toml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# -- what is shipped ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_spec_is_complete(name):
    spec, lines = (
        find_spec(name),
        (catalog_folder() / f"{name}.toml").read_text(encoding="utf-8").splitlines(),
    )
    assert spec.name == name
    assert AttentionSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert lines[0].startswith("# ")
    assert len(lines[0]) > 40, "the comment says where the figures come from"
    assert spec.summary
    assert spec.D % 8 == 0, "a head size that TensorRT can fuse"
    assert spec.D >= 16
    assert (spec.sizes("min")["B"], spec.sizes("min")["S"]) == (1, 1)
    if name in TINY:
        assert spec.E <= 96
        assert max(spec.sizes("max").values()) <= 64
        assert spec.sizes("max")["B"] <= 4


def test_published_models_have_their_published_figures_and_usual_sizes():
    for name, figures in PUBLISHED.items():
        spec = find_spec(name)
        longest, usual = spec.sizes("max")["S"], spec.sizes("opt")
        assert (spec.Hq, spec.Hkv, spec.D, spec.E, spec.causal, spec.bias, longest) == figures, name
        assert (usual["B"], usual["S"]) == USUAL.get(name, (usual["B"], usual["S"])), name


def test_every_other_shipped_spec_is_a_variant_or_a_test_size():
    rest = set(NAMES) - set(PUBLISHED) - set(TINY)
    assert rest == {
        "grouped-mlp-base",
        "head-mix-base",
        "packed-base",
        "sparse-heads-base",
        "weights-base",
    }


def test_whisper_attends_to_exactly_1500_audio_positions():
    spec = find_spec("whisper-large-cross")
    assert [tensor.dims for tensor in spec.inputs] == [("B", "S", 1280), ("B", 1500, 1280), ("B", 1500, 1280)]


def test_bloom_takes_a_bias_for_each_head():
    assert find_spec("bloom-560m").inputs[-1].dims == (1, 16, "S", "S")


@pytest.mark.parametrize("names", [TINY, sorted(set(NAMES) - set(TINY))], ids=["tiny", "full"])
def test_the_catalogue_has_every_choice_in_both_sizes(names):
    choices = {
        "variant": VARIANTS,
        "attends": ATTENDS,
        "mask": MASKS,
        "projections": PROJECTIONS,
        "kind": ("MHA", "GQA", "MQA"),
        **dict.fromkeys(("bias", "causal", "weights"), (True, False)),
    }
    for field, values in choices.items():
        assert {getattr(find_spec(name), field) for name in names} == set(values), field


def test_the_test_sizes_differ_from_plain_attention_in_what_their_names_say():
    plain = find_spec("tiny-mha").to_dict()
    differences = {}
    for name in TINY:
        data = find_spec(name).to_dict()
        changed = {key for key in {*plain, *data} if plain.get(key) != data.get(key)}
        differences[name] = changed - {"name", "summary"}
    assert differences == TINY_DIFFERENCES


def test_the_two_sparse_head_test_sizes_differ_in_renormalisation():
    plain, renormalised = find_spec("tiny-sparse-heads"), find_spec("tiny-sparse-heads-renormalised")
    assert not plain.sparse_heads.renormalise
    assert renormalised.sparse_heads.renormalise


def test_a_cross_test_size_has_other_usual_lengths_for_keys_than_for_queries():
    for name in ("tiny-cross", "tiny-cross-padding"):
        usual = find_spec(name).sizes("opt")
        assert usual["S"] != usual["T"]


# -- finding and reading -----------------------------------------------------------------------


def test_a_model_is_found_by_name_or_by_path():
    path = catalog_folder() / "tiny-gqa.toml"
    assert find_spec("tiny-gqa") == find_spec(str(path)) == read_spec(path)


def test_a_spec_is_named_after_its_file(tmp_path):
    path = write(tmp_path, "Hq = 2\nE = 32\naxes = { B = 1, S = 8 }\n", "my-model.toml")
    assert find_spec(str(path)).name == "my-model"


@pytest.mark.parametrize("word", ["name-3", "other"])
@pytest.mark.parametrize("count", [4, 12])  # few are listed
def test_a_sentence_behind_the_nearest_name_is_one_by_itself(word, count):
    known = [f"name-{number}" for number in range(count)]
    assert re.search(r"\S[.?] Then more\.$", nearest(word, known, "Then more."))
    assert nearest(word, known) == nearest(word, known).strip(" .")


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(SpecError, match="No model of that name") as caught:
        find_spec("bert-bse")
    assert caught.value.got == "bert-bse"
    assert "did you mean 'bert-base'?" in caught.value.hint
    assert ".toml" in caught.value.hint


def test_a_name_near_to_nothing_lists_what_models_lists():
    with pytest.raises(SpecError) as caught:
        find_spec("zzz")
    assert all((name in caught.value.hint) != name.startswith("tiny-") for name in NAMES)
    with pytest.raises(SpecError) as caught:
        find_spec("tiny-rop")
    assert "tiny-rope" in caught.value.hint


def test_a_misspelled_file_is_no_name(tmp_path):
    (tmp_path / "clip.onnx").write_bytes(b"")
    with pytest.raises(SpecError) as caught:
        find_spec(str(tmp_path / "clip.onx"))
    assert str(tmp_path / "clip.onnx") in caught.value.hint


def test_the_factories_of_a_file_are_named(tmp_path):
    path = tmp_path / "models.py"
    path.write_text(
        "def chat():\n    return md.from_transformers(model())\n\n"
        "def encoder():\n    return Deployable(module)\n\n"
        "def model():\n    return 1\n"
    )
    with pytest.raises(SpecError) as caught:
        find_spec(str(path))
    assert caught.value.hint == f"{path}:chat or {path}:encoder"


def test_a_model_or_a_misspelled_folder_in_place_of_a_bundle_is_named(tmp_path):
    with pytest.raises(BundleError) as caught:
        md.open_bundle("bert-base")
    assert "deploy bert-base" in caught.value.hint
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "manifest.json").write_text("{}")
    with pytest.raises(BundleError) as caught:
        md.open_bundle(tmp_path / "encodr")
    assert str(tmp_path / "encoder?") in caught.value.hint


def test_a_name_cannot_lead_out_of_the_catalogue():
    with pytest.raises(SpecError, match="No model of that name"):
        find_spec("../models/bert-base")


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "absent.toml"
    with pytest.raises(SpecError, match="There is no such spec file") as caught:
        find_spec(str(path))
    assert caught.value.got == str(path)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_folder_is_not_a_spec_file(tmp_path):
    with pytest.raises(SpecError, match="cannot be read"):
        read_spec(tmp_path)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="cannot be read"):
        read_spec(path)


def test_malformed_toml_is_refused_with_its_line(tmp_path):
    path = write(tmp_path, "Hq = 4\nE = \n")
    with pytest.raises(SpecError, match="not valid TOML") as caught:
        read_spec(path)
    assert str(path) in caught.value.got
    assert "line 2" in caught.value.got


def test_a_name_inside_the_file_is_refused(tmp_path):
    path = write(tmp_path, 'name = "other"\nHq = 2\nE = 32\naxes = { B = 1, S = 8 }\n')
    with pytest.raises(SpecError, match="named after its file") as caught:
        read_spec(path)
    assert caught.value.hint == "remove `name`"


def test_a_bad_spec_is_refused_with_the_file_and_the_nearest_key(tmp_path):
    path = write(tmp_path, "Hq = 2\nE = 32\ncasual = true\naxes = { B = 1, S = 8 }\n")
    with pytest.raises(SpecError, match=r"^mine\.toml: Unknown key") as caught:
        read_spec(path)
    assert caught.value.got == "casual"
    assert caught.value.hint == "did you mean 'causal'?"
    assert isinstance(caught.value.__cause__, SpecError)


def test_an_empty_file_says_what_it_lacks(tmp_path):
    with pytest.raises(SpecError, match="lacks Hq, E, axes"):
        read_spec(write(tmp_path, ""))


def test_a_file_of_a_checkpoint_leads_to_its_folder(tmp_path):
    weights = tmp_path / "checkpoint" / "model.safetensors"
    weights.parent.mkdir()
    weights.touch()
    with pytest.raises(DeployError) as caught:
        md.load_model(str(weights))
    assert "weights" in caught.value.hint
    (weights.parent / "config.json").write_text("{}")
    for load in (md.load_model, md.load_checkpoint):
        with pytest.raises(DeployError) as caught:
            load(str(weights))
        assert str(weights.parent) in caught.value.hint
        assert "weights" not in caught.value.hint
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DeployError) as caught:
        md.load_model(str(tmp_path / "notes.txt"))
    assert "weights" not in caught.value.hint
