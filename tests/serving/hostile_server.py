"""A server on this machine that does one thing wrong; it ends with the test, whatever its client does."""

import functools
import gzip
import json
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

SERVER_PATH, MODEL_PATH = "/v2", "/v2/models/tiny-gqa"
CONFIG_PATH, INFER = f"{MODEL_PATH}/config", f"{MODEL_PATH}/infer"
DESCRIPTION = {
    SERVER_PATH: {"name": "hostile", "version": "1", "extensions": []},
    MODEL_PATH: {
        "name": "tiny-gqa",
        "versions": ["1"],
        "platform": "none",
        "inputs": [{"name": "x", "datatype": "FP16", "shape": [-1, -1, 64]}],
        "outputs": [{"name": "output", "datatype": "FP16", "shape": [-1, -1, 64]}],
    },
    CONFIG_PATH: {"name": "tiny-gqa", "max_batch_size": 0, "input": [], "output": []},
}
DRIP = 0.02


class HostileServer:
    """Answers requests for `path` by `act(client, body)`, and all others as a server should.

    Bounded: at most 500 connections, none for longer than 10 seconds, none after `close`.
    """

    def __init__(self, path, act):
        self.path, self.act, self.closed = path, act, threading.Event()
        self.longest = 0.0  # seconds that a client stayed while the server misbehaved
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self._accept, daemon=True)
        self.thread.start()

    def close(self):
        self.closed.set()
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # ends `accept`: else it may take clients of the next
        self.thread.join(1)
        self.listener.close()

    def _accept(self):
        for _ in range(500):
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(Client(client, self.closed),), daemon=True).start()

    def _serve(self, client):
        try:
            while (request := client.request()) is not None:
                path, body = request
                if path == self.path:
                    started = time.monotonic()
                    try:
                        self.act(client, body)
                    finally:
                        self.longest = max(self.longest, time.monotonic() - started)
                elif path in DESCRIPTION:
                    client.answer(json.dumps(DESCRIPTION[path]).encode())
                else:
                    client.answer(b"{}", status="404 Not Found")
        except OSError:
            pass
        finally:
            client.socket.close()


class RawServer(HostileServer):
    """Acts as soon as it is connected, whatever is sent."""

    def __init__(self, act):
        super().__init__("", act)
        self.url = self.url.replace("http", "grpc")

    def _serve(self, client):
        with suppress(OSError):
            self.act(client, b"")
        client.socket.close()


