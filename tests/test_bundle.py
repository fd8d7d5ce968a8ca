"""A bundle is whole or refused: every kind of damage is found, and says what to do."""

import json
import os
import resource
import sys
from contextlib import contextmanager

import pytest
from bundle_edit import edit_manifest, fill, manifest, small_bundle

from mha_deploy.bundle.folder import LEDGER, MANIFEST, MODEL, BundleWriter, open_bundle, sha256
from mha_deploy.bundle.manifest import FORMAT
from mha_deploy.errors import BundleError, DeployError
from mha_deploy.output import GENERATOR

KEYS = sorted(manifest().to_dict())


@pytest.fixture
def folder(tmp_path):
    return small_bundle(tmp_path / "bundle").path


def refused(folder, match):
    """Open a damaged bundle, and give the error it was refused with."""
    with pytest.raises(BundleError, match=match) as caught:
        open_bundle(folder)
    return caught.value


def beside(target):
    """What else stands in the folder of a bundle: temporary folders would show up here."""
    return sorted(path.name for path in target.parent.iterdir() if path != target)


# -- whole ---------------------------------------------------------------------------------------


def test_what_was_written_is_read_back(tmp_path):
    written = small_bundle(tmp_path / "bundle")
    read = open_bundle(tmp_path / "bundle")
    assert read == written
    wanted = manifest()
    assert read.manifest.to_dict() == {**wanted.to_dict(), "files": read.manifest.to_dict()["files"]}
    assert (read.manifest.spec, read.manifest.precision) == (wanted.spec, wanted.precision)


def test_the_manifest_hashes_every_file_but_itself(folder):
    files = open_bundle(folder).manifest.files
    assert set(files) == {MODEL, "golden/opt.safetensors"}
    for name, entry in files.items():
        assert (entry.bytes, entry.sha256) == ((folder / name).stat().st_size, sha256(folder / name))


def test_the_hash_is_sha256(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, B.1
    assert sha256(tmp_path / "abc") == known


def test_an_exported_bundle_opens_and_can_be_moved(bundles, tmp_path):
    bundle = bundles("tiny-gqa")
    moved = tmp_path / "elsewhere"
    os.symlink(bundle.path, moved)  # the folder may have any name and any place
    assert open_bundle(moved).manifest == bundle.manifest


def test_a_bundle_is_readable_by_others(folder):
    assert folder.stat().st_mode & 0o777 == 0o755


def test_hashes_are_not_checked_when_told_so(folder):
    (folder / MODEL).write_bytes(b"other")
    assert open_bundle(folder, verify=False).model_path == folder / MODEL


# -- manifests that cannot be used ---------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.write_text("a file")])
def test_what_is_no_bundle_says_how_to_make_one(tmp_path, make):
    path = tmp_path / "thing"
    make(path)
    error = refused(path, "There is no bundle here")
    assert error.got == str(path)
    target = "FOLDER" if path.exists() else path
    assert error.hint.endswith(f"mha-deploy export MODEL -o {target}")
    assert isinstance(error.__cause__, OSError)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"{'format': 1}", b"\xff\xfe\x00\x01", b'{"format": 1'],
    ids=["empty", "cut", "not quite JSON", "not text", "truncated"],
)
def test_a_manifest_that_is_not_json_is_refused(folder, content):
    (folder / MANIFEST).write_bytes(content)
    assert str(folder / MANIFEST) in refused(folder, "The manifest cannot be read").got


def test_a_manifest_nested_without_end_is_refused(folder):
    (folder / MANIFEST).write_text("[" * 100_000)
    refused(folder, "The manifest cannot be read")


def test_a_folder_named_like_the_manifest_is_refused(folder):
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()
    refused(folder, "The manifest cannot be read")


@pytest.mark.parametrize("content", ["[]", "null", '"text"', "3"])
def test_json_that_is_no_manifest_is_refused(folder, content):
    (folder / MANIFEST).write_text(content)
    assert refused(folder, "The manifest is not valid").hint == "export again"


@pytest.mark.parametrize("number", [1, FORMAT + 1, 0, None, str(FORMAT)])
def test_another_format_is_refused_with_the_one_that_is_read(folder, number):
    edit_manifest(folder, lambda data: data.update(format=number))
    error = refused(folder, "The format of the bundle is not supported")
    assert error.got == f"format {number!r}"
    assert f"reads format {FORMAT}" in error.hint
    assert "export again" in error.hint


