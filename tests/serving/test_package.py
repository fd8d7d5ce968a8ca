"""A bundle as a Triton model: every configuration is read back through Triton's own schema."""

import base64
import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest

import mha_deploy as md

sys.path.append(str(Path(__file__).parents[1]))

pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")


def config_of(package):
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2 as schema

    return text_format.Parse((package.path / "config.pbtxt").read_text(), schema.ModelConfig())


ADA = {"name": "NVIDIA L4", "compute_cap": "8.9"}


# -- the Python backend ----------------------------------------------------------------------------


@pytest.fixture
def package(bundles, tmp_path):
    def make(model, precision="fp16", /, **options):
        return md.package(
            bundles(model, precision), tmp_path / "models", **{"runtimes": ["ort-cpu"], **options}
        )

    return make


def test_names_types_and_sizes_come_from_the_manifest(package):
    found = config_of(package("tiny-padding"))
    names = found.DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_number
    tensors = (*found.input, *found.output)
    kinds = {each.name: (names[each.data_type].name, list(each.dims)) for each in tensors}
    assert kinds == {
        "x": ("TYPE_FP16", [-1, 64]),
        "key_lengths": ("TYPE_INT32", [1]),
        "output": ("TYPE_FP16", [-1, 64]),
    }
    assert found.input[1].HasField("reshape")  # clients send [B, 1], the model gets [B]
    assert found.max_batch_size == 4
    assert found.HasField("dynamic_batching")
    assert found.instance_group[0].kind == found.instance_group[0].KIND_CPU


@pytest.mark.slow
def test_an_engine_that_cannot_run_here_and_is_left_out_is_named(bundles, tmp_path):
    pytest.importorskip("tensorrt_rtx")
    bundle = md.open_bundle(shutil.copytree(bundles("tiny-mha").path, tmp_path / "bundle"))
    engine = md.build_engine(bundle, backend="tensorrt-rtx", targets="89")
    if not (misfits := md.inspect(engine.path).misfits):
        pytest.skip("the engine runs here")
    assert md.package(bundle, tmp_path / "models").left_out == {"tensorrt-rtx": "; ".join(misfits)}
    assert not md.package(bundle, tmp_path / "more", runtimes=["ort-cpu"]).left_out
    served = md.package(bundle, tmp_path / "rtx", runtimes=["tensorrt-rtx"])
    readme = (served.path / "README.md").read_text()
    assert f"TensorRT {engine.manifest.version}" not in readme, "no release of the server has it inside"
    assert f"=={engine.manifest.version}" in readme, "so it is installed"


def test_a_repository_inside_the_bundle_is_refused(bundles):
    bundle = bundles("tiny-gqa")
    for place in (bundle.path, bundle.path / "models"):
        with pytest.raises(md.DeployError, match="inside the bundle"):
            md.package(bundle, place)
    assert not (bundle.path / "models").exists()


def test_the_repository_carries_a_wheel_of_this_version(package):
    made = package("tiny-gqa")
    (wheel,) = made.path.rglob("*.whl")
    readme = (made.path / "README.md").read_text()
    assert wheel.relative_to(made.path).as_posix() in readme
    assert re.search(r"^TRITON=\d+\.\d+ ", readme, re.MULTILINE), "a release that exists, to be pasted"
    with zipfile.ZipFile(wheel) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith("/RECORD")]
        rows = [line.rsplit(",", 2) for line in archive.read(record).decode().splitlines()]
        assert {name for name, _, _ in rows} == set(archive.namelist())
        for name, digest, size in rows[:-1]:
            data = archive.read(name)
            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={found}", len(data)), name
        assert not [name for name in archive.namelist() if "__pycache__" in name]
    code = "import sys; sys.path.insert(0, sys.argv[1]); import mha_deploy; print(mha_deploy.__file__)"
    done = subprocess.run([sys.executable, "-I", "-c", code, wheel], capture_output=True, text=True)
    assert done.stdout.strip() == str(wheel / "mha_deploy" / "__init__.py"), done.stderr


