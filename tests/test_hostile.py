"""Hostile and unlucky input: refused with a reason; no crash, no hang, no false verdict."""

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

import numpy as np
import onnx
import pytest
from bundle_edit import copy_of, edit_arrays, edit_manifest, engine_manifest, fill, manifest, rehash
from hostile_files import (
    OUTSIDE,
    all_forked,
    assert_orderly,
    assert_refused,
    attention,
    forked,
    graphs,
    model,
    places,
    tensor,
    with_value,
    without_trust,
    write_model,
)
from onnx import TensorProto, helper

import mha_deploy as md
from mha_deploy import output
from mha_deploy.bundle.cases import read_arrays, read_trace, write_arrays
from mha_deploy.bundle.folder import MANIFEST, MODEL, BundleWriter, sha256
from mha_deploy.bundle.manifest import Source
from mha_deploy.cli.tables import engine_renderable
from mha_deploy.cli.verbs import engine_to_dict
from mha_deploy.engine.engine import write_engine
from mha_deploy.runtime.tensorrt.engine_verdict import FusionStatus, NodeVerdict

ESCAPE = "\x1b[31mred"
VALUES = (None, -1, 0, 2.5, True, "x", ESCAPE, [], {}, [None], {"a": None}, 10**25, 1e308)
FEW = (None, -1, ESCAPE, [None], 10**25)
# Text and figures for people: any other value of the same type is as good.
FREE = {
    "note", "notes", "weights", "summary", "versions", "checks", "flops", "weight_bytes", "place", "seconds",
}  # fmt: skip


@pytest.fixture
def folder(bundles, tmp_path):
    """A bundle of its own, to alter."""
    return copy_of(bundles("tiny-mha"), tmp_path / "bundle")


# -- ONNX files ------------------------------------------------------------------------------------


def refused_graphs(tmp_path, known, *verb):
    folder = tmp_path / "models"
    folder.mkdir()
    protos = list(known.values())
    command = [verb[0], folder / MODEL, *verb[1:]]
    outcomes = all_forked([command] * len(protos), prepare=lambda number: write_model(folder, protos[number]))
    for name, outcome in zip(known, outcomes, strict=True):
        try:
            assert_refused(outcome)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2))])
def test_a_graph_that_no_exporter_writes_is_refused(tmp_path, part):
    some = dict(list(graphs().items())[part::3])
    refused_graphs(tmp_path, some, "fuse", "-o", tmp_path / "out.onnx", "--overwrite")
    assert not (tmp_path / "out.onnx").exists()


def test_weights_that_are_not_in_their_file_are_refused(tmp_path):
    refused_graphs(tmp_path, OUTSIDE, "inspect")


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb", [("inspect", "--json"), ("check",), ("export", "-o", "out")], ids=lambda v: v[0]
)
def test_every_verb_refuses_them(tmp_path, verb, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused_graphs(tmp_path, {**graphs(), **OUTSIDE}, *verb)


def test_such_a_model_in_memory_is_refused_too():
    for name in ("a cycle", "no heads", "2^60 elements", "a function of itself"):
        with pytest.raises(md.DeployError):
            md.fuse(graphs()[name])
        with pytest.raises(md.DeployError):
            md.open_runner(graphs()[name], "onnx-reference")


def test_a_usual_graph_is_not_refused(tmp_path):
    """With a branch, a loop, a function, weights in every field, and in a file beside it."""
    outside = TensorProto(name="e", data_type=TensorProto.FLOAT, dims=[4, 8])
    outside.data_location = TensorProto.EXTERNAL
    outside.external_data.add(key="location", value="beside.bin")
    typed = helper.make_tensor("t", TensorProto.FLOAT16, [2], np.array([1, 2], np.float16))
    packed = helper.make_tensor("p", TensorProto.INT4, [3], [1, 2, 3])
    nodes = [
        attention(),
        helper.make_node("Add", ["y", "e"], ["z"]),
        helper.make_node("Identity", ["z"], ["out"]),
    ]
    weights = [outside, typed, packed, tensor("none", np.zeros((0, 5), np.float32))]
    path = write_model(tmp_path, model(nodes, weights, outputs=("out",)))
    assert [node["kind"] for node in md.inspect(path).attention] == ["MHA"]


def test_a_file_that_cannot_be_a_model_is_refused(tmp_path):
    path = tmp_path / "model.onnx"
    makers = {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
        "empty": lambda: path.write_bytes(b""),
        "text": lambda: path.write_text("not a model"),
        "terabyte": lambda: os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 1 << 40),
    }
    for name, make in makers.items():
        make()
        assert forked("inspect", path).code == 2, name
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


