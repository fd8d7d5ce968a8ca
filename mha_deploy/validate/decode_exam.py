"""One runner and one trace: what its profiles do not take is left out, what it cannot do is a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from mha_deploy.backends.runner import Arrays, ProfiledRunner, Runner
from mha_deploy.errors import DeployError
from mha_deploy.precision import Precision
from mha_deploy.spec import FLOAT, AttentionSpec, Sizes
from mha_deploy.trace import DecodeTrace, call_sizes, prefill_calls
from mha_deploy.validate.growth import SteppingReport
from mha_deploy.validate.parity import OutputVerdict
from mha_deploy.validate.stepping import attempt, not_stepped, open_stepper, step_through


def examine_trace(
    runner: Runner,
    trace: DecodeTrace,
    spec: AttentionSpec,
    precision: Precision,
    on_step: Callable[[int], None] | None = None,
) -> SteppingReport | None:
    """Lead a runner through a trace, with the cache where the runtime keeps it best.

    Args:
        runner: The layer; it stays the caller's to close.
        trace: The tokens, and what is true of them.
        spec: The layer.
        precision: Its precision.
        on_step: Is told each step before it is run.

    Returns:
        The verdict, or None where the profiles of the runner's engine do not take a call of the trace.
    """
    walked: SteppingReport | None = None
    if not _takes(runner, spec, precision, _step_sizes(spec, trace)):
        return None
    try:
        with ExitStack() as owned:
            stepper = attempt(lambda: owned.enter_context(open_stepper(runner, spec, trace)))
            # How a prompt is cut into calls is the stepper's to say.
            if _takes(runner, spec, precision, _prefill_sizes(spec, trace, stepper.most_tokens)):
                walked = step_through(stepper, trace, spec, precision, on_step)
            attempt(owned.close)
    except DeployError as error:
        if walked is None:
            return not_stepped(runner.name, trace, spec, precision, error.in_one_line)
        return _badly_closed(walked, trace, error)
    return walked


def _badly_closed(walked: SteppingReport, trace: DecodeTrace, error: DeployError) -> SteppingReport:
    """What was seen, and that it did not end well: devices tell late of what went wrong on them."""
    failure = OutputVerdict(
        case=f"{trace.name} end",
        sizes=walked.verdicts[-1].sizes,
        output="cache",
        problem=f"could not be closed: {error.in_one_line}",
    )
    return replace(walked, verdicts=(*walked.verdicts, failure))


def admits(runner: Runner, feeds: Arrays) -> bool:
    """Whether a runner takes these inputs: an engine's profiles may be narrower than the layer's axes."""
    if not isinstance(runner, ProfiledRunner):
        return True
    try:
        return bool(runner.profiles_for(feeds))
    except DeployError:  # other names or types than the layer's: running it will tell
        return True


def _takes(runner: Runner, spec: AttentionSpec, precision: Precision, calls: Iterable[Sizes]) -> bool:
    return all(admits(runner, _feeds(spec, precision, sizes)) for sizes in calls)


def _feeds(spec: AttentionSpec, precision: Precision, sizes: Sizes) -> Arrays:
    """Inputs of these sizes that take no memory: a single zero each."""

    def zero(kind: str) -> np.ndarray:
        return np.zeros((), precision.numpy if kind == FLOAT else kind)

    return {t.name: np.broadcast_to(zero(t.kind), t.shape(sizes)) for t in spec.inputs}


def _step_sizes(spec: AttentionSpec, trace: DecodeTrace) -> Iterator[Sizes]:
    """The sizes of the calls with single tokens."""
    steps = trace.steps if spec.cache == "growing" else 1  # those behind a static cache are all alike
    for step in range(steps):
        yield call_sizes(spec, trace.B, 1, trace.longest_prompt + step)


def _prefill_sizes(spec: AttentionSpec, trace: DecodeTrace, most: int | None) -> Iterator[Sizes]:
    """The sizes of the calls that bring the prompts."""
    for part, _ in prefill_calls(trace.prompt, most):
        yield call_sizes(spec, trace.B, part.stop - part.start, part.start)
