"""Attention that cannot be one node is counted, wherever it stands; what only looks like it is not."""

import fuse_modules as modules
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from fuse_modules import D, H, Layer
from hand_graphs import Hand, S, check_same, fused, run
from onnx import TensorProto

import mha_deploy as md
from mha_deploy.graph.fuse import fuse_attention

MIX = np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32)


def mixed_heads(g, value):
    """A GEMM with a weight over the heads, as in talking-heads attention."""
    last = g.op("Transpose", value, perm=[0, 2, 3, 1])
    return g.op("Transpose", g.op("MatMul", last, g.const(MIX)), perm=[0, 3, 1, 2])


def after_softmax(g, scores):
    return g.op("MatMul", mixed_heads(g, g.op("Softmax", scores)), "v")


def before_softmax(g, scores):
    return g.attend(mixed_heads(g, scores))


def around_softmax(g, scores):
    return g.op("MatMul", mixed_heads(g, g.op("Softmax", mixed_heads(g, scores))), "v")


def einsum_after(g, scores):
    weights = g.op("Einsum", g.op("Softmax", scores), g.const(MIX), equation="bhst,hg->bgst")
    return g.op("Einsum", weights, "v", equation="bhst,bhtd->bhsd")


def convolved(g, scores):
    weights = g.op("Conv", g.op("Softmax", scores), g.const(MIX[:, :, None, None]))
    return g.op("MatMul", weights, "v")


def normalised(g, scores):
    weights = g.op("LayerNormalization", g.op("Softmax", scores), g.const(np.ones(S)))
    return g.op("MatMul", weights, "v")


def few_values(g, scores):
    """The weights come to a learned table of two axes, which is no matmul of two computed tensors."""
    return g.op("MatMul", g.op("Softmax", scores), g.const(np.ones((S, D))))


def exponentials(g, scores):
    """A softmax by hand."""
    top = g.op("ReduceMax", scores, g.ints(-1), keepdims=1)
    weights = g.op("Exp", g.op("Sub", scores, top))
    weights = g.op("Div", weights, g.op("ReduceSum", weights, g.ints(-1), keepdims=1))
    return g.op("MatMul", mixed_heads(g, weights), "v")


SPELLINGS = [
    after_softmax,
    before_softmax,
    around_softmax,
    einsum_after,
    convolved,
    normalised,
    few_values,
    exponentials,
]


@pytest.mark.parametrize("attend", SPELLINGS)
def test_one_beside_a_plain_attention_is_counted(attend):
    g = Hand()
    plain = g.attend(g.scores())
    report = check_same(g.model(plain, attend(g, g.scores())))
    assert (len(report.fused), len(report.unfused)) == (1, 1)
    left = report.unfused[0]
    assert not report.complete
    ends = ("Div" if attend is exponentials else "Softmax",)
    assert left.name == [node.name for node in g.nodes if node.op_type in ends][-1]
    assert left.reason


def squared(g, scores):
    positive = g.op("Relu", scores)
    return g.op("MatMul", g.op("Mul", positive, positive), "v")


def powered(g, scores):
    return g.op("MatMul", g.op("Pow", g.op("Relu", scores), g.const(2.0)), "v")


def gated(g, scores):
    return g.op("MatMul", g.op("Sigmoid", g.op("Sub", scores, g.const(2.0))), "v")


@pytest.mark.parametrize("attend", [squared, powered, gated])
def test_weights_without_a_softmax_are_counted(attend):
    g = Hand()
    plain = g.attend(g.scores())
    report = check_same(g.model(plain, attend(g, g.scores())))
    assert (len(report.fused), len(report.unfused)) == (1, 1)
    assert report.unfused[0].recognized
    assert "in the place of the softmax" in report.unfused[0].reason


def positive(g, value):
    return g.op("Add", g.op("Elu", value), g.const(1.0))


def softmaxes(g, value):
    return g.op("Softmax", value)


