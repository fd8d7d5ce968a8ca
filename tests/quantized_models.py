"""A small transformer as an ONNX file, without PyTorch: one attention, an MLP, and logits."""

from functools import cache

import numpy as np
from onnx import TensorProto, helper, numpy_helper, parser, save

WIDTH, HEADS, CLASSES = 64, 4, 8
GEMMS = ("q", "k", "v", "out", "up", "down", "head")


@cache
def weights(seed=0):
    dice = np.random.default_rng(seed)
    sizes = {**dict.fromkeys(GEMMS[:4], (WIDTH, WIDTH)), "up": (WIDTH, 32), "down": (32, WIDTH)}
    sizes["head"] = (WIDTH, CLASSES)
    return {name: dice.normal(0, shape[0] ** -0.5, shape).astype("f") for name, shape in sizes.items()}


def transformer(path, *, opset=23, packed=False, split=False, changed=None):
    """Write the file; `changed` are weights in place of the drawn ones.

    `packed`: with one GEMM for Q, K and V. `split`: with an axis for the heads.
    """
    held = {**weights(), **(changed or {})}
    made = ["q.y", "k.y", "v.y"]
    nodes = [helper.make_node("MatMul", ["x", f"{each}.w"], [f"{each}.y"], name=each) for each in "qkv"]
    if packed:
        held["qkv"] = np.concatenate([held.pop(each) for each in "qkv"], axis=1)
        nodes = [
            helper.make_node("MatMul", ["x", "qkv.w"], ["qkv.y"], name="qkv"),
            helper.make_node("Split", ["qkv.y"], made, num_outputs=3, axis=-1, name="split"),
        ]
    heads = {"q_num_heads": HEADS, "kv_num_heads": HEADS}
    if split:
        shape = numpy_helper.from_array(np.array([0, 0, HEADS, WIDTH // HEADS]), "split.shape")
        join = numpy_helper.from_array(np.array([0, 0, WIDTH]), "join.shape")
        turn = {"perm": [0, 2, 1, 3]}
        for each in "qkv":
            nodes.append(helper.make_node("Reshape", [f"{each}.y", "split.shape"], [f"{each}.r"]))
            nodes.append(helper.make_node("Transpose", [f"{each}.r"], [f"{each}.t"], **turn))
        nodes += [
            helper.make_node("Attention", ["q.t", "k.t", "v.t"], ["apart"], name="attention"),
            helper.make_node("Transpose", ["apart"], ["back"], **turn),
            helper.make_node("Reshape", ["back", "join.shape"], ["heads"]),
        ]
    else:
        nodes.append(helper.make_node("Attention", made, ["heads"], name="attention", **heads))
    nodes += [
        helper.make_node("MatMul", ["heads", "out.w"], ["out.y"], name="out"),
        helper.make_node("Add", ["x", "out.y"], ["mid"], name="residual"),
        helper.make_node("MatMul", ["mid", "up.w"], ["up.y"], name="up"),
        helper.make_node("Relu", ["up.y"], ["relu"], name="relu"),
        helper.make_node("MatMul", ["relu", "down.w"], ["down.y"], name="down"),
        helper.make_node("Add", ["mid", "down.y"], ["last"], name="residual_2"),
        helper.make_node("MatMul", ["last", "head.w"], ["logits"], name="head"),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "S", WIDTH])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "S", CLASSES])],
        [
            *(numpy_helper.from_array(array, f"{name}.w") for name, array in held.items()),
            *((shape, join) if split else ()),
        ],
    )
    imports = [helper.make_opsetid("", opset)]
    save(helper.make_model(graph, opset_imports=imports, ir_version=10), path)
    return path


