"""What stands around an attention is read through only where it certainly changes nothing."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from conformance import lower_for_reference
from onnx.reference import ReferenceEvaluator
from plugin_reference import REFERENCE_OPERATORS

from mha_deploy.graph.lower import DIALECTS, LoweringError

DIALECT_NAMES = [name for name in DIALECTS if name not in ("onnx", "contrib")]


def parsed(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(text))


def evaluated(model: ir.Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(ir.to_proto(model), new_ops=REFERENCE_OPERATORS).run(None, feeds)[0]


def drawn(*shapes: tuple[int, ...], dtype=np.float16) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


EXPANDED = """<ir_version: 10, opset_import: ["" : 24]>
g (float16[B,2,S,8] q, float16[B,2,T,8] k, float16[B,2,T,8] v, KIND[B,1,1,COLUMNS] m) => (float16[B,2,S,8] y)
<int64[1] two = {2}, int64[2] ones = {1, 1}> {
    sq = Shape (q)
    s = Gather (sq, two)
    sk = Shape (k)
    t = Gather (sk, two)
    shape = Concat <axis = 0> (ones, s, t)
    wide = Expand (m, shape)
    y = Attention (q, k, v, wide)
}"""


@pytest.mark.parametrize("dialect", DIALECT_NAMES)
@pytest.mark.parametrize("kind", ["bool", "float16"])
@pytest.mark.parametrize(("columns", "size"), [("M", 1), ("M", 5), ("T", 5)])
def test_a_mask_that_was_expanded_over_the_keys(dialect: str, kind: str, columns: str, size: int) -> None:
    model = parsed(EXPANDED.replace("KIND", kind).replace("COLUMNS", columns))
    q, k, v, m = drawn((2, 2, 3, 8), (2, 2, 5, 8), (2, 2, 5, 8), (2, 1, 1, size))
    mask = m > 0 if kind == "bool" else m
    feeds = {"q": q, "k": k, "v": v, "m": mask}
    wanted = evaluated(model, feeds)
    lowered = lower_for_reference(model, dialect)
    np.testing.assert_allclose(evaluated(lowered, feeds), wanted, atol=2e-2)
    # The Expand is left out only where the mask has a column for each key.
    assert any(node.op_type == "Expand" and node.outputs[0].name == "wide" for node in lowered.graph) == (
        columns == "M"
    )


CACHED = """<ir_version: 10, opset_import: ["" : 24]>
g (float16[B,2,1,8] q, float16[B,2,1,8] k, float16[B,2,1,8] v, float16[B,2,12,8] past_key,
   float16[B,2,12,8] past_value, int64[B] starts MASK) => (float16[B,2,1,8] y, float16[B,2,12,8] key_out,
   float16[B,2,12,8] value_out)
<int64[1] one = {1}> {
    key_out = TensorScatter <axis = 2> (past_key, k, starts)
    value_out = TensorScatter <axis = 2> (past_value, v, starts)
    first = Cast <to = TYPE> (starts)
    second = Cast <to = 7> (first)
    n = Add (second, one)
    y = Attention <is_causal = CAUSAL> (q, key_out, value_out, NAME, , , n)
}"""


def cached(kind: int = 6, *, mask: bool = False, causal: int = 1) -> tuple[ir.Model, dict[str, np.ndarray]]:
    text = CACHED.replace("TYPE", str(kind)).replace("CAUSAL", str(causal))
    text = text.replace("MASK", ", bool[B,1,1,12] m" if mask else "").replace("NAME", "m" if mask else "")
    shapes = [(2, 2, 1, 8)] * 3 + [(2, 2, 12, 8)] * 2
    feeds = dict(zip(("q", "k", "v", "past_key", "past_value"), drawn(*shapes), strict=True))
    feeds["starts"] = np.array([3, 7])
    if mask:
        feeds["m"] = np.random.default_rng(1).random((2, 1, 1, 12)) > 0.4
        feeds["m"][0] = False
    return parsed(text), feeds


@pytest.mark.parametrize("dialect", DIALECT_NAMES)
@pytest.mark.parametrize("kind", [6, 1, 10, 9], ids=["int32", "float", "float16", "bool"])
def test_key_lengths_behind_casts(dialect: str, kind: int) -> None:
    model, feeds = cached(kind)
    lowered = lower_for_reference(model, dialect)
    np.testing.assert_allclose(evaluated(lowered, feeds), evaluated(model, feeds), atol=2e-2)


@pytest.mark.parametrize("dialect", DIALECT_NAMES)
@pytest.mark.parametrize("causal", [0, 1])
def test_a_mask_over_a_preallocated_cache(dialect: str, causal: int) -> None:
    """The reference operator of the plugin refuses what the plugin refuses."""
    model, feeds = cached(mask=True, causal=causal)
    lowered = lower_for_reference(model, dialect)
    np.testing.assert_allclose(evaluated(lowered, feeds), evaluated(model, feeds), atol=2e-2)


WIDER = """<ir_version: 10, opset_import: ["" : 23]>
g (TYPE[1,2,2,8] q, TYPE[1,2,3,8] k, TYPE[1,2,3,8] v, WIDE[MASK] m) => (TYPE[1,2,2,8] y)
{ y = Attention (q, k, v, m) }"""
WIDE = {"float16": ("float", "double"), "bfloat16": ("float", "double"), "float": ("double",)}


@pytest.mark.parametrize("dialect", [*DIALECT_NAMES, "contrib"])
@pytest.mark.parametrize(("kind", "wide"), [(kind, wide) for kind in WIDE for wide in WIDE[kind]])
@pytest.mark.parametrize("heads", [1, 2])
def test_queries_masked_by_the_lowest_number_of_a_wider_type_average(
    dialect: str, kind: str, wide: str, heads: int
) -> None:
    """Whatever their scores are: no float has a score beside that number."""
    text = WIDER.replace("TYPE", kind).replace("WIDE", wide).replace("MASK", f"1,{heads},2,3")
    model = parsed(text)
    types = {value.name: value.dtype.numpy() for value in model.graph.inputs}
    q, k, v = (8 * x for x in drawn((1, 2, 2, 8), (1, 2, 3, 8), (1, 2, 3, 8)))
    low = np.finfo(types["m"]).min
    m = np.zeros((1, heads, 2, 3), types["m"])
    m[:, :, 1] = low
    feeds = {name: x.astype(types[name]) for name, x in {"q": q, "k": k, "v": v}.items()} | {"m": m}
    try:
        lowered = lower_for_reference(model, dialect)
    except LoweringError:
        assert dialect == "plugin"
        return
    if dialect == "contrib":  # no evaluator here has these operators in half precision
        assert any(node.name.endswith("q_kept") for node in lowered.graph)
        return
    y = evaluated(lowered, feeds).astype(np.float64)
    mean = feeds["v"].astype(np.float64).mean(axis=2)
    np.testing.assert_allclose(y[:, :, 1], mean, rtol=2e-2, atol=0.1)
