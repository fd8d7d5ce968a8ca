"""Every fused attention is compared with its original, and what differs or cannot be compared stays."""

import numpy as np
import onnx
import onnx.reference
import pytest
from hand_graphs import B, D, H, Hand, S, check_same, fused, random_feeds, run
from onnx import TensorProto, helper, numpy_helper

import mha_deploy as md
from mha_deploy.graph.fuse import mask_pattern, pattern
from mha_deploy.graph.fuse.verify import NotVerified

LOWEST = float(np.finfo(np.float32).min)
LOWER = np.tri(S, dtype=bool)


def plain(layers=1, **sizes):
    g = Hand(**sizes)
    y = "q"
    for _ in range(layers):
        scores = g.op("MatMul", y, g.op("Transpose", "k", perm=[0, 1, 3, 2]))
        y = g.attend(g.op("Mul", scores, g.const(0.3)))
    return g.model(y)


def test_what_is_fused_was_verified():
    _, report = fused(plain(layers=2))
    assert [each.verified for each in report.fused] == [True, True]


@pytest.mark.parametrize("shape", [(2, H, S, 8), ("B", H, "S", 8)])
def test_a_wrong_node_is_left_as_it_was(shape, monkeypatch):
    """Every layer of the same structure is left, with a reason, and nothing else happens to the file."""
    right = pattern._before_factor

    def wrong(operand):
        found = right(operand)
        return found and type(found)(**{**vars(found), "factor": found.factor * 1.001})

    monkeypatch.setattr(pattern, "_before_factor", wrong)
    g = Hand(shape=shape)
    y = "q"
    for _ in range(3):
        scaled = g.op("Mul", y, g.const(0.3))
        y = g.attend(g.op("MatMul", scaled, g.op("Transpose", "k", perm=[0, 1, 3, 2])))
    new, report = fused(g.model(y))
    assert (len(report.fused), len(report.unfused)) == (0, 3)
    assert all("does not compute the same" in left.reason for left in report.unfused)
    assert "Attention" not in {node.op_type for node in new.graph.node}


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(onnx.reference, "ReferenceEvaluator", None)
    _, report = md.fuse(plain(), verify=False)
    assert [each.verified for each in report.fused] == [False]


def test_equal_structures_are_compared_once(monkeypatch):
    from mha_deploy.graph import fuse

    calls, right = [], fuse.compare
    monkeypatch.setattr(fuse, "compare", lambda *given: calls.append(1) or right(*given))
    _, report = fused(plain(layers=5))
    assert (len(report.fused), len(calls)) == (5, 1)


def test_a_comparison_of_nothing_but_nan_is_none():
    g = Hand()
    never = g.op("Sqrt", g.op("Sub", g.const(-1.0), g.op("Abs", g.input("b", [2, 1, S, S]))))
    _, report = fused(g.model(g.attend(g.op("Add", g.scores(), never))))
    assert [(left.reason[:12], "every result is NaN" in left.reason) for left in report.unfused] == [
        ("Not verified", True)
    ]


@pytest.mark.parametrize("factor", [1.0, 1.0001])
def test_scores_that_a_mask_and_a_bias_hide_are_rounded_by_luck(factor, monkeypatch):
    """Beside -10000 a score has steps of 0.001, for the few keys of a query that the bias leaves."""
    right = pattern._before_factor

    def scaled(operand):
        found = right(operand)
        return found and type(found)(**{**vars(found), "factor": found.factor * factor})

    monkeypatch.setattr(pattern, "_before_factor", scaled)
    g = Hand()
    shown = g.op("Greater", g.input("history", [B, 1, 1, S], TensorProto.INT64), g.const(0, np.int64))
    keys = g.op("Transpose", "k", perm=[0, 1, 3, 2])
    scores = g.op("MatMul", g.op("Mul", "q", g.const(10.0)), keys)
    scores = g.op("Add", scores, g.input("bias", [B, H, S, S]))
    masked = g.op("Add", scores, g.op("Where", shown, g.const(0.0), g.const(-10000.0)))
    _, report = fused(g.model(g.attend(masked)))
    assert len(report.fused) == (factor == 1.0)


def test_what_cannot_be_compared_stays(monkeypatch):
    def lacks(*given, **named):
        raise NotVerified("ONNX's evaluator lacks an operator.")

    monkeypatch.setattr("mha_deploy.graph.fuse.compare", lacks)
    _, report = fused(plain())
    assert (report.fused, report.unfused[0].reason[:12]) == ((), "Not verified")


