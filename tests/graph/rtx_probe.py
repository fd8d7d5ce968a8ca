"""Build a graph with TensorRT-RTX on the CPU and see which kernels it chose. No GPU is needed.

Smaller than the backend on purpose: no dialect, no checks, no options, so that a graph can also be built as
it is. Only the logger is the backend's: TensorRT uses the first logger of a process and ignores the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import pytest

from mha_deploy.runtime.tensorrt.versions import Message, collect, load, logger_for

trt = pytest.importorskip("tensorrt_rtx")

_FUSED = re.compile(r"_ge(mm|mv)_mha_v\d|fmha", re.IGNORECASE)

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Built:
    """The kernels of an engine, and the inputs that the parser ignored."""

    kernels: tuple[str, ...]
    unused_inputs: tuple[str, ...]

    @property
    def fused(self) -> tuple[str, ...]:
        return tuple(name for name in self.kernels if _FUSED.search(name))


class Refused(Exception):
    """The parser or the builder said no."""


Profile = dict[str, Shapes]


def build(model: ir.Model, *profiles: Profile, sm: str = "SM89") -> Built:
    """Build for one compute capability.

    Args:
        model: The model, lowered or not.
        *profiles: Smallest, usual and largest shape of each dynamic input; one profile or several.
        sm: The compute capability, by TensorRT's name.
    """
    rt = load("tensorrt-rtx")
    with collect(rt) as messages:
        builder = trt.Builder(logger_for(rt))
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, logger_for(rt))
        if not parser.parse(ir.to_proto(model).SerializeToString()):
            raise Refused([parser.get_error(i).desc() for i in range(parser.num_errors)])
        if builder.build_serialized_network(network, _config(builder, profiles, sm)) is None:
            raise Refused([message.text for message in messages if "ERROR" in message.severity])
    return Built(kernels=_kernels(messages), unused_inputs=_starting_with(messages, "Unused Input"))


def _config(builder: Any, profiles: Sequence[Profile], sm: str) -> Any:
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.__members__[sm], 0)
    for profile in filter(None, profiles):
        shapes = builder.create_optimization_profile()
        for name, (smallest, usual, largest) in profile.items():
            shapes.set_shape(name, smallest, usual, largest)
        config.add_optimization_profile(shapes)
    return config


def _starting_with(messages: Sequence[Message], text: str) -> tuple[str, ...]:
    return tuple(message.text for message in messages if message.text.startswith(text))


def _kernels(messages: Sequence[Message]) -> tuple[str, ...]:
    records = _starting_with(messages, "Layers:")[-1].split("\n\nI/O Tensors")[0].splitlines()[1:]
    found = (re.match(r"Name: (.*?), LayerType: ", line) for line in records)
    return tuple(match[1] for match in found if match)
