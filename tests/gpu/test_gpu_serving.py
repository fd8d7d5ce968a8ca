"""The model inside a server, on a GPU: engines with and without the plugin, and KV caches on the device."""

import shutil

import numpy as np
import pytest

import mha_deploy as md
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.metrics import judge_case
from mha_deploy.options import ValidateOptions
from mha_deploy.runtime.child import isolation
from mha_deploy.serving.backend import ServedModel, ServedRequest
from mha_deploy.validate.decode import traces_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def served(bundles, tmp_path, monkeypatch):
    """A function that loads a bundle as a packaged model does; `attention` builds an engine first."""
    opened = []

    def serve(name, backend, *, attention=None, sequences=0):
        folder = tmp_path / "1"
        shutil.copytree(bundles(name).path, folder / "bundle")
        if attention is not None:
            try:
                md.build_engine(
                    folder / "bundle",
                    backend="tensorrt",
                    name=backend,
                    attention=attention,
                    allow_decomposed=True,
                )
            except md.DeployError as error:
                pytest.skip(f"{attention}: {error.in_one_line}")
        monkeypatch.setattr(isolation, "enabled", isolation.enabled)  # loading a served model turns it off
        opened.append(ServedModel(folder, [backend], batched=sequences == 0, sequences=sequences))
        return opened[-1], md.open_bundle(folder / "bundle")

    yield serve
    for each in opened:
        each.close()


BACKENDS = [("ort-cuda", None), ("native", "native"), ("plugin", "plugin")]


@pytest.mark.parametrize(("backend", "attention"), BACKENDS)
def test_batches_of_several_requests_are_right(served, backend, attention):
    model, bundle = served("tiny-padding", backend, attention=attention)
    for case in golden_cases(bundle):
        elements = range(case.sizes["B"])
        requests = [ServedRequest(feeds={n: a[b : b + 1] for n, a in case.inputs.items()}) for b in elements]
        got = {"output": np.concatenate([each["output"] for each in model.infer(requests)])}
        assert all(verdict.passed for verdict in judge_case(case, got, bundle.manifest.precision))


@pytest.mark.parametrize(("backend", "attention"), BACKENDS)
@pytest.mark.parametrize("name", ["tiny-preallocated", "tiny-dynamic"])
def test_interleaved_sequences_are_right_at_every_step(served, name, backend, attention):
    """Sequences begin one after the other, and then share their calls."""
    model, bundle = served(name, backend, attention=attention, sequences=3)
    (trace,) = traces_of(bundle, ValidateOptions())
    outputs = {b: [] for b in range(trace.B)}

    def feed(*members):
        requests = []
        for b in members:
            done = sum(each.shape[1] for each in outputs[b])
            stop = done + 1 if done else int(trace.prompt[b])
            x = trace.inputs["x"][b : b + 1, done:stop]
            requests.append(ServedRequest(feeds={"x": x}, sequence=b, start=not done))
        for b, result in zip(members, model.infer(requests), strict=True):
            assert not isinstance(result, md.DeployError), result
            outputs[b].append(result["output"])

    for b in range(trace.B):
        feed(b)
        feed(*range(b + 1))
    for step in range(trace.steps - trace.B - 1):
        feed(*[b for b in range(trace.B) if step % (b + 1) == 0])
    for b, parts in outputs.items():
        got = np.concatenate(parts, 1).astype(np.float64)
        want = trace.oracle["output"][b : b + 1, : got.shape[1]]
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < 1e-2
