"""How near FP16's limit: every figure against plain NumPy in float64, and every finding made to happen."""

import ml_dtypes
import msgspec
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from bundle_edit import copy_of, edit_arrays, edit_manifest, rehash
from onnx import TensorProto, helper, numpy_helper

import mha_deploy as md
from mha_deploy.bundle import cases as golden
from mha_deploy.bundle.folder import MODEL, open_bundle
from mha_deploy.errors import DeployError
from mha_deploy.graph import mixed_precision
from mha_deploy.graph.file import load_graph, save_graph
from mha_deploy.validation.fp16_range import FP16_MAX, Meter, NodeRange, RangeKind, fp16_range

pytestmark = pytest.mark.usefixtures("in_process")  # quicker than a child process

# -- plain NumPy -------------------------------------------------------------------------------


def plain_figures(q, k, v, scale, visible, bias, softcap=0.0):
    """Everything at once, as a textbook would."""
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    matmul = np.einsum("bhsd,bhtd->bhst", q, k)
    score = matmul * scale
    score = softcap * np.tanh(score / softcap) if softcap else score
    logit = np.where(visible, score + bias, -np.inf)
    top = logit.max(-1, keepdims=True)
    sums = np.exp(logit - np.where(np.isneginf(top), 0, top)).sum(-1)
    return {
        "Q": np.abs(q).max(),
        "K": np.abs(k).max(),
        "V": np.abs(v).max(),
        "matmuls": matmul,
        "all_scores": (score.min(), score.max()),
        "scores": np.where(visible, score, 0.0),
        "logits": np.where(visible, score + bias, 0.0),
        "exponent": logit.max(),
        "sum": sums.max(),
        "fully_masked": int((~visible.any(-1)).sum()),
    }


# -- figures -----------------------------------------------------------------------------------


def test_the_headroom_is_the_limit_over_the_largest_number(bundles):
    (node,) = fp16_range(bundles("tiny-gqa")).nodes
    figures = node.figures
    peaks = [abs(peak.value) for peak in (figures.matmul, figures.score, figures.logit)]
    largest = max(*figures.tensors.values(), *peaks, *(each.largest for each in figures.sums))
    assert node.headroom == pytest.approx(FP16_MAX / largest)
    assert node.status == "ok"


def test_a_validation_reads_every_golden_case_once(bundles, monkeypatch):
    bundle, read = bundles("tiny-gqa"), []
    own = golden.read_arrays
    monkeypatch.setattr(golden, "read_arrays", lambda path, *of: (read.append(path.stem), own(path, *of))[1])
    report = md.validate(bundle, probe=False, fresh=0, latency=False, runtimes=["ort-cpu"])
    assert report.record.range == fp16_range(bundle)
    assert sorted(read) == sorted(2 * [entry.name for entry in bundle.manifest.golden])  # once, and here


@pytest.mark.sweep(2)
@pytest.mark.parametrize("block", [7, 1000])
@pytest.mark.parametrize(
    "name",
    ["tiny-causal-padding", "tiny-additive-causal", "tiny-head-mix", "tiny-preallocated", "tiny-window"],
)
def test_blocks_change_nothing(bundles, monkeypatch, name, block):
    bundle, cases = bundles(name), ["odd"]
    whole = fp16_range(bundle, cases=cases)
    monkeypatch.setattr(mixed_precision, "_BLOCK", block)
    for node, cut in zip(whole.nodes, fp16_range(bundle, cases=cases).nodes, strict=True):
        near = [pytest.approx(each.largest, rel=1e-5) for each in node.figures.sums]
        assert [each.largest for each in cut.figures.sums] == near
        for key in ("matmul", "score", "logit"):
            one, other = getattr(node.figures, key), getattr(cut.figures, key)
            assert other.value == pytest.approx(one.value, rel=1e-5)
            place = (one.case, one.row, one.head, one.query, one.key)
            assert (other.case, other.row, other.head, other.query, other.key) == place
        assert (cut.figures.fully_masked, cut.status) == (node.figures.fully_masked, node.status)


