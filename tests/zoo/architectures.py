"""Published architectures in small sizes: two layers, random weights, plain tensors in and out.

`ZOO` maps a name to its `Entry`. The library of an entry is imported by its factory alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from families import FAMILIES, WHY, Made
from torch import nn

import mha_deploy as md

VOCAB, WIDTH, HEADS, INNER, LONGEST = 96, 64, 4, 96, 64
AXES = {"B": "1:2:4", "S": "1:16:32", "T": "1:12:24"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One architecture, and what is expected of it.

    Args:
        make: Makes the `Deployable`; imports the library.
        family: What it is: text encoder, decoder, vision, ...
        library: The package that it comes from.
        attentions: How many attentions it computes.
        fused: How many of them are one `Attention` node of the exported graph; default: all.
        engine: How many of them TensorRT-RTX fuses; default: as many as `fused`.
        inexpressible: How many of them no ONNX `Attention` node computes.
        why: Why it is not exported, or not all attentions are fused.
        fails: A part of the message of an export that is refused.
        passes: Whether its outputs and attentions are within budget in ONNX Runtime.
    """

    make: Callable[[], md.Deployable]
    family: str
    library: str
    attentions: int
    fused: int | None = None
    engine: int | None = None
    inexpressible: int = 0
    why: str = ""
    fails: str = ""
    passes: bool = True


ZOO: dict[str, Entry] = {}

# Where not every attention becomes one node, and one kernel of TensorRT-RTX; and what is refused.
_LINEAR = "linear attention has no softmax, which ONNX's Attention always has"
_SMALL_HEADS = "TensorRT-RTX decomposes heads of 8 numbers"
NOT_ALL: dict[str, dict[str, Any]] = {
    "gemma2": {"engine": 0, "why": "TensorRT-RTX decomposes attention with softcap"},
    "minimax": {"fused": 1, "inexpressible": 1, "why": _LINEAR},
    "switch-transformers": {"fails": "data-dependent", "why": "its experts loop over their tokens; "
                            "`switch-transformers-dense` computes every expert for all tokens"},
    "sam-mask-decoder": {"engine": 2, "why": _SMALL_HEADS},
    "perceiver": {"engine": 0, "why": _SMALL_HEADS},
    "diffusers-unet-cross": {"engine": 0, "why": "TensorRT-RTX decomposes heads of 4 numbers"},
    "vilt": {"fails": "data-dependent", "why": "it chooses patches by the values of a mask; "
             "`vilt-embeddings` takes the patches in their place"},
    "timm-efficientvit": {"attentions": 1, "fused": 0, "inexpressible": 1, "why": _LINEAR},
    "diffusers-sana": {"fused": 2, "inexpressible": 2, "why": _LINEAR},
    "timm-cait": {"fused": 2, "inexpressible": 2, "why": "heads are mixed between scores and softmax"},
    "timm-coatnet": {"engine": 1, "why": "TensorRT-RTX decomposes one"},
    "longformer": {"fails": "data-dependent", "why": "it chooses its global tokens by the values of a mask"},
    "diffusers-pixart": {"fails": "ONNX Runtime cannot load the graph",
                         "why": "PyTorch writes a Squeeze of an axis that is not 1"},
    "llava": {"engine": 0, "why": "TensorRT-RTX has no NonZero"},
    "torch-cond": {"engine": 0, "why": "TensorRT-RTX does not build attention in branches"},
    "wavlm": {"engine": 0, "why": "TensorRT-RTX decomposes both"},
    "convbert": {"fused": 2, "inexpressible": 2, "why": "half of its heads are convolutions whose weights a "
                 "softmax normalizes"},
    "dbrx": {"fails": "data-dependent", "why": "its experts loop over their tokens"},
    "xmod": {"engine": 0, "why": "TensorRT-RTX has no NonZero"},
    "jetmoe": {"engine": 0, "passes": False, "why": "its experts add to slices, which TensorRT-RTX does not "
               "build and ONNX Runtime on the CPU does not run in FP16"},
    "vaultgemma": {"engine": 0, "why": "TensorRT-RTX decomposes attention with softcap"},
    "pointer-network": {"engine": 0, "why": "TensorRT-RTX decomposes it"},
    "timm-maxvit": {"engine": 2, "why": "TensorRT-RTX decomposes two of them"},
}  # fmt: skip


class Plain(nn.Module):
    """A model with plain tensors in, and one tensor out."""

    def __init__(self, model: nn.Module, output: str | int = 0, **options: Any) -> None:
        super().__init__()
        self.model, self.output, self.options = model, output, options

    def forward(self, **inputs):
        done = self.model(**inputs, **self.options)
        return getattr(done, self.output) if isinstance(self.output, str) else done[self.output]


class Positional(Plain):
    """The same, for a model of one result whose parameters have other names than the inputs."""

    def forward(self, **inputs):
        return self.model(*inputs.values())


