"""The verbs: each parses its options, calls the public API, and returns what to print and its verdict."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import to_builtins

from mha_deploy import api as md
from mha_deploy.cli.arguments import (
    BUNDLE,
    CONTROL,
    JSON,
    MODEL,
    Result,
    about,
    argument,
    is_quiet,
    is_verbose,
    options_from,
    parse_pairs,
    pop_model,
    result_stream,
    show,
    show_steps,
    verb,
)
from mha_deploy.cli.help import CommandGroup
from mha_deploy.errors import EXIT_VERDICT_FAILED, DeployError
from mha_deploy.files import MANIFEST, PathPart, file_name
from mha_deploy.options import (
    AUTO,
    OF_DEPLOY,
    BenchOptions,
    EngineOptions,
    ExportOptions,
    Limits,
    PackageOptions,
    ValidateOptions,
    given_of,
    option,
    options_of,
    read_options,
)
from mha_deploy.process import python_command, run
from mha_deploy.status import Kind, Outcome
from mha_deploy.text import Language, hint_for, plural, size, yes_no

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mha_deploy.bundle.folder import Bundle
    from mha_deploy.engine.engine import Engine
    from mha_deploy.regression.matrix import MatrixCell
    from mha_deploy.report.table import Table

OUT = ("-o", "--out")
LIBRARIES = "libraries"  # PyTorch and ONNX take seconds to import
LATENCY = about("Measure latency. default: on if there is a GPU")
OVERWRITE = option(False, "Also replace files that mha-deploy did not write.")
JUNIT = option(None, "Write JUnit XML.", metavar="FILE")
# Verbs that run no code that a bundle names need not trust it.
RUN = {name: each for name, each in CONTROL.items() if name != "trust_code"}
LIMIT = {"time_limit": CONTROL["time_limit"]}

# -- From a model to a bundle ----------------------------------------------------------------------


@verb(MODEL, options_of(ExportOptions), RUN)
def export(out: Path = option(MISSING, "The folder to write.", *OUT), **options: Any) -> Result:
    """Export an attention layer, your own model or an ONNX file to an ONNX bundle with fused attention."""
    files = parse_pairs(options.pop("inputs"), "--input", "input_ids=ids.npy")
    model = pop_model(options)
    with show_steps(f"export {model.name}", LIBRARIES) as on_step:
        bundle = md.export(model, out, inputs=files, on_step=on_step, **options)
    _report_removed(bundle)
    return _exported(bundle)


def _exported(bundle: Bundle) -> Result:
    from mha_deploy.cli import tables

    data, loss = {"bundle": str(bundle.path), **bundle.manifest.to_dict()}, bundle.manifest.loss
    shown = "" if loss is None else f", loss of {loss.what} {loss.worst:.2g}"
    return Result(data, lambda: [tables.bundle_renderable(bundle)], verdict=f"bundle {bundle.path}{shown}")


@verb(
    {name: each for name, each in MODEL.items() if name != "inputs"},
    options_from(
        md.prune,
        heads=about(
            "Query heads to keep in each attention, or auto: as few as --max-loss allows.", metavar="N|auto"
        ),
        kv_heads=about(
            "In place of --heads: key/value heads of each attention. The most similar heads are merged: "
            "their mean replaces them.",
            min=1,
            max=10**6,
            metavar="N",
        ),
        max_loss=about(
            "Largest relative L2 between the outputs of the two models, both in FP64.", min=0.0, max=1e6
        ),
        data=about(
            "Your own samples, in the forms that `validate` takes. default: the samples of the Deployable, "
            "else random inputs",
            metavar="FILE|FOLDER|file.py:samples",
        ),
        metric=about(
            "Your own metric, a function of the outputs and the sample, for both models.",
            metavar="file.py:function",
        ),
    ),
    options_of(ExportOptions, "data_limit", "weights", "prefix", "seed", "golden", "overwrite"),
    RUN,
)  # fmt: skip
def prune(out: Path = option(MISSING, "The folder to write.", *OUT), **options: Any) -> Result:
    """Export a model with fewer heads: the heads that matter least for your data are removed."""
    model = pop_model(options)
    with show_steps(f"prune {model.name}", LIBRARIES) as on_step:
        bundle = md.prune(model, out, on_step=on_step, **options)
    _report_removed(bundle)
    return _exported(bundle)


def _report_removed(bundle: Bundle) -> None:
    if bundle.removed:
        click.echo(f"removed with the old bundle: {', '.join(bundle.removed)}", err=True)


@verb(
    MODEL,
    options_of(
        ExportOptions, "precision", "quantize_attention", "max_loss", "data", "seed", "weights", "prefix"
    ),
    options_of(ExportOptions, "golden", "overwrite"),
    options_of(EngineOptions, *OF_DEPLOY),
    options_from(
        md.deploy,
        engine=about("Build an engine, which must be fused and in the precision of the graph."),
        latency=LATENCY,
        requirements=about("A TOML file of requirements on the verdict; see `init`.", metavar="FILE.toml"),
    ),
    RUN,
)
def deploy(
    out: Path | None = option(
        None,
        "The folder to write. default: bundles/MODEL[-CACHE]-PRECISION, CACHE where --cache differs from the "
        "spec",
        *OUT,
    ),
    candidates: bool | None = option(
        None,
        "Build several candidates, compare their error, latency and fusion, and keep the best. With "
        "--precision auto: FP16, BF16, FP16 with FP32 where it overflows, and the plugin's accumulation "
        "types. With int8 or fp8: 16 bits, both kinds of scales, and attention in eight bits. default: on "
        "if --precision auto is given and there is a GPU",
    ),
    json: bool = JSON,
    **options: Any,
) -> Result:
    """Export a model, build an engine, and validate it against the FP64 oracle and PyTorch."""
    from mha_deploy.cli import tables

    named, cache = options["model"], options["cache"]
    files = parse_pairs(options.pop("inputs"), "--input", "input_ids=ids.npy")
    model, reached = pop_model(options), list[Any]()
    target = out or _default_folder(model, named, cache, options["precision"])
    options |= {"candidates": candidates, "inputs": files, "on_result": reached.append}
    try:
        with show_steps(f"deploy {model.name}", LIBRARIES) as on_step:
            done = md.deploy(model, target, on_step=on_step, **options)
    except DeployError:
        if reached:  # the bundle is written and its graph may be verified: print that first
            _report_removed(reached[0])
            runs = [to_builtins(run) for graph in reached[1:2] for run in graph.parity]
            verified = map(tables.parity_renderable, runs)
            show(*([] if json else [tables.bundle_renderable(reached[0]), *verified]))
        raise
    _report_removed(done.bundle)
    data: dict[str, Any] = {"bundle": str(done.bundle.path), "validation": done.report.to_dict()}
    data["engine"] = None if done.engine is None else engine_to_dict(done.engine)
    if done.chosen is not None:
        data["candidates"] = [vars(trial) for trial in done.candidates]
        data["chosen"] = {"name": done.chosen.name, "why": done.why}

    def lines() -> Iterator[RenderableType]:
        yield verdict
        if done.engine and not (done.engine.manifest.all_fused or options["allow_decomposed"]):
            is_any = bool(done.engine.manifest.verdict.nodes)
            what = "attention that is not fused: slower" if is_any else "a model without attention"
            yield f"try: --allow-decomposed takes {what}"
        if (tried := done.candidates_table()) is not None and done.chosen is not None:
            yield from (tables.render(tried), f"chosen: {done.chosen.name}: {done.why}")
        yield tables.bundle_renderable(done.bundle)
        if done.engine is not None:
            yield tables.engine_renderable(done.engine)
        yield tables.report_renderable(found, verbose=is_verbose(), headed=False)

    found = done.report.to_dict()
    save, verdict = partial(done.report.save, done.bundle.path), tables.verdict_renderable(found)
    return Result(data, lines, done.report.outcome, save, verdict)


def _default_folder(model: md.Model, named: str, cache: str | None, precision: str) -> Path:
    """The folder of a bundle: its model, its KV cache where that is not the spec's own, its precision."""
    name, chosen = model.name, "" if cache is None else getattr(model.source, "cache", "")
    if chosen and chosen != (getattr(md.load_model(named).source, "cache", "") if named else "none"):
        name += f"-{chosen.replace('none', 'uncached')}"
    # A catalog layer has no weights of its own that could overflow: `auto` is FP16 there.
    written = "fp16" if precision == AUTO and model.is_layer else precision
    return Path("bundles") / PathPart(f"{name}-{written}", "a model")


