"""Changes of a program that lower its peak: what is offered, and that it comes as predicted."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memtools._base.peak import Lowered, Remedy, TracedPeak
from memtools._blocks.changes import changes_of, offered, together
from memtools._blocks.kept import kept, restored
from memtools._blocks.lifetimes import Life, Op, Trace
from memtools._blocks.losses import head_of
from memtools._blocks.replay import checkpointed, in_micro_batches, repeated_blocks, replay
from tests.blocks.test_lifetimes import above, measured, traced


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(64), nn.Linear(64, 512), nn.Linear(512, 64),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.narrow(functional.gelu(self.wide(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(64, 8)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x)


def trained(
    *, rows: int = 256, parts: int = 1, is_checkpointed: bool = False, late: bool = False
) -> Callable[[], object]:
    """A step; `late`: gradients of the step before live until the forward pass is over."""
    torch.manual_seed(3)
    tower = Tower(is_checkpointed)
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.01)

    def step() -> None:
        x = torch.randn(rows, 64)
        if late and parts == 1:
            loss = tower(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
        else:
            optimizer.zero_grad()
            for part in x.chunk(parts):
                loss = tower(part).square().mean() / parts
                loss.backward()
        optimizer.step()

    return step


def highest(trace: Trace) -> int:
    """The peak of the second step."""
    return trace.peak(trace.steps[1])[1]


@pytest.mark.parametrize(
    ("late", "change", "how"),
    [
        (False, checkpointed("blocks"), {"is_checkpointed": True}),
        (False, in_micro_batches(4), {"parts": 4}),
        (True, in_micro_batches(8), {"parts": 8}),
    ],
    ids=["checkpoint", "micro-batches", "zero_grad after the forward pass"],
)
def test_what_is_predicted_is_what_comes(late: bool, change: Any, how: Any) -> None:
    predicted = highest(replay(traced(trained(late=late)), [change]))
    assert predicted == pytest.approx(highest(traced(trained(**how))), rel=0.02)


def test_two_changes_together() -> None:
    changes = [checkpointed("blocks"), in_micro_batches(2)]
    predicted = highest(replay(traced(trained()), changes))
    real = highest(traced(trained(is_checkpointed=True, parts=2)))
    assert predicted == pytest.approx(real, rel=0.02)


def test_lists_of_modules_that_run_are_found() -> None:
    assert repeated_blocks(traced(trained())) == ["blocks"]
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert repeated_blocks(traced(lambda: model(torch.ones(2, 4)).sum().backward())) == [""]
    linear = nn.Linear(4, 4)
    assert repeated_blocks(traced(lambda: linear(torch.ones(2, 4)).sum().backward())) == []


def test_only_what_lowers_the_peak_is_offered_the_best_first() -> None:
    found = changes_of(traced(trained()), TracedPeak(), {})
    assert [one.change.partition(",")[0].partition(":")[0] for one in found] == [
        "8 micro-batches",
        "4 micro-batches",
        "torch.utils.checkpoint around each of blocks",
        'with torch.autocast("cpu"',
        "2 micro-batches",
    ]  # SGD makes no temporaries, and the gradients end before the forward pass.
    assert [one.peak_bytes for one in found] == sorted(one.peak_bytes for one in found)


def test_a_batch_is_not_divided_into_more_parts_than_it_has_rows() -> None:
    found = changes_of(traced(trained(rows=2)), TracedPeak(), {})
    assert {one.name for one in found} <= {"micro-batches:2", "checkpoint:blocks", "autocast"}


def test_a_del_is_one_of_the_changes() -> None:
    remedies = (Remedy("del logits", "before loss.backward() (train.py:7)"),)
    frames = (("train.py", 7, "train"),)
    ops = tuple(Op("aten.mm.default", "backward", "", frames, (0,)) for _ in range(2))
    lives = (
        Life(0, 100, 0, 1, None, "backward", "other temporaries"),
        Life(1, 50, 0, 0, None, "backward", "other temporaries"),
        Life(2, 20, 1, 1, None, "backward", "other temporaries"),
    )
    (found,) = changes_of(Trace(lives, ops), TracedPeak(remedies=remedies), {1: 1})
    text = '"del logits" before loss.backward() (train.py:7)'
    assert found == Lowered(text, 150, "del", "backward", "train.py:7")


def test_where_the_next_peak_is_and_what_runs_again_are_said() -> None:
    trace = traced(trained())
    found = {one.name: one for one in changes_of(trace, TracedPeak(), {})}
    for name, change in found.items():
        after = together(trace, [name], {})
        op = after.ops[after.peak(after.steps[1])[0]]
        assert change.phase == op.phase
        assert change.line.endswith(f"test_changes.py:{op.frames[0][1]}")
    forward_ms = sum(op.ns for op in trace.ops[trace.steps[1] :] if op.phase == "forward") / 1e6
    assert 0 < found["checkpoint:blocks"].again_ms < forward_ms
    assert found["micro-batches:8"].again_ms == 0
    where = found["checkpoint:blocks"].where()
    assert re.fullmatch(r"in the backward pass \(.*test_changes.py:\d+\)", where)


# --- another precision ----------------------------------------------------------------------------


class Attention(nn.Module):
    """A block with an attention, of which torch makes several operators if it has dropout."""

    def __init__(self, dropout: float, words: int = 64) -> None:
        super().__init__()
        self.words = words
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.qkv(self.norm(x)).view(-1, self.words, 3, 4, 16).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return x + self.out(found.transpose(1, 2).reshape(512, 64))


def convolutions() -> Any:
    layers = (nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 4, 3))
    return nn.Sequential(nn.Unflatten(1, (4, 4, 4)), *layers, nn.Flatten(), nn.Linear(16, 64))


class Branches(nn.Module):
    """Several layers with the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 8) for _ in range(8))

    def forward(self, x: torch.Tensor) -> Any:
        wide = x.repeat(1, 16)
        return sum(layer(wide) for layer in self.layers)


