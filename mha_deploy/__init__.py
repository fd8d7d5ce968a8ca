"""Take attention from PyTorch to TensorRT and prove the result."""

__version__ = "0.1.0"
