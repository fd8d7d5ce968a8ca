"""Everything that a user can choose: each option once, with its default and its meaning.

A record is what the code that does the work gets. The functions of `api.py` take its fields as keywords, and
the command line makes an option of each (`cli/arguments.py`). `help` of a record lists them.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_origin

from mha_deploy.errors import DeployError, nearest
from mha_deploy.keywords import alternatives, item_of, typed_value

if TYPE_CHECKING:
    from mha_deploy.model.spec import Axis

OnStep = Callable[[str, int, int], None]
"""Called as each step of a long job begins: its name, its number from 0, their count (0 if unknown)."""
OnName = Callable[[str], None]
"""The same, of steps that are not counted."""


class Step(str):
    """The name of a step: a stage, and a detail of it that a log leaves out."""

    stage: str

    def __new__(cls, stage: str, detail: str) -> "Step":
        """`stage: detail`."""
        made = super().__new__(cls, f"{stage}: {detail}")
        made.stage = stage
        return made


Record = TypeVar("Record")
AUTO = "auto"
MOST_SECONDS = 1e7
"""The largest time limit: about four months."""


def silent(name: str, number: int = 0, count: int = 0) -> None:
    """Report no progress."""


def uncounted(on_step: OnStep | None) -> OnName:
    """What steps that are not counted call."""
    return silent if on_step is None else lambda name: on_step(name, 0, 0)


def option(default: Any, about: str, *flags: str, **details: Any) -> Any:
    """A field of a record of options.

    Args:
        default: Its default.
        about: What it is, in a sentence or two; "default: …" where the value itself does not say it.
        flags: Its names on the command line; default: made from the name of the field.
        details: Further arguments of `click.Option`, such as `metavar`, and the bounds `min` and `max`.
    """
    return field(default=default, metadata={"about": about, "flags": flags, "details": details})


def flags_of(field: Field[Any]) -> tuple[str, ...]:
    """The names of an option on the command line."""
    return field.metadata.get("flags") or (f"--{field.name.replace('_', '-')}",)


def options_of(record: type, *names: str) -> dict[str, Field[Any]]:
    """The options of a record, or the named ones."""
    return {each.name: each for each in fields(record) if (each.name in names if names else each.metadata)}


def read_options(record: type[Record], given: Mapping[str, Any], *others: str) -> Record:
    """A record of the options that a user named; `others` are those that went elsewhere.

    See `typed_value` for what a field takes.
    """
    own = {each.name: each for each in fields(record)}  # type: ignore[arg-type]
    known = {*own, *others}
    if unknown := [name for name in given if name not in known]:
        if unknown[0] in {name for name, _ in _OF_PROCESS.values()}:
            raise TypeError(f"{unknown[0]} is an option of the process: md.configure({unknown[0]}=...)")
        raise TypeError(f"there is no option {unknown[0]!r}: {nearest(unknown[0], known)}")
    return record(**{name: _typed(own[name], value) for name, value in given.items() if name in own})


def _typed(option: Field[Any], value: Any) -> Any:
    """A value as a field holds it: of its type, and within its bounds."""
    details = option.metadata.get("details", {})
    bounds = {name: details.get(name) for name in ("min", "max")}
    return typed_value(option.name, option.type, value, option.default, **bounds)


def given_of(options: Any, names: Iterable[str]) -> dict[str, str]:
    """Those of some options that do not have their defaults, as on the command line: `--opset 24`."""
    found = {}
    for each in options_of(type(options), *names).values():
        value = getattr(options, each.name)
        if (tuple(value) if isinstance(value, list) else value) != each.default:
            flag = flags_of(each)[0]
            given = [f"{key}={one}" for key, one in value.items()] if isinstance(value, Mapping) else value
            is_list = isinstance(given, Sequence) and not isinstance(given, str)
            shown = ",".join(map(str, given)) if is_list else given
            no = f"--no-{flag.removeprefix('--')}"
            found[each.name] = flag if value is True else no if value is False else f"{flag} {shown}"
    return found


# -- Export ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How to export; `layer` is the layer of the checkpoint, where no prefix is given."""

    precision: str = option(
        AUTO,
        "Types in the graph: fp16, bf16, fp32, auto, int8 or fp8. auto is FP16, with FP32 where FP16 "
        "overflows in your own model or in a float32 .onnx file; other .onnx files keep their types. int8 "
        "and fp8 quantize the GEMMs; the rest is as with auto.",
    )
    opset: int | None = option(None, "ONNX operator set: 23 or 24. default: the lowest that suffices")
    seed: int = option(0, "Seed of random weights and inputs.", min=0, max=2**32 - 1)
    weights: Path | None = option(
        None,
        "A safetensors file, the index of several, or the folder of a checkpoint; for your own model also a "
        "state dict. default: random weights, or the model's own",
    )
    prefix: str = option(
        "",
        "Prefix of the model's tensors in the checkpoint, such as model.layers.0.self_attn. default: "
        "inferred from the tensor names",
    )
    layer: int | None = None
    golden: Sequence[str] = option(
        (),
        "A golden case: min, opt, odd, ragged or large; with a KV cache also prefill, decode or long-past; "
        "or sizes, such as B=2,S=33. default: the cases that suit the model",
        metavar="CASE",
    )
    calibration: str = option(
        "max",
        "With --precision int8 or fp8: how to choose the range of an activation: max, percentile or mse.",
    )
    weight_scales: str = option(
        "channel",
        "With --precision int8 or fp8: channel, one scale for each output channel of a weight, or tensor, "
        "one for all channels. tensor is less accurate, but the plugin's FP8 GEMMs are faster with it if "
        "there are few tokens.",
    )
    quantize_attention: bool = option(
        False,
        "With --precision int8 or fp8: also quantize attention: Q, K, V and the weights after the softmax.",
    )
    max_loss: float | None = option(
        None,
        "With --precision int8 or fp8: the largest relative L2 between the outputs of the quantized and the "
        "original model, both in FP64. The most sensitive GEMMs stay unquantized until the limit holds.",
        min=0.0,
        max=1e6,
    )
    data: Any | None = option(
        None,
        "With --precision int8 or fp8: your own samples for calibration and loss, in the forms that "
        "`validate` takes. default: the samples of the Deployable, else random inputs",
        metavar="FILE|FOLDER|file.py:samples",
    )
    data_limit: int = option(0, "With --data: largest number of samples. default: all", min=0, max=10**9)
    metric: Any | None = option(
        None,
        "With --precision int8 or fp8: your own metric, a function of the outputs and the sample, for the "
        "original and the quantized model.",
        metavar="file.py:function",
    )
    golden_gflop: float = option(100.0, "GFLOP limit of the large golden case.", min=0.0, max=1e9)
    golden_gib: float = option(4.0, "Memory limit of the large golden case, in GiB.", min=0.0, max=1e6)
    golden_mb: float = option(25.0, "File size limit of the large golden case, in MB.", min=0.0, max=1e6)
    device: str = option("cpu", "Device that computes the golden cases: cpu or cuda.")
    polygraphy: bool = option(False, "Also write the golden cases for `polygraphy run`.")
    overwrite: bool = option(False, "Replace an existing bundle.")


