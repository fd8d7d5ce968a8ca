"""Any module becomes a graph with the user's names, axes and source lines."""

import copy
from collections import Counter, namedtuple
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch._export.utils as export_utils
import torch.nn.functional as F
from torch import nn
from torch.onnx._internal.exporter import _registration

import mha_deploy as md
from mha_deploy.errors import ExportError
from mha_deploy.exporter.axes import draw_inputs, trace_sizes
from mha_deploy.exporter.explain import onnx_program
from mha_deploy.exporter.oracle import Float32Accumulation, run_program, tensors_in
from mha_deploy.exporter.program import export_program, named_outputs
from mha_deploy.graph.batch_norm import fold_batch_norms
from mha_deploy.graph.fuse import fuse_attention
from mha_deploy.model.spec import Axis

B, S, P = Axis(min=1, opt=2, max=8), Axis(min=1, opt=6, max=64), Axis(min=0, opt=4, max=32)


def run(model, inputs):
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [each.name for each in session.get_outputs()]
    results = session.run(None, {name: each.numpy() for name, each in inputs.items()})
    return dict(zip(names, results, strict=True))


class Step(nn.Module):
    """One step of a decoder: past keys in, all keys out, and a mask over both."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x, past, mask, input):
        keys = torch.cat([past, self.k(x)], 1)
        scores = self.q(x) @ keys.mT  # of new and old keys
        weights = scores.masked_fill(~mask[:, None], -1e9).softmax(-1)
        y = self.dropout(weights @ keys) + input
        return {"y": y, "nothing": None, "linear": (keys, y[:, 1:]), "past": past, "last": y[:, -1]}


AXES = {"S": S, "B": B, "P": P, "E": Axis(min=8, opt=8, max=8)}
DIMS = {"mask": ("B", "P+S"), "input": ("E",), "past": ("B", "P"), "x": ("B", "S", "E")}
INPUTS = {
    "mask": torch.rand(2, 6, generator=torch.Generator().manual_seed(0)) > 0.3,
    "input": torch.randn(8),
    "past": torch.randn(2, 4, 8),
    "x": torch.randn(2, 2, 8),
}


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    module = Step()
    module.q.eval()
    return module, export_program(module, INPUTS, DIMS, AXES)


def test_names_and_axes_are_the_users(step):
    module, exported = step
    graph = exported.model.graph
    assert [value.name for value in graph.inputs] == list(exported.inputs) == list(INPUTS)
    assert dict(exported.outputs) == {
        "y": ("B", "S", 8),
        "linear_0": ("B", "P+S", 8),
        "linear_1": ("B", "S - 1", 8),
        "past_out": ("B", "P", 8),
        "last": ("B", 8),
    }
    shapes = {value.name: tuple(map(str, value.shape)) for value in (*graph.inputs, *graph.outputs)}
    assert shapes["mask"] == ("B", "P+S")
    assert shapes["x"] == ("B", "S", "8")
    assert shapes["input"] == ("8",)
    assert shapes["linear_0"] == ("B", "P+S", "8")
    assert shapes["linear_1"] == ("B", "S - 1", "8")
    assert not [name for each in shapes.values() for name in each if name.startswith("s")]
    onnx.checker.check_model(ir.to_proto(exported.model), full_check=True)
    assert [part.training for part in module.modules()] == [True, False, True, True]


@pytest.mark.parametrize("sizes", [(3, 9, 5), (1, 1, 0), (1, 2, 1), (8, 1, 32)])
def test_the_graph_is_the_module_at_every_size(step, sizes):
    module, exported = step
    inputs = draw_inputs(INPUTS, DIMS, {**dict(zip("BSP", sizes, strict=True)), "E": 8}, seed=2)
    with torch.no_grad():
        result = module.eval()(**inputs)
    want = [result["y"], *result["linear"], result["past"], result["last"]]
    got, (own, _) = run(exported.model, inputs), run_program(exported, inputs, mode=Float32Accumulation())
    assert list(got) == list(own) == list(exported.outputs)
    for name, tensor in zip(got, want, strict=True):
        np.testing.assert_allclose(got[name], tensor.numpy(), atol=1e-5)
        torch.testing.assert_close(own[name], tensor)


def test_sizes_that_pytorch_does_not_vouch_for_are_tried(step):
    assert "S" in step[1].unproven, "S-1 is 1 at S=2, which PyTorch takes apart"


def test_a_size_of_one_behind_an_axis_that_is_traced_at_its_largest_fixes_nothing():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.views = nn.Parameter(torch.randn(1, 2, 8))

        def forward(self, x):
            first, others = self.views[:, :1].expand(len(x), 1, 8), self.views[:, 1:]
            return x + torch.cat([first, others.expand(len(x), x.shape[1] - 1, 8)], 1)

    axes = {"B": Axis(min=1, opt=2, max=4), "V": Axis(min=1, opt=3, max=5)}
    module = Views().eval()
    exported = export_program(module, {"x": torch.randn(2, 3, 8)}, {"x": ("B", "V")}, axes)
    assert exported.fixed == {}
    for sizes in ((1, 2), (3, 5)):
        x = torch.randn(*sizes, 8)
        (got,) = run(exported.model, {"x": x}).values()
        np.testing.assert_allclose(got, module(x).detach().numpy(), atol=1e-6)


def test_a_node_says_its_line(step):
    _, report = fuse_attention(step[1].model)
    (place,) = {each.place for each in (*report.fused, *report.unfused)}
    file, _, line = place.rpartition(":")
    assert file == __file__
    assert "softmax(-1)" in Path(__file__).read_text(encoding="utf-8").splitlines()[int(line) - 1]


def test_an_output_may_have_the_name_of_another_value():
    class Takes(nn.Module):
        def forward(self, x):
            y = F.relu(x)
            return {"relu": y.exp(), "exp": y + 1}

    exported = export_program(Takes(), {"x": torch.randn(2, 3)}, {"x": ("B",)}, {"B": B})
    x = torch.tensor([[1.0, -1.0, 2.0]])
    got, (own, kept) = run(exported.model, {"x": x}), run_program(exported, {"x": x}, keep=["relu", "exp"])
    (inner,) = {value.name for node in exported.model.graph for value in node.outputs} - {"relu", "exp"}
    _, other = run_program(exported, {"x": x}, keep=[inner])
    for each in (got, own, kept):
        np.testing.assert_allclose(each["relu"], x.relu().exp(), rtol=1e-6)
        np.testing.assert_allclose(each["exp"], x.relu() + 1, rtol=1e-6)
    np.testing.assert_array_equal(other[inner], x.relu())


# -- names of outputs: no graph needed ------------------------------------------------------------------


Pair = namedtuple("Pair", "left right")


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x * 2, x * 3)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda a, b: a, ["output"]),
        (lambda a, b: (a, b), ["output", "output_1"]),
        (lambda a, b: [None, b], ["output_1"]),
        (lambda a, b: Pair(a, b), ["left", "right"]),
        (lambda a, b: {"a": a, "b": [a + 1, b]}, ["a", "b_0", "b_1"]),
        (lambda a, b: (a, {"keys": b}), ["output", "output_1_keys"]),
        (lambda a, b: {"x": a, "a b": b}, ["x_out", "a_b"]),
        (lambda a, b: {"a.b": a, "a b": b}, ["a_b", "a_b_2"]),
    ],
)
def test_outputs_are_named_by_what_holds_them(make, names):
    program = torch.export.export(Returns(make), (), {"x": torch.randn(2)}, strict=False)
    assert list(named_outputs(program, (), ["x"])) == names
    given = [f"mine_{index}" for index in range(len(names))]
    assert list(named_outputs(program, given, ["x"])) == given


@pytest.mark.parametrize("given", [["a"], ["a", "a"], ["a", "x"]])
def test_names_that_do_not_fit_are_refused(given):
    program = torch.export.export(Returns(lambda a, b: (a, b)), (), {"x": torch.randn(2)}, strict=False)
    with pytest.raises(ExportError, match="names of the outputs"):
        named_outputs(program, given, ["x"])


def test_a_hugging_face_output_keeps_its_keys():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    make = outputs.BaseModelOutputWithPooling
    module = Returns(lambda a, b: make(last_hidden_state=a, pooler_output=b))
    program = torch.export.export(module, (), {"x": torch.randn(2)}, strict=False)
    assert list(named_outputs(program, (), ["x"])) == ["last_hidden_state", "pooler_output"]


# -- sizes to trace at -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "shown"),
    [
        ({"B": B, "S": S}, (1, 1)),
        ({"B": B, "S": S}, (7, 7)),
        ({"B": Axis(min=1, opt=1, max=2), "S": Axis(min=1, opt=2, max=2)}, (2, 2)),
        ({"B": Axis(min=16, opt=16, max=20), "S": Axis(min=16, opt=16, max=17)}, (16, 16)),
        ({"B": B, "S": Axis(min=7, opt=7, max=7)}, (2, 7)),
        ({"B": Axis(min=0, opt=1, max=1), "S": S}, (1, 3)),
    ],
)
def test_axes_are_traced_at_different_sizes_of_two_or_more(axes, shown):
    sizes = trace_sizes({"x": torch.zeros(*shown, 5)}, {"x": ("B", "S")}, axes)
    assert list(sizes) == list(axes)
    assert len(set(sizes.values())) == 2
    for name, axis in axes.items():
        assert sizes[name] == axis.min or axis.is_dynamic
        assert sizes[name] >= max(axis.min, 2)
        assert sizes[name] <= max(axis.max, 3)


def test_the_sizes_of_the_example_come_first():
    sizes = trace_sizes({"x": torch.zeros(6, 24)}, {"x": ("B", "S")}, {"B": B, "S": S})
    assert sizes == {"B": 6, "S": 24}


# -- What PyTorch's exporter has no words for --------------------------------------------------------------


class ComplexRotation(nn.Module):
    """A rotary embedding in complex numbers, as Llama's first code has it."""

    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(64.0), 0.3 ** torch.arange(4))
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (4, 2)))
        rotated = pairs * self.rotation[: x.shape[1]][None]
        back = (rotated * self.rotation[: x.shape[1]].conj() + 1).unsqueeze(0).squeeze(0)
        return torch.view_as_real(rotated).flatten(2).to(x.dtype), back.abs(), back.real


