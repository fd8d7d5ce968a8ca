"""Stepping through a cache is the layer over the whole sequence, whatever the steps; and mistakes show.

`whole` below is the layer without its cache, itself compared with loops in NumPy.
"""

import functools
import math

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from layer_decoder import Decoder
from onnx.reference import ReferenceEvaluator
from rotary_formula import published_frequencies, turned

from mha_deploy.errors import DeployError
from mha_deploy.exporter.exporter import canonical_from_module
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import Attention, split_heads

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

B, L, T = 3, 9, 12  # rows, tokens, rows of a preallocated cache
ROPES = {
    "no rope": None,
    "half": {},
    "interleaved": {"interleaved": True},
    "partial": {"dims": 6},
    "linear": {"scaling": "linear", "factor": 4.0},
    "ntk": {"scaling": "ntk", "factor": 4.0, "interleaved": True, "dims": 12},
    # All three ranges of wavelengths are among the eight pairs.
    "llama3": {"base": 500.0, "scaling": "llama3", "factor": 8.0, "original_length": 64},
}
CACHES = ("dynamic", "preallocated")
CHUNKS = ([1] * L, [L], [5, 1, 1, 1, 1], [2, 4, 3])
ALLOWED = {
    torch.bfloat16: 8.0,
    torch.float16: 8.0,
}  # units of the roundoff, as between two ways to run a layer


def make(cache="none", rope=None, **changes):
    axes = {"B": B, "S": {"min": 1, "opt": 4, "max": L}}
    axes |= {"dynamic": {"P": {"min": 0, "opt": 4, "max": L}}, "preallocated": {"T": T}, "none": {}}[cache]
    data = {
        "name": "layer",
        "Hq": 4,
        "Hkv": 2,
        "D": 16,
        "E": 24,
        "axes": axes,
        "causal": True,
        "cache": cache,
    }
    return AttentionSpec.from_dict({**data, **({} if rope is None else {"rope": rope}), **changes})


def options(window, softcap):
    given = {"window": window, "softcap": softcap}
    return {name: value for name, value in given.items() if value is not None}


