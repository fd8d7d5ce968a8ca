"""Golden cases and decode traces on disk: inputs, the FP64 reference, and samples of what rounding costs."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import msgspec
import numpy as np

from mha_deploy.bundle.folder import Bundle
from mha_deploy.bundle.manifest import GoldenEntry, Source
from mha_deploy.errors import BundleError, DeployError, ExportError
from mha_deploy.files import LARGEST_TEXT, hint_for_missing, open_regular, refuse_duplicates
from mha_deploy.model.precision import PRECISIONS, Precision
from mha_deploy.model.spec import (
    CACHE_TENSORS,
    CACHES,
    FLOAT,
    INT32,
    LENGTHS,
    Axis,
    KVCache,
    ModelSpec,
    TensorSpec,
    has_room,
)
from mha_deploy.output import put_file
from mha_deploy.rounding import accumulations, sample_count

# -- Files of arrays that anybody may have written: nothing is unpickled -----------------------------


def read_npz(path: Path, check_names: Callable[[list[str]], None] = lambda names: None) -> Arrays:
    """Read every array of a user's .npz file; `check_names` may refuse them before any is read."""
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
        hint = hint_for_missing(path, "the path of a file that exists")
        raise DeployError("There is no such .npz file.", got=path, hint=hint) from error
    except DeployError:
        raise
    except Exception as error:  # NumPy, zipfile and the decompressors raise types that share no base
        hint = "numpy.savez(path, name=array, ...), without objects"
        raise DeployError("The .npz file cannot be read.", got=f"{path}: {error}", hint=hint) from error


