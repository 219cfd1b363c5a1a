"""The log-probabilities that GRPOTrainer and RLOOTrainer compute of what they have sampled: without
gradients, and outside of `compute_loss`. TRL can cut them into parts of `batch_size` rows, and
takes those of the training batch. Here a part has no more rows than those of the training have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memtools._base.oom import shortage
from memtools._base.torch import connect
from memtools.integrations._ranks import is_sharded
from memtools.integrations._rows import random_state
from memtools.integrations.transformers._accumulation import Accumulation

if TYPE_CHECKING:
    import torch

    from memtools import MemoryMonitor
else:
    torch = connect().torch


class Scoring:
    """Replaces `trainer._get_per_token_logps_and_entropies` until `remove()`.

    Args:
        trainer: a GRPOTrainer or RLOOTrainer.
        monitor: its monitor, which gives idle memory back before rows are scored again.
        accumulation: knows how many rows fit.
    """

    busy = ""
    left: list[str] = []

    def __init__(self, trainer: Any, monitor: MemoryMonitor, accumulation: Accumulation) -> None:
        self._trainer, self._monitor, self._accumulation = trainer, monitor, accumulation
        self._plain = trainer._get_per_token_logps_and_entropies
        self._most: int | None = None  # rows, after memory has run out
        trainer._get_per_token_logps_and_entropies = self._log_probs

    @property
    def changed(self) -> list[str]:
        """What was changed, a sentence each."""
        if self._most is None:
            return []
        return [f"Log-probabilities are computed for at most {self._most:,} rows at once."]

    def remove(self) -> None:
        """Put the trainer's method back."""
        vars(self._trainer).pop("_get_per_token_logps_and_entropies", None)

    def _log_probs(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int,
        batch_size: int | None = None, *args: Any, **options: Any,
    ) -> Any:  # fmt: skip
        """As the trainer's method. Without gradients, in parts that fit."""
        inputs = model, input_ids, attention_mask, logits_to_keep
        if torch.is_grad_enabled() or is_sharded(model):  # whose ranks need as many passes each
            return self._plain(*inputs, batch_size, *args, **options)
        known = (batch_size, self._accumulation.rows, self._most, len(input_ids))
        rows = min(filter(None, known))
        before = random_state(model)
        while True:
            try:
                return self._plain(*inputs, rows, *args, **options)
            except Exception as error:
                if rows == 1 or shortage(error) is None:
                    raise
            rows = self._most = rows // 2
            self._monitor.cleanup_memory(aggressive=True)
            before.restore()
