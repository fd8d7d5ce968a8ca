"""Hints in the language of the reader: options on the command line, keywords in Python."""

import ast
import inspect
import pydoc
import re
from collections import defaultdict
from dataclasses import fields, is_dataclass
from pathlib import Path

import click
import numpy as np
import pytest
from source_trees import nodes_of

import mha_deploy as md
from mha_deploy import options
from mha_deploy.cli import app
from mha_deploy.keywords import typed_value, types_of
from mha_deploy.model.catalog import tomllib
from mha_deploy.options import in_python

SOURCE = Path(md.__file__).parent
FLAG = re.compile(r"(?<![\w-])--[a-z](?:[\w-]*[a-wyz\d])?(?![\w-])")  # X: a part that is filled in
OTHER_PROGRAM = re.compile(r"`?\b(?:trtexec|hf download|pip install|cmake)\b[^`,;]*")
OF_OTHERS = {
    "use_cache",
    "experts_implementation",
    "extra_options",
    "dynamo",
}  # of Transformers, ONNX Runtime, PyTorch
ONLY_TYPED = {"--no-report"}  # of the command line: Python writes no report by itself


@pytest.fixture(scope="module")
def hints():
    return list(found_hints())


def found_hints():
    """Every hint in the source, and every remedy of a rule: its place, and its text without values."""
    for path in sorted(SOURCE.rglob("*.py")):
        nodes = nodes_of(path.relative_to(SOURCE).as_posix())
        given = [node for node in nodes if isinstance(node, ast.keyword) and node.arg == "hint"]
        values = [(node.lineno, node.value) for node in given]
        assigned = [each for node in nodes if isinstance(node, ast.Assign) for each in pairs(node)]
        values += [(line, value) for line, name, value in assigned if name.endswith("hint")]
        parts = {node.id for _, value in values for node in ast.walk(value) if isinstance(node, ast.Name)}
        values += [(line, value) for line, name, value in assigned if name in parts]
        for line, value in values:
            for text in texts(value):
                yield f"{path.relative_to(SOURCE)}:{line}", OTHER_PROGRAM.sub("", text)
    for name, rule in tomllib.loads((SOURCE / "graph" / "rules.toml").read_text(encoding="utf-8")).items():
        yield name, rule["remedy"]


def pairs(node):
    """The names that a statement assigns to, each with its line and what is assigned."""
    for target in node.targets:
        found = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            found = zip(target.elts, node.value.elts, strict=False)
        yield from ((node.lineno, name.id, value) for name, value in found if isinstance(name, ast.Name))


