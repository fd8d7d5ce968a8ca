"""A weakly typed network constrained to the types of its graph: TensorRT 8.6 chooses for itself otherwise."""

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest

from mha_deploy.runtime.tensorrt.builder import constrain_types

DataType = Enum("DataType", "HALF FLOAT INT32")
LayerType = Enum("LayerType", "CONSTANT SHUFFLE MATRIX_MULTIPLY")


@dataclass
class Tensor:
    name: str
    dtype: DataType = DataType.FLOAT  # what a weakly typed network says of every real number
    shape: tuple = (2, 2)


@dataclass
class Layer:
    type: LayerType
    inputs: list
    outputs: list
    weights: np.ndarray | None = None
    precision: DataType | None = None
    output_types: dict = field(default_factory=dict)

    def __setattr__(self, name, value):
        if name != "__class__":  # how TensorRT casts down
            super().__setattr__(name, value)

    num_inputs = property(lambda self: len(self.inputs))
    num_outputs = property(lambda self: len(self.outputs))

    def get_input(self, place):
        return self.inputs[place]

    def get_output(self, place):
        return self.outputs[place]

    def set_output_type(self, place, dtype):
        self.output_types[place] = dtype


class Network:
    def __init__(self, *layers):
        self.layers = layers

    num_layers = property(lambda self: len(self.layers))

    def get_layer(self, index):
        return self.layers[index]


RT = SimpleNamespace(
    module=SimpleNamespace(DataType=DataType, LayerType=LayerType, IConstantLayer=object),
    can=SimpleNamespace(bf16_type=False),
)


def matmul(weights_dtype):
    """A MatMul whose weights the parser brings to another rank, under a name of its own."""
    x, weight, turned, y = (Tensor(name) for name in ("x", "weight", "(Unnamed) output", "y"))
    return Network(
        Layer(LayerType.CONSTANT, [], [weight], weights=np.ones((2, 2), weights_dtype)),
        Layer(LayerType.SHUFFLE, [weight], [turned]),
        Layer(LayerType.MATRIX_MULTIPLY, [x, turned], [y]),
    )


def test_weights_that_are_wide_in_the_graph_stay_wide_on_their_way_to_the_matmul():
    network = matmul(np.float32)
    constrain_types(RT, network, {"x": "fp32", "y": "fp32"}, "fp16")
    assert [layer.precision for layer in network.layers] == [DataType.FLOAT] * 3
    assert all(layer.output_types == {0: DataType.FLOAT} for layer in network.layers)


def test_weights_of_the_usual_type_are_left_alone_and_the_rest_is_constrained():
    network = matmul(np.float16)
    constrain_types(RT, network, {"x": "fp16", "y": "fp16"}, "fp16")
    assert [layer.precision for layer in network.layers] == [None, DataType.HALF, DataType.HALF]


@pytest.mark.parametrize("dtype", [DataType.INT32])
def test_what_counts_is_not_touched(dtype):
    network = Network(Layer(LayerType.SHUFFLE, [Tensor("shape", dtype)], [Tensor("shape2", dtype)]))
    constrain_types(RT, network, {}, "fp16")
    assert network.layers[0].precision is None
