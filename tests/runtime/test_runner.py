"""Runtimes are opened by name, and refuse inputs that are not the model's before they run."""

import numpy as np
import onnx
import pytest
import torch

from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.model.spec import Axis
from mha_deploy.runtime import CPU_RUNNERS, GPU_RUNNERS, RUNNERS, cpu_runtime, open_runner
from mha_deploy.runtime.runner import Runner, TensorInfo, check_feeds

INPUTS = {
    "x": TensorInfo(dtype=np.dtype(np.float16), dims=("B", None, 8)),
    "key_lengths": TensorInfo(dtype=np.dtype(np.int32), dims=("B",)),
}


def feeds(**changed):
    return {"x": np.zeros((2, 3, 8), np.float16), "key_lengths": np.zeros(2, np.int32), **changed}


def test_inputs_that_fit_are_taken():
    check_feeds(INPUTS, feeds())
    check_feeds(INPUTS, feeds(x=np.zeros((5, 1, 8), np.float16)))
    check_feeds({}, {})


def test_a_missing_input_is_refused_with_all_names():
    given = feeds()
    del given["key_lengths"]
    with pytest.raises(DeployError, match="names of the inputs do not match") as caught:
        check_feeds(INPUTS, given)
    assert caught.value.got == "['x']"
    assert caught.value.hint == "give ['key_lengths', 'x']"


def test_an_input_too_many_is_refused():
    with pytest.raises(DeployError, match="names of the inputs do not match") as caught:
        check_feeds(INPUTS, feeds(mask=np.zeros(1)))
    assert "mask" in caught.value.got


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.float64])
def test_an_input_of_another_type_is_refused_not_converted(dtype):
    with pytest.raises(DeployError, match="Input x has the wrong type") as caught:
        check_feeds(INPUTS, feeds(x=np.zeros((2, 3, 8), dtype)))
    assert (caught.value.got, caught.value.hint) == (str(np.dtype(dtype)), "float16")


@pytest.mark.parametrize("shape", [(2, 3, 9), (2, 3), (2, 3, 8, 1), ()])
def test_an_input_of_another_shape_is_refused(shape):
    with pytest.raises(DeployError, match="Input x has the wrong shape") as caught:
        check_feeds(INPUTS, feeds(x=np.zeros(shape, np.float16)))
    assert caught.value.got == str(shape)
    assert "8" in caught.value.hint


def test_what_is_no_array_is_refused():
    for given in ([[1.0, 2.0]], torch.zeros(2, 3, 8, dtype=torch.float16)):
        with pytest.raises(DeployError, match="Input x is not") as caught:
            Recorder().run(feeds(x=given))
        assert caught.value.got == type(given).__name__


class Recorder(Runner):
    """A runtime that only remembers what happened to it."""

    name, inputs, outputs = "recorder", INPUTS, {}

    def __init__(self):
        self.events = []

    def _run(self, feeds):
        self.events.append("run")
        return {}

    def close(self):
        self.events.append("close")


def test_a_runner_checks_before_it_runs():
    runner = Recorder()
    runner.axes = {str(INPUTS["x"].dims[0]): Axis(min=1, opt=1, max=2)}
    with pytest.raises(DeployError, match="wrong shape"):  # not: an axis of that size
        runner.run(feeds(x=np.zeros(3, np.float16)))
    assert runner.events == []
    assert runner.run(feeds()) == {}
    assert runner.events == ["run"]


def test_a_runner_is_closed_when_its_block_fails():
    runner = Recorder()

    def work():
        with runner:
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert runner.events == ["close"]


def test_an_unknown_runtime_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(DeployError, match="No such runtime") as caught:
        open_runner("ort-cpo", tmp_path / "model.onnx")
    assert "'ort-cpu'" in caught.value.hint
    assert not isinstance(caught.value, BackendUnavailable), "a slip of the pen, not a missing runtime"


@pytest.mark.parametrize("runtime", CPU_RUNNERS)
def test_every_runtime_can_be_opened_by_its_name(bundles, runtime):
    bundle = bundles("tiny-gqa")
    with open_runner(runtime, bundle.model_path) as runner:
        assert runner.name.startswith(f"{runtime} ")
        spec = bundle.manifest.spec
        assert {name: info.dims for name, info in runner.inputs.items()} == {
            tensor.name: tensor.dims for tensor in spec.inputs
        }
        assert {name: info.dtype for name, info in runner.outputs.items()} == {"output": np.float16}


@pytest.mark.parametrize("runtime", CPU_RUNNERS)
@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"\x08\x0a" * 20, None], ids=["empty", "text", "wire", "absent"]
)
def test_a_file_that_is_no_model_is_refused(tmp_path, runtime, content):
    path = tmp_path / "model.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DeployError) as caught:
        open_runner(runtime, path)
    assert str(path) in caught.value.got


@pytest.mark.parametrize("runtime", CPU_RUNNERS)
@pytest.mark.parametrize("place", ["absent.bin", "../outside.bin"])
def test_weights_that_are_missing_or_elsewhere_are_refused(tmp_path, runtime, place):
    """A graph from elsewhere cannot make a runtime read any file it likes, nor fall over one that is lost."""
    (tmp_path / "outside.bin").write_bytes(bytes(16))
    (tmp_path / "bundle").mkdir()
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4]) for name in "ab"]
    node = onnx.helper.make_node("Add", ["a", "w"], ["b"])
    weight = onnx.TensorProto(name="w", dims=[4], data_type=onnx.TensorProto.FLOAT)
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=place)
    body = onnx.helper.make_graph([node], "graph", ends[:1], ends[1:], [weight])
    path = tmp_path / "bundle" / "model.onnx"
    opsets = [onnx.helper.make_opsetid("", 23)]
    model = onnx.helper.make_model(body, ir_version=11, opset_imports=opsets)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(DeployError) as caught:
        open_runner(runtime, path)
    assert place.rpartition("/")[2] in str(caught.value)


def test_each_precision_has_a_runtime_with_kernels_for_it():
    chosen = {name: cpu_runtime(precision) for name, precision in PRECISIONS.items()}
    assert chosen == {"fp16": "ort-cpu", "bf16": "onnx-reference", "fp32": "ort-cpu"}
    assert set(chosen.values()) <= set(CPU_RUNNERS)
    assert set(RUNNERS) == {*CPU_RUNNERS, *GPU_RUNNERS}
