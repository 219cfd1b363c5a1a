"""Where it was made, in programs without steps, under `memtools run`: all of them at the same time,
as most of what they do is to wait."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from memtools import _cli as cli
from memtools import read_record
from memtools._monitor import tracewindow
from memtools._record.figures import figures_of
from tests.cli.runs import run, write

pytestmark = pytest.mark.slow

#: calls what a program does, so many times a second, for so many seconds or until it returns True
PACED = """
    import time

    def paced(work, a_second, seconds):
        begin, n = time.monotonic(), 0
        while time.monotonic() - begin < seconds:
            while n < a_second * (time.monotonic() - begin):
                if work(n):
                    return
                n += 1
            time.sleep(0.01)
"""
DICTS = """
    from paced import paced
    pages = []

    def parse(n):
        return {"n": n, "text": "x" * 50 + str(n), "links": [n, n + 1]}

    def collect(n):
        pages.append(parse(n))

    paced(collect, 1500, 19)
"""
SERVER = """
    import threading
    import numpy as np
    from paced import paced

    class Server:
        def __init__(self):
            self.log = []

        def answer(self, n):
            request = np.ones(50_000)
            self.log.append(request[:1000] * 2)

    server = Server()
    thread = threading.Thread(target=paced, args=(server.answer, 100, 19))
    thread.start()
    thread.join()
"""
TENSORS = """
    import torch
    from memtools._monitor import bytime
    from paced import paced
    bytime.START_OF_TORCH = 1.0  # or this would take 26 s more
    torch.set_num_threads(1)
    latents = []

    def draw(n):
        return torch.randn(50, 200)

    def sample(n):
        latents.append(draw(n) * 2)

    paced(sample, 50, 21)
"""
BOUNDED = """
    import collections
    from paced import paced
    recent = collections.deque(maxlen=300)
    paced(lambda n: recent.append(bytearray(20_000)), 100, 19)
"""
OWN = """
    import tracemalloc
    from paced import paced
    tracemalloc.start(3)
    kept = []
    paced(lambda n: kept.append(bytearray(20_000)), 100, 17)
    print(tracemalloc.is_tracing(), tracemalloc.get_traceback_limit())
"""
STEPS = """
    import tracemalloc
    from paced import paced
    kept, losses = [], []

    def wait(n):
        kept.append(bytearray(20_000))
        return tracemalloc.is_tracing()

    def loss():
        return bytearray(100 << 10)

    paced(wait, 100, 40)
    print(tracemalloc.is_tracing())
    import torch
    torch.set_num_threads(1)
    weights = torch.nn.Parameter(torch.ones(300))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    paced(lambda n: not tracemalloc.is_tracing(), 5, 10)
    print(tracemalloc.is_tracing())

    def train(n):
        (weights * weights).sum().backward()
        optimizer.step()
        losses.append(loss())
        return n == 99

    paced(train, 50, 40)
    print(tracemalloc.is_tracing())
"""
ENDS = """
    import os, sys, tracemalloc
    from paced import paced
    kept = []

    def wait(n):
        kept.append(bytearray(20_000))
        return tracemalloc.is_tracing()

    paced(wait, 100, 40)
    print(tracemalloc.is_tracing(), flush=True)
    child = os.fork()
    if child == 0:
        os._exit(10 + tracemalloc.is_tracing() + 2 * (tracemalloc.start.__name__ != "start"))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.exit(7)
