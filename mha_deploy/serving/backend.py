"""The model inside a server: a bundle in one of this tool's runtimes, and the KV caches of its sequences.

A packaged `model.py` imports `TritonPythonModel` from here. Everything below it works without Triton.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mha_deploy.bundle.folder import MODEL, Bundle, open_bundle, sha256
from mha_deploy.engine.engine import reasons_not_to_run
from mha_deploy.engine.plugins import ENVIRONMENT
from mha_deploy.errors import BackendUnavailable, BundleError, DeployError
from mha_deploy.model.spec import KVCache, ModelSpec
from mha_deploy.runtime import RUNNERS
from mha_deploy.runtime.child import isolation
from mha_deploy.runtime.kserve import RUNS_PARAMETER, SEQUENCES_PARAMETER, runs_in
from mha_deploy.runtime.runner import Arrays, Runner
from mha_deploy.text import group_by
from mha_deploy.validation.decode import DecodeLoop, DeviceDecodeLoop, HostDecodeLoop
from mha_deploy.validation.runtimes import RuntimeFinder

BUNDLE, PLUGINS = "bundle", "plugins"
_START, _END = 1, 2  # Triton's flags of a request in a sequence


@dataclass(frozen=True, kw_only=True)
class ServedRequest:
    """One request: its inputs, and of a model with a KV cache its sequence."""

    feeds: Arrays
    sequence: Hashable = 0
    start: bool = False
    end: bool = False


class ServedModel:
    """A packaged bundle, loaded once; results come in the order of the requests.

    Args:
        folder: The version folder of a model repository, with the bundle inside.
        runtimes: A runtime, or engines by name, of which the first that fits this machine is loaded.
        batched: Whether the first dimension of every tensor is the batch.
        sequences: How many sequences have a KV cache at a time.
    """

    def __init__(self, folder: Path, runtimes: Sequence[str], *, batched: bool, sequences: int = 0) -> None:
        bundle = open_bundle(folder / BUNDLE, verify=False)  # golden cases stay behind
        for name, entry in bundle.manifest.files.items():
            path = bundle.file(name)
            if name.startswith(MODEL) and path.is_file() and sha256(path) != entry.sha256:
                raise BundleError("The packaged graph was changed.", got=path, hint="package it again")
        if (folder / PLUGINS).is_dir():
            os.environ[ENVIRONMENT] = str(folder / PLUGINS)
        isolation.enabled = False  # the server gives every instance a process of its own
        self.spec, self._batched = bundle.manifest.spec, batched
        self.runner = _open(bundle, runtimes)
        cached = self.spec.kv_cache is not None
        self._caches = SequenceCaches(self.runner, self.spec, sequences) if cached else None

    def infer(self, requests: Sequence[ServedRequest]) -> list[Arrays | DeployError]:
        """Run the requests of one batch; one that cannot be run does not fail the others."""
        if self._caches is not None:
            return self._caches.infer(requests)

        def shapes(index: int) -> Hashable:
            feeds = requests[index].feeds.items()
            return tuple(sorted((name, array.shape[1:]) for name, array in feeds)) if self._batched else index

        results = dict[int, Arrays | DeployError]()
        for group in group_by(range(len(requests)), shapes):
            results |= zip(group, self._run_batch([requests[index].feeds for index in group]), strict=True)
        return [results[index] for index in range(len(requests))]

    def _run_batch(self, feeds: Sequence[Arrays]) -> list[Arrays | DeployError]:
        """Several requests of the same shapes as one batch."""
        if len(feeds) > 1:
            ends = np.cumsum([len(next(iter(each.values()))) for each in feeds])[:-1]
            batch = {name: np.concatenate([each[name] for each in feeds]) for name in feeds[0]}
            whole = _attempt(self.runner.run, batch)
            if not isinstance(whole, DeployError):  # else it shows which one fails when they run one by one
                parts = {name: np.split(array, ends) for name, array in whole.items()}
                return [{name: part[i] for name, part in parts.items()} for i in range(len(feeds))]
        return [_attempt(self.runner.run, each) for each in feeds]

    def close(self) -> None:
        """Free the runtime."""
        if self._caches is not None:
            self._caches.close()
        self.runner.close()


def _open(bundle: Bundle, runtimes: Sequence[str]) -> Runner:
    finder = RuntimeFinder(bundle)
    if len(runtimes) == 1 and runtimes[0] in RUNNERS:
        return finder.named(runtimes[0]).open()
    reasons = []
    for engine in (engine for engine in finder.engines if engine.path.stem in runtimes):
        if not (found := reasons_not_to_run(engine)):
            return finder.named(engine.path.stem).open()
        reasons.append(f"{engine.path.stem}: {'; '.join(found)}")
    got = " | ".join(reasons) or f"no engine named {', '.join(runtimes)}"
    hint = "build one on such a GPU and package it too, or package --runtime ort-cuda"
    raise BackendUnavailable("No packaged engine can run here.", got=got, hint=hint)


def _attempt(call: Callable[..., Arrays], *arguments: Any) -> Arrays | DeployError:
    """What a runtime raises is the answer to its request: the server goes on."""
    try:
        return call(*arguments)
    except DeployError as error:
        return error
    except Exception as error:  # noqa: BLE001 (runtimes raise types that share no base)
        return DeployError(
            f"{type(error).__name__}:", got=error, hint="the log of the server has the whole error"
        )


# -- The KV caches of sequences, by correlation ID -------------------------------------------------


@dataclass
class _Sequence:
    """A sequence, the decode loop with its cache, and its batch element there."""

    loop: DecodeLoop
    slot: int = 0
    used: float = 0.0  # when it had its last request

    @property
    def length(self) -> int:
        return int(self.loop.lengths[self.slot])


class SequenceCaches:
    """The KV caches of the sequences that are being decoded.

    A runtime that keeps a preallocated cache on its device gets one, with a batch element for every sequence:
    sequences at different lengths decode in one call. Otherwise every sequence has a cache on the host, or
    all have one that is `shared`. There is room for as many sequences as there are `slots`.
    """

    def __init__(self, runner: Runner, spec: ModelSpec, slots: int, *, shared: bool = False) -> None:
        if spec.kv_cache is None:
            raise DeployError(
                f"{spec.name} has no KV cache.", hint="a model with a KV cache, such as tiny-dynamic"
            )
        self._runner, self._spec, self._cache, self.slots = runner, spec, spec.kv_cache, slots
        self._sequences: dict[Hashable, _Sequence] = {}
        self._shared: DecodeLoop | None = None  # one cache for all sequences
        self._device: Any = None  # the same, where the runtime keeps it
        if runner.can_decode and self._cache.is_preallocated and spec.cache != "none":
            keeper: Any = runner
            self._device = keeper.decode_loop(B=slots)
            self._shared = DeviceDecodeLoop(self._device)
        elif shared:
            self._shared = HostDecodeLoop(runner, spec, slots)

    def __len__(self) -> int:
        return len(self._sequences)

    def infer(self, requests: Sequence[ServedRequest]) -> list[Arrays | DeployError]:
        """Prompts and decode steps of different sequences."""
        results, present = dict[int, Arrays | DeployError](), dict[Hashable, int]()
        batch = {request.sequence for request in requests}
        for index, request in enumerate(requests):
            if present.setdefault(request.sequence, index) != index:
                got = f"correlation ID {request.sequence}"
                results[index] = DeployError(
                    "A sequence can have only one request at a time.",
                    got=got,
                    hint="wait for the response before the next request",
                )
                continue
            if request.start:
                self._begin(request.sequence, batch)
            if (problem := self._refusal(request)) is not None:
                results[index] = problem

        def tokens(index: int) -> Hashable:
            S = _token_count(requests[index].feeds, self._cache)
            return S if self._shared is not None else (index, S)

        for group in group_by([i for i in range(len(requests)) if i not in results], tokens):
            results |= zip(group, self._feed([requests[index] for index in group]), strict=True)
        for sequence, index in present.items():  # a second request of a sequence does not end it
            request = requests[index]
            if request.end or (isinstance(results[index], DeployError) and request.start):
                self._sequences.pop(sequence, None)
        return [results[index] for index in range(len(requests))]

    def _begin(self, sequence: Hashable, batch: Container[Hashable]) -> None:
        """Give a sequence an empty cache, if need be that of another one that is not in the same batch."""
        self._sequences.pop(sequence, None)
        if len(self._sequences) >= self.slots:  # the server has given up the one that rests longest
            idle = {key: each.used for key, each in self._sequences.items() if key not in batch}
            if not idle:
                return
            del self._sequences[min(idle, key=lambda key: idle[key])]
        if self._shared is None:
            self._sequences[sequence] = _Sequence(HostDecodeLoop(self._runner, self._spec, 1))
            return
        slot = min(self._free_slots())
        self._shared.lengths[slot] = 0
        self._sequences[sequence] = _Sequence(self._shared, slot)

    def _free_slots(self) -> set[int]:
        """The batch elements of a shared cache that no sequence has."""
        return set(range(self.slots)) - {each.slot for each in self._sequences.values()}

    def _refusal(self, request: ServedRequest) -> DeployError | None:
        found = self._sequences.get(request.sequence)
        if found is None:
            problem = "The sequence is unknown: it ended, or another sequence took its cache."
            hint = "start it again, with its prompt and the start flag"
            return DeployError(problem, got=f"correlation ID {request.sequence}", hint=hint)
        found.used = time.monotonic()
        batch = {len(array) for array in request.feeds.values() if array.ndim}
        if batch != {1}:
            return DeployError(
                "A sequence is one batch element.",
                got=f"batch sizes {sorted(batch)}",
                hint="a request for each sequence",
            )
        S, room = _token_count(request.feeds, self._cache), self._cache.room - found.length
        if 1 <= S <= room:
            return None
        got, hint = f"{S} tokens after {found.length}", f"1 to {room} tokens, or end the sequence"
        return DeployError("The new tokens do not fit into the cache.", got=got, hint=hint)

    def _feed(self, requests: Sequence[ServedRequest]) -> list[Arrays | DeployError]:
        """Requests with the same number of tokens, in calls that the model and every cache take."""
        cache, parts, start = self._cache, list[Arrays](), 0
        members = [self._sequences[request.sequence] for request in requests]
        S, most = _token_count(requests[0].feeds, cache), self._spec.axes[cache.new].max
        before = [member.length for member in members]
        while start < S:
            size = min(S - start, most, *self._room_beside(members))
            calls = [
                _take_part(request.feeds, cache, slice(start, start + size), length)
                for request, length in zip(requests, before, strict=True)
            ]
            got = _attempt(self._call, members, calls)
            if isinstance(got, DeployError):
                for request in requests if start else ():  # a part of the tokens is in the cache already
                    self._sequences.pop(request.sequence, None)
                return [got] * len(requests)
            parts.append(got)
            start += size
        whole = {name: np.concatenate([p[name] for p in parts], axis) for name, axis in cache.outputs.items()}
        return [{name: array[i : i + 1] for name, array in whole.items()} for i in range(len(requests))]

    def _room_beside(self, members: Sequence[_Sequence]) -> list[int]:
        """How many tokens the other caches of a shared one have room for: idle ones are padded."""
        if self._shared is None:
            return []
        idle = {key: each for key, each in self._sequences.items() if each not in members}
        for key in [key for key, each in idle.items() if each.length == self._cache.room]:
            del self._sequences[key], idle[key]  # full: it could take no token anyway
        for slot in self._free_slots():
            self._shared.lengths[slot] = 0
        most = self._shared.most_tokens
        room = [self._cache.room - each.length for each in idle.values()]
        return room if most is None else [most, *room]

    def _call(self, members: Sequence[_Sequence], calls: Sequence[Arrays]) -> Arrays:
        if self._shared is None:
            return members[0].loop.feed(calls[0], None)
        slots = [member.slot for member in members]
        counts = np.zeros(self.slots, np.int32)
        counts[slots] = _token_count(calls[0], self._cache)
        tokens = {}
        for name, array in calls[0].items():
            tokens[name] = np.zeros((self.slots, *array.shape[1:]), array.dtype)
            tokens[name][slots] = np.concatenate([call[name] for call in calls])
        return {name: array[slots] for name, array in self._shared.feed(tokens, counts).items()}

    def close(self) -> None:
        """Free the cache on the device."""
        self._sequences.clear()
        if self._device is not None:
            self._device.close()


def _token_count(feeds: Arrays, cache: KVCache) -> int:
    name, axis = next(iter(cache.by_token.items()))
    return int(feeds[name].shape[axis])


def _take_part(feeds: Arrays, cache: KVCache, part: slice, before: int) -> dict[str, np.ndarray]:
    """The inputs of some of the new tokens of a request."""
    found = dict(feeds)
    for name, axis in cache.by_token.items():
        found[name] = np.take(found[name], np.arange(part.start, part.stop), axis)
    for name, axis in cache.by_context.items():
        found[name] = np.take(found[name], np.arange(before + part.stop), axis)
    return found


# -- Triton's Python backend -----------------------------------------------------------------------


class TritonPythonModel:
    """What Triton's Python backend loads; see `ServedModel`."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the bundle that lies beside `model.py`."""
        import triton_python_backend_utils as triton  # exists in the server only

        self._triton = triton
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        if not np.array_equal(triton.Tensor("check", array).as_numpy(), array):  # it would answer nothing
            problem = "This server's Python backend does not read the arrays of the installed NumPy."
            hint = 'pip install "numpy<2" in the environment of the server'
            raise BackendUnavailable(problem, got=f"NumPy {np.__version__}", hint=hint)
        if args.get("model_instance_kind") == "GPU":  # runners take the first GPU that is visible
            device = args["model_instance_device_id"]
            visible = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
            os.environ["CUDA_VISIBLE_DEVICES"] = dict(enumerate(visible)).get(int(device), device)
        config = json.loads(args["model_config"])
        settings = {name: each["string_value"] for name, each in config["parameters"].items()}
        self._inputs = [each["name"] for each in config["input"]]
        self._outputs = [each["name"] for each in config["output"]]
        self._model = ServedModel(
            Path(args["model_repository"]) / args["model_version"],
            runs_in(settings[RUNS_PARAMETER]),
            batched=int(config.get("max_batch_size", 0)) > 0,
            sequences=int(settings.get(SEQUENCES_PARAMETER, "0")),
        )

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer the requests of one batch."""
        triton, served, responses = self._triton, list[ServedRequest](), list[Any]()
        for request in requests:
            read, flags = partial(triton.get_input_tensor_by_name, request), request.flags()
            feeds = {name: read(name).as_numpy() for name in self._inputs}
            is_at = {"start": bool(flags & _START), "end": bool(flags & _END)}
            served.append(ServedRequest(feeds=feeds, sequence=request.correlation_id(), **is_at))
        for result in self._model.infer(served):
            if isinstance(result, DeployError):
                responses.append(triton.InferenceResponse(error=triton.TritonError(result.in_one_line)))
            else:
                tensors = [triton.Tensor(name, np.ascontiguousarray(result[name])) for name in self._outputs]
                responses.append(triton.InferenceResponse(output_tensors=tensors))
        return responses

    def finalize(self) -> None:
        """Free the runtime."""
        self._model.close()
