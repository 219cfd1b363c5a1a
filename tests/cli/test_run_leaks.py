"""`memtools run`: what it says of scripts whose truth is known, at once and in its last lines."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.cli.runs import execute, run, write

pytest.importorskip("torch")  # all programs here train

#: 512 KiB a step, kept by a list
TRAINS = """
    import io, sys, torch
    torch.set_num_threads(1)
    sys.stderr = io.StringIO()  # what is said goes past it

    class Trainer:
        def __init__(self):
            self.losses = []

    trainer, model = Trainer(), torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batch = torch.randn(8, 64)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if KEEPS: trainer.losses.append(torch.zeros(1024, 128))
    sys.stdout.write(sys.stderr.getvalue())
"""
#: 256 KiB a step, kept by a dict, and no optimizer
COMPUTES = """
    import torch
    torch.set_num_threads(1)
    model, features = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))), {}
    for i in range(STEPS):
        with torch.no_grad():
            features[i] = model(torch.randn(1024, 64))
"""
#: 64 KiB a step, made by one function, of another file, and kept by another
COLLECTS = """
    import tracemalloc, torch, data
    torch.set_num_threads(1)

    class Replay:
        def __init__(self):
            self.items = []

        def push(self, item):
            self.items.append(item)

    replay, model = Replay(), torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(64):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        replay.push(data.observe())
    print(tracemalloc.is_tracing())
"""
OBSERVES = """
    import numpy

    def observe():
        return numpy.zeros((128, 128), numpy.float32)
"""
#: a compressor of some 260 KiB a step, which the object of a client keeps
HANDLES = """
    import torch, zlib
    torch.set_num_threads(1)

    class Client:
        def __init__(self):
            self.out = zlib.compressobj(6)
            self.out.compress(b"x" * 1000)

    clients, model = {}, torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(160):
        clients[step] = Client()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
