import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

import mha_deploy as md
from mha_deploy.bundle.folder import open_bundle, sha256
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.engine.engine import manifest_path, open_engine, parse_ranges, profile_shapes, write_engine
from mha_deploy.errors import BackendUnavailable, BundleError, DeployError, SpecError
from mha_deploy.model.catalog import find_spec
from mha_deploy.options import EngineOptions
from mha_deploy.runtime.tensorrt.versions import Message, collect

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
RTX = EngineOptions(backend="tensorrt-rtx", targets="8.9")


def options(**changes):
    return EngineOptions(**{"backend": "tensorrt-rtx", "targets": "8.9", **changes})


@pytest.fixture
def bundle(bundles, tmp_path):
    """A copy of a bundle to build in."""

    def copy(name, precision="fp16"):
        target = tmp_path / f"{name}-{precision}"
        shutil.copytree(bundles(name, precision).path, target, ignore=shutil.ignore_patterns("engines"))
        return open_bundle(target)

    return copy


@pytest.fixture(scope="module")
def built(rtx_engine):
    """One engine that tests only read."""
    return rtx_engine()


def test_the_manifest_tells_what_the_engine_is(built):
    manifest = open_engine(built.path).manifest
    assert (manifest.backend, manifest.model, manifest.precision) == ("tensorrt-rtx", "tiny-gqa", "fp16")
    assert manifest.dialect == "trt"
    assert manifest.profiles == [{"B": "1:2:4", "S": "1:16:64"}]
    assert manifest.targets == ["SM89"]
    assert manifest.strongly_typed
    assert manifest.all_fused
    assert manifest.has_requested_types
    assert any(kernel["fused_attention"] for kernel in manifest.kernels)
    assert manifest.seconds > 0
    assert manifest.options["profiles"][0]["x"] == [[1, 1, 64], [2, 16, 64], [4, 64, 64]]


def test_nothing_but_the_engine_and_its_manifest_is_left(built):
    assert sorted(path.name for path in built.path.parent.iterdir()) == [
        "tensorrt-rtx.engine",
        "tensorrt-rtx.json",
    ]
    assert not [path for path in built.path.parents[1].iterdir() if path.name.startswith(".")]


def test_what_tensorrt_cannot_hold_is_in_the_manifest_and_explained(bundle, monkeypatch, in_process):
    text = "Profile kMAX. scores: tensor volume exceeds (2^31)-1, dimensions are [B,(* 4 S),S] Volume exceeds"

    @contextmanager
    def with_warning(rt):
        with collect(rt) as messages:
            messages.append(Message(severity="WARNING", text=text))
            yield messages

    monkeypatch.setattr("mha_deploy.runtime.tensorrt.builder.collect", with_warning)
    engine = engine_from_bundle(bundle("tiny-gqa"), options())
    manifest = open_engine(engine.path).manifest
    (tensor,) = manifest.large_tensors
    assert tensor.elements({"x": (2, 3, 64)}) == 2 * 12 * 3
    assert any("--profile" in note for note in manifest.notes)
    assert text in manifest.notes


def test_fp32_does_not_fuse_the_error_says_what_to_do_and_nothing_is_left(bundle):
    opened = bundle("tiny-gqa", "fp32")
    with pytest.raises(DeployError, match="no fused kernel") as caught:
        engine_from_bundle(opened, RTX)
    assert "fp16 or bf16" in str(caught.value)
    assert not [path for path in opened.path.rglob("*") if "lowered" in path.name or path.suffix == ".engine"]


def test_fp32_is_reported_decomposed_where_that_is_allowed(rtx_engine):
    manifest = rtx_engine(precision="fp32").manifest
    assert manifest.verdict.nodes[0].status == "decomposed"
    assert not manifest.all_fused
    assert any(finding["rule"] == "fp32" for finding in manifest.findings)


def full(*given):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("step", ["os.replace", "temporary_file"])
def test_a_disk_that_is_full_leaves_no_engine_or_the_one_that_was_there(built, tmp_path, monkeypatch, step):
    path, plan = tmp_path / "engines" / "mine.engine", built.path.read_bytes()
    for kept in ([], ["mine.engine", "mine.json"]):
        with monkeypatch.context() as patch:
            patch.setattr(f"mha_deploy.output.{step}", full)
            with pytest.raises(OSError, match="No space left"):
                write_engine(path, plan, built.manifest)
        assert sorted(each.name for each in path.parent.iterdir()) == kept
        write_engine(path, plan, built.manifest)
    assert open_engine(path).manifest.engine_sha256 == built.manifest.engine_sha256


def test_an_option_that_would_be_ignored_is_refused(bundles):
    with pytest.raises(DeployError, match="grouped heads as they are"):
        engine_from_bundle(bundles("tiny-gqa"), options(name="other", gqa="fold"))


def test_a_target_without_the_type_is_refused_before_the_build(bundles):
    with pytest.raises(DeployError, match="cannot take the node attention"):
        engine_from_bundle(bundles("tiny-padding", "bf16"), options(name="other", targets="7.5"))


