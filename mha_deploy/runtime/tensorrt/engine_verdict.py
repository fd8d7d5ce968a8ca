"""Was attention fused, and is the engine in its precision? Decided by the kernels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import onnx_ir as ir
from msgspec import Struct
from msgspec.structs import replace

from mha_deploy.runtime.tensorrt.kernels import FLOATING, UNKNOWN, EngineTensor, Kernel, dtype_of

# -- The types of the nodes in the graph: what a builder changed is not what the graph requests ----

_MATMULS = frozenset({"MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "MhaDeployLinear"})
_SOFTMAXES = frozenset({"Softmax", "LogSoftmax", "ReduceLogSumExp"})


@dataclass(frozen=True, kw_only=True)
class WrittenTypes:
    """The floating-point types of the inputs and outputs of one node."""

    reads: frozenset[str]
    writes: frozenset[str]
    is_matmul: bool  # or a convolution, or attention
    is_softmax: bool = False


Written = Mapping[str, WrittenTypes]
"""The types of the nodes, by TensorRT's names for them."""


def written_types(model: ir.Model) -> dict[str, WrittenTypes]:
    """The types of every node of the graph that TensorRT gets; unknown ones are left out."""

    def types(values: Iterable[ir.Value | None]) -> frozenset[str]:
        known = (value.dtype for value in values if value is not None and value.dtype is not None)
        return frozenset(dtype_of(dtype.name) for dtype in known).intersection(FLOATING)

    return {
        node.name or f"node_of_{node.outputs[0].name}": WrittenTypes(
            reads=types(node.inputs),
            writes=types(node.outputs),
            is_matmul=node.op_type in _MATMULS or node.op_type.endswith("Attention"),
            is_softmax=node.op_type in _SOFTMAXES,
        )
        for node in model.graph.all_nodes()
        if node.outputs
    }


# -- The kernels of one source, by the attention nodes that they compute ---------------------------

Groups = Mapping[str, Sequence[str]]
"""For each attention node, the names of the nodes it was lowered to."""

# The matmuls and the softmax among the nodes that an attention is lowered to.
_CORE = re.compile(
    r"(?:^|/)(?:scores|weights|softmax|weighted_values|summed_values|sum|matmul)(?:_\d+)?$", re.I
)


