"""Eligibility: what each target accepts and fuses, as rules with their source and version range."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from mha_deploy.errors import DeployError, nearest
from mha_deploy.graph.attention_node import AttentionNode, is_attention
from mha_deploy.graph.ir import is_op, node_name, same_size
from mha_deploy.graph.lower.cache import CachedAttention, read_cache, rows_name
from mha_deploy.graph.lower.operators import RMS_NORM, ROTARY, SCATTER, obstacle_to_update_in_place

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
# The newest minor version of each major one, when these rules were measured.
_RELEASES = {TENSORRT: {8: 6, 9: 3, 10: 16, 11: 4}, TENSORRT_RTX: {1: 7}}


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the engine is built for.

    Args:
        product: `tensorrt` or `tensorrt-rtx`.
        version: Its version; None for the newest.
        compute_capability: That of the GPU, such as (8, 9); None where it is not known.
    """

    product: str
    version: Version | None = None
    compute_capability: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        known = (TENSORRT, TENSORRT_RTX)
        if self.product not in known:
            raise DeployError("No such target.", got=self.product, hint=nearest(self.product, known))

    def is_below(self, major: int, minor: int) -> bool:
        """Whether the GPU is known to have a lower compute capability."""
        return self.compute_capability is not None and self.compute_capability < (major, minor)

    def __str__(self) -> str:
        version = "" if self.version is None else " " + ".".join(map(str, self.version))
        gpu = self.compute_capability
        return f"{self.product}{version}" + (
            "" if gpu is None else f" on compute capability {gpu[0]}.{gpu[1]}"
        )


def target_from(product: str, version: str | None = None, compute_capability: str | None = None) -> Target:
    """Read a target as it is written on a command line: `tensorrt`, `10.14.1`, `8.9`."""
    capability = None if compute_capability is None else _numbers("compute capability", compute_capability)
    if capability is not None and len(capability) != 2:
        raise DeployError("A compute capability has two numbers.", got=compute_capability, hint="such as 8.9")
    return Target(
        product=product,
        version=None if version is None else _numbers("version", version),
        compute_capability=None if capability is None else (capability[0], capability[1]),
    )


def requested_target(
    product: str, version: str | None = None, compute_capability: str | None = None
) -> Target:
    """A target that a user named, which must exist; what is installed may be newer than the rules.

    Raises:
        DeployError: There is no such version or GPU.
    """
    target = target_from(product, version, compute_capability)
    newest = _RELEASES[product].get(target.version[0]) if target.version else 0
    if newest is None or (target.version is not None and target.version[1:2] > (newest,)):
        known = ", ".join(f"{major}.0 to {major}.{minor}" for major, minor in _RELEASES[product].items())
        raise DeployError(f"No such version of {product} is known.", got=version, hint=known)
    if compute_capability is not None and compute_capability not in _CAPABILITIES:
        raise DeployError(
            "No GPU has that compute capability.", got=compute_capability, hint=", ".join(_CAPABILITIES)
        )
    return target


def _numbers(what: str, text: str) -> Version:
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4}){0,3}", text):
        raise DeployError(f"The {what} is not made of numbers.", got=text, hint="such as 10.14")
    return tuple(int(part) for part in text.split("."))


