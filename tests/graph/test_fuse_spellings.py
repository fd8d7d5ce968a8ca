"""Other spellings of one attention: each is one node, and computes the same as the file."""

import numpy as np
import onnx_ir as ir
import pytest
from hand_graphs import D, H, Hand, S, check_same, fused, random_feeds, run
from onnx import TensorProto, helper

import mha_deploy as md

BOOL, FLOAT, HALF = TensorProto.BOOL, TensorProto.FLOAT, TensorProto.FLOAT16
B = 2


def keep(g):
    """A boolean mask of the keys."""
    return g.input("keep", (B, 1, 1, S), BOOL)


def ones(g):
    return g.cast(keep(g), FLOAT)


def hidden(g, number=-1e9):
    """What is added to masked scores."""
    return g.op("Mul", g.op("Sub", g.const(1.0), ones(g)), g.const(number))


def total(g, powers):
    return g.op("ReduceSum", powers, g.ints(-1), keepdims=1)


def over_sum(g, powers):
    return g.op("Div", powers, total(g, powers))


def blended(g):
    return g.attend(g.op("Add", g.op("Mul", g.scores(), ones(g)), hidden(g)))


def blended_by_difference(g):
    far = g.op("Mul", g.const(1e9), g.op("Sub", g.const(1.0), ones(g)))
    return g.attend(g.op("Sub", g.op("Mul", ones(g), g.scores()), far))


def blended_with_a_buffer(g):
    buffer = np.tri(S, dtype=np.float32)
    scores = g.op("Mul", g.scores(), g.const(buffer))
    return g.attend(
        g.op("Sub", scores, g.op("Mul", g.op("Sub", g.const(1.0), g.const(buffer)), g.const(1e9)))
    )


def bounded(g):
    limit = g.op("Where", keep(g), g.const(np.inf), g.const(-np.inf))
    return g.attend(g.op("Min", limit, g.scores()))


def bounded_by_a_buffer(g):
    return g.attend(g.op("Min", g.scores(), g.const(np.where(np.tri(S), np.finfo(np.float32).max, -1e30))))


def bounded_by_large_numbers(g):
    limit = g.op("Where", keep(g), g.const(3e38), g.const(-3e38))
    return g.attend(g.op("Min", g.scores(), limit))


def padded_with_a_zero(g):
    """A softmax with one more in its denominator."""
    weights = g.op("Softmax", g.op("Pad", g.scores(), g.ints(0, 0, 0, 1, 0, 0, 0, 0)), axis=-1)
    own = g.op("Slice", weights, g.ints(1), g.ints(2**31 - 1), g.ints(-1))
    return g.op("MatMul", own, "v")


def over_a_power(g):
    powers = g.op("Exp", g.scores())
    inverse = g.op("Pow", total(g, powers), g.const(-1.0))
    return g.op("MatMul", g.op("Mul", powers, inverse), "v")


def several_added(g):
    return g.attend(g.op("Sum", g.input("bias", (S, S)), g.scores(), hidden(g)))


def split_from_a_sink(g):
    sink = g.input("sink", (B, H, S, 1))
    both = g.op("Softmax", g.op("Concat", g.scores(), sink, axis=-1), axis=-1)
    own = g.op("Split", both, g.ints(S, 1), axis=3)
    g.nodes[-1].output.append("rest")
    return g.op("MatMul", own, "v")


def divided_behind(g):
    powers = g.op("Exp", g.scores())
    return g.op("Div", g.op("MatMul", powers, "v"), total(g, powers))


def masked_powers(g):
    return g.op("MatMul", over_sum(g, g.op("Mul", g.op("Exp", g.scores()), ones(g))), "v")


def masked_powers_divided_behind(g):
    powers = g.op("Where", keep(g), g.op("Exp", g.scores()), g.const(0.0))
    inverse = g.op("Reciprocal", total(g, powers))
    return g.op("Mul", inverse, g.op("MatMul", powers, "v"))


def renormalised(g):
    return g.op("MatMul", over_sum(g, g.op("Mul", g.op("Softmax", g.scores()), ones(g))), "v")


def masked_behind(g):
    scores = g.op("Where", keep(g), g.scores(), g.const(-1e9))
    return g.op("MatMul", g.op("Where", keep(g), g.op("Softmax", scores), g.const(0.0)), "v")


def masked_behind_a_number_near_to_scores(g):
    scores = g.op("Where", keep(g), g.scores(), g.const(-1e4))
    return g.op("MatMul", g.op("Where", keep(g), g.op("Softmax", scores), g.const(0.0)), "v")


def masked_behind_a_number_among_scores(g):
    """Hidden keys of each query count in its sum."""
    hidden = g.input("hidden", (B, 1, S, S), BOOL)
    scores = g.op("Where", hidden, g.const(-0.5), g.op("Mul", g.scores(), g.const(0.3)))
    return g.op("MatMul", g.op("Where", hidden, g.const(0.0), g.op("Softmax", scores)), "v")


def multiplied_behind(g):
    weights = g.op("Softmax", g.op("Add", g.scores(), hidden(g)))
    return g.op("MatMul", g.op("Mul", weights, ones(g)), "v")


def zeroed_where_nothing_is_shown(g):
    scores = g.op("Where", keep(g), g.scores(), g.const(-np.inf))
    some = g.op("Greater", g.op("ReduceMax", ones(g), g.ints(-1)), g.const(0.5))
    return g.op("MatMul", g.op("Where", some, g.op("Softmax", scores), g.const(0.0)), "v")


def divided_behind_an_einsum(g):
    powers = g.op("Exp", g.scores())
    sums = g.op("Unsqueeze", g.op("ReduceSum", powers, g.ints(3), keepdims=0), g.ints(-1))
    return g.op("Div", g.op("Einsum", powers, "v", equation="bhst,bhtd->bhsd"), sums)


def learned_keys_and_values(g):
    random = np.random.default_rng(0)
    keys, values = (g.const(random.standard_normal(shape)) for shape in ((H, D, 5), (H, 5, D)))
    return g.op("MatMul", g.op("Softmax", g.op("MatMul", "q", keys)), values)


def filled_with_a_tensor(g):
    scores = g.scores()
    numbers = g.op("ConstantOfShape", g.op("Shape", scores), value=onnx_tensor(-1e9))
    return g.attend(g.op("Where", keep(g), scores, numbers))


def less_log_of_sum(g):
    scores = g.scores()
    return g.op("MatMul", g.op("Exp", g.op("Sub", scores, g.op("ReduceLogSumExp", scores, g.ints(-1)))), "v")


def less_log_of_written_sum(g):
    scores = g.scores()
    scores = g.op("Sub", scores, g.op("ReduceMax", scores, g.ints(-1)))
    logarithm = g.op("Log", total(g, g.op("Exp", scores)))
    return g.op("MatMul", g.op("Exp", g.op("Sub", scores, logarithm)), "v")


def powers_of_two(g):
    scores = g.scores()
    scores = g.op("Sub", scores, g.op("ReduceMax", scores, g.ints(-1)))
    return g.op("MatMul", over_sum(g, g.op("Pow", g.const(2.0), scores)), "v")


def sums_of_products(g):
    queries, keys = g.op("Unsqueeze", "q", g.ints(3)), g.op("Unsqueeze", "k", g.ints(2))
    weights = g.op("Softmax", g.op("ReduceSum", g.op("Mul", queries, keys), g.ints(-1), keepdims=0))
    products = g.op("Mul", g.op("Unsqueeze", weights, g.ints(-1)), g.op("Unsqueeze", "v", g.ints(2)))
    return g.op("ReduceSum", products, g.ints(3), keepdims=0)


def blended_with_a_product_of_masks(g):
    rows = g.cast(g.input("rows", (B, 1, S, 1), BOOL), FLOAT)
    both = g.op("Mul", rows, ones(g))
    far = g.op("Mul", g.op("Sub", g.const(1.0), both), g.const(-1e9))
    return g.attend(g.op("Add", g.op("Mul", g.scores(), both), far))


def halved(g):
    return g.op(
        "Einsum", g.op("Mul", g.op("Softmax", g.scores()), g.const(0.5)), "v", equation="bhst,bhte->bhse"
    )


def less_an_input_of_queries(g):
    return g.attend(g.op("Sub", g.scores(), g.input("shift", (B, H, S, 1))))


def less_mean(g):
    scores = g.scores()
    return g.attend(g.op("Sub", scores, g.op("ReduceMean", scores, g.ints(-1))))


def maximum_less_scores(g):
    """Copied to the shape of the scores, as `expand_as` does."""
    scores = g.scores()
    highest = g.op("Expand", g.op("ReduceMax", scores, g.ints(-1)), g.op("Shape", scores))
    return g.attend(g.op("Sub", highest, scores))


def capped_with_a_sign(g):
    bound = g.op("Tanh", g.op("Mul", g.scores(), g.const(-0.1)))
    return g.attend(g.op("Mul", bound, g.const(-3.0)))


def masked_behind_beside_shifted_positions(g):
    """Scores of positions, shifted by one column for every row."""
    own = g.op("MatMul", "q", g.op("Transpose", g.input("table", (B, H, S, D)), perm=[0, 1, 3, 2]))
    zeros = g.op("ConstantOfShape", g.ints(B, H, S, 1), value=onnx_tensor(0.0))
    wide = g.op("Reshape", g.op("Concat", zeros, own, axis=-1), g.ints(B, H, S + 1, S))
    own = g.op("Reshape", g.op("Slice", wide, g.ints(1), g.ints(S + 1), g.ints(2)), g.ints(B, H, S, S))
    scores = g.op("Where", keep(g), g.op("Add", g.scores(), own), g.const(np.finfo(np.float32).min))
    return g.op("MatMul", g.op("Where", keep(g), g.op("Softmax", scores), g.const(0.0)), "v")


def masked_behind_beside_positions(g):
    """Two matmuls with tables of positions are added to the scores, and weights are masked once more."""
    table = g.input("table", (B, H, S, D))
    own = g.op("MatMul", "q", g.op("Transpose", table, perm=[0, 1, 3, 2]))
    other = g.op(
        "Transpose", g.op("MatMul", "k", g.op("Transpose", table, perm=[0, 1, 3, 2])), perm=[0, 1, 3, 2]
    )
    scores = g.op("Add", g.scores(), g.op("Add", own, g.op("Div", other, g.const(3.0))))
    scores = g.op("Where", keep(g), scores, g.const(np.finfo(np.float32).min))
    return g.op("MatMul", g.op("Where", keep(g), g.op("Softmax", scores), g.const(0.0)), "v")


def less_a_bounded_maximum(g):
    """As JAX writes a softmax: without the axis of the keys, and never -inf."""
    scores = g.scores()
    highest = g.op("Max", g.op("ReduceMax", scores, g.ints(-1), keepdims=0), g.const(-np.inf))
    powers = g.op("Exp", g.op("Sub", scores, g.op("Unsqueeze", highest, g.ints(3))))
    sums = g.op("ReduceSum", powers, g.ints(-1), keepdims=0)
    return g.op("MatMul", g.op("Div", powers, g.op("Unsqueeze", sums, g.ints(3))), "v")


def less_a_finite_maximum(g):
    scores = g.op("Where", keep(g), g.scores(), g.const(-np.inf))
    highest = g.op("ReduceMax", scores, g.ints(-1), keepdims=1)
    highest = g.op("Where", g.op("IsInf", highest), g.const(0.0), highest)
    return g.attend(g.op("Sub", scores, highest))


