"""Fewer heads: the least needed ones go, with their slices of the weights, and the loss is its cost."""

import cached_models
import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator
from quantized_models import HEADS, WIDTH, multihead, samples, transformer, weights

import mha_deploy as md
from mha_deploy.model.spec import Axis

OPTIONS = {"golden": ("opt",), "axes": {"B": "1:2:2", "S": "1:8:16"}}
SIZE = WIDTH // HEADS


def with_twins():
    """The weights with head 2 equal to head 0, but for its part of the output projection."""
    found = {name: array.copy() for name, array in weights().items()}
    for name in "qkv":
        found[name][:, 2 * SIZE : 3 * SIZE] = found[name][:, :SIZE]
    return found


def outputs(path):
    run = ReferenceEvaluator(str(path))
    return np.concatenate([run.run(None, each)[0] for each in samples(3)[1::2]])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("form", ["plain", "packed", "split"])
def test_one_of_two_equal_heads_goes_without_loss(tmp_path, form):
    how = {} if form == "plain" else {form: True}
    model = transformer(tmp_path / "twins.onnx", changed=with_twins(), **how)
    bundle = md.prune(model, tmp_path / "out", heads="auto", max_loss=1e-4, data=samples(3), **OPTIONS)
    loss = bundle.manifest.loss
    gone = [(each.name, each.heads) for each in loss.layers if each.is_compressed]
    assert gone in ([("attention", (0, 0))], [("attention", (2, 2))])
    assert loss.worst < 1e-5
    assert bundle.manifest.attention[0]["Hq"] == HEADS - 1
    np.testing.assert_allclose(outputs(bundle.path / "source.onnx"), outputs(model), atol=1e-4)
    graph = onnx.load(bundle.path / "source.onnx").graph
    shapes = sorted(tuple(each.dims) for each in graph.initializer)
    assert shapes.count((WIDTH, WIDTH - SIZE)) == 3
    assert shapes.count((WIDTH - SIZE, WIDTH)) == 1
    if form == "plain":
        assert md.validate(bundle, latency=False).passed


def as_the_older_exporter_writes_it(path):
    """Equal weights through Identity, and views with sizes that the graph computes."""
    model = onnx.load(path)
    kept = [each for each in model.graph.node if each.name != "attention"]
    (attention,) = (each for each in model.graph.node if each.name == "attention")
    at = next(i for i, each in enumerate(kept) if "apart" in each.input)
    attention.output[0] = "heads.before"
    views = [
        helper.make_node("Shape", ["heads.before"], ["heads.sizes"]),
        helper.make_node("Reshape", ["heads.before", "heads.view"], ["apart"]),
    ]
    same = helper.make_node("Identity", ["q.w"], ["q.same"])
    kept[0].input[1] = "q.same"
    del model.graph.node[:]
    model.graph.node.extend([same, *kept[:at], attention, *views, *kept[at:]])
    sizes = np.array([0, HEADS, 0, SIZE])
    model.graph.initializer.append(onnx.numpy_helper.from_array(sizes, "heads.view"))
    onnx.save(model, path)
    return path


def test_what_changes_nothing_is_in_no_way(tmp_path):
    model = as_the_older_exporter_writes_it(
        transformer(tmp_path / "twins.onnx", changed=with_twins(), split=True)
    )
    bundle = md.prune(model, tmp_path / "out", heads="auto", max_loss=1e-4, data=samples(3), **OPTIONS)
    assert bundle.manifest.attention[0]["Hq"] == HEADS - 1
    np.testing.assert_allclose(outputs(bundle.path / "source.onnx"), outputs(model), atol=1e-4)


def with_scaled_queries(path):
    """Whisper and BART multiply the projected queries by a number."""
    model = onnx.load(path)
    projection = next(each for each in model.graph.node if each.name == "q")
    projection.output[0] = "q.before"
    model.graph.node.insert(1, helper.make_node("Mul", ["q.before", "q.factor"], ["q.y"], "q_scaled"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "q.factor"))
    onnx.save(model, path)
    return path


def test_a_number_that_scales_the_queries_is_in_no_way(tmp_path):
    model = with_scaled_queries(transformer(tmp_path / "twins.onnx", changed=with_twins(), split=True))
    bundle = md.prune(model, tmp_path / "out", heads="auto", max_loss=1e-4, data=samples(3), **OPTIONS)
    assert bundle.manifest.attention[0]["Hq"] == HEADS - 1
    np.testing.assert_allclose(outputs(bundle.path / "source.onnx"), outputs(model), atol=1e-4)


