"""A model behind an inference server of the KServe v2 protocol (Triton and others): gRPC or HTTP.

A server may be anybody's. Each request has one deadline for everything, from the name lookup to the last byte
of the answer, and a limit on bytes. What it answers is read into types, and nothing else of it is used.
"""

from __future__ import annotations

import http.client
import io
import math
import re
import select
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

import ml_dtypes
import msgspec
import numpy as np

from mha_deploy.environment import can_import
from mha_deploy.errors import EXIT_VERDICT_FAILED, BackendUnavailable, DeployError
from mha_deploy.files import check_plain, refuse_duplicates
from mha_deploy.runtime.runner import Arrays, Closing, Runner, TensorInfo, check_kinds, error_line
from mha_deploy.text import printable

SCHEMES = ("grpc", "grpcs", "http", "https")
INSTALL = 'pip install "mha-deploy[serving]"'
_HINT = "grpc://HOST:PORT or http://HOST:PORT, with /MODEL and /VERSION after it where needed"
_START = "start the server, or name the model: SCHEME://HOST:PORT/MODEL"
_PROTOCOL = "look into the log of the server; it must speak the KServe v2 protocol"

ERROR, TIMEOUT, UNREACHABLE = "error", "timeout", "unreachable"
T = TypeVar("T")


class ServerError(DeployError):
    """A request that a server did not answer as it must; `kind` is `error`, `timeout` or `unreachable`.

    `refused`: it answered in an orderly way that it does not do this.
    """

    exit_code = EXIT_VERDICT_FAILED
    kind = ERROR
    refused = False

    @classmethod
    def of(cls, kind: str, what: str, got: object = None, *, refused: bool = False) -> ServerError:
        """An error of a kind; what the server sent is shown without its control characters."""
        shown = None if got is None else printable(str(got))[:300]
        error = cls(what, got=shown, hint=_PROTOCOL)
        error.kind, error.refused = kind, refused
        return error


_LARGEST_DESCRIPTION = 4 << 20
_BRIEF_S = 2.0  # for a question whose answer only improves a hint
_SETTINGS = "\0\0"  # how HTTP/2 begins, and so gRPC, where a line of HTTP/1.1 is expected
_NO_SERVER = (502, 503, 504)  # what a proxy answers for a server that is not there


class ServerUrl(NamedTuple):
    """Where a model is served, `SCHEME://HOST:PORT[/MODEL[/VERSION]]`; model and version may be left open."""

    scheme: str
    address: str
    model: str = ""
    version: str = ""

    @classmethod
    def parse(cls, url: str) -> ServerUrl:
        """Read and check a URL."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise DeployError("The URL of a server cannot be read.", got=url, hint=_HINT) from error
        path = [part for part in parts.path.split("/") if part]
        if parts.scheme not in SCHEMES or not parts.hostname or port is None or len(path) > 2:
            raise DeployError("This is not the URL of a server.", got=url, hint=_HINT)
        if parts.username or parts.query or parts.fragment:
            raise DeployError("The URL of a server has no user, query or fragment.", got=url, hint=_HINT)
        return cls(parts.scheme, parts.netloc, *path)


def is_server_url(text: object) -> bool:
    """Whether a text is meant as the URL of a server."""
    return isinstance(text, str) and text.partition("://")[0] in SCHEMES and "://" in text


def served_name(name: str) -> str:
    """The name under which a model is packaged, where none was given."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "model"


# -- What a server answers -------------------------------------------------------------------------

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
_Shape = Annotated[list[Annotated[int, msgspec.Meta(ge=-1, lt=1 << 40)]], msgspec.Meta(max_length=32)]
_Sizes = Annotated[list[_Size], msgspec.Meta(max_length=32)]
_Runs = Annotated[tuple[_Name, ...], msgspec.Meta(max_length=256)]