# -- Engines ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How to build."""

    backend: str | None = option(
        None,
        "tensorrt or tensorrt-rtx. default: tensorrt if it is installed and there is a GPU, else "
        "tensorrt-rtx",
    )
    name: str | None = option(None, "Name of the engine. default: the name of the backend")
    profiles: Sequence[Mapping[str, "Axis"]] = option(
        (),
        "An optimization profile, such as B=1:8:32,S=1:128:512; several go into one engine. "
        "default: the axis ranges of the model",
        "--profile",
        metavar="RANGES",
    )
    targets: str = option(
        "",
        "Compute capabilities to compile for, such as 89,120 (TensorRT-RTX). default: 8.0 and later",
        "--sm",
    )
    allow_decomposed: bool = option(False, "Allow decomposed attention where no fused kernel exists.")
    optimization_level: int | None = option(
        None, "Builder optimization level, 0 to 5. default: TensorRT's own"
    )
    workspace_mib: int | None = option(
        None, "Limit of the workspace memory, in MiB. default: TensorRT's own", min=1, max=2**24
    )
    version_compatible: bool = option(False, "Build an engine that later TensorRT versions can load.")
    hardware_compatible: str | None = option(
        None, "Hardware compatibility level: ampere-plus or same-compute-capability. default: this GPU only"
    )
    weight_streaming: bool = option(False, "Allow weights to stay in host memory.")
    refit: str | None = option(None, "Refittable weights: all or identical. default: none can be refitted")
    attention: str = option(
        "native",
        "native: TensorRT's own kernels. plugin: the plugin library (see `mha-deploy plugins`). auto: build "
        "and time both, and keep the fastest with right results.",
    )
    accumulate: str = option(
        AUTO,
        "Accumulation type of the projections. fp16: as TensorRT chooses. fp32: in the plugin library. auto: "
        "with the plugin, time both, and keep fp32 unless it takes more than 5 % longer; otherwise as "
        "TensorRT chooses.",
    )
    gqa: str | None = option(
        None,
        "How to write grouped heads as GEMMs, for TensorRT 8.6 to 10.13: auto, fold, broadcast or repeat. "
        "default: auto",
    )
    overwrite: bool = option(False, "Replace an existing engine of that name.")
    timing_cache: bool = option(True, "Reuse the kernel timings of earlier builds in this bundle.")


