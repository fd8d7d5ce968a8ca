"""Prompts and single tokens as profiles: which ranges they have, what they are called, where that shows."""

import json
import shutil

import msgspec
import pytest

from mha_deploy.bundle.folder import open_bundle
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.engine.engine import (
    default_profiles,
    manifest_path,
    open_engine,
    parse_ranges,
    profile_names,
    profile_shapes,
)
from mha_deploy.errors import SpecError
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.spec import Axis
from mha_deploy.options import EngineOptions

DYNAMIC, PREALLOCATED = find_spec("tiny-dynamic"), find_spec("tiny-preallocated")
CACHED = pytest.mark.parametrize("name", ["tiny-dynamic", "tiny-preallocated"])


def written(profiles):
    return [{name: str(axis) for name, axis in ranges.items()} for ranges in profiles]


# -- the ranges --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-gqa", "tiny-cross-padding", "tiny-softcap"])
def test_a_layer_without_a_cache_has_its_own_ranges(name):
    spec = find_spec(name)
    assert default_profiles(spec) == [spec.axes]


def test_a_layer_with_a_cache_has_a_profile_for_prompts_and_one_for_tokens():
    assert written(default_profiles(DYNAMIC)) == [
        {"B": "1:2:4", "S": "1:16:64", "P": "0:0:63"},
        {"B": "1:2:4", "S": "1:1:1", "P": "0:24:63"},
    ]
    assert written(default_profiles(PREALLOCATED)) == [
        {"B": "1:2:4", "S": "1:16:64", "T": "64:64:64"},
        {"B": "1:2:4", "S": "1:1:1", "T": "64:64:64"},
    ]


@pytest.mark.parametrize("S", [Axis(min=1, opt=1, max=1), Axis(min=2, opt=4, max=8)], ids=str)
@pytest.mark.parametrize("spec", [DYNAMIC, PREALLOCATED], ids=lambda spec: spec.name)
def test_a_layer_that_takes_only_tokens_or_none_alone_has_one_profile(spec, S):
    spec = spec.with_axes({"S": S})
    assert default_profiles(spec) == [spec.axes]


@pytest.mark.parametrize("spec", [DYNAMIC, PREALLOCATED], ids=lambda spec: spec.name)
def test_every_size_that_the_spec_allows_fits_a_profile(spec):
    prefill, decode = default_profiles(spec)
    for name, axis in spec.axes.items():
        assert (prefill[name].min, prefill[name].max) == (axis.min, axis.max)
        assert name == "S" or decode[name] == axis


def test_the_shapes_of_a_prompt_begin_with_an_empty_past():
    prefill, decode = (profile_shapes(DYNAMIC, ranges) for ranges in default_profiles(DYNAMIC))
    assert prefill["past_key"] == ((1, 2, 0, 16), (2, 2, 0, 16), (4, 2, 63, 16))
    assert decode["past_key"] == ((1, 2, 0, 16), (2, 2, 24, 16), (4, 2, 63, 16))
    assert decode["x"] == ((1, 1, 64), (2, 1, 64), (4, 1, 64))
    static = profile_shapes(PREALLOCATED, default_profiles(PREALLOCATED)[1])
    assert static["key_cache"] == ((1, 2, 64, 16), (2, 2, 64, 16), (4, 2, 64, 16))
    assert static["lengths"] == ((1,), (2,), (4,))


def test_a_profile_may_begin_with_an_empty_past_and_no_other_axis_with_nothing():
    assert str(parse_ranges("P=0,S=1:16:64", DYNAMIC)["P"]) == "0:0:0"
    assert str(parse_ranges("P=0:8:16", DYNAMIC)["P"]) == "0:8:16"
    for text in ("S=0:16:64", "B=0"):
        with pytest.raises(SpecError, match="whole numbers of at least 1"):
            parse_ranges(text, DYNAMIC)
    with pytest.raises(SpecError, match="exported for P from 0 to 63"):
        parse_ranges("P=0:8:64", DYNAMIC)


# -- the names ---------------------------------------------------------------------------------


def test_profiles_are_numbered_or_named_by_what_they_are_for():
    plain = find_spec("tiny-gqa")
    assert profile_names(plain, [plain.axes] * 3) == ["0", "1", "2"]
    for spec in (DYNAMIC, PREALLOCATED):
        assert profile_names(spec, default_profiles(spec)) == ["prefill", "decode"]
        assert profile_names(spec, default_profiles(spec)[::-1]) == ["decode", "prefill"]


def test_a_profile_for_prompts_and_tokens_alike_has_a_number():
    both, prompts = (parse_ranges(text, DYNAMIC) for text in ("S=1:16:64", "S=4:8:16"))
    token = parse_ranges("S=1", DYNAMIC)
    assert profile_names(DYNAMIC, [both]) == ["0"]
    assert profile_names(DYNAMIC, [both, prompts]) == ["0", "1"]
    assert profile_names(DYNAMIC, [both, token]) == ["prefill", "decode"]
    assert profile_names(DYNAMIC, [token]) == ["decode"]


