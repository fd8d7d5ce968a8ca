"""What is in a bundle, an engine or an ONNX file, and what a target would make of it; nothing is built."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mha_deploy.bundle.folder import MANIFEST, Bundle
from mha_deploy.options import EngineOptions
from mha_deploy.text import plural

if TYPE_CHECKING:
    import onnx_ir as ir

    from mha_deploy.bundle.manifest import UnfusedRecord
    from mha_deploy.engine.engine import Engine
    from mha_deploy.graph.fuse import UnfusedSoftmax
    from mha_deploy.graph.rules import Eligibility


@dataclass(frozen=True, kw_only=True)
class ForeignPlan:
    """What the bytes of a plan show that has no manifest of this tool."""

    backend: str  # whose plans begin so
    bytes: int
    sha256: str
    kernels: int  # that it names
    attention_kernels: tuple[str, ...]  # those that compute a whole attention
    softmax_kernels: tuple[str, ...]  # those that compute a softmax by itself


@dataclass(frozen=True, kw_only=True)
class GraphTensor:
    """An input or output of an ONNX file; its type, its shape and each of its sizes may not be stated."""

    name: str
    type: str | None  # as NumPy has it
    shape: tuple[int | str | None, ...] | None  # numbers, and names of axes


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What is in a bundle, an engine or an ONNX file.

    Args:
        path: The folder or file.
        bundle: The bundle, if it is one; every hash was compared.
        verified: Whether its manifest was compared with its graph, too.
        engines: The engines of the bundle, or the engine itself.
        misfits: Of an engine: why it cannot run on this machine.
        plan: Of an engine without a manifest of this tool: what its bytes show.
        attention: Of an ONNX file: its attention nodes.
        foreign: Of an ONNX file: domains of operators that are not ONNX's. No engine is built of them.
        fusible: Of an ONNX file: names of the attentions that `md.fuse_file` would make `Attention` nodes.
        unfused: Of an ONNX file: the attentions that it could not, with the reasons.
        inputs: Of an ONNX file: name, type and shape of every input; names in a shape are its axes.
        outputs: The same of its outputs.
        opset: Of an ONNX file: the version of ONNX's operators.
    """

    path: Path
    bundle: Bundle | None = None
    verified: bool = False
    engines: tuple[Engine, ...] = ()
    misfits: tuple[str, ...] = ()
    plan: ForeignPlan | None = None
    attention: tuple[Mapping[str, Any], ...] = ()
    foreign: tuple[str, ...] = ()
    fusible: tuple[str, ...] = ()
    unfused: tuple[UnfusedSoftmax, ...] = ()
    inputs: tuple[GraphTensor, ...] = ()
    outputs: tuple[GraphTensor, ...] = ()
    opset: int | None = None

    def __repr__(self) -> str:
        shown = [(each.name, getattr(self, each.name)) for each in fields(self)]
        return f"<Inspection {', '.join(f'{name}={value!r}' for name, value in shown if value)}>"


def inspect_path(path: Path, *, verify: bool) -> Inspection:
    """Open a bundle, an engine or an ONNX file; with `verify` a bundle's manifest is compared with its graph.

    What reads graphs and engines is imported where there are some: a bundle alone takes no second.
    """
    if path.suffix == ".onnx":
        from mha_deploy.graph.attention_node import attention_nodes
        from mha_deploy.graph.file import foreign_domains, load_graph

        graph = load_graph(path)
        nodes = tuple(node.describe() for node in attention_nodes(graph))
        foreign = tuple(foreign_domains(graph))
        fusible, unfused = ((), ()) if foreign else _without_node(graph)
        return Inspection(
            path=path,
            attention=nodes,
            foreign=foreign,
            fusible=fusible,
            unfused=unfused,
            inputs=tuple(map(_tensor, graph.graph.inputs)),
            outputs=tuple(map(_tensor, graph.graph.outputs)),
            opset=graph.opset_imports.get(""),
        )
    if path.is_file() and (plan := _foreign_plan(path)) is not None:
        return Inspection(path=path, plan=plan)
    if path.suffix == ".engine":
        from mha_deploy.engine.engine import open_engine, reasons_not_to_run

        engine = open_engine(path)
        folder = path.resolve().parent.parent
        if (folder / MANIFEST).is_file():
            engine.check_bundle(folder)
        misfits = tuple(reasons_not_to_run(engine, import_tensorrt=False))
        return Inspection(path=path, engines=(engine,), misfits=misfits)
    if verify:
        from mha_deploy.graph.canonical import open_checked as open_bundle
    else:
        from mha_deploy.bundle.folder import open_bundle
    bundle = open_bundle(path)
    engines: list[Engine] = []
    if any(path.glob("*/*.engine")):
        from mha_deploy.engine.engine import engines_of

        engines = engines_of(path)
    for engine in engines:
        engine.check_bundle(path)
    return Inspection(path=path, bundle=bundle, verified=verify, engines=tuple(engines))


