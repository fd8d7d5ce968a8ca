"""Find the form of a graph that a TensorRT on this machine's GPU computes wrongly.

    python benchmarks/wrong_forms.py --out DIR [--only NAME] [--limit SECONDS]

Three small models whose lowered graphs are right in ONNX Runtime: a decoder with a KV cache (TensorRT 8.6
gives NaN in some batch slots), a cross-attention that is padded on both sides, and a Perceiver (whose result
depends on the batch size). Each is lowered and built as a whole. Where the engine is wrong, the shortest run
of nodes that is still wrong by itself is searched for, with the reference's values as its inputs: first its
end, then its beginning, then the nodes that the wrong outputs need. Variants of the whole model (other types,
other lowerings, fixed sizes) are built as well, and show what avoids the fault.

In DIR, for each model: `NAME.json` (what is wrong, where, and which variants are right), `NAME.onnx` and
`NAME.npz` (the smallest wrong graph, its inputs and its expected outputs). The models run side by side, each
in a process of its own.

`--rehearse OPERATOR` does the same without a GPU: the engine is ONNX Runtime, with every operator of that
kind spoiled, and the search has to find it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnx import helper
from torch import nn

import mha_deploy as md
from mha_deploy import Deployable, Example
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.engine.build import engine_opener
from mha_deploy.engine.lowered import lower_for
from mha_deploy.errors import DeployError
from mha_deploy.graph.file import load_graph
from mha_deploy.graph.lower import lower
from mha_deploy.graph.upcast import with_float32_matmuls
from mha_deploy.options import EngineOptions
from mha_deploy.runtime.tensorrt.versions import load

Arrays = Mapping[str, np.ndarray]

# -- The models ------------------------------------------------------------------------------------

E, H = 64, 4


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (H, E // H)).transpose(1, 2)


class _CachedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(E), nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x: Any, past_key: Any, past_value: Any, mask: Any) -> Any:
        q, k, v = map(_heads, self.qkv(self.norm(x)).chunk(3, -1))
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(2)), k, v


class _Gpt2(nn.Module):
    """Two blocks of GPT-2 with a dynamic KV cache and left padding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, E), nn.Embedding(96, E)
        self.blocks = nn.ModuleList(_CachedBlock() for _ in range(2))
        self.head = nn.Linear(E, 50)

    def forward(
        self, ids: Any, attends: Any, past_key: Any, past_value: Any, key_1: Any, value_1: Any
    ) -> Any:
        P, S = past_key.shape[2], ids.shape[1]
        at = torch.arange(S, device=ids.device) + P
        causal = torch.arange(P + S, device=ids.device)[None, :] <= at[:, None]
        mask = causal & attends[:, None, None, :]
        x = self.tokens(ids) + self.positions(at)
        x, k, v = self.blocks[0](x, past_key, past_value, mask)
        x, k1, v1 = self.blocks[1](x, key_1, value_1, mask)
        return {"logits": self.head(x), "k": k, "v": v, "k1": k1, "v1": v1}


