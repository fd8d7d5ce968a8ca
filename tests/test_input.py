"""One way to read: names, cells, lines, reports and configurations that anybody may have written."""

import itertools
import json
import os
import pickle
import shutil
import socket
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from bundle_edit import copy_of
from fault_harness import run
from hostile_files import all_forked, places, with_value

import mha_deploy as md
from mha_deploy.bundle.folder import sha256
from mha_deploy.engine.engine import engine_path
from mha_deploy.files import PathPart
from mha_deploy.model.huggingface import read_config, spec_from_config
from mha_deploy.regression.matrix import read_plan, run_matrix
from mha_deploy.regression.record import Line, read_lines

sys.path.append(str(Path(__file__).resolve().parent / "report"))
from example_report import failing, passing

VALUES = (None, -1, 2.5, True, "x", "\x1b[31m", [], {}, [None], {"a": None}, 10**25, 1e308)

# -- Names that become paths -----------------------------------------------------------------------

NAMES = [
    "", ".", "..", "../x", "../../x", "/abs", "a/b", "a\\b", "C:x", "a\0b", "a\nb", "\x1b[31m", "-rf",
    "--help",
    ".hidden", "~", " a", "a ", "a.", "con", "NUL.txt", "lpt1", "a\u202eb", "a\u200bb", "\ud800", "x" * 256,
    "é" * 150,
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_that_is_no_part_of_a_path_is_refused(tmp_path, name):
    with pytest.raises(md.DeployError) as caught:
        PathPart(name)
    assert caught.value.hint
    with pytest.raises(md.DeployError):
        engine_path(tmp_path, name)
    if name:  # without one, that of the model is taken
        entry = {"model": "tiny-gqa", "name": name}
        with pytest.raises(md.DeployError):
            md.matrix({"models": [entry], "runtimes": [{"name": "a"}]}, tmp_path / "out", jobs=1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["../up", "a/b", "-rf", ".hidden", "con", "x" * 300], ids=lambda name: name[:8]
)
def test_such_a_name_is_refused_for_a_package(bundles, tmp_path, name):
    pytest.importorskip("tritonclient")
    with pytest.raises(md.DeployError):
        md.package(bundles("tiny-gqa"), tmp_path / "models", name=name, runtimes=["ort-cpu"])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["a", "bert-base", "B=2,S=33", "x_1.2", "model (2)", "größe", "a" * 200])
def test_a_usual_name_is_a_part_of_a_path(name):
    assert PathPart(name) == name


def test_a_name_has_one_form():
    assert PathPart("e\u0301") == "\u00e9"


# -- Cells of a matrix -----------------------------------------------------------------------------


class Workers:
    """Workers whose cells are judged as this report says."""

    def __init__(self, report):
        self.report, self.ran = report, 0

    def probe(self, runtime, gpu):
        return {"version": "1.0", "gpu": ""}

    def run(self, tasks):
        for task in tasks:
            self.ran += 1
            report = json.loads(json.dumps(self.report))
            digest = sha256(Path(task.request["bundle"]) / "manifest.json")
            report["model"] |= {"bundle_sha256": digest, "precision": "fp16"}
            report["engines"][0]["version"] = "1.0"
            status = report["verdict"]["outcome"]
            yield task, {"status": status, "why": "", "seconds": 1.0, "engine_sha256": "1", "report": report}


def refuse_export(entry, precision, target):
    raise md.DeployError("There is no such model.", got=entry.model, hint="another")


@pytest.fixture
def plan(bundles):
    return read_plan({"models": [str(bundles("tiny-gqa").path)], "runtimes": [{"name": "rtx"}]})


def matrix(plan, folder, report):
    workers = Workers(report)
    return run_matrix(plan, folder, workers, refuse_export), workers.ran


@pytest.mark.parametrize("report", [passing, failing])
def test_a_cell_that_nobody_changed_is_kept(plan, tmp_path, report):
    first, ran = matrix(plan, tmp_path, report())
    again, more = matrix(plan, tmp_path, report())
    assert (ran, more) == (1, 0)
    assert [cell.status for cell in first.cells] == [cell.status for cell in again.cells]


