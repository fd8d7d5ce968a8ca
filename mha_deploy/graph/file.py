"""Read ONNX files strictly, write them, and take values out of a graph."""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto, TypeProto

from mha_deploy.errors import DeployError, write_remedy
from mha_deploy.files import hint_for_missing, read_regular
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.ir import HOLD_TENSORS, graphs_of, infer_shapes, nodes_in
from mha_deploy.graph.roles import ORT_DOMAIN
from mha_deploy.graph.valid import has_sparse_tensors, normalize, refusal, write_out_sparse_tensors
from mha_deploy.output import commit_files, make_folder, scratch_folder, temporary_folder
from mha_deploy.text import printable

# -- Refuse a model that no exporter writes, before any code works on it ---------------------------
#
# A file may come from anywhere. Its tensors must have the bytes that their dimensions need, its values must
# be computed without a cycle, its functions must not call themselves, and it must not need unbounded work.

LARGEST_FILE = (1 << 31) - 1  # the limit of protobuf
MOST_HEADS = 1 << 16
_MOST_RUNS = 10**7  # of nodes, in one call of the model: functions and loops of constant length multiply
_MOST_ELEMENTS = 1 << 36
_DEEPEST = 16
_FIELDS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
_HEADS = ("num_heads", "q_num_heads", "kv_num_heads")
# The input that gives the size of the result, where it is constant.
_SIZES = {"ConstantOfShape": 0, "Expand": 1, "Tile": 1, "OneHot": 1}

# What leaves the numbers of its first input as they are, and what combines those of all.
_PASSED_ON = {
    "Identity",
    "Cast",
    "CastLike",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Flatten",
    "Transpose",
    "Expand",
}
_COMBINED: Mapping[str, Callable[[float, float], float]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Max": max,
    "Min": min,
}
_ONNX = ("", "ai.onnx")
_MOST_DIMS, _MOST_NUMBERS = 64, 1024
_TEXTS = ("doc_string", "producer_name", "producer_version", "domain", "name", "overload", "ref_attr_name")

Body = GraphProto | FunctionProto
_Numbers = tuple[float, ...]


def check_model(
    model: onnx.ModelProto, folder: Path | None = None, files: Collection[str] | None = None
) -> None:
    """Refuse a model with a cycle, tensors of other sizes than their bytes, or unbounded work.

    `folder` holds its external weights (None: it must have none), in some of these `files` (default: any).
    """
    _check_texts(model)
    functions = {(each.domain, each.name): each for each in model.functions}
    for domain, name in functions:
        if domain in _ONNX and onnx.defs.has(name):
            raise refusal(f"function {name} has the name of one of ONNX's operators")
    if len(functions) < len(model.functions):
        raise refusal("two functions have the same name")
    checker = _Checker(functions, None if folder is None else folder.resolve(), files)
    runs = checker.check(model.graph, frozenset(), {})
    for key in functions:
        checker.runs_of_function(key)
    if runs > _MOST_RUNS:
        raise refusal(f"one call runs {runs:,} nodes, more than {_MOST_RUNS:,}")