# -- Graphs, engines and serving -------------------------------------------------------------------


@verb(
    options_from(
        md.fuse_file,
        overwrite=about("Replace existing files."),
        verify=about(
            "Compare every new node with the nodes that it replaces, on random inputs; keep it only if the "
            "results agree."
        ),
    ),
    LIMIT,
)
def fuse(
    source: Path = argument("IN.onnx", "An ONNX file, of opset 7 or newer."),
    output: Path = option(MISSING, "The file to write.", *OUT, "--output", metavar="OUT.onnx"),
    **options: Any,
) -> Result:
    """Rewrite the attention of an ONNX file as Attention nodes; list what is not fused, and why."""
    from mha_deploy.cli import tables

    report = md.fuse_file(source, output, **options)
    data = {"file": str(output), **report.to_dict()}
    return Result(
        data,
        lambda: [tables.fuse_renderable(report), f"wrote {output}"],
        verdict=tables.fuse_verdict(report),
        outcome=Outcome.passing(report.complete),
    )


@verb(
    options_from(
        md.check,
        target=about("tensorrt or tensorrt-rtx."),
        version=about(
            "Version of the target, such as 8.6 or 10.14. default: the newest known", metavar="X.Y"
        ),
        sm=about("Compute capabilities of the GPUs, such as 9.0 or 89,120. default: any", metavar="X.Y,X.Y"),
    )
)
def check(bundle: Path = argument("BUNDLE", "The bundle, or an .onnx file."), **options: Any) -> Result:
    """Report for every attention node whether a target supports and fuses it, and if not, why."""
    from mha_deploy.cli import tables

    answers, data = md.check(bundle, **options), []
    for answer in answers:
        verdicts = ("supported", "fused", "supported_after_lowering", "fused_after_lowering")
        found = {name: getattr(answer, name) for name in verdicts}
        findings = [asdict(finding) for finding in answer.findings]
        data.append({"node": answer.node.name, "target": str(answer.target), **found, "findings": findings})
    passed = all(answer.fused_after_lowering for answer in answers)
    verdict = tables.eligibility_renderable(answers, brief=True)
    return Result(
        data,
        lambda: [tables.eligibility_renderable(answers)],
        outcome=Outcome.passing(passed),
        verdict=verdict,
    )


