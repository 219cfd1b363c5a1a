"""Handlers of forks and of the process's end: each call is registered once."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
from memtools._base import process

calls = []
def in_child(): calls.append("child")
def in_parent(): calls.append("parent")
def first(): print("first")
def second(word): print(word)

for _ in range(2):
    process.at_fork(in_child, in_parent)
    process.at_exit(first)
    process.at_exit(second, "second")
process.at_exit(second, "third")
pid = os.fork()
if pid == 0:
    os._exit(0 if calls == ["child"] else 1)
assert os.waitpid(pid, 0)[1] == 0
assert calls == ["parent"]
"""


def test_a_call_that_is_registered_twice_is_made_once():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("third\nsecond\nfirst\n", "", 0)


def test_a_handler_for_the_child_alone():
    program = PROGRAM.replace("in_child, in_parent", "in_child").replace('["parent"]', "[]")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stderr, done.returncode) == ("", 0)


THREADS = """
import _thread, signal
from memtools._base import process

blocked = _thread.allocate_lock()
blocked.acquire()
masks = []
def look():
    masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    blocked.release()

process.start_thread(look)
blocked.acquire()
assert masks[0] == {n for n in signal.valid_signals() if n not in process.OWN_FAULTS} - {9, 19}
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
"""


def test_a_thread_of_memtools_gets_no_signal_of_the_program():
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert (done.stderr, done.returncode) == ("", 0)
