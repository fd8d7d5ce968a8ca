"""Check that an exported file is the canonical graph of its spec, and that of its bundle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import singledispatch
from pathlib import Path

import msgspec
import onnx
import onnx_ir as ir

from mha_deploy.bundle.folder import Bundle, open_bundle
from mha_deploy.errors import BundleError, ExportError
from mha_deploy.graph import attention_node as an
from mha_deploy.graph.attention_node import attention_nodes, is_attention, short_dtype
from mha_deploy.graph.file import load_graph
from mha_deploy.graph.ir import dims, input_at, is_op, made_by, nodes_behind, output_at
from mha_deploy.graph.roles import MOVES
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import FLOAT, ModelSpec

# What may be between a projection and its attention: layout, and the rotary embedding.
_LAYOUT_OPS = frozenset({*MOVES, "RotaryEmbedding", "Split", "Slice"})
_STRAY_OPS = frozenset({"Cast", "Expand", "Tile", "Gather"})
_IN_PRECISION = ("MatMul", "Gemm", "Attention", "Gelu")
_CACHE_CHECKS = {
    "dynamic": "past and present keys and values are inputs and outputs of Attention and of the graph",
    "preallocated": "TensorScatter updates the preallocated KV cache, and Attention takes the valid lengths",
}
_FLOATS = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE})


def check_canonical(path: Path, spec: ModelSpec, precision: Precision) -> list[str]:
    """Check that a file is the canonical graph of a spec, else an ExportError; return what was checked."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(
            "The exported file is not valid ONNX.",
            got=str(error).strip(),
            hint="another --opset, or another version of PyTorch",
        ) from error
    return ["onnx.checker with strict shape inference", *check_described(spec, load_graph(path), precision)]


@singledispatch
def check_described(spec: ModelSpec, model: ir.Model, precision: Precision) -> list[str]:
    """Check that a graph is what a spec describes, else an ExportError; return what was checked."""
    _check_interface(model, spec, precision)
    return [
        f"{len(attention_nodes(model))} of {spec.attention_count} attention(s) are one Attention node",
        "inputs and outputs have the names, types and dynamic dimensions of the factory",
    ]


@check_described.register(AttentionSpec)
def _check_layer(spec: AttentionSpec, model: ir.Model, precision: Precision) -> list[str]:
    """Check that a graph is the canonical one of a catalog layer."""
    found = attention_nodes(model)
    if len(found) != spec.attention_count:
        what = f"{spec.name} must have {spec.attention_count} fused attention node(s)."
        raise ExportError(
            what,
            got=f"{len(found)}: {', '.join(node.name for node in found) or 'none'}",
            hint="a layer with one attention",
        )
    # Only attention has a MatMul of two computed tensors.
    matmuls = [node for node in model.graph if is_op(node, "MatMul")]
    unfused = [each for each in matmuls if not any(v is None or v.is_initializer() for v in each.inputs)]
    if unfused:
        raise ExportError(
            "An attention was left unfused.",
            got=", ".join(str(each.name) for each in unfused),
            hint="`mha-deploy check` says why",
        )
    first = found[0]
    # A window has no attribute: it is a mask, and the mask is causal too.
    wanted = (spec.Hq, spec.Hkv, spec.D, spec.causal and spec.window is None)
    got = (first.Hq, first.Hkv, first.D, first.is_causal)
    if got != wanted:
        raise ExportError(
            "The attention node does not have the spec's heads (Hq, Hkv, D, causal).",
            got=got,
            hint="export it again with this version",
        )
    pairs = {
        "scale": (first.softmax_scale or 0.0, spec.softmax_scale),
        "softcap": (first.softcap, spec.softcap or 0.0),
    }
    for name, (number, specified) in pairs.items():
        if not math.isclose(number, specified, rel_tol=1e-6):
            what = f"The attention node does not have the spec's {name}."
            raise ExportError(what, got=number, hint=f"wanted {specified}")
    attentions = [node for node in model.graph if is_attention(node)]
    for stray in (each for node in attentions for each in _neighbours(node)):
        if stray.op_type in _STRAY_OPS:
            raise ExportError(
                f"There is a stray {stray.op_type} beside attention.",
                got=stray.name,
                hint="export it again with this version",
            )
    count, needed = sum(is_op(node, "RotaryEmbedding") for node in model.graph), 2 if spec.rope else 0
    if count != needed:
        raise ExportError(
            f"{spec.name} must have {needed} RotaryEmbedding nodes.",
            got=count,
            hint="export it again with this version",
        )
    cache = _cache_of(attentions[0])
    if cache != spec.cache:
        raise ExportError(
            f"{spec.name} must have a cache of the kind {spec.cache}.",
            got=cache,
            hint="export it again with this version",
        )
    _check_interface(model, spec, precision)
    gate_types = {precision.name, "fp32"} if spec.variant == "sparse-heads" else {precision.name}
    for node in model.graph:
        allowed = {precision.name} if node.op_type in _IN_PRECISION else gate_types
        for value in (*node.inputs, *node.outputs):
            if value is not None and value.dtype in _FLOATS and short_dtype(value.dtype) not in allowed:
                other = f"{value.name} of {node.op_type} {node.name} is {value.dtype}"
                raise ExportError(
                    f"The graph was requested in {precision.name}.",
                    got=other,
                    hint="--precision of the graph, or export it again",
                )
    return [
        f"{spec.attention_count} fused Attention node(s), K and V not repeated",
        "no Cast, Expand, Tile or Gather before or after attention",
        "inputs and outputs have the spec's names, types and dynamic dimensions",
        f"every matmul and weight of the graph is {precision.name}",
        *(["queries and keys each pass one RotaryEmbedding node"] if spec.rope is not None else []),
        *([_CACHE_CHECKS[spec.cache]] if spec.cache != "none" else []),
    ]


