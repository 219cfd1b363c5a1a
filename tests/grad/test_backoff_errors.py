"""step(): what is no OOM comes out as it is; only a window's own work is tried again."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import memtools
from memtools._base import malloc
from tests.grad.backoffcases import ROWS, batch, loss_of, made
from tests.kit.oominject import TEXT, Inject

# A retry collects cycles: not among all that the other tests have imported.
pytestmark = pytest.mark.usefixtures("frozen")


def values(model: torch.nn.Module) -> list[bytes]:
    return [t.detach().numpy().tobytes() for t in model.state_dict().values()]


def grads(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "index", "phase", "undo"),
    [
        (ValueError("shapes"), 0, "backward", "redo"),
        (ValueError("shapes"), 2, "forward", "scratch"),
        (KeyboardInterrupt("^C"), 0, "forward", "scratch"),
        (KeyboardInterrupt("^C"), 2, "backward", "redo"),
    ],
)
def test_another_exception_comes_out_untouched_and_drops_the_window(error, index, phase, undo):
    acc, model = made(undo=undo, size=4)
    before = acc.report()
    model.inject = Inject(**{phase: {index}}, error=lambda: error)
    with pytest.raises(type(error)) as caught:
        acc.step(batch(), loss_of(model))
    assert caught.value is error
    assert getattr(error, "__notes__", []) == []
    assert (model.inject.forwards, grads(model)) == (index + 1, [])
    assert acc.report() == before
    assert acc._runner.window.empty
    assert acc.step(batch(), loss_of(model)).micro_batches == 4


def test_an_exception_after_a_retry_has_a_note_of_it():
    """BatchNorm cannot work on one row: without the note nobody knows where that came from."""
    acc, model = made(size=2)
    model.inject = Inject(forward={0})
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        acc.step(batch(), loss_of(model))
    (note,) = caught.value.__notes__
    assert "micro-batch 0 of 2 rows, forward: OutOfMemoryError" in note
    assert "continued with 1 row;" in note


def no_norm(**settings):
    acc, model = made(**settings)
    model.norm.eval()  # takes single rows
    return acc, model


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_one_row_that_does_not_fit_raises_the_original_error_with_the_report(phase):
    errors = [torch.OutOfMemoryError(f"{TEXT} {i}") for i in range(9)]
    acc, model = no_norm(size=4)
    model.inject = Inject(**{phase: set(range(9))}, error=lambda: errors.pop(0))
    last = errors[2]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        acc.step(batch(), loss_of(model))
    assert caught.value is last
    first, *notes = caught.value.__notes__
    assert "no smaller micro-batch is possible" in first
    assert [note.partition(" of ")[2][:6] for note in notes] == ["4 rows", "2 rows", "1 row,"]
    assert notes[-1].rpartition(" lost")[0].split("; ")[-2] == "gave up"
    assert (grads(model), acc._runner.window.empty, acc.report().windows) == ([], True, 0)
    assert len(acc.report().retries) == 3
    model.inject = Inject()
    assert acc.step(batch(), loss_of(model)).retries == ()
    assert len(acc.report().retries) == acc.report().ran_out == 3


def test_a_run_that_often_runs_out_of_memory_keeps_the_newest_hundred_retries():
    acc, model = no_norm(size=4)
    model.inject = Inject(forward={0})
    (first,) = acc.step(batch(), loss_of(model)).retries
    acc._runner.totals.keep([first] * 128)
    model.inject = Inject(forward={0})
    (last,) = acc.step(batch(), loss_of(model)).retries
    report = acc.report()
    assert (len(report.retries), report.ran_out) == (100, 130)
    assert report.retries[-1] is last
    assert "Out of memory: 130 times, the newest 100" in str(report)
    acc.load_state_dict(acc.state_dict())
    assert (acc.report().ran_out, acc.report().retries) == (130, ())


def test_an_oom_in_the_optimizer_is_never_tried_again():
    acc, model = made(size=4)
    calls = []

    def step(*args):
        calls.append(1)
        raise torch.OutOfMemoryError(TEXT)

    acc.optimizer.step = step
    with pytest.raises(torch.OutOfMemoryError):
        acc.step(batch(), loss_of(model))
    assert len(calls) == 1
    with pytest.raises(RuntimeError, match=r"reset\(\) drops the window"):
        acc.step(batch(), loss_of(model))
    acc.reset()
    assert acc.report().retries == ()


def test_a_window_of_weight_zero_is_refused_and_dropped():
    acc, model = made(size=4)
    before = values(model)
    with pytest.raises(ValueError, match="weights of this window sum to 0"):
        acc.step(batch(), lambda micro: (model(micro["x"]).sum(), 0))
    assert (grads(model), acc._runner.window.empty) == ([], True)
    model.load_state_dict(model.state_dict())
    assert len(before) == len(values(model))


BAD = {
    "empty": ({"x": torch.empty(0, 6)}, None, ValueError, "empty"),
    "sizes": ((torch.ones(3), torch.ones(4)), None, ValueError, r"batch\[0\] has 3"),
    "no rows": ({"rate": 0.5}, None, ValueError, "has no tensor"),
    "no function": (torch.ones(4, 6), 3, TypeError, "split must be a function"),
    "no parts": (object(), lambda b, s: [], ValueError, "returned no micro-batch"),
    "no list": (
        object(),
        lambda b, s: b,
        TypeError,
        "must return a list of micro-batches, got object",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_changes_nothing(name):
    what, split, error, text = BAD[name]
    acc, model = made(size=4)
    before, report = values(model), acc.report()
    with pytest.raises(error, match=text):
        acc.step(what, loss_of(model), split)
    assert (values(model), acc.report(), acc._runner.window.empty) == (before, report, True)


def test_loss_fn_has_to_be_callable():
    acc, _ = made()
    with pytest.raises(TypeError, match=r"returns \(loss_sum, weight\) or .* got int"):
        acc.step(batch(), 3)


def test_step_refuses_a_window_that_has_begun_by_hand():
    acc, model = made()
    with acc.micro_batch():
        acc.backward(*loss_of(model)(batch()))
    kept = [g.clone() for g in grads(model)]
    with pytest.raises(RuntimeError, match=r"this one has 1 micro-batch already: flush\(\)"):
        acc.step(batch(), loss_of(model))
    assert all(torch.equal(a, b) for a, b in zip(kept, grads(model), strict=True))
    assert acc.flush().micro_batches == 1
    with acc.micro_batch():
        acc.backward(*loss_of(model)(batch()))
        with pytest.raises(RuntimeError, match=r"step\(\) inside a micro-batch"):
            acc.step(batch(), loss_of(model))


class Big:
    """Stands for what a failed pass holds; in a cycle, as frames of a model often are."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("handled", [False, True])