def test_an_engine_is_not_overwritten_unless_requested(built, tmp_path):
    opened = open_bundle(Path(shutil.copytree(built.path.parents[1], tmp_path / "bundle")))
    with pytest.raises(BundleError, match="engine already exists"):
        engine_from_bundle(opened, RTX)
    again = engine_from_bundle(opened, options(overwrite=True, weight_streaming=True))
    assert again.path.name == built.path.name
    assert again.manifest.all_fused
    assert again.manifest.options["weight_streaming"] is True  # the weights can be left on the host


@pytest.mark.parametrize("name", ["../outside", "/abs", ".hidden", "a/b", ""])
def test_a_name_cannot_leave_the_folder(bundles, name):
    with pytest.raises(DeployError, match="name of an engine"):
        engine_from_bundle(bundles("tiny-gqa"), options(name=name or "."))


def test_targets_that_do_not_exist_are_refused(bundles):
    with pytest.raises(DeployError, match=r"9\.0|SM90"):
        engine_from_bundle(bundles("tiny-gqa"), options(targets="9.0", name="other"))


def test_a_backend_that_is_not_here_is_named(bundles):
    with pytest.raises(BackendUnavailable, match="tensorrt"):
        engine_from_bundle(bundles("tiny-gqa"), EngineOptions(backend="tensorrt", name="other"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version_compatible": True}, "version"),
        ({"hardware_compatible": "ampere-plus"}, "hardware"),
        ({"optimization_level": 9}, "optimization level"),
        ({"refit": "sometimes"}, "refit"),
    ],
)
def test_what_this_version_does_not_have_is_refused_by_name(bundles, changes, text):
    with pytest.raises(DeployError, match=text):
        engine_from_bundle(bundles("tiny-gqa"), options(name="other", **changes))


def test_profiles_outside_the_export_are_refused():
    spec = find_spec("tiny-gqa")
    with pytest.raises(SpecError, match="exported for S from 1 to 64"):
        parse_ranges("S=1:64:128", spec)
    with pytest.raises(SpecError, match="no axis"):
        parse_ranges("X=1:2:3", spec)
    with pytest.raises(SpecError, match="no range"):
        parse_ranges("S", spec)


def test_a_profile_gives_every_input_its_shapes():
    spec = find_spec("tiny-cross-padding")
    shapes = profile_shapes(spec, parse_ranges("B=2,S=1:2:3,T=4:5:6", spec))
    assert shapes["query"] == ((2, 1, 64), (2, 2, 64), (2, 3, 64))
    assert shapes["key"] == ((2, 4, 64), (2, 5, 64), (2, 6, 64))
    assert shapes["key_lengths"] == ((2,), (2,), (2,))


def test_a_changed_or_truncated_engine_is_refused(built, tmp_path):
    for damage in (lambda data: data[:-1], lambda data: data[:100] + b"x" + data[101:]):
        path = tmp_path / built.path.name
        path.write_bytes(damage(built.path.read_bytes()))
        shutil.copy(manifest_path(built.path), manifest_path(path))
        with pytest.raises(BundleError, match="changed or truncated"):
            open_engine(path)


@pytest.mark.parametrize("name", ["theirs.engine", "theirs.plan"])
def test_a_plan_without_a_manifest_shows_what_its_bytes_do(built, tmp_path, run_cli, name):
    path = Path(shutil.copy(built.path, tmp_path / name))
    plan = md.inspect(path).plan
    assert (plan.backend, plan.bytes, plan.sha256) == ("tensorrt-rtx", path.stat().st_size, sha256(path))
    assert len(plan.attention_kernels) == built.manifest.fused_count[0]
    assert md.inspect(built.path).plan is None
    done = run_cli("inspect", path)
    assert done.code == 0, done.err
    assert f"--engine-file {path}" in done.out
    path.write_bytes(b"no plan")
    with pytest.raises(BundleError):
        md.inspect(path)


def test_an_engine_without_manifest_or_plan_is_refused(built, tmp_path):
    path = tmp_path / "lonely.engine"
    path.write_bytes(b"plan")
    with pytest.raises(BundleError, match="no engine with a manifest"):
        open_engine(path)
    path.unlink()
    shutil.copy(manifest_path(built.path), manifest_path(path))
    with pytest.raises(BundleError, match="engine file is missing"):
        open_engine(path)


def test_a_manifest_of_another_format_is_refused(built, tmp_path):
    path = tmp_path / "other.engine"
    shutil.copy(built.path, path)
    data = json.loads(manifest_path(built.path).read_text())
    for change, text in (({"format": 99}, "format of the engine"), ({"surprise": 1}, "cannot be read")):
        manifest_path(path).write_text(json.dumps({**data, **change}))
        with pytest.raises(BundleError, match=text):
            open_engine(path)


def test_an_engine_of_another_bundle_is_refused(built, bundles):
    built.check_bundle(built.path.parents[1])
    with pytest.raises(BundleError, match="another bundle"):
        built.check_bundle(bundles("tiny-gqa", "fp32").path)
