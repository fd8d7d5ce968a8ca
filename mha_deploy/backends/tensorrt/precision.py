"""Is the engine really in the precision that was asked for?

A graph in FP16 and a builder allowed to use FP16 do not make an FP16 engine: TensorRT 8.6 was seen choosing
TF32 matrix products for one. So the answer is read from what was chosen: the types that matrix products and
attention read and write, and the types in the kernels' own names. Small kernels of another type (a mask, a
gate, the inside of an activation function) are islands: they are reported, and do not change the answer.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mha_deploy.backends.tensorrt.kernels import FLOATING, UNKNOWN, EngineTensor, Kernel

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
_FACTOR = re.compile(r"_(alpha|beta)(_myl\d+)?$")
_CHOSEN_LATER = "CASK_STUB"


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
        offenders: Matrix products and attentions that have another floating-point type.
        islands: Other kernels that have one.
        reason: Why the answer is unknown; empty otherwise.
        notes: What else was seen: FP16 sums, kernels that are chosen on the device.
        has_untold: Whether a matrix product or attention was told of without its types.
    """

    asked: str
    status: str
    counts: dict[str, int]
    offenders: tuple[Offender, ...] = ()
    islands: tuple[Offender, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()
    has_untold: bool = False

    @property
    def ok(self) -> bool:
        """Whether it was shown to be what was asked for."""
        return self.status == f"really-{self.asked}"


def precision_verdict(kernels: Sequence[Kernel], precision: str) -> PrecisionVerdict:
    """Judge an engine's precision by its kernels.

    Args:
        kernels: The kernels, as one source tells them.
        precision: What was asked for: `fp16`, `bf16` or `fp32`.

    Returns:
        `mixed` as soon as one product or attention is of another floating-point type; `really-...` only
        where every kernel could be judged; else `unknown`, with the reason.
    """
    heavy = [kernel for kernel in kernels if kernel.is_heavy]
    light = [kernel for kernel in kernels if not kernel.is_heavy]
    offenders = tuple(found for kernel in heavy for found in _offenders(kernel, precision))
    islands = tuple(found for kernel in light for found in _offenders(kernel, precision))
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
        notes=(*_notes(kernels), *_island_notes(islands)),
        has_untold=any(_is_untold(kernel) for kernel in heavy if not kernel.is_opaque),
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
    return kernel.is_gemm and (single or bool(_FACTOR.search(tensor.name)))


def _named_type(kernel: Kernel) -> str:
    # Names of generated kernels are made from operators; only matrix products carry their types.
    return math_type(kernel.tactic) if kernel.is_gemm or kernel.is_fused_attention else UNKNOWN


def _offenders(kernel: Kernel, precision: str) -> list[Offender]:
    seen = [(tensor.name, tensor.dtype) for tensor in _data(kernel)] + [("kernel", _named_type(kernel))]
    return [
        Offender(
            kernel=kernel.name, tactic=kernel.tactic, what=what, dtype=dtype, onnx_nodes=kernel.onnx_nodes
        )
        for what, dtype in dict.fromkeys(seen)
        if dtype in FLOATING and dtype != precision
    ]


def _why_unknown(kernels: Sequence[Kernel]) -> str:
    opaque = [kernel.name for kernel in kernels if kernel.is_opaque]
    if opaque:
        return f"the kernels inside {opaque[0]} are not told by this version; give those of a profiler run"
    untold = [kernel for kernel in kernels if _is_untold(kernel)]
    if untold:
        return f"the types of {untold[0].label} are not told"
    if not any(dtype in FLOATING for dtype in _counts(kernels)):
        return "no floating-point tensor or kernel was told of"
    return ""


def _is_untold(kernel: Kernel) -> bool:
    if any(tensor.dtype == UNKNOWN for tensor in _data(kernel)):
        return True
    # A profiler tells no tensors, and fused attention need not name its type: where only a profiler can
    # tell (8.6), it exists in FP16 and INT8 alone, and INT8 is never allowed.
    must_tell = kernel.is_gemm or (kernel.is_fused_attention and kernel.source != "profile")
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


def _island_notes(islands: Sequence[Offender]) -> list[str]:
    names = list(dict.fromkeys(island.kernel for island in islands))
    types = ", ".join(sorted({island.dtype for island in islands}))
    return [f"{len(names)} small kernels work in {types}, the first is {names[0]}"] if names else []
