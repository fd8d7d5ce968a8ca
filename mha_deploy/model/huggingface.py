"""The attention layer of a checkpoint: which tensors it is made of, and its spec; without PyTorch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mha_deploy.errors import DeployError, SpecError
from mha_deploy.files import hint_for_missing, open_regular, read_json
from mha_deploy.model.catalog import how_to_download
from mha_deploy.model.layer import AttentionSpec, Rope
from mha_deploy.model.spec import Axis

# -- The files of a checkpoint ---------------------------------------------------------------------

INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def checkpoint_files(path: Path) -> dict[str, Path]:
    """The safetensors file of every tensor, by the name of the tensor.

    The path is a safetensors file, an index of several (`*.safetensors.index.json`), or the folder of either.
    """
    from safetensors import SafetensorError, safe_open

    if path.is_dir():
        found = sorted(path.glob("*.safetensors"))
        pickled = [each for each in sorted(path.iterdir()) if each.suffix in PICKLED]
        if (path / INDEX).is_file():
            path = path / INDEX
        elif len(found) == 1 or (pickled and not found):
            path = (found or pickled)[0]
        elif found:
            raise DeployError(
                "The folder has several safetensors files without an index.",
                got=f"{path}: {', '.join(each.name for each in found)}",
                hint="the path of one, or the index; model.save_pretrained(FOLDER) writes it",
            )
        else:
            hint = "weights are required: model.safetensors, as model.save_pretrained(FOLDER) writes it"
            if (path / CONFIG).is_file():
                hint += "; mha_deploy.from_transformers(model) takes a model of this config with random ones"
            raise DeployError("The folder has no safetensors file.", got=path, hint=hint)
    if path.suffix in PICKLED:
        what = "A pickle can run code when it is read, so it is refused."
        hint = 'safetensors.torch.save_file(model.state_dict(), "weights.safetensors"), or for a model of '
        hint += "transformers model.save_pretrained(FOLDER)"
        raise DeployError(what, got=path.name, hint=hint)
    files: dict[str, Path] = {}
    for file in _indexed(path) if path.name.endswith(".index.json") else [path]:
        try:
            open_regular(file).close()  # a pipe would block
            with safe_open(file, "np") as tensors:
                files |= dict.fromkeys(tensors.keys(), file)
        except FileNotFoundError as error:
            raise DeployError(
                "There is no such weight file.", got=file, hint="the path of a file that exists"
            ) from error
        except (SafetensorError, OSError) as error:
            raise DeployError(
                "The weights are not a safetensors file.",
                got=f"{file}: {error}",
                hint="a file that safetensors wrote, complete",
            ) from error
    return files


def _indexed(path: Path) -> list[Path]:
    try:
        files = set(read_json(path)["weight_map"].values())
        strange = [each for each in files if Path(each).name != each or not each.endswith(".safetensors")]
    except FileNotFoundError as error:
        raise DeployError(
            "There is no such weight file.", got=path, hint="the path of a file that exists"
        ) from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DeployError(
            "The index of the weights cannot be read.",
            got=f"{path}: {error}",
            hint="download the checkpoint again",
        ) from error
    if strange:
        raise DeployError(
            "The index names a file that is not in its folder.",
            got=strange[0],
            hint="download the whole checkpoint",
        )
    return [path.parent / each for each in sorted(files)]


# -- The tensors of one attention ------------------------------------------------------------------

# The last part of a module's name, and what it computes.
_ROLES = {
    "q": "q q_proj query wq q_lin to_q query_proj q_linear linear_q",
    "k": "k k_proj key wk k_lin to_k key_proj k_linear linear_k",
    "v": "v v_proj value wv v_lin to_v value_proj v_linear linear_v",
    "o": "o o_proj out_proj dense wo out_lin to_out c_proj proj out linear_out attention_output",
    # Stacked: all queries, then all keys, then all values.
    "qkv": "qkv qkv_proj Wqkv W_pack c_attn in_proj to_qkv",
    # Stacked group by group: the queries that share a key, that key, its value (GPT-NeoX, BLOOM, Falcon).
    "groups": "query_key_value wqkv",
}
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in names.split()}
# Inside an attention they would make it another function than a layer of the catalog.
_CHANGES = re.compile(
    r"(q|k|query|key|qk)_?(layer)?_?norm|(q|k)_ln|sinks|relative_attention_bias|logit_scale|_lora|"
    r"\b(scales|qweight|qzeros|weight_scale)|kv_a_|kv_b_",
    re.IGNORECASE,
)
_AS_MODULE = (
    "export file.py:factory, which returns md.from_transformers(model) if it is an encoder or decoder alone, "
    "or else the attention module itself; see docs/own-models.md"
)
_CROSS = re.compile(r"cross|encoder_attn|encdec|enc_attn", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class AttentionTensors:
    """The tensors of one attention, by role and kind as `("q", "weight")`, and others beside them."""

    prefix: str
    names: Mapping[tuple[str, str], str]
    ignored: tuple[str, ...]

    @property
    def has_bias(self) -> bool:
        """Whether any projection has a bias."""
        return any(kind == "bias" for _, kind in self.names)


def find_attention(names: Iterable[str], prefix: str = "", layer: int | None = None) -> AttentionTensors:
    """Find the projections of one attention among the tensors of a checkpoint.

    The prefix is its module, such as `model.layers.0.self_attn`, or one that has a single attention in it;
    without a prefix, it is the attention of a layer.
    """
    names, prefix = sorted(names), prefix.removesuffix(".")
    inside = [name for name in names if not prefix or name.startswith(f"{prefix}.")]
    if layer is not None:
        inside = [name for name in inside if next(filter(str.isdecimal, name.split(".")), None) == str(layer)]

    inputs, outputs = (defaultdict[str, dict[tuple[str, str], str]](dict) for _ in range(2))
    for name in names:
        parent, part = _part(name)
        if part is not None and part[0] == "o":
            outputs["" if parent == "output" else parent.removesuffix(".output")][part] = name
        elif part is not None and name in inside:
            inputs[parent][part] = name

    def is_attention(module: str) -> bool:
        roles = {role for role, kind in inputs[module] if kind == "weight"}
        return bool(roles & {"qkv", "groups"}) or roles >= {"q", "k", "v"}

    found = list(filter(is_attention, inputs))
    if len(found) > 1:
        found = [module for module in found if not _CROSS.search(module)] or found
    if len(found) != 1:
        where = f"below {prefix!r}" if prefix else "in the checkpoint"
        got = ", ".join(found[:6]) or f"no q, k and v among {', '.join(inside[:4] or names[:4])}"
        hint = f"--prefix {next(iter(found), 'model.layers.0.self_attn')}"
        raise DeployError(f"There is no single attention {where}.", got=got, hint=hint)
    root, parts = found[0], inputs[found[0]]
    while not outputs[root] and "." in root:
        root = root.rpartition(".")[0]  # BERT: attention.self.query, attention.output.dense
    if ("o", "weight") not in outputs[root]:
        raise DeployError(
            "The attention has no output projection.",
            got=", ".join(sorted(parts.values())),
            hint="--prefix of an attention layer",
        )
    chosen = {**parts, **outputs[root]}
    rest = [name for name in names if name.startswith(f"{root}.")] if root else inside
    rest = [name for name in rest if name not in chosen.values()]
    if changing := [name for name in rest if _CHANGES.search(name.removeprefix(root))]:
        what = "A catalog layer cannot express this attention: it has more than four projections."
        raise DeployError(what, got=", ".join(changing[:4]), hint=_AS_MODULE)
    return AttentionTensors(prefix=root, names=chosen, ignored=tuple(rest))


def _part(name: str) -> tuple[str, tuple[str, str] | None]:
    """The module around a projection, and the role and kind of the tensor; None for another tensor."""
    path, _, kind = name.rpartition(".")
    for ending in ("weight", "bias"):  # nn.MultiheadAttention: in_proj_weight
        if kind.endswith(f"_proj_{ending}"):
            path, kind = f"{path}.{kind.removesuffix(f'_{ending}')}".removeprefix("."), ending
    parent, _, module = path.rpartition(".")
    if module.isdecimal():  # diffusers: to_out.0
        parent, _, module = parent.rpartition(".")
    role = _ROLE_OF.get(module)
    return parent, None if role is None or kind not in ("weight", "bias") else (role, kind)


# -- The spec --------------------------------------------------------------------------------------

CONFIG = "config.json"

# Architectures by `model_type`: with causal self attention, and with attention in both directions.
_DECODERS = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "gemma", "gemma2", "phi", "phi3"),
    *("cohere", "opt", "granite", "starcoder2", "stablelm", "olmo", "falcon", "gpt_neox", "gptj"),
    *("gpt2", "gpt_bigcode", "mpt", "gpt_neo", "bloom", "smollm3", "glm", "helium", "arcee"),
    *("nemotron", "persimmon", "xglm", "biogpt", "seed_oss", "ernie4_5"),
)
_ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert")
_VISION = ("vit", "deit", "dinov2")
# What would be another function than the layers of the catalog compute, and whose attention it is.
_NOT_EXPRESSIBLE = {
    "it normalizes queries and keys (q_norm, k_norm)": "qwen3 qwen3_moe gemma3 gemma3_text olmo2 olmo3 "
    "llama4 llama4_text",
    "its keys and values are compressed (MLA)": "deepseek_v2 deepseek_v3 minicpm3",
    "it adds a learned relative position bias to the scores": "t5 mt5 mpnet",
    "its attention is disentangled": "deberta deberta-v2",
    "it has attention sinks": "gpt_oss",
    "its packed projection has a layout of its own (mp_num)": "codegen",
}
_NO_ROPE = (*_ENCODERS, *_VISION, "gpt2", "gpt_bigcode", "gpt_neo", "opt", "xglm", "biogpt")
_ROTARY_SHARES = dict(gpt_neox=0.25, phi=0.5, stablelm=0.25, nemotron=0.5, persimmon=0.5, glm=0.5)
_INTERLEAVED = ("gptj", "cohere", "glm", "ernie4_5", "helium")
_LONGEST = 2048  # of the default axes; --axis raises it


def read_config(folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a checkpoint."""
    if folder.is_file():
        problem, hint = "A checkpoint is a folder, and this is a file.", f"its folder, {folder.parent}"
        raise SpecError(problem, got=folder, hint=hint)
    try:
        data = read_json(folder / CONFIG)
    except FileNotFoundError as error:
        hint = "the folder that save_pretrained() wrote, or a snapshot of a repository"
        if not folder.exists():
            download = how_to_download(folder.as_posix())
            hint = hint_for_missing(folder, download, lambda each: (each / CONFIG).is_file())
        raise SpecError("There is no config.json here.", got=folder, hint=hint) from error
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        got, hint = f"{folder / CONFIG}: {error}", "the config.json that save_pretrained() wrote"
        raise SpecError("The config.json cannot be read.", got=got, hint=hint) from error
    if not isinstance(data, dict):
        hint = "the config.json that save_pretrained() wrote"
        raise SpecError("The config.json is not an object.", got=folder / CONFIG, hint=hint)
    inner = data.get("text_config")  # of a model with several parts
    return inner if isinstance(inner, dict) and "num_attention_heads" in inner else data


