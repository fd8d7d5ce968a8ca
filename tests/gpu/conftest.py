"""Bundles and engines for the GPU tests, made side by side: a TensorRT build keeps one core busy for long."""

import functools
import importlib.util
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from gpu_prepare import prepare

from mha_deploy.bundle import open_bundle

WORKERS = min(12, os.cpu_count() or 1)


class Prepared:
    """Bundles by name and precision, and why a bundle has no engine."""

    def __init__(self, jobs):
        self._jobs = jobs

    @functools.cache  # noqa: B019 (one for a session)
    def bundle(self, name, precision):
        folder, job = self._jobs[name, precision]
        job.result()
        return open_bundle(Path(folder))

    def refusal(self, name, precision):
        return self._jobs[name, precision][1].result()


@pytest.fixture(scope="session")
def prepared(request, tmp_path_factory):
    """Everything that the chosen tests need, being made while the first of them run."""
    wanted = {}
    for item in request.session.items:
        arguments = getattr(getattr(item, "callspec", None), "params", {})
        if "prepared" in item.fixturenames and "name" in arguments:
            key = (arguments["name"], arguments.get("precision", "fp16"))
            wanted[key] = wanted.get(key, False) or "engine" in item.name
    has_tensorrt = importlib.util.find_spec("tensorrt") is not None
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(WORKERS, mp_context=spawn) as pool:
        jobs = {}
        for (name, precision), engine in wanted.items():
            folder = tmp_path_factory.mktemp(f"{name}-{precision}") / "bundle"
            job = pool.submit(prepare, name, precision, str(folder), engine and has_tensorrt)
            jobs[name, precision] = (folder, job)
        yield Prepared(jobs)
