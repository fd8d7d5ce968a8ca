"""Is the engine really in the precision that was asked for?

A graph in FP16 and a builder allowed to use FP16 do not make an FP16 engine: TensorRT 8.6 was seen choosing
TF32 matrix products for one. So the answer is read from what was chosen: the types that matrix products and
attention read and write, and the types in the kernels' own names. Small kernels of another type (a mask, a
gate, the inside of an activation function) are islands: they are reported, and do not change the answer. Nor
do products to which the graph gives another type (angles of a rotary embedding, a layer kept in FP32): that
is what was asked for, while a product that is FP16 in the graph and FP32 in the engine fell back.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mha_deploy.backends.tensorrt.kernels import FLOATING, UNKNOWN, EngineTensor, Kernel
from mha_deploy.backends.tensorrt.written import Written

# First match wins: `f32f32_tf32f32_f32` reads FP32 and multiplies TF32, `f16_s16816gemm_f16` is FP16 with
# an FP32 accumulator, and `s1688gemm` with no narrower type in the name is TF32.
_MATH = (
    ("tf32", re.compile(r"tf32")),
    ("fp8", re.compile(r"e4m3|e5m2|fp8")),
    ("int8", re.compile(r"i8i8|imma|int8")),
    ("bf16", re.compile(r"bf16")),
    ("fp16", re.compile(r"f16f16|fp16|(?<![a-z])h\d{3,5}(?!\d)|(?<![a-z])hgemm|(?<![a-z])f16(?!f)|half")),
    ("tf32", re.compile(r"s1688")),
    ("fp32", re.compile(r"f32f32|(?<![a-z])sgemm|fp32|simt_s")),
)
_NARROW_SUM = re.compile(r"f16f16_f16f16_f16|(?<![a-z])h(?:884|1688|16816)(?:gemm|_)")
# Names that state what a product reads and writes in 16 bits, not only what it multiplies:
# `f16f16_f16f32_f32` writes FP16, `f16f16_f32f32_f32` does not, nor `s16816gemm_f16` with no type before it.
_NAMES_ALL_TYPES = re.compile(
    r"(b?f16)\1_\1f(?:16|32)_|(?:f16|fp16)_[sh]\d+gemm\w*_(?:f16|fp16)|(?<![a-z])h\d+gemm"
)
_FACTOR = re.compile(r"_(alpha|beta)(_myl\d+)?$")
_CHOSEN_LATER = "CASK_STUB"
# Layers that only hold or move numbers; around plugins, 8.6 does not tell their types.
_CARRIER = re.compile(r"^(constant|no_?op|shuffle|reformat|shape_?host_?to_?device)", re.IGNORECASE)
_READS, _WRITES, _COMPUTES = "reads", "writes", "computes"


@dataclass(frozen=True, kw_only=True)
class Offender:
    """Something that is not in the precision asked for.

    Args:
        kernel: Name of the layer.
        tactic: Name of the kernel chosen for it.
        what: The tensor, or `kernel` where the kernel's own name tells the type.
        dtype: The type it has.
        onnx_nodes: The ONNX nodes it computes.
    """

    kernel: str
    tactic: str
    what: str
    dtype: str
    onnx_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PrecisionVerdict:
    """Whether an engine is in the precision asked for.

    Args:
        asked: `fp16`, `bf16` or `fp32`.
        status: `really-<asked>`, `mixed` or `unknown`.
        counts: How many tensors there are of each type, and kernels whose names tell one.
        offenders: Products and attentions that have another floating-point type, and not from the graph.
        islands: Other kernels that have one.
        reason: Why the answer is unknown; empty otherwise.
        notes: What else was seen: FP16 sums, kernels that are chosen on the device.
        has_untold: Whether a matrix product or attention was told of without its types.
        written: Products and attentions that have another type because the graph gives it to them.
        narrowed: Products that the graph keeps in a wider type than the engine multiplies in.
    """

    asked: str
    status: str
    counts: dict[str, int]
    offenders: tuple[Offender, ...] = ()
    islands: tuple[Offender, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()
    has_untold: bool = False
    written: tuple[Offender, ...] = ()
    narrowed: tuple[Offender, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it was shown to be what was asked for."""
        return self.status == f"really-{self.asked}"


