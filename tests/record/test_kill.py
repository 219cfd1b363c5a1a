"""A writer killed at any instruction. Not at random ones: a process is run one machine instruction
at a time, and whenever one of them changed the file, the file is read as if the process had been
killed there."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memtools._record.reader import parse
from tests.record.recordmodel import wrong

BEFORE, DURING = 59, 8  # rounds: the ring of 50 rows has wrapped, 8 buckets fold at 64 samples
SINGLESTEP = 9
WRITER = f"""
import ctypes, os, signal, sys
from tests.record.recordmodel import acts, write, writer_at
writer = writer_at(sys.argv[1])
for k in range({BEFORE}):
    write(writer, k)
rounds = [acts(writer, k) for k in range({BEFORE}, {BEFORE + DURING})]
ctypes.CDLL(None).ptrace(0, 0, None, None)  # PTRACE_TRACEME
os.kill(os.getpid(), signal.SIGSTOP)
for append, event, phase in rounds:
    append(), event(), phase()
    os.kill(os.getpid(), signal.SIGUSR1)  # not delivered: it says that the round is over
os._exit(0)
"""


@pytest.mark.slow
def test_at_any_instruction_a_kill_leaves_a_readable_record(tmp_path: Path) -> None:
    path = str(tmp_path / "run.mem")
    ptrace = ctypes.CDLL(None).ptrace
    states, rounds, seen = 0, BEFORE, b""
    with subprocess.Popen([sys.executable, "-c", WRITER, path]) as child:
        _, status = os.waitpid(child.pid, 0)
        assert os.WIFSTOPPED(status)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            while True:
                assert ptrace(SINGLESTEP, child.pid, None, None) == 0
                _, status = os.waitpid(child.pid, 0)
                if os.WIFEXITED(status):
                    break
                rounds += os.WSTOPSIG(status) == signal.SIGUSR1
                if (now := data[:]) != seen:
                    record = parse(now, path)
                    assert wrong(record) is None
                    assert record.total in (rounds, rounds + 1)
                    states, seen = states + 1, now
        child.returncode = os.WEXITSTATUS(status)
    assert (child.returncode, rounds) == (0, BEFORE + DURING)
    assert states > DURING * 30  # each round stores more words than these: it was really followed
