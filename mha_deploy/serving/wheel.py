"""A wheel of this very version, from the files that are running: a server installs it from the repository."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from mha_deploy import __version__
from mha_deploy.model.catalog import catalog_folder
from mha_deploy.output import put_file

_PACKAGE = Path(__file__).resolve().parents[1]
_LEFT_OUT = (
    "__pycache__",
    "native",
    "models",
)  # what is compiled, not needed by a server, or added by itself
_EPOCH = (1980, 1, 1, 0, 0, 0)
_TAGS = "Wheel-Version: 1.0\nGenerator: mha-deploy\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def wheel_name() -> str:
    """The name of the file."""
    return f"mha_deploy-{__version__}-py3-none-any.whl"


def write_wheel(folder: Path) -> Path | None:
    """Write the wheel to a folder; None where nobody knows what this package needs: it was not installed."""
    content = _content()
    if content is None:
        return None
    target = folder / wheel_name()
    put_file(target, content)
    return target


@functools.cache
def _content() -> bytes | None:
    """The wheel; of all files, to compress it takes longest, and it is the same for every package."""
    try:
        known = distribution("mha-deploy")
    except PackageNotFoundError:
        return None
    metadata = known.read_text("METADATA")
    if metadata is None or known.version != __version__:
        return None
    about = f"mha_deploy-{__version__}.dist-info"
    files = {f"mha_deploy/{name}": path.read_bytes() for name, path in _files(_PACKAGE, _LEFT_OUT)}
    files |= {f"mha_deploy/models/{name}": path.read_bytes() for name, path in _files(catalog_folder())}
    files |= {f"{about}/METADATA": metadata.encode(), f"{about}/WHEEL": _TAGS.encode()}
    if (entries := known.read_text("entry_points.txt")) is not None:
        files[f"{about}/entry_points.txt"] = entries.encode()
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{about}/RECORD"] = ("\n".join([*lines, f"{about}/RECORD,,"]) + "\n").encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _files(root: Path, left_out: tuple[str, ...] = ("__pycache__",)) -> list[tuple[str, Path]]:
    found = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    named = ((path.relative_to(root), path) for path in found)
    return [(name.as_posix(), path) for name, path in named if not {*left_out} & {*name.parts}]


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
