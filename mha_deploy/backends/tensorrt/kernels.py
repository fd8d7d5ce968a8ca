"""The kernels of an engine, in one form whichever TensorRT tells of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

UNKNOWN = "?"
ATTENTION, PRODUCT = "attention", "product"

# Every spelling of a type: enum names, the inspector's prose, the plan's own words.
_DTYPES = (
    ("bf16", r"bfloat16|bf16|\bb16\b"),
    ("fp16", r"\bhalf\b|fp16|float16"),
    ("fp8", r"fp8|e4m3|e8m0"),
    ("fp4", r"fp4|e2m1"),
    ("fp32", r"\bfloat\b|fp32|float32"),
    ("fp64", r"\bdouble\b|fp64"),
    ("int64", r"int64"),
    ("int32", r"int32"),
    ("uint8", r"uint8"),
    ("int8", r"int8"),
    ("int4", r"int4"),
    ("bool", r"\bbool\b"),
)
_DTYPE_PATTERNS = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _DTYPES)

FLOATING = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4")

# Kernel names are TensorRT's own, but layer names are made from the graph's: a node called `mha` must not
# pass for a fused kernel. So the wide pattern reads only tactics, and the narrow one only what Myelin names.
_FUSED_TACTIC = re.compile(
    r"(?<![a-z])mha(?![a-z])|mha\d|fmha|flash_?(attn|attention|fwd)|sdpa", re.IGNORECASE
)
_FUSED_NAME = re.compile(r"^_ge(mm|mv)_mha_v\d")
_GENERATED = ("kgen", "")
_GEMM = re.compile(r"gemm|gemv|matrix_?multiply|fully_?connected", re.IGNORECASE)
_CONVOLUTION = re.compile(r"convolution|correlation|corrltn", re.IGNORECASE)
_CONVOLUTION_TACTIC = re.compile(r"fprop|winograd", re.IGNORECASE)
_GENERATED_PRODUCT = re.compile(r"^__(myl_\w*?)?(fc|corr)", re.IGNORECASE)
_SOFTMAX = re.compile(r"[Ss]oft_?[Mm]ax|Maxr?\w*Sub\w*Exp|ExpSum")
_PLUGIN = re.compile(r"plugin|custom_layer", re.IGNORECASE)
_LAYER_PREFIX = re.compile(r"^shuffle_(?:output|input)_(?:\d+_)?")
_LAYER_SUFFIX = re.compile(r"_(?:matrix_multiply|reshape|transpose|elementwise|softmax)$")
_PROFILE = re.compile(r"\[profile (\d+)\]")


@dataclass(frozen=True, kw_only=True)
class EngineTensor:
    """A tensor at the border of a kernel.

    Args:
        name: Its name in the engine.
        dtype: Its type by the short name, `?` where it is not told.
        format: Its layout in memory, in TensorRT's words.
        shape: Its sizes; -1 for a dynamic one.
    """

    name: str
    dtype: str = UNKNOWN
    format: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One step of an engine.

    Args:
        name: Name of the layer in the engine.
        layer_type: What kind of layer it is, in TensorRT's words.
        tactic: Name of the kernel that was chosen.
        onnx_nodes: Names of the ONNX nodes it computes.
        inputs: Tensors it reads.
        outputs: Tensors it writes.
        constants: Weights it reads.
        profile: Optimisation profile it belongs to.
        source: Who tells of it: `log`, `plan`, `inspector` or `profile`.
        carries: What a plugin layer computes, where the graph says so: `attention` or `product`.
    """

    name: str
    layer_type: str = ""
    tactic: str = ""
    onnx_nodes: tuple[str, ...] = ()
    inputs: tuple[EngineTensor, ...] = ()
    outputs: tuple[EngineTensor, ...] = ()
    constants: tuple[EngineTensor, ...] = ()
    profile: int = 0
    source: str = ""
    carries: str = ""

    @property
    def is_plugin(self) -> bool:
        """Whether it is somebody's own layer."""
        return bool(_PLUGIN.search(self.layer_type))

    @cached_property
    def is_fused_attention(self) -> bool:
        """Whether it computes a whole attention: scores, softmax and weighted sum."""
        if self.carries == ATTENTION or _FUSED_TACTIC.search(self.tactic):
            return True
        return self.layer_type in _GENERATED and bool(_FUSED_NAME.match(self.name))

    @cached_property
    def is_gemm(self) -> bool:
        """Whether it is a plain matrix product."""
        return not self.is_fused_attention and bool(
            self.carries == PRODUCT or _GEMM.search(self.layer_type) or _GEMM.search(self.tactic)
        )

    @cached_property
    def is_convolution(self) -> bool:
        """Whether it is a convolution, which is a matrix product as well: patches of an image, sound."""
        return not self.is_fused_attention and bool(
            _CONVOLUTION.search(self.layer_type) or _CONVOLUTION_TACTIC.search(self.tactic)
        )

    @cached_property
    def is_heavy(self) -> bool:
        """Whether it does the work an engine is built for: products, attention, or a hidden region."""
        generated = self.layer_type not in ("", "kgen") or self.name.startswith("__")
        product = self.is_gemm or (generated and bool(_GENERATED_PRODUCT.search(self.name)))
        return product or self.is_convolution or self.is_fused_attention or self.is_opaque

    @cached_property
    def is_softmax(self) -> bool:
        """Whether it computes a softmax."""
        if self.is_fused_attention or self.is_gemm:
            return False
        generated = self.name if self.name.startswith("__myl") else ""
        return any(_SOFTMAX.search(text) for text in (self.layer_type, self.tactic, generated))

    @cached_property
    def is_opaque(self) -> bool:
        """Whether it stands for a whole region whose kernels are not told (8.6)."""
        return self.layer_type == "Myelin" or self.name.startswith("{ForeignNode[")

    @property
    def label(self) -> str:
        """What to call it: the kernel where one is named, else the layer."""
        if self.carries:
            return f"{self.name} (plugin)"
        return self.tactic if self.is_fused_attention and self.tactic else self.name

    @property
    def tensors(self) -> tuple[EngineTensor, ...]:
        """Everything it reads and writes."""
        return self.inputs + self.constants + self.outputs


