"""A plugin of pytest for an environment without torch: what asks for a library that is missing is
skipped, by its name. Everything else must pass."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import pytest

LIBRARIES = ("torch", "numpy", "matplotlib", "transformers", "accelerate", "lightning",
             "prometheus_client", "tensorboard", "jinja2", "rich", "psutil", "mypy", "packaging",
             "gymnasium", "mujoco", "biotite", "objgraph", "pympler", "h5py", "lmdb",
             "tensordict")  # fmt: skip
MISSING = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
SIGNS = [
    (name, re.compile(rf"No module named '?{name}\b|\b{name} is not installed|needs {name}\b"))
    for name in MISSING
]


def skip(report: Any) -> None:
    """Turn a failure for want of a library into a skip that names it."""
    if not report.failed:
        return
    text = "\n".join([str(report.longrepr), *(said for _, said in report.sections)])
    for name, sign in SIGNS:
        if sign.search(text):
            report.outcome = "skipped"
            report.longrepr = (str(report.nodeid).partition("::")[0], 0, f"Skipped: needs {name}")
            return


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    skip(report)
    return report
