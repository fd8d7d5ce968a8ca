"""How alike heads are, the inputs that are given for it, and its picture."""

import builtins
import io
import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from mha_deploy.analysis.similarity import (
    head_similarity,
    read_inputs,
    similarity_from_heads,
    similarity_from_module,
)
from mha_deploy.cli.tables import similarity_renderable
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.model.spec import Axis

TO_64 = Axis(min=1, opt=8, max=64)
SELF = AttentionSpec(name="self", Hq=4, Hkv=4, D=8, E=32, axes={"B": TO_64, "S": TO_64})
PADDED = replace(SELF, name="padded", mask="padding")
CROSS = replace(SELF, name="cross", attends="cross", axes={"B": TO_64, "S": TO_64, "T": TO_64})
BIASED = replace(SELF, name="biased", mask="additive")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class TestFromHeads:
    def test_identical_heads_give_one(self):
        result = similarity_from_heads(np.repeat(normal(50, 1, 8), 4, axis=1))
        np.testing.assert_allclose(result.matrix, np.ones((4, 4)), atol=1e-12)
        assert result.redundancy == pytest.approx(1.0)

    def test_orthogonal_heads_give_zero(self):
        heads = normal(50, 1, 1) * np.eye(4, 8)[None]
        result = similarity_from_heads(heads)
        np.testing.assert_allclose(result.matrix, np.eye(4), atol=1e-12)
        assert result.redundancy == pytest.approx(0.0, abs=1e-12)

    def test_independent_heads_are_close_to_zero(self):
        result = similarity_from_heads(normal(4000, 6, 32))
        assert result.redundancy < 0.01
        np.testing.assert_allclose(np.diag(result.matrix), 1.0)

    def test_known_angles_and_the_most_similar_pair(self):
        # head 1 at 60 degrees from head 0, head 2 opposite to head 0, each of another length
        heads = np.array([[[1.0, 0.0], [1.0, np.sqrt(3.0)], [-5.0, 0.0]]])
        result = similarity_from_heads(heads)
        np.testing.assert_allclose(result.matrix, [[1, 0.5, -1], [0.5, 1, -0.5], [-1, -0.5, 1]], atol=1e-12)
        assert result.pair == (0, 2)
        assert result.pair_similarity == pytest.approx(-1.0)
        assert result.redundancy == pytest.approx((0.5 + 1.0 + 0.5) / 3)

    def test_the_mean_is_over_cosines_not_over_lengths(self):
        agree, oppose = [[1.0, 0.0], [1.0, 0.0]], [[1000.0, 0.0], [-1000.0, 0.0]]
        assert similarity_from_heads(np.array([agree, oppose])).matrix[0, 1] == pytest.approx(0.0)

    def test_more_tokens_than_one_chunk(self):
        heads = normal(2500, 3, 4)
        unit = (heads / np.linalg.norm(heads, axis=-1, keepdims=True)).astype(np.float64)
        expected = np.einsum("nid,njd->ij", unit, unit) / 2500
        np.testing.assert_allclose(similarity_from_heads(heads).matrix, expected, atol=1e-6)

    def test_zero_tokens_are_left_out(self):
        heads = normal(20, 3, 4)
        padded = np.concatenate([heads, np.zeros((30, 3, 4), dtype=np.float32)])
        result = similarity_from_heads(padded)
        np.testing.assert_allclose(result.matrix, similarity_from_heads(heads).matrix)
        assert result.tokens == 20

    def test_a_head_that_is_zero_at_one_token_still_counts_at_the_others(self):
        heads = np.ones((4, 2, 3))
        heads[0, 1] = 0.0
        result = similarity_from_heads(heads)
        assert result.matrix[0, 1] == pytest.approx(1.0)
        assert result.tokens == 4

    def test_nothing_but_zeros_is_refused(self):
        with pytest.raises(DeployError, match="nothing to compare"):
            similarity_from_heads(np.zeros((5, 2, 3)))

    def test_not_finite_is_refused(self):
        heads = np.ones((5, 2, 3))
        heads[2, 1, 0] = np.nan
        with pytest.raises(DeployError, match="not finite"):
            similarity_from_heads(heads)

    def test_a_single_head_repeats_nothing(self):
        result = similarity_from_heads(normal(10, 1, 4))
        assert (result.redundancy, result.pair, result.pair_similarity) == (0.0, None, None)
        assert json.loads(json.dumps(result.to_dict()))["most_similar_pair"] is None


