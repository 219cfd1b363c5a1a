"""What is held in vain, by its variable and line, of small programs; and what is never said."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from memtools._base.peak import Held, Remedy, TracedPeak
from memtools._blocks.invain import held_in_vain
from memtools._blocks.lifetimes import Trace, Tracer
from memtools._blocks.variables import holding

STEPS, ROWS, CLASSES = 6, 256, 1024
MIB = 1 << 20


def traced(source: str, folder: Path, weights: list[torch.Tensor] | None = None) -> Trace:
    """Run a program, which calls ended() after each of its steps; steps 4 and 5 are traced. What it
    has made of the model's weight is put into `weights`."""
    file = folder / "loop.py"
    file.write_text(textwrap.dedent(source))
    tracer, count = Tracer(), [0]

    def ended() -> None:
        count[0] += 1
        if count[0] == 3:
            tracer.begin()
        elif count[0] == 4:
            tracer.step_ended(look=True)
        elif count[0] == 5:
            tracer.end()

    torch.manual_seed(0)
    model = nn.Linear(64, CLASSES)
    names = {
        "__name__": "loop", "ended": ended, "model": model, "torch": torch, "STEPS": STEPS,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "cross": cross, "batch": batch,
        "spread": spread, "deep": deep,
    }  # fmt: skip
    try:
        exec(compile(file.read_text(), str(file), "exec"), names)
    finally:
        tracer.end()
    if weights is not None:
        weights.append(model.weight.detach())
    return tracer.trace()


def cross(logits: torch.Tensor, wanted: torch.Tensor | None = None) -> Any:
    if wanted is None:
        wanted = torch.zeros(len(logits), dtype=torch.long)
    return functional.cross_entropy(logits, wanted)


def spread(logits: torch.Tensor) -> Any:
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1).mean()


def deep(logits: torch.Tensor) -> Any:
    return cross(torch.cat((logits.tanh(),) * 4))


def batch() -> torch.Tensor:
    return torch.randn(ROWS, 64)