class Client:
    """The server's end of one connection."""

    def __init__(self, connection, closed):
        self.socket, self.closed, self.end = connection, closed, time.monotonic() + 10
        connection.settimeout(5)

    def request(self):
        data = b""
        while b"\r\n\r\n" not in data:
            if not (more := self.socket.recv(1 << 16)):
                return None
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        line, *headers = head.decode("latin-1").split("\r\n")
        lengths = [header.split(":")[1] for header in headers if header.lower().startswith("content-length:")]
        while len(body) < int(lengths[0]):
            body += self.socket.recv(1 << 16)
        return line.split()[1], body

    def goes_on(self):
        return not self.closed.is_set() and time.monotonic() < self.end

    def send(self, data):
        self.socket.sendall(data)

    def answer(self, body, *headers, status="200 OK", length=None):
        length = len(body) if length is None else length
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {length}", *headers]
        self.send("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    def forever(self, data, before=b"", pause=0.0):
        """Send something again and again."""
        self.send(before)
        while self.goes_on():
            self.send(data)
            self.closed.wait(pause)

    def wait(self):
        """Do nothing until the client goes."""
        self.socket.settimeout(0.05)
        while self.goes_on():
            with suppress(TimeoutError):
                if not self.socket.recv(1):
                    return


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@functools.cache
def bomb():
    return gzip.compress(bytes(64 << 20), 1)


# Anywhere: what the transport of an answer can do.
TRANSPORT = {
    "nothing": lambda c, _: c.wait(),
    "closes": lambda c, _: c.socket.close(),
    "resets": lambda c, _: (
        c.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)),
        c.socket.close(),
    ),
    "closes in the status": lambda c, _: (c.send(b"HTTP/1.1 2"), c.socket.close()),
    "closes in the headers": lambda c, _: (c.send(OK + b"Content-"), c.socket.close()),
    "closes in the body": lambda c, _: (c.answer(b"{", length=100), c.socket.close()),
    "garbage": lambda c, _: (c.send(bytes(range(256)) * 16), c.socket.close()),
    "tls": lambda c, _: (c.send(b"\x16\x03\x01\x02\x00\x01\x00"), c.socket.close()),
    "http 2": lambda c, _: (c.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), c.socket.close()),
    "http 0.9": lambda c, _: (c.send(b"{}"), c.socket.close()),
    "an empty line": lambda c, _: (c.send(b"\r\n\r\n"), c.socket.close()),
    "a status of letters": lambda c, _: c.answer(b"{}", status="abc"),
    "a status of many digits": lambda c, _: c.answer(b"{}", status="2" * 5000),
    "a negative status": lambda c, _: c.answer(b"{}", status="-200 OK"),
    "status 0": lambda c, _: c.answer(b"{}", status="0 OK"),
    "status 600": lambda c, _: c.answer(b"{}", status="600 OK"),
    "status 101": lambda c, _: c.answer(b"{}", status="101 Switching Protocols"),
    "endless status": lambda c, _: c.forever(b"a" * 4096, b"HTTP/1.1 200 "),
    "endless header": lambda c, _: c.forever(b"a" * 4096, OK + b"X: "),
    "endless headers": lambda c, _: c.forever(b"X: a\r\n" * 100, OK),
    "endless continue": lambda c, _: c.forever(b"HTTP/1.1 100 Continue\r\n\r\n", pause=DRIP),
    "a flood of continue": lambda c, _: c.forever(b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "dripped status": lambda c, _: c.forever(b"a", b"HTTP/1.1 200 ", pause=DRIP),
    "dripped header": lambda c, _: c.forever(b"a", OK + b"X: ", pause=DRIP),
    "dripped headers": lambda c, _: c.forever(b"X: a\r\n", OK, pause=DRIP),
    "dripped body": lambda c, _: c.forever(b" ", OK + b"Content-Length: 10000\r\n\r\n", pause=DRIP),
    "dripped chunks": lambda c, _: c.forever(b"1\r\n \r\n", CHUNKED, pause=DRIP),
    "dripped body without a length": lambda c, _: c.forever(b" ", OK + b"\r\n", pause=DRIP),
    "endless body": lambda c, _: c.forever(b" " * (1 << 18), OK + b"\r\n"),
    "endless chunks": lambda c, _: c.forever(b"10000\r\n" + b" " * 65536 + b"\r\n", CHUNKED),
    "an endless chunk": lambda c, _: c.forever(b" " * (1 << 18), CHUNKED + b"fffffffffffffff\r\n"),
    "an endless size of a chunk": lambda c, _: c.forever(b"0" * 4096, CHUNKED),
    "endless trailers": lambda c, _: c.forever(b"X: a\r\n" * 100, CHUNKED + b"0\r\n"),
    "a negative chunk": lambda c, _: c.forever(b" " * 4096, CHUNKED + b"-5\r\n"),
    "a chunk of letters": lambda c, _: (c.send(CHUNKED + b"xyz\r\n"), c.wait()),
    "a huge length": lambda c, _: (c.answer(b"{", length=10**13), c.wait()),
    "a length of 5000 digits": lambda c, _: (c.answer(b"{", length="9" * 5000), c.wait()),
    "a negative length": lambda c, _: (c.answer(b"", length=-5), c.wait()),
    "a negative length and more": lambda c, _: c.forever(
        b" " * (1 << 18), OK + b"Content-Length: -5\r\n\r\n"
    ),
    "a length of letters": lambda c, _: (c.answer(b"", length="abc"), c.wait()),
    "gzip": lambda c, _: c.answer(bomb(), "Content-Encoding: gzip"),
    "deflate": lambda c, _: c.answer(bomb(), "Content-Encoding: deflate"),
    "brotli": lambda c, _: c.answer(bomb(), "Content-Encoding: br"),
    "gzip of gzip": lambda c, _: c.answer(gzip.compress(bomb()), "Content-Encoding: gzip, gzip"),
    "redirect": lambda c, _: c.answer(b"", "Location: http://127.0.0.1:1/", status="302 Found"),
    "redirect to a file": lambda c, _: c.answer(b"", "Location: file:///etc/hostname", status="301 Moved"),
    "redirect to itself": lambda c, _: c.answer(b"", "Location: /v2", status="307 Temporary Redirect"),
    "status 500": lambda c, _: c.answer(b'{"error": "\\u001b[2Jboom"}', status="500 Oops"),
    "an escape in the reason": lambda c, _: c.answer(b"", status="500 \x1b[2Jboom"),
    "a long error": lambda c, _: c.answer(b'{"error": "%s"}' % (b"a" * 500_000), status="500 Oops"),
    "an error that is none": lambda c, _: c.answer(b'{"error": [[{}]]}', status="500 Oops"),
    "no content": lambda c, _: c.answer(b"", status="200 OK"),
    "html": lambda c, _: c.answer(b"<html>\x1b[2J</html>", "Content-Type: text/html"),
    "deep": lambda c, _: c.answer(b"[" * 100_000),
    "deep object": lambda c, _: c.answer(b'{"a":' * 50_000),
    "not utf-8": lambda c, _: c.answer(b'{"name": "\xff\xfe"}'),
    "nan": lambda c, _: c.answer(b"NaN"),
    "a list": lambda c, _: c.answer(b"[]"),
    "null": lambda c, _: c.answer(b"null"),
    "a number": lambda c, _: c.answer(b"1" * 5000),
    "a text": lambda c, _: c.answer(b'"text"'),
}


