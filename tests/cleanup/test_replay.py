"""A cleanup policy's decisions over records of runs that never were, told by their figures."""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from memtools import CleanupPolicy, MemoryMonitor, _core, read_record
from memtools.cleanup.replay import Replayed, Settings, replay
from memtools.monitor.run import columns

MIB, GIB = 1 << 20, 1 << 30
MS = 1_000_000
HOST, DEVICE, FRAGMENTED, IDLE_CACHE, IDLE_HEAP = 1, 2, 4, 8, 16
NEVER = (0,) * 16


def rule(every: int = 0, triggers: int = 0, later: bool = False) -> tuple[Any, int, bool]:
    return (every, *NEVER[1:]), triggers, later


def policy(*rules: tuple[Any, int, bool], **changed: Any) -> Settings:
    names = {0: "gc", 1: "gc_young", 2: "empty_cache", 3: "trim"}
    clocks = ("update", "micro_batch", "validation", "epoch", "generation")
    given = {"rules": rules, "actions": names, "clocks": clocks, "order": (1, 0, 2, 3)}
    return Settings(**(given | changed))  # type: ignore[arg-type]


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., Any]:
    """recorded(updates, reading=..., events=...): 10 ms an update, a sample at each tenth."""

    def make(
        updates: int,
        reading: Callable[[int], dict[str, int]] = lambda step: {"rss": GIB},
        events: dict[int, tuple[str, str]] | None = None,
        devices: int = 0,
        **sizes: int,
    ) -> Any:
        names = columns(devices)
        writer = _core.RecordWriter(tmp_path / "run.mem", names, **sizes)
        # of the record: making it may take long, and seconds are counted from its start
        begin = read_record(tmp_path / "run.mem").clock_ns
        for step in range(0, updates + 1, 10):
            at, values = begin + step * 10 * MS, {"step": step, **reading(step)}
            writer.append(at, [values.get(name) for name, _ in names])
            for kind, text in [(events or {}).get(step, ("", ""))]:
                if kind:
                    writer.event(kind, text, step=step, time_ns=at)
        writer.close()
        return read_record(tmp_path / "run.mem")

    return make


def steps(decisions: Replayed) -> list[int]:
    return [decision.step for decision in decisions]


def test_what_frees_nothing_is_held_back_by_its_cost_and_then_backed_off(recorded):
    # 100 ms may take 0.3 % of the time: with the next one counted in, 200 ms need 66.7 s. Twice
    # in a row without gain: every 200, and 300 ms need 100 s.
    record = recorded(10_000)
    decisions = replay(record, policy(rule(every=100)), {"gc": 0.1})
    assert steps(decisions) == [100, 6_700, 10_000]
    first = decisions[0]
    assert (first.action, first.why, first.ms, first.freed_bytes) == ("gc", "cadence", 100, 0)
    assert first.seconds == pytest.approx(1.0, abs=0.02)
    assert not first.recorded
    assert decisions.skipped == {"gc": 65 + 16}  # multiples of 100, later of 200


def test_strict_keeps_the_cadence(recorded):
    decisions = replay(recorded(1_000), policy(rule(every=100), strict=True), {"gc": 9.0})
    assert steps(decisions) == list(range(100, 1_001, 100))


def test_what_the_records_own_cleanups_freed_counts(recorded):
    words = "gc (12 objects) 80.5 ms, malloc_trim 2.0 ms: freed 300.0 MiB on the host"
    record = recorded(2_000, events={500: ("cleanup", words)})
    decisions = replay(record, policy(rule(every=100), rule(), rule(), rule(every=1_000)))
    gc = [decision for decision in decisions if decision.action == "gc"]
    assert steps(Replayed(gc)) == list(range(100, 2_001, 100))
    assert {(one.ms, one.freed_bytes, one.recorded) for one in gc} == {(80.5, 300 * MIB, True)}
    trim = [decision for decision in decisions if decision.action == "trim"]
    assert [(one.step, one.ms, one.recorded) for one in trim] == [
        (1_000, 2.0, True),
        (2_000, 2, True),
    ]


def test_of_several_cleanups_the_nearest_in_time_counts(recorded):
    events = {
        step: (
            "cleanup",
            f"gc ({step} objects) {step / 100:.1f} ms: freed {step}.0 MiB on the host",
        )
        for step in (300, 900)
    }
    decisions = replay(recorded(1_000, events=events), policy(rule(every=250)))
    assert [(one.step, one.ms) for one in decisions] == [(250, 3), (500, 3), (750, 9), (1_000, 9)]


