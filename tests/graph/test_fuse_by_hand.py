"""Graphs that no exporter writes, but people do: what is fused computes the same, and the rest stays."""

import pkgutil

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hand_graphs import B, D, H, Hand, S, check_same, fused, random_feeds, run
from onnx import TensorProto

import mha_deploy as md
from mha_deploy.graph.fuse.values import folded
from mha_deploy.graph.ir import is_op
from mha_deploy.graph.mixed_precision import plan_precision
from mha_deploy.graph.mutate import mutated
from mha_deploy.graph.roles import TO_BOOLEAN
from mha_deploy.runtime import measure_ranges

LOWER = np.tri(S, dtype=bool)
FLOAT, HALF, DOUBLE, BFLOAT = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.DOUBLE,
    TensorProto.BFLOAT16,
)
INT32, INT64, BOOL = TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL


# -- the order of the score axes ------------------------------------------------------------------


def filled(g, scores, mask):
    return g.op("Where", g.const(mask, bool), scores, g.const(-1e9))


def added(g, scores, mask):
    return g.op("Add", scores, g.const(np.where(mask, 0, -np.inf)))


MASKS = {"filled": filled, "added": added}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shown", [LOWER, LOWER.T], ids=["lower", "upper"])
def test_a_triangle_over_keys_and_queries(mask, shown):
    """Scores `[K, Q]`: the lower triangle hides past keys, and the upper one is the causal mask."""
    g = Hand()
    scores = g.op("MatMul", "k", g.op("Transpose", "q", perm=[0, 1, 3, 2]))
    weights = g.op("Softmax", MASKS[mask](g, scores, shown), axis=2)
    check_same(g.model(g.op("Einsum", weights, "v", equation="bhts,bhtd->bhsd")))


@pytest.mark.parametrize(
    ("order", "mask"),
    # Over heads and queries a triangle hides all keys of some queries: -inf would make them NaN.
    [("bths", "filled"), *((order, mask) for order in ("bsht", "hsbt", "sbht", "bhts") for mask in MASKS)],
)
def test_a_triangle_over_other_axes_than_queries_and_keys(order, mask):
    """With as many heads as keys and queries, only the order of the axes tells what a triangle hides."""
    g = Hand(shape=(S, S, S, D))
    scores = g.op("Einsum", "q", "k", equation=f"bshd,bthd->{order}")
    weights = g.op("Softmax", MASKS[mask](g, scores, LOWER), axis=order.index("t"))
    check_same(g.model(g.op("Einsum", weights, "v", equation=f"{order},bthd->bshd")))


@pytest.mark.parametrize("mask", MASKS)
def test_a_triangle_over_queries_and_keys_is_the_attribute(mask):
    g = Hand()
    report = check_same(g.model(g.attend(MASKS[mask](g, g.scores(), LOWER))))
    assert [(each.causal, each.mask) for each in report.fused] == [(True, "none")]


# -- broadcast triangles ----------------------------------------------------------------------------


def piece(g, value, rows, columns):
    return g.op("Slice", value, g.ints(0, 0), g.ints(rows, columns), g.ints(0, 1))


def beside(join, other):
    """A condition of a piece and a constant of all rows and columns."""
    return lambda g, part: g.op(join, part, g.const(np.full((S, S), other), bool))


CONDITIONS = {"or": beside("Or", False), "and": beside("And", True)}
CONDITIONS["expanded"] = lambda g, part: g.op("Expand", part, g.ints(1, 1, S, S))


@pytest.mark.parametrize(("rows", "columns"), [(1, S), (S, 1), (S, S)])
@pytest.mark.parametrize("spelled", [*CONDITIONS, "numbers", "choice"])
def test_a_piece_of_the_triangle_is_the_triangle_if_it_has_all_rows_and_columns(spelled, rows, columns):
    g = Hand()
    scores, part = g.scores(), piece(g, g.const(LOWER, bool), rows, columns)
    if spelled in CONDITIONS:
        masked = g.op("Where", CONDITIONS[spelled](g, part), scores, g.const(-np.inf))
    elif spelled == "numbers":
        hidden = g.op("Sub", g.const(1.0), g.cast(part, FLOAT))
        lowest = g.const(np.full((S, S), np.finfo(np.float32).min))
        masked = g.op("Add", scores, g.op("Mul", hidden, lowest))
    else:
        numbers = (g.const(np.zeros((S, S))), g.const(np.full((S, S), -np.inf)))
        masked = g.op("Add", scores, g.op("Where", part, *numbers))
    report = check_same(g.model(g.attend(masked)))
    assert [each.causal for each in report.fused] == [(rows, columns) == (S, S)]


def test_positions_that_do_not_begin_at_zero():
    """Shape inference made up a name for the number of queries in the mask: it is no size of its own."""
    g = Hand(shape=("B", H, "S", D))
    count = g.op("Squeeze", g.op("Shape", "q", start=2, end=3))
    keys = g.op("Range", g.const(0, np.int64), count, g.const(1, np.int64))
    queries = g.op(
        "Range", g.const(1, np.int64), g.op("Add", count, g.const(1, np.int64)), g.const(1, np.int64)
    )
    shown = g.op("LessOrEqual", keys, g.op("Unsqueeze", queries, g.ints(1)))
    model = g.model(g.attend(g.op("Where", shown, g.scores(), g.const(-np.inf))))
    report = check_same(onnx.shape_inference.infer_shapes(model))
    assert [(each.causal, each.mask) for each in report.fused] == [(False, "bool")]


