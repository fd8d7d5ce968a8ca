"""What is read of a graph is what goes into every attention, and nothing else is computed."""

import functools

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from attention_models import attention, random_feeds
from onnx import TensorProto, helper, numpy_helper

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.errors import DeployError
from mha_deploy.graph.attention_node import MASK, inputs_by_role
from mha_deploy.graph.file import load_graph
from mha_deploy.graph.ir import input_at
from mha_deploy.graph.mixed_precision import read_values
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import padding_mask, split_heads, visible_from
from mha_deploy.runtime import available_cpu_runtime, run_cases
from mha_deploy.validation.fp16_range import lowest_constant, measurable_attentions

# Between them: packed and separate projections, grouped heads, every mask, cross attention, two attentions,
# rotary embedding, both kinds of cache, a window.
NAMES = [
    "tiny-gqa",
    "tiny-packed",
    "tiny-padding",
    "tiny-causal-padding",
    "tiny-additive",
    "tiny-cross",
    "tiny-cross-padding",
    "tiny-sparse-heads",
    "tiny-weights",
    "tiny-head-mix",
    "tiny-rope",
    "tiny-dynamic",
    "tiny-preallocated",
    "tiny-window",
]
TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2, "fp32": 1e-5}


def exact_inputs(bundle, case):
    """Q, K, V and mask of each attention, from the PyTorch layer in float64."""
    spec, precision = bundle.manifest.spec, bundle.manifest.precision
    rounded = build_module(spec, seed=0, dtype=getattr(torch, precision.torch_name))
    layer = build_module(spec, weights=rounded.state_dict(), dtype=torch.float64)
    feeds = {
        name: torch.from_numpy(array if array.dtype == np.int32 else array.astype(np.float64))
        for name, array in case.inputs.items()
    }
    query, lengths = feeds.get("query", feeds.get("x")), feeds.get("key_lengths")
    Q, K, V = layer.project(query, feeds.get("key"), feeds.get("value"))
    first = {"Q": Q, "K": K, "V": V} if spec.cache == "none" else cached_inputs(layer, feeds, Q, K, V)
    if spec.rope is not None and spec.cache == "none":
        first["Q"], first["K"] = layer.rotate(Q, K, torch.arange(Q.shape[1]))
    if lengths is not None:
        first["mask"] = padding_mask(lengths, K.shape[1]).expand(-1, 1, Q.shape[1], K.shape[1])
    if "attention_bias" in feeds:
        first["mask"] = feeds["attention_bias"]
    inputs = [first]
    if spec.variant == "head-mix":
        tokens = layer.heads(query)[0].reshape(-1, spec.Hq, spec.D)
        inputs.append({"Q": layer.mix_q(tokens), "K": layer.mix_k(tokens), "V": layer.mix_v(tokens)})
    return [{role: tensor.numpy() for role, tensor in each.items()} for each in inputs]


def cached_inputs(layer, feeds, Q, K, V):
    """The same behind a cache: new rows with their past, or buffers with the new rows in them."""
    spec, S = layer.spec, Q.shape[1]
    if spec.cache == "dynamic":
        past = feeds["past_key"], feeds["past_value"]
        positions = past[0].shape[2] + torch.arange(S)
        Q, K = layer.rotate(Q, K, positions)
        first = {"Q": Q, "K": K, "V": V, "past_key": past[0], "past_value": past[1]}
        if spec.window is not None:
            first["mask"] = visible_from(positions, past[0].shape[2] + S, spec.window)[None, None]
        return first
    Q, K = layer.rotate(Q, K, feeds["lengths"][:, None] + torch.arange(S))
    buffers = {"K": feeds["key_cache"].clone(), "V": feeds["value_cache"].clone()}
    for row, start in enumerate(feeds["lengths"].tolist()):
        for role, new in (("K", K), ("V", V)):
            buffers[role][row, :, start : start + S] = split_heads(new, spec.Hkv)[row]
    return {"Q": split_heads(Q, spec.Hq), **buffers, "lengths": (feeds["lengths"] + S).long()}


