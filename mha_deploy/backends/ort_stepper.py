"""ONNX Runtime under a stepper.

Steps are run by the session without CUDA graphs, since not every graph can be captured. Timed calls are
captured by a session of their own, where they can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mha_deploy.backends.ort_bound import NO_CAPTURE, BoundRun, cannot_run, captured_if_possible
from mha_deploy.backends.ort_cuda import WARM_UP, OrtCudaRunner
from mha_deploy.backends.ort_session import first_line
from mha_deploy.backends.stepper import Launcher, Repeated, StepCall
from mha_deploy.errors import DeployError

_GRAPH_ID = 1


class OrtLauncher(Launcher):
    """A graph in ONNX Runtime, launched on tensors of the caller's.

    A static cache that goes out is bound to the memory of the one that comes in: GroupQueryAttention and
    TensorScatter then write the new rows and nothing else.

    Args:
        runner: The loaded graph; it must outlive the launcher.
    """

    def __init__(self, runner: OrtCudaRunner) -> None:
        self.name, self.gpu, self.stream = runner.name, runner.gpu, runner.stream
        self.graph, self.in_place = runner.graph, bool(runner.aliases)
        self.inputs, self.outputs = runner.all_inputs, runner.outputs
        self._runner = runner
        self._running: BoundRun | None = None

    def launch(self, call: StepCall, *, again: bool) -> None:
        """Queue one call."""
        try:
            self._running = self._bound(self._runner.session, call, NO_CAPTURE)
            self._running.launch()
        except Exception as error:  # ONNX Runtime raises types of its own that share no base
            raise DeployError("ONNX Runtime failed on these tokens.", got=first_line(error)) from error

    @contextmanager
    def repeated(self, call: StepCall, then: Callable[[], None], *, graph: bool) -> Iterator[Repeated]:
        """Capture a call in a session of its own; nothing has to be done behind it, so `then` is left out.

        One that cannot be captured is launched, and it is told why.
        """
        run, why = captured_if_possible(lambda capture: self._warm(call, capture=capture), graph=graph)
        try:
            yield Repeated(launch=run.launch, why_no_graph=why)
        finally:
            self.stream.synchronize()

    def _warm(self, call: StepCall, *, capture: bool) -> BoundRun:
        """A call in a session of its own that has run."""
        try:
            session = self._runner.open_session(capture=capture)
            run = self._bound(session, call, _GRAPH_ID if capture else NO_CAPTURE)
            for _ in range(WARM_UP):
                run.launch()
            self.stream.synchronize()
        except Exception as error:
            raise cannot_run(error, capture=capture) from error
        return run

    def _bound(self, session: Any, call: StepCall, graph_id: int) -> BoundRun:
        run = BoundRun(self._runner.ort, session, graph_id=graph_id)
        for name, array in call.on_host.items():
            run.bind_host_input(name, array)
        for name, tensor in call.tensors.items():
            bind = run.bind_output if name in self.outputs else run.bind_input
            bind(name, tensor.buffer, tensor.shape, tensor.dtype)
        return run

    def close(self) -> None:
        """Let go of the last call."""
        self._running = None
