"""Sizes that only a run knows, or that follow from others: the attentions behind them are one node."""

import numpy as np
import pytest
from hand_graphs import D, H, Hand, fused, random_feeds, run
from onnx import TensorProto

END = 2**63 - 1
INT64 = TensorProto.INT64


def axes_of(inputs):
    g = Hand()
    g.inputs = {name: (TensorProto.FLOAT, shape) for name, shape in inputs.items()}
    return g


def attend(g, q, k, v, mask=None):
    """By einsums, which copy a single key: lengths must be known to be equal."""
    scores = g.op("Einsum", q, k, equation="bqhd,bkhd->bhqk")
    scores = scores if mask is None else g.op("Where", mask, scores, g.const(-1e9))
    return g.op("Einsum", g.op("Softmax", scores), v, equation="bhqk,bkhd->bqhd")


def check(g, y, *changes, count=1):
    """Attentions that compute the same, whose file has only names of sizes that the inputs have."""
    model = g.model(y)
    new, report = fused(model)
    assert (len(report.fused), report.unfused) == (count, ())
    for each in new.graph.value_info:
        assert not any("." in dim.dim_param for dim in each.type.tensor_type.shape.dim)
    for change in changes:
        feeds = random_feeds(model) | change
        np.testing.assert_allclose(run(new, feeds)[0], run(model, feeds)[0], atol=2e-5)


