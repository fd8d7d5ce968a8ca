"""Every layer of the catalog that is small, as the plugin's nodes, against its golden cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from conformance import lower_for_reference, run_in_reference
from plugin_layers import operators

import mha_deploy as md
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.graph.lower import lower
from mha_deploy.graph.lower.call import LoweringError
from mha_deploy.graph.plugin_node import is_plugin_attention
from mha_deploy.judge import judge_case
from mha_deploy.model.catalog import catalog_names, find_spec
from mha_deploy.model.layer import AttentionSpec

# By layer: sources, offsets, causal, and what else the first attention has.
EXPECTED: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, set[str]]] = {
    "tiny-additive": ((0, 0, 0), (0, 64, 128), 0, {"has_bias"}),
    "tiny-additive-causal": ((0, 0, 0), (0, 64, 128), 1, {"has_bias"}),
    "tiny-causal-padding": ((0, 0, 0), (0, 64, 128), 1, {"has_key_lengths"}),
    "tiny-cross": ((0, 1, 2), (0, 0, 0), 0, set()),
    "tiny-cross-padding": ((0, 1, 2), (0, 0, 0), 0, {"has_key_lengths"}),
    "tiny-gqa": ((0, 0, 0), (0, 64, 96), 1, set()),
    "tiny-grouped-mlp": ((0, 0, 0), (0, 64, 128), 0, set()),
    "tiny-dynamic": ((0, 1, 2), (0, 0, 0), 2, set()),
    "tiny-head-mix": ((0, 0, 0), (0, 64, 128), 0, set()),
    "tiny-mha": ((0, 0, 0), (0, 64, 128), 0, set()),
    "tiny-mqa": ((0, 0, 0), (0, 64, 80), 1, set()),
    "tiny-packed": ((0, 0, 0), (0, 64, 96), 0, set()),
    "tiny-padding": ((0, 0, 0), (0, 64, 128), 0, {"has_key_lengths"}),
    "tiny-rope": ((0, 1, 2), (0, 0, 96), 1, set()),  # 12 elements are no whole loads
    "tiny-scale": ((0, 0, 0), (0, 64, 128), 0, set()),
    "tiny-sparse-heads": ((0, 0, 0), (0, 64, 128), 0, set()),
    "tiny-sparse-heads-renormalised": ((0, 0, 0), (0, 64, 128), 0, set()),
    "tiny-preallocated": ((0, 0, 0), (0, 64, 96), 2, {"has_cache", "rotary"}),
    "tiny-wide-heads": ((0, 0, 0), (0, 128, 256), 0, set()),
    "tiny-window": ((0, 1, 2), (0, 0, 0), 0, {"has_bias"}),
}
REFUSED = {"tiny-softcap": "softcap", "tiny-weights": "attention weights as output"}
FLAGS = ("has_bias", "has_key_lengths", "has_gates", "has_cache", "rotary")


def test_every_small_layer_is_here() -> None:
    small = {name for name in catalog_names() if name.startswith("tiny-")}
    assert small == set(EXPECTED) | set(REFUSED)


def assert_within_budget(bundle: Any, lowered: ir.Model) -> None:
    proto, names = ir.to_proto(lowered), [value.name for value in lowered.graph.outputs]
    for case in golden_cases(bundle):
        got: dict[str, np.ndarray] = dict(zip(names, run_in_reference(proto, case.inputs), strict=True))
        for verdict in judge_case(case, got, bundle.manifest.precision):
            assert verdict.passed, (case.name, verdict)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", EXPECTED)
def test_layer(name: str, bundles: Any) -> None:
    bundle = bundles(name)
    lowered = lower(ir.load(bundle.model_path), "plugin")
    first = next(node for node in lowered.graph if is_plugin_attention(node))
    own = {key: attribute.value for key, attribute in first.attributes.items()}
    flags = {flag for flag in FLAGS if own[flag]}
    assert (own["sources"], own["offsets"], own["causal"], flags) == EXPECTED[name]
    assert lowered.opset_imports[""] == 17
    assert lowered.opset_imports["mha_deploy"] == 1
    assert_within_budget(bundle, lowered)


HALVES, NEIGHBOURS = {"dims": 16}, {"dims": 8, "interleaved": True}


@pytest.mark.slow
@pytest.mark.parametrize("rope", [HALVES, NEIGHBOURS])
@pytest.mark.parametrize("name", ["tiny-rope", "tiny-preallocated"])
def test_rotary_embedding_inside_the_node(name: str, rope: dict[str, Any], tmp_path: Any) -> None:
    spec = AttentionSpec.from_dict({**find_spec(name).to_dict(), "rope": rope})
    bundle = md.export(spec, tmp_path / "bundle", golden=["min"])
    lowered = lower(ir.load(bundle.model_path), "plugin")
    assert operators(lowered) == ["MatMul", "Add", "MhaDeployAttention", "MatMul", "Add"]
    assert_within_budget(bundle, lowered)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["tiny-padding", "tiny-preallocated"])
def test_layer_with_every_node_of_the_plugin(name: str, bundles: Any) -> None:
    bundle = bundles(name)
    lowered = lower_for_reference(ir.load(bundle.model_path), "plugin", linear=True)
    assert "MatMul" not in operators(lowered)
    assert_within_budget(bundle, lowered)


def test_gates_of_sparse_heads_go_into_the_node(bundles: Any) -> None:
    """Of a head size that has a kernel; the small layer's own has none."""
    lowered = lower_for_reference(ir.load(bundles("tiny-sparse-heads").model_path), "plugin")
    (node,) = [node for node in lowered.graph if is_plugin_attention(node)]
    assert node.attributes["has_gates"].value == 1
    assert "Mul" not in operators(lowered)


@pytest.mark.parametrize("name", [pytest.param("tiny-softcap", marks=pytest.mark.slow), "tiny-weights"])
def test_refused_layer(name: str, bundles: Any) -> None:
    with pytest.raises(LoweringError) as caught:
        lower(ir.load(bundles(name).model_path), "plugin")
    assert caught.value.feature == REFUSED[name]
