"""How long the commands take that people run most, and their share of what another checkout took.

    python benchmarks/command_times.py                     # of this checkout
    python benchmarks/command_times.py --before ../older   # and of another, one after the other, as ratios

Every command is a fresh process. Seconds of all processors are compared, so that other work on the machine
counts little; the elapsed time beside them is that of an idle machine only where it is one. The best of
several runs is taken.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Name, arguments, how often, and the seconds that it may take on two idle cores.
COMMANDS = (
    ("--version", ("--version",), 5, 0.4),
    ("--help", ("--help",), 5, 0.4),
    ("models", ("models",), 5, 0.4),
    ("export tiny-gqa", ("export", "tiny-gqa", "-o", "tiny", "--overwrite"), 2, 8.0),
    ("validate tiny", ("validate", "tiny"), 2, 4.0),
    ("inspect tiny", ("inspect", "tiny"), 3, 0.4),
    ("analyze bert-base", ("analyze", "bert-base"), 3, 0.4),
    ("check tiny", ("check", "tiny"), 3, 0.8),
    ("inspect tiny/model.onnx", ("inspect", "tiny/model.onnx"), 3, 0.8),
    ("compare tiny tiny", ("compare", "tiny", "tiny"), 3, 0.8),
    ("deploy bert-base", ("deploy", "bert-base", "-o", "bert", "--overwrite"), 1, 15.0),
)


def run(source, folder, arguments):
    """Seconds of all processors, and elapsed, of one command."""
    variables = {**os.environ, "PYTHONPATH": str(source)}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    used, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "mha_deploy", *arguments]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return cpu, time.monotonic() - begin


def main():
    """Run the commands of both checkouts in turn, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, help="another checkout, of an older version")
    parser.add_argument("--only", action="append", help="only commands that begin so")
    given = parser.parse_args()
    sources = [ROOT] if given.before is None else [given.before.resolve(), ROOT]
    with tempfile.TemporaryDirectory() as top:
        folders = {source: Path(top) / str(number) for number, source in enumerate(sources)}
        for source, folder in folders.items():
            folder.mkdir()
            run(source, folder, ("--version",))  # compiles
        head = ["command", "CPU s", "elapsed s", "may take"]
        head += [] if given.before is None else ["CPU s before", "ratio"]
        print("|", " | ".join(head), "|\n|", " | ".join("---" for _ in head), "|")
        for name, arguments, times, limit in COMMANDS:
            if given.only and not name.startswith(tuple(given.only)):
                continue
            found = {source: [] for source in sources}
            for _ in range(times):
                for source in sources:
                    found[source].append(run(source, folders[source], arguments))
            best = {source: [min(each) for each in zip(*rows, strict=True)] for source, rows in found.items()}
            cpu, elapsed = best[ROOT]
            row = [name, f"{cpu:.2f}", f"{elapsed:.2f}", f"{limit:g} s"]
            if given.before is not None:
                row += [f"{best[sources[0]][0]:.2f}", f"{cpu / best[sources[0]][0]:.2f}"]
            print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
