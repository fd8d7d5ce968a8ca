"""Attention in other people's graphs becomes one node that computes the same."""

import copy
import functools
from dataclasses import dataclass, field

import fuse_modules as modules
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from fuse_modules import Sizes, spelling
from hand_graphs import Hand, S, check_same, random_feeds, run
from hand_graphs import fused as hand_fused
from torch import nn

import mha_deploy as md
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.fuse import fuse_attention

SIZES = (Sizes(2, 5), Sizes(3, 11))
OPSETS = (18, 20)


@dataclass(frozen=True)
class Case:
    """A spelling and what must become of it."""

    make: object
    kind: str = "x"
    mask: str = "none"
    causal: bool = False
    Hkv: int = modules.H
    Hq: int = modules.H
    scale: float = modules.D**-0.5
    facts: dict = field(default_factory=dict)
    averages: bool = False  # whether PyTorch gives 0 for a fully masked query, and its exporter the mean of V


def few(attend, **facts):
    return Case(spelling(attend, **facts), Hkv=facts["Hkv"])


CASES = {
    "sdpa": Case(spelling(modules.sdpa)),
    "sdpa causal": Case(spelling(modules.sdpa_causal), causal=True),
    # The exporter writes the lowest number for a boolean mask.
    "sdpa bool mask": Case(spelling(modules.sdpa_mask), "bool", "float", averages=True),
    "sdpa float mask": Case(spelling(modules.sdpa_mask), "float", "float"),
    "sdpa scale": Case(spelling(modules.sdpa_scale), scale=0.5),
    "sdpa gqa": few(modules.sdpa_gqa, Hkv=2),
    "scale after": Case(spelling(modules.scale_after)),
    "divided": Case(spelling(modules.divided)),
    "divided by a tensor": Case(spelling(modules.divided_by_tensor)),
    "scale on q": Case(spelling(modules.scale_on_q)),
    "scale on both": Case(spelling(modules.scale_on_both)),
    "unscaled": Case(spelling(modules.unscaled), scale=1.0),
    "softcap": Case(spelling(modules.softcapped), facts={"softcap": 2.0}),
    "softmax in float32": Case(spelling(modules.in_float32)),
    "dropout in eval": Case(spelling(modules.dropped)),
    "fill -1e9": Case(spelling(modules.filled(-1e9)), "bool", "float"),
    "fill -inf": Case(spelling(modules.filled(float("-inf"))), "bool", "bool"),
    "fill lowest": Case(spelling(modules.lowest), "bool", "float"),
    "added": Case(spelling(modules.added), "float", "float"),
    "added before the scale": Case(spelling(modules.added_before_scale), "float", "float"),
    # Scores less 10000 keep three digits in float32: a row without keys is noise, in PyTorch too.
    "bert": Case(spelling(modules.bert), "some keys", "float"),
    "padding": Case(spelling(modules.padding), "keys", "float"),
    "bias and fill": Case(spelling(modules.biased_and_filled), "bool", "float"),
    "tril buffer": Case(modules.TrilBuffer, causal=True),
    "tril buffer, -1e9": Case(modules.TrilBufferFinite, causal=True),
    "shifted tril buffer": Case(modules.ShiftedTrilBuffer, mask="bool"),
    "triu added": Case(spelling(modules.triu_added), causal=True),
    "tril of booleans": Case(spelling(modules.tril_bool), causal=True),
    "positions": Case(spelling(modules.positions), causal=True),
    "window": Case(spelling(modules.window), mask="bool", causal=True),
    "subsampled, masked twice": Case(modules.Subsampled, "keys", "float"),
    "causal and padding": Case(spelling(modules.causal_and_padding), "keys", "float", causal=True),
    "padding over causal": Case(spelling(modules.padding_over_causal), "keys", "float"),
    "finite causal and padding": Case(spelling(modules.finite_causal_and_padding), "keys", "float"),
    "einsum, heads first": Case(spelling(modules.einsum_heads_first)),
    "einsum, length first": Case(modules.EinsumLengthFirst),
    "packed": Case(modules.Packed),
    "heads in the batch": Case(modules.Batched),
    "repeat_interleave": few(modules.interleaved, Hkv=2),
    "expand and reshape": few(modules.expanded, Hkv=2),
    "mqa, expand and reshape": few(modules.expanded, Hkv=1),
    "mqa by broadcasting": few(modules.one_head, Hkv=1),
    "tiled heads": Case(spelling(modules.tiled, Hkv=2), Hkv=4),
    "MultiheadAttention": Case(functools.partial(modules.Multihead, need_weights=False)),
    "MultiheadAttention, padding": Case(
        functools.partial(modules.Multihead, need_weights=False), "keys", "float"
    ),
}


# An export takes seconds: two spellings run always, one by PyTorch's older exporter; all are for `-m slow`.
QUICK = ("repeat_interleave", "torchscript")
SPELLINGS = [QUICK, ("subsampled, masked twice", 20)]
SPELLINGS += [pytest.param(name, opset, marks=pytest.mark.slow) for name in CASES for opset in OPSETS]


