"""BudgetSampler: batches of so many tokens or nodes, in place of so many samples."""

from __future__ import annotations

import heapq
import itertools
import random
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from memtools._base.number import repr_of, shown, whole_number

#: This many samples are sorted by length together before padded batches are cut out of them.
_WINDOW = 1024
_COMPARED = ("samples", "checksum", "budget", "max_count", "padded", "shuffle", "seed", "drop_last",
             "num_replicas")  # fmt: skip


class BudgetSampler:
    """Batches of indices whose samples fit a budget of tokens, nodes or bytes, for
    `DataLoader(batch_sampler=...)`.

    Batches take about the same memory. Replicas get equal numbers of batches without common
    samples: the largest batches are split, and those that cannot be evened out are dropped.

    Args:
        lengths: the length of each sample: a list, an array or a tensor.
        budget: the most of a batch, in the unit of `lengths`.
        max_count: the most samples of a batch.
        padded: count a batch as its largest length times its samples, instead of the sum of its
            lengths; with `shuffle`, similar lengths are grouped in windows of 1,024 samples.
        shuffle: a random order of samples and batches, new in each epoch.
        seed: of the order, together with the epoch. The same on all replicas.
        drop_last: drop a last batch that another average sample would fit into, and batches beyond
            a multiple of `num_replicas`.
        num_replicas, rank: processes that share the batches, and this one. None: as in
            torch.distributed, else 1 and 0.

    Raises ValueError if a length is negative or above the budget.
    """

    def __init__(
        self,
        lengths: Iterable[int],
        budget: int,
        *,
        max_count: int | None = None,
        padded: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.budget = min(whole_number("budget", budget), sys.maxsize)
        self.max_count = None if max_count is None else whole_number("max_count", max_count)
        self.seed = whole_number("seed", seed, 0)
        self.padded, self.shuffle, self.drop_last = bool(padded), bool(shuffle), bool(drop_last)
        self.num_replicas, self.rank = _replicas(num_replicas, rank)
        self.lengths = _lengths(lengths, self.budget)
        self._total = sum(self.lengths)
        #: the next epoch
        self.epoch = 0
        self._begin_at = 0  # the batch that the next iteration begins with
        self._given = 0  # batches of this epoch that were given out
        self._plan: tuple[int, array[int], array[int]] | None = None

    # --- what a DataLoader uses ---------------------------------------------------------------

    def __len__(self) -> int:
        """How many batches this replica has in the epoch."""
        return (len(self._planned()[1]) - 1) // self.num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of this epoch, from where `load_state_dict()` left off if it was called."""
        order, starts = self._planned()
        begin, self._begin_at = self._begin_at, 0
        self._given = begin
        for number in range(begin, (len(starts) - 1) // self.num_replicas):
            self._given = number + 1
            at = number * self.num_replicas + self.rank
            yield order[starts[at] : starts[at + 1]].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Choose the `epoch`, and with `shuffle` its order, before each epoch.

        The epoch of a loaded state keeps its position; others start at their first batch.
        """
        epoch = whole_number("epoch", epoch, 0)
        if epoch != self.epoch:
            self._begin_at = self._given = 0
        self.epoch = epoch

    # --- stopping and going on ----------------------------------------------------------------

    def state_dict(self, done: int | None = None) -> dict[str, Any]:
        """Return the position in the epoch, for a checkpoint.

        Args:
            done: batches of this epoch that the loop has finished. None: all that were handed out,
                which with workers is more.
        """
        done = self._given if done is None else whole_number("done", done, 0)
        if done > len(self):
            raise ValueError(
                f"done must be at most {len(self):,}, the batches of the epoch, got {done:,}"
            )
        return {"epoch": self.epoch, "done": done, **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict()` returned `state`.

        Raises ValueError if it is of other lengths, another order or other settings. An error
        changes nothing.
        """
        if not isinstance(state, dict):
            raise TypeError(f"state must be the dict of a state_dict(), got {type(state).__name__}")
        for name, value in {"epoch": 0, "done": 0, **self._settings()}.items():
            if name not in state:
                raise ValueError(f"the state has no {name!r}; pass what state_dict() returned")
            if name == "checksum" and state[name] != value:
                raise ValueError(
                    "the state is of samples of other lengths, or in another order; pass the "
                    "lengths as they were, or begin the epoch again"
                )
            if name in _COMPARED and state[name] != value:
                raise ValueError(
                    f"the state is of a sampler with {name} {repr_of(state[name])}, and this one "
                    f"has {value!r}; make the sampler as it was, or begin the epoch again"
                )
        epoch = whole_number("epoch", state["epoch"], 0)
        done = whole_number("done", state["done"], 0)
        before, self.epoch = self.epoch, epoch
        if done > len(self):
            self.epoch = before
            raise ValueError(f"the state is after batch {done:,}, and the epoch has fewer")
        self._begin_at = self._given = done

    def _settings(self) -> dict[str, Any]:
        mine = {name: getattr(self, name, None) for name in _COMPARED}
        return mine | {"samples": len(self.lengths), "checksum": zlib.crc32(self.lengths)}

    def __repr__(self) -> str:
        samples = f"{len(self.lengths):,} samples"
        most = "" if self.max_count is None else f", at most {self.max_count:,} samples a batch"
        return f"BudgetSampler({samples}, budget {self.budget:,}{most}, epoch {self.epoch})"

    # --- the plan of an epoch -----------------------------------------------------------------

    def _planned(self) -> tuple[array[int], array[int]]:
        """The order of the samples, and where each batch starts in it, and the end."""
        epoch = self.epoch if self.shuffle else 0
        if self._plan is None or self._plan[0] != epoch:
            self._plan = (epoch, *self._make_plan(epoch))
        return self._plan[1], self._plan[2]

    def _make_plan(self, epoch: int) -> tuple[array[int], array[int]]:
        order = array("q", range(len(self.lengths)))
        draw = random.Random((self.seed << 64) + epoch)
        if self.shuffle:
            draw.shuffle(order)
        if self.shuffle and self.padded:
            for start in range(0, len(order), _WINDOW):
                window = sorted(order[start : start + _WINDOW], key=self.lengths.__getitem__)
                order[start : start + _WINDOW] = array("q", window)
        starts = self._cut(order)
        if self.shuffle and self.padded:  # or batches would come by length
            order, starts = _shuffled(order, starts, draw)
        return order, self._even(starts)

    def _cut(self, order: array[int]) -> array[int]:
        """Where each batch starts: the next sample that does not fit begins a new one."""
        most = self.max_count or sys.maxsize
        starts, total, longest, begin = array("q", [0]), 0, 0, 0
        for at, sample in enumerate(order):
            length = self.lengths[sample]
            total, longest = total + length, max(longest, length)
            used = longest * (at - begin + 1) if self.padded else total
            if used > self.budget or at - begin == most:
                starts.append(at)
                total, longest, begin = length, length, at
        if begin < len(order) and not (self.drop_last and self._has_room(order, begin)):
            starts.append(len(order))
        return starts

    def _has_room(self, order: array[int], begin: int) -> bool:
        """Whether one more sample of average length would fit into the last batch."""
        last = [self.lengths[sample] for sample in order[begin:]]
        if self.max_count is not None and len(last) >= self.max_count:
            return False
        mean = self._total / len(self.lengths)
        used = max(*last, mean) * (len(last) + 1) if self.padded else sum(last) + mean
        return used <= self.budget

    def _even(self, starts: array[int]) -> array[int]:
        """The same batches, their number a multiple of that of replicas: the largest are halved, or
        with `drop_last` and where none can be, the last ones are left out."""
        over = (len(starts) - 1) % self.num_replicas
        if over == 0:
            return starts
        missing = self.num_replicas - over
        sizes = [b - a for a, b in itertools.pairwise(starts)]
        spare = sum(sizes) - len(sizes)
        if self.drop_last or spare < missing:
            return starts[: len(starts) - over]
        largest = [(-size, begin) for size, begin in zip(sizes, starts, strict=False)]
        heapq.heapify(largest)
        for _ in range(missing):  # of equally large batches the first one
            size, begin = -largest[0][0], largest[0][1]
            half = (size + 1) // 2
            heapq.heapreplace(largest, (-half, begin))
            heapq.heappush(largest, (half - size, begin + half))
        return array("q", [*sorted(begin for _, begin in largest), starts[-1]])


def _shuffled(
    order: array[int], starts: array[int], draw: random.Random
) -> tuple[array[int], array[int]]:
    """The batches in another order."""
    numbers = list(range(len(starts) - 1))
    draw.shuffle(numbers)
    samples, cuts = array("q"), array("q", [0])
    for number in numbers:
        samples += order[starts[number] : starts[number + 1]]
        cuts.append(len(samples))
    return samples, cuts


def _lengths(lengths: Any, budget: int) -> array[int]:
    """The lengths as numbers of 8 bytes, each checked."""
    if isinstance(lengths, (str, bytes)) or not hasattr(lengths, "__iter__"):
        raise TypeError(f"lengths must be an iterable of int, got {type(lengths).__name__}")
    found = array("q")
    for index, length in enumerate(lengths.tolist() if hasattr(lengths, "tolist") else lengths):
        number = length
        if type(length) is not int or length < 0:
            number = whole_number(f"lengths[{index:,}]", length, 0)
        if number > budget:
            raise ValueError(
                f"sample {index:,} has a length of {shown(number)}, above the budget of "
                f"{budget:,} of a whole batch; raise the budget, or leave the sample out"
            )
        found.append(number)
    return found


def _replicas(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """How many processes share the samples, and which one this is."""
    if (num_replicas is None) != (rank is None):
        raise ValueError("pass both num_replicas and rank, or neither of them")
    if num_replicas is None:
        dist = sys.modules.get("torch.distributed")  # not loaded: there is no group
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return 1, 0
        return int(dist.get_world_size()), int(dist.get_rank())
    count, mine = whole_number("num_replicas", num_replicas), whole_number("rank", rank, 0)
    if mine >= count:
        raise ValueError(f"rank must be below num_replicas, got rank {mine:,} of {count:,}")
    return count, mine
