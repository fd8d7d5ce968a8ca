"""Compare the manifest of a bundle with its graph: what the graph says is derived, not believed."""

from __future__ import annotations

import msgspec
import onnx_ir as ir

from mha_deploy.bundle.folder import Bundle
from mha_deploy.errors import BundleError, ExportError
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.canonical import check_interface, check_layer
from mha_deploy.graph.file import load_graph


def check_graph(bundle: Bundle) -> ir.Model:
    """Refuse a bundle whose manifest does not describe its graph, and return the graph.

    Its hashes must have been checked before. Attention records, operator set, inputs, outputs and the
    attributes of a catalog layer must be those of the graph, and all its weights must be in listed files.

    Raises:
        BundleError: The manifest does not fit the graph; the error names the first difference.
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
        if spec.layer is not None:
            check_layer(model, spec.layer, manifest.precision)
        else:
            check_interface(model, spec, manifest.precision)
    except ExportError as error:
        raise _misfit(error.in_one_line) from error
    if spec.attention_count < len(derived):
        raise _misfit(f"{spec.attention_count} attentions in all, not {len(derived)} or more")
    return model


def _misfit(what: str) -> BundleError:
    return BundleError("The manifest does not describe the graph.", got=what, hint="export again")
