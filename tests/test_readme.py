"""The commands of the README run, its links and paths exist, and CI runs its test command."""

import ast
import itertools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import onnx
import pytest

import mha_deploy as md
from mha_deploy.cli import app, main
from mha_deploy.engine.engine import parse_ranges
from mha_deploy.model.catalog import find_spec, read_spec
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.runtime.cuda import find_gpu

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *DOCS]
TABLE = re.findall(r"^\| `(mha-deploy [^`]+)` \|", README, re.MULTILINE)


def between(marker):
    """The command between `<!-- marker -->` and `<!-- end -->`."""
    block = re.search(
        rf"^<!-- {marker} -->\n```bash\n(.+?)\n```\n<!-- end -->$", README, re.MULTILINE | re.DOTALL
    )
    assert block, f"README.md has no {marker} command"
    return block[1]


def run(monkeypatch, command):
    monkeypatch.setattr("sys.argv", shlex.split(command))
    try:
        main()
    except SystemExit as stop:
        return stop.code or 0
    return 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("readme")


def test_the_table_lists_every_verb():
    assert {command.split()[1] for command in TABLE} == set(app.commands)


def commands_of(page):
    """Every command line in a page: of its bash blocks, and of the table in the README."""
    text = page.read_text(encoding="utf-8")
    bash = "\n".join(re.findall(r"```bash\n(.+?)```", text, re.DOTALL)).replace("\\\n", " ")
    found = re.findall(r"^(?:\w+/bin/)?mha-deploy ([^|>\n]+)", bash, re.MULTILINE)
    return sorted({*found, *(each.removeprefix("mha-deploy ") for each in TABLE if page.name == "README.md")})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_a_valid_command_line(page):
    """Its verb and options exist; nothing runs."""
    for command in commands_of(page):
        words = shlex.split(re.sub(r"\s#.*", "", command))
        with app.make_context("mha-deploy", list(words)) as context:
            name, verb, rest = app.resolve_command(context, words)
            if verb.name != "plugins":
                verb.make_context(name, rest, parent=context)


def test_the_profiles_of_the_decode_tutorial_lie_within_its_layer():
    export, *others = re.findall(
        r"^mha-deploy .+$", (ROOT / "docs/tutorials/decode.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    words, profiles = shlex.split(export), re.findall(r"--profile (\S+)", " ".join(others))
    given = [word.split("=") for before, word in itertools.pairwise(words) if before == "--axis"]
    layer = md.load_model(words[2], cache=words[words.index("--cache") + 1], axes=dict(given)).source
    assert profiles
    for profile in profiles:
        assert parse_ranges(profile, layer).keys() == {"B", "S", "T"}


# Those that export or build are covered by tests/cli as well, those that compress by tests/export.
LONG = ("mha-deploy deploy", "mha-deploy matrix", "mha-deploy build-engine", "mha-deploy prune")
LONG += ("mha-deploy export MODEL -o DIR --precision int8",)


@pytest.mark.sweep(6)  # each verb has tests of its own
@pytest.mark.parametrize(
    "command",
    [pytest.param(each, marks=pytest.mark.slow) if each.startswith(LONG) else each for each in TABLE],
)
def test_a_command_of_the_table_runs(command, folder, monkeypatch):
    monkeypatch.chdir(folder)
    command = command.replace("MODEL", "tiny-gqa").replace("DIR", "layer").replace("OLD NEW", "layer layer")
    if "plan.toml" in command:
        Path("plan.toml").write_text(
            "models = ['layer']\nprecisions = ['fp16']\nruntimes = [{name = 'rtx'}]\n"
        )
    if "IN.onnx" in command:
        write_unfused(Path("IN.onnx"))
    if not Path("layer").exists() and " -o layer" not in command:
        assert run(monkeypatch, "mha-deploy export tiny-gqa -o layer") == 0
    if "x.onnx" in command:  # somebody else's export: here it is our own
        shutil.copyfile("layer/model.onnx", "x.onnx")
    if "val.npz" in command:
        np.savez("val.npz", x=np.random.default_rng(0).standard_normal((3, 1, 7, 64)))
    if " -o layer" in command:
        command += " --overwrite"
    assert run(monkeypatch, command) == expected_code(command)


def write_unfused(path):
    """Attention as two matmuls and a softmax."""
    nodes = [
        onnx.helper.make_node("MatMul", ["q", "keys"], ["scores"]),
        onnx.helper.make_node("Softmax", ["scores"], ["weights"]),
        onnx.helper.make_node("MatMul", ["weights", "v"], ["y"]),
    ]
    shapes = {"q": ["B", 2, "S", 8], "keys": ["B", 2, 8, "T"], "v": ["B", 2, "T", 8], "y": ["B", 2, "S", 8]}
    *inputs, output = (onnx.helper.make_tensor_value_info(name, 1, dims) for name, dims in shapes.items())
    graph = onnx.helper.make_graph(nodes, "unfused", inputs, [output])
    opset = onnx.helper.make_opsetid("", 18)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10), path)


