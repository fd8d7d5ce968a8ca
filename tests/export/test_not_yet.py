"""What the reference layers can do and nobody else yet is refused by name, not left out."""

import pytest

from mha_deploy.analyze.cost import layer_cost, parameter_count
from mha_deploy.errors import ExportError, SpecError
from mha_deploy.export.exporter import bundle_from_spec
from mha_deploy.spec import AttentionSpec

AXES = {"B": 1, "S": 4}
OPTIONS = {
    "window": {"window": 2},
    "softcap": {"softcap": 5.0},
    "cache (growing)": {"cache": "growing", "axes": {**AXES, "P": {"min": 0, "opt": 2, "max": 4}}},
    "cache (static)": {"cache": "static", "axes": {**AXES, "T": 8}},
}


def make(**changes):
    return AttentionSpec.from_dict(
        {"name": "layer", "Hq": 2, "E": 8, "axes": AXES, "causal": True, **changes}
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_the_exporter_refuses_what_it_does_not_write(name, tmp_path):
    with pytest.raises(ExportError, match="does not write caches, windows and softcap") as caught:
        bundle_from_spec(make(**OPTIONS[name]), tmp_path / "bundle")
    assert caught.value.got == f"layer with {name}"
    assert caught.value.hint
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("name", ["window", "cache (growing)", "cache (static)"])
def test_the_cost_model_refuses_what_it_does_not_count(name):
    spec = make(**OPTIONS[name])
    with pytest.raises(SpecError, match="does not count caches and windows"):
        layer_cost(spec, spec.sizes("opt"), 2)


def test_rope_and_softcap_cost_no_matrix_product():
    assert parameter_count(make(rope={}, softcap=5.0)) == parameter_count(make())
