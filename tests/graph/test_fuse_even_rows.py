"""Scores that are filled with a finite number: fused, and fully masked queries stay the mean of V."""

import copy
import functools

import fuse_modules as modules
import hand_graphs
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from fuse_modules import D, H, Sizes, spelling

from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.fuse import fuse_attention
from mha_deploy.graph.lower import lower

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
SIZES = Sizes(3, 11)


def scores_of(q, k):
    return q @ k.transpose(-1, -2) * D**-0.5


def future(q):
    at = torch.arange(q.shape[2])
    return at[None, :] > at[:, None]


def lowest_of(q):
    return torch.finfo(q.dtype).min


def grouped(q, k, v, mask):
    k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
    return scores_of(q, k).masked_fill(~mask, lowest_of(q)).softmax(-1) @ v


def padding_then_infinite_causal(q, k, v, mask):
    """A row whose own and earlier keys are padded is the mean over those, not over all."""
    scores = scores_of(q, k).masked_fill(mask[:, None, None, :] == 0, lowest_of(q))
    return scores.masked_fill(future(q), float("-inf")).softmax(-1) @ v


def infinite_causal_then_padding(q, k, v, mask):
    scores = scores_of(q, k).masked_fill(future(q), float("-inf"))
    return scores.masked_fill(mask[:, None, None, :] == 0, lowest_of(q)).softmax(-1) @ v


def causal_and_padding(q, k, v, mask):
    scores = scores_of(q, k).masked_fill(future(q), lowest_of(q))
    return scores.masked_fill(mask[:, None, None, :] == 0, lowest_of(q)).softmax(-1) @ v


def bias_and_fill(q, k, v, mask):
    bias = -torch.arange(k.shape[2], dtype=q.dtype)[None, None, None, :]
    return (scores_of(q, k) + bias).masked_fill(~mask, lowest_of(q)).softmax(-1) @ v


def added_padding_and_causal(q, k, v, mask):
    """The added tensor is a mask as low as the fill: in a row without keys all of them weigh the same."""
    bias = (1 - mask[:, None, None, :].to(q.dtype)) * lowest_of(q)
    return (scores_of(q, k) + bias).masked_fill(future(q), lowest_of(q)).softmax(-1) @ v


def put_and_added(q, k, v, mask):
    """A key that both masks hide is at -inf, and weighs less than one that is hidden once."""
    scores = scores_of(q, k).masked_fill(future(q), lowest_of(q))
    return (scores + (1 - mask[:, None, None, :].to(q.dtype)) * lowest_of(q)).softmax(-1) @ v


def filled_in_float32(q, k, v, mask):
    return scores_of(q, k).float().masked_fill(~mask, -1e9).softmax(-1).to(q.dtype) @ v


def biased_and_filled_in_float32(q, k, v, mask):
    bias = -torch.arange(k.shape[2], dtype=q.dtype)[None, None, None, :]
    return (scores_of(q, k) + bias).float().masked_fill(~mask, -1e9).softmax(-1).to(q.dtype) @ v


class Transposed(modules.Layer):
    """The heads in the batch, and the queries behind the keys: the mask has to be transposed."""

    def attend(self, q, k, v, mask):
        B, _, S, _ = q.shape
        q, k, v = (each.reshape(B * H, S, D) for each in (q, k, v))
        visible = mask.expand(B, H, S, S).reshape(B * H, S, S)
        scores = torch.einsum("bid,bjd->bji", q, k) * D**-0.5
        weights = scores.masked_fill(~visible.transpose(1, 2), lowest_of(q)).softmax(1)
        return torch.einsum("bji,bjd->bid", weights, v).view(B, H, S, D)


class HalfTriangle(modules.TrilBuffer):
    fill = -65504.0


FILL = spelling(modules.lowest)
# Module, inputs, mask and causal of the node, and whether queries become zero; by the type.
CASES = {
    "lowest": (FILL, "bool", HALF, ("bool", False, True)),
    "-65504": (spelling(modules.filled(-65504.0)), "bool", HALF, ("bool", False, True)),
    "grouped heads": (spelling(grouped, Hkv=2), "bool", HALF, ("bool", False, True)),
    "causal over padding": (spelling(padding_then_infinite_causal), "keys", HALF, ("bool", False, True)),
    "padding over causal": (spelling(infinite_causal_then_padding), "keys", HALF, ("bool", False, True)),
    "causal and padding": (spelling(causal_and_padding), "keys", HALF, ("bool", False, True)),
    "bias and fill": (spelling(bias_and_fill), "bool", HALF, ("float", False, True)),
    "two masks": (spelling(added_padding_and_causal), "keys", HALF, ("float", False, True)),
    "put and added": (spelling(put_and_added), "keys", HALF, ("float", False, True)),
    "put and added, fp32": (spelling(put_and_added), "keys", SINGLE, ("float", False, True)),
    "fill in float32": (spelling(filled_in_float32), "bool", HALF, ("bool", False, True)),
    "bias, fill in float32": (spelling(biased_and_filled_in_float32), "bool", HALF, ("float", False, True)),
    "transposed": (Transposed, "bool", HALF, ("bool", False, True)),
    "triangle": (HalfTriangle, "x", HALF, ("none", True, False)),
    "-1e9, bf16": (spelling(modules.filled(-1e9)), "bool", BRAIN, ("float", False, False)),
    "lowest, bf16": (FILL, "bool", BRAIN, ("float", False, False)),
    "bias and fill, bf16": (spelling(bias_and_fill), "bool", BRAIN, ("float", False, True)),
    "triangle, bf16": (modules.TrilBufferFinite, "x", BRAIN, ("none", True, False)),
    "lowest, fp32": (FILL, "bool", SINGLE, ("float", False, False)),
    "two masks, fp32": (spelling(added_padding_and_causal), "keys", SINGLE, ("float", False, True)),
}
QUICK = "grouped heads"
SPELLINGS = [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in CASES]
# Roundings of results near 1.
TOLERANCE = {HALF: 3e-3, BRAIN: 1.2e-2, SINGLE: 1e-5}