def changed_cells(data):
    yield {**data, "status": "passed"}
    yield {**data, "status": "not verified"}
    yield with_value(data, ("report", "verdict", "outcome"), "passed") | {"status": "passed"}
    yield with_value(data, ("report", "verdict", "outcome"), "not verified") | {"status": "not verified"}
    yield {**data, "status": "passed", "report": None}
    yield {**data, "status": "passed", "report": {}}
    yield {**data, "status": "passed", "report": {"engines": [], "model": {}}}
    yield {**data, "engine_sha256": "2"}
    yield {**data, "more": 1}
    yield {**data, "seconds": "x"}
    yield {**data, "tool": 3}
    yield [data]


def test_a_cell_that_was_changed_is_done_again(plan, tmp_path):
    matrix(plan, tmp_path, failing())
    (path,) = (tmp_path / "cells").iterdir()
    before = json.loads(path.read_text())
    found = list(changed_cells(before))
    # Also with a hash that fits: the report shows another status.
    for data in [*found, *({**each, "sha256": digest_of(each)} for each in found[:6])]:
        if data == before:
            continue
        head = {} if isinstance(data, list) or data.get("tool") == 3 else {"tool": before["tool"]}
        path.write_text(json.dumps({**head, **data} if head else before | {"status": "x"}))
        done, ran = matrix(plan, tmp_path, failing())
        assert ran == 1, data
        assert [cell.status for cell in done.cells] == ["failed"]


def digest_of(data):
    from mha_deploy.regression.matrix import _digest

    return _digest({name: value for name, value in data.items() if name != "sha256"})


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"\xff", b'{"a": 1, "a": 2}', b"null"], ids=len)
def test_a_cell_that_is_none_of_ours_is_not_replaced(plan, tmp_path, content):
    matrix(plan, tmp_path, passing())
    (path,) = (tmp_path / "cells").iterdir()
    path.write_bytes(content)
    with pytest.raises(md.DeployError) as caught:
        matrix(plan, tmp_path, passing())
    assert caught.value.hint
    assert path.read_bytes() == content


@pytest.mark.parametrize("what", ["cells", "file"])
def test_cells_stay_in_their_folder(plan, tmp_path, what):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    matrix(plan, out, passing())
    (path,) = (out / "cells").iterdir()
    if what == "cells":
        shutil.rmtree(out / "cells")
        (out / "cells").symlink_to(elsewhere)
    else:
        path.unlink()
        path.symlink_to(elsewhere / "x")
    with pytest.raises(md.DeployError):
        matrix(plan, out, passing())
    assert os.listdir(elsewhere) == []


def forged(made, **changes):
    """The data of a matrix with other values in its cell."""
    data = json.loads(json.dumps(made.to_dict()))
    data["cells"][0] |= changes
    return data


@pytest.mark.parametrize("status", ["passed", "not verified"])
@pytest.mark.parametrize("change", [{}, {"report": None}, {"report": {}}], ids=["", "no report", "empty"])
def test_a_comparison_takes_the_status_that_the_report_of_a_cell_shows(plan, tmp_path, status, change):
    good, _ = matrix(plan, tmp_path / "good", passing())
    bad, _ = matrix(plan, tmp_path / "bad", failing())
    made = forged(bad, status=status, **change)
    if not change:
        made["cells"][0]["report"]["verdict"]["outcome"] = status
    found = md.compare(good.to_dict(), made)
    assert ("verdict", "cell") in {(each.section, each.subject) for each in found.regressions}
    assert not [each for each in md.compare(bad.to_dict(), made).changes if each.level == "improvement"]


def test_so_it_is_where_an_engine_was_not_run(plan, tmp_path):
    made, _ = matrix(plan, tmp_path, passing())
    unrun = forged(made, status="passed")
    for name in ("verdict", "parity", "decode"):
        del unrun["cells"][0]["report"][name]
    assert not md.compare(made.to_dict(), unrun).passed


# -- Any value in any place ------------------------------------------------------------------------