# -- Manifests -------------------------------------------------------------------------------------


def opened_with(path, changed, call):
    """The outcomes of a call with each of these contents in a JSON file."""
    texts = [json.dumps(data) for data in changed]
    return all_forked([call] * len(texts), prepare=lambda number: path.write_text(texts[number]))


def changes(data, values):
    """Every place of plain data with every other value."""
    for at in places(data):
        for value in values:
            changed = with_value(data, at, value)
            if json.dumps(changed) != json.dumps(data):
                yield at, value, changed


def check_manifest(folder, call, step=1):
    """Every place with the few values, or with every n-th of all these changes."""
    before = json.loads((folder / MANIFEST).read_text())
    hashes = ("files", MODEL, "bytes"), ("files", MODEL, "sha256")
    found = [each for each in changes(before, FEW) if each[0][0] != "files" or each[0] in hashes]
    assert len(found) > 300
    found = found[::step]
    for (at, value, _), outcome in zip(
        found, opened_with(folder / MANIFEST, [each[2] for each in found], call), strict=True
    ):
        assert_orderly(outcome)
        if (isinstance(value, str) and value != ESCAPE) or FREE & set(map(str, at)):
            continue  # a name is as good as another, if it is text
        same = value in (True, 0) or at[-1] in ("seed", "axes", "min", "opt", "max") or at[0] == "traces"
        assert outcome.code == 2 or same, (at, value)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("tiny-mha", 4),
        *(pytest.param(f"tiny-{kind}", 1, marks=pytest.mark.slow) for kind in ("mha", "preallocated")),
    ],
)
def test_a_manifest_with_any_other_value_is_refused_or_harmless(bundles, tmp_path, name, step):
    folder = copy_of(bundles(name), tmp_path / "bundle")
    check_manifest(folder, lambda: md.open_bundle(folder), step)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["inspect", "check", "validate", "bisect"])
def test_every_verb_takes_any_manifest(bundles, tmp_path, verb):
    folder = copy_of(bundles("tiny-dynamic"), tmp_path / "bundle")
    options = {
        "inspect": ["--verify"],  # else the manifest is shown as it is
        "validate": ["--runtime", "onnx-reference", "--no-report"],
        "bisect": ["--runtime", "onnx-reference"],
    }
    check_manifest(folder, [verb, folder, *options.get(verb, ())])


CLAIMS = {
    "causal": lambda data: data["spec"].update(causal=True),
    "heads": lambda data: data["spec"].update(Hq=2, D=32),
    "fewer key heads": lambda data: data["spec"].update(Hkv=2),
    "scale": lambda data: data["spec"].update(scale=0.5),
    "softcap": lambda data: data["spec"].update(softcap=30.0),
    "width": lambda data: data["spec"].update(E=128),
    "cross": lambda data: data["spec"].update(attends="cross", axes={**data["spec"]["axes"], "T": 8}),
    "mask": lambda data: data["spec"].update(mask="padding"),
    "cache": lambda data: data["spec"].update(causal=True, cache="dynamic"),
    "weights": lambda data: data["spec"].update(weights=True),
    "precision": lambda data: data.update(precision="bf16"),
    "opset": lambda data: data.update(opset=24),
    "no attention": lambda data: data.update(attention=[]),
    "two attentions": lambda data: data.update(attention=data["attention"] * 2),
    "another attention": lambda data: data["attention"][0].update(name="other"),
    "causal attention": lambda data: data["attention"][0].update(is_causal=True),
    "attention of other heads": lambda data: data["attention"][0].update(Hq=8),
    "attention of another scale": lambda data: data["attention"][0].update(scale=0.125, softmax_scale=0.125),
    "a masked attention": lambda data: data["attention"][0].update(mask="bool"),
}


