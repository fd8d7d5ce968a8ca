"""Where is the error? A map of it over heads and positions.

A layer's output has gone through the output projection, which mixes the heads: y = h·W + b. The error is
pulled back through it, δh = δy·W⁺, so that a head that went wrong is one row of the map. Where that cannot be
done, rows are groups of output channels, and the map says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import onnx_ir as ir
from msgspec import Struct

from mha_deploy.bundle.cases import GoldenCase
from mha_deploy.errors import DeployError
from mha_deploy.graph.attention_node import is_attention, read_attention
from mha_deploy.graph.ir import constant, made_by
from mha_deploy.graph.roles import MOVES
from mha_deploy.metrics import ToHeads
from mha_deploy.status import means

_NOT_FED = "no projection of heads feeds it"
MAPPED_RANKS = (3, 4)
"""Of outputs that can be mapped: `[B, S, E]`, and weights `[B, Hq, S, T]`."""
HEAD, CHANNEL_GROUP, POSITION = "head", "channel group", "position"

_MOST_COLUMNS = 128
_CHANNEL_GROUPS = 8
_LARGEST_WIDTH = 2048  # a larger projection takes seconds to invert
_LARGEST_AMPLIFICATION = 1000.0  # beyond it, the rounding of FP16 outputs would fill the whole map

# A judged error comes back through directions of a hundredth of the projection's mean power and more, where
# these are nine tenths of it.
_DAMPING, _LEAST_BACK = 0.01, 0.9

# What may stand between the heads and their projection without mixing them: layout, and gates on heads.
_KEEPS_HEADS = frozenset({*MOVES, "Cast", "Mul"})


@dataclass(frozen=True, kw_only=True)
class OutputProjection:
    """The output projection of a layer."""

    weight: np.ndarray  # its matrix, [Hq·D, E]
    bias: np.ndarray | None = None  # its bias, [E], or None
    heads: int  # how many heads lie side by side in what goes in
    output: str = "output"  # the graph output that it feeds

    @cached_property
    def refusal(self) -> str | None:
        """Why an error cannot be pulled back through it, or None."""
        inputs, outputs = self.weight.shape
        if max(inputs, outputs) > _LARGEST_WIDTH:
            return f"the output projection is larger than {_LARGEST_WIDTH}"
        if inputs > outputs:
            return f"the heads together ({inputs}) are wider than the output ({outputs})"
        if not self.amplification <= _LARGEST_AMPLIFICATION:
            return "the output projection is nearly singular"
        return None

    @cached_property
    def inverse(self) -> np.ndarray:
        """The pseudo-inverse W⁺, [E, Hq·D]; all infinite where there is none."""
        weight = self.weight.astype(np.float64)
        try:
            # Many times faster than through singular values, and exact enough for what is not refused.
            return weight.T @ np.linalg.inv(weight @ weight.T)
        except np.linalg.LinAlgError:
            return np.full(self.weight.T.shape, np.inf)

    @cached_property
    def amplification(self) -> float:
        """How much larger the pulled-back error is than the output's, for errors like rounding; 1 at best."""
        inverse, weight = np.linalg.norm(self.inverse), np.linalg.norm(self.weight.astype(np.float64))
        return float(inverse * weight / self.weight.shape[0])

    def pulled_back(self, values: np.ndarray) -> np.ndarray:
        """[B, S, E] to [B, Hq, S, D]."""
        return self._by_head(values @ self.inverse)

    def _by_head(self, values: np.ndarray) -> np.ndarray:
        return values.reshape(*values.shape[:2], self.heads, -1).transpose(0, 2, 1, 3)

    @cached_property
    def to_heads(self) -> dict[str, ToHeads]:
        """By output: how an error is brought back to the heads to be judged there; empty where it cannot be.

        Directions that the projection nearly loses are left out: they would amplify rounding most.
        """
        if self.refusal is not None:
            return {}
        weight = self.weight.astype(np.float64)
        square = weight @ weight.T
        damped = square + _DAMPING * np.trace(square) / len(square) * np.eye(len(square))
        inverse = np.linalg.solve(damped, weight).T
        if np.einsum("ij,ji->", weight, inverse) < _LEAST_BACK * len(weight):
            return {}

        def to_heads(error: np.ndarray) -> np.ndarray:
            rows = error.reshape(-1, len(inverse))  # one GEMM in place of one for each batch element
            return self._by_head((rows @ inverse).reshape(*error.shape[:-1], -1))

        return {self.output: to_heads}


