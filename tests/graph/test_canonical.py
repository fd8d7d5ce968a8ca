"""The check of the canonical graph refuses every graph that is something else."""

import numpy as np
import onnx_ir as ir
import pytest

from mha_deploy.errors import DeployError, ExportError
from mha_deploy.graph.canonical import check_canonical
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.precision import PRECISIONS

FP16, FP32 = ir.DataType.FLOAT16, ir.DataType.FLOAT
Q, K, V = range(3)


@pytest.fixture
def tampered(bundles, tmp_path):
    """A function that alters an exported graph, writes it, and checks it."""

    def check(change, name="tiny-gqa", precision="fp16"):
        model = ir.load(bundles(name, precision).model_path)
        change(model.graph)
        ir.save(model, tmp_path / "model.onnx")
        return check_canonical(tmp_path / "model.onnx", find_spec(name), PRECISIONS[precision])

    return check


@pytest.fixture
def refusal(tampered):
    """A function that gives the message with which an altered graph is refused."""

    def message(change, name="tiny-gqa", precision="fp16"):
        with pytest.raises(ExportError) as caught:
            tampered(change, name, precision)
        return str(caught.value)

    return message


# -- ways to alter a graph ---------------------------------------------------------------------


def attention(graph, number=0):
    return [node for node in graph if node.op_type == "Attention"][number]


def constant(graph, name, numbers):
    value = ir.val(name, const_value=ir.tensor(np.array(numbers, dtype=np.int64), name=name))
    graph.initializers[name] = value
    return value


def chain(graph, before, value, *steps):
    """Insert nodes one after the other; a step is (operator, other inputs, type, attributes)."""
    for op_type, inputs, dtype, attributes in steps:
        name = f"stray_{len(graph)}"
        node = ir.node(op_type, inputs=[value, *inputs], attributes=attributes, name=name)
        result = node.outputs[0]
        result.name, result.dtype = f"{name}.out", dtype
        result.shape = value.shape if op_type in ("Cast", "Identity") else None
        graph.insert_before(before, node)
        value = result
    return value


def before_input(graph, position, *steps, number=0):
    """Put nodes between an attention and one of its inputs."""
    node = attention(graph, number)
    node.replace_input_with(position, chain(graph, node, node.inputs[position], *steps))


def after_attention(graph, *steps):
    """Put nodes between an attention and what reads its heads."""
    node = attention(graph)
    consumer = next(iter(node.outputs[0].uses())).node
    consumer.replace_input_with(0, chain(graph, consumer, node.outputs[0], *steps))


def cast(dtype):
    return ("Cast", [], dtype, {"to": dtype})


def identity():
    return ("Identity", [], FP16, {})


# -- what passes -------------------------------------------------------------------------------


@pytest.mark.sweep(1)  # every export checks its graph like this
@pytest.mark.parametrize(
    "name", ["tiny-gqa", "tiny-head-mix", "tiny-sparse-heads", "tiny-packed", "tiny-weights"]
)
def test_an_exported_graph_passes_and_the_checks_are_reported(tampered, name):
    checked = tampered(lambda graph: None, name)
    assert len(checked) == 5
    assert f"{find_spec(name).attention_count} fused Attention node(s), K and V not repeated" in checked


def test_nodes_that_change_no_number_are_let_through(tampered):
    tampered(lambda graph: before_input(graph, Q, identity(), identity()))


# -- around the attention ----------------------------------------------------------------------


@pytest.mark.parametrize("position", [Q, K, V])
def test_a_cast_before_the_attention_is_refused(refusal, position):
    message = refusal(lambda graph: before_input(graph, position, cast(FP16)))
    assert "There is a stray Cast beside attention." in message
    assert "got: stray_" in message


def test_a_detour_through_float32_is_refused(refusal):
    assert "a stray Cast" in refusal(lambda graph: before_input(graph, Q, cast(FP32), cast(FP16)))


def test_a_cast_behind_a_change_of_layout_is_refused(refusal):
    assert "a stray Cast" in refusal(lambda graph: before_input(graph, Q, cast(FP16), identity(), identity()))


def test_a_cast_after_the_attention_is_refused(refusal):
    assert "a stray Cast" in refusal(lambda graph: after_attention(graph, identity(), cast(FP16)))


@pytest.mark.slow
def test_a_cast_before_the_second_attention_is_refused(refusal):
    message = refusal(lambda graph: before_input(graph, V, cast(FP16), number=1), "tiny-head-mix")
    assert "a stray Cast" in message


def repeat_keys(graph, position):
    """Give every query head its own copy of K or V: [B, S, 2·16] -> [B, S, 2, 2, 16] -> [B, S, 4·16]."""
    split = constant(graph, f"split_{position}", [0, 0, 2, 1, 16])
    repeats = constant(graph, f"repeats_{position}", [1, 1, 1, 2, 1])
    merge = constant(graph, f"merge_{position}", [0, 0, 64])
    steps = [("Reshape", [split], FP16, {}), ("Expand", [repeats], FP16, {}), ("Reshape", [merge], FP16, {})]
    before_input(graph, position, *steps)


