"""Attentions that are no node of the graph count in every verdict, and a graph without one is still built."""

import shutil

import onnx
import pytest
import torch
from bundle_edit import rehash

import mha_deploy as md
from mha_deploy.bundle.folder import open_bundle
from mha_deploy.options import ValidateOptions
from mha_deploy.validation.run import validate_bundle
from mha_deploy.validation.verdict import unfused_findings

GOLDEN = ("opt", "probe")  # as another test has it


@pytest.fixture
def copied(own_bundles, tmp_path):
    """A function that copies the bundle of a factory, and gives its folder."""
    return lambda name: shutil.copytree(own_bundles(name, golden=GOLDEN).path, tmp_path / name)


MODELS = pytest.mark.parametrize(
    ("name", "fused"), [("talking", 1), pytest.param("only_talking", 0, marks=pytest.mark.slow)]
)


@MODELS
def test_the_manifest_and_a_validation_count_talking_heads(name, fused, own_bundles):
    manifest = own_bundles(name, golden=GOLDEN).manifest
    assert (len(manifest.attention), manifest.spec.attention_count) == (fused, 2)
    assert sum("blocks.1.attention" in note for note in manifest.notes) == 1
    report = validate_bundle(own_bundles(name, golden=GOLDEN), ValidateOptions(probe=False))
    assert report.passed, report.headline
    assert f"{fused} of 2" in report.headline
    (required,) = unfused_findings(manifest, ValidateOptions(require_fused=True))
    assert required.level == "failure"


@MODELS
def test_an_engine_counts_them(name, fused, copied, run_cli):
    pytest.importorskip("tensorrt_rtx")
    folder = copied(name)
    done = run_cli("build-engine", folder, "--backend", "tensorrt-rtx", "--sm", "89", "--require-fused")
    assert done.code == 1, done.err
    assert f"{fused}/2 fused" in done.out
    report = validate_bundle(open_bundle(folder), ValidateOptions(probe=False))
    assert f"{fused}/2 fused" in report.headline
    (engine,) = report.engines
    assert engine.manifest.fused_count == (fused, 2)
    unfused = [node for node in engine.manifest.verdict.nodes if node.status != "fused"]
    assert len(unfused) == 2 - fused
    assert all("blocks." in node.node and node.reasons for node in unfused)


class Talking(torch.nn.Module):
    """Attention with talking heads."""

    def __init__(self, E=32, H=4):
        super().__init__()
        self.qkv, self.mix = torch.nn.Linear(E, 3 * E), torch.nn.Linear(H, H, bias=False)
        torch.nn.init.normal_(self.qkv.weight, std=0.3)

    def forward(self, x, mask):
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).masked_fill(~mask[:, None, None], -1e4)
        weights = self.mix(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return (weights @ v).transpose(1, 2).flatten(2)


class ShownAndHidden(torch.nn.Module):
    """The output shows its first attention, and hardly its second."""

    def __init__(self):
        super().__init__()
        self.shown, self.hidden = Talking(), Talking()

    def forward(self, x, mask):
        x = x + self.shown(x, mask)
        return x + 1e-6 * self.hidden(x, mask)


def test_attentions_that_are_no_node_are_shown_by_the_outputs_or_judged_by_themselves(tmp_path):
    torch.manual_seed(0)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    inputs = {"x": md.Example(torch.randn(2, 6, 32), "B", "S"), "mask": md.Example(mask, "B", "S")}
    model = md.Deployable(module=ShownAndHidden(), inputs=inputs, axes={"B": "4", "S": "24"})
    bundle = md.export(model, tmp_path / "bundle", golden=["opt"], precision="fp16")
    seen = {each.name: each for each in bundle.manifest.observed}
    kinds = {"zero", "one head zero", "mask dropped", "scale off by 2 %"}
    assert {each.value for each in seen["shown"].shown} >= kinds
    assert {each.value for each in seen["hidden"].hidden} >= kinds
    assert md.validate(bundle, probe=False, latency=False).passed
    graph = onnx.load(bundle.model_path)
    softmax = [node for node in graph.graph.node if node.op_type == "Softmax"][1]
    softmax.op_type = "Sigmoid"
    del softmax.attribute[:]
    onnx.save(graph, tmp_path / "wrong.onnx")
    # Of a runtime that shows its outputs alone, the attention is named.
    report = md.validate(bundle, graphs=[tmp_path / "wrong.onnx"], probe=False, latency=False)
    assert report.outcome == "not verified"
    gaps = [gap for gap in report.to_dict()["verdict"]["not_verified"] if "attention" in gap]
    assert [gap["attention"] for gap in gaps] == ["hidden"]
    # Of the bundle's own graph, ONNX Runtime shows the values inside.
    shutil.copyfile(tmp_path / "wrong.onnx", bundle.model_path)
    rehash(bundle.path)
    assert md.validate(bundle.path, probe=False, latency=False).outcome == "failed"