# -- wrong fusions of the past -----------------------------------------------------------------------


def compare(g, result, **more):
    """Fuse, and compare in ONNX Runtime on some inputs."""
    model = g.model(result)
    new, report = fused(model)
    feeds = random_feeds(model) | more
    np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)
    return report


LEFT_PADDED = np.array([[[[0, 0, 1, 1, 1, 1]]], [[[1, 1, 1, 1, 1, 1]]]], bool)


@pytest.mark.parametrize("outer", [LOWEST, -1e9])
def test_a_number_added_over_a_number_put(outer):
    """Padded keys after the query are at -inf, others at the lowest number."""
    g = Hand()
    padded = g.op("Where", g.input("m", [2, 1, 1, S], TensorProto.BOOL), g.scores(), g.const(LOWEST))
    causal = g.op("Where", g.const(LOWER, bool), g.const(0.0), g.const(outer))
    report = compare(g, g.attend(g.op("Add", padded, causal)), m=LEFT_PADDED)
    assert len(report.fused) == 1


@pytest.mark.parametrize("low", [LOWEST, -1e10, -1e9])
def test_a_query_whose_bias_is_below_the_fill(low):
    g = Hand()
    biased = g.op("Add", g.scores(), g.input("bias", [2, 1, S, S]))
    shown = g.input("m", [S, S], TensorProto.BOOL)
    bias = np.zeros((2, 1, S, S), np.float32)
    bias[:, :, 2] = bias[:, :, 3, :4] = low
    mask = np.ones((S, S), bool)
    mask[3, 4:] = mask[4] = False
    report = compare(g, g.attend(g.op("Where", shown, biased, g.const(-1e9))), m=mask, bias=bias)
    assert len(report.fused) == 1


@pytest.mark.parametrize("fills", [(-1e9, LOWEST), (LOWEST, -1e9), (-1e6, -2e6)])
def test_several_finite_fills(fills):
    g = Hand()
    padded = g.op("Where", g.input("m", [2, 1, 1, S], TensorProto.BOOL), g.scores(), g.const(fills[0]))
    causal = g.op("Where", g.const(LOWER, bool), padded, g.const(fills[1]))
    report = compare(g, g.attend(causal), m=LEFT_PADDED)
    assert len(report.fused) == 1


FILLED = np.arange(B * S * S).reshape(B, 1, S, S) % 7 > 2
FILLED[0, :, 3], FILLED[1, :, 2] = False, True


@pytest.mark.parametrize("times", [1.0, 1e5])
@pytest.mark.parametrize("mask", [FILLED, LOWER, LEFT_PADDED, np.ones((H, 1, S), bool)])
@pytest.mark.parametrize("fill", [-1e4, -65504.0, 0.5])
def test_scores_that_are_set_to_a_number_which_others_are_below(fill, mask, times):
    """Keys of zeros have the number, beside the others or in their place; some queries have no other."""
    g = Hand()
    scores, number = g.op("Mul", g.scores(), g.const(times)), g.const(fill)
    shown = g.input("m", mask.shape, TensorProto.BOOL)
    report = compare(g, g.attend(g.op("Where", shown, scores, number)), m=mask)
    twice = mask.shape[-2] > 1 or mask.ndim == 3
    assert [bool(each.notes) for each in report.fused] == [twice]  # keys stand there twice