def less_a_logarithm_by_hand(g):
    scores = g.scores()
    highest = g.op("ReduceMax", scores, g.ints(-1), keepdims=1)
    logarithm = g.op("Log", total(g, g.op("Exp", g.op("Sub", scores, highest))))
    return g.op("MatMul", g.op("Exp", g.op("Sub", scores, g.op("Add", highest, logarithm))), "v")


def shifted(g):
    """Powers of which the largest is 1."""
    scores = g.scores()
    return g.op("Exp", g.op("Sub", scores, g.op("ReduceMax", scores, g.ints(-1), keepdims=1)))


def over_a_bounded_sum(g):
    powers = shifted(g)
    return g.op("MatMul", g.op("Div", powers, g.op("Clip", total(g, powers), g.const(1e-9))), "v")


def over_a_sum_and_nearly_nothing(g):
    powers = shifted(g)
    return g.op("Div", g.op("MatMul", powers, "v"), g.op("Add", total(g, powers), g.const(1e-9)))


def over_one_more(g):
    """`exp(s) / (1 + sum(exp(s)))`."""
    powers = g.op("Exp", g.scores())
    return g.op("MatMul", g.op("Div", powers, g.op("Add", g.const(1.0), total(g, powers))), "v")


def over_one_more_and_less_a_maximum(g):
    scores = g.scores()
    highest = g.op("Max", g.op("ReduceMax", scores, g.ints(-1), keepdims=1), g.const(0.0))
    powers = g.op("Exp", g.op("Sub", scores, highest))
    sums = g.op("Add", total(g, powers), g.op("Exp", g.op("Neg", highest)))
    return g.op("MatMul", g.op("Div", powers, sums), "v")


def squared_weights(g):
    return g.op("MatMul", over_sum(g, g.op("Pow", g.op("Softmax", g.scores()), g.const(2.0))), "v")


def powers_times_gates(g):
    gates = g.op("Sigmoid", g.input("gates", (B, 1, 1, S)))
    return g.op("MatMul", over_sum(g, g.op("Mul", g.op("Exp", g.scores()), gates)), "v")


def over_the_norm(g):
    return g.op("MatMul", g.op("LpNormalization", g.op("Exp", g.scores()), p=1, axis=-1), "v")


def capped_by_a_sigmoid(g):
    twice = g.op("Mul", g.op("Sigmoid", g.op("Mul", g.scores(), g.const(0.2))), g.const(2.0))
    return g.attend(g.op("Mul", g.op("Sub", twice, g.const(1.0)), g.const(10.0)))


def triangle_of_powers(g):
    return g.op("MatMul", over_sum(g, g.op("Trilu", shifted(g), upper=0)), "v")


def triangle_of_weights(g):
    return g.op("MatMul", over_sum(g, g.op("Trilu", g.op("Softmax", g.scores()), upper=0)), "v")


def a_bias_beside_a_mask_that_rounds_scores(g):
    """Of a fully masked query, scores near -10000 are rounded, in the file in another order."""
    scores = g.op("Div", g.scores(), g.const(2.5))
    return g.attend(g.op("Add", g.op("Add", scores, g.input("bias", (S, S))), hidden(g, -1e4)))


def temperature(g):
    return g.input("temperature", (1,))


def tempered_behind_a_bias(g):
    return g.attend(g.op("Mul", g.op("Add", g.scores(), g.input("bias", (S, S))), temperature(g)))


def tempered_behind_a_fill(g):
    scores = g.op("Where", keep(g), g.scores(), g.const(-1e9))
    return g.attend(g.op("Mul", scores, g.op("Exp", temperature(g))))


def tempered_behind_a_fill_of_learned_heads(g):
    scores = g.op("Where", keep(g), g.scores(), g.const(-np.inf))
    return g.attend(g.op("Div", scores, g.const(np.linspace(0.5, 2, H).reshape(H, 1, 1))))


def triangle_of_ones(g):
    size = g.op("Gather", g.op("Shape", "q"), g.ints(2, 2))
    square = g.op("ConstantOfShape", size, value=onnx_tensor(1.0))
    lower = g.op("Trilu", square, upper=0)
    return g.attend(g.op("Where", g.op("Equal", lower, g.const(0.0)), g.const(-np.inf), g.scores()))


def blended_with_a_triangle(g):
    size = g.op("Gather", g.op("Shape", "q"), g.ints(2, 2))
    lower = g.op("Trilu", g.op("ConstantOfShape", size, value=onnx_tensor(1.0)), upper=0)
    lower = g.op("Unsqueeze", lower, g.ints(0, 1))
    far = g.op("Mul", g.op("Sub", g.const(1.0), lower), g.const(-1e9))
    return g.attend(g.op("Add", g.op("Mul", g.scores(), lower), far))


def onnx_tensor(number):
    return ir.serde.serialize_tensor(ir.tensor(np.array([number], np.float32)))


def filled_with_a_constant_of_all_scores(g):
    return g.attend(g.op("Where", keep(g), g.scores(), g.const(np.full((B, H, S, S), -1e9))))


def filled_with_zeros_like_the_scores(g):
    """And the weights are multiplied by the mask, which is cast there and back for the scores."""
    scores = g.scores()
    far = g.op("Mul", g.op("Add", g.op("Mul", scores, g.const(0.0)), g.const(1.0)), g.const(-1e18))
    weights = g.op("Softmax", g.op("Where", g.cast(ones(g), BOOL), scores, far))
    return g.op("MatMul", g.op("Mul", weights, ones(g)), "v")


def blended_with_numbers_of_keys(g):
    mask = g.input("mask", (B, 1, 1, S))
    far = g.op("Mul", g.op("Sub", g.const(1.0), mask), g.const(-10.0))
    return g.attend(g.op("Add", g.op("Mul", g.scores(), mask), far))


def softmax_of_logarithms(g):
    return g.attend(g.op("LogSoftmax", g.op("Add", g.scores(), hidden(g)), axis=-1))


def flattened(g):
    weights = g.op("Softmax", g.op("Flatten", g.scores(), axis=3), axis=1)
    return g.op("MatMul", g.op("Reshape", weights, g.ints(B, H, S, S)), "v")


def tempered_keys(g):
    scores = g.op("Mul", g.op("Add", g.scores(), g.input("bias", (S, S))), g.input("factors", (B, H, 1, S)))
    return g.attend(scores)


def over_a_copied_sum(g):
    powers = shifted(g)
    return g.op("MatMul", g.op("Div", powers, g.op("Expand", total(g, powers), g.ints(B, H, S, S))), "v")


def over_a_sum_by_ones(g):
    """Of powers that something else uses, too."""
    powers = shifted(g)
    g.op("Identity", powers)
    sums = g.op("MatMul", powers, g.const(np.ones((S, 1))))
    return g.op("Div", g.op("MatMul", powers, "v"), sums)


def over_a_sum_of_squares(g):
    powers = g.op("Exp", g.op("Mul", g.scores(), g.const(0.25)))
    inverse = g.op("Reciprocal", g.op("ReduceSumSquare", powers, g.ints(-1)))
    return g.op("MatMul", g.op("Mul", g.op("Mul", powers, powers), inverse), "v")


def less_reduced_logarithm(g):
    scores = g.scores()
    scores = g.op("Sub", scores, g.op("ReduceMax", scores, g.ints(-1)))
    logarithm = g.op("ReduceLogSum", g.op("Exp", scores), g.ints(-1))
    return g.op("MatMul", g.op("Exp", g.op("Sub", scores, logarithm)), "v")


def divided_behind_moves(g, *, turned=True):
    """Heads of `[B, S, H, D]` over sums of `[B, S, H, 1]`, from `[B, H, S, 1]`; a projection between."""
    powers, weight = shifted(g), g.const(np.random.default_rng(0).standard_normal((D, D)))
    y = g.op("MatMul", g.op("Transpose", g.op("MatMul", powers, "v"), perm=[0, 2, 1, 3]), weight)
    if turned:
        return g.op("Div", y, g.op("Transpose", total(g, powers), perm=[0, 2, 1, 3]))
    return g.op("Div", y, g.op("Reshape", total(g, powers), g.ints(B, S, H, 1)))


def over_sums_without_their_axis(g, *, turned=True):
    """Sums of `[B, H, S]` that are moved to `[B, S, H, 1]`."""
    powers = g.op("Where", keep(g), shifted(g), g.const(0.0))
    y = g.op("Einsum", powers, "v", equation="bhst,bhtd->bshd")
    sums = g.op("ReduceSum", powers, g.ints(-1), keepdims=0)
    sums = g.op("Transpose", sums, perm=[0, 2, 1]) if turned else g.op("Reshape", sums, g.ints(B, S, H))
    return g.op("Div", y, g.op("Unsqueeze", sums, g.ints(-1)))


def moved_axes_of_one(g):
    """As PyTorch writes an einsum of fixed sizes."""
    apart = g.op("Transpose", g.op("Reshape", g.scores(), g.ints(B, H, S, 1, S)), perm=[0, 1, 2, 4, 3])
    weights = g.op("Softmax", g.op("Reshape", apart, g.ints(B, H, S, S)))
    weights = g.op("Reshape", g.op("Unsqueeze", weights, g.ints(4)), g.ints(B, H, S, S))
    return g.op("MatMul", weights, "v")


def queries_without_weights(g):
    """A factor of queries that was copied to all keys."""
    factors = g.op("Tile", g.input("factors", (B, H, S, 1)), g.ints(1, 1, 1, S))
    return g.op("MatMul", g.op("Mul", g.op("Softmax", g.scores()), factors), "v")


def parts_of_keys(g):
    """The scores of a past, and those of the present, and the values of both apart."""
    bounds = (g.ints(0), g.ints(2)), (g.ints(2), g.ints(S))
    k, v = ([g.op("Slice", name, *each, g.ints(2)) for each in bounds] for name in "kv")
    bias = [g.op("Slice", g.input("bias", (1, 1, S, S)), *each, g.ints(3)) for each in bounds]
    scores = [g.op("MatMul", "q", g.op("Transpose", each, perm=[0, 1, 3, 2])) for each in k]
    scores = [
        g.op("Add", g.op("Mul", one, g.const(0.5)), other) for one, other in zip(scores, bias, strict=True)
    ]
    weights = g.op("Softmax", g.op("Concat", *scores, axis=-1))
    own = [
        g.op("Slice", weights, *each, g.ints(3))
        for each in ((g.ints(0), g.ints(2)), (g.ints(2), g.ints(2**63 - 1)))
    ]
    return g.op("Add", *(g.op("MatMul", one, other) for one, other in zip(own, v, strict=True)))


def parts_of_which_one_is_masked(g, mask):
    """The scores of a past, which all queries see, and of the present."""
    past = [g.input(name, (B, H, 3, D)) for name in ("past_k", "past_v")]
    keys = [g.op("Transpose", each, perm=[0, 1, 3, 2]) for each in (past[0], "k")]
    scores = [g.op("MatMul", "q", each) for each in keys]
    weights = g.op("Softmax", g.op("Concat", scores[0], mask(scores[1]), axis=-1))
    own = [
        g.op("Slice", weights, g.ints(first), g.ints(last), g.ints(3))
        for first, last in ((0, 3), (3, 2**63 - 1))
    ]
    return g.op("Add", *(g.op("MatMul", *pair) for pair in zip(own, (past[1], "v"), strict=True)))