@dataclass(frozen=True, kw_only=True)
class Versions:
    """A version range of one product: from `since`, to just before `before`."""

    product: str
    since: Version = (0,)
    before: Version | None = None

    def covers(self, target: Target) -> bool:
        """Whether the target is among them; a target without a version is the newest."""
        if target.product != self.product:
            return False
        if target.version is None:
            return self.before is None
        return target.version >= self.since and (self.before is None or target.version < self.before)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that applies to a node."""

    node: str
    rule: str
    severity: str
    message: str
    remedy: str
    source: str
    cured_by: str | None
    needs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class BaseRule:
    """One thing that a target does not accept, does not fuse, or computes wrongly.

    Args:
        id: Short name.
        severity: `refused`, `wrong-answer` (accepted, but computes something else), `not-fused`, `note`.
        holds: The versions it applies to.
        remedy: What to change.
        source: Where it was measured or documented.
        cured_by: The lowering after which it no longer applies.
        needs: Options of that lowering that have to be set for it.
    """

    id: str
    severity: str
    holds: tuple[Versions, ...]
    remedy: str
    source: str
    cured_by: str | None = None
    needs: tuple[str, ...] = ()

    def covers(self, target: Target) -> bool:
        """Whether the target is among the versions."""
        return any(versions.covers(target) for versions in self.holds)

    def finding(self, node: str, message: str) -> Finding:
        """The finding for a node."""
        return Finding(
            node=node,
            rule=self.id,
            severity=self.severity,
            message=message,
            remedy=self.remedy,
            source=self.source,
            cured_by=self.cured_by,
            needs=self.needs,
        )


@dataclass(frozen=True, kw_only=True)
class Rule(BaseRule):
    """A rule about attention; the message may name fields of `AttentionNode` in braces."""

    applies: Callable[[AttentionNode, Target], bool]
    message: str


@dataclass(frozen=True, kw_only=True)
class OperatorRule(BaseRule):
    """A rule about other operators; `applies` returns the message, or None where it does not apply."""

    operators: frozenset[str]
    applies: Callable[[ir.Node], str | None]


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """The findings in the order of their severity."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


@dataclass(frozen=True, kw_only=True)
class FindingGroup:
    """One finding about several nodes, such as the layers of a model.

    Args:
        finding: The finding, with the message of the first node.
        nodes: All nodes it applies to, each once, in order.
    """

    finding: Finding
    nodes: tuple[str, ...]

    @property
    def label(self) -> str:
        """The name of the first node, and how many more there are."""
        others = len(self.nodes) - 1
        return self.nodes[0] if not others else f"{self.nodes[0]} and {others} more"


def group_findings(findings: Iterable[Finding]) -> list[FindingGroup]:
    """Merge findings that differ only in the node, the worst first; those of several targets count once."""
    groups: dict[Finding, dict[str, Finding]] = {}
    for finding in findings:
        groups.setdefault(replace(finding, node=""), {}).setdefault(finding.node, finding)
    made = [FindingGroup(finding=next(iter(same.values())), nodes=tuple(same)) for same in groups.values()]
    return sorted(made, key=lambda group: SEVERITIES.index(group.finding.severity))


def v_head_size_differs(node: AttentionNode, target: Target) -> bool:
    """Whether V is known to have another head size than K."""
    return isinstance(node.D, int) and isinstance(node.Dv, int) and node.Dv != node.D


def is_rtx_gpu(compute_capability: tuple[int, int]) -> bool:
    """Whether TensorRT-RTX has kernels for this GPU: not for 9.0 and 10.0, the data centre parts."""
    return compute_capability in {(7, 5), (8, 0), (8, 6), (8, 9)} or compute_capability[0] == 12


RTX = Versions(product=TENSORRT_RTX)
EVERY_TENSORRT = Versions(product=TENSORRT)
BEFORE_10 = Versions(product=TENSORRT, before=(10,))
BEFORE_ATTENTION = Versions(product=TENSORRT, before=(10, 14))
SINCE_ATTENTION = Versions(product=TENSORRT, since=(10, 14))
FLAG_CAUSAL = Versions(product=TENSORRT, since=(10, 14), before=(11,))

WITH_ATTENTION = (SINCE_ATTENTION, RTX)
"""Where the parser has the Attention operator."""

EVERYWHERE = (EVERY_TENSORRT, RTX)

MEASURED_RTX = "measured on TensorRT-RTX 1.7.1"


# -- The operators around attention ----------------------------------------------------------------

_WITHOUT_OPERATORS = Versions(product=TENSORRT, since=(10, 14), before=(10, 15))
_WITH_OPERATORS = (Versions(product=TENSORRT, since=(10, 15)), RTX)

_CHANGELOG = "TensorRT OSS CHANGELOG, 10.15"
_OPERATORS_OF_86 = "onnx-tensorrt 8.6-GA, docs/operators.md"
_LATE = frozenset({ROTARY, SCATTER, RMS_NORM})
_SCATTER = frozenset({SCATTER})


