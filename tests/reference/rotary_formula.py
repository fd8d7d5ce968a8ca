"""Rotary embedding as it was published."""

import math

import numpy as np


def published_frequencies(rope, dims):
    """The frequencies one by one, as the models' published code branches."""
    found = []
    for j in range(dims // 2):
        base = rope.base * rope.factor ** (dims / (dims - 2)) if rope.scaling == "ntk" else rope.base
        theta = 1.0 / base ** (2 * j / dims)
        if rope.scaling == "linear":
            theta /= rope.factor
        if rope.scaling == "llama3":
            wavelength = 2 * math.pi / theta
            low_wavelength = rope.original_length / rope.low_freq_factor
            high_wavelength = rope.original_length / rope.high_freq_factor
            if wavelength > low_wavelength:
                theta /= rope.factor
            elif wavelength >= high_wavelength:
                smooth = (rope.original_length / wavelength - rope.low_freq_factor) / (
                    rope.high_freq_factor - rope.low_freq_factor
                )
                theta = (1 - smooth) * theta / rope.factor + smooth * theta
        found.append(theta)
    return np.array(found)


def turned(x, positions, theta, interleaved):
    """Every pair of x [S, H, D] times exp(i p θ)."""
    dims, y = 2 * len(theta), x.copy()
    first, second = (
        (slice(0, dims, 2), slice(1, dims, 2)) if interleaved else (slice(dims // 2), slice(dims // 2, dims))
    )
    z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * positions[:, None, None] * theta)
    y[..., first], y[..., second] = z.real, z.imag
    return y
