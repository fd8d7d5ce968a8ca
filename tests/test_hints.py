"""Hints in the language of the reader: options on the command line, keywords in Python."""

import pydoc
import re

import pytest

import mha_deploy as md
from mha_deploy import options
from mha_deploy.options import in_python


def test_an_existing_folder_names_the_option_and_the_keyword(run_cli, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").touch()
    done = run_cli("export", "tiny-mha", "-o", tmp_path / "there")
    assert done.code == 2
    assert "--overwrite" in done.err
    assert "overwrite=True" not in done.err
    with pytest.raises(md.DeployError) as caught:
        md.export("tiny-mha", tmp_path / "there")
    assert "overwrite=True" in str(caught.value)
    assert "--overwrite" not in str(caught.value)


def test_every_part_of_an_error_is_in_the_language_of_the_reader(refused, tmp_path):
    data = tmp_path / "data.npz"
    refused("export", "tiny-mha", "-o", tmp_path / "x", "--data", data, what="--data", got="--precision auto")
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
        ("--no-latency", "latency=False"),
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
