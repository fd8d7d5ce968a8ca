"""The one way a lowering says no."""

from __future__ import annotations

from mha_deploy.errors import DeployError


class LoweringError(DeployError):
    """A node uses a feature that the dialect cannot express.

    Args:
        feature: What cannot be expressed, in a few words.
        node: Name of the node.
        dialect: Name of the dialect.
        got: The value that caused it.
        hint: What to do about it.
    """

    def __init__(
        self,
        feature: str,
        *,
        node: str,
        dialect: str,
        got: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(f"The {dialect} dialect has no {feature} (node {node!r}).", got=got, hint=hint)
        self.feature = feature
        self.node = node
        self.dialect = dialect
