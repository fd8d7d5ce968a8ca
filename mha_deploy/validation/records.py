"""What `report.json` and `bench.json` hold: records, which are also their schema and their documentation."""

from __future__ import annotations

import platform
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Struct

from mha_deploy import __version__
from mha_deploy.bundle.folder import MANIFEST, Bundle, sha256
from mha_deploy.bundle.manifest import LossRecord
from mha_deploy.engine.engine import (
    Engine,
    RebuildRecord,
    attention_summary,
    libraries_summary,
    where_built,
)
from mha_deploy.environment import RUN_PACKAGES, command_line, gpus, versions
from mha_deploy.errors import DeployError
from mha_deploy.files import as_plain, problem_in, read_json
from mha_deploy.judge import ParityReport
from mha_deploy.requirements import Requirement
from mha_deploy.runtime.cuda import find_gpu
from mha_deploy.runtime.tensorrt.engine_verdict import EngineReason, GemmTypes, NodeVerdict, PrecisionStatus
from mha_deploy.runtime.timing import KernelTime, TimingRecord
from mha_deploy.status import Finding, Gap, Outcome, Reason, means
from mha_deploy.validation.conformance import ConformanceTable
from mha_deploy.validation.data import DataRecord
from mha_deploy.validation.decode import DecodeRecord
from mha_deploy.validation.error_map import Heatmap
from mha_deploy.validation.fault import FaultReport
from mha_deploy.validation.fp16_range import RangeReport
from mha_deploy.validation.invariance import InvarianceCheck
from mha_deploy.validation.runtimes import Family, Unavailable
from mha_deploy.validation.subjects import SubjectRecord

REPORT_FILE = "report.json"
REPORT_FORMAT = 5
"""The format of report.json and bench.json; readers refuse any other."""

NOT_SENT = "not sent"
"""Among the errors of a server under load: requests that were to be sent, and were not."""


class ToolRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What wrote a file."""

    name: Annotated[str, means("`mha-deploy`")]
    version: Annotated[str, means("its version")]
    command: Annotated[
        tuple[str, ...], means("the command line that wrote it; empty if it was written from Python")
    ] = ()


class GpuRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The GPU of a machine."""

    name: Annotated[str, means("as the driver names it")]
    compute_capability: Annotated[str, means("as CUDA counts it, for example `9.0`")]
    l2_bytes: Annotated[int, means("size of the second-level cache, bytes")]
    memory_bytes: Annotated[int, means("device memory, bytes")]


class EnvironmentRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine that something ran on."""

    gpu: Annotated[GpuRecord | None, means("the GPU; null if there is none")]
    driver: Annotated[str | None, means("version of the NVIDIA driver; null if there is none")]
    platform: Annotated[str, means("operating system and processor")]
    python: Annotated[str, means("version of Python")]
    versions: Annotated[dict[str, str], means("versions of the packages that were used")]


class ModelRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The layer or module, and its bundle."""

    name: Annotated[str, means("name of the model")]
    summary: Annotated[str, means("the layer in one line")]
    kind: Annotated[
        Literal["MHA", "GQA", "MQA", "module"],
        means("how query heads share keys and values; `module` for a user's own"),
    ]
    precision: Annotated[str, means("`fp16`, `bf16` or `fp32`")]
    quantized: Annotated[
        str | None, means("`int8` or `fp8`, if its GEMMs are quantized to that; null if they are not")
    ] = None
    spec: Annotated[
        dict[str, Any], means("the layer, as in `models/*.toml`, or the module, as in the manifest")
    ]
    bundle: Annotated[str, means("name of the bundle's folder")]
    bundle_sha256: Annotated[str, means("hash of the bundle's manifest")]
    weights: Annotated[str, means("where the weights came from")]


class EngineRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine: how it computes attention, and in which precision."""

    name: Annotated[str, means("name of the engine in the bundle")]
    backend: Annotated[str, means("`tensorrt` or `tensorrt-rtx`")]
    version: Annotated[str, means("version of the TensorRT that built it")]
    precision: Annotated[str, means("the requested precision; `fp8/fp16` for a quantized graph")]
    built: Annotated[str, means("where it was built, or for which GPUs")]
    ran: Annotated[bool, means("whether it was run here")]
    why_not: Annotated[str | None, means("why it was not run; null if it was")]
    fused: Annotated[
        tuple[int, int], means("two numbers: attentions that are fused in every profile, and all attentions")
    ]
    precision_status: Annotated[
        PrecisionStatus,
        means(
            "the verdict; `selected at load`: the types of all inputs, weights and outputs are "
            "the requested ones, and the kernels are selected when the engine is loaded"
        ),
    ]
    precision_reasons: Annotated[
        tuple[EngineReason, ...], means("why the precision is mixed or unknown; empty otherwise")
    ]
    nodes: Annotated[tuple[NodeVerdict, ...], means("one for every attention node and profile")]
    seconds: Annotated[float | None, means("how long the build took, seconds; null if that is not known")]
    engine_bytes: Annotated[int | None, means("size of the plan, bytes; null if there is none")]
    profiles: Annotated[tuple[dict[str, str], ...], means("axis ranges of each profile, as `min:opt:max`")]
    attention: Annotated[
        str, means("what computes attention and projections, and the measurements behind the choice")
    ]
    plugins: Annotated[
        tuple[str, ...], means("the plugin libraries that it needs: file, version, hash and plugins")
    ]
    profile_names: Annotated[
        tuple[str, ...], means("name of each profile: its number, or `prefill` and `decode`")
    ]
    rebuilds: Annotated[
        RebuildRecord | None, means("how much it differs from build to build; null if it was built once")
    ]
    gemms: Annotated[
        GemmTypes | None, means("for a quantized graph, what became of its GEMMs; null otherwise")
    ] = None
    quantized_attentions: Annotated[
        dict[str, int], means("how many attentions are computed in eight bits, by type")
    ] = {}
    unquantized_attentions: Annotated[
        dict[str, str],
        means("parts of attentions that the graph quantizes and that run in another type, with that type"),
    ] = {}


class RooflineRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shortest possible time of one call on a GPU."""

    gpu: Annotated[str, means("the GPU whose peak figures are used")]
    bound_us: Annotated[float, means("shortest possible time of the layer, stage after stage, µs")]
    bound: Annotated[Literal["compute", "memory"], means("what dominates the bound")]
    tflops_peak: Annotated[float, means("peak rate in this precision, 10¹² FLOP/s")]
    gb_per_s_peak: Annotated[float, means("memory bandwidth, 10⁹ bytes/s")]


class LatencyRowRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of one runtime at one point, what it means, or why there is none."""

    name: Annotated[str, means("short name, the same at every point")]
    runtime: Annotated[str, means("what ran, with its version")]
    family: Annotated[Family, means("the kind of runtime")]
    refused: Annotated[str | None, means("why it was not timed; null if it was")]
    reason: Annotated[Reason | None, means("the same as data; null if it was timed")] = None
    timing: Annotated[TimingRecord | None, means("the measurement; null if it was refused")]
    speedup_over_eager: Annotated[
        float | None, means("p50 of eager divided by this p50; null if one is missing")
    ]
    speedup_over_best_pytorch: Annotated[
        float | None, means("p50 of the best PyTorch baseline divided by this p50; null as above")
    ]
    tflops: Annotated[float | None, means("10¹² FLOP/s at p50; null if it was refused")]
    gb_per_s: Annotated[
        float | None, means("10⁹ bytes/s at p50, counting the bytes of the point; null as above")
    ]
    tokens_per_s: Annotated[
        float | None,
        means("tokens/s through this layer at p50, all batch elements; null if it is not a decode step"),
    ]
    roofline_share: Annotated[float | None, means("roofline bound divided by p50; null if there is none")]
    kernels: Annotated[
        tuple[KernelTime, ...], means("the longest kernels of one call; empty if nothing was profiled")
    ]


class LatencyPointRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every runtime at one set of sizes."""

    case: Annotated[str, means("name of the case")]
    sizes: Annotated[dict[str, int], means("axis sizes")]
    past: Annotated[
        int | None,
        means("most valid entries in a preallocated KV cache before the call; null without such a cache"),
    ]
    flops: Annotated[float, means("operations of one call")]
    bytes: Annotated[float, means("bytes that one call must move")]
    roofline: Annotated[
        RooflineRecord | None, means("the roofline bound; null for a GPU without known figures")
    ]
    rows: Annotated[tuple[LatencyRowRecord, ...], means("everything that was timed or refused")]


class LatencyRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was timed, and on which GPU."""

    gpu: Annotated[str | None, means("the GPU; null if everything was refused")]
    points: Annotated[tuple[LatencyPointRecord, ...], means("one for every size that was timed")]


class ServingRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results of a server for one number of clients."""

    clients: Annotated[int, means("clients that sent requests at the same time")]
    requests: Annotated[int, means("requests that were sent, or should have been sent")]
    answered: Annotated[int, means("requests that were answered")]
    errors: Annotated[
        dict[str, int],
        means("the others by cause: `error`, `timeout`, `unreachable`, `not sent`; only those that occurred"),
    ]
    first_error: Annotated[str | None, means("the first failed request; null if none failed")]
    per_second: Annotated[float | None, means("answers per second; null if no time passed")]
    p50_ms: Annotated[
        float | None,
        means("median time from request to answer, measured by the client, ms; null without an answer"),
    ]
    p90_ms: Annotated[float | None, means("90th percentile")]
    p99_ms: Annotated[float | None, means("99th percentile")]
    judged: Annotated[int, means("outputs that were judged")]
    wrong: Annotated[int, means("outputs that were wrong")]
    runs: Annotated[
        tuple[str, ...],
        means("engines or runtime in the server, according to its configuration; empty if not stated"),
    ] = ()


class ThroughputRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls per second of one runtime at one size, or why there are none."""

    case: Annotated[str, means("name of the case")]
    sizes: Annotated[dict[str, int], means("axis sizes")]
    name: Annotated[str, means("the runtime or baseline")]
    family: Annotated[Family, means("`pytorch`, `onnxruntime` or `tensorrt`")]
    refused: Annotated[str | None, means("why there is no figure; null if there is one")] = None
    reason: Annotated[Reason | None, means("the same as data; null if there is a figure")] = None
    streams: Annotated[int | None, means("CUDA streams that were busy at the same time; null if refused")] = (
        None
    )
    per_second: Annotated[float | None, means("calls per second on all streams together")] = None
    p50_us: Annotated[float | None, means("median time between two calls of a stream, µs")] = None
    p99_us: Annotated[float | None, means("99th percentile of it, µs")] = None


class VerdictRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of a validation."""

    outcome: Annotated[
        Outcome,
        means(
            "the verdict; `not verified`: nothing failed, but an engine that was built was not "
            "run, an output shows nothing, or an attention that no output shows was not judged "
            "by its own result"
        ),
    ]
    headline: Annotated[str, means("the result in one line")]
    not_verified: Annotated[
        tuple[Gap, ...],
        means("what was not judged: engines, decode steps, attentions, probe inputs, profiles, sizes"),
    ]
    findings: Annotated[tuple[Finding, ...], means("what a reader should know")]


class ReportRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A validation: all verdicts, and what they rest on."""

    format: Annotated[int, means(f"{REPORT_FORMAT}; any other number is refused")]
    tool: Annotated[ToolRecord, means("what wrote it")]
    created: Annotated[str, means("when, in UTC, as `2026-01-31T12:00:00Z`")]
    verdict: Annotated[VerdictRecord, means("the result")]
    model: Annotated[ModelRecord, means("the layer and its bundle")]
    environment: Annotated[EnvironmentRecord, means("where it ran")]
    parity: Annotated[
        tuple[ParityReport, ...],
        means("errors against the FP64 oracle, one for every runtime and set of inputs"),
    ]
    heatmaps: Annotated[tuple[Heatmap, ...], means("where the errors are")]
    decode: Annotated[
        tuple[DecodeRecord, ...],
        means("prefill and decode steps, one for every runtime and trace; empty without a KV cache"),
    ]
    invariance: Annotated[
        tuple[InvarianceCheck, ...], means("whether results depend on what must not matter")
    ]
    runtimes: Annotated[dict[str, str], means("for every `runtime` above, its name without its version")] = {}
    conformance: Annotated[
        ConformanceTable | None, means("masks as ONNX defines them; null if it was not requested")
    ]
    range: Annotated[
        RangeReport | None, means("whether the numbers fit into FP16; null if it was not requested")
    ]
    fault: Annotated[FaultReport | None, means("what a failure comes from; null if nothing failed")]
    engines: Annotated[tuple[EngineRecord, ...], means("the engines that were built or found")]
    latency: Annotated[LatencyRecord | None, means("what was timed; null if nothing was")]
    subjects: Annotated[
        tuple[SubjectRecord, ...],
        means("what was judged in place of the bundle's own graph and engines; may be empty"),
    ]
    requirements: Annotated[
        tuple[Requirement, ...], means("numeric requirements, and what was found; may be empty")
    ]
    data: Annotated[DataRecord | None, means("the user's own samples; null if none were given")]
    loss: Annotated[
        LossRecord | None,
        means("for a compressed model: the intended difference from the original; null for others"),
    ]
    serving: Annotated[
        tuple[ServingRecord, ...],
        means("results of a server, one for every number of clients; empty without a server"),
    ]
    absent: Annotated[
        tuple[Unavailable, ...],
        means("runtimes and engines that could not be run here"),
    ] = ()
    notes: Annotated[tuple[str, ...], means("further remarks for the reader")]


class TimesRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The times of one bundle."""

    model: Annotated[ModelRecord, means("the layer and its bundle")]
    engines: Annotated[tuple[EngineRecord, ...], means("the engines that were built or found")]
    latency: Annotated[LatencyRecord | None, means("what was timed; null if nothing was")]
    throughput: Annotated[
        tuple[ThroughputRecord, ...],
        means("calls per second on several CUDA streams; empty if not requested"),
    ]
    absent: Annotated[
        tuple[Unavailable, ...],
        means("runtimes and engines that could not be timed here"),
    ] = ()


class BenchRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A benchmark of several models."""

    format: Annotated[int, means(f"{REPORT_FORMAT}; any other number is refused")]
    tool: Annotated[ToolRecord, means("what wrote it")]
    created: Annotated[str, means("when, in UTC, as `2026-01-31T12:00:00Z`")]
    environment: Annotated[EnvironmentRecord, means("where it ran")]
    models: Annotated[tuple[TimesRecord, ...], means("one for every model and precision")]


# -- What is known of a machine, a bundle and its engines ------------------------------------------


def report_header() -> dict[str, Any]:
    """What every file begins with: its format, the tool, the time, and the machine; by field of a record."""
    gpu = find_gpu()
    about = {name: getattr(gpu, name) for name in GpuRecord.__struct_fields__} if gpu is not None else None
    return {
        "format": REPORT_FORMAT,
        "tool": ToolRecord(name="mha-deploy", version=__version__, command=tuple(command_line)),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": EnvironmentRecord(
            gpu=None if about is None else GpuRecord(**about),
            driver=next((each.get("driver_version") for each in gpus()), None),
            platform=platform.platform(),
            python=platform.python_version(),
            versions=versions(RUN_PACKAGES),
        ),
    }


def model_record(bundle: Bundle) -> ModelRecord:
    """What was validated."""
    manifest = bundle.manifest
    return ModelRecord(
        name=manifest.spec.name,
        summary=manifest.spec.summary,
        kind=manifest.spec.kind,
        precision=manifest.precision.name,
        quantized=manifest.quantized,
        spec=manifest.spec.to_dict(),
        bundle=bundle.path.resolve().name,
        bundle_sha256=sha256(bundle.path / MANIFEST),
        weights=manifest.weights,
    )


def engine_records(
    engines: Sequence[Engine], ran: Collection[str] = (), why_not: Mapping[str, str] | None = None
) -> tuple[EngineRecord, ...]:
    """The engines, and which of them were run, by name; of one that was not, only what its plan shows."""
    found = []
    for name, engine in ((engine.path.stem, engine) for engine in engines):
        manifest = engine.manifest if name in ran else engine.shown
        found.append(
            EngineRecord(
                name=name,
                backend=manifest.backend,
                version=manifest.version,
                precision=manifest.verdict.precision.requested,
                built=where_built(manifest),
                ran=name in ran,
                why_not=None if name in ran else (why_not or {}).get(name, "not requested"),
                fused=manifest.fused_count,
                precision_status=manifest.verdict.precision.status,
                precision_reasons=tuple(manifest.verdict.precision.reasons),
                nodes=manifest.verdict.nodes,
                seconds=manifest.seconds,
                engine_bytes=manifest.engine_bytes,
                profiles=tuple(manifest.profiles),
                attention=attention_summary(manifest),
                plugins=tuple(libraries_summary(manifest)),
                profile_names=tuple(manifest.profile_name(index) for index in range(len(manifest.profiles))),
                rebuilds=manifest.rebuilds,
                gemms=manifest.verdict.precision.gemms,
                quantized_attentions=manifest.verdict.precision.quantized_attentions,
                unquantized_attentions=manifest.verdict.precision.unquantized_attentions,
            )
        )
    return tuple(found)


# -- Records as plain data, and back ---------------------------------------------------------------


def stored_verdict(bundle: Bundle) -> VerdictRecord | None:
    """The verdict of a bundle's report; None without one that can be read, or of another bundle."""
    try:
        report = msgspec.convert(read_json(bundle.path / REPORT_FILE), ReportRecord)
    except (OSError, ValueError, msgspec.DecodeError, RecursionError):
        return None
    is_own = report.model.bundle_sha256 == sha256(bundle.path / MANIFEST)
    return report.verdict if report.format == REPORT_FORMAT and is_own else None


def check_report(data: Any) -> list[str]:
    """What is wrong with the data of a report; nothing if it keeps the format."""
    return _problems(data, ReportRecord)


def check_bench(data: Any) -> list[str]:
    """What is wrong with the data of a benchmark; nothing if it keeps the format."""
    return _problems(data, BenchRecord)


def plain_report(data: Any) -> dict[str, Any]:
    """A report, or its data, in plain types; an error if it does not keep the format."""
    return _plain("report", data, ReportRecord)


def plain_bench(data: Any) -> dict[str, Any]:
    """A benchmark, or its data, in plain types; an error if it does not keep the format."""
    return _plain("benchmark", data, BenchRecord)


def _problems(data: Any, schema: type[Struct]) -> list[str]:
    if isinstance(data, dict) and data.get("format", REPORT_FORMAT) != REPORT_FORMAT:
        return [f"format: {data['format']!r} is not {REPORT_FORMAT}"]
    try:
        msgspec.convert(data, schema)
    except msgspec.ValidationError as error:
        problem = problem_in(error)
        return [f"{problem.place}: {problem.what}" if problem.place else problem.what]
    return []


def _plain(what: str, data: Any, schema: type[Struct]) -> dict[str, Any]:
    plain: dict[str, Any] = as_plain(data)
    if problems := _problems(plain, schema):
        what, hint = f"The {what} does not follow its format.", "docs/report.md lists every field"
        raise DeployError(what, got="; ".join(problems), hint=hint)
    return plain
