"""Parity of a graph alone: the bundle's own, or a variation of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx_ir as ir

from mha_deploy.backends import cpu_backend, open_runner
from mha_deploy.bundle import Bundle
from mha_deploy.golden import GoldenCase, golden_cases
from mha_deploy.validate.parity import ParityReport, parity_from_runner


def graph_parity(
    bundle: Bundle,
    backend: str | None = None,
    *,
    model: ir.Model | None = None,
    cases: Iterable[GoldenCase] | None = None,
    on_case: Callable[[str], None] = lambda name: None,
) -> ParityReport:
    """Run golden cases of a bundle through a runtime.

    Args:
        bundle: The bundle.
        backend: One of `backends.RUNNERS`; None for the one that checks graphs of this precision on a CPU.
        model: The graph to run instead of the bundle's own.
        cases: The cases; all of the bundle's unless given.
        on_case: Called with the name of each case before it runs.
    """
    manifest = bundle.manifest
    with open_runner(backend or cpu_backend(manifest.precision), model or bundle.model_path) as runner:
        return parity_from_runner(
            runner,
            golden_cases(bundle) if cases is None else cases,
            model=manifest.spec.name,
            precision=manifest.precision,
            on_case=on_case,
        )
