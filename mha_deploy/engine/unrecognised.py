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


def unrecognised(manifest: Manifest) -> dict[str, str]:
    """The attentions of a bundle that are no node of its graph, by names of their own, with the reasons."""
    reasons = [note.partition(_NOT_FUSED)[::2] for note in manifest.notes if _NOT_FUSED in note]
    found: dict[str, str] = {}
    taken = {str(node["name"]) for node in manifest.attention}
    for index in range(manifest.spec.attention_count - len(manifest.attention)):
        name, reason = reasons[index] if index < len(reasons) else ("attention", "no reason is recorded")
        free, count = name, 1
        while free in taken or free in found:
            count += 1
            free = f"{name}_{count}"
        found[free] = reason
    return found


def with_unrecognised(verdict: EngineVerdict, manifest: Manifest, *, profiles: int) -> EngineVerdict:
    """The verdict on all attentions of a bundle.

    Args:
        verdict: The verdict on the attention nodes of its graph.
        manifest: The manifest of the bundle.
        profiles: How many optimisation profiles the engine has.
    """
    left = [
        NodeVerdict(
            node=name,
            profile=profile,
            status=DECOMPOSED,
            reason=f"not one Attention node in the graph: {reason}",
            source="graph",
        )
        for name, reason in unrecognised(manifest).items()
        for profile in range(profiles)
    ]
    return replace(verdict, nodes=(*verdict.nodes, *left))
