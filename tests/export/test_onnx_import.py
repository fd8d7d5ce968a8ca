"""An ONNX file of another origin becomes a bundle without PyTorch, and is validated like any other."""

import json
import math
import re

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from fresh_python import python
from onnx import TensorProto, helper, numpy_helper
from quantized_models import padded
from torch import nn

import mha_deploy as md
from mha_deploy.baselines.imported import FileCases
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.errors import BackendUnavailable, ExportError, NoResult
from mha_deploy.exporter.flow import refuse_large_error

E, H, VOCABULARY = 64, 4, 61


class Encoder(nn.Module):
    """Token embedding and one attention, written by hand; `hidden` is the number that hides keys."""

    def __init__(self, hidden=-10000.0):
        super().__init__()
        self.hidden = hidden
        self.words, self.qkv, self.out = nn.Embedding(VOCABULARY, E), nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, input_ids, attention_mask):
        x = self.words(input_ids)
        B, S, _ = x.shape
        q, k, v = (t.reshape(B, S, H, E // H).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * (E // H) ** -0.5
        scores = scores + (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * self.hidden
        attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, S, E)
        return x + self.out(attended)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return written(tmp_path_factory.mktemp("foreign") / "encoder.onnx")


def written(path, **options):
    """The encoder as TorchScript's exporter writes it, in opset 17."""
    torch.manual_seed(0)
    ids, mask = torch.randint(0, VOCABULARY, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    axes = {0: "batch", 1: "sequence"}
    torch.onnx.export(
        Encoder(**options).eval(),
        (ids, mask),
        path,
        input_names=["input_ids", "attention_mask"],
        output_names=["hidden"],
        dynamic_axes={name: axes for name in ("input_ids", "attention_mask", "hidden")},
        opset_version=17,
        dynamo=False,
    )
    return path


@pytest.fixture(scope="module")
def imported(file, tmp_path_factory):
    return md.import_onnx(file, tmp_path_factory.mktemp("imported") / "bundle", axes={"sequence": "1:16:40"})


def test_attention_is_fused_and_the_graph_is_right_in_fp16(imported):
    manifest = imported.manifest
    assert (len(manifest.attention), manifest.spec.attention_count) == (1, 1)
    assert manifest.precision.name == "fp16"
    assert [tensor.dims for tensor in manifest.spec.outputs] == [("batch", "sequence", E)]
    assert {case.batch for case in golden_cases(imported)} == {"batch"}
    assert {entry.sizes["batch"] for entry in manifest.golden if entry.name == "odd"} == {3}
    report = md.validate(imported)
    assert report.passed, report.headline
    cases = len(manifest.golden)
    assert f"{cases}/{cases} outputs within budget, 1/1 attention right" in report.headline


@pytest.mark.sweep(1)
@pytest.mark.parametrize("fused", [False, True], ids=["single-operators", "attention-node"])
def test_a_fully_masked_query_attends_to_all_keys_alike_as_in_float32(fused, tmp_path):
    """In FP64 the scores would still show beside -1e9; in float32, and in the graph, they do not."""
    file = written(tmp_path / "encoder.onnx", hidden=-1e9)
    if fused:
        md.fuse_file(file, tmp_path / "fused.onnx")
    source = tmp_path / ("fused.onnx" if fused else "encoder.onnx")
    bundle = md.import_onnx(source, tmp_path / "bundle", golden=["opt", "masks"])
    masks = next(case.inputs["attention_mask"] for case in golden_cases(bundle) if case.name == "masks")
    assert not masks.any(-1).all()
    report = md.validate(bundle)
    assert report.passed, report.headline
    assert not [finding for finding in report.findings if finding.level == "warning"]


def test_an_engine_is_built_of_it(imported):
    pytest.importorskip("tensorrt_rtx")
    engine = md.build_engine(imported, backend="tensorrt-rtx", targets="89")
    assert engine.manifest.fused_count == (1, 1)


def test_the_inputs_are_tokens_of_the_vocabulary_and_masks(imported):
    from mha_deploy.bundle.cases import golden_cases

    for case in golden_cases(imported):
        ids, mask = case.inputs["input_ids"], case.inputs["attention_mask"]
        assert 0 <= ids.min() <= ids.max() < VOCABULARY
        assert set(np.unique(mask)) <= {0, 1}
        assert mask[:, 0].all() or case.name in ("masks", "mask-of-one")
    assert {tuple(case.sizes.values()) for case in golden_cases(imported)} >= {(1, 1), (2, 16)}


def test_a_mask_is_drawn_in_the_convention_that_gives_the_file_a_result(tmp_path):
    file, sizes = padded(tmp_path / "padded.onnx"), {"B": 3, "S": 5}
    made = md.export(file, tmp_path / "bundle", precision="fp32", golden=("opt",))
    (case,) = golden_cases(made)
    cases = [case, FileCases(made, file).fresh(sizes, seed=1)]
    assert all(each.inputs["hidden"].any() for each in cases)
    assert not any(each.inputs["hidden"].all(-1).any() for each in cases)


def test_a_given_mask_that_hides_every_key_is_named(tmp_path):
    file, hidden = padded(tmp_path / "padded.onnx"), np.ones((2, 8), bool)
    with pytest.raises(NoResult) as caught:
        md.export(file, tmp_path / "bundle", precision="fp32", golden=("opt",), inputs={"hidden": hidden})
    assert "hidden" in caught.value.hint


def test_the_reference_is_the_file_in_fp64(file, tmp_path):
    from mha_deploy.bundle.cases import golden_cases

    bundle = md.import_onnx(file, tmp_path / "bundle", precision="fp32", golden=["opt"])
    (case,) = golden_cases(bundle)
    torch.manual_seed(0)
    torch.randint(0, VOCABULARY, (2, 7))
    weights = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(file).graph.initializer
    }
    module = Encoder().double()
    matrices = [array for array in weights.values() if array.shape == (E, 3 * E)]
    state = {
        "words.weight": weights["words.weight"],
        "qkv.bias": weights["qkv.bias"],
        "out.bias": weights["out.bias"],
        "qkv.weight": matrices[0].T,
        "out.weight": next(array for array in weights.values() if array.shape == (E, E)).T,
    }
    module.load_state_dict(
        {name: torch.from_numpy(np.array(array)).double() for name, array in state.items()}
    )
    with torch.no_grad():
        want = module(*(torch.from_numpy(case.inputs[name]) for name in ("input_ids", "attention_mask")))
    np.testing.assert_allclose(case.oracle["hidden"], want.numpy(), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_no_pytorch_is_needed(file, tmp_path):
    code = (
        "import sys, json, mha_deploy as md\n"
        "bundle = md.import_onnx(sys.argv[1], sys.argv[2], golden=['min'])\n"
        "print(json.dumps([len(bundle.manifest.attention), 'torch' in sys.modules]))"
    )
    done = python(code, str(file), str(tmp_path / "bundle"), blocked=("torch",))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1, False]


@pytest.mark.slow
def test_a_given_input_is_used(file, tmp_path):
    from mha_deploy.bundle.cases import golden_cases

    np.save(tmp_path / "ids.npy", np.array([[5, 6, 7]]))
    bundle = md.import_onnx(
        file, tmp_path / "bundle", inputs={"input_ids": tmp_path / "ids.npy"}, golden=["opt"]
    )
    (case,) = golden_cases(bundle)
    assert set(np.unique(case.inputs["input_ids"])) == {5, 6, 7}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf16"}, "another precision"),
        ({"axes": {"length": "1:2:3"}}, "no such axis"),
        ({"inputs": {"ids": np.zeros((1, 1))}}, "no such input"),
        ({"inputs": {"input_ids": "nowhere.npy"}}, "cannot be read"),
        ({"inputs": {"input_ids": np.full((1, 3), 3.7)}}, "whole numbers"),
        ({"golden": ["largest"]}, "No such golden case"),
    ],
)
def test_what_cannot_be_imported_is_refused(file, tmp_path, options, message):
    with pytest.raises(md.DeployError, match=message):
        md.import_onnx(file, tmp_path / "bundle", **options)
    assert not (tmp_path / "bundle").exists()


