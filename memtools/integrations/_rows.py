"""How the batch of a Trainer is cut along its rows, and what makes its loss out of those of parts.

    rows of one block       a │ b │ c
    rows of two blocks      a 0 │ b 0 │ c 0     as DPO's: the chosen answers, then the rejected
                            a 1 │ b 1 │ c 1     ones; a part has a row of each

The rule is found by a look: the loss of two rows is compared with those of each. It is their sum
where the trainer has divided by `num_items_in_batch`, else a mean whose weights are the rows, or
one of the counts of tokens in the batch. A loss that is none of these is not cut.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memtools._base.oom import shortage
from memtools._base.torch import connect
from memtools._grad.undo import Buffers, RandomState

if TYPE_CHECKING:
    import torch
else:
    torch = connect().torch

#: Losses count as equal if they differ by this share of the largest. Rounding makes 1e-6, and in 16
#: bits up to 1e-2.
ROUNDING: Final = 1e-5
ROUNDING_16: Final = 2e-2
#: After so many pairs of rows no more are looked at.
_LOOKS: Final = 8
_SUM: Final = "the sum over its rows"
_ROWS: Final = "the mean over its rows"
_TOKENS_OF: Final = "the mean over the tokens of "
_TOKENS: Final = f"{_TOKENS_OF}'completion_mask'"
#: GRPOTrainer's loss_type. The others divide by num_items_in_batch.
_GRPO: Final = {"bnpo": _TOKENS} | dict.fromkeys(("grpo", "sapo", "dr_grpo", "luspo"), _ROWS)
_NO_RULE: Final = (
    "the loss of two of its rows is neither the sum of the losses of each nor their mean over rows "
    "or tokens"
)
IGNORED: Final = -100  # transformers' label for a token that has no loss


class UncuttableError(Exception):
    """A batch cannot be cut along its rows. The text is a clause that says why."""


class Rows:
    """The rows of a batch.

    Args:
        inputs: the batch of a trainer.
        blocks: how many rows of a tensor belong together.

    Attributes:
        count: the rows, or pairs of rows, that can be taken apart.
        blocks: as given.

    Raises UncuttableError if the batch is no dict, or has values with another number of rows.
    """

    def __init__(self, inputs: Any, blocks: int = 1) -> None:
        if not isinstance(inputs, Mapping):
            raise UncuttableError(f"its batch is a {type(inputs).__name__} and not a dict")
        self._inputs, self.blocks = inputs, blocks
        sizes = [_length(v) for v in inputs.values() if isinstance(v, torch.Tensor)]
        first = next(filter(None, sizes), 0)
        if not first or first % blocks:
            raise UncuttableError(f"its batch of {first} rows has no {blocks} equal blocks")
        self.count = first // blocks
        for name, value in inputs.items():
            if (size := _length(value)) not in (None, self.count, blocks * self.count):
                raise UncuttableError(f"{name!r} of its batch has {size} rows, and others {first}")

    @property
    def row_bytes(self) -> float:
        """The bytes of a row in the tensors, padding included."""
        tensors = (value for value in self._inputs.values() if isinstance(value, torch.Tensor))
        return sum(one.nbytes for one in tensors if one.dim()) / self.count

    def take(self, rows: Sequence[int] | slice) -> dict[str, Any]:
        """Return a batch of some of the rows."""
        return {name: self._take(value, rows) for name, value in self._inputs.items()}

    def _take(self, value: Any, rows: Sequence[int] | slice) -> Any:
        length = _length(value)
        if length is None:
            return value
        if isinstance(value, torch.Tensor) and length == self.count:
            return value[rows]
        blocks = [value[at : at + self.count] for at in range(0, length, self.count)]
        if isinstance(value, torch.Tensor):
            return torch.cat([block[rows] for block in blocks])
        at = range(self.count)[rows] if isinstance(rows, slice) else rows
        return [block[row] for block in blocks for row in at]

    @functools.cached_property
    def counts(self) -> dict[str, list[float]]:
        """What each row may count for in a mean, by the name of the rule. The first use waits for
        the device."""
        found = {}
        for name, value in self._inputs.items():
            if not isinstance(value, torch.Tensor) or value.dim() != 2:
                continue
            if name == "labels" or name.endswith("mask"):
                tokens = value != (IGNORED if name == "labels" else 0)
                for where, counted in ((" after the first", tokens[:, 1:]), ("", tokens)):
                    rows = counted.sum(1).view(-1, self.count).sum(0).tolist()
                    found[f"{_TOKENS_OF}{name!r}{where}"] = [float(n) for n in rows]
        return found | {_ROWS: [1.0] * self.count}

    def classes(self) -> dict[tuple[str, int], int]:
        """Return the first row of each class, by the name and value of a label that is a whole
        number. Waits for the device."""
        found: dict[tuple[str, int], int] = {}
        for name, value in self._inputs.items():
            if isinstance(value, torch.Tensor) and value.dim() == 1 and value.dtype == torch.int64:
                for row, label in enumerate(value[: self.count].tolist()):
                    found.setdefault((name, label), row)
        return found

    def units(self) -> list[float]:
        """Return what each row counts for in a mean over its tokens that have a loss, or 1."""
        labels = f"{_TOKENS_OF}'labels' after the first"
        return self.counts.get(labels) or self.counts.get(_TOKENS) or self.counts[_ROWS]


def _length(value: Any) -> int | None:
    """Return the number of rows of a value of a batch; None if it has none."""
    if isinstance(value, torch.Tensor):
        return len(value) if value.dim() else None
    return len(value) if isinstance(value, list) else None


class Rule(NamedTuple):
    """How the loss of a batch comes from those of its parts.

    Attributes:
        name: what the loss is, as a phrase.
        blocks: how many rows of a tensor belong together.
    """

    name: str
    blocks: int

    @property
    def is_mean(self) -> bool:
        """Whether it is a mean, and not a sum."""
        return self.name != _SUM

    def weights(self, rows: Rows) -> list[float]:
        """Return what each row counts for. A sum has no weights: 1 for each row."""
        return rows.counts[self.name] if self.is_mean else [1.0] * rows.count

    def share(self, part: Sequence[float], whole: Sequence[float]) -> float:
        """Return the factor of a part's loss, for the weights of its rows and those of all."""
        return sum(part) / (sum(whole) or 1.0) if self.is_mean else 1.0


