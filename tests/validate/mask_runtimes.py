"""A runtime written from the ONNX specification one head at a time, that can be made to make a mistake.

It shares nothing with the oracle: where it makes no mistake, the two are checks of each other.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.runtime.runner import Arrays, Runner, TensorInfo

MISTAKES = (
    "causal from the lower right",
    "causal ignored",
    "causal off by one",
    "causal of the first query",
    "mask ignored",
    "mask upside down",
    "boolean mask added",
    "additive mask as boolean",
    "additive mask only where zero",
    "fully masked queries are NaN",
    "fully masked queries are infinite",
    "fully masked queries are averages",
    "fully masked queries attend",
    "sentinel hides",
    "heads interleaved",
    "one NaN",
    "wrong type",
    "wrong shape",
)


class NumpyRunner(Runner):
    """Attention nodes whose tensors are inputs and outputs of the graph."""

    name = "numpy"

    def __init__(self, model: ir.Model, mistake: str | None = None) -> None:
        if mistake is not None and mistake not in MISTAKES:
            raise ValueError(mistake)
        self._mistake = mistake
        self._calls = list(zip(attention_nodes(model), model.graph, strict=True))
        self.inputs, self.outputs = (
            {value.name: TensorInfo(dtype=value.dtype.numpy(), dims=tuple(value.shape)) for value in values}
            for values in (model.graph.inputs, model.graph.outputs)
        )

    def _run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        results = {}
        for facts, node in self._calls:
            arrays = [feeds[value.name] for value in node.inputs]
            y = self._attention(facts, *arrays).astype(arrays[0].dtype)
            if self._mistake == "one NaN":
                y[0, 1, 2] = np.nan
            if self._mistake == "wrong type":
                y = y.astype(np.float64)
            if self._mistake == "wrong shape":
                y = y[:, ::-1, :-1]
            results[node.outputs[0].name] = y
        return results

    def _attention(self, facts, q, k, v, mask=None):
        (B, S, _), T, D = q.shape, k.shape[1], facts.D
        y = np.zeros((B, S, facts.Hq, D))
        wide = None if mask is None else np.broadcast_to(mask, (B, facts.Hq, S, T))
        for b, h in np.ndindex(B, facts.Hq):
            shared = h % facts.Hkv if self._mistake == "heads interleaved" else h * facts.Hkv // facts.Hq
            own = slice(shared * D, shared * D + D)
            keys, values = (x[b, :, own].astype(np.float64) for x in (k, v))
            bias = np.zeros((S, T)) if wide is None else self._bias(wide[b, h])
            if facts.is_causal:
                bias = np.where(self._in_reach(S, T), bias, -np.inf)
            scores = q[b, :, h * D : h * D + D].astype(np.float64) @ keys.T * facts.scale
            y[b, :, h] = self._head(scores, bias, values)
        return y.reshape(B, S, -1)

    def _in_reach(self, S, T):
        if self._mistake == "causal of the first query":
            return np.tile(np.arange(T) == 0, (S, 1))
        shift = {"causal from the lower right": T - S, "causal ignored": T, "causal off by one": 1}.get(
            self._mistake, 0
        )
        return np.tri(S, T, shift, dtype=bool)

    def _bias(self, mask):
        if self._mistake == "mask ignored":
            return np.zeros(mask.shape)
        if mask.dtype == bool:
            if self._mistake == "boolean mask added":
                return mask.astype(np.float64)
            seen = ~mask if self._mistake == "mask upside down" else mask
            return np.where(seen, 0.0, -np.inf)
        bias = mask.astype(np.float64)
        if self._mistake == "additive mask as boolean":
            return np.where(bias != 0, 0.0, -np.inf)
        if self._mistake == "additive mask only where zero":
            return np.where(bias == 0, 0.0, -np.inf)
        return np.where(bias < -9000, -np.inf, bias) if self._mistake == "sentinel hides" else bias

    def _head(self, scores, bias, values):
        closed = np.isneginf(bias).all(axis=1)
        bias = np.where(closed[:, None], 0.0, bias)
        weights = np.exp(scores + bias - (scores + bias).max(axis=1, keepdims=True))
        y = weights @ values / weights.sum(axis=1, keepdims=True)
        if self._mistake != "fully masked queries attend":
            y[closed] = {
                "fully masked queries are NaN": np.nan,
                "fully masked queries are infinite": np.inf,
                "fully masked queries are averages": values.mean(axis=0),
            }.get(self._mistake, 0.0)
        return y
