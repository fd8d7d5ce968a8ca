"""Which form the cache has in a lowered model: what goes in, what comes out, and who writes the new rows.

Of a static cache, the graph outputs are

    whole   the caches themselves, `[B, Hkv, T, D]`
    rows    only the new rows, `[B, Hkv, S, D]`: whoever runs the model writes them at lengths[b]

Whole caches are copied at every call, unless a node writes them in place: then whoever runs the model binds
output and input to the same memory.

The model says which in its `metadata_props`, which a saved file keeps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import onnx_ir as ir

ROWS_NOTE = "mha_deploy.cache_rows"
"""Key of the note of a model whose outputs are rows: JSON, from each output to its cache."""

IN_PLACE_NOTE = "mha_deploy.cache_in_place"
"""Key of the note of a model that writes caches in place: JSON, from each output to its cache."""

TOTAL_LENGTH = "total_length"
"""The input that ONNX Runtime's `GroupQueryAttention` needs besides: an int32 scalar.

T for single tokens, so that one captured call serves every step, and S for a prompt into an empty cache.
Several tokens behind a past are taken for a single batch row only, with T again. S behind a past is taken,
too, and wrong: the operator then writes a first prompt over the cache.
"""


@dataclass(frozen=True, kw_only=True)
class CacheForm:
    """How the cache of a lowered model is to be served.

    Args:
        rows: From each output that holds new rows to the input they belong into; empty where the outputs
            are the caches themselves, or where there is none.
        in_place: From each output that is a whole cache to the input whose memory it is to have.
        takes_total_length: Whether there is an input `total_length`.
    """

    rows: dict[str, str] = field(default_factory=dict)
    in_place: dict[str, str] = field(default_factory=dict)
    takes_total_length: bool = False


def cache_form(model: ir.Model) -> CacheForm:
    """Read the form from a lowered model."""
    rows, in_place = (json.loads(model.metadata_props.get(note, "{}")) for note in (ROWS_NOTE, IN_PLACE_NOTE))
    inputs = {value.name for value in model.graph.inputs}
    return CacheForm(rows=rows, in_place=in_place, takes_total_length=TOTAL_LENGTH in inputs)


def note_rows(model: ir.Model, rows: dict[str, str]) -> None:
    """Say in the model that outputs hold rows, besides those it says already."""
    model.metadata_props[ROWS_NOTE] = json.dumps({**cache_form(model).rows, **rows})


def note_in_place(model: ir.Model, caches: dict[str, str]) -> None:
    """Say in the model which outputs are caches written in place, besides those it says already."""
    model.metadata_props[IN_PLACE_NOTE] = json.dumps({**cache_form(model).in_place, **caches})


def rows_name(output: str) -> str:
    """The name of an output of rows, from that of the output of the whole cache."""
    if "_cache_out" in output:
        return output.replace("_cache_out", "_rows")
    return f"{output.removeprefix('present_')}_rows"
