"""The two products of attention, in the letters of an einsum whichever way they are spelled."""

from __future__ import annotations

import string
from dataclasses import dataclass

import onnx_ir as ir

from mha_deploy.graph.fuse.facts import dims_of, is_constant, is_op
from mha_deploy.graph.fuse.records import NotFused


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product of two tensors, each axis named by a letter.

    Args:
        node: The MatMul or Einsum.
        values: Its two operands.
        letters: The letters of their axes.
        out: The letters of the result.
    """

    node: ir.Node
    values: tuple[ir.Value, ir.Value]
    letters: tuple[str, str]
    out: str

    @property
    def summed(self) -> set[str]:
        """The letters that are summed over."""
        return (set(self.letters[0]) & set(self.letters[1])) - set(self.out)

    def renamed(self, names: dict[str, str]) -> Product:
        """The same product with other letters."""
        left, right, out = (
            "".join(names.get(letter, letter) for letter in text) for text in (*self.letters, self.out)
        )
        return Product(node=self.node, values=self.values, letters=(left, right), out=out)


def is_product(node: ir.Node | None) -> bool:
    """Whether a node multiplies two tensors that are both computed: a weight makes it a projection."""
    return is_op(node, "MatMul", "Einsum") and node is not None and _is_computed(node)


def _is_computed(node: ir.Node) -> bool:
    if len(node.inputs) != 2:
        return False
    # A constant of three or more axes is a learned query, of two a weight.
    return all(
        value is not None and (not is_constant(value) or len(dims_of(value) or ()) > 2)
        for value in node.inputs
    )


def read_product(node: ir.Node) -> Product:
    """Read a MatMul or an Einsum."""
    left, right = node.inputs
    if left is None or right is None:
        raise NotFused(f"The product {node.name} lacks an operand.")
    ranks = [len(dims_of(value) or ()) for value in (left, right)]
    if is_op(node, "MatMul"):
        if ranks[0] != ranks[1] or ranks[0] not in (3, 4):
            raise NotFused(
                f"The product {node.name} is of tensors with {ranks[0]} and {ranks[1]} axes, not 4."
            )
        batch = "bh" if ranks[0] == 4 else "b"
        return Product(
            node=node, values=(left, right), letters=(f"{batch}sd", f"{batch}dt"), out=f"{batch}st"
        )
    letters, out = _read_equation(node, ranks)
    if any(len(set(text)) != len(text) for text in (*letters, out)):
        raise NotFused(f"The einsum {node.name} takes a diagonal.")
    return Product(node=node, values=(left, right), letters=letters, out=out)


def _read_equation(node: ir.Node, ranks: list[int]) -> tuple[tuple[str, str], str]:
    equation = (node.attributes.get_string("equation") or "").replace(" ", "")
    inputs, arrow, out = equation.partition("->")
    left, comma, right = inputs.partition(",")
    if not arrow or not comma or "," in right:
        raise NotFused(f"The einsum {node.name} is not a product of two tensors with a named result.")
    free = [letter for letter in string.ascii_letters if letter not in equation]
    hidden = max(ranks[0] - len(left.replace("...", "")), ranks[1] - len(right.replace("...", "")), 0)
    dots = "".join(free[:hidden])
    texts = []
    for text, rank in ((left, ranks[0]), (right, ranks[1]), (out, None)):
        here = hidden if rank is None else rank - len(text.replace("...", ""))
        texts.append(text.replace("...", dots[len(dots) - here :] if here else ""))
    return (texts[0], texts[1]), texts[2]
