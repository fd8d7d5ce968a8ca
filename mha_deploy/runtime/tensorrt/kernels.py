"""What TensorRT reports of an engine: its kernels, and tensors that are too large."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from msgspec import Struct

from mha_deploy.runtime.tensorrt.versions import EngineError
from mha_deploy.status import EvidenceSource

# -- The kernels of an engine, in one form for all versions of TensorRT ----------------------------

UNKNOWN = "?"
ATTENTION, MATMUL, ELEMENTWISE = "attention", "matmul", "elementwise"

# Every spelling of a type: enum names, the inspector's text, the plan's own names.
_DTYPE = re.compile(
    r"(?P<bf16>bfloat16|bf16|\bb16\b)|(?P<fp16>\bhalf\b|fp16|float16)|(?P<fp8>fp8|e4m3|e8m0)"
    r"|(?P<fp4>fp4|e2m1)|(?P<fp32>\bfloat\b|fp32|float32)|(?P<fp64>\bdouble\b|fp64)"
    r"|(?P<int64>int64)|(?P<int32>int32)|(?P<uint8>uint8)|(?P<int8>int8)|(?P<int4>int4)|(?P<bool>\bbool\b)",
    re.IGNORECASE,
)

FLOATING = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4")

# Kernel names are TensorRT's own, but layer names are made from the graph's: a node called `mha` must not
# pass for a fused kernel. So the first pattern reads only tactics, and the narrow one only Myelin's names.
# Each alternative is the whole name of a kernel that computes both matmuls and the softmax: `mha`, `fmha`,
# `sdpa` or `flash` in a name proves nothing, since kernels beside an attention are named after it.
_TYPED = r"(?:fp16|bf16|fp32|f16|f32|fp8|e4m3|e5m2|int8)"
_FUSED_TACTIC = re.compile(
    rf"_ge(?:mm|mv)_mha_v\d+(?:_{_TYPED})*_0x[0-9a-f]+(?:_vec\w*)?"  # Myelin, from version 10 on
    r"|__my[le]_bb\d+_\d+_(?:[A-Z][a-z]*)*mha\d+"  # Myelin of 8.6: `__myl_bb0_4_TraMulmha0`
    rf"|(?:fmha|fused_multihead_(?:cross_)?attention)_(?:\w+_)?{_TYPED}_\w*sm_?\d+\w*"
    r"|cudnn_generated_\w+_sdpa_sm\d+_flash_fprop_\w+"
    r"|flash_fwd(?:_splitkv)?(?:_sm\d+)?_kernel"
)
_BESIDE_ATTENTION = re.compile(
    r"norm|transpos|permut|reformat|copy|memset|convert|prepar|pack(?!ed)|reduc|combin|seqlen|rope|rotary|updat"
    r"|cache|expand|quant|init|fill|get_|bwd|backward|dgrad|(?<!custom_)mask(?!ed)",
    re.IGNORECASE,
)
_DECORATION = re.compile(
    r"^(?:void )?(?:\w+::)*"
)  # of a name that a compiler wrote: what it returns, its place
_FUSED_NAME = re.compile(r"^_ge(mm|mv)_mha_v\d+\w*_myl\d+_\d+(?: \[profile \d+\])?$")
_GENERATED = ("kgen", "")
_GEMM = re.compile(
    r"gemm|gemv|mat(?:rix)?_?mul|einsum|fully_?connected|nvjet|cutlass\w*_(?:tensorop|wmma|simt|wgmma)"
    r"|tensorop_[a-z]\d+|(?<![a-z])b?mm(?![a-z])",
    re.IGNORECASE,
)
_CONVOLUTION = re.compile(r"convolution|correlation|corrltn|deconv", re.IGNORECASE)
_CONVOLUTION_TACTIC = re.compile(r"fprop|dgrad|winograd|cudnn_|conv(?!ert)", re.IGNORECASE)
# Words of their own: `fc` is also in the middle of `ErfCast`.
_GENERATED_MATMUL = re.compile(
    r"^__(my[le]_(\w*?[_\d])?)?(fc|corr|matmul|gemm|gemv|dot(?![a-z]))", re.IGNORECASE
)
# Myelin names the kernels that it generates after their operators, in four letters or (8.6) in three.
_GENERATED_NAME = re.compile(r"^__my[le]_(?:bb\d+_\d+_)?([A-Za-z0-9]*?)(?:_0x[0-9a-f]+\w*|_myl\d+_\d+|\d*)?$")
_MATMUL_OPERATORS = " fc corr matm matmul mat gemm gem gemv dot bmm mm eins "
# What a matmul may be generated as: elementwise multiplications that are then added, or a single one.
# `etc` stands for operators that the name leaves out.
_PRODUCTS, _SUMS = frozenset({"mul", "prod", "etc"}), frozenset({"sum", "redu", "mean", "etc"})
_SMALL_OPERATORS = (
    " abs acos add and arg atan bitw cast ceil clam clip comp conc cos cosh cums div eql erf etc exp expa "
    "fill flat floo gath gelu ge gt gte gtr hard iden inse inv iota isin isna le log lrel lt lte max maxr "
    "mean min minr mish mod move mul ne neg neq nonz nop norm not one or pad perm pow prod quan reci rect "
    "redu relu repl resh reve rms root roun rsqr rsqrt scal scat sele shap shif sigm sign silu sin sinh "
    "slic soft sort spli splt sqrt sque sub sum swis tan tanh tile topk tran trun unsq wher xor zero "
)
_SMALL_KERNEL = re.compile(
    r"permut|transpos|copy|reformat|shuffle|pointwise|elementwise|unary|identity|no_?op|constant|reduc"
    r"|scatter|gather|concat|slice|select|scale|cast|convert|norm|soft_?max|top_?k|sort|fill|memset|memcpy"
    r"|padding|relu|gelu|sigmoid|tanh|activation|rotary|embedding|quantize|iota|scan|combine|shape|signal|wait",
    re.IGNORECASE,
)
_SOFTMAX = re.compile(r"(?i:soft_?max|exp_?norm)|Maxr?\w*Sub\w*Exp|SubExp|ExpSum")
_SOFTMAX_OPERATORS = frozenset({"soft", "sof"})
_PLUGIN = re.compile(r"plugin|custom_layer", re.IGNORECASE)
_LAYER_PREFIX = re.compile(r"^shuffle_(?:output|input)_(?:\d+_)?")
_LAYER_SUFFIX = re.compile(r"_(?:matrix_multiply|reshape|transpose|elementwise|softmax)$")
_PROFILE = re.compile(r"\[profile (\d+)\]")


@dataclass(frozen=True, kw_only=True)
class EngineTensor:
    """A tensor at the border of a kernel."""

    name: str
    dtype: str = UNKNOWN
    shape: tuple[int, ...] = ()  # -1 for a dynamic size


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One step of an engine, as TensorRT names it."""

    name: str
    layer_type: str = ""
    tactic: str = ""  # the kernel that was chosen
    onnx_nodes: tuple[str, ...] = ()
    inputs: tuple[EngineTensor, ...] = ()
    outputs: tuple[EngineTensor, ...] = ()
    constants: tuple[EngineTensor, ...] = ()
    profile: int = 0
    source: EvidenceSource | None = None  # that reports it
    plugin_role: str = ""  # what a plugin layer computes: attention, matmul or elementwise
    multiplies_in: str = UNKNOWN  # the type that it states to multiply in, where it rounds its inputs itself
    is_traced: bool = False  # whether the source keeps a record of all nodes that a kernel computes

    @property
    def is_plugin(self) -> bool:
        """Whether it is a plugin layer."""
        return bool(_PLUGIN.search(self.layer_type))

    @cached_property
    def is_fused_attention(self) -> bool:
        """Whether it computes a whole attention: both matmuls and the softmax."""
        if self.is_plugin:  # of a library that is not this project's, nothing is known but its name
            return self.plugin_role == ATTENTION
        # What its template is made of proves nothing.
        tactic = _DECORATION.sub("", re.split(r"[<(]", self.tactic, maxsplit=1)[0])
        if _FUSED_TACTIC.fullmatch(tactic):
            return not _BESIDE_ATTENTION.search(tactic)
        named = self.layer_type in _GENERATED and not self.tactic
        return self.plugin_role == ATTENTION or (named and bool(_FUSED_NAME.match(self.name)))

    @cached_property
    def is_gemm(self) -> bool:
        """Whether it is a plain matmul."""
        named = self.plugin_role == MATMUL or _GEMM.search(self.layer_type) or _GEMM.search(self.tactic)
        return bool(named) and not (self.is_fused_attention or self.is_foreign_plugin)

    @cached_property
    def is_convolution(self) -> bool:
        """Whether it is a convolution, which is a matmul as well: patches of an image, sound."""
        named = _CONVOLUTION.search(self.layer_type) or _CONVOLUTION_TACTIC.search(self.tactic)
        return bool(named) and not self.is_fused_attention

    @cached_property
    def is_heavy(self) -> bool:
        """Whether it does the work an engine is built for: matmuls, attention, or a hidden region."""
        if self.is_gemm or self.is_convolution or self.is_fused_attention or self.is_opaque:
            return True
        generated = self.layer_type not in _GENERATED or self.name.startswith("__")
        return generated and (
            bool(_GENERATED_MATMUL.search(self.name))
            or any(f" {word} " in _MATMUL_OPERATORS for word in self.operators)
        )

    @property
    def is_matmul(self) -> bool:
        """Whether it is a matmul or a convolution of its own, by its name."""
        return self.is_heavy and not (self.is_fused_attention or self.is_opaque)

    @property
    def is_foreign_plugin(self) -> bool:
        """Whether it is a plugin layer of which is not known what it computes."""
        return self.is_plugin and not self.plugin_role

    @cached_property
    def operators(self) -> tuple[str, ...]:
        """The operators in the name of a kernel that Myelin generates; none for others."""
        found = _GENERATED_NAME.match(self.name) or _GENERATED_NAME.match(self.tactic)
        return tuple(word.lower() for word in re.findall(r"[A-Z][a-z]*|[a-z]+", found[1])) if found else ()

    @property
    def can_multiply(self) -> bool:
        """Whether a matmul may be among what its name shows, written as elementwise multiplications."""
        return not (self.is_plugin or _PRODUCTS.isdisjoint(self.operators))

    @property
    def can_add_products(self) -> bool:
        """Whether a matmul of more than one term may be among what its name shows."""
        return self.can_multiply and not _SUMS.isdisjoint(self.operators)

    @cached_property
    def is_small(self) -> bool:
        """Whether its name shows that it only moves or maps data, or reduces it."""

        def is_operator(word: str) -> bool:
            return f" {word} " in _SMALL_OPERATORS or (len(word) == 3 and f" {word}" in _SMALL_OPERATORS)

        if self.is_heavy or self.is_plugin:
            return self.plugin_role == ELEMENTWISE
        if is_operator(self.layer_type.lower()) or _SMALL_KERNEL.search(self.layer_type):
            return True
        if _GENERATED_NAME.match(self.name) is None:
            return bool(_SMALL_KERNEL.search(self.tactic))
        return bool(self.operators) and all(map(is_operator, self.operators))

    @cached_property
    def is_softmax(self) -> bool:
        """Whether it computes a softmax."""
        if self.is_fused_attention or self.is_gemm:
            return False
        generated = self.name if self.name.startswith("__my") else ""
        if not _SOFTMAX_OPERATORS.isdisjoint(self.operators):
            return True
        return any(_SOFTMAX.search(text) for text in (self.layer_type, self.tactic, generated))

    @cached_property
    def is_opaque(self) -> bool:
        """Whether it is a whole region whose kernels are not reported (8.6)."""
        return self.layer_type == "Myelin" or self.name.startswith("{ForeignNode[")

    @property
    def label(self) -> str:
        """Its name in messages: the kernel where it is fused attention, else the layer."""
        if self.plugin_role:
            return f"{self.name} (plugin)"
        return self.tactic if self.is_fused_attention and self.tactic else self.name

    @property
    def tensors(self) -> tuple[EngineTensor, ...]:
        """Everything it reads and writes."""
        return self.inputs + self.constants + self.outputs


