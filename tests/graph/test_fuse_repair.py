"""What exporters write around attention: masks in pieces, repeated heads, tables of one row."""

import math

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hand_graphs import run

from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.fuse import fuse_attention, share_tied_weights
from mha_deploy.graph.ir import infer_shapes

LOWEST = float(np.finfo(np.float32).min)
TRIANGLE = """
   n = Shape <start=2, end=3> (q)
   s = Squeeze (n)
   zero = Constant <value_int=0> ()
   one = Constant <value_int=1> ()
   row = Range (zero, s, one)
   down = Unsqueeze (row, last)
   triangle = LessOrEqual (row, down)
"""


def model_of(body, *, inputs="", outputs="float[B,4,S,8] y", kv="float[B,4,S,8]", extra=""):
    """A graph over q, k and v; `last` and `middle` are the axes 1 and 2 for Unsqueeze."""
    return ir.from_proto(
        onnx.parser.parse_model(
            f"""
<ir_version: 10, opset_import: ["" : 23]>
g (float[B,4,S,8] q, {kv} k, {kv} v{inputs}) => ({outputs})
<int64[1] last = {{1}}, int64[1] middle = {{2}}, int64[2] outer = {{0, 1}}{extra}> {{
{body}
}}"""
        )
    )


def feeds(B=2, S=5, Hkv=4, **more):
    random = np.random.default_rng(0)
    made = {name: random.standard_normal((B, 4 if name == "q" else Hkv, S, 8)) for name in "qkv"}
    return {name: each.astype(np.float32) for name, each in made.items()} | more


def fused_alike(model, inputs, *, atol=1e-6):
    """The fused model, after its results were compared with those of the file."""
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    fused, report = fuse_attention(model)
    onnx.checker.check_model(ir.to_proto(fused), full_check=True)
    for got, want in zip(run(fused, inputs), run(model, inputs), strict=True):
        np.testing.assert_allclose(got, want, atol=atol, rtol=0)
    return fused, report


def left_padded(B=2, S=5):
    keys = np.ones((B, S), bool)
    keys[1, :2] = False
    return keys


# -- boolean masks of the exporter's own node -------------------------------------------------------------


SQUARE = ", int64[S] row, int64[S,1] down, bool[S,S] triangle"


def masked(condition):
    return model_of(
        f"{TRIANGLE}   pad = Unsqueeze (keys, both)\n{condition}   y = Attention (q, k, v, mask)",
        inputs=", bool[B,S] keys",
        extra=f", int64[2] both = {{1, 2}}, bool[1] yes = {{1}}, bool[1] no = {{0}}{SQUARE}",
    )


@pytest.mark.parametrize(
    ("condition", "mask", "causal"),
    [
        ("   mask = And (triangle, pad)\n", "bool", True),
        ("   a = And (yes, triangle)\n   mask = And (pad, a)\n", "bool", True),
        ("   a = Not (pad)\n   b = Not (triangle)\n   o = Or (a, b)\n   mask = Not (o)\n", "bool", True),
        ("   a = Unsqueeze (triangle, outer)\n   mask = And (yes, a)\n", "none", True),
        ("   a = GreaterOrEqual (down, zero)\n   mask = And (a, pad)\n", "bool", False),
        ("   mask = Or (triangle, pad)\n", "bool", False),
        ("   after = Not (triangle)\n   mask = And (after, pad)\n", "bool", False),
        ("   a = Greater (down, zero)\n   mask = And (a, pad)\n", "bool", False),
        ("   a = Or (no, triangle)\n   mask = And (a, pad)\n", "bool", True),
    ],
)
def test_a_boolean_mask_is_taken_apart(condition, mask, causal):
    fused, _ = fused_alike(masked(condition), feeds(keys=left_padded()))
    (node,) = attention_nodes(infer_shapes(fused))
    assert (node.mask, node.is_causal) == (mask, causal)


def indexed(begin="zero", *, end="y = Attention (q, k, v, mask)"):
    """`keys[b, k]` for all batch elements and the keys from `begin` on, as transformers reads its mask."""
    body = f"""
   zero = Constant <value_int=0> ()
   one = Constant <value_int=1> ()
   minus = Constant <value_int=-1> ()
   front = Constant <value_ints=[0, 1, 2]> ()
   behind = Constant <value_ints=[1, 2, 3]> ()
   inner = Constant <value_ints=[-1]> ()
   n = Shape <start=0, end=1> (keys)
   batch = Squeeze (n)
   m = Shape <start=1, end=2> (keys)
   length = Squeeze (m)
   stop = Add (length, {begin})
   batches = Range (zero, batch, one)
   numbers = Range ({begin}, stop, one)
   by_b = Unsqueeze (batches, behind)
   by_k = Unsqueeze (numbers, front)
   both = Max (by_b, by_k)
   all = Shape (both)
   every_b = Expand (by_b, all)
   every_k = Expand (by_k, all)
   b_index = Unsqueeze (every_b, inner)
   k_index = Unsqueeze (every_k, inner)
   indices = Concat <axis=-1> (b_index, k_index)
   of_keys = GatherND (keys, indices)
   s = Shape <start=2, end=3> (q)
   square = Concat <axis=0> (last, last, s, last)
   mask = Expand (of_keys, square)
   {end}"""
    return model_of(body, inputs=", bool[B,S] keys")