def spec_from_config(config: Mapping[str, Any], layer: int, *, name: str, bias: bool) -> AttentionSpec:
    """The self attention of one layer of a checkpoint, as a layer of the catalog.

    With `bias` any projection has one; the others then have zeros.
    """
    try:
        return _spec_from_config(config, layer, name=name, bias=bias)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError) as error:
        hint = "the config.json that save_pretrained() wrote"
        raise SpecError("A field of the config.json has a wrong value.", got=error, hint=hint) from error


def _spec_from_config(config: Mapping[str, Any], layer: int, *, name: str, bias: bool) -> AttentionSpec:
    kind = str(config.get("model_type", ""))
    for why, kinds in _NOT_EXPRESSIBLE.items():
        if kind in kinds.split():
            raise _refusal(kind, why)
    if kind not in (*_DECODERS, *_ENCODERS, *_VISION):
        raise _refusal(kind or "no model_type", "its attention is not known here")
    E = _number(config, "hidden_size", "n_embd", "d_model", "dim")
    Hq = _number(config, "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
    layers = _number(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if not 0 <= layer < layers:
        raise SpecError("The model has no such layer.", got=layer, hint=f"0 to {layers - 1}")
    D = _optional(config, "head_dim") or E // Hq
    if _optional(config, "head_dim") is None and E % Hq:
        hint = "head_dim in config.json"
        raise SpecError("The heads do not divide the width.", got=f"{E} / {Hq}", hint=hint)
    _refuse_options(config, kind)
    longest = _optional(config, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length") or 512
    longest, usual = min(longest, _LONGEST), min(128, longest)
    if kind in _VISION:
        image, patch = _optional(config, "image_size") or 224, _optional(config, "patch_size") or 16
        usual = longest = (image // patch) ** 2 + 1
    causal = kind in _DECODERS or bool(config.get("is_decoder"))
    has_alibi = kind == "bloom" or (kind == "mpt" and bool(_inner(config).get("alibi", True)))
    mask = "padding" if kind in _ENCODERS and not causal else "none"
    return AttentionSpec(
        name=name,
        summary=f"layer {layer} of a {kind} checkpoint",
        Hq=Hq,
        Hkv=_key_heads(config, kind, Hq),
        D=D,
        E=E,
        axes={"B": Axis(min=1, opt=1, max=8), "S": Axis(min=1, opt=usual, max=longest)},
        bias=bias,
        causal=causal,
        mask="additive" if has_alibi else mask,
        scale=_scale(config, kind, layer, D),
        rope=None if has_alibi or kind in _NO_ROPE else _rope(config, kind, layer, D),
        window=_window(config, kind, layer) if causal else None,
        softcap=config.get("attn_logit_softcapping") if kind == "gemma2" else None,
    )


def _refusal(kind: str, why: str) -> SpecError:
    what = f"A catalog layer cannot express this attention: {why}."
    return SpecError(what, got=f"model_type {kind}", hint=_AS_MODULE)


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where MPT keeps the options of its attention."""
    return config.get("attn_config") or {}


def _optional(config: Mapping[str, Any], *names: str) -> int | None:
    values = (config.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def _number(config: Mapping[str, Any], *names: str) -> int:
    found = _optional(config, *names)
    if found is None:
        raise SpecError(
            f"The config.json has no {names[0]}.",
            got=", ".join(sorted(config)[:12]),
            hint="a checkpoint of a text model, or the field in its config.json",
        )
    return found


def _of_layer(config: Mapping[str, Any], name: str, layer: int) -> Any:
    """The entry of a layer in a list of the config; None where there is none."""
    entries = config.get(name)
    return entries[layer] if isinstance(entries, list) and layer < len(entries) else None


def _key_heads(config: Mapping[str, Any], kind: str, Hq: int) -> int:
    if kind == "falcon" and config.get("new_decoder_architecture"):
        return _optional(config, "num_kv_heads") or Hq
    if kind in ("falcon", "gpt_bigcode"):
        return 1 if config.get("multi_query", True) else Hq
    if kind == "mpt":
        return _optional(_inner(config), "kv_n_heads") or Hq
    return _optional(config, "num_key_value_heads", "num_kv_heads") or Hq


def _scale(config: Mapping[str, Any], kind: str, layer: int, D: int) -> float | None:
    if kind == "gemma2":
        return float(config.get("query_pre_attn_scalar", 256)) ** -0.5
    if kind == "granite":
        return float(config.get("attention_multiplier", 1.0))
    if kind == "mpt":
        found = _inner(config).get("softmax_scale")
        return None if found is None else float(found)
    if kind == "gpt_neo":
        return 1.0
    if kind in ("gpt2", "gpt_bigcode"):
        scale = D**-0.5 if config.get("scale_attn_weights", True) else 1.0
        by_layer = bool(config.get("scale_attn_by_inverse_layer_idx")) and kind == "gpt2"
        return scale / (layer + 1) if by_layer else scale
    return None


def _window(config: Mapping[str, Any], kind: str, layer: int) -> int | None:
    if kind == "gpt_neo":
        types = [each for group, count in config.get("attention_types", []) for each in group * count]
        return _optional(config, "window_size") if types and types[layer] == "local" else None
    window, form = _optional(config, "sliding_window"), _of_layer(config, "layer_types", layer)
    if form is not None:
        return window if form == "sliding_attention" else None
    if kind in ("qwen2", "qwen2_moe"):
        first = config.get("max_window_layers", 28)
        return window if config.get("use_sliding_window") and layer >= first else None
    if kind == "gemma2":
        return window if layer % 2 == 0 else None
    return window if kind in ("mistral", "mixtral", "phi3", "starcoder2") else None


def _rope(config: Mapping[str, Any], kind: str, layer: int, D: int) -> Rope | None:
    """The rotary embedding, in the keys of Transformers 5 (`rope_parameters`) or of earlier versions."""
    if kind == "smollm3" and _of_layer(config, "no_rope_layers", layer) == 0:  # 1 where a layer rotates
        return None
    found = config.get("rope_parameters") or {}
    by_type = found.get(_of_layer(config, "layer_types", layer))
    found = by_type if isinstance(by_type, dict) else found  # one for each type of layer
    scaling = {**(config.get("rope_scaling") or {}), **found}
    theta = found.get("rope_theta", config.get("rope_theta", config.get("rotary_emb_base", 10000.0)))
    share = found.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    share = _ROTARY_SHARES.get(kind, 1.0) if share is None else share
    dims = (_optional(config, "rotary_dim") or D) if kind == "gptj" else int(D * float(share))
    form = str(scaling.get("rope_type", scaling.get("type", "default")))
    options: dict[str, Any] = {"base": float(theta), "interleaved": kind in _INTERLEAVED}
    options |= {} if dims == D else {"dims": dims}
    if form in ("linear", "llama3"):
        options |= {"scaling": form, "factor": float(scaling.get("factor", 1.0))}
    elif form not in ("default", "none"):
        raise _refusal(kind, f"its rotary embedding is scaled by {form!r}; linear and llama3 are known")
    if form == "llama3":
        options |= {
            "low_freq_factor": float(scaling.get("low_freq_factor", 1.0)),
            "high_freq_factor": float(scaling.get("high_freq_factor", 4.0)),
            "original_length": int(scaling.get("original_max_position_embeddings", 8192)),
        }
    return Rope(**options)


def _refuse_options(config: Mapping[str, Any], kind: str) -> None:
    """Refuse options that change the function and that a layer of the catalog does not have."""
    inner = _inner(config)
    norms = ("use_qk_norm", "qk_layernorm", "qk_norm", "use_qk_layernorm", "qk_ln")
    relative = str(config.get("position_embedding_type", "absolute")).startswith("relative")
    stacked_by_head = kind == "gpt_bigcode" and not config.get("multi_query", True)
    reasons = {
        **{f"it normalizes queries and keys ({n})": config.get(n) or inner.get(n) for n in norms},
        "it clips queries, keys and values (clip_qkv)": config.get("clip_qkv") or inner.get("clip_qkv"),
        "its positions are relative (position_embedding_type)": relative,
        "it adds ALiBi before the scale, in BF16": kind == "falcon" and config.get("alibi"),
        "its packed projection is stacked head by head (multi_query false)": stacked_by_head,
        "its weights are quantized (quantization_config)": config.get("quantization_config"),
    }
    for why, applies in reasons.items():
        if applies:
            raise _refusal(kind, why)