class Batched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 64, 1024))

    def forward(self, x: torch.Tensor) -> Any:
        return x.view(8, 64, 64) @ self.weight


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(64, 64, batch_first=True), nn.Linear(64, 512)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.layer(x.view(8, 64, 64))[0]).flatten(0, 1)


def precise(model: nn.Module, loss_of: Any, *, lower: bool, parts: int = 1) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        for x in torch.randn(512, 64).chunk(parts):
            with torch.autocast("cpu", torch.bfloat16, enabled=lower):
                made = model(x)
                loss = loss_of(made)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def classes(made: torch.Tensor) -> Any:
    return functional.cross_entropy(made, torch.zeros(len(made), dtype=torch.long))


def squares(made: torch.Tensor) -> Any:
    return functional.mse_loss(made, torch.zeros(made.shape))


def chosen(made: torch.Tensor) -> Any:
    index = torch.zeros(len(made), 16, dtype=torch.long)
    return made.log_softmax(-1).gather(-1, index).exp().mean()


@pytest.mark.parametrize(
    ("make", "loss_of"),
    [
        (lambda: nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 512)), classes),
        (lambda: nn.Sequential(*(Attention(0.0) for _ in range(4))), squares),
        (lambda: nn.Sequential(*(Attention(0.1) for _ in range(4))), squares),
        (lambda: nn.Sequential(*(Attention(0.1, 8) for _ in range(4))), squares),
        (lambda: nn.Linear(64, 4096), classes),
        (lambda: nn.Linear(64, 4096), chosen),
        (convolutions, squares),
        (lambda: nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64)), squares),
        (lambda: nn.Sequential(nn.Linear(64, 2048), nn.Linear(2048, 2048)), squares),
        (lambda: nn.Sequential(nn.Linear(64, 512), *[nn.Linear(512, 512)] * 8), squares),
        (Branches, squares),
        (Batched, squares),
    ],
    ids=[
        *("blocks", "attention", "parts", "short", "classes", "chosen", "conv", "wide"),
        *("weights", "again", "branches", "batched"),
    ],
)
def test_autocast_comes_about_as_predicted(make: Callable[[], nn.Module], loss_of: Any) -> None:
    model = make()
    trace = traced(precise(model, loss_of, lower=False), reports=True)
    real = measured(precise(model, loss_of, lower=True))
    for known in (trace, restored(kept(trace, {}))[0]):
        predicted = above(together(known, ["autocast"], {}))
        assert predicted == pytest.approx(real, rel=0.1)
    assert "autocast" not in {one.name for one in offered(trace, is_exact=True)}


@pytest.mark.parametrize("make", [lambda: Tower(is_checkpointed=False), Branches])
def test_autocast_in_micro_batches_comes_about_as_predicted(make: Callable[[], nn.Module]) -> None:
    model = make()
    trace = traced(precise(model, squares, lower=False))
    real = highest(traced(precise(model, squares, lower=True, parts=8)))
    for known in (trace, restored(kept(trace, {}))[0]):
        predicted = highest(together(known, ["micro-batches:8", "autocast"], {}))
        assert predicted == pytest.approx(real, rel=0.1)


def test_autocast_of_checkpoints_comes_about_as_predicted() -> None:
    trace = traced(precise(Tower(is_checkpointed=False), squares, lower=False))
    real = highest(traced(precise(Tower(is_checkpointed=True), squares, lower=True)))
    predicted = highest(together(trace, ["checkpoint:blocks", "autocast"], {}))
    assert predicted == pytest.approx(real, rel=0.1)


