"""ONNX files that no exporter writes: refused with a reason, or read; no crash, no hang, no bug."""

import json
import os
import time
from contextlib import suppress
from functools import partial

import fault_harness
import numpy as np
import onnx
import pytest
from bundle_edit import copy_of, rehash
from hostile_files import (
    all_forked,
    assert_orderly,
    assert_refused,
    forked,
    identity,
    model,
    tensor,
    value,
    write_model,
)
from hostile_onnx import attention_of_primitives, loop, mutations, refused, small_files, unbounded
from onnx import helper
from onnx.reference import ReferenceEvaluator

import mha_deploy as md
from mha_deploy.bundle.folder import MODEL
from mha_deploy.exporter.file_program import FileProgram
from mha_deploy.graph.file import graph_from_proto
from mha_deploy.runtime.child import isolation


def written(folder, content):
    path = write_model(folder, model([identity("x", "y")]))
    path.write_bytes(content if isinstance(content, bytes) else content.SerializeToString())


def outcomes(folder, contents, command):
    folder.mkdir()
    return all_forked([command] * len(contents), prepare=lambda number: written(folder, contents[number]))


@pytest.mark.parametrize(
    "verb", ["inspect", *(pytest.param(verb, marks=pytest.mark.slow) for verb in ("fuse", "check", "export"))]
)
def test_a_file_that_is_wrong_anywhere_is_refused(tmp_path, verb):
    cases, folder = refused(), tmp_path / "models"
    out = {"fuse": ("-o", tmp_path / "out.onnx"), "export": ("-o", tmp_path / "out")}.get(verb, ())
    done = outcomes(folder, list(cases.values()), [verb, folder / MODEL, *out])
    for name, outcome in zip(cases, done, strict=True):
        try:
            assert_refused(outcome)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    assert {each.name for each in tmp_path.iterdir()} == {"models", "outside.bin"}


@pytest.mark.parametrize("name", small_files())
def test_a_small_file_is_read(tmp_path, name):
    """What the mutations begin with."""
    written(tmp_path, small_files()[name])
    assert forked("inspect", tmp_path / MODEL).code == 0


def test_an_output_without_a_type_is_shown(tmp_path):
    model = small_files()["function"]
    model.graph.output[0].type.tensor_type.elem_type = 0
    written(tmp_path, model)
    assert forked("inspect", tmp_path / MODEL).code == 0


@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", small_files())
def test_a_mutated_file_is_read_or_refused(tmp_path, name, count):
    contents = list(mutations(small_files()[name].SerializeToString(), count))
    folder = tmp_path / "models"
    done = outcomes(folder, contents, ["inspect", folder / MODEL])
    for content, outcome in zip(contents, done, strict=True):
        try:
            assert_orderly(outcome)
        except AssertionError as error:
            raise AssertionError(f"{content!r}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["fuse", "export"])
@pytest.mark.parametrize("name", small_files())
def test_so_it_is_where_the_file_is_worked_on(tmp_path, name, verb):
    contents = list(mutations(small_files()[name].SerializeToString(), 60, seed=1))
    folder, out = tmp_path / "models", tmp_path / ("out.onnx" if verb == "fuse" else "out")
    for outcome in outcomes(folder, contents, [verb, folder / MODEL, "-o", out, "--overwrite"]):
        assert_orderly(outcome)


@pytest.mark.parametrize("name", unbounded())
def test_a_loop_whose_end_nothing_shows_ends(name, in_process, monkeypatch):
    monkeypatch.setattr("mha_deploy.graph.ir._MOST_ITERATIONS", 1000)
    with (
        md.open_runner(unbounded()[name], "onnx-reference") as runner,
        pytest.raises(md.DeployError, match="does not terminate"),
    ):
        runner.run({"x": np.zeros((1, 4, 8), np.float32)})


def stubborn():
    while True:
        with suppress(BaseException):
            time.sleep(100)


MISHAPS = {"hangs": partial(time.sleep, 100), "cannot be interrupted": stubborn, "crashes": os.abort}


@pytest.mark.parametrize(
    ("name", "verb"),
    [
        pytest.param("hangs", "export", marks=pytest.mark.slow),
        ("cannot be interrupted", "fuse"),
        ("crashes", "fuse"),
        ("crashes", "export"),
        pytest.param("hangs", "fuse", marks=pytest.mark.slow),  # seconds, for what the other verb shows
        pytest.param("cannot be interrupted", "export", marks=pytest.mark.slow),
    ],
)
def test_an_evaluator_that_ends_or_hangs_the_program_is_an_error(tmp_path, verb, name):
    source, written = tmp_path / "source.onnx", tmp_path / ("out.onnx" if verb == "fuse" else "out")
    source.write_bytes(attention_of_primitives().SerializeToString())

    def prepare():
        ReferenceEvaluator.run = lambda *given: MISHAPS[name]()

    arguments = (verb, source, "-o", written, "--time-limit", 1, "--json")
    outcome = fault_harness.run(*arguments, prepare=prepare, memory=None)
    fault_harness.assert_refused(outcome, "The evaluation of the graph")
    assert json.loads(outcome.out)["error"]["exit_code"] == 2
    assert not written.exists()


def test_an_oracle_that_takes_longer_than_the_limit_is_refused():
    weights = [tensor("n", np.int64(10**6)), tensor("c", np.bool_(True))]
    program = FileProgram(graph_from_proto(loop((), weights, condition="c")))

    def evaluate():
        isolation.limit_s = 0.2
        program.run({"x": np.zeros((1, 4, 8), np.float32)})

    fault_harness.assert_refused(fault_harness.run(evaluate), "did not return within")


def test_a_dimension_of_minus_one_is_not_known(tmp_path):
    """As ONNX Runtime reads it."""
    graph = helper.make_graph([identity("x", "y")], "g", [value("x", (-1, 8))], [value("y", (-1, 8))])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    with md.open_runner(proto, "onnx-reference") as runner:
        assert runner.inputs["x"].dims == (None, 8)
        assert runner.run({"x": np.ones((3, 8), np.float32)})["y"].shape == (3, 8)


@pytest.fixture
def foreign(bundles, tmp_path):
    """A bundle whose graph has an operator of another domain, in which the file defines a function, too."""
    folder = copy_of(bundles("tiny-mha"), tmp_path / "bundle")
    proto = onnx.load(folder / MODEL)
    last = next(node for node in proto.graph.node if "output" in node.output)
    last.output[list(last.output).index("output")] = "inner"
    proto.graph.node.append(helper.make_node("Steal", ["inner"], ["output"], domain="another.domain"))
    proto.opset_import.append(helper.make_opsetid("another.domain", 1))
    own = [helper.make_node("Neg", ["a"], ["b"])]
    proto.functions.append(
        helper.make_function("another.domain", "Own", ["a"], ["b"], own, [helper.make_opsetid("", 23)])
    )
    (folder / MODEL).write_bytes(proto.SerializeToString())
    rehash(folder)
    return folder


def test_operators_of_another_domain_are_not_built(foreign):
    with pytest.raises(md.DeployError, match="operators") as caught:
        md.build_engine(foreign, backend="tensorrt-rtx")
    assert "another.domain" in str(caught.value)


@pytest.mark.parametrize("name", ["", MODEL])
def test_it_is_said_before_a_build(foreign, name, run_cli):
    done = run_cli("check", foreign / name)
    assert (done.code, "another.domain" in done.err) == (2, True)
    assert md.inspect(foreign / MODEL).foreign == ("another.domain",)
    assert "another.domain" in run_cli("inspect", foreign / MODEL).out
