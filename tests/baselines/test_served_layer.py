"""A layer as it is served: the reference to the last digits, caches in place, masks given or computed."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from mha_deploy.baselines.torch import ServedLayer, TorchModels, find_baseline, side_by_side
from mha_deploy.errors import DeployError
from mha_deploy.exporter.oracle import run_module
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import Attention, merge_heads
from mha_deploy.reference.inputs import call_arguments, fed_to, random_inputs, to_numpy

CACHED = ("tiny-dynamic", "tiny-preallocated", "tiny-window")


def changed(model, **changes):
    return AttentionSpec.from_dict({**find_spec(model).to_dict(), **changes})


SPECS = [
    *(find_spec(name) for name in CACHED),
    changed("tiny-preallocated", window=5, name="static with a window"),
    changed("tiny-dynamic", softcap=2.0, rope={"dims": 6, "interleaved": True}, name="softcap, partial rope"),
    changed("tiny-preallocated", projections="packed", Hkv=1, name="packed, multi-query"),
]


def call(spec, S, *, path="sdpa", past=20, dtype=torch.float64, ragged=True):
    """A layer, and the arguments of one call."""
    module = build_module(spec, dtype=dtype, path=path)
    sizes = {"B": 4, "S": S, **({"P": past} if spec.cache == "dynamic" else {"T": 64})}
    feeds = fed_to(module, random_inputs(spec, sizes, 0, ragged=ragged))
    return module, call_arguments(spec, feeds)


def copies(arguments):
    return {name: side_by_side(t) if t.dim() == 4 else t.clone() for name, t in arguments.items()}


@pytest.mark.parametrize("path", ["plain", "sdpa"])
@pytest.mark.parametrize("S", [1, 6])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_step_is_that_of_the_reference_layer(spec, S, path):
    module, arguments = call(spec, S, path=path)
    wanted, got = module(**arguments), ServedLayer(module)(**copies(arguments))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)


WITHOUT_CACHE = [
    *map(find_spec, ("tiny-mha", "tiny-rope", "tiny-cross-padding", "tiny-weights", "tiny-additive-causal")),
    *map(find_spec, ("tiny-padding", "tiny-causal-padding", "tiny-head-mix", "tiny-sparse-heads")),
]


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("spec", [*SPECS, *WITHOUT_CACHE], ids=lambda spec: spec.name)
def test_masks_and_tables_may_be_given(spec, prepared):
    """Ragged lengths: one batch element has no key at all, and gives zeros."""
    module = build_module(spec, dtype=torch.float64)
    sizes = {"B": 4, "S": 5, "T": 7, "P": 4}
    if spec.cache == "preallocated":
        sizes["T"] = 64
    sizes = {axis: sizes[axis] for axis in spec.axes}
    arguments = call_arguments(spec, fed_to(module, random_inputs(spec, sizes, 0, ragged=True)))
    served = ServedLayer(module)
    own = copies(arguments)
    got, wanted = served(**(served.prepare(own) if prepared else own)), module(**arguments)
    for one, other in zip(*([x] if torch.is_tensor(x) else x for x in (got, wanted)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)


def test_queries_without_a_key_are_zeroed_whatever_the_kernel_gives():
    """PyTorch's CPU kernels give zeros by themselves; those of a GPU do not."""
    spec = find_spec("tiny-padding")
    module = build_module(spec, dtype=torch.float64)
    feeds = fed_to(module, random_inputs(spec, {"B": 4, "S": 5}, 0, ragged=True))
    served = ServedLayer(module)
    prepared = served.prepare(call_arguments(spec, feeds))
    assert prepared["attending"].tolist() == [[[[lengths > 0]] * 5] for lengths in feeds["key_lengths"]]
    got = served(**{**prepared, "attending": torch.zeros_like(prepared["attending"])})
    torch.testing.assert_close(got, module.o.bias.expand_as(got), rtol=0, atol=0)


def test_an_empty_past_is_a_prefill():
    module, arguments = call(find_spec("tiny-dynamic"), 7, past=0)
    for one, other in zip(ServedLayer(module)(**copies(arguments)), module(**arguments), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)


def test_a_preallocated_cache_is_written_where_it_is_and_a_second_call_gives_the_same():
    module, arguments = call(find_spec("tiny-preallocated"), 3)
    own, step = copies(arguments), ServedLayer(module)
    output, keys, values = step(**own)
    first = [tensor.clone() for tensor in (output, keys, values)]
    assert keys is own["key_cache"]
    assert values is own["value_cache"]
    assert not torch.equal(keys, arguments["key_cache"])
    for one, other in zip(step(**own), first, strict=True):
        assert torch.equal(one, other), "timed calls repeat one step"


