"""Read and write ONNX files, and take values out of a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import onnx_ir as ir

from mha_deploy.errors import DeployError
from mha_deploy.files import read_regular
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.strict import LARGEST_FILE, MOST_HEADS, check_model

# -- Read and write ONNX files ---------------------------------------------------------------------

# Protobuf is limited to 2 GiB, and much less in it already doubles the memory of every reader.
EXTERNAL_DATA_FROM = 256 << 20


def load_graph(path: Path, *, files: Collection[str] | None = None) -> ir.Model:
    """Read an ONNX file; its weights stay on disk until they are used.

    Args:
        path: The file, which may come from anywhere.
        files: The files beside it that may hold weights; default: any.

    Raises:
        DeployError: There is no such file, or it is not a valid model; see `strict.py`.
    """
    try:
        proto = onnx.ModelProto.FromString(read_regular(path, LARGEST_FILE))
    except FileNotFoundError as error:
        raise DeployError("There is no such ONNX file.", got=path) from error
    except Exception as error:  # protobuf raises its own types, which differ between implementations
        raise DeployError("The file is not an ONNX model.", got=f"{path}: {error}") from error
    if not proto.graph.node and not proto.graph.output:
        raise DeployError("The file is not an ONNX model.", got=f"{path}: an empty graph")
    model = graph_from_proto(proto, folder=path.parent, files=files)
    ir.external_data.set_base_dir(model.graph, path.parent)
    return model


def graph_from_proto(
    proto: onnx.ModelProto, *, folder: Path | None = None, files: Collection[str] | None = None
) -> ir.Model:
    """A graph that anybody may have made, checked before it is read; see `strict.check_model`."""
    check_model(proto, folder, files)
    try:
        model = ir.from_proto(proto)
        nodes = attention_nodes(model)
    except Exception as error:  # what onnx_ir raises depends on what is wrong
        raise DeployError("The ONNX model cannot be read.", got=f"{type(error).__name__}: {error}") from error
    for node in nodes:
        heads = [each for each in (node.Hq, node.Hkv) if isinstance(each, int)]
        uneven = len(heads) == 2 and 0 not in heads and heads[0] % heads[1]
        if uneven or not all(1 <= each <= MOST_HEADS for each in heads):
            raise DeployError("An attention has no such heads.", got=f"{node.name}: {heads}")
    return model


def graph_of(model: Path | ir.Model) -> ir.Model:
    """The graph of a file, or the graph itself."""
    return load_graph(model) if isinstance(model, Path) else model


def weights_folder(model: ir.Model) -> Path | None:
    """The folder of the external weights of a graph; None where it has none."""
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            return Path(value.const_value.base_dir)
    return None


@dataclass(frozen=True, kw_only=True)
class PackedModel:
    """A graph for another process: its bytes, and the folder of its external weights."""

    content: bytes = field(repr=False)
    folder: Path | None

    @classmethod
    def of(cls, model: ir.Model) -> PackedModel:
        """Pack a graph."""
        folder = weights_folder(model)
        return cls(
            content=ir.to_proto(model).SerializeToString(),
            folder=None if folder is None else folder.resolve(),
        )

    def unpacked(self) -> ir.Model:
        """The graph again; its external weights stay on disk until they are used."""
        model = ir.from_proto(onnx.ModelProto.FromString(self.content))
        if self.folder is not None:
            ir.external_data.set_base_dir(model.graph, self.folder)
        return model


def weight_files(model: ir.Model) -> set[Path]:
    """The files of the external weights and constants of a graph and its subgraphs."""
    weights = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    constants = [attribute.as_tensor() for _, attribute in _constants(model)]
    outside = [tensor for tensor in (*weights, *constants) if isinstance(tensor, ir.ExternalTensor)]
    return {Path(tensor.path).resolve() for tensor in outside}


def _constants(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Attr]]:
    for node in (node for graph in model.graphs() for node in graph):
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                yield node, attribute


def save_graph(model: ir.Model, path: Path) -> None:
    """Write an ONNX file, its weights beside it in `<name>.data` where they are large.

    External weights are copied: the new file does not refer to the old ones.
    """
    weights = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    size = sum(tensor.nbytes for tensor in weights if tensor is not None)
    external = f"{path.name}.data" if size > EXTERNAL_DATA_FROM else None
    with _read_into_memory(model, weights=external is None):
        ir.save(model, path, external_data=external)


@contextmanager
def _read_into_memory(model: ir.Model, *, weights: bool) -> Iterator[None]:
    """Read external constants, and if wanted weights, into memory."""
    values, constants = list[tuple[ir.Value, ir.TensorProtocol]](), list[tuple[ir.Node, ir.Attr]]()
    try:
        for value in (each for graph in model.graphs() for each in graph.initializers.values()):
            if weights and isinstance(tensor := value.const_value, ir.ExternalTensor):
                values.append((value, tensor))
                value.const_value = _in_memory(tensor)
        for node, attribute in list(_constants(model)):
            if isinstance(tensor := attribute.as_tensor(), ir.ExternalTensor):
                constants.append((node, attribute))
                node.attributes.add(ir.AttrTensor(attribute.name, _in_memory(tensor)))
        yield
    finally:
        for value, tensor in values:
            value.const_value = tensor
        for node, attribute in constants:
            node.attributes.add(attribute)


def _in_memory(tensor: ir.ExternalTensor) -> ir.TensorProtocol:
    try:
        return ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)
    except (OSError, ValueError) as error:
        what = "The weights of the graph cannot be read."
        raise DeployError(what, got=f"{tensor.name} in {tensor.path}: {error}") from error


# -- Inner values as outputs -----------------------------------------------------------------------


def with_outputs(model: ir.Model, names: Collection[str]) -> ir.Model:
    """A copy of the model with these values of its main graph as outputs, too; weights are shared.

    Raises:
        DeployError: The main graph computes no such value, or its type is not known.
    """
    copy = model.clone()
    found = {value.name: value for node in copy.graph for value in node.outputs if value.name in names}
    for name in names:
        value = found.get(name)
        if value is None or value.dtype is None:
            what = "no such value" if value is None else "a value of unknown type"
            raise DeployError(f"The graph has {what}.", got=name, hint="export again")
        if not value.is_graph_output():
            copy.graph.outputs.append(value)
    return copy


# -- What a value of a graph is computed from ------------------------------------------------------


def cone(values: Iterable[ir.Value | None]) -> set[ir.Node]:
    """The nodes that these values are computed from, those that compute them included."""
    found: set[ir.Node] = set()
    pending = [value.producer() for value in values if value is not None]
    while pending:
        node = pending.pop()
        if node is None or node in found:
            continue
        found.add(node)
        pending += [value.producer() for value in node.inputs if value is not None]
    return found


def value_named(graph: ir.Graph, name: str) -> ir.Value | None:
    """A value that the graph computes, by its name."""
    return next((value for node in graph for value in node.outputs if value.name == name), None)