def dtype_of(text: str) -> str:
    """The short name of a type, or `?`, from any spelling: `Half`, `Row major linear FP16 format`, ..."""
    match = _DTYPE.search(text)
    return match.lastgroup or UNKNOWN if match else UNKNOWN


_TRACE = "[ONNX Layer: "


def onnx_nodes_of(metadata: str) -> tuple[str, ...]:
    """The node names in a layer's metadata, `[ONNX Layer: a]` each; their separator differs by version."""
    names = re.findall(r"\[ONNX Layer: (.*?)\](?:__\w+)?(?=\x1f|\x1e|\[ONNX Layer: |\s*$)", metadata)
    if not names:
        # 8.6 joins the names of its own layers by `+`, each made from a node's name and what it does.
        for part in filter(None, map(str.strip, metadata.split("+"))):
            names += [part, _LAYER_SUFFIX.sub("", _LAYER_PREFIX.sub("", part))]
    return tuple(dict.fromkeys(names))


def _profile_of(texts: Iterable[str]) -> int:
    """The optimization profile a group of names belongs to; names of profile 0 carry no mark."""
    return max((int(match) for text in texts for match in _PROFILE.findall(text)), default=0)


# -- Kernels from the inspector's JSON and from the layer records of the builder's log -------------

_REGION = re.compile(r"_myl(\d+)_\d+$")
_RECORD = re.compile(r"Name: (?P<name>.*?), LayerType: (?P<type>[^,]*), Inputs: \[(?P<rest>.*)$")
_TACTIC = re.compile(r"TacticName: (.*?), (?:StreamId|Metadata)")
_BODY = re.compile(r"\{ Name: (.*?) \}(?=[,\]])")
_OLD_LINE = re.compile(r"Layer\((?P<type>[^)]*)\): (?P<name>.*), Tactic: (?P<tactic>[^,]*), (?P<io>.*)$")
_OLD_TENSOR = re.compile(
    r"(?P<name>[^,(\[]+?(?: \[profile \d+\])?) ?[\[(](?P<dtype>[A-Z]\w*)[\[(](?P<shape>[^\])]*)[\])]+"
)


