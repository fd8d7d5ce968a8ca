"""Small transformers that are trained in a second, in the graph of `quantized_models`: loss is accuracy.

`recall`: every token has a key and a value, the last one only a key: its logits are the value that belongs to
the key (copying by induction). `classify`: one of the tokens is of a class, the others are noise.
"""

import numpy as np
import torch
from quantized_models import CLASSES, HEADS, WIDTH, weights
from torch.nn import functional as F

SIZE, LENGTH = WIDTH // HEADS, 8
KEY = WIDTH // 2  # channels of the key; the others are the value
CODES = np.random.default_rng(0).choice([-1.0, 1.0], size=(2, 16, KEY)).astype("f")
STEPS = {"recall": 160, "classify": 80}


def forward(x, w):
    """The model of `quantized_models.transformer`."""
    heads = [(x @ w[name]).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for name in "qkv"]
    mid = x + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2) @ w["out"]
    return (mid + torch.relu(mid @ w["up"]) @ w["down"]) @ w["head"]


def batch(task, count, dice):
    """Inputs and the label of the last token."""
    codes = CODES
    label = dice.integers(0, CLASSES, (count, LENGTH))
    x = np.zeros((count, LENGTH, WIDTH), "f")
    if task == "recall":
        keys = np.argsort(dice.random((count, 16)), axis=1)[:, :LENGTH]
        x[:, :, :KEY], x[:, :, KEY:] = codes[0][keys], codes[1][label]
        at = dice.integers(0, LENGTH - 1, count)
        x[:, -1, :KEY], x[:, -1, KEY:] = codes[0][keys[np.arange(count), at]], 0.0
    else:
        at = dice.integers(0, LENGTH, count)
        x = dice.normal(0, 0.4, x.shape).astype("f")
        x[np.arange(count), at, KEY:] += codes[1][label[np.arange(count), at]]
    return x, label[np.arange(count), at]


def train(task, *, idle=()):
    """The weights of a model of the task; heads that are `idle` have no part of the output."""
    torch.manual_seed(0)
    dice = np.random.default_rng(1)
    w = {name: torch.from_numpy(array.copy()).requires_grad_() for name, array in weights().items()}
    mask = torch.ones(WIDTH, 1)
    for head in idle:
        mask[head * SIZE : (head + 1) * SIZE] = 0
    steps = STEPS[task]
    optimizer = torch.optim.Adam(w.values(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    for _ in range(steps):
        x, label = batch(task, 48, dice)
        logits = forward(torch.from_numpy(x), {**w, "out": w["out"] * mask})
        optimizer.zero_grad()
        F.cross_entropy(logits[:, -1], torch.from_numpy(label)).backward()
        optimizer.step()
        schedule.step()
    found = {name: array.detach().numpy() for name, array in w.items()}
    return {**found, "out": found["out"] * mask.numpy()}


def with_twin(w, head, twin):
    """The same function with a head twice: its part of the output is in two halves."""
    found = {name: array.copy() for name, array in w.items()}
    mine, other = (slice(each * SIZE, (each + 1) * SIZE) for each in (head, twin))
    for name in "qkv":
        found[name][:, other] = found[name][:, mine]
    found["out"][mine] /= 2
    found["out"][other] = found["out"][mine]
    return found


def labelled(task, count=16, seed=7):
    """Samples with the label that the last token should have."""
    dice = np.random.default_rng(seed)
    return [dict(zip(("x", "label"), batch(task, 16, dice), strict=True)) for _ in range(count)]


def accuracy(outputs, sample):
    """How often the largest logit of the last token is right."""
    return float((outputs["logits"][:, -1].argmax(-1) == sample["label"]).mean())
