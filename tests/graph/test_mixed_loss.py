"""Mixed precision by what it loses: small graphs in which FP16 loses digits without overflowing."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from mixed_models import E, Graph, distance, encoder, feeds, kept_in_float32, run
from onnx import TensorProto

from mha_deploy.graph import mixed_precision
from mha_deploy.graph.mixed_precision import apply_plan, enclosed_nodes, plan_precision, prepare
from mha_deploy.graph.precision_loss import plan_by_loss
from mha_deploy.graph.upcast import with_rounded_results
from mha_deploy.runtime import measure_ranges, plan_mixed_precision, run_cases

X = {"x": (TensorProto.FLOAT, ["B", E])}


def numbers(rows=8, seed=0, size=1.0):
    return {"x": (np.random.default_rng(seed).standard_normal((rows, E)) * size).astype(np.float32)}


def subtracted_mean(g, x):
    far = g.op("Add", x, g.weight("far", 1000.0), name="far_x")
    return g.op("Sub", far, g.op("ReduceMean", far, g.ints("axes", -1), name="mean"), name="centered")


def offset_and_back(g, x):
    """The offset is taken back only after steps that lose nothing themselves."""
    far = g.op("Add", x, g.weight("offset", 100.0), name="far_x")
    steps = g.op("Relu", g.op("Neg", g.op("Neg", far, name="neg"), name="pos"), name="relu")
    wide = g.op("Transpose", g.op("Transpose", steps, name="turned", perm=[1, 0]), name="back", perm=[1, 0])
    return g.op("Sub", wide, "offset", name="near_x")


def squares_below_normal(g, x):
    small = g.op("Mul", x, g.weight("small", 1.5e-4), name="small_x")
    square = g.op("Mul", small, small, name="square")
    mean = g.op("ReduceMean", square, g.ints("axes", -1), name="mean")
    return g.op("Div", small, g.op("Sqrt", mean, name="root"), name="normed")


def product_below_normal(g, x):
    one, two = (g.op("Mul", x, g.weight(f"w{i}", 1.5e-4), name=f"small{i}") for i in range(2))
    return g.op("Mul", g.op("Mul", one, two, name="tiny"), g.weight("large", 5e4), name="product")


def guarded_quotient(g, x, steep=3.0):
    sure = g.op("Sigmoid", g.op("Mul", x, g.weight("steep", steep), name="steep_x"), name="sigmoid")
    rest = g.op("Sub", g.weight("guard", 1.00001), sure, name="rest")
    return g.op("Log", g.op("Div", sure, rest, name="odds"), name="logit")


def variance_of_squares(g, x):
    far = g.op("Add", x, g.weight("far", 30.0), name="far_x")
    axes = g.ints("axes", -1)
    mean = g.op("ReduceMean", far, axes, name="mean")
    of_squares = g.op("ReduceMean", g.op("Mul", far, far, name="squares"), axes, name="of_squares")
    variance = g.op("Sub", of_squares, g.op("Mul", mean, mean, name="mean2"), name="variance")
    return g.op("Div", x, g.op("Sqrt", variance, name="deviation"), name="normed")


def log_of_one_plus(g, x):
    small = g.op("Mul", x, g.weight("small", 1e-3), name="small_x")
    log = g.op("Log", g.op("Add", small, g.weight("one", 1.0), name="plus"), name="log")
    return g.op("Mul", log, g.weight("large", 1e3), name="scaled")


LOSSY = [
    *(subtracted_mean, offset_and_back, squares_below_normal, product_below_normal),
    *(guarded_quotient, variance_of_squares, log_of_one_plus),
]


def model_of(make, factor=1.0):
    """A projection, what loses digits, and another projection."""
    g = Graph()
    first = g.linear("x", "first", E, E, factor)
    g.linear(make(g, first), "last", E, E)
    return g.model(X, {"last": ["B", E]})


def in_types_of(model, arrays):
    types = {value.name: value.dtype.numpy() for value in model.graph.inputs}
    return {name: array.astype(types[name]) for name, array in arrays.items()}


def loss_of(model, plan, case):
    """The loss with every FP16 result rounded, on numbers that FP16 holds."""
    case = {name: array.astype(np.float16).astype(np.float32) for name, array in case.items()}
    mixed = apply_plan(model, plan)
    onnx.checker.check_model(ir.to_proto(mixed), full_check=True)
    return distance(run(with_rounded_results(mixed), in_types_of(mixed, case)), run(model, case))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("make", LOSSY, ids=lambda make: make.__name__)
def test_what_loses_digits_is_upcast_and_the_rest_is_not(make):
    model = model_of(make)
    cases = {"one": numbers(), "two": numbers(3, 1)}
    before, plan = plan_precision(model, measure_ranges(model, cases)), plan_mixed_precision(model, cases)
    assert plan.worst_loss <= plan.limit <= 0.02
    other = numbers(16, seed=7)
    assert loss_of(model, before, other) > 2 * plan.limit  # by the ranges alone
    assert loss_of(model, plan, other) <= 2 * plan.limit
    kept = {each.name: each.kind for each in plan.kept}
    assert "rounding" in kept.values()
    assert "first" not in kept
    assert "last" not in kept
    assert plan.reference == "fp64"


@pytest.mark.slow
def test_scaled_inputs_on_which_float32_fails_itself_do_not_hide_the_others():
    """ONNX Runtime's sigmoid is 0 in float32 where its logarithm is finite in FP64."""
    g = Graph()
    guarded_quotient(g, "x", steep=6.0)
    random = np.random.default_rng(0)
    cases = {str(B): {"x": random.standard_normal((B, 16)).astype(np.float32)} for B in (2, 1, 3)}
    plan = plan_mixed_precision(g.model({"x": (TensorProto.FLOAT, ["B", 16])}, {"logit": ["B", 16]}), cases)
    assert plan.worst_loss <= plan.limit <= 0.02
    assert {"sigmoid", "rest"} <= {each.name for each in plan.kept}


