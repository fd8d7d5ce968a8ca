"""The fused kernel and the textbook's matmul-softmax-matmul are one function, in every precision."""

import pytest
import torch

from mha_deploy.model.catalog import find_spec
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.reference import build_module
from mha_deploy.reference.inputs import call_arguments, fed_to, random_inputs

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

VARIANTS = {
    "attention": {},
    "sparse-heads": {"sparse_heads": {"top_k": 2}},
    "grouped-mlp": {"grouped_mlp": {"groups": 2, "hidden": 96}},
    "head-mix": {},
}
MASKS = ("none", "padding", "additive")
KINDS = {"self": {}, "causal": {"causal": True}, "cross": {"attends": "cross"}}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Between two ways to round one layer, in units of the roundoff. In float32 the sums themselves round.
ALLOWED = {torch.float32: 32.0, torch.bfloat16: 8.0, torch.float16: 8.0}


def make(variant, mask, kind, Hkv=2, **changes):
    axes = {"B": 4, "S": 7, **({"T": 9} if kind == "cross" else {})}
    heads = {"Hq": 4, "Hkv": Hkv, "D": 16, "E": 64}
    data = {"name": "layer", **heads, "axes": axes, "variant": variant, "mask": mask, **VARIANTS[variant]}
    return AttentionSpec.from_dict({**data, **KINDS[kind], **changes})


def run(spec, dtype, feeds, paths=("sdpa", "plain")):
    """The outputs of one module through each path."""
    module = build_module(spec, dtype=dtype)
    arguments = call_arguments(spec, fed_to(module, feeds))
    results = []
    for module.path in paths:
        with torch.inference_mode():
            out = module(**arguments)
        results.append(out if isinstance(out, tuple) else (out,))
    return results


def deviation(a, b):
    """The largest difference, relative to the largest value, in units of the roundoff."""
    exact, other = a.double(), b.double()
    return ((exact - other).abs().max() / exact.abs().max() / (torch.finfo(a.dtype).eps / 2)).item()


def inputs(spec, *, ragged=True):
    return random_inputs(spec, spec.sizes("opt"), seed=1, ragged=ragged)


@pytest.mark.sweep(10)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("Hkv", [4, 2, 1])
def test_both_paths_agree_in_float64(variant, mask, kind, Hkv):
    spec = make(variant, mask, kind, Hkv, weights=True)
    fused, plain = run(spec, torch.float64, inputs(spec))
    for a, b in zip(fused, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.sweep(10)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_both_paths_agree_to_a_few_roundoffs(variant, mask, kind, dtype):
    spec = make(variant, mask, kind, weights=True)
    fused, plain = run(spec, dtype, inputs(spec))
    for a, b in zip(fused, plain, strict=True):
        assert a.dtype == b.dtype == dtype
        assert deviation(a, b) < ALLOWED[dtype]


# PyTorch's own stand-in for the ONNX node takes no mask beside is_causal, and no row without keys.
@pytest.mark.parametrize(
    ("mask", "kind"), [("none", "causal"), *((m, k) for m in MASKS for k in ("self", "cross"))]
)
def test_the_exported_path_is_the_same_function_where_pytorch_runs_it(mask, kind):
    spec = make("attention", mask, kind, weights=True)
    fused, onnx = run(spec, torch.float64, inputs(spec, ragged=False), ("sdpa", "onnx"))
    for a, b in zip(fused, onnx, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


# -- rows that see nothing ---------------------------------------------------------------------


def blind_inputs(spec):
    """Inputs in which row 0 (padding) or query 2 (additive) sees no key, and all others see some."""
    feeds = inputs(spec, ragged=False)
    if spec.mask == "padding":
        feeds["key_lengths"][0] = 0
    else:
        feeds["attention_bias"][:, :, 2] = float("-inf")
    return feeds


def is_blind(spec, S):
    """True where a query sees nothing: bool [B, S]."""
    row, query = torch.arange(4)[:, None], torch.arange(S)[None, :]
    return (row == 0).expand(4, S) if spec.mask == "padding" else (query == 2).expand(4, S)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS[1:])
def test_a_fully_masked_query_gives_zero_heads_and_zero_weights(mask, kind, dtype):
    spec = make("attention", mask, kind, weights=True)
    module = build_module(spec, dtype=dtype)
    arguments = call_arguments(spec, fed_to(module, blind_inputs(spec)))
    for module.path in ("sdpa", "plain"):
        heads, weights = module.heads(**arguments)
        blind = is_blind(spec, heads.shape[1])
        assert heads.isfinite().all()
        assert weights.isfinite().all()
        assert torch.equal(heads.abs().amax(-1) == 0, blind)
        assert torch.equal(weights.sum(-1).amax(1) == 0, blind)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS[1:])
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_variant_makes_a_nan_of_a_fully_masked_query(variant, mask, dtype):
    spec = make(variant, mask, "causal")
    for (output,) in run(spec, dtype, blind_inputs(spec)):
        assert output.isfinite().all()


def test_the_output_of_a_fully_masked_query_is_the_bias_of_the_projection():
    spec = make("attention", "padding", "self")
    module = build_module(spec)
    output = module(**call_arguments(spec, blind_inputs(spec)))
    assert torch.equal(output[0], module.o.bias.expand_as(output[0]))


def test_padding_reads_nothing_beyond_the_length_of_a_batch_element():
    spec = make("attention", "padding", "cross")
    feeds = inputs(spec, ragged=False)
    feeds["key_lengths"][:] = torch.tensor([3, 9, 1, 5])
    changed = {**feeds, "key": feeds["key"].clone(), "value": feeds["value"].clone()}
    for row, length in enumerate((3, 9, 1, 5)):
        changed["key"][row, length:] = 7.0
        changed["value"][row, length:] = -7.0
    results = (run(spec, torch.float64, f) for f in (feeds, changed))
    for (before,), (after,) in zip(*results, strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=1e-13)


def test_causal_reads_nothing_after_the_query():
    spec = find_spec("tiny-gqa")
    x = random_inputs(spec, {"B": 2, "S": 8}, seed=0)["x"]
    changed = x.clone()
    changed[:, 5:] = 7.0
    results = (run(spec, torch.float64, {"x": a}) for a in (x, changed))
    for (before,), (after,) in zip(*results, strict=True):
        torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-13)
        assert not torch.allclose(before[:, 5:], after[:, 5:])