# Operators of opset 17 that are not in the list of operators of the 8.6 parser.
_NOT_IN_86 = frozenset(
    (
        *("Bernoulli", "BitShift", "BlackmanWindow", "Compress", "ConcatFromSequence", "ConvInteger"),
        *("DFT", "Det", "DynamicQuantizeLinear", "HammingWindow", "HannWindow", "Hardmax"),
        *("MatMulInteger", "MaxRoiPool", "MaxUnpool", "MelWeightMatrix", "Multinomial", "QLinearConv"),
        *("QLinearMatMul", "STFT", "SequenceAt", "SequenceConstruct", "SequenceInsert"),
        *("SplitToSequence", "Unique"),
    )
)


def check_operators(model: ir.Model, target: Target) -> list[Finding]:
    """The findings about the operators around attention, the worst first for each node."""
    rules = [rule for rule in OPERATOR_RULES if rule.covers(target)]
    found: list[Finding] = []
    for node in model.graph.all_nodes():
        messages = [(rule, rule.applies(node)) for rule in rules if is_op(node, *rule.operators)]
        found += worst_first(rule.finding(node_name(node), text) for rule, text in messages if text)
    return found


def operator_options(findings: Sequence[Finding]) -> dict[str, bool]:
    """The options of the lowering that cure these findings."""
    return {name: True for finding in findings for name in finding.needs}


def _missing(node: ir.Node) -> str:
    return f"The parser has no {node.op_type} before TensorRT 10.15."


def _sums_integers(node: ir.Node) -> str | None:
    x = node.inputs[0]
    if x is None or x.dtype is None or x.dtype.is_floating_point():
        return None
    return "CumSum becomes a loop, and its documentation lists no integers."


def _not_in_place(node: ir.Node) -> str | None:
    obstacle = obstacle_to_update_in_place(node)
    return None if obstacle is None else f"There is no {obstacle.feature} ({obstacle.got})."


def _in_place(node: ir.Node) -> str | None:
    if obstacle_to_update_in_place(node) is not None:
        return None
    cache = node.inputs[0]
    return f"The cache is updated in place: {cache.name if cache else ''} and {node.outputs[0].name} are one."


def _as_rows(node: ir.Node) -> str | None:
    """The message where the primitives lowering outputs only the new entries of this cache."""
    readers = [use.node for use in node.outputs[0].uses() if is_attention(use.node)]
    if not any(isinstance(read_cache(reader), CachedAttention) for reader in readers):
        return None
    name = str(node.outputs[0].name)
    return (
        f"The cache is read in place, and its new entries are the output: {rows_name(name)} replaces {name}."
    )


OPERATOR_RULES: tuple[OperatorRule, ...] = (
    OperatorRule(
        id="no-decode-operator-primitives",
        severity=REFUSED,
        operators=_LATE,
        holds=(BEFORE_ATTENTION,),
        applies=_missing,
        remedy="write it in primitive operators",
        cured_by="primitives lowering",
        source=_CHANGELOG,
    ),
    OperatorRule(
        id="no-decode-operator",
        severity=REFUSED,
        operators=_LATE,
        holds=(_WITHOUT_OPERATORS,),
        applies=_missing,
        remedy="write it in primitive operators",
        cured_by="trt lowering",
        needs=("decode_primitives",),
        source=_CHANGELOG,
    ),
    OperatorRule(
        id="no-operator",
        severity=REFUSED,
        operators=_NOT_IN_86,
        holds=(BEFORE_10,),
        applies=lambda node: f"The parser of TensorRT 8.6 has no {node.op_type}.",
        remedy="compute it before or after the engine, or write the model without it",
        source=_OPERATORS_OF_86,
    ),
    OperatorRule(
        id="integer-cumsum",
        severity=NOTE,
        operators=frozenset({"CumSum"}),
        holds=(BEFORE_10,),
        applies=_sums_integers,
        remedy="give the model its attention mask: Transformers looks for packed sequences only without one",
        source=_OPERATORS_OF_86,
    ),
    OperatorRule(
        id="cache-update",
        severity=REFUSED,
        operators=_SCATTER,
        holds=_WITH_OPERATORS,
        applies=_not_in_place,
        remedy="make the cache a graph input [B, H, T, D] of fixed T and an output, or use ScatterND",
        cured_by="trt lowering",
        needs=("decode_primitives",),
        source=f"{MEASURED_RTX}: messages of its parser and builder",
    ),
    OperatorRule(
        id="cache-in-place",
        severity=NOTE,
        operators=_SCATTER,
        holds=_WITH_OPERATORS,
        applies=_in_place,
        remedy="bind input and output to the same memory",
        source="TensorRT operator documentation, KVCacheUpdate",
    ),
    OperatorRule(
        id="cache-rows",
        severity=NOTE,
        operators=_SCATTER,
        holds=(BEFORE_ATTENTION,),
        applies=_as_rows,
        remedy="write the rows into the cache after each call, or lower with cache=copy",
        source="primitives lowering",
    ),
)
"""All rules, in the order in which they are reported within one severity."""