def test_heads_side_by_side_are_merged_without_a_copy():
    cache = torch.randn(2, 3, 5, 4)
    laid_out = side_by_side(cache)
    assert torch.equal(laid_out, cache)
    assert merge_heads(laid_out).data_ptr() == laid_out.data_ptr()
    assert merge_heads(cache).data_ptr() != cache.data_ptr()


@pytest.mark.slow
@pytest.mark.parametrize("S", [1, 4])
@pytest.mark.parametrize("name", CACHED)
def test_torch_compile_takes_a_step_as_one_graph(name, S):
    """Traced with fake tensors, a step that looked at its lengths would break the graph."""
    module, arguments = call(find_spec(name), S)
    own, served = copies(arguments), ServedLayer(module, SDPBackend.MATH)
    compiled = torch.compile(served, dynamic=False, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        got = compiled(**served.prepare(own))
    for one, other in zip(got, module(**arguments), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)
    if "key_cache" in own:
        torch.testing.assert_close(own["key_cache"], got[1], rtol=0, atol=0)


@pytest.mark.parametrize("name", CACHED)
def test_no_call_reads_a_number_from_the_device(name):
    """On the device `meta` there are no numbers: whatever waits for one fails."""
    module, arguments = call(find_spec(name), 1)
    module = build_module(module.spec, device="meta")
    module.rotary = (
        None if module.spec.rope is None else tuple(torch.empty(127, 8, device="meta") for _ in "cs")
    )
    output, *_ = ServedLayer(module)(
        **{name: tensor.to("meta") for name, tensor in copies(arguments).items()}
    )
    assert output.shape == (4, 1, 64)


def test_one_token_behind_a_dynamic_cache_has_no_mask(monkeypatch):
    """So that every fused kernel of PyTorch takes it."""
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v, **options):
        seen.append((options["attn_mask"], options["is_causal"]))
        return real(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    for name, S in (("tiny-dynamic", 1), ("tiny-dynamic", 2), ("tiny-preallocated", 1)):
        module, arguments = call(find_spec(name), S)
        ServedLayer(module)(**copies(arguments))
    assert seen[0] == (None, False)
    assert all(mask is not None for mask, _ in seen[1:])


def test_a_call_without_its_cache_is_refused():
    module, arguments = call(find_spec("tiny-preallocated"), 1)
    with pytest.raises(DeployError, match="cache") as caught:
        ServedLayer(module)(arguments["query"], key_cache=arguments["key_cache"])
    assert caught.value.got == "no lengths"


# -- among the baselines to run a bundle --------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", CACHED)
def test_the_models_of_a_bundle_bring_it(bundles, name, precision):
    from mha_deploy.bundle.cases import golden_cases
    from mha_deploy.judge import judge_case

    bundle = bundles(name, precision)
    models = TorchModels(bundle, device="cpu")
    assert isinstance(models.in_service(find_baseline("sdpa")), ServedLayer)
    names = [tensor.name for tensor in models.spec.outputs]
    for case in golden_cases(bundle):
        outputs = run_module(models.in_service(find_baseline("sdpa")), models.arguments(case.inputs))
        got = {key: to_numpy(tensor) for key, tensor in zip(names, outputs, strict=True)}
        verdicts = judge_case(case, got, bundle.manifest.precision)
        assert [verdict.problem for verdict in verdicts] == [None] * len(names), case.name


def test_a_layer_without_a_cache_is_run_as_it_is(bundles):
    models = TorchModels(bundles("tiny-gqa"), device="cpu")
    layer = models.in_service(find_baseline("eager"))
    assert isinstance(layer, Attention)
    assert layer.path == "plain"


def test_tokens_that_do_not_fit_are_refused_before_they_are_on_the_device(bundles):
    models = TorchModels(bundles("tiny-preallocated"), device="cpu")
    _, arguments = call(models.spec, 4, dtype=torch.float16)
    feeds = {"x" if key == "query" else key: to_numpy(tensor) for key, tensor in arguments.items()}
    models.arguments(feeds)
    feeds["lengths"] = feeds["lengths"] * 0 + 61
    with pytest.raises(DeployError, match="do not fit into the cache"):
        models.arguments(feeds)
