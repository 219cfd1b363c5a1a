"""Draws the picture beside it: python docs/symptoms/allocated_and_reserved.py

It writes allocated_and_reserved.svg: the memory of a device, and what each program shows of it.
"""

from __future__ import annotations

from pathlib import Path

WIDTH, LEFT, BAR, HEIGHT = 760, 20, 720, 44
#: the parts of a device of 24 GiB, from the left: name, GiB, colour
PARTS = (
    ("tensors", 14, "#2f6fab"),
    ("freed, kept for reuse", 6, "#8db8dd"),
    ("others", 2, "#d9a441"),
    ("free", 2, "#e8e8e8"),
)
#: what each tool calls a stretch of them: name, first part, last part, who shows it
SPANS = (
    ("allocated", 0, 0, "torch.cuda.memory_allocated()"),
    ("reserved", 0, 1, "torch.cuda.memory_reserved()"),
    ("in use", 0, 2, "nvidia-smi; of one process without what other programs take"),
    ("total", 0, 3, "torch.cuda.mem_get_info()[1]"),
)
TOTAL = sum(size for _, size, _ in PARTS)


def edge(part: int) -> float:
    """Where a part begins, in points from the left."""
    return LEFT + BAR * sum(size for _, size, _ in PARTS[:part]) / TOTAL


def text(x: float, y: float, words: str, size: int = 13, style: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}"{style}>{words}</text>'


def drawing() -> str:
    height = 110 + 52 * len(SPANS)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        ' font-family="sans-serif" fill="#222">',
        "<title>What allocated, reserved and in use mean, of a device of 24 GiB</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        text(LEFT, 24, "A device of 24 GiB in the middle of a training step"),
    ]
    for number, (name, size, colour) in enumerate(PARTS):
        x, width = edge(number), edge(number + 1) - edge(number)
        lines.append(
            f'<rect x="{x:.0f}" y="36" width="{width:.0f}" height="{HEIGHT}" fill="{colour}"'
            ' stroke="#ffffff"/>'
        )
        style = f' text-anchor="middle" fill="{"#ffffff" if number == 0 else "#222222"}"'
        lines.append(text(x + width / 2, 54, name, 12, style))
        lines.append(text(x + width / 2, 70, f"{size} GiB", 11, style))
    for row, (name, first, last, source) in enumerate(SPANS):
        y, x, end = 112 + 52 * row, edge(first), edge(last + 1)
        size = sum(size for _, size, _ in PARTS[first : last + 1])
        lines.append(f'<path d="M{x:.0f} {y - 6} v6 H{end:.0f} v-6" fill="none" stroke="#444"/>')
        lines.append(text(x, y + 20, f"{name}: {size} GiB"))
        lines.append(text(x + 130, y + 20, source, 12))
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(drawing())