class SharedHead(nn.Module):
    """One key and value head for all queries, which broadcasts."""

    def forward(self, x):
        q, k = x.unflatten(-1, (4, 2)).transpose(1, 2), x[:, None, :, :2]
        return nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)


class Flex(nn.Module):
    """flex_attention with a score modification and a mask that is made in `forward`."""

    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.1, 0.05]))

    def forward(self, x):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        q = x.unflatten(-1, (4, 2)).transpose(1, 2)
        mask = create_block_mask(
            lambda b, h, i, j: (i >= j) & (i - j < 3), None, None, x.shape[1], x.shape[1], device=x.device
        )
        return flex_attention(
            q, q, q, score_mod=lambda s, b, h, i, j: s - self.slopes[h] * (i - j).abs(), block_mask=mask
        )


class Branches(nn.Module):
    """Attentions in two branches, one of which is computed."""

    def forward(self, x):
        def attended(x, causal):
            attend, q = nn.functional.scaled_dot_product_attention, x.unflatten(-1, (4, 2)).transpose(1, 2)
            return attend(q, q, q, is_causal=causal) * attend(x, x, x).mean()

        return torch.cond(x.sum() > 0, lambda x: attended(x, True), lambda x: attended(x, False), (x,))


class NumberMinusIntegers(nn.Module):
    """A padding mask from integers, subtracted from a float."""

    def forward(self, x):
        return x + (1.5 - (x > 0).to(torch.int64)) + (1.5 - (x[..., :1] > 0).int()).to(x.dtype)


