"""Which profiles a layer with a cache gets from which TensorRT, and if they can be prepared: on fakes."""

import cuda_fake
import numpy as np
import pytest
from bundle_edit import copy_of
from decode_layers import FORMS, running_sum, tokens
from fake_engines import VERSIONS, fake
from tensorrt_fake import ENGINES

from mha_deploy.bundle.folder import open_bundle
from mha_deploy.engine import build
from mha_deploy.engine.build import FirstRun, engine_from_bundle, run_first
from mha_deploy.engine.engine import open_engine, parse_ranges
from mha_deploy.errors import BackendUnavailable
from mha_deploy.options import EngineOptions
from mha_deploy.runtime.tensorrt.engine_runner import TensorRTRunner, first_admitting
from mha_deploy.runtime.tensorrt.kernels import LargeTensor
from mha_deploy.runtime.tensorrt.versions import EngineError

# TensorRT-RTX really builds in other tests; its fake cannot.
WITH_GPU = [version for version in VERSIONS if not version.startswith("rtx")]
CACHED = ["tiny-dynamic", "tiny-preallocated"]
OLD, NEW = "8.6.1", "10.0.1"


@pytest.fixture
def device(monkeypatch):
    return cuda_fake.install(monkeypatch)


@pytest.fixture
def built(device, bundles, tmp_path, monkeypatch):
    """Build a layer with the fake of a version, which gives a plan of two profiles whatever it is asked."""

    def make(name, version, texts=(), **settings):
        rt = fake(version)
        vars(rt.module).update(settings)
        monkeypatch.setattr(build, "load", lambda backend: rt)
        bundle = open_bundle(copy_of(bundles(name), tmp_path / f"{name}-{version}"))
        profiles = [parse_ranges(text, bundle.manifest.spec) for text in texts]
        options = EngineOptions(backend="tensorrt", profiles=profiles, allow_decomposed=True)
        engine = engine_from_bundle(bundle, options)
        asked = [shapes["x"] for shapes in rt.module.last.config._profiles]
        return open_engine(engine.path).manifest, asked

    return make


@pytest.mark.sweep(5)
@pytest.mark.parametrize("version", WITH_GPU)
@pytest.mark.parametrize("name", CACHED)
def test_a_layer_with_a_cache_has_two_profiles_where_both_can_be_prepared(built, name, version):
    manifest, asked = built(name, version)
    if version == OLD:
        assert manifest.profile_names == ["0"]
        assert [profile["S"] for profile in manifest.profiles] == ["1:16:64"]
        assert asked == [((1, 1, 64), (2, 16, 64), (4, 64, 64))]
    else:
        assert manifest.profile_names == ["prefill", "decode"]
        assert [profile["S"] for profile in manifest.profiles] == ["1:16:64", "1:1:1"]
        assert asked[1:] == [((1, 1, 64), (2, 1, 64), (4, 1, 64))]


def test_profiles_that_were_requested_stay_as_they_are(built):
    manifest, asked = built("tiny-preallocated", OLD, ["S=2:16:64", "S=1"])
    assert manifest.profile_names == ["prefill", "decode"]
    assert [shapes[2] for shapes in asked] == [(4, 64, 64), (4, 1, 64)]


def test_a_layer_without_a_cache_has_its_own_ranges_everywhere(built):
    for version in (OLD, NEW):
        manifest, _ = built("tiny-gqa", version)
        assert [profile["S"] for profile in manifest.profiles] == ["1:16:64"]


# -- one profile for everything --------------------------------------------------------------------


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("plan", [b"rows", b"dynamic"])
def test_one_profile_serves_prompts_and_single_tokens(device, monkeypatch, plan, graph):
    """Contexts come in turn: where profiles are not shared, there is never a second one beside the first."""
    two = FORMS[plan]
    one = type(two)(**{**vars(two), "profiles": two.profiles[:1]})
    monkeypatch.setitem(ENGINES, plan, one)
    rt = fake(OLD)
    rt.module.most_contexts = 1
    x = tokens(8)
    with TensorRTRunner(rt, plan, cuda_graph=graph) as runner:
        least = {name: shapes[0] for name, shapes in one.profiles[0].items()}
        for S in (1, 8):
            assert first_admitting(runner.profiles, {**least, "x": (1, S, x.shape[2])}, tightest=True) == 0
        with runner.decode_loop(B=len(x), T=8 if plan == b"dynamic" else None) as loop:
            parts = [loop.feed(part) for part in np.split(x, [3, 4, 5, 7], axis=1)]
            assert rt.module.last_context()._profile == 0
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), running_sum(x))
    assert device.is_empty()