@pytest.mark.parametrize("features", [positive, softmaxes, lambda g, value: g.op("Relu", value)])
@pytest.mark.parametrize("keys_first", [True, False])
def test_linear_attention_is_counted_once(features, keys_first):
    """With its normalizer over the keys, whichever matmul comes first."""
    g = Hand()
    q, k = features(g, "q"), features(g, "k")
    kt = g.op("Transpose", k, perm=[0, 1, 3, 2])
    if keys_first:
        y = g.op("MatMul", q, g.op("MatMul", kt, "v"))
    else:
        y = g.op("MatMul", g.op("MatMul", q, kt), "v")
    total = g.op("MatMul", q, g.op("ReduceSum", kt, g.ints(-1), keepdims=1))
    report = check_same(g.model(g.op("Div", y, total), g.attend(g.scores())))
    assert (len(report.fused), len(report.unfused)) == (1, 1)
    assert report.unfused[0].recognized
    assert "linear attention" in report.unfused[0].reason


def test_attention_with_a_step_that_is_not_linear_is_not_called_linear():
    """Sparsemax: what the scores have above a threshold."""
    g = Hand()
    scores = g.scores()
    threshold = g.op("ReduceMean", scores, g.ints(-1))
    weights = g.op("Clip", g.op("Sub", scores, threshold), g.const(0.0))
    (left,) = check_same(g.model(g.op("MatMul", weights, "v"))).unfused
    assert left.recognized
    assert "linear" not in left.reason
    assert "Clip" in left.reason


def test_linear_attention_with_a_state_of_all_keys_before_is_counted():
    g = Hand()
    q, k = positive(g, "q"), positive(g, "k")
    outer = g.op("Mul", g.op("Unsqueeze", k, g.ints(4)), g.op("Unsqueeze", "v", g.ints(3)))
    state = g.op("CumSum", outer, g.const(2, np.int64))
    y = g.op("Squeeze", g.op("MatMul", g.op("Unsqueeze", q, g.ints(3)), state), g.ints(3))
    assert ["linear attention" in left.reason for left in check_same(g.model(y)).unfused] == [True]


def test_linear_attention_before_a_softmax_is_counted():
    g = Hand()
    y = g.op("Softmax", g.op("MatMul", g.scores(), "v"))
    assert ["linear attention" in left.reason for left in check_same(g.model(y)).unfused] == [True]


@pytest.mark.parametrize("op", ["own.LinearAttention", "com.microsoft.MultiHeadAttention"])
def test_other_operators_of_attention_are_counted(op):
    text = PARTS.replace('"own" : 1', '"own" : 1, "com.microsoft" : 1').replace("BODY", f"y = {op} (q, k, v)")
    _, report = fuse_attention(ir.from_proto(onnx.parser.parse_model(text)))
    assert [(left.recognized, op.split(".")[-1] in left.reason) for left in report.unfused] == [(True, True)]


# As ONNX Runtime's optimizer writes attention, and its quantizer.
FOREIGN = {
    "com.microsoft's FusedMatMulActivation computes the scores": """
   s = com.microsoft.FusedMatMulActivation <transB = 1, activation = "Relu"> (q, k)
   p = Softmax (s)
   y = MatMul (p, v)
""",
    "What stands between the softmax and the matmul with V is not recognized. FusedMatMulActivation y": """
   kt = Transpose <perm = [0, 1, 3, 2]> (k)
   s = MatMul (q, kt)
   p = Softmax (s)
   y = com.microsoft.FusedMatMulActivation <activation = "Relu"> (p, v)
""",
    "com.microsoft's BiasSoftmax is not ONNX's Softmax.": """
   kt = Transpose <perm = [0, 1, 3, 2]> (k)
   s = MatMul (q, kt)
   p = com.microsoft.BiasSoftmax <axis = 3> (s, s)
   y = MatMul (p, v)
""",
    "ONNX's MatMulInteger computes the scores": """
   kt = Transpose <perm = [0, 1, 3, 2]> (k)
   qi, qs, qz = DynamicQuantizeLinear (q)
   ki, ks, kz = DynamicQuantizeLinear (kt)
   si = MatMulInteger (qi, ki, qz, kz)
   sf = Cast <to = 1> (si)
   qks = Mul (qs, ks)
   s = Mul (sf, qks)
   p = Softmax (s)
   pi, ps, pz = DynamicQuantizeLinear (p)
   vi, vs, vz = DynamicQuantizeLinear (v)
   yi = MatMulInteger (pi, vi, pz, vz)
   yf = Cast <to = 1> (yi)
   pvs = Mul (ps, vs)
   y = Mul (yf, pvs)
""",
    "ONNX's QLinearMatMul computes the scores": """
   kt = Transpose <perm = [0, 1, 3, 2]> (k)
   u = Constant <value = float {0.1}> ()
   z = Constant <value = uint8 {128}> ()
   qi = QuantizeLinear (q, u, z)
   ki = QuantizeLinear (kt, u, z)
   vi = QuantizeLinear (v, u, z)
   si = QLinearMatMul (qi, u, z, ki, u, z, u, z)
   s = DequantizeLinear (si, u, z)
   p = Softmax (s)
   pi = QuantizeLinear (p, u, z)
   yi = QLinearMatMul (pi, u, z, vi, u, z, u, z)
   y = DequantizeLinear (yi, u, z)
""",
}


