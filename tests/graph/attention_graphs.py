"""A generator of attention-like ONNX graphs: the same few formulas in many spellings."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np
import onnx
from hand_graphs import Hand
from onnx import TensorProto, helper

FLOAT, HALF, DOUBLE, BOOL, INT64 = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.DOUBLE,
    TensorProto.BOOL,
    TensorProto.INT64,
)
NUMPY = {FLOAT: np.float32, HALF: np.float16, DOUBLE: np.float64}
LOWEST = {each: float(np.finfo(NUMPY[each]).min) for each in NUMPY}

# The choices of each part. What is listed more often is drawn more often.
CHOICES = {
    "opset": (13, 15, 17, 18, 20, 23, 23, 24),
    "dtype": (FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, HALF, HALF, DOUBLE),
    "layout": ("heads first", "heads first", "length first", "flat", "windows", "packed"),
    "sizes": ("fixed", "named", "named", "shape", "shape", "unknown"),
    "matmul": ("matmul", "matmul", "einsum", "swapped"),
    "scale": ("none", "after", "divided", "query", "key", "both", "per head", "root"),
    "mask": (
        "none",
        "none",
        "bool -inf",
        "bool fill",
        "bool lowest",
        "added input",
        "added where -inf",
        "added where lowest",
        "padding",
        "padding added",
        "causal constant",
        "causal fill",
        "causal trilu",
        "causal range",
        "causal added",
        "causal and padding",
        "two fills",
        "three masks",
        "arithmetic",
        "bias",
        "bias and fill",
        "weak fill",
        "alibi",
    ),
    "softmax": ("softmax", "softmax", "softmax", "softmax", "exp", "reciprocal", "log", "shifted"),
    "casts": ("none", "none", "wide softmax", "wide scores", "wide operands", "there and back"),
    "between": ("none", "none", "none", "flat softmax", "flat weights", "transposed"),
    "grouping": ("none", "none", "expand", "tile", "interleave", "one head", "one head expanded"),
    "extra": (
        "none",
        "none",
        "none",
        "none",
        "softcap",
        "guard",
        "dropout",
        "values wider",
        "cross",
        "weights used",
    ),
    "refused": ("none",) * 12 + ("over queries", "relu", "talking heads", "int scores", "sum over values"),
}


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """One spelling of attention; each field is one of `CHOICES`."""

    opset: int = 23
    dtype: int = FLOAT
    layout: str = "heads first"
    sizes: str = "fixed"
    matmul: str = "matmul"
    scale: str = "after"
    mask: str = "none"
    softmax: str = "softmax"
    casts: str = "none"
    between: str = "none"
    grouping: str = "none"
    extra: str = "none"
    refused: str = "none"

    @property
    def expressible(self) -> bool | None:
        """Whether ONNX's Attention can express it; None where its sizes might prevent it."""
        if self.refused == "sum over values":
            return None  # a matmul, where the sizes say that its axes are those of weights and values
        if self.refused != "none":
            return False
        apart = self.layout in ("windows", "flat") or self.between in ("flat softmax", "flat weights")
        return None if self.sizes == "unknown" and (self.matmul == "einsum" or apart) else True

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items() if value != "none")


def drawn(seed: int) -> Spelling:
    """A spelling at random."""
    random = np.random.default_rng(seed)
    made = {
        each.name: CHOICES[each.name][random.integers(len(CHOICES[each.name]))] for each in fields(Spelling)
    }
    if made["casts"] not in ("none", "wide softmax", "there and back") and made["dtype"] == FLOAT:
        made["casts"] = "none"
    if made["extra"] == "cross" and made["mask"].startswith(("causal", "alibi", "two", "three")):
        made["extra"] = "none"
    if made["extra"] in ("softcap",) and made["mask"] in ("bias and fill", "three masks"):
        made["mask"] = "none"
    if made["dtype"] == DOUBLE and made["casts"] != "there and back":
        made["casts"] = "none"
    if made["opset"] < 14 and made["mask"] == "causal trilu":
        made["opset"] = 14
    if made["casts"] == "there and back" and made["dtype"] == DOUBLE:
        made["casts"] = "none"
    if made["extra"] == "sink" and made["between"] != "none":
        made["between"] = "none"
    return Spelling(**made)


