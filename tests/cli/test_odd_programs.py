"""`memtools run` of odd programs: stdout, the exit code and stderr are those of `python`.

tests/monitor/test_ends.py does the same of runs that print a summary."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import memtools
from tests.cli.oddprograms import ALL, OFTEN, program
from tests.cli.runs import execute, run, without_addresses, write
from tests.kit.long import LONG

#: what differs from one run of `python` to the next: ids, times and the numbers of threads; and the
#: list of all extension modules at a crash, which has memtools' own
_DIFFERS = re.compile(
    rb"thread \d+|pid[= ]\d+|[Tt]hread[- ]\w+|Fatal Python error[^\n]*|FIRST|SECOND"
    rb"|\nExtension modules: [^\n]*\n|USDT:[^\n]*"
    # From Python 3.12 on: a monitor has a thread.
    rb"|[^\n]*DeprecationWarning: This process \(pid=\d+\) is multi-threaded, use of fork\(\)"
    rb"[^\n]*\n[^\n]*os\.fork\(\)[^\n]*\n"
)


def said(text: bytes) -> bytes:
    return _DIFFERS.sub(b"", without_addresses(text))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL if LONG else OFTEN)
def test_a_program_does_the_same(name: str, tmp_path: Path) -> None:
    results = []
    for folder in ("FIRST", "SECOND"):
        (tmp_path / folder).mkdir()
        script = write(tmp_path / folder, program(name)).name
        if folder == "FIRST":
            results.append(execute([sys.executable, script], tmp_path / folder, b"typed"))
        else:
            results.append(run(tmp_path / folder, "--quiet", script, stdin=b"typed"))
    plain, found = results
    assert found.returncode == plain.returncode
    assert said(found.stdout) == said(plain.stdout)
    assert said(found.stderr) == said(plain.stderr)
    assert memtools.read_record(tmp_path / "SECOND" / "run.mem").events[0].kind == "start"