def parts_with_a_bias_for_one(g):
    return parts_of_which_one_is_masked(g, lambda scores: g.op("Add", scores, g.input("bias", (S, S))))


def parts_with_a_triangle_for_one(g):
    shown = g.const(np.tri(S, dtype=bool)[None, None], bool)
    return parts_of_which_one_is_masked(g, lambda scores: g.op("Where", shown, scores, g.const(-np.inf)))


def parts_with_a_hidden_key_for_one(g):
    below = g.op("Not", keep(g))
    return parts_of_which_one_is_masked(g, lambda scores: g.op("Where", below, g.const(-np.inf), scores))


def steps_that_change_nothing(g):
    scores = g.op("Clip", g.op("Where", g.const(True, bool), g.scores(), g.const(0.0)))
    scores = g.op("Max", g.op("Pow", g.op("Sum", scores), g.const(1.0)), g.const(-np.inf))
    weights = g.op("Sub", g.op("Div", g.op("Softmax", scores), g.const([1.0])), g.const(0.0))
    weights = g.op("Expand", g.op("Mean", g.op("Pad", weights, g.ints(*[0] * 8))), g.ints(B, H, S, S))
    for _ in range(2):
        weights = g.op("Transpose", g.cast(weights, FLOAT), perm=[0, 2, 1, 3])
    return g.op("MatMul", weights, "v")


def less_a_maximum_of_another_shape(g):
    """As JAX adds an axis: by the sizes of the maximum, and 1."""
    scores = g.scores()
    highest = g.op("Max", g.const(-np.inf), g.op("ReduceMax", scores, g.ints(-1), keepdims=0))
    shape = g.op("Concat", g.op("Shape", highest), g.ints(1), axis=0)
    return g.attend(g.op("Sub", scores, g.op("Reshape", highest, shape)))


def bounded_far_out(g):
    """Less the largest score of all, as Grounding DINO has it."""
    scores = g.scores()
    scores = g.op("Sub", scores, g.op("ReduceMax", scores, keepdims=0))
    scores = g.op("Clip", g.op("Clip", scores, g.const(-5e4)), "", g.const(5e4))
    return g.attend(g.op("Where", keep(g), scores, g.const(-np.inf)))


def ones_beside_values(g):
    """The sum of powers is another column of their matmul."""
    shape = g.op("Concat", g.op("Shape", "v", end=-1), g.ints(1), axis=0)
    wide = g.op("Concat", "v", g.op("Expand", g.const(1.0), shape), axis=-1)
    both = g.op("MatMul", g.op("Exp", g.scores()), wide)
    first = g.op("Slice", both, g.ints(0), g.ints(D), g.ints(3))
    return g.op("Div", first, g.op("Slice", both, g.ints(-1), g.ints(2**63 - 1), g.ints(3)))


def over_the_mean(g):
    powers = shifted(g)
    weights = g.op("Div", powers, g.op("ReduceMean", powers, g.ints(-1), keepdims=1))
    return g.op("Div", g.op("MatMul", weights, "v"), g.const(float(S)))


def in_chunks(g):
    """Three chunks of keys, as flash attention has them; the maximum has no axis of the keys."""
    sums = result = highest = g.const(0.0)
    for at in range(3):
        k, v, shown = (
            g.op("Slice", each, g.ints(2 * at), g.ints(2 * at + 2), g.ints(axis))
            for each, axis in (("k", 2), ("v", 2), (keep(g), 3))
        )
        scores = g.op("Mul", g.op("MatMul", "q", g.op("Transpose", k, perm=[0, 1, 3, 2])), g.const(0.4))
        scores = g.op("Where", shown, scores, g.const(-1e9))
        own = g.op("ReduceMax", scores, g.ints(-1), keepdims=0)
        top = g.op("Max", highest, own) if at else own
        powers = g.op("Exp", g.op("Sub", scores, g.op("Unsqueeze", top, g.ints(3))))
        more = g.op("ReduceSum", powers, g.ints(-1), keepdims=0), g.op("MatMul", powers, v)
        if at:
            before = g.op("Exp", g.op("Sub", highest, top))
            sums = g.op("Add", more[0], g.op("Mul", before, sums))
            result = g.op("Add", g.op("Mul", result, g.op("Unsqueeze", before, g.ints(3))), more[1])
        else:
            sums, result = more
        highest = top
    return g.op("Div", result, g.op("Unsqueeze", sums, g.ints(3)))


def weights_times_numbers_of_keys(g):
    numbers = g.input("numbers", (B, 1, 1, S))
    return g.op("MatMul", g.op("Mul", numbers, g.op("Softmax", g.scores())), "v")


def normed_scores(g):
    """A factor and a shift for each head."""
    numbers = [g.const(np.arange(1, H + 1) * each) for each in (0.5, 0.3, 0.1, 0.7)]
    return g.attend(g.op("BatchNormalization", g.scores(), *numbers, epsilon=1e-3))


def powers_times_numbers(g):
    """As far as the file says, the numbers may be negative."""
    numbers = g.op("Add", g.input("numbers", (B, 1, 1, S)), g.const(4.0))
    return g.op("MatMul", over_sum(g, g.op("Mul", g.op("Exp", g.scores()), numbers)), "v")


def powers_times_numbers_divided_behind(g):
    numbers = g.op("Add", g.input("numbers", (S,)), g.const(4.0))
    powers = g.op("Mul", numbers, g.op("Softmax", g.scores()))
    return g.op("Div", g.op("MatMul", powers, "v"), total(g, powers))


def weights_beside_others(g):
    """As of a query that keeps some of its own value."""
    weights = g.op("Mul", g.op("Softmax", g.scores()), g.const(0.7))
    return g.op("MatMul", g.op("Add", weights, g.const(0.3 * np.eye(S))), "v")


def weights_less_their_mean(g):
    """The rest is scaled for each head, and the mean added again."""
    mean, factors = g.const(1 / S), g.const(np.arange(H).reshape(H, 1, 1))
    rest = g.op("Mul", g.op("Sub", g.op("Softmax", g.scores()), mean), factors)
    return g.op("MatMul", g.op("Add", mean, rest), "v")


SPELLINGS = [blended, blended_by_difference, blended_with_a_buffer, bounded, bounded_by_a_buffer]
SPELLINGS += [divided_behind, masked_powers, masked_powers_divided_behind, renormalised, masked_behind]
SPELLINGS += [multiplied_behind, less_log_of_sum, less_log_of_written_sum, less_mean, tempered_behind_a_bias]
SPELLINGS += [zeroed_where_nothing_is_shown, divided_behind_an_einsum, learned_keys_and_values]
SPELLINGS += [filled_with_a_tensor, powers_of_two, sums_of_products, blended_with_a_product_of_masks]
SPELLINGS += [halved, less_an_input_of_queries, bounded_by_large_numbers, padded_with_a_zero]
SPELLINGS += [over_a_power, several_added, split_from_a_sink, maximum_less_scores, capped_with_a_sign]
SPELLINGS += [masked_behind_beside_shifted_positions, a_bias_beside_a_mask_that_rounds_scores]
SPELLINGS += [masked_behind_beside_positions, less_a_bounded_maximum, less_a_finite_maximum]
SPELLINGS += [less_a_logarithm_by_hand, over_a_bounded_sum, over_a_sum_and_nearly_nothing, over_one_more]
SPELLINGS += [over_one_more_and_less_a_maximum, squared_weights, powers_times_gates, over_the_norm]
SPELLINGS += [capped_by_a_sigmoid, triangle_of_powers, triangle_of_weights]
SPELLINGS += [filled_with_a_constant_of_all_scores, softmax_of_logarithms, flattened, tempered_keys]
SPELLINGS += [blended_with_numbers_of_keys, masked_behind_a_number_near_to_scores]
SPELLINGS += [masked_behind_a_number_among_scores, filled_with_zeros_like_the_scores]
SPELLINGS += [over_a_copied_sum, over_a_sum_by_ones, over_a_sum_of_squares, less_reduced_logarithm]
SPELLINGS += [divided_behind_moves, queries_without_weights, parts_of_keys, steps_that_change_nothing]
SPELLINGS += [parts_with_a_bias_for_one, parts_with_a_triangle_for_one, parts_with_a_hidden_key_for_one]
SPELLINGS += [less_a_maximum_of_another_shape, bounded_far_out, ones_beside_values, over_the_mean, in_chunks]
SPELLINGS += [weights_times_numbers_of_keys, normed_scores, powers_times_numbers, weights_beside_others]
SPELLINGS += [powers_times_numbers_divided_behind, weights_less_their_mean]
SPELLINGS += [tempered_behind_a_fill, tempered_behind_a_fill_of_learned_heads, triangle_of_ones]
SPELLINGS += [blended_with_a_triangle, over_sums_without_their_axis, moved_axes_of_one]


@pytest.mark.parametrize("spelled", SPELLINGS, ids=lambda each: each.__name__)
def test_one_node(spelled):
    g = Hand()
    report = check_same(g.model(spelled(g)))
    assert (len(report.fused), report.unfused) == (1, ())
    triangles = (blended_with_a_buffer, bounded_by_a_buffer, triangle_of_ones, blended_with_a_triangle)
    assert report.fused[0].causal == (spelled in (*triangles, triangle_of_powers, triangle_of_weights))


@pytest.mark.parametrize(
    ("op_type", "number"), [("Cast", None), ("Greater", 0.5), ("Equal", 0.0), ("LessOrEqual", 0.5)]
)
def test_a_mask_of_numbers_that_masks_scores_by_a_condition_and_weights_as_a_factor(op_type, number):
    g = Hand()
    mask = g.op("Expand", ones(g), g.ints(B, 1, S, S))
    shown = g.cast(mask, BOOL) if number is None else g.op(op_type, mask, g.const(number))
    pair = [g.scores(), g.const(-1e18)]
    masked = g.op("Where", shown, *(pair if op_type in ("Cast", "Greater") else pair[::-1]))
    model = g.model(g.op("MatMul", g.op("Mul", g.op("Softmax", masked), mask), "v"))
    new, report = fused(model)
    assert (len(report.fused), report.unfused) == (1, ())
    feeds = random_feeds(model)
    feeds["keep"][0] = False  # all keys of one item: the file gives zeros
    np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)


@pytest.mark.parametrize("cut", [False, True])
def test_a_triangle_of_numbers_that_masks_scores_by_a_condition_and_weights_as_a_factor(cut):
    g = Hand((B, H, "S" if cut else S, D))
    mask = g.const(np.tri(9 if cut else S, dtype=np.float32))
    if cut:
        size = g.op("Shape", "q", start=2, end=3)
        mask = g.op("Slice", mask, g.ints(0, 0), g.op("Concat", size, size, axis=0), g.ints(0, 1))
    masked = g.op("Where", g.cast(mask, BOOL), g.scores(), g.const(-1e18))
    report = check_same(g.model(g.op("MatMul", g.op("Mul", g.op("Softmax", masked), mask), "v")))
    assert ([each.causal for each in report.fused], report.unfused) == ([True], ())


