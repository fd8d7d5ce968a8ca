"""From a spec to a bundle: weights from a file, interruptions, large weights, and what is refused."""

import functools
import gc
import shutil
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
import torch
from graph_parity import graph_parity
from safetensors.torch import save_file

import mha_deploy as md
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.folder import MANIFEST, MODEL, open_bundle, sha256
from mha_deploy.errors import EXIT_BAD_INPUT, BundleError, DeployError, ExportError
from mha_deploy.exporter.exporter import canonical_from_module
from mha_deploy.graph import file as graph_file
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.reference import build_module, random_weights
from mha_deploy.reference.weights import pack_projections, read_weights

GQA = find_spec("tiny-gqa")
PACKED = replace(GQA, projections="packed")
SMALL = ("min",)  # golden cases, where the test is about something else


def export(spec, target, **options):
    return md.export(spec, target, **{"golden": SMALL, **options})


def everything_in(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_same_golden(a, b):
    """The same inputs to the bit; results to the last bit or two, since a BLAS may add in another order."""
    for case, other in zip(golden_cases(a), golden_cases(b), strict=True):
        assert (case.name, case.sizes) == (other.name, other.sizes)
        for name, array in case.inputs.items():
            assert array.tobytes() == other.inputs[name].tobytes()
        for name, array in case.oracle.items():
            np.testing.assert_allclose(array, other.oracle[name], rtol=0, atol=1e-13)
        for name, array in case.eager.items():
            np.testing.assert_allclose(array, other.eager[name], rtol=2**-9, atol=2**-11)


# -- what is in a bundle -----------------------------------------------------------------------


def test_the_bundle_holds_what_was_asked_for(bundles):
    bundle = open_bundle(bundles("tiny-padding").path)
    manifest = bundle.manifest
    assert manifest.spec == find_spec("tiny-padding")
    assert (manifest.precision.name, manifest.opset, manifest.weights) == ("fp16", 23, "random, seed 0")
    assert [entry.name for entry in manifest.golden] == ["min", "opt", "odd", "ragged", "large"]
    assert [node["Hq"] for node in manifest.attention] == [4]
    assert manifest.checks["dynamic axes"]["sizes"] == [{"B": 1, "S": 1}, {"B": 3, "S": 37}]
    assert {"torch", "onnx"} <= manifest.versions.keys()


def test_steps_of_a_file_are_counted_once_their_number_is_known(bundles, tmp_path):
    steps, source = [], bundles("tiny-mha", "fp32").model_path
    md.import_onnx(source, tmp_path / "b", golden=("opt",), on_step=lambda *step: steps.append(step))
    counts = [count for _, _, count in steps]
    known = counts.index(max(counts))
    assert set(counts[:known]) <= {0}
    assert [(number, count) for _, number, count in steps[known:]] == [
        (number, len(steps)) for number in range(known, len(steps))
    ]


def test_steps_are_counted_to_the_end(one_graph, tmp_path):
    steps = []
    md.export(GQA, tmp_path / "b", golden=SMALL, on_step=lambda *step: steps.append(step))
    assert [(number, count) for _, number, count in steps] == [(number, 7) for number in range(7)]
    assert [name for name, _, _ in steps][-4:] == [
        "FP64 oracle",
        "golden case min",
        "what the outputs show",
        "hashes",
    ]


def test_a_case_that_was_left_out_is_noted(bundles):
    notes = bundles("tiny-gqa").manifest.notes
    assert notes == ["no ragged case: the layer takes no lengths"]


# -- weights -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seed_three(tmp_path_factory):
    """A function that gives what seed 3 gives in each form of the projections."""
    folder = tmp_path_factory.mktemp("seed-3")
    return functools.cache(lambda form: export(replace(GQA, projections=form), folder / form, seed=3))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("spec", "form"),
    [
        (GQA, "packed"),
        pytest.param(PACKED, "separate", marks=pytest.mark.slow),
        pytest.param(GQA, "separate", marks=pytest.mark.slow),
        pytest.param(PACKED, "packed", marks=pytest.mark.slow),
    ],
    ids=lambda given: given if isinstance(given, str) else f"into-{given.projections}",
)
def test_a_weight_file_of_either_form_gives_the_bundle_of_its_seed(
    seed_three, tmp_path, spec, form, monkeypatch
):
    # Traced anew, where the session keeps graphs by their weights: two traces give the same bytes.
    monkeypatch.setattr("mha_deploy.exporter.exporter.canonical_from_module", canonical_from_module)
    state = dict(random_weights(GQA, 3))
    file = tmp_path / "layer.safetensors"
    save_file(pack_projections(state) if form == "packed" else state, file)
    bundle = export(spec, tmp_path / "bundle", seed=3, weights=file)
    wanted = seed_three(spec.projections)
    assert bundle.model_path.read_bytes() == wanted.model_path.read_bytes()
    assert_same_golden(bundle, wanted)
    assert bundle.manifest.weights == f"layer.safetensors, sha256 {sha256(file)}"