def test_autocast_is_not_offered_where_it_runs_or_cannot_run() -> None:
    def sums(made: torch.Tensor) -> Any:
        index = torch.arange(512) % 8
        return torch.zeros(8, 64).index_add(0, index, made).square().mean()

    linear = nn.Linear(64, 64)
    cases = [
        (precise(linear, squares, lower=False), True),
        (precise(linear, squares, lower=True), False),
        (precise(nn.Sequential(nn.LayerNorm(64)), squares, lower=False), False),
        (precise(Recurrent(), classes, lower=False), False),
        (precise(linear, lambda made: squares(made.bfloat16()), lower=False), False),
        (precise(linear, sums, lower=False), False),  # autocast does not convert its arguments
    ]
    for step, is_offered in cases:
        names = {one.name for one in offered(traced(step))}
        assert ("autocast" in names) == is_offered
    on_another_device = replace(traced(cases[0][0]), device="cuda")
    assert "autocast" not in {one.name for one in offered(on_another_device)}


# --- the loss of a language model, caches, passes beside the batch --------------------------------


class Words(nn.Module):
    """A language model; with `tied`, head and embedding have one weight."""

    def __init__(self, words: int, width: int, tied: bool) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(words, width), nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self.tokens(x)).tanh()


#: rows, words and width: large logits, and a large head
LOGITS, HEAD = (4096, 512, 32), (256, 2048, 256)


def language(
    *, how: str = "", tied: bool = False, sizes: tuple[int, int, int] = LOGITS
) -> Callable[[], object]:
    torch.manual_seed(3)
    rows, count, width = sizes
    model = Words(count, width, tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss_of(hidden: torch.Tensor, wanted: torch.Tensor) -> Any:
        return functional.cross_entropy(model.head(hidden), wanted, reduction="sum")

    def step() -> None:
        words = torch.randint(count, (rows,))
        wanted = words.roll(1)
        hidden = model(words)
        if how == "chunks":
            parts = zip(hidden.chunk(8), wanted.chunk(8), strict=True)
            loss = sum(checkpoint(loss_of, *one, use_reentrant=False) for one in parts)
        elif how == "linear_cross_entropy":
            loss = functional.linear_cross_entropy(
                hidden, model.head.weight, wanted, options=torch.nn.LinearCrossEntropyOptions()
            )
        else:
            loss = loss_of(hidden, wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("sizes", [LOGITS, HEAD], ids=["logits", "head"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("name", "how"), [("chunks:8", "chunks"), ("linear_cross_entropy", "linear_cross_entropy")]
)
def test_a_loss_in_chunks_comes_as_predicted(
    name: str, how: str, tied: bool, sizes: tuple[int, int, int]
) -> None:
    if not hasattr(functional, how) and how == "linear_cross_entropy":
        pytest.skip("this torch does not have it")
    trace = traced(language(tied=tied, sizes=sizes), reports=True)
    predicted = above(together(trace, [name], {}))
    real = measured(language(how=how, tied=tied, sizes=sizes))
    assert predicted == pytest.approx(real, rel=0.03)
    is_offered = name in {one.name for one in changes_of(trace, TracedPeak(), {})}
    assert is_offered == (real < above(trace))
    if sizes == LOGITS:
        assert predicted < 0.3 * above(trace)


def test_the_time_of_chunks_is_that_of_the_head_and_the_loss() -> None:
    trace = traced(language())
    (again_ms,) = (
        one.again_ms for one in changes_of(trace, TracedPeak(), {}) if "chunks" in one.name
    )
    of_head = ("aten.mm.default", "aten._log_softmax.default", "aten.nll_loss_forward.default")
    own = [op for op in trace.ops[trace.steps[1] :] if op.phase == "forward" and op.name in of_head]
    assert again_ms == pytest.approx(sum(op.ns for op in own) / 1e6, rel=0.02)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Chat(nn.Module):
    """A language model as those of transformers are: a body and a head."""

    def __init__(self, has_body: bool = True) -> None:
        super().__init__()
        self.tokens, self.lm_head = nn.Embedding(512, 32), nn.Linear(32, 512)
        self.model = Body() if has_body else nn.Tanh()

    def forward(self, x: torch.Tensor) -> Any:
        return self.lm_head(0.5 * self.model(self.tokens(x)))


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Chat()])

    def forward(self, x: torch.Tensor) -> Any:
        return self.parts[0](x)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(512, 32), nn.Linear(32, 512)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        h = self.tokens(x)
        for layer in self.layers:  # the list itself cannot be called
            h = layer(h)
        return self.head(h)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 512))

    def forward(self, x: torch.Tensor) -> Any:
        return self.weight[x] @ self.weight


