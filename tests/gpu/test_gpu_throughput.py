"""Calls per second on several CUDA streams, of ONNX Runtime, PyTorch and the engines of a bundle."""

import pytest

import mha_deploy as md

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("runtime", ["ort-cuda", "eager", "sdpa-flash", "compile"])
def test_several_streams_give_right_results(bundles, runtime):
    found = md.bench(bundles("tiny-gqa"), at=["opt"], runtimes=[runtime], streams=(1, 2, 4))
    assert not found.wrong
    rows = [row for row in found.throughput if row.refused is None]
    if not rows:
        pytest.skip(f"{runtime}: {found.throughput[0].refused}")
    assert [row.streams for row in rows] == [1, 2, 4]
    assert all(row.per_second > 0 for row in rows)


def test_an_engine_runs_on_several_streams(bundles, tmp_path):
    import shutil

    folder = shutil.copytree(bundles("tiny-gqa").path, tmp_path / "bundle")
    try:
        engine = md.build_engine(folder, backend="tensorrt", allow_decomposed=True)
    except md.DeployError as error:
        pytest.skip(f"TensorRT: {error.in_one_line}")
    found = md.bench(folder, at=["opt"], runtimes=[engine.path.stem], streams=(1, 4))
    assert [row.refused for row in found.throughput] == [None, None]
    md.BenchReport([found]).save(tmp_path)