class WideNorm(nn.Module):
    """An RMSNorm with a float32 scale, as Gemma's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class Windows(nn.Module):
    """Attention with a fifth axis, of windows, and a check of all values."""

    def forward(self, x):
        x = x * torch._is_all_true(x < 100)
        q = torch.stack((x, 2 * x), 1).unflatten(-1, (4, 2)).transpose(2, 3)
        return nn.functional.scaled_dot_product_attention(q, q, q)


class FewerAndMoreAxes(nn.Module):
    """Attention of one head without an axis for it, and over windows, with all that else it takes."""

    def forward(self, x):
        attend, size = nn.functional.scaled_dot_product_attention, x.shape[1]
        near = torch.ones(size, size, dtype=torch.bool).tril(1)
        three = attend(x, 2 * x, x[..., :3], is_causal=True) + attend(x, x, x[..., 3:6], near)
        two = attend(x[0], x[-1], x[0], near, scale=0.3)
        windows = torch.stack((x, -x, 2 * x), 1).unflatten(-1, (2, 4)).transpose(2, 3)
        bias = x[:, None, None, :, :1] * x[:, None, None, None, :, 1]
        shared = windows[:, :1]
        return three, two, attend(windows, shared, shared, bias) + attend(windows, windows, windows, near)


class Parts(nn.Module):
    """Parts of a dynamic axis, by their number and by their size."""

    def forward(self, x):
        one, other = torch.cat((x, 2 * x), 1).chunk(2, dim=1)
        first, second, third = torch.cat((x, -x, other), -2).split(x.shape[1], dim=-2)
        return one - other, first * third.flip(1), second


class UnsafeParts(nn.Module):
    """The same by PyTorch's operators for parts that autograd does not follow."""

    def forward(self, x):
        one, other = torch.unsafe_chunk(torch.cat((x, 2 * x), 1), 2, dim=1)
        first, second = torch.unsafe_split(torch.cat((x, other), -2), x.shape[1], dim=-2)
        return one - other, first * second.flip(1)


