"""Calls of memtools._core's Probe, good and bad, for test_leaks.py."""

from __future__ import annotations

from collections.abc import Callable

from memtools import _core
from tests.kit.refusals import refused

Case = Callable[[], object]
PROBE = _core.Probe()


def dropped_open() -> None:
    probe = _core.Probe()
    probe.enter("never left")
    probe.reset_peak()


CASES: dict[str, list[Case]] = {
    "Sample": [lambda: PROBE.read(), lambda: refused(TypeError, lambda: _core.Sample([1]))],
    "Probe": [
        lambda: _core.Probe("/nowhere", True).read(127),
        lambda: refused(ValueError, lambda: _core.Probe("/" + "x" * 5000)),
        lambda: refused(TypeError, lambda: _core.Probe(1)),  # type: ignore[arg-type]
        dropped_open,
    ],
    "Probe.rss": [PROBE.rss],
    "Probe.read": [
        lambda: PROBE.read(127),
        lambda: refused(ValueError, lambda: PROBE.read(-1)),
        lambda: refused(TypeError, lambda: PROBE.read("x")),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: PROBE.read(1, 2)),  # type: ignore[call-arg]
    ],
    "Probe.source": [PROBE.source, lambda: _core.Probe("/nowhere").source()],
    "Probe.groups": [PROBE.groups, lambda: _core.Probe("/nowhere").groups()],
    "Probe.host": [PROBE.host, lambda: _core.Probe("/nowhere").host()],
    "Probe.children": [PROBE.children, lambda: _core.Probe("/nowhere").children()],
    "Probe.children_made": [PROBE.children_made, lambda: _core.Probe("/nowhere").children_made()],
    "_watch_files": [_core._watch_files],
    "_note_shm": [lambda: _core._note_shm("/no-such-block"), lambda: _core._note_shm(3)],
    "Probe.reset_peak": [PROBE.reset_peak],
    "Probe.peak": [
        lambda: (PROBE.reset_peak(), PROBE.peak()),
        lambda: refused(RuntimeError, lambda: _core.Probe().peak()),
    ],
    "Probe.enter": [
        lambda: PROBE.leave(PROBE.enter("a")),
        lambda: refused(TypeError, lambda: PROBE.enter(1)),  # type: ignore[arg-type]
        lambda: refused(ValueError, lambda: PROBE.enter("\0")),
        lambda: refused(TypeError, lambda: PROBE.enter()),  # type: ignore[call-arg]
    ],
    "Probe.leave": [
        lambda: refused(RuntimeError, lambda: PROBE.leave(0)),
        lambda: refused(OverflowError, lambda: PROBE.leave(-1)),
        lambda: refused(TypeError, lambda: PROBE.leave("x")),  # type: ignore[arg-type]
    ],
    "Probe.phases": [PROBE.phases],
    "Probe.current": [PROBE.current],
}
CASES["Probe.__new__"] = [_core.Probe]
SAMPLE = PROBE.read()
for _name in set(vars(_core.Sample)) - {"__doc__", "__module__"}:
    CASES[f"Sample.{_name}"] = [lambda name=_name: getattr(SAMPLE, name)]  # type: ignore[misc]