@dataclass
class _Checker:
    """Walks the graphs of a model; the result of each is how many nodes one call of it runs."""

    functions: Mapping[tuple[str, str], FunctionProto]
    folder: Path | None
    files: Collection[str] | None
    runs: dict[tuple[str, str], int | None] = field(default_factory=dict)

    def runs_of_function(self, key: tuple[str, str]) -> int:
        """How many nodes one call of a function runs; those that call themselves are refused."""
        if key not in self.runs:
            self.runs[key] = None  # under way
            self.runs[key] = self.check(self.functions[key], frozenset(), {})
        if (runs := self.runs[key]) is None:
            raise refusal(f"function {key[1]} calls itself")
        return runs

    def check(
        self, body: Body, outside: frozenset[str], known: Mapping[str, _Numbers], depth: int = 0
    ) -> int:
        """Check a body inside `depth` others; `outside` are their values, `known` the numbers of some."""
        if depth > _DEEPEST:
            raise refusal(f"subgraphs are nested more than {_DEEPEST} deep")
        _check_texts(body)
        constants, inputs, outputs = dict(known), list(body.input), list(body.output)
        weights = dict[str, TensorProto]()
        if isinstance(body, GraphProto):
            weights = self._check_weights_and_types(body)
            constants |= {name: _numbers(tensor) for name, tensor in weights.items()}
            inputs, outputs = [each.name for each in body.input], [each.name for each in body.output]
        made = Counter(name for node in body.node for name in node.output if name)
        if twice := [name for name, count in (made + Counter(inputs)).items() if count > 1 and name in made]:
            raise refusal(f"value {twice[0]} is computed twice")
        _check_names((body.name, *inputs, *outputs, *made, *weights))
        inside = outside | {*inputs, *weights, *made}
        if missing := [name for name in outputs if name and name not in inside]:
            raise refusal(f"nothing computes its output {missing[0]}")
        _refuse_cycle(body)
        lengths = {name: max(weight.dims, default=1) for name, weight in weights.items()}
        for node in body.node:
            self._check_attributes(node)
            if len(node.output) == 1 and (numbers := _computed(node, constants)):
                constants[node.output[0]] = numbers
        return sum(self._check_node(node, inside, constants, lengths, depth) for node in body.node)

    def _check_weights_and_types(self, graph: GraphProto) -> dict[str, TensorProto]:
        """Check the weights of a graph and the dimensions of its values; returns the weights by name."""
        if graph.sparse_initializer:
            raise refusal("it has sparse weights")
        weights = dict[str, TensorProto]()
        for tensor in graph.initializer:
            self.check_tensor(tensor)
            if tensor != weights.setdefault(tensor.name, tensor):  # readers differ in which one they take
                raise refusal(f"two weights have the name {tensor.name}")
        for value in (*graph.input, *graph.output, *graph.value_info):
            _check_type(value.type, value.name)
        return weights

    def _check_attributes(self, node: NodeProto) -> None:
        """Check the names, types and tensors of the attributes of a node."""
        names = Counter(attribute.name for attribute in node.attribute)
        _check_names(names)
        if twice := [name for name, count in names.items() if count > 1]:
            raise refusal(f"{_title(node)} has two attributes {twice[0]}")
        for attribute in node.attribute:
            if attribute.type == AttributeProto.UNDEFINED:
                raise refusal(f"the attribute {attribute.name} of {_title(node)} has no type that is known")
            _check_texts(attribute)
            for tensor in (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors):
                self.check_tensor(tensor)

    def _check_node(
        self,
        node: NodeProto,
        inside: frozenset[str],
        constants: Mapping[str, _Numbers],
        lengths: Mapping[str, int],
        depth: int,
    ) -> int:
        """Check a node and the graphs in it; returns how many nodes it runs, itself included."""
        _check_names((node.name, node.op_type, node.domain, *node.input))
        _check_texts(node)
        if missing := [name for name in node.input if name and name not in inside]:
            raise refusal(f"nothing computes {missing[0]}, an input of {_title(node)}")
        _check_heads(node)
        _check_size(node, constants)
        inner = 0
        for attribute in node.attribute:
            if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
                raise refusal(f"{_title(node)} has a sparse tensor")
            inner += sum(self.check(each, inside, constants, depth + 1) for each in _graphs(attribute))
        if (node.domain, node.op_type) in self.functions:
            inner += self.runs_of_function((node.domain, node.op_type))
        trips: float = 1
        if node.op_type == "Loop" and node.input:
            trips = max(constants.get(node.input[0], ()), default=1)
        elif node.op_type == "Scan":
            trips = max((lengths.get(name, 1) for name in node.input), default=1)
        return 1 + int(max(trips, 1)) * inner

    def check_tensor(self, tensor: TensorProto) -> None:
        """Refuse a tensor whose bytes are not those that its dimensions need."""
        name = tensor.name or "a constant"
        count = math.prod(tensor.dims)
        if any(size < 0 for size in tensor.dims) or count > _MOST_ELEMENTS or len(tensor.dims) > _MOST_DIMS:
            raise refusal(f"{name} has the dimensions {list(tensor.dims)[:8]}")
        if tensor.HasField("segment"):
            raise refusal(f"{name} is stored in segments")
        if tensor.data_type == TensorProto.STRING:
            if len(tensor.string_data) != count:
                raise refusal(f"{name} has {len(tensor.string_data)} texts, not {count}")
            return
        try:
            bits = int(8 * ir.DataType(tensor.data_type).itemsize)
        except (KeyError, TypeError, ValueError) as error:
            raise refusal(f"{name} has no type that is known (number {tensor.data_type})") from error
        wanted = -(-count * bits // 8)
        if tensor.data_location == TensorProto.EXTERNAL:
            self._check_external(tensor, name, wanted)
        elif tensor.HasField("raw_data"):
            if len(tensor.raw_data) != wanted:
                raise refusal(f"{name} has {len(tensor.raw_data)} bytes, its dimensions need {wanted}")
        else:
            stored = max(len(getattr(tensor, field)) for field in _FIELDS)
            parts = 2 if tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128) else 1
            # Types of 4 bits and fewer are packed into bytes.
            if stored != (wanted if bits < 8 else count * parts):
                raise refusal(f"{name} has {stored} numbers, its dimensions need {count}")

    def _check_external(self, tensor: TensorProto, name: str, wanted: int) -> None:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        _check_names((location, *entries.values()))
        if self.folder is None or not location:
            raise refusal(f"the weights of {name} are in another file, {location or 'without a name'}")
        path = self.folder / location
        if self.folder not in path.resolve().parents:
            got = f"{name}: {printable(location)}"
            raise DeployError(
                "The graph keeps weights outside its folder.",
                got=got,
                hint="the graph and its weights in one folder",
            )
        if not path.is_file():
            got, hint = f"{name}: {path}", f"put {printable(location)} beside the graph, where it was written"
            raise DeployError("The weights of the graph are missing.", got=got, hint=hint)
        if self.files is not None and path.resolve().relative_to(self.folder).as_posix() not in self.files:
            what = "The graph reads a file that the manifest does not list."
            raise DeployError(what, got=path, hint="export again")
        place = {key: entries.get(key) or str(number) for key, number in (("offset", 0), ("length", wanted))}
        if not all(text.isascii() and text.isdecimal() and len(text) < 20 for text in place.values()):
            raise refusal(f"the place of {name} in {location} is not a number")
        offset, length = int(place["offset"]), int(place["length"])
        size = path.stat().st_size
        if length != wanted or offset < 0 or offset + length > size:
            got = f"{length} bytes at {offset} of {location}, which has {size}"
            raise refusal(f"{name} has {got}; its dimensions need {wanted}")


