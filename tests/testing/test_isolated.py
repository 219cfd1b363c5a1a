"""isolate=True: a test in a process of its own, whose reports are those of this session."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.slow

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    def go(code: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(
            f"import os, signal, subprocess, sys, time, pytest\nmemory = pytest.mark.memory\n{code}"
        )
        return pytester.runpytest_inprocess("-q", *arguments)

    return go


def test_outcomes_and_texts_of_the_other_process_are_reported(run: Run) -> None:
    result = run(
        f"""
kept = []
isolated = memory(isolate=True, growth="1 KiB")

@pytest.fixture(scope="module")
def stage():
    yield os.getpid()

def test_here(stage):
    assert stage == {os.getpid()}

@isolated
@pytest.mark.parametrize("name", ["a b", "c[d]::e"])
def test_passes(name, tmp_path, stage):
    assert os.getpid() == stage != {os.getpid()}

@isolated
def test_fails():
    print("said by the test")
    assert 1 == 2

@isolated
def test_leaks():
    kept.append(bytearray(5000))

@isolated
def test_skips():
    pytest.skip("no reason")

@isolated
@pytest.mark.xfail(strict=True)
def test_xfails():
    assert 1 == 3

@pytest.fixture
def broken():
    raise RuntimeError("of the fixture")

@isolated
def test_error(broken):
    pass

def test_nothing_was_kept_here():
    assert kept == []
""",
        "-p", "no:cacheprovider", "-rs", "-m", "memory or not memory",
    )  # fmt: skip
    result.assert_outcomes(passed=4, failed=2, skipped=1, xfailed=1, errors=1)
    text = result.stdout.str()
    assert "said by the test" in text
    assert "assert 1 == 2" in text
    assert "RuntimeError: of the fixture" in text
    leak = r"^memory grows by [45]\.\d KiB a step \(allowed: 1 KiB\): list .*\.kept \+"
    assert re.search(leak, text, re.M)
    assert "no reason" in text


def test_a_process_that_is_killed_is_a_failure_that_says_so(run: Run) -> None:
    result = run(
        """
@memory(isolate=True)
def test_dies():
    print("before", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

@memory(isolate=True)
def test_exits():
    os._exit(7)

def test_after():
    pass
"""
    )
    result.assert_outcomes(passed=1, failed=2)
    text = result.stdout.str()
    assert "the process of this isolated test was ended by signal 9 (SIGKILL)" in text
    assert "this isolated test ended with status 7 and without a report of the test" in text


def test_a_step_that_never_ends_is_ended_with_all_that_it_started(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the process takes to begin: its time is over once the test runs."""
    started, asked = tmp_path / "started", list[float | None]()

    class Process(subprocess.Popen[bytes]):
        def communicate(self, input: Any = None, timeout: float | None = None) -> Any:
            if timeout is not None:
                asked.append(timeout)
                while not started.exists() and self.poll() is None:
                    time.sleep(0.01)
                timeout = 0.01
            return super().communicate(input, timeout)

    monkeypatch.setattr(subprocess, "Popen", Process)
    result = run(
        f"""
@memory(isolate=True, timeout=4)
def test_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open({str(started) + ".part"!r}, "w").write(str(child.pid))
    os.rename({str(started) + ".part"!r}, {str(started)!r})
    while True:
        time.sleep(0.1)
"""
    )
    result.assert_outcomes(failed=1)
    assert asked == [4.0]
    assert "isolated test did not end within 4 s, and was killed" in result.stdout.str()
    state = Path(f"/proc/{started.read_text()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_fixtures_of_other_modules_end_before_the_next_one(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_a="""
import pytest
@pytest.fixture(scope="module", autouse=True)
def stage():
    yield
    open("ended", "w").close()
def test_first(): pass
@pytest.mark.memory(isolate=True)
def test_isolated(): pass
""",
        test_b="""
import os
def test_second(): assert os.path.exists("ended")
""",
    )
    result = pytester.runpytest_inprocess("-q", "test_a.py", "test_b.py", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=3)


def test_options_and_configuration_go_along(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nfilterwarnings = error\naddopts = --strict-markers")
    pytester.makeconftest(
        "def pytest_addoption(parser): parser.addoption('--level', default='none')"
    )
    pytester.mkdir("deep").joinpath("test_it.py").write_text(
        "import warnings, pytest, sys\n"
        "@pytest.mark.memory(isolate=True)\n"
        "def test_level(request):\n"
        "    assert request.config.getoption('level') == 'high'\n"
        "    with pytest.raises(UserWarning): warnings.warn('x')\n"
        "    import os; assert 'MEMTOOLS_TEST_REPORTS' not in os.environ\n"
    )
    result = pytester.runpytest_inprocess("-q", "deep", "--level", "high", "-k", "level", "--lf")
    result.assert_outcomes(passed=1)
