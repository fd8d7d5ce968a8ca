"""Budgets from random roundings: what is right uses a small part of them, and no mistake hides in them."""

import dataclasses
import math
import tracemalloc
from functools import partial

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from golden_made import made_case, samples_of
from graph_parity import graph_parity
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from mha_deploy.bundle.cases import Baseline, golden_cases
from mha_deploy.exporter.file_program import ChangedMode, ExactMode, FileProgram, FileRounding
from mha_deploy.exporter.oracle import RandomRounding
from mha_deploy.exporter.samples import sample_case, sample_parts
from mha_deploy.graph.file import graph_from_proto
from mha_deploy.judge import judge_case
from mha_deploy.metrics import budget_from_samples, factor_of, measure
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.rounding import nearest, normal, rounded
from mha_deploy.status import Outcome
from mha_deploy.threads import on_one_thread, set_blas_threads

FP16 = PRECISIONS["fp16"]
BITS = FP16.significand_bits


@pytest.fixture
def oracle():
    return np.random.default_rng(0).standard_normal((3, 5, 64))


# -- Measures --------------------------------------------------------------------------------------


def test_an_exact_result_deviates_by_nothing(oracle):
    deviation = measure(oracle, oracle)
    assert (deviation.relative_l2, deviation.worst_vector, deviation.max_abs, deviation.gain) == (0, 0, 0, 0)
    assert deviation.cosine == pytest.approx(1.0)


def test_each_measure_is_what_its_name_says(oracle):
    wrong = oracle.copy()
    wrong[1, 2, 7] += 3.0
    size = np.sqrt(np.mean(oracle**2))
    deviation = measure(wrong, oracle)
    assert deviation.worst_index == (1, 2, 7)
    assert deviation.worst_got == pytest.approx(oracle[1, 2, 7] + 3.0)
    assert deviation.worst_want == oracle[1, 2, 7]
    assert deviation.max_abs == pytest.approx(3.0 / size)
    assert deviation.relative_l2 == pytest.approx(3.0 / np.linalg.norm(oracle))
    assert deviation.worst_vector == pytest.approx(3.0 / np.linalg.norm(oracle[1, 2]))


@pytest.mark.filterwarnings("error")
def test_exact_zeros_do_not_hide_a_gain(oracle):
    precision, true = PRECISIONS["fp32"], oracle + 3
    true[:, 3:] = 0  # as padded positions give
    bits = precision.significand_bits
    samples = np.stack([rounded(true * (1 + 1e-7), bits, seed) - true for seed in range(8)])
    spread = budget_from_samples(samples, true, precision).spread
    wrong = true.copy()
    wrong[1] *= 1 + 1e-5
    assert measure(true, true, spread).local_gain == 0
    assert measure(wrong, true, spread).local_gain > 12


def test_gain_sees_a_common_factor_and_not_noise(oracle):
    noise = np.random.default_rng(1).standard_normal(oracle.shape) * 0.01
    assert measure(oracle * 1.01, oracle).gain == pytest.approx(0.01)
    assert measure(oracle + noise, oracle).gain < 0.002
    assert measure(oracle + noise, oracle).relative_l2 == pytest.approx(0.01, rel=0.2)


def test_a_factor_of_each_vector_is_rounded_once():
    """As the length of an embedding: the samples of three vectors may all have little of it."""
    oracle = np.random.default_rng(0).standard_normal((3, 4096))
    samples = samples_of(oracle)
    samples -= oracle * ((samples * oracle).sum() / np.square(oracle).sum())  # as chance may have it
    budget = budget_from_samples(samples, oracle, FP16)
    for gain, passes in ((2.0**-12, True), (2.0**-9, False)):
        assert (measure(oracle * (1 + gain), oracle).gain <= budget.gain) is passes


def test_a_row_of_zeros_is_judged_by_the_size_of_the_tensor(oracle):
    oracle[0, 0] = 0.0
    wrong = oracle.copy()
    wrong[0, 0] = 0.5
    assert np.isfinite(measure(wrong, oracle).worst_vector)
    assert measure(wrong, oracle).worst_vector > 1.0


def test_an_oracle_of_zeros_is_judged_absolutely():
    zeros = np.zeros((2, 4))
    assert measure(zeros, zeros).relative_l2 == 0
    assert measure(zeros + 0.5, zeros).relative_l2 == pytest.approx(0.5)


# -- Random rounding -------------------------------------------------------------------------------


def numbers(count=4096):
    """Of many sizes and both signs; float32 has them, too."""
    rng = np.random.default_rng(5)
    drawn = rng.standard_normal(count) * 2.0 ** rng.integers(-10, 10, count)
    return drawn.astype(np.float32).astype(np.float64)


def in_pytorch(dtype):
    """The same in PyTorch, where samples of 16-bit precisions are computed in float32."""

    def rounded_in_pytorch(exact, bits, seed):
        (precision,) = (each for each in PRECISIONS.values() if each.significand_bits == bits)
        tensor = torch.from_numpy(exact).to(dtype)
        return RandomRounding(precision, seed).rounded(tensor).double().numpy()

    return rounded_in_pytorch


ROUNDINGS = {"numpy": rounded, "fp64": in_pytorch(torch.float64), "fp32": in_pytorch(torch.float32)}


