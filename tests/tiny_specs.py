"""The tiny specs of the catalog, and which of them are tried in every precision."""

import pytest

from mha_deploy.model.catalog import catalog_names

TINY = [name for name in catalog_names() if name.startswith("tiny-")]
# Grouped heads, packed projections, a mask, both caches, another variant: what a precision could change.
EVERY_PRECISION = (
    "tiny-gqa",
    "tiny-packed",
    "tiny-padding",
    "tiny-preallocated",
    "tiny-dynamic",
    "tiny-sparse-heads",
)


def in_precisions(*precisions, names=tuple(TINY), every=EVERY_PRECISION):
    """A parametrization by name and precision: all in fp16, some in the others, the rest for `-m slow`.

    Args:
        *precisions: Those to try.
        names: The specs.
        every: The specs that are always tried in all precisions.
    """
    return pytest.mark.parametrize(
        ("name", "precision"),
        [
            pytest.param(name, each, marks=() if each == "fp16" or name in every else pytest.mark.slow)
            for name in names
            for each in precisions
        ],
    )