def gpt2_cache() -> Deployable:
    """A decoder with a KV cache."""
    torch.manual_seed(0)
    caches = {"past_key": "k", "past_value": "v", "key_1": "k1", "value_1": "v1"}
    inputs = {
        "ids": Example(torch.randint(0, 50, (2, 5)), "B", "S"),
        "attends": Example(torch.ones(2, 11, dtype=torch.bool), "B", "S+P"),
    }
    inputs |= {name: Example(torch.randn(2, H, 6, E // H), "B", None, "P") for name in caches}
    axes = {"B": "1:4:8", "S": "1:8:16", "P": "0:8:31"}
    return Deployable(module=_Gpt2().eval(), inputs=inputs, axes=axes, kv_cache=caches)


class _Cross(nn.Module):
    """Cross-attention with padding among the queries and among the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(E, E), nn.Linear(E, 2 * E), nn.Linear(E, E)

    def forward(self, x: Any, memory: Any, x_keeps: Any, memory_keeps: Any) -> Any:
        k, v = map(_heads, self.kv(memory).chunk(2, -1))
        mask = x_keeps[:, None, :, None] & memory_keeps[:, None, None, :]
        y = nn.functional.scaled_dot_product_attention(_heads(self.q(x)), k, v, attn_mask=mask)
        y = torch.where(x_keeps[:, None, :, None], y, torch.zeros_like(y))
        return {"output": self.out(y.transpose(1, 2).flatten(2))}


def cross_padded() -> Deployable:
    """A cross-attention that is padded on both sides."""
    torch.manual_seed(1)
    inputs = {
        "x": Example(torch.randn(2, 7, E), "B", "S"),
        "memory": Example(torch.randn(2, 9, E), "B", "T"),
        "x_keeps": Example(torch.arange(7)[None] < torch.tensor([[7], [4]]), "B", "S"),
        "memory_keeps": Example(torch.arange(9)[None] < torch.tensor([[9], [3]]), "B", "T"),
    }
    axes = {"B": "1:4:8", "S": "1:16:32", "T": "1:24:48"}
    return Deployable(module=_Cross().eval(), inputs=inputs, axes=axes)


class _Perceiver(nn.Module):
    """Learned latents, the same for every batch element, that attend to the input, then to themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(16, E))
        self.norm, self.inner = nn.LayerNorm(E), nn.LayerNorm(E)
        self.q, self.kv, self.mix = nn.Linear(E, E), nn.Linear(E, 2 * E), nn.Linear(E, 3 * E)
        self.out = nn.Linear(E, E)

    def forward(self, x: Any) -> Any:
        latents = self.latents.expand(x.shape[0], -1, -1)
        k, v = map(_heads, self.kv(self.norm(x)).chunk(2, -1))
        y = nn.functional.scaled_dot_product_attention(_heads(self.q(latents)), k, v)
        y = latents + y.transpose(1, 2).flatten(2)
        q, k, v = map(_heads, self.mix(self.inner(y)).chunk(3, -1))
        z = nn.functional.scaled_dot_product_attention(q, k, v)
        return {"output": self.out(y + z.transpose(1, 2).flatten(2))}


def perceiver() -> Deployable:
    """A Perceiver."""
    torch.manual_seed(2)
    inputs = {"x": Example(torch.randn(2, 20, E), "B", "S")}
    return Deployable(module=_Perceiver().eval(), inputs=inputs, axes={"B": "1:4:8", "S": "1:32:64"})


MODELS: dict[str, Callable[[], Deployable]] = {
    "gpt2-cache": gpt2_cache,
    "cross-padded": cross_padded,
    "perceiver": perceiver,
}

# -- A part of a lowered graph, with the reference's values at its borders -------------------------

_TOLERANCE = 0.05  # of the L2 norm of a batch element: what FP16 does to a small model is a tenth of it


@dataclass
class Part:
    """Some nodes of a graph as a model of their own, and what it is given and expected to return."""

    model: onnx.ModelProto
    feeds: dict[str, dict[str, np.ndarray]]  # by the name of a case
    wanted: dict[str, dict[str, np.ndarray]]

    @property
    def profile(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        """The smallest, a usual and the largest shape of every input."""
        found = {}
        for value in self.model.graph.input:
            shapes = [feeds[value.name].shape for feeds in self.feeds.values()]
            low, high = (tuple(pick(sizes) for sizes in zip(*shapes, strict=True)) for pick in (min, max))
            found[value.name] = (low, shapes[0], high)
        return found


@dataclass
class Graph:
    """A lowered graph, and every value in it for every case, as ONNX Runtime computes them."""

    proto: onnx.ModelProto
    values: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: ir.Model, cases: Mapping[str, Arrays]) -> Graph:
        """Evaluate a graph with all of its values as outputs."""
        proto = ir.to_proto(model)
        wide = onnx.ModelProto()
        wide.CopyFrom(proto)
        names = [name for node in proto.graph.node for name in node.output if name]
        del wide.graph.output[:]
        wide.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
        session = onnxruntime.InferenceSession(wide.SerializeToString(), providers=["CPUExecutionProvider"])
        found = cls(proto)
        for case, feeds in cases.items():
            results = session.run(names, dict(feeds))
            found.values[case] = {**feeds, **dict(zip(names, results, strict=True))}
        return found

    def part(self, nodes: Iterable[int], outputs: Sequence[str] | None = None) -> Part:
        """These nodes as a model; what sizes they need is computed inside, from the shapes of its inputs."""
        graph = self.proto.graph
        made = {name: at for at, node in enumerate(graph.node) for name in node.output}
        constants = {each.name for each in graph.initializer}
        given = {value.name for value in graph.input}
        chosen, some = set(nodes), next(iter(self.values.values()))

        def reads(at: int) -> list[str]:
            inner = [a.g for a in graph.node[at].attribute if a.type == onnx.AttributeProto.GRAPH]
            return [*graph.node[at].input, *(n for g in inner for node in g.node for n in node.input)]

        waiting = list(chosen)
        while waiting:  # an engine takes no input that is a size
            for name in reads(waiting.pop()):
                at = made.get(name)
                if at is not None and at not in chosen and some[name].dtype.kind == "i":
                    chosen.add(at)
                    waiting.append(at)
        order = sorted(chosen)
        inside = {name for at in order for name in graph.node[at].output}
        inputs = list(dict.fromkeys(n for at in order for n in reads(at) if n in made or n in given))
        inputs = [name for name in inputs if name not in inside]
        if outputs is None:
            asked = set(nodes)
            later = {name for at in range(len(graph.node)) if at not in chosen for name in reads(at)}
            later |= {value.name for value in graph.output}
            ends = [n for at in order if at in asked for n in graph.node[at].output if n in later]
            outputs = [name for name in ends if some[name].dtype.kind == "f"]

        def info(name: str) -> onnx.ValueInfoProto:
            arrays = [values[name] for values in self.values.values()]
            sizes = zip(*(array.shape for array in arrays), strict=True)
            dims = [size[0] if len(set(size)) == 1 else f"{name}_{at}" for at, size in enumerate(sizes)]
            return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(arrays[0].dtype), dims)

        used = {name for at in order for name in reads(at)}
        model = helper.make_model(
            helper.make_graph(
                [graph.node[at] for at in order],
                "part",
                [info(name) for name in inputs],
                [info(name) for name in outputs],
                [each for each in graph.initializer if each.name in used & constants],
            ),
            opset_imports=self.proto.opset_import,
            ir_version=self.proto.ir_version,
        )
        feeds = {case: {name: values[name] for name in inputs} for case, values in self.values.items()}
        wanted = {case: {name: values[name] for name in outputs} for case, values in self.values.items()}
        return Part(model, feeds, wanted)


def differences(wanted: Arrays, got: Arrays) -> dict[str, dict[str, Any]]:
    """For each output that is wrong: the worst relative L2 error, and the batch elements that have one."""
    found = {}
    for name, right in wanted.items():
        right, result = right.astype(np.float64), np.asarray(got[name]).astype(np.float64)
        rows = [(right, result)] if right.ndim < 2 else list(zip(right, result, strict=True))
        errors = []
        for one, other in rows:
            finite = np.isfinite(one)
            is_same = np.array_equal(finite, np.isfinite(other))
            norm = np.linalg.norm(one[finite]) or 1.0
            errors.append(np.linalg.norm((other - one)[finite]) / norm if is_same else np.inf)
        wrong = [at for at, error in enumerate(errors) if not error <= _TOLERANCE]
        if wrong:
            worst = max(errors)
            found[name] = {"relative_l2": None if np.isinf(worst) else float(worst), "batch_elements": wrong}
    return found


# -- The engine, and the search --------------------------------------------------------------------

Opener = Callable[[Part], Any]


def tensorrt_opener(precision: str = "fp16") -> Opener:
    """Builds a part with TensorRT, and loads it."""
    rt = load("tensorrt")
    return lambda part: engine_opener(rt, precision, [part.profile])(ir.from_proto(part.model))


def rehearsal_opener(operator: str) -> Opener:
    """ONNX Runtime with every node of one operator spoiled: its result is doubled."""

    class Spoiled:
        def __init__(self, part: Part) -> None:
            model = onnx.ModelProto()
            model.CopyFrom(part.model)
            nodes = []
            for node in model.graph.node:
                nodes.append(node)
                if node.op_type == operator:
                    name, node.output[0] = node.output[0], f"{node.output[0]}_right"
                    nodes.append(helper.make_node("Add", [node.output[0], node.output[0]], [name]))
            del model.graph.node[:]
            model.graph.node.extend(nodes)
            text, providers = model.SerializeToString(), ["CPUExecutionProvider"]
            self.session = onnxruntime.InferenceSession(text, providers=providers)

        def run(self, feeds: Arrays) -> dict[str, np.ndarray]:
            names = [value.name for value in self.session.get_outputs()]
            return dict(zip(names, self.session.run(names, dict(feeds)), strict=True))

        def close(self) -> None:
            pass

    return Spoiled


class Search:
    """The search for the shortest run of nodes that is wrong by itself, until a deadline."""

    def __init__(self, graph: Graph, opener: Opener, deadline: float) -> None:
        self.graph, self.opener, self.deadline = graph, opener, deadline
        self.tried: list[dict[str, Any]] = []

    def wrong(self, part: Part, label: str) -> dict[str, Any] | None:
        """What of a part is wrong, by case; None where nothing is, or where it cannot be tried."""
        if time.monotonic() > self.deadline or not part.model.graph.output or not part.model.graph.input:
            return None
        started = time.monotonic()
        entry: dict[str, Any] = {"tried": label, "nodes": len(part.model.graph.node)}
        found: dict[str, Any] = {}
        try:
            runner = self.opener(part)
            try:
                for case, feeds in part.feeds.items():
                    if wrong := differences(part.wanted[case], runner.run(feeds)):
                        found[case] = wrong
            finally:
                runner.close()
        except DeployError as error:
            entry["refused"] = error.in_one_line[:300]
        entry |= {"wrong": bool(found), "seconds": round(time.monotonic() - started, 1)}
        self.tried.append(entry)
        print(json.dumps(entry), flush=True)
        return found or None

    def status(self, part: Part, label: str) -> str:
        """`wrong` or `right`, or that it could not be tried: nothing is right that did not run."""
        before = len(self.tried)
        wrong = self.wrong(part, label)
        if len(self.tried) == before:
            return "not tried"
        return f"refused: {why}" if (why := self.tried[-1].get("refused")) else "wrong" if wrong else "right"

    def shortest(self) -> tuple[Part, dict[str, Any]] | None:
        """The shortest part that is wrong; None where the whole is right."""
        count = len(self.graph.proto.graph.node)

        def window(start: int, end: int) -> dict[str, Any] | None:
            return self.wrong(self.graph.part(range(start, end)), f"nodes {start} to {end}")

        known = window(0, count)
        if known is None:
            return None
        low, end = 0, count  # the part up to `end` is wrong, that up to `low` is not
        while end - low > 1:
            middle = (low + end) // 2
            found = window(0, middle)
            low, end, known = (low, middle, found) if found else (middle, end, known)
        start, high = 0, end  # the part from `start` is wrong, that from `high` is not
        while high - start > 1:
            middle = (start + high) // 2
            found = window(middle, end)
            start, high, known = (middle, high, found) if found else (start, middle, known)
        best = self.graph.part(range(start, end))
        outputs = list(dict.fromkeys(name for each in known.values() for name in each))
        needed = self._needed(outputs, start, end)
        smaller = self.graph.part(needed, outputs)
        if found := self.wrong(smaller, "the nodes that the wrong outputs need"):
            return smaller, found
        return best, known

    def _needed(self, outputs: Sequence[str], start: int, end: int) -> list[int]:
        nodes, wanted = self.graph.proto.graph.node, set(outputs)
        found = []
        for at in range(end - 1, start - 1, -1):
            if wanted & set(nodes[at].output):
                found.append(at)
                wanted |= set(nodes[at].input)
        return found[::-1]


def variants(model: ir.Model, rehearse: bool) -> Iterable[tuple[str, Callable[[], ir.Model], str]]:
    """Other ways to write the whole model: a name, the lowered graph, and its precision."""
    for name, options in (
        ("masks shifted into the range of scores", {"shift_masks": True}),
        ("masks as they are", {"shift_masks": False}),
        ("grouped heads repeated", {"gqa": "repeat"}),
    ):
        yield name, lambda options=options: lower(model, "primitives", **options), "fp16"  # type: ignore[misc]
    if not rehearse:
        yield "matmuls in float32", lambda: lower(with_float32_matmuls(model), "primitives"), "fp32"


def examine(name: str, out: Path, rehearse: str | None, limit: float) -> dict[str, Any]:
    """Export, lower and build one model, and search where it is wrong."""
    started = time.monotonic()
    factory = MODELS[name].__name__
    bundle = md.export(f"{Path(__file__).resolve()}:{factory}", out / "bundles" / name, precision="fp16")
    cases = {case.name: dict(case.inputs) for case in golden_cases(bundle) if case.name != "large"}
    model = load_graph(bundle.model_path)
    options = EngineOptions(backend="tensorrt", allow_decomposed=True)
    lowered = lower(model, "primitives") if rehearse else lower_for(load("tensorrt"), model, options)[0]
    opener = rehearsal_opener(rehearse) if rehearse else tensorrt_opener()
    deadline = started + limit
    search = Search(Graph.of(lowered, cases), opener, deadline)
    found = search.shortest()
    data: dict[str, Any] = {
        "model": name,
        "nodes": len(search.graph.proto.graph.node),
        "wrong": found is not None,
    }
    if found is not None:
        part, wrong = found
        data |= {"form": [node.op_type for node in part.model.graph.node], "differences": wrong}
        data["text"] = onnx.printer.to_text(part.model)[:6000]
        onnx.save(part.model, str(out / f"{name}.onnx"))
        arrays = {
            f"{case}/{side}/{key}": array
            for side, by_case in (("feeds", part.feeds), ("wanted", part.wanted))
            for case, given in by_case.items()
            for key, array in given.items()
        }
        np.savez_compressed(out / f"{name}.npz", **arrays)
        data["variants"] = {}
        whole = search.graph.part(range(data["nodes"]))
        for case in whole.feeds:  # is it the sizes, or that they are dynamic?
            fixed = Part(whole.model, {case: whole.feeds[case]}, {case: whole.wanted[case]})
            data["variants"][f"only the sizes of {case}"] = search.status(fixed, f"only {case}")
        for label, make, precision in variants(model, bool(rehearse)):
            graph = Graph.of(make(), cases)
            part = graph.part(range(len(graph.proto.graph.node)))
            search.opener = opener if rehearse else tensorrt_opener(precision)
            data["variants"][label] = search.status(part, label)
    data |= {"tried": search.tried, "seconds": round(time.monotonic() - started, 1)}
    data["ended_early"] = time.monotonic() > deadline
    (out / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return data


def main() -> int:
    """Examine every model in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=MODELS, action="append")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds for the search (default: 200)")
    parser.add_argument("--rehearse", metavar="OPERATOR")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    names = given.only or list(MODELS)
    if len(names) == 1:
        md.configure(trust_code=True)
        found = examine(names[0], given.out.resolve(), given.rehearse, given.limit)
        print(f"{names[0]}: {'wrong: ' + ' '.join(found['form']) if found['wrong'] else 'right'}")
        return 0
    same = [f"--out={given.out}", f"--limit={given.limit}"]
    same += [f"--rehearse={given.rehearse}"] if given.rehearse else []
    started = [
        subprocess.Popen([sys.executable, str(Path(__file__).resolve()), "--only", name, *same])
        for name in names
    ]
    return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main())