def test_a_manifest_that_does_not_describe_its_graph_is_refused(folder):
    before = json.loads((folder / MANIFEST).read_text())
    claims = []
    for claim in CLAIMS.values():
        data = json.loads(json.dumps(before))
        claim(data)
        claims.append(data)
    for name, outcome in zip(
        CLAIMS, opened_with(folder / MANIFEST, claims, lambda: md.open_bundle(folder)), strict=True
    ):
        assert outcome.code == 2, name
        assert "Traceback" not in outcome.err, (name, outcome.err)


def test_weights_in_a_file_that_is_not_listed_are_refused(folder):
    proto = onnx.load(folder / MODEL)
    weight = proto.graph.initializer[0]
    (folder / "weights.bin").write_bytes(onnx.numpy_helper.to_array(weight).tobytes())
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="weights.bin")
    (folder / MODEL).write_bytes(proto.SerializeToString())
    rehash(folder)
    with pytest.raises(md.DeployError, match="not list"):
        md.open_bundle(folder)


def test_small_external_weights_that_are_listed_validate(folder):
    proto = onnx.load(folder / MODEL)
    onnx.save(proto, folder / MODEL, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    edit_manifest(folder, lambda data: data["files"].update({"model.onnx.data": data["files"][MODEL]}))
    rehash(folder)
    assert md.check_parity(folder, md.open_runner(folder, "onnx-reference")).passed


@pytest.mark.slow
def test_small_external_weights_build(folder):
    pytest.importorskip("tensorrt_rtx")
    test_small_external_weights_that_are_listed_validate(folder)
    assert md.build_engine(folder, backend="tensorrt-rtx").manifest.all_fused


def test_manifests_that_are_no_files_are_refused(folder):
    path = folder / MANIFEST
    deep, text = "[" * 100_000, path.read_text()
    for name, make in {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "deep": lambda: path.write_text(deep),
        "deep object": lambda: path.write_text('{"a":' * 50_000),
        "a field twice": lambda: path.write_text('{"format": 1,' + text[1:]),
        "not a number": lambda: path.write_text('{"opset": NaN,' + text[1:]),
        "digits": lambda: path.write_text('{"format": ' + "9" * 10_000 + "}"),
        "terabyte": lambda: os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 1 << 40),
    }.items():
        path.unlink()
        make()
        outcome = forked("inspect", folder)
        assert outcome.code == 2, (name, outcome)
        assert "Traceback" not in outcome.err, name


def test_an_array_that_a_file_has_twice_is_refused(folder):
    """Readers differ in which one they take."""
    path = next((folder / "golden").iterdir())
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip()
    name, entry = next(item for item in json.loads(header).items() if item[0] != "__metadata__")
    header = header[:-1] + f",{json.dumps(name)}:{json.dumps(entry)}}}".encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    with pytest.raises(md.DeployError, match="more than once"):
        read_arrays(path)


SPECS = {
    "deep": "a = " + "[" * 5000 + "]" * 5000,
    "digits": "Hq = " + "9" * 10_000,
    "a large number": "Hq = 1000000000000000000000\nE = 64\n[axes]\nB = 1\nS = 8",
    "a billion heads": "Hq = 1000000000\nHkv = 1000000000\nD = 64\nE = 64\n[axes]\nB = 1\nS = 8",
    "an endless axis": "Hq = 4\nE = 64\n[axes]\nB = 1\nS = { min = 1, opt = 8, max = 9000000000000000000 }",
    "infinite": "Hq = 4\nE = 64\nscale = inf\n[axes]\nB = 1\nS = 8",
    "escape": 'Hq = 4\nE = 64\nsummary = "\\u001b[31m"\n[axes]\nB = 1\nS = 8',
    "no text": b"\xff\xfe\x00",
    "an empty file": "",
}


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_file_that_is_none_is_refused(tmp_path, name):
    path = tmp_path / "spec.toml"
    path.write_bytes(SPECS[name].encode() if isinstance(SPECS[name], str) else SPECS[name])
    with pytest.raises(md.DeployError):
        md.load_model(str(path))