def precision_verdict(
    kernels: Sequence[Kernel], precision: str, written: Written | None = None
) -> PrecisionVerdict:
    """Judge an engine's precision by its kernels.

    Args:
        kernels: The kernels, as one source tells them.
        precision: What was asked for: `fp16`, `bf16` or `fp32`.
        written: The types in the graph the engine was built from, where that is at hand.

    Returns:
        `mixed` as soon as one product or attention is of another floating-point type than asked for and
        written; `really-...` only where every kernel could be judged; else `unknown`, with the reason.
    """
    heavy = [kernel for kernel in kernels if kernel.is_heavy]
    light = [kernel for kernel in kernels if not kernel.is_heavy]
    # A graph that is of another type throughout is not what was asked for, whoever wrote it.
    told = written if written and _has_products_in(heavy, precision) else {}
    others = [
        (found, _is_written(kernel, role, found, told))
        for kernel in heavy
        for role, found in _offenders(kernel, precision)
    ]
    offenders = tuple(found for found, excused in others if not excused)
    from_graph = tuple(found for found, excused in others if excused)
    islands = tuple(found for kernel in light for _, found in _offenders(kernel, precision))
    narrowed = tuple(found for kernel in heavy for found in _narrowed(kernel, written or {}))
    reason = _why_unknown(kernels)
    if offenders:
        status, reason = "mixed", ""
    else:
        status = "unknown" if reason else f"really-{precision}"
    return PrecisionVerdict(
        asked=precision,
        status=status,
        counts=_counts(kernels),
        offenders=offenders,
        islands=islands,
        reason=reason,
        notes=(*_notes(kernels), *_graph_notes(from_graph, narrowed), *_island_notes(islands)),
        has_untold=any(_is_untold(kernel) for kernel in heavy if not kernel.is_opaque),
        written=from_graph,
        narrowed=narrowed,
    )


def math_type(tactic: str) -> str:
    """The type a kernel multiplies in, where its name tells.

    Args:
        tactic: `sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_...`, `cutlass_80_tensorop_s1688gemm_...`.

    Returns:
        `fp16`, `bf16`, `tf32`, `fp32`, ... or `?`.
    """
    # `bf16` and `f32f32` are also hexadecimal digits.
    lowered = re.sub(r"0x[0-9a-f]+", "", tactic.lower())
    for name, pattern in _MATH:
        if pattern.search(lowered):
            return name
    return UNKNOWN


def _data(kernel: Kernel) -> list[EngineTensor]:
    """The tensors that carry data: not the factors of a matrix product, which are FP32 by design."""
    read = [tensor for tensor in kernel.inputs + kernel.constants if not _is_factor(kernel, tensor)]
    return [*read, *kernel.outputs]


def _is_factor(kernel: Kernel, tensor: EngineTensor) -> bool:
    """Whether it is the alpha or beta of `alpha * A @ B + beta * C`; a folded scale has any name."""
    single = bool(tensor.shape) and math.prod(tensor.shape) == 1
    multiplies = kernel.is_gemm or kernel.is_convolution
    return multiplies and (single or bool(_FACTOR.search(tensor.name)))


def _named_type(kernel: Kernel) -> str:
    # Names of generated kernels are made from operators; only products carry their types.
    named = kernel.is_gemm or kernel.is_convolution or kernel.is_fused_attention
    return math_type(kernel.tactic) if named else UNKNOWN


def _offenders(kernel: Kernel, precision: str) -> list[tuple[str, Offender]]:
    """What of a kernel is of another type, and whether it is read, written, or what it computes in."""
    written = {tensor.name for tensor in kernel.outputs}
    seen = [
        (_WRITES if tensor.name in written else _READS, tensor.name, tensor.dtype) for tensor in _data(kernel)
    ]
    seen.append((_COMPUTES, "kernel", _named_type(kernel)))
    return [
        (role, _offender(kernel, what, dtype))
        for role, what, dtype in dict.fromkeys(seen)
        if dtype in FLOATING and dtype != precision
    ]


def _offender(kernel: Kernel, what: str, dtype: str) -> Offender:
    return Offender(
        kernel=kernel.name, tactic=kernel.tactic, what=what, dtype=dtype, onnx_nodes=kernel.onnx_nodes
    )


