"""CleanupPolicy and what goes wrong: bad input, callbacks that raise, actions that fail."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from memtools import CleanupPolicy, HostMemoryPressure
from memtools._base import torch as bridge
from tests.cleanup.policycases import calls, gc_as_found, memory, quiet, times  # noqa: F401 - fixtures
from tests.kit.fakedevice import FakeCuda, cuda  # noqa: F401 - a fixture

# A policy opens the CUDA runtime where torch sees devices, and there is one for a process's life.
pytestmark = pytest.mark.usefixtures("_fake_library")

# --- arguments ---


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (
            {"gc_every": 0},
            ValueError,
            "gc_every must be 1 to 1,000,000,000, got 0; None means never",
        ),
        ({"empty_cache_every": 1.0}, TypeError, "empty_cache_every must be an int"),
        ({"trim_every": {"epoch": 0}}, ValueError, r"trim_every\['epoch'\] must be 1 to"),
        ({"pool_trim_every": {1: 1}}, TypeError, "pool_trim_every: a key must be a name"),
        ({"at_epoch": 1}, TypeError, "at_epoch must be True or False, got int"),
        ({"strict": "no"}, TypeError, "strict must be True or False, got str"),
        ({"pressure": 0}, ValueError, "pressure must be above 0 and at most 1, got 0"),
        ({"pressure": 85}, ValueError, "pressure must be above 0 and at most 1, got 85"),
        ({"pressure": float("nan")}, ValueError, "pressure must be above 0"),
        ({"pressure": True}, TypeError, "pressure must be a number, got bool"),
        ({"limit": "much"}, ValueError, "limit must be a number of bytes"),
        ({"limit": 0}, ValueError, "limit must be at least 1 byte"),
        ({"ranks": "all"}, TypeError, "ranks must be a bool, a process group or None, got str"),
        ({"ranks": 2}, TypeError, "ranks must be a bool, a process group or None, got int"),
        ({"gc_evry": 3}, TypeError, "gc_evry"),
    ],
)
def test_a_bad_argument_is_named(settings, error, words):
    with pytest.raises(error, match=words):
        CleanupPolicy(**settings)


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda p: p.step(-1), ValueError, "n must be from 0 to .*, got -1"),
        (lambda p: p.step(1.5), TypeError, "float"),
        (lambda p: p.step("3"), TypeError, "str"),
        (
            lambda p: p.phase(""),
            ValueError,
            "name must have at least one printable char",
        ),
        (lambda p: p.phase(7), TypeError, "a phase's name must be a str, got int"),
        (lambda p: p.phase("update"), ValueError, "cannot be called 'update'"),
        (lambda p: p.cleanup("gcc"), ValueError, "one of gc, gc_young, .* got 'gcc'"),
        (lambda p: p.cleanup("freeze"), ValueError, "got 'freeze'"),
        (lambda p: p.watch(None), TypeError, r"^watch\(\) takes a memtools.KVPool, got NoneType"),
        (lambda p: p.add("x", 3), TypeError, r"add\(\): a function is needed, got int"),
        (lambda p: p.add("x", lambda a, b: 0), TypeError, "must take a CleanupCall or no argument"),
        (lambda p: p.add(3, print), TypeError, r"add\(\): a name must be a str, got int"),
        (lambda p: p.add(" ", print), ValueError, "1 to 40 characters"),
        (lambda p: p.add("a\nb", print), ValueError, "1 to 40 characters"),
        (lambda p: p.add("x" * 41, print), ValueError, "1 to 40 characters"),
        (lambda p: p.add("gc", print), ValueError, "'gc' is one of memtools' own"),
        (lambda p: p.add("seen", print), ValueError, "a callback 'seen' exists already; remove"),
        (lambda p: p.add("x", print, 0), ValueError, "every must be 1 to"),
        (lambda p: p.add("x", print, pressure=1), TypeError, "pressure must be True or False"),
    ],
)
def test_bad_use_is_refused_and_changes_nothing(use: Callable[[Any], object], error, words):
    policy = quiet()
    seen = calls(policy, 2)
    before = policy.report().as_dict()["actions"]
    with pytest.raises(error, match=words):
        use(policy)
    assert policy.report().as_dict()["actions"] == before
    policy.step(2)
    assert seen == [2]


def test_there_is_an_end_to_callbacks_and_phases():
    policy = quiet()
    for i in range(10):
        policy.add(f"c{i}", print)
    with pytest.raises(ValueError, match="knows 10 names of callbacks at most"):
        policy.add("one more", print)
    for i in range(12):
        policy.phase(f"p{i}")
    with pytest.raises(ValueError, match="counts 12 phases at most"):
        policy.phase("one more")
    policy.phase("p3")


# --- callbacks ---


def fail() -> None:
    raise OSError("the disk is full")


def test_what_a_callback_raises_is_said_once_and_training_goes_on():
    policy = quiet()
    policy.add("save", fail, 1)
    after = []
    policy.add("after", lambda: after.append(1), 1)
    with pytest.warns(RuntimeWarning, match="cleanup save failed with OSError: the disk") as said:
        policy.step()
    assert said[0].filename == __file__
    policy.step()
    assert after == [1, 1]
    assert times(policy, "save") == 2
    assert policy.report()["save"].verdict == "failed: OSError: the disk is full"


def test_where_warnings_are_errors_training_goes_on_all_the_same(caplog: pytest.LogCaptureFixture):
    policy = quiet()
    policy.add("save", fail, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy.step()
    assert "cleanup save failed" in caplog.text


@pytest.mark.parametrize("error", [HostMemoryPressure("save now"), KeyboardInterrupt()])
def test_host_memory_pressure_and_interrupts_come_out_of_step(error: BaseException):
    policy = quiet()

    def stop() -> None:
        raise error

    added = policy.add("stop", stop, 2)
    late = []
    policy.add("late", lambda: late.append(1), 2)
    policy.step()
    with pytest.raises(type(error)):
        policy.step()
    assert late == []
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            policy.step()  # it was not done
        added.remove()
    policy.step()
    assert late == [1], "what came after it is done at the next tick"


def test_within_an_action_ticks_only_count():
    policy = quiet()
    depth: list[int] = []

    def again() -> None:
        depth.append(policy.report().updates)
        with policy.epoch():
            policy.step()

    policy.add("again", again, 1)
    policy.step()
    assert depth == [1]
    policy.step()
    assert depth == [1, 3]


def quiet_with_a_cleanup_inside() -> CleanupPolicy:
    policy = quiet()
    policy.add("again", lambda: policy.cleanup("gc"), 1)
    return policy


def test_cleanup_within_a_callback_is_refused():
    policy = quiet_with_a_cleanup_inside()
    with pytest.warns(
        RuntimeWarning, match="cannot be called from one of this policy's own callbacks"
    ):
        policy.step()
    with pytest.warns(RuntimeWarning, match="cannot be called from"):
        (done,) = quiet_with_a_cleanup_inside().cleanup("again")
    assert done.error.startswith("RuntimeError: cleanup() cannot be called from one of")


@pytest.mark.slow
def test_another_policys_cleanup_within_a_callback_works():
    policy, other = quiet(), quiet()
    policy.add("other", lambda: other.cleanup("gc"), 1)
    policy.step()
    assert times(other, "gc") == 1


def test_a_callback_may_add_and_remove_others():
    policy = quiet()
    said = []

    def first() -> None:
        second.remove()
        policy.add("third", lambda: said.append("third"), 1)

    once = policy.add("first", lambda: (first(), once.remove()), 1)
    second = policy.add("second", lambda: said.append("second"), 1)
    policy.step()
    policy.step()
    assert said == ["third"]


# --- built-in actions that fail ---


def test_an_action_that_fails_is_said_once_and_others_are_done(cuda: FakeCuda):  # noqa: F811
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cuda.empty_cache = broken  # type: ignore[method-assign]
    policy = quiet(empty_cache_every=1, trim_every=1)
    with pytest.warns(RuntimeWarning, match="cleanup empty_cache failed with RuntimeError: CUDA"):
        policy.step()
    policy.step()
    assert times(policy, "trim") == 2
    assert policy.report()["empty_cache"].verdict.startswith("failed: RuntimeError: CUDA error")


@pytest.mark.slow
def test_a_device_that_fails_while_it_is_waited_for_is_said_once(cuda: FakeCuda):  # noqa: F811
    def broken(device: int) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    cuda.synchronize = broken  # type: ignore[method-assign]
    cuda.allocate(0, 100)
    policy = CleanupPolicy(None, strict=True)
    with pytest.warns(
        RuntimeWarning, match="empty_cache failed with RuntimeError: CUDA error: dev"
    ):
        policy.epoch().__enter__()
    policy.epoch().__enter__()
    assert times(policy, "gc") == 2


def test_a_policy_older_than_torch_says_that_it_watches_no_device(
    cuda: FakeCuda,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    with monkeypatch.context() as before:
        before.setattr(bridge, "loaded", lambda: None)
        policy = quiet()
        assert policy.report().notes == ()
    assert "made before torch was imported; make it after that" in str(policy.report())
    assert quiet().report().notes == ()
    assert policy.report().as_dict()["notes"] == list(policy.report().notes)


# --- graph capture ---


@pytest.mark.slow
def test_nothing_is_done_while_a_graph_is_captured_and_it_stays_asked(cuda: FakeCuda):  # noqa: F811
    policy = quiet(empty_cache_every=2, gc_every=2)
    cuda.capturing = True
    policy.step(2)
    policy.step()
    assert (times(policy, "gc"), times(policy, "empty_cache"), cuda.order) == (0, 0, [])
    with pytest.raises(RuntimeError, match="during a CUDA graph capture"):
        policy.cleanup()
    cuda.capturing = False
    policy.step(0)
    assert times(policy, "gc") == 0, "no tick, nothing done"
    policy.step()
    assert (times(policy, "gc"), cuda.order) == (2 - 1, ["empty_cache"])


@pytest.mark.slow
def test_without_a_context_nobody_asks_for_a_capture(cuda: FakeCuda):  # noqa: F811
    cuda.ready = False
    policy = quiet(gc_every=1, empty_cache_every=1)
    policy.step()
    assert (times(policy, "gc"), times(policy, "empty_cache"), cuda.calls) == (1, 0, 0)


# --- devices ---


@pytest.mark.slow
def test_an_epoch_synchronises_before_the_cache_is_emptied(cuda: FakeCuda):  # noqa: F811
    policy = CleanupPolicy(None, strict=True)
    cuda.allocate(1, 100)
    with policy.epoch():
        assert cuda.order == ["synchronize 1", "empty_cache"]
    assert cuda.order == ["synchronize 1", "empty_cache"] * 2
    policy.step()
    assert len(cuda.order) == 4


def test_empty_cache_runs_once_there_is_a_context(cuda: FakeCuda):  # noqa: F811
    policy = quiet(strict=False, empty_cache_every=1)
    cuda.ready = False
    for _ in range(10):
        policy.step()
    assert policy.report()["empty_cache"].verdict == "no CUDA in this process"
    cuda.ready = True
    cuda.allocate(0, 1 << 30)
    cuda.cached = [1 << 30, 0]
    policy.step()
    found = policy.report()["empty_cache"]
    assert (found.count, found.device_freed_bytes, found.backoff) == (1, 1 << 30, 1)
