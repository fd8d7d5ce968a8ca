"""FLOPs and bytes of a graph, layer by layer, at one set of sizes; nothing is run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mha_deploy.analysis.roofline import (
    Analysis,
    GpuPeaks,
    Roofline,
    analyze_layer,
    find_peaks,
    roofline_bound,
)
from mha_deploy.bundle.sizes import USUAL, points_from_text
from mha_deploy.errors import DeployError, SpecError
from mha_deploy.graph.roles import FUSED_GEMMS, MATMULS
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.model.precision import find_precision
from mha_deploy.model.spec import ModelSpec, Sizes, StageCost, cost_of, size_of

if TYPE_CHECKING:
    import onnx_ir as ir

# What is multiplied; all other nodes are taken to be fused into these, so the bound stays one.
_GEMMS = (*MATMULS, "MatMulInteger", "ConvInteger", *FUSED_GEMMS)
_Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class GraphAnalysis(Roofline):
    """The roofline of a graph, node by node."""

    name: str
    others: int  # nodes besides, taken to be fused
    unknown: tuple[str, ...]  # nodes whose sizes are not known

    def __repr__(self) -> str:
        return f"<GraphAnalysis {self.name} {self.shown}>"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; times in seconds, sizes in bytes."""
        rest = {"other_nodes": self.others, "unknown_nodes": list(self.unknown)}
        return {"model": self.name, **self.plain(), **rest}


def analyze_at(
    spec: ModelSpec, graph: ir.Model | None, at: str | None, precision: str, gpu: str | GpuPeaks
) -> Analysis | GraphAnalysis:
    """The roofline at sizes as a user names them: of a catalog layer, or of a graph."""
    if isinstance(spec, AttentionSpec):
        point = points_from_text(spec, at or USUAL)[-1]
        lengths = None if point.past is None else [point.past] * point.sizes["B"]
        return analyze_layer(spec, point.sizes, precision, gpu, lengths=lengths)
    if graph is None:
        raise DeployError("There is no graph to count.", got=spec.name, hint="a bundle, or an ONNX file")
    sizes = spec.sizes("opt") if at in (None, USUAL) else spec.parse_sizes(str(at))
    return analyze_graph(spec.name, graph, sizes, precision, gpu)


def analyze_graph(
    name: str, model: ir.Model, sizes: Sizes, precision: str, gpu: str | GpuPeaks
) -> GraphAnalysis:
    """Count the FLOPs and bytes of every attention and GEMM of a graph, and their roofline bound."""
    peaks, width = gpu if isinstance(gpu, GpuPeaks) else find_peaks(gpu), find_precision(precision).bytes
    shapes = concrete_shapes(model, sizes)
    stages, unknown, others = list[StageCost](), list[str](), 0
    for node in model.graph.all_nodes():
        if node.op_type != "Attention" and node.op_type not in _GEMMS:
            others += 1
            continue
        counted = _cost(node, shapes, width)
        if counted is None:
            unknown.append(node.name or node.op_type)
        else:
            stages.append(counted)
    if not stages:
        problem = f"{name} has no attention and no GEMM whose sizes are known."
        got = f"{len(unknown)} of unknown sizes" if unknown else f"{others} other nodes"
        raise DeployError(problem, got=got, hint="--at with a size for every axis, such as B=1,S=128")
    cost = cost_of(*stages)
    return GraphAnalysis(
        name=name,
        sizes=dict(sizes),
        precision=precision,
        gpu=peaks,
        cost=cost,
        bound=roofline_bound(cost, peaks, precision),
        others=others,
        unknown=tuple(unknown),
    )