@pytest.mark.parametrize("outer", [-1e9, -np.inf])
def test_such_a_number_among_biases_and_other_masks(outer):
    """The number is what a query without keys compares with the biases that are added behind it."""
    g = Hand()
    scores = g.op("Add", g.op("Mul", g.scores(), g.const(3e3)), g.input("near", [B, 1, S, S]))
    scores = g.op("Where", g.input("m", [B, 1, S, S], TensorProto.BOOL), scores, g.const(-1e3))
    scores = g.op("Add", scores, g.input("bias", [H, 1, S]))
    padded = g.op("Where", g.input("pad", [B, 1, 1, S], TensorProto.BOOL), scores, g.const(outer))
    weights = g.op("Softmax", padded)
    model = g.model(g.op("MatMul", weights, "v"), weights)
    new, report = fused(model)
    feeds = random_feeds(model) | {"m": FILLED, "pad": LEFT_PADDED}
    for want, got in zip(run(model, feeds), run(new, feeds), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
    assert [each.weights for each in report.fused] == [True]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("low", [LOWEST, -1e9])
def test_such_a_number_beside_the_lowest(low, pairs):
    """ONNX Runtime takes the lowest number for -inf; a query that has it only attends to all keys alike."""
    g = Hand()
    whole = g.input("whole", [B, 1, 1, 1], TensorProto.BOOL)
    scores = g.op("Where", whole, g.scores(), g.const(low))
    shape = [B, 1, S if pairs else 1, S]
    scores = g.op("Where", g.input("m", shape, TensorProto.BOOL), scores, g.const(-2.0))
    scores = g.op("Add", scores, g.input("bias", [B, 1, S, S]))
    bias = np.zeros((B, 1, S, S), np.float32)
    bias[1, :, 4] = low
    feeds = {"m": np.ones(shape, bool), "whole": np.array([False, True]).reshape(B, 1, 1, 1), "bias": bias}
    report = compare(g, g.attend(scores), **feeds)
    assert len(report.fused) == 1


def test_below_a_softcap_a_weak_fill_is_strong():
    g = Hand()
    capped = g.op("Mul", g.op("Tanh", g.op("Div", g.scores(), g.const(30.0))), g.const(30.0))
    shown = g.input("m", [2, 1, S, S], TensorProto.BOOL)
    report = compare(g, g.attend(g.op("Where", shown, capped, g.const(-1e4))))
    assert len(report.fused) == 1


def test_a_batch_element_without_keys_in_float16():
    """Its mask is the lowest number everywhere: in the file that gives the mean of V."""
    g = Hand()
    q, k, v = (g.cast(name, TensorProto.FLOAT16) for name in "qkv")
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    ones = g.cast(g.input("m", [2, 1, 1, S], TensorProto.INT64), TensorProto.FLOAT16)
    hidden = g.op("Sub", g.const(1.0, np.float16), ones)
    scores = g.op("Add", scores, g.op("Mul", hidden, g.const(-65504.0, np.float16)))
    model = g.model(g.cast(g.op("MatMul", g.op("Softmax", scores), v), TensorProto.FLOAT))
    new, report = fused(model)
    assert (len(report.fused), report.unfused) == (1, ())
    feeds = random_feeds(model) | {"m": np.arange(2).reshape(2, 1, 1, 1).repeat(S, -1)}
    # For the file, ONNX Runtime on x86-64 gives what there is without a mask: it does not round the sum.
    want = onnx.reference.ReferenceEvaluator(model).run(None, feeds)[0]
    np.testing.assert_allclose(run(new, feeds)[0], want, atol=5e-3)


@pytest.mark.parametrize("spelled", ["input", "computed", "table"])
def test_a_query_whose_mask_is_the_lowest_number_everywhere(spelled):
    """ONNX Runtime takes the lowest number for -inf in Attention; in the file it gives the mean of V."""
    g = Hand()
    numbers = np.where(np.random.default_rng(0).random((2, 1, S, S)) < 0.4, LOWEST, 0.0).astype(np.float32)
    numbers[:, :, 2] = LOWEST
    if spelled == "computed":
        shown = g.op("Sub", g.const(1.0), g.input("mask", [2, 1, S, S]))
        mask, feeds = g.op("Mul", shown, g.const(LOWEST)), {"mask": (numbers == 0).astype(np.float32)}
    elif spelled == "table":
        mask, feeds = g.const(numbers), {}
    else:
        mask, feeds = g.input("mask", [2, 1, S, S]), {"mask": numbers}
    report = compare(g, g.attend(g.op("Add", g.scores(), mask)), **feeds)
    assert len(report.fused) == 1


def only_nan(g, weights):
    return g.op("Where", g.op("IsNaN", weights), g.const(0.0), weights)


def nan_to_num(g, weights, number=1e9):
    """As PyTorch's exporters write it: infinite weights would be replaced as well."""
    infinite, result = g.op("IsInf", weights), only_nan(g, weights)
    for op_type, fill in (("Less", -number), ("Greater", number)):
        signed = g.op("And", g.op(op_type, weights, g.const(0.0)), infinite)
        result = g.op("Where", signed, g.const(fill), result)
    return result


@pytest.mark.parametrize("guard", [only_nan, nan_to_num])
@pytest.mark.parametrize("number", [-np.inf, LOWEST])
def test_a_guard_against_nan(number, guard):
    """The result is that of the file, for fully masked queries too; what NaN would become is noted."""
    g = Hand()
    shown = np.random.default_rng(0).random((2, 1, S, S)) < 0.6
    shown[:, :, 2] = False
    mask = g.op("Where", g.input("m", [2, 1, S, S], TensorProto.BOOL), g.const(0.0), g.const(number))
    weights = guard(g, g.op("Softmax", g.op("Add", g.scores(), mask)))
    report = compare(g, g.op("MatMul", weights, "v"), m=shown)
    assert any("NaN" in note for note in report.fused[0].notes)


def test_a_guard_that_replaces_visible_weights_stays():
    g = Hand()
    weights = g.op("Softmax", g.scores())
    large = g.op("And", g.op("Greater", weights, g.const(0.5)), g.op("Not", g.op("IsInf", weights)))
    result = g.op("MatMul", g.op("Where", large, g.const(0.5), only_nan(g, weights)), "v")
    _, report = fused(g.model(result))
    assert [left.reason[:12] for left in report.unfused] == ["Where stands"]


@pytest.mark.parametrize("mask_batch", [1, 3])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("queries", [1, 4])
def test_a_mask_larger_than_q_at_run_time(batch, mask_batch, queries):
    g = Hand(shape=("B", H, "S", 8))
    g.input("k", ["B", H, "T", 8])
    g.input("v", ["B", H, "T", 8])
    mask = g.input("m", ["N", 1, "M", "T"], TensorProto.BOOL)
    model = g.model(g.attend(g.op("Where", mask, g.scores(), g.const(-1e9))))
    new, report = fused(model)
    assert len(report.fused) == 1
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal((batch, H, 5, 8)).astype(np.float32) for name in "kv"}
    feeds["q"] = random.standard_normal((batch, H, queries, 8)).astype(np.float32)
    feeds["m"] = random.random((mask_batch, 1, 4, 5)) < 0.6
    np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)


