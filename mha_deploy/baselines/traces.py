"""Fresh decode traces, longer than a bundle would hold, with what is true of them."""

from __future__ import annotations

from functools import partial

import torch

from mha_deploy.baselines.blocked import run_in_blocks
from mha_deploy.baselines.fresh import ORACLE_BYTES
from mha_deploy.baselines.module import module_from_bundle
from mha_deploy.bundle import Bundle
from mha_deploy.errors import DeployError
from mha_deploy.export.trace import TraceCapture
from mha_deploy.trace import DecodeTrace

_CHUNK = 256  # tokens of a prompt that the module takes at once: it keeps all their scores


def fresh_trace(
    bundle: Bundle, *, rows: int, prompt: int, steps: int, seed: int, device: str = "cuda"
) -> DecodeTrace:
    """Draw tokens, step the module through them, and compute the whole sequence in FP64.

    Args:
        bundle: The bundle of a layer with a cache.
        rows: Rows of the batch, all with prompts of one length.
        prompt: Tokens of the prompt.
        steps: Single tokens behind it.
        seed: Seed of the tokens.
        device: Where it is computed: `cpu` or `cuda`.

    Raises:
        DeployError: The layer's axes or its cache do not allow it, or memory does not.
    """
    manifest = bundle.manifest
    capture = TraceCapture(
        module_from_bundle(bundle, device=device, path="plain"),
        manifest.precision,
        seed,
        run_oracle=partial(run_in_blocks, limit_bytes=ORACLE_BYTES[torch.device(device).type]),
        most_tokens=_CHUNK,
    )
    name = f"steps-B{rows}-prompt{prompt}-steps{steps}"
    try:
        return capture.capture(name, rows, prompt, steps)
    except torch.OutOfMemoryError as error:
        raise DeployError(
            "The tokens do not fit the device's memory.", got=name, hint="fewer rows, or a shorter prompt"
        ) from error