def test_the_plan_of_a_matrix_is_read_strictly(tmp_path):
    path = tmp_path / "plan.toml"
    frame = 'precisions = ["fp16"]\nruntimes = [{name = "rtx"}]\n'
    for text in (
        SPECS["deep"],
        SPECS["digits"],
        f'models = ["\\u001b[31m"]\n{frame}',
        f"models = 3\n{frame}",
    ):
        path.write_text(text)
        with pytest.raises(md.DeployError, match="plan cannot be read"):
            md.matrix(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_weights_that_are_no_file_are_refused(tmp_path, ending):
    path = tmp_path / f"weights.{ending}"
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        make(path)
        with pytest.raises(md.DeployError, match=r"Not a regular file|can run code"):
            md.export("tiny-mha", tmp_path / "out", weights=path)
        path.unlink()
    assert not (tmp_path / "out").exists()


# -- Oracles ---------------------------------------------------------------------------------------


def noise(arrays):
    rng = np.random.default_rng(0)
    for name, array in arrays.items():
        if name.startswith("oracle/"):
            arrays[name] = rng.standard_normal(array.shape)
        elif name.startswith("eager/"):
            arrays[name] = np.full_like(array, 60000)


def scaled(factor):
    def change(arrays):
        for name in arrays:
            if name.startswith("oracle/"):
                arrays[name] = arrays[name] * factor

    return change


def one_element(arrays):
    arrays["eager/output"].flat[0] = 60000


@pytest.mark.parametrize(
    "change",
    [noise, scaled(1.5), scaled(1.2), scaled(0.9), scaled(0.0), scaled(-1.0), one_element],
    ids=["noise", "1.5", "1.2", "0.9", "zero", "negative", "one element"],
)
def test_an_oracle_that_eager_misses_is_refused(folder, change):
    for entry in json.loads((folder / MANIFEST).read_text())["golden"]:
        edit_arrays(folder, change, entry["name"])
    with pytest.raises(md.DeployError, match="rounding explains"):
        md.validate(folder, runtimes=["onnx-reference"], latency=False)


@pytest.mark.parametrize("factor", [0.0, 1.5], ids=["zero", "1.5"])
def test_a_trace_that_eager_misses_is_refused(bundles, tmp_path, factor):
    folder = copy_of(bundles("tiny-dynamic"), tmp_path / "bundle")
    path = folder / "traces" / "steps.safetensors"
    arrays = read_arrays(path)
    scaled(factor)(arrays)
    write_arrays(path, arrays)
    rehash(folder)
    bundle = md.open_bundle(folder)
    with pytest.raises(md.DeployError, match="rounding explains"):
        read_trace(path, bundle.manifest.spec, bundle.manifest.precision, Source.LAYER)


def test_a_bundle_that_is_replaced_while_it_is_validated_is_refused(bundles, folder, tmp_path):
    """Its graph and its golden cases do not belong together."""
    other = copy_of(bundles("tiny-gqa"), tmp_path / "other")

    def replace_it(*step):
        if other.exists():
            folder.rename(tmp_path / "gone")
            other.rename(folder)

    with pytest.raises(md.DeployError, match="replaced while"):
        md.validate(folder, runtimes=["onnx-reference"], probe=False, latency=False, on_step=replace_it)


# -- Engines ---------------------------------------------------------------------------------------


def engine_record(folder, plan):
    """The manifest of an engine that only TensorRT can read."""
    bundle = md.open_bundle(folder, verify=False).manifest
    node = NodeVerdict(
        node="attention", profile=0, status=FusionStatus.FUSED, kernels=("k",), sources=("log",)
    )
    return engine_manifest(
        [node],
        backend="tensorrt",
        version="10.3.0",
        gpu={"name": "NVIDIA H200", "compute_cap": "9.0"},
        profiles=[{name: str(axis) for name, axis in bundle.spec.axes.items()}],
        bundle_sha256=sha256(folder / MANIFEST),
        engine_sha256=hashlib.sha256(plan).hexdigest(),
        engine_bytes=len(plan),
    )


def write_plan(folder, content=b"", **options):
    plan = b"ftrt" + content
    return write_engine(folder / "engines" / "mine.engine", plan, engine_record(folder, plan), **options)


def inspect_engine(path):
    """What `inspect` does with an engine, without the command line around it."""
    from rich.console import Console

    found = md.inspect(path)
    (engine,) = found.engines
    json.dumps(engine_to_dict(engine))
    Console(width=100).print(engine_renderable(engine, details=True))


@pytest.mark.parametrize("values", [(None, ESCAPE), pytest.param(VALUES, marks=pytest.mark.slow)], ids=len)
def test_an_engine_manifest_with_any_other_value_is_refused_or_harmless(folder, values):
    path = write_plan(folder).path
    data = json.loads(path.with_suffix(".json").read_text())
    found = list(changes(data, values))
    outcomes = opened_with(
        path.with_suffix(".json"), [each[2] for each in found], lambda: inspect_engine(path)
    )
    for (at, value, _), outcome in zip(found, outcomes, strict=True):
        assert_orderly(outcome)
        harmless = at[0] in ("options", "gpu", "rebuilds")
        assert outcome.code == 2 or (value not in (None, ESCAPE)) or (value is None and harmless), (at, value)


def test_a_plan_that_was_never_read_is_not_verified(folder):
    assert not md.open_engine(write_plan(folder).path).is_confirmed
    done = forked("inspect", folder)
    assert done.code == 0, done.err
    assert "not verified" in done.out


@pytest.mark.parametrize("content", [b"", b"<!doctype html>", b"\x7fELF"], ids=["empty", "page", "program"])
def test_a_plan_that_is_none_is_refused(folder, content):
    path = write_plan(folder).path
    path.write_bytes(content)
    data = json.loads(path.with_suffix(".json").read_text())
    data |= {"engine_sha256": hashlib.sha256(content).hexdigest(), "engine_bytes": len(content)}
    path.with_suffix(".json").write_text(json.dumps(data))
    with pytest.raises(md.DeployError, match="plan"):
        md.open_engine(path)


def killed_at_rename(number):
    """End this process at the n-th rename, as the system does when memory is short."""
    rename, count = os.replace, iter(range(1000))

    def replace(*arguments):
        if next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*arguments)

    os.replace = replace


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("before", [True, False], ids=["replaced", "new"])
def test_plan_and_manifest_are_one_unit_for_a_killed_process(folder, number, before):
    if before:
        write_plan(folder, b"old")
    (done,) = all_forked([lambda: write_plan(folder, b"new")], prepare=lambda _: killed_at_rename(number))
    assert done.code == -signal.SIGKILL
    path = folder / "engines" / "mine.engine"
    if before or number:
        assert md.open_engine(path).manifest.engine_bytes == 7
        assert path.read_bytes() == (b"ftrtnew" if number else b"ftrtold")
    write_plan(folder, b"next")
    assert md.open_engine(path).manifest.engine_bytes == 8
    assert sorted(each.name for each in path.parent.iterdir()) == ["mine.engine", "mine.json"]


