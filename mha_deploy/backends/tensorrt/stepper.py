"""TensorRT under a stepper: contexts for the shapes of the steps, graphs for the steps that come again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mha_deploy.backends.cuda import Graph
from mha_deploy.backends.stepper import Launcher, Repeated, StepCall
from mha_deploy.backends.tensorrt.bound import BoundContext
from mha_deploy.backends.tensorrt.errors import EngineError
from mha_deploy.backends.tensorrt.ranges import tightest_admitting
from mha_deploy.backends.tensorrt.recent import Recent
from mha_deploy.backends.tensorrt.request import Profile, Shape
from mha_deploy.backends.tensorrt.versions import TensorRT
from mha_deploy.spec_parts import CACHES, CACHES_OUT, PAST

if TYPE_CHECKING:
    from mha_deploy.backends.tensorrt.run import TensorRTRunner

_Key = tuple[int, tuple[tuple[str, Shape], ...]]


class TensorRTLauncher(Launcher):
    """An engine, launched on tensors of the caller's.

    Where a profile belongs to one context at a time (8.6), the runner itself cannot run in a profile that the
    launcher uses.

    Args:
        runner: The loaded engine; it must outlive the launcher.
        rt: Its TensorRT.
    """

    def __init__(self, runner: TensorRTRunner, rt: TensorRT) -> None:
        self.name, self.gpu, self.stream = runner.name, runner.gpu, runner.stream
        self.graph, self.engine_bytes = runner.graph, runner.engine_bytes
        self.inputs, self.outputs = runner.inputs, runner.engine_outputs
        self.in_place = {out: runner.aliases.get(out) for out in CACHES_OUT} == dict(
            zip(CACHES_OUT, CACHES, strict=True)
        )
        self._runner, self._rt = runner, rt
        self._contexts: Recent[_Key, _StepContext] = Recent(2)

    def most_tokens(self, B: int) -> int | None:
        """The longest call that a profile for so many rows takes into an empty cache; None without one."""
        fitting = [profile for profile in self._runner.profiles if _begins(profile, B)]
        return max((profile["x"][2][1] for profile in fitting), default=None)

    def launch(self, call: StepCall, *, again: bool) -> None:
        """Queue one call: the graph that was recorded of it, or the call itself, which is then recorded."""
        step = self._context(call)
        graph = step.graph_of(call)
        if graph is not None:
            graph.launch(self.stream)
            return
        step.bound.enqueue(call.addresses)
        if again and self.graph and not call.varies:
            self.stream.synchronize()
            step.record(call)

    @contextmanager
    def repeated(self, call: StepCall, then: Callable[[], None], *, graph: bool) -> Iterator[Repeated]:
        """Run a call once, so that TensorRT does what it does only once; then record it, if asked to."""
        bound, addresses = self._context(call).bound, call.addresses

        def work() -> None:
            bound.enqueue(addresses)
            then()

        work()
        self.stream.synchronize()
        if not graph:
            yield Repeated(launch=work)
            return
        recorded = bound.record(addresses, then)
        try:
            yield Repeated(launch=lambda: recorded.launch(self.stream))
        finally:
            self.stream.synchronize()
            recorded.close()

    def _context(self, call: StepCall) -> _StepContext:
        shapes = call.shapes(self.inputs)
        profile = tightest_admitting(self._runner.profiles, shapes)
        # A context of calls whose shapes change takes them all; it has no graphs that would be lost.
        key = (profile, () if call.varies else tuple(sorted(shapes.items())))
        if not self._rt.can.shared_profiles:
            self._contexts.drop(lambda kept: kept[0] == profile and kept != key)
        found = self._contexts.get(key, lambda: _StepContext(self._runner.bind(shapes, profile)))
        found.fit(shapes)
        self._refuse_other_outputs(found.bound.shapes, call)
        return found

    def _refuse_other_outputs(self, shapes: Mapping[str, Shape], call: StepCall) -> None:
        """What the engine will write must be what there is memory for."""
        wanted = call.shapes(self.outputs)
        other = {name: shapes[name] for name in self.outputs if shapes[name] != wanted[name]}
        if other:
            raise EngineError(
                "The engine gives outputs of other shapes than a layer with a cache.",
                got=other,
                hint=", ".join(f"{name} {wanted[name]}" for name in other),
            )

    def close(self) -> None:
        """Destroy the graphs and the contexts."""
        self._contexts.close()


def _begins(profile: Profile, B: int) -> bool:
    """Whether a profile takes B rows that have no past; every input of a stepper has the rows first."""
    takes_rows = all(low[0] <= B <= high[0] for low, _, high in profile.values())
    return takes_rows and all(profile[name][0][2] == 0 for name in PAST if name in profile)


class _StepContext:
    """A context, and the graphs that were recorded of its calls."""

    def __init__(self, bound: BoundContext) -> None:
        self.bound = bound
        self._graphs: dict[tuple[int, ...], Graph] = {}

    def fit(self, shapes: Mapping[str, Shape]) -> None:
        """Take other shapes."""
        if any(self.bound.shapes[name] != shape for name, shape in shapes.items()):
            self.bound.reshape(shapes)

    def graph_of(self, call: StepCall) -> Graph | None:
        """The graph that computes on these tensors, if there is one."""
        return self._graphs.get(tuple(call.addresses.values()))

    def record(self, call: StepCall) -> None:
        """Record a call that has run."""
        self._graphs[tuple(call.addresses.values())] = self.bound.record(call.addresses)

    def close(self) -> None:
        """Destroy the graphs, then the context that they use."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self.bound.close()
