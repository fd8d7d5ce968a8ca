"""Engines are run: profiles chosen, contexts and graphs kept and freed; on a GPU the answers are right."""

import os
from pathlib import Path
from types import SimpleNamespace

import cuda_fake
import msgspec
import numpy as np
import pytest
from fake_engines import VERSIONS, fake
from rtx_engines import build_rtx
from tensorrt_models import engine_on_gpu, layer, needs_rtx, profile

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.engine import engine as engines
from mha_deploy.engine.engine import Engine, EngineManifest, open_engine_runner, reasons_not_to_run
from mha_deploy.errors import BackendUnavailable, BundleError, DeployError
from mha_deploy.judge import judge_case
from mha_deploy.runtime import cuda
from mha_deploy.runtime.child import isolation
from mha_deploy.runtime.tensorrt import engine_runner as bound
from mha_deploy.runtime.tensorrt.engine_runner import (
    Recent,
    TensorRTRunner,
    admitting,
    describe,
    first_admitting,
    load_engine,
)
from mha_deploy.runtime.tensorrt.kernels import LargeTensor
from mha_deploy.runtime.tensorrt.versions import EngineError, load
from mha_deploy.runtime.timing import TimingPlan

# -- which profile ---------------------------------------------------------------------------------------

SHORT = {"x": ((1, 1, 64), (2, 8, 64), (4, 16, 64)), "n": ((1,), (2,), (4,))}
LONG = {"x": ((1, 9, 64), (2, 32, 64), (4, 64, 64)), "n": ((1,), (2,), (4,))}


def shapes(B, S):
    return {"x": (B, S, 64), "n": (B,)}


@pytest.mark.parametrize(
    ("B", "S", "expected"),
    [(1, 1, [0]), (4, 8, [0]), (1, 9, [0, 1]), (4, 16, [0, 1]), (2, 17, [1]), (2, 65, []), (5, 8, [])],
)
def test_a_profile_takes_what_lies_between_its_smallest_and_its_largest_shape(B, S, expected):
    assert admitting([SHORT, LONG], shapes(B, S)) == expected


def test_every_input_counts_and_so_does_the_rank():
    assert admitting([SHORT], {"x": (2, 8, 64), "n": (5,)}) == []
    assert admitting([SHORT], {"x": (2, 8), "n": (2,)}) == []
    assert admitting([SHORT], {"x": (2, 8, 65), "n": (2,)}) == []


def test_the_first_profile_that_fits_is_taken():
    assert first_admitting([SHORT, LONG], shapes(2, 12)) == 0
    assert first_admitting([LONG, SHORT], shapes(2, 12)) == 0
    assert first_admitting([SHORT, LONG], shapes(2, 40)) == 1


def test_shapes_that_nobody_takes_are_refused_with_what_would_be_taken():
    with pytest.raises(DeployError, match="No optimization profile") as caught:
        first_admitting([SHORT, LONG], shapes(2, 99))
    assert caught.value.got == "x 2×99×64, n 2"
    assert caught.value.hint == "profile 0: x 1..4×1..16×64, n 1..4; profile 1: x 1..4×9..64×64, n 1..4"


def test_a_profile_requested_must_exist_and_fit():
    assert first_admitting([SHORT, LONG], shapes(2, 12), only=1) == 1
    for index in (1, -1, 2):
        with pytest.raises(DeployError, match=f"No optimization profile {index} of") as caught:
            first_admitting([SHORT, LONG], shapes(2, 8), only=index)
        assert describe(LONG) in caught.value.hint


# -- what is kept ----------------------------------------------------------------------------------------


class Thing:
    def __init__(self, name, closed):
        self.name, self._closed = name, closed

    def close(self):
        self._closed.append(self.name)


def recent(most, *, shared=True):
    """A cache, a function that gets from it by profile and size, and what it closed."""
    kept, closed = Recent(most, shared=shared), []

    def get(name, profile=0):
        return kept.get(profile, {"x": (ord(name),)}, lambda: Thing(f"{name}{len(closed)}", closed)).name

    return kept, get, closed


def test_the_least_recently_used_goes_first_and_before_the_new_one_is_made():
    kept, get, closed = recent(2)
    assert [get("a"), get("b"), get("a"), get("c")] == ["a0", "b0", "a0", "c1"]
    assert closed == ["b0"]
    assert get("b") == "b2"
    assert closed == ["b0", "a0"]
    kept.close()
    assert sorted(closed) == ["a0", "b0", "b2", "c1"]


