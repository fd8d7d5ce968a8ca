"""A preallocated cache in ONNX Runtime's GroupQueryAttention, which writes the new rows itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from conformance import run_in_ort
from decode_graphs import LAYERS, expected, reference
from decode_models import Layer, dynamic, feeds, fixed

from mha_deploy.graph.lower import lower
from mha_deploy.graph.lower.cache import ENTRIES_NOTE, noted_caches
from mha_deploy.graph.lower.call import LoweringError

CAUSAL = [name for name, layer in LAYERS.items() if "is_causal" in layer.attention]
CACHES = ("key_cache", "value_cache")

Arrays = dict[str, np.ndarray]


def run(lowered: ir.Model, inputs: Arrays, total: int) -> list[np.ndarray]:
    return run_in_ort(ir.to_proto(lowered), {**inputs, "total_length": np.array(total, np.int32)})


def total_for(inputs: Arrays) -> int | None:
    """What `total_length` has to be; None where ONNX Runtime does not take the call."""
    B, S, _ = inputs["x"].shape
    empty = not inputs["lengths"].any()
    if S > 1 and not empty and B > 1:
        return None
    return S if S > 1 and empty else inputs["key_cache"].shape[2]


def valid(array: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    """The valid rows: what stands behind them is nobody's business."""
    return [array[b, :, :end] for b, end in enumerate(ends)]