class TestFromModule:
    @pytest.fixture(autouse=True)
    def _needs_torch(self):
        pytest.importorskip("torch")

    def test_random_heads_are_not_alike(self):
        result = head_similarity(SELF, {"x": normal(8, 16, 32)})
        assert result.matrix.shape == (4, 4)
        assert result.matrix.dtype == np.float64
        assert result.redundancy < 0.5
        assert result.tokens == 8 * 16

    def test_heads_with_equal_weights_are_found(self):
        import torch

        from mha_deploy.reference import build_module

        module = build_module(SELF)
        with torch.no_grad():
            for layer in (module.q, module.k, module.v):  # head 3 becomes a copy of head 1
                layer.weight[24:32] = layer.weight[8:16]
                layer.bias[24:32] = layer.bias[8:16]
        result = similarity_from_module(module, {"x": normal(4, 16, 32)})
        assert result.pair == (1, 3)
        assert result.pair_similarity == pytest.approx(1.0, abs=1e-6)

    def test_padding_takes_no_part(self):
        lengths = np.array([5, 2], dtype=np.int32)
        x = normal(2, 8, 32)
        noisy = x.copy()
        noisy[0, 5:], noisy[1, 2:] = 7.0, -3.0
        first, second = (head_similarity(PADDED, {"x": part, "key_lengths": lengths}) for part in (x, noisy))
        np.testing.assert_allclose(first.matrix, second.matrix, atol=1e-6)
        assert first.tokens == 7

    def test_inputs_that_the_export_draws(self):
        from mha_deploy.reference.inputs import random_inputs

        feeds = random_inputs(PADDED, {"B": 4, "S": 8}, seed=0, ragged=True)
        assert head_similarity(PADDED, feeds).tokens == int(feeds["key_lengths"].sum()) > 0

    def test_all_kinds_of_inputs(self):
        cross = {
            "query": normal(2, 3, 32),
            "key": normal(2, 5, 32, seed=1),
            "value": normal(2, 5, 32, seed=2),
        }
        assert head_similarity(CROSS, cross).tokens == 6
        bias = np.zeros((1, 4, 3, 3), dtype=np.float32)
        bias[:, :, 0] = -np.inf  # the first query may see no key
        assert head_similarity(BIASED, {"x": normal(2, 3, 32), "attention_bias": bias}).tokens == 4


class TestReadInputs:
    def test_reads_what_savez_wrote(self, tmp_path):
        np.savez(tmp_path / "in.npz", x=normal(2, 8, 32).astype(np.float64), key_lengths=np.array([8, 3]))
        inputs = read_inputs(tmp_path / "in.npz", PADDED)
        assert (inputs["x"].dtype, inputs["key_lengths"].dtype) == (np.float32, np.int32)

    @pytest.mark.parametrize(
        ("spec", "arrays", "message"),
        [
            (SELF, {"y": normal(2, 8, 32)}, "exactly: x"),
            (SELF, {"x": normal(2, 8, 32), "extra": normal(1)}, "exactly: x"),
            (SELF, {"x": normal(2, 8, 31)}, r"\(B, S, 32\) with B=2, S=8"),
            (SELF, {"x": normal(8, 32)}, r"\(B, S, 32\)"),
            (SELF, {"x": normal(2, 65, 32)}, "S=65"),
            (SELF, {"x": np.ones((2, 8, 32), dtype=np.int32)}, "wrong type"),
            (SELF, {"x": np.full((1, 1, 32), np.nan)}, "not finite"),
            (PADDED, {"x": normal(2, 8, 32), "key_lengths": np.array([9, 1])}, "0 to 8"),
            (PADDED, {"x": normal(2, 8, 32), "key_lengths": np.array([1, 1, 1])}, r"\(B\) with B=2"),
            (PADDED, {"x": normal(2, 8, 32), "key_lengths": np.array([1.0, 1.0])}, "wrong type"),
            (CROSS, {"query": normal(2, 3, 32), "key": normal(2, 5, 32), "value": normal(2, 4, 32)}, "T=5"),
            (BIASED, {"x": normal(1, 2, 32), "attention_bias": np.full((1, 4, 2, 2), np.inf)}, "not finite"),
        ],
    )
    def test_what_does_not_belong_is_refused(self, tmp_path, spec, arrays, message):
        np.savez(tmp_path / "in.npz", **arrays)
        with pytest.raises(DeployError, match=message):
            read_inputs(tmp_path / "in.npz", spec)

    def test_files_that_are_no_archive_are_refused(self, tmp_path):
        np.save(tmp_path / "one.npy", normal(2, 8, 32))
        (tmp_path / "text.npz").write_text("no archive")
        np.savez(tmp_path / "whole.npz", x=normal(2, 8, 32))
        (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:300])
        np.savez(tmp_path / "object.npz", x=np.array([{}], dtype=object))
        (tmp_path / "folder.npz").mkdir()
        for name in ("one.npy", "text.npz", "cut.npz", "object.npz", "folder.npz", "missing.npz"):
            with pytest.raises(DeployError, match=name):
                read_inputs(tmp_path / name, SELF)

    @pytest.mark.parametrize("shape", ["(99999999999999,)", "(-1,)", f"({2**70},)", "(1, 2", "no header"])
    def test_an_array_that_lies_about_itself_is_refused(self, tmp_path, shape):
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
        member = np.lib.format.magic(1, 0) + len(header).to_bytes(2, "little") + header
        with zipfile.ZipFile(tmp_path / "in.npz", "w") as archive:
            archive.writestr("x.npy", b"" if shape == "no header" else member)
        with pytest.raises(DeployError, match="cannot be read"):
            read_inputs(tmp_path / "in.npz", SELF)


