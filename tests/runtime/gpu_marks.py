"""Marks of tests that need a GPU and a provider for it."""

import onnxruntime
import pytest

CPU_PACKAGE = "CUDAExecutionProvider" not in onnxruntime.get_available_providers()


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(CPU_PACKAGE, reason="needs onnxruntime-gpu")(test))