DATATYPES = {
    "FP16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BOOL": np.dtype(np.bool_),
    **{f"INT{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
}
"""The types of the protocol that are numbers."""
NAMES = {dtype: name for name, dtype in DATATYPES.items()}


class _ServerData(msgspec.Struct):
    name: _Name = "server"
    version: Annotated[str, msgspec.Meta(max_length=256)] = ""


class _TensorData(msgspec.Struct):
    name: _Name
    datatype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: _Shape = []


class _ModelData(msgspec.Struct):
    inputs: Annotated[list[_TensorData], msgspec.Meta(max_length=4096)] = []
    outputs: Annotated[list[_TensorData], msgspec.Meta(max_length=4096)] = []


class _Reshape(msgspec.Struct):
    shape: _Shape = []


class _ConfigTensor(msgspec.Struct):
    name: _Name
    reshape: _Reshape | None = None


BUNDLE_PARAMETER = "mha_deploy_bundle_sha256"
"""The parameter of a served model that names the manifest of its bundle, by its hash."""
RUNS_PARAMETER = "runtimes"  # the engines or the runtime of a packaged model, as a list in JSON
SEQUENCES_PARAMETER = "sequences"  # how many sequences have a KV cache at a time
_LONGEST_NAME = 200


def runs_in(parameter: str) -> tuple[str, ...]:
    """The engines, or the runtime, that this parameter of a model lists.

    Raises:
        msgspec.DecodeError: It is no list of names, as that of somebody else may be.
    """
    return msgspec.json.decode(parameter, type=_Runs)


class _ConfigParameter(msgspec.Struct):
    string_value: Annotated[str, msgspec.Meta(max_length=1 << 16)] = ""


class _ConfigData(msgspec.Struct):
    """The part of Triton's model configuration that is used; other servers have none."""

    max_batch_size: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    sequence_batching: dict[str, Any] | None = None
    input: Annotated[list[_ConfigTensor], msgspec.Meta(max_length=4096)] = []
    output: Annotated[list[_ConfigTensor], msgspec.Meta(max_length=4096)] = []
    parameters: Annotated[dict[_Name, _ConfigParameter], msgspec.Meta(max_length=4096)] = {}


class _IndexData(msgspec.Struct):
    """A model in the index of a server."""

    name: _Name
    state: str = ""


class _Parameters(msgspec.Struct):
    binary_data_size: _Size | None = None


class _OutputData(msgspec.Struct):
    name: _Name
    datatype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: _Sizes
    parameters: _Parameters = msgspec.field(default_factory=_Parameters)
    data: msgspec.Raw | None = None


class _AnswerData(msgspec.Struct):
    outputs: Annotated[list[_OutputData], msgspec.Meta(max_length=4096)]


class _Output(NamedTuple):
    """An output as it came: its bytes, or its numbers where the server does not send bytes."""

    name: str
    datatype: str
    shape: Sequence[int]
    content: bytes | memoryview | Sequence[Any]

    def array(self) -> np.ndarray:
        """The array, if there is just what its type and shape need; its memory is that of the answer."""
        dtype, count = DATATYPES.get(self.datatype), math.prod(self.shape)
        if dtype is None:
            raise ValueError(f"{self.name} has the type {self.datatype}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"{self.name} has the shape {list(self.shape)}")
        if isinstance(self.content, bytes | memoryview):
            if len(self.content) != count * dtype.itemsize:
                needed = f"{count * dtype.itemsize} for {self.datatype} {list(self.shape)}"
                raise ValueError(f"{self.name} has {len(self.content)} bytes, not {needed}")
            array = np.frombuffer(self.content, dtype)
            if dtype == np.bool_:  # any other byte is no boolean, and NumPy would not notice
                array = array.view(np.uint8) != 0
        else:
            array = np.array(self.content, dtype)
            if array.size != count:
                raise ValueError(f"{self.name} has {array.size} numbers, not {count} for {list(self.shape)}")
        return array.reshape(self.shape)


@contextmanager
def _understood(what: str) -> Iterator[None]:
    """Whatever is wrong with an answer is an error of the server's."""
    try:
        yield
    except DeployError:
        raise
    except Exception as error:  # of msgspec, NumPy and protobuf, and RecursionError
        raise ServerError.of(ERROR, f"The server {what}.", error_line(error)) from error


def _described_as(kind: type[T], data: Any) -> T:
    found = msgspec.convert(data, kind, strict=False)
    check_plain(msgspec.to_builtins(found))  # the part that is used, which is bounded by now
    return found


# -- One connection --------------------------------------------------------------------------------


class _Connection(Closing, ABC):
    """One connection to a server; `timeout_s` is the time and `most_bytes` the size of a whole answer."""

    def __init__(self, url: ServerUrl, timeout_s: float, most_bytes: int) -> None:
        self.url, self.timeout_s, self.most_bytes = url, timeout_s, most_bytes

    @abstractmethod
    def server(self) -> Any:
        """What the server reports of itself, as plain data."""

    @abstractmethod
    def model(self, name: str) -> Any:
        """What it reports of a model."""

    @abstractmethod
    def config(self, name: str) -> Any:
        """The configuration of a model."""

    @abstractmethod
    def index(self) -> Any:
        """Its models, an extension of Triton."""

    @abstractmethod
    def infer(
        self, model: str, feeds: Arrays, outputs: Sequence[str], place: Mapping[str, int]
    ) -> list[_Output]:
        """One request, with its place in a sequence."""

    def late(self) -> ServerError:
        """The error of a request that took too long."""
        return ServerError.of(TIMEOUT, f"The server did not answer within {self.timeout_s:g} s.")


class _Received(io.RawIOBase):
    """What a socket receives until a deadline, up to a number of bytes; HTTPResponse takes it as a socket."""

    def __init__(self, of: socket.socket, deadline: float, limit: int) -> None:
        self._socket, self._deadline, self._left = of, deadline, limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            raise ServerError.of(ERROR, "The server sends more than the answer can be.")
        self._socket.settimeout(_remaining(self._deadline))
        count = self._socket.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        return count

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self, 1 << 16)


def _remaining(deadline: float) -> float:
    """The seconds until a deadline; TimeoutError where there are none."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining


def _addresses(host: str, port: int, deadline: float) -> list[Any]:
    """Look a name up, in a thread that may stay behind: the system's function has no time limit."""
    found: list[Any] = []

    def look_up() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.append(error)

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_remaining(deadline))
    if not found:
        raise TimeoutError
    if isinstance(found[0], Exception):
        raise found[0]
    return list(found[0])


