"""Valid in, valid out: the one form in which every pass gets a graph, and the check of what a pass makes.

ONNX Runtime loads more than ONNX's checker allows: nodes in any order, sparse weights, functions of another
opset. What can be written in the plain form is, on loading; the rest is refused with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
from onnx import GraphProto, SparseTensorProto, TensorProto, ValueInfoProto
from onnx_ir.passes.common import InlinePass, RemoveInitializersFromInputsPass

from mha_deploy.errors import DeployError
from mha_deploy.graph.ir import (
    HALVES,
    NodeBuilder,
    infer_shapes,
    inner_graphs,
    input_at,
    is_op,
    light_proto,
    nodes_in,
    prefix_within,
    prefixes_in,
    replace_node,
    with_weights_of,
)
from mha_deploy.text import printable

OLDEST_OPSET = 7
"""The oldest version of ONNX's operators that is read; it is that of ONNX Runtime."""

_ALIAS = "ai.onnx"
_WEIGHTS_ARE_NO_INPUTS = 4  # since this version of ONNX's file format
_MOST_DENSE = 1 << 31  # bytes of a sparse tensor, written out
_QUICKLY_CHECKED = 1 << 28  # bytes of a file
_LONGEST = 400  # characters of a reason


def refusal(why: str) -> DeployError:
    """The error for a file that is not valid."""
    hint = "export it again, or onnx.checker.check_model"
    return DeployError("The ONNX model is not valid.", got=printable(why), hint=hint)


# -- The plain form --------------------------------------------------------------------------------


def normalize(model: ir.Model, proto: onnx.ModelProto | None = None) -> ir.Model:
    """The model in the plain form, which it may be changed to; refused where it is not valid ONNX.

    Its nodes stand in the order of execution, ONNX's own operators have one domain and one version, and
    weights of old files are not inputs. Where the model was read from `proto`, that is checked if it can be,
    which is quicker.
    """
    for imports in (model.opset_imports, *(each.opset_imports for each in model.functions.values())):
        _join_aliases(imports)
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for body in bodies:
        sort(body)
    if model.ir_version < _WEIGHTS_ARE_NO_INPUTS:
        RemoveInitializersFromInputsPass()(model)
        model.ir_version = _WEIGHTS_ARE_NO_INPUTS
    for node in model.graph.all_nodes():
        model.opset_imports.setdefault(node.domain, 1)
    if any(_differs(model, function) for function in model.functions.values()):
        model = _with_functions_inlined(model)
    model.graph.name = model.graph.name or "main"
    _write_out_norms(model)
    if any(value.type is None for value in model.graph.outputs):
        infer_shapes(model)
    if model.opset_imports.get("", 1) < OLDEST_OPSET:
        return model  # refused by its age, where that matters
    is_checked = proto is not None and proto.ByteSize() < _QUICKLY_CHECKED and _problem(proto) is None
    if not is_checked and (problem := why_invalid(model)) is not None:
        raise refusal(problem)
    return model


_LAYER_NORM, _RMS_NORM = "LayerNormalization", "SimplifiedLayerNormalization"
_LAYER_NORM_SINCE, _AXES_ARE_AN_INPUT, _AXES_MAY_BE_NEGATIVE = 17, 18, 11
_NORMED = (*HALVES, ir.DataType.FLOAT)