def test_another_seed_gives_other_weights_and_other_inputs(seed_three, bundles):
    other = bundles("tiny-gqa")
    seed_three = seed_three("separate")
    assert seed_three.model_path.read_bytes() != other.model_path.read_bytes()
    a, b = (next(golden_cases(bundle)).inputs["x"] for bundle in (seed_three, other))
    assert a.shape == b.shape
    assert not np.array_equal(a, b)


def refused_file(tmp_path, file, spec=GQA):
    """The message with which an export from a weight file is refused, leaving nothing behind."""
    before = everything_in(tmp_path)
    with pytest.raises(DeployError) as caught:
        export(spec, tmp_path / "bundle", weights=file)
    assert everything_in(tmp_path) == before
    assert caught.value.exit_code == EXIT_BAD_INPUT
    return str(caught.value)


def test_a_weight_file_that_is_not_there_is_refused(tmp_path):
    assert "There is no such weight file." in refused_file(tmp_path, tmp_path / "absent.safetensors")


@pytest.mark.parametrize("content", [b"", b"no tensors here", b"\xff" * 64], ids=["empty", "text", "noise"])
def test_a_file_of_another_format_is_refused(tmp_path, content):
    file = tmp_path / "layer.safetensors"
    file.write_bytes(content)
    assert "The weights are not a safetensors file." in refused_file(tmp_path, file)


def test_a_truncated_weight_file_is_refused(tmp_path):
    file = tmp_path / "layer.safetensors"
    save_file(dict(random_weights(GQA, 0)), file)
    file.write_bytes(file.read_bytes()[:-100])
    assert "The weights are not a safetensors file." in refused_file(tmp_path, file)


def test_a_folder_without_weights_is_refused(tmp_path):
    assert "The folder has no safetensors file" in refused_file(tmp_path, tmp_path)


def test_equal_weights_keep_their_names():
    """PyTorch's exporter stores what is equal once; the layer of a bundle is read by name."""
    spec = find_spec("tiny-mha")
    weights = {name: torch.full_like(value, 0.125) for name, value in random_weights(spec, 0).items()}
    graph = canonical_from_module(build_module(spec, weights=weights)).graph
    assert {name.removesuffix(".T") for name in graph.initializers} >= set(weights)


def test_weights_that_are_whole_numbers_are_refused(tmp_path):
    file = tmp_path / "layer.safetensors"
    save_file({**random_weights(GQA, 0), "o.bias": torch.zeros(64, dtype=torch.int8)}, file)
    message = refused_file(tmp_path, file)
    assert "A weight is not floating point" in message
    assert "o.bias: torch.int8" in message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"o.bias": None}, "missing: o.bias"),
        ({"norm.weight": torch.ones(64)}, "not used: norm.weight"),
        ({"v.weight": torch.ones(64, 64)}, "The weight v.weight has the wrong shape"),
    ],
    ids=["missing", "extra", "shape"],
)
def test_weights_of_another_layer_are_refused_by_name(tmp_path, change, named):
    state = {name: t for name, t in {**random_weights(GQA, 0), **change}.items() if t is not None}
    save_file(state, tmp_path / "layer.safetensors")
    assert named in refused_file(tmp_path, tmp_path / "layer.safetensors")


