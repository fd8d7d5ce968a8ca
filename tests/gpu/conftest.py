"""Bundles and engines for the GPU tests, made side by side: a TensorRT build keeps one core busy for long.

Whatever a test needs and nobody is making yet, its own process makes. Besides, one process of the session has
a pool that makes everything that the chosen tests will need.
"""

import functools
import importlib.util
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
from gpu_prepare import begin_build, begin_export, build, export, share_cores

import mha_deploy
from mha_deploy.bundle.folder import open_bundle

mha_deploy.configure(trust_code=True)  # bundles are exported in other processes

# A build needs some hundred MiB of the GPU, and more of them than this gain little.
MOST_MAKERS = 12


class Prepared:
    """Bundles by name and precision, and their engines or why there is none."""

    def __init__(self, workshop):
        self._workshop = workshop

    @functools.cache  # noqa: B019 (one for a session)
    def bundle(self, name, precision):
        """A bundle without engines; it is shared, so nothing may be written into it."""
        folder, _ = self._workshop.thing(f"{name}-{precision}", functools.partial(export, name, precision))
        return open_bundle(folder / "bundle")

    def engine(self, name, precision):
        """A bundle with an engine, or None and why TensorRT refuses to build it."""
        make = functools.partial(build, self._workshop, name, precision)
        folder, refusal = self._workshop.thing(f"{name}-{precision}-engine", make)
        return (open_bundle(folder / "bundle") if refusal is None else None), refusal


@pytest.fixture(scope="session")
def prepared(request, workshop):
    """Everything that the chosen tests need, being made while the first of them run."""
    testers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share_cores(testers)
    exports, builds = _needed(request.session.items)
    makers = min(MOST_MAKERS, (os.cpu_count() or 1) - testers, len(exports) - 1)
    with workshop.alone("pool") as is_first:
        if not is_first or makers < 1:
            yield Prepared(workshop)
            return
        spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        pool = ProcessPoolExecutor(makers, spawn, initializer=share_cores, initargs=(makers + testers,))
        root = str(workshop.root)
        # All exports before the first build: most tests need a bundle, and a build keeps a core for long.
        for key in exports:
            pool.submit(begin_export, root, *key)
        for key in builds:
            pool.submit(begin_build, root, *key)
        yield Prepared(workshop)
        pool.shutdown(cancel_futures=True)


def _needed(items):
    """Names and precisions of the bundles and of the engines that these tests ask for."""
    exports, builds = {}, {}
    for item in items:
        arguments = getattr(getattr(item, "callspec", None), "params", {})
        if "prepared" in item.fixturenames and "name" in arguments:
            key = (arguments["name"], arguments.get("precision", "fp16"))
            exports[key] = True
            if "engine" in item.originalname and importlib.util.find_spec("tensorrt") is not None:
                builds[key] = True
    return list(exports), list(builds)