# -- casts --------------------------------------------------------------------------------------------

LOSSY = {
    "int32": (INT32, FLOAT),
    "int64": (INT64, FLOAT),
    "int64 and double": (DOUBLE, INT64, FLOAT),
    "bool": (BOOL, FLOAT),
    "fp16": (HALF, FLOAT),
    "bf16": (BFLOAT, FLOAT),
    "uint8": (TensorProto.UINT8, FLOAT),
}


@pytest.mark.parametrize("types", LOSSY.values(), ids=LOSSY)
@pytest.mark.parametrize("where", ["scores", "weights"])
def test_casts_that_lose_values_stay(where, types):
    g = Hand()
    scores = g.scores()
    if where == "scores":
        result = g.attend(g.cast(scores, *types))
    else:
        result = g.op("MatMul", g.cast(g.op("Softmax", scores), *types), "v")
    _, report = fused(g.model(result))
    assert (len(report.fused), len(report.unfused)) == (0, 1)


def test_scores_as_integers_in_a_wide_softmax_stay():
    """The softmax is in double, which holds them; that they were integers on the way must not be lost."""
    g = Hand()
    weights = g.op("Softmax", g.cast(g.scores(), INT64, DOUBLE))
    _, report = fused(g.model(g.op("MatMul", g.cast(weights, FLOAT), "v")))
    assert (len(report.fused), len(report.unfused)) == (0, 1)


def test_casts_that_hold_every_value_are_nothing():
    g = Hand()
    weights = g.cast(g.op("Softmax", g.cast(g.scores(), FLOAT)), DOUBLE, FLOAT)
    assert len(check_same(g.model(g.op("MatMul", weights, "v"))).fused) == 1


def test_a_softmax_in_a_wider_type_is_the_attribute():
    g = Hand()
    q, k, v = (g.cast(name, HALF) for name in "qkv")
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    weights = g.cast(g.op("Softmax", g.cast(scores, FLOAT)), HALF)
    new, report = fused(g.model(g.cast(g.op("MatMul", weights, v), FLOAT)))
    assert len(report.fused) == 1
    (node,) = (each for each in new.graph.node if each.op_type == "Attention")
    assert {each.name: each.i for each in node.attribute}["softmax_precision"] == FLOAT


# -- constants that are computed ------------------------------------------------------------------------

SCALES = {
    "an integer of 1.5": lambda g: g.cast(g.const(1.5), INT64, FLOAT),
    "7 // 2": lambda g: g.cast(g.op("Div", g.ints(7), g.ints(2)), FLOAT),
    "-7 // -2": lambda g: g.cast(g.op("Div", g.ints(-7), g.ints(-2)), FLOAT),
    "a power of an integer": lambda g: g.cast(g.op("Pow", g.ints(7), g.const(0.5)), FLOAT),
    "a number as bool": lambda g: g.cast(g.const(0.3), BOOL, FLOAT),
    "a number rounded to fp16": lambda g: g.cast(g.const(0.3333), HALF, FLOAT),
    "a root": lambda g: g.op("Reciprocal", g.op("Sqrt", g.cast(g.ints(8), FLOAT))),
}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_a_computed_scale_is_the_number_that_the_graph_computes(scale):
    g = Hand()
    report = check_same(g.model(g.attend(g.op("Mul", g.scores(), scale(g)))))
    assert len(report.fused) == 1


@pytest.mark.parametrize(("op_type", "number"), [("Div", 0.0), ("Mul", np.inf), ("Mul", 0.0)])
def test_a_scale_that_no_attribute_has_is_named(op_type, number):
    g = Hand()
    report = fused(g.model(g.attend(g.op(op_type, g.scores(), g.const(number)))))[1]
    assert [(left.recognized, "scaled by" in left.reason) for left in report.unfused] == [(True, True)]


@pytest.mark.parametrize("op_type", ["Mul", "Div"])
@pytest.mark.parametrize("shape", [(2, 1, 1, 1), (2, H, S, 1)])
def test_a_temperature_that_is_an_input(op_type, shape):
    """The scores are multiplied by a tensor, and masked: no drawn temperature may be a number of masks."""
    g = Hand()
    scores = g.op(op_type, g.scores(), g.input("temperature", shape))
    masked = g.op("Where", g.input("m", [2, 1, S, S], BOOL), scores, g.const(-1e9))
    assert len(check_same(g.model(g.attend(masked))).fused) == 1


def test_a_fill_beyond_fp16_is_minus_infinity():
    g = Hand()
    fill = g.cast(g.const(-1e9), HALF, FLOAT)
    shown = g.input("m", [S, S], BOOL)
    _, report = fused(g.model(g.attend(g.op("Where", shown, g.scores(), fill))))
    assert [each.mask for each in report.fused] == ["bool"]


def test_a_factor_on_q_that_makes_the_batch_larger_stays_on_q():
    g = Hand()
    g.input("q", [1, H, S, D])
    g.op("Expand", g.const(0.3), g.ints(2, H, S, D))
    q = g.op("Mul", "q", g.nodes[-1].output[0])
    scores = g.op("MatMul", q, g.op("Transpose", "k", perm=[0, 1, 3, 2]))
    check_same(g.model(g.attend(scores)))