@functools.cache
def module_of(name):
    torch.manual_seed(3)
    return CASES[name].make().eval()


@functools.cache
def exported(name, opset):
    if opset == "torchscript":
        return modules.export_by_torchscript(module_of(name), CASES[name].kind, 18)
    return modules.export(module_of(name), CASES[name].kind, opset)


def computed_matmuls(model):
    return [
        node.name
        for node in model.graph
        if node.op_type in ("MatMul", "Einsum") and not any(each.is_initializer() for each in node.inputs)
    ]


@pytest.mark.parametrize(("name", "opset"), SPELLINGS)
def test_a_spelling_becomes_one_node_that_computes_the_same(name, opset):
    case, model = CASES[name], exported(name, opset)
    fused, report = fuse_attention(model)
    assert report.unfused == ()
    (found,) = report.fused
    wanted = (case.Hq, case.Hkv, modules.D, case.mask, case.causal)
    assert (found.Hq, found.Hkv, found.D, found.mask, found.causal) == wanted
    assert opset == "torchscript" or found.place is not None
    assert found.scale == pytest.approx(case.scale, rel=1e-6)
    assert all(getattr(found, fact) == value for fact, value in case.facts.items())
    (node,) = attention_nodes(fused)
    assert (node.Hq, node.Hkv, node.is_causal, node.mask) == (case.Hq, case.Hkv, case.causal, case.mask)
    assert computed_matmuls(fused) == []
    assert not [each for each in fused.graph if each.op_type == "Softmax"]
    onnx.checker.check_model(ir.to_proto(fused), full_check=True)
    for sizes in SIZES:
        inputs = modules.make_inputs(case.kind, sizes, seed=sizes.S)
        (in_file,), (got,) = run(model, inputs), run(fused, inputs)
        there = ~np.isnan(in_file)
        np.testing.assert_allclose(got[there], in_file[there], atol=1e-5, rtol=0)
        if not case.averages:
            compare_with_pytorch(module_of(name), inputs, got)


def compare_with_pytorch(module, inputs, got):
    with torch.no_grad():
        want = module(*inputs).numpy()
        exact = copy.deepcopy(module).double()(*map(doubled, inputs)).numpy()
    there = ~np.isnan(want).any(axis=-1)  # fully masked queries are NaN in PyTorch and 0 in ONNX
    assert not np.isnan(got).any()
    assert there.any()
    np.testing.assert_allclose(got[there], want[there], atol=1e-5, rtol=0)
    np.testing.assert_allclose(got[there], exact[there], atol=1e-4, rtol=0)
    if not there.all():
        last = module.attn.out_proj if isinstance(module, modules.Multihead) else module.o
        zero = last.bias.detach().numpy()
        np.testing.assert_allclose(got[~there], np.broadcast_to(zero, got[~there].shape), atol=1e-6)


