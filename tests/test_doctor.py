"""The doctor reports what is here, what is broken, and how to install the rest."""

import importlib.metadata
import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest

from mha_deploy.environment import (
    EXPORT_PACKAGES,
    RUNTIMES,
    RuntimePackage,
    examine,
    gpus,
    installed_version,
    versions,
)


def runtime(module, packages=(), verb=""):
    return RuntimePackage(module, module, packages, "something", f"get {module}", verb=verb)


def state_of(known, **options):
    """What the report says of one runtime."""
    (row,) = examine([known], **options)["runtimes"]
    return SimpleNamespace(**row)


def broken_module(folder, monkeypatch, code):
    (folder / "broken_runtime.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "broken_runtime", raising=False)
    return runtime("broken_runtime", ("numpy",))


def nvidia_smi(folder, monkeypatch, script):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


# -- runtimes ------------------------------------------------------------------------------------


def test_what_is_here_works():
    findings = {row["name"]: SimpleNamespace(**row) for row in examine(load=True)["runtimes"]}
    here = {"PyTorch", "onnxscript", "ONNX", "ONNX Runtime", "cuda-bindings", "matplotlib"}
    assert set(findings) == here | {"TensorRT", "TensorRT lean", "TensorRT-RTX"}
    for name in here:
        assert (findings[name].works, findings[name].loaded) == (True, True), findings[name]
        (packages,) = (known.packages for known in RUNTIMES if known.name == name)
        assert findings[name].version == next(filter(None, map(installed_version, packages)))
    assert "CPU" in findings["ONNX Runtime"].note
    assert findings["PyTorch"].note.startswith(("CPU only", "CUDA: "))


def test_what_takes_long_is_imported_on_request_only(tmp_path, monkeypatch):
    broken = broken_module(tmp_path, monkeypatch, "raise ImportError('no libcuda')")._replace(slow=True)
    finding = state_of(broken)
    assert (finding.works, finding.loaded) == (True, False)
    assert "broken_runtime" not in sys.modules
    finding = state_of(broken, load=True)
    assert not finding.works
    assert "no libcuda" in finding.problem


def test_what_is_absent_comes_with_its_command():
    finding = state_of(runtime("surely_absent", ("surely-absent",)))
    assert (finding.version, finding.problem, finding.works) == (None, None, False)
    assert finding.install == "get surely_absent"


@pytest.mark.parametrize(
    "code", ["raise ImportError('no libcuda')", "raise RuntimeError('no libcuda')", "1 +"]
)
def test_what_is_installed_but_broken_is_reported_so(tmp_path, monkeypatch, code):
    finding = state_of(broken_module(tmp_path, monkeypatch, code))
    assert finding.version is not None
    assert not finding.works
    assert finding.problem.startswith("does not import: ")
    assert ("no libcuda" in finding.problem) or code == "1 +"
    assert finding.install == "get broken_runtime"


def test_two_packages_with_one_module_are_a_problem():
    finding = state_of(runtime("numpy", ("numpy", "onnx")))  # both are installed: what matters is the count
    assert finding.problem == "numpy and onnx overwrite each other"
    assert not finding.works


def test_a_module_without_a_package_is_found_all_the_same():
    finding = state_of(runtime("json", ("no-such-package",)))
    assert finding.works
    assert finding.version == "unknown"


def test_every_install_command_names_an_extra_that_exists():
    extras = set(importlib.metadata.metadata("mha-deploy").get_all("Provides-Extra"))
    for known in RUNTIMES:
        assert known.install.startswith("pip install")
        if "[" in known.install:
            assert known.install.partition("[")[2].partition("]")[0] in extras


# -- the report ----------------------------------------------------------------------------------


def test_the_report_is_plain_data():
    found = examine()
    assert json.loads(json.dumps(found)) == found
    assert set(found) == {"versions", "runtimes", "gpus", "can"}
    assert found["can"] == {
        "export": True,
        "validate": True,
        "build-engine": importlib.util.find_spec("tensorrt_rtx") is not None,
        "run-engines": bool(gpus()),
    }
    assert all((row["install"] is None) == row["works"] for row in found["runtimes"])


def test_export_needs_all_of_its_packages_and_validation_one_of_its_runtimes():
    here = [runtime("json", verb="export"), runtime("csv", verb="validate")]
    absent = [
        runtime("surely_absent", verb="export"),
        runtime("surely_absent", verb="validate"),
    ]
    no_engine = {"build-engine": False, "run-engines": False}
    assert examine([*here, absent[1]])["can"] == {"export": True, "validate": True, **no_engine}
    assert examine([*here, absent[0]])["can"] == {"export": False, "validate": True, **no_engine}
    assert examine([here[0], absent[1]])["can"] == {"export": True, "validate": False, **no_engine}


# -- GPUs ----------------------------------------------------------------------------------------


def test_gpus_are_listed_as_the_driver_names_them(tmp_path, monkeypatch):
    lines = "NVIDIA H200, 9.0, 143771 MiB, 570.1\nNVIDIA L4, 8.9, 23034 MiB, 570.1"
    nvidia_smi(tmp_path, monkeypatch, f"echo '{lines}'")
    first, second = gpus()
    assert first == {
        "name": "NVIDIA H200",
        "compute_cap": "9.0",
        "memory.total": "143771 MiB",
        "driver_version": "570.1",
    }
    assert second["name"] == "NVIDIA L4"


def test_the_driver_is_asked_for_what_is_shown(tmp_path, monkeypatch):
    nvidia_smi(tmp_path, monkeypatch, 'echo "$1"')
    assert gpus() == [{"name": "--query-gpu=name,compute_cap,memory.total,driver_version"}]


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 1), ("0", 1), ("", 0), (" ", 0), ("-1", 0), ("-1,0", 0)]
)
def test_gpus_that_are_hidden_from_cuda_do_not_count(tmp_path, monkeypatch, visible, count):
    nvidia_smi(tmp_path, monkeypatch, "echo 'NVIDIA H200, 9.0, 143771 MiB, 570.1'")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(gpus()) == count


@pytest.mark.parametrize("script", ["echo 'no driver'; exit 9", "exit 0"])
def test_a_driver_that_does_not_answer_means_no_gpu(tmp_path, monkeypatch, script):
    nvidia_smi(tmp_path, monkeypatch, script)
    assert gpus() == []


def test_a_machine_without_the_tool_has_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == []


def test_a_tool_that_cannot_be_started_means_no_gpu(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF broken")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == []


# -- versions ------------------------------------------------------------------------------------


def test_versions_are_those_of_the_packages():
    found = versions()
    assert found["mha-deploy"] == importlib.metadata.version("mha-deploy")
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    absent = {package for package in EXPORT_PACKAGES if package not in found}
    assert absent < {"onnxruntime", "onnxruntime-gpu"}  # one of the two is enough
    for package in {*EXPORT_PACKAGES} - absent:
        assert found[package] == importlib.metadata.version(package)


def test_a_package_that_is_absent_is_left_out():
    assert installed_version("surely-absent") is None
    assert set(versions(("surely-absent",))) == {"mha-deploy", "python"}