BATCHES = [
    (("B", 1, 1), (3, 1, 1)),
    ((1, "B", "B"), (1, 3, 3)),
    (("B", "C", "E"), (1, 1, 3)),
    (("B", "C", "E"), (3, 3, 3)),
    ((None, None, None), (3, 1, 1)),
    ((None, None, None), (1, 3, 3)),
]


@pytest.mark.parametrize(("shapes", "feed"), BATCHES)
def test_batches_that_may_differ_at_run_time(shapes, feed):
    g, random, feeds = Hand(), np.random.default_rng(0), {}
    for name, size, given in zip("qkv", shapes, feed, strict=True):
        g.input(name, [size, H, None, 8])
        feeds[name] = random.standard_normal((given, H, 5, 8)).astype(np.float32)
    model = g.model(g.attend(g.scores()))
    new, report = fused(model)
    assert len(report.fused) == 1
    np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)


@pytest.mark.parametrize("where", ["output", "used", "transposed"])
def test_weights_beside_the_result(where):
    g = Hand()
    shown = g.input("m", [2, 1, S, S], TensorProto.BOOL)
    weights = g.op("Softmax", g.op("Where", shown, g.scores(), g.const(-1e9)))
    others = g.op("Transpose", weights, perm=[0, 2, 1, 3]) if where == "transposed" else weights
    if where == "used":
        others = g.op("ReduceSum", weights, g.ints(2), keepdims=1)
    report = check_same(g.model(g.op("MatMul", weights, "v"), others))
    assert [each.weights for each in report.fused] == [True]


def test_a_bias_over_a_fill():
    """In a fully masked query the bias decides."""
    g = Hand()
    padded = g.op("Where", g.input("m", [2, 1, S, S], TensorProto.BOOL), g.scores(), g.const(-1e9))
    biased = g.op("Add", padded, g.const(np.random.default_rng(0).standard_normal((1, H, S, S)) * 1000))
    shown = np.ones((2, 1, S, S), bool)
    shown[0, 0, 2], shown[1, 0, :, 0] = False, False
    report = compare(g, g.attend(biased), m=shown)
    assert len(report.fused) == 1