def refused_or_read(call, data, path, step):
    """Read every n-th change of plain data: whatever is raised is an error of a user."""
    count = 0
    for number, (at, value) in enumerate((at, value) for at in places(data) for value in VALUES):
        if number % step == 0:
            path.write_text(json.dumps(with_value(data, at, value)))
            count += 1
            with suppress(md.DeployError):
                call(path)
    assert count > 50


def test_a_report_with_any_other_value_is_refused_or_compared(tmp_path):
    report = passing()
    for name in ("heatmaps", "conformance", "range"):
        report[name] = type(report[name])() if isinstance(report[name], list) else None
    refused_or_read(lambda path: md.compare(path, path), report, tmp_path / "report.json", 61)


def test_a_matrix_with_any_other_value_is_refused_or_compared(plan, tmp_path):
    made, _ = matrix(plan, tmp_path / "out", passing())
    data = json.loads(json.dumps(made.to_dict()))
    data["cells"][0]["report"] = {name: data["cells"][0]["report"][name] for name in ("engines", "verdict")}
    refused_or_read(lambda path: md.compare(path, path), data, tmp_path / "matrix.json", 11)


def test_a_line_with_any_other_value_is_refused_or_read(tmp_path):
    data = {
        "kind": "time", "run": "1", "created": "x", "commit": "", "command": ["b"], "versions": {"a": "1"},
        "platform": "Linux", "gpu": "", "driver": "", "model": "m", "precision": "fp16", "bundle": "b",
        "bundle_sha256": "0" * 64, "runtime": "r", "backend": "r 1", "sizes": {"B": 1}, "samples_us": [1.0],
        "conditions": {"throttled_by": [], "sm_mhz": 1, "sm_mhz_max": 2}, "outcome": "not verified",
        "reason": {"kind": "not timed", "got": "x", "names": ["y"], "numbers": {"streams": 1}},
        "timing": {"calls_per_sample": 1, "slots": 1, "graph": True, "stable": True, "host_us": 1.0},
    }  # fmt: skip
    msgspec.convert(data, Line)

    def read(path):
        for line in read_lines(path):
            assert isinstance(line.is_throttled, bool)
            assert line.title + line.place

    refused_or_read(read, data, tmp_path / "record.jsonl", 1)


