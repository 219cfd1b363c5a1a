"""A trace that a record keeps: short, with the same peaks after changes, and not trusted."""

from __future__ import annotations

import base64
import random
import zlib

import pytest
import torch

from memtools._base.peak import AFTER, INTERVALS, OLDER, OTHERS, PARAMETERS, TracedPeak
from memtools._blocks import kept as module
from memtools._blocks.changes import DEL, offered, together
from memtools._blocks.kept import LEAST, MOST, kept, restored
from memtools._blocks.lifetimes import Life, Op, Trace
from memtools._blocks.stacked import stacked
from memtools._record import kinds
from memtools._record.kinds import Peak
from memtools._record.peaks import stack_from
from memtools._record.redact import _redacted_data
from tests.blocks.test_changes import trained
from tests.blocks.test_lifetimes import traced


def highest(trace: Trace) -> int:
    return trace.peak(trace.steps[-1])[1]


@pytest.mark.parametrize("late", [False, True])
def test_changes_bring_the_same_after_it_was_kept(late: bool) -> None:
    trace = traced(trained(late=late))
    again, _ = restored(kept(trace, {}))
    names = [one.name for one in offered(trace)]
    assert [one.name for one in offered(again)] == names
    for changes in ([], *([name] for name in names), ["checkpoint:blocks", "micro-batches:2"]):
        expected = highest(together(trace, changes, {}))
        assert highest(together(again, changes, {})) == pytest.approx(expected, rel=1e-3)


def test_where_a_del_ends_lives_is_kept_too() -> None:
    lives = (
        Life(0, 1000, 0, 1, 4, "forward", "other temporaries"),
        Life(1, 3000, 2, 3, 4, "forward", "other temporaries"),
        Life(2, 1, 1, 1, 4, "forward", "other temporaries"),
    )
    reads = ((0,), (0, 2), (1,), (1,))
    ops = [Op("aten.mm", "forward", "", (), one) for one in reads]
    ops[3] = ops[3]._replace(scratch=500, others=7)
    trace = Trace(lives, tuple(ops))
    again, deaths = restored(kept(trace, {0: 2, 2: 2}))
    assert [(op.scratch, op.others) for op in again.ops[-1:]] == [(500, 7)]
    layers, _ = stacked(again)
    assert [one.what for one in layers] == ["other temporaries", "older than the step", "not seen"]
    assert highest(again) == pytest.approx(4508, rel=1e-3)
    assert highest(together(again, [DEL], deaths)) == pytest.approx(3508, rel=1e-3)


def test_what_an_earlier_step_has_kept_is_older_than_the_step() -> None:
    """As in a recorded step, whose table is shown beside it."""
    lives = (
        Life(0, 7, 0, 1, None, "forward", AFTER),
        Life(1, 9, 0, 3, None, "between", PARAMETERS),
        Life(2, 5, 2, 3, None, "forward", AFTER),
    )
    ops = tuple(Op("aten.mm", "forward", "", (), ()) for _ in range(4))
    layers, _ = stacked(Trace(lives, ops, (0, 2)))
    assert {one.what: one.changes for one in layers} == {
        PARAMETERS: (9, 0), AFTER: (5, 0), OLDER: (7, 0),
    }  # fmt: skip


