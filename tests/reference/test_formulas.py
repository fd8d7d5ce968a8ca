"""The layers compute their formulas: compared with loops over rows, heads and queries, written out here.

Nothing below knows a mask value: a query sums over the keys that it may see, and over no others.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mha_deploy.model.catalog import catalog_names, find_spec
from mha_deploy.model.layer import AttentionSpec, SparseHeads
from mha_deploy.reference import build_module, random_weights
from mha_deploy.reference.inputs import call_arguments, random_inputs

TINY = [name for name in catalog_names() if name.startswith("tiny-")]
SIZES = {"B": 4, "S": 7, "T": 9, "P": 5}


# -- the formulas ------------------------------------------------------------------------------


def softmax(scores):
    """exp(x_j) / Σ exp(x_j), shifted so that nothing overflows."""
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def linear(x, state, name):
    """x W, with the weight stored transposed as PyTorch does."""
    y = x @ state[f"{name}.weight"].T
    return y + state[f"{name}.bias"] if f"{name}.bias" in state else y


def visible_keys(spec, feeds, row, position, T):
    """The keys that the query at a position of a row may see."""
    length = feeds["key_lengths"][row] if spec.mask == "padding" else T
    first = position + 1 - spec.window if spec.window else 0
    last = position if spec.causal else T - 1
    return [t for t in range(T) if t < length and first <= t <= last]


def turned(rows, rope, D, start=0):
    """Every head's first numbers as complex ones, (x_j, x_{j + dims/2}), turned by position times θ_j."""
    if rope is None:
        return rows
    dims = rope.dims or D
    half, result = dims // 2, rows.copy()
    for j in range(half):
        theta = rope.base ** (-2 * j / dims)
        turns = rope.original_length * theta / (2 * math.pi)
        kept = min(1, max(0, (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)))
        theta = (1 - kept) * theta / rope.factor + kept * theta
        for p in range(len(rows)):
            for head in range(0, rows.shape[1], D):
                a, b = head + j, head + j + half
                pair = complex(rows[p, a], rows[p, b]) * np.exp(1j * (start + p) * theta)
                result[p, a], result[p, b] = pair.real, pair.imag
    return result


def first_position(spec, feeds, row):
    """Where the first token of a call stands: behind what the cache of its row holds."""
    if spec.cache == "preallocated":
        return int(feeds["lengths"][row])
    return feeds["past_key"].shape[2] if spec.cache == "dynamic" else 0


def with_cache(spec, feeds, row, name, new):
    """The rows of the keys or values that a query may look at, the new ones [S, Hkv·D] among them."""
    if spec.cache == "none":
        return new
    old = feeds[f"past_{name}" if spec.cache == "dynamic" else f"{name}_cache"][row]  # [Hkv, rows, D]
    rows = [np.concatenate([old[h, t] for h in range(spec.Hkv)]) for t in range(old.shape[1])]
    if spec.cache == "dynamic":
        return np.array([*rows, *new])
    start = first_position(spec, feeds, row)
    for s, line in enumerate(new):
        rows[start + s] = line
    return np.array(rows)


def as_cache(spec, rows):
    """The same rows as a cache holds them: [rows, Hkv·D] -> [Hkv, rows, D]."""
    return np.array([rows[:, h * spec.D : (h + 1) * spec.D] for h in range(spec.Hkv)])


def capped(spec, scores):
    """c · tanh(s / c), or the scores as they are."""
    return scores if spec.softcap is None else spec.softcap * np.tanh(scores / spec.softcap)


