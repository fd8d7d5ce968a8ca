"""Layers of Hugging Face checkpoints compute what the attention of `transformers` computes."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import mha_deploy as md
from mha_deploy.model.huggingface import checkpoint_files, find_attention
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import alibi_bias
from mha_deploy.reference.weights import read_weights

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 97, "max_position_embeddings": 128}
GROUPED = {
    **SIZES,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "pad_token_id": 0,
}
HEADS = {**SIZES, "num_attention_heads": 4, "intermediate_size": 64, "pad_token_id": 0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = {**LLAMA3, "original_max_position_embeddings": 16, "rope_theta": 500.0}
# Name: configuration and its options. The first eight are those that people bring most.
MODELS = {
    "bert": ("BertModel", HEADS),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 64},
    ),
    "llama": ("LlamaForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "gpt_neox": ("GPTNeoXForCausalLM", HEADS),
    "falcon": ("FalconForCausalLM", {**HEADS, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "phi3": ("Phi3ForCausalLM", GROUPED),
}
MORE = {
    "llama-3.1": ("LlamaForCausalLM", {**GROUPED, "rope_parameters": LLAMA3, "head_dim": 32}),
    "llama-bias": ("LlamaForCausalLM", {**GROUPED, "attention_bias": True}),
    "falcon-7b": ("FalconForCausalLM", {**HEADS, "multi_query": True, "new_decoder_architecture": False}),
    "falcon-rw": ("FalconForCausalLM", {**HEADS, "multi_query": False, "new_decoder_architecture": False}),
    "gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": 32}),
    "gemma2": ("Gemma2ForCausalLM", {**GROUPED, "head_dim": 32, "sliding_window": 5}),
    "phi": ("PhiForCausalLM", GROUPED),
    "cohere": ("CohereForCausalLM", GROUPED),
    "granite": ("GraniteForCausalLM", {**GROUPED, "attention_multiplier": 0.2}),
    "starcoder2": ("Starcoder2ForCausalLM", {**GROUPED, "sliding_window": 6}),
    "stablelm": ("StableLmForCausalLM", {**GROUPED, "use_qkv_bias": True}),
    "olmo": ("OlmoForCausalLM", GROUPED),
    "mixtral": ("MixtralForCausalLM", GROUPED),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**GROUPED, "moe_intermediate_size": 16, "num_experts": 4}),
    "gptj": ("GPTJForCausalLM", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97, "rotary_dim": 8}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 97,
            "window_size": 5,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97}),
    "opt": ("OPTForCausalLM", {**HEADS, "ffn_dim": 64, "word_embed_proj_dim": 64}),
    "smollm3": ("SmolLM3ForCausalLM", {**GROUPED, "no_rope_layers": [1, 0]}),
    "glm": ("GlmForCausalLM", {**GROUPED, "head_dim": 16}),
    "helium": ("HeliumForCausalLM", {**GROUPED, "head_dim": 16}),
    "arcee": ("ArceeForCausalLM", GROUPED),
    "nemotron": ("NemotronForCausalLM", GROUPED),
    "roberta": ("RobertaModel", HEADS),
    "electra": ("ElectraModel", {**HEADS, "embedding_size": 32}),
    "distilbert": (
        "DistilBertModel",
        {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 97},
    ),
    "seed_oss": ("SeedOssForCausalLM", GROUPED),
    "ernie4_5": ("Ernie4_5ForCausalLM", {**GROUPED, "head_dim": 16}),
    "xglm": (
        "XGLMForCausalLM",
        {"d_model": 64, "num_layers": 2, "attention_heads": 4, "vocab_size": 97, "ffn_dim": 64},
    ),
    "biogpt": ("BioGptForCausalLM", HEADS),
    "bloom": ("BloomForCausalLM", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97}),
    "mpt": (
        "MptForCausalLM",
        {"d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 97, "max_seq_len": 64},
    ),
    "vit": ("ViTModel", {**HEADS, "image_size": 32, "patch_size": 8}),
    "dinov2": ("Dinov2Model", {**HEADS, "image_size": 28, "patch_size": 7, "mlp_ratio": 2}),
    "persimmon": ("PersimmonForCausalLM", {**HEADS, "qk_layernorm": False}),
}


def made(name, folder, **options):
    """A model with random weights that attends sharply, and its checkpoint."""
    kind, config = {**MODELS, **MORE}[name]
    torch.manual_seed(0)
    maker = getattr(transformers, kind)
    model = maker(maker.config_class(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder, **options)
    return model


def seen(model, tensors, length=12):
    """What goes into and comes out of the attention of a model, and its batch of tokens."""
    got = {}
    first = next(name for (role, _), name in tensors.names.items() if role in ("q", "qkv", "groups"))
    modules = dict(model.named_modules())
    last = tensors.names["o", "weight"].removesuffix(".weight")
    modules[first.rpartition(".")[0]].register_forward_pre_hook(lambda _, args: got.update(x=args[0]))
    modules[last].register_forward_hook(lambda _, args, out: got.update(y=out))
    random = torch.Generator().manual_seed(1)
    size = getattr(model.config, "image_size", None)
    with torch.no_grad():
        if size is not None:
            model(pixel_values=torch.randn(2, 3, size, size, generator=random))
        else:
            model(input_ids=torch.randint(1, 97, (2, length), generator=random))
    return got["x"], got["y"]


def distance(name, folder, layer=0):
    model = made(name, folder)
    loaded = md.load_checkpoint(folder, layer)
    x, wanted = seen(model, find_attention(model.state_dict(), layer=layer))
    module = build_module(loaded.source, weights=read_weights(folder, loaded.source, layer=layer)[0])
    given = {}
    if loaded.source.mask == "padding":
        given["key_lengths"] = torch.full((len(x),), x.shape[1], dtype=torch.int32)
    if loaded.source.mask == "additive":
        given["attention_bias"] = alibi_bias(loaded.source.Hq, x.shape[1], x.shape[1]).float()
    with torch.no_grad():
        got = module(x, **given)
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_computes_what_transformers_computes(name, tmp_path):
    assert distance(name, tmp_path / "checkpoint", layer=1) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("layer", [0, 1])
def test_so_do_others(name, layer, tmp_path):
    if not hasattr(transformers, MORE[name][0]):
        pytest.skip(f"transformers has no {MORE[name][0]}")
    assert distance(name, tmp_path / "checkpoint", layer) < 1e-5


# -- where the weights come from -------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A checkpoint in several files, and the same tensors in one."""
    folder = tmp_path_factory.mktemp("llama")
    model = made("llama", folder / "sharded", max_shard_size="40KB")
    model.save_pretrained(folder / "single")
    return folder