def test_an_axis_of_a_file_whose_sizes_are_fixed_is_refused_with_the_reason(tmp_path):
    text = '<ir_version: 10, opset_import: ["" : 18]> g (float[2, 4] x) => (float[2, 4] y) { y = Relu (x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "fixed.onnx")
    with pytest.raises(md.DeployError, match="no such axis") as caught:
        md.import_onnx(tmp_path / "fixed.onnx", tmp_path / "bundle", axes={"S": "1:2:3"})
    assert "dynamic" in caught.value.hint


@pytest.mark.parametrize("shape", [(2, 20, 3), (2, 4)])
def test_an_example_that_has_another_size_where_the_file_fixes_it_is_refused(tmp_path, shape):
    """Along a named axis an example is sliced or repeated; of a fixed size its numbers would be others."""
    text = """<ir_version: 10, opset_import: ["" : 18]>
    g (float[B, M, 4] tokens) => (float[B, M, 4] y) { y = Relu (tokens) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    with pytest.raises(md.DeployError, match="tokens") as caught:
        md.export(tmp_path / "model.onnx", tmp_path / "bundle", inputs={"tokens": np.ones(shape)})
    assert str(shape) in str(caught.value.got)
    assert "[B, M, 4]" in caught.value.hint
    assert not (tmp_path / "bundle").exists()


def test_an_attention_whose_type_the_file_does_not_state_is_judged(tmp_path):
    text = """<ir_version: 10, opset_import: ["" : 23]> g (float[B, 2, 4, 8] x) => (float[B, 2, 4, 8] y) {
        attended = Attention (x, x, x)
        y = Relu (attended)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    bundle = md.export(tmp_path / "model.onnx", tmp_path / "bundle", precision="fp32", golden=("opt",))
    assert list(bundle.manifest.layers.values.values()) == ["attended"]
    assert md.validate(bundle, latency=False, layers=True).passed


def test_numbers_that_are_nan_on_the_way_are_no_warning(tmp_path, recwarn):
    """A query that sees no key: its softmax is NaN, which the file replaces."""
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[B, 4, 8] x) => (float[B, 4, 8] y) <float minus = {-inf}, float zero = {0.0}> {
        turned = Transpose<perm = [0, 2, 1]>(x)
        scores = MatMul(x, turned)
        hidden = Add(scores, minus)
        weights = Softmax<axis = -1>(hidden)
        nan = IsNaN(weights)
        kept = Where(nan, zero, weights)
        seen = MatMul(kept, x)
        y = Add(seen, x)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    md.import_onnx(tmp_path / "model.onnx", tmp_path / "bundle", precision="fp32", golden=("opt",))
    assert [str(each.message) for each in recwarn if each.category is RuntimeWarning] == []


def test_an_attention_that_is_nan_where_the_outputs_are_not_is_no_reference(tmp_path):
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[B, 4, 8] x) => (float[B, 4, 8] y) <float minus = {-inf}, float zero = {0.0}> {
        turned = Transpose<perm = [0, 2, 1]>(x)
        scores = MatMul(x, turned)
        hidden = Add(scores, minus)
        weights = Softmax<axis = -1>(hidden)
        seen = MatMul(weights, x)
        nan = IsNaN(seen)
        kept = Where(nan, zero, seen)
        y = Add(kept, x)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    made = md.export(tmp_path / "model.onnx", tmp_path / "bundle", precision="fp32", golden=("opt",))
    assert made.manifest.layers is None


NORMED = """<ir_version: 8, opset_import: ["": 17]>
normed (float[B, S, 64] x) => (float[B, S, 64] y) <float two = {2}, float epsilon = {1e-6}> {
    attended = Attended(x)
    square = Pow(attended, two)
    mean = ReduceMean<axes = [-1]>(square)
    safe = Add(mean, epsilon)
    root = Sqrt(safe)
    one = Reciprocal(root)
    y = Mul(attended, one)
}"""
ATTENDED = """
    q = MatMul(x, wq)
    k = MatMul(x, wk)
    turned = Transpose<perm = [0, 2, 1]>(k)
    scores = MatMul(q, turned)
    weights = Softmax<axis = -1>(scores)
    seen = MatMul(weights, x)
    out = MatMul(seen, wo)
    attended = Add(x, out)
"""


def test_a_norm_that_a_file_writes_out_may_round_in_every_operator(tmp_path):
    """As the reference evaluator does: the root of a mean and an epsilon scales a whole token."""
    model = onnx.parser.parse_model(NORMED.replace("    attended = Attended(x)\n", ATTENDED))
    random = np.random.default_rng(0)
    for name in ("wq", "wk", "wo"):
        weight = (random.standard_normal((64, 64)) / 16).astype("f")
        model.graph.initializer.append(numpy_helper.from_array(weight, name))
    onnx.save(model, tmp_path / "normed.onnx")
    axes = {"B": "1:2:4", "S": "1:16:32"}
    bundle = md.export(tmp_path / "normed.onnx", tmp_path / "bundle", golden=("opt",), axes=axes)
    assert md.validate(bundle, runtimes=["onnx-reference"], probe=False, fresh=0).passed


class Speech(nn.Module):
    """Two strided convolutions, and attention between what they leave."""

    def __init__(self, padding):
        super().__init__()
        self.first = nn.Conv1d(4, 16, 3, stride=2, padding=padding)
        self.second = nn.Conv1d(16, 16, 3, stride=2, padding=padding)
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        x = self.second(self.first(x)).transpose(1, 2)
        B, S, _ = x.shape
        q, k, v = (t.reshape(B, S, 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * 8**-0.5
        return x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, S, 16)


@pytest.mark.parametrize(
    ("padding", "axis", "stated"),
    [
        pytest.param(1, "1:16:32", "T2", marks=pytest.mark.slow),
        (0, None, "T2"),
        pytest.param(1, "1:9:24", "(((T - 1)//4)) + 1", marks=pytest.mark.slow),
    ],
)
def test_a_size_behind_strided_convolutions_is_that_of_the_file(padding, axis, stated, tmp_path):
    torch.manual_seed(0)
    torch.onnx.export(
        Speech(padding).eval(),
        torch.randn(2, 4, 24),
        tmp_path / "speech.onnx",
        input_names=["x"],
        output_names=["y"],
        dynamic_axes={"x": {0: "batch", 2: "T"}, "y": {0: "batch", 1: "T2"}},
        opset_version=17,
        dynamo=False,
    )
    model = onnx.load(tmp_path / "speech.onnx")
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = stated
    onnx.save(model, tmp_path / "speech.onnx")
    axes = {"batch": "1:2:3"} | ({} if axis is None else {"T": axis})
    bundle = md.import_onnx(
        tmp_path / "speech.onnx", tmp_path / "bundle", axes=axes, golden=("opt", "min", "large")
    )
    (y,) = bundle.manifest.spec.outputs
    assert bundle.manifest.spec.axes["T"].min == (1 if padding else 7)  # where anything is left of it
    for T in range(bundle.manifest.spec.axes["T"].min, 100):
        after = (((T + 2 * padding - 3) // 2 + 1) + 2 * padding - 3) // 2 + 1
        assert y.shape({"batch": 2, "T": T}) == (2, after, 16)
    assert md.validate(bundle).passed


@pytest.mark.parametrize(
    ("nodes", "sizes"),
    [
        ("y = Resize(x, , scales)", ("B", 4, "2*h", "3*w")),
        ("y = DepthToSpace<blocksize = 2>(x)", ("B", 1, "2*h", "2*w")),
        ("y = Reshape(x, flat)", ("B", "4*h*w")),
    ],
)
def test_a_size_that_is_a_multiple_or_a_product_of_axes(nodes, sizes, tmp_path):
    rank = ", ".join(f"n{at}" for at in range(len(sizes)))
    text = f"""<ir_version: 9, opset_import: ["" : 18]> g (float[B, 4, h, w] x) => (float[{rank}] y)
    <float[4] scales = {{1.0, 1.0, 2.0, 3.0}}, int64[2] flat = {{0, -1}}> {{ {nodes} }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    bundle = md.import_onnx(
        tmp_path / "model.onnx",
        tmp_path / "bundle",
        axes={"h": "1:6:8", "w": "1:4:8"},
        golden=("opt", "large"),
    )
    assert [tensor.dims for tensor in bundle.manifest.spec.outputs] == [sizes]


def test_a_batch_that_is_also_in_another_size_is_none(tmp_path):
    text = """<ir_version: 9, opset_import: ["" : 18]> pairs (float[batch, 8] x) => (float[batch, n] y) {
        turned = Transpose <perm = [1, 0]> (x) one = MatMul(x, turned) y = Concat <axis = 1> (one, one)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "pairs.onnx")
    spec = md.import_onnx(tmp_path / "pairs.onnx", tmp_path / "bundle", golden=("opt",)).manifest.spec
    assert [tensor.dims for tensor in spec.outputs] == [("batch", "2*batch")]
    assert spec.batch is None


PATCHES = """<ir_version: 9, opset_import: ["" : 18]>
patches (float[batch, 1, height, width] x) => (float[batch, 1, height, width] y)
<float[1, 1, 4, 4] w = {1.0, 0.5, 0.25, 2.0, 1.0, 0.5, 0.25, 2.0, 1.0, 0.5, 0.25, 2.0, 1.0, 0.5, 0.25, 2.0}> {
    patches = Conv <kernel_shape = [4, 4], strides = [4, 4]> (x, w)
    pixels = ConvTranspose <kernel_shape = [4, 4], strides = [4, 4]> (patches, w)
    y = Add(x, pixels)
}"""


@pytest.mark.parametrize(
    ("given", "dims"),
    [
        ({}, ("4*height", "4*width")),
        ({"height": "8:16:24"}, ("4*height", "4*width")),
        ({"height": "8:16:24", "width": "8"}, ("4*height", "width")),
    ],
)
def test_sizes_at_which_a_file_runs_may_be_multiples(tmp_path, given, dims):
    """A range that is given is one of sizes, and divided."""
    onnx.save(onnx.parser.parse_model(PATCHES), tmp_path / "patches.onnx")
    bundle = md.import_onnx(tmp_path / "patches.onnx", tmp_path / "bundle", axes=given, golden=("opt",))
    spec, sizes = bundle.manifest.spec, {"batch": 2, "height": 3, "width": 8}
    assert spec.inputs[0].dims == ("batch", 1, *dims)
    assert spec.outputs[0].shape(sizes) == spec.inputs[0].shape(sizes)
    assert str(spec.axes["height"]) == ("2:4:6" if given else "1:4:16")
    assert any(dims[0] in note for note in bundle.manifest.notes)


def test_a_range_of_other_sizes_than_multiples_is_refused(tmp_path):
    onnx.save(onnx.parser.parse_model(PATCHES), tmp_path / "patches.onnx")
    with pytest.raises(md.DeployError, match="does not run at these sizes"):
        md.import_onnx(tmp_path / "patches.onnx", tmp_path / "bundle", axes={"height": "8:16:22"})


def test_a_size_that_only_the_numbers_give_is_refused(tmp_path):
    text = """<ir_version: 9, opset_import: ["" : 18]>
    found (float[A, C] x) => (int64[2, N] y) { some = Relu(x) y = NonZero(some) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "found.onnx")
    with pytest.raises(md.DeployError, match="not an expression of axes"):
        md.import_onnx(tmp_path / "found.onnx", tmp_path / "bundle")


@pytest.mark.slow
def test_a_file_that_was_made_for_one_size_says_so(tmp_path):
    fixed = helper.make_graph(
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        "fixed",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["A", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [helper.make_tensor("shape", TensorProto.INT64, [2], [2, 6])],
    )
    onnx.save(helper.make_model(fixed, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "fixed.onnx")
    with pytest.raises(md.DeployError, match="does not run at these sizes") as caught:
        md.import_onnx(tmp_path / "fixed.onnx", tmp_path / "bundle")
    assert "axes=" in caught.value.hint
    bundle = md.import_onnx(tmp_path / "fixed.onnx", tmp_path / "bundle", axes={"A": "3"})
    assert [tensor.dims for tensor in bundle.manifest.spec.outputs] == [(2, 6)]


def test_a_reshape_to_a_fixed_and_computed_sizes_is_named_with_the_size_at_which_the_file_runs(tmp_path):
    text = """<ir_version: 9, opset_import: ["" : 18]>
    fixed (float[B, S, 8] x) => (float[U, V, W] y)
    <int64[1] length = {16}, int64[1] last = {-1}, float low = {0.0}, float high = {9.0}> {
        large = Greater(x, high)
        kept = Where(large, low, x)
        batch = Shape <start = 0, end = 1>(x)
        shape = Concat <axis = 0>(batch, length, last)
        [the_node] y = Reshape(kept, shape)
    }"""
    model = onnx.parser.parse_model(text)
    low = next(each for each in model.graph.initializer if each.name == "low")
    low.CopyFrom(onnx.numpy_helper.from_array(np.array(-np.inf, "f"), "low"))  # the parser knows no infinity
    onnx.save(model, tmp_path / "fixed.onnx")
    for axes in (None, {"S": "1:8:64"}):
        with pytest.raises(md.DeployError) as caught:
            md.import_onnx(tmp_path / "fixed.onnx", tmp_path / "bundle", axes=axes)
        assert "Reshape the_node to [?, 16, -1]" in caught.value.got
        assert 'axes={"S": "16"' in caught.value.hint
    assert md.import_onnx(tmp_path / "fixed.onnx", tmp_path / "bundle", axes={"S": "16"}, golden=("opt",))


def test_an_axis_that_is_fixed_is_so_where_attention_is_compared(tmp_path):
    """PyTorch's legacy exporter writes the length of the example into the Reshape of a padding mask."""

    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

        def forward(self, x, pad_mask):
            return self.layer(x, src_key_padding_mask=pad_mask)

    torch.manual_seed(0)
    file, axes = tmp_path / "frozen.onnx", {0: "batch", 1: "seq"}
    torch.onnx.export(
        Padded().eval(),
        (torch.randn(2, 20, 16), torch.zeros(2, 20, dtype=torch.bool)),
        file,
        input_names=["x", "pad_mask"],
        output_names=["y"],
        dynamic_axes={name: axes for name in ("x", "pad_mask", "y")},
        opset_version=17,
        dynamo=False,
    )
    with pytest.raises(ExportError) as caught:
        md.import_onnx(file, tmp_path / "bundle")
    assert 'axes={"seq": "20"' in caught.value.hint
    bundle = md.import_onnx(file, tmp_path / "bundle", axes={"seq": "20"}, golden=("opt",))
    assert not [note for note in bundle.manifest.notes if "not fused" in note]
    assert len(bundle.manifest.attention) == 1
    assert md.validate(bundle).passed


def test_an_old_opset_is_refused(file, tmp_path):
    model = onnx.load(file)
    model.opset_import[0].version = 6
    onnx.save(model, tmp_path / "old.onnx")
    with pytest.raises(md.DeployError, match="older than opset 7"):
        md.import_onnx(tmp_path / "old.onnx", tmp_path / "bundle")


@pytest.mark.slow
def test_the_command_line_deploys_a_file(file, tmp_path, run_cli):
    np.save(tmp_path / "ids.npy", np.arange(12).reshape(2, 6))
    out = tmp_path / "bundle"
    options = ("--axis", "sequence=1:6:12", "--input", f"input_ids={tmp_path / 'ids.npy'}", "--no-engine")
    done = run_cli("deploy", file, "-o", out, *options)
    assert done.code == 0, done.err
    (right, judged), *_ = re.findall(r"(\d+)/(\d+) outputs within budget", " ".join(done.out.split()))
    assert right == judged
    assert (out / "report.html").is_file()
    refused = run_cli("export", file, "-o", tmp_path / "other", "--input", "input_ids")
    assert refused.code == 2
    assert "--input" in refused.err


@pytest.mark.slow
def test_weights_that_are_inputs_as_well_are_weights(file, tmp_path):
    """As files of IR version 3 have them, and TorchScript's exporter with keep_initializers_as_inputs."""
    model = onnx.load(file)
    for each in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(each.name, each.data_type, each.dims))
    onnx.save(model, tmp_path / "listed.onnx")
    bundle = md.import_onnx(tmp_path / "listed.onnx", tmp_path / "bundle", golden=("opt",), precision="fp32")
    assert [each.name for each in bundle.manifest.spec.inputs] == ["input_ids", "attention_mask"]
    assert len(bundle.manifest.attention) == 1


def test_a_file_that_onnx_runtime_has_no_kernels_for_is_refused_with_that_reason(tmp_path):
    header = '<ir_version: 10, opset_import: ["": 23]>'
    model = onnx.parser.parse_model(f"{header} g (bfloat16[B, 4] x) => (bfloat16[B, 4] y) {{y = Mul(x, x)}}")
    onnx.save(model, tmp_path / "bf16.onnx")
    with pytest.raises(BackendUnavailable, match="CPU kernels have no bfloat16"):
        md.import_onnx(tmp_path / "bf16.onnx", tmp_path / "bundle")


@pytest.mark.parametrize(
    ("got", "reason"),
    [([1.0, np.nan], "NaN"), ([1.0, 3.0], "relative error 0.45"), ([1.0], "shape (1,), not (2,)")],
)
def test_a_result_that_is_far_from_the_oracle_is_refused_with_its_error(got, reason):
    results, oracle = {"y": np.array(got)}, {"y": np.array([1.0, 2.0])}
    with pytest.raises(ExportError) as caught:
        refuse_large_error("the case", results, oracle, 0.1, "The results differ.", "another")
    assert reason in caught.value.got


QUANTIZED = "quantized = QuantizeLinear (x, scale, zero) y = DequantizeLinear (quantized, scale, zero)"
BY_CHANNEL = """
    quantized = QuantizeLinear <axis = 2> (x, scales, zeros)
    y = DequantizeLinear <axis = 2> (quantized, scales, zeros)
"""
AROUND = {
    "int8 in opset 13": (
        QUANTIZED,
        13,
    ),
    "int8 in opset 18": (
        QUANTIZED,
        18,
    ),
    "int8 by channel": (BY_CHANNEL, 18),
    "sequence": ("both = SequenceConstruct (x, x) y = SequenceAt (both, one)", 17),
    "mean and variance": ("y = MeanVarianceNormalization <axes = [2]> (x)", 17),
    "negative pads": ("y = Pad (x, pads)", 17),
}
ATTENTION = """
    kt = Transpose <perm = [0, 2, 1]> (y)
    s = MatMul (y, kt)
    p = Softmax <axis = -1> (s)
    z = MatMul (p, y)
"""
CONSTANTS = "<float scale = {0.05}, float thousand = {1000.0}, "
CONSTANTS += "int8 zero = {0}, int64 one = {1}, int64[6] pads = {0, -1, 0, 0, 1, 0},"
CONSTANTS += " float[16] scales = {" + ", ".join(f"{0.03 + 0.003 * i}" for i in range(16)) + "},"
CONSTANTS += " int8[16] zeros = {" + ", ".join("0" * 16) + "}>"


def around(operators, opset, path):
    text = f"""<ir_version: 8, opset_import: ["" : {opset}]>
    g (float[B,S,16] x) => (float[B,S,16] z) {CONSTANTS} {{ {operators} {ATTENTION} }}"""
    onnx.save(onnx.parser.parse_model(text), path)
    return path


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", AROUND)
def test_operators_around_attention(name, tmp_path):
    operators, opset = AROUND[name]
    path = around(operators, opset, tmp_path / "around.onnx")
    bundle = md.import_onnx(path, tmp_path / "bundle", axes={"S": "2:6:8"}, golden=["opt"])
    assert len(bundle.manifest.attention) == 1
    assert md.validate(bundle, runtimes=["ort-cpu"]).outcome != "failed"


def test_the_types_of_inner_values_need_not_be_stated(tmp_path):
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[B,2,S,8] y) => (float[B,2,S,8] z)
    <int64 one = {1}> {
        kt = Transpose <perm = [0, 1, 3, 2]> (y) s = MatMul (y, kt) p = Softmax <axis = -1> (s)
        attended = MatMul (p, y) both = SequenceConstruct (attended, attended) z = SequenceAt (both, one)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "inner.onnx")
    bundle = md.import_onnx(
        tmp_path / "inner.onnx", tmp_path / "bundle", golden=["opt"], axes={"S": "2:6:8"}, precision="fp32"
    )
    assert list(bundle.manifest.layers.values.values()) == ["attended"]


def test_an_attention_whose_weights_have_a_factor_is_judged_by_its_own_result(tmp_path):
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[B,2,S,8] y) => (float[B,2,S,8] z)
    <float[2,1,1] gate = {0.3, 0.7}> {
        kt = Transpose <perm = [0, 1, 3, 2]> (y) s = MatMul (y, kt) p = Softmax <axis = -1> (s)
        gated = Mul (p, gate) attended = MatMul (gated, y) z = Tanh (attended)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "gated.onnx")
    bundle = md.import_onnx(
        tmp_path / "gated.onnx", tmp_path / "bundle", golden=["opt"], axes={"S": "2:6:8"}, precision="fp32"
    )
    assert list(bundle.manifest.layers.values.values()) == ["attended"]
    report = md.validate(bundle, runtimes=["ort-cpu"], latency=False)
    (inside,) = [each for each in report.record.parity if each.cases == "layers"]
    assert [verdict.outcome for verdict in inside.verdicts] == ["passed"]
    assert not bundle.manifest.judged_by_outputs


def test_attentions_without_a_result_of_their_own_in_the_file_are_named(tmp_path):
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[B,2,S,8] x, float[B,2,S,8] y)
    => (float[B,2,S,8] z) <float half = {0.5}> {
        xt = Transpose <perm = [0, 1, 3, 2]> (x) r = MatMul (x, xt) o = Softmax <axis = -1> (r)
        kt = Transpose <perm = [0, 1, 3, 2]> (y) s = MatMul (y, kt) p = Softmax <axis = -1> (s)
        less = Mul (o, half) differ = Sub (p, less) attended = MatMul (differ, y) z = Tanh (attended)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "two.onnx")
    bundle = md.import_onnx(
        tmp_path / "two.onnx", tmp_path / "bundle", golden=["opt"], axes={"S": "2:6:8"}, precision="fp32"
    )
    names = bundle.manifest.judged_by_outputs
    assert len(names) == 2
    report = md.validate(bundle, runtimes=["ort-cpu"], latency=False)
    assert any(names[0] in note for note in report.record.notes)


