"""Read NumPy archives that may come from anywhere: nothing is unpickled, nothing fails with a trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from mha_deploy.errors import DeployError


def read_npz(
    path: Path, check_names: Callable[[list[str]], None] = lambda names: None
) -> dict[str, np.ndarray]:
    """Read every array of an .npz file.

    Args:
        path: The file, as `numpy.savez` writes it.
        check_names: Looks at the names before any array is read, and raises if they are not the right ones.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise ValueError("a single array, not an .npz archive")
        with loaded as archive:
            check_names(archive.files)
            return {name: _member(archive, name) for name in archive.files}
    except FileNotFoundError as error:
        raise DeployError("There is no such .npz file.", got=path) from error
    except DeployError:
        raise
    except Exception as error:  # NumPy, zipfile and the decompressors raise types that share no base
        raise DeployError(
            "The .npz file cannot be read.",
            got=f"{path}: {error}",
            hint="numpy.savez(path, name=array, ...), without objects",
        ) from error


def _member(archive: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
    array = archive[name]
    if not isinstance(array, np.ndarray):  # NumPy hands out members of another format as they are
        raise ValueError(f"{name} is not an array")
    return array
