"""PolicyReport: verdicts in words, the table, and plain data."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from memtools import PolicyReport
from memtools._cleanup.report import verdict
from memtools.types import ActionReport, CycleReport

MIB = 2**20
RAN = ActionReport(
    name="gc", when="100 updates", count=40, total_ms=400.0, share=0.004, host_freed_bytes=0,
    device_freed_bytes=0, paid=0, skipped=0, backoff=1, error="", verdict="",
)  # fmt: skip


def words(**changes: object) -> str:
    usual = {"applies": "", "per_update_ms": 10.0, "strict": False}
    mine = {key: changes.pop(key, value) for key, value in usual.items()}
    return verdict(replace(RAN, **changes), **mine)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"count": 0}, "not run yet"),
        ({"error": "OSError: no"}, "failed: OSError: no"),
        ({"paid": 40}, "pays"),
        ({"paid": 20}, "pays"),
        ({"paid": 3}, "pays now and then"),
        ({"count": 1}, "frees nothing so far"),
        ({}, "frees nothing"),
        ({"host_freed_bytes": 5}, "frees little"),
        ({"backoff": 16, "strict": True}, "frees nothing"),
        ({"backoff": 16, "share": 0.5}, "frees nothing: runs 16 times less often"),
        ({"backoff": 16}, "frees nothing: runs 16 times less often"),
        ({"backoff": 2, "host_freed_bytes": 5}, "frees little: runs 2 times less often"),
        ({"backoff": 2, "device_freed_bytes": 5}, "frees little: runs 2 times less often"),
        (
            {"backoff": 4, "paid": 9, "host_freed_bytes": 5},
            "frees little now: runs 4 times less often",
        ),
        ({"paid": 40, "skipped": 7}, "pays; 7 skipped, over the limit of 0.3 %"),
        ({"share": 0.01, "paid": 40}, "pays"),
    ],
)
def test_a_verdict(changes, said):
    assert words(**changes) == said


def test_what_costs_too_much_says_the_cadence_that_would_not():
    """61 ms each; 0.3 % of 10 ms is 0.03 ms an update: every 2,033, in round figures."""
    said = words(share=0.061, count=10, total_ms=610.0, backoff=1)
    assert said == "costs 6.1 % of the time: too often; every 2,100 updates would cost 0.3 %"
    assert words(share=0.061, count=10, total_ms=610.0, paid=10).startswith("pays, but costs 6.1 %")
    assert words(share=0.5, per_update_ms=0.0).endswith(": too often")
    assert words(share=0.5, backoff=64, strict=True).startswith("costs 50.0 % of the time")


def test_why_it_cannot_run_is_said_where_it_did_not():
    assert words(count=0, applies="no CUDA in this process") == "no CUDA in this process"
    assert words(applies="no CUDA in this process") == "frees nothing"


def report(*actions: ActionReport, **changes: object) -> PolicyReport:
    cycles = CycleReport(12, 3, 5 * MIB, 4, ("[2] float32 tensor, beside Trainer",))
    whole = PolicyReport(20.0, 2000, actions, cycles, True, 170_000, 390, 1.5)
    return replace(whole, **changes)  # type: ignore[arg-type]


def test_the_table():
    pays = replace(
        RAN, paid=38, host_freed_bytes=3 * MIB, device_freed_bytes=MIB, share=0.02, verdict="pays"
    )
    idle = replace(RAN, name="trim", when="idle heap", count=0, total_ms=0.0, verdict="not run yet")
    assert str(report(pays, idle)).splitlines() == [
        "Cleanup policy: 2,000 updates in 20.0 s, of which cleanups took 2.0 %",
        "action  when         times  ms each  of time  freed, host   device      paid",
        "gc      100 updates     40    10.00    2.0 %      3.0 MiB  1.0 MiB  38 of 40  pays",
        "trim    idle heap        0                                                    not run yet",
        "Looks and decisions: 390, 1.5 ms",
        "Python's gc is managed: 170,000 objects frozen",
        "Cycles held 3 tensors, 5.0 MiB, in 4 collects that looked; "
        + "without cycles they are freed at once:",
        "  [2] float32 tensor, beside Trainer",
    ]


def test_the_table_leaves_out_what_nobody_has():
    none = replace(RAN, count=0, total_ms=0.0, verdict="not run yet")
    text = str(report(none, manages_gc=False, cycles=CycleReport(0, 0, 0, 0, ())))
    assert text.splitlines() == [
        "Cleanup policy: 2,000 updates in 20.0 s, of which cleanups took 0.01 %",
        "action  when         times",
        "gc      100 updates      0  not run yet",
        "Looks and decisions: 390, 1.5 ms",
    ]


def test_sums_and_actions_by_name():
    whole = report(RAN, replace(RAN, name="trim", total_ms=98.5))
    assert whole.total_ms == 498.5
    assert whole.share == pytest.approx(0.5 / 20)
    assert whole["trim"].mean_ms == pytest.approx(98.5 / 40)
    assert math.isnan(replace(RAN, count=0).mean_ms)
    assert math.isnan(report(RAN, seconds=0.0).share)
    assert "cleanups took ?" in str(report(RAN, seconds=0.0))
    with pytest.raises(KeyError, match="nothing"):
        whole["nothing"]


def test_as_dict_is_plain():
    plain = json.loads(json.dumps(report(RAN).as_dict()))
    assert plain["actions"][0] | {"name": "gc", "mean_ms": 10.0} == plain["actions"][0]
    assert plain["cycles"]["examples"] == ["[2] float32 tensor, beside Trainer"]
    assert (plain["updates"], plain["total_ms"]) == (2000, 400.0)
    assert plain["share"] == pytest.approx(0.4015 / 20)
