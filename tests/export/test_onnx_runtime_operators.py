"""Files with operators of ONNX Runtime's own, as its optimizer writes them, are exported like others."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import mha_deploy as md
from mha_deploy.errors import DeployError
from mha_deploy.graph.fuse import in_onnx_operators

B, S, T, H, E = 3, 5, 7, 2, 8
OWN, LOWEST = "com.microsoft", float(np.finfo(np.float32).min)


def numbers(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


X, SKIP, KEYS = numbers(B, S, E), numbers(B, S, E, seed=1), numbers(B, T, E)
NORM = {"scale": numbers(E), "shift": numbers(E, seed=1), "bias": numbers(E, seed=2)}
TABLES = {"words": numbers(7, E), "places": numbers(9, E), "kinds": numbers(2, E), **NORM}
QKV = {"w": numbers(E, 3 * E) * 0.3, "b": numbers(3 * E)}
RANDOM = np.random.default_rng(0)
IDS, KINDS, PLACES = (RANDOM.integers(0, most, (B, S)).astype(np.int32) for most in (7, 2, 9))
# With a padded tail, a padded head and a number that is not one, and without any token
MASK = np.array([[1, 1, 1, 0, 0], [0, 1, 2, 1, -1], [0] * S], np.int32)
OF_QUERIES = np.stack([np.tril(np.ones((S, S))), np.eye(S), np.zeros((S, S))]).astype(np.int32)
COUNTS, OF_KEYS = np.array([5, 2, 0], np.int32), np.arange(T, dtype=np.int32) < [[7], [4], [0]]
MASKS = {"mask": MASK, "of_queries": OF_QUERIES, "counts": COUNTS}
NAMES = {B: "B", S: "S", T: "T"}


def model_of(nodes, feeds, outputs, weights, opset=18):
    """A model whose inputs have dynamic axes."""
    kind = helper.np_dtype_to_tensor_dtype
    shapes = {name: [NAMES.get(size, size) for size in array.shape] for name, array in feeds.items()}
    given = [helper.make_tensor_value_info(name, kind(feeds[name].dtype), shapes[name]) for name in feeds]
    made = [helper.make_tensor_value_info(name, kind(np.dtype(dtype)), dims) for name, dtype, dims in outputs]
    stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", given, made, stored)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(OWN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def operator(name, inputs, feeds, weights=None, results=("y",), **attributes):
    """A model of one operator of ONNX Runtime's own."""
    node = helper.make_node(name, list(inputs), list(results), domain=OWN, **attributes)
    used = {key: array for key, array in (weights or {}).items() if key in inputs}
    types = {"count": np.int32}
    outputs = [(each, types.get(each, np.float32), None) for each in results if each]
    return model_of([node], feeds, outputs, used), feeds


def run(model, feeds):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def attention(mask=None, **attributes):
    feeds = {"x": X} | ({} if mask is None else {"mask": MASKS[mask]})
    inputs = ["x", "w", "b", *(["mask"] if mask else [])]
    return operator("Attention", inputs, feeds, QKV, num_heads=H, **attributes)


def multi_head(mask=None, bias="b", keys=KEYS, **attributes):
    feeds = {"q": X, "k": keys, "v": keys} | ({} if mask is None else {"mask": mask})
    inputs = ["q", "k", "v", bias, "" if mask is None else "mask"]
    return operator("MultiHeadAttention", inputs, feeds, QKV, num_heads=H, **attributes)


