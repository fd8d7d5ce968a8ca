"""The oracle of a program is FP64 throughout, and it tells what every attention of the graph must give."""

import contextlib
import copy
import functools
import math
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from program_models import AXES, example
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mha_deploy as md
from mha_deploy.errors import ExportError, NoResult
from mha_deploy.exporter.axes import draw_inputs
from mha_deploy.exporter.observe import attention_values
from mha_deploy.exporter.oracle import Float32Accumulation, RandomRounding, run_program
from mha_deploy.exporter.program import export_program
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.fuse import fuse_attention
from mha_deploy.model.precision import PRECISIONS

HALF_MODELS = [
    ("by hand", ""),
    pytest.param("llama", "sdpa", marks=pytest.mark.slow),
    pytest.param("bert", "sdpa", marks=pytest.mark.slow),
    pytest.param("t5", "eager", marks=pytest.mark.slow),
]
MODELS = [
    ("by hand", ""),
    *(
        pytest.param(name, attention, marks=pytest.mark.slow)
        for name, attention in (
            ("bert", "sdpa"),
            ("bert", "eager"),
            ("gpt2", "sdpa"),
            ("gpt2", "eager"),
            ("llama", "sdpa"),
            ("llama", "eager"),
            ("t5", "sdpa"),
            ("t5", "eager"),
        )
    ),
]


@functools.cache
def module_of(name, attention, half):
    module = copy.deepcopy(example(name, attention).module).eval()
    return module.half() if half else module


@functools.cache
def exported(name, attention, half):
    given = example(name, attention)
    inputs = {key: rounded(tensor, half) for key, tensor in given.inputs.items()}
    return export_program(module_of(name, attention, half), inputs, given.dims, given.axes)


def rounded(tensor, half):
    return tensor.half() if half and tensor.is_floating_point() else tensor


def inputs_of(name, attention, half=False, **sizes):
    given = example(name, attention)
    drawn = draw_inputs(given.inputs, given.dims, sizes, seed=1)
    return {key: rounded(tensor, half) for key, tensor in drawn.items()}


@contextlib.contextmanager
def float32_is_float64():
    """Let Python code that says float32 mean float64: the module itself, without any rounding."""
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


def in_float64(module, inputs):
    """The module itself in FP64. Its masks are of another lowest number then, which nothing is left of."""
    doubled = copy.deepcopy(module).double()
    given = {key: each.double() if each.is_floating_point() else each for key, each in inputs.items()}
    with torch.no_grad(), float32_is_float64():
        return doubled(**given)


# -- the whole ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "attention"), HALF_MODELS)
def test_the_oracle_of_a_half_precision_program_is_float64(name, attention):
    module, inputs = module_of(name, attention, True), inputs_of(name, attention, True, B=2, S=9)
    outputs, _ = run_program(exported(name, attention, True), inputs)
    (got,), want = outputs.values(), in_float64(module, inputs)
    assert got.dtype == torch.float64
    assert (got - want).abs().max() < 1e-12
    # The proof can fail: module.double() alone is off by the roundings that it asks for by name.
    given = {key: each.double() if each.is_floating_point() else each for key, each in inputs.items()}
    with torch.no_grad():
        plain = copy.deepcopy(module).double()(**given)
    assert name == "bert" or (plain - want).abs().max() > 1e-9


@pytest.mark.sweep(1)
@pytest.mark.parametrize("half", [False, True])
def test_in_its_own_precision_a_program_is_its_module(half):
    module, inputs = module_of("by hand", "", half), inputs_of("by hand", "", half, B=3, S=11)
    outputs, _ = run_program(exported("by hand", "", half), inputs, mode=Float32Accumulation())
    with torch.no_grad(), Float32Accumulation():
        want = module(**inputs)
    assert outputs["output"].dtype == want.dtype
    # The exporter rounds scalars such as 8**0.5 to float16, as the graph has them; PyTorch does not.
    torch.testing.assert_close(outputs["output"], want, atol=4e-3 if half else 0, rtol=0)