def compare(got: list[np.ndarray], wanted: list[np.ndarray], ends: np.ndarray) -> None:
    np.testing.assert_allclose(got[0], wanted[0], rtol=2e-5, atol=2e-6)
    for one, other in zip(got[1:], wanted[1:], strict=True):
        assert one.shape == other.shape
        for row, row_wanted in zip(valid(one, ends), valid(other, ends), strict=True):
            np.testing.assert_allclose(row, row_wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", CAUSAL)
def test_the_operator_computes_the_same(name: str) -> None:
    model, calls = expected(name, "fixed")
    lowered = lower(model, "contrib")
    onnx.checker.check_model(ir.to_proto(lowered), full_check=True)
    operators = [node.op_type for node in lowered.graph if node.domain == "com.microsoft"]
    assert operators == ["RotaryEmbedding", "RotaryEmbedding", "GroupQueryAttention"]
    taken = [(inputs, outputs) for inputs, outputs in calls if total_for(inputs) is not None]
    assert len(taken) >= 3
    for inputs, outputs in taken:
        got = run(lowered, inputs, total_for(inputs) or 0)
        compare(got, outputs, inputs["lengths"] + inputs["x"].shape[1])


def test_interface() -> None:
    model = fixed(Layer())
    lowered = lower(model, "contrib")
    assert [value.name for value in lowered.graph.outputs] == ["y", "key_cache_out", "value_cache_out"]
    total = lowered.graph.inputs[-1]
    assert (total.name, total.dtype, total.shape) == ("total_length", ir.DataType.INT32, ir.Shape([]))
    assert not noted_caches(lowered, ENTRIES_NOTE)
    assert "total_length" not in [value.name for value in lower(dynamic(Layer()), "contrib").graph.inputs]
    (node,) = [node for node in lowered.graph if node.op_type == "GroupQueryAttention"]
    assert [value.name for value in node.inputs[3:5]] == list(CACHES)


def test_no_size_is_sent_to_the_device() -> None:
    """A tensor that is computed from a Shape stands in host memory; only shapes may be made of it."""
    lowered = lower(fixed(Layer()), "contrib")
    host = [node for node in lowered.graph if node.op_type == "Shape"]
    assert host
    for node in host:
        for use in node.outputs[0].uses():
            assert use.node.op_type in ("Gather", "Concat", "Reshape", "ConstantOfShape")
            host += [use.node] if use.node.op_type in ("Gather", "Concat") else []


def test_one_token_takes_the_lengths_as_they_are() -> None:
    lowered = lower(fixed(Layer(S=1)), "contrib")
    (node,) = [node for node in lowered.graph if node.op_type == "GroupQueryAttention"]
    last = node.inputs[5].producer()
    assert last.op_type == "Cast"
    assert not [node for node in lowered.graph if node.op_type in ("Shape", "ReduceSum", "Add")]


def test_padded_prompts_then_tokens() -> None:
    """Prompts of 5, 2 and 3 tokens side by side, padded on the right; then one token each, twice."""
    layer, lengths = Layer(), np.array([5, 2, 3])
    model = fixed(layer)
    lowered = lower(model, "contrib")
    prompt = feeds(model, layer, starts=[0, 0, 0], S=5)
    prompt |= {name: np.zeros_like(prompt[name]) for name in CACHES}
    y, *states = run(lowered, prompt, 5)
    alone = []
    for b, length in enumerate(lengths):
        row = {name: array[b : b + 1] for name, array in prompt.items()}
        row |= {"x": row["x"][:, :length], "positions": row["positions"][:, :length]}
        wanted, *kept = reference(model, row)
        np.testing.assert_allclose(y[b : b + 1, :length], wanted, rtol=2e-5, atol=2e-6)
        alone.append(kept)
    wanted_states = [np.concatenate(each) for each in zip(*alone, strict=True)]
    for step in range(2):
        token = feeds(model, layer, starts=list(lengths + step), S=1)
        got = run(lowered, {**token, **dict(zip(CACHES, states, strict=True))}, layer.M)
        wanted_all = reference(model, {**token, **dict(zip(CACHES, wanted_states, strict=True))})
        compare(got, wanted_all, lengths + step + 1)
        states, wanted_states = got[1:], wanted_all[1:]


def test_a_bound_cache_is_updated_where_it_is() -> None:
    """Input and output in the same memory, as on a GPU: nothing else of the cache is touched."""
    layer = Layer()
    model = fixed(layer)
    inputs = feeds(model, layer, starts=[2, 7], S=1)
    wanted = reference(model, inputs)
    inputs["total_length"] = np.array(layer.M, np.int32)
    lowered = ir.to_proto(lower(model, "contrib")).SerializeToString()
    session = onnxruntime.InferenceSession(lowered, providers=["CPUExecutionProvider"])
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("y")
    for name in CACHES:
        binding.bind_ortvalue_output(f"{name}_out", values[name])
    session.run_with_iobinding(binding)
    np.testing.assert_allclose(binding.get_outputs()[0].numpy(), wanted[0], rtol=2e-5, atol=2e-6)
    for name, state in zip(CACHES, wanted[1:], strict=True):
        np.testing.assert_allclose(values[name].numpy(), state, rtol=2e-5, atol=2e-6)


def test_what_the_operator_does_not_take() -> None:
    layer = Layer()
    model = fixed(layer)
    lowered = lower(model, "contrib")
    several = feeds(model, layer, starts=[1, 5], S=3)
    with pytest.raises(Exception, match="batch_size must be 1"):
        run(lowered, several, layer.M)
    # A first prompt is announced, not detected: behind a past it is written over the cache.
    behind = feeds(model, layer, starts=[4], S=3)
    assert not np.allclose(run(lowered, behind, 3)[0], reference(model, behind)[0], atol=1e-3)


def test_head_sizes_are_refused_by_name() -> None:
    with pytest.raises(LoweringError, match="dialect onnx") as caught:
        lower(fixed(Layer(D=4)), "contrib")
    assert caught.value.feature == "preallocated cache of a head size that is not a multiple of 8"


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["not-causal", "masked"])
def test_a_cache_without_causality_is_copied_before_multi_head_attention(name: str) -> None:
    for layer in (LAYERS[name], replace(LAYERS[name], Hkv=4)):
        model = fixed(layer)
        lowered = lower(model, "contrib")
        assert "total_length" not in [value.name for value in lowered.graph.inputs]
        assert [node.op_type for node in lowered.graph if node.name == "att"] == ["MultiHeadAttention"]
        inputs = feeds(model, layer, starts=[2, 5], S=3)
        outputs = run_in_ort(ir.to_proto(lowered), inputs)
        for got, wanted in zip(outputs, reference(model, inputs), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)