def test_two_builds_at_once_leave_one_whole_engine(folder):
    (folder / "engines").mkdir()
    children = []
    for name in (b"a", b"bb", b"ccc"):
        pid = os.fork()
        if pid == 0:
            try:
                for _ in range(20):
                    write_plan(folder, name)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(pid)
    for _ in range(20):
        path = folder / "engines" / "mine.engine"
        if path.exists():
            with suppress(md.DeployError):  # a reader may come between two renames
                md.open_engine(path)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0]
    md.open_engine(path)
    assert sorted(each.name for each in path.parent.iterdir()) == ["mine.engine", "mine.json"]


def test_an_engine_that_came_meanwhile_is_kept(folder):
    write_plan(folder, b"old")
    with pytest.raises(md.DeployError, match="in the meantime"):
        write_plan(folder, b"new", overwrite=False)
    assert (folder / "engines" / "mine.engine").read_bytes() == b"ftrtold"


def test_an_engine_of_a_bundle_that_was_replaced_is_refused(folder):
    record = engine_record(folder, b"ftrt")
    edit_manifest(folder, lambda data: data["notes"].append("another export"))
    with pytest.raises(md.DeployError, match="replaced"):
        write_engine(folder / "engines" / "mine.engine", b"ftrt", record)


# -- Output folders --------------------------------------------------------------------------------


