"""Bundles that only the slow tests of a server need."""

from dataclasses import replace

import mha_deploy as md
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.spec import Axis


def sequences_of_64_steps(cache, folder):
    """A small layer with room for a prompt and 64 decode steps."""
    spec = find_spec(f"tiny-{cache}")
    length = "P" if cache == "dynamic" else "T"
    axes = {**spec.axes, length: Axis(min=spec.axes[length].min, opt=64, max=128)}
    if cache == "preallocated":
        axes["T"] = Axis(min=128, opt=128, max=128)
    spec = replace(spec, name=f"steps-{cache}", axes=axes)
    return md.export(spec, folder / "bundle", precision="fp16")
