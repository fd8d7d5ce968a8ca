"""A version-compatible engine in the full runtime and in lean ones, judged and timed on a GPU.

    python benchmarks/lean_runtime.py [--model bert-base] [--out lean]

It exports a layer, builds a version-compatible engine with the installed TensorRT, and validates it in every
runtime that is there: full, lean and dispatch. It prints the verdict and p50 of each, and what a lean runtime
costs over the full one. A runtime that refuses the plan is printed with its reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import mha_deploy as md

RUNTIMES = ("tensorrt", "tensorrt-lean", "tensorrt-dispatch")


def main() -> int:
    """Build, validate in every runtime, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--out", type=Path, default=Path("lean"))
    chosen = parser.parse_args()
    md.configure(trust_code=True)
    bundle = md.export(chosen.model, chosen.out / chosen.model, precision="fp16", overwrite=True)
    try:
        engine = md.build_engine(bundle, runtime="tensorrt", version_compatible=True, overwrite=True)
    except md.DeployError as error:
        print(f"no version-compatible engine: {error.in_one_line}")
        return 1
    times: dict[str, float] = {}
    for runtime in RUNTIMES:
        try:
            report = md.validate(bundle, runtimes=[runtime], latency=True, sweep=False)
        except md.DeployError as error:
            print(f"{runtime}: {error.in_one_line}")
            continue
        data = report.to_dict()
        name = data["parity"][0]["runtime"] if data["parity"] else "nothing ran"
        print(f"{runtime}: {name}: {report.outcome}: {report.headline}")
        for point in data["latency"]["points"] if data["latency"] else ():
            for row in point["rows"]:
                if row["timing"]:
                    times[f"{runtime} {point['case']}"] = row["timing"]["p50_us"]
    for key, time in times.items():
        full = times.get(f"tensorrt {key.partition(' ')[2]}")
        over = f", {time / full - 1:+.1%} over the full runtime" if full else ""
        print(f"{key}: {time:.1f} µs{over}")
    (chosen.out / "lean.json").write_text(json.dumps({"version": engine.manifest.version, "p50_us": times}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
