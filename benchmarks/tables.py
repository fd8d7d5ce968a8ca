"""Write the tables of RECORD.md and docs/matrix.md that are made of the lines in benchmarks/results.

    python benchmarks/tables.py           # rewrite them
    python benchmarks/tables.py --check   # exit with 1 if they do not match the lines

A table is between `<!-- table: NAME -->` and `<!-- end -->`. NAME is `evidence`, or a file of results: its
latencies; with `:streams` behind it, calls per second; with `:kernels`, where the time goes; with `:builds`,
what was fused.

A row of latencies is made of several processes: its figure is the median of their medians, its spread is from
the smallest to the largest of them. No runtime is the fastest while another one is inside its spread.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from mha_deploy.regression.record import Line, LineKind, medians, read_lines
from mha_deploy.report.table import Cell, RawRow, Table, markdown, table
from mha_deploy.status import Outcome
from mha_deploy.text import plural, short

HERE = Path(__file__).resolve().parent
PAGES, RESULTS = (HERE / "RECORD.md", HERE.parent / "docs" / "matrix.md"), HERE / "results"
SURFACES = HERE.parent / "tests" / "runtime" / "trt_surfaces.json"
LEAST_PROCESSES = 3
LEGEND = f"""
*engine ×*: the best median of all others over the engine's, above 1 where the engine is faster.
† fewer than {LEAST_PROCESSES} processes. ‡ throttled: the driver reported a reason, or the SM clock was
below 95 % of its maximum. § host-bound: a launch took the host more than 80 % of the time of a call.
Bold: faster than every process of all others; never a figure with †, and none in a row with § or
with ‡ at only some of its figures.
"""


def marks(lines: Sequence[Line]) -> str:
    """`†` for few processes, `‡` where the GPU was throttled, `§` where it waited for the host."""
    found = {
        "†": len(medians(lines)) < LEAST_PROCESSES,
        "‡": any(line.is_throttled for line in lines),
        "§": any(line.p50 and line.timing and line.timing.host_us > 0.8 * line.p50 for line in lines),
    }
    return "".join(mark for mark, applies in found.items() if applies)


def figure(lines: Sequence[Line], *, best: bool) -> Cell:
    """The lines of one runtime in one row: the median of its processes, with their spread."""
    found = medians(lines)
    if not found:
        return Cell(text="wrong" if lines[0].outcome is Outcome.FAILED else "not timed")
    value, span = median(found), f"{short(min(found))}–{short(max(found))}"
    shown = f"{short(value)} ({span})" if len(found) > 1 else short(value)
    return Cell(text=shown, status="best" if best else "", order=value, suffix=marks(lines))


def fastest(figures: Mapping[str, Sequence[Line]]) -> str | None:
    """The runtime whose slowest process is faster than all processes of others; None inside the spread.

    Large layers reach the power limit in every runtime, and are compared there; one that did beside one that
    did not are not compared.
    """
    timed = {name: medians(lines) for name, lines in figures.items() if medians(lines)}
    found = {name: marks(figures[name]) for name in timed}
    if len(timed) < 2 or "§" in "".join(found.values()) or len({"‡" in each for each in found.values()}) > 1:
        return None
    name = min(timed, key=lambda each: max(timed[each]))
    if "†" in found[name]:
        return None
    others = [each for other, each in timed.items() if other != name]
    return name if all(max(timed[name]) < min(each) for each in others) else None


def latency_table(lines: Sequence[Line]) -> Table:
    """A row for every model and size, a column for every runtime; then how many times as fast engines are."""
    timed = [line for line in lines if line.kind is LineKind.TIME]
    names, rows = list(dict.fromkeys(line.runtime for line in timed)), list[RawRow]()
    for key in dict.fromkeys(line.row for line in timed):
        alike = [line for line in timed if line.row == key]
        figures = {name: [line for line in alike if line.runtime == name] for name in names}
        best, first = fastest(figures), alike[0]
        cells = [figure(figures[n], best=n == best) if figures[n] else None for n in names]
        engines = [median(found) for each in figures.values() if (found := medians(each)) and each[0].engine]
        others = [
            median(found) for each in figures.values() if (found := medians(each)) and not each[0].engine
        ]
        ratio = f"{min(others) / min(engines):.3f}" if engines and others else None
        processes = str(len({line.run for line in alike}))
        rows.append([first.title, first.place, *cells, ratio, processes])
    headings = ("model", "sizes", *(f"#{name}" for name in names), "#engine ×", "#processes")
    return table("p50 in µs: median of the processes, and their range", headings, rows)


def streams_table(lines: Sequence[Line]) -> Table:
    """Calls per second: a row for every model, size and runtime, a column for every number of streams."""
    rates: dict[tuple[str, ...], dict[int, float]] = {}
    for line in lines:
        if line.rate is not None:
            key = line.title, line.place, line.runtime
            rates.setdefault(key, {})[line.rate.streams] = line.rate.per_second
    counts = sorted({count for found in rates.values() for count in found})
    rows = [
        [*key, *(f"{found[n]:,.0f}" if n in found else None for n in counts)] for key, found in rates.items()
    ]
    headings = ("model", "sizes", "runtime", *(f"#{plural(count, 'stream')}" for count in counts))
    return table("Calls per second", headings, rows)


def kernels_table(lines: Sequence[Line]) -> Table:
    """Where the time of a call goes: GEMMs, attention and all other kernels of each runtime, as profiled."""
    kinds = (  # kernels that PyTorch generates are named after all that they fuse
        ("others", r"^triton_(poi|per|red)"),
        ("attention", r"sdpa|flash|fmha|attention|lean_reduction"),
        ("GEMMs", r"nvjet|gemm|gemv|cutlass|splitk|xmma|triton_tem"),
        ("others", ""),
    )
    last = {(line.row, line.runtime): line for line in lines if line.kernels}
    rows = list[RawRow]()
    for line in last.values():
        spent, launches = Counter[str](), 0.0
        for name, calls, microseconds in line.kernels:
            kind = next(kind for kind, pattern in kinds if re.search(pattern, name, re.IGNORECASE))
            spent[kind] += microseconds
            launches += calls
        cells = [f"{spent[kind]:.1f}" for kind in ("GEMMs", "attention", "others")]
        rows.append([line.title, line.place, line.runtime, *cells, f"{launches:.0f}"])
    headings = ("model", "sizes", "runtime", "#GEMMs", "#attention", "#others", "#launches")
    return table("Device time of one call in µs, by kernel", headings, rows)


def builds_table(lines: Sequence[Line]) -> Table:
    """Fused attentions of all engines that were built: a row for every model, a column for every runtime."""
    builds = [line for line in lines if line.kind is LineKind.BUILD]
    built = {(line.model, line.precision, line.backend): line for line in builds}
    places = sorted({(precision, backend) for _, precision, backend in built}, key=lambda each: each[::-1])
    rows = []
    for model in dict.fromkeys(model for model, *_ in built):
        found = [built.get((model, *place)) for place in places]
        cells = ["/".join(map(str, line.engine.fused)) if line and line.engine else None for line in found]
        rows.append([model, *cells])
    headings = ("model", *(f"{backend}, {precision}" for precision, backend in places))
    return table("Fused attentions", headings, rows)


def evidence_table(lines: Sequence[Line], contract: Sequence[str]) -> Table:
    """What is known of each TensorRT: measured, built and not run, or only its API.

    Args:
        lines: The lines of all files.
        contract: Versions whose API surface the contract test knows, as `tensorrt 10.14.1`.
    """
    counts = Counter(
        (f"{line.engine.backend} {line.engine.version}", line.kind) for line in lines if line.engine
    )
    versions = {name for name, _ in counts}
    for name in contract:  # 1.7.1 of the contract is 1.7.1.116 of an engine
        if not any(known == name or known.startswith(f"{name}.") for known in versions):
            versions.add(name)
    rows: list[RawRow] = []
    for name in sorted(versions):
        timed, built = counts[name, LineKind.TIME], counts[name, LineKind.BUILD]
        status = "measured" if timed else "built, not run" if built else "contract only"
        rows.append([name, status, *(str(count) if count else None for count in (timed, built))])
    headings = ("runtime", "evidence", "#measurements", "#builds")
    return table("What is known of each runtime", headings, rows)


def contract():
    """The versions whose API the contract test knows."""
    names = json.loads(SURFACES.read_text(encoding="utf-8"))
    return [
        f"tensorrt-{name.replace('-', ' ')}" if name.startswith("rtx") else f"tensorrt {name}"
        for name in names
    ]


TABLES = {"": latency_table, "streams": streams_table, "kernels": kernels_table, "builds": builds_table}


def marked_text(name):
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
        lambda found: f"{found[1]}\n{marked_text(found[2])}\n{found[3]}",
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
