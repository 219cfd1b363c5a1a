"""The findings of a record: as the run itself said them, brought up to the end of the record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import memtools
from memtools import LeakFinding, _core
from memtools._leak.advice import advice_for
from memtools._record import kinds
from memtools._record.figures import Figures, figures_of
from memtools._record.kinds import Start
from memtools._record.verdict import pace_of

MIB = 2**20
GIB = 2**30
LOSSES = LeakFinding("growing", "heap", rate_bytes=MIB, first_step=24, since_step=1,
                     holder="list Trainer.losses", kind="list",
                     what="1 new [512, 512] float32 tensor a step")  # fmt: skip
LOSSES = replace(LOSSES, advice=advice_for(LOSSES))
SEEN = replace(LOSSES, grade="leak", holder="dict Frames.seen", kind="dict", process="worker 2",
               signal="children", rate_bytes=2 * MIB)  # fmt: skip
START = Start("run", given_bytes=GIB, limit="limit given, 1.00 GiB", tests_leaks=True)


def told(
    path: Path, events: Sequence[kinds.Event | LeakFinding], steps: int = 300, start: Start = START
) -> Figures:
    """A run of so many steps that take 1 MiB each, of which these events tell."""
    with _core.RecordWriter(path, [("step", ""), ("rss", "B")]) as writer:
        writer.event("start", kinds.payload("start", start))
        for i in range(steps):
            writer.append(10**15 + i * 10**7, [i + 1, 100 * MIB + i * MIB])
        for event in events:
            kind = "finding" if isinstance(event, LeakFinding) else event.KIND
            writer.event(kind, kinds.payload(kind, event), step=steps)
    return figures_of(memtools.read_record(path))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.mem"


def test_the_newest_state_of_each_stands_the_worst_first(path):
    worse = replace(LOSSES, grade="likely")
    figures = told(path, [LOSSES, SEEN, worse])
    assert [(one.grade, one.holder) for one in figures.verdict.findings] == [
        ("leak", "dict Frames.seen"), ("likely", "list Trainer.losses")
    ]  # fmt: skip
    assert figures.verdict.leaking


def test_what_is_over_does_not_stand_and_then_nothing_grows(path):
    figures = told(path, [LOSSES, replace(LOSSES, over=True)])
    assert figures.verdict.findings == ()
    assert figures.verdict.notes() == ["the process does not grow"]


IN_USE = (
    "memory in use does not grow; resident memory has grown by 96.0 KiB a step over the last "
    "three quarters of the run"
)
OF_FILES = (
    "the process does not grow, except for mapped file pages: 64.0 KiB a step, which the system "
    "reclaims when memory is short"
)


@pytest.mark.parametrize(
    ("rate", "files", "text"),
    [(96 * 1024, 0, IN_USE), (0, 64 * 1024, OF_FILES), (100, 100, "the process does not grow")],
)
def test_it_is_not_said_that_nothing_grows_while_resident_memory_rises(path, rate, files, text):
    with _core.RecordWriter(path, [("step", ""), ("rss", "B"), ("private", "B")]) as writer:
        writer.event("start", kinds.payload("start", START))
        for step in range(1, 600):
            now = 100 * MIB + step * rate
            rss = now + 20 * MIB + step * files
            writer.append(10**15 + step * 10**7, [step, rss, now])
    (line,) = figures_of(memtools.read_record(path)).verdict.notes()
    assert line == text


def test_teeth_do_not_hide_that_resident_memory_rises(path):
    """The newer half of the run begins at the top of a tooth, and ends below it."""
    with _core.RecordWriter(path, [("step", ""), ("rss", "B"), ("private", "B")]) as writer:
        writer.event("start", kinds.payload("start", START))
        for step in range(1, 600, 4):
            now = 100 * MIB + step * 64 * 1024 + (20 * MIB if 280 < step < 380 else 0)
            writer.append(10**15 + step * 10**7, [step, now + 20 * MIB, now])
    (line,) = figures_of(memtools.read_record(path)).verdict.notes()
    assert line.startswith("memory in use does not grow; resident memory has grown by ")


def test_without_steps_the_series_do_not_repeat_what_the_run_has_found_of_resident_memory(path):
    found = LeakFinding("growing", "resident", per="s", rate_bytes=MIB, kind="outside malloc")
    with _core.RecordWriter(path, [("step", ""), ("rss", "B")]) as writer:
        writer.event("start", kinds.payload("start", START))
        for second in range(600):
            writer.append(10**15 + second * 10**9, [0, 100 * MIB + second * MIB])
        writer.event("finding", kinds.payload("finding", found), step=0)
    (one,) = figures_of(memtools.read_record(path)).verdict.findings
    assert (one.kind, one.per) == ("outside malloc", "s")
    assert one.seconds_left is not None


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (64 * 1024, "the process does not grow; the private memory of its workers has grown by "
                    "64.0 KiB a step over the last half of the run: pages copied from the "
                    "process, or freed memory that malloc keeps"),
        (100, "neither the process nor its workers grow"),
    ],
)  # fmt: skip
def test_it_is_not_said_that_workers_do_not_grow_while_their_private_memory_rises(path, rate, text):
    columns = [("step", ""), ("rss", "B"), ("children", "count"), ("children_private", "B")]
    with _core.RecordWriter(path, columns) as writer:
        writer.event("start", kinds.payload("start", START))
        for step in range(1, 600):
            writer.append(10**15 + step * 10**7, [step, 100 * MIB, 2, 20 * MIB + step * rate])
    (line,) = figures_of(memtools.read_record(path)).verdict.notes()
    assert line == text


@pytest.mark.parametrize("again", [False, True])
def test_what_an_epoch_has_freed_is_said_after_the_verdict(path, again):
    freed = replace(LOSSES, over=True, freed_bytes=9 << 20)
    verdict = told(path, [LOSSES, freed, *([LOSSES] if again else [])]).verdict
    words = "9.0 MiB were freed at once, as at the end of an epoch"
    assert any(words in line for line in verdict.notes()) != again
    assert verdict.leaking == again
    assert not any(words in line for line in verdict.lines())


@pytest.mark.parametrize(("epochs", "words"), [
    (1, "as at the end of an epoch"),
    (3, "as at the end of an epoch; memory in use fell like this at least 3 times"),
])  # fmt: skip
def test_epochs_that_free_the_same_are_counted(path, epochs, words):
    """Also those that end after the finding was taken back: nobody looks then. A batch, which is
    of each step, does not count."""
    columns = [("step", ""), ("rss", "B"), ("heap_used", "B")]
    with _core.RecordWriter(path, columns) as writer:
        writer.event("start", kinds.payload("start", START))
        for step in range(1, 600):
            use = 100 * MIB + step % (600 // epochs) * MIB // 8 + 2 * MIB * (step % 2)
            writer.append(10**15 + step * 10**7, [step, GIB // 2, use if step < 599 else 100 * MIB])
        freed = replace(LOSSES, over=True, freed_bytes=20 * MIB)
        writer.event("finding", kinds.payload("finding", freed), step=300)
    (_, line) = figures_of(memtools.read_record(path)).verdict.notes()
    assert line.endswith(words)


def test_a_name_that_comes_later_stands_beside_what_had_none(path):
    """Both are said until the run takes the first back, as a name is another finding."""
    nameless = replace(LOSSES, holder="", kind="", what="")
    assert len(told(path, [nameless, LOSSES]).verdict.findings) == 2
    path.unlink()
    (found,) = told(path, [nameless, LOSSES, replace(nameless, over=True)]).verdict.findings
    assert found.holder == "list Trainer.losses"


def test_the_forecast_is_that_at_the_end_of_the_record_and_of_all_that_grows(path):
    """1,024 MiB less 399 in use: 625 steps of 1 MiB, 208 of 3 MiB."""
    early = replace(LOSSES, steps_left=(9000.0, 9900.0))
    (found,) = told(path, [early]).verdict.findings
    assert found.steps_left is not None
    low, high = found.steps_left
    assert low < 625 < high
    assert high / low < 2
    path.unlink()
    both = told(path, [early, SEEN])
    one = next(one for one in both.verdict.findings if one.holder == SEEN.holder)
    assert one.steps_left is not None
    assert one.steps_left[0] < 625 / 3 < one.steps_left[1]
    assert one.seconds_left == pytest.approx([0.01 * n for n in one.steps_left])
    assert one.joint_bytes == 3 * 2**20
    (other,) = (other for other in both.verdict.findings if other != one)
    assert other.steps_left is None, "it is a third of that growth"
    assert "\n".join(both.verdict.lines()).count("limit in ") == 1


def test_steps_are_told_in_time_with_the_pace_and_the_limit(path):
    """One line tells at which pace, which is that of compare, and which limit is meant."""
    figures = told(path, [replace(LOSSES, steps_left=(9000.0, 9900.0))])
    pace = pace_of(figures)
    assert pace == pytest.approx(0.01)
    (forecast,) = figures.verdict.notes()
    finding, fix = figures.verdict.lines()
    assert "  limit in " in finding
    assert fix == f"  fix: {LOSSES.advice}"
    assert forecast.startswith("at 10 ms a step that is ")
    assert forecast.endswith("; the limit is the 1.00 GiB given")


def test_a_limit_that_is_not_known_is_not_named(path):
    figures = told(path, [LOSSES], start=replace(START, given_bytes=None, limit=""))
    assert not any("the limit is" in line for line in figures.verdict.notes())


@pytest.mark.parametrize("limit", [0, -1])
@pytest.mark.parametrize("name", ["given_bytes", "machine_bytes"])
def test_a_limit_of_nothing_is_no_limit(path, name, limit):
    """As a damaged record may have it."""
    figures = told(path, [], start=replace(START, **{"given_bytes": None, name: limit}))
    assert (figures.limit_bytes, figures.machine) == (None, None)


def test_what_fills_up_has_no_forecast_and_is_no_leak(path):
    fills = replace(LOSSES, grade="fills", holder="deque replay", kind="deque")
    figures = told(path, [fills])
    assert figures.verdict.lines()[0] == "fills  deque replay  +1.0 MiB/step"
    assert figures.verdict.notes() == []
    assert not figures.verdict.leaking


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (0, "too early to say: 0 of 256 readings"),
        (12, "too early to say: 12 of 16 steps"),
        (24, "too early to say: 24 of 32 steps"),
        (31, "too early to say: 31 of 32 steps"),
        (32, "the process does not grow"),
    ],
)
def test_before_it_can_know_it_is_too_early_to_say(steps, text, path):
    """A run that tests itself has said nothing: that its memory rises is no news of the record."""
    assert told(path, [], steps=steps).verdict.notes()[0] == text


def test_a_run_that_does_not_test_itself_is_judged_from_its_series(path):
    (found,) = told(path, [], start=replace(START, tests_leaks=False)).verdict.findings
    assert (found.signal, found.holder) == ("rss", "")
    assert found.rate_bytes == pytest.approx(MIB, rel=0.05)


def test_a_run_without_steps_is_judged_from_its_series_beside_what_its_workers_say(path):
    with _core.RecordWriter(path, [("rss", "B")]) as writer:
        writer.event("start", kinds.payload("start", START))
        for i in range(3000):
            writer.append(10**15 + i * 10**7, [100 * MIB + i * MIB // 10])
        writer.event("finding", kinds.payload("finding", replace(SEEN, per="s")))
    found = figures_of(memtools.read_record(path)).verdict.findings
    assert [(one.signal, one.per, one.process) for one in found] == [
        ("rss", "s", ""), ("children", "s", "worker 2")
    ]  # fmt: skip
    assert found[0].rate_bytes == pytest.approx(10 * MIB, rel=0.05)
    assert found[0].seconds_left is not None
    assert found[0].seconds_left[0] < (1024 - 400) / 12 < found[0].seconds_left[1]
