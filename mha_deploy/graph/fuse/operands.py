"""Q, K and V as they were before scaling, turning and repeating for the product."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from mha_deploy.graph.fuse.facts import dims_of, is_op, perm_of, same_dim, same_dims, scalar_of


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One side of a product.

    Args:
        value: The tensor.
        letters: The letters of its axes.
        factor: The constant that it was multiplied by.
        group: How often each of its heads was repeated.
    """

    value: ir.Value
    letters: str
    factor: float = 1.0
    group: int = 1

    def dim(self, letter: str) -> int | ir.SymbolicDim:
        """The size of an axis; 1 for an axis that the tensor does not have."""
        dims = dims_of(self.value) or ()
        at = self.letters.find(letter)
        return dims[at] if 0 <= at < len(dims) else 1


def unwrap(operand: Operand, *, wanted: str, head: str | None, scaled: bool = True) -> Operand:
    """Walk back over layout, constant factors and repeated heads.

    Args:
        operand: The side of a product.
        wanted: The order of axes in which Attention takes it. A tensor that has it already is taken there.
        head: The letter of the heads, if there is one.
        scaled: Whether a constant factor may be taken off.
    """
    ready = operand if operand.letters == wanted else None
    while True:
        turned = _before_transpose(operand)
        if turned is not None:
            operand = turned
            if ready is None and operand.letters == wanted:
                ready = operand
            continue
        inner = _before_factor(operand) if scaled else None
        inner = inner or (_before_repeat(operand, head) if head else None)
        if inner is None:
            return ready or operand
        operand = inner
        ready = operand if operand.letters == wanted else None


def _before_transpose(operand: Operand) -> Operand | None:
    node = operand.value.producer()
    if is_op(node, "Identity") and node is not None and node.inputs[0] is not None:
        return replace(operand, value=node.inputs[0])
    if is_op(node, "Transpose") and node is not None and node.inputs[0] is not None:
        letters = [""] * len(operand.letters)
        for at, axis in enumerate(perm_of(node)):
            letters[axis] = operand.letters[at]
        return replace(operand, value=node.inputs[0], letters="".join(letters))
    source = _before_flat_turn(operand.value)
    if source is None:
        return None
    order = operand.letters
    return replace(operand, value=source, letters=order[:-2] + order[-1] + order[-2])


def _before_flat_turn(value: ir.Value) -> ir.Value | None:
    """What `Reshape(Transpose(Reshape(x)))` turned, where it only swaps the last two axes of x.

    The exporter writes scaled_dot_product_attention so. The shapes prove it: the first reshape keeps the last
    two axes and joins the others, the second takes them apart again.
    """
    chain = [value]
    for op_type in ("Reshape", "Transpose", "Reshape"):
        node = chain[-1].producer()
        if node is None or not is_op(node, op_type) or node.inputs[0] is None:
            return None
        chain.append(node.inputs[0])
    turn = chain[1].producer()
    if turn is None or perm_of(turn) != [0, 2, 1]:
        return None
    result, _, flat, source = (dims_of(each) for each in chain)
    if result is None or flat is None or source is None or len(source) != len(result) or len(flat) != 3:
        return None
    swapped = (*source[:-2], source[-1], source[-2])
    return chain[-1] if same_dims(result, swapped) and same_dims(flat[1:], source[-2:]) else None


def _before_factor(operand: Operand) -> Operand | None:
    node = operand.value.producer()
    if node is None or not is_op(node, "Mul", "Div"):
        return None
    first, second = node.inputs
    factor = scalar_of(second)
    if factor is None and node.op_type == "Mul":
        first, second, factor = second, first, scalar_of(first)
    if factor is None or not _keeps_shape(first, second, operand.value):
        return None
    if first is None or not factor or len(dims_of(first) or ()) != len(operand.letters):
        return None
    factor = 1.0 / factor if node.op_type == "Div" else factor
    return replace(operand, value=first, factor=operand.factor * factor)


def _keeps_shape(value: ir.Value | None, factor: ir.Value | None, result: ir.Value) -> bool:
    """Whether multiplying by a factor does not copy a value over a larger batch or more heads."""
    sizes = dims_of(factor) if factor is not None else None
    if sizes is not None and all(size == 1 for size in sizes):
        return True
    return value is not None and same_dims(dims_of(value) or (), dims_of(result) or ())


def _before_repeat(operand: Operand, head: str) -> Operand | None:
    return _before_interleave(operand, head) or _before_expand(operand, head)


def _before_interleave(operand: Operand, head: str) -> Operand | None:
    """The heads before `x[:, :, None].expand(…).reshape(…)`, which repeats each of them in place."""
    chain = [operand.value]
    for op_types in (("Reshape",), ("Expand", "Tile"), ("Unsqueeze", "Reshape")):
        node = chain[-1].producer()
        if node is None or not is_op(node, *op_types) or node.inputs[0] is None:
            return None
        chain.append(node.inputs[0])
    result, wide, thin, source = (dims_of(each) for each in chain)
    if result is None or wide is None or thin is None or source is None:
        return None
    at = operand.letters.index(head) if head in operand.letters else -1
    if at < 0 or len(source) != len(operand.letters) or len(wide) != len(source) + 1:
        return None
    heads, group = source[at], wide[at + 1]
    if not isinstance(heads, int) or not isinstance(group, int):
        return None
    proved = (
        same_dims(thin, (*source[: at + 1], 1, *source[at + 1 :]))
        and same_dims(wide, (*source[: at + 1], group, *source[at + 1 :]))
        and same_dims(result, (*source[:at], heads * group, *source[at + 1 :]))
    )
    return replace(operand, value=chain[-1], group=operand.group * group) if proved else None


def _before_expand(operand: Operand, head: str) -> Operand | None:
    """One head, before it was copied to all of them."""
    node = operand.value.producer()
    if node is None or not is_op(node, "Expand") or node.inputs[0] is None:
        return None
    result, source = dims_of(operand.value), dims_of(node.inputs[0])
    at = operand.letters.find(head)
    if result is None or source is None or len(source) != len(result) or at < 0 or source[at] != 1:
        return None
    copies = result[at]
    others = all(same_dim(a, b) for axis, (a, b) in enumerate(zip(result, source, strict=True)) if axis != at)
    if not others or not isinstance(copies, int):
        return None
    return replace(operand, value=node.inputs[0], group=operand.group * copies)