"""
PROGRAMS = {
    "dicts": (DICTS,), "server": (SERVER, "--json"), "tensors": (TENSORS,),
    "bounded": (BOUNDED,), "own": (OWN,), "steps": (STEPS,), "ends": (ENDS,),
    "off": (DICTS, "--no-trace"),
}  # fmt: skip


class Ran(NamedTuple):
    folder: Path
    code: int
    stdout: str
    stderr: str

    def events(self, kind: str) -> list[str]:
        record = read_record(self.folder / "run.mem")
        return [event.text for event in record.events if event.kind == kind]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    folders = {name: tmp_path_factory.mktemp(name) for name in PROGRAMS}

    def one(name: str) -> Ran:
        folder, (text, *words) = folders[name], PROGRAMS[name]
        write(folder, PACED, "paced.py")
        write(folder, text)
        done = run(folder, *words, "train.py")
        return Ran(folder, done.returncode, done.stdout.decode(), done.stderr.decode())

    with ThreadPoolExecutor(len(PROGRAMS)) as pool:
        return dict(zip(PROGRAMS, pool.map(one, PROGRAMS), strict=True))


@pytest.mark.parametrize(
    ("name", "who", "line", "kept"),
    [
        ("dicts", "list train.pages", "train.py:6 in parse", "train.py:9"),
        (
            "tensors",
            "list train.latents",
            "train.py:13 in sample",
            "train.py:13",
        ),
    ],
)
def test_a_program_without_steps_is_told_the_line(
    name: str, who: str, line: str, kept: str, ran: dict[str, Ran]
) -> None:
    one = ran[name]
    lines = one.stderr.splitlines()
    end = next(i for i, line in enumerate(lines) if "; peak" in line)
    shown = [below for head, below in pairwise(lines[:end]) if f"  {who}  +" in head]
    assert any(below.startswith(f"{' ' * 10}{kept}  ") for below in shown), one.stderr
    assert any(f"  {who}  +" in line for line in lines[end:]), one.stderr
    (found,) = figures_of(read_record(one.folder / "run.mem")).verdict.findings
    assert found.made_at == line
    (event,) = one.events("trace")
    sources = "tracemalloc and torch's reports" if name == "tensors" else "tracemalloc"
    assert re.fullmatch(rf"\d\.\d s traced by {sources} in [\d.]+ ms: the line of 1 finding", event)
    assert one.code == 0


def test_explain_and_json_carry_it(ran: dict[str, Ran], capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ran["dicts"].folder / "run.mem")
    assert cli.main(["explain", path]) == 0
    assert "made at train.py:6 in parse" in capsys.readouterr().out
    assert cli.main(["explain", path, "--json"]) == 0
    assert '"made_at": "train.py:6 in parse"' in capsys.readouterr().out
    said = [json.loads(line) for line in ran["server"].stderr.splitlines()]
    found = [one["finding"] for one in said if "finding" in one][-1]
    assert (found["holder"], found["made_at"]) == ("list Server.log", "train.py:12 in answer")


def test_of_a_container_with_a_bound_nothing_is_said(ran: dict[str, Ran]) -> None:
    assert "made at" not in ran["bounded"].stderr
    assert "; peak" in ran["bounded"].stderr
    assert ran["bounded"].events("trace") == []


def test_the_programs_own_tracemalloc_is_left_alone(ran: dict[str, Ran]) -> None:
    assert ran["own"].stdout == "True 3\n"
    assert "made at" not in ran["own"].stderr
    assert ran["own"].events("trace") == [
        f"its line is unknown: nothing was traced, because {tracewindow.PROGRAMS_OWN}"
    ]


def test_turned_off_it_is_off_by_time_too(ran: dict[str, Ran]) -> None:
    assert "made at" not in ran["off"].stderr
    assert ran["off"].events("trace") == [
        "its line is unknown: nothing was traced, because it is turned off"
    ]


def test_a_program_that_begins_to_make_steps_is_traced_by_steps(
    ran: dict[str, Ran], capsys: pytest.CaptureFixture[str]
) -> None:
    one = ran["steps"]
    assert (one.code, one.stdout) == (0, "True\nFalse\nFalse\n"), one.stderr
    by_time, by_step = one.events("trace")
    assert by_time.endswith("because the window was closed before its end")
    assert re.match(r"3 steps traced by tracemalloc and torch's reports in [\d.]+ ms: the", by_step)
    assert cli.main(["explain", str(one.folder / "run.mem")]) == 0
    assert "1 new bytearray object a step, made at train.py:11 in loss" in capsys.readouterr().out


def test_an_end_inside_of_a_window_is_the_programs_own(ran: dict[str, Ran]) -> None:
    """And a child that is forked there is not traced."""
    one = ran["ends"]
    assert (one.code, one.stdout) == (7, "True\n10\n"), one.stderr
    assert "It ended with exit code 7" in one.stderr
    assert one.events("end") == ["exit: code 7"]
    assert one.events("trace")[0].endswith("because the window was closed before its end")
