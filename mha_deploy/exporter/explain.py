"""Call torch.onnx.export, and explain its failures: the user's line, what overflows in FP16."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mha_deploy.errors import DeployError, ExportError, NoResult, UserCodeError, out_of_memory
from mha_deploy.exporter import oracle
from mha_deploy.exporter.axes import TORCH_NAME
from mha_deploy.exporter.oracle import Intercept, run_module, swapped, tensors_in
from mha_deploy.graph.batch_norm import fold_batch_norms
from mha_deploy.runtime.child import isolation
from mha_deploy.runtime.user_code import user_code, where_is

# -- Around calls of PyTorch's exporter ------------------------------------------------------------


@contextlib.contextmanager
def silenced(*, but: str = "") -> Iterator[None]:
    """Let PyTorch print, warn and log nothing: the error has what it logs of a failure."""
    known, nowhere = logging.getLogger().manager.loggerDict, io.StringIO()
    # Of structured traces nothing is shown; their handler removes itself where TORCH_TRACE asks for none,
    # at the first record. Until then every guard of a trace is written out, a third of its time.
    names = [name for name in known if name.split(".")[0] == "torch" and name not in (but, "torch.__trace")]
    outputs = contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere)
    exporter = logging.getLogger("torch.onnx")  # whose parts are imported by the first export
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stack.callback(exporter.setLevel, exporter.level)
        exporter.setLevel(logging.ERROR)
        for change in (*outputs, *(swapped(logging.getLogger(name), "disabled", True) for name in names)):
            stack.enter_context(change)
        yield


@contextlib.contextmanager
def comparing_multiples() -> Iterator[None]:
    """Let PyTorch see that min(64*S, 512*S) is 64*S: 2.13 does, 2.11 does not.

    It asks so where a group's keys are repeated for its heads, and takes what it cannot see for a limit of S.
    """
    from torch.utils._sympy.functions import Min, MinMaxBase

    if hasattr(MinMaxBase, "_collapse_known_multiplicative_terms"):
        yield
        return
    old = vars(MinMaxBase)["_find_localzeros"]

    def found(cls: type, values: Iterable[Any], **options: Any) -> set[Any]:
        kept = set(old.__func__(cls, values, **options))
        if len(kept) != 2:
            return kept
        (first, size), (second, other) = (value.as_coeff_Mul() for value in kept)
        if size != other or not size.is_nonnegative or not (first.is_comparable and second.is_comparable):
            return kept
        return {(min if cls is Min else max)(first, second) * size}

    with swapped(MinMaxBase, "_find_localzeros", classmethod(found)):
        yield


def without_shape_cache() -> contextlib.AbstractContextManager[None]:
    """Let PyTorch compute the shapes of every operation: looking them up evaluates each size that varies.

    Where a loop is unrolled, as in Qwen3-Next, the cache makes tracing five times as long; elsewhere it gains
    nothing.
    """
    import torch._dynamo.config  # slow, and needed by PyTorch's exporter only

    return torch._dynamo.config.patch(fake_tensor_cache_enabled=False)


@contextlib.contextmanager
def restricted_matching() -> Iterator[None]:
    """Let onnxscript fold no batch norm, and try patterns of several outputs at their first operator only.

    It folds a BatchNormalization in the type of the weights; `fold_batch_norms` does so exactly. And it lists
    the whole graph for each node before it looks at its operator: that is quadratic, and in a graph of some
    thousand nodes most of the export.
    """
    try:
        from onnxscript.rewriter._matcher import SimplePatternMatcher
    except ImportError:  # another version, which may match otherwise
        yield
        return
    whole = vars(SimplePatternMatcher)["match"]

    def match(self: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        if node.op_type == "BatchNormalization":  # or onnxscript would fold it
            return None
        if not self.pattern.has_single_output_node:
            wanted = self.pattern.output_nodes[0].op_identifier()
            if wanted is not None and wanted != node.op_identifier():
                return None
        return whole(self, model, graph, node, **options)

    with swapped(SimplePatternMatcher, "match", match):
        yield


@contextlib.contextmanager
def registering_by_name() -> Iterator[None]:
    """Let onnxscript register its functions for PyTorch's operators without parsing the source of each.

    It does so for the domain alone, which a function knows: a second for five hundred of them. Nor is the
    signature of each read, but that of those that a program calls.
    """
    try:
        from onnxscript.values import TracedOnnxFunction
        from torch.onnx._internal.exporter._registration import OnnxDecompMeta, ONNXRegistry

        parsed = vars(TracedOnnxFunction)["function_ir"].fget
        describe, registered = vars(OnnxDecompMeta)["__post_init__"], vars(ONNXRegistry)["get_decomps"]
    except (ImportError, KeyError):  # another version, which may register otherwise
        yield
        return

    class Described:
        def __init__(self, function: Any) -> None:
            self._function, self.domain = function, function.opset.domain

        def __getattr__(self, name: str) -> Any:
            return getattr(parsed(self._function), name)

    def called(self: Any, target: Any) -> Any:
        found = registered(self, target)
        for each in found:
            describe(each)
        return found

    with contextlib.ExitStack() as stack:
        stack.enter_context(swapped(TracedOnnxFunction, "function_ir", property(Described)))
        stack.enter_context(swapped(OnnxDecompMeta, "__post_init__", lambda meta: None))
        stack.enter_context(swapped(ONNXRegistry, "get_decomps", called))
        yield


@contextlib.contextmanager
def listing_operators_once() -> Iterator[None]:
    """Let PyTorch list its composite operators once: it does so for each of its libraries, three times."""
    import torch._export.utils as lists

    name = "_materialize_cpp_cia_ops"
    with swapped(lists, name, cache(vars(lists)[name])) if name in vars(lists) else contextlib.nullcontext():
        yield


class UnrolledLoop(ExportError):
    """A loop in Python of which most of a trace would consist."""


class WatchedLoops(TorchFunctionMode):
    """Counts the operations of a trace by the line of the user's code that calls them; see `UnrolledLoop`.

    A trace has every operation of a loop in Python once for each round. Where some hundred of them come from
    one line, in one call of its function, and are most of the trace, tracing takes minutes, and so does all
    that follows. It is refused when it has taken a 120th of the time limit, and half a minute at least: the
    limit is for a call of a runtime, and may be short where tracing is not.
    """

    _ROUNDS, _PART, _LEAST_S = 100, 120, 30.0

    def __init__(self) -> None:
        super().__init__()
        self._begin, self._seconds = time.thread_time(), max(isolation.limit_s / self._PART, self._LEAST_S)
        self._all, self._looped = 0, 0
        self._lines: dict[tuple[CodeType, int], tuple[FrameType, int]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        frame, self._all = _calling_frame(), self._all + 1
        if frame is not None:
            line = frame.f_code, frame.f_lineno
            before, count = self._lines.get(line, (frame, 0))
            count = count + 1 if before is frame else 1
            self._lines[line] = frame, count
            self._looped += self._ROUNDS if count == self._ROUNDS else count > self._ROUNDS
            spent = time.thread_time() - self._begin
            if count >= self._ROUNDS and spent > self._seconds and 2 * self._looped > self._all:
                where = f"{frame.f_code.co_name}, {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise UnrolledLoop(
                    "PyTorch unrolls a loop, and its iterations would be most of the graph.",
                    got=f"{where}: {self._looped} of {self._all} operations so far, after {spent:.0f} s",
                    hint="fixed sizes, such as --axis S=128, which are traced faster; a module without the "
                    f"loop; or --time-limit {10 * self._PART * self._seconds:.0f}",
                )
        return func(*args, **(kwargs or {}))


def _calling_frame() -> FrameType | None:
    """The user's code that calls an operation itself; None for a module of PyTorch, and for its exporter."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(str(_TORCH)):
        if frame.f_code.co_name == "_call_impl":
            return None
        frame = frame.f_back
    is_own = frame is not None and _PACKAGE in Path(frame.f_code.co_filename).parents
    return None if is_own else frame


