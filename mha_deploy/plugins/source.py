"""Where the plugin's source lies, and where a library that was built from it goes."""

from __future__ import annotations

import os
from pathlib import Path

from mha_deploy import __version__

ENVIRONMENT = "MHA_DEPLOY_PLUGINS"
"""The variable that names a library, or a folder of them; libraries are built into that folder, too."""

_PACKAGE = Path(__file__).resolve().parent


def source_folder() -> Path:
    """The C++ source: inside an installed wheel, or `plugins/` of a checkout."""
    installed = _PACKAGE / "native"
    return installed if installed.is_dir() else _PACKAGE.parent.parent / "plugins"


def cache_folder() -> Path:
    """The folder of libraries that belongs to this version of the tool."""
    root = os.environ.get("XDG_CACHE_HOME")
    base = Path(root) if root else Path.home() / ".cache"
    return base / "mha-deploy" / "plugins" / __version__


def named_place() -> Path | None:
    """The library or folder that the environment names, if it does."""
    named = os.environ.get(ENVIRONMENT)
    return Path(named).expanduser() if named else None


def build_folder() -> Path:
    """Where `plugins build` writes unless told otherwise."""
    named = named_place()
    if named is None:
        return cache_folder()
    return named.parent if named.suffix == ".so" else named
