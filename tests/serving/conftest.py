"""A small KServe v2 server over HTTP that is not Triton, and packaged bundles."""

import json
import shutil
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))

KINDS = {"FP16": "float16", "FP32": "float32", "INT32": "int32", "INT64": "int64", "BOOL": "bool"}


class Kserve(ThreadingHTTPServer):
    """Serves one packaged model; `before` is called with the number of each request."""

    daemon_threads = True

    def __init__(self, package, served, before=lambda number: None, after=lambda outputs: outputs):
        from google.protobuf import json_format, text_format
        from tritonclient.grpc import model_config_pb2 as schema

        config = text_format.Parse((package / "config.pbtxt").read_text(), schema.ModelConfig())
        self.config = json_format.MessageToDict(config, preserving_proto_field_name=True)
        self.served, self.before, self.after = served, before, after
        self.lock, self.count = threading.Lock(), 0
        super().__init__(("127.0.0.1", 0), Handler)
        self.handle_error = lambda *request: None  # clients that give up are a part of the tests
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def tensors(self, group):
        batch = [-1] if self.config.get("max_batch_size") else []
        return [
            {
                "name": each["name"],
                "datatype": each["data_type"].removeprefix("TYPE_"),
                "shape": [*batch, *map(int, each["dims"])],
            }
            for each in self.config[group]
        ]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        server, path = self.server, self.path.strip("/").split("/")
        model = server.config["name"]
        if path == ["v2"]:
            self.answer({"name": "small", "version": "1", "extensions": []})
        elif path[:3] != ["v2", "models", model]:
            self.answer({"error": f"no model {path[-1]}"}, status=404)
        elif path[-1] == "config":
            self.answer(server.config)
        else:
            tensors = {group + "s": server.tensors(group) for group in ("input", "output")}
            self.answer({"name": model, "versions": ["1"], "platform": "test", **tensors})

    def do_POST(self):
        server = self.server
        with server.lock:
            server.count += 1
            number = server.count
        data = self.rfile.read(int(self.headers["Content-Length"]))
        size = int(self.headers.get("Inference-Header-Content-Length", len(data)))
        head, rest = json.loads(data[:size]), data[size:]
        feeds = {}
        for each in head["inputs"]:
            taken = each["parameters"]["binary_data_size"]
            dtype, shape = KINDS[each["datatype"]], each["shape"]
            feeds[each["name"]] = np.frombuffer(rest[:taken], dtype).reshape(shape)
            rest = rest[taken:]
        from mha_deploy.serving.backend import ServedRequest

        flags = head.get("parameters", {})
        request = ServedRequest(
            feeds={name: self.squeezed(name, array) for name, array in feeds.items()},
            sequence=flags.get("sequence_id", 0),
            start=bool(flags.get("sequence_start")),
            end=bool(flags.get("sequence_end")),
        )
        server.before(number)
        with server.lock:
            (result,) = server.served.infer([request])
        if isinstance(result, Exception):
            self.answer({"error": result.in_one_line}, status=400)
            return
        result = server.after(
            {name: result[name] for name in (each["name"] for each in server.config["output"])}
        )
        outputs, body = [], b""
        for each in server.tensors("output"):
            array = result[each["name"]]
            size = {"binary_data_size": array.nbytes}
            outputs.append({**each, "shape": list(array.shape), "parameters": size})
            body += array.tobytes()
        self.answer({"model_name": server.config["name"], "outputs": outputs}, body=body)

    def squeezed(self, name, array):
        (entry,) = (each for each in self.server.config["input"] if each["name"] == name)
        return array[..., 0] if "reshape" in entry else array

    def answer(self, data, *, status=200, body=b""):
        text = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream" if body else "application/json")
        if body:
            self.send_header("Inference-Header-Content-Length", str(len(text)))
        self.send_header("Content-Length", str(len(text) + len(body)))
        self.end_headers()
        self.wfile.write(text + body)


@pytest.fixture
def served(bundles, tmp_path, monkeypatch):
    """A function that packages a bundle, loads it and serves it; closed at the end of the test."""
    pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")
    import mha_deploy as md
    from mha_deploy.runtime.child import isolation
    from mha_deploy.serving.backend import ServedModel

    opened = []

    def serve(name, *, bundle=None, **handlers):
        monkeypatch.setattr(isolation, "enabled", isolation.enabled)  # loading a served model turns it off
        package = md.package(
            bundle or bundles(name), tmp_path / "models", backends=["ort-cpu"], overwrite=True
        )
        model = ServedModel(
            package.path / "1", package.backends, batched=package.max_batch > 0, sequences=package.max_batch
        )
        server = Kserve(package.path, model, **handlers)
        opened.extend([server, model])
        return server

    yield serve
    for each in opened:
        if isinstance(each, Kserve):
            each.shutdown()
            each.server_close()
        else:
            each.close()


@pytest.fixture
def with_engines(bundles, tmp_path):
    """A function that gives a bundle with engines that nothing can run, one for each set of changes."""
    import hashlib

    from mha_deploy.bundle.folder import MANIFEST, open_bundle, sha256
    from mha_deploy.engine.manifest import EngineManifest, write_engine
    from mha_deploy.engine.options import default_profiles

    def make(name, *changes, precision="fp16"):
        folder = Path(shutil.copytree(bundles(name, precision).path, tmp_path / f"with-engines-{name}"))
        manifest = open_bundle(folder, verify=False).manifest
        (folder / "engines").mkdir(exist_ok=True)
        for index, each in enumerate(changes):
            profiles = each.get("profiles") or [
                {axis: str(range_) for axis, range_ in ranges.items()}
                for ranges in default_profiles(manifest.spec)
            ]
            plan = b"ftrt" + bytes([index]) * 64
            nodes = [
                {"node": str(node["name"]), "profile": profile, "status": "unknown", "kernels": [],
                 "reason": "", "source": "log"}
                for node in manifest.attention
                for profile in range(len(profiles))
            ]  # fmt: skip
            known = {
                "requested": precision, "status": "unknown", "counts": {}, "offenders": [], "islands": [],
                "reason": "", "notes": [], "has_untyped": False, "written": [], "narrowed": [],
            }  # fmt: skip
            record = EngineManifest(
                backend="tensorrt",
                version="10.3.0",
                gpu={"name": "NVIDIA H200", "compute_cap": "9.0"},
                targets=[],
                model=manifest.spec.name,
                precision=precision,
                dialect="trt",
                profiles=profiles,
                bundle_sha256=sha256(folder / MANIFEST),
                engine_sha256=hashlib.sha256(plan).hexdigest(),
                engine_bytes=len(plan),
                seconds=0.0,
                strongly_typed=True,
                verdict={"nodes": nodes, "precision": known, "disagreements": []},
                kernels=[],
                options={},
                findings=[],
                notes=[],
            )
            record = msgspec.structs.replace(record, **{k: v for k, v in each.items() if k != "profiles"})
            write_engine(folder / "engines" / f"engine-{index}.engine", plan, record)
        return folder

    return make


def wait_until(happened, seconds=10.0):
    """Wait for an event that a thread brings about."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)
