"""The leak test once more, in numpy and from its description: the model that it is compared with.

Slow, keeps the whole series, and shares nothing with memtools/_leak.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
INF = float("inf")


@dataclass
class Window:
    blocks: int
    slope: float
    se: float
    end: float
    z: float
    rise: float
    even: float
    r: float
    snr: float
    neff: float
    front: float


def group_shape(g: Array) -> tuple[float, float, float]:
    rise = g[7] - g[0]
    if rise <= 0:
        return rise, -9.0, -9.0
    mid = (g[3] + g[4]) / 2
    return rise, 7 * np.diff(g).min() / rise, (g[7] - mid) / max(mid - g[0], 0.02 * rise + 1)


def window(b: Array) -> Window:
    m = len(b)
    x = np.arange(m) - (m - 1) / 2
    slope = (x @ (b - b.mean())) / (x @ x)
    res = b - b.mean() - slope * x
    square = res @ res
    rho = 0.0 if square == 0 else float(np.clip(res[1:] @ res[:-1] / square + 1.5 / m, 0, 0.95))
    se = float(np.sqrt(square / (m - 2) * (1 + rho) / (1 - rho) / (x @ x)))
    z = 0.0 if slope == 0 else slope / max(se, 1e-300)
    noise = max(100.0, 1.4826 * float(np.median(np.abs(res))))
    size = m // 8
    groups = b[m - 8 * size :].reshape(8, size)
    low, mid = group_shape(groups.min(1)), group_shape(np.median(groups, 1))
    rise, even, r = (min(pair) for pair in zip(low, mid, strict=True))
    jumps = np.diff(np.minimum.accumulate(b[::-1])[::-1])
    neff = 0.0 if not jumps.any() else jumps.sum() ** 2 / (jumps @ jumps)
    half = b[m - m // 2 :]
    h = np.arange(len(half)) - (len(half) - 1) / 2
    front = 0.0 if slope == 0 else (h @ (half - half.mean())) / (h @ h) / slope
    end = b.mean() + slope * (m - 1) / 2
    return Window(m, slope, se, end, z, rise, even, r, rise / noise, neff, front)


def windows(lows: Array) -> list[Window]:
    n = len(lows)
    return [window(lows[n - int(f * n) :]) for f in (3 / 4, 1 / 2, 1 / 4)]


def rule(w: list[Window], bar: float, span: float, length: float, slack: float) -> bool:
    a, b, c = w
    long = [x.rise > bar and x.blocks * length >= span for x in w]
    goes_on = c.slope >= (0.5 - slack) * a.slope
    even = a.neff >= 5 and a.even >= -0.2
    front = b.snr >= 8 and b.front >= 0.6
    late = c.z >= 4 and c.snr >= 6.5 and c.even >= -0.8
    if long[0] and a.z >= 4 and a.r >= 0.88 - slack and even and goes_on:
        return True
    if long[1] and b.r >= 0.90 - slack and a.r >= 0.76 - slack and front and goes_on:
        return True
    return long[2] and c.r >= 0.60 - slack and a.r >= 0.80 - slack and late


def blocks(y: Array) -> tuple[Array, Array, int]:
    """Lows and highs of whole blocks, and their length, after all of y."""
    length, n = 4, len(y) // 4
    while n >= 128:
        length, n = 2 * length, len(y) // (2 * length)
    whole = y[: n * length].reshape(n, length)
    return whole.min(1), whole.max(1), length


def regains(lows: Array, part: Array, length: int, level: float, rise: float) -> bool:
    """Whether a rise to `level` takes back what was given back. `part`: of the block that fills."""
    last = float(part.min()) if len(part) else INF
    after = np.minimum.accumulate(np.append(lows, last)[::-1])[::-1][1:]  # the least that follows
    tops = np.flatnonzero((lows >= level - 0.25 * rise) & (lows - after >= 0.9 * rise))
    if not len(tops):
        return False
    top, foot = tops[-1], after[tops[-1]]
    below = np.flatnonzero(lows <= foot + 0.1 * (level - foot))
    start = max(below[-1] if len(below) else len(lows) - 1, top)
    high = lows[top : start + 1].max()
    before = np.flatnonzero(lows[:top] <= foot + 0.1 * (high - foot))
    if len(before):
        tooth = float(start - before[-1])
    else:
        tooth = (start + 1) * float(np.clip((high - foot) / max(high - lows[0], 1), 1, 32))
    return len(lows) - 1 - start + len(part) / length <= 1.5 * tooth + 1


def ended(b: Array, n: int, longer: float) -> bool:
    """Whether the newest blocks b of n rise no more: no new level of twenty for too long."""
    first, step = b.min(), (b.max() - b.min()) / 20
    reached = np.minimum(np.floor((np.maximum.accumulate(b) - first) / step), 19) if step else b * 0
    times = np.flatnonzero(np.diff(reached, prepend=0) > 0)
    last = times[-1] if len(times) else 0
    longest = int(np.diff(times).max()) if len(times) > 1 else 0
    return bool(len(b) - last > n // 12 and len(b) - last > longer * longest)


def rising(w: list[Window], y: Array, bar: float) -> int | None:
    """The shortest window that grows into what was not in use before."""
    lows, _, length = blocks(y)
    part = y[len(lows) * length :]
    for i in (2, 1, 0):
        x = w[i]
        if not (x.rise > bar and x.z > 5 and x.snr > 2 and x.neff >= 5):
            continue
        noise = x.rise / x.snr
        if not regains(lows, part, length, x.end - noise, x.rise + noise):
            return i
    return None


def slows(w: list[Window], i: int) -> bool:
    if i < 2:
        return w[i].r < 0.4
    return w[2].snr >= 4 and w[2].r < 0.8 and w[1].r < 0.5


def changes(y: Array, bar: float, span: float = 1500) -> list[tuple[int, str]]:
    """(step, kind) wherever the kind changes; one signal, one reading a step from 0 on."""
    kind, found, lasting, nearly = "quiet", [(32, "quiet")], 0, 0
    floor, window = "quiet", 0
    for end in range(256, len(y) + 1):
        lows, _, length = blocks(y[:end]) if end % 4 == 0 else (y[:0], y[:0], 0)
        if length == 0 or end % length:
            continue
        if end % (8 * length) == 0:
            w = windows(lows)
            lasting = lasting + 1 if rule(w, bar, span, length, 0) else 0
            nearly = nearly + 1 if rule(w, bar, span * 2 / 3, length, 0.25) else 0
            i = rising(w, y[:end], bar)
            grows = i is not None and not slows(w, i)
            floor = ("likely" if nearly >= 2 else "growing") if grows else "quiet"
            floor = "leak" if lasting >= 3 else floor
            window = w[i or 0].blocks
        pause = 3 if floor == "leak" else 1.5
        over = floor != "quiet" and ended(lows[len(lows) - window :], len(lows), pause)
        new = "quiet" if over else floor
        if new != kind:
            kind = new
            found.append((end - 1, kind))
    return found


def straight(w: list[Window]) -> Window:
    near = [x for x in w[:2] if 0.8 <= x.r <= 1.25]
    return near[0] if near else w[2]


def forecast(y: Array, limit: float) -> tuple[float, float, float]:
    """Steps from the end of y on: lo, mid, hi."""
    lows, highs, length = blocks(y)
    w = windows(lows)
    best, n = straight(w), len(lows)
    s, u = best.slope, 2.5 * best.se + 0.1 * abs(best.slope)
    above = (highs - lows)[n - n // 2 :]
    jump = max(0.0, float(np.diff(lows[n - int(n * 3 / 4) :]).max()) - s)
    past = len(y) - n * length

    def steps(room: float, slope: float) -> float:
        if room <= 0:
            return 0.0
        return INF if slope <= 0 else max(0.0, room / slope * length - past)

    last = max(x.end for x in w)
    return (
        steps(limit - last - above.max() - jump, s + u),
        steps(limit - best.end - float(np.quantile(above, 0.9)), s),
        steps(limit - best.end - float(np.median(above)) / 2, s - u),
    )


def rate(y: Array) -> float:
    lows, _, length = blocks(y)
    return straight(windows(lows)).slope / length