@pytest.mark.parametrize("reason", FOREIGN)
def test_other_matmuls_and_softmaxes_are_counted(reason):
    text = PARTS.replace('"own" : 1', '"com.microsoft" : 1').replace("BODY", FOREIGN[reason])
    _, report = md.fuse(onnx.parser.parse_model(text))
    assert (report.fused, [each.reason[: len(reason)] for each in report.unfused]) == ((), [reason])


@pytest.mark.parametrize("chosen", ["Gather", "GatherND"])
def test_experts_chosen_for_each_token_are_no_attention(chosen):
    """Two GEMMs of computed tensors with an activation between, but one of each is a table of weights."""
    g = Hand()
    random = np.random.default_rng(0)
    x, best = "q", g.input("best", [2, H, 1] if chosen == "GatherND" else [2, H], TensorProto.INT64)
    for width in (8, 16):
        table = g.const(random.standard_normal((EXPERTS, width, 24 - width)))
        x = g.op("Sigmoid", g.op("MatMul", x, g.op(chosen, table, best)))
    _, report = fused(g.model(x))
    assert report.unfused == ()


@pytest.mark.parametrize(
    ("norm", "factors"), [("LayerNormalization", [np.ones(D)]), ("InstanceNormalization", [np.ones(H)] * 2)]
)
def test_a_router_behind_linear_attention_is_none(norm, factors):
    """It has as many experts as there are heads; between the two are a norm and a projection."""
    g = Hand()
    y = g.op("MatMul", g.op("MatMul", "q", g.op("Transpose", "k", perm=[0, 1, 3, 2])), "v")
    normed = g.op(norm, y, *map(g.const, factors))
    shares = g.op("Softmax", g.op("MatMul", normed, g.const(np.ones((D, H)))))
    _, report = fused(g.model(g.op("MatMul", shares, g.const(np.ones((H, D))))))
    assert ["linear attention" in left.reason for left in report.unfused] == [True]


def test_keys_that_a_matmul_computes_are_no_second_attention():
    g = Hand()
    k = g.op("MatMul", "k", g.op("MatMul", g.op("Transpose", "k", perm=[0, 1, 3, 2]), "v"))
    scores = g.op("MatMul", "q", g.op("Transpose", k, perm=[0, 1, 3, 2]))
    report = check_same(g.model(before_softmax(g, scores)))
    assert [left.name.split("_")[0] for left in report.unfused] == ["MatMul", "Softmax"]


def test_a_softmax_by_hand_is_fused():
    g = Hand()
    scores = g.op("Mul", g.scores(), g.const(0.3))
    top = g.op("ReduceMax", scores, g.ints(3), keepdims=1)
    weights = g.op("Exp", g.op("Sub", scores, top))
    weights = g.op("Div", weights, g.op("ReduceSum", weights, g.ints(-1), keepdims=1))
    report = check_same(g.model(g.op("MatMul", weights, "v")))
    assert (len(report.fused), report.unfused) == (1, ())


def test_every_one_is_counted_in_the_order_of_the_graph():
    g = Hand()
    first = after_softmax(g, g.scores())
    again = g.op("MatMul", first, g.op("Transpose", "k", perm=[0, 1, 3, 2]))
    second = g.op("MatMul", g.op("Softmax", again, axis=2), "v")  # over the queries
    third = after_softmax(g, g.op("MatMul", second, g.op("Transpose", "k", perm=[0, 1, 3, 2])))
    _, report = fused(g.model(third))
    names = [node.name for node in g.nodes if node.op_type == "Softmax"]
    assert [left.name for left in report.unfused] == names


