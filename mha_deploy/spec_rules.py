"""The rules a spec must keep, each refused with what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from mha_deploy.errors import SpecError, nearest

if TYPE_CHECKING:
    from mha_deploy.spec import AttentionSpec

ATTENDS = ("self", "cross")
MASKS = ("none", "padding", "additive")
PROJECTIONS = ("separate", "packed")
VARIANTS = ("attention", "sparse-heads", "grouped-mlp", "head-mix")


def check_spec(spec: AttentionSpec) -> None:
    """Refuse a spec that does not describe an attention layer."""
    _check_types(spec)
    _check_choices(spec)
    _check_heads(spec)
    _check_axes(spec)
    _check_combinations(spec)
    _check_variant_options(spec)


def _check_types(spec: AttentionSpec) -> None:
    for name in ("Hq", "Hkv", "D", "E"):
        whole_number(name, getattr(spec, name))
    for name in ("name", "summary"):
        if not isinstance(getattr(spec, name), str):
            raise SpecError(f"{name} must be text.", got=getattr(spec, name), hint=f'{name} = "..."')
    for name in ("bias", "causal", "weights"):
        _true_or_false(name, getattr(spec, name))
    if spec.scale is not None and not (
        _is_number(spec.scale) and math.isfinite(spec.scale) and spec.scale > 0
    ):
        raise SpecError("scale must be a positive number.", got=spec.scale, hint="leave it out for 1/sqrt(D)")


def _check_choices(spec: AttentionSpec) -> None:
    choices = {"variant": VARIANTS, "attends": ATTENDS, "mask": MASKS, "projections": PROJECTIONS}
    for name, known in choices.items():
        value = getattr(spec, name)
        if value not in known:
            raise SpecError(f"{name} is not a known one.", got=value, hint=nearest(str(value), known))


def _check_heads(spec: AttentionSpec) -> None:
    if spec.Hq % spec.Hkv:
        raise SpecError(
            "The query heads cannot be shared evenly: Hq must be a multiple of Hkv.",
            got=f"Hq={spec.Hq}, Hkv={spec.Hkv}",
            hint=f"Hkv from {_divisors(spec.Hq)}",
        )


def _check_axes(spec: AttentionSpec) -> None:
    wanted = ("B", "S", "T") if spec.is_cross else ("B", "S")
    for name in spec.axes:
        if name not in wanted:
            hint = 'self attention has T = S: leave T out, or set attends = "cross"' if name == "T" else None
            raise SpecError(
                f"Axis {name!r} does not belong here.", got=name, hint=hint or nearest(name, wanted)
            )
    require("[axes]", spec.axes, wanted)


def _check_combinations(spec: AttentionSpec) -> None:
    if spec.is_cross and spec.causal:
        raise SpecError(
            "Causal cross attention has no single meaning: the diagonal can start at either corner.",
            got='attends = "cross", causal = true',
            hint='causal = false with mask = "additive" and the mask you mean as attention_bias',
        )
    if spec.is_cross and spec.projections == "packed":
        raise SpecError(
            "Packed projections read one input, and cross attention has three.",
            got='attends = "cross", projections = "packed"',
            hint='projections = "separate"',
        )


def _check_variant_options(spec: AttentionSpec) -> None:
    for variant, options in (("sparse-heads", spec.sparse_heads), ("grouped-mlp", spec.grouped_mlp)):
        table = variant.replace("-", "_")
        if spec.variant == variant and options is None:
            raise SpecError(f"The variant {variant} needs its options.", hint=f"add a [{table}] table")
        if spec.variant != variant and options is not None:
            raise SpecError(
                f"[{table}] belongs to another variant.",
                got=spec.variant,
                hint=f'variant = "{variant}", or drop it',
            )
    if spec.sparse_heads is not None:
        whole_number("top_k", spec.sparse_heads.top_k)
        _true_or_false("renormalise", spec.sparse_heads.renormalise)
        if spec.sparse_heads.top_k > spec.Hq:
            raise SpecError(
                "top_k is more than all heads.", got=spec.sparse_heads.top_k, hint=f"1 to {spec.Hq}"
            )
    if spec.grouped_mlp is not None:
        whole_number("hidden", spec.grouped_mlp.hidden)
        whole_number("groups", spec.grouped_mlp.groups)
        if spec.Hq % spec.grouped_mlp.groups:
            raise SpecError(
                "The heads cannot be grouped evenly.",
                got=f"{spec.grouped_mlp.groups} groups of {spec.Hq} heads",
                hint=f"groups from {_divisors(spec.Hq)}",
            )


def _true_or_false(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise SpecError(f"{name} is neither true nor false.", got=value, hint=f"{name} = true")


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole_number(name: str, value: object) -> None:
    """Refuse anything but a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(f"{name} must be a whole number of at least 1.", got=value)


def head_size(E: int, Hq: int) -> int:
    """The head size that the model width implies."""
    if E % Hq:
        raise SpecError(
            "The model width does not split into the heads, and no head size is given.",
            got=f"E={E}, Hq={Hq}",
            hint="add D = <head size>",
        )
    return E // Hq


def refuse_unknown(where: str, data: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuse a key that means nothing, naming the nearest one that does."""
    for key in data:
        if key not in known:
            raise SpecError(f"Unknown key in {where}.", got=key, hint=nearest(key, known))


def require(where: str, data: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    """Refuse data without these keys."""
    missing = [key for key in keys if key not in data]
    if missing:
        raise SpecError(f"{where} lacks {', '.join(missing)}.", got=f"keys {', '.join(data) or 'none'}")


def record_from(where: str, record: Any, data: Any) -> Any:
    """Read a table into a dataclass, refusing keys it does not have."""
    if not isinstance(data, Mapping):
        raise SpecError(f"{where} must be a table.", got=data)
    known = tuple(item.name for item in fields(record))
    refuse_unknown(where, data, known)
    try:
        return record(**data)
    except TypeError as error:
        raise SpecError(
            f"{where} is incomplete.", got=dict(data), hint=f"keys: {', '.join(known)}"
        ) from error
