"""Small graphs that test one property of a runtime each: how does it apply this mask?

Every case is one `Attention` node whose queries, keys, values and mask are graph inputs. All names begin with
the name of the case, so that several cases, lowered or not, can be one model: an engine build takes seconds.

ONNX aligns `is_causal` to the upper left corner: query 0 attends to key 0 only. Without a past there is no
attribute for the lower right corner (the last query attends to the last key). It is written as a mask.
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
"""The finite bias that many models give to masked keys."""

_OPSET, _IR_VERSION = 23, 11
_SHORT, _LONG = 40, 72  # on either side of 64, at which most fused kernels cut the keys
_BLOCKS = 400  # left padding of a third of it is more than 128 keys


@dataclass(frozen=True, kw_only=True)
class MaskInput:
    """The mask of a case.

    Args:
        pattern: Which keys are masked: `scattered`, `fully-masked`, `lower-right`, `padding`, `left-padding`.
        kind: `bool`; `-inf` or `sentinel`, an additive mask with that number and 0; or `bias`, an additive
            mask with -inf and random numbers.
        axes: Its axes by name, 1 for one that broadcasts.
    """

    pattern: str
    kind: str = "bool"
    axes: str = "B Hq S T"

    @property
    def is_bool(self) -> bool:
        """Whether the mask is boolean; others are added to the scores."""
        return self.kind == "bool"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case of the conformance table.

    Args:
        name: Short name; every name in its graph begins with it.
        about: What it tests, as text.
        is_causal: The attribute of the node.
        mask: The mask, if it has one.
        diagnostic: Whether it tests a feature of the runtime that a lowering may avoid.
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
        # Not a slash: a lowering separates an attention and its parts by that.
        return f"{self.name}.{role}"


CASES: tuple[Case, ...] = (
    Case(name="causal", about="is_causal, as many queries as keys", is_causal=True),
    Case(
        name="causal-wide", about="is_causal, fewer queries than keys: upper left", S=_SHORT, is_causal=True
    ),
    Case(name="causal-tall", about="is_causal, more queries than keys: upper left", T=_SHORT, is_causal=True),
    Case(
        name="lower-right",
        about="the last query attends to the last key, as in decoding: written as a mask",
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
        about="-1e4 for masked keys",
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
        name="fully-masked-bool",
        about="queries fully masked by a boolean mask: zeros",
        S=_SHORT,
        mask=MaskInput(pattern="fully-masked"),
    ),
    Case(
        name="fully-masked-inf",
        about="queries fully masked by -inf: zeros",
        S=_SHORT,
        mask=MaskInput(pattern="fully-masked", kind="-inf"),
    ),
    Case(
        name="fully-masked-sentinel",
        about="-1e4 for every key of a query: a shift, which softmax cancels",
        S=_SHORT,
        mask=MaskInput(pattern="fully-masked", kind="sentinel"),
    ),
    Case(
        name="padding",
        about="every batch element has its own number of keys",
        S=_SHORT,
        mask=MaskInput(pattern="padding", axes="B 1 S T"),
    ),
    Case(
        name="causal-left-padding",
        about="is_causal and left padding: the first queries are fully masked, zeros",
        is_causal=True,
        mask=MaskInput(pattern="left-padding", axes="B 1 S T"),
    ),
    Case(
        name="masked-blocks",
        about="every key of the first blocks of 64 or 128 is masked, as by left padding",
        S=_SHORT,
        T=_BLOCKS,
        mask=MaskInput(pattern="left-padding", axes="B 1 S T"),
    ),
    Case(
        name="masked-blocks-inf",
        about="the same by -inf",
        S=_SHORT,
        T=_BLOCKS,
        mask=MaskInput(pattern="left-padding", kind="-inf", axes="B 1 S T"),
    ),
    Case(
        name="gqa-mask",
        about="grouped heads under a mask for every query head",
        Hq=4,
        mask=MaskInput(pattern="scattered"),
    ),
    Case(
        name="broadcast-queries",
        about="padding mask that broadcasts over the queries",
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
        about="is_causal and a padding mask that broadcasts over the queries",
        is_causal=True,
        mask=MaskInput(pattern="padding", axes="B 1 1 T"),
    ),
    Case(
        name="own-causal",
        about="the corner of the runtime's own is_causal when lengths differ; ONNX: upper left",
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
    """Several models of cases, as they are or lowered, as one; the models are not changed.

    Raises:
        DeployError: They share a name, or have different operator sets.
    """
    inputs: list[ir.Value] = []
    outputs: list[ir.Value] = []
    nodes: list[ir.Node] = []
    opsets: dict[str, int] = {}
    for model in models:
        graph = model.clone().graph
        for domain, version in graph.opset_imports.items():
            if opsets.setdefault(domain, version) != version:
                raise DeployError(
                    "Models with different operator sets cannot be combined.",
                    got=f"{domain or 'onnx'} {opsets[domain]} and {version}",
                )
        nodes += list(graph)
        inputs += list(graph.inputs)
        outputs += list(graph.outputs)
        graph.inputs.clear()
        graph.outputs.clear()
        graph.remove(list(graph))
    values = [*inputs, *(value for node in nodes for value in node.outputs)]
    shared = [str(name) for name, count in Counter(value.name for value in values).items() if count > 1]
    if shared:
        raise DeployError("Models that share names cannot be combined.", got=", ".join(shared))
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
