"""A catalog layer with a KV cache, fed token by token."""

import torch


class Decoder:
    """Feeds a layer with a cache new tokens, and keeps the keys, values and lengths of its B sequences."""

    def __init__(self, module, B):
        spec, parameter = module.spec, next(module.parameters())
        entries = spec.axes["T"].max if spec.cache == "preallocated" else 0
        self.module = module
        self.keys = parameter.new_zeros(B, spec.Hkv, entries, spec.D)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(B, dtype=torch.int32, device=parameter.device)

    def feed(self, x, counts=None):
        """Run the layer on S new tokens of every batch element. [B, S, E] -> [B, S, E].

        Of a preallocated cache, `counts` [B] of them may be real, with padding behind them. The output at
        padding means nothing.
        """
        held = {"past_key": self.keys, "past_value": self.values}
        if self.module.spec.cache == "preallocated":
            held = {"key_cache": self.keys, "value_cache": self.values, "lengths": self.lengths}
        output, self.keys, self.values = self.module(x, **held)
        self.lengths = self.lengths + (x.shape[1] if counts is None else counts.to(self.lengths))
        return output
