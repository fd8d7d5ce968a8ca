"""Models in eight bits: the loss is what differs in FP64, the error is judged as for any other model."""

import json
from dataclasses import replace
from functools import cache, partial

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from click.testing import CliRunner
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from quantized_models import GEMMS, padded, samples, transformer, weights
from safetensors.numpy import load_file

import mha_deploy as md
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.cli import app
from mha_deploy.errors import ExportError, NoResult
from mha_deploy.exporter.compress import CALIBRATIONS, Magnitudes
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.file import load_graph
from mha_deploy.graph.ir import new_initializer
from mha_deploy.graph.lower import lower
from mha_deploy.graph.quantize import find_format, quantized_gemms
from mha_deploy.runtime import open_runner
from mha_deploy.runtime.tensorrt.engine_verdict import precision_verdict, written_types
from mha_deploy.runtime.tensorrt.kernels import EngineTensor, Kernel
from mha_deploy.validation.fault import layer_parity

OPTIONS = {"golden": ("opt",), "axes": {"B": "1:2:2", "S": "1:8:16"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return transformer(tmp_path_factory.mktemp("model") / "small.onnx")


@pytest.fixture(scope="module")
def bundles(model, tmp_path_factory):
    """One bundle in each format, made from the same samples; for INT8 there is one more that is too long."""
    folder = tmp_path_factory.mktemp("bundles")
    made = {}
    for name, data in (("int8", [*samples(), *samples(1, length=17)]), ("fp8", samples())):
        made[name] = md.export(model, folder / name, precision=name, data=data, **OPTIONS)
    return made


TABLE = """<ir_version: 10, opset_import: ["" : 23]> g (int64[B, S] ids) => (float[B, S, 4] y) {
    i = Identity (ids)
    x = Gather (table, i)
    y = MatMul (x, w)
}"""


@pytest.mark.parametrize("number", [7, -4])
def test_a_token_outside_the_vocabulary_is_refused_with_its_sample(tmp_path, number):
    file = onnx.parser.parse_model(TABLE)
    for name, rows in (("table", 3), ("w", 4)):
        file.graph.initializer.append(numpy_helper.from_array(np.ones((rows, 4), np.float32), name))
    onnx.save(file, tmp_path / "table.onnx")
    right, wrong = np.array([[0, 2]]), np.array([[1, number]])
    data = [{"ids": right}, {"ids": wrong}]
    axes = {"B": "1", "S": "1:2:4"}
    with pytest.raises(md.DeployError) as caught:
        md.export(tmp_path / "table.onnx", tmp_path / "out", precision="int8", data=data, axes=axes)
    for part in ("[1]", "ids", str(number), "3 rows"):
        assert part in caught.value.got
    assert not (tmp_path / "out").exists()


def relative(got, true):
    return np.linalg.norm(got - true) / np.linalg.norm(true)


@pytest.mark.parametrize(("name", "kind"), [("int8", "INT8"), ("fp8", "FLOAT8E4M3FN")])
def test_weights_and_activations_of_every_gemm_are_quantized(bundles, name, kind):
    graph = onnx.load(bundles[name].model_path).graph
    types = {each.name: onnx.TensorProto.DataType.Name(each.data_type) for each in graph.initializer}
    makers = {output: node for node in graph.node for output in node.output}
    gemms = [node for node in graph.node if node.op_type == "MatMul"]
    assert {node.name for node in gemms} == set(GEMMS)
    for node in gemms:
        x, w = (makers[value] for value in node.input)
        assert (x.op_type, w.op_type) == ("DequantizeLinear", "DequantizeLinear")
        assert makers[x.input[0]].op_type == "QuantizeLinear"
        assert types[w.input[0]] == kind
        assert types[w.input[1]] == "FLOAT16"
    assert [node.op_type for node in graph.node].count("Attention") == 1


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_gemm_whose_weight_is_a_copy_is_quantized_and_another_is_counted(model, tmp_path, name):
    file = onnx.load(model)
    held = {each.name: each for each in file.graph.initializer}
    turned, deep = numpy_helper.to_array(held["down.w"]).T.copy(), numpy_helper.to_array(held["up.w"])[None]
    held["down.w"].CopyFrom(numpy_helper.from_array(turned, "down.stored"))
    held["up.w"].CopyFrom(numpy_helper.from_array(deep, "up.w"))
    file.graph.initializer.remove(held["k.w"])
    file.graph.node.insert(0, onnx.helper.make_node("Identity", ["q.w"], ["k.w"]))
    file.graph.node.insert(0, onnx.helper.make_node("Transpose", ["down.stored"], ["down.w"], perm=[1, 0]))
    onnx.save(file, tmp_path / "shared.onnx")
    options = {**OPTIONS, "data": samples(), "max_loss": 0.5}
    bundle = md.export(tmp_path / "shared.onnx", tmp_path / "out", precision=name, **options)
    quantized = set(GEMMS) - {"up"}
    assert dict(quantized_gemms(load_graph(bundle.model_path))) == dict.fromkeys(quantized, name)
    loss = bundle.manifest.loss
    assert {each.name: each.is_compressed for each in loss.layers} == {x: x in quantized for x in GEMMS}
    sizes = {each: array.size for each, array in weights().items()}
    share = 1 - sizes["up"] / sum(sizes.values())
    assert [(x.compressed, x.share) for x in loss.search] == [(len(quantized), pytest.approx(share))]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_gemm_beyond_fp16_is_not_quantized(tmp_path, name):
    changed = {"up": weights()["up"] * np.float32(3e5), "down": weights()["down"] / np.float32(3e5)}
    file = transformer(tmp_path / "large.onnx", changed=changed)
    bundle = md.export(file, tmp_path / "out", precision=name, data=samples(), **OPTIONS)
    assert dict(quantized_gemms(load_graph(bundle.model_path))).keys() == set(GEMMS) - {"up", "down"}
    assert md.validate(bundle, probe=False).passed
    large = transformer(tmp_path / "all.onnx", changed={each: x * 1e6 for each, x in weights().items()})
    with pytest.raises(ExportError) as caught:
        md.export(large, tmp_path / "none", precision=name, data=samples(), **OPTIONS)
    assert "auto" in caught.value.hint
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_weights_that_stay_as_they_are_stored_give_the_same_numbers(bundles, model, tmp_path, monkeypatch):
    for name in ("exporter.file_program._MOST_WIDE", "exporter.file_program._LARGE"):
        monkeypatch.setattr(f"mha_deploy.{name}", 100)
    monkeypatch.setattr("mha_deploy.threads._AT_ONCE", 1000)  # a quarter of a weight
    monkeypatch.setattr("mha_deploy.graph.file.EXTERNAL_DATA_FROM", 1000)
    stored = md.export(model, tmp_path / "stored", precision="fp8", data=samples(), **OPTIONS)
    wide = bundles["fp8"]
    assert (stored.path / "source.onnx.data").is_file()
    for file in ("golden/opt.safetensors", "layers/opt.safetensors"):
        assert (stored.path / file).read_bytes() == (wide.path / file).read_bytes()
    for part in ("loss", "observed", "checks", "golden"):
        assert getattr(stored.manifest, part) == getattr(wide.manifest, part), part


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_loss_is_what_an_independent_evaluation_finds(bundles, model, name):
    bundle = bundles[name]
    with_qdq = ReferenceEvaluator(str(bundle.path / "source.onnx"))
    original = ReferenceEvaluator(str(model))
    got, true = (
        np.concatenate([run.run(None, each)[0] for each in samples()[1::2]]) for run in (with_qdq, original)
    )
    loss = bundle.manifest.loss
    assert (loss.samples, loss.held_out) == (3, True)
    (output,) = loss.outputs
    assert output.relative_l2 == pytest.approx(relative(got, true), rel=1e-2)
    assert output.sqnr_db == pytest.approx(-20 * np.log10(output.relative_l2), rel=1e-6)
    assert output.top1 == pytest.approx((got.argmax(-1) == true.argmax(-1)).mean(), abs=0.05)
    assert 0 < output.relative_l2 < 0.15
    assert 0 < output.kl < 0.1
    assert {each.name for each in loss.layers} == set(GEMMS)
    assert all(each.alone > 0 for each in loss.layers)


def test_samples_beyond_the_axes_are_not_used_and_named(bundles, model, tmp_path):
    assert not bundles["fp8"].manifest.loss.outside
    ((name, sizes),) = bundles["int8"].manifest.loss.outside.items()
    assert sizes == {"S": 17}
    assert any(name in note and "S = 17" in note for note in bundles["int8"].manifest.notes)
    with pytest.raises(md.DeployError, match="no sample within") as caught:
        md.export(model, tmp_path / "none", precision="fp8", data=samples(length=17), **OPTIONS)
    assert "S = 17" in caught.value.got


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_error_is_judged_against_the_quantized_model(bundles, name):
    report = md.validate(bundles[name], latency=False, data=samples(2, seed=5))
    data = report.to_dict()
    assert data["verdict"]["outcome"] == "passed", data["verdict"]
    assert data["loss"]["what"] == name
    used = [each["share"] for run in data["parity"] for each in run["verdicts"]]
    assert 0 < max(used) <= 1
    assert data["data"]["samples"] == 2


def test_a_scale_of_another_tensor_is_an_error_and_no_loss(bundles, tmp_path):
    broken = onnx.load(bundles["int8"].model_path)
    scales = {each.name: each for each in broken.graph.initializer}
    wrong = numpy_helper.to_array(scales["up/w_scale"])[::-1].copy()
    scales["up/w_scale"].CopyFrom(numpy_helper.from_array(wrong, "up/w_scale"))
    onnx.save(broken, tmp_path / "broken.onnx")
    report = md.validate(bundles["int8"], latency=False, graphs=[tmp_path / "broken.onnx"])
    assert report.to_dict()["verdict"]["outcome"] == "failed"


@pytest.mark.slow
def test_the_most_sensitive_gemms_stay_until_the_limit_holds(model, bundles, tmp_path):
    before = bundles["int8"].manifest.loss
    limit = before.worst * 0.8
    found = md.export(
        model, tmp_path / "out", precision="int8", data=samples(), max_loss=limit, **OPTIONS
    ).manifest.loss
    assert found.worst <= limit < before.worst
    kept = [each for each in found.layers if not each.is_compressed]
    assert kept
    assert min(each.alone for each in kept) >= max(each.alone for each in found.layers if each.is_compressed)
    (chosen,) = [each for each in found.search if each.is_chosen]
    assert chosen.compressed == len(GEMMS) - len(kept)
    assert chosen.loss == found.worst


def test_where_nothing_holds_the_export_fails_with_code_1(model, tmp_path):
    arguments = ["export", str(model), "-o", str(tmp_path / "out"), "--precision", "int8"]
    arguments += ["--max-loss", "1e-9", "--axis", "S=1:4:8"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, md.DeployError)
    assert result.exception.exit_code == 1
    assert not (tmp_path / "out").exists()


def test_validation_fails_where_the_loss_is_larger_than_allowed(bundles):
    loss = bundles["fp8"].manifest.loss.worst
    verdict = {}
    for limit in (loss * 0.9, loss * 1.1):
        report = md.validate(bundles["fp8"], latency=False, max_loss=limit)
        verdict[limit > loss] = report.to_dict()["verdict"]
        assert report.to_dict()["loss"]["limit"] == limit, "the one that it was judged by"
    assert verdict[True]["outcome"] == "passed"
    assert verdict[False]["outcome"] == "failed"
    assert [each["kind"] for each in verdict[False]["findings"] if each["level"] == "failure"] == ["loss"]


def test_before_opset_19_the_same_gemms_are_quantized_from_wide_weights(bundles, tmp_path):
    bundle = bundles["int8"]
    lowered = lower(load_graph(bundle.model_path), "primitives", opset=17)
    assert {name for name, kind in quantized_gemms(lowered) if kind == "int8"} == set(GEMMS)
    stored = {each.name for each in lowered.graph.initializers.values() if each.dtype == ir.DataType.INT8}
    assert not stored & {node.inputs[0].name for node in lowered.graph if node.op_type == "DequantizeLinear"}
    with md.open_runner(bundle) as runner, md.open_runner(lowered) as older:
        for sample in samples()[:3]:
            feeds = {name: array.astype(runner.inputs[name].dtype) for name, array in sample.items()}
            (true,), (got,) = (list(each.run(feeds).values()) for each in (runner, older))
            assert relative(got.astype(float), true.astype(float)) < 0.02


@pytest.mark.slow
def test_a_layer_of_one_size_is_quantized(tmp_path):
    bundle = md.export(
        "tiny-mqa", tmp_path / "out", axes={"B": "2", "S": "8"}, precision="int8", golden=("opt",)
    )
    assert bundle.manifest.loss.outputs[0].relative_l2 > 0


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_calibration_in_parts_finds_the_range(name):
    """`max` keeps an outlier, `percentile` clips it, and `mse` errs least on the grid."""
    numbers = np.random.default_rng(0).normal(size=(64, 1024))
    numbers[40, 7] = 12.0
    found, format = Magnitudes(), find_format(name)
    for part in numbers:
        found.add(part)
    ranges = {method: found.range(method, format) for method in CALIBRATIONS}

    def error(method):
        return np.square(format.rounded(numbers, ranges[method] / format.largest) - numbers).sum()

    assert ranges["max"] == 12.0
    assert ranges["percentile"] == pytest.approx(np.quantile(np.abs(numbers), 0.9999), rel=0.02)
    assert error("mse") <= min(error("max"), error("percentile")) * 1.01
    assert name == "fp8" or ranges["mse"] < 12.0


def test_a_calibration_that_nobody_knows_is_refused(model, tmp_path):
    with pytest.raises(md.DeployError):
        md.export(model, tmp_path / "out", precision="int8", calibration="entropy", **OPTIONS)


def test_an_iterator_that_is_used_up_is_refused(model, tmp_path):
    with pytest.raises(md.DeployError):
        md.export(model, tmp_path / "out", precision="int8", data=iter(samples()), **OPTIONS)


def test_options_of_eight_bits_need_eight_bits(model, tmp_path):
    with pytest.raises(md.DeployError) as refused:
        md.export(model, tmp_path / "out", precision="fp16", max_loss=0.1)
    assert "max_loss" in refused.value.got


def test_the_manifest_on_disk_has_the_loss(bundles):
    stored = json.loads((bundles["int8"].path / "manifest.json").read_text(encoding="utf-8"))["loss"]
    assert stored["outputs"][0]["relative_l2"] == bundles["int8"].manifest.loss.worst


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_kernels_of_an_engine_read_eight_bits(bundles, name):
    pytest.importorskip("tensorrt_rtx")
    engine = md.build_engine(bundles[name], backend="tensorrt-rtx", targets="89")
    found = engine.manifest.verdict.precision
    assert engine.manifest.has_requested_types
    assert found.requested == f"{name}/fp16"
    assert found.quantized == {name: len(GEMMS)}
    assert not found.not_quantized
    assert (found.gemms.other_types, found.gemms.unknown, found.gemms.unquantized) == ({}, (), ())
    shown = md.open_engine(engine.path).shown  # the plan holds the weights of the graph
    assert (shown.verdict.nodes, shown.all_fused) == (engine.manifest.verdict.nodes, True)


class Logit(torch.nn.Module):
    """Four blocks and one number for each sequence."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        make = partial(torch.nn.TransformerEncoderLayer, 32, 2, 64, batch_first=True)
        self.blocks, self.out = torch.nn.Sequential(*(make() for _ in range(4))), torch.nn.Linear(32, 1)

    def forward(self, x):
        return self.out(self.blocks(x).mean(1))


@pytest.mark.slow
def test_a_case_whose_result_cancels_is_left_out(tmp_path):
    def bundle(name, shift):
        module = Logit().eval()
        module.out.bias.data -= shift
        inputs = {"x": md.Example(torch.randn(2, 8, 32), "B", "S")}
        given = md.Deployable(module=module, inputs=inputs, axes={"B": "1:2:3", "S": "1:8:16"})
        return md.export(given, tmp_path / name, precision="fp8")

    oracle = load_file(bundle("first", 0.0).path / "golden" / "min.safetensors")["oracle/output"]
    manifest = bundle("shifted", oracle.item()).manifest
    assert "min" not in [entry.name for entry in manifest.golden]
    assert any("min" in note for note in manifest.notes)


@pytest.mark.parametrize("name", ["fp8", pytest.param("int8", marks=pytest.mark.slow)])
def test_the_kernel_of_quantized_attention_reads_eight_bits(model, tmp_path, name):
    pytest.importorskip("tensorrt_rtx")
    axes = {"B": "1:2:2", "S": "32:32:128"}
    given = samples(2, length=32)
    bundle = md.export(
        model,
        tmp_path / "out",
        precision=name,
        quantize_attention=True,
        data=given,
        golden=("opt",),
        axes=axes,
    )
    assert [each.name for each in bundle.manifest.loss.layers if each.is_compressed] == [*GEMMS, "attention"]
    report = md.validate(bundle, latency=False).to_dict()
    assert all(each["share"] <= 1 for run in report["parity"] for each in run["verdicts"])
    assert report["verdict"]["outcome"] != "failed"
    manifest = md.build_engine(bundle, backend="tensorrt-rtx", targets="89").manifest
    found = manifest.verdict.precision
    assert manifest.all_fused
    assert manifest.has_requested_types
    assert (found.quantized_attentions, found.quantized) == ({name: 1}, {name: len(GEMMS)})


@pytest.fixture(scope="module")
def hidden(tmp_path_factory):
    """A function that gives a bundle in a format, with an attention in it that the outputs do not show."""
    folder = tmp_path_factory.mktemp("hidden")
    path = transformer(folder / "small.onnx", split=True, changed={"out": 1e-4 * weights()["out"]})
    options = {**OPTIONS, "data": samples(), "quantize_attention": True}
    return cache(lambda name: md.export(path, folder / name, precision=name, **options))


@pytest.mark.slow
def test_gemms_and_attentions_in_eight_bits_are_counted_apart(hidden, run_cli):
    manifest = hidden("fp8").manifest
    names = {each.name for each in manifest.loss.layers if each.is_compressed}
    gemms = names - {each["name"] for each in manifest.attention}
    assert len(gemms) == len(names) - 1
    assert f"{len(gemms)}/{len(gemms)} GEMMs" in run_cli("inspect", hidden("fp8").path).out


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_quantized_attention_that_no_output_shows_is_judged_by_its_own_result(hidden, name):
    (observed,) = hidden(name).manifest.observed
    assert observed.hidden
    report = md.validate(hidden(name), latency=False).to_dict()
    assert report["verdict"]["outcome"] == "passed", report["verdict"]
    assert [each["cases"] for each in report["parity"]] == ["golden", "layers"]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_mistake_in_a_quantized_attention_fails_by_its_own_result(hidden, name):
    broken = load_graph(hidden(name).model_path)
    (node,) = [node for node in broken.graph if node.name == "attention/v_dequantize"]
    wrong = node.inputs[1].const_value.numpy() * np.float16(1.04)
    node.replace_input_with(1, new_initializer(broken.graph, "wrong", wrong))
    found = layer_parity(hidden(name), partial(open_runner, "ort-cpu"), model=broken)
    assert [each.is_wrong for each in found.verdicts] == [True]


@pytest.mark.slow
def test_a_gemm_that_a_builder_takes_out_of_eight_bits_is_named(tmp_path):
    """Of a packed projection TensorRT-RTX 1.7.1 reports kernels that read FP16."""
    pytest.importorskip("tensorrt_rtx")
    packed = transformer(tmp_path / "packed.onnx", packed=True)
    bundle = md.export(packed, tmp_path / "out", precision="int8", data=samples(2), **OPTIONS)
    manifest = md.build_engine(bundle, backend="tensorrt-rtx", targets="89").manifest
    found = manifest.verdict.precision
    assert {each.what for each in found.not_quantized} == {"qkv"}
    assert found.quantized == {"int8": 4}
    assert not manifest.has_requested_types


def kernel(name, reads, weights):
    tensors = [tuple(EngineTensor(name=f"{name}.{t}", dtype=t) for t in each) for each in (reads, weights)]
    half = (EngineTensor(name=f"{name}.y", dtype="fp16"),)
    return Kernel(
        name=name, layer_type="gemm", inputs=tensors[0], constants=tensors[1], outputs=half,
        onnx_nodes=(name,), source="log",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("reads", "weights", "status"),
    [
        (["int8"], ["int8"], "verified"),
        (["fp16"], ["fp16"], "mixed"),  # in Half although quantized
        (["fp16"], ["int8"], "mixed"),  # the weight alone
        (["fp8"], ["fp8"], "mixed"),  # in the other format
    ],
)
def test_a_quantized_gemm_is_judged_by_what_its_kernel_reads(bundles, reads, weights, status):
    written = written_types(load_graph(bundles["int8"].model_path))
    kernels = [kernel(name, ["int8"], ["int8"]) for name in GEMMS[1:]]
    kernels += [kernel(GEMMS[0], reads, weights), kernel("attention", ["fp16"], [])]
    found = precision_verdict(kernels, "fp16", written)
    assert found.status == status
    assert found.quantized["int8"] == len(GEMMS) - (status != "verified")


def test_every_gemm_of_a_quantized_engine_is_counted_once(bundles):
    model = load_graph(bundles["fp8"].model_path)
    logits, last = model.graph.outputs[0], next(node for node in model.graph if node.name == "residual_2")
    gram = ir.node("MatMul", [last.outputs[0], last.outputs[0]], name="gram")  # of two activations
    gram.outputs[0].type, gram.outputs[0].name = logits.type, "gram.y"
    model.graph.append(gram)
    model.graph.outputs.append(gram.outputs[0])
    packed = replace(kernel("k", ["fp8"], ["fp8"]), onnx_nodes=("q", "k", "v"))
    kernels = [packed, kernel("out", ["fp16"], ["fp16"]), kernel("up", ["fp8"], ["fp8"])]
    kernels += [kernel(name, ["fp16"], ["fp16"]) for name in ("attention", "gram")]
    kernels += [kernel("down", ["fp8"], ["fp8"])]  # none for the head
    found = precision_verdict(kernels, "fp16", written_types(model)).gemms
    assert found.kernels == len(kernels) - 1
    assert found.quantized == {"fp8": 5}
    assert found.other_types == {"out": "fp16"}
    assert (found.unknown, found.unquantized) == (("head",), ("gram",))
    half = precision_verdict(kernels, "fp16", written_types(load_graph(bundles["int8"].model_path)))
    assert half.gemms.quantized == {}
    assert half.unquantized_attentions == {}
    plain = {name: each for name, each in written_types(model).items() if each.quantized is None}
    assert precision_verdict(kernels, "fp16", plain).gemms is None


@pytest.mark.slow
def test_a_layer_with_a_preallocated_cache(tmp_path):
    """Its calls are judged; its cache is not recognized in the file, and that is told."""
    bundle = md.export("tiny-preallocated", tmp_path / "out", precision="fp8", golden=("min", "opt"))
    assert {each.name for each in bundle.manifest.spec.inputs} >= {"key_cache", "value_cache", "lengths"}
    assert any("KV cache" in note for note in bundle.manifest.notes)
    report = md.validate(bundle, sweep=False)
    assert report.passed, report.headline


class Growing(torch.nn.Module):
    """A decoder layer with one cache, of what are keys and values both."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(8, 8)

    def forward(self, x, past):
        held = torch.cat([past, self.project(x)], 1)
        P, T = past.shape[1], held.shape[1]
        mask = torch.arange(T) <= torch.arange(P, T)[:, None]
        return {"y": torch.nn.functional.scaled_dot_product_attention(x, held, held, mask), "present": held}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("cached", ["0:4:9", "2:4:9"])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_cache_of_a_quantized_decoder_has_the_range_that_was_asked_for(tmp_path, name, cached):
    given = md.Deployable(
        module=Growing(),
        inputs={
            "x": md.Example(torch.randn(2, 3, 8), "B", "S"),
            "past": md.Example(torch.randn(2, 4, 8), "B", "P"),
        },
        axes={"B": "1:2:2", "S": "1:3:6", "P": cached},
        kv_cache={"past": "present"},
    )
    bundle = md.export(given, tmp_path / "out", precision=name, golden=("opt",))
    axes, manifest = (
        {"B": (1, 2, 2), "S": (1, 3, 6), "P": tuple(map(int, cached.split(":")))},
        bundle.manifest,
    )
    assert {key: (axis.min, axis.opt, axis.max) for key, axis in manifest.spec.axes.items()} == axes
    assert not manifest.shrunk
    assert manifest.spec.kv_cache is not None


@pytest.mark.slow
def test_a_quantized_decoder_of_one_token_in_a_call_decodes(tmp_path):
    axes = {"B": "1:1:2", "S": "1", "P": "0:4:9"}
    bundle = md.export("tiny-dynamic", tmp_path / "out", axes=axes, precision="int8", golden=("opt",))
    report = md.validate(bundle, sweep=False, probe=False).record
    assert [(each.outcome, each.steps > 4) for each in report.decode] == [("passed", True)]


def test_an_activation_behind_a_quantized_gemm_is_not_taken_for_it(bundles):
    """Of a GELU, TensorRT-RTX names the GEMM before it as well: it multiplies by the scales."""
    written = written_types(load_graph(bundles["int8"].model_path))
    kernels = [kernel(name, ["int8"], ["int8"]) for name in GEMMS] + [kernel("attention", ["fp16"], [])]
    half = (EngineTensor(name="up.y", dtype="fp16"),)
    name, nodes = "__myl_MulAddDivCastErfCastAddMulMulMulCast_myl0_12", ("up", "relu")
    gelu = Kernel(name=name, inputs=half, outputs=half, onnx_nodes=nodes, source="log")
    found = precision_verdict([*kernels, gelu], "fp16", written)
    assert (found.status, found.not_quantized) == ("verified", ())
    assert found.quantized == {"int8": len(GEMMS)}


def test_a_file_that_onnx_runtime_quantized_comes_in_as_it_is(model, tmp_path):
    """Its outputs are quantized as well, which takes nothing out of FP16."""
    quantization = pytest.importorskip("onnxruntime.quantization")

    class Reader(quantization.CalibrationDataReader):
        left = iter(samples())

        def get_next(self):
            return next(self.left, None)

    kind, symmetric = quantization.QuantType.QInt8, {"ActivationSymmetric": True, "WeightSymmetric": True}
    about = {"activation_type": kind, "weight_type": kind, "per_channel": True, "extra_options": symmetric}
    quantization.quantize_static(str(model), str(tmp_path / "q.onnx"), Reader(), **about)
    bundle = md.export(tmp_path / "q.onnx", tmp_path / "out", golden=("opt",))
    assert bundle.manifest.checks["mixed precision"]["kept"] == []
    assert {name for name, _ in quantized_gemms(load_graph(bundle.model_path))} == {*GEMMS, "attention"}
    assert md.validate(bundle, latency=False).passed


def test_a_bias_in_int32_is_added_in_the_type_of_the_scale(model, tmp_path):
    """As `quantize_static` stores that of a Gemm."""
    file = onnx.load(model)
    last, output = file.graph.node[-1], file.graph.output[0].name
    last.output[0] = "before"
    bias, scale = np.full(1, -32, "i"), np.float32(0.01)
    for name, array in {"bias_q": bias, "bias_scale": scale}.items():
        file.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    nodes = [("DequantizeLinear", ["bias_q", "bias_scale"], "bias"), ("Add", ["before", "bias"], output)]
    file.graph.node.extend(
        onnx.helper.make_node(kind, taken, [made], name=made) for kind, taken, made in nodes
    )
    onnx.save(file, tmp_path / "q.onnx")
    bundle = md.export(tmp_path / "q.onnx", tmp_path / "out", golden=("opt",))
    assert not [n for n in load_graph(bundle.model_path).graph if n.op_type == "DequantizeLinear"]
    assert md.validate(bundle, latency=False).passed


@pytest.mark.parametrize("axes", [None, {"B": "2:2:4", "S": "16"}])
@pytest.mark.parametrize("precision", ["auto", "int8"])
def test_a_reshape_to_fixed_sizes_is_refused_by_name_before_anything_is_quantized(tmp_path, precision, axes):
    model = onnx.load(transformer(tmp_path / "fixed.onnx", split=True))
    sizes = {"split.shape": [2, -1, 4, 16], "join.shape": [2, -1, 64]}
    for each in [each for each in model.graph.initializer if each.name in sizes]:
        each.CopyFrom(numpy_helper.from_array(np.array(sizes[each.name]), each.name))
    for node, name in zip([n for n in model.graph.node if n.op_type == "Reshape"], "abcd", strict=True):
        node.name = name
    onnx.save(model, tmp_path / "fixed.onnx")
    stages = []
    make = partial(md.export, tmp_path / "fixed.onnx", tmp_path / "bundle", precision=precision, axes=axes)
    with pytest.raises(md.DeployError) as caught:
        make(on_step=lambda step, *_: stages.append(str(step)))
    assert "Reshape a to [2, -1, 4, 16]" in caught.value.got
    assert 'axes={"B": "2"' in caught.value.hint
    assert not {"calibration", "sensitivity", "loss", "ranges"} & {each.split(":")[0] for each in stages}


@pytest.mark.slow
def test_a_file_is_quantized_over_the_axes_that_it_runs_at(tmp_path):
    model = onnx.load(transformer(tmp_path / "tied.onnx"))
    table = np.ones((1, 6, 64), "f")  # whose length is that of the tokens
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    model.graph.node.insert(0, onnx.helper.make_node("Add", ["given", "table"], ["x"]))
    model.graph.input[0].name = "given"
    onnx.save(model, tmp_path / "tied.onnx")
    made = md.export(tmp_path / "tied.onnx", tmp_path / "bundle", precision="int8", golden=("opt",))
    assert [each.dims for each in made.manifest.spec.inputs] == [("B", 6, 64)]
    assert [each.sizes for each in made.manifest.golden] == [{"B": 2}]


def test_a_query_without_a_result_has_none_behind_a_quantizer(tmp_path):
    """A query whose keys are all hidden is NaN, which no integer is: it is no golden result."""
    seen = np.zeros((2, 8), bool)
    data = [{**each, "hidden": seen} for each in samples()]
    options = {"precision": "int8", "axes": {"B": "1:2:4", "S": "1:8:8"}, "golden": ("masks",)}
    options |= {"data": data, "inputs": {"hidden": seen}}
    bundle = md.export(padded(tmp_path / "padded.onnx"), tmp_path / "out", **options)
    (masks,) = golden_cases(bundle)
    assert set(masks.inputs["hidden"].mean(-1)) == {0.5}
    assert md.validate(bundle, latency=False).passed


def test_an_attention_whose_fully_masked_queries_are_zero_is_in_eight_bits(tmp_path):
    """They become zero before they are quantized: behind that, no runtime finds what it fuses."""
    hidden = np.arange(8) >= np.array([[8], [5]])
    data = [{**each, "hidden": hidden} for each in samples()]
    options = {"precision": "fp8", "quantize_attention": True, "axes": {"B": "1:2:4", "S": "1:8:8"}}
    options |= {"data": data, "inputs": {"hidden": hidden}, "golden": ("opt", "masks")}
    bundle = md.export(padded(tmp_path / "padded.onnx", minus="-3e38"), tmp_path / "out", **options)
    (node,) = attention_nodes(load_graph(bundle.model_path))
    assert (node.quantized, node.quantizes_weights) == ("fp8", True)
    assert md.validate(bundle, latency=False).passed


_QUANTIZED = {
    "int8": "q = QuantizeLinear(p, s, i) y = DequantizeLinear(q, s, i)",
    "uint8 with a zero point": "q = QuantizeLinear(p, s, u) y = DequantizeLinear(q, s, u)",
    "fp8": "q = QuantizeLinear<output_dtype = 17>(p, s) y = DequantizeLinear(q, s)",
    "dynamic": "q, t, z = DynamicQuantizeLinear(p) y = DequantizeLinear(q, t, z)",
    "integers": "q = QuantizeLinear(p, s, u) m = MatMulInteger(q, w, u) y = Cast<to = 1>(m)",
    "quantized GEMM": "q = QuantizeLinear(p, s, u) m = QLinearMatMul(q, s, u, w, s, i, s, u)"
    " y = DequantizeLinear(m, s, u)",
}


@pytest.mark.parametrize("name", _QUANTIZED)
def test_nan_stays_nan_in_every_quantizer(tmp_path, name):
    opset = 21 if name == "fp8" else 20
    text = f"""<ir_version: 9, opset_import: ["": {opset}]>
    g (float[B, 4] x) => (float[B, 4] y)
    <float minus = {{-inf}}, float s = {{0.01}}, int8 i = {{0}}, uint8 u = {{7}},
     int8[4, 4] w = {{1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}}> {{
        m0 = Add(x, minus)
        p = Softmax(m0)
        {_QUANTIZED[name]}
    }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "nan.onnx")
    with pytest.raises(NoResult):
        md.export(tmp_path / "nan.onnx", tmp_path / "out", precision="fp32", golden=("opt",))
