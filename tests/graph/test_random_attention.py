"""Random `Attention` nodes through every dialect: what a dialect accepts, it computes as ONNX does.

The truth is ONNX's reference evaluator in float64. What the type of the model may lose is bounded from the
scores: where rounding could move weight between keys, the output must still be a mix of visible values.
Values of masked keys are far outside of that mix, so a leak is visible at any tolerance.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attention_models import attention
from conformance import lower_for_reference, run_in_ort
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from onnx.reference.ops import op_attention
from plugin_reference import REFERENCE_OPERATORS

from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.ir import NodeBuilder
from mha_deploy.graph.lower import lower
from mha_deploy.graph.lower.cache import TOTAL_LENGTH
from mha_deploy.graph.lower.call import LoweringError

LOWERINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "trt": ("trt", {"pad_heads": True}),
    "trt-decomposed": ("trt", {"pad_heads": True, "decompose": True, "explicit_causal": True}),
    "fold": ("primitives", {"gqa": "fold"}),
    "broadcast": ("primitives", {"gqa": "broadcast"}),
    "repeat": ("primitives", {"gqa": "repeat"}),
    "8.6": ("primitives", {"shift_masks": False}),
    "contrib": ("contrib", {}),
    "plugin": ("plugin", {}),
}
_TYPES = {
    "fp64": np.float64,
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "int64": np.int64,
}
_EPS = {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}
_FAR = 1000.0


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A model of one Attention node, its inputs, and the same in float64."""

    model: ir.Model
    feeds: dict[str, np.ndarray]
    dtype: str
    truth: list[np.ndarray]
    slack: list[np.ndarray]
    about: str
    checked: set[bytes] = field(default_factory=set)


@st.composite
def nodes(draw: st.DrawFn) -> dict[str, Any]:
    """A node whose choices hypothesis makes, so that it can shrink what fails."""
    return node_by(lambda *choices: draw(st.sampled_from(choices)), draw(st.integers(0, 2**32 - 1)))


def node_by(pick: Callable[..., Any], seed: int) -> dict[str, Any]:
    """The attributes, sizes, mask and names of the dynamic axes of one node."""
    opset = pick(23, 24, 25)
    rank, dtype = pick(3, 4), pick("fp32", "fp16", "bf16")
    heads, group = pick(1, 2, 3), pick(1, 1, 2, 4)
    S = pick(1, 2, 3, 5, 9)
    T = pick(S, S, S, 1, 2, 4, 7, 17)
    D = pick(8, 8, 16, 4, 5)
    Dv = pick(D, D, D, 8, 12)
    past = pick(None, None, 0, 1, 3)
    lengths = opset > 23 and past is None and pick(False, False, True)
    attributes: dict[str, Any] = {"is_causal": pick(0, 1)}
    if (scale := pick(*[None] * 8, 0.25, 0.25, 1.0, 1.0, 0.3, 0.3, 0.0, 4.0)) is not None:
        attributes["scale"] = scale
    if softcap := pick(*[0.0] * 6, 1.5, 30.0):
        attributes["softcap"] = softcap
    if precision := pick(*[0] * 9, 1, 10, 16, 11):
        attributes["softmax_precision"] = precision
    narrows = precision in (10, 16) and precision != {"fp16": 10, "bf16": 16}.get(dtype)
    mode = pick(*[None] * 9, 0, 1, 2, 3)
    if mode is not None:
        attributes["qk_matmul_output_mode"] = mode
    if opset == 25 and pick(False, True):
        attributes["left_window_size"] = pick(-1, 0, 1, 3)
        attributes["right_window_size"] = pick(-1, 0, 2)
    return {
        "opset": opset,
        "rank": rank,
        "dtype": dtype,
        "B": pick(1, 2, 3),
        "Hkv": heads,
        "Hq": heads * group,
        "S": S,
        "T": T,
        "D": D,
        "Dv": Dv,
        "past": past,
        "present": not lengths and pick(False, True),
        "lengths": lengths,
        "attributes": attributes,
        "weights": mode is not None,
        "mask": pick("none", "none", "bool", "bool", "float", "float", "fp32", "fp64", "int64", "int32"),
        "mask_rank": pick(1, 2, 3, 4),
        "mask_ones": [pick(False, True) for _ in range(3)],
        "short": opset > 23 and pick(False, False, True),
        # A softmax in a narrower type may overflow by itself.
        "values": "plain" if narrows else pick("plain", "plain", "extreme", "fully-masked", "lowest"),
        "scores": "plain" if narrows else pick("plain", "plain", "plain", "extreme"),
        "symbolic": {name for name in ("B", "S", "T", "P", "M", "own") if pick(False, True)},
        # What stands around the node: casts and cuts before it, a mask of one column that is expanded, and a
        # preallocated cache, whose lengths may have been cast.
        "around": {name for name in ("cast", "cut", "expand") if pick(False, False, True)},
        "cache": pick(None, "plain", "int32", "float") if lengths and rank == 4 and S <= T else None,
        "seed": seed,
    }


