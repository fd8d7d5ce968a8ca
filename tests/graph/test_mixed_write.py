"""What mixed precision does to single operators: types, constants, inputs and outputs, refusals."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from mixed_models import LOWEST, E, Graph, distance, encoder, feeds, kept_in_float32, run, run_as_written
from onnx import TensorProto, helper

from mha_deploy.errors import DeployError
from mha_deploy.graph.mixed_precision import apply_plan, plan_precision
from mha_deploy.runtime import measure_ranges

F32, I64 = TensorProto.FLOAT, TensorProto.INT64
HALF, FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT
X = {"x": (F32, ["B", E])}


def numbers(size=1.0, rows=3, seed=0):
    return {"x": (np.random.default_rng(seed).standard_normal((rows, E)) * size).astype(np.float32)}


def mixed_of(model, case, **options):
    """The plan and the checked mixed graph."""
    plan = plan_precision(model, measure_ranges(model, {"case": case}), **options)
    mixed = apply_plan(model, plan)
    onnx.checker.check_model(ir.to_proto(mixed), full_check=True)
    return plan, mixed


def in_types_of(model, arrays):
    types = {value.name: value.dtype.numpy() for value in model.graph.inputs}
    return {name: array.astype(types[name]) for name, array in arrays.items()}


def near(model, mixed, case, bound=3e-3):
    return distance(run(mixed, in_types_of(mixed, case)), run(model, case)) < bound


def kept(plan):
    return {each.name: each.kind for each in plan.kept}


# -- inputs and outputs ------------------------------------------------------------------------------


def test_inputs_and_outputs_are_fp16_under_their_own_names():
    g = Graph()
    g.linear("x", "y", E, E)
    plan, mixed = mixed_of(g.model(X, {"y": ["B", E]}), numbers())
    assert not kept_in_float32(plan)
    assert [(v.name, v.dtype) for v in (*mixed.graph.inputs, *mixed.graph.outputs)] == [
        ("x", HALF),
        ("y", HALF),
    ]


def test_an_output_stays_float32_where_its_numbers_demand_it():
    g = Graph()
    g.linear("x", "y", E, E, factor=1e6)
    model = g.model(X, {"y": ["B", E]})
    plan, mixed = mixed_of(model, numbers())
    assert [each.name for each in plan.outputs] == ["y"]
    assert [(v.name, v.dtype) for v in (*mixed.graph.inputs, *mixed.graph.outputs)] == [
        ("x", HALF),
        ("y", FLOAT),
    ]
    assert near(model, mixed, numbers())


def test_an_output_of_a_float32_node_is_cast_once_for_all():
    g = Graph()
    large = g.linear("x", "large", E, E, factor=1e6)
    g.op("Mul", large, g.weight("small", 1e-5), name="y")
    g.linear("y", "z", E, E)
    model = g.model(X, {"y": ["B", E], "z": ["B", E]})
    plan, mixed = mixed_of(model, numbers())
    assert kept(plan) == {"large": "overflow", "y": "overflow"}
    assert [(v.name, v.dtype) for v in mixed.graph.outputs] == [("y", HALF), ("z", HALF)]
    assert sum(node.op_type == "Cast" for node in mixed.graph) == 2
    assert near(model, mixed, numbers())


def test_an_input_stays_float32_where_its_numbers_demand_it():
    g = Graph()
    g.linear("x", "y", E, E, factor=1e-5)
    model = g.model(X, {"y": ["B", E]})
    plan, mixed = mixed_of(model, numbers(1e6))
    assert [each.name for each in plan.inputs] == ["x"]
    assert mixed.graph.inputs[0].dtype == FLOAT
    assert near(model, mixed, numbers(1e6))


def test_a_mask_input_with_sentinels_stays_float32_and_is_clamped_inside():
    g = Graph()
    g.op("Attention", "x", "x", "x", "mask", name="y", q_num_heads=4, kv_num_heads=4)
    dims = {"x": (F32, ["B", "S", E]), "mask": (F32, ["B", 1, "S", "S"])}
    model = g.model(dims, {"y": ["B", "S", E]})
    x = np.random.default_rng(0).standard_normal((2, 6, E)).astype(np.float32)
    mask = np.zeros((2, 1, 6, 6), np.float32)
    mask[1, ..., 3:] = LOWEST
    mask[0, 0, 0, :] = LOWEST  # a query that sees no key: -inf would give NaN
    plan, mixed = mixed_of(model, {"x": x, "mask": mask})
    assert kept(plan) == {}
    assert [each.name for each in plan.inputs] == ["mask"]
    assert [each.name for each in plan.clamped] == ["mask"]
    assert [v.dtype for v in mixed.graph.inputs] == [HALF, FLOAT]
    result, exact = run(mixed, {"x": x.astype(np.float16), "mask": mask}), run(model, {"x": x, "mask": mask})
    assert np.isfinite(result).all()
    assert distance(result[1], exact[1]) < 3e-3
    assert distance(result[0, 1:], exact[0, 1:]) < 3e-3


def test_a_mask_input_of_high_sentinels_is_clamped_from_above():
    """The graph negates what it is given: 1e38 hides a key."""
    g = Graph()
    g.op("Neg", "hidden", name="mask")
    g.op("Attention", "x", "x", "x", "mask", name="y", q_num_heads=4, kv_num_heads=4)
    dims = {"x": (F32, ["B", "S", E]), "hidden": (F32, ["B", 1, "S", "S"])}
    model = g.model(dims, {"y": ["B", "S", E]})
    x = np.random.default_rng(0).standard_normal((2, 6, E)).astype(np.float32)
    hidden = np.zeros((2, 1, 6, 6), np.float32)
    hidden[1, ..., 3:] = 1e38
    hidden[0, 0, 0, :] = 1e38  # a query that sees no key: infinity would give NaN
    plan, mixed = mixed_of(model, {"x": x, "hidden": hidden})
    assert {each.name: each.written for each in plan.clamped} == {"hidden": 65504.0}
    result = run_as_written(mixed, {"x": x.astype(np.float16), "hidden": hidden})
    assert distance(result, run(model, {"x": x, "hidden": hidden})) < 3e-3


# -- constants ---------------------------------------------------------------------------------------


def test_a_constant_of_two_types_is_held_once_in_each_and_a_shared_one_once():
    g = Graph()
    shared = g.weight("shared", g.random.standard_normal((E, E)) * E**-0.5)
    one = g.op("MatMul", "x", shared, name="one")
    two = g.op("MatMul", one, shared, name="two")
    large = g.op("Mul", two, g.weight("factor", 6e4), name="large")
    three = g.op("MatMul", large, shared, name="three")
    g.op("Mul", three, g.weight("back", 1e-5), name="y")
    model = g.model(X, {"y": ["B", E]})
    plan, mixed = mixed_of(model, numbers())
    assert kept(plan) == {"large": "overflow", "three": "overflow", "y": "overflow"}
    types = sorted(
        (v.dtype.name, len(v.uses())) for v in mixed.graph.initializers.values() if len(v.shape) == 2
    )
    assert types == [("FLOAT", 1), ("FLOAT16", 2)]
    assert near(model, mixed, numbers())


def test_a_weight_beyond_fp16_stays_float32():
    g = Graph()
    g.op("Mul", "x", g.weight("w", np.full(E, 1e5)), name="y")
    plan, _ = mixed_of(g.model(X, {"y": ["B", E]}), numbers(1e-4))
    assert kept(plan) == {"y": "overflow"}
    assert "w holds 100,000" in plan.kept[0].reason


def test_an_epsilon_stays_float32_up_to_the_division():
    g = Graph()
    square = g.op("Mul", "x", "x", name="square")
    mean = g.op("ReduceMean", square, g.ints("axes", -1), name="mean")
    root = g.op("Sqrt", g.op("Add", mean, g.weight("eps", 1e-12), name="add"), name="root")
    g.op("Div", "x", root, name="y")
    model = g.model(X, {"y": ["B", E]})
    case = numbers()
    case["x"][0] = 0.0  # 0 / sqrt(0) is not a number
    plan, mixed = mixed_of(model, case)
    assert kept(plan) == {"add": "flushed", "root": "flushed", "y": "flushed"}
    assert near(model, mixed, case)


def test_the_few_tiny_numbers_of_a_random_matrix_are_no_reason():
    g = Graph()
    g.linear("x", "y", E, E)
    g.weights["y.weight"][0, :3] = 1e-9
    assert not kept_in_float32(mixed_of(g.model(X, {"y": ["B", E]}), numbers())[0])
    g.weights["y.weight"][:16] = 1e-9
    assert kept(mixed_of(g.model(X, {"y": ["B", E]}), numbers())[0]) == {"y": "flushed"}


@pytest.mark.parametrize(("largest", "size", "found"), [(0.1, 1.0, {}), (4e-8, 1e-5, {"y": "flushed"})])
def test_tiny_numbers_of_a_bias_are_no_reason_beside_the_rounding_of_the_sum(largest, size, found):
    g = Graph()
    g.op("Add", "x", g.weight("bias", np.where(np.arange(E) < 3, 2e-8, largest)), name="y")
    assert kept(mixed_of(g.model(X, {"y": ["B", E]}), numbers(size))[0]) == found


def test_bounds_without_end_are_clamped():
    g = Graph()
    g.op("Clip", "x", g.weight("low", LOWEST), g.weight("high", -LOWEST), name="y")
    plan, mixed = mixed_of(g.model(X, {"y": ["B", E]}), numbers())
    assert not kept_in_float32(plan)
    assert {each.name: each.written for each in plan.clamped} == {"low": -65504.0, "high": 65504.0}
    assert mixed.graph.initializers["high"].const_value.numpy() == np.float16(65504)


# -- inside operators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMean"])
def test_accumulation_counts_even_where_the_result_is_small(op_type):
    g = Graph()
    total = g.op(op_type, "x", g.ints("axes", -1), name="total")
    g.op("Add", "x", total, name="y")
    x = np.tile(np.array([1000.0, -1000.0], np.float32), (3, E // 2))
    plan, mixed = mixed_of(g.model(X, {"y": ["B", E]}), {"x": x})
    assert kept(plan) == {"total": "overflow"}
    assert plan.kept[0].figure == 1000 * E
    assert next(n for n in mixed.graph if n.name == "total").outputs[0].dtype == FLOAT


@pytest.mark.parametrize(("noop", "found"), [(0, {"total": "overflow"}), (1, {})])
@pytest.mark.parametrize("stated", [True, False])
def test_a_reduction_without_axes_accumulates_all_numbers_or_none(noop, found, stated):
    g = Graph()
    axes = [g.ints("axes")] if stated else []
    g.op("ReduceMean", "x", *axes, name="total", keepdims=1, noop_with_empty_axes=noop)
    g.op("Add", "x", "total", name="y")
    x = np.tile(np.array([1000.0, -1000.0], np.float32), (3, E // 2))
    plan, _ = mixed_of(g.model(X, {"y": ["B", E]}), {"x": x})
    assert kept(plan) == found


def test_positions_that_become_angles_stay_exact():
    g = Graph()
    position = g.op("Cast", "at", name="position", to=F32)
    angle = g.op("Mul", g.op("Unsqueeze", position, g.ints("axis", -1), name="column"), "speed", name="angle")
    g.weight("speed", 10000.0 ** -(np.arange(E) / E))
    g.op("Add", "x", g.op("Sin", angle, name="sine"), name="y")
    model = g.model({**X, "at": (I64, ["B"])}, {"y": ["B", E]})
    case = {**numbers(), "at": np.array([1, 1999, 3001])}
    plan, mixed = mixed_of(model, case)
    assert kept(plan) == {"position": "exact", "column": "exact", "angle": "exact", "sine": "exact"}
    assert mixed.graph.inputs[1].dtype == ir.DataType.INT64
    assert near(model, mixed, case)


def test_cheap_nodes_between_float32_nodes_stay_float32():
    g = Graph()
    large = g.op("Mul", "x", g.weight("factor", 6e4), name="large")
    fits = g.op("Mul", large, g.weight("back", 1e-5), name="fits")
    flat = g.op("Relu", g.op("Neg", fits, name="neg"), name="flat")
    again = g.op("Mul", flat, g.weight("again_factor", 6e4), name="again")
    g.op("Mul", again, g.weight("back_again", 1e-5), name="y")
    model = g.model(X, {"y": ["B", E]})
    plan, mixed = mixed_of(model, numbers())
    assert {name for name, kind in kept(plan).items() if kind == "between"} == {"neg", "flat"}
    assert sum(node.op_type == "Cast" for node in mixed.graph) == 2
    assert near(model, mixed, numbers())


# -- attributes, types, refusals ---------------------------------------------------------------------------


def test_type_attributes_and_operators_without_fp16_are_handled():
    g = Graph()
    shape = g.op("Shape", "x", name="shape")
    value = helper.make_tensor("half", F32, [1], [0.5])
    full = g.op("ConstantOfShape", shape, name="full", value=value)
    start, limit, delta = (g.weight(f"range_{number}", number) for number in (0.0, E, 1.0))
    ramp = g.op("Range", start, limit, delta, name="ramp")
    size = g.op("Cast", g.op("Size", "x", name="size"), name="count", to=F32)
    parts = g.op("Add", g.op("Add", full, ramp, name="a"), g.op("Add", "x", size, name="b"), name="y")
    model = g.model(X, {parts: ["B", E]})
    plan, mixed = mixed_of(model, numbers())
    assert kept(plan) == {"ramp": "operator"}
    nodes = {node.name: node for node in mixed.graph}
    assert nodes["full"].attributes["value"].as_tensor().dtype == HALF
    assert nodes["count"].attributes["to"].as_int() == HALF
    assert near(model, mixed, numbers())


def test_constant_nodes_are_converted_too():
    g = Graph()
    tensor = helper.make_tensor("c", F32, [], [2.5])
    g.op("Add", g.op("Mul", "x", g.op("Constant", name="a", value=tensor), name="m"), "b", name="y")
    g.nodes.insert(0, helper.make_node("Constant", [], ["b"], name="b", value_float=0.25))
    model = g.model(X, {"y": ["B", E]})
    _, mixed = mixed_of(model, numbers())
    assert near(model, mixed, numbers())


def test_what_is_inside_branches_stays_float32():
    """A branch reads the FP16 part of the graph, one of its outputs is a value from outside."""
    result = helper.make_tensor_value_info("z", F32, ["B", E])
    body = [helper.make_node("Exp", ["doubled"], ["e"]), helper.make_node("Add", ["e", "x"], ["z"])]
    then = helper.make_graph(body, "then", [], [result])
    other = helper.make_graph([helper.make_node("Identity", ["doubled"], ["z"])], "else", [], [result])
    g = Graph()
    g.op("Add", "x", "x", name="doubled")
    g.op("Neg", g.op("If", "cond", name="chosen", then_branch=then, else_branch=other), name="y")
    model = g.model({**X, "cond": (TensorProto.BOOL, [])}, {"y": ["B", E]})
    for chosen in (True, False):
        given = {**numbers(), "cond": np.array(chosen)}
        plan, mixed = mixed_of(model, given)
        assert kept(plan) == {"chosen": "operator"}
        assert near(model, mixed, given)


def test_bfloat16_inside_becomes_float32_or_fp16():
    g = Graph()
    g.weight("slopes", [2.0**-i for i in range(E)])
    narrow = [
        g.op("Cast", name, name=f"{name}/bf16", to=int(TensorProto.BFLOAT16)) for name in ("x", "slopes")
    ]
    g.op("Cast", g.op("Mul", *narrow, name="product"), name="y", to=int(F32))
    model = g.model(X, {"y": ["B", E]})
    _, mixed = mixed_of(model, numbers())
    assert all(value.dtype != ir.DataType.BFLOAT16 for node in mixed.graph for value in node.outputs)
    exact = numbers()["x"] * g.weights["slopes"]
    assert distance(run(mixed, {"x": numbers()["x"].astype(np.float16)}), exact) < 1e-3


def test_a_plan_or_ranges_of_another_graph_are_refused():
    large = encoder({"0.up": 300.0, "0.down": 2000.0})
    ranges = measure_ranges(large, {"case": feeds()})
    with pytest.raises(DeployError, match="another graph"):
        apply_plan(encoder(layers=1, sentinel=None), plan_precision(large, ranges))
    g = Graph()
    g.linear("x", "y", E, E)
    with pytest.raises(DeployError, match="not measured on this graph"):
        plan_precision(g.model(X, {"y": ["B", E]}), ranges)


@pytest.mark.parametrize(
    ("options", "words"), [({"wide": "fp8"}, "fp32 or bf16"), ({"margin": 0.5}, "margin")]
)
def test_options_that_mean_nothing_are_refused(options, words):
    model = encoder(layers=1)
    with pytest.raises(DeployError, match=words):
        plan_precision(model, measure_ranges(model, {"case": feeds()}), **options)


def test_ranges_need_a_case():
    with pytest.raises(DeployError, match="at least one case"):
        measure_ranges(encoder(layers=1), {})


@pytest.mark.parametrize("order", [("large", "small"), ("small", "large")])
def test_the_extremes_of_all_cases_count(order):
    g = Graph()
    g.op("ReduceSum", g.linear("x", "z", E, E), g.ints("axes", -1), name="y")
    model = g.model(X, {"y": ["B", 1]})
    cases = {"large": numbers(100.0), "small": numbers(0.01, rows=5, seed=1)}
    both = measure_ranges(model, {name: cases[name] for name in order})
    large, small = (measure_ranges(model, {name: cases[name]}) for name in ("large", "small"))
    assert both.inner == large.inner
    for name in ("x", "z", "y"):
        assert both.values[name].largest == large.values[name].largest
        assert both.values[name].highest == large.values[name].highest
        assert both.values[name].smallest == small.values[name].smallest
