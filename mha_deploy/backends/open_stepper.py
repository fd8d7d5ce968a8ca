"""Which stepper a loaded layer gets, by the form of its cache; and layers that get none."""

from __future__ import annotations

from contextlib import ExitStack

from mha_deploy.backends.cache_rows import CacheForm, CacheShape, cache_form
from mha_deploy.backends.cached_stepper import (
    CachedStepper,
    CopiedStepper,
    GrowingStepper,
    InPlaceStepper,
    RowsStepper,
)
from mha_deploy.backends.stepper import Launcher, Stepper
from mha_deploy.errors import DeployError
from mha_deploy.graph.lower.cache_form import TOTAL_LENGTH
from mha_deploy.spec_parts import LENGTHS


def open_stepper(launcher: Launcher, *, B: int, T: int | None = None) -> Stepper:
    """Step through tokens with a loaded layer; the launcher is closed with the stepper.

    Args:
        launcher: The layer.
        B: Rows of the batch.
        T: Rows of a growing cache at its longest. A static cache has rows of its own.

    Raises:
        DeployError: The layer has no cache, or other inputs besides, or another size.
    """
    with ExitStack() as owned:
        owned.callback(launcher.close)
        form = cache_form(launcher.inputs, launcher.outputs)
        if form is None:
            raise DeployError("This layer has no cache to step with.", got=sorted(launcher.outputs))
        _refuse_other_tensors(launcher, form)
        stepper = _kind(form, launcher)(launcher, _cache_shape(launcher, form, B, T))
        owned.pop_all()
        return stepper


def _kind(form: CacheForm, launcher: Launcher) -> type[CachedStepper]:
    if form is CacheForm.STATIC:
        return InPlaceStepper if launcher.in_place else CopiedStepper
    return RowsStepper if form is CacheForm.ROWS else GrowingStepper


def _refuse_other_tensors(launcher: Launcher, form: CacheForm) -> None:
    lengths = () if form is CacheForm.GROWING else (LENGTHS,)
    wanted = {"x", "output", *lengths, *form.inputs, *form.outputs}
    other = wanted ^ ({*launcher.inputs, *launcher.outputs} - {TOTAL_LENGTH})
    if other:
        raise DeployError(
            "The layer has other inputs and outputs than one that is stepped through.", got=sorted(other)
        )
    tensors = {**launcher.inputs, **launcher.outputs}
    kinds = {name: str(tensors[name].dtype) for name in (*form.inputs, *form.outputs)}
    if len(set(kinds.values())) > 1:
        raise DeployError("Keys and values come in and go out in different types.", got=kinds)


def _cache_shape(launcher: Launcher, form: CacheForm, B: int, T: int | None) -> CacheShape:
    info = launcher.inputs[form.inputs[0]]
    batch, Hkv, rows, D = info.dims
    T = T if T is not None or not isinstance(rows, int) else rows
    if T is None:
        raise DeployError("How long the cache may grow is not said.", got="T = None", hint="T, its rows")
    for size, dim in ((B, batch), (T, rows)):
        if isinstance(dim, int) and size != dim:
            raise DeployError(
                "The layer has a cache of another size.", got=f"B={B}, T={T}", hint=str(info.dims)
            )
    if not isinstance(Hkv, int) or not isinstance(D, int) or B < 1:
        raise DeployError("The cache has no fixed heads, or no rows.", got=f"B={B}, {info.dims}")
    return CacheShape(B=B, Hkv=Hkv, T=T, D=D, dtype=info.dtype)