def kernels_from_inspector(text: str) -> list[Kernel]:
    """The kernels in the JSON of `EngineInspector.get_engine_information`, of any version; one per layer."""
    try:
        # Not strict: names of nodes are joined by a bare control character.
        layers = json.loads(text, strict=False)["Layers"]
    except (ValueError, KeyError, TypeError) as cause:
        problem = "This is not the JSON of TensorRT's engine inspector."
        raise EngineError(problem, got=text[:80], hint="use LayerInformationFormat.JSON") from cause
    records = ({"Name": each} if isinstance(each, str) else each for each in layers)
    return _with_profiles([_kernel(each, EvidenceSource.INSPECTOR) for each in records])


def kernels_from_log(texts: Iterable[str]) -> list[Kernel]:
    """The kernels in the layer records of a verbose build log, the last ones if there are several."""
    records: list[dict[str, Any]] = []
    old: list[dict[str, Any]] = []
    for text in texts:
        if "Layers:\n" in text:
            records = list(_records(text))
        elif "Layer(" in text:
            old += _old_records(text)
    return _with_profiles([_kernel(record, EvidenceSource.LOG) for record in records or old])


def _kernel(record: Mapping[str, Any], source: EvidenceSource) -> Kernel:
    """A kernel from the record of a layer, whose fields have the inspector's names."""

    def tensors(key: str) -> tuple[EngineTensor, ...]:
        return tuple(
            EngineTensor(
                name=str(tensor.get("Name", "")),
                dtype=dtype_of(str(tensor.get("Datatype") or tensor.get("Format/Datatype", ""))),
                shape=tuple(int(size) for size in tensor.get("Dimensions") or ()),
            )
            for tensor in record.get(key) or ()
            if isinstance(tensor, Mapping)
        )

    name, layer_type, tactic, metadata = (
        str(record.get(key, "")) for key in ("Name", "LayerType", "TacticName", "Metadata")
    )
    nodes = onnx_nodes_of(metadata)
    # A layer's name may have them: `a + b`. That of a region has only its first and last node.
    if not nodes and not name.startswith("{ForeignNode[") and not _REGION.search(name):
        nodes = tuple(_PROFILE.sub("", part).strip() for part in name.split(" + "))
    return Kernel(
        name=name,
        layer_type=layer_type,
        tactic=tactic,
        onnx_nodes=nodes,
        inputs=tensors("Inputs"),
        outputs=tensors("Outputs"),
        constants=tensors("Constants"),
        source=source,
        is_traced=_TRACE in metadata,
    )