@pytest.mark.slow
def test_hidden_pairs_count_for_the_matmul_and_not_for_the_score(bundles, tmp_path):
    bundle = bundles("tiny-causal-padding")
    folder, case = copy_of(bundle, tmp_path / "b"), "opt"

    def enlarge_last(arrays):
        arrays["inputs/x"][:, -1] *= 100.0  # a key that only the last query sees
        arrays["inputs/key_lengths"][:] = arrays["inputs/x"].shape[1] - 1  # and now not even that one

    edit_arrays(folder, enlarge_last, case=case)
    before = fp16_range(bundle, cases=[case]).nodes[0].figures
    after = fp16_range(open_bundle(folder), cases=[case]).nodes[0].figures
    last = bundle.manifest.golden[1].sizes["S"] - 1
    assert after.matmul.key == after.matmul.query == last
    assert abs(after.matmul.value) > 1000 * abs(before.matmul.value)
    # The last query still sees the keys before it, a hundred times larger than before.
    assert after.score.key < last
    assert after.score.query == last


@pytest.mark.sweep(1)
@pytest.mark.parametrize("rubbish", [6e4, np.nan, np.inf])
def test_what_stands_behind_the_valid_rows_is_not_measured(bundles, tmp_path, rubbish):
    bundle = bundles("tiny-preallocated")
    folder = copy_of(bundle, tmp_path / "b")

    def spoil(arrays):
        ends = arrays["inputs/lengths"] + arrays["inputs/x"].shape[1]
        for name, row in ((n, b) for n in ("key", "value") for b in range(len(ends))):
            arrays[f"inputs/{name}_cache"][row, :, ends[row] :] = rubbish

    for entry in bundle.manifest.golden:
        edit_arrays(folder, spoil, case=entry.name)
    assert fp16_range(open_bundle(folder)).nodes == fp16_range(bundle).nodes


def test_the_most_keys_of_a_cache_are_its_past_and_the_new_ones(bundles):
    most = {
        name: fp16_range(bundles(name), cases=["min"]).nodes[0].max_keys
        for name in ("tiny-gqa", "tiny-dynamic", "tiny-preallocated", "tiny-window")
    }
    assert most == {"tiny-gqa": 64, "tiny-dynamic": 127, "tiny-preallocated": 64, "tiny-window": 12}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_the_report_is_plain_json(own_bundles, precision):
    bundle = own_bundles("encoder", precision)
    report = fp16_range(bundle)
    data = msgspec.to_builtins(report)
    assert data["worst"] == "ok"
    first, *others = data["nodes"]
    assert [each["node"] for each in (first, *others)] == [f"blocks.{i}.attention" for i in range(3)]
    assert first["largest_score_raw"] == abs(report.nodes[0].figures.matmul.value)
    assert first["largest_score"] == abs(report.nodes[0].figures.score.value)
    assert first["largest_softmax_sum"] == max(each.largest for each in report.nodes[0].figures.sums)
    assert first["figures"]["matmul"]["case"] in [entry.name for entry in bundle.manifest.golden]


# -- one attention, as ONNX allows it ----------------------------------------------------------


def measured(feeds, *, dtype=TensorProto.FLOAT, inputs=None, **attributes):
    """The figures of a graph that is one Attention node; `feeds` in the order of its inputs unless given."""
    kinds = {np.dtype(bool): TensorProto.BOOL, np.dtype(np.int64): TensorProto.INT64}
    values = [
        helper.make_tensor_value_info(name, kinds.get(a.dtype, dtype), a.shape) for name, a in feeds.items()
    ]
    node = helper.make_node("Attention", inputs or list(feeds), ["y"], name="att", **attributes)
    y = helper.make_tensor_value_info("y", dtype, None)
    proto = helper.make_model(
        helper.make_graph([node], "one", values, [y]), opset_imports=[helper.make_opsetid("", 24)]
    )
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    meter = Meter(model.graph[0])
    meter.see("only", lambda value: feeds[value.name])
    return meter.figures


def draw(*shape, seed=0, size=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * size).astype(np.float32)


