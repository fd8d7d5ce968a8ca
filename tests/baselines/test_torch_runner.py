"""PyTorch as a runtime: each baseline gives right answers, or says why it cannot."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mha_deploy.baselines.torch import (
    BASELINES,
    TorchModels,
    TorchRunner,
    explain_refusal,
    find_baseline,
    open_torch_runner,
)
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.errors import BackendUnavailable, DeployError, ExportError
from mha_deploy.judge import judge_case
from mha_deploy.runtime.timing import TimingPlan

CACHED = ["tiny-dynamic", "tiny-preallocated", "tiny-window"]
LAYERS = ["tiny-gqa", "tiny-padding", "tiny-mha", "tiny-weights", "tiny-head-mix", "tiny-sparse-heads"]
QUICK = TimingPlan(samples=100, rounds=4)
# Kernels that PyTorch may refuse by what the layer asks for: masks, shared heads, head sizes.
MAY_REFUSE = {
    "sdpa-cudnn",
    "sdpa-cudnn-packed",
    "sdpa-flash",
    "sdpa-efficient",
    "compile-cudnn",
    "compile-flash",
}


def case_of(bundle, name):
    return next(case for case in golden_cases(bundle) if case.name == name)


def open_or_skip(baseline, source):
    try:
        return open_torch_runner(baseline, source)
    except BackendUnavailable as error:
        pytest.skip(str(error))


def unless_refused(baseline, act):
    """Let a kernel refuse the layer, if it gives a reason, and let a compiler be missing."""
    try:
        return act()
    except BackendUnavailable as error:
        if not baseline.startswith("compile"):
            raise
        reason = str(error)
    except DeployError as error:
        if baseline not in MAY_REFUSE or "has no kernel for these inputs" not in error.what:
            raise
        reason = error.got
    assert reason
    pytest.skip(reason)


# -- without a GPU -------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_every_baseline_is_unavailable(bundles):
    models = TorchModels(bundles("tiny-gqa"), device="cpu")
    for baseline in BASELINES:
        for source in (bundles("tiny-gqa"), models):
            with pytest.raises(BackendUnavailable, match="PyTorch finds no CUDA GPU") as caught:
                open_torch_runner(baseline, source)
            assert caught.value.exit_code == 3


def test_a_kernel_that_refuses_says_why():
    place = " (Triggered internally at /pytorch/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp:1.)"
    reason = "For dense inputs, both fused kernels require query, key and value to have the same num_heads"
    warned = [
        f"Memory efficient kernel not used because:{place}",
        f"{reason}{place}",
        f"Flash attention kernel not used because:{place}",
        f"Flash attention has been runtime disabled.{place}",
    ]
    error = explain_refusal(
        "torch 2.11 sdpa-efficient", RuntimeError("No available kernel. Aborting."), warned, compiled=False
    )
    assert type(error) is DeployError
    assert error.what == "torch 2.11 sdpa-efficient has no kernel for these inputs."
    assert (
        error.got
        == "For dense inputs, both fused kernels require query, key and value to have the same num_heads"
    )


def test_a_refusal_without_a_reason_keeps_what_was_warned_of():
    warned = ["Flash attention has been runtime disabled. (Triggered internally at x.cpp:1.)"]
    error = explain_refusal("torch", RuntimeError("No available kernel."), warned, compiled=False)
    assert error.got == "Flash attention has been runtime disabled."
    assert explain_refusal("torch", RuntimeError("No available kernel."), [], compiled=False).got


def test_a_compiler_that_is_not_there_makes_the_baseline_unavailable():
    from torch._inductor.exc import TritonMissing

    missing = TritonMissing(first_useful_frame=None)
    error = explain_refusal("torch 2.11 compile", missing, [], compiled=True)
    assert isinstance(error, BackendUnavailable)
    assert "riton" in error.got
    other = explain_refusal("torch 2.11 compile", RuntimeError("a\nb"), [], compiled=True)
    assert type(other) is DeployError
    assert other.got == "a"


@pytest.fixture
def explained(tmp_path, monkeypatch):
    """What a runner makes of an error in a file of a user's, or of a package beside it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "kit-1.0.dist-info").mkdir()
    (tmp_path / "kit-1.0.dist-info/METADATA").write_text("Name: kit\nVersion: 1.0\n")
    (tmp_path / "kit-1.0.dist-info/RECORD").write_text("kit/__init__.py,,\nkit-1.0.dist-info/METADATA,,\n")
    files = {"user": tmp_path / "model.py", "package": tmp_path / "kit/__init__.py"}

    def raised(error, by, baseline):
        runner = object.__new__(TorchRunner)  # which needs a GPU to be made
        runner.name, runner._baseline = f"torch {baseline}", find_baseline(baseline)
        code = compile("def forward():\n    raise error\n", str(files[by]), "exec")
        names = {"error": error}
        exec(code, names)
        runner._module, runner._torch_stream, runner._served = names["forward"], None, None
        runner._models = SimpleNamespace(arguments=dict)
        with pytest.raises(DeployError) as caught:
            runner._run({})
        return caught.value

    return raised


