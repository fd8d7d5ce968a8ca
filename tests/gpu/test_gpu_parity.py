"""Accuracy parity on this machine's GPU: every variant, precision and mask, in every runtime that is here.

    pytest -m gpu -n 6 --dist worksteal

A runtime that is not here, or that says that it does not take a layer, is skipped by name; a wrong answer
fails. Tiny layers have all the variants and masks of the large ones.
"""

import functools
import importlib.util

import pytest
from gpu_evaluations import TINY, assert_right, evaluated

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.model.precision import find_precision
from mha_deploy.runtime import cuda
from mha_deploy.validation.conformance import conformance_table, mask_columns
from mha_deploy.validation.runtimes import RuntimeFinder

pytestmark = pytest.mark.gpu

PRECISIONS = ("fp16", "bf16", "fp32")
QUICK = ("eager", "eager+graph", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "ort-cuda", "ort-cuda-contrib")
# ONNX's evaluator makes the causal triangle as tall as the mask, which broadcasts here.
KNOWN_BUGS = {("causal-broadcast", "onnx-reference")}
# What is here must take every layer, or a runtime that breaks altogether would only be skipped.
NEVER_REFUSES = ("eager", "eager+graph", "ort-cuda")
# Kernels of PyTorch that may refuse a layer; in these layers they must give a reason, in FP16.
SDPA = ("sdpa-cudnn", "sdpa-flash", "sdpa-efficient")
REASONED = (
    *("tiny-gqa", "tiny-padding", "tiny-mha", "tiny-weights", "tiny-head-mix", "tiny-sparse-heads"),
    *("tiny-rope", "tiny-dynamic", "tiny-preallocated", "tiny-window"),
)
# ONNX Runtime 1.31's CUDA kernel does not give out weights after the softmax.
REFUSALS = {("ort-cuda", "tiny-weights")}
# Out of budget with ONNX Runtime 1.31.1 on an H200; right in FP16 and BF16, and on its CPU.
KNOWN_WRONG = {("ort-cuda", "tiny-softcap", "fp32")}


@pytest.fixture(scope="module")
def finders(prepared):
    """The runtimes of a bundle, once for all tests: the weights go to the GPU once."""
    return functools.cache(lambda name, precision: RuntimeFinder(prepared.bundle(name, precision)))


def evaluated_or_skipped(finder, runtime):
    try:
        return evaluated(finder, runtime)
    except BackendUnavailable as error:
        pytest.skip(f"{runtime} is not here: {error.in_one_line}")
    except DeployError as error:
        if runtime in NEVER_REFUSES and (runtime, finder.bundle.manifest.spec.name) not in REFUSALS:
            raise
        if must_have_a_reason(finder.bundle.manifest, runtime) and not is_reasoned(error):
            raise
        pytest.skip(f"{runtime} does not take it: {error.in_one_line}")


def must_have_a_reason(manifest, runtime):
    return runtime in SDPA and manifest.spec.name in REASONED and manifest.precision.name == "fp16"


def is_reasoned(error):
    return "has no kernel for these inputs" in error.what and bool(error.got)


@pytest.mark.parametrize("runtime", QUICK)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", TINY)
def test_a_layer_is_right(request, finders, name, precision, runtime):
    if (runtime, name, precision) in KNOWN_WRONG:
        request.applymarker(pytest.mark.xfail(reason="a known mistake of the runtime", strict=True))
    evaluation = evaluated_or_skipped(finders(name, precision), runtime)
    assert runtime in evaluation.runner.split(), "the runner has its name"
    assert_right(evaluation)


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is None, reason="TensorRT is not installed")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", TINY)
def test_an_engine_is_right(prepared, name, precision):
    """In every slot of a batch, too: an engine that mixes rows up is wrong however small its error."""
    bundle, refusal = prepared.engine(name, precision)
    if refusal is not None:
        pytest.skip(f"TensorRT does not take it: {refusal}")
    assert_right(evaluated(RuntimeFinder(bundle), "tensorrt", invariance=True))


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is None, reason="TensorRT is not installed")
def test_launches_of_an_engine_are_queued_without_waiting(prepared, in_process):
    """Two hundred behind work that keeps the device busy: the host goes on before that work has ended."""
    bundle, refusal = prepared.engine("tiny-mha", "fp16")
    assert refusal is None
    case = next(iter(golden_cases(bundle)))
    with RuntimeFinder(bundle).named("tensorrt").open() as runner:
        memory, done = cuda.Buffer(2**32), cuda.Event()

        def are_queued(launch, wait):
            launch(), wait()
            for _ in range(100):  # about 100 ms
                memory.fill(0, runner.stream)
            done.record(runner.stream)
            for _ in range(200):
                launch()
            (status,) = cuda._runtime().cudaEventQuery(done._raw)
            wait()
            return int(status) != 0

        # Others may keep this process from its cores for long; a launch that waits does so every time.
        assert any(runner.watch(case.inputs, are_queued) for _ in range(3))
        memory.free(), done.close()


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_every_runtime_treats_masks_as_onnx_says(precision):
    """Causal alignment, boolean and additive masks, rows that see nothing."""
    table = conformance_table(mask_columns(find_precision(precision)), find_precision(precision))
    wrong = {
        (row.case, column): cell.detail
        for row in table.rows
        if not row.diagnostic
        for column, cell in row.cells.items()
        if cell.status == "wrong" and (row.case, column) not in KNOWN_BUGS
    }
    assert wrong == {}