def was_interrupted(error: BaseException | None) -> bool:
    """Whether the user pressed Ctrl-C, which the exporter takes for a failure of its own."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def onnx_program(
    module: nn.Module | ExportedProgram, explained: Callable[[Exception], ExportError], **options: Any
) -> torch.onnx.ONNXProgram:
    """Call PyTorch's exporter; what it raises is explained."""
    try:
        with (
            silenced(), without_shape_cache(), restricted_matching(),
            registering_by_name(), listing_operators_once(),
        ):  # fmt: skip
            program = torch.onnx.export(module, (), dynamo=True, verbose=False, **options)
    except DeployError:
        raise
    except Exception as error:  # also of onnxscript's optimizer, whose types share no base
        if was_interrupted(error):
            raise KeyboardInterrupt from error
        raise explained(error) from error
    if program is None:
        raise ExportError(
            "PyTorch returned no ONNX program.",
            hint="another version of PyTorch; `mha-deploy doctor` lists those here",
        )
    fold_batch_norms(program.model)
    return program


def first_cause(error: BaseException) -> str:
    """What began it: the exporter's own text only says at which of its steps that was."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# -- Why PyTorch could not export a module, and which line of it is at fault -----------------------

_SHAPES_LOG = "torch.fx.experimental.symbolic_shapes"
_PACKAGE, _TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
_PYTHON = (Path(traceback.__file__).parent, Path(logging.__file__).parent)

_LONGEST = 300

_VIOLATED = re.compile(r"Constraints violated \(([^)]*)\)")
_CONSTANT = re.compile(r"You marked (\w+) as dynamic but your code specialized it to be a constant \((\d+)\)")
_NOT_ALL = re.compile(r"Not all values of (\w+) = .* satisfy the generated guard (.*?)\.?$", re.MULTILINE)
_MULTIPLE = re.compile(r"^ *(\w+) = (\d+)\*_\1$", re.MULTILINE)
_FIX = re.compile(r"Suggested fixes:\n((?:  .*\n?)+)")
_SIZE = re.compile(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]")
_CREATED = re.compile(r"create_symbol (\w+) = \d+ for L\['(\w+)'\]\.size\(\)\[(\d+)\]")
_UNKNOWN = re.compile(r"Found <class '([\w.]+)'> in output, which is not a known type")
_SYMBOL = re.compile(r"\bs\d+\b")
_RANGE_GUARD = re.compile(r"float16|isfinite|isinf|isnan")
_GUARD = re.compile(r"eval (?:\[guard suppressed\] )?(.*) \[guard added\]")

_OPERATOR = re.compile(r"op='([\w.]+)'|Calling FX node: .*?target=torch\.ops\.([\w.]+)")
_FOLDED = re.compile(r"constant folding for node 'node_(\w+)'")
_FILE_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')

SizeNames = Callable[[str, int], str]
"""Names a dimension of an input: `("tokens", 1)` is `S`."""


def may_be_small_sizes(error: Exception) -> bool:
    """Whether PyTorch may only miss proof for small sizes: there it takes derived sizes of 0 and 1 apart."""
    text = str(error)
    return bool(_VIOLATED.search(text)) and not _CONSTANT.search(text)


def explain_failure(error: Exception, name_of: SizeNames, trace_again: Callable[[], object]) -> ExportError:
    """Make an error for the user of one from `torch.export`.

    What failed is traced again where PyTorch knows more, but only logs it.
    """
    text = str(error).replace(TORCH_NAME, "")
    about_sizes = _VIOLATED.search(text) is not None
    listener = _Listener(name_of)
    if about_sizes or _SYMBOL.search(text):
        log = logging.getLogger(_SHAPES_LOG)
        with contextlib.ExitStack() as stack, silenced(but=_SHAPES_LOG), contextlib.suppress(Exception):
            for name, value in {"handlers": [listener], "propagate": False}.items():
                stack.enter_context(swapped(log, name, value))
            stack.callback(log.setLevel, log.level)
            log.setLevel(logging.INFO)
            trace_again()  # which fails: that is being explained
    if unknown := _UNKNOWN.search(text):
        what = "The module returns an object that is not made of tensors."
        hint = "a wrapper that returns tensors, or an option of the module such as use_cache=False"
        return ExportError(what, got=unknown[1], hint=hint)
    if not about_sizes:
        frame = _own_frame(traceback.extract_tb(error.__traceback__))
        cause = _SYMBOL.sub(lambda match: listener.axes.get(match[0], match[0]), first_cause(error))
        remedy, about_types = _remedy(text) or _USUAL, _is_about_types(text, cause)
        if frame is not None and _RANGE_GUARD.search(frame.line or ""):  # which is in FP16 only
            remedy = "--precision auto: it traces the module in float32, without its branches for FP16"
            about_types = False
        got, what = f"{_line_of(frame)}{cause[:_LONGEST]}", "PyTorch could not trace the module."
        return ExportError(what, got=got, hint=remedy, about_types=about_types)
    if constants := dict(_CONSTANT.findall(text)):
        axes, places = " and ".join(constants), listener.places
        sizes = [(places.get(axis, ""), f"{axis}={size}") for axis, size in constants.items()]
        always = [f"{place}traced at {size}, it is a constant" for place, size in sizes]
        what = f"The trace of the module holds for one size of {axes} only."
        hint = f"fix {axes} to one size, or let the module take it from its inputs"
        return ExportError(what, got="; ".join(always), hint=hint)
    return _not_for_all_sizes(text, name_of, listener.places)


# What PyTorch's exporter refuses, and what helps; of two of them, `auto` is all that does.
_SWAPPED = r"[Cc](annot|ouldn't) swap"
_NO_HALF = r"Unsupported dtype Half|not implemented for 'Half'|for .Half."
_REMEDIES = {
    r"data.dependent|GuardOnDataDependent|\.item\(\)|nonzero": "torch.where or torch.cond in place of Python "
    "code that depends on values; sizes that do not depend on values",
    r"aliasing": "clone what goes into torch.cond or comes out of it: (x.clone(),)",
    r"grouped_mm": 'experts_implementation="batched_mm" in the config of a Transformers model',
    _SWAPPED: "--precision auto: what `forward` casts to float32 has that type there",
    _NO_HALF: "--precision auto, or fp32",
    r"complex-valued|ComplexHalf|complex (number|tensor|dtype)": "a rotation by sine and cosine",
    r"HigherOrderOperator|flex_attention": "torch.nn.functional.scaled_dot_product_attention with a mask",
    r"already registered": "another name for that buffer or parameter, which PyTorch's exporter uses itself",
    r"No ONNX function found": "an equivalent of other operators: ONNX has none for this one",
}


_USUAL = "write that part of forward() with other operators, or another version of PyTorch"


def _remedy(text: str) -> str | None:
    """What helps where PyTorch says so; None where that is not known."""
    return next((hint for sign, hint in _REMEDIES.items() if re.search(sign, text)), None)


def explain_example(refusal: ExportError, module: nn.Module, inputs: Mapping[str, Tensor]) -> ExportError:
    """What refused a trace; or its example, where the module itself does not run on it either."""
    error = _failure(module, inputs)
    if error is None or _remedy(str(error)) is not None:
        return refusal
    shown = ", ".join(f"{name} {_type_name(each.dtype)} {list(each.shape)}" for name, each in inputs.items())
    hint, is_type = f"examples of the shapes and types that forward() takes; these are {shown}", False
    for name, tensor in inputs.items():
        other = tensor.long() if tensor.is_floating_point() else tensor.float()
        if _failure(module, {**inputs, name: other}) is None:
            hint, is_type = f"an example of type {_type_name(other.dtype)} for input {name}", True
            break
    about_types = refusal.about_types and not is_type
    what = "The module does not run on its example inputs."
    return ExportError(what, got=refusal.got, hint=hint, about_types=about_types)


def _failure(module: nn.Module, inputs: Mapping[str, Tensor]) -> Exception | None:
    """What a module raises on some inputs by itself."""
    copies = {name: each.clone() for name, each in inputs.items()}  # a module may write into them
    try:
        with torch.no_grad(), silenced(), oracle.dense_flex_attention():
            module(**copies)
    except Exception as error:  # noqa: BLE001 (a user's module)
        return error if out_of_memory(error) is None else None
    return None


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# What PyTorch says where types or ranges are at fault.
_TYPES = re.compile(r"not finite|infinit|NaN|overflow|dtype|scalar type|[Ff]loat(16|32)?\b|Half\b")


def _is_about_types(text: str, cause: str) -> bool:
    """Whether PyTorch blames types or ranges, and the remedy is not `auto` already."""
    return bool(_TYPES.search(cause)) and not re.search(f"{_SWAPPED}|{_NO_HALF}", text)


def translation_error(error: Exception, program: ExportedProgram) -> ExportError:
    """The error for an operator that PyTorch cannot write as ONNX, with the user's line."""
    cause = first_cause(error)
    operator = _OPERATOR.search(f"{cause}\n{error}")
    name = (operator[1] or operator[2]) if operator else ""
    folded = _FOLDED.search("".join(traceback.format_exception(error)))
    named = [
        node
        for node in program.graph.nodes
        if (name and str(node.target).startswith(name)) or (folded and node.name == folded[1])
    ]
    got = f"{own_line(_frames(named[0])) if named else ''}{cause[:_LONGEST]}"
    what, text = "PyTorch could not write the module as ONNX.", str(error) + cause
    return ExportError(what, got=got, hint=_remedy(text) or _USUAL, about_types=_is_about_types(text, cause))


