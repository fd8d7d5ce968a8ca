"""A small KServe v2 server over HTTP that is not Triton."""

import json
import multiprocessing
import threading
from concurrent.futures import ProcessPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from mha_deploy.serving.backend import ServedModel, ServedRequest

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
    disable_nagle_algorithm = True  # else the second packet of an answer waits 40 ms for an acknowledgement
    wbufsize = -1  # head and body together

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
        if self.path == "/v2/repository/index":
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer([{"name": server.config["name"], "version": "1", "state": "READY"}])
            return
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


class OwnProcess:
    """A served model in a process of its own, as Triton's Python backend has it."""

    def __init__(self, folder, runtimes, **settings):
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self._call(_load, folder, runtimes, settings)

    def _call(self, function, *arguments):
        return self._pool.submit(function, *arguments).result()

    def infer(self, requests):
        return self._call(_infer, requests)

    def close(self):
        self._call(_close)
        self._pool.shutdown()


_loaded = []


def _load(folder, runtimes, settings):
    _loaded.append(ServedModel(folder, runtimes, **settings))


def _infer(requests):
    return _loaded[0].infer(requests)


def _close():
    _loaded.pop().close()