def _refuse_cycle(body: Body) -> None:
    makers = {name: at for at, node in enumerate(body.node) for name in node.output if name}
    needs = {
        at: {makers[name] for name in _names_read(node) if name in makers}
        for at, node in enumerate(body.node)
    }
    if all(max(each, default=-1) < at for at, each in needs.items()):
        return  # in the order of execution
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        raise refusal(f"{_title(body.node[error.args[1][0]])} needs its own result") from error


def _title(node: NodeProto) -> str:
    return f"{node.op_type} {node.name or next(iter(node.output), '')}".strip()


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if isinstance(name, bytes):  # what protobuf gives for text that is not UTF-8
            raise refusal(f"a name is not UTF-8: {name[:80]!r}")
        if printable(name) != name or len(name) > 1 << 16:
            raise refusal(f"the name {name[:80]} has control characters or is too long")


def _check_texts(part: Any) -> None:
    """Refuse descriptions that are not UTF-8, in a model or a part of one."""
    names, has_metadata, has_opsets = _texts_of(part.DESCRIPTOR)
    texts = [getattr(part, name) for name in names]
    if has_metadata:
        texts += [text for each in part.metadata_props for text in (each.key, each.value)]
    if has_opsets:
        texts += [each.domain for each in part.opset_import]
    if bytes in map(type, texts):
        raise refusal("a text is not UTF-8")


@functools.cache
def _texts_of(kind: Any) -> tuple[list[str], bool, bool]:
    """The texts that a part of a model has, and whether it has metadata and operator sets."""
    fields = kind.fields_by_name
    return [name for name in _TEXTS if name in fields], "metadata_props" in fields, "opset_import" in fields


def _check_type(kind: TypeProto, name: str, depth: int = 0) -> None:
    """Refuse dimensions that are no sizes; -1, which some writers mean by an unknown one, is none."""
    if depth > _DEEPEST:
        raise refusal(f"the type of {name} is nested more than {_DEEPEST} deep")
    for inner in ("sequence_type", "optional_type"):
        if kind.HasField(inner):
            _check_type(getattr(kind, inner).elem_type, name, depth + 1)
    if kind.HasField("map_type"):
        _check_type(kind.map_type.value_type, name, depth + 1)
    for tensor in (kind.tensor_type, kind.sparse_tensor_type):
        sizes = [dim.dim_value for dim in tensor.shape.dim]
        _check_names(dim.dim_param for dim in tensor.shape.dim)
        fixed = [size for size in sizes if size > 0]
        if len(sizes) > _MOST_DIMS or any(size < -1 for size in sizes) or math.prod(fixed) > _MOST_ELEMENTS:
            raise refusal(f"{name} has the dimensions {sizes[:8]}")


