"""Make small bundles by hand, and damage them in one place at a time."""

import contextlib
import json
import shutil

import numpy as np
from golden_made import made_case

from mha_deploy.bundle.cases import read_arrays, write_arrays, write_case
from mha_deploy.bundle.folder import MANIFEST, MODEL, BundleWriter, sha256
from mha_deploy.bundle.manifest import GoldenEntry, Manifest, Source
from mha_deploy.engine.engine import EngineManifest
from mha_deploy.errors import DeployError
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.file import load_graph
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.runtime.tensorrt.engine_verdict import EngineVerdict, PrecisionStatus, PrecisionVerdict

SIZES = {"B": 2, "S": 3}


def manifest(name="tiny-mha", precision="fp16"):
    """A manifest with one golden case of SIZES."""
    return Manifest(
        spec=find_spec(name),
        precision=PRECISIONS[precision],
        opset=23,
        weights="made by hand",
        attention=[],
        golden=[
            GoldenEntry(name="opt", file="golden/opt.safetensors", sizes=dict(SIZES), source=Source.LAYER)
        ],
        observed=[],
        checks={"graph": ["nothing"]},
        versions={"mha-deploy": "0"},
        notes=["a note"],
    )


def engine_manifest(nodes=(), **changes):
    """The manifest of an engine of two profiles, with the verdicts of these nodes."""
    ranges = {"B": "1:2:4", "S": "1:16:64"}
    precision = PrecisionVerdict(requested="fp16", status=PrecisionStatus.VERIFIED, counts={})
    known = {
        "backend": "tensorrt-rtx", "version": "1.7.1", "gpu": None, "targets": [], "model": "tiny-mha",
        "precision": "fp16", "dialect": "trt", "profiles": [ranges, ranges | {"S": "1:1:1"}],
        "bundle_sha256": "", "engine_sha256": "", "engine_bytes": 1, "seconds": 1.0, "strongly_typed": True,
        "verdict": EngineVerdict(nodes=tuple(nodes), precision=precision), "kernels": [], "options": {},
        "findings": [], "notes": [],
    }  # fmt: skip
    return EngineManifest(**known | changes)


def golden_case(name="tiny-mha", precision="fp16"):
    """Random numbers in the shapes and types of a spec; eager is the oracle, rounded."""
    spec, rng = find_spec(name), np.random.default_rng(0)

    def draw(tensors, dtype):
        return {t.name: rng.standard_normal(t.shape(SIZES)).astype(dtype) for t in tensors}

    inputs = draw(spec.inputs, PRECISIONS[precision].numpy)
    oracle = draw(spec.outputs, np.float64)
    return made_case(oracle, name="opt", sizes=SIZES, inputs=inputs, precision=precision)


def fill(folder, name="tiny-mha", precision="fp16"):
    """Write the files of a small bundle, all but the manifest."""
    (folder / MODEL).write_bytes(b"not really a graph")
    (folder / "golden").mkdir()
    write_case(folder / "golden" / "opt.safetensors", golden_case(name, precision))


def small_bundle(target, name="tiny-mha", precision="fp16"):
    """A bundle with a stand-in for the graph, written the way every bundle is."""
    with BundleWriter(target) as writer:
        fill(writer.path, name, precision)
        return writer.finish(manifest(name, precision))


def copy_of(bundle, target):
    """A copy of a shared bundle, to alter; gives its folder. What others put beside it stays there."""
    shutil.copytree(bundle.path, target, ignore=shutil.ignore_patterns("engines", "report.*"))
    return target


def edit_manifest(folder, change):
    """Change the manifest of a bundle: `change` gets its data."""
    data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    change(data)
    (folder / MANIFEST).write_text(json.dumps(data), encoding="utf-8")


def rehash(folder, *, derive=True):
    """Make the manifest agree with files and graph again, as someone would who hides a change."""

    def update(data):
        with contextlib.suppress(DeployError):  # some graphs are stand-ins
            nodes = attention_nodes(load_graph(folder / MODEL)) if derive else ()
            places = {each["name"]: each.get("place") for each in data["attention"]}
            if derive:
                data["attention"] = [{**node.describe(), "place": places.get(node.name)} for node in nodes]
        for name in data["files"]:
            path = folder / name
            data["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}

    edit_manifest(folder, update)


def edit_arrays(folder, change, case="opt"):
    """Change the arrays of a golden case: `change` gets them by name; the manifest is made to agree."""
    path = folder / "golden" / f"{case}.safetensors"
    arrays = read_arrays(path)
    change(arrays)
    write_arrays(path, arrays)
    rehash(folder)