def spread(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights of a size that keeps activations at one: nothing underflows, no attention is uniform."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point() or weight.dim() == 0:
                continue
            drawn = torch.randn(weight.shape, generator=random)
            if weight.dim() == 1:
                weight.add_((drawn * 0.1).to(weight.dtype))
            else:
                experts = weight.dim() == 3 and "expert" in name
                inputs = weight.shape[1] if experts else weight[0].numel()
                weight.copy_(drawn * max(inputs, 1) ** -0.5)
    return model.eval()


def example(*shape: int, high: int = 0) -> torch.Tensor:
    """Normal numbers, or integers below `high`."""
    random = torch.Generator().manual_seed(sum(shape))
    return torch.randint(1, high, shape, generator=random) if high else torch.randn(shape, generator=random)


def text(length: str = "S", size: int = 9) -> md.Example:
    """Token ids."""
    return md.Example(example(2, size, high=VOCAB), "B", length)


def padding(length: str = "S", size: int = 9, *, hidden: bool = False) -> md.Example:
    """A padding mask of tokens, or of what is not (`hidden`): later batch elements are shorter."""

    def draw(shape, generator=None):
        ends = (shape[1] - torch.arange(shape[0])).clamp(min=1)
        tokens = torch.arange(shape[1]) < ends[:, None]
        return ~tokens if hidden else tokens.long()

    return md.Example(draw((2, size)), "B", length, draw=draw)


def image(size: int = 32, channels: int = 3) -> md.Example:
    """An image of one size."""
    return md.Example(example(2, channels, size, size), "B")


def deployable(name: str, module: nn.Module, inputs: Mapping[str, md.Example]) -> md.Deployable:
    """The module with the ranges of the axes that its inputs name."""
    named = {axis for each in inputs.values() for axis in each.axes if axis}
    axes = {axis: AXES[axis] for axis in AXES if axis in named}
    return md.Deployable(module=module, inputs=inputs, axes=axes, name=name)


def add(name: str, make: Callable[[], tuple[nn.Module, Mapping[str, md.Example]]], **sizes: Any) -> None:
    """Put an architecture into the zoo."""

    def made() -> md.Deployable:
        torch.manual_seed(0)
        return deployable(name, *make())

    ZOO[name] = Entry(make=made, **{**sizes, **NOT_ALL.get(name, {})})


# -- Hugging Face Transformers ---------------------------------------------------------------------

SMALL = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS}
SMALL |= {"intermediate_size": INNER, "max_position_embeddings": LONGEST}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
GROUPED = {**SMALL, **SPECIAL, "num_key_value_heads": 2}
LEGACY = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": LONGEST}
LEGACY |= {"bos_token_id": 1, "eos_token_id": 2}
VISION = {key: SMALL[key] for key in SMALL if key not in ("vocab_size", "max_position_embeddings")}
VISION |= {"image_size": 32, "patch_size": 8}
SEQ2SEQ = {"vocab_size": VOCAB, "d_model": WIDTH, "max_position_embeddings": LONGEST, **SPECIAL}
SEQ2SEQ |= {f"{part}_layers": 2 for part in ("encoder", "decoder")}
SEQ2SEQ |= {f"{part}_attention_heads": HEADS for part in ("encoder", "decoder")}
SEQ2SEQ |= {f"{part}_ffn_dim": INNER for part in ("encoder", "decoder")}
T5 = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 16, "d_ff": INNER, "num_layers": 2, "num_heads": HEADS}


def hf(model: str, config: str, **sizes: Any) -> nn.Module:
    """A model of Transformers, made from its config."""
    import transformers

    return spread(getattr(transformers, model)(getattr(transformers, config)(**sizes)))


def texts(
    name: str, family: str, attentions: int, sizes: Mapping[str, Any], stem: str, **expected: Any
) -> None:
    """A model that takes token ids and a padding mask."""

    def make():
        cached = {} if family == "text encoder" else {"use_cache": False}
        module = Plain(hf(f"{stem}Model", f"{stem}Config", **sizes), "last_hidden_state", **cached)
        return module, {"input_ids": text(), "attention_mask": padding()}

    add(name, make, family=family, library="transformers", attentions=attentions, **expected)


TRANSLATORS: dict[str, Callable[[], tuple[nn.Module, Mapping[str, md.Example]]]] = {}


def translators(name: str, attentions: int, sizes: Mapping[str, Any], stem: str, **expected: Any) -> None:
    """An encoder with a decoder, both for text."""

    def make():
        module = Plain(hf(f"{stem}Model", f"{stem}Config", **sizes), "last_hidden_state", use_cache=False)
        inputs = {"input_ids": text("T", 7), "attention_mask": padding("T", 7), "decoder_input_ids": text()}
        return module, inputs

    TRANSLATORS[name] = make
    add(name, make, family="encoder-decoder", library="transformers", attentions=attentions, **expected)


def images(
    name: str, attentions: int, sizes: Mapping[str, Any], stem: str, *, size: int = 32, **expected: Any
) -> None:
    """A model that takes images."""

    def make():
        module = Plain(hf(f"{stem}Model", f"{stem}Config", **sizes), "last_hidden_state")
        return module, {"pixel_values": image(size)}

    add(name, make, family="vision", library="transformers", attentions=attentions, **expected)


texts("bert", "text encoder", 2, SMALL, "Bert")
texts("roberta", "text encoder", 2, {**SMALL, "max_position_embeddings": LONGEST + 2}, "Roberta")
texts("distilbert", "text encoder", 2, {"vocab_size": VOCAB, "dim": WIDTH, "n_layers": 2, "n_heads": HEADS,
      "hidden_dim": INNER, "max_position_embeddings": LONGEST}, "DistilBert")  # fmt: skip
texts("albert", "text encoder", 2, {**SMALL, "embedding_size": 32}, "Albert")
texts("deberta-v2", "text encoder", 2, {**SMALL, "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
      "position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"}, "DebertaV2")  # fmt: skip
texts("mpnet", "text encoder", 2, {**SMALL, "max_position_embeddings": LONGEST + 2}, "MPNet")
texts("modernbert", "text encoder", 2, {**SMALL, **SPECIAL, "local_attention": 8, "cls_token_id": 1,
      "sep_token_id": 2}, "ModernBert")  # fmt: skip
texts("xlnet", "text encoder", 2, {"vocab_size": VOCAB, "d_model": WIDTH, "n_layer": 2, "n_head": HEADS,
      "d_inner": INNER}, "XLNet")  # fmt: skip
texts("roformer", "text encoder", 2, {**SMALL, "embedding_size": WIDTH}, "RoFormer")
texts("esm", "text encoder", 2, {**SMALL, "pad_token_id": 0, "mask_token_id": 3,
      "position_embedding_type": "rotary", "token_dropout": False}, "Esm")  # fmt: skip
texts("bigbird-sparse", "text encoder", 2, {**SMALL, "attention_type": "block_sparse", "block_size": 2,
      "num_random_blocks": 1}, "BigBird")  # fmt: skip
