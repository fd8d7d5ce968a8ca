"""How near the limit of FP16 attention comes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import onnx_ir as ir
from msgspec import Struct

from mha_deploy.bundle.cases import GoldenCase, golden_cases
from mha_deploy.bundle.folder import Bundle
from mha_deploy.errors import DeployError
from mha_deploy.graph import attention_node
from mha_deploy.graph.file import load_graph
from mha_deploy.graph.ir import constant, input_at, is_op, made_by
from mha_deploy.graph.mixed_precision import (
    FP16_MAX,
    Read,
    is_coarse,
    matmul_blocks,
    queries_and_keys,
    read_values,
    step_at,
)
from mha_deploy.model.spec import ModelSpec
from mha_deploy.runtime import available_cpu_runtime, run_cases
from mha_deploy.status import Word, means

# -- Measure the numbers that a kernel meets inside an attention, from Q, K, V and the mask --------

# Any lower number in a mask hides keys; biases such as ALiBi's reach some thousands. The usual -1e4 is this
# number in BF16, and one key that `fuse` adds in the place of n with -1e4 has a lower one: -1e4 + log n.
_SURELY_A_SENTINEL = -9984.0


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The number of largest magnitude, with its sign, and its query and key."""

    value: Annotated[float, means("the number")]
    case: Annotated[str, means("the golden case")]
    row: Annotated[int, means("batch element")]
    head: Annotated[int, means("query head")]
    query: Annotated[int, means("query")]
    key: Annotated[int, means("key")]


@dataclass(frozen=True, kw_only=True)
class SoftmaxSum:
    """The largest Σ exp(s − max s) of one case; it is at most the number of keys."""

    case: Annotated[str, means("the golden case")]
    keys: Annotated[int, means("its keys")]
    largest: Annotated[float, means("the sum")]


@dataclass(frozen=True, kw_only=True)
class NotFinite:
    """An input of an attention that holds NaN or infinity in one case."""

    role: Annotated[str, means("`Q`, `K`, `V`, `mask`, …")]
    tensor: Annotated[str, means("its name in the graph")]
    case: Annotated[str, means("the golden case")]
    count: Annotated[int, means("how many of its values")]


@dataclass(kw_only=True)
class Figures:
    """The numbers of one attention over some golden cases; null if there was no pair of query and key."""

    tensors: Annotated[dict[str, float], means("largest absolute value of Q, K and V")]
    scale: Annotated[float, means("the factor on the scores")]
    matmul: Annotated[
        Peak | None, means("largest |q·k| before the scale, including masked pairs; null without a pair")
    ] = None
    all_scores: Annotated[
        tuple[float, float] | None,
        means("lowest and highest score after scale and softcap, including masked pairs; null as above"),
    ] = None
    score: Annotated[Peak | None, means("largest |score| of unmasked pairs; null as above")] = None
    logit: Annotated[
        Peak | None,
        means("the same with the mask added: the input of the softmax; null as above"),
    ] = None
    exponent: Annotated[
        float | None,
        means("the highest of these: the argument of exp if the maximum is not subtracted; null as above"),
    ] = None
    sums: Annotated[tuple[SoftmaxSum, ...], means("the largest sum of exponentials of each case")] = ()
    sentinel: Annotated[
        float | None,
        means("the finite number that masks keys; null if no key is masked, or by -inf"),
    ] = None
    fully_masked: Annotated[int, means("fully masked queries, counted in every head")] = 0
    not_finite: Annotated[
        tuple[NotFinite, ...],
        means("inputs with NaN or infinity; their cases are excluded from the other numbers"),
    ] = ()


