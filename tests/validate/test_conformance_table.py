import msgspec
import numpy as np
import pytest
import torch
from mask_runtimes import MISTAKES, NumpyRunner
from rtx_engines import build_rtx
from torch.nn.attention.bias import causal_lower_right

from mha_deploy.errors import BackendUnavailable
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.rules import target_from
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.runtime import open_runner
from mha_deploy.validation.conformance import (
    CASES,
    LOWER_RIGHT,
    NOWHERE,
    MaskCase,
    MaskInput,
    conformance_table,
    draw_trial,
    graph_column,
    mask_columns,
    torch_column,
)

BY_NAME = {case.name: case for case in CASES}
FP16, BF16, FP32 = (PRECISIONS[name] for name in ("fp16", "bf16", "fp32"))
RTX = target_from("tensorrt-rtx", "1.7.1", "8.9")
TRT_86 = target_from("tensorrt", "8.6.1", "9.0")
TRT_1014 = target_from("tensorrt", "10.14.1", "9.0")


def shown(cell):
    """A verdict in one line: its status, the error of a wrong one, and the detail."""
    error = "" if cell.status != "wrong" or cell.error is None else f" ({cell.error:.2g})"
    return f"{cell.status}{error}" + (f": {cell.detail}" if cell.detail else "")


def in_ort(model):
    return open_runner("ort-cpu", model)


def in_reference(model):
    return open_runner("onnx-reference", model)


def named(*names):
    return [BY_NAME[name] for name in names]


def column_of(column, precision=FP16, cases=CASES, seed=0):
    """The only column of a table, by case."""
    table = conformance_table({"it": column}, precision, cases=cases, seed=seed)
    return {row.case: row.cells["it"] for row in table.rows}


def unusual(cells):
    """The cells that are not simply right."""
    return {name: (cell.status, cell.detail) for name, cell in cells.items() if shown(cell) != "conforms"}


# -- what the runtimes do ------------------------------------------------------------------------------

SWALLOWED = ("conforms", "averages all keys under -1e4, by rounding")
KEPT = ("conforms", "keeps the scores under -1e4")
UPPER_LEFT = ("conforms", "upper-left")
FIRST_ROW = ("wrong", "every query attends to the keys of the first one")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("path", "precision", "sentinel"),
    [
        ("plain", FP16, SWALLOWED),
        ("plain", BF16, SWALLOWED),
        ("plain", FP32, KEPT),
        ("sdpa", FP16, KEPT),
        ("sdpa", BF16, KEPT),
        ("sdpa", FP32, KEPT),
    ],
    ids=[f"{path}-{name}" for path in ("plain", "sdpa") for name in ("fp16", "bf16", "fp32")],
)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_pytorch_conforms(path, precision, sentinel):
    cells = column_of(torch_column(path), precision)
    assert unusual(cells) == {"fully-masked-sentinel": sentinel, "own-causal": UPPER_LEFT}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("precision", [FP16, FP32], ids=lambda precision: precision.name)
def test_onnx_runtime_conforms_or_refuses(precision):
    cells = column_of(graph_column(in_ort, "onnx"), precision)
    refused = {name: cells.pop(name) for name in ("broadcast-queries", "causal-broadcast")}
    assert unusual(cells) == {"fully-masked-sentinel": KEPT, "own-causal": UPPER_LEFT}
    for cell in refused.values():
        assert cell.status == "refused"
        assert "inconsistent q_sequence_length (between attn_mask and Q)" in cell.detail


def test_onnx_runtimes_own_operators_conform():
    cells = column_of(graph_column(in_ort, "contrib"))
    assert unusual(cells) == {
        "fully-masked-sentinel": KEPT,
        "own-causal": (
            "refused",
            "The contrib dialect writes causal as a mask: the runtime's own is not used.",
        ),
    }


def test_a_lowering_that_refuses_a_case_is_heard():
    wide = MaskCase(name="wide", about="", S=24, D=264, mask=MaskInput(pattern="padding"))
    cells = column_of(graph_column(in_ort, "plugin"), FP16, cases=[wide])
    assert cells["wide"].status == "refused"
    refusal = "The plugin dialect does not support head size above 256 (node 'wide')."
    assert cells["wide"].detail.startswith(refusal)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("precision", [FP16, BF16], ids=lambda precision: precision.name)
def test_onnx_reference_misplaces_causal_under_a_mask_of_one_row(precision):
    cells = column_of(graph_column(in_reference, "onnx"), precision)
    assert unusual(cells) == {
        "fully-masked-sentinel": KEPT,
        "own-causal": UPPER_LEFT,
        "causal-broadcast": FIRST_ROW,
    }
    assert cells["causal-broadcast"].error > 0.5