def _records(text: str) -> Iterator[dict[str, Any]]:
    """The records of a log: `Name: a, LayerType: kgen, Inputs: [{ Name: x, Dimensions: [1,8] }], ...`."""

    def tensors(bodies: str) -> Iterator[dict[str, Any]]:
        for body in _BODY.findall(bodies):
            dtype = re.search(r"(?<!/)\bDatatype: (\w+)", body) or re.search(r"Format/Datatype: (.*)$", body)
            dims = re.search(r"Dimensions: \[([-\d,\s]*)\]", body)
            name = re.split(r", (?:Location|Dimensions): ", body, maxsplit=1)[0]
            yield {"Name": name, "Datatype": dtype and dtype[1], "Dimensions": dims and _shape(dims[1])}

    for line in text.split("Layers:\n", 1)[1].split("\n\n")[0].splitlines():
        match, tactic = _RECORD.match(line), _TACTIC.search(line)
        if match is None:
            continue
        records, _, metadata = match["rest"].partition(", Metadata: ")
        inputs, _, rest = records.partition("], Outputs: [")
        inputs, _, constants = inputs.partition("], Constants: [")
        record = {"Name": match["name"], "LayerType": match["type"], "Metadata": metadata}
        record |= {"TacticName": tactic[1]} if tactic else {}
        outputs = rest.split(", TacticName: ")[0]
        for key, bodies in (("Inputs", f"{inputs}]"), ("Constants", f"{constants}]"), ("Outputs", outputs)):
            record[key] = tensors(bodies)
        yield record


