"""Why PyTorch did not run a layer, in words that can be acted on."""

from __future__ import annotations

from collections.abc import Iterable

from mha_deploy.errors import BackendUnavailable, DeployError

_NO_KERNEL = ("No available kernel", "No viable backend")
_COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
_PLACE_IN_SOURCE = " (Triggered internally"
# Of the kernels that were not asked for, and headings without a reason.
_NO_REASON = ("runtime disabled", "not used because")


def explain_refusal(name: str, error: Exception, warnings: Iterable[str], *, compiled: bool) -> DeployError:
    """The error to raise for one that PyTorch raised.

    Args:
        name: The runner.
        error: What PyTorch raised.
        warnings: What it warned of before: for a kernel that it refuses, these hold the reasons.
        compiled: Whether the layer goes through torch.compile.
    """
    if isinstance(error, DeployError):
        return error
    if any(words in str(error) for words in _NO_KERNEL):
        return DeployError(
            f"{name} has no kernel for these inputs.",
            got=_reasons(warnings) or _first_line(error),
            hint="another way; `sdpa` lets PyTorch choose",
        )
    if compiled and type(error).__module__.startswith(_COMPILERS):
        return BackendUnavailable(
            f"{name} cannot compile the layer here.",
            got=_first_line(error),
            hint="torch.compile needs Triton and a C compiler",
        )
    return DeployError(f"{name} failed on these inputs.", got=_first_line(error))


def _reasons(warnings: Iterable[str]) -> str:
    texts = dict.fromkeys(text.partition(_PLACE_IN_SOURCE)[0].strip() for text in warnings)
    reasons = [text for text in texts if not any(words in text for words in _NO_REASON)]
    return "; ".join(reasons or texts)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.partition("\n")[0]
