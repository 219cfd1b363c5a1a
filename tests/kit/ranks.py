"""Jobs of several ranks, each a process of its own, over gloo.

    @ranks(3)                                          # or ranks(1, 3): once in each world
    def test_a_sum(rank: int, world: int) -> None:     # runs in each of three processes
        assert same(sum_of(rank)) == 3                 # what all ranks have alike
        assert every(rank) == [0, 1, 2]                # what each of them has

All tests of a module in one world run one after the other in one job, which imports torch once.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[2]


def run_ranks(module: str, case: str, world: int, folder: Path) -> list[Any]:
    """What each rank of the worker module wrote down for this case."""
    outs = [folder / f"{case}.{rank}" for rank in range(world)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", module, case, str(folder / "rendezvous"), *outs],
        cwd=PROJECT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, ["0"] * world), done.stderr
    return [json.loads(out.read_text()) if out.exists() else None for out in outs]


class Meeting:
    """A place in the program that all ranks come to: none goes on before every other has come
    there or ended, whatever the machine runs first. Made before the ranks are forked: the pipe
    ends once nobody can write to it any more, and an end cannot be missed."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def leave(self) -> None:
        """For a process that does not come."""
        os.close(self._write)

    def come(self) -> None:
        self.leave()
        os.read(self._read, 1)


#: those that the ranks of a job still have before them: two of their own, and one for the case
_MEETINGS: list[Meeting] = []


def meet() -> None:
    """Waits until every rank that has not ended has called this as often. A rank that is to end
    early calls it first: gloo cannot connect to one that has ended, nor end a collective with it,
    so that the others could fail before the place at which they are to find out."""
    _MEETINGS.pop(0).come()


def fork_ranks(
    cases: dict[str, Callable[[int], Any]],
    *,
    ready: Callable[[], None] = lambda: None,
    backends: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """What a worker module does as a program: torch is imported once, and each rank is a child of
    this process. Prints how each ended. A case's backend is gloo unless `backends` has another."""
    case, rendezvous, *outs = sys.argv[1:]
    _MEETINGS[:] = [Meeting() for _ in range(3)]
    ranks = []
    for rank, out in enumerate(outs):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            code = 1
            try:
                ready()
                _work(cases[case], backends.get(case, "gloo"), rank, len(outs), rendezvous, out)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
    for meeting in _MEETINGS:
        meeting.leave()
    print(*(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks))


def _work(
    case: Callable[[int], Any], backend: str, rank: int, world: int, rendezvous: str, out: str
) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )
    meet()  # none begins, and maybe ends, while another still connects to it
    result = case(rank)
    with open(out, "w") as file:
        json.dump(result, file)
    # torch cannot take a broken group apart
    if case.__name__ != "dead" and dist.is_initialized():
        meet()
        dist.destroy_process_group()


# --- tests that run in every rank -----------------------------------------------------------------

_TESTS: dict[tuple[str, int], dict[str, Callable[[int, int], None]]] = {}


class Ended(BaseException):
    """Raised by a test at its end: this rank leaves the job, in which no other test follows."""


def ranks(*worlds: int) -> Callable[[Callable[[int, int], None]], Callable[[int], None]]:
    """Decorate a test that runs in every rank of a job, as `test(rank, world)`."""

    def decorate(test: Callable[[int, int], None]) -> Callable[[int], None]:
        for world in worlds:
            _TESTS.setdefault((test.__module__, world), {})[test.__name__] = test

        @pytest.mark.slow  # each job imports torch
        @pytest.mark.parametrize("world", worlds)
        def in_every_rank(world: int) -> None:
            found = _results(test.__module__, world)
            for rank, ends in enumerate(found):
                end = ends.get(test.__name__, "not reached: an earlier test failed")
                assert end == "", f"rank {rank} of {world}: {end}"

        in_every_rank.__name__, in_every_rank.__doc__ = test.__name__, test.__doc__
        return in_every_rank

    return decorate


@functools.cache
def _results(module: str, world: int) -> list[dict[str, str]]:
    """How each test ended, by rank: "" or a traceback."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"out.{rank}" for rank in range(world)]
        command = [sys.executable, "-W", "error", "-m", __name__, module, f"{folder}/rendezvous"]
        done = subprocess.run(
            [*command, *map(str, outs)], cwd=PROJECT, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        lost = {"": done.stderr}
        return [json.loads(out.read_text()) if out.exists() else lost for out in outs]


def every(value: Any) -> list[Any]:
    """What each rank calls this with. A collective."""
    import torch.distributed as dist

    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def same(value: Any) -> Any:
    """The value, with which all ranks call this. A collective."""
    found = every(value)
    assert found == [value] * len(found)
    return value


def _run_tests() -> None:
    """The program of `_results()`."""
    module = sys.argv.pop(1)
    _, *outs = sys.argv[1:]
    importlib.import_module(module)
    import torch

    torch.optim.SGD([torch.ones(1, requires_grad=True)])  # what torch imports late

    def tests(rank: int) -> Any:
        ends: dict[str, str] = {}
        for name, test in _TESTS[module, len(outs)].items():
            torch.manual_seed(3)
            ends[name] = ""
            try:
                test(rank, len(outs))
            except BaseException as error:
                if not isinstance(error, Ended):
                    ends[name] = traceback.format_exc()
                Path(outs[rank]).write_text(json.dumps(ends))
                os._exit(0)  # the others find out at their next collective
        return ends

    def ready() -> None:
        import gc

        torch.set_num_threads(1)
        gc.collect()
        gc.freeze()  # a retry collects cycles: not among all that was imported

    sys.argv[1:1] = ["tests"]
    fork_ranks({"tests": tests}, ready=ready)


if __name__ == "__main__":
    importlib.import_module("tests.kit.ranks")._run_tests()