OF_DEPLOY = ("backend", "targets", "allow_decomposed", "attention", "accumulate")
"""The engine options that `md.deploy` takes, in addition to those of an export."""


# -- Validation and timing -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TimedOptions:
    """What is run and timed: of a validation and of a benchmark."""

    runtimes: Sequence[str] = option(
        (),
        "A runtime: the name of an engine, ort-cuda, ort-cpu, onnx-reference, eager, sdpa-cudnn … "
        "default: the graph, every engine that can run here, and the PyTorch baselines",
        "--runtime",
        metavar="NAME",
    )
    engine: str | None = option(None, "Run only this engine. default: all engines of the bundle")
    samples: int = option(200, "Samples of each timing.", min=100, max=10**6)
    kernels: bool = option(False, "List the kernels that take the time. Needs PyTorch's profiler.")
    seed: int = option(1, "Seed of the random inputs.", min=0, max=2**32 - 1)


@dataclass(frozen=True, kw_only=True)
class ValidateOptions(TimedOptions):
    """What to validate.

    `limit_s` is how long one number of clients may send requests to a server. `require_recorded_types` is
    `require_precision` as far as kernels record their types: of FP32 some do not say in what they multiply.
    """

    latency: bool | None = option(None, "Measure latency. default: on if there is a GPU")
    sweep: bool | None = option(
        None,
        "Run every optimization profile at its corners. default: on if an engine and PyTorch can run here",
    )
    probe: bool | None = option(
        None, "Also run inputs that expose wrong masks, positions and caches. default: on"
    )
    fresh: int = option(
        0,
        "Number of random cases in addition to those of the bundle. Needs PyTorch (for your own model also "
        "--trust-code), or the --source of an imported file. default: two small cases",
        min=0,
        max=10**5,
    )
    steps: int = option(
        0,
        "Decode steps in addition to those of the bundle, for a model with a KV cache. Needs PyTorch, "
        "or the --source of an imported file.",
        min=0,
        max=10**6,
    )
    prompt: int | None = option(
        None,
        "Length of the prompt before the decode steps. default: the opt value of axis S",
        min=1,
        max=2**31 - 1,
    )
    batch: int | None = option(
        None, "Batch size of the decode steps. default: the opt value of its axis", min=1, max=2**31 - 1
    )
    layers: bool = option(
        False,
        "For your own model: also judge each attention of the engines, in a second build that returns the "
        "attention results.",
    )
    conformance: bool = option(False, "Also test the mask semantics of every runtime.")
    require_fused: bool = option(False, "Fail unless every attention of the engines is fused.")
    require_precision: bool = option(False, "Fail unless all types in the engines match the graph.")
    max_loss: float | None = option(
        None,
        "Fail if the loss of a compressed model exceeds this: the relative L2 between its outputs and those "
        "of the original, both in FP64. default: the limit given at export",
        min=0.0,
        max=1e6,
    )
    require_run: bool = option(False, "Fail unless there is an engine, and every engine was run.")
    require_coverage: bool = option(
        False, "Fail unless every engine, profile and axis was run up to its maximum."
    )
    graphs: Sequence[Path] = option(
        (),
        "Judge another ONNX export of the same model in place of the bundle's own graph and engines.",
        "--graph",
        metavar="FILE.onnx",
    )
    engine_files: Sequence[Path] = option(
        (),
        "Judge a TensorRT engine of any origin, such as one from trtexec, in place of the bundle's own.",
        "--engine-file",
        metavar="FILE",
    )
    names: Sequence[str] | Mapping[str, str] = option(
        (),
        "With another graph, engine or runner: its name of an input or output, and the name in the bundle.",
        "--map",
        metavar="THEIRS=OURS",
    )
    data: Any | None = option(
        None,
        "Also judge your own samples: a .npz, .safetensors or .npy file, a folder of such files, or a "
        "function that yields dictionaries of arrays. Needs the source of the model.",
        metavar="FILE|FOLDER|file.py:samples",
    )
    metric: Any | None = option(
        None,
        "With --data: your own metric, a function of the outputs and the sample, for the original model "
        "and every runtime.",
        metavar="file.py:function",
    )
    data_limit: int = option(0, "With --data: largest number of samples. default: all", min=0, max=10**9)
    logits: Sequence[str] = option(
        (),
        "With --data: an output that holds logits: report its top-1 and top-5 agreement and KL divergence. "
        "default: outputs with logit in their name",
        metavar="OUTPUT",
    )
    source: Path | None = option(
        None,
        "With --data, --fresh or --steps: the ONNX file that the bundle was imported from. It computes the "
        "reference.",
        metavar="FILE.onnx",
    )
    resume: Path | None = option(
        None,
        "With --data: the file that keeps the results, to resume an interrupted run. "
        "default: data.jsonl next to the report",
        metavar="FILE.jsonl",
    )
    requirements: Any | None = option(
        None,
        "A TOML file of requirements on the verdict; `mha-deploy init` writes one. default: "
        "mha-deploy.toml, or [tool.mha-deploy] in pyproject.toml, in the working folder",
        metavar="FILE.toml",
    )
    url: str | None = option(
        None,
        "Validate a server instead of the runtimes of this machine: grpc://HOST:PORT or http://HOST:PORT, "
        "followed by /MODEL if the name of the model differs from that of the bundle.",
        metavar="URL",
    )
    clients: Sequence[int] = option((1, 8, 32), "With --url: numbers of concurrent clients.", metavar="N,N")
    requests: int = option(
        256,
        "With --url: requests for each number of clients, rounded up to send every case equally often.",
        min=1,
        max=10**7,
    )
    timeout_s: float = option(
        30.0,
        "With --url: seconds after which a request counts as unanswered.",
        "--timeout",
        min=0.001,
        max=86400.0,
    )
    limit_s: float = 120.0
    require_recorded_types: bool = False