# -- What the parsers and builders refuse, or accept and compute wrongly ---------------------------

_MEASURED_PARSER = f"{MEASURED_RTX}; onnx-tensorrt docs/operators.md for 10.15 agrees"

_TRT = "trt lowering"


def _float_mask_of_other_type(node: AttentionNode, target: Target) -> bool:
    return node.mask in ("float", "int") and node.dtype is not None and node.mask_dtype != node.dtype


def _causal_is_not_square(node: AttentionNode, target: Target) -> bool:
    alone = not node.has_past and not node.has_nonpad_kv_seqlen
    return node.is_causal and alone and not same_size(node.S, node.T)


def _not_an_rtx_gpu(node: AttentionNode, target: Target) -> bool:
    gpu = target.compute_capability
    return gpu is not None and not is_rtx_gpu(gpu)


PARSER_RULES: tuple[Rule, ...] = (
    Rule(
        id="no-attention-operator",
        severity=REFUSED,
        holds=(BEFORE_ATTENTION,),
        applies=lambda node, target: True,
        message="The parser has no Attention operator before TensorRT 10.14, and 8.6 knows opsets up to 17.",
        remedy="lower to matmuls, which these versions recognise and fuse",
        cured_by="primitives lowering",
        source="TensorRT OSS CHANGELOG, 10.14",
    ),
    Rule(
        id="past",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.has_past,
        message="The parser refuses past_key and past_value; is_causal after a Concat would be misaligned.",
        remedy="join the past outside the operator, with an explicit mask for the causal offset",
        cured_by=_TRT,
        source=_MEASURED_PARSER,
    ),
    Rule(
        id="present",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.has_present,
        message="The parser takes Attention with one output only.",
        remedy="produce present_key and present_value outside the operator",
        cured_by=_TRT,
        source=f"{_MEASURED_PARSER}; NVIDIA/TensorRT issue 4738 for 10.16",
    ),
    Rule(
        id="qk-output",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.has_qk_output,
        message="The parser takes Attention with one output only: the weights are not available.",
        remedy="compute the weights beside the fused operator, or do without them",
        cured_by=_TRT,
        source=_MEASURED_PARSER,
    ),
    Rule(
        id="softcap",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.softcap != 0,
        message="The parser refuses softcap ({softcap}).",
        remedy="lower to matmuls, or use a plugin",
        cured_by=_TRT,
        needs=("decompose",),
        source=_MEASURED_PARSER,
    ),
    Rule(
        id="softmax-precision",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.softmax_precision is not None,
        message="The parser refuses softmax_precision ({softmax_precision}).",
        remedy="omit it: the fused kernel computes its softmax in one precision, whatever is requested",
        cured_by=_TRT,
        source=_MEASURED_PARSER,
    ),
    Rule(
        id="v-head-size",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=v_head_size_differs,
        message="Keys and values must have the same head size, and have {D} and {Dv}.",
        remedy="pad the smaller with zeros (exact), or lower to matmuls",
        cured_by=_TRT,
        needs=("pad_heads",),
        source=MEASURED_RTX,
    ),
    Rule(
        id="heads-unknown",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.rank == 3 and (node.Hq is None or node.Hkv is None),
        message="3-D inputs without q_num_heads and kv_num_heads.",
        remedy="set both attributes",
        source=MEASURED_RTX,
    ),
    Rule(
        id="mask-and-causal",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.mask != "none" and node.is_causal,
        message="The parser takes a mask or is_causal, not both.",
        remedy="merge the two into one mask",
        cured_by=_TRT,
        source=MEASURED_RTX,
    ),
    Rule(
        id="mask-dtype",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=_float_mask_of_other_type,
        message="The mask is {mask_dtype} and the queries are {dtype}; it must be bool or the same.",
        remedy="cast the mask",
        cured_by=_TRT,
        source=MEASURED_RTX,
    ),
    Rule(
        id="short-mask",
        severity=REFUSED,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.mask_may_be_short,
        message="The mask may end before the keys do: {mask_dims} for {T} keys.",
        remedy="pad the mask to the number of keys",
        cured_by=_TRT,
        source=MEASURED_RTX,
    ),
    Rule(
        id="nonpad-kv-seqlen",
        severity=WRONG_ANSWER,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.has_nonpad_kv_seqlen,
        message="The parser ignores nonpad_kv_seqlen: padded keys are attended to.",
        remedy="write the lengths as a mask",
        cured_by=_TRT,
        source=f"{MEASURED_RTX}: same kernel with and without; the 10.15 importer never reads the input",
    ),
    Rule(
        id="window",
        severity=WRONG_ANSWER,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.has_window,
        message="The parser ignores the window ({left_window}, {right_window}) without a message.",
        remedy="write the window as a mask",
        cured_by=_TRT,
        source=f"{MEASURED_RTX}: same kernel with and without",
    ),
    Rule(
        id="bool-mask",
        severity=NOTE,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.mask == "bool",
        message="A boolean mask costs about eight small kernels before the fused one.",
        remedy="make it additive, in the type of the queries",
        cured_by=_TRT,
        source=MEASURED_RTX,
    ),
    Rule(
        id="empty-rows",
        severity=NOTE,
        holds=WITH_ATTENTION,
        applies=lambda node, target: node.mask != "none",
        message="A fully masked query has output zero in ONNX; in TensorRT it is undefined.",
        remedy="zero such rows after the operator",
        cured_by=_TRT,
        source="ONNX Attention specification; TensorRT documents no value",
    ),
    Rule(
        id="causal-upper-left",
        severity=NOTE,
        holds=WITH_ATTENTION,
        applies=_causal_is_not_square,
        message="is_causal with S = {S} and T = {T}: query 0 attends to key 0 only, in ONNX and in TensorRT.",
        remedy="for decoding with a cache use past_key or nonpad_kv_seqlen, or an explicit mask",
        source=f"{MEASURED_RTX}: CausalMaskKind.UPPER_LEFT",
    ),
    Rule(
        id="causal-alignment-unknown",
        severity=NOTE,
        holds=(FLAG_CAUSAL,),
        applies=_causal_is_not_square,
        message="Before TensorRT 11 the corner that causal starts from is not stated (S = {S}, T = {T}).",
        remedy="write it as a mask",
        cured_by=_TRT,
        needs=("explicit_causal",),
        source="API of 10.14 and 10.16: IAttention.causal is a flag, CausalMaskKind came with 11.0",
    ),
    Rule(
        id="fp64",
        severity=REFUSED,
        holds=EVERYWHERE,
        applies=lambda node, target: "fp64" in (node.dtype, node.softmax_precision),
        message="There is no fp64.",
        remedy="export in fp16 or bf16",
        source="TensorRT data types",
    ),
    Rule(
        id="bf16-version",
        severity=REFUSED,
        holds=(BEFORE_10,),
        applies=lambda node, target: node.dtype == "bf16",
        message="There is no bf16 before TensorRT 10.",
        remedy="export in fp16",
        source="API of 8.6.1: no DataType.BF16",
    ),
    Rule(
        id="rtx-gpu",
        severity=REFUSED,
        holds=(RTX,),
        applies=_not_an_rtx_gpu,
        message="TensorRT-RTX builds for compute capability 7.5, 8.0, 8.6, 8.9 and 12.x only.",
        remedy="use TensorRT for data-centre GPUs such as H100, H200 and B200",
        source="TensorRT-RTX 1.7.1: members of ComputeCapability, and its documentation",
    ),
    Rule(
        id="bf16-gpu",
        severity=REFUSED,
        holds=EVERYWHERE,
        applies=lambda node, target: node.dtype == "bf16" and target.is_below(8, 0),
        message="bf16 needs compute capability 8.0.",
        remedy="export in fp16",
        source=f"{MEASURED_RTX}: cannot compile for sm75",
    ),
)