def _frames(node: Node) -> list[traceback.FrameSummary]:
    """The stack of the module's code that a node came from."""
    found = _FILE_LINE.findall(node.meta.get("stack_trace") or "")
    return [traceback.FrameSummary(file, int(line), name) for file, line, name in found]


def _not_for_all_sizes(text: str, name_of: SizeNames, places: dict[str, str]) -> ExportError:
    named = partial(_SIZE.sub, lambda match: name_of(match[1], int(match[2])))
    guards = [(axis, named(guard)) for axis, guard in _NOT_ALL.findall(text)]
    guards.sort(key=lambda each: "!=" in each[1])  # those are single sizes that were not traced
    fixes, violated = _FIX.search(text), _VIOLATED.search(text)
    hint = "a narrower range, or a module that takes any size"
    if fixes:
        hint = f"PyTorch suggests {'; '.join(line.strip() for line in fixes[1].splitlines())}"
        if multiples := _MULTIPLE.findall(fixes[1]):
            spelled = ", ".join(f'"{times}*{axis}" in place of "{axis}"' for axis, times in multiples)
            ranges = ", ".join(f"{axis} by {times}" for axis, times in multiples)
            hint = f"in Example(), {spelled}; and in axes=, divide the range of {ranges}"
    needed = text.splitlines()[0]
    if guards:
        needed = f"{places.get(guards[0][0], '')}it needs {guards[0][1]}"
    what = f"The module does not work for every size of {violated[1] if violated else ''}."
    return ExportError(what, got=needed, hint=hint)