@pytest.mark.parametrize(
    ("shape", "count"), [((2, 1, 1, S), 1), ((2, 1, S, 1), 1), ((S,), 1), ((2, H, S, S), 0)]
)
def test_a_temperature_beside_scores_of_keys_and_queries(shape, count):
    """Scores `[K, Q]`: the last axis is that of the queries. Each, or each key, may have a temperature."""
    g = Hand()
    scores = g.op("MatMul", "k", g.op("Transpose", "q", perm=[0, 1, 3, 2]))
    weights = g.op("Softmax", g.op("Mul", scores, g.input("temperature", shape)), axis=2)
    report = check_same(g.model(g.op("Einsum", weights, "v", equation="bhts,bhtd->bhsd")))
    assert len(report.fused) == count
    assert all("not the same for all keys" in left.reason for left in report.unfused)


@pytest.mark.parametrize("spelled", ["negated", "subtracted"])
def test_attention_by_distance(spelled):
    """`-|q - k|²` is twice the matmul, less the squares: two signs that cancel."""
    g = Hand()
    squares = [g.op("ReduceSumSquare", name, g.ints(-1), keepdims=1) for name in "qk"]
    both = g.op("Add", squares[0], g.op("Transpose", squares[1], perm=[0, 1, 3, 2]))
    twice = g.op("Mul", g.scores(), g.const(0.5))
    pair = (both, twice) if spelled == "negated" else (twice, both)
    distance = g.op("Sub", *pair)
    report = check_same(g.model(g.attend(g.op("Neg", distance) if spelled == "negated" else distance)))
    assert [each.scale for each in report.fused] == [0.5]


@pytest.mark.parametrize("dtype", [FLOAT, TensorProto.DOUBLE])
def test_a_negative_scale_negates_q(dtype):
    g = Hand()
    q, k, v = (g.cast(name, dtype) for name in "qkv")
    scores = g.op("Neg", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])))
    report = check_same(g.model(g.cast(g.op("MatMul", g.op("Softmax", scores), v), FLOAT)))
    assert [each.scale for each in report.fused] == [-1.0]


EINSUMS = {
    "one head": ("bhsd,btd->bhst", "bhst,bte->bhse", (2, S, D), (H, 1)),
    "groups": ("bsgrd,btgd->bgrst", "bgrst,btge->bsgre", (2, S, 2, D), (2, 1)),
    "no batch": ("hsd,td->hst", "hst,te->hse", (S, D), (1, 1)),
}


@pytest.mark.parametrize("name", EINSUMS)
def test_an_einsum_without_the_axis_of_the_repeated_heads(name):
    first, second, keys, heads = EINSUMS[name]
    g = Hand()
    g.inputs |= {each: (FLOAT, keys) for each in "kv"}
    g.input("q", {"one head": (2, H, S, D), "groups": (2, S, 2, 2, D), "no batch": (H, S, D)}[name])
    weights = g.op("Softmax", g.op("Einsum", "q", "k", equation=first))
    y = g.op("Einsum", weights, "v", equation=second)
    report = check_same(g.model(g.op("Reshape", y, g.ints(1, 1, 1, -1))))
    assert [(each.Hq, each.Hkv) for each in report.fused] == [heads]


def turned(g, x):
    return g.op("Transpose", x, perm=[0, 1, 3, 2])


def stacked(g, *parts):
    wide = g.op("Concat", *(g.op("Unsqueeze", each, g.ints(2)) for each in parts), axis=2)
    return g.op("Reshape", wide, g.ints(B, -1, S, D))


def tiled_when_turned(g, x):
    thin = g.op("Transpose", g.op("Reshape", x, g.ints(B, 2, 1, S, D)), perm=[0, 1, 2, 4, 3])
    return turned(g, g.op("Reshape", g.op("Tile", thin, g.ints(1, 1, 2, 1, 1)), g.ints(B, H, D, S)))


def turned_heads(g, x):
    """The new axis is between the heads only behind the Transpose; before, it is between others."""
    thin = g.op("Transpose", g.op("Unsqueeze", x, g.ints(4)), perm=[0, 1, 4, 2, 3])
    return g.op("Reshape", g.op("Tile", thin, g.ints(1, 1, 2, 1, 1)), g.ints(B, H, S, D))


def joined_with_the_batch(g, x):
    wide = g.op("Tile", g.op("Unsqueeze", x, g.ints(2)), g.ints(1, 1, 2, 1, 1))
    flat = g.op("Transpose", g.op("Reshape", wide, g.ints(-1, S, D)), perm=[0, 2, 1])
    return turned(g, g.op("Reshape", flat, g.ints(B, H, D, S)))


REPEATS = {
    "joined with the batch": (2, joined_with_the_batch, 2),
    "stacked": (2, lambda g, x: stacked(g, x, x), 2),
    "chosen": (2, lambda g, x: g.op("Gather", x, g.ints(0, 0, 1, 1), axis=1), 2),
    "chosen from the end": (2, lambda g, x: g.op("Gather", x, g.ints(0, 0, 1, 1), axis=-3), 2),
    "tiled when turned": (2, tiled_when_turned, 2),
    "new axis elsewhere": (2, turned_heads, 2),
    "one head tiled": (1, lambda g, x: g.op("Tile", x, g.ints(1, H, 1, 1)), 1),
    "one head joined": (1, lambda g, x: g.op("Concat", *[x] * H, axis=1), 1),
    # All of them in turn is another order than that of Attention.
    "in turn": (2, lambda g, x: g.op("Gather", x, g.ints(0, 1, 0, 1), axis=1), H),
    "tiled in turn": (2, lambda g, x: g.op("Tile", x, g.ints(1, 2, 1, 1)), H),
    "uneven": (2, lambda g, x: g.op("Gather", x, g.ints(0, 0, 0, 1), axis=1), H),
    "stacked with others": (2, lambda g, x: stacked(g, x, g.op("Neg", x)), H),
}