def says(data):
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    return lambda client, _: client.answer(text)


def _model(**changes):
    return says({**DESCRIPTION[MODEL_PATH], **changes})


def _tensor(**changes):
    return {"name": "output", "datatype": "FP16", "shape": [-1, -1, 64], **changes}


def _many_tensors(**changes):
    return [_tensor(name=f"y{at}", **changes) for at in range(100_000)]


SERVER = {
    "a name of another type": says({"name": [], "version": "1"}),
    "a name with an escape": says({"name": "\x1b[2J", "version": "1"}),
    "an endless name": says({"name": "a" * 100_000}),
    "a name twice": says(b'{"name": "a", "name": "b"}'),
    "a version of another type": says({"name": "a", "version": {"b": None}}),
}
MODEL = {
    "no inputs": _model(inputs=[]),
    "null": _model(inputs=None),
    "a text": _model(inputs="x"),
    "an object": _model(outputs={"name": "output"}),
    "a tensor that is none": _model(outputs=[None]),
    "a tensor without a name": _model(outputs=[{"datatype": "FP16", "shape": [1]}]),
    "a name of another type": _model(outputs=[_tensor(name=5)]),
    "an empty name": _model(outputs=[_tensor(name="")]),
    "a name with an escape": _model(outputs=[_tensor(name="\x1b[2J")]),
    "a name twice": _model(outputs=[_tensor(), _tensor()]),
    "100,000 tensors": lambda c, body: _model(outputs=_many_tensors())(c, body),
    "an unknown type": _model(outputs=[_tensor(datatype="FP7")]),
    "text": _model(outputs=[_tensor(datatype="BYTES")]),
    "a type of another type": _model(outputs=[_tensor(datatype=16)]),
    "a dimension of another type": _model(outputs=[_tensor(shape=[None, "x"])]),
    "a fraction": _model(outputs=[_tensor(shape=[1.5])]),
    "dimension -5": _model(outputs=[_tensor(shape=[-5, 64])]),
    "dimension 2^62": _model(outputs=[_tensor(shape=[1 << 62])]),
    "dimension 10^30": _model(outputs=[_tensor(shape=[10**30])]),
    "1000 dimensions": _model(outputs=[_tensor(shape=[1] * 1000)]),
    "a shape that is none": _model(outputs=[_tensor(shape=5)]),
    "a deep shape": _model(outputs=[_tensor(shape=[[[[1]]]])]),
}


def _config(**changes):
    return says({**DESCRIPTION[CONFIG_PATH], **changes})


CONFIG = {
    "a batch of another type": _config(max_batch_size="many"),
    "a negative batch": _config(max_batch_size=-4),
    "a batch of 2^62": _config(max_batch_size=1 << 62),
    "a batch of 10^30": _config(max_batch_size=10**30),
    "sequences of another type": _config(sequence_batching=[1]),
    "inputs of another type": _config(input={"a": 1}),
    "inputs that are none": _config(input=[None, 5]),
    "a reshape of another type": _config(output=[{"name": "output", "reshape": [1]}]),
    "a shape of another type": _config(output=[{"name": "output", "reshape": {"shape": "a"}}]),
    "deep": _config(sequence_batching=json.loads('{"a":' * 200 + "1" + "}" * 200)),
}