@pytest.fixture(params=ROUNDINGS)
def rounding(request):
    return ROUNDINGS[request.param]


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_number_goes_to_one_of_its_neighbors(rounding, name):
    exact, bits = numbers(), PRECISIONS[name].significand_bits
    size = 2.0 ** (np.floor(np.log2(np.abs(exact))) - bits + 1)  # of a unit in the last place
    got = rounding(exact, bits, 1)
    assert (np.abs(got - exact) < size).all()
    assert (got / size == np.round(got / size)).all()
    assert 0.4 < np.mean(np.abs(got) > np.abs(exact)) < 0.6
    assert (rounding(got, bits, 2) == got).all()  # what the precision has stays as it is


def test_float32_is_rounded_like_the_others():
    exact, bits = np.random.default_rng(5).standard_normal(4096), PRECISIONS["fp32"].significand_bits
    got = rounded(exact, bits, 1)
    assert (got == got.astype(np.float32)).all()
    assert 0.4 < np.mean(np.abs(got) > np.abs(exact)) < 0.6


def test_rounding_is_right_on_average(rounding):
    exact, count = np.full(1, 1.0 + 0.25 * 2.0**-10), 2000
    mean = np.mean([rounding(exact, BITS, seed) for seed in range(1, count + 1)])
    assert abs(mean - exact[0]) < 4 * math.sqrt(0.25 * 0.75) * 2.0**-10 / math.sqrt(count)
    wide = numbers(1 << 16)
    errors = (rounding(wide, BITS, 3) - wide) / np.abs(wide)
    assert abs(errors.mean()) < 4 * errors.std() / math.sqrt(errors.size)


def test_equal_numbers_are_rounded_alike_and_other_seeds_round_otherwise(rounding):
    exact = np.tile(numbers(), 2)
    errors = [(rounding(exact, BITS, seed) - exact) / exact for seed in range(1, 6)]
    for each in errors:
        assert (each[:4096] == each[4096:]).all()
    assert np.abs(np.corrcoef(errors) - np.eye(5)).max() < 0.1


def test_what_is_no_number_stays_what_it_is(rounding):
    given = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -(2.0**-20)])
    np.testing.assert_array_equal(rounding(given, BITS, 1), given)


def test_integers_are_not_rounded():
    integers = np.arange(3)
    assert rounded(integers, BITS, 1) is integers


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=lambda each: each.name)
def test_numpy_and_pytorch_round_to_equal_bits(precision):
    exact = numbers() * (1 + 1e-9)
    for seed in (1, 2, 99):
        got = in_pytorch(torch.float64)(exact, precision.significand_bits, seed)
        assert got.tobytes() == rounded(exact, precision.significand_bits, seed).tobytes()


# -- What is right is well within its budget -------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("name", "precision"),
    [("tiny-gqa", "fp16"), ("tiny-rope", "fp16"), ("tiny-padding", "bf16"), ("tiny-mha", "fp32")],
)
def test_correct_rounding_uses_a_part_of_the_budget(bundles, name, precision):
    bundle = bundles(name, precision)
    graph = [verdict.share for verdict in graph_parity(bundle).verdicts]
    module = [
        judge_case(case, case.eager, bundle.manifest.precision)[0].share for case in golden_cases(bundle)
    ]
    for shares in (graph, module):
        assert min(shares) > 0.05
        assert 0.1 < max(shares) < 0.6


@pytest.mark.parametrize("name", ["relative_l2", "worst_vector", "max_abs", "gain", "local", "local_gain"])
def test_each_measure_alone_can_exceed_the_budget(oracle, name):
    budget = budget_from_samples(samples_of(oracle), oracle, FP16)
    inside = measure(oracle, oracle, budget.spread)
    outside = dataclasses.replace(inside, **{name: getattr(budget, name) * 1.001})
    assert budget.exceeded_by(outside) == [name]
    assert budget.share_used(outside) == pytest.approx(1.001)


def test_a_deviation_that_is_not_a_number_exceeds_the_budget(oracle):
    budget = budget_from_samples(samples_of(oracle), oracle, FP16)
    lost = dataclasses.replace(measure(oracle, oracle), relative_l2=float("nan"))
    assert budget.exceeded_by(lost) == ["relative_l2"]


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=lambda each: each.name)
def test_a_sample_uses_one_part_in_the_factor(oracle, precision):
    samples = samples_of(oracle, precision.name, level=20.0)
    budget = budget_from_samples(samples, oracle, precision)
    shares = [budget.share_used(measure(oracle + each, oracle, budget.spread)) for each in samples]
    assert max(shares) == pytest.approx(1 / factor_of(precision))


@pytest.mark.slow
def test_vectors_that_rounding_leaves_alone_do_not_narrow_the_others():
    """A KV cache of which one entry is new: the others are copies."""
    random = np.random.default_rng(0)
    largest = []
    for _ in range(40):
        oracle = random.standard_normal((2, 2, 16, 16))
        errors = np.zeros((41, *oracle.shape))
        errors[:, :, :, 15] = 1e-3 * random.standard_normal((41, 2, 2, 16))
        budget = budget_from_samples(errors[:5].astype(np.float32), oracle, FP16)
        shares = [budget.share_used(measure(oracle + each, oracle, budget.spread)) for each in errors[5:]]
        largest.append(max(shares))
    assert max(largest) < 0.9
    wrong = oracle + errors[-1]
    wrong[:, :, 15] *= 1.01
    assert budget.share_used(measure(wrong, oracle, budget.spread)) > 1


def test_wider_samples_make_a_wider_budget_by_as_much(oracle):
    narrow, wide = (
        budget_from_samples(samples_of(oracle, level=level), oracle, FP16).limits for level in (10.0, 40.0)
    )
    for name in ("relative_l2", "worst_vector", "max_abs", "gain"):
        assert wide[name] / narrow[name] == pytest.approx(4.0)