def operators(model):
    return {node.op_type for node in model.graph}


WRITTEN_OUT = """t = Transpose <perm=[0, 1, 3, 2]> (k)
   scores = MatMul (q, t)
   low = Constant <value_float=-1e9> ()
   masked = Where (mask, scores, low)
   weights = Softmax (masked)
   y = MatMul (weights, v)"""


@pytest.mark.parametrize("end", ["y = Attention (q, k, v, mask)", WRITTEN_OUT])
def test_a_mask_is_read_before_an_index_of_all_its_keys(end):
    model = indexed(end=end)
    for node in model.graph:  # all of them are of the same module
        node.metadata_props["pkg.torch.onnx.name_scopes"] = "['layers.0.attn', 'operator']"
    fused, report = fused_alike(model, feeds(keys=left_padded()))
    assert report.layers == ("layers.0.attn",)
    assert not {"GatherND", "Range"} & operators(fused)
    assert report.repairs
    assert attention_nodes(fused)
    fused_alike(indexed(end=end), feeds(B=1, S=1, keys=np.ones((1, 1), bool)))


def test_other_indices_stay_and_those_without_attention():
    inputs = feeds(keys=left_padded())
    reordered, _ = fused_alike(indexed("minus"), inputs)  # the last key is the first
    assert "GatherND" in operators(reordered)
    end = "of_queries = Transpose <perm=[0, 1, 3, 2]> (of_keys)\n   y = Where (of_queries, q, k)"
    other, report = fused_alike(indexed(end=end), inputs)
    assert "GatherND" in operators(other)
    assert not report.repairs


def test_a_window_stays_a_mask_beside_the_triangle():
    body = f"""{TRIANGLE}
   width = Constant <value_int=2> ()
   from = Sub (down, width)
   near = Greater (row, from)
   flat = And (near, triangle)
   mask = Unsqueeze (flat, outer)
   y = Attention (q, k, v, mask)"""
    fused, _ = fused_alike(model_of(body, extra=SQUARE), feeds())
    (node,) = attention_nodes(infer_shapes(fused))
    assert (node.mask, node.is_causal) == ("bool", True)


def test_a_mask_of_one_row_is_spelled_out_over_the_queries():
    """ONNX lets it broadcast, ONNX Runtime does not."""
    body = "   mask = Unsqueeze (keys, both)\n   y = Attention (q, k, v, mask)"
    model = model_of(body, inputs=", bool[B,S] keys", extra=", int64[2] both = {1, 2}")
    fused, report = fuse_attention(model)
    (node,) = attention_nodes(fused)
    assert node.mask_dims == ("B", 1, "S", "S")
    assert report.repairs[0].changes == ("the mask is written as one of queries and keys",)
    inputs = feeds(keys=left_padded())
    scores = np.einsum("bhsd,bhtd->bhst", inputs["q"], inputs["k"]) / math.sqrt(8)
    weights = np.exp(np.where(inputs["keys"][:, None, None], scores, -np.inf))
    want = weights / weights.sum(-1, keepdims=True) @ inputs["v"]
    np.testing.assert_allclose(run(fused, inputs)[0], want, atol=1e-5)


# -- numbers on hidden keys ---------------------------------------------------------------------------------


def added(number, *, bias=""):
    body = f"""{TRIANGLE}
   pad = Unsqueeze (keys, both)
   shown = And (triangle, pad)
   mask = Where (shown, {bias or "nothing"}, hidden)
   kt = Transpose <perm=[0, 1, 3, 2]> (k)
   scores = MatMul (q, kt)
   masked = Add (scores, mask)
   p = Softmax <axis=-1> (masked)
   y = MatMul (p, v)"""
    model = model_of(
        body,
        inputs=", bool[B,S] keys" + (f", float[1,4,S,S] {bias}" if bias else ""),
        extra=f", int64[2] both = {{1, 2}}, float nothing = {{0}}, float hidden = {{{number}}}{SQUARE}",
    )
    return model


