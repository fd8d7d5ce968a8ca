"""Parity of a graph alone: the bundle's own, or a variation of it."""

from mha_deploy.runtime import cpu_backend, open_runner
from mha_deploy.validation.self_test import parity_from_runner


def graph_parity(bundle, backend=None, *, model=None, cases=None):
    """Run golden cases of a bundle, or others, through a runtime: by default one on the CPU."""
    backend = backend or cpu_backend(bundle.manifest.precision)
    with open_runner(backend, model or bundle.model_path) as runner:
        return parity_from_runner(runner, bundle, cases)