def test_each_type_of_accumulation_has_its_own_budget(oracle):
    kinds = {"fp32": 1.0, "fp16": 8.0}
    baselines = {kind: Baseline({"y": samples_of(oracle, level=level)}) for kind, level in kinds.items()}
    case = made_case({"y": oracle}, baselines=baselines)
    got = (oracle + 4.0 * samples_of(oracle, seed=50)[0]).astype(np.float16)
    verdicts = {
        kind: judge_case(case, {"y": got}, dataclasses.replace(FP16, accumulate=kind))[0] for kind in kinds
    }
    assert verdicts["fp32"].is_wrong
    assert verdicts["fp16"].passed


def test_what_the_module_gives_makes_no_budget(oracle):
    """It is shown beside the others, and judged like them."""
    got = (oracle * 1.03).astype(np.float16)
    (verdict,) = judge_case(made_case({"y": oracle}, {"y": got}), {"y": got}, FP16)
    assert verdict.is_wrong


# -- What a measure over everything does not show --------------------------------------------------


class Projection:
    """Hidden states through a projection: in FP64, rounded at random, and as an FP16 kernel computes it.

    One channel is of another size, or has a bias, beside 63 usual ones.
    """

    def __init__(self, scale=1.0, bias=0.0, seed=0, samples=12, B=4, S=32, E=64):
        rng = np.random.default_rng(seed)
        self.hidden, self.weight = rng.standard_normal((B, S, E)), rng.standard_normal((E, E)) / math.sqrt(E)
        self.weight[:, 7] *= scale
        self.bias = np.zeros(E)
        self.bias[7] = bias
        self.oracle = self(self.hidden)
        drawn = [rounded(self(rounded(self.hidden, BITS, n)), BITS, n) for n in range(1, samples + 1)]
        self.samples = (np.stack(drawn) - self.oracle).astype(np.float32)
        self.right = self(self.hidden.astype(np.float16)).astype(np.float16)

    def __call__(self, hidden):
        return hidden.astype(np.float64) @ self.weight + self.bias

    def judged(self, got):
        return judged(self.oracle, self.samples, got)


def judged(oracle, samples, got, branches=0):
    case = made_case({"y": oracle}, baselines={"fp32": Baseline({"y": samples}, branches)})
    (verdict,) = judge_case(case, {"y": got.astype(np.float16)}, FP16)
    return verdict


def times(factor, at=...):
    def change(array):
        array = array.copy()
        array[at] *= factor
        return array

    return change


# Of the hidden states, whose channels are those of 8 heads
INSIDE = {
    "a head is zero": times(0, np.s_[..., :8]),
    "a head is off by 10 %": times(1.1, np.s_[..., 8:16]),
    "everything is off by 3 %": times(1.03),
    "the last batch element is off by 0.5 %": times(1.005, -1),
    "one query is another's": lambda h: np.where(np.arange(32)[:, None] == 30, h[:, 29:30], h),
}
# Of the result
OUTSIDE = {
    "a channel is off by 3 %": (times(1.03, np.s_[..., 20]), "channel 20"),
    "a vector is off by 3 %": (times(1.03, np.s_[2, 5]), "batch element 2, query 5"),
    "a vector is zero": (times(0, np.s_[0, 31]), "batch element 0, query 31"),
    "a batch element is off by 3 %": (times(1.03, 1), "batch element 1"),
    "an element has another sign": (times(-1, np.s_[3, 31, 40]), "channel 40"),
}
CHANNELS = [(1, 0), (1, 1e3), (1, 1e4), (100, 0), (1e-3, 0)]


@pytest.fixture(scope="module", params=CHANNELS, ids=str)
def projection(request):
    return Projection(*request.param)


def test_a_right_result_is_well_within_the_budget_of_any_channels(projection):
    assert 0.1 < projection.judged(projection.right).share < 0.7


@pytest.mark.parametrize("mistake", INSIDE)
def test_a_large_channel_hides_no_mistake_before_it(projection, mistake):
    assert projection.judged(projection(INSIDE[mistake](projection.hidden))).is_wrong


@pytest.mark.parametrize("mistake", OUTSIDE)
def test_a_large_channel_hides_no_mistake_beside_it(projection, mistake):
    change, place = OUTSIDE[mistake]
    verdict = projection.judged(change(projection.right.astype(np.float64)))
    assert verdict.is_wrong
    assert place in verdict.reason.where


@pytest.mark.parametrize("scale", [1e-1, 1e-2, 1e-3])
def test_a_channel_near_zero_is_judged_by_itself(scale):
    projection = Projection(scale)
    for wrong in (-1, 0):
        verdict = projection.judged(times(wrong, np.s_[..., 7])(projection.right))
        assert verdict.is_wrong
        assert "channel 7" in verdict.reason.where


def test_one_massive_element_hides_nothing_in_its_token_and_channel():
    plain = Projection()
    massive = np.zeros(plain.oracle.shape)
    massive[0, 0, 7] = 1e4
    oracle, right = plain.oracle + massive, plain.right + massive.astype(np.float16)
    whole = [rounded(plain.oracle + each + massive, BITS, n) for n, each in enumerate(plain.samples, 1)]
    samples = (np.stack(whole) - oracle).astype(np.float32)
    assert judged(oracle, samples, right).share < 0.6
    for place in (np.s_[0, 0, 20:40], np.s_[1, :, 7]):
        assert judged(oracle, samples, times(np.float16(1.05), place)(right)).is_wrong, place