# -- is it any use ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", WITH_GPU)
def test_an_engine_that_can_be_prepared_has_no_note(device, version):
    first = run_first(fake(version), b"rows", ["prefill", "decode"])
    assert (first.ran, first.notes, first.is_useless) == (("prefill", "decode"), [], False)
    assert device.is_empty()


@pytest.mark.parametrize("most", [0, 1])
def test_a_profile_without_a_context_is_named(device, most):
    rt = fake(OLD)
    rt.module.most_contexts = most
    first = run_first(rt, b"rows", ["prefill", "decode"])
    assert list(first.failed) == ["prefill", "decode"][most:]
    assert all("missing offset in id2offset" in why for why in first.failed.values())
    assert first.is_useless == (most == 0)
    assert device.is_empty()


def test_a_usual_size_that_tensorrt_cannot_hold_is_not_tried(device):
    scores = LargeTensor(tensor="scores", dims="2147483647,S", axes={"S": ("x", 1)})
    first = run_first(fake(NEW), b"rows", ["prefill", "decode"], large_tensors=[scores])
    assert list(first.skipped) == ["prefill"]  # single tokens are one token
    assert first.ran == ("decode",)
    assert "build it again" not in first.skipped["prefill"]
    assert device.is_empty()


def test_what_cannot_be_prepared_is_in_the_manifest_and_the_engine_is_there(built):
    manifest, _ = built("tiny-preallocated", OLD, ["S=2:16:64", "S=1"], most_contexts=1)
    assert manifest.notes[0].startswith("engine built, but profile decode cannot be prepared: ")
    manifest, _ = built("tiny-gqa", OLD)
    assert not [note for note in manifest.notes if "prepared" in note]


def test_an_engine_that_cannot_be_loaded_is_reported(device, monkeypatch):
    rt = fake(OLD)
    monkeypatch.setattr(rt.module.Runtime, "deserialize_cuda_engine", lambda self, plan: None)
    first = run_first(rt, b"rows", ["0"])
    assert first.is_useless
    assert "TensorRT 8.6.1 cannot load this engine" in first.failed["0"]


@pytest.mark.parametrize("useless", [0, 1, 2, 3])
def test_an_engine_that_cannot_be_run_is_built_again_at_most_twice(built, monkeypatch, useless):
    """Seen with 8.6 on a busy GPU: no execution context in any process, and the next build has one."""
    tried = []
    real = build.run_first

    def first(rt, plan, names, **options):
        tried.append(plan)
        rt.module.most_contexts = 0 if len(tried) <= useless else 9
        return real(rt, plan, names, **options)

    monkeypatch.setattr(build, "run_first", first)
    if useless == 3:
        with pytest.raises(EngineError) as caught:
            built("tiny-gqa", OLD)
        assert "missing offset in id2offset" in caught.value.got
    else:
        manifest, _ = built("tiny-gqa", OLD)
        assert any("missing offset" in note for note in manifest.notes) == (useless > 0)
    assert len(tried) == min(useless + 1, 3)


def test_an_engine_that_has_a_context_and_does_not_run_is_not_done(device):
    rt = fake(OLD)
    rt.module.refuses = "execute_async_v3"
    first = run_first(rt, b"rows", ["prefill", "decode"])
    assert first.is_useless, first


def test_without_a_gpu_nothing_is_tried(in_process, monkeypatch):
    def none():
        raise BackendUnavailable("There is no GPU.")

    monkeypatch.setattr("mha_deploy.runtime.gpu.open_gpu", none)
    assert run_first(fake(OLD), b"rows", ["0"]) == FirstRun()
    assert run_first(fake("rtx-1.7.1"), b"rows", ["0"]) == FirstRun()