def test_constants_that_fp16_rounds_to_one_side_make_no_gain():
    """Two factors of 1.00048, each 1 in FP16: every number is a thousandth smaller, and none is far off."""
    g = Graph()
    once = g.op("Mul", "x", g.weight("first", 1 + 0.98 * 2**-11), name="once")
    g.op("Mul", once, g.weight("second", 1 + 0.98 * 2**-11), name="twice")
    plan = plan_mixed_precision(
        g.model({"x": (TensorProto.FLOAT, ["B", E])}, {"twice": ["B", E]}), {"one": numbers()}
    )
    assert {each.name for each in plan.kept} & {"once", "twice"}


@pytest.mark.slow
def test_the_limit_is_a_choice():
    model = model_of(offset_and_back)
    loose = plan_mixed_precision(model, {"one": numbers()}, limit=0.9)
    assert not loose.kept
    assert 0.01 < loose.worst_loss < 0.9 == loose.limit
    tight = plan_mixed_precision(model, {"one": numbers()}, limit=1e-5)
    assert tight.worst_loss < 1e-4
    assert {"first", "last"} <= {each.name for each in tight.kept}


def test_a_plan_over_the_limit_never_replaces_one_below_it():
    """With one node in float32, fewer errors in one output are more in the others, below the limit."""
    g = Graph()
    names = [g.op("Neg", "x", name=name) for name in ("first", "second", "third")]
    model, limit = g.model(X, {name: ["B", E] for name in names}), 0.1
    signs = np.where(np.arange(E) % 2, 1, -1).astype(np.float32)  # errors that are no gain

    def run_with_errors(graph, cases):
        made = {value.name for node in graph.graph for value in node.outputs}
        shares = (1.1, 0.0, 0.0) if "first/float32" in made else (0.9, 0.9, 0.9)
        is_mixed = any(name.endswith("/float32") for name in made)
        errors = dict(zip(names, shares, strict=True)) if is_mixed else {}
        for results in run_cases("ort-cpu", graph, cases):
            yield {
                name: array * (1 + errors.get(name, 0.0) * limit * signs) for name, array in results.items()
            }

    plan = plan_by_loss(run_with_errors, model, {"one": numbers()}, limit=limit)
    assert [each.name for each in plan.kept] == ["first"]
    assert plan.worst_loss <= limit


def test_a_healthy_model_keeps_its_plan():
    model = encoder(sentinel=-1e9)
    cases = {"short": feeds(S=5), "long": feeds(S=12, seed=1)}
    plan = plan_mixed_precision(model, cases)
    assert not kept_in_float32(plan), plan.lines()
    assert 1e-4 < plan.worst_loss < plan.limit / 2


def test_a_long_chain_that_only_rounds_stays_fp16():
    g, x = Graph(), "x"
    for index, factor in enumerate(g.random.uniform(0.9, 1.1, 120).astype(np.float16)):
        x = g.op("Mul", x, g.weight(f"factor{index}", factor), name=f"n{index}")
    plan = plan_mixed_precision(g.model(X, {x: ["B", E]}), {"one": numbers()})
    assert not kept_in_float32(plan), plan.lines()
    assert plan.worst_loss < plan.limit


def test_an_operator_without_a_kernel_for_fp16_stays_float32():
    g = Graph()
    g.op("MeanVarianceNormalization", g.linear("x", "first", E, E), name="y", axes=[-1])
    model = g.model(X, {"y": ["B", E]})
    plan = plan_mixed_precision(model, {"one": numbers()})
    assert {each.name: each.kind for each in plan.kept} == {"y": "operator"}
    assert (
        distance(
            run(apply_plan(model, plan), {"x": numbers()["x"].astype(np.float16)}), run(model, numbers())
        )
        < 2e-3
    )


def test_planning_visits_every_node_of_a_chain_a_few_times(monkeypatch):
    """Cheap nodes are enclosed by float32 ones or not: found without a search for each of them."""
    g, x = Graph(), "x"
    for index in range(1000):
        x = g.op("Neg", x, name=f"n{index}")
    work = prepare(g.model(X, {x: ["B", E]}))
    visits, original = [0], mixed_precision.float_inputs

    def counted(node):
        visits[0] += 1
        return original(node)

    monkeypatch.setattr(mixed_precision, "float_inputs", counted)
    first = next(iter(work.graph))
    assert enclosed_nodes(work.graph, {first}, set()) == []
    assert visits[0] < 10 * 1000