@pytest.mark.parametrize("shape", [(400, 512), (2, 3, 8), (1, 1, 64), (1, 64), (64,), (2, 4, 16, 8)])
def test_one_wrong_element_is_found_in_any_shape(shape):
    oracle = np.random.default_rng(3).standard_normal(shape)
    samples, got = samples_of(oracle), oracle.astype(np.float16)
    assert judged(oracle, samples, got).share < 0.5
    at = tuple(size - 1 for size in shape)
    got[at] += np.float16(0.05)
    verdict = judged(oracle, samples, got)
    assert verdict.is_wrong
    assert f"channel {at[-1]}" in verdict.reason.where


def test_a_small_vector_is_judged_by_itself():
    oracle = np.random.default_rng(4).standard_normal((64, 256))
    oracle[3] *= 5e-4
    for wrong in (-1, 0):
        assert judged(oracle, samples_of(oracle), times(wrong, 3)(oracle)).is_wrong


# -- Errors that are not independent ----------------------------------------------------------------


def test_queries_with_the_same_answer_have_one_error():
    """Half of the queries are padding or see one key: whatever rounding leaves there, it leaves in all."""
    rng = np.random.default_rng(0)
    oracle = rng.standard_normal((4, 24, 768))
    oracle[:2] = oracle[:2, :1]
    rounding = 6e-4 * rng.standard_normal((13, *oracle.shape))
    rounding[:, :2] = rounding[:, :2, :1]
    got, samples = oracle + rounding[0], rounding[1:].astype(np.float32)
    assert judged(oracle, samples, got).share < 0.6
    got[1, 7] += 0.02
    assert "batch element 1, query 7" in judged(oracle, samples, got).reason.where


def test_errors_that_all_positions_share_are_no_wrong_channel():
    """Nearly the same answer everywhere: a rounded value moves its channel at every position."""
    rng = np.random.default_rng(0)
    oracle = rng.standard_normal((1, 1, 64)) + 0.05 * rng.standard_normal((2, 32, 64))
    common, own = 5e-4 * rng.standard_normal((13, 1, 1, 64)), 3e-4 * rng.standard_normal((13, *oracle.shape))
    rounding = common + own
    got, samples = oracle + rounding[0], rounding[1:].astype(np.float32)
    assert judged(oracle, samples, got).share < 0.8
    for place, wrong in ((np.s_[:, 5, 3], 0.05), (np.s_[..., 3], 0.02)):
        other = got.copy()
        other[place] += wrong
        assert judged(oracle, samples, other).is_wrong, place


# -- Few samples, of the largest cases --------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_few_samples_refuse_nothing_right_and_accept_nothing_wrong(count):
    for seed in range(8):
        made = Projection(seed=seed, samples=count)
        assert made.judged(made.right).share < 0.6
    for change in INSIDE.values():
        assert made.judged(made(change(made.hidden))).is_wrong
    for change, _ in OUTSIDE.values():
        assert made.judged(change(made.right.astype(np.float64))).is_wrong


# -- Decisions that rounding takes -------------------------------------------------------------------

ROUTER = """<ir_version: 10, opset_import: ["": 23]>
router (float16[N,16] x, float16[16,4] gate, float16[16,16] a, float16[16,16] b)
        => (float16[N,16] y, int64[N,1] choice) {
    scores = MatMul(x, gate)
    choice = ArgMax <axis = -1, keepdims = 1> (scores)
    one = Constant <value_int = 1> ()
    first = LessOrEqual(choice, one)
    left = MatMul(x, a)
    right = MatMul(x, b)
    y = Where(first, left, right)
}"""
UNDECIDED = 3


class Router:
    """Tokens that go to one of two experts, one token by chance: two of its scores are nearly equal."""

    def __init__(self):
        rng = np.random.default_rng(0)
        x, gate = rng.standard_normal((12, 16)), rng.standard_normal((16, 4)).astype(np.float16)
        one, other = gate[:, 1].astype(np.float64), gate[:, 2].astype(np.float64)
        x[UNDECIDED] += 0.3 * (one + other)
        x[UNDECIDED] -= (one - other) * (x[UNDECIDED] @ (one - other)) / ((one - other) @ (one - other))
        a, b = (rng.standard_normal((16, 16)).astype(np.float16) / np.float16(4) for _ in range(2))
        feeds = {"x": x.astype(np.float16), "gate": gate, "a": a, "b": b}
        program = FileProgram(ir.from_onnx_text(ROUTER))
        self.oracle, baselines, _ = sample_case(FileRounding, FP16, lambda mode: program.run(feeds, mode))
        self.branches = baselines["fp32"].branches
        self.case = made_case(self.oracle, inputs=feeds, baselines=baselines)
        self.experts = [feeds["x"].astype(np.float64) @ each.astype(np.float64) for each in (a, b)]

    def with_other_expert(self, token):
        """The result where a token goes to the other expert."""
        y, choice = self.oracle["y"].copy(), self.oracle["choice"].copy()
        choice[token] = 3 - choice[token]
        y[token] = self.experts[int(choice[token, 0] > 1)][token]
        return {"y": y, "choice": choice}

    def judged(self, got):
        got = {"y": got["y"].astype(np.float16), "choice": got["choice"]}
        return {each.output: each for each in judge_case(self.case, got, FP16)}


@pytest.fixture(scope="module")
def router():
    return Router()


def test_an_undecided_vector_may_be_either_of_its_branches(router):
    assert router.branches > 0
    for got in (router.oracle, router.with_other_expert(UNDECIDED)):
        assert all(each.passed and each.share < 0.6 for each in router.judged(got).values())


