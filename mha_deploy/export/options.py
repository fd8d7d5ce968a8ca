"""How to export: everything a user can choose, with its default written once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mha_deploy.export.golden_plan import GoldenBudget

OPSETS = (23, 24)
DEVICES = ("cpu", "cuda")
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How to export.

    Args:
        precision: Types in the graph: `fp16`, `bf16` or `fp32`; of a user's module also `auto`, FP16 but for
            what it cannot hold.
        opset: Version of the ONNX operator set, one of `OPSETS`; the first that suffices unless given.
        seed: Seed of the weights, unless a file is given, and of the golden inputs.
        weights: A safetensors file of weights.
        golden: Golden cases, by name or sizes; those that suit the layer unless given.
        budget: What the large golden case may cost.
        device: Where the oracle and the eager module run, one of `DEVICES`.
        overwrite: Whether a bundle that is there already may be replaced.
    """

    precision: str = "fp16"
    opset: int | None = None
    seed: int = 0
    weights: Path | None = None
    golden: Sequence[str] = ()
    budget: GoldenBudget = field(default_factory=GoldenBudget)
    device: str = "cpu"
    overwrite: bool = False