@pytest.mark.parametrize("key", [key for key in KEYS if key not in ("format", "lists_engines")])
def test_a_missing_key_is_named(folder, key):
    edit_manifest(folder, lambda data: data.pop(key))
    assert key in refused(folder, "The manifest is not valid").got


def test_an_unknown_key_is_named(folder):
    edit_manifest(folder, lambda data: data.update(run="rm"))
    assert "run" in refused(folder, "The manifest is not valid").got


@pytest.mark.parametrize("entry", [{"name": "steps"}, {"name": "steps", "file": 3}, "steps"], ids=str)
def test_a_trace_entry_that_is_not_one_is_refused(folder, entry):
    edit_manifest(folder, lambda data: data.update(traces=[entry]))
    refused(folder, "The manifest is not valid")


def test_a_golden_entry_with_a_missing_or_unknown_key_is_refused(folder):
    edit_manifest(folder, lambda data: data["golden"][0].pop("sizes"))
    assert "sizes" in refused(folder, "The manifest is not valid").got
    edit_manifest(folder, lambda data: data["golden"][0].update(sizes={"B": 1, "S": 1}, run="rm"))
    assert "run" in refused(folder, "The manifest is not valid").got


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("files", []),
        ("files", "model.onnx"),
        ("files", {MODEL: None}),
        ("files", {MODEL: {"bytes": 18}}),
        ("files", {MODEL: []}),
        ("golden", {"opt": 1}),
        ("golden", None),
        ("golden", []),
        ("precision", ["fp16"]),
        ("opset", "23"),
        ("opset", True),
        ("weights", None),
        ("notes", [3]),
        ("versions", {"mha-deploy": 1}),
    ],
)
def test_a_key_of_the_wrong_kind_is_refused(folder, key, value):
    edit_manifest(folder, lambda data: data.update({key: value}))
    assert f"$.{key}" in refused(folder, "The manifest is not valid").got


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("precision", "fp8", "No such precision"),
        ("spec", {"Hq": 4}, "lacks name"),
        ("spec", {"name": "x", "Hq": 4, "E": 64, "axes": {"B": 1, "S": 8}, "casual": True}, "Unknown key"),
    ],
)
def test_a_manifest_that_describes_no_layer_is_refused(folder, key, value, match):
    edit_manifest(folder, lambda data: data.update({key: value}))
    with pytest.raises(DeployError, match=match):
        open_bundle(folder)


# -- files that are not the exported ones --------------------------------------------------------


@pytest.mark.parametrize("name", [MODEL, "golden/opt.safetensors"])
@pytest.mark.parametrize("position", [0, -1])
def test_one_changed_bit_is_found(folder, name, position):
    data = bytearray((folder / name).read_bytes())
    data[position] ^= 1
    (folder / name).write_bytes(data)
    error = refused(folder, "changed after export")
    assert error.got == str(folder / name)
    assert error.hint == "export again"


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: b"", lambda data: data + b"\0"])
def test_a_file_that_is_shorter_or_longer_is_found(folder, change):
    path = folder / MODEL
    path.write_bytes(change(path.read_bytes()))
    assert refused(folder, "changed after export").got == str(path)