@pytest.mark.parametrize("token", [token for token in range(12) if token not in (UNDECIDED, 9)])
def test_a_decided_vector_may_not_be_of_another_branch(router, token):
    found = router.judged(router.with_other_expert(token))
    assert found["y"].is_wrong
    assert f"batch element {token}" in found["y"].reason.where
    assert found["choice"].is_wrong
    assert found["choice"].reason.numbers["wrong"] == 1


def test_an_undecided_vector_excuses_no_other(router):
    got = router.with_other_expert(UNDECIDED)
    got["y"][5] *= 1.03
    verdict = router.judged(got)["y"]
    assert verdict.is_wrong
    assert "batch element 5" in verdict.reason.where
    got["y"][5] /= 1.03
    got["y"][UNDECIDED] *= 5
    assert router.judged(got)["y"].is_wrong


@pytest.mark.parametrize(
    "change", [lambda y: 0 * y, lambda y: y[::-1], lambda y: -y], ids=["zero", "reversed", "sign"]
)
def test_an_undecided_vector_is_not_anything(router, change):
    got = {name: array.copy() for name, array in router.oracle.items()}
    got["y"][UNDECIDED] = change(got["y"][UNDECIDED])
    assert router.judged(got)["y"].is_wrong


def test_integers_are_right_where_a_sample_has_them():
    oracle = np.arange(1000)
    samples, got = np.stack([oracle] * 12), oracle.copy()
    samples[3, 0] = got[0] = 5
    assert judged_integers(oracle, samples, got).passed
    assert judged_integers(oracle, samples, oracle).passed
    got[1] = 5
    verdict = judged_integers(oracle, samples, got)
    assert verdict.is_wrong
    assert verdict.reason.numbers["wrong"] == 1
    other = oracle.copy()
    other[0] = 6  # neither the oracle's nor that of a sample
    assert judged_integers(oracle, samples, other).is_wrong


def judged_integers(oracle, samples, got):
    case = made_case({"y": oracle}, baselines={"fp32": Baseline({"y": samples})})
    return judge_case(case, {"y": got}, FP16)[0]


