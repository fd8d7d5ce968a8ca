"""List the nodes of the CUDA graph of one engine call by kind, and its kernels in order.

    python benchmarks/graph_nodes.py DIR --engine NAME --at B=8,S=128 [--json]

A memset or a copy between kernels takes microseconds; an event or an empty node synchronizes streams that a
single one would not need. Needs the GPU that the engine was built for.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.folder import Bundle, open_bundle
from mha_deploy.engine.engine import engine_path, open_engine, open_engine_runner
from mha_deploy.errors import DeployError
from mha_deploy.runtime.cuda import Stream
from mha_deploy.runtime.tensorrt.engine_runner import BoundContext, Slot, TensorRTRunner, first_admitting


def main() -> None:
    """Record one call and print its nodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--engine", default="tensorrt")
    parser.add_argument("--at", required=True, help="sizes of the axes, as B=8,S=128")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    bundle = open_bundle(arguments.bundle)
    engine = open_engine(engine_path(bundle.path, arguments.engine))
    engine.check_bundle(bundle.path)
    with open_engine_runner(engine) as runner:
        nodes = call_nodes(runner, feeds_at(bundle, runner, sizes_from(arguments.at)))
    if arguments.json:
        print(json.dumps(nodes, indent=2))
        return
    for kind, count in Counter(node["kind"] for node in nodes).most_common():
        print(f"{count:5d}  {kind}")
    for place, node in enumerate(nodes):
        print(f"{place:5d}  {node['kind']:<12} {node['name']}")


def sizes_from(text: str) -> dict[str, int]:
    """The sizes of the axes as they are written."""
    pairs = (part.partition("=") for part in text.split(","))
    return {name.strip(): int(size) for name, _, size in pairs}


def feeds_at(bundle: Bundle, runner: TensorRTRunner, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """A golden case of these sizes, or random numbers of these shapes."""
    for case in golden_cases(bundle):
        if all(case.sizes.get(name) == size for name, size in sizes.items()):
            return dict(runner.checked(case.inputs))
    whole = {name: sizes.get(name, axis.opt) for name, axis in bundle.manifest.spec.axes.items()}
    drawn = np.random.default_rng(0)
    feeds = {}
    for tensor in bundle.manifest.spec.inputs:
        shape, dtype = tensor.shape(whole), runner.inputs[tensor.name].dtype
        is_real = dtype not in (np.int32, np.int64, np.bool_)
        feeds[tensor.name] = (drawn.standard_normal(shape) if is_real else np.zeros(shape)).astype(dtype)
    return feeds


def call_nodes(runner: TensorRTRunner, feeds: dict[str, np.ndarray]) -> list[dict[str, str]]:
    """The nodes of one call, recorded after a first call that is not."""
    shapes = {name: array.shape for name, array in feeds.items()}
    profile = first_admitting(runner.profiles, shapes, tightest=True)
    slot = Slot(BoundContext(runner, profile, shapes), owns_context=True)
    try:
        slot.memory.upload(feeds)
        slot.settle(record=False)
        return recorded_nodes(slot, runner.stream)
    finally:
        runner.stream.synchronize()
        slot.close()


def recorded_nodes(slot: Slot, stream: Stream) -> list[dict[str, str]]:
    """Kind and name of every node, in the order in which they were recorded."""
    from cuda.bindings import driver

    handle = driver.CUstream(int(stream.raw))
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    called(driver.cuStreamBeginCapture(handle, mode))
    slot.launch()
    graph = called(driver.cuStreamEndCapture(handle))
    try:
        _, count = called(driver.cuGraphGetNodes(graph, 0))
        nodes, _ = called(driver.cuGraphGetNodes(graph, count))
        return [node_record(driver, node) for node in nodes]
    finally:
        called(driver.cuGraphDestroy(graph))


def node_record(driver: Any, node: Any) -> dict[str, str]:
    """Kind of a node; of a kernel also its name, where the driver reports it."""
    kind = called(driver.cuGraphNodeGetType(node))
    word = kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
    return {"kind": word, "name": kernel_name(driver, node) if word == "kernel" else ""}


def kernel_name(driver: Any, node: Any) -> str:
    """The name of a kernel: by its function, or by the kernel that it is loaded from lazily."""
    try:
        parameters = called(driver.cuGraphKernelNodeGetParams(node))
        if int(parameters.func):
            return text_of(called(driver.cuFuncGetName(parameters.func)))
        return text_of(called(driver.cuKernelGetName(parameters.kern)))
    except (DeployError, AttributeError) as error:
        return f"not reported ({error})"


def text_of(name: bytes | str) -> str:
    """A name as text."""
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def called(answer: tuple[Any, ...]) -> Any:
    """The results of a driver call; raises if its status is an error."""
    status, *results = answer
    if int(status) != 0:
        raise DeployError(
            "The CUDA driver reported an error.", got=getattr(status, "name", status), hint="another"
        )
    return results[0] if len(results) == 1 else tuple(results)


if __name__ == "__main__":
    main()
