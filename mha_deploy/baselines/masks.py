"""PyTorch's answers to the mask cases: a column of the table of masks."""

from __future__ import annotations

from mha_deploy.reference.conformance import torch_column

__all__ = ["torch_column"]