def test_warm_up_is_a_golden_case(package, bundles):
    from mha_deploy.bundle.cases import golden_cases

    made = package("tiny-gqa")
    warmup = {each.name: each for each in config_of(made).model_warmup}
    case = next(case for case in golden_cases(bundles("tiny-gqa")) if case.name == "opt")
    entry = warmup["opt"].inputs["x"]
    data = np.frombuffer((made.path / "warmup" / entry.input_data_file).read_bytes(), np.float16)
    assert warmup["opt"].batch_size == case.sizes["B"]
    assert np.array_equal(data.reshape(list(entry.dims)), case.inputs["x"][0])


@pytest.mark.slow
def test_an_input_without_a_batch_prevents_batching(package):
    made = package("tiny-additive")
    found = config_of(made)
    assert made.max_batch == found.max_batch_size == 0
    assert not found.HasField("dynamic_batching")
    assert [len(each.dims) for each in found.input] == [3, 4]


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """An ONNX file whose first axis has another name, as a bundle."""
    folder = tmp_path_factory.mktemp("named")

    def make(name, shape, *, second=False, share=1.0, golden="opt"):
        path, axes = folder / f"{name}{second}{share}{golden}.onnx", {name: "1:2:4"}
        dims = [onnx.helper.make_tensor_value_info(each, onnx.TensorProto.FLOAT, shape) for each in "xy"]
        mean = onnx.helper.make_node("ReduceMean", ["x", "axis"], ["mean"], keepdims=1)
        graph = onnx.helper.make_graph(
            [
                mean,
                onnx.helper.make_node("Mul", ["mean", "share"], ["part"]),
                onnx.helper.make_node("Sub", ["x", "part"], ["y"]),
            ],
            "centered",
            dims[:1],
            dims[1:],
            [
                onnx.numpy_helper.from_array(np.array([0 if second else 1]), "axis"),
                onnx.numpy_helper.from_array(np.array([share], np.float32), "share"),
            ],
        )
        opset = [onnx.helper.make_opsetid("", 23)]
        onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=10), path)
        return md.export(path, path.with_suffix(""), golden=(golden,), axes=axes)

    return make


@pytest.mark.parametrize("axis", ["B", "batch_size", "documents"])
def test_the_batch_may_have_any_name(named, tmp_path, axis):
    made = md.package(named(axis, [axis, 6]), tmp_path / "models", runtimes=["ort-cpu"])
    found = config_of(made)
    assert (made.max_batch, found.max_batch_size, made.unbatched) == (4, 4, "")
    assert [list(each.dims) for each in (*found.input, *found.output)] == [[6], [6]]
    assert found.model_warmup[0].batch_size == 2


@pytest.mark.parametrize(("axis", "share"), [("tokens", 1.0), ("B", 1.0), ("batch_size", 0.03)])
def test_elements_that_depend_on_each_other_are_no_batch(named, tmp_path, axis, share):
    bundle = named(axis, [axis, 6], second=True, share=share)
    made = md.package(bundle, tmp_path / "models", runtimes=["ort-cpu"])
    assert made.max_batch == config_of(made).max_batch_size == 0
    assert f"axis {axis} " in made.unbatched
    with pytest.raises(md.DeployError, match="cannot batch") as caught:
        md.package(bundle, tmp_path / "others", runtimes=["ort-cpu"], max_batch=2)
    assert f"axis {axis} " in caught.value.got


def test_without_two_elements_nothing_tells_that_they_are_independent(named, tmp_path):
    made = md.package(named("B", ["B", 6], golden="min"), tmp_path / "models", runtimes=["ort-cpu"])
    assert made.max_batch == 0
    assert "axis B " in made.unbatched


@pytest.mark.parametrize("name", ["tiny-dynamic", "tiny-preallocated"])
def test_a_kv_cache_stays_on_the_server(package, name):
    found = config_of(package(name, sequences=5))
    assert [each.name for each in (*found.input, *found.output)] == ["x", "output"]
    assert found.sequence_batching.oldest.max_candidate_sequences == found.max_batch_size == 5
    assert found.parameters["sequences"].string_value == "5"
    assert not found.model_warmup