def textbook_heads(spec, state, feeds):
    """head_i = softmax(cap(Q_i K_iᵀ · scale) + bias) V_i for every row of the batch.

    Returns:
        The heads [B, S, Hq, D], the weights [B, Hq, S, T], and the keys and values looked at [B, Hkv, T, D].
    """
    x = feeds["query"] if spec.is_cross else feeds["x"]
    keys, values = (feeds[name] if spec.is_cross else x for name in ("key", "value"))
    B, S, _ = x.shape
    heads, weights, looked_at = np.zeros((B, S, spec.Hq, spec.D)), [], []
    scale = 1 / math.sqrt(spec.D) if spec.scale is None else spec.scale
    for b in range(B):
        q, k, v = (linear(a[b], state, name) for a, name in ((x, "q"), (keys, "k"), (values, "v")))
        start = first_position(spec, feeds, b)
        q, k = (turned(rows, spec.rope, spec.D, start) for rows in (q, k))
        k, v = with_cache(spec, feeds, b, "key", k), with_cache(spec, feeds, b, "value", v)
        T = len(k)
        weights.append(np.zeros((spec.Hq, S, T)))
        looked_at.append((as_cache(spec, k), as_cache(spec, v)))
        for i in range(spec.Hq):
            shared = i // (spec.Hq // spec.Hkv)  # the K and V that this head's group shares
            mine, theirs = (slice(j * spec.D, (j + 1) * spec.D) for j in (i, shared))
            for s in range(S):
                seen = visible_keys(spec, feeds, b, start + s, T)
                if not seen:
                    continue
                scores = capped(spec, np.array([scale * (q[s, mine] @ k[t, theirs]) for t in seen]))
                if spec.mask == "additive":
                    scores = scores + feeds["attention_bias"][0, i, s, seen]
                weights[b][i, s, seen] = softmax(scores)
                heads[b, s, i] = weights[b][i, s, seen] @ v[seen, theirs]
    return heads, np.array(weights), *map(np.array, zip(*looked_at, strict=True))


def concat_and_project(spec, state, heads, x):
    """Concat(head_1 … head_Hq) W_O."""
    return linear(np.concatenate(list(heads)), state, "o")


def sum_over_chosen_heads(spec, state, heads, x):
    """Σ_{i ∈ TopK(G)} softmax(G)_i · head_i W_O^(i), with W_O^(i) head i's slice of W_O."""
    gates = linear(x, state, "gate")
    chosen = sorted(range(spec.Hq), key=lambda i: -gates[i])[: spec.sparse_heads.top_k]
    share = softmax(gates)
    if spec.sparse_heads.renormalise:
        share = share / sum(share[i] for i in chosen)
    slices = np.split(state["o.weight"].T, spec.Hq)  # Hq matrices [D, E]
    return sum(share[i] * (heads[i] @ slices[i]) for i in chosen) + state.get("o.bias", 0.0)


def mlp_of_groups(spec, state, heads, x):
    """MLP(Concat(G_1 … G_g)), G_i = Concat(heads of group i) W_i, MLP(z) = GELU(z W_1) W_2."""
    size = spec.Hq // spec.grouped_mlp.groups
    groups = [
        linear(np.concatenate(heads[i * size : (i + 1) * size]), state, f"groups.{i}")
        for i in range(spec.grouped_mlp.groups)
    ]
    z = linear(np.concatenate(groups), state, "mlp_in")
    gelu = np.array([0.5 * a * (1 + math.erf(a / math.sqrt(2))) for a in z])
    return linear(gelu, state, "mlp_out")


def attention_over_heads(spec, state, heads, x):
    """H' = softmax(H W_q (H W_k)ᵀ / √D) H W_v, then Concat(H'_1 … H'_Hq) W_O."""
    q, k, v = (linear(heads, state, f"mix_{name}") for name in "qkv")
    mixed = [softmax(q[i] @ k.T / math.sqrt(spec.D)) @ v for i in range(spec.Hq)]
    return linear(np.concatenate(mixed), state, "o")


OUTPUT_STAGES = {
    "attention": concat_and_project,
    "sparse-heads": sum_over_chosen_heads,
    "grouped-mlp": mlp_of_groups,
    "head-mix": attention_over_heads,
}


def textbook(spec, state, feeds):
    """The whole layer in NumPy."""
    heads, weights, keys, values = textbook_heads(spec, state, feeds)
    x = feeds["query"] if spec.is_cross else feeds["x"]
    stage = OUTPUT_STAGES[spec.variant]
    rows = [[stage(spec, state, heads[b, s], x[b, s]) for s in range(x.shape[1])] for b in range(len(x))]
    if spec.cache != "none":
        return np.array(rows), keys, values
    return (np.array(rows), weights) if spec.weights else (np.array(rows),)


# -- the layers --------------------------------------------------------------------------------


def double(tensors):
    return {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}


def assert_equals_textbook(spec, seed=5):
    state = random_weights(spec, seed)
    sizes = {name: SIZES[name] if axis.is_dynamic else axis.max for name, axis in spec.axes.items()}
    feeds = double(random_inputs(spec, sizes, seed, ragged=True))
    arrays = {name: tensor.numpy() for name, tensor in double(state).items()}
    wanted = textbook(spec, arrays, {name: tensor.numpy() for name, tensor in feeds.items()})
    module = build_module(spec, weights=state, dtype=torch.float64)
    for module.path in ("sdpa", "plain"):
        got = module(**call_arguments(spec, feeds))
        got = got if isinstance(got, tuple) else (got,)
        assert [tensor.shape for tensor in got] == [array.shape for array in wanted]
        for tensor, array in zip(got, wanted, strict=True):
            np.testing.assert_allclose(tensor.numpy(), array, rtol=0, atol=1e-12)


