"""Measure the numbers that a kernel meets inside an attention, from Q, K, V and the mask.

The product Q·Kᵀ counts every pair of query and key, hidden ones too: an unfused kernel multiplies them all
and adds the mask afterwards (inf − inf is NaN), and a fused causal kernel multiplies whole tiles along the
diagonal. Scores count the pairs that a query sees; the softmax sums all it is given.

Scores are computed in float32, a block of queries at a time: they are never all held at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from mha_deploy.errors import DeployError
from mha_deploy.graph.attention_keys import all_keys, by_head, valid_only, visible_keys
from mha_deploy.graph.probe import ProbedAttention

_BLOCK = 1 << 20  # pairs at a time: four megabytes

# Any lower number in a mask hides keys; biases such as ALiBi's reach some thousands.
_SURELY_A_SENTINEL = -1e4


@dataclass(frozen=True, kw_only=True)
class Peak:
    """A largest number, with its sign, and the pair of query and key that it belongs to."""

    value: float
    case: str
    row: int
    head: int
    query: int
    key: int


@dataclass(frozen=True, kw_only=True)
class SoftmaxSum:
    """The largest Σ exp(s − max s) of one case; it is at most the number of keys."""

    case: str
    keys: int
    largest: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The numbers of one attention over some golden cases; None where no pair was there to measure.

    Args:
        tensors: Largest absolute value of Q, K and V.
        scale: The factor on the scores.
        product: Q·Kᵀ of largest size before the scale, hidden pairs included.
        all_scores: Lowest and highest score after scale and softcap, hidden pairs included.
        score: Score of largest size, of the pairs that are seen.
        logit: The same with the numbers of the mask added: what goes into the softmax.
        exponent: The highest of those: what exp takes where the maximum is not subtracted first.
        sums: What the softmax sums, case by case.
        sentinel: The finite number with which the mask hides keys; None where it hides none, or by -inf.
        closed_rows: How many queries, counted in each head, see no key at all.
        not_finite: Inputs that hold NaN or infinity; their cases are not in the other numbers.
    """

    tensors: Mapping[str, float]
    scale: float
    product: Peak | None
    all_scores: tuple[float, float] | None
    score: Peak | None
    logit: Peak | None
    exponent: float | None
    sums: tuple[SoftmaxSum, ...]
    sentinel: float | None
    closed_rows: int
    not_finite: tuple[str, ...]