def test_two_changes_come_as_they_are_predicted_together() -> None:
    again, _ = restored(kept(traced(trained()), {}))
    predicted = highest(together(again, ["micro-batches:2", "checkpoint:blocks"], {}))
    real = highest(traced(trained(is_checkpointed=True, parts=2)))
    assert predicted == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ["fused", "del"],
            "there is no change 'del' of this step: the names are autocast, checkpoint:blocks, "
            "zero_grad, fused, micro-batches:2, micro-batches:4, micro-batches:8",
        ),
        (["micro-batches:2", "micro-batches:4"], "micro-batches may be given once"),
    ],
)
def test_what_cannot_be_replayed_is_refused(names: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        together(traced(trained()), names, {})


def test_a_step_over_time_has_its_peak_and_its_phases() -> None:
    trace = traced(trained(late=True))
    for changed in (trace, together(trace, ["micro-batches:4"], {})):
        layers, spans = stacked(changed)
        stack = stack_from(layers, spans)
        assert stack is not None
        assert sum(row[stack.highest] for _, row in stack.rows) == highest(changed)
        assert [span.phase for span in spans] == ["forward", "backward", "optimizer"]
        assert 100 < sum(span.intervals for span in spans) <= INTERVALS
        parameters = sum(one.bytes for one in changed.lives if one.category == PARAMETERS)
        assert dict(stack.rows)[PARAMETERS] == (parameters,) * INTERVALS


def test_a_trace_that_is_too_long_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced(trained())
    text = "".join(kept(trace, {}))
    monkeypatch.setattr(module, "MOST", len(text) - 1)
    coarser = "".join(kept(trace, {}))  # without storages that take little
    assert 0 < len(coarser) < len(text)
    monkeypatch.setattr(module, "MOST", 10)
    assert kept(trace, {}) == ()


def test_it_fits_into_an_event_of_a_record_beside_all_else() -> None:
    text = "".join(random.Random(1).choices("`~{|}abc", k=MOST))
    parts = tuple(text[i : i + 2000] for i in range(0, MOST, 2000))
    peak = Peak(3, 1, traced=TracedPeak(1, kept=parts))
    assert len(kinds.payload("peak", peak)) < 42 << 10  # of 64 KiB that an event may have
    read, _ = kinds.read("peak", kinds.payload("peak", peak))
    assert isinstance(read, Peak)
    assert read.traced is not None
    assert "".join(read.traced.kept) == text
    assert _redacted_data(read).traced.kept == ()  # type: ignore[attr-defined]


def test_a_text_that_was_changed_is_refused_or_read() -> None:
    text, chance = "".join(kept(traced(trained()), {})), random.Random(7)
    plain = zlib.decompress(base64.b85decode(text))
    for _ in range(300):
        data = bytearray(plain)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        packed = base64.b85encode(zlib.compress(bytes(data[: chance.randint(1, len(data))])))
        try:
            trace, deaths = restored(packed.decode())
            highest(together(trace, [DEL] if deaths else [], deaths))
        except ValueError:
            pass
    whole = zlib.compress(plain)
    for wrong in (
        b"",
        whole[:-40],
        whole[:-4],
        zlib.compress(b"1234{}"),
        zlib.compress(bytes(1 << 24)),
    ):
        with pytest.raises(ValueError, match="its trace cannot be read"):
            restored(base64.b85encode(wrong).decode())
    for wrong in ("abc", "é"):
        with pytest.raises(ValueError, match="its trace cannot be read"):
            restored(wrong)


@pytest.mark.parametrize(
    "life",
    [
        Life(0, -1, 0, 1, 2, "forward", OTHERS),
        Life(0, True, 0, 1, 2, "forward", OTHERS),
        Life(0, 1, 0, 2, 2, "forward", OTHERS),
        Life(0, 1, 0, 1, 2, "forward", OTHERS, shape=(-4,)),
    ],
    ids=["bytes below 0", "bytes that are no number", "used after the end", "shape below 0"],
)
def test_impossible_numbers_are_refused(life: Life) -> None:
    ops = tuple(Op("aten.mm", "forward", "", (), (0,)) for _ in range(2))
    with pytest.raises(ValueError, match="its trace cannot be read"):
        restored([module._text(Trace((life,), ops), {})])


def test_a_small_batch_is_kept_for_the_number_of_its_rows() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(9, 64), torch.nn.Linear(64, 8192))
    trace = traced(lambda: model(torch.randint(9, (2,))).sum().backward())
    assert LEAST[0] * trace.peak()[1] > 2 * 8, "an input that is left out by its size"
    names = {one.name for one in offered(restored(kept(trace, {}))[0])}
    assert "micro-batches:2" in names
    assert "micro-batches:4" not in names
