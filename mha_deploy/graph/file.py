"""Read and write ONNX files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import onnx
import onnx_ir as ir

from mha_deploy.errors import DeployError

# Protobuf cannot hold 2 GiB, and holding much less in it doubles the memory of every reader.
EXTERNAL_DATA_FROM = 256 << 20


def load_graph(path: Path) -> ir.Model:
    """Read an ONNX file; its weights stay on disk until they are used."""
    try:
        model = ir.load(path)
    except FileNotFoundError as error:
        raise DeployError("There is no such ONNX file.", got=path) from error
    except Exception as error:  # protobuf raises its own types, which differ between implementations
        raise DeployError("The file is not an ONNX model.", got=f"{path}: {error}") from error
    if not len(model.graph) and not model.graph.outputs:
        raise DeployError("The file is not an ONNX model.", got=f"{path}: an empty graph")
    _refuse_foreign_data(model, path.resolve().parent)
    return model


def _refuse_foreign_data(model: ir.Model, folder: Path) -> None:
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and folder not in Path(tensor.path).resolve().parents:
            raise DeployError("The graph keeps weights outside its folder.", got=tensor.path)


def graph_of(model: Path | ir.Model) -> ir.Model:
    """A graph that may be given as a file or as it is."""
    return load_graph(model) if isinstance(model, Path) else model


def weights_folder(model: ir.Model) -> Path | None:
    """The folder of the files that hold a graph's weights, or None where it holds them itself."""
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            return Path(value.const_value.base_dir)
    return None


@dataclass(frozen=True, kw_only=True)
class PackedModel:
    """A graph as another process can take it: its bytes, and the folder of its external weights."""

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


def save_graph(model: ir.Model, path: Path) -> None:
    """Write an ONNX file, its weights beside it in `<name>.data` where they are large."""
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    external = f"{path.name}.data" if size > EXTERNAL_DATA_FROM else None
    ir.save(model, path, external_data=external)