@pytest.mark.parametrize("name", REPEATS)
def test_heads_that_are_repeated(name):
    """K and V are taken before each head was repeated in its place, however that is written."""
    given, repeat, heads = REPEATS[name]
    g = Hand()
    g.inputs |= {each: (FLOAT, (B, given, S, D)) for each in "kv"}
    weights = g.op("Softmax", g.op("MatMul", "q", turned(g, repeat(g, "k"))))
    report = check_same(g.model(g.op("MatMul", weights, repeat(g, "v"))))
    assert [(each.Hq, each.Hkv) for each in report.fused] == [(H, heads)]


def test_heads_that_are_repeated_behind_positions_that_start_after_the_past():
    """As many positions as new keys: from the length of the past to that of all keys."""
    g = Hand()
    g.inputs |= {"q": (FLOAT, ("B", H, "T", D))} | {each: (FLOAT, ("B", 2, "T", D)) for each in "kv"}
    pasts = [g.input(f"past_{each}", ("B", 2, "P", D)) for each in "kv"]
    batch, new, past = (
        g.op("Gather", g.op("Shape", of), g.const(at, np.int64))
        for of, at in (("k", 0), ("k", 2), (pasts[0], 2))
    )
    end = g.op("Add", new, past)
    positions = g.cast(g.op("Range", past, end, g.const(1, np.int64)), FLOAT)
    rotated = g.op("Mul", "k", g.op("Cos", g.op("Unsqueeze", positions, g.ints(1))))

    def repeated(x, past):
        x = g.op("Unsqueeze", g.op("Concat", past, x, axis=2), g.ints(2))
        sizes = [g.op("Unsqueeze", each, g.ints(0)) for each in (batch, end)]
        wide = g.op("Concat", sizes[0], g.ints(2, 2), sizes[1], g.ints(D), axis=0)
        joined = g.op("Concat", sizes[0], g.ints(H), sizes[1], g.ints(D), axis=0)
        return g.op("Reshape", g.op("Expand", x, wide), joined)

    weights = g.op("Softmax", g.op("MatMul", "q", turned(g, repeated(rotated, pasts[0]))))
    report = check_same(g.model(g.op("MatMul", weights, repeated("v", pasts[1]))))
    assert [(each.Hq, each.Hkv) for each in report.fused] == [(H, 2)]


# -- what the recognizer cannot handle ---------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (S, S)])
def test_nan_in_a_mask_does_not_end_the_run(shape):
    g = Hand()
    mask = g.op("Add", g.const(np.zeros((S, S))), g.const(np.full(shape, np.nan)))
    model = g.model(g.attend(g.op("Add", g.scores(), mask)))
    new, _ = fused(model)
    feeds = random_feeds(model)
    np.testing.assert_array_equal(run(new, feeds)[0], run(model, feeds)[0])


DOUBLED = {
    "conditions": ("And", lambda g, x: g.op("Where", x, g.scores(), g.const(-np.inf))),
    "numbers": ("Add", lambda g, x: g.op("Add", g.scores(), x)),
    "scales": ("Mul", lambda g, x: g.op("Mul", g.scores(), x)),
}


@pytest.mark.parametrize("name", DOUBLED)
def test_a_value_that_is_reached_in_very_many_ways(name):
    """`x + x` forty times: a walk that goes every way would not come back."""
    op_type, apply = DOUBLED[name]
    g = Hand()
    x = g.const(LOWER, bool) if op_type == "And" else g.const(0.0 if op_type == "Add" else 1.0)
    for _ in range(40):
        x = g.op(op_type, x, x)
    assert len(check_same(g.model(g.attend(apply(g, x)))).fused) == 1


@pytest.mark.parametrize("spelled", ["added", "put", "added twice"])
def test_masked_scores_that_are_bounded_by_the_lowest_number(spelled):
    """`max(scores + mask, lowest)`: a query whose mask is -inf everywhere is the mean of V, not 0."""
    g = Hand()
    lowest = g.const(np.finfo(np.float32).min)
    if spelled == "put":
        masked = g.op("Where", g.input("m", [2, 1, S, S], BOOL), g.scores(), g.const(-np.inf))
    else:
        masked = g.op("Add", g.scores(), g.input("m", [2, 1, S, S]))
        masked = g.op("Add", masked, "m") if spelled == "added twice" else masked
    model = g.model(g.attend(g.op("Max", masked, lowest)))
    new, report = fused(model)
    assert len(report.fused) == (spelled != "added twice")
    feeds = random_feeds(model)
    if spelled == "put":
        feeds["m"][:, :, 2] = False
    else:
        feeds["m"] = np.where(feeds["m"] < 0, np.float32(-np.inf), np.float32(0))
        feeds["m"][:, :, 2] = -np.inf
        feeds["m"][:, :, 3, 1:] = np.finfo(np.float32).min
    np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)


def test_masked_scores_of_float16_that_are_bounded_by_its_lowest_number():
    g = Hand()
    mask = g.input("m", [2, 1, S, S])
    q, k, v, mask = (g.cast(name, TensorProto.FLOAT16) for name in ("q", "k", "v", mask))
    scores = g.op("Add", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), mask)
    scores = g.op("Max", scores, g.const(-65504.0, np.float16))
    weights = g.cast(g.op("Softmax", g.cast(scores, TensorProto.FLOAT)), TensorProto.FLOAT16)
    model = g.model(g.cast(g.op("MatMul", weights, v), TensorProto.FLOAT))
    new, report = fused(model)
    assert [len(each.notes) for each in report.fused] == [1]  # a query without keys and scores beyond 16
    feeds = random_feeds(model)
    feeds["m"] = np.where(feeds["m"] < 0, np.float32(-65504), np.float32(0))
    feeds["m"][:, :, 2] = -65504
    feeds["m"][:, :, 3] = -np.inf
    np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=5e-3)


