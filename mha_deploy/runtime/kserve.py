"""A model behind an inference server of the KServe v2 protocol (Triton and others): gRPC or HTTP."""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from mha_deploy.environment import can_import
from mha_deploy.errors import EXIT_VERDICT_FAILED, BackendUnavailable, DeployError
from mha_deploy.runtime.runner import Arrays, Runner, TensorInfo, check_kinds, error_line

SCHEMES = ("grpc", "grpcs", "http", "https")
INSTALL = 'pip install "mha-deploy[serving]"'
_HINT = "grpc://HOST:PORT or http://HOST:PORT, with /MODEL and /VERSION behind it where needed"

ERROR, TIMEOUT, UNREACHABLE = "error", "timeout", "unreachable"


class ServerError(DeployError):
    """A request that a server did not answer; `kind` is `error`, `timeout` or `unreachable`."""

    exit_code = EXIT_VERDICT_FAILED
    kind = ERROR


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


class ServerRunner(Runner):
    """A served model, `model` where the URL names none; each thread that calls it has its own connection.

    `timeout_s` after how many seconds a request counts as unanswered. `BackendUnavailable`: no server, no
    such model ready, or no client installed.
    """

    device = "server"
    untimed = "has no device time: what a server takes is measured under load."
    timed_by = "mha-deploy validate BUNDLE --url URL"

    def __init__(self, url: str, *, model: str = "", timeout_s: float = 30.0) -> None:
        self.url, self.timeout_s = ServerUrl.parse(url), timeout_s
        self._is_grpc = self.url.scheme.startswith("grpc")
        if not can_import("tritonclient"):
            raise BackendUnavailable("The client of inference servers is not installed.", hint=INSTALL)
        self._local = threading.local()
        self.model = self.url.model or model
        if not self.model:
            raise DeployError("The URL names no model.", got=url, hint=f"{url.rstrip('/')}/MODEL")
        server = self._described("get_server_metadata")
        found = self._described("get_model_metadata")
        try:
            config = self._described("get_model_config")
        except BackendUnavailable:  # an extension of Triton; other servers have none
            config = {}
        config = config.get("config", config)
        self.max_batch = int(config.get("max_batch_size", 0))
        self.keeps_cache = bool(config.get("sequence_batching"))
        self.name = f"{server.get('name', 'server')} {server.get('version', '')}".strip() + f" {self.model}"
        # Triton has no tensor without dimensions: a number for each batch element is sent as [B, 1].
        self._numbers = {
            each["name"]
            for each in (*config.get("input", ()), *config.get("output", ()))
            if each.get("reshape") is not None and not each["reshape"].get("shape")
        }
        self.inputs = self._tensors(found.get("inputs", ()))
        self.outputs = self._tensors(found.get("outputs", ()))
        if not self.inputs or not self.outputs:
            problem = "The server does not describe the inputs and outputs of the model."
            raise BackendUnavailable(problem, got=self.model, hint="a server of the KServe v2 protocol")

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
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def checked(self, feeds: Arrays) -> Arrays:
        """Names and types only: whether it takes the shapes is the server's to answer."""
        check_kinds(self.inputs, feeds)
        return feeds

    def infer(self, feeds: Arrays, **sequence: int) -> dict[str, np.ndarray]:
        """Send one request and wait; a `ServerError` where it is refused or not answered.

        `sequence_id`, `sequence_start` and `sequence_end` are its place in a sequence.
        """
        from tritonclient.utils import np_to_triton_dtype

        library, client = self._client()
        inputs = []
        for name, value in feeds.items():
            array = value[..., None] if name in self._numbers else value
            each = library.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
            each.set_data_from_numpy(np.ascontiguousarray(array))
            inputs.append(each)
        binary = {} if self._is_grpc else {"binary_data": True}
        timeout = {"client_timeout": self.timeout_s} if self._is_grpc else {}
        outputs = [library.InferRequestedOutput(name, **binary) for name in self.outputs]
        options: dict[str, Any] = {"model_version": self.url.version, "outputs": outputs, **sequence}
        try:
            result = client.infer(self.model, inputs, **options, **timeout)
            found = {name: result.as_numpy(name) for name in self.outputs}
        except Exception as error:  # of gRPC, of gevent and of sockets: no common base
            raise self._server_error(error) from error
        for name, array in found.items():
            if array is None:
                raise ServerError(f"{self.name} gave no {name}.")
            is_number = name in self._numbers and array.shape[-1:] == (1,)
            found[name] = np.array(array[..., 0] if is_number else array)  # the memory is the response's
        return found

    def _server_error(self, error: Exception) -> ServerError:
        text, status = error_line(error), str(getattr(error, "status", lambda: "")() or "")
        kind, what = ERROR, "answered with an error"
        if "DEADLINE_EXCEEDED" in status or isinstance(error, TimeoutError) or "timed out" in text:
            kind, what = TIMEOUT, f"did not answer within {self.timeout_s:g} s"
        elif "UNAVAILABLE" in status or isinstance(error, OSError):
            kind, what = UNREACHABLE, "cannot be reached"
        found = ServerError(f"{self.name} {what}.", got=text)
        found.kind = kind
        return found

    def close(self) -> None:
        """Close the connection of this thread; those of others end with them."""
        client = getattr(self._local, "client", None)
        if client is not None:
            del self._local.client
            client.close()

    # -- the connection --------------------------------------------------------------------------

    def _client(self) -> tuple[Any, Any]:
        """The client library, and the connection of this thread."""
        if self._is_grpc:
            import tritonclient.grpc as library
        else:
            import tritonclient.http as library  # type: ignore[no-redef]
        if getattr(self._local, "client", None) is None:
            options: dict[str, Any] = {"ssl": True} if self.url.scheme in ("grpcs", "https") else {}
            if not self._is_grpc:
                options |= {"connection_timeout": self.timeout_s, "network_timeout": self.timeout_s}
                options |= {"ssl_context_factory": ssl.create_default_context} if "ssl" in options else {}
            self._local.client = library.InferenceServerClient(self.url.address, **options)
        return library, self._local.client

    def _described(self, method: str) -> Mapping[str, Any]:
        """What the server reports of itself or of the model, as plain data."""
        options: dict[str, Any] = {"as_json": True, "client_timeout": self.timeout_s} if self._is_grpc else {}
        of_model = "model" in method
        if of_model:
            options |= {"model_name": self.model, "model_version": self.url.version}
        try:
            found = getattr(self._client()[1], method)(**options)
        except Exception as error:
            what = "The server has no such model ready." if of_model else "The server cannot be reached."
            got = f"{self.url.scheme}://{self.url.address} {self.model}: {error_line(error)}"
            hint = "start the server, or name the model: SCHEME://HOST:PORT/MODEL"
            raise BackendUnavailable(what, got=got, hint=hint) from error
        return found

    def _tensors(self, found: Any) -> dict[str, TensorInfo]:
        from tritonclient.utils import triton_to_np_dtype

        described = {}
        for each in found:
            dtype = triton_to_np_dtype(each["datatype"])
            if dtype is None:
                problem = "A tensor of the served model has a type without a NumPy equivalent."
                raise BackendUnavailable(problem, got=f"{each['name']}: {each['datatype']}")
            dims = tuple(None if int(dim) < 0 else int(dim) for dim in each.get("shape", ()))
            dims = dims[:-1] if each["name"] in self._numbers else dims
            described[each["name"]] = TensorInfo(dtype=np.dtype(dtype), dims=dims)
        return described