def sized(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_a_cache_up_to_a_position():
    """The position is computed for keys and values apart, and the mask has as many columns."""
    g = axes_of({"q": ("N", "S", H, D), "k": ("N", "L", H, D), "v": ("N", "L", H, D)})
    g.inputs["start"] = (INT64, ())
    length = [g.op("Squeeze", g.op("Shape", "q", start=1, end=2), g.ints(0)) for _ in range(3)]
    ends = [g.op("Add", "start", each) for each in length]
    k, v = (
        g.op("Slice", name, g.ints(0), g.op("Unsqueeze", end, g.ints(0)), g.ints(1))
        for name, end in zip("kv", ends, strict=False)
    )
    zero, one = (g.const(number, np.int64) for number in (0, 1))
    rows = g.op("Add", g.op("Range", zero, length[2], one), "start")
    columns = g.op("Range", zero, ends[2], one)
    mask = g.op("LessOrEqual", g.op("Unsqueeze", columns, g.ints(0)), g.op("Unsqueeze", rows, g.ints(1)))
    starts = [{"q": sized(5, 2, H, D), "start": np.array(number)} for number in (0, 2, 3)]
    check(g, attend(g, "q", k, v, mask), *starts)


@pytest.mark.parametrize("joined", [False, True])
def test_the_row_of_a_table_at_a_position(joined):
    """Biases of one query; bounds of two axes are joined."""
    g = axes_of({"q": ("N", 1, H, D), "k": ("N", "L", H, D), "v": ("N", "L", H, D)})
    g.inputs["at"] = (INT64, ())
    begin, end = (
        g.op("Unsqueeze", each, g.ints(0)) for each in ("at", g.op("Add", "at", g.const(1, np.int64)))
    )
    length, table = g.op("Shape", "k", start=1, end=2), g.const(sized(1, H, 8, 8))
    if joined:
        bounds = [g.op("Concat", *each, axis=0) for each in ((g.ints(0), begin), (length, end))]
        row = g.op("Slice", table, *bounds, g.ints(3, 2))
    else:
        row = g.op("Slice", g.op("Slice", table, begin, end, g.ints(2)), g.ints(0), length, g.ints(3))
    scores = g.op("Add", g.op("Einsum", "q", "k", equation="bqhd,bkhd->bhqk"), row)
    y = g.op("Einsum", g.op("Softmax", scores), "v", equation="bhqk,bkhd->bqhd")
    check(g, y, *({"at": np.array(number)} for number in (0, 3, 7)))


def test_a_new_key_between_others():
    """As a slice that is updated is written with concatenations."""
    g = axes_of({"q": ("N", 1, H, D), "k": ("N", 6, H, D), "v": ("N", 6, H, D)})
    g.inputs |= {name: (TensorProto.FLOAT, ("N", 1, H, D)) for name in ("new_k", "new_v")}
    g.inputs["at"] = (INT64, (1,))
    behind = g.op("Add", "at", g.ints(1))
    k, v = (
        g.op(
            "Concat",
            g.op("Slice", name, g.ints(0), "at", g.ints(1)),
            f"new_{name}",
            g.op("Slice", name, behind, g.ints(END), g.ints(1)),
            axis=1,
        )
        for name in "kv"
    )
    mask = g.op("LessOrEqual", g.ints(*range(6)), "at")
    check(g, attend(g, "q", k, v, mask), *({"at": np.array([number])} for number in (0, 3, 5)))


def test_keys_around_a_context():
    """What is cut is as long as two inputs say."""
    g = axes_of({"right": ("P", "N", H * D), "x": ("T", "N", H * D), "left": ("L", "N", H * D)})
    both = g.op("Concat", "right", "x", axis=0)
    first = g.op("Shape", "right", start=0, end=1)
    parts = [
        g.op("Slice", both, g.ints(0), first, g.ints(0)),
        g.op("Slice", both, first, g.ints(END), g.ints(0)),
    ]
    k = g.op("Concat", parts[0], "left", parts[1], axis=0)
    length = {name: g.op("Shape", value, start=0, end=1) for name, value in (("q", both), ("k", k))}
    batch = g.op("Mul", g.op("Shape", "x", start=1, end=2), g.ints(H))

    def heads(value, name):
        shape = g.op("Concat", length[name], batch, g.ints(D), axis=0)
        return g.op("Transpose", g.op("Reshape", value, shape), perm=[1, 0, 2])

    scores = g.op("MatMul", heads(both, "q"), g.op("Transpose", heads(k, "k"), perm=[0, 2, 1]))
    apart = g.op("Concat", g.op("Shape", "x", start=1, end=2), g.ints(-1), length["q"], length["k"], axis=0)
    mask = g.input("mask", ("N", 1, 1, "K"), TensorProto.BOOL)
    masked = g.op("Where", mask, g.op("Reshape", scores, apart), g.const(-1e9))
    joined = g.op("Concat", batch, length["q"], length["k"], axis=0)
    weights = g.op("Softmax", g.op("Reshape", masked, joined))
    y = g.op("Unsqueeze", g.op("MatMul", weights, heads(k, "k")), g.ints(0))
    shown = np.arange(9).reshape(1, 1, 1, 9) < np.array([9, 4]).reshape(2, 1, 1, 1)
    feeds = {"right": sized(2, 2, H * D), "x": sized(4, 2, H * D), "left": sized(3, 2, H * D)}
    check(g, y, feeds | {"mask": shown})


@pytest.mark.parametrize("counted", [False, True])
def test_windows_with_the_one_before(counted):
    """Windows of two that also see the one before; that of the first is padded."""
    g = axes_of({name: ("N", H, "L", D) for name in "qkv"})
    length = g.op("Shape", "q", start=2, end=3)
    count = g.op("Div", length, g.ints(2))

    def windows(value, first, last):
        return g.op("Reshape", value, g.op("Concat", g.ints(first), count, g.ints(2, last), axis=0))

    def both(value, number):
        padded = g.op("Pad", value, g.ints(0, 1, 0, 0, 0, 0, 0, 0), number)
        ends = (count, g.op("Add", count, g.ints(1))) if counted else (g.ints(-1), g.ints(END))
        parts = (g.op("Slice", padded, g.ints(at), end, g.ints(1)) for at, end in enumerate(ends))
        return g.op("Concat", *parts, axis=2)

    k, v = (both(windows(name, -1, D), g.const(-1.0)) for name in "kv")
    zero, one = (g.const(number, np.int64) for number in (0, 1))
    places = windows(g.op("Range", zero, g.op("Squeeze", length, g.ints(0)), one), 1, 1)
    others = g.op("Transpose", both(places, g.const(-1, np.int64)), perm=[0, 1, 3, 2])
    scores = g.op("Einsum", windows("q", -1, D), k, equation="bhid,bhjd->bhij")
    scores = g.op("Where", g.op("Less", places, others), g.const(-3e38), scores)
    scores = g.op("Where", g.op("Equal", others, g.const(-1, np.int64)), g.const(-3e38), scores)
    y = g.op("Einsum", g.op("Softmax", scores), v, equation="bhij,bhje->bhie")
    check(g, y, *({name: sized(2, H, size, D, seed=at) for at, name in enumerate("qkv")} for size in (6, 4)))


def test_a_map_that_is_rolled_and_cut_into_windows():
    """The mask of each window is computed from the sizes of the map."""
    g = axes_of({"x": ("N", "H", "W", D)})
    sizes = [g.op("Shape", "x", start=at, end=at + 1) for at in (1, 2)]
    counts = [g.op("Div", each, g.ints(2)) for each in sizes]

    def rolled(value, axis):
        parts = [((1,), (END,)), ((0,), (1,))]
        cut = (g.op("Slice", value, g.ints(*one), g.ints(*end), g.ints(axis)) for one, end in parts)
        return g.op("Concat", *cut, axis=axis)

    def windows(value, last):
        shape = g.op("Concat", g.ints(-1), counts[0], g.ints(2), counts[1], g.ints(2, last), axis=0)
        apart = g.op("Transpose", g.op("Reshape", value, shape), perm=[0, 1, 3, 2, 4, 5])
        return g.op("Reshape", apart, g.ints(-1, 4, last))

    x = windows(rolled(rolled("x", 1), 2), D)
    heads = g.op("Transpose", g.op("Reshape", x, g.ints(-1, 4, 2, D // 2)), perm=[0, 2, 1, 3])
    zero, one = (g.const(number, np.int64) for number in (0, 1))

    def region(size):
        single = g.op("Squeeze", size, g.ints(0))
        last = g.op("Sub", single, g.const(1, np.int64))
        return g.cast(g.op("Equal", g.op("Range", zero, single, one), last), TensorProto.FLOAT)

    rows, columns = (
        g.op("Unsqueeze", region(size), g.ints(at)) for size, at in zip(sizes, (1, 0), strict=True)
    )
    places = windows(
        g.op("Unsqueeze", g.op("Add", rows, g.op("Mul", columns, g.const(2.0))), g.ints(0, 3)), 1
    )
    same = g.op("Equal", places, g.op("Transpose", places, perm=[0, 2, 1]))
    mask = g.op("Where", same, g.const(0.0), g.const(-100.0))
    scores = g.op("MatMul", heads, g.op("Transpose", heads, perm=[0, 1, 3, 2]))
    apart = g.op("Concat", g.ints(-1), g.op("Shape", mask, start=0, end=1), g.ints(2, 4, 4), axis=0)
    masked = g.op("Add", g.op("Reshape", scores, apart), g.op("Unsqueeze", mask, g.ints(0, 2)))
    weights = g.op("Softmax", g.op("Reshape", masked, g.ints(-1, 2, 4, 4)))
    y = g.op("MatMul", weights, heads)
    check(g, y, *({"x": sized(*shape, D)} for shape in ((2, 4, 6), (3, 6, 2), (1, 2, 2))))


def compressed(g, value):
    return g.op("Compress", value, "chosen", axis=1)


def gathered(g, value):
    places = g.op("Squeeze", g.op("NonZero", "chosen"), g.ints(0))
    return g.op("Gather", value, places, axis=1)


def split_apart(g, value):
    """The first part; the condition counts how long it is."""
    count = g.op("ReduceSum", g.cast("chosen", INT64), g.ints(0), keepdims=1)
    length = g.op("Shape", value, start=1, end=2)
    both = g.op("Concat", count, g.op("Sub", length, count), axis=0)
    first = g.op("Split", value, both, axis=1)
    g.nodes[-1].output.append(f"{first}_rest")
    return first


def repeated(g, value):
    count = g.op("ReduceSum", g.cast("chosen", INT64), g.ints(0), keepdims=1)
    return g.op("Tile", value, g.op("Concat", g.ints(1), count, g.ints(1, 1), axis=0))


def padded(g, value):
    count = g.op("ReduceSum", g.cast("chosen", INT64), g.ints(0), keepdims=1)
    return g.op("Pad", value, g.op("Concat", g.ints(0, 0, 0, 0, 0), count, g.ints(0, 0), axis=0))


@pytest.mark.parametrize("chosen", [compressed, gathered, split_apart, repeated, padded])
def test_keys_that_a_run_chooses(chosen):
    """How many there are is read from a tensor, for keys and values alike."""
    g = axes_of({"q": ("N", "S", H, D), "k": ("N", "T", H, D), "v": ("N", "T", H, D)})
    g.inputs["chosen"] = (TensorProto.BOOL, ("T",))
    y = attend(g, "q", chosen(g, "k"), chosen(g, "v"))
    check(g, y, *({"chosen": np.arange(5) < count} for count in (2, 5)))


def test_windows_behind_a_pad_of_the_run():
    """A length is padded to a multiple of the window."""
    g = axes_of({"x": ("N", "L", D)})
    window = g.ints(4)
    length = g.op("Shape", "x", start=1, end=2)
    more = g.op("Mod", g.op("Sub", window, g.op("Mod", length, window)), window)
    wide = g.op("Pad", "x", g.op("Concat", g.ints(0, 0, 0, 0), more, g.ints(0), axis=0))
    count = g.op("Div", g.op("Shape", wide, start=1, end=2), window)
    x = g.op("Reshape", wide, g.op("Concat", g.ints(-1), count, g.ints(4, D), axis=0))
    zero, one = (g.const(number, np.int64) for number in (0, 1))
    places = g.op("Range", zero, g.op("Squeeze", g.op("Shape", wide, start=1, end=2), g.ints(0)), one)
    mask = g.op(
        "Reshape", g.op("Less", places, length), g.op("Concat", g.ints(1), count, g.ints(1, 4), axis=0)
    )
    scores = g.op("Einsum", x, x, equation="bwid,bwjd->bwij")
    scores = g.op("Where", mask, scores, g.const(-1e9))
    y = g.op("Einsum", g.op("Softmax", scores), x, equation="bwij,bwjd->bwid")
    check(g, y, *({"x": sized(2, length, D)} for length in (8, 6, 3)))


def with_an_even_kernel(g, weight):
    wide = g.op("Conv", "x", weight, pads=[2, 2])
    return g.op("Slice", wide, g.ints(0), g.ints(-1), g.ints(2)), "x"


def with_an_even_kernel_behind_strides(g, weight):
    """The length is the floor of a difference, and one more."""
    x = g.op("Conv", "x", weight, strides=[4], pads=[1, 0])
    wide = g.op("Conv", x, weight, pads=[2, 2])
    return g.op("Slice", wide, g.ints(0), g.ints(-1), g.ints(2)), x


def with_an_even_kernel_behind_strides_alone(g, weight):
    """The length is a floor, and after the slice one less."""
    x = g.op("Conv", "x", weight, strides=[2])
    wide = g.op("Conv", x, weight, pads=[2, 2])
    return g.op("Slice", wide, g.ints(0), g.ints(-1), g.ints(2)), x


def with_strides(g, weight):
    pooled = g.op("MaxPool", "x", kernel_shape=[2], strides=[2], pads=[0, 1])
    return g.op("Conv", "x", weight, strides=[2], pads=[1, 2]), pooled


def with_pads_of_its_own(g, weight):
    pooled = g.op("AveragePool", "x", kernel_shape=[2], strides=[2], auto_pad="SAME_LOWER")
    return g.op("Conv", "x", weight, strides=[2], auto_pad="SAME_UPPER"), pooled


def transposed(g, weight):
    larger = g.op("Resize", "x", "", g.const([1, 1, 2]), mode="nearest")
    return g.op("ConvTranspose", "x", weight, strides=[2], pads=[1, 1]), larger


CONVOLVED = [with_an_even_kernel, with_an_even_kernel_behind_strides, with_strides, with_pads_of_its_own]
CONVOLVED.append(with_an_even_kernel_behind_strides_alone)


@pytest.mark.parametrize("made", [*CONVOLVED, transposed])
def test_keys_behind_a_convolution(made):
    """Keys and values are as many, by two operators that sample in their own ways."""
    g = axes_of({"q": ("N", "S", H, D), "x": ("N", H * D, "L")})
    k, v = (
        g.op("Reshape", g.op("Transpose", each, perm=[0, 2, 1]), g.ints(0, -1, H, D))
        for each in made(g, g.const(sized(H * D, H * D, 4)))
    )
    check(g, attend(g, "q", k, v), {}, {"x": sized(5, H * D, 8)})


@pytest.mark.parametrize("twice", [False, True])
def test_keys_at_distances(twice):
    """Positions are counted down, from the last one to the first, or as far below 0."""
    g = axes_of({name: ("N", "S", H, D) for name in "qv"})
    length, one = g.op("Gather", g.op("Shape", "q"), g.const(1, np.int64)), g.const(1, np.int64)
    ends = (length, g.op("Neg", length)) if twice else (g.op("Sub", length, one), g.const(-1, np.int64))
    distances = g.op("Unsqueeze", g.op("Range", *ends, g.const(-1, np.int64)), g.ints(1, 2))
    k = g.op("Sin", g.op("Mul", g.cast(distances, TensorProto.FLOAT), g.const(sized(H, D))))
    v = g.op("Concat", "v", "v", axis=1) if twice else "v"
    scores = g.op("Einsum", "q", g.op("Unsqueeze", k, g.ints(0)), equation="bqhd,bkhd->bhqk")
    check(g, g.op("Einsum", g.op("Softmax", scores), v, equation="bhqk,bkhd->bqhd"), {})


def test_a_bias_nearer_than_the_scores():
    """One of two numbers of every query: of several matmuls that are added, any may be that of Q and K."""
    g = axes_of({name: ("N", "S", H, D) for name in "qkv"})
    table = g.op("Einsum", "q", g.const(sized(2, H, D)), equation="bqhd,shd->bqhs")
    bias = g.op("Einsum", g.input("other", ("N", "S", "S", 2)), table, equation="bqks,bqhs->bhqk")
    scores = g.op("Mul", g.op("Einsum", "q", "k", equation="bqhd,bkhd->bhqk"), g.const(0.5))
    weights = g.op("Softmax", g.op("Add", scores, bias))
    check(g, g.op("Einsum", weights, "v", equation="bhqk,bkhd->bqhd"), {})


def test_keys_that_are_flattened():
    g = axes_of({"q": ("N", "S", H, D), "k": ("N", "T", H * D), "v": ("N", "T", H, D)})
    shape = g.op("Concat", g.op("Shape", "q", end=1), g.ints(-1, H, D), axis=0)
    check(g, attend(g, "q", g.op("Reshape", g.op("Flatten", "k", axis=2), shape), "v"), {})


def folded(g, value):
    """Heads beside the batch, `[N*H, S, D]`."""
    shape = g.op("Concat", g.ints(-1), g.op("Shape", value, start=2), axis=0)
    return g.op("Reshape", value, shape)


@pytest.mark.parametrize("again", [False, True])
def test_a_bias_that_may_be_broadcast(again):
    """Positions of a mask whose length is stated under its own name, before the batch is taken apart."""
    g = axes_of(
        {name: ("N", H, "S", D) for name in "qkv"} | {"bias": ("N", 1, "R"), "mask": ("N", 1, 1, "S")}
    )
    scores = g.op("MatMul", folded(g, "q"), g.op("Transpose", folded(g, "k"), perm=[0, 2, 1]))
    heads = g.op(
        "Reshape",
        g.op("Tile", "bias", g.ints(1, H, 1)),
        g.op("Concat", g.ints(-1, 1), g.op("Shape", "bias", start=2), axis=0),
    )
    scores = g.op("Add", scores, heads)
    sizes = [g.op("Shape", each, start=at, end=at + 1) for each, at in ((scores, 1), (scores, 2))]
    batch = g.op("Shape", "q", end=1)
    apart = g.op("Reshape", scores, g.op("Concat", batch, g.ints(H), *sizes, axis=0))
    apart = g.op("Add", apart, "mask") if again else apart
    weights = g.op("Softmax", apart)
    flat = g.op("Reshape", weights, g.op("Concat", g.ints(-1), g.op("Shape", weights, start=2), axis=0))
    y = g.op("MatMul", flat, folded(g, "v"))
    check(g, g.op("Reshape", y, g.op("Shape", "q")), {})


@pytest.mark.parametrize("rounded", ["Ceil", "Floor"])
def test_windows_counted_in_floats(rounded):
    """As an exporter divides sizes, and rounds them."""
    g = axes_of({"x": ("N", 6, D)})
    sizes = [g.op("Gather", g.op("Shape", "x"), g.const(at, np.int64)) for at in (0, 1)]
    length = g.cast(sizes[1], TensorProto.FLOAT)
    width = g.op("Mul", g.op(rounded, g.op("Div", length, g.const(5.0))), g.const(3.0))
    width = g.cast(width if rounded == "Floor" else g.op("Mul", g.const(0.5), width), INT64)
    batch = g.op("Mul", sizes[0], g.op("Div", sizes[1], width))
    shape = [g.op("Unsqueeze", each, g.ints(0)) for each in (batch, width)]
    x = g.op("Reshape", "x", g.op("Concat", *shape, g.ints(D), axis=0))
    scores = g.op("Softmax", g.op("Einsum", x, x, equation="bqd,bkd->bqk"))
    v = g.op("Reshape", "x", g.ints(-1, 3, D))
    check(g, g.op("Unsqueeze", g.op("Einsum", scores, v, equation="bqk,bkd->bqd"), g.ints(0)), {})


def test_sizes_far_away():
    """A length that a run chooses is read behind more nodes than are compared."""
    g = axes_of({"q": ("N", "S", H, D), "k": ("N", "T", H, D), "v": ("N", "T", H, D)})
    g.inputs["chosen"] = (TensorProto.BOOL, ("T",))
    k, v = (compressed(g, name) for name in "kv")
    far = k
    for _ in range(600):
        far = g.op("Neg", far)
    scores = g.op("Einsum", "q", k, equation="bqhd,bkhd->bhqk")
    flat = g.op(
        "Reshape",
        scores,
        g.op(
            "Concat",
            g.ints(-1),
            g.op("Shape", "q", start=1, end=2),
            g.op("Shape", far, start=1, end=2),
            axis=0,
        ),
    )
    apart = g.op("Reshape", g.op("Softmax", flat), g.op("Shape", scores))
    check(g, g.op("Einsum", apart, v, equation="bhqk,bkhd->bqhd"), {"chosen": np.arange(5) < 3})


def test_a_length_that_a_reshape_tells():
    """Scores and a bias, of as many columns as a run says, are as long as what they are reshaped to."""
    g = axes_of({name: ("N", H, "S", D) for name in "qkv"} | {"table": ("S", "L")})
    g.inputs["count"] = (INT64, (1,))
    q, k = (
        g.op("Reshape", each, g.op("Concat", g.ints(-1), g.op("Shape", each, start=2), axis=0))
        for each in "qk"
    )
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 1]))
    scores = g.op("Add", scores, g.op("Slice", "table", g.ints(0), "count", g.ints(1)))
    sizes = [g.op("Shape", "q", end=3), g.op("Shape", "k", start=2, end=3)]
    apart = g.op("Reshape", g.op("Neg", scores), g.op("Concat", *sizes, axis=0))
    feeds = [{"table": sized(5, 7), "count": np.array([number])} for number in (5, 1)]
    check(g, g.op("MatMul", g.op("Softmax", apart), "v"), *feeds)


def behind_a_past(g):
    """Numbers for positions behind a past, from a mask whose length is stated under a name of its own."""
    g.inputs |= {"mask": (INT64, ("B", "T")), "past": (TensorProto.FLOAT, ("B", H, "P", D))}
    numbers = g.op("CumSum", "mask", g.const(1, np.int64))
    past = g.op("Shape", "past", start=2, end=3)
    return numbers, g.op("Slice", numbers, past, g.ints(END), g.ints(1))


def past_feeds(*sizes):
    """Numbers of all, of some past and new positions."""
    for past, new in sizes:
        mask = np.arange(past + new) >= [[0], [1]]
        feeds = {"x": sized(2, H, new, D), "past": sized(2, H, past, D, seed=1)}
        yield feeds | {"mask": mask.astype(np.int64)}


def test_later_layers_read_the_length_of_the_first():
    """Queries may be as many as the mask has positions: all layers share a mask of those of the first."""
    g = axes_of({"x": ("B", H, "S", D)})
    numbers, own = behind_a_past(g)
    turned = g.op("Cos", g.op("Unsqueeze", g.cast(own, TensorProto.FLOAT), g.ints(1, 3)))
    hidden = g.op("Unsqueeze", g.op("Equal", numbers, g.const(0, np.int64)), g.ints(1, 2))
    bias = g.op("Where", hidden, g.const(-1e9), g.const(0.0))
    x = "x"
    for scale in (0.5, 0.25):
        q = g.op("Mul", x, turned)
        k, v = (g.op("Concat", "past", each, axis=2) for each in (q, x))
        scores = g.op("MatMul", g.op("Mul", q, g.const(scale)), g.op("Transpose", k, perm=[0, 1, 3, 2]))
        x = g.op("Add", x, g.op("MatMul", g.op("Softmax", g.op("Add", scores, bias)), v))
    check(g, x, *past_feeds((3, 4), (3, 1), (0, 4)), count=2)


def test_sizes_that_leave_nothing_are_not_drawn():
    """A mask of the positions behind a past has none where both have one; the file still runs."""
    g = axes_of({"x": ("B", H, "S", D)})
    numbers, own = behind_a_past(g)
    k = g.op("Concat", "past", "x", axis=2)
    q, k, v = (g.op("Unsqueeze", each, g.ints(2)) for each in ("x", k, k))
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 2, 4, 3]))
    hidden = g.op(
        "Greater", *(g.op("Unsqueeze", each, g.ints(1, 2, at)) for each, at in ((numbers, 3), (own, 4)))
    )
    scores = g.op("Where", hidden, g.const(-1e9), scores)
    y = g.op("Squeeze", g.op("MatMul", g.op("Softmax", scores), v), g.ints(2))
    check(g, y, *past_feeds((3, 4), (3, 1), (0, 4)))
