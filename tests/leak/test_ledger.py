"""The ledger: what looks find goes in, and what stands, is reported and is taken back comes out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memtools import LeakFinding
from memtools._leak.ledger import Ledger, as_of_now, has_stopped
from memtools._leak.series import Points

KIB = 2**10
C_HEAP = LeakFinding("growing", "heap", rate_bytes=36.0 * KIB, kind="C heap", made_at="x.py:4")
PYTHON = LeakFinding("growing", "python", rate_bytes=9.0 * KIB, kind="Python objects")
NAMELESS = LeakFinding("suspect", "heap", rate_bytes=9.0 * KIB)
LIST = LeakFinding("growing", "heap", rate_bytes=9.0 * KIB, holder="list a", kind="list")
LIST_AT_64 = replace(LIST, first_step=64)
ACTOR = LeakFinding("growing", "children", rate_bytes=64.0 * KIB, kind="children",
                    process="child process 4711 (Actor)")  # fmt: skip


def look(
    ledger: Ledger, step: int, *found: LeakFinding, walked: bool = True, **paces: float
) -> tuple[list[str], list[str]]:
    """The grades of what is to be reported, and what is taken back, by its kind."""
    news, taken_back = ledger.look(step, found, paces, Points(), walked=walked)
    assert all(one.over for one in taken_back)
    return [one.grade for one in news], [one.kind for one in taken_back]


def test_a_grade_rises_and_stays_while_the_finding_stands() -> None:
    ledger = Ledger()
    for step, grade, news, stands in (
        (32, "growing", ["growing"], "growing"),
        (48, "suspect", [], "growing"),
        (64, "leak", ["leak"], "leak"),
        (96, "fills", ["fills"], "fills"),
    ):
        assert look(ledger, step, replace(LIST, grade=grade)) == (news, [])
        (now,) = ledger.findings()
        assert (now.grade, now.first_step) == (stands, 32)


def test_what_may_be_collected_later_stays_a_suspect() -> None:
    ledger = Ledger()
    cycles = replace(LIST, grade="suspect", holder="", kind="cycles", process="worker 0")
    for step in (16, 32, 64):
        look(ledger, step, cycles)
    assert [one.grade for one in ledger.findings()] == ["suspect"]


@pytest.mark.parametrize(("kind", "steps", "grade"), [
    ("list", (16, 32, 64), "growing"),
    ("list", (16, 64), "suspect"),
    ("list", (16, 24, 32), "suspect"),
    ("", (16, 32, 64), "suspect"),
])  # fmt: skip
def test_a_suspect_that_is_seen_again_and_again_is_growing(
    kind: str, steps: tuple[int, ...], grade: str
) -> None:
    ledger = Ledger()
    for step in steps:
        look(
            ledger, step, replace(LIST, grade="suspect", holder="list a" if kind else "", kind=kind)
        )
    assert [one.grade for one in ledger.findings()] == [grade]


@pytest.mark.parametrize(("before", "after", "taken_back", "stands"), [
    (C_HEAP, NAMELESS, ["C heap"], [""]),  # what is no longer even was no leak of C code's
    (C_HEAP, LIST, [], ["C heap", "list"]),  # both may grow
    (NAMELESS, LIST, [""], ["list"]),
    (NAMELESS, C_HEAP, [""], ["C heap"]),
    (NAMELESS, PYTHON, [""], ["Python objects"]),
    (PYTHON, LIST, ["Python objects"], ["list"]),  # its holder is known now
    (NAMELESS, ACTOR, [], ["children", ""]),  # another part of memory
])  # fmt: skip
def test_what_nobody_was_known_to_hold_is_taken_back(
    before: LeakFinding, after: LeakFinding, taken_back: list[str], stands: list[str]
) -> None:
    ledger = Ledger()
    look(ledger, 64, before)
    assert look(ledger, 96, after) == ([after.grade], taken_back)
    assert [one.kind for one in ledger.findings()] == stands


def test_the_c_heaps_growth_that_a_container_has_now_is_taken_back() -> None:
    ledger, keeper = Ledger(), replace(LIST, rate_bytes=36.0 * KIB)
    look(ledger, 64, C_HEAP, use=36.0 * KIB)
    assert look(ledger, 96, keeper, use=36.0 * KIB) == (["growing"], ["C heap"])
    assert [(one.holder, one.made_at) for one in ledger.findings()] == [("list a", "x.py:4")]


@pytest.mark.parametrize(("rate", "line"), [(33 * KIB, "train.py:4"), (99 * KIB, "")])
def test_what_gets_a_name_keeps_its_line_where_it_is_as_fast(rate: int, line: str) -> None:
    ledger = Ledger()
    look(ledger, 32, replace(NAMELESS, rate_bytes=36.0 * KIB, made_at="train.py:4"))
    look(ledger, 48, replace(NAMELESS, rate_bytes=rate, kind="cycles"))
    assert [(one.kind, one.made_at) for one in ledger.findings()] == [("cycles", line)]


def test_a_rate_comes_back_from_what_was_noise() -> None:
    """Between two walks its part of memory may seem to grow twice as fast for a while."""
    ledger, rates = Ledger(), []
    look(ledger, 32, replace(LIST, rate_bytes=2.0 * KIB), use=2.0 * KIB)
    for pace in (4.8, 1.8, 0.4, 5.2):
        faster = ledger.follow({"use": pace * KIB})
        rates.append((ledger.findings()[0].rate_bytes / KIB, faster))
    assert rates == [(4.8, True), (1.8, False), (2.0, False), (2.0, True)]


def test_a_rate_follows_steps_that_become_longer_however_long_ago_the_heap_was_walked() -> None:
    ledger = Ledger()
    look(ledger, 64, replace(LIST, rate_bytes=4.0 * KIB), use=8.0 * KIB)
    for pace in (16.0, 24.0, 80.0):
        assert not ledger.follow({"use": pace * KIB}, {"use"})
        assert ledger.findings()[0].rate_bytes == pace / 2 * KIB
    assert ledger.follow({"use": 240.0 * KIB}), "of something else"
    assert ledger.findings()[0].rate_bytes == 40 * KIB


def test_what_comes_as_before_is_not_what_becomes_faster() -> None:
    """A list gets 4 KiB at each step, beside one of episodes that become longer."""
    ledger, frames = Ledger(), replace(LIST, holder="list frames")
    for step, longer in ((64, 4.0), (96, 8.0), (128, 12.0)):
        found = replace(LIST, rate_bytes=4.0 * KIB), replace(frames, rate_bytes=longer * KIB)
        look(ledger, step, *found, use=(4.0 + longer) * KIB)
    ledger.follow({"use": 60.0 * KIB}, {"use"})
    rates = {one.holder: one.rate_bytes / KIB for one in ledger.findings()}
    assert rates == pytest.approx({"list a": 4.0, "list frames": 56.0})


def test_a_rate_follows_its_part_of_memory_but_for_what_has_its_own_measure() -> None:
    """A worker measures its own rate."""
    worker = replace(ACTOR, holder="list Actor.log", process="worker Actor")
    small = replace(LIST, holder="list b", rate_bytes=4.0 * KIB)
    ledger = Ledger()
    look(ledger, 64, ACTOR, worker, LIST, small, children=100.0 * KIB, use=10.0 * KIB)
    assert not ledger.follow({"children": 50.0 * KIB, "use": 5.0 * KIB})
    assert {one.process or one.holder: one.rate_bytes / KIB for one in ledger.findings()} == {
        "child process 4711 (Actor)": 32.0, "worker Actor": 64.0, "list a": 4.5, "list b": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["C heap", "Python objects", ""])
def test_what_has_no_holder_ends_first(kind: str) -> None:
    """A cache in C is full after 128 steps, and a list goes on: a walk has measured the list."""
    ledger, points = Ledger(), Points()
    rest = replace(NAMELESS, rate_bytes=10.0 * KIB, kind=kind, since_step=8)
    look(ledger, 64, LIST, rest, use=19.0 * KIB)
    for step in range(8, 129, 8):
        points.add(step, {"heap": 19 * KIB * step})
    ledger.follow({"use": 12.0 * KIB})
    assert ledger.end(points, 128) == []
    assert [one.rate_bytes / KIB for one in ledger.findings()] == pytest.approx([9.0, 3.0])
    for step in range(136, 257, 8):
        points.add(step, {"heap": 9 * KIB * step + 10 * KIB * 128})
    ledger.follow({"use": 9.5 * KIB})
    assert [one.key for one in ledger.end(points, 256)] == [rest.key]
    for pace in (9.0, 10.0):
        ledger.follow({"use": pace * KIB})
        assert [one.rate_bytes / KIB for one in ledger.findings()] == pytest.approx([pace])


@pytest.mark.parametrize("part", ["device", "shm"])
def test_what_is_first_found_without_a_walk_keeps_its_rate(part: str) -> None:
    """The rates of the newest walk say nothing of it."""
    ledger, one = Ledger(), LeakFinding("growing", part, rate_bytes=50.0 * KIB)
    look(ledger, 64, **{part: 30.0 * KIB})  # type: ignore[arg-type]
    look(ledger, 100, one, walked=False, **{part: 50.0 * KIB})  # type: ignore[arg-type]
    assert [found.rate_bytes for found in ledger.findings()] == [50.0 * KIB]
    look(ledger, 128, one, **{part: 50.0 * KIB})  # type: ignore[arg-type]
    ledger.follow({part: 60.0 * KIB})
    assert [found.rate_bytes for found in ledger.findings()] == [pytest.approx(60.0 * KIB)]


@pytest.mark.parametrize("standing", [LIST, C_HEAP, replace(C_HEAP, kind="cycles")])
def test_without_a_walk_what_is_known_stays_and_follows_its_part(standing: LeakFinding) -> None:
    ledger, rate = Ledger(), standing.rate_bytes
    look(ledger, 64, standing, use=rate)
    nameless = replace(NAMELESS, rate_bytes=1.5 * rate)
    assert look(ledger, 96, nameless, walked=False, use=1.5 * rate) == ([], [])
    assert [(one.key, one.rate_bytes) for one in ledger.findings()] == [
        (standing.key, pytest.approx(1.5 * rate))
    ]


def test_the_end_of_growth_ends_a_finding() -> None:
    ledger, points = Ledger(), Points()
    for step in range(8, 129, 8):
        points.add(step, {"heap": 9 * KIB * step})
    look(ledger, 64, LIST, use=9.0 * KIB)
    assert ledger.end(points, 128) == []
    for step in range(136, 257, 8):
        points.add(step, {"heap": 9 * KIB * 128})
    (over,) = ledger.end(points, 256)
    assert (over.holder, over.over, ledger.findings()) == ("list a", True, ())
    assert (over.freed_bytes, "freed" in str(over)) == (0, False)


@pytest.mark.parametrize(("last", "news"), [(180, []), (256, ["likely"])])
def test_what_has_ended_is_not_new(last: int, news: list[str]) -> None:
    """A cache that is full since step 180 is longer at step 256 than at the first look."""
    ledger, points = Ledger(), Points()
    for step in range(0, 257, 8):
        points.add(step, {"heap": 9 * KIB * min(step, last)})
    found = ledger.look(256, [replace(LIST, grade="likely")], {"use": 9.0 * KIB}, points)
    assert ([one.grade for one in found[0]], found[1]) == (news, [])
    assert [one.grade for one in ledger.findings()] == news
    assert ledger.end(points, 256) == []


def test_a_grade_that_rises_at_the_look_that_ends_it_is_not_reported() -> None:
    """An epoch has ended since the look before, and another container grows by then."""
    ledger, points = Ledger(), Points()
    for step in range(0, 257, 8):
        points.add(step, {"heap": 9 * KIB * (step if step < 200 else (step - 200) // 4)})
        if step == 64:
            assert ledger.look(step, [LIST], {"use": 9.0 * KIB}, points) == ([LIST_AT_64], [])
    found = [replace(LIST, grade="likely"), replace(LIST, holder="list b")]
    assert ledger.look(256, found, {"use": 9.0 * KIB}, points) == ([], [])
    assert [(one.holder, one.grade) for one in ledger.end(points, 256)] == [("list a", "growing")]
    assert not ledger


@pytest.mark.parametrize(("grade", "left", "freed"), [
    ("likely", 0, 4608 * KIB),
    ("likely", 1152, 3456 * KIB),
    ("growing", 0, 0),  # A buffer that is emptied may be called so.
])  # fmt: skip
def test_a_leak_that_an_epoch_ends_says_what_was_freed(grade: str, left: int, freed: int) -> None:
    ledger, points = Ledger(), Points()
    for step in range(0, 129, 8):
        points.add(step, {"heap": 36 * KIB * step})
    look(ledger, 64, replace(LIST, grade=grade, rate_bytes=36.0 * KIB), use=36.0 * KIB)
    for step in range(136, 201, 8):
        points.add(step, {"heap": left * KIB})
    (over,) = ledger.end(points, 200)
    assert (over.over, over.freed_bytes) == (True, freed)
    assert ("freed at once, as at the end of an epoch" in str(over)) == (freed > 0)


@pytest.mark.parametrize(("walk", "stands"), [(128, True), (112, False)])
def test_what_others_free_does_not_end_what_a_walk_has_found_since(walk: int, stands: bool) -> None:
    """Two lists grow by 9 KiB a step, and one of them is emptied after step 120."""
    ledger, points = Ledger(), Points()
    for step in range(0, 177, 8):
        points.add(step, {"heap": 18 * KIB * step - (1080 * KIB if step > 120 else 0)})
        if step == walk:
            ledger.look(step, [LIST], {"use": 9.0 * KIB}, points)
    assert [one.holder for one in ledger.end(points, 176)] == ([] if stands else [LIST.holder])


@pytest.mark.parametrize(("grows", "ends"), [(64 * KIB, False), (20 * KIB, False), (4 * KIB, True)])
def test_what_a_worker_has_found_ends_by_the_bytes_of_that_worker(grows: int, ends: bool) -> None:
    """It goes on saying so, and another worker grows on."""
    ledger, points = Ledger(), Points()
    worker = replace(ACTOR, holder="list Actor.log", process="worker 0")
    for step in range(8, 257, 8):
        own = 64 * KIB * min(step, 128) + grows * max(0, step - 128)
        points.add(step, {"children": own + 64 * KIB * step, "worker 0": own})
        look(ledger, step, worker, children=64.0 * KIB)
        if step == 128:
            assert ledger.end(points, step) == []
    assert [one.process for one in ledger.end(points, 256)] == ["worker 0"] * ends


@pytest.mark.parametrize(("until", "ends"), [(256, False), (128, True)])
def test_what_several_workers_have_found_ends_when_all_of_them_have_stopped(
    until: int, ends: bool
) -> None:
    points = Points()
    several = replace(ACTOR, holder="list Actor.log", process="2 workers", rate_bytes=64.0 * KIB)
    for step in range(8, 257, 8):
        each = {f"worker {i}": 32 * KIB * min(step, end) for i, end in ((0, 128), (1, until))}
        points.add(step, each if step < 200 else dict([each.popitem()]))  # one has ended
    assert has_stopped(several, points, 256) is ends


@pytest.mark.parametrize(("until", "ends"), [(256, False), (224, True)])
def test_a_worker_that_follows_another_goes_on_with_what_that_has_found(
    until: int, ends: bool
) -> None:
    """What comes in some steps around the end of an epoch is in no reading."""
    points = Points()
    worker = replace(ACTOR, holder="list Actor.log", process="worker 0")
    for step in range(8, 257, 8):
        own = min(step, 176) + max(0, min(step, until) - 228)
        points.add(step, {"worker 0": 64 * KIB * own})
    assert has_stopped(worker, points, 256) is ends


def test_cycles_of_a_worker_go_on_though_they_are_collected_from_time_to_time() -> None:
    points = Points()
    for step in range(8, 257, 8):
        points.add(step, {"worker 0": 64 * KIB * (step % 64)})
    cycles = replace(ACTOR, grade="fills", kind="cycles", process="worker 0")
    assert not has_stopped(cycles, points, 256)
    assert has_stopped(replace(cycles, cause="collector"), points, 256)


@pytest.mark.parametrize(("later", "rate"), [(64, 64.0), (16, 16.0), (256, 256.0)])
def test_what_a_worker_has_found_on_average_is_said_as_of_now(later: int, rate: float) -> None:
    """An epoch that is unlike the one before begins at step 128, and the worker looks rarely."""
    points, ledger = Points(), Ledger()
    for step in range(0, 257, 8):
        own = 64 * min(step, 128) + later * max(0, step - 128)
        points.add(step, {"worker 0": KIB * own})
    average = (64.0 + later) / 2 * KIB
    found = replace(ACTOR, holder="list Actor.log", process="worker 0", rate_bytes=average)
    now = as_of_now(replace(found, since_step=0), points, 256)
    assert now.rate_bytes == pytest.approx(rate * KIB)
    look(ledger, 256, found, children=64.0 * KIB)
    ledger.renew([now, LIST])
    assert [one.rate_bytes for one in ledger.findings()] == [now.rate_bytes]
