"""The plugin of pytest: the marker `memory`.

    @pytest.mark.memory(peak="200 MiB", growth="1 KiB/step", steps=50)
    def test_training(): ...

pytest loads this file at each start, in every project: so it imports nothing of memtools before it
meets the marker, and does nothing where there is none.

    setup ──► the marker's arguments are read ──► call ──► measured.py ──► a failure like any other
                                     isolate=True └──► isolated.py: a process with pytest of its own
"""

from __future__ import annotations

import inspect
import os
import unittest
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from memtools.testing._limits import MemoryLimits

#: in the environment of the process of an isolated test: the file for its reports
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
    path = os.environ.pop(REPORTS, "")  # so that what this process starts does not see it
    if path:
        config.stash[_reports] = path


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test with isolate=True in a process of its own."""
    marker = item.get_closest_marker("memory")
    if marker is None or _reports in item.config.stash:
        return None
    if marker.kwargs.get("isolate") is not True or _read(item, marker) is not None:
        return None  # in this process, which says what is wrong
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
        from memtools.testing._peak import NO_PEAK, can_tell_peaks

        if not can_tell_peaks():
            pytest.fail(f"@pytest.mark.memory: {NO_PEAK}", pytrace=False)


def _read(item: pytest.Item, marker: pytest.Mark) -> str | None:
    """Keep what the marker means; what is wrong with it, in one sentence, or None."""
    from memtools.testing._limits import limits_of

    try:
        item.stash[_limits] = limits_of(marker.args, marker.kwargs)
    except (TypeError, ValueError) as error:
        return str(error)
    if not isinstance(item, pytest.Function):
        return "it is for test functions; this is another kind of test"
    if item.cls is not None and issubclass(item.cls, unittest.TestCase):
        return (
            "a method of unittest.TestCase cannot be measured; make it a function, or a method of "
            "a class of its own"
        )
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a test with limits between readings. Each call goes the way that all plugins know."""
    limits = pyfuncitem.stash.get(_limits, None)
    if limits is None or (limits.peak is None and limits.growth is None):
        return None
    if pyfuncitem.stash.get(_runs, False):
        return None
    if inspect.isasyncgenfunction(pyfuncitem.obj) or inspect.isgeneratorfunction(pyfuncitem.obj):
        pytest.fail("@pytest.mark.memory: a generator is no test; call it in one", pytrace=False)
    from memtools.testing._measured import measured

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
