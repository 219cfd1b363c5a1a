"""A test in a process of its own: a new pytest runs it alone and sends its reports back.

    run_isolated(item) ──► python -m pytest FILE::TEST ──► ReportWriter ──► reports, one a line
            ▲                                                                 │
            └────────── reports of this session, as if it had run here ◄──────┘

The process is not forked: a fork has the locks of threads but not the threads, and no CUDA.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

_TAIL = 4000  # A failure shows so many characters of what the process has written last.


class ReportWriter:
    """Writes each report of this session to a file, as a line of JSON."""

    def __init__(self, config: pytest.Config, path: str) -> None:
        self._config, self._path = config, path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(data, default=str) + "\n")


def run_isolated(
    item: pytest.Item, nextitem: pytest.Item | None, timeout: float | None, variable: str
) -> None:
    """Run a test in a process of its own, and pass on its reports.

    Args:
        item: the test.
        nextitem: the test after it.
        timeout: the seconds that the process may take; None: no limit.
        variable: the environment variable that says where the process writes its reports.
    """
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports_of(item, timeout, variable):
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # Tear down fixtures that the next test does not need, as at the end of any test. pytest has no
    # public call for it.
    item.session._setupstate.teardown_exact(nextitem)


def _reports_of(item: pytest.Item, timeout: float | None, variable: str) -> list[pytest.TestReport]:
    with tempfile.TemporaryDirectory(prefix="memtools-test-") as folder:
        path = Path(folder, "reports")
        path.touch()
        process = subprocess.Popen(
            _command(item, folder), cwd=item.config.invocation_params.dir,
            env=os.environ | {variable: str(path)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        is_late = False
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            is_late = True
            _kill(process)
            output, _ = process.communicate()
        except BaseException:
            _kill(process)
            process.communicate()
            raise
        reports = _read(item.config, path)
    if {report.when for report in reports} >= {"setup", "teardown"}:
        return reports
    return [
        *reports,
        _broken(item, reports, process.returncode, timeout if is_late else None, output),
    ]


def _command(item: pytest.Item, folder: str) -> list[str]:
    """pytest for one test, with the options of this session and a folder of its own."""
    config = item.config
    given = set(map(str, config.getoption("file_or_dir", None) or ()))
    options = [str(arg) for arg in config.invocation_params.args if str(arg) not in given]
    inside = item.nodeid.partition("::")[2]
    if config.pluginmanager.hasplugin("xdist"):
        options += ["-n", "0"]
    if config.inipath is not None:
        options += ["-c", str(config.inipath)]
    return [
        sys.executable, "-m", "pytest", *options, "--rootdir", str(config.rootpath),
        "-o", f"cache_dir={folder}/cache", "--basetemp", f"{folder}/files", "-m", "", "-k", "",
        f"{item.path}::{inside}",
    ]  # fmt: skip


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with its child processes."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()


def _read(config: pytest.Config, path: Path) -> list[pytest.TestReport]:
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            data: dict[str, Any] = json.loads(line)
        except ValueError:  # The process was killed while it wrote the line.
            break
        for name, value in data.items():
            if name in ("longrepr", "location") and isinstance(value, list):
                data[name] = tuple(value)  # JSON has no tuples, but pytest needs them.
        found.append(config.hook.pytest_report_from_serializable(config=config, data=data))
    return found


def _broken(
    item: pytest.Item,
    before: list[pytest.TestReport],
    status: int,
    timeout: float | None,
    output: bytes,
) -> pytest.TestReport:
    """A report for a process that has not reported all of its test."""
    when: Any = "call" if any(report.when == "setup" for report in before) else "setup"
    if any(report.when == "call" for report in before):
        when = "teardown"
    if timeout is not None:
        why = f"did not end within {timeout:g} s, and was killed"
    elif status < 0:
        why = f"was ended by {_name_of(-status)}"
    else:
        why = f"ended with status {status} and without a report of the test"
    text = f"the process of this isolated test {why}"
    tail = output.decode(errors="replace")[-_TAIL:].strip()
    if tail:
        text += f"; what it wrote last:\n{tail}"
    return pytest.TestReport(
        item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", text, when
    )


def _name_of(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