@pytest.mark.parametrize("dim", [(), (-1,), (1,)], ids=["by default", "last", "its number"])
def test_a_choice_within_rounding_is_taken_otherwise_with_the_numbers_of_its_place(dim):
    scores = torch.tensor([[0.5, 0.3, 0.2999, 0.1], [0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    taken = []
    for sign in (1, -1):
        mode = RandomRounding(FP16, 1, [np.full(scores.shape, 1e-4)], sign)
        with mode:
            values, places = torch.topk(scores, 2, *dim)
        assert torch.equal(values.double(), scores.float().double().gather(-1, places))
        taken.append(places.sort(-1).values.tolist())
    assert sorted(rows[0] for rows in taken) == [[0, 1], [0, 2]]
    assert [rows[1] for rows in taken] == [[0, 1]] * 2


@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
def test_random_rounding_of_a_large_tensor_is_that_of_its_parts(accumulate):
    mode = RandomRounding(dataclasses.replace(FP16, accumulate=accumulate), 5)
    numbers = torch.randn(70_000, 3, generator=torch.Generator().manual_seed(0))
    for wide in (numbers, numbers.double()):
        whole, parts = mode.rounded(wide), [mode.rounded(part) for part in wide.split(999)]
        assert torch.equal(whole, torch.cat(parts))
        assert torch.equal(mode.rounded(wide.T), whole.T)
        assert 0 < (whole - wide).abs().max() < 8 * 2.0**-10
        matrix = torch.eye(3).to(wide)
        with mode:
            product = torch.matmul(wide, matrix)
            alone = torch.cat([torch.matmul(part, matrix) for part in wide.split(999)])
        assert torch.equal(product, alone)


def test_a_sample_is_what_it_is_alone():
    """Samples share the GEMMs of inputs and weights, also where the module changes their results."""
    draw = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(24, 24, generator=draw).half() for _ in range(3))

    def compute(mode):
        with mode:
            inner = torch.nn.functional.linear(x, a)
            inner += inner.square()
            y = torch.nn.functional.linear(inner, b)
        return {"y": y.double().numpy()}

    oracle, baselines, _ = sample_case(RandomRounding, FP16, compute)
    for kind, baseline in baselines.items():
        precision = dataclasses.replace(FP16, accumulate=kind)
        for seed, shared in enumerate(baseline.samples["y"], 1):
            mode = RandomRounding(precision, seed)
            alone = mode.rounded_array(compute(mode)["y"]) - oracle["y"]
            assert np.array_equal(shared, alone.astype(np.float32))


def test_rounding_to_nearest_is_no_trace_of_a_coarser_type():
    """Random roundings have no part of what BF16 would add; in many numbers rounding to nearest shows one."""
    random = np.random.default_rng(0)
    oracle = random.standard_normal((1, 256, 1024))
    step = np.spacing(np.abs(oracle).astype(np.float16)).astype(np.float64)
    down = np.floor(oracle / step) * step
    ups = [random.random(oracle.shape) < (oracle - down) / step for _ in range(8)]
    samples = np.stack([down + up * step - oracle for up in ups]).astype(np.float32)
    budget = budget_from_samples(samples, oracle, FP16)
    coarse = oracle.astype(ml_dtypes.bfloat16)
    suspects = {"outputs in BF16": (coarse.astype(np.float64) - oracle, None, None)}
    right, wrong = (
        measure(each.astype(np.float16), oracle, budget.spread, suspects) for each in (oracle, coarse)
    )
    assert 0.1 < right.local_gain / budget.local_gain < 0.5
    assert wrong.local_gain / budget.local_gain > 10
    assert "BF16" in wrong.local_at
    mistake = coarse.astype(np.float64) - oracle
    beside = random.standard_normal(oracle.shape) * 1e-2
    for far, is_named in ((oracle + 30 * mistake, True), (oracle + 3 * mistake + beside, False)):
        assert ("BF16" in measure(far, oracle, budget.spread, suspects).local_at) is is_named


# -- a model that rounds to a grid of eight bits ----------------------------------------------------

_ROUNDS = "".join(
    f"""
    inner{at} = MatMul(h{at}, a)
    bent{at} = Tanh(inner{at})
    level{at} = QuantizeLinear(bent{at}, scale, zero)
    h{at + 1} = DequantizeLinear(level{at}, scale, zero)"""
    for at in range(3)
)
ON_GRID = f"""<ir_version: 10, opset_import: ["": 23]>
grid (float16[2, 32] x, float16[32, 32] a, float16[32, 32] b, float16 scale) => (float16[2, 32] y)
<float8e4m3fn zero = {{0}}> {{
    h0 = Identity(x){_ROUNDS}
    y = MatMul(h3, b)
}}"""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("seed", [1, 2, 7])
def test_a_right_result_on_a_grid_passes_and_a_wrong_scale_does_not(seed):
    program, dice = FileProgram(ir.from_onnx_text(ON_GRID)), np.random.default_rng(seed)
    feeds = {"x": dice.standard_normal((2, 32)).astype("e")}
    feeds |= {name: (dice.standard_normal((32, 32)) / np.sqrt(32)).astype("e") for name in "ab"}
    feeds["scale"] = np.array(1 / 448, "e")
    oracle, baselines, _ = sample_case(FileRounding, FP16, lambda mode: program.run(feeds, mode))
    case = made_case(oracle, inputs=feeds, baselines=baselines)
    for other in range(1000, 1100):
        mode = FileRounding(FP16, other)
        got = mode.rounded_array(program.run(feeds, mode)["y"]).astype("e")
        assert judge_case(case, {"y": got}, FP16)[0].passed, other
    wrong = program.run({**feeds, "scale": np.array(1.04 / 448, "e")})
    assert judge_case(case, {"y": wrong["y"].astype("e")}, FP16)[0].is_wrong


ON_GRID_TWICE = """<ir_version: 10, opset_import: ["": 23]>
grid (float[1024, 32] x, float[32, 32] a) => (float[1, 32] y)
<float scale = {0.01}, float8e4m3fn zero = {0}> {
    level = QuantizeLinear(x, scale, zero)
    near = DequantizeLinear(level, scale, zero)
    h = MatMul(near, a)
    axis = Constant <value_ints = [0]> ()
    y = ReduceMean(h, axis)
}"""


def test_samples_of_two_values_are_those_of_each_alone():
    program, dice = FileProgram(ir.from_onnx_text(ON_GRID_TWICE), ["h"]), np.random.default_rng(0)
    feeds = {"x": dice.standard_normal((1024, 32)).astype("f")}
    feeds["a"] = (dice.standard_normal((32, 32)) / 6).astype("f")
    run = partial(program.run, feeds)
    parts = [lambda results, name=name: {name: results[name]} for name in "yh"]
    _, together, _ = sample_parts(FileRounding, FP16, run, parts)
    for got, part, count in zip(together, parts, (32, 16), strict=True):
        _, alone, _ = sample_case(FileRounding, FP16, run, part)
        assert list(got) == ["fp32", "fp16"]
        for kind, each in alone.items():
            assert got[kind].branches == each.branches
            for name, samples in each.samples.items():
                assert np.array_equal(got[kind].samples[name], samples)
        assert len(got["fp32"].samples[name]) == count + got["fp32"].branches


@pytest.mark.parametrize(
    ("options", "sizes"), [("transB = 1", (5, 32, 32)), ("transA = 1", (5, 32, 7)), ("transA = 1", (9, 9, 3))]
)
def test_a_gemm_is_rounded_as_the_matmul_of_what_it_transposes(options, sizes):
    rows, terms, columns = sizes
    text = '<ir_version: 10, opset_import: ["": 23]> g (double[I, J] a, double[K, L] b) => (double[M, N] y)'
    gemm, matmul = (
        FileProgram(ir.from_onnx_text(f"{text} {{ y = {each} (a, b) }}"))
        for each in (f"Gemm <{options}>", "MatMul")
    )
    dice = np.random.default_rng(0)  # whole numbers, whose sums are exact in any order; one column is large
    a, b = (dice.integers(-9, 9, each).astype(np.float64) for each in ((rows, terms), (terms, columns)))
    b[:, 0] *= 64
    modes = [FileRounding(dataclasses.replace(FP16, accumulate="fp16"), seed=1) for _ in range(2)]
    given = {"a": a.T if "transA" in options else a, "b": b.T if "transB" in options else b}
    results = gemm.run(given, modes[0]), matmul.run({"a": a, "b": b}, modes[1])
    assert np.array_equal(*(each["y"] for each in results))
    assert modes[0].flops == modes[1].flops == 2 * math.prod(sizes)


@pytest.mark.slow
def test_a_large_weight_is_in_fp64_only_while_it_is_used(monkeypatch):
    monkeypatch.setattr("mha_deploy.exporter.file_program._MOST_WIDE", 1 << 20)
    size, count = 1024, 10
    names = [f"h{at}" for at in range(count + 1)]
    nodes = [helper.make_node("MatMul", [names[at], f"w{at}"], [names[at + 1]]) for at in range(count)]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, size]) for n in (names[0], names[-1])]
    dice = np.random.default_rng(0)
    weights = [(dice.standard_normal((size, size)) / 32).astype("f") for _ in range(count)]
    held = [numpy_helper.from_array(each, f"w{at}") for at, each in enumerate(weights)]
    graph = helper.make_graph(nodes, "deep", ends[:1], ends[1:], held)
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]))
    x = dice.standard_normal((4, size)).astype("f")
    tracemalloc.start()
    (got,) = FileProgram(model).run({"h0": x}).values()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    wanted = x.astype(np.float64)
    for each in weights:
        wanted = wanted @ each.astype(np.float64)
    assert np.array_equal(got, wanted)
    assert most < 8 * count * size**2