class _Http(_Connection):
    """HTTP/1.1 with the standard library's parser; no redirects and no compression."""

    _HEAD = 1 << 20  # bytes of headers

    def __init__(self, url: ServerUrl, timeout_s: float, most_bytes: int) -> None:
        super().__init__(url, timeout_s, most_bytes)
        self._socket: socket.socket | None = None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def server(self) -> Any:
        return self._json("/v2")

    def model(self, name: str) -> Any:
        return self._json(self._path(name))

    def config(self, name: str) -> Any:
        return self._json(self._path(name) + "/config")

    def index(self) -> Any:
        _, content = self._request("POST", "/v2/repository/index", _LARGEST_DESCRIPTION, b"{}")
        return msgspec.json.decode(content)

    def infer(
        self, model: str, feeds: Arrays, outputs: Sequence[str], place: Mapping[str, int]
    ) -> list[_Output]:
        head = {
            "inputs": [
                {
                    "name": name,
                    "shape": list(array.shape),
                    "datatype": NAMES[array.dtype],
                    "parameters": {"binary_data_size": array.nbytes},
                }
                for name, array in feeds.items()
            ],
            "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs],
            "parameters": dict(place),
        }
        text = msgspec.json.encode(head)
        body = b"".join([text, *(array.tobytes() for array in feeds.values())])
        about = {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(len(text)),
        }
        headers, content = self._request("POST", self._path(model) + "/infer", self.most_bytes, body, about)
        with _understood("gave an answer that cannot be read"):
            header = headers.get("Inference-Header-Content-Length")
            length = len(content) if header is None else int(header) if header.isdecimal() else -1
            if not 0 <= length <= len(content):
                raise ValueError(f"Inference-Header-Content-Length is {header}, of {len(content)} bytes")
            answer = msgspec.json.decode(content[:length], type=_AnswerData)
            rest, found = memoryview(content)[length:], []
            for each in answer.outputs:
                size = each.parameters.binary_data_size
                if size is not None and size > len(rest):
                    raise ValueError(f"{each.name} has {size} bytes, and there are {len(rest)}")
                values: Any = rest[: size or 0]
                rest = rest[size or 0 :]
                if size is None and each.data is not None:
                    values = msgspec.json.decode(each.data, type=list[Any])
                found.append(_Output(each.name, each.datatype, each.shape, values))
            if len(rest):
                raise ValueError(f"{len(rest)} bytes after the last output")
        return found

    def _path(self, model: str) -> str:
        version = f"/versions/{quote(self.url.version, safe='')}" if self.url.version else ""
        return f"/v2/models/{quote(model, safe='')}{version}"

    def _json(self, path: str) -> Any:
        _, content = self._request("GET", path, _LARGEST_DESCRIPTION)
        with _understood(f"does not describe itself at {path}"):
            data = msgspec.json.decode(content)
            refuse_duplicates(content)
        return data

    def _request(
        self,
        method: str,
        path: str,
        most_bytes: int,
        body: bytes = b"",
        about: Mapping[str, str] | None = None,
    ) -> tuple[http.client.HTTPMessage, bytes]:
        """Headers and body of an answer; the connection stays open where both sides allow it."""
        deadline = time.monotonic() + self.timeout_s
        sent = self._connected(deadline)
        lines = {"Host": self.url.address, "Content-Length": str(len(body)), "Accept-Encoding": "identity"}
        head = "".join(f"{name}: {value}\r\n" for name, value in {**lines, **(about or {})}.items())
        try:
            rest = memoryview(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body)
            while len(rest):
                sent.settimeout(_remaining(deadline))
                rest = rest[sent.send(rest[: 1 << 20]) :]
            received: Any = _Received(sent, deadline, most_bytes + self._HEAD)
            response = http.client.HTTPResponse(received, method=method)
            response.begin()
            content = self._content(response, most_bytes)
        except DeployError:
            self.close()
            raise
        except TimeoutError as error:
            self.close()
            raise self.late() from error
        except (http.client.RemoteDisconnected, ConnectionError) as error:
            self.close()
            what = "The server closed the connection without an answer."
            raise ServerError.of(ERROR, what, error_line(error)) from error
        except Exception as error:  # of ssl and http.client, whose parser raises many kinds
            self.close()
            problem = ServerError.of(ERROR, "The server's answer is not HTTP.", error_line(error))
            if isinstance(error, http.client.BadStatusLine) and str(error.args[0]).startswith(_SETTINGS):
                scheme = self.url.scheme.replace("http", "grpc")
                problem.hint = f"{scheme}://{self.url.address}: it speaks gRPC"
            raise problem from error
        if response.will_close or not response.isclosed():
            self.close()
        self._check_status(response, content)
        return response.headers, content

    def _content(self, response: http.client.HTTPResponse, most_bytes: int) -> bytes:
        if (response.length or 0) > most_bytes:
            what = "The server announces more than the answer can be."
            raise ServerError.of(ERROR, what, f"{response.length} bytes, expected at most {most_bytes}")
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            raise ServerError.of(ERROR, "The server compresses although that was not requested.", encoding)
        parts, size = [], 0
        while part := response.read(1 << 16):
            parts.append(part)
            size += len(part)
            if size > most_bytes:
                raise ServerError.of(ERROR, "The server sends more than the answer can be.", f"{size} bytes")
        if response.length:
            what = "The server ended its answer too early."
            raise ServerError.of(ERROR, what, f"{response.length} bytes are missing")
        return b"".join(parts)

    def _check_status(self, response: http.client.HTTPResponse, content: bytes) -> None:
        status, reason = response.status, response.reason
        if 200 <= status < 300:
            return
        if 300 <= status < 400:
            to = response.headers.get("Location", "nowhere")
            raise ServerError.of(ERROR, "The server redirects, which is not followed.", f"{status} to {to}")
        text = reason
        with suppress(Exception):  # a page of text, or nothing
            text = msgspec.json.decode(content, type=dict[str, Any])["error"]
        kind = UNREACHABLE if status in _NO_SERVER else ERROR
        what = "The server answered with an error."
        raise ServerError.of(kind, what, f"{status} {text}", refused=400 <= status < 500 or status == 501)

    def _connected(self, deadline: float) -> socket.socket:
        """The last connection, unless the server ended it or sends what was not requested; else a new one."""
        if self._socket is not None:
            with suppress(OSError, ValueError):
                if not select.select([self._socket], [], [], 0)[0]:
                    return self._socket
            self.close()
        where = urlsplit(f"//{self.url.address}")
        last: Exception | None = None
        try:
            for family, kind, protocol, _, address in _addresses(
                where.hostname or "", where.port or 0, deadline
            ):
                found = socket.socket(family, kind, protocol)
                try:
                    found.settimeout(_remaining(deadline))
                    found.connect(address)
                    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    if self.url.scheme == "https":
                        found.settimeout(_remaining(deadline))
                        found = ssl.create_default_context().wrap_socket(
                            found, server_hostname=where.hostname
                        )
                    self._socket = found
                    return found
                except OSError as error:
                    found.close()
                    last = error
        except (OSError, UnicodeError) as error:
            last = error
        got = (
            self.late().what if isinstance(last, TimeoutError) else error_line(last or OSError("no address"))
        )
        raise ServerError.of(UNREACHABLE, "The server cannot be reached.", got) from last


