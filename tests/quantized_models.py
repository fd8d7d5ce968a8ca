"""A small transformer as an ONNX file, without PyTorch: one attention, an MLP, and logits."""

from functools import cache

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

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


def samples(count=6, *, spread=1.0, seed=1, length=8):
    dice = np.random.default_rng(seed)
    return [{"x": (spread * dice.normal(size=(2, length, WIDTH))).astype("f")} for _ in range(count)]


MISTAKES = {
    "quantization scale off by 4 %",
    "quantization scale of another tensor",
    "calibration clipped",
    "Q/DQ missing",
}
"""The mutations of the self-test for graphs with Q/DQ; in FP8 also `E5M2 for E4M3`."""