def _write_out_norms(model: ir.Model) -> None:
    """Write out the norms that ONNX Runtime's optimizer puts into ONNX's operator set, which has none there.

    What is used otherwise than the optimizer does is left, and is then not valid.
    """
    opset = model.opset_imports.get("", 1)
    names = {_RMS_NORM, *([_LAYER_NORM] if opset < _LAYER_NORM_SINCE else [])}
    names -= {each.name for each in model.functions.values() if each.domain == ""}  # its own of that name
    norms = [node for node in nodes_in(model.graph) if is_op(node, *names)]
    prefix = prefix_within("norm", prefixes_in(model)) if norms else ""
    for at, node in enumerate(norms, 1):
        x, scale, bias = (input_at(node, place) for place in range(3))
        axis = node.attributes.get_int("axis", -1)
        statistics = any(value.uses() or value.is_graph_output() for value in node.outputs[1:])
        is_float = node.attributes.get_int("stash_type", 1) == ir.DataType.FLOAT
        kind = None if scale is None else scale.dtype  # the type of the result, too
        if x is None or scale is None or kind not in _NORMED or axis >= 0:
            continue
        if statistics or not is_float or opset < _AXES_MAY_BE_NEGATIVE:
            continue
        builder = NodeBuilder(f"{prefix}/{at}")
        axes = list(range(axis, 0))

        def mean(value: ir.Value, b: NodeBuilder = builder, axes: Sequence[int] = axes) -> ir.Value:
            if opset < _AXES_ARE_AN_INPUT:
                return b.op("ReduceMean", value, axes=list(axes))
            return b.op("ReduceMean", value, b.ints(*axes))

        wide = builder.cast(x, ir.DataType.FLOAT)
        centered = wide if node.op_type == _RMS_NORM else builder.op("Sub", wide, mean(wide))
        epsilon = builder.constant(node.attributes.get_float("epsilon", 1e-5), ir.DataType.FLOAT)
        root = builder.op("Sqrt", builder.op("Add", mean(builder.op("Mul", centered, centered)), epsilon))
        result = builder.op("Div", centered, root)
        result = result if kind == ir.DataType.FLOAT else builder.cast(result, kind)
        result = builder.op("Mul", result, scale)
        replace_node(node, builder, {0: result if bias is None else builder.op("Add", result, bias)})


def _join_aliases(imports: dict[str, int]) -> None:
    """Name ONNX's own operators by the empty domain; onnx_ir does so for the nodes."""
    version = imports.pop(_ALIAS, None)
    if version is not None and imports.setdefault("", version) != version:
        raise refusal(f"it imports two versions of ONNX's operators, {imports['']} and {version}")


def sort(body: ir.Graph | ir.Function) -> None:
    """Bring the nodes into the order of execution; where they stand in it, that is quick to see."""
    if not _is_sorted(body, set()):
        body.sort()


def _is_sorted(body: ir.Graph | ir.Function, before: set[ir.Node]) -> bool:
    """Whether every node stands behind what it reads; `before` are the nodes that stand before the body."""
    for node in body:
        read: Sequence[ir.Value | None] = node.inputs
        for inner in inner_graphs(node):
            if not _is_sorted(inner, before):
                return False
            read = [*read, *inner.outputs]
        for value in read:
            made = None if value is None else value.producer()
            if made is not None and made not in before:
                return False
        before.add(node)
    return True


def _differs(model: ir.Model, function: ir.Function) -> bool:
    """Whether a function has another version of an operator set than the model, and an operator that differs.

    Where none does, the function gets the version of the model.
    """
    imports, own = model.opset_imports, function.opset_imports
    others = {name for name, each in own.items() if imports.setdefault(name, each) != each}
    if others == {""} and all(_is_the_same(node, own[""], imports[""]) for node in function.all_nodes()):
        own[""] = imports[""]
        for node in function.all_nodes():
            node.version = None
        return False
    return bool(others)


def _is_the_same(node: ir.Node, one: int, other: int) -> bool:
    """Whether an operator of ONNX's own is the same in two versions."""
    if node.domain != "":
        return True
    try:
        since = {onnx.defs.get_schema(node.op_type, each, "").since_version for each in (one, other)}
    except onnx.defs.SchemaError:
        return False
    return len(since) == 1


def _with_functions_inlined(model: ir.Model) -> ir.Model:
    try:
        return with_weights_of(onnx.inliner.inline_local_functions(light_proto(model), True), model)
    except Exception as error:  # the inliner raises RuntimeError and types of its own
        raise refusal(f"its functions are of other opsets and cannot be converted: {error}") from error


def inline_functions(model: ir.Model) -> ir.Model:
    """Write the bodies of functions in the place of their calls; changes the model, which is returned."""
    if model.functions:
        try:
            InlinePass()(model)
        except Exception as error:  # what onnx_ir raises depends on what is wrong
            why = error.__cause__ or error
            raise refusal(f"its functions cannot be inlined: {why}") from error
    return model


# -- Sparse weights, which have to be written out before anything else reads the file --------------