def test_gemm_of_matrices_that_are_scaled_by_queries_and_keys():
    g = Hand(shape=(S, D))
    scores = g.op("Mul", g.op("Gemm", "q", "k", transB=1), g.input("factors", (S, S)))
    y = g.op("Gemm", g.op("Softmax", scores), "v")
    model = g.model(g.op("Unsqueeze", y, g.ints(0, 1)))
    new, report = fused(model)
    assert (len(report.fused), len(report.unfused)) == (0, 1)
    assert list(new.graph.node) == list(model.graph.node)


PARTS = """
<ir_version: 10, opset_import: ["" : 23, "own" : 1]>
g (float[2,4,S,8] q, float[2,4,S,8] k, float[2,4,S,8] v, bool c) => (float[2,4,S,8] y)
<float[4,4] mix = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}> { BODY }
"""
TALKING = """
   kt = Transpose <perm = [0, 1, 3, 2]> (k)
   s = MatMul (q, kt)
   p = Softmax (s)
   p1 = Transpose <perm = [0, 2, 3, 1]> (p)
   p2 = MatMul (p1, mix)
   p3 = Transpose <perm = [0, 3, 1, 2]> (p2)
"""
SCORES_OUTSIDE = """
   kt = Transpose <perm = [0, 1, 3, 2]> (k)
   s = MatMul (q, kt)
   p = If (c) <then_branch = a () => (float[2,4,S,S] pa) { pa = Softmax (s) },
               else_branch = b () => (float[2,4,S,S] pb) { pb = Softmax (s) }>
   y = MatMul (p, v)
"""
IN_BRANCHES = f"""
   y = If (c) <then_branch = a () => (float[2,4,S,8] ya) {{ {TALKING} ya = MatMul (p3, v) }},
               else_branch = b () => (float[2,4,S,8] yb) {{ yb = Identity (v) }}>
"""
IN_A_LOOP = """
   n = Constant <value_int = 3> ()
   w0 = Constant <value_float = 0.0> ()
   w, many = Loop (n, c, w0) <body = b (int64 i, bool go, float[] w1)
        => (bool go2, float[2,4,S,S] w2, float[2,4,S,S] p0) {
           go2 = Identity (go)
           kt = Transpose <perm = [0, 1, 3, 2]> (k)
           s = MatMul (q, kt)
           p = Softmax (s)
           w2 = Add (p, w1)
           p0 = Identity (p) }>
   y = MatMul (w, v)
"""
GRAPHS = {"a branch": (IN_BRANCHES, 1), "softmax in branches": (SCORES_OUTSIDE, 2), "a loop": (IN_A_LOOP, 1)}


@pytest.mark.parametrize("name", GRAPHS)
def test_in_graphs_of_a_graph(name):
    body, count = GRAPHS[name]
    model = ir.from_proto(onnx.parser.parse_model(PARTS.replace("BODY", body)))
    _, report = fuse_attention(model)
    assert (len(report.fused), len(report.unfused)) == (0, count)


OTHER_BRANCH = """
   kt = Transpose <perm = [0, 1, 3, 2]> (k)
   s = MatMul (q, kt)
   p = Softmax (s)
   y = If (c) <then_branch = a () => (float[2,4,S,8] ya) { ya = MatMul (p, v) },
               else_branch = b () => (float[2,4,S,8] yb) { yb = MatMul (p, k) }>
"""


def test_weights_that_another_branch_uses():
    """The weights of a node inside one branch are unknown in the other."""
    model = onnx.parser.parse_model(PARTS.replace("BODY", OTHER_BRANCH))
    new, report = md.fuse(model)
    onnx.checker.check_model(new)
    assert report.fused == ()
    assert report.unfused[0].reason.startswith("The attention weights are used outside of the branch or loop")


