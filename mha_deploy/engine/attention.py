"""Who computes the attentions and the projections of an engine: TensorRT itself, or the plugin library.

    --attention native    TensorRT's own kernels
    --attention plugin    one plugin layer for each attention
    --attention auto      both are built and timed, and the faster right one is kept
    --accumulate fp16     the projections are TensorRT's own products, which may sum up in FP16
    --accumulate fp32     they are plugin layers that sum up in FP32
    --accumulate auto     beside the plugin both are timed: FP32, unless it is more than 5 % slower

What was chosen, and what each way cost, is in the engine's manifest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mha_deploy.backends.tensorrt import EngineError, TensorRT
from mha_deploy.engine.options import EngineOptions
from mha_deploy.errors import nearest
from mha_deploy.plugins.load import refuse_plugins

NATIVE, PLUGIN, AUTO = "native", "plugin", "auto"
FP32, FP16 = "fp32", "fp16"
ATTENTIONS = (NATIVE, PLUGIN, AUTO)
SUMS = (FP32, FP16, AUTO)
_SCRATCH_MIB = 32  # what every projection of the library asks for, plugins/src/linear_matmul.h


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to write an engine.

    Args:
        attention: `native` or `plugin`.
        accumulate: `fp32` where the projections are plugin layers, else `fp16`.
    """

    attention: str
    accumulate: str = FP16

    @property
    def name(self) -> str:
        """What to call it: `native`, `plugin`, `plugin-fp32`."""
        return f"{self.attention}-{FP32}" if self.accumulate == FP32 else self.attention

    def applied_to(self, options: EngineOptions) -> EngineOptions:
        """The options that ask for this way alone."""
        return replace(options, attention=self.attention, accumulate=self.accumulate)


def ways(rt: TensorRT, options: EngineOptions, precision: str) -> list[Way]:
    """The ways that the options leave open; where there are several, they have to be timed.

    Args:
        rt: The TensorRT that builds.
        options: What is asked for.
        precision: The precision of the graph.

    Raises:
        EngineError: The options contradict each other, or the plugin does not take this precision.
        PluginError: This TensorRT takes no plugins.
    """
    _refuse_unknown(options)
    if options.attention == NATIVE:
        return [Way(attention=NATIVE)]
    refuse_plugins(rt)
    _refuse_precision(rt, precision)
    sums = {FP32: [FP32], FP16: [FP16], AUTO: [FP32, FP16]}[options.accumulate]
    if options.accumulate == AUTO and precision != FP16:
        # Products of BF16 sum up in FP32 whoever computes them.
        sums = [FP16]
    found = [Way(attention=PLUGIN, accumulate=each) for each in sums]
    # TensorRT's own products promise no FP32 sums: who wants them has only one way.
    return [Way(attention=NATIVE), *found] if options.attention == AUTO and FP16 in sums else found


def _refuse_unknown(options: EngineOptions) -> None:
    for option, value, known in (
        ("attention", options.attention, ATTENTIONS),
        ("accumulate", options.accumulate, SUMS),
    ):
        if value not in known:
            raise EngineError(f"No such choice for --{option}.", got=value, hint=nearest(value, known))
    if options.attention == PLUGIN and options.allow_decomposed:
        raise EngineError(
            "An attention of the plugin is one fused layer.", got="--allow-decomposed", hint="leave it out"
        )
    if options.attention == NATIVE and options.accumulate == FP32:
        raise EngineError(
            "TensorRT chooses by itself how its own products sum up.",
            got="--accumulate fp32 with --attention native",
            hint="--attention plugin or auto: the plugin library has products that sum up in FP32",
        )
    if (
        options.accumulate == FP32
        and options.workspace_mib is not None
        and options.workspace_mib < _SCRATCH_MIB
    ):
        raise EngineError(
            f"The plugin's projections need {_SCRATCH_MIB} MiB of scratch memory.",
            got=f"--workspace-mib {options.workspace_mib} with --accumulate fp32",
            hint=f"--workspace-mib {_SCRATCH_MIB} or more, or --accumulate fp16",
        )


def _refuse_precision(rt: TensorRT, precision: str) -> None:
    if precision == "fp32":
        raise EngineError(
            "The attention plugin computes in FP16 and BF16.",
            got="a graph in fp32",
            hint="--attention native, or export in fp16",
        )
    if precision == "bf16" and not rt.can.bf16_type:
        raise EngineError(
            f"{rt.title} has no BF16 for the attention plugin.", got="a graph in bf16", hint="export in fp16"
        )
