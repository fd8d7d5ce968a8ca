"""Graphs of layers that decode, their inputs, and what must come out."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from conformance import run_in_ort, run_in_reference
from decode_models import Layer, dynamic, feeds, fixed, with_whole_states

from mha_deploy.graph.attention_node import attention_nodes

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="TensorRT-RTX is not installed"
)

LAYERS = {
    "grouped": Layer(),
    "multi-head": Layer(Hkv=4),
    "multi-query": Layer(Hkv=1),
    "partial-rotary": Layer(rotary={"rotary_embedding_dim": 4}),
    "interleaved-rotary": Layer(rotary={"interleaved": 1}),
    "softcap": Layer(attention={"is_causal": 1, "softcap": 5.0}),
    "window": Layer(attention={"is_causal": 1, "left_window_size": 2}, opset=25),
    "one-token": Layer(S=1),
    "not-causal": Layer(attention={}),
    "masked": Layer(attention={}, mask=True),
}

KINDS = {"dynamic": dynamic, "fixed": fixed}

# New tokens, and how many each batch element has before them: empty, one past for all, ragged.
CALLS: dict[str, list[tuple[int, list[int]]]] = {
    "dynamic": [(1, [0]), (3, [0, 0]), (1, [4, 4]), (3, [4]), (3, [5, 5])],
    "fixed": [(1, [0]), (3, [0, 0]), (1, [4, 4]), (3, [4]), (1, [2, 7]), (4, [0, 5, 8])],
}


@functools.lru_cache(maxsize=4)
def proto_of(model: ir.Model) -> onnx.ModelProto:
    """The file of a model that nobody changes any more: most are run several times."""
    return ir.to_proto(model)


def reference(model: ir.Model, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    return run_in_reference(proto_of(model), inputs)


def evaluate(model: ir.Model, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run a lowered model: in ONNX Runtime where it is not left with an Attention that it cannot run."""
    kept = attention_nodes(model)
    outputs = reference(model, inputs) if kept else run_in_ort(proto_of(model), inputs)
    named = dict(zip((value.name for value in model.graph.outputs), outputs, strict=True))
    return with_whole_states(model, inputs, named)


@functools.cache
def expected(name: str, kind: str) -> tuple[ir.Model, list[tuple[dict[str, np.ndarray], list[np.ndarray]]]]:
    """A layer, and what it computes for each of the calls."""
    layer = LAYERS[name]
    model = KINDS[kind](layer)
    calls = [(S, starts) for S, starts in CALLS[kind] if layer.S in ("S", S)]
    inputs = [feeds(model, layer, starts=starts, S=S, P=starts[0]) for S, starts in calls]
    return model, [(each, reference(model, each)) for each in inputs]


ENGINE = Layer(E=256, Hq=32, Hkv=8, D=128, M=512, dtype="fp16")

PREFILL = {"B": (1, 1, 2), "S": (1, 128, 256), "P": (0, 0, 256)}

DECODE = {"B": (1, 1, 2), "S": (1, 1, 1), "P": (1, 128, 511)}


def shapes(model: ir.Model, sizes: dict[str, tuple[int, int, int]]) -> dict[str, Any]:
    """Smallest, usual and largest shape of each input."""
    dims = {v.name: [d if isinstance(d, int) else d.value for d in v.shape] for v in model.graph.inputs}
    return {
        name: tuple(tuple(d if isinstance(d, int) else sizes[d][at] for d in each) for at in range(3))
        for name, each in dims.items()
    }
