"""on_pressure and guard: once for each crossing, at a safe point."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from memtools import HostMemoryPressure, KVLease, KVPool, MemoryMonitor, MemtoolsError, read_record
from memtools._core import Probe
from memtools._monitor.guards import Pressure
from tests.monitor.root import LIMIT, MIB, Root, root, settle

__all__ = ["root"]


def monitor(**options: object) -> MemoryMonitor:
    return MemoryMonitor(interval_ms=1, device="cpu", leaks=False, **options)  # type: ignore[arg-type]


def test_a_callback_runs_once_for_each_crossing(root: Root) -> None:
    told: list[Pressure] = []
    with monitor() as m:
        m.on_pressure(0.9, told.append)
        settle(m, root)
        m.step()
        assert told == []
        root.use(0.92)
        settle(m, root)
        assert told == [], "not before a safe point"
        m.step()
        m.step()
        assert len(told) == 1
        root.use(0.88)  # not 5 % below the mark
        settle(m, root)
        root.use(0.93)
        settle(m, root)
        m.step()
        assert len(told) == 1
        root.use(0.5)
        settle(m, root)
        root.use(0.95)
        settle(m, root)
        m.step()
        assert len(told) == 2
    first = told[0]
    assert (first.fraction, first.limit_bytes, first.step) == (0.9, LIMIT, 2)
    assert abs(first.used_bytes - 0.92 * LIMIT) < 4096
    assert "920.0 MiB of 1000.0 MiB used (92.0%; cgroup v2 limit 1000.0 MiB" in str(first)


def test_a_guard_says_the_reading_that_passed_its_watermark(root: Root) -> None:
    """By the next safe point much may be free again."""
    with monitor() as m:
        m.guard(0.9)
        root.use(0.97)
        settle(m, root)
        root.use(0.3)
        settle(m, root)
        with pytest.raises(HostMemoryPressure, match=r"970\.0 MiB of 1000\.0 MiB used \(97\.0%"):
            m.step()


def run_to_pressure(m: MemoryMonitor, root: Root) -> None:
    with m:
        root.use(0.97)
        settle(m, root)
        with m.phase("x"):
            pass
        m.step(3)


def test_a_guard_raises_out_of_step_and_only_there(root: Root, tmp_path: Path) -> None:
    path = tmp_path / "run.mem"
    m = monitor(log=path)
    m.guard(0.95)
    text = r"at step 3: 970\.0 MiB of 1000.0 MiB used \(97.0%; cgroup v2 limit .* save a checkpoint"
    with pytest.raises(HostMemoryPressure, match=text) as caught:
        run_to_pressure(m, root)
    assert isinstance(caught.value, MemtoolsError)
    record = read_record(path)
    kinds = [(e.kind, e.text) for e in record.events]
    assert any(kind == "pressure" and "95.0 % of the limit" in text for kind, text in kinds)
    assert any(kind == "guard" and text.startswith("raise: 970.0 MiB") for kind, text in kinds)
    assert kinds[-1][1].startswith("exit: exception HostMemoryPressure: host memory runs out")
    assert record.complete


def test_a_guard_that_records_does_not_raise(root: Root, tmp_path: Path) -> None:
    with monitor(log=tmp_path / "run.mem") as m:
        m.guard(0.95, "record")
        root.use(0.97)
        settle(m, root)
        m.step()
    assert [e.text[:7] for e in read_record(tmp_path / "run.mem").events if e.kind == "guard"] == [
        "record:"
    ]


def test_callbacks_come_before_guards_and_low_marks_before_high_ones(root: Root) -> None:
    order: list[str] = []
    with monitor() as m:
        m.guard(0.8, lambda: order.append("guard"))
        m.on_pressure(0.9, lambda: order.append("high"))
        m.on_pressure(0.7, lambda: order.append("low"))
        root.use(0.95)
        settle(m, root)
        m.step()
    assert order == ["low", "high", "guard"]


def test_all_callbacks_run_before_a_guard_raises(root: Root) -> None:
    order: list[str] = []
    with monitor() as m:
        m.guard(0.8)
        m.guard(0.9, lambda: order.append("later guard"))
        root.use(0.95)
        settle(m, root)
        with pytest.raises(HostMemoryPressure):
            m.step()
    assert order == ["later guard"]


def test_stalls_bring_a_guard_forward(root: Root) -> None:
    acted: list[Pressure] = []
    with monitor() as m:
        m.guard(0.9, acted.append)
        root.use(0.85)  # past the second watermark, 0.80
        settle(m, root)
        m.step()
        assert acted == []
        root.stall(55)
        settle(m, root)
        m._last.due = 0  # type: ignore[union-attr]
        m.step()
        assert [p.stalled_percent for p in acted] == [55.0]
        assert ", stalled 55% of the last 10 s" in str(acted[0])
        assert "stalled" not in str(acted[0]._replace(stalled_percent=0.4))
        m._last.due = 0  # type: ignore[union-attr]
        m.step()
        assert len(acted) == 1, "once for a crossing"


def test_stalls_alone_are_nothing(root: Root) -> None:
    acted: list[Pressure] = []
    root.stall(90)
    with monitor() as m:
        m.guard(0.9, acted.append)
        root.use(0.6)
        settle(m, root)
        m.step()
    assert acted == []


def test_removed_ones_do_not_act_and_a_callback_may_remove_another_and_itself(
    root: Root,
) -> None:
    acted: list[str] = []
    with monitor() as m:

        def first() -> None:
            acted.append("first")
            handle.remove()
            later.remove()

        handle = m.on_pressure(0.8, first)
        later = m.on_pressure(0.9, lambda: acted.append("later"))
        removed = m.on_pressure(0.9, lambda: acted.append("removed"))
        guard = m.guard(0.9, lambda: acted.append("guard"))
        root.use(0.95)
        settle(m, root)
        for one in (removed, removed, guard):
            one.remove()
        m.step()
    assert acted == ["first"]


def test_what_a_callback_raises_is_said_once_and_training_goes_on(root: Root) -> None:
    calls: list[int] = []

    def broken() -> None:
        calls.append(1)
        raise ValueError("no such thing")

    with monitor() as m:
        m.on_pressure(0.9, broken)
        for n in range(3):
            root.use(0.5)
            settle(m, root)
            root.use(0.95)
            settle(m, root)
            if n == 0:
                with pytest.warns(
                    RuntimeWarning, match=r"broken\(\), .* ValueError: no such thing"
                ):
                    m.step()
            else:
                m.step()  # warnings are errors in this suite
    assert len(calls) == 3


def test_where_warnings_are_errors_training_goes_on_too(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    with monitor() as m:
        m.on_pressure(0.9, lambda: 1 / 0)
        root.use(0.95)
        settle(m, root)
        m.step()
    assert "ZeroDivisionError" in caplog.text


def test_what_is_no_exception_of_programs_leaves_a_callback(root: Root) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    def checkpoint() -> None:
        raise HostMemoryPressure("by hand")

    for callback, kind in ((interrupt, KeyboardInterrupt), (checkpoint, HostMemoryPressure)):
        root.use(0.1)
        with monitor() as m:
            m.on_pressure(0.9, callback)
            root.use(0.95)
            settle(m, root)
            with pytest.raises(kind):
                m.step()


def said(caplog: pytest.LogCaptureFixture, path: Path) -> list[str]:
    """What was logged about guards; the record has the same events."""
    texts = [r.getMessage() for r in caplog.records if "cannot act" in r.getMessage()]
    events = [e.text for e in read_record(path).events if "cannot act" in e.text]
    assert events == texts
    return texts


def test_a_guard_of_a_program_without_steps_says_that_it_could_not_act(
    root: Root, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.mem"
    with monitor(log=path) as m:
        m.guard(0.9)
        m.guard(0.99)
        root.use(0.95)
        settle(m, root)
    assert said(caplog, path) == [
        "<guard raise at 90%> cannot act: no step() was called; it acts in step()"
    ]


@pytest.mark.parametrize(("step_seconds", "silent"), [(0.1, False), (4, False), (30, True)])
def test_who_stopped_calling_step_is_judged_by_how_long_steps_take(
    root: Root,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    step_seconds: float,
    silent: bool,
) -> None:
    """An exception 12 s after the last step, in the middle of the next where steps take 30 s."""
    path, began, passed = tmp_path / "run.mem", time.monotonic_ns(), [0.0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: began + int(passed[0] * 1e9))
    with monitor(log=path) as m:
        m.guard(0.9, "record")
        for _ in range(5):
            passed[0] += step_seconds
            m.step()
        root.use(0.95)
        settle(m, root)
        passed[0] += 12
    told = said(caplog, path)
    assert told == [] if silent else "step() was no longer called" in told[0]


def test_a_guard_that_acted_or_had_nothing_to_do_says_nothing(
    root: Root, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.mem"
    with monitor(log=path) as m:
        m.guard(0.9, "record")
        m.step()
        root.use(0.95)
        settle(m, root)
        m.step()
        m.guard(0.8, "record")  # passed when the program ends, a moment after its last step
        settle(m, root)
    assert said(caplog, path) == []


def test_a_guard_without_a_limit_says_so_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(MemoryMonitor, "_root", str(tmp_path / "nothing"))
    m = monitor(log=tmp_path / "run.mem")
    m.guard(0.9)
    with m:
        pass
    (text,) = said(caplog, tmp_path / "run.mem")
    assert text == "<guard raise at 90%> cannot act: no memory limit is known here: pass limit="


def test_step_before_start_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    m = monitor()
    for _ in range(3):
        m.step()
    with m:
        m.step()
    m.step()
    assert [r.getMessage() for r in caplog.records] == [
        "step() of a MemoryMonitor that was not started does nothing; start() it"
    ]


def test_a_callback_that_steps_is_not_entered_anew(root: Root) -> None:
    depth: list[int] = []
    with monitor() as m:

        def callback() -> None:
            depth.append(1)
            if len(depth) == 1:
                for share in (0.5, 0.95):  # a second crossing
                    root.use(share)
                    settle(m, root)
                m.step()
                assert len(depth) == 1

        m.on_pressure(0.9, callback)
        root.use(0.95)
        settle(m, root)
        m.step()
        assert (len(depth), m.step_count) == (1, 2)
        m.step()
        assert len(depth) == 2, "it was not forgotten"


def test_marks_are_set_before_the_start_and_kept_for_the_next_run(root: Root) -> None:
    told: list[int] = []
    m = monitor()
    m.on_pressure(0.9, lambda pressure: told.append(pressure.step))
    for _ in range(2):
        root.use(0.1)
        m.start()
        root.use(0.95)
        settle(m, root)
        m.step(5)
        m.stop()
    assert told == [5, 5]


def test_a_limit_that_is_given_counts(root: Root) -> None:
    told: list[Pressure] = []
    with monitor(limit=500 * MIB) as m:
        m.on_pressure(0.9, told.append)
        root.use(0.47)
        settle(m, root)
        m.step()
    assert told[0].limit_bytes == 500 * MIB
    assert "limit given, 500.0 MiB" in str(told[0])


@pytest.mark.parametrize("fraction", [0, -1, 1.01, float("nan")])
def test_fractions_that_are_none(fraction: float) -> None:
    m = monitor()
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        m.guard(fraction)
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        m.on_pressure(fraction, print)


def test_bad_arguments_change_nothing() -> None:
    m = monitor()
    with pytest.raises(TypeError, match="fraction must be a number, got str"):
        m.guard("90%")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a function is needed, got str"):
        m.on_pressure(0.9, "raise")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='"raise", "record" or a function'):
        m.guard(0.9, "kill")
    with pytest.raises(TypeError, match="must take a Pressure or no argument"):
        m.on_pressure(0.9, lambda a, b: None)
    assert m._watermarks.all == ()


def test_there_is_room_for_32_watermarks() -> None:
    m = monitor()
    handles = [m.on_pressure(0.9, print) for _ in range(32)]
    with pytest.raises(
        ValueError, match="32 callbacks and guards are registered already; remove some"
    ):
        m.on_pressure(0.9, print)
    handles[0].remove()
    m.on_pressure(0.9, print)
    with m:
        assert m.running


def resident() -> tuple[int, int]:
    """Resident bytes as the system counts them, and those of them that were counted before."""
    read = Probe().read()
    assert read.rss is not None
    assert read.mapped_again is not None
    return read.rss, read.mapped_again


def read_all(samples: KVLease, layer: int) -> None:
    for view in samples.update(layer, *torch.randn(2, samples.batch_size, 8, 1, 64)):
        # Row by row: what a reading of them all makes in between stays in the heap for a while.
        assert all(row.isfinite().all() for row in view)


@pytest.mark.slow
def test_a_guard_leaves_rows_alone_that_show_one_prompt() -> None:
    """The resident set counts the prompt's pages once for each of the 32 rows that read them."""
    rows, tokens = 32, 512
    pool = KVPool(8, 8, 64, max_tokens=tokens + 16, max_sequences=rows + 1, dtype=torch.float32)
    rss, again = resident()
    limit = rss - again + 256 * MIB
    with monitor(limit=limit) as m, torch.no_grad(), pool, pool.acquire(1, tokens) as prompt:
        m.guard(0.99, action="raise")
        for layer in range(8):
            prompt.update(layer, *torch.randn(2, 1, 8, tokens, 64))
        with prompt.fork(rows) as samples:
            for _ in range(4):
                for layer in range(8):
                    read_all(samples, layer)
                m.step()
            now, counted = resident()
            assert counted - again == pool.stats().mapped_again_bytes >= (rows - 1) * 16 * MIB
            assert now - counted < limit - 128 * MIB < limit < now
        assert pool.stats().mapped_again_bytes == 0
        now, counted = resident()
        assert counted == again
        assert now < limit - 128 * MIB