def _foreign_plan(path: Path) -> ForeignPlan | None:
    """What a plan without a manifest shows; None where it has one, or is no plan."""
    from mha_deploy.engine.engine import backend_of_plan, manifest_path, read_plan
    from mha_deploy.output import partial_files
    from mha_deploy.runtime.tensorrt.kernels import kernels_from_plan

    beside = manifest_path(path)
    if beside.exists() or partial_files(beside) or (backend := backend_of_plan(path)) is None:
        return None
    plan = read_plan(path)
    kernels = kernels_from_plan(plan)
    return ForeignPlan(
        backend=backend,
        bytes=len(plan),
        sha256=hashlib.sha256(plan).hexdigest(),
        kernels=len(kernels),
        attention_kernels=tuple(each.name for each in kernels if each.is_fused_attention),
        softmax_kernels=tuple(each.name for each in kernels if each.is_softmax),
    )


def _tensor(value: ir.Value) -> GraphTensor:
    shape = None
    if value.shape is not None:
        shape = tuple(dim if isinstance(dim, int) else dim.value or None for dim in value.shape)
    is_typed = value.dtype is not None and value.dtype.name != "UNDEFINED"
    kind = str(value.dtype.numpy()) if value.dtype is not None and is_typed else None
    return GraphTensor(name=str(value.name), type=kind, shape=shape)


def check_target(source: Bundle | Path, target: str, version: str | None, sm: str) -> list[Eligibility]:
    """What a target would make of every attention of a bundle, or of an ONNX file; see `md.check`."""
    from mha_deploy.engine.engine import default_profiles
    from mha_deploy.engine.lowered import check_eligibility, explained, refuse_foreign_operators
    from mha_deploy.graph.file import load_graph
    from mha_deploy.graph.rules import requested_target
    from mha_deploy.runtime.tensorrt.builder import capabilities_of
    from mha_deploy.runtime.tensorrt.versions import NotFusedError

    targets = [requested_target(target, version, each) for each in capabilities_of(sm) or (None,)]
    graph = load_graph(source.model_path if isinstance(source, Bundle) else source)
    if isinstance(source, Bundle):
        profiles = default_profiles(source.manifest.spec)
        targets = [replace(each, profiles=profiles) for each in targets]
    refuse_foreign_operators(graph)
    hint = "attention in its usual form, or deploy the model with --allow-decomposed: slower"
    if isinstance(source, Bundle):
        # The export recorded why it could not fuse them.
        left, what = list(map(_with_reason, source.manifest.unfused)), "of this bundle {} not fused."
    else:
        fusible, unfused = _without_node(graph)
        left, what = [*fusible, *map(_with_reason, unfused)], "of this file {} not fused yet."
        if fusible:
            hint = f"mha-deploy deploy {source}, which fuses them; `mha-deploy fuse` writes the graph alone"
    if left:
        count, names = plural(len(left), "attention"), ", ".join(left[:3]) + (", …" if left[3:] else "")
        raise NotFusedError(f"{count} {what.format('is' if len(left) == 1 else 'are')}", got=names, hint=hint)
    answers = [found for each in targets for found in check_eligibility(graph, each)]
    return explained(answers, source.manifest, EngineOptions()) if isinstance(source, Bundle) else answers


def _with_reason(each: UnfusedRecord | UnfusedSoftmax) -> str:
    return f"{each.name}: {each.reason.rstrip('.')}"


def _without_node(graph: ir.Model) -> tuple[tuple[str, ...], tuple[UnfusedSoftmax, ...]]:
    """The attentions that are not `Attention` nodes: the names of those that can be, and all others."""
    from mha_deploy.graph.fuse import fuse_attention
    from mha_deploy.runtime.user_code import graph_code

    with graph_code(f"graph {graph.graph.name or 'without a name'}"):
        _, report = fuse_attention(graph.clone(), verify=False)
    return tuple(each.name for each in report.fused), report.unfused
