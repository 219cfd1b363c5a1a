"""Arrays of which more and more is resident."""

from __future__ import annotations

import pytest

from memtools._base.pages import Mapping
from memtools._leak.judge import Block
from memtools._monitor import firstwrites
from memtools._monitor.firstwrites import FirstWrites

MIB = 2**20
SIZE, BEGIN = 500 * MIB, 1 << 40
LOOKS = [16, 24, 32, 48, 64, 96, 128]


def seen(
    monkeypatch: pytest.MonkeyPatch, resident: list[float], mapping: float = 1.0, *, is_shared=False
) -> list[tuple[int, Block]]:
    """What the looks find where an array has so many MiB in memory at each, in a mapping that is
    so many times as large."""
    at = {"MiB": 0.0}
    found, arrays = [], FirstWrites()
    size = lambda: round(at["MiB"] * MIB)  # noqa: E731
    whole = Mapping(BEGIN, round(mapping * SIZE), 0, is_shared)
    monkeypatch.setattr(firstwrites, "mappings", lambda: [whole._replace(resident=size())])
    monkeypatch.setattr(firstwrites, "extents", lambda least: [(BEGIN, SIZE)])
    monkeypatch.setattr(firstwrites, "resident_bytes", lambda begin, bytes_: size())
    for step, at["MiB"] in zip(LOOKS, resident, strict=False):
        blocks = arrays.look(step)
        found += [(step, one) for one in blocks]
        if arrays.may_be_new(step, blocks):
            arrays.find(step)
    return found


@pytest.mark.parametrize(
    ("resident", "steps"),
    [
        pytest.param([2, 3, 4, 6, 8, 12, 16], [32, 48, 64, 96, 128], id="evenly"),
        pytest.param([2, 2, 2, 4, 4, 6, 8], [96, 128], id="by large pages"),
        pytest.param([2, 2, 9, 9, 9, 9, 9], [], id="once"),
        pytest.param([2, 3, 4, 4, 4, 4, 4], [32, 48], id="no more"),
        pytest.param([2, 30, 1, 30, 1, 30, 1], [], id="freed each time"),
        pytest.param([2, 3, 4, 500, 500, 500, 500], [32], id="full"),
        pytest.param([500] * 7, [], id="all written from the start"),
        pytest.param([2.0, 2.001, 2.002, 2.003, 2.004, 2.005, 2.006], [], id="too little"),
    ],
)
def test_what_fills_rises_again_and_again(
    monkeypatch: pytest.MonkeyPatch, resident: list[float], steps: list[int]
) -> None:
    assert [step for step, _ in seen(monkeypatch, resident)] == steps


def test_a_block_that_fills_has_its_rate_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = [2.0, 3.0, 4.0, 6.0, 8.0]
    step, first = seen(monkeypatch, resident)[0]
    assert (step, first.rate_bytes, first.since_step) == (32, MIB / 8, 16)
    assert (first.unwritten, first.signal) == (496 * MIB, "resident")
    small = seen(monkeypatch, resident, mapping=2.0)
    assert [step for step, _ in small] == [48, 64], "what is beside it may be what has risen"
    assert small[0][1].since_step == 24
    assert seen(monkeypatch, resident, is_shared=True)[0][1].signal == "shm"
