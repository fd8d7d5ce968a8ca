"""The model inside a server: batches of several requests, and the KV caches of sequences."""

from dataclasses import replace

import numpy as np
import pytest

import mha_deploy as md
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.judge import judge_case
from mha_deploy.options import ValidateOptions
from mha_deploy.serving.backend import SequenceCaches, ServedModel, ServedRequest
from mha_deploy.validation.decode import traces_of


@pytest.fixture
def model(bundles, tmp_path, in_process):
    pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
    package = md.package(bundles("tiny-padding"), tmp_path / "models", runtimes=["ort-cpu"])
    model = ServedModel(package.path / "1", ["ort-cpu"], batched=True)
    yield model
    model.close()


def test_requests_of_one_batch_get_their_own_results(model, bundles):
    """Elements of different cases are mixed; what belongs together is right."""
    bundle = bundles("tiny-padding")
    cases = list(golden_cases(bundle))
    places = [(case, b) for case in cases for b in range(case.sizes["B"])]
    order = np.random.default_rng(0).permutation(len(places))
    requests = [
        ServedRequest(feeds={n: a[places[i][1] :][:1] for n, a in places[i][0].inputs.items()}) for i in order
    ]
    results = dict(zip(order, model.infer(requests), strict=True))
    for case in cases:
        mine = [results[i] for i, place in enumerate(places) if place[0] is case]
        whole = {"output": np.concatenate([each["output"] for each in mine])}
        assert all(verdict.passed for verdict in judge_case(case, whole, bundle.manifest.precision))


def test_a_bad_request_does_not_fail_its_neighbours(model, bundles):
    case = next(golden_cases(bundles("tiny-padding")))
    good = ServedRequest(feeds=case.inputs)
    bad = ServedRequest(feeds={**case.inputs, "x": case.inputs["x"].astype(np.float32)})
    wide = ServedRequest(feeds={**case.inputs, "x": np.zeros((1, 3, 65), np.float16)})
    first, second, third, fourth = model.infer([good, bad, wide, good])
    assert isinstance(second, md.DeployError)
    assert isinstance(third, md.DeployError)
    assert np.array_equal(first["output"], fourth["output"])


def test_a_changed_graph_is_not_served(bundles, tmp_path, in_process):
    pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
    package = md.package(bundles("tiny-gqa"), tmp_path / "models", runtimes=["ort-cpu"])
    graph = package.path / "1" / "bundle" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"\0")
    with pytest.raises(md.DeployError, match="graph was changed"):
        ServedModel(package.path / "1", ["ort-cpu"], batched=True)


# -- sequences -------------------------------------------------------------------------------------


class Decoder:
    """Feeds the batch elements of a trace as sequences, in any order, and remembers the outputs."""

    def __init__(self, caches, trace):
        self.caches, self.trace = caches, trace
        self.outputs = {b: [] for b in range(trace.B)}

    def request(self, b, **flags):
        done = sum(each.shape[1] for each in self.outputs[b])
        stop = done + 1 if done else int(self.trace.prompt[b])
        x = self.trace.inputs["x"][b : b + 1, done:stop]
        return ServedRequest(feeds={"x": x}, sequence=f"s{b}", start=not done, **flags)

    def step(self, *members):
        results = self.caches.infer([self.request(b) for b in members])
        for b, result in zip(members, results, strict=True):
            self.outputs[b].append(result["output"])

    def errors(self):
        for b, parts in self.outputs.items():
            got = np.concatenate(parts, 1).astype(np.float64)
            want = self.trace.oracle["output"][b : b + 1, : got.shape[1]]
            yield np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.fixture
def decoder(bundles, in_process):
    def make(name, *, slots=4, shared=False):
        bundle = bundles(name)
        (trace,) = traces_of(bundle, ValidateOptions())
        caches = SequenceCaches(md.open_runner(bundle), bundle.manifest.spec, slots, shared=shared)
        return Decoder(caches, trace)

    return make


