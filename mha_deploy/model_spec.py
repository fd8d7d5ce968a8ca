"""What every command needs to know of a model, whoever wrote it: its name, its axes and its tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from mha_deploy.errors import SpecError, nearest
from mha_deploy.spec_parts import Axis, Sizes, TensorSpec

_Spec = TypeVar("_Spec", bound="ModelSpec")


class ModelSpec(ABC):
    """The outside of a model.

    It is the single source of input shapes, dynamic ONNX dimensions, TensorRT profiles and golden shapes.
    """

    name: str
    summary: str
    axes: Mapping[str, Axis]
    cache: str
    window: int | None

    @property
    @abstractmethod
    def kind(self) -> str:
        """What it is, in a word."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs, in the order of the graph."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs, in the order of the graph."""

    @property
    @abstractmethod
    def attention_count(self) -> int:
        """How many fused attention nodes the exported graph must have."""

    def flops_at(self, sizes: Sizes) -> int:
        """At most the work of one call, where that does not follow from a layer's form."""
        raise NotImplementedError

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""

    def sizes(self, bound: str) -> dict[str, int]:
        """The size of every axis at `min`, `opt` or `max`."""
        return {name: getattr(axis, bound) for name, axis in self.axes.items()}

    def with_axes(self: _Spec, changed: Mapping[str, Axis]) -> _Spec:
        """The same model over other axis ranges."""
        for name in changed:
            if name not in self.axes:
                raise SpecError(f"{self.name} has no axis {name!r}.", got=name, hint=nearest(name, self.axes))
        return replace(self, axes={**self.axes, **changed})  # type: ignore[type-var]

    def parse_sizes(self, text: str) -> dict[str, int]:
        """Read sizes such as `B=2,S=33`: one for every axis, inside its range."""
        try:
            pairs = [part.split("=") for part in text.split(",")]
            sizes = {axis.strip(): int(size) for axis, size in pairs}
        except ValueError as error:
            example = ",".join(f"{name}={axis.opt}" for name, axis in self.axes.items())
            raise SpecError("Sizes cannot be read.", got=text, hint=f"such as {example}") from error
        self.check_sizes(sizes)
        return sizes

    def check_sizes(self, sizes: Sizes) -> None:
        """Refuse sizes that are missing, unknown or outside the axes."""
        if set(sizes) != set(self.axes):
            raise SpecError(
                f"{self.name} needs a size for each of its axes {', '.join(self.axes)}.", got=dict(sizes)
            )
        for name, axis in self.axes.items():
            if not axis.min <= sizes[name] <= axis.max:
                raise SpecError(
                    f"Axis {name} of {self.name} does not allow this size.",
                    got=f"{name}={sizes[name]}",
                    hint=f"a size from {axis.min} to {axis.max}, or widen it with --axis {name}=min:opt:max",
                )