_ABOUT_DATA = ("metric", "data_limit", "logits", "resume")
_OF_THIS_MACHINE = (
    "runtimes",
    "engine",
    "latency",
    "sweep",
    "layers",
    "conformance",
    "kernels",
    "graphs",
    "engine_files",
    "names",
    "require_fused",
    "require_precision",
)
OF_SERVER = ("clients", "requests", "timeout_s")
"""The options of a validation that only a server has."""


def refuse_contradictions(options: ValidateOptions, *, has_runners: bool) -> None:
    """Refuse options of a validation that ask for nothing without others, or for two things at once."""
    if options.data is None and (more := given_of(options, _ABOUT_DATA)):
        what, hint = "These options need data.", "--data with your samples, or data="
        raise DeployError(what, got=", ".join(more.values()), hint=hint, options=more)
    if options.source and options.data is None and not (options.steps or options.fresh):
        what = "The source of the model is used only with --data, --fresh or --steps."
        hint = "--data with your samples, --fresh N, or --steps N"
        raise DeployError(what, got=options.source, hint=hint)
    if options.names and options.url is None and not (options.graphs or options.engine_files or has_runners):
        what, hint = (
            "Names are mapped only for another graph, engine or runner.",
            "--graph or --engine-file; in Python also runners=",
        )
        raise DeployError(what, got=options.names, hint=hint)
    if options.url is None:
        if unused := given_of(options, OF_SERVER):
            what, hint = "These options are of a server.", "--url grpc://HOST:PORT as well, or leave them out"
            raise DeployError(what, got=", ".join(unused.values()), hint=hint, options=unused)
        return
    asked = [name for name in _OF_THIS_MACHINE if getattr(options, name)]
    local = given_of(options, asked) if asked else {}
    shown = [*local.values(), *["--data"] * (options.data is not None), *["runners"] * has_runners]
    if shown:
        what, got = "A server is judged in place of the runtimes of this machine.", ", ".join(shown)
        hint = "use one of them at a time"
        raise DeployError(what, got=f"{options.url} and {got}", hint=hint, options=local)


