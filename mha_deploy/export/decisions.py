"""Find the integers that a program decides on by floating-point arithmetic over integers.

T5 sorts distances into buckets by their logarithm: integers become floats, floats become integers. Which
bucket a distance at the border falls into is rounding, and it is part of the model: an oracle that rounds
less would read another row of the table, and be another function. Such arithmetic keeps its precision.
"""

from __future__ import annotations

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

_LEARNT = (InputKind.PARAMETER, InputKind.USER_INPUT)


def deciding_nodes(program: ExportedProgram) -> frozenset[str]:
    """The FX nodes of floats that come from integers and constants alone, and that integers come from.

    What hangs on inputs or weights in floating point is not among them: there, less rounding is the truth.
    """
    computed = [node for node in program.graph.nodes if node.op == "call_function"]
    given = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind in _LEARNT}
    plain: set[Node] = set()
    for node in computed:
        sources = [each for each in node.all_input_nodes if _is_float(each)]
        if _is_float(node) and all(each in plain or _is_constant(each, given) for each in sources):
            plain.add(node)
    deciding: set[Node] = set()
    for node in reversed(computed):
        if node in plain and any(user in deciding or _is_discrete(user) for user in node.users):
            deciding.add(node)
    return frozenset(node.name for node in deciding)


def _is_constant(node: Node, given: set[str]) -> bool:
    return node.op == "get_attr" or (node.op == "placeholder" and node.name not in given)


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_discrete(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()
