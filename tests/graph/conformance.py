"""ONNX's published cases for `Attention`, and how to run one through a lowering.

A case is run in ONNX Runtime if that reproduces the *unlowered* case at the case's own tolerance, else in
ONNX's reference evaluator. ONNX Runtime does not for 23 of them: it has no bf16 kernels on the CPU, does not
know the window attributes of opset 25 nor short masks, writes the lowest number for -inf in the masked
scores, and rounds fp16 differently by more than the tolerance of 1e-3.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx.backend.test.case.node import _NodeTestCases
from onnx.backend.test.runner import Runner
from onnx.reference import ReferenceEvaluator
from onnxruntime.capi import onnxruntime_pybind11_state as errors
from plugin_reference import REFERENCE_OPERATORS

from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.lower import lower, to_plugin
from mha_deploy.graph.lower.call import LoweringError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)
    # Importing this one file makes its cases in half a second; the public loader makes all in ten.
    import onnx.backend.test.case.node.attention

_ORT_ERRORS = (errors.Fail, errors.InvalidArgument, errors.InvalidGraph, errors.NotImplemented)
_HALF_EPS = {np.dtype(np.float16): 2.0**-10}
Arrays = Sequence[np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One published case."""

    name: str
    model: onnx.ModelProto
    inputs: Arrays
    outputs: Arrays
    rtol: float
    atol: float

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        names = [value.name for value in self.model.graph.input]
        return dict(zip(names, self.inputs, strict=True))

    @property
    def is_bf16(self) -> bool:
        return self.model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16

    @property
    def is_half(self) -> bool:
        return self.is_bf16 or self.outputs[0].dtype == np.float16


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of the cases in one dialect."""

    passed: frozenset[str]
    refused: dict[str, str]
    failed: dict[str, str]


@functools.cache
def cases() -> tuple[Case, ...]:
    """Every published case that has an Attention node; the expanded ones hold its function body instead."""
    return tuple(
        Case(name=c.name, model=c.model, inputs=x, outputs=y, rtol=c.rtol, atol=c.atol)
        for c in _NodeTestCases
        if c.name.startswith("test_attention_") and attention_nodes(ir.from_proto(c.model))
        for x, y in c.data_sets
    )


def lower_for_reference(model: ir.Model, dialect: str, **options: Any) -> ir.Model:
    """Lower; to the plugin also what it has no kernels for, since its reference operator runs that, too."""
    kernels = {
        "refuse_without_kernel": lambda call: None,
        "has_gate_kernel": lambda attention: True,
        "has_linear_kernel": lambda projection: True,
    }
    with mock.patch.multiple(to_plugin, **kernels):
        return lower(model, dialect, **options)


@functools.cache
def run_all(dialect: str, *, ulps: int = 0, only_kernels: bool = False, **options: Any) -> Outcome:
    """Lower and run every case.

    Args:
        dialect: The dialect.
        ulps: Roundings of a half-precision result to allow beyond the case's own tolerance.
        only_kernels: Whether the plugin refuses what it has no kernels for.
        **options: Options of the dialect.
    """
    passed, refused, failed = set(), {}, {}
    for case in cases():
        # No runtime has com.microsoft operators in bf16 on a CPU: the same graph is run in fp32 there.
        run = _in_float32(case) if dialect == "contrib" and case.is_bf16 else case
        try:
            lower_case = lower if only_kernels else lower_for_reference
            lowered = ir.to_proto(lower_case(ir.from_proto(run.model), dialect, **options))
        except LoweringError as error:
            refused[case.name] = error.feature
            continue
        try:
            _compare(case, _run(lowered, run.feeds, in_ort=_runs_in_ort(case, dialect)), ulps)
            passed.add(case.name)
        except AssertionError as error:
            failed[case.name] = str(error)
    return Outcome(passed=frozenset(passed), refused=refused, failed=failed)


def run_in_ort(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run a model in ONNX Runtime on the CPU, as it is written."""
    return _session(model.SerializeToString()).run(None, feeds)


@functools.lru_cache(maxsize=8)
def _session(content: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1  # else the threads of those that are kept spin
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], *, in_ort: bool) -> list[np.ndarray]:
    return run_in_ort(model, feeds) if in_ort else run_in_reference(model, feeds)


def run_in_reference(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run a model in ONNX's reference evaluator, the plugin's nodes too."""
    return _evaluator(model.SerializeToString()).run(None, feeds)


@functools.lru_cache(maxsize=8)
def _evaluator(content: bytes) -> ReferenceEvaluator:
    return ReferenceEvaluator(onnx.ModelProto.FromString(content), new_ops=REFERENCE_OPERATORS)


def _runs_in_ort(case: Case, dialect: str) -> bool:
    return dialect == "contrib" or (dialect != "plugin" and _ort_can(case))


def _compare(case: Case, got: Arrays, ulps: int) -> None:
    wanted = [array.astype(out.dtype) for array, out in zip(case.outputs, got, strict=True)]
    eps = 2.0**-7 if case.is_bf16 else _HALF_EPS.get(case.outputs[0].dtype, 0.0)
    # The runner gives bf16 two roundings by itself.
    slack = max(ulps, 2) if case.is_bf16 else ulps
    Runner.assert_similar_outputs(wanted, got, max(case.rtol, slack * eps), case.atol)


@functools.cache
def _names_ort_can() -> frozenset[str]:
    return frozenset(case.name for case in cases() if _reproduces(case))


def _ort_can(case: Case) -> bool:
    return case.name in _names_ort_can()


def _reproduces(case: Case) -> bool:
    try:
        got = run_in_ort(case.model, case.feeds)
        Runner.assert_similar_outputs(case.outputs, got, case.rtol, case.atol)
    except (AssertionError, *_ORT_ERRORS):
        return False
    return True


def _in_float32(case: Case) -> Case:
    model = onnx.ModelProto.FromString(case.model.SerializeToString())
    for value in [*model.graph.input, *model.graph.output]:
        if value.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    inputs = [x if x.dtype == np.int64 else x.astype(np.float32) for x in case.inputs]
    return replace(case, model=model, inputs=inputs)