def own_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line that is neither Python's nor PyTorch's nor ours, as `file:line: `, or nothing."""
    return _line_of(_own_frame(frames))


def _own_frame(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    for frame in reversed(frames):
        path = Path(frame.filename)
        is_foreign = path.parent in _PYTHON or not {_PACKAGE, _TORCH}.isdisjoint(path.parents)
        if not is_foreign and path.is_file():
            return frame
    return None


def _line_of(frame: traceback.FrameSummary | None) -> str:
    return "" if frame is None else f"{frame.filename}:{frame.lineno}: "


class _Listener(logging.Handler):
    """Notes from which line PyTorch fixes a size: it logs that while the module's frames are on the stack.

    `axes` are the sizes that PyTorch's symbols stand for, `places` the lines that first required one.
    """

    def __init__(self, name_of: SizeNames) -> None:
        super().__init__(logging.INFO)
        self.axes: dict[str, str] = {}
        self.places: dict[str, str] = {}
        self._name_of = name_of

    def emit(self, record: logging.LogRecord) -> None:
        """Read one message."""
        text = record.getMessage()
        if created := _CREATED.match(text):
            self.axes[created[1]] = self._name_of(created[2], int(created[3]))
        guard = _GUARD.match(text)
        place = own_line(traceback.extract_stack()) if guard else ""
        for symbol in _SYMBOL.findall(guard[1]) if guard else ():
            if symbol in self.axes and place:
                self.places.setdefault(self.axes[symbol], place)


# -- Why numbers of a module are not finite: its weights, a constant beyond its type, an overflow --

_NO_SUCH_NUMBER = re.compile(r"value cannot be converted to type \S+ without overflow")
_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_MOST_NAMED = 3
_SMALLER_NUMBER = "torch.finfo(x.dtype).min in place of the number"


_DOES_NOT_RUN = "The module does not run."


def run_explained(
    module: nn.Module, arguments: Mapping[str, Tensor], where: str, *, at: str = "", hint: str
) -> tuple[Tensor, ...]:
    """Run a module as its user does: the tensors that it returns. What it raises is explained."""
    try:
        with user_code(where_is(module.forward), _DOES_NOT_RUN):
            return run_module(module, arguments)
    except ExportError as failed:
        error = failed.__cause__
        if not isinstance(failed, UserCodeError) or error is None:
            raise
        if out_of_memory(error) is not None:
            raise error from None
        types = [_SHORT.get(each.dtype) for each in (*module.parameters(), *arguments.values())]
        if _NO_SUCH_NUMBER.search(str(error)):
            short = next(filter(None, types), "its precision")
            what = f"The module does not run in {short}: it uses a number that {short} cannot hold."
            hint = f"--precision auto, or {_SMALLER_NUMBER}"
            got = _first_overflow(lambda: module(**arguments)).found or str(error).splitlines()[0]
            raise ExportError(what, got=got, hint=hint) from error
        got = f"{at}{failed.got}"
        if isinstance(error, IndexError) and (ended := _table_that_ends(module, arguments)) is not None:
            shapes = ", ".join(f"{name} {list(each.shape)}" for name, each in arguments.items())
            got, most = f"{got}; {ended.name} has {ended.rows} rows", ended.rows
            if ended.of:
                what = f"Input {ended.of} has numbers beyond the table that it indexes, at {where}."
                got, hint = f"{got}; input {ended.of} has {ended.number}", f"numbers from 0 to {most - 1}"
                raise NoResult(what, got=got, hint=hint) from error
            got = f"{got}, and is read at {ended.number}: {shapes}"
            # Positions may begin behind 0, as in RoBERTa: by as much as the axis is longer than they are.
            longest = max((size for each in arguments.values() for size in each.shape), default=0)
            last = most - max(0, ended.number + 1 - longest)
            hint = f"axes that end with the table, as --axis NAME=1:{last}:{last}, or a larger table"
            raise NoResult(f"A table of the module ends before {where}.", got=got, hint=hint) from error
        hint = f"{hint}, or --precision auto if it runs in float32" if {"fp16", "bf16"} & {*types} else hint
        raise NoResult(f"The module does not run at {where}.", got=got, hint=hint) from error


class _ShortTable(NamedTuple):
    """An embedding that was read beyond its rows; `of` is the input whose numbers are the indices, if any."""

    name: str
    rows: int
    number: int
    of: str


def _table_that_ends(module: nn.Module, arguments: Mapping[str, Tensor]) -> _ShortTable | None:
    """The first embedding that a module reads beyond its rows; None where another table ends."""
    found: list[_ShortTable] = []

    def watch(name: str, table: nn.Embedding) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def note(_: nn.Module, given: tuple[Any, ...]) -> None:
            at = given[0] if given and isinstance(given[0], Tensor) else None
            if found or at is None or not at.numel():
                return
            rows, least, most = table.num_embeddings, int(at.min()), int(at.max())
            if least < 0 or most >= rows:
                same = (
                    key
                    for key, each in arguments.items()
                    if not each.is_floating_point() and torch.equal(each.flatten().to(at), at.flatten())
                )
                found.append(_ShortTable(name, rows, most if most >= rows else least, next(same, "")))

        return note

    tables = [(name, each) for name, each in module.named_modules() if isinstance(each, nn.Embedding)]
    hooks = [table.register_forward_pre_hook(watch(name, table)) for name, table in tables]
    try:
        with contextlib.suppress(Exception):  # it fails as it did
            run_module(module, arguments)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def refuse_infinite_constants(program: ExportedProgram, where: str) -> None:
    """Refuse a program that is not finite where its module is, if numbers of it became infinite.

    In the module such a number is a Python float. In the program it has the type of what it meets.
    """
    found = []
    for node in program.graph.nodes:
        dtype = node.kwargs.get("dtype")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            continue
        for number in node.args:
            if isinstance(number, (int, float)) and torch.finfo(dtype).max < abs(number) < math.inf:
                found.append(f"{own_line(_frames(node))}{number:g} in {_SHORT.get(dtype, dtype)}")
    if constants := ", ".join(dict.fromkeys(found)):
        what = "The exported program overflows where the module does not."
        hint = f"--precision auto, bf16 or fp32, or {_SMALLER_NUMBER}"
        raise ExportError(what, got=f"{where}: {constants} is infinite", hint=hint)


_NO_KEYS = "The module has no finite result for a fully masked query."


def overflow_error(
    where: str, precision: str, *, module: nn.Module, run: Callable[[], object] | None = None, hint: str
) -> NoResult:
    """The message about a result that is not finite; `run` runs the module again, to find the call."""
    if nan := _weights_with(torch.isnan, (*module.named_parameters(), *module.named_buffers())):
        helps = "weights without NaN; no precision helps"
        return NoResult("The module's weights contain NaN.", got=nan, hint=helps)
    seen = _Watch() if run is None else _first_overflow(run)
    if seen.masked and not seen.found:
        hint = "a mask that leaves every query a key, or in the module nan_to_num or a finite mask number"
        return NoResult(_NO_KEYS, got=f"{where}; {seen.masked}", hint=hint)
    # Not buffers: a causal mask of -inf is one.
    if not seen.found and (infinite := _weights_with(torch.isinf, module.named_parameters())):
        what = f"The module's weights contain infinite numbers in {precision}."
        finite = "" if precision == "fp32" else f"; {hint} if rounding to {precision} made them infinite"
        return NoResult(what, got=infinite, hint=f"finite weights{finite}")
    if run is not None and seen.found is None:
        return NoResult(f"The module's own result is not finite in {precision}.", got=where, hint=hint)
    what = f"The module itself overflows in {precision}: its own result is not finite."
    return NoResult(what, got=where if seen.found is None else f"{where}; first at {seen.found}", hint=hint)


# Their fast path is not taken within a mode, such as the one that the module is run in elsewhere.
_FAST = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def refuse_full_mask(module: nn.Module, arguments: Mapping[str, Tensor], where: str) -> None:
    """Refuse a full mask for which a module has no finite result on PyTorch's fast path."""
    if not any(isinstance(each, _FAST) for each in module.modules()):
        return
    results = list[Tensor]()
    with contextlib.suppress(RuntimeError), silenced(), torch.inference_mode():  # a CPU may lack a kernel
        results = tensors_in(module(**arguments))
    if not all(map(_is_finite, results)):
        hint = "torch.backends.mha.set_fastpath_enabled(False), or a mask that leaves every query a key"
        raise NoResult(_NO_KEYS, got=f"{where}, on the fast path of torch.backends.mha", hint=hint)


