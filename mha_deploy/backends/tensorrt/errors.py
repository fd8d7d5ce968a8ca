"""The error of this backend: an engine that cannot be built, read or inspected."""

from __future__ import annotations

from collections.abc import Sequence

from mha_deploy.errors import EXIT_VERDICT_FAILED, DeployError


class EngineError(DeployError):
    """TensorRT refused the graph, the options or the plan.

    Args:
        what: What happened, in one sentence.
        got: What TensorRT said, or the option that was asked for.
        hint: What to do about it.
        nodes: Names of the ONNX nodes it speaks of, where they are known.
    """

    def __init__(
        self, what: str, *, got: object = None, hint: str | None = None, nodes: Sequence[str] = ()
    ) -> None:
        super().__init__(what, got=got, hint=hint)
        self.nodes = tuple(nodes)


class NotFusedError(EngineError):
    """No fused kernel, and nothing else allowed: a verdict, since the graph is as it should be."""

    exit_code = EXIT_VERDICT_FAILED