def read_inputs(model, cases, runtime):
    """The attentions of a model, and what reads their inputs in each case."""
    nodes = [node for node in model.graph if node.op_type == "Attention"]
    values = [value for node in nodes for value in inputs_by_role(node).values()]
    return nodes, read_values(functools.partial(run_cases, runtime), model, values, cases)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "fp16") for name in NAMES),
        ("tiny-packed", "bf16"),
        ("tiny-head-mix", "fp32"),
        ("tiny-rope", "fp32"),
    ],
)
def test_the_inputs_of_every_attention_are_read(bundles, name, precision):
    bundle = bundles(name, precision)
    model, golden = load_graph(bundle.model_path), list(golden_cases(bundle))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    cases = {case.name: case.inputs for case in golden}
    nodes, reads = read_inputs(model, cases, available_cpu_runtime(bundle.manifest.precision))
    for case, read in zip(golden, reads, strict=True):
        for node, wanted in zip(nodes, exact_inputs(bundle, case), strict=True):
            got = inputs_by_role(node)
            assert set(got) == set(wanted)
            for role, want in wanted.items():
                array = read(got[role]).astype(want.dtype)
                assert array.shape == want.shape, role
                limit = TOLERANCE[precision] * max(1.0, np.abs(want * 1.0).max(initial=0.0))
                assert np.abs(array * 1.0 - want).max(initial=0.0) <= limit, role
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_else_is_computed(bundles, name):
    model = load_graph(bundles(name).model_path)
    nodes = [node for node in model.graph if node.op_type == "Attention"]
    values = [value for node in nodes for value in inputs_by_role(node).values()]
    probes = []
    list(read_values(lambda probe, cases: probes.append(probe) or [{}], model, values, {"one": {}}))
    (probe,) = probes
    assert {value.name for value in probe.graph.outputs} == {v.name for v in values if v.producer()}
    count = sum(node.op_type == "Attention" for node in probe.graph)
    assert count == len(nodes) - 1  # the last one is not needed, those before it are
    assert not any("TopK" in node.op_type for node in probe.graph)
    assert not set(probe.graph.initializers) & {"o.weight.T", "o.bias", "gate.weight.T"}
    for key, value in probe.graph.initializers.items():
        assert value.uses()
        assert value.const_value is model.graph.initializers[key].const_value
    onnx.checker.check_model(ir.to_proto(probe), full_check=True)


def test_inputs_of_the_graph_need_no_run():
    model = attention((2, 3, 5, 8), (2, 3, 5, 8))
    node = model.graph[0]
    for position in (1, 2):
        node.replace_input_with(position, node.inputs[0])
    feeds = random_feeds(model, {})
    _, (read,) = read_inputs(model, {"only": feeds}, "no such runtime")
    assert all((read(value) == feeds["q"]).all() for value in node.inputs)


# -- constants behind the mask -----------------------------------------------------------------


