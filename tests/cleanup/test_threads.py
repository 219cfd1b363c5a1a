"""CleanupPolicy on several threads: all ticks count, one acts at a time, nobody waits for ever."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest

from memtools import CleanupPolicy
from tests.cleanup.policycases import gc_as_found, quiet, times  # noqa: F401 - a fixture


def together(count: int, work: Callable[[int], object]) -> None:
    """On so many threads at once; what one raises is raised here."""
    barrier, errors = threading.Barrier(count), list[BaseException]()

    def run(number: int) -> None:
        try:
            barrier.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "deadlock"
    if errors:
        raise errors[0]


def test_every_tick_counts_and_actions_do_not_overlap():
    policy = quiet()
    inside: list[int] = []
    overlaps: list[int] = []

    def act() -> None:
        inside.append(1)
        gc.collect(0)  # gives others a turn
        overlaps.append(len(inside))
        inside.pop()

    policy.add("act", act, 3)

    def train(_: int) -> None:
        for _ in range(300):
            policy.step()
            policy.micro_batch()
            with policy.epoch():
                pass

    together(4, train)
    assert policy.report().updates == 1200
    assert set(overlaps) == {1}
    assert 1 <= times(policy, "act") <= 400


def test_a_tick_while_another_thread_acts_only_counts():
    policy = quiet()
    inside, go = threading.Event(), threading.Event()
    where: list[int | None] = []

    def act() -> None:
        where.append(threading.get_ident())
        inside.set()
        assert go.wait(30)

    policy.add("act", act, 1)
    thread = threading.Thread(target=policy.step)
    thread.start()
    assert inside.wait(30)
    policy.step(), policy.step()
    assert policy.report().updates == 3
    go.set()
    thread.join()
    assert where == [thread.ident]
    policy.step()
    assert where == [thread.ident, threading.get_ident()]


def test_cleanup_by_hand_waits_for_its_turn():
    policy = quiet()
    inside, go = threading.Event(), threading.Event()
    order: list[str] = []

    def slow() -> None:
        inside.set()
        assert go.wait(30)
        order.append("slow")

    policy.add("slow", slow, 1)
    policy.add("quick", lambda: order.append("quick"))
    first = threading.Thread(target=policy.step)
    second = threading.Thread(target=policy.cleanup, args=("quick",))
    first.start()
    assert inside.wait(30)
    second.start()
    go.set()
    first.join(), second.join()
    assert order == ["slow", "quick"]


def test_what_is_due_during_a_cleanup_by_hand_is_done_after_it():
    policy = quiet()
    inside, go = threading.Event(), threading.Event()

    def slow() -> None:
        inside.set()
        assert go.wait(30)

    policy.add("slow", slow)
    policy.add("due", lambda: None, 5)
    thread = threading.Thread(target=policy.cleanup, args=("slow",))
    thread.start()
    assert inside.wait(30)
    policy.step(5)
    assert times(policy, "due") == 0
    go.set()
    thread.join()
    policy.step()
    assert times(policy, "due") == 1


@pytest.mark.slow
def test_start_and_stop_from_many_threads():
    policy = CleanupPolicy(None)

    def use(_: int) -> None:
        for _ in range(5):
            with policy:
                policy.step()

    together(3, use)
    assert gc.isenabled()
    assert not policy.running
    assert policy.report().updates == 15


def test_reports_and_callbacks_come_and_go_meanwhile():
    policy = quiet(gc_every=None, strict=False)

    def work(number: int) -> None:
        for i in range(60):
            if number == 0:
                policy.step()
            elif number == 1:
                handle = policy.add("mine", lambda: None, 1)
                handle.remove()
            elif number == 2:
                assert str(policy.report())
            else:
                policy.phase(f"p{i % 12}")

    together(4, work)


@pytest.mark.slow
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_action_that_raised_keeps_nobody_out(error: type[BaseException]):
    policy = quiet()

    def fail() -> None:
        raise error

    handle = policy.add("fail", fail)
    if error is ValueError:
        with pytest.warns(RuntimeWarning):
            policy.cleanup("fail")
    else:
        with pytest.raises(KeyboardInterrupt):
            policy.cleanup("fail")
    handle.remove()
    together(2, lambda _: policy.cleanup("gc"))
    assert times(policy, "gc") == 2
