"""What of an engine can be refitted: refused before anything is exported, and where graphs differ."""

import hashlib

import onnx_ir as ir
import pytest
from bundle_edit import copy_of, engine_manifest

import mha_deploy as md
from mha_deploy.bundle.folder import MANIFEST, sha256
from mha_deploy.engine.build import differing_part
from mha_deploy.engine.engine import engine_path, write_engine
from mha_deploy.errors import BackendUnavailable
from mha_deploy.graph.file import load_graph
from mha_deploy.runtime.tensorrt.versions import EngineError


def engine_in(bundle, folder, refit):
    """A bundle with an engine of TensorRT, built to be refitted or not."""
    path = copy_of(bundle, folder)
    plan = b"ftrt plan"
    changes = {
        "backend": "tensorrt",
        "version": "10.16.1",
        "gpu": {"name": "H200", "compute_cap": "9.0"},
        "options": {"refit": refit},
        "bundle_sha256": sha256(path / MANIFEST),
        "engine_sha256": hashlib.sha256(plan).hexdigest(),
        "engine_bytes": len(plan),
    }
    return write_engine(engine_path(path, "theirs"), plan, engine_manifest(**changes))


@pytest.mark.parametrize(("refit", "kind"), [(None, EngineError), ("identical", EngineError)])
def test_an_engine_of_fixed_weights_is_refused(refit, kind, bundles, tmp_path):
    engine = engine_in(bundles("tiny-mha"), tmp_path / "old", refit)
    with pytest.raises(kind, match="cannot be replaced") as caught:
        md.refit(engine.path, "new.safetensors", tmp_path / "new")
    assert 'refit="all"' in caught.value.hint
    assert not (tmp_path / "new").exists()


def test_an_engine_that_cannot_be_loaded_here_is_refused(bundles, tmp_path):
    engine = engine_in(bundles("tiny-mha"), tmp_path / "old", "all")
    with pytest.raises(BackendUnavailable, match="cannot be refitted"):
        md.refit(engine.path, "new.safetensors", tmp_path / "new")


def test_graphs_that_differ_in_more_than_numbers_are_found(bundles):
    path = bundles("tiny-mha").model_path
    graph, other = load_graph(path), load_graph(path)
    assert differing_part(graph, other) is None
    weight = next(iter(other.graph.initializers.values()))
    weight.const_value = ir.Tensor(weight.const_value.numpy() * 2, name=weight.name)
    assert differing_part(graph, other) is None
    assert differing_part(graph, load_graph(bundles("tiny-gqa").model_path)) is not None
    node = next(iter(other.graph))
    node.name = "another"
    assert "another" in differing_part(other, graph)