def qkv(Hq=4, Hkv=2, size=1.0, length=7):
    return {
        "q": draw(2, Hq, 5, 8, size=size),
        "k": draw(2, Hkv, length, 8, seed=1, size=size),
        "v": draw(2, Hkv, length, 8, seed=2),
    }


@pytest.mark.parametrize("attributes", [{}, {"scale": 2.0}, {"softcap": 1.5}, {"is_causal": 1}])
@pytest.mark.parametrize("mask", [None, "bool", "float", "rows"])
def test_heads_of_their_own_axis_softcap_and_masks(attributes, mask):
    feeds = qkv()
    visible, bias = np.ones((2, 4, 5, 7), bool), np.zeros((2, 4, 5, 7))
    if mask == "bool":
        feeds["mask"] = draw(2, 1, 5, 7, seed=3) > 0
        visible &= feeds["mask"]
    elif mask == "float":
        feeds["mask"] = draw(1, 4, 5, 7, seed=3)
        bias = bias + feeds["mask"]
    elif mask == "rows":
        feeds["mask"] = draw(5, 7, seed=3)
        feeds["mask"][3, 4] = -np.inf
        bias, visible = bias + np.maximum(feeds["mask"], -100), visible & np.isfinite(feeds["mask"])
    if attributes.get("is_causal"):
        visible &= np.tril(np.ones((5, 7), bool))
    scale = attributes.get("scale", 8**-0.5)
    q, k, v = (feeds[name].astype(np.float64) for name in "qkv")
    want = plain_figures(q, k, v, scale, visible, bias, softcap=attributes.get("softcap", 0.0))
    got = measured(feeds, **attributes)
    assert abs(got.matmul.value) == pytest.approx(np.abs(want["matmuls"]).max(), rel=1e-5)
    for peak, key in ((got.score, "scores"), (got.logit, "logits")):
        assert abs(peak.value) == pytest.approx(np.abs(want[key]).max(), rel=1e-5), key
        assert peak.value == pytest.approx(want[key][peak.row, peak.head, peak.query, peak.key], rel=1e-5)
    assert got.exponent == pytest.approx(want["exponent"], rel=1e-5)
    assert got.sums[0].largest == pytest.approx(want["sum"], rel=1e-5)
    assert got.fully_masked == want["fully_masked"]
    assert got.scale == pytest.approx(scale)
    assert got.sentinel is None


def test_matmuls_that_do_not_fit_float32_are_still_numbers():
    feeds = qkv(size=1e20)
    exact = np.einsum(
        "bhsd,bhtd->bhst", feeds["q"].astype(np.float64), np.repeat(feeds["k"].astype(np.float64), 2, axis=1)
    )
    got = measured(feeds)
    assert np.abs(exact).max() > np.finfo(np.float32).max
    assert abs(got.matmul.value) == pytest.approx(np.abs(exact).max(), rel=1e-6)
    assert got.sums[0].largest == pytest.approx(1.0)


PAST = {"past_key": draw(2, 2, 3, 8, seed=4), "past_value": draw(2, 2, 3, 8, seed=5, size=3.0)}
ENDS = np.array([5, 7])  # the first row's last two keys are not valid


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("is_causal", [0, 1])
@pytest.mark.parametrize("cache", ["past", "lengths"])
def test_keys_behind_a_cache(cache, is_causal, mask, softcap):
    feeds = qkv(length=5 if cache == "past" else 7)
    q, k, v = (feeds[name].astype(np.float64) for name in "qkv")
    if cache == "past":
        extra, ends = PAST, np.array([8, 8])
        k, v = (np.concatenate((old, new), axis=2) for old, new in zip(PAST.values(), (k, v), strict=True))
    else:
        extra, ends = {"lengths": ENDS}, ENDS
        k[0, :, 5:] = v[0, :, 5:] = 0.0
    T = k.shape[2]
    visible = np.zeros((2, 4, 5, T), bool)
    for b in range(2):
        for s in range(5):
            visible[b, :, s, : ends[b] - 5 + s + 1 if is_causal else ends[b]] = True
    if mask:
        extra = {"mask": draw(2, 1, 5, T, seed=3) > 0, **extra}
        visible &= extra["mask"]
    order = ["q", "k", "v", "mask" if mask else ""]
    order += ["past_key", "past_value"] if cache == "past" else ["", "", "lengths"]
    got = measured({**feeds, **extra}, inputs=order, is_causal=is_causal, softcap=softcap)
    want = plain_figures(q, k, v, 8**-0.5, visible, 0.0, softcap=softcap)
    assert got.tensors == {name: pytest.approx(want[name]) for name in "QKV"}
    for peak, key in ((got.matmul, "matmuls"), (got.score, "scores"), (got.logit, "logits")):
        assert abs(peak.value) == pytest.approx(np.abs(want[key]).max(), rel=1e-5), key
    assert got.exponent == pytest.approx(want["exponent"], rel=1e-5)
    assert got.sums[0].largest == pytest.approx(want["sum"], rel=1e-5)
    assert (got.sums[0].keys, got.fully_masked) == (T, want["fully_masked"])