def test_names_that_would_be_the_same_are_numbered():
    texts = ("S=1:8:16", "S=1", "S=16:32:64", "S=1,B=1")
    profiles = [parse_ranges(text, DYNAMIC) for text in texts]
    assert profile_names(DYNAMIC, profiles) == ["prefill-0", "decode-0", "prefill-1", "decode-1"]
    assert profile_names(DYNAMIC, profiles[:3]) == ["prefill-0", "decode", "prefill-1"]


# -- engines -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(bundles, tmp_path_factory):
    """One engine of each cached layer, with the profiles that nobody asked for."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    folder, made = tmp_path_factory.mktemp("profiles"), {}

    def engine(name):
        if name not in made:
            target = folder / name
            shutil.copytree(bundles(name).path, target, ignore=shutil.ignore_patterns("engines"))
            options = EngineOptions(backend="tensorrt-rtx", targets="8.9")
            made[name] = engine_from_bundle(open_bundle(target), options)
        return made[name]

    return engine


@pytest.mark.sweep(1)
@CACHED
def test_an_engine_has_both_profiles_and_is_fused_in_both(engines, name):
    manifest = open_engine(engines(name).path).manifest
    assert manifest.profile_names == ["prefill", "decode"]
    assert manifest.profiles == written(default_profiles(find_spec(name)))
    fused = {
        manifest.profile_name(node.profile): (node.status, node.kernels[0][:12])
        for node in manifest.verdict.nodes
    }
    assert fused == {"prefill": ("fused", "_gemm_mha_v2"), "decode": ("fused", "_gemv_mha_v1")}
    assert manifest.all_fused
    assert manifest.has_requested_types


@pytest.mark.sweep(1)
@CACHED
def test_inspect_names_the_profiles(engines, run_cli, name):
    done = run_cli("inspect", engines(name).path)
    assert done.code == 0, done.err
    last = "P 0:0:63" if name == "tiny-dynamic" else "T 64:64:64"
    assert f"profile prefill  B 1:2:4  S 1:16:64  {last}" in done.out
    assert "profile decode   B 1:2:4  S 1:1:1" in done.out
    rows = [line.split() for line in done.out.splitlines()]
    nodes = {
        row[1]: (row[2], row[3][:12]) for row in rows if row[:1] == ["attention"] and row[1] != "profile"
    }
    assert nodes == {"prefill": ("fused", "_gemm_mha_v2"), "decode": ("fused", "_gemv_mha_v1")}
    assert {row[0] for row in rows if len(row) > 1 and "_mha_v" in row[1]} == {"prefill", "decode"}


@pytest.mark.slow
def test_build_engine_prints_the_profiles_it_was_given(bundles, run_cli, tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    bundle = shutil.copytree(bundles("tiny-dynamic").path, tmp_path / "bundle")
    done = run_cli(
        "build-engine", bundle, "--backend", "tensorrt-rtx", "--sm", "8.9", "--name", "given",
        "--profile", "S=1:16:64,P=0", "--profile", "S=1,P=1:24:63",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "profile prefill  B 1:2:4  S 1:16:64  P 0:0:0" in done.out
    assert "profile decode   B 1:2:4  S 1:1:1  P 1:24:63" in done.out
    assert open_engine(bundle / "engines" / "given.engine").manifest.all_fused


def test_an_engine_written_before_profiles_had_names_still_opens(engines, run_cli, tmp_path):
    engine = engines("tiny-preallocated")
    path = tmp_path / "old.engine"
    shutil.copy(engine.path, path)
    data = json.loads(manifest_path(engine.path).read_text(encoding="utf-8"))
    del data["profile_names"]
    manifest_path(path).write_text(json.dumps(data), encoding="utf-8")
    manifest = open_engine(path).manifest
    assert [manifest.profile_name(index) for index in range(2)] == ["0", "1"]
    named = msgspec.structs.replace(manifest, profile_names=engine.manifest.profile_names)
    assert named == open_engine(engine.path).manifest
    assert "profile 1" in run_cli("inspect", path).out


def test_where_one_profile_serves_all_its_usual_batch_is_above_1():
    (alone,) = default_profiles(PREALLOCATED.with_axes({"B": Axis(min=1, opt=1, max=32)}), one=True)
    assert written([alone]) == [{"B": "1:8:32", "S": "1:16:64", "T": "64:64:64"}]
    assert default_profiles(PREALLOCATED, one=True) == [PREALLOCATED.axes]
    (single,) = default_profiles(PREALLOCATED.with_axes({"B": Axis(min=1, opt=1, max=1)}), one=True)
    assert str(single["B"]) == "1:1:1"
