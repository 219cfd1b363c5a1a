"""Made-up memory series: twelve families that do not leak, and four kinds of leaks on nine of them.

Every series is drawn from its own seed, so that number 17 of a family is the same wherever it is
made. Figures are in MiB inside, and bytes (float64) in `Series.bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Rng = np.random.Generator
MIB = 2.0**20

NOISES = ("white", "ar1", "spikes", "quantised", "skewed")
LEAKS = ("step", "epoch", "late", "lumps")
RATES = (2, 5, 20, 50, 200)  # MiB in 1,000 steps


@dataclass(frozen=True)
class Series:
    """A series of bytes, one number a step."""

    family: str
    bytes: Array
    #: an alarm up to this step is true: a buffer fills
    settled: int = 0
    #: None, or one of LEAKS
    leak: str | None = None
    #: MiB in 1,000 steps
    rate: float = 0.0
    onset: int = 0
    #: bytes leaked by the end
    leaked: float = 0.0
    #: bytes: how the floor of 64 steps scatters about lines of 1,024 steps, without the leak
    floor_noise: float = 1.0


# --- building blocks ------------------------------------------------------------------------------


def loguniform(rng: Rng, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def autoregressive(rng: Rng, n: int, phi: float) -> Array:
    """An AR(1) of standard deviation 1, in its steady state from the first sample on."""
    past = min(n, int(12 / -np.log(phi)) + 1)
    white, kernel = rng.standard_normal(n + past), phi ** np.arange(past)
    size = 2 * (n + past)
    product = np.fft.rfft(white, size) * np.fft.rfft(kernel, size)
    whole: Array = np.fft.irfft(product, size)[past : past + n]
    scaled: Array = whole * np.sqrt(1 - phi**2)
    return scaled


def noise(rng: Rng, n: int, kind: str, sd: float) -> Array:
    """Noise of a kind; 2 MiB quanta are made of the sum, in `finish`."""
    if kind == "ar1":
        return sd * autoregressive(rng, n, rng.uniform(0.5, 0.98))
    if kind == "spikes":
        high = rng.exponential(5 * sd, n) * (rng.random(n) < 0.03)
        spiky: Array = 0.3 * sd * rng.standard_normal(n) + high
        return spiky
    if kind == "skewed":
        shape = rng.uniform(0.5, 3)
        skewed: Array = sd / np.sqrt(shape) * (rng.gamma(shape, size=n) - shape)
        return skewed
    return sd * rng.standard_normal(n)


def finish(rng: Rng, y: Array) -> Array:
    """Noise and a level; bytes."""
    kind = NOISES[rng.integers(len(NOISES))]
    y = y + noise(rng, len(y), kind, loguniform(rng, 0.1, 8)) + rng.uniform(500, 4000)
    if kind == "quantised":
        y = 2 * np.round(y / 2)
    return np.round(np.maximum(y, 0) * MIB)


def floor_noise(y: Array) -> float:
    """Bytes; see Series. At least one byte."""
    lows = y[: len(y) // 64 * 64].reshape(-1, 64).min(1)
    parts = lows[: len(lows) // 16 * 16].reshape(-1, 16)
    x = np.arange(16) - 7.5
    slopes = parts @ x / (x @ x)
    rest = parts - parts.mean(1, keepdims=True) - slopes[:, None] * x
    return max(1.0, float(np.sqrt((rest**2).sum() / (14 * len(parts)))))


# --- families -------------------------------------------------------------------------------------


def flat(rng: Rng, n: int) -> Array:
    return np.zeros(n)


def warm(rng: Rng, n: int) -> Array:
    y, t = np.zeros(n), np.arange(n)
    for _ in range(rng.integers(1, 4)):
        y += loguniform(rng, 20, 800) * (1 - np.exp(-t / loguniform(rng, 15, n / 5)))
    return y


def saw(rng: Rng, n: int) -> Array:
    period, high = loguniform(rng, 5, n / 4), loguniform(rng, 5, 200)
    y: Array = high * ((np.arange(n, dtype=np.float64) + rng.uniform(0, period)) / period % 1)
    return y


def spikes(rng: Rng, n: int) -> Array:
    """An evaluation every few hundred steps, and a checkpoint now and then."""
    y = np.zeros(n)
    for least, most in ((100, 1000), (400, 2000)):
        every, width = int(loguniform(rng, least, most)), int(loguniform(rng, 1, 30))
        phase = rng.integers(every)
        y += loguniform(rng, 20, 400) * ((np.arange(n) + phase) % every < width)
    return y


def steps(rng: Rng, n: int) -> Array:
    y = np.zeros(n)
    for _ in range(rng.integers(1, 7)):
        sign = 1 if rng.random() < 0.7 else -1
        y[rng.integers(n) :] += sign * loguniform(rng, 5, 200)
    return y


def walk(rng: Rng, n: int) -> Array:
    """A wander with a memory of 20 to 1,000 steps, or a random walk between two walls."""
    memory, high = loguniform(rng, 20, n / 8), loguniform(rng, 2, 60)
    if rng.random() < 0.5:
        return high * autoregressive(rng, n, float(np.exp(-1 / memory)))
    free = np.cumsum(rng.standard_normal(n)) / np.sqrt(memory) + rng.uniform(0, 2)
    folded: Array = high * np.abs((free + 1) % 4 - 2)
    return folded


def filling(rng: Rng, n: int) -> tuple[Array, int]:
    """To a cap, in a straight line or slower and slower; and the step at which it is full."""
    t, begin = np.arange(n), int(rng.uniform(0, 0.2) * n)
    full = begin + int(rng.uniform(0.05, 0.6) * n)
    share = np.clip((t - begin) / (full - begin), 0, 1)
    if rng.random() < 0.5:
        bend = rng.uniform(1, 4)
        share = (1 - np.exp(-bend * share)) / (1 - np.exp(-bend))
    return loguniform(rng, 20, 2000) * share, full


def fill(rng: Rng, n: int) -> Array:
    return filling(rng, n)[0]


def phase(rng: Rng, n: int) -> Array:
    """A second program begins: another level, another warm-up."""
    y, at = warm(rng, n), int(rng.uniform(0.15, 0.85) * n)
    y[at:] += rng.uniform(-200, 400) + warm(rng, n - at)
    return y


def hiwater(rng: Rng, n: int) -> Array:
    """The greatest so far of random peaks: an allocator that keeps what it once had."""
    every, high = int(loguniform(rng, 1, 100)), loguniform(rng, 5, 100)
    peaks = np.zeros(n)
    peaks[::every] = (
        rng.exponential(high, len(peaks[::every]))
        if rng.random() < 0.5
        else high * np.abs(rng.standard_normal(len(peaks[::every])))
    )
    return np.maximum.accumulate(peaks)


def log(rng: Rng, n: int) -> Array:
    return loguniform(rng, 5, 200) * np.log1p(np.arange(n) / loguniform(rng, 10, n / 16))


def sqrt(rng: Rng, n: int) -> Array:
    return loguniform(rng, 20, 800) * np.sqrt(np.arange(n) / n)


def mix(rng: Rng, n: int) -> Array:
    return warm(rng, n) + saw(rng, n) + steps(rng, n) + spikes(rng, n)


FAMILIES: dict[str, Callable[[Rng, int], Array]] = {
    f.__name__: f
    for f in (flat, warm, saw, spikes, steps, walk, fill, phase, hiwater, log, sqrt, mix)
}
BASES = ("flat", "warm", "saw", "spikes", "steps", "walk", "phase", "hiwater", "mix")


# --- series ---------------------------------------------------------------------------------------


def leak_free(family: str, seed: int, number: int, n: int = 8000) -> Series:
    """Number `number` of a family; n steps."""
    rng = np.random.default_rng([seed, 0, list(FAMILIES).index(family), number])
    if family == "fill":
        y, full = filling(rng, n)
        begin = int(np.argmax(y > 0))
        return Series(family, finish(rng, y), settled=full + (full - begin) // 2)
    return Series(family, finish(rng, FAMILIES[family](rng, n)))


def growth(rng: Rng, n: int, leak: str, rate: float) -> tuple[Array, int]:
    """MiB leaked so far at each step, and the first step that leaks."""
    t, each = np.arange(n, dtype=float), rate / 1000
    if leak == "late":
        onset = int(rng.uniform(0.2, 0.6) * n)
        return each * np.maximum(0, t - onset), onset
    if leak == "epoch":
        every = int(loguniform(rng, 50, 600))
        return each * every * ((t + rng.integers(every)) // every), 0
    if leak == "lumps":
        often = loguniform(rng, 0.01, 0.3)
        lumps = (rng.random(n) < often) * rng.exponential(each / often, n)
        return np.cumsum(lumps), 0
    return each * t, 0


def leaking(base: str, leak: str, rate: float, seed: int, number: int, n: int = 8000) -> Series:
    """A leak of `rate` MiB in 1,000 steps on a series of a family."""
    where = [BASES.index(base), LEAKS.index(leak), int(rate), number]
    rng = np.random.default_rng([seed, 1, *where])
    leaked, onset = growth(rng, n, leak, rate)
    below = finish(rng, FAMILIES[base](rng, n))
    y = below + np.round(leaked * MIB)
    total = float(leaked[-1] - leaked[0]) * MIB
    return Series(base, y, 0, leak, rate, onset, total, floor_noise(below))


def leak_free_library(seed: int, each: int, n: int = 8000) -> Iterator[Series]:
    """`each` series of every family."""
    for family in FAMILIES:
        for number in range(each):
            yield leak_free(family, seed, number, n)


def leaking_library(seed: int, each: int, n: int = 8000) -> Iterator[Series]:
    """`each` series of every base, kind of leak and rate: 180 times `each`."""
    for base in BASES:
        for leak in LEAKS:
            for rate in RATES:
                for number in range(each):
                    yield leaking(base, leak, rate, seed, number, n)
