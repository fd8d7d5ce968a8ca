"""How near the limit of FP16 attention comes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mha_deploy.bundle.cases import read_case
from mha_deploy.bundle.folder import Bundle
from mha_deploy.errors import DeployError
from mha_deploy.graph.attention_node import valid_only, visible_keys
from mha_deploy.graph.file import ProbedAttention, attention_probe, load_graph
from mha_deploy.graph.precision import FP16_MAX, matmul_blocks, queries_and_keys
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
        self._peaks: dict[tuple[str, int], Peak] = {}  # the lowest (-1) and the highest (1) of each kind
        self._mask_numbers: list[float] = []
        self._sums: list[SoftmaxSum] = []
        self._fully_masked = 0
        self._not_finite: list[str] = []

    def see(self, case: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Measure one case, given what the probe computed."""
        inputs = {role: arrays[name] for role, name in self._attention.outputs.items()}
        inputs, broken = valid_only(self.node, inputs), False
        for role, array in inputs.items():
            usable = array < np.inf if role == "mask" else np.isfinite(array)  # -inf in a mask hides a key
            if count := array.size - int(np.count_nonzero(usable)):
                broken = True
                name = self._attention.tensors[role]
                self._not_finite.append(f"{role} ({name}) in case {case}: {count:,} values")
        if broken:
            return
        for role, past in {"Q": "", "K": "past", "V": "past_values"}.items():
            sizes = (float(np.abs(inputs[each]).max(initial=0.0)) for each in (role, past) if each in inputs)
            self._tensors[role] = max(self._tensors[role], *sizes)
        q, k = queries_and_keys(self.node, inputs)
        T = k.shape[2]
        visible = visible_keys(self.node, inputs, q.shape[2], T)
        mask = inputs.get("mask") if visible is None else visible
        numbers = [] if mask is None or mask.dtype == bool else _finite_numbers(mask)
        sentinel = _sentinel_among(numbers)
        self._mask_numbers += numbers
        mask = None if mask is None else np.broadcast_to(mask, (*q.shape[:3], T))
        largest = 0.0
        for elements, head, queries, matmuls in matmul_blocks(q, k):
            at = {"case": case, "row": elements.start, "head": head, "query": queries.start}
            self._note("matmul", at, matmuls, np.True_)
            logits = scores = self._scored(matmuls)
            # The pairs that the softmax is given, and those that are seen: a sentinel hides a given one.
            given = seen = np.ones((1, 1), bool)
            if visible is None and self.node.is_causal:
                given = seen = np.arange(T) <= np.arange(queries.start, queries.stop)[:, None]
            if mask is not None and mask.dtype == bool:
                given = seen = given & mask[elements, head, queries]
            elif mask is not None:
                added = mask[elements, head, queries].astype(np.float32)
                logits, seen = (
                    scores + added,
                    given & (added > (-np.inf if sentinel is None else sentinel / 2)),
                )
            self._note("score", at, scores, seen)
            self._note("logit", at, logits, seen)
            self._fully_masked += int(np.count_nonzero(~np.broadcast_to(seen, logits.shape).any(-1)))
            logits = np.where(given, logits, -np.inf)
            top = logits.max(axis=-1, keepdims=True)
            np.maximum(top, np.finfo(top.dtype).min, out=top)  # -inf − -inf of a query without keys is NaN
            largest = max(largest, float(np.exp(logits - top).sum(axis=-1).max()))
        self._sums.append(SoftmaxSum(case=case, keys=T, largest=largest))

    def _note(
        self, kind: str, at: Mapping[str, Any], values: np.ndarray, seen: np.ndarray | np.bool_
    ) -> None:
        """Keep the lowest and the highest of the values of a block that are seen, and their places."""
        extremes = {-1: values.min(initial=np.inf, where=seen), 1: values.max(initial=-np.inf, where=seen)}
        for sign, value in extremes.items():
            old = self._peaks.get((kind, sign))
            if sign * value > (-np.inf if old is None else sign * old.value):
                place = np.unravel_index(((values == value) & seen).argmax(), values.shape)
                row, query, key = (int(i) for i in place)
                moved = {"row": at["row"] + row, "query": at["query"] + query, "key": key}
                self._peaks[kind, sign] = Peak(**{**at, **moved, "value": float(value)})

    def _scored(self, matmuls: np.ndarray) -> np.ndarray:
        scores = matmuls * matmuls.dtype.type(self._scale)
        cap = self.node.softcap
        return scores if cap <= 0 else cap * np.tanh(scores / cap)

    def figures(self) -> Figures:
        """What was measured so far."""

        def of(kind: str) -> list[Peak]:
            return [self._peaks[kind, sign] for sign in (1, -1) if (kind, sign) in self._peaks]

        def largest(kind: str) -> Peak | None:
            return max(of(kind), key=lambda peak: abs(peak.value), default=None)

        bounds = [float(self._scored(np.float64(peak.value))) for peak in of("matmul")]
        constant, numbers = self._attention.lowest_mask_constant, list(self._mask_numbers)
        if constant is not None and constant <= _SURELY_A_SENTINEL:  # a Cast may have made it -inf since
            numbers.append(constant)
        return Figures(
            tensors=dict(self._tensors),
            scale=self._scale,
            matmul=largest("matmul"),
            all_scores=(min(bounds), max(bounds)) if bounds else None,
            score=largest("score"),
            logit=largest("logit"),
            exponent=of("logit")[0].value if of("logit") else None,
            sums=tuple(self._sums),
            sentinel=None if self.node.mask == "bool" else _sentinel_among(numbers),
            fully_masked=self._fully_masked,
            not_finite=tuple(self._not_finite),
        )


