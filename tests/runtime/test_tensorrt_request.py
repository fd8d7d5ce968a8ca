"""Requests, targets, names and the log: the parts that need no TensorRT."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import onnx
import pytest
from rtx_engines import build_rtx
from tensorrt_models import attention, layer, needs_rtx

from mha_deploy.errors import EXIT_BAD_INPUT, BackendUnavailable, DeployError
from mha_deploy.options import EngineOptions
from mha_deploy.runtime.tensorrt.builder import BuildRequest, parse_targets, read_names
from mha_deploy.runtime.tensorrt.engine_verdict import group_by_attention
from mha_deploy.runtime.tensorrt.versions import EngineError, Message, collect, errors, load, logger_for


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8.9", ("SM89",)),
        ("89,120", ("SM89", "SM120")),
        ("8.9 12.0;12.1", ("SM89", "SM120", "SM121")),
        (("sm_89", "SM120", "8.9"), ("SM89", "SM120")),
        ("current", ("CURRENT",)),
        ("", ()),
    ],
)
def test_targets_as_people_write_them(text, expected):
    assert parse_targets(text) == expected


@pytest.mark.parametrize("text", ["8", "8.9.1", "ada", "sm", "1200", "-8.9"])
def test_what_is_no_target_is_refused(text):
    with pytest.raises(EngineError, match="not a compute capability"):
        parse_targets(text)


@pytest.mark.parametrize(
    "wrong", [{"hardware_compatible": "ampere"}, {"refit": "some"}, {"optimization_level": 6}], ids=str
)
def test_a_value_that_no_version_knows_is_refused_at_once(wrong):
    with pytest.raises(EngineError):
        BuildRequest(onnx=Path("model.onnx"), options=EngineOptions(**wrong))


def test_an_unknown_precision_is_refused_at_once():
    with pytest.raises(EngineError, match="No such precision"):
        BuildRequest(onnx=Path("model.onnx"), precision="fp8")


def test_an_unknown_backend_is_refused_with_the_nearest():
    with pytest.raises(DeployError) as caught:
        load("tensorrt-rtxx")
    assert "'tensorrt-rtx'" in caught.value.hint
    assert caught.value.exit_code == EXIT_BAD_INPUT


@pytest.mark.parametrize(("backend", "extra"), [("tensorrt", "trt"), ("tensorrt-rtx", "rtx")])
def test_a_package_that_is_missing_says_how_to_get_it(backend, extra, monkeypatch):
    # None in sys.modules makes the import fail, installed or not.
    monkeypatch.setitem(sys.modules, backend.replace("-", "_"), None)
    with pytest.raises(BackendUnavailable, match="cannot be imported") as caught:
        load(backend)
    assert f"mha-deploy[{extra}]" in caught.value.hint


def test_a_package_without_its_libraries_says_so(monkeypatch):
    def fail(name: str) -> ModuleType:
        raise OSError("libnvinfer.so.10: cannot open shared object file")

    monkeypatch.setattr("mha_deploy.runtime.tensorrt.versions.importlib.import_module", fail)
    with pytest.raises(BackendUnavailable) as caught:
        load("tensorrt")
    assert "libnvinfer.so.10" in caught.value.got


# -- names ----------------------------------------------------------------------------------------------


def test_names_are_those_of_tensorrt(tmp_path):
    model = layer()
    model.graph.node[0].name = ""
    onnx.save(model, tmp_path / "model.onnx")
    names = read_names(tmp_path / "model.onnx")
    assert [name for name, _ in names.nodes[:2]] == ["node_of_q0", "proj_k0"]
    assert names.nodes[3] == ("att0", "Attention")


def test_messages_are_linked_to_the_nodes_they_mention(tmp_path):
    (tmp_path / "model.onnx").write_bytes(attention(mask="bool"))
    names = read_names(tmp_path / "model.onnx")
    assert names.located("Invalid Node - att0\nsomething") == "node att0: Invalid Node - att0 something"
    assert names.located("Unused Input: mask") == "node att0: Unused Input: mask"
    assert names.mentioned("att01 is another, and so is xatt0") == []


def test_members_are_the_node_and_what_it_was_lowered_to():
    names = ("att0/scores", "att0/softmax", "att01/scores", "att1")
    assert group_by_attention(names, ["att0", "att1"]) == {
        "att0": ("att0/scores", "att0/softmax"),
        "att1": ("att1",),
    }


# -- the log --------------------------------------------------------------------------------------------


def test_errors_leave_out_what_only_says_there_is_no_gpu():
    reason, other = Message("ERROR", "Invalid profile"), Message("VERBOSE", "Layers")
    noise = Message("ERROR", "[checkMacros.cpp::catchCudaError::250] (cudaError 35: ...)")
    assert errors([noise, reason, other]) == [reason.text]
    assert errors([noise]) == [noise.text]


@needs_rtx
def test_one_logger_serves_all_builds_of_a_process():
    rt = load("tensorrt-rtx")
    assert logger_for(rt) is logger_for(load("tensorrt-rtx"))
    for _ in range(2):
        # A second logger would be ignored by TensorRT, and the second build would have no records.
        assert build_rtx(attention()).kernels["log"]


@needs_rtx
def test_messages_belong_to_the_build_they_were_logged_in():
    rt = load("tensorrt-rtx")
    severity = rt.module.ILogger.Severity
    logger = logger_for(rt)
    with collect(rt) as outer:
        with collect(rt) as inner:
            logger.log(severity.ERROR, "both")
        logger.log(severity.WARNING, "outer")
    logger.log(severity.ERROR, "nobody")
    assert outer == [("ERROR", "both"), ("WARNING", "outer")]
    assert inner == [("ERROR", "both")]