PARTS = ["pattern.read_scores", "_boundary", "write.write_attention", "mask_pattern._visible_keys"]


@pytest.mark.parametrize("part", PARTS)
def test_a_failure_of_the_recogniser_leaves_one_attention_as_it_was(part, monkeypatch):
    """A part of it fails for the first of two attentions that share a mask; the second is fused."""
    g = Hand()
    shown = g.input("m", [S, S], BOOL)
    first = g.attend(g.op("Where", shown, g.scores(), g.const(-np.inf)))
    name = next(node.name for node in g.nodes if node.op_type == "Softmax")
    again = g.op("MatMul", first, g.op("Transpose", "k", perm=[0, 1, 3, 2]))
    model = g.model(g.attend(g.op("Where", shown, again, g.const(-np.inf))))

    place = f"mha_deploy.graph.fuse.{part}"
    right = pkgutil.resolve_name(place)

    def fails(*given, **named):
        names = [getattr(each, "name", getattr(each, "prefix", None)) for each in given]
        names += [each.softmax.name for each in given if hasattr(each, "softmax")]
        names += [each.node.name for each in given if hasattr(each, "node") and hasattr(each.node, "name")]
        if name in names:
            raise ZeroDivisionError("a bug")
        return right(*given, **named)

    monkeypatch.setattr(place, fails)
    report = check_same(model)
    assert len(report.fused) == 1
    assert [(left.name, "a bug" in left.reason) for left in report.unfused] == [(name, True)]


# -- scores beside those of the keys -----------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["none", "causal", "filled", "added"])
@pytest.mark.parametrize("shape", [(1, H, 1, 1), (1, 1, 1, 1), (2, H, S, 1), (1, H, 1, 2)])
def test_an_attention_sink_is_a_key_of_zeros(mask, shape):
    """As in gpt-oss: a learned score of each head is appended, and its weight is dropped."""
    g = Hand()
    scores = g.op("Mul", g.scores(), g.const(0.3))
    if mask == "causal":
        scores = g.op("Where", g.const(np.tri(S, dtype=bool), bool), scores, g.const(-np.inf))
    elif mask == "filled":
        scores = g.op("Where", g.input("m", [2, 1, S, S], BOOL), scores, g.const(-1e9))
    elif mask == "added":
        scores = g.op("Add", scores, g.input("bias", [2, H, S, S]))
    sink = g.op(
        "Expand", g.const(np.random.default_rng(0).standard_normal(shape)), g.ints(2, H, S, shape[-1])
    )
    both = g.op("Concat", scores, sink, axis=-1)
    shifted = g.op("Sub", both, g.op("ReduceMax", both, g.ints(-1), keepdims=1))
    ends = [g.ints(each) for each in (0, -shape[-1], -1)]
    report = check_same(g.model(g.op("MatMul", g.op("Slice", g.op("Softmax", shifted), *ends), "v")))
    assert (len(report.fused), report.unfused) == (1, ())


def with_keys_of_zeros(kind):
    """Attention that has keys of zeros behind its own: the file's, or those that its fusion appends."""
    g = Hand()
    shown = g.input("shown", [B, 1, S, S], BOOL)
    if kind == "concatenated":
        k, v = (g.op("Concat", name, g.const(np.zeros((B, H, 1, D))), axis=2) for name in "kv")
        scores = g.op("MatMul", "q", g.op("Transpose", k, perm=[0, 1, 3, 2]))
        return g.model(g.op("MatMul", g.op("Softmax", scores), v))
    if kind == "instead of masked ones":
        return g.model(g.attend(g.op("Where", shown, g.scores(), g.const(-5.0))))
    if kind == "a sink behind two masks":
        scores = g.op("Where", g.const(LOWER, bool), g.scores(), g.const(-np.inf))
        scores = g.op("Where", shown, scores, g.const(-1e4))
    else:
        scores = g.op("Where", shown, g.scores(), g.const(-1e4)) if "mask" in kind else g.scores()
    sink = g.const(np.full((B, H, S, 1), 0.0 if "zero" in kind else 1.0))
    weights = g.op("Softmax", g.op("Concat", scores, sink, axis=-1))
    ends = [g.ints(each) for each in (0, -1, -1)]
    return g.model(g.op("MatMul", g.op("Slice", weights, *ends), "v"))


@pytest.mark.parametrize(
    ("kind", "of_masks"),
    [
        ("a sink", ["mask dropped"]),
        ("a sink of zero", []),
        ("a sink behind a mask", ["mask dropped", "mask off by one"]),
        ("a sink behind two masks", ["mask dropped", "mask off by one"]),
        ("concatenated", []),
        ("instead of masked ones", ["mask dropped", "mask off by one"]),
    ],
)
def test_mutations_are_those_of_the_models_own_keys(kind, of_masks):
    model = with_keys_of_zeros(kind)
    proto, report = fused(model)
    assert len(report.fused) == 1
    new, feeds = ir.from_proto(proto), random_feeds(model)
    (right,) = run(new, feeds)
    for mutation in ("newest entry zero", "values beyond a length", "mask dropped", "mask off by one"):
        wrong = mutated(new, mutation)
        assert (wrong is not None) == (mutation in of_masks or not mutation.startswith("mask")), mutation
        if wrong is not None:
            assert np.abs(run(wrong, feeds)[0] - right).max() > 1e-3, mutation


