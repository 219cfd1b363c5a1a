"""MemoryCallback under a real transformers.Trainer: a tiny model of random weights, on the CPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import memtools
from memtools.integrations.transformers import MemoryCallback
from tests.integrations.tinyhf import VOCAB, fresh

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of eight tokens; the n-th that is read may fail."""

    def __init__(self, count: int = 12, fails_at: int = -1) -> None:
        made = torch.Generator().manual_seed(5)
        self.ids = torch.randint(1, VOCAB, (count, 8), generator=made)
        self.fails_at, self.reads = fails_at, 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        self.reads += 1
        if self.reads == self.fails_at:
            raise RuntimeError("a bad row")
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def trainer(folder: Path, callbacks: Any = None, rows: Any = None, **options: Any) -> Trainer:
    torch.manual_seed(3)
    defaults = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "max_steps": 4,
        "use_cpu": True, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "seed": 1,
    }  # fmt: skip
    return Trainer(
        model=fresh("llama"),
        args=TrainingArguments(**(defaults | options)),
        train_dataset=rows or Rows(),
        eval_dataset=Rows(4),
        callbacks=callbacks,
    )


class Listener(TrainerCallback):
    """A reporter: keeps the logs that it is given."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def memory_keys(logs: dict[str, float]) -> list[str]:
    return [key for key in logs if key.startswith("memory/")]


def losses(made: Trainer) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def phases(monitor: memtools.MemoryMonitor) -> dict[str, int]:
    """How often there was each phase but `optimizer`, which is there in each step."""
    found = {phase.name: phase.count for phase in monitor.phases()}
    assert found.pop("optimizer") > 0
    return found


@pytest.mark.slow
def test_it_starts_with_the_training_and_stops_with_it_and_says_the_summary(tmp_path, caplog):
    callback = MemoryCallback()
    made = trainer(tmp_path, [callback])
    assert not callback.monitor.running
    with caplog.at_level(logging.INFO, "memtools"):
        made.train()
    assert not callback.monitor.running
    assert callback.monitor.step_count == 4
    assert phases(callback.monitor) == {"train": 1}
    assert [r.getMessage() for r in caplog.records if r.name == "memtools"] == [
        callback.monitor.summary()
    ]


@pytest.mark.slow
def test_the_losses_are_the_same_bit_for_bit(tmp_path):
    options = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    plain = trainer(tmp_path / "a", **options)
    plain.train()
    monitor = memtools.MemoryMonitor(tmp_path / "run.mem", interval_ms=1)
    watched = trainer(tmp_path / "b", [MemoryCallback(monitor)], **options)
    watched.train()
    assert losses(watched) == losses(plain)
    assert len(losses(plain)) == 4
    pairs = zip(plain.model.parameters(), watched.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert memtools.read_record(tmp_path / "run.mem").complete


@pytest.mark.slow
def test_a_step_is_an_update_of_the_optimizer(tmp_path):
    """12 rows are 6 batches of 2: with 4 to an update, 2 updates an epoch, the second of 2."""
    callback = MemoryCallback()
    options = {"gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 3}
    made = trainer(tmp_path, [callback], **options)
    made.train()
    assert callback.monitor.step_count == made.state.global_step == 6


@pytest.mark.slow
@pytest.mark.parametrize("log_history", [False, True])
def test_the_figures_join_the_logs_of_reporters_and_the_history_if_asked(tmp_path, log_history):
    listener = Listener()
    callback = MemoryCallback(log_history=log_history)
    made = trainer(tmp_path, [listener, callback])  # behind a reporter
    made.train()
    with_loss = [logs for logs in listener.logs if "loss" in logs]
    assert len(with_loss) == 4
    for logs in with_loss:
        assert logs["memory/host_rss_bytes"] > 1e6
        assert len(memory_keys(logs)) <= 12
    history = [entry for entry in made.state.log_history if "loss" in entry]
    expected = [memory_keys(logs) if log_history else [] for logs in with_loss]
    assert [memory_keys(entry) for entry in history] == expected


def without_times(made: Trainer) -> list[dict[str, Any]]:
    times = ("_runtime", "_per_second")
    return [
        {key: value for key, value in entry.items() if not key.endswith(times)}
        for entry in made.state.log_history
    ]


@pytest.mark.slow
def test_the_history_of_a_watched_and_of_a_resumed_run_is_that_of_a_plain_one(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    plain = trainer(tmp_path / "a", **options)
    plain.train()
    watched = trainer(tmp_path / "b", [MemoryCallback()], **options)
    watched.train()
    assert without_times(watched) == without_times(plain)
    resumed = trainer(tmp_path / "c", [MemoryCallback()], **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert without_times(resumed)[:4] == without_times(plain)[:4]


@pytest.mark.slow
def test_tensorboard_sees_them(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = trainer(tmp_path, [MemoryCallback()], report_to=["tensorboard"])
    made.train()
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.*")}
    events = EventAccumulator(str(folder)).Reload()
    rows = events.Scalars("train/memory/host_rss_bytes")
    assert [row.step for row in rows][:4] == [1, 2, 3, 4]


@pytest.mark.slow
def test_evaluation_and_saving_are_phases_inside_of_the_training(tmp_path):
    class Look(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert list(callback._run._open) == ["train", "evaluate"]

    monitor = memtools.MemoryMonitor(tmp_path / "run.mem")
    callback = MemoryCallback(monitor)
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 4,
               "eval_on_start": True}  # fmt: skip
    trainer(tmp_path / "out", [callback, Look()], **options).train()
    assert phases(monitor) == {"train": 1, "evaluate": 3, "save": 1}
    totals = {phase.name: phase for phase in monitor.phases()}
    inner = totals["evaluate"].seconds + totals["save"].seconds
    assert totals["save"].seconds > 0
    assert totals["train"].seconds > inner


@pytest.mark.slow
def test_an_evaluation_that_is_called_off_leaves_no_phase_open(tmp_path):
    class Off(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_evaluate = False
            return control

    callback = MemoryCallback()
    options = {"eval_strategy": "steps", "eval_steps": 1}
    trainer(tmp_path, [callback, Off()], **options).train()
    assert phases(callback.monitor) == {"evaluate": 4, "train": 1}
    assert callback._run._open == {}


@pytest.mark.slow
def test_an_exception_in_training_stops_the_monitor_and_the_record_says_which(tmp_path):
    monitor = memtools.MemoryMonitor(tmp_path / "run.mem")
    made = trainer(tmp_path / "out", [MemoryCallback(monitor)], rows=Rows(fails_at=7))
    with pytest.raises(RuntimeError, match="a bad row"):
        made.train()
    assert not monitor.running
    record = memtools.read_record(tmp_path / "run.mem")
    assert record.complete
    assert record.events[-1].kind == "end"
    assert "RuntimeError: a bad row" in record.events[-1].text
    assert phases(monitor) == {"train": 1}


@pytest.mark.slow
def test_a_guard_may_act_between_two_batches_of_one_step(tmp_path):
    monitor = memtools.MemoryMonitor(limit="1 MiB")
    monitor.guard(0.5)
    made = trainer(tmp_path, [MemoryCallback(monitor)], gradient_accumulation_steps=6)
    with pytest.raises(memtools.HostMemoryPressure):
        made.train()
    assert monitor.step_count == made.state.global_step == 0


@pytest.mark.slow
@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_a_guard_may_act_between_two_batches_of_an_evaluation(tmp_path, call):
    monitor = memtools.MemoryMonitor(limit="1 MiB")
    monitor.guard(0.5)
    made = trainer(tmp_path, [MemoryCallback(monitor)])
    with monitor:
        while monitor.samples_taken < 2:  # the evaluation is shorter than the sampler's interval
            pass
        with pytest.raises(memtools.HostMemoryPressure, match="watermark 50%"):
            getattr(made, call)(Rows(4))
        with monitor.phase("after"):
            pass
    assert monitor.step_count == 0
    assert {phase.name for phase in monitor.phases()} == {"evaluate", "after"}  # not evaluate/after


@pytest.mark.slow
def test_a_training_that_begins_anew_by_itself_goes_on_being_watched(tmp_path):
    """As with auto_find_batch_size: on_train_begin comes twice, on_train_end once."""

    class Twice(Trainer):
        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super()._inner_training_loop(*args, **kwargs)
            except RuntimeError:
                self.train_dataset.fails_at = -1
                return super()._inner_training_loop(*args, **kwargs)

    callback = MemoryCallback()
    made = trainer(tmp_path, [callback], rows=Rows(fails_at=7))
    made.__class__ = Twice
    made.train()
    assert not callback.monitor.running
    assert phases(callback.monitor) == {"train": 2}


@pytest.mark.slow
def test_a_monitor_that_runs_already_is_not_stopped(tmp_path):
    with memtools.MemoryMonitor() as monitor:
        monitor.step(10)
        trainer(tmp_path, [MemoryCallback(monitor)]).train()
        assert monitor.running
        assert monitor.step_count == 14


@pytest.mark.slow
def test_added_later_it_goes_before_the_reporters_by_add_to(tmp_path):
    listener, callback = Listener(), MemoryCallback()
    made = trainer(tmp_path, [listener], rows=Rows(fails_at=7))
    assert callback.add_to(made) is callback
    callback.add_to(made)
    kinds = [type(one).__name__ for one in made.callback_handler.callbacks]
    assert kinds == ["DefaultFlowCallback", "MemoryCallback", "Listener", "PrinterCallback"]
    assert made.train.__wrapped__.__func__ is Trainer.train  # watched once
    with pytest.raises(RuntimeError):
        made.train()
    assert not callback.monitor.running
    made.train_dataset.fails_at = -1
    made.train()
    assert memory_keys(listener.logs[0])


@pytest.mark.slow
def test_added_the_usual_way_it_works_and_a_block_stops_it(tmp_path):
    made = trainer(tmp_path, rows=Rows(fails_at=7))
    callback = MemoryCallback()
    made.add_callback(callback)
    with pytest.raises(RuntimeError), callback:
        made.train()
    assert not callback.monitor.running
    assert phases(callback.monitor) == {"train": 1}


def test_something_else_than_a_monitor_is_refused():
    with pytest.raises(TypeError, match="takes a memtools.MemoryMonitor, got a str"):
        MemoryCallback("run.mem")  # type: ignore[arg-type]
