"""`--precision auto`: modules that FP16 cannot hold as they are written; fully masked queries among them."""

import math

import numpy as np
import onnx
import pytest
import torch
from bundle_edit import copy_of, edit_manifest
from onnx import numpy_helper
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import mha_deploy as md
from mha_deploy.bundle.folder import open_bundle
from mha_deploy.engine.engine import open_engine
from mha_deploy.runtime.tensorrt.versions import NotFusedError

E, H = 32, 4
LOWEST = torch.finfo(torch.float32).min


def filled(number):
    return lambda scores, keep: scores.masked_fill(~keep, number)


def added(number):
    return lambda scores, keep: scores + (1.0 - keep.to(scores.dtype)) * number


def triangle(scores, keep):
    """A causal triangle and a padding mask, both added: some keys are masked twice."""
    S = scores.shape[-1]
    return scores + torch.triu(torch.full((S, S), -1e9), 1) + torch.where(keep, 0.0, -1e9)


def bf16_bias(scores, keep):
    """Falcon computes its ALiBi in BF16."""
    distance = torch.arange(scores.shape[-1])[None, :] - torch.arange(scores.shape[-2])[:, None]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.bfloat16)[:, None, None]
    return (scores + distance.to(torch.bfloat16) * slopes).masked_fill(~keep, -1e9)


MASKS = {
    "fill -1e9": filled(-1e9),
    "fill lowest": filled(LOWEST),
    "fill -1e20": filled(-1e20),
    "add -1e9": added(-1e9),
    "add lowest": added(LOWEST),
    "add -1e4": added(-1e4),
    "where": lambda scores, keep: torch.where(keep, scores.float(), torch.tensor(-1e9)),
    "triangle": triangle,
    "bf16": bf16_bias,
    "sdpa": None,
}