def weakly_renormalised(g):
    weights = g.op("Mul", g.op("Softmax", g.scores()), ones(g))
    return g.op("MatMul", g.op("Div", weights, g.op("Add", total(g, weights), g.const(1e-3))), "v")


def not_renormalised(g):
    return g.op("MatMul", g.op("Mul", g.op("Softmax", g.scores()), ones(g)), "v")


def masked_behind_by_another(g):
    scores = g.op("Where", g.input("other", (B, 1, 1, S), BOOL), g.scores(), g.const(-1e9))
    return g.op("MatMul", g.op("Where", keep(g), g.op("Softmax", scores), g.const(0.0)), "v")


def masked_behind_by_numbers(g):
    """Which need not be zeros and ones, nor the same for all queries."""
    mask = g.input("mask", (B, 1, S, S))
    masked = g.op("Where", g.cast(mask, BOOL), g.scores(), g.const(-1e9))
    return g.op("MatMul", g.op("Mul", g.op("Softmax", masked), mask), "v")


def masked_behind_beside_another(g):
    """A query that both hide keeps the mean of keys that the first one shows."""
    scores = g.op("Where", g.input("other", (B, 1, 1, S), BOOL), g.scores(), g.const(-1e9))
    scores = g.op("Where", keep(g), scores, g.const(-1e9))
    return g.op("MatMul", g.op("Where", keep(g), g.op("Softmax", scores), g.const(0.0)), "v")


def blended_with_numbers(g):
    """Not of zeros and ones, nor the same for all queries."""
    mask = g.input("mask", (B, 1, S, S))
    far = g.op("Mul", g.op("Sub", g.const(1.0), mask), g.const(-1e9))
    return g.attend(g.op("Add", g.op("Mul", g.scores(), mask), far))


def blended_with_another(g):
    other = g.cast(g.input("other", (B, 1, S, S), BOOL), FLOAT)
    return g.attend(g.op("Add", g.op("Mul", g.scores(), other), hidden(g)))


def over_a_sum_with_a_large_bound(g):
    powers = shifted(g)
    return g.op("MatMul", g.op("Div", powers, g.op("Clip", total(g, powers), g.const(2.0))), "v")


def over_a_sum_of_any_size_with_a_bound(g):
    powers = g.op("Exp", g.scores())
    return g.op("MatMul", g.op("Div", powers, g.op("Clip", total(g, powers), g.const(0.5))), "v")


def powers_times_numbers_of_pairs(g):
    """They may be negative, and are not the same for all queries."""
    numbers = g.input("numbers", (B, 1, S, S))
    return g.op("MatMul", over_sum(g, g.op("Mul", g.op("Exp", g.scores()), numbers)), "v")


def bounded_near(g):
    return g.attend(g.op("Clip", g.scores(), g.const(-50.0), g.const(50.0)))


def divided_by_another_sum(g):
    powers = g.op("Exp", g.scores())
    return g.op("Div", g.op("MatMul", powers, "v"), total(g, g.op("Exp", g.op("Mul", powers, powers))))


def squared_and_not_renormalised(g):
    weights = g.op("Softmax", g.scores())
    return g.op("MatMul", g.op("Mul", weights, weights), "v")


def divided_by_sums_of_other_queries(g):
    return divided_behind_moves(g, turned=False)


def over_sums_of_other_queries_without_their_axis(g):
    return over_sums_without_their_axis(g, turned=False)


OTHERS = [over_sums_of_other_queries_without_their_axis]
OTHERS += [squared_and_not_renormalised, divided_by_sums_of_other_queries]
OTHERS += [weakly_renormalised, not_renormalised, masked_behind_by_another, masked_behind_beside_another]
OTHERS += [blended_with_numbers, blended_with_another, divided_by_another_sum]
OTHERS += [over_a_sum_with_a_large_bound, over_a_sum_of_any_size_with_a_bound]
OTHERS += [powers_times_numbers_of_pairs, bounded_near, masked_behind_by_numbers]


@pytest.mark.parametrize("spelled", OTHERS, ids=lambda each: each.__name__)
def test_what_is_another_function_stays_as_it_is(spelled):
    g = Hand()
    model = g.model(spelled(g))
    new, report = fused(model)
    assert (report.fused, len(report.unfused)) == ((), 1)
    assert list(new.graph.node) == list(model.graph.node)


def test_what_was_rewritten_twice_stays_as_it_is():
    g = Hand(shape=(S, D))
    powers = g.op("Exp", g.op("Mul", g.op("Gemm", "q", "k", transB=1), g.input("factors", (S, S))))
    y = g.op("Div", g.op("MatMul", powers, "v"), total(g, powers))
    model = g.model(g.op("Unsqueeze", y, g.ints(0, 1)))
    new, report = fused(model)
    assert (report.fused, len(report.unfused)) == ((), 1)
    assert list(new.graph.node) == list(model.graph.node)