@pytest.mark.parametrize("number", [LOWEST, -1e32])
@pytest.mark.parametrize("bias", ["", "bias"])
def test_fully_masked_queries_stay_the_mean_of_the_values(number, bias):
    """ONNX Runtime takes the lowest number for -inf: as it is, such a row would be zero."""
    more = {bias: np.random.default_rng(1).standard_normal((1, 4, 5, 5)).astype(np.float32)} if bias else {}
    inputs = feeds(keys=left_padded(), **more)
    fused, _ = fused_alike(added(number, bias=bias), inputs, atol=1e-5)
    (node,) = attention_nodes(infer_shapes(fused))
    assert (node.mask, node.is_causal) == ("float", False)
    mean = inputs["v"][1].mean(axis=-2)
    np.testing.assert_allclose(run(fused, inputs)[0][1, :, 0], mean, atol=1e-5)


def test_fully_masked_queries_of_the_exporters_own_node_are_the_mean_of_the_values():
    """As `added`, where PyTorch wrote the node: scaled_dot_product_attention with a mask of floats."""
    body = f"""{TRIANGLE}
   pad = Unsqueeze (keys, both)
   shown = And (triangle, pad)
   mask = Where (shown, bias, hidden)
   y = Attention (q, k, v, mask)"""
    extra = f", int64[2] both = {{1, 2}}, float hidden = {{{LOWEST}}}{SQUARE}"
    model = model_of(body, inputs=", bool[B,S] keys, float[B,4,S,S] bias", extra=extra)
    bias = np.random.default_rng(1).standard_normal((2, 4, 5, 5)).astype(np.float32)
    inputs = feeds(keys=left_padded(), bias=bias)
    fused, report = fuse_attention(model)
    assert any("lowest number" in change for repair in report.repairs for change in repair.changes)
    got, before = run(fused, inputs)[0], run(model, inputs)[0]
    for query in (0, 1):
        np.testing.assert_allclose(got[1, :, query], inputs["v"][1].mean(axis=-2), atol=1e-5)
    np.testing.assert_allclose(got[:, :, 2:], before[:, :, 2:], atol=1e-6)


def test_two_finite_masks_are_left_as_they_are():
    """Together they make -inf, which no single number says."""
    body = f"""{TRIANGLE}
   pad = Unsqueeze (keys, both)
   one = Where (triangle, nothing, hidden)
   other = Where (pad, nothing, hidden)
   mask = Add (one, other)
   kt = Transpose <perm=[0, 1, 3, 2]> (k)
   scores = MatMul (q, kt)
   masked = Add (scores, mask)
   p = Softmax <axis=-1> (masked)
   y = MatMul (p, v)""".replace("one = Where", "first = Where").replace("(one, other)", "(first, other)")
    extra = f", int64[2] both = {{1, 2}}, float nothing = {{0}}, float hidden = {{{LOWEST}}}{SQUARE}"
    model = model_of(body, inputs=", bool[B,S] keys", extra=extra)
    keys = np.ones((2, 5), bool)
    keys[1, 3:] = False
    fused, _ = fused_alike(model, feeds(keys=keys))
    attention = next(node for node in fused.graph if node.op_type == "Attention")
    assert (attention.inputs[3].dtype, "is_causal" in attention.attributes) == (ir.DataType.FLOAT, True)


def test_what_minus_infinity_hides_is_not_added_to():
    """Above the diagonal the bias is NaN: the attribute would let it through."""
    body = f"""{TRIANGLE}
   far = Sub (down, row)
   number = Cast <to=1> (far)
   root = Sqrt (number)
   mask = Where (triangle, root, hidden)
   all = Unsqueeze (mask, outer)
   kt = Transpose <perm=[0, 1, 3, 2]> (k)
   scores = MatMul (q, kt)
   masked = Add (scores, all)
   p = Softmax <axis=-1> (masked)
   y = MatMul (p, v)"""
    fused, _ = fused_alike(model_of(body, extra=f", float hidden = {{-inf}}{SQUARE}"), feeds())
    assert np.isfinite(run(fused, feeds())[0]).all()
    assert [node.is_causal for node in attention_nodes(fused)] == [False]


# -- heads, tables, weights ------------------------------------------------------------------------------


def grouped(op_type):
    """Two heads of keys for four of queries: each repeated in place (Expand), or all in turn (Concat)."""
    if op_type == "Concat":
        body = "   ka = Concat <axis=1> (k, k)\n   va = Concat <axis=1> (v, v)\n"
    else:
        body = "".join(
            f"   {x}5 = Unsqueeze ({x}, middle)\n"
            f"   {x}w = Expand ({x}5, wide)\n"
            f"   {x}a = Reshape ({x}w, joined)\n"
            for x in "kv"
        )
    extra = ", int64[5] wide = {1, 1, 2, 1, 1}, int64[4] joined = {0, 4, -1, 8}"
    extra += ", float[B,4,S,8] ka, float[B,4,S,8] va"
    return model_of(body + "   y = Attention (q, ka, va)", kv="float[B,2,S,8]", extra=extra)