@pytest.mark.parametrize("where", ["scores", "query"])
def test_the_scale_of_float64_is_exact(where):
    """The attribute is a float32, which 1/3 is not."""
    g = Hand()
    g.inputs = {name: (TensorProto.DOUBLE, (2, H, S, 8)) for name in "qkv"}
    third = g.const(1 / 3, np.float64)
    q = g.op("Mul", "q", third) if where == "query" else "q"
    scores = g.op("MatMul", q, g.op("Transpose", "k", perm=[0, 1, 3, 2]))
    y = g.attend(g.op("Mul", scores, third) if where == "scores" else scores)
    model = g.model(g.cast(g.op("Sub", y, g.op("Identity", y)), TensorProto.FLOAT))
    model.graph.output.append(onnx.helper.make_tensor_value_info(y, TensorProto.DOUBLE, None))
    new, report = fused(model)
    assert [each.scale for each in report.fused] == [pytest.approx(1 / 3, abs=1e-15)]
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal((2, H, S, 8)) for name in "qkv"}
    want, got = (onnx.reference.ReferenceEvaluator(each).run(None, feeds)[1] for each in (model, new))
    np.testing.assert_allclose(got, want, atol=1e-14)


def test_an_attention_node_with_a_mask_of_fewer_keys_stays():
    """ONNX masks the keys that the mask lacks."""
    g = Hand()
    mask = g.input("m", [S, S - 2], TensorProto.BOOL)
    model = g.model(g.op("Attention", "q", "k", "v", mask))
    new, report = fused(model)
    assert (len(report.already), report.repairs) == (1, ())
    assert [node.op_type for node in new.graph.node] == [node.op_type for node in model.graph.node]


def test_an_attention_node_whose_fully_masked_queries_need_another_q_stays():
    """In float16 no boolean mask alone gives the mean of V; nothing is drawn that would show it."""
    g = Hand()
    q, k, v = (g.cast(name, TensorProto.FLOAT16) for name in "qkv")
    numbers = (g.const(0.0, np.float16), g.const(-65504.0, np.float16))
    mask = g.op("Where", g.input("m", [2, 1, S, S], TensorProto.BOOL), *numbers)
    model = g.model(g.cast(g.op("Attention", q, k, v, mask), TensorProto.FLOAT))
    new, report = md.fuse(model, verify=False)
    assert (len(report.already), report.repairs) == (1, ())
    feeds = random_feeds(model) | {"m": np.zeros((2, 1, S, S), bool)}
    want, got = (onnx.reference.ReferenceEvaluator(each).run(None, feeds)[0] for each in (model, new))
    np.testing.assert_array_equal(got, want)


def test_a_wrong_repair_of_an_attention_node_is_left(monkeypatch):
    """A mask that is taken for the causal triangle, and is none."""
    monkeypatch.setattr(mask_pattern, "triangle_of", lambda value: mask_pattern.Triangle(1.0, 0.0))
    g = Hand()
    model = g.model(g.op("Attention", "q", "k", "v", g.input("m", [2, 1, S, S], TensorProto.BOOL)))
    new, report = fused(model)
    assert [
        ("left as it was" in change, len(report.already))
        for each in report.repairs
        for change in each.changes
    ] == [(True, 1)]
    assert [len(node.input) for node in new.graph.node if node.op_type == "Attention"] == [4]


def test_an_einsum_that_sums_over_an_axis_of_one_operand_stays():
    g = Hand()
    g.input("k", [2, H, S, 8, 3])
    report = check_same(g.model(g.attend(g.op("Einsum", "q", "k", equation="bhsd,bhtde->bhst"))))
    assert (len(report.fused), len(report.unfused)) == (0, 1)


# -- what drawn inputs must not refuse ---------------------------------------------------------------


@pytest.mark.parametrize("put", [False, True])
def test_scores_in_float32_beside_values_in_float16(put):
    """As in GPT-J: float16's lowest number is added in float32, where a score is more than its rounding."""
    g = Hand()
    q, k, v = (g.cast(name, TensorProto.FLOAT16) for name in "qkv")
    wide = [g.cast(each, TensorProto.FLOAT) for each in (q, k)]
    scores = g.op("MatMul", wide[0], g.op("Transpose", wide[1], perm=[0, 1, 3, 2]))
    if put:
        scores = g.op("Where", g.const(LOWER, bool), scores, g.const(LOWEST))
    lowest = g.const(-65504.0, np.float16)
    padding = g.op("Where", g.input("m", [2, 1, 1, S], TensorProto.BOOL), g.const(0.0, np.float16), lowest)
    weights = g.op("Softmax", g.op("Add", scores, g.cast(padding, TensorProto.FLOAT)))
    result = g.cast(g.op("MatMul", g.cast(weights, TensorProto.FLOAT16), v), TensorProto.FLOAT)
    model = g.model(result)
    new, report = fused(model)
    assert (len(report.fused), report.unfused) == (1, ())
    for mask in (LEFT_PADDED, np.zeros_like(LEFT_PADDED)):
        feeds = random_feeds(model) | {"m": mask}
        want, got = (onnx.reference.ReferenceEvaluator(each).run(None, feeds)[0] for each in (model, new))
        np.testing.assert_allclose(got, want, atol=5e-3)


