"""`mha-deploy inspect`: what is in a bundle or an ONNX file?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mha_deploy.cli.options import Json, print_json

if TYPE_CHECKING:
    from mha_deploy.engine.manifest import Engine


def inspect(
    what: Annotated[Path, typer.Argument(help="A bundle, an .engine or an .onnx file.")], json: Json = False
) -> None:
    """Show what is in a bundle, an engine or an ONNX file, and check the hashes."""
    from rich.console import Console

    from mha_deploy.bundle.folder import open_bundle
    from mha_deploy.cli.tables import attention_renderable, bundle_renderable

    if what.suffix == ".engine":
        from mha_deploy.cli.build_engine import engine_to_dict, print_engine
        from mha_deploy.engine.manifest import misfits_here, open_engine

        engine = open_engine(what)
        _check_bundle_of(engine)
        if json:
            print_json(engine_to_dict(engine) | {"misfits": misfits_here(engine), "shown": engine.is_shown})
        else:
            print_engine(engine, details=True)
            if not engine.is_shown:
                typer.echo("the verdict is that of the build: only TensorRT can read this plan")
        return
    if what.suffix == ".onnx":
        from mha_deploy.graph.attention_node import attention_nodes
        from mha_deploy.graph.file import load_graph

        nodes = [node.describe() for node in attention_nodes(load_graph(what))]
        if json:
            print_json({"file": str(what), "attention": nodes})
        else:
            Console().print(attention_renderable(nodes))
        return
    bundle = open_bundle(what)  # checks every hash
    if json:
        print_json({"bundle": str(what), "hashes": "match", **bundle.manifest.to_dict()})
    else:
        Console().print(bundle_renderable(bundle, details=True))
        _list_engines(what)


def _check_bundle_of(engine: Engine) -> None:
    """Refuse an engine that lies in a bundle it was not built from."""
    from mha_deploy.bundle.folder import MANIFEST

    folder = engine.path.resolve().parent.parent
    if (folder / MANIFEST).is_file():
        engine.check_bundle(folder)


def _list_engines(bundle: Path) -> None:
    """One line per engine of a bundle, each opened and checked."""
    if not any(bundle.glob("*/*.engine")):
        return
    from mha_deploy.engine.manifest import FOLDER, open_engine

    for path in sorted((bundle / FOLDER).glob("*.engine")):
        engine = open_engine(path)
        engine.check_bundle(bundle)
        manifest = engine.manifest
        fused = manifest.fusion_summary if engine.is_shown else f"{manifest.fusion_summary} (not verified)"
        typer.echo(f"engine {path}: {manifest.backend} {manifest.version}, {fused}")
