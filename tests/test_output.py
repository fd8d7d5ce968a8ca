"""One way to write: what is not ours stays, nothing leaves its folder, a kill leaves the old or the new."""

import ast
import ctypes
import hashlib
import json
import os
import resource
import shutil
import signal
import stat
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from bundle_edit import copy_of, fill, manifest, small_bundle
from fault_harness import assert_refused, run
from hostile_files import attention, model
from source_trees import nodes_of, source_trees

import mha_deploy as md
from mha_deploy import output
from mha_deploy.analysis.similarity import similarity_from_heads
from mha_deploy.bundle.folder import BundleWriter, open_bundle
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.options import EngineOptions
from mha_deploy.regression.record import Line, append_lines, read_lines

sys.path.append(str(Path(__file__).resolve().parent / "report"))
from example_report import passing

# -- Who writes ------------------------------------------------------------------------------------


def line(run="1"):
    return msgspec.convert(
        {
            "kind": "time", "run": run, "created": "2026-11-16T05:00:00Z", "commit": "", "command": ["bench"],
            "versions": {}, "platform": "Linux", "gpu": "", "driver": "", "model": "m", "precision": "fp16",
            "bundle": "b", "bundle_sha256": "0" * 64, "runtime": "r", "backend": "r 1",
            "outcome": "passed",
        },
        Line,
    )  # fmt: skip


@cache
def similarity():
    pytest.importorskip("matplotlib")
    return similarity_from_heads(np.random.default_rng(0).normal(size=(5, 2, 4)))


@cache
def comparison():
    return md.compare(passing(), passing())


def fuse(path, *, overwrite=False):
    source = path.parent.parent / "source.onnx"
    if not source.exists():
        source.write_bytes(model([attention()]).SerializeToString())
    md.fuse_file(source, path, overwrite=overwrite, verify=False)


# A file by its name: how it is written, and whether a second time needs a request.
FILES = {
    "page.html": lambda path, **rules: comparison().save_html(path, **rules),
    "junit.xml": lambda path, **rules: comparison().save_files(junit=path, **rules),
    "heads.png": lambda path, **rules: similarity().save_png(path, **rules),
    "bench.json": lambda path, **rules: md.BenchReport(()).save(path.parent, **rules),
    "bench.html": lambda path, **rules: md.BenchReport(()).save(path.parent, **rules),
    "record.jsonl": lambda path, overwrite=False: append_lines(path, [line()]),
    "fused.onnx": fuse,
}
EACH_FILE = pytest.mark.parametrize("name", FILES)


@pytest.fixture
def home(tmp_path):
    """A folder for an output, beside one of the user's."""
    (tmp_path / "home").mkdir()
    (tmp_path / "users").mkdir()
    (tmp_path / "users" / "precious").write_text("years of work")
    return tmp_path / "home"