def build(node: dict[str, Any]) -> Drawn:
    """The model, its inputs, and the truth."""
    rng = np.random.default_rng(node["seed"])
    B, S, T, D, Dv, Hq, Hkv = (node[name] for name in ("B", "S", "T", "D", "Dv", "Hq", "Hkv"))
    past = node["past"] or 0
    attributes, dtype = dict(node["attributes"]), node["dtype"]
    number = _TYPES[dtype]

    def values(length: int, heads: int, size: int) -> np.ndarray:
        return rng.standard_normal((B, heads, length, size)).astype(number)

    q, k, v = values(S, Hq, D), values(past + T, Hkv, D), values(past + T, Hkv, Dv)
    if node["scores"] == "extreme":
        # Beyond any finite fill of FP16, and within its range.
        highest = np.abs(np.einsum("bhsd,bhtd->bhst", *_float64(q, np.repeat(k, Hq // Hkv, axis=1)))).max()
        factor = 40000 / (highest * (attributes.get("scale", D**-0.5) or 1.0))
        q, k = ((x.astype(np.float64) * factor**0.5).astype(number) for x in (q, k))
    lengths = rng.integers(S if node.get("cache") else 0, T + 1, B) if node["lengths"] else None
    mask = _mask(node, rng, past + T)
    if mask is not None and _expands(node, mask, past + T):
        mask = np.ascontiguousarray(np.broadcast_to(mask[..., :1], mask.shape))
    truth, scores = _truth(node, q, k, v, mask, lengths)
    # Where no query attends to a value, it is far away: a leak shows.
    unused = np.isneginf(scores).all(axis=2).reshape(B, Hkv, Hq // Hkv, past + T).all(axis=2)
    v = np.where(unused[..., None], number(_FAR), v)
    truth, scores = _truth(node, q, k, v, mask, lengths)
    with np.errstate(over="ignore"):  # the lowest number of float64
        slack = _slack(node, q, k, v, mask, scores, truth)

    model = _model(node, mask)
    named = {"q": q, "k": k[:, :, past:], "v": v[:, :, past:]}
    if node["rank"] == 3:
        named = {name: x.transpose(0, 2, 1, 3).reshape(B, x.shape[2], -1) for name, x in named.items()}
    if node["past"] is not None:
        named |= {"past_key": k[:, :, :past], "past_value": v[:, :, :past]}
    named |= {} if mask is None else {"mask": mask}
    named |= {} if lengths is None else {"lengths": lengths}
    surround(model, node, named, rng)
    about = ", ".join(f"{key}={value}" for key, value in node.items())
    return Drawn(model=model, feeds=named, dtype=dtype, truth=truth, slack=slack, about=about)


def _expands(node: dict[str, Any], mask: np.ndarray, T: int) -> bool:
    return "expand" in node.get("around", ()) and mask.shape[-1] == T > 1 and mask.ndim == 4


def surround(model: ir.Model, node: dict[str, Any], feeds: dict[str, np.ndarray], rng: Any) -> None:
    """Put nodes that change nothing between the inputs and the attention; the model and the feeds change."""
    graph, around, att = model.graph, node.get("around", ()), model.graph[0]
    inputs = {value.name: value for value in graph.inputs}
    b = NodeBuilder("around")

    def feed(name: str, array: np.ndarray, shape: Iterable[Any]) -> ir.Value:
        """A new input in the place of one of the attention's."""
        value = ir.val(f"{name}_given", ir.DataType.from_numpy(array.dtype), list(shape))
        graph.inputs[:] = [value if each.name == name else each for each in graph.inputs]
        if value not in graph.inputs:
            graph.inputs.append(value)
        feeds.pop(name, None)
        feeds[value.name] = array
        return value

    def replace(name: str, new: ir.Value) -> None:
        new.type, new.shape = inputs[name].type, inputs[name].shape
        for at, value in enumerate(att.inputs):
            if value is inputs[name]:
                att.replace_input_with(at, new)

    if (mask := feeds.get("mask")) is not None and _expands(node, mask, (node["past"] or 0) + node["T"]):
        given = feed(
            "mask", mask[..., :1], [*inputs["mask"].shape[:3], "M" if "M" in node["symbolic"] else 1]
        )
        new = b.op("Expand", given, b.ints(1, 1, 1, mask.shape[-1]))
        replace("mask", new)
    if "cast" in around and node["dtype"] != "fp32":
        wide = feed("q", feeds["q"].astype(np.float32), inputs["q"].shape)
        replace("q", b.op("Cast", wide, to=int(inputs["q"].dtype)))
    if node.get("cache"):
        _give_cache(node, feeds, b, graph, feed, replace)
    elif "cut" in around:
        axis = 1 if node["rank"] == 3 else 2
        for name in ("k", "v"):
            size, shape = feeds[name].shape[axis], list(inputs[name].shape)
            more = np.full_like(np.take(feeds[name], [0, 0], axis), _FAR)
            shape[axis] = f"longer_{name}"
            long = feed(name, np.concatenate([feeds[name], more], axis), shape)
            replace(name, b.op("Slice", long, b.ints(0), b.ints(size), b.ints(axis)))
    graph.insert_before(att, b.nodes)


def _give_cache(
    node: dict[str, Any], feeds: Any, b: NodeBuilder, graph: Any, feed: Any, replace: Any
) -> None:
    """Let K and V be preallocated caches, into which S new entries are written before the attention."""
    S, starts = node["S"], (feeds["lengths"] - node["S"]).astype(np.int64)
    first = feed("lengths", starts, [node["B"] if "B" not in node["symbolic"] else "B"])
    for name in ("k", "v"):
        whole = feeds[name]
        new = np.stack([whole[at, :, start : start + S] for at, start in enumerate(starts)])
        old = whole.copy()
        # An old key is read, then hidden: its score must be a number of the type.
        stale = 0.0 if name == "k" and node["scores"] == "extreme" else _FAR
        for at, start in enumerate(starts):
            old[at, :, start : start + S] = stale
        dims = [first.shape[0], whole.shape[1]]
        past = feed(name, old, [*dims, whole.shape[2], whole.shape[3]])
        fresh = feed(f"{name}_new", new, [*dims, "S" if "S" in node["symbolic"] else S, whole.shape[3]])
        state = b.op("TensorScatter", past, fresh, first, axis=2)
        replace(name, state)
        graph.outputs.append(state)
    kind = {"int32": ir.DataType.INT32, "float": ir.DataType.FLOAT}.get(node["cache"])
    if kind is not None:
        first = b.op("Cast", b.op("Cast", first, to=int(kind)), to=int(ir.DataType.INT64))
    replace("lengths", b.op("Add", first, b.ints(S)))


def _float64(*arrays: np.ndarray) -> list[np.ndarray]:
    return [array.astype(np.float64) for array in arrays]


def _model(node: dict[str, Any], mask: np.ndarray | None) -> ir.Model:
    """The graph, whose axes have numbers or names; equal names only for equal sizes."""
    symbolic, rank = node["symbolic"], node["rank"]
    B = "B" if "B" in symbolic else node["B"]
    S = "S" if "S" in symbolic else node["S"]
    T: int | str = node["T"]
    if "T" in symbolic:
        T = "T"
    elif node["T"] == node["S"]:
        T = S
    attributes = dict(node["attributes"])
    Hq, Hkv, D, Dv = (node[name] for name in ("Hq", "Hkv", "D", "Dv"))
    shapes: list[tuple[int | str, ...]] = [(B, Hq, S, D), (B, Hkv, T, D), (B, Hkv, T, Dv)]
    if rank == 3:
        shapes = [(B, S, Hq * D), (B, T, Hkv * D), (B, T, Hkv * Dv)]
        attributes |= {"q_num_heads": Hq, "kv_num_heads": Hkv}
    past = None if node["past"] is None else "P" if "P" in symbolic else node["past"]
    kind = None
    if mask is not None:
        total = (node["past"] or 0) + node["T"]
        names = {node["B"]: B, node["S"]: S, total: T if past is None else "M3"}
        dims: list[int | str] = list(mask.shape)
        if "M" in symbolic:
            axes = range(4 - mask.ndim, 4)
            true = (node["B"], None, node["S"], total)
            dims = [
                names[size] if "own" in symbolic and size == true[axis] and axis != 1 else f"M{axis}"
                for axis, size in zip(axes, dims, strict=True)
            ]
        kind = ({"float": node["dtype"]}.get(node["mask"], node["mask"]), tuple(dims))
    model = attention(
        *shapes,
        dtype=node["dtype"],
        mask=kind,
        past=past,
        lengths=node["lengths"],
        present=node["present"],
        weights=node["weights"],
        opset=node["opset"],
        **attributes,
    )
    for value in model.graph.outputs:
        value.shape = ir.Shape([None] * len(value.shape))  # ONNX infers 0 for an empty past and a name
    return model


def _mask(node: dict[str, Any], rng: np.random.Generator, T: int) -> np.ndarray | None:
    if node["mask"] == "none":
        return None
    columns = T
    if node["short"] and T > 2:
        columns = int(rng.integers(2, T))
    sizes = [node["B"], node["Hq"], node["S"]]
    shape = [1 if one else size for one, size in zip(node["mask_ones"], sizes, strict=True)]
    shape = [*shape, columns][4 - node["mask_rank"] :]
    rows = (*shape[:-1], 1)
    if node["mask"] == "bool":
        mask = rng.random(shape) > 0.4
        return mask & (rng.random(rows) > 0.3) if node["values"] == "fully-masked" else mask
    if node["mask"].startswith("int"):
        far = 10**6 if node["values"] == "extreme" else 4
        return rng.integers(-far, far, shape).astype(node["mask"])
    dtype = _TYPES[node["dtype"] if node["mask"] == "float" else node["mask"]]
    low = float(ml_dtypes.finfo(dtype).min)
    mask = rng.standard_normal(shape)
    if node["values"] == "extreme":
        mask = np.where(rng.random(shape) > 0.6, rng.choice([-np.inf, low, -1e4, 1e4], shape), mask)
    if node["values"] in ("fully-masked", "lowest"):
        fill = -np.inf if node["values"] == "fully-masked" else low
        mask = np.where(rng.random(shape) > 0.5, fill, mask)
        mask = np.where(rng.random(rows) > 0.6, fill, mask)
    return mask.astype(dtype)


def _truth(node, q, k, v, mask, lengths) -> tuple[list[np.ndarray], np.ndarray]:
    """The outputs and the biased scores by ONNX's reference in float64, from a mask of full size.

    With a mask that broadcasts over the queries, the reference (onnx 1.23.2) aligns `is_causal` wrongly.
    """
    full = None
    shape = (node["B"], node["Hq"], node["S"], k.shape[2])
    if mask is not None:
        fill = False if mask.dtype == bool else -np.inf
        full = mask if mask.dtype == bool else mask.astype(np.float64)
        missing = shape[-1] - full.shape[-1] if full.shape[-1] > 1 or shape[-1] == 1 else 0
        full = np.pad(full, [(0, 0)] * (full.ndim - 1) + [(0, missing)], constant_values=fill)
        full = np.ascontiguousarray(np.broadcast_to(full, shape))
    past = node["past"] or 0
    feeds = {"q": q, "k": k[:, :, past:], "v": v[:, :, past:]}
    if node["past"] is not None:
        feeds |= {"past_key": k[:, :, :past], "past_value": v[:, :, :past]}
    feeds = {name: x.astype(np.float64) for name, x in feeds.items()}
    feeds |= {} if full is None else {"mask": full}
    feeds |= {} if lengths is None else {"lengths": lengths}
    attributes = {key: value for key, value in node["attributes"].items() if key != "softmax_precision"}
    found: dict[int, np.ndarray] = {}
    outputs: dict[int, list[np.ndarray]] = {}
    for mode in {2, attributes.get("qk_matmul_output_mode", 2)}:
        # The raw scores: the reference caps them in mode 0 as well.
        used = {key: value for key, value in attributes.items() if mode or key != "softcap"}
        evaluator = _reference(
            tuple(feeds),
            full is not None and full.dtype == bool,
            tuple(sorted((used | {"qk_matmul_output_mode": mode}).items())),
            node["opset"],
        )
        with np.errstate(all="ignore"):
            *outputs[mode], found[mode] = evaluator.run(None, feeds)
    y, key, value = outputs[2]
    if node["rank"] == 3:
        y = y.transpose(0, 2, 1, 3).reshape(node["B"], node["S"], -1)
    wanted = [y, *([key, value] if node["present"] else [])]
    if node["weights"]:
        wanted.append(found[attributes["qk_matmul_output_mode"]])
    return wanted, found[2]


@functools.lru_cache(maxsize=512)
def _reference(names: tuple[str, ...], is_bool: bool, attributes: tuple[Any, ...], opset: int):
    order = ["q", "k", "v", "mask", "past_key", "past_value", "lengths"]
    inputs = [name if name in names else "" for name in order]
    while not inputs[-1]:
        inputs.pop()
    node = onnx.helper.make_node("Attention", inputs, ["y", "pk", "pv", "w"], **dict(attributes))
    types = {"mask": onnx.TensorProto.BOOL} if is_bool else {}
    types["lengths"] = onnx.TensorProto.INT64
    values = [
        onnx.helper.make_tensor_value_info(name, types.get(name, onnx.TensorProto.DOUBLE), None)
        for name in names
    ]
    outputs = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.DOUBLE, None) for n in node.output]
    graph = onnx.helper.make_graph([node], "truth", values, outputs)
    return ReferenceEvaluator(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    )


def _slack(node, q, k, v, mask, scores, truth) -> list[np.ndarray]:
    """How far each output may be from the truth by rounding: in its type, and in that of the softmax."""
    eps = _EPS[node["dtype"]]
    q64, k64, v64 = _float64(q, k, v)
    group = node["Hq"] // node["Hkv"]
    k64, v64 = (np.repeat(x, group, axis=1) for x in (k64, v64))
    scale = node["attributes"].get("scale", node["D"] ** -0.5)
    size = scale * np.einsum("bhsd,bhtd->bhst", np.abs(q64), np.abs(k64))
    raw = 4 * eps * (size + 1)
    if cap := node["attributes"].get("softcap"):
        size = np.minimum(size, cap / eps)  # tanh adds no error, and bounds it
    visible = ~np.isneginf(scores)
    biased = np.where(visible, np.abs(scores), 0.0)
    precision = {10: "fp16", 16: "bf16"}.get(node["attributes"].get("softmax_precision"), node["dtype"])
    error = 4 * eps * (size + 1) + 4 * max(eps, _EPS[precision]) * biased
    # The lowest and the highest score that rounding may leave each key.
    top = np.where(visible, scores - error, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
    possible = visible & (scores + error >= top - 20)
    moved = np.where(possible, error, 0.0).max(axis=-1, keepdims=True, initial=0.0)
    share = np.minimum(1.0, np.expm1(np.minimum(2 * moved, 1.0))) + 8 * eps
    far = np.where(possible[..., None], v64[:, :, None], -np.inf).max(axis=3, initial=-np.inf)
    near = np.where(possible[..., None], v64[:, :, None], np.inf).min(axis=3, initial=np.inf)
    spread = np.where(possible.any(axis=-1)[..., None], far - near, 0.0)
    largest = np.where(possible.any(axis=-1)[..., None], np.maximum(np.abs(far), np.abs(near)), 0.0)
    of_y = share * spread + 8 * max(eps, _EPS[precision]) * largest + 1e-6
    if node["rank"] == 3:
        of_y = of_y.transpose(0, 2, 1, 3).reshape(node["B"], node["S"], -1)
    slack = [of_y, *([np.zeros(())] * 2 if node["present"] else [])]
    if node["weights"]:
        mode = node["attributes"]["qk_matmul_output_mode"]
        share = share + 8 * _EPS[precision]  # the softmax may be in a narrower type than its result
        slack.append(np.where(possible, share, 1e-4) if mode == 3 else (raw if mode == 0 else error) + 1e-6)
    return slack


class Attention(op_attention.Attention_23):
    """An Attention node that is left for TensorRT, whose fused kernels compute in float32."""

    op_domain = ""

    def _run(self, q, *others, **attributes):
        wide = [x if x is None or x.dtype == bool else x.astype(np.float32) for x in (q, *others)]
        return tuple(x.astype(q.dtype) for x in super()._run(*wide, **attributes))


def check(name: str, drawn: Drawn, *, in_ort: bool) -> str:
    """Lower and run; `right`, the refused feature, or an AssertionError."""
    dialect, options = LOWERINGS[name]
    try:
        lowered = lower_for_reference(drawn.model, dialect, **options)
    except LoweringError as error:
        return error.feature
    proto = ir.to_proto(lowered)
    if any(value.name == TOTAL_LENGTH for value in lowered.graph.inputs):
        return "right"  # an input that only a decode loop can feed; test_contrib_cache.py runs it
    content = proto.SerializeToString(deterministic=True)
    if content in drawn.checked:  # another lowering gave the same graph
        return "right"
    drawn.checked.add(content)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        if in_ort and not attention_nodes(lowered) and dialect != "plugin":
            got = run_in_ort(proto, drawn.feeds)
        else:
            operators = [*REFERENCE_OPERATORS, Attention]
            got = ReferenceEvaluator(proto, new_ops=operators).run(None, drawn.feeds)
    # Caches that were updated have other forms in each dialect.
    outputs = drawn.model.graph.outputs[: len(drawn.truth)]
    for value, output, truth, slack in zip(
        outputs, got[: len(outputs)], drawn.truth, drawn.slack, strict=True
    ):
        output = output.astype(np.float64)
        beyond = 0.9 * float(ml_dtypes.finfo(_TYPES[drawn.dtype]).max)
        with np.errstate(all="ignore"):
            same = (output == truth) | (np.abs(output - truth) <= slack)
            for sign in (-1, 1):  # a score with its mask beyond the type
                same |= (sign * output > beyond) & (sign * truth > beyond)
        assert same.all(), f"{name} {value.name}: {output[~same][:4]}, not {truth[~same][:4]}; {drawn.about}"
    return "right"


def differing(node: dict[str, Any]) -> list[str]:
    """The lowerings that differ for a node; `test_the_others_give_the_same_graph` shows that of the rest."""
    grouped, shifts = node["Hq"] > node["Hkv"], node["mask"] not in ("none", "bool")
    own = node["attributes"]
    decomposes = own["is_causal"] or "softcap" in own or own.get("softmax_precision") == ir.DataType.DOUBLE
    # The documented limit of `shift_masks=False`: a query whose keys all have about the lowest number of FP16
    # averages their values, whatever their scores.
    limit = (node["dtype"], node["mask"], node["scores"]) == ("fp16", "float", "extreme")
    at_8_6 = (shifts or grouped) and not (limit and node["values"] != "plain")
    some = {"broadcast": grouped, "repeat": grouped, "8.6": at_8_6, "trt-decomposed": decomposes}
    return [name for name in LOWERINGS if some.get(name, True)]


def examine(node: dict[str, Any], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The outcome in each of these lowerings."""
    made: dict[str, Drawn] = {}
    for name in names:
        # ONNX Runtime has no BF16 kernels on a CPU.
        dtype = "fp32" if name == "contrib" and node["dtype"] == "bf16" else node["dtype"]
        if dtype not in made:
            made[dtype] = build(node | {"dtype": dtype})
        in_ort = dtype == "fp32" and node["attributes"].get("softmax_precision") != 16
        yield name, check(name, made[dtype], in_ort=in_ort or name == "contrib")


@hypothesis.settings(max_examples=30, derandomize=True, database=None, deadline=None)
@hypothesis.given(st.sampled_from(sorted(LOWERINGS)), nodes())
def test_what_a_dialect_accepts_it_computes_as_onnx_does(name: str, node: dict[str, Any]) -> None:
    assert list(examine(node, [name]))


# How many of 40 nodes each dialect accepts. One that refuses more is no better for being right.
ACCEPTED = {"trt": 27, "trt-decomposed": 40, "fold": 40, "contrib": 13, "plugin": 12}


@pytest.mark.slow
def test_a_dialect_accepts_as_much_as_before() -> None:
    rng, accepted = random.Random(0), dict.fromkeys(ACCEPTED, 0)
    for _ in range(40):
        node = node_by(lambda *choices: rng.choice(choices), rng.getrandbits(32))
        keys = (node["past"] or 0) + node["T"]
        model = _model(node, _mask(node, np.random.default_rng(node["seed"]), keys))
        for name in ACCEPTED:
            dialect, options = LOWERINGS[name]
            with contextlib.suppress(LoweringError):
                lower_for_reference(model, dialect, **options)
                accepted[name] += 1
    assert not {name: count for name, count in accepted.items() if count < ACCEPTED[name]}


@hypothesis.settings(max_examples=12, derandomize=True, database=None, deadline=None)
@hypothesis.given(nodes())
def test_the_others_give_the_same_graph(node: dict[str, Any]) -> None:
    attributes = {key: value for key, value in node["attributes"].items() if key != "softcap"}
    attributes |= {"is_causal": 0, "softmax_precision": 1}
    node |= {"attributes": attributes, "Hq": node["Hkv"], "mask": "bool" if node["short"] else "none"}
    keys = (node["past"] or 0) + node["T"]
    model = _model(node, _mask(node, np.random.default_rng(node["seed"]), keys))
    for names in (("fold", "broadcast", "repeat", "8.6"), ("trt", "trt-decomposed")):
        lowered = [
            lower(model, dialect, **options) for dialect, options in (LOWERINGS[name] for name in names)
        ]
        assert len({ir.to_proto(each).SerializeToString(deterministic=True) for each in lowered}) == 1
        assert [name for name in names if name in differing(node)] == [names[0]]


def test_a_mask_beyond_the_range_of_fp16_masks_under_any_scores() -> None:
    """Found at random: saturated at -65504, a mask of -600,000 let a score of 40,000 win over -40,000."""
    node = node_by(lambda *choices: choices[0], seed=4211379745)
    node |= {"rank": 3, "dtype": "fp16", "Hkv": 3, "Hq": 12, "S": 5, "T": 2, "D": 5, "Dv": 12, "past": 3}
    node |= {"mask": "int32", "mask_rank": 2, "mask_ones": [False, False, True]}
    node |= {"values": "extreme", "scores": "extreme", "symbolic": {"T", "M", "own"}}
    assert {outcome for _, outcome in examine(node, LOWERINGS)} == {"right"}


def test_scores_with_a_mask_beyond_the_range_of_fp16_are_added_in_its_type() -> None:
    """Found at random: scores as an output were -39,104 where the mask alone is below -100,000."""
    node = node_by(lambda *choices: choices[0], seed=3980768320)
    node |= {"dtype": "fp16", "rank": 4, "S": 9, "T": 1, "D": 5, "Dv": 8, "past": 3, "symbolic": {"T"}}
    node |= {"mask": "int32", "mask_rank": 2, "mask_ones": [True] * 3}
    node |= {"values": "extreme", "scores": "extreme"}
    node |= {"attributes": {"is_causal": 1, "scale": 0.3, "qk_matmul_output_mode": 2}, "weights": True}
    assert dict(examine(node, ["trt", "fold"])) == {"trt": "right", "fold": "right"}


@pytest.mark.parametrize("mode", [None, 0, 1, 2, 3])
def test_a_query_whose_keys_all_have_the_lowest_number_of_float32_is_finite(mode: int | None) -> None:
    """Found at random: -32,768 for such a mask plus a score of -40,000 was NaN in FP16."""
    node = node_by(lambda *choices: choices[0], seed=2253237837)
    node |= {
        "opset": 25,
        "rank": 4,
        "dtype": "fp16",
        "B": 2,
        "Hkv": 1,
        "Hq": 4,
        "S": 1,
        "T": 1,
        "lengths": True,
    }
    node |= {"attributes": {"is_causal": 1, "scale": 4.0}, "mask": "fp32", "mask_rank": 2}
    node |= {"mask_ones": [True] * 3, "values": "lowest", "scores": "extreme"}
    if mode is not None:
        node |= {"weights": True, "attributes": node["attributes"] | {"qk_matmul_output_mode": mode}}
    assert {outcome for _, outcome in examine(node, ["fold", "broadcast", "repeat"])} == {"right"}


@pytest.fixture
def rare_collections() -> Iterator[None]:
    """Graphs are full of cycles: looking for them among all that is imported takes a tenth of the time."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 10, 100)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_many_more(seed: int, rare_collections: None) -> None:
    """Drawn without hypothesis, which draws about as slowly as a dialect lowers; the message has the node."""
    rng = random.Random(seed)
    for _ in range(200):
        node = node_by(lambda *choices: rng.choice(choices), rng.getrandbits(32))
        assert list(examine(node, differing(node)))
