"""Golden cases survive the way to disk bit by bit, and a case that is not the spec's is refused."""

import json

import ml_dtypes
import numpy as np
import own_models
import pytest
from bundle_edit import SIZES, edit_arrays, edit_manifest, golden_case, rehash, small_bundle
from golden_made import made_case

import mha_deploy as md
from mha_deploy.bundle.cases import (
    golden_cases,
    read_arrays,
    read_case,
    refuse_polygraphy,
    unpack_baselines,
    write_case,
    write_polygraphy,
)
from mha_deploy.bundle.folder import open_bundle
from mha_deploy.errors import BundleError, DeployError, ExportError
from mha_deploy.model.precision import PRECISIONS

GROUPS = ("inputs", "oracle", "eager")


@pytest.fixture
def folder(tmp_path):
    return small_bundle(tmp_path / "bundle").path


def read(folder):
    bundle = open_bundle(folder)
    return read_case(bundle, bundle.manifest.golden[0])


def refused(folder, match):
    with pytest.raises(BundleError, match=match) as caught:
        read(folder)
    return caught.value


def bits(array):
    return array.tobytes(), array.dtype, array.shape


# -- round trip ----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_case_is_read_back_bit_by_bit(tmp_path, precision):
    written, case = (
        golden_case(precision=precision),
        read(small_bundle(tmp_path / "b", precision=precision).path),
    )
    assert (case.name, case.sizes) == ("opt", SIZES)
    for group in GROUPS:
        assert {name: bits(array) for name, array in getattr(case, group).items()} == {
            name: bits(array) for name, array in getattr(written, group).items()
        }


def test_every_bfloat16_number_survives(tmp_path):
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)  # with NaN, infinities, subnormals
    write_case(tmp_path / "a.safetensors", made_case({}, inputs={"x": every}))
    read_back = read_arrays(tmp_path / "a.safetensors")["inputs/x"]
    assert read_back.dtype == ml_dtypes.bfloat16
    assert bits(read_back) == bits(every)


def test_key_lengths_stay_whole_numbers(bundles):
    cases = list(golden_cases(bundles("tiny-padding", "bf16")))
    assert [case.name for case in cases] == ["min", "opt", "odd", "ragged", "large"]
    for case in cases:
        assert case.inputs["key_lengths"].dtype == np.int32
        assert case.inputs["x"].dtype == case.eager["output"].dtype == ml_dtypes.bfloat16
        assert case.oracle["output"].dtype == np.float64


# -- cases that are not what the spec says -------------------------------------------------------


@pytest.mark.parametrize("name", ["inputs/x", "oracle/output", "eager/output"])
def test_a_missing_array_is_named(folder, name):
    edit_arrays(folder, lambda arrays: arrays.pop(name))
    assert f"no {name}" in refused(folder, "does not hold the arrays").got


@pytest.mark.parametrize("name", ["inputs/y", "oracle/weights", "anything"])
def test_an_array_too_many_is_named(folder, name):
    edit_arrays(folder, lambda arrays: arrays.update({name: np.zeros(3)}))
    assert f": {name}" in refused(folder, "does not hold the arrays").got


@pytest.mark.parametrize("name", ["inputs/x", "oracle/output", "eager/output"])
@pytest.mark.parametrize(
    "reshape", [lambda a: a[:1], lambda a: a.T, lambda a: a.reshape(-1), lambda a: a[..., None]]
)
def test_a_wrong_shape_is_shown_with_the_right_one(folder, name, reshape):
    edit_arrays(folder, lambda arrays: arrays.update({name: reshape(arrays[name])}))
    error = refused(folder, f"does not hold {name}")
    assert error.got.startswith(error.hint.split()[0])  # the type is right
    assert "(2, 3, 64)" in error.hint


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("inputs/x", np.float32),
        ("inputs/x", np.uint16),
        ("oracle/output", np.float32),
        ("oracle/output", np.complex64),
        ("eager/output", np.float64),
        ("eager/output", np.int16),
    ],
)
def test_a_wrong_type_is_shown_with_the_right_one(folder, name, dtype):
    edit_arrays(folder, lambda arrays: arrays.update({name: np.zeros_like(arrays[name], dtype=dtype)}))
    error = refused(folder, f"does not hold {name}")
    assert error.got.startswith(f"{np.dtype(dtype)} (")
    assert error.hint.startswith("float64" if name == "oracle/output" else "float16")