@pytest.mark.parametrize("cache", ["past", "lengths"])
def test_what_is_not_measured_is_refused(cache):
    extra, order = (PAST, list(PAST)) if cache == "past" else ({"lengths": ENDS}, ["", "", "lengths"])
    feeds = {**qkv(), "mask": draw(5, 10 if cache == "past" else 7), **extra}
    with pytest.raises(DeployError, match="numbers as a mask") as caught:
        measured(feeds, inputs=["q", "k", "v", "mask", *order])
    assert caught.value.got == "att"


# -- matmuls that are too large ---------------------------------------------------------------


def with_weights(bundle, folder, **factors):
    """A copy of a bundle whose projections are multiplied; `q=2.0` doubles weights and bias of Q."""
    copy_of(bundle, folder)
    model = load_graph(bundle.model_path)
    for name, factor in factors.items():
        for part in (f"{name}.weight.T", f"{name}.bias"):
            if part in model.graph.initializers:
                value = model.graph.initializers[part]
                array = value.const_value.numpy()
                larger = (array.astype(np.float64) * factor).astype(array.dtype)
                value.const_value = ir.Tensor(larger, dtype=value.const_value.dtype, name=part)
    return save(model, folder)


def save(model, folder):
    for path in folder.glob(f"{MODEL}*"):
        path.unlink()
    save_graph(model, folder / MODEL)
    rehash(folder)
    return open_bundle(folder)


def grown_to(bundle, folder, matmul):
    """A copy of a bundle whose largest |Q·Kᵀ| is this, Q and K dynamic alike."""
    now = abs(fp16_range(bundle).nodes[0].figures.matmul.value)
    factor = (matmul / now) ** 0.5
    return with_weights(bundle, folder, q=factor, k=factor)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("matmul", "status"), [(8000, "ok"), (8400, "near"), (65000, "near"), (66000, "overflows")]
)
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_the_status_follows_the_matmul(bundles, tmp_path, precision, matmul, status):
    report = fp16_range(grown_to(bundles("tiny-gqa", precision), tmp_path / "b", matmul))
    (node,) = report.nodes
    rel = {"fp16": 1e-3, "bf16": 7e-3, "fp32": 1e-5}[precision]
    assert abs(node.figures.matmul.value) == pytest.approx(matmul, rel=rel)
    assert node.headroom == pytest.approx(FP16_MAX / matmul, rel=rel)
    assert report.worst == node.status == status
    about = [each.what for each in node.findings if "Q·Kᵀ" in each.what]
    assert len(about) == (status != "ok")
    if status == "overflows":
        assert ("would overflow in FP16" in about[0]) == (precision != "fp16")
        assert ("which overflows FP16" in about[0]) == (precision == "fp16")


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        ("fp16", "export with --precision bf16"),
        pytest.param("bf16", "stay with bf16", marks=pytest.mark.slow),  # the only bundle of its kind
    ],
)
def test_large_matmuls_get_advice(bundles, tmp_path, precision, words):
    bundle = bundles("tiny-gqa", precision)
    (node,) = fp16_range(grown_to(bundle, tmp_path / "b", 70000)).nodes
    folding, island = "fold the scale into the query projection", "in FP32"
    assert all(any(part in line for line in node.advice) for part in (folding, island))
    # The scores have steps of 128 in BF16: only where they are small has it more to offer than FP16.
    assert not any(words in line for line in node.advice)
    (node,) = fp16_range(with_weights(bundle, tmp_path / "v", v=25000.0)).nodes
    assert any(words in line for line in node.advice)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("precision", "matmul", "step"),
    [("fp16", 60_000, None), ("fp16", 65_000, None), ("bf16", 7_000, None), ("bf16", 8_400, 16.0)],
)
def test_scores_that_rounding_decides_about_are_found(bundles, tmp_path, precision, matmul, step):
    """The scale is 1/4: scores up to 16,250, where FP16 has steps of 8."""
    (node,) = fp16_range(grown_to(bundles("tiny-gqa", precision), tmp_path / "b", matmul)).nodes
    steps = [each.numbers["step"] for each in node.findings if each.kind == RangeKind.SCORE_STEPS]
    assert steps == ([] if step is None else [step])


