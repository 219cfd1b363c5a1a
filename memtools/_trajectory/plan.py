"""Which steps and samples each chunk of an epoch has: the same for the same seed, everywhere.

       samples ─►                      groups of samples x pieces of time; shuffled:
time   ┌──────┬──────┐                   1. the samples, before they are grouped
 │     │  0   │  2   │                   2. the chunks
 ▼     ├──────┼──────┤                 An epoch's order is made of the seed and the number of
       │  1   │  3   │                 the epoch alone, so it can be resumed anywhere.
       └──────┴──────┘
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, NamedTuple

from memtools._base import torch as bridge
from memtools._base.number import whole_number

#: Shuffling swaps samples whose lengths differ by less than this part of the longest one.
SIMILAR = 8


class Piece(NamedTuple):
    """The steps and the samples of a chunk."""

    steps: range
    samples: tuple[int, ...]
    weight: int  #: samples, or tokens, of all steps together


class Plan:
    """How a rollout is cut into chunks."""

    __slots__ = (
        "_lengths",
        "_max_tokens",
        "_samples",
        "_seed",
        "_shuffle",
        "_size",
        "_steps",
        "_time_steps",
        "chunks_per_epoch",
    )

    def __init__(
        self,
        num_steps: int,
        num_samples: int,
        *,
        time_steps: int | None,
        samples: int | None,
        max_tokens: int | None,
        lengths: Any,
        shuffle: bool,
        seed: int,
    ) -> None:
        """Raises TypeError and ValueError as `TrajectoryStore.epochs()` says."""
        if not isinstance(shuffle, bool):
            raise TypeError(f"shuffle must be True or False, got {type(shuffle).__name__}")
        if samples is not None and max_tokens is not None:
            raise ValueError(
                "samples are counted by number or by tokens; pass samples or max_tokens"
            )
        if (lengths is None) != (max_tokens is None):
            raise ValueError("max_tokens needs the lengths of the samples; pass both or neither")
        self._steps, self._samples = num_steps, num_samples
        self._time_steps = (
            num_steps if time_steps is None else whole_number("time_steps", time_steps)
        )
        self._size = num_samples if samples is None else whole_number("samples", samples)
        self._max_tokens = None if max_tokens is None else whole_number("max_tokens", max_tokens)
        self._lengths: tuple[int, ...] | None = None
        if self._max_tokens is not None:
            self._lengths = _whole_lengths(lengths, num_samples, self._max_tokens)
        self._shuffle, self._seed = shuffle, whole_number("seed", seed, None)
        pieces = -(-num_steps // self._time_steps)
        #: chunks of each epoch
        self.chunks_per_epoch = pieces * len(self._groups(None))

    @property
    def is_of_neighbours(self) -> bool:
        """Whether the samples of each chunk follow each other, so that a chunk can be a view."""
        if self._lengths is None and (self._size >= self._samples or not self._shuffle):
            return True
        return self._samples <= 1

    @property
    def largest(self) -> tuple[int, int]:
        """The most steps and the most samples that a chunk may have."""
        steps = min(self._time_steps, self._steps)
        if self._lengths is None:
            return steps, min(self._size, self._samples)
        return steps, self._most_samples()

    def _most_samples(self) -> int:
        """As many of the shortest samples as fit into one chunk."""
        count = tokens = 0
        for length in sorted(self._lengths or ()):
            tokens += length
            if tokens > (self._max_tokens or 0):
                break
            count += 1
        return count

    def as_json(self) -> dict[str, Any]:
        """Everything that an order depends on, to compare two plans."""
        return {
            "num_steps": self._steps,
            "num_samples": self._samples,
            "time_steps": self._time_steps,
            "samples": self._size,
            "max_tokens": self._max_tokens,
            "lengths": None if self._lengths is None else list(self._lengths),
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def chunks(self, epoch: int) -> list[Piece]:
        """The chunks of an epoch, in its order."""
        order = random.Random(f"{self._seed}/{epoch}") if self._shuffle else None
        spans = [
            range(start, min(start + self._time_steps, self._steps))
            for start in range(0, self._steps, self._time_steps)
        ]
        found = [
            Piece(span, group, len(span) * self._units(group))
            for group in self._groups(order)
            for span in spans
        ]
        if order is not None:
            order.shuffle(found)
        return found

    def _units(self, group: tuple[int, ...]) -> int:
        return len(group) if self._lengths is None else sum(self._lengths[i] for i in group)

    def _groups(self, order: random.Random | None) -> list[tuple[int, ...]]:
        """The samples of each chunk; as many groups in each order."""
        samples = list(range(self._samples))
        if self._lengths is not None and self._max_tokens is not None:
            return balanced(self._lengths, self._max_tokens, order)
        if self._size >= self._samples:  # all of them: their order does not matter
            return [tuple(samples)]
        if order is not None:
            order.shuffle(samples)
        return [
            tuple(samples[start : start + self._size])
            for start in range(0, self._samples, self._size)
        ]


def balanced(
    lengths: tuple[int, ...], most: int, order: random.Random | None
) -> list[tuple[int, ...]]:
    """Groups of samples of at most `most` tokens together, as few as were found and of nearly the
    same size: the longest samples first, each into the group that has least.

    Args:
        lengths: tokens of each sample, at most `most` of each.
        most: tokens of a group.
        order: what shuffles samples of a similar length; None: the order of their numbers. It does
            not change how many groups there are.
    """
    by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    count = max(1, -(-sum(lengths) // most))
    while (plain := _shared_out(lengths, by_length, count, most)) is None:
        count += 1
    if order is None:
        return plain
    step = max(1, max(lengths, default=1) // SIMILAR)
    drawn = sorted(by_length, key=lambda i: (-(lengths[i] // step), order.random()))
    return _shared_out(lengths, drawn, count, most) or plain


def _shared_out(
    lengths: tuple[int, ...], samples: list[int], count: int, most: int
) -> list[tuple[int, ...]] | None:
    """The samples in so many groups, in the order of their numbers in each; None where a group
    would have too much."""
    groups: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for i in samples:
        emptiest = min(range(count), key=sums.__getitem__)
        if sums[emptiest] + lengths[i] > most:
            return None
        groups[emptiest].append(i)
        sums[emptiest] += lengths[i]
    return [tuple(sorted(group)) for group in groups if group]


def _whole_lengths(lengths: Any, samples: int, most: int) -> tuple[int, ...]:
    """The tokens of each sample. Raises TypeError and ValueError."""
    torch = bridge.connect().torch
    if isinstance(lengths, torch.Tensor):
        lengths = lengths.tolist()
    if not isinstance(lengths, Iterable):
        raise TypeError(f"lengths are whole numbers, one a sample, got {type(lengths).__name__}")
    given = list(lengths)
    if len(given) != samples:
        raise ValueError(f"lengths has {len(given)} numbers for {samples} samples")
    found = list[int]()
    for i, length in enumerate(given):
        is_round = isinstance(length, float) and length.is_integer()
        found.append(whole_number(f"lengths[{i}]", int(length) if is_round else length, 0))
        if found[-1] > most:
            raise ValueError(
                f"sample {i} has {found[-1]:,} tokens, more than max_tokens {most:,}; raise "
                "max_tokens, or cut the sample"
            )
    return tuple(found)