def _old_records(text: str) -> Iterator[dict[str, Any]]:
    """Lines of 8.6: `Layer(Myelin): {ForeignNode[a...b]}, Tactic: 0x0, x (Half[1,8]) -> y (Half[1,8])`."""
    for match in filter(None, (_OLD_LINE.match(line.strip()) for line in text.splitlines())):
        inputs, outputs = (
            [
                {"Name": each["name"].strip(), "Datatype": each["dtype"], "Dimensions": _shape(each["shape"])}
                for each in _OLD_TENSOR.finditer(side)
            ]
            for side in match["io"].partition(" -> ")[::2]
        )
        yield {"Name": match["name"], "LayerType": match["type"], "Inputs": inputs, "Outputs": outputs}


def _shape(text: str) -> tuple[int, ...]:
    # `3:4` is three channels in a vector of four.
    return tuple(int(size) for size in re.findall(r"(-?\d+)(?::\d+)?", text))


def _with_profiles(kernels: list[Kernel]) -> list[Kernel]:
    """Give each kernel its profile.

    A kernel of a Myelin region is named after the region, not the profile, and an engine can have several
    regions per profile. The names of the region's inputs contain the profile, so the region decides.
    """
    named: dict[str, list[str]] = defaultdict(list)
    regions = [match[1] if (match := _REGION.search(each.name)) else each.name for each in kernels]
    for region, kernel in zip(regions, kernels, strict=True):
        named[region] += [kernel.name, *(tensor.name for tensor in kernel.tensors)]
    profiles = {region: _profile_of(names) for region, names in named.items()}
    return [replace(each, profile=profiles[region]) for region, each in zip(regions, kernels, strict=True)]