def test_a_long_array_is_rounded_as_its_parts_are():
    values = np.random.default_rng(0).standard_normal((3, 40_000))
    for change in (partial(rounded, bits=BITS, seed=3), partial(nearest, bits=BITS), partial(normal, seed=3)):
        parts = [change(values[:, start : start + 7]) for start in range(0, 40_000, 7)]
        assert np.array_equal(change(values), np.concatenate(parts, axis=1))
        assert np.array_equal(change(values.T), change(values).T)


MASKED = """<ir_version: 10, opset_import: ["": 23]>
masked (float[4, 2, 4, 64] q, float[4, 2, 4096, 64] k, float[4, 2, 4096, 64] v, {kind} mask, float[64, 512] w)
        => (float[4, 2, 4, 512] y) {{
    heads = Attention(q, k, v, mask)
    y = MatMul(heads, w)
}}"""


@pytest.mark.parametrize("shape", [(4, 4096), (4, 1, 4, 4096), (1, 2, 4, 4096)])
def test_batch_elements_side_by_side_give_what_they_give_together(shape):
    dice = np.random.default_rng(0)
    feeds = {name: dice.standard_normal((4, 2, 4 if name == "q" else 4096, 64)) for name in "qkv"}
    feeds |= {"mask": 3 * dice.standard_normal(shape), "w": dice.standard_normal((64, 512))}
    text = MASKED.format(kind=f"float{list(shape)}")
    got = FileProgram(ir.from_onnx_text(text)).run(feeds)["y"]
    assert np.array_equal(got, ReferenceEvaluator(onnx.parser.parse_model(text)).run(["y"], feeds)[0])


WITHOUT_MASK = """<ir_version: 10, opset_import: ["": 23]>
cached (float[1, 2, 3, 8] q, float[1, 2, 5, 8] past) => (float[1, 2, 3, 8] y, float[1, 2, 8, 8] present) {
    y, present, values = Attention(q, q, q, , past, past)
}"""


def test_an_attention_with_a_cache_and_no_mask_is_rounded():
    dice, program = np.random.default_rng(0), FileProgram(ir.from_onnx_text(WITHOUT_MASK))
    feeds = {"q": dice.standard_normal((1, 2, 3, 8)), "past": dice.standard_normal((1, 2, 5, 8))}
    exact, sample = program.run(feeds)["y"], program.run(feeds, FileRounding(FP16, 1))["y"]
    assert 0 < np.abs(sample - exact).max() < 0.01


def test_numpy_has_its_threads_again_after_what_runs_on_one():
    before = set_blas_threads(2)
    try:
        assert on_one_thread(set_blas_threads)(1) in (1, None)
        with pytest.raises(ZeroDivisionError):
            on_one_thread(lambda: 1 / 0)()
        assert set_blas_threads(2) in (2, None)
    finally:
        set_blas_threads(before or 1)


LOOP = """<ir_version: 10, opset_import: ["": 23]>
loop (float[2] x, int64 count) => (float[count, 2] z) {
    true = Constant <value = bool {1}> ()
    last, every = Loop (count, true, x)
        <body = inside (int64 i, bool go, float[2] before) => (bool again, float[2] after, float[2] each) {
            again = Identity(go)
            after = Add(before, before)
            each = Identity(after)
        }>
    z = Neg(every)
}"""


def test_a_loop_runs_again_where_the_results_of_nodes_are_kept():
    def changed(node):
        return (lambda compute, inputs: compute(inputs[0] + 1)) if node.operator == "Neg" else None

    program = FileProgram(graph_from_proto(onnx.parser.parse_model(LOOP)))
    feeds, exact = {"x": np.array([1, 3], "f"), "count": np.array(3)}, ExactMode()
    assert program.run(feeds, exact)["z"].tolist() == [[-2, -6], [-4, -12], [-8, -24]]
    got = program.run(feeds, ChangedMode(changed, results=exact.results))["z"]
    assert got.tolist() == [[-3, -7], [-5, -13], [-9, -25]]


def test_a_decision_that_costs_a_vector_less_than_a_branch_is_open_there_and_nowhere_else():
    dice = np.random.default_rng(0)
    oracle, usual, open_ = dice.standard_normal((64, 32)), 4e-3, 32
    plain = usual * dice.standard_normal((8, 64, 32))
    plain[:, open_:] /= 2  # one half of the vectors is the quieter one
    step = usual / 2 * 5 * np.sign(dice.standard_normal(32))
    branches = usual * dice.standard_normal((2, 64, 32))
    branches[:, open_:] /= 2
    branches[:, open_] += step
    samples = np.concatenate((plain, branches)).astype(np.float32)

    def with_step(at):
        got = oracle + plain[0]
        got[at] += step
        return judged(oracle, samples, got, branches=2)

    assert with_step(open_).passed
    assert with_step(open_ + 1).is_wrong


