"""What lived at a peak: blocks by what they were, with names and lines, from contents made up."""

from __future__ import annotations

import pytest

from memtools._base.peak import Large, Layer, Part, PeakContents, Saver, Span
from memtools._blocks.peak import Marked, Spot, contents_of
from tests.blocks.peakcases import (
    BACKWARD,
    BEFORE,
    FORWARD,
    FREED,
    LIVES,
    MIB,
    OPTIMIZER,
    OUTLIVED,
    Contents,
    block,
)

PARAMETER, GRADIENT, STATE, INPUT, BUFFER = 1, 2, 3, 4, 5
SPOTS = {
    1: Spot("model.py:8 in forward", "Net.forward"),
    2: Spot("model.py:9 in forward", "Net.forward"),
    3: Spot("train.py:31", ""),
}


def spot(site: int) -> Spot:
    return SPOTS.get(site, Spot("", ""))


def of(found: Contents, marked: list[Marked] | None = None) -> PeakContents:
    return contents_of(found, marked or [], spot, 3)


def parts(found: Contents, marked: list[Marked] | None = None) -> dict[str, int]:
    return {part.what: part.bytes for part in of(found, marked).parts}


def named(category: int, size: int, name: str, shape: tuple[int, ...] = (2, 2)) -> Marked:
    return Marked(id(name), category, size, "float32", shape, name)


@pytest.mark.parametrize(
    ("one", "what"),
    [
        (block(8, PARAMETER, BEFORE, LIVES), "parameters"),
        (block(8, GRADIENT, BACKWARD, LIVES), "gradients"),
        (block(8, STATE, OPTIMIZER, LIVES), "optimizer state"),
        (block(8, INPUT, backward=FREED), "inputs"),
        (block(8, BUFFER, BEFORE), "buffers"),
        (block(8, backward=FREED), "saved for backward"),
        (block(8, backward=FREED, shape=None), "saved for backward"),
        (block(8, backward=OUTLIVED), "alive after backward"),
        (block(8, INPUT, backward=OUTLIVED), "inputs"),
        (block(8), "other temporaries"),
        (block(8, 0, BACKWARD, BACKWARD), "backward's temporaries"),
        (block(8, 0, BACKWARD, FORWARD), "backward's temporaries"),
        (block(8, 0, OPTIMIZER, OPTIMIZER), "optimizer's temporaries"),
        (block(8, 0, BEFORE, FORWARD), "older than the step"),
        (block(8, shape=None), "not seen"),
    ],
)
def test_a_blocks_life_says_what_it_was(one, what):
    assert parts(Contents([one])) == {what: 8}


def test_what_is_too_small_to_be_listed_counts():
    found = Contents(
        [block(80, PARAMETER, BEFORE)],
        rest=[(10, 0, FORWARD, FREED, True, 5), (7, 0, FORWARD, OUTLIVED, True, 2),
              (6, 0, OPTIMIZER, 0, False, 3), (5, 0, FORWARD, 0, False, 4),
              (3, GRADIENT, BACKWARD, 0, True, 1), (2, 0, BEFORE, 0, False, 1),
              (1, 0, BACKWARD, 0, True, 1)],
    )  # fmt: skip
    assert of(found).parts == (
        Part("parameters", 80, 1),
        Part("saved for backward", 10, 5),
        Part("alive after backward", 7, 2),
        Part("optimizer's temporaries", 6, 3),
        Part("not seen", 5, 4),
        Part("gradients", 3, 1),
        Part("older than the step", 2, 1),
        Part("backward's temporaries", 1, 1),
    )


def test_a_step_is_told_over_its_intervals_by_what_there_was():
    found = of(
        Contents(
            [block(8)],
            intervals=[(0, FORWARD, 105), (4, FORWARD, 116), (9, BACKWARD, 130), (12, 3, 100)],
            layers=[
                (0, FORWARD, 0, True, (0, 3, 0, 0)),
                (0, FORWARD, FREED, True, (5, 10, 20, 0)),
                (0, FORWARD, FREED, False, (0, 3, 1, 0)),
                (0, BACKWARD, 0, True, (0, 0, 9, 0)),
                (PARAMETER, BEFORE, 0, False, (100, 100, 100, 100)),
            ],
        )
    )
    assert found.layers == (
        Layer("parameters", (100, 0, 0, 0)),
        Layer("saved for backward", (5, 8, 8, -21)),
        Layer("backward's temporaries", (0, 0, 9, -9)),
        Layer("other temporaries", (0, 3, -3, 0)),
    )
    assert found.spans == (Span("forward", 2), Span("backward", 1), Span("optimizer", 1))


def test_the_moment_is_told():
    found = of(Contents([block(8)], OPTIMIZER, "aten::_foreach_sqrt", site=3, lost=2))
    assert (found.step, found.peak_bytes, found.lost) == (3, 8, 2)
    assert (found.phase, found.operator, found.line) == (
        "optimizer",
        "aten::_foreach_sqrt",
        "train.py:31",
    )