def _neighbours(attention: ir.Node) -> Iterator[ir.Node]:
    """The nodes between the projections and Q, K and V, and between attention and the output projection."""
    yield from nodes_behind(
        (input_at(attention, position) for position in (an.Q, an.K, an.V)),
        lambda node: node.inputs[:1] if node.op_type in _LAYOUT_OPS else (),
    )
    after = [attention]
    while after:
        for node, _ in after.pop().outputs[0].uses():
            yield node
            after += [node] if node.op_type in _LAYOUT_OPS else []


def _cache_of(attention: ir.Node) -> str:
    """The kind of the cache between the graph's own inputs and outputs: none, dynamic or preallocated."""

    def are(inputs: list[ir.Value | None], outputs: list[ir.Value | None]) -> bool:
        taken = all(value is not None and value.is_graph_input() for value in inputs)
        return taken and all(value is not None and value.is_graph_output() for value in outputs)

    past = [input_at(attention, at) for at in (an.PAST_KEY, an.PAST_VALUE)]
    if are(past, [output_at(attention, at) for at in (an.PRESENT_KEY, an.PRESENT_VALUE)]):
        return "dynamic"
    updated = [input_at(attention, at) for at in (an.K, an.V)]
    caches = [input_at(made_by(value, "TensorScatter"), 0) for value in updated]
    counted = input_at(attention, an.NONPAD_KV_SEQLEN) is not None
    return "preallocated" if counted and are(caches, updated) else "none"


def _check_interface(model: ir.Model, spec: ModelSpec, precision: Precision) -> None:
    """Check that a graph has the inputs and outputs of a spec: names, types and dimensions."""
    kinds = {FLOAT: precision.name, "float32": "fp32", "float64": "fp64"}
    for values, tensors in ((model.graph.inputs, spec.inputs), (model.graph.outputs, spec.outputs)):
        wanted = [(t.name, kinds.get(t.kind, t.kind), t.dims) for t in tensors]
        got = [(v.name, short_dtype(v.dtype), dims(v)) for v in values]
        if got != wanted:
            what = "The graph does not have the spec's inputs or outputs."
            raise ExportError(what, got=got, hint=f"wanted {wanted}")


# -- The manifest of a bundle: what the graph states is derived, not believed --------------------------


def open_checked(path: Path) -> Bundle:
    """Open a bundle whose files have the hashes of its manifest, and whose manifest describes its graph."""
    bundle = open_bundle(path)
    check_graph(bundle)
    return bundle


def check_graph(bundle: Bundle) -> ir.Model:
    """Refuse a bundle whose manifest does not describe its graph, and return the graph.

    Its hashes must have been checked before. Attention records, operator set, inputs, outputs and the
    attributes of a catalog layer must be those of the graph, and all its weights must be in listed files.
    """
    manifest = bundle.manifest
    model = load_graph(bundle.model_path, files=manifest.files)
    if model.opset_imports.get("") != manifest.opset:
        raise _misfit(f"opset {manifest.opset}, not {model.opset_imports.get('')}")
    derived = msgspec.json.decode(msgspec.json.encode([node.describe() for node in attention_nodes(model)]))
    written = msgspec.json.decode(msgspec.json.encode(manifest.attention))
    recorded = [{key: value for key, value in record.items() if key != "place"} for record in written]
    if len(derived) != len(recorded):
        raise _misfit(f"{len(recorded)} attentions, not {len(derived)}")
    for found, record in zip(derived, recorded, strict=True):
        for key in sorted(found.keys() | record.keys()):
            if found.get(key) != record.get(key):
                raise _misfit(f"{key} = {record.get(key)} of {record['name']}, not {found.get(key)}")
    spec = manifest.spec
    try:
        check_described(spec, model, manifest.precision)
    except ExportError as error:
        raise _misfit(error.in_one_line) from error
    if spec.attention_count < len(derived):
        raise _misfit(f"{spec.attention_count} attentions in all, not {len(derived)} or more")
    return model


def _misfit(what: str) -> BundleError:
    return BundleError("The manifest does not describe the graph.", got=what, hint="export again")