def concrete_shapes(model: ir.Model, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """The shape of every value whose sizes are known once its axes have these."""
    import onnx  # a catalog layer needs none of it
    import onnx_ir as ir

    from mha_deploy.graph.fuse.values import infer_sizes
    from mha_deploy.graph.ir import dims

    copy = model.clone()
    for value in copy.graph.inputs:
        found = list[int]()
        for dim in dims(value):
            try:
                found.append(dim if isinstance(dim, int) else size_of(str(dim), sizes))
            except (KeyError, SpecError) as error:
                raise DeployError(
                    "An axis of the graph has no size.",
                    got=f"{dim} of {value.name}",
                    hint="--at with a size for every axis, such as B=1,S=128",
                ) from error
        value.shape = ir.Shape(found)
    made = [value for node in copy.graph.all_nodes() for value in node.outputs]
    for value in made:
        value.shape = None  # sizes over axes are those of no axis now
    try:
        infer_sizes(copy)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        problem, hint = "The tensor sizes in the graph cannot be inferred.", "other sizes in --at"
        raise DeployError(problem, got=str(error).splitlines()[0], hint=hint) from error
    shapes = {
        str(value.name): dims(value) for value in (*copy.graph.inputs, *made) if value.shape is not None
    }
    for name, held in copy.graph.initializers.items():
        if held.const_value is not None:
            shapes[name] = tuple(held.const_value.shape.numpy())
    whole = {name: tuple(each for each in found if isinstance(each, int)) for name, found in shapes.items()}
    return {name: found for name, found in whole.items() if len(found) == len(shapes[name])}


def _cost(node: ir.Node, shapes: _Shapes, width: int) -> StageCost | None:
    """The cost of one node; None where its sizes are not known."""
    taken = [(value, shapes.get(str(value.name))) for value in node.inputs if value is not None]
    made = [shapes.get(str(value.name)) for value in node.outputs if value.uses() or value.is_graph_output()]
    if any(shape is None for _, shape in taken[:3]) or not made or made[0] is None:
        return None
    weights = sum(
        math.prod(shape or ()) for value, shape in taken if value.is_initializer() and len(shape or ()) > 0
    )
    numbers = sum(math.prod(shape) for _, shape in taken if shape) + sum(math.prod(s) for s in made if s)
    flops = (
        _attention_flops(node, taken) if node.op_type == "Attention" else _gemm_flops(node, taken, made[0])
    )
    if flops is None:
        return None
    kind = "attention" if node.op_type == "Attention" else node.op_type
    return StageCost(
        name=node.name or kind, growth=kind, parameters=weights, flops=flops, bytes=numbers * width
    )


def _attention_flops(node: ir.Node, taken: list[tuple[ir.Value, Any]]) -> int | None:
    """Two matmuls of every query with every key, masked or not: 3-D inputs have their heads side by side."""
    (_, q), (_, k), (_, v) = taken[:3]
    past = node.inputs[4] if len(node.inputs) > 4 else None
    known = dict((str(value.name), shape) for value, shape in taken)
    before = 0
    if past is not None:
        shape = known.get(str(past.name))
        if shape is None:
            return None
        before = shape[2]
    if len(q) == 3:
        heads = node.attributes.get("q_num_heads")
        kv_heads = node.attributes.get("kv_num_heads")
        if heads is None or kv_heads is None:
            return None
        groups = heads.as_int() / kv_heads.as_int()
        return int(2 * q[0] * q[1] * (k[1] + before) * (q[2] + v[2] * groups))
    return int(2 * q[0] * q[1] * q[2] * (k[2] + before) * (q[3] + v[3]))


def _gemm_flops(node: ir.Node, taken: list[tuple[ir.Value, Any]], made: tuple[int, ...]) -> int | None:
    first, second = taken[0][1], taken[1][1]
    if node.op_type == "ConvTranspose":  # every number of the input goes into every place of the kernel
        return 2 * math.prod(first) * math.prod(second[1:])
    if node.op_type in ("Conv", "ConvInteger", "FusedConv"):
        return 2 * math.prod(made) * math.prod(second[1:])
    if node.op_type == "Gemm":
        transposed = node.attributes.get("transA")
        return 2 * math.prod(made) * first[0 if transposed is not None and transposed.as_int() else 1]
    if node.op_type == "Einsum":
        equation = node.attributes["equation"].as_string().replace(" ", "").partition("->")[0].split(",")
        letters = {
            letter: size
            for text, (_, shape) in zip(equation, taken, strict=False)
            for letter, size in zip(text, shape, strict=False)
        }
        return 2 * math.prod(letters.values()) if "." not in "".join(equation) else None
    return 2 * math.prod(made) * first[-1]
