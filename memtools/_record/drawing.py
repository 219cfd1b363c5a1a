"""The parts of a record's picture for notebooks, as HTML and SVG without a script.

    a record ──► its texts and numbers ──► heading, tiles, graph, table ... ──► card

Whatever becomes part of a picture as text is escaped here, by the function that takes it: names and
paths may come from anywhere. Each function returns HTML, and `card` alone takes HTML.

A picture has neither ids, style sheets nor scripts: it disturbs no other cell, and stays the same
when the notebook is saved. Text has the notebook's own colour, and the colours of lines are dark
enough for white paper and light enough for black: so it is light or dark as the notebook is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from memtools._base.size import format_bytes
from memtools._base.text import duration, shown

#: of lines, each 3 to 1 at least against white and against the black of dark notebooks
COLOURS = {
    "s0": "#2f7de1", "s1": "#0f9488", "s2": "#9a62e0", "s3": "#d9730d", "s4": "#c8489f",
    "s5": "#6b8f1a", "s6": "#a06c3a", "s7": "#7a8aa3", "limit": "#dc3f3f", "bad": "#dc3f3f",
    "warn": "#c77700", "good": "#2e9455", "accent": "#2f7de1",
}  # fmt: skip
SOFT = "opacity:.7"
GREY = "rgba(127,127,127,.3)"
#: the coordinates of a graph, in which one unit is no fixed size on the screen
WIDE, HIGH = 720, 200
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})
#: characters that an image in a URL may have as they are, inside of quotes "
_SAFE = " =:/;,.()-'"
CUT = 400  # characters of one text: a name in a record may be as long as somebody likes


class Curve(NamedTuple):
    """A line of a graph: its points (x, least, most), in the graph's own units."""

    name: str
    colour: str
    points: Sequence[tuple[float, float, float]]


class Span(NamedTuple):
    """A passage: from where to where on the graph's x axis."""

    start: float
    end: float


def escape(text: str) -> str:
    """The text as HTML: control characters shown as such, and cut where it is very long."""
    return shown(cut(text, CUT)).translate(_ESCAPES)


