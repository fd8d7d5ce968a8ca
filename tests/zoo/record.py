"""Take the architectures of the zoo the whole way, and write what happened to docs/zoo.md.

python tests/zoo/record.py --jobs 14    every architecture, each in a process of its own
python tests/zoo/record.py bert vit     these, and the others as they were recorded
python tests/zoo/record.py --resume     those that were not recorded today of this commit
python tests/zoo/record.py --render     docs/zoo.md from the record

The exit code is 1 where an architecture does not do what `architectures.py` expects of it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from architectures import ZOO, Entry

import mha_deploy as md

RECORD = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
GOLDEN = ("opt", "odd")
LIBRARIES = {"torch": "torch", "transformers": "transformers", "timm": "timm", "torchvision": "torchvision"}
LIBRARIES |= {"diffusers": "diffusers", "open_clip": "open_clip_torch", "x_transformers": "x-transformers"}
LIBRARIES |= {"onnx": "onnx", "onnxruntime": "onnxruntime", "TensorRT-RTX": "tensorrt_rtx_cu13"}


def measure(
    name: str, folder: Path, *, engine: bool = True, golden: Sequence[str] = GOLDEN
) -> dict[str, Any]:
    """Export an architecture (FP16, else mixed precision), build it with TensorRT-RTX, and validate it.

    Args:
        name: Its name.
        folder: Where to write the bundle.
        engine: Whether to build an engine, where TensorRT-RTX is installed.
        golden: The golden cases.
    """
    made, found = ZOO[name].make(), {}
    try:
        try:
            bundle = md.export(made, folder / name, precision="fp16", golden=golden)
        except md.DeployError as error:
            found["fp16"] = _short(error)
            bundle = md.export(ZOO[name].make(), folder / name, precision="auto", golden=golden)
    except md.DeployError as error:
        return {**found, "error": _short(error)}
    manifest = bundle.manifest
    axes = [axis for axis, sizes in manifest.spec.axes.items() if not sizes.is_dynamic]
    found |= {
        "precision": "auto" if "fp16" in found else "fp16",
        "attentions": manifest.spec.attention_count,
        "fused": len(manifest.attention),
        "fixed": axes,
        "unfused": [
            _short(f"{each.name} is not fused: {each.reason}" + f" ({each.place})" * bool(each.place))
            for each in manifest.unfused
        ],
    }
    if engine and importlib.util.find_spec("tensorrt_rtx"):
        try:
            built = md.build_engine(bundle, backend="tensorrt-rtx", targets="89", allow_decomposed=True)
            found["engine"] = built.manifest.fused_count[0]
        except md.DeployError as error:
            found |= {"engine": 0, "engine_error": _short(error)}
    try:
        report = md.validate(bundle, runtimes=("ort-cpu",), latency=False)
    except md.DeployError as error:
        return {**found, "passed": False, "failure": _short(error)}
    if unmeasured := [_short(note) for note in report.to_dict()["notes"] if "not measured" in note]:
        found["unmeasured"] = unmeasured
    passed = report.outcome != "failed"
    return {**found, "passed": passed, **({} if passed else {"failure": _short(report.headline)})}


def expected(entry: Entry) -> dict[str, Any]:
    """What `measure` is expected to find: the counts, or the reason of the refusal."""
    if entry.fails:
        return {"error": entry.fails}
    fused = entry.attentions if entry.fused is None else entry.fused
    engine = fused if entry.engine is None else entry.engine
    return {"attentions": entry.attentions, "fused": fused, "engine": engine, "passed": entry.passes}


def differences(name: str, found: dict[str, Any]) -> list[str]:
    """Where an architecture does not do what is expected of it."""
    wanted = expected(ZOO[name])
    if "error" in wanted:
        return (
            []
            if wanted["error"] in found.get("error", "")
            else [f"not refused for {wanted['error']!r}: {found}"]
        )
    if "error" in found:
        return [found["error"]]
    return [
        f"{key}: {found[key]}, not {value}. {found.get('unfused')} {found.get('failure', '')}"
        for key, value in wanted.items()
        if key in found and found[key] != value
    ]


def _short(text: object) -> str:
    """One line without the paths of this machine."""
    line = " ".join(str(text).split())
    return re.sub(r"/(?:[\w.+-]+/)+(?=[\w.+-]+/[\w.+-]+)", "", line)[:400]


# -- the page --------------------------------------------------------------------------------------


def render(record: dict[str, Any]) -> str:
    """The page of a record."""
    results = record["results"]
    passed = [name for name, found in results.items() if found.get("passed")]
    complete = [name for name in passed if results[name]["fused"] >= expressible(name)]
    built = [name for name in passed if "engine" in results[name] and "engine_error" not in results[name]]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    times = Counter(found["measured"] for found in results.values())
    measured = "; ".join(f"{times[when]} on {when}" for when in sorted(times, reverse=True))
    day = max(times).partition(",")[0]
    old = [name for name, found in results.items() if found["measured"] < day]
    lines = [
        "# Architectures",
        "",
        "This page is generated by `tests/zoo/record.py`. Each architecture has one or two layers, small",
        "sizes and random weights. Most of those in the library `torch` were written from their papers.",
        "Each is exported with a dynamic batch and, where the model has one, a dynamic length; an engine is",
        "built with TensorRT-RTX, without a GPU; and the graph is validated in ONNX Runtime on a CPU against",
        "its FP64 oracle. `pytest -m slow tests/zoo` repeats all of it.",
        "",
        f"- {len(passed)} of {len(results)} export and pass parity.",
        f"- In {len(complete)} of {len(results)}, every attention that ONNX can express is one node.",
        f"- {len(built)} engines were built; they were not run.",
        *(
            [f"- {len(ZOO) - len(results)} more were not measured for this page."]
            if results.keys() < ZOO.keys()
            else []
        ),
        *_wrapped(f"Versions: {versions}."),
        *_wrapped(f"Measured: {measured}." + " Those not measured on the last day have a star." * bool(old)),
        "",
        "*fp16* is the module in FP16; *auto* is the float32 module as a mixed-precision graph",
        "(`--precision auto`), where the module cannot be exported in FP16. *One node* counts the attentions",
        "that are one ONNX `Attention` node in the graph, *fused in RTX* those that are one kernel in the",
        "engine.",
        "",
        "| architecture | family | library | precision | attentions | one node | fused in RTX | parity |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(name, found, "\\*" * (name in old)) for name, found in results.items()]
    lines += ["", "## What does not work, and why", ""]
    lines += ["A message is that of mha-deploy, shortened.", ""]
    for name, found in results.items():
        first, *more = _reasons(name, found) or [None]
        lines += _wrapped(f"**{name}**: {first}") if first else []
        lines += [line for why in more for line in _wrapped(why, "  ")]
    return "\n".join(lines) + "\n"


def _wrapped(text: str, indent: str = "") -> list[str]:
    begin, rest = f"{indent}- ", f"{indent}  "
    return textwrap.wrap(text, 100, initial_indent=begin, subsequent_indent=rest, break_on_hyphens=False)


def _message(error: str) -> str:
    """An error without its hint, in one sentence: what happened, and what was got."""
    what, _, got = error.partition(" try: ")[0].partition(" got: ")
    return f"{what.removesuffix('.')}: {got}" if got else what


def expressible(name: str) -> int:
    """How many attentions of an architecture one ONNX node can compute."""
    entry = ZOO[name]
    return entry.attentions - entry.inexpressible


def _row(name: str, found: dict[str, Any], star: str) -> str:
    entry = ZOO[name]
    if "error" in found:
        cells = ["refused", str(entry.attentions), "", "", ""]
    else:
        parity = "passed" if found["passed"] else "failed"
        engine = "not built" if "engine" not in found or "engine_error" in found else str(found["engine"])
        cells = [found["precision"], str(found["attentions"]), str(found["fused"]), engine, parity]
    return "| " + " | ".join([name + star, entry.family, entry.library, *cells]) + " |"


def _reasons(name: str, found: dict[str, Any]) -> list[str]:
    entry = ZOO[name]
    reasons = [entry.why] if entry.why else []
    if "error" in found:
        return [*reasons, f"not exported: {_message(found['error'])}"]
    if not found["passed"]:
        reasons.append(f"parity: {_message(found['failure'])}")
    if "engine_error" in found:
        reasons.append(f"no engine: {_message(found['engine_error'])}")
    if "fp16" in found:
        reasons.append(f"not in fp16: {_message(found['fp16'])}")
    if found["fixed"]:
        reasons.append(f"axis {', '.join(found['fixed'])} is fixed")
    if found["fused"] < expressible(name) and not entry.why:
        reasons += found["unfused"][:1]
    return reasons


# -- the record ------------------------------------------------------------------------------------


def measured_apart(name: str, seconds: float, threads: int) -> dict[str, Any]:
    """Measure an architecture in a process of its own: a crash or a hang fails this one only."""
    if not importlib.util.find_spec(ZOO[name].library):
        return {"error": f"{ZOO[name].library} is not installed"}
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.json")
        command = [sys.executable, __file__, name, "--into", str(found)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"error": f"not done within {seconds:.0f} seconds"}
        if found.exists():
            return json.loads(found.read_text(encoding="utf-8"))
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"error": _short(f"its process ended with {done.returncode}: {last}")}


def main(arguments: list[str]) -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: every architecture")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time; default: 1")
    parser.add_argument("--seconds", type=float, default=900, help="time limit of each; default: 900")
    parser.add_argument("--commit", default=None, help="default: what git reports")
    parser.add_argument("--resume", action="store_true", help="only those not recorded today of this commit")
    parser.add_argument("--render", action="store_true", help="only write the page")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.into is not None:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(options.names[0], Path(folder))
        options.into.write_text(json.dumps(found), encoding="utf-8")
        return 0
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    if not options.render:
        measured = f"{date.today().isoformat()}, {platform.machine()}, commit {options.commit or _commit()}"
        record["versions"] = {name: _version(package) for name, package in LIBRARIES.items()}
        results = record["results"]
        names = options.names or list(ZOO)
        if options.resume:
            names = [name for name in names if results.get(name, {}).get("measured") != measured]
        threads = max(1, (os.cpu_count() or 1) // options.jobs)
        with ThreadPoolExecutor(options.jobs) as pool:
            running = {name: pool.submit(measured_apart, name, options.seconds, threads) for name in names}
            for name, job in running.items():
                results[name] = {**job.result(), "measured": measured}
                print(name, results[name], *differences(name, results[name]), sep="\n  ", flush=True)
                record["results"] = {name: results[name] for name in ZOO if name in results}
                _write(record)
    PAGE.write_text(render(record), encoding="utf-8")
    wrong = {name: differences(name, found) for name, found in record["results"].items()}
    print(*(f"{name}: {each}" for name, several in wrong.items() for each in several), sep="\n")
    return int(any(wrong.values()))


def _write(record: dict[str, Any]) -> None:
    lines = [f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in record["results"].items()]
    head = json.dumps({"versions": record["versions"]}, indent=1)[:-2]
    text = head + ',\n "results": {\n' + ",\n".join(lines) + "\n }\n}\n"
    RECORD.write_text(text, encoding="utf-8")


def _version(package: str) -> str:
    for name in (package, f"{package}-gpu"):
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return "not installed"


def _commit() -> str:
    """The commit, and whether the code differs from it; the record itself may, in a run that is resumed."""
    git = ["git", "-C", str(PAGE.parents[1])]
    asked = ["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "mha_deploy", "tests/zoo/*.py"]
    try:
        commit, changed = (
            subprocess.run([*git, *each], capture_output=True, text=True, check=True).stdout.strip()
            for each in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