def _check_heads(node: NodeProto) -> None:
    heads = {each.name: each.i for each in node.attribute if each.name in _HEADS and not each.ref_attr_name}
    for each in node.attribute:
        if each.name == "softmax_precision" and each.i not in TensorProto.DataType.values():
            raise refusal(f"{_title(node)} has softmax_precision = {each.i}")
    least = 1 if node.op_type.endswith("Attention") else 0
    for name, count in heads.items():
        if not least <= count <= MOST_HEADS:
            raise refusal(f"{_title(node)} has {name} = {count}")
    queries, keys = heads.get("q_num_heads"), heads.get("kv_num_heads")
    if queries and keys and queries % keys:
        raise refusal(f"{_title(node)} has {queries} query heads for {keys} key/value heads")


def _check_size(node: NodeProto, constants: Mapping[str, _Numbers]) -> None:
    """Refuse a node whose result cannot be stored, where its size is a constant."""
    at = _SIZES.get(node.op_type)
    if at is not None and at < len(node.input):
        sizes = constants.get(node.input[at], ())
        if math.prod(abs(size) for size in sizes) > _MOST_ELEMENTS:
            raise refusal(f"{_title(node)} makes a tensor of {list(sizes)}")
    if node.op_type == "Range" and len(node.input) == 3:
        ends = [constants.get(name, ()) for name in node.input]
        if all(len(end) == 1 for end in ends):
            (start,), (limit,), (step,) = ends
            if step == 0 or (limit - start) / step > _MOST_ELEMENTS:
                raise refusal(f"{_title(node)} counts from {start} to {limit} by {step}")


def _numbers(tensor: TensorProto) -> _Numbers:
    """The numbers of a short constant; none for any other."""
    is_number = tensor.data_type in (
        TensorProto.INT64,
        TensorProto.INT32,
        TensorProto.FLOAT,
        TensorProto.DOUBLE,
    )
    if (
        not is_number
        or tensor.data_location == TensorProto.EXTERNAL
        or math.prod(tensor.dims) > _MOST_NUMBERS
    ):
        return ()
    return _bounded(onnx.numpy_helper.to_array(tensor).reshape(-1).tolist())


def _bounded(numbers: Iterable[float]) -> _Numbers:
    """Numbers as large as they need to be to be too large."""
    most = 1 << 80
    return tuple(max(-most, min(most, number)) if number == number else most for number in numbers)


