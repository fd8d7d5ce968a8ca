"""The heads of an attention side by side: of a catalog layer in PyTorch, of a bundle in its graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mha_deploy import runtime
from mha_deploy.analysis.similarity import (
    HeadSimilarity,
    head_similarity,
    random_feeds,
    read_inputs,
    similarity_from_heads,
)
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.folder import Bundle
from mha_deploy.bundle.sizes import USUAL, points_from_text
from mha_deploy.errors import DeployError, nearest
from mha_deploy.graph.attention_node import by_head, is_attention, read_attention
from mha_deploy.graph.file import load_graph, with_outputs
from mha_deploy.model.layer import AttentionSpec, key_length


def compare_layer_heads(
    spec: AttentionSpec, at: str | None, inputs: Path | None, *, seed: int, **weights: Any
) -> HeadSimilarity:
    """Compare the heads of a catalog layer, on random inputs or those of an .npz file."""
    sizes = points_from_text(spec, at or USUAL)[-1].sizes
    if spec.cache != "none":  # the heads of the whole sequence that the KV cache comes from
        sizes = {"B": sizes["B"], "S": key_length(spec, sizes)}
        spec = spec.without_cache()
    feeds = random_feeds(spec, sizes, seed) if inputs is None else read_inputs(inputs, spec)
    return head_similarity(spec, feeds, seed=seed, **weights)


def compare_bundle_heads(bundle: Bundle, attention: str | None) -> HeadSimilarity:
    """Compare the heads of every attention in the graph of a bundle, on its first golden case."""
    model = load_graph(bundle.model_path)
    nodes = {str(node.name): node for node in model.graph if is_attention(node)}
    if not nodes or attention not in (None, *nodes):
        wrong = attention or f"{bundle.manifest.spec.name} has no Attention node"
        hint = nearest(wrong, nodes) if nodes else "a bundle with attention"
        raise DeployError("There is no such attention.", got=wrong, hint=hint)
    outputs = {name: str(node.outputs[0].name) for name, node in nodes.items()}
    cpu = runtime.available_cpu_runtime(bundle.manifest.precision)
    with runtime.open_runner(cpu, with_outputs(model, outputs.values())) as runner:
        got = runner.run(next(iter(golden_cases(bundle))).inputs)
    found = {}
    for name, node in nodes.items():
        heads = by_head(got[outputs[name]], read_attention(node).Hq).swapaxes(1, 2)  # [B, S, Hq, D]
        found[name] = similarity_from_heads(heads.reshape(-1, *heads.shape[2:]))
    shown = attention or next(iter(found))
    others = {name: each.redundancy for name, each in found.items() if name != shown}
    return replace(found[shown], attention=shown, others=others)