@pytest.mark.parametrize("limited", ["settings", "cgroup", "start event", "machine"])
def test_host_pressure_is_by_the_limit_that_was_in_force(recorded, limited):
    def reading(step: int) -> dict[str, int]:
        used = (900 if step >= 500 else 500) * MIB
        group = {"cgroup_used": used, "cgroup_limit": 1_000 * MIB} if limited == "cgroup" else {}
        free = {"available": 1_000 * MIB - used} if limited == "machine" else {}
        return {"rss": 300 * MIB if group or free else used, **group, **free}

    start = {"start event": "limit given 1000.0 MiB", "machine": "limit 1000.0 MiB (machine)"}
    events = {0: ("start", start.get(limited, "no limit"))}
    given = policy(rule(triggers=HOST), limit=1_000 * MIB if limited == "settings" else None)
    decisions = replay(recorded(1_000, reading, events), given, {"gc": 0.01})
    assert 500 < decisions[0].step < 530  # a look each 50 ms, a reading each 100 ms
    assert {decision.why for decision in decisions} == {"host pressure"}
    gaps = [b.seconds - a.seconds for a, b in pairwise(decisions)]
    assert 1.0 <= gaps[0] < 1.2  # rests 1 s; then it is backed off
    assert len(gaps) > 1
    assert gaps[1] >= 1.999


def test_device_pressure_and_an_idle_cache_are_seen(recorded):
    def reading(step: int) -> dict[str, int]:
        tight, idle = 300 <= step < 500, step >= 700
        tiers = {"allocated": 2, "reserved": 9 if tight else 6 if idle else 3}
        tiers |= {"free": 10 - tiers["reserved"], "total": 10}
        return {"rss": GIB, **{f"cuda0_{name}": n * GIB for name, n in tiers.items()}}

    given = policy(rule(), rule(), rule(triggers=DEVICE | IDLE_CACHE))
    decisions = replay(recorded(1_000, reading, devices=1), given, {"empty_cache": 0.001})
    why = {decision.why for decision in decisions if decision.step < 500}
    assert why == {"device pressure, idle cache"}
    assert {one.why for one in decisions if one.step >= 700} == {"idle cache"}
    assert not [one for one in decisions if one.step < 300 or 520 < one.step < 700]


def test_what_the_single_samples_do_not_reach_is_taken_from_the_buckets(recorded):
    def reading(step: int) -> dict[str, int]:
        return {"rss": (900 if 2_000 <= step < 2_500 else 500) * MIB}

    record = recorded(20_000, reading, rows=64, buckets=16)
    assert record.samples.values["step"][0] > 19_000
    given = policy(rule(every=5_000), rule(triggers=HOST), limit=1_000 * MIB, strict=True)
    decisions = replay(record, given)
    assert [one.step for one in decisions if one.action == "gc"] == list(
        range(5_000, 20_001, 5_000)
    )
    pressed = [one.step for one in decisions if one.action == "gc_young"]
    assert pressed
    assert 0 < min(pressed) <= 2_500


def test_a_bucket_counts_by_the_least_that_was_available(recorded):
    def reading(step: int) -> dict[str, int]:
        return {"rss": MIB, "available": (50 if 2_000 <= step < 2_100 else 500) * MIB}

    events = {0: ("start", "limit 1000.0 MiB (machine)")}
    record = recorded(20_000, reading, events, rows=64, buckets=16)
    decisions = replay(record, policy(rule(triggers=HOST)))
    assert decisions
    assert 0 < decisions[0].step <= 2_500


def test_the_same_record_gives_the_same_decisions(recorded):
    record = recorded(3_000, lambda step: {"rss": (500 + step % 700) * MIB})
    given = policy(rule(100, HOST), rule(10), rule(every=300, triggers=HOST), limit=GIB)
    decisions = replay(record, given)
    assert len(decisions) > 10
    assert replay(record, given) == decisions
    assert replay(read_record(record.path), given) == decisions


def test_decisions_together_fall_on_multiples_only(recorded):
    record = recorded(1_000, lambda step: {"rss": (900 if step > 333 else 100) * MIB})
    decisions = replay(record, policy(rule(70, HOST), limit=1_000 * MIB, strict=True, together=40))
    assert decisions
    assert {step % 40 for step in steps(decisions)} == {0}


def test_the_text_says_what_it_comes_to_and_what_the_record_does_not_tell(recorded):
    decisions = replay(recorded(10_000), policy(rule(100, HOST), rule(every=5_000)), {"gc": 0.09})
    assert str(decisions).splitlines() == [
        "5 cleanups in 10,000 updates (100.0 s)",
        "  gc: 3 times, 270.0 ms (0.27 % of the time), 76 left out as too dear; "
        "first at update 100, last at 9,200: cadence",
        "  gc_young: 2 times, 2.0 ms (0.00 % of the time); "
        "first at update 5,000, last at 10,000: cadence",
        "  note: the record tells no limit, so that nothing was host pressure; set one to try it",
    ]
    other = ((0, 0, 0, 0, 5, *NEVER[5:]), IDLE_HEAP, True)
    notes = replay(recorded(100), policy(other)).notes
    assert notes[0].startswith("a record has no idle bytes of malloc")
    assert notes[1] == "cadences by generation are not in a record"


# --- a CleanupPolicy's own ---