texts("longformer", "text encoder", 2, {**SMALL, "attention_window": 4, "max_position_embeddings": 80},
      "Longformer")  # fmt: skip
texts("deberta", "text encoder", 2, {**SMALL, "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
      "max_relative_positions": 8}, "Deberta")  # fmt: skip
texts("squeezebert", "text encoder", 2, {**SMALL, "embedding_size": WIDTH}, "SqueezeBert")
texts("convbert", "text encoder", 4, {**SMALL, "embedding_size": WIDTH}, "ConvBert")
texts("nomic-bert", "text encoder", 2, {**SMALL, **SPECIAL}, "NomicBert")
texts("gte", "text encoder", 2, {**SMALL, **SPECIAL}, "Gte")
texts("esmc", "text encoder", 2, {**SMALL, **SPECIAL}, "Esmc")
texts("ibert", "text encoder", 2, SMALL, "IBert")
texts("xmod", "text encoder", 2, {**SMALL, "languages": ["en"], "default_language": "en"}, "Xmod")
texts("xlm", "text encoder", 2, {"vocab_size": VOCAB, "emb_dim": WIDTH, "n_layers": 2, "n_heads": HEADS,
      "max_position_embeddings": LONGEST}, "XLM")  # fmt: skip

texts("gpt2", "decoder", 2, LEGACY, "GPT2")
texts("gpt-neo", "decoder", 2, {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_layers": 2,
      "num_heads": HEADS,
      "attention_types": [[["global", "local"], 1]], "window_size": 4, "max_position_embeddings": LONGEST,
      "bos_token_id": 1, "eos_token_id": 2}, "GPTNeo")  # fmt: skip
texts("gpt-j", "decoder", 2, {**LEGACY, "rotary_dim": 8}, "GPTJ")
texts("codegen", "decoder", 2, {**LEGACY, "rotary_dim": 8}, "CodeGen")
texts("gpt-neox", "decoder", 2, {**SMALL, **SPECIAL}, "GPTNeoX")
texts("gpt-bigcode", "decoder", 2, {**LEGACY, "multi_query": True}, "GPTBigCode")
texts("opt", "decoder", 2, {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2,
      "num_attention_heads": HEADS, "ffn_dim": INNER, "max_position_embeddings": LONGEST, "pad_token_id": 0,
      "word_embed_proj_dim": WIDTH, "bos_token_id": 1, "eos_token_id": 2}, "OPT")  # fmt: skip
texts("bloom", "decoder", 2, {"vocab_size": VOCAB, "hidden_size": WIDTH, "n_layer": 2, "n_head": HEADS,
      "bos_token_id": 1, "eos_token_id": 2}, "Bloom")  # fmt: skip
texts("mpt", "decoder", 2, {"vocab_size": VOCAB, "d_model": WIDTH, "n_layers": 2, "n_heads": HEADS,
      "max_seq_len": LONGEST, "expansion_ratio": 2}, "Mpt")  # fmt: skip
FALCON = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
          "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": LONGEST}  # fmt: skip
texts("falcon-mqa", "decoder", 2, {**FALCON, "multi_query": True, "new_decoder_architecture": False},
      "Falcon")  # fmt: skip