def test_columns_are_found_in_any_layout(tmp_path):
    """In that of `nn.MultiheadAttention`: lengths first, and heads as a part of the batch.

    The projection of all heads goes, although sizes of a mask are read from it.
    """
    model = multihead(tmp_path / "twins.onnx", changed=with_twins())
    bundle = md.prune(model, tmp_path / "out", heads="auto", max_loss=1e-4, data=samples(3), **OPTIONS)
    assert bundle.manifest.attention[0]["Hq"] == HEADS - 1
    np.testing.assert_allclose(outputs(bundle.path / "source.onnx"), outputs(model), atol=1e-4)
    held = onnx.load(bundle.path / "source.onnx").graph.initializer
    shapes = sorted(tuple(each.dims) for each in held if len(each.dims) == 2)
    assert shapes == [(WIDTH - SIZE, WIDTH), *[(WIDTH, WIDTH - SIZE)] * 3]


def with_packed_weights(path):
    """Let the graph take a weight from a packed one, as that of a cross attention in PyTorch."""
    model = onnx.load(path)
    own = next(each for each in model.graph.initializer if each.name == "qkv.w")
    packed = np.concatenate([onnx.numpy_helper.to_array(own)] * 2)
    model.graph.initializer.remove(own)
    model.graph.initializer.append(onnx.numpy_helper.from_array(packed, "packed.w"))
    split = helper.make_node("Split", ["packed.w"], ["qkv.w", "other.w"], "split", axis=0, num_outputs=2)
    model.graph.node.insert(0, split)
    onnx.save(model, path)
    return path


@pytest.mark.slow
def test_a_weight_that_the_graph_takes_from_a_packed_one_is_a_weight(tmp_path):
    model = with_packed_weights(multihead(tmp_path / "packed.onnx", changed=with_twins()))
    bundle = md.prune(model, tmp_path / "out", heads="auto", max_loss=1e-4, data=samples(3), **OPTIONS)
    assert bundle.manifest.attention[0]["Hq"] == HEADS - 1
    whole = md.export(model, tmp_path / "int8", precision="int8", data=samples(3), **OPTIONS)
    assert "qkv" in {each.name for each in whole.manifest.loss.layers}


def test_a_head_that_is_needed_does_not_go(tmp_path):
    model = transformer(tmp_path / "model.onnx")
    with pytest.raises(md.DeployError) as refused:
        md.prune(model, tmp_path / "out", heads="auto", max_loss=1e-4, data=samples(3), **OPTIONS)
    assert refused.value.exit_code == 1
    assert not (tmp_path / "out").exists()


def test_heads_without_a_limit_are_refused_before_the_work_begins(tmp_path):
    steps = []
    with pytest.raises(md.DeployError, match="limit"):
        md.prune("tiny-mha", tmp_path / "out", heads="auto", on_step=lambda name, *_: steps.append(name))
    assert steps == []


@pytest.mark.parametrize("wanted", [{"heads": 3}, {"heads": 4}, {"heads": "9"}, {"kv_heads": 3}], ids=str)
def test_numbers_that_a_layer_cannot_have_are_refused_before_it_is_traced(tmp_path, wanted):
    steps = []
    with pytest.raises(md.DeployError):
        md.prune("tiny-gqa", tmp_path / "out", on_step=lambda name, *_: steps.append(name), **wanted)
    assert steps == []


def test_the_number_of_heads_and_its_loss(tmp_path):
    model = transformer(tmp_path / "model.onnx")
    bundle = md.prune(model, tmp_path / "out", heads=2, data=samples(3), **OPTIONS)
    got, true = outputs(bundle.path / "source.onnx"), outputs(model)
    loss = bundle.manifest.loss
    assert bundle.manifest.attention[0]["Hq"] == 2
    assert sum(each.is_compressed for each in loss.layers) == 2
    assert loss.worst == pytest.approx(np.linalg.norm(got - true) / np.linalg.norm(true), rel=1e-3)


def test_heads_that_share_keys_go_together(tmp_path):
    bundle = md.prune("tiny-gqa", tmp_path / "out", heads=2, golden=("opt",))
    assert (bundle.manifest.attention[0]["Hq"], bundle.manifest.attention[0]["Hkv"]) == (2, 1)
    assert [each.heads for each in bundle.manifest.loss.layers] == [(0, 1), (2, 3)]
    assert {each.name for each in bundle.manifest.loss.layers} <= {
        each["name"] for each in bundle.manifest.attention
    }


@pytest.mark.parametrize("heads", [0, 5, "few", 4])
def test_other_numbers_are_refused(tmp_path, heads):
    """Also those that the model has already."""
    model = transformer(tmp_path / "model.onnx")
    with pytest.raises(md.DeployError) as caught:
        md.prune(model, tmp_path / "out", heads=heads, data=samples(1), **OPTIONS)
    assert caught.value.exit_code == 2
    if heads == 4:
        with pytest.raises(md.DeployError, match="4"):
            md.prune(model, tmp_path / "out", kv_heads=heads, data=samples(1), **OPTIONS)
    assert not (tmp_path / "out").exists()


def with_pairs():
    """The weights with the keys and values of heads 2 and 3 equal to those of heads 1 and 0."""
    found = {name: array.copy() for name, array in weights().items()}
    for name in "kv":
        for head, like in ((2, 1), (3, 0)):
            found[name][:, head * SIZE : (head + 1) * SIZE] = found[name][:, like * SIZE : (like + 1) * SIZE]
    return found


