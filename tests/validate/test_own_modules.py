"""A user's own module, from its factory to the verdict: the whole of it, and every attention by itself."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import own_models
import pytest
import torch
from bundle_edit import edit_manifest, rehash
from torch import nn

import mha_deploy as md
from mha_deploy.bundle.cases import golden_cases, read_arrays, write_arrays
from mha_deploy.bundle.folder import open_bundle
from mha_deploy.bundle.manifest import Perturbation
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.errors import DeployError
from mha_deploy.exporter.observe import observe
from mha_deploy.graph.file import load_graph
from mha_deploy.options import EngineOptions, ValidateOptions
from mha_deploy.runtime.child import isolation
from mha_deploy.status import Outcome
from mha_deploy.validation.fault import layers_case, reference_for
from mha_deploy.validation.run import validate_bundle

OWN = Path(__file__).parents[1] / "own_models.py"
ATTENTIONS = [f"blocks.{i}.attention" for i in range(3)]


@pytest.fixture
def copied(own_bundles, tmp_path):
    """A bundle of its own for a test that changes it."""
    return open_bundle(Path(shutil.copytree(own_bundles().path, tmp_path / "copy")))


def test_the_bundle_knows_the_module(own_bundles):
    manifest = own_bundles().manifest
    spec = manifest.spec
    assert [(t.name, t.kind, t.dims) for t in spec.inputs] == [
        ("tokens", "int64", ("B", "S")),
        ("mask", "int64", ("B", "S")),
    ]
    assert [(t.name, t.kind, t.dims) for t in spec.outputs] == [
        ("hidden", "float", ("B", "S", 64)),
        ("pooled", "float", ("B", 64)),
    ]
    assert [node["name"] for node in manifest.attention] == ATTENTIONS
    assert all(str(OWN) in node["place"] for node in manifest.attention)
    sizes = {case.name: dict(case.sizes) for case in manifest.golden}
    drawn = [sizes.pop(name) for name in ("random-1", "random-2")]
    assert all(1 < each["B"] < 8 and 1 < each["S"] < 64 for each in drawn)
    assert sizes == {
        "opt": {"B": 4, "S": 32},
        "min": {"B": 1, "S": 1},
        "odd": {"B": 3, "S": 37},
        "large": {"B": 8, "S": 64},
        "probe": {"B": 4, "S": 32},
        "masks": {"B": 4, "S": 24},
        "mask-of-one": {"B": 1, "S": 24},
    }
    # 4 rows of 32 tokens: projections of 4·64², two matmuls of attention, and one MLP of 4·64² more
    assert spec.flops == 2 * 4 * 32 * (3 * 4 + 4) * 64**2 + 3 * 4 * 4 * 32 * 32 * 64
    assert open_bundle(own_bundles().path).manifest.spec == spec


def test_gemms_are_named_after_their_modules(own_bundles):
    bundle = own_bundles()
    graph = load_graph(bundle.model_path).graph
    gemms = [node.name for node in graph if node.op_type in ("MatMul", "Gemm")]
    linear = [
        name for name, each in own_models.encoder().module.named_modules() if isinstance(each, nn.Linear)
    ]
    assert sorted(gemms) == sorted(f"{name}.matmul" for name in linear)


def test_the_masks_of_a_module_hide_tails_and_heads(own_bundles):
    cases = {case.name: case.inputs["mask"] for case in golden_cases(own_bundles())}
    ends = [(row[0], row[-1]) for row in cases["masks"]]  # a module that has no result for a full mask
    assert ends == [(1, 0), (0, 1)] * 2
    assert [(row[0], row[-1]) for row in cases["mask-of-one"]] == [(0, 1)]


def test_what_the_smallest_case_hides_of_an_attention_another_may_show(own_bundles):
    bundle, cases = own_bundles(), {case.name: case for case in golden_cases(own_bundles())}
    graph, precision = load_graph(bundle.model_path), bundle.manifest.precision
    without_padding = replace(cases["min"], sizes={})  # the first that is tried
    found = [observe(graph, [without_padding, *more], precision) for more in ([], [cases["masks"]])]
    for alone, both in zip(*found, strict=True):
        assert Perturbation.MASK in alone.hidden
        assert Perturbation.MASK in both.shown
        assert set(both.shown) > set(alone.shown)
        in_bf16 = {Perturbation.BF16, Perturbation.BF16_IN_HALF}
        assert {*both.shown, *both.hidden} == set(Perturbation) - in_bf16


class Hiding(torch.nn.Module):
    """Attention over the keys that a mask keeps; a query without any has no result, but for `zeros`."""

    def __init__(self, zeros: bool) -> None:
        super().__init__()
        self.inner, self.zeros = torch.nn.Linear(16, 48), zeros

    def forward(self, x, mask):
        q, k, v = self.inner(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~mask[:, None, None], -torch.inf)
        weights = scores.softmax(-1)
        return (weights.nan_to_num(0.0) if self.zeros else weights) @ v


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("zeros", [True, False])
def test_a_full_mask_is_left_out_where_the_module_gives_nan(tmp_path, zeros):
    torch.manual_seed(0)
    inputs = {
        "x": md.Example(torch.randn(2, 6, 16), "B", "S"),
        "mask": md.Example(torch.ones(2, 6, dtype=torch.bool), "B", "S"),
    }
    model = md.Deployable(module=Hiding(zeros), inputs=inputs, axes={"B": "1:2:4", "S": "1:6:24"})
    bundle = md.export(model, tmp_path / "bundle", precision="fp16", golden=["opt", "masks"])
    masks = next(case.inputs["mask"] for case in golden_cases(bundle) if case.name == "masks")
    assert (not masks.any(1).all()) == zeros
    assert any("masks" in note for note in bundle.manifest.notes) != zeros
    assert md.validate(bundle).passed


def judged(report):
    """The first evaluation of the graph; baselines, where there is a GPU, are only timed."""
    return next(each for each in report.evaluations if each.parity)


@pytest.mark.parametrize(
    ("name", "precision", "count"),
    [
        ("encoder", "fp16", 3),
        pytest.param("one_layer", "bf16", 1, marks=pytest.mark.slow),
        pytest.param("one_layer", "fp32", 1, marks=pytest.mark.slow),
    ],
)
def test_the_graph_and_every_attention_are_right(own_bundles, name, precision, count):
    bundle = own_bundles(name, precision)
    report = validate_bundle(bundle, ValidateOptions(probe=False))
    assert report.passed, report.headline
    outputs = len(bundle.manifest.golden) * len(bundle.manifest.spec.outputs)
    assert f"{outputs}/{outputs} outputs within budget, {count}/{count} attention" in report.headline
    layers = judged(report).parity[-1]
    assert [verdict.output for verdict in layers.verdicts] == ATTENTIONS[:count]


@pytest.mark.slow
def test_fresh_and_swept_cases(own_bundles):
    bundle = own_bundles("one_layer", "fp32")
    report = validate_bundle(bundle, ValidateOptions(sweep=True, fresh=2))
    assert report.passed, report.headline
    assert "probe" in {each.name for each in bundle.manifest.golden}
    assert {each.cases for each in judged(report).parity} == {"golden", "sweep", "fresh", "layers"}


def test_code_that_may_run_draws_fresh_cases_and_a_file_that_is_elsewhere_is_named(
    own_bundles, tmp_path, run_cli, refused, monkeypatch
):
    small = own_bundles("talking", golden=("opt", "probe"))
    copied = open_bundle(Path(shutil.copytree(small.path, tmp_path / "copy")))
    monkeypatch.setattr(isolation, "trust_code", False)
    monkeypatch.setattr(isolation, "own", set())
    drawn, quick = [], ("--runtime", "ort-cpu", "--no-report", "--json")
    for trust in ((), ("--trust-code",)):
        done = run_cli("validate", copied.path, *quick, *trust)
        drawn.append({each["cases"] for each in json.loads(done.out)["parity"]} - {"golden", "layers"})
    assert drawn == [set(), {"fresh"}]
    edit_manifest(copied.path, lambda data: data["spec"].update(factory="gone/own_models.py:talking"))
    refused("validate", copied.path, "--fresh", "1", what="is not here", got="gone/own_models.py")


def test_the_oracle_is_that_of_the_module(own_bundles):
    import torch

    from mha_deploy.exporter.own_model import load_factory

    module = load_factory(f"{OWN}:encoder").module.half().double()
    for case in golden_cases(own_bundles()):
        with torch.no_grad():
            want = module(**{name: torch.from_numpy(array) for name, array in case.inputs.items()})
        for name, oracle in case.oracle.items():
            np.testing.assert_allclose(oracle, want[name].numpy(), rtol=0, atol=1e-12)


def changed(bundle, change):
    model = onnx.load(bundle.model_path)
    change(model.graph)
    onnx.save(model, bundle.model_path)
    rehash(bundle.path)
    return open_bundle(bundle.path)


def attention(graph, name):
    return next(node for node in graph.node if node.name == name)


def test_the_first_wrong_attention_is_named(copied):
    def scale_off(graph):
        for attribute in attention(graph, ATTENTIONS[1]).attribute:
            if attribute.name == "scale":
                attribute.f *= 1.5

    report = validate_bundle(changed(copied, scale_off), ValidateOptions(probe=False))
    assert not report.passed
    layers = judged(report).parity[-1]
    assert layers.cases == "layers"
    assert [verdict.passed for verdict in layers.verdicts] == [True, False, False]


@pytest.mark.slow
def test_an_attention_that_nobody_could_write_as_one_node(own_bundles):
    bundle = own_bundles("unfusable")
    assert [node["name"] for node in bundle.manifest.attention] == ATTENTIONS[:1]
    (note,) = [note for note in bundle.manifest.notes if "not fused" in note]
    assert note.startswith(ATTENTIONS[1])
    assert str(OWN) in note
    report = validate_bundle(bundle)
    assert report.passed
    assert any("1 of 2 attentions are one node" in finding.text for finding in report.findings)
    assert not validate_bundle(bundle, ValidateOptions(require_fused=True)).passed


@pytest.mark.slow
def test_a_factory_that_gives_other_weights_is_no_oracle(own_bundles):
    with pytest.raises(DeployError, match="no longer"):
        validate_bundle(own_bundles("forgetful"), ValidateOptions(fresh=1))


@pytest.mark.slow
def test_a_factory_whose_code_was_changed_is_no_oracle(own_bundles, monkeypatch):
    """The graph is what was exported, and right; the shortest case does not show what was changed."""
    bundle = own_bundles("rewritten", golden=("opt", "min"))
    case = next(case for case in golden_cases(bundle) if case.name == "opt")
    options = ValidateOptions(runtimes=("ort-cpu",))
    assert {each.cases for each in validate_bundle(bundle, options).record.parity} >= {"golden", "fresh"}
    assert reference_for(bundle, case, "tensorrt").module_unused is None
    monkeypatch.setenv("OWN_MODELS_WINDOW", "5")
    report = validate_bundle(bundle, options).record
    assert "fresh" not in {each.cases for each in report.parity}
    assert report.fault is None
    assert report.verdict.outcome is not Outcome.FAILED
    assert any("no longer computes" in each.reason for each in report.absent)
    with pytest.raises(DeployError, match="no longer computes"):
        validate_bundle(bundle, replace(options, fresh=1))
    assert "no longer computes" in reference_for(bundle, case, "tensorrt").module_unused.got


def test_the_look_inside_must_be_whole(copied):
    entry = copied.manifest.layers
    path = copied.path / entry.file
    arrays = read_arrays(path)
    arrays.pop(f"oracle/{entry.values[ATTENTIONS[0]]}")
    write_arrays(path, arrays)
    rehash(copied.path)
    with pytest.raises(DeployError, match="does not hold the arrays"):
        layers_case(open_bundle(copied.path))


@pytest.mark.slow
def test_an_engine_with_every_attention_fused(copied):
    pytest.importorskip("tensorrt_rtx")
    engine = engine_from_bundle(copied, EngineOptions(backend="tensorrt-rtx", targets="89"))
    assert engine.manifest.fused_count == (3, 3)
    assert engine.manifest.profiles == [{"B": "1:4:8", "S": "1:32:64"}]
    report = validate_bundle(open_bundle(copied.path), ValidateOptions(require_fused=True))
    assert report.record.verdict.outcome is not Outcome.FAILED, (
        report.headline
    )  # there may be no GPU to run it
    assert "3/3 fused" in report.headline


# -- mixed precision -----------------------------------------------------------------------------


@pytest.mark.slow
def test_mixed_precision_keeps_wide_what_overflows_and_nothing_else(own_bundles):
    bundle = own_bundles("overflowing", "auto")
    plan = bundle.manifest.checks["mixed precision"]
    assert [node["op_type"] for node in plan["kept"]] == ["MatMul", "Add", "Gelu", "MatMul"]
    assert all("65,504" in node["reason"] for node in plan["kept"])
    assert bundle.manifest.spec.mixed
    assert bundle.manifest.precision.name == "fp16"
    assert [node["name"] for node in bundle.manifest.attention] == ATTENTIONS[:2]
    assert {node["dtype"] for node in bundle.manifest.attention} == {"fp16"}
    report = validate_bundle(bundle)
    assert report.passed, report.headline
    assert "2/2 attentions right" in report.headline
    for case in golden_cases(bundle):
        for name, oracle in case.oracle.items():
            off = np.linalg.norm(case.eager[name].astype(np.float64) - oracle) / np.linalg.norm(oracle)
            assert off < 2e-3


@pytest.mark.slow
def test_a_mixed_module_is_judged_on_fresh_inputs(own_bundles):
    report = validate_bundle(own_bundles("overflowing", "auto"), ValidateOptions(fresh=2))
    assert report.passed, report.headline
    assert any(parity.cases == "fresh" for each in report.evaluations for parity in each.parity)


@pytest.mark.slow
def test_an_engine_keeps_wide_what_the_graph_keeps_wide(own_bundles, tmp_path):
    pytest.importorskip("tensorrt_rtx")
    bundle = open_bundle(Path(shutil.copytree(own_bundles("overflowing", "auto").path, tmp_path / "copy")))
    engine = engine_from_bundle(bundle, EngineOptions(backend="tensorrt-rtx", targets="89"))
    assert engine.manifest.fused_count == (2, 2)
    assert engine.manifest.has_requested_types, engine.manifest.precision_summary
    assert validate_bundle(bundle, ValidateOptions(require_precision=True)).outcome is Outcome.NOT_VERIFIED


# -- the command line --------------------------------------------------------------------------


@pytest.mark.slow
def test_deploy_of_an_own_model(run_cli, tmp_path):
    pytest.importorskip("tensorrt_rtx")
    out = tmp_path / "bundle"
    result = run_cli("deploy", f"{OWN}:one_layer", "-o", str(out), "--axis", "S=1:16:40", "--sm", "89")
    assert result.code == 0, result.err
    assert "1/1 attention, one ONNX Attention node" in result.out
    assert "1/1 attention right" in " ".join(result.out.split())
    assert json.loads((out / "manifest.json").read_text())["spec"]["axes"]["S"]["max"] == 40
    assert (out / "report.html").is_file()


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (("--cache", "preallocated"), "cache"),
        (("--projections", "packed"), "projections"),
        (("--device", "cuda"), "on the CPU"),
    ],
)
def test_options_of_our_own_layers_are_refused(run_cli, tmp_path, option, says):
    result = run_cli("export", f"{OWN}:encoder", "-o", str(tmp_path / "bundle"), *option)
    assert result.code == 2
    assert says in result.err
    assert not (tmp_path / "bundle").exists()


def test_nothing_is_left_of_a_factory_that_fails(run_cli, tmp_path):
    result = run_cli("export", f"{OWN}:fails", "-o", str(tmp_path / "bundle"))
    assert result.code == 2
    assert "no model today" in result.err
    assert list(tmp_path.iterdir()) == []
