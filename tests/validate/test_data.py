"""A user's own data: read from anywhere, judged sample by sample, with a metric of their own."""

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from finder_model import CLASSES, LENGTH, WIDTH, Finder
from onnx import numpy_helper
from safetensors.numpy import save_file
from torch import nn

import mha_deploy as md
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.samples import as_taken, read_samples, samples_from
from mha_deploy.errors import DeployError
from mha_deploy.files import LARGEST_TEXT
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.model.spec import Axis, ModuleSpec, TensorSpec
from mha_deploy.report.table import worst_table
from mha_deploy.runtime.user_data import open_samples
from mha_deploy.status import Kind
from mha_deploy.text import distinct_figures
from mha_deploy.validation.records import check_report

QUICK = {"probe": False, "latency": False, "runtimes": ["ort-cpu"]}

# -- A model that is trained here, in a second: which token stands behind the marker? --------------


FACTORY = """
    import torch
    from finder_model import LENGTH, Finder
    from mha_deploy import Deployable, Example

    def finder():
        module = Finder()
        module.load_state_dict(torch.load({weights!r}, weights_only=True))
        ids = torch.zeros(2, LENGTH, dtype=torch.int64)
        inputs = {{"ids": Example(ids, "B", draw=lambda shape, g: torch.randint(0, 7, shape, generator=g))}}
        about = {{"axes": {{"B": "1:4:64"}}, "outputs": ("logits",)}}
        return Deployable(module=module, inputs=inputs, samples=samples, **about)

    def samples():
        yield {{"ids": torch.full((3, LENGTH), 5), "label": torch.zeros(3)}}
        yield {{"ids": torch.zeros(1, LENGTH, dtype=torch.int32)}}

    def accuracy(outputs, sample):
        return (outputs["logits"].argmax(-1) == sample["label"]).mean()
"""


def draw(count, seed):
    """Token ids with one marker each, and the token behind it."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, CLASSES, (count, LENGTH))
    at = random.integers(0, LENGTH - 1, count)
    ids[np.arange(count), at] = CLASSES
    return ids, ids[np.arange(count), at + 1]


def train():
    torch.manual_seed(0)
    module, ids, labels = Finder(), *(torch.from_numpy(each) for each in draw(4096, 0))
    optimizer = torch.optim.Adam(module.parameters(), 2e-2)
    for step in range(150):
        part = slice(step * 256 % 4096, step * 256 % 4096 + 256)
        loss = nn.functional.cross_entropy(module(ids[part]), labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return module


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The bundle of a trained model, the file of its factory and metrics, and held-out samples."""
    folder = tmp_path_factory.mktemp("trained")
    torch.save(train().state_dict(), folder / "weights.pt")
    text = textwrap.dedent(FACTORY).format(weights=str(folder / "weights.pt"))
    (folder / "finder.py").write_text(text, encoding="utf-8")
    bundle = md.export(f"{folder / 'finder.py'}:finder", folder / "bundle", precision="fp16", golden=("opt",))
    ids, labels = draw(96, 1)
    np.savez(folder / "held-out.npz", ids=ids.reshape(4, 24, LENGTH), label=labels.reshape(4, 24))
    return bundle, folder


@pytest.fixture
def wrong_graph(trained, tmp_path):
    """Another export of the trained model, with a projection that is 10 % off."""
    model = onnx.load(trained[0].model_path)
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.ndim == 2 and 3 * WIDTH in values.shape:
            values = (values * np.linspace(0.2, 1.6, values.shape[0])[:, None]).astype(values.dtype)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(model, tmp_path / "wrong.onnx")
    return tmp_path / "wrong.onnx"


