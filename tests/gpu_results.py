"""A pytest plugin for `.ci/gpu`: every result is written as soon as its test has ended.

A process that is killed loses nothing that ended before. Only the process that distributes the tests writes;
with workers, their reports arrive there.
"""

import json
import os
from itertools import islice
from pathlib import Path

import pytest

SECONDS = Path(__file__).parent / "gpu" / "seconds.json"  # of the longest tests, as `results.jsonl` had them
OUT = Path(os.environ["MHA_DEPLOY_GPU_RESULTS"])
_WORST = ("passed", "xfailed", "skipped", "failed", "error")
_found: dict[str, tuple[str, float]] = {}
_texts: dict[str, str] = {}


def _is_worker():
    return "PYTEST_XDIST_WORKER" in os.environ


def _append(path, text):
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leave out what ended before, and note what is to run: all workers collect the same."""
    ended = set(json.loads((OUT / "ended.json").read_text(encoding="utf-8")))
    left = [item for item in items if item.nodeid in ended]
    config.hook.pytest_deselected(items=left)
    items[:] = _longest_first([item for item in items if item.nodeid not in ended])
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        planned = json.dumps(sorted({*ended, *(item.nodeid for item in items)}))
        temporary = OUT / f"planned.{os.getpid()}"
        temporary.write_text(planned, encoding="utf-8")
        temporary.replace(OUT / "planned.json")


def _longest_first(items):
    """Each worker begins with its share of the longest: workers get equal parts of the list, in its order."""
    seconds = json.loads(SECONDS.read_text(encoding="utf-8"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    longest = sorted((i for i in items if i.nodeid in seconds), key=lambda i: -seconds[i.nodeid])
    others, ordered = iter([item for item in items if item.nodeid not in seconds]), []
    for at in range(workers):
        mine, end = longest[at::workers], (at + 1) * len(items) // workers
        ordered += [*mine, *islice(others, max(0, end - len(ordered) - len(mine)))]
    return [*ordered, *others]


def _outcome(report):
    if report.failed:
        return "failed" if report.when == "call" else "error"
    if report.skipped:
        return "xfailed" if hasattr(report, "wasxfail") else "skipped"
    return "passed"


def pytest_runtest_logreport(report):
    """Write what became of a test: of its parts, the worst counts."""
    if _is_worker():
        return
    name, outcome = report.nodeid, _outcome(report)
    known, seconds = _found.get(name, ("passed", 0.0))
    _found[name] = (max(known, outcome, key=_WORST.index), seconds + report.duration)
    if report.failed:
        _append(OUT / "failures.txt", f"\n==== {name} ({report.when})\n{report.longreprtext}\n")
        _texts[name] = _texts.get(name, "") + report.longreprtext
    elif report.skipped:
        _texts[name] = str(report.longrepr[-1]) if isinstance(report.longrepr, tuple) else ""
    if report.when not in ("setup", "call"):  # a worker that crashed has neither
        final, seconds = _found.pop(name)
        line = {"test": name, "outcome": final, "seconds": round(seconds, 3), "text": _texts.pop(name, "")}
        _append(OUT / "results.jsonl", json.dumps(line) + "\n")


def pytest_collectreport(report):
    """A file that cannot be collected is a failure of its own."""
    if report.failed and not _is_worker():
        _append(OUT / "failures.txt", f"\n==== {report.nodeid} (collection)\n{report.longreprtext}\n")
        line = {"test": report.nodeid, "outcome": "error", "seconds": 0.0}
        _append(OUT / "results.jsonl", json.dumps(line) + "\n")