def test_onnx_runtime_has_no_bfloat16_and_is_here_all_the_same():
    cells = column_of(graph_column(in_ort, "contrib"), BF16, cases=named("bool-mask", "fully-masked-bool"))
    assert {cell.status for cell in cells.values()} == {"refused"}
    assert all("no CPU kernel" in cell.detail for cell in cells.values())


# -- the oracle ----------------------------------------------------------------------------------------


@pytest.mark.slow  # others conform above
@pytest.mark.parametrize(
    ("precision", "seed"), [(FP16, 0), (BF16, 1), (FP32, 2)], ids=["fp16", "bf16", "fp32"]
)
def test_a_runtime_written_from_the_specification_conforms(precision, seed):
    cells = column_of(graph_column(NumpyRunner, "onnx"), precision, seed=seed)
    assert unusual(cells) == {"fully-masked-sentinel": KEPT, "own-causal": UPPER_LEFT}
    assert all(0 < cell.share < 0.6 for cell in cells.values())
    assert all(0 < cell.error < 2 * precision.roundoff or precision == FP32 for cell in cells.values())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_oracle_is_pytorchs_float64(case):
    trial = draw_trial(case, FP32, 0)
    q, k, v = (
        torch.from_numpy(trial.arrays[role].astype(np.float64)).unflatten(-1, (heads, -1)).transpose(1, 2)
        for role, heads in (("q", case.Hq), ("k", case.Hkv), ("v", case.Hkv))
    )
    bias = torch.zeros(case.B, case.Hq, case.S, case.T, dtype=torch.float64)
    if case.mask is not None:
        mask = torch.from_numpy(trial.arrays["mask"])
        bias = bias.masked_fill(~mask, -torch.inf) if case.mask.kind == "bool" else bias + mask
    if case.is_causal:
        bias = bias.masked_fill(~torch.ones(case.S, case.T, dtype=torch.bool).tril(), -torch.inf)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, enable_gqa=True
    ).nan_to_num(0.0)
    np.testing.assert_allclose(trial.exact, wanted.numpy(), rtol=1e-9, atol=1e-12)


def test_the_lower_right_corner_is_pytorchs():
    trial = draw_trial(BY_NAME["lower-right"], FP32, 0)
    q, k, v = (torch.from_numpy(trial.heads(trial.arrays[role]).astype(np.float64)) for role in "qkv")
    corner = causal_lower_right(trial.case.S, trial.case.T)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=corner)
    np.testing.assert_allclose(trial.exact, wanted.numpy(), rtol=1e-9, atol=1e-12)
    own = trial.result(mask=None, causal=LOWER_RIGHT)
    np.testing.assert_array_equal(trial.exact, own)


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=list(PRECISIONS))
def test_the_sentinel_swallows_every_score_or_none(precision):
    trial = draw_trial(BY_NAME["fully-masked-sentinel"], precision, 0)
    shifted = trial.shifted
    assert shifted.sum() == 2 * 2 * 5
    q, k = (trial.heads(trial.arrays[role].astype(np.float64)) for role in "qk")
    scores = q @ k.swapaxes(-1, -2) * trial.case.scale
    assert 1 < np.abs(scores).max() < 4  # numbers near 1e4 are 8 apart in FP16, 64 in BF16
    averaged = (trial.rounded - trial.averaged.astype(precision.numpy))[shifted]
    assert (np.abs(averaged.astype(np.float64)).max() < 1e-2) == (precision != FP32)


def test_inputs_come_from_the_seed_and_the_name_alone():
    case = BY_NAME["additive-mask"]
    first, again = (draw_trial(case, FP16, 3).arrays for _ in range(2))
    assert all((first[role] == again[role]).all() for role in ("q", "k", "v", "mask"))
    assert not (first["q"] == draw_trial(case, FP16, 4).arrays["q"]).all()
    assert not (first["q"] == draw_trial(BY_NAME["bool-mask"], FP16, 3).arrays["q"]).all()


# -- runtimes that are wrong on purpose ------------------------------------------------------------------

CAUSAL = {case.name for case in CASES if case.is_causal}
MASKED = {case.name for case in CASES if case.mask is not None}
BOOLEAN = {name for name in MASKED if BY_NAME[name].mask.kind == "bool"}
ADDITIVE = MASKED - BOOLEAN
CLOSED = {"fully-masked-bool", "fully-masked-inf", "causal-left-padding"}
UNEQUAL = {name for name in CAUSAL if BY_NAME[name].S != BY_NAME[name].T}
NUMBERS = {"additive-mask", "causal-additive-mask"}

