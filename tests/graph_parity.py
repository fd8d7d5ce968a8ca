"""Parity of a graph alone: the bundle's own, or a variation of it."""

from mha_deploy.runtime import cpu_runtime, open_runner
from mha_deploy.validation.self_test import parity_from_runner


def graph_parity(bundle, runtime=None, *, model=None, cases=None):
    """Run golden cases of a bundle, or others, through a runtime: by default one on the CPU."""
    runtime = runtime or cpu_runtime(bundle.manifest.precision)
    with open_runner(runtime, model or bundle.model_path) as runner:
        return parity_from_runner(runner, bundle, cases)
