"""Bundles and engines for the GPU tests, made side by side: a TensorRT build keeps one core busy for long."""

import functools
import importlib.util
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
from gpu_prepare import build, export

from mha_deploy.bundle import open_bundle

WORKERS = min(12, os.cpu_count() or 1)


class Prepared:
    """Bundles by name and precision, and why a bundle has no engine."""

    def __init__(self, pool, folders, with_engine):
        self._pool, self._folders = pool, folders
        # All exports before the first build: most tests need a bundle, and a build keeps a core for long.
        self._exports = {key: pool.submit(export, *key, str(folder)) for key, folder in folders.items()}
        self._builds = {}
        for key in with_engine:
            self._exports[key].add_done_callback(functools.partial(self._start_build, key))

    def _start_build(self, key, exported):
        if exported.exception() is None:
            self._builds[key] = self._pool.submit(build, str(self._folders[key]))

    @functools.cache  # noqa: B019 (one for a session)
    def bundle(self, name, precision):
        self._exports[name, precision].result()
        return open_bundle(self._folders[name, precision])

    def refusal(self, name, precision):
        self._exports[name, precision].result()
        while (name, precision) not in self._builds:  # the callback that starts it comes a moment later
            time.sleep(0.01)
        return self._builds[name, precision].result()


@pytest.fixture(scope="session")
def prepared(request, tmp_path_factory):
    """Everything that the chosen tests need, being made while the first of them run."""
    folders, with_engine = {}, []
    for item in request.session.items:
        arguments = getattr(getattr(item, "callspec", None), "params", {})
        if "prepared" in item.fixturenames and "name" in arguments:
            key = (arguments["name"], arguments.get("precision", "fp16"))
            if key not in folders:
                folders[key] = tmp_path_factory.mktemp("-".join(key)) / "bundle"
            if "engine" in item.name and importlib.util.find_spec("tensorrt") is not None:
                with_engine.append(key)
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(WORKERS, mp_context=spawn) as pool:
        yield Prepared(pool, folders, with_engine)