def random_state(model: Any) -> RandomState:
    """The random numbers of the devices that a model is on, as they are now."""
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    return RandomState(devices)


@contextmanager
def looking(model: Any, *but: Any) -> Iterator[None]:
    """A look at a model's loss, without gradients and dropout. Its modes, buffers, counters and
    random numbers are as before when it ends. The modules `but` keep their modes meanwhile."""
    random, buffers = random_state(model), Buffers()
    buffers.save(model)
    modules = [module for module in model.modules() if module.training and module not in but]
    for module in modules:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in modules:
            module.training = True
        buffers.restore()
        random.restore()


def computes_coarsely(model: Any) -> bool:
    """Whether a model computes in 16 bits, or multiplies in fewer than 32."""
    is_half = any(p.dtype.itemsize < 4 for p in model.parameters())
    return is_half or torch.get_float32_matmul_precision() != "highest"


def documented(trainer: Any) -> str:
    """Return what the documentation of TRL says about the loss of a trainer; "" if it is not known.
    It decides where losses do not tell, as those of DPO before the first update, which are equal.
    """
    names = {kind.__name__ for kind in type(trainer).__mro__}
    if "GRPOTrainer" in names:
        return _GRPO.get(trainer.args.loss_type, _SUM)
    return _ROWS if names & {"DPOTrainer", "RLOOTrainer", "RewardTrainer"} else ""


