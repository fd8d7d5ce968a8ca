"""Take attention from PyTorch to TensorRT and verify the result."""

from __future__ import annotations

import sys

# `python -m mha_deploy` looks for modules in the working folder first: no more, before anything is imported.
if sys.argv[:1] == ["-m"] and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    del sys.path[0]

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha_deploy.api import *  # noqa: F403
    from mha_deploy.deployment import Deployment as Deployment
    from mha_deploy.errors import DeployError as DeployError
    from mha_deploy.model.deployable import Deployable as Deployable
    from mha_deploy.model.deployable import Example as Example

__version__ = "0.2.0"

# Public names are loaded when they are used: `import mha_deploy` loads neither torch nor onnx.
_API = "mha_deploy.api"
_ELSEWHERE = {
    "DeployError": "mha_deploy.errors",
    "Deployable": "mha_deploy.model.deployable",
    "Deployment": "mha_deploy.deployment",
    "Example": "mha_deploy.model.deployable",
}


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name]), name)
    api = import_module(_API)
    if name == "__all__":
        return sorted(["__version__", *_ELSEWHERE, *api.__all__])
    if name not in api.__all__:
        raise AttributeError(f"module 'mha_deploy' has no attribute {name!r}")
    return getattr(api, name)


def __dir__() -> list[str]:
    return list(__getattr__("__all__"))
