"""Attention nodes in surroundings that a second generator draws: what a dialect accepts, it computes."""

import contextlib

import numpy as np
import onnx_ir as ir
import pytest
from conformance import lower_for_reference, run_in_ort
from onnx.reference import ReferenceEvaluator
from onnx.reference.ops import op_attention
from onnxruntime.capi import onnxruntime_pybind11_state as errors
from plugin_reference import REFERENCE_OPERATORS
from random_nodes import drawn_node

from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.lower import DIALECTS, LoweringError

TOLERANCE = {"float32": 1e-4, "float16": 3e-2}
REFUSALS = (ValueError, errors.Fail, errors.InvalidArgument)  # of an axis of size 0, by a runtime
LARGE = {"float32": 3e38, "float16": 6e4}


class Attention(op_attention.Attention_23):
    """An Attention node that is left for TensorRT, whose fused kernels compute in float32."""

    op_domain = ""

    def _run(self, q, *others, **attributes):
        wide = [x if x is None or x.dtype == bool else x.astype(np.float32) for x in (q, *others)]
        return tuple(x.astype(q.dtype) for x in super()._run(*wide, **attributes))


def run_lowered(lowered, dialect, dtype, feeds):
    proto = ir.to_proto(lowered)
    given = {each.name: feeds[each.name] for each in proto.graph.input}
    with np.errstate(all="ignore"):
        if dialect == "contrib" or (dialect == "primitives" and dtype == "float32"):
            return run_in_ort(proto, given)
        return ReferenceEvaluator(proto, new_ops=[*REFERENCE_OPERATORS, Attention]).run(None, given)


def check_same(results, truth, about):
    dialect, drawn = about
    for got, want in zip(results, truth, strict=True):
        assert got.shape == want.shape, (dialect, drawn.about)
        with np.errstate(all="ignore"):
            found = np.asarray(got).astype(np.float64)
            same = np.abs(found - want) <= TOLERANCE[drawn.dtype] * (1 + np.abs(want))
            # A score with its mask, beyond the type.
            same |= (found == want) | (np.maximum(found, want) < -LARGE[drawn.dtype])
        assert same.all(), (dialect, drawn.about)


def check_dialects(seed):
    """The dialects that accept a node, of which none computes something else."""
    drawn, accepted = drawn_node(seed), set()
    assert len(attention_nodes(drawn.model)) == 1
    for dialect in DIALECTS.keys() - {"onnx"}:
        try:
            lowered = lower_for_reference(drawn.model, dialect)
        except LoweringError:
            continue
        accepted.add(dialect)
        for feeds, truth in drawn.calls:
            check_same(run_lowered(lowered, dialect, drawn.dtype, feeds), truth, (dialect, drawn))
        feeds, truth = drawn.empty
        with contextlib.suppress(*REFUSALS):
            check_same(run_lowered(lowered, dialect, drawn.dtype, feeds), truth, (dialect, drawn))
    return accepted


@pytest.mark.parametrize("seed", range(12))
def test_in_surroundings(seed):
    assert "primitives" in check_dialects(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 21000, 200))
def test_many_more(first):
    for seed in range(first, first + 200):
        check_dialects(seed)