def test_what_a_failed_pass_held_is_gone_before_the_next_try(phase, handled):
    """Its frames hang on the traceback, and on those of what it was raised from."""
    acc, model = made(size=8)
    model.inject = Inject(**{phase: {0}})
    held, alive = [], []

    def inner(micro):
        big = Big()
        held.append(weakref.ref(big))
        loss = loss_of(model)(micro)
        if phase == "backward":
            loss[0].register_hook(lambda grad, big=big: None)
        return loss

    def loss_fn(micro):
        alive.append([ref() is not None for ref in held])
        if not handled:
            return inner(micro)
        try:
            return inner(micro)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("the model failed") from error

    acc.step(batch(), loss_fn)
    assert alive[:2] == [[], [False]]


def test_the_cache_is_emptied_once_after_the_exception_is_gone(monkeypatch):
    import sys

    seen = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(sys.exc_info()))
    acc, model = made(size=8)
    model.inject = Inject(forward={0}, backward={1})
    acc.step(batch(), loss_of(model))
    assert seen == [(None, None, None)] * 2


def test_one_row_is_tried_once_more_after_the_whole_heap_was_collected():
    """A cycle that became old in the failed pass holds what the row needs."""
    acc, model = no_norm(size=1)
    held, tried = [], []

    def loss_fn(micro):
        tried.append(len(micro["x"]))
        if len(tried) == 2:
            big = Big()
            held.append(weakref.ref(big))
            gc.collect()  # it is of the oldest generation now
            raise MemoryError
        assert not [ref for ref in held if ref() is not None]
        return loss_of(model)(micro)

    report = acc.step(batch(rows=3), loss_fn)
    assert tried == [1, 1, 1, 1]
    (retry,) = report.retries
    assert (retry.rows, retry.next_rows) == (1, 1)
    assert "; tried once more after all idle memory was given back; " in str(retry)


