"""A real Triton server: what `package` writes is loaded, and validated through gRPC and HTTP.

The first test runs wherever the server's environment is installed (`python tests/serving/real_triton.py`).
The others are slow, and install it.
"""

import json
import shutil
import subprocess
import threading
import time

import pytest
from real_triton import Triton, install, is_installed
from served_bundles import sequences_of_64_steps

import mha_deploy as md

pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")


@pytest.fixture(scope="session")
def installed():
    if not is_installed():
        try:
            install()
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"nvidia-pytriton cannot be installed: {error}")


@pytest.fixture
def triton(installed, bundles, tmp_path):
    """A function that packages bundles and starts a server with all of them."""
    running = []

    def start(*names, bundle=None, **options):
        for name in names:
            md.package(bundle or bundles(name), tmp_path / "models", runtimes=["ort-cpu"], **options)
        running.append(Triton(tmp_path / "models").__enter__())
        return running[-1]

    yield start
    for each in running:
        each.__exit__()


@pytest.mark.slow
def test_a_packaged_model_is_served_and_validated(request, run_cli, bundles, tmp_path):
    if not is_installed() and "slow" not in request.config.option.markexpr:
        pytest.skip("nvidia-pytriton is not installed: python tests/serving/real_triton.py")
    start = request.getfixturevalue("triton")
    server = start("tiny-padding")
    url = f"grpc://127.0.0.1:{server.grpc}"
    command = ("validate", bundles("tiny-padding").path, "--url", url, "--clients", "1,8", "--requests", "40")
    done = run_cli(*command, "-o", tmp_path, "--json")
    assert done.code == 0, done.err + server.text()
    data = json.loads(done.out)
    assert data["parity"][0]["runtime"].startswith("triton 2.")
    assert [each["wrong"] for each in data["serving"]] == [0, 0]
    assert data["serving"][0]["runs"] == ["ort-cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_one_eight_and_thirty_two_clients(triton, bundles, protocol):
    server = triton("tiny-gqa")
    url = f"{protocol}://127.0.0.1:{getattr(server, protocol)}"
    report = md.validate(bundles("tiny-gqa"), url=url, clients=(1, 8, 32), requests=200)
    assert report.passed, report.headline
    assert [point["answered"] >= 200 for point in report.to_dict()["serving"]] == [True] * 3


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("cache", ["dynamic", "preallocated"])
def test_64_decode_steps_of_interleaved_sequences(triton, tmp_path, cache, protocol):
    bundle = sequences_of_64_steps(cache, tmp_path)
    server = triton(bundle.manifest.spec.name, bundle=bundle)
    url = f"{protocol}://127.0.0.1:{getattr(server, protocol)}"
    report = md.validate(bundle, url=url, clients=(6,), requests=400)
    assert report.passed, report.headline
    (decode,) = report.to_dict()["decode"]
    assert decode["steps"] == 64


@pytest.mark.slow
def test_a_server_killed_under_load_is_a_verdict(triton, bundles):
    server = triton("tiny-gqa")
    url = f"grpc://127.0.0.1:{server.grpc}"
    answered = threading.Event()

    def kill():
        answered.wait(60)
        time.sleep(0.2)
        server.kill()

    killer = threading.Thread(target=kill)
    killer.start()

    def on_step(name, number, count):
        if name == "8 clients" and number > 20:
            answered.set()

    report = md.validate(
        bundles("tiny-gqa"), url=url, clients=(8, 32), requests=100_000, timeout_s=10, on_step=on_step
    )
    killer.join()
    assert not report.passed
    (point,) = report.to_dict()["serving"]  # 32 clients were not tried
    assert point["answered"] > 0
    assert point["judged"] > 0
    assert point["wrong"] == 0 or "cannot be reached" in point["first_error"]
    assert point["errors"]["not sent"] > 0
    assert "cannot be reached" in point["first_error"]
    report.to_html()


@pytest.mark.slow
def test_a_wrong_model_served_under_the_right_name_is_caught(triton, bundles, tmp_path):
    server = triton("tiny-mha", name="tiny-gqa")
    url = f"grpc://127.0.0.1:{server.grpc}"
    report = md.validate(bundles("tiny-gqa"), url=url, clients=(1,), requests=8)
    assert not report.passed
    assert report.to_dict()["serving"][0]["wrong"] > 0


@pytest.mark.slow
def test_a_changed_graph_is_not_loaded(installed, bundles, tmp_path):
    package = md.package(bundles("tiny-gqa"), tmp_path / "models", runtimes=["ort-cpu"])
    graph = package.path / "1" / "bundle" / "model.onnx"
    shutil.copy(bundles("tiny-mha").model_path, graph)
    with pytest.raises(RuntimeError, match="graph was changed"), Triton(tmp_path / "models"):
        pass
