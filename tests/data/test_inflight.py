"""InFlight: what may be in flight, by the size of batches, the limit, the job's room, a budget."""

from __future__ import annotations

from typing import Any

import pytest

from memtools._base import running
from memtools._base.limits import shm_room
from memtools.data._inflight import GROWS_EVERY, READ_AGAIN_NS, InFlight, Room
from memtools.errors import BudgetError


class Batches:
    """Stands for an iterator: batches that have not arrived, and the bytes of those that have."""

    def __init__(self, coming: int = 0, *arrived: int) -> None:
        self.coming, self.arrived = coming, list(arrived)
        self.walks = 0

    def asked_for(self) -> int:
        return self.coming + len(self.arrived)

    def flying(self) -> tuple[int, list[int]]:
        self.walks += 1
        return self.coming, self.arrived


class Part:
    """Stands for the loader's part of a budget of which `room` bytes are left."""

    def __init__(self, room: int) -> None:
        self.reserved, self.room = 0, room

    def reserve(self, size: int, doing: str, remedy: str) -> None:
        if self.reserved + size > self.room:
            raise BudgetError(f"{doing}: {remedy}")
        self.reserved += size

    def release(self, size: int) -> None:
        assert 0 <= size <= self.reserved
        self.reserved -= size


def flight(
    limit: int | None, largest: int = 10, part: Any = None, room: int | None = None
) -> tuple[InFlight, Batches]:
    found, batches = InFlight(limit, largest, part, lambda: room), Batches()
    found.join(batches)
    return found, batches


def most_admitted(found: InFlight, batches: Batches) -> int:
    batches.coming = 0
    while batches.coming < 99 and found.admits(batches):
        batches.coming += 1
        found.asked()
    return batches.coming


@pytest.mark.parametrize(("limit", "count"), [(35, 3), (30, 3), (9, 1), (None, 99)])
def test_as_many_batches_as_the_limit_holds_and_at_least_one(limit, count):
    assert most_admitted(*flight(limit)) == count


def test_the_first_batch_is_asked_for_alone_where_nothing_is_known():
    found, batches = flight(1000, largest=0)
    assert most_admitted(found, batches) == 1
    found.arrived(100)
    assert most_admitted(found, batches) == 10


def test_a_batch_that_has_arrived_counts_as_what_it_is():
    found, batches = flight(35)
    batches.coming, batches.arrived = 1, [2, 3]
    assert found.held() == (3, 15)
    assert found.admits(batches)
    batches.arrived += [11]
    assert not found.admits(batches)
    assert found.held() == (4, 26)


def test_a_larger_batch_makes_the_others_count_as_much():
    found, batches = flight(35)
    batches.coming = 2
    found.arrived(20)
    assert (found.held(), found.largest, found.peak) == ((2, 40), 20, 40)
    assert not found.admits(batches)


def test_the_peak_is_what_was_asked_for_and_not_what_was_refused():
    found, batches = flight(35)
    assert most_admitted(found, batches) == 3
    assert (found.peak, found.held()) == (30, (3, 30))
    assert not found.admits(batches)
    assert found.peak == 30


@pytest.mark.parametrize(("room", "count"), [(29, 2), (30, 3), (5, 1), (None, 9)])
def test_what_is_being_made_has_to_fit_into_the_rest_of_the_job(room, count):
    assert most_admitted(*flight(90, room=room)) == count


def test_another_iterator_of_the_loader_counts():
    found, batches = flight(50)
    second = Batches(2)
    found.join(second)
    assert most_admitted(found, batches) == 3
    del second
    assert most_admitted(found, batches) == 5


def test_each_iterator_may_have_one_batch_whatever_the_others_have():
    for found, batches in (flight(30), flight(30, largest=0), flight(30, room=0)):
        batches.coming = 7
        second = Batches()
        found.join(second)
        found.join(second)
        assert found.admits(second)
        second.coming = 1
        assert found.held()[0] == 8
        assert not found.admits(second)