class Meter:
    """Gathers the figures of one attention of a graph, case by case."""

    def __init__(self, attention: ir.Node) -> None:
        self.node = node = attention_node.read_attention(attention)
        self.inputs = attention_node.inputs_by_role(attention)
        cached = node.has_past or node.has_nonpad_kv_seqlen
        strange = node.has_window or (cached and node.mask not in ("none", "bool"))
        if strange or node.group is None or node.softmax_scale is None:
            what = "The range is not measured with windows, numbers as a mask of a cache, or without heads."
            hint = "a canonical graph, as mha-deploy export writes it"
            raise DeployError(what, got=node.name, hint=hint)
        self.figures = Figures(tensors={"Q": 0.0, "K": 0.0, "V": 0.0}, scale=node.softmax_scale)
        # A Cast may have made -inf of a constant before it reaches the mask.
        lowest = _sentinel_behind(self.inputs.get("mask"))
        self._mask_numbers = [] if lowest is None else [lowest]
        # An export in FP16 would write another number.
        self.writes_sentinel = _sentinel_behind(self.inputs.get("mask"), replacing=True) is not None

    def see(self, case: str, read: Read) -> None:
        """Measure one case, by what reads the inputs of the attention."""
        figures, broken = self.figures, list[NotFinite]()
        whole = {role: read(value) for role, value in self.inputs.items()}
        inputs = attention_node.valid_only(self.node, whole)
        for role, array in inputs.items():
            usable = array < np.inf if role == "mask" else np.isfinite(array)  # -inf in a mask hides a key
            if count := array.size - int(np.count_nonzero(usable)):
                name = str(self.inputs[role].name)
                broken.append(NotFinite(role=role, tensor=name, case=case, count=count))
        figures.not_finite += tuple(broken)
        if broken:
            return
        for role, past in {"Q": "", "K": "past_key", "V": "past_value"}.items():
            sizes = (float(np.abs(inputs[each]).max(initial=0.0)) for each in (role, past) if each in inputs)
            figures.tensors[role] = max(figures.tensors[role], *sizes)
        q, k = queries_and_keys(self.node, inputs)
        T = k.shape[2]
        visible_in_cache = attention_node.visible_keys(self.node, inputs, q.shape[2], T)
        mask = inputs.get("mask") if visible_in_cache is None else visible_in_cache
        numbers = list[float]()
        if mask is not None and mask.dtype != bool:
            finite = mask[np.isfinite(mask)]
            some = finite[finite != 0]
            numbers += [float(some.min()), float(some.max())] if some.size else []
            if len({*numbers}) == 1 and some.size == finite.size and numbers[0] > _SURELY_A_SENTINEL:
                numbers = []  # a bias of all keys alike, as of a layer that computes the scores, hides none
        hides = _sentinel_among(numbers)
        self._mask_numbers += numbers
        figures.sentinel = None if self.node.mask == "bool" else _sentinel_among(self._mask_numbers)
        mask = None if mask is None else np.broadcast_to(mask, (*q.shape[:3], T))
        largest = 0.0
        for elements, head, queries, matmuls in matmul_blocks(q, k):
            at = (case, elements.start, head, queries.start)
            logits = scores = self._scored(matmuls)
            # The pairs that the softmax is given, and the visible ones: a sentinel hides a given one.
            given = visible = np.ones((1, 1), bool)
            if visible_in_cache is None and self.node.is_causal:
                given = visible = np.arange(T) <= np.arange(queries.start, queries.stop)[:, None]
            if mask is not None and mask.dtype == bool:
                given = visible = given & mask[elements, head, queries]
            elif mask is not None:
                added = mask[elements, head, queries].astype(np.float32)
                logits, visible = scores + added, given & (added > (-np.inf if hides is None else hides / 2))
            bounds = [float(self._scored(np.array(each))) for each in (matmuls.min(), matmuls.max())]
            bounds += figures.all_scores or ()
            figures.all_scores = min(bounds), max(bounds)
            figures.matmul = _larger(figures.matmul, matmuls, np.True_, at)
            figures.score = _larger(figures.score, scores, visible, at)
            figures.logit = _larger(figures.logit, logits, visible, at)
            highest = float(logits.max(initial=-np.inf, where=visible))
            if highest > (-np.inf if figures.exponent is None else figures.exponent):
                figures.exponent = highest
            figures.fully_masked += int(np.count_nonzero(~np.broadcast_to(visible, logits.shape).any(-1)))
            logits = np.where(given, logits, -np.inf)
            top = logits.max(axis=-1, keepdims=True)
            np.maximum(top, np.finfo(top.dtype).min, out=top)  # -inf − -inf of a query without keys is NaN
            largest = max(largest, float(np.exp(logits - top).sum(axis=-1).max()))
        figures.sums += (SoftmaxSum(case=case, keys=T, largest=largest),)

    def _scored(self, matmuls: np.ndarray) -> np.ndarray:
        scores = matmuls * matmuls.dtype.type(self.figures.scale)
        cap = self.node.softcap
        return scores if cap <= 0 else cap * np.tanh(scores / cap)