@dataclass(frozen=True, kw_only=True)
class BenchOptions(TimedOptions):
    """What to time."""

    at: Sequence[str] = option(
        (),
        "Sizes, such as B=8,S=128, or opt, prefill or decode. default: a sweep over batch sizes and lengths",
        metavar="SIZES",
    )
    streams: Sequence[int] = option(
        (), "Also measure calls per second on these numbers of CUDA streams, such as 1,2,4,8.", metavar="N,N"
    )


# -- Serving ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PackageOptions:
    """How a bundle is served."""

    variant: str = option(
        "python",
        "python: Triton's Python backend with a runtime of mha-deploy. tensorrt_plan: Triton's own TensorRT "
        "backend.",
    )
    runtimes: Sequence[str] = option(
        (),
        "An engine to serve, one for each kind of GPU; with the variant python also a single runtime "
        "instead: ort-cuda, ort-cpu … default: the engines that run here, else ONNX Runtime",
        "--runtime",
        metavar="NAME",
    )
    name: str | None = option(None, "Name of the model. default: the name of the bundle's model")
    max_batch: int | None = option(
        None, "Largest dynamic batch. default: the largest that every engine takes", min=1, max=2**20
    )
    instances: int = option(1, "Copies of the model on each device.", min=1, max=1024)
    queue_delay_us: int = option(
        100, "Microseconds that a request may wait for others to share its batch.", min=0, max=10**8
    )
    sequences: int = option(
        8, "Sequences that a model with a KV cache decodes at the same time.", min=1, max=2**20
    )
    allow_failed: bool = option(False, "Package a bundle whose last validation failed.")
    overwrite: bool = option(False, "Replace a packaged model of that name.")


# -- Upgrades --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What counts as a regression: growth, as a share of the old value."""

    error: float | None = option(
        None,
        "Growth of an error that counts as a regression, as a fraction of its budget; of a loss beyond its "
        "limit, as a fraction of that. default: 0.1, and 0.5 between different weights",
        "--max-error",
        min=0.0,
        max=1e9,
    )
    latency: float = option(
        0.05,
        "Growth of a p50 latency that counts as a regression, as a fraction; growth within its spread does "
        "not.",
        "--max-latency",
        min=0.0,
        max=1e9,
    )
    size: float = option(
        0.1,
        "Growth of an engine, a graph or memory that counts as a regression, as a fraction.",
        "--max-size",
        min=0.0,
        max=1e9,
    )
    build_time: float = option(
        0.5,
        "Growth of a build time that counts as a regression, as a fraction.",
        "--max-build-time",
        min=0.0,
        max=1e9,
    )
    build_seconds: float = option(
        10.0, "Smallest growth of a build time that counts, in seconds.", min=0.0, max=1e9
    )
    coverage: bool = option(
        True,
        "Fail if something is no longer measured, or only report it.",
        "--coverage/--allow-less-coverage",
    )
    strict: bool = option(False, "Fail if a latency is inconclusive because the GPU was throttled.")


# -- Errors name options as the command line does; Python has keywords ------------------------------

