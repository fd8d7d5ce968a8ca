"""Hints in the language of the reader: options on the command line, keywords in Python."""

import pytest

import mha_deploy as md
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


@pytest.mark.parametrize(
    ("hint", "keywords"),
    [
        ("another --name, or --overwrite", "another name=..., or overwrite=True"),
        ("--precision fp32 or bf16", 'precision="fp32" or bf16'),
        ("--time-limit SECONDS, if it needs longer", "md.configure(time_limit=SECONDS), if it needs longer"),
        ("--axis S=1:8:64", 'axes={"S": "1:8:64"}'),
        ("--max-loss 0.01", "max_loss=0.01"),
        ("--no-latency", "latency=False"),
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
