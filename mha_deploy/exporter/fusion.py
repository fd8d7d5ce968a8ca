"""ONNX models of any origin with every attention as one node: in memory, or from file to file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import onnx
import onnx_ir as ir

from mha_deploy.errors import DeployError
from mha_deploy.graph.file import commit_graph, graph_from_proto, load_graph, weight_files
from mha_deploy.graph.fuse import FuseReport, fuse_attention
from mha_deploy.graph.ir import paused_collections
from mha_deploy.graph.valid import normalize
from mha_deploy.model.source import describe
from mha_deploy.output import check_file, is_nobodys
from mha_deploy.runtime.user_code import graph_code

if TYPE_CHECKING:
    AnyModel = TypeVar("AnyModel", onnx.ModelProto, ir.Model)


def fuse_model(model: AnyModel, *, verify: bool) -> tuple[AnyModel, FuseReport]:
    """A model with its attention fused, of the same type, and the report."""
    if isinstance(model, onnx.ModelProto):
        with paused_collections():
            made, report = _fused(lambda: graph_from_proto(model), verify=verify)
            return ir.to_proto(made), report
    if isinstance(model, ir.Model):
        return _fused(lambda: normalize(model.clone()), verify=verify)
    what, hint = "This is not an ONNX model.", "onnx.load(path), or onnx_ir.load(path)"
    raise DeployError(what, got=describe(model), hint=hint)


@paused_collections()
def fuse_file(source: Path, output: Path, *, overwrite: bool, verify: bool) -> FuseReport:
    """Fuse the attention of a file into another one; large weights go to `OUTPUT.data` beside it."""
    if output.is_file() and not overwrite:
        raise DeployError("Output already exists.", got=output, hint="--overwrite")
    # The weights of the source may be read until the new file is whole.
    real = check_file(output, is_nobodys, overwrite=overwrite, inputs=[source])
    if not real.parent.is_dir():
        hint = "create it, or another -o"
        raise DeployError("The folder of the output does not exist.", got=output.parent, hint=hint)
    original = load_graph(source)
    beside, needed = real.with_name(f"{real.name}.data"), weight_files(original)
    if taken := [path for path in (real, beside) if path.resolve() in needed]:
        what = "The output could overwrite weights of the input."
        raise DeployError(what, got=taken[0], hint="write elsewhere")
    if beside.is_file() and not overwrite:
        raise DeployError("The file for the weights already exists.", got=beside, hint="--overwrite")
    for path in (real, beside):
        check_file(path, is_nobodys, overwrite=overwrite, inputs=[source, *needed], within=real.parent)
    model, report = _fused(lambda: load_graph(source), original, verify=verify)
    commit_graph(model, real)
    return report


def _fused(
    read: Callable[[], ir.Model], graph: ir.Model | None = None, *, verify: bool
) -> tuple[ir.Model, FuseReport]:
    graph = read() if graph is None else graph
    with graph_code(f"graph {graph.graph.name or 'without a name'}"):
        return fuse_attention(graph, verify=verify, again=read)