# -- What prevents the fusion of an accepted attention ---------------------------------------------

_ISSUE_4167 = "NVIDIA/TensorRT issue 4167: FP16 and BF16, SM >= 75, 16 <= D <= 256, D % 8 == 0"


def _one_query(node: AttentionNode) -> bool:
    """A single query has a kernel of its own, with wider limits."""
    return node.S == 1 and isinstance(node.D, int) and 8 <= node.D <= 256 and node.D % 8 == 0


def _head_size_out_of_range(node: AttentionNode, target: Target) -> bool:
    return isinstance(node.D, int) and not 16 <= node.D <= 256 and not _one_query(node)


def _head_size_unaligned(node: AttentionNode, target: Target) -> bool:
    return isinstance(node.D, int) and 16 <= node.D <= 256 and node.D % 8 != 0


def _mask_is_computed(node: AttentionNode, target: Target) -> bool:
    # A single new token attends to every earlier key: the lowering writes no mask.
    one_token = node.S == node.T == 1 and not node.has_nonpad_kv_seqlen
    causal = node.is_causal and not one_token
    return causal or node.mask == "bool" or node.has_nonpad_kv_seqlen or node.has_window


_MEASURED_86 = "measured on TensorRT 8.6.0 and an H200, see benchmarks/RECORD.md"

