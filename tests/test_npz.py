"""Files of arrays from anywhere: what was written is read, everything else is refused."""

import io
import json
import pickle
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest

from mha_deploy.bundle.cases import read_arrays, read_npz, write_arrays
from mha_deploy.errors import BundleError, DeployError


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


ARRAY = npy(np.arange(300.0))


def header(text):
    """An .npy file that says whatever it likes about its data, and has 64 bytes of it."""
    text = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(64)


def claiming(shape, descr="'<f8'"):
    return header(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}")


def archive(member, name="a.npy", method=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        file.writestr(name, member)
    return buffer.getvalue()


def corrupted(method):
    data = bytearray(archive(ARRAY, method=method))
    data[60:90] = b"\xff" * 30
    return bytes(data)


def encrypted():
    """An archive whose headers say that its member needs a password."""
    data = bytearray(archive(ARRAY))
    data[6] |= 1
    data[data.find(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


HOSTILE = {
    "empty": b"",
    "garbage": b"\x00\x01 not an archive at all",
    "a single array": ARRAY,
    "a text": b"B = 1\n",
    "a zip header and no more": b"PK\x03\x04" + bytes(50),
    "truncated": archive(ARRAY)[:-30],
    "a member that is no array": archive(b"hello", name="readme.txt"),
    "an empty member": archive(b""),
    "half an array": archive(ARRAY[:1000]),
    "an unknown version": archive(b"\x93NUMPY\x09\x00" + bytes(50)),
    "more bytes than an address can hold": archive(claiming("(1152921504606846976,)")),
    "a size that overflows": archive(claiming("(1099511627776, 1099511627776)")),
    "thirty gigabytes": archive(claiming("(4000000000,)")),
    "a negative size": archive(claiming("(-1,)")),
    "a shape of another type": archive(claiming("'abc'")),
    "an unknown type": archive(claiming("(8,)", "'<q77'")),
    "a header that is no dictionary": archive(header("None")),
    "a header that never closes": archive(header("(" * 9000)),
    "a header that nests deeply": archive(header("-" * 9000 + "1")),
    "broken deflate data": corrupted(zipfile.ZIP_DEFLATED),
    "broken bzip2 data": corrupted(zipfile.ZIP_BZIP2),
}
ESCAPING = {
    "a shape of truth values": archive(claiming("(True,)")),
    "a header that adds without end": archive(header("1+" * 4500 + "1")),
    "a member that needs a password": encrypted(),
    "broken lzma data": corrupted(zipfile.ZIP_LZMA),
}


def test_arrays_are_read_as_they_were_written(tmp_path):
    arrays = {"x": np.arange(6, dtype=np.float16).reshape(2, 3), "group/y": np.array([True, False])}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays)
        got = read_npz(tmp_path / "a.npz")
        assert list(got) == list(arrays)
        for name, array in arrays.items():
            assert got[name].dtype == array.dtype
            np.testing.assert_array_equal(got[name], array)


@pytest.mark.parametrize("content", [*HOSTILE.values(), *ESCAPING.values()], ids=[*HOSTILE, *ESCAPING])
def test_what_is_no_archive_of_arrays_is_refused(tmp_path, content):
    path = tmp_path / "hostile.npz"
    path.write_bytes(content)
    with pytest.raises(DeployError, match="cannot be read") as caught:
        read_npz(path)
    assert str(path) in caught.value.got
    assert "numpy.savez" in caught.value.hint
    assert caught.value.__cause__ is not None


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("kind", ["object array", "bare pickle", "pickle as a member"])
def test_nothing_is_unpickled(tmp_path, kind):
    proof, path = tmp_path / "proof", tmp_path / "hostile.npz"
    if kind == "object array":
        np.savez(path, a=np.array([Payload(proof)], dtype=object))
    else:
        payload = pickle.dumps(Payload(proof))
        path.write_bytes(payload if kind == "bare pickle" else archive(payload))
    with pytest.raises(DeployError, match="cannot be read"):
        read_npz(path)
    assert not proof.exists()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DeployError, match=r"There is no such \.npz file") as caught:
        read_npz(tmp_path / "absent.npz")
    assert caught.value.got == str(tmp_path / "absent.npz")


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(DeployError, match="cannot be read"):
        read_npz(tmp_path)


def test_names_are_checked_before_any_array_is_read(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(archive(claiming("(1152921504606846976,)"), name="surprise.npy"))

    def refuse(names):
        raise DeployError("Not these.", got=names, hint="another")

    with pytest.raises(DeployError, match=r"Not these\.") as caught:
        read_npz(path, check_names=refuse)
    assert caught.value.got == "['surprise']"


# -- Arrays of a bundle ----------------------------------------------------------------------------


def safetensors(header, data=bytes(64)):
    """A file whose header claims whatever it likes about its 64 bytes of data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def claimed(dtype="F64", shape=(8,), offsets=(0, 64)):
    return {"a": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


HOSTILE_ARRAYS = {
    "empty": b"",
    "garbage": b"\x00\x01 not arrays at all",
    "an archive of NumPy": archive(ARRAY),
    "a header and no more": struct.pack("<Q", 1000) + b"{",
    "a header of many gigabytes": struct.pack("<Q", 2**40) + b"{}",
    "a header that is no JSON": safetensors(b"a" * 64),
    "a header that is a list": safetensors(b"[1, 2, 3]"),
    "a header that nests deeply": safetensors(b"[" * 90_000),
    "truncated": safetensors(claimed(), bytes(32)),
    "bytes that nothing names": safetensors(claimed(shape=(4,), offsets=(0, 32))),
    "a shape that is not the data": safetensors(claimed(shape=(7,))),
    "more bytes than an address can hold": safetensors(claimed(shape=(2**61,), offsets=(0, 2**64 - 1))),
    "a size that overflows": safetensors(claimed(shape=(2**40, 2**40))),
    "a negative size": safetensors(claimed(shape=(-8,))),
    "offsets that go backwards": safetensors(claimed(offsets=(64, 0))),
    "an unknown type": safetensors(claimed(dtype="Q77")),
}


@pytest.mark.parametrize("content", HOSTILE_ARRAYS.values(), ids=HOSTILE_ARRAYS)
def test_a_file_of_arrays_that_is_none_is_refused_by_name(tmp_path, content):
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(content)
    with pytest.raises(BundleError, match="cannot be read") as caught:
        read_arrays(path)
    assert str(path) in caught.value.got


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()], ids=["absent", "a folder"])
def test_arrays_that_are_not_there_are_named(tmp_path, make):
    path = tmp_path / "a.safetensors"
    make(path)
    with pytest.raises(BundleError, match="cannot be read") as caught:
        read_arrays(path)
    assert f"no such file: {path}" in caught.value.got


def test_other_arrays_than_the_known_ones_are_refused(tmp_path):
    write_arrays(tmp_path / "a", {"surprise": np.zeros(3), "known": np.zeros(3)})
    with pytest.raises(BundleError, match="does not hold the arrays") as caught:
        read_arrays(tmp_path / "a", {"known", "missing"})
    assert caught.value.got == "a: no missing, surprise"


def test_arrays_of_every_type_and_layout_come_back(tmp_path):
    arrays = {
        "inputs/x": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
        "inputs/transposed": np.arange(6, dtype=np.float16).reshape(2, 3).T,
        "inputs/steps": np.array(3, np.int32),
        "inputs/mask": np.array([True, False]),
        "inputs/none": np.zeros((0, 4), np.float32),
        "oracle/y": np.array([1 / 3, np.nan, -0.0]),
    }
    write_arrays(tmp_path / "a.safetensors", arrays)
    got = read_arrays(tmp_path / "a.safetensors")
    assert got.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
        assert got[name].tobytes() == array.tobytes()
        assert got[name].flags.writeable
