"""Help: panels of options, choices in full, examples, and what most people need before everything else.

An option that no table here names is in the panel `Advanced`, which `--help-all` shows.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from inspect import getdoc
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any

import click

ADVANCED = "Advanced"
PANELS: dict[str, tuple[str, ...]] = {
    "Model": (
        "model", "hf", "layer", "weights", "prefix", "axis", "inputs", "cache", "projections", "bundle",
        "bundles", "plan", "old", "new", "at", "heads", "kv_heads",
    ),
    "Precision": (
        "precision", "calibration", "weight_scales", "quantize_attention", "max_loss", "accumulate",
        "candidates",
    ),
    "Engine": (
        "backend", "runtimes", "runtime", "engine", "engine_files", "graphs", "graph", "attention",
        "allow_decomposed", "profiles", "name", "targets", "target", "version", "sm", "gqa",
        "optimization_level", "workspace_mib", "version_compatible", "hardware_compatible",
        "weight_streaming", "refit", "timing_cache", "repeat", "gpu", "variant",
        "triton", "max_batch", "instances", "queue_delay_us", "sequences", "url", "clients", "requests",
        "timeout_s", "names", "jobs",
    ),
    "Checks": (
        "self_test", "latency", "layers", "data", "metric", "logits", "data_limit", "source", "resume",
        "fresh", "steps", "prompt", "batch", "sweep", "probe", "conformance", "require_run",
        "require_coverage", "require_fused", "require_precision", "trust_code", "golden", "golden_gflop",
        "golden_gib", "golden_mb", "samples", "kernels", "streams", "processes", "replay", "error", "size",
        "build_time", "build_seconds", "coverage", "strict", "verify", "load",
        "opset",
    ),
    "Output": (
        "out", "output", "path", "report", "everything", "every", "markdown", "junit", "html", "record",
        "polygraphy", "overwrite", "json", "quiet", "verbose",
    ),
}  # fmt: skip
RARE = frozenset(
    (
        "projections", "prefix", "candidates", "weight_scales", "quantize_attention", "accumulate",
        "targets", "gqa",
        "optimization_level",
        "workspace_mib", "version_compatible", "hardware_compatible",
        "weight_streaming", "refit",
        "timing_cache", "repeat", "instances", "queue_delay_us", "sequences", "clients", "requests",
        "timeout_s", "names", "metric", "logits", "data_limit", "resume", "source", "prompt", "batch",
        "sweep", "probe", "conformance", "golden_gflop", "golden_gib", "golden_mb", "samples", "kernels",
        "processes", "replay", "build_time", "build_seconds", "strict", "polygraphy", "opset", "report",
    )
)  # fmt: skip
"""Options that few people need, though they have a panel."""

CHOICES: dict[str, tuple[str, ...]] = {
    "precision": ("auto", "fp16", "bf16", "fp32", "int8", "fp8"),
    "calibration": ("max", "percentile", "mse"),
    "weight_scales": ("channel", "tensor"),
    "cache": ("none", "dynamic", "preallocated"),
    "projections": ("separate", "packed"),
    "backend": ("tensorrt", "tensorrt-rtx"),
    "target": ("tensorrt", "tensorrt-rtx"),
    "attention": ("native", "plugin", "auto"),
    "accumulate": ("auto", "fp16", "fp32"),
    "gqa": ("auto", "fold", "broadcast", "repeat"),
    "hardware_compatible": ("ampere-plus", "same-compute-capability"),
    "refit": ("all", "identical"),
    "device": ("cpu", "cuda"),
    "variant": ("python", "tensorrt_plan"),
    "opset": ("23", "24"),
}
"""The values of an option that has a few."""
# Names that mean something else there, or take fewer values.
_OTHERWISE: dict[tuple[str, str], tuple[str, ...]] = {
    ("analyze", "attention"): (),
    ("analyze", "precision"): ("fp16", "bf16", "fp32"),
}

VERBS: dict[str, dict[str, str]] = {
    "From a model to an engine": {
        "deploy": "all in one: export, build an engine, validate it",
        "export": "write a layer, your own model or an ONNX file to a bundle",
        "prune": "export a model with fewer heads, and measure the loss",
        "fuse": "rewrite the attention of an ONNX file as Attention nodes",
        "check": "report whether a target supports and fuses the attention",
        "build-engine": "build a TensorRT engine, and verify fusion and precision",
        "refit": "put new weights into an engine, without a rebuild",
    },
    "Verdicts and times": {
        "validate": "judge the graph and engines against the FP64 oracle",
        "bisect": "find the first wrong attention and node",
        "bench": "measure the latency of engines, ONNX Runtime and PyTorch",
    },
    "Upgrades": {
        "compare": "report what got worse between two results",
        "matrix": "run models × precisions × runtimes × GPUs × options",
    },
    "Serving": {
        "package": "write a bundle into a Triton model repository",
        "plugins": "build and list the plugin library of fused attention",
    },
    "Without running a model": {
        "inspect": "show what is in a bundle, an engine or an ONNX file",
        "models": "list the catalog of layers",
        "analyze": "count FLOPs and bytes, and compute the roofline bound",
        "doctor": "show what is installed on this machine, and what is missing",
        "init": "write mha-deploy.toml, for your defaults and requirements",
        "completion": "print a completion script for bash, zsh or fish",
    },
}
"""The verbs of the main help, a line each; one that is not named here is at its end, with its sentence."""

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "": (
        ("deploy bert-base", "a layer of the catalog"),
        ("deploy my_model.py:encoder", "your own model"),
        ("validate bundles/bert-base-fp16 --self-test", "are mistakes detected?"),
    ),
    "deploy": (
        ("deploy bert-base", "a layer of the catalog"),
        ("deploy my_model.py:encoder --axis S=1:128:512", "your own model"),
        ("deploy --hf path/to/Mistral-7B --layer 0", "a layer of a checkpoint"),
    ),
    "export": (
        ("export llama-3-8b --cache dynamic -o llama", "with a KV cache"),
        ("export my_model.py:encoder -o encoder --precision bf16", "your own model"),
        ("export model.onnx -o model --axis seq=1:128:512", "an ONNX file"),
    ),
    "prune": (
        ("prune bert-base --heads 10 -o bert", "ten heads of twelve"),
        ("prune model.onnx --heads auto --max-loss 0.01 -o model", "as few as possible"),
        ("prune my_model.py:encoder --kv-heads 2 --data val.npz -o encoder", "shared K and V heads"),
    ),
    "fuse": (
        ("fuse model.onnx -o fused.onnx", "one Attention node each"),
        ("fuse model.onnx -o fused.onnx --overwrite", "replace the file"),
        ("fuse model.onnx -o fused.onnx --json", "for scripts"),
    ),
    "check": (
        ("check bundles/bert-base-fp16", "TensorRT-RTX"),
        ("check bundles/bert-base-fp16 --target tensorrt --version 8.6", "an old version"),
        ("check model.onnx --sm 8.9", "an ONNX file, one GPU"),
    ),
    "refit": (
        ("build-engine mine --refit all", "first: an engine whose weights can be replaced"),
        ("refit mine/engines/tensorrt.engine --weights tuned.pt -o tuned", "after fine-tuning"),
        ("refit mine/engines/tensorrt.engine --weights new.onnx -o tuned", "of an ONNX file"),
    ),
    "build-engine": (
        ("build-engine bundles/bert-base-fp16", "for this machine"),
        ("build-engine llama --profile B=1,S=1:128:512 --profile B=1:8:32,S=1", "prefill, decode"),
        ("build-engine llama --backend tensorrt --attention auto", "native or plugin"),
    ),
    "validate": (
        ("validate bundles/bert-base-fp16", "graph and engines"),
        ("validate bundles/bert-base-fp16 --require-run", "in CI, on the GPU"),
        ("validate bundles/bert-base-fp16 --graph theirs.onnx", "somebody else's export"),
    ),
    "bisect": (
        ("bisect my-bundle", "the first wrong attention"),
        ("bisect my-bundle --runtime ort-cpu", "in ONNX Runtime"),
        ("bisect my-bundle --trust-code", "your module is the reference"),
    ),
    "bench": (
        ("bench bundles/bert-base-fp16", "over batch sizes and lengths"),
        ("bench bundles/bert-base-fp16 --at B=8,S=128", "at one size"),
        ("bench old-bundle new-bundle --markdown", "a table to paste"),
    ),
    "compare": (
        ("compare old new", "two bundles"),
        ("compare old new --max-latency 0.1 --junit out.xml", "in CI"),
        ("compare old/report.json new/report.json --html diff.html", "an HTML page"),
    ),
    "matrix": (
        ("matrix plan.toml -o results", "all combinations"),
        ("matrix plan.toml -o results --jobs 4", "four at a time"),
        ("matrix plan.toml -o results --markdown", "a table to paste"),
    ),
    "package": (
        ("package my-bundle --triton models", "Triton's Python backend"),
        ("package my-bundle --triton models --variant tensorrt_plan", "its TensorRT backend"),
        ("package my-bundle --triton models --max-batch 16", "dynamic batching"),
    ),
    "inspect": (
        ("inspect bundles/bert-base-fp16", "a bundle; checks hashes"),
        ("inspect bundles/bert-base-fp16/engines/tensorrt-rtx.engine", "its kernels"),
        ("inspect model.onnx", "its attention"),
    ),
    "models": (
        ("models", "layers of published models"),
        ("models --all", "also small layers for tests"),
        ("models --json", "for scripts"),
    ),
    "analyze": (
        ("analyze llama-3-8b --gpu h200", "FLOPs, bytes, roofline"),
        ("analyze llama-3-8b --gpu h200 --at B=1,S=1,P=4095", "one decode step"),
        ("analyze --hf path/to/Mistral-7B --heads heads.png", "similar heads"),
    ),
    "doctor": (
        ("doctor", "what is installed"),
        ("doctor --load", "does it work?"),
        ("doctor --json", "for scripts"),
    ),
    "init": (
        ("init", "mha-deploy.toml in this folder"),
        ("init --overwrite", "start again"),
        ("init -o ci/mha-deploy.toml", "in another folder"),
    ),
    "completion": (
        ("completion bash", "append its output to ~/.bashrc"),
        ("completion zsh", "write it to _mha-deploy in a folder of $fpath"),
        ("completion fish", "to ~/.config/fish/completions/mha-deploy.fish"),
    ),
    "plugins build": (
        ("plugins build", "for the GPU of this machine"),
        ("plugins build --arch 80,90", "for other GPUs"),
        ("plugins build --tensorrt-include TensorRT/include", "other headers"),
    ),
    "plugins list": (
        ("plugins list", "what is built"),
        ("plugins list --json", "for scripts"),
        ("plugins where", "the library that is loaded"),
    ),
    "plugins where": (
        ("plugins where", "for TensorRT"),
        ("plugins where --backend tensorrt-rtx", "for TensorRT-RTX"),
        ("plugins list", "all of them"),
    ),
}
"""Three calls of every verb, each with its purpose in a few words."""


def panel_of(name: str) -> str:
    """The panel of an option."""
    return next((panel for panel, names in PANELS.items() if name in names), ADVANCED)


def is_rare(name: str) -> bool:
    """Whether only `--help-all` shows an option."""
    return name in RARE or panel_of(name) == ADVANCED


def choices_of(verb: str, name: str) -> tuple[str, ...]:
    """The values of an option that has a few; empty for others."""
    return _OTHERWISE.get((verb, name), CHOICES.get(name, ()))


# -- As text ---------------------------------------------------------------------------------------

_NAME_COLUMN = 27
_WIDEST = 100


def _width() -> int:
    return max(40, min(shutil.get_terminal_size().columns, _WIDEST))


def _heading(text: str) -> str:
    colors = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return click.style(f"{text}:", bold=True) if colors else f"{text}:"


def _rows(rows: Iterable[tuple[str, str]], column: int = _NAME_COLUMN) -> Iterator[str]:
    """Names with their texts beside them; a long name has a line for itself, and is never truncated."""
    width, blank = _width(), " " * column
    for name, text in rows:
        lines = wrap(text, width - column, break_on_hyphens=False)
        first = f"  {name}"
        if len(first) > column - 2:
            yield first
        elif lines:
            yield f"{first:{column}}{lines.pop(0)}"
        else:
            yield first
        yield from (f"{blank}{line}" for line in lines)


def _paragraph(text: str) -> list[str]:
    return wrap(" ".join(text.split()), _width() - 2, initial_indent="  ", subsequent_indent="  ")


def _examples(verb: str) -> Iterator[str]:
    known = EXAMPLES.get(verb, ())
    if not known:
        return
    yield _heading("Examples")
    calls = [f"mha-deploy {call}" for call, _ in known]
    longest = max(map(len, calls))
    fits = all(longest + len(purpose) + 6 <= _width() for _, purpose in known)
    for call, (_, purpose) in zip(calls, known, strict=True):
        beside = f"{call:{longest if fits else 0}}  # {purpose}" if purpose else call
        yield f"  {beside if len(beside) + 2 <= _width() else call}"
    yield ""


def _names(parameter: Any) -> str:
    """An option as it is typed: its names, and what it takes."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    names, other = ", ".join(sorted(parameter.opts, key=len)), [*parameter.secondary_opts]
    if other == [f"--no-{parameter.opts[0][2:]}"]:
        return f"--[no-]{parameter.opts[0][2:]}"
    names = " / ".join([names, *other])
    return f"{names} {parameter.metavar}" if parameter.metavar else names