FUSION_RULES: tuple[Rule, ...] = (
    Rule(
        id="qk-output-unfused",
        severity=NOT_FUSED,
        holds=(BEFORE_ATTENTION,),
        applies=lambda node, target: node.has_qk_output,
        message="A fused kernel never writes the weights to memory.",
        remedy="do without the weights",
        source=MEASURED_RTX,
    ),
    Rule(
        id="softcap-unfused",
        severity=NOT_FUSED,
        holds=EVERYWHERE,
        applies=lambda node, target: node.softcap != 0,
        message="Matmuls with tanh between them are not fused.",
        remedy="use a plugin, or train without softcap",
        source=MEASURED_RTX,
    ),
    Rule(
        id="v-head-size-unfused",
        severity=NOT_FUSED,
        holds=(BEFORE_ATTENTION,),
        applies=v_head_size_differs,
        message="Matmuls are fused for one head size, and this node has {D} and {Dv}.",
        remedy="give V the head size of K",
        source=f"{MEASURED_RTX}, which fuses the same matmuls",
    ),
    Rule(
        id="head-size-range",
        severity=NOT_FUSED,
        holds=EVERYWHERE,
        applies=_head_size_out_of_range,
        message="Head size {D} is outside the fused range of 16 to 256.",
        remedy="use a head size from 16 to 256; otherwise the build fails unless decomposition is allowed",
        source=f"{MEASURED_RTX}; {_ISSUE_4167}",
    ),
    Rule(
        id="head-size-multiple",
        severity=NOT_FUSED,
        holds=(BEFORE_ATTENTION,),
        applies=_head_size_unaligned,
        message="Head size {D} is no multiple of 8.",
        remedy="pad the heads to a multiple of 8, or use TensorRT 10.14 or later",
        source=_ISSUE_4167,
    ),
    Rule(
        id="head-size-padded",
        severity=NOTE,
        holds=WITH_ATTENTION,
        applies=_head_size_unaligned,
        message="Head size {D} is no multiple of 8: fused, with kernels that pad before and cut after.",
        remedy="use a multiple of 8",
        source=f"{MEASURED_RTX}; TensorRT 10.14.1 release notes",
    ),
    Rule(
        id="fp32",
        severity=NOT_FUSED,
        holds=EVERYWHERE,
        applies=lambda node, target: node.dtype == "fp32" and not _one_query(node),
        message="fp32 attention is not fused.",
        remedy="export in fp16 or bf16; otherwise the build may fail unless decomposition is allowed",
        source=MEASURED_RTX,
    ),
    Rule(
        id="facts-unknown",
        severity=NOTE,
        holds=EVERYWHERE,
        applies=lambda node, target: node.dtype is None or not isinstance(node.D, int),
        message="The graph does not state the type ({dtype}) or head size ({D}): fusion cannot be predicted.",
        remedy="run shape inference before the check",
        source="",
    ),
    Rule(
        id="computed-mask",
        severity=NOT_FUSED,
        holds=(BEFORE_10,),
        applies=_mask_is_computed,
        message="A mask that the graph computes becomes part of the softmax kernel, and nothing is fused.",
        remedy="use TensorRT 10 or later, a plugin, or give an additive mask as an input (up to 512 keys)",
        source=_MEASURED_86,
    ),
    Rule(
        id="grouped-heads",
        severity=NOTE,
        holds=(BEFORE_10,),
        applies=lambda node, target: node.kind in ("GQA", "MQA"),
        message="Grouped heads ({Hq} on {Hkv}) were fused only under an additive mask that is an input.",
        remedy="use TensorRT 10 or later, or a plugin: where they fuse, they are slower than unfused",
        source=_MEASURED_86,
    ),
    Rule(
        id="compute-capability",
        severity=NOT_FUSED,
        holds=(EVERY_TENSORRT,),
        applies=lambda node, target: target.is_below(7, 5),
        message="Attention is fused from compute capability 7.5 on.",
        remedy="use a newer GPU",
        source=_ISSUE_4167,
    ),
)