class Graph(Hand):
    """The graph of one spelling."""

    def __init__(
        self, spelling: Spelling, *, H: int = 4, D: int = 8, B: int = 2, S: int = 6, windows: int = 3
    ):
        super().__init__()
        self.spelling, self.dtype = spelling, spelling.dtype
        self.H, self.D, self.B, self.S, self.W = H, D, B, S, windows
        self.Hkv = {"expand": 2, "tile": 2, "interleave": 2, "one head": 1, "one head expanded": 1}.get(
            spelling.grouping, H
        )
        if spelling.layout in ("flat", "windows", "packed"):
            self.Hkv = H
        self.Dv = D + 4 if spelling.extra == "values wider" and spelling.layout != "packed" else D
        self.T = S + 3 if spelling.extra == "cross" and spelling.layout != "packed" else S
        self.inputs, self.axes = {}, {}

    # -- sizes --------------------------------------------------------------------------------------

    def dims(self, *sizes):
        """The shape of an input: fixed, or named where the size varies."""
        if self.spelling.sizes == "fixed":
            return [size if isinstance(size, int) else getattr(self, size) for size in sizes]
        if self.spelling.sizes == "unknown":
            return [size if isinstance(size, int) else None for size in sizes]
        if self.T == self.S:
            sizes = ["S" if size == "T" else size for size in sizes]
        return list(sizes)

    def sized(self, name, sizes, dtype):
        """An input of these sizes, which are remembered where the file does not tell them."""
        same = self.T == self.S
        self.axes[name] = ["S" if size == "T" and same else size for size in sizes]
        return self.input(name, self.dims(*sizes), dtype)

    def number(self, value, dtype=None):
        return self.const(value, NUMPY[dtype or self.dtype])

    def size_of(self, value, axis):
        return self.op("Gather", self.op("Shape", value), self.ints(axis))

    def heads_shape(self, value, heads, depth):
        """The sizes `[B, length, heads, depth]`, in one of the usual ways."""
        if self.spelling.sizes == "shape":
            parts = [self.size_of(value, 0), self.size_of(value, 1), self.ints(heads), self.ints(depth)]
            return self.op("Concat", *parts, axis=0)
        return (
            self.ints(0, -1, heads, depth)
            if self.spelling.sizes == "named"
            else self.ints(0, 0, heads, depth)
        )

    # -- Q, K and V -----------------------------------------------------------------------------------

    def operands(self):
        """Q, K and V as `[B, H, length, depth]`, `[B, length, H, depth]` or with other axes in front."""
        layout = self.spelling.layout
        if layout == "packed":
            x = self.sized("x", ("B", "S", 3 * self.H * self.D), self.dtype)
            shape = self.ints(0, 0, 3, self.H, self.D)
            parts = self.op("Transpose", self.op("Reshape", x, shape), perm=[2, 0, 3, 1, 4])
            return [self.op("Gather", parts, self.const(at, np.int64), axis=0) for at in range(3)]
        if layout == "windows":
            shapes = [("S", self.D), ("T", self.D), ("T", self.Dv)]
            return [
                self.sized(name, ("B", self.W, self.H, *shape), self.dtype)
                for name, shape in zip("qkv", shapes, strict=True)
            ]
        given = (("q", "S", self.H, self.D), ("k", "T", self.Hkv, self.D), ("v", "T", self.Hkv, self.Dv))
        result = []
        for name, length, heads, depth in given:
            x = self.sized(name, ("B", length, heads * depth), self.dtype)
            y = self.op("Reshape", x, self.heads_shape(x, heads, depth))
            if layout != "length first":
                y = self.op("Transpose", y, perm=[0, 2, 1, 3])
            if layout == "flat":
                y = self.op("Reshape", y, self.flat_shape(y, length, depth))
            result.append(y)
        return result

    def flat_shape(self, y, length, depth):
        """The sizes `[B·H, length, depth]`."""
        if self.spelling.sizes == "fixed":
            return self.ints(-1, {"S": self.S, "T": self.T}[length], depth)
        return self.op("Concat", self.ints(-1), self.size_of(y, 2), self.ints(depth), axis=0)

    def repeated(self, value):
        """Heads of K or V, repeated for the heads of Q."""
        way, group = self.spelling.grouping, self.H // self.Hkv
        at = 2 if self.spelling.layout == "length first" else 1
        if group == 1:
            return value
        if way == "one head" and self.spelling.matmul == "matmul" and at == 1:
            return value
        if way == "tile":  # each head in place: Unsqueeze, Tile, Reshape
            wide = self.op("Unsqueeze", value, self.ints(at + 1))
            wide = self.op("Tile", wide, self.ints(*(group if axis == at + 1 else 1 for axis in range(5))))
        elif way in ("expand", "interleave"):
            wide = self.op("Unsqueeze", value, self.ints(at + 1))
            wide = self.op("Expand", wide, self.ints(*(group if axis == at + 1 else 1 for axis in range(5))))
        else:
            return self.op("Expand", value, self.ints(*(self.H if axis == at else 1 for axis in range(4))))
        if at == 2:
            return self.op("Reshape", wide, self.ints(0, -1, self.H, self._depths[value]))
        if way == "interleave":
            parts = [
                self.size_of(value, 0),
                self.ints(self.H),
                self.size_of(value, 2),
                self.size_of(value, 3),
            ]
            return self.op("Reshape", wide, self.op("Concat", *parts, axis=0))
        return self.op("Reshape", wide, self.ints(0, self.H, -1, self._depths[value]))

    # -- the formula -----------------------------------------------------------------------------------

    def build(self) -> onnx.ModelProto:
        """The model."""
        told = self.spelling
        q, k, v = self.operands()
        self._depths = {q: self.D, k: self.D, v: self.Dv}
        k, v = self.repeated(k), self.repeated(v)
        if told.casts == "wide operands":
            q, k = (self.op("Cast", each, to=FLOAT) for each in (q, k))
        self.wide = FLOAT if told.casts == "wide operands" else self.dtype
        q, k = self.scaled_operands(q, k)
        scores = self.scaled(self.product(q, k))
        if told.extra == "softcap":
            capped = self.op("Tanh", self.op("Div", scores, self.number(5.0, self.wide)))
            scores = self.op("Mul", capped, self.number(5.0, self.wide))
        if told.casts == "wide scores":
            self.wide = FLOAT
            scores = self.op("Cast", scores, to=FLOAT)
        if told.refused == "int scores":
            scores = self.cast(scores, TensorProto.INT32, self.wide)
        elif told.refused == "relu":
            scores = self.op("Relu", scores)
        scores = self.masked(scores)
        weights = self.normalised(scores)
        if told.refused == "talking heads" and told.layout in ("heads first", "length first", "packed"):
            mix = self.number(np.random.default_rng(1).standard_normal((self.H, self.H)))
            last = self.op("MatMul", self.op("Transpose", weights, perm=[0, 2, 3, 1]), mix)
            weights = self.op("Transpose", last, perm=[0, 3, 1, 2])
        elif told.refused == "talking heads":
            weights = self.op("Sigmoid", weights)
        y = self.with_values(weights, v)
        if told.extra == "weights used":
            y = self.op("Add", y, self.op("ReduceMax", weights, keepdims=1))
        return self.finished(y)

    def scaled_operands(self, q, k):
        scale, factor = self.spelling.scale, self.D**-0.5
        if scale == "query":
            q = self.op("Mul", q, self.number(factor, self.wide))
        elif scale == "key":
            k = self.op("Mul", self.number(factor, self.wide), k)
        elif scale in ("both", "root"):
            q = self.op("Mul", q, self.number(factor**0.5, self.wide))
            k = self.op("Div", k, self.number(factor**-0.5, self.wide))
        return q, k

    def scaled(self, scores):
        scale = self.spelling.scale
        if scale == "after":
            return self.op("Mul", scores, self.number(self.D**-0.5, self.wide))
        if scale == "divided":
            return self.op("Div", scores, self.number(self.D**0.5, self.wide))
        if scale == "per head" and self.spelling.layout != "flat":
            rank = 5 if self.spelling.layout == "windows" else 4
            factors = np.linspace(0.2, 0.5, self.H).reshape((1,) * (rank - 3) + (self.H, 1, 1))
            return self.op("Mul", scores, self.number(factors, self.wide))
        return scores

    def product(self, q, k):
        layout, einsum = self.spelling.layout, self.spelling.matmul == "einsum"
        if self.spelling.matmul == "swapped":
            if layout == "length first":
                q, k = (self.op("Transpose", each, perm=[0, 2, 1, 3]) for each in (q, k))
            rank = {"flat": 3, "windows": 5}.get(layout, 4)
            perm = [*range(rank - 2), rank - 1, rank - 2]
            return self.op("Transpose", self.op("MatMul", k, self.op("Transpose", q, perm=perm)), perm=perm)
        if layout == "length first":
            if einsum:
                return self.op("Einsum", q, k, equation="bshd,bthd->bhst")
            q = self.op("Transpose", q, perm=[0, 2, 1, 3])
            return self.op("MatMul", q, self.op("Transpose", k, perm=[0, 2, 3, 1]))
        if layout == "flat":
            if einsum:
                return self.op("Einsum", q, k, equation="bsd,btd->bst")
            return self.op("MatMul", q, self.op("Transpose", k, perm=[0, 2, 1]))
        if layout == "windows":
            if einsum:
                return self.op("Einsum", q, k, equation="bwhsd,bwhtd->bwhst")
            return self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 2, 4, 3]))
        if einsum:
            return self.op("Einsum", q, k, equation="bhsd,bhtd->bhst")
        return self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))

    def with_values(self, weights, v):
        layout, einsum = self.spelling.layout, self.spelling.matmul == "einsum"
        if self.spelling.refused == "sum over values":
            rank = {"flat": 3, "windows": 5}.get(layout, 4)
            v = self.op("Transpose", v, perm=[0, 2, 1, 3]) if layout == "length first" else v
            each = self.op(
                "Mul",
                self.op("Unsqueeze", weights, self.ints(rank)),
                self.op("Unsqueeze", v, self.ints(rank - 2)),
            )
            return self.op("ReduceSum", each, self.ints(rank - 1), keepdims=0)
        if layout == "length first":
            if einsum:
                return self.op("Einsum", weights, v, equation="bhst,bthd->bshd")
            y = self.op("MatMul", weights, self.op("Transpose", v, perm=[0, 2, 1, 3]))
            return self.op("Transpose", y, perm=[0, 2, 1, 3])
        if einsum:
            letters = {"flat": "b", "windows": "bwh"}.get(layout, "bh")
            return self.op("Einsum", weights, v, equation=f"{letters}st,{letters}td->{letters}sd")
        return self.op("MatMul", weights, v)

    # -- masks -------------------------------------------------------------------------------------------

    def mask_input(self, name, *sizes, dtype=BOOL):
        """A mask in front of whose axes there may be windows; flat scores broadcast over their batch."""
        if self.spelling.layout == "flat":
            sizes = sizes[-2:]
        elif self.spelling.layout == "windows":
            sizes = (sizes[0], 1, *sizes[1:])
        return self.sized(name, sizes, dtype)

    def triangle(self):
        """True where the key is not after the query, `[S, S]`."""
        if self.spelling.sizes == "fixed":
            return self.const(np.tri(self.S, dtype=bool), bool)
        first = next(iter(self.inputs))
        axis = 3 if self.spelling.layout == "windows" else 1
        end = self.op("Squeeze", self.size_of(first, axis), self.ints(0))
        row = self.op("Range", self.const(0, np.int64), end, self.const(1, np.int64))
        return self.op("GreaterOrEqual", self.op("Unsqueeze", row, self.ints(1)), row)

    def trilu(self):
        if self.spelling.sizes == "fixed":
            ones = self.const(np.ones((self.S, self.S)), np.float32)
        else:
            first = next(iter(self.inputs))
            size = self.size_of(first, 3 if self.spelling.layout == "windows" else 1)
            one = helper.make_tensor("value", FLOAT, [1], [1.0])
            ones = self.op("ConstantOfShape", self.op("Concat", size, size, axis=0), value=one)
        return self.op("Cast", self.op("Trilu", ones, upper=0), to=BOOL)

    def masked(self, scores):
        kind, wide = self.spelling.mask, self.wide
        lowest, fill = LOWEST[wide], -65000.0 if wide == HALF else -1e9
        infinite = -np.inf

        def add(mask):
            return self.op("Add", scores, mask)

        def number(value):
            return self.number(value, wide)

        def put(shown, inner, value):
            return self.op("Where", shown, inner, number(value))

        if kind == "none":
            return scores
        if kind == "weak fill":
            return put(self.mask_input("m", "B", 1, "S", "T"), scores, -1e4)
        if kind.startswith("bool"):
            value = {"bool -inf": infinite, "bool fill": fill, "bool lowest": lowest}
            return put(self.mask_input("m", "B", 1, "S", "T"), scores, value[kind])
        if kind == "added input":
            return add(self.mask_input("bias", "B", 1, "S", "T", dtype=wide))
        if kind.startswith("added where"):
            value = infinite if kind.endswith("inf") else lowest
            return add(put(self.mask_input("m", "B", 1, "S", "T"), number(0.0), value))
        if kind == "padding":
            return put(self.mask_input("m", "B", 1, 1, "T"), scores, fill)
        if kind == "padding added":
            keys = self.op("Cast", self.mask_input("m", "B", 1, 1, "T", dtype=INT64), to=wide)
            return add(self.op("Mul", self.op("Sub", number(1.0), keys), number(lowest)))
        if kind == "causal constant":
            return add(put(self.triangle(), number(0.0), infinite))
        if kind == "causal fill":
            return put(self.triangle(), scores, fill)
        if kind in ("causal trilu", "causal range"):
            return put(self.trilu() if kind.endswith("trilu") else self.triangle(), scores, infinite)
        if kind == "causal added":
            return add(put(self.triangle(), number(0.0), lowest))
        if kind == "causal and padding":
            shown = self.op("And", self.triangle(), self.mask_input("m", "B", 1, 1, "T"))
            return put(shown, scores, lowest)
        if kind == "two fills":
            inner = put(self.mask_input("m", "B", 1, 1, "T"), scores, lowest)
            return put(self.triangle(), inner, fill)
        if kind == "arithmetic":
            keys = self.op("Cast", self.mask_input("m", "B", 1, 1, "T"), to=wide)
            return add(self.op("Mul", self.op("Sub", number(1.0), keys), number(lowest)))
        if kind == "three masks":
            inner = put(self.mask_input("m", "B", 1, 1, "T"), scores, lowest)
            return put(self.triangle(), self.op("Add", inner, self.bias()), infinite)
        if kind == "alibi":
            return add(self.alibi())
        bias = self.bias()
        if kind == "bias":
            return add(bias)
        return put(self.mask_input("m", "B", 1, "S", "T"), add(bias), fill)

    def bias(self):
        """A learned bias of every head; over flat scores of every pair only."""
        heads = () if self.spelling.layout == "flat" else (self.H,)
        if self.spelling.sizes == "fixed":
            numbers = np.random.default_rng(3).standard_normal((*heads, self.S, self.T))
            return self.number(numbers, self.wide)
        return self.sized("bias", (*heads, "S", "T"), self.wide)

    def alibi(self):
        """The distance of query and key times a slope of the head."""
        if self.spelling.sizes == "fixed":
            far = self.const(np.arange(self.T)[None] - np.arange(self.S)[:, None], np.int64)
        else:
            first = next(iter(self.inputs))
            end = self.op(
                "Squeeze", self.size_of(first, 3 if self.spelling.layout == "windows" else 1), self.ints(0)
            )
            row = self.op("Range", self.const(0, np.int64), end, self.const(1, np.int64))
            far = self.op("Sub", row, self.op("Unsqueeze", row, self.ints(1)))
        slopes = 0.5 if self.spelling.layout == "flat" else (2.0 ** -np.arange(self.H))[:, None, None]
        return self.op("Mul", self.op("Cast", far, to=self.wide), self.number(slopes, self.wide))

    # -- from the scores to the weights -------------------------------------------------------------------

    def normalised(self, scores):
        told, rank = self.spelling, {"flat": 3, "windows": 5}.get(self.spelling.layout, 4)
        shape, wide = scores, self.wide
        if told.casts == "there and back":
            scores = self.cast(scores, DOUBLE, wide)
        if told.casts == "wide softmax":
            wide = DOUBLE if wide == FLOAT else FLOAT
            scores = self.op("Cast", scores, to=wide)
        axis = -2 if told.refused == "over queries" else -1
        if told.between == "flat softmax" and rank > 3:
            size = self.op(
                "Concat", self.ints(-1), self.size_of(shape, rank - 2), self.size_of(shape, rank - 1), axis=0
            )
            scores = self.op("Reshape", scores, size)
        elif told.between == "transposed" and axis == -1:
            scores, axis = self.op("Transpose", scores, perm=[*range(rank - 2), rank - 1, rank - 2]), -2
        if told.extra == "sink":
            sinks = self.number(np.linspace(-1.0, 1.0, 1 if rank == 3 else self.H).reshape(-1, 1, 1), wide)
            size = self.op("Slice", self.op("Shape", scores), self.ints(0), self.ints(-1))
            size = self.op("Concat", size, self.ints(1), axis=0)
            scores = self.op("Concat", scores, self.op("Expand", sinks, size), axis=-1)

        def reduced(op_type, value):
            if op_type == "ReduceMax" and told.opset < 18:
                return self.op(op_type, value, axes=[axis], keepdims=1)
            return self.op(op_type, value, self.ints(axis), keepdims=1)

        if told.softmax == "shifted":
            scores = self.op("Sub", scores, reduced("ReduceMax", scores))
        if told.softmax in ("softmax", "shifted"):
            weights = self.op("Softmax", scores, axis=axis)
        elif told.softmax == "log":
            weights = self.op("Exp", self.op("LogSoftmax", scores, axis=axis))
        else:
            powers = self.op("Exp", self.op("Sub", scores, reduced("ReduceMax", scores)))
            total = reduced("ReduceSum", powers)
            inverse = told.softmax == "reciprocal"
            weights = (
                self.op("Mul", powers, self.op("Reciprocal", total))
                if inverse
                else self.op("Div", powers, total)
            )
        if told.extra == "sink":
            weights = self.op("Slice", weights, self.ints(0), self.ints(-1), self.ints(-1))
        if told.extra == "guard":
            weights = self.op("Where", self.op("IsNaN", weights), self.number(0.0, wide), weights)
        if told.between == "flat softmax" and rank > 3:
            weights = self.op("Reshape", weights, self.op("Shape", shape))
        elif told.between == "transposed" and told.refused != "over queries":
            weights = self.op("Transpose", weights, perm=[*range(rank - 2), rank - 1, rank - 2])
        elif told.between == "flat weights" and rank == 4:
            flat = self.op(
                "Reshape",
                weights,
                self.op("Concat", self.ints(-1), self.size_of(shape, 2), self.size_of(shape, 3), axis=0),
            )
            weights = self.op("Reshape", flat, self.op("Shape", shape))
        if wide != self.dtype:
            weights = self.op("Cast", weights, to=self.dtype)
        if told.extra == "dropout":
            weights = self.op("Dropout", weights)
        return weights

    def finished(self, y) -> onnx.ModelProto:
        named = self.op("Identity", y)
        rank = {"flat": 3, "windows": 5}.get(self.spelling.layout, 4)
        graph = helper.make_graph(
            self.nodes,
            "g",
            [helper.make_tensor_value_info(name, *about) for name, about in self.inputs.items()],
            [helper.make_tensor_value_info(named, self.dtype, [None] * rank)],
            self.constants,
        )
        opsets = [helper.make_opsetid("", self.spelling.opset)]
        made = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        onnx.checker.check_model(made)
        return made

    # -- inputs --------------------------------------------------------------------------------------------

    def feeds(self, seed: int):
        """Numbers for every input: the sizes of the graph, or others where they vary; some queries masked."""
        random = np.random.default_rng(seed)
        sizes = {"B": self.B, "S": self.S, "T": self.T}
        if self.spelling.sizes != "fixed" and seed % 2:
            sizes = {"B": 3, "S": 7, "T": 7 if self.T == self.S else 5}
        feeds = {}
        for name, (dtype, _) in self.inputs.items():
            known = [each if isinstance(each, int) else sizes[each] for each in self.axes[name]]
            if dtype == BOOL:
                feeds[name] = random.random(known) < 0.7
                if seed % 3 == 1:
                    feeds[name][..., 0, :] = False
                else:
                    feeds[name][..., 0] = True
            elif dtype == INT64:
                feeds[name] = (random.random(known) < 0.7).astype(np.int64)
                if seed % 3 == 1:
                    feeds[name][0] = 0
                else:
                    feeds[name][..., -1] = 1
            else:
                feeds[name] = random.standard_normal(known).astype(NUMPY[dtype])
                if seed == 4 and name in "qkx" and dtype != HALF:
                    feeds[name] *= 30
                elif seed == 5 and name == "bias" and dtype != HALF:  # as masks have it
                    feeds[name] = np.where(feeds[name] < 0, LOWEST[dtype], 0.0).astype(NUMPY[dtype])
                    feeds[name][..., 0, :] = LOWEST[dtype]
        return feeds
