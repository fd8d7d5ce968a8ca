"""What only PyTorch can do in a validation: say what is true of fresh inputs."""

from __future__ import annotations

from mha_deploy.backends.cuda import find_gpu
from mha_deploy.errors import BackendUnavailable
from mha_deploy.versions import can_import

INSTALL = 'pip install "mha-deploy[export]"'


def refuse_without_torch(what: str, hint: str = INSTALL) -> None:
    """Refuse what cannot be done without PyTorch, where it is not installed.

    Args:
        what: What it was to tell, as in "Only PyTorch can tell what is true …".
        hint: What to do.
    """
    if not can_import("torch"):
        raise BackendUnavailable(
            f"Only PyTorch can tell what is true {what}.", got="PyTorch is not installed", hint=hint
        )


def torch_device() -> str:
    """Where PyTorch computes here: `cuda` if there is a GPU."""
    return "cpu" if find_gpu() is None else "cuda"
