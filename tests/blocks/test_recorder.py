"""Which steps are recorded, what is marked in them, and that nothing stays on."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from memtools import _core
from memtools._base.peak import PeakContents
from memtools._blocks import recorder as recorders
from memtools._blocks.peak import INPUT, OF_STATE, PARAMETER, Spot
from memtools._blocks.recorder import PeakRecorder
from memtools._blocks.tensors import Tensors
from tests.blocks.peakcases import MIB, Blocks, Contents, Reports, block, forget_compiled
from tests.kit.children import in_child

RUNS: list[Run] = []


@pytest.fixture(autouse=True)
def _nothing_stays_on() -> Iterator[None]:
    forget_compiled()
    yield
    while RUNS:
        RUNS.pop().recorder.close()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert not recorders._open
    call = torch.nn.Module.__call__
    assert _core._watch_calls(call, id, 0), "nobody hears calls"
    _core._watch_calls(None, None, 0)


class NoTensors(Tensors):
    """A program without tensors: it takes no time to look for them."""

    def find(self) -> None:
        pass


def spot(frames: Iterable[tuple[str, int, str]]) -> Spot:
    file, line, function = next(iter(frames))
    return Spot(f"{file}:{line}", function)


class Run:
    """A run whose steps are counted, as the monitor does."""

    def __init__(self, blocks: Blocks | None = None, **reports: Any) -> None:
        self.blocks = blocks or Blocks()
        self.written: list[Any] = []
        self.complaints: list[str] = []
        self.recorded: list[int] = []
        self.recorder = PeakRecorder(
            Reports(self.blocks, **reports), self.write, spot, self.complaints.append, NoTensors()
        )
        RUNS.append(self)
        self.step = 0

    def write(self, found: Any) -> None:
        """Keep what was recorded, without what traced steps say of it."""
        if getattr(found, "traced", None) is None:
            self.written.append(found)

    def run_to(self, step: int, *, is_free: bool = True) -> None:
        while self.step < step:
            self.step += 1
            if self.step < self.recorder.due_step:
                continue
            if self.recorder.is_open:
                self.recorded.append(self.step)
            self.recorder.step_ended(self.step)
            self.recorder.step_begins(self.step, is_free=is_free)


def test_step_3_and_each_1000th_are_recorded() -> None:
    run = Run()
    over_time = {"intervals": [(0, 1, MIB)], "layers": [(0, 1, False, True, (MIB,))]}
    run.blocks.found = Contents([block(4 * MIB)], **over_time)
    run.run_to(2500)
    assert run.recorded == [3, 1000, 2000]
    assert [one.step for one in run.written] == [3, 1000, 2000]
    assert run.blocks.told == ["on", "off"] * 3
    assert isinstance(run.written[0], PeakContents)
    assert run.written[0].line == "/x/train.py:11"
    assert run.recorder.highest is not None
    assert run.recorder.highest.step == 3
    told = [(bool(one.layers), bool(one.spans)) for one in run.written]
    assert told == [(True, True), (False, False), (False, False)], "of the highest alone"
    run.recorder.close()


def test_ordinary_steps_are_not_asked_for() -> None:
    run, due = Run(), []
    for _ in range(2000):
        due.append(run.recorder.due_step)
        run.run_to(run.step + 1)
    assert set(due) == {2, 3, 4, 5, 999, 1000, 1999, 2000}, "two are traced"
    run.recorder.close()


def test_steps_are_not_traced_where_too_little_memory_is_left_beside_one() -> None:
    """What is left is asked for with the height of the recorded step, and the record says why."""
    run, asked = Run(Blocks(Contents([block(4 * MIB)], base_bytes=MIB))), list[int]()
    run.recorder._room = lambda step_bytes: asked.append(step_bytes) or 5 * MIB  # type: ignore[func-returns-value]
    run.recorder._write = run.written.append
    run.run_to(10)
    assert asked == [3 * MIB]
    (traced,) = (one.traced for one in run.written if one.traced is not None)
    assert traced.why == (
        "at least 48.0 MiB of memory must be left at the highest point of a step to trace it, and "
        "5.0 MiB are"
    )
    run.recorder.close()


def looked_at(run: Run, step: int) -> None:
    """Steps at each of which the monitor has something to do anyhow."""
    while run.step < step:
        run.step += 1
        if run.recorder.is_open:
            run.recorded.append(run.step)
        run.recorder.step_ended(run.step)
        run.recorder.step_begins(run.step)


def test_the_step_after_a_new_peak_is_recorded_and_written_where_it_is_higher() -> None:
    run = Run()
    looked_at(run, 50)
    run.blocks.peak += MIB - 1
    looked_at(run, 60)
    assert run.recorded == [3], "that is no new peak"
    run.blocks.peak, run.blocks.found = 9 * MIB, Contents([block(9 * MIB)])
    looked_at(run, 61)
    looked_at(run, 62)
    assert run.recorded == [3, 62]
    assert [one.peak_bytes for one in run.written] == [4 * MIB, 9 * MIB]
    run.blocks.peak, run.blocks.found = 20 * MIB, Contents([block(4 * MIB)])
    looked_at(run, 70)
    assert run.recorded == [3, 62], "16 steps lie between"
    looked_at(run, 90)
    assert run.recorded == [3, 62, 78]
    assert len(run.written) == 2, "that peak did not come again"


def test_growth_without_end_is_recorded_eight_times() -> None:
    run = Run()
    for step in range(1, 900):
        run.blocks.peak = step * 2 * MIB
        run.blocks.found = Contents([block(step * 2 * MIB)])
        looked_at(run, step)
    assert len(run.recorded) == 9
    assert min(b - a for a, b in zip(run.recorded[1:], run.recorded[2:], strict=False)) >= 16


def test_several_steps_at_once_are_recorded_as_they_come() -> None:
    run = Run()
    for step in (16, 17, 18):
        run.recorder.step_ended(step)
        run.recorder.step_begins(step)
        assert run.recorder.is_open is (step == 16)
    assert [one.step for one in run.written] == [17]


def test_the_third_of_steps_that_begin_anew_is_recorded() -> None:
    run = Run()
    run.run_to(40)
    run.recorder.begin_anew(run.step)
    run.run_to(60)
    assert run.recorded == [3, 43]
    run.run_to(999)
    assert run.recorder.is_open
    run.recorder.begin_anew(run.step)
    assert not run.blocks.is_recording
    run.run_to(1010)
    assert run.recorded == [3, 43, 1002]
    run.recorder.close()
    run.recorder.begin_anew(run.step)
    run.run_to(1100)
    assert run.recorded == [3, 43, 1002]


def test_a_safe_point_within_a_step_does_not_end_it() -> None:
    run = Run()
    run.run_to(2)
    assert run.recorder.is_open
    run.recorder.step_ended(2)
    run.recorder.step_begins(2)
    assert run.recorder.is_open
    assert run.blocks.told == ["on"]
    run.recorder.close()


# --- where it cannot be ---


def test_without_reports_it_waits_for_torch_and_says_why_there_is_none() -> None:
    run = Run(joins=False)
    run.run_to(100)
    assert (run.recorded, run.written) == ([], [])
    run = Run(joins=False, reason="the shim is not built")
    run.run_to(100)
    assert run.written == [{"why": "the shim is not built"}]
    assert run.recorder.due_step > 1 << 60


def test_a_step_without_tensors_has_no_peak() -> None:
    run = Run()
    run.blocks.found = Contents([block(4 * MIB)], events=0)
    run.run_to(10)
    assert (run.recorded, run.written, run.complaints) == ([3], [], [])


def test_it_waits_where_something_else_is_on() -> None:
    run, other = Run(), Run()
    other.run_to(2)
    run.run_to(30)
    assert run.recorded == []
    other.recorder.close()
    run.run_to(40, is_free=False)
    run.run_to(60)
    assert len(run.recorded) == 1


@pytest.mark.parametrize("what", ["record", "mark", "contents"])
def test_what_fails_ends_it_with_one_sentence_and_leaves_nothing_on(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(Blocks(fails=what))
    run.recorder.tensors = Tensors()
    kept = torch.nn.Linear(3, 3)
    if what == "contents":
        run.blocks.found = Contents([(1,)])  # type: ignore[list-item]
    run.run_to(20)
    assert len(run.complaints) == 1
    assert run.complaints[0].startswith("no longer recording the contents of the peak: ")
    assert not run.blocks.is_recording
    assert run.recorder.due_step > 1 << 60
    assert kept.bias is not None


def test_an_interrupt_goes_on_to_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run.recorder.tensors, "find", interrupted)
    run.step = 2
    with pytest.raises(KeyboardInterrupt):
        run.recorder.step_begins(2)
    assert not run.recorder.is_open
    assert not run.blocks.is_recording


def test_nothing_is_on_after_close() -> None:
    run = Run()
    run.run_to(2)
    assert run.blocks.is_recording
    run.recorder.close()
    run.recorder.close()
    assert run.blocks.told == ["on", "off"]
    run.run_to(2000)
    assert run.written == []


@pytest.mark.parametrize("where", ["find", "record", "mark"])
def test_a_close_by_another_thread_while_it_begins_leaves_nothing_on(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    run = Run()
    parts: dict[str, object] = {
        "find": NoTensors,
        "record": run.blocks,
        "mark": recorders.Recording,
    }
    owner, name = parts[where], "_mark" if where == "mark" else where
    as_before = getattr(owner, name)

    def closed(*args: Any) -> None:
        thread = threading.Thread(target=run.recorder.close)
        monkeypatch.setattr(owner, name, as_before)
        if where == "record":
            as_before(*args)
        thread.start()
        thread.join()
        if where != "record":
            as_before(*args)

    monkeypatch.setattr(owner, name, closed)
    run.run_to(20)
    assert (run.recorded, run.complaints, run.written) == ([], [], [])
    assert not recorders._open
    assert run.blocks.told[-1] == "off"


def test_a_step_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "LONGEST_S", 0.05)
    monkeypatch.setattr(recorders, "TIMES", 0.0)
    run, over = Run(), threading.Event()
    record = run.blocks.record

    def recorded(on: bool) -> None:
        record(on)
        if not on:
            over.set()

    monkeypatch.setattr(run.blocks, "record", recorded)
    run.run_to(2)
    assert over.wait(30)
    assert run.blocks.told == ["on", "off"]
    run.run_to(3)
    assert run.written == []
    assert run.blocks.told == ["on", "off"]
    assert run.recorder.due_step == 999


def test_a_forked_child_records_nothing() -> None:
    torch.set_num_threads(1)
    run = Run()
    run.run_to(2)

    def look() -> None:
        assert not recorders._open
        assert not run.blocks.is_recording

    assert in_child(look) == 0
    assert run.blocks.is_recording
    run.recorder.close()


# --- what is marked ---


def test_parameters_state_and_inputs_are_marked_in_the_step() -> None:
    run = Run()
    run.recorder.tensors = Tensors()
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    run.run_to(2)
    x, y = torch.randn(4, 6), torch.zeros(4, 2)
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    state = optimizer.state[model.weight]["exp_avg"]
    run.run_to(3)
    marked = set(run.blocks.marked)
    assert (model.weight.data_ptr(), 48, PARAMETER) in marked
    assert (state.data_ptr(), 48, OF_STATE) in marked
    assert (x.data_ptr(), 96, INPUT) in marked
    assert y.data_ptr() not in {address for address, _, _ in marked}, "no module has got it"
    assert run.complaints == []


def test_without_gradients_what_a_module_has_made_is_no_input() -> None:
    run, module = Run(), torch.nn.Linear(3, 3)
    run.run_to(2)
    first = torch.randn(5, 3)
    with torch.no_grad():
        second = module(first)
        third = module(second)
    micro = torch.randn(6, 3)
    module(micro)
    run.run_to(3)
    marked = {address for address, _, category in run.blocks.marked if category == INPUT}
    assert marked == {first.data_ptr(), micro.data_ptr()}
    assert len(third) == 5


def test_a_hostile_argument_of_a_module_is_no_matter() -> None:
    class Identity(torch.nn.Module):
        def forward(self, *given: object) -> object:
            return given[0]

    class Loud(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            raise RuntimeError("asked")

    run = Run()
    run.run_to(2)
    module = Identity()
    assert module(1, Loud()) == 1
    assert module(2, torch.zeros(3)) == 2
    run.run_to(3)
    assert len(run.written) == 1
    assert run.complaints == []


@pytest.mark.parametrize("is_late", [False, True])
def test_a_step_is_given_up_by_how_long_a_step_takes_and_not_by_any_clock(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that is up for a month, and where other steps have been counted for a day."""
    now, longest = [30 * 86_400.0], list[float]()
    monkeypatch.setattr(recorders.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(recorders.Recording, "begin", lambda one, s: longest.append(s))
    run = Run()
    if is_late:
        now[0] += 86_400
        run.recorder.begin_anew(0)
    while not longest:
        now[0] += 20
        run.run_to(run.step + 1)
    assert longest == [pytest.approx(100)]
