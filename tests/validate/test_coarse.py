"""Arithmetic that is coarser than the requested precision, within the budget of what rounding costs."""

import json
import re
import shutil

import numpy as np
import onnx
import pytest
import torch
from bundle_edit import rehash
from onnx import TensorProto, helper, numpy_helper

import mha_deploy as md
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.manifest import Perturbation
from mha_deploy.errors import BundleError

QUICK = {"probe": False, "latency": False}
SCALE = 8**-0.5


class Layers(torch.nn.Module):
    """Two attentions with a residual stream, whose scores are not flat."""

    def __init__(self, E=64):
        super().__init__()
        self.first, self.second = (torch.nn.ModuleList(torch.nn.Linear(E, E) for _ in range(4)) for _ in "ab")
        for query, key, *_ in (self.first, self.second):
            torch.nn.init.normal_(query.weight, std=0.2)
            torch.nn.init.normal_(key.weight, std=0.2)

    def forward(self, x):
        for projections in (self.first, self.second):
            q, k, v = (each(x).unflatten(-1, (8, -1)).transpose(1, 2) for each in projections[:3])
            heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + projections[3](heads.transpose(1, 2).flatten(2))
        return x


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    torch.manual_seed(0)
    inputs = {"x": md.Example(torch.randn(2, 6, 64), "B", "S")}
    model = md.Deployable(module=Layers(), inputs=inputs, axes={"B": "4", "S": "32"})
    return md.export(model, tmp_path_factory.mktemp("own") / "layers", precision="fp16", golden=["opt"])


def operand_in_bf16(position):
    """Operands of the second attention in BF16."""

    def change(graph):
        node = [each for each in graph.node if each.op_type == "Attention"][1]
        given, names = node.input[position], [f"coarse-{position}", f"again-{position}"]
        casts = [
            helper.make_node("Cast", [given], names[:1], to=TensorProto.BFLOAT16),
            helper.make_node("Cast", names[:1], names[1:], to=TensorProto.FLOAT16),
        ]
        node.input[position] = names[1]
        at = list(graph.node).index(node)
        for cast in reversed(casts):
            graph.node.insert(at, cast)

    return change


def weight_in_int8(graph):
    """The last projection of all: a scale for each of its channels."""
    node = [each for each in graph.node if each.op_type in ("MatMul", "Gemm")][-1]
    (tensor,) = [each for each in graph.initializer if each.name in node.input[1:2]]
    values = numpy_helper.to_array(tensor).astype(np.float64)
    scale = np.abs(values).max(0) / 127
    coarse = (np.round(values / scale) * scale).astype(np.float16)
    tensor.CopyFrom(numpy_helper.from_array(coarse, tensor.name))


def scale_times(factor):
    """In the second attention."""

    def change(graph):
        node = [each for each in graph.node if each.op_type == "Attention"][1]
        for each in [each for each in node.attribute if each.name == "scale"]:
            node.attribute.remove(each)
        node.attribute.append(helper.make_attribute("scale", factor * SCALE))

    return change


def scores_in_bf16(graph):
    """The second attention in primitive operators, whose scores are in BF16 before they are scaled."""
    node = [each for each in graph.node if each.op_type == "Attention"][1]
    (q, k, v), at = node.input[:3], list(graph.node).index(node)
    low = numpy_helper.from_array(np.array([-1e4], np.float32))
    graph.initializer.append(numpy_helper.from_array(np.array(SCALE, np.float16), "scale"))
    graph.initializer.append(numpy_helper.from_array(np.array(1), "next"))
    steps = [
        helper.make_node("Transpose", [k], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", [q, "kt"], ["raw"]),
        helper.make_node("Cast", ["raw"], ["coarse"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["coarse"], ["again"], to=TensorProto.FLOAT16),
        helper.make_node("Mul", ["again", "scale"], ["scaled"]),
        helper.make_node("Shape", ["raw"], ["sizes"], start=2),
        helper.make_node("ConstantOfShape", ["sizes"], ["full"], value=low),
        helper.make_node("Trilu", ["full", "next"], ["later"], upper=1),
        helper.make_node("Cast", ["later"], ["bias"], to=TensorProto.FLOAT16),
        helper.make_node("Add", ["scaled", "bias"], ["biased"]),
        helper.make_node("Softmax", ["biased"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", v], [node.output[0]]),
    ]
    graph.node.remove(node)
    for step in reversed(steps):
        graph.node.insert(at, step)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda graph: None, ()),
        (operand_in_bf16(1), ("keys", "BF16")),
        (operand_in_bf16(2), ("values", "BF16")),
        (scores_in_bf16, ("scores before their scale", "BF16")),
        (weight_in_int8, ("INT8",)),
    ],
)
def test_a_part_in_coarser_arithmetic_is_caught_and_named(bundle, tmp_path, change, names):
    model = onnx.load(bundle.model_path)
    change(model.graph)
    onnx.save(model, tmp_path / "other.onnx")
    report = md.validate(bundle, graphs=[tmp_path / "other.onnx"], **QUICK)
    assert (report.outcome == "failed") == bool(names), report.headline
    (verdict,) = [each for parity in report.to_dict()["parity"] for each in parity["verdicts"]]
    assert all(name in verdict["deviation"]["local_at"] for name in names)


@pytest.mark.parametrize("factor", [1.0075, 0.99, 1.5])
def test_a_scale_that_is_off_is_named_with_the_amount(bundle, tmp_path, factor):
    model = onnx.load(bundle.model_path)
    scale_times(factor)(model.graph)
    onnx.save(model, tmp_path / "other.onnx")
    report = md.validate(bundle, graphs=[tmp_path / "other.onnx"], **QUICK)
    (verdict,) = [each for parity in report.to_dict()["parity"] for each in parity["verdicts"]]
    place = verdict["deviation"]["local_at"]
    assert report.outcome == "failed"
    assert "scale" in place
    assert ("small" if factor < 1 else "large") in place
    (percent,) = (float(each) for each in re.findall(r"([\d.]+) %", place))
    if abs(factor - 1) < 0.1:
        assert percent == pytest.approx(100 * abs(factor - 1), rel=0.15)
    else:  # what a large factor does is no multiple of what a small one does
        assert percent < 100 * abs(factor - 1)


def test_the_outputs_show_attention_in_bf16(bundle):
    assert all(Perturbation.BF16 in each.shown for each in bundle.manifest.observed)


def test_known_mistakes_are_read_back_and_forged_ones_refused(bundle, tmp_path):
    copy = shutil.copytree(bundle.path, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    (entry,), (case,) = manifest["golden"], golden_cases(bundle)
    assert list(case.suspects) == list(entry["suspects"])
    entry["suspects"].popitem()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    rehash(copy)
    with pytest.raises(BundleError):
        md.validate(copy, **QUICK)
