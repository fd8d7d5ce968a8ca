"""Write `trt_surfaces.json`: of every TensorRT API surface, only the names that the backend knows.

    python tests/runtime/extract_trt_surfaces.py ../shared/trt-api

The full surfaces are `dir()` of every class and the members of every enum of the shipped bindings. The
extract is small enough to keep, so that the contract is tested where the surfaces are not at hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tensorrt_names import USED

from mha_deploy.runtime.tensorrt.versions import PROBES

EXTRACT = Path(__file__).with_name("trt_surfaces.json")

# Enums of which the members themselves are the capability, or that a fake needs.
WHOLE = ("ComputeCapability", "HardwareCompatibilityLevel", "TacticSource")
EXTRA = (
    "LayerType.SHUFFLE",
    "DataType.INT32",
    "ILogger.log",
    "INetworkDefinition.add_plugin_v2",
    "INetworkDefinition.add_plugin_v3",
)


def wanted_names() -> set[str]:
    """Every dotted name that the backend uses or asks for."""
    return {*USED, *EXTRA, *(name for names in PROBES.values() for name in names)}


def read_surfaces(folder: Path) -> dict[str, dict[str, Any]]:
    """All surfaces of a folder, by version."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return {surface["version"]: surface for surface in found}


def extract(surface: dict[str, Any]) -> dict[str, Any]:
    """Of one surface, the names that the backend knows."""
    functions = [name for name in surface["names"] if name in wanted_names() and name[0].islower()]
    kept: dict[str, Any] = {"version": surface["version"], "classes": {}, "enums": {}, "names": functions}
    for kind in ("classes", "enums"):
        for owner, names in surface[kind].items():
            mine = {name.partition(".")[2] for name in wanted_names() if name.partition(".")[0] == owner}
            if mine or owner in WHOLE:
                kept[kind][owner] = [name for name in names if name in mine or owner in WHOLE]
    return kept


def main() -> None:
    """Write the extract."""
    surfaces = read_surfaces(Path(sys.argv[1]))
    lines = (f"{json.dumps(version)}: {json.dumps(extract(s))}" for version, s in surfaces.items())
    EXTRACT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
