"""Golden cases on disk: inputs, the FP64 oracle, and what the module gave in its own precision.

One `.npz` file a case, with the arrays `inputs/<name>`, `oracle/<name>` and `eager/<name>`. NumPy's format
has no bfloat16, so such arrays are stored as their 16 bits and the manifest's precision says how to read
them. Nothing is pickled. Of a cache, results hold the rows that the call wrote; see `golden_cache`.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mha_deploy.bundle import Bundle, GoldenEntry
from mha_deploy.errors import BundleError
from mha_deploy.golden_cache import only_new_rows, stored_outputs, with_old_rows
from mha_deploy.model_spec import ModelSpec
from mha_deploy.npz import read_npz
from mha_deploy.precision import Precision
from mha_deploy.spec import FLOAT, TensorSpec

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class GoldenCase:
    """One case: what goes in, what is true (FP64), and what the module itself gave.

    `flops` is the work of one call where it was counted, for a user's module; else 0.
    """

    name: str
    sizes: Mapping[str, int]
    inputs: Arrays
    oracle: Arrays
    eager: Arrays
    note: str = ""
    flops: int = 0


def golden_cases(bundle: Bundle) -> Iterator[GoldenCase]:
    """Read the golden cases of a bundle one by one."""
    for entry in bundle.manifest.golden:
        yield read_case(bundle, entry)


def read_case(bundle: Bundle, entry: GoldenEntry) -> GoldenCase:
    """Read one case, checking that it holds what the spec says."""
    spec, precision = bundle.manifest.spec, bundle.manifest.precision
    arrays = read_npz(bundle.file(entry.file), partial(_refuse_strangers, spec))
    inputs = take_arrays(arrays, "inputs", spec.inputs, entry.sizes, precision)
    _refuse_bad_lengths(entry, inputs)
    oracle = take_arrays(arrays, "oracle", stored_outputs(spec), entry.sizes, None)
    eager = take_arrays(arrays, "eager", stored_outputs(spec), entry.sizes, precision)
    refuse_infinite(entry.file, (*oracle.items(), *eager.items()))
    return GoldenCase(
        name=entry.name,
        sizes=entry.sizes,
        inputs=inputs,
        oracle=with_old_rows(oracle, inputs),
        eager=with_old_rows(eager, inputs),
        note=entry.note,
        flops=entry.flops,
    )


def _refuse_bad_lengths(entry: GoldenEntry, inputs: Arrays) -> None:
    if "lengths" not in inputs:
        return
    lengths, room = inputs["lengths"], inputs["key_cache"].shape[2] - inputs["x"].shape[1]
    if (lengths < 0).any() or (lengths > room).any():
        raise BundleError(
            "The new rows of a golden case do not fit its cache.",
            got=f"{entry.file}: lengths {lengths.tolist()}",
            hint=f"0 to {room}: export again",
        )


def refuse_infinite(file: str, results: Iterable[tuple[str, np.ndarray]]) -> None:
    """Refuse golden results that are not finite: an infinite eager result would make an infinite budget."""
    for name, array in results:
        if not np.isfinite(array.astype(np.float64)).all():
            raise BundleError("A golden result is not finite.", got=f"{file}: {name}", hint="export again")


def _refuse_strangers(spec: ModelSpec, names: list[str]) -> None:
    groups = {"inputs": spec.inputs, "oracle": spec.outputs, "eager": spec.outputs}
    known = {f"{group}/{tensor.name}" for group, tensors in groups.items() for tensor in tensors}
    strangers = sorted(set(names) - known)
    if strangers:
        raise BundleError(
            "A golden case holds arrays that the spec does not name.",
            got=", ".join(strangers),
            hint="export again",
        )


def write_case(path: Path, case: GoldenCase) -> None:
    """Write one case."""
    oracle, eager = (only_new_rows(results, case.inputs) for results in (case.oracle, case.eager))
    groups = {"inputs": case.inputs, "oracle": oracle, "eager": eager}
    arrays = {
        f"{group}/{name}": as_stored(a) for group, members in groups.items() for name, a in members.items()
    }
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def as_stored(array: np.ndarray) -> np.ndarray:
    """An array as NumPy's format can hold it: bfloat16 as its 16 bits."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def take_arrays(
    arrays: Arrays,
    group: str,
    tensors: Iterable[TensorSpec],
    sizes: Mapping[str, int],
    precision: Precision | None,
) -> dict[str, np.ndarray]:
    """Pick one group of arrays; `precision` None means float64."""
    taken = {}
    for tensor in tensors:
        array = arrays.get(f"{group}/{tensor.name}")
        if array is None or array.shape != tensor.shape(sizes):
            raise BundleError(
                f"A golden case does not hold {group}/{tensor.name} as the spec describes it.",
                got="nothing" if array is None else f"shape {array.shape}",
                hint=f"shape {tensor.shape(sizes)}: export again",
            )
        wanted = np.dtype(np.float64 if tensor.kind == FLOAT else tensor.kind)
        if precision is None and wanted.kind == "f":  # what is true is known in FP64, also of float32
            wanted = np.dtype(np.float64)
        elif tensor.kind == FLOAT and precision is not None:
            wanted = precision.numpy
        taken[tensor.name] = _as_read(f"{group}/{tensor.name}", array, wanted)
    return taken


def _as_read(name: str, array: np.ndarray, wanted: np.dtype) -> np.ndarray:
    if wanted.name == "bfloat16" and array.dtype == np.uint16:
        return array.view(wanted)
    if array.dtype != wanted:
        raise BundleError(
            "A golden array has the wrong type.", got=f"{name}: {array.dtype}", hint=str(wanted)
        )
    return array


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
        results.append(_polygraphy_iteration(case.oracle))
    run = {"lst": [["oracle", results]], "polygraphy_class": "RunResults"}
    (folder / "inputs.json").write_text(json.dumps(inputs), encoding="ascii")
    (folder / "outputs.json").write_text(json.dumps(run), encoding="ascii")


def _polygraphy_array(array: np.ndarray) -> dict[str, str]:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return {"array": base64.b64encode(buffer.getvalue()).decode("ascii"), "polygraphy_class": "ndarray"}


def _polygraphy_iteration(outputs: Arrays) -> dict[str, object]:
    lazy = {
        name: {"values": _polygraphy_array(array.astype(np.float32)), "polygraphy_class": "LazyArray"}
        for name, array in outputs.items()
    }
    return {"outputs": lazy, "runtime": None, "runner_name": "oracle", "polygraphy_class": "IterationResult"}


def polygraphy_refusal(spec: ModelSpec, precision: Precision) -> str | None:
    """Why Polygraphy cannot be given these cases, or None."""
    if spec.cache != "none":
        return "no Polygraphy files: it would compare whole caches, of which only the new rows say anything"
    if precision.name == "bf16":
        return "no Polygraphy files: its JSON holds NumPy arrays, which have no bfloat16"
    return None
