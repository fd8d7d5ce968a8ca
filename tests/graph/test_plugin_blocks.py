"""Whole blocks as nodes of the plugin: rotary embedding, normalization with its residual, activations."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from conformance import run_in_reference
from plugin_layers import FP16, assert_same, model_of, node, operators, random_inputs, weights
from torch import nn

import mha_deploy as md
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.graph.fuse import fuse_attention
from mha_deploy.graph.lower import lower
from mha_deploy.judge import judge_case

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


# By model: residual and normalization in one node, those that also give the sum to the next residual,
# normalizations alone, activations; and what is gone.
MODELS: dict[str, tuple[Any, tuple[int, int, int, int], set[str]]] = {
    "post-norm": (encoder, (4, 0, 0, 2), {"LayerNormalization", "Gelu", "Erf"}),
    "pre-norm": (lambda: encoder(norm_first=True), (3, 3, 1, 2), {"LayerNormalization", "Gelu", "Erf"}),
    "tanh": (lambda: encoder(nn.GELU("tanh")), (4, 0, 0, 2), {"LayerNormalization", "Gelu", "Tanh"}),
    "llama": (llama, (2, 1, 1, 1), {"RMSNormalization", "Sigmoid", "Neg", "MatMul"}),
    "llama, two layers": (lambda: llama(2), (4, 3, 1, 2), {"RMSNormalization", "Sigmoid", "Neg", "MatMul"}),
}


def own_attributes(model: ir.Model, op_type: str) -> list[dict[str, Any]]:
    nodes = [node for node in model.graph if node.op_type == op_type]
    return [{key: attribute.value for key, attribute in node.attributes.items()} for node in nodes]


def rotated(name: str, tables: str) -> list[Any]:
    """`x cos + rotate_half(x) sin` of heads [B, 4, S, 16], written out as Hugging Face does."""
    return [
        node("Reshape", f"{name} apart", f"{name}_apart"),
        node("Transpose", f"{name}_apart", f"{name}4", perm=[0, 2, 1, 3]),
        node("Slice", f"{name}4 zero half last", f"{name}_first"),
        node("Slice", f"{name}4 half size last", f"{name}_second"),
        node("Neg", f"{name}_second", f"{name}_negative"),
        node("Concat", f"{name}_negative {name}_first", f"{name}_crossed", axis=-1),
        node("Mul", f"{name}4 cos{tables}", f"{name}_one"),
        node("Mul", f"{name}_crossed sin{tables}", f"{name}_other"),
        node("Add", f"{name}_one {name}_other", f"{name}_rotated"),
    ]


def tables_of(name: str) -> list[Any]:
    """Cosines and sines of the angles, [1, 1, S, 16]."""
    return [
        node("Concat", "angles angles", f"both{name}", axis=-1),
        *(node(each.title(), f"both{name}", f"{each}{name}_3") for each in ("cos", "sin")),
        *(node("Unsqueeze", f"{each}{name}_3 one", f"{each}{name}") for each in ("cos", "sin")),
    ]


@pytest.mark.parametrize("tables", [("_qk", "_qk"), ("_q", "_k")], ids=["shared", "computed twice"])
def test_a_block_with_rotary_embedding_norm_and_gate(tables: tuple[str, str]) -> None:
    of_queries, of_keys = tables
    nodes = [
        node("Add", "x residual", "sum"),
        node("RMSNormalization", "sum scale", "n", axis=-1, epsilon=1e-5),
        *(node("MatMul", f"n w{name}", name) for name in "qkv"),
        *(each for name in dict.fromkeys(tables) for each in tables_of(name)),
        *rotated("q", of_queries),
        *rotated("k", of_keys),
        node("Reshape", "v apart", "v_apart"),
        node("Transpose", "v_apart", "v4", perm=[0, 2, 1, 3]),
        node("Attention", "q_rotated k_rotated v4", "h4", is_causal=1),
        node("Transpose", "h4", "h_apart", perm=[0, 2, 1, 3]),
        node("Reshape", "h_apart again", "h"),
        node("Sigmoid", "h", "open"),
        node("Mul", "h open", "silu"),
        node("Mul", "silu n", "gated"),
        node("Add", "gated sum", "y"),
    ]
    constants = {f"w{name}": weights(64, 64, seed=at) for at, name in enumerate("qkv")}
    constants |= {
        name: np.array(value) for name, value in {"apart": [0, 0, 4, 16], "again": [0, 0, 64]}.items()
    }
    constants |= {
        name: np.array([at]) for name, at in {"zero": 0, "half": 8, "size": 16, "last": 3, "one": 1}.items()
    }
    constants["scale"] = weights(64, 1)[:, 0] + np.float16(1)
    shape = (FP16, ["B", "S", 64])
    inputs = {"x": shape, "residual": shape, "angles": (FP16, [1, "S", 8])}
    model = model_of(nodes, inputs, {"y": shape}, constants, opset=24)
    lowered = lower(fuse_attention(model)[0], "plugin", linear=True)
    norm, silu = own_attributes(lowered, "MhaDeployNormActivation")
    assert (norm["operation"], norm["has_second"], norm["keeps_sum"]) == (1, 1, 1)
    assert (silu["operation"], silu["has_second"]) == (4, 1)
    (attention,) = own_attributes(lowered, "MhaDeployAttention")
    assert (attention["rotary"], attention["rotary_size"], attention["rotary_positions"]) == (1, 16, 0)
    assert not {"RMSNormalization", "Sigmoid", "Neg", "MatMul", "Transpose"} & set(operators(lowered))
    assert_same(model, lowered, random_inputs(model, {"B": 2, "S": 5}), atol=2e-2)


@pytest.mark.parametrize(
    ("positions", "longest", "folded"),
    [
        ("counted", 32, True),
        ("counted", None, False),  # the longest input is not known
        ("shifted", 32, False),  # by an input
        ("scaled", 32, False),  # by the length of the input
    ],
)
def test_rotary_tables_of_the_engine_are_constants(positions: str, longest: int | None, folded: bool) -> None:
    nodes = [
        node("Shape", "x", "length", start=1, end=2),
        node("Squeeze", "length", "S"),
        node("Range", "begin S one", "counted"),
        node("Add", "counted offset", "shifted"),
        node("Mul", "counted S", "scaled"),
        node("Cast", positions, "numbers", to=1),
        node("Unsqueeze", "numbers axes", "column"),
        node("Mul", "column frequencies", "angles"),
        *(node(name.title(), "angles", name) for name in ("cos", "sin")),
        *(node("Cast", name, f"{name}_fp16", to=10) for name in ("cos", "sin")),
        *(node("MatMul", f"x w{name}", name) for name in "qkv"),
        *(
            node("RotaryEmbedding", f"{name} cos_fp16 sin_fp16", f"{name}_rotated", num_heads=4)
            for name in "qk"
        ),
        node("Attention", "q_rotated k_rotated v", "y", is_causal=1, q_num_heads=4, kv_num_heads=4),
    ]
    constants = {f"w{name}": weights(64, 64, seed=at) for at, name in enumerate("qkv")}
    constants |= {"begin": np.array(0), "one": np.array(1), "axes": np.array([0, 2])}
    constants["frequencies"] = (0.1 ** np.arange(8)).astype(np.float32)
    shape = (FP16, ["B", "S", 64])
    inputs = {"x": shape, "offset": (ir.DataType.INT64, [1])}
    model = model_of(nodes, inputs, {"y": shape}, constants, opset=24)
    lowered = lower(model, "plugin", longest={"S": longest} if longest else {})
    assert operators(lowered).count("MhaDeployAttention") == 1
    assert ("Cos" not in operators(lowered)) == folded
    for size in (1, 7, 32):
        feeds = random_inputs(model, {"B": 2, "S": size}, offset=np.array([3]))
        assert_same(model, lowered, feeds, atol=2e-2)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up_are_one_gemm(swapped: bool, bias: bool) -> None:
    """The activation reads both halves of its rows."""
    gate, up = ("gb", "ub") if bias else ("g", "u")
    nodes = [
        node("MatMul", "x wg", "g"),
        node("MatMul", "x wu", "u"),
        *([node("Add", "g bias", "gb"), node("Add", "u bias", "ub")] if bias else []),
        node("Sigmoid", gate, "open"),
        node("Mul", f"{gate} open", "silu"),
        node("Mul", f"{up} silu" if swapped else f"silu {up}", "gated"),
        node("MatMul", "gated down", "y"),
    ]
    constants = {"wg": weights(64, 96), "wu": weights(64, 96, seed=5), "down": weights(96, 64)}
    constants["bias"] = weights(96, 1)[:, 0]
    shape = (FP16, ["B", "S", 64])
    model = model_of(nodes, {"x": shape}, {"y": shape}, constants)
    lowered = lower(model, "plugin", linear=True)
    (silu,) = own_attributes(lowered, "MhaDeployNormActivation")
    assert (silu["operation"], silu["has_second"], silu["packed"]) == (4, 0, 1)
    assert sorted(operators(lowered)) == ["MhaDeployLinear"] * 2 + ["MhaDeployNormActivation"]
    assert_same(model, lowered, random_inputs(model, {"B": 2, "S": 5}), atol=2e-2)


def test_gate_and_up_of_different_inputs_stay_apart() -> None:
    nodes = [
        node("MatMul", "x wg", "g"),
        node("MatMul", "z wu", "u"),
        node("Sigmoid", "g", "open"),
        node("Mul", "g open", "silu"),
        node("Mul", "silu u", "y"),
    ]
    constants = {"wg": weights(64, 96), "wu": weights(64, 96, seed=5)}
    shape, wide = (FP16, ["B", "S", 64]), (FP16, ["B", "S", 96])
    model = model_of(nodes, {"x": shape, "z": shape}, {"y": wide}, constants)
    lowered = lower(model, "plugin", linear=True)
    assert operators(lowered).count("MhaDeployLinear") == 2
    assert_same(model, lowered, random_inputs(model, {"B": 2, "S": 5}), atol=2e-2)


@pytest.mark.parametrize(("approximate", "operation"), [("none", 2), ("tanh", 3)])
def test_a_block_with_layer_norm_and_gelu(approximate: str, operation: int) -> None:
    nodes = [
        node("LayerNormalization", "x scale bias", "n", axis=-1),
        node("MatMul", "n up", "u"),
        node("Gelu", "u", "g", approximate=approximate),
        node("MatMul", "g down", "d"),
        node("Add", "d n", "sum"),
        node("LayerNormalization", "sum scale bias", "y", axis=-1),
    ]
    constants = {"up": weights(64, 128), "down": weights(128, 64), "bias": weights(64, 1)[:, 0]}
    constants["scale"] = constants["bias"] + np.float16(1)
    shape = (FP16, ["B", "S", 64])
    model = model_of(nodes, {"x": shape}, {"y": shape}, constants)
    lowered = lower(model, "plugin", linear=True)
    own_nodes = own_attributes(lowered, "MhaDeployNormActivation")
    assert [(own["operation"], own["has_second"]) for own in own_nodes] == [(0, 0), (operation, 0), (0, 1)]
    assert set(operators(lowered)) == {"MhaDeployNormActivation", "MhaDeployLinear"}
    assert_same(model, lowered, random_inputs(model, {"B": 2, "S": 5}), atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_blocks(name: str, tmp_path: Any) -> None:
    make, counts, gone = MODELS[name]
    bundle = md.export(make(), tmp_path / "bundle", precision="fp16", golden=["min"])
    lowered = lower(ir.load(bundle.model_path), "plugin", linear=True)
    own_nodes = own_attributes(lowered, "MhaDeployNormActivation")
    norms = [own for own in own_nodes if own["operation"] < 2]
    with_residual = [own for own in norms if own["has_second"]]
    sums = sum(own["keeps_sum"] for own in norms)
    alone, activations = len(norms) - len(with_residual), len(own_nodes) - len(norms)
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
    assert "MhaDeployNormActivation" not in operators(lower(ir.load(bundle.model_path), "plugin"))