def test_what_could_not_be_made_is_not_kept():
    kept, get, _ = recent(2)
    with pytest.raises(ZeroDivisionError):
        kept.get(0, {"x": (ord("a"),)}, lambda: 1 / 0)
    assert get("a") == "a0"


def test_a_profile_that_is_not_shared_belongs_to_one_shape_at_a_time():
    _, get, closed = recent(8, shared=False)
    assert [get("a"), get("a", 1), get("b"), get("b")] == ["a0", "a0", "b1", "b1"]
    assert closed == ["a0"]


# -- the control flow, in every version, on a device that is not there ---------------------------------------


@pytest.fixture
def device(monkeypatch):
    return cuda_fake.install(monkeypatch)


def feeds(B=2, S=3, start=0):
    x = np.arange(start, start + B * S * 4, dtype=np.float16).reshape(B, S, 4)
    return {"x": x, "n": np.full(B, S, np.int32)}


def public(kind):
    return {name for name in vars(kind) if not name.startswith("_")}


@pytest.mark.parametrize("kind", ["Buffer", "Stream", "Graph"])
def test_the_fake_device_has_the_methods_of_the_real_one(kind):
    assert public(getattr(cuda_fake, kind)) == public(getattr(cuda, kind))


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("version", VERSIONS)
def test_an_engine_runs_and_leaves_nothing_behind(device, version, graph):
    rt = fake(version)
    with TensorRTRunner(rt, b"plan", cuda_graph=graph) as runner:
        assert runner.name == f"{rt.backend} {rt.version}"
        assert runner.inputs["x"].dims == (None, None, 4)
        assert runner.inputs["n"].dtype == np.int32
        assert runner.outputs["y"].dtype == np.float16
        assert runner.profiles[1]["x"] == ((1, 5, 4), (2, 9, 4), (4, 16, 4))
        for start, (B, S) in enumerate([(2, 3), (2, 3), (1, 8), (4, 12), (2, 3)]):
            given = feeds(B, S, start)
            np.testing.assert_array_equal(runner.run(given)["y"], given["x"])
    assert device.is_empty()


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("version", ["8.6.1", "11.4.0"])
def test_a_call_that_tensorrt_cannot_hold_is_refused_before_it_sees_the_sizes(device, version, graph):
    rows = LargeTensor(tensor="scores", dims="B,536870912,S", axes={"B": ("x", 0), "S": ("x", 1)})
    with TensorRTRunner(fake(version), b"plan", cuda_graph=graph, large_tensors=[rows]) as runner:
        for _ in range(2):
            with pytest.raises(EngineError, match="does not support a tensor") as caught:
                runner.run(feeds(1, 4))
            assert caught.value.got.startswith("scores with 2,147,483,648 elements")
            given = feeds(1, 3)
            np.testing.assert_array_equal(runner.run(given)["y"], given["x"])
    assert device.is_empty()


def test_the_second_run_with_the_same_shapes_only_launches_the_graph(device):
    with TensorRTRunner(fake(), b"plan") as runner:
        runner.run(feeds())
        device.done.clear()
        runner.run(feeds(start=5))
    assert device.done == ["upload", "upload", "fill", "launch", "download"]


def test_an_input_that_is_not_contiguous_is_taken_as_it_reads(device):
    given = feeds(2, 3)
    given["x"] = np.ascontiguousarray(given["x"].transpose(1, 0, 2)).transpose(1, 0, 2)
    with TensorRTRunner(fake(), b"plan") as runner:
        np.testing.assert_array_equal(runner.run(given)["y"], given["x"])


@pytest.mark.parametrize("version", VERSIONS)
def test_int64_inputs_are_narrowed_where_the_parser_did_so(device, version):
    given = {**feeds(), "n": np.full(2, 3, np.int64)}
    with TensorRTRunner(fake(version), b"plan") as runner:
        if not version.startswith("8."):
            with pytest.raises(DeployError, match="wrong type"):
                runner.run(given)
            return
        np.testing.assert_array_equal(runner.run(given)["y"], given["x"])
        np.testing.assert_array_equal(runner.run_in_profile(given, 0)["y"], given["x"])
        assert runner.profiles_for(given) == [0]
        assert runner.time(given, TimingPlan(samples=3)).results[0].keys() == {"y"}
        with pytest.raises(DeployError, match="beyond INT32"):
            runner.run({**given, "n": np.full(2, 2**40)})