def test_sizes_that_are_not_the_arrays_are_refused(folder):
    edit_manifest(folder, lambda data: data["golden"][0].update(sizes={"B": 1, "S": 3}))
    refused(folder, "does not hold inputs/x")


@pytest.mark.parametrize("sizes", [{"B": 2}, {}, {"B": 2, "T": 3}, None, [2, 3]])
def test_sizes_that_lack_an_axis_are_refused(folder, sizes):
    edit_manifest(folder, lambda data: data["golden"][0].update(sizes=sizes))
    with pytest.raises(DeployError):
        read(folder)


@pytest.mark.parametrize(
    "name", ["golden/other.safetensors", "../opt.safetensors", "/etc/passwd", "manifest.json", ""]
)
def test_an_entry_that_names_a_file_outside_the_list_is_refused(folder, name):
    edit_manifest(folder, lambda data: data["golden"][0].update(file=name))
    assert refused(folder, "not part of the bundle").got == name


def test_an_entry_that_names_another_file_of_the_bundle_is_refused(folder):
    edit_manifest(folder, lambda data: data["golden"][0].update(file="model.onnx"))
    with pytest.raises(DeployError, match="cannot be read"):
        read(folder)


def test_an_archive_of_numpy_is_refused(folder):
    with (folder / "golden" / "opt.safetensors").open("wb") as file:
        np.savez(file, **{"inputs/x": np.array([{}], dtype=object)})
    rehash(folder)
    assert "opt.safetensors" in refused(folder, "cannot be read").got


# -- for Polygraphy ------------------------------------------------------------------------------


def test_polygraphy_reads_the_same_numbers(tmp_path):
    from polygraphy.comparator import RunResults
    from polygraphy.json import load_json

    case = golden_case()
    write_polygraphy(tmp_path / "p", [case, case])
    inputs = load_json(str(tmp_path / "p" / "inputs.json"))
    assert len(inputs) == 2
    assert bits(inputs[1]["x"]) == bits(case.inputs["x"])
    results = RunResults.load(str(tmp_path / "p" / "outputs.json"))
    (name, iterations), *rest = results.items()
    assert (name, len(iterations), rest) == ("oracle", 2, [])
    assert bits(iterations[1]["output"]) == bits(case.oracle["output"].astype(np.float32))


def test_polygraphy_is_given_no_bfloat16():
    with pytest.raises(ExportError, match="bfloat16"):
        refuse_polygraphy("none", PRECISIONS["bf16"])
    for name in ("fp16", "fp32"):
        refuse_polygraphy("none", PRECISIONS[name])
        with pytest.raises(ExportError, match="caches"):
            refuse_polygraphy("preallocated", PRECISIONS[name])


def test_a_bundle_has_nothing_for_polygraphy_unless_asked(bundles):
    bundle = bundles("tiny-gqa")
    assert not (bundle.path / "golden" / "polygraphy").exists()
    assert not any("polygraphy" in name for name in bundle.manifest.files)
    assert "Polygraphy" not in json.dumps(bundle.manifest.notes)


def test_files_for_polygraphy_that_cannot_be_are_refused_before_anything_is_written(tmp_path):
    for model in ("tiny-gqa", f"{own_models.__file__}:encoder"):
        with pytest.raises(ExportError, match="Polygraphy") as caught:
            md.export(model, tmp_path / "b", precision="bf16", polygraphy=True)
        assert "polygraphy=True" in caught.value.hint
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("group", ["oracle", "eager"])
def test_a_result_that_is_not_finite_is_refused(folder, group):
    def spoil(arrays):
        arrays[f"{group}/output"][0, 0, 0] = np.inf

    edit_arrays(folder, spoil)
    assert "not finite" in refused(folder, "not finite").what


@pytest.mark.parametrize("shape", [(), (65,)])
def test_samples_of_one_number_have_their_own_axis(shape):
    arrays = {"branches": np.zeros(1, np.int32), "samples/fp32/loss": np.zeros(shape, np.uint8)}
    arrays["scale/fp32/loss"] = np.array(1.0)
    with pytest.raises(BundleError, match="does not hold its samples"):
        unpack_baselines("golden/opt.safetensors", arrays, {"loss": np.ones(())}, PRECISIONS["fp32"])
