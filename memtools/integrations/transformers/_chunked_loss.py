"""The loss of a language model without its logits: `use(trainer, chunked_loss=True)`.

    model.forward()   base model ─► hidden ─► lm_head ─► logits ─► loss_function ─► loss
    with chunks       base model ─► hidden ──────────────────────► log_probs()   ─► loss

In training the head returns what it gets, and the loss function applies it, to some tokens at a
time. A model that changes its logits between the two has another loss then. So the first batch is
compared: its first row, both ways.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memtools import grad
from memtools._base.torch import connect
from memtools.integrations._ranks import will_shard
from memtools.integrations._rows import (
    IGNORED,
    ROUNDING,
    ROUNDING_16,
    Rows,
    UncuttableError,
    looking,
)

if TYPE_CHECKING:
    import torch
else:
    torch = connect().torch


class ChunkedLoss:
    """Replaces the head and the loss function of a trainer's model until `remove()`.

    Args:
        trainer: a transformers.Trainer.

    Attributes:
        why_not: why the loss is the model's own; "" while it is not.
    """

    busy = ""

    def __init__(self, trainer: Any) -> None:
        self.why_not = _why_no_chunks(trainer)
        self._is_checked = self._is_in_chunks = False
        self._hooks: list[Any] = []
        if self.why_not:
            return
        self._model, self._head = _model_of(trainer), _model_of(trainer).get_output_embeddings()
        self._loss, self._apply_head = self._model.loss_function, self._head.forward
        self._head.forward, self._model.loss_function = self._pass_on, self._loss_of
        self._hooks = [
            self._model.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._model.register_forward_hook(self._end, always_call=True),
        ]

    @property
    def changed(self) -> list[str]:
        """What was changed, a sentence each."""
        if self.why_not:
            return []
        return ["The loss is computed from the hidden states, without the logits of all tokens."]

    @property
    def left(self) -> list[str]:
        """What was left, and why, a sentence each."""
        return [f"The loss is the model's own: {self.why_not}."] if self.why_not else []

    def remove(self) -> None:
        """Put the model's head and loss function back."""
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            vars(self._head).pop("forward", None)
            vars(self._model).pop("_loss_function", None)
        self._hooks = []

    # --- in a forward pass ---

    def _begin(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        labels = kwargs.get("labels")
        wanted = model.training and torch.is_grad_enabled() and labels is not None and not args
        if wanted and not self._is_checked and not self.why_not:
            self._is_checked = True
            self.why_not = self._compared(kwargs)
        self._is_in_chunks = wanted and not self.why_not

    def _end(self, model: Any, args: Any, output: Any) -> None:
        if self._is_in_chunks and output is not None:
            output.logits = None  # They are hidden states.
        self._is_in_chunks = False

    def _pass_on(self, hidden: Any) -> Any:
        return hidden if self._is_in_chunks else self._apply_head(hidden)

    def _loss_of(self, logits: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_in_chunks:
            return self._loss(logits, labels, *args, **kwargs)
        shifted = kwargs.get("shift_labels")
        if shifted is None:
            shifted = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        head, shifted = self._head, shifted.to(logits.device)
        total = -grad.log_probs(logits, head.weight, shifted, bias=head.bias).sum()
        items = kwargs.get("num_items_in_batch")
        return total / ((shifted != IGNORED).sum() if items is None else items)

    def _compared(self, kwargs: dict[str, Any]) -> str:
        """Why the losses of the first row, both ways, are not the same; "" if they are."""
        model = self._model
        try:
            row = Rows(kwargs).take([0])
        except UncuttableError as error:
            return f"the first row of a batch cannot be taken, as {error}"
        losses = []
        try:
            with looking(model):
                for self._is_in_chunks in (False, True):
                    losses.append(float(type(model).forward(model, **row).loss))
        finally:
            self._is_in_chunks = False
        plain, ours = losses
        half = torch.is_autocast_enabled(self._head.weight.device.type)
        half = half or self._head.weight.dtype.itemsize < 4
        if abs(ours - plain) <= (ROUNDING_16 if half else ROUNDING) * max(1.0, abs(plain)):
            return ""
        return (
            f"the loss of the first row is {plain:.6g}, and {ours:.6g} from its hidden states, as "
            f"{type(model).__name__} changes its logits or adds to its loss"
        )


def _model_of(trainer: Any) -> Any:
    """The model of a trainer, without the adapters around it."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _why_no_chunks(trainer: Any) -> str:
    """Why the loss of a trainer cannot be computed in chunks, as a clause; "" if it can."""
    own = next(kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind))
    model = _model_of(trainer)
    if own.__module__ != "transformers.trainer":
        chunks = ": loss_type='chunked_nll' has chunks" * (own.__name__ == "SFTTrainer")
        return f"{own.__name__} has its own compute_loss(){chunks}"
    if trainer.label_smoother is not None or trainer.compute_loss_func is not None:
        return "label smoothing and compute_loss_func take logits"
    if will_shard(trainer):
        return "each process has a part of the head's weight"
    kind = getattr(getattr(model, "loss_function", None), "__name__", "")
    if kind != "ForCausalLMLoss":
        return f"{type(model).__name__} is no causal language model of transformers"
    if type(model.get_output_embeddings()) is not torch.nn.Linear:
        return "the head of the model is no nn.Linear"
    return "the model is compiled" if trainer.args.torch_compile else ""