def test_scores_of_positions_are_a_bias():
    """As in XLNet: a second matmul is shifted, added and scaled; it holds no number that hides a key."""
    g = Hand()
    q, k, v = (g.cast(name, TensorProto.FLOAT16) for name in "qkv")
    content = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    table = g.cast(g.input("r", [2, H, D, S + 1]), TensorProto.FLOAT16)
    position = g.op("Gather", g.op("MatMul", q, table), g.ints(*range(S)), axis=3)
    scaled = g.op("Mul", g.op("Add", content, position), g.const(0.25, np.float16))
    hidden = g.op(
        "Mul", g.cast(g.input("m", [2, 1, S, S], TensorProto.BOOL), 10), g.const(65504.0, np.float16)
    )
    result = g.op("MatMul", g.op("Softmax", g.op("Sub", scaled, hidden)), v)
    _, report = fused(g.model(g.cast(result, TensorProto.FLOAT)))
    assert (len(report.fused), report.unfused) == (1, ())


@pytest.mark.parametrize("first", [True, False])
def test_a_second_matmul_that_is_added_is_a_bias(first):
    """As in relative attention: queries by a table of positions, beside queries by keys."""
    g = Hand()
    parts = [g.scores(), g.op("Einsum", "q", g.input("r", [S, S, D]), equation="bhsd,std->bhst")]
    scores = g.op("Add", *(parts if first else parts[::-1]))
    report = check_same(g.model(g.attend(g.op("Mul", scores, g.const(0.3)))))
    assert (len(report.fused), report.unfused) == (1, ())


def test_a_length_that_a_convolution_leaves():
    g = Hand(shape=(2, H, "(L - 5)//8", D))
    mask = g.op("Add", g.scores(), g.input("bias", [2, 1, "(L - 5)//8", "(L - 5)//8"]))
    _, report = fused(g.model(g.attend(mask)))
    assert (len(report.fused), report.unfused) == (1, ())


def test_initializers_that_are_inputs_as_well():
    """Old exporters list every initializer as an input, the axes of an Unsqueeze too."""
    g = Hand()
    bias = g.op("Unsqueeze", g.input("m", [2, S]), g.ints(1, 2))
    model = g.model(g.attend(g.op("Add", g.scores(), bias)))
    defaults = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    for name, numbers in defaults.items():
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, numbers.shape))
    new, report = fused(model)
    assert (len(report.fused), report.unfused) == (1, ())
    feeds = random_feeds(model) | defaults
    np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)


def test_a_file_that_cannot_be_run_is_quoted():
    g = Hand(shape=(2, H, "S", D))
    nothing = g.op("Range", g.const(0.5), g.const(0.5), g.const(0.5))
    _, report = fused(g.model(g.attend(g.op("Add", g.scores(), nothing))))
    assert report.fused == ()
    assert "ValueError: Unable to multiply shapes" in report.unfused[0].reason


def test_a_mask_is_compared_over_keys_whose_number_is_a_sum(monkeypatch):
    """The mask has a length of its own name. At length 1, which every file takes, it says nothing of keys."""
    right = mask_pattern.Bias.scaled

    def wrong(self, builder, dtype):
        return builder.op("ReduceMax", right(self, builder, dtype), builder.ints(-1), keepdims=1)

    monkeypatch.setattr(mask_pattern.Bias, "scaled", wrong)
    g = Hand(shape=("B", H, "S", D))
    past = [g.input(name, ["B", H, "P", D]) for name in ("past_k", "past_v")]
    k, v = (g.op("Concat", *pair, axis=2) for pair in zip(past, "kv", strict=True))
    scores = g.op("MatMul", "q", g.op("Transpose", k, perm=[0, 1, 3, 2]))
    weights = g.op("Softmax", g.op("Add", scores, g.input("m", ["B", 1, 1, "T"])))
    _, report = fused(g.model(g.op("MatMul", weights, v)))
    assert ["does not compute the same" in left.reason for left in report.unfused] == [True]
