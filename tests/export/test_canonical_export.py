"""What PyTorch's exporter gives after it was put in order: one fused node per attention, and nothing else."""

import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch
from tiny_specs import EVERY_PRECISION, TINY

from mha_deploy.errors import ExportError
from mha_deploy.exporter.exporter import canonical_from_module
from mha_deploy.graph.canonical import check_canonical
from mha_deploy.graph.file import save_graph
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.reference import build_module, random_weights

# Every spec in every precision; opset 23 throughout, but for bf16 and fp32 of every other spec in turn, and
# for preallocated caches, whose TensorScatter came with 24.
CASES = [
    (name, precision, 24 if precision == turn or find_spec(name).cache == "preallocated" else 23)
    for name, turn in zip(TINY, itertools.cycle(("bf16", "fp32")), strict=False)
    for precision in PRECISIONS
]
# The graph is the same in every precision but for its types: most of bf16 and fp32 are for `-m slow`.
EXPORTED = pytest.mark.parametrize(
    ("name", "precision", "opset"),
    [
        pytest.param(*case, marks=() if case[1] == "fp16" or case[0] in EVERY_PRECISION else pytest.mark.slow)
        for case in CASES
    ],
    ids=["-".join(map(str, case)) for case in CASES],
)
ONNX_TYPES = {
    "fp16": onnx.TensorProto.FLOAT16,
    "bf16": onnx.TensorProto.BFLOAT16,
    "fp32": onnx.TensorProto.FLOAT,
}
# What a variant adds beyond projections and attention; a padding mask is made of the key lengths.
SHAPE_OPS = {"Shape", "Concat", "Reshape"}
# Where the tokens stand, and the rotation by it.
POSITION_OPS = {"RotaryEmbedding", "Shape", "Range", "Squeeze", "Concat", "Expand"}
MASK_OPS = {"Shape", "Squeeze", "Cast", "Range", "Unsqueeze", "Less", "Concat", "Expand"}
# Which keys are no further back than the window, and none ahead.
WINDOW_OPS = {"Shape", "Squeeze", "Range", "Unsqueeze", "LessOrEqual", "Sub", "Greater", "And"}
# The heads on an axis of their own, as the buffers have them, and where the new rows go.
BUFFER_OPS = SHAPE_OPS | {"TensorScatter", "Transpose", "Cast", "Unsqueeze", "Range", "Squeeze"}
VARIANT_OPS = {
    "attention": set(),
    "sparse-heads": SHAPE_OPS
    | {"Cast", "TopK", "Softmax", "GatherElements", "Expand", "ScatterElements"}
    | {"Unsqueeze", "Mul"},
    "grouped-mlp": {"Split", "Concat", "Gelu"},
    "head-mix": SHAPE_OPS,
}


def module_of(name, precision="fp16", **how):
    return build_module(find_spec(name), dtype=getattr(torch, PRECISIONS[precision].torch_name), **how)


@pytest.fixture(scope="module")
def exported(bundles, tmp_path_factory):
    """A function that gives the exported file of a case."""
    folder, made = tmp_path_factory.mktemp("opset-24"), {}

    def path(name, precision, opset):
        if opset == 23 or find_spec(name).cache == "preallocated":
            return bundles(name, precision).model_path
        if (name, precision) not in made:
            made[name, precision] = folder / f"{name}-{precision}.onnx"
            save_graph(canonical_from_module(module_of(name, precision), opset=opset), made[name, precision])
        return made[name, precision]

    return path


@pytest.mark.sweep(3)
@EXPORTED
def test_the_graph_is_canonical(exported, name, precision, opset):
    path, spec = exported(name, precision, opset), find_spec(name)
    check_canonical(path, spec, PRECISIONS[precision])
    model = onnx.load(path)
    assert [(i.domain, i.version) for i in model.opset_import] == [("", opset)]
    _assert_attention_nodes(model.graph, spec)
    _assert_interface(model.graph, spec, ONNX_TYPES[precision])
    _assert_no_stray_operators(model.graph, spec)
    _assert_weights(model.graph, spec, ONNX_TYPES[precision])


def _assert_attention_nodes(graph, spec):
    nodes = [node for node in graph.node if node.op_type == "Attention"]
    assert [node.name for node in nodes] == ["attention", "attention_1"][: spec.attention_count]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in nodes[0].attribute}
    assert attributes.pop("scale") == pytest.approx(spec.softmax_scale)
    has_window = spec.window is not None  # which is a mask that is causal too
    assert attributes.pop("is_causal", 0) == (spec.causal and not has_window)
    assert attributes.pop("softcap", None) == spec.softcap
    assert attributes.pop("qk_matmul_output_mode", 0) == (3 if spec.weights else 0)
    # Static buffers have the heads on an axis of their own.
    heads = {} if spec.cache == "preallocated" else {"q_num_heads": spec.Hq, "kv_num_heads": spec.Hkv}
    assert attributes == heads
    has_mask = spec.mask != "none" or has_window
    assert list(map(bool, nodes[0].input)) == ATTENTION_INPUTS[spec.cache](has_mask)
    assert list(map(bool, nodes[0].output)) == _attention_outputs(spec)
    _assert_cache(graph, nodes[0], spec)