def test_a_served_model_is_known_by_its_bundle(package, bundles):
    from mha_deploy.bundle.folder import sha256

    found = config_of(package("tiny-gqa", name="other", instances=3, queue_delay_us=7))
    assert found.name == "other"
    assert found.instance_group[0].count == 3
    assert found.dynamic_batching.max_queue_delay_microseconds == 7
    own = sha256(bundles("tiny-gqa").path / "manifest.json")
    assert found.parameters["mha_deploy_bundle_sha256"].string_value == own


def test_a_model_of_that_name_is_replaced_only_on_request(package, tmp_path):
    package("tiny-gqa")
    with pytest.raises(md.DeployError, match="has a model of that name"):
        package("tiny-gqa")
    assert config_of(package("tiny-gqa", instances=2, overwrite=True)).instance_group[0].count == 2
    foreign = tmp_path / "models" / "foreign"
    foreign.mkdir()
    (foreign / "config.pbtxt").write_text('name: "foreign"\n')
    with pytest.raises(md.DeployError, match="did not write"):
        package("tiny-gqa", name="foreign", overwrite=True)
    assert sorted(each.name for each in (tmp_path / "models").iterdir()) == ["foreign", "tiny-gqa"]
    assert [each.name for each in tmp_path.iterdir()] == ["models"]  # nothing half written is left


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 5}, "does not take such a batch"),
        ({"variant": "onnx"}, "no such variant"),
        ({"variant": "tensorrt_plan"}, "not a graph"),
        ({"variant": "tensorrt_plan", "runtimes": ()}, "no TensorRT engine"),
        ({"runtimes": ["ort-cpi"]}, "no engine of that name"),
        ({"runtimes": ["ort-cpu", "ort-cuda"]}, "no engine of that name"),
        ({"name": "../up"}, "cannot be the name"),
        ({"instances": 0}, "instances is out of bounds"),
    ],
)
def test_what_cannot_be_served_is_refused(package, options, message, tmp_path):
    with pytest.raises(md.DeployError, match=message):
        package("tiny-gqa", **options)
    assert not (tmp_path / "models").exists()


def test_a_batch_that_the_model_does_not_have_is_refused(package):
    with pytest.raises(md.DeployError, match="cannot batch") as caught:
        package("tiny-additive", max_batch=2)
    assert "attention_bias" in caught.value.got
    with pytest.raises(md.DeployError, match="batch of sequences"):
        package("tiny-dynamic", max_batch=2)


@pytest.mark.slow
def test_outputs_of_the_last_token_only_cannot_be_served_as_sequences(own_bundles, tmp_path):
    bundle = own_bundles("decoder_of_the_last_token")
    with pytest.raises(md.DeployError, match="entry for each token") as caught:
        md.package(bundle, tmp_path / "models", runtimes=["ort-cpu"])
    assert caught.value.got == "logits"


def test_bfloat16_has_no_arrays_in_the_python_backend(package):
    with pytest.raises(md.DeployError, match="no bfloat16"):
        package("tiny-padding", "bf16", runtimes=["onnx-reference"])


def test_the_command_line_says_how_to_start_it(run_cli, bundles, tmp_path):
    done = run_cli(
        "package", bundles("tiny-gqa").path, "--triton", tmp_path / "m", "--runtime", "ort-cpu", "--json"
    )
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["runtimes"] == ["ort-cpu"]
    assert "tritonserver --model-repository=/models" in data["command"]
    readme = (Path(data["path"]) / "README.md").read_text()
    assert "docker run" in readme
    (command,) = [shlex.split(line) for line in readme.splitlines() if line.startswith("mha-deploy validate")]
    assert command[3:] == ["--url", "grpc://localhost:8001/tiny-gqa"]
    assert md.open_bundle(tmp_path / command[2]).manifest.spec.name == "tiny-gqa", (
        "from beside the repository"
    )


