"""Calls of memtools._core.Blocks, good and bad, for tests/meta/test_leaks.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memtools import _core
from tests.kit.refusals import refused

LIBRARIES = ("/usr/", "<")


def started() -> _core.Blocks:
    blocks = _core.Blocks()
    blocks.start(LIBRARIES)
    return blocks


def traced() -> None:
    blocks = started()
    blocks.trace(True)
    first = blocks.turn()
    kept = [torch.zeros(100) for _ in range(3)]
    for site, _, _ in blocks.sites(first, blocks.turn()):
        blocks.frames(site)
    blocks.site_of(kept[0].data_ptr())
    blocks.stop()


def recorded() -> None:
    """A recording of all phases, with marks."""
    blocks = started()
    weight = torch.ones(10, 10, requires_grad=True)
    blocks.record(True)
    kept = [torch.zeros(n) for n in range(100, 110)]
    (weight @ weight).sum().backward()
    optimizer = torch.optim.SGD([weight], momentum=0.1)
    optimizer.step()
    blocks.mark([(t.untyped_storage().data_ptr(), 400) for t in (weight, *kept)], 1)
    blocks.record(False)
    blocks.contents()
    blocks.stop()


def two_at_a_time() -> None:
    first, second = recording(), started()
    refused(RuntimeError, lambda: second.record(True))
    first.stop()


def recording() -> _core.Blocks:
    blocks = started()
    blocks.record(True)
    return blocks


def with_started(call: Callable[[_core.Blocks], object]) -> Callable[[], None]:
    def run() -> None:
        call(started())

    return run


def wrong(error: type[BaseException], call: Callable[[Any], object]) -> Callable[[], None]:
    return with_started(lambda blocks: refused(error, lambda: call(blocks)))


CASES: dict[str, list[Callable[[], object]]] = {
    "Blocks": [_core.Blocks],
    "Blocks.__new__": [_core.Blocks],
    "Blocks.start": [
        started,
        lambda: started().start(()),
        lambda: refused(TypeError, lambda: _core.Blocks().start((1,))),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: _core.Blocks().start(3)),  # type: ignore[arg-type]
    ],
    "Blocks.stop": [with_started(lambda blocks: blocks.stop()), lambda: _core.Blocks().stop()],
    "Blocks.trace": [traced, lambda: refused(RuntimeError, lambda: _core.Blocks().trace(True))],
    "Blocks.turn": [
        with_started(lambda blocks: blocks.turn()),
        lambda: refused(RuntimeError, lambda: _core.Blocks().turn()),
    ],
    "Blocks.sites": [traced, wrong(TypeError, lambda blocks: blocks.sites("x", 1))],
    "Blocks.frames": [
        traced,
        with_started(lambda blocks: blocks.frames(1 << 40)),
        wrong(TypeError, lambda blocks: blocks.frames("x")),
    ],
    "Blocks.site_of": [
        traced,
        with_started(lambda blocks: blocks.site_of(0)),
        wrong(OverflowError, lambda blocks: blocks.site_of(-1)),
    ],
    "Blocks.highest": [
        with_started(lambda blocks: blocks.highest()),
        lambda: refused(RuntimeError, lambda: _core.Blocks().highest()),
    ],
    "Blocks.record": [
        recorded,
        recording,
        lambda: refused(RuntimeError, lambda: _core.Blocks().record(True)),
        two_at_a_time,
    ],
    "Blocks.mark": [
        recorded,
        wrong(RuntimeError, lambda blocks: blocks.mark([], 1)),
        lambda: refused(ValueError, lambda: recording().mark([(1, 2)], 9)),
        lambda: refused(TypeError, lambda: recording().mark([(1, 2), (1, "x")], 1)),  # type: ignore[list-item]
    ],
    "Blocks.contents": [
        recorded,
        lambda: recording().contents(),
        with_started(lambda blocks: blocks.contents()),
        lambda: refused(RuntimeError, lambda: _core.Blocks().contents()),
    ],
}
for _name in ["is_on", "in_use", "peak", "missed"]:
    CASES[f"Blocks.{_name}"] = [
        with_started(lambda blocks, name=_name: getattr(blocks, name)),  # type: ignore[misc]
        lambda name=_name: getattr(_core.Blocks(), name),  # type: ignore[misc]
    ]


def contents() -> _core.Contents:
    found = recording().contents()
    assert found is not None
    return found


CASES["Contents"] = [contents, lambda: refused(TypeError, lambda: _core.Contents([1]))]
for _name in set(vars(_core.Contents)) - {"__doc__", "__module__"}:
    CASES[f"Contents.{_name}"] = [lambda name=_name: getattr(contents(), name)]  # type: ignore[misc]