def snapshot(folder):
    """Everything in a folder: its kind, where it leads, and its content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = os.lstat(path).st_mode
        content = path.read_bytes() if stat.S_ISREG(kind) else os.readlink(path) if stat.S_ISLNK(kind) else ""
        found[path.relative_to(folder).as_posix()] = stat.S_IFMT(kind), content
    return found


def link_to(target):
    return lambda path: path.symlink_to(path.parent.parent / target)


OBSTACLES = {
    "file": lambda path: path.write_text("mine"),
    "empty folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "link to a file": link_to("users/precious"),
    "hard link": lambda path: os.link(path.parent.parent / "users" / "precious", path),
    "link to a folder": link_to("users"),
    "link to a device": lambda path: path.symlink_to("/dev/null"),
    "link to nothing": link_to("users/none"),
    "link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.sweep(42)
@EACH_FILE
@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwrite"])
def test_what_is_not_ours_is_not_replaced(home, name, obstacle, overwrite):
    OBSTACLES[obstacle](home / name)
    before = snapshot(home.parent)
    if overwrite and obstacle in ("file", "hard link", "link to a file") and name != "record.jsonl":
        if name.startswith("bench") and "link to" in obstacle:
            with pytest.raises(md.DeployError, match="leads out of the folder"):
                FILES[name](home / name, overwrite=True)
            return
        FILES[name](home / name, overwrite=True)
        if obstacle == "hard link":
            assert (home.parent / "users" / "precious").read_text() == "years of work"
        return
    with pytest.raises(md.DeployError) as caught:
        FILES[name](home / name, **({"overwrite": True} if overwrite else {}))
    assert caught.value.exit_code == 2
    assert caught.value.hint
    after = snapshot(home.parent)
    after.pop("source.onnx", None)
    assert after == before


@EACH_FILE
def test_what_is_ours_is_replaced(home, name):
    for _ in range(2):
        FILES[name](home / name, **({"overwrite": True} if name == "fused.onnx" else {}))
        assert (home / name).stat().st_size > 100
    assert all(not each.startswith(".") for each in os.listdir(home))


@pytest.mark.parametrize("name", ["page.html", "junit.xml", "bench.json", "heads.png"])
@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_an_output_that_looks_like_ours_but_for_its_mark_is_kept(home, name, keep):
    """A file of the same format, by another program."""
    FILES[name](home / name)
    data = (home / name).read_bytes().replace(b"mha-deploy", b"my-project")
    (home / name).write_bytes(data)
    with pytest.raises(md.DeployError):
        FILES[name](home / name)
    assert (home / name).read_bytes() == data


# -- Inputs ----------------------------------------------------------------------------------------


def same(path, source):
    return source


def linked(path, source):
    path.symlink_to(source)
    return path


def hard_linked(path, source):
    os.link(source, path)
    return path


def roundabout(path, source):
    return source.parent / ".." / source.parent.name / source.name


@pytest.mark.parametrize("name_it", [same, linked, hard_linked, roundabout])
@pytest.mark.parametrize("option", ["--html", "--junit"])
@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)], ids=["", "overwrite"])
@pytest.mark.sweep(6)
def test_an_input_of_the_same_command_is_never_replaced(tmp_path, run_cli, name_it, option, overwrite):
    source, other = tmp_path / "old.json", tmp_path / "new.json"
    for path in (source, other):
        path.write_text(json.dumps(passing()))
    before = source.read_bytes()
    target = name_it(tmp_path / "page.html", source)
    done = run_cli("compare", source, other, option, target, *overwrite)
    assert (done.code, source.read_bytes()) == (2, before), done.err


def test_a_file_of_a_bundle_that_is_compared_is_an_input(bundles, tmp_path):
    folder = copy_of(bundles("tiny-mha"), tmp_path / "bundle")
    before, compared = snapshot(folder), md.compare(folder, folder)
    for name in ("manifest.json", "model.onnx", "golden/opt.safetensors"):
        with pytest.raises(md.DeployError, match="same file"):
            compared.save_html(folder / name, overwrite=True)
    assert snapshot(folder) == before
    for _ in range(2):
        compared.save_html(folder / "comparison.html")


def test_two_outputs_are_two_files(tmp_path, run_cli):
    (tmp_path / "report.json").write_text(json.dumps(passing()))
    arguments = ("compare", tmp_path / "report.json", tmp_path / "report.json")
    assert run_cli(*arguments, "--html", tmp_path / "out", "--junit", tmp_path / "out").code == 2
    odd = tmp_path / "." / ".." / tmp_path.name / "out"
    assert run_cli(*arguments, "--html", tmp_path / "out", "--junit", odd).code == 2
    assert os.listdir(tmp_path) == ["report.json"]


@pytest.mark.parametrize("name", ["model.onnx", "golden/mine.onnx"])
def test_a_bundle_does_not_replace_the_graph_that_it_is_made_of(bundles, tmp_path, run_cli, name):
    folder = copy_of(bundles("tiny-mha", "fp32"), tmp_path / "bundle")
    if name != "model.onnx":
        shutil.copy(folder / "model.onnx", folder / name)
    before = snapshot(folder)
    done = run_cli("export", folder / name, "-o", folder, "--overwrite")
    assert done.code == 2, done.err
    assert snapshot(folder) == before


# -- Folders that were named -----------------------------------------------------------------------


def test_engines_are_not_written_behind_a_link(bundles, home):
    bundle = copy_of(bundles("tiny-gqa"), home / "bundle")
    (bundle / "engines").symlink_to(home.parent / "users")
    before = snapshot(home.parent / "users")
    for repeat in (1, 2):
        with pytest.raises(md.DeployError):
            md.build_engine(bundle, backend="tensorrt-rtx", repeat=repeat)
    with pytest.raises(md.DeployError):
        md.inspect(bundle) if os.listdir(home.parent / "users") == [] else engines_of(bundle)
    assert snapshot(home.parent / "users") == before


def engines_of(bundle):
    from mha_deploy.engine.engine import engines_of

    return engines_of(bundle)


@pytest.mark.parametrize("name", ["mine.engine", "mine.json"])
@pytest.mark.parametrize("obstacle", [each for each in OBSTACLES if each != "link to nothing"])
@pytest.mark.sweep(8)
def test_only_an_engine_is_replaced_by_an_engine(bundles, home, name, obstacle):
    bundle = copy_of(bundles("tiny-gqa"), home.parent / "bundle")
    (bundle / "engines").mkdir()
    shutil.copytree(home.parent / "users", bundle / "users")
    OBSTACLES[obstacle](bundle / "engines" / name)
    before = snapshot(bundle)
    with pytest.raises(md.DeployError) as caught:
        engine_from_bundle(
            open_bundle(bundle), EngineOptions(backend="tensorrt-rtx", name="mine", overwrite=True)
        )
    assert caught.value.hint
    assert snapshot(bundle) == before


# -- Kept aside and found again --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["old-2025", "partial-notes", "partial-12345678", f"old-{'0' * 20}", "old-"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_user_calls_like_a_temporary_folder_stays(tmp_path, name, kind):
    path = tmp_path / f".out.{name}"
    if kind == "folder":
        path.mkdir()
        path = path / "thesis.tex"
    path.write_text("years of work")
    os.utime(tmp_path / f".out.{name}", (1, 1))
    small_bundle(tmp_path / "out")
    with BundleWriter(tmp_path / "out", overwrite=True) as writer:
        fill(writer.path)
        writer.finish(manifest())
    md.BenchReport(()).save_html(tmp_path / "out.html")
    assert path.read_text() == "years of work"


@pytest.mark.parametrize("seconds", [1, 4_000_000_000], ids=["in the past", "in the future"])
@pytest.mark.parametrize("alive", [True, False], ids=["written to", "left"])
def test_no_clock_decides_what_is_stale(tmp_path, seconds, alive):
    place = tmp_path / "page.html"
    with output.temporary_file(place, b"half") as mine, output.temporary_folder(place) as folder:
        left = [mine, folder] if alive else []
        if not alive:
            left_file, left_folder = output.temporary_name(place), output.temporary_name(place)
            left_file.write_bytes(b"half")
            left_folder.mkdir()
            left = [left_file, left_folder]
        for each in left:
            os.utime(each, (seconds, seconds))
        md.BenchReport(()).save_html(place)
        assert [each.exists() for each in left] == [alive, alive]


def test_the_names_of_temporary_files_fit_behind_the_longest_names(tmp_path):
    path = tmp_path / ("a" * 250 + ".html")
    for _ in range(2):
        md.BenchReport(()).save_html(path)
    assert os.listdir(tmp_path) == [path.name]


# -- Kills -----------------------------------------------------------------------------------------

CALLS = ("open", "replace", "rename", "mkdir", "fsync", "unlink", "link", "rmdir")


def killed_before(number):
    """End this process, as the system does when memory is short, before one of its calls on files."""
    counted = iter(range(10_000))

    def guard(call):
        def guarded(*arguments, **options):
            if next(counted) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return guarded

    for name in CALLS:
        setattr(os, name, guard(getattr(os, name)))
    output._rename_with = guard(output._rename_with)


def in_fork(call, *prepare):
    """How a call ends in a fork: its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            for each in prepare:
                each()
            call()
            code = 0
        except md.DeployError:
            code = 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@dataclass
