"""Names for what a module returns: a tensor, a tuple, a dictionary, or these in each other."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind, TensorArgument
from torch.utils._pytree import TreeSpec, tree_unflatten

from mha_deploy.errors import ExportError

_NAME = "output"


def named_outputs(program: ExportedProgram, given: Sequence[str], taken: Collection[str]) -> dict[str, str]:
    """Name the tensors that a program returns.

    Args:
        program: The program.
        given: The user's names, of all tensors; names come from the keys of what is returned otherwise.
        taken: Names that are used already, such as those of the inputs.

    Returns:
        The FX node of every output by name, in order. What is None has no name.

    Raises:
        ExportError: Something else than tensors is returned, or the given names do not fit.
    """
    specs = [spec for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    keys = _keys(program.call_spec.out_spec, len(specs))
    found = []
    for key, spec in zip(keys, specs, strict=True):
        if isinstance(spec.arg, TensorArgument):
            found.append((key, spec.arg.name))
        elif not (isinstance(spec.arg, ConstantArgument) and spec.arg.value is None):
            raise ExportError(
                "The module returns something that is not a tensor.",
                got=f"{key}: {getattr(spec.arg, 'value', spec.arg.name)}",
                hint="a wrapper that returns tensors only",
            )
    if not found:
        raise ExportError("The module returns no tensor.")
    if given and len(given) != len(found):
        raise ExportError(
            "The names of the outputs do not fit what the module returns.",
            got=f"{len(given)} names for {len(found)} tensors: {', '.join(key for key, _ in found)}",
        )
    clash = [name for name in given if name in taken or list(given).count(name) > 1]
    if clash:
        raise ExportError("The names of the outputs are not their own.", got=", ".join(clash))
    names = _unique(given or [key for key, _ in found], taken)
    return {name: node for name, (_, node) in zip(names, found, strict=True)}


def _keys(spec: TreeSpec | None, count: int) -> list[str]:
    """A name for every leaf of a structure."""
    keys = [f"{_NAME}_{index}" if index else _NAME for index in range(count)]
    if spec is None or spec.num_leaves != count:
        return keys
    structure = tree_unflatten([_Leaf(index) for index in range(count)], spec)
    for leaf, path in _leaves(structure, ()):
        keys[leaf.index] = _joined(path)
    return keys


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """Stands for a tensor in the structure that the module returns."""

    index: int


def _leaves(part: Any, path: tuple[str | int, ...]) -> Iterator[tuple[_Leaf, tuple[str | int, ...]]]:
    if isinstance(part, _Leaf):
        yield part, path
        return
    for key, each in _members(part):
        yield from _leaves(each, (*path, key))


def _members(part: Any) -> list[tuple[str | int, Any]]:
    if isinstance(part, Mapping):
        return [(str(key), value) for key, value in part.items()]
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return list(zip(part._fields, part, strict=True))
    if isinstance(part, list | tuple):
        return list(enumerate(part))
    if dataclasses.is_dataclass(part):
        return [(field.name, getattr(part, field.name)) for field in dataclasses.fields(part)]
    return []


def _joined(path: tuple[str | int, ...]) -> str:
    """`output`, `output_1`, `hidden_states_2`: the keys on the way to a tensor."""
    parts = [str(part) for part in path]
    if not path or isinstance(path[0], int):
        parts = [_NAME, *parts[1:]] if not path or path[0] == 0 else [_NAME, *parts]
    return re.sub(r"\W", "_", "_".join(parts))


def _unique(names: Sequence[str], taken: Collection[str]) -> list[str]:
    """The names, other than those that are taken and than each other."""
    used, result = set(taken), []
    for name in names:
        free = f"{name}_out" if name in taken else name
        count = 1
        while free in used:
            count += 1
            free = f"{name}_{count}"
        used.add(free)
        result.append(free)
    return result
