"""`bench` times on a GPU, and reports at once if there is none."""

import pytest

from mha_deploy.runtime.cuda import find_gpu


@pytest.mark.skipif(find_gpu() is not None, reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_time(refused, bundles):
    refused("bench", bundles("tiny-mha").path, what="no CUDA GPU to run on", code=3)


def test_what_is_no_bundle_is_refused(refused, tmp_path):
    refused("bench", tmp_path, what="no bundle here", got=str(tmp_path))


def test_few_samples_are_refused(run_cli, bundles):
    done = run_cli("bench", bundles("tiny-mha").path, "--samples", "10")
    assert done.code == 2
    assert "100" in done.err