def configurations():
    shared = {
        "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 128,
        "rope_theta": 1e4, "head_dim": 16, "num_key_value_heads": 2,
    }  # fmt: skip
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
    yield {"model_type": "llama", **shared, "rope_scaling": scaling}
    yield {"model_type": "gemma2", **shared, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0,
           "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    inner = {"alibi": False, "softmax_scale": 0.5, "kv_n_heads": 2, "clip_qkv": None}
    yield {"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 2, "attn_config": inner}
    yield {"model_type": "granite", **shared, "attention_multiplier": 0.5}
    yield {"model_type": "falcon", **shared, "multi_query": True, "new_decoder_architecture": False}
    yield {"model_type": "vit", **shared, "image_size": 32, "patch_size": 8}


@pytest.mark.parametrize("config", list(configurations()), ids=lambda config: config["model_type"])
def test_a_configuration_with_any_other_value_is_refused_or_read(tmp_path, config):
    def read(path):
        spec_from_config(read_config(path.parent), 1, name="layer", bias=False)

    refused_or_read(read, config, tmp_path / "config.json", 1)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": 1, "a": 2}', "NaN", "[]", "", "\x00"], ids=len)
def test_a_configuration_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(md.DeployError):
        read_config(tmp_path)


# -- Pipes -----------------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "{bundle}"),
        ("compare", "{pipe}", "{pipe}"),
        ("matrix", "{pipe}", "-o", "{out}", "--jobs", "1"),
        ("bench", "--replay", "{pipe}:1"),
        ("export", "{pipe}.toml", "-o", "{out}"),
        ("export", "--hf", "{folder}", "-o", "{out}"),
        ("analyze", "tiny-mha", "--heads", "{out}.png", "--inputs", "{pipe}"),
        ("export", "tiny-mha", "--weights", "{pipe}.safetensors", "-o", "{out}"),
        ("export", "tiny-mha", "--weights", "{folder}", "-o", "{out}"),
        ("fuse", "{pipe}.onnx", "-o", "{out}"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_pipe_does_not_block(bundles, tmp_path, command):
    folder = tmp_path / "folder"
    folder.mkdir()
    bundle = copy_of(bundles("tiny-mha"), tmp_path / "bundle")
    (bundle / "manifest.json").unlink()
    os.mkfifo(bundle / "manifest.json")
    for name in ("pipe", "pipe.toml", "pipe.safetensors", "pipe.onnx"):
        os.mkfifo(tmp_path / name)
    for name in ("config.json", "model.safetensors.index.json"):
        os.mkfifo(folder / name)
    known = {"bundle": bundle, "pipe": tmp_path / "pipe", "out": tmp_path / "out", "folder": folder}
    outcome = run(*(part.format(**known) for part in command))
    assert outcome.code == 2, outcome
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "out").exists()


# -- Anything in the place of a file or a folder ----------------------------------------------------


def truncated_to(size):
    def make(path):
        with path.open("wb") as file:
            file.truncate(size)

    return make


def socket_at(path):
    with socket.socket(socket.AF_UNIX) as opened:
        before = os.getcwd()
        os.chdir(path.parent)  # the names of sockets are short
        opened.bind(path.name)
        os.chdir(before)


def zipped(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", EVIL)


class Evil:
    """Leaves a file where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("unpickled",)


EVIL = pickle.dumps(Evil())
THINGS = {
    "absent": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 20),
    "deep JSON": lambda path: path.write_bytes(b'{"a":' * 100_000),
    "an object": lambda path: path.write_bytes(b"{}"),
    "a list": lambda path: path.write_bytes(b"[1]"),
    "a number without end": lambda path: path.write_bytes(b'{"format": 1' + b"0" * 5000 + b"}"),
    "deep TOML": lambda path: path.write_bytes(b"a=" + b"[" * 100_000),
    "TOML": lambda path: path.write_bytes(b'name = "\\u001b[31m"\na = 1979-05-27T07:32:00Z\n'),
    "another encoding": lambda path: path.write_bytes("größe = 'é'".encode("utf-16")),
    "pickle": lambda path: path.write_bytes(EVIL),
    "archive of a pickle": zipped,
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "socket": socket_at,
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "terabyte": truncated_to(1 << 40),
}
COMMANDS = [
    ("inspect", "IT"),
    ("check", "IT"),
    ("check", "IT.onnx"),
    ("fuse", "IT.onnx", "-o", "out.onnx"),
    ("export", "IT.onnx", "-o", "out"),
    ("export", "IT.toml", "-o", "out"),
    ("export", "IT.py:build", "-o", "out"),
    ("export", "--hf", "IT", "-o", "out/of/folders"),
    ("export", "tiny-mha", "--weights", "IT.safetensors", "-o", "out/of/folders"),
    ("export", "tiny-mha", "--weights", "IT.pt", "-o", "out"),
    ("export", "tiny-mha", "--weights", "IT", "-o", "out"),
    ("export", "GOOD/model.onnx", "--input", "x=IT.npy", "-o", "out"),
    ("analyze", "IT.toml"),
    ("analyze", "--hf", "IT"),
    ("analyze", "tiny-mha", "--heads", "out.png", "--inputs", "IT.npz"),
    ("validate", "IT", "--runtime", "ort-cpu"),
    ("bisect", "IT", "--runtime", "ort-cpu"),
    ("build-engine", "IT"),
    ("compare", "IT.json", "GOOD"),
    ("compare", "IT#rtx", "IT#rtx"),
    ("compare", "IT.engine", "IT.engine"),
    ("matrix", "IT.toml", "-o", "out", "--jobs", "1"),
    ("package", "IT", "--triton", "out"),
    ("bench", "IT"),
    ("bench", "--replay", "IT:1"),
    ("deploy", "IT.toml", "-o", "out"),
]


PARTS = 5  # every part has all verbs and all things


@pytest.mark.sweep(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_anything_in_the_place_of_an_input_is_refused(bundles, tmp_path, part):
    """By every verb: with a reason, in little time, and without a trace of it."""
    pairs = itertools.product(enumerate(COMMANDS), enumerate(THINGS))
    cases = [(command, thing) for (i, command), (j, thing) in pairs if (i + j) % PARTS == part]
    good = bundles("tiny-mha").path
    folder = tmp_path / "folder"
    folder.mkdir()
    for command, thing in cases:
        for ending in {Path(each.rpartition(":")[0] or each).suffix for each in command if "IT" in each}:
            path = folder / f"{thing}{ending}"
            if not os.path.lexists(path):
                THINGS[thing](path)
    (folder / "__pycache__").mkdir()  # of factories: Python's own
    before = sorted(os.listdir(folder))
    commands = [
        [each.replace("GOOD", str(good)).replace("IT", thing) for each in command] for command, thing in cases
    ]
    done = all_forked(commands, prepare=lambda _: os.chdir(folder))
    for command, outcome in zip(commands, done, strict=True):
        assert outcome.code == 2, (command, outcome)
        assert "  try: " in outcome.err, (command, outcome)
        assert "Traceback" not in outcome.err, (command, outcome)
        assert "\x1b" not in outcome.err, (command, outcome)
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize("name", ["mha-deploy.toml", "pyproject.toml"])
def test_anything_in_the_place_of_requirements_is_refused_or_read(tmp_path, name):
    things = [thing for thing in THINGS if thing != "absent"]
    for thing in things:
        (tmp_path / thing).mkdir()
        THINGS[thing](tmp_path / thing / name)
    commands = [("export", "nothing-there", "-o", "out")] * len(things)
    done = all_forked(commands, prepare=lambda number: os.chdir(tmp_path / things[number]))
    for thing, outcome in zip(things, done, strict=True):
        assert (outcome.code, "  try: " in outcome.err) == (2, True), (thing, outcome)
        assert "Traceback" not in outcome.err, (thing, outcome)
        assert "\x1b" not in outcome.err, (thing, outcome)
        assert os.listdir(tmp_path / thing) == [name]


# -- Packages --------------------------------------------------------------------------------------


@pytest.fixture
def package(bundles, tmp_path):
    pytest.importorskip("tritonclient")

    def make(**options):
        return md.package(bundles("tiny-gqa"), tmp_path / "models", runtimes=["ort-cpu"], **options).path

    return make


def test_what_was_added_to_a_package_by_hand_is_kept(package):
    place = package()
    mine = {"2/model.py": "mine", "2/data/x": "x", "notes.txt": "notes", "1/extra.txt": "extra"}
    for name, text in mine.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    (place / "3").mkdir()
    (place / "latest").symlink_to("2")
    for _ in range(2):
        package(overwrite=True, instances=2)
        assert {name: (place / name).read_text() for name in mine} == mine
        assert (place / "3").is_dir()
        assert os.readlink(place / "latest") == "2"
        assert "count: 2" in (place / "config.pbtxt").read_text()
    assert sorted(os.listdir(place.parent.parent)) == ["models"]


@pytest.mark.parametrize("name", ["config.pbtxt", "README.md", "1/model.py"])
def test_what_was_changed_in_a_package_by_hand_is_not_lost(package, name):
    place = package()
    text = (place / name).read_text() + "\n# mine\n"
    (place / name).write_text(text)
    with pytest.raises(md.DeployError) as caught:
        package(overwrite=True)
    assert name in caught.value.got
    assert (place / name).read_text() == text


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"tool": {}, "files": {"../../x": "0"}}', '{"tool": {}, "files": 3}', "[" * 10_000],
    ids=len,
)
def test_the_list_of_a_package_is_read_strictly(package, content):
    place = package()
    (place / "mha-deploy.json").write_text(content)
    with pytest.raises(md.DeployError):
        package(overwrite=True)
    assert (place / "mha-deploy.json").read_text() == content


def test_a_model_behind_a_link_is_not_replaced(package, tmp_path):
    place = package()
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(md.DeployError):
        package(overwrite=True)
    assert place.is_symlink()