def _weights_with(test: Callable[[Tensor], Tensor], weights: Iterable[tuple[str, Tensor]]) -> str | None:
    """The weights of which some numbers meet a test, and how many do; None where there are none."""
    found = []
    for name, tensor in weights:
        met = test(tensor.detach())
        if met.any():
            first = tuple(int(i) for i in met.nonzero()[0])
            found.append(f"{name}: {int(met.sum())} of {tensor.numel()}, the first at {first}")
    more = [f"and {len(found) - _MOST_NAMED} more"] if len(found) > _MOST_NAMED else []
    return "; ".join(found[:_MOST_NAMED] + more) or None


def _first_overflow(run: Callable[[], object]) -> _Watch:
    """Run a module again; the calls whose results are the first that are not finite, with their lines."""
    watch, eager = _Watch(), oracle.Float32Accumulation()
    with contextlib.suppress(Exception), torch.inference_mode(), oracle.dense_flex_attention(), eager, watch:
        run()
    if watch.masked is None:
        watch.found = watch.found or watch.hidden
    return watch


class _Watch(Intercept):
    """Notes the first call that makes numbers that are not finite from numbers that are.

    Scores that a mask takes to -inf are meant to be; a softmax of nothing else is noted by itself. A number
    that becomes -inf because its type cannot hold it may be a mask's: it is named only where nothing else is.
    """

    found: str | None = None
    hidden: str | None = None
    masked: str | None = None

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", str(func))
        if self.found is not None or "empty" in name:
            return func(*args, **kwargs)
        given = tree_leaves((args, kwargs))
        from_finite = all(map(_is_finite, given))
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if _NO_SUCH_NUMBER.search(str(error)):
                self.found = f"{_place()}{name}{_too_large(given)}"
            raise
        if from_finite and not all(map(_is_finite, tree_leaves(result))) and not _masks(given, result):
            place = f"{_place()}{name}{_reached(func, args, kwargs)}"
            if _is_mask_number(given, result):
                self.hidden = self.hidden or place
            else:
                self.found = place
        scores = args[0] if args else kwargs.get("input")
        if self.masked is None and "softmax" in name and (count := _without_keys(scores, result)):
            self.masked = f"{_place()}{name}, {count:,} of them in all heads"
        return result


