"""Weights of a layer: random ones, and those of a file."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path

import torch
from torch import Tensor

from mha_deploy.errors import DeployError
from mha_deploy.files import open_regular
from mha_deploy.model.huggingface import PICKLED, checkpoint_files, find_attention
from mha_deploy.model.layer import AttentionSpec

# -- Drawn from a seed, or converted between the two forms of the projections ----------------------

# Standard deviation of the scores under random weights. Trained layers attend sharply; with scores much
# smaller than this the softmax is flat, and a wrong scale or mask hardly shows in the output.
SCORE_STD = 2.0
_BIAS_STD = 0.1

StateDict = Mapping[str, Tensor]


def drawn_parameter(spec: AttentionSpec, name: str, shape: torch.Size, seed: int) -> Tensor:
    """Draw one parameter of a layer in float32, in the separate form of the projections."""
    std = _BIAS_STD if name.endswith("bias") else 1.0 / math.sqrt(shape[-1])
    if name in ("q.weight", "k.weight"):
        std *= math.sqrt(SCORE_STD / (spec.softmax_scale * math.sqrt(spec.D)))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


def pack_projections(state: StateDict) -> dict[str, Tensor]:
    """Stack q, k and v into one `qkv` matrix; what is packed already stays."""
    packed = dict(state)
    for suffix in ("weight", "bias"):
        parts = [f"{name}.{suffix}" for name in ("q", "k", "v")]
        if all(part in packed for part in parts):
            packed[f"qkv.{suffix}"] = torch.cat([packed.pop(part) for part in parts])
    return packed


def unpack_projections(state: StateDict, spec: AttentionSpec) -> dict[str, Tensor]:
    """Split a `qkv` matrix into q, k and v; what is separate already stays."""
    widths, separate = [spec.Hq * spec.D, spec.Hkv * spec.D, spec.Hkv * spec.D], dict(state)
    for suffix in ("weight", "bias"):
        if f"qkv.{suffix}" in state:
            parts = separate.pop(f"qkv.{suffix}").split(widths)
            separate |= {f"{name}.{suffix}": part for name, part in zip("qkv", parts, strict=True)}
    return separate


# -- Weights from a checkpoint, or from a state dict that `torch.save` wrote -----------------------


def read_weights(
    path: Path, spec: AttentionSpec | None = None, *, prefix: str = "", layer: int | None = None
) -> tuple[StateDict, list[str]]:
    """Read the weights of one attention from a checkpoint, and notes for the reader of the bundle.

    See `checkpoint_files` and `find_attention`. The spec says how many heads a stacked matrix has; without
    one, a file is read as it is.
    """
    files = checkpoint_files(path)
    # The names of the reference layer: what is missing or left over is reported where it is built.
    own = not prefix and layer is None and files.keys() & {"o.weight", "mlp_in.weight"}
    if spec is None or (own and files.keys() & {"q.weight", "k.weight", "qkv.weight"}):
        return {name: _tensor(files[name], name) for name in files}, []
    found = find_attention(files, prefix, layer)
    parts = {part: _tensor(files[name], name) for part, name in found.names.items()}
    notes = [f"weights: {', '.join(sorted(found.names.values()))}"]
    elsewhere = len(files) - len(found.names) - len(found.ignored)
    if found.ignored:
        notes.append(f"not needed of {found.prefix or path.name}: {', '.join(found.ignored)}")
    if elsewhere:
        notes.append(f"{elsewhere} tensors elsewhere in the checkpoint are not part of this layer")
    return _separated(spec, parts, notes), notes


def _separated(
    spec: AttentionSpec, parts: Mapping[tuple[str, str], Tensor], notes: list[str]
) -> dict[str, Tensor]:
    """Split and transpose what is stacked, and add the biases that only some projections have."""
    widths = {"q": spec.Hq * spec.D, "k": spec.Hkv * spec.D, "v": spec.Hkv * spec.D}
    stacked = sum(widths.values())
    given = parts.get(("qkv", "weight"))
    # GPT-2's Conv1D holds matrices transposed.
    transposed = given is not None and tuple(given.shape) == (spec.E, stacked) and stacked != spec.E
    state: dict[str, Tensor] = {}
    for (role, kind), tensor in parts.items():
        if transposed and kind == "weight":
            tensor = tensor.T.contiguous()
        if role in ("qkv", "groups") and tensor.shape[0] != stacked:
            what = "The stacked projection does not fit the heads."
            hint = f"{stacked}: Hq = {spec.Hq}, Hkv = {spec.Hkv}, D = {spec.D}"
            raise DeployError(what, got=f"{tensor.shape[0]} rows", hint=hint)
        if role == "groups":
            shared = spec.Hq // spec.Hkv
            split = tensor.unflatten(0, (spec.Hkv, shared + 2, spec.D)).split([shared, 1, 1], dim=1)
            state |= {f"{name}.{kind}": part.flatten(0, 2) for name, part in zip("qkv", split, strict=True)}
        else:
            state[f"{role}.{kind}"] = tensor
    state = {name: part.contiguous() for name, part in unpack_projections(state, spec).items()}
    if missing := [name for name in "qkvo" if spec.bias and f"{name}.bias" not in state]:
        sizes = {**widths, "o": spec.E}
        state |= {f"{name}.bias": torch.zeros(sizes[name]) for name in missing}
        notes.append(f"no bias in the checkpoint for {', '.join(missing)}: zeros")
    return state


def _read(file: Path, name: str) -> Tensor:
    """A tensor of a safetensors file, of whatever type."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise DeployError(
            "The weights are not a safetensors file.",
            got=f"{file}: {error}",
            hint="a file that safetensors wrote, complete",
        ) from error
    return tensor