def test_an_output_that_nobody_writes_is_no_result(device, monkeypatch):
    with TensorRTRunner(fake(), b"plan") as runner:
        runner.run(feeds())
        monkeypatch.setattr(cuda_fake.Graph, "launch", lambda self, stream: None)
        assert np.isnan(runner.run(feeds())["y"]).all()


def test_the_same_inputs_run_in_every_profile_that_takes_them(device):
    rt = fake()
    with TensorRTRunner(rt, b"plan") as runner:
        given = feeds(2, 6)
        assert runner.profiles_for(given) == [0, 1]
        for index in (0, 1):
            np.testing.assert_array_equal(runner.run_in_profile(given, index)["y"], given["x"])
            assert rt.module.last_context()._profile == index
        assert runner.profiles_for(feeds(2, 20)) == []
        narrow = {**given, "x": given["x"][..., :2]}
        assert runner.profiles_for(narrow) == [], "of a size that is fixed in the engine"
        with pytest.raises(DeployError, match="No optimization profile 1"):
            runner.run_in_profile(feeds(2, 3), 1)
        with pytest.raises(DeployError, match="No optimization profile") as caught:
            runner.run(feeds(2, 20))
        assert "profile 1: x 1..4×5..16×4" in caught.value.hint


def test_only_so_many_shapes_are_kept(device):
    with TensorRTRunner(fake(), b"plan", keep=2) as runner:
        for S in (1, 2, 3, 4):
            runner.run(feeds(1, S))
            assert device.graphs <= 2
        assert device.graphs == 2
        assert len(device.memory) == 2 * 3


def test_8_6_keeps_one_context_a_profile(device):
    with TensorRTRunner(fake("8.6.1"), b"plan") as runner:
        for S in (1, 2, 12, 3):
            runner.run(feeds(1, S))
        assert device.graphs == 2


def test_rtx_compiles_its_kernels_before_the_first_call(device):
    rt = fake("rtx-1.7.1")
    with TensorRTRunner(rt, b"plan") as runner:
        runner.run(feeds())
        strategy = rt.module.last_context()._config.dynamic_shapes_kernel_specialization_strategy
        assert strategy.name == "EAGER"


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("version", ["8.6.1", "rtx-1.7.1"])
def test_slots_compute_each_on_their_own_copy(device, version, graph):
    given = feeds()
    with TensorRTRunner(fake(version), b"plan", cuda_graph=graph) as runner:
        runner.run(given)
        held = len(device.memory)
        with runner._prepare(given, 3) as prepared:
            assert np.isnan(prepared.results(1)["y"]).all()
            device.done.clear()
            prepared.launch(1)
            assert device.done == (["launch"] if graph else ["execute"])
            np.testing.assert_array_equal(prepared.results(1)["y"], given["x"])
            assert np.isnan(prepared.results(2)["y"]).all()
            scratch = 100 if version == "8.6.1" else 200
            io = 2 * given["x"].nbytes + given["n"].nbytes
            assert prepared.memory_bytes == scratch + len(b"plan") + 3 * io
        assert len(device.memory) == held
        np.testing.assert_array_equal(runner.run(feeds(start=9))["y"], feeds(start=9)["x"])
    assert device.is_empty()


def test_the_inputs_of_slots_are_uploaded_once(device):
    with TensorRTRunner(fake(), b"plan") as runner:
        runner.run(feeds())
        device.done.clear()
        with runner._prepare(feeds(), 4):
            assert device.done.count("upload") == 2
            assert device.done.count("copy") == 3 * 2


# -- and when it fails -----------------------------------------------------------------------------------

REFUSALS = [
    "create_execution_context",
    "set_optimization_profile_async",
    "set_input_shape",
    "set_tensor_address",
    "execute_async_v3",
]


@pytest.mark.parametrize("call", REFUSALS)
def test_a_refusal_of_tensorrt_says_why_and_leaves_nothing_behind(device, call):
    rt = fake()
    with TensorRTRunner(rt, b"plan") as runner:
        rt.module.refuses = call
        with pytest.raises(EngineError, match=r"TensorRT 11\.4\.0") as caught:
            runner.run(feeds())
        assert ("no execution context" if call == REFUSALS[0] else f"{call} was refused") in caught.value.got
        rt.module.refuses = None
        np.testing.assert_array_equal(runner.run(feeds())["y"], feeds()["x"])
    assert device.is_empty()


