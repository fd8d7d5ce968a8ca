"""Runtimes that fail as native code does; a child process finds these functions by their names."""

import ctypes
import os
import resource
import signal
import sys
import time

import numpy as np

from mha_deploy.errors import BackendUnavailable
from mha_deploy.runtime import child
from mha_deploy.runtime.runner import Runner, TensorInfo


class Echo(Runner):
    """Gives its inputs back; `fails` is called when one has 37 positions."""

    def __init__(self, fails=None, names=("x",)):
        self.name, self._fails = f"echo in {os.getpid()}", fails
        self.inputs = dict.fromkeys(names, TensorInfo(dtype=np.dtype(np.float16), dims=(None,)))
        self.outputs = dict(self.inputs)

    def checked(self, feeds):
        return feeds

    def _run(self, feeds):
        if self._fails is not None and any(37 in array.shape for array in feeds.values()):
            self._fails()
        return dict(feeds)


def open_echo(fails=None, names=("x",)):
    return Echo(fails, names)


class Generating(Echo):
    """A runner whose decode loop fails at its first tokens."""

    def decode_loop(self, *, B, T=None):
        self.lengths, self.most_tokens = np.zeros(B, np.int32), None
        return self

    def feed(self, x, counts):
        self._fails()


def open_generating(fails):
    return Generating(fails)


def segmentation_fault():
    print("the last words of a runtime", file=sys.stderr, flush=True)
    ctypes.string_at(0)


def end_within_a_message():
    os.write(child._parent.fileno(), b"\0\0\0\x64 of 100 bytes")
    os._exit(0)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    sys.exit(0)


def hang():
    time.sleep(600)


def exhaust_memory():
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    np.ones(1 << 40, np.uint8)


def unavailable():
    raise BackendUnavailable("Not here.", got="nothing", hint="install it")


def bug():
    raise ZeroDivisionError("a bug")


def open_ort_that_fails(runtime, model):
    """ONNX Runtime crashes, the reference evaluator does not."""
    if runtime != "onnx-reference":
        segmentation_fault()
    from mha_deploy.runtime import _open_graph

    return _open_graph(runtime, model)


def open_ort_that_fails_at_37(runtime, model):
    """ONNX Runtime itself, which crashes at one size."""
    from mha_deploy.runtime import _open_graph

    runner = _open_graph(runtime, model)
    if runtime == "onnx-reference":
        return runner
    run = runner._run

    def crashing(feeds):
        if any(37 in array.shape for array in feeds.values()):
            segmentation_fault()
        return run(feeds)

    runner._run = crashing
    return runner


def crash_behind_the_parser():
    print("VERBOSE: Parsing node: last [Add]\nVERBOSE: last [Add] outputs: [y]", file=sys.stderr, flush=True)
    print("INFO: Compiler backend", "VERBOSE: Costs", sep="\n", file=sys.stderr, flush=True)
    segmentation_fault()


def build_that_fails(rt, request, with_plugins, on_progress):
    print("VERBOSE: Parsing node: attention [Attention]", file=sys.stderr, flush=True)
    segmentation_fault()