@functools.cache
def made(name):
    """The module of a case and what the exporter makes of it; fusing leaves that as it is."""
    make, kind, dtype, _ = CASES[name]
    torch.manual_seed(1)
    module = make().eval().to(dtype)
    export = modules.export_by_torchscript if name == QUICK else modules.export
    return module, export(module, kind, 18, dtype=dtype)


def exact(module, inputs):
    """What the module computes in FP64, with the fill of its own type."""
    with torch.no_grad():
        double = copy.deepcopy(module).double()
        return double(*(each.double() if each.is_floating_point() else each for each in inputs)).numpy()


def run(model, inputs):
    """In ONNX Runtime; in ONNX's evaluator where that has no kernel for the type."""
    if inputs[0].dtype != BRAIN:
        return hand_graphs.run(model, inputs)[0]
    names, brain = [each.name for each in model.graph.inputs], ir.DataType.BFLOAT16.numpy()
    arrays = [each.float().numpy().astype(brain) if each.dtype == BRAIN else each.numpy() for each in inputs]
    evaluator = onnx.reference.ReferenceEvaluator(ir.to_proto(model))
    return np.asarray(evaluator.run(None, dict(zip(names, arrays, strict=True)))[0]).astype(np.float32)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_finite_fill_is_fused_and_fully_masked_queries_stay(name):
    _, kind, dtype, wanted = CASES[name]
    module, model = made(name)
    fused, report = fuse_attention(model)
    assert report.unfused == ()
    (node,) = attention_nodes(fused)
    zeroed = [each for each in fused.graph if (each.name or "").endswith("zeroed_q")]
    assert (node.mask, node.is_causal, bool(zeroed)) == wanted
    onnx.checker.check_model(ir.to_proto(fused), full_check=True)
    inputs = modules.make_inputs(kind, SIZES, seed=5, dtype=dtype)
    got = run(fused, inputs)
    with torch.no_grad():
        want = module(*inputs).float().numpy()
    np.testing.assert_allclose(got, want, atol=TOLERANCE[dtype], rtol=0)
    np.testing.assert_allclose(got, exact(module, inputs), atol=TOLERANCE[dtype], rtol=0)


def test_a_fully_masked_query_is_the_mean_of_v_however_large_the_scores():
    module, model = made(QUICK)
    x, mask = modules.make_inputs("bool", SIZES, dtype=HALF)
    x, mask[0] = 30 * x, False
    got = run(fuse_attention(model)[0], (x, mask))[0]
    want = exact(module, (x, mask))[0]
    np.testing.assert_allclose(got, want, atol=2e-3 * np.abs(want).max())


@pytest.mark.slow
def test_layers_share_the_mask_and_the_fully_masked_queries():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = FILL(), FILL()

        def forward(self, x, mask):
            hidden = mask == 0
            for layer in (self.first, self.second):
                q, k, v = layer.heads(x)
                y = scores_of(q, k).masked_fill(hidden, lowest_of(q)).softmax(-1) @ v
                x = x + layer.o(y.transpose(1, 2).flatten(2))
            return x

    torch.manual_seed(0)
    module = Two().eval().half()
    fused, report = fuse_attention(modules.export(module, "bool", 18, dtype=HALF))
    assert len(report.fused) == 2
    assert len([node for node in fused.graph if node.op_type == "ReduceMax"]) == 1
    inputs = modules.make_inputs("bool", SIZES, dtype=HALF)
    np.testing.assert_allclose(run(fused, inputs), module(*inputs).detach().numpy(), atol=4e-3)


@pytest.mark.parametrize("dialect", ["trt", "primitives", "contrib"])
def test_every_dialect_keeps_fully_masked_queries(dialect):
    module, model = made(QUICK)
    lowered = lower(fuse_attention(model)[0], dialect)
    inputs = modules.make_inputs("bool", SIZES, seed=5, dtype=HALF)
    np.testing.assert_allclose(run(lowered, inputs), module(*inputs).detach().numpy(), atol=3e-3)


@pytest.mark.slow
def test_tensorrt_rtx_fuses_it(monkeypatch):
    from rtx_probe import build

    monkeypatch.setattr(modules, "D", 32)
    monkeypatch.setattr(modules, "E", 128)
    torch.manual_seed(0)
    fused, _ = fuse_attention(modules.export(FILL().eval().half(), "bool", 18, dtype=HALF))
    x, mask = (value.name for value in fused.graph.inputs)
    shapes = {x: [(B, S, 128) for B, S in ((2, 2), (2, 16), (4, 64))]}
    shapes[mask] = [(B, 1, S, S) for B, S in ((2, 2), (2, 16), (4, 64))]
    assert len(build(lower(fused, "trt"), {name: tuple(each) for name, each in shapes.items()}).fused) == 1
