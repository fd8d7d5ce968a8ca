"""Golden cases that nobody has seen: new inputs at any sizes, with the oracle that belongs to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch

from mha_deploy.analyze.sizes import sizes_name
from mha_deploy.analyze.work import past_rows
from mha_deploy.baselines.blocked import run_in_blocks
from mha_deploy.baselines.fresh_module import FreshModuleCases
from mha_deploy.baselines.module import attention_spec, module_from_bundle
from mha_deploy.bundle import Bundle
from mha_deploy.errors import DeployError
from mha_deploy.export.golden import GoldenCapture, fp64_twin, refuse_overflow
from mha_deploy.export.golden_plan import PlannedCase
from mha_deploy.golden import GoldenCase, read_case
from mha_deploy.module_spec import ModuleSpec

_GIB = 1 << 30
# For the scores and activations of the oracle; what the device has besides is for weights and results.
ORACLE_BYTES = {"cpu": 2 * _GIB, "cuda": 16 * _GIB}


class CaseMaker(Protocol):
    """Draws new cases for the model of a bundle."""

    def case(
        self, sizes: Mapping[str, int], *, seed: int, ragged: bool = False, past: int | None = None
    ) -> GoldenCase:
        """Draw inputs and compute what is true of them."""


def fresh_cases(bundle: Bundle, device: str) -> CaseMaker:
    """Whoever draws new cases for a bundle: a layer is computed on the device, a user's module on the CPU."""
    spec = bundle.manifest.spec
    if isinstance(spec, ModuleSpec):
        smallest = min(bundle.manifest.golden, key=lambda entry: math.prod(entry.sizes.values()))
        return FreshModuleCases(spec, bundle.manifest.precision, known=partial(read_case, bundle, smallest))
    return FreshCases(bundle, device)


class FreshCases:
    """Makes cases for the layer of a bundle, with its own weights.

    Args:
        bundle: The bundle.
        device: Where the module and its FP64 twin run.
        oracle_bytes: Memory that the oracle may take besides its weights; see `ORACLE_BYTES`.
    """

    def __init__(self, bundle: Bundle, device: str, *, oracle_bytes: int | None = None) -> None:
        self.spec, self.precision = attention_spec(bundle), bundle.manifest.precision
        self._module = module_from_bundle(bundle, path="plain", device=device)
        self._oracle = fp64_twin(self._module)
        limit = oracle_bytes or ORACLE_BYTES[torch.device(device).type]
        self._run_oracle = partial(run_in_blocks, limit_bytes=limit)

    def case(
        self, sizes: Mapping[str, int], *, seed: int, ragged: bool = False, past: int | None = None
    ) -> GoldenCase:
        """Draw inputs and compute what is true of them.

        Args:
            sizes: A size for every axis of the spec.
            seed: Seed of the inputs; the same seed at the same sizes draws the same.
            ragged: Whether lengths go down to 1 and 0, where the layer has lengths.
            past: How many rows of a static cache are valid in every row of the batch; drawn unless given.

        Raises:
            SpecError: The sizes, or that many rows, are not for this layer.
            ExportError: The module itself overflows on these inputs.
            DeployError: They do not fit the device's memory.
        """
        self.spec.check_sizes(sizes)
        if past is not None:
            past_rows(self.spec, sizes, [past] * sizes["B"])  # raises where they do not fit
        at = sizes_name(sizes)
        name = f"fresh-{at}-seed{seed}{'-ragged' if ragged else ''}"
        capture = GoldenCapture(
            self._module, self.precision, seed, oracle=self._oracle, run_oracle=self._run_oracle
        )
        try:
            case = capture.capture(PlannedCase(name=name, sizes=dict(sizes), ragged=ragged, past=past))
        except torch.OutOfMemoryError as error:
            raise DeployError(
                "There is no room to compute what is true at these sizes.", got=at, hint="smaller sizes"
            ) from error
        refuse_overflow(case, self.precision, self._module)
        return case
