"""Unlucky surroundings: streams that fail, signals, hostile names in a folder, code that misbehaves."""

import signal

import pytest
from fault_harness import assert_orderly, run

# -- Streams ---------------------------------------------------------------------------------------


def test_a_reader_that_left_is_no_error():
    assert assert_orderly(run("models", stdout="broken")).code == 0


# -- Signals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_ends_a_command_with_its_code(number, tmp_path):
    outcome = run("export", "tiny-mha", "-o", tmp_path / "out", signals=[(0.2, number, "main")])
    assert_orderly(outcome, codes=[128 + number])
