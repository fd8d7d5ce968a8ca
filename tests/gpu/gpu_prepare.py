"""What worker processes do for the GPU tests: they must find it by name."""

from pathlib import Path

from mha_deploy.bundle import open_bundle
from mha_deploy.catalog import find_spec
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.engine.options import EngineOptions
from mha_deploy.errors import DeployError
from mha_deploy.export.exporter import bundle_from_spec
from mha_deploy.export.options import ExportOptions


def export(name, precision, folder):
    """Write a bundle."""
    bundle_from_spec(find_spec(name), Path(folder), ExportOptions(precision=precision))


def build(folder):
    """Build the engine of a bundle; why there is none, otherwise."""
    try:
        options = EngineOptions(backend="tensorrt", optimization_level=1)
        engine_from_bundle(open_bundle(Path(folder)), options)
    except DeployError as error:
        return error.in_one_line
    return None