def texts(node):
    """The texts in an expression; what an f-string fills in is a word."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(each.value if isinstance(each, ast.Constant) else "X" for each in node.values)
    elif isinstance(node, ast.Constant):
        yield from [node.value] if isinstance(node.value, str) else []
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


def flags(command):
    """The options of a command, and of those below it."""
    found = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
    below = command.commands.values() if isinstance(command, click.Group) else ()
    return found.union({"--help"}, *map(flags, below))


def keywords():
    """The keywords of all functions and records of the API."""
    public = [getattr(md, name) for name in dir(md) if not name.startswith("_")]
    records = [each for each in vars(options).values() if isinstance(each, type) and is_dataclass(each)]
    found = {name for each in public if callable(each) for name in inspect.signature(each).parameters}
    return found | {each.name for record in records for each in fields(record)}


def test_an_existing_folder_names_the_option_and_the_keyword(run_cli, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").touch()
    done = run_cli("export", "tiny-mha", "-o", tmp_path / "there")
    assert done.code == 2
    assert "--overwrite" in done.err
    assert "overwrite=True" not in done.err
    with pytest.raises(md.DeployError) as caught:
        md.export("tiny-mha", tmp_path / "there")
    for text in (str(caught.value), caught.value.hint):
        assert "overwrite=True" in text
        assert "--overwrite" not in text


def test_a_size_that_was_not_exported_names_the_axes(bundles):
    with md.open_runner(bundles("tiny-mha"), runtime="ort-cpu") as runner:
        feeds = {
            name: np.ones([99 if isinstance(dim, str) else dim for dim in info.dims], info.dtype)
            for name, info in runner.inputs.items()
        }
        with pytest.raises(md.DeployError) as caught:
            runner.run(feeds)
    assert "axes=" in caught.value.hint
    assert "--" not in caught.value.hint


def test_every_part_of_an_error_is_in_the_language_of_the_reader(refused, tmp_path):
    data = tmp_path / "data.npz"
    done = refused("export", "tiny-mha", "-o", tmp_path / "x", "--data", data, what="", got="--data")
    assert "--precision auto" in done.err
    with pytest.raises(md.DeployError) as caught:
        md.export("tiny-mha", tmp_path / "x", data=data)
    assert "--" not in str(caught.value)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").touch()
    with pytest.raises(md.DeployError) as caught:
        md.export("tiny-mha", tmp_path / "there")
    assert "out=" in str(caught.value)
    assert " -o" not in str(caught.value)


@pytest.mark.parametrize(
    "record", [options.ExportOptions, options.EngineOptions, options.ValidateOptions, options.Limits]
)
def test_the_help_of_python_names_no_option_of_the_command_line(record):
    assert re.findall(r"(?<!-)--[a-z]+", pydoc.render_doc(record, renderer=pydoc.plaintext)) == []


@pytest.mark.parametrize(
    ("hint", "keywords"),
    [
        ("another --name, or --overwrite", "another name=..., or overwrite=True"),
        ("--precision fp32 or bf16", 'precision="fp32" or bf16'),
        ("--time-limit SECONDS, if it needs longer", "md.configure(time_limit=SECONDS), if it needs longer"),
        ("--axis S=1:8:64", 'axes={"S": "1:8:64"}'),
        ("--axis B=2 --axis S=16, or another", 'axes={"B": "2", "S": "16"}, or another'),
        ("--max-loss 0.01", "max_loss=0.01"),
        ("--runtime onnx-reference, or", 'runtime="onnx-reference", or'),
        ("--attention auto: it", 'attention="auto": it'),
        ("--cudnn-include FOLDER", "cudnn_include=FOLDER"),
        ("--no-latency", "latency=False"),
        ("--no-engine validates it", "engine=False validates it"),
        ("--allow-decomposed writes it", "allow_decomposed=True writes it"),
        ("leave --max-loss out", "leave max_loss=... out"),
        ("--sm 89.", 'targets="89".'),
        ("another -o, or --overwrite", "another out=..., or overwrite=True"),
        ("--hf path/to/Llama --layer 0 for one", 'md.load_checkpoint("path/to/Llama", 0) for one'),
        ("build it: mha-deploy build-engine BUNDLE --overwrite", None),
        ("a plan as `trtexec --saveEngine` writes it", None),
        (
            "other --axis ranges, or --input NAME=FILE.npy",
            'other axes=... ranges, or inputs={"NAME": "FILE.npy"}',
        ),
    ],
)
def test_options_become_keywords(hint, keywords):
    assert in_python(hint) == (keywords or hint)


def test_hints_name_options_that_exist(hints):
    known = flags(app)
    unknown = [(place, flag) for place, text in hints for flag in FLAG.findall(text) if flag not in known]
    assert len(hints) > 300
    assert unknown == []


def test_hints_name_keywords_that_exist(hints):
    known, wrong = keywords(), []
    for place, text in hints:
        shown = in_python(text)
        names = re.findall(r"(?<![\w.\"'{-])([a-z][a-z_]+)=", shown)
        wrong += [(place, name) for name in names if name not in known | OF_OTHERS]
        if not place.startswith("cli/") and "mha-deploy " not in shown:
            wrong += [(place, flag) for flag in FLAG.findall(shown) if flag not in ONLY_TYPED]
    assert wrong == []


KEYWORD = re.compile(r"""(?<![\w.-])([a-z]\w*)=("[^"]*"|\[[^\]]*\]|\{[^}]*\}|[\d.]*\d|True|False)""")
OF_SENTENCES = {  # what follows an option that is named without a value; another word may be a value
    "alone", "and", "elsewhere", "from", "if", "in", "of", "or", "out", "ranges", "that", "with",
}  # fmt: skip


def types():
    """The types that a keyword has in the functions and records of the API."""
    found = defaultdict(list)
    public = [each for name in dir(md) if inspect.isfunction(each := getattr(md, name))]
    records = [each for each in vars(options).values() if isinstance(each, type) and is_dataclass(each)]
    for owner in (*public, *records):
        for name, kind in types_of(owner).items():
            found[name].append(kind)
    return found


def is_of_type(name, kind, value):
    try:
        typed_value(name, kind, value)
    except md.DeployError:
        return False
    return True


def test_hints_give_every_keyword_a_value_of_its_type(hints):
    known, wrong, checked = types(), [], 0
    for place, text in hints:
        shown = in_python(text)
        if shown == text or place.startswith("cli/"):
            continue
        for name, value in KEYWORD.findall(shown):
            given = ast.literal_eval(re.sub(r"\[([A-Z]+)\]", r'["\1"]', value))
            checked += 1
            if not any(is_of_type(name, kind, given) for kind in known[name]):
                wrong.append((place, name, value))
        wrong += [
            (place, word) for word in re.findall(r"=\.\.\. ([\w-]+)", shown) if word not in OF_SENTENCES
        ]
    assert checked > 100
    assert wrong == []