def test_shrink_halves_and_batches_that_are_handed_out_bring_it_back():
    found, batches = flight(80)
    batches.coming = 8
    found.shrink()
    assert (found.allowed, found.limit) == (40, 80)
    batches.coming = 4
    found.shrink()
    assert found.allowed == 20
    batches.coming = 0
    found.shrink()
    assert found.allowed == 10  # one batch
    for _ in range(GROWS_EVERY):
        assert found.allowed == 10
        found.handed()
    assert found.allowed == 20
    for _ in range(6 * GROWS_EVERY):
        found.handed()
    assert found.allowed == found.limit == 80


def test_shrink_is_written_into_the_record_of_a_monitor_that_runs(monkeypatch):
    told: list[object] = []
    monkeypatch.setattr(running, "event", lambda *what: told.append(what))
    found, batches = flight(2048, largest=512)
    batches.coming = 4
    found.shrink()
    assert told == [("mark", "bounded loader: at most 1.0 KiB in flight")]


def test_a_new_limit_counts_at_once():
    found, batches = flight(80)
    found.shrink()
    found.set_limit(30)
    assert (found.allowed, most_admitted(found, batches)) == (30, 3)


def test_a_budget_has_all_batches_but_the_one_that_the_loop_waits_for():
    part = Part(30)
    found, batches = flight(None, part=part)
    assert most_admitted(found, batches) == 4
    assert part.reserved == 30
    batches.coming = 2
    found.handed()
    assert part.reserved == 10
    batches.coming = 0
    found.release()
    assert part.reserved == 0


def test_the_room_of_the_job_is_the_lowest_of_those_that_are_known(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 7 kB\n")
    assert Room(str(tmp_path)).left() == 7 * 1024
    left, shm = Room().left(), shm_room()
    assert left is not None
    assert shm is not None
    assert 0 < left <= shm[1]


def test_the_room_is_read_again_after_a_while(tmp_path, monkeypatch):
    (tmp_path / "proc").mkdir()
    times, room = [0], Room(str(tmp_path))
    monkeypatch.setattr("memtools.data._inflight.time.monotonic_ns", lambda: times[0])
    for now, kib, left in ((1, 7, 7), (READ_AGAIN_NS, 9, 7), (READ_AGAIN_NS + 1, 9, 9)):
        times[0] = now
        (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 90 kB\nMemAvailable: {kib} kB\n")
        assert room.left() == left * 1024


def test_the_cause_says_what_was_in_flight_and_what_room_there_was():
    found, batches = flight(4096, largest=1024, room=3072)
    batches.coming = 2
    assert found.admits(batches)
    found.asked()
    batches.coming = 0  # the workers are gone when it is asked for
    assert found.cause().startswith(
        "memtools: 3 batches in flight, about 3.0 KiB of 4.0 KiB allowed; /dev/shm has "
    )
    assert "; the job may take 3.0 KiB more; if memory ran out, " in found.cause()


@pytest.mark.parametrize(
    ("limit", "room", "others", "walks"),
    [
        (1000, 1000, 0, 0),
        (None, None, 0, 0),
        (39, 1000, 0, 1),  # four of 10 bytes are more
        (1000, 39, 0, 1),
        (1000, 1000, 1, 1),  # what another iterator has counts as well
    ],
)
def test_batches_are_walked_only_where_their_number_does_not_tell(limit, room, others, walks):
    found, batches = flight(1000, room=1000)
    batches.coming = 4
    assert found.admits(batches)
    found.asked()
    assert found.peak == 50
    rest = [Batches() for _ in range(others)]
    for other in rest:
        found.join(other)
    found.limit, found._room = limit, lambda: room
    batches.coming, batches.arrived, batches.walks = 2, [1], 0
    assert found.admits(batches)  # 31 bytes
    assert batches.walks == walks
    found.asked()
    assert (found.peak, "4 batches in flight" in found.cause()) == (50, True)


def test_more_than_ever_is_counted_to_the_byte():
    found, batches = flight(1000)
    batches.coming, batches.arrived = 1, [3]
    assert found.admits(batches)
    found.asked()
    assert (found.peak, batches.walks) == (23, 1)
