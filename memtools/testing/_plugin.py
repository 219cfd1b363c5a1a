"""The plugin of pytest: the marker `memory`.

    @pytest.mark.memory(peak="200 MiB", growth="1 KiB/step", steps=50)
    def test_training(): ...

pytest loads this file at each start, in every project. So it imports nothing else of memtools until
a test has the marker.

    setup ──► read the marker's arguments ──► call ──► _marker.py ──► a failure like any other
                                 isolate=True └──► _isolated.py: a process with pytest of its own
"""

from __future__ import annotations

import inspect
import os
import unittest
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from memtools.testing._marker import MemoryLimits

#: The environment variable that gives the process of an isolated test the file for its reports.
REPORTS = "MEMTOOLS_TEST_REPORTS"
_limits: pytest.StashKey[MemoryLimits] = pytest.StashKey()
_runs: pytest.StashKey[bool] = pytest.StashKey()
_reports: pytest.StashKey[str] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "memory(peak=None, growth=None, device=None, steps=50, isolate=False, timeout=None): fail "
        "the test if it takes more memory at its peak than `peak`, or if memory in use grows by "
        "more than `growth` a step (memtools)",
    )
    path = os.environ.pop(REPORTS, "")  # so that child processes do not see it
    if path:
        config.stash[_reports] = path


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test with isolate=True in a process of its own."""
    marker = item.get_closest_marker("memory")
    if marker is None or _reports in item.config.stash:
        return None
    if marker.kwargs.get("isolate") is not True or _read(item, marker) is not None:
        return None  # pytest_runtest_setup reports what is wrong
    from memtools.testing._isolated import run_isolated

    run_isolated(item, nextitem, item.stash[_limits].timeout, REPORTS)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("memory")
    if marker is None:
        return
    why = _read(item, marker)
    if why is not None:
        pytest.fail(f"@pytest.mark.memory: {why}", pytrace=False)
    if item.stash[_limits].peak is not None:
        from memtools.testing._peak import NO_PEAK, can_reset_peak

        if not can_reset_peak():
            pytest.fail(f"@pytest.mark.memory: {NO_PEAK}", pytrace=False)


def _read(item: pytest.Item, marker: pytest.Mark) -> str | None:
    """Keep the marker's limits. Returns what is wrong with it in one sentence, or None."""
    from memtools.testing._marker import limits_of

    try:
        item.stash[_limits] = limits_of(marker.args, marker.kwargs)
    except (TypeError, ValueError) as error:
        return str(error)
    if not isinstance(item, pytest.Function):
        return "the marker is for test functions only"
    if item.cls is not None and issubclass(item.cls, unittest.TestCase):
        return (
            "a method of unittest.TestCase cannot be measured; make it a function, or a method of "
            "a plain class"
        )
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Measure a test with limits. Each of its calls goes through the hooks of all plugins."""
    limits = pyfuncitem.stash.get(_limits, None)
    if limits is None or (limits.peak is None and limits.growth is None):
        return None
    if pyfuncitem.stash.get(_runs, False):
        return None
    if inspect.isasyncgenfunction(pyfuncitem.obj) or inspect.isgeneratorfunction(pyfuncitem.obj):
        pytest.fail("@pytest.mark.memory: a generator is not a test; call it in one", pytrace=False)
    from memtools.testing._marker import measured

    pyfuncitem.stash[_runs] = True
    try:
        text = measured(
            limits,
            lambda: pyfuncitem.ihook.pytest_pyfunc_call(pyfuncitem=pyfuncitem),
            pyfuncitem.funcargs.values(),
        )
    finally:
        del pyfuncitem.stash[_runs]
    if text:
        pytest.fail(text, pytrace=False)
    return True


def pytest_sessionstart(session: pytest.Session) -> None:
    path = session.config.stash.get(_reports, "")
    if path:
        from memtools.testing._isolated import ReportWriter

        session.config.pluginmanager.register(ReportWriter(session.config, path))