class SeenProducts(TorchDispatchMode):
    """Notes in which precision matrices are multiplied."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in ("mm", "attention")):
            self.dtypes |= {each.dtype for each in args if isinstance(each, torch.Tensor)}
        return func(*args, **(kwargs or {}))


def test_matmuls_of_halves_accumulate_in_float32():
    given, inputs = exported("by hand", "", True), inputs_of("by hand", "", True, B=2, S=5)
    with SeenProducts() as seen:
        outputs, _ = run_program(given, inputs, mode=Float32Accumulation())
    assert seen.dtypes == {torch.float32}
    assert outputs["output"].dtype == torch.float16


# -- every attention -----------------------------------------------------------------------------------


def with_outputs(model, names):
    values = {value.name: value for node in model.graph for value in node.outputs}
    model.graph.outputs.extend(values[name] for name in names if not values[name].is_graph_output())
    return onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention"), MODELS)
def test_every_attention_of_the_fused_graph_has_its_value(name, attention):
    given = exported(name, attention, False)
    fused, report = fuse_attention(given.model)
    assert report.unfused == ()
    values = attention_values(fused, lambda name: given.node_of(name) is not None, ())
    assert list(values) == [node.name for node in attention_nodes(fused)]
    assert len(set(values.values())) == 2
    session = with_outputs(fused, values.values())
    for sizes in ({"B": 1 if name == "llama" else 3, "S": 9}, {"B": 1, "S": 1}):
        inputs = inputs_of(name, attention, **sizes)
        outputs, kept = run_program(given, inputs, keep=values.values())
        wanted = {**outputs, **kept}
        names = [each.name for each in session.get_outputs()]
        ran = session.run(None, {key: each.numpy() for key, each in inputs.items()})
        assert set(names) == set(wanted)
        for key, got in zip(names, ran, strict=True):
            assert wanted[key].dtype == torch.float64
            np.testing.assert_allclose(got, wanted[key].numpy(), atol=1e-5, rtol=0)


def test_an_attention_behind_a_transpose_is_found_by_the_value_behind_it():
    class LengthFirst(nn.Module):
        def forward(self, q, k, v):
            weights = torch.einsum("bshd,bthd->bhst", q, k).softmax(-1)
            return {"y": torch.einsum("bhst,bthd->bshd", weights, v)}

    inputs = {name: torch.randn(2, 6, 4, 8) for name in "qkv"}
    given = export_program(LengthFirst(), inputs, dict.fromkeys("qkv", ("B", "S")), AXES)
    fused, _ = fuse_attention(given.model)
    (node,) = attention_nodes(fused)
    ((name, value),) = attention_values(fused, lambda name: given.node_of(name) is not None, ()).items()
    assert name == node.name
    _, kept = run_program(given, inputs, keep=[value])
    heads_first = [each.double().transpose(1, 2) for each in inputs.values()]
    want = nn.functional.scaled_dot_product_attention(*heads_first, scale=1.0)
    got = kept[value] if kept[value].shape == want.shape else kept[value].transpose(1, 2)
    assert (got - want).abs().max() < 1e-12


# -- what the oracle must not change ---------------------------------------------------------------------


class Buckets(nn.Module):
    """Reads a row of a table that a float32 calculation over integers chooses, as T5 does."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 4)

    def forward(self, x):
        rows = (torch.arange(x.shape[1]).float() * 0.7 * 10 / 7).long()
        third = torch.arange(x.shape[1]) / 3
        return (
            x * 0.1
            + self.table(rows)
            + third[:, None]
            + torch.full((4,), 0.1)
            + torch.tensor(0.1, dtype=x.dtype)
        )


