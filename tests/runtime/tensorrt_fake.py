"""A TensorRT made from the API surface of one version: it has those names, and no others.

Building against it runs the real build code with every supported version, running against it the real
runner: the output of an engine is a copy of its input, unless a test brings another in `ENGINES`. A name that
the version does not have raises AttributeError, on reading and on writing, as the real one does.
"""

from __future__ import annotations

import enum
import json
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from cuda_fake import DEVICE

INSPECTED = json.dumps({"Layers": [{"Name": "fake", "LayerType": "NoOp"}], "Bindings": []})


class _Missing:
    """A name that exists in the version, but that the fake cannot do."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"{owner.__name__}.{name}"

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        raise NotImplementedError(f"the fake does not model {self.name}")


class _Object:
    _allowed: frozenset[str] = frozenset()
    _module: Any = None

    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            object.__setattr__(self, name, value)
            return
        # A subclass written in Python may add what it likes, as it may to the real class.
        own = "_allowed" in type(self).__dict__
        if own and not name.startswith("_") and name not in self._allowed:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r} in this version")
        self.__dict__[name] = value


def make_module(surface: dict[str, Any]) -> SimpleNamespace:
    """Build the fake module of one version."""
    module = SimpleNamespace(__name__=f"fake_{surface['version']}", __version__=surface["version"])
    for name, members in surface["enums"].items():
        setattr(module, name, enum.IntEnum(name, members, start=0))
    for name, attributes in surface["classes"].items():
        setattr(module, name, _make_class(module, name, attributes))
    return module


def _make_class(module: Any, name: str, attributes: list[str]) -> type:
    behaviour = BEHAVIOUR.get(name, {})
    body: dict[str, Any] = {key: behaviour.get(key, _Missing()) for key in attributes}
    # Attributes that instances carry must not be shadowed by the class.
    body.update({"_allowed": frozenset(attributes), "_module": module})
    if "__init__" in behaviour:
        body["__init__"] = behaviour["__init__"]
    return type(name, (_Object,), body)


def _create_network(self: Any, flags: int) -> Any:
    return self._module.INetworkDefinition(_flags=flags, _inputs=[], _outputs=[], _layers=[], _refit=[])


def _create_config(self: Any) -> Any:
    return self._module.IBuilderConfig(_raised=[], _cleared=[], _profiles=[], _targets={})


def _build(self: Any, network: Any, config: Any) -> bytes:
    self._module.last = SimpleNamespace(network=network, config=config)
    monitor = config.__dict__.get("progress_monitor")
    if monitor is not None:
        monitor.phase_start("Building", None, 2)
        going = monitor.step_complete("Building", 0)
        monitor.phase_finish("Building")
        self._module.last.cancelled = not going
        if not going:
            return None
    return b"ftrt plan"


def _parse(self: Any, data: bytes) -> bool:
    module, network = self._module, self._network
    model = onnx.load_model_from_string(data)
    kinds = module.LayerType
    for index, node in enumerate(model.graph.node):
        if node.op_type == "Refused":
            self._errors.append(module.ParserError(_index=index, _node=node))
        # As the real one does under weak typing: every real number is reported as FP32.
        dtype = module.DataType.INT32 if node.op_type == "Shape" else module.DataType.FLOAT
        tensor = module.ITensor(name=node.output[0], shape=(1,), dtype=dtype)
        native = node.op_type == "Attention" and hasattr(kinds, "ATTENTION_INPUT")
        kind = kinds.ATTENTION_INPUT if native else kinds.SHUFFLE
        if node.domain == "mha_deploy":
            kind = getattr(kinds, "PLUGIN_V3", kind)
        network._layers.append(module.ILayer(type=kind, num_inputs=0, num_outputs=1, _tensors=[tensor]))
    for values, kept in ((model.graph.input, network._inputs), (model.graph.output, network._outputs)):
        for value in values:
            shape = tuple(dim.dim_value or -1 for dim in value.type.tensor_type.shape.dim)
            kept.append(module.ITensor(name=value.name, shape=shape, dtype=module.DataType.HALF))
    return not self._errors


def _parse_file(self: Any, path: str) -> bool:
    with open(path, "rb") as file:
        return _parse(self, file.read())


def _mark_refittable(self: Any, name: str) -> bool:
    self._refit.append(name)
    return True


def _parser_init(self: Any, network: Any, logger: Any) -> None:
    self.__dict__.update(_network=network, _errors=[])


def _logger_init(self: Any, logger: Any = None) -> None:
    pass


def _set_timing_cache(self: Any, cache: Any, ignore_mismatch: bool) -> bool:
    fits = cache._data != b"stale"
    if fits:
        self.__dict__["_cache"] = cache
    return fits


def _attention(self: Any) -> Any:
    return self.__dict__.setdefault("_attention", self._module.IAttention())


# -- engines: the plan says which ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FakeEngine:
    """What an engine takes and gives, and what it computes."""

    inputs: dict[str, tuple[int, ...]]
    outputs: dict[str, tuple[int, ...]]
    profiles: list[dict[str, tuple]]
    shape: Callable[[str, dict], tuple[int, ...]]
    compute: Callable[[Callable[[str], np.ndarray]], None]
    integers: tuple[str, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    refittable: bool = True

    @property
    def dims(self) -> dict[str, tuple[int, ...]]:
        return {**self.inputs, **self.outputs}

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.int32 if name in self.integers else np.float16)


def _copy(tensor: Callable[[str], np.ndarray]) -> None:
    tensor("y")[:] = tensor("x")


# y = x, for x of [batch, length, 4] and a scalar per batch, in two profiles that overlap.
LENGTHS = ((1, 2, 8), (5, 9, 16))
COPY = FakeEngine(
    inputs={"x": (-1, -1, 4), "n": (-1,)},
    outputs={"y": (-1, -1, 4)},
    profiles=[
        {
            "x": tuple((b, s, 4) for b, s in zip((1, 2, 4), lengths, strict=True)),
            "n": ((1,), (2,), (4,)),
        }
        for lengths in LENGTHS
    ],
    shape=lambda name, shapes: shapes["x"],
    compute=_copy,
    integers=("n",),
)
ENGINES: dict[bytes, FakeEngine] = {}
"""Engines by their plans; any other plan is COPY."""


def _runtime_init(self: Any, logger: Any) -> None:
    self.__dict__["_logger"] = logger


def _deserialize(self: Any, plan: bytes) -> Any:
    what = ENGINES.get(plan, COPY)
    return self._module.ICudaEngine(_logger=self._logger, _contexts=weakref.WeakSet(), _what=what)


def _refused(self: Any, call: str) -> bool:
    """Whether a test asked for this call to fail; TensorRT then says why in its log."""
    asked = getattr(self._module, "refuses", None) == call
    if asked:
        self._engine._logger.log(SimpleNamespace(name="ERROR"), f"{call} was refused")
    return asked


def _create_context(self: Any, runtime_config: Any = None) -> Any:
    if getattr(self._module, "refuses", None) == "create_execution_context":
        return None
    if len(self._contexts) >= getattr(self._module, "most_contexts", 100):
        self._logger.log(SimpleNamespace(name="ERROR"), "missing offset in id2offset")
        return None
    context = self._module.IExecutionContext(_engine=self, _config=runtime_config, _shapes={}, _addresses={})
    self._contexts.add(context)
    self._module.last_context = weakref.ref(context)
    return context


def _set_profile(self: Any, index: int, stream: int) -> bool:
    others = [each for each in self._engine._contexts if each is not self]
    # As documented of 8.6: a profile belongs to one context at a time.
    if self._module.__version__.startswith("8.") and index in [each._profile for each in others]:
        self._engine._logger.log(SimpleNamespace(name="ERROR"), f"Profile {index} has been chosen by another")
        return False
    self.__dict__["_profile"] = index
    return not _refused(self, "set_optimization_profile_async")


def _set_shape(self: Any, name: str, shape: tuple[int, ...]) -> bool:
    self._shapes[name] = shape
    return not _refused(self, "set_input_shape")


def _tensor_shape(self: Any, name: str) -> tuple[int, ...]:
    known = self._engine._what.shape(name, self._shapes)
    return (known[0], -1, 4) if getattr(self._module, "data_dependent", False) else known


def _set_address(self: Any, name: str, address: int) -> bool:
    self._addresses[name] = address
    return not _refused(self, "set_tensor_address")


def _execute(self: Any, stream: int) -> bool:
    what, addresses = self._engine._what, dict(self._addresses)
    shapes = {name: self._shapes.get(name) or what.shape(name, self._shapes) for name in what.dims}
    for out, source in what.aliases.items():
        if addresses[out] != addresses[source]:
            self._engine._logger.log(SimpleNamespace(name="ERROR"), f"{out} must be where {source} is")
            return False

    def tensor(name: str) -> np.ndarray:
        dtype, count = what.dtype(name), math.prod(shapes[name])
        return np.frombuffer(DEVICE.memory[addresses[name]], dtype, count).reshape(shapes[name])

    DEVICE.queue("execute", lambda: what.compute(tensor))
    return not _refused(self, "execute_async_v3")


# -- weights of an engine, replaced by name or by the parser -------------------------------------------------

WEIGHTS = ("first", "second")
"""The weights of every engine."""


def _refitter_init(self: Any, engine: Any, logger: Any) -> None:
    self.__dict__.update(_engine=engine, _given={})


def _missing(self: Any) -> list[str]:
    return [name for name in WEIGHTS if name not in self._given]


def _set_weights(self: Any, name: str, weights: Any) -> bool:
    self._given[name] = weights._array
    return name in WEIGHTS


def _refit(self: Any) -> bool:
    plan = b"".join(self._given[name].tobytes() for name in WEIGHTS)
    self._engine.__dict__["_plan"] = b"ftrt " + plan
    return True


def _refit_from_file(self: Any, path: str) -> bool:
    for tensor in onnx.load(path).graph.initializer:
        self._refitter._given[tensor.name] = onnx.numpy_helper.to_array(tensor)
    return True


BEHAVIOUR: dict[str, dict[str, Any]] = {
    "Refitter": {
        "__init__": _refitter_init,
        "get_all_weights": lambda self: list(WEIGHTS),
        "get_missing_weights": _missing,
        "set_named_weights": _set_weights,
        "refit_cuda_engine": _refit,
    },
    "OnnxParserRefitter": {
        "__init__": lambda self, refitter, logger: self.__dict__.update(_refitter=refitter),
        "refit_from_file": _refit_from_file,
    },
    "Weights": {"__init__": lambda self, array: self.__dict__.update(_array=array)},
    "ILogger": {"__init__": _logger_init, "log": lambda self, severity, text: None},
    "Builder": {
        "__init__": _logger_init,
        "create_network": _create_network,
        "create_builder_config": _create_config,
        "create_optimization_profile": lambda self: self._module.IOptimizationProfile(_shapes={}),
        "build_serialized_network": _build,
    },
    "OnnxParser": {
        "__init__": _parser_init,
        "parse": _parse,
        "parse_from_file": _parse_file,
        "num_errors": property(lambda self: len(self._errors)),
        "get_error": lambda self, index: self._errors[index],
    },
    "ParserError": {
        "desc": lambda self: "no importer",
        "node": lambda self: self._index,
        "node_name": lambda self: self._node.name,
        "node_operator": lambda self: self._node.op_type,
    },
    "INetworkDefinition": {
        "num_inputs": property(lambda self: len(self._inputs)),
        "get_input": lambda self, index: self._inputs[index],
        "num_outputs": property(lambda self: len(self._outputs)),
        "get_output": lambda self, index: self._outputs[index],
        "num_layers": property(lambda self: len(self._layers)),
        "get_layer": lambda self, index: self._layers[index],
        "mark_weights_refittable": _mark_refittable,
    },
    "ILayer": {
        "get_output": lambda self, index: self._tensors[index],
        "set_output_type": lambda self, index, dtype: self.__dict__.update(_typed=dtype),
    },
    "IAttentionInputLayer": {"attention": property(_attention)},
    "IOptimizationProfile": {
        "set_shape": lambda self, name, low, opt, high: self._shapes.update({name: (low, opt, high)})
    },
    "IBuilderConfig": {
        "set_flag": lambda self, flag: self._raised.append(flag.name),
        "clear_flag": lambda self, flag: self._cleared.append(flag.name),
        "set_preview_feature": lambda self, feature, on: self._raised.append(feature.name) if on else None,
        "set_memory_pool_limit": lambda self, pool, size: self.__dict__.update(_pool=(pool.name, size)),
        "add_optimization_profile": lambda self, added: self._profiles.append(added._shapes) or 0,
        "get_tactic_sources": lambda self: (1 << len(self._module.TacticSource)) - 1,
        "set_tactic_sources": lambda self, sources: self.__dict__.update(_sources=sources) or True,
        "create_timing_cache": lambda self, data: self._module.ITimingCache(_data=data),
        "set_timing_cache": _set_timing_cache,
        "get_timing_cache": lambda self: self.__dict__.get("_cache"),
        "set_compute_capability": lambda self, target, index: self._targets.update({index: target.name}),
    },
    "ITimingCache": {"serialize": lambda self: self._data + b"+timings"},
    "IProgressMonitor": {"__init__": lambda self: None},
    "Runtime": {"__init__": _runtime_init, "deserialize_cuda_engine": _deserialize},
    "ICudaEngine": {
        "create_engine_inspector": lambda self: self._module.EngineInspector(),
        "refittable": property(lambda self: self._what.refittable),
        "serialize": lambda self: self._plan,
        "num_io_tensors": property(lambda self: len(self._what.dims)),
        "num_optimization_profiles": property(lambda self: len(self._what.profiles)),
        "get_tensor_name": lambda self, index: list(self._what.dims)[index],
        "get_tensor_mode": lambda self, name: (
            self._module.TensorIOMode.INPUT if name in self._what.inputs else None
        ),
        "get_tensor_location": lambda self, name: None,
        "get_tensor_dtype": lambda self, name: getattr(
            self._module.DataType, "INT32" if name in self._what.integers else "HALF"
        ),
        "get_tensor_shape": lambda self, name: self._what.dims[name],
        "get_tensor_profile_shape": lambda self, name, index: self._what.profiles[index][name],
        "get_aliased_input_tensor": lambda self, name: self._what.aliases.get(name),
        "device_memory_size": property(lambda self: 100),
        "device_memory_size_v2": property(lambda self: 200),
        "create_runtime_config": lambda self: self._module.IRuntimeConfig(),
        "create_execution_context": _create_context,
    },
    "IExecutionContext": {
        "set_optimization_profile_async": _set_profile,
        "set_input_shape": _set_shape,
        "infer_shapes": lambda self: [name for name in self._engine._what.inputs if name not in self._shapes],
        "get_tensor_shape": _tensor_shape,
        "set_tensor_address": _set_address,
        "execute_async_v3": _execute,
    },
    "EngineInspector": {"get_engine_information": lambda self, form: INSPECTED},
}