class Rules:
    """The rules that the losses which were looked at allow.

    Args:
        loss_of: returns the loss of a batch, and changes nothing.
        is_coarse: whether losses are computed in 16 bits.
        documented: the name of the rule that decides where losses do not tell; "" if there is none.
    """

    def __init__(
        self, loss_of: Callable[[dict[str, Any]], float], is_coarse: bool, documented: str
    ) -> None:
        self._loss_of, self._documented = loss_of, documented
        self._rounding = ROUNDING_16 if is_coarse else ROUNDING
        self._left: list[Rule] = []
        self._looks = 0
        self._classes: set[tuple[str, int]] = set()  # whose rows were looked at

    def find(self, inputs: Any) -> Rule | None:
        """Return the rule for a batch; None if it has one row, or its losses are all 0 or equal and
        do not tell. Runs up to nine forward passes of one or two rows, mostly once in a run, and
        three for each class of labels that is new.

        Raises UncuttableError if no rule fits, or the batch cannot be cut.
        """
        if not self._left:
            self._left = self._first_fitting(inputs)
        elif self._looks < _LOOKS:
            rows = Rows(inputs, self._left[0].blocks)
            if self._differ(inputs) or rows.classes().keys() - self._classes:
                self._left = self._fitting(rows, self._left)
                if not self._left:
                    raise UncuttableError(_NO_RULE)
        known = [rule for rule in self._left if rule.name == self._documented]
        if known:
            self._left = known
        elif self._rounding == ROUNDING and self._left and self._differ(inputs):
            if self._looks >= _LOOKS:
                raise UncuttableError("the losses of its rows do not tell what its loss is")
            return None
        return self._left[0] if self._left and (known or self._looks) else None

    def _first_fitting(self, inputs: Any) -> list[Rule]:
        """Return the rules that fit for rows of one block, else of two; none for a single row."""
        batches, problem = [], None
        for blocks in (1, 2):
            try:
                batches.append(Rows(inputs, blocks))
            except UncuttableError as error:
                problem = problem or error
        if problem is not None and not batches:
            raise problem
        batches = [rows for rows in batches if rows.count > 1]
        for rows in batches:
            rules = [Rule(name, rows.blocks) for name in (_SUM, *rows.counts)]
            if fitting := self._fitting(rows, rules):
                return fitting
        if batches:
            raise UncuttableError(_NO_RULE)
        return []

    def _differ(self, inputs: Any) -> bool:
        """Whether the rules that are left cut this batch with different factors."""
        if len(self._left) < 2:
            return False
        rows = Rows(inputs, self._left[0].blocks)
        factors = []
        for rule in self._left:
            weights = rule.weights(rows)
            factors.append([rule.share([weight], weights) for weight in weights])
        return any(other != factors[0] for other in factors)

    def _fitting(self, rows: Rows, rules: list[Rule]) -> list[Rule]:
        """Return those rules by which the loss of two rows comes from the losses of each, for three
        pairs of rows, and a row of each new class with another: classes may have weights."""
        tokens = next(iter(rows.counts.values()))
        order = sorted(range(rows.count), key=tokens.__getitem__)
        classes = rows.classes()
        new = [row for kind, row in classes.items() if kind not in self._classes]
        self._classes |= classes.keys()
        pairs = [(order[0], order[-1]), (0, rows.count - 1), (0, 1)]
        pairs += [(0, row) for row in new[:_LOOKS]]
        for one, other in dict.fromkeys(pairs):
            if one == other or not rules:
                continue
            pair = self._loss(rows, one, other)
            each = self._loss(rows, one), self._loss(rows, other)
            largest = max(map(abs, (pair, *each)))
            self._looks += largest > 0
            fitting = []
            for rule in rules:
                weights = rule.weights(rows)
                both = weights[one], weights[other]
                made = sum(rule.share([w], both) * x for w, x in zip(both, each, strict=True))
                if abs(made - pair) <= self._rounding * largest:
                    fitting.append(rule)
            rules = fitting
        return rules

    def _loss(self, rows: Rows, *which: int) -> float:
        """Return the loss of these rows; nan, which fits no rule, if there is none."""
        try:
            return self._loss_of(rows.take(list(which)))
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            if shortage(error) is not None:
                raise
            return math.nan  # Half a pair, for example.