def test_what_float32_loses_in_sums_with_a_constant_is_no_mistake(tmp_path):
    """`x + 1000 - mean(x + 1000)`: four digits are lost in float32, whatever computes it."""
    far = "far = Add (x, thousand) mean = ReduceMean <axes = [2]> (far) y = Sub (far, mean)"
    path = around(far, 17, tmp_path / "far.onnx")
    options = {"axes": {"S": "2:6:8"}, "golden": ["opt"], "precision": "fp32"}
    bundle = md.import_onnx(path, tmp_path / "bundle", **options)
    assert md.validate(bundle, runtimes=["ort-cpu"]).outcome != "failed"


RANDOM = {
    "RandomNormalLike": "noise = RandomNormalLike (x) y = Add (x, noise)",
    "Dropout": "share = Constant <value_float = 0.1> () on = Constant <value = bool {1}> () "
    "y = Dropout (x, share, on)",
}


@pytest.mark.parametrize("operator", RANDOM)
def test_a_file_that_draws_numbers_is_refused(tmp_path, operator):
    path = around(RANDOM[operator], 17, tmp_path / "random.onnx")
    with pytest.raises(ExportError) as refusal:
        md.import_onnx(path, tmp_path / "bundle")
    assert operator in refusal.value.got


@pytest.mark.slow
def test_dropout_that_is_off_draws_nothing(tmp_path):
    path = around(RANDOM["Dropout"].replace("{1}", "{0}"), 17, tmp_path / "off.onnx")
    bundle = md.import_onnx(path, tmp_path / "bundle", axes={"S": "2:6:8"}, golden=["opt"])
    assert len(bundle.manifest.attention) == 1


