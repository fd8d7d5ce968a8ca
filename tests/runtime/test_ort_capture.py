"""What ONNX Runtime does not capture is launched, and says why; nothing else that fails is passed over."""

import gc
import weakref
from pathlib import Path

import numpy as np
import onnxruntime
import ort_on_cpu
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from ort_on_cpu import drawn, opened, static_feeds

from mha_deploy.errors import DeployError
from mha_deploy.runtime import ort as ort_bound
from mha_deploy.runtime.ort import NO_CAPTURE, GraphRefused, cannot_run
from mha_deploy.runtime.timing import TimingPlan

QUICK = TimingPlan(samples=100, sample_us=1.0, rounds=3)
LAYER = ("tiny-preallocated", "onnx")
REFUSED = (
    "[ONNXRuntimeError] : 1 : FAIL : This session cannot use the graph capture feature as requested by the "
    "user  as all compute graph nodes have not been partitioned to the CUDAExecutionProvider"
)
OTHER = [
    Fail("[ONNXRuntimeError] : 6 : Failed to allocate memory for requested buffer of size 64"),
    RuntimeError("CUDA failure 2: out of memory ; GPU=0 ; file=cuda_graph.cc ; expr=cudaGraphInstantiate()"),
    Fail(
        "Non-zero status code returned while running MatMul node. Name:'capture/cuda graph' Status: bad shape"
    ),
    MemoryError(),
]


@pytest.fixture
def device(monkeypatch):
    return ort_on_cpu.install(monkeypatch)


class Refusals:
    """Sessions and calls that should capture raise `error`, if there is one."""

    def __init__(self, monkeypatch, where):
        self.error, self.opened, self.alive = Fail(REFUSED), [], []
        real_session, real_init = onnxruntime.InferenceSession, ort_bound.BoundRun.__init__
        real_launch = ort_bound.BoundRun.launch

        def session(*given, providers, **more):
            if isinstance(providers[0], str):  # not the runner's: bundles are checked on the CPU
                return real_session(*given, providers=providers, **more)
            capture = providers[0][1]["enable_cuda_graph"] == "1"
            self.opened.append((capture, [each for each in self.alive if each()]))
            if capture and self.error and where == "loading":
                raise self._fresh()
            made = real_session(*given, providers=providers, **more)
            if capture:
                self.alive.append(weakref.ref(made))
            return made

        def init(run, *given, graph_id=NO_CAPTURE):
            run.captures = graph_id != NO_CAPTURE
            real_init(run, *given, graph_id=graph_id)

        def launch(run):
            real_launch(run)
            if run.captures and self.error:
                raise self._fresh()

        monkeypatch.setattr(onnxruntime, "InferenceSession", session)
        if where == "launching":
            monkeypatch.setattr(ort_bound.BoundRun, "__init__", init)
            monkeypatch.setattr(ort_bound.BoundRun, "launch", launch)

    def _fresh(self):
        """Another one each time: an exception keeps the frames that it went through."""
        return type(self.error)(*self.error.args)


@pytest.fixture(params=["loading", "launching"])
def refusals(request, device, monkeypatch):
    return Refusals(monkeypatch, request.param)


def feeds():
    return static_feeds(drawn(1), [3, 5])


@pytest.mark.sweep(1)
def test_a_call_that_is_not_captured_is_launched_and_its_timing_says_why(device, bundles, refusals):
    with opened(bundles, LAYER) as runner:
        wanted = runner.run(feeds())
        timing = runner.time(feeds(), QUICK)
    assert timing.graph is False
    assert timing.why_no_graph == REFUSED
    assert timing.record.why_no_graph == REFUSED
    for results in timing.results:
        for name, array in wanted.items():
            np.testing.assert_array_equal(results[name], array)
    assert device.is_empty()


def test_the_next_call_is_captured_if_it_can_be(device, bundles, refusals):
    with opened(bundles, LAYER) as runner:
        assert runner.time(feeds(), QUICK).graph is False
        assert runner.graph is True
        refusals.error = None
        timing = runner.time(feeds(), QUICK)
    assert timing.graph is True
    assert timing.why_no_graph is None


def test_the_session_that_failed_is_gone_before_the_next_is_opened(device, bundles, refusals):
    with opened(bundles, LAYER) as runner:
        gc.disable()  # what is gone must be so by itself
        try:
            runner.time(feeds(), QUICK)
        finally:
            gc.enable()
    assert refusals.opened == [(False, []), (True, []), (False, [])]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("error", OTHER, ids=lambda error: type(error).__name__)
def test_any_other_failure_is_an_error(device, bundles, refusals, error):
    refusals.error = error
    with opened(bundles, LAYER) as runner:
        with pytest.raises(DeployError, match="cannot run the graph") as caught:
            runner.time(feeds(), QUICK)
        assert not isinstance(caught.value, GraphRefused)
    assert [capture for capture, _ in refusals.opened] == [False, True]
    del caught
    assert device.is_empty()


def test_who_asks_for_no_graph_has_no_reason(device, bundles, refusals):
    with opened(bundles, LAYER, cuda_graph=False) as runner:
        timing = runner.time(feeds(), QUICK)
    assert (timing.graph, timing.why_no_graph) == (False, None)
    assert [capture for capture, _ in refusals.opened] == [False, False]


def test_a_watcher_gets_the_call_without_a_graph(device, bundles, refusals):
    with opened(bundles, LAYER) as runner:
        assert runner.watch(feeds(), lambda launch, wait: (launch(), wait())) == (None, None)
    assert device.is_empty()


@pytest.mark.parametrize(
    "reported",
    [
        REFUSED,
        "This session cannot use the CUDA Graph feature as requested by the user",
        "Graph capture did not complete after 3 runs.",
        "MoE expert counting is not supported when graph capture is enabled.",
        "CUDA error cudaErrorStreamCaptureUnsupported:operation not permitted when stream is capturing",
        "CUDA failure 901: operation failed due to a previous error during capture ; expr=EndCapture()",
    ],
)
def test_what_a_refusal_to_capture_is(reported):
    got = cannot_run(RuntimeError(reported), capture=True)
    assert isinstance(got, GraphRefused)
    assert got.got == reported
    assert not isinstance(cannot_run(RuntimeError(reported), capture=False), GraphRefused)


@pytest.mark.parametrize("error", OTHER, ids=lambda error: type(error).__name__)
def test_what_is_none(error):
    assert not isinstance(cannot_run(error, capture=True), GraphRefused)


def test_onnx_runtime_has_these_words_in_it():
    (library,) = Path(onnxruntime.__file__).parent.glob("capi/onnxruntime_pybind11_state*.so")
    text = library.read_bytes().lower()
    for words in ("cannot use the graph capture feature", "not supported when graph capture is enabled"):
        assert words in ort_bound._REFUSALS
        assert words.encode() in text
    assert b"graph capture did not complete" in text