class Heatmap(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The error of one output of one case."""

    runtime: Annotated[str, means("the runtime with its version")]
    engine: Annotated[
        str | None, means("name of the engine in the bundle, as in `engines`; null for anything else")
    ] = None
    case: Annotated[str, means("name of the case")]
    output: Annotated[str, means("name of the output")]
    rows: Annotated[str, means("what a row is: `head` or `channel group`")]
    columns: Annotated[str, means("what a column is: `position`")] = POSITION
    values: Annotated[
        tuple[tuple[float | None, ...], ...], means("relative RMS error, by table row; null if not finite")
    ]
    bin: Annotated[int, means("positions per column")]
    note: Annotated[str, means("a remark; may be empty")]


def heatmap(
    runtime: str, case: GoldenCase, output_name: str, got: np.ndarray, projection: OutputProjection | None
) -> Heatmap:
    """Map the error of one output."""
    oracle = case.oracle[output_name]
    if got.shape != oracle.shape or oracle.ndim not in MAPPED_RANKS:
        raise DeployError(f"{output_name} cannot be mapped.", got=got.shape, hint=str(oracle.shape))
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite stays so, and becomes null
        # Error and truth as [B, rows, S, ·].
        rows, note, error, truth = HEAD, "", got.astype(np.float64) - oracle, oracle
        if oracle.ndim == 3:
            refusal = projection.refusal if projection is not None else None
            if projection is None or refusal or projection.weight.shape[1] != oracle.shape[-1]:
                groups = (*oracle.shape[:2], math.gcd(oracle.shape[2], _CHANNEL_GROUPS), -1)
                error, truth = (each.reshape(groups).transpose(0, 2, 1, 3) for each in (error, truth))
                rows, note = CHANNEL_GROUP, f"rows are groups of output channels: {refusal or _NOT_FED}"
            else:
                truth = oracle if projection.bias is None else oracle - projection.bias.astype(np.float64)
                error, truth = projection.pulled_back(error), projection.pulled_back(truth)
                note = (
                    "the error is mapped back through the output projection, which amplifies rounding of the "
                )
                note += f"output {projection.amplification:.1f} times"
        # Root mean square per row and bin of positions.
        squares = np.mean(np.square(error), axis=(0, 3))
        size = -(-squares.shape[1] // _MOST_COLUMNS)
        starts = np.arange(0, squares.shape[1], size)
        counts = np.diff(np.append(starts, squares.shape[1]))
        values = np.sqrt(np.add.reduceat(squares, starts, axis=1) / counts)
    values = values / (math.sqrt(np.mean(np.square(truth))) or 1.0)
    about: dict[str, Any] = {"runtime": runtime, "case": case.name, "output": output_name, "note": note}
    plain = tuple(tuple(x if math.isfinite(x) else None for x in row) for row in values.tolist())
    return Heatmap(**about, rows=rows, values=plain, bin=size)


def output_projection(model: ir.Model) -> OutputProjection | None:
    """The matmul with a weight between the heads of an attention and a graph output, if there is one."""
    for output in model.graph.outputs:
        value, bias = output, None
        if (add := made_by(value, "Add")) is not None:
            bias = next((constant(x) for x in add.inputs if constant(x) is not None), None)
            value = next((x for x in add.inputs if x is not None and constant(x) is None), value)
        matmul = made_by(value, "MatMul")
        if matmul is None or matmul.inputs[0] is None:
            continue
        weight, D = constant(matmul.inputs[1]), _head_size(matmul.inputs[0])
        matrix, added = (None if each is None else each.numpy() for each in (weight, bias))
        if matrix is not None and matrix.ndim == 2 and D is not None and matrix.shape[0] % D == 0:
            heads, name = matrix.shape[0] // D, str(output.name)
            return OutputProjection(weight=matrix, bias=added, heads=heads, output=name)
    return None


def _head_size(value: ir.Value) -> int | None:
    """The size of the heads that lie side by side in a value; None where it is not made of heads."""
    node = value.producer()
    if node is None:
        return None
    if is_attention(node):
        size = read_attention(node).Dv
        return size if isinstance(size, int) else None
    if node.op_type not in _KEEPS_HEADS:
        return None
    found = (_head_size(x) for x in node.inputs if x is not None)
    return next((size for size in found if size is not None), None)