SCALED = """<ir_version: 10, opset_import: ["": 23]>
scaled (float[3, 32, 64] x, float[64, 64] w, float[3] position) => (float[3, 32, 64] y, float[3] angle)
<float factor = {0.2213594}, float frequency = {0.2213594}> {
    h = MatMul(x, w)
    y = Mul(factor, h)
    angle = Mul(position, frequency)
}"""


def scaled_in_torch(feeds, mode):
    """The same module; its factor is a number of Python's."""
    x, w, position = (torch.from_numpy(each) for each in feeds.values())
    with mode:
        results = {"y": 0.2213594 * torch.matmul(x, w), "angle": position * 0.2213594}
    return {name: each.double().numpy() for name, each in results.items()}


@pytest.mark.parametrize("make_mode", [FileRounding, RandomRounding])
def test_a_factor_that_the_precision_does_not_have_may_be_rounded_or_not(make_mode):
    dice = np.random.default_rng(0)
    feeds = {"x": dice.standard_normal((3, 32, 64)), "w": dice.standard_normal((64, 64))}
    feeds = {name: each.astype("e").astype("f") for name, each in feeds.items()}
    feeds["position"] = np.arange(1000, 1003, dtype="f")
    program = FileProgram(ir.from_onnx_text(SCALED))
    run = program.run if make_mode is FileRounding else scaled_in_torch
    oracle, baselines, _ = sample_case(make_mode, FP16, lambda mode: run(feeds, mode))
    case = made_case({"y": oracle["y"]}, inputs=feeds, baselines=baselines)
    h = (feeds["x"] @ feeds["w"]).astype("e").astype("f")

    def judged(factor):
        return judge_case(case, {"y": (h * np.float32(factor)).astype("e")}, FP16)[0]

    near = float(np.float16(0.2213594))
    assert judged(0.2213594).passed
    assert judged(near).passed
    assert judged(0.2213594 + 5 * (near - 0.2213594)).is_wrong
    # What nothing has rounded, such as a position in float32, has its factor as it is.
    assert run(feeds, make_mode(FP16, 2))["angle"] == pytest.approx(oracle["angle"], rel=1e-6)
    lowest = float(np.finfo(np.float32).min)
    assert make_mode(FP16, 2).factor(np.array([lowest])) == lowest  # rounded, it would be infinite in float32


NORMED = """<ir_version: 10, opset_import: ["": 23]>
normed (float[2, 32, 64] x, float[64, 64] w, float[1, 1, 512] one, float[512, 512] wide)
=> (float[2, 32, 64] y, float[1, 1, 512] z)
<float[64] weight, int64[1] last = {2}> {
    normed = LayerNormalization <axis = -1> (x, weight)
    y = MatMul(normed, w)
    h = MatMul(one, wide)
    length = ReduceL2 <keepdims = 1> (h, last)
    whole = Shape(h)
    lengths = Expand(length, whole)
    z = Div(h, lengths)
}"""


def normed_in_torch(weight):
    def run(feeds, mode):
        x, w, one, wide = (torch.from_numpy(each) for each in feeds.values())
        with mode:
            y = F.layer_norm(x, (64,), torch.nn.Parameter(torch.from_numpy(weight))) @ w
            results = {"y": y, "z": F.normalize(one @ wide, dim=-1)}
        return {name: each.detach().double().numpy() for name, each in results.items()}

    return run


@pytest.mark.parametrize("make_mode", [FileRounding, RandomRounding])
def test_one_rounding_may_scale_a_whole_vector(make_mode):
    """The weight of a norm, of one number that FP16 does not have, and the length of a vector."""
    dice, weight = np.random.default_rng(1), np.full(64, 1.3, "f")
    sizes = {"x": (2, 32, 64), "w": (64, 64), "one": (1, 1, 512), "wide": (512, 512)}
    feeds = {name: dice.standard_normal(size).astype("e").astype("f") for name, size in sizes.items()}
    model = onnx.parser.parse_model(NORMED)
    model.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
    file = FileProgram(ir.from_proto(model))
    run = file.run if make_mode is FileRounding else normed_in_torch(weight)
    oracle, baselines, _ = sample_case(make_mode, FP16, lambda mode: run(feeds, mode))
    case = made_case({"y": oracle["y"], "z": oracle["z"]}, inputs=feeds, baselines=baselines)

    def judged(steps):
        """Both are right but for so many times what the nearest number of FP16 is away."""
        factor = 1 + steps * (float(np.float16(1.3)) / 1.3 - 1)
        length = np.linalg.norm(feeds["one"].astype("d") @ feeds["wide"])
        other = 1 / (1 + steps * (float(np.float16(length)) / length - 1))
        got = {"y": (oracle["y"] * factor).astype("e"), "z": (oracle["z"] * other).astype("e")}
        return [each.outcome for each in judge_case(case, got, FP16)]

    assert judged(0) == judged(1) == [Outcome.PASSED] * 2
    assert judged(20) == [Outcome.FAILED] * 2


def test_parts_along_the_last_axis_have_a_budget_each():
    """As an output of one number for each token: its steps are parts along its last axis."""
    dice = np.random.default_rng(0)
    oracle = dice.standard_normal((3, 7))
    whole = budget_from_samples(dice.standard_normal((8, 3, 7)) * 2.0**-11, oracle, FP16)
    parts = whole.spread.slices([partial(np.take, indices=[i], axis=1) for i in range(7)])
    assert [each.worst_slice(np.full((3, 1), 2.0**-12))[0] < 3 for each in parts] == [True] * 7
    assert all(each.worst_slice(np.full((3, 1), 0.1))[0] > 3 for each in parts)