def wide(**changes):
    """A layer whose sizes all differ, so that no two of them can be mixed up unseen."""
    names = ("B", "S", "T") if changes.get("attends") == "cross" else ("B", "S")
    axes = {name: {"min": 1, "opt": 4, "max": 9} for name in names}
    axes |= {"dynamic": {"P": {"min": 0, "opt": 4, "max": 9}}, "preallocated": {"T": 11}}.get(
        changes.get("cache"), {}
    )
    data = {"name": "wide", "Hq": 6, "Hkv": 2, "D": 8, "E": 40, "axes": axes, **changes}
    return AttentionSpec.from_dict(data)


@pytest.mark.parametrize("name", TINY)
def test_a_layer_equals_its_formula(name):
    assert_equals_textbook(find_spec(name))


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": "padding", "causal": True, "weights": True},
        {"mask": "additive", "causal": True, "bias": False},
        {"mask": "padding", "attends": "cross", "weights": True, "Hkv": 1},
        {"mask": "additive", "attends": "cross", "Hkv": 6},
        {"causal": True, "scale": 0.7, "weights": True},
        {"causal": True, "softcap": 1.3, "window": 3, "weights": True},
        {"mask": "additive", "softcap": 1.3, "bias": False},
        {"mask": "padding", "causal": True, "softcap": 1.3, "window": 4},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_masks_and_options_combine_as_the_formula_says(changes):
    assert_equals_textbook(wide(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": 1},
        {"window": 4, "softcap": 1.3},
        {"rope": {"base": 100.0}, "Hkv": 1},
        {"rope": {"base": 100.0, "dims": 6}, "window": 3, "softcap": 1.3, "Hkv": 6, "bias": False},
        {"scale": 0.7, "softcap": 0.5},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
@pytest.mark.parametrize("cache", ["dynamic", "preallocated"])
def test_a_layer_behind_a_cache_equals_its_formula(cache, changes):
    assert_equals_textbook(wide(cache=cache, causal=True, **changes))


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("top_k", [1, 4, 6])
def test_sparse_heads_are_the_weighted_sum_over_the_chosen_heads(top_k, renormalise):
    options = {"top_k": top_k, "renormalise": renormalise}
    assert_equals_textbook(wide(variant="sparse-heads", sparse_heads=options, mask="padding"))


def test_renormalising_over_all_heads_changes_nothing():
    spec = wide(variant="sparse-heads", sparse_heads={"top_k": 6})
    x = torch.randn(2, 5, spec.E, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    same = replace(spec, sparse_heads=SparseHeads(top_k=6, renormalise=True))
    a, b = (build_module(s, dtype=torch.float64)(x) for s in (spec, same))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_heads_mix_within_their_group_and_the_mlp_mixes_the_groups(groups):
    options = {"groups": groups, "hidden": 11}
    assert_equals_textbook(wide(variant="grouped-mlp", grouped_mlp=options, causal=True))


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_before_the_mlp_a_head_reaches_the_heads_of_its_group_only(groups):
    spec = wide(variant="grouped-mlp", grouped_mlp={"groups": groups, "hidden": 11})
    module = build_module(spec, dtype=torch.float64)
    seen = []
    module.mlp_in.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(1, 1, spec.Hq, spec.D, dtype=torch.float64, generator=generator)
    size = spec.Hq // groups
    for changed in range(spec.Hq):
        other = heads.clone()
        other[:, :, changed] += 1
        for each in (heads, other):
            module.combine(each.flatten(2), None)
        before, after = (rows.unflatten(-1, (spec.Hq, -1)) for rows in seen[-2:])
        reached = (before != after).any(-1).flatten().nonzero().flatten().tolist()
        first = changed // size * size
        assert reached == list(range(first, first + size))


@pytest.mark.parametrize("attends", ["self", "cross"])
def test_head_mix_attends_over_the_heads_of_each_token(attends):
    assert_equals_textbook(wide(variant="head-mix", attends=attends, mask="padding"))
