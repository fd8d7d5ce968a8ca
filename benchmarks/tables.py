"""Write the tables of RECORD.md and docs/matrix.md that are made of the lines in benchmarks/results.

    python benchmarks/tables.py           # rewrite them
    python benchmarks/tables.py --check   # exit with 1 if they do not match the lines

A table is between `<!-- table: NAME -->` and `<!-- end -->`. NAME is `evidence`, or a file of results: its
latencies; with `:streams` behind it, calls per second; with `:builds`, what was fused.
"""

import json
import re
import sys
from pathlib import Path

from mha_deploy.regression.record import (
    LEAST_PROCESSES,
    builds_table,
    evidence_table,
    latency_table,
    read_lines,
    streams_table,
)
from mha_deploy.report.table import markdown

HERE = Path(__file__).resolve().parent
PAGES, RESULTS = (HERE / "RECORD.md", HERE.parent / "docs" / "matrix.md"), HERE / "results"
SURFACES = HERE.parent / "tests" / "runtime" / "trt_surfaces.json"
TABLES = {"": latency_table, "streams": streams_table, "builds": builds_table}
LEGEND = f"""
† fewer than {LEAST_PROCESSES} processes. ‡ throttled: the driver reported a reason, or the SM clock was below
95 % of its maximum. Bold: faster than every process of all others; no row with † or ‡ has a winner.
"""


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
        lines = [line for path in sorted(RESULTS.glob("*.jsonl")) for line in read_lines(path)]
        return markdown(evidence_table(lines, contract()))
    file, _, kind = name.partition(":")
    lines = read_lines(RESULTS / file) if (RESULTS / file).is_file() else []
    found = TABLES[kind](lines)
    if not found.groups[0].rows:
        return f"Not measured yet: `results/{file}` has no such line.\n"
    where = ", ".join(
        dict.fromkeys(f"{each.gpu}, driver {each.driver}" if each.gpu else each.platform for each in lines)
    )
    return f"{where}; lines of `benchmarks/results/{file}`.\n\n{markdown(found)}{'' if kind else LEGEND}"


def rewritten(text):
    """A page with its tables made anew."""
    return re.sub(
        r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}\n{table(found[2])}\n{found[3]}",
        text,
        flags=re.DOTALL,
    )


def main():
    """Rewrite or check the pages."""
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = rewritten(old)
        if "--check" in sys.argv and new != old:
            sys.exit(f"{page.name} does not match benchmarks/results: run benchmarks/tables.py")
        page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