def multihead(path, *, changed=None):
    """The attention of `transformer` in the graph that `nn.MultiheadAttention` is exported to.

    Lengths come first, Q, K and V are one projection that is cut by an axis of three, and heads are part of
    the batch. The bias of the keys is expanded to sizes that are read from Q and K.
    """
    held = {**weights(), **(changed or {})}
    size = WIDTH // HEADS
    ints = {
        "three": [0, 0, 3, WIDTH], "first": [0], "second": [1], "last": [-2], "heads": [0, -1, size],
        "batch": [-1, HEADS], "size": [size], "flat": [-1, WIDTH], "width": [WIDTH],
        "channels": [2], "between": [1, 2], "query": 2, "ones": [1, 1],
    }  # fmt: skip
    nodes = [
        helper.make_node("Transpose", ["x"], ["xt"], perm=[1, 0, 2]),
        helper.make_node("MatMul", ["xt", "qkv.w"], ["packed"], name="qkv"),
        helper.make_node("Reshape", ["packed", "three"], ["apart3"]),
        helper.make_node("Unsqueeze", ["apart3", "first"], ["lifted"]),
        helper.make_node("Transpose", ["lifted"], ["moved"], perm=[3, 1, 2, 0, 4]),
        helper.make_node("Squeeze", ["moved", "last"], ["three_of"]),
        helper.make_node("Shape", ["x"], ["length"], start=1, end=2),
        helper.make_node("Shape", ["x"], ["count"], start=0, end=1),
        helper.make_node("Concat", ["batch", "length", "size"], ["by_head"], axis=0),
        helper.make_node("Concat", ["length", "count", "width"], ["by_length"], axis=0),
    ]
    for at, each in enumerate("qkv"):
        nodes += [
            helper.make_node("Gather", ["three_of", f"{each}.at"], [f"{each}.y"], axis=0),
            helper.make_node("Reshape", [f"{each}.y", "heads"], [f"{each}.r"]),
            helper.make_node("Transpose", [f"{each}.r"], [f"{each}.t"], perm=[1, 0, 2]),
            helper.make_node("Reshape", [f"{each}.t", "by_head"], [f"{each}.h"]),
        ]
        ints[f"{each}.at"] = at
    nodes += [
        helper.make_node("ReduceMax", ["x", "channels"], ["bias"], keepdims=0),
        helper.make_node("Unsqueeze", ["bias", "between"], ["bias4"]),
        helper.make_node("Shape", ["q.h"], ["q.sizes"]),
        helper.make_node("Gather", ["q.sizes", "query"], ["queries"]),
        helper.make_node("Unsqueeze", ["queries", "first"], ["query1"]),
        helper.make_node("Shape", ["k.t"], ["k.sizes"]),
        helper.make_node("Slice", ["k.sizes", "second", "channels", "first"], ["keys1"]),
        helper.make_node("Concat", ["ones", "query1", "keys1"], ["bias.sizes"], axis=0),
        helper.make_node("Expand", ["bias4", "bias.sizes"], ["mask"]),
        helper.make_node("Attention", ["q.h", "k.h", "v.h", "mask"], ["attended"], name="attention"),
        helper.make_node("Transpose", ["attended"], ["back"], perm=[2, 0, 1, 3]),
        helper.make_node("Reshape", ["back", "flat"], ["rows"]),
        helper.make_node("Gemm", ["rows", "out.t", "out.b"], ["projected"], transB=1, name="out"),
        helper.make_node("Reshape", ["projected", "by_length"], ["by_lengths"]),
        helper.make_node("Transpose", ["by_lengths"], ["logits"], perm=[1, 0, 2]),
    ]
    tensors = {
        "qkv.w": np.concatenate([held[each] for each in "qkv"], axis=1),
        "out.t": np.ascontiguousarray(held["out"].T),
        "out.b": np.linspace(-1, 1, WIDTH, dtype="f"),
        **{name: np.array(numbers) for name, numbers in ints.items()},
    }
    graph = helper.make_graph(
        nodes,
        "multihead",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "S", WIDTH])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "S", WIDTH])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10), path)
    return path


def samples(count=6, *, spread=1.0, seed=1, length=8):
    dice = np.random.default_rng(seed)
    return [{"x": (spread * dice.normal(size=(2, length, WIDTH))).astype("f")} for _ in range(count)]


def padded(path, minus="-inf"):
    """Write a file with one head and a GEMM behind it, in which a key is hidden where its mask is true."""
    text = f"""<ir_version: 10, opset_import: ["": 23]>
    padded (float[B, S, {WIDTH}] x, bool[B, S] hidden) => (float[B, S, {WIDTH}] y)
    <float minus = {{{minus}}}> {{
        turned = Transpose<perm = [0, 2, 1]>(x)
        scores = MatMul(x, turned)
        one = Constant<value_ints: ints = [1]>()
        row = Unsqueeze(hidden, one)
        masked = Where(row, minus, scores)
        weights = Softmax<axis = -1>(masked)
        seen = MatMul(weights, x)
        y = MatMul(seen, w)
    }}"""
    model = parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(weights()["out"], "w"))
    save(model, path)
    return path


MISTAKES = {
    "quantization scale off by 4 %",
    "quantization scale of another tensor",
    "calibration clipped",
    "Q/DQ missing",
}
"""The mutations of the self-test for graphs with Q/DQ; in FP8 also `E5M2 for E4M3`."""


def long_attention(path, *, width=256, length=1024):
    """Write a file with one causal attention, two heads of 128, and its projections; the path."""
    dice, names = np.random.default_rng(0), ("q", "k", "v", "out")
    held = [
        numpy_helper.from_array(dice.normal(0, width**-0.5, (width, width)).astype("f"), f"{n}.w")
        for n in names
    ]
    nodes = [helper.make_node("MatMul", ["x", f"{each}.w"], [f"{each}.y"], name=each) for each in "qkv"]
    heads = {"q_num_heads": width // 128, "kv_num_heads": width // 128, "is_causal": 1}
    nodes.append(helper.make_node("Attention", ["q.y", "k.y", "v.y"], ["heads"], name="attention", **heads))
    nodes.append(helper.make_node("MatMul", ["heads", "out.w"], ["y"], name="out"))
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, length, width]) for n in "xy")
    graph = helper.make_graph(nodes, "long", [x], [y], held)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10), path)
    return path
