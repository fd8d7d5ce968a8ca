"""How near FP16's limit an attention comes, on golden data and before anything overflows.

The answer is a warning and no verdict: many kernels hold these numbers in FP32, and a wrong result shows in
parity. It speaks of FP16 whatever the precision of the bundle is. See `fp16_figures` for what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mha_deploy.backends import available_cpu_backend, open_runner
from mha_deploy.bundle import Bundle, GoldenEntry
from mha_deploy.errors import DeployError, nearest
from mha_deploy.golden import read_case
from mha_deploy.graph.attention_node import AttentionNode
from mha_deploy.graph.file import load_graph
from mha_deploy.graph.probe import attention_probe
from mha_deploy.model_spec import ModelSpec
from mha_deploy.precision import Precision
from mha_deploy.validate.fp16_figures import Figures, Meter

OK, NEAR, OVERFLOWS = STATUSES = ("ok", "near", "overflows")

FP16_MAX = 65504.0
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
    """The range of one attention.

    Args:
        node: Name of the node.
        figures: The numbers.
        max_keys: The most keys that the spec allows: the largest sum that its softmax can have.
        headroom: FP16's limit over the largest of the numbers; 0 where one is not finite already. The number
            that hides keys is judged by itself: it is meant to be large.
        findings: What is worth saying; those of status `ok` are remarks.
    """

    node: str
    figures: Figures
    max_keys: int
    headroom: float
    findings: tuple[Finding, ...]

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
        product, score, sums = self.figures.product, self.figures.score, self.figures.sums
        return {
            "node": self.node,
            "status": self.status,
            "largest_score_raw": abs(product.value) if product else None,
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


def fp16_range(
    bundle: Bundle,
    *,
    cases: Sequence[str] | None = None,
    on_case: Callable[[str], None] = lambda name: None,
) -> RangeReport:
    """Measure every attention of a bundle on golden data, with projections summed in float32.

    Args:
        bundle: The bundle.
        cases: Names of the golden cases to run; all of them unless given.
        on_case: Called with the name of each case before it runs.
    """
    manifest = bundle.manifest
    entries = _chosen(manifest.golden, cases)
    probe = attention_probe(load_graph(bundle.model_path))
    meters = [Meter(attention) for attention in probe.attentions]
    with open_runner(available_cpu_backend(manifest.precision), probe.model) as runner:
        for entry in entries:
            on_case(entry.name)
            arrays = runner.run(read_case(bundle, entry).inputs)
            for meter in meters:
                meter.see(entry.name, arrays)
    return RangeReport(
        model=manifest.spec.name,
        precision=manifest.precision.name,
        backend=runner.name,
        cases=tuple(entry.name for entry in entries),
        nodes=tuple(_node_range(meter, manifest.spec, manifest.precision) for meter in meters),
    )


def _chosen(golden: Sequence[GoldenEntry], names: Sequence[str] | None) -> list[GoldenEntry]:
    by_name = {entry.name: entry for entry in golden}
    wanted = list(by_name) if names is None else list(dict.fromkeys(names))
    unknown = [name for name in wanted if name not in by_name]
    if unknown or not wanted:
        got = ", ".join(unknown) or "no names"
        raise DeployError("The bundle has no such golden case.", got=got, hint=nearest(got, by_name))
    return [by_name[name] for name in wanted]


def _node_range(meter: Meter, spec: ModelSpec, precision: Precision) -> NodeRange:
    figures = meter.figures()
    max_keys = _max_keys(meter.facts, figures, spec)
    return NodeRange(
        node=meter.facts.name,
        figures=figures,
        max_keys=max_keys,
        headroom=_headroom(figures),
        findings=tuple(_findings(figures, max_keys, precision.name)),
    )


def _max_keys(facts: AttentionNode, figures: Figures, spec: ModelSpec) -> int:
    """The longest past and the most new keys; no more than a window, which is a mask in the graph."""
    lengths = (facts.T, facts.past_length) if facts.has_past else (facts.T,)
    most = [spec.axes[dim].max for dim in lengths if isinstance(dim, str) and dim in spec.axes]
    most += [dim for dim in lengths if isinstance(dim, int)]
    measured = max((each.keys for each in figures.sums), default=1)
    keys = sum(most) if len(most) == len(lengths) else measured
    return keys if spec.window is None or facts.mask == "none" else min(keys, spec.window)


# -- judging -----------------------------------------------------------------------------------


def _headroom(figures: Figures) -> float:
    if figures.not_finite:
        return 0.0
    peaks = [abs(peak.value) for peak in (figures.product, figures.score, figures.logit) if peak]
    largest = max(*figures.tensors.values(), *peaks, *(each.largest for each in figures.sums))
    return FP16_MAX / largest if largest else math.inf


def _status_of(size: float) -> str:
    if size > FP16_MAX:
        return OVERFLOWS
    return NEAR if size * NEAR_BELOW > FP16_MAX else OK


def _findings(figures: Figures, max_keys: int, precision: str) -> Iterator[Finding]:
    bf16 = _BF16[precision]
    for line in figures.not_finite:
        yield Finding(status=OVERFLOWS, what=f"{line} are NaN or infinite", advice=(bf16,))
    for name, size in figures.tensors.items():
        yield from _if_large(f"the largest |{name}|", size, precision, (bf16,))
    if figures.product:
        size = abs(figures.product.value)
        advice = (*_folding(size, abs(figures.scale)), _FP32_ISLAND, bf16)
        yield from _if_large("the largest Q·Kᵀ before the scale", size, precision, advice)
    if figures.score and figures.logit:
        size = max(abs(figures.score.value), abs(figures.logit.value))
        yield from _if_large("the largest score", size, precision, (_FP32_ISLAND, bf16))
    yield from _about_exp(figures.exponent)
    yield from _about_sums(figures, max_keys)
    yield from _about_sentinel(figures)


def _if_large(what: str, size: float, precision: str, advice: tuple[str, ...]) -> Iterator[Finding]:
    status = _status_of(size)
    if status == OK:
        return
    does = {OVERFLOWS: ("overflows", "would overflow in"), NEAR: ("is near the limit of",) * 2}
    verb = does[status][precision != "fp16"]
    yield Finding(status=status, what=f"{what} is {size:,.0f}, which {verb} FP16", advice=advice)


def _folding(product: float, scale: float) -> tuple[str, ...]:
    """Fold the scale where that alone makes the product smaller by enough to matter."""
    if STATUSES.index(_status_of(product * scale)) >= STATUSES.index(_status_of(product)):
        return ()
    return (
        "fold the scale into the query projection (graph/lower/fold_scale.py): "
        f"the product is then at most {product * scale:,.0f}",
    )


def _about_exp(exponent: float | None) -> Iterator[Finding]:
    if exponent is not None and exponent > _LARGEST_EXPONENT:
        what = f"exp({exponent:.1f}) overflows FP16 in a kernel that does not subtract the maximum first"
        yield Finding(status=OK, what=what)


def _about_sums(figures: Figures, max_keys: int) -> Iterator[Finding]:
    measured = max((each.largest for each in figures.sums), default=0.0)
    if max(max_keys, measured) <= _LAST_COUNT:
        return
    status = OK if max_keys <= FP16_MAX else NEAR
    overflow = "" if max_keys <= FP16_MAX else f" and overflows above {FP16_MAX:,.0f}"
    what = (
        f"the softmax sums up to {max_keys:,} keys (measured: {measured:,.1f}); "
        f"a sum of ones in FP16 stops at {_LAST_COUNT:,}{overflow}"
    )
    yield Finding(status=_worse(status, _status_of(measured)), what=what, advice=(_SUM_IN_FP32,))


def _worse(one: str, other: str) -> str:
    return max(one, other, key=STATUSES.index)


def _about_sentinel(figures: Figures) -> Iterator[Finding]:
    """Judge the number that hides keys, together with the scores it is added to."""
    if figures.sentinel is None:
        return
    low, high = figures.all_scores or (0.0, 0.0)
    size, reach = -figures.sentinel, max(-low, high)
    name = f"the mask's {figures.sentinel:,.6g}"
    row = f"a query that sees no key then gives NaN ({figures.closed_rows:,} such rows in the golden cases)"
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
