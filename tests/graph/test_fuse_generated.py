"""Generated graphs: none computes something else after fusion, and nearly all that can be said are fused."""

import numpy as np
import onnx_ir as ir
import pytest
from attention_graphs import Graph, drawn
from onnx.reference import ReferenceEvaluator

from mha_deploy.graph.fuse import fuse_attention

TOLERANCE = {np.dtype(np.float32): 3e-5, np.dtype(np.float16): 2e-2}


def is_same(want, got):
    """Whether two results are equal up to rounding; fully masked queries that are NaN may be anything."""
    if want.shape != got.shape:
        return False
    numbers, others = want.astype(np.float64), got.astype(np.float64)
    there = ~np.isnan(numbers)
    scale = max(1.0, float(np.abs(numbers[there]).max(initial=0.0)))
    return bool((np.abs(numbers - others)[there] <= TOLERANCE[want.dtype] * scale).all())


def check(seed):
    """Fuse one graph: whether it can be said, whether it was fused, and what is wrong."""
    spelling = drawn(seed)
    graph = Graph(spelling)
    model = graph.build()
    new, report = fuse_attention(ir.from_proto(model))
    wrong = []
    if not report.fused and not report.unfused:
        wrong.append(f"{seed} is not counted: {spelling}")
    if report.fused:
        old, fused = ReferenceEvaluator(model), ReferenceEvaluator(ir.to_proto(new))
        with np.errstate(all="ignore"):
            pairs = [
                (old.run(None, each)[0], fused.run(None, each)[0]) for each in map(graph.feeds, range(4))
            ]
        if not all(is_same(*pair) for pair in pairs):
            wrong.append(f"{seed} differs: {spelling}")
    return spelling.expressible, bool(report.fused), wrong


def run(seeds):
    found = [check(seed) for seed in seeds]
    assert [text for _, _, wrong in found for text in wrong] == []
    fused = [was for can, was, _ in found if can]
    assert sum(fused) >= 0.95 * len(fused)
    assert not any(was for can, was, _ in found if not can)


def test_forty_graphs():
    run(range(40))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 5000, 500))
def test_thousands_of_graphs(start):
    run(range(start, start + 500))