class Meter:
    """Gathers the figures of one attention, as a probe shows it, case by case."""

    def __init__(self, attention: ProbedAttention) -> None:
        facts = attention.facts
        cached = facts.has_past or facts.has_nonpad_kv_seqlen
        strange = facts.has_window or (cached and facts.mask not in ("none", "bool"))
        if strange or facts.group is None or facts.softmax_scale is None:
            raise DeployError(
                "The range is not measured with windows, numbers as a mask of a cache, or without heads.",
                got=facts.name,
                hint="a canonical graph, as mha-deploy export writes it",
            )
        self.facts, self._attention, self._scale = facts, attention, facts.softmax_scale
        self._tensors = {"Q": 0.0, "K": 0.0, "V": 0.0}
        self._products, self._scores, self._logits = _Extremes(), _Extremes(), _Extremes()
        self._mask_numbers: list[tuple[float, float]] = []
        self._sums: list[SoftmaxSum] = []
        self._closed_rows = 0
        self._not_finite: list[str] = []

    def see(self, case: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Measure one case, given what the probe computed."""
        given = {role: arrays[name] for role, name in self._attention.outputs.items()}
        given = valid_only(self.facts, given)
        broken = [line for role, array in given.items() if (line := self._broken(case, role, array))]
        self._not_finite += broken
        if broken:
            return
        for role, past in {"Q": None, "K": "past", "V": "past_values"}.items():
            both = [given[role], *([given[past]] if past in given else [])]
            sizes = [float(np.abs(array).max(initial=0.0)) for array in both]
            self._tensors[role] = max(self._tensors[role], *sizes)
        q, k = self._queries_and_keys(given["Q"], given["K"])
        k = all_keys(self.facts, given, k)
        visible = visible_keys(self.facts, given, q.shape[2], k.shape[2])
        mask = _Mask(
            given.get("mask") if visible is None else visible,
            is_causal=visible is None and self.facts.is_causal,
            shape=(*q.shape[:3], k.shape[2]),
        )
        if mask.numbers is not None:
            self._mask_numbers.append(mask.numbers)
        largest = max(self._see_block(block, q, k, mask) for block in _blocks(case, *mask.shape))
        self._sums.append(SoftmaxSum(case=case, keys=k.shape[2], largest=largest))

    def _queries_and_keys(self, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        bound = self._tensors["Q"] * self._tensors["K"] * q.shape[-1]
        # BF16 and FP32 tensors may be so large that their product does not fit float32.
        kind = np.dtype(np.float32 if bound < float(np.finfo(np.float32).max) else np.float64)
        return by_head(q.astype(kind), self.facts.Hq), by_head(k.astype(kind), self.facts.Hkv)

    def _broken(self, case: str, role: str, array: np.ndarray) -> str | None:
        usable = array < np.inf if role == "mask" else np.isfinite(array)  # -inf in a mask hides a key
        count = array.size - int(np.count_nonzero(usable))
        return f"{role} ({self._attention.tensors[role]}) in case {case}: {count:,} values" if count else None

    def _see_block(self, block: _Block, q: np.ndarray, k: np.ndarray, mask: _Mask) -> float:
        """Measure one block, and give its largest softmax sum."""
        group = q.shape[1] // k.shape[1]
        queries = q[block.rows, block.head, block.queries]
        products = queries @ k[block.rows, block.head // group].swapaxes(-1, -2)
        self._products.see(block, products, None)
        scores = self._scored(products)
        added, given, seen = mask.of(block)
        logits = scores if added is None else scores + added
        self._logits.see(block, logits, seen)
        if added is not None:
            self._scores.see(block, scores, seen)
        if seen is not None:
            self._closed_rows += int(np.count_nonzero(~seen.any(-1)))  # causality alone closes none
        if given is not None:
            np.copyto(logits, -np.inf, where=~given)
        return _largest_sum(logits)

    def _scored(self, products: np.ndarray) -> np.ndarray:
        scores = products * products.dtype.type(self._scale)
        cap = self.facts.softcap
        return scores if cap <= 0 else cap * np.tanh(scores / cap)

    def figures(self) -> Figures:
        """What was measured so far."""
        logits, products = self._logits, self._products
        bounds = [float(self._scored(np.float64(p.value))) for p in (products.low, products.high) if p]
        return Figures(
            tensors=dict(self._tensors),
            scale=self._scale,
            product=products.largest,
            all_scores=(min(bounds), max(bounds)) if bounds else None,
            score=(self._scores if self._scores.high else logits).largest,
            logit=logits.largest,
            exponent=logits.high.value if logits.high else None,
            sums=tuple(self._sums),
            sentinel=self._sentinel(),
            closed_rows=self._closed_rows,
            not_finite=tuple(self._not_finite),
        )

    def _sentinel(self) -> float | None:
        if self.facts.mask == "bool":
            return None
        numbers = [number for pair in self._mask_numbers for number in pair]
        constant = self._attention.lowest_mask_constant
        if constant is not None and constant <= _SURELY_A_SENTINEL:  # a Cast may have made it -inf since
            numbers.append(constant)
        return _sentinel_among(min(numbers), max(numbers)) if numbers else None


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Some queries of one head, of one or more rows of the batch."""

    case: str
    rows: slice
    head: int
    queries: slice

    def peak(self, values: np.ndarray, at: np.ndarray) -> Peak:
        """The first value of the block at which `at` is true."""
        row, query, key = (int(i) for i in np.unravel_index(at.argmax(), at.shape))
        return Peak(
            value=float(values[row, query, key]),
            case=self.case,
            row=self.rows.start + row,
            head=self.head,
            query=self.queries.start + query,
            key=key,
        )


def _blocks(case: str, B: int, Hq: int, S: int, T: int) -> Iterator[_Block]:
    rows, queries = max(1, _BLOCK // (S * T)), max(1, _BLOCK // T)
    for row, head, query in product(range(0, B, rows), range(Hq), range(0, S, queries)):
        some_rows, some_queries = slice(row, min(row + rows, B)), slice(query, min(query + queries, S))
        yield _Block(case=case, rows=some_rows, head=head, queries=some_queries)


class _Extremes:
    """The lowest and the highest number seen."""

    def __init__(self) -> None:
        self.low: Peak | None = None
        self.high: Peak | None = None

    def see(self, block: _Block, values: np.ndarray, seen: np.ndarray | None) -> None:
        """Look at the values of a block, or at those that are seen."""
        where = True if seen is None else seen
        high = values.max(initial=-np.inf, where=where)
        low = values.min(initial=np.inf, where=where)
        if high > (self.high.value if self.high else -np.inf):
            self.high = block.peak(values, (values == high) & where)
        if low < (self.low.value if self.low else np.inf):
            self.low = block.peak(values, (values == low) & where)

    @property
    def largest(self) -> Peak | None:
        """The number of largest size."""
        if self.low is None or self.high is None:
            return None
        return max(self.high, self.low, key=lambda peak: abs(peak.value))


class _Mask:
    """What a mask and causality do to each block.

    Args:
        mask: The mask, boolean or of numbers.
        is_causal: Whether a query sees only keys up to its own position.
        shape: B, Hq, S and T.
    """

    def __init__(self, mask: np.ndarray | None, *, is_causal: bool, shape: tuple[int, ...]) -> None:
        self.shape, self._is_causal = shape, is_causal
        self._mask = None if mask is None else np.broadcast_to(mask, shape)
        self.numbers = None if mask is None or mask.dtype == bool else _number_range(mask)
        sentinel = None if self.numbers is None else _sentinel_among(*self.numbers)
        self._hides_from = -np.inf if sentinel is None else sentinel / 2

    def of(self, block: _Block) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        """The numbers added to the scores, which pairs the softmax is given, and which are seen.

        A pair hidden by a sentinel is given but not seen. None adds nothing, or leaves nothing out.
        """
        causal = self._causal(block)
        if self._mask is None:
            return None, causal, causal
        mask = self._mask[block.rows, block.head, block.queries]
        if mask.dtype == bool:
            seen = mask if causal is None else mask & causal
            return None, seen, seen
        added = mask.astype(np.float32)
        seen = added > self._hides_from
        return added, causal, seen if causal is None else seen & causal

    def _causal(self, block: _Block) -> np.ndarray | None:
        if not self._is_causal:
            return None
        queries = np.arange(block.queries.start, block.queries.stop)
        return np.arange(self.shape[3]) <= queries[:, None]


def _number_range(mask: np.ndarray) -> tuple[float, float] | None:
    """The lowest and the highest finite number of a mask that is not 0."""
    flat, found = mask.reshape(-1), []
    for start in range(0, flat.size, _BLOCK):
        part = flat[start : start + _BLOCK].astype(np.float32)
        numbers = part[np.isfinite(part) & (part != 0)]
        if numbers.size:
            found += [float(numbers.min()), float(numbers.max())]
    return (min(found), max(found)) if found else None


def _sentinel_among(low: float, high: float) -> float | None:
    """The number that hides keys: a very low one, or the only one that the mask holds besides 0."""
    return low if low < 0 and (low == high or low <= _SURELY_A_SENTINEL) else None


def _largest_sum(logits: np.ndarray) -> float:
    top = logits.max(axis=-1, keepdims=True)
    np.maximum(top, np.finfo(top.dtype).min, out=top)  # -inf − -inf of a query without keys is NaN
    return float(np.exp(logits - top).sum(axis=-1).max())