@pytest.mark.parametrize("timed", [False, True])
def test_every_shape_runs_once_before_it_is_recorded(device, monkeypatch, timed):
    """What a layer does only once for a shape, a plugin's plan above all, is not in the graph."""
    seen = []
    queue, capture = bound.BoundContext.enqueue, bound.capture

    def run(context, addresses):
        seen.append(("call", context.shapes["x"]))
        queue(context, addresses)

    def recorded(work, stream):
        seen.append(("record", seen[-1][1]))
        return capture(work, stream)

    monkeypatch.setattr(bound.BoundContext, "enqueue", run)
    monkeypatch.setattr(bound, "capture", recorded)
    with TensorRTRunner(fake("8.6.1"), b"plan") as runner:
        for S in (2, 3):
            (runner.time if timed else runner.run)(feeds(S=S))
    shapes_seen = list(dict.fromkeys(shape for _, shape in seen))
    assert len(shapes_seen) == 2
    for shape in shapes_seen:
        mine = [what for what, other in seen if other == shape]
        # One call runs, and the next is what the graph holds.
        assert mine == ["call", "record", "call"] * (len(mine) // 3)


def test_a_call_that_cannot_be_recorded_is_run_and_timed_without_a_graph(device):
    """And the time says so, and why: it is that of another way to call the engine."""
    with TensorRTRunner(fake(), b"plan") as runner:
        wanted = runner.run(feeds())
        assert runner.time(feeds(), TimingPlan(samples=3)).why_no_graph is None
    device.fail_on = "capture"
    with TensorRTRunner(fake(), b"plan") as runner:
        for _ in range(2):
            np.testing.assert_equal(runner.run(feeds()), wanted)
        timing = runner.time(feeds(), TimingPlan(samples=3))
        assert not timing.graph
        assert "cudaErrorStreamCaptureInvalidated" in timing.why_no_graph
        for result in timing.results:
            np.testing.assert_equal(result, wanted)
    assert device.is_empty()


def test_an_output_whose_size_depends_on_the_data_is_refused(device):
    rt = fake()
    rt.module.data_dependent = True
    with TensorRTRunner(rt, b"plan") as runner, pytest.raises(EngineError) as caught:
        runner.run(feeds())
    assert "the size of y depends on the data" in caught.value.got


@pytest.mark.parametrize("allocations", [0, 1, 2, 3, 4, 7])
def test_no_memory_is_lost_when_there_is_too_little(device, allocations):
    with TensorRTRunner(fake(), b"plan") as runner:
        device.allocations_left = allocations
        with pytest.raises(cuda.CudaError, match="cudaMalloc"), runner._prepare(feeds(), 3):
            pass
        assert len(device.memory) == (3 if allocations >= 3 else 0)
    assert device.is_empty()


def test_slots_are_freed_when_the_timing_fails(device):
    with TensorRTRunner(fake(), b"plan") as runner:
        with pytest.raises(ZeroDivisionError), runner._prepare(feeds(), 3):
            raise ZeroDivisionError
        assert device.graphs == 1
    assert device.is_empty()


# -- the real TensorRT-RTX, without a GPU --------------------------------------------------------------------

no_gpu = pytest.mark.skipif(cuda.find_gpu() is not None, reason="here is a GPU")


@needs_rtx
@no_gpu
def test_an_engine_that_cannot_be_loaded_says_why():
    rt = load("tensorrt-rtx")
    plan = build_rtx(layer(), profiles=[profile()], targets="8.9").plan
    with pytest.raises(EngineError, match="cannot load this engine here") as caught:
        load_engine(rt, plan)
    assert "cuda" in caught.value.got.lower()
    with pytest.raises(BackendUnavailable, match="no CUDA GPU"):
        TensorRTRunner(rt, plan)


# -- an engine from disk ---------------------------------------------------------------------------------

ADA = {"name": "NVIDIA GeForce RTX 4090", "compute_cap": "8.9"}


def on_disk(path=Path("tiny.engine"), **changes):
    known = dict.fromkeys(EngineManifest.__struct_fields__) | {"plugins": [], "in_place": {}}
    manifest = EngineManifest(
        **{**known, "backend": "tensorrt", "version": "8.6.1", "gpu": ADA, "options": {}, "large_tensors": []}
    )
    return Engine(path=path, manifest=msgspec.structs.replace(manifest, **changes))


@pytest.fixture
def machine_with(monkeypatch, in_process):
    """Make this a machine with a GPU and a TensorRT, or without."""

    def make(rt, gpu):
        def give(backend):
            if rt is None:
                raise BackendUnavailable("not here")
            return rt

        monkeypatch.setattr(engines, "load", give)
        monkeypatch.setattr(engines, "first_gpu", lambda: gpu)

    return make


@pytest.mark.parametrize(
    ("version", "gpu", "reported"),
    [
        (None, ADA, "tensorrt is not installed here"),
        ("10.14.1", ADA, "built by tensorrt 8.6.1, here is 10.14.1"),
        ("8.6.1", None, "there is no NVIDIA GPU here"),
        ("8.6.1", {"name": "NVIDIA H200", "compute_cap": "9.0"}, "here is NVIDIA H200"),
    ],
)
def test_an_engine_that_does_not_fit_is_not_even_loaded(machine_with, version, gpu, reported):
    machine_with(version and fake(version), gpu)
    with pytest.raises(BackendUnavailable, match=r"tiny\.engine cannot run here") as caught:
        open_engine_runner(on_disk())
    assert reported in caught.value.got
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("compatible", [True, False])
def test_only_a_version_compatible_engine_may_bring_code(
    machine_with, device, tmp_path, compatible, monkeypatch
):
    rt = fake("8.6.1")
    machine_with(rt, ADA)
    path = tmp_path / "tiny.engine"
    path.write_bytes(b"plan")
    opened = on_disk(path, options={"version_compatible": compatible})
    assert reasons_not_to_run(opened) == []
    monkeypatch.setattr(isolation, "trust_code", False)
    monkeypatch.setattr(isolation, "own", set())  # this engine has no hash, as that of another test may have
    if compatible:
        with pytest.raises(BundleError, match="permission"):
            open_engine_runner(opened)
    monkeypatch.setattr(isolation, "trust_code", True)
    with open_engine_runner(opened, cuda_graph=False) as runner:
        allowed = getattr(runner.loaded[1], "__dict__", {}).get("engine_host_code_allowed", False)
        assert allowed is compatible
        assert runner.graph is False


def test_the_manifest_tells_the_runner_what_tensorrt_cannot_hold(machine_with, device, tmp_path):
    machine_with(fake("8.6.1"), ADA)
    path = tmp_path / "tiny.engine"
    path.write_bytes(b"plan")
    reported = [LargeTensor(tensor="scores", dims="1073741824,S", axes={"S": ("x", 1)})]
    with open_engine_runner(on_disk(path, large_tensors=reported)) as runner:
        runner.run(feeds(1, 1))
        with pytest.raises(EngineError, match="does not support a tensor"):
            runner.run(feeds(1, 2))


@needs_rtx
@no_gpu
def test_without_a_gpu_the_installed_rtx_is_not_enough():
    version = load("tensorrt-rtx").version
    reasons = reasons_not_to_run(on_disk(backend="tensorrt-rtx", version=version, gpu=None, targets=["SM89"]))
    assert reasons == ["there is no NVIDIA GPU here"]


# -- on a GPU --------------------------------------------------------------------------------------------

TWO_PROFILES = ("S=1:16:40", "S=17:48:64")


@pytest.fixture(scope="module")
def gpu_engine(bundles, workshop):
    """One engine with two profiles that overlap, built once with the TensorRT that is here."""
    return engine_on_gpu(workshop, bundles("tiny-padding"), *TWO_PROFILES)


@pytest.fixture
def gpu_runner(gpu_engine):
    with open_engine_runner(gpu_engine[1]) as runner:
        yield runner


def drawn(B, S, seed=0):
    x = np.random.default_rng(seed).standard_normal((B, S, 64)).astype(np.float16)
    return {"x": x, "key_lengths": np.arange(S, S - B, -1).clip(1).astype(np.int32)}


@pytest.mark.gpu
def test_the_golden_cases_pass_in_every_profile_that_takes_them(gpu_engine, gpu_runner):
    bundle, seen = gpu_engine[0], set()
    assert gpu_runner.device == cuda.open_gpu().name
    for case in golden_cases(bundle):
        for index in gpu_runner.profiles_for(case.inputs):
            got = gpu_runner.run_in_profile(case.inputs, index)
            assert all(verdict.passed for verdict in judge_case(case, got, bundle.manifest.precision))
            seen.add(index)
    assert seen == {0, 1}


@pytest.mark.gpu
def test_both_profiles_give_the_same_answer_where_they_overlap(gpu_runner):
    given = drawn(2, 30)
    assert gpu_runner.profiles_for(given) == [0, 1]
    short, long = (gpu_runner.run_in_profile(given, index)["output"] for index in (0, 1))
    np.testing.assert_allclose(short.astype(np.float32), long.astype(np.float32), atol=1e-2)


@pytest.mark.gpu
def test_a_shape_is_recorded_once_and_answers_the_same_again(in_process, gpu_runner, monkeypatch):
    recorded = []
    real = bound.capture
    monkeypatch.setattr(bound, "capture", lambda *given: recorded.append(1) or real(*given))
    first = gpu_runner.run(drawn(2, 16))["output"]
    again = gpu_runner.run(drawn(2, 16))["output"]
    assert len(recorded) == 1
    np.testing.assert_array_equal(first, again)
    other = gpu_runner.run(drawn(2, 16, seed=1))["output"]
    assert len(recorded) == 1
    assert not np.array_equal(first, other)
    assert gpu_runner.run(drawn(3, 50))["output"].shape == (3, 50, 64)
    assert len(recorded) == 2
    np.testing.assert_array_equal(gpu_runner.run(drawn(2, 16))["output"], first)


@pytest.mark.gpu
def test_shapes_outside_every_profile_are_refused_on_a_gpu(gpu_runner):
    with pytest.raises(DeployError, match="No optimization profile") as caught:
        gpu_runner.run(drawn(2, 65))
    assert "profile 1: x 1..4×17..64×64" in caught.value.hint


@pytest.mark.gpu
def test_an_output_that_is_not_written_is_not_a_number_on_a_gpu(in_process, gpu_runner, monkeypatch):
    gpu_runner.run(drawn(2, 16))
    monkeypatch.setattr(cuda.Graph, "launch", lambda self, stream: None)
    assert np.isnan(gpu_runner.run(drawn(2, 16))["output"]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False])
