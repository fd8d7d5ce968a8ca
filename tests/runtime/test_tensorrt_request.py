"""Requests, targets, names and the log: the parts that need no TensorRT."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
from tensorrt_models import attention, layer, needs_rtx

from mha_deploy.errors import EXIT_BAD_INPUT, BackendUnavailable, DeployError
from mha_deploy.runtime.tensorrt.builder import BuildRequest, build_engine, parse_targets, read_names
from mha_deploy.runtime.tensorrt.engine_verdict import members
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
    "wrong",
    [
        {"precision": "fp8"},
        {"hardware_compatible": "ampere"},
        {"refit": "some"},
        {"optimization_level": 6},
        {"workspace": 0},
    ],
    ids=str,
)
def test_a_value_that_no_version_knows_is_refused_at_once(wrong):
    with pytest.raises(EngineError):
        BuildRequest(onnx=b"", **wrong)


def test_an_unknown_backend_is_refused_with_the_nearest():
    with pytest.raises(DeployError) as caught:
        load("tensorrt-rtxx")
    assert caught.value.hint == "did you mean 'tensorrt-rtx'?"
    assert caught.value.exit_code == EXIT_BAD_INPUT


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_a_package_that_is_missing_says_how_to_get_it(backend, monkeypatch):
    # None in sys.modules makes the import fail, installed or not.
    monkeypatch.setitem(sys.modules, backend.replace("-", "_"), None)
    with pytest.raises(BackendUnavailable, match="cannot be imported") as caught:
        load(backend)
    assert caught.value.hint.startswith("pip install tensorrt")


def test_a_package_without_its_libraries_says_so(monkeypatch):
    def fail(name: str) -> ModuleType:
        raise OSError("libnvinfer.so.10: cannot open shared object file")

    monkeypatch.setattr("mha_deploy.runtime.tensorrt.versions.importlib.import_module", fail)
    with pytest.raises(BackendUnavailable) as caught:
        load("tensorrt")
    assert "libnvinfer.so.10" in caught.value.got


def test_importing_the_backend_imports_no_tensorrt():
    code = (
        "import sys, mha_deploy.runtime.tensorrt\n"
        "print([name for name in sys.modules if name.startswith(('tensorrt', 'torch'))])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# -- names ----------------------------------------------------------------------------------------------


def test_names_are_those_of_tensorrt():
    model = layer()
    model.graph.node[0].name = ""
    names = read_names(model.SerializeToString())
    assert names.names[:2] == ("node_of_q0", "proj_k0")
    assert (names.names[3], names.operators[3]) == ("att0", "Attention")


def test_messages_are_linked_to_the_nodes_they_speak_of():
    names = read_names(attention(mask="bool"))
    linked = names.link(
        [
            Message(severity="ERROR", text="Invalid Node - att0\nsomething"),
            Message(severity="WARNING", text="Unused Input: mask"),
            Message(severity="ERROR", text="att01 is another, and so is xatt0"),
        ]
    )
    assert [message.nodes for message in linked] == [("att0",), ("att0",), ()]


def test_members_are_the_node_and_what_it_was_lowered_to():
    names = ("att0/scores", "att0/softmax", "att01/scores", "att1")
    assert members(names, ["att0", "att1"]) == {"att0": ("att0/scores", "att0/softmax"), "att1": ("att1",)}


# -- the log --------------------------------------------------------------------------------------------


def test_errors_leave_out_what_only_says_there_is_no_gpu():
    reason = Message(severity="ERROR", text="Invalid profile")
    noise = Message(severity="ERROR", text="[checkMacros.cpp::catchCudaError::250] (cudaError 35: ...)")
    other = Message(severity="VERBOSE", text="Layers")
    assert errors([noise, reason, other]) == [reason]
    assert errors([noise]) == [noise]


@needs_rtx
def test_one_logger_serves_all_builds_of_a_process():
    rt = load("tensorrt-rtx")
    assert logger_for(rt) is logger_for(load("tensorrt-rtx"))
    for _ in range(2):
        # A second logger would be ignored by TensorRT, and the second build would have no records.
        assert build_engine(BuildRequest(onnx=attention())).kernels["log"]


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
    assert [(message.severity, message.text) for message in outer] == [
        ("ERROR", "both"),
        ("WARNING", "outer"),
    ]
    assert [message.text for message in inner] == ["both"]
