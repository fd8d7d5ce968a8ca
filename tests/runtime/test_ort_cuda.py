"""ONNX Runtime on a GPU: right answers from the device that was asked for, or a plain refusal."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from fresh_python import python
from gpu_marks import CPU_PACKAGE, on_gpu

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.graph.file import load_graph
from mha_deploy.runtime import GPU_RUNNERS, open_runner
from mha_deploy.runtime import ort as placement
from mha_deploy.runtime.cuda import find_gpu
from mha_deploy.runtime.ort import (
    inputs_and_outputs,
    nodes_on_cpu,
    refuse_work_on_cpu,
    run_bound,
    session_options,
)
from mha_deploy.runtime.timing import TimingPlan

QUICK = TimingPlan(samples=100, rounds=4)
OPEN = """
import sys
from pathlib import Path
from mha_deploy.runtime import open_runner
from mha_deploy.errors import BackendUnavailable
try:
    open_runner("ort-cuda", Path(sys.argv[1]))
except BackendUnavailable as error:
    print(error)
    sys.exit(error.exit_code)
"""
# The test layers that a graph can be captured of: no more on the CPU than shapes.
CAPTURED = ["tiny-gqa", "tiny-padding", "tiny-cross"]


def cpu_session(bundle):
    graph = load_graph(bundle.model_path)
    options = session_options(onnxruntime, graph, level="ALL")
    options.add_session_config_entry(placement.RECORD_PLACEMENT, "1")
    path = str(bundle.model_path)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]), graph


# -- without a GPU -------------------------------------------------------------------------------


@pytest.mark.skipif(not CPU_PACKAGE, reason="this ONNX Runtime has a CUDA provider")
@pytest.mark.parametrize("runtime", GPU_RUNNERS)
def test_the_package_for_cpus_is_refused_with_the_one_for_gpus(bundles, runtime):
    with pytest.raises(BackendUnavailable, match="has no CUDA provider") as caught:
        open_runner(runtime, bundles("tiny-gqa").model_path)
    assert "CPUExecutionProvider" in caught.value.got
    assert "mha-deploy[ort-gpu]" in caught.value.hint
    assert caught.value.exit_code == 3


@pytest.mark.slow
def test_a_machine_without_onnx_runtime_is_advised_how_to_install_it(bundles):
    done = python(OPEN, bundles("tiny-gqa").model_path, blocked=("onnxruntime",))
    assert done.returncode == 3, done.stderr
    assert 'try: pip install "mha-deploy[ort-gpu]"' in done.stdout


class FakeSession:
    def get_providers(self):
        return ["CPUExecutionProvider"]


class FakeRuntime:
    __version__ = "1.31.1"

    def __init__(self, folder, providers=("CPUExecutionProvider",)):
        self.__file__ = str(folder / "__init__.py")
        self._providers = list(providers)

    def get_available_providers(self):
        return self._providers


def test_a_provider_that_was_dropped_is_refused_with_the_words_of_the_loader(tmp_path):
    (tmp_path / "capi").mkdir()
    (tmp_path / "capi" / "libonnxruntime_providers_shared.so").write_bytes(b"no library")
    error = placement.dropped_provider(FakeRuntime(tmp_path))
    assert "dropped its CUDA provider" in error.what
    assert "libonnxruntime_providers_shared.so" in error.got
    assert error.exit_code == 3


def test_a_provider_that_is_there_but_not_offered_is_no_cpu_package(tmp_path):
    (tmp_path / "capi").mkdir()
    (tmp_path / "capi" / "libonnxruntime_providers_cuda.so").write_bytes(b"no library")
    with pytest.raises(BackendUnavailable, match="dropped its CUDA provider"):
        placement.refuse_without_cuda(FakeRuntime(tmp_path))


def test_the_packages_own_note_is_not_loaded_past(tmp_path, monkeypatch):
    monkeypatch.setenv("ORT_CUDA_UNAVAILABLE", "1")
    assert "ORT_CUDA_UNAVAILABLE" in placement.dropped_provider(FakeRuntime(tmp_path)).got


def test_matmuls_and_attention_on_the_cpu_are_refused_by_name(bundles):
    session, graph = cpu_session(bundles("tiny-padding"))
    nodes = nodes_on_cpu(session)
    assert {"Shape", "MatMul", "Attention"} <= {operator for operator, _ in nodes}
    with pytest.raises(DeployError, match="on the CPU") as caught:
        refuse_work_on_cpu(nodes, graph)
    assert "Attention attention" in caught.value.got
    assert "MatMul q.matmul" in caught.value.got
    assert "Shape" not in caught.value.got


def test_shapes_may_be_computed_on_the_cpu(bundles):
    graph = load_graph(bundles("tiny-padding").model_path)
    by_type = {node.op_type: node for node in graph.graph}
    shapes = [by_type[kind] for kind in ("Shape", "Squeeze", "Concat")]
    refuse_work_on_cpu([(node.op_type, node.name) for node in shapes], graph)
    refuse_work_on_cpu((), graph)
    refuse_work_on_cpu([("Cast", "made by ONNX Runtime")], graph)


def test_a_number_that_is_computed_from_a_shape_is_no_work(tmp_path):
    """As older exporters write the scale of attention: 1 / sqrt(the size of a head)."""
    text = """<ir_version: 8, opset_import: ["": 17]>
        scaled (float[N, 16] x) => (float[N, 16] y) {
            [shape] shape = Shape(x)
            last = Constant <value = int64 {-1}> ()
            [size] size = Gather(shape, last)
            [wide] wide = Cast <to = 1> (size)
            [root] root = Sqrt(wide)
            [y] y = Div(x, root)
        }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "scaled.onnx")
    graph = load_graph(tmp_path / "scaled.onnx")
    names = {node.op_type: node.name for node in graph.graph}
    refuse_work_on_cpu([(kind, names[kind]) for kind in ("Gather", "Cast", "Sqrt")], graph)
    with pytest.raises(DeployError, match="on the CPU"):
        refuse_work_on_cpu([("Div", names["Div"])], graph)


