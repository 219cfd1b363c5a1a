"""write_scalars: to TensorBoard's own writer, and to something with the log() of a wandb run."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from typing import Any

import pytest

import memtools
from memtools.export import write_scalars
from tests.export.metricsource import usual

FINITE = {"memory/host_rss_bytes", "memory/host_percent", "memory/cuda0_allocated_bytes",
          "memory/cuda1_allocated_bytes"}  # fmt: skip


class Run:
    """wandb.Run.log has this signature, refuses anything else, and wants steps that rise."""

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        if not isinstance(data, Mapping):
            raise ValueError("wandb.log must be passed a dictionary")
        if any(not isinstance(key, str) for key in data):
            raise ValueError("Key values passed to `wandb.log` must be strings.")
        assert self.rows == [] or step is None or step >= (self.rows[-1][0] or 0)
        self.rows.append((step, dict(data)))


def test_tensorboard_has_the_scalars_that_were_written(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorBoard's own, on import
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter
    figures = usual()
    with SummaryWriter(str(tmp_path)) as writer:
        for step in (10, 20):
            figures.values["memory/host_percent"] = float(step)
            write_scalars(writer, figures, step)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == FINITE
    rows = [(event.step, event.value) for event in events.Scalars("memory/host_percent")]
    assert rows == [(10, 10.0), (20, 20.0)]
    assert events.Scalars("memory/host_rss_bytes")[0].value == 3 * 2**30


def test_a_run_with_log_gets_all_in_one_call():
    run, figures = Run(), usual()
    write_scalars(run, figures, 7)
    write_scalars(run, figures, expert=True)
    assert [step for step, _ in run.rows] == [7, None]
    assert set(run.rows[0][1]) == FINITE
    assert set(run.rows[1][1]) == FINITE | {"memory/samples_total"}
    assert figures.asked == [False, True]


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (None, "a NoneType"),
        ({}, "a dict"),
        (math, "math"),
        (Run, "Run"),
        (logging.getLogger("x"), "a Logger"),
        (logging.LoggerAdapter(logging.getLogger("x"), {}), "a LoggerAdapter"),
    ],
)
def test_other_targets_are_refused_before_anything_is_read(target, name):
    figures = usual()
    with pytest.raises(TypeError, match=f"needs add_scalar.*or log.*, got {name}; pass the writer"):
        write_scalars(target, figures, 1)
    assert figures.asked == []


def test_a_source_without_metrics_is_refused():
    with pytest.raises(TypeError, match=r"write_scalars\(\) takes an object with metrics"):
        write_scalars(Run(), Run(), 1)  # type: ignore[arg-type]


def test_a_real_monitors_figures():
    run = Run()
    with memtools.MemoryMonitor() as monitor:
        monitor.step()
        write_scalars(run, monitor, 1)
    ((step, row),) = run.rows
    assert step == 1
    assert row["memory/host_rss_bytes"] > 2**20
    assert len(row) <= 12
