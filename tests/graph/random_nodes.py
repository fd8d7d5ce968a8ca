"""Attention nodes drawn at random in surroundings of other operators, with their results by definition.

`drawn_node(seed)` gives a model of open sizes, and calls of it whose sizes may be 1, or one of them 0. What
comes before the node is run by ONNX's evaluator, the node itself by its definition in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from oracle import attend

TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
LARGEST = 6  # of any open size


@dataclass
class Surrounded:
    """A model with one Attention node, and its calls."""

    model: ir.Model
    dtype: str
    about: str  # what was drawn
    calls: list[tuple[dict[str, np.ndarray], list[np.ndarray]]] = field(default_factory=list)
    # The last call, with an axis of size 0, which runtimes may refuse: ONNX's Attention takes none.
    empty: tuple[dict[str, np.ndarray], list[np.ndarray]] | None = None


def drawn_node(seed: int) -> Surrounded:
    """The node of a seed, with a few calls."""
    return _Draw(seed).made()


class _Draw:
    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: dict[str, tuple[int, list[str | int]]] = {}
        self.about: list[str] = []
        self.dtype = "float32" if self.chance(0.7) else "float16"
        self.Hkv = int(self.random.integers(1, 4))
        self.Hq = self.Hkv * int(self.random.integers(1, 4))
        self.D, self.E = (int(self.random.choice([2, 4, 8])) for _ in range(2))
        self.E = self.D if self.chance(0.7) else self.E
        self.rank = 4 if self.chance(0.7) else 3
        self.past = self.chance(0.25)
        self.single: str | int = 1 if self.chance(0.2) else "S"  # the number of queries

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def pick(self, *choices: str) -> str:
        found = choices[self.random.integers(len(choices))]
        self.about.append(found)
        return found

    def op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [name], name=name, **attributes))
        return name

    def const(self, numbers: Any, dtype: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(numbers, dtype), name))
        return name

    def ints(self, *numbers: int) -> str:
        return self.const(numbers, np.int64)

    def input(self, dims: list[str | int], kind: int | None = None) -> str:
        name = f"in{len(self.inputs)}"
        self.inputs[name] = (TYPES[self.dtype] if kind is None else kind, dims)
        return name

    # -- Q, K and V

    def _operand(self, heads: int, length: str | int, size: int) -> str:
        """A tensor in the layout of the node, made in one of the ways in which graphs make them."""
        if self.rank == 3:
            value = self.input(["B", length, heads * size])
            return self.op("Identity", value) if self.chance(0.1) else value
        kind = self.pick("plain", "plain", "transposed", "cast", "one batch", "cut", "scaled")
        if kind == "transposed":
            return self.op("Transpose", self.input(["B", length, heads, size]), perm=[0, 2, 1, 3])
        if kind == "cast":
            wide = self.input(["B", heads, length, size], TensorProto.FLOAT)
            return self.op("Cast", wide, to=TYPES[self.dtype])
        if kind == "one batch" and length == "T" and not self.past:
            one = self.input([1, heads, length, size])
            batch = self.op("Shape", self.leader, start=0, end=1)
            return self.op("Expand", one, self.op("Concat", batch, self.ints(1, 1, 1), axis=0))
        if kind == "cut":
            longer = self.input(["B", heads + 1, length, size])
            return self.op("Slice", longer, self.ints(0), self.ints(heads), self.ints(1))
        value = self.input(["B", heads, length, size])
        return self.op("Mul", value, self.const(0.5, self.dtype)) if kind == "scaled" else value

    # -- masks

    def _mask(self, total: str) -> str:
        """A mask, `total` being the input that has its keys."""
        rows, heads = (self.pick(*some) for some in (("S", "S", "1"), ("1", "1", "H")))
        rows = "1" if self.single == 1 else rows
        batch, keys = self.pick("B", "1"), self.keys
        dims: list[str | int] = [batch, heads, rows, keys]
        dims = [self.Hq if each == "H" else 1 if each == "1" else each for each in dims]
        kind = self.pick("bool", "bool", "added", "lowest", "negative", "where", "counted", "integers")
        count = int(self.random.choice([4, 4, 3, 2]))
        if count < 4:
            dims = dims[-count:] if batch == "1" else dims
        if kind == "counted":
            at = self.op("Range", self.zero, self._scalar_size(total), self.one)
            limit = self.input(["B", 1, 1, 1], TensorProto.INT64)
            self.lengths.add(limit)
            return self._spread(self.op("Less", at, limit), dims)
        if kind == "bool":
            return self._spread(self.input(dims, TensorProto.BOOL), dims)
        if kind == "integers":
            return self._spread(
                self.op("Cast", self.input(dims, TensorProto.INT64), to=TensorProto.BOOL), dims
            )
        if kind == "where":
            far = float(self.random.choice([-np.inf, np.finfo(self.dtype).min]))
            pair = self.const(0.0, self.dtype), self.const(far, self.dtype)
            return self._spread(self.op("Where", self.input(dims, TensorProto.BOOL), *pair), dims)
        name = self.input(dims)
        self.numbers[name] = {"lowest": float(np.finfo(self.dtype).min), "negative": -np.inf}.get(kind, 0.0)
        return self._spread(name, dims)

    def _scalar_size(self, name: str) -> str:
        axis = -2 if self.rank == 4 else 1
        return self.op("Squeeze", self.op("Shape", name, start=axis, end=axis + 1))

    def _spread(self, mask: str, dims: list[str | int]) -> str:
        """The mask itself, or copied along some of its axes, as exporters do."""
        if len(dims) < 4 or not self.chance(0.3):
            return mask
        self.about.append("spread")
        batch = self.op("Shape", self.leader, start=0, end=1)
        rows = self.op("Shape", self.leader, start=-2, end=-1) if self.rank == 4 else self.ints(1)
        return self.op("Expand", mask, self.op("Concat", batch, self.ints(1), rows, self.ints(1), axis=0))

    # -- the model and its calls

    def made(self) -> Surrounded:
        """Build the model, and draw its calls."""
        self.lengths, self.numbers = set[str](), dict[str, float]()
        self.zero, self.one = (self.const(number, np.int64) for number in (0, 1))
        self.leader = ""
        q = self.leader = self._operand(self.Hq, self.single, self.D)
        k, v = self._operand(self.Hkv, "T", self.D), self._operand(self.Hkv, "T", self.E)
        given, outputs = [q, k, v, "", "", ""], ["y"]
        self.keys = "M" if self.past else "T"
        if self.past:
            given[4:6] = (self.input(["B", self.Hkv, "P", size]) for size in (self.D, self.E))
            outputs += ["present_k", "present_v"]
        if self.chance(0.6):
            whole = self.op("Concat", given[4], k, axis=2) if self.past and self.rank == 4 else k
            if self.rank == 4 or not self.past:
                given[3] = self._mask(whole)
        attributes: dict[str, Any] = {"is_causal": int(self.chance(0.4))}
        if self.chance(0.5):
            attributes["scale"] = float(self.random.uniform(0.1, 1.0))
        if self.chance(0.2):
            attributes["softcap"] = float(self.random.uniform(1.0, 10.0))
        if self.chance(0.2):
            attributes["softmax_precision"] = TensorProto.FLOAT
        if self.rank == 3:
            attributes |= {"q_num_heads": self.Hq, "kv_num_heads": self.Hkv}
        if self.chance(0.1) and not self.past:
            attributes["qk_matmul_output_mode"] = int(self.random.integers(4))
            outputs = ["y", "", "", "scores"]
        while not given[-1]:
            given.pop()
        node = helper.make_node("Attention", given, outputs, name="attention", **attributes)
        self.about += [f"{name}={number}" for name, number in attributes.items()]
        model = self._model([*self.nodes, node], [name for name in outputs if name])
        found = Surrounded(
            ir.from_proto(model), self.dtype, f"{self.dtype} {self.rank}D {' '.join(self.about)}"
        )
        before = self._model(self.nodes, [name for name in dict.fromkeys(given) if name in self._made()])
        for sizes in self._sizes():
            feeds = self._feeds(sizes)
            with np.errstate(all="ignore"):
                values = ReferenceEvaluator(before).run(None, feeds) if before.graph.output else []
            known = feeds | dict(zip((each.name for each in before.graph.output), values, strict=True))
            alone = self._alone(node, known)
            with np.errstate(all="ignore"):
                found.calls.append((feeds, attend(alone, known)))
        found.empty = found.calls.pop()
        return found

    def _made(self) -> set[str]:
        return {name for node in self.nodes for name in node.output}

    def _model(self, nodes: list[onnx.NodeProto], outputs: list[str]) -> onnx.ModelProto:
        graph = helper.make_graph(
            nodes,
            "node",
            [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in self.inputs.items()],
            [onnx.ValueInfoProto(name=name) for name in outputs],
            self.constants,
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
        inferred = onnx.shape_inference.infer_shapes(made, data_prop=True)
        return inferred

    def _alone(self, node: onnx.NodeProto, values: dict[str, np.ndarray]) -> ir.Model:
        """The node by itself, at the sizes of a call."""
        inputs = [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(values[name].dtype), values[name].shape
            )
            for name in dict.fromkeys(filter(None, node.input))
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        graph = helper.make_graph([node], "alone", inputs, outputs)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
        return ir.from_proto(onnx.shape_inference.infer_shapes(made))

    def _sizes(self) -> list[dict[str, int]]:
        found = []
        for low in (2, 1, 1, 1):
            sizes = {name: int(self.random.integers(low, LARGEST)) for name in ("B", "S", "T", "P")}
            if self.chance(0.3):
                sizes["T"] = sizes["S"]
            if len(found) == 2:  # a cache that begins empty
                sizes["P"] = 0
            elif len(found) == 3:
                sizes["BST"[self.random.integers(3)]] = 0
            found.append(sizes | {"M": sizes["P"] + sizes["T"]})
        return found

    def _feeds(self, sizes: dict[str, int]) -> dict[str, np.ndarray]:
        feeds = dict[str, np.ndarray]()
        for name, (kind, dims) in self.inputs.items():
            shape = [each if isinstance(each, int) else sizes[each] for each in dims]
            if kind == TensorProto.BOOL:
                feeds[name] = self.random.random(shape) < 0.7
            elif kind == TensorProto.INT64:
                high = sizes["M"] + 1 if name in self.lengths else 2
                feeds[name] = self.random.integers(0, high, shape)
            else:
                numbers = self.random.standard_normal(shape)
                if self.numbers.get(name):
                    numbers = np.where(self.random.random(shape) < 0.4, self.numbers[name], 0.0)
                feeds[name] = numbers.astype(helper.tensor_dtype_to_np_dtype(kind))
        return feeds