def test_shards_their_index_a_folder_and_a_single_file_hold_the_same_layer(llama):
    assert len(list((llama / "sharded").glob("*.safetensors"))) > 1
    spec = md.load_checkpoint(llama / "single", 1).source
    prefix = "model.layers.1.self_attn"
    wanted, notes = read_weights(llama / "single", spec, layer=1)
    assert any("elsewhere" in note for note in notes)
    for path in ("sharded", "sharded/model.safetensors.index.json", "single/model.safetensors"):
        got = read_weights(llama / path, spec, prefix=prefix)[0]
        assert got.keys() == wanted.keys() == {"q.weight", "k.weight", "v.weight", "o.weight"}
        assert all(torch.equal(got[name], wanted[name]) for name in got)


def test_the_command_line_takes_a_checkpoint(llama, run_cli, tmp_path):
    done = run_cli("export", "--hf", llama / "sharded", "--layer", 1, "-o", tmp_path / "b", "--golden", "min")
    assert done.code == 0, done.err
    manifest = md.open_bundle(tmp_path / "b").manifest
    assert manifest.spec.name == "sharded-layer-1"
    assert "layer 1" in manifest.weights
    assert any("model.layers.1.self_attn.q_proj.weight" in note for note in manifest.notes)
    assert any("elsewhere in the checkpoint" in note for note in manifest.notes)
    done = run_cli("export", "-o", tmp_path / "c")
    assert done.code == 2
    assert "--hf" in done.err
    done = run_cli("analyze", "--hf", llama / "single", "--json")
    assert done.code == 0, done.err


@pytest.mark.slow
def test_the_command_line_compares_the_heads_of_a_checkpoint(llama, run_cli, tmp_path):
    done = run_cli("analyze", "--hf", llama / "single", "--heads", tmp_path / "heads.png", "--json")
    assert done.code == 0, done.err
    assert len(json.loads(done.out)["heads"]["matrix"]) == 4


def test_a_pickle_is_refused_with_the_reason(llama, tmp_path):
    shutil.copy(llama / "single" / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(md.DeployError, match="run code") as caught:
        md.load_checkpoint(tmp_path)
    assert "save_pretrained" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen3"}, "q_norm"),
        ({"model_type": "martian"}, "not known"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "yarn"),
        ({"clip_qkv": 8.0}, "clip"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"num_attention_heads": None}, "num_attention_heads"),
    ],
)
def test_what_a_catalog_layer_cannot_express_is_refused(llama, tmp_path, change, words):
    config = json.loads((llama / "single" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    shutil.copy(llama / "single" / "model.safetensors", tmp_path)
    with pytest.raises(md.DeployError, match=words) as caught:
        md.load_checkpoint(tmp_path)
    assert ("from_transformers" in caught.value.hint) == ("cannot express" in caught.value.what)


def test_norms_of_queries_in_the_weights_are_not_ignored(llama, tmp_path):
    state = load_file(llama / "single" / "model.safetensors")
    state["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(md.DeployError, match="cannot express") as caught:
        read_weights(tmp_path, md.load_checkpoint(llama / "single").source, layer=0)
    assert "q_norm" in caught.value.got


@pytest.mark.parametrize("name", ["../single/model.safetensors", "a\0.safetensors", "\ud800.safetensors"])
def test_an_index_that_points_elsewhere_is_refused(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(md.DeployError):
        checkpoint_files(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"),
        ("wq.weight", "wk.weight", "wv.weight", "wo.weight"),
        ("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight", "to_out.0.bias"),
        ("attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight"),
        (
            *(f"attention.self.{name}.weight" for name in ("query", "key", "value")),
            *("attention.output.dense.weight", "attention.output.LayerNorm.weight"),
        ),
    ],
)
@pytest.mark.parametrize("prefix", ["", "blocks.3"])
def test_the_usual_names_are_found(names, prefix):
    everything = [f"{prefix}.{name}".removeprefix(".") for name in names] + ["head.weight"]
    found = find_attention(everything, prefix)
    assert {role for role, _ in found.names} in ({"q", "k", "v", "o"}, {"qkv", "o"})
    assert len(found.names) + len(found.ignored) == len(names) + (0 if found.prefix else 1)


def test_an_attention_that_is_not_the_only_one_is_asked_for(llama):
    with pytest.raises(md.DeployError, match="no single attention") as caught:
        find_attention(checkpoint_files(llama / "single"))
    assert "model.layers.1.self_attn" in caught.value.got
    assert "prefix=" in caught.value.hint