def lowest_constant(value: ir.Value | None, *, replacing: bool = False) -> float | None:
    """The lowest finite number that the floating-point constants behind a value can give it.

    What only decides, as the condition of a `Where` or an operand of a comparison, gives it none, and what
    `Max` or `Clip` bounds by a constant is not lower than that. A number in the place of another that hides
    keys counts only if `replacing`: by itself it gives none, since the tensor may never hold the other.
    """
    lowest, seen, waiting = math.inf, set[tuple[ir.Value, float]](), [(value, -math.inf)]
    while waiting:
        each, bound = waiting.pop()
        if each is None or (each, bound) in seen or each.dtype == ir.DataType.BOOL:
            continue
        seen.add((each, bound))
        if (tensor := constant(each)) is not None:
            if tensor.dtype.is_floating_point():
                array = np.maximum(tensor.numpy().astype(np.float64), bound)
                lowest = float(array.min(initial=lowest, where=np.isfinite(array)))
        elif (node := each.producer()) is not None:
            inputs = node.inputs[1:] if is_op(node, "Where") else node.inputs
            inputs = inputs if replacing or not _replaces_sentinel(node) else node.inputs[2:]
            bounds = inputs if is_op(node, "Max") else inputs[1:2] if is_op(node, "Clip") else ()
            known = [tensor for tensor in map(constant, bounds) if tensor is not None and tensor.size == 1]
            bound = max(bound, *(float(tensor.numpy().item()) for tensor in known), -math.inf)
            waiting += [(source, bound) for source in inputs]
    return lowest if lowest < math.inf else None


def _sentinel_behind(mask: ir.Value | None, *, replacing: bool = False) -> float | None:
    """The same, if it is so low that it surely hides keys."""
    lowest = lowest_constant(mask, replacing=replacing)
    return lowest if lowest is not None and lowest <= _SURELY_A_SENTINEL else None


def _replaces_sentinel(node: ir.Node) -> bool:
    """Whether a node puts a number where a tensor has another that hides keys: `fuse` writes that."""
    test = made_by(input_at(node, 0), "Equal") if is_op(node, "Where") else None
    if test is None or node.inputs[2] not in test.inputs:
        return False
    return any(_sentinel_behind(each) is not None for each in test.inputs if constant(each) is not None)


def _larger(
    old: Peak | None, values: np.ndarray, visible: np.ndarray | np.bool_, at: tuple[str, int, int, int]
) -> Peak | None:
    """The number of largest size: the old one, or one of a block that begins at a place."""
    sizes = np.abs(values)
    largest = sizes.max(initial=-1.0, where=visible)
    if largest <= (-1.0 if old is None else abs(old.value)):
        return old
    place = np.unravel_index(((sizes == largest) & visible).argmax(), values.shape)
    (case, element, head, query), (b, s, t) = at, (int(i) for i in place)
    value = float(values[place])
    return Peak(value=value, case=case, row=element + b, head=head, query=query + s, key=t)


def _sentinel_among(numbers: Sequence[float]) -> float | None:
    """The number that hides keys: a very low one, or the only one that the mask holds besides 0."""
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    return low if low < 0 and (low == high or low <= _SURELY_A_SENTINEL) else None


# -- How near FP16's limit an attention comes, on golden data and before anything overflows --------


class RangeStatus(Word):
    """Whether numbers fit into FP16, the better first."""

    OK = "ok"
    NEAR = "near"
    OVERFLOWS = "overflows"


OK, NEAR, OVERFLOWS = STATUSES = tuple(RangeStatus)


class RangeKind(Word):
    """What a finding on the range is about."""

    NOT_FINITE = "not finite"
    TENSOR = "tensor"
    MATMUL = "matmul"
    SCORE = "score"
    SCORE_STEPS = "score steps"  # of the precision that the attention has, whichever it is
    EXPONENT = "exponent"
    SOFTMAX_SUM = "softmax sum"
    # The number that hides keys
    SENTINEL_INFINITE = "sentinel infinite"
    SENTINEL_ADDS_UP = "sentinel adds up"
    SENTINEL_NEAR = "sentinel near"
    SENTINEL_TOO_SMALL = "sentinel too small"


NEAR_BELOW = 8.0
"""The headroom below which a number is near the limit: other inputs are larger than the golden ones."""

