"""GateStats: what the gates of a mixture-of-experts layer did."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Entries, tokens, non-finite tokens, sum of gates and load of each expert, as memtools._core
#: counts them.
Sums = tuple[int, int, int, list[float], list[int]]


def _cv(values: list[float]) -> float:
    mean = math.fsum(values) / len(values) if values else 0.0
    if mean == 0.0:
        return 0.0
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    return math.sqrt(variance) / abs(mean)


def _entropy(values: list[float]) -> float:
    total = math.fsum(values)
    shares = [value / total for value in values if value > 0] if total > 0 else []
    return math.fsum(-share * math.log(share) for share in shares)


@dataclass(frozen=True, slots=True)
class GateStats:
    """Statistics of entries of a GateHistory, accumulated in float64 and integers.

    E is the number of experts and k the history's `top_k`. A token with a NaN or an infinity counts
    only in `tokens` and `nonfinite_tokens`. Entropies are in nats.
    """

    entries: int  #: appended tensors
    tokens: int  #: their rows
    nonfinite_tokens: int  #: rows with a NaN or an infinity
    top_k: int  #: k
    importance: tuple[float, ...]  #: [E] mean gate of each expert over the finite tokens
    load: tuple[int, ...]  #: [E] tokens with the expert among their k largest gates

    @classmethod
    def _from_sums(cls, sums: Sums, top_k: int) -> GateStats:
        entries, tokens, nonfinite, importance, load = sums
        finite = max(1, tokens - nonfinite)
        means = tuple(value / finite for value in importance)
        return cls(entries, tokens, nonfinite, top_k, means, tuple(load))

    @property
    def n_experts(self) -> int:
        """E; 0 before the first entry."""
        return len(self.load)

    @property
    def load_fraction(self) -> tuple[float, ...]:
        """[E] each expert's share of the load; sums to 1, or all 0 without tokens."""
        total = max(1, sum(self.load))
        return tuple(count / total for count in self.load)

    @property
    def entropy(self) -> float:
        """Shannon entropy of `load_fraction`, 0 if one expert has all, log(E) if balanced."""
        return _entropy([float(count) for count in self.load])

    @property
    def importance_entropy(self) -> float:
        """Shannon entropy of the normalised `importance`."""
        return _entropy(list(self.importance))

    @property
    def cv(self) -> float:
        """Coefficient of variation of the load; 0 if balanced. Its square is the load loss of
        Shazeer et al. 2017 (arXiv:1701.06538)."""
        return _cv([float(count) for count in self.load])

    @property
    def importance_cv(self) -> float:
        """Coefficient of variation of the importance; its square is the importance loss of that
        paper."""
        return _cv(list(self.importance))

    @property
    def max_violation(self) -> float:
        """The largest load over the mean load, minus 1, which is MaxVio of Wang et al. 2024
        (arXiv:2408.15664); 0 if balanced, E/k - 1 if every token goes to the same k experts."""
        mean = sum(self.load) / max(1, len(self.load))
        return max(self.load) / mean - 1.0 if mean > 0 else 0.0

    @property
    def dead_experts(self) -> tuple[int, ...]:
        """Indices of experts without a token; empty before the first token."""
        if self.tokens == self.nonfinite_tokens:
            return ()
        return tuple(expert for expert, count in enumerate(self.load) if count == 0)

    def __str__(self) -> str:
        dead = len(self.dead_experts)
        return (
            f"{self.tokens:,} tokens in {self.entries:,} entries, {self.n_experts} experts: "
            f"load entropy {self.entropy:.3f} of {math.log(max(1, self.n_experts)):.3f} nats, "
            f"cv {self.cv:.3f} and max violation {self.max_violation:.3f} of the mean load, "
            f"{dead} dead experts"
        )
