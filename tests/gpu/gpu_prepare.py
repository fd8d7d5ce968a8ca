"""What a worker process does for the GPU tests: it must find this by name."""

from pathlib import Path

from mha_deploy.catalog import find_spec
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.engine.options import EngineOptions
from mha_deploy.errors import DeployError
from mha_deploy.export.exporter import bundle_from_spec
from mha_deploy.export.options import ExportOptions


def prepare(name, precision, folder, with_engine):
    """Export a bundle, and build its engine where that is wanted; why there is none, otherwise."""
    bundle = bundle_from_spec(find_spec(name), Path(folder), ExportOptions(precision=precision))
    if not with_engine:
        return "nobody asked for an engine"
    try:
        engine_from_bundle(bundle, EngineOptions(backend="tensorrt", optimization_level=1))
    except DeployError as error:
        return error.in_one_line
    return None
