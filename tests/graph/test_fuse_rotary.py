"""Rotary embedding that a file writes out before queries and keys is one node, in every dialect."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hand_graphs import D, H, Hand, run
from onnx import TensorProto

from mha_deploy.graph.fuse import fuse_attention
from mha_deploy.graph.lower import lower
from mha_deploy.graph.upcast import retype

D = 2 * D  # the kernel of the plugin rotates 16 columns at a time
END = 2**63 - 1
ANGLES = np.outer(np.arange(32), 10.0 ** -np.linspace(0, 2, D // 2)).astype(np.float32)


class Shared(Hand):
    """A graph that has every node once: queries and keys share their tables."""

    def op(self, op_type, *inputs, **attributes):
        same = (op_type, inputs, str(attributes))
        self.known = getattr(self, "known", {})
        if same not in self.known:
            self.known[same] = super().op(op_type, *inputs, **attributes)
        return self.known[same]

    def const(self, numbers, dtype=np.float32):
        array = np.asarray(numbers, dtype)
        same = (array.shape, array.tobytes())
        self.held = getattr(self, "held", {})
        if same not in self.held:
            self.held[same] = super().const(array, dtype)
        return self.held[same]


def cut(g, x, begin, end, step=1):
    return g.op("Slice", x, *map(g.ints, (begin, end, -1, step)))


def halves(g, x, size=D):
    return cut(g, x, 0, size // 2), cut(g, x, size // 2, END)


def rotate_half(g, x, size=D):
    one, other = halves(g, x, size)
    return g.op("Concat", g.op("Neg", other), one, axis=-1)


def direct_and_crossed(g, x, crossed, tables):
    cos, sin = tables
    return g.op("Add", g.op("Mul", x, cos), g.op("Mul", crossed, sin))


def angles(g, size=D):
    """The angles as an input, `[1, S, size / 2]`."""
    return g.input("angles", (1, "S", size // 2))


def tables_of(g, each, *axes):
    """Cosines and sines, with an axis for the heads."""
    return [g.op("Unsqueeze", g.op(name, each), g.ints(*axes)) for name in ("Cos", "Sin")]


def both_halves(g, x):
    """As Hugging Face has it."""
    both = g.op("Concat", angles(g), "angles", axis=-1)
    return direct_and_crossed(g, x, rotate_half(g, x), tables_of(g, both, 1))


def scaled_tables(g, x):
    both = g.op("Concat", angles(g), "angles", axis=-1)
    tables = [g.op("Mul", each, g.const(1.25)) for each in tables_of(g, both, 1)]
    return direct_and_crossed(g, x, rotate_half(g, x), tables)


def each_half(g, x):
    (one, other), (cos, sin) = halves(g, x), [g.op(name, angles(g)) for name in ("Cos", "Sin")]
    first = g.op("Sub", g.op("Mul", one, cos), g.op("Mul", other, sin))
    return g.op("Concat", first, g.op("Add", g.op("Mul", sin, one), g.op("Mul", other, cos)), axis=-1)


def neighbors(g, x):
    """As GPT-J has it: every angle twice, one behind the other."""
    one, other = (cut(g, x, at, END, 2) for at in (0, 1))
    pairs = [g.op("Unsqueeze", each, g.ints(-1)) for each in (g.op("Neg", other), one)]
    crossed = g.op("Reshape", g.op("Concat", *pairs, axis=-1), g.ints(0, 0, 0, D))
    twice = g.op("Unsqueeze", angles(g), g.ints(-1))
    both = g.op("Reshape", g.op("Expand", twice, g.ints(1, 1, 1, 2)), g.ints(0, 0, D))
    return direct_and_crossed(g, x, crossed, tables_of(g, g.op("Identity", both), 1))


def neighbors_in_pairs(g, x):
    """As complex numbers are written."""
    pairs = g.op("Reshape", x, g.ints(0, 0, 0, D // 2, 2))
    one, other = (g.op("Gather", pairs, g.const(at, np.int64), axis=-1) for at in (0, 1))
    cos, sin = tables_of(g, angles(g), 1)
    first = g.op("Sub", g.op("Mul", one, cos), g.op("Mul", other, sin))
    second = g.op("Add", g.op("Mul", one, sin), g.op("Mul", other, cos))
    parts = [g.op("Unsqueeze", each, g.ints(4)) for each in (first, second)]
    return g.op("Reshape", g.op("Concat", *parts, axis=4), g.ints(0, 0, 0, D))


def a_part_of_the_head(g, x):
    """As GPT-NeoX has it: the last columns stay."""
    R = D // 2
    both = g.op("Concat", g.input("part", (1, "S", R // 2)), "part", axis=-1)
    own = cut(g, x, 0, R)
    rotated = direct_and_crossed(g, own, rotate_half(g, own, R), tables_of(g, both, 1))
    return g.op("Concat", rotated, cut(g, x, R, END), axis=-1)


def constant_tables(g, x):
    """Rows of constants, by position."""
    both = np.concatenate((ANGLES, ANGLES), -1)
    places = g.input("places", ("N", "S"), TensorProto.INT64)
    tables = [g.op("Gather", g.const(each(both)), places, axis=0) for each in (np.cos, np.sin)]
    tables = [g.op("Unsqueeze", each, g.ints(1)) for each in tables]
    return direct_and_crossed(g, x, rotate_half(g, x), tables)


def length_first(g, x):
    """Before the heads are brought to the front."""
    rows = g.op("Transpose", x, perm=[0, 2, 1, 3])
    both = g.op("Concat", angles(g), "angles", axis=-1)
    rotated = direct_and_crossed(g, rows, rotate_half(g, rows), tables_of(g, both, 2))
    return g.op("Transpose", rotated, perm=[0, 2, 1, 3])


# By spelling: the attributes `rotary` and `rotary_size` of the plugin's node.
SPELLINGS = {
    both_halves: (1, D),
    scaled_tables: (1, D),
    each_half: (1, D),
    neighbors: (2, D),
    neighbors_in_pairs: (2, D),
    a_part_of_the_head: (0, 0),  # 8 columns: too few for the kernel
    constant_tables: (1, D),
    length_first: (1, D),
}


def model_with(spelling):
    """Attention of queries and keys that are rotated."""
    g = Shared(("N", H, "S", D))
    q, k = spelling(g, "q"), spelling(g, "k")
    scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    return g.model(g.attend(g.op("Mul", scores, g.const(0.25))))


def numbers_for(model):
    random, feeds = np.random.default_rng(0), {}
    for each in model.graph.input:
        shape = [dim.dim_value or {"N": 2, "S": 5}[dim.dim_param] for dim in each.type.tensor_type.shape.dim]
        integers = each.type.tensor_type.elem_type == TensorProto.INT64
        feeds[each.name] = (
            random.integers(0, 32, shape) if integers else random.standard_normal(shape).astype(np.float32)
        )
    return feeds


def rotations(model, domain=""):
    """The names of the nodes that rotate."""
    nodes = model.graph.all_nodes()
    return [node.name for node in nodes if (node.op_type, node.domain) == ("RotaryEmbedding", domain)]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: spelling.__name__)
def test_every_dialect_gets_the_node(spelling):
    model = model_with(spelling)
    feeds, (fused, report) = numbers_for(model), fuse_attention(ir.from_proto(model))
    assert (len(rotations(fused)), len(report.fused)) == (2, 1)
    assert set(rotations(fused)) <= {repair.name for repair in report.repairs}
    assert "Neg" not in {node.op_type for node in fused.graph}
    (want,) = run(model, feeds)
    for dialect, (domain, count) in {
        "onnx": ("", 2), "trt": ("", 2), "contrib": ("com.microsoft", 2), "primitives": ("", 0),
    }.items():  # fmt: skip
        lowered = lower(fused, dialect)
        assert len(rotations(lowered, domain)) == count, dialect
        np.testing.assert_allclose(run(lowered, feeds)[0], want, atol=2e-5, err_msg=dialect)
    retype(fused, (ir.DataType.FLOAT,), ir.DataType.FLOAT16)
    (node,) = (node for node in lower(fused, "plugin").graph if node.op_type == "MhaDeployAttention")
    assert (node.attributes.get_int("rotary"), node.attributes.get_int("rotary_size")) == SPELLINGS[spelling]


# -- What is almost a rotary embedding -----------------------------------------------------------------


def other_sign(g, x):
    one, other = halves(g, x)
    crossed = g.op("Concat", other, g.op("Neg", one), axis=-1)
    both = g.op("Concat", angles(g), "angles", axis=-1)
    return direct_and_crossed(g, x, crossed, tables_of(g, both, 1))


def swapped_halves(g, x):
    one, other = halves(g, x)
    crossed = g.op("Concat", g.op("Neg", one), other, axis=-1)
    both = g.op("Concat", angles(g), "angles", axis=-1)
    return direct_and_crossed(g, x, crossed, tables_of(g, both, 1))


def unequal_halves(g, x):
    both = g.op("Concat", angles(g), g.op("Mul", "angles", g.const(2.0)), axis=-1)
    return direct_and_crossed(g, x, rotate_half(g, x), tables_of(g, both, 1))


def unequal_constants(g, x):
    """Only the last number of the tables differs."""
    both = np.concatenate((ANGLES, ANGLES), -1)
    both[-1, -1] += 1.0
    places = g.input("places", ("N", "S"), TensorProto.INT64)
    tables = [g.op("Gather", g.const(each(both)), places, axis=0) for each in (np.cos, np.sin)]
    tables = [g.op("Unsqueeze", each, g.ints(1)) for each in tables]
    return direct_and_crossed(g, x, rotate_half(g, x), tables)


def tables_of_each_head(g, x):
    both = g.op("Concat", g.input("of_heads", (1, H, "S", D // 2)), "of_heads", axis=-1)
    return direct_and_crossed(g, x, rotate_half(g, x), [g.op(name, both) for name in ("Cos", "Sin")])


def one_angle_for_all(g, x):
    """Not one for each position."""
    both = g.op("Concat", g.input("angle", (1, 1, D // 2)), "angle", axis=-1)
    return direct_and_crossed(g, x, rotate_half(g, x), tables_of(g, both, 1))


def neighbors_with_tables_of_halves(g, x):
    one, other = (cut(g, x, at, END, 2) for at in (0, 1))
    pairs = [g.op("Unsqueeze", each, g.ints(-1)) for each in (g.op("Neg", other), one)]
    crossed = g.op("Reshape", g.op("Concat", *pairs, axis=-1), g.ints(0, 0, 0, D))
    both = g.op("Concat", angles(g), "angles", axis=-1)
    return direct_and_crossed(g, x, crossed, tables_of(g, both, 1))


def sines_of_other_angles(g, x):
    both, others = (
        g.op("Concat", g.input(name, (1, "S", D // 2)), name, axis=-1) for name in ("angles", "others")
    )
    tables = tables_of(g, both, 1)[0], tables_of(g, others, 1)[1]
    one, other = halves(g, x)
    first = g.op(
        "Sub", g.op("Mul", one, cut(g, tables[0], 0, D // 2)), g.op("Mul", other, other_half(g, tables))
    )
    second = g.op("Mul", g.op("Add", one, other), cut(g, tables[1], 0, D // 2))
    return g.op("Concat", first, second, axis=-1)


def other_half(g, tables):
    return cut(g, tables[1], D // 2, END)


NEAR_MISSES = [
    other_sign, swapped_halves, unequal_halves, unequal_constants, tables_of_each_head, one_angle_for_all,
    neighbors_with_tables_of_halves, sines_of_other_angles,
]  # fmt: skip


@pytest.mark.parametrize("spelling", NEAR_MISSES, ids=lambda spelling: spelling.__name__)
def test_what_is_almost_one_stays(spelling):
    model = model_with(spelling)
    feeds, (fused, report) = numbers_for(model), fuse_attention(ir.from_proto(model))
    assert (rotations(fused), len(report.fused), report.repairs) == ([], 1, ())
    np.testing.assert_allclose(run(fused, feeds)[0], run(model, feeds)[0], atol=2e-5)


def test_what_is_rotated_in_float32_stays_in_float32():
    """Around it the graph is in FP16."""
    half, single = TensorProto.FLOAT16, TensorProto.FLOAT
    g = Shared(("N", H, "S", D))
    both = g.op("Concat", angles(g), "angles", axis=-1)
    tables = tables_of(g, both, 1)
    narrow = [g.cast(each, half) for each in "qkv"]
    rotated = []
    for each in narrow[:2]:
        crossed = g.cast(rotate_half(g, each), single)
        rotated.append(g.cast(direct_and_crossed(g, g.cast(each, single), crossed, tables), half))
    y = g.op("Attention", *rotated, narrow[2])
    fused, _ = fuse_attention(ir.from_proto(g.model(g.cast(y, single))))
    nodes = [node for node in fused.graph if node.op_type == "RotaryEmbedding"]
    kinds = {value.dtype for node in nodes for value in (*node.inputs, *node.outputs) if value is not None}
    assert (len(nodes), kinds) == (2, {ir.DataType.FLOAT})
