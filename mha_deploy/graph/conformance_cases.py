"""Small graphs that ask a runtime one question each: how does it treat this mask?

Every case is one `Attention` node whose queries, keys, values and mask are graph inputs. All names begin with
the name of the case, so several cases, lowered or not, can stand side by side in one model: a builder that
needs seconds for any engine is then asked once.

ONNX draws `is_causal` from the upper left corner: query 0 sees key 0 only. Without a past there is no
attribute for the lower right corner, in which the last query sees the last key. It is written as a mask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from mha_deploy.errors import DeployError
from mha_deploy.graph.ir import NodeBuilder
from mha_deploy.model.precision import Precision

SENTINEL = -1e4
"""The finite number that many models write for "hidden"."""

_OPSET, _IR_VERSION = 23, 11
_SHORT, _LONG = 40, 72  # on either side of 64, at which most fused kernels cut the keys


@dataclass(frozen=True, kw_only=True)
class MaskInput:
    """The mask of a case.

    Args:
        pattern: Which keys it hides: `scattered`, `closed-rows`, `lower-right`, `padding`, `left-padding`.
        kind: `bool`; or additive, where the number for "hidden" is `-inf` or `sentinel`, and 0 is for "seen";
            or `bias`, where random numbers stand for "seen" and -inf for "hidden".
        axes: Its axes by name, 1 for one that broadcasts.
    """

    pattern: str
    kind: str = "bool"
    axes: str = "B Hq S T"

    @property
    def is_bool(self) -> bool:
        """Whether True means "seen"; numbers are added to the scores."""
        return self.kind == "bool"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question to a runtime.

    Args:
        name: Short name; every name in its graph begins with it.
        about: The question, for people.
        S: Query length.
        T: Key length.
        is_causal: The attribute of the node.
        mask: The mask, if it has one.
        Hq: Query heads.
        Hkv: Key/value heads.
        B: Batch.
        D: Head size.
        diagnostic: Whether it asks what a runtime does by itself, which a lowering may well avoid.
    """

    name: str
    about: str
    S: int = _LONG
    T: int = _LONG
    is_causal: bool = False
    mask: MaskInput | None = None
    Hq: int = 2
    Hkv: int = 2
    B: int = 2
    D: int = 32
    diagnostic: bool = False

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        return float(self.D) ** -0.5

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """The shape of the mask; empty where there is none."""
        axes = self.mask.axes.split() if self.mask is not None else []
        return tuple(1 if axis == "1" else getattr(self, axis) for axis in axes)

    def tensor(self, role: str) -> str:
        """The name in the graph of `q`, `k`, `v`, `mask` or `y`."""
        # Not a slash: that is what a lowering puts between an attention and its parts.
        return f"{self.name}.{role}"


CASES: tuple[Case, ...] = (
    Case(name="causal", about="is_causal, as many queries as keys", is_causal=True),
    Case(
        name="causal-wide", about="is_causal, fewer queries than keys: upper left", S=_SHORT, is_causal=True
    ),
    Case(name="causal-tall", about="is_causal, more queries than keys: upper left", T=_SHORT, is_causal=True),
    Case(
        name="lower-right",
        about="the last query sees the last key, as in decoding: written as a mask",
        S=_SHORT,
        mask=MaskInput(pattern="lower-right", axes="1 1 S T"),
    ),
    Case(
        name="bool-mask",
        about="boolean mask for every head",
        S=_SHORT,
        mask=MaskInput(pattern="scattered"),
    ),
    Case(
        name="additive-mask",
        about="numbers added to the scores, -inf among them",
        S=_SHORT,
        mask=MaskInput(pattern="scattered", kind="bias", axes="1 Hq S T"),
    ),
    Case(
        name="sentinel-mask",
        about="-1e4 for hidden keys",
        S=_SHORT,
        mask=MaskInput(pattern="scattered", kind="sentinel"),
    ),
    Case(
        name="causal-bool-mask",
        about="is_causal and a boolean mask",
        is_causal=True,
        mask=MaskInput(pattern="scattered"),
    ),
    Case(
        name="causal-additive-mask",
        about="is_causal and an additive mask",
        is_causal=True,
        mask=MaskInput(pattern="scattered", kind="bias"),
    ),
    Case(
        name="closed-rows-bool",
        about="queries that see no key by a boolean mask: zeros",
        S=_SHORT,
        mask=MaskInput(pattern="closed-rows"),
    ),
    Case(
        name="closed-rows-inf",
        about="queries that see no key by -inf: zeros",
        S=_SHORT,
        mask=MaskInput(pattern="closed-rows", kind="-inf"),
    ),
    Case(
        name="closed-rows-sentinel",
        about="-1e4 for every key of a query: a shift, which softmax takes out again",
        S=_SHORT,
        mask=MaskInput(pattern="closed-rows", kind="sentinel"),
    ),
    Case(
        name="padding",
        about="every batch row has its own number of keys",
        S=_SHORT,
        mask=MaskInput(pattern="padding", axes="B 1 S T"),
    ),
    Case(
        name="causal-left-padding",
        about="is_causal and padding in front: the first queries see no key, zeros",
        is_causal=True,
        mask=MaskInput(pattern="left-padding", axes="B 1 S T"),
    ),
    Case(
        name="gqa-mask",
        about="grouped heads under a mask for every query head",
        Hq=4,
        mask=MaskInput(pattern="scattered"),
    ),
    Case(
        name="broadcast-queries",
        about="padding mask of one row for all queries",
        S=_SHORT,
        mask=MaskInput(pattern="padding", axes="B 1 1 T"),
    ),
    Case(
        name="broadcast-2d",
        about="mask of queries and keys only",
        S=_SHORT,
        mask=MaskInput(pattern="scattered", axes="S T"),
    ),
    Case(
        name="causal-broadcast",
        about="is_causal and a padding mask of one row for all queries",
        is_causal=True,
        mask=MaskInput(pattern="padding", axes="B 1 1 T"),
    ),
    Case(
        name="own-causal",
        about="where the runtime's own is_causal starts when lengths differ; ONNX: upper left",
        S=_SHORT,
        is_causal=True,
        diagnostic=True,
    ),
)
"""Every case, in the order of the table."""


