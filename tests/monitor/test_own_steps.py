"""Phases that have steps of their own: the batches of an evaluation between steps of a training."""

from __future__ import annotations

import pytest

import memtools
from tests.kit.ownprocess import in_own_process


def test_steps_inside_are_those_of_the_phase_and_outside_those_of_the_run():
    with memtools.MemoryMonitor() as monitor:
        monitor.step(5)
        with monitor.phase("evaluate", own_steps=True):
            monitor.step(40)
            assert monitor.step_count == 5
            with monitor.phase("inner", own_steps=True):
                monitor.step(2)
            monitor.step()
        monitor.step()
        assert monitor.step_count == 6
    assert {phase.name: phase.count for phase in monitor.phases()} == {"evaluate": 1, "inner": 1}


WHAT_A_PHASE_KEEPS = """
    import logging, sys, memtools
    logging.getLogger("memtools").addHandler(logging.NullHandler())
    own_steps, found = bool(int(sys.argv[1])), []
    monitor = memtools.MemoryMonitor(limit="2 GiB")
    monitor.on_leak(found.append)
    with monitor:
        for _ in range(4):
            monitor.step()
        kept = []
        with monitor.phase("evaluate", own_steps=own_steps):
            for i in range(24):
                kept.append(bytearray(8 << 20))
                monitor.step(1 if own_steps else 0)
                if i == 15 and own_steps:
                    assert any(one.holder == "list kept" for one in found)
        kept.clear()
        for _ in range(2):
            monitor.step()
        assert monitor.findings() == ()
    assert bool(found) == own_steps
    if own_steps:
        assert {one.phase for one in found} == {"evaluate"}
        assert "/step of evaluate" in str(found[0])
        assert found[-1].over
        assert found[-1].freed_bytes > 100 << 20
        assert "as at the end of evaluate" in str(found[-1])
"""


@pytest.mark.parametrize("own_steps", [True, False])
def test_what_a_phase_keeps_is_found_and_ends_with_it(own_steps):
    """Without steps of its own the same growth is not seen: the run has made few steps."""
    in_own_process(WHAT_A_PHASE_KEEPS, int(own_steps))


def test_a_training_that_leaks_is_found_whatever_is_evaluated_in_between():
    in_own_process("""
        import logging, memtools
        logging.getLogger("memtools").addHandler(logging.NullHandler())
        monitor, kept = memtools.MemoryMonitor(), []
        with monitor:
            for step in range(64):
                kept.append(bytearray(1 << 20))
                monitor.step()
                if step % 8 == 7:
                    with monitor.phase("evaluate", own_steps=True):
                        rows = [bytearray(1 << 20) for _ in range(4)]
                        monitor.step(4)
                    del rows
            (one,) = [one for one in monitor.findings() if one.holder]
        assert one.holder == "list kept"
        assert one.phase == ""
        assert abs(one.rate_bytes - (1 << 20)) < 0.1 * (1 << 20)
    """)


def test_a_guard_acts_in_it_and_the_run_goes_on():
    monitor = memtools.MemoryMonitor(limit="1 MiB")
    monitor.guard(0.5)
    with monitor:
        while monitor.samples_taken < 2:
            pass
        phase = monitor.phase("evaluate", own_steps=True)
        with pytest.raises(memtools.HostMemoryPressure), phase:
            monitor.step()
        monitor.step()
        assert monitor.step_count == 1
