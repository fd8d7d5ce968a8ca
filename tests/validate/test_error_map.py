"""Errors that are planted in one head or at one position are seen there and nowhere else."""

import msgspec
import numpy as np
import onnx_ir as ir
import pytest
from golden_made import made_case

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.errors import DeployError
from mha_deploy.graph.file import load_graph
from mha_deploy.runtime import open_runner
from mha_deploy.validation.error_map import OutputProjection, heatmap, output_projection

RNG = np.random.default_rng(0)
HQ, D = 4, 16
WIDTH = HQ * D
W = RNG.standard_normal((WIDTH, 96)) / 8


def planted(weight, *, head=None, position=None, S=20, size=0.1, bias=0.0):
    """A case y = h·W + b, and its result with an error in the heads."""
    heads = RNG.standard_normal((2, S, HQ, D))
    wrong = heads.copy()
    where = (
        slice(None),
        slice(None) if position is None else position,
        slice(None) if head is None else head,
    )
    wrong[where] += size * RNG.standard_normal(wrong[where].shape)
    truth, got = (h.reshape(2, S, -1) @ weight + bias for h in (heads, wrong))
    return made_case({"output": truth}), got


def values_of(heat):
    return np.array(heat.values, float)


# -- heads -------------------------------------------------------------------------------------


def test_an_error_in_one_head_is_one_row():
    head = 1
    case, got = planted(W, head=head)
    heat = heatmap("b", case, "output", got, OutputProjection(weight=W, heads=HQ))
    assert (heat.rows, heat.columns, heat.bin, values_of(heat).shape) == ("head", "position", 1, (HQ, 20))
    others = [row for row in range(HQ) if row != head]
    assert values_of(heat)[head] == pytest.approx(0.1, rel=0.5)
    assert values_of(heat)[others].max() < 1e-6


def test_an_error_at_one_position_is_one_column():
    case, got = planted(W, position=7)
    values = values_of(heatmap("b", case, "output", got, OutputProjection(weight=W, heads=HQ)))
    assert values[:, 7].min() > 0.05
    assert np.delete(values, 7, axis=1).max() < 1e-6


def test_the_error_is_relative_to_the_heads_without_the_bias():
    bias = np.full(96, 100.0)
    case, got = planted(W, head=1, bias=bias)
    heat = heatmap("b", case, "output", got, OutputProjection(weight=W, heads=HQ, bias=bias))
    assert np.sqrt(np.mean(values_of(heat)[1] ** 2)) == pytest.approx(0.1, rel=0.1)


def test_many_positions_are_binned():
    case, got = planted(W, head=2, position=slice(290, 300), S=300)
    heat = heatmap("b", case, "output", got, OutputProjection(weight=W, heads=HQ))
    assert (heat.bin, values_of(heat).shape) == (3, (HQ, 100))
    assert np.argwhere(values_of(heat) > 1e-6)[:, 1].tolist() == [96, 97, 98, 99]
    # One of three positions is wrong in the first of these columns: RMS is 1/√3 of that of the others.
    assert values_of(heat)[2, 96] == pytest.approx(values_of(heat)[2, 97:].mean() / np.sqrt(3), rel=0.4)


def test_a_last_bin_that_is_not_full_is_not_diluted():
    oracle = np.ones((1, HQ, 129, 5))
    heat = heatmap("b", made_case({"weights": oracle}), "weights", oracle + 0.25, None)
    assert (heat.bin, values_of(heat).shape) == (2, (HQ, 65))
    assert values_of(heat) == pytest.approx(0.25)


def test_weights_have_their_heads_themselves():
    oracle = RNG.random((2, HQ, 10, 12))
    got = oracle.copy()
    got[:, 3, 5] *= 1.5
    heat = heatmap("b", made_case({"weights": oracle}), "weights", got, None)
    assert (heat.rows, values_of(heat).shape, heat.note) == ("head", (HQ, 10), "")
    assert np.argwhere(values_of(heat)).tolist() == [[3, 5]]


# -- where heads cannot be distinguished ----------------------------------------------------------

SQUARE = RNG.standard_normal((WIDTH, WIDTH))


@pytest.mark.parametrize(
    ("projection", "why"),
    [
        (None, "no projection of heads feeds it"),
        (OutputProjection(weight=W.T, heads=6), "the heads together (96) are wider than the output (64)"),
        (
            OutputProjection(weight=np.zeros((WIDTH, WIDTH)), heads=HQ),
            "the output projection is nearly singular",
        ),
        (
            OutputProjection(weight=SQUARE * np.r_[1e-9, np.ones(WIDTH - 1)][:, None], heads=HQ),
            "the output projection is nearly singular",
        ),
        (
            OutputProjection(weight=np.zeros((64, 2049)), heads=HQ),
            "the output projection is larger than 2048",
        ),
    ],
)
def test_rows_are_groups_of_channels_where_there_are_no_heads(projection, why):
    oracle = RNG.standard_normal((2, 10, 96))
    got = oracle.copy()
    got[:, 4, 24:36] += 0.1  # the third of eight groups
    heat = heatmap("b", made_case({"output": oracle}), "output", got, projection)
    assert heat.rows == "channel group"
    assert heat.note == f"rows are groups of output channels: {why}"
    assert values_of(heat).shape == (8, 10)
    assert np.argwhere(values_of(heat)).tolist() == [[2, 4]]
    assert values_of(heat)[2, 4] == pytest.approx(0.1, rel=0.1)