CAUGHT = {
    "causal from the lower right": {name: "causal starts in the lower right corner" for name in UNEQUAL},
    "causal ignored": {name: "causal is ignored" for name in CAUSAL},
    "causal off by one": dict.fromkeys(CAUSAL, "out of budget: relative_l2, worst_vector, max_abs, gain"),
    "causal of the first query": dict.fromkeys(CAUSAL, FIRST_ROW[1]),
    "mask ignored": dict.fromkeys(MASKED, "the mask is ignored"),
    "mask upside down": dict.fromkeys(BOOLEAN, "the mask is inverted"),
    "boolean mask added": dict.fromkeys(BOOLEAN, "the boolean mask is added as 0 and 1"),
    "additive mask as boolean": dict.fromkeys(ADDITIVE, "the additive mask is read as boolean"),
    "additive mask only where zero": {
        **dict.fromkeys(NUMBERS, "only whether the mask is 0 counts"),
        "fully-masked-sentinel": "gives zeros under -1e4",
    },
    "fully masked queries are NaN": dict.fromkeys(CLOSED, "gives NaN for fully masked queries"),
    "fully masked queries are infinite": dict.fromkeys(CLOSED, "gives infinity for fully masked queries"),
    "fully masked queries are averages": dict.fromkeys(CLOSED, "averages all keys for fully masked queries"),
    "fully masked queries attend": dict.fromkeys(CLOSED, "not zeros for fully masked queries"),
    "sentinel hides": {"fully-masked-sentinel": "gives zeros under -1e4"},
    "heads interleaved": {"gqa-mask": "query heads use the wrong key heads"},
    "one NaN": {case.name: f"gives NaN in 1 of {2 * case.Hq * case.S} rows" for case in CASES},
    "wrong type": dict.fromkeys(BY_NAME, "type float64, not bfloat16"),
    "wrong shape": {
        case.name: f"shape (2, {case.S}, {case.Hq * 32 - 1}), not (2, {case.S}, {case.Hq * 32})"
        for case in CASES
    },
}


def test_every_mistake_has_its_verdict():
    assert set(CAUGHT) == set(MISTAKES)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught_where_it_is_made_and_named(mistake):
    column = graph_column(lambda model: NumpyRunner(model, mistake), "onnx")
    # BF16 has the widest budget of the three: what is over it is over the others.
    wrong = {name: cell for name, cell in column_of(column, BF16).items() if cell.status == "wrong"}
    assert {name: cell.detail for name, cell in wrong.items()} == CAUGHT[mistake]
    # Where there are numbers of the right form, the error is reported as well.
    reported = {name for name, cell in wrong.items() if cell.error is not None and cell.share > 1}
    assert reported == (set() if {"NaN", "infinite", "type", "shape"} & set(mistake.split()) else set(wrong))


def test_an_average_under_the_sentinel_is_wrong_where_the_precision_does_not_excuse_it():
    case = BY_NAME["fully-masked-sentinel"]

    def averages(trials):
        (trial,) = trials
        y = np.where(trial.shifted[..., None], trial.averaged, trial.exact)
        joined = y.transpose(0, 2, 1, 3).reshape(case.B, case.S, -1)
        return {case.name: joined.astype(trial.precision.numpy)}

    assert unusual(column_of(averages, FP16, cases=[case])) == {case.name: SWALLOWED}
    wrong = {case.name: ("wrong", "averages all keys under -1e4")}
    assert unusual(column_of(averages, FP32, cases=[case])) == wrong


# -- engines -------------------------------------------------------------------------------------------


class Builds:
    """Opens models in a runtime, and remembers them."""

    def __init__(self, open_model):
        self.open_model, self.models = open_model, []

    def __call__(self, model):
        self.models.append(model)
        return self.open_model(model)

    @property
    def sizes(self):
        """How many cases each build held."""
        return [len(model.graph.outputs) for model in self.models]


def test_all_cases_are_one_engine():
    builds = Builds(in_ort)
    cells = column_of(graph_column(builds, "primitives", TRT_86))
    assert builds.sizes == [len(CASES) - 1]
    # ONNX Runtime computes FP16 in FP32 where the processor has no FP16: then -1e4 swallows nothing.
    sentinel = cells.pop("fully-masked-sentinel")
    assert (sentinel.status, sentinel.detail) in (SWALLOWED, KEPT)
    assert unusual(cells) == {
        "own-causal": (
            "refused",
            "The primitives dialect writes causal as a mask: the runtime's own is not used.",
        )
    }


