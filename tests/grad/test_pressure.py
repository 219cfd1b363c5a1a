"""step() with a monitor: fewer rows before memory runs out, and more where there is room again."""

from __future__ import annotations

import json
import threading
import types
from typing import Any

import pytest
import torch

import memtools
from memtools._base import environment, malloc, reclaim, running
from memtools._grad import pressure
from memtools._grad.pressure import FORGETS
from tests.grad.pressurecases import Killed, Machine, Passage, batch, loss_of, made, whole, windows

pytestmark = pytest.mark.usefixtures("frozen", "every_look")


@pytest.fixture
def every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look before each module, however short a pass is."""
    monkeypatch.setattr(pressure, "LOOK_EVERY", 0.0)


def close(model: torch.nn.Module, wanted: list[torch.Tensor]) -> bool:
    return all(
        torch.allclose(p, w, rtol=1e-5, atol=1e-6)
        for p, w in zip(model.parameters(), wanted, strict=True)
    )


def test_a_batch_that_would_be_killed_is_trained_in_parts_that_fit() -> None:
    """24 rows take 200 + 1,200 of 1,000 bytes, 12 take 800: by hand it lives at 12."""
    machine = Machine(1000, base=200, row=50)
    acc, model = made(machine)
    assert windows(acc, model, machine, 3) == [[2, 2, 4, 8, 8], [8] * 3, [8] * 3]
    assert close(model, whole(3))
    report = acc.report()
    assert (report.ran_out, report.micro_batch_size) == (0, 8)


def test_the_same_loop_without_a_monitor_is_killed() -> None:
    machine = Machine(1000, base=200, row=50)
    model = made(machine)[1]
    acc = memtools.GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(Killed):
        acc.step(batch(), loss_of(model))


def test_where_there_is_room_it_ends_with_the_whole_batch() -> None:
    machine = Machine(10_000, base=200, row=50)
    acc, model = made(machine)
    assert windows(acc, model, machine, 4) == [[2, 2, 4, 8, 8], [16, 8], [24], [24]]
    assert acc.report().lowered == 0


def test_micro_batch_size_stays_the_largest_size() -> None:
    machine = Machine(10_000, base=200, row=50)
    acc, model = made(machine, micro_batch_size=6)
    assert windows(acc, model, machine, 2) == [[2, 2, 4, 6, 6, 4], [6] * 4]


def test_what_others_take_lowers_the_size_and_what_they_give_back_raises_it() -> None:
    machine = Machine(1000, base=200, row=25)
    acc, model = made(machine)
    assert windows(acc, model, machine, 12)[-1] == [24]
    machine.others = 350  # 24 rows would take 1,150
    assert windows(acc, model, machine, 2) == [[12, 12]] * 2
    (retry,) = acc.report().retries
    assert (retry.phase, retry.rows, retry.next_rows, retry.restored) == ("watermark", 24, 12, "")
    assert "host: 24 rows would take it to 1.1 KiB of 1000 B; watermark 90%" in retry.error
    assert "At the watermark: once\n" in str(acc.report())
    assert (acc.report().lowered, acc.report().ran_out) == (1, 0)
    machine.others = 0
    assert windows(acc, model, machine, 8)[-3:] == [[12, 12], [24], [24]]
    assert close(model, whole_of(12, 2, 8))


def test_a_batch_of_longer_rows_is_cut_before_it_runs() -> None:
    """24 rows of one vector take 200 + 480 of 1,000 bytes, and 24 of four vectors would take 2,120.
    The next batch has short rows again, and runs whole."""
    machine = Machine(1000, base=200, row=20)
    acc, model = made(machine)
    assert windows(acc, model, machine, 4)[-1] == [24]
    machine.tried = []
    acc.step(batch(24, 0, 4), loss_of(model, machine))
    assert machine.tried == [6] * 4
    (retry,) = acc.report().retries
    assert "host: 24 rows would take it to 2.1 KiB of 1000 B; watermark 90%" in retry.error
    assert windows(acc, model, machine) == [[24]]
    assert acc.report().ran_out == 0


def test_rows_that_stay_long_settle_at_fewer() -> None:
    machine = Machine(1000, base=200, row=20)
    acc, model = made(machine)
    windows(acc, model, machine, 4)
    for index in range(12):
        machine.tried = []
        acc.step(batch(24, index, 4), loss_of(model, machine))
    assert machine.tried == [6] * 4
    assert acc.report().lowered <= 2


def whole_of(*counts: int) -> list[torch.Tensor]:
    """The parameters after windows of the same batches, in runs of windows() that each begin with
    the first batch."""
    from tests.grad.pressurecases import model_of

    model = model_of(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for count in counts:
        for index in range(count):
            optimizer.zero_grad()
            loss_sum, rows = loss_of(model)(batch(index=index))
            (loss_sum / rows).backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_at_the_edge_it_does_not_flap() -> None:
    """16 rows end 3 % below the watermark: below it, and not by the 5 % that a step up needs."""
    machine = Machine(1000, base=200, row=25, others=270)
    acc, model = made(machine)
    sizes = [found[0] for found in windows(acc, model, machine, 40)][1:]
    assert set(sizes) == {16}
    machine.others = 320  # 92 %
    windows(acc, model, machine)
    machine.others = 270
    sizes = [found[0] for found in windows(acc, model, machine, 40)]
    assert set(sizes) == {8}
    assert acc.report().lowered == 1


def test_who_can_give_back_is_asked_before_the_size_falls() -> None:
    machine = Machine(1000, base=200, row=25)
    acc, model = made(machine)
    windows(acc, model, machine, 12)

    class Pool:
        def trim(self) -> int:
            freed, machine.idle = machine.idle, 0
            return freed

    class Closed:
        def trim(self) -> int:
            raise RuntimeError("closed")

    kept = [Closed(), Pool()]
    for part in kept:
        reclaim.offer(part)
    machine.idle = 350
    assert windows(acc, model, machine) == [[24]]
    assert (machine.idle, machine.cleanups, acc.report().lowered) == (0, 1, 0)


def test_freed_memory_that_malloc_keeps_counts_once() -> None:
    """The heap of a pass of 24 rows stays with malloc, and the next pass uses it."""
    machine = Machine(1000, base=200, row=25)
    acc, model = made(machine)
    windows(acc, model, machine, 3)
    machine.heap_free = 600
    assert windows(acc, model, machine, 3) == [[24]] * 3
    assert (machine.cleanups, acc.report().lowered) == (0, 0)


def test_freed_memory_that_malloc_gave_back_is_not_subtracted_again() -> None:
    """malloc counts it as free for ever, and the next pass needs it from the system."""
    machine = Machine(1000, base=200, row=25)
    acc, model = made(machine)
    windows(acc, model, machine, 3)
    machine.heap_free = 600
    machine.others = 350  # 24 rows would take 1,150
    assert windows(acc, model, machine, 2) == [[12, 12]] * 2
    assert machine.cleanups == 1
    machine.others = 250  # 1,050
    assert windows(acc, model, machine, 40) == [[12, 12]] * 40


def test_who_frees_little_is_asked_less_and_less() -> None:
    """What malloc gives back is no part of the forecast, and is not what brought something."""
    machine = Machine(1000, base=100, row=10)
    acc, model = made(machine)
    windows(acc, model, machine)
    watermark: Any = acc._get_back_off().watermark
    machine.heap_free = 300
    for _ in range(10):
        watermark.give_back()
        machine.given_back = 0
    assert machine.cleanups == 3  # the 1st, 3rd and 7th time

    class Pool:
        def trim(self) -> int:
            machine.idle = 0
            return 0

    pool, machine.heap_free = Pool(), 0
    reclaim.offer(pool)
    for _ in range(20):
        machine.idle = 100
        watermark.give_back()
    assert machine.cleanups == 3 + 16  # after the 4 occasions that were still left out


def test_the_state_of_an_optimizer_counts_before_a_larger_size() -> None:
    machine = Machine(1000, base=200, row=25)
    acc, model = made(machine)
    windows(acc, model, machine, 3)
    watermark: Any = acc._get_back_off().watermark
    assert watermark.may_rise(24)
    machine.base = 300
    assert not watermark.may_rise(24)


def test_a_first_micro_batch_that_took_more_is_measured_anew() -> None:
    machine = Machine(1000, base=200, row=50, factor=3.0)
    acc, model = made(machine)
    usual = loss_of(model, machine)

    def loss_fn(x: torch.Tensor) -> Any:
        found = usual(x)
        machine.factor = 1.0
        return found

    acc.step(batch(4), loss_fn)
    watermark: Any = acc._get_back_off().watermark
    assert watermark._rises["host"].of(2) == 100


def test_where_the_kernel_tells_no_peak_what_was_seen_in_the_pass_counts(monkeypatch) -> None:
    def leave(self: Any, *error: object) -> None:
        self.machine.taken = 0

    monkeypatch.setattr(Passage, "__exit__", leave)
    machine = Machine(1000, base=200, row=50)
    acc, model = made(machine)
    assert windows(acc, model, machine, 2) == [[2, 2, 4, 8, 8], [8] * 3]


def test_a_proven_size_close_to_the_watermark_is_looked_at() -> None:
    machine = Machine(1000, base=200, row=28)  # 24 rows take 872
    acc, model = made(machine)
    assert windows(acc, model, machine, 3)[-1] == [24]
    machine.factor = 1.1
    assert windows(acc, model, machine) == [[24, 12, 12]]


def test_who_can_give_back_is_asked_in_a_forward_pass_before_it_is_left() -> None:
    machine = Machine(1000, base=100, row=10)
    acc, model = made(machine)

    class Pool:
        def trim(self) -> int:
            freed, machine.idle = machine.idle, 0
            return freed

    pool, usual = Pool(), loss_of(model, machine)
    reclaim.offer(pool)

    def loss_fn(x: torch.Tensor) -> Any:
        if not machine.tried:
            machine.idle = 850
        return usual(x)

    acc.step(batch(), loss_fn)
    assert machine.tried == [2, 2, 4, 8, 8]
    assert acc.report().lowered == 0


def test_forward_passes_of_other_threads_are_not_looked_at() -> None:
    machine = Machine(1000, base=100, row=10)
    acc, model = made(machine)
    usual, other, passes = loss_of(model, machine), torch.nn.Linear(6, 1), []

    def loss_fn(x: torch.Tensor) -> Any:
        machine.others = 850
        thread = threading.Thread(target=lambda: passes.append(other(x)))
        thread.start()
        thread.join()
        machine.others = 0
        return usual(x)

    acc.step(batch(), loss_fn)
    assert len(passes) == len(machine.tried) == 5


def test_compiled_parts_are_not_looked_at_and_two_rows_stay() -> None:
    """A hook of all modules would compile them anew."""
    machine = Machine(1000, base=200, row=100)
    acc, model = made(machine)
    model[0]._compiled_call_impl = model[0]._call_impl
    usual = loss_of(model, machine)

    def loss_fn(x: torch.Tensor) -> Any:
        assert not torch.nn.modules.module._global_forward_pre_hooks
        machine.others = 550  # from here on 2 rows are at 95 %
        return usual(x)

    acc.step(batch(), loss_fn)
    assert machine.tried == [2] * 12


def test_with_memtools_off_the_monitor_is_not_asked(monkeypatch) -> None:
    monkeypatch.setattr(environment, "is_off", True)
    machine = Machine(10_000, base=200, row=50, running=False)
    acc, model = made(machine)
    assert windows(acc, model, machine) == [[24]]
    assert machine.readings == 0


def test_the_records_of_running_monitors_are_told(monkeypatch) -> None:
    events = []

    class Running:
        def _event(self, kind: str, body: object) -> None:
            events.append((kind, str(body)))

    monkeypatch.setattr(running, "monitors", {Running()})
    machine = Machine(1000, base=100, row=20)
    acc, model = made(machine)
    windows(acc, model, machine)
    machine.factor = 2.6  # seen in the pass
    windows(acc, model, machine)
    machine.others = 450  # known before it
    windows(acc, model, machine)
    assert [kind for kind, _ in events] == ["mark", "mark"]
    assert "used in a forward pass" in events[0][1]
    assert "rows would take it to" in events[1][1]


def test_a_batch_of_unusual_size_is_left_in_its_forward_pass(monkeypatch) -> None:
    """Its rows take 2.6 times as much, which no measure tells: the pass is left as if memory had
    run out, and its state restored."""
    machine = Machine(1000, base=100, row=20)
    acc, model = made(machine)
    windows(acc, model, machine)
    assert acc.report().micro_batch_size == 8
    machine.factor = 2.6
    machine.tried = []
    monkeypatch.setattr(malloc, "map_large_blocks", lambda: pytest.fail("nothing ran out"))
    report = acc.step(batch(), loss_of(model, machine))
    assert machine.tried == [16, 8, 8, 8]
    (retry,) = report.retries
    assert (retry.phase, retry.rows, retry.next_rows) == ("watermark", 16, 8)
    assert "used in a forward pass; watermark 90%" in retry.error
    assert acc.report().lowered == 1
    assert close(model, whole_of(1, 1))


def test_what_other_ranks_take_part_in_is_not_left() -> None:
    machine = Machine(1000, base=100, row=20)
    acc, model = made(machine)
    windows(acc, model, machine)
    acc._runner.ranks.no_retry = "the others are in it"
    machine.factor = 2.6
    assert windows(acc, model, machine) == [[16, 8]]


def test_the_hook_is_gone_after_a_step_that_failed() -> None:
    machine = Machine(1000, base=100, row=20)
    acc, model = made(machine)

    def bad(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        model(x)
        raise KeyError("label")

    with pytest.raises(KeyError, match="label"):
        acc.step(batch(), bad)
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_measure_of_an_unusual_batch_does_not_forbid_a_size_for_ever() -> None:
    machine = Machine(1000, base=100, row=20)
    acc, model = made(machine, micro_batch_size=16)
    windows(acc, model, machine, 3)
    machine.others, machine.factor = 300, 1.4  # 16 rows: 848, 85 %
    windows(acc, model, machine)
    machine.others = 420  # 968
    windows(acc, model, machine)
    machine.others, machine.factor = 380, 1.0  # 800 of 850; 928 by the measure of before
    sizes = [found[0] for found in windows(acc, model, machine, 8 * (FORGETS + 2))]
    assert (sizes[0], sizes[8], sizes[-1]) == (8, 8, 16)


def test_no_micro_batch_has_one_row_where_the_batch_has_more() -> None:
    for rows in (2, 3, 5, 7, 9, 17, 23, 31, 33):
        machine = Machine(1000, base=100, row=30)
        acc, model = made(machine)
        for sizes in windows(acc, model, machine, 3, rows):
            assert min(sizes) > 1, (rows, sizes)
            assert sum(sizes) == rows


def test_a_third_row_that_does_not_fit_is_not_tried_again() -> None:
    """Of five rows the last three would be one micro-batch, for BatchNorm's sake."""
    machine = Machine(1000, base=200, row=240)  # three take 920
    acc, model = made(machine)
    assert windows(acc, model, machine, 2, 5) == [[2, 2, 1]] * 2
    machine = Machine(10_000, base=200, row=20)
    acc, model = made(machine)
    tried = []

    def loss_fn(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        tried.append(len(x))
        assert len(tried) < 9
        if len(x) == 3:
            raise MemoryError
        return model(x).square().sum(), len(x)

    acc.step(batch(5), loss_fn)
    assert tried == [2, 3, 2, 1]


def test_micro_batch_size_1_takes_single_rows() -> None:
    """Nothing smaller can be tried at the watermark."""
    machine = Machine(1000, base=200, row=750)
    acc, model = made(machine, micro_batch_size=1)
    assert windows(acc, model, machine, 1, 4) == [[1] * 4]


def test_micro_batch_size_2_takes_no_third_row() -> None:
    machine = Machine(1000, base=200, row=50)
    acc, model = made(machine, micro_batch_size=2)
    assert windows(acc, model, machine, 1, 5) == [[2, 2, 1]]


def test_memory_that_all_sizes_take_does_not_keep_it_from_larger_ones() -> None:
    """Gradients: 500 bytes whatever the rows. 2 rows alone would say 250 a row."""
    machine = Machine(1000, base=200, row=5)
    acc, model = made(machine)

    def loss_fn(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        machine.tried.append(len(x))
        machine.take(500)
        return (model(x) - 0.5).square().sum(), len(x)

    acc.step(batch(48), loss_fn)
    assert machine.tried[:2] == [2, 2]
    assert max(machine.tried) >= 8
    assert machine.limit >= 200 + 500 + 5 * max(machine.tried)


def test_a_function_that_splits_is_watched_from_its_first_size() -> None:
    machine = Machine(1000, base=200, row=40)
    acc, model = made(machine)

    def split(x: torch.Tensor, size: int) -> list[torch.Tensor]:
        return list(x.split(size))

    report = acc.step(batch(), loss_of(model, machine), split)
    assert machine.tried == [24, 12, 12]
    assert [retry.phase for retry in report.retries] == ["watermark"]
    assert close(model, whole())


def test_a_whole_batch_that_fitted_proves_nothing_of_a_larger_one() -> None:
    machine = Machine(1000, base=200, row=40)
    acc, model = made(machine)

    def split(x: torch.Tensor, size: int) -> list[torch.Tensor]:
        return list(x.split(size))

    for rows in (12, 24):
        acc.step(batch(rows), loss_of(model, machine), split)
    assert machine.tried == [12, 24, 12, 12]


def test_what_cannot_be_split_is_run_once_more_unwatched() -> None:
    machine = Machine(1000, base=200, row=30)
    acc, model = made(machine)
    report = acc.step(batch(), loss_of(model, machine), lambda x, size: [x])
    assert machine.tried == [24, 24]
    assert "tried once more" in str(report.retries[0])


def test_what_cannot_be_split_any_further_is_run_once_more_unwatched() -> None:
    machine = Machine(1000, base=200, row=120)  # 6 rows take 920
    acc, model = made(machine, micro_batch_size=24)
    acc.step(batch(), loss_of(model, machine), lambda x, size: list(x.split(max(size, 6))))
    assert machine.tried[:4] == [24, 12, 6, 6]


# --- bad input, and a monitor that fails ---


def test_a_monitor_that_was_not_started_is_refused_and_nothing_has_changed() -> None:
    machine = Machine(1000, base=200, row=50, running=False)
    acc, model = made(machine)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not running.* call monitor.start()"):
            acc.step(batch(), loss_of(model))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    machine.running = True
    assert windows(acc, model, machine)[0][:2] == [2, 2]


def test_a_monitor_that_stops_midway_leaves_the_sizes_and_a_note() -> None:
    machine = Machine(10_000, base=200, row=50)
    acc, model = made(machine)
    windows(acc, model, machine, 3)
    machine.running = False
    assert windows(acc, model, machine) == [[24]]
    assert any("monitor no longer runs" in note for note in acc.report().notes)
    machine.running = True
    windows(acc, model, machine)
    assert not acc.report().notes


def test_a_monitor_that_was_stopped_says_nothing_of_larger_sizes() -> None:
    machine = Machine(1000, base=200, row=55)  # 16 rows take 1,080
    acc, model = made(machine)
    windows(acc, model, machine)
    machine.running = False
    assert windows(acc, model, machine, 20) == [[8] * 3] * 20


def test_without_a_limit_the_whole_batch_is_tried_and_a_note_says_so() -> None:
    machine = Machine(0)
    machine.limit = 0
    machine.row = 0
    acc, model = made(machine)
    machine.base = -1
    assert windows(acc, model, machine) == [[24]]
    assert any("no memory limit is known here" in note for note in acc.report().notes)


@pytest.mark.parametrize("at", range(12))
def test_a_reading_that_fails_ends_no_training(at: int) -> None:
    machine = Machine(100_000, base=200, row=50, fails=at)
    acc, model = made(machine)
    sizes = windows(acc, model, machine)
    assert sum(sizes[0]) == 24
    assert close(model, whole())
    assert any("OSError: no such file" in note for note in acc.report().notes)
    windows(acc, model, machine)
    assert not acc.report().notes


@pytest.mark.parametrize("at", range(60))
def test_a_reading_that_fails_lets_no_larger_size_be_tried(at: int) -> None:
    machine = Machine(1000, base=200, row=55, fails=at)
    acc, model = made(machine)
    sizes = windows(acc, model, machine, 20)
    assert max(max(found) for found in sizes) == 8
    assert close(model, whole(20))


def test_a_device_that_the_monitor_does_not_watch_is_refused(monkeypatch) -> None:
    machine = Machine(1000, base=100, row=10, memory="cuda:0")
    acc, model = made(machine)
    held = types.SimpleNamespace(device=torch.device("cuda:1"))
    watermark: Any = acc._get_back_off().watermark
    with monkeypatch.context() as patched:
        patched.setattr(acc._runner.gradients, "parameters", [held])
        with pytest.raises(ValueError, match=r"parameters on cuda:1.* watches cuda:0: make it"):
            watermark.begin_window()
    assert windows(acc, model, machine) == [[2, 2, 4, 8, 8]]


def test_a_device_is_kept_below_its_watermark() -> None:
    machine = Machine(1000, base=200, row=50, memory="cuda:0")
    acc, model = made(machine)
    assert windows(acc, model, machine, 2) == [[2, 2, 4, 8, 8], [8] * 3]


@pytest.mark.parametrize("monitor", [1, "cuda", memtools.MemoryMonitor, memtools.Budget("1 MiB")])
def test_what_is_not_a_monitor_is_refused(monitor: object) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        TypeError, match="monitor must be a MemoryMonitor that you start before step"
    ):
        memtools.GradAccumulator(model, optimizer, monitor=monitor)  # type: ignore[arg-type]


def test_a_state_goes_on_with_the_size_that_was_found() -> None:
    machine = Machine(1000, base=200, row=50)
    acc, model = made(machine)
    windows(acc, model, machine, 2)
    state = json.loads(json.dumps(acc.state_dict(rng=False)))
    again, other = made(machine)
    again.load_state_dict(state)
    assert windows(again, other, machine) == [[8] * 3]