def _about(parameter: Any) -> str:
    """What an option is, with its default."""
    text = re.sub(r"; (default: .+?)\.?$", r". \1", " ".join((parameter.help or "").split()))
    default = parameter.default
    if isinstance(default, str | int | float | Path) and not isinstance(default, bool) and default != "":
        text += "" if "default:" in text else f" default: {default}"
    if default is True and "default:" not in text:
        text += " default: on"
    return f"{text.strip()} Required." if parameter.required and not _is_argument(parameter) else text.strip()


class Command(click.Command):
    """A verb with our help; `--help-all` lists every option. Its parameters are made when they are needed."""

    def __init__(
        self, name: str, callback: Callable[..., None], make_params: Callable[[], list[click.Parameter]]
    ) -> None:
        super().__init__(name, callback=callback, help=getdoc(callback))
        del self.params
        self._make_params = make_params

    @cached_property
    def params(self) -> list[click.Parameter]:  # type: ignore[override]
        """Its arguments and options."""
        return [*self._make_params(), _help_all()]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line; an option without its value does not take the next option for one."""
        options = [each for each in self.params if isinstance(each, click.Option)]
        names = {name for each in options for name in (*each.opts, *each.secondary_opts)}
        valued = {name for each in options if not each.is_flag and not each.count for name in each.opts}
        for given, follows in pairwise(args[: args.index("--") if "--" in args else None]):
            if given in valued and follows in names:
                raise click.BadOptionUsage(given, f"Option {given!r} needs a value, not {follows!r}.", ctx)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help for most people."""
        formatter.write(self.help_text(ctx))

    def help_text(self, ctx: Any, *, everything: bool = False) -> str:
        """The help: usage, purpose, examples, and the options in their panels."""
        verb = ctx.command_path.partition(" ")[2] if " " in ctx.command_path else self.name or ""
        taken = [each for each in self.params if _is_argument(each)]
        words = [f"{each.metavar}" if each.required else f"[{each.metavar}]" for each in taken]
        lines = [" ".join(["Usage:", "mha-deploy", verb, *words, "[OPTIONS]"]), ""]
        lines += [*_paragraph(self.help or ""), "", *_examples(verb)]
        panels: dict[str, list[Any]] = {name: [] for name in (*PANELS, ADVANCED)}
        hidden = []
        for parameter in self.params:
            name = str(parameter.name)
            if name in ("help", "help_all"):
                continue
            if is_rare(name) and not everything and not _is_argument(parameter) and not parameter.required:
                hidden.append(parameter)
                continue
            panels["Model" if _is_argument(parameter) else panel_of(name)].append(parameter)
        for panel, members in panels.items():
            if not members:
                continue
            members.sort(key=lambda each: (not _is_argument(each), _place(panel, str(each.name))))
            title = panel
            if panel == "Model" and all(map(_is_argument, members)) and members[0].name != "model":
                title = "Arguments" if len(members) > 1 else "Argument"
            lines += [_heading(title), *_rows((_names(each), _about(each)) for each in members), ""]
        if hidden:
            names = ", ".join(each.opts[0] for each in hidden)
            lines += wrap(
                f"--help-all explains {len(hidden)} more: {names}", _width(), break_on_hyphens=False
            )
        return "\n".join(lines).rstrip() + "\n"


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _place(panel: str, name: str) -> int:
    names = PANELS.get(panel, ())
    return names.index(name) if name in names else len(names)


