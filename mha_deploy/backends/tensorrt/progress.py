"""How far the builder is, where it tells (`IProgressMonitor`; 8.6 has none)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OnProgress = Callable[[str, int, int], None]
"""Called with a phase, how many of its steps are done, and how many it has. Phases nest."""


def make_monitor(trt: Any, on_progress: OnProgress) -> Any:
    """Wrap a callback for `IBuilderConfig.progress_monitor`.

    An exception of the callback, Ctrl-C among them, cannot pass through the builder: it cancels the
    build and is kept in `failure`, to be raised when the builder has returned.

    Args:
        trt: The TensorRT module, one that has the class.
        on_progress: The callback.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}
            self.failure: BaseException | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.steps[phase_name] = num_steps
            self.tell(phase_name, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self.tell(phase_name, step + 1)
            return self.failure is None

        def phase_finish(self, phase_name: str) -> None:
            self.tell(phase_name, self.steps.get(phase_name, 0))

        def tell(self, phase: str, done: int) -> None:
            if self.failure is not None:
                return
            try:
                on_progress(phase, done, self.steps.get(phase, 0))
            except BaseException as failure:  # noqa: BLE001  raised again by the caller
                self.failure = failure

    return Monitor()