def test_the_hosts_malloc_is_set_once_and_only_where_nobody_has_set_it(monkeypatch):
    """Freed blocks in glibc's heap count against a limit; see test_backoff_real.py."""
    calls = []
    monkeypatch.setattr(malloc, "find_serving", lambda: malloc.Serving("glibc", "2", "libc", ()))
    monkeypatch.setattr(malloc, "environment_at_start", dict)
    monkeypatch.setattr(malloc, "_done_here", {})

    def mallopt(name, value):
        calls.append((name, value))
        malloc._done_here[name] = value
        return True

    monkeypatch.setattr(malloc, "mallopt", mallopt)
    for error, want in (
        (torch.OutOfMemoryError(TEXT), []),
        (memtools.BudgetError("pool: asked 2.0 MiB, used 1.0 MiB of 1.5 MiB"), []),
        (MemoryError(), [("mmap_threshold", 1 << 20), ("trim_threshold", 16 << 20)]),
        (RuntimeError("could not create a primitive"), []),  # it is set
    ):
        acc, model = made(size=8)
        model.inject = Inject(forward={0}, error=lambda error=error: error)
        (retry,) = acc.step(batch(), loss_of(model)).retries
        assert calls == want
        assert ("set glibc's mmap_threshold to 1.0 MiB" in str(retry)) == bool(want)
        calls.clear()
    malloc._done_here.clear()
    monkeypatch.setattr(malloc, "environment_at_start", lambda: {"MALLOC_TOP_PAD_": "0"})
    assert not malloc.map_large_blocks()
    monkeypatch.setattr(malloc, "find_serving", lambda: malloc.Serving("musl", None, "libc", ()))
    assert not malloc.map_large_blocks()
    assert malloc.idle()[0] is None
    assert calls == []


def test_under_a_limit_malloc_is_set_before_anything_runs_out(monkeypatch):
    """Else oneDNN may fail first, in a place where it does not look: SIGSEGV."""
    monkeypatch.setattr(
        "memtools._grad.backoff.lowest_limit_of_process", lambda: (900 << 20, "RLIMIT_DATA")
    )
    calls = []
    monkeypatch.setattr(malloc, "map_large_blocks", lambda: calls.append(1) or len(calls) == 1)
    acc, model = made(size=8)
    acc.step(batch(), loss_of(model))
    (note,) = [note for note in acc.report().notes if "RLIMIT_DATA" in note]
    assert note.startswith("RLIMIT_DATA is 900.0 MiB: set glibc's mmap_threshold to 1.0 MiB")
    assert len(calls) == 1
    acc, model = made(size=8)  # somebody has set it by now
    acc.step(batch(), loss_of(model))
    assert not [note for note in acc.report().notes if "RLIMIT_DATA" in note]


@pytest.mark.slow
def test_where_freed_heap_is_in_the_way_the_error_says_so(monkeypatch):
    monkeypatch.setattr(malloc, "map_large_blocks", lambda: False)
    monkeypatch.setattr(malloc, "idle", lambda: (300 << 20, False))
    acc, model = no_norm(size=1)
    model.inject = Inject(forward={0, 1}, error=MemoryError)
    with pytest.raises(MemoryError) as caught:
        acc.step(batch(), loss_of(model))
    assert "malloc keeps 300.0 MiB of freed memory" in caught.value.__notes__[0]


