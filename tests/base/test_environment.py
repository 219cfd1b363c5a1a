"""The environment keys: what they set, and what is said of a value that makes no sense."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from memtools._base import environment
from memtools._base.environment import Keys
from memtools._base.every import Every, parse_every

SET = {
    "MEMTOOLS": "1",
    "MEMTOOLS_LOG": "out/run.mem",
    "MEMTOOLS_LIMIT": " 12 GiB ",
    "MEMTOOLS_GUARD": "0.95",
    "MEMTOOLS_PRINT_EVERY": "30 s",
    "MEMTOOLS_TRACE": "0",
    "MEMTOOLS_OTHER": "x",
}


def test_each_key_sets_what_its_option_sets() -> None:
    assert environment.read(SET) == Keys("out/run.mem", 12 << 30, 0.95, Every(seconds=30.0), False)
    assert environment.read({"MEMTOOLS_TRACE": "1"}).trace is True
    assert environment.read({"MEMTOOLS_LIMIT": "4096"}).limit == 4096
    assert environment.read({}) == Keys(None, None, None, None, None)


def test_an_empty_key_is_not_set() -> None:
    assert environment.read(dict.fromkeys(environment.KEYS, " ")) == Keys()
    assert environment.set_keys(dict.fromkeys(environment.KEYS, " ")) == {}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("MEMTOOLS", "off", "MEMTOOLS must be 0 (off) or 1 (on), got 'off'"),
        ("MEMTOOLS_TRACE", "no", "MEMTOOLS_TRACE must be 0 (off) or 1 (on), got 'no'"),
        ("MEMTOOLS_LIMIT", "12 apples", "MEMTOOLS_LIMIT must be a number of bytes or like"),
        ("MEMTOOLS_LIMIT", "0", "MEMTOOLS_LIMIT must be at least 1 byte, got '0'"),
        (
            "MEMTOOLS_GUARD",
            "95 %",
            "MEMTOOLS_GUARD must be a share of the limit, above 0 and at most",
        ),
        ("MEMTOOLS_GUARD", "nan", "MEMTOOLS_GUARD must be a share of the limit"),
        (
            "MEMTOOLS_PRINT_EVERY",
            "0",
            "MEMTOOLS_PRINT_EVERY must be a number of steps, or a time like",
        ),
    ],
)
def test_a_value_that_makes_no_sense_is_named_in_one_sentence(
    name: str, value: str, says: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        environment.read({name: value})
    assert "\n" not in str(caught.value)


def test_the_keys_are_those_of_memtools_run_where_it_has_taken_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEMTOOLS_LOG", "run.mem")
    assert environment.for_monitor().log == "run.mem"
    monkeypatch.setattr(environment, "is_taken", True)
    assert environment.for_monitor() == Keys()


@pytest.mark.parametrize(("value", "off"), [("0", True), ("1", False), ("", False), ("no", False)])
def test_only_a_zero_turns_memtools_off(value: str, off: bool) -> None:
    code = "from memtools._base import environment; print(environment.is_off)"
    run = subprocess.run(
        [sys.executable, "-c", code], env={"MEMTOOLS": value}, capture_output=True, text=True
    )
    assert run.stdout.strip() == str(off), run.stderr


EVERY = {
    "1000": Every(steps=1000),
    "1 step": Every(steps=1),
    "50 steps": Every(steps=50),
    "30 s": Every(seconds=30.0),
    "0.5s": Every(seconds=0.5),
    "5 min": Every(seconds=300.0),
    "2 h": Every(seconds=7200.0),
}


@pytest.mark.parametrize("text", EVERY)
def test_an_interval_is_in_steps_or_a_time(text: str) -> None:
    assert parse_every(text) == EVERY[text]


def test_an_interval_may_be_an_int_of_steps() -> None:
    assert parse_every(64) == Every(steps=64)
    assert [str(parse_every(every)) for every in (1000, "90 s")] == ["1,000 steps", "90 s"]


@pytest.mark.parametrize("every", [0, -1, "", "s", "0 s", "1.5", "1.5 steps", "-3 s", "5 days"])
def test_an_interval_that_makes_no_sense_is_refused(every: int | str) -> None:
    with pytest.raises(ValueError, match="print_every must be a number of steps, or a time like"):
        parse_every(every)


@pytest.mark.parametrize("every", [True, 1.0, None])
def test_an_interval_of_another_type_is_refused(every: object) -> None:
    with pytest.raises(TypeError, match="got "):
        parse_every(every)  # type: ignore[arg-type]


OFF = """
import gc, logging, sys
import torch
import memtools
logging.basicConfig(level=logging.INFO)
calls = []
monitor = memtools.MemoryMonitor("run.mem", interval_ms=1, log_interval=1)
monitor.on_pressure(1e-9, lambda: calls.append("pressure"))
policy = memtools.CleanupPolicy(gc_every=1, trim_every=1, strict=True)
policy.add("mine", lambda: calls.append("policy"), every=1)
held = []

@memtools.managed(policy)
def update():
    held.append(bytearray(1 << 20))

plain = update
with monitor, policy, monitor.phase("train"):
    assert gc.isenabled()
    for _ in range(64):
        plain()
        policy.step()
        policy.micro_batch()
        monitor.step()
        monitor.log_memory()
policy.cleanup()
assert monitor.cleanup_memory()["ms"] == 0
assert not hasattr(update, "__wrapped__"), update
assert (monitor.running, monitor.step_count, monitor.phases()) == (False, 0, [])
assert calls == [] and monitor.findings() == () and gc.get_freeze_count() == 0
assert all(action.count == 0 for action in policy.report().actions), policy.report()

history = memtools.GateHistory(max_entries=10)
for _ in range(20):
    history.append(torch.ones(4, 2))
assert 0 < len(history) <= 10
with memtools.KVPool(1, 2, 64, max_tokens=64, max_sequences=2, dtype="float32") as pool:
    with pool.acquire(2) as lease:
        keys, values = lease.update(0, torch.rand(2, 2, 4, 64), torch.rand(2, 2, 4, 64))
        assert keys.shape == (2, 2, 4, 64)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = model.weight.detach().clone()
acc = memtools.GradAccumulator(model, optimizer, steps=2)
for _ in range(2):
    with acc.micro_batch():
        acc.backward(model(torch.ones(2, 4)).square().sum(), weight=2)
assert not torch.equal(model.weight, before)
"""


def test_nothing_watches_and_nothing_cleans_up_where_memtools_is_off(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", OFF],
        cwd=tmp_path,
        env={**os.environ, "MEMTOOLS": "0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout + run.stderr == ""
    assert list(tmp_path.iterdir()) == []