class Writer:
    """An output that is written a first time, and replaced by another one."""

    write: Any  # with the place and a number
    read: Any  # gives the number, and fails where it is not whole


def write_bundle(place, number):
    with BundleWriter(place, overwrite=True) as writer:
        fill(writer.path)
        (writer.path / "golden" / f"{number}").write_text("x")
        writer.finish(manifest())


def read_bundle(place):
    return int(next(name for name in open_bundle(place).manifest.files if name[7:].isdigit())[7:])


def write_page(place, number):
    output.write_file(place, f"{output.GENERATOR} 0'>{number}".encode() + b" " * 5000, output.is_page)


def write_record(place, number):
    append_lines(place, [line(str(number))])


def write_graph(place, number):
    """Two files that belong together: the second one says which first one it needs."""
    with output.temporary_folder(place) as folder:
        data = f"weights {number}".encode()
        output.put_file(folder / "new" / f"{place.name}.data", data)
        output.put_file(folder / "new" / place.name, f"{number} {hashlib.sha256(data).hexdigest()}".encode())
        output.commit_files(folder / "new", place)


def read_graph(place):
    number, digest = place.read_text().split()
    assert hashlib.sha256(place.with_name(f"{place.name}.data").read_bytes()).hexdigest() == digest
    return int(number)


