"""In what state the GPU was while it was measured: clocks, temperature, power, and what held it back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from mha_deploy.backends.cuda import Gpu

# Bits of NVML's clock event reasons that mean "slower than it could be".
_HELD_BACK = {
    "power cap": "nvmlClocksEventReasonSwPowerCap",
    "hardware slowdown": "nvmlClocksThrottleReasonHwSlowdown",
    "thermal (software)": "nvmlClocksEventReasonSwThermalSlowdown",
    "thermal (hardware)": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "power brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
}


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What NVML said; None where it said nothing.

    Args:
        sm_mhz: Clock of the multiprocessors.
        sm_mhz_max: The highest that the card goes to.
        memory_mhz: Clock of the memory.
        temperature_c: Temperature of the GPU.
        power_w: Power drawn.
        held_back: Why the clocks were lower than they could be; empty where nothing did.
    """

    sm_mhz: int | None = None
    sm_mhz_max: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    held_back: tuple[str, ...] = ()


def read_conditions(gpu: Gpu) -> Conditions:
    """Ask NVML; a machine without it gets a record of unknowns, since timing works without."""
    handle = _handle(gpu.pci_bus)
    if handle is None:
        return Conditions()
    import pynvml

    power = _ask(pynvml.nvmlDeviceGetPowerUsage, handle)
    return Conditions(
        sm_mhz=_ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        sm_mhz_max=_ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        memory_mhz=_ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        temperature_c=_ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        power_w=None if power is None else power / 1000.0,
        held_back=_held_back(pynvml, handle),
    )


def driver_version() -> str | None:
    """Version of the NVIDIA driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # noqa: BLE001 (no package, no library, no driver: each raises its own)
        return None


@cache
def _handle(pci_bus: str) -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus.encode())
    except Exception:  # noqa: BLE001 (no package, no library, no driver: each raises its own)
        return None


def _ask(function: Any, *arguments: Any) -> Any:
    import pynvml

    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def _held_back(pynvml: Any, handle: Any) -> tuple[str, ...]:
    ask = getattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
        pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None
    )
    reasons = _ask(ask, handle) if ask else None
    if not reasons:
        return ()
    return tuple(words for words, name in _HELD_BACK.items() if reasons & getattr(pynvml, name, 0))