def _tensor(file: Path, name: str) -> Tensor:
    tensor = _read(file, name)
    if tensor.dtype not in _FLOATS:
        got, hint = f"{name}: {tensor.dtype}", "a checkpoint that is not quantized"
        raise DeployError("A weight is not floating point of 16 bits or more.", got=got, hint=hint)
    return tensor


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def read_state(path: Path, prefix: str = "") -> StateDict:
    """Read the state of a module, buffers included, of which the names begin with a prefix.

    The path is a state dict that `torch.save` wrote, by its ending, or what `checkpoint_files` takes.
    """
    if path.suffix in PICKLED:
        state = _read_pickled(path)
    else:
        state = {name: _read(file, name) for name, file in checkpoint_files(path).items()}
    start = f"{prefix.removesuffix('.')}." if prefix else ""
    if start and state and not any(name.startswith(start) for name in state):
        raise DeployError(
            "No weight has this prefix.", got=f"{path}: {prefix}", hint=_prefix_hint(prefix, state)
        )
    return {name.removeprefix(start): state[name] for name in state if name.startswith(start)}


def _prefix_hint(prefix: str, names: Iterable[str]) -> str:
    """The prefix that was probably meant, or else the first parts of the names."""
    parts = [name.split(".")[:-1] for name in names]
    known = dict.fromkeys(".".join(each[:count]) for each in parts for count in range(1, len(each) + 1))
    near = get_close_matches(prefix.removesuffix("."), known, n=1)
    first = list(dict.fromkeys(each[0] for each in parts if each))
    shown = near or first[:8]
    more = f" and {len(first) - 8} more" if not near and len(first) > 8 else ""
    return f"--prefix {' or '.join(shown)}{more}" if shown else "leave --prefix out: no name here has one"


def _read_pickled(path: Path) -> StateDict:
    """A state dict; nothing but tensors is unpickled."""
    what, hint = "The file is not a state dict.", 'torch.save(model.state_dict(), "weights.pt")'
    try:
        with open_regular(path) as file:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise DeployError(
            "There is no such weight file.", got=path, hint="the path of a file that exists"
        ) from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        got = f"{path}: {str(error).splitlines()[0]}"
        raise DeployError(what, got=got, hint=f"{hint}, where the model is trained") from error
    if _is_state(state):
        return dict(state)
    if not isinstance(state, dict):
        raise DeployError(what, got=f"{path}: {type(state).__name__}", hint=hint)
    keys = [str(each)[:60] for each in state]
    more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
    inside = [key for key, each in state.items() if isinstance(key, str) and each and _is_state(each)]
    if inside:
        hint = f'torch.save(torch.load("{path.name}")["{inside[0]}"], "weights.pt")'
    got = f"{path}: a dictionary of {', '.join(keys[:8])}{more}"
    raise DeployError(what, got=got, hint=hint)


def _is_state(given: object) -> bool:
    """Whether this is a dictionary of tensors by their names."""
    named = isinstance(given, dict) and all(isinstance(name, str) for name in given)
    return named and all(isinstance(each, Tensor) for each in given.values())  # type: ignore[attr-defined]