def test_integers_that_come_from_integers_stay_and_all_else_is_float64():
    torch.manual_seed(0)
    module, x = Buckets(), torch.randn(2, 50, 4)
    given = export_program(module, {"x": x}, {"x": ("B", "S")}, {"B": AXES["B"], "S": AXES["S"]})
    x = torch.randn(1, 32, 4)
    outputs, _ = run_program(given, {"x": x})
    rows = (torch.arange(32).float() * 0.7 * 10 / 7).long()
    assert (rows != (torch.arange(32).double() * 0.7 * 10 / 7).long()).any(), (
        "the example must tell them apart"
    )
    third = torch.arange(32, dtype=torch.float64) / 3
    constant = torch.tensor(0.1, dtype=torch.float32).double()  # a tensor of the module, already rounded
    want = x.double() * 0.1 + module.table.weight.double()[rows] + third[:, None] + 0.1 + constant
    assert (outputs["output"] - want).abs().max() < 1e-14


def test_masks_keep_the_lowest_number_of_the_precision_that_was_exported():
    given = exported("by hand", "", True)
    inputs = inputs_of("by hand", "", True, B=2, S=7)
    filled = [
        node.name
        for node in given.program.graph.nodes
        if "masked_fill" in str(node.target) or "where" in str(node.target)
    ]
    _, kept = run_program(given, inputs, keep=filled[:1])
    (scores,) = kept.values()
    assert (scores == -65504).any()
    assert scores.dtype == torch.float64


class Clock(nn.Module):
    """The embedding of a time step, as diffusion models have it."""

    def forward(self, t):
        angles = (t * 1000)[:, None].float() * torch.tensor([1.0, 0.3])
        return torch.cat([angles.sin(), angles.cos()], -1).to(t.dtype)


def test_samples_are_rounded_where_a_module_widens_what_it_made_of_an_input():
    inputs = {"t": torch.tensor([0.3, 0.5405, 0.984]).half()}
    exported = export_program(Clock(), inputs, {"t": ("B",)}, {"B": AXES["B"]})
    (name,), precision = exported.outputs, PRECISIONS["fp16"]

    def error(mode):
        return (run_program(exported, inputs, mode=mode)[0][name].double() - exact).abs().amax()

    exact = run_program(exported, inputs)[0][name]
    samples = [error(RandomRounding(precision, seed)) for seed in range(8)]
    assert 0.01 < error(Float32Accumulation()) < 3 * max(samples)


def test_what_cannot_be_run_is_refused():
    given = exported("by hand", "", True)
    inputs = inputs_of("by hand", "", True, B=2, S=7)
    with pytest.raises(ExportError, match="no such value"):
        run_program(given, inputs, keep=["matmul_99"])
    with pytest.raises(ExportError, match="more inputs") as caught:
        run_program(given, {"x": inputs["x"]})
    assert caught.value.got == "mask"


def test_a_sample_leaves_no_mark_on_tensors_that_others_use():
    x = torch.zeros(2, 3)
    with RandomRounding(PRECISIONS["fp16"], seed=2):
        x.add_(torch.ones_like(x))  # exact, so that the result is the tensor itself
    assert (x == 1).all()
    assert not vars(x)


@pytest.mark.parametrize("hides", [-math.inf, torch.finfo(torch.float32).min, -1e9])
def test_what_a_mask_hides_stays_hidden_where_a_matmul_adds_it(hides):
    mask, q, k = torch.zeros(1, 2, 3), torch.randn(1, 2, 4), torch.randn(1, 4, 3)
    mask[..., 2] = hides
    for seed in range(8):
        with RandomRounding(replace(PRECISIONS["fp16"], accumulate="fp16"), seed):
            scores = torch.baddbmm(mask, q, k)
        assert scores.isfinite()[..., :2].all()
        assert (scores[..., 2] < -1e8).all()
        assert scores.softmax(-1).isfinite().all()


def test_nan_stays_nan_in_a_quantizer_of_a_program(tmp_path):
    class Quantized(nn.Module):
        def forward(self, x):
            return torch.fake_quantize_per_tensor_affine((-x.abs()).log(), 0.05, 0, -128, 127)

    given = {"x": torch.ones(2, 4)}
    with pytest.raises(NoResult):
        md.export(Quantized(), tmp_path / "out", example_inputs=given, precision="fp32", golden=("opt",))
