"""A server that misbehaves is a verdict, with what it did, within the time of a request."""

import time
from concurrent.futures import ThreadPoolExecutor

import hostile_server as hostile
import numpy as np
import pytest
from hostile_server import HostileServer, RawServer, grpc_server

import mha_deploy as md
from mha_deploy.errors import BackendUnavailable
from mha_deploy.runtime.kserve import ServerError, ServerRunner

TIMEOUT = 1.0
FEEDS = {"x": np.zeros((1, 2, 64), np.float16)}
WRONG = {
    "transport": (hostile.SERVER_PATH, hostile.TRANSPORT),
    "server": (hostile.SERVER_PATH, hostile.SERVER),
    "model": (hostile.MODEL_PATH, hostile.MODEL),
    "config": (hostile.CONFIG_PATH, hostile.CONFIG),
    "answer": (hostile.INFER, hostile.ANSWER),
    # What a server may do at one place it may do at every place.
    "transport of the model": (hostile.MODEL_PATH, hostile.TRANSPORT),
    "transport of the config": (hostile.CONFIG_PATH, hostile.TRANSPORT),
    "transport of the answer": (hostile.INFER, hostile.TRANSPORT),
}


def asked(url, timeout_s=TIMEOUT):
    """Open a served model and run it once: the error, and the seconds."""
    started = time.monotonic()
    try:
        with ServerRunner(f"{url}/tiny-gqa", timeout_s=timeout_s) as runner:
            runner.most_bytes = 1 << 20
            runner.run(FEEDS)
    except md.DeployError as error:
        return error, time.monotonic() - started
    return None, time.monotonic() - started


def check(error, seconds):
    assert isinstance(error, ServerError), error
    assert error.exit_code == 1
    assert "\x1b" not in str(error)
    assert len(str(error)) < 1000
    # Of four requests only the last can take this long; the rest is other work on a busy machine.
    assert seconds < TIMEOUT + 5


def against(path, act):
    server = HostileServer(path, act)
    try:
        return asked(server.url)
    finally:
        server.close()


def at_once(ask, names):
    """The result of every name; most of the time servers make their clients wait."""
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(ask, names), strict=True))


def check_all(done):
    for name, (error, seconds) in done.items():
        try:
            check(error, seconds)
        except AssertionError as wrong:
            raise AssertionError(f"{name}: {wrong}") from wrong


@pytest.mark.sweep(2)
@pytest.mark.parametrize("group", WRONG)
def test_a_server_that_misbehaves_is_an_error_of_the_server(group):
    path, acts = WRONG[group]
    check_all(at_once(lambda name: against(path, acts[name]), acts))


def test_so_it_is_with_grpc():
    pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")

    def ask(name):
        method, act = hostile.GRPC[name]
        with grpc_server(**{method: act}) as url:
            return asked(url)

    check_all(at_once(ask, hostile.GRPC))


def test_a_server_that_does_not_speak_grpc_ends_within_the_time():
    pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")

    def ask(name):
        server = RawServer(hostile.TRANSPORT[name])
        try:
            return asked(server.url)
        finally:
            server.close()

    names = ("nothing", "garbage", "endless body", "a flood of continue", "closes")
    for name, (error, seconds) in at_once(ask, names).items():
        assert error.exit_code in (1, 3), (name, error)
        assert seconds < TIMEOUT + 5, name


# -- The command -----------------------------------------------------------------------------------

COMMANDS = {
    **hostile.OTHERS,
    "dripped body": (hostile.SERVER_PATH, hostile.TRANSPORT["dripped body"]),
    "a model that is none": (hostile.MODEL_PATH, hostile.MODEL["a text"]),
    "an answer that is none": (hostile.INFER, hostile.ANSWER["a list"]),
    "no answer": (hostile.INFER, hostile.TRANSPORT["nothing"]),
    "an endless answer": (hostile.INFER, hostile.TRANSPORT["endless chunks"]),
    "closes": (hostile.INFER, hostile.TRANSPORT["closes"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_verdict_on_a_server_that_misbehaves_is_exit_code_1(run_cli, bundles, name):
    server = HostileServer(*COMMANDS[name])
    options = ("--timeout", TIMEOUT, "--requests", 1, "--clients", "1,2", "--no-report", "--no-probe")
    done = run_cli("validate", bundles("tiny-gqa").path, "--url", server.url, *options)
    server.close()
    assert done.code == (2 if name == "a KV cache" else 1), done.err
    assert "Traceback" not in done.err
    assert "\x1b" not in done.out + done.err
    assert server.longest < TIMEOUT + 5  # a client that hangs stays for 10


@pytest.mark.parametrize(
    ("path", "status"),
    [(hostile.SERVER_PATH, "503 Service Unavailable"), (hostile.MODEL_PATH, "404 Not Found")],
)
def test_a_server_or_model_that_is_not_there_is_unavailable(path, status):
    error, _ = against(path, lambda client, _: client.answer(b"{}", status=status))
    assert isinstance(error, BackendUnavailable)


@pytest.mark.slow
def test_a_server_with_another_certificate_is_unavailable():
    """Or with none at all: nothing is sent to it."""

    def ask(name):
        server = HostileServer(hostile.SERVER_PATH, hostile.TRANSPORT[name])
        try:
            return asked(server.url.replace("http", "https"))
        finally:
            server.close()

    for name, (error, seconds) in at_once(ask, ("garbage", "nothing", "closes")).items():
        assert error.exit_code == 3, (name, error)
        assert seconds < TIMEOUT + 5, name


def test_a_server_without_the_extension_for_configurations_is_one():
    def not_found(client, _):
        client.answer(b"<html>", status="404 Not Found")

    server = HostileServer(hostile.CONFIG_PATH, not_found)
    with ServerRunner(f"{server.url}/tiny-gqa") as runner:
        assert (runner.max_batch, runner.keeps_cache) == (0, False)
        assert runner.outputs["output"].dims == (None, None, 64)
    server.close()


def test_an_answer_over_grpc_that_is_right_is_taken():
    """The request has the inputs and its place in a sequence; the result is that of the server."""
    pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
    seen = []

    def negate(schema, request, context):
        seen.append(request)
        given = np.frombuffer(request.raw_input_contents[0], np.float16)
        output = {"name": "output", "datatype": "FP16", "shape": list(request.inputs[0].shape)}
        return schema.ModelInferResponse(outputs=[output], raw_output_contents=[(-given).tobytes()])

    x = np.arange(128, dtype=np.float16).reshape(1, 2, 64)
    with grpc_server(ModelInfer=negate) as url, ServerRunner(f"{url}/tiny-gqa/3") as runner:
        np.testing.assert_array_equal(runner.run({"x": x})["output"], -x)
        runner.infer({"x": x}, sequence_id=5, sequence_start=True, sequence_end=False)
    assert (seen[0].model_name, seen[0].model_version, seen[0].inputs[0].name) == ("tiny-gqa", "3", "x")
    place = seen[1].parameters
    assert (place["sequence_id"].int64_param, place["sequence_start"].bool_param) == (5, True)
    assert place["sequence_end"].WhichOneof("parameter_choice") == "bool_param"