def test_the_accuracy_of_a_trained_model_is_reported_beside_the_original(trained, run_cli, tmp_path):
    bundle, folder = trained
    options = ("--data", folder / "held-out.npz", "--metric", f"{folder / 'finder.py'}:accuracy")
    quick = ("--no-probe", "--runtime", "ort-cpu", "-o", tmp_path, "--json")
    done = run_cli("validate", bundle.path, *options, *quick)
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert check_report(data) == []
    found = data["data"]
    assert (found["samples"], found["resumed"], found["outside"]) == (4, 0, {})
    (runtime,) = found["runtimes"]
    assert (runtime["outcome"], runtime["samples"], runtime["failed"]) == ("passed", 4, 0)
    metric, (logits,) = runtime["metric"], runtime["outputs"]
    assert metric["original"] == metric["reference"] == metric["value"] > 0.9, "it learned something"
    assert (logits["name"], logits["agreement"]["positions"]) == ("logits", 96)
    assert logits["agreement"]["top1"] == 1
    assert 0 <= logits["agreement"]["kl"] <= logits["agreement"]["kl_max"] < 1e-3
    error = logits["error"]
    assert 0 < error["p50"] <= error["p90"] <= error["p99"] <= error["max"]
    assert len(runtime["worst"]) == 4
    assert str(Path("some", runtime["worst"][0]["file"])) in repr(worst_table(found, Path("some")))
    again = md.validate(bundle, data=tmp_path / runtime["worst"][0]["file"], **QUICK)
    (replayed,) = again.record.data.runtimes
    assert replayed.share.max == pytest.approx(runtime["worst"][0]["share"])
    assert replayed.share.max == pytest.approx(runtime["share"]["max"])


def test_the_samples_of_a_deployable_are_golden_cases(trained):
    bundle, _ = trained
    found = {case.name: case for case in golden_cases(bundle)}
    assert [*found] == ["opt", "sample-0", "sample-1"]
    assert found["sample-0"].sizes == {"B": 3}
    assert (found["sample-0"].inputs["ids"] == 5).all()
    assert found["sample-1"].inputs["ids"].dtype == np.int64
    outside = md.Deployable(
        module=Finder(), inputs={"ids": md.Example(torch.zeros(2, LENGTH, dtype=torch.int64), "B")},
        axes={"B": "1:2:4"}, samples=[{"ids": np.zeros((5, LENGTH), np.int64)}],
    )  # fmt: skip
    with pytest.raises(DeployError, match="B"):
        md.export(outside, bundle.path.parent / "outside", precision="fp32", golden=("opt",))


def test_another_export_that_is_wrong_on_the_data_fails_and_its_accuracy_drops(trained, wrong_graph):
    bundle, folder = trained
    metric = f"{folder / 'finder.py'}:accuracy"
    report = md.validate(
        bundle, graphs=[wrong_graph], data=folder / "held-out.npz", metric=metric, data_limit=2, **QUICK
    )
    (finding,) = [each for each in report.findings if each.kind is Kind.WRONG_ON_DATA]
    assert finding.level == "failure"
    assert finding.numbers == {"failed": 2, "samples": 2}
    (runtime,) = report.record.data.runtimes
    assert runtime.metric.value < runtime.metric.original
    assert runtime.outputs[0].agreement.kl > 100 * runtime.outputs[0].original_agreement.kl


def test_logits_that_are_not_finite_fail_and_the_report_can_be_written(trained, wrong_graph):
    bundle, folder = trained
    model = onnx.load(wrong_graph)
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype.kind == "f":
            tensor.CopyFrom(numpy_helper.from_array(values * np.nan, tensor.name))
    onnx.save(model, wrong_graph)
    about = {"data": folder / "held-out.npz", "data_limit": 2, "requirements": {"max_budget_share": 1.0}}
    report = md.validate(bundle, graphs=[wrong_graph], **about, **QUICK)
    assert report.outcome == "failed"
    data = report.to_dict()
    assert check_report(data) == []
    (requirement,) = data["requirements"]
    assert (requirement["outcome"], requirement["got"]) == ("failed", None)
    assert requirement["place"]["output"] == "logits"
    (logits,) = data["data"]["runtimes"][0]["outputs"]
    assert (logits["agreement"]["kl"], logits["agreement"]["kl_max"]) == (None, None)
    assert logits["original_agreement"]["kl"] >= 0
    assert "held-out.npz" in report.to_html()