def dtype_of(text: str) -> str:
    """The short name of a type, found in whatever words TensorRT uses for it.

    Args:
        text: `Half`, `Row major linear FP16 format (kLINEAR)`, `float`, `N/A due to dynamic shapes`.

    Returns:
        `fp16`, `bf16`, `fp32`, ... or `?`.
    """
    for name, pattern in _DTYPE_PATTERNS:
        if pattern.search(text):
            return name
    return UNKNOWN


def onnx_nodes_of(metadata: str) -> tuple[str, ...]:
    """The node names in a layer's metadata, `[ONNX Layer: a]` each; their separator differs by version."""
    names = re.findall(r"\[ONNX Layer: (.*?)\](?=\x1f|\x1e|\[ONNX Layer: |\s*$)", metadata)
    return tuple(dict.fromkeys(names or _old_names(metadata)))


def _old_names(metadata: str) -> list[str]:
    """Version 8.6 joins the names of its own layers by `+`, each made from a node's name and what it does."""
    parts = [part.strip() for part in metadata.split("+") if part.strip()]
    bare = [_LAYER_SUFFIX.sub("", _LAYER_PREFIX.sub("", part)) for part in parts]
    return [name for pair in zip(parts, bare, strict=True) for name in pair]


def profile_of(texts: Iterable[str]) -> int:
    """The optimisation profile a group of names belongs to; names of profile 0 carry no mark."""
    marks = [int(match) for text in texts for match in _PROFILE.findall(text)]
    return max(marks, default=0)


def without_profile(name: str) -> str:
    """A name as the graph has it, without the mark of its profile."""
    return _PROFILE.sub("", name).strip()


def kernels_from_profile(names: Iterable[str], *, profile: int = 0) -> list[Kernel]:
    """Take the kernels that a profiler saw on the device in one run of the engine.

    Args:
        names: Kernel names in launch order, once per launch.
        profile: The optimisation profile that was run.
    """
    return [Kernel(name=name, tactic=name, profile=profile, source="profile") for name in names]