def test_what_is_not_fused_is_as_in_the_file_beside_what_is():
    """The first attention is spelled in another way, and has a step that keeps it from being fused."""
    g = Hand()
    scores = g.op("Sin", g.op("Add", g.op("Mul", g.scores(), ones(g)), hidden(g)))
    first = g.attend(scores)
    second = g.attend(g.op("MatMul", first, g.op("Transpose", "k", perm=[0, 1, 3, 2])))
    model = g.model(second, scores)
    new, report = fused(model)
    assert (len(report.fused), len(report.unfused)) == (1, 1)
    before, after = ({node.op_type for node in each.graph.node} for each in (model, new))
    assert after - before == {"Attention"}
    feeds = random_feeds(model)
    for want, got in zip(run(model, feeds), run(new, feeds), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


# -- axes ------------------------------------------------------------------------------------------------


def axes_of(inputs):
    g = Hand()
    g.inputs = {name: (FLOAT, shape) for name, shape in inputs.items()}
    return g


def check_heads(g, y, heads):
    report = check_same(g.model(g.op("Reshape", y, g.ints(1, 1, 1, -1))))
    assert [(each.Hq, each.Hkv) for each in report.fused] == [heads]


def test_positions_of_rows_and_columns():
    """Scores are taken apart into rows and columns of keys, whose biases are added one after the other."""
    g = axes_of({"q": ("N", 6, D), "k": ("N", 6, D), "v": ("N", 6, D), "rows": ("N", 2, 3, 2, 1)})
    scores = g.op("MatMul", "q", g.op("Transpose", "k", perm=[0, 2, 1]))
    scores = g.op("Add", g.op("Reshape", scores, g.ints(-1, 2, 3, 2, 3)), "rows")
    scores = g.op("Add", scores, g.input("columns", ("N", 2, 3, 1, 3)))
    check_heads(g, g.attend(g.op("Reshape", scores, g.ints(-1, 6, 6))), (1, 1))


def test_two_axes_of_the_batch_of_unknown_size():
    g = axes_of({name: ("N", "M", "S", 2, D) for name in "qkv"})
    scores = g.op("Einsum", "q", "k", equation="nmshd,nmthd->nmhst")
    scores = g.op("Add", scores, g.input("pairs", ("N", 1, 2, "S", "S")))
    scores = g.op("Where", g.input("keep", ("N", "M", 1, 1, "S"), BOOL), scores, g.const(-1e9))
    check_heads(g, g.op("Einsum", g.op("Softmax", scores), "v", equation="nmhst,nmthd->nmshd"), (2, 2))


def test_keys_that_one_axis_of_the_batch_shares():
    g = axes_of({"q": ("N", "M", 2, "S", D), "k": ("N", 1, 2, "T", D), "v": ("N", 1, 2, "T", D)})
    scores = g.op("MatMul", "q", g.op("Transpose", "k", perm=[0, 1, 2, 4, 3]))
    check_heads(g, g.attend(scores), (2, 2))


@pytest.mark.parametrize("heads", [(H, 1, H), (H, H, 1), (1, H, H)], ids=["keys", "values", "queries"])
def test_one_head_beside_several(heads):
    g = axes_of({name: ("N", count, "S", D) for name, count in zip("qkv", heads, strict=True)})
    check_heads(g, g.attend(g.scores()), (H, H))


@pytest.mark.parametrize("op_type", ["Add", "Sub"])
def test_the_weights_of_two_attentions_together(op_type):
    g = Hand()
    factor = g.input("factor", (1,))
    second = g.op("Softmax", g.op("MatMul", "k", g.op("Transpose", "q", perm=[0, 1, 3, 2])))
    weights = g.op(op_type, g.op("Softmax", g.scores()), g.op("Mul", second, factor))
    report = check_same(g.model(g.op("MatMul", weights, "v")))
    assert (len(report.fused), report.unfused) == (2, ())


def test_the_mean_weights_of_heads_that_share_values():
    g = axes_of({"q": ("N", H, "S", D), "k": ("N", H, "T", D), "v": ("N", "T", 5)})
    weights = g.op("ReduceMean", g.op("Softmax", g.scores()), g.ints(1), keepdims=0)
    check_heads(g, g.op("MatMul", weights, "v"), (H, H))


@pytest.mark.parametrize("shape", [(H * D,), (H, D), (2, H // 2 * D)], ids=["joined", "apart", "otherwise"])
def test_rows_of_queries_and_heads(shape):
    """`[N, S * H, D]` times `[N, D, T]`, with a mask between: the heads share the keys."""
    g = axes_of({"q": ("N", "S", *shape), "k": ("N", "T", D), "v": ("N", "T", D)})
    g.inputs["shown"] = (BOOL, ("N", "S", 1, "T"))
    rows = g.op("Reshape", "q", g.op("Concat", g.op("Shape", "q", end=1), g.ints(-1, D), axis=0))
    scores = g.op("MatMul", rows, g.op("Transpose", "k", perm=[0, 2, 1]))
    sizes = [g.op("Shape", "q", end=2), g.ints(H), g.op("Shape", "k", start=1, end=2)]
    scores = g.op("Reshape", scores, g.op("Concat", *sizes, axis=0))
    weights = g.op("Softmax", g.op("Where", "shown", scores, g.const(-1e9)))
    weights = g.op(
        "Reshape", weights, g.op("Concat", g.op("Shape", "q", end=1), g.ints(-1), sizes[2], axis=0)
    )
    check_heads(g, g.op("MatMul", weights, "v"), (1 if shape[0] == 2 else H, 1))


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_weight_as_the_query(columns, rows):
    """Pooling: a softmax over the rows of a projection, before they are transposed or after."""
    g = axes_of({"x": ("N", "T", D)})
    weight = g.const(np.random.default_rng(0).standard_normal((D, columns)))
    scores = g.op("Add", g.op("MatMul", "x", weight), g.const(np.arange(columns)))
    if rows == 2:
        weights = g.op("Softmax", g.op("Transpose", scores, perm=[0, 2, 1]), axis=2)
    else:
        weights = g.op("Transpose", g.op("Softmax", scores, axis=1), perm=[0, 2, 1])
    check_heads(g, g.op("MatMul", weights, "x"), (1, 1))


@pytest.mark.parametrize("joined", ["same", "moved"])
@pytest.mark.parametrize("columns", [1, 3])
def test_a_weight_as_the_query_of_all_batch_elements_in_one_gemm(columns, joined):
    """As simplifiers write a projection; behind it may be other batch elements."""
    g = axes_of({"x": (2, 5, D)})
    weight = g.const(np.random.default_rng(0).standard_normal((D, columns)))
    rows = g.op("Gemm", g.op("Reshape", "x", g.ints(-1, D)), weight, g.const(np.arange(columns)))
    scores = g.op("Reshape", rows, g.ints(*((2, 5) if joined == "same" else (5, 2)), columns))
    if joined == "moved":
        scores = g.op("Transpose", scores, perm=[1, 0, 2])
    weights = g.op("Transpose", g.op("Softmax", scores, axis=1), perm=[0, 2, 1])
    report = check_same(g.model(g.op("Unsqueeze", g.op("MatMul", weights, "x"), g.ints(1))))
    assert len(report.fused) == (joined == "same")


@pytest.mark.parametrize("equation", ["btd,dc->btc", "cd,btd->btc", "dc,btd->bct", None])
def test_scores_of_a_weight_that_are_normalized_over_both_axes(equation):
    """As a soft mixture of experts: tokens are put into slots, and the results of slots back into tokens."""
    g = axes_of({"x": ("N", "T", D)})
    weight = np.random.default_rng(0).standard_normal((3, D) if (equation or "").startswith("c") else (D, 3))
    given = [g.const(weight), "x"] if (equation or "b")[0] != "b" else ["x", g.const(weight)]
    scores = g.op("Einsum", *given, equation=equation) if equation else g.op("MatMul", *given)
    if (equation or "").endswith("ct"):
        scores = g.op("Transpose", scores, perm=[0, 2, 1])
    slots = g.op("Einsum", g.op("Softmax", scores, axis=1), "x", equation="btc,btd->bcd")
    back = g.op("MatMul", g.op("Softmax", scores, axis=2), g.op("Tanh", slots))
    report = check_same(g.model(g.op("Unsqueeze", back, g.ints(1))))
    assert (len(report.fused), report.unfused) == (2, ())


@pytest.mark.parametrize("squeezed", ["scores", "weights"])
@pytest.mark.parametrize("spelled", ["products", "einsum"])
def test_a_pooling_whose_weights_have_no_axis_of_queries(squeezed, spelled):
    """One score for each row; the weights are `[N, T]`, and a result as well."""
    g = axes_of({"x": ("N", "T", D)})
    scores = g.op("MatMul", "x", g.const(np.random.default_rng(0).standard_normal((D, 1))))
    if squeezed == "scores":
        weights = g.op("Softmax", g.op("Squeeze", scores, g.ints(2)), axis=1)
    else:
        weights = g.op("Squeeze", g.op("Softmax", scores, axis=1), g.ints(2))
    if spelled == "einsum":
        pooled = g.op("Einsum", weights, "x", equation="bs,bse->be")
    else:
        products = g.op("Mul", "x", g.op("Unsqueeze", weights, g.ints(2)))
        pooled = g.op("ReduceSum", products, g.ints(1), keepdims=0)
    report = check_same(g.model(*(g.op("Unsqueeze", each, g.ints(1, 2)) for each in (pooled, weights))))
    assert [each.weights for each in report.fused] == [True]
    assert report.unfused == ()


def test_a_size_whose_name_is_no_expression():
    """As TorchScript's exporter names the sizes of outputs."""
    g = axes_of({name: ("onnx::B", H, "onnx::S", D) for name in "qkv"})
    k, v = (g.op("Concat", g.input(f"past_{name}", ("onnx::B", H, "P", D)), name, axis=2) for name in "kv")
    scores = g.op("MatMul", "q", g.op("Transpose", k, perm=[0, 1, 3, 2]))
    sizes = [g.op("Gather", g.op("Shape", each), g.ints(2)) for each in ("q", k)]
    square = g.op("ConstantOfShape", g.op("Concat", *sizes, axis=0), value=onnx_tensor(1.0))
    lower = g.op("Trilu", square, g.op("Squeeze", g.op("Sub", sizes[1], sizes[0])), upper=0)
    scores = g.op("Where", g.cast(lower, BOOL), scores, g.const(np.finfo(np.float32).min))
    model = g.model(g.op("MatMul", g.op("Softmax", scores), v))
    model.graph.value_info.append(helper.make_tensor_value_info(k, FLOAT, ["onnx::B", H, "onnx::T", D]))
    new, report = fused(model)
    assert (len(report.fused), report.unfused) == (1, ())
    feeds = random_feeds(model)
    np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)
    assert [dim.dim_param for dim in new.graph.input[0].type.tensor_type.shape.dim][::2] == [
        "onnx::B",
        "onnx::S",
    ]


def test_a_softmax_over_the_columns_of_a_projection_is_none_of_attention():
    """As the router of a mixture of experts."""
    g = axes_of({"x": ("N", "T", D)})
    weight = g.const(np.random.default_rng(0).standard_normal((D, 3)))
    weights = g.op("Softmax", g.op("MatMul", "x", weight), axis=-1)
    pooled = g.op("MatMul", g.op("Transpose", weights, perm=[0, 2, 1]), "x")
    assert fused(g.model(g.op("Unsqueeze", pooled, g.ints(1))))[1].fused == ()


def test_the_weights_of_two_heads_together():
    """Every second head of one softmax, less the others."""
    g = axes_of({"q": ("N", H, "S", D), "k": ("N", H, "S", D), "v": ("N", H // 2, "S", D)})
    size = g.op("Shape", "q", start=2, end=3)
    pairs = g.op("Concat", g.op("Shape", "q", end=1), g.ints(H // 2, 2), size, size, axis=0)
    weights = g.op("Reshape", g.op("Softmax", g.scores()), pairs)
    first, second = (g.op("Gather", weights, g.const(at, np.int64), axis=2) for at in (0, 1))
    both = g.op("Sub", first, g.op("Mul", g.const([0.4]), second))
    report = check_same(g.model(g.op("MatMul", both, "v")))
    assert (len(report.fused), report.unfused) == (1, ())


def gated(g, weights, values):
    return g.op("MatMul", g.op("Mul", weights, g.cast(g.input("gates", (1, H, "S", 1)), HALF)), values)


def averaged_over_heads(g, weights, values):
    return g.op(
        "MatMul", g.op("ReduceMean", weights, g.ints(1)), g.op("Slice", values, *map(g.ints, (0, 1, 1)))
    )


def less_another_head(g, weights, values):
    first, second = (g.op("Gather", weights, g.const(at, np.int64), axis=1) for at in (0, 1))
    both = g.op("Sub", first, g.op("Mul", g.cast(g.const([0.4]), HALF), second))
    return g.op("MatMul", both, g.op("Gather", values, g.const(0, np.int64), axis=1))


@pytest.mark.parametrize("spelled", [gated, averaged_over_heads, less_another_head])
def test_weights_that_are_cast_before_they_are_changed(spelled):
    """`softmax(scores, dtype=float32).type_as(q)`, as it is usual, and only then a gate."""
    g = axes_of({name: ("N", H, "S", D) for name in "qkv"})
    q, k, v = (g.cast(name, HALF) for name in "qkv")
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    weights = g.cast(g.op("Softmax", g.cast(scores, FLOAT)), HALF)
    model = g.model(g.op("Reshape", g.cast(spelled(g, weights, v), FLOAT), g.ints(1, 1, 1, -1)))
    new, report = fused(model)
    assert (len(report.fused), report.unfused) == (1, ())
    feeds = random_feeds(model)
    np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=5e-3)


def test_one_head_in_the_batch_and_beside_it():
    """Scores of `[N * 1, S, T]`, weights and values of `[N, 1, S, T]`."""
    g = axes_of({"q": ("N", "S", D), "k": ("N", "T", D), "v": ("N", 1, "T", D)})
    scores = g.op("MatMul", "q", g.op("Transpose", "k", perm=[0, 2, 1]))
    size = [g.op("Shape", name, start=start, end=start + 1) for name, start in (("q", 0), ("q", 1), ("k", 1))]
    scores = g.op("Reshape", scores, g.op("Concat", size[0], g.ints(1), *size[1:], axis=0))
    check_heads(g, g.attend(g.op("Add", scores, g.input("bias", ("S", "T")))), (1, 1))


def test_groups_of_one_head_that_the_values_do_not_have():
    """Scores of `[N, 2, 1, S, T]`, weights and values of `[N, 2, S, T]`, with a mask between."""
    g = axes_of({"q": ("N", 2, 1, "S", D), "k": ("N", 2, 1, "T", D), "v": ("N", 2, "T", D)})
    scores = g.op("MatMul", "q", g.op("Transpose", "k", perm=[0, 1, 2, 4, 3]))
    sizes = [
        g.op("Shape", "q", end=2),
        g.op("Shape", "q", start=3, end=4),
        g.op("Shape", "k", start=3, end=4),
    ]
    scores = g.op("Reshape", scores, g.op("Concat", *sizes, axis=0))
    shown = g.input("shown", ("N", 1, 1, "T"), BOOL)
    check_heads(g, g.attend(g.op("Where", shown, scores, g.const(-1e9))), (2, 2))


def test_heads_behind_the_queries_that_share_keys():
    g = axes_of({"q": ("N", "S", H, D), "k": ("N", "T", D), "v": ("N", "T", 5)})
    scores = g.op("Einsum", "q", "k", equation="bshc,btc->bsht")
    check_heads(g, g.op("Einsum", g.op("Softmax", scores), "v", equation="bsht,btc->bshc"), (H, 1))


@pytest.mark.parametrize("batch", ["N", B])
def test_heads_in_the_batch_are_heads(batch):
    g = axes_of({name: (S, batch, H * D) for name in "qkv"})
    q, k, v = (g.op("Transpose", g.op("Reshape", name, g.ints(S, -1, D)), perm=[1, 0, 2]) for name in "qkv")
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 1]))
    check_heads(g, g.op("MatMul", g.op("Softmax", scores), v), (H, H))


@pytest.mark.parametrize("batch", ["N", 5])
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "joined"])
def test_a_mask_of_heads_in_the_batch_whose_size_has_another_name(apart, batch):
    """As BLOOM's ALiBi: `[N * H, 1, T]`, which is added to the scores before they are taken apart."""
    g = axes_of({name: (batch, S, H * D) for name in "qkv"} | {"slopes": ("NH", 1, S)})
    halves = [
        g.op("Transpose", g.op("Reshape", each, g.ints(0, 0, H, D)), perm=[0, 2, 1, 3]) for each in "qkv"
    ]
    q, k, v = (g.op("Reshape", each, g.ints(-1, S, D)) for each in halves)
    scores = g.op("Add", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 1])), "slopes")
    if apart:
        scores = g.op("Reshape", scores, g.ints(-1, H, S, S))
        scores = g.op("Where", g.input("shown", (batch, 1, 1, S), BOOL), scores, g.const(-1e9))
        weights = g.op("Reshape", g.op("Softmax", scores), g.ints(-1, S, S))
    else:
        weights = g.op("Softmax", scores)
    model = g.model(g.op("Reshape", g.op("MatMul", weights, v), g.ints(-1, H, S, D)))
    new, report = fused(model)
    assert [(each.Hq, each.Hkv) for each in report.fused] == [(H, H)]
    for count in (5 * H, 1):  # a single one is copied to all
        feeds = random_feeds(model)
        feeds["slopes"] = np.random.default_rng(1).standard_normal((count, 1, S)).astype(np.float32)
        np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)