@verb(
    options_of(EngineOptions),
    options_from(
        md.build_engine,
        repeat=about(
            "Number of builds. If there are several, each starts without kernel timings, and the differences "
            "are reported: kernels, sizes, and on a GPU errors and latencies. The last engine is kept.",
            min=1,
            max=1000,
        ),
        save_onnx=about(
            "Also write the lowered graph that TensorRT parses; large weights go into a second file next to "
            "it.",
            metavar="FILE.onnx",
        ),
    ),
    RUN,
)
def build_engine(
    bundle: Path = BUNDLE,
    require_fused: bool = option(False, "Exit with 1 unless every attention is fused."),
    require_precision: bool = option(False, "Exit with 1 unless all types in the engine match the graph."),
    trtexec: bool = option(False, "Print the trtexec command that builds the same engine."),
    **options: Any,
) -> Result:
    """Build a TensorRT engine from a bundle, and verify that it is fused and in the requested precision."""
    from mha_deploy.cli import tables

    opened = md.open_bundle(bundle)
    with show_steps(f"build {opened.manifest.spec.name}") as on_step:
        engine = md.build_engine(opened, on_step=on_step, trtexec=trtexec, **options)
    manifest = engine.manifest
    in_precision = manifest.has_requested_types or not require_precision
    outcome = Outcome.passing((manifest.all_fused or not require_fused) and in_precision)
    data, lines = engine_to_dict(engine), [tables.engine_renderable(engine)]
    lines += [f"lowered graph: {options['save_onnx']}"] if options["save_onnx"] else []
    if not in_precision and manifest.verdict.precision.is_fp32_as_recorded:
        lines.append(f"try: {hint_for(Kind.TYPE_NOT_RECORDED, Language.COMMAND_LINE)}")
    if trtexec:
        graph = options["save_onnx"] or "lowered.onnx"
        data["trtexec"] = command = md.trtexec(engine, graph, engine.path.name)
        unwritten = [] if options["save_onnx"] else [f"--save-onnx {graph} writes the graph that it reads"]
        lines += [command, *(f"note: {each}" for each in (*command.notes, *unwritten))]
    return Result(data, lambda: lines, outcome, verdict=tables.engine_verdict_renderable(manifest))


@verb(
    options_from(
        md.refit,
        weights=about(
            "The new weights, in the forms that `export` takes; for the bundle of an ONNX file, another "
            "ONNX file."
        ),
        latency=LATENCY,
    ),
    options_of(ExportOptions, "prefix", "overwrite"),
    CONTROL,
)
def refit(
    engine: Path = argument("ENGINE", "An engine in its bundle that was built with --refit all."),
    out: Path = option(MISSING, "The folder of the new bundle.", *OUT),
    **options: Any,
) -> Result:
    """Put new weights into an engine without a rebuild, and validate it against their FP64 reference."""
    from mha_deploy.cli import tables

    with show_steps(f"refit {engine.name}", LIBRARIES) as on_step:
        done = md.refit(engine, options.pop("weights"), out, on_step=on_step, **options)
    found = done.report.to_dict()
    data: dict[str, Any] = {"bundle": str(done.bundle.path), "validation": found}
    data["engine"] = None if done.engine is None else engine_to_dict(done.engine)
    verdict = tables.verdict_renderable(found)

    def lines() -> Iterator[RenderableType]:
        yield verdict
        yield tables.bundle_renderable(done.bundle)
        yield tables.report_renderable(found, verbose=is_verbose(), headed=False)

    save = partial(done.report.save, done.bundle.path)
    return Result(data, lines, done.report.outcome, save, verdict)


def engine_to_dict(engine: Engine) -> dict[str, Any]:
    """An engine's manifest for machines."""
    return {"engine": str(engine.path), **to_builtins(engine.shown)}


@verb(options_of(PackageOptions))
def package(
    bundle: Path = BUNDLE,
    triton: Path = option(
        MISSING, "The model repository to write or extend.", "-o", "--triton", metavar="REPOSITORY"
    ),
    **options: Any,
) -> Result:
    """Write a bundle into a Triton model repository."""
    found = md.package(bundle, triton, **options)
    what = "sequences at a time: up to" if found.decodes else "batches up to"
    batch = f"{what} {found.max_batch}" if found.max_batch else "no batching"
    batch += f" ({found.unbatched})" if found.unbatched else ""
    lines = [f"{found.path}: {found.variant}, run by {', '.join(found.runtimes)}, {batch}"]
    lines += [f"  {file}" for file in found.files]
    if found.validated is None:
        lines.append(f"note: the bundle has no report: mha-deploy validate {shlex.quote(str(bundle))}")
    elif found.validated is Outcome.FAILED:
        lines.append("warning: the bundle failed its last validation")
    for name, why in found.left_out.items():
        lines.append(f"note: engine {name} is not in it, since {why}; --runtime {name} packages it")
    if triton.absolute().name == "triton":
        lines.append(
            "note: Python scripts that are started beside a folder `triton` take it for the package of that "
            "name, which PyTorch imports; a safer one is `models`"
        )
    lines.append(f"start: {found.path / 'README.md'} has the commands, with Docker and without")
    data = {**vars(found), "path": str(found.path)}
    return Result(data, lambda: lines, verdict=lines[0])


plugins = CommandGroup(
    "plugins",
    help="Build the plugin library of fused attention for TensorRT, and list the libraries on this machine.",
    no_args_is_help=True,
)