@pytest.mark.parametrize(("precision", "found"), [(BF16, SWALLOWED), (FP16, KEPT), (FP32, KEPT)])
def test_scores_that_rounding_loses_under_the_sentinel_are_noticed(precision, found):
    """In ONNX's evaluator, which rounds every result to its type on every processor."""
    column = graph_column(in_reference, "primitives", RTX)
    cells = column_of(column, precision, cases=named("fully-masked-sentinel"))
    assert unusual(cells) == {"fully-masked-sentinel": found}


def test_one_refusal_does_not_hide_the_rest():
    builds = Builds(in_ort)  # which refuses masks that broadcast, when it runs them
    cases = named("bool-mask", "broadcast-queries", "causal-wide", "own-causal")
    cells = column_of(graph_column(builds, "trt", RTX), cases=cases)
    assert builds.sizes == [4, 1, 1, 1, 1]
    assert {name: cell.status for name, cell in cells.items()} == {
        "bool-mask": "conforms",
        "broadcast-queries": "refused",
        "causal-wide": "conforms",
        "own-causal": "conforms",
    }
    assert "inconsistent q_sequence_length" in cells["broadcast-queries"].detail


def test_the_trt_dialect_conforms_in_one_model():
    builds = Builds(in_reference)
    cells = column_of(graph_column(builds, "trt", RTX), BF16)
    assert builds.sizes == [len(CASES)]
    assert unusual(cells) == {"fully-masked-sentinel": KEPT, "own-causal": UPPER_LEFT}


def test_what_no_lowering_cures_is_refused_before_anything_is_built():
    builds = Builds(in_ort)
    cells = column_of(graph_column(builds, "primitives", TRT_86), BF16)
    assert builds.sizes == []
    assert {(cell.status, cell.detail) for cell in cells.values()} == {
        ("refused", "bf16 is not supported before TensorRT 10.")
    }


def test_a_target_of_unknown_alignment_gets_causal_as_a_mask_but_is_asked_for_its_own():
    builds = Builds(in_reference)
    cases = named("causal", "causal-wide", "own-causal")
    column_of(graph_column(builds, "trt", TRT_1014), cases=cases)
    (model,) = builds.models
    causal = {node.name: node.is_causal for node in attention_nodes(model)}
    assert causal == {"causal": True, "causal-wide": False, "own-causal": True}


def test_an_engine_of_the_lower_right_corner_is_seen_in_its_own_row_only():
    # The lowering avoids the runtime's own causal, so that the answers are right all the same.
    def misaligned(model):
        return NumpyRunner(model, "causal from the lower right")

    cases = named("causal", "own-causal")
    table = conformance_table({"engine": graph_column(misaligned, "trt", TRT_1014)}, FP16, cases=cases)
    assert unusual({row.case: row.cells["engine"] for row in table.rows}) == {
        "own-causal": ("wrong", "causal starts in the lower right corner")
    }
    assert table.passed


def rtx_builds(**options):
    """Really builds engines; the numbers come from ONNX's evaluator, for there may be no GPU to run them."""

    def open_model(model):
        build_rtx(model, targets="8.9", **options)
        return in_reference(model)

    return Builds(open_model)


@pytest.mark.slow
def test_tensorrt_rtx_builds_all_cases_as_one_engine():
    pytest.importorskip("tensorrt_rtx")
    builds = rtx_builds(precision="bf16")
    cells = column_of(graph_column(builds, "trt", RTX), BF16)
    assert builds.sizes == [len(CASES)]
    assert {cell.status for cell in cells.values()} == {"conforms"}


def test_tensorrt_rtx_refuses_fp32_unless_it_may_decompose():
    pytest.importorskip("tensorrt_rtx")
    cases = named("causal", "bool-mask")
    builds = rtx_builds(precision="fp32")
    cells = column_of(graph_column(builds, "trt", RTX), FP32, cases=cases)
    assert builds.sizes == [2, 1, 1]
    for name, cell in cells.items():
        assert cell.status == "refused"
        assert cell.detail.startswith("Attention has no fused kernel for this target, and may not be")
        assert name in cell.detail
    builds = rtx_builds(precision="fp32", allow_decomposed=True)
    cells = column_of(graph_column(builds, "trt", RTX), FP32, cases=cases)
    assert builds.sizes == [2]
    assert unusual(cells) == {}


# -- runtimes that are not here --------------------------------------------------------------------------


def not_installed(model):
    raise BackendUnavailable("It is not installed.", got="No module named 'it'")


