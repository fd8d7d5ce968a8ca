"""Measure the cost of an export: seconds, peak memory and bundle size, for each spec.

    python benchmarks/export_cost.py [--precision fp16] [MODEL ...]

Each export runs in a separate process, so that its peak memory can be measured. Prints a Markdown table for
benchmarks/RECORD.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mha_deploy.environment import versions
from mha_deploy.model.catalog import catalog_names


def export_once(model: str, precision: str, folder: Path, golden: list[str]) -> dict[str, float]:
    """Export one model in a child process and measure it."""
    chosen = [part for case in golden for part in ("--golden", case)]
    command = [sys.executable, "-m", "mha_deploy", "export", model, "-o", str(folder / model)]
    started = time.perf_counter()
    child = subprocess.Popen([*command, "--precision", precision, *chosen, "--json"], stdout=subprocess.PIPE)
    output = child.stdout.read() if child.stdout else b""
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        sys.exit(f"{model}: the export failed with status {status}")
    files = json.loads(output)["files"]
    return {
        "seconds": time.perf_counter() - started,
        "peak_gib": usage.ru_maxrss / 2**20,
        "bundle_mb": sum(entry["bytes"] for entry in files.values()) / 1e6,
    }


def main() -> None:
    """Measure the models that were named; default: all but the small ones of the tests."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", default=[n for n in catalog_names() if not n.startswith("tiny-")]
    )
    parser.add_argument("--precision", default="fp16")
    parser.add_argument(
        "--golden", action="append", default=[], help="golden cases; default: those of `export`"
    )
    arguments = parser.parse_args()
    print(", ".join(f"{name} {version}" for name, version in versions().items()), f"{os.cpu_count()} CPUs")
    print(f"{platform.system()} {platform.machine()}, precision {arguments.precision}\n")
    print("| model | seconds | peak GiB | bundle MB |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            cost = export_once(model, arguments.precision, Path(folder), arguments.golden)
            print(
                f"| {model} | {cost['seconds']:.1f} | {cost['peak_gib']:.2f} | {cost['bundle_mb']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