def write_kept(place, number):
    """A folder in which others have files, too."""
    with output.temporary_folder(place) as folder:
        output.put_file(folder / "new" / "own", str(number).encode())
        if not output.rename_to_free(folder / "new", place):
            output.replace_keeping(folder / "new", place, lambda each: {"own"})


def read_kept(place):
    assert (place / "2" / "theirs").read_text() == "mine"
    return int((place / "own").read_text())


WRITERS = {
    "bundle": Writer(write_bundle, read_bundle),
    "page": Writer(write_page, lambda place: int(place.read_bytes().split(b">")[1])),
    "record": Writer(write_record, lambda place: int(read_lines(place)[-1].run)),
    "two files": Writer(write_graph, read_graph),
    "package": Writer(write_kept, read_kept),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("one_step", [True, False], ids=["renameat2", "rename"])
def test_a_kill_at_any_point_leaves_the_old_or_the_new(tmp_path, monkeypatch, name, one_step):
    if not one_step:
        monkeypatch.setattr(output, "_rename_with", lambda one, other, flags: False)
    writer, place = WRITERS[name], tmp_path / "home" / "out"
    writer.write(place, 0)
    if name == "package":
        (place / "2").mkdir()
        (place / "2" / "theirs").write_text("mine")
    code, number = -signal.SIGKILL, 0
    while code == -signal.SIGKILL:
        before = writer.read(place)
        number += 5 if name == "bundle" else 1
        code = in_fork(partial(writer.write, place, number), partial(killed_before, number - 1))
        assert code in (0, -signal.SIGKILL)
        with suppress(FileNotFoundError, md.DeployError):  # in two steps: it comes back
            assert writer.read(place) in (before, number)
        writer.write(place, 1000 + number)
        assert writer.read(place) == 1000 + number
        allowed = {"out", "out.data"} if name == "two files" else {"out"}
        assert set(os.listdir(place.parent)) == allowed
    assert number > 5


# -- Disks -----------------------------------------------------------------------------------------


@contextmanager
def largest_file(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.sweep(7)
@EACH_FILE
@pytest.mark.parametrize("size", [0, pytest.param(1, marks=pytest.mark.slow), 100])
def test_a_full_disk_leaves_the_old_file(home, name, size):
    FILES[name](home / name)
    before = snapshot(home)
    rules = {"overwrite": True} if name == "fused.onnx" else {}
    with pytest.raises(md.DeployError), largest_file(size):
        FILES[name](home / name, **rules)
    assert snapshot(home) == before


def unshared(*options):
    """Mount a small file system at a folder, visible to this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000) or libc.mount(b"none", b"/", None, 0x44000, None):
        os._exit(77)
    for where, kind, flags, data in options:
        source = kind if isinstance(kind, Path) else "none"
        name = b"tmpfs" if source == "none" else b""
        if libc.mount(os.fsencode(source), os.fsencode(where), name, flags, data):
            os._exit(77)


def run_mounted(call, *mounts):
    code = in_fork(call, lambda: unshared(*mounts))
    if code == 77:
        pytest.skip("nothing can be mounted here")
    return code


BIND, READ_ONLY = 0x1000, 0x1


def tmpfs(where, flags=0, data=None):
    return where, None, flags, data


@pytest.mark.parametrize("kind", ["another disk", "the same disk"])
@pytest.mark.parametrize("name", ["bundle", "package"])
def test_a_mount_point_is_filled(tmp_path, kind, name):
    place, source = tmp_path / "home" / "out", tmp_path / "other"
    place.mkdir(parents=True)
    source.mkdir()

    def check():
        write = write_bundle if name == "bundle" else write_kept
        target = place if name == "bundle" else place / "model"
        for number in range(3):
            write(target, number)
            if name == "package" and number == 0:
                (target / "2").mkdir()
                (target / "2" / "theirs").write_text("mine")
            assert (read_bundle if name == "bundle" else read_kept)(target) == number
        assert not [each for each in os.listdir(place) if each.startswith(".")]
        assert os.listdir(place.parent) == ["out"]

    mount = tmpfs(place) if kind == "another disk" else (place, source, BIND, None)
    assert run_mounted(check, mount) == 0


def test_a_package_is_written_into_a_mounted_repository(bundles, tmp_path):
    pytest.importorskip("tritonclient")
    repository = tmp_path / "models"
    repository.mkdir()
    bundle = bundles("tiny-gqa")

    def check():
        for overwrite in (False, True):
            found = md.package(bundle, repository, runtimes=["ort-cpu"], overwrite=overwrite)
            assert (found.path / "config.pbtxt").is_file()
        assert os.listdir(repository) == ["tiny-gqa"]

    assert run_mounted(check, tmpfs(repository)) == 0


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", [*FILES, "bundle"])
@pytest.mark.parametrize("data", [b"nr_inodes=3", b"size=4096", None], ids=["inodes", "full", "read-only"])
def test_a_disk_that_takes_nothing_is_bad_input(tmp_path, name, data):
    """As root, who may write into read-only folders."""
    home = tmp_path / "home"
    home.mkdir()

    def check():
        with suppress(OSError):
            (home / "ballast").write_bytes(b"x" * 4096)
        before = os.listdir(home)
        try:
            FILES[name](home / name) if name in FILES else write_bundle(home / name, 1)
        except (md.DeployError, OSError):
            assert os.listdir(home) == before
            return
        assert data == b"nr_inodes=3"

    mount = tmpfs(home, READ_ONLY if data is None else 0, data)
    assert run_mounted(check, mount) == 0


# -- Together --------------------------------------------------------------------------------------


def test_lines_of_several_processes_are_all_kept(tmp_path):
    path, children = tmp_path / "record.jsonl", []
    for process in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                for number in range(10):
                    append_lines(path, [line(f"{process}-{number}")])
                os._exit(0)
            finally:
                os._exit(1)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 4
    assert len({each.run for each in read_lines(path)}) == 40
    assert os.listdir(tmp_path) == ["record.jsonl"]


def test_pages_of_several_processes_are_whole(tmp_path):
    place, children = tmp_path / "page.html", []
    for number in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                for _ in range(20):
                    write_page(place, number)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 4
    assert place.stat().st_size > 5000
    assert os.listdir(tmp_path) == ["page.html"]


# -- Records ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"mine\n",
        b"{}\n",
        b"[1]\n",
        b"\xff\xfe\n",
        b'{"kind": "time"}\n',
        b"[" * 100_000,
        msgspec.json.encode(line()) + b"\nmine\n",
        msgspec.json.encode(line())[:-1] + b', "run": "2"}\n',
        msgspec.json.encode(line()).replace(b'"time"', b'"\\u001b[31m"') + b"\n",
    ],
    ids=lambda content: str(content[:12]),
)
def test_nothing_is_added_to_a_file_that_is_no_record(tmp_path, content):
    path = tmp_path / "notes.jsonl"
    path.write_bytes(content)
    with pytest.raises(md.DeployError) as caught:
        append_lines(path, [line()])
    assert caught.value.hint
    assert path.read_bytes() == content


def test_a_record_without_its_last_newline_goes_on_in_a_new_line(tmp_path):
    path = tmp_path / "record.jsonl"
    path.write_bytes(msgspec.json.encode(line("a")))
    append_lines(path, [line("b")])
    assert [each.run for each in read_lines(path)] == ["a", "b"]


# -- What is written can be read -------------------------------------------------------------------


@pytest.mark.parametrize("summary", ["c\nd\0", "\x1b[31m", "x" * (2 << 20)], ids=["lines", "escape", "long"])
def test_a_bundle_that_no_command_reads_is_not_written(tmp_path, summary):
    def write():
        with BundleWriter(tmp_path / "out") as writer:
            fill(writer.path)
            told = manifest()
            layer = msgspec.structs.replace(told, notes=[summary])
            writer.finish(layer)

    with pytest.raises(md.DeployError) as caught:
        write()
    assert caught.value.hint
    assert os.listdir(tmp_path) == []


def test_an_export_whose_texts_cannot_be_read_leaves_nothing(tmp_path):
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(4, 4)
    inputs = {"input": md.Example(torch.zeros(2, 4))}
    made = md.Deployable(module=module, inputs=inputs, summary="c\nd\0")
    with pytest.raises(md.DeployError):
        md.export(made, tmp_path / "out")
    assert os.listdir(tmp_path) == []


# -- In the source ---------------------------------------------------------------------------------

WRITING = {
    "write_text", "write_bytes", "mkdir", "makedirs", "touch", "unlink", "rmdir", "rmtree", "rename",
    "renames", "symlink", "symlink_to", "hardlink_to", "link", "copyfile", "copy2", "copytree", "move",
    "mkdtemp", "mkstemp", "TemporaryDirectory",
    "NamedTemporaryFile", "savez", "savez_compressed", "tofile", "savetxt", "save_file",
    "extractall", "copyfileobj", "chmod", "truncate", "ftruncate", "make_archive", "unpack_archive",
}  # fmt: skip
MODULES = {"os": {"replace", "remove", "removedirs", "mkfifo"}, "shutil": {"copy"}, "tempfile": None}
# What is written elsewhere, and why that is no output.
ALLOWED = {
    ("graph/file.py", "ir.save"): "a graph, into a temporary folder of its caller",
    ("runtime/child.py", "tempfile.TemporaryFile"): "has no name",
    ("runtime/child.py", "open"): "shared memory, by its descriptor",
    ("runtime/child.py", "memory.truncate"): "shared memory",
    ("supervisor.py", "tempfile.TemporaryFile"): "has no name",
    ("cli/__init__.py", "open"): "a stream, by its descriptor",
    ("analysis/similarity.py", "figure.savefig"): "into memory",
    ("bundle/cases.py", "np.save"): "into memory",
    ("exporter/program.py", "axis_names.rename"): "names of axes",
}


def writing_calls(nodes):
    """The calls of a module that may write files."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        base = name.rpartition(".")[0]
        modes = [each.value for each in [*node.args, *(key.value for key in node.keywords)]
                 if isinstance(each, ast.Constant) and isinstance(each.value, str)]  # fmt: skip
        opens = last == "open" and any(
            set(mode) <= set("rwaxbt+") and set(mode) & set("wax+") for mode in modes
        )
        flags = name == "os.open" and "O_CREAT" in ast.unparse(node)
        saves = (last == "save" and base in ("ir", "np", "numpy", "onnx", "torch")) or last == "savefig"
        listed = base in MODULES and (MODULES[base] is None or last in MODULES[base])
        in_module = last in WRITING and name != "tempfile.gettempdir"
        if opens or flags or saves or listed or in_module:
            yield name


def test_nothing_else_in_the_source_writes_files():
    found = {}
    for file in source_trees():
        for name in writing_calls(nodes_of(file)) if file != "output.py" else ():
            found[file, name] = True
    assert set(found) - set(ALLOWED) == set()
    assert set(ALLOWED) - set(found) == set()  # what is no longer there is no longer allowed


@pytest.mark.parametrize(
    "text",
    [
        "open(path, 'w')", "path.open('ab')", "path.open(mode='x')", "p.write_text('')", "os.replace(a, b)",
        "tempfile.mkdtemp()", "np.savez(path, a=a)", "plt.savefig(path)", "path.mkdir()", "shutil.copy(a, b)",
        "os.open(path, os.O_CREAT | os.O_WRONLY)", "ir.save(model, path)", "tempfile.NamedTemporaryFile()",
    ],
)  # fmt: skip
def test_a_call_that_writes_is_found(text):
    assert list(writing_calls(ast.walk(ast.parse(text))))


@pytest.mark.parametrize("text", ["open(path)", "path.open('rb')", "text.replace('w', 'x')", "os.open(p, 0)"])
def test_a_call_that_only_reads_is_not_found(text):
    assert not list(writing_calls(ast.walk(ast.parse(text))))


# -- The command line ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["matrix.json", "matrix.html"])
def test_a_matrix_does_not_replace_a_file_of_others(tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    plan = tmp_path / "plan.toml"
    plan.write_text("models = ['tiny-mha']\nruntimes = [{name = 'a'}]")
    assert_refused(run("matrix", plan, "-o", tmp_path / "out", "--jobs", "1"), "did not write")
    assert snapshot(tmp_path / "out") == {name: (stat.S_IFREG, b"mine")}