def test_a_large_buffer_that_changes_for_the_first_time_ends_the_window():
    """There is no copy of it, and a wrong retry is worse than none."""
    acc, model = made(size=4)
    model.register_buffer("mask", torch.zeros(1 << 18))
    acc.step(batch(), loss_of(model))
    want = [p.tolist() for p in model.parameters()]
    model.inject = Inject(forward={1})

    def loss_fn(micro):
        model.mask.data[5] += model.inject.forwards
        return loss_of(model)(micro)

    with pytest.raises(RuntimeError, match="the buffer 'mask' changed") as caught:
        acc.step(batch(1), loss_fn)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert (grads(model), acc._runner.window.empty) == ([], True)
    assert want == [p.tolist() for p in model.parameters()]
    model.inject = Inject(forward={1})
    assert len(acc.step(batch(1), loss_fn).retries) == 1


@pytest.mark.slow
@pytest.mark.parametrize("detached", [False, True])
def test_outputs_that_are_kept_with_their_graph_are_named(detached):
    """They keep what the failed passes saved, so the smaller ones fail as well."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 20_000), torch.nn.Tanh(), torch.nn.Linear(20_000, 1)
    )
    acc = memtools.GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))
    outputs_of_mine = []

    def loss_fn(micro):
        output = model(micro)
        outputs_of_mine.append(output.detach() if detached else output)
        raise MemoryError

    with pytest.raises(MemoryError) as caught:
        acc.step(torch.randn(16, 8), loss_fn)
    notes = [note for note in caught.value.__notes__ if "are still held" in note]
    if detached:
        assert notes == []
        return
    (note,) = notes
    # 16, 8, 4, 2, 1 rows, and one once more: 20,000 outputs of tanh each
    size = (16 + 8 + 4 + 2 + 1) * 20_000 * 4 / 2**20
    assert note.startswith(f"memtools: {size:.1f} MiB that earlier passes saved for backward() are")
    assert "outputs_of_mine" in note


class Stubborn(torch.Tensor):
    """A tensor that nothing can be written into."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            raise TypeError("it cannot be written")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_buffer_that_cannot_be_put_back_is_refused_before_memory_runs_out():
    model = torch.nn.Linear(4, 1)
    model.register_buffer("table", torch.ones(3).as_subclass(Stubborn))
    acc = memtools.GradAccumulator(model, torch.optim.SGD(model.parameters(), 0.1))
    before = model.weight.detach().clone()
    sentence = r"the buffer 'table', a Stubborn of layout torch.strided, cannot be restored"
    with pytest.raises(TypeError, match=sentence):
        acc.step(torch.ones(ROWS, 4), lambda x: (model(x).sum(), len(x)))
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("fails", [1, 2])
def test_a_frozen_parameter_without_a_copy_is_refused_in_the_first_window(fails, monkeypatch):
    """As where such parameters take a tenth of the memory or more."""
    monkeypatch.setattr("memtools._grad.undo.memory_of", lambda device: 0.0)
    model = torch.nn.Linear(4, 1)
    model.code = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    acc = memtools.GradAccumulator(model, torch.optim.SGD(model.parameters(), 0.1))

    def loss_fn(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        model.code.data.mul_(0.5).add_(x.mean(0))
        loss = model(x - model.code).square().sum()
        if len(x) == ROWS and x[0, 0] == fails:
            raise MemoryError
        return loss, len(x)

    if fails == 1:
        with pytest.raises(RuntimeError, match=r"'code', which has requires_grad=False and of wh"):
            acc.step(torch.ones(ROWS, 4), loss_fn)
        return
    acc.step(torch.ones(ROWS, 4), loss_fn)
    before = model.code.clone()
    acc.step(torch.full((ROWS, 4), 2.0), loss_fn)
    assert len(acc.report().retries) == 1
    assert torch.equal(model.code, (before / 2 + 2) / 2 + 2), "as in two passes of 8 rows"
