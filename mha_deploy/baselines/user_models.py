"""The ways in which PyTorch runs a user's module: as it is written, with one kernel or compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mha_deploy.backends.runner import Arrays
from mha_deploy.baselines.module import check_device
from mha_deploy.baselines.ways import Way
from mha_deploy.errors import DeployError, exit_as_error
from mha_deploy.export.eager import tensors_in
from mha_deploy.export.inputs import tensor_from_numpy
from mha_deploy.export.user_module import reopen_user_module
from mha_deploy.module_spec import ModuleSpec
from mha_deploy.precision import Precision


class UserModels:
    """The module of a bundle on one device, made by its factory once for all the ways to run it.

    Args:
        spec: The module.
        precision: Its precision.
        device: Where it runs.

    Raises:
        DeployError: The factory is not here, or gives other weights than those in the bundle.
    """

    def __init__(self, spec: ModuleSpec, precision: Precision, device: str = "cuda") -> None:
        check_device(device)
        self.spec, self.precision, self.device = spec, precision, device
        self._user = reopen_user_module(spec, precision, device=device)
        self._module = _Flat(self._user.module)
        self._calls_sdpa: bool | None = None

    def in_service(self, way: Way) -> nn.Module:
        """The module as it is run and timed.

        Raises:
            DeployError: A kernel of PyTorch's fused attention is asked for, and the module does not call it.
        """
        if way.packed:
            raise DeployError("The projections of your own module are as you wrote them.", got="packed")
        if way.path == "sdpa" and not way.compiled and not self._has_sdpa():
            raise DeployError(
                "The module writes its attention out: there is no fused kernel to choose.",
                got="no call of scaled_dot_product_attention",
            )
        return self._module

    def arguments(self, feeds: Arrays) -> dict[str, Tensor]:
        """Inputs on the device; each call has copies of its own."""
        return {name: tensor_from_numpy(array).to(self.device) for name, array in feeds.items()}

    @property
    def parameter_bytes(self) -> int:
        """Memory of the weights."""
        return self._user.weight_bytes

    @exit_as_error()
    def _has_sdpa(self) -> bool:
        if self._calls_sdpa is None:
            inputs = {name: example.tensor for name, example in self._user.loaded.inputs.items()}
            with torch.inference_mode(), _Listener() as listener:
                self._module(**self._user.rounded(inputs))
            self._calls_sdpa = listener.heard
        return self._calls_sdpa


class _Flat(nn.Module):
    """A module whose outputs are a flat tuple of tensors, whatever it nests them in."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensors_in(self.module(**inputs)))


class _Listener(TorchFunctionMode):
    """Hears whether PyTorch's fused attention is called."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        self.heard = self.heard or func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))