def test_what_killed_processes_left_is_removed_and_what_others_write_stays(folder):
    stale, theirs = output.temporary_name(folder), output.temporary_name(folder)
    users = [
        folder.parent / f".bundle.{name}" for name in ("old-2025", "partial-notes", f"partial-{'a' * 20}")
    ]
    for each in (stale, theirs, *users):
        each.mkdir()
        (each / "model.onnx").write_bytes(b"half")
        os.utime(each, (1, 1))
    handle = os.open(theirs, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with BundleWriter(folder, overwrite=True):
        pass
    os.close(handle)
    assert not stale.exists()
    assert all((each / "model.onnx").exists() for each in (theirs, *users))


def test_a_bundle_that_a_killed_process_moved_aside_comes_back(folder):
    aside = output.temporary_name(folder, "old")
    aside.mkdir()
    folder.rename(aside / "bundle")
    with BundleWriter(folder):
        md.open_bundle(folder)
    assert not aside.exists()


@pytest.mark.parametrize("one_step", [True, False], ids=["exchange", "two renames"])
def test_a_file_that_comes_at_the_last_moment_is_kept(folder, monkeypatch, one_step):
    exchange, calls = output.exchange, []

    def late(new, place):
        if not calls:
            (folder / "mine.txt").write_text("mine")
        calls.append(new)
        return one_step and exchange(new, place)

    monkeypatch.setattr(output, "exchange", late)
    with BundleWriter(folder, overwrite=True) as writer:
        fill(writer.path, "tiny-mqa")
        with pytest.raises(md.DeployError, match="in the meantime"):
            writer.finish(manifest("tiny-mqa"))
    assert (folder / "mine.txt").read_text() == "mine"
    assert md.open_bundle(folder).manifest.spec.name == "tiny-mha"
    assert [each.name for each in folder.parent.iterdir()] == ["bundle"]


def test_a_report_of_somebody_else_is_kept(folder):
    for name in ("bench.html", "bench.json"):
        (folder / name).write_text("mine")
        with pytest.raises(md.DeployError, match="did not write"):
            md.BenchReport(()).save(folder)
        assert (folder / name).read_text() == "mine"
        (folder / name).unlink()
    for _ in range(2):
        md.BenchReport(()).save(folder)


# -- Code ------------------------------------------------------------------------------------------

CODE = """
import pathlib
pathlib.Path({mark!r}).write_text("was here")
def build():
    raise RuntimeError
"""


@pytest.fixture
def evil(own_bundles, tmp_path):
    """A bundle whose factory leaves a mark, and the mark."""
    folder, mark = copy_of(own_bundles(), tmp_path / "bundle"), tmp_path / "mark"
    (tmp_path / "evil.py").write_text(CODE.format(mark=str(mark)))
    edit_manifest(folder, lambda data: data["spec"].update(factory=f"{tmp_path / 'evil.py'}:build"))
    return folder, mark


def test_the_code_that_a_bundle_names_does_not_run(evil):
    from mha_deploy.exporter.own_model import reopen_user_module

    manifest = md.open_bundle(evil[0]).manifest

    def reopen():
        reopen_user_module(manifest.spec, manifest.precision)

    assert_refused(all_forked([reopen], prepare=lambda number: without_trust())[0], "trust_code=True")
    assert not evil[1].exists()
    all_forked([reopen], prepare=lambda number: md.configure(trust_code=True))
    assert evil[1].exists()


@pytest.mark.slow
def test_no_verb_runs_the_code_of_a_bundle(evil):
    folder, mark = evil
    verbs = [
        ("validate", folder, "--fresh", "1", "--no-report", "--runtime", "onnx-reference"),
        ("validate", folder, "--sweep", "--no-report", "--runtime", "onnx-reference"),
        ("bisect", folder, "--runtime", "onnx-reference"),
        ("validate", folder, "--runtime", "eager", "--no-report"),
        ("inspect", folder),
    ]
    for verb, outcome in zip(verbs, all_forked(verbs, prepare=lambda number: without_trust()), strict=True):
        assert_orderly(outcome)
        assert not mark.exists(), verb
    permitted = forked(*verbs[0], "--trust-code")
    assert mark.exists(), permitted


# -- Results on stdout -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["inspect", "absent"], 2),
        (["check", "absent"], 2),
        (["validate", "absent"], 2),
        (["build-engine", "absent"], 2),
        (["bisect", "absent"], 2),
        (["fuse", "absent.onnx", "-o", "out.onnx"], 2),
        (["models", "--nonsense"], 2),
        (["analyze", "no-such-model"], 2),
        (["export", "tiny-nothing", "-o", "out"], 2),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_json_is_printed_on_failure(tmp_path, monkeypatch, arguments, code):
    monkeypatch.chdir(tmp_path)
    outcome = forked(*arguments, "--json")
    assert outcome.code == code
    error = json.loads(outcome.out)["error"]
    assert error["exit_code"] == code
    assert error["what"]
    assert "error" in outcome.err.lower()


@pytest.mark.parametrize("version", ["-1", "99", "0", "10.99", "1e1", "10.3.x", "", "10..3", "١٠"])
def test_a_version_that_never_existed_is_refused(bundles, version):
    with pytest.raises(md.DeployError):
        md.check(bundles("tiny-mha"), "tensorrt", version)


def test_versions_that_exist_are_answered(bundles):
    for target, version in (
        ("tensorrt", "8.6"),
        ("tensorrt", "10.14.1"),
        ("tensorrt", "11.4"),
        ("tensorrt-rtx", "1.7"),
    ):
        assert md.check(bundles("tiny-mha"), target, version)


def test_names_of_files_are_printed_without_their_control_characters(tmp_path):
    path = tmp_path / f"{ESCAPE}\x07.onnx"
    path.write_bytes(b"nothing")
    for outcome in all_forked(
        [("inspect", path), ("inspect", path, "--json"), ("analyze", f"{ESCAPE}.toml")]
    ):
        assert_refused(outcome)


def test_a_name_that_is_not_utf_8_is_refused(tmp_path):
    """ONNX, ONNX Runtime and safetensors do not take it, and nothing is written until they are asked."""
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    commands = [("export", "tiny-mha", "-o", odd), ("inspect", odd, "--json"), ("fuse", odd, "-o", odd)]
    for outcome in all_forked(commands):
        assert_refused(outcome, "not valid UTF-8", "\\udcff")
    with pytest.raises(md.DeployError, match="UTF-8"):
        md.export("tiny-mha", odd)
    assert list(tmp_path.iterdir()) == []


def streamed(command, **options):
    """A command of a shell with a fresh interpreter."""
    program = f"set -o pipefail; '{sys.executable}' -m mha_deploy {command}"
    return subprocess.run(["bash", "-c", program], capture_output=True, text=True, **options)


def test_a_stream_of_ascii_is_no_error():
    done = streamed("models --all", env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "bert-base" in done.stdout
