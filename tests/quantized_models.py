"""A small transformer as an ONNX file, without PyTorch: one attention, an MLP, and logits."""

from functools import cache

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

WIDTH, HEADS, CLASSES = 16, 4, 8
GEMMS = ("qkv", "out", "up", "down", "head")


@cache
def weights(seed=0):
    dice = np.random.default_rng(seed)
    sizes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 32), "down": (32, WIDTH)}
    sizes["head"] = (WIDTH, CLASSES)
    return {name: dice.normal(0, shape[0] ** -0.5, shape).astype("f") for name, shape in sizes.items()}


def transformer(path, *, opset=23, changed=None):
    """Write the file; `changed` are weights in place of the drawn ones."""
    held = {**weights(), **(changed or {})}
    nodes = [
        helper.make_node("MatMul", ["x", "qkv.w"], ["qkv.y"], name="qkv"),
        helper.make_node("Split", ["qkv.y"], ["q", "k", "v"], num_outputs=3, axis=-1, name="split"),
        helper.make_node(
            "Attention", ["q", "k", "v"], ["heads"], name="attention", q_num_heads=HEADS, kv_num_heads=HEADS
        ),
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
        [numpy_helper.from_array(array, f"{name}.w") for name, array in held.items()],
    )
    imports = [helper.make_opsetid("", opset)]
    save(helper.make_model(graph, opset_imports=imports, ir_version=10), path)
    return path


def samples(count=6, *, spread=1.0, seed=1):
    dice = np.random.default_rng(seed)
    return [{"x": (spread * dice.normal(size=(2, 8, WIDTH))).astype("f")} for _ in range(count)]
