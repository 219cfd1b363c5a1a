"""Resident memory that grows faster than what is in use, and forecasts of what a limit counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from memtools._census.arrays import Owner
from memtools._leak.judge import Block
from memtools._monitor import leakwatch
from memtools._monitor.signals import block_that_fills
from tests.monitor.program import GIB, KIB, MIB, Clock, Program, clock, holder

__all__ = ["clock"]


def run_resident(clock: Clock, steps: int, limit: int = GIB, **grow: int) -> Program:
    program = Program(clock, limit=limit, resident=True)
    program.run(steps, **grow)
    return program


def test_freed_memory_that_malloc_keeps_is_found_with_the_time_that_is_left(clock: Clock) -> None:
    grow = {name: 440 * KIB for name in ("rss", "resident", "idle", "VmData")}
    program = run_resident(clock, 600, **grow)
    (found,) = program.watch.findings()
    assert (found.grade, found.kind, found.signal) == ("fragmentation", "idle heap", "resident")
    assert found.rate_bytes == pytest.approx(440 * KIB, rel=0.01)
    assert "MALLOC_ARENA_MAX" in found.advice
    left = (GIB - program.sizes["resident"]) / (440 * KIB)
    assert found.steps_left is not None
    assert found.steps_left[0] < left < found.steps_left[1]
    assert program.said, "it is reported while the program runs"
    assert "freed memory that malloc keeps +440.0 KiB/step" in program.texts[0]


def test_growth_that_ends_long_before_the_limit_is_no_finding(clock: Clock) -> None:
    """Freed memory that is far from filling what there is: it may end at any time."""
    grow = {name: 40 * KIB for name in ("rss", "resident", "idle", "VmData")}
    program = run_resident(clock, 600, 64 * GIB, **grow)
    assert program.watch.findings() == ()


@pytest.mark.parametrize("fits", [True, False])
def test_a_block_that_is_written_for_the_first_time_says_whether_it_fits(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    monkeypatch.setattr(leakwatch, "block_that_fills", lambda least: Block(2 * GIB, least))
    monkeypatch.setattr(leakwatch, "owners_of", lambda ranges: [Owner("Replay.states")])
    limit = 8 * GIB if fits else GIB
    program = run_resident(clock, 600, limit, rss=256 * KIB, resident=256 * KIB)
    (found,) = program.watch.findings()
    assert (found.grade, found.kind) == ("fills", "first writes")
    assert found.rate_bytes == pytest.approx(256 * KIB, rel=0.01)
    assert (found.holder, found.what[:19]) == ("Replay.states", "2.00 GiB when full,")
    assert program.watch.verdicts(), "of the parts that are tested by themselves"
    if fits:
        assert found.what.endswith("of 8.00 GiB are in use")
        assert (found.steps_left, found.advice, program.texts) == (None, "", [])
        return
    assert "and 1.00 GiB are allowed" in found.what
    assert "numpy.memmap" in found.advice
    left = (limit - program.sizes["resident"]) / (256 * KIB)
    assert found.steps_left is not None
    assert found.steps_left[0] < left < found.steps_left[1]
    assert len(program.texts) == 1


def test_the_forecast_is_of_what_the_limit_counts_and_the_fastest_has_it(clock: Clock) -> None:
    program = Program(clock, limit=GIB, resident=True)
    program.held = [holder(70 * KIB)]
    program.run(128, heap=70 * KIB, rss=510 * KIB, resident=510 * KIB, idle=440 * KIB,
                VmData=510 * KIB)  # fmt: skip
    (named,) = program.watch.findings()
    assert named.holder == "list Trainer.losses"
    assert named.joint_bytes == pytest.approx(510 * KIB)
    assert str(named).endswith("steps, as memory as a whole grows by 510.0 KiB/step")
    left = (GIB - program.sizes["resident"]) / (510 * KIB)
    assert named.steps_left is not None
    assert named.steps_left[0] < left < named.steps_left[1]
    program.run(500, heap=70 * KIB, rss=510 * KIB, resident=510 * KIB, idle=440 * KIB,
                VmData=510 * KIB)  # fmt: skip
    small, large = sorted(program.watch.findings(), key=lambda one: one.rate_bytes)
    assert (small.steps_left, large.kind) == (None, "idle heap")
    assert large.steps_left is not None
    assert large.steps_left[0] < left - 500 < large.steps_left[1]


def test_a_forecast_that_gets_known_later_is_reported_once(clock: Clock) -> None:
    """Resident memory grows 8 times as fast as the finding: at first that may be a warm-up."""
    program = Program(clock, limit=GIB, resident=True)
    program.held = [holder(70 * KIB)]
    program.run(160, heap=70 * KIB, rss=510 * KIB, resident=510 * KIB, idle=440 * KIB,
                VmData=510 * KIB)  # fmt: skip
    first, *others = [text for text in program.texts if "list Trainer.losses" in text]
    assert "limit in" not in first
    grades = [text.partition(":")[0] for text in others if "limit in" in text]
    assert len(grades) == len(set(grades)) >= 1
    assert others[-1].endswith("steps, as memory as a whole grows by 510.0 KiB/step")
    steps = [step for step, one in program.events.told if one.steps_left]
    assert steps[0] > 64, "not before it has gone on for a while"


def test_the_heap_is_not_walked_where_that_could_reach_the_limit(clock: Clock) -> None:
    program = Program(clock, limit=GIB, resident=True)
    program.held = [holder(70 * KIB)]
    program.run(64, heap=70 * KIB, rss=70 * KIB, resident=70 * KIB)
    walks = program.census.looks
    program.watch._limits.admit_look = lambda: False  # type: ignore[method-assign]
    program.run(200, heap=70 * KIB, rss=70 * KIB, resident=70 * KIB)
    assert program.census.looks == walks
    (found,) = program.watch.findings()
    assert found.holder == "list Trainer.losses"


def test_a_buffer_that_doubles_is_not_taken_for_one_that_is_filled_once(clock: Clock) -> None:
    """What is in use has risen as much as what is resident, in stairs."""
    program = Program(clock, resident=True, limit=GIB)
    size = MIB
    for step in range(1, 700):
        if 96 * KIB * step > size:
            program.sizes["heap"] += size
            program.sizes["VmData"] += size
            size *= 2
        program.run(1, rss=96 * KIB, resident=96 * KIB)
    assert [one for one in program.watch.findings() if one.kind == "idle heap"] == []


def test_the_forecast_follows_peaks_that_rise_faster_than_the_ends_of_steps(clock: Clock) -> None:
    """As those of an array that is made anew by each step, larger than before."""
    program = Program(clock, limit=400 * MIB, resident=True)
    program.held = [holder(128 * KIB)]
    for _ in range(128):
        program.above += 128 * KIB
        program.run(1, heap=128 * KIB, rss=128 * KIB, resident=128 * KIB)
    (found,) = program.watch.findings()
    assert found.joint_bytes == pytest.approx(256 * KIB)


def test_a_limit_of_the_process_counts_what_is_mapped(clock: Clock) -> None:
    """Untouched memory counts against `ulimit -d`, and resident memory does not."""
    program = Program(clock, limit=64 * GIB, resident=True)
    limits = program.watch._limits
    room = lambda: {"counted": 60 * GIB, "VmData": GIB - program.sizes["VmData"]}  # noqa: E731
    program.held = [holder(64 * KIB)]
    limits.rooms = room  # type: ignore[method-assign]
    program.run(300, heap=64 * KIB, VmData=256 * KIB)
    (found,) = program.watch.findings()
    left = (GIB - program.sizes["VmData"]) / (256 * KIB)
    assert found.steps_left is not None
    assert found.steps_left[0] < left < found.steps_left[1]


def test_the_block_that_fills_is_the_one_with_most_left_to_be_written(tmp_path: Path) -> None:
    rows = [
        ("rw-p 00000000 00:00 0 ", 2_000, 2_000, "full"),
        ("rw-p 00000000 00:00 0                  [heap]", 9_000, 8_000, "has 1,000 left"),
        ("rw-p 00000000 00:00 0 ", 50_000, 6_000, "has 44,000 left"),
        ("rw-p 00000000 00:00 0 ", 80_000, 40, "has never been used"),
        ("---p 00000000 00:00 0 ", 99_000, 6_000, "cannot be written"),
        ("rw-p 00000000 08:01 77   /data/a.bin", 99_000, 6_000, "of a file"),
    ]
    text = "".join(
        f"7f{n:010x}-7f{n + 1:010x} {row}\nSize:  {size} kB\nKernelPageSize:  4 kB\n"
        f"Rss:  {rss} kB\nPss:  {rss} kB\nVmFlags: rd wr mr\n"
        for n, (row, size, rss, _) in enumerate(rows)
    )
    smaps = tmp_path / "smaps"
    smaps.write_text(text)
    found = Block(50_000 * KIB, 6_000 * KIB, 0x7F0000000002)
    assert block_that_fills(10_000 * KIB, str(smaps)) == found
    assert block_that_fills(40_000 * KIB, str(smaps)) is None
    assert block_that_fills(0, str(tmp_path / "none")) is None


@pytest.mark.parametrize("size", [2 * GIB, 50 * MIB])
def test_a_block_too_large_for_malloc_that_no_array_has_is_another_allocators(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """C code may have got a smaller one from malloc, and fill it."""
    monkeypatch.setattr(leakwatch, "block_that_fills", lambda least: Block(size, least))
    monkeypatch.setattr(leakwatch, "owners_of", lambda ranges: [Owner()])
    program = run_resident(clock, 600, 8 * GIB, rss=64 * KIB, resident=64 * KIB)
    (found,) = program.watch.findings()
    assert found.kind == ("outside malloc" if size == 2 * GIB else "first writes")
    if size == 2 * GIB:
        assert found.grade in ("suspect", "growing")
        assert found.what == "in a block of 2.00 GiB that no tensor or array has"
        assert "memory outside malloc +64.0 KiB/step (in a block of" in program.texts[0]
        assert found.steps_left is not None


def test_memory_that_a_library_maps_by_itself_is_found_with_its_rate(clock: Clock) -> None:
    """Far from the limit too: it is not freed memory, and nothing says that it ends."""
    grow = {name: 40 * KIB for name in ("rss", "resident", "VmData")}
    program = run_resident(clock, 600, 64 * GIB, **grow)
    (found,) = program.watch.findings()
    assert (found.kind, found.signal) == ("outside malloc", "resident")
    assert found.rate_bytes == pytest.approx(40 * KIB, rel=0.02)
    assert "pyarrow" in found.advice
    assert program.said[0].kind == "outside malloc"


def test_the_teeth_of_an_allocator_that_doubles_a_buffer_hide_no_growth(clock: Clock) -> None:
    """It is beside the new one for a while, twice as long each time."""
    program = Program(clock, limit=64 * GIB, resident=True)
    rate, beside = 64 * KIB, 0
    for step in range(1, 900):
        full = 2 ** step.bit_length()
        now = 30 * KIB * full if step > 0.9 * full else 0
        program.run(1, **dict.fromkeys(("rss", "resident", "VmData"), rate + now - beside))
        beside = now
    (found,) = program.watch.findings()
    assert found.rate_bytes == pytest.approx(rate, rel=0.1)
    assert all(one.rate_bytes < 2 * rate for one in program.said), "no tooth is growth"
    assert not any(one.over for one in program.said), "it does not end at a tooth's end"


@pytest.mark.parametrize("fills", ["VmData", "idle"])
def test_what_grows_for_300_steps_and_then_stops_is_not_named_at_the_end(
    clock: Clock, fills: str
) -> None:
    program = Program(clock, limit=64 * GIB, resident=True)
    program.run(300, **dict.fromkeys(("rss", "resident", fills), 40 * KIB))
    program.run(900)
    assert program.watch.findings() == ()


def test_what_the_first_steps_take_is_not_named(clock: Clock) -> None:
    program = Program(clock, limit=64 * GIB, resident=True)
    program.run(40, **dict.fromkeys(("rss", "resident", "VmData"), MIB))
    program.run(300)
    assert program.said == []


def test_what_malloc_keeps_and_what_is_in_use_are_not_outside_of_it(clock: Clock) -> None:
    """Kernels for ever new shapes: some of it in use, some kept, some mapped by themselves."""
    program = Program(clock, limit=64 * GIB, resident=True)
    program.run(600, heap=10 * KIB, idle=44 * KIB, VmData=200 * KIB, rss=100 * KIB,
                resident=100 * KIB)  # fmt: skip
    assert all(one.kind != "outside malloc" for one in program.said)


def test_the_last_look_does_not_walk_for_resident_memory_alone(clock: Clock) -> None:
    """The function that had the list has returned by then."""
    program = Program(clock, limit=64 * GIB, resident=True)
    program.held = [holder(64 * KIB)]
    rates = {name: 64 * KIB for name in ("heap", "rss", "resident", "VmData")}
    program.run(300, **rates)
    program.held, walks = [], program.census.looks
    program.watch.close()
    assert [one.holder for one in program.watch.findings()] == ["list Trainer.losses"]
    assert program.census.looks == walks
