"""Completion in bash, zsh and fish: verbs, options, choices, catalog names, factories in a file, bundles.

The scripts pass the line up to the cursor; what is printed for it are the words that may stand there, one per
line, for zsh and fish with a tab and a description. Where nothing is printed, the shell completes files.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mha_deploy.cli.help import choices_of
from mha_deploy.files import MANIFEST

SHELLS = ("bash", "zsh", "fish")
_MOST_ENTRIES = 1000  # of a folder that is searched for bundles

_SCRIPTS = {
    "bash": """\
_mha_deploy() {
    local IFS=$'\\n'
    COMPREPLY=($("$1" completion bash --line "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[:/=] ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -o default -F _mha_deploy mha-deploy
""",
    "zsh": """\
#compdef mha-deploy
_mha_deploy() {
    local -a found values shown
    found=("${(@f)$(${(Q)words[1]} completion zsh --line "$LBUFFER" 2>/dev/null)}")
    if [[ -z $found[1] ]]; then
        _files
        return
    fi
    values=("${(@)found%%$'\\t'*}")
    shown=("${(@)found//$'\\t'/  }")
    compadd -l -d shown -a values
}
if [[ $funcstack[1] == _mha_deploy || $funcstack[1] == _mha-deploy ]]; then
    _mha_deploy "$@"
else
    compdef _mha_deploy mha-deploy
fi
""",
    "fish": """\
function __mha_deploy_complete
    set -l words (commandline -opc)
    set -l found ($words[1] completion fish --line (commandline -cp) 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c mha-deploy -f -a '(__mha_deploy_complete)'
""",
}


def script(shell: str) -> str:
    """What a shell evaluates to complete the command."""
    return _SCRIPTS[shell]


def complete(root: Any, line: str, shell: str) -> list[str]:
    """What may stand at the end of a line."""
    words, begun = _split(line)
    found = [
        (value, about) for value, about in _candidates(root, words[1:], begun) if value.startswith(begun)
    ]
    if shell == "bash":
        # There a word begins behind each colon and equals sign.
        skipped = max(begun.rfind(":"), begun.rfind("=")) + 1
        return [value[skipped:] for value, _ in found]
    return [f"{value}\t{about}" if about else value for value, about in found]


def _split(line: str) -> tuple[list[str], str]:
    """The whole words of a line, and the one that is begun at its end."""
    for closing in ("", "'", '"'):
        with suppress(ValueError):
            words = shlex.split(f"{line}{closing}")
            if closing or (line and not line[-1].isspace()):
                return words[:-1], words[-1] if words else ""
            return words, ""
    return line.split(), ""


def _candidates(root: Any, words: list[str], begun: str) -> Iterator[tuple[str, str]]:
    command, path = root, ""
    words = list(words)
    while hasattr(command, "commands"):
        name = next(iter(words), None)
        if name is None:
            for each, found in command.commands.items():
                yield each, _brief(found.help)
            if begun.startswith("-"):
                yield from (("--help", ""), ("--version", "")) if command is root else (("--help", ""),)
            return
        command, path = command.commands.get(words.pop(0)), f"{path} {name}".strip()
    if command is None:
        return
    options = {flag: each for each in command.params for flag in (*each.opts, *each.secondary_opts)}
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    given, waiting = 0, None
    for word in words:
        if waiting is not None:
            waiting = None
        elif word.startswith("-"):
            waiting = options.get(word)
            waiting = None if waiting is None or waiting.is_flag or waiting.count else waiting
        else:
            given += 1
    flag, equals, _ = begun.partition("=")
    if waiting is not None:
        yield from _values(path, waiting, begun)
    elif equals and flag in options:
        start = f"{flag}="
        for value, about in _values(path, options[flag], begun.removeprefix(start)):
            yield f"{start}{value}", about
    elif begun.startswith("-"):
        yield from ((name, _brief(each.help)) for name, each in options.items() if name.startswith("--"))
        yield "--help", "Show the help."
    elif arguments:
        yield from _values(path, arguments[min(given, len(arguments) - 1)], begun)


def _values(verb: str, parameter: Any, begun: str) -> Iterator[tuple[str, str]]:
    """What an option or argument may be; nothing for files, which the shell completes."""
    name = str(parameter.name)
    if choices := choices_of(verb, name):
        yield from ((choice, "") for choice in choices)
    elif name == "shell":
        yield from ((shell, "") for shell in SHELLS)
    elif name == "model":
        yield from _models(begun)
    elif name in ("bundle", "bundles", "old", "new", "path"):
        yield from _bundles(begun)
    elif name == "gpu":
        from mha_deploy.analysis.roofline import gpu_names

        yield from ((each, "") for each in gpu_names())
    elif name in ("runtime", "runtimes"):
        yield from ((each, "") for each in ("ort-cpu", "ort-cuda", "onnx-reference", "eager"))


def _models(begun: str) -> Iterator[tuple[str, str]]:
    """Catalog names, the factories behind `file.py:`, and the files that hold models."""
    from mha_deploy.model.catalog import catalog_names, factories_in

    file, colon, _ = begun.rpartition(":")
    if colon:
        yield from ((f"{file}:{name}", _brief(about)) for name, about in factories_in(Path(file)))
        return

    yield from ((name, "catalog") for name in catalog_names() if not name.startswith("tiny") or begun)
    folder, slash, _ = begun.rpartition("/")
    for path in _entries(Path(folder or ("/" if slash else "."))):
        shown = f"{folder}{slash}{path.name}"
        if path.is_dir() and not path.name.startswith("."):
            yield f"{shown}/", "folder"
        elif path.suffix == ".py" and factories_in(path):
            yield f"{shown}:", "Python file"
        elif path.suffix in (".onnx", ".toml"):
            yield shown, "file"


def _bundles(begun: str) -> Iterator[tuple[str, str]]:
    """Folders with a manifest, and folders on the way to them."""
    folder, slash, _ = begun.rpartition("/")
    for path in _entries(Path(folder or ("/" if slash else "."))):
        shown = f"{folder}{slash}{path.name}"
        if (path / MANIFEST).is_file():
            yield shown, "bundle"
        elif path.is_dir() and not path.name.startswith("."):
            inside = [each.name for each in _entries(path) if (each / MANIFEST).is_file()]
            yield from ((f"{shown}/{name}", "bundle") for name in inside)
            if not inside:
                yield f"{shown}/", "folder"
        elif path.suffix in (".onnx", ".engine", ".json"):
            yield shown, "file"


def _entries(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            names = [each.name for each, _ in zip(found, range(_MOST_ENTRIES), strict=False)]
    except OSError:
        return []
    return [folder / name for name in sorted(names) if name.isprintable()]


def _brief(text: str | None) -> str:
    """The first sentence, on one line."""
    return " ".join((text or "").split()).partition(". ")[0][:80]