texts("falcon-alibi", "decoder", 2, {**FALCON, "alibi": True, "multi_query": True}, "Falcon")
texts("llama", "decoder", 2, GROUPED, "Llama")
texts("mistral", "decoder", 2, {**GROUPED, "sliding_window": 8}, "Mistral")
texts("qwen2", "decoder", 2, GROUPED, "Qwen2")
texts("qwen3", "decoder", 2, {**GROUPED, "head_dim": 32}, "Qwen3")
texts("phi3", "decoder", 2, GROUPED, "Phi3")
texts("gemma", "decoder", 2, {**GROUPED, "head_dim": 16}, "Gemma")
texts("gemma2", "decoder", 2, {**GROUPED, "head_dim": 16, "sliding_window": 8}, "Gemma2")
texts("gemma3", "decoder", 2, {**GROUPED, "head_dim": 16, "sliding_window": 8}, "Gemma3Text")
texts("olmo2", "decoder", 2, GROUPED, "Olmo2")
texts("stablelm", "decoder", 2, GROUPED, "StableLm")
texts("starcoder2", "decoder", 2, GROUPED, "Starcoder2")
texts("cohere", "decoder", 2, GROUPED, "Cohere")
texts("glm4", "decoder", 2, {**GROUPED, "head_dim": 16}, "Glm4")
EXPERTS = {**GROUPED, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
texts("mixtral", "decoder", 2, {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, "Mixtral")
texts("qwen3-moe", "decoder", 2, {**EXPERTS, "num_experts": 4, "head_dim": 16}, "Qwen3Moe")
texts("gpt-oss", "decoder", 2, {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
      "sliding_window": 8}, "GptOss")  # fmt: skip
DEEPSEEK = {**EXPERTS, "num_key_value_heads": HEADS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
            "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
            "v_head_dim": 16, "first_k_dense_replace": 1, "n_shared_experts": 1}  # fmt: skip
texts("deepseek-v3", "decoder", 2, DEEPSEEK, "DeepseekV3")
texts("llama4", "decoder", 2, {**GROUPED, "head_dim": 16, "num_local_experts": 4,
      "intermediate_size_mlp": INNER,
      "num_experts_per_tok": 1, "attention_chunk_size": 8}, "Llama4Text")  # fmt: skip
texts("minimax", "linear-attention hybrid", 2, {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2,
      "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}, "MiniMax")  # fmt: skip
texts("lfm2", "linear-attention hybrid", 1, {**GROUPED, "layer_types": ["conv", "full_attention"],
      "block_ff_dim": INNER}, "Lfm2")  # fmt: skip
texts("diffllama", "decoder", 4, GROUPED, "DiffLlama")
texts("doge", "decoder", 2, GROUPED, "Doge")
texts("cohere2", "decoder", 2, {**GROUPED, "head_dim": 16, "sliding_window": 8}, "Cohere2")
texts("exaone4", "decoder", 2, {**GROUPED, "head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2},
      "Exaone4")  # fmt: skip
texts("modernbert-decoder", "decoder", 2, {**SMALL, **SPECIAL, "local_attention": 8, "cls_token_id": 1,
      "sep_token_id": 2}, "ModernBertDecoder")  # fmt: skip
texts("nanochat", "decoder", 2, GROUPED, "NanoChat")
texts("vaultgemma", "decoder", 2, {**GROUPED, "head_dim": 16, "sliding_window": 8}, "VaultGemma")
texts("ctrl", "decoder", 2, {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS,
      "dff": INNER, "n_positions": LONGEST}, "CTRL")  # fmt: skip
texts("imagegpt", "decoder", 2, LEGACY, "ImageGPT")
texts("biogpt", "decoder", 2, {**SMALL, **SPECIAL}, "BioGpt")
texts("minicpm3", "decoder", 2, DEEPSEEK, "MiniCPM3")
texts("deepseek-v2", "decoder", 2, DEEPSEEK, "DeepseekV2")
texts("mimo-v2-flash", "decoder", 2, {**EXPERTS, "num_experts": 4, "n_routed_experts": 4, "head_dim": 16,
      "sliding_window": 8}, "MiMoV2Flash")  # fmt: skip
texts("laguna", "decoder", 2, {**EXPERTS, "num_experts": 4, "head_dim": 16}, "Laguna")
texts("jetmoe", "decoder", 2, {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2,
      "kv_channels": 16}, "JetMoe")  # fmt: skip
texts("dbrx", "decoder", 2, {"vocab_size": VOCAB, "d_model": WIDTH, "n_layers": 2, "n_heads": HEADS,
      "max_seq_len": LONGEST, "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4},
      "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": INNER, "hidden_size": WIDTH}},
      "Dbrx")  # fmt: skip

translators("t5", 6, {**T5, **SPECIAL}, "T5")
translators("umt5", 6, {**T5, **SPECIAL}, "UMT5")
SPARSE = {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
translators(
    "switch-transformers", 6, {**T5, **SPECIAL, **SPARSE, "num_decoder_layers": 2}, "SwitchTransformers"
)


def _dense_switch():
    from transformers.models.switch_transformers import modeling_switch_transformers as switch

    class Dense(nn.Module):
        """Every expert for all tokens, weighted by what the router chose."""

        def __init__(self, experts: nn.ModuleDict):
            super().__init__()
            self.experts = nn.ModuleList(experts.values())

        def forward(self, hidden_states, selected_experts, routing_weights):
            chosen = (selected_experts[:, 0] * routing_weights).unbind(-1)
            return sum(
                expert(hidden_states) * weight[:, None]
                for expert, weight in zip(self.experts, chosen, strict=True)
            )

    module, inputs = TRANSLATORS["switch-transformers"]()
    for part in list(module.modules()):
        if isinstance(part, switch.SwitchTransformersSparseMLP):
            part.experts = Dense(part.experts)
    return module, inputs


add("switch-transformers-dense", _dense_switch, family="encoder-decoder", library="transformers",
    attentions=6)  # fmt: skip
translators("bart", 6, SEQ2SEQ, "Bart")
translators("m2m100", 6, SEQ2SEQ, "M2M100")

images("vit", 2, VISION, "ViT")
images("beit", 2, {**VISION, "use_relative_position_bias": True}, "Beit")
images("dinov2", 2, {**VISION, "mlp_ratio": 2}, "Dinov2")
images("dinov3", 2, VISION, "DINOv3ViT")
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]}
images("swin", 4, {**SWIN, "window_size": 4}, "Swin")
images("swinv2", 4, {**SWIN, "window_size": 4}, "Swinv2")
images("segformer", 4, {"num_encoder_blocks": 2, "depths": [2, 2], "sr_ratios": [4, 2],
       "hidden_sizes": [32, 64],
       "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2]},
       "Segformer")  # fmt: skip
images("pvt-v2", 4, {"num_encoder_blocks": 2, "depths": [2, 2], "sr_ratios": [4, 2], "hidden_sizes": [32, 64],
       "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2],
       "image_size": 32}, "PvtV2")  # fmt: skip
images("mobilevit", 9, {"hidden_sizes": [48, 64, 96], "neck_hidden_sizes": [8, 8, 16, 16, 16, 24, 48],
       "image_size": 64, "patch_size": 2, "num_attention_heads": 4}, "MobileViT", size=64)  # fmt: skip
images("vitdet", 2, {**VISION, "window_size": 2, "window_block_indices": [0], "mlp_ratio": 2,
       "use_relative_position_embeddings": True}, "VitDet")  # fmt: skip
images("clip-vision", 2, VISION, "CLIPVision")
images("sam-vision", 2, {**VISION, "output_channels": 16, "window_size": 2, "global_attn_indexes": [1],
       "mlp_dim": INNER}, "SamVision")  # fmt: skip


def _detr():
    from transformers import DetrConfig, DetrModel, ResNetConfig

    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1],
                            out_features=["stage4"])  # fmt: skip
    config = DetrConfig(use_timm_backbone=False, backbone=None, backbone_config=backbone, d_model=WIDTH,
                        use_pretrained_backbone=False, encoder_layers=2, decoder_layers=2, num_queries=5,
                        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=INNER,
                        decoder_ffn_dim=INNER)  # fmt: skip
    return Plain(spread(DetrModel(config)), "last_hidden_state"), {"pixel_values": image(64)}


def _rt_detr():
    from transformers import RTDetrConfig, RTDetrModel, RTDetrResNetConfig

    backbone = RTDetrResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1],
                                  out_features=["stage2", "stage3", "stage4"])  # fmt: skip
    config = RTDetrConfig(backbone_config=backbone, encoder_hidden_dim=WIDTH, d_model=WIDTH, num_queries=5,
                          encoder_in_channels=[16, 16, 32], decoder_in_channels=[WIDTH] * 3, decoder_layers=2,
                          encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, num_denoising=0,
                          encoder_ffn_dim=INNER, decoder_ffn_dim=INNER, anchor_image_size=None)  # fmt: skip
    return Plain(spread(RTDetrModel(config)), "last_hidden_state"), {"pixel_values": image(64)}


