"""The reference layers in PyTorch, each readable next to its formula."""

from __future__ import annotations

from dataclasses import replace

import torch

from mha_deploy.errors import DeployError
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.reference.attention import Attention
from mha_deploy.reference.rotary import rotary_tables
from mha_deploy.reference.variants import GroupedMlpAttention, HeadMixAttention, SparseHeadAttention
from mha_deploy.reference.weights import StateDict, drawn_parameter, pack_projections, unpack_projections

__all__ = ["Attention", "build_module", "random_weights"]

_VARIANTS = {
    "attention": Attention,
    "sparse-heads": SparseHeadAttention,
    "grouped-mlp": GroupedMlpAttention,
    "head-mix": HeadMixAttention,
}


def build_module(
    spec: AttentionSpec,
    *,
    seed: int = 0,
    weights: StateDict | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    path: str = "sdpa",
) -> Attention:
    """The layer of a spec, in eval mode, with weights from a seed or from a state dict.

    The same seed gives the same function in either projection form and in every precision, up to the
    rounding of the weights. On the device `meta` the module has shapes and no weights.
    """
    with torch.device("meta"):
        module = _VARIANTS[spec.variant](spec, path).to(dtype).eval().requires_grad_(False)
    if device == "meta":
        return module
    state = random_weights(spec, seed) if weights is None else dict(weights)
    _check_state(spec, state)
    state = pack_projections(state) if spec.projections == "packed" else unpack_projections(state, spec)
    for name in list(state):  # one at a time: the largest layers are gigabytes
        state[name] = state[name].to(device=device, dtype=dtype)
    module.load_state_dict(state, assign=True)
    if spec.rope is not None:
        positions = torch.arange(spec.longest, device=device)
        module.rotary = rotary_tables(spec.rope, spec.rope_dims, positions, dtype)
    return module


def random_weights(spec: AttentionSpec, seed: int) -> StateDict:
    """Draw the weights of a layer in float32, as separate projections."""
    # Each parameter has its own generator, so that adding one does not change the others.
    return {
        name: drawn_parameter(spec, name, parameter.shape, seed * 1_000_003 + index)
        for index, (name, parameter) in enumerate(sorted(_separate_parameters(spec).items()))
    }


def _separate_parameters(spec: AttentionSpec) -> StateDict:
    """The parameters of a layer with separate projections, without their values."""
    with torch.device("meta"):
        return dict(_VARIANTS[spec.variant](replace(spec, projections="separate")).named_parameters())


def _check_state(spec: AttentionSpec, state: StateDict) -> None:
    """Compare weights with the layer, in the projection form that they come in."""
    parameters = _separate_parameters(spec)
    is_packed = any(name.startswith("qkv.") for name in state)
    wanted = pack_projections(parameters) if is_packed else parameters
    missing, extra = wanted.keys() - state.keys(), state.keys() - wanted.keys()
    if missing or extra:
        lists = [", ".join(sorted(names)) or "none" for names in (missing, extra)]
        got, hint = f"missing: {lists[0]}; not used: {lists[1]}", f"name them {', '.join(sorted(wanted))}"
        raise DeployError(f"The weights do not belong to {spec.name}.", got=got, hint=hint)
    for name, parameter in wanted.items():
        shape, wants = tuple(state[name].shape), tuple(parameter.shape)
        if shape != wants:
            what = f"The weight {name} has the wrong shape for {spec.name}."
            raise DeployError(what, got=shape, hint=f"{wants}")
