"""What a user names or gives, as a model to export: a catalog layer, a factory, a module, an ONNX file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union

from mha_deploy.errors import DeployError
from mha_deploy.model.catalog import find_spec, is_factory, refuse_absent_factory
from mha_deploy.model.deployable import Deployable, Example
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.model.spec import Axis

if TYPE_CHECKING:
    from torch import Tensor, nn  # noqa: TID251 (types only)

    AnySource = Union[str, os.PathLike[str], "Model", AttentionSpec, Deployable, nn.Module]  # noqa: UP007 (Model is below)
    Examples = Mapping[str, Tensor | Example]

AxisRange = str | tuple[int, int, int] | Axis
AxisRanges = Annotated[Mapping[str, AxisRange], '{"S": "1:128:512"}']  # with an example


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that can be exported; made by `load_model`.

    Args:
        name: Its name.
        source: The spec of a catalog layer, a `Deployable`, the reference of a factory, or an ONNX file.
        axes: Axis ranges in place of those of the `Deployable` or the factory.
        weights: The checkpoint of its weights, where it was made from one.
        prefix: What their names begin with there.
        layer: The layer that they are of, where there is no prefix.
    """

    name: str
    source: AttentionSpec | Deployable | str
    axes: Mapping[str, Axis] = field(default_factory=dict)
    weights: Path | None = None
    prefix: str = ""
    layer: int | None = None

    def __repr__(self) -> str:
        source = self.source if isinstance(self.source, str) else type(self.source).__name__
        return f"<Model {self.name}: {source}>"

    @property
    def is_layer(self) -> bool:
        """Whether it is a catalog layer: one attention that a spec describes."""
        return isinstance(self.source, AttentionSpec)

    @property
    def onnx_file(self) -> Path | None:
        """The ONNX file that it is, or None."""
        return Path(self.source) if isinstance(self.source, str) and is_onnx_file(self.source) else None

    def weight_options(self, weights: str | os.PathLike[str] | None, prefix: str) -> dict[str, Any]:
        """The options of an export that name weights: those that were requested, or the model's own."""
        own = weights is None and not prefix
        place = self.weights if weights is None else Path(weights)
        return {"weights": place, "prefix": prefix or self.prefix, "layer": self.layer if own else None}


def find_model(
    model: AnySource,
    *,
    example_inputs: Examples | None = None,
    axes: AxisRanges | None = None,
    name: str = "",
    cache: str | None = None,
    projections: str | None = None,
) -> Model:
    """The model that is meant; see `md.load_model`."""
    if hasattr(model, "forward"):  # an nn.Module, without importing PyTorch to ask
        model, axes = _deployable(model, example_inputs, axes, name), None
    elif example_inputs is not None or name:
        raise DeployError(
            "Only an nn.Module takes example inputs and a name.",
            got=describe(model),
            hint="leave them out, or give the module itself",
        )
    ranges = {
        name: sizes if isinstance(sizes, Axis) else Axis.parse(range_text(sizes), name=name)
        for name, sizes in (axes or {}).items()
    }
    loaded = model if isinstance(model, Model) else None
    source: object = model if loaded is None else loaded.source
    source = os.fspath(source) if isinstance(source, os.PathLike) else source
    if isinstance(source, str) and not is_onnx_file(source) and not is_factory(source):
        source = find_spec(source)
    if isinstance(source, AttentionSpec):
        spec = source if cache is None else source.with_cache(cache)
        spec = spec.with_axes(ranges)
        spec = spec if projections is None else replace(spec, projections=projections)
        return replace(loaded or Model(name=spec.name, source=spec), source=spec)
    if cache or projections:
        got = f"cache={cache!r}, projections={projections!r}"
        raise DeployError(
            "Only a catalog layer has these options.",
            got=got,
            hint="leave them out, or name a layer of `mha-deploy models`",
        )
    if not isinstance(source, str | Deployable):
        hint = "a catalog name, file.toml, file.py:factory, a Deployable, or an nn.Module"
        raise DeployError("This is not a model.", got=describe(model), hint=hint)
    if isinstance(source, str) and is_factory(source):
        refuse_absent_factory(source)
    if loaded is not None:
        return replace(loaded, axes={**loaded.axes, **ranges})
    return Model(name=_name_of(source), source=source, axes=ranges)


def find_checkpoint_layer(folder: Path, layer: int, prefix: str) -> Model:
    """The self attention of one layer of a Hugging Face checkpoint; see `md.load_checkpoint`."""
    from mha_deploy.model.huggingface import checkpoint_files, find_attention, read_config, spec_from_config

    config = read_config(folder)
    name = f"{folder.resolve().name}-layer-{layer}"
    spec = spec_from_config(config, layer, name=name, bias=False)
    number = None if prefix else layer
    found = find_attention(checkpoint_files(folder), prefix, number)
    spec = replace(spec, bias=found.has_bias)
    return Model(name=spec.name, source=spec, weights=folder, prefix=prefix, layer=number)


def _deployable(
    module: Any, example_inputs: Examples | None, axes: AxisRanges | None, name: str
) -> Deployable:
    """A user's module with its example inputs."""
    hint = 'example_inputs={"x": Example(tensor, "B", "S")}, axes={"B": "1:4:8", "S": "1:128:512"}'
    if example_inputs is None:
        raise DeployError("An nn.Module needs example inputs.", got=type(module).__name__, hint=hint)
    if not isinstance(example_inputs, Mapping):
        what = "The example inputs are not a dictionary by the names of forward's parameters."
        raise DeployError(what, got=type(example_inputs).__name__, hint=hint)
    inputs = {
        key: each if isinstance(each, Example) else Example(each) for key, each in example_inputs.items()
    }
    name = name or type(module).__name__
    return Deployable(module=module, inputs=inputs, axes=axes or {}, name=name)  # type: ignore[arg-type]


def _name_of(source: str | Deployable) -> str:
    """The name of a model: of its `Deployable`, its ONNX file, or its factory."""
    if isinstance(source, Deployable):
        return source.name or type(source.module).__name__
    return Path(source).stem if is_onnx_file(source) else source.rpartition(":")[2].replace("_", "-")


def is_onnx_file(source: object) -> bool:
    """Whether something names an ONNX file."""
    return isinstance(source, str) and source.lower().endswith(".onnx")


def range_text(sizes: AxisRange) -> str:
    """The range of an axis as `min:opt:max`."""
    return ":".join(map(str, sizes)) if isinstance(sizes, tuple | list) else str(sizes)


def describe(model: object) -> str:
    """What was given as a model, for a message."""
    if isinstance(model, Model):
        return model.name
    return model if isinstance(model, str) else type(model).__name__