def _sam_decoder():
    from transformers import SamMaskDecoderConfig
    from transformers.models.sam.modeling_sam import SamMaskDecoder

    config = SamMaskDecoderConfig(hidden_size=WIDTH, mlp_dim=INNER, num_hidden_layers=2,
                                  iou_head_hidden_dim=32,
                                  num_attention_heads=HEADS, attention_downsample_rate=2)  # fmt: skip
    module = SamMaskDecoder(config)
    inputs = {
        "image_embeddings": md.Example(example(2, WIDTH, 4, 4), "B"),
        "image_positional_embeddings": md.Example(example(1, WIDTH, 4, 4).expand(2, -1, -1, -1).clone(), "B"),
        "sparse_prompt_embeddings": md.Example(example(2, 1, 2, WIDTH), "B"),
        "dense_prompt_embeddings": md.Example(example(2, WIDTH, 4, 4), "B"),
    }
    return Plain(spread(module), 0, multimask_output=True), inputs


for _name, _make, _attentions in (
    ("detr", _detr, 6),
    ("rt-detr", _rt_detr, 3),
    ("sam-mask-decoder", _sam_decoder, 7),
):
    add(_name, _make, family="vision", library="transformers", attentions=_attentions)


SPEECH = {key: SMALL[key] for key in SMALL if key not in ("vocab_size", "max_position_embeddings")}
SPEECH |= {"vocab_size": 32, "conv_dim": [16, 16], "conv_kernel": [5, 3], "conv_stride": [4, 2],
           "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
           "feat_extract_norm": "layer", "do_stable_layer_norm": True}  # fmt: skip


def sounds(name: str, attentions: int, stem: str, sizes: Mapping[str, Any] = SPEECH, **expected: Any) -> None:
    """A model that takes raw audio of any length."""

    def make():
        module = Plain(hf(f"{stem}Model", f"{stem}Config", **sizes), "last_hidden_state")
        return module, {"input_values": md.Example(example(2, 400), "B", "L")}

    add(name, make, family="audio", library="transformers", attentions=attentions, **expected)


AXES["L"] = "200:400:800"
sounds("wav2vec2", 2, "Wav2Vec2")
sounds("wavlm", 2, "WavLM", {**SPEECH, "num_buckets": 16, "max_bucket_distance": 32})


def _moonshine():
    from transformers import MoonshineConfig, MoonshineModel

    config = MoonshineConfig(vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=INNER,
                             encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, pad_token_id=0,
                             encoder_num_attention_heads=HEADS, decoder_num_attention_heads=HEADS,
                             encoder_num_key_value_heads=HEADS,
                                   decoder_num_key_value_heads=HEADS)  # fmt: skip
    inputs = {"input_values": md.Example(example(2, 2400), "B"), "decoder_input_ids": text()}
    return Plain(spread(MoonshineModel(config)), "last_hidden_state", use_cache=False), inputs