def group_by_attention(names: Sequence[str], attention: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The nodes of a lowered graph that each attention node became: itself, and every `<attention>/...`.

    A node that matches two names belongs to the longer one.
    """
    found: dict[str, list[str]] = {node: [] for node in attention}
    for name in names:
        prefix = name
        while prefix and prefix not in found:
            prefix = prefix.rpartition("/")[0]
        if prefix:
            found[prefix].append(name)
    return {node: tuple(parts) for node, parts in found.items()}


class ReportedKernels:
    """The kernels that one source reports for one profile, read once for all groups of nodes.

    `softmaxes` are the names of the softmaxes in the graph that belong to no attention, where it is known.
    """

    def __init__(self, kernels: Sequence[Kernel], groups: Groups, softmaxes: Iterable[str] | None) -> None:
        self.kernels = kernels
        self.source = kernels[0].source if kernels else ""
        self.opaque = next((kernel.name for kernel in kernels if kernel.is_opaque), None)
        # A fused kernel that names no node: it may compute any attention node.
        self.nameless = next((k.label for k in kernels if k.is_fused_attention and not k.onnx_nodes), None)
        # A softmax kernel that names no node, more of them than softmaxes outside attention that no kernel
        # names: it may compute a part of any attention node.
        strays = [kernel.label for kernel in kernels if kernel.is_softmax and not kernel.onnx_nodes]
        elsewhere = set(softmaxes or ()).difference(*(kernel.onnx_nodes for kernel in kernels))
        self.stray_softmax = strays[0] if softmaxes is not None and len(strays) > len(elsewhere) else None
        # By attention node: the kernels that name a part of it, the fused ones that compute it, and the GEMMs
        # and softmaxes that compute its core and nothing else.
        self.named: dict[str, list[Kernel]] = {node: [] for node in groups}
        self.fused: dict[str, list[Kernel]] = {node: [] for node in groups}
        self.own: dict[str, list[Kernel]] = {node: [] for node in groups}
        # For each name in a kernel, the attention nodes it is a part of, and whether it is their core.
        owners: dict[str, dict[str, bool]] = {}
        for node, names in groups.items():
            cores = [name for name in names if name == node or _CORE.search(name)] or names
            for name in names:
                # The parser names a node without a name for its first output.
                for spelling in (name, f"node_of_{name}"):
                    owners.setdefault(spelling, {})[node] = name in cores
        for kernel in kernels:
            named = [owners.get(name, {}) for name in kernel.onnx_nodes]
            parts = Counter(node for owner in named for node, is_core in owner.items() if is_core)
            most = max(parts.values(), default=0)
            for node in dict.fromkeys(node for owner in named for node in owner):
                self.named[node].append(kernel)
                # A fused kernel proves only the node whose core it names: layers share what their masks are
                # computed from, so it may name a part of another attention.
                if parts[node] == most > 0 and kernel.is_fused_attention:
                    self.fused[node].append(kernel)
                # A projection may have the scale of an attention in its epilogue.
                elif parts[node] == most > 0 and all(named) and (kernel.is_gemm or kernel.is_softmax):
                    self.own[node].append(kernel)


# -- Is the engine in the requested precision? -----------------------------------------------------

# First match wins: `f32f32_tf32f32_f32` reads FP32 and multiplies TF32, `f16_s16816gemm_f16` is FP16 with
# an FP32 accumulator, and `s1688gemm` with no narrower type in the name is TF32.
# In cuBLAS's names, one letter each for factors, accumulator and result follows: `nvjet_hsh`, `nvjet_tst`.
_NVJET = r"nvjet_(?:sm\d+_)?(?!sm\d)"
_MATH = (
    ("tf32", rf"tf32|tfloat32|{_NVJET}s"),
    ("fp4", r"e2m1|fp4"),
    ("fp8", rf"e4m3|e5m2|fp8|{_NVJET}[qr]"),
    ("int4", r"int4|w4a16|(?<![a-z0-9])[iu]4(?=f16|bf16)"),
    ("int8", rf"i8i(?:8|32)|imma|int8|w8a16|{_NVJET}i"),
    ("bf16", rf"bf16|bfloat16|{_NVJET}t"),
    ("fp16", r"f16f16|fp16|(?<![a-z])h\d{3,5}(?!\d)|(?<![a-z])h(?:gemm|cudnn)|(?<![a-z])f16(?!f)|half"),
    ("fp16", rf"{_NVJET}h"),
    ("tf32", r"s1688(?!\d)"),
    ("fp64", rf"(?<![a-z])d884|(?<![a-z])dgemm|f64|double|{_NVJET}d"),
    ("fp32", r"f32f32|(?<![a-z])s(?:gemm|cudnn)|fp32|simt_s|(?<![a-z0-9])f32(?!f)"),
    ("fp32", r"(?<![a-z0-9_])float(?![a-z0-9])"),
)
_NARROW_SUM = re.compile(rf"f16f16_f16f16_f16|(?<![a-z])h(?:884|1688|16816)(?:gemm|_)|{_NVJET}hh")
# Names that state what a matmul reads and writes in 16 bits, not only what it multiplies:
# `f16f16_f16f32_f32` writes FP16, `f16f16_f32f32_f32` does not, nor `s16816gemm_f16` with no type before it.
_NAMES_ALL_TYPES = re.compile(
    rf"(b?f16)\1_\1f(?:16|32)_|(?:f16|fp16)_[sh]\d+gemm\w*_(?:f16|fp16)|(?<![a-z])h\d+gemm"
    rf"|{_NVJET}(?:h[sh]h|tst)"
)
_FACTOR = re.compile(r"_(alpha|beta)(_myl\d+)?$")
_CHOSEN_LATER = "CASK_STUB"
# Layers that only store or move data; around plugins, 8.6 does not report their types.
_CARRIER = re.compile(r"^(constant|no_?op|shuffle|reformat|shape_?host_?to_?device)", re.IGNORECASE)
# Of a matmul these are numbers that were quantized; elsewhere they are indices, sizes and masks.
_QUANTIZED = frozenset({"int8", "uint8", "int4"})
_READS, _WRITES, _COMPUTES = "reads", "writes", "computes"


class Offender(Struct, frozen=True, kw_only=True):
    """Something that is not in the requested precision: a tensor, or the `kernel` by the type in its name."""

    kernel: str
    tactic: str
    what: str
    dtype: str
    onnx_nodes: tuple[str, ...] = ()


class PrecisionVerdict(Struct, frozen=True, kw_only=True):
    """Whether an engine is in the requested precision."""

    requested: str
    status: str  # verified, mixed or unknown
    counts: dict[str, int]  # of the tensors of each type, and of the kernels with a type in their names
    # Matmuls and attentions with another floating-point type that is not the graph's; other kernels with one.
    offenders: tuple[Offender, ...] = ()
    islands: tuple[Offender, ...] = ()
    reason: str = ""  # why the answer is unknown; empty otherwise
    notes: tuple[str, ...] = ()  # what else was detected: FP16 accumulation, kernels chosen on the device
    has_untyped: bool = False  # whether a matmul or attention was reported without its types
    # Matmuls and attentions with another type that the graph requests; matmuls that the graph keeps in a
    # wider type than the engine multiplies in.
    written: tuple[Offender, ...] = ()
    narrowed: tuple[Offender, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the requested precision is verified."""
        return self.status == "verified"


def precision_verdict(
    kernels: Sequence[Kernel], precision: str, written: Written | None = None
) -> PrecisionVerdict:
    """Judge an engine's precision by its kernels, as one source reports them.

    It is `mixed` as soon as one matmul or attention is of another floating-point type than requested and
    `written` in the graph; `verified` only where every kernel could be judged; else `unknown`.
    """
    heavy = [kernel for kernel in kernels if kernel.is_heavy]
    # A graph that is of another type throughout is not in the requested precision, though it is written so.
    is_used = any(tensor.dtype == precision for kernel in heavy for tensor in _data(kernel))
    excuses = written if written and is_used else {}
    offenders: list[Offender] = []
    from_graph: list[Offender] = []
    for kernel in heavy:
        for role, found in _offenders(kernel, precision):
            (from_graph if _is_written(kernel, role, found.dtype, excuses) else offenders).append(found)
    islands = [each for k in kernels if not k.is_heavy for _, each in _offenders(k, precision)]
    narrowed = [found for kernel in heavy for found in _narrowed(kernel, written or {})]
    reason = "" if offenders else _why_unknown(kernels, precision, written or {})
    phrases = {
        "{} matmuls have {} from the graph": from_graph,
        "{} matmuls of FP32 in the graph multiply {}": narrowed,
        "{} small kernels work in {}": islands,
    }
    return PrecisionVerdict(
        requested=precision,
        status="mixed" if offenders else "unknown" if reason else "verified",
        counts=_counts(kernels),
        offenders=tuple(offenders),
        islands=tuple(islands),
        reason=reason,
        notes=_notes(kernels, phrases),
        has_untyped=any(_is_untyped(kernel) for kernel in heavy if not kernel.is_opaque),
        written=tuple(from_graph),
        narrowed=tuple(narrowed),
    )


def math_type(tactic: str) -> str:
    """The type a kernel multiplies in, or `?`: `sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_...` is `fp16`."""
    # `bf16` and `f32f32` are also hexadecimal digits.
    lowered = re.sub(r"0x[0-9a-f]+", "", tactic.lower())
    return next((name for name, pattern in _MATH if re.search(pattern, lowered)), UNKNOWN)


def _data(kernel: Kernel) -> list[EngineTensor]:
    """The tensors with data: not alpha and beta of `alpha * A @ B + beta * C`, which are FP32 by design."""

    def is_factor(tensor: EngineTensor) -> bool:
        single = bool(tensor.shape) and all(size == 1 for size in tensor.shape)  # a folded scale has any name
        return single or (not tensor.shape and bool(_FACTOR.search(tensor.name)))

    multiplies = kernel.is_gemm or kernel.is_convolution
    read = [tensor for tensor in kernel.inputs + kernel.constants if not (multiplies and is_factor(tensor))]
    return [*read, *kernel.outputs]


def _named_type(kernel: Kernel) -> str:
    # Names of generated kernels are made from operators; only those of matmuls contain types.
    named = kernel.is_gemm or kernel.is_convolution or kernel.is_fused_attention
    return math_type(kernel.tactic) if named else UNKNOWN


def _offenders(kernel: Kernel, precision: str) -> list[tuple[str, Offender]]:
    """What of a kernel is of another type, and whether it is read, written, or what it computes in."""
    written = {tensor.name for tensor in kernel.outputs}
    found = [
        (_WRITES if tensor.name in written else _READS, tensor.name, tensor.dtype) for tensor in _data(kernel)
    ]
    found.append((_COMPUTES, "kernel", _named_type(kernel)))
    counted = {*FLOATING, *(_QUANTIZED if kernel.is_gemm or kernel.is_convolution else ())}
    return [
        (role, _offender(kernel, what, dtype))
        for role, what, dtype in dict.fromkeys(found)
        # Whole numbers are indices and sizes, unless a matmul or an attention computes in them.
        if dtype != precision and (dtype in counted or (role == _COMPUTES and dtype != UNKNOWN))
    ]


def _offender(kernel: Kernel, what: str, dtype: str) -> Offender:
    nodes = kernel.onnx_nodes
    return Offender(kernel=kernel.name, tactic=kernel.tactic, what=what, dtype=dtype, onnx_nodes=nodes)


def _nodes(kernel: Kernel, written: Written) -> list[WrittenTypes]:
    return [written[name] for name in kernel.onnx_nodes if name in written]


def _is_written(kernel: Kernel, role: str, dtype: str, written: Written) -> bool:
    """Whether a node of the kernel has this type in the graph, at the same place."""
    nodes = _nodes(kernel, written)
    if role == _COMPUTES:
        matmuls = [node for node in nodes if node.is_matmul]
        return bool(matmuls) and all(dtype in node.reads for node in matmuls)
    return any(dtype in getattr(node, role) for node in nodes)


def _narrowed(kernel: Kernel, written: Written) -> list[Offender]:
    """The inputs of a matmul in FP16 or BF16 that is FP32 in the graph.

    TensorRT-RTX 1.7.1 does so where the matmul is between two Casts, and rounds its weights too: one beyond
    the range of FP16 becomes infinite. Attention is left out: its kernels accumulate in FP32 inside.
    """
    matmuls = [node for node in _nodes(kernel, written) if node.is_matmul]
    if kernel.is_fused_attention or not matmuls or any(node.reads != {"fp32"} for node in matmuls):
        return []
    narrow = [each for each in kernel.inputs + kernel.constants if each.dtype in ("fp16", "bf16")]
    return [_offender(kernel, tensor.name, tensor.dtype) for tensor in narrow]


def _why_unknown(kernels: Sequence[Kernel], precision: str, written: Written) -> str:
    opaque = [kernel.name for kernel in kernels if kernel.is_opaque]
    if opaque:
        return _not_reported(opaque[0])
    untyped = [kernel for kernel in kernels if _is_untyped(kernel) and not _CARRIER.search(kernel.layer_type)]
    if untyped:
        return f"the types of {untyped[0].label} are not reported"
    if not any(dtype in FLOATING for dtype in _counts(kernels)):
        return "no floating-point tensor or kernel was reported"
    for kernel in kernels:
        nodes = _nodes(kernel, written)
        # Neither its name nor its nodes exclude that it computes a matmul.
        hidden = not (kernel.is_heavy or kernel.is_small or kernel.is_softmax)
        if hidden and (not nodes or any(node.is_matmul for node in nodes)):
            others = [found.dtype for _, found in _offenders(kernel, precision)]
            if others or kernel.source == "profile":
                types = f" in {others[0]}" if others else ""
                return f"{kernel.label} may be a matmul{types}: its name does not show what it computes"
    return ""


def _not_reported(region: str) -> str:
    return f"the kernels inside {region} are not reported by this version; give those of a profiler run"


def _is_untyped(kernel: Kernel) -> bool:
    if any(tensor.dtype == UNKNOWN for tensor in _data(kernel)):
        # 8.6 does not report the types of tensors with dynamic sizes; some matmuls have them in their names.
        return not (kernel.is_gemm and _NAMES_ALL_TYPES.search(kernel.tactic.lower()))
    # A profiler reports no tensors, and Myelin's fused attention has no type in its name: where a profiler is
    # the only source (8.6), it exists in FP16 and INT8 alone, and INT8 is never allowed.
    of_myelin = kernel.source == "profile" and kernel.name.startswith("__my")
    needs_type = kernel.is_heavy and not kernel.is_opaque and not (kernel.is_fused_attention and of_myelin)
    return needs_type and not kernel.tensors and _named_type(kernel) == UNKNOWN


def _counts(kernels: Iterable[Kernel]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for kernel in kernels:
        counted.update(tensor.dtype for tensor in _data(kernel))
        counted.update({_named_type(kernel)} - {UNKNOWN})
    return dict(counted.most_common())


def _notes(kernels: Sequence[Kernel], phrases: Mapping[str, Sequence[Offender]]) -> tuple[str, ...]:
    narrow = [kernel.tactic for kernel in kernels if _NARROW_SUM.search(kernel.tactic.lower())]
    later = sum(_CHOSEN_LATER in kernel.tactic for kernel in kernels)
    notes = []
    if narrow:
        notes.append(f"{len(narrow)} matmuls accumulate in FP16, the first is {narrow[0]}")
    if later:
        notes.append(f"the kernels of {later} matmuls are chosen on the device")
    for phrase, found in phrases.items():
        if found:
            names = list(dict.fromkeys(each.kernel for each in found))
            types = ", ".join(sorted({each.dtype for each in found}))
            notes.append(f"{phrase.format(len(names), types)}, the first is {names[0]}")
    return tuple(notes)


# -- Was attention fused? One answer per attention node and profile, with its evidence -------------

_Status = Literal["fused", "decomposed", "unknown"]
FUSED: Final = "fused"
DECOMPOSED: Final = "decomposed"
UNDECIDED: Final = "unknown"
_NO_SOURCE = "no source reports its kernels"


class NodeVerdict(Struct, frozen=True, kw_only=True):
    """What became of one attention node in one optimisation profile."""

    node: str
    profile: int
    status: _Status
    kernels: tuple[str, ...] = ()  # that prove it
    reason: str = ""  # why it is unknown, or how it is known where no kernel names the node
    source: str = ""  # `log`, `plan`, `inspector`, `profile`, `graph`; several joined by `+`


class EngineVerdict(Struct, frozen=True, kw_only=True):
    """Fusion and precision of an engine: one verdict per attention node and profile."""

    nodes: tuple[NodeVerdict, ...]
    precision: PrecisionVerdict
    disagreements: tuple[str, ...] = ()  # what two sources report differently

    @property
    def fused_count(self) -> tuple[int, int]:
        """How many attention nodes are fused in every profile, of how many."""
        names = {verdict.node for verdict in self.nodes}
        broken = {verdict.node for verdict in self.nodes if verdict.status != FUSED}
        return len(names - broken), len(names)

    @property
    def all_fused(self) -> bool:
        """Whether every attention node is fused in every profile."""
        fused, count = self.fused_count
        return fused == count > 0


def engine_verdict(
    sources: Mapping[str, Sequence[Kernel]],  # the kernels as each source reports them, or none
    attention: Groups | Iterable[str],  # the nodes, or what each was lowered to
    precision: str,
    *,
    profiles: int = 1,
    written: Written | None = None,  # in the graph the engine was built from, where it is available
) -> EngineVerdict:
    """Judge an engine by everything that is known of its kernels."""
    groups = _groups(attention)
    reported = {name: kernels for name, kernels in sources.items() if kernels}
    found: dict[tuple[int, str], list[NodeVerdict]] = {}
    for kernels in reported.values():
        for verdict in fusion_verdict(kernels, groups, profiles=profiles, written=written):
            found.setdefault((verdict.profile, verdict.node), []).append(verdict)
    count = max([profiles, *(profile + 1 for profile, _ in found)])
    nodes, doubts = [], list[str]()
    for key in ((profile, node) for profile in range(count) for node in groups):
        verdict, conflict = _merge(found.get(key, ()), *key)
        nodes.append(verdict)
        doubts += conflict
    by_source = {name: precision_verdict(kernels, precision, written) for name, kernels in reported.items()}
    judged, conflict = _merge_precision(by_source, precision)
    return EngineVerdict(nodes=tuple(nodes), precision=judged, disagreements=(*doubts, *conflict))


def fusion_verdict(
    kernels: Sequence[Kernel],
    attention: Groups | Iterable[str],
    *,
    profiles: int = 1,
    written: Written | None = None,
) -> list[NodeVerdict]:
    """Judge every attention node by the kernels of one source; further profiles only if kernels show them."""
    groups = _groups(attention)
    parts = {name for names in groups.values() for name in names}
    softmaxes = [name for name, node in (written or {}).items() if node.is_softmax and name not in parts]
    verdicts = []
    for profile in range(max([profiles, *(kernel.profile + 1 for kernel in kernels)])):
        of_profile = [kernel for kernel in kernels if kernel.profile == profile]
        reported = ReportedKernels(of_profile, groups, None if written is None else softmaxes)
        if reported.kernels and not any(kernel.onnx_nodes or kernel.is_opaque for kernel in reported.kernels):
            verdicts += _by_count(reported.kernels, groups, profile, len(softmaxes))
        else:
            verdicts += [_by_name(reported, node, profile) for node in groups]
    return verdicts


def _groups(attention: Groups | Iterable[str]) -> Groups:
    return attention if isinstance(attention, Mapping) else {node: (node,) for node in attention}


def _by_name(reported: ReportedKernels, node: str, profile: int) -> NodeVerdict:
    """Judge a node by the kernels that name it."""
    mine, fused, own = reported.named[node], reported.fused[node], reported.own[node]
    verdict = partial(_verdict, node, profile, reported.source)
    if fused and not own and reported.stray_softmax is None:
        return verdict(FUSED, fused)
    # One attention is not computed twice: a fused kernel beside both belongs to something else.
    decomposed = any(kernel.is_gemm for kernel in own) and any(kernel.is_softmax for kernel in own)
    parts = any(kernel.is_gemm or kernel.is_softmax for kernel in mine)
    is_clear = not any(kernel.is_opaque for kernel in mine) and reported.nameless is None
    if is_clear and (decomposed if fused else parts):
        return verdict(DECOMPOSED, mine)
    plugins = [kernel.label for kernel in mine if kernel.is_plugin]
    foreign = [kernel.label for kernel in mine if kernel.is_fused_attention]
    reason = "no kernel names it"
    if fused and own:
        reason = f"{fused[0].label} is fused attention, but {own[0].label} computes a part of it as well"
    elif fused:
        stray = f"{reported.stray_softmax} is a softmax of no known node"
        reason = f"{fused[0].label} is fused attention, but {stray}"
    elif not reported.kernels:
        reason = f"no kernels of profile {profile} are reported"
    elif reported.opaque is not None:
        reason = _not_reported(reported.opaque)
    elif reported.nameless is not None:
        reason = f"{reported.nameless} is fused attention, but does not name its node"
    elif plugins:
        reason = f"the plugin {plugins[0]} computes it in an unknown way"
    elif foreign:
        reason = f"{foreign[0]} names a part of it, but computes another attention"
    elif mine:
        reason = f"{mine[0].label} names it, but no kernel that computes a matmul or softmax does"
    return verdict(UNDECIDED, reason=reason)


def _verdict(
    node: str, profile: int, source: str, status: _Status, kernels: Sequence[Kernel] = (), reason: str = ""
) -> NodeVerdict:
    found = tuple(dict.fromkeys(kernel.label for kernel in kernels))
    return NodeVerdict(node=node, profile=profile, status=status, kernels=found, reason=reason, source=source)


def _by_count(kernels: Sequence[Kernel], groups: Groups, profile: int, softmaxes: int) -> list[NodeVerdict]:
    """Judge all nodes together by kernels that name no node, such as those of a profiler run.

    `softmaxes` is the number of softmaxes in the graph that belong to no attention.
    """
    # One attention may take two launches: over parts of the keys, and to combine their results.
    fused = [kernel for kernel in kernels if kernel.is_fused_attention and "combine" not in kernel.tactic]
    softmax = [kernel for kernel in kernels if kernel.is_softmax]
    status: _Status = UNDECIDED
    proof: list[Kernel] = []
    reason = f"{len(fused)} fused attention kernels for {len(groups)} attention nodes, without names of nodes"
    if len(fused) == len(groups) and len(softmax) <= softmaxes:
        status, proof = FUSED, fused
        reason = f"{len(fused)} fused attention kernels ran for {len(groups)} attention nodes"
    elif not fused and softmax:
        status, proof = DECOMPOSED, [kernel for kernel in kernels if kernel.is_gemm or kernel.is_softmax]
        reason = "no fused attention kernel ran, and a softmax of its own did"
    elif len(softmax) > softmaxes:
        reason += f", and {softmax[0].label} is a softmax of its own"
    return [_verdict(node, profile, kernels[0].source, status, proof, reason) for node in groups]


def _merge(mine: Sequence[NodeVerdict], profile: int, node: str) -> tuple[NodeVerdict, list[str]]:
    """The verdict of all sources on one node, and where they contradict each other."""
    known = [verdict for verdict in mine if verdict.status != UNDECIDED]
    unknown = NodeVerdict(
        node=node,
        profile=profile,
        status=UNDECIDED,
        reason="; ".join(dict.fromkeys(verdict.reason for verdict in mine)) or _NO_SOURCE,
        source="+".join(verdict.source for verdict in (known or mine)),
    )
    if not known:
        return unknown, []
    first = known[0]

    def differs(other: NodeVerdict) -> bool:
        # A profiler and the layer records spell a kernel differently, so only these two are compared; names
        # of decomposed kernels differ by source.
        comparable = {first.source, other.source} == {"log", "plan"} and first.status == FUSED
        return first.status != other.status or (comparable and set(first.kernels) != set(other.kernels))

    kept, other = replace(first, source=unknown.source), next(filter(differs, known[1:]), None)
    if other is None:
        return kept, []
    both = (f"the {v.source} reports {v.status} ({', '.join(v.kernels)})" for v in (first, other))
    conflict = f"{node}, profile {profile}: {', but '.join(both)}"
    return kept if first.status == other.status else replace(unknown, reason=conflict), [conflict]


def _merge_precision(
    verdicts: Mapping[str, PrecisionVerdict], precision: str
) -> tuple[PrecisionVerdict, list[str]]:
    """The worst that is known; `unknown` where no source knows, or one reports what no other could judge.

    A plan contains only Myelin's regions, the inspector reports everything but what is inside them: an
    inspector that does not know the type of one of its layers is not overruled by a plan without that layer.
    """
    ranked = sorted(verdicts.items(), key=lambda item: (item[1].status == "unknown", item[1].ok))
    if not ranked:
        return PrecisionVerdict(requested=precision, status="unknown", counts={}, reason=_NO_SOURCE), []
    untyped = [each for each in verdicts.values() if each.status == "unknown" and each.has_untyped]
    if untyped and ranked[0][1].ok:
        return replace(ranked[0][1], status="unknown", reason=untyped[0].reason), []
    known = [(name, verdict.status) for name, verdict in ranked if verdict.status != "unknown"]
    doubts = [
        f"precision: the {known[0][0]} reports {known[0][1]}, but the {name} reports {status}"
        for name, status in known[1:]
        # A profiler reports no tensors: that it finds nothing wrong contradicts no other source.
        if status != known[0][1] and name != "profile"
    ]
    return ranked[0][1], doubts
