"""The tokens that a layer with a cache is stepped through: the bundle's own, and fresh ones on request."""

from __future__ import annotations

from mha_deploy.bundle import Bundle, TraceEntry
from mha_deploy.errors import BundleError, DeployError
from mha_deploy.model_spec import ModelSpec
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
    spec = bundle.manifest.spec
    if not isinstance(spec, AttentionSpec) or spec.cache == "none":
        _refuse_steps(spec, options)
        return []
    found = [_read(bundle, entry, spec) for entry in bundle.manifest.traces]
    return [*found, _fresh(bundle, options, spec)] if options.steps else found


def _refuse_steps(spec: ModelSpec, options: ValidateOptions) -> None:
    if options.steps:
        raise DeployError(
            f"{spec.name} has no cache to step through.",
            got=f"--steps {options.steps}",
            hint="export it with --cache growing or --cache static",
        )


def _read(bundle: Bundle, entry: TraceEntry, spec: AttentionSpec) -> DecodeTrace:
    trace = read_trace(bundle.file(entry.file))
    if trace.name != entry.name:
        raise BundleError(
            "A decode trace has another name than its file.",
            got=f"{entry.name} in {entry.file}",
            hint="export again",
        )
    check_trace(spec, trace, bundle.manifest.precision)
    return trace


def _fresh(bundle: Bundle, options: ValidateOptions, spec: AttentionSpec) -> DecodeTrace:
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