WHISPER = {**{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"}, "num_mel_bins": 8,
           "max_source_positions": 15, "max_target_positions": LONGEST}  # fmt: skip


def _whisper():
    module = Plain(hf("WhisperModel", "WhisperConfig", **WHISPER), "last_hidden_state", use_cache=False)
    return module, {"input_features": md.Example(example(2, 8, 30), "B"), "decoder_input_ids": text()}


def _whisper_encoder():
    module = Plain(hf("WhisperModel", "WhisperConfig", **WHISPER).get_encoder(), "last_hidden_state")
    return module, {"input_features": md.Example(example(2, 8, 30), "B")}


def _ast():
    sizes = {key: VISION[key] for key in VISION if key != "image_size"}
    module = hf(
        "ASTModel", "ASTConfig", **sizes, num_mel_bins=16, max_length=32, frequency_stride=8, time_stride=8
    )
    return Plain(module, "last_hidden_state"), {"input_values": md.Example(example(2, 32, 16), "B")}


def _parakeet():
    sizes = {key: SMALL[key] for key in SMALL if key not in ("vocab_size", "max_position_embeddings")}
    module = hf("ParakeetEncoder", "ParakeetEncoderConfig", **sizes, num_mel_bins=16, subsampling_factor=4,
                subsampling_conv_channels=8, conv_kernel_size=5, max_position_embeddings=256)  # fmt: skip
    return Plain(module, "last_hidden_state"), {"input_features": md.Example(example(2, 100, 16), "B", "L")}


def _wav2vec2_bert():
    sizes = {key: SPEECH[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    module = hf("Wav2Vec2BertModel", "Wav2Vec2BertConfig", **sizes, intermediate_size=INNER, vocab_size=32,
                feature_projection_input_dim=16, conv_depthwise_kernel_size=5)  # fmt: skip
    return Plain(module, "last_hidden_state"), {"input_features": md.Example(example(2, 9, 16), "B", "S")}


def _speech2text():
    sizes = {key: SEQ2SEQ[key] for key in SEQ2SEQ if key != "max_position_embeddings"}
    module = hf("Speech2TextModel", "Speech2TextConfig", **sizes, input_feat_per_channel=8, conv_channels=16,
                num_conv_layers=2, max_source_positions=64, max_target_positions=LONGEST)  # fmt: skip
    inputs = {"input_features": md.Example(example(2, 32, 8), "B"), "decoder_input_ids": text()}
    return Plain(module, "last_hidden_state", use_cache=False), inputs


for _name, _make, _attentions in (
    ("moonshine", _moonshine, 6), ("whisper", _whisper, 6), ("whisper-encoder", _whisper_encoder, 2),
    ("audio-spectrogram-transformer", _ast, 2), ("parakeet", _parakeet, 2), ("wav2vec2-bert",
          _wav2vec2_bert, 2),
    ("speech2text", _speech2text, 6),
):  # fmt: skip
    add(_name, _make, family="audio", library="transformers", attentions=_attentions)


def _two_towers(stem: str):
    def make():
        import transformers

        config = getattr(transformers, f"{stem}Config")(
            text_config={**SMALL, **SPECIAL}, vision_config=VISION, projection_dim=32
        )
        module = Plain(spread(getattr(transformers, f"{stem}Model")(config)), "logits_per_image")
        return module, {"input_ids": md.Example(example(3, 9, high=VOCAB), "T", "S"), "pixel_values": image()}

    return make


add("clip", _two_towers("CLIP"), family="multimodal", library="transformers", attentions=4)
add("siglip", _two_towers("Siglip"), family="multimodal", library="transformers", attentions=5)


def _llava():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaModel

    config = LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=LlamaConfig(**GROUPED),
                         image_token_index=VOCAB - 1, vision_feature_layer=-1)  # fmt: skip
    ids = torch.full((2, 24), 3)
    ids[:, 2:18] = VOCAB - 1
    module = Plain(spread(LlavaModel(config)), "last_hidden_state", use_cache=False)
    return module, {"input_ids": md.Example(ids, "B"), "pixel_values": image()}


def _vilt():
    module = hf("ViltModel", "ViltConfig", **{**SMALL, "image_size": 32, "patch_size": 8})
    inputs = {"input_ids": text(), "pixel_values": image()}
    return Plain(module, "last_hidden_state"), inputs


def _vilt_embeddings():
    module, inputs = _vilt()

    def visible(shape, generator=None):
        return torch.ones(shape, dtype=torch.int64)

    patches = {"image_embeds": md.Example(example(2, 17, WIDTH), "B")}
    patches["pixel_mask"] = md.Example(visible((2, 17)), "B", draw=visible)
    return module, {"input_ids": inputs["input_ids"], **patches}


def _layoutlmv3():
    sizes = {**SMALL, **SPECIAL, "max_position_embeddings": LONGEST + 2, "visual_embed": False}
    sizes |= {"max_2d_position_embeddings": 32, "coordinate_size": 11, "shape_size": 10}  # 4·11 + 2·10: WIDTH
    module = Plain(hf("LayoutLMv3Model", "LayoutLMv3Config", **sizes), "last_hidden_state")

    def boxes(shape, generator=None):
        corner, extent = (torch.randint(0, 16, (*shape[:2], 2), generator=generator) for _ in range(2))
        return torch.cat((corner, corner + extent), -1)

    places = md.Example(boxes((2, 9, 4)), "B", "S", draw=boxes)
    return module, {"input_ids": text(), "bbox": places, "attention_mask": padding()}


def _git():
    from transformers import GitConfig, GitModel

    config = GitConfig(vision_config=VISION, **{**SMALL, **SPECIAL})
    module = Plain(spread(GitModel(config)), "last_hidden_state", use_cache=False)
    return module, {"input_ids": text(), "pixel_values": image()}


def _mllama():
    sizes = {**GROUPED, "cross_attention_layers": [1], "rope_parameters": {"rope_type": "default",
             "rope_theta": 1e4}}  # fmt: skip
    module = hf("MllamaTextModel", "MllamaTextConfig", **sizes)
    inputs = {"input_ids": text(), "cross_attention_states": md.Example(example(2, 5, WIDTH), "B", "T")}
    return Plain(module, "last_hidden_state", use_cache=False), inputs


def _blip():
    from transformers import BlipConfig
    from transformers.models.blip.modeling_blip import BlipForImageTextRetrieval

    sizes = {**SMALL, **SPECIAL, "encoder_hidden_size": WIDTH}
    config = BlipConfig(text_config=sizes, vision_config=VISION, projection_dim=32, image_text_hidden_size=32)
    module = Plain(spread(BlipForImageTextRetrieval(config)), "itm_score")
    return module, {"input_ids": text(), "pixel_values": image()}


def _perceiver():
    sizes = {
        "num_latents": 8,
        "d_latents": 32,
        "d_model": 16,
        "num_blocks": 1,
        "num_self_attends_per_block": 2,
    }
    sizes |= {"num_self_attention_heads": 4, "num_cross_attention_heads": 4}
    module = Plain(hf("PerceiverModel", "PerceiverConfig", **sizes), "last_hidden_state")
    return module, {"inputs": md.Example(example(2, 9, 16), "B", "S")}


for _name, _make, _attentions in (("llava", _llava, 4), ("vilt", _vilt, 2),
                                  ("vilt-embeddings", _vilt_embeddings, 2), ("git", _git, 4), ("blip",
                                  _blip, 6),
                                  ("mllama-text", _mllama, 2), ("perceiver", _perceiver, 3),
                                  ("layoutlmv3", _layoutlmv3, 2)):  # fmt: skip
    add(_name, _make, family="multimodal", library="transformers", attentions=_attentions)


# -- timm ------------------------------------------------------------------------------------------


def timm(
    name: str, model: str, attentions: int, *, size: int = 32, sizes: Mapping[str, Any], **expected
) -> None:
    """A model of timm."""

    def make():
        import timm

        module = timm.create_model(model, num_classes=10, **sizes)
        return Positional(spread(module)), {"image": image(size)}

    add(name, make, family="vision", library="timm", attentions=attentions, **expected)


TIMM = {"img_size": 32, "patch_size": 8, "embed_dim": WIDTH, "depth": 2, "num_heads": HEADS}
timm("timm-vit", "vit_tiny_patch16_224", 2, sizes=TIMM)
timm("timm-eva02", "eva02_tiny_patch14_224", 2, sizes=TIMM)
timm("timm-cait", "cait_xxs24_224", 4, sizes=TIMM)
timm("timm-xcit", "xcit_nano_12_p16_224", 4, sizes={"img_size": 32, "patch_size": 8, "embed_dim": WIDTH,
     "depth": 2, "num_heads": HEADS})  # fmt: skip
timm("timm-swin", "swin_tiny_patch4_window7_224", 4, sizes={"img_size": 32, "patch_size": 2, "window_size": 4,
     "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4)})  # fmt: skip
timm("timm-maxvit", "maxvit_rmlp_pico_rw_256", 4, size=64, sizes={"img_size": 64, "embed_dim": (32, 64),
     "depths": (1, 1), "stem_width": (16, 32)})  # fmt: skip
timm("timm-levit", "levit_128s", 8, size=64, sizes={"img_size": 64, "embed_dim": (32, 32, 32), "key_dim": 16,
     "num_heads": (2, 2, 2), "depth": (2, 2, 2)})  # fmt: skip
timm("timm-pit", "pit_ti_224", 3, size=64, sizes={"img_size": 64, "base_dims": [16, 16, 16], "depth": [1,
     1, 1],
     "heads": [2, 4, 4]})  # fmt: skip
timm("timm-efficientvit", "efficientvit_b0", 2, size=64, sizes={"widths": (8, 16, 32, 32, 32),
     "depths": (1, 1, 1, 1), "head_dim": 16})  # fmt: skip
timm(
    "timm-twins",
    "twins_svt_small",
    4,
    size=64,
    sizes={
        "img_size": 64,
        "embed_dims": (32, 64),
        "num_heads": (2, 4),
        "mlp_ratios": (2, 2),
        "depths": (2, 2),
        "sr_ratios": (4, 2),
        "wss": (4, 4),
    },
)
timm("timm-coatnet", "coatnet_pico_rw_224", 2, size=64, sizes={"img_size": 64, "embed_dim": (16, 32, 64, 64),
     "depths": (1, 1, 1, 1), "stem_width": (16, 16)})  # fmt: skip


# -- torchvision -----------------------------------------------------------------------------------


def torchvision(
    name: str, attentions: int, make_model: Callable[[Any], nn.Module], size: int = 32, **expected
):
    """A model of torchvision."""

    def make():
        from torchvision import models

        return Positional(spread(make_model(models))), {"image": image(size)}

    add(name, make, family="vision", library="torchvision", attentions=attentions, **expected)


torchvision("torchvision-vit", 2, lambda models: models.VisionTransformer(32, 8, 2, HEADS, WIDTH, INNER,
            num_classes=10))  # fmt: skip
torchvision("torchvision-swin", 4, lambda models: models.SwinTransformer([2, 2], 32, [2, 2], [2, 4], [4, 4],
            num_classes=10))  # fmt: skip


def _swin_v2(models):
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

    return models.SwinTransformer([2, 2], 32, [2, 2], [2, 4], [4, 4], num_classes=10,
                                  block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2)  # fmt: skip


torchvision("torchvision-swin-v2", 4, _swin_v2)
torchvision("torchvision-maxvit", 4, lambda models: models.MaxVit((64, 64), 16, 4, [32, 64], [1, 1], 16,
            num_classes=10, stochastic_depth_prob=0.0), size=64)  # fmt: skip


# -- diffusers -------------------------------------------------------------------------------------


def diffuser(name: str, attentions: int, model: str, sizes: Mapping[str, Any], inputs: Callable[[], Any],
             output: str | int = "sample", **expected: Any) -> None:  # fmt: skip
    """A model of diffusers."""

    def make():
        import diffusers

        module = spread(getattr(diffusers, model)(**sizes))
        return Plain(module, 0, return_dict=False), inputs()

    add(name, make, family="diffusion", library="diffusers", attentions=attentions, **expected)


def _latents(size: int = 8) -> dict[str, md.Example]:
    step = torch.tensor([3.0, 7.0])
    return {"hidden_states": image(size, 4), "timestep": md.Example(step, "B", draw=_steps)}


def _steps(shape, generator):
    return torch.randint(1, 900, shape, generator=generator).float()


def _prompt(width: int = 32) -> md.Example:
    return md.Example(example(2, 7, width), "B", "T")


diffuser("diffusers-unet-cross", 8, "UNet2DConditionModel", {"sample_size": 8, "block_out_channels": (32, 64),
         "layers_per_block": 1, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 32,
         "attention_head_dim": 8, "norm_num_groups": 8},
         lambda: {"sample": image(8, 4), "timestep": _latents()["timestep"],
                  "encoder_hidden_states": _prompt()})  # fmt: skip
diffuser("diffusers-vae", 2, "AutoencoderKL", {"block_out_channels": (16, 32), "norm_num_groups": 8,
         "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
         "latent_channels": 4}, lambda: {"sample": image(16)})  # fmt: skip
diffuser("diffusers-dit", 2, "DiTTransformer2DModel", {"num_attention_heads": 4, "attention_head_dim": 16,
         "in_channels": 4, "num_layers": 2, "sample_size": 8, "norm_num_groups": 4},
         lambda: {**_latents(), "class_labels": md.Example(torch.tensor([1, 2]), "B")})  # fmt: skip
diffuser("diffusers-pixart", 4, "PixArtTransformer2DModel", {"num_attention_heads": 4,
         "attention_head_dim": 16,
         "num_layers": 2, "sample_size": 8, "cross_attention_dim": 64, "caption_channels": 32},
         lambda: {**_latents(), "encoder_hidden_states": _prompt()})  # fmt: skip
diffuser("diffusers-sd3", 2, "SD3Transformer2DModel", {"sample_size": 8, "in_channels": 4, "num_layers": 2,
         "attention_head_dim": 16, "num_attention_heads": 4, "joint_attention_dim": 32,
         "caption_projection_dim": 64, "pooled_projection_dim": 32, "out_channels": 4},
         lambda: {**_latents(), "encoder_hidden_states": _prompt(),
                  "pooled_projections": md.Example(example(2, 32), "B")})  # fmt: skip


def _flux_inputs():
    ids = torch.zeros(16, 3)
    ids[:, 1], ids[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    return {
        "hidden_states": md.Example(example(2, 16, 4), "B"),
        "encoder_hidden_states": _prompt(),
        "pooled_projections": md.Example(example(2, 32), "B"),
        "timestep": md.Example(torch.tensor([0.3, 0.7]), "B"),
        "img_ids": md.Example(ids),
        "txt_ids": md.Example(torch.zeros(7, 3), "T"),
    }


diffuser("diffusers-flux", 2, "FluxTransformer2DModel", {"in_channels": 4, "num_layers": 1, "patch_size": 1,
         "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 4,
               "joint_attention_dim": 32,
         "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}, _flux_inputs)  # fmt: skip
diffuser("diffusers-sana", 4, "SanaTransformer2DModel", {"in_channels": 4, "out_channels": 4, "num_layers": 2,
         "num_attention_heads": 4, "attention_head_dim": 16, "num_cross_attention_heads": 4, "sample_size": 8,
         "cross_attention_head_dim": 16, "cross_attention_dim": 64, "caption_channels": 32},
         lambda: {**_latents(), "encoder_hidden_states": _prompt()})  # fmt: skip
diffuser("diffusers-wan", 4, "WanTransformer3DModel", {"patch_size": (1, 2, 2), "num_attention_heads": 4,
         "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 16,
         "ffn_dim": INNER, "num_layers": 2},
         lambda: {"hidden_states": md.Example(example(2, 4, 2, 8, 8), "B"),
                  "timestep": _latents()["timestep"], "encoder_hidden_states": _prompt()})  # fmt: skip


# -- open_clip, x-transformers -----------------------------------------------------------------------


class _OpenClip(nn.Module):
    def __init__(self):
        import open_clip

        super().__init__()
        vision = {"image_size": 32, "layers": 2, "width": WIDTH, "patch_size": 8, "head_width": 16}
        words = {"context_length": 16, "vocab_size": VOCAB, "width": WIDTH, "heads": HEADS, "layers": 2}
        self.model = spread(open_clip.CLIP(embed_dim=32, vision_cfg=vision, text_cfg=words))

    def forward(self, image, text):
        images, words, scale = self.model(image, text)
        return scale * images @ words.t()


def _open_clip():
    return _OpenClip(), {"image": image(), "text": md.Example(example(3, 16, high=VOCAB), "T")}


add("open-clip", _open_clip, family="multimodal", library="open_clip", attentions=4)


def x_transformer(
    name: str, attentions: int, decoder: bool, sizes: Mapping[str, Any], **expected: Any
) -> None:
    """A model of x-transformers."""

    def make():
        import x_transformers as x

        layers = (x.Decoder if decoder else x.Encoder)(
            dim=WIDTH, depth=2, heads=HEADS, attn_dim_head=16, **sizes
        )
        model = x.TransformerWrapper(num_tokens=VOCAB, max_seq_len=LONGEST, attn_layers=layers)
        return Positional(spread(model)), {"ids": text()}

    family = "decoder" if decoder else "text encoder"
    add(name, make, family=family, library="x_transformers", attentions=attentions, **expected)


x_transformer("x-encoder", 2, False, {})
x_transformer("x-decoder-rotary", 2, True, {"rotary_pos_emb": True, "attn_flash": True})
x_transformer("x-decoder-alibi", 2, True, {"alibi_pos_bias": True, "alibi_num_heads": 2})
x_transformer("x-decoder-gqa", 2, True, {"attn_kv_heads": 2, "attn_flash": True, "use_rmsnorm": True})
x_transformer("x-encoder-talking-heads", 2, False, {"attn_pre_talking_heads": True})
x_transformer("x-encoder-qk-norm", 2, False, {"attn_qk_norm": True})


# -- PyTorch itself --------------------------------------------------------------------------------


class _Layer(nn.Module):
    """Attention by `flex_attention`, or in a branch of `torch.cond`."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.qkv, self.out = kind, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        from torch.nn.attention.flex_attention import flex_attention

        def attended(x, causal):
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.kind == "cond":
            y = torch.cond(
                x.float().abs().mean() > 0.5, lambda x: attended(x, True), lambda x: attended(x, False), (x,)
            )
        elif self.kind == "alibi":
            y = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - (i - j).abs() * (0.5 ** (h + 1)))
        else:
            y = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")))
        return x + self.out(y.transpose(1, 2).flatten(2))


def _own(kind: str):
    def make():
        module = spread(nn.Sequential(_Layer(kind), _Layer(kind)))
        return module, {"input": md.Example(example(2, 9, WIDTH), "B", "S")}

    return make


for _kind, _attentions in (("causal", 2), ("alibi", 2), ("cond", 4)):
    _name = "torch-cond" if _kind == "cond" else f"flex-attention-{_kind}"
    add(_name, _own(_kind), family="PyTorch", library="torch", attentions=_attentions)


def _transformer_encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, batch_first=True)
    module = spread(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    inputs = {"src": md.Example(example(2, 9, WIDTH), "B", "S")}
    return module, {**inputs, "src_key_padding_mask": padding(hidden=True)}


add("nn-transformer-encoder", _transformer_encoder, family="PyTorch", library="torch", attentions=2)


# -- Families of architectures, written out ----------------------------------------------------------


def _family(made: Made):
    def make():
        inputs = {}
        for name, dims in made.inputs.items():
            sizes = {"B": 2, "S": 9, "T": 7}
            shape = [sizes[each] if isinstance(each, str) else each for each in dims]
            axes = [each if isinstance(each, str) else None for each in dims]
            if name == "seen":
                inputs[name] = padding("S", shape[1])
            else:
                high = 4 if name in INDICES else 0
                inputs[name] = md.Example(example(*shape, high=high), *axes)
        return spread(made.module()), inputs

    return make


INDICES = ("hops", "edges", "variate", "fields", "items")
for _name, _made in FAMILIES.items():
    _less, _why = WHY.get(_name, (0, ""))
    _fused = {"fused": _made.attentions - _less, "inexpressible": _less, "why": _why} if _less else {}
    add(_name, _family(_made), family=_made.family, library="torch", attentions=_made.attentions, **_fused)