def doubled(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


# -- the rest of the graph ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stack_gives_one_node_for_each_layer_and_names_them():
    torch.manual_seed(0)
    stack = modules.Stack().eval()
    model = modules.export(stack, "bool", 20)
    fused, report = fuse_attention(model)
    assert [each.name for each in report.fused] == [f"layers.{index}" for index in range(12)]
    assert [node.name for node in attention_nodes(fused)] == [f"layers.{index}" for index in range(12)]
    assert report.complete
    assert computed_matmuls(fused) == []
    inputs = modules.make_inputs("bool", SIZES[0])
    inputs[1][..., 0] = True  # NaN would pass from layer to layer
    np.testing.assert_allclose(run(fused, inputs)[0], stack(*inputs).detach().numpy(), atol=1e-5)


def test_nothing_else_changes():
    model = exported(*QUICK)
    before = ir.to_proto(model).SerializeToString()
    fused, _ = fuse_attention(model)
    assert ir.to_proto(model).SerializeToString() == before
    for side in ("inputs", "outputs"):
        old, new = getattr(model.graph, side), getattr(fused.graph, side)
        assert [(v.name, v.dtype, v.shape) for v in new] == [(v.name, v.dtype, v.shape) for v in old]
    constants = model.graph.initializers.items()
    weights = {name for name, value in constants if value.shape and value.dtype.is_floating_point()}
    assert weights - set(fused.graph.initializers) == set()
    used = {value.name for node in fused.graph for value in node.inputs if value is not None}
    assert set(fused.graph.initializers) <= used
    assert all(any(v.uses() or v.is_graph_output() for v in node.outputs) for node in fused.graph)


@pytest.mark.slow
def test_the_new_node_says_where_it_came_from():
    fused, report = fuse_attention(exported(QUICK[0], OPSETS[0]))
    assert report.fused[0].place == f"{modules.__file__}:{source_line(ATTEND)}"
    (node,) = [node for node in fused.graph if node.op_type == "Attention"]
    assert "pkg.torch.onnx.stack_trace" in node.metadata_props


ATTEND = "y = self.attend(*self.heads(x), *mask)"


def source_line(text):
    with open(modules.__file__, encoding="utf-8") as lines:
        return next(number for number, line in enumerate(lines, 1) if text in line)


def test_values_that_others_use_stay():
    g = Hand()
    kt = g.op("Transpose", "k", perm=[0, 1, 3, 2])
    assert check_same(g.model(g.attend(g.op("MatMul", "q", kt)), kt)).complete


@pytest.mark.parametrize("attends", [True, False])
def test_a_graph_without_anything_to_fuse_comes_back_as_it_was(attends):
    g = Hand()
    if attends:
        result = g.op("Attention", "q", "k", "v", is_causal=1)
    else:
        shares = g.op("Softmax", g.op("MatMul", "q", g.const(np.ones((modules.D, 3)))))
        result = g.op("MatMul", shares, g.const(np.ones((3, 2))))
    model = g.model(result)
    new, report = hand_fused(model)
    assert (report.fused, report.unfused, len(report.already)) == ((), (), int(attends))
    assert ir.to_proto(ir.from_proto(model)).SerializeToString() == new.SerializeToString()


@pytest.mark.slow
def test_the_softmax_keeps_its_precision():
    torch.manual_seed(1)
    layer = spelling(modules.cast_to_float32)().eval().half()
    model = modules.export(layer, "half", 18)
    fused, report = fuse_attention(model)
    assert report.complete
    (node,) = attention_nodes(fused)
    assert (node.dtype, node.softmax_precision) == ("fp16", "fp32")
    inputs = modules.make_inputs("half", SIZES[1])
    np.testing.assert_allclose(run(fused, inputs)[0], run(model, inputs)[0], atol=2e-3)


def test_fully_masked_queries_keep_the_mean_of_v_however_large_the_scores():
    """Added to large scores, -1e9 would not give the mean: the mask must absorb them."""
    g = Hand()
    large = g.op("Mul", g.scores(), g.const(1e4))
    model = g.model(g.attend(g.op("Where", g.input("m", [2, 1, S, S], 9), large, g.const(-1e9))))
    new, report = hand_fused(model)
    feeds = random_feeds(model)
    feeds["m"][0] = False
    assert report.complete
    got = run(new, feeds)[0]
    mean = feeds["v"][0].mean(axis=-2, keepdims=True)
    np.testing.assert_allclose(got[0], np.broadcast_to(mean, got[0].shape), atol=1e-5)


def test_a_constant_padding_mask_is_not_the_triangle():
    """One row that hides all keys but the first looks like the first row of the triangle."""
    g = Hand()
    row = np.where(np.arange(S) == 0, 0.0, -np.inf).reshape(1, 1, 1, S)
    report = check_same(g.model(g.attend(g.op("Add", g.scores(), g.const(row)))))
    assert [(each.causal, each.mask) for each in report.fused] == [(False, "float")]


class PositionsLookedUp(nn.Module):
    """Attention over tokens and the first rows of a table of positions, heads by `view(B, S, -1, 8)`."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 16), nn.Embedding(32, 16)
        self.register_buffer("table", torch.arange(32)[None])

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(self.table[:, : ids.shape[1]])
        q = x.view(x.shape[0], x.shape[1], -1, 8).transpose(1, 2)
        return torch.softmax(q @ q.transpose(-1, -2) / 3, -1) @ q


def test_a_file_that_states_no_shapes_is_followed_through_its_slices(tmp_path):
    ids, axes = torch.randint(0, 11, (2, 5)), {"ids": {0: "B", 1: "S"}}
    torch.onnx.export(
        PositionsLookedUp().eval(),
        (ids,),
        str(tmp_path / "model.onnx"),
        dynamo=False,
        opset_version=17,
        input_names=["ids"],
        dynamic_axes=axes,
    )
    model = onnx.load(tmp_path / "model.onnx")
    del model.graph.value_info[:]
    _, report = md.fuse(model)
    assert len(report.fused) == 1, report


class RepeatedHeads(nn.Module):
    """PyTorch's attention over heads that are repeated by `expand` and `reshape`, sizes read from tensors."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x):
        q, kv = (each(x).view(x.shape[0], x.shape[1], -1, 8).transpose(1, 2) for each in (self.q, self.kv))
        B, heads, S, D = kv.shape
        kv = kv[:, :, None].expand(B, heads, 2, S, D).reshape(B, heads * 2, S, D)
        return nn.functional.scaled_dot_product_attention(q, kv, kv, is_causal=True)


def test_repeated_heads_behind_a_scale_that_is_computed_are_shared_ones(tmp_path):
    """The older exporter reads the head size from the shape of Q, and scales Q and the repeated K by it."""
    about = {"dynamo": False, "opset_version": 17, "input_names": ["x"]}
    path = str(tmp_path / "model.onnx")
    axes = {"x": {0: "B", 1: "S"}}
    torch.onnx.export(RepeatedHeads().eval(), (torch.randn(2, 5, 32),), path, dynamic_axes=axes, **about)
    _, report = md.fuse(onnx.load(path))
    assert [(each.Hq, each.Hkv, each.D, each.causal) for each in report.fused] == [(4, 2, 8, True)]