@pytest.mark.parametrize("target", [None, RTX], ids=["runner", "engine"])
def test_a_runtime_that_cannot_open_anything_is_absent(target):
    cells = column_of(graph_column(not_installed, "trt", target), cases=named("causal", "bool-mask"))
    assert {shown(cell) for cell in cells.values()} == {"absent: It is not installed. No module named 'it'"}


@pytest.mark.parametrize("target", [None, RTX], ids=["runner", "engine"])
def test_a_runtime_without_kernels_for_a_case_is_here(target):
    def without_masks(model):
        if any(value.name.endswith("mask") for value in model.graph.inputs):
            raise BackendUnavailable("No kernel.")
        return in_reference(model)

    cells = column_of(graph_column(without_masks, "trt", target), cases=named("causal", "bool-mask"))
    assert {name: shown(cell) for name, cell in cells.items()} == {
        "causal": "conforms",
        "bool-mask": "refused: No kernel.",
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_pytorch_without_a_gpu_is_absent_on_cuda():
    cells = column_of(torch_column("sdpa", "cuda"), cases=named("causal"))
    assert shown(cells["causal"]).startswith("absent: PyTorch finds no CUDA GPU.")


def test_a_column_has_the_name_of_its_device(monkeypatch):
    monkeypatch.setattr("mha_deploy.validation.conformance.torch_device", lambda: "cuda")
    assert list(mask_columns(FP16))[:3] == ["eager cuda", "sdpa cuda", "onnx-reference"]


def test_what_pytorch_refuses_is_reported(monkeypatch):
    def attend(*arguments):
        raise RuntimeError("No available kernel.\nAborting execution.")

    monkeypatch.setattr("mha_deploy.baselines.torch.attend", attend)
    cells = column_of(torch_column("sdpa"), cases=named("causal"))
    assert shown(cells["causal"]) == "refused: PyTorch refuses the case. No available kernel."


# -- the table -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["Not here.", graph_column(NumpyRunner, "onnx")])
def test_a_table_without_an_answer_is_not_verified(column):
    case = "causal" if isinstance(column, str) else "own-causal"  # which only shows what a runtime does
    table = conformance_table({"it": column}, FP16, cases=named(case))
    assert (table.outcome, table.passed) == ("not verified", False)
    right = conformance_table({"it": graph_column(NumpyRunner, "onnx")}, FP16, cases=named("causal"))
    assert (right.outcome, right.passed) == ("passed", True)


def test_the_table_is_plain_data():
    columns = {
        "right": graph_column(NumpyRunner, "onnx"),
        "wrong": graph_column(lambda model: NumpyRunner(model, "fully masked queries are NaN"), "onnx"),
        "absent": "Not here.",
    }
    seen = []
    cases = named("causal", "fully-masked-bool", "own-causal")
    table = conformance_table(columns, FP16, seed=5, cases=cases, on_column=seen.append)
    assert seen == ["right", "wrong", "absent"]
    data = msgspec.to_builtins(table)
    assert {key: data[key] for key in ("precision", "seed", "outcome", "columns")} == {
        "precision": "fp16",
        "seed": 5,
        "outcome": "failed",
        "columns": ("right", "wrong", "absent"),
    }
    assert [(row["case"], row["about"], row["diagnostic"]) for row in data["rows"]] == [
        (case.name, case.about, case.diagnostic) for case in cases
    ]
    closed = data["rows"][1]["cells"]
    assert closed["wrong"] == {
        "status": "wrong",
        "detail": "gives NaN for fully masked queries",
        "error": None,
        "share": None,
    }
    assert closed["right"]["status"] == "conforms"
    assert closed["absent"]["status"] == "absent"


def test_a_wrong_cell_tells_its_error():
    wrong = graph_column(lambda model: NumpyRunner(model, "fully masked queries attend"), "onnx")
    cell = column_of(wrong, cases=named("fully-masked-inf"))["fully-masked-inf"]
    trial = draw_trial(BY_NAME["fully-masked-inf"], FP16, 0)
    exact = trial.exact
    # The mistake is only in fully masked queries, and so is the error.
    attending = trial.result(mask=None, causal=NOWHERE)
    closed = trial.fully_masked
    error = np.linalg.norm(attending[closed]) / np.linalg.norm(exact)
    assert cell.error == pytest.approx(error, rel=1e-3)
    assert shown(cell) == f"wrong ({cell.error:.2g}): not zeros for fully masked queries"


def test_an_output_left_out_is_a_refusal():
    def forgetful(model):
        runner = NumpyRunner(model)
        runner._run = lambda feeds: {}
        return runner

    cells = column_of(graph_column(forgetful, "onnx"), cases=named("causal"))
    assert shown(cells["causal"]) == "refused: The runtime left out an output. causal.y"
