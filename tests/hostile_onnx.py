"""ONNX files that are wrong in ways that a protobuf allows, and mutations of right ones."""

import random

import numpy as np
from hostile_files import FLOAT, INT64, attention, identity, model, tensor, value
from onnx import AttributeProto, TensorProto, helper

BIG = 1 << 62


def _with_bytes(proto, text):
    """A file in which a text that stands for itself is not UTF-8."""
    data = proto.SerializeToString()
    assert text in data
    return data.replace(text, text[:1] + b"\xff\xfe" + text[3:])


def _changed(proto, change):
    change(proto)
    return proto


def _sized(dims, out=("B",)):
    graph = helper.make_graph([identity("x", "y")], "g", [value("x", dims)], [value("y", out)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def _constant(name="n", **given):
    return helper.make_node("Constant", [], [name], **given)


def _body(*nodes):
    return helper.make_graph(
        [identity("c", "c_out"), *nodes], "body",
        [value("i", (), INT64), value("c", (), TensorProto.BOOL), value("in")],
        [value("c_out", (), TensorProto.BOOL), value("out")],
    )  # fmt: skip


def loop(nodes=(), weights=(), trips="n", condition=""):
    """A model with a loop, of as many iterations as these nodes or weights say."""
    node = helper.make_node("Loop", [trips, condition, "x"], ["y"], body=_body(identity("in", "out")))
    return model([*nodes, node], weights)


def _scans(depth, length=1000):
    """Scans inside scans, each over a weight."""
    weight = tensor("steps", np.zeros((length, 1), np.float32))
    inner = [identity("state", "state_out"), identity("step", "step_out")]
    for _ in range(depth):
        body = helper.make_graph(
            inner, "body", [value("state"), value("step", (1,))],
            [value("state_out"), value("step_out", (1,))], [weight],
        )  # fmt: skip
        node = helper.make_node(
            "Scan", ["state", "steps"], ["state_out", "all"], body=body, num_scan_inputs=1
        )
        inner = [node, identity("step", "step_out")]
    node.input[0], node.output[0] = "x", "y"
    return model([node], [weight])


def _external(key, text):
    made = TensorProto(name="w", data_type=FLOAT, dims=[4, 8], data_location=TensorProto.EXTERNAL)
    for each, usual in {"location": "beside.bin", "offset": "0", "length": "128"}.items():
        made.external_data.add(key=each, value=text if each == key else usual)
    return model([helper.make_node("Add", ["x", "w"], ["y"])], [made])


def _function(domain, name):
    body = [helper.make_node("Neg", ["a"], ["b"])]
    return helper.make_function(domain, name, ["a"], ["b"], body, [helper.make_opsetid("", 23)])


def _named(**names):
    """A graph whose parts have these names."""
    node = helper.make_node(names.get("op", "Identity"), ["x"], ["mid0"], names.get("node", ""))
    return model([node, identity("mid0", "y")])


def refused():
    """Files that are refused, by what is wrong with them; protobufs, or the bytes of one."""
    one = _named(node="NNNN")
    described = _changed(model([attention()]), lambda m: setattr(m.graph, "doc_string", "DDDD"))
    produced = _changed(model([attention()]), lambda m: setattr(m, "producer_name", "PPPP"))
    noted = _changed(model([attention()]), lambda m: m.metadata_props.add(key="KKKK", value="v"))
    ones, zeros = (tensor("w", make((4, 8), np.float32)) for make in (np.ones, np.zeros))
    add = helper.make_node("Add", ["x", "w"], ["y"])
    between = [identity("x", "z"), identity("z", "y")]
    loops = {
        "value": [_constant(value=tensor("", np.int64(BIG)))],
        "value_int": [_constant(value_int=BIG)],
        "value_ints": [_constant(value_ints=[BIG])],
        "identities": [_constant("n0", value_int=BIG), *(identity(f"n{i}", f"n{i + 1}") for i in range(99)),
                       identity("n99", "n")],
        "cast": [_constant("m", value_float=4e18), helper.make_node("Cast", ["m"], ["n"], to=INT64)],
        "product": [_constant("m", value_int=1 << 31), helper.make_node("Mul", ["m", "m"], ["n"])],
        "squeeze": [_constant("m", value_ints=[BIG]), helper.make_node("Squeeze", ["m"], ["n"])],
    }  # fmt: skip
    sizes = {
        "ConstantOfShape": [_constant("s", value_ints=[1 << 30, 1 << 30]), identity("s", "t"),
                            helper.make_node("ConstantOfShape", ["t"], ["y"])],
        "Range": [_constant("a", value_int=0), _constant("b", value_int=1 << 60), _constant("c", value_int=1),
                  helper.make_node("Range", ["a", "b", "c"], ["y"])],
        "Range of floats": [_constant("a", value_float=0.0), _constant("b", value_float=1e18),
                            _constant("c", value_float=1.0),
                            helper.make_node("Range", ["a", "b", "c"], ["y"])],
        "OneHot": [_constant("i", value_ints=[1]), _constant("d", value_int=1 << 50),
                   _constant("v", value_floats=[0.0, 1.0]),
                   helper.make_node("OneHot", ["i", "d", "v"], ["y"])],
    }  # fmt: skip
    return {
        "bytes: value": _with_bytes(one, b"mid0"),
        "bytes: node": _with_bytes(one, b"NNNN"),
        "bytes: operator": _with_bytes(one, b"Identity"),
        "bytes: graph": _with_bytes(one, b"main"),
        "bytes: dimension": _with_bytes(_sized(("DDDD",)), b"DDDD"),
        "bytes: weight": _with_bytes(model([identity("x", "y")], [tensor("WWWW", np.ones(1))]), b"WWWW"),
        "bytes: location": _with_bytes(_external("location", "LLLL"), b"LLLL"),
        "bytes: attribute": _with_bytes(model([attention(AAAA=1)]), b"AAAA"),
        "bytes: description": _with_bytes(described, b"DDDD"),
        "bytes: producer": _with_bytes(produced, b"PPPP"),
        "bytes: metadata": _with_bytes(noted, b"KKKK"),
        "bytes: function": _with_bytes(
            _changed(model([attention()]), lambda m: m.functions.append(_function("f", "FFFF"))), b"FFFF"
        ),
        "dimension -5": _sized((-5,)),
        "dimension -5 of an output": _sized((4,), (-5,)),
        "dimension -5 inside": _changed(
            model(between), lambda m: m.graph.value_info.append(value("z", (-5,)))
        ),
        "dimensions of 2^93": _sized((1 << 31,) * 3),
        "dimensions of 2^70 inside": _changed(
            model(between), lambda m: m.graph.value_info.append(value("z", (1 << 35, 1 << 35)))
        ),
        "1000 dimensions": _sized((1,) * 1000),
        "dimension -5 of a sequence": _changed(
            model([identity("x", "y")]),
            lambda m: m.graph.input.append(helper.make_tensor_sequence_value_info("s", FLOAT, (-5,))),
        ),
        **{f"a loop without end: {name}": loop(nodes) for name, nodes in loops.items()},
        "a loop without end: weight": loop([identity("m", "n")], [tensor("m", np.int64(BIG))]),
        "scans in scans": _scans(3),
        **{f"a tensor of 2^50 and more: {name}": model(nodes) for name, nodes in sizes.items()},
        "an attribute twice": _changed(
            model([attention()]),
            lambda m: m.graph.node[0].attribute.append(helper.make_attribute("q_num_heads", 4)),
        ),
        "an attribute without a type": _changed(
            model([attention()]),
            lambda m: m.graph.node[0].attribute.append(AttributeProto(name="scale", f=1.0)),
        ),
        "an unknown precision": model([attention(softmax_precision=99)]),
        "two weights of one name": model([add], [ones, zeros]),
        "a function named like an operator": _changed(
            model([attention()]), lambda m: m.functions.append(_function("", "Attention"))
        ),
        **{f"external: offset {text}": _external("offset", text) for text in ("0_0", "+0", "٠", " 0", "0x0")},
        "external: length -128": _external("length", "-128"),
        "external: an absolute path": _external("location", "/proc/self/mem"),
        "external: a long path": _external("location", "a" * 5000),
    }  # fmt: skip


def unbounded():
    """Models that are valid and whose loops do not end, which only running them shows."""
    true = tensor("c", np.bool_(True))
    counted = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Constant", [], ["large"], value_int=1 << 55),
        helper.make_node("ReduceProd", ["shape"], ["product"], keepdims=0),
        helper.make_node("Mul", ["product", "large"], ["n"]),
    ]
    return {
        "by its condition": loop((), [true], trips="", condition="c"),
        "by the input": loop(counted, [true], condition="c"),
    }


def attention_of_primitives():
    """A model whose attention is recognized and compared."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["k"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "k"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "x"], ["y"]),
    ]
    return model(nodes)


def mutations(data, count, seed=0):
    """As many files that differ from this one: bits, bytes, pieces that are cut out, doubled or exchanged."""
    rng = random.Random(seed)
    for _ in range(count):
        made = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at, length = rng.randrange(len(made)), rng.choice((1, 2, 8, 32))
            kind = rng.randrange(6)
            if kind == 0:
                made[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                made[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            elif kind == 2:
                del made[at : at + length]
            elif kind == 3:
                made[at:at] = made[at : at + length]
            elif kind == 4:
                other = rng.randrange(len(made))
                made[at : at + length] = made[other : other + length]
            else:
                made[at : at + length] = rng.randbytes(length)
            if not made:
                break
        yield bytes(made)


def small_files():
    """Right files, of every construct of the format."""
    function = _function("f", "g")
    called = model(
        [helper.make_node("g", ["x"], ["z"], domain="f"), identity("z", "y")], functions=[function]
    )
    looped = loop([_constant(value_int=3)])
    weights = [tensor("w", np.ones((4, 8), np.float32)), tensor("i", np.arange(3))]
    plain = model([helper.make_node("Add", ["x", "w"], ["z"]), identity("z", "y")], weights)
    return {"attention": model([attention(scale=0.5)]), "function": called, "loop": looped, "weights": plain}