def test_numbers_that_are_computed_from_shapes_of_unknown_rank_are_no_work(tmp_path):
    """As TorchScript writes the scale behind a reshape to sizes that are computed."""
    text = """<ir_version: 8, opset_import: ["": 17]>
        scaled (float[N, 16] x, int64[K] sizes, float[K] more) => (float[M] y, float[M] z, float[L] w) {
            [apart] apart = Reshape(x, sizes)
            [shape] shape = Shape(apart)
            last = Constant <value = int64 {-1}> ()
            end = Constant <value = int64 {9223372036854775807}> ()
            [size] size = Slice(shape, last, end)
            [wide] wide = Cast <to = 1> (size)
            [root] y = Sqrt(wide)
            [mixed] z = Add(wide, more)
            zero = Constant <value = int64 {0}> ()
            one = Constant <value = int64 {1}> ()
            [number] number = Squeeze(size)
            [long] long = Range(zero, number, one)
            [spread] w = Cast <to = 1> (long)
        }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "scaled.onnx")
    graph = load_graph(tmp_path / "scaled.onnx")
    kinds = {node.name: node.op_type for node in graph.graph}
    refuse_work_on_cpu([(kinds[name], name) for name in ("size", "wide", "root")], graph)
    for name in ("mixed", "spread"):
        with pytest.raises(DeployError, match="on the CPU"):
            refuse_work_on_cpu([(kinds[name], name)], graph)


def test_an_operator_of_shapes_on_floats_is_work(bundles):
    graph = load_graph(bundles("tiny-padding").model_path)
    bias = next(node for node in graph.graph if node.op_type == "Add")
    with pytest.raises(DeployError, match="on the CPU"):
        refuse_work_on_cpu([("Add", bias.name)], graph)


def test_a_version_that_does_not_report_where_nodes_run_is_refused():
    with pytest.raises(BackendUnavailable, match="does not report"):
        nodes_on_cpu(FakeSession())


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, np.float32, np.int32, np.bool_])
def test_arrays_of_every_type_go_through_a_session(kind):
    dtype = np.dtype(kind)
    number = int(onnx.helper.np_dtype_to_tensor_dtype(dtype))
    ends = [onnx.helper.make_tensor_value_info(name, number, ["N", 3]) for name in "ab"]
    node = onnx.helper.make_node("Identity", ["a"], ["b"])
    body = onnx.helper.make_graph([node], "graph", ends[:1], ends[1:])
    opsets = [onnx.helper.make_opsetid("", 23)]
    model = onnx.helper.make_model(body, opset_imports=opsets, ir_version=11).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    array = (np.arange(12).reshape(3, 4) % 5).astype(dtype).T  # not contiguous
    got = run_bound(onnxruntime, session, {"a": array}, inputs_and_outputs(session)[1])["b"]
    assert got.dtype == dtype
    assert got.flags.writeable
    np.testing.assert_array_equal(got, array)


def test_running_bound_is_running(bundles):
    bundle = bundles("tiny-gqa", "fp32")
    session, _ = cpu_session(bundle)
    case = next(golden_cases(bundle))
    got = run_bound(onnxruntime, session, case.inputs, inputs_and_outputs(session)[1])
    np.testing.assert_array_equal(got["output"], session.run(None, dict(case.inputs))[0])


@pytest.mark.skipif(find_gpu() is not None or CPU_PACKAGE, reason="there is a GPU, or no CUDA provider")
def test_without_a_gpu_it_is_unavailable(bundles):
    with pytest.raises(BackendUnavailable):
        open_runner("ort-cuda", bundles("tiny-gqa").model_path)


# -- with one ------------------------------------------------------------------------------------

# Which results are right is in tests/gpu, for every layer and precision.


@on_gpu
@pytest.mark.parametrize("cuda_graph", [True, False])
@pytest.mark.parametrize("name", CAPTURED)
def test_a_timed_call_gives_the_result_of_run(bundles, name, cuda_graph):
    from mha_deploy.runtime.ort import OrtCudaRunner

    bundle = bundles(name, "fp16")
    case = next(case for case in golden_cases(bundle) if case.name == "opt")
    with OrtCudaRunner(bundle.model_path, cuda_graph=cuda_graph) as runner:
        wanted = runner.run(case.inputs)
        timing = runner.time(case.inputs, QUICK)
        again = runner.time(case.inputs, QUICK)
    assert timing.graph is cuda_graph
    assert timing.p50 > 0
    for results in (*timing.results, *again.results):
        np.testing.assert_array_equal(results["output"], wanted["output"])


@on_gpu
@pytest.mark.parametrize("cuda_graph", [True, False])
def test_a_graph_that_cannot_be_captured_is_launched_and_says_why(bundles, cuda_graph):
    """Its key lengths are made on the CPU from shapes, and copied: ONNX Runtime captures no copies."""
    from mha_deploy.runtime.ort import OrtCudaRunner

    bundle = bundles("tiny-gqa", "fp16")
    case = next(case for case in golden_cases(bundle) if case.name == "opt")
    with OrtCudaRunner(bundle.model_path, dialect="contrib", cuda_graph=cuda_graph) as runner:
        wanted = runner.run(case.inputs)
        for timing in (runner.time(case.inputs, QUICK), runner.time(case.inputs, QUICK)):
            assert timing.graph is False
            if cuda_graph:
                assert "graph capture" in timing.why_no_graph
            else:
                assert timing.why_no_graph is None
            for results in timing.results:
                np.testing.assert_array_equal(results["output"], wanted["output"])
        assert runner.graph is cuda_graph
