"""Half-precision matmuls on a CPU: half operands, float32 sums, one rounding."""

import pytest
import torch
import torch.nn.functional as F

from mha_deploy.exporter.oracle import Float32Accumulation, run_module
from mha_deploy.model.catalog import find_spec
from mha_deploy.reference import build_module
from mha_deploy.reference.inputs import call_arguments, fed_to, random_inputs

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

HALVES = pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)


def draw(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def roundoff(dtype):
    return torch.finfo(dtype).eps / 2


def deviation(got, wanted):
    """The largest difference relative to the largest value."""
    return ((got.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()


MATMULS = {
    "linear": lambda a, b: F.linear(a, b, a[0, : len(b)]),
    "matmul": lambda a, b: torch.matmul(a, b.T),
    "method": lambda a, b: a.matmul(b.T),
    "operator": lambda a, b: a @ b.T,
    "sdpa": lambda a, b: F.scaled_dot_product_attention(
        a[None, None], b[None, None], b[None, None], scale=0.05
    ),
    "linear by keyword": lambda a, b: F.linear(bias=a[0, : len(b)], weight=b, input=a),
    "matmul by keyword": lambda a, b: torch.matmul(input=a, other=b.T),
    "matmul under NumPy's names": lambda a, b: torch.matmul(x1=a, x2=b.T),
    "matmul into a tensor": lambda a, b: torch.matmul(a, b.T, out=a.new_empty(len(a), len(b))),
    "method by keyword": lambda a, b: a.matmul(other=b.T),
    "sdpa by keyword": lambda a, b: F.scaled_dot_product_attention(
        value=b[None, None], key=b[None, None], query=a[None, None], scale=0.05
    ),
}


@HALVES
@pytest.mark.parametrize("matmul", MATMULS)
def test_every_matmul_is_rounded_once(matmul, half):
    a, b = draw(8, 512, dtype=half), draw(8, 512, dtype=half, seed=1)
    with Float32Accumulation():
        got = MATMULS[matmul](a, b)
    assert got.dtype == half
    assert torch.equal(got, MATMULS[matmul](a.float(), b.float()).to(half))
    exact = MATMULS[matmul](a.double(), b.double())
    one_rounding = roundoff(half) * exact.abs()
    of_float32 = 1e-5 * exact.abs().max()
    assert ((got.double() - exact).abs() <= one_rounding + of_float32).all()


@HALVES
@pytest.mark.parametrize("name", ["tiny-mha", "tiny-causal-padding", "tiny-additive", "tiny-head-mix"])
def test_a_whole_layer_is_that_of_native_half_arithmetic(name, half):
    spec = find_spec(name)
    module = build_module(spec, dtype=half, path="plain")
    arguments = call_arguments(spec, fed_to(module, random_inputs(spec, spec.sizes("opt"), seed=0)))
    with torch.inference_mode():
        native = module(**arguments)
    (got,) = run_module(module, arguments)
    assert got.dtype == half
    assert deviation(got, native) <= 8 * roundoff(half)


@HALVES
def test_nothing_else_is_upcast(half):
    a = draw(8, 64, dtype=half)
    wanted = (a + a * 3).softmax(-1)
    with Float32Accumulation():
        assert torch.equal((a + a * 3).softmax(-1), wanted)


def test_the_result_has_the_type_of_the_operands():
    """Not that of the module: one in fp16 may compute a part in bf16."""
    module = torch.nn.Linear(64, 8, dtype=torch.float16)
    module.forward = lambda x: x.bfloat16() @ module.weight.bfloat16().T
    (got,) = run_module(module, {"x": draw(4, 64, dtype=torch.float16)})
    assert got.dtype == torch.bfloat16


@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_wider_types_are_left_alone(wide):
    a, b = draw(8, 64, dtype=wide), draw(8, 64, dtype=wide, seed=1)
    with Float32Accumulation():
        got = a @ b.T
    assert got.dtype == wide
    assert torch.equal(got, a @ b.T)


@HALVES
def test_a_half_precision_mask_is_upcast_with_the_rest(half):
    q = draw(1, 2, 5, 16, dtype=half)
    bias = draw(1, 2, 5, 5, dtype=half, seed=1)
    with Float32Accumulation():
        got = F.scaled_dot_product_attention(q, q, q, attn_mask=bias)
    wide = F.scaled_dot_product_attention(q.float(), q.float(), q.float(), attn_mask=bias.float())
    assert torch.equal(got, wide.to(half))


def test_running_a_module_changes_neither_its_weights_nor_their_type():
    spec = find_spec("tiny-gqa")
    module = build_module(spec, dtype=torch.float16)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    run_module(module, {"query": draw(2, 5, 64, dtype=torch.float16)})
    after = module.state_dict()
    assert all(after[n].dtype == torch.float16 and torch.equal(after[n], before[n]) for n in before)


def test_outputs_are_a_tuple_without_gradients():
    for name, count in (("tiny-mha", 1), ("tiny-weights", 2)):
        spec = find_spec(name)
        module = build_module(spec)
        outputs = run_module(module, call_arguments(spec, random_inputs(spec, {"B": 2, "S": 3}, seed=0)))
        assert isinstance(outputs, tuple)
        assert len(outputs) == count
        assert not any(output.requires_grad for output in outputs)