def layer_samples(lengths):
    """Samples of a catalog layer, of these lengths."""
    random = np.random.default_rng(2)
    return [{"x": random.standard_normal((1, length, 64))} for length in lengths]


def test_a_run_that_was_interrupted_goes_on_where_it_stopped(bundles, tmp_path):
    bundle, items = bundles("tiny-gqa"), layer_samples([3, 4, 5, 6])

    def stream(most):
        yield from items[:most]
        if most < len(items):
            raise RuntimeError("the disk is gone")

    options = {"resume": tmp_path / "data.jsonl", **QUICK}
    with pytest.raises(DeployError, match="samples cannot be read"):
        md.validate(bundle, data=stream(3), **options)
    second = md.validate(bundle, data=stream(4), **options).record.data
    assert (second.samples, second.resumed) == (4, 3)
    third = md.validate(bundle, data=stream(4), **options).record.data
    assert third.resumed == 0, "a run that ended is not gone on with"
    assert third.runtimes == second.runtimes


def test_a_long_run_keeps_its_results(bundles, tmp_path):
    """More than other files of text may have: it grows with every sample."""
    bundle, items, kept = bundles("tiny-gqa"), layer_samples([3, 4]), tmp_path / "data.jsonl"

    def stream(most):
        yield from items[:most]
        if most < len(items):
            raise RuntimeError("the disk is gone")

    options = {"resume": kept, **QUICK}
    with pytest.raises(DeployError, match="samples cannot be read"):
        md.validate(bundle, data=stream(1), **options)
    (header, result) = kept.read_bytes().splitlines()
    other = re.sub(rb'"digest":"[^"]*"', b'"digest":"another"', result)
    kept.write_bytes(b"\n".join([header, result, *[other] * (LARGEST_TEXT // len(other) + 1), b""]))
    assert md.validate(bundle, data=stream(2), **options).record.data.resumed == 1


def test_a_run_with_other_logits_does_not_go_on_from_those_before(bundles, tmp_path):
    """Samples that were compared before would not count for the agreement of an output named now."""
    bundle, items = bundles("tiny-gqa"), layer_samples([3, 4])

    def stream(most):
        yield from items[:most]
        if most < len(items):
            raise RuntimeError("the disk is gone")

    options = {"resume": tmp_path / "data.jsonl", **QUICK}
    with pytest.raises(DeployError, match="samples cannot be read"):
        md.validate(bundle, data=stream(1), **options)
    found = md.validate(bundle, data=stream(2), logits=["output"], **options).record.data
    assert found.resumed == 0
    (output,) = found.runtimes[0].outputs
    assert output.agreement.positions == 7


METRICS = """
def no_number(outputs, sample):
    return "good"


def fails(outputs, sample):
    return 1 / 0
"""


def test_a_file_without_a_function_lists_its_functions(bundles, tmp_path):
    (tmp_path / "metrics.py").write_text(METRICS, encoding="utf-8")
    path = str(tmp_path / "metrics.py")
    for options in ({"metric": path, "data": layer_samples([2])}, {"data": path}):
        with pytest.raises(DeployError) as caught:
            md.validate(bundles("tiny-gqa"), **options, **QUICK)
        assert f"{path}:no_number or {path}:fails" in caught.value.hint


def test_a_metric_that_fails_is_an_error_of_its_line(bundles, tmp_path):
    (tmp_path / "metrics.py").write_text(METRICS, encoding="utf-8")
    bundle, data = bundles("tiny-gqa"), layer_samples([65, 2])
    for name, what in {"no_number": "no number", "fails": "metric failed"}.items():
        with pytest.raises(DeployError, match=what) as caught:
            md.validate(bundle, data=data, metric=f"{tmp_path / 'metrics.py'}:{name}", **QUICK)
        assert what == "no number" or "metrics.py:7" in str(caught.value.got)
    report = md.validate(bundle, data=data, metric=lambda outputs, sample: 2.0, **QUICK)
    assert report.outcome == "not verified"
    (outside,) = [each for each in report.findings if each.kind is Kind.DATA_OUTSIDE]
    assert "S is 2–65" in outside.text, "which axis it is"
    found = report.record.data
    assert list(found.outside.values()) == [{"S": 65}], "the sizes that are beyond, and no others"
    assert found.sizes == {"B": (1, 1), "S": (2, 65)}
    assert found.runtimes[0].metric.value == 2.0


def test_one_sample_without_a_result_does_not_end_the_run(bundles):
    """The layer itself overflows on it: there is nothing to compare with."""
    data = [*layer_samples([3]), {"x": np.full((1, 2, 64), 6e4)}, *layer_samples([4])]
    report = md.validate(bundles("tiny-gqa"), data=data, **QUICK)
    (runtime,) = report.record.data.runtimes
    assert (runtime.samples, runtime.failed, runtime.not_verified) == (3, 0, 1)
    assert report.outcome == "not verified"
    (found,) = (each for each in report.findings if each.kind is Kind.DATA_NOT_VERIFIED)
    assert found.text in report.headline


def test_numbers_beyond_the_type_of_the_bundle_are_named_and_not_the_model_blamed(bundles):
    report = md.validate(bundles("tiny-gqa"), data=[{"x": np.full((1, 2, 64), 3.7e6)}], **QUICK)
    assert report.outcome == "not verified"
    (found,) = (each for each in report.findings if each.kind is Kind.DATA_NOT_VERIFIED)
    assert (found.reason.kind, found.reason.got) == (Kind.BEYOND_TYPE, "x")
    assert found.reason.numbers == {"largest": 3.7e6, "limit": 65504}
    assert "--precision" in found.text


GATED = """
    import torch
    from mha_deploy import Deployable, Example

    class Gated(torch.nn.Module):
        def forward(self, x, flag):
            y = torch.nn.functional.scaled_dot_product_attention(x, x, x)
            return y, y * flag

    def gated():
        flag = Example(torch.ones(1), draw=lambda shape, generator: torch.ones(shape))
        inputs = {"x": Example(torch.randn(1, 2, 4, 8), "B"), "flag": flag}
        return Deployable(module=Gated(), inputs=inputs, outputs=("y", "z"), axes={"B": "1:1:2"})
"""


def test_an_output_that_no_sample_shows_is_named_in_the_headline(tmp_path):
    (tmp_path / "gated.py").write_text(textwrap.dedent(GATED), encoding="utf-8")
    bundle = md.export(f"{tmp_path / 'gated.py'}:gated", tmp_path / "b")
    x = np.random.default_rng(0).standard_normal((1, 2, 4, 8))
    report = md.validate(bundle, data=[{"x": x, "flag": np.zeros(1)}], **QUICK)
    assert report.outcome == "not verified"
    (runtime,) = report.record.data.runtimes
    assert runtime.unseen == ("z",)
    (found,) = (each for each in report.findings if each.kind is Kind.DATA_NOT_VERIFIED)
    assert found.names == ("z",)
    assert found.text in report.headline


@pytest.mark.parametrize(
    "given",
    [
        {"data": "missing.npz"},
        {"data": [{"y": np.ones((1, 2, 64))}]},
        {"data": [{"x": np.ones((1, 2, 64), complex)}]},
        {"data": []},
        {"data": layer_samples([3]), "metric": "missing.py:accuracy"},
        {"data": layer_samples([3]), "logits": ["no output"]},
    ],
)
def test_data_that_cannot_be_judged_is_refused_before_anything_is_run(given, bundles):
    begun = []
    with pytest.raises(DeployError):
        md.validate(bundles("tiny-gqa"), **given, **QUICK, on_step=lambda name, *_: begun.append(name))
    assert begun == []


def test_how_many_samples_a_file_has_is_known_while_they_are_run(bundles, tmp_path):
    random, seen = np.random.default_rng(0), []
    np.savez(tmp_path / "many.npz", x=random.standard_normal((5, 1, 3, 64)))
    for most in (0, 2):
        md.validate(
            bundles("tiny-gqa"),
            data=tmp_path / "many.npz",
            data_limit=most,
            **QUICK,
            on_step=lambda name, number, count: seen.append((number, count)) if "many" in name else None,
        )
    assert seen == [(at, 5) for at in range(5)] + [(at, 2) for at in range(2)]


def test_data_of_which_nothing_was_run_is_one_warning(bundles):
    report = md.validate(bundles("tiny-gqa"), data=layer_samples([65]), **QUICK)
    assert report.outcome == "not verified"
    (found,) = (each for each in report.findings if each.section == "data")
    assert found.kind is Kind.DATA_OUTSIDE
    assert found.in_headline
    assert found.text in report.headline


def test_figures_are_written_with_as_many_digits_as_show_that_they_differ():
    assert distinct_figures(0.9658, 0.9663) == ("0.9658", "0.9663")
    assert distinct_figures(0.5, 0.25) == ("0.500", "0.250")
    assert distinct_figures(1.0, 1.0) == ("1.00", "1.00")
    assert distinct_figures(float("nan"), float("nan")) == ("NaN", "NaN")


@pytest.mark.slow
def test_an_imported_model_needs_its_file_for_data(tmp_path, bundles, trained):
    source = bundles("tiny-mha", "fp32").model_path
    bundle = md.import_onnx(source, tmp_path / "imported", precision="fp32", golden=("opt",))
    data = [{"x": np.random.default_rng(0).standard_normal((2, 5, 64))}]
    with pytest.raises(DeployError, match="which the bundle does not hold"):
        md.validate(bundle, data=data, **QUICK)
    with pytest.raises(DeployError, match="not the file that was imported"):
        md.validate(bundle, data=data, source=trained[0].model_path, **QUICK)
    report = md.validate(bundle, data=data, source=source, **QUICK)
    assert report.passed, report.headline


# -- where samples are read from -------------------------------------------------------------------


def test_an_imported_model_needs_its_file_for_fresh_cases(tmp_path, bundles):
    source = bundles("tiny-mha", "fp32").model_path
    bundle = md.import_onnx(source, tmp_path / "imported", precision="fp32", golden=("opt",))
    with pytest.raises(DeployError) as refused:
        md.validate(bundle, fresh=2)
    assert "source" in str(refused.value)
    report = md.validate(bundle, fresh=2, source=source)
    (fresh,) = [each for each in report.to_dict()["parity"] if each["cases"] == "fresh"]
    assert report.passed, report.headline
    assert len({json.dumps(each["sizes"]) for each in fresh["verdicts"]}) == 2
    again = md.validate(bundle, fresh=2, source=source, seed=2).to_dict()["parity"]
    assert fresh["verdicts"] != again[-1]["verdicts"], "another seed draws others"


@pytest.fixture(scope="module")
def spec(bundles):
    return bundles("tiny-padding").manifest.spec


X = np.random.default_rng(0).standard_normal((3, 2, 5, 64)).astype(np.float32)
LENGTHS = np.array([[5, 2], [1, 5], [3, 4]])


def as_npz(folder):
    np.savez_compressed(folder / "data.npz", x=X, key_lengths=LENGTHS, label=np.arange(3), names=np.arange(7))
    return folder / "data.npz"


def as_safetensors(folder):
    save_file({"x": X, "key_lengths": LENGTHS, "label": np.arange(3)}, folder / "data.safetensors")
    return folder / "data.safetensors"


def as_npy_by_input(folder):
    for name, array in {"x": X, "key_lengths": LENGTHS, "label": np.arange(3)}.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def as_folder_of_files(folder):
    for index in range(3):
        about = {"x": X[index], "key_lengths": LENGTHS[index], "label": np.array(index)}
        np.savez(folder / f"{index}.npz", **about)
    (folder / "README.txt").write_text("not a sample")
    return folder


def as_folder_of_folders(folder):
    for index in range(3):
        (folder / f"s{index}").mkdir()
        about = {"x": X[index], "key_lengths": LENGTHS[index], "label": np.array(index)}
        for name, array in about.items():
            np.save(folder / f"s{index}" / f"{name}.npy", array)
    return folder


FORMS = [as_npz, as_safetensors, as_npy_by_input, as_folder_of_files, as_folder_of_folders]


@pytest.mark.parametrize("write", FORMS)
def test_samples_are_the_same_from_every_kind_of_file(write, tmp_path, spec, bundles):
    precision = bundles("tiny-padding").manifest.precision
    found = [as_taken(each, spec, precision) for each in read_samples(write(tmp_path), spec)]
    assert [int(each.labels["label"]) for each in found] == [0, 1, 2]
    for index, sample in enumerate(found):
        assert sample.sizes == {"B": 2, "S": 5}
        assert sample.inputs["x"].dtype == np.float16
        assert sample.inputs["key_lengths"].dtype == np.int32
        np.testing.assert_array_equal(sample.inputs["x"], X[index].astype(np.float16))
        np.testing.assert_array_equal(sample.inputs["key_lengths"], LENGTHS[index])
    assert len({each.digest for each in found}) == 3


NOT_SAMPLES = {
    "no such input": {"x": X},
    "another rank": {"x": X[0, 0], "key_lengths": LENGTHS[0]},
    "other counts": {"x": X, "key_lengths": LENGTHS[:2]},
    "another kind": {"x": X[0], "key_lengths": LENGTHS[0] + 0.5},
    "beyond its type": {"x": X[0], "key_lengths": LENGTHS[0] * 2**40},
    "another width": {"x": X[0, :, :, :63], "key_lengths": LENGTHS[0]},
    "other batches": {"x": X[0], "key_lengths": LENGTHS[0, :1]},
    "NaN": {"x": X[0] * np.nan, "key_lengths": LENGTHS[0]},
}


@pytest.mark.parametrize("case", NOT_SAMPLES)
def test_what_is_no_sample_is_refused_by_name(case, tmp_path, spec, bundles):
    np.savez(tmp_path / "wrong.npz", **NOT_SAMPLES[case])
    precision = bundles("tiny-padding").manifest.precision
    with pytest.raises(DeployError) as caught:
        [as_taken(sample, spec, precision) for sample in read_samples(tmp_path / "wrong.npz", spec)]
    assert "wrong.npz" in str(caught.value.got)
    assert caught.value.hint


def test_one_array_is_the_only_input_where_it_has_no_other_name(tmp_path, bundles):
    spec, x = (
        bundles("tiny-mha").manifest.spec,
        X[:, :, :, : bundles("tiny-mha").manifest.spec.inputs[0].dims[-1]],
    )
    np.savez(tmp_path / "nameless.npz", x)
    np.save(tmp_path / "any.npy", x)
    for name in ("nameless.npz", "any.npy"):
        assert len(list(read_samples(tmp_path / name, spec))) == len(x)
    np.savez(tmp_path / "labels.npz", labels=x)
    with pytest.raises(DeployError, match="no input x"):
        list(read_samples(tmp_path / "labels.npz", spec))


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04 not a zip", b"\x93NUMPY\x01\x00\x46\x00{'descr': '|O'", b"\xff" * 64]
)
@pytest.mark.parametrize("ending", ["npz", "npy", "safetensors", "csv"])
def test_a_broken_file_is_refused(content, ending, tmp_path, spec):
    path = tmp_path / f"broken.{ending}"
    path.write_bytes(content)
    with pytest.raises(DeployError) as caught:
        list(read_samples(path, spec))
    assert caught.value.hint


def test_a_missing_file_is_refused_with_the_one_that_was_meant_before_any_work(tmp_path, spec):
    np.savez(tmp_path / "val.npz", x=X)
    wrong = tmp_path / "vall.npz"
    with pytest.raises(DeployError) as caught:
        read_samples(wrong, spec)
    assert str(tmp_path / "val.npz") in caught.value.hint
    with pytest.raises(DeployError) as caught:
        md.export("tiny-gqa", tmp_path / "bundle", precision="int8", data=wrong)
    assert (caught.value.got, str(tmp_path / "val.npz") in caught.value.hint) == (str(wrong), True)


def test_nothing_is_unpickled_and_missing_files_and_empty_folders_are_refused(tmp_path, spec):
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    (tmp_path / "empty").mkdir()
    for place in (tmp_path, tmp_path / "empty", tmp_path / "missing.npz", tmp_path / "missing"):
        with pytest.raises(DeployError):
            list(read_samples(place, spec))


def test_the_axis_of_a_sample_is_a_part_of_its_size_where_sizes_are_multiples():
    image = TensorSpec(name="image", kind="float", dims=("B", "4*H"))
    axes = {"B": Axis(min=1, opt=2, max=4), "H": Axis(min=1, opt=4, max=8)}
    spec = ModuleSpec(name="patches", axes=axes, inputs=(image,), outputs=(image,), attention_count=0)
    given = [{"image": np.ones((2, size), np.float32)} for size in (20, 22)]
    whole, other = samples_from(given, spec, "given")
    assert as_taken(whole, spec, PRECISIONS["fp16"]).sizes == {"B": 2, "H": 5}
    with pytest.raises(DeployError):
        as_taken(other, spec, PRECISIONS["fp16"])


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_bfloat16_comes_back_from_a_file_of_numpy(precision, tmp_path, spec):
    x = X[0].astype(ml_dtypes.bfloat16)
    np.savez(tmp_path / "x.npz", x=x, key_lengths=LENGTHS[0])
    (sample,) = read_samples(tmp_path / "x.npz", spec)
    assert sample.inputs["x"].dtype == "V2", "NumPy has no name for it"
    precision = PRECISIONS[precision]
    taken = as_taken(sample, spec, precision)
    assert np.array_equal(taken.inputs["x"], x.astype(precision.numpy))


@pytest.mark.parametrize("dtype", [[("a", "<f4")], "V3", "U4"])
def test_what_is_not_made_of_numbers_is_refused(dtype, tmp_path, spec, bundles):
    np.savez(tmp_path / "x.npz", x=np.zeros(X[0].shape, dtype), key_lengths=LENGTHS[0])
    (sample,) = read_samples(tmp_path / "x.npz", spec)
    with pytest.raises(DeployError, match="does not hold numbers"):
        as_taken(sample, spec, bundles("tiny-padding").manifest.precision)


def test_an_iterator_gives_dictionaries_arrays_or_tensors(spec, bundles):
    items = [
        {"x": torch.from_numpy(X[0]), "key_lengths": torch.from_numpy(LENGTHS[0])},
        (X[1], LENGTHS[1].tolist()),
    ]
    found = list(samples_from(items, spec, "mine"))
    assert [each.name for each in found] == ["mine[0]", "mine[1]"]
    precision = bundles("tiny-padding").manifest.precision
    assert [as_taken(each, spec, precision).sizes for each in found] == [{"B": 2, "S": 5}] * 2


class Failing(Mapping):
    """A sample whose names, number or array cannot be had."""

    def __init__(self, error):
        self.error = error

    def fail(self, *arguments, **options):
        raise self.error

    __iter__ = __getitem__ = __len__ = __array__ = __str__ = fail
    __hash__ = object.__hash__


NO_ITEMS = {
    "number": 7,
    "text": "text",
    "array of text": {"x": "text"},
    "no number": {"x": [None]},
    "ragged": {"x": [[1.0], [1.0, 2.0]]},
    "sparse": {"x": torch.zeros(2, 2).to_sparse()},
    "without numbers": {"x": torch.zeros(2, 2, device="meta")},
    "failing array": {"x": Failing(OSError(5, "none"))},
    "failing item": Failing(OSError(5, "none")),
    "failing name": {Failing(OSError(5, "none")): 1},
    "ends the program": {"x": Failing(SystemExit(0))},
}


@pytest.mark.parametrize("case", NO_ITEMS)
def test_an_item_that_is_no_sample_is_refused_whatever_it_does(case, spec):
    with pytest.raises(DeployError) as caught:
        list(open_samples([NO_ITEMS[case]], spec)[1])
    assert caught.value.hint