def tokens(dtype=torch.float64, seed=0):
    return torch.randn(B, L, 24, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pair(spec, path="sdpa"):
    """The layer with its cache, and the same layer over whole sequences."""
    return (build_module(s, dtype=torch.float64, path=path) for s in (spec, spec.without_cache()))


def keys_of(whole, x):
    """What the cache must hold after x: the turned keys, and the values. [B, Hkv, L, D]."""
    q, k, v = whole.project(x, None, None)
    _, k = whole.rotate(q, k, torch.arange(x.shape[1]))
    return split_heads(k, whole.spec.Hkv), split_heads(v, whole.spec.Hkv)


def wanted_of(whole, x):
    """The output of the whole sequence, and the keys and values that the cache must hold after it."""
    return whole(x), *keys_of(whole, x)


def decode_in_chunks(module, x, sizes):
    """Feed x from an empty cache, in chunks of these sizes; the outputs, and the decoder at the end."""
    decoder = Decoder(module, x.shape[0])
    return torch.cat([decoder.feed(chunk) for chunk in x.split(list(sizes), dim=1)], dim=1), decoder


def errors(module, wanted, x, sizes):
    """The largest differences of stepping from the whole sequence: in the outputs, and in the cache."""
    output, decoder = decode_in_chunks(module, x, sizes)
    got = (output, *(rows[:, :, : x.shape[1]] for rows in (decoder.keys, decoder.values)))
    differences = [(a - b).abs().max().item() for a, b in zip(got, wanted, strict=True)]
    return differences[0], max(differences[1:])


# -- the whole sequence ------------------------------------------------------------------------


def textbook(module, x):
    """softmax over the keys that a query sees, one query at a time."""
    spec, state = module.spec, {name: p.numpy() for name, p in module.state_dict().items()}
    q, k, v = (x.numpy() @ state[f"{n}.weight"].T + state[f"{n}.bias"] for n in "qkv")
    heads = np.zeros((*x.shape[:2], spec.Hq, spec.D))
    for b in range(len(x)):
        qs, ks, vs = (a[b].reshape(x.shape[1], -1, spec.D) for a in (q, k, v))
        if spec.rope is not None:
            theta = published_frequencies(spec.rope, spec.rope_dims)
            qs, ks = (turned(a, np.arange(len(a)), theta, spec.rope.interleaved) for a in (qs, ks))
        for i in range(spec.Hq):
            shared = i // (spec.Hq // spec.Hkv)
            for s in range(x.shape[1]):
                first = 0 if spec.window is None else max(0, s + 1 - spec.window)
                scores = ks[first : s + 1, shared] @ qs[s, i] / math.sqrt(spec.D)
                if spec.softcap is not None:
                    scores = spec.softcap * np.tanh(scores / spec.softcap)
                powers = np.exp(scores - scores.max())
                heads[b, s, i] = powers / powers.sum() @ vs[first : s + 1, shared]
    return heads.reshape(*x.shape[:2], -1) @ state["o.weight"].T + state["o.bias"]


@pytest.mark.sweep(14)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 3, L, L + 5])
@pytest.mark.parametrize("rope", ROPES)
def test_the_whole_sequence_is_the_formula(rope, window, softcap):
    module = build_module(make(rope=ROPES[rope], **options(window, softcap)), dtype=torch.float64)
    wanted = textbook(module, tokens())
    for module.path in ("sdpa", "plain"):
        np.testing.assert_allclose(module(tokens()).numpy(), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("option", [{"rope": {}}, {"window": 3}, {"softcap": 1.5}], ids=str)
def test_every_option_changes_the_result(option):
    a, b = (build_module(make(**changes), dtype=torch.float64)(tokens()) for changes in ({}, option))
    assert (a - b).abs().max() > 1e-2


@pytest.mark.parametrize("variant", ["head-mix", "sparse-heads"])
def test_the_variants_take_rope_window_and_softcap(variant):
    changes = {"variant": variant, **({"sparse_heads": {"top_k": 2}} if variant == "sparse-heads" else {})}
    module = build_module(make(rope={}, window=3, softcap=1.5, **changes), dtype=torch.float64)
    plain = build_module(make(rope={}, window=3, softcap=1.5), dtype=torch.float64)
    plain.load_state_dict({n: t for n, t in module.state_dict().items() if n in plain.state_dict()})
    torch.testing.assert_close(module.heads(tokens())[0], plain.heads(tokens())[0], rtol=0, atol=1e-13)


def test_the_weights_of_a_window_are_zero_outside_it_and_sum_to_one():
    module = build_module(make(window=3, softcap=1.5, weights=True), dtype=torch.float64)
    for module.path in ("sdpa", "plain"):
        _, weights = module(tokens())
        s, t = torch.arange(L)[:, None], torch.arange(L)
        assert torch.equal(weights[0, 0] > 0, (t <= s) & (t > s - 3))
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


@pytest.mark.parametrize("mask", ["padding", "additive"])
def test_a_mask_and_a_window_must_both_hold(mask):
    module = build_module(make(window=3, softcap=1.5, mask=mask), dtype=torch.float64)
    lengths = torch.tensor([L, 4, 1], dtype=torch.int32)
    bias = torch.zeros(1, 4, L, L, dtype=torch.float64)
    bias[..., 4:] = float("-inf")
    given = {"key_lengths": lengths} if mask == "padding" else {"attention_bias": bias}
    a, b = [], []
    for module.path, found in (("sdpa", a), ("plain", b)):
        heads, _ = module.heads(tokens(), **given)
        assert heads.isfinite().all()
        found.append(heads)
        assert (heads[1, 6:] == 0).all()  # keys 4 and later are masked, keys before 4 out of the window
        assert (heads[1, 5] != 0).any()
    torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


# -- stepping ----------------------------------------------------------------------------------


@pytest.mark.sweep(12)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("Hkv", [4, 2, 1])
@pytest.mark.parametrize("cache", CACHES)
def test_decode_loop_is_the_whole_sequence_whatever_the_steps(cache, Hkv, rope, window, softcap):
    module, whole = pair(make(cache, ROPES[rope], Hkv=Hkv, **options(window, softcap)))
    x = tokens()
    wanted = wanted_of(whole, x)
    for module.path, sizes in zip(("sdpa", "plain", "plain", "sdpa"), CHUNKS, strict=True):
        assert max(errors(module, wanted, x, sizes)) < 1e-12, sizes


@pytest.mark.parametrize("projections", ["packed", "separate"])
@pytest.mark.parametrize("cache", CACHES)
def test_decode_loop_takes_either_form_of_the_projections(cache, projections):
    module, whole = pair(make(cache, {}, projections=projections, bias=False, scale=0.4))
    assert max(errors(module, wanted_of(whole, tokens()), tokens(), [4, 1, 4])) < 1e-12


def feed_ragged(module, x, plan, rubbish=float("nan")):
    """Feed each row its own number of tokens in each call, padded with nonsense.

    Returns:
        For every row, the outputs at its real tokens in order.
    """
    decoder = Decoder(module, len(x))
    decoder.keys.fill_(rubbish)
    decoder.values.fill_(rubbish)
    outputs = [[] for _ in x]
    for counts in plan:
        chunk = torch.full((len(x), max(counts), x.shape[-1]), 7.0, dtype=x.dtype)
        starts = decoder.lengths.tolist()
        for b, count in enumerate(counts):
            chunk[b, :count] = x[b, starts[b] : starts[b] + count]
        output = decoder.feed(chunk, torch.tensor(counts))
        for b, count in enumerate(counts):
            outputs[b].append(output[b, :count])
    return [torch.cat(rows) for rows in outputs], decoder


PLANS = {
    "prompts of different lengths, then single tokens": [(5, 1, 3), *[(1, 1, 1)] * 4],
    "chunks of different lengths": [(2, 4, 1), (3, 1, 3), (1, 3, 2)],
    "rows that wait": [(0, 3, 6), (4, 0, 1), (1, 1, 0), (0, 1, 1)],
}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("path", ["sdpa", "plain"])
def test_ragged_batch_elements_decode_as_if_each_were_alone(path, rope, window, plan):
    module, whole = pair(
        make("preallocated", ROPES[rope], softcap=1.5 if path == "plain" else None, **options(window, None)),
        path,
    )
    x = tokens()
    outputs, decoder = feed_ragged(module, x, PLANS[plan])
    wanted, keys = whole(x), keys_of(whole, x)
    assert decoder.lengths.tolist() == [sum(counts) for counts in zip(*PLANS[plan], strict=True)]
    for b, length in enumerate(decoder.lengths.tolist()):
        torch.testing.assert_close(outputs[b], wanted[b, :length], rtol=0, atol=1e-12)
        for got, rows in zip((decoder.keys, decoder.values), keys, strict=True):
            torch.testing.assert_close(got[b, :, :length], rows[b, :, :length], rtol=0, atol=1e-12)


def test_what_memory_holds_behind_the_valid_entries_is_never_read():
    module, whole = pair(make("preallocated", {}))
    x = tokens()
    for module.path in ("sdpa", "plain"):
        decoder = Decoder(module, B)
        decoder.keys.fill_(float("nan"))
        decoder.values.fill_(float("inf"))
        outputs = torch.cat([decoder.feed(part) for part in x.split([4, 1, 4], dim=1)], dim=1)
        torch.testing.assert_close(outputs, whole(x), rtol=0, atol=1e-12)
        assert decoder.keys[:, :, L:].isnan().all()


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("rope", ["no rope", "half", "llama3"])
@pytest.mark.parametrize("cache", CACHES)
def test_half_precision_decodes_within_a_few_roundoffs_of_float64(cache, rope, dtype):
    spec = make(cache, ROPES[rope], window=4, softcap=20.0)
    module = build_module(spec, dtype=dtype)
    oracle = build_module(spec.without_cache(), weights=module.state_dict(), dtype=torch.float64)
    x = tokens(dtype)
    exact = oracle(x.double())
    for sizes in CHUNKS[1:]:
        output, _ = decode_in_chunks(module, x, sizes)
        assert output.dtype == dtype
        error = (output.double() - exact).abs().max() / exact.abs().max()
        assert error / (torch.finfo(dtype).eps / 2) < ALLOWED[dtype]


@pytest.mark.parametrize("cache", CACHES)
def test_positions_that_are_all_one_too_high_show_only_in_the_cache(monkeypatch, cache):
    """The scores know only distances. Whoever else reads that cache would be off by one."""
    module, whole = pair(make(cache, {}))
    wanted = wanted_of(whole, tokens())
    rotated = Attention._rotated
    monkeypatch.setattr(Attention, "_rotated", lambda self, query, at: rotated(self, query, at + 1))
    output, held = errors(module, wanted, tokens(), [4, 2, 3])
    assert output < 1e-12
    assert held > 1e-3


# -- how a cache is called ---------------------------------------------------------------------


def static_call(S=2, lengths=(0, 3, 5)):
    module = build_module(make("preallocated", {}), dtype=torch.float64)
    caches = torch.randn(2, B, 2, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return module, tokens()[:, :S], caches[0], caches[1], torch.tensor(lengths, dtype=torch.int32)


def test_a_call_leaves_the_buffers_of_its_caller_alone():
    module, x, keys, values, lengths = static_call()
    before = keys.clone(), values.clone(), lengths.clone()
    module(x, key_cache=keys, value_cache=values, lengths=lengths)
    for tensor, old in zip((keys, values, lengths), before, strict=True):
        assert torch.equal(tensor, old)


def test_only_the_new_entries_are_written():
    module, x, keys, values, lengths = static_call()
    _, new, _ = module(x, key_cache=keys, value_cache=values, lengths=lengths)
    for b, length in enumerate(lengths.tolist()):
        changed = (new[b] != keys[b]).any(-1).any(0)
        assert changed.nonzero().flatten().tolist() == [length, length + 1]


@pytest.mark.parametrize("lengths", [(0, 11, 0), (0, -1, 0)])
def test_entries_outside_the_buffer_are_refused_before_anything_is_written(lengths):
    module, x, keys, values, lengths = static_call(lengths=lengths)
    before = keys.clone()
    with pytest.raises(DeployError, match="do not fit into the cache") as caught:
        module(x, key_cache=keys, value_cache=values, lengths=lengths)
    assert f"lengths {lengths.tolist()}, 2 new tokens, 12 entries" in str(caught.value)
    assert "lengths from 0 to 10" in caught.value.hint
    assert torch.equal(keys, before)


def test_a_cache_can_be_filled_to_its_last_entry():
    module, whole = pair(make("preallocated", {}))
    x = torch.cat((tokens(), tokens(seed=1)), dim=1)[:, :T]
    assert max(errors(module, wanted_of(whole, x), x, [5, 4, 3])) < 1e-12


@pytest.mark.parametrize(("cache", "missing"), [("dynamic", "past_key"), ("preallocated", "key_cache")])
def test_a_call_without_its_cache_is_refused(cache, missing):
    with pytest.raises(DeployError, match="cache") as caught:
        build_module(make(cache))(tokens(torch.float32))
    assert missing in caught.value.got


@pytest.mark.parametrize("cache", CACHES)
def test_the_outputs_have_the_shapes_of_the_spec(cache):
    spec = make(cache, {})
    sizes = {"B": B, "S": 2, **({"P": 5} if cache == "dynamic" else {"T": T})}
    shapes = {tensor.name: tensor.shape(sizes) for tensor in spec.inputs}
    feeds = {name: torch.zeros(shape) for name, shape in shapes.items() if name not in ("x", "lengths")}
    if cache == "preallocated":
        feeds["lengths"] = torch.tensor([0, 3, 5], dtype=torch.int32)
    outputs = build_module(spec)(torch.zeros(shapes["x"]), **feeds)
    assert [tuple(t.shape) for t in outputs] == [tensor.shape(sizes) for tensor in spec.outputs]


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_adds_nothing_to_the_state_of_a_layer(cache):
    module, whole = pair(make(cache, {}))
    assert module.state_dict().keys() == whole.state_dict().keys()


# -- the path that is exported -----------------------------------------------------------------


class Exported(torch.nn.Module):
    """The graph of a layer in the place of the layer, so that a Decoder can step it."""

    def __init__(self, layer, run):
        super().__init__()
        self.spec, self.layer, self.run = layer.spec, layer, run

    def forward(self, query, **held):
        feeds = {"x": query, **held}
        names = [tensor.name for tensor in self.spec.outputs]
        got = self.run(names, {name: tensor.numpy() for name, tensor in feeds.items()})
        return tuple(torch.from_numpy(array) for array in got)


def onnx_runtime(proto):
    return onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run


def evaluator(proto):
    return ReferenceEvaluator(proto).run


# ONNX Runtime has no such kernels in float64; ONNX's evaluator does not mind.
RUNTIMES = {onnx_runtime: (torch.float32, 5e-6), evaluator: (torch.float64, 1e-12)}
GRAPHS = [(evaluator, cache, window, cap) for cache in CACHES for window in (None, 3) for cap in (None, 1.5)]
GRAPHS += [(onnx_runtime, cache, window, 1.5) for cache in CACHES for window in (None, 3)]
# Each cache without both and with both, and those that ragged rows step through: an export takes a second.
QUICK = [
    (evaluator, "dynamic", None, None),
    (evaluator, "dynamic", 3, 1.5),
    (onnx_runtime, "dynamic", 3, 1.5),
]
QUICK += [(runtime, "preallocated", window, 1.5) for runtime in RUNTIMES for window in (None, 3)]


@pytest.fixture(scope="module")
def exported():
    """A function that gives the graph of a layer, the layer over whole sequences, tokens, and the error."""

    @functools.cache
    def export(runtime, cache, window, softcap):
        spec, (dtype, allowed) = make(cache, {}, **options(window, softcap)), RUNTIMES[runtime]
        layer = build_module(spec, dtype=dtype)
        whole = build_module(spec.without_cache(), weights=layer.state_dict(), dtype=torch.float64)
        graph = runtime(ir.to_proto(canonical_from_module(layer)))
        return Exported(layer, graph), whole, tokens(dtype), allowed

    return export


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "graph",
    [pytest.param(graph, marks=() if graph in QUICK else pytest.mark.slow) for graph in GRAPHS],
    ids=lambda graph: "-".join(map(str, (graph[0].__name__, *graph[1:]))),
)
def test_the_exported_graph_decodes_as_the_whole_sequence(exported, graph):
    module, whole, x, allowed = exported(*graph)
    wanted = wanted_of(whole, x.double())
    for sizes in CHUNKS:
        assert max(errors(module, wanted, x, sizes)) < allowed, sizes


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("runtime", RUNTIMES, ids=lambda runtime: runtime.__name__)
def test_the_exported_graph_decodes_ragged_batch_elements(exported, runtime, plan, window):
    module, whole, x, allowed = exported(runtime, "preallocated", window, 1.5)
    # Unlike the layer, the graph reads what stands behind the valid rows, with a weight of 0: no NaN here.
    outputs, decoder = feed_ragged(module, x, PLANS[plan], rubbish=1000.0)
    wanted, keys = whole(x.double()), keys_of(whole, x.double())
    for b, length in enumerate(decoder.lengths.tolist()):
        assert (outputs[b] - wanted[b, :length]).abs().max() < allowed
        for got, rows in zip((decoder.keys, decoder.values), keys, strict=True):
            assert (got[b, :, :length] - rows[b, :, :length]).abs().max() < allowed
            assert (got[b, :, length + L :] == 1000.0).all(), "no call wrote there"


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cache", CACHES)
def test_pytorch_cannot_run_the_nodes_of_a_cache_and_is_not_let(cache, window):
    module = build_module(make(cache, {}, **options(window, None)), path="onnx")
    with pytest.raises(DeployError, match="cannot run the ONNX nodes of a cache") as caught:
        Decoder(module, B).feed(tokens(torch.float32))
    assert caught.value.got == "path = onnx"
    assert "sdpa or plain" in caught.value.hint


def test_the_exported_path_has_the_softcap_where_pytorch_runs_it():
    module = build_module(make(softcap=1.5, causal=False), dtype=torch.float64)
    a, b = [], []
    for module.path, found in (("plain", a), ("onnx", b)):
        found.append(module(tokens()))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("changes", [{}, {"window": 3}, {"mask": "padding", "causal": False}], ids=str)
def test_pytorch_would_cap_the_mask_so_the_exported_path_is_refused(changes):
    module = build_module(make(softcap=1.5, **changes), path="onnx")
    lengths = {"key_lengths": torch.tensor([3, 4, 5])} if "mask" in changes else {}
    with pytest.raises(DeployError, match="it caps the mask too"):
        module(tokens(torch.float32), **lengths)


def test_an_export_keeps_softcap_and_mask():
    module = build_module(make(softcap=1.5, window=3), path="onnx")
    program = torch.export.export(module, (tokens(torch.float32),))
    (node,) = [n for n in program.graph.nodes if "Attention" in str(n.target)]
    assert node.kwargs["softcap"] == 1.5