AGREE = {
    "an axis": ("m", "float[B,1,M] m", "masked = Add (s, m)", ("B", 1, "S")),
    "a weight": ("x", "float[B,S,16] x", "masked = Add (s, four)", ("B", 4, 16)),
}


@pytest.mark.parametrize("name", AGREE)
def test_sizes_that_must_agree_are_found(name, tmp_path):
    of, declared, masked, wanted = AGREE[name]
    given = "float[B,S,16] x" if of == "x" else f"float[B,S,16] x, {declared}"
    text = f"""<ir_version: 8, opset_import: ["" : 18]> g ({given}) => (float[B,S,16] z)
    <float[4] four = {{0.0, 1.0, 2.0, 3.0}}> {{
        kt = Transpose <perm = [0, 2, 1]> (x) s = MatMul (x, kt) {masked}
        p = Softmax <axis = -1> (masked) z = MatMul (p, x)
    }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "agree.onnx")
    bundle = md.import_onnx(tmp_path / "agree.onnx", tmp_path / "bundle", golden=["odd"], precision="fp32")
    assert {tensor.name: tensor.dims for tensor in bundle.manifest.spec.inputs}[of] == wanted


LONG_ENOUGH = """<ir_version: 8, opset_import: ["" : 18]>
g (float[B,S,16] x, float[B,P,16] past, float[B,1,M] m) => (float[B,S,16] z)
<float[200] table, int64 one = {1}, int64[1] zero = {0}, int64[1] two = {2}> {
    keys = Concat <axis = 1> (past, x) kt = Transpose <perm = [0, 2, 1]> (keys) s = MatMul (x, kt)
    sizes = Shape (keys) count = Gather (sizes, one) columns = Unsqueeze (count, zero)
    last = Sub (columns, one) column = Gather <axis = 2> (m, last) cut = Slice (m, zero, columns, two)
    masked = Add (s, cut) p = Softmax <axis = -1> (masked) y = MatMul (p, keys)
    first = Gather (table, zero) far = Mul (first, column) z = Add (y, far)
}"""


def test_a_mask_of_all_tokens_has_their_number_though_a_longer_one_would_do(tmp_path):
    """A weight of the file is longer than the past and the new tokens: it has nothing to do with the mask."""
    model = onnx.parser.parse_model(LONG_ENOUGH)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(200, "f"), "table"))
    onnx.save(model, tmp_path / "past.onnx")
    axes = {"S": "1:4:16", "P": "0:4:16"}
    options = {"axes": axes, "golden": ["odd"], "precision": "fp32"}
    bundle = md.import_onnx(tmp_path / "past.onnx", tmp_path / "bundle", **options)
    dims = {tensor.name: tensor.dims for tensor in bundle.manifest.spec.inputs}
    assert dims["m"][2] in ("S+P", "P+S")


def test_numbers_that_float32_has_no_result_for_are_drawn_smaller(tmp_path):
    """A sigmoid that is 0 in ONNX Runtime has no logarithm there, and one in FP64."""
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[B,S,16] x) => (float[B,S,16] y)
    <float twelve = {12.0}> { far = Mul (x, twelve) part = Sigmoid (far) y = Log (part) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "far.onnx")
    bundle = md.import_onnx(tmp_path / "far.onnx", tmp_path / "bundle", golden=["opt"], precision="fp32")
    (case,) = golden_cases(bundle)
    assert 0.01 < case.inputs["x"].std() < 0.6


def test_a_level_that_rounding_decides_is_no_mistake(tmp_path):
    """Numbers half way between two levels: float32 and FP64 quantize them to different ones."""
    path = around(QUANTIZED, 18, tmp_path / "levels.onnx")
    halves = np.float32(0.05) * (np.arange(2 * 6 * 16, dtype=np.float32).reshape(2, 6, 16) % 40 - 19.5)
    options = {"axes": {"S": "2:6:8"}, "golden": ["opt"], "precision": "fp32", "inputs": {"x": halves}}
    bundle = md.import_onnx(path, tmp_path / "bundle", **options)
    assert md.validate(bundle, runtimes=["ort-cpu"]).outcome != "failed"


MAP = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[1,8,h,w] x) => (float[1,8,h,w] y) <int64[3] rows = {1, 8, -1}> {
   size = Shape (x)
   flat = Reshape (x, rows)
   t = Transpose <perm = [0, 2, 1]> (flat)
   s = MatMul (t, flat)
   p = Softmax (s)
   a = MatMul (p, t)
   back = Transpose <perm = [0, 2, 1]> (a)
   y = Reshape (back, size)
}
"""