PLAIN = """
   kt = Transpose <perm = [0, 1, 3, 2]> (k)
   s = MatMul (q, kt)
   p = Softmax (s)
"""
FUSED_INSIDE = {
    "a branch": f"""
   y = If (c) <then_branch = a () => (float[2,4,S,8] ya) {{ {PLAIN} ya = MatMul (p, v) }},
               else_branch = b () => (float[2,4,S,8] yb) {{ yb = Identity (v) }}>
""",
    "a loop": f"""
   n = Constant <value_int = 3> ()
   y = Loop (n, c, q) <body = b (int64 i, bool go, float[2,4,S,8] q0) => (bool go2, float[2,4,S,8] q1) {{
           go2 = Identity (go)
           {PLAIN.replace("(q, kt)", "(q0, kt)")}
           q1 = MatMul (p, v) }}>
""",
    "a loop without sizes": f"""
   n = Constant <value_int = 3> ()
   y = Loop (n, c, q) <body = b (int64 i, bool go, float[] q0) => (bool go2, float[] q1) {{
           go2 = Identity (go)
           {PLAIN.replace("(q, kt)", "(q0, kt)")}
           q1 = MatMul (p, v) }}>
""",
    "a loop with a cache": f"""
   n = Constant <value_int = 3> ()
   y, ke, ve = Loop (n, c, q, k, v) <body = b (int64 i, bool go, float[] q0, float[] k0, float[] v0)
           => (bool go2, float[] q1, float[] k1, float[] v1) {{
           go2 = Identity (go)
           k1 = Concat <axis = 2> (k0, q0)
           v1 = Concat <axis = 2> (v0, q0)
           {PLAIN.replace("(k)", "(k1)").replace("(q, kt)", "(q0, kt)")}
           q1 = MatMul (p, v1) }}>
""",
    "a loop in a loop": f"""
   n = Constant <value_int = 2> ()
   y = Loop (n, c, q) <body = b (int64 i, bool go, float[] q0) => (bool go2, float[] q1) {{
           go2 = Identity (go)
           q1 = Loop (n, c, q0) <body = d (int64 j, bool on, float[] q2) => (bool on2, float[] q3) {{
               on2 = Identity (on)
               {PLAIN.replace("(q, kt)", "(q2, kt)")}
               q3 = MatMul (p, v) }}> }}>
""",
    "a function": "y = own.plain (q, k, v)",
}


@pytest.mark.parametrize("name", FUSED_INSIDE)
def test_attention_inside_is_fused(name):
    text = PARTS.replace("BODY", FUSED_INSIDE[name])
    if name == "a function":
        text += f"""<opset_import: ["" : 23], domain: "own">
    plain (q, k, v) => (y) {{ {PLAIN} y = MatMul (p, v) }}"""
    model = onnx.parser.parse_model(text)
    new, report = fused(model)
    assert (len(report.fused), report.unfused) == (1, ())
    random = np.random.default_rng(0)
    feeds = {each: random.standard_normal((2, 4, 5, 8)).astype(np.float32) for each in "qkv"}
    feeds["c"] = np.array(True)
    np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)


def test_a_mask_of_branches():
    body = """
   sizes = Shape (q)
   two = Constant <value_int = 2> ()
   count = Gather (sizes, two)
   zero = Constant <value_ints = [0]> ()
   far = Constant <value_float = -1e9> ()
   m = If (c) <then_branch = a () => (float[] ma) {
                   first = Unsqueeze (count, zero)
                   square = Concat <axis = 0> (first, first)
                   full = Expand (far, square)
                   one = Constant <value_int = 1> ()
                   ma = Trilu <upper = 1> (full, one) },
               else_branch = b () => (float[] mb) {
                   second = Unsqueeze (count, zero)
                   even = Concat <axis = 0> (second, second)
                   mb = ConstantOfShape (even) }>
   kt = Transpose <perm = [0, 1, 3, 2]> (k)
   s = MatMul (q, kt)
   masked = Add (s, m)
   p = Softmax (masked)
   y = MatMul (p, v)
"""
    model = onnx.parser.parse_model(PARTS.replace("BODY", body))
    new, report = md.fuse(model)
    assert [(each.mask, each.verified) for each in report.fused] == [("float", True)]
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal((2, 4, 5, 8)).astype(np.float32) for name in "qkv"}
    for chosen in (True, False):
        given = {**feeds, "c": np.array(chosen)}
        np.testing.assert_allclose(run(new, given)[0], run(model, given)[0], atol=2e-5)


@pytest.mark.parametrize("name", ["a branch", "a loop"])
def test_attention_inside_is_validated_at_the_outputs(name, tmp_path):
    model = onnx.parser.parse_model(PARTS.replace("BODY", FUSED_INSIDE[name]))
    file, sizes = tmp_path / "model.onnx", {"S": "1:4:6"}
    onnx.save(model, file)
    bundle = md.import_onnx(file, tmp_path / "bundle", axes=sizes, golden=("opt",), precision="fp32")
    report = md.validate(bundle, runtimes=("ort-cpu",), latency=False)
    assert (report.passed, len(bundle.manifest.attention)) == (True, 1)
    assert any("not measured" in note for note in report.to_dict()["notes"])