@pytest.mark.parametrize("by", ["user", "package"])
def test_what_pytorch_refuses_is_no_error_of_the_model_that_called_it(explained, by):
    from torch._inductor.exc import TritonMissing

    refused = explained(RuntimeError("No available kernel. Aborting execution."), by, "sdpa-flash")
    assert type(refused) is DeployError
    assert "kernel" in refused.what
    assert isinstance(explained(TritonMissing(first_useful_frame=None), by, "compile"), BackendUnavailable)


@pytest.mark.parametrize("baseline", ["sdpa-flash", "compile"])
def test_an_error_of_a_model_is_told_from_one_of_a_package_wherever_that_is_installed(explained, baseline):
    own = explained(ValueError("broken"), "user", baseline)
    assert isinstance(own, ExportError)
    assert "model.py:2" in own.got
    assert type(explained(ValueError("broken"), "package", baseline)) is DeployError


def test_an_error_of_our_own_stays_as_it_is():
    own = DeployError("mine", hint="another")
    assert explain_refusal("torch", own, [], compiled=False) is own


def test_a_cache_that_is_written_in_place_is_counted_once(bundles):
    """Else the memory of all but one of the timed copies would be taken off twice."""
    for name, shared in (("tiny-preallocated", True), ("tiny-dynamic", False)):
        runner = object.__new__(TorchRunner)  # which needs a GPU to be made
        runner._models = TorchModels(bundles(name), device="cpu")
        case = case_of(bundles(name), "decode")
        once = sum(array.nbytes for array in case.inputs.values()) + case.eager["output"].nbytes
        out = sum(array.nbytes for key, array in case.eager.items() if key != "output")
        assert runner._call_bytes(case.inputs, case.eager) == once + (0 if shared else out)


# -- with one ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "baseline", ["sdpa", "sdpa-math", "compile", "compile-tuned"]
)  # the others are judged in tests/gpu
@pytest.mark.parametrize("name", [*LAYERS, "tiny-rope", *CACHED])
def test_every_baseline_is_right_or_says_why_not(bundles, name, baseline):
    bundle = bundles(name)
    with open_or_skip(baseline, bundle) as runner:
        assert runner.name.startswith("torch ")
        assert runner.name.endswith(f" {baseline}")
        for case in golden_cases(bundle):
            got = unless_refused(baseline, lambda case=case: runner.run(case.inputs))
            verdicts = judge_case(case, got, bundle.manifest.precision)
            # The weights of one token over itself are 1: nothing to verify.
            assert not any(verdict.is_wrong for verdict in verdicts)
            assert any(verdict.passed for verdict in verdicts)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("baseline", ["sdpa", "sdpa-math"])  # the others are judged in tests/gpu
def test_other_precisions(bundles, baseline, precision):
    bundle = bundles("tiny-gqa", precision)
    with open_torch_runner(baseline, bundle) as runner:
        for case in golden_cases(bundle):
            got = runner.run(case.inputs)
            verdicts = judge_case(case, got, bundle.manifest.precision)
            assert [verdict.problem for verdict in verdicts] == [None] * len(got)


@pytest.mark.gpu
@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("tiny-mha", "opt"),
        ("tiny-rope", "opt"),
        ("tiny-dynamic", "prefill"),
        ("tiny-dynamic", "decode"),
        ("tiny-preallocated", "decode"),
    ],
)
def test_a_timed_call_gives_the_result_of_run(bundles, name, at, baseline):
    bundle = bundles(name)
    case = case_of(bundle, at)
    with open_or_skip(baseline, bundle) as runner:
        wanted = unless_refused(baseline, lambda: runner.run(case.inputs))
        timing = runner.time(case.inputs, QUICK)
    assert timing.graph == find_baseline(baseline).graph
    assert timing.p50 > 0
    assert timing.memory_bytes > 0
    for results in timing.results:
        verdicts = judge_case(case, results, bundle.manifest.precision)
        assert [verdict.problem for verdict in verdicts] == [None] * len(wanted)
        for output, array in wanted.items():
            np.testing.assert_array_equal(results[output], array)


@pytest.mark.gpu
def test_ways_share_the_weights_on_the_gpu(bundles):
    models = TorchModels(bundles("tiny-mha"))
    addresses = {next(models.module(path).parameters()).data_ptr() for path in ("plain", "sdpa")}
    assert len(addresses) == 1
    for baseline in ("eager", "sdpa"):
        with open_torch_runner(baseline, models) as runner:
            assert runner.run(case_of(bundles("tiny-mha"), "min").inputs)["output"].dtype == np.float16


@pytest.mark.gpu
def test_the_efficient_kernel_and_shared_heads(bundles):
    """Either PyTorch shares heads there by now, or it says that it does not."""
    bundle = bundles("tiny-gqa")
    said = ""
    with open_torch_runner("sdpa-efficient", bundle) as runner:
        try:
            runner.run(case_of(bundle, "opt").inputs)
        except DeployError as error:
            said = error.got
    assert not said or "head" in said.lower()