@pytest.mark.parametrize(("precision", "least"), [("fp16", 16384.0), ("bf16", 2048.0), ("fp32", 2.0**27)])
def test_the_least_score_that_is_coarse(precision, least):
    assert mixed_precision.is_coarse(least, precision)
    assert not mixed_precision.is_coarse(least * 0.999, precision)
    assert mixed_precision.step_at(least, precision) == 16


def test_folding_is_not_advised_where_the_scores_overflow_too(bundles, tmp_path):
    (node,) = fp16_range(grown_to(bundles("tiny-gqa", "fp32"), tmp_path / "b", 300_000)).nodes
    assert abs(node.figures.score.value) > FP16_MAX
    assert any("the largest score" in each.what for each in node.findings)
    assert not any("fold" in line for line in node.advice)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_tensor_that_overflows_already_is_named(bundles, tmp_path, name):
    bundle = with_weights(bundles("tiny-gqa"), tmp_path / "b", **{name: 25000.0})
    graph = load_graph(bundle.model_path).graph
    (attention,) = [node for node in graph if node.op_type == "Attention"]
    tensor = attention.inputs["qkv".index(name)].name
    (node,) = fp16_range(bundle, cases=["min", "opt"]).nodes
    assert (node.status, node.headroom) == ("overflows", 0.0)
    last = node.figures.not_finite[-1]
    assert (last.role, last.tensor, last.case) == (name.upper(), tensor, "opt")
    assert any(tensor in each.what and "NaN or infinite" in each.what for each in node.findings)
    assert msgspec.json.decode(msgspec.json.encode(node), type=NodeRange) == node


@pytest.mark.slow
def test_the_second_attention_is_judged_by_itself(bundles, tmp_path):
    bundle = with_weights(bundles("tiny-head-mix", "fp32"), tmp_path / "b", mix_q=1000.0, mix_k=1000.0)
    report = fp16_range(bundle)
    assert [node.node for node in report.nodes] == ["attention", "attention_1"]
    assert report.nodes[1].max_keys == 4
    assert [node.status for node in report.nodes] == ["ok", "overflows"]
    assert report.worst == "overflows"


# -- softmax -----------------------------------------------------------------------------------


def with_keys(bundle, folder, keys):
    """The same bundle for an engine that takes this many keys."""
    copy_of(bundle, folder)
    edit_manifest(folder, lambda data: data["spec"]["axes"]["S"].update(max=keys))
    return open_bundle(folder)


@pytest.mark.parametrize(
    ("keys", "status", "words"),
    [(2048, "ok", None), (2049, "ok", "stops at 2,048"), (70000, "near", "overflows above 65,504")],
)
def test_the_largest_sum_a_spec_allows_is_reported(bundles, tmp_path, keys, status, words):
    (node,) = fp16_range(with_keys(bundles("tiny-mha"), tmp_path / "b", keys)).nodes
    about = [each for each in node.findings if "the softmax sums" in each.what]
    assert node.max_keys == keys
    assert node.status == status
    assert [words in each.what for each in about] == ([True] if words else [])