def test_the_timed_calls_give_the_answer_of_a_run(gpu_engine, graph):
    given = drawn(2, 16)
    with open_engine_runner(gpu_engine[1], cuda_graph=graph) as runner:
        expected = runner.run(given)["output"]
        timing = runner.time(given)
        assert timing.graph is graph
        assert len(timing.samples_us) >= 100
        assert timing.p50 > 0
        assert timing.memory_bytes > gpu_engine[1].manifest.engine_bytes
        for results in timing.results:
            np.testing.assert_array_equal(results["output"], expected)
        np.testing.assert_array_equal(runner.run(given)["output"], expected)


@pytest.mark.gpu
def test_every_slot_gives_the_answer_of_a_run(in_process, gpu_runner):
    given = drawn(2, 16)
    expected = gpu_runner.run(given)["output"]
    with gpu_runner._prepare(given, 5) as prepared:
        for slot in range(5):
            prepared.launch(slot)
        for slot in range(5):
            np.testing.assert_array_equal(prepared.results(slot)["output"], expected)


def own_device_memory():
    """Device memory of this process, or of all where no other test runs; None where neither is known."""
    nvml = cuda._nvml()
    if nvml is not None:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(cuda.open_gpu().pci_bus.encode())
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:  # a container may hide the numbers
                return process.usedGpuMemory
    return None if "PYTEST_XDIST_WORKER" in os.environ else -cuda.free_memory()