def test_windows_of_an_unknown_batch():
    """Every fourth window has a mask of its own."""
    g = axes_of({name: ("N", H, S, D) for name in "qkv"})
    g.inputs["window"] = (FLOAT, (4, 1, S, S))
    count = g.op("Div", g.op("Gather", g.op("Shape", "q"), g.ints(0)), g.ints(4))
    apart = g.op("Reshape", g.scores(), g.op("Concat", count, g.ints(4, H, S, S), axis=0))
    scores = g.op("Add", apart, g.op("Unsqueeze", "window", g.ints(0)))
    y = g.attend(g.op("Reshape", scores, g.ints(-1, H, S, S)))
    model = g.model(y)
    new, report = fused(model)
    assert [(each.Hq, each.mask) for each in report.fused] == [(H, "float")]
    feeds = random_feeds(model)
    feeds |= {name: np.tile(feeds[name], (2, 1, 1, 1))[:8] for name in "qkv"}
    np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)


def test_rows_of_a_triangle_from_where_no_past_ends():
    """`triangle[:, :, T - S : T, :T]`, where both sizes are that of Q."""
    g = axes_of({name: (B, H, "S", D) for name in "qkv"})
    rows, keys = (g.op("Gather", g.op("Shape", "q"), g.ints(2)) for _ in range(2))
    triangle = g.const(np.tri(20, dtype=bool).reshape(1, 1, 20, 20), bool)
    shown = g.op("Slice", triangle, g.op("Sub", keys, rows), keys, g.ints(2))
    shown = g.op("Slice", shown, g.ints(0), keys, g.ints(3))
    scores = g.op("Where", shown, g.scores(), g.const(np.finfo(np.float32).min))
    report = check_same(g.model(g.attend(scores)))
    assert [each.causal for each in report.fused] == [True]


def test_one_query_by_sums_of_products():
    g = axes_of({"q": ("N", 1, D), "k": ("N", "T", D), "v": ("N", "T", D)})
    scores = g.op("ReduceSum", g.op("Mul", "k", "q"), g.ints(-1), keepdims=0)
    weights = g.op("Unsqueeze", g.op("Softmax", scores), g.ints(-1))
    check_heads(g, g.op("ReduceSum", g.op("Mul", weights, "v"), g.ints(1), keepdims=0), (1, 1))


def test_one_query_by_sums_of_products_before_an_axis_of_the_batch():
    """As keys and values that are unfolded around every pixel: `[N, H, D, T, pixels]`."""
    g = axes_of({"q": ("N", H, D, 1, "P"), "k": ("N", H, D, 9, "P"), "v": ("N", H, D, 9, "P")})
    weights = g.op("Softmax", g.op("ReduceSum", g.op("Mul", "q", "k"), g.ints(2), keepdims=0), axis=2)
    products = g.op("Mul", g.op("Unsqueeze", weights, g.ints(2)), "v")
    check_heads(g, g.op("ReduceSum", products, g.ints(3), keepdims=0), (H, H))


def test_one_query_without_an_axis():
    g = axes_of({"q": ("N", D), "k": ("N", "T", D), "v": ("N", "T", D)})
    weights = g.op("Softmax", g.op("Einsum", "q", "k", equation="be,bse->bs"), axis=-1)
    check_heads(g, g.op("Einsum", weights, "v", equation="bs,bse->be"), (1, 1))


def test_a_vector_as_the_query():
    g = axes_of({"q": (D,), "k": ("T", D), "v": ("T", D)})
    check_heads(g, g.op("MatMul", g.op("Softmax", g.op("MatMul", "k", "q"), axis=-1), "v"), (1, 1))


def test_matrices_divided_behind():
    g = axes_of({"q": ("S", D), "k": ("T", D), "v": ("T", D)})
    powers = g.op("Exp", g.op("MatMul", "q", g.op("Transpose", "k", perm=[1, 0])))
    check_heads(g, g.op("Div", g.op("MatMul", powers, "v"), total(g, powers)), (1, 1))


@pytest.mark.parametrize("operator", ["MatMul", "Gemm", "Einsum"])
def test_matrices(operator):
    g = axes_of({"q": ("S", D), "k": ("T", D), "v": ("T", D)})
    if operator == "Gemm":
        bias = g.input("bias", ("S", "T"))
        scores = g.op("Gemm", "q", "k", bias, transB=1, alpha=0.5, beta=2.0)
    elif operator == "Einsum":
        weights = g.op("Softmax", g.op("Einsum", "q", "k", equation="sd,td->st"))
        return check_heads(g, g.op("Einsum", weights, "v", equation="st,td->sd"), (1, 1))
    else:
        scores = g.op("MatMul", "q", g.op("Transpose", "k", perm=[1, 0]))
    return check_heads(g, g.op(operator, g.op("Softmax", scores), "v"), (1, 1))


def test_einsums_of_several_tensors():
    """Projections and a scale are part of the einsums; all heads share the values."""
    g = axes_of({name: ("N", "S", 5) for name in "xy"})
    random = np.random.default_rng(0)
    wq, wk, out = (g.const(random.standard_normal(shape)) for shape in ((5, H, D), (5, H, D), (H, 5, 3)))
    scores = g.op("Einsum", "x", wq, g.const(np.full(D, 0.5)), wk, "y", equation="bie,ehd,d,fhd,bjf->bhij")
    result = g.op("Einsum", g.op("Softmax", scores), "y", out, equation="bhij,bjf,hfo->bio")
    check_heads(g, g.op("Unsqueeze", result, g.ints(1)), (H, H))


def test_learned_queries_before_the_keys():
    """`W @ tanh(V @ x.T)`, whose rows attend to x."""
    g = axes_of({"x": ("N", "T", D)})
    random = np.random.default_rng(0)
    inner, queries = (g.const(random.standard_normal(shape)) for shape in ((5, D), (3, 5)))
    keys = g.op("Tanh", g.op("MatMul", inner, g.op("Transpose", "x", perm=[0, 2, 1])))
    check_heads(g, g.op("MatMul", g.op("Softmax", g.op("MatMul", queries, keys)), "x"), (1, 1))


def test_an_einsum_with_the_projection_behind():
    g = axes_of({name: ("N", "S", H, D) for name in "qkv"})
    weights = g.op("Softmax", g.op("Einsum", "q", "k", equation="bqhd,bkhd->bhqk"))
    out = g.const(np.random.default_rng(0).standard_normal((H, D, 5)))
    check_heads(g, g.op("Einsum", weights, "v", out, equation="bhqk,bkhd,hde->bqe"), (H, H))


@pytest.mark.parametrize("spelled", ["logarithm", "by hand", "quotient"])
def test_a_softmax_over_two_axes(spelled):
    """As Keras attends to a map."""
    g = axes_of({name: ("N", "X", "Y", H, D) for name in "qkv"})
    scores, axes = g.op("Einsum", "q", "k", equation="bxyhd,bzwhd->bhxyzw"), g.ints(4, 5)
    top = g.op("ReduceMax", scores, axes)
    powers = g.op("Exp", g.op("Sub", scores, top))
    if spelled == "quotient":
        weights = g.op("Div", powers, g.op("ReduceSum", powers, axes))
    else:
        by_hand = g.op("Add", g.op("Log", g.op("ReduceSum", powers, axes)), top)
        total = by_hand if spelled == "by hand" else g.op("ReduceLogSumExp", scores, axes)
        weights = g.op("Exp", g.op("Sub", scores, total))
    check_heads(g, g.op("Einsum", weights, "v", equation="bhxyzw,bzwhd->bxyhd"), (H, H))