@plugins.add
@verb(
    options_from(
        md.find_plugin_parts,
        tensorrt_include=about("Folder of TensorRT's headers. default: searched for"),
        cudnn_include=about("Folder of cuDNN's headers. default: searched for"),
        cudnn_frontend_include=about("Folder of cudnn-frontend's headers. default: searched for"),
        cuda_include=about("Folder of CUDA's headers. default: searched for"),
        nvcc=about("The CUDA compiler. default: searched for"),
    ),
    options_from(
        md.build_plugins,
        architectures=about(
            "GPU architectures to compile for, such as 80,90. default: those that nvcc supports", "--arch"
        ),
        out=about("Folder to write. default: $MHA_DEPLOY_PLUGINS, or the cache folder"),
    ),
)
def build(json: bool = JSON, **options: Any) -> Result:
    """Compile the plugin library against the TensorRT headers of this machine."""
    from mha_deploy.cli import tables

    how = {name: options.pop(name) for name in ("architectures", "out")}
    parts = md.find_plugin_parts(**options)
    if not json:
        show(tables.parts_renderable(parts))
    with show_steps("build the plugin library") as on_step:
        made = md.build_plugins(parts, on_step=on_step, **how)
    found = {
        each.part.key: {"paths": list(map(str, each.paths)), "by": each.by, "version": each.version}
        for each in parts
    }
    library, lines = made.library and made.library.to_dict(), [f"built {made.path}"]
    if library is None:
        lines.append("The library is for another platform than this machine, and was not loaded here.")
    return Result({"path": str(made.path), "found": found, "library": library}, lambda: lines)


@plugins.add
@verb()
def list_() -> Result:
    """List the plugin libraries of this machine, and which of them fits the installed TensorRT."""
    found = md.plugins()
    lines = []
    if not found["libraries"]:
        lines = [f"no plugin library in {', '.join(found['places'])}", "build one: mha-deploy plugins build"]
    for library in found["libraries"]:
        lines.append(library["path"])
        if library["problem"]:
            lines.append(f"  cannot be used: {library['problem']}")
            continue
        fits = "fits" if library["fits"] else "does not fit"
        here = library["tensorrt_here"]
        fits = f"{fits} TensorRT {here} here" if here else "TensorRT is not installed here"
        names = ", ".join(f"{each['name']} {each['version']}" for each in library["plugins"])
        gpus, frontend = ", ".join(library["architectures"]), library["cudnn_frontend"]
        lines += [
            f"  version {library['version']}, sha256 {library['sha256'][:16]}",
            f"  for TensorRT {library['tensorrt']} ({library['interface']}); {fits}",
            f"  plugins {names}",
            f"  GPU architectures {gpus}; cudnn-frontend {frontend}",
        ]
    return Result(found, lambda: lines)


@plugins.add
@verb()
def where(backend: str = option("tensorrt", "Which TensorRT: tensorrt or tensorrt-rtx.")) -> Result:
    """Print the path of the plugin library that would be loaded. Exit with 1 if there is none."""
    from mha_deploy.engine.plugins import PluginError

    try:
        path = str(md.find_plugin(backend).path)
    except PluginError as error:
        click.echo(f"error: {error}", err=True)
        raise click.exceptions.Exit(EXIT_VERDICT_FAILED) from error
    return Result({"path": path}, lambda: [path])


# -- Verdicts and times ----------------------------------------------------------------------------


@verb(options_of(ValidateOptions), CONTROL)
def validate(
    bundle: Path = BUNDLE,
    out: Path | None = option(
        None,
        "Folder of report.json and report.html. default: the bundle; with --graph, --engine-file or "
        "--url: reports/NAME in the bundle",
        *OUT,
    ),
    report: bool = option(True, "Write the report."),
    junit: Path | None = JUNIT,
    self_test: bool = option(False, "Only mutate the graph, and check that each mutation is detected."),
    overwrite: bool = OVERWRITE,
    **options: Any,
) -> Result:
    """Judge the graph and engines of a bundle against the FP64 oracle, and time them against PyTorch."""
    from mha_deploy.cli import tables

    asked = {f"--{name}": options[name] or None for name in ("steps", "prompt", "batch")}
    got = " ".join(f"{name} {number}" for name, number in asked.items() if number is not None)
    if self_test:
        _refuse_unused_by_self_test(read_options(ValidateOptions, options))
        if out is not None or junit is not None or overwrite:
            files = [f"-o {out}"] * (out is not None) + [f"--junit {junit}"] * (junit is not None)
            got = " ".join([*files, *["--overwrite"] * overwrite])
            raise DeployError(
                "The self-test writes no report.", got=got, hint="leave them out, or --self-test"
            )
    if got and not options["steps"]:
        problem = "--prompt and --batch have no effect without --steps."
        raise DeployError(problem, got=got, hint="add --steps 64")
    options["names"] = parse_pairs(options["names"], "--map", "theirs=ours")
    if options["steps"]:
        md.refuse_steps(bundle, options["steps"], options["prompt"], options["batch"])
    opened = md.open_bundle(bundle)
    name = opened.manifest.spec.name
    if self_test:
        with show_steps(f"self-test {name}", LIBRARIES) as on_step:
            tested = md.self_test(opened, next(iter(options["runtimes"]), None), on_step=on_step)

        return Result(
            to_builtins(tested),
            lambda: [tables.self_test_renderable(tested)],
            outcome=tested.outcome,
            verdict=tables.self_test_verdict(tested),
        )
    folder = out or opened.path / _place_of_report(options)
    if report:
        md.refuse_outputs(folder, "report", overwrite=overwrite)
    if junit is not None:
        md.refuse_junit(junit, overwrite=overwrite)
    if report and options["data"] is not None and options["resume"] is None:
        options["resume"] = folder / "data.jsonl"
    with show_steps(f"validate {name}", LIBRARIES) as on_step:
        result = md.validate(opened, on_step=on_step, **options)

    def save() -> Path | None:
        if junit is not None:
            result.save_junit(junit, overwrite=overwrite)
        return result.save(folder, overwrite=overwrite) if report else None

    data = result.to_dict()
    return Result(
        data,
        lambda: [tables.report_renderable(data, verbose=is_verbose(), folder=folder if report else None)],
        outcome=result.outcome,
        save=save,
        verdict=tables.verdict_renderable(data),
    )


