"""Write the tables of RECORD.md that are made of the lines in benchmarks/results.

    python benchmarks/tables.py           # rewrite them
    python benchmarks/tables.py --check   # exit with 1 if they do not match the lines

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. NAME is `evidence`, or a file of results,
whose latencies it shows.
"""

import json
import re
import sys
from pathlib import Path

from mha_deploy.regression.record import LEAST_PROCESSES, evidence_table, latency_table, read_lines
from mha_deploy.report.table import markdown

HERE = Path(__file__).resolve().parent
RECORD, RESULTS = HERE / "RECORD.md", HERE / "results"
SURFACES = HERE.parent / "tests" / "runtime" / "trt_surfaces.json"
LEGEND = f"""\
† fewer than {LEAST_PROCESSES} processes. ‡ throttled: the driver reported a reason, or the SM clock was below
95 % of its maximum. Bold: faster than every process of all others; no row with † or ‡ has a winner."""


def all_lines():
    """The lines of all files."""
    return [line for path in sorted(RESULTS.glob("*.jsonl")) for line in read_lines(path)]


def contract():
    """The versions whose API the contract test knows."""
    names = json.loads(SURFACES.read_text(encoding="utf-8"))
    return [
        f"tensorrt-{name.replace('-', ' ')}" if name.startswith("rtx") else f"tensorrt {name}"
        for name in names
    ]


def table(name):
    """The text between the marks of a table."""
    if name == "evidence":
        return markdown(evidence_table(all_lines(), contract()))
    lines = read_lines(RESULTS / name) if (RESULTS / name).is_file() else []
    if not any(line.kind == "time" for line in lines):
        return f"Not measured yet: `results/{name}` has no line.\n"
    first = lines[0]
    about = f"{first.gpu}, driver {first.driver}; {len(lines)} lines of `results/{name}`."
    return f"{about}\n\n{markdown(latency_table(lines))}\n{LEGEND}\n"


def rewritten(text):
    """The record with its tables made anew."""
    return re.sub(
        r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}\n{table(found[2])}\n{found[3]}",
        text,
        flags=re.DOTALL,
    )


def main():
    """Rewrite or check the record."""
    old = RECORD.read_text(encoding="utf-8")
    new = rewritten(old)
    if "--check" in sys.argv:
        sys.exit(0 if new == old else "RECORD.md does not match benchmarks/results: run benchmarks/tables.py")
    RECORD.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
