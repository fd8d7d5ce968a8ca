"""The whole models as factories for the command line: `tests/deployable_models.py:llama_sdpa`."""

from functools import partial

from whole_models import MODELS, ONE_WAY

from mha_deploy.model.deployable import Deployable, Example

RANGES = {"B": "1:2:4", "S": "1:7:16", "T": "1:9:16", "P": "0:5:15"}


def deployable(name, attention):
    """A whole model with its examples, and a small range for each of its axes."""
    whole = MODELS[name](attention)
    inputs = {
        key: Example(tensor, *(whole.dims.get(key, {}).get(axis) for axis in range(tensor.dim())))
        for key, tensor in whole.inputs.items()
    }
    used = {axis for dims in whole.dims.values() for axis in dims.values()}
    axes = {axis: sizes for axis, sizes in RANGES.items() if axis in used}
    cached = {key: key.replace("past", "present") for key in inputs if key.startswith("past_")}
    return Deployable(
        module=whole.module,
        inputs=inputs,
        axes=axes,
        outputs=("hidden", *cached.values()) if cached else (),
        kv_cache=cached,
        name=f"{name}-{attention}",
    )


def factory(name, attention):
    """What the factory of a model is called here."""
    return f"{name}_{attention}".replace("-", "_")


CASES = [(name, attention) for name in MODELS for attention in ("sdpa", "eager")]
CASES = [case for case in CASES if case[0] not in ONE_WAY or case[1] == "sdpa"]
globals().update({factory(*case): partial(deployable, *case) for case in CASES})