"""
#: 64 KiB a step, in a buffer of C code that is doubled each time it is full
DOUBLES = """
    import ctypes, torch
    torch.set_num_threads(1)
    realloc = ctypes.CDLL(None).realloc
    realloc.restype, realloc.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t)
    buffer, size, room, model = None, 0, 65536, torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(160):
        size += 65536
        if size > room:
            room *= 2
            buffer = realloc(buffer, room)
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
"""
#: 64 KiB a step, in a list of the standard library's, which an object of the program has
LOGS = """
    import logging.handlers, torch
    torch.set_num_threads(1)
    log = logging.getLogger("train")
    log.propagate = False

    def set_up():
        log.addHandler(logging.handlers.MemoryHandler(10**9, logging.CRITICAL))

    set_up()
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(64):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        log.warning("%d %s", step, bytearray(1 << 16))
"""
RATE = re.compile(r"\+([\d.]+) (KiB|MiB)/step")


def program(text: str, steps: int, keeps: bool = True) -> str:
    return text.replace("STEPS", str(steps)).replace("KEEPS", str(keeps))


def rate_of(line: str) -> float:
    """Bytes a step, as a line says."""
    found = RATE.search(line)
    assert found is not None, line
    return float(found[1]) * {"KiB": 2**10, "MiB": 2**20}[found[2]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HANDLES, r"dict train\.clients \+2[5-7]\d\.?\d* KiB/step "
                  r"\(1 new Client object a step, and 2[5-7]\d\.?\d* KiB of C memory with each"),
        (DOUBLES, r"the C heap, whose holder is not known \+[5-8]\d\.?\d* KiB/step "
                  r"\(in jumps, the next of 1\d\.\d MiB at about step 2\d\d"),
    ],
    ids=["handles", "doubles"],
)  # fmt: skip
def test_memory_in_c_is_reported_with_what_is_known_of_it(
    text: str, words: str, tmp_path: Path
) -> None:
    write(tmp_path, text)
    run(tmp_path, "train.py")
    explain = [sys.executable, "-m", "memtools", "explain", "--json"]
    said = [leak["text"] for leak in json.loads(execute(explain, tmp_path).stdout)["leaks"]]
    named = [text for text in said if re.search(f"(suspect|growing): {words}", text)]
    assert len(named) == 1, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "holder", "rate"),
    [(TRAINS, "Trainer.losses", 2.0**19), (COMPUTES, "features", 2.0**18)],
    ids=["training", "inference"],
)
def test_what_leaks_is_said_at_once_and_at_the_end(
    text: str, holder: str, rate: float, tmp_path: Path
) -> None:
    write(tmp_path, program(text, 200))
    found = run(tmp_path, "train.py")
    assert (found.returncode, found.stdout) == (0, b"")
    lines = found.stderr.decode().splitlines()
    assert all(line.startswith(("memtools: ", " " * 10)) for line in lines), lines
    end = next(i for i, line in enumerate(lines) if " 200 steps; peak: " in line)
    at_once, last = lines[:end], lines[end:]
    for part in (at_once, last):
        named = [line for line in part if re.search(rf"{holder} +\+", line)]
        assert named, lines
        assert re.search("(suspect|growing|likely|leak)  (list|dict) ", named[-1])
        assert abs(rate_of(named[-1]) / rate - 1) < 0.2
    explain = [sys.executable, "-m", "memtools", "explain"]
    explained = execute(explain, tmp_path).stdout.decode()
    growth = explained.partition("Growth\n")[2].partition("\n\n")[0].splitlines()
    assert growth
    # explain has one more: what is added, and by which line.
    assert [line for line in growth if line.strip() not in {line[10:] for line in last}] == [
        line for line in growth if re.match(r" +1 new \[1024, \d+\] float32 tensor a step", line)
    ]
    for leak in json.loads(execute([*explain, "--json"], tmp_path).stdout)["leaks"]:
        assert holder in leak["holder"]
        assert any(line.endswith(f"  fix: {leak['advice']}") for line in last)


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--quiet"], ["--json"]])
def test_quiet_says_nothing_and_json_says_it_for_machines(
    options: list[str], tmp_path: Path
) -> None:
    write(tmp_path, program(TRAINS, 64))
    found = run(tmp_path, *options, "train.py")
    lines = [json.loads(line) for line in found.stderr.splitlines()]
    if options != ["--json"]:
        assert lines == []
        return
    assert [list(line) for line in lines[:-1]] == [["finding"]] * (len(lines) - 1)
    assert lines[0]["finding"]["holder"] == "list Trainer.losses"
    assert lines[-1]["leaks"][0]["holder"] == "list Trainer.losses"


@pytest.mark.slow
def test_nothing_is_said_of_a_loop_that_does_not_leak(tmp_path: Path) -> None:
    write(tmp_path, program(TRAINS, 300, keeps=False))
    first, growth, wrote = run(tmp_path, "train.py").stderr.decode().splitlines()
    assert "300 steps" in first
    assert growth == "memtools: the process does not grow"
    assert "Wrote run.mem" in wrote


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "steps", "needed"),
    [(TRAINS, 12, 16), (COMPUTES, 20, 32)],
    ids=["training", "inference"],
)
def test_a_run_that_is_too_short_says_so(
    text: str, steps: int, needed: int, tmp_path: Path
) -> None:
    """Both keep something in each step: that they do not grow would be false."""
    write(tmp_path, program(text, steps))
    lines = run(tmp_path, "train.py").stderr.decode().splitlines()
    assert f"memtools: too early to say: {steps} of {needed} steps" in lines
    assert not any("grow" in line or "quiet" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--no-trace"]])
def test_the_line_that_makes_it_is_said_at_once_and_at_the_end(
    options: list[str], tmp_path: Path
) -> None:
    write(tmp_path, COLLECTS)
    write(tmp_path, OBSERVES, "lib/data.py")
    (tmp_path / "data.py").symlink_to(tmp_path / "lib" / "data.py")
    found = run(tmp_path, *options, "train.py")
    assert found.stdout == b"False\n"
    lines = found.stderr.decode().splitlines()
    end = next(i for i, line in enumerate(lines) if " 64 steps; peak: " in line)
    rates = [line for line in lines[:end] if "Replay.items  +" in line]
    assert all(re.match(r"memtools: step \d+  \w+  list ", rate) for rate in rates), rates
    rates = [rate.split("  ")[1:4] for rate in rates]
    assert len(rates) == len(set(map(tuple, rates))), "the same grade and rate are shown once"
    below = lines[lines.index(next(line for line in lines if "Replay.items" in line)) + 1]
    assert below == (
        "          train.py:10  self.items.append(item)  "
        "fix: clear it after use, or use deque(maxlen=...)"
    )
    explained = execute([sys.executable, "-m", "memtools", "explain", "--json"], tmp_path).stdout
    (leak,) = json.loads(explained)["leaks"]
    assert leak["made_at"] == (None if options else "data.py:5 in observe")
    assert leak["kept_at"] == "train.py:10 in push"
    assert any(re.match(r"memtools: \w+  list Replay\.items  \+", line) for line in lines[end:])
    assert below in lines[end:]


@pytest.mark.slow
def test_what_a_library_keeps_has_the_line_and_the_advice_of_its_user(tmp_path: Path) -> None:
    write(tmp_path, LOGS)
    said = run(tmp_path, "--no-trace", "train.py").stderr.decode()
    explained = execute([sys.executable, "-m", "memtools", "explain", "--json"], tmp_path).stdout
    (leak,) = json.loads(explained)["leaks"]
    assert leak["holder"] == "list MemoryHandler.buffer"
    assert leak["kept_at"] == "train.py:8 in set_up"
    assert leak["library"] == "logging.handlers.MemoryHandler"
    assert "train.py:8  log.addHandler(" in said
    assert "give the handler a target" in said
    assert "maxlen" not in said
