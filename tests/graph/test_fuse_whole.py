"""Every attention of whole models becomes one node, and the model computes what PyTorch does."""

import functools

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import whole_models as whole
from hand_graphs import run

from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.fuse import fuse_attention, share_tied_weights

pytest.importorskip("transformers")

OTHER = {"B": 3, "S": 11, "T": 6, "P": 4}
# ONNX Runtime refuses what the exporter makes of these in float32: tables of one row, masks of one query.
REFUSED_UNFUSED = frozenset({"llama", "qwen2", "qwen3", "mistral", "mistral-full", "llama-step"})
REFUSED_UNFUSED |= {"transformer-encoder"}
GROUPED = frozenset({"llama", "qwen2", "qwen3", "mistral", "mistral-full", "llama-step"})
# What the layers must be, in the order of execution: the kind of mask, and whether it is causal besides.
PLAIN, CAUSAL, BOTH = ("none", False), ("none", True), ("bool", True)
BOOL, FLOAT = ("bool", False), ("float", False)
SDPA = {
    "bert": [BOOL] * 2,
    "gpt2": [BOTH] * 2,
    "llama": [BOTH] * 2,
    "qwen2": [BOTH] * 2,
    "qwen3": [BOTH] * 2,
    "mistral": [BOTH] * 2,
    "mistral-full": [BOTH] * 2,
    "t5": [FLOAT] * 6,
    "whisper-encoder": [PLAIN] * 2,
    # Transformers copies the positions for each sequence: the triangle is part of a mask of the batch.
    "whisper": [PLAIN, PLAIN, BOOL, PLAIN, BOOL, PLAIN],
    "vit": [PLAIN] * 2,
    "llama-step": [BOOL] * 2,
    "transformer-encoder": [FLOAT] * 2,
    "transformer": [PLAIN, PLAIN, CAUSAL, PLAIN, CAUSAL, PLAIN],
    "by-hand": [CAUSAL] * 3,
}
# A finite number on the hidden keys stays a float mask: fully masked queries are then the mean of the values.
EAGER = {name: [FLOAT if kind in (BOTH, BOOL) else kind for kind in kinds] for name, kinds in SDPA.items()}
# No number of float16 absorbs any score: the mask is boolean, and such queries are zeroed for the mean.
EAGER_HALF = {name: [BOOL if kind == BOTH else kind for kind in kinds] for name, kinds in SDPA.items()}
EAGER_HALF["t5"] = [FLOAT, FLOAT, FLOAT, BOOL, FLOAT, BOOL]  # no relative bias between decoder and encoder
FIRST_LAYER = {
    "bert": "model.encoder.layer.0.attention.self",
    "gpt2": "model.transformer.h.0.attn",
    "t5": "model.encoder.block.0.layer.0.SelfAttention",
    "whisper": "model.encoder.layers.0.self_attn",
    "vit": "model.layers.0.attention",
    "transformer-encoder": "encoder.layers.0.self_attn",
    "transformer": "transformer.encoder.layers.0.self_attn",
    "by-hand": "layers.0",
}

pytestmark = pytest.mark.slow  # one whole model is deployed by tests/test_examples.py
CASES = [
    (name, attention)
    for name in whole.MODELS
    for attention in ("sdpa", "eager")
    if attention == "sdpa" or name not in whole.ONE_WAY
]


@functools.cache
def made(name, attention, half=False):
    model = whole.MODELS[name](attention)
    return whole.in_half(model) if half else model


@functools.cache
def exported(name, attention, half=False):
    return whole.exported(made(name, attention, half))


def in_pytorch(model, inputs):
    with torch.no_grad():
        done = model.module(*inputs.values())
    return [each.numpy() for each in (done if isinstance(done, tuple) else (done,))]


def calls(model):
    """Inputs at the traced sizes, at others, and with padding at the left: queries without any key."""
    other = whole.resized(model, OTHER)
    yield model.inputs
    yield other
    if "attention_mask" in other:
        yield {**other, "attention_mask": other["attention_mask"].flip(1)}


def close(got, want, *, part):
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=part * np.abs(other).max(), rtol=0)


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_every_attention_of_a_model_is_one_node(name, attention):
    model, unfused = made(name, attention), exported(name, attention)
    fused, report = fuse_attention(unfused)
    assert report.unfused == ()
    assert len(report.fused) + len(report.already) == whole.ATTENTIONS[name]
    nodes = attention_nodes(fused)
    assert [(node.mask, node.is_causal) for node in nodes] == (SDPA if attention == "sdpa" else EAGER)[name]
    assert {node.Hkv for node in nodes} == {2 if name in GROUPED else 4}
    assert [node.name for node in nodes] == list(report.layers)
    assert len(set(report.layers)) == len(nodes)
    assert report.layers[0] == FIRST_LAYER.get(name, "model.layers.0.self_attn")
    assert not [node for node in fused.graph if node.op_type == "Softmax"]
    onnx.checker.check_model(ir.to_proto(fused), full_check=True)
    for inputs in calls(model):
        got = run(fused, inputs)
        close(got, in_pytorch(model, inputs), part=1e-5)
        if name not in REFUSED_UNFUSED:
            close(got, run(unfused, inputs), part=2e-6)


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_in_half_precision_too(name, attention):
    model = made(name, attention, half=True)
    fused, report = fuse_attention(exported(name, attention, half=True))
    assert report.unfused == ()
    assert len(report.layers) == whole.ATTENTIONS[name]
    nodes = attention_nodes(fused)
    assert {node.dtype for node in nodes} == {"fp16"}
    kinds = SDPA if attention == "sdpa" else EAGER_HALF
    assert [(node.mask, node.is_causal) for node in nodes] == kinds[name]
    in_float32 = attention == "eager" and name in (*GROUPED, "vit")
    assert {node.softmax_precision for node in nodes} == {"fp32" if in_float32 else None}
    for inputs in calls(model):
        close(run(fused, inputs), in_pytorch(model, inputs), part=0.02)


def test_layers_share_one_mask():
    fused, _ = fuse_attention(exported("llama", "sdpa"))
    masks = {id(node.inputs[3]) for node in fused.graph if node.op_type == "Attention"}
    assert len(masks) == 1


def test_keys_are_not_repeated_and_the_report_says_what_was_changed():
    fused, report = fuse_attention(exported("llama", "sdpa"))
    changes = {repair.name: repair.changes for repair in report.repairs}
    assert changes["model.layers.1.self_attn"] == (
        "K and V are not repeated: 2 heads for 4",
        "the causal triangle is the attribute",
    )
    assert sum(each == ("the tables are copied over the batch",) for each in changes.values()) == 4
    used = {id(value) for node in fused.graph for value in node.inputs if value is not None}
    assert all(
        id(value) in used or value.is_graph_output() for node in fused.graph for value in node.outputs[:1]
    )


@pytest.mark.parametrize("name", ["gpt2", "by-hand"])
def test_tied_weights_are_there_once(name):
    model = made(name, "sdpa")
    fused, _ = fuse_attention(exported(name, "sdpa"))
    before = run(fused, model.inputs)
    share_tied_weights(fused)
    assert len([each for each in fused.graph.initializers.values() if 99 in each.shape]) == 1
    close(run(fused, model.inputs), before, part=1e-6)
