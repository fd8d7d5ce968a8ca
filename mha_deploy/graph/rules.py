"""Eligibility: what each target accepts and fuses, by the rules of `rules.toml`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir

from mha_deploy.errors import DeployError, nearest
from mha_deploy.graph.attention_node import AttentionNode, is_attention
from mha_deploy.graph.ir import Dim, input_at, is_op, node_name, same_size
from mha_deploy.graph.lower.cache import entries_name, read_cache
from mha_deploy.graph.lower.operators import is_list_of_places, obstacle_to_update_in_place
from mha_deploy.graph.lower.to_trt import LEAST_HEADS
from mha_deploy.graph.quantize import read_fp8_gemm
from mha_deploy.model.spec import Axis

# -- Targets, rules and findings -------------------------------------------------------------------

TENSORRT = "tensorrt"
TENSORRT_RTX = "tensorrt-rtx"

REFUSED = "refused"
NOT_FUSED = "not-fused"
WRONG_ANSWER = "wrong-answer"
NOTE = "note"
SEVERITIES = (REFUSED, WRONG_ANSWER, NOT_FUSED, NOTE)

Version = tuple[int, ...]

_CAPABILITIES = (
    *("5.0", "5.2", "5.3", "6.0", "6.1", "6.2", "7.0", "7.2", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0"),
    *("10.0", "10.1", "10.3", "11.0", "12.0", "12.1"),
)
LEAST_FP8 = (8, 9)
"""The least compute capability with arithmetic in FP8."""

# The newest minor version of each major one, when these rules were measured.
_RELEASES = {TENSORRT: {8: 6, 9: 3, 10: 16, 11: 4}, TENSORRT_RTX: {1: 7}}


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the engine is built for."""

    backend: str  # `tensorrt` or `tensorrt-rtx`
    version: Version | None = None  # its version; None for the newest
    compute_capability: tuple[int, int] | None = None  # that of the GPU; None where it is not known
    # The axes of each optimization profile; none where they are not known
    profiles: Sequence[Mapping[str, Axis]] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.backend not in _RELEASES:
            raise DeployError("No such target.", got=self.backend, hint=nearest(self.backend, _RELEASES))

    def is_among(self, versions: str) -> bool:
        """Whether it is among versions such as `tensorrt >= 10.14 < 11`."""
        backend, *words = versions.split()
        limits = dict(zip(words[::2], (_numbers("version", word) for word in words[1::2]), strict=True))
        if backend != self.backend or self.version is None:
            return backend == self.backend and "<" not in limits
        return limits.get(">=", (0,)) <= self.version < limits.get("<", (math.inf,))

    def sizes(self, size: Dim) -> list[tuple[int, int]]:
        """The least and the largest that a size may be, in each profile; nothing where it is not known."""
        if isinstance(size, int):
            return [(size, size)]
        return [(p[size].min, p[size].max) for p in self.profiles if size is not None and size in p]

    def is_below(self, major: int, minor: int) -> bool:
        """Whether the GPU is known to have a lower compute capability."""
        return self.compute_capability is not None and self.compute_capability < (major, minor)

    def __str__(self) -> str:
        version = "" if self.version is None else " " + ".".join(map(str, self.version))
        gpu = self.compute_capability
        return f"{self.backend}{version}" + (f" on compute capability {gpu[0]}.{gpu[1]}" if gpu else "")


def target_from(backend: str, version: str | None = None, compute_capability: str | None = None) -> Target:
    """Read a target as it is written on a command line: `tensorrt`, `10.14.1`, `8.9`."""
    capability = None if compute_capability is None else _numbers("compute capability", compute_capability)
    if capability is not None and len(capability) != 2:
        raise DeployError("A compute capability has two numbers.", got=compute_capability, hint="such as 8.9")
    return Target(
        backend=backend,
        version=None if version is None else _numbers("version", version),
        compute_capability=None if capability is None else (capability[0], capability[1]),
    )


def requested_target(
    backend: str, version: str | None = None, compute_capability: str | None = None
) -> Target:
    """A target that a user named, which must exist; what is installed may be newer than the rules."""
    target = target_from(backend, version, compute_capability)
    newest = _RELEASES[backend].get(target.version[0]) if target.version else 0
    if newest is None or (target.version is not None and target.version[1:2] > (newest,)):
        known = ", ".join(f"{major}.0 to {major}.{minor}" for major, minor in _RELEASES[backend].items())
        raise DeployError(f"No such version of {backend} is known.", got=version, hint=known)
    if compute_capability is not None and compute_capability not in _CAPABILITIES:
        what, known = "No GPU has that compute capability.", ", ".join(_CAPABILITIES)
        raise DeployError(what, got=compute_capability, hint=known)
    return target


