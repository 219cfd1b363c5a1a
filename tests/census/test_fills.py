"""Whether a container may be a buffer that fills: its name, and the code that fills it."""

from __future__ import annotations

import heapq
import queue
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from memtools._census.fills import may_fill
from memtools._census.growth import GrowthCensus


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("list local 'buf' of generator _shuffle()", True),
        ("dict __main__._LORA_CACHE", True),
        ("deque PolicyInput.samples_queue", True),
        ("list ReplayMemory.memory", True),
        ("dict Store.cached_rows", True),
        ("list Trainer.losses", False),
        ("list Memory.rows", False),
        ("dict Rebuffed.rows", False),
        ("list train.history['loss']", False),
    ],
)
def test_a_name_says_what_a_container_is_for(path: str, expected: bool) -> None:
    assert may_fill(path, [[], {}], []) is expected


class Bounded:
    def __init__(self) -> None:
        self.rows, self.most = [], 500

    def add(self, row: Any) -> None:
        self.rows.append(row)
        if len(self.rows) > self.most:
            self.rows.pop(0)


class Counted(Bounded):
    """The bound is compared before, and nothing is removed."""

    def add(self, row: Any) -> None:
        if len(self.rows) < 5000:
            self.rows += []
            self.rows.append(row)


class Deleted:
    def __init__(self) -> None:
        self.rows: dict[int, Any] = {}

    def add(self, row: Any) -> None:
        self.rows[len(self.rows)] = row
        if len(self.rows) > 999:
            del self.rows[0]


class Ordered:
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def add(self, row: Any) -> None:
        heapq.heappush(self.rows, (len(self.rows), id(row), row))
        if row is None:
            heapq.heappop(self.rows)


class Maximum:
    def __init__(self) -> None:
        self.rows, self.maxsize = [], 4000

    def add(self, row: Any) -> None:
        self.rows.append(row)


class Unbounded(Maximum):
    def __init__(self) -> None:
        self.rows, self.maxsize = [], 0


class Moved:
    """As torch orders hooks: nothing goes."""

    def __init__(self) -> None:
        self.rows: OrderedDict[int, Any] = OrderedDict()

    def add(self, row: Any) -> None:
        self.rows[id(row)] = row
        if row is None:
            self.rows.move_to_end(id(row), last=False)


class Kept:
    """Others read it, and empty it at the end of an epoch that never comes."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def add(self, row: Any) -> None:
        self.rows.append(row)
        if len(self.rows) > 1 and len(self.rows) % 100 == 0:
            print(len(self.rows))

    def end(self) -> None:
        while self.rows:
            self.rows.pop()


def found_in(add: Callable[[Any], object]) -> list[tuple[str, bool]]:
    census = GrowthCensus(least_rate=1024.0)
    for step in range(1, 41):
        add(bytearray(4000))
        if step % 10 == 0:
            census.look(step)
    return [(one.path, one.may_fill) for one in census.holders()]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Bounded, True), (Counted, True), (Deleted, True), (Ordered, True), (Maximum, True),
        (Unbounded, False), (Moved, False), (Kept, False),
    ],
)  # fmt: skip
def test_the_code_that_adds_to_it_says_whether_it_has_an_end(kind: Any, expected: bool) -> None:
    owner = kind()
    ((path, fills),) = found_in(owner.add)
    assert path.endswith(f"{kind.__name__}.rows")
    assert fills is expected


class ReplayMemory:
    """The replay memory of many tutorials: a list that is used as a ring."""

    def __init__(self, capacity: int = 500) -> None:
        self.capacity, self.memory, self.position = capacity, list[Any](), 0

    def push(self, row: Any) -> None:
        if len(self.memory) < self.capacity:
            self.memory.append(None)
        self.memory[self.position] = row
        self.position = (self.position + 1) % self.capacity


class Overfull(ReplayMemory):
    """What it says is no bound: it gets longer."""

    def push(self, row: Any) -> None:
        self.memory.append(row)


class Trainer:
    """Its maximum is that of another thing."""

    def __init__(self) -> None:
        self.buffer_size, self.losses = 5000, list[Any]()


class Checked(Trainer):
    def add(self, row: Any) -> None:
        if len(self.losses) < self.buffer_size:
            self.losses.append(row)


@pytest.mark.parametrize(
    ("add", "capacity"),
    [
        (lambda: ReplayMemory().push, 500),
        (lambda: Overfull(30).push, None),
        (lambda: ReplayMemory(sys.maxsize).push, None),
        (lambda: Trainer().losses.append, None),
        (lambda: Checked().add, 5000),
        (lambda: Maximum().add, None),
        (lambda: queue.Queue[Any](900).put, 900),
        (lambda: queue.Queue[Any]().put, None),
        (lambda: deque[Any](maxlen=700).append, 700),
    ],
)
def test_the_owner_says_how_many_entries_a_buffer_takes(
    add: Callable[[], Callable[[Any], object]], capacity: int | None
) -> None:
    census, put = GrowthCensus(least_rate=1024.0), add()
    for step in range(1, 41):
        put(bytearray(4000))
        if step % 10 == 0:
            census.look(step)
    (found,) = census.holders()
    assert found.capacity == capacity


def test_a_variable_of_a_function_or_a_generator_is_judged_by_its_code() -> None:
    def shuffled(source: Iterator[Any]) -> Iterator[Any]:
        waiting: list[Any] = []
        for row in source:
            waiting.append(row)
            if len(waiting) < 10_000:
                continue
            yield waiting.pop()

    def kept(source: Iterator[Any]) -> Iterator[Any]:
        rows = []
        for row in source:
            rows.append(row)
            yield row

    census = GrowthCensus(least_rate=1024.0)
    todo: deque[Any] = deque()

    def source() -> Iterator[Any]:
        for step in range(1, 41):
            yield bytearray(4000)
            if step % 10 == 0:
                census.look(step)

    todo.extend(shuffled(source()))
    assert [one.may_fill for one in census.holders() if "waiting" in one.path] == [True]
    census = GrowthCensus(least_rate=1024.0)
    for _ in kept(source()):
        pass
    assert [one.may_fill for one in census.holders() if "'rows'" in one.path] == [False]


def test_a_queue_has_a_maximum_or_none() -> None:
    for most, expected in ((0, True), (900, True)):  # by its name in any case
        waiting = queue.Queue[Any](most)
        ((_, fills),) = found_in(waiting.put)
        assert fills is expected
