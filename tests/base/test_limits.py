"""The limits of memory: which is the lowest, which is the nearest, and what is left of each."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtools import _core
from memtools._base import limits
from memtools._base.limits import lowest_limit, nearest_limit
from memtools._monitor.sensor import Sensor
from memtools._monitor.signals import Limits, Signal, _Crest
from tests.kit.ownprocess import in_own_process
from tests.monitor.root import Root

PROCESS = """
import resource
from memtools import _core
from memtools._base.limits import limits_of_process, lowest_limit_of_process
from memtools._monitor.signals import Limits

limits = Limits(_core.Sampler(10**7), _core.Probe(), ())
assert (limits_of_process(), lowest_limit_of_process()) == ({}, None)
with open("/proc/self/status") as status:
    now = 1024 * int(status.read().split("VmData:")[1].split()[0])
limit = now + (100 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
[(name, (counted, most))] = limits_of_process().items()
assert (name, most) == ("RLIMIT_DATA", limit) and 90 << 20 < limit - counted <= 100 << 20
assert 90 << 20 < min(limits.rooms().values()) <= 100 << 20, min(limits.rooms().values())
assert 60 << 20 < limits.room_at_peak(30 << 20) <= 70 << 20, "of which a step takes a part"
kept = bytes(50 << 20)
assert min(limits.rooms().values()) <= 50 << 20, min(limits.rooms().values())
resource.setrlimit(resource.RLIMIT_AS, (1 << 45, resource.RLIM_INFINITY))
assert len(limits_of_process()) == 2
assert lowest_limit_of_process() == (limit, "RLIMIT_DATA")
"""


def test_what_the_limits_of_the_process_leave() -> None:
    in_own_process(PROCESS)


KIB = st.integers(1, 2**20)


@settings(max_examples=25, deadline=None)
@given(own=st.none() | KIB, group=st.none() | KIB, machine=st.none() | KIB)
def test_the_sampler_and_python_find_the_same_lowest_limit(
    tmp_path_factory, own: int | None, group: int | None, machine: int | None
) -> None:
    root = Root(tmp_path_factory.mktemp("root"))
    (root.group / "memory.max").write_text("max\n" if group is None else f"{group * 1024}\n")
    meminfo = "" if machine is None else f"MemTotal: {machine} kB\n"
    (root.path / "proc/meminfo").write_text(meminfo)
    asked = None if own is None else own * 1024
    now = _core.Probe(str(root.path), True).read()
    found = lowest_limit(given=asked, cgroup=now.cgroup_limit, machine=now.total)
    assert found == _core.Sampler(10**7, None, str(root.path), 0, asked).limit()


@pytest.mark.parametrize(
    ("group", "machine", "found"),
    [
        ((100, 30), (900, 500), (100, 30)),
        ((800, 30), (900, 500), (900, 400)),
        ((None, None), (900, 500), (900, 400)),
        ((-1, 30), (900, 500), (900, 400)),
        ((100, 30), (None, None), (100, 30)),
        ((None, None), (None, None), (None, None)),
    ],
)
def test_the_nearest_limit_is_the_one_with_the_least_left(group, machine, found) -> None:
    names = ("cgroup_limit", "cgroup_used", "total", "available")
    now: Any = SimpleNamespace(**dict(zip(names, (*group, *machine), strict=True)))
    assert nearest_limit(now) == found


def test_the_room_for_shared_memory(tmp_path: Path) -> None:
    free, total = limits.shm_room() or (0, 0)
    assert 0 <= free <= total > 0
    assert limits.shm_room(str(tmp_path)) is None


def test_a_limit_is_met_at_the_highest_point_of_a_step() -> None:
    crest = _Crest()
    assert crest.above(100, 900) == 0, "the peak of the program's start"
    assert crest.above(110, 900) == 0
    assert crest.above(500, 950) == 450, "a peak since then"
    assert crest.above(700, 950) == 250, "which is not so far above any more"
    assert crest.above(950, 960) == 10
    assert crest.above(955, None) == 0


def test_the_peak_of_a_look_is_not_one_of_the_steps() -> None:
    crest = _Crest()
    crest.above(100, 150)
    crest.leave_out(180)
    assert crest.above(110, 180) == 0
    assert crest.of_looks == 80, "what the looks have taken above what was used"
    crest.leave_out(180)
    assert crest.above(120, 190) == 70, "a peak of the steps"
    crest.leave_out(None)
    assert crest.of_looks == 80


def test_a_peak_before_a_look_is_one_of_the_steps() -> None:
    sampler = SimpleNamespace(used=lambda: 100, limit=lambda: (1000, "cgroup"), peak=lambda: 100,
                              latest=lambda: None)  # fmt: skip
    bounds = Limits(sampler, None, ())  # type: ignore[arg-type]
    bounds.above()
    sampler.peak = lambda: 600
    sensor = Sensor([Signal("heap", lambda: 50)], bounds)
    with sensor.left_out():
        sampler.peak = lambda: 700
    assert sensor.read(1)["above"] == 500
    assert (bounds._crest.newest, bounds._crest.of_looks) == (500, 600)


def test_a_sample_of_the_middle_of_a_step_is_not_what_is_used_at_its_end() -> None:
    """It was taken while the step had 300 bytes more than at its end."""
    sampler = SimpleNamespace(used=lambda: 800, limit=lambda: (1000, "cgroup"), peak=lambda: 800,
                              latest=lambda: SimpleNamespace(private=700))  # fmt: skip
    probe = SimpleNamespace(read=lambda fields: SimpleNamespace(private=400))
    bounds = Limits(sampler, probe, ())  # type: ignore[arg-type]
    bounds.above()
    sampler.peak = lambda: 850
    assert (bounds.above(), bounds.rooms()["counted"]) == (350, 150)


def test_there_are_no_looks_where_they_could_reach_the_limit() -> None:
    sampler = SimpleNamespace(used=lambda: 950, limit=lambda: (1000, "cgroup"), peak=lambda: 950,
                              latest=lambda: None)  # fmt: skip
    bounds = Limits(sampler, None, ())  # type: ignore[arg-type]
    assert bounds.admit_look()
    bounds.above()
    sampler.peak = lambda: 1005
    bounds.leave_out()
    assert not bounds.admit_look()
    sampler.limit = lambda: (2000, "cgroup")
    assert bounds.admit_look()
