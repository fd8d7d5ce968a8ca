"""One call of ONNX Runtime whose inputs and outputs have places on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from mha_deploy.backends.cuda import Buffer
from mha_deploy.backends.ort_session import first_line, onnx_type
from mha_deploy.errors import DeployError

NO_CAPTURE = -1  # an id that ONNX Runtime never captures; 0 is its own

# What ONNX Runtime says where it does not capture: of a session with copies between the devices or with
# control flow (in two wordings), of an operator or option that does not go with it, and of a capture that
# never ends; and what CUDA says through it of a kernel that waits or allocates meanwhile.
_REFUSALS = (
    "cannot use the graph capture feature",
    "cannot use the cuda graph feature",
    "not supported when graph capture is enabled",
    "graph capture did not complete",
    "not permitted when stream is capturing",
    "failed due to a previous error during capture",
)

Made = TypeVar("Made")


class NotCapturable(DeployError):
    """A graph that ONNX Runtime may run, but not as a CUDA graph."""


class BoundRun:
    """A call that is bound to memory.

    Args:
        ort: The package.
        session: The loaded graph.
        graph_id: Under which number a session that captures keeps the call; `NO_CAPTURE` for none.
    """

    def __init__(self, ort: Any, session: Any, *, graph_id: int = NO_CAPTURE) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._options.add_run_config_entry("gpu_graph_id", str(graph_id))
        self._on_host: list[np.ndarray] = []

    def bind_input(self, name: str, buffer: Buffer, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """Read an input from the device."""
        self._binding.bind_input(name, *_place_of(buffer, shape, dtype))

    def bind_host_input(self, name: str, array: np.ndarray) -> None:
        """Read an input from the host, as the operators do that take it there."""
        self._on_host.append(array)  # the binding does not own it
        self._binding.bind_cpu_input(name, array)

    def bind_output(self, name: str, buffer: Buffer, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """Write an output to the device; it may be where an input is."""
        self._binding.bind_output(name, *_place_of(buffer, shape, dtype))

    def launch(self) -> None:
        """Queue one call."""
        self._session.run_with_iobinding(self._binding, self._options)


def _place_of(
    buffer: Buffer, shape: tuple[int, ...], dtype: np.dtype
) -> tuple[str, int, int, list[int], int]:
    """Device, its number, type, shape and address, in the order in which bindings take them."""
    return "cuda", 0, onnx_type(dtype), list(shape), buffer.address


def cannot_run(error: Exception, *, capture: bool) -> DeployError:
    """What ONNX Runtime raises, in our words; its own types share no base.

    Args:
        error: What it raised.
        capture: Whether it should have captured a CUDA graph.
    """
    if isinstance(error, DeployError):
        return error
    told = str(error).lower()
    if capture and any(refusal in told for refusal in _REFUSALS):
        return NotCapturable("ONNX Runtime cannot run this graph as a CUDA graph.", got=first_line(error))
    return DeployError("ONNX Runtime's CUDA provider cannot run the graph.", got=first_line(error))


def captured_if_possible(make: Callable[[bool], Made], *, graph: bool) -> tuple[Made, str | None]:
    """Make calls that are CUDA graphs, or plain ones where ONNX Runtime does not capture them.

    Args:
        make: Makes them, as graphs or not.
        graph: Whether they should be graphs.

    Returns:
        What was made; and why it is no graph, where it should be.
    """
    why = None
    if graph:
        try:
            return make(True), None
        except NotCapturable as error:
            why = str(error.got)
    # Not inside `except`: the traceback would keep the session that failed, and its memory, alive.
    return make(False), why