def test_a_measured_sum_counts_for_the_headroom(bundles, tmp_path):
    bundle = with_weights(bundles("tiny-mha"), tmp_path / "b", q=0.0)
    (node,) = fp16_range(bundle).nodes
    most = max(entry.sizes["S"] for entry in bundle.manifest.golden)
    assert [each.largest for each in node.figures.sums] == [e.sizes["S"] for e in bundle.manifest.golden]
    assert most > max(node.figures.tensors.values())
    assert node.headroom == pytest.approx(FP16_MAX / most)


def test_nothing_but_zeros_has_no_headroom_to_tell(bundles, tmp_path):
    bundle = with_weights(bundles("tiny-padding"), tmp_path / "b", q=0.0, k=0.0, v=0.0)
    edit_arrays(bundle.path, lambda arrays: arrays["inputs/key_lengths"].fill(0))
    (node,) = fp16_range(open_bundle(bundle.path), cases=["opt"]).nodes
    assert node.figures.score is None
    assert node.status == "ok"
    assert node.headroom is None


def test_exp_without_its_maximum_is_a_remark(bundles, tmp_path):
    reported = {}
    for factor in (0.9, 1.1):
        bundle = with_weights(bundles("tiny-gqa", "fp32"), tmp_path / str(factor), q=factor)
        (node,) = fp16_range(bundle).nodes
        reported[factor] = any("does not subtract the maximum" in each.what for each in node.findings)
        with np.errstate(over="ignore"):
            assert reported[factor] == bool(np.isinf(np.exp(np.float16(node.figures.exponent))))
        assert node.status == "ok"
    assert reported == {0.9: False, 1.1: True}


# -- masks of numbers --------------------------------------------------------------------------


def hide(number, *, closed_row=False):
    """Give the mask this number for some keys of every query, and for all keys of one if asked to."""

    def change(arrays):
        old = arrays["inputs/attention_bias"]
        is_bf16 = old.dtype == np.uint16  # NumPy's files have no bfloat16
        mask = np.zeros(old.shape, ml_dtypes.bfloat16 if is_bf16 else old.dtype)
        mask[..., 1::2] = number
        if closed_row:
            mask[:, 0, 2] = number
        arrays["inputs/attention_bias"] = mask.view(np.uint16) if is_bf16 else mask

    return change


def with_sentinel(bundle, folder, number, **options):
    copy_of(bundle, folder)
    edit_arrays(folder, hide(number, **options))
    return fp16_range(open_bundle(folder), cases=["opt"]).nodes[0]


def about_mask(node):
    return [each for each in node.findings if "the mask's" in each.what]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("precision", "number", "status", "words"),
    [
        ("fp32", -1e9, "overflows", "-inf in FP16"),
        ("bf16", -3e38, "overflows", "-inf in FP16"),
        ("fp32", -65520.0, "overflows", "-inf in FP16"),
        ("fp16", -65504.0, "near", "leaves FP16 room for scores down to -16"),
        ("fp32", -65504.0, "near", "leaves FP16 room for scores down to -16"),
        ("fp16", -1e4, "ok", None),
        ("fp16", -32768.0, "ok", None),
        ("fp16", -5.0, "near", "is too small"),
        ("fp32", -5.0, "near", "is too small"),
    ],
)
def test_the_number_that_hides_keys_is_judged(bundles, tmp_path, precision, number, status, words):
    node = with_sentinel(bundles("tiny-additive", precision), tmp_path / "b", number)
    assert node.figures.sentinel == pytest.approx(number, rel=4e-3)
    assert node.status == status
    found = about_mask(node)
    assert [words in each.what for each in found] == ([True] if words else [])
    assert all(each.advice for each in found)
    assert node.headroom > 8  # the sentinel is no score


