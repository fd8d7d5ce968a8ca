"""Run the command line in a fork of this loaded interpreter, and make files that nobody's exporter writes."""

import io
import json
import os
import resource
import signal
import struct
import sys
import tempfile
import traceback
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import mha_deploy as md
from mha_deploy.cli import main

MEMORY = 3 << 30
SECONDS = 20


@dataclass(frozen=True)
class Outcome:
    """How a command ended: exit code, negative for a signal (SIGALRM where it hung), and what it printed."""

    code: int
    out: str
    err: str


@cache
def warm_up():
    """Import here what every fork would import again."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        path = Path(folder) / "model.onnx"
        path.write_bytes(model([attention()]).SerializeToString())
        for arguments in (("inspect", path), ("fuse", path, "-o", path.with_name("fused.onnx"), "--json")):
            before, sys.argv = sys.argv, ["mha-deploy", *map(str, arguments)]
            with suppress(SystemExit):
                main()
            sys.argv = before


def forked(*arguments, **options):
    """Run `mha-deploy` once in a fork; see `all_forked`."""
    (outcome,) = all_forked([arguments], **options)
    return outcome


def all_forked(commands, *, prepare=None):
    """Run `mha-deploy` with each of these arguments in a fork, with limits on memory and time.

    One fork runs as many of them as it survives.

    Args:
        commands: The arguments of each call, or a function that calls the Python API.
        prepare: Called in the fork before each call, with the number of the command.

    Returns:
        How each of them ended.
    """
    warm_up()
    commands, outcomes = list(commands), []
    while len(outcomes) < len(commands):
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            reader, writer = os.pipe()
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                try:
                    _limit()
                    for number in range(len(outcomes), len(commands)):
                        code = _call(commands[number], out, err, partial(prepare or int, number))
                        os.write(writer, struct.pack("i", code))
                        if number + 1 < len(commands):
                            os.read(_turns[0], 1)
                finally:
                    os._exit(99)
            os.close(writer)
            while len(outcomes) < len(commands):
                answer = os.read(reader, 4)
                if not answer:
                    _, status = os.waitpid(pid, 0)
                    outcomes.append(Outcome(os.waitstatus_to_exitcode(status), *_texts(out, err)))
                    break
                outcomes.append(Outcome(*struct.unpack("i", answer), *_texts(out, err)))
                if len(outcomes) < len(commands):
                    os.write(_turns[1], b"1")
            else:
                os.waitpid(pid, 0)
            os.close(reader)
    return outcomes


_turns = os.pipe()  # the fork waits until the output of its last call was read


def _texts(*files):
    for file in files:
        file.seek(0)
        yield file.read().decode(errors="replace")


def _limit():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _call(arguments, out, err, prepare):
    for file, number in ((out, 1), (err, 2)):
        file.seek(0)
        file.truncate()
        os.dup2(file.fileno(), number)
    sys.stdout = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115 (lives as long as the call)
    sys.stderr = open(2, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    signal.alarm(SECONDS)
    prepare()
    try:
        if callable(arguments):
            return _called(arguments)
        sys.argv = ["mha-deploy", *map(str, arguments)]
        main()
    except SystemExit as stop:
        return stop.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 98


def _called(function):
    """The exit code that the command line would give a call of the Python API."""
    try:
        function()
    except md.DeployError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BaseException:  # noqa: BLE001 (a bug)
        traceback.print_exc()
        return 70
    return 0


def assert_refused(outcome, *words, codes=(2,)):
    """A refusal has one of these exit codes, says what it got, and is no crash, hang or bug."""
    assert outcome.code in codes, (outcome.code, outcome.err[-2000:])
    assert "Traceback" not in outcome.err
    assert "\x1b" not in outcome.out + outcome.err
    for word in words:
        assert word in outcome.err, outcome.err


def assert_orderly(outcome):
    """Whatever the verdict is, it is one, and nothing of a file's control characters is printed."""
    assert outcome.code in (0, 1, 2, 3), (outcome.code, outcome.err[-2000:])
    assert "Traceback" not in outcome.err
    assert "\x1b" not in outcome.out + outcome.err