def _only_hides(result: Any) -> bool:
    """Whether all that is not finite in a result is -inf."""
    return isinstance(result, Tensor) and not bool((result.isnan() | (result == math.inf)).any())


def _is_mask_number(given: list[Any], result: Any) -> bool:
    """Whether what became -inf is one number that the type of the result cannot hold, as -1e9 in FP16."""
    if not _only_hides(result):
        return False
    most, tensors = torch.finfo(result.dtype).max, [each for each in given if isinstance(each, Tensor)]
    if any(isinstance(each, (int, float)) and abs(each) > most for each in given):
        return True
    if len(tensors) != 1 or tensors[0].shape != result.shape or tensors[0].dtype == result.dtype:
        return False
    return tensors[0][result == -math.inf].unique().numel() == 1


def _masks(given: list[Any], result: Any) -> bool:
    """Whether a call adds the lowest number of a type, or nearly, to scores: what is below it is -inf."""
    if not _only_hides(result):
        return False
    tensors = [each for each in given if isinstance(each, Tensor) and each.is_floating_point()]
    return any(each.numel() and float(each.min()) <= 0.9 * torch.finfo(each.dtype).min for each in tensors)


def _without_keys(scores: Any, weights: Any) -> int:
    """The queries that a softmax has no key for: all scores are -inf, and all weights NaN."""
    if not isinstance(scores, Tensor) or not isinstance(weights, Tensor) or not weights.isnan().any():
        return 0
    return int((weights.isnan().all(-1) & (scores == -math.inf).all(-1)).sum())


