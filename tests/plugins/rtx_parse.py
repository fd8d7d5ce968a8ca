"""Parse and build a graph with the plugin's nodes in TensorRT-RTX; exit code 7 where the parser refuses it.

    python rtx_parse.py LIBRARY QUERY_HEADS

A process of its own: the parser ends it where it cannot find itself.
"""

import sys

import numpy as np
import tensorrt_rtx as trt
from onnx import TensorProto, helper, numpy_helper

LOOKUP = {"domain": "mha_deploy", "plugin_version": "1", "plugin_namespace": "mha_deploy"}
ROTARY = ("rotary", "rotary_size", "rotary_positions")
FLAGS = dict.fromkeys(("has_bias", "has_key_lengths", "has_gates", "has_cache", *ROTARY), 0)


def model(query_heads):
    """One projection to queries, keys and values, and an attention that reads them in place."""
    linear = helper.make_node(
        "MhaDeployLinear", ["x", "w"], ["p"], name="linear", has_bias=0, transposed=0, **LOOKUP
    )
    attributes = {
        "query_heads": query_heads,
        **{"key_heads": 2, "head_size": 64, "value_size": 64, "scale": 0.125, "causal": 2},
        **{"left_window": -1, "right_window": -1, "sources": [0, 0, 0], "offsets": [0, 512, 640]},
    }
    attention = helper.make_node(
        "MhaDeployAttention", ["p"], ["y"], name="attention", **attributes, **FLAGS, **LOOKUP
    )
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["B", "S", 256])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT16, ["B", "S", 512])
    weight = numpy_helper.from_array(np.ones((256, 768), np.float16), "w")
    graph = helper.make_graph([linear, attention], "layer", [x], [y], [weight])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("mha_deploy", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def main(library, query_heads):
    logger = trt.Logger(trt.Logger.ERROR)
    trt.Runtime(logger)
    assert trt.get_plugin_registry().load_library(library) is not None
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(model(query_heads).SerializeToString()):
        sys.exit(7)
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    profile.set_shape("x", (1, 1, 256), (2, 16, 256), (4, 64, 256))
    config.add_optimization_profile(profile)
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    plan = bytes(builder.build_serialized_network(network, config))
    assert b"MHDE" in plan, "the parameters are in the engine"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