@pytest.mark.parametrize("limit", [{"golden_gflop": 0.01}, {"golden_gib": 0.04}])
def test_the_large_case_of_a_map_is_bounded_by_its_scores(limit, tmp_path):
    """Height and width are tokens together: their attention grows with both twice."""
    onnx.save(onnx.parser.parse_model(MAP), tmp_path / "map.onnx")
    axes = {"h": "1:4:64", "w": "1:4:64"}
    bundle = md.import_onnx(
        tmp_path / "map.onnx", tmp_path / "b", axes=axes, golden=("opt", "large"), precision="fp32", **limit
    )
    sizes = bundle.manifest.golden[1].sizes
    tokens = sizes["h"] * sizes["w"]
    assert tokens > 16
    if "golden_gib" in limit:
        assert tokens**2 * 8 < 0.04 * 2**30
    else:
        assert tokens**2 * 4 * 8 < 0.01e9


def test_a_mask_of_floats_is_drawn_as_zeros_and_ones(tmp_path):
    """(1 - mask) times a number that hides keys: other floats would let one key of each query count."""
    text = """<ir_version: 10, opset_import: ["": 18]>
    g (float[B, 4, S, 8] q, float[B, S] keep, float[B, 4, S, 8] more) => (float[B, 4, S, 8] y)
        <float one = {1}, float low = {-10000}, float half = {0.35}, int64[2] axes = {1, 2}> {
        hidden = Sub(one, keep)
        bias = Mul(hidden, low)
        mask = Unsqueeze(bias, axes)
        turned = Transpose<perm = [0, 1, 3, 2]>(q)
        scores = MatMul(q, turned)
        scaled = Mul(scores, half)
        total = Add(scaled, mask)
        weights = Softmax(total)
        attended = MatMul(weights, q)
        rest = Sub(one, more)
        y = Add(attended, rest)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    axes = {"B": "1:2:4", "S": "1:9:16"}
    bundle = md.export(tmp_path / "m.onnx", tmp_path / "b", axes=axes, precision="fp32")
    for case in golden_cases(bundle):
        assert set(np.unique(case.inputs["keep"])) <= {0.0, 1.0}
        assert (case.inputs["keep"].sum(-1) > 0).all(), "every query has a key"
    opt = next(case for case in golden_cases(bundle) if case.name == "opt")
    assert len(np.unique(opt.inputs["more"])) > 2, "other floats are numbers"


# -- Positions that are decided by arithmetic on floats --------------------------------------------


class Bucketed(nn.Module):
    """T5's attention without its projections: distances in logarithmic buckets, and the lowest mask number.

    At a distance of 16, the bucket is a whole number in float32, and a little less in FP64.
    """

    def __init__(self):
        super().__init__()
        self.words, self.near = nn.Embedding(VOCABULARY, E), nn.Embedding(32, H)

    def forward(self, input_ids, attention_mask):
        x, places = self.words(input_ids), torch.arange(input_ids.shape[1])
        away = places[None] - places[:, None]
        far = 8 + (torch.log(away.abs().float().clamp(min=1) / 8) / math.log(16) * 8).long()
        bucket = 16 * (away > 0) + torch.where(away.abs() < 8, away.abs(), far.clamp(max=15))
        mask = (1.0 - attention_mask[:, None, None].to(x.dtype)) * torch.finfo(torch.float32).min
        bias = self.near(bucket).permute(2, 0, 1)[None] + mask
        q = x.unflatten(-1, (H, -1)).transpose(1, 2)
        return (torch.softmax(q @ q.transpose(2, 3) + bias, -1) @ q).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("origin", [pytest.param("file", marks=pytest.mark.slow), "module"])
def test_distances_in_buckets_and_the_lowest_mask_number(tmp_path, origin):
    """FP64 does not decide otherwise than the source, and fully masked queries are right beside a bias."""
    torch.manual_seed(0)
    module = Bucketed().eval()
    ids = torch.randint(0, VOCABULARY, (2, 20))
    mask = (torch.arange(20) < torch.tensor([[20], [13]])).long()
    if origin == "file":
        B, S = torch.export.Dim("B", max=8), torch.export.Dim("S", min=2, max=64)
        path, shapes = tmp_path / "t5.onnx", ({0: B, 1: S}, {0: B, 1: S})
        torch.onnx.export(module, (ids, mask), path, dynamo=True, dynamic_shapes=shapes, external_data=False)
        bundle = md.export(path, tmp_path / "b", axes={"B": "1:2:4", "S": "2:20:32"})
    else:
        names = ("input_ids", "attention_mask")
        examples = {name: md.Example(each, "B", "S") for name, each in zip(names, (ids, mask), strict=True)}
        axes = {"B": "1:2:4", "S": "2:20:32"}
        bundle = md.export(module, tmp_path / "b", example_inputs=examples, axes=axes)
    report = md.validate(bundle, runtimes=["ort-cpu"], latency=False)
    assert report.passed, report
    plan = bundle.manifest.checks["mixed precision"]
    assert not any(kept["kind"] == "rounding" for kept in plan["kept"]), "FP16 is not blamed for the buckets"
    feeds = {"input_ids": ids.numpy(), "attention_mask": np.zeros((2, 20), np.int64)}
    with torch.no_grad():
        wanted = module(ids, torch.zeros(2, 20, dtype=torch.int64)).numpy()
    with md.open_runner(bundle) as runner:
        (got,) = runner.run(feeds).values()
    assert np.linalg.norm(got - wanted) < 2e-3 * np.linalg.norm(wanted), "all keys count alike"