class Masked(nn.Module):
    """Attention that masks in one of these ways."""

    def __init__(self, mask):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(E, E) for _ in range(4))
        self.mask = mask

    def forward(self, x, keep):
        q, k, v = (3 * p(x).unflatten(-1, (H, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        keep = keep[:, None, None, :]
        if self.mask is None:
            bias = torch.where(keep, 0.0, -1e9).to(q.dtype).expand(-1, -1, x.shape[1], -1)
            heads = scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            scores = self.mask(q @ k.transpose(-1, -2) / math.sqrt(E // H), keep)
            heads = scores.softmax(-1).to(v.dtype) @ v
        return self.o(heads.transpose(1, 2).flatten(-2))


def keeps(shape, generator=None):
    """The second sequence has no token at all: all its queries are fully masked."""
    lengths = torch.tensor([[shape[1]], [0], [shape[1] // 2 + 1]])
    return torch.arange(shape[1]) < lengths[torch.arange(shape[0]) % 3]


def exported(name, folder, scale=1.0, **options):
    torch.manual_seed(0)
    module = Masked(MASKS[name])
    with torch.no_grad():
        module.q.weight *= scale
    inputs = {
        "x": md.Example(torch.randn(3, 8, E), "B", "S"),
        "keep": md.Example(keeps((3, 8)), "B", "S", draw=keeps),
    }
    axes = {"B": "3", "S": "2:8:16"}
    return module, md.export(module, folder, example_inputs=inputs, axes=axes, **options)


def check(name, folder):
    module, bundle = exported(name, folder, golden=["opt"])
    assert bundle.manifest.precision.name == "fp16"
    if name == "fill -1e9":  # the number of the model, whichever the graph has in its place
        (clamped,) = bundle.manifest.checks["mixed precision"]["clamped"]
        assert clamped["found"] == -1e9
    report = md.validate(bundle, latency=False)
    assert report.passed, report.headline
    x, keep = torch.randn(3, 9, E).half().float(), keeps((3, 9))
    with torch.no_grad():
        wanted = module.eval()(x, keep).numpy()
    with md.open_runner(bundle) as runner:
        (got,) = runner.run({"x": x.numpy().astype(np.float16), "keep": keep.numpy()}).values()
    for element in range(3):  # the second one consists of fully masked queries
        off = np.linalg.norm(got[element] - wanted[element]) / np.linalg.norm(wanted[element])
        assert off < 5e-3, (element, off)


@pytest.mark.parametrize(
    "name",
    [name if name == "fill -1e9" else pytest.param(name, marks=pytest.mark.slow) for name in MASKS],
)
def test_a_module_that_fp16_cannot_hold_is_the_same_function(name, tmp_path):
    check(name, tmp_path / "bundle")


class Padded(nn.Module):
    """PyTorch's own attention, whose padding is -inf where it returns its weights, too."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x, keep):
        return self.attend(x, x, x, key_padding_mask=~keep)[0]


def test_a_number_that_only_the_graph_has_is_no_number_of_the_model(tmp_path):
    torch.manual_seed(0)
    inputs = {"x": torch.randn(2, 6, 16), "keep": torch.arange(6) < torch.tensor([[6], [4]])}
    bundle = md.export(Padded(), tmp_path / "bundle", example_inputs=inputs, golden=["opt"])
    assert bundle.manifest.checks["mixed precision"]["clamped"] == []


@pytest.mark.parametrize("way", ["fp8", pytest.param("prune", marks=pytest.mark.slow)])
def test_a_compressed_model_has_the_numbers_of_its_original(way, tmp_path):
    """The graph is read and written once more; the mask number that stands in it is none of the model."""
    options = {"golden": ["opt"]} | ({"precision": "fp8"} if way == "fp8" else {})
    inputs = {"x": md.Example(torch.randn(2, 6, E), "B", "S"), "keep": md.Example(keeps((2, 6)), "B", "S")}
    torch.manual_seed(0)
    model = md.Deployable(module=Masked(MASKS["fill -1e9"]), inputs=inputs, axes={"B": "2", "S": "2:6:8"})
    if way == "prune":
        bundle = md.prune(model, tmp_path / "bundle", heads=1, **options)
    else:
        bundle = md.export(model, tmp_path / "bundle", **options)
    clamped = bundle.manifest.checks["mixed precision"]["clamped"]
    assert {each["found"] for each in clamped} == {-1e9}


class Overflowing(nn.Module):
    """Between its two projections it reaches beyond what FP16 can hold; a third one needs no more."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.last = (nn.Linear(E, E) for _ in range(3))
        with torch.no_grad():
            self.up.weight *= 2e5
            self.down.weight /= 2e5

    def forward(self, x):
        return self.last(self.down(self.up(x)))


def test_the_weights_of_a_bundle_are_those_of_its_graph(tmp_path):
    torch.manual_seed(0)
    inputs = {"x": md.Example(torch.randn(3, E), "B")}
    bundle = md.export(
        Overflowing(), tmp_path / "bundle", example_inputs=inputs, axes={"B": "3"}, golden=["opt"]
    )
    arrays = [numpy_helper.to_array(each) for each in onnx.load(bundle.model_path).graph.initializer]
    assert {each.dtype.name for each in arrays if each.ndim == 2} == {"float16", "float32"}
    assert bundle.manifest.spec.weight_bytes == sum(each.nbytes for each in arrays)


# -- Scores beyond FP16 ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large_scores(tmp_path_factory):
    """An attention that is FP32, its mask included, between projections in FP16."""
    return exported("fill -1e9", tmp_path_factory.mktemp("large") / "bundle", 2e3, golden=["opt"])[1]


@pytest.mark.slow
def test_what_stays_in_fp32_is_not_clamped_and_has_no_finding_about_fp16(large_scores):
    plan = large_scores.manifest.checks["mixed precision"]
    assert plan["clamped"] == []
    assert {each["op_type"] for each in plan["kept"]} > {"Attention"}
    record = md.validate(large_scores, latency=False, probe=False, fresh=0).record
    assert [node.findings for node in record.range.nodes] == [()]


def test_an_engine_of_attention_in_fp32_is_opened_with_its_verdict(large_scores):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    engine = md.build_engine(large_scores, targets="8.9", allow_decomposed=True)
    assert engine.manifest.verdict.precision.has_requested_types
    assert [each["remedy"] for each in engine.manifest.findings if each["rule"] == "fp32"] == [""]
    assert open_engine(engine.path).manifest.verdict == engine.manifest.verdict


@pytest.mark.parametrize(("score", "remedies"), [(None, {"decomposed"}), (1e3, {"bf16", "decomposed"})])
def test_attention_in_fp32_has_remedies_that_help(large_scores, tmp_path, score, remedies):
    """Neither what made it FP32 nor FP16, which overflows; BF16 where it resolves the scores."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    folder = copy_of(large_scores, tmp_path / "b")
    if score is not None:

        def shrink(data):
            data["checks"]["mixed precision"]["scores"] = dict.fromkeys(plan["scores"], score)

        plan = large_scores.manifest.checks["mixed precision"]
        edit_manifest(folder, shrink)
    with pytest.raises(NotFusedError) as caught:
        md.build_engine(open_bundle(folder), targets="8.9")
    assert {each for each in ("auto", "fp16", "bf16", "decomposed") if each in caught.value.hint} == remedies
