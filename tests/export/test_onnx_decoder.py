"""ONNX files of decoders: their KV cache is recognized, and decoded token by token. Without PyTorch."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import mha_deploy as md
from mha_deploy.status import Kind, Outcome

CAUSAL = "seen = LessOrEqual (cols, rows)"
FORWARD = {"many": ("S", "total"), "one": ("1", "P + 1"), "one in a past of": ("1", "past_length + 1")}
PAST = {"one in a past of": "past_length"}


def decoder(path, form="many", seen=CAUSAL):
    """One head that attends to a cache and to new tokens; with `one`, a single token in each call."""
    tokens, total = FORWARD[form]
    past = PAST.get(form, "P")
    text = f"""<ir_version: 8, opset_import: ["" : 18]> g (
        int64[N,{tokens}] ids, float[N,{past},16] old_k, float[N,{past},16] old_v, float[N,T] bias
    ) => (float[N,{tokens},16] y, float[N,A,16] new_k, float[N,A,16] new_v)
    <int64 zero = {{0}}, int64 one = {{1}}, int64[1] first = {{1}}, int64 fifty = {{50}},
     float none = {{0.0}}, float far = {{-30.0}}> {{
        x = Gather (table, ids) q = MatMul (x, wq) k = MatMul (x, wk) v = MatMul (x, wv)
        new_k = Concat <axis = 1> (old_k, k) new_v = Concat <axis = 1> (old_v, v)
        kt = Transpose <perm = [0, 2, 1]> (new_k) s = MatMul (q, kt)
        before = Shape <start = 1, end = 2> (old_k) after = Shape <start = 1, end = 2> (new_k)
        p = Squeeze (before) a = Squeeze (after)
        line = Range (p, a, one) rows = Unsqueeze (line, first) cols = Range (zero, a, one)
        {seen} m = Where (seen, none, far) sm = Add (s, m)
        b = Unsqueeze (bias, first) masked = Add (sm, b)
        w = Softmax <axis = -1> (masked) y = MatMul (w, new_v)
    }}"""
    model = onnx.parser.parse_model(text.replace("float[N,T]", f'float[N,"{total}"]'))
    random = np.random.default_rng(0)
    for name, shape in {"table": (20, 16), "wq": (16, 16), "wk": (16, 16), "wv": (16, 16)}.items():
        array = (random.standard_normal(shape) / 4).astype("f")
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    "form", [pytest.param(each, marks=pytest.mark.slow if " " in each else ()) for each in FORWARD]
)
def test_the_cache_of_a_file_is_found_and_decoded(form, tmp_path):
    file = decoder(tmp_path / "decoder.onnx", form)
    axes = {PAST.get(form, "P"): "0:4:23"}
    bundle = md.import_onnx(file, tmp_path / "bundle", axes=axes, golden=["opt"], precision="fp32")
    assert dict(bundle.manifest.spec.cached) == {"old_k": "new_k", "old_v": "new_v"}
    (trace,) = bundle.manifest.traces
    report = md.validate(bundle, runtimes=["ort-cpu"], steps=9, source=file)
    assert [(each.trace, each.outcome) for each in report.record.decode] == [
        (trace.name, Outcome.PASSED),
        ("drawn", Outcome.PASSED),
    ]
    assert all(each.steps >= 9 for each in report.record.decode)
    assert report.passed, report.headline


def test_a_file_that_is_wrong_in_late_steps_alone_fails(tmp_path):
    """It sees the last fifty tokens only, which golden cases do not reach."""
    right = decoder(tmp_path / "right.onnx")
    window = "own = LessOrEqual (cols, rows) ends = Sub (rows, fifty) near = Greater (cols, ends)"
    wrong = decoder(tmp_path / "wrong.onnx", seen=f"{window} seen = And (own, near)")
    axes = {"S": "1:4:8", "P": "0:8:63"}
    bundle = md.import_onnx(right, tmp_path / "bundle", axes=axes, golden=["opt", "min"], precision="fp32")
    report = md.validate(bundle, graphs=[wrong], steps=60, prompt=4, source=right)
    assert report.outcome is Outcome.FAILED
    assert {each.outcome for each in report.record.parity} == {Outcome.PASSED}


def test_what_only_looks_like_a_cache_is_no_failure(tmp_path):
    """Without a causal mask, a call with many tokens is not what single ones give."""
    file = decoder(tmp_path / "all.onnx", seen="seen = LessOrEqual (zero, rows)")
    bundle = md.import_onnx(file, tmp_path / "bundle", golden=["opt"], precision="fp32")
    assert not bundle.manifest.traces
    assert any("no trace" in note for note in bundle.manifest.notes)


def test_a_cache_that_never_is_empty_is_not_decoded_and_the_warning_has_what_to_export(tmp_path):
    axes = {"S": "1:4:8", "P": "2:8:63"}
    file = decoder(tmp_path / "late.onnx")
    bundle = md.import_onnx(file, tmp_path / "bundle", axes=axes, golden=["opt"], precision="fp32")
    report = md.validate(bundle, latency=False, probe=False)
    (found,) = [each for each in report.findings if each.kind is Kind.NOT_DECODED]
    assert "P=0:8:63" in found.text
    assert any("P=0:8:63" in note for note in bundle.manifest.notes)