def cut(text: str, most: int) -> str:
    """The text in at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def card(*parts: str) -> str:
    """A picture of these parts, top down. It is not searched for formulas: names may have `$`."""
    style = "font-size:13px;line-height:1.5;max-width:800px;overflow-wrap:anywhere"
    return (
        f'<div class="tex2jax_ignore mathjax_ignore" style="{style}">'
        f"{''.join(part for part in parts if part)}</div>"
    )


def heading(name: str, badge: str, colour: str) -> str:
    """The first line: the name, and before it in a frame how things stand."""
    style = (
        f"border:1.5px solid {COLOURS[colour]};border-radius:5px;padding:0 6px;"
        "margin-right:8px;white-space:nowrap"
    )
    frame = f'<span style="{style}">{escape(badge)}</span> '
    return f'<div style="font-weight:600;margin:2px 0">{frame}{escape(name)}</div>'


def line(text: str, *, soft: bool = False, colour: str = "") -> str:
    """A line of text, with a bar of this colour at its left; nothing of no text."""
    if not text:
        return ""
    style = f"margin:2px 0;{SOFT}" if soft else "margin:2px 0"
    if colour:
        style += f";border-left:3px solid {COLOURS[colour]};padding-left:7px"
    return f'<div style="{style}">{escape(text)}</div>'


def title(text: str) -> str:
    return f'<div style="font-weight:600;margin:8px 0 2px">{escape(text)}</div>'


def tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    """Figures side by side: name, value, and a remark in small letters."""
    cells = [
        f'<div style="border:1px solid {GREY};border-radius:6px;padding:3px 9px;flex:1 1 120px;'
        f'min-width:0"><div style="font-size:11px;{SOFT}">{escape(name)}</div>'
        f'<div style="font-weight:600;font-size:15px">{escape(value)}</div>'
        f'<div style="font-size:11px;{SOFT}">{escape(remark)}</div></div>'
        for name, value, remark in figures
    ]
    style = "display:flex;flex-wrap:wrap;gap:6px;margin:6px 0"
    return f'<div style="{style}">{"".join(cells)}</div>'


def table(rows: Sequence[Sequence[str]], head: Sequence[str], right: Sequence[int]) -> str:
    """A table: the cells of each row, the names of the columns, and the indexes of the columns that
    are aligned to the right."""
    side = {True: "right", False: "left"}

    def cells(row: Sequence[str], kind: str, more: str) -> str:
        return "".join(
            f'<{kind} style="text-align:{side[i in right]};padding:1px 14px 1px 0;'
            f'border:0;vertical-align:top;white-space:pre-wrap{more}">{escape(cell)}</{kind}>'
            for i, cell in enumerate(row)
        )

    named = f"<tr>{cells(head, 'th', ';font-weight:400;' + SOFT)}</tr>"
    body = "".join(f'<tr style="background:none">{cells(row, "td", "")}</tr>' for row in rows)
    style = "border-collapse:collapse;border:0;color:inherit;margin:2px 0;font-size:12px"
    return (
        f'<div style="overflow-x:auto"><table style="{style};table-layout:auto">'
        f"<tbody>{named}{body}</tbody></table></div>"
    )


def legend(names: Iterable[tuple[str, str]]) -> str:
    """Names with the key of their colours."""
    items = [
        f'<span style="margin-right:14px;white-space:nowrap"><span style="display:inline-block;'
        f"width:14px;height:4px;border-radius:2px;vertical-align:middle;margin-right:5px;"
        f'background:{COLOURS[colour]}"></span>{escape(name)}</span>'
        for name, colour in names
    ]
    return f'<div style="font-size:12px;display:flex;flex-wrap:wrap">{"".join(items)}</div>'


def graph(
    label: str,
    curves: Sequence[Curve],
    end: float,
    *,
    level: tuple[str, float] | None = None,
    marks: Sequence[tuple[float, str, str]] = (),
    lanes: Sequence[tuple[str, Sequence[Span]]] = (),
) -> str:
    """Bytes over seconds, from 0 to `end`: a line for each curve, and a band where least and most
    differ.

    Args:
        label: what it shows, for those who cannot see it.
        curves: x is seconds, y bytes.
        end: seconds at the right end.
        level: the name and the bytes of a line across it: a limit.
        marks: seconds, key of the colour and text of what is marked by a vertical line.
        lanes: names and passages (seconds) below it, one row for each.
    """
    values = [most for curve in curves for _, _, most in curve.points]
    floor = min((least for curve in curves for _, least, _ in curve.points), default=0.0)
    low, top = _scale(floor, max([*values, level[1] if level else 0.0], default=0.0))
    end = end or 1.0

    def place(seconds: float, value: float) -> str:
        x, y = WIDE * seconds / end, HIGH * (top - value) / (top - low)
        return f"{min(WIDE, max(0, x)):.0f} {min(HIGH, max(0, y)):.0f}"

    drawn = [_stroke(f"M0 {y}H{WIDE}", GREY, 1) for y in (0, HIGH // 2, HIGH)]
    tips = []
    for seconds, colour, text in marks:
        part = min(1.0, max(0.0, seconds / end))
        drawn.append(_stroke(f"M{WIDE * part:.0f} 0V{HIGH}", COLOURS[colour], 1.5, dash="3 3"))
        tips.append(
            f'<div title="{escape(text)}" style="position:absolute;top:0;bottom:0;width:9px;'
            f'left:calc({100 * part:.1f}% - 4px)"></div>'
        )
    for curve in curves:
        drawn += _drawn_curve(curve, place)
    names = [(curve.name, curve.colour) for curve in curves]
    if level is not None:
        y = HIGH * (top - level[1]) / (top - low)
        drawn.append(_stroke(f"M0 {y:.0f}H{WIDE}", COLOURS["limit"], 1.5, dash="7 4"))
        names.append((f"{level[0]} {format_bytes(level[1])}", "limit"))
    plot = _drawing(label, (WIDE, HIGH), 170, drawn)
    plot = f'<div style="position:relative;overflow:hidden">{plot}{"".join(tips)}</div>'
    return _framed(plot, (low, top), end, lanes) + legend(names)


def _drawing(label: str, size: tuple[int, int], height: int, parts: Sequence[str]) -> str:
    """SVG as an image, `height` pixels high and as wide as there is room: notebooks that are not
    trusted show images, and no SVG beside them."""
    from urllib.parse import quote

    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
        f'preserveAspectRatio="none">{"".join(parts)}</svg>'
    )
    url = f"data:image/svg+xml,{quote(svg.replace(chr(34), chr(39)), safe=_SAFE)}"
    style = f"display:block;width:100%;max-width:none;margin:0;height:{height}px"
    return f'<img alt="{escape(label)}" style="{style}" src="{url}"/>'


def _framed(
    plot: str,
    scale: tuple[float, float],
    end: float,
    lanes: Sequence[tuple[str, Sequence[Span]]],
) -> str:
    """The drawing with the texts of its axes about it, which keep their size at any width."""
    low, top = scale
    ticks = "".join(
        f"<div>{escape(format_bytes(value))}</div>" for value in (top, (top + low) / 2, low)
    )
    side = f"width:84px;flex:none;text-align:right;padding-right:6px;font-size:11px;{SOFT}"
    rows = [
        f'<div style="display:flex;margin:8px 0 0"><div style="{side};display:flex;'
        'flex-direction:column;justify-content:space-between;height:188px;margin:-9px 0">'
        f'{ticks}</div><div style="flex:1;min-width:0">{plot}</div></div>'
    ]
    for name, spans in lanes:
        path = f'<path d="{"".join(_passages(spans, end))}" fill="{COLOURS["s7"]}"/>'
        lane = _drawing(f"passages of {name}", (WIDE, 10), 10, [path])
        rows.append(
            f'<div style="display:flex;margin:9px 0 -6px"><div title="{escape(name)}" '
            f'style="{side};overflow:hidden;text-overflow:ellipsis;white-space:nowrap">'
            f'{escape(name)}</div><div style="flex:1;min-width:0;align-self:center">{lane}</div>'
            "</div>"
        )
    times = "".join(f"<div>{escape(duration(end * part))}</div>" for part in (0, 0.5, 1))
    rows.append(
        f'<div style="display:flex;justify-content:space-between;margin:9px 0 4px 84px;'
        f'font-size:11px;{SOFT}">{times}</div>'
    )
    return "".join(rows)


def _passages(spans: Sequence[Span], end: float) -> Iterable[str]:
    """Those that are one on a screen are drawn as one: so a lane is short, whatever it holds."""
    cell = WIDE / 240
    last: list[int] = []
    for span in sorted(spans):
        first = int(min(WIDE, max(0.0, WIDE * span.start / end)) / cell)
        beyond = max(first + 1, int(min(WIDE, max(0.0, WIDE * span.end / end)) / cell))
        if last and first <= last[1]:
            last[1] = max(last[1], beyond)
            continue
        if last:
            yield f"M{last[0] * cell:g} 0h{(last[1] - last[0]) * cell:g}v10H{last[0] * cell:g}z"
        last = [first, beyond]
    if last:
        yield f"M{last[0] * cell:g} 0h{(last[1] - last[0]) * cell:g}v10H{last[0] * cell:g}z"


def _drawn_curve(curve: Curve, place: Callable[[float, float], str]) -> list[str]:
    colour = COLOURS[curve.colour]
    if not curve.points:
        return []
    line = "L".join(place(x, most) for x, _, most in curve.points)
    drawn = []
    if any(least != most for _, least, most in curve.points):
        back = "L".join(place(x, least) for x, least, _ in reversed(curve.points))
        drawn.append(f'<path d="M{line}L{back}z" fill="{colour}" fill-opacity=".25"/>')
    return [*drawn, _stroke(f"M{line}", colour, 1.6)]


def _stroke(path: str, colour: str, width: float, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashes} '
        f'stroke-linejoin="round" vector-effect="non-scaling-stroke"/>'
    )


def _scale(least: float, most: float) -> tuple[float, float]:
    """From where to where the y axis goes: from 0, unless all that is drawn lies in the upper half
    and would be flat; but an eighth of it at least, or noise would look like much. In steps that
    are whole in binary units."""
    low = 0.0 if least < most / 2 else min(least, most - most / 8)
    spread = max(1.0, most - low)
    step = 1.0
    while step * 8 < spread:
        step *= 2
    low = step * (low // step)
    steps = max(2, -int(-(most - low) // step))
    return low, low + step * (steps + steps % 2)