def test_weights_that_overflow_the_precision_are_refused_with_another_one(one_graph, tmp_path):
    state = dict(random_weights(GQA, 0))
    state["o.weight"] = state["o.weight"] * 1e6
    save_file(state, tmp_path / "layer.safetensors")
    message = refused_file(tmp_path, tmp_path / "layer.safetensors")
    assert "infinite numbers in fp16" in message
    assert "o.weight" in message
    assert 'precision="bf16" or fp32' in message


def test_weights_with_nan_are_refused_by_name(one_graph, tmp_path):
    state = dict(random_weights(GQA, 0))
    state["k.weight"][2, 1] = float("nan")
    save_file(state, tmp_path / "layer.safetensors")
    message = refused_file(tmp_path, tmp_path / "layer.safetensors")
    assert "NaN" in message
    assert "k.weight" in message
    assert "bf16" not in message


def test_reading_weights_keeps_names_values_and_types(tmp_path):
    state = {"a": torch.randn(3, 4).bfloat16(), "b": torch.randn(2).half()}
    save_file(state, tmp_path / "w.safetensors")
    got = read_weights(tmp_path / "w.safetensors")[0]
    assert {name: (t.dtype, t.tolist()) for name, t in got.items()} == {
        name: (t.dtype, t.tolist()) for name, t in state.items()
    }


# -- interruptions -----------------------------------------------------------------------------


class Interrupt:
    """Raises at one step of an export."""

    def __init__(self, number, error):
        self.number, self.error, self.was_called = number, error, False

    def __call__(self, name, number, count):
        if number == self.number:
            self.was_called = True
            raise self.error


def interrupted(target, number, error, **options):
    interrupt = Interrupt(number, error)
    with pytest.raises(type(error)):
        md.export(GQA, target, golden=SMALL, on_step=interrupt, **options)
    assert interrupt.was_called


@pytest.fixture
def one_graph(monkeypatch, bundles):
    """Take the graph from a bundle: PyTorch's exporter is not what is interrupted."""
    bundles("tiny-mha")  # exported before the exporter is replaced
    model = ir.load(bundles("tiny-gqa").model_path)
    monkeypatch.setattr(
        "mha_deploy.exporter.exporter.canonical_from_module", lambda *given, **how: model.clone()
    )


@pytest.mark.parametrize(
    ("step", "error"),
    [(0, KeyboardInterrupt()), (3, KeyboardInterrupt()), (5, RuntimeError("no more memory"))],
    ids=str,
)
def test_an_export_interrupted_at_any_step_leaves_nothing(one_graph, tmp_path, step, error):
    interrupted(tmp_path / "bundle", step, error)
    assert everything_in(tmp_path) == []


def test_an_interrupted_replacement_keeps_the_old_bundle(one_graph, bundles, tmp_path):
    target = tmp_path / "bundle"
    shutil.copytree(bundles("tiny-mha").path, target)
    interrupted(target, 5, KeyboardInterrupt(), overwrite=True)
    assert everything_in(tmp_path) == ["bundle"]
    assert open_bundle(target).manifest.spec.name == "tiny-mha"


# -- the place of a bundle ---------------------------------------------------------------------


def test_a_folder_that_is_there_is_refused_and_kept(bundles, tmp_path):
    target = tmp_path / "bundle"
    shutil.copytree(bundles("tiny-mha").path, target)
    with pytest.raises(BundleError, match="The output folder exists") as caught:
        export(GQA, target)
    assert "overwrite=True" in caught.value.hint
    assert open_bundle(target).manifest.spec.name == "tiny-mha"


@pytest.mark.slow
def test_overwriting_replaces_a_bundle_whole(bundles, tmp_path):
    target = tmp_path / "bundle"
    shutil.copytree(bundles("tiny-mha").path, target)
    export(GQA, target, overwrite=True)
    bundle = open_bundle(target)
    assert bundle.manifest.spec.name == "tiny-gqa"
    assert everything_in(tmp_path) == ["bundle"]
    assert everything_in(target / "golden") == ["min.safetensors"]


def test_overwriting_never_replaces_what_is_no_bundle(tmp_path):
    target = tmp_path / "thesis"
    target.mkdir()
    (target / "chapter-1.txt").write_text("the only copy")
    with pytest.raises(BundleError, match="only a bundle is overwritten"):
        export(GQA, target, overwrite=True)
    assert (target / "chapter-1.txt").read_text() == "the only copy"
    assert everything_in(tmp_path) == ["thesis"]


