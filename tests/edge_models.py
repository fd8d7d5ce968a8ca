"""Modules at the edge of the contract, and factories a little beyond it."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from mha_deploy.model.deployable import Deployable, Example

E, AXES = 32, {"B": "2", "S": "1:5:9"}  # one that varies: a trace is quicker
BOTH = {**AXES, "B": "1:2:4"}
SCALE = 1.0  # a test writes another one


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(E, E) for _ in range(3))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (2, 16)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Calls(nn.Module):
    """An attention, and what a function makes of it."""

    def __init__(self, function, **parts):
        super().__init__()
        self.a, self.function = Attention(), function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def deployable(function, *, inputs=None, axes=AXES, outputs=(), **parts):
    shown = {"x": Example(torch.randn(2, 4, E), "B", "S")} if inputs is None else inputs
    return Deployable(module=Calls(function, **parts), inputs=shown, axes=axes, outputs=outputs)


def many_outputs():
    """Of all kinds and ranks: also sums, whose last cast PyTorch forgets, and a weight.

    Every matmul of the attention takes its operands by keyword.
    """

    def function(self, x):
        q, k = (F.linear(input=x, weight=p.weight, bias=p.bias) for p in (self.a.q, self.a.k))
        v = torch.matmul(input=x, other=self.a.v.weight)
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True)
        y = y.transpose(1, 2).flatten(2).matmul(other=self.mix)
        return {
            "output": self.wide(y),
            "logits": y.float(),
            "sums": y.sum(-1),
            "loss": y.sum(),
            "best": (y @ self.table).argmax(-1),
            "weight": self.table,
        }

    table, mix = (nn.Parameter(torch.randn(E, size)) for size in (500, E))
    return deployable(function, axes=BOTH, wide=nn.Linear(E, 50), table=table, mix=mix)


def zero_head():
    """A head that is initialized to zero, as untrained models have it."""
    made = deployable(lambda self, x: self.head(self.a(x)), head=nn.Linear(E, 8))
    nn.init.zeros_(made.module.head.weight)
    nn.init.zeros_(made.module.head.bias)
    return made


def constant_head():
    """A head that gives its bias, whatever comes in."""
    made = deployable(lambda self, x: self.head(self.a(x)), head=nn.Linear(E, 8))
    nn.init.zeros_(made.module.head.weight)
    return made


def zero_attention():
    """An attention that adds nothing yet."""
    made = deployable(lambda self, x: x + self.a(x))
    nn.init.zeros_(made.module.a.v.weight)
    nn.init.zeros_(made.module.a.v.bias)
    return made


def shrinking():
    """Activations that FP16 loses on their way."""
    return deployable(lambda self, x: self.a(x) * 1e-4 * 1e-4 * 1e-4)


class Masked(Attention):
    """Scores of keys that a mask hides get a number that FP16 does not have."""

    def __init__(self, hide):
        super().__init__()
        self.hide = hide

    def forward(self, x, mask):
        q, k, v = (p(x).unflatten(-1, (2, 16)).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = self.hide(q @ k.transpose(-2, -1) / 4, mask[:, None, None, :] == 0)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def _masked(hide):
    mask = torch.ones(2, 4, dtype=torch.int64)
    mask[1, 3:] = 0
    inputs = {"x": Example(torch.randn(2, 4, E), "B", "S"), "mask": Example(mask, "B", "S")}
    return Deployable(module=Masked(hide), inputs=inputs, axes=AXES)


def filled():
    return _masked(lambda scores, hidden: scores.masked_fill(hidden, -1e9))


def filled_by_keyword():
    return _masked(lambda scores, hidden: scores.masked_fill_(mask=hidden, value=-1e9))


def added_full():
    return _masked(lambda scores, hidden: scores + torch.full_like(scores, -1e9) * hidden)


def added():
    """In the module 0 · -1e9 is 0; in the program it is 0 · -inf."""
    return _masked(lambda scores, hidden: scores + hidden.to(scores.dtype) * -1e9)


def _first_query_masked(number):
    """No key is visible to the first query."""

    def hide(scores, hidden):
        S = scores.shape[-1]
        later = torch.ones(S, S, dtype=torch.bool).triu() | hidden
        return -scores.abs() - 50 + torch.where(later, number(scores.dtype), 0.0).to(scores.dtype)

    return _masked(hide)


def first_query_at_infinity():
    return _first_query_masked(lambda dtype: -torch.inf)


def first_query_at_lowest():
    """In FP16 the lowest number and a score are -inf."""
    return _first_query_masked(lambda dtype: torch.finfo(dtype).min)


def guarded():
    """A branch for FP16, as transformers have them."""

    def function(self, x):
        y = self.a(x)
        if y.dtype == torch.float16 and not torch.isfinite(y).all():
            y = y.clamp(-6e4, 6e4)
        return y

    return deployable(function)


def large_scores():
    made = plain()
    made.module.a.q.weight.data *= 1e4
    made.module.a.q.bias.data += 6e4
    return made


def large_masked_scores():
    """The number of the mask is -inf in FP16 before the scores overflow, which it is meant to be."""

    def hide(scores, hidden):
        number = torch.where(hidden, -1e9, 0.0).to(scores.dtype)
        return scores * 1e4 * 1e4 + number

    return _masked(hide)


def logarithm_of_negatives():
    return deployable(lambda self, x: self.a(x) + torch.log(-1.0 - x * x))


def nan_weights():
    made = plain()
    made.module.a.k.weight.data[3, 4] = float("nan")
    return made


def infinite_weights():
    made = plain()
    made.module.a.v.bias.data[5] = float("inf")
    return made


class Rotated(nn.Module):
    """A rotary embedding with a table of complex numbers, as LLaMA's first code has it."""

    def __init__(self):
        super().__init__()
        self.a = Attention()
        self.register_buffer("turns", torch.polar(torch.ones(16, E // 2), torch.randn(16, E // 2)))

    def forward(self, x):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * self.turns[: x.shape[1]]
        return self.a(torch.view_as_real(pairs).flatten(2).to(x.dtype))


def rotated():
    return Deployable(module=Rotated(), inputs={"x": Example(torch.randn(2, 4, E), "B", "S")}, axes=AXES)


class Picks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Attention()

    def forward(self, x, places, past):
        y = torch.cat([past, self.a(x) * SCALE], 1)
        return y.gather(1, places[..., None].expand(-1, -1, E)), past


def picks():
    """Places must lie inside the sequence; its numbers are other ones each time they are drawn."""
    return Deployable(
        module=Picks(),
        inputs={
            "x": Example(torch.randn(2, 4, E), "B", "S", draw=lambda shape, _: torch.randn(shape)),
            "places": Example(
                torch.arange(4).expand(2, 4).flip(1),
                "B",
                "S",
                draw=lambda shape, generator: torch.randint(0, shape[1], shape, generator=generator),
            ),
            "past": Example(torch.randn(2, 3, E), "B", "P"),
        },
        axes={**BOTH, "P": "0:3:5"},
    )


class Added(nn.Module):
    def forward(self, x, past, mask):
        return torch.cat([past, x], 1) + mask


def fixed_past():
    """A sum of a fixed and a varying size."""
    return Deployable(
        module=Added(),
        inputs={
            "mask": Example(torch.randn(2, 7, E), "B", "P+S"),
            "x": Example(torch.randn(2, 4, E), "B", "S"),
            "past": Example(torch.randn(2, 3, E), "B", "P"),
        },
        axes={**BOTH, "P": "3:3:3"},
    )


class Counting(nn.Module):
    """Remembers how often it was called."""

    def __init__(self):
        super().__init__()
        self.a, self.calls = Attention(), 0

    def forward(self, x):
        self.calls += 1
        return self.a(x) * (1 + 0.001 * self.calls)


def counting():
    return Deployable(module=Counting(), inputs={"x": Example(torch.randn(2, 4, E), "B", "S")}, axes=AXES)


def random():
    return deployable(lambda self, x: self.a(F.dropout(x, 0.01)))


def branching():
    def function(self, x):
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y * 2, (self.a(x),))

    return deployable(function, axes=BOTH)


def complex_result():
    return deployable(lambda self, x: torch.view_as_complex(self.a(x).float().unflatten(-1, (-1, 2))))


def plain(**changed):
    return deployable(lambda self, x: self.a(x), **changed)


def leaves():
    sys.exit(0)


def listed_axes():
    return plain(axes=["B", "S"])


def listed_inputs():
    return plain(inputs=[torch.randn(2, 4, E)])


def spaced_axis():
    return plain(inputs={"x": Example(torch.randn(2, 4, E), "my batch")}, axes={"my batch": "1:2:4"})


def numbered_axis():
    return plain(inputs={"x": Example(torch.randn(2, 4, E), 2, "S")})


def unnamed_output():
    return plain(outputs=[""])


def no_number():
    return plain(inputs={"x": Example(torch.full((2, 4, E), float("nan")), "B", "S")})


def empty_weights():
    made = plain()
    made.module.to("meta")
    return made


def empty_example():
    return plain(inputs={"x": Example(torch.randn(2, 4, E, device="meta"), "B", "S")})


def _drawn(draw):
    return plain(inputs={"x": Example(torch.randn(2, 4, E), "B", "S", draw=draw)})


def failing_draw():
    return _drawn(lambda shape, generator: 1 / 0)


def no_draw():
    return _drawn(lambda shape, generator: None)


def whole_draw():
    return _drawn(lambda shape, generator: torch.ones(shape, dtype=torch.int64))