def _numbers(what: str, text: str) -> Version:
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4}){0,3}", text):
        raise DeployError(f"The {what} is not made of numbers.", got=text, hint="such as 10.14")
    return tuple(int(part) for part in text.split("."))


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that a target does not accept, does not fuse, or computes wrongly; see `rules.toml`."""

    severity: str
    targets: tuple[str, ...]
    remedy: str
    source: str
    message: str
    can_decompose: bool = False
    cured_by: str | None = None
    needs: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()

    def covers(self, target: Target) -> bool:
        """Whether the target is among the versions."""
        return any(map(target.is_among, self.targets))


@dataclass(frozen=True, kw_only=True)
class RuleFinding:
    """A rule that applies to a node."""

    node: str
    rule: str
    severity: str
    message: str
    remedy: str
    source: str
    cured_by: str | None
    needs: tuple[str, ...]

    def __lt__(self, other: RuleFinding) -> bool:
        """The worse one comes first."""
        return SEVERITIES.index(self.severity) < SEVERITIES.index(other.severity)


RULES: dict[str, Rule] = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, Rule]
)
"""All rules, in the order in which they are reported within one severity."""


def remedies_of(rule: str, own: str, *, is_decomposed: bool = False) -> str:
    """What can be done, `own` first; decomposing is none where it `is_decomposed` already."""
    decompose = RULES[rule].can_decompose and not is_decomposed
    others = ["build with --allow-decomposed: slower, not fused"] if decompose else []
    return ", or ".join(filter(None, [own, *others]))


def _worst_first(node: str, applying: Iterable[str], fields: Mapping[str, Any]) -> list[RuleFinding]:
    """The findings about a node, which has these fields, from the names of the rules that apply to it."""
    copied = ("severity", "source", "cured_by", "needs")
    found = list[RuleFinding]()
    for name in applying:
        same = {each: getattr(RULES[name], each) for each in copied}
        message = RULES[name].message.format(**fields)
        remedy = remedies_of(name, RULES[name].remedy)
        found.append(RuleFinding(node=node, rule=name, message=message, remedy=remedy, **same))
    return sorted(found)


def group_findings(findings: Iterable[RuleFinding]) -> dict[RuleFinding, list[str]]:
    """Findings that differ only in the node, the worst first, with the nodes; each node counts once."""
    groups: dict[RuleFinding, list[str]] = {}
    for finding in sorted(findings):
        nodes = groups.setdefault(replace(finding, node=""), [])
        nodes += [] if finding.node in nodes else [finding.node]
    return groups


# -- The operators around attention ----------------------------------------------------------------


def _sums_integers(node: ir.Node) -> bool:
    dtype = None if node.inputs[0] is None else node.inputs[0].dtype
    return dtype is not None and not dtype.is_floating_point()


def _outputs_entries(node: ir.Node) -> bool:
    """Whether the primitives lowering outputs only the new entries of this cache."""
    return any(read_cache(use.node) for use in node.outputs[0].uses() if is_attention(use.node))


_OPERATORS: dict[str, Callable[[ir.Node, Target], bool]] = {
    "no-decode-operator-primitives": lambda node, target: True,
    "no-decode-operator": lambda node, target: True,
    "no-operator": lambda node, target: True,
    "no-operator-rtx": lambda node, target: not is_op(node, "NonZero") or is_list_of_places(node),
    "fp8-gemm": lambda node, target: read_fp8_gemm(node) is not None,
    "fp8-gemm-gpu": lambda node, target: target.is_below(*LEAST_FP8) and read_fp8_gemm(node) is not None,
    "integer-cumsum": lambda node, target: _sums_integers(node),
    "cache-update": lambda node, target: obstacle_to_update_in_place(node) is not None,
    "cache-in-place": lambda node, target: obstacle_to_update_in_place(node) is None,
    "cache-entries": lambda node, target: _outputs_entries(node),
}
"""Whether a rule about operators applies to a node that is one of them."""


def _describe_operator(node: ir.Node) -> dict[str, object]:
    """What the message of a rule about operators may name."""
    cache, result = input_at(node, 0), str(node.outputs[0].name)
    missing = obstacle_to_update_in_place(node) if is_op(node, "TensorScatter") else None
    names = {"cache": "" if cache is None else cache.name, "result": result, "entries": entries_name(result)}
    return {"op_type": node.op_type, **names, "missing": missing and f"{missing[0]} ({missing[1]})"}


def check_operators(model: ir.Model, target: Target) -> list[RuleFinding]:
    """The findings about the operators around attention, the worst first for each node."""
    covering = {name: applies for name, applies in _OPERATORS.items() if RULES[name].covers(target)}
    found: list[RuleFinding] = []
    for node in model.graph.all_nodes():
        about = [name for name in covering if is_op(node, *RULES[name].operators)]
        applying = [name for name in about if covering[name](node, target)]
        found += _worst_first(node_name(node), applying, _describe_operator(node) if applying else {})
    return found


def operator_options(findings: Sequence[RuleFinding]) -> dict[str, bool]:
    """The options of the lowering that cure these findings."""
    return {name: True for finding in findings for name in finding.needs}


# -- Which attention a rule applies to -------------------------------------------------------------


def is_rtx_gpu(compute_capability: tuple[int, int]) -> bool:
    """Whether TensorRT-RTX has kernels for this GPU: not for 9.0 and 10.0, the data center parts."""
    return compute_capability in {(7, 5), (8, 0), (8, 6), (8, 9)} or compute_capability[0] == 12


def _v_head_size_differs(node: AttentionNode, target: Target) -> bool:
    return isinstance(node.D, int) and isinstance(node.Dv, int) and node.Dv != node.D


def _causal_is_not_square(node: AttentionNode, target: Target) -> bool:
    alone = not node.has_past and not node.has_nonpad_kv_seqlen
    return node.is_causal and alone and not same_size(node.S, node.T)


def _one_query(node: AttentionNode) -> bool:
    """A single query has a kernel of its own, with wider limits."""
    return node.S == 1 and isinstance(node.D, int) and 8 <= node.D <= 256 and node.D % 8 == 0


def _few_heads(node: AttentionNode, target: Target) -> bool:
    """Whether a profile may have fewer heads over all batch elements than the kernel of one query takes."""
    if node.S != 1 or node.quantized is not None or not isinstance(node.Hq, int):
        return False
    return min((least for least, _ in target.sizes(node.B)), default=1) * node.Hq < LEAST_HEADS


def _head_size_unaligned(node: AttentionNode, target: Target) -> bool:
    return isinstance(node.D, int) and 16 <= node.D <= 256 and node.D % 8 != 0


def _mask_is_computed(node: AttentionNode, target: Target) -> bool:
    # A single new token attends to every earlier key: the lowering writes no mask.
    one_token = node.S == node.T == 1 and not node.has_nonpad_kv_seqlen
    causal = node.is_causal and not one_token
    written = causal or node.mask == "bool" or node.has_nonpad_kv_seqlen or node.has_window
    return written or node.computes_mask


_LEAST_QUERIES_FP8 = 32
_MOST_KEYS_INT8 = 512
_HEAD_SIZES_INT8 = (16, 32, 64)


def _in_fp8(node: AttentionNode) -> bool:
    return node.quantized == "fp8" and node.quantizes_weights


def _in_int8(node: AttentionNode) -> bool:
    return node.quantized == "int8" and node.quantizes_weights


def _few_queries(node: AttentionNode, target: Target) -> bool:
    """Whether a profile has fewer queries than the FP8 kernel takes, but not exactly one."""
    return any(least < _LEAST_QUERIES_FP8 and not least == most == 1 for least, most in target.sizes(node.S))


def _beyond_int8(node: AttentionNode, target: Target) -> bool:
    if isinstance(node.D, int) and node.D not in _HEAD_SIZES_INT8:
        return True
    return any(
        most > _MOST_KEYS_INT8 or most == 1 for size in (node.S, node.T) for _, most in target.sizes(size)
    )


_ATTENTIONS: dict[str, Callable[[AttentionNode, Target], bool]] = {
    "no-attention-operator": lambda node, target: True,
    "past": lambda node, target: node.has_past,
    "present": lambda node, target: node.has_present,
    "qk-output": lambda node, target: node.shows_scores,
    "softcap": lambda node, target: node.softcap != 0,
    "softmax-precision": lambda node, target: node.softmax_precision is not None,
    "v-head-size": _v_head_size_differs,
    "heads-unknown": lambda node, target: node.rank == 3 and (node.Hq is None or node.Hkv is None),
    "heads-of-an-axis": lambda node, target: node.has_dynamic_heads,
    "mask-and-causal": lambda node, target: node.mask != "none" and node.is_causal,
    "mask-dtype": lambda node, target: (
        node.mask in ("float", "int") and node.dtype is not None and node.mask_dtype != node.dtype
    ),
    "short-mask": lambda node, target: node.mask_may_be_short,
    "nonpad-kv-seqlen": lambda node, target: node.has_nonpad_kv_seqlen,
    "window": lambda node, target: node.has_window,
    "bool-mask": lambda node, target: node.mask == "bool",
    "fully-masked-query": lambda node, target: node.mask != "none",
    "causal-upper-left": _causal_is_not_square,
    "causal-alignment-unknown": _causal_is_not_square,
    "fp32-of-upcasts": lambda node, target: node.upcasts > 0,
    "fp64": lambda node, target: "fp64" in (node.dtype, node.softmax_precision),
    "bf16-version": lambda node, target: node.dtype == "bf16",
    "rtx-gpu": lambda node, target: (
        target.compute_capability is not None and not is_rtx_gpu(target.compute_capability)
    ),
    "bf16-gpu": lambda node, target: node.dtype == "bf16" and target.is_below(8, 0),
    "qk-output-unfused": lambda node, target: node.shows_scores,
    "softcap-unfused": lambda node, target: node.softcap != 0,
    "v-head-size-unfused": _v_head_size_differs,
    "head-size-range": lambda node, target: (
        isinstance(node.D, int) and not 16 <= node.D <= 256 and not _one_query(node)
    ),
    "head-size-multiple": _head_size_unaligned,
    "head-size-padded": _head_size_unaligned,
    "few-heads": _few_heads,
    "fp32": lambda node, target: node.dtype == "fp32" and not _one_query(node),
    "type-or-head-size-unknown": lambda node, target: (
        node.dtype is None or (not isinstance(node.D, int) and not node.has_dynamic_heads)
    ),
    "computed-mask": _mask_is_computed,
    "grouped-heads": lambda node, target: node.kind in ("GQA", "MQA"),
    "compute-capability": lambda node, target: target.is_below(7, 5),
    "fp8-version": lambda node, target: node.quantized == "fp8",
    "fp8-gpu": lambda node, target: node.quantized == "fp8" and target.is_below(*LEAST_FP8),
    "fp8-operator": lambda node, target: _in_fp8(node),
    "fp8-few-queries": lambda node, target: _in_fp8(node) and _few_queries(node, target),
    "fp8-head-size": lambda node, target: _in_fp8(node) and isinstance(node.D, int) and node.D > 256,
    "int8-limits": lambda node, target: _in_int8(node) and _beyond_int8(node, target),
    "int8-output": lambda node, target: _in_int8(node) and not node.quantizes_output,
    "weights-unquantized": lambda node, target: node.quantized is not None and not node.quantizes_weights,
}


# -- The answer for each node ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Eligibility:
    """Whether one node is accepted and fused: as it is, and once lowered."""

    node: AttentionNode
    target: Target
    findings: tuple[RuleFinding, ...]
    supported: bool  # whether the node builds as it is, and computes what ONNX specifies
    fused: bool  # whether the node as it is can become one fused kernel
    supported_after_lowering: bool  # whether the node builds and is correct once lowered
    fused_after_lowering: bool  # whether the node can become one fused kernel once lowered

    def __repr__(self) -> str:
        names = ("supported", "fused", "supported_after_lowering", "fused_after_lowering")
        answers = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        return f"<Eligibility {self.node.name} in {self.target.backend}: {answers}>"

    @property
    def options(self) -> dict[str, bool]:
        """The options of the lowering that cure these findings."""
        return operator_options(self.findings)


def judge(
    nodes: Sequence[AttentionNode], target: Target, around: Sequence[RuleFinding] = ()
) -> list[Eligibility]:
    """The answer for each node; `around` are findings about operators, which every node shares."""
    covering = {name: applies for name, applies in _ATTENTIONS.items() if RULES[name].covers(target)}
    answers = []
    for node in nodes:
        applying = [name for name, applies in covering.items() if applies(node, target)]
        found = [*around, *_worst_first(node.name, applying, node.describe() if applying else {})]
        severities = {finding.severity for finding in found}
        not_cured = {finding.severity for finding in found if finding.cured_by is None}
        answer = Eligibility(
            node=node,
            target=target,
            findings=tuple(found),
            supported=severities <= {NOT_FUSED, NOTE},
            fused=severities <= {NOTE},
            supported_after_lowering=not_cured <= {NOT_FUSED, NOTE},
            fused_after_lowering=not_cured <= {NOTE},
        )
        answers.append(answer)
    return answers