def _gives(raw=None, *, length=None, outputs=None, text=None, **changes):
    """An answer to a request whose output has the shape of its input, with changes."""

    def act(client, body):
        head, _ = json.JSONDecoder().raw_decode(body.decode("latin-1"))
        (given,) = head["inputs"]
        size = given["parameters"]["binary_data_size"]
        content = bytes(size) if raw is None else raw
        output = {
            "name": "output",
            "datatype": "FP16",
            "shape": given["shape"],
            "parameters": {"binary_data_size": len(content)},
            **changes,
        }
        made = (
            json.dumps({"outputs": [output] if outputs is None else outputs}).encode()
            if text is None
            else text
        )
        header = len(made) if length is None else length
        client.answer(made + content, f"Inference-Header-Content-Length: {header}")

    return act


def _parameters(size):
    return {"parameters": {"binary_data_size": size}}


# These are as the protocol has them, and not those of the bundle.
OTHERS = {
    "an empty output": (INFER, _gives(b"", shape=[0, 1, 64])),
    "another output": (MODEL_PATH, _model(outputs=[_tensor(name="other")])),
    "another input": (MODEL_PATH, _model(inputs=[_tensor(name="other")])),
    "a wider input": (MODEL_PATH, _model(inputs=[_tensor(name="x", datatype="FP32")])),
    "a KV cache": (CONFIG_PATH, _config(sequence_batching={"a": {}})),
}
ANSWER = {
    "no outputs": _gives(b"", outputs=[]),
    "outputs null": _gives(b"", text=b'{"outputs": null}'),
    "no json": _gives(b"", text=b"nonsense"),
    "a list": _gives(b"", text=b"[]"),
    "another name": _gives(name="other"),
    "a name of another type": _gives(name=None),
    "a name with an escape": _gives(name="\x1b]0;title\x07"),
    "too few bytes": _gives(bytes(6)),
    "too many bytes": _gives(bytes(500_000)),
    "no bytes": _gives(b""),
    "a huge size": _gives(**_parameters(10**12)),
    "a size beyond 64 bits": _gives(**_parameters(10**30)),
    "a negative size": _gives(**_parameters(-5)),
    "a size of letters": _gives(**_parameters("abc")),
    "a size that is none": _gives(**_parameters(None)),
    "a negative header": _gives(length=-5),
    "a huge header": _gives(length=10**12),
    "a header of letters": _gives(length="abc"),
    "a header of 5000 digits": _gives(length="9" * 5000),
    "a header of other digits": _gives(length="²"),
    "an empty header": _gives(length=""),
    "a short header": _gives(length=3),
    "another shape": _gives(bytes(64), shape=[1, 1, 32]),
    "another rank": _gives(bytes(128), shape=[64]),
    "a scalar": _gives(bytes(2), shape=[]),
    "a negative shape": _gives(shape=[-1, -1, 64]),
    "two negative sizes": _gives(bytes(128), shape=[-1, -1, 64]),
    "a shape that overflows": _gives(shape=[1 << 32, 1 << 32, 64]),
    "a shape of 10^30": _gives(shape=[10**30]),
    "a shape of another type": _gives(shape=["a"]),
    "a fraction": _gives(shape=[1.5, 1, 64]),
    "100 dimensions": _gives(shape=[1] * 100),
    "text": _gives(b"\x03\0\0\0abc", datatype="BYTES", shape=[1]),
    "an unknown type": _gives(datatype="FP7"),
    "another type": _gives(datatype="BF16"),
    "a wider type": _gives(datatype="FP32"),
    "numbers that are text": _gives(b"", parameters={}, data=["a"] * 64),
    "too few numbers": _gives(b"", parameters={}, data=[1.0]),
    "deep numbers": _gives(b"", parameters={}, data=json.loads("[" * 200 + "]" * 200)),
    "large numbers": _gives(b"", parameters={}, data=[10**400]),
    "numbers null": _gives(b"", parameters={}, data=None),
    "an object of numbers": _gives(b"", parameters={}, data={"a": 1}),
    "an output twice": _gives(b"", outputs=[_tensor(shape=[0, 0, 64], **_parameters(0))] * 2),
    "100,000 outputs": lambda c, body: _gives(b"", outputs=_many_tensors(shape=[0]))(c, body),
}


# -- gRPC ------------------------------------------------------------------------------------------