class _Grpc(_Connection):
    """gRPC with Triton's schema of the protocol; its deadlines are for whole requests."""

    def __init__(self, url: ServerUrl, timeout_s: float, most_bytes: int) -> None:
        super().__init__(url, timeout_s, most_bytes)
        import grpc
        from tritonclient.grpc import service_pb2, service_pb2_grpc

        options = [
            ("grpc.max_receive_message_length", min(max(most_bytes, _LARGEST_DESCRIPTION), (1 << 31) - 1)),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", 1 << 16),
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),
            # A message of a few bytes may be one of gigabytes where it may be compressed.
            ("grpc.compression_enabled_algorithms_bitset", 1),
            ("grpc.internal.per_message_decompression", 0),
        ]
        if url.scheme == "grpcs":
            self._channel = grpc.secure_channel(url.address, grpc.ssl_channel_credentials(), options)
        else:
            self._channel = grpc.insecure_channel(url.address, options)
        self._calls: Any = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._schema: Any = service_pb2

    def close(self) -> None:
        self._channel.close()

    def server(self) -> Any:
        return self._plain(self._call("ServerMetadata", self._schema.ServerMetadataRequest()))

    def model(self, name: str) -> Any:
        request = self._schema.ModelMetadataRequest(name=name, version=self.url.version)
        return self._plain(self._call("ModelMetadata", request))

    def config(self, name: str) -> Any:
        request = self._schema.ModelConfigRequest(name=name, version=self.url.version)
        return self._plain(self._call("ModelConfig", request).config)

    def index(self) -> Any:
        found = self._call("RepositoryIndex", self._schema.RepositoryIndexRequest())
        return self._plain(found).get("models", [])

    def infer(
        self, model: str, feeds: Arrays, outputs: Sequence[str], place: Mapping[str, int]
    ) -> list[_Output]:
        request = self._schema.ModelInferRequest(model_name=model, model_version=self.url.version)
        for name, array in feeds.items():
            request.inputs.add(name=name, datatype=NAMES[array.dtype], shape=array.shape)
            request.raw_input_contents.append(array.tobytes())
        for name in outputs:
            request.outputs.add(name=name)
        for key, value in place.items():
            field = "bool_param" if isinstance(value, bool) else "int64_param"
            setattr(request.parameters[key], field, value)
        answer = self._call("ModelInfer", request)
        raw = list(answer.raw_output_contents)
        if raw and len(raw) != len(answer.outputs):
            what = "The server gave an answer that cannot be read."
            raise ServerError.of(ERROR, what, f"{len(raw)} buffers for {len(answer.outputs)} outputs")
        found = []
        for at, each in enumerate(answer.outputs):
            given = [values for _, values in each.contents.ListFields()]
            values = raw[at] if raw else given[0] if len(given) == 1 else ()
            found.append(_Output(each.name, each.datatype, list(each.shape), values))
        return found

    def _plain(self, message: Any) -> Any:
        from google.protobuf.json_format import MessageToDict

        with _understood("does not describe itself"):
            return MessageToDict(message, preserving_proto_field_name=True)

    def _call(self, name: str, request: Any) -> Any:
        import grpc

        try:
            return getattr(self._calls, name)(request, timeout=self.timeout_s)
        except grpc.RpcError as error:
            code, text = error.code(), error.details()
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self.late() from error
            if code is grpc.StatusCode.UNAVAILABLE:
                raise ServerError.of(UNREACHABLE, "The server cannot be reached.", text) from error
            orderly = {
                "NOT_FOUND",
                "UNIMPLEMENTED",
                "INVALID_ARGUMENT",
                "PERMISSION_DENIED",
                "UNAUTHENTICATED",
            }
            what, refused = "The server answered with an error.", code.name in orderly
            raise ServerError.of(ERROR, what, f"{code.name}: {text}", refused=refused) from error
        except Exception as error:  # a request that is too large, or an answer that is no message
            what = "The server gave an answer that cannot be read."
            raise ServerError.of(ERROR, what, error_line(error)) from error


