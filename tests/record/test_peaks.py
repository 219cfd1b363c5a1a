"""What is said of the peak of a step: its sentence, the largest blocks, and one advice that follows
the moment."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtools import read_record
from memtools._base.peak import (
    PARTS,
    Large,
    Layer,
    Lowered,
    Part,
    PeakContents,
    Saver,
    Span,
    TracedPeak,
)
from memtools._leak.finding import LeakFinding
from memtools._record import peaks
from memtools._record.figures import Figures, figures_of
from memtools._record.kinds import Peak, payload
from memtools._record.summary import summary_json, summary_lines
from memtools.report._advice import advise
from memtools.report._explain import explain
from tests.report.reportcases import MIB, write


def peak(phase: str, parts: dict[str, float], **more: object) -> Peak:
    """A peak of these parts, in MiB."""
    found = tuple(Part(what, int(size * MIB), 1) for what, size in parts.items())
    total = sum(part.bytes for part in found)
    return Peak(step=3, peak_bytes=total, phase=phase, parts=found,
                **{"backward": True, **more})  # type: ignore[arg-type]  # fmt: skip


MODEL = {"optimizer state": 41.6, "parameters": 20.8, "gradients": 20.8}
BLOCK = (Saver("Block.forward (gpt.py:31)", 40 * MIB, 12),)
FUSED, NO_GRAD, CHUNKS = "fused=True", "run it under torch.no_grad()", "smaller chunks of rows"
CHECKPOINT = "most of it by Block.forward (gpt.py:31): recompute it with torch.utils.checkpoint"
DETACH, SMALLER = "detach() what is kept or passed on", "use smaller micro-batches (memtools"
KEPT = "that are not part of the model take 20.0 MiB"
OLD = "optimizer.zero_grad() right after optimizer.step()"
ALIVE = "20.0 MiB are alive after the backward pass: "
MODEL_ITSELF = "each step needs them: use fewer parameters, lower precision"


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (peak("optimizer", {**MODEL, "optimizer's temporaries": 32}), FUSED),
        (peak("optimizer", {**MODEL, "optimizer's temporaries": 1}), MODEL_ITSELF),
        (peak("forward", {**MODEL, "saved for backward": 4}), MODEL_ITSELF),
        (peak("backward", {"saved for backward": 66, "optimizer state": 19}, logits_bytes=47 * MIB),
         CHUNKS),
        (peak("backward", {"saved for backward": 66, "inputs": 19}, saved=BLOCK), CHECKPOINT),
        (peak("forward", {**MODEL, "saved for backward": 66}, saved=BLOCK,
              old_gradients_bytes=20 * MIB), OLD),
        (peak("forward", {**MODEL, "saved for backward": 66}, saved=BLOCK,
              old_gradients_bytes=10 * MIB), CHECKPOINT),
        (peak("forward", {"saved for backward": 66, "inputs": 19}, saved=BLOCK), CHECKPOINT),
        (peak("backward", {"saved for backward": 15, "parameters": 4}, saved=BLOCK, repeats=50),
         DETACH),
        (peak("backward", {"backward's temporaries": 20, "optimizer state": 19}), SMALLER),
        (peak("forward", {"other temporaries": 20, "parameters": 1}, backward=False, repeats=50),
         NO_GRAD),
        (peak("forward", {"other temporaries": 20, "parameters": 1}, backward=False), SMALLER),
        (peak("forward", {"older than the step": 20, "saved for backward": 9}), KEPT),
        (peak("backward", {"alive after backward": 20, "saved for backward": 9}), f"{ALIVE}del or"),
        (peak("backward", {"alive after backward": 20}, repeats=50), DETACH),
        (peak("backward", {"alive after backward": 8, "saved for backward": 9}, saved=BLOCK),
         CHECKPOINT),
        (peak("forward", {"not seen": 20, "parameters": 1}), ""),
    ],
)  # fmt: skip
def test_advice_follows_the_moment(one, said):
    text = peaks.advice(one)
    assert said in text
    assert bool(text) == bool(said)
    others = {FUSED, NO_GRAD, CHUNKS, CHECKPOINT, DETACH, SMALLER, MODEL_ITSELF, OLD, KEPT} - {said}
    assert not any(other in text for other in others)


HF, GRPO = "transformers.trainer.Trainer", "trl.trainer.grpo_trainer.GRPOTrainer"
LIGHTNING = "lightning.pytorch.trainer.trainer.Trainer"
LOGITS = {"logits_bytes": 47 * MIB}
BATCH = "per_device_train_batch_size divided by 2 and gradient_accumulation_steps multiplied by 2"


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (peak("optimizer", {"optimizer's temporaries": 32}, trainer=HF), "adamw_torch_fused"),
        (peak("backward", {"saved for backward": 66}, trainer=HF, **LOGITS), "chunked_loss=True"),
        (peak("backward", {"saved for backward": 66}, trainer=HF, **LOGITS), BATCH),
        (peak("backward", {"saved for backward": 66}, trainer=HF), "gradient_checkpointing=True"),
        (peak("backward", {"backward's temporaries": 20}, trainer=HF), BATCH),
        (peak("backward", {"backward's temporaries": 20}, trainer=HF), "memtools.use(trainer)"),
        (peak("backward", {"backward's temporaries": 20}, trainer=GRPO), "generation_batch_size"),
        (peak("backward", {"backward's temporaries": 20}, trainer=LIGHTNING),
         "Trainer(accumulate_grad_batches=2)"),
        (peak("forward", {"other temporaries": 20}, backward=False, of="evaluate", trainer=HF),
         "per_device_eval_batch_size"),
        (peak("forward", {"other temporaries": 20}, backward=False, of="evaluate", repeats=50),
         "smaller batches in evaluate"),
    ],
)  # fmt: skip
def test_advice_is_the_option_of_the_trainer_that_made_the_step(one, said):
    text = peaks.advice(one)
    assert said in text
    assert "memtools accumulates" not in text
    assert ("memtools.use" in text) <= ("lightning" not in one.trainer)


def test_changes_are_options_of_the_trainer_each_once():
    lowered = [Lowered(name, size, name) for size, name in enumerate(
        ("linear_cross_entropy", "chunks:8", "micro-batches:4", "zero_grad"), 1)]  # fmt: skip
    one = peak("backward", {"saved for backward": 66}, traced=TracedPeak(changes=tuple(lowered)))
    assert [row[3] for row in peaks.changes(one)] == [each.name for each in lowered]
    texts = [row[3] for row in peaks.changes(dataclasses.replace(one, trainer=HF))]
    assert len(texts) == 3
    assert texts[0].startswith("memtools.use(trainer, chunked_loss=True)")
    assert texts[1].startswith("per_device_train_batch_size divided by 4")
    assert texts[2] == "zero_grad"  # the trainer has no option for it


OLDER_MEANS = (
    '"older than the step" means: allocated before the step began, and not part of the model, '
    "its gradients or the optimizer"
)
UNSEEN_MEANS = '"not seen" means: used inside an operator, by no tensor'


def test_blocks_that_read_the_same_are_told_in_one_line(tmp_path):
    old = Large(256 * 1024, "older than the step", "", (), "", "", "")
    made = old._replace(line="train.py:30 in forward")
    largest = (PEAK.largest[0], old, made, old, old, made)
    one = peak("forward", {"older than the step": 20}, largest=largest)
    assert peaks.lines(figures_of(read_record(recorded(tmp_path, one))))[1:] == [
        "largest:",
        "  16.0 MiB float32 [2048, 2048]: parameters, 0.weight",
        "  3 x 256.0 KiB: older than the step",
        "  2 x 256.0 KiB: older than the step, train.py:30 in forward",
        OLDER_MEANS,
    ]


def test_what_fills_a_peak_by_many_small_blocks_has_a_line(tmp_path):
    parts = (Part("older than the step", 30 * MIB, 3616), Part("not seen", 2 * MIB, 9))
    one = dataclasses.replace(PEAK, parts=parts, peak_bytes=32 * MIB, largest=PEAK.largest[:1])
    assert peaks.lines(figures_of(read_record(recorded(tmp_path, one))))[-3:] == [
        "  older than the step: 30.0 MiB in 3,616 blocks, none larger than these",
        OLDER_MEANS,
        UNSEEN_MEANS,
    ]


PEAK = peak(
    "optimizer",
    {**MODEL, "optimizer's temporaries": 32, "inputs": 0.1},
    operator="aten::_foreach_sqrt",
    line="train.py:31 in main",
    largest=(
        Large(16 * MIB, "parameters", "float32", (2048, 2048), "0.weight", "", ""),
        Large(16 * MIB, "optimizer's temporaries", "float32", (2048, 2048), "", "aten::sqrt",
              "train.py:31 in main"),
        Large(5, "not seen", "", (), "", "", ""),
    ),
)  # fmt: skip
HEADLINE = (
    "Peak of step 3, the only step of 2,999 that was recorded: 115.3 MiB of tensors, in the "
    "optimizer's step (aten::_foreach_sqrt, train.py:31): optimizer state 41.6 MiB, "
    "parameters 20.8 MiB, gradients 20.8 MiB, its temporaries 32.0 MiB"
)


def recorded(tmp_path: Path, *found: Peak) -> str:
    return write(
        str(tmp_path / "run.mem"), events=[("peak", payload("peak", one)) for one in found]
    )  # type: ignore[misc]


def test_names_of_a_peak_are_made_harmless(tmp_path):
    odd = "\x1b[2J\u202e"
    one = dataclasses.replace(
        peak("forward", {"saved for backward": 66}),
        operator=odd, line=odd, largest=(Large(5, odd, odd, (1,), odd, odd, odd),),
        saved=(Saver(odd, 40 * MIB, 1),),
    )  # fmt: skip
    figures = figures_of(read_record(recorded(tmp_path, one)))
    text = "".join([*peaks.lines(figures), peaks.advice(one)])
    assert "saved for backward by: \\x1b" in text
    assert text.isprintable()


def test_explain_tells_the_highest_peak_with_its_blocks_and_what_to_do(tmp_path):
    lower = dataclasses.replace(PEAK, step=1000, peak_bytes=100 * MIB)
    figures = figures_of(read_record(recorded(tmp_path, PEAK, lower)))
    text = explain(figures)
    told = text.partition("Peak of a step\n")[2].partition("\n\n")[0].splitlines()
    highest = "the highest of 2 recorded steps (3 to 1,000 of 2,999)"
    assert told == [
        f"  {HEADLINE}".replace("the only step of 2,999 that was recorded", highest),
        "  largest:",
        "    16.0 MiB float32 [2048, 2048]: parameters, 0.weight",
        "    16.0 MiB float32 [2048, 2048]: optimizer's temporaries, aten::sqrt, "
        "train.py:31 in main",
        "    5 B: not seen",
        f"  {UNSEEN_MEANS}",
    ]
    assert peaks.advice(PEAK) in advise(figures)
    assert f"- {peaks.advice(PEAK)}" in text


LEAK = LeakFinding("likely", "heap", rate_bytes=2**20, holder="list losses", kind="list",
                   first_step=500, advice="clear it")  # fmt: skip
CACHE = peak("forward", {"older than the step": 100, "saved for backward": 9})
OF_LEAK = " (the leak has added more since)"


def run_with(tmp_path: Path, *found: Peak | LeakFinding, base: int = 300 * MIB) -> Figures:
    """A run of 2,999 steps, in which these steps were recorded and these findings said."""
    events = [
        ("finding", payload("finding", one)) if isinstance(one, LeakFinding)
        else ("peak", payload("peak", one))
        for one in found
    ]  # fmt: skip
    return figures_of(read_record(write(str(tmp_path / "run.mem"), events=events, base=base)))


def test_a_leak_that_is_called_comes_before_the_advice_about_the_peak(tmp_path):
    """A newcomer's run leaked to its last step 450, and was told of the peak of step 129, and to
    look for what lived then: the very list that the advice above it names."""
    for one in (PEAK, CACHE):
        figures = run_with(tmp_path, one, LEAK)
        assert peaks.lines(figures)[0].endswith(OF_LEAK)
        assert advise(figures) == []
        assert figures.as_json()["peak_of_step"]["advice"] == ""


def test_what_the_workers_leak_is_no_part_of_the_peak(tmp_path):
    figures = run_with(tmp_path, PEAK, dataclasses.replace(LEAK, signal="children"))
    assert not peaks.lines(figures)[0].endswith(OF_LEAK)
    assert peaks.to_do(figures) == [peaks.advice(PEAK)]


def test_a_peak_at_the_last_step_has_all_that_the_leak_keeps(tmp_path):
    last = dataclasses.replace(PEAK, step=2999)
    assert "on top" not in peaks.lines(run_with(tmp_path, last, LEAK))[0]


def test_what_is_kept_from_before_the_step_needs_no_advice_where_its_holder_is_named(tmp_path):
    fills = dataclasses.replace(LEAK, grade="fills", holder="dict Dataset.cache", kind="dict")
    nobody = dataclasses.replace(LEAK, holder="", kind="", advice="take a census")
    assert KEPT.replace("20.0", "100.0") in peaks.to_do(run_with(tmp_path, CACHE))[0]
    assert peaks.to_do(run_with(tmp_path, CACHE, fills)) == []
    assert KEPT.replace("20.0", "100.0") in peaks.to_do(run_with(tmp_path, CACHE, nobody))[0]


def test_little_that_is_kept_from_before_the_step_is_no_advice_in_a_clean_run(tmp_path):
    assert peaks.to_do(run_with(tmp_path, CACHE, base=900 * MIB))
    assert not peaks.to_do(run_with(tmp_path, CACHE, base=1100 * MIB))
    killed = write(str(tmp_path / "killed.mem"), events=[("peak", payload("peak", CACHE))],
                   base=1100 * MIB, close=False)  # type: ignore[list-item]  # fmt: skip
    assert peaks.to_do(figures_of(read_record(killed)))


def test_who_saves_for_the_backward_pass_is_told(tmp_path):
    one = peak("backward", {"saved for backward": 60, "parameters": 20}, saved=BLOCK)
    figures = figures_of(read_record(recorded(tmp_path, one)))
    assert peaks.lines(figures)[1] == "saved for backward by: Block.forward (gpt.py:31) 40.0 MiB"


def test_the_summary_has_it_in_a_line_and_as_json(tmp_path):
    figures = figures_of(read_record(recorded(tmp_path, PEAK)))
    lines = list(summary_lines(figures))
    assert lines[lines.index(HEADLINE) + 1] == f"fix: {peaks.advice(PEAK)}"
    found = json.loads(json.dumps(summary_json(figures)))["peak_of_step"]
    assert found["parts"]["optimizer state"] == int(41.6 * MIB)
    assert found["largest"][0]["name"] == "0.weight"
    assert found["advice"] == peaks.advice(PEAK)
    assert found["steps_looked_at"] == [3]
    assert json.loads(json.dumps(figures.as_json()))["peak_of_step"] == found


def test_a_small_peak_is_told_where_somebody_asks(tmp_path):
    small = peak("optimizer", {"parameters": 2, "optimizer's temporaries": 2})
    figures = figures_of(read_record(recorded(tmp_path, small)))
    assert "Peak of step 3, the only step of 2,999 that was recorded: 4.0 MiB of tensors" in (
        explain(figures)
    )
    assert not any("fused" in line for line in advise(figures))
    assert not any("Peak of step" in line for line in summary_lines(figures))


def test_why_nothing_was_recorded_is_told(tmp_path):
    figures = figures_of(read_record(recorded(tmp_path, Peak(why="the shim is not built"))))
    assert (
        "the tensors at the peak are unknown: nothing was recorded, because the shim is not built"
    ) in (explain(figures))
    assert summary_json(figures)["peak_of_step"] is None


def test_a_record_without_it_says_nothing_of_it(tmp_path):
    figures = figures_of(read_record(recorded(tmp_path)))
    assert "Peak of a step" not in explain(figures)


STEP = dataclasses.replace(
    PEAK,
    layers=(
        Layer("parameters", (10, 0, 0, 0)),
        Layer("saved for backward", (0, 7, 13, -20)),
        Layer("optimizer's temporaries", (0, 0, 0, 19)),
    ),
    spans=(Span("forward", 2), Span("backward", 1), Span("optimizer", 1)),
)


def test_a_step_is_told_over_time(tmp_path):
    read = peaks.peak_of(read_record(recorded(tmp_path, STEP)))
    assert read == STEP
    stack = peaks.stack_of(STEP)
    assert stack is not None
    assert stack.rows == (
        ("parameters", (10, 10, 10, 10)),
        ("saved for backward", (0, 7, 20, 0)),
        ("optimizer's temporaries", (0, 0, 0, 19)),
    )
    assert (stack.spans, stack.highest) == (STEP.spans, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": ()},
        {"spans": ()},
        {"spans": (Span("forward", 5),)},
        {"spans": (Span("forward", -1), Span("backward", 5))},
        {"spans": (Span("forward", 0), Span("backward", 4))},
        {"layers": (Layer("parameters", (1, 0, 0, 0)), Layer("inputs", (1, 0, 0)))},
        {"layers": (Layer("parameters", (1, 0, -2, 5)),)},
        {"layers": (Layer("a", (1,) * 129),), "spans": (Span("forward", 129),)},
    ],
)
def test_a_step_that_cannot_be_is_not_told_over_time(wrong):
    assert peaks.stack_of(dataclasses.replace(STEP, **wrong)) is None


@given(
    st.lists(st.builds(Layer, st.text(max_size=3), st.lists(st.integers(-3, 9)).map(tuple))),
    st.lists(st.builds(Span, st.text(max_size=3), st.integers(-1, 3))),
)
def test_whatever_a_record_has_is_told_over_time_or_not(layers, spans):
    stack = peaks.stack_of(dataclasses.replace(PEAK, layers=tuple(layers), spans=tuple(spans)))
    if stack is not None:
        columns = sum(span.intervals for span in stack.spans)
        assert all(len(row) == columns and min(row) >= 0 for _, row in stack.rows)
        assert 0 <= stack.highest < columns


def test_the_largest_payload_is_far_below_what_a_record_keeps_of_one():
    long = "\U0001f600" * 160
    full = PeakContents(
        2**40, 2**50, 2**50, "optimizer", long, long, True,
        tuple(Part("optimizer's temporaries", 2**50, 2**40) for _ in range(10)),
        tuple(Saver(long, 2**50, 2**40) for _ in range(5)),
        tuple(Large(2**50, "saved for backward", long, (2**40,) * 8, long, long, long)
              for _ in range(10)),
        2**50, 2**40, 2**50, 2**40, 1e9,
        tuple(Layer(what, (2**50 // len(PARTS),) * 128) for what in PARTS),
        tuple(Span("optimizer", 128) for _ in range(64)),
    )  # fmt: skip
    assert len(payload("peak", full)) < 60_000
