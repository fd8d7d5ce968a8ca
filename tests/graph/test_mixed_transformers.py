"""Mixed precision on exported models of Hugging Face, from small configurations."""

import logging
import warnings

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from mixed_models import NOTHING, distance, kept_in_float32

from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.fuse import fuse_attention
from mha_deploy.graph.mixed_precision import apply_plan, plan_precision
from mha_deploy.runtime import measure_ranges, open_runner

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 99,
}


class Hidden(torch.nn.Module):
    """A model that takes words and a mask, and gives its last hidden state.

    Args:
        kind: `Bert` or `Llama`.
        factors: What to multiply the parameters by whose names end so.
        implementation: How its attention is spelled.
    """

    def __init__(self, kind, factors, implementation):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**SIZES, attn_implementation=implementation)
        self.model = getattr(transformers, f"{kind}Model")(config).eval()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.mul_(next((f for end, f in factors.items() if name.endswith(end)), 1.0))

    def forward(self, ids, mask):
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state


def words(B, S, seed=0):
    ids = torch.randint(0, SIZES["vocab_size"], (B, S), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, S - 4 :] = 0
    return ids, mask


def exported(kind, factors=None, implementation="sdpa"):
    """The fused graph, as float32."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    axes = {0: torch.export.Dim("B", min=2, max=8), 1: torch.export.Dim("S", min=5, max=64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Hidden(kind, factors or {}, implementation),
            words(3, 12),
            dynamo=True,
            opset_version=22,
            dynamic_shapes=(axes, axes),
            input_names=["ids", "mask"],
            verbose=False,
        )
    return fuse_attention(program.model)[0]


def feeds(B, S, seed):
    return dict(zip(("ids", "mask"), (tensor.numpy() for tensor in words(B, S, seed)), strict=True))


def result_of(model, arrays, runtime="ort-cpu"):
    with open_runner(runtime, model) as runner:
        return next(iter(runner.run(arrays).values()))


def mixed_of(model):
    plan = plan_precision(model, measure_ranges(model, {"one": feeds(2, 9, 1), "two": feeds(3, 16, 2)}))
    mixed = apply_plan(model, plan)
    onnx.checker.check_model(ir.to_proto(mixed), full_check=True)
    assert len(attention_nodes(mixed)) == len(attention_nodes(model)) == 2
    return plan, mixed


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_healthy_bert_keeps_nothing(implementation):
    model = exported("Bert", implementation=implementation)
    plan, mixed = mixed_of(model)
    assert not kept_in_float32(plan), plan.lines()
    (mask,) = plan.clamped  # float32's lowest number, or what PyTorch's exporter fills with
    assert mask.found < -1e29
    assert distance(result_of(mixed, feeds(4, 30, 3)), result_of(model, feeds(4, 30, 3))) < 1e-3


@pytest.mark.slow
def test_bert_with_an_activation_beyond_fp16():
    model = exported("Bert", {"0.intermediate.dense.weight": 300.0, "0.output.dense.weight": 8000.0})
    plan, mixed = mixed_of(model)
    exact = result_of(model, feeds(4, 30, 3))
    assert not np.isfinite(result_of(apply_plan(model, NOTHING), feeds(4, 30, 3), "onnx-reference")).all()
    assert distance(result_of(mixed, feeds(4, 30, 3)), exact) < 1e-3
    assert sorted(each.op_type for each in plan.kept) == ["Add", "Add", "LayerNormalization", "MatMul"]


@pytest.mark.slow
def test_llama_with_a_residual_beyond_fp16():
    model = exported("Llama", {"0.mlp.up_proj.weight": 3e3, "0.mlp.down_proj.weight": 3e3})
    plan, mixed = mixed_of(model)
    exact = result_of(model, feeds(4, 30, 3))
    # In ONNX's evaluator: ONNX Runtime computes FP16 in FP32 on x86-64, where nothing overflows.
    assert not np.isfinite(result_of(apply_plan(model, NOTHING), feeds(4, 30, 3), "onnx-reference")).all()
    assert distance(result_of(mixed, feeds(4, 30, 3)), exact) < 2e-3
    assert [each.op_type for each in plan.kept].count("MatMul") == 1
    assert {node.dtype for node in attention_nodes(mixed)} == {"fp16"}
    assert len(plan.kept) < plan.nodes / 3