SUMS = ("y", "", "", "sum")
EMBEDDING = ("ids", "kinds_of", "words", "places", "kinds", "scale", "shift")
ONE_KIND = ("ids", "", "words", "places", "", "scale", "shift")
OPERATORS = {
    "Gelu": operator("Gelu", ["x"], {"x": X}),
    "BiasGelu": operator("BiasGelu", ["x", "bias"], {"x": X}, NORM),
    "FastGelu": operator("FastGelu", ["x"], {"x": X}),
    "FastGelu with a bias": operator("FastGelu", ["x", "bias"], {"x": X}, NORM),
    "QuickGelu": operator("QuickGelu", ["x"], {"x": X}),
    "QuickGelu with a factor": operator("QuickGelu", ["x"], {"x": X}, alpha=-0.5),
    "SkipLayerNormalization": operator(
        "SkipLayerNormalization",
        ["x", "skip", "scale", "shift", "bias"],
        {"x": X, "skip": SKIP},
        NORM,
        SUMS,
        epsilon=0.1,
    ),
    "SkipLayerNormalization of one batch element": operator(
        "SkipLayerNormalization", ["x", "skip", "scale"], {"x": X, "skip": SKIP[:1]}, NORM
    ),
    "SkipSimplifiedLayerNormalization": operator(
        "SkipSimplifiedLayerNormalization",
        ["x", "skip", "scale", "bias"],
        {"x": X, "skip": SKIP},
        NORM,
        SUMS,
        epsilon=0.1,
    ),
    "EmbedLayerNormalization": operator(
        "EmbedLayerNormalization",
        [*EMBEDDING, "mask"],
        {"ids": IDS, "kinds_of": KINDS, "mask": MASK},
        TABLES,
        ("y", "count", "sum"),
        epsilon=0.1,
    ),
    "EmbedLayerNormalization without segments": operator(
        "EmbedLayerNormalization", ONE_KIND, {"ids": IDS}, TABLES, ("y", "count")
    ),
    "EmbedLayerNormalization with positions": operator(
        "EmbedLayerNormalization",
        [*ONE_KIND, "", "at"],
        {"ids": IDS, "at": PLACES[:1]},
        TABLES,
        ("y", "count"),
    ),
    "FusedMatMul": operator("FusedMatMul", ["x", "k"], {"x": X, "k": KEYS}, transB=1, alpha=0.3),
    "Attention": attention(),
    "Attention with a scale": attention(scale=0.7),
    **{
        f"Attention, {mask}, {causal}, {hidden:g}": attention(
            mask, unidirectional=causal, mask_filter_value=hidden
        )
        for mask in MASKS
        for causal in (0, 1)
        for hidden in (-10000.0, -1e9, LOWEST)
    },
    "MultiHeadAttention": multi_head(),
    "MultiHeadAttention without biases": multi_head(bias=""),
    "MultiHeadAttention with a mask of other keys": multi_head(OF_KEYS.astype(np.int32)),
    "MultiHeadAttention with counts": multi_head(COUNTS, keys=X),
    "causal MultiHeadAttention": multi_head(MASK, keys=X, unidirectional=1),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_in_onnx_operators_computes_the_same(name):
    model, feeds = OPERATORS[name]
    written = ir.to_proto(in_onnx_operators(ir.from_proto(model)))
    assert {node.domain for node in written.graph.node} == {""}
    for want, got in zip(run(model, feeds), run(written, feeds), strict=True):
        assert (want.dtype, want.shape) == (got.dtype, got.shape)
        np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("hidden", [-10000.0, -1e9])
@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_number_is_added_in_fp32(mask, hidden):
    """In FP16 it absorbs scores, or is infinite: a query without keys would get another result, or NaN."""
    halves = {name: array.astype(np.float16) for name, array in (QKV | {"x": X}).items()}
    feeds = {"x": halves.pop("x"), "mask": MASKS[mask]}
    node = helper.make_node(
        "Attention", ["x", "w", "b", "mask"], ["y"], domain=OWN, num_heads=H, mask_filter_value=hidden
    )
    model = model_of([node], feeds, [("y", np.float16, None)], halves)
    written, (fused, report) = in_onnx_operators(ir.from_proto(model)), md.fuse(model)
    assert len(report.fused) == 1
    (want,) = run(model, feeds)
    for each in (ir.to_proto(written), fused):
        np.testing.assert_allclose(run(each, feeds)[0], want, atol=5e-3)


REFUSED = {
    "of starts and ends": operator(
        "Attention", ["x", "w", "b", "m"], {"x": X, "m": np.ones(2 * B, np.int32)}, QKV, num_heads=H
    ),
    "causal with other lengths": multi_head(unidirectional=1),
    "with statistics": operator(
        "SkipLayerNormalization",
        ["x", "skip", "scale", "shift"],
        {"x": X, "skip": SKIP},
        NORM,
        ("y", "mean", "deviation"),
    ),
    "unknown": operator("BiasSplitGelu", ["x", "bias"], {"x": X}, NORM),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operator_that_is_not_written_out_is_refused_by_its_name(name, tmp_path):
    model, _ = REFUSED[name]
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(DeployError) as caught:
        md.export(tmp_path / "model.onnx", tmp_path / "bundle")
    assert caught.value.got == f"1 {model.graph.node[0].op_type}"
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("norm", "opset"),
    [("LayerNormalization", 14), ("SimplifiedLayerNormalization", 14), ("SimplifiedLayerNormalization", 18)],
)
def test_a_norm_that_onnx_does_not_have_in_this_opset_is_written_out(norm, opset, half, tmp_path):
    """ONNX Runtime's optimizer puts norms into files of any opset; ONNX's checker does not know them."""
    dtype = np.float16 if half else np.float32
    weights = {name: NORM[name].astype(dtype) for name in ("scale", "shift")[: 2 - ("Simplified" in norm)]}
    feeds = {"x": X.astype(dtype)}
    node = helper.make_node(norm, ["x", *weights], ["y"], epsilon=0.1)
    model = model_of([node], feeds, [("y", dtype, ["B", "S", E])], weights, opset)
    written, _ = md.fuse(model)
    onnx.checker.check_model(written)
    (want,), (got,) = run(model, feeds), run(written, feeds)
    np.testing.assert_allclose(got, want, atol=2e-3 if half else 2e-6)


def optimized():
    """One layer as the optimizer writes it: an embedding that counts tokens, attention, a norm of a sum."""
    own = {"domain": OWN}
    nodes = [
        helper.make_node(
            "EmbedLayerNormalization", [*EMBEDDING, "mask"], ["x", "count"], **own, epsilon=1e-12
        ),
        helper.make_node("Attention", ["x", "w", "b", "count"], ["a"], **own, num_heads=H),
        helper.make_node("SkipLayerNormalization", ["a", "x", "scale", "shift"], ["n"], **own),
        helper.make_node("BiasGelu", ["n", "bias"], ["y"], **own),
    ]
    feeds = {"ids": IDS, "kinds_of": KINDS, "mask": MASK}
    return model_of(nodes, feeds, [("y", np.float32, ["B", "S", E])], TABLES | QKV, 14)


def test_a_layer_of_the_optimizer_is_fused_and_passes(tmp_path):
    onnx.save(optimized(), tmp_path / "layer.onnx")
    axes = {"S": "1:4:9"}
    bundle = md.export(tmp_path / "layer.onnx", tmp_path / "bundle", axes=axes, golden=("opt", "min"))
    assert (len(bundle.manifest.attention), bundle.manifest.precision.name) == (1, "fp16")
    report = md.validate(bundle, runtimes=["ort-cpu"])
    assert report.passed, report.headline


def without_its_mask(model):
    """What a wrong rewrite might give."""
    model = in_onnx_operators(model)
    for node in model.graph:
        if node.op_type == "Softmax":
            node.replace_input_with(0, node.inputs[0].producer().inputs[0])
    return model


def test_a_rewrite_that_computes_something_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("mha_deploy.exporter.onnx_import.in_onnx_operators", without_its_mask)
    onnx.save(optimized(), tmp_path / "layer.onnx")
    with pytest.raises(DeployError) as caught:
        md.export(tmp_path / "layer.onnx", tmp_path / "bundle", axes={"S": "1:4:9"})
    assert "relative error" in caught.value.got


@pytest.mark.slow
@pytest.mark.parametrize("form", ["counts", "raw mask", "multi-head", "half"])
def test_bert_from_the_optimizer(form, tmp_path):
    """A model of transformers, exported by TorchScript's exporter, and optimized by ONNX Runtime."""
    import torch
    import transformers
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        attn_implementation="eager",
    )
    torch.manual_seed(0)

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = transformers.BertModel(config, add_pooling_layer=False)

        def forward(self, *inputs):
            return self.bert(**dict(zip(names, inputs, strict=True))).last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    ones = torch.ones(2, 9, dtype=torch.int64)
    plain, file = tmp_path / "bert.onnx", tmp_path / "optimized.onnx"
    torch.onnx.export(
        Encoder().eval(),
        (ones, ones, 0 * ones),
        plain,
        input_names=names,
        output_names=["hidden"],
        dynamic_axes={name: {0: "B", 1: "S"} for name in (*names, "hidden")},
        opset_version=14,
        dynamo=False,
    )
    options = FusionOptions("bert")
    options.use_raw_attention_mask(form == "raw mask")
    options.use_multi_head_attention = form == "multi-head"
    result = optimize_model(
        str(plain), model_type="bert", num_heads=2, hidden_size=32, optimization_options=options
    )
    if form == "half":
        result.convert_float_to_float16()
    result.save_model_to_file(str(file))
    used = {node.op_type for node in onnx.load(file).graph.node if node.domain == OWN}
    assert {"EmbedLayerNormalization", "SkipLayerNormalization", "BiasGelu"} < used
    bundle = md.export(file, tmp_path / "bundle", axes={"S": "1:9:32"})
    assert (len(bundle.manifest.attention), bundle.manifest.precision.name) == (2, "fp16")
    report = md.validate(bundle, runtimes=["ort-cpu"])
    assert report.passed, report.headline