class TestHeatmap:
    @pytest.fixture
    def similarity(self):
        return similarity_from_heads(normal(50, 4, 8))

    @pytest.mark.slow
    def test_is_a_png_that_opens(self, tmp_path, similarity):
        image = pytest.importorskip("matplotlib.image")
        similarity.save_png(tmp_path / "heads.png", title="test")
        picture = image.imread(tmp_path / "heads.png")
        assert min(picture.shape[:2]) > 300
        assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 10
        assert os.listdir(tmp_path) == ["heads.png"]

    @pytest.mark.slow
    @pytest.mark.parametrize("Hq", [1, 17, 71])
    def test_any_number_of_heads(self, tmp_path, Hq):
        pytest.importorskip("matplotlib")
        similarity_from_heads(normal(5, Hq, 4)).save_png(tmp_path / "heads.png")
        assert (tmp_path / "heads.png").stat().st_size > 1000

    def test_a_failure_leaves_the_old_file_and_nothing_half_written(self, tmp_path, similarity, monkeypatch):
        pytest.importorskip("matplotlib")

        def fail(path, target):
            assert Path(path).read_bytes().startswith(b"\x89PNG")
            raise OSError("disk full")

        (tmp_path / "heads.png").write_bytes(b"old")
        with pytest.raises(DeployError, match="did not write"):
            similarity.save_png(tmp_path / "heads.png")
        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(DeployError, match="disk full"):
            similarity.save_png(tmp_path / "heads.png", overwrite=True)
        assert os.listdir(tmp_path) == ["heads.png"]
        assert (tmp_path / "heads.png").read_bytes() == b"old"

    @pytest.mark.parametrize("name", ["missing/heads.png", "heads.pdf"])
    def test_a_place_that_cannot_hold_it_is_refused(self, tmp_path, similarity, name):
        with pytest.raises(DeployError, match="heads"):
            similarity.save_png(tmp_path / name)
        assert os.listdir(tmp_path) == []


def test_missing_packages_say_what_to_install(tmp_path, monkeypatch):
    def refuse(name, *args, **kwargs):
        if name.split(".")[0] in ("torch", "matplotlib") or name == "mha_deploy.reference":
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    real = builtins.__import__
    similarity = similarity_from_heads(normal(5, 2, 4))
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(BackendUnavailable, match=r'pip install "mha-deploy\[export\]"'):
        head_similarity(SELF, {"x": normal(1, 2, 32)})
    with pytest.raises(BackendUnavailable, match=r'pip install "mha-deploy\[plot\]"'):
        similarity.save_png(tmp_path / "heads.png")


def test_text_names_the_figures():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(similarity_renderable(similarity_from_heads(np.repeat(normal(9, 1, 4), 2, axis=1))))
    assert "0 and 1: ρ = 1.000" in console.export_text()