@pytest.mark.parametrize("form", ["plain", "split"])
def test_equal_key_value_heads_are_pooled_without_loss(tmp_path, form):
    how = {} if form == "plain" else {form: True}
    model = transformer(tmp_path / "pairs.onnx", changed=with_pairs(), **how)
    bundle = md.prune(model, tmp_path / "out", kv_heads=2, max_loss=1e-4, data=samples(3), **OPTIONS)
    loss, (node,) = bundle.manifest.loss, bundle.manifest.attention
    assert (loss.what, node["Hq"], node["Hkv"]) == ("kv-heads", HEADS, 2)
    assert loss.worst < 1e-5
    np.testing.assert_allclose(outputs(bundle.path / "source.onnx"), outputs(model), atol=1e-4)
    shapes = sorted(tuple(each.dims) for each in onnx.load(bundle.path / "source.onnx").graph.initializer)
    assert shapes.count((WIDTH, WIDTH // 2)) == 3  # keys, values, and the MLP as before


def test_pooling_that_costs_too_much_is_refused(tmp_path):
    model = transformer(tmp_path / "model.onnx")
    with pytest.raises(md.DeployError) as refused:
        md.prune(model, tmp_path / "out", kv_heads=1, max_loss=1e-4, data=samples(2), **OPTIONS)
    assert refused.value.exit_code == 1
    for wrong in ({"kv_heads": 3}, {"kv_heads": 2, "heads": 2}, {}):
        with pytest.raises(md.DeployError) as refused:
            md.prune(model, tmp_path / "out", data=samples(2), **wrong, **OPTIONS)
        assert refused.value.exit_code == 2


def test_keys_beside_those_of_an_input_are_a_cache_whose_heads_stay(tmp_path):
    model = onnx.load(transformer(tmp_path / "model.onnx", split=True))
    (node,) = [each for each in model.graph.node if each.op_type == "Attention"]
    place = list(model.graph.node).index(node)
    for at, name in ((1, "keys"), (2, "values")):
        past = helper.make_tensor_value_info(f"past_{name}", onnx.TensorProto.FLOAT, ["B", HEADS, "P", SIZE])
        model.graph.input.append(past)
        joined = helper.make_node("Concat", [past.name, node.input[at]], [name], axis=2)
        node.input[at] = name
        model.graph.node.insert(place, joined)
    onnx.save(model, tmp_path / "cached.onnx")
    with pytest.raises(md.DeployError, match="cannot be removed") as refused:
        md.prune(tmp_path / "cached.onnx", tmp_path / "out", heads=2)
    assert "KV cache" in refused.value.got


@pytest.mark.slow
def test_a_preallocated_cache_is_the_reason_why_heads_stay(tmp_path):
    with pytest.raises(md.DeployError, match="KV cache"):
        md.prune(md.load_model(cached_models.in_place()), tmp_path / "out", heads=1)


def test_auto_steps_back_where_held_out_samples_lose_more(tmp_path):
    """Every other sample is zeros, of which no head is needed; the rest show what a head costs."""
    model, data = transformer(tmp_path / "m.onnx", changed=weights()), samples(6)
    for each in data[::2]:
        each["x"] = np.zeros_like(each["x"])
    alone = md.prune(model, tmp_path / "all", heads=HEADS - 1, data=data, **OPTIONS).manifest.loss.worst
    bundle = md.prune(model, tmp_path / "out", heads="auto", max_loss=1.2 * alone, data=data, **OPTIONS)
    assert bundle.manifest.loss.worst <= 1.2 * alone
    assert bundle.manifest.attention[0]["Hq"] < HEADS
    (chosen,) = (each for each in bundle.manifest.loss.search if each.is_chosen)
    assert chosen.compressed == HEADS - bundle.manifest.attention[0]["Hq"]


class WithHistory(torch.nn.Module):
    """Attention whose heads can go, beside an output that grows like a cache."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x, past):
        q, k, v = (each(x).unflatten(-1, (4, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return {"y": self.out(y), "history": torch.cat([past, x], 1)}


@pytest.mark.slow
def test_a_range_stays_as_it_was_asked_for_where_heads_go(tmp_path):
    inputs = {
        "x": md.Example(torch.randn(2, 3, 16), "B", "S"),
        "past": md.Example(torch.randn(2, 4, 16), "B", "P"),
    }
    axes = {"B": "1:2:2", "S": "1:3:6", "P": "2:4:9"}
    model = md.load_model(md.Deployable(module=WithHistory(), inputs=inputs, axes=axes))
    manifest = md.prune(model, tmp_path / "out", heads=2, golden=("opt",)).manifest
    assert manifest.spec.axes["P"] == Axis(min=2, opt=4, max=9)
    assert not manifest.shrunk
