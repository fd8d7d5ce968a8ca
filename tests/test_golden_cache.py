"""Golden files hold the new rows of a cache, and the cases that are read from them hold all of it."""

import numpy as np
import pytest
import torch

from mha_deploy.bundle.cases import (
    entries_from,
    first_new_entries,
    read_arrays,
    read_case,
    with_entries,
    write_arrays,
    write_case,
)
from mha_deploy.bundle.folder import open_bundle
from mha_deploy.bundle.sizes import plan_golden
from mha_deploy.errors import BundleError
from mha_deploy.exporter.golden import LayerCapture
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.model.precision import find_precision
from mha_deploy.reference import build_module

CACHED = ("tiny-dynamic", "tiny-preallocated")


def moved(bundle, folder):
    """The same bundle in another folder, whose files nobody vouches for."""
    (folder / "golden").mkdir(parents=True)
    other = open_bundle(bundle.path)
    object.__setattr__(other, "path", folder)
    return other


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", CACHED)
def test_what_is_read_is_what_was_captured(bundles, tmp_path, name):
    bundle, wanted = bundles(name), find_precision("fp16")
    module = build_module(bundle.manifest.spec, dtype=getattr(torch, wanted.torch_name), path="plain")
    capture = LayerCapture(module, wanted, seed=0)
    planned = {case.name: case for case in plan_golden(bundle.manifest.spec).cases}
    other = moved(bundle, tmp_path / "bundle")
    for entry in bundle.manifest.golden:
        captured = capture.capture(planned[entry.name])
        write_case(other.path / entry.file, captured)
        read = read_case(other, entry)
        for group in ("inputs", "oracle", "eager"):
            for key, array in getattr(captured, group).items():
                got = getattr(read, group)[key]
                assert got.dtype == array.dtype
                np.testing.assert_array_equal(got.astype(np.float64), array.astype(np.float64))


@pytest.mark.parametrize("name", CACHED)
def test_a_file_holds_no_old_entry_twice(bundles, name):
    bundle = bundles(name)
    for entry in bundle.manifest.golden:
        layer = bundle.manifest.spec
        S, Hkv, D = entry.sizes["S"], layer.Hkv, layer.D
        arrays = read_arrays(bundle.file(entry.file))
        shapes = {key: arrays[key].shape for key in arrays if "oracle/" in key and "/output" not in key}
        assert set(shapes.values()) == {(entry.sizes["B"], Hkv, S, D)}


def test_entries_go_out_and_back_ragged():
    rng = np.random.default_rng(0)
    inputs = {
        "x": np.zeros((3, 2, 8)),
        "key_cache": rng.standard_normal((3, 2, 6, 4)),
        "lengths": np.array([0, 4, 2], np.int32),
    }
    new = rng.standard_normal((3, 2, 2, 4))
    starts = first_new_entries(inputs, "key_cache")
    whole = with_entries(inputs["key_cache"], new, starts)
    for row, start in enumerate((0, 4, 2)):
        np.testing.assert_array_equal(whole[row, :, start : start + 2], new[row])
        kept = np.delete(whole[row], [start, start + 1], axis=1)
        np.testing.assert_array_equal(kept, np.delete(inputs["key_cache"][row], [start, start + 1], axis=1))
    np.testing.assert_array_equal(entries_from(whole, starts, 2), new)


def test_lengths_that_do_not_fit_are_refused(bundles, tmp_path):
    bundle = bundles("tiny-preallocated")
    entry = bundle.manifest.golden[0]
    arrays = read_arrays(bundle.file(entry.file))
    arrays["inputs/lengths"] = np.array([64], np.int32)
    forged = moved(bundle, tmp_path / "bundle")
    write_arrays(forged.path / entry.file, arrays)
    with pytest.raises(BundleError, match="do not fit its cache"):
        read_case(forged, entry)


def test_large_caches_get_small_batches():
    spec = AttentionSpec.from_dict(
        {
            "name": "long",
            "Hq": 8,
            "E": 1024,
            "causal": True,
            "cache": "preallocated",
            "axes": {"B": {"min": 1, "opt": 2, "max": 8}, "S": {"min": 1, "opt": 16, "max": 64}, "T": 32768},
        }
    )
    rows = {case.name: case.sizes["B"] for case in plan_golden(spec, ("odd", "ragged")).cases}
    assert rows == {"odd": 1, "ragged": 1}
