"""A user's module with its weights, in the precision of an export; made anew by its factory each time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mha_deploy.contract import Example
from mha_deploy.errors import BundleError, ExportError, exit_as_error, place_of_error
from mha_deploy.export.drawn import draw_one, shape_of
from mha_deploy.export.factory import LoadedModel, load_factory
from mha_deploy.export.inputs import seeded_generator
from mha_deploy.export.weight_file import read_state
from mha_deploy.module_spec import ModuleSpec
from mha_deploy.precision import Precision
from mha_deploy.spec_parts import Axis

# Angles of a rotary embedding: in half precision, far positions would all be alike.
_KEPT_WIDE = ("inv_freq", "original_inv_freq")


@dataclass(frozen=True, kw_only=True)
class UserModule:
    """A module ready for export.

    Args:
        loaded: What its factory gave; its module is rounded.
        precision: To what.
        seed: PyTorch's seed while the factory ran.
        weights_file: The file of its weights, if one was given.
        state_sha256: Hash of weights and buffers before they were rounded.
    """

    loaded: LoadedModel
    precision: Precision
    seed: int
    weights_file: str | None
    state_sha256: str

    @property
    def module(self) -> nn.Module:
        """The module, rounded and in evaluation mode."""
        return self.loaded.module

    @property
    def dtype(self) -> torch.dtype:
        """The type of its weights."""
        return getattr(torch, self.precision.torch_name)  # type: ignore[no-any-return]

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights; one that several modules share counts once."""
        return sum(parameter.nbytes for parameter in self.module.parameters())

    def rounded(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inputs in the module's precision, on its device."""
        device = _device_of(self.module)
        return {
            name: tensor.to(device, self.dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in inputs.items()
        }


def drawn_inputs(user: UserModule, label: str, sizes: Mapping[str, int], seed: int) -> dict[str, Tensor]:
    """Inputs at some sizes, rounded: drawn by the user's own function, or after the example.

    Raises:
        ExportError: The user's function fails, or what it gives is not like the example.
    """
    loaded, drawn = user.loaded, {}
    for key, example in loaded.inputs.items():
        shape = shape_of(key, example.tensor, loaded.dims[key], sizes)
        if example.draw is None:
            drawn[key] = draw_one(f"{label}/{key}", example.tensor, shape, seed)
        else:
            drawn[key] = _drawn_by_user(key, example, shape, seeded_generator(seed, f"{label}/{key}"))
    return user.rounded(drawn)


def _drawn_by_user(name: str, example: Example, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    try:
        drawn = None if example.draw is None else example.draw(shape, generator)
    except (Exception, SystemExit) as error:  # whatever the user's code raises, sys.exit() included
        raise ExportError(
            f"The draw of input {name} fails.",
            got=f"{place_of_error(error)}: {type(error).__name__}: {error}",
            hint=f"shape {shape}",
        ) from error
    if not isinstance(drawn, Tensor):
        raise ExportError(f"The draw of input {name} gives no tensor.", got=type(drawn).__name__)
    if tuple(drawn.shape) != shape:
        raise ExportError(
            f"The draw of input {name} gives another shape.", got=tuple(drawn.shape), hint=str(shape)
        )
    wanted = example.tensor.dtype
    if drawn.dtype != wanted and not (drawn.is_floating_point() and wanted.is_floating_point):
        raise ExportError(f"The draw of input {name} gives another type.", got=drawn.dtype, hint=str(wanted))
    return drawn.detach()


@exit_as_error()
def open_user_module(
    factory: str,
    precision: Precision,
    *,
    seed: int = 0,
    weights: Path | None = None,
    axes: Mapping[str, Axis] | None = None,
    device: str = "cpu",
) -> UserModule:
    """Call a factory, give its module the weights of a file where there is one, and round it.

    Args:
        factory: `path/to/file.py:factory` or `package.module:factory`.
        precision: The precision to round to.
        seed: PyTorch's seed while the factory runs.
        weights: A safetensors file, or a state dict that `torch.save` wrote.
        axes: Ranges in place of the factory's.
        device: Where the module goes.

    Raises:
        ExportError: The factory or its module does not meet the contract.
        DeployError: The file holds no weights for this module.
    """
    loaded = load_factory(factory, seed=seed).with_axes(axes or {})
    if weights is not None:
        _load_weights(loaded.module, weights)
    _refuse_meta(loaded.module)
    loaded.module.requires_grad_(False)
    digest = state_digest(loaded.module)
    _round(loaded.module, getattr(torch, precision.torch_name))
    loaded.module.to(device)
    return UserModule(
        loaded=loaded,
        precision=precision,
        seed=seed,
        weights_file=None if weights is None else str(weights),
        state_sha256=digest,
    )


def reopen_user_module(spec: ModuleSpec, precision: Precision, *, device: str = "cpu") -> UserModule:
    """The module of a bundle, made again by its factory.

    Raises:
        ExportError: The factory is not here any more, or gives something else.
        BundleError: It gives other weights than those in the bundle.
    """
    weights = None if spec.weights_file is None else Path(spec.weights_file)
    user = open_user_module(
        spec.factory, precision, seed=spec.seed, weights=weights, axes=spec.axes, device=device
    )
    if user.state_sha256 != spec.state_sha256:
        raise BundleError(
            f"{spec.factory} gives other weights now than when it was exported.",
            got=f"SHA-256 {user.state_sha256[:16]}…, not {spec.state_sha256[:16]}…",
            hint="export again; a factory must give the same weights each time",
        )
    return user


def state_digest(module: nn.Module) -> str:
    """A hash of the names, types and numbers of all weights and buffers, also of those that are not saved."""
    digest = hashlib.sha256()
    for name, tensor in sorted({**module.state_dict(), **dict(module.named_buffers())}.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _load_weights(module: nn.Module, path: Path) -> None:
    state = read_state(path)
    try:
        # Weights that the module shares with itself stand in a file once.
        missing, unknown = module.load_state_dict(state, strict=False)
    except RuntimeError as error:  # shapes that do not fit
        raise ExportError(
            "The weights do not fit the module.", got=" ".join(str(error).split())[:300]
        ) from error
    shared = _shared_with_given(module, set(state))
    missing = [name for name in missing if name not in shared]
    if missing or unknown:
        told = [f"no {name}" for name in missing[:3]] + [f"{name} is unknown" for name in unknown[:3]]
        raise ExportError("The weights are not those of the module.", got=f"{path}: {', '.join(told)}")


def _shared_with_given(module: nn.Module, given: set[str]) -> set[str]:
    """Names of weights that are the same memory as one that was given."""
    state = module.state_dict(keep_vars=True)
    places = {state[name].data_ptr() for name in given if name in state}
    return {name for name, tensor in state.items() if tensor.data_ptr() in places}


def _round(module: nn.Module, dtype: torch.dtype) -> None:
    kept = {
        (owner, name): buffer
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name in _KEPT_WIDE
    }
    # Not module.to(): it makes complex numbers, such as a table of rotations, real.
    module._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    for (owner, name), buffer in kept.items():
        setattr(owner, name, buffer)


def _refuse_meta(module: nn.Module) -> None:
    tensors = (*module.named_parameters(), *module.named_buffers())
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise ExportError(
            "The module has weights without numbers.",
            got=f"{len(empty)} on the meta device: {', '.join(empty[:3])}",
            hint="a factory that makes or loads them",
        )


def _device_of(module: nn.Module) -> torch.device:
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")
