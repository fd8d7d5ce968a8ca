"""What the plugin's attention node has no words or no kernels for."""

from __future__ import annotations

from mha_deploy.graph.lower.call import AttentionCall

_LARGEST_HEAD = 256
_TYPES = ("fp16", "bf16")


def refuse_what_is_missing(call: AttentionCall, *, limits: bool) -> None:
    """Refuse what the node cannot express, and with limits also what it has no kernels for."""
    facts, other = call.facts, "dialect primitives"
    if facts.softcap:
        raise call.refuse("softcap", got=facts.softcap, hint=other)
    if facts.has_qk_output:
        mode = f"qk_matmul_output_mode={facts.qk_output_mode}"
        raise call.refuse("attention weights as output", got=mode, hint=other)
    # A softmax in FP32 is at least as precise as one that was asked for in FP16 or BF16.
    if "fp64" in (facts.softmax_precision, facts.dtype if limits else None):
        raise call.refuse("fp64", got=facts.softmax_precision or facts.dtype, hint="export in fp16 or bf16")
    if limits:
        _refuse_what_has_no_kernel(call)


def _refuse_what_has_no_kernel(call: AttentionCall) -> None:
    if call.facts.dtype not in _TYPES:
        raise call.refuse("type but fp16 and bf16", got=call.facts.dtype, hint="export in fp16 or bf16")
    for name, size in (("D", call.D), ("Dv", call.Dv)):
        if size % 8:
            hint = "pad the heads in the model, or dialect primitives"
            raise call.refuse("head size no multiple of 8", got=f"{name}={size}", hint=hint)
        if size > _LARGEST_HEAD:
            raise call.refuse(
                f"head size above {_LARGEST_HEAD}", got=f"{name}={size}", hint="dialect primitives"
            )