def said(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The variables with their lines, and what to write where."""
    monkeypatch.chdir(folder)
    found = held_in_vain(traced(source, folder))[0]
    if not found.held:
        return "", ""
    assert 0 < found.lowered_bytes < found.peak_bytes
    names = ", ".join(f"{one.name} ({one.line})" for one in found.held)
    return names, "; ".join(f"{one.text} {one.place}" for one in found.remedies)


SAID = {
    "a variable of the script": (
        """\
        for _ in range(STEPS):
            x = batch()
            y = torch.zeros(256, dtype=torch.long)
            logits = model(x)
            loss = cross(logits, y)
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            ended()
        """,
        "logits (loop.py:4)",
        "del logits before loss.backward() (loop.py:6)",
    ),
    "the first of several statements in one line": (
        """\
        for _ in range(STEPS):
            x = batch()
            logits = model(x)
            loss = cross(logits)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            ended()
        """,
        "logits (loop.py:3)",
        "del logits before optimizer.zero_grad() (loop.py:5)",
    ),
    "an entry of a tuple": (
        """\
        def both(x):
            h = model(x)
            return h, h.mean()
        for i in range(STEPS):
            x = batch()
            out = both(x)
            loss = cross(out[0]) + out[1]
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            ended()
        """,
        "out[0] (loop.py:6)",
        "del out before loss.backward() (loop.py:8)",
    ),
    "a part of a dict of which another part is read": (
        """\
        def both(x):
            h = model(x)
            return {"logits": h, "loss": cross(h)}
        for i in range(STEPS):
            x = batch()
            out = both(x)
            out["loss"].backward()
            optimizer.step(); optimizer.zero_grad()
            ended()
        """,
        "out['logits'] (loop.py:6)",
        "del out['logits'] before out[\"loss\"].backward() (loop.py:7)",
    ),
    "a part of a dict of which another part is read later": (
        """\
        def three(x):
            h = model(x)
            return {"logits": h, "loss": cross(h), "size": h.detach().mean()}
        for i in range(STEPS):
            out = three(batch())
            out["loss"].backward()
            optimizer.step(); optimizer.zero_grad()
            print(out["size"].item())
            ended()
        """,
        "out['logits'] (loop.py:5)",
        "del out['logits'] before out[\"loss\"].backward() (loop.py:6)",
    ),
    "an entry of a dict that lives on": (
        """\
        seen = {}
        for i in range(STEPS):
            x = batch()
            seen["logits"] = model(x)
            seen["loss"] = cross(seen["logits"])
            seen["loss"].backward()
            optimizer.step(); optimizer.zero_grad()
            print(seen["loss"].item())
            ended()
        """,
        "seen['logits'] (loop.py:4)",
        "del seen['logits'] before seen[\"loss\"].backward() (loop.py:6)",
    ),
    "an attribute that a variable holds too": (
        """\
        class T:
            def step(self, x):
                self.seen_both = logits = model(x)
                loss = cross(self.seen_both)
                loss.backward()
                optimizer.step(); optimizer.zero_grad()
        t = T()
        for i in range(STEPS):
            t.step(batch())
            ended()
        """,
        "self.seen_both (loop.py:3)",
        "self.seen_both = None; del logits before loss.backward() (loop.py:5)",
    ),
    "an attribute that nothing reads, and a variable": (
        """\
        class T:
            def step(self, x):
                logits = model(x)
                self.seen_never = logits
                loss = cross(logits)
                loss.backward()
                optimizer.step(); optimizer.zero_grad()
        t = T()
        for i in range(STEPS):
            t.step(batch())
            ended()
        """,
        "self.seen_never (loop.py:3)",
        "self.seen_never = None in place of self.seen_never = logits (loop.py:4); "
        "del logits before loss.backward() (loop.py:6)",
    ),
    "until the next step binds the name": (
        """\
        for i in range(STEPS):
            x = torch.randn(64, 64)
            with torch.no_grad():
                wide = model(x).repeat(20, 1)
                big = wide + 1
                score = big.mean()
            del wide
            model(x).mean().backward()
            optimizer.step(); optimizer.zero_grad()
            ended()
        """,
        "big (loop.py:5)",
        "del big after score = big.mean() (loop.py:6)",
    ),
    "a variable of a method": (
        """\
        class T:
            def step(self, x):
                logits = model(x)
                self.loss = cross(logits)
                self.loss.backward()
                optimizer.step(); optimizer.zero_grad()
        t = T()
        for i in range(STEPS):
            t.step(batch())
            ended()
        """,
        "logits (loop.py:3)",
        "del logits before self.loss.backward() (loop.py:5)",
    ),
    "an attribute that only one method uses": (
        """\
        class T:
            def step(self, x):
                self.seen_now = model(x)
                loss = cross(self.seen_now)
                loss.backward()
                optimizer.step(); optimizer.zero_grad()
        t = T()
        for i in range(STEPS):
            t.step(batch())
            ended()
        """,
        "self.seen_now (loop.py:3)",
        "self.seen_now = None before loss.backward() (loop.py:5)",
    ),
    "an attribute that nothing reads": (
        """\
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = model
            def forward(self, x):
                h = self.inner(x)
                self.seen_last = h * 2
                return h
        net = Net()
        for i in range(STEPS):
            loss = cross(net(batch()))
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            ended()
        """,
        "self.seen_last (loop.py:7)",
        "self.seen_last = None in place of self.seen_last = h * 2 (loop.py:7)",
    ),
    "several of them, with a view": (
        """\
        for i in range(STEPS):
            x = batch()
            y = torch.zeros(256, dtype=torch.long)
            with torch.no_grad():
                teacher = model(x) * 2
                soft = teacher.softmax(-1)
            logits = model(x)
            flat = logits.view(-1, 1024)
            loss = cross(flat, soft)
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            ended()
        """,
        "teacher (loop.py:5), soft (loop.py:6), logits (loop.py:7)",
        "del teacher, soft, logits, flat before loss.backward() (loop.py:10)",
    ),
    "an entry of a dict that is an attribute": (
        """\
        class T:
            def __init__(self):
                self.seen_cache = {}
            def step(self, x):
                self.seen_cache["size"] = len(x)
                self.seen_cache["logits"] = model(x)
                loss = cross(self.seen_cache["logits"])
                loss.backward()
                optimizer.step(); optimizer.zero_grad()
            def size(self):
                return self.seen_cache["size"]
        t = T()
        for i in range(STEPS):
            t.step(batch())
            ended()
        """,
        "self.seen_cache['logits'] (loop.py:6)",
        "self.seen_cache['logits'] = None before loss.backward() (loop.py:8)",
    ),
    "the graph of a variable whose value is read": (
        """\
        for i in range(STEPS):
            x = batch()
            entropy = spread(model(x))
            loss = deep(model(x))
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            print(f"{entropy} {entropy.item()}")
            ended()
        """,
        "the graph of entropy (loop.py:3)",
        "entropy = entropy.detach() after entropy = spread(model(x)) (loop.py:3)",
    ),
    "the graph of what a call returned beside the loss": (
        """\
        def both(x):
            width = spread(model(x))
            return deep(model(x)), width
        for i in range(STEPS):
            x = batch()
            loss, width = both(x)
            loss.backward(); optimizer.step(); optimizer.zero_grad()
            print(width.item())
            ended()
        """,
        "the graph of width (loop.py:6)",
        "width = width.detach() after loss, width = both(x) (loop.py:6)",
    ),
    "the graph of a variable that nothing reads": (
        """\
        for i in range(STEPS):
            x = batch()
            loss = deep(model(x))
            entropy = spread(model(x))
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            ended()
        """,
        "the graph of entropy (loop.py:4)",
        "del entropy before loss.backward() (loop.py:5)",
    ),
    "the graph of an attribute": (
        """\
        class T:
            def step(self, x):
                self.seen_spread = spread(model(x))
                loss = deep(model(x))
                loss.backward()
                optimizer.step(); optimizer.zero_grad()
            def show(self):
                print(self.seen_spread.item())
        t = T()
        for i in range(STEPS):
            t.step(batch())
            t.show()
            ended()
        """,
        "the graph of self.seen_spread (loop.py:3)",
        "self.seen_spread = spread(model(x)).detach() in place of "
        "self.seen_spread = spread(model(x)) (loop.py:3)",
    ),
    "the graph of an entry of a list that lives on": (
        """\
        class T:
            def __init__(self):
                self.seen_all = []
            def step(self, x):
                self.log(model(x))
                loss = deep(model(x))
                loss.backward()
                optimizer.step(); optimizer.zero_grad()
            def log(self, logits):
                logs = logits.log_softmax(-1)
                entropy = -(logs.exp() * logs).sum(-1).mean()
                self.seen_all.append(entropy)
        t = T()
        for i in range(STEPS):
            t.step(batch())
            print(t.seen_all[-1].item())
            t.seen_all.clear()
            ended()
        """,
        "the graph of entropy (loop.py:11)",
        "self.seen_all.append(entropy.detach()) in place of self.seen_all.append(entropy) "
        "(loop.py:12)",
    ),
    "the graph of an entry of a dict": (
        """\
        def step(x, seen):
            seen["seen_width"] = -(model(x).softmax(-1) ** 2).mean()
            loss = deep(model(x))
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            print(f"{seen['seen_width']:.3f}")
        stats = {}
        for i in range(STEPS):
            step(batch(), stats)
            ended()
        """,
        "the graph of seen['seen_width'] (loop.py:2)",
        'seen["seen_width"] = (-(model(x).softmax(-1) ** 2).mean()).detach() in place of '
        'seen["seen_width"] = -(model(x).softmax(-1) ** 2).mean() (loop.py:2)',
    ),
    "in a loop of micro-batches": (
        """\
        for i in range(STEPS):
            for part in range(4):
                x = batch()
                logits = model(x)
                loss = cross(logits) / 4
                loss.backward()
            optimizer.step(); optimizer.zero_grad()
            ended()
        """,
        "logits (loop.py:4)",
        "del logits before loss.backward() (loop.py:6)",
    ),
    "outside and inside of a loop": (
        """\
        for i in range(STEPS):
            x = batch()
            logits = model(x)
            total = 0.0
            for scale in (0.5, 0.25):
                out = model(x * scale)
                loss = cross(out)
                loss.backward()
            optimizer.step(); optimizer.zero_grad()
            ended()
        """,
        "logits (loop.py:3), out (loop.py:6)",
        "del logits before for scale in (0.5, 0.25): (loop.py:5); "
        "del out before loss.backward() (loop.py:8)",
    ),
}

UNSAID = {
    "read after": """\
        for _ in range(STEPS):
            x = batch()
            y = torch.zeros(256, dtype=torch.long)
            logits = model(x)
            loss = cross(logits, y)
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            acc = (logits.argmax(-1) == y).float().mean()
            ended()
        """,
    "read in a rare branch": """\
        for i in range(STEPS):
            x = batch()
            y = torch.zeros(256, dtype=torch.long)
            logits = model(x)
            loss = cross(logits, y)
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            if i % 100 == 99:
                print(logits.argmax(-1))
            ended()
        """,
    "list of outputs": """\
        kept = []
        for i in range(STEPS):
            x = batch()
            logits = model(x)
            kept.append(logits)
            loss = cross(logits)
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            ended()
            if len(kept) > 2: kept.pop(0)
        """,
    "attribute that another function reads": """\
        class T:
            def show(self):
                print(self.seen_now.argmax(-1))
            def step(self, x):
                self.seen_now = model(x)
                loss = cross(self.seen_now)
                loss.backward()
                optimizer.step(); optimizer.zero_grad()
        t = T()
        for i in range(STEPS):
            t.step(batch())
            ended()
        """,
    "attribute that a rare branch reads": """\
        class T:
            def step(self, x, i):
                self.seen_now = model(x)
                loss = cross(self.seen_now)
                loss.backward()
                optimizer.step(); optimizer.zero_grad()
                if i % 100 == 99:
                    print(self.seen_now.argmax(-1))
        t = T()
        for i in range(STEPS):
            t.step(batch(), i)
            ended()
        """,
    "attribute that getattr may read": """\
        class T:
            def step(self, x):
                self.seen_now = model(x)
                loss = cross(self.seen_now)
                loss.backward()
                optimizer.step(); optimizer.zero_grad()
        def show(t, name="seen_now"): return getattr(t, name)
        t = T()
        for i in range(STEPS):
            t.step(batch())
            ended()
        """,
    "attribute and a variable that is read later": """\
        class T:
            def step(self, x):
                logits = model(x)
                self.seen_last = logits
                loss = cross(logits)
                loss.backward()
                optimizer.step(); optimizer.zero_grad()
                return logits
        t = T()
        for i in range(STEPS):
            t.step(batch())
            ended()
        """,
    "entry of a dict that is read in the next step": """\
        seen = {"logits": torch.zeros(1)}
        for i in range(STEPS):
            x = batch()
            before = seen["logits"].mean().item()
            seen["logits"] = model(x)
            loss = cross(seen["logits"])
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            ended()
        """,
    "entry of a dict that is passed on whole": """\
        seen = {}
        for i in range(STEPS):
            x = batch()
            seen["logits"] = model(x)
            loss = cross(seen["logits"])
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            print(seen)
            ended()
        """,
    "entry of a dict that the loop walks through": """\
        seen = {}
        for i in range(STEPS):
            x = batch()
            seen["logits"] = model(x)
            loss = cross(seen["logits"])
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            ended()
        sizes = [one.shape for one in seen.values()]
        """,
    "attribute that the module sets in two places": """\
        class T:
            def step(self, x):
                self.seen_now = model(x)
                loss = cross(self.seen_now)
                loss.backward()
                self.seen_now = loss
                optimizer.step(); optimizer.zero_grad()
        t = T()
        for i in range(STEPS):
            t.step(batch())
            ended()
        """,
    "returned": """\
        def step(x):
            logits = model(x)
            loss = cross(logits)
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            return loss, logits
        for i in range(STEPS):
            step(batch())
            ended()
        """,
    "closure": """\
        def step(x):
            logits = model(x)
            loss = cross(logits)
            def show(): print(logits)
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
        for i in range(STEPS):
            step(batch())
            ended()
        """,
    "entry of a dict that another method reads": """\
        class T:
            def __init__(self):
                self.seen_cache = {}
            def step(self, x):
                self.seen_cache["logits"] = model(x)
                loss = cross(self.seen_cache["logits"])
                loss.backward()
                optimizer.step(); optimizer.zero_grad()
            def show(self):
                print(self.seen_cache["logits"].mean())
        t = T()
        for i in range(STEPS):
            t.step(batch())
            ended()
        """,
    "entries of a dict that another method walks through": """\
        class T:
            def __init__(self):
                self.seen_cache = {}
            def step(self, x):
                self.seen_cache["logits"] = model(x)
                loss = cross(self.seen_cache["logits"])
                loss.backward()
                optimizer.step(); optimizer.zero_grad()
            def show(self):
                return [one.mean() for one in self.seen_cache.values()]
        t = T()
        for i in range(STEPS):
            t.step(batch())
            ended()
        """,
    "graph of a value that is part of the loss": """\
        for i in range(STEPS):
            x = batch()
            entropy = spread(model(x))
            loss = deep(model(x)) - 0.01 * entropy
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            print(entropy.item())
            ended()
        """,
    "graph of a value that is part of the loss in a rare branch": """\
        for i in range(STEPS):
            x = batch()
            entropy = spread(model(x))
            loss = deep(model(x))
            if i > 100:
                loss = loss - 0.01 * entropy
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            print(entropy.item())
            ended()
        """,
    "graph of an attribute that another function may pass back": """\
        class T:
            def step(self, x):
                self.seen_spread = spread(model(x))
                loss = deep(model(x))
                loss.backward()
                optimizer.step(); optimizer.zero_grad()
            def late(self):
                self.seen_spread.backward()
        t = T()
        for i in range(STEPS):
            t.step(batch())
            ended()
        """,
    "graph that the next step passes back": """\
        kept = []
        for i in range(STEPS):
            x = batch()
            loss = deep(model(x))
            loss.backward()
            if kept: kept.pop().backward()
            optimizer.zero_grad()
            kept.append(spread(model(x)))
            ended()
        """,
    "graph of a value that the next step's loss is made of": """\
        old = torch.zeros(())
        for i in range(STEPS):
            x = batch()
            loss = deep(model(x)) + old
            loss.backward()
            optimizer.zero_grad()
            old = spread(model(x))
            print(old.item())
            ended()
        """,
    "graph that a penalty differentiates twice": """\
        for i in range(STEPS):
            x = batch().requires_grad_()
            score = spread(model(x))
            (slope,) = torch.autograd.grad(score, x, create_graph=True)
            loss = cross(model(x)) + slope.square().sum()
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            print(score.item())
            ended()
        """,
    "average of weights": """\
        average = {}
        for i in range(STEPS):
            loss = cross(model(batch()))
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            for name, one in model.named_parameters():
                average[name] = one.detach() * 0.1 + average.get(name, one.detach()) * 0.9
            ended()
        """,
    "cache that the next step appends to": """\
        cache = torch.zeros(0, 1024)
        for i in range(STEPS):
            x = batch()
            with torch.no_grad():
                cache = torch.cat((cache, model(x)))[-1024:]
            loss = cross(model(x)) + cache.mean().item()
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            ended()
        """,
    "rnn state carried": """\
        state = torch.zeros(256, 1024)
        for i in range(STEPS):
            x = batch()
            state = (model(x) + state)
            loss = state.square().mean()
            loss.backward()
            state = state.detach()
            optimizer.step(); optimizer.zero_grad()
            ended()
        """,
}


@pytest.mark.parametrize("name", SAID)
def test_it_is_said_by_its_variable_and_where_the_del_belongs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, names, remedies = SAID[name]
    assert said(source, tmp_path, monkeypatch) == (names, remedies)


@pytest.mark.parametrize("name", UNSAID)
def test_nothing_is_said_of_what_is_read_or_cannot_be_let_go(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said(UNSAID[name], tmp_path, monkeypatch) == ("", "")


def remedied(source: str, remedies: tuple[Remedy, ...]) -> str:
    """The program with the lines that are to be written."""
    lines = textwrap.dedent(source).splitlines()
    added: dict[int, str] = {}
    for remedy in remedies:
        where, line = re.fullmatch(r"(before|after|in place of) .*:(\d+)\)", remedy.place).groups()  # type: ignore[union-attr]
        at = int(line) - 1
        indent = lines[at][: -len(lines[at].lstrip())]
        if where == "in place of":
            lines[at] = indent + remedy.text
        else:
            added[at + (where == "after")] = indent + remedy.text
    for at in sorted(added, reverse=True):
        lines.insert(at, added[at])
    return "\n".join(lines)


@pytest.mark.parametrize("name", SAID)
def test_the_peak_falls_as_it_is_said_and_nothing_else_changes(name: str, tmp_path: Path) -> None:
    source = SAID[name][0]
    weights = list[torch.Tensor]()
    found = held_in_vain(traced(source, tmp_path, weights))[0]
    trace = traced(remedied(source, found.remedies), tmp_path, weights)
    assert trace.peak(trace.steps[1])[1] == pytest.approx(found.lowered_bytes, rel=1e-5)
    assert torch.equal(*weights)
    assert held_in_vain(trace)[0].held == ()


def test_the_sentence() -> None:
    found = TracedPeak(
        276 * MIB + MIB // 2, 62 * MIB + MIB // 2, 214 * MIB,
        (Held("old", 32 * MIB, "train.py:23"), Held("logits", 30 * MIB, "train.py:24")),
        (Remedy("del old, logits", "before loss.backward() (train.py:27)"),),
    )  # fmt: skip
    assert found.sentence() == (
        "at the peak 62.5 of 276.5 MiB are held though nothing reads them again: old "
        '(train.py:23), logits (train.py:24); "del old, logits" before loss.backward() '
        "(train.py:27) makes the peak 214.0 MiB"
    )
    assert TracedPeak().sentence() == ""


# --- variables ------------------------------------------------------------------------------------


def key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


KEPT: list[Any] = []


def test_variables_are_found_that_alone_hold_a_storage() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    plain = weight @ weight
    base = weight @ weight
    view = base.view(-1)
    saved = weight.exp()
    taken = weight @ weight
    _taker = taken @ weight
    class_ = type("Output", (dict,), {})
    out = class_(x=weight @ weight)
    out.__dict__["x"] = out["x"]
    listed = weight @ weight
    KEPT.append(listed)
    pair = (weight @ weight, (weight @ weight).view(-1))
    cell = weight @ weight
    alias = [weight @ weight]
    other = {"a": alias}
    keys = {
        name: key(tensor)
        for name, tensor in {
            "plain": plain, "view": view, "saved": saved, "taken": taken, "out": out["x"],
            "listed": listed, "first": pair[0], "second": pair[1], "cell": cell, "alias": alias[0],
        }.items()
    }  # fmt: skip
    count = sys.getrefcount(plain)
    found = holding(inspect.currentframe(), lambda file: file == __file__, set(keys.values()))
    names = {
        name: {one.name + one.path for one in found[number]}
        for name, number in keys.items()
        if number in found
    }
    assert (lambda: cell)() is cell
    assert names == {
        "plain": {"plain"},
        "view": {"base", "view"},
        "out": {"out.x", "out['x']"},
        "first": {"pair[0]"},
        "second": {"pair[1]"},
        "cell": {"cell"},
        "alias": names["alias"],  # by one way or the other
        "saved": set(),
        "taken": set(),
        "listed": set(),  # something else holds them too
    }
    assert {one.name for one in found[keys["alias"]]} == {"alias", "other"}
    assert sys.getrefcount(plain) == count, "nothing is kept"
    assert other["a"] is alias
    KEPT.clear()


@pytest.mark.slow
def test_memtools_run_says_it_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(64, 8192)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(8):\n"
        "    logits = model(torch.randn(512, 64))\n"
        "    loss = torch.nn.functional.cross_entropy(logits, torch.zeros(512).long())\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    print(loss.item())\n"
        "print(torch.utils._python_dispatch._get_current_dispatch_mode_stack())\n"
    )
    plain, told = (
        subprocess.run(
            [sys.executable, *command, "train.py"],
            cwd=tmp_path, capture_output=True, text=True, timeout=300,
        )
        for command in ((), ("-m", "memtools", "run"))
    )  # fmt: skip
    assert told.stdout == plain.stdout
    assert told.stdout.endswith("\n[]\n")
    assert (
        'nothing reads them again: logits (train.py:6); "del logits" before loss.backward() '
        "(train.py:8) makes the peak" in told.stderr
    )
    explained = subprocess.run(
        [sys.executable, "-m", "memtools", "explain", "run.mem"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    _, _, table = explained.stdout.partition("With one change of the program, the peak of step 5, ")
    assert "8 micro-batches, whose gradients are summed" in table
    assert '"del logits" before loss.backward() (train.py:8)' in table
    both, unknown = (
        subprocess.run(
            [sys.executable, "-m", "memtools", "explain", "--with", changes],
            cwd=tmp_path, capture_output=True, text=True, timeout=300,
        )
        for changes in ("del, micro-batches:8", "micro-batches:9")
    )  # fmt: skip
    assert both.stdout.startswith("With these changes together, the peak of 66.2 MiB becomes 10.2 ")
    assert "in the backward pass (aten." in both.stdout
    assert unknown.returncode == 2
    names = "the names are del, autocast, linear_cross_entropy, chunks:8, zero_grad, fused"
    assert names in unknown.stderr