def has_sparse_tensors(graph: GraphProto) -> bool:
    """Whether a graph, or one in it, has sparse weights or constants."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("sparse_tensor"):
                return True
            if any(map(has_sparse_tensors, (attribute.g, *attribute.graphs))):
                return True
    return bool(graph.sparse_initializer)


def write_out_sparse_tensors(graph: GraphProto) -> None:
    """Replace sparse weights and constants by dense ones, as ONNX Runtime does; changes the graph."""
    graph.initializer.extend(map(_dense, graph.sparse_initializer))
    del graph.sparse_initializer[:]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("sparse_tensor") and (node.op_type, attribute.name) == CONSTANT:
                tensor = _dense(attribute.sparse_tensor)
                attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                write_out_sparse_tensors(inner)


CONSTANT = ("Constant", "sparse_value")


def _dense(sparse: SparseTensorProto) -> TensorProto:
    values, name = sparse.values, sparse.values.name
    size = math.prod(sparse.dims)
    stored = (values, sparse.indices)
    if any(each.data_location == TensorProto.EXTERNAL or len(each.dims) > 2 for each in stored):
        raise refusal(f"the sparse weights {name} are not stored in the file")
    if any(each < 0 for each in sparse.dims) or size > _MOST_DENSE or math.prod(values.dims) > size:
        raise refusal(f"the sparse weights {name} have the dimensions {list(sparse.dims)[:8]}")
    try:
        numbers, places = (onnx.numpy_helper.to_array(each) for each in stored)
        if size * numbers.itemsize > _MOST_DENSE:
            raise refusal(f"the sparse weights {name} would need more than {_MOST_DENSE:,} bytes")
        whole = np.zeros(tuple(sparse.dims), numbers.dtype)
        if places.ndim == 2:
            places = np.ravel_multi_index(tuple(places.T), whole.shape)
        if np.any(places < 0):
            raise IndexError("a negative index")
        whole.reshape(-1)[places] = numbers
    except (ValueError, IndexError, TypeError) as error:
        raise refusal(f"the sparse weights {name} do not fit their dimensions: {error}") from error
    return onnx.numpy_helper.from_array(whole, name)


# -- The check of a result -------------------------------------------------------------------------

_UNKNOWN = "mha_deploy.unknown"
_FOUND = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, RuntimeError, ValueError)


def why_invalid(model: ir.Model, *, full: bool = False) -> str | None:
    """What ONNX's checker finds wrong, with `full` in types and shapes as well; None for nothing.

    Large weights are not checked: they are those of the file.
    """
    proto = light_proto(model, bare=True)
    graph = proto.graph
    # The checker wants the rank of every input and output, which no runtime needs.
    unranked = [each.name for each in graph.input if not _has_rank(each)]
    for values in (graph.input, graph.output):
        ranked = [each for each in values if _has_rank(each)]
        if len(ranked) < len(values):
            del values[:]
            values.extend(ranked)
    if unranked:
        graph.node.insert(0, onnx.helper.make_node("Unknown", [], unranked, domain=_UNKNOWN))
        proto.opset_import.append(onnx.helper.make_opsetid(_UNKNOWN, 1))
    return _problem(proto, full=full)


def _has_rank(value: ValueInfoProto) -> bool:
    return not value.type.HasField("tensor_type") or value.type.tensor_type.HasField("shape")


def _problem(proto: onnx.ModelProto, *, full: bool = False) -> str | None:
    try:
        onnx.checker.check_model(proto, full_check=full)
    except _FOUND as why:
        return " ".join(str(why).split())[:_LONGEST] or type(why).__name__
    return None


def refuse_invalid(result: ir.Model, source: Callable[[], ir.Model], what: str) -> ir.Model:
    """The result of a pass, which must be as valid as what it was made of, which `source` gives.

    A file may state a shape that is not the inferred one, which every runtime accepts: then its result must
    follow the rest of the specification only.
    """
    problem = why_invalid(result, full=True)
    if problem is not None and why_invalid(given := source(), full=True) is not None:
        problem = why_invalid(result)
        if problem is not None and (own := why_invalid(given)) is not None:
            raise refusal(own)
    if problem is not None:
        hint = "report it with the file; onnx.checker.check_model says the same"
        raise DeployError(f"{what} is not valid ONNX.", got=printable(problem), hint=hint)
    return result
