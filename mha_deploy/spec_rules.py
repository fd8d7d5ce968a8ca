"""The rules a spec must keep, each refused with what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from mha_deploy.errors import SpecError, nearest

if TYPE_CHECKING:
    from mha_deploy.spec import AttentionSpec, Axis, Rope

ATTENDS = ("self", "cross")
MASKS = ("none", "padding", "additive")
PROJECTIONS = ("separate", "packed")
VARIANTS = ("attention", "sparse-heads", "grouped-mlp", "head-mix")
CACHES = ("none", "growing", "static")
SCALINGS = ("none", "linear", "ntk", "llama3")
_CACHE_AXES: dict[str, tuple[str, ...]] = {"none": (), "growing": ("P",), "static": ("T",)}
_MAY_BE_EMPTY = ("P",)
_AXIS_HINTS = {
    "T": 'self attention has T = S: leave T out, or set attends = "cross"',
    "P": 'only a growing cache has a past: leave P out, or set cache = "growing"',
}


def check_spec(spec: AttentionSpec) -> None:
    """Refuse a spec that does not describe an attention layer."""
    _check_types(spec)
    _check_choices(spec)
    _check_heads(spec)
    if spec.cache != "none":  # before the axes: a layer that can have no cache needs none of its axes
        _check_cache(spec)
    _check_axes(spec)
    _check_combinations(spec)
    _check_variant_options(spec)
    _check_scores(spec)
    if spec.rope is not None:
        _check_rope(spec, spec.rope)
    if spec.cache == "static":
        _check_capacity(spec.axes["S"], spec.axes["T"])


def _check_types(spec: AttentionSpec) -> None:
    for name in ("Hq", "Hkv", "D", "E"):
        whole_number(name, getattr(spec, name))
    for name in ("name", "summary"):
        if not isinstance(getattr(spec, name), str):
            raise SpecError(f"{name} must be text.", got=getattr(spec, name), hint=f'{name} = "..."')
    for name in ("bias", "causal", "weights"):
        _true_or_false(name, getattr(spec, name))
    if spec.scale is not None and not _is_above(0, spec.scale):
        raise SpecError("scale must be a positive number.", got=spec.scale, hint="leave it out for 1/sqrt(D)")
    if spec.softcap is not None and not _is_above(0, spec.softcap):
        raise SpecError("softcap must be a positive number.", got=spec.softcap, hint="leave it out for none")
    if spec.window is not None:
        whole_number("window", spec.window)


def _check_choices(spec: AttentionSpec) -> None:
    choices = {
        "variant": VARIANTS,
        "attends": ATTENDS,
        "mask": MASKS,
        "projections": PROJECTIONS,
        "cache": CACHES,
    }
    for name, known in choices.items():
        _one_of(name, getattr(spec, name), known)


def _check_heads(spec: AttentionSpec) -> None:
    if spec.Hq % spec.Hkv:
        raise SpecError(
            "The query heads cannot be shared evenly: Hq must be a multiple of Hkv.",
            got=f"Hq={spec.Hq}, Hkv={spec.Hkv}",
            hint=f"Hkv from {_divisors(spec.Hq)}",
        )


def _check_axes(spec: AttentionSpec) -> None:
    wanted = ("B", "S", "T") if spec.is_cross else ("B", "S", *_CACHE_AXES[spec.cache])
    for name in spec.axes:
        if name not in wanted:
            hint = _AXIS_HINTS.get(name) or nearest(name, wanted)
            raise SpecError(f"Axis {name!r} does not belong here.", got=name, hint=hint)
    require("[axes]", spec.axes, wanted)
    for name, axis in spec.axes.items():
        check_axis(name, axis)


def check_cache_kind(cache: str) -> None:
    """Refuse a cache of no known kind."""
    _one_of("cache", cache, CACHES)


def check_axis(name: str, axis: Axis) -> None:
    """Refuse an axis of size 0, unless it is one that may be empty: a cache begins with no past."""
    if axis.min < 1 and name not in _MAY_BE_EMPTY:
        raise SpecError(
            "An axis needs three whole numbers of at least 1.",
            got=f"{name} = {axis}" if name else axis,
            hint="for example 1:128:512",
        )


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


def _check_scores(spec: AttentionSpec) -> None:
    if spec.window is not None and not spec.causal:
        raise SpecError(
            "A window counts keys back from the query, and this layer also looks ahead.",
            got=f"window = {spec.window}, causal = false",
            hint="causal = true",
        )


def _check_rope(spec: AttentionSpec, rope: Rope) -> None:
    if spec.is_cross:
        raise SpecError(
            "Rotary embedding needs queries and keys on one line of positions.",
            got='attends = "cross"',
            hint='attends = "self", or drop [rope]',
        )
    _true_or_false("interleaved", rope.interleaved)
    _one_of("scaling", rope.scaling, SCALINGS)
    dims = spec.rope_dims
    whole_number("dims", dims)
    if dims % 2 or dims > spec.D:
        raise SpecError(
            "Rotary embedding turns pairs inside a head: dims must be even and at most D.",
            got=f"dims={dims}, D={spec.D}",
            hint=f"an even number up to {spec.D}",
        )
    if not _is_above(1, rope.base):
        raise SpecError("base must be a number above 1.", got=rope.base, hint="base = 10000.0")
    _check_scaling(rope, dims)


def _check_scaling(rope: Rope, dims: int) -> None:
    if not (_is_above(1, rope.factor) or rope.factor == 1):
        raise SpecError("factor must be a number of at least 1.", got=rope.factor, hint="factor = 8.0")
    if rope.scaling == "none" and rope.factor != 1:
        raise SpecError(
            "A factor without a scaling does nothing.",
            got=f"factor = {rope.factor}",
            hint="scaling = " + ", ".join(SCALINGS[1:]),
        )
    if rope.scaling == "ntk" and dims < 4:
        raise SpecError("NTK scaling needs two pairs or more.", got=f"dims={dims}", hint="dims of at least 4")
    whole_number("original_length", rope.original_length)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    if not (_is_above(0, low) and _is_above(low, high)):
        raise SpecError(
            "The frequency factors must satisfy 0 < low_freq_factor < high_freq_factor.",
            got=f"{low}, {high}",
            hint="1.0 and 4.0, as Llama 3.1 has them",
        )


def _check_cache(spec: AttentionSpec) -> None:
    cached = f'cache = "{spec.cache}"'
    wanted: dict[str, object] = {"attends": "self", "causal": True, "variant": "attention", "mask": "none"}
    why = {"mask": " (the lengths of a static cache are the padding)"}
    for name, value in {**wanted, "weights": False}.items():
        if getattr(spec, name) != value:
            raise SpecError(
                f"A cache does not go with this {name}.",
                got=f"{cached}, {name} = {_toml(getattr(spec, name))}",
                hint=f"{name} = {_toml(value)}{why.get(name, '')}",
            )


def _check_capacity(S: Axis, T: Axis) -> None:
    if T.is_dynamic:
        raise SpecError(
            "The capacity of a static cache must be one number.", got=f"T = {T}", hint=f"T = {T.max}"
        )
    if S.max > T.max:
        raise SpecError(
            "One call may bring more tokens than the cache has rows.",
            got=f"S up to {S.max}, T = {T.max}",
            hint=f"S up to {T.max}, or a larger T",
        )


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SpecError(f"{name} is not a known one.", got=value, hint=nearest(str(value), known))


def _true_or_false(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise SpecError(f"{name} is neither true nor false.", got=value, hint=f"{name} = true")


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _is_above(bound: float, value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > bound  # type: ignore[arg-type, operator]


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
