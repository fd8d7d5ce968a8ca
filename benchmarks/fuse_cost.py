"""Print what passes cost on large graphs: nodes, seconds and peak memory, each in a process of its own.

    python benchmarks/fuse_cost.py [--profile] [KIND:NODES ...]

The kinds: `layers` (transformer layers whose attention is written out, dynamic batch and length), `chain`
(elementwise operators without attention), `unfusable` (an operator between scores and softmax that Attention
does not have), `long` (attentions whose scores come through a long chain of cheap steps), `shared` (all
layers read one mask), `activations` (a long chain of them behind one matmul of two computed tensors),
`softmaxes` (many that read one long chain), `respelled` (masks that multiply the scores, and in every second
layer an operator that Attention does not have). All are fused, but for `planned` (elementwise operators),
which is planned in mixed precision. `file` is `layers` from file to file, as the command does it: read and
checked, fused, written. The seconds are of the processor, on one core. `--profile` prints the functions
that take most of them.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

import mha_deploy as md
from mha_deploy.graph.fuse import FuseReport, fuse_attention
from mha_deploy.runtime import plan_mixed_precision

DEFAULT: tuple[str, ...] = (
    "layers:10000",
    "layers:100000",
    "file:100000",
    "shared:36001",
    "chain:36001",
    "unfusable:36001",
    "long:36001",
)
DEFAULT += ("activations:36001", "softmaxes:36001", "respelled:36001", "planned:10000")
H, D = 2, 8
E = H * D


class Graph:
    """Nodes and weights of a graph that is being written."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights = {
            "heads": np.array([0, 0, H, D], np.int64),
            "flat": np.array([0, 0, E], np.int64),
            "scale": np.array(D**-0.5, np.float32),
            "one": np.array(1.0, np.float32),
            "far": np.array(-1e9, np.float32),
            "projection": (np.random.default_rng(0).standard_normal((E, E)) * E**-0.5).astype(np.float32),
        }

    def op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Add a node, and return its output."""
        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def attention(self, x: str, *steps: str, mask: str = "", kept: str = "") -> str:
        """Written-out attention with a residual; the steps stand between the scale and the softmax.

        What is `kept` multiplies the scores.
        """
        q, k, v = (
            self.op(
                "Transpose",
                self.op("Reshape", self.op("MatMul", x, "projection"), "heads"),
                perm=[0, 2, 1, 3],
            )
            for _ in range(3)
        )
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.op("Mul", scores, "scale")
        for step in steps:
            scores = self.op(step, scores)
        if mask:
            scores = self.op("Add", scores, mask)
        if kept:
            ones = self.op("Cast", self.op("Cast", kept, to=TensorProto.BOOL), to=TensorProto.FLOAT)
            hidden = self.op("Mul", self.op("Sub", "one", ones), "far")
            scores = self.op("Add", self.op("Mul", scores, ones), hidden)
        y = self.op("MatMul", self.op("Softmax", scores, axis=-1), v)
        y = self.op("Reshape", self.op("Transpose", y, perm=[0, 2, 1, 3]), "flat")
        return self.op("Add", x, self.op("MatMul", y, "projection"))

    def model(self, y: str) -> ir.Model:
        """The model with one output; `x` and `keep` are its inputs."""
        inputs: dict[str, list[str | int | None]] = {"x": ["B", "S", E], "keep": ["B", 1, 1, "S"]}
        graph = helper.make_graph(
            self.nodes,
            "large",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in inputs.items()],
            [helper.make_tensor_value_info(y, TensorProto.FLOAT, ["B", "S", E])],
            [numpy_helper.from_array(array, name) for name, array in self.weights.items()],
        )
        opsets = [helper.make_opsetid("", 18)]
        return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def model_of(kind: str, count: int) -> ir.Model:
    """A model of about so many nodes."""
    g, x = Graph(), "x"
    mask = ""
    if kind == "shared":
        mask = g.op("Mul", g.op("Sub", "keep", "scale"), "scale")
    if kind in ("activations", "softmaxes"):
        x = g.op("MatMul", g.op("MatMul", x, g.op("Transpose", x, perm=[0, 2, 1])), x)
    if kind == "softmaxes":
        ends = []
        while len(g.nodes) < count // 3:
            x = g.op("Sin", x)
        while len(g.nodes) < count - 1:
            ends.append(g.op("MatMul", g.op("Softmax", g.op("Cos", x)), "projection"))
        return g.model(g.op("Sum", *ends))
    while len(g.nodes) < count:
        if kind in ("chain", "activations", "planned"):
            x = g.op(("Relu", "Tanh", "Neg", "Sigmoid")[len(g.nodes) % 4], x)
        elif kind == "unfusable":
            x = g.attention(x, "Sin")
        elif kind == "long":
            x = g.attention(x, *["Identity", "Neg"] * 20)
        elif kind == "respelled":
            x = g.attention(x, *["Sin"] * (len(g.nodes) // 23 % 2), kept="keep")
        else:
            x = g.attention(x, mask=mask)
    return g.model(x)


def planned(model: ir.Model) -> FuseReport:
    """Plan mixed precision on two small inputs; nothing is fused."""
    drawn = np.random.default_rng(0).standard_normal((2, 5, E)).astype(np.float32)
    keep = np.ones((2, 1, 1, 5), np.float32)
    plan_mixed_precision(model, {"one": {"x": drawn, "keep": keep}, "two": {"x": drawn / 2, "keep": keep}})
    return FuseReport()


def measure(kind: str, count: int, profile: bool) -> None:
    """Fuse one model, and print its line."""
    with tempfile.TemporaryDirectory() as folder:
        measure_in(Path(folder), kind, count, profile)


def measure_in(folder: Path, kind: str, count: int, profile: bool) -> None:
    """The same; a folder for files."""
    model = model_of(kind, count)
    nodes = len(model.graph)
    if kind == "file":
        ir.save(model, folder / "model.onnx")
        del model
        gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    profiler = cProfile.Profile() if profile else None
    begin = time.process_time()
    if profiler is not None:
        profiler.enable()
    if kind == "file":
        report = md.fuse_file(folder / "model.onnx", folder / "fused.onnx")
    else:
        report = planned(model) if kind == "planned" else fuse_attention(model)[1]
    if profiler is not None:
        profiler.disable()
    seconds = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = f"{len(report.fused):6d} {len(report.unfused):8d}"
    mib = f"{before / 1024:8.0f} {peak / 1024:8.0f}"
    print(f"{kind:<12} {nodes:7d} {found} {seconds:8.1f} {mib}", flush=True)
    if profiler is not None:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    """Measure each kind in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("graphs", nargs="*", default=DEFAULT, metavar="KIND:NODES")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.child:
        head = f"{'kind':<12} {'nodes':>7} {'fused':>6} {'unfused':>8} {'seconds':>8} {'MiB':>8} {'peak':>8}"
        print(head, flush=True)
    for each in arguments.graphs:
        kind, _, count = each.partition(":")
        if arguments.child:
            measure(kind, int(count), arguments.profile)
        else:
            more = ["--profile"] if arguments.profile else []
            subprocess.run([sys.executable, __file__, "--child", *more, each], check=True)


if __name__ == "__main__":
    main()