@pytest.mark.parametrize(
    ("name", "shared"), [("tiny-dynamic", False), ("tiny-preallocated", False), ("tiny-preallocated", True)]
)
def test_interleaved_sequences_are_right(decoder, name, shared):
    """One begins while others decode, and they advance at different speeds, some in the same call."""
    found = decoder(name, shared=shared)
    found.step(0)
    found.step(0)
    found.step(1, 0)
    found.step(2)
    for step in range(24):
        found.step(*[b for b in range(3) if step % (b + 1) == 0])
    assert len(found.outputs[0]) > len(found.outputs[1]) > len(found.outputs[2]) > 8
    assert max(found.errors()) < 5e-3
    # A sequence that reads another one's cache would be far off.
    swapped = found.trace.oracle["output"][[1, 2, 0]]
    assert np.linalg.norm(swapped - found.trace.oracle["output"]) > np.linalg.norm(swapped) / 2


@pytest.mark.parametrize(("name", "shared"), [("tiny-dynamic", False), ("tiny-preallocated", True)])
def test_an_ended_sequence_frees_its_slot_and_is_forgotten(decoder, name, shared):
    found = decoder(name, slots=2, shared=shared)
    found.step(0)
    found.step(1)
    (last,) = found.caches.infer([found.request(0, end=True)])
    assert last["output"].shape[1] == 1
    assert len(found.caches) == 1
    (after,) = found.caches.infer([ServedRequest(feeds={"x": last["output"]}, sequence="s0")])
    assert "unknown" in str(after)
    found.step(2)  # into the slot that is free
    found.step(1, 2)
    assert len(found.caches) == 2
    assert max(found.errors()) < 5e-3


def test_the_sequence_that_rests_longest_makes_room(decoder):
    found = decoder("tiny-dynamic", slots=2)
    for b in range(3):
        found.step(b)
    assert len(found.caches) == 2
    (after,) = found.caches.infer([found.request(0)])
    assert "again" in str(after)
    found.step(1)
    assert max(found.errors()) < 5e-3


@pytest.mark.parametrize(("name", "shared"), [("tiny-dynamic", False), ("tiny-preallocated", True)])
def test_a_full_cache_refuses_tokens_and_disturbs_nobody(decoder, bundles, name, shared):
    found = decoder(name, shared=shared)
    room = bundles(name).manifest.spec.kv_cache.room
    x = np.tile(found.trace.inputs["x"][:1], (1, 4, 1))[:, :room]
    long = ServedRequest(feeds={"x": x[:, : room - 2]}, sequence="long", start=True)
    (full,) = found.caches.infer([long])
    assert full["output"].shape == (1, room - 2, x.shape[2])
    found.step(0)  # a prompt beside a cache with room for two
    beyond = ServedRequest(feeds={"x": x[:, :3]}, sequence="long")
    (refused,) = found.caches.infer([beyond])
    assert "do not fit" in str(refused)
    (last,) = found.caches.infer([ServedRequest(feeds={"x": x[:, :2]}, sequence="long")])
    assert last["output"].shape[1] == 2
    found.step(0)
    assert next(found.errors()) < 5e-3


def test_a_sequence_has_one_request_at_a_time(decoder):
    found = decoder("tiny-dynamic")
    first, second = found.caches.infer([found.request(0), found.request(0)])
    assert not isinstance(first, md.DeployError)
    assert "one request at a time" in str(second)
    found.outputs[0].append(first["output"])
    assert len(found.caches) == 1, "the second request did not end the sequence"
    twice = [found.request(0), replace(found.request(0), end=True)]
    assert not isinstance(found.caches.infer(twice)[0], md.DeployError)
    assert len(found.caches) == 1


def test_more_sequences_than_caches_in_one_batch_do_not_disturb_each_other(decoder):
    found = decoder("tiny-dynamic", slots=1)
    first, second = found.caches.infer([found.request(0), found.request(1)])
    assert not isinstance(first, md.DeployError)
    assert "another sequence took its cache" in str(second)
    found.outputs[0].append(first["output"])
    found.step(0)
    assert max(next(iter(found.errors())), 0) < 1e-2


def test_a_sequence_is_one_batch_element(decoder):
    found = decoder("tiny-dynamic")
    request = ServedRequest(feeds={"x": found.trace.inputs["x"][:2, :3]}, sequence=1, start=True)
    (refused,) = found.caches.infer([request])
    assert "one batch element" in str(refused)
    assert len(found.caches) == 0
