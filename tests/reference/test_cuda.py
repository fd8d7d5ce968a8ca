"""Every layer on a GPU, in every precision and through both paths, against float64 on the CPU."""

import pytest
import torch

from mha_deploy.model.catalog import catalog_names, find_spec
from mha_deploy.reference import build_module
from mha_deploy.reference.inputs import call_arguments, clear_decisions, fed_to, random_inputs

pytestmark = pytest.mark.gpu

TINY = [name for name in catalog_names() if name.startswith("tiny-")]
SIZES = {"B": 4, "S": 37, "T": 24, "P": 19}
# The error of a whole layer against float64, in units of the roundoff. In float32 the sums themselves round.
ALLOWED = {torch.float16: 8.0, torch.bfloat16: 8.0, torch.float32: 32.0}


@pytest.fixture(autouse=True)
def full_float32():
    """Multiply float32 as float32: TF32 is another precision."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def sizes_of(spec):
    """Odd sizes; half of a preallocated cache, which has one size, is for the new tokens."""
    sizes = {axis: min(SIZES[axis], found.max) for axis, found in spec.axes.items()}
    if spec.cache == "preallocated":
        sizes |= {"T": spec.axes["T"].max, "S": min(sizes["S"], spec.axes["T"].max // 2)}
    spec.check_sizes(sizes)
    return sizes


def outputs(module, feeds):
    with torch.inference_mode():
        out = module(**call_arguments(module.spec, feeds))
    return out if isinstance(out, tuple) else (out,)


def deviation(got, exact, dtype):
    """The largest error, relative to the largest value, in units of the roundoff."""
    error = (got.cpu().double() - exact).abs().max() / exact.abs().max()
    return (error / (torch.finfo(dtype).eps / 2)).item()


@pytest.mark.parametrize("path", ["sdpa", "plain"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", TINY)
def test_a_layer_on_cuda_agrees_with_float64_on_the_cpu(name, dtype, path):
    spec = find_spec(name)
    module = build_module(spec, dtype=dtype, device="cuda", path=path)
    oracle = build_module(spec, weights=module.state_dict(), dtype=torch.float64)
    feeds = random_inputs(spec, sizes_of(spec), seed=0, ragged=True)
    rounded = {n: t.to(dtype) if t.is_floating_point() else t for n, t in feeds.items()}
    rounded = clear_decisions(oracle, rounded, 0, margin=16 * torch.finfo(dtype).eps / 2)
    exact = {n: t.double() if t.is_floating_point() else t for n, t in rounded.items()}
    for got, wanted in zip(outputs(module, fed_to(module, rounded)), outputs(oracle, exact), strict=True):
        assert got.is_cuda
        assert got.dtype == dtype
        assert got.isfinite().all()
        assert deviation(got, wanted, dtype) < ALLOWED[dtype]


@pytest.mark.parametrize("path", ["sdpa", "plain"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "name", ["tiny-additive", "tiny-additive-causal", "tiny-padding", "tiny-causal-padding"]
)
def test_a_fully_masked_query_gives_zero_heads_on_cuda(name, dtype, path):
    spec = find_spec(name)
    module = build_module(spec, dtype=dtype, device="cuda", path=path)
    feeds = random_inputs(spec, {"B": 4, "S": 37}, seed=0)
    if spec.mask == "padding":
        feeds["key_lengths"][2] = 0
    else:
        feeds["attention_bias"][:, :, 2] = float("-inf")
    heads, _ = module.heads(**call_arguments(spec, fed_to(module, feeds)))
    assert heads.isfinite().all()
    blind = heads[2] if spec.mask == "padding" else heads[:, 2]
    assert (blind == 0).all()
    assert (heads[3, 3] != 0).any()