def masked(nodes, initializers=(), mask="mask"):
    """An FP16 attention of q, k, v whose mask is made from the boolean input `seen` by the given nodes."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [1, 2, 4, 8]) for name in "qkv"]
    seen = helper.make_tensor_value_info("seen", TensorProto.BOOL, [1, 1, 4, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT16, [1, 2, 4, 8])
    attend = helper.make_node("Attention", ["q", "k", "v", mask], ["y"], name="att")
    graph = helper.make_graph([*nodes, attend], "masked", [*values, seen], [y], list(initializers))
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def where(hidden):
    return [
        helper.make_node("Where", ["seen", "zero", hidden], ["wide"]),
        helper.make_node("Cast", ["wide"], ["mask"], to=TensorProto.FLOAT16),
    ]


def scalar(name, number, dtype=np.float32):
    return numpy_helper.from_array(np.array(number, dtype), name)


def lowest(model):
    return lowest_constant(input_at(model.graph[-1], MASK))


def test_a_constant_is_found_through_the_cast_that_loses_it():
    model = masked(where("hidden"), [scalar("zero", 0.0), scalar("hidden", -1e9)])
    assert lowest(model) == -1e9
    feeds = random_feeds(model, {})
    (node,), (read,) = read_inputs(model, {"only": feeds}, "ort-cpu")
    mask = read(node.inputs[MASK])
    assert np.isneginf(mask[~feeds["seen"]]).all()
    assert (mask[feeds["seen"]] == 0).all()


def test_what_only_decides_does_not_count_and_a_bound_does():
    numbers = [scalar("zero", 0.0), scalar("hidden", -1e9), scalar("least", -3e38), scalar("bound", -3e4)]
    nodes = [
        helper.make_node("Where", ["seen", "zero", "hidden"], ["chosen"]),
        helper.make_node("LessOrEqual", ["chosen", "least"], ["lost"]),
        helper.make_node("Where", ["lost", "zero", "chosen"], ["kept"]),
        helper.make_node("Cast", ["kept"], ["mask"], to=TensorProto.FLOAT16),
    ]
    assert lowest(masked(nodes, numbers[:3])) == -1e9
    bounded = helper.make_node("Max", ["kept", "bound"], ["bounded"])
    nodes[-1] = helper.make_node("Cast", ["bounded"], ["mask"], to=TensorProto.FLOAT16)
    assert lowest(masked([*nodes[:-1], bounded, nodes[-1]], numbers)) == -3e4


@pytest.mark.parametrize(("replaced", "number"), [(-65504.0, None), (0.0, -6e4)])
def test_a_number_in_the_place_of_one_that_hides_keys_hides_none_by_itself(replaced, number):
    """In the place of 0 it does, as where a mask of zeros and ones is filled."""
    nodes = [
        helper.make_node("MatMul", ["q", "turned"], ["scores"]),
        helper.make_node("Equal", ["scores", "replaced"], ["is_it"]),
        helper.make_node("Where", ["is_it", "other", "scores"], ["mask"]),
    ]
    turn = helper.make_node("Transpose", ["k"], ["turned"], perm=[0, 1, 3, 2])
    numbers = [scalar("replaced", replaced, np.float16), scalar("other", -6e4, np.float16)]
    found = lowest(masked([turn, *nodes], numbers))
    assert found == (None if number is None else np.float16(number))


@pytest.mark.parametrize(
    "attribute",
    [
        {"value": scalar("", -3e4, np.float32)},
        {"value_float": -3e4},
        {"value_floats": [0.0, -3e4, float("-inf"), float("nan")]},
    ],
    ids=lambda attribute: next(iter(attribute)),
)
def test_a_constant_may_be_a_node(attribute):
    constant = helper.make_node("Constant", [], ["hidden"], **attribute)
    first = helper.make_node("ReduceMin", ["hidden"], ["least"], keepdims=0)
    assert lowest(masked([constant, first, *where("least")], [scalar("zero", 0.0)])) == -3e4


def test_constants_of_other_tensors_and_whole_numbers_do_not_count():
    shape = [numpy_helper.from_array(np.array([n, 1, 4, 4]), f"shape_{-n}") for n in (-1, -100)]
    other = [scalar("other", -6e4, np.float16), scalar("zero", 0.0), scalar("hidden", -7.0)]
    nodes = [
        helper.make_node("Mul", ["q", "other"], ["q_large"]),
        helper.make_node("Where", ["seen", "zero", "hidden"], ["wide"]),
        helper.make_node("Max", ["shape_1", "shape_100"], ["shape"]),
        helper.make_node("Reshape", ["wide", "shape"], ["shaped"]),
        helper.make_node("Cast", ["shaped"], ["mask"], to=TensorProto.FLOAT16),
    ]
    model = masked(nodes, [*shape, *other])
    model.graph[-1].replace_input_with(0, model.graph[0].outputs[0])
    assert lowest(model) == -7.0


def test_a_mask_without_constants_has_none():
    assert lowest(masked([], mask="seen")) is None
    assert lowest(attention((2, 3, 5, 8), (2, 3, 5, 8))) is None


# -- attentions out of reach ------------------------------------------------------------------


def test_a_graph_without_attention_is_refused():
    model = attention((2, 3, 5, 8), (2, 3, 5, 8))
    model.graph[0].op_type = "Nothing"
    with pytest.raises(DeployError, match="no Attention node"):
        measurable_attentions(model)


def test_an_attention_in_a_function_is_refused():
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], name="inner")
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("local", 1)]
    function = helper.make_function("local", "Attend", ["q", "k", "v"], ["y"], [node], opsets[:1])
    call = helper.make_node("Attend", ["q", "k", "v"], ["y"], domain="local")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2, 4, 8]) for name in "qkvy"]
    graph = helper.make_graph([call], "outer", values[:3], values[3:])
    model = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=10)
    with pytest.raises(DeployError, match="function or a branch") as caught:
        measurable_attentions(ir.from_proto(model))
    assert caught.value.got == "inner in Attend"