# -- Kernels from the bytes of a plan, without a GPU and without a log -----------------------------

_HEADER, _MAIN, _END = b"header {\n", b"\nmain {\n", b"\n}"

_TENSOR = re.compile(
    r'tensor=\{.*? dims=\{(?P<dims>[^}]*)\}.*? name="(?P<name>[^"]*)".*? type=(?P<dtype>\w+)'
)
_CONSTANT = " const_payload_size="
_STEP = re.compile(r"^\s*(?P<kind>\w+)=\{ name=(?:\"(?P<quoted>(?:[^\"\\]|\\.)*)\"|(?P<bare>\S+))")
_QUOTED = r'"(?:[^"\\]|\\.)*"'


def _field(pattern: str) -> re.Pattern[str]:
    """A field of a line: it is the only group, and nothing inside quotes is taken for one."""
    return re.compile(rf"\b{pattern}|{_QUOTED}")


_LAYERS = _field(rf"layers=({_QUOTED})")
_KERNEL = _field(r"(?:fqn|kernel)=(\S+)")
# Names contain braces, so a list ends at the first brace outside quotes.
_INPUTS = _field(rf"input(?:_args)?=\{{((?:\s*{_QUOTED})*)\s*\}}")
_OUTPUTS = _field(rf"output(?:_args)?=\{{((?:\s*{_QUOTED})*)\s*\}}")

# The plan's names of steps, as the layer records name them.
_KINDS = {"function": "kgen", "fully_connected": "gemm"}


def kernels_from_plan(plan: bytes) -> list[Kernel]:
    """The steps of every readable program in a plan: its text from a header to the end of its main block."""
    kernels: list[Kernel] = []
    start = plan.find(_HEADER)
    while start >= 0:
        following = plan.find(_HEADER, start + 1)
        limit = following if following >= 0 else len(plan)
        main = plan.find(_MAIN, start, limit)
        end = plan.find(_END, main + len(_MAIN), limit) if main >= 0 else -1
        if end >= 0:
            kernels += _kernels(plan[start:end].decode("utf-8", errors="replace"))
        start = following
    return kernels


