"""A language model of Hugging Face transformers as a `Deployable`: with its KV cache, or an encoder."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from mha_deploy.errors import ExportError, nearest
from mha_deploy.model.deployable import Deployable, Example

CACHES = ("dynamic", "static")
_LENGTH, _TOKENS = 1024, (128, 512)  # of a sequence, and of a call: usual and at most
_EXAMPLE = 5  # tokens, new and cached alike


def model_from_transformers(
    model: Any, *, cache: str, batch: str, tokens: str | None, length: int | None, name: str
) -> Deployable:
    """See `mha_deploy.from_transformers`."""
    if cache not in CACHES:
        raise ExportError("There is no such cache.", got=cache, hint=nearest(str(cache), CACHES))
    if length is not None and (type(length) is not int or length < 2):
        raise ExportError("length is not a number of tokens.", got=repr(length), hint="length=1024")
    try:
        from transformers import DynamicCache, PreTrainedModel
        from transformers.cache_utils import Cache, CacheLayerMixin  # noqa: F401 (a version that has them)
    except ImportError as error:
        hint = "pip install 'transformers>=5'"
        raise ExportError("transformers is not installed, or too old.", got=str(error), hint=hint) from error
    if not isinstance(model, PreTrainedModel):
        got, hint = type(model).__name__, "such as AutoModelForCausalLM.from_pretrained(...)"
        raise ExportError("This is not a transformers model.", got=got, hint=hint)
    if model.config.is_encoder_decoder or model.main_input_name != "input_ids":
        what = "from_transformers is for models that take tokens, and have an encoder or a decoder alone."
        hint = (
            "wrap it by hand, in a module that takes and returns tensors: Deployable(module=wrapper, "
            f'inputs={{"{model.main_input_name}": Example(tensor, "B")}}, axes={{"B": "1:2:8"}})'
        )
        raise ExportError(what, got=type(model).__name__, hint=hint)
    model.eval()
    config = model.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    length = length or min(_LENGTH, positions if isinstance(positions, int) and positions > 1 else _LENGTH)
    usual, most = (min(size, length) for size in _TOKENS)
    tokens, name = tokens or f"1:{usual}:{most}", name or config.model_type
    ids = torch.randint(0, config.vocab_size, (2, _EXAMPLE), device=model.device)
    if not model.can_generate():
        mask = torch.ones_like(ids)
        mask[1, _EXAMPLE - 2 :] = 0  # the second sequence is padded
        inputs = {"input_ids": Example(ids, "B", "S"), "attention_mask": Example(mask, "B", "S")}
        return Deployable(module=_Encoder(model), inputs=inputs, axes={"B": batch, "S": tokens}, name=name)
    held = DynamicCache()
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=held, use_cache=True)
    layers = getattr(held, "layers", ())
    if not layers or not all(isinstance(getattr(layer, "keys", None), Tensor) for layer in layers):
        what = "The cache of the model holds something other than keys and values."
        got = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "no cache"
        raise ExportError(what, got=got, hint="wrap it by hand: a Deployable with kv_cache=")
    is_static, pairs = cache == "static", [(layer.keys, layer.values) for layer in layers]
    inputs = {"input_ids": Example(ids, "B", "S")}
    if is_static:
        inputs["cache_position"] = Example(torch.arange(_EXAMPLE), "S")
    cached = {}
    for number, (keys, values) in enumerate(pairs):
        for kind, tensor in (("key", keys), ("value", values)):
            B, heads, _, size = tensor.shape
            entries = length if is_static else _EXAMPLE
            taken, made = _names(kind, number, is_static)
            shape = (B, heads, entries, size)
            inputs[taken] = Example(
                torch.randn(shape) * tensor.float().std().item(), "B", None, "T" if is_static else "P"
            )
            cached[taken] = made
    past = {"T": str(length)} if is_static else {"P": f"0:{length // 2}:{length - 1}"}
    return Deployable(
        module=_Decoder(model, len(pairs), is_static),
        inputs=inputs,
        axes={"B": batch, "S": tokens, **past},
        kv_cache=cached,
        positions="cache_position" if is_static else (),
        name=name,
    )


def _names(kind: str, number: int, is_static: bool) -> tuple[str, str]:
    """Of a cached tensor of a layer, as input and as output."""
    if is_static:
        return f"{kind}_cache_{number}", f"{kind}_cache_{number}_out"
    return f"past_{kind}_{number}", f"present_{kind}_{number}"


class _Encoder(nn.Module):
    """The model with tensors that come in and go out, without a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._options = {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Every tensor of the model's result, by name."""
        result = self.model(input_ids=input_ids, attention_mask=attention_mask, **self._options)
        return {name: each for name, each in result.items() if isinstance(each, Tensor)}


class _Decoder(nn.Module):
    """The model with its cache as tensors that come in and go out."""

    def __init__(self, model: nn.Module, layers: int, is_static: bool) -> None:
        super().__init__()
        self.model, self._layers, self._is_static = model, layers, is_static

    def forward(
        self, input_ids: Tensor, cache_position: Tensor | None = None, **caches: Tensor
    ) -> dict[str, Tensor]:
        """The logits of every new token, and the cache."""
        from transformers.cache_utils import Cache

        names = [[_names(kind, i, self._is_static) for kind in ("key", "value")] for i in range(self._layers)]
        held = [_layer([caches[taken] for taken, _ in pair], cache_position) for pair in names]
        result = self.model(
            input_ids=input_ids,
            past_key_values=Cache(layers=held),
            use_cache=True,
            position_ids=None if cache_position is None else cache_position[None],
        )
        found = {"logits": result.logits}
        for layer, pair in zip(held, names, strict=True):
            found |= {
                made: tensor for (_, made), tensor in zip(pair, (layer.keys, layer.values), strict=True)
            }
        return found


def _layer(tensors: list[Tensor], positions: Tensor | None) -> Any:
    """What a layer of the model has cached: a dynamic cache, or one of fixed size with its positions."""
    from transformers.cache_utils import DynamicLayer

    layer: Any = DynamicLayer() if positions is None else _static_layer(positions)
    layer.keys, layer.values = tensors
    layer.dtype, layer.device, layer.is_initialized = tensors[0].dtype, tensors[0].device, True
    return layer


def _static_layer(positions: Tensor) -> Any:
    """As transformers' `StaticLayer`, but of tensors and positions that are inputs."""
    from transformers import cache_utils

    mixin: Any = cache_utils.CacheLayerMixin

    class StaticTensors(mixin):  # type: ignore[misc]
        """A cache of fixed size, whose new entries are written at their positions."""

        keys: Tensor
        values: Tensor
        is_compileable, is_sliding = True, False

        def lazy_initialization(self, *_: Any) -> None:
            """It has its tensors from the start."""

        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            """Write the new entries."""
            self.keys = self.keys.index_copy(2, positions, keys)
            self.values = self.values.index_copy(2, positions, values)
            return self.keys, self.values

        def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
            """All entries; the mask hides those behind the new tokens."""
            return self.keys.shape[2], 0

        def get_seq_length(self, *_: Any) -> Tensor:
            """How many tokens are in the cache before the call."""
            return positions[0]

        def get_max_length(self) -> int:
            """The number of entries."""
            return int(self.keys.shape[2])

    return StaticTensors()
