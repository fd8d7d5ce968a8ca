"""Whole Hugging Face models from a config, without any download: what `record_on_gpu.sh` deploys.

mha-deploy export benchmarks/own_models.py:bert_base -o bert
"""

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

from mha_deploy.model.deployable import Deployable, Example


class HiddenStates(nn.Module):
    """A Hugging Face model that takes tokens and a padding mask and returns its last hidden states."""

    def __init__(self, model: nn.Module, **options: object) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The last hidden states. [B, S] -> [B, S, E]."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **self.options)[0]


def bert_base() -> Deployable:
    """BERT base: 12 layers of width 768, with `scaled_dot_product_attention` and a padding mask."""
    config = BertConfig(attn_implementation="sdpa")
    model = HiddenStates(BertModel(config, add_pooling_layer=False))
    return _deployable(model, config.vocab_size, "12 layers of BERT", batch="1:8:16", length="1:128:512")


def llama_4_layers() -> Deployable:
    """Four layers with the sizes of TinyLlama 1.1B: width 2048, 32 heads over 4 key/value heads."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        attn_implementation="sdpa",
    )
    model = HiddenStates(LlamaModel(config), use_cache=False)
    return _deployable(model, config.vocab_size, "4 layers of LLaMA", batch="1:1:4", length="1:1024:2048")


def _deployable(model: nn.Module, vocabulary: int, summary: str, batch: str, length: str) -> Deployable:
    tokens = torch.randint(0, vocabulary, (4, 24))
    mask = torch.ones_like(tokens)
    for element in range(1, 4):  # the last tokens of every batch element but the first are padding
        mask[element, -5 * element :] = 0
    return Deployable(
        module=model,
        inputs={
            "input_ids": Example(tokens, "B", "S"),
            "attention_mask": Example(mask, "B", "S", draw=_padding),
        },
        axes={"B": batch, "S": length},
        outputs=("hidden",),
        summary=summary,
    )


def _padding(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A padding mask of random lengths, at least half of S; the first batch element has no padding."""
    B, S = shape
    lengths = torch.randint((S + 1) // 2, S + 1, (B,), generator=generator)
    lengths[0] = S
    return (torch.arange(S) < lengths[:, None]).to(torch.int64)
