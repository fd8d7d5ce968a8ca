"""Samples of a user's own data: files, folders, a Python iterator. Read one by one, nothing is unpickled."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mha_deploy.bundle.cases import Arrays, numbers_in, read_npz
from mha_deploy.errors import DeployError, text_of_error
from mha_deploy.files import LARGEST_TEXT, open_regular, refuse_duplicates, refuse_missing_data
from mha_deploy.model.catalog import functions_in
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import ModelSpec, TensorSpec, size_of
from mha_deploy.output import TOOL, is_sample, write_file
from mha_deploy.status import Kind, Reason
from mha_deploy.text import printable

Get = Callable[[int | None], np.ndarray]
"""One array of a file: the whole of it, or its n-th entry."""

_HINT = "arrays by the names of the inputs: a .npz, .safetensors or .npy file, a folder, or file.py:samples"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One call of the model: its inputs, and what else belongs to it, such as a label for a metric."""

    name: str
    inputs: Arrays
    labels: Arrays = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)  # of the axes
    of: int = 0  # how many there are, where its file says so

    @property
    def digest(self) -> str:
        """A hash of its inputs and labels: the same numbers have the same one."""
        found = hashlib.sha256()
        for group in (self.inputs, self.labels):
            for name, array in sorted(group.items()):
                found.update(f"{name} {array.dtype} {array.shape}".encode())
                found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()


@dataclass(frozen=True)
class _Stored:
    """An array of a file, of which only the shape is known until it is wanted."""

    shape: tuple[int, ...]
    get: Get


def read_samples(source: Path, spec: ModelSpec) -> Iterator[Sample]:
    """The samples of a file or a folder, in the order of their names; see docs/bring-your-own.md."""
    refuse_missing_data(source, _HINT)
    if source.is_dir():
        whole = any((source / f"{tensor.name}.npy").is_file() for tensor in spec.inputs)
        found = _in_folder(source, spec)
        return found if whole else (replace(each, of=0) for each in found)
    return _in_file(source, source.name, spec)


def samples_from(items: Iterable[Any], spec: ModelSpec, title: str) -> Iterator[Sample]:
    """The samples of an iterator: mappings of arrays by name, or arrays in the order of the inputs."""
    for number, item in enumerate(items):
        name = f"{title}[{number}]"
        given = item
        if isinstance(item, np.ndarray) or hasattr(item, "__array__"):
            given = {spec.inputs[0].name: item}
        elif isinstance(item, tuple | list):
            given = dict(zip((tensor.name for tensor in spec.inputs), item, strict=False))
        if not isinstance(given, Mapping):
            hint = "yield a dictionary of arrays by the names of the inputs"
            raise DeployError(f"{name} is not a sample.", got=type(item).__name__, hint=hint)
        try:
            named = {str(key): value for key, value in given.items()}
        except Exception as error:
            hint = "yield a dictionary of arrays by the names of the inputs"
            raise DeployError(f"{name} is not a sample.", got=text_of_error(error), hint=hint) from error
        arrays = {key: _plain(name, key, value) for key, value in named.items()}
        yield _sample(name, arrays, spec)


def _plain(name: str, key: str, value: Any) -> np.ndarray:
    """An array of NumPy, from one, a tensor of PyTorch, or numbers; whatever it is, it is the user's."""
    hint = "an array of numbers: of NumPy, or a dense tensor of PyTorch"
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            value = value.numpy() if str(value.dtype) != "torch.bfloat16" else value.float().numpy()
        array = np.asarray(value)
    except Exception as error:
        got = f"{printable(text_of_error(error))[:300]}"
        raise DeployError(f"{name}: {key} is not a numeric array.", got=got, hint=hint) from error
    if array.dtype.kind not in "biufV":
        raise DeployError(f"{name}: {key} is not a numeric array.", got=array.dtype, hint=hint)
    return array


# -- Files -----------------------------------------------------------------------------------------


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except DeployError:
        raise
    except Exception as error:  # NumPy, zipfile and safetensors raise types that share no base
        got = f"{path}: {printable(str(error))[:300]}"
        raise DeployError("The data cannot be read.", got=got, hint=_HINT) from error


_NAMELESS = "arr_0"  # of `numpy.savez`


def _arrays_of(path: Path, spec: ModelSpec) -> dict[str, _Stored]:
    """The arrays of one file, by name; a single one that has none is that of the only input."""
    with _reading(path):
        if path.suffix == ".npz":
            found = {name: _in_memory(array) for name, array in read_npz(path).items()}
        elif path.suffix == ".npy":
            found = {path.stem: _mapped(path)}
        elif path.suffix == ".safetensors":
            found = _in_safetensors(path)
        else:
            open_regular(path).close()  # what is not there is reported as such
            known = " or ".join(f"{path}:{name}" for name in functions_in(path))
            raise DeployError("Data of this kind cannot be read.", got=path, hint=known or _HINT)
    inputs = [tensor.name for tensor in spec.inputs]
    is_nameless = path.suffix == ".npy" or list(found) == [_NAMELESS]
    if len(inputs) == 1 and len(found) == 1 and is_nameless and inputs[0] not in found:
        return {inputs[0]: next(iter(found.values()))}
    return found


