"""What cannot be exported is said in a few words, with the axis and the line of the user's source."""

import inspect
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import mha_deploy as md
from mha_deploy.errors import ExportError
from mha_deploy.exporter import explain
from mha_deploy.exporter.program import export_program
from mha_deploy.model.spec import Axis
from mha_deploy.runtime.child import isolation

AXES = {"B": Axis(min=1, opt=2, max=8), "S": Axis(min=1, opt=6, max=64)}
X = {"x": torch.randn(2, 6, 4)}


def line_of(text):
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (line,) = [number for number, each in enumerate(lines, 1) if each.strip() == text]
    return f"{Path(__file__).name}:{line}"


class OneSize(nn.Module):
    def forward(self, x):
        count = int(x.shape[1])  # a number from here on
        return x * count


class OneLength(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mix", torch.randn(6, 6))

    def forward(self, x):
        return x.transpose(1, 2) @ self.mix  # of one length


class EvenSizes(nn.Module):
    def forward(self, x):
        B, S, E = x.shape
        return x.view(B, S // 2, 2, E)  # half of them


class Rounds(nn.Module):
    def forward(self, x):
        for at in range(60):
            x = x + x[:, :1] * at  # again and again
        return x


class Short(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.randn(32, 4))

    def forward(self, x):
        return x + self.positions[: x.shape[1]]  # not more than there are


class AsksData(nn.Module):
    def forward(self, x):
        if x.sum() > 0:  # hangs on the data
            return x
        return -x


class Wrong(nn.Module):
    def forward(self, x):
        return x + x.transpose(0, 1)  # batch and length are two things


class UnsafeParts(nn.Module):
    def forward(self, x):
        return torch.cat(torch.unsafe_split(x, x.shape[1] // 2 + 1, 1), 1)  # parts of a computed size


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x):
        self.calls.add_(1)
        return x + self.calls


class WritesInput(nn.Module):
    def forward(self, x):
        return x.mul_(2) + 1


class ReturnsNumber(nn.Module):
    def forward(self, x):
        return x * 2, x.shape[1]


class ReturnsObject(nn.Module):
    def forward(self, x):
        return Result(x * 2)


class Result:
    def __init__(self, x):
        self.x = x


class Ignores(nn.Module):
    def forward(self, x, unused, other):
        return x * 2 + 0 * other.shape[0]


class OtherWhenShort(nn.Module):
    def forward(self, x):
        return x.cumsum(1) if x.shape[1] > 3 else x * 2


class FailsWhenShort(nn.Module):
    def forward(self, x):
        return x.unfold(1, 3, 1).sum(-1)


CASES = {
    EvenSizes: ("every size of S", "(S % (S // 2)) == 0", "return x.view(B, S // 2, 2, E)  # half of them"),
    Short: (
        "every size of S",
        "S <= 32",
        "return x + self.positions[: x.shape[1]]  # not more than there are",
    ),
    AsksData: ("could not trace", "data-dependent", "if x.sum() > 0:  # hangs on the data"),
    Wrong: (
        "does not run on its example",
        "size of tensor a (S) must match the size of tensor b (B)",
        "return x + x.transpose(0, 1)  # batch and length are two things",
    ),
    Counts: ("changes its own inputs or buffers", "buffer calls", None),
    WritesInput: ("changes its own inputs or buffers", "input x", None),
    ReturnsNumber: ("not a tensor", "output_1", None),
    ReturnsObject: ("not made of tensors", "Result", None),
    OtherWhenShort: ("something else at its smaller sizes", "S=1", None),
    FailsWhenShort: ("does not run at the smallest sizes", "S=1", None),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_module_that_cannot_be_exported_is_explained(make, capfd):
    what, got, line = CASES[make]
    with pytest.raises(ExportError) as caught:
        export_program(make(), X, {"x": ("B", "S")}, AXES)
    assert what in caught.value.what
    assert got in caught.value.got
    assert len(caught.value.got) < 500
    if line is not None:
        assert f"{line_of(line)}: " in caught.value.got
    assert capfd.readouterr().err == ""


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(24, 4), nn.LayerNorm(4)

    def forward(self, x, tokens):
        return self.norm(x) + self.table(tokens)


def test_an_example_that_the_module_does_not_take_is_named_not_the_operators():
    fitting = {"x": X["x"], "tokens": torch.ones(2, 6, dtype=torch.int64)}
    dims = dict.fromkeys(fitting, ("B", "S"))
    wrong = {"tokens": torch.ones(2, 6), "x": torch.ones(2, 6, 5)}
    words = {"tokens": ("int64", "input tokens"), "x": ("[2, 6, 5]", "tokens int64")}
    for name, tensor in wrong.items():
        with pytest.raises(ExportError) as caught:
            export_program(Tokens(), {**fitting, name: tensor}, dims, AXES)
        assert "example" in caught.value.what
        assert all(word in caught.value.hint for word in words[name])


def test_a_size_that_python_takes_for_a_number_still_varies():
    exported = export_program(OneSize(), X, {"x": ("B", "S")}, AXES)
    assert exported.outputs == {"output": ("B", "S", 4)}
    assert not exported.fixed


def test_an_axis_that_cannot_vary_is_fixed_and_the_note_names_the_line():
    exported = export_program(OneLength(), X, {"x": ("B", "S")}, AXES)
    assert exported.fixed == {"S": Axis(min=6, opt=6, max=6)}
    assert exported.outputs == {"output": ("B", 4, 6)}
    (note,) = exported.notes
    assert note.startswith("S=6 only")
    assert note.endswith("traced at S=6, it is a constant")
    assert line_of("return x.transpose(1, 2) @ self.mix  # of one length") in note


def test_inputs_that_nothing_hangs_on_are_named():
    inputs = {
        name: torch.randn(2, 6) for name in inspect.signature(Ignores.forward).parameters if name != "self"
    }
    with pytest.raises(ExportError, match="does not depend on every input") as caught:
        export_program(Ignores(), inputs, dict.fromkeys(inputs, ("B", "S")), AXES)
    assert caught.value.got == "unused, other"


def test_a_module_is_left_as_it_was_also_after_a_failure():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), AsksData())
    module[1].eval()
    with pytest.raises(ExportError):
        export_program(module, {"input": X["x"]}, {"input": ("B", "S")}, AXES)
    assert [each.training for each in module.modules()] == [True, True, False, True]


@pytest.fixture
def limits(monkeypatch):
    """A function that sets the time limit, and the seconds that a loop may always take."""

    def set_limits(limit_s, least_s):
        monkeypatch.setattr(isolation, "limit_s", limit_s)
        monkeypatch.setattr(explain.WatchedLoops, "_LEAST_S", least_s)

    return set_limits


def test_a_loop_that_takes_long_to_unroll_is_refused_with_its_line(limits):
    limits(12, 0.1)  # a tenth of a second for what is mostly a loop
    with pytest.raises(ExportError) as caught:
        export_program(Rounds(), X, {"x": ("B", "S")}, AXES)
    assert line_of("x = x + x[:, :1] * at  # again and again") in caught.value.got


def test_a_short_limit_for_runtimes_leaves_time_for_a_loop(monkeypatch):
    monkeypatch.setattr(isolation, "limit_s", 1.0)
    x = torch.zeros(2)
    with explain.WatchedLoops():
        for _ in range(5000):
            x = x + 1
    assert x.tolist() == [5000, 5000]


@pytest.mark.slow
def test_what_pytorch_does_for_itself_is_no_loop_of_the_user(limits):
    limits(0.0, 0.0)
    model = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    inputs = {"src": torch.randn(2, 6, 8)}
    assert export_program(model, inputs, {"src": ("B", "S")}, AXES).outputs == {"output": ("B", "S", 8)}


def test_a_crash_of_the_optimizer_is_an_export_error_with_the_line():
    # As PyTorch traced it; `export_program` writes these parts as slices first.
    program = torch.export.export(UnsafeParts(), (), X, dynamic_shapes={"x": {1: torch.export.Dim.AUTO}})
    explained = partial(explain.translation_error, program=program)
    with pytest.raises(ExportError) as caught:
        explain.onnx_program(program, explained, kwargs=X, opset_version=23)
    line = "return torch.cat(torch.unsafe_split(x, x.shape[1] // 2 + 1, 1), 1)  # parts of a computed size"
    assert line_of(line) in caught.value.got


class Positions(nn.Module):
    """As in RoBERTa, the first position may be another than 0."""

    def __init__(self, first=0):
        super().__init__()
        self.first, self.positions = first, nn.Embedding(24, 4)

    def forward(self, x):
        return x + self.positions(self.first + torch.arange(x.shape[1]))


@pytest.mark.parametrize(("first", "precision"), [(0, "auto"), (0, "fp16"), (2, "auto")])
def test_axes_beyond_a_table_of_positions_are_explained(tmp_path, first, precision):
    inputs = {"x": md.Example(X["x"], "B", "S")}
    model = md.Deployable(module=Positions(first), inputs=inputs, axes={"B": "1:2:4", "S": "1:8:64"})
    with pytest.raises(ExportError) as caught:
        md.export(model, tmp_path / "out", precision=precision)
    assert "positions" in caught.value.got
    assert f"1:{24 - first}:{24 - first}" in caught.value.hint
    assert not (tmp_path / "out").exists()


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.types, self.words = nn.Embedding(2, 4), nn.Embedding(30, 4)

    def forward(self, ids):
        return self.words(ids) + self.types(torch.zeros_like(ids))


class Listed(Words):
    def forward(self, ids):
        return self.words.weight[ids] + self.types.weight[0]


@pytest.mark.parametrize("module", [Words(), Listed()], ids=lambda module: type(module).__name__)
def test_numbers_beyond_a_table_are_not_blamed_on_sizes(tmp_path, module):
    inputs = {"ids": md.Example(torch.full((1, 4), 70), "B", "S")}
    model = md.Deployable(module=module, inputs=inputs, axes={"B": "1", "S": "1:4:4"})
    with pytest.raises(ExportError) as caught:
        md.export(model, tmp_path / "out", precision="fp32")
    assert "types" not in caught.value.got
    assert "sizes" not in caught.value.hint
    if type(module) is Words:
        for part in ("ids", "70", "words", "30 rows"):
            assert part in f"{caught.value.what} {caught.value.got}"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_a_module_that_needs_more_memory_is_not_at_fault(error):
    class Large(nn.Module):
        def forward(self, x):
            raise error

    inputs, refusal = {"x": torch.zeros(2)}, ExportError("The trace failed.", hint="another")
    assert explain.explain_example(refusal, Large(), inputs) is refusal
    with pytest.raises(type(error)):
        explain.run_explained(Large(), inputs, "its sizes", hint="others")