class WrittenByMask(nn.Module):
    """Numbers and vectors, written where a mask is true."""

    def forward(self, x):
        x, padded = x * 2, x[..., 0] > 0
        x[padded] = 0
        x[:, padded[0]] = 1
        x = x.index_put((padded,), x[-1, 0] * 2 + 1)
        x[x > 1] = x.new_tensor([-1.0])
        return x


TRACED_AT_ONCE = [ComplexRotation, SharedHead, NumberMinusIntegers, Windows, FewerAndMoreAxes, WrittenByMask]
TRACED_AGAIN = [Parts, UnsafeParts]  # PyTorch refuses their ranges of sizes: three attempts fail before one


class Together(nn.Module):
    """Several of them, in a forward that takes its inputs by keyword, whatever their names are."""

    def __init__(self, makers):
        super().__init__()
        self.parts = nn.ModuleList(make() for make in makers)

    def forward(self, **inputs):
        return tuple(tensors_in([part(inputs["x"]) for part in self.parts]))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(partial(Together, TRACED_AT_ONCE), id="traced at once"),
        pytest.param(partial(Together, TRACED_AGAIN), id="traced again"),
        Flex,
        Branches,
        *(pytest.param(make, marks=pytest.mark.slow) for make in (*TRACED_AT_ONCE, *TRACED_AGAIN)),
    ],
)
def test_what_pytorch_does_not_write_by_itself_is_rewritten(make):
    torch.manual_seed(0)
    module, axes = make().eval(), {"B": Axis(min=1, opt=2, max=8), "S": Axis(min=1, opt=6, max=64)}
    if isinstance(module, Together):  # each by itself has two axes; one is quicker
        axes["B"] = Axis(min=2, opt=2, max=2)
    exported = export_program(module, {"x": torch.randn(2, 6, 8)}, {"x": ("B", "S")}, axes)
    if make is WrittenByMask:
        assert "NonZero" not in {node.op_type for node in exported.model.graph}
    for sizes in ((3, 9), (1, 1)):
        x = torch.randn(2 if isinstance(module, Together) else sizes[0], sizes[1], 8)
        with torch.no_grad():
            want = module(x=x)
        want = want if isinstance(want, tuple) else (want,)
        got, (oracle, _) = run(exported.model, {"x": x}), run_program(exported, {"x": x})
        for name, tensor in zip(got, want, strict=True):
            np.testing.assert_allclose(got[name], tensor.numpy(), atol=1e-5)
            assert oracle[name].dtype == torch.float64
            torch.testing.assert_close(oracle[name].float(), tensor)


@pytest.mark.parametrize("shown", [False, True])
def test_a_selection_of_open_order_is_in_order_unless_an_output_shows_it(shown, tmp_path):
    class Selected(nn.Module):
        def forward(self, x):
            chosen = x.sum(-1).topk(3, sorted=False)[1]
            best = x.gather(1, chosen[..., None].expand(-1, -1, 8))
            return best if shown else best.mean(1)

    torch.manual_seed(0)
    axes = {"B": Axis(min=1, opt=2, max=8), "S": Axis(min=6, opt=6, max=64)}
    exported = export_program(Selected(), {"x": torch.randn(2, 6, 8)}, {"x": ("B", "S")}, axes)
    (node,) = (node for node in exported.model.graph if node.op_type == "TopK")
    assert node.attributes.get_int("sorted", 1) == (not shown)
    node.attributes.add(ir.AttrInt64("sorted", 0))  # in a file, any order is right
    ir.save(exported.model, tmp_path / "selected.onnx")
    bundle = md.import_onnx(tmp_path / "selected.onnx", tmp_path / "bundle", golden=("min",))
    (node,) = (node for node in ir.load(bundle.model_path).graph if node.op_type == "TopK")
    assert node.attributes.get_int("sorted", 1) == 1