# -- The answer for each node ----------------------------------------------------------------------

RULES: tuple[Rule, ...] = PARSER_RULES + FUSION_RULES
"""All rules, in the order in which they are reported within one severity."""


@dataclass(frozen=True, kw_only=True)
class Eligibility:
    """Whether one node is accepted and fused: as it is, and once lowered."""

    node: AttentionNode
    target: Target
    findings: tuple[Finding, ...]

    @property
    def taken(self) -> bool:
        """Whether the node builds as it is, and computes what ONNX specifies."""
        return not self._any(REFUSED, WRONG_ANSWER)

    @property
    def fused(self) -> bool:
        """Whether the node as it is can become one fused kernel."""
        return self.taken and not self._any(NOT_FUSED)

    @property
    def taken_when_lowered(self) -> bool:
        """Whether the node builds and is correct once lowered."""
        return not self._any(REFUSED, WRONG_ANSWER, cured=False)

    @property
    def fused_when_lowered(self) -> bool:
        """Whether the node can become one fused kernel once lowered."""
        return self.taken_when_lowered and not self._any(NOT_FUSED, cured=False)

    @property
    def options(self) -> dict[str, bool]:
        """The options of the lowering that cure these findings."""
        return {name: True for finding in self.findings for name in finding.needs}

    def _any(self, *severities: str, cured: bool = True) -> bool:
        """Whether a finding has one of the severities; with `cured` false, only what no lowering cures."""
        return any(
            finding.severity in severities and (cured or finding.cured_by is None)
            for finding in self.findings
        )


def check(nodes: Sequence[AttentionNode], target: Target) -> list[Finding]:
    """The findings about these nodes on this target, the worst first for each node."""
    return [finding for answer in judge(nodes, target) for finding in answer.findings]


def judge(nodes: Sequence[AttentionNode], target: Target) -> list[Eligibility]:
    """The answer for each node."""
    rules = [rule for rule in RULES if rule.covers(target)]
    answers = []
    for node in nodes:
        applying = [rule for rule in rules if rule.applies(node, target)]
        found = worst_first(
            rule.finding(node.name, rule.message.format(**node.describe())) for rule in applying
        )
        answers.append(Eligibility(node=node, target=target, findings=tuple(found)))
    return answers