@pytest.mark.sweep(1)
@pytest.mark.parametrize("number", [-1e9, -65504.0, -32768.0, -1e4, -120.0, -30.0, -24.0, -5.0])
@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_the_judgement_agrees_with_arithmetic_in_fp16(bundles, tmp_path, number, factor):
    """A softmax in NumPy's FP16 over the reported extremes: NaN without keys, or weight on hidden keys."""
    large = with_weights(bundles("tiny-additive", "fp32"), tmp_path / "large", q=factor)
    node = with_sentinel(large, tmp_path / "b", number)
    low, high = node.figures.all_scores
    with np.errstate(all="ignore"):
        lowest = -max(-low, high)
        closed = fp16_softmax(np.float16([lowest, lowest]) + np.float16(number))
        leak = fp16_softmax(np.float16([low, np.float16(high) + np.float16(number)]))[1]
    assert np.isnan(closed).any() == (node.status == "overflows")
    too_small = any("too small" in each.what for each in about_mask(node))
    assert too_small == bool(leak > 0)


def fp16_softmax(scores):
    weights = np.exp(scores - scores.max())
    return (weights / weights.sum(dtype=np.float16)).astype(np.float16)


def test_pairs_hidden_by_a_number_are_not_seen():
    feeds, visible = qkv(), np.ones((2, 4, 5, 7), bool)
    visible[..., 1::2] = False
    visible[:, 0, 2] = False
    feeds["mask"] = np.where(visible, 0.0, -1e4).astype(np.float32)
    q, k, v = (feeds[name].astype(np.float64) for name in "qkv")
    got, want = measured(feeds), plain_figures(q, k, v, 8**-0.5, visible, 0.0)
    for peak, key in ((got.score, "scores"), (got.logit, "logits")):
        assert abs(peak.value) == pytest.approx(np.abs(want[key]).max(), rel=1e-5)
    assert got.sentinel == -1e4
    assert got.exponent == pytest.approx(want["exponent"], rel=1e-5)
    assert got.fully_masked == want["fully_masked"] == 2
    # A query whose keys all have the number has a softmax all the same, over its scores.
    given = plain_figures(q, k, v, 8**-0.5, np.ones_like(visible), feeds["mask"])["sum"]
    assert got.sums[0].largest == pytest.approx(given, rel=1e-3)


@pytest.mark.parametrize("hidden", [False, True])
def test_one_bias_of_every_visible_key_hides_none(hidden):
    """As of the last layer of scores that a network computes."""
    feeds = qkv()
    feeds["mask"] = np.full((2, 1, 5, 7), -0.1, np.float32)
    feeds["mask"][..., 3] = -np.inf if hidden else -0.1
    got = measured(feeds)
    assert (got.sentinel, got.fully_masked) == (None, 0)


def test_a_number_beside_biases_is_found(bundles, tmp_path):
    folder = copy_of(bundles("tiny-additive", "fp32"), tmp_path / "b")

    def change(arrays):
        arrays["inputs/attention_bias"][..., 3] = -1e9

    edit_arrays(folder, change)
    (node,) = fp16_range(open_bundle(folder)).nodes
    assert node.figures.sentinel == -1e9
    assert node.status == "overflows"


def test_a_bias_is_no_sentinel(bundles):
    (node,) = fp16_range(bundles("tiny-additive")).nodes
    assert node.figures.sentinel is None
    assert about_mask(node) == []
    assert abs(node.figures.logit.value) > abs(node.figures.score.value)


def test_minus_infinity_hides_keys_and_is_no_sentinel(bundles, tmp_path):
    node = with_sentinel(bundles("tiny-additive"), tmp_path / "b", -np.inf, closed_row=True)
    assert node.figures.sentinel is None
    assert node.status == "ok"
    assert node.figures.fully_masked == 2  # one query of one head in each row of the batch


@pytest.mark.sweep(1)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_mask_that_is_broken_is_named(bundles, tmp_path, bad):
    node = with_sentinel(bundles("tiny-additive"), tmp_path / "b", bad)
    assert node.status == "overflows"
    assert "mask (attention_bias) in case opt" in node.findings[0].what