# -- large weights -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def external(bundles, tmp_path_factory):
    """A bundle whose weights are beside its graph."""
    model = ir.load(bundles("tiny-gqa").model_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_file, "EXTERNAL_DATA_FROM", 1000)
        patch.setattr("mha_deploy.exporter.exporter.canonical_from_module", lambda *given, **how: model)
        return export(GQA, tmp_path_factory.mktemp("external") / "bundle", golden=("min", "odd"))


def test_weights_above_the_threshold_lie_beside_the_graph(external, bundles):
    data = external.path / f"{MODEL}.data"
    weights = 2 * sum(weight.numel() for weight in random_weights(GQA, 0).values())
    assert data.stat().st_size >= weights * 0.9
    assert external.model_path.stat().st_size < bundles("tiny-gqa").model_path.stat().st_size - weights * 0.9
    assert not (bundles("tiny-gqa").path / f"{MODEL}.data").exists()


def test_external_weights_are_hashed_and_a_change_is_found(external, tmp_path):
    assert external.manifest.files[f"{MODEL}.data"].sha256 == sha256(external.path / f"{MODEL}.data")
    copy = tmp_path / "copy"
    shutil.copytree(external.path, copy)
    open_bundle(copy)
    content = bytearray((copy / f"{MODEL}.data").read_bytes())
    content[7] ^= 1
    (copy / f"{MODEL}.data").write_bytes(content)
    with pytest.raises(BundleError, match="was changed after export"):
        open_bundle(copy)


@pytest.mark.parametrize("runtime", ["ort-cpu", "onnx-reference"])
def test_a_bundle_with_external_weights_validates_wherever_it_is_moved(external, tmp_path, runtime):
    moved = tmp_path / "elsewhere"
    shutil.copytree(external.path, moved)
    report = graph_parity(open_bundle(moved), runtime)
    assert report.passed, report
    assert len(report.verdicts) == 2


# -- other refusals ----------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_is_refused_where_there_is_none(tmp_path):
    with pytest.raises(ExportError, match="There is no CUDA device") as caught:
        export(GQA, tmp_path / "bundle", device="cuda")
    assert caught.value.hint == 'device="cpu"'
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize(
    "options",
    [{"precision": "fp7"}, {"opset": 22}, {"golden": ("larg",)}, {"golden": ("B=9,S=1",)}, {"device": "gpu"}],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_options_that_mean_nothing_are_refused_and_leave_nothing(tmp_path, options):
    with pytest.raises(DeployError):
        export(GQA, tmp_path / "bundle", **options)
    assert everything_in(tmp_path) == []


def test_all_objects_are_searched_for_garbage_where_the_weights_are_large(one_graph, tmp_path, monkeypatch):
    searched = []
    monkeypatch.setattr(gc, "collect", lambda *_: searched.append(1))
    export(GQA, tmp_path / "small")
    assert not searched
    monkeypatch.setattr("mha_deploy.exporter.flow._LARGE_BYTES", 1 << 10)
    export(GQA, tmp_path / "large")
    assert searched


@pytest.mark.slow
def test_a_bundle_of_one_fixed_shape_can_be_made(tmp_path):
    spec = AttentionSpec.from_dict({"name": "fixed", "Hq": 2, "E": 32, "axes": {"B": 1, "S": 4}})
    bundle = md.export(spec, tmp_path / "b")
    assert [entry.name for entry in bundle.manifest.golden] == ["min"]
    assert graph_parity(bundle).passed


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_golden_cases_can_be_computed_on_cuda(bundles, tmp_path, precision):
    on_cpu = bundles("tiny-gqa", precision)
    on_gpu = md.export(GQA, tmp_path / "b", precision=precision, device="cuda")
    assert (on_gpu.path / MANIFEST).is_file()
    assert on_gpu.model_path.read_bytes() == on_cpu.model_path.read_bytes()
    assert graph_parity(on_gpu).passed
    for a, b in zip(golden_cases(on_gpu), golden_cases(on_cpu), strict=True):
        assert a.inputs["x"].tobytes() == b.inputs["x"].tobytes()
        np.testing.assert_allclose(a.oracle["output"], b.oracle["output"], rtol=0, atol=1e-12)
