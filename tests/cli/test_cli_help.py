"""Help that fits, with its choices and examples; completion in the shells."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from mha_deploy import cli
from mha_deploy.cli.completion import complete, script
from mha_deploy.cli.help import CHOICES, EXAMPLES, PANELS, RARE, VERBS
from mha_deploy.model.catalog import catalog_names

ROOT = cli.app
COMMANDS = {
    f"{group}{name}": command
    for group, commands in (("", ROOT.commands), ("plugins ", ROOT.commands["plugins"].commands))
    for name, command in commands.items()
    if not hasattr(command, "commands")
}
SCREEN = 40  # lines


@pytest.fixture
def help_of(run_cli, monkeypatch):
    def get(verb, option="--help", columns=80):
        monkeypatch.setenv("COLUMNS", str(columns))
        done = run_cli(*verb.split(), option)
        assert (done.code, done.err) == (0, "")
        return done.out

    return get


@pytest.mark.parametrize("verb", ["", *COMMANDS])
def test_help_fits_on_two_screens_and_cuts_nothing(verb, help_of):
    text = help_of(verb)
    lines = text.splitlines()
    assert len(lines) <= 2 * SCREEN
    assert max(map(len, lines)) <= 80
    assert not any(line != line.rstrip() for line in lines)
    if verb:
        flags = {flag for each in COMMANDS[verb].params for flag in each.opts if flag.startswith("--")}
        words = set(re.findall(r"--[\w-]+", text.replace("--[no-]", "--")))
        assert flags <= words | {"--help", "--help-all"}


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_all_explains_every_option(verb, help_of):
    text = " ".join(help_of(verb, "--help-all").split())
    for option in COMMANDS[verb].params:
        if option.name not in ("help", "help_all"):
            first = " ".join(option.help.split()[:3]).partition(";")[0]
            assert first in text, option.name


@pytest.mark.parametrize("group", ["", "plugins"])
def test_a_group_takes_the_option_for_all_help(group, help_of):
    assert help_of(group, "--help-all") == help_of(group)


def test_help_spells_out_the_choices(help_of):
    text = help_of("export")
    assert "[auto|fp16|bf16|fp32|int8|fp8]" in text
    for choice in CHOICES["cache"]:
        assert choice in text


def test_help_says_what_is_required(help_of):
    """An option without which a verb is refused."""
    for name, command in COMMANDS.items():
        needed = [each for each in command.params if each.required and each.param_type_name == "option"]
        assert " ".join(help_of(name).split()).count("Required.") == len(needed), name
    text = " ".join(help_of("package").split())
    assert "-o, --triton REPOSITORY The model repository to write or extend. Required." in text


@pytest.mark.parametrize("verb", EXAMPLES)
def test_every_example_is_a_call_that_parses(verb):
    assert len(EXAMPLES[verb]) == 3
    for call, _ in EXAMPLES[verb]:
        arguments = shlex.split(call, comments=True)
        name = " ".join(arguments[:2]) if arguments[0] == "plugins" else arguments[0]
        COMMANDS[name].make_context(name, arguments[len(name.split()) :])


def test_every_verb_has_examples_and_a_place():
    assert set(COMMANDS) <= set(EXAMPLES)
    named = {name for names in VERBS.values() for name in names}
    assert named <= set(ROOT.commands)
    options = {option.name for command in COMMANDS.values() for option in command.params}
    assert {name for names in PANELS.values() for name in names} | RARE <= options | {"quiet", "verbose"}


@pytest.mark.parametrize("name", ["precision", "cache", "projections", "target", "backend", "variant"])
def test_a_choice_that_help_does_not_list_is_refused(name, bundles, tmp_path, run_cli):
    """And the choices that it lists are the ones that the error names."""
    bundle, flag = bundles("tiny-gqa").path, f"--{name}"
    calls = {
        "target": ("check", bundle),
        "backend": ("build-engine", bundle),
        "variant": ("package", bundle, "--triton", tmp_path / "models"),
    }
    call = calls.get(name, ("export", "tiny-mha", "-o", tmp_path / "out"))
    done = run_cli(*call, flag, "nonsense")
    assert done.code == 2
    assert [choice for choice in CHOICES[name] if choice not in done.err and choice != "auto"] == []


# -- Completion ------------------------------------------------------------------------------------

FACTORIES = '''
from mha_deploy import Deployable

def encoder() -> Deployable:
    """An encoder."""
    return Deployable(...)

def _hidden() -> Deployable:
    return Deployable(...)

def helper(x):
    return x

raise SystemExit("completion runs nothing")
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_model.py").write_text(FACTORIES)
    (tmp_path / "plain.py").write_text("def build():\n    return 1\n\ndef main():\n    print()\n")
    for name in ("bundles/a-fp16", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "bundles/a-fp16/manifest.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "wanted", "unwanted"),
    [
        ("mha-deploy va", {"validate"}, {"deploy"}),
        ("mha-deploy ", set(COMMANDS) - {"plugins build", "plugins list", "plugins where"}, set()),
        ("mha-deploy plugins ", {"build", "list", "where"}, {"deploy"}),
        ("mha-deploy validate --req", {"--require-run", "--require-fused"}, {"--json"}),
        ("mha-deploy export x --precision ", set(CHOICES["precision"]), {"bert-base"}),
        ("mha-deploy export x --precision=b", {"--precision=bf16"}, {"--precision=fp16"}),
        ("mha-deploy deploy bert", {"bert-base", "bert-large"}, {"gpt2"}),
        ("mha-deploy deploy ", {*(n for n in catalog_names() if "tiny" not in n), "my_model.py:"}, set()),
        ("mha-deploy deploy my_model.py:", {"my_model.py:encoder"}, {"my_model.py:helper"}),
        ("mha-deploy deploy plain.py:", {"plain.py:build"}, {"plain.py:main"}),
        ("mha-deploy deploy --overwrite tiny-m", {"tiny-mha", "tiny-mqa"}, set()),
        ("mha-deploy validate ", {"bundles/a-fp16", "other/"}, {"my_model.py"}),
        ("mha-deploy validate bundles/", {"bundles/a-fp16"}, {"other/"}),
        ("mha-deploy analyze bert-base --gpu ", {"h200"}, {"bert-base"}),
        ("mha-deploy bisect bundles/a-fp16 --runtime ", {"ort-cpu"}, set()),
        ("mha-deploy validate bundles/a-fp16 --engine ", set(), {"ort-cpu"}),
        ("mha-deploy completion ", {"bash", "zsh", "fish"}, set()),
        ("mha-deploy export x --weights ", set(), {"bert-base"}),
        ("mha-deploy nonsense ", set(), {"bert-base"}),
        ("mha-deploy deploy 'unclosed ", set(), {"bert-base"}),
    ],
)  # fmt: skip
def test_what_may_follow_is_offered(folder, line, wanted, unwanted):
    found = {each.partition("\t")[0] for each in complete(ROOT, line, "fish")}
    assert wanted <= found
    assert not unwanted & found


def shell_environment(folder):
    command = folder / "bin" / "mha-deploy"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m mha_deploy \"$@\"\n")
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "HOME": str(folder)}


def test_bash_completes_a_factory_behind_its_colon(folder):
    """There the word that is completed begins behind the colon."""
    line = "mha-deploy deploy my_model.py:en"
    code = f"""{script("bash")}
COMP_LINE='{line}' COMP_POINT={len(line)}
_mha_deploy mha-deploy en :
printf '%s\\n' "${{COMPREPLY[@]}}" """
    environment = shell_environment(folder)
    done = subprocess.run(
        ["bash", "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("encoder\n", "")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_a_bundle(folder):
    code = f"{script('fish')}\ncomplete -C 'mha-deploy validate bundles/'"
    environment = shell_environment(folder)
    done = subprocess.run(
        ["fish", "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert "bundles/a-fp16" in done.stdout


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_a_bundle(folder):
    """With the words of its line editor given, and what it would show printed."""
    code = f"""compdef() {{ }}
compadd() {{ print -rl -- $values }}
{script("zsh")}
words=(mha-deploy) LBUFFER='mha-deploy validate bun'
_mha_deploy"""
    environment = shell_environment(folder)
    done = subprocess.run(
        ["zsh", "-f", "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "bundles/a-fp16\n"


def test_an_unknown_shell_is_bad_input(run_cli):
    assert run_cli("completion", "powershell").code == 2
