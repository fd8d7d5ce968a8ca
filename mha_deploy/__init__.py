"""Take attention from PyTorch to TensorRT and prove the result."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha_deploy.errors import DeployError
    from mha_deploy.model.deployable import Deployable, Example

__version__ = "0.1.0"

__all__ = ["DeployError", "Deployable", "Example", "__version__"]

# Public names are loaded when they are used: `import mha_deploy` loads neither torch nor onnx.
_PUBLIC = {
    "DeployError": "mha_deploy.errors",
    "Deployable": "mha_deploy.model.deployable",
    "Example": "mha_deploy.model.deployable",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mha_deploy' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