def test_who_has_saved_is_a_module_or_a_function_with_its_line():
    found = of(
        Contents([
            block(8, backward=FREED), block(9, backward=FREED, site=2),
            block(1, backward=FREED, site=3), block(5, site=1),
            block(4, backward=FREED, site=2, module="Attention"), block(6, backward=OUTLIVED),
        ])
    )  # fmt: skip
    assert found.saved == (
        Saver("Net.forward (model.py:9)", 17, 2),
        Saver("Attention (model.py:9)", 4, 1),
        Saver("train.py:31", 1, 1),
    )


def test_the_largest_have_shapes_and_names():
    marked = [
        named(PARAMETER, 40, "in.weight", (10,)),
        named(PARAMETER, 40, "out.weight", (5, 2)),
        named(GRADIENT, 40, "in.weight", (10,)),
        named(GRADIENT, 40, "out.weight", (5, 2)),
        named(STATE, 30, "exp_avg of in.weight"),
    ]
    known = {"dtype": "", "shape": None}
    found = of(
        Contents([
            block(7, backward=FREED, operator="aten::addmm", shape=(7, 1)),
            block(40, PARAMETER, BEFORE, **known), block(40, PARAMETER, BEFORE, **known),
            block(40, GRADIENT, BACKWARD), block(30, STATE, BEFORE, **known),
            *(block(1) for _ in range(20)),
        ]),
        marked,
    )  # fmt: skip
    assert len(found.largest) == 10
    forward = "model.py:8 in forward"
    assert found.largest[:5] == (
        Large(40, "parameters", "float32", (10,), "in.weight", "aten::mul", forward),
        Large(40, "parameters", "float32", (5, 2), "out.weight", "aten::mul", forward),
        Large(40, "gradients", "float32", (4,), "in.weight or one like it", "aten::mul", forward),
        Large(
            30, "optimizer state", "float32", (2, 2), "exp_avg of in.weight", "aten::mul", forward
        ),
        Large(7, "saved for backward", "float32", (7, 1), "", "aten::addmm", forward),
    )


def test_what_lives_is_named_by_its_address():
    marked = [
        Marked(100 + n, STATE, 8, "float32", (2,), f"exp_avg of {n}.weight") for n in range(9)
    ]
    found = Contents([block(8, STATE), block(8, STATE), block(8, STATE)], addresses=[107, 0, 103])
    names = [one.name for one in of(found, marked).largest]
    assert names == ["exp_avg of 7.weight", "exp_avg of 0.weight or one like it",
                     "exp_avg of 3.weight"]  # fmt: skip


def test_a_module_of_torchs_own_saves_for_the_function_that_calls_it():
    found = contents_of(
        Contents([
            block(9, backward=FREED, module="Sequential.Linear"),
            block(5, backward=FREED, module="Net.Block"),
            block(2, backward=FREED, module="Sequential.Tanh", site=9),
        ]), [], spot, 3, library=frozenset(["Linear", "Tanh"]),
    )  # fmt: skip
    assert [one.where for one in found.saved] == [
        "Net.forward (model.py:8)", "Net.Block (model.py:8)", "Sequential.Tanh"
    ]  # fmt: skip


def test_old_gradients_are_those_of_the_step_before():
    found = Contents([block(8, GRADIENT, BEFORE), block(9, GRADIENT, BACKWARD)])
    assert of(found).old_gradients_bytes == 8


# --- what advice asks for ---


def test_logits_are_what_a_cross_entropy_takes_and_what_is_as_large():
    found = Contents([
        block(400, backward=FREED, operator="aten::_log_softmax", shape=(10, 1000)),
        block(401, operator="aten::addmm", shape=(2, 5, 1000)),
        block(402, 0, BACKWARD, BACKWARD, operator="LogSoftmaxBackward0", shape=(10, 1000)),
        block(403, backward=FREED, operator="aten::mul", shape=(100, 100)),
        block(404, PARAMETER, BEFORE, shape=(10, 1000)),
    ])  # fmt: skip
    assert of(found).logits_bytes == 400 + 401 + 402
    few = Contents([block(400, backward=FREED, operator="aten::_log_softmax", shape=(1000, 10))])
    assert of(few).logits_bytes == 0


def test_passes_that_repeat_are_told_from_layers():
    layers = [named(PARAMETER, 100, f"layers.{n}.weight") for n in range(48)]
    fifty = [block(MIB, backward=FREED, operator="aten::tanh") for _ in range(50)]
    assert of(Contents(fifty), layers[:2]).repeats == 25
    assert of(Contents(fifty), layers).repeats == 1
    assert of(Contents(fifty)).repeats == 50
    few = [*fifty, block(200 * MIB, backward=FREED)]
    assert of(Contents(few), layers[:1]).repeats == 1, "what saves most does not repeat"
    alive = [block(2 * MIB, backward=OUTLIVED, operator="aten::tanh") for _ in range(40)]
    assert of(Contents([*fifty, *alive]), layers[:1]).repeats == 40, "more than what is saved"
    kept = Contents([block(MIB) for _ in range(30)], backward=False)
    assert of(kept).repeats == 30


def test_nothing_is_something_too():
    found = of(Contents([]))
    assert (found.peak_bytes, found.parts, found.largest, found.saved) == (0, (), (), ())
    assert found.repeats == 1
