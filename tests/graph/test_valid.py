"""What ONNX Runtime loads is brought into one form on loading, and every pass gives a valid model."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hand_graphs import run
from onnx import TensorProto, helper, numpy_helper

import mha_deploy as md
from mha_deploy.graph.lower import DIALECTS, LoweringError, lower

HEAD = """<ir_version: 10, opset_import: [OPSETS]>
g (float[B,2,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v) => (float[B,2,S,8] y)
"""
PARTS = {
    "kt": "kt = Transpose <perm = [0, 1, 3, 2]> (k)",
    "s": "s = MatMul (q, kt)",
    "w": "w = Softmax (s)",
    "a": "a = MatMul (w, v)",
}
ATTENTION = "\n".join(PARTS.values())
FUNCTION = f"""<opset_import: ["" : 17], domain: "own">
att (q, k, v) => (a) {{ {ATTENTION} }}"""


def parse(body: str, opsets: str = '"" : 23', *, constants: str = "", after: str = "") -> onnx.ModelProto:
    text = HEAD.replace("OPSETS", opsets) + constants + "{" + body + "}" + after
    return onnx.parser.parse_model(text)


def in_another_order() -> onnx.ModelProto:
    model = parse(f"{ATTENTION} y = Identity (a)")
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    return model


def branch_before_what_it_reads() -> onnx.ModelProto:
    """The branch of an If reads an outer value that is computed behind it."""
    model = parse(
        f"""c = Constant <value_int = 1> ()
        y = If (d) <then_branch = t () => (float[B,2,S,8] ya) {{ ya = Identity (a) }},
                    else_branch = e () => (float[B,2,S,8] yb) {{ yb = Identity (v) }}>
        d = Cast <to = 9> (c)
        {ATTENTION}"""
    )
    return model


def other_name_of_the_domain() -> onnx.ModelProto:
    model = parse(f"{ATTENTION} y = Identity (a)")
    model.opset_import[0].domain = "ai.onnx"
    for node in list(model.graph.node)[::2]:
        node.domain = "ai.onnx"
    return model


def function_of_another_opset() -> onnx.ModelProto:
    return parse("y = own.att (q, k, v)", '"" : 21, "own" : 1', after=FUNCTION)


def function_without_an_import() -> onnx.ModelProto:
    """The function uses a domain that the model does not import."""
    after = f"""<opset_import: ["" : 18, "com.microsoft" : 1], domain: "own">
    att (q, k, v) => (b) {{ {ATTENTION} b = com.microsoft.Gelu (a) }}"""
    return parse("y = own.att (q, k, v)", '"" : 18, "own" : 1, "com.microsoft" : 1', after=after)


def functions_in_functions() -> onnx.ModelProto:
    """Each of another opset, with operators that are the same in all of them."""
    after = f"""<opset_import: ["" : 18, "own" : 1], domain: "own">
    outer (q, k, v) => (b) {{ a = own.att (q, k, v) b = Relu (a) }} {FUNCTION}"""
    return parse("y = own.outer (q, k, v)", '"" : 20, "own" : 1', after=after)


def domain_without_an_import() -> onnx.ModelProto:
    return parse(f"{ATTENTION} y = com.microsoft.Gelu (a)", '"" : 21')


def sparse_weights(two_axes: bool = False) -> onnx.ModelProto:
    body = ATTENTION.replace("Softmax (s)", "Softmax (t)").replace("w =", "t = Add (s, bias) w =")
    model = parse(f"{body} y = Identity (a)")
    values = numpy_helper.from_array(np.array([2.0, -3.0], np.float32), "bias")
    places = np.array([[0, 1], [1, 0]] if two_axes else [1, 2])
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(places, "places"), [2, 2])
    if two_axes:
        constant = helper.make_node("Constant", [], ["bias"], sparse_value=sparse)
        model.graph.node.insert(0, constant)
    else:
        model.graph.sparse_initializer.append(sparse)
    return model


def sequence() -> onnx.ModelProto:
    return parse(
        f"{ATTENTION} one = Constant <value_int = 1> () both = SequenceConstruct (v, a)"
        "y = SequenceAt (both, one)"
    )


def split_sequence(opset: int = 18) -> onnx.ModelProto:
    tail = "parts = SplitToSequence <axis = 1> (a, one) y = ConcatFromSequence <axis = 1> (parts)"
    return parse(f"{ATTENTION} {tail}", f'"" : {opset}', constants="<int64 one = {1}>")


def sequence_from_a_loop() -> onnx.ModelProto:
    body = f"""{ATTENTION}
    start = SequenceEmpty ()
    n = Constant <value_int = 2> ()
    all = Loop (n, , start) <body = b (int64 i, bool go, seq(float) s0) => (bool go2, seq(float) s1) {{
        go2 = Identity (go)
        s1 = SequenceInsert (s0, a) }}>
    z = Constant <value_int = 1> ()
    y = SequenceAt (all, z)"""
    return parse(body)


def optional() -> onnx.ModelProto:
    return parse(f"{ATTENTION} o = Optional (a) y = OptionalGetElement (o)")


def weights_as_inputs() -> onnx.ModelProto:
    model = parse(f"{ATTENTION} y = Mul (a, c)", constants="<float[8] c = {1, 2, 3, 4, 5, 6, 7, 8}>")
    model.ir_version = 3
    model.graph.input.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, [8]))
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", 17))
    return model


def nameless() -> onnx.ModelProto:
    model = parse(f"{ATTENTION} y = Identity (a)")
    model.graph.name = ""
    return model


def output_without_a_type() -> onnx.ModelProto:
    model = parse(f"{ATTENTION} y = Identity (a)")
    model.graph.output[0].ClearField("type")
    return model


def values_without_a_rank() -> onnx.ModelProto:
    model = parse(f"{ATTENTION} n = Shape (q) y = Reshape (a, n)")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model.graph.input.append(helper.make_tensor_value_info("free", TensorProto.FLOAT, None))
    model.graph.node.append(helper.make_node("Relu", ["free"], ["freed"]))
    model.graph.output.append(helper.make_tensor_value_info("freed", TensorProto.FLOAT, None))
    return model


def wrong_inner_shape() -> onnx.ModelProto:
    """A stated shape that is not the inferred one, which ONNX Runtime only warns about."""
    model = parse(f"{ATTENTION} y = Identity (a)")
    model.graph.value_info.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, ["B", 2, 7, 7]))
    return model


ODD = {
    "in another order": in_another_order,
    "branch before what it reads": branch_before_what_it_reads,
    "ai.onnx": other_name_of_the_domain,
    "function of another opset": function_of_another_opset,
    "function with another domain": function_without_an_import,
    "functions in functions": functions_in_functions,
    "domain without an import": domain_without_an_import,
    "sparse weights": sparse_weights,
    "sparse constant": lambda: sparse_weights(two_axes=True),
    "sequence": sequence,
    "split sequence": split_sequence,
    "split sequence of an old opset": lambda: split_sequence(17),
    "sequence from a loop": sequence_from_a_loop,
    "optional": optional,
    "weights as inputs": weights_as_inputs,
    "graph without a name": nameless,
    "output without a type": output_without_a_type,
    "values without a rank": values_without_a_rank,
    "wrong inner shape": wrong_inner_shape,
}


def drawn() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal((2, 2, 2, 8)).astype(np.float32) for name in "qkv"}
    return feeds | {"c": np.arange(1, 9, dtype=np.float32), "free": np.ones((3, 1), np.float32)}


@pytest.mark.parametrize("name", ODD)
def test_what_onnx_runtime_loads_is_fused_and_lowered_to_valid_models(name: str) -> None:
    model = ODD[name]()
    untouched, feeds = model.SerializeToString(deterministic=True), drawn()
    wanted = run(model, feeds)
    fused, report = md.fuse(model)
    assert model.SerializeToString(deterministic=True) == untouched
    assert (len(report.fused), report.complete) == (1, True)
    results = [ir.from_proto(fused)]
    for dialect in DIALECTS:
        try:
            results.append(lower(ir.from_proto(fused), dialect))
        except LoweringError:
            assert dialect == "plugin"  # it has no kernels for float32
    for result in results:
        proto = ir.to_proto(result)
        for value in (*proto.graph.input, *proto.graph.output):  # the checker wants a rank, no runtime does
            value.type.tensor_type.shape.SetInParent()
        onnx.checker.check_model(proto, full_check=name not in ("wrong inner shape", "values without a rank"))
        if not any(node.domain == "com.microsoft" and "Gelu" not in node.op_type for node in result.graph):
            np.testing.assert_allclose(run(result, feeds)[0], wanted[0], atol=1e-5)


def two_versions() -> onnx.ModelProto:
    model = parse(f"{ATTENTION} y = Identity (a)")
    model.opset_import.append(helper.make_opsetid("ai.onnx", 17))
    return model


def sparse_beyond_its_dimensions() -> onnx.ModelProto:
    model = sparse_weights()
    model.graph.sparse_initializer[0].indices.CopyFrom(numpy_helper.from_array(np.array([1, 9])))
    return model


def large_sparse() -> onnx.ModelProto:
    model = sparse_weights()
    model.graph.sparse_initializer[0].dims[:] = [1 << 20, 1 << 20]
    return model


def unknown_operator() -> onnx.ModelProto:
    return parse(f"{ATTENTION} y = Atention (a)")


def function_that_cannot_be_converted() -> onnx.ModelProto:
    after = """<opset_import: ["" : 21, "other" : 2], domain: "own">
    att (q, k, v) => (y) { y = other.Thing (q) }"""
    return parse("y = own.att (q, k, v)", '"" : 21, "own" : 1, "other" : 1', after=after)


REFUSED = (
    two_versions,
    sparse_beyond_its_dimensions,
    large_sparse,
    unknown_operator,
    function_that_cannot_be_converted,
)


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_what_is_not_valid_is_refused_with_its_reason(make) -> None:
    with pytest.raises(md.DeployError) as refusal:
        md.fuse(make())
    assert refusal.value.got
    assert refusal.value.hint