def relaxed(g, scores):
    """Scores less their maximum, both divided by 32: PyTorch's `amax` drops the axis, and upcasts FP16."""
    small = g.op("Div", scores, g.const(32.0))
    top = g.cast(g.op("ReduceMax", g.cast(small, DOUBLE), g.ints(-1), keepdims=0), FLOAT)
    return g.op("Mul", g.op("Sub", small, g.op("Unsqueeze", top, g.ints(3))), g.const(32.0))


AFTER_THE_MAXIMUM = {
    "nothing": (lambda g, scores: scores, 1),
    "a mask that is added": (lambda g, scores: added(g, scores, LOWER), 1),
    "a fill of -inf": (lambda g, scores: g.op("Where", g.const(LOWER, bool), scores, g.const(-np.inf)), 1),
    "a finite fill": (lambda g, scores: g.op("Where", g.const(LOWER, bool), scores, g.const(-3.0)), 0),
    "a softcap": (lambda g, scores: g.op("Tanh", scores), 0),
}


@pytest.mark.parametrize("after", AFTER_THE_MAXIMUM)
def test_a_maximum_that_is_subtracted_before_the_softmax_cancels(after):
    change, count = AFTER_THE_MAXIMUM[after]
    g = Hand()
    biased = g.op("Add", g.scores(), g.input("bias", (1, H, S, S)))
    report = check_same(g.model(g.attend(change(g, relaxed(g, biased)))))
    assert [each.scale for each in report.fused] == [1.0] * count
    assert len(report.unfused) == 1 - count


def test_a_sink_that_is_scaled_later_is_named():
    g = Hand()
    sink = g.const(np.zeros((2, H, S, 1)))
    both = g.op("Mul", g.op("Concat", g.scores(), sink, axis=-1), g.const(0.3))
    weights = g.op("Slice", g.op("Softmax", both), g.ints(0), g.ints(-1), g.ints(-1))
    report = check_same(g.model(g.op("MatMul", weights, "v")))
    assert [left.recognized for left in report.unfused] == [True]


def test_attentions_that_share_a_mask_in_any_order():
    """Two softmaxes, then the matmul of the second: the mask is written before both nodes."""
    g = Hand()
    bias = g.op("Mul", g.input("m", [2, 1, 1, S]), g.const(2.0))
    one, other = (g.op("Softmax", g.op("Add", g.scores(), bias)) for _ in range(2))
    second = g.op("MatMul", other, "v")
    first = g.op("MatMul", one, "k")
    model = g.model(first, second)
    assert len(check_same(model).fused) == 2
    onnx.checker.check_model(fused(model)[0])


WITH_PAST = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[2,S,96] x, float[2,4,P,8] pk, float[2,4,P,8] pv, float[96,96] w, bool c) => (float[2,4,S,8] y)
<int64[2] flat = {-1, 96}, int64[5] shape = {2, -1, 3, 4, 8}, int64[3] parts = {1, 1, 1}, int64[1] two = {2},
 int64[1] T = {3}, int64[1] all = {-1}> { BODY }
"""
STEP = """
    x2 = Reshape (x, flat)
    y2 = Gemm <transB = 1> (x2, w)
    x5 = Reshape (y2, shape)
    q5, k5, v5 = Split <axis = 2> (x5, parts)
    q4 = Squeeze (q5, two)
    k4 = Squeeze (k5, two)
    v4 = Squeeze (v5, two)
    q = Transpose <perm = [0, 2, 1, 3]> (q4)
    kn = Transpose <perm = [0, 2, 1, 3]> (k4)
    vn = Transpose <perm = [0, 2, 1, 3]> (v4)
    k = Concat <axis = -2> (pk, kn)
    v = Concat <axis = -2> (pv, vn)
    s = Einsum <equation = "...sd,...td->...st"> (q, k)
    sizes = Shape (s)
    t = Gather (sizes, T)
    rows = Concat <axis = 0> (all, t)
    s2 = Reshape (s, rows)
    p2 = Softmax (s2)
    p = Reshape (p2, sizes)