def test_a_norm_with_a_wider_scale_is_valid_onnx():
    module = WideNorm().half().eval()
    x, axes = torch.randn(2, 6, 8).half(), {"B": B}
    exported = export_program(module, {"x": x}, {"x": ("B",)}, axes)
    onnx.checker.check_model(ir.to_proto(exported.model), full_check=True)
    np.testing.assert_allclose(run(exported.model, {"x": x})["output"], module(x).detach().numpy(), atol=2e-3)


class Windows(nn.Module):
    """Pads transposed heads to whole windows: a reshape that copies only where something is padded."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        B, S, _ = x.shape
        more = -S % 4
        heads = (each.reshape(B, S, 2, 8).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        q, k, v = (F.pad(each, (0, 0, 0, more)).reshape(2 * B, (S + more) // 4, 4, 8) for each in heads)
        y = F.scaled_dot_product_attention(q, k, v).reshape(B, 2, S + more, 8)
        return y[:, :, :S].transpose(1, 2).reshape(B, S, 16)


@pytest.mark.slow
def test_a_reshape_that_copies_at_some_sizes_only():
    torch.manual_seed(0)
    module, example = Windows().eval(), {"x": torch.randn(2, 8, 16)}
    exported = export_program(module, example, {"x": ("B", "S")}, {"B": B, "S": S})
    for length in (5, 8, 13):
        drawn = {"x": torch.randn(2, length, 16)}
        with torch.no_grad():
            wanted = module(**drawn)
        (name,) = exported.outputs
        torch.testing.assert_close(run_program(exported, drawn, mode=Float32Accumulation())[0][name], wanted)
        np.testing.assert_allclose(run(exported.model, drawn)[name], wanted, atol=1e-5)


class LongTexts(nn.Module):
    """A decoder whose rotary embedding replaces its own frequencies in every call."""

    def __init__(self):
        super().__init__()
        from transformers import Phi3Config, Phi3Model

        rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 16}
        sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        rest = {"original_max_position_embeddings": 16, "rope_parameters": rope}
        self.model = Phi3Model(Phi3Config(**sizes, **tokens, **rest))

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).last_hidden_state


@pytest.mark.slow
def test_a_module_that_replaces_its_own_tensors():
    pytest.importorskip("transformers", reason="Transformers is not here")
    torch.manual_seed(0)
    module, example = LongTexts().eval(), {"ids": torch.randint(0, 50, (2, 8))}
    exported = export_program(module, example, {"ids": ("B", "S")}, {"B": B, "S": S})
    for length in (3, 16, 17, 40):
        drawn = {"ids": torch.randint(0, 50, (2, length))}
        with torch.no_grad():
            wanted = module(**drawn)
        (name,) = exported.outputs
        torch.testing.assert_close(run_program(exported, drawn, mode=Float32Accumulation())[0][name], wanted)


class Normalized(nn.Module):
    """Writes all of a buffer in every call, before it reads it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x):
        self.largest.copy_(x.abs().amax())
        return x / self.largest


def test_a_buffer_that_is_overwritten_before_it_is_read_is_no_state():
    example = {"x": torch.randn(2, 8)}
    exported = export_program(Normalized(), example, {"x": ("B", "S")}, {"B": B, "S": S})
    for length in (3, 9):
        drawn = {"x": torch.randn(2, length)}
        (name,) = exported.outputs
        wanted = drawn["x"] / drawn["x"].abs().amax()
        torch.testing.assert_close(run_program(exported, drawn, mode=Float32Accumulation())[0][name], wanted)
        np.testing.assert_allclose(run(exported.model, drawn)[name], wanted, rtol=1e-6)


class Frozen(dict):
    """A configuration that refuses to be changed, as those of diffusers do."""

    def clear(self):
        raise TypeError("frozen")


class Caches(nn.Module):
    """Keeps what it computed in containers of its own, one inside the other, as LeViT keeps its bias."""

    def __init__(self):
        super().__init__()
        self.weight, self.kept, self.seen = nn.Parameter(torch.randn(4)), {"cpu": {}}, []
        self.config = Frozen(size=4)

    def forward(self, x):
        if not self.seen:
            self.seen.append(self.weight * 3)
        bias = self.kept["cpu"].setdefault("bias", self.weight * 2)
        return x * bias + self.seen[0]


