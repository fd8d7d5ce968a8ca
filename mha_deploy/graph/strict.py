"""Refuse an ONNX model that no exporter writes, before any code works on it.

A file may come from anywhere. Its tensors must have the bytes that their dimensions need, its values must be
computed without a cycle, its functions must not call themselves, and it must not ask for unbounded work.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto

from mha_deploy.errors import DeployError
from mha_deploy.text import printable

LARGEST_FILE = (1 << 31) - 1  # the limit of protobuf
MOST_HEADS = 1 << 16
_MOST_RUNS = 10**7  # of nodes, in one call of the model: functions and loops of constant length multiply
_MOST_ELEMENTS = 1 << 36
_DEEPEST = 16
_BITS: dict[int, int] = {
    **dict.fromkeys((TensorProto.FLOAT, TensorProto.INT32, TensorProto.UINT32), 32),
    **dict.fromkeys((TensorProto.DOUBLE, TensorProto.INT64, TensorProto.UINT64, TensorProto.COMPLEX64), 64),
    **dict.fromkeys((TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT16, TensorProto.UINT16), 16),
    **dict.fromkeys((TensorProto.INT8, TensorProto.UINT8, TensorProto.BOOL), 8),
    TensorProto.COMPLEX128: 128,
}
# Small types that only newer versions of onnx have.
_BITS |= {
    number: 8 if "8" in name else 4 if "4" in name else 2
    for name, number in TensorProto.DataType.items()
    if name.startswith(("FLOAT8", "FLOAT4", "INT4", "UINT4", "INT2", "UINT2"))
}
_FIELDS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
_HEADS = ("num_heads", "q_num_heads", "kv_num_heads")
# The input that gives the size of the result, where it is constant.
_SIZES = {"ConstantOfShape": 0, "Expand": 1, "Tile": 1}

Body = GraphProto | FunctionProto


def check_model(
    model: onnx.ModelProto, folder: Path | None = None, files: Collection[str] | None = None
) -> None:
    """Refuse a model with a cycle, tensors of other sizes than their bytes, or unbounded work.

    Args:
        model: The model, with its external weights still on disk.
        folder: Where those are; None where the model must have none.
        files: The files there that it may use; default: any.

    Raises:
        DeployError: It is not a model that an exporter writes; the error names the place.
    """
    functions = {(each.domain, each.name): each for each in model.functions}
    if len(functions) < len(model.functions):
        raise _refused("two functions have the same name")
    checker = _Checker(functions, folder, files)
    runs = checker.check(model.graph, frozenset(), {})
    for key in functions:
        checker.runs_of_function(key)
    if runs > _MOST_RUNS:
        raise _refused(f"one call runs {runs:,} nodes, more than {_MOST_RUNS:,}")


class _Checker:
    """Walks the graphs of a model; the result of each is how many nodes one call of it runs."""

    def __init__(
        self,
        functions: Mapping[tuple[str, str], FunctionProto],
        folder: Path | None,
        files: Collection[str] | None,
    ) -> None:
        self._functions, self._folder = functions, None if folder is None else folder.resolve()
        self._files = files
        self._runs: dict[tuple[str, str], int | None] = {}

    def runs_of_function(self, key: tuple[str, str]) -> int:
        """How many nodes one call of a function runs; those that call themselves are refused."""
        if key not in self._runs:
            self._runs[key] = None  # under way
            self._runs[key] = self.check(self._functions[key], frozenset(), {})
        runs = self._runs[key]
        if runs is None:
            raise _refused(f"function {key[1]} calls itself")
        return runs

    def check(
        self, body: Body, outside: frozenset[str], known: Mapping[str, TensorProto], depth: int = 0
    ) -> int:
        """Check a graph or function.

        Args:
            body: The graph or function.
            outside: The values of the graphs around it.
            known: Those that are constant.
            depth: How many graphs are around it.
        """
        if depth > _DEEPEST:
            raise _refused(f"subgraphs are nested more than {_DEEPEST} deep")
        constants = dict(known)
        if isinstance(body, GraphProto):
            if body.sparse_initializer:
                raise _refused("it has sparse weights")
            for tensor in body.initializer:
                self.check_tensor(tensor)
                constants[tensor.name] = tensor
            for value in (*body.input, *body.output, *body.value_info):
                _check_value(value)
            inputs, outputs = [each.name for each in body.input], [each.name for each in body.output]
        else:
            inputs, outputs = list(body.input), list(body.output)
        made = [name for node in body.node for name in node.output if name]
        if len(set(made)) < len(made) or not set(made).isdisjoint(inputs):
            twice = next(name for name in made if made.count(name) > 1 or name in inputs)
            raise _refused(f"value {twice} is computed twice")
        _check_names((body.name, *inputs, *outputs, *made, *constants))
        inside = outside | {*inputs, *constants, *made}
        if missing := [name for name in outputs if name and name not in inside]:
            raise _refused(f"nothing computes its output {missing[0]}")
        constants |= {
            node.output[0]: attribute.t
            for node in body.node
            if node.op_type == "Constant" and len(node.output) == 1
            for attribute in node.attribute
            if attribute.name == "value"
        }
        reads, runs = list[set[str]](), 0
        for node in body.node:
            _check_names((node.name, node.op_type, node.domain))
            if missing := [name for name in node.input if name and name not in inside]:
                raise _refused(f"nothing computes {missing[0]}, an input of {_title(node)}")
            _check_heads(node)
            _check_size(node, constants)
            trips = max(_integers(constants.get(node.input[0])) or [1]) if _is_loop(node) else 1
            inner = 0
            for attribute in node.attribute:
                if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
                    raise _refused(f"{_title(node)} has a sparse tensor")
                for tensor in _tensors(attribute):
                    self.check_tensor(tensor)
                for graph in _graphs(attribute):
                    inner += self.check(graph, inside, constants, depth + 1)
            if (node.domain, node.op_type) in self._functions:
                inner += self.runs_of_function((node.domain, node.op_type))
            runs += 1 + max(trips, 1) * inner
            reads.append(set(_names_read(node)))
        _refuse_cycles(body.node, reads)
        return runs

    def check_tensor(self, tensor: TensorProto) -> None:
        name = tensor.name or "a constant"
        count = math.prod(tensor.dims)
        if any(size < 0 for size in tensor.dims) or count > _MOST_ELEMENTS or len(tensor.dims) > 64:
            raise _refused(f"{name} has the dimensions {list(tensor.dims)[:8]}")
        if tensor.HasField("segment"):
            raise _refused(f"{name} is stored in segments")
        if tensor.data_type == TensorProto.STRING:
            if len(tensor.string_data) != count:
                raise _refused(f"{name} has {len(tensor.string_data)} texts, not {count}")
            return
        bits = _BITS.get(tensor.data_type)
        if bits is None:
            raise _refused(f"{name} has no type that is known (number {tensor.data_type})")
        wanted = -(-count * bits // 8)
        if tensor.data_location == TensorProto.EXTERNAL:
            self._check_external(tensor, name, wanted)
        elif tensor.HasField("raw_data"):
            if len(tensor.raw_data) != wanted:
                raise _refused(f"{name} has {len(tensor.raw_data)} bytes, its dimensions need {wanted}")
        else:
            stored = max(len(getattr(tensor, field)) for field in _FIELDS)
            parts = 2 if tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128) else 1
            # Types of 4 bits and fewer are packed into bytes.
            if stored != (wanted if bits < 8 else count * parts):
                raise _refused(f"{name} has {stored} numbers, its dimensions need {count}")

    def _check_external(self, tensor: TensorProto, name: str, wanted: int) -> None:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        _check_names((location,))
        if self._folder is None or not location:
            raise _refused(f"the weights of {name} are in another file, {location or 'without a name'}")
        path = self._folder / location
        if self._folder not in path.resolve().parents:
            raise DeployError(
                "The graph keeps weights outside its folder.", got=f"{name}: {printable(location)}"
            )
        if not path.is_file():
            raise _refused(f"the weights of {name} are not there: {path}")
        if self._files is not None and path.resolve().relative_to(self._folder).as_posix() not in self._files:
            raise DeployError(
                "The graph reads a file that the manifest does not list.", got=path, hint="export again"
            )
        try:
            offset = int(entries.get("offset", "0") or 0)
            length = int(entries.get("length", str(wanted)) or wanted)
        except ValueError as error:
            raise _refused(f"the place of {name} in {location} is not a number") from error
        size = path.stat().st_size
        if length != wanted or offset < 0 or offset + length > size:
            got = f"{length} bytes at {offset} of {location}, which has {size}"
            raise _refused(f"{name} has {got}; its dimensions need {wanted}")


def _refused(why: str) -> DeployError:
    return DeployError(
        "The ONNX model is not valid.",
        got=printable(why),
        hint="export it again, or onnx.checker.check_model",
    )


def _title(node: NodeProto) -> str:
    return f"{node.op_type} {node.name or next(iter(node.output), '')}".strip()


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if printable(name) != name or len(name) > 1 << 16:
            raise _refused(f"the name {name[:80]} has control characters or is too long")


def _check_value(value: onnx.ValueInfoProto) -> None:
    for dim in value.type.tensor_type.shape.dim:
        if dim.dim_value > _MOST_ELEMENTS:
            raise _refused(f"{value.name} has a dimension of {dim.dim_value}")
        _check_names((dim.dim_param,))


def _check_heads(node: NodeProto) -> None:
    heads = {each.name: each.i for each in node.attribute if each.name in _HEADS and not each.ref_attr_name}
    least = 1 if node.op_type.endswith("Attention") else 0
    for name, count in heads.items():
        if not least <= count <= MOST_HEADS:
            raise _refused(f"{_title(node)} has {name} = {count}")
    queries, keys = (heads.get(name) for name in ("q_num_heads", "kv_num_heads"))
    if queries and keys and queries % keys:
        raise _refused(f"{_title(node)} has {queries} query heads for {keys} key/value heads")


def _is_loop(node: NodeProto) -> bool:
    return node.op_type == "Loop" and bool(node.input)


def _check_size(node: NodeProto, constants: Mapping[str, TensorProto]) -> None:
    """Refuse a node whose result cannot be stored, where its size is a constant."""
    at = _SIZES.get(node.op_type)
    if at is not None and at < len(node.input):
        sizes = _integers(constants.get(node.input[at]))
        if sizes and math.prod(abs(size) for size in sizes) > _MOST_ELEMENTS:
            raise _refused(f"{_title(node)} makes a tensor of {sizes}")
    if node.op_type == "Range" and len(node.input) == 3:
        ends = [_integers(constants.get(name)) for name in node.input]
        if all(len(end or ()) == 1 for end in ends):
            (start,), (limit,), (step,) = (end or [0] for end in ends)
            if step == 0 or (limit - start) / step > _MOST_ELEMENTS:
                raise _refused(f"{_title(node)} counts from {start} to {limit} by {step}")


def _integers(tensor: TensorProto | None) -> list[int] | None:
    """The numbers of a short constant of integers."""
    if tensor is None or tensor.data_type not in (TensorProto.INT64, TensorProto.INT32):
        return None
    if tensor.data_location == TensorProto.EXTERNAL or math.prod(tensor.dims) > 64:
        return None
    code, width = ("q", 8) if tensor.data_type == TensorProto.INT64 else ("i", 4)
    if tensor.HasField("raw_data"):
        return list(struct.unpack(f"<{len(tensor.raw_data) // width}{code}", tensor.raw_data))
    return list(tensor.int64_data or tensor.int32_data)


def _tensors(attribute: AttributeProto) -> Iterator[TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors


def _graphs(attribute: AttributeProto) -> Iterator[GraphProto]:
    if attribute.HasField("g"):
        yield attribute.g
    yield from attribute.graphs


def _names_read(node: NodeProto) -> Iterator[str]:
    """The values that a node reads, those inside its subgraphs included."""
    yield from node.input
    for attribute in node.attribute:
        for graph in _graphs(attribute):
            # A subgraph may give its own values the names of outer ones.
            own = {name for inner in graph.node for name in inner.output}
            own |= {each.name for each in (*graph.input, *graph.initializer)}
            for inner in graph.node:
                yield from (name for name in _names_read(inner) if name not in own)
            yield from (output.name for output in graph.output if output.name not in own)


def _refuse_cycles(nodes: Iterable[NodeProto], reads: list[set[str]]) -> None:
    nodes = list(nodes)
    makers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    needs = [{makers[name] for name in names if name in makers} for names in reads]
    users: list[list[int]] = [[] for _ in nodes]
    for index, needed in enumerate(needs):
        for each in needed:
            users[each].append(index)
    waiting = [len(needed) for needed in needs]
    ready, done = [index for index, count in enumerate(waiting) if not count], 0
    while ready:
        done += 1
        for user in users[ready.pop()]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    if done < len(nodes):
        stuck = next(node for node, count in zip(nodes, waiting, strict=True) if count)
        raise _refused(f"{_title(stuck)} needs its own result")