def test_keys_and_values_repeated_in_the_graph_are_refused(refusal):
    def repeat(graph):
        repeat_keys(graph, K)
        repeat_keys(graph, V)
        attention(graph).attributes["kv_num_heads"] = ir.AttrInt64("kv_num_heads", 4)

    assert "does not have the spec's heads (Hq, Hkv, D, causal)." in refusal(repeat)


@pytest.mark.parametrize("op_type", ["Expand", "Tile"])
def test_an_expanded_input_is_refused_even_if_its_heads_are_right(refusal, op_type):
    def expand(graph):
        ones = constant(graph, "ones", [1, 1, 1])
        before_input(graph, K, (op_type, [ones], FP16, {}), identity())

    assert f"There is a stray {op_type} beside attention." in refusal(expand)


# -- the attention itself ----------------------------------------------------------------------


def primitives(graph):
    """softmax(Q Kᵀ) V as single nodes, all heads taken for one."""
    node = attention(graph)
    q, k, v = node.inputs[:3]
    transposed = chain(graph, node, k, ("Transpose", [], FP16, {"perm": [0, 2, 1]}))
    steps = [("MatMul", [transposed], FP16, {}), ("Softmax", [], FP16, {}), ("MatMul", [v], FP16, {})]
    return node, chain(graph, node, q, *steps)


def test_a_decomposed_attention_is_refused(refusal):
    def decompose(graph):
        node, heads = primitives(graph)
        node.outputs[0].replace_all_uses_with(heads)
        graph.remove(node, safe=True)

    message = refusal(decompose, "tiny-mha")
    assert "tiny-mha must have 1 fused attention node(s)." in message
    assert "got: 0: none" in message


def test_an_unfused_matmul_beside_a_fused_attention_is_refused(refusal):
    def beside(graph):
        node, heads = primitives(graph)
        node.replace_input_with(V, heads)

    assert "An attention was left unfused." in refusal(beside, "tiny-mha")


def test_one_attention_too_many_is_refused(refusal):
    def double(graph):
        node = attention(graph)
        heads = {"q_num_heads": 4, "kv_num_heads": 2}
        again = ir.node("Attention", inputs=node.inputs[:3], attributes=heads, name="again")
        again.outputs[0].name = "unused"
        graph.insert_after(node, again)

    assert "got: 2: attention, again" in refusal(double)


@pytest.mark.parametrize(
    ("attribute", "value"), [("q_num_heads", 2), ("q_num_heads", 8), ("kv_num_heads", 1), ("is_causal", 0)]
)
def test_a_wrong_attribute_of_the_heads_is_refused(refusal, attribute, value):
    def change(graph):
        attention(graph).attributes[attribute] = ir.AttrInt64(attribute, value)

    refusal(change)


def test_wrong_heads_are_named(refusal):
    def swap(graph):
        attention(graph).attributes["q_num_heads"] = ir.AttrInt64("q_num_heads", 8)
        attention(graph).attributes["kv_num_heads"] = ir.AttrInt64("kv_num_heads", 4)

    assert "got: (8, 4, 8, True)" in refusal(swap)


# -- inputs, outputs and types -----------------------------------------------------------------


def rename(value, name):
    value.name = name


@pytest.mark.parametrize(
    "change",
    [
        lambda graph: rename(graph.inputs[0], "hidden_states"),
        lambda graph: rename(graph.outputs[0], "y"),
        lambda graph: setattr(graph.inputs[0], "shape", ir.Shape([2, "S", 64])),
        lambda graph: setattr(graph.inputs[0], "shape", ir.Shape(["batch", "S", 64])),
        lambda graph: setattr(graph.outputs[0], "shape", ir.Shape(["B", 16, 64])),
        lambda graph: setattr(graph.outputs[0], "shape", ir.Shape(["S", "B", 64])),
        lambda graph: graph.outputs.append(attention(graph).outputs[0]),
    ],
    ids=["input-name", "output-name", "fixed", "other-axis", "fixed-output", "swapped-axes", "more-outputs"],
)
def test_another_interface_is_refused(refusal, change):
    message = refusal(change)
    assert "does not have the spec's inputs or outputs" in message or "not valid ONNX" in message


def test_outputs_in_another_order_are_refused(refusal):
    message = refusal(lambda graph: graph.outputs.insert(0, graph.outputs.pop()), "tiny-dynamic")
    assert "does not have the spec's inputs or outputs" in message


def float32_weight(graph, name):
    """Turn a weight into float32, and give the value."""
    old = graph.initializers[name]
    array = old.const_value.numpy().astype(np.float32)
    new = ir.val(f"{name}/wide", const_value=ir.tensor(array, name=f"{name}/wide"))
    graph.initializers[new.name] = new
    return old, new


