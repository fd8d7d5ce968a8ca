"""The tokens that a layer with a cache is stepped through: the bundle's own, and fresh ones on request."""

from __future__ import annotations

from mha_deploy.bundle import Bundle, TraceEntry
from mha_deploy.errors import BundleError, DeployError
from mha_deploy.spec import AttentionSpec
from mha_deploy.trace import DecodeTrace, check_trace, read_trace
from mha_deploy.validate.options import ValidateOptions
from mha_deploy.validate.with_torch import refuse_without_torch, torch_device


def traces_of(bundle: Bundle, options: ValidateOptions) -> list[DecodeTrace]:
    """The traces of a bundle, and one more where the options ask for steps.

    Raises:
        BundleError: A trace is not what the manifest says.
        DeployError: Steps were asked of a layer that has no cache, or no room for them.
        BackendUnavailable: They were asked for, and PyTorch is not here to tell what is true of them.
    """
    manifest = bundle.manifest
    found = [_read(bundle, entry) for entry in manifest.traces]
    return [*found, _fresh(bundle, options)] if options.steps else found


def _read(bundle: Bundle, entry: TraceEntry) -> DecodeTrace:
    trace = read_trace(bundle.file(entry.file))
    if trace.name != entry.name:
        raise BundleError(
            "A decode trace has another name than its file.",
            got=f"{entry.name} in {entry.file}",
            hint="export again",
        )
    check_trace(bundle.manifest.spec, trace, bundle.manifest.precision)
    return trace


def _fresh(bundle: Bundle, options: ValidateOptions) -> DecodeTrace:
    spec = bundle.manifest.spec
    if spec.cache == "none":
        raise DeployError(
            f"{spec.name} has no cache to step through.",
            got=f"--steps {options.steps}",
            hint="export it with --cache growing or --cache static",
        )
    prompt = _usual_prompt(spec, options.steps) if options.prompt is None else options.prompt
    refuse_without_torch("of fresh tokens")
    from mha_deploy.baselines.traces import fresh_trace

    return fresh_trace(
        bundle,
        rows=spec.axes["B"].opt if options.rows is None else options.rows,
        prompt=prompt,
        steps=options.steps,
        seed=options.seed,
        device=torch_device(),
    )


def _usual_prompt(spec: AttentionSpec, steps: int) -> int:
    """A prompt of the usual length, or as much of it as leaves room for the steps."""
    prompt = min(spec.axes["S"].opt, spec.room - steps)
    if prompt < 1:
        raise DeployError(
            f"The cache of {spec.name} has no room for a prompt and so many steps.",
            got=f"--steps {steps}",
            hint=f"{spec.room - 1} steps at most" if spec.room > 1 else None,
        )
    return prompt