"""
PLACES = {
    "graph": STEP + 'y = Einsum <equation = "bhst,bhtd->bhsd"> (p, v)',
    "branch": f"""y = If (c) <
        then_branch = a () => (float[2,4,S,8] one) {{ {STEP} one = MatMul (p, v) }},
        else_branch = b () => (float[2,4,S,8] other) {{ {STEP} o = MatMul (p, v) other = Neg (o) }}>""",
}


@pytest.mark.parametrize("place", PLACES)
def test_keys_behind_a_past(place):
    """Their length is a sum, and no shape is stated inside a branch."""
    model = onnx.parser.parse_model(WITH_PAST.replace("BODY", PLACES[place]))
    new, report = fused(model)
    assert (len(report.fused), report.unfused) == (2 if place == "branch" else 1, ())
    random = np.random.default_rng(0)
    for P, length, taken in ((3, 2, True), (0, 4, False), (5, 1, True)):
        sizes = {"x": (2, length, 96), "pk": (2, 4, P, 8), "pv": (2, 4, P, 8), "w": (96, 96)}
        feeds = {name: random.standard_normal(each).astype(np.float32) for name, each in sizes.items()}
        feeds["c"] = np.array(taken)
        np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)


@pytest.mark.parametrize("shape", [(1, H, S, D), (2, 1, S, D), (1, 1, S, D)])
def test_a_softmax_of_rows_keeps_axes_of_size_1(shape):
    g = Hand(shape)
    scores = g.scores()
    rows = g.op("Softmax", g.op("Reshape", scores, g.ints(-1, shape[2])))
    weights = g.op("Reshape", rows, g.op("Shape", scores))
    assert len(check_same(g.model(g.op("MatMul", weights, "v"))).fused) == 1


def test_names_of_inputs_and_initializers_are_taken():
    g = Hand()
    scores = g.op("Add", g.scores(), g.input("Softmax_3/bias", [2, 1, 1, S]))
    model = g.model(g.op("Mul", g.attend(scores), g.const(0.5)))
    assert [node.name for node in model.graph.node if node.op_type == "Softmax"] == ["Softmax_3"]
    (constant,) = model.graph.initializer
    constant.name = model.graph.node[-2].input[1] = "Softmax_3/attention"
    report = check_same(model)
    assert [each.name for each in report.fused] == ["Softmax_3_2"]


CHUNKS = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[B,S,96] x) => (float[B,4,S,8] y)
<int64[1] i0 = {0}, int64[1] i1 = {1}, int64[1] i2 = {2}, int64[1] i3 = {3}, int64[1] last = {-1},
 int64[2] heads = {4, 8}, int64[1] end = {9223372036854775807}> {
    sizes = Shape (x)
    width = Gather (sizes, last)
    above = Add (width, i2)
    one = Div (above, i3)
    two = Mul (one, i2)
    three = Mul (one, i3)
    axis = Mod (last, i3)
    q3 = Slice (x, i0, one, i2)
    k3 = Slice (x, one, two, i2)
    v3 = Slice (x, two, three, i2)
    shape3 = Shape (q3)
    front = Slice (shape3, i0, axis)
    after = Add (axis, i1)
    back = Slice (shape3, after, end)
    shape4 = Concat <axis = 0> (front, heads, back)
    q4 = Reshape (q3, shape4)
    k4 = Reshape (k3, shape4)
    v4 = Reshape (v3, shape4)
    q = Transpose <perm = [0, 2, 1, 3]> (q4)
    kt = Transpose <perm = [0, 2, 3, 1]> (k4)
    v = Transpose <perm = [0, 2, 1, 3]> (v4)
    s = MatMul (q, kt)
    p = Softmax (s)
    y = MatMul (p, v)
}
"""


def test_chunks_and_axes_that_the_file_computes():
    """As TorchScript's exporter writes `chunk` and `unflatten`."""
    report = check_same(onnx.parser.parse_model(CHUNKS))
    assert [(each.Hq, each.D) for each in report.fused] == [(4, 8)]


SLICED = """<ir_version: 10, opset_import: ["" : 23]>
g (float[B,2,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v, KIND[B,1,N,N] m) => (float[B,2,S,8] y)
<int64[1] two = {2}, int64[1] three = {3}, int64[1] none = {0}, float low = {-1e9}> {
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    s = MatMul (q, kt)
    shape = Shape (q)
    size = Gather (shape, two)
    rows = Slice (m, none, size, two)
    mask = Slice (rows, none, size, three)
    masked = APPLIED
    w = Softmax (masked)
    y = MatMul (w, v)
}"""


@pytest.mark.parametrize(("kind", "applied"), [("bool", "Where (mask, s, low)"), ("float", "Add (s, mask)")])
def test_a_mask_that_is_cut_to_the_length_may_be_a_single_number(kind, applied):
    model = onnx.parser.parse_model(SLICED.replace("KIND", kind).replace("APPLIED", applied))
    new, report = fused(model)
    assert len(report.fused) == 1
    random = np.random.default_rng(0)
    for size, length in ((1, 4), (4, 4), (7, 4), (1, 1)):
        feeds = {name: random.standard_normal((2, 2, length, 8)).astype(np.float32) for name in "qkv"}
        mask = random.standard_normal((2, 1, size, size)).astype(np.float32)
        feeds["m"] = mask > 0 if kind == "bool" else mask
        np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)


def test_a_sum_of_exponentials_in_a_wider_type_behind_v():
    """As PyTorch's exporter writes `(scores.exp() @ v) / scores.exp().sum(-1)` in float16."""
    g = Hand()
    powers = g.op("Exp", g.scores())
    wide = g.op("ReduceSum", g.cast(powers, TensorProto.DOUBLE), g.ints(-1), keepdims=1)
    y = g.op("Div", g.op("MatMul", powers, "v"), g.cast(wide, FLOAT))
    assert len(check_same(g.model(y)).fused) == 1


def test_weights_that_are_masked_once_more_where_positions_are_added():
    """ESPnet's relative positions: a second matmul is no mask, however large it is."""
    g = Hand()
    table = g.const(np.random.default_rng(0).standard_normal((D, S)))
    mask = g.input("m", (B, 1, 1, S), BOOL)
    scores = g.op("Add", g.scores(), g.op("MatMul", "q", table))
    lowest = g.const(np.finfo(np.float32).min)
    weights = g.op("Softmax", g.op("Where", mask, scores, lowest))
    y = g.op("MatMul", g.op("Where", mask, weights, g.const(0.0)), "v")
    assert len(check_same(g.model(y)).fused) == 1


# -- a mask of constants, whose sizes the graph computes --------------------------------------------