def test_a_bundle_whose_last_validation_failed_is_refused(run_cli, bundles, tmp_path):
    bundle = tmp_path / "bundle"
    shutil.copytree(bundles("tiny-gqa").path, bundle, ignore=shutil.ignore_patterns("report.*"))  # of others
    command = ("package", bundle, "-o", tmp_path / "triton", "--runtime", "ort-cpu", "--json")
    done = run_cli(*command)
    assert (done.code, json.loads(done.out)["validated"]) == (0, None), done.err
    lines = {None: run_cli(*command[:-1], "--overwrite").out}

    md.validate(bundle, runtimes=["ort-cpu"], require_run=True).save(bundle)
    done = run_cli(*command, "--overwrite")
    assert done.code == 1
    error = json.loads(done.out)["error"]
    assert error["got"].startswith(json.loads((bundle / "report.json").read_text())["verdict"]["headline"])
    assert "--allow-failed" in error["hint"]
    assert "--require-run" in error["what"], "nothing is wrong: it was not met"
    assert "fault" not in error["hint"]
    with pytest.raises(md.DeployError):
        md.package(bundle, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    done = run_cli(*command, "--overwrite", "--allow-failed")
    assert (done.code, json.loads(done.out)["validated"]) == (0, "failed"), done.err
    lines["failed"] = run_cli(*command[:-1], "--overwrite", "--allow-failed").out

    report = json.loads((bundle / "report.json").read_text())
    report["verdict"]["findings"][0].update(required_by=[])  # it fails in any case
    (bundle / "report.json").write_text(json.dumps(report))
    assert "fault" in json.loads(run_cli(*command, "--overwrite").out)["error"]["hint"]

    report["model"]["bundle_sha256"] = "0" * 64  # of a bundle that was here before
    (bundle / "report.json").write_text(json.dumps(report))
    assert md.package(bundle, tmp_path / "other").validated is None
    assert "mha-deploy validate" in lines[None]
    assert "mha-deploy validate" not in lines["failed"]
    assert "warning" in lines["failed"]
    assert all("`triton`" in text for text in lines.values()), "the name of a package that PyTorch imports"


# -- TensorRT's own backend ------------------------------------------------------------------------


@pytest.fixture
def plan(with_engines, tmp_path):
    def make(model, /, *engines, **options):
        options = {"variant": "tensorrt_plan", **options}
        return md.package(with_engines(model, *engines), tmp_path / "models", **options)

    return make


def test_a_plan_has_the_tensors_and_the_batch_of_its_profile(plan):
    profile = {"B": "1:2:3", "S": "1:16:32"}
    made = plan("tiny-gqa", {"profiles": [profile]})
    found = config_of(made)
    assert (found.platform, found.backend) == ("tensorrt_plan", "tensorrt")
    assert found.max_batch_size == 3
    assert found.instance_group[0].kind == found.instance_group[0].KIND_GPU
    assert (made.path / "1" / found.default_model_filename).read_bytes().startswith(b"ftrt")
    assert list(found.model_warmup[0].inputs["x"].dims) == [1, 64]


def test_every_profile_is_offered(plan):
    profiles = [{"B": "1:1:1", "S": "1:16:32"}, {"B": "1:4:4", "S": "1:16:32"}]
    found = config_of(plan("tiny-gqa", {"profiles": profiles}))
    assert list(found.instance_group[0].profile) == ["0", "1"]
    assert found.max_batch_size == 4


def test_one_model_serves_several_kinds_of_gpu(plan):
    made = plan("tiny-gqa", {}, {"gpu": ADA})
    files = dict(config_of(made).cc_model_filenames)
    assert files == {"9.0": "engine-0.plan", "8.9": "engine-1.plan"}
    plans = {(made.path / "1" / name).read_bytes() for name in files.values()}
    assert len(plans) == 2


def test_the_python_backend_takes_all_engines(with_engines, tmp_path):
    folder = with_engines("tiny-gqa", {}, {"gpu": ADA})
    made = md.package(folder, tmp_path / "models", runtimes=["engine-0", "engine-1"])
    assert config_of(made).parameters["runtimes"].string_value == '["engine-0", "engine-1"]'
    assert {"1/bundle/engines/engine-0.engine", "1/bundle/engines/engine-1.json"} <= set(made.files)
    assert "1/bundle/model.onnx" not in made.files  # an engine needs no graph
    from mha_deploy.serving.backend import ServedModel

    with pytest.raises(md.DeployError, match="No packaged engine can run here") as caught:
        ServedModel(made.path / "1", ["engine-0", "engine-1"], batched=True)
    assert "engine-0" in caught.value.got
    assert "engine-1" in caught.value.got


@pytest.fixture
def triton_model(monkeypatch):
    """A function that loads a package as Triton's Python backend does: by its configuration alone."""
    from types import ModuleType, SimpleNamespace

    from google.protobuf import json_format

    from mha_deploy.runtime.child import isolation
    from mha_deploy.serving.backend import TritonPythonModel

    utils = ModuleType("triton_python_backend_utils")
    utils.Tensor = lambda name, array: SimpleNamespace(as_numpy=lambda: array)
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    monkeypatch.setattr(isolation, "enabled", isolation.enabled)

    def load(made):
        config = json_format.MessageToJson(config_of(made), preserving_proto_field_name=True)
        model, place = TritonPythonModel(), {"model_repository": str(made.path), "model_version": "1"}
        model.initialize({**place, "model_config": config})
        return model

    return load


def test_the_backend_reads_its_runtime_from_the_configuration(package, triton_model):
    triton_model(package("tiny-gqa")).finalize()


def test_engines_that_are_not_in_a_package_are_listed_with_their_reasons(with_engines, tmp_path, run_cli):
    folder = with_engines("tiny-gqa", {})
    if not (misfits := md.inspect(folder / "engines" / "engine-0.engine").misfits):
        pytest.skip("the engine runs here")
    done = run_cli("package", folder, "--triton", tmp_path / "models", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["left_out"] == {"engine-0": "; ".join(misfits)}


def test_an_engine_may_have_any_name_that_a_file_may_have(with_engines, tmp_path, triton_model):
    folder = with_engines("tiny-gqa", {})
    for each in (folder / "engines").glob("engine-0.*"):
        each.rename(each.with_stem("h100,v2 'b'"))
    made = md.package(folder, tmp_path / "models", runtimes=["h100,v2 'b'"])
    assert "1/bundle/engines/h100,v2 'b'.engine" in made.files
    with pytest.raises(md.DeployError, match="No packaged engine can run here") as caught:
        triton_model(made)
    assert caught.value.got.startswith("h100,v2 'b': "), "it was found, and is for another GPU"


PLUGIN = {
    "library": "libmha_deploy_plugins_trt8.so",
    "version": "0.1.0",
    "sha256": "0" * 64,
    "tensorrt": "8.6.0",
    "plugins": [{"name": "MhaDeployAttention", "version": "1", "namespace": "mha_deploy"}],
}


def test_a_plugin_library_comes_along_with_the_flag_that_loads_it(plan, tmp_path, monkeypatch):
    from plugin_libraries import write_library

    library = write_library(tmp_path / "libraries")
    monkeypatch.setenv("MHA_DEPLOY_PLUGINS", str(library))
    made = plan("tiny-gqa", {"version": "8.6.0", "plugins": [PLUGIN]})
    assert f"1/plugins/{library.name}" in made.files
    assert f"--backend-config=tensorrt,plugins=/models/tiny-gqa/1/plugins/{library.name}" in made.command


def test_a_missing_plugin_library_is_refused(plan, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("MHA_DEPLOY_PLUGINS", str(tmp_path / "empty"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    with pytest.raises(md.DeployError, match="plugin"):
        plan("tiny-gqa", {"version": "8.6.0", "plugins": [PLUGIN]})


@pytest.mark.parametrize(
    ("name", "engines", "message"),
    [
        ("tiny-gqa", [{"backend": "tensorrt-rtx", "gpu": None}], "no TensorRT engine"),
        ("tiny-gqa", [{}, {}], "same compute capability"),
        ("tiny-gqa", [{}, {"gpu": ADA, "version": "10.9.0"}], "One server has one TensorRT"),
        ("tiny-dynamic", [{}], "cannot keep this KV cache"),
        ("tiny-preallocated", [{}], "cannot keep this KV cache"),
    ],
)
def test_a_plan_that_triton_cannot_serve_is_refused(plan, name, engines, message):
    with pytest.raises(md.DeployError, match=message):
        plan(name, *engines)


def test_a_profile_that_cannot_batch_is_refused(plan):
    profile = {"B": "2:2:4", "S": "1:16:32"}
    with pytest.raises(md.DeployError, match="cannot batch") as caught:
        plan("tiny-gqa", {"profiles": [profile]}, max_batch=4)
    assert "profile 0 of engine engine-0" in caught.value.got