def test_a_policy_replays_by_its_own_settings(recorded):
    def reading(step: int) -> dict[str, int]:
        return {"rss": (900 if step > 800 else 500) * MIB}

    cleaned = CleanupPolicy(gc_every=300, young_every=100, limit="1000 MiB", strict=True)
    cleaned.add("mine", lambda: None, 400)
    decisions = cleaned.replay(recorded(1_000, reading), costs={"gc": 0.01, "mine": 0.002})
    by_name = {
        name: [d.step for d in decisions if d.action == name] for name in ("gc_young", "mine")
    }
    assert by_name == {"gc_young": list(range(100, 1_001, 100)), "mine": [400, 800]}
    gc = [(one.step, one.why) for one in decisions if one.action == "gc"]
    assert gc[:2] == [(300, "cadence"), (600, "cadence")]
    assert "host pressure" in gc[2][1]
    assert {one.action for one in decisions} == {"gc", "gc_young", "mine"}  # no trim: no idle heap
    assert cleaned.report().updates == 0  # nothing was done


def test_a_policy_leaves_out_what_has_nothing_to_work_on(recorded):
    cleaned = CleanupPolicy(gc_every=None, empty_cache_every=100, pool_trim_every=100, strict=True)
    assert {one.action for one in cleaned.replay(recorded(500))} == {"gc_young"}
    tiers = {f"cuda0_{name}": GIB for name in ("allocated", "reserved", "free", "total")}
    record = recorded(500, lambda step: {"rss": GIB, **tiers}, devices=1)
    assert {one.action for one in cleaned.replay(record)} == {"gc_young", "empty_cache"}


def test_a_monitors_own_record_can_be_replayed(tmp_path):
    with MemoryMonitor(tmp_path / "run.mem", interval_ms=1) as monitor:
        for _ in range(250):
            monitor.step()
        monitor.cleanup_memory()
    record = read_record(tmp_path / "run.mem")
    decisions = CleanupPolicy(100, manage_gc=False, strict=True).replay(record)
    assert [one.step for one in decisions if one.why == "cadence"] == [100, 200]
    assert decisions[0].recorded
    words = [event.text for event in record.events if event.kind == "cleanup"]
    assert f"objects) {decisions[0].ms:.1f} ms" in words[0]


def test_records_and_costs_that_are_none_are_refused(recorded, tmp_path):
    empty = recorded(100, lambda step: {"step": None})
    with pytest.raises(ValueError, match="has no steps to replay"):
        replay(empty, policy(rule(1)))
    much = recorded(100, lambda step: {"step": step << 40})
    with pytest.raises(ValueError, match="at most 100,000,000 are replayed"):
        replay(much, policy(rule(1)))
    record = recorded(100)
    with pytest.raises(ValueError, match="no action 'gcc'; it has empty_cache, gc, gc_young, trim"):
        replay(record, policy(rule(1)), {"gcc": 1.0})
    for cost in (-0.1, float("nan"), True, "1"):
        with pytest.raises(ValueError, match=r"costs\['gc'\] is 0 seconds or more"):
            replay(record, policy(rule(1)), {"gc": cost})  # type: ignore[dict-item]


def test_steps_that_fall_and_times_that_stand_still_do_no_harm(recorded):
    record = recorded(1_000, lambda step: {"step": 500 if step > 500 else step, "rss": GIB})
    assert steps(replay(record, policy(rule(100), strict=True))) == [100, 200, 300, 400, 500]
    odd = recorded(1_000, lambda step: {"step": 7 if step % 20 else step})
    assert steps(replay(odd, policy(rule(500), strict=True))) == [500, 1_000]


def test_native_arguments_that_are_none_are_refused():
    known = (GIB,) * 8
    make = _core.PolicyReplay
    for bad in ([rule()] * 17, [rule(2**48 + 1)], [((1,) * 17, 0, False)], [((-1,), 0, False)], 5):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            make(bad)  # type: ignore[arg-type]
    for changed in (
        {"pressure": 0.0},
        {"pressure": 1.5},
        {"max_cost": -1.0},
        {"pressure": 1e400 * 0},
    ):
        with pytest.raises(ValueError, match="pressure is above 0"):
            make([], **changed)  # type: ignore[arg-type]
    core = make([rule(1)])
    with pytest.raises(ValueError, match="a clock is 0 to 15, got 16"):
        core.advance(16, 1, 0, 0, known)
    with pytest.raises(ValueError, match="it ends at 5 ns, before 6"):
        core.advance(0, 1, 6, 5, known)
    for reading in (known[:7], (*known, 1), (0,) * 200, [1] * 8):
        with pytest.raises((TypeError, ValueError)):
            core.advance(0, 1, 0, 0, reading)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="an action is 0 to 15"):
        core.done(16, 0, 0, 0, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="an action is 0 to 15"):
        core.figures(2**32)
    assert core.advance(0, 3, 0, 30, known) == (1, 10, 1)


def test_an_advance_that_never_finds_anything_to_do_can_be_interrupted():
    known = (GIB,) * 8
    core = _core.PolicyReplay([rule(1)], max_cost=1e-9)
    assert core.advance(0, 1, 0, 0, known) == (1, 0, 1)
    core.done(0, 0, 10**18, 10**18, 0, 0, 0, 0, 0)  # cost 30 years: no tick can afford another one
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            core.advance(0, 10**13, 1, 10**9, known)
    finally:
        signal.signal(signal.SIGALRM, before)