TABLE = """<ir_version: 10, opset_import: ["" : 18]>
table (float[B,2,4,8] q, float[B,2,4,8] k, float[B,2,4,8] v) => (float[B,2,4,8] y)
<int64 two = {2}, int64[1] zero = {0}, int64[1] heads = {2}> {
    sizes = Shape (q)
    length = Gather (sizes, two)
    length_1d = Unsqueeze (length, zero)
    shape = Concat <axis = 0> (length_1d, length_1d, heads)
    places = Reshape (rows, shape)
    bias = Transpose <perm = [2, 0, 1]> (places)
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    scores = MatMul (q, kt)
    biased = Add (scores, bias)
    weights = Softmax <axis = -1> (biased)
    y = MatMul (weights, v)
}"""


@pytest.mark.parametrize("length", [4, "S"])
def test_a_table_that_is_laid_out_by_fixed_sizes_is_a_constant(length):
    model = onnx.parser.parse_model(TABLE.replace(",4,8]", f",{length},8]"))
    rows = np.random.default_rng(0).standard_normal((16, 2)).astype("f")
    model.graph.initializer.append(onnx.numpy_helper.from_array(rows, "rows"))
    new, report = md.fuse(model)
    assert report.complete
    (node,) = (node for node in new.graph.node if node.op_type == "Attention")
    constants = {each.name: onnx.numpy_helper.to_array(each) for each in new.graph.initializer}
    assert (node.input[3] in constants) is (length == 4)
    if length == 4:
        np.testing.assert_array_equal(constants[node.input[3]][0], rows.reshape(4, 4, 2).transpose(2, 0, 1))


def by_einsum(g):
    return g.op("Einsum", "q", g.const(draw(S, D)), equation="bhsd,td->bhst")


def by_matmul(g):
    return g.op("Mul", g.op("MatMul", "q", g.const(draw(D, S))), g.const(0.5))


def draw(*shape):
    return np.random.default_rng(1).standard_normal(shape)


@pytest.mark.parametrize("second", [None, by_einsum], ids=["one", "two"])
def test_biases_by_matmuls_are_no_masks(second):
    """Relative positions by rows and by columns, as in SAM: no number in them hides a key."""
    g = Hand()
    terms = [by_matmul, *([second] if second else [])]
    scores = g.scores()
    for each in terms:
        scores = g.op("Add", scores, each(g))
    model = g.model(g.attend(scores))
    assert len(check_same(model).fused) == 1
    new = ir.from_proto(fused(model)[0])
    assert not any(is_op(node, *TO_BOOLEAN, "Where") for node in new.graph)
    plan = plan_precision(new, measure_ranges(new, {"one": random_feeds(model)}))
    assert not plan.kept, plan.lines()
    assert not plan.fully_masked


def by_pairs(g):
    """-∞ but for pairs of two tokens that are both there."""
    there = g.input("m", (B, 1, S, 1))
    pairs = g.op("MatMul", there, g.op("Transpose", there, perm=[0, 1, 3, 2]))
    return g.op("Mul", g.op("Sub", g.const(1.0), pairs), g.const(LOWEST))


def by_rows(g):
    """-∞ in the rows of tokens that are not there, by a matmul with ones."""
    there = g.op("Greater", g.input("m", (B, 1, S, 1)), g.const(0.5))
    return g.op("MatMul", g.op("Where", there, g.const(0.0), g.const(LOWEST)), g.const(np.ones((1, S))))


def by_gemm(g):
    """A mask that a Gemm adds to a product."""
    gone = g.op("Where", g.op("Greater", g.input("m", (S, 1)), g.const(0.5)), g.const(0.0), g.const(LOWEST))
    return g.op("Gemm", g.const(draw(S, D)), g.const(draw(D, S)), gone)


def copied(g):
    """An input with -∞ in some rows, copied over the keys by a matmul with ones."""
    return g.op("MatMul", g.input("m", (B, 1, S, 1)), g.const(np.ones((1, S))))


def copied_by_einsum(g):
    return g.op("Einsum", g.input("m", (B, 1, S)), g.const(np.ones(S)), equation="bhs,t->bhst")


LOWEST = np.finfo(np.float32).min


@pytest.mark.parametrize(
    ("mask", "numbers"),
    [
        *((mask, (1.0, 0.0)) for mask in (by_pairs, by_rows, by_gemm)),
        *((mask, (0.0, LOWEST)) for mask in (copied, copied_by_einsum)),
    ],
)
def test_a_mask_that_a_matmul_computes_is_a_mask(mask, numbers):
    """A fully masked query attends to all keys alike, which -inf would not."""
    g = Hand()
    model = g.model(g.attend(g.op("Add", g.scores(), mask(g))))
    new, report = fused(model)
    assert len(report.fused) == 1
    feeds = random_feeds(model)
    there = np.arange(feeds["m"].size).reshape(feeds["m"].shape) % S < 4
    feeds["m"] = np.where(there, *map(np.float32, numbers))
    for want, got in zip(run(model, feeds), run(new, feeds), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_numbers_that_are_drawn_follow_from_no_constants():
    text = """<ir_version: 10, opset_import: ["" : 18]> g () => (float[2,3] y, float[2,3] z)
    <float[3] held = {1.0, 2.0, 3.0}> {
        drawn = RandomNormal <shape = [2, 3]> () y = Add (drawn, held)
        size = Constant <value_ints = [2, 3]> () z = Expand (held, size)
    }"""
    graph = ir.from_proto(onnx.parser.parse_model(text)).graph
    random, fixed = graph.outputs
    assert folded(random) is None
    np.testing.assert_array_equal(folded(fixed), [[1, 2, 3]] * 2)
