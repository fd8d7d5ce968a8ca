"""What an export of a user's module must refuse in words, and what it must not lose."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import edge_models
import msgspec
import numpy as np
import onnx
import pytest
import torch
from bundle_edit import fill, manifest
from torch import nn

import mha_deploy as md
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.folder import BundleWriter, open_bundle
from mha_deploy.bundle.sizes import MaskFill, PlannedCase
from mha_deploy.errors import DeployError, ExportError, NoResult
from mha_deploy.exporter.golden import ModuleCapture
from mha_deploy.exporter.own_model import load_factory, open_user_module, state_digest
from mha_deploy.exporter.program import export_program
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.precision import find_precision
from mha_deploy.model.spec import Axis, ModuleSpec, TensorSpec
from mha_deploy.reference.weights import read_state

FILE = edge_models.__file__
FP16 = find_precision("fp16")


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("leaves", "sys.exit"),
        ("listed_axes", "axes is not a dictionary"),
        ("listed_inputs", "inputs is not a dictionary"),
        ("spaced_axis", "my batch"),
        ("numbered_axis", "not a name"),
        ("unnamed_output", "no name"),
        ("no_number", "NaN"),
        ("empty_weights", "without numbers"),
        ("empty_example", "no numbers"),
    ],
)
def test_what_a_factory_must_not_give(factory, said):
    with pytest.raises(ExportError) as caught:
        open_user_module(f"{FILE}:{factory}", FP16)
    assert said in str(caught.value)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("counting", "called again"),
        ("random", "called again"),
        ("branching", "control flow"),
        ("complex_result", "complex"),
        ("failing_draw", "division by zero"),
        ("no_draw", "does not return a tensor"),
        ("whole_draw", "another type"),
    ],
)
def test_what_cannot_be_exported(tmp_path, factory, said):
    with pytest.raises(ExportError) as caught:
        md.export(f"{FILE}:{factory}", tmp_path / "bundle")
    assert said in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "factory",
    [
        "filled",
        "added",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("filled_by_keyword", "added_full")),
    ],
)
def test_a_number_that_fp16_does_not_have_is_named(tmp_path, factory):
    with pytest.raises(ExportError) as caught:
        md.export(f"{FILE}:{factory}", tmp_path / "bundle", precision="fp16")
    assert "-1e+09" in caught.value.got
    assert "edge_models.py:" in caught.value.got
    assert 'precision="auto"' in caught.value.hint


@pytest.mark.slow
def test_a_branch_for_fp16_is_detected(tmp_path):
    with pytest.raises(ExportError, match='precision="auto"'):
        md.export(f"{FILE}:guarded", tmp_path / "bundle", precision="fp16")


@pytest.mark.slow
@pytest.mark.parametrize("factory", ["filled", "added", "guarded"])
def test_the_default_takes_them(tmp_path, factory):
    bundle = md.export(f"{FILE}:{factory}", tmp_path / "bundle", golden=("opt",))
    assert all(np.isfinite(case.eager["output"]).all() for case in golden_cases(bundle))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("factory", "call"), [("large_scores", "linear"), ("large_masked_scores", "mul")])
def test_the_call_that_overflows_is_named(tmp_path, factory, call):
    with pytest.raises(ExportError, match="overflows") as caught:
        md.export(f"{FILE}:{factory}", tmp_path / "bundle", precision="fp16")
    assert "edge_models.py:" in caught.value.got
    assert call in caught.value.got
    assert 'precision="auto"' in caught.value.hint


@pytest.mark.parametrize("precision", ["auto", "fp32"])
def test_no_precision_is_proposed_where_none_helps(tmp_path, precision):
    with pytest.raises(ExportError) as caught:
        md.export(f"{FILE}:logarithm_of_negatives", tmp_path / "bundle", precision=precision)
    assert "fp32" in caught.value.what
    assert "log" in caught.value.got
    assert "precision=" not in caught.value.hint


@pytest.mark.sweep(1)
@pytest.mark.parametrize("factory", ["first_query_at_infinity", "first_query_at_lowest"])
def test_a_fully_masked_query_is_no_overflow(tmp_path, factory):
    with pytest.raises(ExportError, match="fully masked") as caught:
        md.export(f"{FILE}:{factory}", tmp_path / "bundle", precision="fp16")
    assert "overflow" not in str(caught.value)
    assert "softmax" in caught.value.got
    assert "edge_models.py:" in caught.value.got
    assert "mask" in caught.value.hint


class AddedMask(nn.Module):
    """Attention by hand with the mask number of BERT, beside which float32 keeps three digits of a score."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        nn.init.normal_(self.qkv.weight, std=0.4)

    def forward(self, x, mask):
        q, k, v = (each.unflatten(-1, (2, 16)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / 4 + (1.0 - mask[:, None, None].to(x.dtype)) * -10000.0
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.slow
def test_what_float32_loses_beside_a_mask_number_is_in_the_budget(tmp_path):
    mask = (torch.arange(8) < torch.tensor([[8], [5]])).long()
    examples = {"x": md.Example(torch.randn(2, 8, 32), "B", "S"), "mask": md.Example(mask, "B", "S")}
    axes = {"B": "1:2:4", "S": "1:8:16"}
    bundle = md.export(AddedMask(), tmp_path / "b", example_inputs=examples, axes=axes, precision="fp32")
    report = md.validate(bundle, runtimes=["ort-cpu"], latency=False)
    assert report.passed, report
    wrong = onnx.load(bundle.model_path)
    (attention,) = (node for node in wrong.graph.node if node.op_type == "Attention")
    (scale,) = (each for each in attention.attribute if each.name == "scale")
    scale.f *= 1.001
    onnx.save(wrong, tmp_path / "wrong.onnx")
    assert md.validate(bundle, graphs=[tmp_path / "wrong.onnx"], latency=False).outcome == "failed"


def test_no_full_mask_is_kept_for_which_the_fast_path_of_pytorch_has_no_result():
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    mask = torch.arange(6) >= torch.tensor([[6], [4]])
    inputs = {"src": md.Example(torch.randn(2, 6, 8), "B", "S")}
    inputs["src_key_padding_mask"] = md.Example(mask, "B", "S")
    own = md.Deployable(module=layer, inputs=inputs, axes={"B": "1:2:4", "S": "2:6:8"}, outputs=["y"])
    user = open_user_module(own, FP16)
    capture = ModuleCapture(user, SimpleNamespace(outputs=["y"], tables={}), FP16, 0)
    full = PlannedCase(name="masks", sizes={"B": 4, "S": 6}, masks=tuple(MaskFill))
    with pytest.raises(NoResult, match="fully masked"):
        capture.draw(full)
    feeds = capture.draw(replace(full, masks=(MaskFill.TAIL, MaskFill.HEAD)))
    with torch.no_grad():
        assert user.module(**feeds).isfinite().all()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        feeds = capture.draw(full)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert capture.run_eager(feeds, "a case")["y"].isfinite().all()


@pytest.mark.slow  # those of a catalog layer are named by the same code: tests/export/test_exporter.py
@pytest.mark.parametrize(
    ("factory", "precision", "weight", "said"),
    [
        ("nan_weights", "fp16", "a.k.weight", "NaN"),
        ("nan_weights", "auto", "a.k.weight", "NaN"),
        ("infinite_weights", "fp16", "a.v.bias", "infinite"),
    ],
)
def test_weights_that_are_no_numbers_are_named(tmp_path, factory, precision, weight, said):
    with pytest.raises(ExportError, match="weights") as caught:
        md.export(f"{FILE}:{factory}", tmp_path / "bundle", precision=precision)
    assert said in caught.value.what
    assert weight in caught.value.got


def test_nothing_is_left_without_a_golden_case(tmp_path):
    with pytest.raises(ExportError, match="No golden case"):
        md.export(f"{FILE}:plain", tmp_path / "bundle", golden=("large",))
    assert list(tmp_path.iterdir()) == []


def test_the_device_is_not_ignored(tmp_path):
    with pytest.raises(ExportError, match="on the CPU"):
        md.export(f"{FILE}:plain", tmp_path / "bundle", device="cuda")


@pytest.mark.slow
def test_complex_tables_stay_complex(tmp_path):
    (case,) = golden_cases(md.export(f"{FILE}:rotated", tmp_path / "bundle", golden=("opt",)))
    with torch.no_grad():
        want = load_factory(f"{FILE}:rotated").module(torch.from_numpy(case.inputs["x"]).float()).numpy()
    assert np.linalg.norm(case.oracle["output"] - want) < 1e-2 * np.linalg.norm(want)


def test_the_work_of_fused_attention_is_counted(tmp_path):
    bundle = md.export(f"{FILE}:plain", tmp_path / "bundle", golden=("opt",), precision="fp32")
    B, S, E = 2, 5, edge_models.E
    assert bundle.manifest.spec.flops == 2 * B * S * 3 * E**2 + 4 * B * S * S * E


def test_a_sum_of_a_fixed_and_a_varying_axis():
    loaded = load_factory(f"{FILE}:fixed_past")
    inputs = {name: example.tensor for name, example in loaded.inputs.items()}
    exported = export_program(loaded.module, inputs, loaded.dims, loaded.axes)
    assert exported.outputs == {"output": ("B", "S+3", edge_models.E)}


class Patches(torch.nn.Module):
    """Patches of 2 x 2 pixels, and back to pixels: only even sizes return to what they were."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Conv2d(3, 8, 2, 2)
        self.paint = torch.nn.ConvTranspose2d(8, 3, 2, 2)

    def forward(self, image):
        return {"painted": image + self.paint(self.embed(image)), "patches": self.embed(image).flatten(2)}


@pytest.mark.parametrize(("height", "width"), [("2*H", "2*W"), ("H+H", "2*W")])
def test_a_dimension_is_a_multiple_of_an_axis(height, width):
    axes = {"B": Axis(min=1, opt=2, max=4), "H": Axis(min=2, opt=8, max=12), "W": Axis(min=2, opt=6, max=12)}
    given = {"image": ("B", 3, height, width)}
    found = export_program(Patches(), {"image": torch.randn(2, 3, 16, 12)}, given, axes)
    assert found.outputs["painted"] == ("B", 3, height, width)
    patches = TensorSpec(name="patches", kind="float", dims=found.outputs["patches"])
    assert patches.shape({"B": 3, "H": 5, "W": 7}) == (3, 8, 35)


def test_sizes_that_must_be_multiples_are_named_as_such():
    inputs = {"image": md.Example(torch.randn(2, 3, 16, 12), "B", None, "H", "W")}
    axes = {"B": "1:2:4", "H": "4:16:24", "W": "4:12:24"}
    with pytest.raises(ExportError) as caught:
        md.export(md.Deployable(module=Patches(), inputs=inputs, axes=axes), "unused")
    assert {'"2*H"', '"2*W"'} <= {*re.findall(r'"[^"]*"', caught.value.hint)}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["S", "N", "pi"])
def test_names_that_mean_something_to_sympy(name):
    module = edge_models.Added()
    inputs = {"x": torch.randn(2, 4, 8), "past": torch.randn(2, 4, 8), "mask": torch.randn(2, 8, 8)}
    dims = {"x": ("B", name), "past": ("B", name), "mask": ("B", f"{name}+{name}")}
    axes = {"B": Axis(min=1, opt=2, max=4), name: Axis(min=1, opt=4, max=8)}
    assert export_program(module, inputs, dims, axes).outputs == {"output": ("B", f"{name}+{name}", 8)}


def test_a_buffer_that_is_not_saved_is_hashed():
    module = torch.nn.Linear(2, 2)
    before = state_digest(module)
    module.register_buffer("table", torch.ones(2), persistent=False)
    one = state_digest(module)
    module.table *= 2
    assert len({before, one, state_digest(module)}) == 3


def test_a_state_dict_has_names(tmp_path):
    torch.save({1: torch.ones(2)}, tmp_path / "weights.pt")
    with pytest.raises(DeployError, match="not a state dict"):
        read_state(tmp_path / "weights.pt")


def test_a_manifest_that_cannot_be_read_is_not_put_in_place(tmp_path):
    broken = manifest()
    broken.golden.clear()
    with BundleWriter(tmp_path / "bundle") as writer:
        fill(writer.path)
        with pytest.raises(DeployError, match="was not written"):
            writer.finish(broken)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        (("spec",), ["a"]),
        (("spec",), "x"),
        (("spec", "weight_bytes"), None),
        (("spec", "mixed"), "yes"),
        (("spec", "factory"), 3),
        (("golden", 0, "sizes"), ["a"]),
        (("weights",), None),
        (("opset",), "23"),
    ],
)
def test_a_manifest_of_wrong_kinds_is_refused(tmp_path, where, wrong):
    folder = tmp_path / "bundle"
    spec = find_spec("tiny-mha")
    same = {name: getattr(spec, name) for name in ("name", "axes", "inputs", "outputs", "attention_count")}
    own = ModuleSpec(**same, factory="own.py:layer")
    with BundleWriter(folder) as writer:
        fill(writer.path)
        writer.finish(msgspec.structs.replace(manifest(), spec=own))
    assert open_bundle(folder).manifest.spec == own
    data = json.loads((folder / "manifest.json").read_text())
    part = data
    for key in where[:-1]:
        part = part[key]
    part[where[-1]] = wrong
    (folder / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(DeployError):
        open_bundle(folder)


class PadsToBlocks(torch.nn.Module):
    """Pads where the length is no multiple of 4, which the trace at one length settles for all."""

    def forward(self, x):
        size, padded = x.shape[1], x
        if size % 4:
            padded = torch.nn.functional.pad(x, (0, 0, 0, 4 - size % 4))
        blocks = padded.reshape(x.shape[0] * ((size + 3) // 4), 4, 8)
        return x + ((blocks @ blocks.mT).softmax(-1) @ blocks).mean()


@pytest.mark.slow
def test_a_program_that_fails_where_the_module_runs_is_refused_in_words(tmp_path):
    inputs = {"x": md.Example(torch.randn(2, 9, 8), None, "S")}
    model = md.Deployable(module=PadsToBlocks(), inputs=inputs, axes={"S": "1:16:32"})
    with pytest.raises(md.DeployError, match="program fails where the module runs") as caught:
        md.export(model, tmp_path / "bundle", precision="fp32", golden=("opt",))
    assert "control flow" in caught.value.hint
