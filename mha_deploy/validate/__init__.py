"""Run a bundle and say whether the result is right."""

from __future__ import annotations

from collections.abc import Callable

from mha_deploy.backends import cpu_backend, open_runner
from mha_deploy.bundle import Bundle
from mha_deploy.golden import golden_cases
from mha_deploy.validate.parity import ParityReport, parity_from_runner


def validate_bundle(
    bundle: Bundle, backend: str | None = None, *, on_case: Callable[[str], None] = lambda name: None
) -> ParityReport:
    """Run every golden case of a bundle through a runtime.

    Args:
        bundle: The bundle.
        backend: One of `backends.RUNNERS`; None for the one that checks graphs of this precision on a CPU.
        on_case: Called with the name of each case before it runs.
    """
    manifest = bundle.manifest
    with open_runner(backend or cpu_backend(manifest.precision), bundle.model_path) as runner:
        return parity_from_runner(
            runner,
            golden_cases(bundle),
            model=manifest.spec.name,
            precision=manifest.precision,
            on_case=on_case,
        )