def numbers_in(array: np.ndarray) -> np.ndarray | None:
    """An array of numbers; None where it holds anything else.

    NumPy's files have no bfloat16: it comes back as two bytes without a type.
    """
    dtype = array.dtype
    if dtype.type is np.void:
        is_bfloat16 = dtype.names is None and dtype.itemsize == 2
        return array.view(ml_dtypes.bfloat16) if is_bfloat16 else None
    return array if dtype.kind in "biufcV" else None


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the arrays of a bundle by name, as `group/name`, in the safetensors format."""
    from safetensors.numpy import save

    put_file(path, save({name: np.asarray(array, order="C") for name, array in arrays.items()}))


def read_arrays(path: Path, known: Set[str] | None = None) -> dict[str, np.ndarray]:
    """Read every array of a safetensors file, whose header must agree with its size.

    Where they are `known`, a file that holds others or lacks one is refused before any is read.
    """
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
    """The bytes of the arrays of one case, in the precision where they take most.

    Samples of decisions that rounding changes are not counted: a layer of the catalog has none.
    """

    def taken(tensors: Iterable[TensorSpec], of_float: int) -> int:
        bytes_of = ((t, of_float if t.kind == FLOAT else np.dtype(t.kind).itemsize) for t in tensors)
        return sum(prod(tensor.shape(sizes)) * each for tensor, each in bytes_of)

    most, outputs = 0, stored_outputs(spec)
    numbers = sum(prod(tensor.shape(sizes)) for tensor in outputs)
    for precision in PRECISIONS.values():
        kinds = accumulations(precision)
        # Each has a byte for each number, and a scale.
        samples = sum(sample_count(numbers, kind) for kind in kinds)
        results = taken(outputs, 8) + taken(outputs, precision.bytes) + samples * taken(outputs, 1)
        most = max(most, taken(spec.inputs, precision.bytes) + results + len(kinds) * (4 + 8 * len(outputs)))
    return most


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


class Reference(dict[str, np.ndarray]):
    """What is right: the outputs of the source in FP64, by name.

    A type of its own: results of what is judged are plain dictionaries, which a case does not take.
    """

    def __init__(self, outputs: Arrays, source: Source) -> None:
        super().__init__(outputs)
        self.source = source

    def map(self, part: Callable[[Arrays], Arrays]) -> Reference:
        """A part of every output, of the same source."""
        return Reference(part(self), self.source)


@dataclass(frozen=True)
class Baseline:
    """What rounding costs: the source computed several times in the precision, each time rounded at random.

    `samples` have [N, ...] for every output: floats less the reference, as float32; others as they came out.
    In the last `branches` of them, decisions that rounding could change were changed.
    """

    samples: Arrays
    branches: int = 0

    def map(self, part: Callable[[Arrays], Arrays]) -> Baseline:
        """A part of every output, sample by sample."""
        count = min((len(each) for each in self.samples.values()), default=0)
        parts = [part({name: each[i] for name, each in self.samples.items()}) for i in range(count)]
        names = parts[0] if parts else ()
        return replace(self, samples={name: np.stack([each[name] for each in parts]) for name in names})


def join_baselines(parts: Sequence[Baseline], axes: Mapping[str, int]) -> Baseline:
    """Baselines of consecutive parts of outputs, put together along the axes of the outputs."""
    joined = {
        name: np.concatenate([each.samples[name] for each in parts], axis + 1) for name, axis in axes.items()
    }
    return replace(parts[0], samples=joined)


@dataclass(frozen=True)
class KnownMistake:
    """What a known mistake would add to the outputs, and the share of that which chance leaves.

    The share is by the type of accumulation and by output; empty where it is measured on the samples.
    """

    changes: Arrays
    chances: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    excess: float | None = None  # of numbers that are too large: by how much, relative to them


@dataclass(frozen=True, kw_only=True)
class GoldenCase:
    """One case: inputs, what is right, what rounding costs, and the results of the module itself."""

    name: str
    sizes: Mapping[str, int]
    inputs: Arrays
    oracle: Reference
    eager: Arrays  # the module as its user runs it; shown beside the others, and judged like them
    baselines: Mapping[str, Baseline]  # by the type that GEMMs accumulate in
    batch: str = "B"  # the axis of batch elements, of which none counts keys
    flops: int = 0  # the work of one call of a user's module, else 0
    cached: Mapping[str, str] = field(default_factory=dict)  # see `cached_outputs`
    suspects: Mapping[str, KnownMistake] = field(default_factory=dict)  # by known mistake

    def __post_init__(self) -> None:
        if not isinstance(self.oracle, Reference):
            raise TypeError("a case takes a Reference, not results of what is judged")

    def baseline(self, accumulate: str) -> Baseline:
        """The samples of GEMMs that accumulate in a type."""
        return self.baselines.get(accumulate) or self.baselines["fp32"]


def golden_cases(bundle: Bundle) -> Iterator[GoldenCase]:
    """Read the golden cases of a bundle one by one."""
    return (read_case(bundle, entry) for entry in bundle.manifest.golden)


def read_case(bundle: Bundle, entry: GoldenEntry) -> GoldenCase:
    """Read one case, checking it against the spec."""
    spec, precision = bundle.manifest.spec, bundle.manifest.precision
    groups = {"inputs": spec.inputs, "oracle": stored_outputs(spec), "eager": stored_outputs(spec)}
    known = {f"{group}/{tensor.name}": tensor for group, tensors in groups.items() for tensor in tensors}
    sampled = baseline_names([tensor.name for tensor in stored_outputs(spec)], precision)
    arrays = read_arrays(bundle.file(entry.file), known.keys() | sampled | _suspect_names(entry, precision))
    check_arrays(arrays, known, entry.sizes, precision)
    inputs, oracle, eager = (
        {tensor.name: arrays[f"{group}/{tensor.name}"] for tensor in groups[group]} for group in groups
    )
    if spec.cache == "preallocated":
        lengths, S, T = inputs[LENGTHS], inputs["x"].shape[1], inputs[CACHES[0]].shape[2]
        if not has_room(lengths, S, T).all():
            problem, got = "The new entries of a golden case do not fit its cache.", lengths.tolist()
            raise BundleError(problem, got=f"{entry.file}: lengths {got}", hint=f"0 to {T - S}: export again")
    refuse_infinite(entry.file, (*oracle.items(), *eager.items()))
    baselines = unpack_baselines(entry.file, arrays, oracle, precision)
    refuse_implausible(entry.file, oracle, eager, precision, baselines)
    for results, (name, taken) in product((oracle, eager), cached_outputs(spec).items()):
        results[name] = with_entries(inputs[taken], results[name], first_new_entries(inputs, taken))
    about = msgspec.structs.asdict(entry)
    del about["file"], about["source"], about["excess"], about["note"]
    about["suspects"] = _unpack_suspects(entry, arrays, oracle, precision)
    reference = Reference(oracle, entry.source)
    about |= {"inputs": inputs, "oracle": reference, "eager": eager, "baselines": baselines}
    return GoldenCase(**about, batch=spec.batch_name, cached=cached_outputs(spec))


# -- Samples on disk: one byte for each number, which is more than enough for the size of an error --

_SAMPLE = np.dtype(ml_dtypes.float8_e5m2)
_LARGEST_SAMPLE = 2.0**14
_MOST_SAMPLES, _MOST_BRANCHES = 64, 2
_OF_BRANCHES = 2.0  # times their error
_MOST_OF_BRANCH = 0.5  # relative error of another branch: some tokens are routed elsewhere, not all


def baseline_names(outputs: Iterable[str], precision: Precision) -> set[str]:
    """The arrays of the samples, as a file names them."""
    kinds = [f"{kind}/{acc}" for kind in ("samples", "scale") for acc in accumulations(precision)]
    return {"branches", *(f"{kind}/{name}" for kind in kinds for name in outputs)}


def pack_baselines(baselines: Mapping[str, Baseline]) -> dict[str, np.ndarray]:
    """Samples as a file holds them."""
    found = {"branches": np.array([each.branches for each in baselines.values()], np.int32)}
    for accumulate, baseline in baselines.items():
        for name, errors in baseline.samples.items():
            scale, stored = np.array(1.0), errors
            if errors.dtype == np.float32:
                largest = float(np.abs(errors).max(initial=0.0))
                scale = np.array(2.0 ** math.ceil(math.log2(largest)) / _LARGEST_SAMPLE if largest else 1.0)
                stored = (errors / scale).astype(_SAMPLE).view(np.uint8)
            found |= {f"samples/{accumulate}/{name}": stored, f"scale/{accumulate}/{name}": scale}
    return found


def unpack_baselines(file: str, arrays: Arrays, oracle: Arrays, precision: Precision) -> dict[str, Baseline]:
    """The samples of the outputs of an oracle; refuses another shape, and a size that is not plausible."""
    kinds, counts, found = accumulations(precision), arrays["branches"], dict[str, Baseline]()
    if counts.shape != (len(kinds),) or counts.dtype != np.int32 or counts.min() < 0:
        raise BundleError(
            "A golden case does not state its number of samples.", got=file, hint="export again"
        )
    for accumulate, branches in zip(kinds, map(int, counts), strict=True):
        samples = {}
        for name, true in oracle.items():
            stored, scale = (arrays[f"{kind}/{accumulate}/{name}"] for kind in ("samples", "scale"))
            is_float = np.issubdtype(true.dtype, np.floating)
            wanted = np.dtype(np.uint8) if is_float else true.dtype
            right = stored.ndim == true.ndim + 1 and stored.shape[1:] == true.shape
            right = right and branches < len(stored) <= _MOST_SAMPLES and branches <= _MOST_BRANCHES
            if not right or stored.dtype != wanted or scale.shape != () or not 0 < float(scale) < math.inf:
                what = "A golden case does not hold its samples as the spec describes them."
                got = f"{file}: {name}, {stored.dtype} {stored.shape}"
                raise BundleError(what, got=got, hint="export again")
            samples[name] = stored
            if is_float:
                samples[name] = stored.view(_SAMPLE).astype(np.float32) * np.float32(scale)
                refuse_infinite(file, [(name, samples[name])])
                plain, others = np.split(samples[name], [len(stored) - branches])
                _refuse_wide(file, name, true, others, precision, _MOST_OF_BRANCH)
                _refuse_wide(file, name, true, plain, precision, _most_with(others, true, precision))
        found[accumulate] = Baseline(samples, branches)
    return found


def _by_output(suspects: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """For each output the mistakes that change it, in their order."""
    found: dict[str, list[str]] = {}
    for mistake, outputs in suspects.items():
        for name in outputs:
            found.setdefault(name, []).append(mistake)
    return found


def _suspect_names(entry: GoldenEntry, precision: Precision) -> set[str]:
    kinds = ["suspects", "suspect_scales", *(f"chances/{each}" for each in accumulations(precision))]
    return {f"{kind}/{name}" for kind in kinds for name in _by_output(entry.suspects)}


def pack_suspects(suspects: Mapping[str, KnownMistake]) -> dict[str, np.ndarray]:
    """What known mistakes would add, as a file holds it."""
    found = {}
    for name, mistakes in _by_output({key: each.changes for key, each in suspects.items()}).items():
        every = [suspects[mistake] for mistake in mistakes]
        scales = [float(np.abs(each.changes[name]).max()) / _LARGEST_SAMPLE for each in every]
        stored = [each.changes[name] / scale for each, scale in zip(every, scales, strict=True)]
        found[f"suspects/{name}"] = np.stack(stored).astype(_SAMPLE).view(np.uint8)
        found[f"suspect_scales/{name}"] = np.array(scales)
        for accumulate in every[0].chances:
            known = [each.chances[accumulate][name] for each in every]
            found[f"chances/{accumulate}/{name}"] = np.array(known)
    return found


def _unpack_suspects(
    entry: GoldenEntry, arrays: Arrays, oracle: Arrays, precision: Precision
) -> dict[str, KnownMistake]:
    """The known mistakes of a case; refuses another shape, and numbers that are none."""
    kinds = accumulations(precision)
    changes = {mistake: dict[str, np.ndarray]() for mistake in entry.suspects}
    chances = {mistake: {kind: dict[str, float]() for kind in kinds} for mistake in entry.suspects}
    for name, mistakes in _by_output(entry.suspects).items():
        stored, true = arrays[f"suspects/{name}"], oracle.get(name, np.zeros((), np.int32))
        numbers = [arrays[f"{kind}/{name}"] for kind in ("suspect_scales", *(f"chances/{k}" for k in kinds))]
        right = (stored.dtype, stored.shape) == (np.dtype(np.uint8), (len(mistakes), *true.shape))
        for each in numbers:
            right &= (each.dtype, each.shape) == (np.dtype(np.float64), (len(mistakes),))
            right = right and bool((np.isfinite(each) & (each > 0)).all())
        if not right or true.dtype != np.float64:
            what = "A golden case does not hold its known mistakes as the spec describes them."
            raise BundleError(what, got=f"{entry.file}: {name}", hint="export again")
        for index, mistake in enumerate(mistakes):
            change = stored[index].view(_SAMPLE).astype(np.float32) * np.float32(numbers[0][index])
            refuse_infinite(entry.file, [(name, change)])
            changes[mistake][name] = change
            for kind, found in zip(kinds, numbers[1:], strict=True):
                chances[mistake][kind][name] = float(found[index])
    return {
        mistake: KnownMistake(changes[mistake], chances[mistake], entry.excess.get(mistake))
        for mistake in entry.suspects
    }


def _refuse_wide(
    file: str,
    name: str,
    oracle: np.ndarray,
    errors: np.ndarray,
    precision: Precision,
    most: float | None = None,
) -> None:
    """Refuse samples that are further from the reference than rounding explains, and their wide budget."""
    if not oracle.size or not len(errors):
        return
    most = most or _MOST_ROUNDOFFS[precision.name] * precision.roundoff
    share = _farthest_sample(errors, oracle, precision)
    if share > most:
        problem = "The samples of a golden case are further from its reference than rounding explains."
        found = f"{file}: {name}, relative error {share:.2g}, at most {most:.2g} in {precision.name}"
        hint = "export again, in a wider precision (--precision auto or fp32) where the model needs it"
        raise BundleError(problem, got=found, hint=hint)


def _farthest_sample(errors: np.ndarray, oracle: np.ndarray, precision: Precision) -> float:
    """The largest relative error of samples."""
    sizes = [float(np.linalg.norm(each.astype(np.float64))) for each in errors]
    least = _FEW_ROUNDOFFS / _MOST_ROUNDOFFS[precision.name] * math.sqrt(oracle.size)
    return max(sizes) / max(float(np.linalg.norm(oracle)), least)


def _most_with(others: np.ndarray, oracle: np.ndarray, precision: Precision) -> float:
    """How far a result may be from the oracle where some decisions may be taken otherwise.

    In `others` all decisions within rounding are, such as which of two levels a number is quantized to. What
    one of many roundings decides otherwise costs less than all of them, but for errors that happen to cancel.
    """
    most = _MOST_ROUNDOFFS[precision.name] * precision.roundoff
    if not len(others) or not oracle.size:
        return most
    return max(most, min(_OF_BRANCHES * _farthest_sample(others, oracle, precision), _MOST_OF_BRANCH))


def refuse_infinite(file: str, results: Iterable[tuple[str, np.ndarray]]) -> None:
    """Refuse golden results that are not finite: nothing can be compared with them."""
    for name, array in results:
        if not np.isfinite(array.astype(np.float64)).all():
            raise BundleError("A golden result is not finite.", got=f"{file}: {name}", hint="export again")


# How far eager may be from the oracle, in units of the roundoff: what depth, cancellation and a few other
# choices of a router cost, and no more. Errors of rounding cancel in the gain, so it may be less.
_MOST_ROUNDOFFS = {"fp16": 512, "bf16": 64, "fp32": 1 << 14}
_GAIN_SHARE = 1 / 8
_FEW_ROUNDOFFS = 16  # of numbers around 1, for a result that cancels to almost nothing
_MOST_DIFFERENT = 0.25  # of integers, such as the choices of an argmax


def refuse_implausible_case(case: GoldenCase, precision: Precision) -> None:
    """Refuse a golden case that was just computed, as one that is read is refused."""
    about, baselines = f"golden case {case.name}", case.baselines
    if not case.cached:  # of a cache, the samples have the new entries only
        baselines = unpack_baselines(about, pack_baselines(baselines), case.oracle, precision)
    refuse_implausible(about, case.oracle, case.eager, precision, baselines)


def refuse_implausible(
    file: str,
    oracle: Arrays,
    eager: Arrays,
    precision: Precision,
    baselines: Mapping[str, Baseline] | None = None,
) -> None:
    """Refuse an oracle that the module itself misses by more than rounding explains.

    Where rounding decides something, such as a quantized level, the `baselines` show what that costs.

    Budgets follow from the samples alone, and the module is judged like any runtime; but one that is this far
    away is not what the oracle was computed from.
    """
    for name, true in oracle.items():
        got = eager[name]
        if got.shape != true.shape or not true.size:
            continue
        if not np.issubdtype(true.dtype, np.floating):
            share, most, what = float(np.mean(got != true)), _MOST_DIFFERENT, "of its numbers differ"
        else:
            most = _MOST_ROUNDOFFS[precision.name] * precision.roundoff
            for each in (baselines or {}).values():
                others = each.samples[name][len(each.samples[name]) - each.branches :]
                most = max(most, _most_with(others, true, precision))
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
            if precision.name == "fp32":
                hint = "real inputs (--input NAME=FILE.npy, or data), on which float32 itself loses less"
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
    write_arrays(path, arrays | pack_baselines(case.baselines) | pack_suspects(case.suspects))


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


# -- Decode traces: a prompt and the tokens behind it, with the expected result at every position ----
#
# A trace is for decoding what a golden case is for one call: the expected outputs of the prefill and of N
# decode steps, and the expected entries of the KV cache at the end. It is written as golden cases are.
#
# Prompts of different lengths are padded on the right. The padding of batch element b is taken from the end
# of its own tokens, behind its last one. These tokens occur nowhere else, so an entry that padding wrote and
# no step overwrote cannot pass for the right one.


@dataclass(frozen=True, kw_only=True)
class DecodeTrace:
    """Tokens to decode, and what must come of them."""

    name: str  # its name, and that of its file
    cache: KVCache  # how the model decodes
    # All inputs but those of the cache, as one call with all L = max(prompt) + steps tokens takes them.
    # Batch element b has prompt[b] + steps tokens; those behind them pad its prompt
    inputs: Arrays
    prompt: np.ndarray  # how many tokens of each batch element the prefill brings, int32 [B]
    steps: int  # how many single tokens follow
    # Float64: every output by token, and every cached tensor with its L entries, by name. It is
    # computed in one call, without a cache
    oracle: Reference
    # The same, decoded by the model in its own precision. Behind the last token of a batch element,
    # neither is defined
    eager: Arrays
    baselines: Mapping[str, Baseline]  # by the type that GEMMs accumulate in

    @property
    def B(self) -> int:
        """The batch size."""
        return len(self.prompt)

    @property
    def longest_prompt(self) -> int:
        """How many tokens the prefill brings, padding included."""
        return int(self.prompt.max())

    @property
    def length(self) -> int:
        """L, the tokens of the longest batch element."""
        return self.longest_prompt + self.steps

    def prefill(self, part: slice = slice(None)) -> dict[str, np.ndarray]:
        """The inputs of a call that brings a part of the prompts, padded from behind the last token."""
        positions = np.arange(self.longest_prompt)
        padded = positions + self.steps * (positions >= self.prompt[:, None])  # [B, max(prompt)]
        return self.call(padded[:, part])

    def tokens(self, step: int) -> dict[str, np.ndarray]:
        """The inputs of one decode step, from 1 to `steps`."""
        return self.call(self._positions(step))

    def call(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """The inputs of a call with the tokens at these positions, [B, S]."""
        given, cache = dict(self.inputs), self.cache
        for name, axis in cache.by_context.items():
            given[name] = np.take(given[name], np.arange(int(positions.max()) + 1), axis)
        for name, axis in cache.by_token.items():
            given[name] = take_tokens(given[name], axis, positions)
        return given

    def at_step(self, name: str, by_position: np.ndarray, step: int) -> np.ndarray:
        """An output by token, where each batch element is at one step."""
        return take_tokens(by_position, self.cache.outputs[name], self._positions(step))

    def defined(self, results: Arrays) -> dict[str, np.ndarray]:
        """Outputs or cached tensors by token, with zeros behind the last token of each batch element."""
        axes = {
            **self.cache.outputs,
            **{each.name: each.axis for each in self.cache.tensors if each.in_order},
        }
        ends = self.prompt + self.steps
        return {
            name: without_padding(array, ends, axes[name]) if name in axes else array
            for name, array in results.items()
        }

    def _positions(self, step: int) -> np.ndarray:
        return (self.prompt + step - 1)[:, None]


def without_padding(array: np.ndarray, ends: np.ndarray, axis: int) -> np.ndarray:
    """Zeros from position `ends[b]` of batch element b on. An array of another shape stays as it is."""
    if array.ndim <= axis or len(array) != len(ends) or array.shape[axis] <= ends.min():
        return array
    others = [other for other in range(1, array.ndim) if other != axis]
    is_real = np.expand_dims(np.arange(array.shape[axis]) < ends[:, None], others)
    return np.where(is_real, array, array.dtype.type(0))


def position_inputs(cache: KVCache, lengths: np.ndarray, S: int) -> dict[str, np.ndarray]:
    """The inputs that place S new tokens of every batch element behind `lengths` [B] ones."""
    return place_tokens(cache.positions, cache.new, lengths, S)


def place_tokens(
    positions: Iterable[TensorSpec], new: str, lengths: np.ndarray, S: int
) -> dict[str, np.ndarray]:
    """With the axis `new`, the position of every token; else how many are before them."""
    made = {}
    for tensor in positions:
        at = lengths.reshape(-1, 1) + np.arange(S if new in tensor.dims else 1)
        shape = tensor.shape({"B": len(lengths), new: S})
        if prod(shape) != at.size:
            if (lengths != lengths[0]).any():
                what = f"Input {tensor.name} has the same token positions for all batch elements."
                got, hint = f"lengths {lengths.tolist()}", "an input with the axis B"
                raise DeployError(what, got=got, hint=hint)
            at = at[:1]
        if prod(shape) != at.size:
            what, hint = f"Input {tensor.name} cannot place {S} tokens.", "export again"
            raise DeployError(what, got=f"shape {list(shape)}", hint=hint)
        made[tensor.name] = at.reshape(shape).astype(tensor.kind)
    return made


def take_tokens(array: np.ndarray, axis: int, positions: np.ndarray) -> np.ndarray:
    """The entries of an array at the positions [B, S] of its batch elements, along the axis of the tokens."""
    if (positions == positions[0]).all():
        return np.take(array, positions[0], axis)
    by_token = np.moveaxis(array, axis, 1)
    return np.moveaxis(by_token[np.arange(len(positions))[:, None], positions], 1, axis)


def prefill_calls(prompt: np.ndarray, most: int | None) -> Iterator[tuple[slice, np.ndarray | None]]:
    """The calls that bring the prompts [B], each with at most so many tokens; None for all in one call.

    For each call: which of the max(prompt) tokens it brings, and how many of them are real in every batch
    element, int32 [B], or None if all are.
    """
    longest = int(prompt.max())
    for start in range(0, longest, most or longest):
        stop = min(start + (most or longest), longest)
        counts = np.clip(prompt - start, 0, stop - start).astype(np.int32)
        yield slice(start, stop), None if (counts == stop - start).all() else counts


_Value = TypeVar("_Value")


def run_calls(
    cache: KVCache,
    held: Mapping[str, _Value],
    calls: Iterable[Mapping[str, _Value]],
    run: Callable[[dict[str, _Value]], Mapping[str, _Value]],
) -> tuple[dict[str, list[_Value]], dict[str, _Value]]:
    """Run calls with the KV cache that each leaves to the next: outputs by token in parts, the last cache.

    `held` are the cached inputs of the first call, and each call has the others; arrays or tensors.
    """
    parts, held = {name: list[_Value]() for name in cache.outputs}, dict(held)
    for call in calls:
        got = run({**call, **held})
        held = {each.input: got[each.output] for each in cache.tensors}
        for name, found in parts.items():
            found.append(got[name])
    return parts, held


# -- Which tokens a bundle is decoded with: a prompt and as many steps as fit ----------------------

STEPS = 64
_PROMPT = 24
_OVERWRITTEN = 12
_BATCH = 3


@dataclass(frozen=True, kw_only=True)
class PlannedTrace:
    """One trace to capture: the length of the prompt of every batch element, and how many tokens follow."""

    name: str
    prompt: tuple[int, ...]
    steps: int


def plan_trace(spec: ModelSpec, steps: int = STEPS) -> PlannedTrace | str:
    """The trace of a model with a KV cache, or why it has none.

    With a preallocated cache the prompts have different lengths. The steps stop where the cache is full.
    """
    cache = spec.kv_cache
    if cache is None:
        return "no trace: the model has no KV cache"
    if not cache.outputs:
        return f"no trace: no output has the axis {cache.new} of the tokens"
    if not cache.by_token:
        return f"no trace: no input has the axis {cache.new} of the tokens"
    if spec.axes[cache.new].min > 1:
        return f"no trace: the model does not take single tokens; {_export_from(spec, cache.new, 1)}"
    if cache.past is not None and spec.axes[cache.past].min > 0:
        why = f"the cache cannot be empty, {cache.past} begins at {spec.axes[cache.past].min}"
        return f"no trace: {why}; {_export_from(spec, cache.past, 0)}"
    if cache.room < 2:
        return "no trace: the cache has no room for a second token"
    batch = None if spec.batch is None else spec.axes[spec.batch]
    B = 1 if batch is None else min(max(_BATCH, batch.min), batch.max)
    longest = min(_PROMPT, spec.axes[cache.new].max, cache.room // 2)
    prompts = [longest] * B
    if cache.is_ragged:
        prompts = [max(1, longest // 2**b) for b in range(B)]
    steps = min(steps, cache.room - longest)
    if not cache.is_in_order:  # its reference is computed step by step, up to where entries are overwritten
        least = min(each.entries for each in cache.tensors if not each.in_order) - longest + _OVERWRITTEN
        steps = min(steps, least if _OVERWRITTEN <= least <= steps else 2 * _OVERWRITTEN)
    return PlannedTrace(name="steps", prompt=tuple(prompts), steps=steps)


def _export_from(spec: ModelSpec, name: str, size: int) -> str:
    """What to try where every decoding needs a size that the model was not exported for."""
    axis = spec.axes[name]
    return f"to decode, export it with {name}={Axis(min=size, opt=axis.opt, max=axis.max)}"


# -- Whether prompts and steps fit the cache of a model --------------------------------------------


def check_steps(spec: ModelSpec, prompt: np.ndarray, steps: int) -> KVCache:
    """How a model decodes; refuses prompts and a number of steps that its cache or its axes do not allow."""
    cache, got = spec.kv_cache, f"prompts {prompt.tolist()}, {steps} steps"
    if cache is None:
        raise DeployError(
            f"{spec.name} has no KV cache.",
            got="no cached inputs",
            hint="a model with a KV cache, such as tiny-dynamic",
        )
    if not cache.by_token:
        problem = f"No input of {spec.name} has the axis {cache.new} of the tokens."
        raise DeployError(problem, got=got, hint=f"an input with the axis {cache.new}")
    if not prompt.size or prompt.min() < 1 or steps < 1:
        problem = "A trace needs a prompt in every batch element, and a step."
        raise DeployError(problem, got=got, hint="at least 1 of each")
    if not cache.is_ragged and (prompt != prompt[0]).any():
        problem = "The batch elements of this KV cache have one length."
        hint = "prompts of one length, or a preallocated cache with positions by batch element"
        raise DeployError(problem, got=got, hint=hint)
    longest = int(prompt.max())
    for name, size in ((spec.batch_name, len(prompt)), (cache.new, longest)):
        _check_size(spec, name, size)
    _check_size(spec, cache.new, 1, always=True)
    if cache.past is not None:
        _check_size(spec, cache.past, 0, always=True)
    if longest + steps > cache.room:
        most = cache.room - longest
        hint = f"{most} steps at most" if most > 0 else f"{cache.room} tokens in all at most"
        problem = f"The tokens do not fit into the cache of {spec.name}."
        raise DeployError(problem, got=f"a prompt of {longest} tokens and {steps} steps", hint=hint)
    return cache


def _check_size(spec: ModelSpec, name: str, size: int, *, always: bool = False) -> None:
    """Refuse a size that an axis does not have: a chosen one, or one that decoding `always` needs."""
    axis = spec.axes.get(name)
    if axis is not None and not axis.min <= size <= axis.max:
        problem = f"Axis {name} of {spec.name} does not allow these steps."
        hint = f"a size from {axis.min} to {axis.max}, or export it for others"
        hint = _export_from(spec, name, size) if always else hint
        raise DeployError(problem, got=f"{name}={size}", hint=hint)


def refuse_steps(
    spec: ModelSpec, steps: int, prompt: int | None = None, batch: int | None = None
) -> tuple[int, int]:
    """The prompt and the batch of drawn steps, which have defaults; refused if the model allows no such."""
    cache = spec.kv_cache
    if cache is None:
        hint = "--cache dynamic or preallocated for a catalog layer, kv_cache= for a model of your own"
        what, got = f"{spec.name} has no KV cache.", f"--steps {steps}"
        raise DeployError(what, got=got, hint=hint, options=("steps",))
    if prompt is None:  # of the usual length, or as much of it as leaves room for the steps
        prompt = min(spec.axes[cache.new].opt, cache.room - steps)
        if prompt < 1:
            problem = f"The cache of {spec.name} has no room for a prompt and this many steps."
            most = f"{cache.room - 1} steps at most" if cache.room > 1 else "export it with a larger cache"
            raise DeployError(problem, got=f"--steps {steps}", hint=most, options=("steps",))
    if batch is not None and spec.batch is None:
        problem, got = f"The axis of the batch of {spec.name} is not known.", f"--batch {batch}"
        hint = f"leave it out; the axes are {', '.join(spec.axes)}"
        raise DeployError(problem, got=got, hint=hint, options=("batch",))
    batch = spec.sizes("opt").get(spec.batch_name, 1) if batch is None else batch
    _check_size(spec, spec.batch_name, batch)  # before an array of it is made
    check_steps(spec, np.full(batch, prompt), steps)
    return prompt, batch


def check_trace(spec: ModelSpec, trace: DecodeTrace, precision: Precision) -> None:
    """Refuse a trace of another model or precision, or one that is longer than the cache."""
    cache = check_steps(spec, trace.prompt, trace.steps)
    sizes = {**cache.call_sizes(spec, trace.B, trace.length, 0), "L": trace.length}
    groups = {"inputs/tokens": trace.inputs, "oracle": trace.oracle, "eager": trace.eager}
    arrays = {f"{group}/{name}": x for group, found in groups.items() for name, x in found.items()}
    known = trace_tensors(spec, cache)
    check_arrays(arrays, known, sizes, precision, f"The trace {trace.name} of {spec.name}")


def trace_tensors(spec: ModelSpec, cache: KVCache) -> dict[str, TensorSpec]:
    """The inputs and the results of a trace as its file names them; L is the number of its tokens."""

    def along(tensor: TensorSpec, axes: Mapping[str, int], name: str = "") -> TensorSpec:
        dims = list(tensor.dims)
        if tensor.name in axes:
            dims[axes[tensor.name]] = "L"
        return TensorSpec(name=name or tensor.name, kind=tensor.kind, dims=tuple(dims))

    cached, found = {each.input: each for each in cache.tensors}, dict[str, TensorSpec]()
    placed = {each.name for each in cache.positions}
    results = [along(tensor, cache.outputs) for tensor in spec.outputs if tensor.name in cache.outputs]
    for tensor in spec.inputs:
        if (each := cached.get(tensor.name)) is not None:
            results.append(along(tensor, {tensor.name: each.axis} if each.in_order else {}, each.name))
        elif tensor.name not in placed:
            found[f"inputs/tokens/{tensor.name}"] = along(along(tensor, cache.by_token), cache.by_context)
    return found | {f"{group}/{each.name}": each for group in ("oracle", "eager") for each in results}


# -- The files of traces ---------------------------------------------------------------------------

_COUNTS = {
    "inputs/prompt": TensorSpec(name="prompt", kind=INT32, dims=("B",)),
    "inputs/steps": TensorSpec(name="steps", kind=INT32, dims=()),
}


def write_trace(path: Path, trace: DecodeTrace) -> None:
    """Write a trace; the file's name is to be the trace's."""
    inputs = {f"tokens/{name}": array for name, array in trace.inputs.items()}
    inputs |= {"prompt": trace.prompt, "steps": np.array(trace.steps, np.int32)}
    results: dict[str, Any] = {"oracle": trace.oracle, "eager": trace.eager, "baselines": trace.baselines}
    write_case(path, GoldenCase(name=trace.name, sizes={}, inputs=inputs, **results))


def read_trace(path: Path, spec: ModelSpec, precision: Precision, source: Source) -> DecodeTrace:
    """Read a trace of a model, checking that it is one."""
    cache = spec.kv_cache
    if cache is None:
        raise DeployError(
            f"{spec.name} has no KV cache.",
            got=path.name,
            hint="a model with a KV cache, such as tiny-dynamic",
        )
    known = trace_tensors(spec, cache)
    results = [tensor.name for name, tensor in known.items() if name.startswith("oracle/")]
    arrays = read_arrays(path, known.keys() | _COUNTS | baseline_names(results, precision))
    prompt, steps = (arrays.pop(name) for name in _COUNTS)
    check_arrays(dict(zip(_COUNTS, (prompt, steps), strict=True)), _COUNTS, {"B": prompt.size}, precision)
    inputs, oracle, eager = (
        {name.removeprefix(group): x for name, x in arrays.items() if name.startswith(group)}
        for group in ("inputs/tokens/", "oracle/", "eager/")
    )
    about: dict[str, Any] = {"cache": cache, "prompt": prompt, "steps": int(steps)}
    about["baselines"] = unpack_baselines(path.name, arrays, oracle, precision)
    trace = DecodeTrace(name=path.stem, inputs=inputs, oracle=Reference(oracle, source), eager=eager, **about)
    try:
        check_trace(spec, trace, precision)
    except DeployError as error:
        raise BundleError(error.what, got=f"{path.name}: {error.got}", hint="export again") from error
    refuse_infinite(path.name, [*trace.inputs.items(), *trace.oracle.items(), *trace.eager.items()])
    refuse_implausible(path.name, trace.defined(trace.oracle), trace.defined(trace.eager), precision)
    return trace


# -- Polygraphy ------------------------------------------------------------------------------------


def write_polygraphy(folder: Path, cases: Iterable[GoldenCase]) -> None:
    """Write `inputs.json` and `outputs.json` for `polygraphy run --load-inputs … --load-outputs …`.

    Polygraphy's JSON holds arrays as base64 of NumPy's own format. The oracle is written as float32, the
    widest type that its comparison tools print well.
    """
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
    put_file(folder / "inputs.json", json.dumps(inputs).encode("ascii"))
    put_file(folder / "outputs.json", json.dumps(run).encode("ascii"))


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
        problem = "Polygraphy files cannot be written for this bundle."
        raise ExportError(problem, got=reason, hint="leave out --polygraphy")