def test_a_width_that_eight_does_not_divide_has_fewer_groups():
    oracle = RNG.standard_normal((1, 3, 36))
    assert values_of(heatmap("b", made_case({"output": oracle}), "output", oracle, None)).shape == (4, 3)


def test_how_much_rounding_is_amplified_is_reported():
    orthogonal = np.linalg.qr(SQUARE)[0]
    case, got = planted(orthogonal)
    assert OutputProjection(weight=orthogonal, heads=HQ).amplification == pytest.approx(1.0)
    assert (
        "1.0 times" in heatmap("b", case, "output", got, OutputProjection(weight=orthogonal, heads=HQ)).note
    )
    # The claim itself: noise on the output of a mixing projection looks larger by this factor.
    projection = OutputProjection(weight=SQUARE, heads=HQ)
    truth = RNG.standard_normal((8, 64, WIDTH)) @ SQUARE
    noise = 1e-3 * np.sqrt(np.mean(truth**2)) * RNG.standard_normal(truth.shape)
    values = values_of(heatmap("b", made_case({"output": truth}), "output", truth + noise, projection))
    assert np.sqrt(np.mean(values**2)) == pytest.approx(1e-3 * projection.amplification, rel=0.1)


# -- what is written ---------------------------------------------------------------------------


def test_the_map_is_plain_json_and_holes_are_null():
    case, got = planted(W)
    got[0, 3, 5] = np.nan
    heat = heatmap("ort 1", case, "output", got, OutputProjection(weight=W, heads=HQ))
    data = msgspec.to_builtins(heat)
    assert set(data) == {"runtime", "engine", "case", "output", "rows", "columns", "values", "bin", "note"}
    assert (data["runtime"], data["case"], data["output"]) == ("ort 1", "made", "output")
    assert [row[3] for row in data["values"]] == [None] * HQ
    assert all(isinstance(x, float) for row in data["values"] for x in [*row[:3], *row[4:]])


def test_another_shape_is_refused():
    case, got = planted(W)
    with pytest.raises(DeployError, match="output cannot be mapped"):
        heatmap("b", case, "output", got[:, :-1], None)


def test_a_truth_of_zeros_is_mapped_absolutely():
    zeros = np.zeros((1, 2, 8))
    heat = heatmap("b", made_case({"output": zeros}), "output", zeros + 0.5, None)
    assert values_of(heat) == pytest.approx(0.5)


# -- real graphs -------------------------------------------------------------------------------


def in_ort(bundle, model, name="odd"):
    case = next(case for case in golden_cases(bundle) if case.name == name)
    with open_runner("ort-cpu", model) as runner:
        got = runner.run(case.inputs)["output"]
    return values_of(heatmap("ort", case, "output", got, output_projection(load_graph(bundle.model_path))))


def with_scores_of_one_head_scaled(model, head):
    """A copy in which one head's queries, and so its scores, are half as large again."""
    copy = model.clone()
    for name in ("q.weight.T", "q.bias"):
        value = copy.graph.initializers[name]
        array = value.const_value.numpy().copy()
        array[..., head * D : (head + 1) * D] *= 1.5
        value.const_value = ir.Tensor(array, name=name)
    return copy


def test_scores_scaled_in_one_head_light_up_that_head(bundles):
    bundle, head = bundles("tiny-mha", "fp32"), 3
    model = load_graph(bundle.model_path)
    values = in_ort(bundle, with_scores_of_one_head_scaled(model, head))
    others = [row for row in range(HQ) if row != head]
    assert values[head].min() > 100 * values[others].max()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["tiny-gqa", "tiny-sparse-heads", "tiny-head-mix", "tiny-weights"])
def test_the_projection_of_a_graph_is_found(bundles, name):
    model = load_graph(bundles(name).model_path)
    projection = output_projection(model)
    assert projection.heads == HQ
    assert (projection.weight == model.graph.initializers["o.weight.T"].const_value.numpy()).all()
    assert (projection.bias == model.graph.initializers["o.bias"].const_value.numpy()).all()


def test_an_mlp_is_no_projection_of_heads():
    text = """<ir_version: 10, opset_import: ["": 23]>
    mlp (float[2,5,2] x) => (float[2,5,2] output) <float[2,2] w = {1, 2, 3, 4}> {
        y = Attention <q_num_heads = 2, kv_num_heads = 2> (x, x, x)
        h = MatMul(y, w)
        a = Relu(h)
        output = MatMul(a, w)
    }"""
    assert output_projection(ir.from_onnx_text(text)) is None
    assert output_projection(ir.from_onnx_text(text.replace("MatMul(a, w)", "MatMul(y, w)"))).heads == 2