def case_model(case: Case, precision: Precision) -> ir.Model:
    """The canonical graph of a case."""
    dtype = ir.DataType.from_numpy(precision.numpy)
    shapes = {
        "q": (case.B, case.S, case.Hq * case.D),
        "k": (case.B, case.T, case.Hkv * case.D),
        "v": (case.B, case.T, case.Hkv * case.D),
    }
    inputs = [_value(case.tensor(role), dtype, shape) for role, shape in shapes.items()]
    if case.mask is not None:
        mask_type = ir.DataType.BOOL if case.mask.is_bool else dtype
        inputs.append(_value(case.tensor("mask"), mask_type, case.mask_shape))
    builder = NodeBuilder(case.name)
    y = builder.op(
        "Attention",
        *inputs,
        name=case.name,
        is_causal=int(case.is_causal),
        q_num_heads=case.Hq,
        kv_num_heads=case.Hkv,
        scale=case.scale,
    )
    y.name, y.type, y.shape = case.tensor("y"), ir.TensorType(dtype), ir.Shape(shapes["q"])
    return _model(case.name, inputs, [y], builder.nodes, {"": _OPSET})


def combined(models: Sequence[ir.Model]) -> ir.Model:
    """Several models of cases, as they are or lowered, side by side in one; the given ones are not changed.

    Raises:
        DeployError: They share a name, or are written in different operator sets.
    """
    inputs: list[ir.Value] = []
    outputs: list[ir.Value] = []
    nodes: list[ir.Node] = []
    opsets: dict[str, int] = {}
    for model in models:
        graph = model.clone().graph
        _merge_opsets(opsets, graph.opset_imports)
        nodes += list(graph)
        inputs += list(graph.inputs)
        outputs += list(graph.outputs)
        graph.inputs.clear()
        graph.outputs.clear()
        graph.remove(list(graph))
    _refuse_shared_names([*inputs, *(value for node in nodes for value in node.outputs)])
    return _model("conformance", inputs, outputs, nodes, opsets, min(model.ir_version for model in models))


def _value(name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def _model(
    name: str,
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
    nodes: Sequence[ir.Node],
    opsets: dict[str, int],
    ir_version: int = _IR_VERSION,
) -> ir.Model:
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports=opsets, name=name)
    return ir.Model(graph, ir_version=ir_version)


def _merge_opsets(opsets: dict[str, int], more: dict[str, int]) -> None:
    for domain, version in more.items():
        if opsets.setdefault(domain, version) != version:
            raise DeployError(
                "Models in different operator sets cannot stand side by side.",
                got=f"{domain or 'onnx'} {opsets[domain]} and {version}",
            )


def _refuse_shared_names(values: Sequence[ir.Value]) -> None:
    shared = [name for name, count in Counter(value.name for value in values).items() if count > 1]
    if shared:
        raise DeployError(
            "Models that share names cannot stand side by side.", got=", ".join(map(str, shared))
        )