def _in_memory(array: np.ndarray) -> _Stored:
    return _Stored(array.shape, lambda index: array if index is None else array[index])


def _mapped(path: Path) -> _Stored:
    """A .npy file, of which only what is wanted is read."""
    open_regular(path).close()
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufV":
        raise ValueError("not an array of numbers")
    return _Stored(array.shape, lambda index: np.array(array if index is None else array[index]))


def _in_safetensors(path: Path) -> dict[str, _Stored]:
    from safetensors import safe_open

    with open_regular(path) as header:
        refuse_duplicates(header.read(min(int.from_bytes(header.read(8), "little"), LARGEST_TEXT)))
    file = safe_open(path, framework="np")

    def stored(name: str) -> _Stored:
        part = file.get_slice(name)
        return _Stored(
            tuple(part.get_shape()),
            lambda index: file.get_tensor(name) if index is None else part[index : index + 1][0],
        )

    return {name: stored(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)


def _in_file(path: Path, title: str, spec: ModelSpec) -> Iterator[Sample]:
    return _cut(path, title, _arrays_of(path, spec), spec)


def _cut(path: Path, title: str, arrays: Mapping[str, _Stored], spec: ModelSpec) -> Iterator[Sample]:
    """One sample, or where each input has a dimension more than the model's, as many as that has entries."""
    counts = set[int | None]()
    for tensor in spec.inputs:
        shape = arrays[tensor.name].shape if tensor.name in arrays else None
        if shape is None:
            known = ", ".join(arrays) or "nothing"
            problem = f"The data has no input {tensor.name}."
            raise DeployError(problem, got=f"{title}: {known}", hint=_HINT)
        more = len(shape) - len(tensor.dims)
        if more not in (0, 1):
            problem, hint = (
                f"Input {tensor.name} has the wrong rank.",
                f"[{', '.join(map(str, tensor.dims))}]",
            )
            raise DeployError(problem, got=f"{title}: {list(shape)}", hint=f"{hint}, or with N samples first")
        counts.add(shape[0] if more else None)
    if len(counts) != 1:
        hint = "as many samples of each input"
        raise DeployError(
            "The inputs have different numbers of samples.", got=f"{title}: {counts}", hint=hint
        )
    (count,) = counts
    for index in (None,) if count is None else range(count):
        name = title if index is None else f"{title}[{index}]"
        with _reading(path):
            taken = {
                key: stored.get(index if index is not None and stored.shape[:1] == (count,) else None)
                for key, stored in arrays.items()
            }
        yield replace(_sample(name, taken, spec), of=count or 1)


def _in_folder(folder: Path, spec: ModelSpec) -> Iterator[Sample]:
    """A file for each input, or else a file or a folder for each sample."""
    if any((folder / f"{tensor.name}.npy").is_file() for tensor in spec.inputs):
        yield from _by_input(folder, folder.name, spec)
        return
    endings, found = (".npz", ".safetensors", ".npy"), False
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise DeployError("The folder cannot be read.", got=error, hint=_HINT) from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir() and any((entry / f"{tensor.name}.npy").is_file() for tensor in spec.inputs):
            yield from _by_input(entry, entry.name, spec)
        elif entry.suffix in endings and entry.is_file():
            yield from _in_file(entry, entry.name, spec)
        else:
            continue
        found = True
    if not found:
        raise DeployError("The folder has no samples.", got=folder, hint=_HINT)


def _by_input(folder: Path, title: str, spec: ModelSpec) -> Iterator[Sample]:
    with _reading(folder):
        arrays = {path.stem: _mapped(path) for path in sorted(folder.glob("*.npy"))}
    return _cut(folder, title, arrays, spec)


# -- From what was read to the inputs of the model -------------------------------------------------


def _sample(name: str, arrays: Arrays, spec: ModelSpec) -> Sample:
    known = {tensor.name for tensor in spec.inputs}
    if missing := sorted(known - arrays.keys()):
        got = f"{name}: {', '.join(arrays) or 'nothing'}"
        raise DeployError(f"A sample has no input {missing[0]}.", got=got, hint=_HINT)
    inputs = {key: array for key, array in arrays.items() if key in known}
    return Sample(name=name, inputs=inputs, labels={k: a for k, a in arrays.items() if k not in known})


def as_taken(sample: Sample, spec: ModelSpec, precision: Precision) -> Sample:
    """A sample in the types of the bundle, with the sizes of its axes.

    Real numbers are rounded to the type of the input: reference and runtimes get the same ones.
    """
    inputs, sizes = dict[str, np.ndarray](), dict[str, int]()
    for tensor in spec.inputs:
        array, wanted = np.asarray(sample.inputs[tensor.name]), precision.numpy_of(tensor.kind)
        if array.ndim != len(tensor.dims):
            problem = f"Input {tensor.name} of a sample has the wrong rank."
            hint = f"[{', '.join(map(str, tensor.dims))}]"
            raise DeployError(problem, got=f"{sample.name}: {list(array.shape)}", hint=hint)
        inputs[tensor.name] = _in_type(sample.name, tensor.name, array, wanted)
        for dim, size in zip(tensor.dims, array.shape, strict=True):
            if isinstance(dim, str) and dim.isidentifier():
                sizes.setdefault(dim, size)
    for tensor in spec.inputs:  # sums such as P+S
        for dim, size in zip(tensor.dims, inputs[tensor.name].shape, strict=True):
            if isinstance(dim, str) and not dim.isidentifier():
                _solve(dim, size, sizes)
    for tensor in spec.inputs:
        _check_shape(sample.name, tensor, inputs[tensor.name].shape, sizes)
    ordered = {axis: sizes[axis] for axis in spec.axes if axis in sizes}
    return Sample(name=sample.name, inputs=inputs, labels=sample.labels, sizes=ordered)


def overflowing(sample: Sample, taken: Sample) -> Reason | None:
    """The input of which the type of the bundle makes infinities, with the largest of its numbers."""
    for name, array in taken.inputs.items():
        given = numbers_in(np.asarray(sample.inputs[name]))
        if given is None or array.dtype.kind not in "fV":
            continue
        numbers_given = given.astype(np.float64)
        lost = np.isinf(array.astype(np.float64)) & np.isfinite(numbers_given)
        if lost.any():
            largest = float(np.abs(numbers_given[lost]).max())
            numbers = {"largest": largest, "limit": float(ml_dtypes.finfo(array.dtype).max)}
            return Reason(kind=Kind.BEYOND_TYPE, got=name, wanted=str(array.dtype), numbers=numbers)
    return None


def _solve(dim: str, size: int, sizes: dict[str, int]) -> None:
    """Find the one axis of a sum that has no size yet."""
    names = {node.id for node in ast.walk(ast.parse(dim, mode="eval")) if isinstance(node, ast.Name)}
    if len(unknown := names - sizes.keys()) == 1:
        (axis,) = unknown
        at_zero, at_one = (size_of(dim, {**sizes, axis: value}) for value in (0, 1))
        if (step := at_one - at_zero) > 0 and (size - at_zero) % step == 0:
            sizes[axis] = (size - at_zero) // step


def _check_shape(name: str, tensor: TensorSpec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> None:
    try:
        wanted: tuple[int, ...] | None = tensor.shape(sizes)
    except KeyError:
        wanted = None
    if wanted != shape:
        problem = (
            f"Input {tensor.name} of a sample has a shape that does not match its other inputs or the model."
        )
        hint = f"[{', '.join(map(str, tensor.dims))}]"
        raise DeployError(problem, got=f"{name}: {list(shape)}", hint=hint)


def _in_type(name: str, key: str, array: np.ndarray, wanted: np.dtype) -> np.ndarray:
    """An input in its type: real numbers are rounded, whole ones must fit."""
    numbers = numbers_in(array)
    if numbers is None:
        problem = f"Input {key} of a sample does not hold numbers."
        raise DeployError(problem, got=f"{name}: {array.dtype}", hint=str(wanted))
    array, is_real = numbers, numbers.dtype.kind in "fV"
    if array.dtype == wanted:
        cast = array
    elif is_real is (wanted.kind in "fV") or (array.dtype.kind in "biu" and wanted.kind in "fV"):
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(wanted)
        if not is_real and not np.array_equal(cast.astype(array.dtype), array):
            problem, hint = f"The numbers of input {key} do not fit its type.", f"{wanted}"
            raise DeployError(problem, got=f"{name}: {array.min()} to {array.max()}", hint=hint)
    else:
        problem = f"Input {key} of a sample has another kind of numbers."
        raise DeployError(problem, got=f"{name}: {array.dtype}", hint=str(wanted))
    if wanted.kind in "fV" and np.isnan(cast.astype(np.float64)).any():
        raise DeployError(f"Input {key} of a sample has NaN.", got=name, hint="leave the sample out")
    return cast


def write_sample(path: Path, sample: Sample, *, within: Path, overwrite: bool = False) -> Path:
    """Write a sample as a file that `read_samples` reads; one of ours is replaced."""
    from safetensors.numpy import save

    arrays = {
        name: np.asarray(array, order="C") for name, array in (*sample.inputs.items(), *sample.labels.items())
    }
    data = save(arrays, metadata={"tool": TOOL, "sample": printable(sample.name)})
    return write_file(path, data, is_sample, within=within, overwrite=overwrite)