def test_attention_in_a_branch_that_no_case_takes_is_not_verified(tmp_path):
    body = "other = Not (c)" + FUSED_INSIDE["a branch"].replace("If (c)", "If (other)")
    onnx.save(onnx.parser.parse_model(PARTS.replace("BODY", body)), tmp_path / "model.onnx")
    bundle = md.import_onnx(
        tmp_path / "model.onnx", tmp_path / "bundle", axes={"S": "1:4:6"}, golden=("opt",), precision="fp32"
    )
    report = md.validate(bundle, runtimes=("ort-cpu",), latency=False)
    assert (report.outcome, len(bundle.manifest.attention)) == ("not verified", 1)
    assert any("attention" in gap for gap in report.to_dict()["verdict"]["not_verified"])


@pytest.mark.parametrize("attend", [*SPELLINGS[:5], exponentials])
def test_heads_that_are_mixed_are_the_reason_wherever_that_is(attend):
    g = Hand()
    model = g.model(attend(g, g.scores()))
    weights = {each.name for each in model.graph.initializer if sorted(each.dims)[-2:] == [4, 4]}
    mixing = [node.name for node in model.graph.node if set(node.input) & weights]
    (left,) = md.fuse(model)[1].unfused
    assert "heads" in left.reason
    assert all(name in left.reason.split() for name in mixing)
    # Not those beside it, which only move numbers
    moves = [node.name for node in model.graph.node if node.op_type == "Transpose"]
    assert not set(moves) & set(left.reason.split())


def test_weights_that_are_normalized_mix_no_heads():
    g = Hand()
    (left,) = md.fuse(g.model(normalised(g, g.scores())))[1].unfused
    assert "heads" not in left.reason


def test_in_a_function():
    function = f"""<opset_import: ["" : 23], domain: "own">
    talk (q, k, v, mix) => (y) {{ {TALKING} y = MatMul (p3, v) }}"""
    text = PARTS.replace("BODY", "y = own.talk (q, k, v, mix)") + function
    _, report = fuse_attention(ir.from_proto(onnx.parser.parse_model(text)))
    assert (len(report.fused), len(report.unfused)) == (0, 1)