def expected_code(command):
    if "--version 8.6" in command:
        return 1  # TensorRT 8.6 does not fuse grouped heads, and the check says so with its exit code
    if " refit " in command:
        return 2  # there is no engine of that name
    return 3 if " bench " in command and find_gpu() is None else 0


@pytest.mark.slow
def test_the_layer_with_a_kv_cache_is_deployed_and_decoded(folder, monkeypatch):
    monkeypatch.chdir(folder)
    commands = re.findall(r"^mha-deploy (?:deploy llama|validate llama).+$", README, re.MULTILINE)
    assert len(commands) == 2
    smaller = {
        "llama-3-8b": "tiny-rope",
        "T=1024": "T=64",
        "S=1:128:512": "S=1:8:32",
        "256": "20",
        "500": "30",
    }
    for command in commands:
        for large, small in smaller.items():
            command = command.replace(large, small)
        assert run(monkeypatch, command) == 0


@pytest.mark.slow
def test_the_spec_of_your_own_exports_with_its_weights(folder, monkeypatch):
    from safetensors.torch import save_file

    from mha_deploy.reference import random_weights

    monkeypatch.chdir(folder)
    toml = re.search(r"```toml\n(.+?)```", README, re.DOTALL)
    command = re.search(r"^mha-deploy export my-layer.+$", README, re.MULTILINE)
    Path("my-layer.toml").write_text(toml[1], encoding="utf-8")
    save_file(dict(random_weights(read_spec(Path("my-layer.toml")), seed=1)), "layer0.safetensors")
    assert run(monkeypatch, command[0]) == 0
    assert run(monkeypatch, "mha-deploy validate my-layer") == 0


def test_every_key_of_a_layer_spec_is_listed():
    page = (ROOT / "docs/own-models.md").read_text(encoding="utf-8")
    section = page.partition("## A layer spec\n")[2].partition("\n## ")[0]
    keys = {field.name for field in fields(AttentionSpec)} - {"name"}  # which is that of the file
    assert keys - set(re.findall(r"`\[?(\w+)\]?`", section)) == set()


def write_own_model(layers):
    """Write the model of the README, with smaller sizes, and give the command that deploys it."""
    code = re.search(r"```python\n(# my_model.py\n.+?)```", README, re.DOTALL)[1]
    sizes = {"256": "64", "num_layers=12": f"num_layers={layers}", "1:8:32": "1:2:4", "1:128:512": "1:8:16"}
    for large, small in sizes.items():
        assert large in code
        code = code.replace(large, small)
    Path("my_model.py").write_text(code, encoding="utf-8")
    return re.search(r"`(mha-deploy deploy my_model.py:\w+)`", README)[1]


def test_the_model_of_your_own_is_built_and_runs(tmp_path, monkeypatch):
    """Modules of the kind are exported by tests/export, this one by a slow test."""
    monkeypatch.chdir(tmp_path)
    factory = write_own_model(1).rpartition(":")[2]
    made = runpy.run_path("my_model.py")[factory]()
    output = made.module(**{name: example.tensor for name, example in made.inputs.items()})
    assert output.shape[:2] == next(iter(made.inputs.values())).tensor.shape[:2]
    assert set(made.axes) == {"B", "S"}


def test_the_decoder_of_your_own_runs_with_and_without_cached_tokens(tmp_path):
    """Its outputs are those that its cache names; decoders of the kind are validated by tests/validate."""
    page = (ROOT / "docs/own-models.md").read_text(encoding="utf-8")
    file = tmp_path / "my_decoder.py"
    file.write_text(re.search(r"```python\n(# my_decoder.py\n.+?)```", page, re.DOTALL)[1], encoding="utf-8")
    made = runpy.run_path(str(file))["decoder"]()
    examples = {name: example.tensor for name, example in made.inputs.items()}
    outputs = made.module(**examples)
    assert set(made.kv_cache.values()) < set(outputs)
    cached, new = examples["past_key"].shape[2], examples["ids"].shape[1]
    for before, after in made.kv_cache.items():
        assert outputs[after].shape[2] == cached + new
        examples[before] = examples[before][:, :, :0]
    examples["attention_mask"] = examples["attention_mask"][:, -new:]
    assert made.module(**examples)["logits"].shape[:2] == examples["ids"].shape


def test_the_preallocated_cache_of_your_own_decodes_as_its_dynamic_one(tmp_path):
    torch = pytest.importorskip("torch")
    page = (ROOT / "docs/own-models.md").read_text(encoding="utf-8")
    parts = re.findall(r"```python\n((?:# my_decoder.py|class MyStaticDecoder).+?)```", page, re.DOTALL)
    (tmp_path / "my_decoder.py").write_text("\n\n".join(parts), encoding="utf-8")
    found = runpy.run_path(str(tmp_path / "my_decoder.py"))
    dynamic, static = found["decoder"](), found["static_decoder"]()
    static.module.load_state_dict(dynamic.module.state_dict())
    given = {name: example.tensor.clone() for name, example in static.inputs.items()}
    ids, cached = given["ids"], given["key_cache"].clone()
    empty = {name: example.tensor[:, :, :0] for name, example in dynamic.inputs.items() if "past" in name}
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        wanted = dynamic.module(ids=ids, attention_mask=mask, **empty)["logits"]
        first = static.module(**{**given, "ids": ids[:, :10], "cache_position": torch.arange(10)})
        rest = static.module(**{**given, "ids": ids[:, 10:], "cache_position": torch.arange(10, 16)})
    assert torch.allclose(torch.cat([first, rest], 1), wanted, atol=1e-5)
    assert not torch.equal(given["key_cache"], cached)  # in place