def _finite_numbers(mask: np.ndarray) -> list[float]:
    """The lowest and the highest finite number of each part of a mask that is not 0."""
    found: list[float] = []
    for start in range(0, mask.size, _CHUNK):
        part = mask.reshape(-1)[start : start + _CHUNK].astype(np.float32)
        numbers = part[np.isfinite(part) & (part != 0)]
        found += [float(numbers.min()), float(numbers.max())] if numbers.size else []
    return found


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


@dataclass(frozen=True)
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
            "advice": list(dict.fromkeys(line for finding in self.findings for line in finding.advice)),
            "figures": asdict(self.figures),
        }


@dataclass(frozen=True, kw_only=True)
class RangeReport:
    """How near FP16's limit the attentions of a bundle come on its golden data."""

    precision: str  # that of the bundle
    nodes: tuple[NodeRange, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: a section of a report, which names model and precision itself."""
        worst = max((node.status for node in self.nodes), key=STATUSES.index, default=OK)
        return {"worst": worst, "nodes": [node.to_dict() for node in self.nodes]}


def fp16_range(bundle: Bundle, *, cases: Sequence[str] | None = None) -> RangeReport:
    """Measure every attention of a bundle on golden data, with projections accumulated in float32."""
    manifest, probe = bundle.manifest, attention_probe(load_graph(bundle.model_path))
    meters, precision = [Meter(attention) for attention in probe.attentions], manifest.precision
    with open_runner(available_cpu_backend(precision), probe.model) as runner:
        for entry in manifest.golden:
            if cases is None or entry.name in cases:
                arrays = runner.run(read_case(bundle, entry).inputs)
                for meter in meters:
                    meter.see(entry.name, arrays)
    nodes = tuple(_node_range(meter, manifest.spec, precision.name) for meter in meters)
    return RangeReport(precision=precision.name, nodes=nodes)


def _node_range(meter: Meter, spec: ModelSpec, precision: str) -> NodeRange:
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
        findings=(*_findings(figures, max_keys, precision), *_about_sentinel(figures)),
    )


def _status_of(size: float) -> str:
    return OVERFLOWS if size > FP16_MAX else NEAR if size * NEAR_BELOW > FP16_MAX else OK


def _findings(figures: Figures, max_keys: int, precision: str) -> Iterator[Finding]:
    bf16 = _BF16[precision]
    for line in figures.not_finite:
        yield Finding(OVERFLOWS, f"{line} are NaN or infinite", (bf16,))
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
    does = {OVERFLOWS: ("overflows", "would overflow in"), NEAR: ("is near the limit of",) * 2}
    for what, size, advice in large:
        if (status := _status_of(size)) != OK:
            verb = does[status][precision != "fp16"]
            yield Finding(status, f"{what} is {size:,.0f}, which {verb} FP16", advice)
    if figures.exponent is not None and figures.exponent > _LARGEST_EXPONENT:
        exp = f"exp({figures.exponent:.1f})"
        yield Finding(OK, f"{exp} overflows FP16 in a kernel that does not subtract the maximum first")
    measured = max((each.largest for each in figures.sums), default=0.0)
    if max(max_keys, measured) > _LAST_COUNT:
        status, overflow = OK, ""
        if max_keys > FP16_MAX:
            status, overflow = NEAR, f" and overflows above {FP16_MAX:,.0f}"
        what = (
            f"the softmax sums up to {max_keys:,} keys (measured: {measured:,.1f}); "
            f"a sum of ones in FP16 stops at {_LAST_COUNT:,}{overflow}"
        )
        yield Finding(max(status, _status_of(measured), key=STATUSES.index), what, (_SUM_IN_FP32,))


def _about_sentinel(figures: Figures) -> Iterator[Finding]:
    """Judge the number that hides keys, together with the scores it is added to."""
    if figures.sentinel is None:
        return
    low, high = figures.all_scores or (0.0, 0.0)
    size, reach, status = -figures.sentinel, max(-low, high), OVERFLOWS
    what = f"the mask's {figures.sentinel:,.6g}"
    row = f"a fully masked query then gives NaN (the golden cases have {figures.fully_masked:,} of them)"
    if size >= _ROUNDS_TO_INFINITY:
        what += f" is -inf in FP16: {row}"
    elif size + reach >= _ROUNDS_TO_INFINITY:
        what += f" and a score of {-reach:,.1f} add up to -inf in FP16: {row}"
    elif size + NEAR_BELOW * reach >= _ROUNDS_TO_INFINITY:
        status = NEAR
        what += f" leaves FP16 room for scores down to {size - _ROUNDS_TO_INFINITY:,.0f} only: {row}"
    elif size < high - low + _FADED:
        status = NEAR
        what += f", if it is to hide keys, is too small for scores from {low:,.1f} to {high:,.1f}"
    else:
        return
    yield Finding(status, what, (_SENTINEL,))
