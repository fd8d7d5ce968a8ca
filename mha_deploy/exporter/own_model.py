"""A user's own model: load its factory, check what it returns, round it to the precision of the export."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as field_of
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mha_deploy.bundle.cases import place_tokens
from mha_deploy.errors import BundleError, ExportError, nearest
from mha_deploy.exporter.axes import ExportedModule, draw_one, shape_of
from mha_deploy.exporter.explain import run_explained
from mha_deploy.graph.ir import dims as dims_of
from mha_deploy.model.deployable import Deployable, Example
from mha_deploy.model.precision import PRECISIONS, Precision
from mha_deploy.model.spec import (
    Axes,
    Axis,
    Dim,
    ModelSpec,
    NamedAxes,
    Sizes,
    TensorSpec,
    new_token_axis,
    terms_of,
    two_sizes,
)
from mha_deploy.reference.inputs import draw_lengths, rounded, seeded_generator
from mha_deploy.reference.weights import read_state
from mha_deploy.runtime.child import isolation
from mha_deploy.runtime.user_code import import_user_module, refuse_without_factory, user_code, where_is

# -- Load a user's factory and call it -------------------------------------------------------------

_SEE = 'Deployable(module=module, inputs={"x": Example(tensor, "B")}, axes={"B": "1:2:4"})'
_Dims = Mapping[str, tuple[Dim, ...]]


@dataclass(frozen=True, kw_only=True)
class UserModule(Deployable, NamedAxes):
    """What a factory gave, checked, in evaluation mode; and how its weights were made."""

    axes: Axes
    factory: str  # the reference it was loaded by; empty for a `Deployable` that was made in memory
    dims: Mapping[str, tuple[Dim, ...]]  # of every input: an axis, a sum, or a number
    positions: tuple[str, ...] = ()  # the inputs that place new tokens
    entries: Mapping[str, int] = field_of(
        default_factory=dict
    )  # of a preallocated cache, where its entries lie
    precision: Precision = PRECISIONS["fp32"]  # to which the module is rounded
    seed: int = 0  # PyTorch's while the factory ran
    weights_file: str | None = None  # the file or checkpoint of its weights, if one was given
    weights_prefix: str = ""  # what their names begin with there
    state_sha256: str = ""  # hash of weights and buffers before they were rounded
    notes: tuple[str, ...] = ()  # what a reader should know of them

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights; one that several modules share counts once."""
        return sum(parameter.nbytes for parameter in self.module.parameters())

    def rounded(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inputs in the module's precision, on its device."""
        devices = (each.device for each in (*self.module.parameters(), *self.module.buffers()))
        return rounded(inputs, next(devices, "cpu"), getattr(torch, self.precision.torch_name))

    @property
    def examples(self) -> dict[str, Tensor]:
        """The example of every input, as the module takes it."""
        return self.rounded({name: example.tensor for name, example in self.inputs.items()})


def load_factory(reference: str, *, seed: int = 0) -> UserModule:
    """Load `path/to/file.py:factory` or `package.module:factory`, and call it under a seed of PyTorch."""
    place, _, name = reference.rpartition(":")
    hint = "import it in Python by itself, and correct what that shows"
    with user_code(place, "The factory's module cannot be imported.", hint=hint):
        module = import_user_module(place)
        factory = getattr(module, name, None)
    if not callable(factory):
        known = [key for key, value in vars(module).items() if callable(value) and not inspect.isclass(value)]
        hint = nearest(name, known) if known else "a function that returns a Deployable"
        raise ExportError("The module has no such factory.", got=reference, hint=hint)
    if needed := [each.name for each in _parameters(factory) if each.default is each.empty]:
        raise ExportError(
            "A factory takes no arguments.",
            got=f"{reference} needs {', '.join(needed)}",
            hint="give the arguments defaults, or write a function without any that calls it",
        )
    torch.manual_seed(seed)
    hint = "call it in Python by itself, and correct that line"
    with user_code(where_is(factory) or reference, "The factory failed.", hint=hint):
        given = factory()
    if not isinstance(given, Deployable):
        got = f"{type(given).__name__} from {reference}"
        raise ExportError("The factory does not return a Deployable.", got=got, hint=_SEE)
    return _check(given, reference, name)


def load_deployable(given: Deployable) -> UserModule:
    """Check a `Deployable` that was made in memory; its module is copied, as the export changes it."""
    name = type(given.module).__name__
    try:
        module = copy.deepcopy(given.module)
    except Exception as error:  # whatever the user's tensors and attributes raise
        what, hint = "The module cannot be copied.", "export a factory that makes it: path/to/file.py:factory"
        raise ExportError(what, got=f"{name}: {type(error).__name__}: {error}", hint=hint) from error
    return _check(replace(given, module=module), "", name)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


# -- The contract of a `Deployable` ----------------------------------------------------------------


def _check(given: Deployable, reference: str, name: str) -> UserModule:
    if not isinstance(given.module, nn.Module):
        raise ExportError("The module is not an nn.Module.", got=type(given.module).__name__, hint=_SEE)
    if not given.inputs:
        raise ExportError("There are no example inputs.", got=reference or name, hint=_SEE)
    tables = {"inputs": given.inputs, "axes": given.axes, "kv_cache": given.kv_cache}
    for field, table in tables.items():
        if not isinstance(table, Mapping):
            raise ExportError(f"{field} is not a dictionary.", got=type(table).__name__, hint=_SEE)
    for key in given.inputs:
        if not isinstance(key, str) or not key.isidentifier():
            hint = "the name of a parameter of forward()"
            raise ExportError("The name of an input is not an identifier.", got=repr(key), hint=hint)
    placing = (given.positions,) if isinstance(given.positions, str) and given.positions else given.positions
    if not isinstance(placing, Sequence) or not all(isinstance(each, str) for each in placing):
        got, hint = repr(given.positions), 'positions="cache_position"'
        raise ExportError("positions is not a name of an input.", got=got, hint=hint)
    if strange := [each for each in placing if each not in given.inputs]:
        raise ExportError("positions names no input.", got=strange[0], hint=nearest(strange[0], given.inputs))
    if type(given.longest) is not int or given.longest < 0:
        raise ExportError("longest is not a number of tokens.", got=repr(given.longest), hint="longest=4096")
    if (placing or given.longest) and not given.kv_cache:
        got, hint = "positions= or longest=", 'kv_cache={"key_cache": "key_cache_out"}'
        raise ExportError("Token positions need a KV cache, and there is none.", got=got, hint=hint)
    for key in given.kv_cache.values():
        if not isinstance(key, str) or not key:
            hint = 'kv_cache={"past_key": "present_key"}'
            raise ExportError("kv_cache names no output.", got=repr(key), hint=hint)
    for field, text in {"name": given.name, "summary": given.summary}.items():
        if not isinstance(text, str):
            raise ExportError(f"{field} is not text.", got=repr(text), hint=_SEE)
    if isinstance(given.outputs, str) or not isinstance(given.outputs, Sequence):
        raise ExportError("outputs is not a list of names.", got=repr(given.outputs), hint='outputs=("y",)')
    if strange := [str(cached) for cached in given.kv_cache if cached not in given.inputs]:
        raise ExportError("kv_cache names no input.", got=strange[0], hint=nearest(strange[0], given.inputs))
    axes = {axis: _axis(axis, sizes) for axis, sizes in given.axes.items()}
    dims = {key: _dims(key, example, axes) for key, example in given.inputs.items()}
    used = {axis for each in dims.values() for axis in _names(each)}
    if unused := [axis for axis in axes if axis not in used]:
        hint = f'Example(tensor, "{unused[0]}", ...) for an input that has it, or leave it out'
        raise ExportError("No input has such an axis.", got=", ".join(unused), hint=hint)
    if (found := two_sizes(dims, {key: each.tensor.shape for key, each in given.inputs.items()})) is not None:
        what, hint = f"Axis {found[0]} has two sizes in the examples.", "examples of one size, or two axes"
        raise ExportError(what, got=found[1], hint=hint)
    if not placing:
        _check_caches(given.kv_cache, given.inputs, dims, axes)
    _check_positions(placing, given.inputs, dims, given.kv_cache)
    _check_forward(given.module, given.inputs)
    if not all(isinstance(each, str) and each for each in given.outputs):
        raise ExportError("An output has no name.", got=list(given.outputs), hint='outputs=("y",)')
    given.module.eval()
    checked: dict[str, Any] = {"axes": axes, "kv_cache": dict(given.kv_cache)}
    checked["name"] = given.name or name.replace("_", "-")
    new = new_token_axis(dims, given.kv_cache, placing, axes) if placing else ""
    checked |= {"positions": tuple(placing), "entries": _entries(given, axes, dims, new) if placing else {}}
    if placing:
        _change_copies(given.module, checked["kv_cache"], given.outputs)
        checked["outputs"] = ()
    return UserModule(**{**vars(given), **checked}, factory=reference, dims=dims)


def _check_caches(cached: Mapping[str, str], inputs: Mapping[str, Example], dims: _Dims, axes: Axes) -> None:
    """Refuse an input that has the axes of a cache that grows, and is not declared as one."""

    def kind(name: str) -> tuple[object, ...]:
        """The type of an input, and the axes that are not of one size."""
        varying = (dim if dim in axes and axes[str(dim)].is_dynamic else None for dim in dims[name])
        return inputs[name].tensor.dtype, *varying

    grown = {kind(name): name for name in cached if any(kind(name)[2:])}  # not by the batch alone
    if missing := [name for name in inputs if name not in cached and kind(name) in grown]:
        raise _half_declared(missing, grown[kind(missing[0])])


def _half_declared(missing: Sequence[str], other: str, free: Sequence[str] = ()) -> ExportError:
    """Inputs that look like the cached input `other`, and outputs that may take their places."""
    what = "Inputs have the axes of the KV cache, and kv_cache does not have them."
    place = f", such as {free[0]}" if free else ""
    hint = f'kv_cache with "{missing[0]}" and the output that takes its place{place}, or another axis for it'
    return ExportError(what, got=f"{', '.join(missing)}, with the axes of {other}", hint=hint)


def _check_positions(
    placing: Sequence[str], inputs: Mapping[str, Example], dims: _Dims, cached: Iterable[str]
) -> None:
    """Refuse inputs that cannot hold positions, or a number of tokens."""
    for name in placing:
        dtype, (has_axes, tokens) = inputs[name].tensor.dtype, _placed_along(dims[name])
        if dtype not in _WHOLE:
            raise ExportError(f"Positions {name} are not whole numbers.", got=dtype, hint="int64 or int32")
        axes = 'the axes "B", "S", both, or none: the tokens of which are placed'
        if not has_axes:
            raise ExportError(
                f"Positions {name} have axes that tokens do not have.", got=dims[name], hint=axes
            )
        counting = [each for each in _counting(inputs, dims, cached) if each not in placing]
        if counting and tokens is not None and bool((inputs[name].tensor.diff(dim=tokens) < 0).any()):
            what = f"Positions {name} do not count the tokens, and another input does."
            got = ", ".join(f"{each} {_first_numbers(inputs[each].tensor)}" for each in (name, counting[0]))
            hint = f'positions="{counting[0]}": whole numbers with {axes}'
            raise ExportError(what, got=got, hint=hint)


_WHOLE = (torch.int32, torch.int64)


def _placed_along(dims: Sequence[Dim]) -> tuple[bool, int | None]:
    """Whether an input of these dimensions can place tokens, and the dimension with one entry for each."""
    named = [dim for dim in dims if dim != 1]
    others = [dim for dim in named if dim != "B"]
    can_place = named in (["B", *others], others) and len(others) < 2 and all(map(_is_name, others))
    return can_place, dims.index(others[0]) if can_place and others else None


def _counting(inputs: Mapping[str, Example], dims: _Dims, cached: Iterable[str]) -> list[str]:
    """The inputs whose examples hold successive positions of tokens."""
    found = []
    for name in (name for name in inputs if name not in cached):
        tensor, (_, tokens) = inputs[name].tensor, _placed_along(dims[name])
        if tensor.dtype in _WHOLE and tokens is not None and tensor.shape[tokens] > 1:
            found += [name] if bool((tensor.diff(dim=tokens) == 1).all()) else []
    return found


def _first_numbers(tensor: Tensor) -> list[int]:
    return [int(number) for number in tensor.flatten()[:4]]


def _is_name(dim: Dim) -> bool:
    return isinstance(dim, str) and dim.isidentifier()


def _entries(given: Deployable, axes: Axes, dims: _Dims, new: str) -> dict[str, int]:
    """The dimension of the entries of every cached input: the one with a name, besides batch and tokens."""
    found = {}
    for name in given.kv_cache:
        own = [i for i, dim in enumerate(dims[name]) if dim in axes and dim not in ("B", new)]
        if len(own) == 1:
            found[name] = own[0]
            room, most = axes[str(dims[name][own[0]])].max, axes[new].max
            if most > room and not given.longest:
                what = f"One call may bring more tokens than cache {name} has entries."
                got, hint = f"{new} up to {most}, {room} entries", f"{new} up to {room}, or a larger cache"
                raise ExportError(what, got=got, hint=f"{hint}; for a ring buffer also longest=")
    return found


def _change_copies(module: nn.Module, cached: Mapping[str, str], outputs: Sequence[str]) -> None:
    """Let a module that changes its KV cache in place change copies, and return those that it does not.

    What it returns becomes a dictionary where `outputs` names it.
    """
    copies: dict[str, Tensor] = {}

    def copied(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        copies.update({name: kwargs[name].clone() for name in cached if name in kwargs})
        return args, {**kwargs, **copies}

    def returned(_: nn.Module, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        changed = {made: copies.pop(name) for name, made in cached.items() if name in copies}
        named = result
        if not isinstance(result, Mapping):
            parts = [result] if isinstance(result, Tensor) else list(result)
            names = outputs or (("output",) if isinstance(result, Tensor) else ())
            if len(parts) != len(names):
                return result
            named = dict(zip(names, parts, strict=True))
        return {**named, **{name: tensor for name, tensor in changed.items() if name not in named}}

    module.register_forward_pre_hook(copied, with_kwargs=True)
    module.register_forward_hook(returned, with_kwargs=True)


def _axis(name: object, sizes: object) -> Axis:
    if not isinstance(name, str) or not name.isidentifier():  # sums are made of names, and PyTorch asks it
        raise ExportError("An axis has no name.", got=repr(name), hint="letters, digits and _, such as S")
    if isinstance(sizes, Axis):
        return sizes
    if isinstance(sizes, str):
        return Axis.parse(sizes, name=name)
    if isinstance(sizes, tuple | list) and len(sizes) == 3:
        return Axis(min=sizes[0], opt=sizes[1], max=sizes[2])
    raise ExportError(f"Axis {name} is not a range.", got=sizes, hint='"1:128:512", or (1, 128, 512)')


def _dims(name: str, example: object, axes: Axes) -> tuple[Dim, ...]:
    """The dimensions of an input, where its example can be used."""
    if not isinstance(example, Example) or not isinstance(example.tensor, Tensor):
        held = f" of {type(example.tensor).__name__}" if isinstance(example, Example) else ""
        got = f"{type(example).__name__}{held}"
        raise ExportError(f"Input {name} is not an Example of a tensor.", got=got, hint=_SEE)
    if strange := [axis for axis in example.axes if axis is not None and not isinstance(axis, str)]:
        hint = "None for a fixed dimension"
        raise ExportError(f"Input {name} has an axis that is not a name.", got=strange[0], hint=hint)
    if example.tensor.is_meta:
        raise ExportError(
            f"The example of input {name} has no numbers.",
            got="a tensor on meta",
            hint="a tensor with numbers, such as torch.randn(...)",
        )
    if example.tensor.is_floating_point() and bool(example.tensor.detach().isnan().any()):
        raise ExportError(
            f"The example of input {name} has values that are not numbers.",
            got="NaN",
            hint="an example without NaN",
        )
    shape = tuple(example.tensor.shape)
    if len(example.axes) > len(shape):
        got = f"{example.axes} for shape {shape}"
        raise ExportError(
            f"Input {name} has more axis names than dimensions.",
            got=got,
            hint="a name or None for each dimension",
        )
    if unknown := [axis for axis in _names(example.axes) if axis not in axes]:
        hint = f"{nearest(unknown[0], axes)}; ranges are given in axes={{...}}" if axes else _SEE
        raise ExportError(f"Input {name} names an axis that has no range.", got=unknown[0], hint=hint)
    named = (*example.axes, *(None,) * (len(shape) - len(example.axes)))
    return tuple(size if axis is None else axis for axis, size in zip(named, shape, strict=True))


def _names(dims: Iterable[Dim | None]) -> list[str]:
    """The axes in dimensions, those in sums included."""
    parts = [part for dim in dims if isinstance(dim, str) for part in terms_of(dim)]
    return [part for part in parts if not part.isdecimal()]


def _check_forward(module: nn.Module, inputs: Mapping[str, Example]) -> None:
    """Whether `forward` takes these inputs, and no other must be given."""
    parameters = inspect.signature(module.forward).parameters.values()
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    known = {each.name: each for each in _parameters(module.forward)}
    if strange := [name for name in inputs if name not in known and not takes_any]:
        hint = nearest(strange[0], known) if known else "named parameters, as in forward(self, x, mask)"
        raise ExportError("forward() takes no such input.", got=strange[0], hint=hint)
    if missing := [key for key, each in known.items() if each.default is each.empty and key not in inputs]:
        raise ExportError("forward() needs inputs that have no example.", got=", ".join(missing), hint=_SEE)


def refuse_wrong_cache(user: UserModule, exported: ExportedModule) -> None:
    """Refuse a preallocated KV cache that is declared in part, or whose outputs hold no new entries."""
    graph, cached = exported.model.graph, user.kv_cache
    types = {str(value.name): value.dtype for value in (*graph.inputs, *graph.outputs)}
    taken = {str(value.name): (value.dtype, *dims_of(value)) for value in graph.inputs}
    made = {name: (types[name], *found) for name, found in exported.outputs.items()}
    same = [name for name, output in cached.items() if name in taken and taken[name] == made.get(output)]
    if not same or len(same) < len(cached):
        return  # none, or one that grows
    if not user.positions:
        counting = [name for name in _counting(user.inputs, user.dims, cached) if name not in exported.tables]
        if counting:
            what, got = "A preallocated KV cache needs positions=.", f"{counting[0]} counts the tokens"
            raise ExportError(what, got=got, hint=f'positions="{counting[0]}"')
        return  # the state of a recurrent model, or a cache that only keeps the order of its entries
    kinds = {taken[name]: name for name in cached}
    free = [name for name, kind in made.items() if name not in cached.values() and kind in kinds]
    if not free:
        return
    others = [name for name in user.inputs if name not in cached and taken.get(name) in kinds]
    if missing := [name for name in others if name not in user.positions]:
        raise _half_declared(missing, kinds[taken[missing[0]]], free)
    # What a module changes in place is returned for it, also if it returns it itself under another name.
    examples = user.examples
    results = run_explained(
        user.module, examples, "the sizes of its example", hint="an example that it takes"
    )
    outputs = dict(zip(exported.outputs, results, strict=True))
    for name, output in cached.items():
        if torch.equal(outputs[output], examples[name]):
            what = "An output that kv_cache names is the cached input, without new entries."
            near = nearest(output, [each for each in free if made[each] == taken[name]] or free)
            raise ExportError(what, got=f"{output} is {name}", hint=near)


# -- A user's module with its weights, in the precision of an export -------------------------------

# Angles of a rotary embedding: in half precision, far positions would all be alike.
_KEPT_WIDE = ("inv_freq", "original_inv_freq")


def draw_user_inputs(
    user: UserModule, label: str, sizes: Sizes, seed: int, *, past: int | None = None, ragged: bool = False
) -> dict[str, Tensor]:
    """Inputs at some sizes, rounded: drawn by the user's own function, or after the example.

    `past` tokens are in the cache of every batch element; default: drawn.
    """
    drawn = _draw_positions(user, label, sizes, seed, past=past, ragged=ragged)
    for key, example in user.inputs.items():
        if key in drawn:
            continue
        shape = shape_of(example.tensor, user.dims[key], sizes)
        if example.draw is None:
            drawn[key] = draw_one(f"{label}/{key}", example.tensor, shape, seed)
            continue
        hint = f"draw(shape, generator) must give a tensor of shape {shape}"
        with user_code(where_is(example.draw), f"The draw of input {key} fails.", hint=hint):
            made = example.draw(shape, seeded_generator(seed, f"{label}/{key}"))
        if not isinstance(made, Tensor):
            raise ExportError(
                f"draw= of input {key} does not return a tensor.",
                got=type(made).__name__,
                hint="return a torch.Tensor of the given shape",
            )
        if (got := tuple(made.shape)) != shape:
            raise ExportError(f"draw= of input {key} returns another shape.", got=got, hint=str(shape))
        dtype, wanted = made.dtype, example.tensor.dtype
        if dtype != wanted and not (dtype.is_floating_point and wanted.is_floating_point):
            raise ExportError(f"draw= of input {key} returns another type.", got=dtype, hint=str(wanted))
        drawn[key] = made.detach()
    return user.rounded({key: drawn[key] for key in user.inputs})


def _draw_positions(
    user: UserModule, label: str, sizes: Sizes, seed: int, *, past: int | None, ragged: bool
) -> dict[str, Tensor]:
    """Where the new tokens are: behind as many as a dynamic cache has, or a preallocated one has room for."""
    if not user.positions:
        return {}
    new = new_token_axis(user.dims, user.kv_cache, user.positions, user.axes)
    S, B = sizes[new], sizes.get("B", 1)
    shapes = {key: shape_of(user.inputs[key].tensor, user.dims[key], sizes) for key in user.kv_cache}
    entries = min((shapes[key][axis] for key, axis in user.entries.items()), default=S)
    kinds = {key: str(user.inputs[key].tensor.dtype).removeprefix("torch.") for key in user.positions}
    placed = tuple(TensorSpec(name=key, kind=kind, dims=user.dims[key]) for key, kind in kinds.items())
    grows = any(user.axes[str(user.dims[key][axis])].min == 0 for key, axis in user.entries.items())
    if grows:
        lengths = torch.full((B,), entries)
    elif past is not None:
        lengths = torch.full((B,), past)
    else:
        generator = seeded_generator(seed, f"{label}/positions")
        lengths = draw_lengths(B, max((user.longest or entries) - S, 0), generator, ragged)
        if not all("B" in each.dims for each in placed):
            lengths = lengths[-1:].expand(B)
    made = place_tokens(placed, new, lengths.numpy(), S)
    return {key: torch.from_numpy(array) for key, array in made.items()}


@user_code(timed=False, mixed=True)
def open_user_module(
    model: str | Deployable,
    precision: Precision,
    *,
    seed: int = 0,
    weights: Path | None = None,
    prefix: str = "",
    axes: Axes | None = None,
    device: str = "cpu",
) -> UserModule:
    """Load a module, give it the weights of a file where there is one, and round it.

    The model is `path/to/file.py:factory`, `package.module:factory`, or a `Deployable`, which is not changed;
    `read_state` says what weights may be. The seed is PyTorch's while the factory runs, and `axes` are ranges
    in place of the factory's.
    """
    found = load_factory(model, seed=seed) if isinstance(model, str) else load_deployable(model)
    loaded = found.with_axes(axes or {})
    module = loaded.module
    isolation.own.add(loaded.factory)  # the user named it, or allowed it to run
    notes = () if weights is None else _load_weights(module, weights, prefix)
    tensors = (*module.named_parameters(), *module.named_buffers())
    if empty := [name for name, tensor in tensors if tensor.is_meta]:
        what, hint = "The module has weights without numbers.", "a factory that makes or loads them"
        raise ExportError(what, got=f"{len(empty)} on the meta device: {', '.join(empty[:3])}", hint=hint)
    module.requires_grad_(False)
    file, digest = None if weights is None else str(weights), state_digest(module)
    known = replace(loaded, seed=seed, weights_file=file, weights_prefix=prefix, state_sha256=digest)
    buffers = [(part, *each) for part in module.modules() for each in part.named_buffers(recurse=False)]
    kept = [(part, name, buffer) for part, name, buffer in buffers if name in _KEPT_WIDE]
    # Not module.to(): it makes complex numbers, such as a table of rotations, real.
    dtype = getattr(torch, precision.torch_name)
    module._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    for part, name, buffer in kept:
        setattr(part, name, buffer)
    module.to(device)
    return replace(known, precision=precision, notes=notes)


def reopen_user_module(spec: ModelSpec, precision: Precision, *, device: str = "cpu") -> UserModule:
    """The module of a bundle, made again by its factory."""
    refuse_without_factory(spec)
    weights, prefix = None if spec.weights_file is None else Path(spec.weights_file), spec.weights_prefix
    user = open_user_module(
        spec.factory, precision, seed=spec.seed, weights=weights, prefix=prefix, axes=spec.axes, device=device
    )
    if user.state_sha256 != spec.state_sha256:
        what = f"{spec.factory} no longer gives the weights that were exported."
        got = f"SHA-256 {user.state_sha256[:16]}…, not {spec.state_sha256[:16]}…"
        hint = "export again; a factory must give the same weights each time"
        raise BundleError(what, got=got, hint=hint)
    return user


def state_digest(module: nn.Module) -> str:
    """A hash of the names, types and numbers of all weights and buffers, also of those that are not saved."""
    digest = hashlib.sha256()
    for name, tensor in sorted({**module.state_dict(), **dict(module.named_buffers())}.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _load_weights(module: nn.Module, path: Path, prefix: str) -> tuple[str, ...]:
    """Load the weights of a file or checkpoint; returns what of it is not needed."""
    state, renamed = match_names(module, read_state(path, prefix), path, prefix)
    try:
        missing, unknown = module.load_state_dict(state, strict=False)
    except RuntimeError as error:  # shapes that do not fit
        got = " ".join(str(error).split())[:300]
        raise ExportError(
            "The weights do not fit the module.",
            got=got,
            hint="the checkpoint of this very model, or --prefix",
        ) from error
    # Weights that the module shares with itself stand in a file once.
    own = module.state_dict(keep_vars=True)
    loaded = {own[name].data_ptr() for name in state if name in own}
    if missing := [name for name in missing if name not in own or own[name].data_ptr() not in loaded]:
        wrong = [f"no {name}" for name in missing[:3]] + [f"{name} is unknown" for name in unknown[:3]]
        got, hint = ", ".join(wrong), "--prefix: what the module's names begin with in the checkpoint"
        if loaded:  # so the names begin alike, and no prefix helps
            hint = "the checkpoint of this very model: its other names match"
        raise ExportError("The weights do not match the module.", got=f"{path}: {got}", hint=hint)
    more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
    unused = (f"not needed of {path.name}: {', '.join(unknown[:8])}{more}",) if unknown else ()
    return (*renamed, *unused)


def match_names(
    module: nn.Module, state: Mapping[str, Tensor], path: Path, prefix: str = ""
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """A state under the names of a module that wraps, or is a part of, the model it was saved from.

    The names of the module begin with one prefix, those of the state with another, and what follows is the
    same. Refused where several parts of the state fit: `--prefix` names one. With a note of the mapping.
    """
    own = {name: tensor.shape for name, tensor in module.state_dict().items()}
    if not own or any(name in state for name in own):
        return dict(state), ()

    def prefixes(names: Iterable[str]) -> list[str]:
        parts = (name.split(".") for name in names)
        found = (".".join([*each[:count], ""]) for each in parts for count in range(len(each)))
        return list(dict.fromkeys(found))

    def fits(mine: str, theirs: str) -> bool:
        ends = {name: name.removeprefix(mine) for name in own}
        return all(
            f"{theirs}{end}" in state and state[f"{theirs}{end}"].shape == own[name]
            for name, end in ends.items()
        )

    common = [each for each in prefixes([next(iter(own))]) if all(name.startswith(each) for name in own)]
    theirs = prefixes(state)
    for mine in common:  # the shortest first: most of the names is compared
        if not (found := [each for each in theirs if fits(mine, each)]):
            continue
        if len(found) > 1:
            what, got = "Several parts of the weights fit the module.", ", ".join(found[:6])
            raise ExportError(what, got=f"{path}: {got}", hint=f"--prefix {found[0].removesuffix('.')}")
        (start,) = found
        taken = {name: state[f"{start}{name.removeprefix(mine)}"] for name in own}
        begin = f"{prefix.removesuffix('.')}." if prefix else ""
        return taken, (f"{mine}* of the module is {begin}{start}* in {path.name}",)
    return dict(state), ()