def test_a_float32_weight_in_a_half_precision_graph_is_refused(refusal):
    def widen(graph):
        old, new = float32_weight(graph, "o.weight.T")
        old.replace_all_uses_with(new)
        graph.initializers.pop(old.name)

    assert "The exported file is not valid ONNX." in refusal(widen)


@pytest.mark.parametrize("name", ["o.bias", "o.weight.T"])
def test_a_float32_weight_behind_a_cast_is_refused(refusal, name):
    def widen(graph):
        old, new = float32_weight(graph, name)
        (usage,) = old.uses()
        usage.node.replace_input_with(usage.idx, chain(graph, usage.node, new, cast(FP16)))
        graph.initializers.pop(old.name)

    message = refusal(widen)
    if name == "o.bias":  # a weight behind a Cast is first of all a matmul of two computed tensors
        assert "The graph was requested in fp16." in message
        assert "got: o.bias/wide of Cast stray_" in message


def test_a_graph_of_another_precision_is_refused(bundles):
    with pytest.raises(ExportError, match="inputs or outputs"):
        check_canonical(bundles("tiny-gqa").model_path, find_spec("tiny-gqa"), PRECISIONS["fp32"])


def test_a_graph_of_another_layer_is_refused(bundles):
    with pytest.raises(ExportError):
        check_canonical(bundles("tiny-gqa").model_path, find_spec("tiny-mha"), PRECISIONS["fp16"])


def test_a_file_that_is_no_graph_is_refused(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"no graph at all")
    with pytest.raises(DeployError):
        check_canonical(tmp_path / "model.onnx", find_spec("tiny-mha"), PRECISIONS["fp16"])


# -- caches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("tiny-dynamic", "past and present keys and values are inputs and outputs"),
        pytest.param(
            "tiny-window", "past and present keys and values are inputs and outputs", marks=pytest.mark.slow
        ),
        ("tiny-preallocated", "TensorScatter updates the preallocated KV cache"),
    ],
)
def test_the_check_of_a_cache_is_reported(tampered, name, reported):
    lines = tampered(lambda graph: None, name)
    assert any(reported in line for line in lines)
    assert any("RotaryEmbedding" in line for line in lines) == (name != "tiny-window")


def past_copied(graph):
    """The past comes in by way of another node."""
    before_input(graph, 4, ("Identity", [], FP16, {}))


def past_swapped_for_a_copy_of_the_values(graph):
    node = attention(graph)
    node.replace_input_with(4, None)
    node.replace_input_with(5, None)


def lengths_left_out(graph):
    attention(graph).replace_input_with(6, None)


def scatter_passed_by(graph):
    """The attention reads the buffer as it was before the new rows."""
    node = attention(graph)
    node.replace_input_with(K, node.inputs[K].producer().inputs[0])


def buffer_copied(graph):
    """The new rows go into a copy of the buffer."""
    scatter = attention(graph).inputs[V].producer()
    scatter.replace_input_with(0, chain(graph, scatter, scatter.inputs[0], ("Identity", [], FP16, {})))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tiny-dynamic", past_copied),
        ("tiny-window", past_swapped_for_a_copy_of_the_values),
        ("tiny-preallocated", lengths_left_out),
        ("tiny-preallocated", scatter_passed_by),
        ("tiny-preallocated", buffer_copied),
    ],
)
def test_a_cache_that_is_not_the_specs_is_refused(refusal, name, change):
    assert f"must have a cache of the kind {find_spec(name).cache}" in refusal(change, name)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["tiny-rope", "tiny-dynamic", "tiny-preallocated"])
def test_a_rotary_embedding_that_is_missing_is_refused(refusal, name):
    def skip(graph):
        rotary = [node for node in graph if node.op_type == "RotaryEmbedding"][1]
        rotary.outputs[0].replace_all_uses_with(rotary.inputs[0])
        graph.remove(rotary, safe=True)

    assert "must have 2 RotaryEmbedding nodes" in refusal(skip, name)


@pytest.mark.parametrize("name", ["tiny-window", pytest.param("tiny-softcap", marks=pytest.mark.slow)])
def test_a_window_is_no_causal_attribute(refusal, name):
    def flip(graph):
        node = attention(graph)
        node.attributes["is_causal"] = ir.AttrInt64("is_causal", int(name == "tiny-window"))

    assert "does not have the spec's heads" in refusal(flip, name)


@pytest.mark.parametrize("name", [pytest.param("tiny-softcap", marks=pytest.mark.slow), "tiny-gqa"])
def test_another_softcap_is_refused(refusal, name):
    def change(graph):
        attention(graph).attributes["softcap"] = ir.AttrFloat32("softcap", 7.0)

    assert "softcap" in refusal(change, name)