class CommandGroup(click.Group):
    """The main command, and `plugins`: their verbs by purpose."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params.append(_help_all())

    def add(self, command: click.Command) -> click.Command:
        """Add a verb, also as a decorator."""
        self.add_command(command)
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs by purpose, each in a line."""
        below = ctx.parent is not None
        path = f"mha-deploy {self.name}" if below else "mha-deploy"
        lines = [f"Usage: {path} COMMAND [ARGUMENTS] [OPTIONS]", "", *_paragraph(self.help or ""), ""]
        lines += _examples("") if not below else ()
        known = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        sections = (
            {} if below else {title: [n for n in names if n in known] for title, names in VERBS.items()}
        )
        named = {name for names in sections.values() for name in names}
        sections["Commands" if below else "More"] = [name for name in known if name not in named]
        for title, names in sections.items():
            if names:
                texts = VERBS.get(title, {})
                rows = ((name, texts.get(name) or _first_sentence(known[name])) for name in names)
                lines += [_heading(title), *_rows(rows, 16), ""]
        if not below:
            lines += [_heading("Options"), *_rows([("--version", "Print the version.")], 16), ""]
            lines += wrap(
                "COMMAND --help lists the common options, COMMAND --help-all every option. Exit codes: 0 "
                "passed or not verified, 1 a verdict failed, 2 bad input, 3 backend unavailable, 70 a bug, "
                "130 interrupted.",
                _width(),
            )
        formatter.write("\n".join(lines).rstrip() + "\n")


def _first_sentence(command: Any) -> str:
    return " ".join((command.help or "").split()).partition(". ")[0].rstrip(".") + "."


def _show_everything(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    if value:
        verb = ctx.command
        text = (
            verb.help_text(ctx, everything=True) if isinstance(verb, Command) else f"{verb.get_help(ctx)}\n"
        )
        click.echo(text, nl=False)
        raise click.exceptions.Exit()


def _help_all() -> click.Option:
    return click.Option(
        ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_everything,
        help="Explain every option.",
    )  # fmt: skip