def test_a_batch_that_only_a_reshape_states():
    """A file was traced with a batch of 5, and says that any is possible."""
    g = axes_of({"q": ("N", S, H, D), "k": ("N", S, 2, D), "v": ("N", S, 2, D)})
    apart = g.op("Reshape", "q", g.ints(5, S, 2, H // 2, D))
    scores = g.op("Reshape", g.op("Einsum", apart, "k", equation="btkgd,bskd->bkgts"), g.ints(5, H, S, S))
    weights = g.op("Reshape", g.op("Softmax", scores), g.ints(5, 2, H // 2, S, S))
    y = g.op("Einsum", weights, "v", equation="bkgts,bskd->btkgd")
    model = g.model(g.op("Reshape", y, g.ints(1, 1, 5, -1)))
    report = check_same(model)
    assert (len(report.fused), report.unfused) == (1, ())
    assert fused(model)[0].graph.input == model.graph.input


def test_a_reshape_that_nothing_needs_states_no_batch():
    g = axes_of({name: ("N", H, S, D) for name in "qkv"})
    g.op("Reshape", "q", g.ints(5, H * S * D))
    new, report = fused(g.model(g.attend(g.scores())))
    assert len(report.fused) == 1
    stated = [[dim.dim_value for dim in each.type.tensor_type.shape.dim] for each in new.graph.value_info]
    assert not any(5 in each for each in stated if len(each) == 4)


def test_a_mask_of_the_size_of_an_example():
    """A cache of any length, and a mask of a fixed one."""
    g = axes_of({"q": ("N", H, 1, D), "k": ("N", H, "P", D), "v": ("N", H, "P", D)})
    k, v = (g.op("Concat", name, g.input(f"new_{name}", ("N", H, 1, D)), axis=2) for name in "kv")
    scores = g.op("MatMul", "q", g.op("Transpose", k, perm=[0, 1, 3, 2]))
    shown = g.input("shown", ("N", 1, 1, 4), BOOL)
    model = g.model(g.op("MatMul", g.op("Softmax", g.op("Where", shown, scores, g.const(-1e9))), v))
    new, report = fused(model)
    assert (len(report.fused), report.unfused) == (1, ())
    feeds = random_feeds(model)
    feeds |= {name: feeds[name][:, :, :3] for name in "kv"}
    np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)


def test_a_bias_of_the_two_sizes_of_an_example():
    """A past and new tokens of any length, and a bias of 4 queries and 7 keys."""
    g = axes_of({"q": ("N", H, "S", D), "k": ("N", H, "S", D), "past": ("N", H, "P", D)})
    k = g.op("Concat", "past", "k", axis=2)
    scores = g.op("MatMul", "q", g.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = g.op("Add", scores, g.input("bias", (1, H, 4, 7)))
    model = g.model(g.op("MatMul", g.op("Softmax", scores), k))
    new, report = fused(model)
    assert (len(report.fused), report.unfused) == (1, ())
    feeds = random_feeds(model)
    feeds |= {name: feeds[name][:, :, :size] for name, size in (("q", 4), ("k", 4), ("past", 3))}
    np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)


def test_keys_whose_length_has_another_name_as_a_result():
    """A present is a result, and the mask is of the past and the new ones."""
    g = axes_of({"q": ("N", H, "S", D), "past": ("N", H, "P", D), "k": ("N", H, "S", D)})
    k = g.op("Concat", "past", "k", axis=2)
    rows, keys = (g.op("Shape", each, start=2, end=3) for each in ("q", k))
    past = g.op("ConstantOfShape", g.op("Concat", rows, g.op("Shape", "past", start=2, end=3), axis=0))
    mask = g.op("Concat", past, g.input("own", ("S", "S")), axis=1)
    scores = g.op("Add", g.op("MatMul", "q", g.op("Transpose", k, perm=[0, 1, 3, 2])), mask)
    flat = g.op("Softmax", g.op("Reshape", scores, g.op("Concat", g.ints(-1), rows, keys, axis=0)))
    model = g.model(g.op("MatMul", g.op("Reshape", flat, g.op("Shape", scores)), k), k)
    del model.graph.node[-1:]
    model.graph.output[1].name = k
    for dim, name in zip(model.graph.output[1].type.tensor_type.shape.dim, "abcd", strict=True):
        dim.dim_param = name
    new, report = fused(model)
    assert (len(report.fused), report.unfused) == (1, ())
    assert new.graph.output[1] == model.graph.output[1]


def test_queries_between_unknown_bounds():
    g = axes_of({name: ("N", H, "S", D) for name in "qkv"})
    g.inputs |= {name: (TensorProto.INT64, (1,)) for name in ("first", "last")}
    some = g.op("Slice", "q", "first", "last", g.ints(2))
    scores = g.op("MatMul", some, g.op("Transpose", "k", perm=[0, 1, 3, 2]))
    model = g.model(g.op("MatMul", g.op("Softmax", scores), "v"))
    new, report = fused(model)
    assert [each.Hq for each in report.fused] == [H]
    feeds = random_feeds(model) | {"first": np.array([1]), "last": np.array([4])}
    np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)


def test_steps_that_do_nothing():
    g = axes_of({name: ("N", H, "S", D) for name in "qkv"})
    whole = g.op("Slice", g.scores(), g.ints(0), g.ints(2**63 - 1), g.ints(2))
    weights = g.op("Concat", g.op("Softmax", g.op("Concat", whole, axis=1)), axis=2)
    check_heads(g, g.op("MatMul", weights, "v"), (H, H))


def test_windows_behind_a_pad_that_is_computed():
    """As TorchScript's exporter writes a pad: its sizes are turned around as a matrix."""
    g = axes_of({"x": ("N", 3, 6, D)})
    pairs = g.op("Reshape", g.ints(0, 0, 0, 2, 0, 1, 0, 0), g.ints(4, 2))
    turned = g.op("Slice", pairs, g.ints(-1), g.ints(-(2**63) + 1), g.ints(0), g.ints(-1))
    pads = g.op("Reshape", g.op("Transpose", turned, perm=[1, 0]), g.ints(-1))
    padded = g.op("Pad", "x", pads)
    sizes = [g.op("Shape", padded, start=at, end=at + 1) for at in range(4)]
    windows = [g.op("Div", sizes[1], g.ints(2)), g.op("Div", sizes[2], g.ints(2))]
    shape = g.op("Concat", sizes[0], windows[0], g.ints(2), windows[1], g.ints(2), sizes[3], axis=0)
    apart = g.op("Transpose", g.op("Reshape", padded, shape), perm=[0, 1, 3, 2, 4, 5])
    rows = g.op("Reshape", apart, g.op("Concat", g.ints(-1, 4), sizes[3], axis=0))
    heads = g.op("Concat", g.op("Shape", rows, end=2), g.ints(-1, D // 2), axis=0)
    x = g.op("Transpose", g.op("Reshape", rows, heads), perm=[0, 2, 1, 3])
    weights = g.op("Softmax", g.op("MatMul", x, g.op("Transpose", x, perm=[0, 1, 3, 2])))
    check_heads(g, g.op("MatMul", weights, x), (2, 2))


def test_a_bias_of_the_last_query():
    g = axes_of({"q": ("N", H, 1, D), "k": ("N", H, "T", D), "v": ("N", H, "T", D)})
    bias = g.op("Slice", g.input("bias", (1, H, "T", "T")), g.ints(-1), g.ints(2**63 - 1), g.ints(2))
    check_heads(g, g.attend(g.op("Add", g.scores(), bias)), (H, H))


def test_between_operators_of_onnx_runtime():
    """ONNX's shape inference ends at them."""
    own = {"domain": "com.microsoft"}
    g = axes_of({name: ("N", "S", D) for name in "xr"})
    tables = [g.const(each((16, D // 2)).astype(np.float32)) for each in (np.ones, np.zeros)]
    g.inputs["places"] = (TensorProto.INT64, ("N", "S"))
    packed, scales = g.const(np.full((D, 1, 8), 0x97), np.uint8), g.const(np.full(D, 0.1))
    x = g.op("MatMulNBits", "x", packed, scales, K=D, N=D, bits=4, block_size=16, **own)
    normed = g.op("SkipSimplifiedLayerNormalization", x, "r", g.const(np.ones(D)), epsilon=1e-6, **own)
    g.nodes[-1].output.extend(["", "", "total"])
    q = g.op("RotaryEmbedding", g.op("Unsqueeze", normed, g.ints(1)), "places", *tables, **own)
    k = g.op("Unsqueeze", "total", g.ints(1))
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    model = g.model(g.op("MatMul", g.op("Softmax", scores), k))
    new, report = fused(model)
    assert (len(report.fused), report.unfused) == (1, ())
    feeds = random_feeds(model) | {"places": np.tile(np.arange(5), (5, 1))}
    np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)


def test_a_mask_that_an_einsum_copies_a_single_key_to():
    g = axes_of({name: ("N", "S", H, D) for name in "qkv"})
    scores = g.op("Einsum", "q", "k", equation="bqhd,bkhd->bhqk")
    bias = np.random.default_rng(0).standard_normal((1, H, 5, 5))
    weights = g.op("Softmax", g.op("Add", scores, g.const(bias)))
    model = g.model(g.op("Einsum", weights, "v", equation="bhqk,bkhd->bqhd"))
    new, report = fused(model)
    assert (len(report.fused), report.unfused) == (1, ())
    for length in (5, 1):
        feeds = {name: each[:, :length] for name, each in random_feeds(model).items()}
        np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)


@pytest.mark.parametrize("used", ["as an output", "by another softmax"])
def test_scores_that_are_used_elsewhere_are_computed_once_more(used):
    g = Hand()
    scores = g.op("Mul", g.scores(), g.const(0.5))
    if used == "as an output":
        y = g.op("MatMul", g.op("Softmax", g.op("Where", keep(g), scores, g.const(-1e9))), "v")
        report = check_same(g.model(y, scores))
    else:  # both sides attend to each other
        turned = g.op("Transpose", scores, perm=[0, 1, 3, 2])
        report = check_same(g.model(g.attend(scores), g.op("MatMul", g.op("Softmax", turned), "q")))
    assert (len(report.fused), report.unfused) == (1 if used == "as an output" else 2, ())


@pytest.mark.parametrize(
    ("operator", "half"), [("FusedMatMul", False), ("FusedMatMul", True), ("TransposeMatMul", False)]
)
def test_fused_matmuls_of_onnx_runtime(operator, half):
    """Both matrices of a product may be transposed; shape inference does not know the operator."""
    own = {"domain": "com.microsoft"}
    g = axes_of({"q": ("N", 2, D, "S"), "k": ("N", 2, D, "T"), "v": ("N", 2, "T", 5)})
    q, k, v = (g.cast(name, HALF, *([] if half else [FLOAT])) for name in "qkv")
    scores = g.op(operator, k, q, alpha=0.25, transA=1, **own)
    result = g.op(operator, g.op("Softmax", scores, axis=2), v, transA=1, **own)
    graph = g.model(g.cast(result, FLOAT))
    new, report = fused(graph)
    assert [(each.Hq, each.scale) for each in report.fused] == [(2, 0.25)]
    feeds = random_feeds(graph)
    np.testing.assert_allclose(run(new, feeds)[0], run(graph, feeds)[0], atol=2e-3 if half else 2e-5)


def test_fused_matmuls_of_onnx_runtime_with_rows_before_the_batch():
    own = {"domain": "com.microsoft"}
    g = axes_of({"q": ("S", "N", 2, D), "k": ("T", "N", 2, D), "v": ("T", "N", 2, 5)})
    scores = g.op("FusedMatMul", "q", "k", alpha=0.25, transB=1, transBatchA=1, transBatchB=1, **own)
    check_heads(g, g.op("FusedMatMul", g.op("Softmax", scores), "v", transBatchB=1, **own), (2, 2))


def test_einsums_that_do_not_name_their_result():
    g = axes_of({"q": ("N", H, "S", D), "k": ("N", H, "T", D), "v": ("N", H, "T", 5)})
    weights = g.op("Softmax", g.op("Einsum", "q", "k", equation="...id, ...jd"))
    turned = g.op("Einsum", weights, "v", equation="...ij, ...jd")  # the letters of the result are sorted
    check_heads(g, g.op("Transpose", turned, perm=[0, 1, 3, 2]), (H, H))


def test_matrices_whose_columns_are_rows():
    g = axes_of({"q": (D, "S"), "k": (D, "T"), "v": (5, "T")})
    scores = g.op("Gemm", "q", "k", transA=1, alpha=0.3)
    check_heads(g, g.op("Gemm", "v", g.op("Softmax", scores), transB=1), (1, 1))


def test_convolutions_with_keys_and_values():
    """Their groups are heads."""
    g = axes_of({"q": (1, H * D, "S", 1), "k": (1, H * D, 5), "v": (1, H * D, 5)})
    keys = g.op("Transpose", g.op("Reshape", "k", g.ints(H, D, 5)), perm=[0, 2, 1])
    scores = g.op("Conv", "q", g.op("Reshape", keys, g.ints(H * 5, D, 1, 1)), group=H)
    weights = g.op("Softmax", g.op("Reshape", scores, g.ints(H, 5, -1)), axis=1)
    weights = g.op("Reshape", weights, g.ints(1, H * 5, -1, 1))
    values = g.op("Reshape", "v", g.ints(H * D, 5, 1, 1))
    check_heads(g, g.op("Conv", weights, values, group=H), (H, H))


def test_convolutions_with_keys_and_values_of_one_head():
    """The softmax runs over the channels, beside an axis of size 1."""
    g = axes_of({name: (1, D, 1, S) for name in "qkv"})
    scores = g.op("Conv", "q", g.op("Transpose", "k", perm=[3, 1, 0, 2]))
    weights = g.op("Softmax", g.op("Add", scores, g.input("bias", (1, S, 1, 1))), axis=1)
    check_heads(g, g.op("Conv", weights, g.op("Transpose", "v", perm=[1, 3, 0, 2])), (1, 1))


def test_keys_that_are_padded_to_a_number():
    g = axes_of({name: ("N", 2, "S", D) for name in "qkv"})
    length = g.op("Shape", "q", start=2, end=3)
    more = g.op("Concat", g.ints(0, 0, 0, 0, 0, 0), g.op("Sub", g.ints(16), length), g.ints(0), axis=0)
    q, k, v = (g.op("Pad", name, more) for name in "qkv")
    hidden = g.op("Mul", g.cast(g.op("GreaterOrEqual", g.ints(*range(16)), length), FLOAT), g.const(-1e4))
    scores = g.op("Add", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), hidden)
    whole = g.op("MatMul", g.op("Softmax", scores), v)
    check_heads(g, g.op("Slice", whole, g.ints(0), length, g.ints(2)), (2, 2))


def test_keys_that_another_attention_gives():
    g = axes_of({name: ("N", "S", H * D) for name in "qkv"})
    past = [g.input(f"past_{name}", ("N", H, "P", D)) for name in "kv"]
    y = g.op("Attention", "q", "k", "v", "", *past, q_num_heads=H, kv_num_heads=H)
    g.nodes[-1].output.extend(["keys", "values"])
    other = g.input("other", ("N", H, "T", D))
    scores = g.op("MatMul", other, g.op("Transpose", "keys", perm=[0, 1, 3, 2]))
    result = g.op("MatMul", g.op("Softmax", scores), "values")
    report = check_same(g.model(result, g.op("Unsqueeze", y, g.ints(1))))
    assert (len(report.already), len(report.fused), report.unfused) == (1, 1, ())


@pytest.mark.parametrize("other", ["Mul", "Sin"])
def test_one_softmax_of_two_attentions(other):
    """Where the second one is no attention, it is computed as in the file, with the scores of the first."""
    g = Hand()
    second = g.op("MatMul", "k", g.op("Transpose", "v", perm=[0, 1, 3, 2]))
    second = g.op("Mul", second, g.const(0.5)) if other == "Mul" else g.op("Sin", second)
    both = g.op("Add", g.op("Concat", g.scores(), second, axis=1), g.input("bias", (1, 1, S, S)))
    first = g.op("Split", g.op("Softmax", both), g.ints(H, H), axis=1)
    g.nodes[-1].output.append("second")
    report = check_same(g.model(g.op("MatMul", first, "v"), g.op("MatMul", "second", "q")))
    assert (len(report.fused), len(report.unfused)) == ((2, 0) if other == "Mul" else (1, 1))


@pytest.mark.parametrize("between", [False, True])
def test_values_that_are_computed_from_the_weights(between):
    """Whether it is verified or not: an attention cannot take its own weights."""
    g = Hand()
    weights = g.op("Softmax", g.scores())
    twice = g.op("MatMul", weights, g.op("Relu", weights) if between else weights)
    model = g.model(g.op("MatMul", twice, "v"))
    for verify in (True, False):
        new, report = md.fuse(model, verify=verify)
        assert report.fused == ()
        assert list(new.graph.node) == list(model.graph.node)


def test_weights_whose_shape_is_read():
    """The softmax stays for it, beside the new node."""
    g = Hand()
    weights = g.op("Softmax", g.scores())
    shape = g.op("Reshape", g.cast(g.op("Shape", weights), FLOAT), g.ints(1, 1, 1, 4))
    report = check_same(g.model(g.op("MatMul", weights, "v"), shape))
    assert (len(report.fused), report.unfused) == (1, ())


PADDED = np.array([[1, 1, 1, 1, 0], [1, 0, 1, 0, 1], [1] * 5, [1] * 5, [1, 0, 0, 0, 0]], np.int32)


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("causal", [0, 1])
def test_attentions_of_onnx_runtime(past, causal):
    """Two layers of its two operators, between which ONNX's shape inference knows nothing."""
    own = {"domain": "com.microsoft", "num_heads": H, "unidirectional": causal}
    g = axes_of({"x": ("N", "S", H * D)})
    random = np.random.default_rng(0)
    weight, bias = (g.const(random.standard_normal((*rows, 3 * H * D)) * 0.2) for rows in ((H * D,), ()))
    mask = "" if past else g.input("mask", ("N", "S"), TensorProto.INT32)
    both, k, v = ("", "", "")
    if past:
        both, k, v = (
            g.input(name, (*two, "N", H, "P", D)) for name, two in zip("bkv", ((2,), (), ()), strict=True)
        )
    x = g.op("Attention", "x", weight, bias, mask, both, **own)
    g.nodes[-1].output.append("present")
    added = "" if past else g.input("added", (1, H, "S", "S"))
    y = g.op("MultiHeadAttention", x, "x", x, bias, mask, added, k, v, **own, scale=0.3)
    g.nodes[-1].output.extend(["keys", "values"] if past else [])
    results = [g.op("Unsqueeze", y, g.ints(1)), *(["keys", "values"] if past else [])]
    model = g.model(*results)
    new, report = fused(model)
    assert ([each.Hq for each in report.fused], report.unfused) == ([H, H], ())
    feeds = random_feeds(model) | ({} if past else {"mask": PADDED})
    for want, got in zip(run(model, feeds), run(new, feeds), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_attentions_of_onnx_runtime_with_numbers_of_keys():
    """As its optimizer writes a padding mask; the sizes of x are those that it was reshaped to."""
    own = {"domain": "com.microsoft"}
    g = axes_of({"tokens": ("N", "S", H, D), "ones": ("N", "S")})
    count = g.op("ReduceSum", g.cast("ones", TensorProto.INT32), g.ints(1), keepdims=0)
    size = g.op("Concat", g.op("Shape", "tokens", end=2), g.ints(-1), axis=0)
    x = g.op("FastGelu", g.op("Reshape", "tokens", size), **own)
    random = np.random.default_rng(0)
    for _ in range(2):
        weight, bias = (g.const(random.standard_normal((*rows, 3 * H * D)) * 0.2) for rows in ((H * D,), ()))
        x = g.op("Attention", x, weight, bias, count, num_heads=H, **own)
    model = g.model(g.op("Unsqueeze", x, g.ints(1)))
    new, report = fused(model)
    assert ([each.Hq for each in report.fused], report.unfused) == ([H, H], ())
    feeds = random_feeds(model) | {"ones": (np.arange(5) < np.arange(1, 6)[:, None]).astype(np.float32)}
    np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)


def test_attentions_behind_an_embedding_of_onnx_runtime():
    """The embedding counts the keys as well; ONNX's shape inference knows neither result."""
    own, random = {"domain": "com.microsoft"}, np.random.default_rng(0)
    g = axes_of({})
    ids, mask = (g.input(name, ("N", "S"), TensorProto.INT32) for name in ("ids", "mask"))
    table, places = (g.const(random.standard_normal((rows, H * D))) for rows in (7, 9))
    scale, shift = (g.const(random.standard_normal(H * D)) for _ in range(2))
    x = g.op("EmbedLayerNormalization", ids, "", table, places, "", scale, shift, mask, **own)
    g.nodes[-1].output.append("count")
    weight, bias = (g.const(random.standard_normal((*rows, 3 * H * D)) * 0.2) for rows in ((H * D,), ()))
    y = g.op("Attention", x, weight, bias, "count", num_heads=H, **own)
    model = g.model(g.op("Unsqueeze", y, g.ints(1)))
    new, report = fused(model)
    assert ([each.Hq for each in report.fused], report.unfused) == ([H], ())
    shown = (np.arange(5) < np.arange(1, 6)[:, None]).astype(np.int32)
    feeds = {"ids": random.integers(0, 7, (5, 5)).astype(np.int32), "mask": shown}
    np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)


def test_attention_that_is_tied_over_rows():
    """The scores are summed over the rows of an alignment, each of which has values of its own."""
    g = axes_of({name: (3, "S", "N", 2, D) for name in "qkv"})
    scores = g.op("Einsum", "q", "k", equation="rinhd,rjnhd->hnij")
    masked = g.op("Where", g.input("keep", (1, "N", 1, "S"), BOOL), scores, g.const(-1e9))
    y = g.op("Einsum", g.op("Softmax", masked), "v", equation="hnij,rjnhd->rinhd")
    check_heads(g, y, (2, 2))


def dead_rows(g, scores, mask, how):
    """Where all keys of a query are masked, or some are not."""
    shown = g.op("Not", g.op("Equal", scores, g.const(-np.inf))) if how == "scores" else mask
    seen = g.cast(g.op("ReduceMax", g.cast(shown, TensorProto.INT32), g.ints(-1), keepdims=1), BOOL)
    return seen if how == "some" else g.op("Not", seen)


@pytest.mark.parametrize("how", ["scores", "mask", "some"])
def test_weights_of_fully_masked_queries_are_zero(how):
    g = Hand()
    mask = g.input("mask", (B, 1, S, S), BOOL)
    scores = g.op("Add", g.scores(), g.op("Where", mask, g.const(0.0), g.const(-np.inf)))
    weights = g.op("Softmax", scores)
    zero = g.op("Expand", g.const(0.0), g.op("Shape", weights))
    chosen = (weights, zero) if how == "some" else (zero, weights)
    y = g.op("MatMul", g.op("Where", dead_rows(g, scores, mask, how), *chosen), "v")
    model = g.model(y)
    new, report = fused(model)
    assert [(each.mask, report.unfused) for each in report.fused] == [("bool", ())]
    assert "MatMul" not in {node.op_type for node in new.graph.node}  # the scores are not computed for it
    feeds = random_feeds(model)
    feeds["mask"][0, 0, 2] = False
    want, got = (run(each, feeds)[0] for each in (model, new))
    assert (want[0, :, 2] == 0).all()
    np.testing.assert_allclose(got, want, atol=2e-5)


def less_the_cosine_of_positions(g, scores):
    """As contextual positions are: sums of gates."""
    return g.op("Cos", g.op("CumSum", g.op("Sigmoid", scores), g.const(-1, np.int64)))


def less_the_maximum_of_queries(g, scores):
    return g.op("ReduceMax", scores, g.ints(-2), keepdims=1)


def less_what_one_head_selects(g, scores):
    return g.op("Relu", g.op("Gather", scores, g.ints(0), axis=1))


@pytest.mark.parametrize(
    "bias", [less_the_cosine_of_positions, less_the_maximum_of_queries, less_what_one_head_selects]
)
def test_a_bias_that_is_computed_from_the_scores(bias):
    g = Hand()
    scores = g.op("Mul", g.scores(), g.const(0.5))
    report = check_same(g.model(g.attend(g.op("Sub", scores, bias(g, scores)))))
    assert ([each.mask for each in report.fused], report.unfused) == (["float"], ())


def test_a_mask_that_is_computed_from_the_scores():
    """As those of the keys with the largest scores."""
    g = Hand()
    scores = g.op("Mul", g.scores(), g.const(0.5))
    g.nodes.append(helper.make_node("TopK", [scores, g.ints(3)], ["most", "at"], axis=-1))
    least = g.op("Slice", "most", g.ints(2), g.ints(3), g.ints(-1))
    masked = g.op("Where", g.op("Less", scores, least), g.const(-np.inf), scores)
    report = check_same(g.model(g.attend(masked)))
    assert ([each.mask for each in report.fused], report.unfused) == (["bool"], ())


@pytest.mark.parametrize("copied", ["Tile", "Expand"])
def test_one_query_that_is_copied_for_every_key(copied):
    """The fill is written as ones of the shape of the scores, times a number."""
    g = axes_of({"q": ("N", D), "k": ("N", "S", D)})
    length = g.op("Shape", "k", start=1, end=2)
    if copied == "Tile":
        flat = g.op("Tile", "q", g.op("Concat", g.ints(1), length, axis=0))
        many = g.op("Reshape", flat, g.op("Concat", g.ints(-1), length, g.ints(D), axis=0))
    else:
        many = g.op("Expand", g.op("Unsqueeze", "q", g.ints(1)), g.op("Shape", "k"))
    scores = g.op("ReduceSum", g.op("Mul", many, "k"), g.ints(-1), keepdims=0)
    scores = g.op("Reshape", scores, g.op("Concat", g.ints(-1, 1), length, axis=0))
    ones = g.op("Add", g.op("Sub", scores, scores), g.const(1.0))
    shown = g.input("keep", ("N", 1, "S"), BOOL)
    masked = g.op("Where", shown, scores, g.op("Mul", ones, g.const(-(2.0**32))))
    check_heads(g, g.op("MatMul", g.op("Softmax", g.op("Div", masked, g.const(2.0))), "k"), (1, 1))
