"""Which tokens a bundle decodes: its own, which must be what it says, and those that were requested."""

import shutil

import numpy as np
import pytest
from bundle_edit import copy_of, edit_manifest, rehash

import mha_deploy as md
from mha_deploy.bundle.cases import plan_trace
from mha_deploy.bundle.folder import open_bundle
from mha_deploy.errors import BundleError, DeployError
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.spec import Axis
from mha_deploy.options import ValidateOptions
from mha_deploy.validation.decode import traces_of

CACHES = ("tiny-preallocated", "tiny-dynamic")  # both have room for 64 tokens


def with_axes(name, **axes):
    return find_spec(name).with_axes({axis: Axis.parse(text, name=axis) for axis, text in axes.items()})


# -- room ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "room"),
    [
        (find_spec("tiny-preallocated"), 64),
        (find_spec("tiny-dynamic"), 64),
        (find_spec("tiny-gqa"), find_spec("tiny-gqa").axes["S"].max),
        (find_spec("tiny-cross"), find_spec("tiny-cross").axes["S"].max),
        (with_axes("tiny-dynamic", P="0"), 1),
        (with_axes("tiny-dynamic", P="0:5:99"), 100),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_room_is_that_of_single_tokens_to_the_end(spec, room):
    assert spec.room == room


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (with_axes("tiny-dynamic", P="0"), "no room for a second token"),
        (with_axes("tiny-preallocated", T="1", S="1"), "no room for a second token"),
        (with_axes("tiny-dynamic", P="1:24:63"), "export it with P=0:24:63"),
        (with_axes("tiny-preallocated", S="2:4:8"), "export it with S=1:4:8"),
    ],
    ids=["P=0", "T=1", "P from 1", "S from 2"],
)
def test_a_plan_says_what_keeps_a_layer_from_a_trace(spec, why):
    assert plan_trace(spec).endswith(why)


# -- the bundle's own ------------------------------------------------------------------------------


def test_the_traces_of_a_bundle_are_read_under_their_names(bundles):
    for name in CACHES:
        assert [trace.name for trace in traces_of(bundles(name), ValidateOptions())] == ["steps"]


def test_a_trace_under_another_name_than_its_files_is_refused(bundles, tmp_path):
    folder = copy_of(bundles("tiny-preallocated"), tmp_path / "bundle")
    edit_manifest(folder, lambda data: data["traces"][0].update(name="other"))
    with pytest.raises(BundleError, match="another name") as caught:
        traces_of(open_bundle(folder), ValidateOptions())
    assert caught.value.got == "other in traces/steps.safetensors"


def test_a_trace_of_another_layer_is_refused(bundles, tmp_path):
    folder = copy_of(bundles("tiny-dynamic"), tmp_path / "bundle")
    shutil.copy(bundles("tiny-preallocated").path / "traces" / "steps.safetensors", folder / "traces")
    rehash(folder)
    with pytest.raises(DeployError, match="one length"):
        traces_of(open_bundle(folder), ValidateOptions())


# -- fresh ones ------------------------------------------------------------------------------------


def fresh(bundle, **options):
    return traces_of(bundle, ValidateOptions(**options))[-1]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("steps", "prompt"), [(1, 16), (50, 14), (63, 1)])
@pytest.mark.parametrize("name", CACHES)
def test_the_usual_prompt_leaves_room_for_the_steps(bundles, name, steps, prompt):
    trace = fresh(bundles(name), steps=steps)
    assert (trace.steps, np.unique(trace.prompt).tolist(), trace.B) == (steps, [prompt], 2)


@pytest.mark.parametrize("name", CACHES)
def test_more_steps_than_there_is_room_for_are_refused(bundles, name):
    with pytest.raises(DeployError, match="no room for a prompt") as caught:
        fresh(bundles(name), steps=64)
    assert (caught.value.got, caught.value.hint) == ("steps=64", "63 steps at most")


def test_they_are_refused_before_any_work(bundles, tmp_path):
    folder = copy_of(bundles("tiny-dynamic"), tmp_path / "bundle")
    (folder / "model.onnx").unlink()  # what the work would begin with
    with pytest.raises(DeployError, match="no room for a prompt"):
        md.validate(folder, steps=64)


@pytest.mark.parametrize(
    ("options", "got", "hint"),
    [
        ({"steps": 50, "prompt": 16}, "a prompt of 16 tokens and 50 steps", "48 steps at most"),
        ({"steps": 1, "prompt": 64}, "a prompt of 64 tokens and 1 steps", "64 tokens in all at most"),
        ({"steps": 1, "batch": 5}, "B=5", "a size from 1 to 4, or export it for others"),
        ({"steps": 1, "prompt": 65}, "S=65", "a size from 1 to 64, or export it for others"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", CACHES)
def test_what_was_asked_for_and_does_not_fit_is_refused(bundles, name, options, got, hint):
    with pytest.raises(DeployError) as caught:
        fresh(bundles(name), **options)
    assert (caught.value.got, caught.value.hint) == (got, hint)


def test_steps_of_a_layer_without_a_cache_are_refused(bundles):
    with pytest.raises(DeployError, match="no KV cache"):
        fresh(bundles("tiny-gqa"), steps=3)