@pytest.mark.gpu
def test_the_memory_comes_back(gpu_engine, in_process, monkeypatch):
    real, allocated = cuda._call, set()

    def counting(function, *arguments):
        result = real(function, *arguments)
        if function == "cudaMalloc":
            allocated.add(int(result))
        elif function == "cudaFree":
            allocated.remove(arguments[0])
        return result

    monkeypatch.setattr(cuda, "_call", counting)

    def use():
        with open_engine_runner(gpu_engine[1]) as runner:
            for S in (1, 16, 64):
                runner.run(drawn(4, S))
            assert allocated
        assert not allocated

    use()  # what CUDA and TensorRT keep for the process
    before = own_device_memory()
    for _ in range(3):
        use()
    if before is not None:
        assert abs(own_device_memory() - before) < 8 << 20


def test_a_missing_lean_runtime_is_named_with_what_provides_it(device, monkeypatch):
    rt = fake("8.6.1")

    def load(self, plan):
        self._logger.log(SimpleNamespace(name="ERROR"), "Unable to load library: libnvinfer_lean.so.8.6.0")

    monkeypatch.setattr(rt.module.Runtime, "deserialize_cuda_engine", load)
    with pytest.raises(EngineError) as caught:
        TensorRTRunner(rt, b"plan", host_code=True)
    for part in ("libnvinfer_lean.so.8.6.0", "tensorrt-lean==8.6.1", "LD_LIBRARY_PATH"):
        assert part in caught.value.hint