def _kernels(program: str) -> Iterator[Kernel]:
    head, _, main = program.partition(_MAIN.decode())
    profile = _profile_of([program])
    declared: dict[str, EngineTensor] = {}
    constants = set()
    for match in _TENSOR.finditer(head):
        # A dynamic size is the quoted name of its variable.
        shape = tuple(int(size) if size.isdecimal() else -1 for size in match["dims"].split())
        name = match["name"]
        declared[name] = EngineTensor(name=name, dtype=dtype_of(match["dtype"]), shape=shape)
        if _CONSTANT in match[0]:
            constants.add(name)

    def value(pattern: re.Pattern[str], line: str) -> str:
        return next((found[1] for found in pattern.finditer(line) if found[1] is not None), "")

    def tensors(pattern: re.Pattern[str], line: str) -> list[EngineTensor]:
        names = [name[1:-1] for name in re.findall(_QUOTED, value(pattern, line))]
        # A name that is not declared is a size that is computed meanwhile, not data.
        return [declared[name] for name in names if name in declared]

    for line in main.split("\n"):
        step = _STEP.match(line)
        if step is not None:
            read = tensors(_INPUTS, line)
            yield Kernel(
                name=step["quoted"] or step["bare"] or "",
                layer_type=_KINDS.get(step["kind"], step["kind"]),
                tactic=value(_KERNEL, line),
                is_traced=_TRACE in line,
                onnx_nodes=onnx_nodes_of(re.sub(r'\\(["\\])', r"\1", value(_LAYERS, line)[1:-1])),
                inputs=tuple(tensor for tensor in read if tensor.name not in constants),
                constants=tuple(tensor for tensor in read if tensor.name in constants),
                outputs=tuple(tensors(_OUTPUTS, line)),
                profile=profile,
                source=EvidenceSource.PLAN,
            )


# -- Tensors that TensorRT does not support at the largest sizes, from the warnings of a build -----

MOST_ELEMENTS = 2**31 - 1

_WARNING = re.compile(
    r"(?P<tensor>[^\s:]+): tensor volume exceeds \(2\^31\)-1, dimensions are \[(?P<dims>[^]]*)\]"
)
_TOKEN = re.compile(r"[()]|[^\s(),]+")
_OPERATORS: Mapping[str, Callable[[Iterable[int]], int]] = {"*": math.prod, "+": sum}


class LargeTensor(Struct, frozen=True, kw_only=True):
    """A tensor that is too large at some sizes, as the manifest of an engine records it."""

    tensor: str
    dims: str  # as TensorRT writes them: `1,8,(* 4 S),S`
    axes: dict[str, tuple[str, int]]  # for each axis, an input and the dimension of it that has its size

    def elements(self, shapes: Mapping[str, Sequence[int]]) -> int | None:
        """How many elements it has for inputs of these shapes; None where that is unknown."""
        tokens = _TOKEN.findall(self.dims)[::-1]

        def value(sizes: Mapping[str, int]) -> int:
            token = tokens.pop()
            if token != "(":
                return int(token) if token.isdecimal() else sizes[token]
            combine = _OPERATORS[tokens.pop()]
            terms = []
            while tokens[-1] != ")":
                terms.append(value(sizes))
            tokens.pop()
            return combine(terms)

        found = []
        try:
            sizes = {axis: shapes[name][place] for axis, (name, place) in self.axes.items()}
            while tokens:
                found.append(value(sizes))
        except (KeyError, IndexError):
            return None
        return math.prod(found)

    @property
    def advice(self) -> str:
        """What to do about it."""
        return (
            f"{self.tensor} [{self.dims}] is too large for TensorRT at the largest sizes, and such a call is "
            "refused: build with smaller ones (--profile), or with --attention plugin, which stores no scores"
        )


def large_tensors(texts: Iterable[str], axes: dict[str, tuple[str, int]]) -> tuple[LargeTensor, ...]:
    """The tensors in the warnings of a build, each once; `axes` are those of the graph."""
    matches = (match for text in texts if (match := _WARNING.search(text)))
    found = dict.fromkeys((match["tensor"], match["dims"]) for match in matches)
    return tuple(LargeTensor(tensor=tensor, dims=dims, axes=axes) for tensor, dims in found)


def refuse_large(tensors: Sequence[LargeTensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse a call for which one of these tensors is too large."""
    for tensor in tensors:
        elements = tensor.elements(shapes)
        if elements is not None and elements > MOST_ELEMENTS:
            got = f"{tensor.tensor} with {elements:,} elements, at most {MOST_ELEMENTS:,} are possible"
            hint = "smaller sizes, or an engine that was built with --attention plugin"
            raise EngineError("TensorRT does not support a tensor of this size.", got=got, hint=hint)
