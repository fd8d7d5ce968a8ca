"""Graphs with one attention, spelled at random: layouts, masks, temperatures, softmaxes.

`Spelled(seed)` draws one. Every part is written by operators of ONNX alone, from the formula, and knows of no
form that a recognizer expects.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL
H, D, E = 2, 4, 3
SIZES = (
    {"B": 2, "S": 3, "T": 5},
    {"B": 1, "S": 4, "T": 4},
    {"B": 3, "S": 1, "T": 1},
    {"B": 1, "S": 1, "T": 6},
)

# The axes of Q, K and V as they are given, and of the scores between the two matmuls.
LAYOUTS = {
    "bhsd": ("bhsd", "bhtd", "bhte", "bhst"),
    "bshd": ("bshd", "bthd", "bthe", "bhst"),
    "bshd late heads": ("bshd", "bthd", "bthe", "bsht"),
    "sbhd": ("sbhd", "tbhd", "tbhe", "bhst"),
    "one key head": ("bhsd", "btd", "bte", "bhst"),
    "one key head late": ("bshd", "btd", "bte", "bsht"),
    "no heads": ("bsd", "btd", "bte", "bst"),
    "no batch": ("hsd", "htd", "hte", "hst"),
    "matrices": ("sd", "td", "te", "st"),
    "folded": ("bhsd", "bhtd", "bhte", "nst"),
    "keys first": ("bhsd", "bhtd", "bhte", "bhts"),
}


class Spelled:
    """One attention: its model, whether ONNX's Attention can express it, and inputs for it."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: dict[str, tuple[int, str]] = {}  # type, and axes
        self.chosen: list[str] = []  # what was drawn, for a message
        self.expressible = True
        self.masked: list[str] = []  # the kinds of masks
        self.rescaled = False  # whether scores are shifted, or multiplied by a tensor
        self.square = self.random.random() < 0.4  # as many queries as keys
        self.dynamic = self.random.random() < 0.7
        self.opset = int(self.random.choice([17, 18, 21]))
        self.layout = self.pick(*LAYOUTS)
        self.model = self._model()

    # -- drawing and building

    def pick(self, *choices: str) -> str:
        """One of some names, which is noted."""
        found = str(choices[self.random.integers(len(choices))])
        self.chosen.append(found)
        return found

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [name], name=name, **attributes))
        return name

    def const(self, numbers: Any, dtype: Any = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(numbers, dtype), name))
        return name

    def ints(self, *numbers: int) -> str:
        return self.const(numbers, np.int64)

    def input(self, axes: str, kind: int = FLOAT) -> str:
        name = f"in{len(self.inputs)}"
        self.inputs[name] = (kind, axes)
        return name

    def size(self, axis: str, sizes: dict[str, int] | None = None) -> int | str:
        """The size of an axis as the file states it, or at run time."""
        fixed = {"h": H, "d": D, "e": E, "1": 1}
        if axis in fixed:
            return fixed[axis]
        name = {"b": "B", "s": "S", "t": "S" if self.square else "T"}[axis]
        if not self.dynamic:
            return SIZES[0][name]
        return name if sizes is None else sizes[name]

    def number(self, value: float) -> str:
        """A constant, in one of the ways in which files hold them."""
        shape = [(), (1,), (1, 1, 1, 1)][self.random.integers(3 if self.rank > 3 else 2)]
        name = self.const(np.full(shape, value))
        return self.op("Identity", name) if self.chance(0.1) else name

    # -- the formula

    def _model(self) -> onnx.ModelProto:
        q_axes, k_axes, v_axes, self.axes = LAYOUTS[self.layout]
        self.rank = len(self.axes)
        q, k, v = (self.input(axes) for axes in (q_axes, k_axes, v_axes))
        scale = float(self.random.uniform(0.2, 1.0))
        place = self.pick(
            "scaled q", "scaled k", "scaled both", "scaled scores", "divided scores", "unscaled"
        )
        if place in ("scaled q", "scaled both"):
            q = self.op("Mul", q, self.const(scale))
        if place in ("scaled k", "scaled both"):
            k = self.op("Mul", self.const(scale), k)
        scores = self._scores(q, k, q_axes, k_axes)
        if place == "scaled scores":
            scores = self.op("Mul", *self._swapped(scores, self.number(scale)))
        elif place == "divided scores":
            scores = self.op("Div", scores, self.number(1 / scale))
        scores = self._between(scores)
        y = self._weighed(scores, v, v_axes)
        named = self.op("Identity", y)
        graph = helper.make_graph(
            self.nodes,
            "spelled",
            [
                helper.make_tensor_value_info(name, kind, [self.size(axis) for axis in axes])
                for name, (kind, axes) in self.inputs.items()
            ],
            [
                helper.make_tensor_value_info(
                    named, FLOAT, [None] * min(4, 3 if self.layout == "folded" else self.rank)
                )
            ],
            self.constants,
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=9)
        onnx.checker.check_model(made)
        return made

    def _swapped(self, one: str, other: str) -> tuple[str, str]:
        return (one, other) if self.chance(0.5) else (other, one)

    def _transposed(self, value: str, axes: str, wanted: str) -> str:
        if axes == wanted:
            return value
        return self.op("Transpose", value, perm=[axes.index(axis) for axis in wanted])

    def _fold(self, value: str, axes: str) -> str:
        """`[b, h, x, y]` as `[b * h, x, y]`."""
        last = [int(size) if isinstance(size := self.size(axis), int) else 0 for axis in axes[2:]]
        if 0 not in last:
            return self.op("Reshape", value, self.ints(-1, *last))
        tail = self.op("Slice", self.op("Shape", value), self.ints(2), self.ints(4))
        return self.op("Reshape", value, self.op("Concat", self.ints(-1), tail, axis=0))

    def _scores(self, q: str, k: str, q_axes: str, k_axes: str) -> str:
        if self.layout == "folded":
            q, k = self._fold(q, q_axes), self._fold(k, k_axes)
            return self.op("MatMul", q, self.op("Transpose", k, perm=[0, 2, 1]))
        if self.layout == "matrices" and self.chance(0.5):
            self.chosen.append("gemm")
            return self.op("Gemm", q, k, transB=1, alpha=float(self.random.uniform(0.5, 1.5)))
        einsum = self.layout.startswith("one key") or self.axes == "bsht" or self.chance(0.3)
        if einsum and self.layout != "matrices":
            self.chosen.append("einsum")
            return self.op("Einsum", q, k, equation=f"{q_axes},{k_axes}->{self.axes}")
        batch = self.axes[:-2]
        q = self._transposed(q, q_axes, f"{batch}sd")
        if self.axes.endswith("ts"):  # K times Q
            return self.op("MatMul", k, self._transposed(q, f"{batch}sd", f"{batch}ds"))
        return self.op("MatMul", q, self._transposed(k, k_axes, f"{batch}dt"))

    # -- between the matmul and the softmax

    def _between(self, scores: str) -> str:
        if self.chance(0.1):
            self.chosen.append("softcap")
            cap = float(self.random.uniform(2.0, 20.0))
            scores = self.op("Mul", self.op("Tanh", self.op("Div", scores, self.const(cap))), self.const(cap))
            steps = ["mask"] * int(self.random.integers(3))
        else:
            steps = ["mask"] * int(self.random.integers(3)) + ["temperature"] * int(self.chance(0.3))
            self.random.shuffle(steps)
            self.rescaled |= "temperature" in steps
        if self.chance(0.06):
            scores = self._strange(scores)
        if self.chance(0.15):
            scores = self._shifted(scores)
        for step in steps:
            scores = self._mask(scores) if step == "mask" else self._temperature(scores)
        return scores

    def _keys(self) -> int:
        return self.axes.index("t")

    def _reduced(self, op_type: str, value: str, axis: int) -> str:
        """A reduction that keeps its axis, which is an attribute before opset 18 and an input since."""
        axis -= self.rank if self.chance(0.5) else 0
        if op_type == "ReduceSum" or self.opset >= 18:
            return self.op(op_type, value, self.ints(axis), keepdims=1)
        return self.op(op_type, value, axes=[axis], keepdims=1)

    def _shifted(self, scores: str) -> str:
        self.rescaled = True
        if self.pick("by the mean", "by an input") == "by the mean":
            return self.op("Sub", scores, self._reduced("ReduceMean", scores, self._keys()))
        alike = "".join("1" if axis in ("t", "n") else axis for axis in self.axes)
        return self.op("Sub", scores, self.input(alike))

    def _temperature(self, scores: str) -> str:
        kind = self.pick("one number", "an input", "of heads", "exponential", "of queries")
        alike = "".join(
            axis if (axis == "h" and kind == "of heads") or (axis == "s" and kind == "of queries") else "1"
            for axis in self.axes
        )
        if kind == "one number":
            factor = self.number(float(self.random.uniform(0.5, 2.0)))
        elif kind == "of heads" and self.chance(0.6):
            shape = [H if axis == "h" else 1 for axis in alike]
            factor = self.const(self.random.uniform(0.5, 2.0, shape))
        else:
            factor = self.op("Exp", self.input(alike if kind != "an input" else "1"))
            if kind == "an input":
                factor = self.op("Abs", factor)
        return (
            self.op("Div", scores, factor)
            if self.chance(0.5)
            else self.op("Mul", *self._swapped(scores, factor))
        )

    def _condition(self) -> str:
        """A boolean tensor that broadcasts to the scores, true where a key is seen."""
        square = self.square and self.axes.endswith("st")
        kind = self.pick("of keys", "of pairs", "of batches", *(["triangle", "ranges"] if square else []))
        if kind == "triangle" and not self.dynamic:
            return self.const(np.tri(int(self.size("s")), dtype=bool), bool)
        if kind in ("triangle", "ranges"):
            source = next(iter(self.inputs))
            axes = self.inputs[source][1]
            count = self.op("Gather", self.op("Shape", source), self.const(axes.index("s"), np.int64))
            steps = self.op("Range", self.const(0, np.int64), count, self.const(1, np.int64))
            column = self.op("Unsqueeze", steps, self.ints(1))
            if kind == "ranges":
                return self.op("GreaterOrEqual", column, self.op("Unsqueeze", steps, self.ints(0)))
            shape = self.op("Concat", *[self.op("Reshape", count, self.ints(1))] * 2, axis=0)
            whole = self.op("Expand", self.const(1.0), shape)
            return self.op("Cast", self.op("Trilu", whole, upper=0), to=BOOL)
        axes = {"of keys": "t", "of pairs": "st", "of batches": "bt"}[kind]
        alike = "".join(axis if axis in axes else "1" for axis in self.axes)
        form = self.pick("bool", "integers", "compared")
        if form == "bool":
            return self.input(alike, BOOL)
        if form == "integers":
            return self.op("Cast", self.input(alike, TensorProto.INT64), to=BOOL)
        return self.op("Greater", self.input(alike), self.const(0.0))

    def _mask(self, scores: str) -> str:
        kind = self.pick(
            "filled", "filled not", "added", "added product", "blended", "minimum", "bias", "bias"
        )
        self.masked.append(kind)
        # A key that two of them hide has a number of its own, which no formula of one mask has.
        if "minimum" in self.masked and len(self.masked) > 1:
            self.expressible = False
        if kind == "bias":
            axes = self.pick("st", "hst", "bst", "t")
            alike = "".join(axis if axis in axes else "1" for axis in self.axes)
            return self.op("Add", *self._swapped(scores, self.input(alike)))
        shown = self._condition()
        far = float(self.random.choice([-1e9, -1e30, float(np.finfo(np.float32).min), -math.inf]))
        if kind.startswith("filled") and self.chance(0.3):
            far = float(self.random.choice([-1e4, -2.0]))  # other scores could be below
        if kind == "filled":
            return self.op("Where", shown, scores, self.number(far))
        if kind == "filled not":
            return self.op("Where", self.op("Not", shown), self.number(far), scores)
        if kind.startswith("added") and self.rescaled:
            far = min(far, -1e30)  # a nearer one keeps some of the scores, and of its rounding
        if kind == "added":
            return self.op(
                "Add", *self._swapped(scores, self.op("Where", shown, self.const(0.0), self.const(far)))
            )
        ones = self.op("Cast", shown, to=FLOAT)
        far = max(far, float(np.finfo(np.float32).min))
        hidden = self.op("Sub", self.const(1.0), ones)
        if kind == "added product":
            if self.chance(0.5):
                return self.op("Sub", scores, self.op("Mul", hidden, self.const(-far)))
            return self.op("Add", scores, self.op("Mul", *self._swapped(hidden, self.const(far))))
        if kind == "blended":
            kept = self.op("Mul", *self._swapped(scores, ones))
            return self.op("Add", *self._swapped(kept, self.op("Mul", hidden, self.const(far))))
        high = self.const(math.inf if self.chance(0.5) else float(np.finfo(np.float32).max))
        return self.op("Min", *self._swapped(scores, self.op("Where", shown, high, self.const(far))))

    def _strange(self, scores: str) -> str:
        """What Attention does not have."""
        self.expressible = False
        kind = self.pick("sine", "bounded", "by keys")
        alike = "".join(axis if axis == "t" else "1" for axis in self.axes)
        if kind == "sine":
            return self.op("Sin", scores)
        if kind == "bounded":
            return self.op("Clip", scores, self.const(-0.5), self.const(0.5))
        return self.op("Mul", scores, self.input(alike))

    # -- from the softmax on

    def _weighed(self, scores: str, v: str, v_axes: str) -> str:
        axis = self._keys()
        kind = self.pick("softmax", "softmax", "log", "powers", "shifted powers", "behind", "logarithm")
        if kind == "softmax":
            return self._times_values(self._behind(self.op("Softmax", scores, axis=axis)), v, v_axes)
        if kind == "log":
            return self._times_values(
                self.op("Exp", self.op("LogSoftmax", scores, axis=axis - self.rank)), v, v_axes
            )
        if kind == "logarithm":
            top = self._reduced("ReduceMax", scores, axis)
            shifted = self.op("Sub", scores, top)
            total = self._reduced("ReduceSum", self.op("Exp", shifted), axis)
            return self._times_values(
                self.op("Exp", self.op("Sub", shifted, self.op("Log", total))), v, v_axes
            )
        if kind in ("shifted powers", "behind"):
            scores = self.op("Sub", scores, self._reduced("ReduceMax", scores, axis))
        powers = self.op("Exp", scores)
        total = self._reduced("ReduceSum", powers, axis)
        if kind == "behind" and self.axes.endswith("st"):
            y = self._times_values(powers, v, v_axes, direct=True)
            return (
                self.op("Div", y, total)
                if self.chance(0.5)
                else self.op("Mul", y, self.op("Reciprocal", total))
            )
        weights = self.op("Div", powers, total)
        return self._times_values(weights, v, v_axes)

    def _behind(self, weights: str) -> str:
        """What is done to weights before they are used."""
        if not self.chance(0.1):
            return self.op("Dropout", weights) if self.chance(0.1) else weights
        kind = self.pick("nan", "masked", "halved")
        if kind == "nan":
            return self.op("Where", self.op("IsNaN", weights), self.const(0.0), weights)
        if kind == "halved":
            return self.op("Mul", weights, self.const(0.5))
        self.expressible = False
        alike = "".join(axis if axis == "t" else "1" for axis in self.axes)
        return self.op("Where", self.input(alike, BOOL), weights, self.const(0.0))

    def _times_values(self, weights: str, v: str, v_axes: str, *, direct: bool = False) -> str:
        if self.layout == "folded":
            return self.op("MatMul", weights, self._fold(v, v_axes))
        batch = self.axes.replace("s", "").replace("t", "")
        plain = self.axes.endswith("st") and not self.layout.startswith("one key")
        if self.layout == "matrices" or direct or (plain and self.chance(0.6)):
            values = self._transposed(v, v_axes, f"{batch}te") if plain else v
            if self.layout.startswith("one key"):
                values = self.op("Unsqueeze", v, self.ints(1))
            return self.op("MatMul", weights, values)
        out = f"{batch}se" if self.chance(0.5) else f"{batch[:1]}s{batch[1:]}e"
        return self.op("Einsum", weights, v, equation=f"{self.axes},{v_axes}->{out}")

    # -- inputs

    def feeds(self, sizes: dict[str, int], seed: int) -> dict[str, np.ndarray]:
        """Numbers for every input."""
        random, found = np.random.default_rng(seed), dict[str, np.ndarray]()
        for name, (kind, axes) in self.inputs.items():
            shape = [self.size(axis, sizes) for axis in axes]
            if kind == FLOAT:
                found[name] = random.standard_normal(shape).astype(np.float32)  # type: ignore[arg-type]
            else:
                shown = random.random(shape) < 0.7  # type: ignore[arg-type]
                found[name] = shown if kind == BOOL else shown.astype(np.int64)
        return found