_OPTION = re.compile(r"(?<![\w-])--(no-)?([a-z][a-z-]*)(?: ([\w./][\w.:=/-]*(?<![.:-])))?")
_OF_PROCESS = {  # see `md.configure`
    "in-process": ("in_process", bool),
    "time-limit": ("time_limit", float),
    "trust-code": ("trust_code", bool),
}
_LAYER = re.compile(r"--hf (\S+) --layer (\d+)")
_HEADERS = ("tensorrt", "cudnn", "cudnn_frontend", "cuda")
_KEYWORDS = {  # parameters of functions; the fields of records are found by themselves
    "axis": ("axes", Mapping),
    "cache": ("cache", str),
    **{f"{name.replace('_', '-')}-include": (f"{name}_include", Path) for name in _HEADERS},
    "heads": ("heads", int),
    "input": ("inputs", Mapping),
    "jobs": ("jobs", int),
    "kv-heads": ("kv_heads", int),
    "nvcc": ("nvcc", Path),
    "repeat": ("repeat", int),
    "runtime": ("runtime", str),  # of `open_runner` and `bisect`; those of a validation are several
    "save-onnx": ("save_onnx", Path),
    "triton": ("repository", Path),
    "verify": ("verify", bool),
    "weights": ("weights", Path),
}
# A value is known by its form: a placeholder, a number, what is written like a path, or one of these words.
_PLACEHOLDER, _NUMBER, _WRITTEN = re.compile(r"[A-Z_]+"), re.compile(r"[\d.]+"), re.compile(r".*[./:=\d_]")
_VALUES = frozenset({
    "all", "auto", "cpu", "cuda", "decode", "dynamic", "eager", "identical", "mse", "native",
    "onnx-reference", "opt", "ort-cpu", "ort-cuda", "percentile", "plugin", "preallocated", "prefill",
    "python", "tensorrt", "tensorrt-rtx",
})  # fmt: skip


def in_python(text: str) -> str:
    """A text with the keywords of the Python API: `overwrite=True` for `--overwrite`.

    A command to type, such as `mha-deploy doctor`, stays as it is.
    """
    if "mha-deploy " in text:
        return text
    text = re.sub(r"(?<!\S)-o\b", "out=...", _LAYER.sub(r'md.load_checkpoint("\1", \2)', text))
    text = _OPTION.sub(_keyword, text)
    return re.sub(r"\b(\w+)=\{([^{}]*)\} \1=\{", r"\1={\2, ", text)  # one dictionary for several options


def _keyword(found: re.Match[str]) -> str:
    no, flag, value = found.groups()
    name, kind = _keywords().get(flag, (None, None))
    if name is None:
        return found[0]
    if no or kind is bool:  # these take no value: what follows is the sentence
        shown, rest = str(not no), value
    elif _is_value(kind, value):
        shown, rest = _value(kind, value), None
    else:
        shown, rest = "...", value
    keyword = f"{name}={shown}"
    if flag in _OF_PROCESS:
        keyword = f"md.configure({keyword})"
    return keyword if rest is None else f"{keyword} {rest}"


def _is_value(kind: Any, word: str | None) -> bool:
    """Whether a word behind an option of this type is its value, and not part of the sentence."""
    if word is None or kind is bool:
        return False
    if (get_origin(kind) or kind) is Mapping:
        return "=" in word
    if _PLACEHOLDER.fullmatch(word) or _NUMBER.fullmatch(word):
        return True
    return word in _VALUES or (kind not in (int, float) and bool(_WRITTEN.match(word)))


def _value(kind: Any, word: str) -> str:
    """A value of an option as Python writes it."""
    if (get_origin(kind) or kind) is Mapping:
        key, _, rest = word.partition("=")
        return f'{{"{key}": "{rest}"}}'
    item = item_of(kind)
    is_bare = _PLACEHOLDER.fullmatch(word) or (_NUMBER.fullmatch(word) and (item or kind) in (int, float))
    shown = word if is_bare else f'"{word}"'
    return shown if item is None else f"[{shown}]"


@cache
def _keywords() -> dict[str, tuple[str, Any]]:
    """The name and the type of every keyword, by its name on the command line."""
    found = {**_KEYWORDS, **_OF_PROCESS}
    for record in [each for each in globals().values() if isinstance(each, type) and is_dataclass(each)]:
        for each in fields(record):
            flag = flags_of(each)[0].removeprefix("--")
            found.setdefault(flag, (each.name, alternatives(each.type)[0]))
    return found


def _list_options(record: type) -> None:
    """Let the docstring of a record list its options, as Python's `help` shows it."""
    lines = [f"    {name}: {in_python(each.metadata['about'])}" for name, each in options_of(record).items()]
    record.__doc__ = "\n\n".join([record.__doc__ or "", "Args:\n" + "\n".join(lines)])


for _record in (ExportOptions, EngineOptions, ValidateOptions, BenchOptions, PackageOptions, Limits):
    _list_options(_record)