_ROUNDS_TO_INFINITY = 65520.0  # half a step above FP16_MAX
_LAST_COUNT = 2048  # in FP16, 2048 + 1 is 2048
_LARGEST_EXPONENT = math.log(FP16_MAX)
_FADED = 25 * math.log(2.0)  # a weight of 2^-25 is half of FP16's smallest number, and rounds to 0

_BY_RANGE = {
    "fp16": "export with --precision bf16, which has the range of FP32",
    "bf16": "stay with bf16, which has the range of FP32",
    "fp32": "for a half precision take --precision bf16, which has the range of FP32",
}
_FP32_ISLAND = "keep the scores and the softmax in FP32, with Casts around them"
_EXACT_SCORES = "export with --precision auto or fp32, which have such an attention in FP32"
_SMALLER_SCORES = "let the model bound its scores, as by a norm of Q and of K"
_SUM_IN_FP32 = "take kernels that sum the softmax in FP32"
_SENTINEL = "hide keys by a boolean mask or -inf, which every lowering knows, or clamp the number to -32768"


class RangeFinding(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One finding on an attention; with status `ok` it is a remark."""

    status: Annotated[RangeStatus, means("the severity")]
    kind: Annotated[RangeKind, means("what kind of finding")]
    name: Annotated[str, means("the tensor concerned; empty if the kind names it")] = ""
    numbers: Annotated[dict[str, float], means("the figures behind it, by name")] = {}
    what: Annotated[str, means("what was found, in words, for people")] = ""
    advice: Annotated[tuple[str, ...], means("what can be done about it")] = ()


def worst_of(statuses: Iterable[RangeStatus]) -> RangeStatus:
    """The worst of several."""
    return max(statuses, key=STATUSES.index, default=OK)


class NodeRange(Struct, frozen=True, kw_only=True):
    """The range of one attention."""

    node: Annotated[str, means("name of the attention node")]
    status: Annotated[RangeStatus, means("whether its numbers fit: the worst of its findings")]
    largest_score_raw: Annotated[
        float | None, means("largest |q·k| before the scale; null if nothing was measured")
    ] = None
    largest_score: Annotated[float | None, means("largest |score| after the scale; null as above")] = None
    largest_softmax_sum: Annotated[float | None, means("largest sum of exponentials; null as above")] = None
    max_keys: Annotated[
        int,
        means("largest number of keys that the spec allows, which bounds the sum of exponentials"),
    ]
    # The number that hides keys is judged by itself: it is meant to be large.
    headroom: Annotated[
        float | None,
        means("65504 divided by the largest number; 0 if one is not finite already; null if all are zero"),
    ]
    findings: Annotated[tuple[RangeFinding, ...], means("what was found")]
    advice: Annotated[tuple[str, ...], means("what can be done about the findings, without repetition")] = ()
    figures: Annotated[Figures, means("everything that was measured")]


class RangeReport(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How close the attentions of a bundle come to FP16's limit, on its golden cases."""

    precision: Annotated[str, means("precision of the bundle")]
    worst: Annotated[RangeStatus, means("the worst of the nodes")]
    nodes: Annotated[tuple[NodeRange, ...], means("one for every attention node; may hold further keys")]


def fp16_range(
    bundle: Bundle, golden: Iterable[GoldenCase] | None = None, *, cases: Sequence[str] | None = None
) -> RangeReport:
    """Measure every attention of a bundle on golden data, with projections accumulated in float32.

    `golden` are the golden cases, where they were read already; `cases` names some of them.
    """
    manifest, model = bundle.manifest, load_graph(bundle.model_path)
    meters, precision = [Meter(node) for node in measurable_attentions(model)], manifest.precision
    every = golden_cases(bundle) if golden is None else golden
    chosen = {case.name: case.inputs for case in every if cases is None or case.name in cases}
    run = partial(run_cases, available_cpu_runtime(precision))
    inputs = [value for meter in meters for value in meter.inputs.values()]
    for case, read in zip(chosen, read_values(run, model, inputs, chosen), strict=True):
        for meter in meters:
            meter.see(case, read)
    nodes = tuple(_node_range(meter, manifest.spec, precision.name) for meter in meters)
    worst = worst_of(node.status for node in nodes)
    return RangeReport(precision=precision.name, worst=worst, nodes=nodes)


def measurable_attentions(model: ir.Model) -> list[ir.Node]:
    """The attentions of a graph; refused where there are none, or where their inputs cannot be outputs."""
    nodes = [node for node in model.graph if attention_node.is_attention(node)]
    everywhere = attention_node.attention_nodes(model)
    if not everywhere:
        raise DeployError(
            "The graph has no Attention node.",
            got=model.graph.name,
            hint="`mha-deploy fuse` writes attention as single nodes",
        )
    if len(nodes) != len(everywhere):
        what = "An attention is inside a function or a branch, where its inputs cannot be outputs."
        got = ", ".join(f"{node.name} in {node.graph}" for node in everywhere)
        raise DeployError(what, got=got, hint="inline the functions of the graph")
    return nodes


def _node_range(meter: Meter, spec: ModelSpec, precision: str) -> NodeRange:
    figures, node = meter.figures, meter.node
    # The longest past and the most new keys; no more than a window, which is a mask in the graph.
    lengths = (node.T, node.past_length) if node.has_past else (node.T,)
    most = [spec.axes[dim].max for dim in lengths if isinstance(dim, str) and dim in spec.axes]
    most += [dim for dim in lengths if isinstance(dim, int)]
    measured = max((each.keys for each in figures.sums), default=1)
    max_keys = sum(most) if len(most) == len(lengths) else measured
    if spec.window is not None and node.mask != "none":
        max_keys = min(max_keys, spec.window)
    peaks = [abs(peak.value) for peak in (figures.matmul, figures.score, figures.logit) if peak]
    largest = max(*figures.tensors.values(), *peaks, *(each.largest for each in figures.sums))
    headroom = FP16_MAX / largest if largest else None
    own = node.dtype or precision
    findings = [*_about_steps(figures, own)]
    if own == precision:  # what is kept wider is so because FP16 cannot hold it
        findings += _findings(figures, max_keys, precision)
        if precision == "fp16" or not meter.writes_sentinel:
            findings += _about_sentinel(figures, precision)
    return NodeRange(
        node=node.name,
        status=worst_of(finding.status for finding in findings),
        largest_score_raw=abs(figures.matmul.value) if figures.matmul else None,
        largest_score=abs(figures.score.value) if figures.score else None,
        largest_softmax_sum=max((each.largest for each in figures.sums), default=None),
        max_keys=max_keys,
        headroom=0.0 if figures.not_finite else headroom,
        findings=tuple(findings),
        advice=tuple(dict.fromkeys(line for finding in findings for line in finding.advice)),
        figures=figures,
    )


def _status_of(size: float) -> RangeStatus:
    return OVERFLOWS if size > FP16_MAX else NEAR if size * NEAR_BELOW > FP16_MAX else OK


def _findings(figures: Figures, max_keys: int, precision: str) -> Iterator[RangeFinding]:
    size = abs(figures.score.value) if figures.score else 0.0
    bf16 = () if is_coarse(size, "bf16") else (_BY_RANGE[precision],)
    for each in figures.not_finite:
        about: dict[str, Any] = {"kind": RangeKind.NOT_FINITE, "name": each.role, "advice": bf16}
        what = f"{each.role} ({each.tensor}) in case {each.case}: {each.count:,} values are NaN or infinite"
        yield RangeFinding(status=OVERFLOWS, what=what, numbers={"count": each.count}, **about)
    large: list[tuple[dict[str, Any], str]] = [
        (
            {"kind": RangeKind.TENSOR, "name": name, "numbers": {"largest": size}, "advice": bf16},
            f"the largest |{name}|",
        )
        for name, size in figures.tensors.items()
    ]
    if figures.matmul:
        size, folded = abs(figures.matmul.value), abs(figures.matmul.value * figures.scale)
        about = {"kind": RangeKind.MATMUL, "numbers": {"largest": size}, "advice": (_FP32_ISLAND, *bf16)}
        if STATUSES.index(_status_of(folded)) < STATUSES.index(_status_of(size)):
            folding = "fold the scale into the query projection (multiply its weights and bias by it)"
            about["numbers"] = {"largest": size, "folded": folded}
            about["advice"] = (f"{folding}: the matmul is then at most {folded:,.0f}", *about["advice"])
        large.append((about, "the largest Q·Kᵀ before the scale"))
    if figures.score and figures.logit:
        size = max(abs(figures.score.value), abs(figures.logit.value))
        about = {"kind": RangeKind.SCORE, "numbers": {"largest": size}, "advice": (_FP32_ISLAND, *bf16)}
        large.append((about, "the largest score"))
    does = {OVERFLOWS: ("overflows", "would overflow in"), NEAR: ("is near the limit of",) * 2}
    for about, name in large:
        size = about["numbers"]["largest"]
        if (status := _status_of(size)) is not OK:
            verb = does[status][precision != "fp16"]
            yield RangeFinding(status=status, what=f"{name} is {size:,.0f}, which {verb} FP16", **about)
    if figures.exponent is not None and figures.exponent > _LARGEST_EXPONENT:
        about = {"kind": RangeKind.EXPONENT, "numbers": {"exponent": figures.exponent}}
        what = f"exp({figures.exponent:.1f}) overflows FP16 in a kernel that does not subtract the maximum"
        yield RangeFinding(status=OK, what=f"{what} first", **about)
    measured = max((each.largest for each in figures.sums), default=0.0)
    if max(max_keys, measured) > _LAST_COUNT:
        status, what = OK, f"the softmax sums up to {max_keys:,} keys (measured: {measured:,.1f}); "
        what += f"a sum of ones in FP16 stops at {_LAST_COUNT:,}"
        if max_keys > FP16_MAX:
            status, what = NEAR, f"{what} and overflows above {FP16_MAX:,.0f}"
        about = {"kind": RangeKind.SOFTMAX_SUM, "numbers": {"keys": max_keys, "measured": measured}}
        status = worst_of((status, _status_of(measured)))
        yield RangeFinding(status=status, what=what, advice=(_SUM_IN_FP32,), **about)


def _about_steps(figures: Figures, precision: str) -> Iterator[RangeFinding]:
    """Scores so large that rounding Q, K or themselves decides about the weights."""
    size = abs(figures.score.value) if figures.score else 0.0
    if is_coarse(size, precision):
        step = step_at(size, precision)
        what = (
            f"the largest score is {size:,.0f}, where {precision.upper()} has steps of {step:,.0f}: rounding "
        )
        about: dict[str, Any] = {"numbers": {"largest": size, "step": step}}
        about["advice"] = (_SMALLER_SCORES,) if precision == "fp32" else (_EXACT_SCORES, _SMALLER_SCORES)
        about["what"] = what + "decides which keys a query attends to"
        yield RangeFinding(status=NEAR, kind=RangeKind.SCORE_STEPS, **about)


def _about_sentinel(figures: Figures, precision: str) -> Iterator[RangeFinding]:
    """Judge the number that hides keys, together with the scores it is added to."""
    if figures.sentinel is None:
        return
    low, high = figures.all_scores or (0.0, 0.0)
    size, reach, status, kind = -figures.sentinel, max(-low, high), OVERFLOWS, RangeKind.SENTINEL_INFINITE
    what = f"the mask's {figures.sentinel:,.6g}"
    is_, adds = ("is", "add") if precision == "fp16" else ("would be", "would add")
    row = f"a fully masked query then gives NaN (the golden cases have {figures.fully_masked:,} of them)"
    if size >= _ROUNDS_TO_INFINITY:
        what += f" {is_} -inf in FP16: {row}"
    elif size + reach >= _ROUNDS_TO_INFINITY:
        kind = RangeKind.SENTINEL_ADDS_UP
        what += f" and a score of {-reach:,.1f} {adds} up to -inf in FP16: {row}"
    elif size + NEAR_BELOW * reach >= _ROUNDS_TO_INFINITY:
        status, kind = NEAR, RangeKind.SENTINEL_NEAR
        what += f" leaves FP16 room for scores down to {size - _ROUNDS_TO_INFINITY:,.0f} only: {row}"
    elif size < high - low + _FADED:
        status, kind = NEAR, RangeKind.SENTINEL_TOO_SMALL
        what += f", if it is to hide keys, is too small for scores from {low:,.1f} to {high:,.1f}"
    else:
        return
    numbers = {"sentinel": figures.sentinel, "lowest_score": low, "highest_score": high}
    yield RangeFinding(status=status, kind=kind, numbers=numbers, what=what, advice=(_SENTINEL,))
