from functools import partial
from pathlib import Path

import msgspec
import pytest

from mha_deploy.engine import engine as machine
from mha_deploy.engine.engine import Engine, EngineManifest
from mha_deploy.errors import BackendUnavailable
from mha_deploy.runtime.tensorrt.engine_verdict import EngineVerdict, PrecisionStatus, PrecisionVerdict

H200 = {"name": "NVIDIA H200", "compute_cap": "9.0"}
ADA = {"name": "NVIDIA GeForce RTX 4090", "compute_cap": "8.9"}


def engine(types=("fp16",), **changes):
    counts = dict.fromkeys(types, 1)
    precision = PrecisionVerdict(requested="fp16", status=PrecisionStatus.VERIFIED, counts=counts)
    manifest = EngineManifest(
        backend="tensorrt",
        version="8.6.0",
        gpu=H200,
        targets=[],
        model="m",
        precision="fp16",
        dialect="primitives",
        profiles=[],
        bundle_sha256="",
        engine_sha256="",
        engine_bytes=0,
        seconds=0.0,
        strongly_typed=False,
        verdict=EngineVerdict(nodes=(), precision=precision),
        kernels=[],
        options={},
        findings=[],
        notes=[],
    )
    return Engine(path=Path("m.engine"), manifest=msgspec.structs.replace(manifest, **changes))


def test_an_engine_fits_where_it_was_built():
    assert machine.misfits(engine(), "8.6.0", H200) == []


def test_another_version_does_not_fit_unless_the_engine_allows_it():
    assert "here is 10.14.1" in machine.misfits(engine(), "10.14.1", H200)[0]
    compatible = engine(options={"version_compatible": True})
    assert machine.misfits(compatible, "8.6.1", H200) == []
    assert "here is 8.5.3" in machine.misfits(compatible, "8.5.3", H200)[0]
    assert "here is 10.14.1" in machine.misfits(compatible, "10.14.1", H200)[0]


def test_another_gpu_does_not_fit_unless_the_engine_allows_it():
    assert "built on NVIDIA H200" in machine.misfits(engine(), "8.6.0", ADA)[0]
    ampere = engine(options={"hardware_compatible": "ampere-plus"})
    assert machine.misfits(ampere, "8.6.0", ADA) == []
    assert machine.misfits(ampere, "8.6.0", {"name": "Tesla T4", "compute_cap": "7.5"}) != []
    same = engine(options={"hardware_compatible": "same-compute-capability"})
    assert machine.misfits(same, "8.6.0", {"name": "NVIDIA H100", "compute_cap": "9.0"}) == []
    assert machine.misfits(same, "8.6.0", ADA) != []


def test_an_engine_for_named_targets_fits_those_only():
    compiled = engine(gpu=None, targets=["SM89", "SM120"])
    assert machine.misfits(compiled, "8.6.0", ADA) == []
    assert "built for SM89, SM120" in machine.misfits(compiled, "8.6.0", H200)[0]


def test_an_engine_for_every_rtx_gpu_does_not_fit_the_others():
    portable = engine(gpu=None, targets=[])
    assert machine.misfits(portable, "8.6.0", ADA) == []
    assert machine.misfits(portable, "8.6.0", H200) != []
    assert machine.misfits(portable, "8.6.0", {"name": "Tesla T4", "compute_cap": "7.5"}) != []


def test_an_engine_with_fp8_needs_a_gpu_that_has_it():
    ampere = {"name": "NVIDIA RTX A6000", "compute_cap": "8.6"}
    assert machine.misfits(engine(gpu=None), "8.6.0", ampere) == []
    in_fp8 = engine(("fp16", "fp8"), gpu=None)
    assert machine.misfits(in_fp8, "8.6.0", ADA) == []
    (reason,) = machine.misfits(in_fp8, "8.6.0", ampere)
    assert "8.9" in reason
    assert "8.0" not in reason


def test_a_machine_without_gpu_or_runtime_says_so():
    reasons = machine.misfits(engine(), None, None)
    assert "not installed" in reasons[0]
    assert "no NVIDIA GPU" in reasons[1]


def test_this_machine_is_requested_its_version_and_gpu(monkeypatch):
    monkeypatch.setattr(machine, "installed_version", lambda name: "8.6.0" if name == "tensorrt" else None)
    monkeypatch.setattr(machine, "gpus", lambda: [H200])
    reasons = partial(machine.reasons_not_to_run, import_tensorrt=False)
    assert reasons(engine()) == []
    assert "tensorrt-rtx is not installed" in reasons(engine(backend="tensorrt-rtx"))[0]
    monkeypatch.setattr(machine, "gpus", list)
    assert reasons(engine()) == ["there is no NVIDIA GPU here"]


@pytest.mark.parametrize(
    ("installed", "gpus", "chosen"),
    [
        ({"tensorrt", "tensorrt_rtx"}, [H200], "tensorrt"),
        ({"tensorrt", "tensorrt_rtx"}, [], "tensorrt-rtx"),
        ({"tensorrt_rtx"}, [H200], "tensorrt-rtx"),
        ({"tensorrt"}, [], None),
        (set(), [], None),
    ],
)
def test_the_default_builder_is_what_fits_the_machine(monkeypatch, installed, gpus, chosen):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(machine, "gpus", lambda: gpus)
    if chosen is None:
        with pytest.raises(BackendUnavailable, match="No TensorRT"):
            machine.default_backend()
    else:
        assert machine.default_backend() == chosen
