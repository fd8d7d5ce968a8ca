"""Golden cases on disk: inputs, the FP64 oracle, and what eager PyTorch computed."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path

import msgspec
import numpy as np

from mha_deploy.bundle.folder import Bundle
from mha_deploy.bundle.manifest import GoldenEntry
from mha_deploy.errors import BundleError, DeployError, ExportError
from mha_deploy.files import LARGEST_TEXT, open_regular, refuse_duplicates
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import CACHE_TENSORS, CACHES, FLOAT, LENGTHS, ModelSpec, TensorSpec

# -- Files of arrays that anybody may have written: nothing is unpickled -----------------------------

CheckNames = Callable[[list[str]], None]
"""May refuse the names of the arrays in a file before any of them is read."""


def read_npz(path: Path, check_names: CheckNames = lambda names: None) -> dict[str, np.ndarray]:
    """Read every array of a user's .npz file."""
    try:
        with open_regular(path) as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("a single array, not an .npz archive")
            check_names(archive.files)
            arrays = {name: archive[name] for name in archive.files}
            for name, array in arrays.items():
                if not isinstance(array, np.ndarray):  # NumPy returns members of another format as they are
                    raise ValueError(f"{name} is not an array")
            return arrays
    except FileNotFoundError as error:
        raise DeployError("There is no such .npz file.", got=path) from error
    except DeployError:
        raise
    except Exception as error:  # NumPy, zipfile and the decompressors raise types that share no base
        hint = "numpy.savez(path, name=array, ...), without objects"
        raise DeployError("The .npz file cannot be read.", got=f"{path}: {error}", hint=hint) from error


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the arrays of a bundle by name, as `group/name`, in the safetensors format."""
    from safetensors.numpy import save

    path.write_bytes(save({name: np.asarray(array, order="C") for name, array in arrays.items()}))


def read_arrays(path: Path, known: Set[str] | None = None) -> dict[str, np.ndarray]:
    """Read every array of a safetensors file, whose header must agree with its size.

    Where they are `known`, a file that holds others or lacks one is refused before any is read.
    """
    import ml_dtypes  # noqa: F401  # registers bfloat16 with NumPy, which safetensors asks for by name
    from safetensors import safe_open

    try:
        if not path.is_file():
            raise FileNotFoundError(f"no such file: {path}")
        with open_regular(path) as header:
            refuse_duplicates(header.read(min(int.from_bytes(header.read(8), "little"), LARGEST_TEXT)))
        with safe_open(path, framework="np") as file:
            names = set(file.keys())
            if known is not None and names != known:
                strange = [*(f"no {name}" for name in sorted(known - names)), *sorted(names - known)]
                problem = "The file does not hold the arrays that the manifest describes."
                raise BundleError(problem, got=f"{path.name}: {', '.join(strange)}", hint="export again")
            return {name: file.get_tensor(name) for name in names}
    except DeployError:
        raise
    except Exception as error:  # safetensors and NumPy raise types that share no base
        problem = "The file of arrays cannot be read."
        raise BundleError(problem, got=f"{path}: {error}", hint="export again") from error


# -- What a golden case keeps of a KV cache: the entries that the call wrote -----------------------

Arrays = Mapping[str, np.ndarray]


def cached_outputs(spec: ModelSpec) -> dict[str, str]:
    """For each KV cache that goes out of a catalog layer, the one that came in."""
    taken, out = CACHE_TENSORS.get(spec.cache, ((), ()))
    return dict(zip(out, taken, strict=True))


def stored_outputs(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """The outputs of a layer as a file holds them: of a cache, [B, Hkv, S, D]."""
    cached = cached_outputs(spec)
    S = next(tensor for tensor in spec.inputs if tensor.name == "x").dims[1] if cached else 0
    return tuple(
        replace(tensor, dims=(*tensor.dims[:2], S, tensor.dims[3])) if tensor.name in cached else tensor
        for tensor in spec.outputs
    )


def stored_bytes(spec: ModelSpec, sizes: Mapping[str, int]) -> int:
    """The most bytes that the arrays of one case take; in a 16-bit precision they take fewer."""
    inputs = sum(
        prod(tensor.shape(sizes)) * (4 if tensor.kind == FLOAT else np.dtype(tensor.kind).itemsize)
        for tensor in spec.inputs
    )
    results = sum(prod(tensor.shape(sizes)) for tensor in stored_outputs(spec))
    return inputs + results * (8 + 4)  # the oracle, and the results of the module


def first_new_entries(inputs: Mapping[str, np.ndarray], given: str) -> np.ndarray:
    """The position of the first new entry of every batch element, in the cache of this name. [B]."""
    cache = inputs[given]
    return inputs[LENGTHS] if LENGTHS in inputs else np.full(len(cache), cache.shape[2])


def entries_from(cache: np.ndarray, starts: np.ndarray, S: int) -> np.ndarray:
    """S entries of every batch element. [B, Hkv, T, D] -> [B, Hkv, S, D]."""
    return np.stack([entries[:, start : start + S] for entries, start in zip(cache, starts, strict=True)])


def with_entries(before: np.ndarray, new: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """A copy of a cache with the new entries in their places: in their type, and as long as they need it."""
    B, Hkv, T, D = before.shape
    S = new.shape[2]
    whole = np.empty((B, Hkv, max(T, int(starts.max()) + S), D), new.dtype)
    whole[:, :, :T] = before
    for b, start in enumerate(starts):
        whole[b, :, start : start + S] = new[b]
    return whole


# -- Golden cases ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GoldenCase:
    """One case: inputs, FP64 oracle, and the results of the module itself."""

    name: str
    sizes: Mapping[str, int]
    inputs: Arrays
    oracle: Arrays
    eager: Arrays
    note: str = ""
    flops: int = 0  # the work of one call of a user's module, else 0
    cached: Mapping[str, str] = field(default_factory=dict)  # see `cached_outputs`
    allowance: float = 1.0  # a factor on its budgets
    suspects: Mapping[str, Arrays] = field(default_factory=dict)  # what mistakes would add to its outputs


def golden_cases(bundle: Bundle) -> Iterator[GoldenCase]:
    """Read the golden cases of a bundle one by one."""
    return (read_case(bundle, entry) for entry in bundle.manifest.golden)


def read_case(bundle: Bundle, entry: GoldenEntry) -> GoldenCase:
    """Read one case, checking it against the spec."""
    spec, precision = bundle.manifest.spec, bundle.manifest.precision
    groups = {"inputs": spec.inputs, "oracle": stored_outputs(spec), "eager": stored_outputs(spec)}
    known = {f"{group}/{tensor.name}": tensor for group, tensors in groups.items() for tensor in tensors}
    arrays = read_arrays(bundle.file(entry.file), known.keys())
    check_arrays(arrays, known, entry.sizes, precision)
    inputs, oracle, eager = (
        {tensor.name: arrays[f"{group}/{tensor.name}"] for tensor in groups[group]} for group in groups
    )
    if LENGTHS in inputs:
        lengths, room = inputs[LENGTHS], inputs[CACHES[0]].shape[2] - inputs["x"].shape[1]
        if (lengths < 0).any() or (lengths > room).any():
            problem, got = "The new entries of a golden case do not fit its cache.", lengths.tolist()
            raise BundleError(problem, got=f"{entry.file}: lengths {got}", hint=f"0 to {room}: export again")
    refuse_infinite(entry.file, (*oracle.items(), *eager.items()))
    refuse_implausible(entry.file, oracle, eager, precision)
    for results, (name, taken) in product((oracle, eager), cached_outputs(spec).items()):
        results[name] = with_entries(inputs[taken], results[name], first_new_entries(inputs, taken))
    about = msgspec.structs.asdict(entry)
    del about["file"]
    return GoldenCase(**about, inputs=inputs, oracle=oracle, eager=eager, cached=cached_outputs(spec))


def refuse_infinite(file: str, results: Iterable[tuple[str, np.ndarray]]) -> None:
    """Refuse golden results that are not finite: an infinite eager result would make an infinite budget."""
    for name, array in results:
        if not np.isfinite(array.astype(np.float64)).all():
            raise BundleError("A golden result is not finite.", got=f"{file}: {name}", hint="export again")


# How far eager may be from the oracle, in units of the roundoff: what depth, cancellation and a few other
# choices of a router cost, and no more. Errors of rounding cancel in the gain, so it may be less.
_MOST_ROUNDOFFS = {"fp16": 512, "bf16": 64, "fp32": 1 << 14}
_GAIN_SHARE = 1 / 8
_FEW_ROUNDOFFS = 16  # of numbers around 1, for a result that cancels to almost nothing
_MOST_DIFFERENT = 0.25  # of integers, such as the choices of an argmax


def refuse_implausible(file: str, oracle: Arrays, eager: Arrays, precision: Precision) -> None:
    """Refuse an oracle that the module itself misses by more than rounding explains.

    The budget of every runtime follows from the module's own error. With a ceiling on that error no budget
    can be so wide that a wrong result passes.
    """
    for name, true in oracle.items():
        got = eager[name]
        if got.shape != true.shape or not true.size:
            continue
        if not np.issubdtype(true.dtype, np.floating):
            share, most, what = float(np.mean(got != true)), _MOST_DIFFERENT, "of its numbers differ"
        else:
            most = _MOST_ROUNDOFFS[precision.name] * precision.roundoff
            error, o = got.astype(np.float64) - true, true.astype(np.float64)
            size = float(np.linalg.norm(o))
            least = _FEW_ROUNDOFFS / _MOST_ROUNDOFFS[precision.name] * math.sqrt(true.size)
            share, what = float(np.linalg.norm(error)) / max(size, least), "relative error"
            gain = abs(float(np.vdot(error, o))) / max(size, least) ** 2
            if share <= most and gain > most * _GAIN_SHARE:
                share, most, what = gain, most * _GAIN_SHARE, "larger or smaller as a whole"
        if share > most:
            problem = "The module's own result is further from the oracle than rounding explains."
            found = f"{file}: {name}, {share:.2g} {what}, at most {most:.2g} in {precision.name}"
            hint = "export again, in a wider precision (--precision auto or fp32) where the model needs it"
            raise BundleError(problem, got=found, hint=hint)


def write_case(path: Path, case: GoldenCase) -> None:
    """Write one case; of a KV cache, the entries that the call wrote."""
    inputs = case.inputs
    arrays = {f"inputs/{name}": array for name, array in inputs.items()}
    for group, results in (("oracle", case.oracle), ("eager", case.eager)):
        for name, array in results.items():
            if taken := case.cached.get(name):
                array = entries_from(array, first_new_entries(inputs, taken), inputs["x"].shape[1])
            arrays[f"{group}/{name}"] = array
    write_arrays(path, arrays)


def check_arrays(
    arrays: Arrays,
    known: Mapping[str, TensorSpec],
    sizes: Mapping[str, int],
    precision: Precision,
    owner: str = "A golden case",
) -> None:
    """Refuse arrays, by `group/name`, that are not as the spec describes them; an oracle is float64."""
    for name, tensor in known.items():
        wanted, array, shape = precision.numpy_of(tensor.kind), arrays.get(name), tensor.shape(sizes)
        if name.startswith("oracle/") and (tensor.kind == FLOAT or wanted.kind == "f"):
            wanted = np.dtype(np.float64)  # what is true is known in FP64, also of float32
        if array is None or (array.dtype, array.shape) != (wanted, shape):
            problem = f"{owner} does not hold {name} as the spec describes it."
            got = "nothing" if array is None else f"{array.dtype} {array.shape}"
            raise BundleError(problem, got=got, hint=f"{wanted} {shape}: export again")


# -- Polygraphy ------------------------------------------------------------------------------------


def write_polygraphy(folder: Path, cases: Iterable[GoldenCase]) -> None:
    """Write `inputs.json` and `outputs.json` for `polygraphy run --load-inputs … --load-outputs …`.

    Polygraphy's JSON holds arrays as base64 of NumPy's own format. The oracle is written as float32, the
    widest type that its comparison tools print well.
    """
    folder.mkdir(parents=True)
    inputs, results = [], []
    for case in cases:
        inputs.append({name: _polygraphy_array(array) for name, array in case.inputs.items()})
        lazy = {
            name: {"values": _polygraphy_array(array.astype(np.float32)), "polygraphy_class": "LazyArray"}
            for name, array in case.oracle.items()
        }
        head = {"runtime": None, "runner_name": "oracle", "polygraphy_class": "IterationResult"}
        results.append({"outputs": lazy, **head})
    run = {"lst": [["oracle", results]], "polygraphy_class": "RunResults"}
    (folder / "inputs.json").write_text(json.dumps(inputs), encoding="ascii")
    (folder / "outputs.json").write_text(json.dumps(run), encoding="ascii")


def _polygraphy_array(array: np.ndarray) -> dict[str, str]:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return {"array": base64.b64encode(buffer.getvalue()).decode("ascii"), "polygraphy_class": "ndarray"}


def refuse_polygraphy(cache: str, precision: Precision) -> None:
    """Refuse golden cases that have no Polygraphy form."""
    reason = f"cache = {cache}: Polygraphy would compare whole caches, not only the new entries"
    if cache == "none":
        reason = "bf16: Polygraphy's JSON holds NumPy arrays, which have no bfloat16"
    if cache != "none" or precision.name == "bf16":
        problem = "There are no Polygraphy files of such a bundle."
        raise ExportError(problem, got=reason, hint="leave out --polygraphy")