@pytest.mark.slow
def test_the_model_of_your_own_is_deployed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, write_own_model(2)) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "attention profile verdict evidence" in printed
    assert "layers.0.self_attn 0 fused _gemm_mha" in printed
    assert "and 1 more" in printed
    assert "2 attentions ≤" in printed
    assert "2/2 attentions right" in printed
    assert "2/2 fused, precision: fp16 (verified)" in printed


def test_the_main_command_names_a_model_that_exists():
    command = between("run")
    assert "pip install -e '.[cpu]'" in command
    assert find_spec(command.split()[-1]).name == "bert-base"


def test_ci_runs_the_test_command_of_the_readme():
    assert "pytest" in between("test")
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert "<!-- test -->" in script
    assert "README.md" in script


CRASHING = """
import os, signal, pytest

@pytest.mark.parametrize("number", range(6))
def test_number(number):
    if number == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.slow
def test_a_worker_that_crashes_costs_one_test_and_the_command_ends(tmp_path):
    (tmp_path / "test_crash.py").write_text(CRASHING)
    options = shlex.split(between("test").rpartition(" -m pytest ")[2])
    assert "-n" in options
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, tmp_path]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    plain["COLUMNS"] = "200"  # the summary is cut to the width of the terminal
    done = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stdout
    assert "1 failed, 5 passed" in done.stdout
    assert re.search(r"crashed while running '\S*test_crash\.py::test_number\[1\]'", done.stdout)


def test_ci_cannot_hang():
    """The script of CI ends the command at its limit, reports it, and passes on the exit code."""
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    start = script.index("code=0")

    def run(command):
        lines = ["set -euo pipefail", "limit=0.3", f"command='{command}'", script[start:]]
        return subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)

    assert (run("true").returncode, run("exit 5").returncode) == (0, 5)
    hung = run("sleep 600")
    assert hung.returncode == 124
    assert "ended after its limit of 0.3 s" in hung.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_text_wraps_at_100_columns(page):
    """Except for tables and what is printed."""
    text = re.sub(r"^```.+?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("|"))
    assert [line for line in lines if len(line) > 100] == []


def test_every_link_leads_to_a_file():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in DOCS)])
def test_every_path_in_the_text_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    paths = re.findall(r"`((?:mha_deploy|tests|benchmarks|examples|plugins)/[\w./]*)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    packages = [path.name for path in (ROOT / "mha_deploy").iterdir() if path.is_dir()]
    within = re.findall(rf"`((?:{'|'.join(packages)})/[\w./]+\.py)`", text)
    assert [path for path in within if not (ROOT / "mha_deploy" / path).exists()] == []


PATH = r"`((?:mha_deploy|tests)/[\w/]+\.py)`"
NAMES = r"((?:`[\w.]+`(?:,\s| and\s|,\sand\s)?)+)"


def named_places(text):
    """Every (path, name) of `path`: `name`, `name` and of `name` in `path`."""
    found = [(path, names) for path, names in re.findall(rf"{PATH}:\s{NAMES}", text)]
    found += [(path, names) for names, path in re.findall(rf"{NAMES}\s(?:in|of)\s{PATH}", text)]
    return [(path, name) for path, names in found for name in re.findall(r"`([\w.]+)`", names)]


def defined_in(body):
    """Dotted names of what a module, and the classes in it, define."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{inner}" for inner in defined_in(node.body))
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = getattr(node, "targets", None) or [node.target]
            yield from (each.id for each in ast.walk(ast.Tuple(targets)) if isinstance(each, ast.Name))


def test_every_name_is_in_the_file_that_the_text_says():
    wrong, count = [], 0
    for page in PAGES:
        for path, name in named_places(page.read_text(encoding="utf-8")):
            body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
            count += 1
            wrong += [] if name in set(defined_in(body)) else [f"{page.name}: {name} in {path}"]
    assert wrong == []
    assert count > 20


def test_the_questions_of_a_newcomer_are_answered_before_anything_else():
    """Each by a place, a command or an option; their names are checked above."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## ")[0]
    answers = dict(re.findall(r"^\| ([^|]+\?) \| (.+?) \|", text, re.MULTILINE))
    topics = "lowering rule, fused, precision, budget, runtime, dialect, catalog, exit code 1, engine ran, "
    topics += "another exporter, baseline, option"
    for topic in topics.split(", "):
        assert any(topic in question and re.search(r"[`(]", answers[question]) for question in answers), topic
    readme = README.partition("## Where the code is")[2]
    for path in ("graph/lower/", "metrics.py", "runtime/tensorrt/engine_verdict.py", "validation/verdict.py"):
        assert f"`mha_deploy/{path}" in readme, f"README.md does not say where {path} is"
