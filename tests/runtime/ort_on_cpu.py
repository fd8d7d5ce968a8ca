"""ONNX Runtime's CPU in the place of its CUDA provider, and the host's memory in that of the GPU's."""

from __future__ import annotations

import cuda_fake
import numpy as np
from small_transformers import in_float32

from mha_deploy.graph.file import load_graph
from mha_deploy.runtime import ort
from mha_deploy.runtime.ort import OrtCpuRunner, OrtCudaRunner

B, T = 2, 64


def install(monkeypatch) -> cuda_fake.Device:
    """Put both in their places."""
    monkeypatch.setattr(ort, "DEVICE", "cpu")
    monkeypatch.setattr(ort, "CUDA", "CPUExecutionProvider")
    for check in ("refuse_without_cuda", "refuse_work_on_cpu"):
        monkeypatch.setattr(ort, check, lambda *given: None)
    monkeypatch.setattr(ort, "free_memory", lambda: 0)
    return cuda_fake.install(monkeypatch)


def single(bundles, name):
    """The graph of a bundle in float32, which has more kernels on a CPU."""
    return in_float32(load_graph(bundles(name).model_path))


def opened(bundles, layer, **more) -> OrtCudaRunner:
    """A layer by its name and dialect, in float32."""
    name, dialect = layer
    return OrtCudaRunner(single(bundles, name), dialect=dialect, **more)


def drawn(S, batch=B, seed=0):
    """Random tokens."""
    return np.random.default_rng(seed).standard_normal((batch, S, 64)).astype(np.float32)


def static_feeds(x, lengths, seed=1):
    """The tokens behind a random cache."""
    cache = np.random.default_rng(seed).standard_normal((2, len(x), 2, T, 16)).astype(np.float32)
    return {"x": x, "key_cache": cache[0], "value_cache": cache[1], "lengths": np.array(lengths, np.int32)}


def whole_sequence(bundles, x):
    """The layer in FP16 over a whole sequence, from an empty cache, on the CPU: output, keys and values."""
    empty = np.zeros((len(x), 2, 0, 16), np.float16)
    with OrtCpuRunner(bundles("tiny-dynamic").model_path) as runner:
        return list(runner.run({"x": x, "past_key": empty, "past_value": empty}).values())


def near(got, wanted):
    """Equal but for what FP16 rounds."""
    np.testing.assert_allclose(got.astype(np.float32), wanted.astype(np.float32), rtol=0, atol=1e-2)