def _is_written(kernel: Kernel, role: str, offender: Offender, written: Written) -> bool:
    """Whether the graph gives this type to a node of the kernel, at the same place."""
    nodes = [written[name] for name in kernel.onnx_nodes if name in written]
    if role == _COMPUTES:
        products = [node for node in nodes if node.is_product]
        return bool(products) and all(offender.dtype in node.reads for node in products)
    return any(offender.dtype in (node.reads if role == _READS else node.writes) for node in nodes)


def _narrowed(kernel: Kernel, written: Written) -> list[Offender]:
    """The inputs of a product in FP16 or BF16 that the graph wants multiplied in FP32.

    TensorRT-RTX 1.7.1 does so where the product stands between two Casts, and rounds its weights too: one
    beyond the range of FP16 becomes infinite. Attention is left out: its kernels sum up in FP32 inside.
    """
    products = [written[name] for name in kernel.onnx_nodes if name in written and written[name].is_product]
    if kernel.is_fused_attention or not products or any(node.reads != {"fp32"} for node in products):
        return []
    return [
        _offender(kernel, tensor.name, tensor.dtype)
        for tensor in kernel.inputs + kernel.constants
        if tensor.dtype in ("fp16", "bf16")
    ]


def _has_products_in(heavy: Iterable[Kernel], precision: str) -> bool:
    return any(tensor.dtype == precision for kernel in heavy for tensor in _data(kernel))


def _why_unknown(kernels: Sequence[Kernel]) -> str:
    opaque = [kernel.name for kernel in kernels if kernel.is_opaque]
    if opaque:
        return f"the kernels inside {opaque[0]} are not told by this version; give those of a profiler run"
    untold = [kernel for kernel in kernels if _is_untold(kernel) and not _CARRIER.search(kernel.layer_type)]
    if untold:
        return f"the types of {untold[0].label} are not told"
    if not any(dtype in FLOATING for dtype in _counts(kernels)):
        return "no floating-point tensor or kernel was told of"
    return ""


def _is_untold(kernel: Kernel) -> bool:
    if any(tensor.dtype == UNKNOWN for tensor in _data(kernel)):
        # 8.6 does not tell the types of tensors with dynamic sizes; some products have them in their names.
        return not (kernel.is_gemm and _NAMES_ALL_TYPES.search(kernel.tactic.lower()))
    # A profiler tells no tensors, and fused attention need not name its type: where only a profiler can
    # tell (8.6), it exists in FP16 and INT8 alone, and INT8 is never allowed.
    must_tell = (
        kernel.is_gemm or kernel.is_convolution or (kernel.is_fused_attention and kernel.source != "profile")
    )
    return must_tell and not kernel.tensors and _named_type(kernel) == UNKNOWN


def _counts(kernels: Iterable[Kernel]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for kernel in kernels:
        counted.update(tensor.dtype for tensor in _data(kernel))
        named = _named_type(kernel)
        if named != UNKNOWN:
            counted[named] += 1
    return dict(counted.most_common())


def _notes(kernels: Sequence[Kernel]) -> list[str]:
    narrow = [kernel.tactic for kernel in kernels if _NARROW_SUM.search(kernel.tactic.lower())]
    later = sum(_CHOSEN_LATER in kernel.tactic for kernel in kernels)
    notes = []
    if narrow:
        notes.append(f"{len(narrow)} matrix products sum up in FP16, the first is {narrow[0]}")
    if later:
        notes.append(f"the kernels of {later} matrix products are chosen on the device")
    return notes


def _graph_notes(written: Sequence[Offender], narrowed: Sequence[Offender]) -> list[str]:
    notes = []
    if written:
        names, types = _summary(written)
        notes.append(f"{len(names)} products have {types} from the graph, the first is {names[0]}")
    if narrowed:
        names, types = _summary(narrowed)
        notes.append(f"{len(names)} products of FP32 in the graph multiply {types}, the first is {names[0]}")
    return notes


def _summary(found: Sequence[Offender]) -> tuple[list[str], str]:
    """The kernels, each once, and their types in words."""
    return list(dict.fromkeys(each.kernel for each in found)), ", ".join(sorted({e.dtype for e in found}))


def _island_notes(islands: Sequence[Offender]) -> list[str]:
    if not islands:
        return []
    names, types = _summary(islands)
    return [f"{len(names)} small kernels work in {types}, the first is {names[0]}"]
