"""What the tests share: bundles, made once a session; the command line; and the machines that have no GPU."""

import contextlib
import copy
import functools
import gc
import importlib
import importlib.util
import itertools
import os
import shutil
import sys
import zlib
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import pytest


def pytest_configure(config):
    """Share the cores among the workers, before NumPy and PyTorch look at them.

    By themselves every worker's torch.compile starts a compiler for each core, and every sum a thread. So
    this file imports nothing that imports NumPy until a test needs it.

    Graphs and imported modules are many objects that stay: to look for garbage among them seldom is quicker.
    """
    gc.set_threshold(50_000, 20, 100)
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # as the command line does
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        share = str(max(1, (os.cpu_count() or 1) // workers))
        for name in ("TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS"):
            os.environ.setdefault(name, share)
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        _import_what_is_not_compiled()


def _import_what_is_not_compiled():
    """In a new environment, begin with other packages than the first worker, so that not both compile all."""
    for name in ("sympy", "onnx_ir", "transformers", "hypothesis", "mha_deploy.cli", "mha_deploy.deployment"):
        found = importlib.util.find_spec(name)
        if found and found.cached and not Path(found.cached).exists():
            importlib.import_module(name)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    """Let a second worker import all files from the other end: what one of them compiled, the other reads."""
    is_whole = [Path(each).name for each in session.config.args] == session.config.getini("testpaths")
    if is_whole and os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        for path in sorted(Path(__file__).parent.rglob("test_*.py"), reverse=True):
            if str(path.parent) not in sys.path:
                sys.path.insert(0, str(path.parent))
            with contextlib.suppress(Exception, pytest.skip.Exception):  # collection tells
                importlib.import_module(path.stem)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Skip what this machine cannot run, and what takes minutes or gigabytes unless it is requested.

    A `sweep(n)` over many parameters runs n of them; the others are slow. They are drawn by a hash of their
    names, those of the core models first, so that all sweeps share a few bundles.
    """
    sweeps = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep") and not item.get_closest_marker("slow"):
            sweeps[item.nodeid.split("[")[0]].append(item)
    for sweep in sweeps.values():
        sweep.sort(key=_draw)
        for item in sweep[sweep[0].get_closest_marker("sweep").args[0] :]:
            item.add_marker(pytest.mark.slow)
    for item in items:
        if any(item.get_closest_marker(name) for name in ("slow", "gpu")):
            item.add_marker(pytest.mark.timeout(10 * float(config.getini("timeout"))))
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _has_cuda():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    if "slow" not in config.option.markexpr:
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


def _draw(item):
    case = item.nodeid.partition("[")[2]
    core = ("tiny-gqa", "tiny-padding", "tiny-preallocated", "tiny-dynamic", "tiny-sparse-heads-fp16")
    return not case.startswith(core), zlib.crc32(case.encode())


@functools.cache
def _has_cuda():
    from mha_deploy.runtime.cuda import find_gpu

    if find_gpu() is not None:
        return True
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


class FileForGpus(pytest.Module):
    """A file of tests/gpu on a machine without a GPU: it must be importable, and is skipped as a whole."""

    def collect(self):
        self.obj  # noqa: B018 (imports it)
        pytest.skip("needs an NVIDIA GPU", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    """Skip the files of tests/gpu without listing their tests, which are a tenth of all."""
    if module_path.parent == Path(__file__).parent / "gpu" and not _has_cuda():
        return FileForGpus.from_parent(parent, path=module_path)
    return None


def pytest_collection_finish(session):
    """Take what was imported out of the garbage collector's sight: an export collects all garbage, twice."""
    gc.collect()
    gc.freeze()


_FINISHED = itertools.count(1)


def pytest_runtest_logfinish(nodeid, location):
    """And what tests leave, once their own garbage is gone: so a collection searches a few tests' objects."""
    if next(_FINISHED) % 8 == 0:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def quick_disk():
    """Do not wait for the disk: what a flush is for is power that fails, which no test can see.

    The call stays, with its errors for a handle that is closed; a child process waits as ever.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: os.fstat(handle) and None)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_exporter():
    """Let PyTorch's exporter make its tables of operators once a session: two thirds of a small export.

    They are the same for every export, and garbage is not looked for among them. So are the results without
    the cache of fake tensors, which costs more than it saves where sizes are symbols. Where PyTorch keeps
    these elsewhere, exports are only slower. A session whose files do not import PyTorch is left without it.
    """
    if "torch" not in sys.modules:
        yield
        return
    import torch._dynamo.config as dynamo
    import torch._export.utils as export_utils
    import torch._ops
    from torch.onnx._internal.exporter import _decomp, _registration

    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        registry = getattr(_registration, "ONNXRegistry", None)
        if hasattr(registry, "from_torchlib"):
            patch.setattr(registry, "from_torchlib", staticmethod(_made_once(registry.from_torchlib)))
        if make_table := getattr(_decomp, "create_onnx_friendly_decomposition_table", None):
            table = _made_once(make_table)
            patch.setattr(_decomp, make_table.__name__, lambda operators: dict(table(frozenset(operators))))
        if find_operators := getattr(export_utils, "_materialize_cpp_cia_ops", None):
            patch.setattr(export_utils, find_operators.__name__, _made_once(find_operators))
        if hasattr(torch._ops, "Callable"):
            patch.setattr(torch._ops, "Callable", KindOfCallable("Callable", (), {}))
        if hasattr(dynamo, "fake_tensor_cache_enabled"):
            patch.setattr(dynamo, "fake_tensor_cache_enabled", False)
        if exporter := sys.modules.get("mha_deploy.exporter.exporter"):
            patch.setattr(exporter, "canonical_from_module", _traced_once(exporter.canonical_from_module))
            traced = _own_traced_once(exporter.export_user_module)
            for module in (exporter, importlib.import_module("mha_deploy.baselines.fresh")):
                patch.setattr(module, "export_user_module", traced)
        yield


class KindOfCallable(type):
    """What `Callable` is, but for its arguments: PyTorch writes them a thousand times an export."""

    def __instancecheck__(cls, thing):
        return callable(thing)

    def __getitem__(cls, arguments):
        return cls


def _made_once(make):
    @functools.cache
    def made(*arguments, **options):
        result = make(*arguments, **options)
        gc.freeze()
        return result

    return made


def _traced_once(trace):
    """Trace a layer once a session: with the same weights it has the same graph, byte by byte.

    Where PyTorch's exporter is the matter, tests call it themselves.
    """
    import torch

    known, exporter = {}, torch.onnx.export

    def traced(module, *, opset=None):
        weights = module.state_dict()
        if sum(each.numel() for each in weights.values()) > 1 << 20 or torch.onnx.export is not exporter:
            return trace(module, opset=opset)
        found = [
            (name, str(each.dtype), each.cpu().contiguous().view(torch.uint8).numpy().tobytes())
            for name, each in weights.items()
        ]
        key = (repr(module.spec), opset, *found)
        if key not in known:
            known[key] = trace(copy.deepcopy(module), opset=opset)  # a test may change its own weights
        return known[key].clone()

    return traced


def _own_traced_once(trace):
    """Trace what a factory made once a session: export, fresh cases and bisect each need its program.

    The program is only read; the graph is changed by whoever gets it. That a second trace gives the same
    names is the matter of tests/validate/test_bisect.py, which lets it `forget` the first.
    """
    known = {}

    @functools.wraps(trace)
    def traced(user, **options):
        file = Path(user.factory.rpartition(":")[0])
        if not file.is_file():  # made in memory, or by a package
            return trace(user, **options)
        weights = (file.read_bytes(), user.state_sha256, user.precision.name)
        options = {**trace.__kwdefaults__, **options}
        # Environment and files may change what the same code makes with the same weights.
        plain = [
            (name, key, value)
            for name, part in user.module.named_modules()
            for key, value in vars(part).items()
            if isinstance(value, bool | int | float | str)
        ]
        key = (user.factory, *weights, repr(user.axes), repr(user.dims), *options.items(), *plain)
        if key not in known:
            known[key] = trace(copy.deepcopy(user), **options)
        return replace(known[key], model=known[key].model.clone())

    traced.forget = known.clear
    return traced


@pytest.fixture(scope="session")
def workshop(request, tmp_path_factory):
    """Where all workers of a session find what one of them made."""
    from workshop import Workshop

    # The folder of a worker is inside that of the session.
    own = tmp_path_factory.getbasetemp()
    return Workshop((own.parent if hasattr(request.config, "workerinput") else own) / "workshop")


@pytest.fixture(scope="session")
def bundles(tmp_path_factory, workshop):
    """A function that gives the bundle of a spec by name, exported once for all workers.

    Each worker has a copy, as some tests leave their engines there; copy it again before altering it.
    """
    import mha_deploy
    from mha_deploy.bundle.folder import open_bundle

    @functools.cache
    def make(name, precision):
        def export(folder):
            mha_deploy.export(name, folder / "bundle", precision=precision)

        made, _ = workshop.thing(f"{name}-{precision}", export)
        own = tmp_path_factory.mktemp(f"{name}-{precision}") / "bundle"
        return open_bundle(shutil.copytree(made / "bundle", own))

    return lambda name, precision="fp16": make(name, precision)


@pytest.fixture(scope="session")
def own_bundles(workshop):
    """A function that gives the bundle of a factory in own_models.py; with fewer golden cases it is cheaper.

    All workers share it, so copy it before altering it.
    """
    import mha_deploy
    from mha_deploy.bundle.folder import open_bundle

    mha_deploy.configure(trust_code=True)  # another worker may have exported it

    @functools.cache
    def make(name, precision, golden):
        def export(folder):
            factory = f"{Path(__file__).parent / 'own_models.py'}:{name}"
            mha_deploy.export(factory, folder / name, precision=precision, golden=golden)

        folder, _ = workshop.thing("-".join(["own", name, precision, *golden]), export)
        return open_bundle(folder / name)

    return lambda name="encoder", precision="fp16", golden=(): make(name, precision, golden)


@pytest.fixture
def in_process(monkeypatch):
    """Runtimes in this process, for a test that replaces a part of one.

    One fixture undoes all changes of a test: where others change the same setting, the last undone wins.
    """
    from mha_deploy.runtime.child import isolation

    monkeypatch.setattr(isolation, "enabled", False)


# -- the command line ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def run_cli(monkeypatch, capsys):
    """Run `mha-deploy` with these arguments through its `main`, errors and exit codes included."""
    from mha_deploy.cli import main

    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["mha-deploy", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return Done(caught.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def refused(run_cli):
    """Run a command that must be refused: the error has its three parts and stdout stays empty."""

    def run(*arguments, what, got="", hint="", code=2):
        done = run_cli(*arguments)
        assert done.code == code, done.err
        assert done.out == ""
        lines = done.err[done.err.index("error: ") :].splitlines()
        text = {line.partition(": ")[0].strip(): line.partition(": ")[2] for line in lines}
        assert what in text["error"]
        assert got in text.get("got", "")
        assert hint in text.get("try", "")
        assert "Traceback" not in done.err
        return done

    return run