def test_a_module_that_fills_its_own_containers():
    torch.manual_seed(0)
    module = Caches().eval()
    exported = export_program(module, {"x": torch.randn(2, 4)}, {"x": ("B", None)}, {"B": B})
    drawn = {"x": torch.randn(3, 4)}
    (name,) = exported.outputs
    np.testing.assert_allclose(run(exported.model, drawn)[name], module(**drawn).detach(), atol=1e-5)


class Normed(nn.Module):
    """Batch norms behind all that they are folded into."""

    def __init__(self):
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 8, 3, bias=False), nn.ConvTranspose2d(8, 6, 2, groups=2)
        self.linear = nn.Linear(6, 8)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(6), nn.BatchNorm1d(8)])
        for each in self.norms:
            each.running_mean.normal_(), each.running_var.uniform_(0.2, 1.7)
            nn.init.uniform_(each.weight, 0.5, 1.5), nn.init.normal_(each.bias)

    def forward(self, x):
        y = self.norms[0](self.conv(x))
        y = self.norms[1](self.up(y))
        return self.norms[2](self.linear(y.mean((2, 3))))


@pytest.mark.slow
def test_weights_with_a_batch_norm_in_them_are_rounded_once():
    torch.manual_seed(0)
    module = Normed().half().eval()
    exported = export_program(module, {"x": torch.randn(4, 3, 8, 8).half()}, {"x": ("B",)}, {"B": B})
    assert "BatchNormalization" not in {node.op_type for node in exported.model.graph}
    exact, wanted = copy.deepcopy(module).double(), []
    for layer, norm in zip((exact.conv, exact.up, exact.linear), exact.norms, strict=True):
        factor = norm.weight / (norm.running_var + norm.eps).sqrt()
        groups = 2 if layer is exact.up else 8  # whose outputs are the second axis, in groups
        weight = layer.weight.unflatten(0, (groups, -1))
        across = factor.view(groups, 1, -1, *[1] * (weight.dim() - 3))
        bias = 0.0 if layer.bias is None else layer.bias
        wanted.append((weight * across).flatten(0, 1))
        wanted.append((bias - norm.running_mean) * factor + norm.bias)
    nodes = [node for node in exported.model.graph if node.op_type in ("Conv", "ConvTranspose", "Gemm")]
    got = [value.const_value.numpy() for node in nodes for value in node.inputs[1:]]
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs.detach().half().numpy())


def test_convolutions_without_names_that_share_a_weight_are_folded_each_by_itself():
    rng = np.random.default_rng(0)
    constants = {"w": rng.standard_normal((3, 3, 1))}
    nodes, value = [], "x"
    for at in range(3):
        norm = [f"{part}{at}" for part in ("gamma", "beta", "mean", "variance")]
        constants |= {name: rng.uniform(0.5, 1.5, 3) for name in norm}
        nodes.append(onnx.helper.make_node("Conv", [value, "w"], [f"c{at}"]))
        nodes.append(onnx.helper.make_node("BatchNormalization", [f"c{at}", *norm], [value := f"n{at}"]))
    weights = [onnx.numpy_helper.from_array(array.astype(np.float32), n) for n, array in constants.items()]
    ends = [onnx.helper.make_tensor_value_info(name, 1, [2, 3, 5]) for name in ("x", value)]
    graph = onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    opset = onnx.helper.make_opsetid("", 23)
    model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10))
    x = {"x": torch.randn(2, 3, 5)}
    before = run(model, x)
    fold_batch_norms(model)
    assert {node.op_type for node in model.graph} == {"Conv"}
    np.testing.assert_allclose(run(model, x)[value], before[value], rtol=1e-5, atol=1e-6)


def test_only_the_operators_of_a_program_are_described(monkeypatch):
    """By itself PyTorch describes five hundred of them for each export, and lists them all fifty times."""
    counted, registry = Counter(), _registration.ONNXRegistry
    made = registry.from_torchlib  # which the session keeps
    monkeypatch.setattr(registry, "from_torchlib", staticmethod(getattr(made, "__wrapped__", made)))

    def count(owner, name):
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (counted.update([name]), own(*given))[1])

    count(_registration.OnnxDecompMeta, "__post_init__")
    count(export_utils, "_materialize_cpp_cia_ops")
    program = onnx_program(nn.Linear(2, 2).eval(), ExportError, kwargs={"input": torch.ones(1, 2)})
    assert [node.op_type for node in program.model.graph] == ["Gemm"]
    assert counted["_materialize_cpp_cia_ops"] == 1
    assert 0 < counted["__post_init__"] < 10
