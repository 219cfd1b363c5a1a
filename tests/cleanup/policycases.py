"""What the tests of CleanupPolicy share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from memtools import CleanupPolicy
from memtools._cleanup.actions import IDLE_HEAP, TRIGGERS, TRIM
from memtools._cleanup.collector import _IMMORTAL
from tests.monitor.root import Root


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Root:
    """Every CleanupPolicy of the test reads memory here."""
    made = Root(tmp_path / "root")
    monkeypatch.setattr(CleanupPolicy, "_root", str(made.path))
    return made


@pytest.fixture(autouse=True)
def gc_as_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test leaves Python's gc changed; and what other tests left in malloc's heap, which a look
    of the policy may find at any moment, is no reason to trim."""
    monkeypatch.setitem(TRIGGERS, TRIM, TRIGGERS[TRIM] & ~IDLE_HEAP)
    found = gc.isenabled(), gc.get_threshold(), frozen()
    yield
    assert (gc.isenabled(), gc.get_threshold(), frozen()) == found


def frozen() -> int:
    """How many objects the program has put aside. From Python 3.12 on the interpreter puts some
    hundred immortal ones there itself, which come and go."""
    count = gc.get_freeze_count()
    return count if count > _IMMORTAL else 0


@pytest.fixture
def no_gc() -> Iterator[None]:
    """No collects but those of the test, which are quick: what was there before is put aside."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def quiet(**changes: object) -> CleanupPolicy:
    """A policy that does nothing but what the test asks for: whatever it costs, when it is due."""
    usual = {"gc_every": None, "at_epoch": False, "strict": True}
    return CleanupPolicy(**(usual | changes))  # type: ignore[arg-type]


def times(policy: CleanupPolicy, name: str) -> int:
    """How often an action was done."""
    return policy.report()[name].count


def calls(policy: CleanupPolicy, every: object = None, **options: object) -> list[int]:
    """A callback that notes the update at which it was called."""
    seen: list[int] = []
    core = policy._core
    policy.add("seen", lambda: seen.append(core.ticks(0)), every, **options)  # type: ignore[arg-type]
    return seen


def aged(policy: CleanupPolicy, seconds: float = 0.5) -> None:
    """Until the policy has run so long: what a moment without the processor costs is little then,
    as a share of the time."""
    while policy._core.seconds < seconds:
        pass
