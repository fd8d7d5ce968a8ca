"""What worker processes do for the GPU tests: they must find it by name."""

import functools
import os
import shutil
from pathlib import Path

import torch
from workshop import Workshop

import mha_deploy as md
from mha_deploy.bundle.folder import open_bundle
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.errors import DeployError
from mha_deploy.options import EngineOptions


def share_cores(processes):
    """Let PyTorch use this process's share of the cores: threads beyond that only wait for each other."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))


def export(name, precision, folder):
    """Write a bundle."""
    md.export(name, folder / "bundle", precision=precision)


def build(workshop, name, precision, folder):
    """Build the engine of a bundle, in a copy of it; why there is none, otherwise."""
    exported, _ = workshop.thing(f"{name}-{precision}", functools.partial(export, name, precision))
    shutil.copytree(exported / "bundle", folder / "bundle")
    try:
        options = EngineOptions(backend="tensorrt", optimization_level=1)
        engine_from_bundle(open_bundle(folder / "bundle"), options)
    except DeployError as error:
        return error.in_one_line
    return None


def begin_export(root, name, precision):
    """Write a bundle, unless somebody else does."""
    Workshop(Path(root)).begin(f"{name}-{precision}", functools.partial(export, name, precision))


def begin_build(root, name, precision):
    """Build an engine, unless somebody else does."""
    workshop = Workshop(Path(root))
    workshop.begin(f"{name}-{precision}-engine", functools.partial(build, workshop, name, precision))
