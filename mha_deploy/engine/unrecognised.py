"""The attentions of a bundle that are no node of its graph, in the verdict on an engine.

An engine is judged by the attention nodes that it was built from. What the export could not write as one node
is in the engine as well, as several kernels, and counts as not fused.
"""

from __future__ import annotations

from dataclasses import replace

from mha_deploy.backends.tensorrt import EngineVerdict, NodeVerdict
from mha_deploy.backends.tensorrt.verdict import DECOMPOSED
from mha_deploy.manifest import Manifest

_NOT_FUSED = " is not fused: "


def with_unrecognised(verdict: EngineVerdict, manifest: Manifest, *, profiles: int) -> EngineVerdict:
    """The verdict on all attentions of a bundle.

    Args:
        verdict: The verdict on the attention nodes of its graph.
        manifest: The manifest of the bundle.
        profiles: How many optimisation profiles the engine has.
    """
    told = [note.partition(_NOT_FUSED)[::2] for note in manifest.notes if _NOT_FUSED in note]
    missing = manifest.spec.attention_count - len(manifest.attention)
    taken = {node.node for node in verdict.nodes}
    nodes = list(verdict.nodes)
    for index in range(missing):
        name, reason = told[index] if index < len(told) else ("attention", "the bundle does not say why")
        name = _free(name, taken)
        taken.add(name)
        nodes += [
            NodeVerdict(
                node=name,
                profile=profile,
                status=DECOMPOSED,
                reason=f"not one Attention node in the graph: {reason}",
                source="graph",
            )
            for profile in range(profiles)
        ]
    return replace(verdict, nodes=tuple(nodes))


def _free(name: str, taken: set[str]) -> str:
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}_{count}"
    return found
