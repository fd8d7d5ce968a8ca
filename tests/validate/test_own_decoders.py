"""A user's own decoder: its KV cache is declared, and decoding is validated token by token."""

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from decode_mistakes import Meddled

import mha_deploy as md
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.folder import open_bundle
from mha_deploy.graph.file import load_graph
from mha_deploy.graph.mutate import mutated
from mha_deploy.judge import judge_case
from mha_deploy.options import ValidateOptions
from mha_deploy.runtime import open_runner
from mha_deploy.validation.decode import evaluate_trace, traces_of
from mha_deploy.validation.fault import layer_parity
from mha_deploy.validation.run import validate_bundle

OWN = Path(__file__).parents[1] / "own_models.py"


@pytest.fixture(scope="module")
def bundle(own_bundles):
    return own_bundles("decoder")


def decoded(bundle, **meddling):
    """The verdict on decoding in ONNX Runtime, with something done to what goes in or comes out."""
    (trace,) = traces_of(bundle, ValidateOptions())
    manifest = bundle.manifest
    with open_runner("ort-cpu", bundle.model_path) as runner:
        return evaluate_trace(Meddled(runner, **meddling), trace, manifest.spec, manifest.precision)


def test_one_token_behind_the_longest_past_is_a_golden_case(bundle):
    sizes = [entry.sizes for entry in bundle.manifest.golden]
    assert any(each["S"] == 1 and each["P"] == 31 for each in sizes)


def test_decoding_is_validated_with_the_model(bundle):
    report = validate_bundle(bundle, ValidateOptions(probe=False))
    assert report.passed, report.headline
    (decode,) = [each for evaluation in report.evaluations for each in evaluation.decode_reports]
    assert decode.passed
    assert (decode.prompt, decode.steps) == ((16, 16, 16), 16)
    assert {verdict.output for verdict in decode.verdicts} == {
        "logits",
        "past_key",
        "past_value",
        "past_key_1",
        "past_value_1",
    }


@pytest.mark.slow
def test_more_steps_are_drawn_on_request(bundle):
    report = validate_bundle(bundle, ValidateOptions(steps=20, prompt=3, batch=2))
    assert report.passed, report.headline
    traces = {each.trace for evaluation in report.evaluations for each in evaluation.decode_reports}
    assert traces == {"steps", "drawn"}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32", "auto"])
def test_every_precision_decodes(own_bundles, precision):
    report = validate_bundle(own_bundles("decoder", precision))
    assert report.passed, report.headline
    assert any(evaluation.decode_reports for evaluation in report.evaluations)


def test_a_mask_of_two_axes_is_shifted_along_its_keys(bundle):
    case = next(case for case in golden_cases(bundle) if case.name == "opt")
    shifted = mutated(load_graph(bundle.model_path), "mask off by one")
    with open_runner("ort-cpu", shifted) as runner:
        verdicts = judge_case(case, runner.run(case.inputs), bundle.manifest.precision)
    assert any(verdict.is_wrong for verdict in verdicts)


@pytest.mark.parametrize("mistake", [None, "scale off by 0.5 %", "last batch element off by 0.5 %"])
def test_a_mistake_that_the_logits_hide_shows_in_its_attention(bundle, mistake):
    """What follows an attention may dilute its error until it is below the rounding of the outputs."""
    graph = load_graph(bundle.model_path)
    graph = graph if mistake is None else mutated(graph, mistake)
    report = layer_parity(bundle, partial(open_runner, "ort-cpu"), model=graph)
    assert report.passed is (mistake is None)


def test_a_cache_that_loses_an_entry_is_caught(bundle):
    def after(call, feeds, results):
        if call == 3:
            results["present_value_1"][1, :, 4] = 0
        return results

    report = decoded(bundle, after=after)
    assert report.first_failed == 4
    assert not report.passed
    assert "past_value_1" in {failure.output for failure in report.failures}


def test_caches_that_are_exchanged_are_caught(bundle):
    def before(call, feeds):
        if call:
            feeds["past_key"], feeds["past_key_1"] = feeds["past_key_1"], feeds["past_key"]
        return feeds

    assert decoded(bundle, before=before).first_failed == 1


def test_a_graph_that_shifts_positions_passes_no_step(bundle, tmp_path):
    model = onnx.load(bundle.model_path)
    table = next(each for each in model.graph.initializer if "positions" in each.name)
    shifted = np.roll(onnx.numpy_helper.to_array(table), 1, axis=0)
    table.CopyFrom(onnx.numpy_helper.from_array(shifted, table.name))
    onnx.save(model, tmp_path / "shifted.onnx")
    with open_runner("ort-cpu", tmp_path / "shifted.onnx") as runner:
        (trace,) = traces_of(bundle, ValidateOptions())
        report = evaluate_trace(runner, trace, bundle.manifest.spec, bundle.manifest.precision)
    assert report.first_failed == 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("decoder_without_offset", "one call with all tokens"),
        pytest.param("decoder_of_an_unknown_output", "present_key_1", marks=pytest.mark.slow),
        ("decoder_of_an_unknown_input", "no input"),
        ("decoder_of_half_a_cache", "past_key_1, past_value_1"),
        ("decoder_whose_cache_does_not_grow", "does not grow"),
    ],
)
def test_what_cannot_be_decoded_is_refused(name, message, tmp_path):
    with pytest.raises(md.DeployError, match=message):
        md.export(f"{OWN}:{name}", tmp_path / "bundle")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "why"),
    [("decoder_of_the_last_token", "no output has the axis S"), ("decoder_that_is_never_empty", "be empty")],
)
def test_a_decoder_without_a_trace_says_why(name, why, tmp_path):
    made = md.export(f"{OWN}:{name}", tmp_path / "bundle")
    notes = open_bundle(tmp_path / "bundle").manifest.notes
    assert any(why in note for note in notes), (made, notes)