def _is_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    return not isinstance(value, float) or math.isfinite(value)


def _place() -> str:
    """The user's line on the stack: behind the frame that runs the module again."""
    frames = traceback.extract_stack()
    start = max((i for i, frame in enumerate(frames) if frame.name == _first_overflow.__name__), default=-1)
    return own_line(frames[start + 1 :])


def _too_large(given: list[Any]) -> str:
    """The numbers of a call that the type of its tensors cannot hold."""
    dtypes = [each for each in given if isinstance(each, torch.dtype)]
    tensors = [each for each in given if isinstance(each, Tensor) and each.is_floating_point()]
    dtype = next(iter([*dtypes, *(tensor.dtype for tensor in tensors)]), torch.get_default_dtype())
    largest = torch.finfo(dtype).max
    numbers = [each for each in given if isinstance(each, (int, float)) and abs(each) > largest]
    if not numbers:
        return ""
    listed = ", ".join(f"{number:g}" for number in numbers)
    return f" with {listed}; the largest number of {_SHORT.get(dtype, dtype)} is {largest:g}"


def _reached(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> str:
    """How large the numbers are that a call overflows with."""
    with contextlib.suppress(RuntimeError, TypeError, ValueError):  # not every call takes wider numbers
        args, kwargs = tree_map_only(Tensor, oracle.upcast, (args, kwargs))
        floats = [each for each in tensors_in(func(*args, **kwargs)) if each.is_floating_point()]
        largest = max((float(each.abs().max()) for each in floats), default=0.0)
        if math.isfinite(largest) and largest:
            return f" reaches {largest:.3g}"
    return ""
