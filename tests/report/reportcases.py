"""Records for the tests of the report and of explain, and the page taken apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import memtools
from memtools import _core
from memtools._base.peak import Large, Layer, Lowered, Part, PeakContents, Saver, Span, TracedPeak
from memtools._blocks.kept import kept
from memtools._blocks.lifetimes import BEFORE, Life, Op, Trace
from memtools._leak.advice import advice_for
from memtools._leak.finding import LeakFinding
from memtools._record.kinds import End, Event, payload

MIB = 2**20
COLUMNS = [("step", ""), *((name, "B") for name in (
    "rss", "private", "swap", "cgroup_used", "cgroup_limit", "available")), ("pressure", "0.01%"),
    ("heap_used", "B"), ("children", ""), ("children_private", "B")]  # fmt: skip
DEVICE = [(f"cuda0_{tier}", "B") for tier in ("allocated", "reserved", "free", "total")]
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"'><b>&amp;{{ 7*7 }}{% raw %}",
    "a\x1b[2J\x07b\x9b31m",
    "\u202egnp.exe\u2066 \u200b\ufeff\u2028\u2029",
    "<!--<script>",
    "]]> --> \\u003c/script",
]
START = 10**12
LEAK = LeakFinding(
    "leak", "heap", "step", 64.0 * 1024, 300, 255, "list MoEBlock.gate_history", "list",
    "1 new [128, 128] float32 tensor a step",
)  # fmt: skip
LEAK = replace(LEAK, advice=advice_for(LEAK))
FINISHED, SIGKILLED = End(code=0), End(signal="SIGKILL")


def event(one: Event | LeakFinding) -> tuple[str, bytes]:
    """Kind and payload, as memtools writes them."""
    kind = "finding" if isinstance(one, LeakFinding) else one.KIND
    return kind, payload(kind, one)


def write(
    path: str,
    *,
    steps: int = 3000,
    grows: int = 0,
    base: int = 300 * MIB,
    limit: int | None = 1024 * MIB,
    events: Sequence[Event | LeakFinding | tuple[str, str | bytes]] = (),
    device: bool = False,
    counted: bool = True,
    close: bool = True,
    sizes: dict[str, int] | None = None,
    command: tuple[str, ...] = ("python", "train.py", "--lr", "1"),
) -> str:
    """A run of one sample a step, 10 ms each, that grows by `grows` bytes a step."""
    columns = COLUMNS + (DEVICE if device else [])
    writer = _core.RecordWriter(path, columns, **(sizes or {}), command=list(command))
    origin = _origin(path)
    for step in range(steps):
        used = base + grows * step + (step * 7919 % 64) * 4096
        row = [step if counted else None, used, used - 50 * MIB, 0, used, limit, 9000 * MIB, 0]
        row += [used - 100 * MIB if step % 10 == 0 else None, 2, 20 * MIB]
        row += [used // 2, used, 2**34 - used, 2**34] if device else []
        writer.append(origin + step * 10_000_000, row)
    for i, one in enumerate(events):
        kind, body = one if isinstance(one, tuple) else event(one)
        writer.event(kind, body, step=i, time_ns=origin + i * 10**9)
    for start in range(3):
        begun = origin + start * 8 * 10**9
        writer.event("phase", "train", time_ns=begun, duration_ns=5 * 10**9)
        writer.phase("train", 5 * 10**9, base + MIB * start)
    writer.phase("eval", 10**9, base - MIB)
    if close:
        writer.close()
    else:
        abandon(writer, path)
    return path


def recorded(step: int, size: int, name: str = "0.weight", **more: Any) -> tuple[str, bytes]:
    """The event of a recorded step, whose peak of four sizes is in the second of four intervals."""
    over_step = {
        "layers": (
            Layer("parameters", (size, 0, 0, 0)),
            Layer("optimizer state", (0, 2 * size, 0, -size)),
            Layer("inputs", (0, 0, 0, 0)),
            Layer("not seen", (0, size, -size, 0)),
        ),
        "spans": (Span("forward", 1), Span("backward", 2), Span("optimizer", 1)),
        "largest": (Large(size, "parameters", "float32", (8, 9), name, "", ""),),
    }
    found = PeakContents(
        step, 4 * size, 0, "optimizer", "aten::sqrt", "train.py:31 in main", True,
        (Part("optimizer state", 2 * size, 4), Part("parameters", size, 2),
         Part("not seen", size, 0)),
        (Saver("Net.forward (net.py:3)", size, 7),),
        **(over_step | more),
    )  # fmt: skip
    return "peak", payload("peak", found)


def traced() -> TracedPeak:
    """A traced step: 40 MiB of parameters, and 20 MiB of temporaries of an optimizer at its end."""
    lives = (
        Life(0, 40 * MIB, BEFORE, 2, None, "between", "parameters"),
        Life(1, 20 * MIB, 2, 2, 3, "optimizer", "optimizer's temporaries"),
    )
    phases = {"aten.mm": "forward", "aten.t": "backward", "aten.sqrt": "optimizer"}
    ops = tuple(Op(name, phases[name], "", (), (0,)) for name in phases)
    changes = (
        Lowered("an optimizer with fused=True", 40 * MIB, "fused"),
        Lowered("nothing", 40 * MIB, "zero_grad"),
    )
    return TracedPeak(60 * MIB, changes=changes, kept=kept(Trace(lives, ops), {}))


def _origin(path: str) -> int:
    return memtools.read_record(path).clock_ns


def abandon(writer: _core.RecordWriter, path: str) -> None:
    """Leaves the file as a SIGKILL would: no end mark, and nobody who writes it."""
    with open(path, "rb") as file:
        left = file.read()
    writer.close()
    with open(path, "wb") as file:
        file.write(left)


class Page(HTMLParser):
    """A page taken apart: tags with attributes, texts by element, what was left open."""

    VOID = {"meta", "br", "link", "img", "rect", "input", "hr"}

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.parts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
            self.parts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1] != tag:
            self.wrong.append(tag)
        else:
            self.open.pop()

    def handle_data(self, text: str) -> None:
        for tag in set(self.open):
            self.parts[tag][-1] += text

    def text(self) -> str:
        """What a reader sees."""
        return " ".join(" ".join(self.parts.get("body", [])).split())

    @property
    def data(self) -> dict[str, Any]:
        """The JSON that the charts are drawn from."""
        found: dict[str, Any] = json.loads(self.parts["script"][0])
        return found