def _computed(node: NodeProto, constants: Mapping[str, _Numbers]) -> _Numbers:
    """The numbers that a node computes from constants, however they are written; none if unknown."""
    if node.op_type == "Constant":
        for attribute in node.attribute:
            if attribute.name == "value":
                return _numbers(attribute.t)
            if attribute.name in ("value_int", "value_float"):
                return _bounded([attribute.i if attribute.name == "value_int" else attribute.f])
            if attribute.name in ("value_ints", "value_floats"):
                return _bounded([*attribute.ints, *attribute.floats][:_MOST_NUMBERS])
        return ()
    given = [constants.get(name, ()) for name in node.input]
    if not given or not given[0]:
        return ()
    if node.op_type in _PASSED_ON:
        return given[0]
    if not all(given):
        return ()
    if node.op_type == "Concat":
        return tuple(number for numbers in given for number in numbers)[:_MOST_NUMBERS]
    combine = _COMBINED.get(node.op_type)
    length = max(map(len, given))
    if combine is None or any(len(numbers) not in (1, length) for numbers in given):
        return ()
    rows = zip(*(numbers * (length // len(numbers)) for numbers in given), strict=True)
    return _bounded(functools.reduce(combine, row) for row in rows)


def _graphs(attribute: AttributeProto) -> list[GraphProto]:
    return [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]


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


# -- Read and write ONNX files ---------------------------------------------------------------------

# Protobuf is limited to 2 GiB, and much less in it already doubles the memory of every reader.
EXTERNAL_DATA_FROM = 256 << 20


def load_graph(path: Path, *, files: Collection[str] | None = None) -> ir.Model:
    """Read an ONNX file, which may come from anywhere and is checked; see `check_model`.

    Its weights stay on disk until they are used.
    """
    try:
        proto = onnx.ModelProto.FromString(read_regular(path, LARGEST_FILE))
    except FileNotFoundError as error:
        hint = hint_for_missing(path, "the path of a file that exists", lambda each: each.suffix == ".onnx")
        raise DeployError("There is no such ONNX file.", got=path, hint=hint) from error
    except Exception as error:  # protobuf raises its own types, which differ between implementations
        raise DeployError(
            "The file is not an ONNX model.",
            got=f"{path}: {error}",
            hint="a file that an exporter of ONNX wrote",
        ) from error
    if not proto.graph.node and not proto.graph.output:
        raise DeployError(
            "The file is not an ONNX model.",
            got=f"{path}: an empty graph",
            hint="a file that an exporter of ONNX wrote",
        )
    return graph_from_proto(proto, folder=path.parent, files=files)


def graph_from_proto(
    proto: onnx.ModelProto, *, folder: Path | None = None, files: Collection[str] | None = None
) -> ir.Model:
    """A graph that anybody may have made, checked before it is read, in its plain form.

    See `check_model` for the check, and `normalize` for the form. The protobuf is not changed.
    """
    if has_sparse_tensors(proto.graph):
        dense = onnx.ModelProto()
        dense.CopyFrom(proto)
        write_out_sparse_tensors(dense.graph)
        proto = dense
    check_model(proto, folder, files)
    try:
        model = ir.from_proto(proto)
    except Exception as error:  # what onnx_ir raises depends on what is wrong
        raise DeployError(
            "The ONNX model cannot be read.",
            got=f"{type(error).__name__}: {error}",
            hint="export it again; onnx.checker.check_model names what is wrong",
        ) from error
    if folder is not None:
        outside = any(isinstance(each, ir.ExternalTensor) for each in _tensors(model))
        if outside or any(node.domain for node in nodes_in(model.graph)):  # which may have lists of tensors
            ir.external_data.set_base_dir(model.graph, folder)
    _forget_negative_sizes(model)
    model = normalize(model, proto)
    for node in attention_nodes(model):
        heads = [each for each in (node.Hq, node.Hkv) if isinstance(each, int)]
        if not all(1 <= each <= MOST_HEADS for each in heads) or (len(heads) == 2 and heads[0] % heads[1]):
            raise DeployError(
                "An attention has an invalid number of heads.",
                got=f"{node.name}: {heads}",
                hint="export it again",
            )
    return model


def _forget_negative_sizes(model: ir.Model) -> None:
    """A dimension of -1 is one that is not known, as ONNX Runtime reads it."""
    for graph in graphs_of(model):
        for value in (*graph.inputs, *graph.outputs, *(value for node in graph for value in node.outputs)):
            if value.shape is not None and any(isinstance(dim, int) and dim < 0 for dim in value.shape):
                sizes = (None if isinstance(dim, int) and dim < 0 else dim for dim in value.shape)
                value.shape = ir.Shape(list(sizes))


def foreign_domains(model: ir.Model) -> list[str]:
    """The domains of operators that neither ONNX, ONNX Runtime nor the functions of the model define."""
    known = {*_ONNX, "ai.onnx.ml", ORT_DOMAIN}
    defined = {(each.domain, each.name) for each in model.functions.values()}
    parts = [*graphs_of(model), *model.functions.values()]
    used = {(node.domain, node.op_type) for part in parts for node in part} - defined
    return sorted({domain for domain, _ in used} - known)


def graph_of(model: Path | ir.Model) -> ir.Model:
    """The graph of a file, or the graph itself."""
    return load_graph(model) if isinstance(model, Path) else model


def _weights(model: ir.Model) -> list[ir.TensorProtocol]:
    values = [value for graph in graphs_of(model) for value in graph.initializers.values()]
    return [value.const_value for value in values if value.const_value is not None]


def weights_folder(model: ir.Model) -> Path | None:
    """The folder of the external weights of a graph; None where it has none."""
    outside = (Path(each.base_dir) for each in _weights(model) if isinstance(each, ir.ExternalTensor))
    return next(outside, None)


@dataclass(frozen=True, kw_only=True)
class PackedModel:
    """A graph for another process: its bytes, and the folder of its external weights."""

    content: bytes = field(repr=False)
    folder: Path | None

    @classmethod
    def of(cls, model: ir.Model) -> PackedModel:
        """Pack a graph."""
        folder = weights_folder(model)
        content = ir.to_proto(model).SerializeToString()
        return cls(content=content, folder=None if folder is None else folder.resolve())

    def unpacked(self) -> ir.Model:
        """The graph again; its external weights stay on disk until they are used."""
        model = ir.from_proto(onnx.ModelProto.FromString(self.content))
        if self.folder is not None:
            ir.external_data.set_base_dir(model.graph, self.folder)
        return model


@contextmanager
def packed_model(model: ir.Model) -> Iterator[PackedModel]:
    """Pack a graph for a process that opens it meanwhile; large weights in memory are in a file so long."""
    held = sum(each.nbytes for each in _weights(model) if not isinstance(each, ir.ExternalTensor))
    if held <= EXTERNAL_DATA_FROM:
        yield PackedModel.of(model)
        return
    with scratch_folder() as folder:
        path = folder / "model.onnx"
        save_graph(model, path)
        yield PackedModel(content=path.read_bytes(), folder=folder.resolve())


def weight_files(model: ir.Model) -> set[Path]:
    """The files of the external weights and constants of a graph and its subgraphs."""
    return {Path(each.path).resolve() for each in _tensors(model) if isinstance(each, ir.ExternalTensor)}


def _tensors(model: ir.Model) -> list[ir.TensorProtocol]:
    return [*_weights(model), *(attribute.as_tensor() for _, attribute in _constants(model))]


def _constants(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Attr]]:
    holders = (node for node in nodes_in(model.graph) if node.op_type in HOLD_TENSORS or node.domain != "")
    for node in holders:
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                yield node, attribute


def save_graph(model: ir.Model, path: Path) -> None:
    """Write an ONNX file, its weights beside it in `<name>.data` where they are large.

    External weights are copied: the new file does not refer to the old ones.
    """
    size = sum(tensor.nbytes for tensor in _weights(model))
    external = f"{path.name}.data" if size > EXTERNAL_DATA_FROM else None
    if not any(isinstance(each, ir.ExternalTensor) for each in _tensors(model)):
        ir.save(model, path, external_data=external)
        return
    copy = model.clone()  # weights are shared
    for value in (each for graph in graphs_of(copy) for each in graph.initializers.values()):
        if external is None and isinstance(tensor := value.const_value, ir.ExternalTensor):
            value.const_value = _in_memory(tensor)
    for node, attribute in list(_constants(copy)):
        if isinstance(tensor := attribute.as_tensor(), ir.ExternalTensor):
            node.attributes.add(ir.AttrTensor(attribute.name, _in_memory(tensor)))
    ir.save(copy, path, external_data=external)


def move_weights(model: ir.Model, path: Path) -> None:
    """Write an ONNX file, and let the weights of the graph be read from there where they are large."""
    save_graph(model, path)
    for name, value in ir.load(path).graph.initializers.items():
        if isinstance(value.const_value, ir.ExternalTensor):
            model.graph.initializers[name].const_value = value.const_value


def commit_graph(model: ir.Model, output: Path) -> None:
    """Write beside the place and rename, all files or none; the graph last: it must not lack its weights."""
    try:
        with temporary_folder(output) as folder:
            make_folder(folder / "new", within=folder)
            save_graph(model, folder / "new" / output.name)
            commit_files(folder / "new", output)
    except OSError as error:
        hint = write_remedy(error)
        raise DeployError("The output cannot be written.", got=f"{output}: {error}", hint=hint) from error


def _in_memory(tensor: ir.ExternalTensor) -> ir.TensorProtocol:
    try:
        return ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)
    except (OSError, ValueError) as error:
        what = "The weights of the graph cannot be read."
        raise DeployError(
            what,
            got=f"{tensor.name} in {tensor.path}: {error}",
            hint="copy the weights file into the folder of the graph again",
        ) from error


# -- Inner values as outputs -----------------------------------------------------------------------


def with_outputs(model: ir.Model, names: Collection[str]) -> ir.Model:
    """A copy of the model with these values of its main graph as outputs, too; weights are shared."""
    copy = model.clone()
    found = {value.name: value for node in copy.graph for value in node.outputs if value.name in names}
    if any(value.dtype is None for value in found.values()):
        infer_shapes(copy)  # a file need not state the types of inner values
    for name in names:
        value = found.get(name)
        if value is None or value.dtype is None:
            what = "no such value" if value is None else "a value of unknown type"
            raise DeployError(f"The graph has {what}.", got=name, hint="export again")
        if not value.is_graph_output():
            copy.graph.outputs.append(value)
    return copy


def value_named(graph: ir.Graph, name: str) -> ir.Value | None:
    """A value that the graph computes, by its name."""
    return next((value for node in graph for value in node.outputs if value.name == name), None)