def with_mask_of_numbers(bundle, folder, back_to_bool=False):
    """The padding mask as FP32's 0 and -1e9, cast to FP16 for the attention, or made boolean again."""
    model = load_graph(bundle.model_path)
    attention = next(node for node in model.graph if node.op_type == "Attention")
    zero, hidden, half = (
        ir.Value(name=name, const_value=ir.tensor(np.float32(number), name=name))
        for name, number in (("zero", 0.0), ("hidden", -1e9), ("half", -5e8))
    )
    for value in (zero, hidden, half):
        model.graph.register_initializer(value)
    where = ir.node("Where", inputs=[attention.inputs[3], zero, hidden])
    last = ir.node("Cast", inputs=where.outputs, attributes={"to": ir.DataType.FLOAT16})
    if back_to_bool:
        last = ir.node("Greater", inputs=[*where.outputs, half])
    where.outputs[0].name, mask = "mask_wide", last.outputs[0]
    mask.name, mask.shape = "mask", attention.inputs[3].shape
    mask.type = ir.TensorType(ir.DataType.BOOL if back_to_bool else ir.DataType.FLOAT16)
    model.graph.insert_before(attention, [where, last])
    attention.replace_input_with(3, mask)
    return save(model, copy_of(bundle, folder))


def test_a_constant_behind_a_boolean_mask_hides_nothing(bundles, tmp_path):
    bundle = bundles("tiny-padding")
    (found,) = fp16_range(with_mask_of_numbers(bundle, tmp_path / "b", back_to_bool=True)).nodes
    assert found == fp16_range(bundle).nodes[0]


def test_a_constant_of_the_graph_is_found_behind_its_cast(bundles, tmp_path):
    """The mask itself holds -inf by then."""
    bundle = bundles("tiny-padding")
    (found,) = fp16_range(with_mask_of_numbers(bundle, tmp_path / "b")).nodes
    (plain,) = fp16_range(bundle).nodes
    assert found.figures.sentinel == -1e9
    assert (plain.status, found.status) == ("ok", "overflows")
    assert f"the golden cases have {plain.figures.fully_masked:,} of them" in about_mask(found)[0].what
    assert found.figures.score == plain.figures.score
    assert found.figures.fully_masked == plain.figures.fully_masked


def doubly_masked(length):
    """Scores with a bias and -1e4 for masked keys, whose weights are masked once more."""
    nodes = [
        helper.make_node(op_type, given.split(), [made], **attributes)
        for op_type, given, made, attributes in (
            ("Transpose", "k", "k_t", {"perm": [0, 1, 3, 2]}),
            ("MatMul", "q k_t", "matmul", {}),
            ("Add", "matmul bias", "biased", {}),
            ("Mul", "biased two", "scores", {}),
            ("Where", "m scores low", "masked", {}),
            ("Softmax", "masked", "weights", {}),
            ("Where", "m weights zero", "shown", {}),
            ("MatMul", "shown v", "y", {}),
        )
    ]
    shapes = dict.fromkeys("qkvy", (2, 2, length, 8)) | {"bias": (2, length, length), "m": (2, 1, 1, length)}
    kinds = {"m": TensorProto.BOOL}
    values = {
        name: helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), shape)
        for name, shape in shapes.items()
    }
    numbers = {"two": 2.0, "low": -1e4, "zero": 0.0}
    constants = [numpy_helper.from_array(np.float32(number), name) for name, number in numbers.items()]
    y = values.pop("y")
    graph = helper.make_graph(nodes, "doubly", list(values.values()), [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def test_numbers_that_fuse_wrote_are_no_scores(tmp_path):
    """A bound on the bias, and one key in the place of the masked ones; a large bias is found as before."""
    length = 80
    onnx.save(doubly_masked(length), tmp_path / "model.onnx")
    seen = np.arange(length) < np.array([length, 8]).reshape(2, 1, 1, 1)
    options = {"precision": "fp16", "golden": ("opt",), "inputs": {"m": seen}}
    bundle = md.import_onnx(tmp_path / "model.onnx", tmp_path / "b", **options)
    (node,) = fp16_range(bundle).nodes
    assert node.status == "ok", node.findings

    def enlarge(arrays):
        arrays["inputs/bias"] *= 2000

    folder = copy_of(bundle, tmp_path / "large")
    edit_arrays(folder, enlarge, case="opt")
    (node,) = fp16_range(open_bundle(folder)).nodes
    assert RangeKind.SCORE in [each.kind for each in node.findings if each.status != "ok"]