def _refuse_unused_by_self_test(options: ValidateOptions) -> None:
    """Refuse options that the self-test does not use: all of a validation but one CPU runtime."""
    names = [name for name in options_of(ValidateOptions) if name != "runtimes"]
    given = given_of(options, names)
    if unused := [*given.values(), *(f"--runtime {name}" for name in options.runtimes[1:])]:
        what = (
            "The self-test only mutates the graph, on the cases of the bundle: it does not use these options."
        )
        hint = "leave them out, or --self-test: use one of them at a time"
        raise DeployError(what, got=f"--self-test {', '.join(unused)}", hint=hint, options=given)


def _place_of_report(options: Mapping[str, Any]) -> Path:
    """Where in a bundle the report of a validation belongs: that of others is never over the bundle's own."""
    named = [path.stem for path in (*options["graphs"], *options["engine_files"])]
    named += [] if options["url"] is None else [options["url"].partition("://")[2]]
    return Path("reports", file_name("+".join(named))) if named else Path()


@verb(
    options_from(
        md.bisect,
        runtime=about(
            "A runtime, or the name of an engine. default: the first engine that runs here, else a CPU "
            "runtime"
        ),
        graph=about(
            "Look into another ONNX export of the same model, in place of the bundle's graph. Its values are "
            "matched by their numbers, whatever their names are. The runtime is then one of graphs, by "
            "default on the CPU.",
            metavar="FILE.onnx",
        ),
    )
    | options_of(ValidateOptions, "names"),
    CONTROL,
)
def bisect(bundle: Path = BUNDLE, **options: Any) -> Result:
    """Find the first attention, and then the first node, at which an engine or runtime deviates."""
    from mha_deploy.cli import tables

    options["names"] = parse_pairs(options["names"], "--map", "theirs=ours")
    opened = md.open_bundle(bundle)
    with show_steps(f"bisect {opened.manifest.spec.name}", LIBRARIES) as on_step:
        found = md.bisect(opened, on_step=on_step, **options)

    return Result(
        to_builtins(found),
        lambda: [tables.bisection_renderable(found, verbose=is_verbose())],
        outcome=found.outcome,
    )


@verb(options_of(BenchOptions), CONTROL)
def bench(
    bundles: Sequence[Path] = argument("BUNDLE", "One or more bundles, with engines.", ()),
    out: Path | None = option(None, "Folder of bench.json and bench.html. default: the first bundle", *OUT),
    markdown: bool = option(False, "Print a Markdown table to stdout."),
    record: Path | None = option(
        None,
        "Append every measurement to this file as a line of JSON: samples, hashes, conditions.",
        metavar="FILE",
    ),
    processes: int = option(
        1, "Measure in this many processes, one after the other. Needs --record.", min=1, max=1000
    ),
    replay: str | None = option(
        None,
        "Repeat the measurement of a line of a record, and exit with 1 unless both agree. BUNDLE defaults to "
        "the folder that was recorded.",
        metavar="FILE:LINE",
    ),
    overwrite: bool = OVERWRITE,
    json: bool = JSON,
    **options: Any,
) -> Result | None:
    """Time engines, ONNX Runtime and the PyTorch baselines side by side, on an NVIDIA GPU."""
    from mha_deploy.cli import tables

    if replay is not None:
        return _replay(replay, bundles[0] if bundles else None)
    if not bundles:
        raise DeployError("A bundle is needed.", hint="mha-deploy bench BUNDLE, or --replay FILE:LINE")
    if processes > 1:
        _run_in_processes(processes, record)
        return None
    # A wrong folder is reported before anything is read; `md.bench` looks for a GPU before it hashes.
    names = {path: md.open_bundle(path, verify=False).manifest.spec.name for path in bundles}
    folder = out or bundles[0]
    md.refuse_outputs(folder, "bench", record=record, overwrite=overwrite)
    report = md.BenchReport(())
    for path, name in names.items():
        with show_steps(f"bench {name}") as on_step:
            timed = md.bench(path, on_step=on_step, **options)
        # Written after every model: a later one may fail, and what was measured must not get lost.
        report = md.BenchReport([*report.records, timed])
        if not json and not markdown:
            show(name, tables.bench_renderable(report.to_dict()["models"][-1]))
        page = report.save(folder, overwrite=overwrite)
        if record is not None:
            md.BenchReport([timed]).record(record)
    table = [report.to_markdown()] if markdown else []
    return Result(report.to_dict(), lambda: table, outcome=report.outcome, save=lambda: page)