# -- Places in plain data --------------------------------------------------------------------------


def places(data, at=()):
    """Every place in plain data, of a list its first two."""
    if at:
        yield at
    items = data.items() if isinstance(data, dict) else enumerate(data[:2]) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*at, key))


def with_value(data, at, value):
    """A copy of plain data with another value in one place."""
    copy = json.loads(json.dumps(data))
    part = copy
    for key in at[:-1]:
        part = part[key]
    part[at[-1]] = value
    return copy


# -- ONNX models -----------------------------------------------------------------------------------

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def value(name, dims=("B", 4, 8), dtype=FLOAT):
    return helper.make_tensor_value_info(name, dtype, dims)


def attention(**attributes):
    given = {"q_num_heads": 2, "kv_num_heads": 2, **attributes}
    return helper.make_node("Attention", ["x", "x", "x"], ["y"], "attention", **given)


def model(nodes, initializers=(), functions=(), sparse=(), outputs=("y",), opset=23):
    graph = helper.make_graph(
        nodes, "main", [value("x")], [value(name) for name in outputs], list(initializers),
        sparse_initializer=list(sparse),
    )  # fmt: skip
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("f", 1)]
    return helper.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=10)


def tensor(name, array):
    return numpy_helper.from_array(np.asarray(array), name)


def identity(source, target, name=""):
    return helper.make_node("Identity", [source], [target], name)


def _with_dims(dims, **fields):
    """A weight whose dimensions do not fit its bytes."""
    made = TensorProto(name="w", data_type=FLOAT, dims=dims, **fields)
    return model([helper.make_node("Add", ["x", "w"], ["y"])], [made])


def _external(location, offset="0", length="128"):
    made = TensorProto(name="w", data_type=FLOAT, dims=[4, 8], data_location=TensorProto.EXTERNAL)
    for key, text in {"location": location, "offset": offset, "length": length}.items():
        made.external_data.add(key=key, value=text)
    return model([helper.make_node("Add", ["x", "w"], ["y"])], [made])


def _function(name, nodes, inputs=("a",), outputs=("b",)):
    return helper.make_function("f", name, list(inputs), list(outputs), nodes, [
        helper.make_opsetid("", 23), helper.make_opsetid("f", 1)
    ])  # fmt: skip


def _calls(name, source, target):
    return helper.make_node(name, [source], [target], domain="f")


def _in_function(*nodes):
    """A model that calls a function of these nodes, from a to b."""
    return model([_calls("g", "x", "y")], functions=[_function("g", nodes)])


def _bomb(levels=30):
    """Functions that each call the next one twice."""
    functions = [
        _function(f"f{i}", [_calls(f"f{i + 1}", "a", "m"), _calls(f"f{i + 1}", "m", "b")])
        for i in range(levels)
    ]
    last = _function(f"f{levels}", [identity("a", "b")])
    return model([_calls("f0", "x", "y")], functions=[*functions, last])


def _loop(trips, depth=1):
    """Loops inside loops, each with as many iterations."""
    inner = [identity("in", "out")]
    for level in range(depth):
        body = helper.make_graph(
            [identity("c", "c_out"), *inner], f"body{level}",
            [value("i", (), INT64), value("c", (), TensorProto.BOOL), value("in")],
            [value("c_out", (), TensorProto.BOOL), value("out")],
            [tensor(f"n{level}", np.int64(trips))],
        )  # fmt: skip
        source, target = ("x", "y") if level == depth - 1 else ("in", "out")
        inner = [helper.make_node("Loop", [f"n{level}", "", source], [target], body=body)]
    return model(
        inner, [tensor(f"n{depth - 1}", np.int64(trips)), tensor("n0", np.int64(trips))][: depth + 1]
    )


def _in_branch(node, *initializers):
    """A model whose only interesting node is in a subgraph."""
    branch = helper.make_graph([node], "branch", [], [value("y")], list(initializers))
    other = helper.make_graph([identity("x", "y")], "other", [], [value("y")])
    choice = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=other)
    return model([choice], [tensor("c", np.bool_(True))])


