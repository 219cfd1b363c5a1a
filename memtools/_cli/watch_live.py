"""The live view of `memtools watch`, drawn by rich in the current width of the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from memtools._base.text import count
from memtools._cli.frame import Device, Frame, known

LEVELS = " ▁▂▃▄▅▆▇█"
STEPS, ROWS = len(LEVELS) - 1, 3  # levels of a character, and rows of characters
FULL, FREE = "█", "░"
NEAR, TIGHT = 0.75, 0.9  # shares of the limit
PHASES, EVENTS = 6, 6
LEAST_BAR = 8


def colour(share: float) -> str:
    return "red" if share >= TIGHT else "yellow" if share >= NEAR else "green"


class Bar:
    """A bar of parts, each in its colour, as wide as there is room."""

    def __init__(self, *parts: tuple[float, str]) -> None:
        self._parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, done, text = max(LEAST_BAR, options.max_width), 0, Text(no_wrap=True)
        for share, style in self._parts:
            cells = max(0, min(width, round(share * width)) - done)
            text.append(FULL * cells, style)
            done += cells
        text.append(FREE * (width - done), "bright_black")
        yield text


class Sparkline:
    """A series drawn in the available width. It begins at zero, so that growth looks as large as it
    is."""

    def __init__(self, series: list[int], limit: int | None) -> None:
        self._series = series
        top = max(series, default=0)
        self._near = limit is not None and top >= NEAR * limit
        self._top = (limit if self._near and limit else top) or 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, many = options.max_width, len(self._series)
        if many > width:
            edges = [i * many // width for i in range(width + 1)]
            shown = [max(self._series[a:b]) for a, b in pairwise(edges)]
        else:
            shown = self._series
        for row in reversed(range(ROWS)):
            text = Text(no_wrap=True)
            for value in shown:
                share = min(1.0, value / self._top)
                level = round(share * ROWS * STEPS) - row * STEPS
                style = colour(share) if self._near else "cyan"
                text.append(LEVELS[max(0, min(STEPS, level))], style)
            yield text


def bars(frame: Frame) -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1, min_width=LEAST_BAR)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    share = frame.share or 0.0
    grid.add_row("host", Bar((share, colour(share))), frame.bar_words())
    for device in frame.devices:
        grid.add_row(device.name, device_bar(device), device_words(device))
    if frame.series:
        grid.add_row(
            "", Sparkline(frame.series, frame.limit), f"peak {known(frame.figures.used_peak_bytes)}"
        )
    return grid


def device_bar(device: Device) -> Bar:
    """A bar of allocated memory, then of what is reserved beyond it, then of other use."""
    if not device.total:
        return Bar()
    total = device.total
    free = total if device.free is None else device.free
    parts = (device.allocated or 0, device.reserved or 0, total - free)
    share = parts[-1] / total
    styles = (colour(share), "blue", "bright_black")
    return Bar(*((part / total, style) for part, style in zip(parts, styles, strict=True)))


def device_words(device: Device) -> str:
    if device.allocated is None:
        return "no context yet"
    return f"{known(device.allocated)} in {known(device.reserved)} of {known(device.total)}"


def facts(frame: Frame) -> Text:
    figures = frame.figures
    parts = [f"{figures.seconds:,.1f} s"]
    if figures.steps:
        pace = figures.steps / figures.seconds if figures.seconds else 0.0
        parts.append(f"{figures.steps:,} steps ({pace:,.1f}/s)")
    if figures.workers is not None:
        parts.append(count(figures.workers.last_count, "worker"))
    if frame.pressure_percent:
        parts.append(f"stalled {frame.pressure_percent:.0f}%")
    return Text("\n".join(["   ".join(parts), figures.now(), figures.peaks()]))


def phases(frame: Frame) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("phase", no_wrap=True)
    for name in ("times", "seconds", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    for phase in sorted(frame.figures.phases, key=lambda phase: -phase.seconds)[:PHASES]:
        peak = known(phase.peak_bytes)
        table.add_row(phase.name, f"{phase.count:,}", f"{phase.seconds:,.2f}", peak)
    return table


def leaks(frame: Frame) -> Text:
    guard = frame.figures.guard_words()
    lines = frame.leak + ([guard] if guard else [])
    if not lines:
        return Text("no growth seen", "green")
    return Text("\n".join(lines), "bold red" if frame.leaking else "yellow")


def events(frame: Frame) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", style="bright_black", no_wrap=True)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for event in frame.events[-EVENTS:]:
        grid.add_row(f"{event.seconds:,.1f} s", event.kind, Text(event.text))
    return grid


def drawn(frame: Frame) -> RenderableType:
    style = {"running": "green", "ended": "blue", "killed": "bold red"}[frame.state]
    parts: list[RenderableType] = [facts(frame), Text(), bars(frame), Text(), leaks(frame)]
    if frame.figures.phases:
        parts += [Text(), phases(frame)]
    if frame.events:
        parts += [Text(), events(frame)]
    figures = frame.figures
    title = Text.assemble((figures.path, "bold"), f"  {figures.command}  (process {figures.pid})")
    title.truncate(100, overflow="ellipsis")
    return Panel(
        Group(*parts), title=title, title_align="left", subtitle=Text(frame.state_words(), style)
    )


@contextmanager
def live() -> Iterator[Callable[[Frame], None]]:
    """Draw over the whole screen; the last frame stays when that is left."""
    console = Console()
    last: list[Frame] = []
    try:
        with Live(console=console, screen=True, auto_refresh=False) as screen:

            def show(frame: Frame) -> None:
                last[:] = [frame]
                screen.update(drawn(frame), refresh=True)

            yield show
    finally:
        for frame in last:
            console.print(drawn(frame))


def print_once(frame: Frame) -> None:
    Console().print(drawn(frame))
