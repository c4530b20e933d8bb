"""Signals: noted on one rank, agreed on by all (O-083)."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

import zeromp as zm
from zeromp.signals import EXIT_CODE


def test_o083_all_ranks_stop_after_the_same_step_when_one_has_a_signal():
    """O-083: SIGUSR1 on rank 1 in step 3, and again: 3 ranks stop there; training's bytes stay."""

    def job(world):
        with zm.Interrupt(world) as stop:
            world.ledger.section = "train"
            for step in range(10):
                if step >= 3 and world.rank == 1:
                    stop.note(signal.SIGUSR1)
                if stop.requested():
                    break
            stop.note(signal.SIGUSR1)
            stop.note(signal.SIGTERM)
            assert stop.requested() is signal.SIGUSR1
            assert world.ledger.sent("agree") == 0
            return step

    assert zm.threads(3, job) == [3, 3, 3]
    assert EXIT_CODE == 75 == os.EX_TEMPFAIL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_handlers_are_there_inside_and_as_before_outside(number):
    before = signal.getsignal(number)
    with zm.Interrupt(zm.alone()) as stop:
        assert stop.requested() is None
        signal.raise_signal(number)
        signal.raise_signal(number)  # at once: the same request, delivered twice
        assert stop.requested() is number
        signal.raise_signal(number)
        assert stop.requested() is number
    assert signal.getsignal(number) is before


def test_a_second_signal_later_ends_the_rank_at_once():
    script = """
        import signal, time
        import zeromp as zm
        with zm.Interrupt(zm.alone()) as stop:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGUSR1)
            time.sleep(1.1)
            signal.raise_signal(signal.SIGTERM)
            print("still here")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert done.stdout == ""
