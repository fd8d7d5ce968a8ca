"""One cell of a matrix, in the environment of its runtime: an engine is built, and run where it can be.

`python -m mha_deploy.regression.cell` reads a request as JSON from stdin and prints the result as JSON.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mha_deploy.bundle.folder import Bundle, open_bundle
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.engine.manifest import Engine, first_gpu
from mha_deploy.engine.options import parse_ranges
from mha_deploy.engine.run import reasons_not_to_run
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.options import EngineOptions, ValidateOptions
from mha_deploy.runtime.child import RuntimeCrash, isolation
from mha_deploy.runtime.tensorrt.versions import load
from mha_deploy.validate.run import validate_bundle
from mha_deploy.validate.verdict import FAILURE, engines_to_dict, frame, model_to_dict


def probe(request: Mapping[str, Any]) -> dict[str, str]:
    """The version of the runtime here, and the GPU."""
    try:
        gpu = first_gpu()
        return {"version": load(request["backend"]).version, "gpu": gpu["name"] if gpu else ""}
    except DeployError as error:
        return {"problem": error.in_one_line}


def run_cell(request: Mapping[str, Any], archive: bytes | None = None) -> dict[str, Any]:
    """Build an engine from a bundle, and validate it where it can run.

    Args:
        request: `backend`, `options` of the build, `time_limit`, and `bundle`, the path of the bundle.
        archive: The bundle as a tar archive, where workers do not share a file system.

    Returns:
        `status` (`passed`, `failed`, `built`, `refused`, `crashed` or `unavailable`), `why`, `seconds`,
        `engine_sha256`, and `report`, the data of the report; without a GPU only its model, its engine and
        its environment.
    """
    started = time.monotonic()
    isolation.limit_s = request["time_limit"]
    report: dict[str, Any] | None = None
    plan = ""
    try:
        with tempfile.TemporaryDirectory(prefix="mha-deploy-cell-") as folder:
            bundle = _unpacked(request["bundle"], archive, Path(folder))
            engine = _engine(bundle, request)
            plan = engine.manifest.engine_sha256
            status, why, report = _judged(bundle, engine)
    except RuntimeCrash as error:
        status, why = "crashed", error.in_one_line
    except BackendUnavailable as error:
        status, why = "unavailable", error.in_one_line
    except DeployError as error:
        status, why = "refused", error.in_one_line
    seconds = round(time.monotonic() - started, 3)
    return {"status": status, "why": why, "seconds": seconds, "engine_sha256": plan, "report": report}


def _unpacked(path: str, archive: bytes | None, folder: Path) -> Bundle:
    target = folder / "bundle"
    if archive is None:
        shutil.copytree(path, target, ignore=shutil.ignore_patterns("engines", "report.*", "bench.*"))
    else:
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            packed.extractall(target, filter="data")
    return open_bundle(target)


def packed(bundle: Path) -> bytes:
    """A bundle as a tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("manifest.json", *open_bundle(bundle).manifest.files):
            archive.add(bundle / name, arcname=name)
    return buffer.getvalue()


def _engine(bundle: Bundle, request: Mapping[str, Any]) -> Engine:
    spec, chosen = bundle.manifest.spec, dict(request["options"])
    chosen["profiles"] = [parse_ranges(text, spec) for text in chosen.get("profiles", ())]
    return engine_from_bundle(bundle, EngineOptions(backend=request["backend"], **chosen))


def _judged(bundle: Bundle, engine: Engine) -> tuple[str, str, dict[str, Any]]:
    reasons = reasons_not_to_run(engine)
    if reasons:
        why = "; ".join(reasons)
        return "built", why, _built(bundle, engine, why)
    # The graph is the same in every cell: only the engine is judged, and timed.
    options = ValidateOptions(backends=(engine.path.stem,), sweep=False)
    validated = validate_bundle(bundle, options)
    failed = any(finding.level == FAILURE for finding in validated.findings)
    status = "passed" if validated.passed else "failed" if failed else "built"
    return status, validated.headline, validated.to_dict()


def _built(bundle: Bundle, engine: Engine, why: str) -> dict[str, Any]:
    engines = [{**each, "why_not": why} for each in engines_to_dict([engine], (), ())]
    return {**frame(), "model": model_to_dict(bundle), "engines": engines}


def main() -> None:
    """Serve one request."""
    request = json.load(sys.stdin)
    result = probe(request) if request.get("probe") else run_cell(request)
    from mha_deploy.report.schema import as_plain

    print(json.dumps(as_plain(result)))


if __name__ == "__main__":
    main()