def test_keys_are_taken_before_they_were_repeated():
    fused, _ = fused_alike(grouped("Expand"), feeds(Hkv=2))
    (node,) = attention_nodes(fused)
    assert (node.Hq, node.Hkv) == (4, 2)
    assert not [each for each in fused.graph if each.op_type == "Expand"]


def test_heads_in_turn_are_not_grouped_heads():
    fused, report = fused_alike(grouped("Concat"), feeds(Hkv=2))
    (node,) = attention_nodes(fused)
    assert (node.Hq, node.Hkv, report.repairs) == (4, 4, ())


def test_a_table_of_one_row_is_copied_over_the_batch():
    body = "   rotated = RotaryEmbedding (q, cos, sin)\n   y = Attention (rotated, k, v)"
    model = model_of(body, inputs=", float[1,S,4] cos, float[1,S,4] sin")
    angles = np.random.default_rng(3).uniform(0, 6, (1, 5, 4)).astype(np.float32)
    inputs = feeds(cos=np.cos(angles), sin=np.sin(angles))
    fused, report = fuse_attention(model)
    assert report.repairs[0].changes == ("the tables are copied over the batch",)
    q, (cos, sin) = inputs["q"], (inputs["cos"], inputs["sin"])
    a, b = q[..., :4], q[..., 4:]
    rotated = np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    plain = model_of("   y = Attention (q, k, v)")
    want = run(plain, {**{name: inputs[name] for name in "kv"}, "q": rotated.astype(np.float32)})[0]
    np.testing.assert_allclose(run(fused, inputs)[0], want, atol=1e-5)


def test_names_are_kept_where_nobody_says_the_module():
    model = model_of("   [mine] h = Attention (q, k, v)\n   y = Attention (h, k, v)")
    names = [node.name for node in model.graph if node.op_type == "Attention"]
    fused, report = fuse_attention(model)
    assert report.layers == report.already
    assert [node.name for node in attention_nodes(fused)] == list(report.layers)
    assert report.layers[0] == (names[0] or "h")
    assert len(set(report.layers)) == 2


def test_large_weights_are_not_read():
    """2.3 GB that nobody made: a protobuf could not hold them, and their numbers are not needed."""

    def never():
        raise MemoryError("the weights were read")

    model = model_of(
        """   kt = Transpose <perm=[0, 1, 3, 2]> (k)
   scores = MatMul (q, kt)
   p = Softmax <axis=-1> (scores)
   y = MatMul (p, v)"""
    )
    shape = ir.Shape([24_000, 24_000])
    weight = ir.Value(name="w", shape=shape, type=ir.TensorType(ir.DataType.FLOAT))
    weight.const_value = ir.LazyTensor(never, dtype=ir.DataType.FLOAT, shape=shape, name="w")
    model.graph.register_initializer(weight)
    wide = ir.Value(name="wide", shape=ir.Shape(["B", 24_000]), type=ir.TensorType(ir.DataType.FLOAT))
    model.graph.inputs.append(wide)
    gate = ir.node("Softmax", ir.node("MatMul", [wide, weight], name="project").outputs, name="gate")
    last = ir.node("MatMul", [gate.outputs[0], weight], name="last")
    for node in (gate.inputs[0].producer(), gate, last):
        node.outputs[0].name = f"{node.name}_result"
        model.graph.append(node)
    model.graph.outputs.append(last.outputs[0])
    fused, report = fuse_attention(model)
    assert len(report.fused) == 1
    assert fused.graph.initializers["w"].const_value is weight.const_value


def test_only_a_transposed_copy_is_shared():
    body = """   x = Gather <axis=0> (table, ids)
   first = MatMul (x, transposed)
   second = MatMul (x, other)
   y = Add (first, second)"""
    text = f"""
<ir_version: 10, opset_import: ["" : 23]>
g (int64[N] ids) => (float[N,3] y)
<float[3,2] table = {{1, 2, 3, 4, 5, 6}}, float[2,3] transposed = {{1, 3, 5, 2, 4, 6}},
 float[2,3] other = {{1, 3, 5, 2, 4, 7}}> {{
{body}
}}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    ids = {"ids": np.array([2, 0, 1])}
    before = run(model, ids)[0]
    share_tied_weights(model)
    assert set(model.graph.initializers) == {"table", "other"}
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    np.testing.assert_array_equal(run(model, ids)[0], before)
