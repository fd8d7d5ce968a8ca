"""Whole blocks as nodes of the plugin: rotary embedding, normalisation with its residual, activations."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from conformance import run_in_reference
from plugin_layers import operators
from torch import nn

import mha_deploy as md
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.graph.lower import lower
from mha_deploy.metrics import judge_case

AXES = {"B": "1:2:4", "S": "1:16:32"}


def encoder(activation: Any = "gelu", *, norm_first: bool = False) -> md.Deployable:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(
        64, 4, dim_feedforward=128, activation=activation, norm_first=norm_first, batch_first=True
    )
    stack = nn.TransformerEncoder(block, num_layers=2, enable_nested_tensor=False)
    inputs = {"src": md.Example(torch.randn(2, 16, 64), "B", "S")}
    return md.Deployable(module=stack, inputs=inputs, axes=AXES)


def llama(layers: int = 1) -> md.Deployable:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=layers, vocab_size=100, use_cache=False, **sizes)
    inputs = {"input_ids": md.Example(torch.randint(0, 100, (2, 16)), "B", "S")}
    return md.Deployable(module=transformers.LlamaModel(config), inputs=inputs, axes=AXES)


# By model: residual and normalisation in one node, those that also give the sum to the next residual,
# normalisations alone, activations; and what is gone.
MODELS: dict[str, tuple[Any, tuple[int, int, int, int], set[str]]] = {
    "post-norm": (encoder, (4, 0, 0, 2), {"LayerNormalization", "Gelu", "Erf"}),
    "pre-norm": (lambda: encoder(norm_first=True), (3, 3, 1, 2), {"LayerNormalization", "Gelu", "Erf"}),
    "tanh": (lambda: encoder(nn.GELU("tanh")), (4, 0, 0, 2), {"LayerNormalization", "Gelu", "Tanh"}),
    "llama": (llama, (2, 1, 1, 1), {"RMSNormalization", "Sigmoid", "Neg", "MatMul"}),
    "llama, two layers": (lambda: llama(2), (4, 3, 1, 2), {"RMSNormalization", "Sigmoid", "Neg", "MatMul"}),
}


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in MODELS if each != "llama")]
)
def test_blocks(name: str, tmp_path: Any) -> None:
    make, counts, gone = MODELS[name]
    bundle = md.export(make(), tmp_path / "bundle", precision="fp16", golden=["min"])
    lowered = lower(ir.load(bundle.model_path), "plugin", linear=True)
    rowwise = [
        {key: attribute.value for key, attribute in node.attributes.items()}
        for node in lowered.graph
        if node.op_type == "MhaDeployRowwise"
    ]
    norms = [own for own in rowwise if own["operation"] < 2]
    with_residual = [own for own in norms if own["has_second"]]
    sums = sum(own["keeps_sum"] for own in norms)
    alone, activations = len(norms) - len(with_residual), len(rowwise) - len(norms)
    assert (len(with_residual), sums, alone, activations) == counts
    assert not gone & set(operators(lowered))
    names = [value.name for value in lowered.graph.outputs]
    for case in golden_cases(bundle):
        results = run_in_reference(ir.to_proto(lowered), case.inputs)
        got: dict[str, np.ndarray] = dict(zip(names, results, strict=True))
        for verdict in judge_case(case, got, bundle.manifest.precision):
            assert verdict.passed, (case.name, verdict)


@pytest.mark.slow
def test_without_the_plugins_gemms_blocks_stay_as_they_are(tmp_path: Any) -> None:
    bundle = md.export(encoder(), tmp_path / "bundle", precision="fp16")
    assert "MhaDeployRowwise" not in operators(lower(ir.load(bundle.model_path), "plugin"))