def _replay(line: str, bundle: Path | None) -> Result:
    """Measure a line of a record again; what is installed may be another version than then."""
    found = md.replay(line, bundle)
    recorded, now = found.recorded, found.measured.versions
    lines = [f"{recorded.model} {recorded.precision}, {recorded.runtime}: {found.status}: {found.why}"]
    for name, version in now.items():
        if (old := recorded.versions.get(name, "none")) != version:
            lines.append(f"{name}: {old} then, {version} now")
    return Result({"status": found.status, "why": found.why}, lambda: lines, outcome=found.outcome)


def _run_in_processes(processes: int, record: Path | None) -> None:
    """Run this command again in fresh processes: clocks, caches and tactics start anew in each."""
    if record is None:
        problem = "Several processes need a file to write to."
        raise DeployError(problem, got="--processes", hint="--record FILE")
    arguments = [*sys.argv[1:], "--processes", "1"]  # the last one counts
    for _ in range(processes):
        done = run(python_command(*arguments, module="mha_deploy"), stdout=_descriptor(result_stream()))
        if done.returncode:
            raise click.exceptions.Exit(done.returncode)


def _descriptor(stream: Any) -> int | None:
    try:
        return int(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return None


# -- Upgrades --------------------------------------------------------------------------------------


@verb(options_of(Limits))
def compare(
    old: str = argument(
        "OLD", "The old result: a report.json, bench.json or matrix.json, a bundle, or an .engine file."
    ),
    new: str = argument(
        "NEW", "The new result, of the same kind. matrix.json#NAME is one runtime of a matrix."
    ),
    everything: bool = option(
        False, "Also list what did not change, and all differences between two models.", "--all"
    ),
    markdown: bool = option(False, "Print Markdown for a pull request to stdout."),
    junit: Path | None = JUNIT,
    html: Path | None = option(None, "Write an HTML page with both sides.", metavar="FILE"),
    overwrite: bool = OVERWRITE,
    **limits: Any,
) -> Result:
    """Compare two reports, bundles or engines, and fail if something got worse."""
    found = md.compare(old, new, **limits)
    found.save_files(html=html, junit=junit, overwrite=overwrite)

    more = ["The models differ: what else changed says little; --all lists it."]
    reasons = more if found.unlike and not everything else ()
    shown = partial(_table_or_markdown, markdown, found, found.table(everything=everything), *reasons)
    return Result(found.to_dict(), shown, outcome=found.outcome, verdict=_verdict(found, markdown))


def _table_or_markdown(markdown: bool, found: Any, table: Table, *reasons: str) -> list[RenderableType]:
    """A comparison or a matrix as Markdown, or the verdict with a table and reasons."""
    from mha_deploy.cli import tables

    if markdown:
        return [found.to_markdown()]
    return [tables.head(found.outcome, found.headline), tables.render(table), *reasons]


@verb(
    options_from(
        md.matrix,
        out=about("Folder of bundles and results. A second run computes only what is missing there.", *OUT),
        jobs=about(
            "Run this many local processes at a time, instead of Ray. default: Ray, or 1 if it is not "
            "installed",
            min=1,
            max=4096,
        ),
        address=about("Address of a Ray cluster. default: Ray on this machine"),
    )
)
def matrix(
    plan: Path = argument("PLAN", "The plan, a TOML file; see docs/matrix.md."),
    markdown: bool = option(False, "Print the heat map as Markdown to stdout."),
    record: Path | None = option(
        None, "Append a line to this file for every engine that was built but not run.", metavar="FILE"
    ),
    overwrite: bool = OVERWRITE,
    **options: Any,
) -> Result:
    """Build and judge every combination of the models, precisions, runtimes, GPUs and options in a plan."""
    md.refuse_outputs(options["out"], "matrix", record=record, overwrite=overwrite)
    with _show_cells(f"matrix {plan.name}") as (on_cell, on_step):
        found = md.matrix(plan, on_cell=on_cell, on_step=on_step, **options)
    page = found.save(options["out"], overwrite=overwrite)
    if record is not None:
        found.record(record)

    reasons = [": ".join(reason) for reason in found.reasons()]
    shown = partial(_table_or_markdown, markdown, found, found.tables()[0], *reasons)
    return Result(
        found.to_dict(), shown, outcome=found.outcome, save=lambda: page, verdict=_verdict(found, markdown)
    )


def _verdict(found: Any, markdown: bool) -> RenderableType | None:
    """The verdict of a comparison or a matrix for `--quiet`; Markdown that was asked for is printed whole."""
    from mha_deploy.cli import tables

    return None if markdown else tables.head(found.outcome, found.headline)


@contextmanager
def _show_cells(
    title: str,
) -> Iterator[tuple[Callable[[MatrixCell, int, int], None] | None, md.OnStep | None]]:
    """Show steps and cells: a live table on a terminal, elsewhere a line for each."""
    if is_quiet():
        yield None, None
        return
    from rich.console import Console
    from rich.live import Live

    from mha_deploy.cli import tables

    console = Console(stderr=True)
    cells: list[MatrixCell] = []
    live = Live(console=console, transient=True, refresh_per_second=4) if console.is_terminal else None

    def show_cell(cell: MatrixCell, done: int, total: int) -> None:
        cells.append(cell)
        if live is not None:
            live.update(tables.cells_renderable(cells[-console.height + 6 :], f"{done} of {total} cells"))
            return
        again = "" if cell.is_new else ", from an earlier run"
        line = f"{done}/{total} {cell.title}: {cell.summary}{again}"
        console.print(line, highlight=False, markup=False)

    def show_step(name: str, *_: int) -> None:
        if live is not None:
            live.update(tables.cells_renderable(cells[-console.height + 6 :], name))
        else:
            line = f"{title}: {name} ({time.monotonic() - started:.1f} s)"
            console.print(line, highlight=False, markup=False)

    started = time.monotonic()
    with live or nullcontext():
        yield show_cell, show_step


# -- What is known without running anything --------------------------------------------------------


@verb(
    options_from(
        md.inspect,
        verify=about(
            "Also compare the manifest of a bundle with its graph, as all other commands do. This takes a "
            "second, since it loads ONNX."
        ),
    )
)
def inspect(
    path: Path = argument(
        "PATH", "A bundle, an .engine file, an .onnx file, or a TensorRT plan of any origin."
    ),
    **options: Any,
) -> Result:
    """Show what is in a bundle, an engine or an ONNX file, and check its hashes."""
    from mha_deploy.cli import tables

    found = md.inspect(path, **options)
    if found.bundle is not None:
        graph = "matches" if found.verified else "not compared"
        data = {"bundle": str(path), "hashes": "match", "graph": graph} | found.bundle.manifest.to_dict()
    elif found.engines:
        here = {"misfits": list(found.misfits), "shown": found.engines[0].is_confirmed}
        data = engine_to_dict(found.engines[0]) | here
    elif found.plan is not None:
        data = {"file": str(path), "plan": asdict(found.plan)}
    else:
        data = {"file": str(path), "attention": list(found.attention), "foreign": list(found.foreign)}
        data |= {"fusible": list(found.fusible), "unfused": [asdict(each) for each in found.unfused]}
        tensors = {"inputs": found.inputs, "outputs": found.outputs}
        data |= {name: [asdict(each) for each in those] for name, those in tensors.items()}
        data["opset"] = found.opset

    def lines() -> Iterator[RenderableType]:
        if found.bundle is not None:
            yield tables.bundle_renderable(found.bundle, details=True)
            for engine in found.engines:
                manifest = engine.shown
                fused = manifest.fusion_summary + ("" if engine.is_confirmed else " (not verified)")
                yield f"engine {engine.path}: {manifest.backend} {manifest.version}, {fused}"
            if not found.verified:
                yield "The hashes match. The manifest was not compared with the graph: --verify does that."
        elif found.engines:
            yield tables.engine_renderable(found.engines[0], details=True)
            why = "; ".join(found.misfits)
            yield f"It cannot run on this machine: {why}." if why else "It can run on this machine."
            if not found.engines[0].is_confirmed:
                yield "Fusion and precision are not verified: only TensorRT can read this plan, on its GPU."
        elif (plan := found.plan) is not None:
            yield f"{path}: a plan of {plan.backend}, {size(plan.bytes)}, without a manifest of mha-deploy"
            named = f"{plural(len(plan.attention_kernels), 'kernel')} of a whole attention, "
            named += f"{plural(len(plan.softmax_kernels), 'kernel')} of a softmax by itself"
            yield f"It names {plural(plan.kernels, 'kernel')}: {named}." if plan.kernels else _UNNAMED
            yield "Its model, its precision and whether its outputs are right are not known."
            yield f"to judge it, on its GPU: mha-deploy validate BUNDLE --engine-file {path}"
        else:
            yield tables.tensors_renderable(found)
            yield tables.attention_renderable(found.attention)
            if found.fusible:
                count = plural(len(found.fusible), "attention")
                yield f"{count} not fused yet: {', '.join(found.fusible)}"
                yield f"to fuse what can be fused: mha-deploy fuse {path} -o fused.onnx"
            for left in found.unfused:
                yield f"{left.name} cannot be fused: {left.reason}"
            if found.foreign:
                yield f"No engine can be built from it: {', '.join(found.foreign)} are not ONNX operators."

    return Result(data, lines)


_UNNAMED = "It names no kernels: TensorRT's own inspector may, on its GPU."


@verb()
def models(every: bool = option(False, "Include small layers for tests.", "--all")) -> Result:
    """List the catalog of layers with their heads, parameters and KV-cache bytes per token."""
    from mha_deploy.cli import tables

    rows = [tables.model_row(spec) for spec in md.models(tiny=every)]
    return Result(rows, lambda: [tables.models_renderable(rows, verbose=is_verbose())])


@verb(
    {name: MODEL[name] for name in ("hf", "layer", "axis")},
    options_of(ExportOptions, "weights", "prefix", "seed"),
    options_from(
        md.analyze,
        gpu=about(
            "GPU whose peak figures are used: h200, h100, a100, b200, b300, gb200, l4, l40s, a10, rtx-4090, "
            "rtx-5090, rtx-pro-6000, orin or thor.",
            metavar="GPU",
        ),
        peak=about(
            "Peak figures of another GPU instead: dense TFLOPS in this precision and memory bandwidth, such "
            "as 362:864.",
            metavar="TFLOPS:GB/s",
        ),
        precision=about("Precision of weights and activations: fp16, bf16 or fp32."),
        at=about(
            "Sizes, such as B=1,S=2048; for a layer with a KV cache also prefill or decode. default: the "
            "optimum of every axis; with a KV cache, the decode step",
            metavar="SIZES",
        ),
    ),
    options_from(
        md.compare_heads,
        attention=about("The attention of your own model whose heads are compared. default: the first"),
        inputs=about(
            "An .npz file of inputs on which to compare the heads of a catalog layer. default: random inputs"
        ),
    ),
)
def analyze(
    model: str = argument(
        "MODEL", f"{MODEL['model'].metadata['about']} Can also be the folder of a bundle.", ""
    ),
    data: str | None = option(
        None,
        "Propose optimization profiles from the sizes of your samples, in the forms that `validate` takes.",
        metavar="FILE|FOLDER|file.py:samples",
    ),
    heads: Path | None = option(
        None,
        "Also compare the heads, and write a heatmap to this PNG file. Needs PyTorch.",
    ),
    overwrite: bool = OVERWRITE,
    **options: Any,
) -> Result:
    """Count parameters, FLOPs and bytes per stage, and the roofline bound. Nothing is run without --heads."""
    from mha_deploy.cli import tables

    options["model"] = model
    of_heads = ["inputs", "weights", "attention", "seed", *(["prefix"] if options["hf"] is None else [])]
    if heads is None and (unused := [f"--{name} {options[name]}" for name in of_heads if options[name]]):
        problem, hint = "Without --heads, nothing is run.", "add --heads FILE.png, or leave them out"
        raise DeployError(problem, got=", ".join(unused), hint=hint)
    given = [options["hf"], options["inputs"], options["weights"], options["model"].rpartition(":")[0]]
    sources = [options["model"], *filter(None, given)]
    if heads is not None:
        md.refuse_image(heads, overwrite=overwrite, inputs=sources)
    found_model: Any = None
    if (Path(model) / MANIFEST).is_file():
        found_model = md.open_bundle(model)
        name, is_layer = found_model.manifest.spec.name, found_model.manifest.spec.kind != "module"
        of_model = {key: options.pop(key) for key in ("hf", "layer", "axis")}
        if unused := [f"--{key}" for key, value in of_model.items() if value]:
            what, hint = "A bundle has its own weights and axes.", "leave them out, or name the model"
            raise DeployError(what, got=", ".join(unused), hint=hint)
        del options["model"]
    else:
        found_model = pop_model(options)
        name, is_layer = found_model.name, found_model.is_layer
    figures = {name: options.pop(name) for name in ("gpu", "peak", "precision")}
    analysis = similarity = proposed = None
    if is_layer or heads is None:
        analysis = md.analyze(found_model, **figures, at=options["at"])
    found = {} if analysis is None else analysis.to_dict()
    if data is not None:
        proposed = md.propose_profiles(found_model, data, **figures)
        found["profiles"] = proposed.to_dict()
    if heads is not None:
        similarity = md.compare_heads(found_model, **options)
        at = f" {similarity.attention}" if similarity.attention else ""
        title = f"{name}{at}: similarity of heads"
        similarity.save_png(heads, title=title, overwrite=overwrite, inputs=sources)
        found["heads"] = similarity.to_dict()

    def lines() -> Iterator[RenderableType]:
        if analysis is not None:
            yield tables.analysis_renderable(analysis)
        if proposed is not None:
            yield tables.profiles_renderable(proposed)
        if similarity is not None:
            yield from (tables.similarity_renderable(similarity), f"Heatmap: {heads}")

    return Result(found, lines)


@verb(options_from(md.init, overwrite=about("Replace an existing file.")))
def init(
    path: Path = option(Path("mha-deploy.toml"), "The file to write.", *OUT, "--output"), **options: Any
) -> Result:
    """Write a commented configuration file: default options, and requirements on every verdict."""
    written = md.init(path, **options)
    return Result({"file": str(written)}, lambda: [f"wrote {written}"])


@verb(
    options_from(
        md.doctor,
        load=about(
            "Also import PyTorch, ONNX, onnxscript and matplotlib, to check that they work. default: they "
            "are only looked up"
        ),
    )
)
def doctor(**options: Any) -> Result:
    """Show which runtimes and GPUs this machine has, what each is for, and how to install the rest."""
    from mha_deploy.cli import tables

    found = md.doctor(**options)

    def lines() -> Iterator[RenderableType]:
        own = found["versions"]
        yield f"mha-deploy {own['mha-deploy']} on Python {own['python']}"
        yield tables.runtimes_renderable(found["runtimes"])
        if any(each["works"] and not each["loaded"] for each in found["runtimes"]):
            yield "installed: found, not imported; `mha-deploy doctor --load` imports it"
        gpus = [", ".join(gpu.values()) for gpu in found["gpus"]] or ["none reported by nvidia-smi"]
        yield from (f"GPU: {gpu}" for gpu in gpus)
        yield from (f"{verb}: {yes_no(possible)}" for verb, possible in found["can"].items())
        yield (
            "bundles from others: files, graph and oracle are checked; code that a bundle names or contains "
            "runs only with --trust-code; TensorRT loads plans in a child process, so build engines yourself "
            "(docs/security.md)"
        )

    return Result(found, lines)


@verb()
def completion(
    shell: str = argument("SHELL", "bash, zsh or fish."),
    line: str | None = option(None, "Instead, print the completions of this command line."),
) -> Result:
    """Print a script for shell completion of commands, options, models, factories and bundles."""
    from mha_deploy.cli.completion import SHELLS, complete, script

    if shell not in SHELLS:
        raise DeployError("There is no completion script for this shell.", got=shell, hint=", ".join(SHELLS))
    if line is None:
        text = script(shell).rstrip("\n")
        return Result({"shell": shell, "script": text}, lambda: [text])
    found = complete(click.get_current_context().find_root().command, line, shell)
    return Result(found, lambda: found)