def _nested(depth=25):
    node, other = identity("x", "y"), helper.make_graph([identity("x", "y")], "other", [], [value("y")])
    for level in range(depth):
        branch = helper.make_graph([node], f"b{level}", [], [value("y")])
        node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=other)
    return model([node], [tensor("c", np.bool_(True))])


def _big(operator, *arrays):
    names = [f"n{index}" for index in range(len(arrays))]
    inputs = ["x", *names] if operator in ("Expand", "Tile") else names
    node = helper.make_node(operator, inputs, ["y"], "big")
    return model([node], [tensor(name, array) for name, array in zip(names, arrays, strict=True)])


def _huge(name):
    """A constant of 2^60 elements."""
    return helper.make_node("Constant", [], [name], value=TensorProto(data_type=FLOAT, dims=[1 << 60]))


@cache
def graphs():
    """Models that are refused, by what is wrong with them."""
    indices = tensor("w", np.array([0], np.int64))
    sparse = helper.make_sparse_tensor(tensor("w", np.array([1.0], np.float32)), indices, [1 << 40])
    add = helper.make_node("Add", ["x", "w"], ["y"])
    short, long = bytes(8), bytes(1 << 12)
    contrib = helper.make_node(
        "MultiHeadAttention", ["x", "x", "x"], ["y"], domain="com.microsoft", num_heads=0
    )
    loop = helper.make_graph([identity("y", "z")], "then", [], [value("z")])
    other = helper.make_graph([identity("x", "z2")], "else", [], [value("z2")])
    return {
        "no heads": model([attention(q_num_heads=0)]),
        "no key heads": model([attention(kv_num_heads=0)]),
        "negative heads": model([attention(q_num_heads=-2)]),
        "a billion heads": model([attention(q_num_heads=10**9, kv_num_heads=7)]),
        "uneven heads": model([attention(q_num_heads=8, kv_num_heads=3)]),
        "no heads in a branch": _in_branch(attention(q_num_heads=0)),
        "no heads in a function": _in_function(
            helper.make_node("Attention", ["a", "a", "a"], ["b"], q_num_heads=0)
        ),
        "contrib without heads": model([contrib]),
        "a cycle": model([identity("a", "b"), identity("b", "a"), identity("x", "y")]),
        "a cycle of one": model([helper.make_node("Add", ["x", "y"], ["y"])]),
        "a long cycle": model(
            [*(identity(f"a{i}", f"a{(i + 1) % 50}") for i in range(50)), identity("x", "y")]
        ),
        "a cycle through a branch": model(
            [helper.make_node("If", ["c"], ["y"], then_branch=loop, else_branch=other)],
            [tensor("c", np.bool_(True))],
        ),
        "a value twice": model([identity("x", "y"), identity("x", "y")]),
        "an input twice": model([identity("y", "x"), identity("x", "y")]),
        "a value from nowhere": model([identity("nowhere", "y")]),
        "a value from nowhere in a branch": _in_branch(identity("nowhere", "y")),
        "an output from nowhere": model([identity("x", "z")]),
        "a function of itself": _in_function(_calls("g", "a", "b")),
        "two functions of each other": model(
            [_calls("g", "x", "y")],
            functions=[_function("g", [_calls("h", "a", "b")]), _function("h", [_calls("g", "a", "b")])],
        ),
        "an unused function of itself": model(
            [identity("x", "y")], functions=[_function("g", [_calls("g", "a", "b")])]
        ),
        "functions that double": _bomb(),
        "a loop without end": _loop(2**62),
        "loops in loops": _loop(10**5, depth=2),
        "subgraphs without end": _nested(),
        "2^60 elements": _with_dims([1 << 60], raw_data=short),
        "2^60 elements by many dims": _with_dims([1 << 20] * 3, raw_data=short),
        "dims that overflow": _with_dims([1 << 62, 1 << 62], raw_data=short),
        "negative dims": _with_dims([-1, 8], raw_data=short),
        "too few bytes": _with_dims([4, 8], raw_data=short),
        "too many bytes": _with_dims([4, 8], raw_data=long),
        "too few numbers": _with_dims([4, 8], float_data=[1.0]),
        "no numbers": _with_dims([4, 8]),
        "another field": _with_dims([4, 8], double_data=[1.0]),
        "an unknown type": model([add], [TensorProto(name="w", data_type=99, dims=[1], raw_data=b"0")]),
        "no type": model([add], [TensorProto(name="w", dims=[1], raw_data=b"0")]),
        "segments": _with_dims([4, 8], raw_data=bytes(128), segment=TensorProto.Segment(begin=0, end=1)),
        "a constant of 2^60": model([_huge("w"), add]),
        "a constant of 2^60 in a branch": _in_branch(_huge("y")),
        "a constant of 2^60 in a function": _in_function(
            _huge("w"), helper.make_node("Add", ["a", "w"], ["b"])
        ),
        "a weight of 2^60 in a branch": _in_branch(
            add, TensorProto(name="w", data_type=FLOAT, dims=[1 << 60], raw_data=short)
        ),
        "sparse weights": model([add], sparse=[sparse]),
        "a sparse constant": model([helper.make_node("Constant", [], ["w"], sparse_value=sparse), add]),
        "a shape of 2^60": _big("ConstantOfShape", np.array([1 << 30, 1 << 30], np.int64)),
        "an expansion to 2^60": _big("Expand", np.array([1 << 30, 1 << 30, 1], np.int64)),
        "a tile of 2^60": _big("Tile", np.array([1 << 30, 1 << 30, 1], np.int64)),
        "a range of 2^60": _big("Range", np.int64(0), np.int64(1 << 60), np.int64(1)),
        "a range without end": _big("Range", np.int64(0), np.int64(5), np.int64(0)),
        "an input of 2^60": helper.make_model(
            helper.make_graph([identity("x", "y")], "g", [value("x", (1 << 60,))], [value("y", (1 << 60,))])
        ),
        "an escape in a node": model([identity("x", "y", "\x1b[31mred")]),
        "an escape in a value": model([identity("x", "\x1b]0;title\x07"), identity("\x1b]0;title\x07", "y")]),
        "an escape in an operator": model([helper.make_node("\x1b[2J", ["x"], ["y"])]),
        "an escape in a dimension": helper.make_model(
            helper.make_graph([identity("x", "y")], "g", [value("x", ("\x1b[0m",))], [value("y", ("B",))])
        ),
        "text that is reordered": model([identity("x", "y", "node\u202egnp")]),
        "external: absent": _external("w.bin"),
        "external: without a name": _external(""),
        "external: outside": _external("../outside.bin"),
        "external: absolute": _external("/etc/hostname"),
        "external: a device": _external("/dev/zero"),
        "external: a folder": _external("."),
    }


OUTSIDE = {
    "short": _external("beside.bin", length="64"),
    "beyond the end": _external("beside.bin", offset="4096"),
    "negative": _external("beside.bin", offset="-8"),
    "no number": _external("beside.bin", offset="1e3"),
    "10,000 digits": _external("beside.bin", offset="9" * 10_000),
    "through a link": _external("link.bin"),
    "a pipe": _external("pipe.bin"),
}
"""Models whose weights are in a file beside them, which is there."""


def write_model(folder, proto):
    """Write a model, with files beside it that it may name."""
    (folder / "beside.bin").write_bytes(bytes(128))
    (folder.parent / "outside.bin").write_bytes(bytes(128))
    if not (folder / "link.bin").is_symlink():
        (folder / "link.bin").symlink_to("../outside.bin")
        os.mkfifo(folder / "pipe.bin")
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def without_trust():
    """Forget that the code of bundles may run, which the fixtures of the tests allow."""
    from mha_deploy.runtime.child import isolation

    md.configure(trust_code=False)
    isolation.own.clear()