@pytest.mark.slow
def test_a_module_with_talking_heads_is_named_with_its_source_line():
    class Talking(Layer):
        def __init__(self):
            super().__init__()
            self.mix = torch.nn.Linear(H, H, bias=False)

        def attend(self, q, k, v):
            weights = (q @ k.mT * D**-0.5).softmax(-1)
            return self.mix(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ v

    _, report = fuse_attention(modules.export(Talking().eval(), "x", 18))
    assert (report.fused, len(report.unfused)) == ((), 1)
    assert report.unfused[0].place.startswith(modules.__file__)


# -- what is none --------------------------------------------------------------------------------------------

EXPERTS, WIDTH = 4, H * D


def routed(g, x, seed):
    """A mixture of experts whose weights are gathered for every token: a GEMM of two computed tensors."""
    random = np.random.default_rng(seed)
    logits = g.op("MatMul", x, g.const(random.standard_normal((WIDTH, EXPERTS))))
    shares = g.op("ReduceMax", g.op("Softmax", logits), g.ints(-1), keepdims=1)
    best = g.op("ArgMax", g.op("Softmax", logits), axis=-1, keepdims=0)
    weights = g.op("Gather", g.const(random.standard_normal((EXPERTS, WIDTH, WIDTH))), best)
    y = g.op("Squeeze", g.op("MatMul", g.op("Unsqueeze", x, g.ints(2)), weights), g.ints(2))
    return g.op("Add", x, g.op("Mul", y, shares))


def heads(g, x):
    random = np.random.default_rng(5)
    for name in "qkv":
        y = g.op("MatMul", x, g.const(random.standard_normal((WIDTH, WIDTH))))
        yield g.op("Transpose", g.op("Reshape", y, g.ints(2, S, H, D)), perm=[0, 2, 1, 3]), name


@pytest.mark.parametrize("fusible", [True, False])
def test_the_router_of_experts_is_no_attention(fusible):
    g = Hand()
    g.inputs = {"x": (TensorProto.FLOAT, (2, S, WIDTH))}
    x = "x"
    for seed in range(3):
        parts = {name: value for value, name in heads(g, x)}
        scores = g.op("MatMul", parts["q"], g.op("Transpose", parts["k"], perm=[0, 1, 3, 2]))
        y = g.op("MatMul", g.op("Softmax", scores, axis=-1 if fusible else -2), parts["v"])
        y = g.op("Reshape", g.op("Transpose", y, perm=[0, 2, 1, 3]), g.ints(2, S, WIDTH))
        x = routed(g, g.op("Add", x, y), seed)
    _, report = fused(g.model(g.op("Unsqueeze", x, g.ints(0))))
    assert (len(report.fused), len(report.unfused)) == ((3, 0) if fusible else (0, 3))


def test_a_classifier_behind_attention_is_none():
    g = Hand()
    y = g.op("MatMul", g.attend(g.scores()), g.const(np.ones((D, D))))
    shares = g.op("Softmax", y)
    report = check_same(g.model(g.op("MatMul", shares, g.const(np.ones((D, 3))))))
    assert (len(report.fused), len(report.unfused)) == (1, 0)


def test_shapes_of_scores_are_no_scores():
    """A table of the size of the scores does not depend on their numbers."""
    g = Hand()
    scores = g.op("Relu", g.scores())
    table = g.op("Expand", g.op("ReduceMean", "v", keepdims=1), g.op("Shape", scores))
    shares = g.op("Softmax", table)
    _, report = fused(g.model(g.op("MatMul", shares, g.const(np.ones((S, S)))), scores))
    assert report.unfused == ()


STATIC = """<ir_version: 10, opset_import: ["" : 23]>
g (float[2,4,5,8] q, float[2,4,5,8] k, float[2,4,5,8] v) => (y)
{ kt = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul (q, kt) BODY }"""
CUT = "none = Constant <value_ints = [0]> () keys = Constant <value_ints = [5]> () three = Identity (last)"
CUT += " last = Constant <value_ints = [3]> () cut = Slice (w, none, keys, three)"
UNKNOWN = {
    "sink": f"sink = Slice (s, none, one, three) one = Constant <value_ints = [1]> () zero = Sub (sink, sink)"
    f" both = Concat <axis = -1> (s, zero) w = Softmax (both) {CUT} odd = Round (cut) y = MatMul (odd, v)",
    "padding": f"pads = Constant <value_ints = [0, 0, 0, 0, 0, 0, 0, 1]> () both = Pad (s, pads)"
    f" w = Softmax (both) {CUT} odd = Round (cut) y = MatMul (odd, v)",
    "learned keys": "t = MatMul (q, K) w = Softmax (t) odd = Round (w) y = MatMul (odd, V)",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_scores_of_a_fixed_size_before_an_unknown_step_are_listed(name):
    model = onnx.parser.parse_model(STATIC.replace("BODY", UNKNOWN[name]))
    learned = np.random.default_rng(0).standard_normal((4, 8, 6)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(learned, "K"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(learned.transpose(0, 2, 1), "V"))
    _, report = md.fuse(model)
    assert (len(report.fused), len(report.unfused)) == (0, 1)


def test_powers_of_a_matrix_are_no_attention():
    """As of who is reached from whom: the mask of an attention over a tree."""
    g = Hand()
    reached = g.input("parents", (S, S))
    for _ in range(2):
        reached = g.op("Min", g.op("MatMul", reached, reached), g.const(1.0))
    masked = g.op("Where", g.op("Greater", reached, g.const(0.5)), g.scores(), g.const(-1e9))
    report = check_same(g.model(g.attend(masked)))
    assert (len(report.fused), report.unfused) == (1, ())


@pytest.mark.parametrize("reduction", ["ReduceMax", "ReduceMean"])
def test_weighted_values_that_are_not_summed_are_listed(reduction):
    g = Hand()
    weights = g.op("Unsqueeze", g.op("Softmax", g.scores()), g.ints(4))
    weighted = g.op("Mul", weights, g.op("Unsqueeze", "v", g.ints(2)))
    report = check_same(g.model(g.op(reduction, weighted, g.ints(3), keepdims=0)))
    assert (report.fused, len(report.unfused)) == ((), 1)