# Whether each input is there: Q, K, V, mask, past key and value, lengths; ONNX leaves out those at the end.
ATTENTION_INPUTS = {
    "none": lambda has_mask: [True] * (4 if has_mask else 3),
    "dynamic": lambda has_mask: [True, True, True, has_mask, True, True],
    "preallocated": lambda has_mask: [True, True, True, has_mask, False, False, True],
}


def _attention_outputs(spec):
    """Whether each output is there: heads, present key and value, weights."""
    if spec.weights:
        return [True, False, False, True]
    return [True] * (3 if spec.cache == "dynamic" else 1)


def _assert_cache(graph, attention, spec):
    """The cache goes from the graph's inputs to its outputs, and the new rows by way of the scatter."""
    if spec.cache == "dynamic":
        assert list(attention.input[4:6]) == ["past_key", "past_value"]
        assert list(attention.output[1:3]) == ["present_key", "present_value"]
    scatters = [node for node in graph.node if node.op_type == "TensorScatter"]
    assert len(scatters) == (2 if spec.cache == "preallocated" else 0)
    for node, name, at in zip(scatters, ("key_cache", "value_cache"), (1, 2), strict=False):
        assert (node.name, node.input[0], list(node.output)) == (f"{name}.update", name, [f"{name}_out"])
        assert attention.input[at] == node.output[0]
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert attributes in ({"axis": 2}, {"axis": 2, "mode": b"linear"})


def _assert_interface(graph, spec, float_type):
    for values, tensors in ((graph.input, spec.inputs), (graph.output, spec.outputs)):
        assert [value.name for value in values] == [tensor.name for tensor in tensors]
        for value, tensor in zip(values, tensors, strict=True):
            kind = value.type.tensor_type
            assert kind.elem_type == (float_type if tensor.kind == "float" else onnx.TensorProto.INT32)
            assert tuple(d.dim_param or d.dim_value for d in kind.shape.dim) == tensor.dims


def _assert_no_stray_operators(graph, spec):
    allowed = {"MatMul", "Add", "Attention"} | VARIANT_OPS[spec.variant]
    allowed |= {"Split"} if spec.projections == "packed" else set()
    allowed |= MASK_OPS if spec.mask == "padding" else set()
    allowed |= POSITION_OPS if spec.rope is not None else set()
    allowed |= WINDOW_OPS if spec.window is not None else set()
    allowed |= BUFFER_OPS if spec.cache == "preallocated" else set()
    assert {node.op_type for node in graph.node} <= allowed
    by_output = {output: node for node in graph.node for output in node.output}
    for node in (node for node in graph.node if node.op_type == "Attention"):
        beside = _beside(node, by_output, spec)
        if spec.rope is not None:
            assert beside[:2] == ["RotaryEmbedding", "RotaryEmbedding"]
            beside = beside[2:]
        assert set(beside) <= {"MatMul", "Add", "Split"}


def _beside(attention, by_output, spec):
    """What Q, K and V come from; behind the cache and the split into heads where the buffers need that."""
    producers = [by_output[name] for name in attention.input[:3]]
    if spec.cache == "preallocated":
        producers[1:] = [by_output[node.input[1]] for node in producers[1:]]
        for wanted in ("Transpose", "Reshape"):
            assert [node.op_type for node in producers] == [wanted] * 3
            producers = [by_output[node.input[0]] for node in producers]
    return [node.op_type for node in producers]