@contextmanager
def grpc_server(**acts):
    """A gRPC server with these functions of schema, request and context as methods, the others as usual."""
    import grpc
    from google.protobuf.json_format import ParseDict
    from tritonclient.grpc import service_pb2 as schema
    from tritonclient.grpc import service_pb2_grpc

    answers = {
        "ServerMetadata": ParseDict(DESCRIPTION[SERVER_PATH], schema.ServerMetadataResponse()),
        "ModelMetadata": ParseDict(DESCRIPTION[MODEL_PATH], schema.ModelMetadataResponse()),
        "ModelConfig": ParseDict({"config": DESCRIPTION[CONFIG_PATH]}, schema.ModelConfigResponse()),
    }
    methods = {name: lambda self, request, context, name=name: answers[name] for name in answers}
    for name, act in acts.items():
        methods[name] = lambda self, request, context, act=act: act(schema, request, context)
    servicer = type("Hostile", (service_pb2_grpc.GRPCInferenceServiceServicer,), methods)
    server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.max_send_message_length", -1)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        server.stop(None)


def _compressed(schema, request, context):
    import grpc

    context.set_compression(grpc.Compression.Gzip)
    return schema.ModelInferResponse(outputs=[{"name": "output"}], raw_output_contents=[bytes(64 << 20)])


def _fails(code):
    def act(schema, request, context):
        import grpc

        context.abort(grpc.StatusCode[code], "\x1b[2Jboom")

    return act


def _raises(schema, request, context):
    raise RuntimeError("of the server")


def _answers(*raw, typed=None, **changes):
    def act(schema, request, context):
        size = [bytes(len(request.raw_input_contents[0]))] if not raw and typed is None else raw
        output = {"name": "output", "datatype": "FP16", "shape": list(request.inputs[0].shape), **changes}
        return schema.ModelInferResponse(outputs=[{**output, **(typed or {})}], raw_output_contents=size)

    return act


def _describes(**changes):
    return lambda schema, request, context: schema.ModelMetadataResponse(
        inputs=[{"name": "x", "datatype": "FP16", "shape": [-1, -1, 64]}], outputs=[{**_tensor(), **changes}]
    )


GRPC = {
    "late": ("ServerMetadata", lambda *given: time.sleep(1)),
    "late model": ("ModelMetadata", lambda *given: time.sleep(1)),
    "late config": ("ModelConfig", lambda *given: time.sleep(1)),
    "late answer": ("ModelInfer", lambda *given: time.sleep(1)),
    "an exception": ("ServerMetadata", _raises),
    "nothing": ("ServerMetadata", lambda *given: None),
    "internal": ("ModelMetadata", _fails("INTERNAL")),
    "data loss": ("ModelConfig", _fails("DATA_LOSS")),
    "refused": ("ModelInfer", _fails("INVALID_ARGUMENT")),
    "a name with an escape": ("ServerMetadata", lambda s, *_: s.ServerMetadataResponse(name="\x1b[2J")),
    "an endless name": ("ServerMetadata", lambda s, *_: s.ServerMetadataResponse(name="a" * (8 << 20))),
    "no outputs": ("ModelMetadata", lambda s, *_: s.ModelMetadataResponse()),
    "an unknown type": ("ModelMetadata", _describes(datatype="FP7")),
    "dimension -5": ("ModelMetadata", _describes(shape=[-5])),
    "dimension 2^62": ("ModelMetadata", _describes(shape=[1 << 62])),
    "an empty name": ("ModelMetadata", _describes(name="")),
    "a negative batch": ("ModelConfig", lambda s, *_: s.ModelConfigResponse(config={"max_batch_size": -4})),
    "an empty answer": ("ModelInfer", lambda s, *_: s.ModelInferResponse()),
    "a compressed answer": ("ModelInfer", _compressed),
    "too few bytes": ("ModelInfer", _answers(bytes(6))),
    "two buffers": ("ModelInfer", _answers(bytes(6), bytes(6))),
    "too many bytes": ("ModelInfer", _answers(bytes(3 << 20))),
    "a negative shape": ("ModelInfer", _answers(bytes(128), shape=[-1, -1, 64])),
    "a shape that overflows": ("ModelInfer", _answers(shape=[1 << 62, 1 << 62])),
    "another type": ("ModelInfer", _answers(datatype="BF16")),
    "text": ("ModelInfer", _answers(datatype="BYTES")),
    "another name": ("ModelInfer", _answers(name="other")),
    "a name with an escape in an answer": ("ModelInfer", _answers(name="\x1b[2J")),
    "numbers": ("ModelInfer", _answers(typed={"contents": {"fp32_contents": [1.0]}})),
    "numbers of two types": (
        "ModelInfer",
        _answers(typed={"contents": {"fp32_contents": [1.0], "int_contents": [1]}}),
    ),
}
