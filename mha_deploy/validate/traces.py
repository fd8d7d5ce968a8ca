"""The tokens that a layer with a cache is stepped through: the bundle's own, and fresh ones on request."""

from __future__ import annotations

from mha_deploy.backends.cuda import find_gpu
from mha_deploy.bundle import Bundle
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.trace import DecodeTrace, check_trace, read_trace
from mha_deploy.validate.options import ValidateOptions
from mha_deploy.versions import can_import


def traces_of(bundle: Bundle, options: ValidateOptions) -> list[DecodeTrace]:
    """The traces of a bundle, and one more where the options ask for steps.

    Raises:
        DeployError: Steps were asked of a layer without a cache.
        BackendUnavailable: They were asked for, and PyTorch is not here to tell what is true of them.
    """
    manifest = bundle.manifest
    found = [read_trace(bundle.file(entry.file)) for entry in manifest.traces]
    for trace in found:
        check_trace(manifest.spec, trace, manifest.precision)
    return [*found, _fresh(bundle, options)] if options.steps else found


def _fresh(bundle: Bundle, options: ValidateOptions) -> DecodeTrace:
    spec = bundle.manifest.spec
    if spec.cache == "none":
        raise DeployError(
            f"{spec.name} has no cache to step through.",
            got=f"--steps {options.steps}",
            hint="export it with --cache growing or --cache static",
        )
    if not can_import("torch"):
        raise BackendUnavailable(
            "Only PyTorch can tell what is true of fresh tokens.",
            got="PyTorch is not installed",
            hint='pip install "mha-deploy[export]"',
        )
    from mha_deploy.baselines.traces import fresh_trace

    return fresh_trace(
        bundle,
        rows=options.rows or spec.axes["B"].opt,
        prompt=options.prompt or min(spec.axes["S"].opt, spec.longest - options.steps),
        steps=options.steps,
        seed=options.seed,
        device="cpu" if find_gpu() is None else "cuda",
    )