# -- The runner ------------------------------------------------------------------------------------


class ServerRunner(Runner):
    """A served model, `model` where the URL names none; each thread that calls it has its own connection.

    `timeout_s` is the time of a whole request, `most_bytes` the largest answer to one. `BackendUnavailable`:
    no server, no such model ready, or no client installed. `ServerError`: a server that misbehaves.
    """

    device = "server"
    untimed = "has no device time: what a server takes is measured under load."
    timed_by = "mha-deploy validate BUNDLE --url URL"

    def __init__(self, url: str, *, model: str = "", timeout_s: float = 30.0) -> None:
        self.url, self.timeout_s, self.most_bytes = ServerUrl.parse(url), timeout_s, 1 << 30
        is_grpc = self.url.scheme.startswith("grpc")
        if is_grpc and not (can_import("tritonclient") and can_import("grpc")):
            raise BackendUnavailable("The client of inference servers is not installed.", hint=INSTALL)
        self._open: type[_Connection] = _Grpc if is_grpc else _Http
        self._local = threading.local()
        self.model = self.url.model or model
        if not self.model:
            raise DeployError("The URL names no model.", got=url, hint=f"{url.rstrip('/')}/MODEL")
        try:
            self._describe()
        except BaseException:
            self.close()
            raise

    def _describe(self) -> None:
        """Ask the server for its name and for the inputs and outputs of the model."""
        link = self._connection()
        try:
            with self._needed("The server cannot be reached."), _understood("does not describe itself"):
                server = _described_as(_ServerData, link.server())
        except BackendUnavailable as error:
            if isinstance(link, _Grpc) and self._speaks_http():
                error.hint = f"{self.url.scheme.replace('grpc', 'http')}://{self.url.address}: it speaks HTTP"
            raise
        with self._needed("The server has no such model ready."), _understood("does not describe its model"):
            found = _described_as(_ModelData, link.model(self.model))
        config = _ConfigData()
        try:
            with _understood("does not describe the configuration of its model"):
                config = _described_as(_ConfigData, link.config(self.model))
        except ServerError as error:  # an extension of Triton; other servers have none
            if not error.refused:
                raise
        self.max_batch, self.keeps_cache = config.max_batch_size, bool(config.sequence_batching)
        served = config.parameters.get(BUNDLE_PARAMETER)
        self.bundle_sha256 = served.string_value if served is not None and served.string_value else None
        named = config.parameters.get(RUNS_PARAMETER)
        self.runs = tuple[str, ...]()  # what runs the model, where the server says so in a form that is known
        with suppress(msgspec.DecodeError, RecursionError):
            listed = () if named is None else runs_in(named.string_value)
            self.runs = tuple(printable(name)[:_LONGEST_NAME] for name in listed)
        self.title = f"{server.name} {self.model}"
        self.name = f"{server.name} {server.version}".strip() + f" {self.model}"
        # Triton has no tensor without dimensions: a number for each batch element is sent as [B, 1].
        self._numbers = {
            each.name
            for each in (*config.input, *config.output)
            if each.reshape is not None and not each.reshape.shape
        }
        self.inputs, self.outputs = self._tensors(found.inputs), self._tensors(found.outputs)
        if not self.inputs or not self.outputs:
            problem = "The server does not describe the inputs and outputs of the model."
            raise ServerError.of(ERROR, problem, self.model)

    @contextmanager
    def _needed(self, what: str) -> Iterator[None]:
        """Without an answer that says otherwise there is nothing to judge: no server, or no such model."""
        try:
            yield
        except ServerError as error:
            if error.kind != UNREACHABLE and not error.refused:
                raise
            why = error.got or error.what
            got = f"{self.url.scheme}://{self.url.address} {self.model}: {why}"
            raise BackendUnavailable(what, got=got, hint=self._ready_models() or _START) from error

    def _ready_models(self) -> str:
        """The models of a server that has an index of them, an extension of Triton; else nothing."""
        with suppress(Exception):
            listed = msgspec.convert(self._connection().index(), list[_IndexData])
            names = [printable(each.name)[:_LONGEST_NAME] for each in listed if each.state == "READY"]
            url = f"{self.url.scheme}://{self.url.address}"
            return f"one that is ready: {', '.join(f'{url}/{name}' for name in names[:8])}" if names else ""
        return ""

    def _speaks_http(self) -> bool:
        """Whether a server that does not speak gRPC describes itself in HTTP."""
        scheme = self.url.scheme.replace("grpc", "http")
        url, limit = self.url._replace(scheme=scheme), min(self.timeout_s, _BRIEF_S)
        with suppress(DeployError, OSError, ValueError), _Http(url, limit, _LARGEST_DESCRIPTION) as link:
            _described_as(_ServerData, link.server())
            return True
        return False

    def _tensors(self, found: Sequence[_TensorData]) -> dict[str, TensorInfo]:
        described = {}
        for each in found:
            dtype = DATATYPES.get(each.datatype)
            if dtype is None or each.name in described:
                problem = "A tensor of the served model is described twice or has no type of numbers."
                raise ServerError.of(ERROR, problem, f"{each.name}: {each.datatype}")
            dims = tuple(None if dim < 0 else dim for dim in each.shape)
            dims = dims[:-1] if each.name in self._numbers else dims
            described[each.name] = TensorInfo(dtype=dtype, dims=dims)
        return described

    # -- requests ------------------------------------------------------------------------------

    def _run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """One request, or where the batch is larger than the server takes, several."""
        sizes = {len(array) for array in feeds.values() if array.ndim}
        if not self.max_batch or len(sizes) != 1 or max(sizes) <= self.max_batch:
            return self.infer(feeds)
        parts = [
            self.infer({name: array[start : start + self.max_batch] for name, array in feeds.items()})
            for start in range(0, max(sizes), self.max_batch)
        ]
        return joined(parts)

    def checked(self, feeds: Arrays) -> Arrays:
        """Names and types only: whether it takes the shapes is the server's to answer."""
        check_kinds(self.inputs, feeds)
        return feeds

    def infer(self, feeds: Arrays, **sequence: int) -> dict[str, np.ndarray]:
        """Send one request and wait; a `ServerError` where it is refused, not answered or answered wrongly.

        `sequence_id`, `sequence_start` and `sequence_end` are its place in a sequence.
        """
        sent = {
            name: np.ascontiguousarray(value[..., None] if name in self._numbers else value)
            for name, value in feeds.items()
        }
        with self._named(), _understood("gave an answer that cannot be read"):
            answer = self._connection().infer(self.model, sent, list(self.outputs), sequence)
            found = {each.name: each.array() for each in answer}
            if len(found) < len(answer):
                raise ValueError("an output is there twice")
            if missing := [name for name in self.outputs if name not in found]:
                raise ValueError(f"no {missing[0]}")
            return {name: self._as_described(name, found[name]) for name in self.outputs}

    def _as_described(self, name: str, array: np.ndarray) -> np.ndarray:
        """An output of the type and dimensions that the server announced, in memory of its own."""
        info = self.outputs[name]
        if name in self._numbers and array.shape[-1:] == (1,):
            array = array[..., 0]
        is_fitting = len(array.shape) == len(info.dims) and all(
            dim is None or dim == size for dim, size in zip(info.dims, array.shape, strict=True)
        )
        if array.dtype != info.dtype or not is_fitting:
            described = f"{info.dtype} {list(info.dims)}".replace("None", "-1")
            raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, described as {described}")
        return np.array(array)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of requests begin with the name of the server."""
        try:
            yield
        except ServerError as error:
            error.what = f"{self.name}: {error.what}"
            raise

    def close(self) -> None:
        """Close the connection of this thread; those of others end with them."""
        link = getattr(self._local, "link", None)
        if link is not None:
            del self._local.link
            link.close()

    def _connection(self) -> _Connection:
        """The connection of this thread; a new one where the limits are others by now."""
        link: _Connection | None = getattr(self._local, "link", None)
        if link is not None and (link.timeout_s, link.most_bytes) != (self.timeout_s, self.most_bytes):
            self.close()
            link = None
        if link is None:
            link = self._local.link = self._open(self.url, self.timeout_s, self.most_bytes)
        return link


def joined(parts: Sequence[Arrays]) -> dict[str, np.ndarray]:
    """Outputs of the parts of a batch as one; a `ServerError` where their shapes do not fit."""
    try:
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    except ValueError as error:
        what = "The parts of a batch have outputs that do not fit together."
        raise ServerError.of(ERROR, what, error_line(error)) from error
