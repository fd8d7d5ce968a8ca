"""How near the limit of FP16 attention comes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mha_deploy.bundle.cases import read_case
from mha_deploy.bundle.folder import Bundle
from mha_deploy.errors import DeployError, nearest
from mha_deploy.graph.attention_node import valid_only, visible_keys
from mha_deploy.graph.file import ProbedAttention, attention_probe, load_graph
from mha_deploy.graph.precision import FP16_MAX, matmul_blocks, queries_and_keys
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import ModelSpec
from mha_deploy.runtime import available_cpu_backend, open_runner

# -- Measure the numbers that a kernel meets inside an attention, from Q, K, V and the mask --------

_CHUNK = 1 << 20  # numbers of a mask at a time

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
    """The numbers of one attention over some golden cases; None where no pair was there to measure."""

    tensors: Mapping[str, float]  # largest absolute value of Q, K and V
    scale: float  # the factor on the scores
    matmul: Peak | None  # Q·Kᵀ of largest size before the scale, hidden pairs included
    # Lowest and highest score after scale and softcap, hidden pairs included
    all_scores: tuple[float, float] | None
    score: Peak | None  # score of largest size, of the pairs that are seen
    logit: Peak | None  # the same with the numbers of the mask added: what goes into the softmax
    exponent: float | None  # the highest of those: what exp takes where the maximum is not subtracted first
    sums: tuple[SoftmaxSum, ...]  # what the softmax sums, case by case
    # The finite number with which the mask hides keys; None where it hides none, or by -inf
    sentinel: float | None
    fully_masked: int  # how many queries, counted in each head, see no key at all
    not_finite: tuple[str, ...]  # inputs that hold NaN or infinity; their cases are not in the other numbers


class Meter:
    """Gathers the figures of one attention, as a probe shows it, case by case."""

    def __init__(self, attention: ProbedAttention) -> None:
        node = attention.node
        cached = node.has_past or node.has_nonpad_kv_seqlen
        strange = node.has_window or (cached and node.mask not in ("none", "bool"))
        if strange or node.group is None or node.softmax_scale is None:
            raise DeployError(
                "The range is not measured with windows, numbers as a mask of a cache, or without heads.",
                got=node.name,
                hint="a canonical graph, as mha-deploy export writes it",
            )
        self.node, self._attention, self._scale = node, attention, node.softmax_scale
        self._tensors = {"Q": 0.0, "K": 0.0, "V": 0.0}
        self._matmuls, self._scores, self._logits = _Extremes(), _Extremes(), _Extremes()
        self._mask_numbers: list[float] = []
        self._sums: list[SoftmaxSum] = []
        self._fully_masked = 0
        self._not_finite: list[str] = []

    def see(self, case: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Measure one case, given what the probe computed."""
        given = {role: arrays[name] for role, name in self._attention.outputs.items()}
        given = valid_only(self.node, given)
        broken = False
        for role, array in given.items():
            usable = array < np.inf if role == "mask" else np.isfinite(array)  # -inf in a mask hides a key
            if count := array.size - int(np.count_nonzero(usable)):
                broken = True
                name = self._attention.tensors[role]
                self._not_finite.append(f"{role} ({name}) in case {case}: {count:,} values")
        if broken:
            return
        for role, past in {"Q": None, "K": "past", "V": "past_values"}.items():
            both = [given[role], *([given[past]] if past in given else [])]
            sizes = [float(np.abs(array).max(initial=0.0)) for array in both]
            self._tensors[role] = max(self._tensors[role], *sizes)
        q, k = queries_and_keys(self.node, given)
        visible = visible_keys(self.node, given, q.shape[2], k.shape[2])
        mask = _Mask(
            given.get("mask") if visible is None else visible,
            is_causal=visible is None and self.node.is_causal,
            shape=(*q.shape[:3], k.shape[2]),
        )
        self._mask_numbers += mask.numbers
        largest = max(
            self._see_block(_Block(case=case, rows=rows, head=head, queries=queries), matmul, mask)
            for rows, head, queries, matmul in matmul_blocks(q, k)
        )
        self._sums.append(SoftmaxSum(case=case, keys=k.shape[2], largest=largest))

    def _see_block(self, block: _Block, matmuls: np.ndarray, mask: _Mask) -> float:
        """Measure one block, and give its largest softmax sum."""
        self._matmuls.see(block, matmuls, None)
        scores = self._scored(matmuls)
        added, given, seen = mask.of(block)
        logits = scores if added is None else scores + added
        self._logits.see(block, logits, seen)
        if added is not None:
            self._scores.see(block, scores, seen)
        if seen is not None:
            self._fully_masked += int(np.count_nonzero(~seen.any(-1)))  # causality alone closes none
        if given is not None:
            np.copyto(logits, -np.inf, where=~given)
        top = logits.max(axis=-1, keepdims=True)
        np.maximum(top, np.finfo(top.dtype).min, out=top)  # -inf − -inf of a query without keys is NaN
        return float(np.exp(logits - top).sum(axis=-1).max())

    def _scored(self, matmuls: np.ndarray) -> np.ndarray:
        scores = matmuls * matmuls.dtype.type(self._scale)
        cap = self.node.softcap
        return scores if cap <= 0 else cap * np.tanh(scores / cap)

    def figures(self) -> Figures:
        """What was measured so far."""
        logits, matmuls, numbers = self._logits, self._matmuls, list(self._mask_numbers)
        bounds = [float(self._scored(np.float64(p.value))) for p in (matmuls.low, matmuls.high) if p]
        constant = self._attention.lowest_mask_constant
        if constant is not None and constant <= _SURELY_A_SENTINEL:  # a Cast may have made it -inf since
            numbers.append(constant)
        return Figures(
            tensors=dict(self._tensors),
            scale=self._scale,
            matmul=matmuls.largest,
            all_scores=(min(bounds), max(bounds)) if bounds else None,
            score=(self._scores if self._scores.high else logits).largest,
            logit=logits.largest,
            exponent=logits.high.value if logits.high else None,
            sums=tuple(self._sums),
            sentinel=None if self.node.mask == "bool" else _sentinel_among(numbers),
            fully_masked=self._fully_masked,
            not_finite=tuple(self._not_finite),
        )


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Some queries of one head, of one or more batch elements."""

    case: str
    rows: slice
    head: int
    queries: slice


class _Extremes:
    """The lowest and the highest number so far."""

    def __init__(self) -> None:
        self.low: Peak | None = None
        self.high: Peak | None = None

    def see(self, block: _Block, values: np.ndarray, seen: np.ndarray | None) -> None:
        """Look at the values of a block, or at those that are seen."""
        where = True if seen is None else seen

        def peak(value: float) -> Peak:
            at = np.unravel_index(((values == value) & where).argmax(), values.shape)
            row, query, key = (int(i) for i in at)
            return Peak(
                value=float(value),
                case=block.case,
                row=block.rows.start + row,
                head=block.head,
                query=block.queries.start + query,
                key=key,
            )

        high = values.max(initial=-np.inf, where=where)
        low = values.min(initial=np.inf, where=where)
        if high > (self.high.value if self.high else -np.inf):
            self.high = peak(high)
        if low < (self.low.value if self.low else np.inf):
            self.low = peak(low)

    @property
    def largest(self) -> Peak | None:
        """The number of largest size."""
        if self.low is None or self.high is None:
            return None
        return max(self.high, self.low, key=lambda peak: abs(peak.value))


class _Mask:
    """What a mask (boolean or of numbers) and causality do to each block of scores [B, Hq, S, T]."""

    def __init__(self, mask: np.ndarray | None, *, is_causal: bool, shape: tuple[int, ...]) -> None:
        self.shape, self._is_causal = shape, is_causal
        self._mask = None if mask is None else np.broadcast_to(mask, shape)
        # The lowest and the highest finite number that is not 0.
        self.numbers: list[float] = []
        flat = np.empty(0) if mask is None or mask.dtype == bool else mask.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK].astype(np.float32)
            numbers = part[np.isfinite(part) & (part != 0)]
            self.numbers += [float(numbers.min()), float(numbers.max())] if numbers.size else []
        sentinel = _sentinel_among(self.numbers)
        self._hides_from = -np.inf if sentinel is None else sentinel / 2

    def of(self, block: _Block) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        """The numbers added to the scores, which pairs the softmax is given, and which are seen.

        A pair hidden by a sentinel is given but not seen. None adds nothing, or leaves nothing out.
        """
        causal = None
        if self._is_causal:
            queries = np.arange(block.queries.start, block.queries.stop)
            causal = np.arange(self.shape[3]) <= queries[:, None]
        if self._mask is None:
            return None, causal, causal
        mask = self._mask[block.rows, block.head, block.queries]
        if mask.dtype == bool:
            seen = mask if causal is None else mask & causal
            return None, seen, seen
        added = mask.astype(np.float32)
        seen = added > self._hides_from
        return added, causal, seen if causal is None else seen & causal


def _sentinel_among(numbers: Sequence[float]) -> float | None:
    """The number that hides keys: a very low one, or the only one that the mask holds besides 0."""
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    return low if low < 0 and (low == high or low <= _SURELY_A_SENTINEL) else None


# -- How near FP16's limit an attention comes, on golden data and before anything overflows --------

OK, NEAR, OVERFLOWS = STATUSES = ("ok", "near", "overflows")

NEAR_BELOW = 8.0
"""The headroom below which a number is near the limit: other inputs are larger than the golden ones."""

_ROUNDS_TO_INFINITY = 65520.0  # half a step above FP16_MAX
_LAST_COUNT = 2048  # in FP16, 2048 + 1 is 2048
_LARGEST_EXPONENT = math.log(FP16_MAX)
_FADED = 25 * math.log(2.0)  # a weight of 2^-25 is half of FP16's smallest number, and rounds to 0

_BF16 = {
    "fp16": "export with --precision bf16, which has the range of FP32",
    "bf16": "stay with bf16, which has the range of FP32",
    "fp32": "for a half precision take --precision bf16, which has the range of FP32",
}
_FP32_ISLAND = "keep the scores and the softmax in FP32, with Casts around them"
_SUM_IN_FP32 = "take kernels that sum the softmax in FP32"
_SENTINEL = "hide keys by a boolean mask or -inf, which every lowering knows, or clamp the number to -32768"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found, how bad it is (one of `STATUSES`), and what can be done."""

    status: str
    what: str
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NodeRange:
    """The range of one attention."""

    node: str  # name of the node
    figures: Figures  # the numbers
    max_keys: int  # the most keys that the spec allows: the largest sum that its softmax can have
    # FP16's limit over the largest of the numbers; 0 where one is not finite already. The number that
    # hides keys is judged by itself: it is meant to be large.
    headroom: float
    findings: tuple[Finding, ...]  # what is worth saying; those of status `ok` are remarks

    @property
    def status(self) -> str:
        """The worst that was found."""
        return max((finding.status for finding in self.findings), key=STATUSES.index, default=OK)

    @property
    def advice(self) -> tuple[str, ...]:
        """What can be done about all of it, each thing once."""
        return tuple(dict.fromkeys(line for finding in self.findings for line in finding.advice))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the figures that people ask for first; null where there is none."""
        matmul, score, sums = self.figures.matmul, self.figures.score, self.figures.sums
        return {
            "node": self.node,
            "status": self.status,
            "largest_score_raw": abs(matmul.value) if matmul else None,
            "largest_score": abs(score.value) if score else None,
            "largest_softmax_sum": max((each.largest for each in sums), default=None),
            "max_keys": self.max_keys,
            "headroom": self.headroom if math.isfinite(self.headroom) else None,
            "findings": [asdict(finding) for finding in self.findings],
            "advice": list(self.advice),
            "figures": asdict(self.figures),
        }


@dataclass(frozen=True, kw_only=True)
class RangeReport:
    """How near FP16's limit the attentions of a bundle come on its golden data."""

    model: str
    precision: str
    backend: str
    cases: tuple[str, ...]
    nodes: tuple[NodeRange, ...]

    @property
    def worst(self) -> str:
        """The worst status of all attentions."""
        return max((node.status for node in self.nodes), key=STATUSES.index, default=OK)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: a section of a report, which names model and precision itself."""
        return {"worst": self.worst, "nodes": [node.to_dict() for node in self.nodes]}


def fp16_range(bundle: Bundle, *, cases: Sequence[str] | None = None) -> RangeReport:
    """Measure every attention of a bundle on golden data, with projections accumulated in float32."""
    manifest = bundle.manifest
    by_name = {entry.name: entry for entry in manifest.golden}
    wanted = list(by_name) if cases is None else list(dict.fromkeys(cases))
    unknown = [name for name in wanted if name not in by_name]
    if unknown or not wanted:
        got = ", ".join(unknown) or "no names"
        raise DeployError("The bundle has no such golden case.", got=got, hint=nearest(got, by_name))
    probe = attention_probe(load_graph(bundle.model_path))
    meters = [Meter(attention) for attention in probe.attentions]
    with open_runner(available_cpu_backend(manifest.precision), probe.model) as runner:
        for name in wanted:
            arrays = runner.run(read_case(bundle, by_name[name]).inputs)
            for meter in meters:
                meter.see(name, arrays)
    return RangeReport(
        model=manifest.spec.name,
        precision=manifest.precision.name,
        backend=runner.name,
        cases=tuple(wanted),
        nodes=tuple(_node_range(meter, manifest.spec, manifest.precision) for meter in meters),
    )


def _node_range(meter: Meter, spec: ModelSpec, precision: Precision) -> NodeRange:
    figures, node = meter.figures(), meter.node
    # The longest past and the most new keys; no more than a window, which is a mask in the graph.
    lengths = (node.T, node.past_length) if node.has_past else (node.T,)
    most = [spec.axes[dim].max for dim in lengths if isinstance(dim, str) and dim in spec.axes]
    most += [dim for dim in lengths if isinstance(dim, int)]
    measured = max((each.keys for each in figures.sums), default=1)
    max_keys = sum(most) if len(most) == len(lengths) else measured
    window = None if spec.layer is None else spec.layer.window
    if window is not None and node.mask != "none":
        max_keys = min(max_keys, window)
    peaks = [abs(peak.value) for peak in (figures.matmul, figures.score, figures.logit) if peak]
    largest = max(*figures.tensors.values(), *peaks, *(each.largest for each in figures.sums))
    headroom = FP16_MAX / largest if largest else math.inf
    return NodeRange(
        node=node.name,
        figures=figures,
        max_keys=max_keys,
        headroom=0.0 if figures.not_finite else headroom,
        findings=tuple(_findings(figures, max_keys, precision.name)),
    )


def _status_of(size: float) -> str:
    if size > FP16_MAX:
        return OVERFLOWS
    return NEAR if size * NEAR_BELOW > FP16_MAX else OK


def _findings(figures: Figures, max_keys: int, precision: str) -> Iterator[Finding]:
    bf16 = _BF16[precision]
    for line in figures.not_finite:
        yield Finding(status=OVERFLOWS, what=f"{line} are NaN or infinite", advice=(bf16,))
    large: list[tuple[str, float, tuple[str, ...]]] = [
        (f"the largest |{name}|", size, (bf16,)) for name, size in figures.tensors.items()
    ]
    if figures.matmul:
        size, scale = abs(figures.matmul.value), abs(figures.scale)
        folding: tuple[str, ...] = (
            "fold the scale into the query projection (multiply its weights and bias by it): "
            f"the matmul is then at most {size * scale:,.0f}",
        )
        if STATUSES.index(_status_of(size * scale)) >= STATUSES.index(_status_of(size)):
            folding = ()  # that alone would not make it smaller by enough to matter
        large.append(("the largest Q·Kᵀ before the scale", size, (*folding, _FP32_ISLAND, bf16)))
    if figures.score and figures.logit:
        size = max(abs(figures.score.value), abs(figures.logit.value))
        large.append(("the largest score", size, (_FP32_ISLAND, bf16)))
    for what, size, advice in large:
        status = _status_of(size)
        if status != OK:
            does = {OVERFLOWS: ("overflows", "would overflow in"), NEAR: ("is near the limit of",) * 2}
            verb = does[status][precision != "fp16"]
            yield Finding(status=status, what=f"{what} is {size:,.0f}, which {verb} FP16", advice=advice)
    if figures.exponent is not None and figures.exponent > _LARGEST_EXPONENT:
        exp = f"exp({figures.exponent:.1f})"
        yield Finding(
            status=OK, what=f"{exp} overflows FP16 in a kernel that does not subtract the maximum first"
        )
    measured = max((each.largest for each in figures.sums), default=0.0)
    if max(max_keys, measured) > _LAST_COUNT:
        status, overflow = OK, ""
        if max_keys > FP16_MAX:
            status, overflow = NEAR, f" and overflows above {FP16_MAX:,.0f}"
        what = (
            f"the softmax sums up to {max_keys:,} keys (measured: {measured:,.1f}); "
            f"a sum of ones in FP16 stops at {_LAST_COUNT:,}{overflow}"
        )
        status = max(status, _status_of(measured), key=STATUSES.index)
        yield Finding(status=status, what=what, advice=(_SUM_IN_FP32,))
    yield from _about_sentinel(figures)


def _about_sentinel(figures: Figures) -> Iterator[Finding]:
    """Judge the number that hides keys, together with the scores it is added to."""
    if figures.sentinel is None:
        return
    low, high = figures.all_scores or (0.0, 0.0)
    size, reach = -figures.sentinel, max(-low, high)
    name = f"the mask's {figures.sentinel:,.6g}"
    row = f"a fully masked query then gives NaN (the golden cases have {figures.fully_masked:,} of them)"
    if size >= _ROUNDS_TO_INFINITY:
        yield Finding(status=OVERFLOWS, what=f"{name} is -inf in FP16: {row}", advice=(_SENTINEL,))
    elif size + reach >= _ROUNDS_TO_INFINITY:
        what = f"{name} and a score of {-reach:,.1f} add up to -inf in FP16: {row}"
        yield Finding(status=OVERFLOWS, what=what, advice=(_SENTINEL,))
    elif size + NEAR_BELOW * reach >= _ROUNDS_TO_INFINITY:
        what = f"{name} leaves FP16 room for scores down to {size - _ROUNDS_TO_INFINITY:,.0f} only: {row}"
        yield Finding(status=NEAR, what=what, advice=(_SENTINEL,))
    elif size < high - low + _FADED:
        what = f"{name}, if it is to hide keys, is too small for scores from {low:,.1f} to {high:,.1f}"
        yield Finding(status=NEAR, what=what, advice=(_SENTINEL,))