@pytest.mark.parametrize(
    ("make", "head"),
    [
        (Chat, ("model.lm_head", "model.model")),
        (lambda: Chat(has_body=False), ("model.lm_head", "")),
        (Wrapped, ("model.parts[0].lm_head", "model.parts[0].model")),
        (lambda: nn.Sequential(nn.Embedding(512, 32), nn.Linear(32, 512)), ("model[1]", "")),
        (Lists, ("model.head", "")),
        (Plain, ("", "")),
    ],
    ids=["body and head", "head", "in another model", "sequential", "a list of blocks", "none"],
)
def test_the_modules_of_logits_are_named(
    make: Callable[[], nn.Module], head: tuple[str, str]
) -> None:
    model = make()

    def step() -> None:
        words = torch.randint(512, (64,))
        functional.cross_entropy(model(words), words).backward()

    trace = traced(step)
    assert head_of(trace) == head
    (text,) = (one.text for one in offered(trace) if one.name.startswith("linear"))
    returned = f" of the hidden states that {head[1]}(...) returns" if head[1] else ""
    assert f"(hidden, {head[0] or 'head'}.weight, targets, " in text
    assert f"{returned} instead of {head[0] or 'head'} and" in text


@pytest.mark.parametrize(("count", "has_chunks"), [(255, False), (256, True)])
def test_a_loss_of_few_classes_has_no_chunks(count: int, has_chunks: bool) -> None:
    names = {one.name for one in offered(traced(language(sizes=(64, count, 32))))}
    assert ("chunks:8" in names) == ("linear_cross_entropy" in names) == has_chunks


@pytest.mark.parametrize("fused", [False, True])
def test_training_without_a_cache_comes_as_predicted(fused: bool) -> None:
    weights = [torch.randn(64, 192, requires_grad=True) for _ in range(4)]

    def step(has_cache: bool = True) -> None:
        x, cache = torch.randn(4, 128, 64), []
        for weight in weights:
            q, k, v = (
                (x @ weight[:, i : i + 64]).view(4, 128, 2, 32).transpose(1, 2)
                for i in (0, 64, 128)
            )
            if has_cache:
                k, v = [torch.cat((torch.tensor([]), one), -2) for one in (k, v)]
                cache += [k, v]
            if fused:
                found = functional.scaled_dot_product_attention(q, k, v)
            else:
                found = (q @ k.transpose(-1, -2)).softmax(-1) @ v
            x = found.transpose(1, 2).reshape(4, 128, 64)
            del q, k, v, found
        x.square().sum().backward()
        for weight in weights:
            weight.grad = None
        del cache

    trace = traced(step)
    predicted = highest(together(trace, ["no-cache"], {}))
    assert predicted == pytest.approx(highest(traced(lambda: step(False))), rel=0.02)
    assert fused or predicted < highest(trace)
    again, _ = restored(kept(trace, {}))
    assert highest(together(again, ["no-cache"], {})) == pytest.approx(predicted, rel=1e-3)
    assert not {one.name for one in offered(traced(lambda: step(False)))} & {"no-cache"}


def test_what_runs_beside_the_function_with_the_batch_is_not_divided() -> None:
    model = nn.Linear(256, 256)

    def update(x: torch.Tensor, parts: int) -> None:
        for part in x.chunk(parts):
            model(part).tanh().square().mean().backward()
        model.zero_grad()

    def step(parts: int = 1) -> None:
        x = torch.randn(512, 256)
        with torch.no_grad():
            model(x).exp().exp()
        update(x, parts)

    predicted = highest(replay(traced(step), [in_micro_batches(8)]))
    assert predicted == pytest.approx(highest(traced(lambda: step(8))), rel=0.02)


def test_what_autograd_keeps_unread_is_checkpointed_too() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(64, 512)

        def forward(self, x: torch.Tensor) -> Any:
            index = torch.arange(512) % 64
            return x + torch.zeros_like(x).index_add(1, index, self.wide(x))

    def step_of(is_checkpointed: bool) -> Callable[[], object]:
        torch.manual_seed(3)
        model = nn.Sequential(*(Sums() for _ in range(4)))
        for one in model if is_checkpointed else ():
            one.forward = functools.partial(checkpoint, one.forward, use_reentrant=False)

        def step() -> None:
            x = torch.randn(256, 64, requires_grad=True)
            model(x).square().mean().backward()
            model.zero_grad()

        return step

    trace = traced(step_of(False))
    predicted = highest(replay(trace, [checkpointed("")]))
    assert predicted == pytest.approx(highest(traced(step_of(True))), rel=0.03)
    assert predicted < 0.7 * highest(trace)
