"""Several streams at once: the threads start together, fail together, and every result is kept."""

import contextlib
import time

import numpy as np
import pytest

import mha_deploy as md
from mha_deploy.runtime import gpu as throughput
from mha_deploy.runtime.gpu import GpuRunner, Prepared, measure_throughput


class Clock:
    """An event of a stream that computes at once."""

    def record(self, stream):
        self.at = time.perf_counter()

    def microseconds_since(self, earlier):
        return (self.at - earlier.at) * 1e6

    def close(self):
        pass


class Idle:
    def synchronize(self):
        pass


class Lane(GpuRunner):
    """Computes x + 1, on a stream that is none; `fails` when its turn comes."""

    name, inputs, outputs, device = "lane", {}, {}, "none"

    def __init__(self, fails=False):
        self.stream, self.fails, self.launched, self.closed = Idle(), fails, 0, False

    def checked(self, feeds):
        return feeds

    def _run(self, feeds):
        raise NotImplementedError

    @contextlib.contextmanager
    def _prepare(self, feeds, slots):
        def launch(slot):
            self.launched += 1
            if self.fails and self.launched > 30:
                raise md.DeployError("The stream is gone.", hint="another")

        yield Prepared(launch=launch, results=lambda slot: {"y": feeds["x"] + 1})

    def close(self):
        self.closed = True


@pytest.fixture
def clocks(monkeypatch, in_process):
    monkeypatch.setattr(throughput, "Event", Clock)
    monkeypatch.setattr(throughput, "_MOST", 60)
    monkeypatch.setattr(throughput, "_WAIT_S", 10.0)


def test_every_number_of_streams_is_measured_with_all_its_lanes(clocks):
    opened = []

    def opener():
        opened.append(Lane())
        return opened[-1]

    found = measure_throughput(opener, {"x": np.zeros(3)}, (4, 1, 2))
    assert [each.streams for each in found] == [1, 2, 4]
    assert len(opened) == 4  # the same runners again, and as many as the most streams
    assert all(runner.closed for runner in opened)
    for each in found:
        assert each.calls == 60
        assert each.per_second > 0
        assert 0 <= each.p50_us <= each.p99_us
        assert len(each.results) == each.streams
        assert all(np.array_equal(result["y"], np.ones(3)) for result in each.results)
    assert opened[0].launched > opened[3].launched >= 60


def test_a_stream_that_fails_ends_all_of_them(clocks):
    lanes = iter([Lane(), Lane(), Lane(fails=True)])
    with pytest.raises(md.DeployError, match="The stream is gone"):
        measure_throughput(lambda: next(lanes), {"x": np.zeros(3)}, (3,))


def test_a_runner_on_the_cpu_has_no_streams(bundles, in_process):
    bundle = bundles("tiny-gqa")
    with pytest.raises(md.DeployError, match="no CUDA streams"):
        measure_throughput(lambda: md.open_runner(bundle), {}, (1,))