@pytest.mark.parametrize("name", [MODEL, "golden/opt.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert refused(folder, "A file of the bundle is missing").got == str(folder / name)


def test_a_folder_in_the_place_of_a_file_is_refused(folder):
    (folder / MODEL).unlink()
    (folder / MODEL).mkdir()
    refused(folder, "A file of the bundle is missing")


def test_a_link_in_the_place_of_a_file_is_refused_whatever_it_leads_to(folder, tmp_path):
    outside = tmp_path / "outside.onnx"
    (folder / MODEL).rename(outside)
    (folder / MODEL).symlink_to(outside)
    refused(folder, "A file of the bundle is missing")


def test_a_link_in_the_place_of_a_folder_is_refused_whatever_it_leads_to(folder, tmp_path):
    (folder / "golden").rename(tmp_path / "outside")
    (folder / "golden").symlink_to(tmp_path / "outside")
    refused(folder, "A file of the bundle is missing")


@pytest.mark.parametrize("kind", ["parent", "hidden parent", "absolute"])
def test_a_manifest_cannot_name_a_file_outside_its_folder(folder, tmp_path, kind):
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    name = {"parent": "../outside", "hidden parent": "golden/../../outside", "absolute": str(outside)}[kind]
    entry = {"bytes": 6, "sha256": sha256(outside)}  # right in every other respect
    edit_manifest(folder, lambda data: data["files"].update({name: entry}))
    assert refused(folder, "names a file that is not part of the bundle").got == name


def test_a_manifest_that_does_not_hash_the_graph_is_refused(folder):
    edit_manifest(folder, lambda data: data["files"].pop(MODEL))
    assert MODEL in refused(folder, "The manifest is not valid").got


def test_only_files_of_the_manifest_are_handed_out(folder):
    (folder / "stray.bin").write_bytes(b"stray")
    bundle = open_bundle(folder)
    assert bundle.file("golden/opt.safetensors") == folder / "golden/opt.safetensors"
    for name in ("stray.bin", MANIFEST, "", ".", "/", "golden", "../bundle/model.onnx"):
        with pytest.raises(BundleError, match="not part of the bundle"):
            bundle.file(name)


# -- writing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_writer_that_fails_leaves_nothing(tmp_path, failure):
    target = tmp_path / "out" / "bundle"

    def write():
        with BundleWriter(target) as writer:
            fill(writer.path)
            assert beside(target) == [writer.path.name]
            raise failure

    with pytest.raises(failure):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_is_never_finished_leaves_nothing(tmp_path):
    with BundleWriter(tmp_path / "bundle") as writer:
        fill(writer.path)
    assert list(tmp_path.iterdir()) == []


def test_the_place_of_a_bundle_is_empty_until_it_is_whole(tmp_path):
    target = tmp_path / "bundle"
    with BundleWriter(target) as writer:
        fill(writer.path)
        assert not target.exists()
        refused(writer.path, "There is no bundle here")
        writer.finish(manifest())
    open_bundle(target)
    assert beside(target) == []


@contextmanager
def largest_file(size):
    """A disk that is full after `size` bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_what_was_there_before(tmp_path, overwrite):
    target = tmp_path / "bundle"
    before = small_bundle(target) if overwrite else None

    def write():
        with largest_file(1000), BundleWriter(target, overwrite=overwrite) as writer:
            fill(writer.path)

    with pytest.raises(OSError, match="File too large"):
        write()
    assert beside(target) == []
    assert (open_bundle(target) == before) if overwrite else not target.exists()


def test_a_folder_that_is_there_is_not_touched(tmp_path):
    for make in (lambda p: p.mkdir(), lambda p: p.write_text("mine"), lambda p: small_bundle(p)):
        target = tmp_path / f"bundle{len(list(tmp_path.iterdir()))}"
        make(target)
        with pytest.raises(BundleError, match="The output folder exists") as caught:
            BundleWriter(target)
        assert caught.value.got == str(target)
        assert "overwrite=True" in caught.value.hint


def overwrite(folder, name="tiny-mqa"):
    """Replace a bundle by another one."""
    with BundleWriter(folder, overwrite=True) as writer:
        fill(writer.path, name)
        return writer.finish(manifest(name))


ONE_STEP_OR_TWO = pytest.mark.parametrize("one_step", [True, False], ids=["exchange", "two renames"])


@pytest.fixture
def disk(monkeypatch):
    """A disk that can exchange two folders in one step, or cannot."""

    def choose(one_step):
        if not one_step:
            monkeypatch.setattr("mha_deploy.output.exchange", lambda one, other: False)

    return choose


@ONE_STEP_OR_TWO
def test_a_bundle_is_replaced_when_that_is_asked_for(folder, disk, one_step):
    disk(one_step)
    (folder / "golden" / "opt.safetensors").write_text("changed by hand")
    overwrite(folder)
    assert open_bundle(folder).manifest.spec.name == "tiny-mqa"
    assert beside(folder) == []


@pytest.mark.parametrize("number", [0, FORMAT + 1])
def test_a_bundle_of_another_version_is_replaced_too(folder, number):
    edit_manifest(folder, lambda data: data.update(format=number, spec="written otherwise"))
    overwrite(folder)
    assert open_bundle(folder).manifest.spec.name == "tiny-mqa"


def test_engines_and_reports_go_with_their_bundle_and_are_named(folder):
    (folder / "engines").mkdir()
    engine = {"format": 1, "backend": "tensorrt", "verdict": {}, "bundle_sha256": "", "engine_sha256": ""}
    report = {"format": 1, "tool": {"name": "mha-deploy", "version": "0"}}
    files = {
        "engines/mine.engine": "a plan",
        "engines/mine.json": json.dumps(engine),
        "engines/timing-tensorrt-10.cache": "mha-deploy timing cache 0\ntimes",
        "report.json": json.dumps(report),
        "report.html": f'<!doctype html>{GENERATOR} 0">',
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    assert set(overwrite(folder).removed) == set(files)
    assert sorted(path.name for path in folder.iterdir()) == sorted([LEDGER, "golden", MANIFEST, MODEL])
    assert overwrite(folder, "tiny-mha").removed == ()


FOREIGN = [
    "notes.txt",
    "golden/mine.safetensors",
    "engines/trtexec.engine",  # without a manifest, nobody knows who built it
    "engines/notes/todo",
    "report.html",
    "report.json",
    ".hidden",
]


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("late", [False, True], ids=["before", "meanwhile"])
def test_a_file_that_somebody_else_wrote_is_kept_and_named(folder, name, late):
    path = folder / name

    def put():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"mine": true}')

    def write():
        if not late:
            put()
        with BundleWriter(folder, overwrite=True) as writer:
            fill(writer.path, "tiny-mqa")
            put()
            writer.finish(manifest("tiny-mqa"))

    with pytest.raises(BundleError) as caught:
        write()
    assert name in caught.value.got
    assert path.read_text() == '{"mine": true}'
    assert open_bundle(folder).manifest.spec.name == "tiny-mha"
    assert beside(folder) == []


def test_links_in_a_bundle_are_somebody_else_s(folder, tmp_path):
    (tmp_path / "data").mkdir()
    (folder / "data").symlink_to(tmp_path / "data")
    with pytest.raises(BundleError) as caught:
        overwrite(folder)
    assert "data" in caught.value.got
    assert (folder / "data").is_symlink()


def test_many_files_of_somebody_else_are_counted(folder):
    for number in range(40):
        (folder / f"notes-{number:02}.txt").write_text("mine")
    with pytest.raises(BundleError) as caught:
        overwrite(folder)
    assert "notes-00.txt" in caught.value.got
    assert "notes-39.txt" not in caught.value.got


def test_what_a_link_leads_to_is_replaced_and_the_link_stays(folder, tmp_path):
    link = tmp_path / "elsewhere" / "latest"
    link.parent.mkdir()
    link.symlink_to(folder)
    overwrite(link)
    assert link.is_symlink()
    assert open_bundle(folder).manifest.spec.name == "tiny-mqa"
    assert [path.name for path in link.parent.iterdir()] == ["latest"]


# Manifests that other tools write: a web extension, a list of packages, nothing at all.
OTHERS = ['{"manifest_version": 3, "name": "x"}', '{"format": 1, "files": {"a": 1}}', "[]", "", "{", "null"]


@pytest.mark.parametrize("text", OTHERS)
def test_a_manifest_of_another_tool_makes_no_bundle(tmp_path, text):
    project = tmp_path / "project"
    project.mkdir()
    (project / MANIFEST).write_text(text)
    (project / "thesis.tex").write_text("years of work")
    with pytest.raises(BundleError):
        BundleWriter(project, overwrite=True)
    assert (project / "thesis.tex").read_text() == "years of work"


def make_bundle(path):
    small_bundle(path)


def make_folder(path):
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")


def make_file(path):
    path.write_text("years of work")


@pytest.mark.parametrize("make", [make_bundle, make_folder, make_file])
def test_what_appears_while_a_bundle_is_written_is_not_touched(tmp_path, make):
    target = tmp_path / "bundle"

    def write():
        with BundleWriter(target) as writer:
            fill(writer.path, "tiny-mqa")
            make(target)
            writer.finish(manifest("tiny-mqa"))

    with pytest.raises(BundleError) as caught:
        write()
    assert caught.value.exit_code == 2
    assert str(target) in caught.value.got
    assert beside(target) == []
    if make is make_bundle:
        assert open_bundle(target).manifest.spec.name == "tiny-mha"
    else:
        assert (target / "thesis.tex" if target.is_dir() else target).read_text() == "years of work"


def test_of_two_writers_of_one_new_folder_one_wins_and_one_is_told(tmp_path):
    target = tmp_path / "bundle"
    with BundleWriter(target) as first, BundleWriter(target) as second:
        fill(first.path, "tiny-mqa")
        fill(second.path, "tiny-mha")
        second.finish(manifest("tiny-mha"))
        with pytest.raises(BundleError):
            first.finish(manifest("tiny-mqa"))
    assert open_bundle(target).manifest.spec.name == "tiny-mha"
    assert beside(target) == []


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_failed_replacement_keeps_the_old_bundle(folder, failure):
    def write():
        with BundleWriter(folder, overwrite=True) as writer:
            fill(writer.path, "tiny-mqa")
            raise failure

    with pytest.raises(failure):
        write()
    assert open_bundle(folder).manifest.spec.name == "tiny-mha"
    assert beside(folder) == []


def test_a_folder_that_is_no_bundle_is_never_overwritten(tmp_path):
    thesis = tmp_path / "home"
    thesis.mkdir()
    (thesis / "thesis.tex").write_text("years of work")
    with pytest.raises(BundleError, match="only a bundle is overwritten") as caught:
        BundleWriter(thesis, overwrite=True)
    assert "another out=" in caught.value.hint
    with pytest.raises(BundleError, match="only a bundle is overwritten"):
        BundleWriter(thesis / "thesis.tex", overwrite=True)
    assert (thesis / "thesis.tex").read_text() == "years of work"


def test_an_empty_folder_may_be_overwritten(tmp_path):
    with BundleWriter(tmp_path / "b", overwrite=True) as writer:
        fill(writer.path)
        (tmp_path / "b").mkdir()
        writer.finish(manifest())
    open_bundle(tmp_path / "b")


def test_a_place_inside_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("a file")
    with (
        pytest.raises(BundleError, match="cannot be written") as caught,
        BundleWriter(tmp_path / "file" / "b"),
    ):
        pass
    assert str(tmp_path / "file") in caught.value.got
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into read-only folders")
def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(BundleError, match="cannot be written"), BundleWriter(tmp_path / "b"):
            pass
    finally:
        tmp_path.chmod(0o755)


def test_the_manifest_on_disk_is_plain_json(folder):
    data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    assert sorted(data) == KEYS
    assert data["format"] == FORMAT
    assert data["spec"]["axes"]["S"] == {"min": 1, "opt": 16, "max": 64}


def test_weights_that_the_manifest_does_not_list_are_refused(tmp_path):
    bundle = small_bundle(tmp_path / "bundle")
    (bundle.path / f"{MODEL}.data").write_bytes(b"weights from elsewhere")
    with pytest.raises(BundleError, match="not in the manifest"):
        open_bundle(bundle.path)


def test_an_overwrite_that_fails_keeps_the_old_bundle(folder, disk, monkeypatch):
    disk(one_step=False)
    before = (folder / MANIFEST).read_bytes()
    rename, placed = os.rename, []

    def fail_with_the_old_one_aside(source, target):
        if target == folder and not folder.exists() and not placed:
            placed.append(target)
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr("mha_deploy.output.os.rename", fail_with_the_old_one_aside)
    with BundleWriter(folder, overwrite=True) as writer:
        fill(writer.path)
        with pytest.raises(KeyboardInterrupt):
            writer.finish(manifest())
    assert placed
    assert (folder / MANIFEST).read_bytes() == before
    assert beside(folder) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no exchange of two folders")
def test_an_overwritten_bundle_is_at_its_place_at_every_moment(folder, monkeypatch):
    """So that whoever is killed between two system calls leaves a bundle there."""
    seen = []

    def watched(move):
        def moved(source, target):
            try:
                move(source, target)
            finally:
                seen.append((folder / MANIFEST).is_file())

        return moved

    monkeypatch.setattr(os, "rename", watched(os.rename))
    monkeypatch.setattr(os, "replace", watched(os.replace))
    overwrite(folder)
    assert seen
    assert all(seen)
    assert open_bundle(folder).manifest.spec.name == "tiny-mqa"