def _assert_weights(graph, spec, float_type):
    state = build_module(spec, device="meta").state_dict()
    wanted = {n + ".T" * (p.dim() == 2): tuple(reversed(p.shape)) for n, p in state.items()}
    weights = {t.name: t for t in graph.initializer if t.name in wanted}
    assert {name: tuple(tensor.dims) for name, tensor in weights.items()} == wanted
    assert {tensor.data_type for tensor in weights.values()} == {float_type}
    # Beside the weights there are only shapes, ranges, and the zero that unchosen gates start from.
    rest = [tensor for tensor in graph.initializer if tensor.name not in wanted]
    if spec.rope is not None:  # and the two tables of angles, a row for every position
        positions = {"dynamic": 127, "preallocated": 64}.get(spec.cache, spec.axes["S"].max)
        tables = [tensor for tensor in rest if list(tensor.dims) == [positions, spec.rope_dims // 2]]
        assert [tensor.data_type for tensor in tables] == [float_type] * 2
        rest = [tensor for tensor in rest if tensor not in tables]
    assert all(len(onnx.numpy_helper.to_array(tensor).reshape(-1)) <= 4 for tensor in rest)


@pytest.mark.sweep(2)
@EXPORTED
def test_the_file_says_nothing_of_the_exporter_or_its_machine(exported, name, precision, opset):
    content = exported(name, precision, opset).read_bytes()
    words = [b"pkg.", b"torch.", b"site-packages", b"mha_deploy", b".py", b'File "', os.getcwd().encode()]
    assert [word for word in words if word in content] == []
    model = onnx.load_from_string(content)
    described = [model, model.graph, *model.graph.node, *model.graph.input, *model.graph.output]
    described += [*model.graph.value_info, *model.graph.initializer]
    assert not any(part.doc_string or part.metadata_props for part in described)


def test_the_weights_in_the_graph_are_those_of_the_seed(bundles):
    graph = onnx.load(bundles("tiny-gqa", "fp32").model_path).graph
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for name, weight in random_weights(find_spec("tiny-gqa"), 0).items():
        array = arrays[f"{name}.T"].T if weight.dim() == 2 else arrays[name]
        assert array.tobytes() == weight.contiguous().numpy().tobytes()


_EXPORT_AGAIN = """
import hashlib, sys, pathlib, torch
from mha_deploy.model.catalog import find_spec
from mha_deploy.exporter.exporter import canonical_from_module
from mha_deploy.graph.file import save_graph
from mha_deploy.reference import build_module
path = pathlib.Path(sys.argv[1]) / "model.onnx"
for name in sys.argv[2:]:
    save_graph(canonical_from_module(build_module(find_spec(name), dtype=torch.float16)), path)
    print(hashlib.sha256(path.read_bytes()).hexdigest())
"""


@pytest.mark.slow
def test_another_process_exports_the_same_bytes(bundles, tmp_path):
    names = ["tiny-sparse-heads"]
    command = [sys.executable, "-c", _EXPORT_AGAIN, str(tmp_path), *names]
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    wanted = [hashlib.sha256(bundles(name).model_path.read_bytes()).hexdigest() for name in names]
    assert again.stdout.split() == wanted


_EXPORT_ANEW = """
import sys
import mha_deploy as md
print(md.export("bert-base", sys.argv[1], golden=["B=8,S=128"], seed=3).model_path)
"""


@pytest.mark.slow
def test_a_graph_that_a_child_traces_beside_long_golden_cases_is_the_same(tmp_path):
    made = [sys.executable, "-c", _EXPORT_ANEW, str(tmp_path / "bundle")]
    made = subprocess.run(made, capture_output=True, text=True, check=True, timeout=300).stdout.split()[-1]
    module = build_module(find_spec("bert-base"), seed=3, dtype=torch.float16)
    save_graph(canonical_from_module(module), tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == Path(made).read_bytes()


def test_a_fixed_axis_is_a_number_in_the_graph_and_the_module_is_left_as_it_was(tmp_path):
    axes = {"B": 1, "S": {"min": 1, "opt": 8, "max": 32}}
    spec = AttentionSpec.from_dict({"name": "fixed", "Hq": 4, "E": 64, "axes": axes, "mask": "padding"})
    module = build_module(spec, dtype=torch.float16, path="plain")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = canonical_from_module(module)
    assert module.path == "plain"
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert [tuple(map(str, value.shape)) for value in model.graph.inputs] == [("1", "S", "64"), ("1",)]
    save_graph(model, tmp_path / "model.onnx")
    check_canonical(tmp_path / "model.onnx", spec, PRECISIONS["fp16"])


def test_an_opset_without_attention_is_refused_before_anything_is_done():
    module = module_of("tiny-mha")
    with pytest.raises(ExportError, match="needs an operator set with Attention") as caught:
        canonical_from_module(module, opset=22)
    assert caught.value.got == "22"
    assert module.path == "sdpa"


@pytest.mark.parametrize(
    "name", ["tiny-sparse-heads", pytest.param("tiny-sparse-heads-renormalised", marks=pytest.mark.slow)]
)
def test_gates_are_compared_and_normalised_in_float32(exported, name):
    nodes = {node.op_type: node for node in ir.load(exported(name, "fp16", 23)).graph}
    assert nodes["TopK"].inputs[0].dtype == nodes["Softmax"].inputs[0].dtype == ir.DataType.FLOAT


def test_the_transposed_weights_are_the_only_copies(exported):
    model = ir.load(exported("tiny-gqa", "fp16", 23))
    names = [name for name in model.graph.initializers if name.endswith("weight")]
    assert names == [], "a weight beside its transpose doubles the file"
